"""The policy for CUDA and XPU over a platform class that does nothing."""

import enum
import types

import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import CompilationConfig, CUDAGraphMode

from vllm_b70 import platform, plugin
from vllm_b70.settings import Settings


class Bare:
    """Stands where vLLM's platform class stands."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config):
        vllm_config.seen = True


class Policy(platform.GpuPolicy, Bare):
    pass


class Backend(enum.Enum):
    TRITON_ATTN = 1
    FLASH_ATTN = 2


def config(**change):
    given = {
        "compilation_config": CompilationConfig(),
        "model_config": types.SimpleNamespace(dtype=torch.float16),
        "scheduler_config": types.SimpleNamespace(max_num_batched_tokens=2048),
        "use_v2_model_runner": True,
    }
    return types.SimpleNamespace(**given | change)


def selector(**change):
    options = ("use_mla", "use_sparse", "has_sink", "use_mm_prefix", "use_non_causal")
    return types.SimpleNamespace(**dict.fromkeys(options, False) | change)


def test_what_is_set_for_a_user_who_chose_nothing():
    c = config()
    Policy.apply_config_platform_defaults(c)
    compilation = c.compilation_config
    assert c.seen and compilation.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.splitting_ops == []
    inductor = compilation.inductor_compile_config
    assert inductor["deterministic"] is True
    for name in ("split_reductions", "combo_kernels", "benchmark_combo_kernel", "benchmark_fusion"):
        assert inductor[name] is False, name
    Policy.check_device_choices(c)


def test_every_inductor_option_exists():
    """An unknown one would stop the server, a misspelt one would do nothing."""
    import torch._inductor.config as inductor

    for name in platform.INDUCTOR:
        assert hasattr(inductor, name), name


def test_the_naive_control_is_refused(monkeypatch):
    """It is built for a CPU only: a GPU would run the exact kernels under its name."""
    monkeypatch.setattr(platform, "current", lambda: Settings(linear="naive"))
    with pytest.raises(platform.PolicyError, match="VLLM_B70_LINEAR=naive"):
        Policy.check_device_choices(config())


def test_a_configuration_made_from_another_is_accepted():
    """vLLM has filled in the end of the one range by then."""
    Policy.check_device_choices(
        config(compilation_config=CompilationConfig(compile_ranges_endpoints=[2048]))
    )


def test_the_users_graph_mode_is_kept_if_it_is_exact():
    c = config(compilation_config=CompilationConfig(cudagraph_mode="NONE"))
    Policy.apply_config_platform_defaults(c)
    assert c.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    Policy.check_device_choices(c)


@pytest.mark.parametrize(
    ("graphs", "mode", "shown"),
    [
        (None, "FULL_DECODE_ONLY", "all"),
        ("all", "FULL_DECODE_ONLY", "all"),
        ("target", "FULL_DECODE_ONLY", "target"),
        ("off", "NONE", "off"),
    ],
)
def test_the_switch_of_graphs(graphs, mode, shown, monkeypatch):
    monkeypatch.setattr(platform, "current", lambda: Settings(graphs=graphs))
    c = config()
    Policy.apply_config_platform_defaults(c)
    assert c.compilation_config.cudagraph_mode.name == mode
    Policy.check_device_choices(c)
    assert {row.setting: row.value for row in Policy.device_policy(c)}["graphs"] == shown
    assert Policy.captures(c) == (mode != "NONE")


@pytest.mark.parametrize(
    ("graphs", "mode", "eager", "sentence"),
    [
        ("off", "FULL_DECODE_ONLY", False, "VLLM_B70_GRAPHS=off: cudagraph_mode FULL_DECODE_ONLY"),
        ("all", "NONE", False, "VLLM_B70_GRAPHS=all: cudagraph_mode NONE"),
        ("target", "NONE", True, "VLLM_B70_GRAPHS=target: --enforce-eager"),
    ],
)
def test_an_option_that_says_something_else_is_refused(graphs, mode, eager, sentence, monkeypatch):
    monkeypatch.setattr(platform, "current", lambda: Settings(graphs=graphs))
    model = types.SimpleNamespace(dtype=torch.float16, enforce_eager=eager)
    c = config(compilation_config=CompilationConfig(cudagraph_mode=mode), model_config=model)
    with pytest.raises(platform.PolicyError, match=sentence):
        Policy.check_device_choices(c)


def test_without_the_switch_vllms_own_options_decide():
    model = types.SimpleNamespace(dtype=torch.float16, enforce_eager=True)
    c = config(compilation_config=CompilationConfig(cudagraph_mode="NONE"), model_config=model)
    Policy.check_device_choices(c)
    rows = {row.setting: row.value for row in Policy.device_policy(c)}
    assert rows["graphs"] == "off"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_v2_model_runner": False}, "the V1 model runner"),
        ({"model_config": types.SimpleNamespace(dtype=torch.float32)}, "--dtype float32"),
        ({"compilation_config": CompilationConfig(cudagraph_mode="FULL")}, "cudagraph_mode FULL"),
        (
            {"compilation_config": CompilationConfig(cudagraph_mode="PIECEWISE")},
            "cudagraph_mode PIECEWISE",
        ),
        ({"compilation_config": CompilationConfig(splitting_ops=["a::b"])}, "splitting_ops"),
        ({"compilation_config": CompilationConfig(compile_sizes=[8])}, "compile_sizes [8]"),
        (
            {"compilation_config": CompilationConfig(pass_config={"fuse_allreduce_rms": True})},
            "pass_config.fuse_allreduce_rms",
        ),
        ({"compilation_config": CompilationConfig(mode=1)}, "mode STOCK_TORCH_COMPILE"),
        ({"compilation_config": CompilationConfig(mode=2)}, "mode DYNAMO_TRACE_ONCE"),
        (
            {"compilation_config": CompilationConfig(compile_ranges_endpoints=[32])},
            "compile_ranges_endpoints [32]",
        ),
    ],
)
def test_what_is_refused_by_name(change, sentence):
    with pytest.raises(platform.PolicyError) as refused:
        Policy.check_device_choices(config(**change))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("heads", "most"), [(32, 4096 * 64), (48, 2730 * 64)])
@pytest.mark.parametrize("sequences", [1, 64])
def test_a_budget_whose_states_do_not_fit_32_bits_is_refused(heads, most, sequences):
    """The last block's last head begins below 2**31 values, and one more block's would not."""
    text = types.SimpleNamespace(
        linear_num_value_heads=heads, linear_key_head_dim=128, linear_value_head_dim=128
    )
    model = types.SimpleNamespace(dtype=torch.float16, hf_text_config=text)

    def check(budget):
        scheduler = types.SimpleNamespace(max_num_batched_tokens=budget, max_num_seqs=sequences)
        Policy.check_device_choices(config(model_config=model, scheduler_config=scheduler))

    fits = most - 63 * sequences
    check(fits)
    with pytest.raises(platform.PolicyError, match=f"lower it to {fits} or less"):
        check(most + 64)


def speculating(schedule=None, **compilation):
    given = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": schedule}
    return config(
        compilation_config=CompilationConfig(**compilation),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=64),
        speculative_config=types.SimpleNamespace(**given),
    )


def test_a_depth_that_no_graph_serves_is_refused():
    Policy.check_device_choices(speculating(cudagraph_capture_sizes=[1, 2, 4]))
    Policy.check_device_choices(speculating(cudagraph_capture_sizes=[2], cudagraph_mode="NONE"))
    with pytest.raises(ValueError, match="3 draft tokens for 1 requests make steps of 4 rows"):
        Policy.check_device_choices(speculating(cudagraph_capture_sizes=[1, 2]))
    with pytest.raises(ValueError, match="2 draft tokens for 9 requests make steps of 27 rows"):
        Policy.check_device_choices(
            speculating([[1, 8, 3], [9, 64, 2]], cudagraph_capture_sizes=[1, 2, 4, 16])
        )


@pytest.mark.parametrize("chosen", [None, Backend.TRITON_ATTN])
def test_attention_is_ours_whatever_else_is_installed(chosen):
    name = Policy.get_attn_backend_cls(chosen, selector())
    module, _, attribute = name.rpartition(".")
    assert module == "vllm_b70.layers.attention"
    assert attribute == "RowInvariantAttentionBackend"


def test_another_attention_backend_is_refused_by_name():
    with pytest.raises(platform.PolicyError, match="--attention-backend FLASH_ATTN"):
        Policy.get_attn_backend_cls(Backend.FLASH_ATTN, selector())
    with pytest.raises(platform.PolicyError, match="use_mla"):
        Policy.get_attn_backend_cls(None, attn_selector_config=selector(use_mla=True))


def test_the_table_says_how_decodes_are_captured():
    c = config(compilation_config=CompilationConfig(cudagraph_capture_sizes=[1, 2, 320]))
    Policy.apply_config_platform_defaults(c)
    rows = {row.setting: row.value for row in Policy.device_policy(c)}
    assert rows["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert rows["capture sizes"] == "3 to 320 rows" and rows["model runner"] == "V2"


@pytest.mark.parametrize(
    ("built_for", "name"),
    [
        ("cpu", "B70CpuPlatform"),
        ("cuda", "B70CudaPlatform"),
        ("xpu", "B70XpuPlatform"),
        ("rocm", None),
    ],
)
def test_the_platform_class_follows_the_device(built_for, name, monkeypatch):
    import vllm.platforms as vllm_platforms

    resolvers = {device: lambda: None for device in ("tpu", "cuda", "rocm", "xpu", "cpu")}
    resolvers[built_for] = lambda: "some.Platform"
    monkeypatch.setattr(vllm_platforms, "builtin_platform_plugins", resolvers)
    monkeypatch.setenv("VLLM_B70", "1")
    expected = None if name is None else f"vllm_b70.platform.{name}"
    assert plugin.platform() == expected
