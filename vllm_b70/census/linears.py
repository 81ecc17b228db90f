"""Settles the routes of linears at start: the vendor's row classes are found, certified and kept.

What is settled decides the bits of every answer, so it is part of a server's configuration. The
file that keeps it is written once and never changed, whoever comes first; a start that finds it
takes what it says. Servers that log one digest give one set of bits.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_b70.census.census import limits
from vllm_b70.census.certificate import make_key
from vllm_b70.layers import native
from vllm_b70.layers.linear import RowInvariantEmbeddingMethod
from vllm_b70.layers.native import Waiting
from vllm_b70.ops import native as ops
from vllm_b70.ops import row_classes
from vllm_b70.plugin import PluginError
from vllm_b70.settings import current

logger = logging.getLogger("vllm.vllm_b70")

#: Field of vLLM's ``additional_config`` that holds what was settled: the key of vLLM's compile
#: cache and that of the census's certificate follow it.
FIELD = "vllm_b70_linears"
#: Multiplications that the counts of a shape may cost for each input, and what a call counts for:
#: oneDNN makes a kernel for every row count.
WORK = {"cpu": 2**33}
WORK_GPU = 2**44
CALL = {"cpu": 2**29, "xpu": 2**37}
CALL_GPU = 2**33
#: Seconds that all shapes together may take.
LIMIT = 300.0
#: Timed rounds of both routes in turn, and calls of a round.
ROUNDS, CALLS = 9, 10


@dataclass(frozen=True)
class Settled:
    """The route of a weight's shape.

    Attributes:
        op, shape: As a probe of the census has them.
        spans: Of the class that the vendor's kernel is called with; empty for our own kernel.
        why: In words.
    """

    op: str
    shape: str
    spans: tuple[int, ...]
    why: str

    def line(self, rows: tuple[int, ...]) -> str:
        """For the log.

        Args:
            rows: Of typical steps.
        """
        if not self.spans:
            return f"{self.op} {self.shape}: our own kernel ({self.why})"
        members = row_classes.members_of(self.spans)
        calls = []
        for count in rows:
            called = [c for _, c in row_classes.pieces(members, count)]
            calls.append(f"{count} rows in {len(called)} of {max(called)}")
        return (
            f"{self.op} {self.shape}: the vendor's kernel, class of {len(members)} from "
            f"{members[0]} to {members[-1]} rows ({self.why}); {', '.join(calls)}"
        )


def settle(models: list[Any], config: VllmConfig) -> None:
    """Give every waiting linear of this process its route.

    Args:
        models: The target model, loaded. A draft model's linears wait too, and take part.
        config: The server's; what was settled is noted in it.

    Raises:
        PluginError: No linear can be native under ``native``, a choice of ``auto`` cannot be kept,
            or it takes too long.
    """
    begun = time.perf_counter()
    _wait_for_tied_heads(models)
    shapes: dict[tuple[str, str], list[Waiting]] = {}
    for layer in native.take_waiting():
        shapes.setdefault((layer.op, layer.shape), []).append(layer)
    if not shapes:
        return
    firsts = [layers[0] for layers in shapes.values()]
    device = firsts[0].device
    key = _key(firsts, config)
    path = path_of(key)
    settled = load(path, key)
    kept = settled is not None
    if settled is None:
        settled = []
        for first in firsts:
            with torch.inference_mode():
                settled.append(_decide(first, config))
            if time.perf_counter() - begun > LIMIT:
                raise PluginError(
                    f"VLLM_B70_LINEAR={current().linear} found row classes of {len(settled)} of "
                    f"{len(firsts)} shapes in {LIMIT:.0f} s, which is all it may take: set it to "
                    "triton."
                )
        settled = _keep(path, key, settled)
    by_shape = {(s.op, s.shape): s for s in settled}
    for name, layers in shapes.items():
        for layer in layers:
            layer.settle(by_shape[name].spans)
    _note(config, settled)
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    for one in settled:
        logger.info("vllm_b70: %s", one.line(_typical(config, one.op)))
    if device.type != "xpu":
        logger.info(
            "vllm_b70: 4-bit linears: our own kernels, as there is no vendor's kernel for them on "
            "%s", device.type,
        )  # fmt: skip
    if current().linear == "native" and not any(one.spans for one in settled):
        raise PluginError(
            "VLLM_B70_LINEAR=native cannot be honoured: no linear of this model has a certified "
            f"class of a vendor's kernel ({settled[0].why}); set it to triton or auto."
        )
    logger.info(
        "vllm_b70: linears: %d of %d shapes native, digest %s, %.1f s (%s %s)",
        sum(bool(one.spans) for one in settled), len(settled), digest(settled),
        time.perf_counter() - begun, "found before," if kept else "kept in", path,
    )  # fmt: skip


def _wait_for_tied_heads(models: list[Any]) -> None:
    """An embedding that serves as lm_head too waits like one."""
    for model in models:
        for owner in (model, getattr(model, "language_model", None)):
            head = getattr(owner, "lm_head", None)
            method = getattr(head, "quant_method", None)
            untied = hasattr(head, native.SPANS)
            if isinstance(method, RowInvariantEmbeddingMethod) and not untied:
                method.wait("lm_head", head)


def _key(shapes: list[Waiting], config: VllmConfig) -> dict[str, Any]:
    """What has a say, the switch and the rank too; but not when binaries were unpacked, so that the
    file may be copied to another machine of the kind."""
    parallel = config.parallel_config
    rank = [parallel.rank, parallel.tensor_parallel_size]
    more = {"linears": current().linear, "rank": rank}
    key = make_key(shapes[0].device, shapes, limits(config) | more)
    sizes = {n: v.split()[0] for n, v in key["versions"].items() if n.endswith(".so")}
    return key | {"versions": key["versions"] | sizes}


def _rows(config: VllmConfig, op: str) -> tuple[int, int, int]:
    """Rows of a decode step of one request and of all, and the most rows of a step."""
    scheduler, speculative = config.scheduler_config, config.speculative_config
    depth = 0 if speculative is None else int(speculative.num_speculative_tokens or 0)
    most = int(scheduler.max_num_batched_tokens)
    full = min(most, int(scheduler.max_num_seqs) * (depth + 1))
    return min(most, depth + 1), full, full if op == "lm_head" else most


def _typical(config: VllmConfig, op: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_rows(config, op)))


def _decide(waiting: Waiting, config: VllmConfig) -> Settled:
    """Find the route of a shape by one layer of it."""
    layer = waiting.layer()
    kind = waiting.device.type
    sizes = config.compilation_config.cudagraph_capture_sizes or []
    counts = row_classes.row_counts(
        _rows(config, waiting.op)[2], sizes if kind != "cpu" else (), WORK.get(kind, WORK_GPU),
        waiting.columns * waiting.depth, CALL.get(kind, CALL_GPU),
    )  # fmt: skip
    bases = row_classes.inputs(
        counts[-1] + row_classes.compared(waiting.columns), waiting.depth, waiting.dtype,
        waiting.device,
    )  # fmt: skip
    vendor = waiting.method.vendor(layer)
    plan = row_classes.make_plan(vendor, bases, counts, waiting.nbytes)
    spans, why = row_classes.spans(plan.members), plan.why
    if spans and current().linear == "auto":
        spans, why = _faster(waiting, spans, _typical(config, waiting.op))
    return Settled(waiting.op, waiting.shape, spans, why)


def _faster(
    waiting: Waiting, spans: tuple[int, ...], rows: tuple[int, ...]
) -> tuple[tuple[int, ...], str]:
    """The route whose times are shorter over typical row counts, by their geometric mean."""
    layer = waiting.layer()
    own, vendor = waiting.method.own(layer), waiting.method.vendor(layer)
    ops.reserve(waiting.device, waiting.dtype, waiting.depth, spans[-2])
    ratios, said = [], []
    for count in rows:
        x = row_classes.inputs(count, waiting.depth, waiting.dtype, waiting.device)[0]

        def native_call(x: torch.Tensor = x) -> Any:
            return ops.in_class(x, waiting.columns, spans, vendor)

        def own_call(x: torch.Tensor = x) -> Any:
            return own(x)

        theirs, ours = times([native_call, own_call], waiting.device)
        ratios.append(theirs / ours)
        said.append(f"{count} rows {theirs * 1e6:.0f} against {ours * 1e6:.0f} us")
    why = f"vendor's against ours: {', '.join(said)}"
    return (spans, why) if statistics.geometric_mean(ratios) < 1 else ((), why)


def times(calls: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Median seconds of each call, timed in turn; on a CUDA device from graphs."""
    if device.type == "cpu":
        timers = [_host_timer(call) for call in calls]
    else:
        timers = [_device_timer(call, device) for call in calls]
    rounds = [[timer() for timer in timers] for _ in range(ROUNDS)]
    return [statistics.median(found) for found in zip(*rounds, strict=True)]


def _host_timer(call: Callable[[], Any]) -> Callable[[], float]:
    call()

    def timer() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return timer


def _device_timer(call: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    module = torch.get_device_module(device)

    def run() -> None:
        for _ in range(CALLS):
            call()

    run()
    module.synchronize()
    replay = run
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay

    def timer() -> float:
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / CALLS

    return timer


def digest(settled: list[Settled]) -> str:
    """Of what decides bits: routes and classes."""
    said = [[one.op, one.shape, list(one.spans)] for one in settled]
    return hashlib.sha256(json.dumps(sorted(said)).encode()).hexdigest()[:16]


def _note(config: VllmConfig, settled: list[Settled]) -> None:
    if not isinstance(config.additional_config, dict):
        raise PluginError(
            f"VLLM_B70_LINEAR={current().linear} notes its choice in vLLM's additional_config, "
            "which is no dictionary here: leave it out."
        )
    said = [[one.op, one.shape, list(one.spans)] for one in settled]
    config.additional_config[FIELD] = said


def path_of(key: dict[str, Any]) -> Path:
    """Where what was settled under a key is kept."""
    import vllm.envs as envs

    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return Path(envs.VLLM_CACHE_ROOT) / "vllm_b70" / "linears" / f"{name}.json"


def load(path: Path, key: dict[str, Any]) -> list[Settled] | None:
    """What a file says; None if there is none.

    Raises:
        PluginError: It cannot be believed: choosing anew might choose otherwise.
    """
    try:
        found = json.loads(path.read_text())
        settled = [Settled(**{**one, "spans": tuple(one["spans"])}) for one in found["linears"]]
        shapes = [[one.op, one.shape] for one in settled]
        sound = found["key"] == json.loads(json.dumps(key)) and found["digest"] == digest(settled)
        if not sound or shapes != key["shapes"]:
            raise ValueError("it does not hold what it should")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PluginError(
            f"VLLM_B70_LINEAR={current().linear} cannot read its earlier choice, {path} ({error}): "
            "copy it from a server of the same configuration, or remove it to choose anew."
        ) from error
    return settled


def _keep(path: Path, key: dict[str, Any], settled: list[Settled]) -> list[Settled]:
    """Keep what was settled, unless another process was first: then that is what counts.

    Raises:
        PluginError: It cannot be kept under ``auto``, where the next start might choose otherwise.
    """
    content = {
        "digest": digest(settled), "linears": [asdict(one) for one in settled], "key": key,
    }  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(json.dumps(content, indent=1) + "\n")
            os.link(name, path)  # fails if the file is there
        except FileExistsError:
            return load(path, key) or settled
        finally:
            os.unlink(name)
    except OSError as error:
        if current().linear == "auto":
            raise PluginError(
                f"VLLM_B70_LINEAR=auto chooses by the clock, and its choice cannot be kept for the "
                f"next start ({error}): make {path.parent} writable, or use triton or native."
            ) from error
        logger.warning("vllm_b70: the row classes found cannot be kept: %s", error)
    return settled
