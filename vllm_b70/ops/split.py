"""What every GEMM kernel with a workspace shares: its bound, and the counters where K is split."""

from __future__ import annotations

#: Bytes of workspace that no call exceeds; a tile whose parts would need more walks them instead.
#: (A draft's argmax has its rows in fp16 beside that.)
WORKSPACE = 64 * 2**20


def fits(parts: int, rows: int, columns: int) -> bool:
    """Whether the parts of [rows, columns] sums in fp32 stay inside the workspace."""
    return parts == 1 or 4 * parts * rows * columns <= WORKSPACE


def counters(columns: int, least_bn: int, least_bm: int) -> int:
    """Size of the ``done`` buffer of a weight: int32 zeros that the kernel leaves zero.

    Calls on one weight share it, so they must not overlap in time (one stream does that).

    Args:
        columns: N.
        least_bn, least_bm: Columns and rows of the smallest tile that counts finished parts.
    """
    # Row tiles are bounded by the workspace: parts * M * N * 4 bytes, parts at least 2.
    return -(-columns // least_bn) * (WORKSPACE // (8 * columns) // least_bm + 1)


def rows_at_once(bm: int, column_tiles: int) -> int:
    """Whole tiles of ``bm`` rows whose best columns, an int64 a column tile, fit the workspace."""
    return max(bm, WORKSPACE // (8 * column_tiles) // bm * bm)
