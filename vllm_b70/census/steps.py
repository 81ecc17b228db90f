"""The judge of step invariance (C2): a request's results do not depend on how it is stepped.

Requests follow a few random streams of inputs. The measure is each stream alone: its prompt whole,
then one token a step. It must get the same bits at any width of a step, with rejected drafts
between, its prompt cut anywhere on the grid, and in the company of others that come and go.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_b70.census.rows import row_counts
from vllm_b70.census.verdict import SEEDS, Tally, Verdict
from vllm_b70.chunk_grid import GRID

#: Prompts of the streams: within one block of the grid, over two, and over two parts of attention.
PROMPTS = (5, 123, 500)
#: Tokens of a stream after its prompt.
TAIL = 24
#: The widest step of a request, a verification of 16 drafts.
WIDEST = 17
#: Rows that the steps in company may have together, and streams that are tried at every width.
WORK, EVERY_WIDTH = {"cpu": 1500}, {"cpu": 1}
WORK_GPU = 12000

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Piece:
    """One request's rows of a step.

    Attributes:
        slot: Which request of the session.
        stream: Whose inputs it follows; one past the last holds NaN and infinities.
        first: Position of its first row.
        tokens: Rows.
        wrong: How many of its last rows are drafts that will be rejected: garbage.
        prompt: Length of its prompt.
    """

    slot: int
    stream: int
    first: int
    tokens: int
    wrong: int
    prompt: int


class Session(Protocol):
    """A layer with a cache of its own."""

    def step(self, pieces: Sequence[Piece], padding: int) -> torch.Tensor:
        """Run one step.

        Args:
            pieces: The requests' rows, in batch order.
            padding: Requests of one row that pad the step as they pad a captured graph.

        Returns:
            The results, rows first, without those of padding.
        """


@dataclass(frozen=True)
class StepProbe:
    """An op that continues sequences.

    Attributes:
        op, shape: As in ``Probe``.
        device: Where it runs.
        inputs: Makes a stream's random inputs from its length and a seed; rows first.
        session: Opens a session for a number of requests that follow some streams.
        requests: The most requests of a step.
        depth: The most drafts of a request.
        special: Row counts to try besides, e.g. those of captured graphs.
        pads: Whether steps run from graphs, which are padded.
        prompts: Tokens of the streams' prompts, one for each seed.
        least_memory: What ``census.memory`` must allow for two requests.
    """

    op: str
    shape: str
    device: torch.device
    inputs: Callable[[int, int], Tensors]
    session: Callable[[int, list[Tensors]], AbstractContextManager[Session]]
    requests: int
    depth: int
    special: tuple[int, ...] = ()
    pads: bool = False
    prompts: tuple[int, ...] = PROMPTS
    least_memory: int = 0

    def judge(self) -> Verdict:
        """As ``judge_steps``."""
        return judge_steps(self)


class Request:
    """One request as it goes along its stream."""

    def __init__(self, slot: int, stream: int, prompts: Sequence[int]) -> None:
        self.slot, self.stream, self.position = slot, stream, 0
        self.prompt = prompts[stream % len(prompts)]

    @property
    def left(self) -> int:
        """Tokens to the end of the stream; 0 within the prompt."""
        return self.prompt + TAIL - self.position if self.position >= self.prompt else 0

    def chunk(self, blocks: int) -> Piece:
        """The next so many blocks of the prompt."""
        tokens = min(self.prompt - self.position, blocks * GRID)
        return self._advance(tokens, 0)

    def verify(self, width: int, wrong: int = 0) -> Piece:
        """The next tokens, the last of them wrong."""
        return self._advance(width, wrong)

    def _advance(self, tokens: int, wrong: int) -> Piece:
        piece = Piece(self.slot, self.stream, self.position, tokens, wrong, self.prompt)
        self.position += tokens - wrong
        return piece


class _Judge:
    """A tally with the streams and what each of them gets alone."""

    def __init__(self, probe: StepProbe) -> None:
        self.probe, self.tally = probe, Tally(probe.device)
        lengths = [prompt + TAIL for prompt in probe.prompts]
        self.streams = [probe.inputs(n, s) for n, s in zip(lengths, SEEDS, strict=True)]
        poison = tuple(torch.full_like(t, float("nan")) for t in self.streams[0])
        for tensor in poison:
            tensor[1::2] = float("inf")
        # A stream of its own for whoever must not be noticed by the others.
        self.streams.append(poison)
        self.begin = [sum(lengths[:i]) for i in range(len(lengths))]
        self.want = torch.cat([self.alone(stream) for stream in range(len(lengths))])
        self.tally.measure((self.want,), len(self.want))

    def alone(self, stream: int) -> torch.Tensor:
        """The results of a stream by itself, prompt whole, then token by token."""
        results = []
        with self.probe.session(1, self.streams) as session:
            request = Request(0, stream, self.probe.prompts)
            results.append(session.step([request.chunk(request.prompt)], 0))
            while request.left:
                results.append(session.step([request.verify(1)], 0))
        self.tally.calls += len(results)
        return torch.cat(results)

    def step(self, session: Session, pieces: list[Piece], check: str, rows: int, pad: int) -> None:
        """Run one step and compare what is neither wrong nor poisoned."""
        got = session.step(pieces, pad)
        mine: list[int] = []
        theirs: list[int] = []
        first = 0
        for piece in pieces:
            if piece.stream < len(self.begin):
                kept = piece.tokens - piece.wrong
                begin = self.begin[piece.stream] + piece.first
                mine += range(first, first + kept)
                theirs += range(begin, begin + kept)
            first += piece.tokens
        index = torch.tensor([mine, theirs], dtype=torch.long, device=got.device)
        self.tally.compare((got[index[0]],), (self.want[index[1]],), check, rows)


def judge_steps(probe: StepProbe) -> Verdict:
    """Compare the op with itself over widths, drafts, cuts and company."""
    judge = _Judge(probe)
    for width in range(1, WIDEST + 1):
        for i in range(EVERY_WIDTH.get(probe.device.type, len(probe.prompts))):
            _alone_at_width(judge, (width + i) % len(probe.prompts), width)
    _in_company(judge)
    return judge.tally.verdict(probe.op, probe.shape)


def _alone_at_width(judge: _Judge, stream: int, width: int) -> None:
    """A stream by itself, its prompt cut and its tail verified so many tokens at a time."""
    with judge.probe.session(1, judge.streams) as session:
        request, steps = Request(0, stream, judge.probe.prompts), 0
        while request.position < request.prompt:
            piece = request.chunk(1 + width % 8)
            judge.step(session, [piece], "a prompt's chunk of {} rows", piece.tokens, 0)
        while request.left:
            tokens = min(width, request.left)
            # The state before a rejected draft is kept for as many drafts as the server makes.
            wrong = steps % tokens if tokens <= judge.probe.depth + 1 else 0
            judge.step(
                session, [request.verify(tokens, wrong)], "width {} of a request alone", tokens, 0
            )
            steps += 1


def _in_company(judge: _Judge) -> None:
    """Requests that come and go, in steps whose row counts are chosen one by one."""
    probe = judge.probe
    draw = random.Random(SEEDS[0])
    budget = WORK.get(probe.device.type, WORK_GPU)
    most = min(probe.requests * max(probe.depth + 1, WIDEST), 512)
    counts = row_counts(most, probe.special, budget)
    draw.shuffle(counts)
    with judge.probe.session(probe.requests, judge.streams) as session:
        # The last one is poisoned, if there are two.
        kinds, prompts = len(probe.prompts), probe.prompts
        requests = [Request(slot, slot % kinds, prompts) for slot in range(probe.requests)]
        if len(requests) > 1:
            requests[-1] = Request(len(requests) - 1, kinds, prompts)
        for count in counts:
            if sum(min(WIDEST, r.left) for r in requests) < count:
                _refill(judge, session, requests, draw)
            pieces = _exactly(requests, count, probe.depth, draw)
            room = probe.requests - len(pieces) if probe.pads else 0
            pad = draw.randint(0, min(room, 3))
            judge.step(session, pieces, "steps of {} rows", count, pad)


def _refill(judge: _Judge, session: Session, requests: list[Request], draw: random.Random) -> None:
    """Whoever is nearly done leaves and another comes; prompts run beside the others' decodes."""
    for i, request in enumerate(requests):
        if 0 < request.left < WIDEST or request.position == request.prompt + TAIL:
            requests[i] = Request(request.slot, request.stream, judge.probe.prompts)
    while any(request.position < request.prompt for request in requests):
        pieces = []
        for request in draw.sample(requests, len(requests)):
            if request.position < request.prompt:
                pieces.append(request.chunk(draw.randint(1, 4)))
            elif request.left > WIDEST and draw.random() < 0.5:
                pieces.append(request.verify(draw.randint(1, request.left - WIDEST)))
        rows = sum(piece.tokens for piece in pieces)
        judge.step(session, pieces, "prompts and decodes in steps of {} rows", rows, 0)


def _exactly(requests: list[Request], count: int, depth: int, draw: random.Random) -> list[Piece]:
    """Rows past their prompt of some requests, so many in all."""
    pieces: list[Piece] = []
    ready = draw.sample([r for r in requests if r.left], sum(r.left > 0 for r in requests))
    room = sum(min(WIDEST, r.left) for r in ready)
    for request in ready:
        widest = min(WIDEST, request.left)
        room -= widest
        least = max(0, count - room)
        # Now and then as many as a resumed request computes again.
        usual = WIDEST if draw.random() < 0.1 else depth + 1
        tokens = draw.randint(least, max(least, min(widest, count, usual)))
        if tokens:
            wrong = draw.randint(0, tokens - 1) if tokens <= depth + 1 else 0
            pieces.append(request.verify(tokens, wrong))
            count -= tokens
    assert count == 0
    return pieces
