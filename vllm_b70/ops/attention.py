"""``torch.ops.vllm_b70.paged_attention``: causal attention over vLLM's paged KV cache on a GPU."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from vllm_b70.ops import library, tiles
from vllm_b70.ops.launcher import Launcher

#: Bytes of workspace that no call exceeds. Sequences whose parts do not fit are walked by one
#: program a row tile; the bits are the same.
WORKSPACE = 128 * 2**20
#: Rows (query tokens times query heads of a key head) up to which a sequence's parts run side by
#: side: a verification of 17 tokens with 6 heads fits. One with more rows is refused (layers).
LIMIT = 128


@dataclass(frozen=True)
class Partition:
    """How the keys are cut. This is arithmetic: it follows the head size alone.

    Attributes:
        part: Keys of a part.
        tile: Keys of a tile; a power of two that divides ``part``.
    """

    part: int
    tile: int


@dataclass(frozen=True)
class Launch:
    """What cannot change a result.

    Attributes:
        rows: Query rows of a program; a power of two, at least 16.
        warps: Warps of a program.
        stages: Loads in flight.
        registers: Of a thread at most, on CUDA; 0 leaves it to the compiler.
        grf: Registers of an XPU thread, 128 or 256; 0 leaves it to the compiler.
    """

    rows: int
    warps: int
    stages: int
    registers: int = 0
    grf: int = 0

    def options(self, device: torch.device) -> dict[str, Any]:
        """For the launcher."""
        found: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        found |= tiles.grf_options(self.grf, device)
        if self.registers and device.type == "cuda":
            found["maxnreg"] = self.registers
        return found


@dataclass(frozen=True)
class Plan:
    """Every launch of a call.

    Attributes:
        partition: The cut of the keys.
        split: For few rows a sequence, by the most rows that one has.
        walk: For many.
        programs: Programs of split on each multiprocessor.
        merge_warps: Warps of a program of merge.
    """

    partition: Partition
    split: Launch
    walk: Launch
    programs: int = 2
    merge_warps: int = 2


PARTITIONS = {64: Partition(256, 64), 128: Partition(256, 64), 256: Partition(256, 32)}


@functools.cache
def plan(head_size: int, rows: int, device_type: str = "cuda") -> Plan:
    """The plan for a call.

    Args:
        head_size: D, one of ``PARTITIONS``.
        rows: The most rows of a sequence in the call.
        device_type: Of the tensors. It chooses launches only, never the partition.

    Raises:
        ValueError: No partition is made for this head size.
    """
    if head_size not in PARTITIONS:
        raise ValueError(f"head size must be one of {sorted(PARTITIONS)}, not {head_size}")
    if device_type == "xpu":
        # Not timed: what holds the least in registers, of launches that repeat few products.
        split = Launch(16 if rows <= 16 else 32, 4, 3, grf=256)
        walk = Launch(128, 16, 3, grf=256)
        return Plan(PARTITIONS[head_size], split, walk, programs=4, merge_warps=4)
    split = Launch(16 if rows <= 16 else 32, 4, 3)
    walk = Launch(128, 8, 3 if head_size == 256 else 2)
    return Plan(PARTITIONS[head_size], split, walk, programs=4)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    max_query: int,
    max_length: int,
) -> None:
    """Causal attention of each query row over its sequence's keys up to its position.

    Row bits depend on the row, its position and its sequence's keys: not on the number of
    sequences, the length of a query, padding, or what other slots of the cache hold. The
    arithmetic is in ``reference.attention``. No value of the device is read on the host, so a
    captured graph serves other lengths; ``max_query`` and ``max_length`` must bound those.

    Args:
        q: [T, HQ, D] fp16 or bf16; the last two dimensions contiguous.
        k: [blocks, block size, H, D], the dtype of ``q``; H divides HQ. Any strides but the last.
        v: As ``k``, with the same strides.
        out: [T, HQ, D], the dtype of ``q``, filled; rows that belong to no sequence are left.
        table: [S, ...] int32, the blocks of each sequence.
        starts: [S + 1] int32, where each sequence's queries start in ``q``; not descending.
        lengths: [S] int32, the position after each sequence's last query row.
        scale: Of the scores.
        max_query: At least the query tokens of any sequence.
        max_length: At least any length; only sizes the workspace.

    Raises:
        ValueError: A shape, stride or dtype does not fit.
    """
    group = q.shape[1] // k.shape[2]
    launch(
        q, k, v, out, table, starts, lengths, scale, max_query, max_length,
        plan(q.shape[2], max_query * group, q.device.type),
    )  # fmt: skip


def _padded(sequences: int) -> int:
    """A power of two that holds them. Few different ones: each is a kernel to compile."""
    return 16 if sequences <= 16 else max(128, 1 << (sequences - 1).bit_length())


def sequence_counts(most: int) -> list[int]:
    """Numbers of sequences up to ``most``, both ends of each range that has kernels of its own,
    ascending; 1 is a range, for it is never split beside others."""
    counts = range(2, most + 1)
    ends = {n for n in counts if _padded(n) != _padded(n - 1)}
    return sorted({1, most, min(2, most)} | ends | {n - 1 for n in ends})


@functools.cache
def _constants(heads: int, group: int, size: int, part: int, sequences: int) -> dict[str, Any]:
    """What all three kernels are compiled for; ``sequences`` is a number that holds them."""
    return dict(
        HEADS=heads,
        GROUP=group,
        D=size,
        PART=part,
        SEQUENCES=sequences,
        enable_fp_fusion=False,
    )


@functools.cache
def _tiled(
    kernel: Any,
    launch: Launch,
    block: int,
    tile: int,
    limit: int,
    device: torch.device,
    *shape: int,
) -> Launcher:
    """``split`` or ``walk`` with its constants.

    Args:
        kernel: The kernel.
        launch: How it is launched.
        block: Slots of a block of the cache.
        tile: Keys of a tile.
        limit: Rows of a sequence up to which it is split.
        device: Where it runs.
        shape: For ``_constants``.
    """
    own = dict(ROWS=launch.rows, LIMIT=limit, BLOCK=block, TILE=tile)
    return Launcher(kernel, own | launch.options(device) | _constants(*shape))


@functools.cache
def _merge(kernel: Any, columns: int, warps: int, limit: int, *shape: int) -> Launcher:
    """``merge`` with its constants; ``shape`` is for ``_constants``."""
    group_rows = 1 << (shape[1] - 1).bit_length()
    own = dict(GROUP_ROWS=group_rows, COLUMNS=columns, LIMIT=limit, STAGES=4, num_warps=warps)
    return Launcher(kernel, own | _constants(*shape))


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    max_query: int,
    max_length: int,
    plan: Plan,
    limit: int = LIMIT,
    workspace: int = WORKSPACE,
) -> None:
    """``paged_attention`` by a given plan; what the benchmark times and tests compare.

    Args:
        plan: The launches.
        limit: Rows of a sequence up to which it is split; 0 walks all.
        workspace: Bytes of workspace at most.
    """
    _check(q, k, v, out, table, starts, lengths, plan)
    from vllm_b70.kernels import attention as kernels

    tokens, query_heads, size = q.shape
    sequences, heads = lengths.shape[0], k.shape[2]
    group = query_heads // heads
    if tokens == 0 or sequences == 0:
        return
    partition = plan.partition
    shape = (heads, group, size, partition.part, _padded(sequences))
    strides = (q.stride(0), out.stride(0), table.stride(0), k.stride(0), k.stride(1), k.stride(2))
    score = scale * math.log2(math.e)
    most = min(max_query, tokens) * group
    # One sequence of many rows leaves nothing to split; else whoever has few rows is split.
    if limit > 0 and (sequences > 1 or most <= limit):
        parts = -(-max_length // partition.part)
        rows = min(most, limit) * heads * sequences * parts
        # Whole 16 bytes: the kernels are compiled once more for a pointer that is off them.
        capacity = 4 * max(1, min(-(-rows // 4), workspace // (16 * (size + 2))))
        work = torch.empty((capacity, size + 2), dtype=torch.float32, device=q.device)
        work_acc, rest = work.view(-1).split([capacity * size, 2 * capacity])
        work_m, work_total = rest.split(capacity)
        choice = plan.split
        items = parts * heads * (min(most, limit) * sequences // choice.rows + sequences)
        programs = max(1, min(items, plan.programs * tiles.processors(q.device)))
        split = _tiled(kernels.split, choice, k.shape[1], partition.tile, limit, q.device, *shape)
        split(
            (programs,), (q, k, v, table, starts, lengths, out, work_m, work_total, work_acc),
            score, sequences, capacity, *strides,
        )  # fmt: skip
        waiting = min(tokens, sequences * max(1, limit // group))
        columns = size if waiting * heads >= 2 * tiles.processors(q.device) else min(size, 64)
        _merge(kernels.merge, columns, plan.merge_warps, limit, *shape)(
            (waiting, heads, size // columns),
            (starts, lengths, out, work_m, work_total, work_acc),
            sequences, capacity, out.stride(0),
        )  # fmt: skip
    if most > limit:
        choice = plan.walk
        walk = _tiled(
            kernels.walk, choice, k.shape[1], partition.tile, limit if sequences > 1 else 0,
            q.device, *shape,
        )  # fmt: skip
        walk(
            (tokens * group // choice.rows + sequences, heads),
            (q, k, v, table, starts, lengths, out), score, sequences, *strides,
        )  # fmt: skip


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    plan: Plan,
) -> None:
    if q.dim() != 3 or q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"q must be [T, HQ, D] bfloat16 or float16, not {q.dtype} {(*q.shape,)}")
    if out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"out must be {q.dtype} {(*q.shape,)}, not {out.dtype} {(*out.shape,)}")
    for name, x in (("q", q), ("out", out)):
        if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            raise ValueError(f"the heads of {name} must be contiguous, not strided {x.stride()}")
    if k.dim() != 4 or k.dtype != q.dtype or k.shape[3] != q.shape[2]:
        raise ValueError(
            f"k must be [blocks, block size, H, {q.shape[2]}] {q.dtype}, "
            f"not {k.dtype} {(*k.shape,)}"
        )
    if k.shape[2] == 0 or q.shape[1] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} key heads do not divide {q.shape[1]} query heads")
    if v.shape != k.shape or v.dtype != k.dtype or v.stride() != k.stride() or k.stride(3) != 1:
        raise ValueError(
            f"v must be as k, {k.dtype} {(*k.shape,)} strided {k.stride()} and ending in 1, "
            f"not {v.dtype} {(*v.shape,)} strided {v.stride()}"
        )
    sequences = lengths.shape[0]
    if starts.shape != (sequences + 1,) or table.shape[0] < sequences or table.stride(-1) != 1:
        raise ValueError(
            f"{sequences} sequences need starts [{sequences + 1}] and as many rows of table, "
            f"not {(*starts.shape,)} and {(*table.shape,)}"
        )
    for name, x in (("table", table), ("starts", starts), ("lengths", lengths)):
        if x.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, not {x.dtype}")
    part, tile = plan.partition.part, plan.partition.tile
    if part % tile or tile & (tile - 1):
        raise ValueError(f"a tile of {tile} keys must be a power of two that divides {part}")


def _fake(q: torch.Tensor, *_: object) -> None:
    return None


library.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor table, Tensor starts, "
    "Tensor lengths, float scale, int max_query, int max_length) -> ()",
    paged_attention,
    _fake,
    devices=("CUDA", "XPU", "CPU"),
)
