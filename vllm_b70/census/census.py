"""Runs the census of a loaded model: from its certificate, or by asking every op."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from vllm_b70.census import certificate as certificates
from vllm_b70.census import memory
from vllm_b70.census.certificate import Certificate
from vllm_b70.census.path import find
from vllm_b70.census.ranks import least, of_all
from vllm_b70.census.rows import RowProbe
from vllm_b70.census.settled import FIELD
from vllm_b70.census.verdict import SEEDS, Probe, Verdict

# A child of vLLM's logger, so that the user's logging configuration applies.
logger = logging.getLogger("vllm.vllm_b70")


class CensusError(RuntimeError):
    """An op on the path is not exact on this device, or could not be asked."""


def limits(config: VllmConfig) -> dict[str, Any]:
    """What of a server's configuration the ops are asked for."""
    speculative = config.speculative_config
    return {
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_model_len": config.model_config.max_model_len,
        "drafts": 0 if speculative is None else int(speculative.num_speculative_tokens or 0),
        "capture_sizes": list(config.compilation_config.cudagraph_capture_sizes or []),
        "custom_ops": list(config.compilation_config.custom_ops),
        "mode": getattr(config.compilation_config.mode, "name", "NONE"),
        "v2_runner": bool(config.use_v2_model_runner),
        "linears": dict(config.additional_config or {}).get(FIELD, []),
    }


def _judge(probe: Probe) -> Verdict:
    """The probe's verdict; an op that cannot be asked is not exact as far as anybody knows."""
    if isinstance(probe, RowProbe) and probe.together:
        return _judge_together(probe)
    try:
        return probe.judge()
    except Exception as error:
        return _nothing(probe, f"it raised {_text(error)}")


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _nothing(probe: Probe, why: str) -> Verdict:
    return Verdict(probe.op, probe.shape, False, f"nothing: {why}", "", 0, 0)


def _judge_together(probe: RowProbe) -> Verdict:
    """As ``_judge``, where a rank that does not ask leaves the others waiting.

    Raises:
        RuntimeError: This rank failed while the others ask; it must end, and the server with it.
    """
    failed = ""
    try:
        # What a rank can fail in by itself is memory.
        probe.inputs(probe.most_rows, SEEDS[0])
        if probe.device.type != "cpu":
            torch.accelerator.synchronize()
    except Exception as error:
        failed = _text(error)
    said = [f"{text} on rank {rank}" for rank, text in enumerate(of_all(failed)) if text]
    if said:
        return _nothing(probe, f"it raised {' and '.join(said)}")
    try:
        return probe.judge()
    except Exception as error:
        raise RuntimeError(
            f"the census cannot ask {probe.op} {probe.shape} any more while other ranks wait for "
            f"this one ({_text(error)}): VLLM_B70_CENSUS=off serves without a census."
        ) from error


@torch.inference_mode()
def take(
    models: list[torch.nn.Module], config: VllmConfig, device: torch.device, anew: bool = False
) -> Certificate:
    """Certify every distinct op and shape on the path of some models.

    Args:
        models: The target model, loaded.
        config: The server's.
        device: Where they are.
        anew: Ask every op even if there is a certificate.

    Returns:
        The certificate, which is also kept; its failures are for the caller to judge.

    Raises:
        CensusError: Not even the smallest calls fit the device's memory.
    """
    begun = time.perf_counter()
    allowed = memory.of_device(device)
    with set_current_vllm_config(config):
        probes = find(models, config, device, allowed)
        _check_memory(probes, allowed, device)
        key = certificates.make_key(device, probes, limits(config) | {"memory": allowed})
        if not anew:
            kept, wrong = certificates.load(key)
            if wrong:
                logger.warning(
                    "vllm_b70: the census's certificate %s is damaged (%s): running it again",
                    certificates.path_of(key), wrong,
                )  # fmt: skip
            # A sum over cards is asked by all of them or by none.
            if least(int(kept is not None)) and kept is not None:
                _say(kept, f"certified before, {certificates.path_of(key)}", begun)
                return kept
        # In compiled mode vLLM would compile each of its own ops by itself for these calls alone,
        # which is not what a compiled model runs.
        with torch.compiler.set_stance("force_eager"):
            verdicts = tuple(_judge(probe) for probe in probes)
    # What the probes allocated must not count when vLLM sizes the KV cache.
    memory.release(device)
    found = Certificate(key, verdicts, time.perf_counter() - begun)
    try:
        where = str(certificates.save(found))
    except OSError as error:
        logger.warning("vllm_b70: the census's certificate cannot be kept: %s", error)
        where = "not kept"
    _say(found, where, begun)
    return found


def _check_memory(probes: list[Probe], allowed: int, device: torch.device) -> None:
    """Raise if some probe cannot be asked in what is left of the memory."""
    largest = max(probes, key=lambda probe: probe.least_memory, default=None)
    if largest is not None and largest.least_memory > allowed:
        needed = memory.HELD * largest.least_memory
        raise CensusError(
            f"the census needs about {-(-needed // 2**20)} MiB of {device} beside the weights for "
            f"{largest.op} {largest.shape}, and {memory.HELD * allowed // 2**20} to "
            f"{2 * memory.HELD * allowed // 2**20} MiB are free: end what else uses the device or "
            "spread the weights over two cards; VLLM_B70_CENSUS=off serves without a census."
        )


def _say(found: Certificate, where: str, begun: float) -> None:
    logger.info(
        "vllm_b70: census: %d of %d ops and shapes exact on %s, %.1f s (%s)",
        len(found.verdicts) - len(found.failures), len(found.verdicts),
        found.key["device"]["name"], time.perf_counter() - begun, where,
    )  # fmt: skip


def certify(ask: Callable[[], Certificate], mode: str) -> None:
    """Take a census and stop, or warn, unless it finds every op exact.

    Args:
        ask: As ``take``, without arguments.
        mode: ``strict`` or ``warn``.

    Raises:
        CensusError: Under ``strict``, an op is not exact, or could not be asked.
    """
    try:
        found = ask()
    except CensusError as error:
        if mode == "strict":
            raise
        logger.warning("vllm_b70: NOT certified (VLLM_B70_CENSUS=warn): %s", error)
        return
    enforce(found, mode)


def enforce(found: Certificate, mode: str) -> None:
    """Stop, or warn, if an op is not exact.

    Args:
        found: From ``take``.
        mode: ``strict`` or ``warn``.

    Raises:
        CensusError: Under ``strict``, an op is not exact: one sentence that names all of them.
    """
    if not found.failures:
        return
    what = " and ".join(f"{v.op} {v.shape} ({v.differs})" for v in found.failures)
    sentence = (
        f"the census found results that are not exact on {found.key['device']['name']}: "
        f"{what} differ from the same rows computed otherwise"
    )
    if mode == "strict":
        raise CensusError(
            f"VLLM_B70=1 cannot keep its promise because {sentence}; set VLLM_B70_CENSUS=warn to "
            "serve without it, and report this as a bug of vllm_b70."
        )
    logger.warning("vllm_b70: NOT exact (VLLM_B70_CENSUS=warn): %s", sentence)
