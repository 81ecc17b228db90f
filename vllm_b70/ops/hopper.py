"""The INT4 GEMM's kernel for many rows on Hopper: where it can run, and its launch.

Elsewhere a tile of kernel ``hopper`` is served by Triton's ``walk`` of its size: the same bits.
"""

from __future__ import annotations

import functools

import torch

from vllm_b70.ops import tiles

#: Its tiles: columns, and rows to choose from.
BN, BM = 128, (64, 128)
#: Its group size.
GROUP = 128
#: Versions of Triton whose machine code for it was checked (``benchmarks/hopper.py``). Gluon is
#: experimental: another version may not compile the kernel, or compile it wrongly.
TRITON = ((3, 6), (3, 7), (3, 8), (3, 9))
#: Bytes of shared memory that a program may have, less those of the barriers.
SHARED = 232448 - 1024


@functools.cache
def compiles() -> bool:
    """Whether the Triton installed is one that compiles the kernel."""
    try:
        import triton
    except ImportError:
        return False
    return tuple(map(int, triton.__version__.split(".")[:2])) in TRITON


def available(device: torch.device) -> bool:
    """Whether the kernel can run on a device at all."""
    return tiles.family(device) == "cuda-sm90" and compiles()


def fits(x: torch.Tensor, words: torch.Tensor, group: int, parts: int) -> bool:
    """Whether the kernel can serve a call.

    Args:
        x: [M, K] of 16-bit floats, contiguous. TMA reads it: from a 16-byte border on.
        words: [groups, NP, group / 8] int32. Loaded two groups ahead, hence two groups a part.
        group: Values of k that share a scale.
        parts: The K partition.
    """
    groups = words.shape[0]
    return (
        group == GROUP
        and x.shape[1] == groups * GROUP
        and groups >= 2 * parts
        and x.data_ptr() % 16 == 0
        and words.data_ptr() % 16 == 0
        and available(x.device)
    )


def stages(bm: int) -> int:
    """Groups of x that shared memory holds beside the sums of a tile of ``bm`` rows, at most 6."""
    return min(6, (SHARED - BN * bm * 4) // (bm * GROUP * 2))


def launch(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    parts: int,
    tile: tiles.Tile,
) -> None:
    """Run the kernel; the arguments as in ``int4_gemm.launch``, and such that ``fits``.

    Nothing is allocated on the device, no counter is used, and the host waits for nothing.

    Raises:
        ValueError: There is no such tile, or the call does not fit.
    """
    if tile.bn != BN or tile.bm not in BM:
        raise ValueError(f"the Hopper kernel has no tile of {tile.bn} columns and {tile.bm} rows")
    if not fits(x, words, GROUP, parts):
        raise ValueError("the Hopper kernel cannot serve this call")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from vllm_b70.kernels import int4_linear_hopper as kernels

    rows, columns = out.shape
    groups, padded, _ = words.shape
    row_tiles, column_tiles = -(-rows // tile.bm), -(-columns // BN)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    kernels.walk[(min(row_tiles * column_tiles, tiles.processors(x.device)),)](
        TensorDescriptor.from_tensor(x, [tile.bm, GROUP], layout),
        words, scale, words if offset is None else offset, scale if bias is None else bias, out,
        rows, columns, padded, groups, row_tiles, column_tiles, 0,
        PARTS=parts,
        BM=tile.bm,
        STAGES=stages(tile.bm),
        FP16=x.dtype == torch.float16,
        ASYMMETRIC=offset is not None,
        BIAS=bias is not None,
        EVEN_N=padded % BN == 0,
        num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
