"""Attention rows depend on their position alone: the cut of the batch, and the kernel under it."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")
from vllm_b70.layers.cpu_attention import cut_rows


def cut(*requests):
    """Requests as (start, tokens, in_prompt)."""
    starts, lens = [0], []
    for start, tokens, _ in requests:
        starts.append(starts[-1] + tokens)
        lens.append(start + tokens)
    got = cut_rows(starts, lens, [r[2] for r in requests])
    return [part.tolist() for part in got]


def test_decode_rows_stand_alone():
    assert cut((10, 1, False), (5, 4, False)) == [
        [0, 1, 2, 3, 4, 5],
        [11, 6, 7, 8, 9],
        [0, 1, 1, 1, 1],
    ]


def test_prompt_rows_are_cut_on_the_grid():
    assert cut((0, 130, True)) == [[0, 64, 128, 130], [64, 128, 130], [0, 0, 0]]
    assert cut((64, 70, True)) == [[0, 64, 70], [128, 134], [0, 0]]


def test_a_tile_is_the_same_however_the_prompt_was_chunked():
    whole = cut((0, 200, True))
    tiles = [
        end
        for start in (0, 64, 128)
        for end in cut((start, min(64, 200 - start) if start < 128 else 72, True))[1]
    ]
    assert tiles == whole[1]


def test_an_empty_request_gives_no_tile():
    assert cut((3, 0, False), (7, 1, False)) == [[0, 1], [8], [1]]


# In a process of its own: vLLM's kernels must be loaded under the plugin's platform, and the
# thread count is fixed at start.
KERNEL = """
import torch
import vllm.platforms
vllm.platforms.current_platform.import_kernels()
import vllm._custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm_b70.layers.cpu_attention import cut_rows
# oneDNN asks the system for the AMX registers, as it does in a server before attention runs.
torch.nn.functional.linear(torch.ones(64, 64).bfloat16(), torch.ones(64, 64).bfloat16())

def rows(requests, heads, kv_heads, size, isa, table, caches, queries, exact=True):
    starts, lens = [0], []
    for start, tokens, _ in requests:
        starts.append(starts[-1] + tokens)
        lens.append(start + tokens)
    if exact:
        starts, lens, owners = cut_rows(starts, lens, [r[2] for r in requests])
        starts, lens = torch.from_numpy(starts), torch.from_numpy(lens)
    else:
        owners = range(len(lens))
        starts, lens = torch.tensor(starts).int(), torch.tensor(lens).int()
    q = torch.cat([queries[start : start + tokens] for start, tokens, _ in requests])
    out = torch.empty_like(q)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lens), num_heads=heads, num_kv_heads=kv_heads, head_dim=size, seq_lens=lens,
        dtype=q.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa,
        enable_kv_split=not exact)
    ops.cpu_attention_with_kv_cache(
        query=q, key_cache=caches[0], value_cache=caches[1], output=out, query_start_loc=starts,
        seq_lens=lens, scale=size**-0.5, causal=True, alibi_slopes=None, sliding_window=-1,
        block_table=table.repeat(len(lens), 1), softcap=0.0, scheduler_metadata=metadata,
        s_aux=None)
    return out

bad, control = 0, 0
for heads, kv_heads, size in ((8, 2, 64), (16, 4, 256), (12, 2, 128)):
    torch.manual_seed(0)
    length, prompt = 600, 500
    isa = _get_attn_isa(torch.bfloat16, 256, size)
    # Blocks that no request owns, and the tail of the last one, hold NaN.
    cache = torch.full((8, kv_heads, 512, size), float("nan"), dtype=torch.bfloat16)
    caches = cache.chunk(2, dim=2)
    table = torch.tensor([[2, 5, 3]], dtype=torch.int32)
    keys, values = (torch.randn(length, kv_heads, size).bfloat16() for _ in range(2))
    queries = torch.randn(length, heads, size).bfloat16()
    for block in (2, 5, 3):
        cache[block] = 0
    slots = table[0].long().repeat_interleave(256) * 256 + torch.arange(256).repeat(3)
    ops.cpu_attn_reshape_and_cache(keys, values, *caches, slots[:length], isa)
    arguments = (heads, kv_heads, size, isa, table, caches, queries)
    alone = torch.cat([rows([(0, prompt, True)], *arguments)] +
                      [rows([(i, 1, False)], *arguments) for i in range(prompt, length)])
    batches = [
        [(0, 64, True), (500, 4, False), (64, 128, True), (504, 1, False), (192, 308, True)],
        [(s, min(64, prompt - s), True) for s in range(0, prompt, 64)],
        [(500, 100, False)],
        [(i, 1, False) for i in range(500, 600)],
        [(500, 7, False), (0, 500, True), (507, 2, False)],
    ]
    for batch in batches:
        want = torch.cat([alone[s : s + n] for s, n, _ in batch])
        got = rows(batch, *arguments)
        assert not got.isnan().any()
        bad += int((got != want).sum())
        control += int((rows(batch, *arguments, exact=False) != want).sum())
print("differing", bad, "control", control)
"""


@pytest.mark.parametrize("threads", ["1", "2"])
def test_kernel_rows_by_position(threads):
    environ = os.environ | {"VLLM_B70": "1", "OMP_NUM_THREADS": threads}
    run = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environ, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    words = run.stdout.split()
    assert words[words.index("differing") + 1] == "0"
    if words[words.index("control") + 1] == "0":
        pytest.skip("rows are equal, but so are those of stock calls on this CPU: nothing is shown")
