"""The gated delta rule: close to the reference, and the same bits at every width (C2)."""

import numpy as np
import pytest
import torch

from vllm_b70.ops.gated_delta_rule import causal_conv, gated_delta_rule, gates
from vllm_b70.reference import gated_delta_rule as reference

WIDTH = 4


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Sequence:
    """Inputs of one sequence of ``tokens`` tokens."""

    def __init__(self, tokens, key_heads=2, value_heads=4, depth=64, size=64, seed=0):
        self.q = random(tokens, key_heads, depth, seed=seed)
        self.k = random(tokens, key_heads, depth, seed=seed + 1)
        self.v = random(tokens, value_heads, size, seed=seed + 2)
        self.a = random(tokens, value_heads, seed=seed + 3)
        self.b = random(tokens, value_heads, seed=seed + 4)
        self.a_log = random(value_heads, seed=5, dtype=torch.float32)
        self.dt_bias = random(value_heads, seed=6, dtype=torch.float32)
        self.state = random(value_heads, depth, size, seed=seed + 7, dtype=torch.float32)
        self.decay, self.beta = gates(self.a, self.b, self.a_log, self.dt_bias)

    def run(self, first, last, cache, read, write):
        return gated_delta_rule(
            self.q[first:last],
            self.k[first:last],
            self.v[first:last],
            self.decay[first:last].contiguous(),
            self.beta[first:last].contiguous(),
            cache,
            np.array([0, last - first]),
            np.array([read]),
            np.array(write),
        )


@pytest.mark.parametrize("heads", [(2, 4), (2, 6), (1, 1)])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (32, 48)])
def test_close_to_the_reference(heads, sizes):
    s = Sequence(20, *heads, *sizes)
    cache = torch.zeros(21, *s.state.shape)
    cache[0] = s.state
    got = s.run(0, 20, cache, 0, list(range(1, 21)))
    expected, states = reference.gated_delta_rule(
        s.q, s.k, s.v, s.a, s.b, s.a_log, s.dt_bias, s.state
    )
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(cache[1:], states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("widths", [[20], [4] * 5, [1, 7, 2, 4, 6], [2] * 10, [17, 3]])
def test_c2_any_split_into_steps_gives_the_bits_of_one_token_at_a_time(widths):
    s = Sequence(20)
    one = torch.stack([s.state, torch.zeros_like(s.state)])
    expected = torch.cat([s.run(t, t + 1, one, 0, [0]) for t in range(20)])
    cache = torch.stack([s.state] + [torch.full_like(s.state, float("nan"))] * 20)
    outputs, position, read = [], 0, 0
    for width in widths:
        outputs.append(s.run(position, position + width, cache, read, list(range(width))))
        position, read = position + width, width - 1
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(cache[read], one[0])


def test_c3_company_does_not_show_and_poisoned_slots_do_not_leak():
    sequences = [Sequence(tokens, seed=10 * i) for i, tokens in enumerate((5, 1, 4, 17))]
    alone = []
    for s in sequences:
        cache = torch.stack([s.state, torch.full_like(s.state, float("nan"))])
        alone.append(s.run(0, len(s.v), cache, 0, [-1] * (len(s.v) - 1) + [1]))
    cache = torch.full((9, *sequences[0].state.shape), float("nan"))
    for i, s in enumerate(sequences):
        cache[2 * i] = s.state
    starts = np.cumsum([0] + [len(s.v) for s in sequences])
    write = np.full(starts[-1], -1)
    write[starts[1:] - 1] = [1, 3, 5, 7]
    joined = [torch.cat([getattr(s, n) for s in sequences]) for n in ("q", "k", "v")]
    got = gated_delta_rule(
        *joined,
        torch.cat([s.decay for s in sequences]),
        torch.cat([s.beta for s in sequences]),
        cache,
        starts,
        np.array([0, 2, 4, 6]),
        write,
    )
    assert torch.equal(got, torch.cat(alone))
    assert cache[8].isnan().all()


def test_a_state_is_never_rounded_between_tokens():
    with pytest.raises(ValueError, match="float32"):
        s = Sequence(1)
        s.run(0, 1, s.state.bfloat16()[None], 0, [0])


@pytest.mark.parametrize("bias", [False, True])
def test_conv_equals_the_reference_and_itself_at_every_width(bias):
    x, history = random(30, 96), random(1, WIDTH - 1, 96, seed=1)
    weight = random(96, WIDTH, seed=2).float()
    b = random(96, seed=3).float() if bias else None
    whole = causal_conv(x, history, weight, b, np.array([0, 30]))
    expected = reference.causal_conv(x, history[0], weight, b)
    torch.testing.assert_close(whole, expected, rtol=1e-2, atol=1e-3)
    inputs = torch.cat([history[0], x])
    for width in (1, 2, 4, 7, 17):
        pieces = [
            causal_conv(
                x[t : t + width],
                inputs[t : t + WIDTH - 1][None],
                weight,
                b,
                np.array([0, min(width, 30 - t)]),
            )
            for t in range(0, 30, width)
        ]
        assert torch.equal(torch.cat(pieces), whole)


def test_gates_do_not_follow_the_row_count():
    a, b = random(129, 6), random(129, 6, seed=1)
    a_log, dt_bias = random(6, seed=2).float(), random(6, seed=3).float()
    decay, beta = gates(a, b, a_log, dt_bias)
    for count in (1, 2, 17, 64):
        got = gates(a[:count], b[:count], a_log, dt_bias)
        assert torch.equal(got[0], decay[:count]) and torch.equal(got[1], beta[:count])
    expected = -torch.exp(a_log) * torch.nn.functional.softplus(a.float() + dt_bias)
    torch.testing.assert_close(decay, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(beta, torch.sigmoid(b.float()), rtol=1e-5, atol=1e-6)
