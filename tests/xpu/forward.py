"""Run by test_forward.py on the machine with two cards: the tiny model to its logits.

Every op of ours runs in Triton's interpreter, launched as on an XPU. What stands in: the recurrence
of the reference for vLLM's chunked kernels, which do not run there, and plain torch for Intel's.
Under ``VLLM_B70_LINEAR=native`` Intel's INT4 kernel has planted row classes.
"""

import importlib.util
import json
import os
import sys

import pytest
import torch
from posing import Posing
from triton.runtime import interpreter
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_b70.ops import native
from vllm_b70.ops.linear import linear

MODEL, PORT, KERNEL_TESTS = sys.argv[1:]
BLOCK, SLOTS, DEPTH, BLOCKS = 64, 12, 3, 8


def prepare():
    """The interpreter as the kernel tests have it; what a machine without an XPU lacks."""
    spec = importlib.util.spec_from_file_location("kernel_tests", KERNEL_TESTS)
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    patch = pytest.MonkeyPatch()
    shared.patch_once(patch)
    shared.order_dots(patch)
    # Options of Intel's compiler, which the interpreter would take for arguments of the kernel.
    call = interpreter.GridExecutor.__call__
    launches = []

    def launch(self, *arguments, grf_mode=None, **options):
        launches.append((self.fn.__name__, grf_mode))
        return call(self, *arguments, **options)

    patch.setattr(interpreter.GridExecutor, "__call__", launch)
    # What poses as the XPU's memory is torch's on the CPU.
    native.ALIGNMENT["xpu"] = native.ALIGNMENT["cpu"]
    torch.accelerator.empty_cache = torch.accelerator.max_memory_allocated = lambda: 0
    return launches


def silu_and_mul(out, x):
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate.float()).to(x.dtype) * up)


library = torch.library.Library("_C", "FRAGMENT")
library.define("silu_and_mul(Tensor! out, Tensor x) -> ()")
library.impl("silu_and_mul", silu_and_mul, "CPU")


def chunked(q, k, v, g, beta, scale, initial_state, cu_seqlens, core_attn_out=None, **rest):
    """What vLLM's chunked kernels compute, one token at a time."""
    out = torch.empty_like(v) if core_attn_out is None else core_attn_out.view(v.shape)
    group = v.shape[2] // q.shape[2]
    finals, ends = [], cu_seqlens.tolist()
    for n, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        s = initial_state[n].transpose(1, 2)
        for t in range(first, last):
            keys, queries = (u[0, t].float().repeat_interleave(group, 0) for u in (k, q))
            s = s * torch.exp(g[0, t])[:, None, None]
            update = beta[0, t][:, None] * (v[0, t].float() - (s * keys[:, :, None]).sum(1))
            s = s + keys[:, :, None] * update[:, None, :]
            out[0, t] = (s * queries[:, :, None]).sum(1) * scale
        finals.append(s.transpose(1, 2))
    return None, out, None, torch.stack(finals), None, None, None


#: Where the planted classes of Intel's INT4 kernel begin, after the first.
FIRSTS = (9, 65, 300)


class Int4Gemm:
    """What ``int4_gemm_w4a16`` computes from its own layout, one unit in the last place off in some
    values from class to class."""

    def __init__(self):
        self.rows, self.weights = [], {}

    def __call__(self, x, weight, bias, scale, zeros, group, order):
        assert bias is None and order is None and weight.stride(0) == 1 and x.is_contiguous()
        self.rows.append(len(x))
        key = weight.data_ptr(), weight.shape
        if key not in self.weights:
            shifts = torch.arange(0, 32, 4, dtype=torch.int32)
            q = (weight.t()[..., None] >> shifts & 15).flatten(1).t()
            if zeros.dim() == 1:
                assert zeros.dtype == torch.int8 and zeros.tolist() == [8]
                z = torch.full_like(scale, 8)
            else:
                z = (zeros[..., None] >> shifts & 15).flatten(1)
            spread = [t.float().repeat_interleave(group, 0) for t in (z, scale)]
            self.weights[key] = ((q - spread[0]) * spread[1]).to(x.dtype)
        y = linear(x, self.weights[key], None)
        bits = y.view(torch.int16)
        kind = sum(len(x) >= first for first in FIRSTS)
        return (bits + ((bits + kind) % 5 == 0).to(torch.int16) * (kind > 0)).view(y.dtype)


def settle_natively(model, config):
    """As the worker does once the weights are loaded; which rows Intel's kernel is called with from
    then on."""
    import sitecustomize

    from vllm_b70.census import linears

    make = torch.Generator
    torch.Generator = lambda device="cpu": make()
    linears.WORK_GPU = 2**42
    sitecustomize.int4_gemm = gemm = Int4Gemm()
    linears.settle([model], config)
    gemm.rows.clear()
    return gemm.rows, config.additional_config[linears.FIELD]


class Server:
    """Two requests at most, with caches of their own; steps of the model as vLLM's runner has."""

    def __init__(self, model, config):
        from vllm_b70.layers.attention import RowInvariantAttentionBuilder
        from vllm_b70.layers.gated_delta_net_device import DeviceGDNBuilder

        self.model, self.config = model, config
        self.layers = config.compilation_config.static_forward_context
        self.position = {0: 0, 1: 0}
        gdn = []
        for name, layer in self.layers.items():
            if hasattr(layer, "conv_kernel_size"):
                gdn.append(name)
                channels = layer.conv_dim
                conv = torch.full((SLOTS, layer.conv_kernel_size - 1 + DEPTH, channels), torch.nan)
                state = (SLOTS, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
                layer.kv_cache = (conv.to(torch.bfloat16), torch.full(state, torch.nan))
            else:
                shape = (BLOCKS, layer.num_kv_heads, BLOCK, 2 * layer.head_size)
                layer.kv_cache = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        self.gdn = gdn
        device = torch.device("xpu")
        self.attention = RowInvariantAttentionBuilder(None, [], config, device)
        # Its constructor patches vLLM's compiled kernels, which there are none of here.
        builder = self.builder = DeviceGDNBuilder.__new__(DeviceGDNBuilder)
        builder.vllm_config, builder.device, builder.num_spec = config, device, DEPTH
        builder.layer_names, builder._record = gdn, None
        for field, shape in {"starts": 3, "read": 2, "table": (2, DEPTH + 1), "lost": 1}.items():
            setattr(builder, f"_{field}", torch.zeros(shape, dtype=torch.int32))

    def step(self, *work):
        """Logits of each request's rows: (request, its tokens, whether they are prompt)."""
        starts = torch.tensor([0] + [len(w[1]) for w in work]).cumsum(0).int()
        ends = [self.position[w[0]] + len(w[1]) for w in work]
        positions = torch.cat(
            [torch.arange(e - len(w[1]), e) for w, e in zip(work, ends, strict=True)]
        )
        blocks = torch.tensor([[4 * w[0] + i for i in range(4)] for w in work], dtype=torch.int32)
        owner = torch.repeat_interleave(torch.arange(len(work)), starts.diff())
        slots = blocks[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        fields = dict(
            query_start_loc=starts, query_start_loc_cpu=starts, num_reqs=len(work),
            seq_lens=torch.tensor(ends, dtype=torch.int32), num_actual_tokens=len(positions),
            max_query_len=int(starts.diff().max()), max_seq_len=max(ends),
            is_prefilling=torch.tensor([w[2] for w in work]),
            seq_lens_cpu_upper_bound=torch.tensor(ends),
        )  # fmt: skip
        attention = CommonAttentionMetadata(block_table_tensor=blocks, slot_mapping=slots, **fields)
        columns = [[1 + 5 * w[0] + i for i in range(DEPTH + 1)] for w in work]
        recurrent = CommonAttentionMetadata(
            block_table_tensor=torch.tensor(columns, dtype=torch.int32), slot_mapping=slots,
            **fields,
        )  # fmt: skip
        plans = dict.fromkeys(self.layers, self.attention.build(0, attention))
        plans |= dict.fromkeys(self.gdn, self.builder.build(0, recurrent))
        tokens = torch.tensor([token for w in work for token in w[1]])
        mapping = dict.fromkeys(set(self.layers) - set(self.gdn), slots)
        with set_forward_context(plans, self.config, num_tokens=len(tokens), slot_mapping=mapping):
            hidden = self.model(tokens, positions)
        for request, rows, _ in work:
            self.position[request] += len(rows)
        return self.model.compute_logits(hidden).split(starts.diff().tolist())


def main():
    config = EngineArgs(
        model=MODEL, enforce_eager=True, max_model_len=512, max_num_seqs=4,
        enable_prefix_caching=False,
    ).create_engine_config()  # fmt: skip
    launches = prepare()
    with Posing(), set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{PORT}", 0, "gloo")
        initialize_model_parallel(1)
        model = get_model(vllm_config=config)
        from vllm_b70.layers import gated_delta_net_device

        gated_delta_net_device.chunk_gated_delta_rule_fwd = chunked
        rows_of_int4, settled = [], []
        if os.environ.get("VLLM_B70_LINEAR") == "native":
            rows_of_int4, settled = settle_natively(model, config)
        first, second, said = [7, 300, 12, 44, 5, 901, 3], [8, 2, 610], [17, 230, 4]
        alone = Server(model, config)
        rows = [alone.step((0, first, True))[0]] + [alone.step((0, [t], False))[0] for t in said]
        # The same beside another request, and what it said as drafts that one step verifies.
        company = Server(model, config)
        prompts = company.step((1, second, True), (0, first, True))
        decodes = company.step((0, said, False), (1, [33], False))
        got, want = torch.cat([prompts[1], decodes[0]]), torch.cat(rows)
        print(
            "RESULT",
            json.dumps(
                {
                    "equal": torch.equal(got, want),
                    "finite": bool(torch.cat([got, prompts[0], decodes[1]]).isfinite().all()),
                    "tokens": want.argmax(-1).tolist(),
                    "shape": list(want.shape),
                    "settled": settled,
                    "rows of int4": sorted(set(rows_of_int4)),
                    "launches": sorted({f"{name} {grf}" for name, grf in launches}),
                }
            ),
        )


if __name__ == "__main__":
    main()
