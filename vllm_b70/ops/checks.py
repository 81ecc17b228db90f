"""Checks of arguments that several ops make."""

from __future__ import annotations

import torch


def check_rows(x: torch.Tensor) -> None:
    """Raise unless ``x`` is what every linear takes, [M, K] in a 16-bit dtype.

    Raises:
        ValueError: It is not.
    """
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x must be [M, K] in bfloat16 or float16, not {x.dtype} {(*x.shape,)}")


def check_bias(bias: torch.Tensor | None, columns: int) -> None:
    """Raise unless ``bias`` is None or [columns].

    Raises:
        ValueError: It is neither.
    """
    if bias is not None and bias.shape != (columns,):
        raise ValueError(f"bias must be [{columns}], not {(*bias.shape,)}")
