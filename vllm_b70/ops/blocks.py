"""Which matrices an XPU can load by 2D blocks (``kernels.blocks``)."""

from __future__ import annotations

import torch


def fits(x: torch.Tensor) -> bool:
    """Whether a kernel may load ``x`` by blocks; if not, it loads element by element.

    The hardware asks for a matrix that begins on a 64-byte border and for rows of 64 bytes or more,
    a multiple of 16 bytes; Triton sees the latter only if they are a multiple of 16 elements.

    Args:
        x: [rows, columns] of 16-bit floats, contiguous.
    """
    columns = x.shape[1]
    return columns % 16 == 0 and columns >= 32 and x.data_ptr() % 64 == 0
