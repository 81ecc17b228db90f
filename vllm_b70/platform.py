"""The policy: what the exact route needs of vLLM's configuration.

A mixin over the platform class that vLLM's own resolver picks. What the user left open is set,
what the user chose and the route cannot honour is refused by name, and the result is shown once.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.platforms import builtin_platform_plugins
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_b70 import plugin, workers, xpu
from vllm_b70.checkpoints.check import check_checkpoint, has_mtp_head, is_complete
from vllm_b70.chunk_grid import GRID, least_batched_tokens, most_blocks
from vllm_b70.settings import NATIVE, current
from vllm_b70.speculation.schedule import check_graphs, check_schedule, depth_by_batch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# A child of vLLM's logger, so that the user's logging configuration applies.
logger = logging.getLogger("vllm.vllm_b70")

SCHEDULERS = {
    False: "vllm_b70.scheduling.scheduler.ChunkGridScheduler",
    True: "vllm_b70.scheduling.scheduler.AsyncChunkGridScheduler",
}
STOCK_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
CPU_ATTENTION = "vllm_b70.layers.cpu_attention.RowInvariantCPUAttentionBackend"
GPU_ATTENTION = "vllm_b70.layers.attention.RowInvariantAttentionBackend"
XPU_COMMUNICATOR = "vllm_b70.layers.communicator.RankOrderXpuCommunicator"


class PolicyError(ValueError):
    """A setting that the user chose and the exact route cannot honour."""


@dataclass(frozen=True)
class Row:
    """One line of the policy table."""

    setting: str
    value: str
    why: str


_shown = False


def _refuse(setting: str, why: str, instead: str) -> None:
    raise PolicyError(f"VLLM_B70=1 cannot honour {setting}: {why}; {instead}.")


def _max_draft_depth(config: VllmConfig) -> int:
    speculative = config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or 0)


def _skips(config: VllmConfig) -> bool:
    """Whether the schedule has steps with depth 0."""
    speculative = config.speculative_config
    schedule = speculative and speculative.num_speculative_tokens_per_batch_size
    return (
        bool(schedule) and 0 in depth_by_batch(schedule, config.scheduler_config.max_num_seqs)[1:]
    )


def check_choices(config: VllmConfig, cards: tuple[int, ...] = (1,)) -> None:
    """Refuse what the exact route does not cover, by name.

    Args:
        config: vLLM's configuration.
        cards: The tensor-parallel sizes that the device's route covers.

    Raises:
        PolicyError: One sentence with the setting, the reason and what to do.
    """
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        _refuse(
            "VLLM_BATCH_INVARIANT=1",
            "it swaps in other kernels, and vLLM refuses it for quantised and gated-delta-net "
            "models",
            "unset it, VLLM_B70=1 covers what it promises",
        )
    if os.environ.get("VLLM_LORA_ENABLE_DUAL_STREAM", "0") not in ("", "0"):
        _refuse(
            "VLLM_LORA_ENABLE_DUAL_STREAM=1",
            "its kernels may start while ours run and do not wait for them",
            "unset it",
        )
    cache = config.cache_config
    if cache.enable_prefix_caching:
        _refuse(
            "prefix caching",
            "a cached prefix ends where another request's prompt did",
            "use --no-enable-prefix-caching (enable_prefix_caching=False in Python)",
        )
    model = config.model_config
    own = "auto" if model is None else str(model.dtype).removeprefix("torch.")
    if cache.cache_dtype not in ("auto", own):
        _refuse(
            f"--kv-cache-dtype {cache.cache_dtype}",
            "the KV cache is of the model's own dtype, and a quantised one is not covered",
            "leave it at auto",
        )
    if cache.mamba_cache_mode != "none":
        _refuse(
            f"--mamba-cache-mode {cache.mamba_cache_mode}",
            "it belongs to prefix caching",
            "leave it at none",
        )
    if cache.mamba_ssm_cache_dtype not in ("auto", "float32"):
        _refuse(
            f"--mamba-ssm-cache-dtype {cache.mamba_ssm_cache_dtype}",
            "a rounded recurrent state makes the result depend on how many tokens a step verified",
            "use float32",
        )
    parallel = config.parallel_config
    for kind in ("pipeline", "data", "decode_context", "prefill_context"):
        size = getattr(parallel, f"{kind}_parallel_size")
        if size > 1:
            _refuse(
                f"--{kind.replace('_', '-')}-parallel-size {size}",
                "the exact route covers one worker a card and one replica",
                "leave it at 1",
            )
    if parallel.tensor_parallel_size not in cards:
        _refuse(
            f"--tensor-parallel-size {parallel.tensor_parallel_size}",
            "the sum over so many cards has no exact form on this device",
            f"use {' or '.join(map(str, cards))}",
        )
    if cache.mamba_cache_dtype not in ("auto", own):
        _refuse(
            f"--mamba-cache-dtype {cache.mamba_cache_dtype}",
            "the convolution's history must hold the inputs as they are",
            "leave it at auto",
        )
    if getattr(parallel, "use_ubatching", False):
        _refuse(
            "dual-batch overlap",
            "calls on one weight must not overlap",
            "leave --enable-dbo and --ubatch-size out",
        )
    offloaded = getattr(cache, "kv_offloading_size", None)
    for setting, chosen in (
        ("--kv-transfer-config", config.kv_transfer_config),
        (f"--kv-offloading-size {offloaded}", offloaded),
    ):
        if chosen is not None:
            _refuse(setting, "a KV cache from elsewhere may end off the chunk grid", "leave it out")
    _check_scheduler(config)
    _check_model(config)
    _check_speculation(config)


def _check_scheduler(config: VllmConfig) -> None:
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is not None and scheduler.scheduler_cls not in SCHEDULERS.values():
        _refuse(
            f"--scheduler-cls {scheduler.scheduler_cls}",
            "the chunk grid is a scheduler class of its own",
            "leave it out",
        )
    threshold = scheduler.long_prefill_token_threshold
    if 0 < threshold < GRID:
        _refuse(
            f"--long-prefill-token-threshold {threshold}",
            f"prompt chunks end on multiples of {GRID} tokens, so a prompt would never advance",
            f"use 0 or at least {GRID}",
        )
    depth = _max_draft_depth(config)
    least = least_batched_tokens(scheduler.max_num_seqs, depth)
    for setting, budget in (
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens),
        ("--max-num-scheduled-tokens", getattr(scheduler, "max_num_scheduled_tokens", None)),
    ):
        if budget is not None and budget < least:
            _refuse(
                f"{setting} {budget}",
                f"beside {scheduler.max_num_seqs} sequences with {depth} drafts each, a prompt "
                f"chunk of {GRID} tokens needs a budget of {least}",
                f"raise it to {least} or lower --max-num-seqs",
            )


#: What the layers were written for and tested with.
ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
QUANTIZATIONS = (None, "compressed-tensors", "gptq", "auto_gptq", "gptq_marlin", "inc")


def _check_model(config: VllmConfig) -> None:
    model = config.model_config
    if model is None:
        return
    if not set(model.architectures) & set(ARCHITECTURES):
        _refuse(
            f"a model of kind {', '.join(model.architectures)}",
            f"the exact route covers {' and '.join(ARCHITECTURES)}",
            "set VLLM_B70=0 for this model",
        )
    if str(getattr(model, "model_impl", "auto")) not in ("auto", "vllm"):
        _refuse(
            f"--model-impl {model.model_impl}",
            "the exact layers take the place of vLLM's own",
            "use auto or vllm",
        )
    if model.quantization not in QUANTIZATIONS:
        _refuse(
            f"--quantization {model.quantization}",
            "only 4-bit compressed-tensors, GPTQ and AutoRound weights have an exact kernel",
            "use such a checkpoint, or one that is not quantised",
        )
    if model.head_dtype != model.dtype:
        _refuse(
            f"head_dtype {str(model.head_dtype).removeprefix('torch.')}",
            "the lm_head has an exact kernel for the model's own dtype only",
            "leave it out of --hf-overrides",
        )
    folder = _folder(model.model, model.revision)
    if folder is not None:
        check_checkpoint(folder)


def _folder(model: str, revision: str | None) -> Path | None:
    """The checkpoint's folder: as given, or a hub id's snapshot if all of it is on disk already.

    vLLM downloads the weights after this, so at a first start there is nothing to look at.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(found, str) and is_complete(Path(found).parent):
        return Path(found).parent
    return None


def _check_speculation(config: VllmConfig) -> None:
    speculative = config.speculative_config
    if speculative is None:
        return
    if speculative.method != "mtp":
        _refuse(
            f"speculative method {speculative.method}",
            "the exact route covers the model's own MTP head",
            'use "method": "mtp"',
        )
    if getattr(speculative, "rejection_sample_method", "standard") != "standard":
        _refuse(
            f"rejection_sample_method {speculative.rejection_sample_method}",
            "it accepts drafts that the model would not write",
            "leave it out",
        )
    schedule = speculative.num_speculative_tokens_per_batch_size
    if schedule is not None:
        check_schedule(schedule, _max_draft_depth(config))
    model = config.model_config
    if _skips(config):
        layers = getattr(model.hf_text_config, "mtp_num_hidden_layers", 1)
        if layers != 1:
            _refuse(
                f"depth 0 in a schedule with {layers} MTP layers",
                "what a skipped step leaves out can be made up for with one layer only",
                "use depths of 1 or more",
            )
    folder = _folder(model.model, model.revision)
    if folder is not None and not has_mtp_head(folder):
        _refuse(
            "speculative decoding",
            f"the checkpoint {model.model} has no mtp.* tensors, so there is no MTP head to draft "
            "with",
            "use a checkpoint with one, or leave --speculative-config out",
        )


def _check_shortlist(config: VllmConfig) -> None:
    """Refuse a list of draft tokens that is not for this model and its tokenizer."""
    path, model = current().draft_shortlist, config.model_config
    if path is not None and config.speculative_config is not None:
        _check_list(path, model.tokenizer, model.tokenizer_revision, model.get_vocab_size())


# vLLM makes a configuration several times a start.
@functools.cache
def _check_list(path: Path, name: str, revision: str | None, vocabulary: int) -> None:
    from huggingface_hub import hf_hub_download
    from tokenizers import Tokenizer

    from vllm_b70.speculation.shortlist import check

    try:
        file = str(Path(name) / "tokenizer.json")
        if not Path(name).is_dir():
            # vLLM fetches the same file a moment later.
            file = hf_hub_download(name, "tokenizer.json", revision=revision)
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:
        raise PolicyError(
            "VLLM_B70_DRAFT_SHORTLIST cannot be honoured: the list must fit the tokenizer.json of "
            f"{name}, which cannot be read ({error}); leave the variable out."
        ) from error
    check(path, tokenizer, vocabulary)


def _draft_without_logits(config: VllmConfig) -> None:
    """Ask for greedy draft tokens and not for rows of logits, unless something needs the rows."""
    speculative = config.speculative_config
    if speculative is None or getattr(speculative, "enable_adaptive_verification", False):
        return
    if speculative.draft_sample_method == "greedy":
        speculative.use_local_argmax_reduction = True


class ExactPolicy:
    """Mixin over a platform class of vLLM: what every device has in common."""

    #: Marks the class for ``plugin.register`` and for tests.
    vllm_b70 = True
    #: What a user of this device has to know before relying on it; logged under the table.
    caution: str | None = None
    #: Whether kernels are compiled at their first launch, so that a worker has to make it.
    warms_up = False
    #: How many cards the route covers.
    cards: tuple[int, ...] = (1,)

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        super().pre_register_and_update(parser)  # type: ignore[misc]
        if parser is not None:
            # The default, not the choice: a user who asks for prefix caching is refused by name.
            parser.set_defaults(enable_prefix_caching=False)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if not plugin.registered():
            raise plugin.PluginError(
                "VLLM_B70=1 and the plugin's platform is active, but its general plugin was not "
                "loaded: let VLLM_PLUGINS include vllm_b70, or leave VLLM_PLUGINS unset."
            )
        # Before vLLM's own policy, which overwrites some of what the user chose.
        cls.check_device_choices(vllm_config)
        check_choices(vllm_config, cls.cards)
        _check_shortlist(vllm_config)
        _draft_without_logits(vllm_config)
        vllm_config.cache_config.mamba_ssm_cache_dtype = "float32"
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        if vllm_config.speculative_config is not None:
            from vllm_b70.compat import depth_metrics

            depth_metrics.apply()
        scheduler = vllm_config.scheduler_config
        scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]
        _choose_worker(vllm_config, cls.warms_up, cls.captures(vllm_config))
        _show(cls.policy(vllm_config), cls.caution)

    @classmethod
    def check_device_choices(cls, config: VllmConfig) -> None:
        """Refuse by name what the device's route does not cover, before ``check_choices``.

        Raises:
            PolicyError: One sentence with the setting, the reason and what to do.
        """
        raise NotImplementedError

    @classmethod
    def device_policy(cls, config: VllmConfig) -> list[Row]:
        """The lines of the table that belong to the device."""
        raise NotImplementedError

    @classmethod
    def captures(cls, config: VllmConfig) -> bool:
        """Whether the device's steps run from captured graphs."""
        return False

    @classmethod
    def policy(cls, config: VllmConfig) -> list[Row]:
        """The settings of the exact route as the table shows them."""
        scheduler = config.scheduler_config
        return [
            _linears(),
            Row("gated delta net", "by position", "prompt chunked, all else token by token"),
            Row(
                "scheduler",
                str(scheduler.scheduler_cls).rpartition(".")[2],
                f"prompt chunks end on multiples of {GRID} tokens",
            ),
            Row(
                "max_num_batched_tokens",
                str(scheduler.max_num_batched_tokens),
                f"at least {least_batched_tokens(scheduler.max_num_seqs, _max_draft_depth(config))}"
                " so that prompts always advance",
            ),
            Row("prefix caching", "off", "a cached prefix ends where another prompt did"),
            Row("mamba_ssm_cache_dtype", "float32", "the state is never rounded between tokens"),
            Row("kv_cache_dtype", config.cache_config.cache_dtype, "quantised caches are refused"),
            *_drafting(config),
            Row("census", current().census, "every op is certified on this device at start"),
            *cls.device_policy(config),
        ]


class CpuPolicy(ExactPolicy):
    """What the route on a CPU needs besides."""

    @classmethod
    def check_device_choices(cls, config: VllmConfig) -> None:
        import torch

        if os.environ.get("VLLM_CPU_ATTN_SPLIT_KV", "0") != "0":
            _refuse(
                "VLLM_CPU_ATTN_SPLIT_KV=1",
                "it cuts the KV cache by how many threads are idle",
                "set it to 0 or leave it out",
            )
        # vLLM reads this one in the worker, which inherits the environment.
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
        if config.use_v2_model_runner:
            _refuse(
                "the V2 model runner",
                "the exact route on the CPU is built on the V1 runner",
                "set VLLM_USE_V2_MODEL_RUNNER=0",
            )
        model = config.model_config
        if model is None or model.dtype == torch.bfloat16:
            return
        dtype = str(model.dtype).removeprefix("torch.")
        if getattr(model, "is_hybrid", False):
            _refuse(
                f"--dtype {dtype}",
                "vLLM's gated-delta-net prefill on the CPU takes bfloat16 only",
                "use --dtype bfloat16",
            )
        if model.dtype != torch.float16:
            _refuse(f"--dtype {dtype}", "the linears are 16-bit", "use --dtype bfloat16")

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        chosen = super().get_attn_backend_cls(*args, **kwargs)  # type: ignore[misc]
        if chosen != STOCK_CPU_ATTENTION:
            raise PolicyError(
                f"VLLM_B70=1 has no exact form of the attention backend {chosen}: "
                "use a model with plain attention, or set VLLM_B70=0."
            )
        return CPU_ATTENTION

    @classmethod
    def device_policy(cls, config: VllmConfig) -> list[Row]:
        mode = getattr(config.compilation_config.mode, "name", "NONE")
        return [
            Row("attention", "by position", "no split of the KV cache by idle threads"),
            Row("compilation mode", mode, "unchanged; eager and compiled are both exact"),
        ]


#: Options of Inductor under which a compiled region is one and the same for every row count.
INDUCTOR = {
    "deterministic": True,
    "split_reductions": False,
    "combo_kernels": False,
    "benchmark_combo_kernel": False,
    "benchmark_fusion": False,
}


class GpuPolicy(ExactPolicy):
    """What the route on CUDA and XPU needs besides."""

    warms_up = True
    caution = (
        "the exact route on a GPU is new: its kernels are exact by construction and were compared "
        "on one H200 only; the census certifies each op at start, not what torch.compile makes "
        "between them; compare your own server with `vllm-b70 verify`"
    )

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        super().apply_config_platform_defaults(vllm_config)  # type: ignore[misc]
        from vllm.config import CUDAGraphMode

        compilation = vllm_config.compilation_config
        if compilation.cudagraph_mode is None:
            off = current().graphs == "off"
            compilation.cudagraph_mode = (
                CUDAGraphMode.NONE if off else CUDAGraphMode.FULL_DECODE_ONLY
            )
        if compilation.splitting_ops is None:
            compilation.splitting_ops = []
        for name, value in INDUCTOR.items():
            compilation.inductor_compile_config[name] = value

    @classmethod
    def check_device_choices(cls, config: VllmConfig) -> None:
        import torch
        from vllm.config import CompilationMode, CUDAGraphMode

        if current().linear == "naive":
            _refuse(
                "VLLM_B70_LINEAR=naive",
                "this control exists on a CPU only",
                "leave it out",
            )
        if not config.use_v2_model_runner:
            _refuse(
                "the V1 model runner",
                "the exact route on a GPU is built on the V2 runner",
                "leave VLLM_USE_V2_MODEL_RUNNER unset",
            )
        model = config.model_config
        if model is not None and model.dtype not in (torch.float16, torch.bfloat16):
            _refuse(
                f"--dtype {str(model.dtype).removeprefix('torch.')}",
                "the kernels are 16-bit",
                "use --dtype bfloat16 or float16",
            )
        _check_chunk_offsets(config)
        compilation = config.compilation_config
        if compilation.mode not in (None, CompilationMode.NONE, CompilationMode.VLLM_COMPILE):
            _refuse(
                f"compilation mode {compilation.mode.name}",
                "it compiles the model anew for some row counts, which may round differently",
                "leave the mode out, or use --enforce-eager",
            )
        # vLLM's own end of the one range is the budget; it is there already when a configuration is
        # made from another.
        budget = config.scheduler_config.max_num_batched_tokens
        if any(end < budget for end in compilation.compile_ranges_endpoints or []):
            _refuse(
                f"compile_ranges_endpoints {compilation.compile_ranges_endpoints}",
                "a graph of its own for a range of row counts may round differently",
                "leave it out",
            )
        for fusion in ("fuse_allreduce_rms", "fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache"):
            if getattr(compilation.pass_config, fusion, None):
                _refuse(
                    f"pass_config.{fusion}",
                    "it is compiled in up to a number of rows only",
                    "leave it out",
                )
        graphs = compilation.cudagraph_mode
        if graphs not in (None, CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY):
            _refuse(
                f"cudagraph_mode {graphs.name}",
                "graphs are captured for whole decode steps, and prompts run without one",
                "use FULL_DECODE_ONLY or NONE",
            )
        _check_graphs_switch(config)
        if compilation.splitting_ops:
            _refuse(
                f"splitting_ops {compilation.splitting_ops}",
                "the model is compiled as one graph for all row counts",
                "leave it out",
            )
        if compilation.compile_sizes:
            _refuse(
                f"compile_sizes {compilation.compile_sizes}",
                "a graph of its own for a row count may round differently",
                "leave it out",
            )
        speculative = getattr(config, "speculative_config", None)
        sizes = compilation.cudagraph_capture_sizes
        if speculative is not None and sizes and graphs is not CUDAGraphMode.NONE:
            requests, depth = config.scheduler_config.max_num_seqs, _max_draft_depth(config)
            schedule = speculative.num_speculative_tokens_per_batch_size or [(1, requests, depth)]
            check_schedule(schedule, depth)
            check_graphs(schedule, requests, max(sizes))

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        # vLLM's own choice follows what else is installed; ours needs Triton alone.
        if selected_backend is not None and selected_backend.name != "TRITON_ATTN":
            _refuse(
                f"--attention-backend {selected_backend.name}",
                "it cuts the KV cache by the batch",
                "leave it out",
            )
        selector = args[0] if args else kwargs["attn_selector_config"]
        for option in ("use_mla", "use_sparse", "has_sink", "use_mm_prefix", "use_non_causal"):
            if getattr(selector, option, False):
                raise PolicyError(
                    f"VLLM_B70=1 has no exact attention with {option}: use a model with plain "
                    "attention, or set VLLM_B70=0."
                )
        return GPU_ATTENTION

    @classmethod
    def captures(cls, config: VllmConfig) -> bool:
        from vllm.config import CUDAGraphMode

        return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)

    @classmethod
    def device_policy(cls, config: VllmConfig) -> list[Row]:
        compilation = config.compilation_config
        sizes = compilation.cudagraph_capture_sizes or []
        graphs = (current().graphs or "all") if cls.captures(config) else "off"
        return [
            Row("attention", "by position", "the KV cache is cut every so many keys from 0"),
            Row("model runner", "V2", "draft depths have full graphs of their own"),
            Row(
                "compilation mode",
                getattr(compilation.mode, "name", "NONE"),
                "one graph for all row counts; eager and compiled are both exact",
            ),
            Row("graphs", graphs, GRAPHS[graphs]),
            Row("cudagraph_mode", compilation.cudagraph_mode.name, "prompts run without a graph"),
            Row("capture sizes", f"{len(sizes)} to {max(sizes, default=0)} rows", "of a decode"),
        ]


#: What each value of VLLM_B70_GRAPHS comes to.
GRAPHS = {
    "off": "every step is launched op by op",
    "target": "each replayed against an eager step at start; the drafter has none",
    "all": "of the target and the drafter, each replayed against an eager step at start",
}


def _check_graphs_switch(config: VllmConfig) -> None:
    """Refuse options of vLLM that say something else than VLLM_B70_GRAPHS does."""
    from vllm.config import CUDAGraphMode

    asked, mode = current().graphs, config.compilation_config.cudagraph_mode
    if asked is None or mode is None or (asked == "off") == (mode is CUDAGraphMode.NONE):
        return
    eager = getattr(config.model_config, "enforce_eager", False)
    _refuse(
        f"VLLM_B70_GRAPHS={asked}",
        f"{'--enforce-eager' if eager else f'cudagraph_mode {mode.name}'} asks for the opposite",
        "leave one of them out",
    )


def _check_chunk_offsets(config: VllmConfig) -> None:
    """vLLM's chunked kernels find the state before each block of a step by a 32-bit offset."""
    text = getattr(config.model_config, "hf_text_config", None)
    if text is None or not hasattr(text, "linear_num_value_heads"):
        return
    scheduler = config.scheduler_config
    budget, sequences = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    state = text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim
    blocks, limit = most_blocks(budget, sequences), 2**31 // state
    if blocks > limit:
        _refuse(
            f"--max-num-batched-tokens {budget}",
            f"with {sequences} sequences a step may hold {blocks} blocks of {GRID} prompt tokens, "
            f"and the chunked kernels address the states of {limit} of this model's",
            f"lower it to {limit * GRID - sequences * (GRID - 1)} or less",
        )


class XpuPolicy(GpuPolicy):
    """What the route on an XPU needs besides, and what it lacks there."""

    caution = (
        "the exact route was never run on an XPU: its kernels are compiled for Battlemage and "
        "compared bit for bit in Triton's interpreter, no more; docs/b70.md says how to find out "
        "what your card does with it"
    )
    cards = (1, 2)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CUDAGraphMode

        compilation = vllm_config.compilation_config
        # Asked for by the switch, they are refused below.
        asked = current().graphs in ("target", "all")
        if compilation.cudagraph_mode is None and not asked and _no_graphs(vllm_config) is not None:
            compilation.cudagraph_mode = CUDAGraphMode.NONE
        super().apply_config_platform_defaults(vllm_config)

    @classmethod
    def check_device_choices(cls, config: VllmConfig) -> None:
        from vllm.config import CUDAGraphMode

        for need in xpu.needs(config.parallel_config.tensor_parallel_size):
            if not need.met:
                _refuse(f"an XPU server without {need.what}", f"found {need.found}", need.remedy)
        need = xpu.int4_gemm()
        if current().linear == "native" and not need.met:
            _refuse("VLLM_B70_LINEAR=native", f"found {need.found}", need.remedy)
        offload = config.offload_config
        if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
            _refuse(
                "weights offloaded to the host",
                "the kernels load rectangles of device memory",
                "leave --cpu-offload-gb and --offload-group-size out",
            )
        # vLLM would switch graphs off with a warning.
        graphs = config.compilation_config.cudagraph_mode
        why = _no_graphs(config)
        if graphs not in (None, CUDAGraphMode.NONE) and why is not None:
            asked = current().graphs
            _refuse(f"VLLM_B70_GRAPHS={asked}" if asked else f"cudagraph_mode {graphs.name}", *why)
        super().check_device_choices(config)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return XPU_COMMUNICATOR

    @classmethod
    def device_policy(cls, config: VllmConfig) -> list[Row]:
        rows = super().device_policy(config)
        cards = config.parallel_config.tensor_parallel_size
        if cards > 1:
            rows.append(
                Row(
                    "all-reduce",
                    "rank order",
                    f"gathered, added in fp32, rounded once; each card cuts K of its own shard, so "
                    f"{cards} cards and one may differ",
                )
            )
        return rows


def _no_graphs(config: VllmConfig) -> tuple[str, str] | None:
    """Why vLLM would not capture graphs on an XPU, and what to do; None if it would."""
    need = xpu.graphs()
    if not need.met:
        return f"found {need.found}", need.remedy
    if config.model_config is not None and config.model_config.enable_sleep_mode:
        return "vLLM has no XPU graphs in sleep mode", "leave one of them out"
    return None


def _choose_worker(config: VllmConfig, warms_up: bool, graphs: bool) -> None:
    """Let vLLM's worker take the census, warm up, verify its graphs if there are any, and skip
    draft steps where the schedule has depth 0."""
    parallel = config.parallel_config
    # The same worker settles the routes of linears once the weights are loaded.
    native = current().linear in NATIVE
    census, skipping = native or current().census != "off", _skips(config)
    if not census and not graphs and not skipping and not warms_up:
        return
    # One class takes the census and warms up.
    ours = workers.over(
        parallel.worker_cls, census=census or warms_up, graphs=graphs, skipping=skipping
    )
    if ours is None and not census and not graphs and not skipping:
        logger.warning(
            "vllm_b70: --worker-cls %s does not warm up, so that kernels are compiled while "
            "requests wait", parallel.worker_cls,
        )  # fmt: skip
    elif ours is None:
        _refuse(
            f"--worker-cls {parallel.worker_cls}",
            "the census, native linears, graphs and a schedule with depth 0 need a worker class "
            "of their own",
            "leave it out; VLLM_B70_CENSUS=off and VLLM_B70_GRAPHS=off do too but for native "
            "linears and the schedule",
        )
    else:
        parallel.worker_cls = ours


def _linears() -> Row:
    if current().linear == "naive":
        return Row("linears", "NAIVE", "a control (VLLM_B70_LINEAR=naive): NOT exact, never serve")
    if current().linear == "triton":
        return Row("linears", "row-invariant", "one order of addition for every row count")
    faster = ", where it is the faster one" if current().linear == "auto" else ""
    return Row(
        "linears",
        current().linear,
        f"the vendor's kernel in one certified row class a shape{faster}; else our own",
    )


def _drafting(config: VllmConfig) -> list[Row]:
    settings = current()
    chosen = (settings.draft_head, settings.draft_layer)
    if config.speculative_config is None:
        return [Row("drafting", "none", "the switches VLLM_B70_DRAFT_* have nothing to act on")]
    head = "lm_head itself" if chosen[0] == "none" else f"int4, group {settings.draft_head_group}"
    tokens = "all tokens" if settings.draft_shortlist is None else str(settings.draft_shortlist)
    layer = "as loaded" if chosen[1] == "none" else "int4"
    return [
        Row("draft head", head, f"{tokens}; a copy, the target keeps its own"),
        Row("draft layer", layer, "drafts are proposals: no choice here changes a token"),
        *_draft_history(config),
    ]


def _draft_history(config: VllmConfig) -> list[Row]:
    """The memory that a drafter which may skip steps keeps for catching up."""
    if not _skips(config):
        return []
    from vllm_b70.speculation.draft_history import DraftHistory
    from vllm_b70.speculation.draft_lag import WINDOW

    model, requests = config.model_config, config.scheduler_config.max_num_seqs
    axes = 3 if model.uses_mrope and not config.use_v2_model_runner else 1
    length = WINDOW + _max_draft_depth(config)
    size = DraftHistory.size(requests, length, model.get_hidden_size(), model.dtype, axes)
    what = f"for catching up on skipped steps, {length} positions of each of {requests} requests"
    return [Row("draft history", f"{size / 2**20:.0f} MiB", what)]


def _show(rows: list[Row], caution: str | None) -> None:
    """Log the table and a caution once, in the process that the user started."""
    global _shown
    if _shown or multiprocessing.parent_process() is not None:
        return
    _shown = True
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("setting", "value")]
    lines = [f"  {r.setting:<{widths[0]}}  {r.value:<{widths[1]}}  {r.why}" for r in rows]
    logger.info("vllm_b70: the deterministic route is on\n%s", "\n".join(lines))
    logger.info(
        "vllm_b70: served but not guaranteed: sampling under speculation, images, LoRA adapters, "
        "prompt_logprobs"
    )
    if caution is not None:
        logger.warning("vllm_b70: %s", caution)
    if current().census == "off":
        logger.warning("vllm_b70: nothing certifies the ops on this device (VLLM_B70_CENSUS=off)")


#: Our platform classes: the mixin, and which of vLLM's resolvers names the class under it.
PLATFORMS: dict[str, tuple[type[ExactPolicy], str]] = {
    "B70CpuPlatform": (CpuPolicy, "cpu"),
    "B70CudaPlatform": (GpuPolicy, "cuda"),
    "B70XpuPlatform": (XpuPolicy, "xpu"),
}


@functools.cache
def _platform(name: str) -> type:
    policy, device = PLATFORMS[name]
    base = builtin_platform_plugins[device]()
    if base is None:
        raise plugin.PluginError(f"vLLM was not built for {device}: set VLLM_B70=0.")
    members = {"__module__": __name__, "__doc__": f"vLLM's {device} platform, exact."}
    return type(name, (policy, resolve_obj_by_qualname(base)), members)


def __getattr__(name: str) -> type:
    """Our platform classes by name, made when vLLM asks: each needs a vLLM built for its device."""
    if name in PLATFORMS:
        return _platform(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
