"""``vllm-b70 census``: loads a model as a server would, and certifies its ops anew.

Loading is the one way to know what is installed on the path; nothing is served and no KV cache is
made. Standard library only at import, as for every command.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_b70.census.certificate import Certificate


def run(model: str, options: list[str], output: Path | None, device: str | None) -> int:
    """Take the census and print it.

    Args:
        model: Folder or hub id of a checkpoint.
        options: Options of ``vllm serve``; with a server's own, its next start finds the
            certificate.
        output: File for the certificate as JSON, or None.
        device: The kind of device it must be, or None.

    Returns:
        The exit status: 0, 1 if an op is not exact, or 2 if the census could not be taken.
    """
    # The census is asked for below, not while the weights are loaded.
    os.environ |= {"VLLM_B70": "1", "VLLM_B70_CENSUS": "off"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 160)
    try:
        found = _take(model, options, device)
    except Exception as error:
        Console(stderr=True).print(f"vllm-b70: {error}", markup=False, soft_wrap=True)
        return 2
    console.print(_table(found))
    exact = len(found.verdicts) - len(found.failures)
    console.print(
        f"{exact} of {len(found.verdicts)} exact on {found.key['device']['name']}, "
        f"{found.seconds:.1f} s",
        markup=False,
    )
    if output is not None:
        output.write_text(json.dumps(found.as_dict(), indent=1, sort_keys=True) + "\n")
    return 1 if found.failures else 0


def _take(model: str, options: list[str], device: str | None) -> Certificate:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.executor.abstract import Executor

    from vllm_b70 import workers

    if device is not None and current_platform.device_type != device:
        raise ValueError(
            f"this vLLM is built for {current_platform.device_type}, not for {device}: install "
            "the other build, or leave --device out"
        )
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", model, *options])
    # A server's defaults follow the context.
    context = UsageContext.OPENAI_API_SERVER
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(context)
    parallel = config.parallel_config
    certified = workers.over(parallel.worker_cls, census=True)
    if certified is None:
        raise ValueError(f"the census has no worker class over {parallel.worker_cls}")
    parallel.worker_cls = certified
    executor = Executor.get_class(config)(config)
    try:
        of_ranks: list[Certificate] = executor.collective_rpc("take_census", args=(True,))
    finally:
        executor.shutdown()
    return next((found for found in of_ranks if found.failures), of_ranks[0])


def _table(found: Certificate) -> object:
    from rich.table import Table

    table = Table("op", "shape", "row counts", "calls", "seconds", "verdict")
    for v in found.verdicts:
        verdict = "exact" if v.exact else f"DIFFERS: {v.differs}"
        table.add_row(v.op, v.shape, v.rows, str(v.calls), f"{v.seconds:.2f}", verdict)
    return table
