"""The gated delta net's kernels in the interpreter: close to the reference, exact at every width.

The interpreter adds a sum's products in numpy's order, which is one order for every row, so what
is bitwise here is bitwise in widths, company and cuts; the sums themselves are a GPU's matter.
"""

import functools
import random

import pytest
import torch

from vllm_b70.layers.state_columns import StateColumns
from vllm_b70.ops.gdn_launches import Launch
from vllm_b70.ops.prompt_inputs import PromptSequences, prompt_inputs
from vllm_b70.ops.recurrent_steps import recurrent_steps
from vllm_b70.ops.state_columns import StateRecord, place_states
from vllm_b70.reference import gated_delta_rule as reference

HK, HV, SIZE = 1, 2, 16
D = (2 * HK + HV) * SIZE
SLOTS = 24
NAN = float("nan")


def normal(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class Weights:
    conv = (normal(D, 4, seed=1) * 0.5).contiguous()
    a_log = normal(HV, seed=2, dtype=torch.float32)
    dt_bias = normal(HV, seed=3, dtype=torch.float32)


def poisoned(dim_first=False):
    """Histories and states full of NaN."""
    shape = (SLOTS, D, 5) if dim_first else (SLOTS, 5, D)
    history = torch.full(shape, NAN, dtype=torch.bfloat16)
    return history.transpose(1, 2) if dim_first else history, torch.full(
        (SLOTS, HV, SIZE, SIZE), NAN
    )


class Tokens:
    """A request's inputs, and a state and history to begin with."""

    def __init__(self, count, seed):
        # Rows of a wider projection, as the layer's are.
        self.x = normal(count, D + 8, seed=seed)[:, :D]
        self.b, self.a = normal(count, 2 * HV, seed=seed + 1).chunk(2, dim=-1)
        self.history = normal(3, D, seed=seed + 2)
        self.state = normal(HV, SIZE, SIZE, seed=seed + 3, dtype=torch.float32)

    def put(self, cache, slot):
        cache[0][slot, :3], cache[1][slot] = self.history, self.state


def run(cache, work, columns=4, launch=None, out=None):
    """One call. ``work`` is (tokens, first, last, read, slots for the states of the last rows)."""
    pick = [(w[0], slice(w[1], w[2])) for w in work]
    x = torch.cat([t.x[rows] for t, rows in pick])
    a, b = (torch.cat([getattr(t, n)[rows] for t, rows in pick]) for n in "ab")
    starts = [0]
    for w in work:
        starts.append(starts[-1] + w[2] - w[1])
    table = torch.zeros(len(work), columns, dtype=torch.int32)
    for i, w in enumerate(work):
        table[i, : len(w[4])] = ints(*w[4])
    out = torch.full((len(x), HV, SIZE), 7.0, dtype=x.dtype) if out is None else out
    recurrent_steps(
        x, a, b, Weights.conv, Weights.a_log, Weights.dt_bias, *cache, ints(*starts),
        ints(*(w[3] for w in work)), table, out, HK, launch,
    )  # fmt: skip
    return out


def one_at_a_time(tokens, count):
    cache = poisoned()
    tokens.put(cache, 1)
    outs, states, histories = [], [], []
    for t in range(count):
        outs.append(run(cache, [(tokens, t, t + 1, 1, [1])], columns=1))
        states.append(cache[1][1].clone())
        histories.append(cache[0][1, :3].clone())
    return torch.cat(outs), torch.stack(states), torch.stack(histories)


@functools.cache
def seventeen():
    """One request, and what it gives one token at a time."""
    tokens = Tokens(17, 20)
    return tokens, *one_at_a_time(tokens, 17)


def test_close_to_the_reference():
    tokens = Tokens(12, 10)
    outs, states, histories = one_at_a_time(tokens, 12)
    x = reference.causal_conv(tokens.x, tokens.history, Weights.conv, None)
    q, k, v = x.split([HK * SIZE, HK * SIZE, HV * SIZE], dim=-1)
    want, want_states = reference.gated_delta_rule(
        q.unflatten(-1, (HK, SIZE)), k.unflatten(-1, (HK, SIZE)), v.unflatten(-1, (HV, SIZE)),
        tokens.a, tokens.b, Weights.a_log, Weights.dt_bias, tokens.state.transpose(1, 2),
    )  # fmt: skip
    torch.testing.assert_close(outs, want, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(states.transpose(2, 3), want_states, rtol=1e-3, atol=1e-3)
    inputs = torch.cat([tokens.history, tokens.x])
    assert torch.equal(histories, torch.stack([inputs[t + 1 : t + 4] for t in range(12)]))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 17])
@pytest.mark.parametrize("dim_first", [False, True])
def test_c2_every_width_gives_the_bits_of_one_token_at_a_time(width, dim_first):
    tokens, want, states, histories = seventeen()
    cache = poisoned(dim_first)
    tokens.put(cache, 1)
    outs, read = [], 1
    for first in range(0, 17, width):
        last = min(first + width, 17)
        slots = list(range(1, 1 + min(last - first, 4)))
        outs.append(run(cache, [(tokens, first, last, read, slots)]))
        for i, slot in enumerate(slots):
            t = last - len(slots) + i
            assert torch.equal(cache[1][slot], states[t])
            assert torch.equal(cache[0][slot, :3], histories[t])
        read = slots[-1]
    assert torch.equal(torch.cat(outs), want)


def test_c1_c3_company_padding_null_slots_and_a_lost_state():
    requests = [Tokens(n, 100 * n) for n in (1, 4, 2, 6)]
    want = [one_at_a_time(r, len(r.x)) for r in requests]
    cache = poisoned()
    for i, request in enumerate(requests):
        request.put(cache, 4 * i + 1)
    before = [part[0].clone() for part in cache]
    work = [(r, 0, len(r.x), 4 * i + 1, [4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4])
            for i, r in enumerate(requests)]  # fmt: skip
    # Between them: padding without rows, a request that is left alone, and one whose state is lost.
    idle, lost = Tokens(3, 900), Tokens(2, 910)
    work[1:1] = [(idle, 0, 3, 0, [20, 21]), (lost, 0, 2, -1, [22, 23])]
    work.append((idle, 0, 0, 0, []))
    out = run(cache, work)
    assert (out[1:4] == 7).all(), "rows of a request that is left alone"
    assert out[4:6].isnan().all(), "rows of a request whose state is lost"
    got = torch.cat([out[:1], out[6:]])
    assert torch.equal(got, torch.cat([w[0] for w in want]))
    for i, (request, (_, states, histories)) in enumerate(zip(requests, want, strict=True)):
        kept = min(4, len(request.x))
        for c in range(kept):
            assert torch.equal(cache[1][4 * i + 1 + c], states[len(request.x) - kept + c])
            assert torch.equal(cache[0][4 * i + 1 + c, :3], histories[len(request.x) - kept + c])
    for part, old in zip(cache, before, strict=True):
        assert torch.equal(part[0].nan_to_num(5), old.nan_to_num(5)), "the null slot"
        assert part[20:22].isnan().all()


@pytest.mark.parametrize("launch", [Launch(4, 1), Launch(16, 4)])
def test_launches_agree_where_the_interpreter_can_tell(launch):
    tokens = Tokens(5, 30)
    want, *_ = one_at_a_time(tokens, 5)
    cache = poisoned()
    tokens.put(cache, 3)
    assert torch.equal(run(cache, [(tokens, 0, 5, 3, [3, 4])], launch=launch), want)


def prompt(cache, work):
    """Prompt chunks of one step: (tokens, first, last, slot) each."""
    sources, starts, blocks, x, a, b = [], [0], [], [], [], []
    for n, (tokens, first, last, _) in enumerate(work):
        sources.append(sum(len(part) for part in x))
        for to, part in zip((x, a, b), (tokens.x, tokens.a, tokens.b), strict=True):
            to.append(part[first:last])
        starts.append(starts[-1] + last - first)
        blocks += [[n, i] for i in range(-(-(last - first) // 64))]
    sequences = PromptSequences(
        ints(*sources), ints(*starts), ints(*(w[3] for w in work)),
        ints(*(int(w[1] > 0) for w in work)), torch.tensor(blocks, dtype=torch.int32),
    )  # fmt: skip
    return prompt_inputs(
        torch.cat(x), torch.cat(a), torch.cat(b), Weights.conv, Weights.a_log, Weights.dt_bias,
        *cache, sequences, starts[-1], HK,
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 4, 15, 64, 65, 131])
def test_prompt_inputs(count):
    tokens = Tokens(count, 40)
    cache = poisoned()
    q, k, v, decay, beta = prompt(cache, [(tokens, 0, count, 5)])
    zeros = torch.zeros(3, D, dtype=torch.bfloat16)
    x = reference.causal_conv(tokens.x, zeros, Weights.conv, None).float()
    for got, part in ((q, x[:, : HK * SIZE]), (k, x[:, HK * SIZE : 2 * HK * SIZE])):
        want = part.unflatten(-1, (HK, SIZE))
        want = want / torch.sqrt((want * want).sum(-1, keepdim=True) + 1e-6)
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(v.float().flatten(1), x[:, 2 * HK * SIZE :], rtol=1e-2, atol=1e-3)
    u = torch.nn.functional.softplus(tokens.a.float() + Weights.dt_bias)
    torch.testing.assert_close(decay, -torch.exp(Weights.a_log) * u, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(beta, torch.sigmoid(tokens.b.float()), rtol=1e-5, atol=1e-6)
    assert torch.equal(cache[0][5, :3], torch.cat([zeros, tokens.x])[-3:])


def test_prompt_inputs_do_not_show_cuts_or_company():
    one, two = Tokens(200, 50), Tokens(70, 60)
    cache = poisoned()
    want = [prompt(cache, [(one, 0, 200, 1)]), prompt(cache, [(two, 0, 70, 2)])]
    cut = poisoned()
    first = prompt(cut, [(two, 0, 64, 7), (one, 0, 128, 8)])
    second = prompt(cut, [(one, 128, 192, 8), (two, 64, 70, 7)])
    third = prompt(cut, [(one, 192, 200, 8)])
    for i, part in enumerate(want[0]):
        got = torch.cat([first[i][64:], second[i][:64], third[i]])
        assert torch.equal(got, part)
        assert torch.equal(torch.cat([first[i][:64], second[i][64:]]), want[1][i])
    assert torch.equal(cut[0][8, :3], cache[0][1, :3])
    assert torch.equal(cut[0][7, :3], cache[0][2, :3])


def test_one_convolution_for_prompts_and_steps():
    """v is the convolution as it is: the same bits in a chunk and token by token."""
    tokens = Tokens(9, 70)
    cache = poisoned()
    tokens.put(cache, 1)
    _, _, v, _, _ = prompt(cache, [(tokens, 0, 9, 2)])
    history, state = poisoned()
    history[3, :3] = 0
    state[3] = 0
    from vllm_b70.kernels import causal_conv1d

    out = torch.empty(9, D, dtype=torch.bfloat16)
    causal_conv1d.steps[(1, 1)](
        tokens.x, Weights.conv, history, ints(0, 9), ints(3), ints(3), out,
        history.stride(0) // 8, 1, D=D, X_ROW=tokens.x.stride(0), TOKEN=history.stride(1),
        CHANNEL=1, BD=256, PDL=False,
    )  # fmt: skip
    assert torch.equal(out[:, 2 * HK * SIZE :], v.flatten(1))
    assert torch.equal(history[3, :3], cache[0][2, :3])


def test_the_devices_record_is_the_hosts():
    """``place`` against ``layers.state_columns`` over a random schedule of requests."""
    draw = random.Random(0)
    columns, width, slots = StateColumns(), 4, 40
    record = StateRecord(slots, torch.device("cpu"))
    live, free = {}, [list(range(1 + 4 * i, 5 + 4 * i)) for i in range(9)]
    for _ in range(150):
        while free and len(live) < 6 and draw.random() < 0.6:
            table = free.pop(draw.randrange(len(free)))
            live[table[0]] = [table, 0, draw.choice([1, 2, 64, 65, 130])]
        work = []
        for key in draw.sample(sorted(live), draw.randint(0, len(live))):
            table, at, length = live[key]
            tokens = draw.choice([1, 2, 4, 7])
            if at < length:
                tokens = draw.choice([min(64, length - at), length - at])
            work.append((table, at, tokens, at < length))
            step = tokens if at < length else max(1, tokens - draw.randint(0, min(3, tokens - 1)))
            live[key][1] += step
        rows, want, want_table = len(work) + 2, [], []
        for table, at, tokens, in_prompt in work:
            if in_prompt:
                columns.prompt_chunk(table, at, tokens)
                want.append(0)
            else:
                want.append(columns.advance(table, at, tokens)[0])
            want_table.append(table)
        tokens = [w[2] for w in work] + [0, 0]
        ends = torch.tensor([0, *tokens]).cumsum(0).int()
        table = torch.zeros(rows, 6, dtype=torch.int32)
        for i, row in enumerate(want_table):
            table[i, :4] = ints(*row)
        flags = ints(*([int(w[3]) for w in work] + [0, 0]))
        starts, read = torch.zeros(rows + 1, dtype=torch.int32), ints(*[9] * rows)
        kept = torch.full((rows, width), 9, dtype=torch.int32)
        place_states(
            record, ends, ints(*([w[1] + w[2] for w in work] + [0, 0])), table[:, :width],
            flags if flags.any() or draw.random() < 0.2 else None, starts, read, kept,
        )  # fmt: skip
        assert read.tolist() == [*want, 0, 0]
        assert torch.equal(starts, ends) and torch.equal(kept, table[:, :width])
        for key in [k for k, (_, at, length) in live.items() if at > length + 20]:
            free.append(live.pop(key)[0])
    assert not record.lost.any()


def test_a_lost_state_is_counted():
    record = StateRecord(8, torch.device("cpu"))
    read, starts, kept = ints(0, 0), ints(0, 0, 0), torch.zeros(2, 2, dtype=torch.int32)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    place_states(record, ints(0, 5, 69), ints(5, 128), table, ints(1, 1), starts, read, kept)
    assert read.tolist() == [0, -1] and record.lost.item() == 1, "a chunk without the one before"
    place_states(record, ints(0, 2, 3), ints(7, 129), table, None, starts, read, kept)
    assert read.tolist() == [1, 3] and record.lost.item() == 1
    place_states(record, ints(0, 1, 2), ints(6, 140), table, None, starts, read, kept)
    assert read.tolist() == [-1, -1] and record.lost.item() == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": torch.zeros(2, HV, SIZE, SIZE, dtype=torch.bfloat16)}, "must be float32"),
        ({"x": torch.zeros(1, D + 1, dtype=torch.bfloat16)}, "x must be"),
        ({"history": torch.zeros(2, 2, D, dtype=torch.bfloat16)}, "history must be"),
        ({"out": torch.zeros(1, HV, SIZE + 1, dtype=torch.bfloat16)}, "out must be"),
        ({"read": ints(1, 2)}, "do not fit"),
    ],
)
def test_refusals(change, said):
    bf16 = {"dtype": torch.bfloat16}
    arguments = {
        "x": torch.zeros(1, D, **bf16), "a": torch.zeros(1, HV, **bf16),
        "b": torch.zeros(1, HV, **bf16), "weight": Weights.conv, "a_log": Weights.a_log,
        "dt_bias": Weights.dt_bias, "history": torch.zeros(2, 3, D, **bf16),
        "state": torch.zeros(2, HV, SIZE, SIZE), "starts": ints(0, 1), "read": ints(1),
        "table": ints(1)[None], "out": torch.zeros(1, HV, SIZE, **bf16), "key_heads": HK,
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        recurrent_steps(**arguments | change)
