"""The GPU's step with its kernels in the interpreter: metadata, mixed steps, padding, capture.

vLLM's chunked kernels do not run here: the reference takes their place, one token at a time, so
what is tested is which rows go where, from which state and into which slot.
"""

import random
import types

import pytest
import torch

pytest.importorskip("vllm")
import vllm.platforms  # noqa: F401

from vllm_b70.layers import gated_delta_net as gdn
from vllm_b70.layers import gated_delta_net_device as device
from vllm_b70.reference import gated_delta_rule as reference

HK, HV, SIZE = 1, 2, 16
D = (2 * HK + HV) * SIZE
SLOTS, DEPTH = 40, 3


def normal(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def chunk_kernel(monkeypatch):
    """Stands for FLA's kernels; takes what they take and writes where they write."""

    def chunked(q, k, v, g, beta, scale, initial_state, cu_seqlens, core_attn_out=None, **rest):
        assert rest["output_final_state"]
        counts = [-(-int(n) // 64) for n in cu_seqlens.diff()]
        assert rest["chunk_indices"].tolist() == [
            [n, i] for n, count in enumerate(counts) for i in range(count)
        ]
        assert rest["chunk_offsets"].diff().tolist() == counts
        out = torch.empty_like(v) if core_attn_out is None else core_attn_out.view(v.shape)
        finals = []
        ends = cu_seqlens.tolist()
        for n, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
            s = initial_state[n].transpose(1, 2)
            for t in range(first, last):
                keys, queries = (u[0, t].float().repeat_interleave(HV // HK, 0) for u in (k, q))
                s = s * torch.exp(g[0, t])[:, None, None]
                read = (s * keys[:, :, None]).sum(1)
                update = beta[0, t][:, None] * (v[0, t].float() - read)
                s = s + keys[:, :, None] * update[:, None, :]
                out[0, t] = (s * queries[:, :, None]).sum(1) * scale
            finals.append(s.transpose(1, 2))
        return None, out, None, torch.stack(finals), None, None, None

    monkeypatch.setattr(device, "chunk_gated_delta_rule_fwd", chunked)


def make_layer(slots=SLOTS):
    layer = torch.nn.Module.__new__(gdn.RowInvariantGatedDeltaNet)
    torch.nn.Module.__init__(layer)
    layer.tp_size, layer.key_dim, layer.value_dim = 1, HK * SIZE, HV * SIZE
    layer.head_k_dim = layer.head_v_dim = SIZE
    layer.conv_kernel_size = 4
    layer.conv1d = types.SimpleNamespace(weight=(normal(D, 1, 4, seed=1) * 0.5).contiguous())
    layer.A_log = normal(HV, seed=2, dtype=torch.float32)
    layer.dt_bias = normal(HV, seed=3, dtype=torch.float32)
    layer.kv_cache = (
        torch.full((slots, 3 + DEPTH, D), float("nan"), dtype=torch.bfloat16),
        torch.full((slots, HV, SIZE, SIZE), float("nan")),
    )
    return layer


def make_builder(layer, requests=8):
    builder = device.DeviceGDNBuilder.__new__(device.DeviceGDNBuilder)
    builder.device, builder.num_spec, builder._record = torch.device("cpu"), DEPTH, None
    builder.layer_names = ["layer"]
    builder.vllm_config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(static_forward_context={"layer": layer})
    )
    builder._starts = torch.zeros(requests + 1, dtype=torch.int32)
    builder._read = torch.zeros(requests, dtype=torch.int32)
    builder._table = torch.zeros((requests, DEPTH + 1), dtype=torch.int32)
    builder._lost = torch.zeros(1, dtype=torch.int32)
    return builder


class Request:
    def __init__(self, seed, prompt, total, slots):
        self.prompt, self.slots, self.position = prompt, slots, 0
        self.inputs = (
            normal(total, D, seed=seed),
            normal(total, HV, seed=seed + 1),
            normal(total, HV, seed=seed + 2),
        )
        self.outputs = torch.zeros(total, HV, SIZE, dtype=torch.bfloat16)


def metadata(work, padding=0, optimistic=7):
    """vLLM's, from (request, tokens, ...). The host's positions are too high outside prompts."""
    tokens = [w[1] for w in work] + [0] * padding
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    ends = [w[0].position + w[1] for w in work] + [0] * padding
    flags = [w[0].position < w[0].prompt for w in work] + [False] * padding
    table = torch.zeros(len(tokens), 6, dtype=torch.int32)
    for i, (request, *_) in enumerate(work):
        table[i, : len(request.slots)] = torch.tensor(request.slots)
    return types.SimpleNamespace(
        num_reqs=len(tokens), query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=torch.tensor(ends, dtype=torch.int32), block_table_tensor=table,
        is_prefilling=torch.tensor(flags),
        seq_lens_cpu_upper_bound=torch.tensor(
            [end + (0 if flag else optimistic) for end, flag in zip(ends, flags, strict=True)]
        ),
    )  # fmt: skip


def step(layer, builder, *work, padding=0):
    """One step of (request, tokens, rejected rows); returns the plan and the rows that pad."""
    plan = builder.build(0, metadata(work, padding))
    mixed, b, a = [], [], []
    for request, tokens, *rejected in work:
        wrong = rejected[0] if rejected else 0
        rows = slice(request.position, request.position + tokens - wrong)
        for to, part in zip((mixed, b, a), request.inputs, strict=True):
            to.append(torch.cat([part[rows], torch.full_like(part[:1], 90).expand(wrong, -1)]))
    for to, width in ((mixed, D), (b, HV), (a, HV)):
        to.append(torch.full((padding * 2, width), float("nan"), dtype=torch.bfloat16))
    out = torch.zeros(sum(map(len, mixed)), HV, SIZE, dtype=torch.bfloat16)
    context = types.SimpleNamespace(
        attn_metadata={"layer": plan}, no_compile_layers={"layer": layer}
    )
    original, gdn.get_forward_context = gdn.get_forward_context, lambda: context
    try:
        gdn.gated_delta_net(*map(torch.cat, (mixed, b, a)), out, "layer")
    finally:
        gdn.get_forward_context = original
    first = 0
    for request, tokens, *rejected in work:
        kept = tokens - (rejected[0] if rejected else 0)
        request.outputs[request.position : request.position + kept] = out[first : first + kept]
        first += tokens
        request.position += kept
    return plan, out[first:]


def alone(seed, prompt, total):
    layer = make_layer()
    builder = make_builder(layer)
    request = Request(seed, prompt, total, [1])
    step(layer, builder, (request, prompt))
    while request.position < total:
        step(layer, builder, (request, 1))
    assert not request.outputs.isnan().any()
    return request.outputs


def test_mixed_steps_chunks_rejections_padding_and_recycled_slots():
    layer = make_layer()
    builder = make_builder(layer)
    a = Request(20, 135, 150, [1, 2, 3, 4])
    b = Request(30, 65, 82, [5, 6, 7, 8])
    c = Request(40, 3, 14, [9, 10, 11, 12])
    step(layer, builder, (a, 64), (b, 64))
    # A last prompt chunk of one token, and prompt rows that do not stand together.
    plan, _ = step(layer, builder, (b, 1), (c, 3), (a, 64))
    assert plan.prompts.rows == slice(0, 68) and not plan.steps
    plan, rest = step(layer, builder, (c, 4, 2), (a, 7), padding=2)
    assert plan.steps and plan.prompts.rows == slice(4, 11) and not rest.any()
    d = Request(60, 2, 9, [13, 14, 15, 16])
    plan, _ = step(layer, builder, (b, 4, 3), (d, 2), (a, 4, 1), (c, 1))
    assert plan.prompts.rows == slice(4, 6)
    step(layer, builder, (c, 4, 1))
    e = Request(70, 5, 12, [17, 18, 19, 20])
    f = Request(80, 4, 10, [21, 22, 23, 24])
    plan, _ = step(layer, builder, (e, 5), (d, 3, 1), (f, 4))
    assert plan.prompts.rows.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11]
    step(layer, builder, (a, 3, 2), (b, 2), (c, 2, 1), padding=1)
    everyone = {20: a, 30: b, 40: c, 60: d, 70: e, 80: f}
    for request in everyone.values():
        while request.position < len(request.outputs):
            left = len(request.outputs) - request.position
            step(layer, builder, (request, min(4, left), min(2, left - 1)))
    # A slot that a finished request leaves full of numbers goes to another request.
    g = Request(50, 64, 70, [4, 3, 2, 1])
    step(layer, builder, (g, 64))
    step(layer, builder, (g, 4, 0))
    step(layer, builder, (g, 2))
    for seed, request in (everyone | {50: g}).items():
        expected = alone(seed, request.prompt, len(request.outputs))
        assert torch.equal(request.outputs, expected), f"request {seed}"
    assert layer.kv_cache[1][0].isnan().all() and layer.kv_cache[0][0].isnan().all()
    assert not builder._lost.any()


def test_resumption_replays_the_output_in_any_pieces():
    layer = make_layer()
    builder = make_builder(layer)
    request = Request(60, 70, 95, [1, 2, 3, 4])
    step(layer, builder, (request, 70))
    for _ in range(4):
        step(layer, builder, (request, 4))
    before = request.outputs[:86].clone()
    request.position, request.slots = 0, [13, 14, 15, 16]
    for piece in (64, 6, 5, 1, 10):
        step(layer, builder, (request, piece))
    assert torch.equal(request.outputs[:86], before)
    step(layer, builder, (request, 4, 1))
    step(layer, builder, (request, 6))
    assert torch.equal(request.outputs, alone(60, 70, 95))


def test_a_captured_graph_sees_each_step_through_the_builders_buffers():
    layer = make_layer()
    builder = make_builder(layer)
    dummy = Request(1, 0, 8, [0])
    captured = builder.build_for_cudagraph_capture(metadata([(dummy, 4), (dummy, 4)]))
    assert captured.prompts is None and captured.steps and not captured.read.any()
    request = Request(90, 5, 9, [1, 2, 3, 4])
    step(layer, builder, (request, 5))
    plan = builder.build(0, metadata([(request, 4)], padding=1))
    for name in ("starts", "read", "table"):
        assert getattr(plan, name).data_ptr() == getattr(captured, name).data_ptr()
        assert getattr(plan, name).shape == getattr(captured, name).shape
    assert captured.read.tolist() == [1, 0]
    assert captured.table.tolist() == [[1, 2, 3, 4], [0, 0, 0, 0]]


def test_dummy_rows_leave_nothing():
    layer = make_layer()
    builder = make_builder(layer)
    dummy = Request(1, 0, 8, [0, 0, 0, 0])
    _, rest = step(layer, builder, (dummy, 4), padding=1)
    assert not dummy.outputs.any() and not rest.any()
    assert layer.kv_cache[1].isnan().all() and layer.kv_cache[0].isnan().all()
    assert not builder._lost.any()


def test_an_off_grid_chunk_and_a_lost_state_are_refused():
    layer = make_layer()
    builder = make_builder(layer)
    request = Request(70, 200, 210, [1])
    step(layer, builder, (request, 100))
    with pytest.raises(RuntimeError, match="position 100, which is not a multiple of 64"):
        step(layer, builder, (request, 100))
    layer = make_layer()
    builder = make_builder(layer)
    request = Request(80, 4, 20, [1, 2, 3, 4])
    step(layer, builder, (request, 4))
    step(layer, builder, (request, 4))
    request.position += 3
    step(layer, builder, (request, 2))
    assert request.outputs[11:13].isnan().all()
    with pytest.raises(RuntimeError, match="state before a step is gone"):
        step(layer, builder, (request, 1))


def test_prompt_layouts_of_random_batches():
    draw = random.Random(1)
    for _ in range(200):
        starts, ends, flags, rows = [0], [], [], []
        for _ in range(draw.randint(1, 6)):
            tokens, flag = draw.choice([0, 1, 3, 64, 65]), draw.random() < 0.5
            rows += range(starts[-1], starts[-1] + tokens) if flag else []
            starts.append(starts[-1] + tokens)
            ends.append(64 * draw.randint(0, 3) + tokens)
            flags.append(flag)
        layout = device.lay_out_prompts(starts, ends, flags)
        if layout is None:
            assert not rows
            continue
        found = layout.rows()
        assert (list(range(found.start, found.stop)) if isinstance(found, slice) else found) == rows
        assert isinstance(found, slice) == (rows == list(range(rows[0], rows[-1] + 1)))
        assert layout.tokens == len(rows) and layout.offsets[-1] == len(layout.chunks)


def test_a_layout_is_on_the_device_by_one_copy_for_all_groups(monkeypatch):
    """As the host has it, each piece from 16 bytes on, whatever the lengths of those before it."""
    copies = []

    def copy(host, device, dtype):
        copies.append(host)
        return torch.from_numpy(host).to(device, dtype, copy=True)

    monkeypatch.setattr(device, "async_tensor_h2d", copy)
    cpu, draw = torch.device("cpu"), random.Random(2)
    for number in range(50):
        tokens = [draw.choice([1, 3, 64, 65, 130]) for _ in range(draw.randint(1, 9))]
        starts = tuple(sum(tokens[:i]) for i in range(len(tokens) + 1))
        positions = [64 * draw.randint(0, 2) for _ in tokens]
        ends = tuple(p + n for p, n in zip(positions, tokens, strict=True))
        flags = (number % 9 == 0, True, *(draw.random() < 0.5 for _ in tokens))[: len(tokens)]
        copies.clear()
        placed = device.place_prompts(starts, ends, flags, cpu)
        layout = device.lay_out_prompts(starts, ends, flags)
        assert device.place_prompts(starts, ends, flags, cpu) is placed
        if layout is None:
            assert placed is None and not copies
            continue
        assert len(copies) == 1 and placed.layout == layout
        rows = layout.rows()
        if isinstance(rows, slice):
            assert placed.rows == rows
        else:
            assert placed.rows.tolist() == rows and placed.rows.dtype == torch.int64
        resumed = [int(position > 0) for position in layout.positions]
        for name, want in {
            "in_prompt": [int(flag) for flag in flags], "requests": layout.requests,
            "sources": layout.sources, "starts": layout.starts, "offsets": layout.offsets,
            "chunks": [list(chunk) for chunk in layout.chunks], "resumed": resumed,
        }.items():  # fmt: skip
            tensor = getattr(placed, name)
            assert tensor.tolist() == want and tensor.dtype == torch.int32, name
            assert tensor.is_contiguous() and 4 * tensor.storage_offset() % 16 == 0, name


def test_lost_and_blank_states_of_a_call():
    """A sequence keeps its state if it resumes and the state is not lost; a lost one is NaN."""
    placed = device.place_prompts((0, 1, 2, 3, 4), (65, 65, 1, 1), (True,) * 4, torch.device("cpu"))
    read = torch.tensor([0, -1, 0, -1], dtype=torch.int32)
    call = device._prompt_call(placed, torch.arange(8, dtype=torch.int32).view(4, 2), read)
    assert call.kept.shape == call.blank.shape == (4, 1, 1, 1)
    assert call.kept.flatten().tolist() == [True, False, False, False]
    assert call.blank.isnan().flatten().tolist() == [False, True, False, True]
    assert not call.blank[[0, 2]].any() and call.blank.dtype == torch.float32
    assert call.sequences.slots.tolist() == [0, 2, 4, 6]


def test_the_reference_in_place_of_the_chunked_kernel_is_the_recurrence():
    """Else equality above would show nothing about positions: both give nearly the same."""
    tokens = 6
    q, k = normal(tokens, HK, SIZE, seed=5), normal(tokens, HK, SIZE, seed=6)
    v, state = normal(tokens, HV, SIZE, seed=7), torch.zeros(HV, SIZE, SIZE)
    a, b = normal(tokens, HV, seed=8), normal(tokens, HV, seed=9)
    layer = make_layer()
    want, _ = reference.gated_delta_rule(q, k, v, a, b, layer.A_log, layer.dt_bias, state)

    def norm(u):
        return (u / torch.sqrt((u * u).sum(-1, keepdim=True) + 1e-6)).float()

    decay = -torch.exp(layer.A_log) * torch.nn.functional.softplus(a.float() + layer.dt_bias)
    _, got, *_ = device.chunk_gated_delta_rule_fwd(
        norm(q.float())[None], norm(k.float())[None], v[None], decay[None],
        torch.sigmoid(b.float())[None], SIZE**-0.5, state[None], torch.tensor([0, tokens]),
        output_final_state=True, chunk_indices=torch.tensor([[0, 0]]),
        chunk_offsets=torch.tensor([0, 1]),
    )  # fmt: skip
    torch.testing.assert_close(got[0], want, rtol=2e-2, atol=2e-3)
