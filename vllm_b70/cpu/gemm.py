"""GEMM with one order of addition for every row count: ascending k, fp32.

Both entry points share the inner loop, so they stand in one file: numba's on-disk cache notices a
change of the file that defines an entry point only.

A block of output columns is one unit of parallel work. Its weights are unpacked panel by panel into
fp32 and used for a tile of rows at a time; neither the tile nor the number of threads enters the
order in which an output's products are added.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

COLUMNS = 64  # columns of a block: one panel and its partial sums stay in the first-level cache
DEPTH = 64  # k of a panel
ROWS = 32  # rows of a tile

BFLOAT16, FLOAT16 = 0, 1


@njit
def _accumulate(x, panel, part, row, rows, k, depth):  # type: ignore[no-untyped-def]
    """part[m, n] += sum over kk < depth, ascending, of x[row + m, k + kk] * panel[kk, n]."""
    for m in range(rows):
        full = depth // 8 * 8
        for kk in range(0, full, 8):
            x0, x1 = x[row + m, k + kk], x[row + m, k + kk + 1]
            x2, x3 = x[row + m, k + kk + 2], x[row + m, k + kk + 3]
            x4, x5 = x[row + m, k + kk + 4], x[row + m, k + kk + 5]
            x6, x7 = x[row + m, k + kk + 6], x[row + m, k + kk + 7]
            for n in range(COLUMNS):
                t = part[m, n]
                t += x0 * panel[kk, n]
                t += x1 * panel[kk + 1, n]
                t += x2 * panel[kk + 2, n]
                t += x3 * panel[kk + 3, n]
                t += x4 * panel[kk + 4, n]
                t += x5 * panel[kk + 5, n]
                t += x6 * panel[kk + 6, n]
                t += x7 * panel[kk + 7, n]
                part[m, n] = t
        for kk in range(full, depth):
            xk = x[row + m, k + kk]
            for n in range(COLUMNS):
                part[m, n] += xk * panel[kk, n]


# Rows of a weight are handed over as slices: an index that starts at 0 needs no check for a
# negative value, which would keep the loop from being vectorised.


@njit
def _int4(packed, shift, zeros, values):  # type: ignore[no-untyped-def]
    """values = the nibbles of a row of bytes, less the zero points."""
    for n in range(packed.shape[0]):
        nibble = np.int32(np.int32(packed[n]) >> shift) & np.int32(15)
        values[n] = np.float32(nibble) - zeros[n]


@njit
def _bfloat16(half, bits):  # type: ignore[no-untyped-def]
    """The bits of the float32 values of bfloat16 bits."""
    for n in range(half.shape[0]):
        bits[n] = np.uint32(half[n]) << np.uint32(16)


@njit
def _float16(half, values, bits):  # type: ignore[no-untyped-def]
    """The float32 values of float16 bits; exact, subnormals, infinities and NaN included."""
    for n in range(half.shape[0]):
        h = np.uint32(half[n])
        sign = (h & np.uint32(0x8000)) << np.uint32(16)
        magnitude = h & np.uint32(0x7FFF)
        bits[n] = magnitude << np.uint32(13)
        if magnitude >= np.uint32(0x7C00):
            bits[n] |= np.uint32(0x7F800000)
        else:
            values[n] *= np.float32(2.0**112)  # moves the exponent's bias from 15 to 127
        bits[n] |= sign


@njit(cache=True, parallel=True, nogil=True)
def int4_gemm(x, weight, scale, zero, bias, group_size, out):  # type: ignore[no-untyped-def]
    """out = x @ (scale * (weight - zero)) + bias in the arithmetic of reference.int4_linear.

    Args:
        x: [M, K] float32 that holds 16-bit values.
        weight: [ceil(K / 2), N] uint8; row i holds k = 2i in the low nibble, 2i + 1 in the high.
        scale: [K / group_size, N] float32.
        zero: [K / group_size, N] uint8, or [0, 0] for the symmetric 8.
        bias: [N] float32, or [0].
        group_size: Values of k that share a scale.
        out: [M, N] float32, filled.
    """
    m_total, k_total = x.shape
    n_total = weight.shape[1]
    symmetric = zero.shape[0] == 0
    biased = bias.shape[0] > 0
    for block in prange((n_total + COLUMNS - 1) // COLUMNS):
        n0 = block * COLUMNS
        columns = min(COLUMNS, n_total - n0)
        panel = np.zeros((DEPTH, COLUMNS), np.float32)
        part = np.empty((ROWS, COLUMNS), np.float32)
        total = np.empty((ROWS, COLUMNS), np.float32)
        zeros = np.full(COLUMNS, np.float32(8.0))
        for row in range(0, m_total, ROWS):
            rows = min(ROWS, m_total - row)
            total[:rows] = np.float32(0.0)
            for group in range(k_total // group_size):
                end = (group + 1) * group_size
                if not symmetric:
                    for n in range(columns):
                        zeros[n] = np.float32(zero[group, n0 + n])
                part[:rows] = np.float32(0.0)
                for k in range(group * group_size, end, DEPTH):
                    depth = min(DEPTH, end - k)
                    for kk in range(depth):
                        packed = (k + kk) >> 1
                        shift = np.int32(4 * ((k + kk) & 1))
                        _int4(weight[packed, n0 : n0 + columns], shift, zeros, panel[kk])
                    _accumulate(x, panel, part, row, rows, k, depth)
                for m in range(rows):
                    for n in range(columns):
                        total[m, n] += part[m, n] * scale[group, n0 + n]
            for m in range(rows):
                for n in range(columns):
                    y = total[m, n]
                    if biased:
                        y += bias[n0 + n]
                    out[row + m, n0 + n] = y


@njit(cache=True, parallel=True, nogil=True)
def gemm(x, weight, kind, bias, out):  # type: ignore[no-untyped-def]
    """out = x @ weight + bias in the arithmetic of reference.linear.

    Args:
        x: [M, K] float32 that holds 16-bit values.
        weight: [K, N] uint16, the bits of 16-bit floats.
        kind: BFLOAT16 or FLOAT16.
        bias: [N] float32, or [0].
        out: [M, N] float32, filled.
    """
    m_total, k_total = x.shape
    n_total = weight.shape[1]
    biased = bias.shape[0] > 0
    for block in prange((n_total + COLUMNS - 1) // COLUMNS):
        n0 = block * COLUMNS
        columns = min(COLUMNS, n_total - n0)
        panel = np.zeros((DEPTH, COLUMNS), np.float32)
        bits = panel.view(np.uint32)
        total = np.empty((ROWS, COLUMNS), np.float32)
        for row in range(0, m_total, ROWS):
            rows = min(ROWS, m_total - row)
            total[:rows] = np.float32(0.0)
            for k in range(0, k_total, DEPTH):
                depth = min(DEPTH, k_total - k)
                for kk in range(depth):
                    if kind == BFLOAT16:
                        _bfloat16(weight[k + kk, n0 : n0 + columns], bits[kk])
                    else:
                        _float16(weight[k + kk, n0 : n0 + columns], panel[kk], bits[kk])
                _accumulate(x, panel, total, row, rows, k, depth)
            for m in range(rows):
                for n in range(columns):
                    y = total[m, n]
                    if biased:
                        y += bias[n0 + n]
                    out[row + m, n0 + n] = y
