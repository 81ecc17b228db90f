"""The walk of ``kernels.linear`` with tiles of 3 * BN / 2 columns, for a Hopper.

A tile's sides are powers of two in Triton; two accumulators make one of 192 columns, so that
12288 columns by 256 rows are 128 tiles, one for nearly every multiprocessor. The sums and their
order are those of the other kernels.
"""

import triton
import triton.language as tl

from vllm_b70.kernels.linear import _UNIT, _fetch_weight, _finish, _swizzle
from vllm_b70.kernels.overlap import let_next_start, wait


@triton.jit
def _part(x, w, rest, row, column, first, last,
          BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """``linear._part`` of both accumulators."""
    left = tl.zeros((BM, BN), tl.float32)
    right = tl.zeros((BM, BN // 2), tl.float32)
    for step in range(first * (_UNIT // BK), last * (_UNIT // BK)):
        k = step * BK
        a = x.load([row, k])
        b = w.load([column, k])
        c = rest.load([column + BN, k])
        left = tl.dot(a, b.T, left)
        right = tl.dot(a, c.T, right)
    return left, right


@triton.jit(do_not_specialize=["M"])
def walk(
    x, w, rest, weight, bias, out, M, N, K,
    PARTS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, FLATTEN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``linear.walk``, for operands that are described.

    Args:
        x: A descriptor of [M, K] with blocks [BM, BK].
        w, rest: Descriptors of [N, K] with blocks [BN, BK] and [BN / 2, BK].
    """
    units = tl.cdiv(K, _UNIT)
    row_tiles, column_tiles = tl.cdiv(M, BM), tl.cdiv(N, 3 * BN // 2)
    if PDL:
        if AHEAD > 0:
            _, column = _swizzle(tl.program_id(0), row_tiles, column_tiles, 8)
            column *= 3 * BN // 2
            _fetch_weight(weight, column, 0, N, K, BN, AHEAD)
            _fetch_weight(weight, column + BN, 0, N, K, BN // 2, AHEAD)
        wait()
        let_next_start()
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN
    ):
        row, column = _swizzle(tile, row_tiles, column_tiles, 8)
        row, column = row * BM, column * (3 * BN // 2)
        left, right = _part(x, w, rest, row, column, 0, units // PARTS, BN, BM, BK)
        for i in range(1, PARTS):
            first, last = i * units // PARTS, (i + 1) * units // PARTS
            more_left, more_right = _part(x, w, rest, row, column, first, last, BN, BM, BK)
            left += more_left
            right += more_right
        _finish(out, bias, left, row, column, M, N, BN, BM, False, BIAS)
        _finish(out, bias, right, row, column + BN, M, N, BN // 2, BM, False, BIAS)
