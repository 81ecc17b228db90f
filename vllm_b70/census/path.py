"""Finds the distinct ops and shapes on the path of a loaded model, each as a probe.

A probe calls what is installed at the time of the call: the layer's own method, vLLM's module, the
op by its name. What the census does not know it refuses, so that nothing passes unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, RMSNormGated
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

from vllm_b70.census.memory import CACHE, MOST
from vllm_b70.census.rows import RowProbe
from vllm_b70.census.sessions import AttentionSession, GatedDeltaNetSession, sessions
from vllm_b70.census.steps import PROMPTS, TAIL, StepProbe
from vllm_b70.census.verdict import Probe, Verdict
from vllm_b70.compat.seams import require
from vllm_b70.layers.gated_delta_net import RowInvariantGatedDeltaNet
from vllm_b70.ops import gemm, int4_gemm, tiles

require("norms_and_rotary")

Tensors = tuple[torch.Tensor, ...]

#: Leaf modules that compute nothing by themselves, or look rows up.
IDLE = (
    "VocabParallelEmbedding", "ParallelLMHead", "ChunkGatedDeltaRule", "ApplyRotaryEmb",
    "PPMissingLayer", "Identity",
)  # fmt: skip


class Unknown:
    """A module on the path for which there is no probe."""

    def __init__(self, op: str, shape: str, device: torch.device) -> None:
        self.op, self.shape, self.device = op, shape, device
        self.least_memory = 0

    def judge(self) -> Verdict:
        """It is not exact as far as anybody knows."""
        return Verdict(
            self.op, self.shape, False, "nothing: the census has no probe for it", "", 0, 0
        )


def find(
    models: list[torch.nn.Module], config: VllmConfig, device: torch.device, memory: int = MOST
) -> list[Probe]:
    """All distinct probes of some models.

    Args:
        models: The target model. What a draft model computes is verified, and needs no census.
        config: The server's.
        device: Where the models are.
        memory: Bytes that the inputs of a call, or its results, may have; see ``census.memory``.
    """
    finder = _Finder(config, device, memory)
    of_models = (probe for model in models for probe in finder.probes(model))
    return distinct(chain(of_models, finder.samplers()))


def find_of_draft(
    model: torch.nn.Module, config: VllmConfig, device: torch.device, memory: int = MOST
) -> list[Probe]:
    """What a draft model runs, for ``census.warm_up``; arguments as for ``find``."""
    finder = _Finder(config, device, memory)
    return distinct(chain(finder.probes(model), [finder.draft_tokens(model)]))


def distinct(probes: Iterable[Probe]) -> list[Probe]:
    """The first probe of each op and shape."""
    found: dict[tuple[str, str], Probe] = {}
    for probe in probes:
        found.setdefault((probe.op, probe.shape), probe)
    return list(found.values())


def launches_of(most: int, plan: tiles.Plan | None = None) -> tuple[int, ...]:
    """Row counts up to ``most`` that stand for all launches of an op: those of the tiles, if it has
    a table, and powers of two with the count after each, for what else follows the rows."""
    powers = [2**k for k in range(most.bit_length())]
    found = {n for power in powers for n in (power, power + 1) if n <= most} | {most}
    return tuple(sorted(found.union(() if plan is None else plan.row_counts(most))))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ties(x: torch.Tensor) -> torch.Tensor:
    """[M] bool, whether a row of [M, N] has its largest value more than once."""
    return (x == x.amax(-1, keepdim=True)).sum(-1) > 1


class _Finder:
    """Makes probes for the modules of a model."""

    def __init__(self, config: VllmConfig, device: torch.device, memory: int) -> None:
        self.config, self.device, self.memory = config, device, memory
        self.dtype: torch.dtype = config.model_config.dtype
        scheduler, speculative = config.scheduler_config, config.speculative_config
        self.depth = 0 if speculative is None else int(speculative.num_speculative_tokens or 0)
        self.tokens = int(scheduler.max_num_batched_tokens)
        self.requests = int(scheduler.max_num_seqs)
        self.sampled = min(self.tokens, self.requests * (self.depth + 1))
        graphs = config.compilation_config.cudagraph_capture_sizes or []
        self.special = tuple(graphs) if device.type != "cpu" else ()

    def probes(self, model: torch.nn.Module) -> Iterator[Probe]:
        """The probes of one model, in the order of its modules."""
        head = getattr(model, "lm_head", None)
        if head is None:
            head = getattr(getattr(model, "language_model", None), "lm_head", None)
        if head is not None:
            yield self.head(head)
        for name, module in model.named_modules():
            if "visual" in name.split("."):
                continue  # images are served without the promise
            yield from self.of(name, module)

    def of(self, name: str, module: Any) -> Iterator[Probe]:
        """The probes of one module."""
        if isinstance(module, LinearBase):
            # The gated delta net keeps its convolution's weight, [D, 1, W], in a linear layer.
            if getattr(getattr(module, "weight", None), "dim", lambda: 2)() != 3:
                yield self.linear(module)
            # That of the embedding has the same shape.
            if isinstance(module, RowParallelLinear) and module.reduce_results:
                if module.tp_size > 1:
                    yield self.sum_over_cards(module.output_size, module.tp_size)
        elif isinstance(module, QwenGatedDeltaNetAttention):
            yield self.gated_delta_net(module)
            yield self.gated_norm(module)
        elif isinstance(module, Attention):
            yield self.attention(module)
        elif isinstance(module, Qwen3NextAttention):
            yield self.norms_and_rotary(module)
        elif isinstance(module, (RMSNorm, GemmaRMSNorm)):
            # Those of queries and keys are part of norms_and_rotary.
            if name.rpartition(".")[2] not in ("q_norm", "k_norm"):
                yield self.norm(module, False)
                yield self.norm(module, True)
        elif isinstance(getattr(module, "act_fn", None), SiluAndMul):
            yield self.silu_and_mul(module)
        elif not list(module.children()) and not self.idle(module):
            yield Unknown(type(module).__name__, name, self.device)

    @staticmethod
    def idle(module: torch.nn.Module) -> bool:
        """Whether a leaf is covered by a probe of its parent, or needs none."""
        covered = (SiluAndMul, RMSNormGated, VocabParallelEmbedding, LogitsProcessor)
        return isinstance(module, covered) or type(module).__name__ in IDLE

    def rows(
        self,
        op: str,
        shape: str,
        run: Callable[..., Tensors],
        *sizes: int | tuple[int, ...],
        results: int,
        cost: int,
        rows: int | None = None,
        plan: tiles.Plan | None = None,
    ) -> RowProbe:
        """A row probe whose inputs are random, each of a size a row.

        Args:
            op, shape, run, cost: As in ``RowProbe``.
            sizes: Of the inputs.
            results: Values of a row of the results.
            rows: The most rows; None for those of a prompt's step.
            plan: The tiles by row count, if the op has some.
        """
        rows = rows or self.tokens
        width = 4 * max(results, *(math.prod(s) if isinstance(s, tuple) else s for s in sizes))

        def inputs(count: int, seed: int) -> Tensors:
            return tuple(self.random(count, size, seed + 10 * i) for i, size in enumerate(sizes))

        return RowProbe(
            op, f"{shape} {_name(self.dtype)}", rows, cost, width, self.device, inputs, run,
            self.special, self.memory,
            launches_of(rows, plan),
        )  # fmt: skip

    def random(
        self, count: int, size: int | tuple[int, ...], seed: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Normal values, a few of them a hundred times as large, as activations are."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (count, *(size if isinstance(size, tuple) else (size,)))
        x = torch.randn(shape, generator=generator, device=self.device)
        large = torch.rand(shape, generator=generator, device=self.device) < 2e-3
        return torch.where(large, 100 * x, x).to(dtype or self.dtype)

    def linear(self, layer: Any) -> Probe:
        """Any linear layer, INT4 or 16-bit."""
        depth = getattr(layer, "input_size_per_partition", layer.input_size)
        columns = getattr(layer, "output_size_per_partition", layer.output_size)
        bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
        # A draft layer's is quantised by a method of its own.
        int4 = hasattr(layer, "b70_scale")
        shape = f"{columns}x{depth}"
        if int4:
            zero = getattr(layer, "b70_zero", getattr(layer, "b70_offset", None))
            shape += f" group {depth // layer.b70_scale.shape[0]}"
            shape += "" if zero is None else " asymmetric"
        shape += "" if bias is None else " bias"

        def run(x: torch.Tensor) -> Tensors:
            return (layer.quant_method.apply(layer, x, bias),)

        return self.rows(
            "int4_linear" if int4 else "linear", shape, run, depth, results=columns,
            cost=depth * columns, plan=self.plan(columns, depth, layer.b70_scale if int4 else None),
        )  # fmt: skip

    def sum_over_cards(self, columns: int, cards: int) -> Probe:
        """What vLLM adds up over the ranks behind a row-parallel linear; all of them ask at once.

        Args:
            columns: Values of a row.
            cards: How many ranks there are.
        """
        rank = get_tensor_model_parallel_rank()

        def inputs(count: int, seed: int) -> Tensors:
            # Summands of their own on each rank.
            return (self.random(count, columns, seed + 1000 * rank),)

        def run(x: torch.Tensor) -> Tensors:
            return (tensor_model_parallel_all_reduce(x),)

        return RowProbe(
            "all_reduce", f"{columns} of {cards} cards {_name(self.dtype)}", self.tokens,
            4 * columns, 4 * columns, self.device, inputs, run, self.special, self.memory,
            together=True,
        )  # fmt: skip

    def head(self, head: Any) -> Probe:
        """The lm_head as the logits processor calls it."""
        columns, depth = head.num_embeddings_per_partition, head.embedding_dim

        def run(x: torch.Tensor) -> Tensors:
            return (head.quant_method.apply(head, x, bias=None),)

        return self.rows(
            "lm_head", f"{columns}x{depth}", run, depth, results=columns, cost=depth * columns,
            rows=self.sampled, plan=self.plan(columns, depth),
        )  # fmt: skip

    def plan(self, columns: int, depth: int, scale: torch.Tensor | None = None) -> tiles.Plan:
        """The tiles of a weight; an INT4 one has scales, a row for each group."""
        if scale is None:
            return gemm.plan(self.device, columns, depth)
        family = tiles.family(self.device)
        return tiles.plan(int4_gemm.OP, family, columns, depth, len(scale))

    def draft_tokens(self, model: Any) -> Probe:
        """The draft model's head as drafts are made with it: its argmax, or a row of logits.

        Not a probe of the census: the target verifies what it gives.
        """
        head = getattr(model, "draft_head", None)
        head = model.lm_head if head is None else head
        greedy = self.config.speculative_config.use_local_argmax_reduction

        def run(x: torch.Tensor) -> Tensors:
            best = getattr(head.quant_method, "best", None) if greedy else None
            found = None if best is None else best(head, x, None)
            return (head.quant_method.apply(head, x, bias=None),) if found is None else found

        size = self.config.model_config.get_hidden_size()
        columns = self.config.model_config.get_vocab_size()
        return self.rows(
            "draft_tokens", f"{columns}x{size}", run, size, results=columns, cost=columns * size,
            rows=self.requests,
        )  # fmt: skip

    def norm(self, module: Any, residual: bool) -> Probe:
        """A norm over the hidden size, with a residual or without."""
        size = module.weight.shape[0]

        def run(*x: torch.Tensor) -> Tensors:
            y = module(*x)
            return y if isinstance(y, tuple) else (y,)

        op = "gemma_rms_norm" if isinstance(module, GemmaRMSNorm) else "rms_norm"
        return self.rows(
            f"add_{op}" if residual else op, str(size), run, *[size] * (1 + residual),
            results=size, cost=4 * size,
        )  # fmt: skip

    def gated_norm(self, layer: Any) -> Probe:
        """The gated norm of the gated delta net; a row is a token's heads."""
        heads, size = layer.num_v_heads // layer.tp_size, layer.head_v_dim

        def run(x: torch.Tensor, z: torch.Tensor) -> Tensors:
            return (layer.norm(x, z),)

        sizes = [(heads, size)] * 2
        return self.rows(
            "gated_rms_norm", f"{heads}x{size}", run, *sizes, results=heads * size,
            cost=8 * heads * size,
        )  # fmt: skip

    def norms_and_rotary(self, layer: Any) -> Probe:
        """What attention does between its projection and its kernel."""
        heads, kv, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
        columns = layer.qkv_proj.output_size_per_partition
        most = self.config.model_config.max_model_len
        # Models that take images have a position in time, height and width.
        axes = (3,) if self.config.model_config.uses_mrope else ()

        def run(qkv: torch.Tensor, positions: torch.Tensor) -> Tensors:
            positions = positions.t().contiguous() if axes else positions
            return tuple(t for t in layer._project_qkv_gate(qkv, positions) if t is not None)

        def inputs(count: int, seed: int) -> Tensors:
            generator = torch.Generator(self.device).manual_seed(seed)
            where = (count, *axes)
            positions = torch.randint(0, most, where, generator=generator, device=self.device)
            return self.random(count, columns, seed), positions

        return RowProbe(
            "norms_and_rotary", f"{heads}+{kv}x{size} {_name(self.dtype)}", self.tokens,
            4 * columns, 4 * columns, self.device, inputs, run, self.special, self.memory,
            launches_of(self.tokens),
        )  # fmt: skip

    def silu_and_mul(self, layer: Any) -> Probe:
        """The activation of an MLP."""
        columns = layer.gate_up_proj.output_size_per_partition

        def run(x: torch.Tensor) -> Tensors:
            return (layer.act_fn(x),)

        return self.rows(
            "silu_and_mul", str(columns), run, columns, results=columns, cost=4 * columns
        )

    def attention(self, layer: Any) -> Probe:
        """vLLM's attention layer with the backend that the platform chose."""
        heads, kv, size = layer.num_heads, layer.num_kv_heads, layer.head_size
        block = layer.get_kv_cache_spec(self.config).block_size

        def inputs(count: int, seed: int) -> Tensors:
            sizes = heads * size, kv * size, kv * size
            # Large values would leave one key with all the weight.
            return tuple(
                self.random(count, n, seed + 10 * i).clamp(-4, 4) for i, n in enumerate(sizes)
            )

        return self.steps(
            "attention", f"{heads}+{kv}x{size} block {block} {_name(self.dtype)}", inputs,
            AttentionSession, layer, layer.layer_name, self.over_a_block(block),
        )  # fmt: skip

    def over_a_block(self, block: int) -> tuple[int, ...]:
        """Prompts of which the longest is continued into another block of the cache, if there may
        be requests of that many tokens."""
        *others, longest = PROMPTS
        most = self.config.model_config.max_model_len
        into = block - TAIL // 2
        return (*others, into if longest < into <= most - TAIL else longest)

    def gated_delta_net(self, layer: Any) -> Probe:
        """The core of the gated delta net."""
        heads, keys = layer.num_v_heads // layer.tp_size, layer.num_k_heads // layer.tp_size
        shape = f"{heads}+{keys}x{layer.head_v_dim} {_name(self.dtype)}"
        if not isinstance(layer, RowInvariantGatedDeltaNet):
            return Unknown(type(layer).__name__, shape, self.device)
        width = (layer.conv_dim + layer.value_dim) // layer.tp_size

        def inputs(count: int, seed: int) -> Tensors:
            return self.random(count, width, seed), self.random(count, 2 * heads, seed + 1)

        return self.steps(
            "gated_delta_net", shape, inputs, GatedDeltaNetSession, layer, layer.prefix
        )

    def steps(
        self, op: str, shape: str, inputs: Callable[[int, int], Tensors], kind: Any, layer: Any,
        name: str, prompts: tuple[int, ...] = PROMPTS,
    ) -> StepProbe:  # fmt: skip
        """A step probe over a session of some kind, of as many requests as its cache may have."""
        spec = layer.get_kv_cache_spec(self.config)
        of_each = kind.units_of(spec, max(prompts) + TAIL) * spec.page_size_bytes
        least = min(self.requests, 2)
        requests = max(least, min(self.requests, 64, CACHE * self.memory // of_each))
        return StepProbe(
            op, f"{shape} depth {self.depth}", self.device, inputs,
            sessions(kind, layer, name, self.config), requests, self.depth, self.special,
            pads=self.device.type != "cpu", prompts=prompts,
            least_memory=-(-least * of_each // CACHE),
        )  # fmt: skip

    def samplers(self) -> Iterator[Probe]:
        """The greedy token and its logprobs, as the model runner takes them."""
        columns = self.config.model_config.get_vocab_size()
        if self.config.use_v2_model_runner:
            from vllm.v1.worker.gpu.sample import gumbel, logprob

            def run(x: torch.Tensor) -> Tensors:
                zeros = torch.zeros(len(x), device=x.device)
                index = torch.arange(len(x), device=x.device).int()
                tokens = gumbel.gumbel_sample(
                    x, index, zeros, zeros.long(), index.long(), apply_temperature=False,
                    is_drafting=False,
                )  # fmt: skip
                # A row of NaN has no token; its neighbours' logprobs are looked at all the same.
                scores = logprob.compute_topk_scores(x, 20, tokens.clamp(0, columns - 1))
                # Which of equals is listed beside the token is torch.topk's choice, and no promise.
                ids = scores.logprob_token_ids.clone()
                ids[:, 1:].masked_fill_(_ties(x)[:, None], -1)
                return tokens, ids, scores.logprobs
        else:
            from vllm.v1.sample.sampler import Sampler

            def run(x: torch.Tensor) -> Tensors:
                return Sampler.greedy_sample(x), Sampler.compute_logprobs(x)

        def inputs(count: int, seed: int) -> Tensors:
            x = self.random(count, columns, seed, torch.float32)
            # 16-bit logits tie: every second row has its largest value in many columns.
            x[1::2] = x[1::2].clamp(max=2)
            return (x,)

        yield RowProbe(
            "sampler", f"{columns} float32", self.sampled, 8 * columns, 4 * columns, self.device,
            inputs, run, self.special, self.memory, launches_of(self.sampled),
        )  # fmt: skip
