"""vLLM's classes over our ops. ``register`` hands them to vLLM through its official seams."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_b70.settings import Settings


def register(settings: Settings) -> None:
    """Register every layer of the exact route; called once a process.

    Args:
        settings: The switches; ``linear`` chooses whose kernels multiply,
            and some say how drafts are made.

    Raises:
        PluginError: A seam of the installed vLLM differs from what the layers rely on.
    """
    import torch
    from vllm.platforms import current_platform

    from vllm_b70.layers import draft, gated_delta_net, int4_linear, linear, logits_processor, norm

    # vLLM's attention and chunked kernels use the AMX registers where there are any. A process must
    # ask the system for them first; stock vLLM's does through oneDNN, whose linears we replace.
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    int4_linear.register(settings.linear)
    linear.register()
    logits_processor.register()
    if current_platform.is_cpu():
        norm.register()
    else:
        norm.register_gpu()
    gated_delta_net.register()
    draft.register(settings)
