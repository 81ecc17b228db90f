"""The gated delta net by position: no neighbour, width, rejection or recycled slot shows."""

import inspect
import types

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
import vllm.platforms

from vllm_b70.layers import gated_delta_net as gdn
from vllm_b70.layers.state_columns import StateColumns

HK, HV, SIZE, CONV = 2, 4, 64, 4
CHANNELS = (2 * HK + HV) * SIZE
SLOTS = 24


@pytest.fixture(scope="module", autouse=True)
def kernels():
    vllm.platforms.current_platform.import_kernels()
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


@pytest.fixture(params=["SD", "DS"])
def layout(request, monkeypatch):
    monkeypatch.setattr(gdn, "is_conv_state_dim_first", lambda: request.param == "DS")
    return request.param


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_layer(layout, depth):
    """The layer with weights and a poisoned cache, without vLLM's configuration around it."""
    layer = torch.nn.Module.__new__(gdn.RowInvariantGatedDeltaNet)
    torch.nn.Module.__init__(layer)
    layer.tp_size, layer.key_dim, layer.value_dim = 1, HK * SIZE, HV * SIZE
    layer.head_k_dim = layer.head_v_dim = SIZE
    layer.conv_kernel_size = CONV
    layer.conv1d = types.SimpleNamespace(
        bias=None, weight=(random(CHANNELS, 1, CONV, seed=1) * 0.5).bfloat16()
    )
    layer.A_log, layer.dt_bias = random(HV, seed=2), random(HV, seed=3)
    length = CONV - 1 + depth
    shape = (SLOTS, length, CHANNELS) if layout == "SD" else (SLOTS, CHANNELS, length)
    layer.kv_cache = (
        torch.full(shape, float("nan"), dtype=torch.bfloat16),
        torch.full((SLOTS, HV, SIZE, SIZE), float("nan")),
    )
    return layer


class Request:
    """A request's inputs by position, and the draft inputs that will be rejected."""

    def __init__(self, seed, prompt, total, slots):
        self.prompt, self.slots, self.position = prompt, slots, 0
        self.inputs = (
            random(total, CHANNELS, seed=seed).bfloat16(),
            random(total, HV, seed=seed + 1).bfloat16(),
            random(total, HV, seed=seed + 2).bfloat16(),
        )
        self.outputs = torch.zeros(total, HV, SIZE, dtype=torch.bfloat16)


def step(layer, columns, *work):
    """One engine step. ``work`` is (request, tokens) or (request, tokens, rejected): the last
    ``rejected`` rows hold garbage, as a rejected draft's do, and do not advance the request."""
    starts, lens, mixed, betas, alphas, flags = [0], [], [], [], [], []
    for request, tokens, *rejected in work:
        wrong = rejected[0] if rejected else 0
        rows = slice(request.position, request.position + tokens - wrong)
        garbage = [100 * torch.ones_like(part[:1]).expand(wrong, -1) for part in request.inputs]
        for to, part, bad in zip((mixed, betas, alphas), request.inputs, garbage, strict=True):
            to.append(torch.cat([part[rows], bad]))
        starts.append(starts[-1] + tokens)
        lens.append(request.position + tokens)
        flags.append(request.position < request.prompt)
    plan = gdn.plan_step(columns, starts, lens, [w[0].slots for w in work], flags)
    out = torch.zeros(starts[-1], HV, SIZE, dtype=torch.bfloat16)
    context = types.SimpleNamespace(
        attn_metadata={"layer": plan}, no_compile_layers={"layer": layer}
    )
    original, gdn.get_forward_context = gdn.get_forward_context, lambda: context
    try:
        gdn.gated_delta_net(*map(torch.cat, (mixed, betas, alphas)), out, "layer")
    finally:
        gdn.get_forward_context = original
    for (request, tokens, *rejected), first in zip(work, starts, strict=False):
        kept = tokens - (rejected[0] if rejected else 0)
        request.outputs[request.position : request.position + kept] = out[first : first + kept]
        request.position += kept


def alone(seed, prompt, total, layout):
    """The oracle: the prompt in one chunk, then one token at a time without speculation."""
    layer, columns = make_layer(layout, 0), StateColumns()
    request = Request(seed, prompt, total, [1])
    step(layer, columns, (request, prompt))
    while request.position < total:
        step(layer, columns, (request, 1))
    assert not request.outputs.isnan().any()
    return request.outputs


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 63, 64, 65, 129])
def test_a_rejected_draft_leaves_nothing_in_history_or_state(layout, prompt):
    layer, columns = make_layer(layout, 3), StateColumns()
    request = Request(7, prompt, prompt + 12, [1, 2, 3, 4])
    step(layer, columns, (request, prompt))
    for tokens, rejected in ((4, 3), (4, 1), (2, 1), (1, 0), (4, 0), (3, 2), (1, 0)):
        step(layer, columns, (request, tokens, rejected))
    assert request.position == prompt + 13 - 1
    assert torch.equal(request.outputs, alone(7, prompt, prompt + 12, layout))


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 6])
def test_every_width_and_a_width_that_changes(layout, depth):
    layer, columns = make_layer(layout, depth), StateColumns()
    request = Request(11, 70, 70 + 30, list(range(1, depth + 2)))
    step(layer, columns, (request, 70))
    widths = [1 + (7 * i) % (depth + 1) for i in range(60)]
    for width in widths:
        if request.position == 100:
            break
        # The last group is cut short, as by max_model_len.
        step(layer, columns, (request, min(width, 100 - request.position)))
    assert request.position == 100
    assert torch.equal(request.outputs, alone(11, 70, 100, layout))


def test_company_chunks_a_step_sat_out_and_recycled_slots(layout):
    layer, columns = make_layer(layout, 3), StateColumns()
    a = Request(20, 200, 220, [1, 2, 3, 4])
    b = Request(30, 65, 90, [5, 6, 7, 8])
    c = Request(40, 3, 20, [9, 10, 11, 12])
    step(layer, columns, (a, 128), (b, 64))
    step(layer, columns, (b, 1), (c, 3), (a, 64))  # a last prompt chunk of one token
    step(layer, columns, (c, 4, 2), (a, 8))  # b sits a step out
    step(layer, columns, (b, 4, 3), (a, 4, 1), (c, 1))
    step(layer, columns, (c, 4, 1))
    step(layer, columns, (a, 3, 2), (b, 2), (c, 2, 1))
    for request in (a, b, c):
        while request.position < len(request.outputs):
            left = len(request.outputs) - request.position
            step(layer, columns, (request, min(4, left), min(2, left - 1)))
    # A slot that a finished request leaves full of numbers goes to another request.
    d = Request(50, 64, 70, [4, 3, 2, 1])
    step(layer, columns, (d, 64))
    step(layer, columns, (d, 4, 0))
    step(layer, columns, (d, 2))
    for seed, request in ((20, a), (30, b), (40, c), (50, d)):
        expected = alone(seed, request.prompt, len(request.outputs), layout)
        assert torch.equal(request.outputs, expected), f"request {seed}"


@pytest.mark.parametrize("pieces", [[17], [1, 16], [5, 1, 11]])
def test_resumption_replays_the_output_to_the_same_bits(layout, pieces):
    layer, columns = make_layer(layout, 3), StateColumns()
    request = Request(60, 100, 125, [1, 2, 3, 4])
    step(layer, columns, (request, 100))
    for _ in range(4):
        step(layer, columns, (request, 4))
    before = request.outputs[:116].clone()
    request.position, request.slots = 0, [13, 14, 15, 16]  # preempted, then resumed elsewhere
    step(layer, columns, (request, 64))
    step(layer, columns, (request, 36))
    for piece in pieces:
        step(layer, columns, (request, piece))
    assert torch.equal(request.outputs[:116], before)
    step(layer, columns, (request, 4, 1))
    step(layer, columns, (request, 4))
    step(layer, columns, (request, 1))
    assert torch.equal(request.outputs, alone(60, 100, 125, layout))


def test_off_grid_chunks_would_differ_and_are_refused(layout):
    layer, columns = make_layer(layout, 0), StateColumns()
    request = Request(70, 200, 201, [1])
    step(layer, columns, (request, 100))
    with pytest.raises(RuntimeError, match="position 100, which is not a multiple of 64"):
        step(layer, columns, (request, 100))
    # The control: without the check the chunks do give other bits.
    plan = gdn.StepPlan(prompts=[gdn.PromptChunk(0, 100, 100, 1)])
    rows = [part[100:200] for part in request.inputs]
    got = gdn.run_prompt(layer, plan.prompts[0], *rows)
    assert not torch.equal(got, alone(70, 200, 201, layout)[100:200])


@pytest.mark.parametrize("metadata", [None, {}, {"attention": object()}])
def test_a_profile_run_without_metadata_leaves_the_output(metadata, monkeypatch):
    context = types.SimpleNamespace(attn_metadata=metadata)
    monkeypatch.setattr(gdn, "get_forward_context", lambda: context)
    out = torch.full((2, HV, SIZE), 3.0)
    gdn.gated_delta_net(torch.zeros(2, 8), torch.zeros(2, HV), torch.zeros(2, HV), out, "layer")
    assert (out == 3).all()


def test_on_an_xpu_the_core_is_ours_and_not_vllms_op(monkeypatch):
    """The method that vLLM's constructor picks for an XPU, and what vLLM's own would have run."""
    stock = gdn.QwenGatedDeltaNetAttention
    assert "self._forward_method = self.forward_xpu" in inspect.getsource(stock.__init__)
    layer, request = make_layer("SD", 0), Request(80, 70, 70, [1])
    mixed, b, a = request.inputs
    layer.prefix, layer.num_v_heads, layer.conv_dim = "layer", HV, CHANNELS
    layer.gqa_interleaved_layout = layer.disable_tp_for_ba_proj = False
    z = torch.zeros(70, HV * SIZE, dtype=torch.bfloat16)
    layer.in_proj_qkvz = lambda x: (torch.cat([mixed, z], dim=1), None)
    layer.in_proj_ba = lambda x: (torch.cat([b, a], dim=1), None)
    layer._output_projection = lambda core, z: core
    plan = gdn.plan_step(StateColumns(), [0, 70], [70], [[1]], [True])
    context = types.SimpleNamespace(
        attn_metadata={"layer": plan}, no_compile_layers={"layer": layer}
    )
    monkeypatch.setattr(gdn, "get_forward_context", lambda: context)
    layer._forward_method = layer.forward_xpu
    x = torch.zeros(70, 8, dtype=torch.bfloat16)
    assert torch.equal(layer.forward(x), alone(80, 70, 70, "SD"))
    with pytest.raises(AttributeError, match="gdn_attention_core_xpu"):
        stock.forward_xpu(layer, x)


def test_history_sources():
    plan = gdn.StepPlan(
        rows=np.arange(3),
        starts=np.array([0, 1, 3]),
        read=np.array([4, 5]),
        write=np.array([4, -1, 6]),
    )
    slots, sources = plan.history_sources(3)
    # Old histories are 0..2 and 3..5, the three rows 6, 7 and 8.
    assert slots.tolist() == [4, 6]
    assert sources.tolist() == [[1, 2, 6], [5, 7, 8]]
