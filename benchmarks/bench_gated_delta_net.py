"""The gated delta net on a CUDA device: choose its launches, and race vLLM's own kernels.

    python benchmarks/bench_gated_delta_net.py tune --out gdn_launches.json
    python benchmarks/bench_gated_delta_net.py compare --out result.json

Needs vLLM's CUDA build. Every time is the median of graph replays over the caches of several layers
in turn, so that states come from memory and not from the L2; a comparison times both sides in one
run. vLLM's chunked kernels run in the configurations that vLLM's own warm-up picks, at 64 tokens.
``--out`` is written after each result; ``compare`` leaves out what it already holds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.timing import graph_us, head
from vllm_b70.ops import gdn_launches, tiles
from vllm_b70.ops.gdn_launches import Launch

KEY_HEADS, SIZE, DTYPE = 16, 128, torch.bfloat16
HEADS = (32, 48)
GRID = 64
#: Bytes of states between two uses of one layer's: three times the L2 of an H200.
ROTATION = 160 * 2**20
LAUNCHES = [(8, 1), (16, 1), (32, 1), (16, 2), (32, 2), (64, 2), (32, 4), (64, 4), (128, 4),
            (128, 8)]  # fmt: skip


def say(text: str) -> None:
    """Print at once, so that a run that is cut short leaves its results."""
    print(text, flush=True)


class Layer:
    """One layer's weights and caches, as vLLM lays them out, and inputs for ``tokens`` rows."""

    def __init__(self, heads: int, requests: int, columns: int, tokens: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator).to(DTYPE)

        self.heads, self.channels = heads, (2 * KEY_HEADS + heads) * SIZE
        self.conv = normal(self.channels, 4) * 0.5
        self.a_log = normal(heads).float()
        self.dt_bias = normal(heads)
        self.norm = torch.ones(SIZE, device="cuda", dtype=DTYPE)
        self.qkvz = normal(tokens, self.channels + heads * SIZE)
        self.ba = normal(tokens, 2 * heads)
        slots = requests * columns + 1
        self.history = torch.zeros(slots, 2 + columns, self.channels, device="cuda", dtype=DTYPE)
        self.state = torch.zeros(slots, heads, SIZE, SIZE, device="cuda")
        self.out = torch.zeros(tokens, heads, SIZE, device="cuda", dtype=DTYPE)
        table = 1 + torch.arange(requests * columns, device="cuda", dtype=torch.int32)
        self.table = table.view(requests, columns)

    @property
    def x(self) -> torch.Tensor:
        return self.qkvz[:, : self.channels]

    @property
    def b(self) -> torch.Tensor:
        return self.ba[:, : self.heads]

    @property
    def a(self) -> torch.Tensor:
        return self.ba[:, self.heads :]

    @property
    def z(self) -> torch.Tensor:
        return self.qkvz[:, self.channels :].reshape(len(self.qkvz), self.heads, SIZE)


def layers(heads: int, requests: int, columns: int, tokens: int) -> list[Layer]:
    """As many layers as keep one from being served from the L2, at most 24."""
    size = requests * (1 + columns) * heads * SIZE * SIZE * 4
    return [
        Layer(heads, requests, columns, tokens, i)
        for i in range(max(2, min(24, -(-ROTATION // size))))
    ]


def starts(requests: int, width: int) -> torch.Tensor:
    """Where the rows of requests of one width start."""
    return torch.arange(0, requests * width + 1, width, device="cuda", dtype=torch.int32)


def gated_norm(layer: Layer) -> Callable[[], None]:
    """vLLM's gated norm of a layer's output, in place; added to ours where a peer holds it."""
    from vllm.third_party.flash_linear_attention.ops.layernorm_guard import layer_norm_fwd

    rows, z = layer.out.view(-1, SIZE), layer.z.reshape(-1, SIZE)

    def call() -> None:
        layer_norm_fwd(
            rows, layer.norm, None, 1e-6, z=z, out=rows, group_size=SIZE,
            norm_before_gate=True, is_rms_norm=True, activation="silu",
        )  # fmt: skip

    return call


def ours_steps(
    layer: Layer, width: int, launch: Launch | None, norm: bool = False
) -> Callable[[], None]:
    """Our rows past the prompt: ``width`` rows of each request."""
    from vllm_b70.ops.recurrent_steps import recurrent_steps

    read = layer.table[:, 0].contiguous()
    begin = starts(len(layer.table), width)
    finish = gated_norm(layer) if norm else None

    def call() -> None:
        recurrent_steps(
            layer.x, layer.a, layer.b, layer.conv, layer.a_log, layer.dt_bias, layer.history,
            layer.state, begin, read, layer.table, layer.out, KEY_HEADS, launch,
        )  # fmt: skip
        if finish is not None:
            finish()

    return call


def vllm_decode(layer: Layer) -> Callable[[], None]:
    """vLLM without speculation: its convolution's update and its packed decode kernel."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
    from vllm.third_party.flash_linear_attention.ops import (
        fused_recurrent_gated_delta_rule_packed_decode,
    )

    slots = layer.table[:, 0].contiguous()
    b, a = layer.b.contiguous(), layer.a.contiguous()
    history = layer.history[:, :3].transpose(1, 2)

    def call() -> None:
        mixed = causal_conv1d_update(
            layer.x, history, layer.conv, None, "silu", conv_state_indices=slots,
            validate_data=False, out=torch.empty_like(layer.x),
        )  # fmt: skip
        fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=mixed, a=a, b=b, A_log=layer.a_log, dt_bias=layer.dt_bias, scale=SIZE**-0.5,
            initial_state=layer.state, out=layer.out.unsqueeze(1), ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return call


def vllm_verify(layer: Layer, width: int, cuda: bool) -> Callable[[], None]:
    """vLLM with speculation: in Triton, or in its CUDA kernel, which holds the gated norm."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
    from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update

    requests, columns = layer.table.shape
    begin = starts(requests, width)
    accepted = torch.ones(requests, device="cuda", dtype=torch.int32)
    slots = layer.table[:, 0].contiguous()
    b, a = layer.b.contiguous(), layer.a.contiguous()
    history = layer.history.transpose(1, 2)
    sizes = [KEY_HEADS * SIZE, KEY_HEADS * SIZE, layer.heads * SIZE]
    if cuda and not hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp"):
        raise NotImplementedError("vLLM's fused_gdn_decode_post_conv_mtp is not built")

    def call() -> None:
        mixed = causal_conv1d_update(
            layer.x, history, layer.conv, None, "silu", conv_state_indices=slots,
            num_accepted_tokens=accepted, query_start_loc=begin, max_query_len=columns,
            validate_data=False, out=torch.empty_like(layer.x),
        )  # fmt: skip
        if cuda:
            _custom_ops.fused_gdn_decode_post_conv_mtp(
                mixed_qkv=mixed, a=a, b=b, A_log=layer.a_log, dt_bias=layer.dt_bias,
                state_indices=layer.table, cu_seqlens=begin, num_accepted_tokens=accepted,
                state=layer.state, output_gate=layer.z, norm_weight=layer.norm, out=layer.out,
                scale=SIZE**-0.5, norm_eps=1e-6, output_gate_activation="silu",
            )  # fmt: skip
            return
        q, k, v = (part.reshape(1, len(mixed), -1, SIZE) for part in mixed.split(sizes, dim=-1))
        out, _ = fused_sigmoid_gating_delta_rule_update(
            A_log=layer.a_log, a=a, b=b, dt_bias=layer.dt_bias, q=q, k=k, v=v,
            initial_state=layer.state, inplace_final_state=True, cu_seqlens=begin,
            ssm_state_indices=layer.table, num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        layer.out[:] = out.squeeze(0)

    return call


def blocks(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Starts of sequences, their blocks of 64 tokens, and the blocks before each."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    counts = [-(-n // GRID) for n in lengths]
    chunks = [[n, i] for n, count in enumerate(counts) for i in range(count)]
    offsets = torch.tensor([0, *counts]).cumsum(0)
    return tuple(torch.as_tensor(t).int().cuda() for t in (ends, chunks, offsets))  # type: ignore[return-value]


def ours_prefill(layer: Layer, lengths: list[int]) -> Callable[[], None]:
    """Our prompt chunks, all beginning here."""
    from vllm_b70.layers.gated_delta_net_device import PromptCall, run_prompts
    from vllm_b70.ops.prompt_inputs import PromptSequences

    ends, chunks, offsets = blocks(lengths)
    slots = layer.table[:, 0].long()
    begins = torch.zeros(len(lengths), 1, 1, 1, device="cuda")
    call = PromptCall(
        PromptSequences(ends[:-1].clone(), ends, slots, torch.zeros_like(ends[:-1]), chunks),
        sum(lengths), slice(0, sum(lengths)), offsets, begins > 0, begins,
    )  # fmt: skip
    return lambda: run_prompts(
        call, layer.x, layer.a, layer.b, layer.conv, layer.a_log, layer.dt_bias, layer.history,
        layer.state, layer.out, KEY_HEADS,
    )  # fmt: skip


def vllm_prefill(layer: Layer, lengths: list[int]) -> Callable[[], None]:
    """vLLM's prompt chunks, as its layer calls them."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn
    from vllm.third_party.flash_linear_attention.ops import (
        chunk_gated_delta_rule,
        fused_post_conv_prep,
    )
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    ends, chunks, offsets = blocks(lengths)
    numbers, batch, token_chunks = compute_causal_conv1d_metadata(ends.cpu(), device=ends.device)
    metadata = types.SimpleNamespace(
        nums_dict=numbers, batch_ptr=batch, token_chunk_offset_ptr=token_chunks
    )
    slots = layer.table[:, 0].contiguous()
    has_state = torch.zeros(len(lengths), device="cuda", dtype=torch.bool)
    b, a = layer.b.contiguous(), layer.a.contiguous()
    history = layer.history.transpose(1, 2)

    def call() -> None:
        mixed = causal_conv1d_fn(
            layer.x.transpose(0, 1), layer.conv, None, activation="silu", conv_states=history,
            has_initial_state=has_state, cache_indices=slots, query_start_loc=ends,
            metadata=metadata,
        ).transpose(0, 1)  # fmt: skip
        q, k, v, g, beta = fused_post_conv_prep(
            conv_output=mixed, a=a, b=b, A_log=layer.a_log, dt_bias=layer.dt_bias,
            num_k_heads=KEY_HEADS, head_k_dim=SIZE, head_v_dim=SIZE, apply_l2norm=True,
            output_g_exp=False,
        )  # fmt: skip
        initial = layer.state[slots]
        initial.masked_fill_(~has_state[:, None, None, None], 0)
        out, final = chunk_gated_delta_rule(
            q=q[None], k=k[None], v=v[None], g=g[None], beta=beta[None], initial_state=initial,
            output_final_state=True, cu_seqlens=ends, chunk_indices=chunks, chunk_offsets=offsets,
            use_qk_l2norm_in_kernel=False,
        )  # fmt: skip
        layer.state[slots] = final
        layer.out[:] = out.squeeze(0)

    return call


def kernel_objects() -> dict[str, Any]:
    """vLLM's chunked kernels by name, pinned."""
    from vllm_b70.compat import fla_autotune

    fla_autotune.apply()
    return {
        name: getattr(
            importlib.import_module(f"{fla_autotune.PACKAGE}.{fla_autotune.MODULES[name]}"), name
        )
        for name in gdn_launches.chunk_kernels()
    }


@contextlib.contextmanager
def stock(fresh: bool = False) -> Iterator[dict[str, Any]]:
    """vLLM's autotuners in place of the pinned configurations; ``fresh`` makes them tune anew."""
    kernels = kernel_objects()
    pinned = {name: kernel.fn for name, kernel in kernels.items()}
    for name, kernel in kernels.items():
        kernel.fn = pinned[name].autotuner
        if fresh:
            kernel.fn.cache.clear()
            from triton.testing import do_bench

            # The default spends a tenth of a second on each configuration.
            kernel.fn.__dict__["do_bench"] = lambda call, quantiles: do_bench(
                call, warmup=3, rep=15, quantiles=quantiles
            )
    try:
        yield kernels
    finally:
        for name, kernel in kernels.items():
            kernel.fn = pinned[name]


def tune_at(heads: int, tokens: int) -> dict[str, dict[str, int]]:
    """What vLLM's autotuners pick when they first run at ``tokens`` tokens."""
    layer = Layer(heads, 1, 1, tokens, 0)
    with stock(fresh=True) as kernels:
        vllm_prefill(layer, [tokens])()
        torch.cuda.synchronize()
        found = {}
        for name, kernel in kernels.items():
            best = kernel.fn.best_config
            found[name] = dict(best.kwargs, num_warps=best.num_warps, num_stages=best.num_stages)
    return found


def _compile(job: tuple[str, int, int]) -> list[str]:
    """In a process of its own: fill Triton's cache with some launches."""
    what, heads, index = job
    failed = []

    def attempt(name: str, call: Callable[[], None]) -> None:
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{name} {job}: {str(error)[:160]}")

    with torch.inference_mode():
        if what == "steps":
            block, warps = LAUNCHES[index]
            layer = Layer(heads, 1, 4, 4, 0)
            for overlap in (False, True):
                attempt("recurrent", ours_steps(layer, 4, Launch(block, warps, overlap)))
            return failed
        call = vllm_prefill(Layer(heads, 1, 1, GRID, 0), [GRID])
        with stock() as kernels:
            every = {name: kernel.fn.configs for name, kernel in kernels.items()}
            for name, kernel in kernels.items():
                if index < len(every[name]):
                    # The others stay as the first job compiles them.
                    for other, configs in every.items():
                        kernels[other].fn.configs = configs[:1]
                    kernel.fn.configs = [every[name][index]]
                    attempt(name, call)
            for name, kernel in kernels.items():
                kernel.fn.configs = every[name]
    return failed


def compile_all(workers: int) -> None:
    """Compile every launch to be tried in parallel, so that timing finds them cached."""
    begin = time.time()
    jobs = [("steps", 32, i) for i in range(len(LAUNCHES))]
    most = max(len(kernel.fn.autotuner.configs) for kernel in kernel_objects().values())
    jobs += [("chunk", heads, i) for i in range(most) for heads in HEADS]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for failed in pool.imap_unordered(_compile, jobs):
            for line in failed:
                say(f"cannot launch {line}")
    say(f"compiled in {time.time() - begin:.0f} s")


def sweep(until: float) -> dict[str, Any]:
    """The launch of the recurrent kernel: the least sum of four times over the first launch's.

    It is found at 32 heads and serves 48 as well. How many elements differ from the first launch's
    is printed and does not count: the launch belongs to the device family because they may.
    """
    best: tuple[float, Launch] | None = None
    base: list[float] = []
    reference: dict[str, Any] = {}
    for block, warps in LAUNCHES:
        for overlap in (False, True):
            if time.time() > until:
                say("sweep: not finished for lack of time")
                break
            launch, times = Launch(block, warps, overlap), []
            try:
                probe = Layer(32, 3, 4, 12, 5)
                probe.state.normal_(generator=torch.Generator("cuda").manual_seed(6))
                ours_steps(probe, 4, launch)()
                state, out = probe.state, probe.out
                reference = reference or {"state": state, "out": out, "launch": launch}
                other = int((state != reference["state"]).sum() + (out != reference["out"]).sum())
                for requests, width in ((1, 1), (1, 4), (64, 1), (64, 4)):
                    many = layers(32, requests, 4, requests * width)
                    times.append(graph_us([ours_steps(m, width, launch) for m in many], 9))
                    del many
            except Exception as error:
                say(f"sweep {launch}: {str(error)[:200]}")
                continue
            base = base or times
            score = sum(t / b for t, b in zip(times, base, strict=True))
            say(
                f"sweep block {block} warps {warps} overlap {overlap}: "
                + ", ".join(f"{t:.1f}" for t in times)
                + f" us (1x1, 1x4, 64x1, 64x4), differs from {reference['launch']} in {other}"
            )
            if best is None or score < best[0]:
                best = (score, launch)
    assert best is not None
    return vars(best[1])


def tune(out: Path, until: float, workers: int) -> dict[str, Any]:
    """The table's entries for this device family; ``compare`` and the package read them."""
    family = tiles.family(torch.device("cuda"))
    compile_all(workers)
    table: dict[str, Any] = dict(gdn_launches._table())
    recurrent = sweep(until)
    for heads in HEADS:
        table[f"{family}:{heads}"] = {"recurrent": recurrent, **tune_at(heads, 4096)}
        say(f"{family}:{heads} {json.dumps(table[f'{family}:{heads}'])}")
    out.write_text(json.dumps(table, indent=1) + "\n")
    return table


Case = tuple[str, int, int, int]


def cases() -> list[Case]:
    """(phase, value heads, requests, rows of each)."""
    found: list[Case] = []
    for heads in HEADS:
        found += [("decode", heads, n, 1) for n in (1, 8, 64)]
        found += [("verify", heads, n, 4) for n in (1, 8, 64)]
        found += [("prefill", heads, n, rows) for n, rows in ((1, 4096), (1, 512), (8, 512))]
    return found


def peers(
    case: Case, many: list[Layer]
) -> Iterator[tuple[str, list[Callable[[], None]], list[Callable[[], None]]]]:
    """For each peer its name, its calls and ours."""
    phase, _, requests, rows = case
    if phase == "prefill":
        lengths = [rows] * requests
        yield (
            "vllm_fla",
            [vllm_prefill(m, lengths) for m in many],
            [ours_prefill(m, lengths) for m in many],
        )
        return
    if phase == "decode":
        yield "vllm", [vllm_decode(m) for m in many], [ours_steps(m, 1, None) for m in many]
    for cuda in (True, False):
        name = "vllm_speculative_cuda_with_norm" if cuda else "vllm_speculative_triton"
        try:
            yield (
                name,
                [vllm_verify(m, rows, cuda) for m in many],
                [ours_steps(m, rows, None, norm=cuda) for m in many],
            )
        except NotImplementedError as error:
            say(f"{case} {name}: {error}")


def compare(out: Path, until: float) -> None:
    """Time ours and every peer, side by side."""
    result = head() | {"rows": []}
    if out.exists():
        result["rows"] = json.loads(out.read_text())["rows"]
    done = {
        (r["phase"], r["heads"], r["requests"], r["rows"])
        for r in result["rows"]
        if r.get("op") == "gated_delta_net"
    }
    say("vllm's own choice at 64 tokens: " + json.dumps({h: tune_at(h, GRID) for h in HEADS}))
    for case in cases():
        if case in done:
            continue
        if time.time() > until:
            say(f"not run for lack of time: {case}")
            continue
        phase, heads, requests, rows = case
        columns = 1 if phase == "prefill" else 4
        many = layers(heads, requests, columns, requests * rows)
        many = many[:3] if phase == "prefill" else many
        for name, theirs, mine in peers(case, many):
            try:
                ours = graph_us(mine)
                with stock():
                    peer = graph_us(theirs)
            except Exception as error:
                say(f"{case} {name}: {str(error)[:300]}")
                continue
            row = dict(
                op="gated_delta_net", phase=phase, heads=heads, requests=requests, rows=rows,
                dtype="bfloat16", ours_us=round(ours, 2), peer=name, peer_us=round(peer, 2),
                ratio=round(peer / ours, 3),
            )  # fmt: skip
            if phase != "prefill":
                moved = requests * (1 + min(rows, columns)) * heads * SIZE * SIZE * 4
                row["gb_per_s"] = round(moved / ours / 1e3, 1)
            result["rows"].append(row)
            say(
                f"{phase} {heads} heads {requests}x{rows}: ours {ours:.1f} us, {name} "
                f"{peer:.1f} us, ratio {peer / ours:.3f}"
            )
            out.write_text(json.dumps(result, indent=1) + "\n")
        del many
        torch.cuda.empty_cache()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["tune", "compare"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--launches", type=Path, help="a table from tune, not the package's")
    parser.add_argument("--seconds", type=float, default=200.0, help="start nothing new after that")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    if arguments.launches:
        table = json.loads(arguments.launches.read_text())
        gdn_launches._table = lambda: table  # type: ignore[assignment]
    with torch.inference_mode():
        if arguments.command == "tune":
            tune(arguments.out, until, arguments.workers)
        else:
            compare(arguments.out, until)


if __name__ == "__main__":
    main()
