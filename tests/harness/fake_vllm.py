"""A fake vLLM: an engine that advances all running requests by a step, behind OpenAI-style HTTP.

Nothing in it depends on time. Requests are counted off in phases (the oracle, then one phase a
level), and the engine takes no step in a phase before as many requests have arrived as the phase
holds, so every level is reached however slow the machine is.

Started as a program it takes vLLM's arguments. ``FAKE_PLAN`` is then a JSON object from the name
of the cell (the stem of the step trace file) to the options of `Engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

VOCABULARY = 1000


def true_token(prompt: list[int], position: int, salt: str = "") -> int:
    """The token that a server that is exact generates at ``position``."""
    digest = hashlib.sha256(f"{salt}{prompt}{position}".encode()).digest()
    return 10 + int.from_bytes(digest[:4], "little") % (VOCABULARY - 20)


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    done: asyncio.Event
    tokens: list[int] = field(default_factory=list)
    started: bool = False


@dataclass
class Engine:
    """What the server does.

    ``mode``: ``exact``; ``load`` (other tokens in company); ``naive`` (other tokens always, and
    yet others in company); ``logprobs`` (other logprobs in company); ``other`` (other tokens
    always); ``periodic``; ``short``; ``no_ids``; ``text_keys``; ``hang``; ``drop`` (breaks off
    connections); ``http400``; ``http500``; ``die`` (the process ends).
    ``after``: number of requests served well before ``drop``, ``die`` and the HTTP errors set in.
    ``accept``: accepted drafts per step, or None for a varying number.
    """

    mode: str = "exact"
    holds: list[int] = field(default_factory=list)
    phase_size: int = 6
    after: int = 0
    depth: int = 0
    schedule: list[list[int]] | None = None
    accept: int | None = None
    trace: Path | None = None
    cached_tokens: int | None = None
    gauge: int | None = None

    def __post_init__(self) -> None:
        self.received = 0
        self.steps = 0
        self.max_running = 0
        self.bodies: list[dict[str, Any]] = []
        self.running: list[Request] = []
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted: Counter[int] = Counter()
        self.ready = asyncio.Event()
        self.closing = asyncio.Event()

    async def loop(self) -> None:
        while True:
            await self.ready.wait()
            self.step()
            if not self.running:
                self.ready.clear()
            await asyncio.sleep(0)

    async def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        phase, position = divmod(self.received, self.phase_size)
        self.received += 1
        request = Request(prompt, max_tokens, asyncio.Event())
        self.running.append(request)
        self.max_running = max(self.max_running, len(self.running))
        hold = self.holds[phase] if phase < len(self.holds) else 1
        if position + 1 >= hold:
            self.ready.set()
        await request.done.wait()
        return request.tokens

    def step(self) -> None:
        company = len(self.running) > 1
        widths: Counter[int] = Counter()
        prompt_tokens = 0
        depth = self.depth_now()
        requests = len(self.running)
        for request in list(self.running):
            emit = 1
            if not request.started:
                request.started = True
                prompt_tokens += len(request.prompt)
            else:
                widths[depth + 1] += 1
                if depth:
                    varying = len(request.tokens) * 7 + request.prompt[0]
                    good = varying % (depth + 1) if self.accept is None else self.accept
                    self.drafts += 1
                    self.draft_tokens += depth
                    self.accepted.update(range(good))
                    emit += good
            for _ in range(emit):
                if len(request.tokens) < request.max_tokens:
                    request.tokens.append(self.token(request, company))
            if len(request.tokens) == request.max_tokens:
                self.running.remove(request)
                request.done.set()
        if self.trace is not None:
            line = {
                "step": self.steps,
                "requests": requests,
                "prompt_tokens": prompt_tokens,
                "widths": {str(width): rows for width, rows in widths.items()},
                "preempted": 0,
            }
            with self.trace.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.steps += 1

    def depth_now(self) -> int:
        for first, last, depth in self.schedule or []:
            if first <= len(self.running) <= last:
                return depth
        return self.depth

    def token(self, request: Request, company: bool) -> int:
        position = len(request.tokens)
        if self.mode == "periodic":
            return 10 + position % 2
        salt = self.mode if self.mode in ("naive", "other") else ""
        token = true_token(request.prompt, position, salt)
        if self.mode in ("load", "naive") and company and position == 3:
            token += 1
        return token

    def metrics(self) -> str:
        labels = 'engine="0",model_name="tiny"'
        running = len(self.running) if self.gauge is None else self.gauge
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{labels}}} {running}.0",
            "# TYPE vllm:cache_config_info gauge",
            'vllm:cache_config_info{block_size="64",engine="0"} 1.0',
        ]
        counters = {
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted.total(),
        }
        for name, value in counters.items():
            lines.append(f"# TYPE vllm:spec_decode_num_{name}_total counter")
            lines.append(f"vllm:spec_decode_num_{name}_total{{{labels}}} {value}.0")
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f"# TYPE {name} counter")
        for position in range(self.depth):
            lines.append(f'{name}{{{labels},position="{position}"}} {self.accepted[position]}.0')
        return "\n".join(lines) + "\n"


def response(engine: Engine, body: dict[str, Any], tokens: list[int], company: bool) -> Any:
    chosen, tops = [], []
    for position, token in enumerate(tokens):
        logprob = -0.1 - (token % 7) / 8
        if engine.mode == "logprobs" and company and position == 5:
            logprob -= 2**-20
        # One position in ten is a near tie, so that the outputs count as hard.
        gap = 0.01 if position % 10 == 0 else 1.0
        key = f"word{token}" if engine.mode == "text_keys" else f"token_id:{token}"
        chosen.append(logprob)
        tops.append({key: logprob, "token_id:1": logprob - gap, "token_id:2": logprob - 2})
    choice: dict[str, Any] = {
        "index": 0,
        "text": "the same text for every answer",
        "finish_reason": "length",
        "prompt_token_ids": body["prompt"],
        "token_ids": tokens,
        "logprobs": {
            "tokens": [next(iter(top)) for top in tops],
            "token_logprobs": chosen,
            "top_logprobs": tops,
            "text_offset": [0] * len(tokens),
        },
    }
    if engine.mode == "no_ids":
        choice["token_ids"] = None
    usage: dict[str, Any] = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": len(tokens),
        "total_tokens": len(body["prompt"]) + len(tokens),
        "prompt_tokens_details": None,
    }
    if engine.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": engine.cached_tokens}
    return {"object": "text_completion", "model": "tiny", "choices": [choice], "usage": usage}


def application(engine: Engine) -> web.Application:
    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        engine.bodies.append(body)
        if len(engine.bodies) > engine.after:
            if engine.mode == "die":
                print("the engine is out of luck", flush=True)
                os._exit(17)
            if engine.mode == "drop":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if engine.mode == "hang":
                await engine.closing.wait()
                return web.Response()
            if engine.mode.startswith("http"):
                error = {"error": {"message": "no,\nthank you", "type": "fake"}}
                return web.json_response(error, status=int(engine.mode.removeprefix("http")))
        limit = body["max_tokens"] - (engine.mode == "short")
        before = len(engine.running)
        tokens = await engine.generate(body["prompt"], limit)
        company = before > 0 or len(engine.running) > 0
        return web.json_response(response(engine, body, tokens, company))

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=engine.metrics())

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 512}]})

    async def run_engine(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(engine.loop())
        yield
        task.cancel()

    app = web.Application()
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.get("/v1/models", models),
            web.get("/health", health),
            web.get("/metrics", metrics),
        ]
    )
    app.cleanup_ctx.append(run_engine)
    return app


class FakeServer:
    """The fake on a free loopback port, in a thread of the test process."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.engine = Engine(**self.options)
        runner = web.AppRunner(application(self.engine), shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._started.set()
        await self._stop.wait()
        self.engine.closing.set()
        await runner.cleanup()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FakeServer:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["serve"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-config", type=json.loads, default={})
    arguments, _ = parser.parse_known_args()
    trace = Path(os.environ["VLLM_B70_STEP_TRACE"])
    options = json.loads(os.environ.get("FAKE_PLAN", "{}")).get(trace.stem, {})
    print("fake server, arguments:", sys.argv[1:], flush=True)
    if options.get("mode") == "never":
        sys.exit("there is no such model")
    assert (arguments.directory / "config.json").exists()

    async def serve() -> None:
        engine = Engine(
            depth=arguments.speculative_config.get("num_speculative_tokens", 0),
            schedule=arguments.speculative_config.get("num_speculative_tokens_per_batch_size"),
            trace=trace,
            **options,
        )
        runner = web.AppRunner(application(engine), shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", arguments.port).start()
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
