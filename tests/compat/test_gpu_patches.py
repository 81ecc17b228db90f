"""The patches for a GPU fit the installed vLLM and are still needed."""

import inspect
import subprocess
import sys
import types

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")
import transformers  # noqa: F401  (before vLLM's model runner, which imports it in a circle)
import triton
import triton.language as tl

from vllm_b70.compat import fla_autotune, prompt_rows
from vllm_b70.ops import gdn_launches, launcher, tiles
from vllm_b70.plugin import PluginError

pytestmark = pytest.mark.compat

NAME = "chunk_fwd_kernel_o"
WANTED = gdn_launches.chunk(NAME, "any", 32)


def module_with(configs, arguments=("x", "H")):
    """A module with a kernel built as FLA builds its kernels."""

    def kernel(x, H, BK, BV): ...  # noqa: N803

    autotune = triton.autotune(configs=configs, key=[])
    compiled = triton.JITFunction(kernel)
    compiled.arg_names = list(arguments)
    heuristics = triton.heuristics({"IS_VARLEN": lambda args: True})
    return types.SimpleNamespace(__name__="module", **{NAME: heuristics(autotune(compiled))})


def config(stages=WANTED["num_stages"], **blocks):
    return triton.Config(blocks, num_warps=WANTED["num_warps"], num_stages=stages)


@pytest.fixture
def family(monkeypatch):
    monkeypatch.setattr(tiles, "family", lambda device: "any")


def test_a_pinned_kernel_is_launched_directly_where_that_is_known(family, monkeypatch):
    """With what Triton would bind, by position or name; a call with anything else is Triton's."""
    launched, by_triton = [], []

    class Recorder:
        def __init__(self, kernel, constants):
            self.constants = constants

        def __call__(self, grid, pointers, *scalars):
            launched.append((grid, list(pointers), list(scalars), self.constants))

    monkeypatch.setattr(launcher, "known", lambda: True)
    monkeypatch.setattr(launcher, "Launcher", Recorder)

    def kernel(x, y, scale, T, H: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               IS_VARLEN: tl.constexpr): ...  # fmt: skip  # noqa: N803

    autotune = triton.autotune(configs=[config(BK=WANTED["BK"], BV=WANTED["BV"])], key=[])
    heuristics = triton.heuristics({"IS_VARLEN": lambda args: args["y"] is not None})
    fla = types.SimpleNamespace(
        __name__="module", **{NAME: heuristics(autotune(triton.JITFunction(kernel)))}
    )
    fla_autotune.pin(fla, NAME)
    pinned = getattr(fla, NAME)
    x, y = object(), object()
    blocks = {name: WANTED[name] for name in ("BK", "BV")}
    rest = {name: WANTED[name] for name in ("num_warps", "num_stages")} | {
        "enable_fp_fusion": False
    }
    pinned[(2, 3)](x, y, 0.5, T=7, H=32)
    pinned[lambda given: (given["T"], given["BV"])](y=None, x=x, H=32, T=8, scale=0.5)
    pinned[(1,)](x, y, 0.5, T=7, H=16)
    assert launched == [
        ((2, 3), [x, y], [0.5, 7], dict(H=32, IS_VARLEN=True) | blocks | rest),
        ((8, WANTED["BV"]), [x, None], [0.5, 8], dict(H=32, IS_VARLEN=False) | blocks | rest),
        ((1,), [x, y], [0.5, 7], dict(H=16, IS_VARLEN=True) | blocks | rest),
    ]
    monkeypatch.setattr(
        type(pinned.fn.fn), "run", lambda self, *a, **k: by_triton.append(k), raising=True
    )
    pinned[(1,)](x, y, 0.5, T=7, H=32, maxnreg=64)
    pinned.run(x, y, 0.5, T=7, H=32, grid=(1,), warmup=True)
    assert len(launched) == 3 and [k.get("maxnreg") for k in by_triton] == [64, None]
    assert by_triton[1]["warmup"] and by_triton[0]["BK"] == WANTED["BK"]


def test_a_pinned_kernel_runs_one_configuration(family, monkeypatch):
    module = module_with([config(BK=32, BV=32), config(BK=WANTED["BK"], BV=WANTED["BV"])])
    fla_autotune.pin(module, NAME)
    fla_autotune.pin(module, NAME)
    launched = []
    pinned = getattr(module, NAME).fn
    monkeypatch.setattr(pinned, "fn", types.SimpleNamespace(run=lambda *a, **k: launched.append(k)))
    getattr(module, NAME)[(1,)](5, H=32)
    getattr(module, NAME)[(9,)](5, H=32)
    for seen in launched:
        assert {name: seen[name] for name in WANTED} == WANTED
        assert seen["IS_VARLEN"] and seen["enable_fp_fusion"] is False
    assert len(launched) == 2


@pytest.mark.parametrize("change", [{"BK": 16}, {"stages": 1}, {"more": 1}])
def test_a_configuration_that_vllm_no_longer_has_is_refused(family, change):
    module = module_with([config(**{"BK": WANTED["BK"], "BV": WANTED["BV"]} | change)])
    fla_autotune.pin(module, NAME)
    with pytest.raises(PluginError, match="not a configuration of this vLLM"):
        getattr(module, NAME)[(1,)](5, H=32)


@pytest.mark.parametrize("kernel", [None, print])
def test_what_is_not_an_autotuner_is_refused(kernel):
    with pytest.raises(PluginError, match="cannot pin module.chunk_fwd_kernel_o"):
        fla_autotune.pin(types.SimpleNamespace(__name__="module", **{NAME: kernel}), NAME)


def test_without_a_number_of_heads_it_is_refused():
    with pytest.raises(PluginError, match="an argument H"):
        fla_autotune.pin(module_with([config(BK=64, BV=64)], ("x",)), NAME)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLA_TRIL_PRECISION", "tf32"),
        ("FLA_USE_FAST_OPS", "1"),
        ("FLA_USE_TMA", "1"),
        ("TRITON_F32_DEFAULT", "ieee"),
    ],
)
def test_other_arithmetic_is_refused(monkeypatch, name, value):
    monkeypatch.setattr(gdn_launches, "chunk_kernels", list)
    for other, wanted in fla_autotune.ARITHMETIC.items():
        monkeypatch.setenv(other, wanted)
    fla_autotune.apply()
    monkeypatch.setenv(name, value)
    with pytest.raises(PluginError, match=f"cannot serve with {name}={value}"):
        fla_autotune.apply()


#: vLLM's CPU build makes its kernels plain functions; here they are what a GPU build has.
CHECK = """
import transformers, triton, triton.language as tl
import vllm.triton_utils as u
u.triton, u.tl, u.tldevice, u.HAS_TRITON = triton, tl, None, True
import importlib, json, sys
from vllm_b70.compat import fla_autotune
from vllm_b70.ops import gdn_launches, launcher, tiles
fla_autotune.apply()
for name in gdn_launches.chunk_kernels():
    module = importlib.import_module(f"{fla_autotune.PACKAGE}.{fla_autotune.MODULES[name]}")
    pinned = getattr(module, name).fn
    for kind in ("any", "xpu"):
        tiles.family = lambda device: kind
        assert pinned._choose(32) and pinned._choose(48), name
    assert len(pinned.autotuner.configs) > 1, name
from vllm.third_party.flash_linear_attention.ops import chunk
import inspect
source = inspect.getsource(chunk.chunk_gated_delta_rule_fwd)
calls = ["chunk_local_cumsum", "chunk_scaled_dot_kkt_fwd", "solve_tril", "recompute_w_u_fwd",
         "chunk_gated_delta_rule_fwd_h", "chunk_fwd_o"]
found = [line for line in source.split("\\n") if "= " in line and line.strip().endswith("(")]
from pathlib import Path
files = [path.read_text() for path in Path(chunk.__file__).parent.glob("*.py")]
for name in fla_autotune.ARITHMETIC:
    assert name.startswith("TRITON") or any(f'"{name}"' in text for text in files), name
print(len(found), all(f"{call}(" in source for call in calls))
"""


def test_every_chunked_kernel_is_pinned_and_the_patch_is_still_needed():
    """If this fails because a kernel has one configuration, remove it from fla_autotune."""
    run = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["6", "True"], "the chunked route has other kernels than ours"


def batch(scheduled, computed, prefill, prompt, drafts=()):
    """What vLLM's runner makes of requests; computed, prefill and prompt lengths in order."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    ids = [f"r{i}" for i in range(len(scheduled))]
    runner = types.SimpleNamespace(
        req_states=types.SimpleNamespace(
            req_id_to_index={name: i for i, name in enumerate(ids)},
            prefill_len=types.SimpleNamespace(np=np.array(prefill, np.int32)),
            prompt_len=types.SimpleNamespace(np=np.array(prompt, np.int32)),
            num_computed_prefill_tokens=np.array(computed, np.int32),
        ),
        decode_query_len=4, use_pp=False, adaptive_verification=None, pcp_manager=None,
    )  # fmt: skip
    output = types.SimpleNamespace(
        num_scheduled_tokens=dict(zip(ids, scheduled, strict=True)),
        total_num_scheduled_tokens=sum(scheduled),
        scheduled_spec_decode_tokens={ids[i]: [0, 0, 0] for i in drafts},
    )
    return GPUModelRunner.gather_batch_req_state(runner, output, False)


def in_prompt(state):
    """As MambaHybridModelState.prepare_attn tells it, by request."""
    flags = state.is_prefilling_np
    if state.prefill_runs_as_decode_np is not None:
        flags = flags & ~state.prefill_runs_as_decode_np
    return dict(zip(state.req_ids, flags.tolist(), strict=True))


#: A decode with drafts, a prompt chunk of one token, replayed output of 1 and of 9 tokens, a
#: prompt's beginning.
CASE = ([4, 1, 1, 9, 1], [70, 64, 70, 65, 0], [64, 65, 71, 80, 1], [64, 65, 64, 64, 1], (0,))
RIGHT = {"r0": False, "r1": True, "r2": False, "r3": False, "r4": True}


def test_the_patch_of_the_runner_is_still_needed():
    """If this fails, vLLM tells prompt rows by position: remove compat/prompt_rows.py."""
    state, _ = batch(*CASE)
    assert in_prompt(state) != RIGHT


def test_the_patched_runner_tells_prompt_rows_by_position(monkeypatch):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    monkeypatch.setattr(
        GPUModelRunner, "gather_batch_req_state", GPUModelRunner.gather_batch_req_state
    )
    monkeypatch.setattr(prompt_rows, "_applied", False)
    prompt_rows.apply()
    prompt_rows.apply()
    state, uniform = batch(*CASE)
    assert in_prompt(state) == RIGHT and not state.decode_graph_eligible and uniform is None
    # A prompt's last token alone has the shape of a decode, and must not run from its graph.
    state, uniform = batch([1, 1], [64, 80], [65, 80], [65, 80])
    assert in_prompt(state) == {"r0": True, "r1": False} and uniform is None
    state, uniform = batch([4, 4], [70, 80], [64, 64], [64, 64], (0, 1))
    assert uniform == 4 and state.decode_graph_eligible


def test_the_hybrid_state_reads_what_the_patch_sets():
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    source = inspect.getsource(MambaHybridModelState.prepare_attn)
    assert "is_prefilling_np & ~input_batch.prefill_runs_as_decode_np" in source
