"""What stock vLLM runs on a GPU in the place of each op of ours; see ``on_a_model.stock``."""

import functools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


def stock(models, probe, config):
    """Name and places, (owner, name, object), or None where the op is vLLM's own."""
    from on_a_model import modules

    ops = torch.ops.vllm_b70
    if probe.op in ("linear", "lm_head"):
        return "cuBLAS", [(ops, "gemm", lambda x, w, bias, done, parts: F.linear(x, w, bias))]
    if probe.op == "int4_linear":
        return "Machete", [(ops, "int4_gemm", machete)]
    if "rms_norm" in probe.op:
        from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNormGated

        name, method = "GemmaRMSNorm", GemmaRMSNorm.forward_native  # its CUDA method calls this one
        if probe.op == "gated_rms_norm":
            name, method = "RMSNormGated", RMSNormGated.forward_cuda
        return "vLLM's norm", [
            (m, "_forward_method", functools.partial(method, m)) for m in modules(models, name)
        ]
    if probe.op == "attention":
        return "TRITON_ATTN", attention(modules(models, "Attention"))
    if probe.op == "gated_delta_net":
        from vllm_b70.layers import gated_delta_net_device as device

        steps = functools.partial(decode_by_vllm, device.recurrent_steps)
        return "FLA's decode", [(device, "recurrent_steps", steps)]
    return None


@functools.cache
def peer(columns, depth, dtype):
    from bench_int4_linear import vllm_peers

    # Outside of the census's inference mode: a kernel packs its parameters in place.
    with torch.inference_mode(False):
        return vllm_peers(columns, depth, dtype, 1, ["machete"])["machete"][0]


def machete(x, words, scale, offset, bias, done, columns, group, parts):
    """Other weights of the same shape: which ones cannot matter."""
    return peer(columns, x.shape[1], x.dtype)(x)


def attention(layers):
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

    places = []
    for layer in layers:
        impl = TritonAttentionImpl(
            layer.num_heads, layer.head_size, layer.impl.scale, layer.num_kv_heads, None, None,
            "auto",
        )  # fmt: skip
        places += [(layer, "impl", impl), (layer, "attn_backend", TritonAttentionBackend)]
    return places


def decode_by_vllm(
    ours, x, a, b, weight, a_log, dt_bias, history, state, starts, read, table, out, key_heads
):
    """One row a request through vLLM's decode kernels, and everything else through ours."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
    from vllm.third_party.flash_linear_attention.ops import (
        fused_recurrent_gated_delta_rule_packed_decode,
    )

    if len(x) != len(read) or not bool((starts.diff() == 1).all() & (read > 0).all()):
        ours(x, a, b, weight, a_log, dt_bias, history, state, starts, read, table, out, key_heads)
        return
    slots = table[:, 0].contiguous()
    # vLLM's kernels continue in place.
    state[slots.long()] = state[read.long()]
    history[slots.long()] = history[read.long()]
    mixed = causal_conv1d_update(
        x, history[:, :3].transpose(1, 2), weight, None, "silu", conv_state_indices=slots,
        validate_data=False, out=torch.empty_like(x),
    )  # fmt: skip
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=mixed, a=a.contiguous(), b=b.contiguous(), A_log=a_log, dt_bias=dt_bias,
        scale=state.shape[-1] ** -0.5, initial_state=state, out=out.unsqueeze(1),
        ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
