"""The sum over cards: gathered, then added in rank order in fp32 and rounded once.

oneCCL picks the order of its own reduction by the size of the message, which is the number of rows.
vLLM has this idea too (``_fixed_rank_sum`` of its XPU communicator), but under its
``VLLM_BATCH_INVARIANT`` only, which it refuses for quantised models, and with a rounding a rank.

Official seam: ``get_device_communicator_cls`` of the platform.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.xpu_communicator import XpuCommunicator

from vllm_b70.compat.seams import require

require("all_reduce", "all_gather")


class RankOrderXpuCommunicator(XpuCommunicator):
    """vLLM's communicator with its sum replaced."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; each element depends on that element of every rank alone.

        Args:
            input_: The same shape and dtype on every rank.

        Returns:
            A new tensor like ``input_``.
        """
        if not input_.is_floating_point():
            raise NotImplementedError(f"the sum over cards covers floats, not {input_.dtype}")
        ranks = self.all_gather(input_.reshape(1, -1), dim=0)
        total = ranks[0].float()
        for rank in range(1, len(ranks)):
            total = total + ranks[rank]
        return total.to(input_.dtype).view(input_.shape)

    def _refuse(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError(
            "VLLM_B70=1 has no exact sum over cards whose result is scattered: leave sequence and "
            "expert parallelism off."
        )

    reduce_scatter = reduce_scatterv = _refuse
