"""The INT4 GEMM's kernel for many rows on Hopper: where it can run, and its launch.

Elsewhere a tile of kernel ``hopper`` is served by Triton's ``walk`` of its size: the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from vllm_b70.ops import split, tiles
from vllm_b70.ops.launcher import Launcher

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


@dataclass(frozen=True)
class Share:
    """Who computes what in a launch; ``kernels.hopper_schedule`` says what follows from it.

    Attributes:
        programs: One a multiprocessor at most, so that all run at once: they wait for each other.
        strided: Tiles that have a program each; the others are shared.
        cut: What is shared, as ``Tile.cut`` has it.
        sums: Tiles of fp32 sums that the workspace holds.
        counters: int32 of ``done`` that are used.
    """

    programs: int
    strided: int
    cut: str
    sums: int
    counters: int


@functools.cache
def share(cut: str, count: int, groups: int, parts: int, processors: int, bm: int) -> Share:
    """The share-out of a launch. It changes no bit.

    Args:
        cut: ``Tile.cut``. What does not fit is done with tiles that are cut less.
        count: Tiles of the output.
        groups: Groups along K.
        parts: The K partition.
        processors: Of the device.
        bm: Rows of a tile.
    """
    programs = min(processors, count * parts)
    sums = programs + count * parts
    if (
        cut == "parts"
        and parts > 1
        and groups >= 3 * parts
        and sums * BN * bm * 4 <= split.WORKSPACE
    ):
        return Share(programs, 0, cut, sums, 2 * (programs + count))
    programs = min(processors, count)
    if cut and groups >= 3 and count % programs and programs * 2 * BN * bm * 4 <= split.WORKSPACE:
        # Whole tiles first, as neighbours side by side; one to two a program are shared.
        strided = (count // programs - 1) * programs
        return Share(programs, strided, "tiles", 2 * programs, 2 * programs)
    return Share(programs, count, "", 0, 0)


@functools.cache
def _launcher(
    kernel: Any,
    bm: int,
    cut: str,
    parts: int,
    dtype: torch.dtype,
    asymmetric: bool,
    bias: bool,
    even_n: bool,
    device: torch.device,
    overlap: bool,
) -> Launcher:
    """The kernel with its constants."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return Launcher(
        kernel,
        dict(
            PARTS=parts,
            CUT=cut,
            BM=bm,
            STAGES=stages(bm),
            FP16=dtype == torch.float16,
            ASYMMETRIC=asymmetric,
            BIAS=bias,
            EVEN_N=even_n,
            **tiles.overlap_options(device, overlap),
            num_warps=4,
            enable_fp_fusion=False,
        ),
        blocks={0: (TensorDescriptor.from_tensor, [bm, GROUP], layout)},
    )


def launch(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    done: torch.Tensor,
    out: torch.Tensor,
    parts: int,
    tile: tiles.Tile,
) -> None:
    """Run the kernel; the arguments as in ``int4_gemm.launch``, and such that ``fits``.

    The host waits for nothing. Allocates the workspace of ``share``, at most ``split.WORKSPACE``.

    Raises:
        ValueError: There is no such tile, or the call does not fit.
    """
    if tile.bn != BN or tile.bm not in BM:
        raise ValueError(f"the Hopper kernel has no tile of {tile.bn} columns and {tile.bm} rows")
    if not fits(x, words, GROUP, parts):
        raise ValueError("the Hopper kernel cannot serve this call")
    from vllm_b70.kernels import int4_linear_hopper as kernels

    rows, columns = out.shape
    groups, padded, _ = words.shape
    row_tiles, column_tiles = -(-rows // tile.bm), -(-columns // BN)
    plan = share(
        tile.cut, row_tiles * column_tiles, groups, parts, tiles.processors(x.device), tile.bm
    )
    state = torch.empty(max(1, plan.sums * BN * tile.bm), dtype=torch.float32, device=x.device)
    launcher = _launcher(
        kernels.walk, tile.bm, plan.cut, parts, x.dtype, offset is not None, bias is not None,
        padded % BN == 0, x.device, tile.overlap,
    )  # fmt: skip
    launcher(
        (plan.programs,),
        (x, words, scale, words if offset is None else offset, scale if bias is None else bias,
         state, done, out),
        rows, columns, padded, groups, row_tiles, column_tiles, plan.strided, 0,
    )  # fmt: skip
