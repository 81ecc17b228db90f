"""The quickstart proof: a matrix of servers over tiny checkpoints, each against one oracle.

The first cell of a configuration (checkpoint, compiled or eager, environment) that does not
speculate answers every prompt alone. Every other level of every cell of that configuration must
give those tokens: with any company, at any draft depth, under any schedule, and from a second
server with empty caches.

A control cell runs without exactness and must differ, for prompts on which nothing ever differs
prove nothing. Its environment makes it a configuration of its own, so it is held against its *own*
answers alone: other arithmetic gives other tokens on an idle server too, and a difference from the
exact oracle would not show that company, or speculation, matters.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from rich.console import Console

from vllm_b70.harness import metrics
from vllm_b70.harness.client import Client, Completion, HarnessError, ServerError
from vllm_b70.harness.identity import About, check_levels, make_oracle, say, verify_levels
from vllm_b70.harness.oracle import save_oracle
from vllm_b70.harness.prompts import default_lengths, make_prompts
from vllm_b70.harness.results import (
    DiskFullError,
    StepResult,
    raise_if_disk_full,
    table,
    versions,
    write_results,
)
from vllm_b70.harness.server import PortInUseError, Server

MAX_MODEL_LEN = 512
"""Longest sequence of the tiny servers, in tokens."""
MAX_NUM_SEQS = 32
"""Most requests that a tiny server runs together."""
KV_BLOCK = 256
"""Tokens; at least one prompt is longer than this. vLLM sizes the block after the recurrent state:
256 tokens for the tiny checkpoints."""
EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 63, 64, 65, 128, 129)
"""Prompt lengths that are always among the prompts: around every draft depth and the chunk grid.
The longest prompt generates exactly to the longest sequence."""

_MODEL = "tiny"
_LAST_WORDS_S = 5.0
_RESERVED_AT_START = 1
_RESERVED_AT_END = 8
_SCHEDULE = [[1, 4, 3], [5, 8, 1], [9, 64, 0]]
_EAGER = ("--enforce-eager",)
# Inherited ones would change the servers unseen: they are not part of the printed command.
_OVERRIDDEN = ("VLLM_B70", "VLLM_B70_STEP_TRACE")


class ExitCode(IntEnum):
    """What a run's exit status means."""

    OK = 0
    FAILED = 1
    """A mismatch, or a proof that did not come about."""
    BAD_INPUT = 2
    SERVER_DIED = 3
    """A server died or the disk is full; finished steps are in the results file."""


@dataclass(frozen=True)
class Cell:
    """One server of the matrix.

    Attributes:
        name: unique name.
        format: weights: ``ct`` (compressed-tensors INT4), ``gptq`` (INT4) or ``bf16``.
        shape: layer layout of the tiny checkpoint: ``9b`` or ``27b``.
        depth: draft tokens per step; 0 for no speculation.
        schedule: ``[first, last, depth]`` ranges of running requests, or None for a fixed depth.
        users: levels to run, in this order; none means that the cell only makes the oracle.
        env: environment variables added to the server's.
        serve_args: further arguments of ``vllm serve``.
        expect_mismatches: a control, which must differ under load from its own answers alone.
        conditional: the checkpoint's ForConditionalGeneration form, with a vision tower.
        shortest: prompts of fewer tokens are left out. Stock vLLM 0.32 stops its engine on a
            prompt of one token where the CPU has AVX-512.
        replica_of: name of an earlier cell of which this one is a second server. Both then start
            with empty caches, and their token hashes must be equal level by level (C5).
    """

    name: str
    format: Literal["ct", "gptq", "bf16"]
    shape: Literal["9b", "27b"]
    depth: int
    schedule: list[list[int]] | None
    users: tuple[int, ...]
    env: dict[str, str] = field(default_factory=dict)
    serve_args: tuple[str, ...] = ()
    expect_mismatches: bool = False
    conditional: bool = False
    shortest: int = 1
    replica_of: str | None = None

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint, shared by all cells of its format, shape and form."""
        return f"{self.format}-{self.shape}" + ("-conditional" if self.conditional else "")

    @property
    def makes_oracle(self) -> bool:
        """Whether the cell may be the reference of its configuration: it does not speculate."""
        return self.depth == 0 and self.replica_of is None

    @property
    def oracle(self) -> str:
        """Name of the oracle that judges the cell: its configuration, speculation left out."""
        parts = [self.checkpoint, *(arg.strip("-") for arg in self.serve_args)]
        return "-".join(parts + [f"{name}={value}" for name, value in sorted(self.env.items())])


def default_cells(*, full: bool = False, control: bool = False) -> list[Cell]:
    """Return the matrix.

    Args:
        full: also every draft depth, the schedule for the 27b shape, and more in compiled mode.
        control: also the controls, which must differ: INT4 products left to the BLAS library, and
            stock vLLM (the plugin off) with speculation against itself without.
    """
    cells = [
        # What a plain `vllm serve` runs: vLLM's compiled mode.
        Cell("ct-9b", "ct", "9b", 0, None, (8, 16, 32)),
        Cell("ct-9b-mtp3", "ct", "9b", 3, None, (8, 32)),
        # And eager mode, which starts faster.
        Cell("gptq-27b", "gptq", "27b", 0, None, (8, 16, 32), serve_args=_EAGER),
        Cell(
            "gptq-27b-replica",
            "gptq",
            "27b",
            0,
            None,
            (32,),
            serve_args=_EAGER,
            replica_of="gptq-27b",
        ),  # fmt: skip
        Cell("gptq-27b-mtp3", "gptq", "27b", 3, None, (8, 32), serve_args=_EAGER),
        Cell("gptq-27b-schedule", "gptq", "27b", 3, _SCHEDULE, (8, 32), serve_args=_EAGER),
    ]
    if full:
        language = ("--language-model-only",)
        form: dict[str, Any] = {"conditional": True, "serve_args": language}
        cells += [
            Cell("ct-9b-replica", "ct", "9b", 0, None, (32,), replica_of="ct-9b"),
            Cell("ct-9b-schedule", "ct", "9b", 3, _SCHEDULE, (1, 8, 32)),
            Cell("ct-9b-conditional", "ct", "9b", 0, None, (8, 32), **form),
            Cell("ct-9b-conditional-mtp3", "ct", "9b", 3, None, (8, 32), **form),
            Cell("ct-9b-eager", "ct", "9b", 0, None, (8, 32), serve_args=_EAGER),
            Cell("gptq-27b-compiled", "gptq", "27b", 0, None, (8, 32)),
            Cell("gptq-27b-compiled-mtp3", "gptq", "27b", 3, None, (8, 32)),
        ]
        shapes: list[tuple[Literal["ct", "gptq"], Literal["9b", "27b"]]]
        shapes = [("ct", "9b"), ("gptq", "27b")]
        for format, shape in shapes:
            for depth in (1, 2, 3, 4, 6):
                name = f"{format}-{shape}-eager-mtp{depth}"
                cells.append(Cell(name, format, shape, depth, None, (1, 8, 32), serve_args=_EAGER))
            name = f"{format}-{shape}-eager-schedule"
            cells.append(Cell(name, format, shape, 3, _SCHEDULE, (1, 8, 32), serve_args=_EAGER))
    if control:
        # The census would not let it serve.
        env = {"VLLM_B70_LINEAR": "naive", "VLLM_B70_CENSUS": "off"}
        naive: dict[str, Any] = {"env": env, "serve_args": _EAGER}
        stock: dict[str, Any] = {
            "env": {"VLLM_B70": "0"},
            "serve_args": (*_EAGER, "--no-enable-prefix-caching"),
            "shortest": 2,
        }
        cells += [
            Cell("ct-9b-naive", "ct", "9b", 0, None, (8, 24), expect_mismatches=True, **naive),
            Cell("bf16-9b-stock", "bf16", "9b", 0, None, (), **stock),
            Cell(
                "bf16-9b-stock-mtp3", "bf16", "9b", 3, None, (1, 8),
                expect_mismatches=True, **stock,
            ),
        ]  # fmt: skip
    return cells


def select_cells(cells: Sequence[Cell], pattern: str) -> list[Cell]:
    """Return the cells whose name matches, and whatever those need in order to be judged.

    A missing oracle cell is added without levels; a missing first server of a replica is added
    with the replica's levels.

    Raises:
        ValueError: the pattern is not a regular expression or matches nothing.
    """
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    chosen = {cell.name: cell for cell in cells if wanted.search(cell.name)}
    if not chosen:
        names = ", ".join(cell.name for cell in cells)
        raise ValueError(f"no cell matches {pattern!r}; there are: {names}")
    by_name = {cell.name: cell for cell in cells}
    for cell in list(chosen.values()):
        if cell.replica_of is not None and cell.replica_of in by_name:
            chosen.setdefault(cell.replica_of, replace(by_name[cell.replica_of], users=cell.users))
    for oracle in {cell.oracle for cell in chosen.values()}:
        makers = [cell for cell in cells if cell.oracle == oracle and cell.makes_oracle]
        if makers and not any(maker.name in chosen for maker in makers):
            chosen[makers[0].name] = replace(makers[0], users=())
    return [chosen[cell.name] for cell in cells if cell.name in chosen]


def check_cells(cells: Sequence[Cell], prompts: int) -> None:
    """Check a matrix before the first server is started.

    Raises:
        ValueError: the matrix cannot be run or judged; the message says why.
    """
    if not cells:
        raise ValueError("there are no cells to run")
    seen: dict[str, Cell] = {}
    oracles: set[str] = set()
    for cell in cells:
        if cell.name in seen:
            raise ValueError(f"two cells are called {cell.name}")
        hints = get_type_hints(Cell)
        if any(getattr(cell, name) not in get_args(hints[name]) for name in ("format", "shape")):
            raise ValueError(f"{cell.name}: unknown checkpoint {cell.checkpoint}")
        if cell.depth < 0 or (cell.schedule is not None and cell.depth == 0):
            raise ValueError(f"{cell.name}: depth {cell.depth} does not fit its schedule")
        if cell.makes_oracle:
            oracles.add(cell.oracle)
        elif cell.oracle not in oracles:
            raise ValueError(
                f"{cell.name} has no oracle: a cell of {cell.oracle} without "
                "speculation must come before it"
            )
        if not cell.users and not cell.makes_oracle:
            raise ValueError(f"{cell.name} has no levels to run")
        if cell.users:
            check_levels(cell.users, prompts)
            if max(cell.users) > MAX_NUM_SEQS:
                raise ValueError(f"{cell.name}: a tiny server runs at most {MAX_NUM_SEQS} requests")
        if cell.replica_of is not None:
            first = seen.get(cell.replica_of)
            if first is None:
                raise ValueError(f"{cell.name}: no cell {cell.replica_of!r} comes before it")
            if not set(cell.users) <= set(first.users):
                raise ValueError(f"{cell.name} has levels that {first.name} does not have")
            if server_settings(first) != server_settings(cell):
                raise ValueError(f"{cell.name} is not configured as {first.name} is")
        seen[cell.name] = cell


def server_settings(cell: Cell) -> tuple[Any, ...]:
    """Return everything about a cell that decides its server's configuration."""
    return (cell.checkpoint, cell.depth, cell.schedule, cell.env, cell.serve_args)


def serve_argv(cell: Cell, directory: Path, port: int) -> list[str]:
    """Return the arguments that follow the program's name ``vllm``."""
    argv = ["serve", str(directory), "--port", str(port), "--served-model-name", _MODEL]
    argv += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    argv += ["--max-num-batched-tokens", "512", "--kv-cache-memory-bytes", "1G"]
    if cell.depth:
        speculation: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": cell.depth}
        if cell.schedule is not None:
            speculation["num_speculative_tokens_per_batch_size"] = cell.schedule
        argv += ["--speculative-config", json.dumps(speculation)]
    return [*argv, *cell.serve_args]


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Check that no inherited switch changes the servers.

    Raises:
        ValueError: a ``VLLM_B70*`` variable is set that the quickstart does not set itself.
    """
    environ = os.environ if environ is None else environ
    for name in sorted(environ):
        if name.startswith("VLLM_B70") and name not in _OVERRIDDEN:
            raise ValueError(
                f"unset {name}: it would change every server, and the commands shown would not "
                "say so"
            )


def run_cells(
    cells: Sequence[Cell],
    workdir: Path,
    results_path: Path,
    *,
    port: int = 8123,
    prompts: int = 36,
    tokens: int = 48,
    seed: int = 0,
    program: Sequence[str] = ("vllm",),
    start_timeout_s: float = 900.0,
    request_timeout_s: float = 600.0,
    longest_delay_s: float = 0.02,
    console: Console | None = None,
) -> int:
    """Run the matrix, writing the results after every step.

    A failed proof does not stop the run; a dead server or a full disk does.

    Args:
        cells: the matrix, in order.
        workdir: checkpoints, logs, traces and caches go into a new directory below it.
        results_path: the results file.
        port: port of the servers, which run one after another.
        prompts: number of prompts, at least the highest level.
        tokens: tokens to generate for each prompt.
        seed: fixes checkpoints, prompts and arrivals.
        program: the program that takes ``serve ...``.
        start_timeout_s: seconds allowed for each server to become healthy.
        request_timeout_s: seconds allowed for each request.
        longest_delay_s: upper end of the random arrival delay in seconds.
        console: where to print.

    Returns:
        An `ExitCode`; every reason has been printed.
    """
    console = console or Console()
    try:
        from vllm_b70.checkpoints.hardness import PERIOD_WINDOW

        check_cells(cells, prompts)
        check_environment()
        if tokens < PERIOD_WINDOW:
            raise ValueError(f"{tokens} tokens are too few to see repetition: {PERIOD_WINDOW}")
        longest = MAX_MODEL_LEN - tokens
        if longest <= KV_BLOCK:
            raise ValueError(f"{tokens} tokens leave no room for prompts in {MAX_MODEL_LEN}")
        lengths = default_lengths(prompts, seed, longest=longest, block=KV_BLOCK, also=EDGES)
    except ValueError as error:
        say(console, f"error: {error}")
        return ExitCode.BAD_INPUT
    run = _Run(
        results_path=results_path,
        port=port,
        lengths=lengths,
        tokens=tokens,
        seed=seed,
        program=list(program),
        start_timeout_s=start_timeout_s,
        request_timeout_s=request_timeout_s,
        longest_delay_s=longest_delay_s,
        console=console,
    )
    code = run.run(cells, workdir)
    if run.steps:
        console.print(table(run.steps))
        say(console, f"results: {results_path}")
    return code


@dataclass
class _Run:
    """The state of one run of the matrix."""

    results_path: Path
    port: int
    lengths: list[int]
    tokens: int
    seed: int
    program: list[str]
    start_timeout_s: float
    request_timeout_s: float
    longest_delay_s: float
    console: Console
    steps: list[StepResult] = field(default_factory=list)
    directory: Path = Path()
    versions: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, Path] = field(default_factory=dict)
    prompts: dict[str, list[list[int]]] = field(default_factory=dict)
    oracles: dict[str, list[Completion]] = field(default_factory=dict)

    def run(self, cells: Sequence[Cell], workdir: Path) -> ExitCode:
        cell_name = "set-up"
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            # A new directory each time: an old trace or checkpoint can never pass for this run's.
            self.directory = Path(tempfile.mkdtemp(prefix="run-", dir=workdir.resolve()))
            self.versions = versions()
            self._write()
            firsts = {cell.replica_of for cell in cells}
            for number, cell in enumerate(cells, start=1):
                cell_name = cell.name
                say(self.console, f"[{number}/{len(cells)}] {cell.name}")
                # Both of a pair: two servers that share a cache share what the cache decides.
                fresh = cell.replica_of is not None or cell.name in firsts
                self._run_cell(cell, fresh_caches=fresh)
        except PortInUseError as error:
            say(self.console, f"error: {error}")
            return ExitCode.BAD_INPUT
        except (ServerError, DiskFullError) as error:
            return self._stopped(cell_name, error)
        except OSError as error:
            try:
                raise_if_disk_full(error, self.directory)
            except DiskFullError as full:
                return self._stopped(cell_name, full)
            say(self.console, f"error: {error}")
            return ExitCode.BAD_INPUT
        except ValueError as error:
            # The checkpoint tools report a full disk as a ValueError caused by the OSError.
            try:
                if isinstance(error.__cause__, OSError):
                    raise_if_disk_full(error.__cause__, self.directory)
            except DiskFullError as full:
                return self._stopped(cell_name, full)
            say(self.console, f"error: {error}")
            return ExitCode.BAD_INPUT
        except HarnessError as error:
            say(self.console, f"FAILED in {cell_name}: {error}")
            return ExitCode.FAILED
        failed = [step for step in self.steps if step.failures]
        for step in failed:
            for failure in step.failures:
                say(self.console, f"FAILED {step.name}, {step.users} users: {failure}")
        return ExitCode.FAILED if failed else ExitCode.OK

    def _stopped(self, cell_name: str, error: HarnessError) -> ExitCode:
        say(self.console, f"STOPPED in {cell_name}: {error}")
        say(
            self.console,
            f"The run is incomplete; the {len(self.steps)} finished steps are kept in "
            f"{self.results_path}.",
        )
        return ExitCode.SERVER_DIED

    def _run_cell(self, cell: Cell, *, fresh_caches: bool) -> None:
        directory = self._checkpoint(cell)
        traces = self.directory / "traces"
        traces.mkdir(exist_ok=True)
        env = {"VLLM_B70": "1"}
        trace = None
        # A stock server has no scheduler of ours that would write one.
        if cell.env.get("VLLM_B70") != "0":
            trace = traces / f"{cell.name}.jsonl"
            env["VLLM_B70_STEP_TRACE"] = str(trace)
        if fresh_caches:
            env.update(self._empty_caches(cell))
        env.update(cell.env)
        server = Server(
            [*self.program, *serve_argv(cell, directory, self.port)],
            port=self.port,
            log_path=self.directory / "logs" / f"{cell.name}.log",
            env=env,
            start_timeout_s=self.start_timeout_s,
            progress=lambda text: say(self.console, f"  {text}"),
        )
        say(self.console, f"  $ {server.command}")
        first_step = len(self.steps)
        with server:
            try:
                acceptance = asyncio.run(self._drive(cell, server, trace))
            except ServerError as error:
                if error.status is not None and error.status < 500:
                    # The server lives and refuses; its log would only distract.
                    raise HarnessError(str(error)) from error
                # Its engine may be gone while the front end still writes the reason to the log.
                server.wait(_LAST_WORDS_S)
                raise server.failure(f"{error}") from error
        self._judge(cell, self.steps[first_step:], acceptance)

    async def _drive(self, cell: Cell, server: Server, trace: Path | None) -> metrics.Acceptance:
        """Run the oracle if it is this cell's to make, then the levels."""
        prompts = [p for p in self.prompts[cell.checkpoint] if len(p) >= cell.shortest]
        about = About(
            name=cell.name,
            checkpoint=cell.checkpoint,
            depth=cell.depth,
            command=server.command,
            mode="control" if cell.expect_mismatches else "exact",
        )
        async with Client(server.base_url, _MODEL, timeout_s=self.request_timeout_s) as client:
            before = metrics.parse_speculation(await client.metrics())
            if cell.oracle not in self.oracles:
                oracle, step = await make_oracle(
                    server.base_url,
                    _MODEL,
                    prompts,
                    self.tokens,
                    about=about,
                    trace=trace,
                    timeout_s=self.request_timeout_s,
                    console=self.console,
                )
                self.oracles[cell.oracle] = oracle
                save_oracle(
                    self.directory / "oracles" / f"{cell.oracle}.json",
                    oracle,
                    prompts,
                    self.tokens,
                    _MODEL,
                )
                if not cell.expect_mismatches:
                    step.failures += _hardness(oracle, None)
                self._add(step)
            if cell.users:
                await verify_levels(
                    server.base_url,
                    _MODEL,
                    prompts,
                    self.tokens,
                    levels=cell.users,
                    oracle=self.oracles[cell.oracle],
                    about=about,
                    seed=self.seed,
                    trace=trace,
                    timeout_s=self.request_timeout_s,
                    longest_delay_s=self.longest_delay_s,
                    console=self.console,
                    on_result=self._add,
                )
            after = metrics.parse_speculation(await client.metrics())
        return metrics.acceptance_between(before, after)

    def _judge(
        self, cell: Cell, steps: Sequence[StepResult], acceptance: metrics.Acceptance
    ) -> None:
        """Add what only the whole cell can show to the failures of its last step."""
        failures: list[str] = []
        levels = [step for step in steps if step.mode != "oracle"]
        if cell.expect_mismatches and not any(step.mismatches for step in levels):
            failures.append("the control shows no mismatch: this run proves nothing")
        if cell.depth and not cell.expect_mismatches:
            if acceptance.overall is None:
                failures.append("nothing was drafted: speculation was not tested")
            oracle = self.oracles[cell.oracle]
            # What the oracle shows by itself was reported where it was made.
            known = _hardness(oracle, None)
            failures += [
                failure for failure in _hardness(oracle, acceptance.overall) if failure not in known
            ]
            failures += _schedule_failures(cell, levels)
        if cell.replica_of is not None:
            failures += self._replica_failures(cell.replica_of, levels)
        if failures:
            steps[-1].failures += failures
            self._write()
            for failure in failures:
                say(self.console, f"  FAILED: {failure}")

    def _replica_failures(self, first: str, levels: Sequence[StepResult]) -> list[str]:
        hashes = {
            step.users: step.token_hash
            for step in self.steps
            if step.name == first and step.mode != "oracle"
        }
        return [
            f"the second server's tokens ({step.token_hash[:16]}) are not those of {first} "
            f"({hashes[step.users][:16]})"
            for step in levels
            if step.token_hash != hashes[step.users]
        ]

    def _checkpoint(self, cell: Cell) -> Path:
        """Return the cell's checkpoint, made at its first use together with its prompts."""
        if cell.checkpoint not in self.checkpoints:
            from vllm_b70.checkpoints.tiny import make_tiny

            directory = self.directory / "checkpoints" / cell.checkpoint
            directory.parent.mkdir(exist_ok=True)
            say(self.console, f"  making the checkpoint {cell.checkpoint}")
            make_tiny(
                directory,
                format=cell.format,
                shape=cell.shape,
                seed=self.seed,
                conditional=cell.conditional,
            )
            self.checkpoints[cell.checkpoint] = directory
            self.prompts[cell.checkpoint] = make_prompts(
                self.lengths, self.seed, token_range(directory)
            )
        return self.checkpoints[cell.checkpoint]

    def _empty_caches(self, cell: Cell) -> dict[str, str]:
        env = {}
        for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR"):
            cache = self.directory / "caches" / cell.name / name.lower()
            cache.mkdir(parents=True)
            env[name] = str(cache)
        return env

    def _add(self, step: StepResult) -> None:
        self.steps.append(step)
        self._write()

    def _write(self) -> None:
        write_results(self.results_path, self.versions, self.steps)


def token_range(directory: Path) -> tuple[int, int]:
    """Return the ordinary token ids of a tiny checkpoint: lowest, and one past the highest.

    The ends of the vocabulary hold special tokens (end of text, image and video marks).

    Raises:
        HarnessError: the checkpoint's ``config.json`` does not give a usable vocabulary size.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
        size = config.get("text_config", config)["vocab_size"]
        high = int(size) - _RESERVED_AT_END
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HarnessError(f"{path} does not give a vocabulary size: {error}") from error
    if high <= _RESERVED_AT_START:
        raise HarnessError(f"{path}: a vocabulary of {size} tokens is too small")
    return _RESERVED_AT_START, high


def _schedule_failures(cell: Cell, levels: Sequence[StepResult]) -> list[str]:
    """Whether every depth that the levels ask for was served, and changed at least once."""
    if cell.schedule is None:
        return []
    wanted = {
        str(depth + 1)
        for first, last, depth in cell.schedule
        if any(first <= step.users for step in levels)
    }
    seen = {width for step in levels for width in step.width_steps}
    failures = []
    if wanted - seen:
        failures.append(
            f"no step had the widths {', '.join(sorted(wanted - seen))} that the schedule asks "
            "for: it was not tested"
        )
    depths = {depth for _, _, depth in cell.schedule}
    if len(depths) > 1 and not any(step.width_changes for step in levels):
        failures.append("the depth never changed: the schedule was not tested")
    return failures


def _hardness(oracle: Sequence[Completion], acceptance: float | None) -> list[str]:
    """Return why these prompts are too easy for their equality to mean anything."""
    from vllm_b70.checkpoints.hardness import measure

    try:
        hardness = measure(
            [completion.token_ids for completion in oracle],
            [completion.top2_gap for completion in oracle],
            acceptance,
        )
    except ValueError as error:
        return [f"the hardness of the outputs cannot be measured: {error}"]
    return list(hardness.failures())
