"""The shape of vLLM at the places where our subclasses hook in.

Each seam names a callable or dataclass of vLLM and the parameters or fields that our code uses.
``require`` is called where a seam is used, so a process only imports what it needs.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """One place of vLLM that a subclass of ours relies on.

    Attributes:
        module: Module of vLLM.
        name: Dotted name inside the module.
        uses: Parameters of the callable, or fields of the dataclass, that our code depends on.
        why: What hooks in here.
        worker: It is checked in workers only, because it imports what other processes do without.
    """

    module: str
    name: str
    uses: tuple[str, ...]
    why: str
    worker: bool = False


SEAMS: dict[str, Seam] = {
    "chunk_split": Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._mamba_block_aligned_split",
        (
            "self",
            "request",
            "num_new_tokens",
            "num_new_local_computed_tokens",
            "num_external_computed_tokens",
        ),
        "scheduling.scheduler ends prompt chunks on the grid",
    ),
    "chunk_split_flag": Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.__init__",
        (),
        "scheduling.scheduler switches the split on",
    ),
    "schedule": Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.schedule",
        ("self", "throttle_prefills"),
        "scheduling.step_trace records each step",
    ),
    "linear_method": Seam(
        "vllm.model_executor.layers.linear",
        "UnquantizedLinearMethod.apply",
        ("self", "layer", "x", "bias"),
        "layers.linear replaces the GEMM of 16-bit linears",
    ),
    "gated_norm": Seam(
        "vllm.model_executor.layers.layernorm",
        "RMSNormGated.forward_native",
        ("self", "x", "z"),
        "layers.norm replaces the gated norm",
    ),
    "rms_norm": Seam(
        "vllm.model_executor.layers.layernorm",
        "RMSNorm.forward_native",
        ("self", "x", "residual"),
        "layers.norm replaces the norm on a GPU",
    ),
    "gemma_norm": Seam(
        "vllm.model_executor.layers.layernorm",
        "GemmaRMSNorm.forward_native",
        ("self", "x", "residual"),
        "layers.norm replaces the norm on a GPU",
    ),
    "encoder_inputs": Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._try_schedule_encoder_inputs",
        (
            "self",
            "request",
            "num_computed_tokens",
            "num_new_tokens",
            "encoder_compute_budget",
            "shift_computed_tokens",
        ),
        "scheduling.scheduler keeps chunks that images cut short on the grid",
    ),
    "worker_load": Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker.load_model",
        ("self", "load_dummy_weights"),
        "census.worker takes the census when it is done",
        worker=True,
    ),
    "block_size": Seam(
        "vllm.platforms.interface",
        "Platform.update_block_size_for_backend",
        ("vllm_config",),
        "census.worker settles the block size of the KV cache first",
        worker=True,
    ),
    "norms_and_rotary": Seam(
        "vllm.model_executor.models.qwen3_next",
        "Qwen3NextAttention._project_qkv_gate",
        ("self", "qkv", "positions"),
        "census.path certifies what attention does between its projection and its kernel",
        worker=True,
    ),
    "gdn_projection": Seam(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention._output_projection",
        ("self", "core_attn_out", "z"),
        "layers.gated_delta_net ends with it",
    ),
    "gdn_chunk_kernel": Seam(
        "vllm._custom_ops",
        "chunk_gated_delta_rule_cpu",
        (
            "query",
            "key",
            "value",
            "g",
            "beta",
            "initial_state",
            "output_final_state",
            "cu_seqlens",
            "head_first",
            "use_qk_l2norm_in_kernel",
            "initial_state_indices",
            "eps",
        ),
        "layers.gated_delta_net computes prompts with it",
    ),
    "embedding_method": Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod.apply",
        ("self", "layer", "x", "bias"),
        "layers.linear replaces the GEMM of the lm_head",
    ),
    "logits": Seam(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor.forward",
        ("self", "lm_head", "hidden_states", "embedding_bias", "skip_gather"),
        "layers.logits_processor takes NaN out of logits, and a shard's before they are gathered",
    ),
    "top_tokens": Seam(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor.get_top_tokens",
        ("self", "lm_head", "hidden_states", "embedding_bias"),
        "layers.logits_processor takes the argmax inside the lm_head's GEMM",
    ),
    "mtp_logits": Seam(
        "vllm.model_executor.models.qwen3_5_mtp",
        "Qwen3_5MTP.compute_logits",
        ("self", "hidden_states", "spec_step_idx"),
        "layers.draft_model drafts from a head of its own",
        worker=True,
    ),
    "mtp_top_tokens": Seam(
        "vllm.model_executor.models.interfaces",
        "LocalArgmaxMixin.get_top_tokens",
        ("self", "hidden_states"),
        "layers.draft_model drafts from a head of its own",
        worker=True,
    ),
    "mp_kernel_config": Seam(
        "vllm.model_executor.kernels.linear.mixed_precision",
        "MPLinearLayerConfig",
        (
            "full_weight_shape",
            "partition_weight_shape",
            "weight_type",
            "act_type",
            "group_size",
            "zero_points",
        ),
        "layers.int4_linear is chosen by this configuration",
    ),
    "gdn_forward": Seam(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention.forward_cpu",
        ("self", "hidden_states"),
        "layers.gated_delta_net replaces the core of the layer",
    ),
    "gdn_forward_cuda": Seam(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention.forward_cuda",
        ("self", "hidden_states"),
        "layers.gated_delta_net replaces the core of the layer",
    ),
    "gdn_forward_xpu": Seam(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention.forward_xpu",
        ("self", "hidden_states"),
        "layers.gated_delta_net replaces the core of the layer",
    ),
    "gdn_capture": Seam(
        "vllm.v1.attention.backends.gdn_attn",
        "GDNAttentionMetadataBuilder.build_for_cudagraph_capture",
        ("self", "common_attn_metadata"),
        "layers.gated_delta_net_device builds the metadata of captured graphs",
    ),
    "gdn_chunk_forward": Seam(
        "vllm.third_party.flash_linear_attention.ops.chunk",
        "chunk_gated_delta_rule_fwd",
        (
            "q",
            "k",
            "v",
            "g",
            "beta",
            "scale",
            "initial_state",
            "output_final_state",
            "cu_seqlens",
            "chunk_indices",
            "chunk_offsets",
            "core_attn_out",
        ),
        "layers.gated_delta_net_device computes prompts with it",
        worker=True,
    ),
    "runner_batch": Seam(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.gather_batch_req_state",
        ("self", "scheduler_output", "dummy_run"),
        "compat.prompt_rows tells prompt chunks by position",
        worker=True,
    ),
    "runner_batch_state": Seam(
        "vllm.v1.worker.gpu.model_runner",
        "BatchReqState",
        (
            "req_ids",
            "num_scheduled_tokens",
            "num_tokens",
            "num_draft_tokens_np",
            "idx_mapping_np",
            "prefill_len_np",
            "num_computed_prefill_tokens_np",
            "is_prefilling_np",
            "max_seq_len_np",
            "has_prefill",
            "prefill_runs_as_decode_np",
            "decode_graph_eligible",
        ),
        "compat.prompt_rows tells prompt chunks by position",
        worker=True,
    ),
    "runner_prompt_length": Seam(
        "vllm.v1.worker.gpu.states",
        "RequestState.add_request",
        ("self", "req_id", "prompt_len", "all_token_ids", "num_computed_tokens", "max_tokens"),
        "compat.prompt_rows reads prompt lengths",
        worker=True,
    ),
    "prometheus_logger": Seam(
        "vllm.v1.metrics.loggers",
        "PrometheusStatLogger.__init__",
        ("self", "vllm_config", "engine_indexes"),
        "compat.depth_metrics registers counters beside it",
    ),
    "prometheus_record": Seam(
        "vllm.v1.metrics.loggers",
        "PrometheusStatLogger.record",
        ("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        "compat.depth_metrics takes our counts out of the statistics",
    ),
    "scheduler_stats": Seam(
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        ("num_kv_fetch_reqs_by_stage",),
        "speculation.depth_counts travel in it",
    ),
    "make_stats": Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.make_stats",
        (
            "self",
            "spec_decoding_stats",
            "kv_connector_stats",
            "cudagraph_stats",
            "perf_stats",
            "ec_connector_stats",
        ),
        "scheduling.scheduler sends its counts with it",
    ),
    "spec_decoding_stats": Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.make_spec_decoding_stats",
        (
            "self",
            "spec_decoding_stats",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_invalid_spec_tokens",
            "request_id",
        ),
        "scheduling.scheduler counts drafts by depth",
    ),
    "allocate_slots": Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.allocate_slots",
        (
            "self",
            "request",
            "num_new_tokens",
            "num_new_computed_tokens",
            "new_computed_blocks",
            "num_lookahead_tokens",
            "num_external_computed_tokens",
            "delay_cache_blocks",
            "num_encoder_tokens",
            "full_sequence_must_fit",
            "reserved_blocks",
            "has_scheduled_reqs",
            "skip_zeroing_group_ids",
        ),
        "compat.state_blocks reserves state before each call",
    ),
    "state_blocks": Seam(
        "vllm.v1.core.single_type_kv_cache_manager",
        "MambaManager.get_num_blocks_to_allocate",
        (
            "self",
            "request_id",
            "num_tokens",
            "new_computed_blocks",
            "total_computed_tokens",
            "num_local_computed_tokens",
            "num_tokens_main_model",
            "apply_admission_cap",
            "prefill_end",
        ),
        "compat.state_blocks reads how many state slots a request needs",
    ),
    "state_blocks_allocate": Seam(
        "vllm.v1.core.single_type_kv_cache_manager",
        "MambaManager.allocate_new_blocks",
        ("self", "request_id", "num_tokens", "num_tokens_main_model"),
        "compat.state_blocks sets how many state slots it allocates",
    ),
    "propose_v1": Seam(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.propose",
        (
            "self",
            "num_speculative_tokens",
            "target_token_ids",
            "target_positions",
            "target_hidden_states",
            "next_token_ids",
            "token_indices_to_sample",
            "common_attn_metadata",
            "sampling_metadata",
            "mm_embed_inputs",
            "num_rejected_tokens_gpu",
            "slot_mappings",
        ),
        "speculation.proposer skips it at depth 0",
        worker=True,
    ),
    "first_pass_v1": Seam(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.set_inputs_first_pass",
        (
            "self",
            "target_token_ids",
            "next_token_ids",
            "target_positions",
            "target_hidden_states",
            "token_indices_to_sample",
            "cad",
            "num_rejected_tokens_gpu",
        ),
        "speculation.proposer keeps what it prepares",
        worker=True,
    ),
    "propose_v2": Seam(
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
        "TargetDependentARSpeculator.propose",
        (
            "self",
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "temperature",
            "seeds",
            "dp_sync_state",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "mm_inputs",
            "is_profile",
            "num_speculative_tokens",
        ),
        "speculation.speculator skips it at depth 0",
        worker=True,
    ),
    "prefill_inputs_v2": Seam(
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
        "prepare_prefill_inputs",
        (
            "last_token_indices",
            "current_draft_step",
            "input_buffers",
            "input_batch",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "max_num_reqs",
        ),
        "speculation.speculator keeps what it prepares",
        worker=True,
    ),
    "run_draft_v2": Seam(
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
        "TargetDependentARSpeculator._run_model",
        (
            "self",
            "num_tokens",
            "attn_metadata",
            "slot_mappings",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
            "mm_inputs",
        ),
        "speculation.speculator replays positions with it",
        worker=True,
    ),
    "input_batch_v2": Seam(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        (
            "num_reqs",
            "idx_mapping",
            "idx_mapping_np",
            "num_scheduled_tokens",
            "num_tokens",
            "query_start_loc",
            "is_prefilling_np",
            "positions",
        ),
        "speculation.speculator reads the step's rows",
        worker=True,
    ),
    "graph_manager": Seam(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager._init_candidates",
        ("self",),
        "graphs.capture_set lists more of a step's graphs",
        worker=True,
    ),
    "graph_key": Seam(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "BatchExecutionDescriptor",
        ("cg_mode", "num_tokens", "num_reqs", "uniform_token_count", "num_active_loras"),
        "graphs verifies one step for each key",
        worker=True,
    ),
    "graph_fits": Seam(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "_is_compatible",
        (
            "desc",
            "num_reqs",
            "num_tokens",
            "uniform_token_count",
            "num_active_loras",
            "max_query_len",
            "num_ubatches",
        ),
        "graphs.capture_set relies on vLLM to tell which of the listed graphs a step fits",
        worker=True,
    ),
    "graph_replay": Seam(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.run_fullgraph",
        ("self", "desc"),
        "graphs notes which of them a step ran from",
        worker=True,
    ),
    "graph_dispatch": Seam(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.dispatch",
        (
            "self",
            "num_reqs",
            "num_tokens",
            "uniform_token_count",
            "num_active_loras",
            "max_query_len",
            "num_ubatches",
        ),
        "graphs.steps asks which graph a step runs from",
        worker=True,
    ),
    "capture_model": Seam(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.capture_model",
        ("self", "profile_only"),
        "graphs.worker guards and verifies what it captures",
        worker=True,
    ),
    "execute_model": Seam(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.execute_model",
        (
            "self",
            "scheduler_output",
            "intermediate_tensors",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "is_profile",
            "context_len",
            "valid_dummy_state_slots",
            "randomize_inputs",
        ),
        "graphs.steps runs steps with it, with is_profile without graphs",
        worker=True,
    ),
    "execute_state": Seam(
        "vllm.v1.worker.gpu.model_runner",
        "ExecuteModelState",
        (
            "input_batch",
            "attn_metadata",
            "slot_mappings_by_layer",
            "hidden_states",
            "aux_hidden_states",
            "dp_sync_state",
            "finished_req_ids",
            "ec_connector_output",
            "cudagraph_stats",
            "num_spec_tokens_to_schedule",
        ),
        "graphs.steps reads what a step computed",
        worker=True,
    ),
    "drafter_graphs": Seam(
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
        "TargetDependentARSpeculator.init_cudagraph_manager",
        ("self", "cudagraph_mode"),
        "graphs.worker leaves the drafter eager",
        worker=True,
    ),
    "drafter_inputs": Seam(
        "vllm.v1.worker.gpu.spec_decode.utils",
        "get_drafter_hidden_states",
        ("model", "hidden_states"),
        "graphs.steps drafts after a step as the runner does",
        worker=True,
    ),
    "new_request": Seam(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        (
            "req_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "pooling_params",
            "block_ids",
            "num_computed_tokens",
            "lora_request",
            "prefill_token_ids",
        ),
        "graphs.steps schedules requests",
        worker=True,
    ),
    "cached_requests": Seam(
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"),
        "graphs.steps schedules requests",
        worker=True,
    ),
    "gdn_builder": Seam(
        "vllm.v1.attention.backends.gdn_attn",
        "GDNAttentionMetadataBuilder.build",
        (
            "self",
            "common_prefix_len",
            "common_attn_metadata",
            "num_accepted_tokens",
            "num_decode_draft_tokens_cpu",
            "fast_build",
        ),
        "layers.gated_delta_net builds its own metadata",
    ),
    "cpu_attention_builder": Seam(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
        "layers.cpu_attention cuts a batch into calls that depend on positions alone",
    ),
    "gpu_attention": Seam(
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionImpl.forward",
        (
            "self",
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
        ),
        "layers.attention replaces the attention kernel on a GPU",
        worker=True,
    ),
    "gpu_attention_metadata": Seam(
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
        "layers.attention builds its own metadata from the same fields",
        worker=True,
    ),
    "all_reduce": Seam(
        "vllm.distributed.device_communicators.xpu_communicator",
        "XpuCommunicator.all_reduce",
        ("self", "input_"),
        "layers.communicator adds in rank order",
        worker=True,
    ),
    "all_gather": Seam(
        "vllm.distributed.device_communicators.xpu_communicator",
        "XpuCommunicator.all_gather",
        ("self", "input_", "dim"),
        "layers.communicator adds up what it gathers",
        worker=True,
    ),
    "auto_round_scheme": Seam(
        "vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_scheme",
        "INCWna16Scheme.get_linear_method",
        ("self", "config", "layer", "prefix", "layer_config"),
        "compat.auto_round replaces the choice of a kernel",
    ),
    "gptq_config": Seam(
        "vllm.model_executor.layers.quantization.auto_gptq",
        "AutoGPTQConfig.__init__",
        (
            "self",
            "weight_bits",
            "group_size",
            "desc_act",
            "is_sym",
            "lm_head_quantized",
            "dynamic",
            "full_config",
            "modules_in_block_to_quantize",
        ),
        "compat.auto_round gives AutoRound layers the method of GPTQ layers",
    ),
    "speculative_config": Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        ("self", "target_model_config", "target_parallel_config"),
        "compat.mtp_head checks for an MTP head first",
    ),
    "attention_metadata": Seam(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        (
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "max_seq_len",
            "block_table_tensor",
            "slot_mapping",
            "causal",
            "mm_req_doc_ranges",
            "is_prefilling",
            "seq_lens_cpu_upper_bound",
        ),
        "all metadata builders read these fields",
    ),
}


#: What ``Scheduler.__init__`` must set: ours would otherwise set a flag that nobody reads.
SCHEDULER_FLAG = "self.need_mamba_block_aligned_split = "


def difference(seam: Seam) -> str | None:
    """How the installed vLLM differs from ``seam``, or None when it fits."""
    try:
        target: object = importlib.import_module(seam.module)
        for part in seam.name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        return f"it is not there ({error})"
    if dataclasses.is_dataclass(target) and isinstance(target, type):
        fields = {field.name for field in dataclasses.fields(target)}
        missing = [name for name in seam.uses if name not in fields]
        return f"it has no field {missing[0]!r}" if missing else None
    if seam.name == "Scheduler.__init__":
        source = inspect.getsource(target)  # type: ignore[arg-type]
        return None if SCHEDULER_FLAG in source else f"it does not set {SCHEDULER_FLAG.split()[0]}"
    found = tuple(inspect.signature(target).parameters)  # type: ignore[arg-type]
    return None if found == seam.uses else f"its parameters are {found}, not {seam.uses}"


def require(*names: str) -> None:
    """Raise unless the named seams of the installed vLLM look as expected.

    Raises:
        PluginError: A seam differs; the message names it and the supported vLLM versions.
    """
    from vllm_b70.compat.versions import SUPPORTED, installed_vllm
    from vllm_b70.plugin import PluginError

    for name in names:
        seam = SEAMS[name]
        found = difference(seam)
        if found is not None:
            raise PluginError(
                f"vllm_b70 cannot hook into {seam.module}.{seam.name} of vLLM "
                f"{installed_vllm()} because {found}: install vLLM "
                f"{', '.join(f'{minor}.x' for minor in SUPPORTED)}, or set VLLM_B70=0."
            )
