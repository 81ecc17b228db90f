import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_vllm import FakeServer, true_token

from vllm_b70.harness.client import (
    Client,
    Completion,
    HarnessError,
    ResponseError,
    ServerError,
    normalise_base_url,
    parse_completion,
)

Start = Callable[..., FakeServer]


def ask(base_url: str, prompt: list[int], timeout_s: float = 60.0) -> Completion:
    async def run() -> Completion:
        async with Client(base_url, "tiny", timeout_s=timeout_s) as client:
            return await client.complete(prompt, 12)

    return asyncio.run(run())


def test_a_completion_is_read_whole(fake: Start) -> None:
    server = fake(cached_tokens=2)
    answer = ask(server.base_url + "/v1/", [4, 5, 6])
    assert answer.token_ids == [true_token([4, 5, 6], position) for position in range(12)]
    assert answer.logprobs == [-0.1 - (token % 7) / 8 for token in answer.token_ids]
    assert answer.top2_gap == pytest.approx([0.01, *[1.0] * 9, 0.01, 1.0])
    assert (answer.finish_reason, answer.prompt_tokens, answer.cached_tokens) == ("length", 3, 2)
    assert answer.elapsed_s > 0


def test_the_request_asks_for_token_ids_greedily(fake: Start) -> None:
    server = fake()
    assert ask(server.base_url, [4]).cached_tokens is None
    assert server.engine.bodies == [
        {
            "model": "tiny",
            "prompt": [4],
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "stream": False,
        }
    ]


def test_missing_token_ids_are_an_error_although_there_is_text(fake: Start) -> None:
    with pytest.raises(ResponseError, match="token ids"):
        ask(fake(mode="no_ids").base_url, [4])


def test_logprobs_keyed_by_text_are_an_error(fake: Start) -> None:
    with pytest.raises(ResponseError, match="not keyed by token id"):
        ask(fake(mode="text_keys").base_url, [4])


def good_answer() -> dict[str, Any]:
    return {
        "choices": [
            {
                "token_ids": [7],
                "logprobs": {
                    "token_logprobs": [-0.25],
                    "top_logprobs": [{"token_id:7": -0.25, "token_id:8": -1.25}],
                },
            }
        ]
    }


def test_the_smallest_good_answer() -> None:
    answer = parse_completion(good_answer(), [1, 2], 0.5)
    assert (answer.token_ids, answer.logprobs, answer.top2_gap) == ([7], [-0.25], [1.0])
    assert (answer.prompt_tokens, answer.elapsed_s) == (2, 0.5)


def spoil(**changes: Any) -> dict[str, Any]:
    answer = good_answer()
    answer["choices"][0].update(changes)
    return answer


def logprobs(chosen: Any, top: Any) -> dict[str, Any]:
    return {"token_logprobs": chosen, "top_logprobs": top}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"choices": []},
        spoil(token_ids=["7"]),
        spoil(token_ids=[True]),
        spoil(token_ids=[-7]),
        spoil(token_ids=[7, 7]),
        spoil(logprobs=None),
        spoil(prompt_token_ids=[1, 2, 3]),
        spoil(logprobs=logprobs([None], [None])),
        spoil(logprobs=logprobs([-0.25], None)),
        spoil(logprobs=logprobs([-0.25], [{"token_id:7": -0.25}])),
        spoil(logprobs=logprobs([-0.25], [{"token_id:6": -0.25, "token_id:8": -1.0}])),
    ],
)
def test_spoiled_answers_are_errors(answer: Any) -> None:
    with pytest.raises(ResponseError):
        parse_completion(answer, [1, 2], 0.5)


@pytest.mark.parametrize("status", [400, 500])
def test_http_errors_carry_the_servers_reason_in_one_line(fake: Start, status: int) -> None:
    with pytest.raises(ServerError, match="no, thank you") as caught:
        ask(fake(mode=f"http{status}").base_url, [4])
    assert (caught.value.status, caught.value.died) == (status, False)
    assert "\n" not in str(caught.value)


def test_a_refused_connection_is_a_dead_server(free_port: int) -> None:
    with pytest.raises(ServerError, match="refused the connection") as caught:
        ask(f"http://127.0.0.1:{free_port}", [4])
    assert caught.value.died


def test_a_broken_connection_is_a_dead_server(fake: Start) -> None:
    with pytest.raises(ServerError, match="broke off") as caught:
        ask(fake(mode="drop").base_url, [4])
    assert caught.value.died


def test_a_server_that_never_answers_times_out(fake: Start) -> None:
    with pytest.raises(ServerError, match="did not answer .* within 0.2 seconds") as caught:
        ask(fake(mode="hang").base_url, [4], timeout_s=0.2)
    assert not caught.value.died


def test_the_model_must_be_served(fake: Start) -> None:
    async def run(model: str) -> int | None:
        async with Client(fake().base_url, model) as client:
            return await client.max_model_len()

    assert asyncio.run(run("tiny")) == 512
    with pytest.raises(ResponseError, match="it serves: tiny"):
        asyncio.run(run("large"))


def test_addresses() -> None:
    assert normalise_base_url("http://host:1/v1/") == "http://host:1"
    assert normalise_base_url("https://host") == "https://host"
    for wrong in ("host:8000", "ftp://host", "", "http://"):
        with pytest.raises(ValueError, match="not an http address"):
            normalise_base_url(wrong)
    with pytest.raises(ValueError, match="timeout"):
        Client("http://host", "tiny", timeout_s=0)
    assert issubclass(ServerError, HarnessError)
