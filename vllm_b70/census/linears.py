"""Settles the routes of linears at start: the vendor's row classes are found, certified and kept.

Servers that log one digest give one set of bits.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_b70.census import memory
from vllm_b70.census.settled import FIELD, Settled, digest, folder, keep, key_of, load, routes
from vllm_b70.layers import native
from vllm_b70.layers.linear import RowInvariantEmbeddingMethod
from vllm_b70.layers.native import Waiting
from vllm_b70.ops import native as ops
from vllm_b70.ops import row_classes
from vllm_b70.plugin import PluginError
from vllm_b70.settings import current

logger = logging.getLogger("vllm.vllm_b70")

#: Multiplications that the counts of a shape may cost for each input, and what a call counts for:
#: oneDNN makes a kernel for every row count.
WORK = {"cpu": 2**33}
WORK_GPU = 2**44
CALL = {"cpu": 2**29, "xpu": 2**37}
CALL_GPU = 2**33
#: The largest row count that is asked: a call of more rows gains nothing, and a lm_head has few.
#: They are the same for all servers, or two of them would take other classes.
MOST, MOST_HEAD = 1024, 256
#: Row counts at which both routes are timed: one user without drafts and with three, more users,
#: prompts.
TIMED = (1, 4, 64, 256, 1024)
#: Seconds that all shapes together may take.
LIMIT = 300.0
#: Timed rounds of both routes in turn, and calls of a round.
ROUNDS, CALLS = 9, 10


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
    device = next(iter(shapes.values()))[0].device
    rank = config.parallel_config.rank, config.parallel_config.tensor_parallel_size
    # Drafts change no answer, so the digest leaves out what a draft model alone has.
    target = {id(module) for model in models for module in model.modules()}
    settled, answers, found = [], [], 0
    not_kept: OSError | None = None
    for layers in shapes.values():
        key = key_of(layers[0], device, rank)
        one = load(key)
        if one is None:
            found += 1
            with torch.inference_mode():
                one = _decide(layers[0])
            try:
                one = keep(key, one)
            except OSError as error:
                not_kept = error
                if current().linear == "auto":
                    raise PluginError(
                        "VLLM_B70_LINEAR=auto chooses by the clock, and its choice cannot be kept "
                        f"for the next start ({error}): make {folder()} writable, set "
                        "VLLM_CACHE_ROOT to a folder that is, or use triton or native."
                    ) from error
        for layer in layers:
            layer.settle(one.spans)
        settled.append(one)
        if any(id(layer.layer()) in target for layer in layers):
            answers.append(one)
        if len(settled) < len(shapes) and time.perf_counter() - begun > LIMIT:
            raise PluginError(
                f"VLLM_B70_LINEAR={current().linear} found row classes of {len(settled)} of "
                f"{len(shapes)} shapes in {LIMIT:.0f} s, all that it may take: set it to triton."
            )
    _note(config, settled)
    memory.release(device)
    if not_kept is not None:
        logger.warning(
            "vllm_b70: the row classes that were found cannot be kept (%s), so every start looks "
            "for them anew: make %s writable, or set VLLM_CACHE_ROOT to a folder that is.",
            not_kept, folder(),
        )  # fmt: skip
    for one in settled:
        logger.info("vllm_b70: %s", one.line(_steps(config)))
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
        "vllm_b70: linears: %d of %d shapes native, digest %s, %.1f s (%d found now; kept in %s)",
        sum(bool(one.spans) for one in settled), len(settled), digest(answers),
        time.perf_counter() - begun, found, folder() if not_kept is None else "no folder",
    )  # fmt: skip


def _wait_for_tied_heads(models: list[Any]) -> None:
    """An embedding that serves as lm_head too waits like one."""
    for model in models:
        for owner in (model, getattr(model, "language_model", None)):
            head = getattr(owner, "lm_head", None)
            method = getattr(head, "quant_method", None)
            waits = hasattr(head, native.SPANS)
            if isinstance(method, RowInvariantEmbeddingMethod) and not waits:
                method.wait("lm_head", head)


def _steps(config: VllmConfig) -> list[int]:
    """Rows of a decode step of one request and of all, and the most rows of a step."""
    scheduler, speculative = config.scheduler_config, config.speculative_config
    drafts = 0 if speculative is None else int(speculative.num_speculative_tokens or 0)
    most = int(scheduler.max_num_batched_tokens)
    return sorted({min(most, n * (drafts + 1)) for n in (1, int(scheduler.max_num_seqs))} | {most})


def _decide(waiting: Waiting) -> Settled:
    """Find the route of a shape by one layer of it; the server's limits have no say."""
    layer = waiting.layer()
    kind = waiting.device.type
    most = MOST_HEAD if waiting.op == "lm_head" else MOST
    counts = row_classes.row_counts(
        most, WORK.get(kind, WORK_GPU), waiting.columns * waiting.depth, CALL.get(kind, CALL_GPU)
    )
    bases = row_classes.inputs(
        most + row_classes.compared(waiting.columns), waiting.depth, waiting.dtype, waiting.device
    )
    vendor = waiting.method.vendor(layer)
    plan = row_classes.make_plan(vendor, bases, counts, waiting.nbytes)
    spans, why = row_classes.spans(plan.members), plan.why
    if spans and current().linear == "auto":
        spans, why = _faster(waiting, spans, [count for count in TIMED if count <= most])
    return Settled(waiting.op, waiting.shape, spans, why)


def _faster(
    waiting: Waiting, spans: tuple[int, ...], rows: list[int]
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


def _note(config: VllmConfig, settled: list[Settled]) -> None:
    if not isinstance(config.additional_config, dict):
        raise PluginError(
            f"VLLM_B70_LINEAR={current().linear} notes its choice in vLLM's additional_config, "
            "which is no dictionary here: leave it out."
        )
    config.additional_config[FIELD] = routes(settled)
