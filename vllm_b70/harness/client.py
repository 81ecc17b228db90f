"""An asynchronous client for ``/v1/completions`` that trades in token ids only.

Text is never compared: two different token sequences can decode to the same text, and a fallback
to text would turn a missing field into a passing proof.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx


class HarnessError(Exception):
    """Anything that keeps the harness from reaching a verdict; the message is for the user."""


class ServerError(HarnessError):
    """The server could not be reached, stopped, timed out or answered with an HTTP error.

    Attributes:
        died: the connection was refused or broken off, as by a server that has stopped.
        status: the HTTP status, or None when there was no answer.
    """

    def __init__(self, message: str, *, died: bool = False, status: int | None = None) -> None:
        super().__init__(message)
        self.died = died
        self.status = status


class ResponseError(HarnessError):
    """The server answered, but without what a proof needs (token ids, logprobs by token id)."""


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: generated token ids.
        logprobs: natural-log probability of each generated token. The server's float32 values,
            widened without rounding, so equality of these floats is equality of those bits.
        top2_gap: best minus second-best logprob at each position (a near-tie is close to 0).
        finish_reason: as reported by the server, for example ``length``.
        prompt_tokens: prompt length that the server counted.
        cached_tokens: prompt tokens taken from a prefix cache; None when the server does not say.
        elapsed_s: seconds from sending the request to having the whole answer.
    """

    token_ids: list[int]
    logprobs: list[float]
    top2_gap: list[float]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int | None
    elapsed_s: float


def normalise_base_url(base_url: str) -> str:
    """Return ``base_url`` without a trailing slash or ``/v1``.

    Raises:
        ValueError: not an http or https address.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{base_url!r} is not an http address such as http://127.0.0.1:8000")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_loopback(base_url: str) -> bool:
    """Whether the address is this machine, which no configured proxy can reach for us."""
    return urlsplit(base_url).hostname in ("127.0.0.1", "localhost", "::1")


class Client:
    """A client for one model on one server. Use it as an asynchronous context manager.

    Args:
        base_url: address of the server, with or without ``/v1``.
        model: the served model's name.
        timeout_s: seconds allowed for each request, from sending to the whole answer.
        transport: for tests; replaces the network.

    Raises:
        ValueError: ``base_url`` is not an http address, or ``timeout_s`` is not positive.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"a timeout of {timeout_s} s leaves no time for an answer")
        self.base_url = normalise_base_url(base_url)
        self.model = model
        self.timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            timeout=timeout_s,
            transport=transport,
            trust_env=not is_loopback(self.base_url),
            # A fresh connection for each request: on a kept one, the server's idle time-out can
            # race with the next request and look like a dead server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """Send one prompt greedily and return its ``max_tokens`` tokens (EOS is ignored).

        Raises:
            ServerError: no connection, no answer in time, or an HTTP error status.
            ResponseError: an answer without token ids or without logprobs keyed by token id.
        """
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "stream": False,
        }
        start = time.perf_counter()
        answer = await self._request("POST", "/v1/completions", body)
        return parse_completion(answer, prompt, time.perf_counter() - start)

    async def metrics(self) -> str:
        """Return the text of ``/metrics``.

        Raises:
            ServerError: as for `complete`.
        """
        return (await self._send("GET", "/metrics", None)).text

    async def max_model_len(self) -> int | None:
        """Return the model's longest sequence in tokens, or None when the server does not say.

        Raises:
            ServerError: as for `complete`.
            ResponseError: the server does not serve this model.
        """
        answer = await self._request("GET", "/v1/models", None)
        cards = answer.get("data") if isinstance(answer, dict) else None
        cards = [card for card in cards or [] if isinstance(card, dict)]
        for card in cards:
            if card.get("id") == self.model:
                length = card.get("max_model_len")
                return length if isinstance(length, int) else None
        names = ", ".join(str(card.get("id")) for card in cards) or "none"
        raise ResponseError(
            f"The server at {self.base_url} does not serve {self.model!r}; it serves: {names}."
        )

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        response = await self._send(method, path, body)
        try:
            return response.json()
        except ValueError as error:
            raise ResponseError(
                f"The server at {self.base_url} answered {path} with something that is not JSON."
            ) from error

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            response = await self._http.request(method, self.base_url + path, json=body)
        except httpx.ConnectError as error:
            raise ServerError(
                f"The server at {self.base_url} refused the connection: it is not running "
                f"or has stopped ({_detail(error)}).",
                died=True,
            ) from error
        except httpx.TimeoutException as error:
            raise ServerError(
                f"The server at {self.base_url} did not answer {path} within "
                f"{self.timeout_s:g} seconds."
            ) from error
        except httpx.TransportError as error:
            raise ServerError(
                f"The server at {self.base_url} broke off the connection during a request: "
                f"it has probably stopped ({_detail(error)}).",
                died=True,
            ) from error
        if response.status_code != 200:
            raise ServerError(
                f"The server at {self.base_url} answered {path} with HTTP status "
                f"{response.status_code}: {_error_text(response)}",
                status=response.status_code,
            )
        return response


def _detail(error: Exception) -> str:
    return str(error) or type(error).__name__


def _error_text(response: httpx.Response) -> str:
    """Return the server's own message, shortened to one line of 300 characters."""
    message: Any = response.text
    try:
        answer = response.json()
        if isinstance(answer, dict):
            inner = answer.get("error")
            message = inner.get("message") if isinstance(inner, dict) else answer.get("message")
            message = message or response.text
    except ValueError:
        pass
    text = " ".join(str(message).split())
    return text[:300] or "no message"


def parse_completion(answer: Any, prompt: Sequence[int], elapsed_s: float) -> Completion:
    """Turn the JSON of ``/v1/completions`` into a `Completion`.

    Raises:
        ResponseError: token ids or logprobs are missing, disagree, or are not keyed by token id;
            or the server says that it saw another prompt.
    """
    try:
        choice = answer["choices"][0]
    except (KeyError, IndexError, TypeError) as error:
        raise ResponseError("The response holds no choices.") from error
    token_ids = choice.get("token_ids")
    if not isinstance(token_ids, list) or not all(_is_id(token) for token in token_ids):
        raise ResponseError(
            "The response holds no token ids (choices[0].token_ids): "
            "this server cannot be compared; text is not a substitute."
        )
    seen = choice.get("prompt_token_ids")
    if seen is not None and list(seen) != list(prompt):
        raise ResponseError("The server reports another prompt than the one sent to it.")
    logprobs, gaps = _parse_logprobs(choice.get("logprobs"), token_ids)
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        top2_gap=gaps,
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=int(usage.get("prompt_tokens") or len(prompt)),
        cached_tokens=details.get("cached_tokens"),
        elapsed_s=elapsed_s,
    )


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_logprobs(logprobs: Any, token_ids: Sequence[int]) -> tuple[list[float], list[float]]:
    if not isinstance(logprobs, dict):
        raise ResponseError("The response holds no logprobs although they were asked for.")
    chosen: Any = logprobs.get("token_logprobs")
    tops: Any = logprobs.get("top_logprobs")
    for name, values in (("token_logprobs", chosen), ("top_logprobs", tops)):
        if not isinstance(values, list) or len(values) != len(token_ids):
            raise ResponseError(f"logprobs.{name} does not have one entry per generated token.")
    values_out: list[float] = []
    gaps: list[float] = []
    for position, (token, value, top) in enumerate(zip(token_ids, chosen, tops, strict=True)):
        if not isinstance(value, int | float) or not isinstance(top, dict):
            raise ResponseError(f"The token at position {position} has no logprob.")
        if f"token_id:{token}" not in top:
            # Decoded text as a key is ambiguous: two tokens of equal text would merge.
            raise ResponseError(
                f"logprobs.top_logprobs at position {position} is not keyed by "
                f"token id (no 'token_id:{token}')."
            )
        ranked = sorted(top.values(), reverse=True)
        if len(ranked) < 2:
            raise ResponseError(
                f"logprobs.top_logprobs at position {position} holds fewer than two tokens."
            )
        values_out.append(float(value))
        gaps.append(float(ranked[0] - ranked[1]))
    return values_out, gaps
