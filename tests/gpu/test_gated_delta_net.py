"""The gated delta net on a GPU, through the metadata builder and vLLM's chunked kernels.

Bits are compared. What a request gets alone, its prompt whole and then one token a step, is what it
must get in every other way; controls show that the comparison can fail.
"""

import hashlib
import itertools
import os
import random
import subprocess
import sys
import types

import pytest
import torch

pytest.importorskip("vllm")
import vllm.platforms  # noqa: F401

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from vllm_b70.compat import fla_autotune
from vllm_b70.layers import gated_delta_net as gdn
from vllm_b70.layers import gated_delta_net_device as device
from vllm_b70.ops.recurrent_steps import recurrent_steps
from vllm_b70.reference import gated_delta_rule as reference

HK, SIZE = 16, 128
BF16, FP16 = torch.bfloat16, torch.float16
NAN = float("nan")
both_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16])
both_heads = pytest.mark.parametrize("heads", [32, 48])

CHILD = """
import importlib.util, torch
spec = importlib.util.spec_from_file_location("child", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.fla_autotune.apply()
with torch.inference_mode():
    print(module.{call})
"""


def child(call, **environment):
    """A process that prints what a function of this file gives."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(path=__file__, call=call)],
        stdout=subprocess.PIPE, text=True, env=os.environ | environment,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def replicas(tmp_path_factory):
    """Two processes with empty caches, beside the tests; others compile what the tests launch."""
    compiling = [
        child(f"compile_all({heads}, torch.{name})")
        for heads in (32, 48)
        for name in ("bfloat16", "float16")
    ]
    found = [
        child("digest()", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache"))) for _ in range(2)
    ]
    for process in compiling:
        process.wait(timeout=300)
    yield found
    for process in found:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", autouse=True)
def inference():
    fla_autotune.apply()
    with torch.inference_mode():
        yield


def normal(*shape, seed, dtype=BF16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def unequal(a, b):
    """How many elements differ in their bits, on the device."""
    assert a.shape == b.shape and a.dtype == b.dtype
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    return (a.contiguous().view(bits) != b.contiguous().view(bits)).sum()


def differing(a, b):
    return int(unequal(a, b))


class Request:
    """A request's inputs by position, laid out as the projections lay them out."""

    def __init__(self, engine, seed, prompt, total, slots):
        self.prompt, self.slots, self.position = prompt, slots, 0
        width = engine.channels + engine.heads * SIZE
        self.qkvz = normal(total, width, seed=seed, dtype=engine.dtype)
        self.ba = normal(total, 2 * engine.heads, seed=seed + 1, dtype=engine.dtype)
        self.outputs = engine.outputs(total)


class Engine:
    """A layer with its cache, and the builder of its group."""

    def __init__(self, heads=32, depth=3, slots=16, requests=80, dtype=BF16):
        self.heads, self.depth, self.channels = heads, depth, (2 * HK + heads) * SIZE
        self.dtype = dtype
        layer = torch.nn.Module.__new__(gdn.RowInvariantGatedDeltaNet)
        torch.nn.Module.__init__(layer)
        layer.tp_size, layer.key_dim, layer.value_dim = 1, HK * SIZE, heads * SIZE
        layer.head_k_dim = layer.head_v_dim = SIZE
        layer.conv_kernel_size = 4
        weight = normal(self.channels, 1, 4, seed=1, dtype=dtype) * 0.5
        layer.conv1d = types.SimpleNamespace(weight=weight)
        layer.A_log = normal(heads, seed=2, dtype=torch.float32)
        layer.dt_bias = normal(heads, seed=3, dtype=dtype)
        self.layer = layer
        # One page a slot, history and state side by side, as in vLLM's cache; full of NaN.
        history, state = 2 * (3 + depth) * self.channels, 4 * heads * SIZE * SIZE
        pages = torch.full((slots, history + state), 0xFF, dtype=torch.uint8, device="cuda")
        layer.kv_cache = (
            pages[:, :history].view(dtype).unflatten(1, (3 + depth, self.channels)),
            pages[:, history:].view(torch.float32).unflatten(1, (heads, SIZE, SIZE)),
        )
        assert all(part.isnan().all() for part in layer.kv_cache)
        builder = device.DeviceGDNBuilder.__new__(device.DeviceGDNBuilder)
        builder.device, builder.num_spec, builder._record = torch.device("cuda"), depth, None
        builder.layer_names = ["layer"]
        builder.vllm_config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(static_forward_context={"layer": layer})
        )
        like = {"dtype": torch.int32, "device": "cuda"}
        builder._starts = torch.zeros(requests + 1, **like)
        builder._read = torch.zeros(requests, **like)
        builder._table = torch.zeros((requests, depth + 1), **like)
        builder._lost = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.builder = builder

    def outputs(self, rows, value=0.0):
        return torch.full((rows, self.heads, SIZE), value, dtype=self.dtype, device="cuda")

    def metadata(self, work, padding=0):
        """vLLM's; the host's positions are too high outside prompts, as they are in vLLM."""
        tokens = [w[1] for w in work] + [0] * padding
        starts = torch.tensor([0, *tokens]).cumsum(0).int()
        flags = [w[0].position < w[0].prompt for w in work] + [False] * padding
        ends = [w[0].position + w[1] for w in work] + [0] * padding
        table = torch.zeros(len(tokens), self.depth + 3, dtype=torch.int32)
        for i, (request, *_) in enumerate(work):
            table[i, : len(request.slots)] = torch.tensor(request.slots)
        return types.SimpleNamespace(
            num_reqs=len(tokens), query_start_loc=starts.cuda(), query_start_loc_cpu=starts,
            seq_lens=torch.tensor(ends, dtype=torch.int32).cuda(),
            block_table_tensor=table.cuda(), is_prefilling=torch.tensor(flags),
            seq_lens_cpu_upper_bound=torch.tensor(
                [end + 9 * (not flag) for end, flag in zip(ends, flags, strict=True)]
            ),
        )  # fmt: skip

    def inputs(self, work, extra=0):
        """Rows of the batch; rejected drafts hold garbage, rows that pad hold NaN."""
        parts = [[], []]
        for request, tokens, *rejected in work:
            wrong = rejected[0] if rejected else 0
            rows = slice(request.position, request.position + tokens - wrong)
            for to, part in zip(parts, (request.qkvz, request.ba), strict=True):
                to.append(part[rows])
                to.append(torch.full_like(part[:1], 90.0).expand(wrong, -1))
        for to, width in zip(parts, (request.qkvz.shape[1], 2 * self.heads), strict=True):
            to.append(torch.full((extra, width), NAN, dtype=self.dtype, device="cuda"))
        return [torch.cat(part) for part in parts]

    def split(self, qkvz, ba):
        b, a = ba.chunk(2, dim=-1)
        return qkvz[:, : self.channels], b, a

    def finish(self, work, out):
        first = 0
        for request, tokens, *rejected in work:
            kept = tokens - (rejected[0] if rejected else 0)
            rows = slice(request.position, request.position + kept)
            request.outputs[rows] = out[first : first + kept]
            first += tokens
            request.position += kept

    def step(self, *work, padding=0):
        """One step of (request, tokens, rejected rows at their end)."""
        plan = self.builder.build(0, self.metadata(work, padding))
        qkvz, ba = self.inputs(work)
        out = self.outputs(len(ba))
        device.run_step(self.layer, plan, *self.split(qkvz, ba), out)
        self.finish(work, out)
        return plan

    def caches(self, slot):
        return [self.layer.kv_cache[0][slot, :3].clone(), self.layer.kv_cache[1][slot].clone()]


def alone(seed, prompt, total, heads=32, dtype=BF16, keep=None):
    """A request by itself: its prompt in one chunk, then one token a step without speculation.

    ``keep`` is a list that takes history and state after the prompt and each token after it.
    """
    engine = Engine(heads, depth=0, slots=2, requests=1, dtype=dtype)
    request = Request(engine, seed, prompt, total, [1])
    while request.position < total:
        engine.step((request, 1 if request.position else prompt))
        if keep is not None:
            keep.append(engine.caches(1))
    assert not request.outputs.isnan().any()
    return request.outputs, engine.caches(1)


def chunked(seed, prompt, ends, heads=32, dtype=BF16):
    """A prompt cut at ``ends``; its outputs, state and history."""
    engine = Engine(heads, depth=0, slots=4, requests=2, dtype=dtype)
    request = Request(engine, seed, prompt, prompt, [1])
    for end in ends:
        engine.step((request, end - request.position))
    return [request.outputs, *engine.caches(1)]


def columns_differ(engine, request, kept, first):
    """How many elements of the first ``kept`` columns' caches are not those of one-token steps.

    ``first`` has the history and the state that those steps leave after each of these tokens.
    """
    found = 0
    for slot, want in zip(request.slots, first[:kept], strict=False):
        found += sum(unequal(*pair) for pair in zip(engine.caches(slot), want, strict=True))
    return found


@both_dtypes
@both_heads
def test_c2_decode_against_verify_of_every_width(heads, dtype):
    kept = []
    want, _ = alone(11, 70, 104, heads, dtype, kept)
    wrong = {}
    for width in range(1, 18):
        engine = Engine(heads, depth=16, slots=19, requests=1, dtype=dtype)
        request = Request(engine, 11, 70, 104, list(range(1, 18)))
        engine.step((request, 70))
        wrong[width] = 0
        while request.position < 104:
            first, tokens = request.position - 69, min(width, 104 - request.position)
            engine.step((request, tokens))
            wrong[width] += columns_differ(engine, request, tokens, kept[first:])
        wrong[width] += unequal(request.outputs, want)
        assert engine.layer.kv_cache[1][[0, 18]].isnan().all(), "null and unused slots"
    assert {width: int(count) for width, count in wrong.items() if count} == {}
    # The control: a rounded state is noticed.
    engine = Engine(heads, depth=0, slots=2, requests=1, dtype=dtype)
    request = Request(engine, 11, 70, 104, [1])
    engine.step((request, 70))
    state = engine.layer.kv_cache[1]
    while request.position < 104:
        state.copy_(state.to(dtype).float())
        engine.step((request, 1))
    assert differing(request.outputs, want) > 0


@both_heads
def test_c2_any_width_with_any_rejection(heads):
    kept = []
    want, _ = alone(13, 66, 126, heads, keep=kept)
    draw, seen = random.Random(7), set()
    for _ in range(12):
        engine = Engine(heads, depth=16, slots=18, requests=1)
        request = Request(engine, 13, 66, 126, draw.sample(range(1, 18), 17))
        engine.step((request, 66))
        wrong = 0
        while request.position < 126:
            first, tokens = request.position - 65, draw.randint(1, 17)
            tokens = min(tokens, 126 - request.position)
            rejected = draw.randint(0, tokens - 1)
            engine.step((request, tokens, rejected))
            wrong += columns_differ(engine, request, tokens - rejected, kept[first:])
            seen.add(tokens)
        assert int(wrong) == 0 and differing(request.outputs, want) == 0
    assert seen >= set(range(5, 18)), "a width was never drawn"


def test_close_to_the_reference():
    engine = Engine(32, depth=0, slots=2, requests=1)
    request = Request(engine, 5, 80, 96, [1])
    engine.step((request, 80))
    while request.position < 96:
        engine.step((request, 1))
    layer = engine.layer
    x, b, a = (part.cpu() for part in engine.split(request.qkvz, request.ba))
    weight = layer.conv1d.weight.view(engine.channels, 4).cpu()
    x = reference.causal_conv(x, torch.zeros(3, engine.channels, dtype=BF16), weight, None)
    q, k, v = x.split([HK * SIZE, HK * SIZE, engine.heads * SIZE], dim=-1)
    want, states = reference.gated_delta_rule(
        q.unflatten(-1, (HK, SIZE)), k.unflatten(-1, (HK, SIZE)), v.unflatten(-1, (-1, SIZE)),
        a, b, layer.A_log.cpu(), layer.dt_bias.float().cpu(),
        torch.zeros(engine.heads, SIZE, SIZE),
    )  # fmt: skip
    got = request.outputs.cpu().float()
    for rows in (slice(0, 80), slice(80, 96)):
        error = (got[rows] - want[rows].float()).norm() / want[rows].float().norm()
        assert error < 0.02, f"rows {rows}: relative error {error:.4f}"
    final = layer.kv_cache[1][1].cpu().transpose(1, 2)
    assert (final - states[-1]).norm() / states[-1].norm() < 0.02


@both_heads
def test_c1_c3_sixty_four_mixed_sequences_against_each_alone(heads):
    draw = random.Random(3)
    engine = Engine(heads, depth=3, slots=4 * 72 + 1, requests=66)
    everyone, left_at = [], {}
    for i in range(72):
        prompt = draw.choice([1, 2, 3, 17, 63, 64, 65, 129, 200, 321])
        slots = list(range(4 * i + 1, 4 * i + 5))
        draw.shuffle(slots)
        everyone.append(Request(engine, 100 + 2 * i, prompt, prompt + 12, slots))
    running, late, mixed, full, steps = everyone[:64], everyone[64:], 0, 0, 0
    while late or running:
        while late and len(running) < 64 and draw.random() < 0.5:
            running.append(late.pop())
        work = []
        for request in draw.sample(running, len(running)):
            left = len(request.outputs) - request.position
            if steps > 2 and draw.random() < 0.1:
                continue  # sits the step out
            if request.position < request.prompt:
                rest = request.prompt - request.position
                work.append((request, min(rest, 64 * draw.randint(1, 3))))
            else:
                tokens = min(draw.randint(1, 4), left)
                work.append((request, tokens, draw.randint(0, tokens - 1)))
        steps += 1
        if not work:
            continue
        plan = engine.step(*work, padding=draw.randint(0, 2))
        is_mixed = plan.prompts is not None and plan.steps
        mixed += is_mixed
        full += is_mixed and len(work) == 64
        for request, tokens, *rejected in work:
            if rejected:
                left_at[request] = request.slots[tokens - rejected[0] - 1]
        running = [r for r in running if r.position < len(r.outputs)]
    assert mixed > 3 and full > 0, "too few steps mixed prompts and decodes, or none of all 64"
    assert not engine.builder._record.lost.any()
    assert engine.layer.kv_cache[1][0].isnan().all()
    for i, request in enumerate(everyone):
        want, caches = alone(100 + 2 * i, request.prompt, request.prompt + 12, heads)
        got = [request.outputs, *engine.caches(left_at[request])]
        for what, a, b in zip(("output", "history", "state"), got, [want, *caches], strict=True):
            assert differing(a, b) == 0, f"{what} of request {i}, prompt {request.prompt}"


def test_resumption_and_recycled_slots():
    want, _ = alone(60, 100, 125)
    for pieces in ([17], [1, 16], [5, 1, 11]):
        engine = Engine(depth=3, slots=20, requests=2)
        request = Request(engine, 60, 100, 125, [1, 2, 3, 4])
        engine.step((request, 100))
        for _ in range(4):
            engine.step((request, 4))
        request.position, request.slots = 0, [4, 14, 2, 16]
        for piece in (64, 36, *pieces):
            engine.step((request, piece))
        engine.step((request, 4, 1))
        engine.step((request, 5))
        assert differing(request.outputs, want) == 0


def sets_of_ends(prompt, draw):
    """Every admissible set of chunk ends of a short prompt, some of a long one's.

    The rest of a long prompt's sets are the next test's.
    """
    inner = list(range(64, prompt, 64))
    if len(inner) <= 4:
        for count in range(len(inner) + 1):
            yield from itertools.combinations(inner, count)
        return
    yield ()
    yield tuple(inner)
    for _ in range(2):
        yield tuple(sorted(draw.sample(inner, draw.randint(1, len(inner)))))


PROMPTS = [1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193, 256, 257, 300, 320, 513,
           1000, 2048, 4095, 8192]  # fmt: skip


@both_dtypes
@both_heads
def test_c3_prompts_cut_at_every_admissible_set_of_ends(heads, dtype):
    draw = random.Random(4)
    for prompt in PROMPTS:
        want = None
        for inner in sets_of_ends(prompt, draw):
            got = chunked(7, prompt, [*inner, prompt], heads, dtype)
            want = want or got
            for what, a, b in zip(("output", "history", "state"), got, want, strict=True):
                assert differing(a, b) == 0, f"{what} of {prompt} tokens cut at {inner}"


LONG, LENGTHS = 8192, 12


@both_dtypes
@both_heads
def test_c3_every_set_of_ends_of_a_long_prompt(heads, dtype):
    """Every chunk between two points of the grid, from the state that the whole prompt has there.

    It must give what the whole prompt gives there: outputs, and the state and history at its end.
    So, by induction, must every set of ends. The same for chunks that end at a prompt's end off the
    grid, for some lengths drawn at random. In fp16 from some points only.
    """
    draw = random.Random(6)
    engine = Engine(heads, depth=0, slots=2, requests=1, dtype=dtype)
    request = Request(engine, 7, LONG, LONG, [1])
    parts, plans = engine.split(request.qkvz, request.ba), {}
    history, state = engine.layer.kv_cache

    def run(first, end):
        """Outputs, history and state of one chunk, from the caches as they are."""
        key = end - first, first > 0
        if key not in plans:
            # A chunk that begins at 0, or one that does not: where else is nothing to a kernel.
            request.position, record = 64 * (first > 0), engine.builder._states()
            record.first[1], record.count[1] = request.position, 1
            plans[key] = engine.builder.build(0, engine.metadata([(request, end - first)]))
        out = engine.outputs(end - first, NAN)
        device.run_step(engine.layer, plans[key], *(part[first:end] for part in parts), out)
        return [out, history[1, :3], state[1]]

    grid = range(64, LONG + 1, 64)
    tails = [n for n in (draw.randrange(1, LONG) for _ in range(LENGTHS)) if n % 64]
    whole = {end: [part.clone() for part in run(0, end)] for end in (*grid, *tails)}
    for end, (out, *_) in whole.items():
        assert not out.isnan().any()
        if end not in tails:
            # One copy of what the long prompt gives is enough.
            assert differing(out, whole[LONG][0][:end]) == 0, f"from 0 to {end}"
            whole[end][0] = whole[LONG][0][:end]
    inner = list(grid)[:-1]
    begins = inner if dtype == BF16 else draw.sample(inner, max(1, len(inner) // 8))
    wrong = {}
    for first in begins:
        wrong[first] = 0
        for end in (*range(first + 64, LONG + 1, 64), *(n for n in tails if n > first)):
            history[1, :3], state[1] = whole[first][1:]
            out, *caches = run(first, end)
            want = [whole[end][0][first:], *whole[end][1:]]
            wrong[first] += sum(map(unequal, [out, *caches], want))
    assert {first: int(count) for first, count in wrong.items() if count} == {}
    # The control: another state before a chunk is noticed.
    history[1, :3], state[1] = whole[64][1], whole[64][2] * 1.01
    assert differing(run(64, LONG)[0], whole[LONG][0][64:]) > 0
    torch.cuda.synchronize()
    engine.builder._check_lost()


def test_control_a_cut_off_the_grid_differs(monkeypatch):
    monkeypatch.setattr(device, "check_chunk", lambda start, tokens: None)
    want = chunked(7, 300, [300])
    got = chunked(7, 300, [100, 300])
    assert differing(got[0], want[0]) > 0


@both_dtypes
@both_heads
@pytest.mark.parametrize(
    ("sequences", "prompt"), [(1, 512), (1, 1000), (1, 2048), (1, 4096), (8, 512)]
)
def test_a_prefill_repeated_two_hundred_times(sequences, prompt, heads, dtype):
    """One launch after another, with nothing in between but the comparison, on the device."""
    engine = Engine(heads, depth=0, slots=sequences + 1, requests=sequences, dtype=dtype)
    requests = [Request(engine, 8 + 2 * i, prompt, prompt, [i + 1]) for i in range(sequences)]
    work = [(request, prompt) for request in requests]
    plan = engine.builder.build(0, engine.metadata(work))
    parts = engine.split(*engine.inputs(work))
    history, state = engine.layer.kv_cache
    want, wrong = None, []
    for _ in range(200):
        out = engine.outputs(sequences * prompt, NAN)
        device.run_step(engine.layer, plan, *parts, out)
        got = [out, history[1:, :3], state[1:]]
        if want is None:
            want = [part.clone() for part in got]
            assert not any(part.isnan().any() for part in want)
        wrong.append(sum(map(unequal, got, want)))
    assert torch.stack(wrong).nonzero().flatten().tolist() == []


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("requests", [1, 64])
@both_heads
def test_two_hundred_steps_back_to_back(heads, requests, width):
    """A kernel that starts while the one before it ends must not read what that has yet to write:
    each step's state is the next one's, and nothing waits in between."""
    engine = Engine(heads, depth=0, slots=requests + 1, requests=requests)
    layer, rows = engine.layer, requests * width
    qkvz = normal(20, rows, engine.channels, seed=40)
    ba = normal(20, rows, 2 * heads, seed=41)
    table = torch.arange(1, requests + 1, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, rows + 1, width, dtype=torch.int32, device="cuda")
    history, state = layer.device_caches()
    weight = layer.conv1d.weight.view(engine.channels, 4)
    found = []
    for wait in (True, False, False, False):
        history.zero_()
        state.zero_()
        outs = torch.full((200, rows, heads, SIZE), NAN, dtype=BF16, device="cuda")
        for t in range(200):
            b, a = ba[t % 20].chunk(2, dim=-1)
            recurrent_steps(
                qkvz[t % 20], a, b, weight, layer.A_log, layer.dt_bias, history, state, starts,
                table, table[:, None], outs[t], HK,
            )  # fmt: skip
            if wait:
                torch.cuda.synchronize()
        found.append([outs, history[1:, :3].clone(), state[1:].clone()])
    assert not any(part.isnan().any() for part in found[0])
    for got in found[1:]:
        assert [differing(*pair) for pair in zip(got, found[0], strict=True)] == [0, 0, 0]


@pytest.mark.parametrize("width", [1, 4])
def test_a_captured_graph_with_padded_requests(width):
    want = [alone(200 + 2 * i, 70 + i, 90 + i)[0] for i in range(5)]
    engine = Engine(depth=3, slots=40, requests=8)
    dummy = Request(engine, 1, 0, width, [0, 0, 0, 0])
    plan = engine.builder.build_for_cudagraph_capture(engine.metadata([(dummy, width)] * 8))
    qkvz, ba = engine.inputs([(dummy, width)] * 8)
    out = engine.outputs(8 * width, 7.0)

    def forward():
        out.zero_()
        device.run_step(engine.layer, plan, *engine.split(qkvz, ba), out)

    forward()
    torch.cuda.synchronize()
    assert not out.any() and engine.layer.kv_cache[1].isnan().all(), "dummy rows leave nothing"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    requests = [
        Request(engine, 200 + 2 * i, 70 + i, 90 + i, list(range(4 * i + 1, 4 * i + 5)))
        for i in range(5)
    ]
    for request in requests:
        engine.step((request, request.prompt))
    draw = random.Random(5)
    while True:
        live = [r for r in requests if len(r.outputs) - r.position >= width]
        if not live:
            break
        work = [(r, width, draw.randint(0, width - 1)) for r in live]
        replayed = engine.builder.build(0, engine.metadata(work, 8 - len(work)))
        assert replayed.read.data_ptr() == plan.read.data_ptr()
        rows, gates = engine.inputs(work, (8 - len(work)) * width)
        qkvz.copy_(rows)
        ba.copy_(gates)
        graph.replay()
        assert not out[len(work) * width :].any(), "rows that pad"
        engine.finish(work, out)
    for request, expected in zip(requests, want, strict=True):
        done = request.position
        assert differing(request.outputs[:done], expected[:done]) == 0
    assert engine.layer.kv_cache[1][0].isnan().all() and engine.layer.kv_cache[0][0].isnan().all()
    assert engine.layer.kv_cache[1][21:].isnan().all(), "slots of nobody"


def test_a_piecewise_graph_is_refused(monkeypatch):
    context = types.SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(gdn, "get_forward_context", lambda: context)
    x = torch.zeros(1, 8, device="cuda")
    gdn.gated_delta_net(x, x, x, x, "layer")
    with pytest.raises(RuntimeError, match="FULL_DECODE_ONLY"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            gdn.gated_delta_net(x, x, x, x, "layer")


def test_the_op_is_there_for_the_device(monkeypatch):
    engine = Engine(depth=0, slots=2, requests=1)
    request = Request(engine, 15, 65, 65, [1])
    plan = engine.builder.build(0, engine.metadata([(request, 65)]))
    context = types.SimpleNamespace(
        attn_metadata={"layer": plan}, no_compile_layers={"layer": engine.layer}
    )
    monkeypatch.setattr(gdn, "get_forward_context", lambda: context)
    out = engine.outputs(65)
    mixed, b, a = engine.split(request.qkvz, request.ba)
    torch.ops.vllm_b70.gated_delta_net(mixed, b, a, out, "layer")
    assert differing(out, alone(15, 65, 65)[0]) == 0


def compile_all(heads, dtype):
    """Compile every kernel that the tests launch."""
    alone(9, 65, 67, heads, dtype)


def digest():
    """One hash over many results, for comparing processes."""
    found = hashlib.sha256()
    for heads in (32, 48):
        for prompt in (65, 700, 2048):
            outputs, caches = alone(9, prompt, prompt + 8, heads)
            for part in (outputs, *caches):
                bits = torch.int16 if part.element_size() == 2 else torch.int32
                found.update(part.contiguous().view(bits).cpu().numpy().tobytes())
    return found.hexdigest()


def test_c5_two_processes_with_empty_caches(replicas):
    found = [process.communicate(timeout=300)[0].split()[-1:] for process in replicas]
    assert found[0] and found[0] == found[1] == [digest()]


def test_a_lost_state_gives_nan_and_stops_the_next_step():
    engine = Engine(depth=3, slots=9, requests=2)
    request = Request(engine, 12, 4, 30, [1, 2, 3, 4])
    other = Request(engine, 14, 4, 30, [5, 6, 7, 8])
    engine.step((request, 4), (other, 4))
    request.position += 2
    engine.step((request, 2), (other, 2))
    assert request.outputs[6:8].isnan().all() and not other.outputs[:6].isnan().any()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="state before a step is gone"):
        engine.step((request, 1))


@pytest.mark.parametrize("steps", [False, True])
def test_a_prompt_chunk_whose_state_is_lost_gives_nan(steps):
    engine = Engine(depth=3, slots=13, requests=3)
    request = Request(engine, 12, 256, 260, [1, 2, 3, 4])
    other = Request(engine, 14, 70, 90, [5, 6, 7, 8])
    third = Request(engine, 16, 4, 30, [9, 10, 11, 12])
    engine.step((request, 64), (other, 64), (third, 4))
    request.position += 64
    engine.step((request, 64), (other, 6), *[(third, 2)] * steps)
    assert request.outputs[128:192].isnan().all() and engine.caches(1)[1].isnan().all()
    assert not other.outputs[:70].isnan().any() and not third.outputs[: 4 + 2 * steps].isnan().any()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="state before a step is gone"):
        engine.step((request, 64))
