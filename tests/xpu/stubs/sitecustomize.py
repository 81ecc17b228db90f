"""Python runs this at the start of every process of the stub tests: a machine with two B70s.

Only what vLLM and the plugin ask of a device before a kernel runs, and the names that vLLM imports
of ``vllm_xpu_kernels``. ``machine`` makes it another one.
"""

import os
import sys
import types

import torch
import triton.backends

if os.environ.get("XPU_STUB_SOURCES"):
    from vllm_b70.compat import versions

    versions.SUPPORTED = (*versions.SUPPORTED, versions.installed_vllm().rpartition(".")[0])

GIB = 2**30
PROPERTIES = {
    "name": "Intel(R) Arc(TM) Pro B70 Graphics",
    "driver_version": "1.6.0",
    "total_memory": 32 * GIB,
    "max_compute_units": 256,
    "gpu_subslice_count": 32,
    "sub_group_sizes": [16, 32],
    "has_bfloat16_conversions": True,
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_2d_block_io": True,
}
xpu = torch.xpu
Graph = getattr(xpu, "XPUGraph", object)
# vLLM takes Triton for usable where exactly one of its drivers has a device.
driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
intel = types.SimpleNamespace(driver=driver, compiler=None)
compiler = types.ModuleType("triton.backends.intel.compiler")
triton.backends.backends.clear()
sys.modules["triton.backends.intel"] = types.ModuleType("triton.backends.intel")


def machine(cards=2, xccl=True, graphs=True, drivers=("intel",), fusion=True, **properties):
    """Become a machine with so many cards, drivers of Triton, and other properties of a card."""
    properties = PROPERTIES | properties
    total = properties["total_memory"]
    xpu.is_available = lambda: cards > 0
    xpu.device_count = lambda: cards
    xpu.current_device = lambda: 0
    xpu.get_device_name = lambda device=None: properties["name"]
    xpu.get_device_properties = lambda device=None: types.SimpleNamespace(**properties)
    xpu.mem_get_info = lambda device=None: (total - GIB, total)
    torch.distributed.is_xccl_available = lambda: xccl
    vars(xpu).pop("XPUGraph", None)
    if graphs:
        xpu.XPUGraph = Graph
    triton.backends.backends.clear()
    triton.backends.backends.update(dict.fromkeys(drivers, intel))
    options = {"grf_mode": ("128", "256", "auto", "default")}
    compiler.XPUOptions = types.SimpleNamespace(
        **options, **({"enable_fp_fusion": True} if fusion else {})
    )
    sys.modules.pop(compiler.__name__, None)
    if "intel" in drivers:
        sys.modules[compiler.__name__] = compiler


def never(*args, **kwargs):
    raise AssertionError("the exact route calls nothing of vllm_xpu_kernels here")


def int4_gemm_w4a16(x, weight, bias, scale, zeros, group, order):
    return int4_gemm(x, weight, bias, scale, zeros, group, order)


machine()
#: What Intel's INT4 kernel does; tests of the native route put theirs here.
int4_gemm = never
if os.environ.get("XPU_STUB_INT4_GEMM", "1") == "1":
    xpu_ops = torch.library.Library("_xpu_C", "FRAGMENT")
    xpu_ops.define(
        "int4_gemm_w4a16(Tensor x, Tensor weight, Tensor? bias, Tensor scale, Tensor zeros, "
        "int group, Tensor? order) -> Tensor"
    )
    xpu_ops.impl("int4_gemm_w4a16", int4_gemm_w4a16, "CPU")
cache_ops = torch.library.Library("_C_cache_ops", "FRAGMENT")
cache_ops.define("getMemoryInfo(int device) -> (int, int)")
for name, content in {
    "": (),
    "._C": (),
    "._moe_C": (),
    "._xpu_C": (),
    ".flash_attn_interface": ("flash_attn_varlen_func",),
    ".fused_moe_interface": ("XpuFusedMoe",),
    ".rotary": ("apply_rotary_emb",),
}.items():
    module = types.ModuleType("vllm_xpu_kernels" + name)
    vars(module).update(dict.fromkeys(content, never))
    sys.modules[module.__name__] = module
