"""A direct launch is Triton's own, in which kernel it launches and with what; no device is needed.

The compiler is real and compiles for sm_90. In place of the driver stands one that writes launches
down, and that gives every compiled kernel a handle of its own.
"""

import importlib
import itertools
import os
import types

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.knobs import runtime  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from vllm_b70.ops import launcher, tiles  # noqa: E402
from vllm_b70.ops.launcher import Launcher  # noqa: E402

if "nvidia" not in triton.backends.backends:
    pytest.skip("this Triton does not compile for CUDA", allow_module_level=True)


@triton.jit(do_not_specialize=["free"])
def adds(x, y, out, size, free, much, COUNT: tl.constexpr, TWICE: tl.constexpr):
    at = tl.arange(0, COUNT)
    value = tl.load(x + at, at < size) + free + much
    if y is not None:
        value += tl.load(y + at, at < size)
    tl.store(out + at * size, value * (2 if TWICE else 1))


@triton.jit
def copies(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + at, x.load([0, 0]))


@triton.jit
def disordered(x, COUNT: tl.constexpr, size):
    tl.store(x + tl.arange(0, COUNT), size)


class Driver:
    """What Triton asks of a driver, without a device. ``scratch``: bytes a kernel wants."""

    device, stream, scratch = 0, 77, 0

    def __init__(self):
        self.launches, handles, outer = [], itertools.count(1000), self

        class Run:
            launch_cooperative_grid, launch_pdl = False, True

            def __init__(self, source, metadata):
                self.global_scratch_size, self.profile_scratch_size = outer.scratch, 0

            def __call__(self, x, y, z, stream, function, metadata, shown, enter, leave, *rest):
                if getattr(enter, "calls", None):
                    enter(shown)
                # As CUDA's launcher of a version in launcher.TRITON passes it on.
                scratch = "scratch" if self.global_scratch_size else None
                self.launch(
                    x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl,
                    scratch, None, metadata, shown, enter, leave, *rest,
                )  # fmt: skip

            def launch(self, *given):
                outer.launches.append(given)

        class Utils:
            get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})
            load_binary = staticmethod(lambda *a: (object(), next(handles), 0, 0, 1024))
            unload_module = staticmethod(lambda module: None)

        self.launcher_cls, self.utils = Run, Utils

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return self.stream

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def fake(monkeypatch):
    made = Driver()
    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(launcher, "known", lambda: True)
    for kernel in (adds, copies):
        monkeypatch.setattr(
            kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder)
        )
    return made


def seen(launch):
    """A launch without those who watch it, and tensors as their addresses."""
    launch = launch[:10] + launch[13:]
    return [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in launch]


def memory(dtype, elements_off=0):
    return torch.zeros(64, dtype=dtype)[elements_off:]


CONSTANTS = dict(COUNT=16, TWICE=True, num_warps=1, enable_fp_fusion=False)
X = memory(torch.bfloat16)
#: Pointers and scalars; neighbours differ in one thing that Triton specialises on, or in nothing.
VARIANTS = {
    "plain": ((X, X, X), (5, 5, 0.5)),
    "x off 16 bytes": ((memory(torch.bfloat16, 1), X, X), (5, 5, 0.5)),
    "out off 16 bytes": ((X, X, memory(torch.bfloat16, 1)), (5, 5, 0.5)),
    "x fp16": ((memory(torch.float16), X, X), (5, 5, 0.5)),
    "y fp32": ((X, memory(torch.float32), X), (5, 5, 0.5)),
    "no y": ((X, None, X), (5, 5, 0.5)),
    "size 1": ((X, X, X), (1, 5, 0.5)),
    "size true": ((X, X, X), (True, 5, 0.5)),
    "size 16": ((X, X, X), (16, 5, 0.5)),
    "size 0": ((X, X, X), (0, 5, 0.5)),
    "size wide": ((X, X, X), (2**31 + 1, 5, 0.5)),
    "size wide, a multiple of 16": ((X, X, X), (2**31, 5, 0.5)),
    "free 1": ((X, X, X), (5, 1, 0.5)),
    "free wide": ((X, X, X), (5, 2**31, 0.5)),
    "free least": ((X, X, X), (5, -(2**31), 0.5)),
    "free wide below": ((X, X, X), (5, -(2**31) - 1, 0.5)),
    "free float": ((X, X, X), (5, 5.0, 0.5)),
    "much 1.0": ((X, X, X), (5, 5, 1.0)),
    "much 1": ((X, X, X), (5, 5, 1)),
}  # fmt: skip


@pytest.mark.parametrize("scratch", [0, 64])
def test_each_call_launches_what_triton_would(fake, scratch):
    """In any order, and from the second launch on without Triton's own."""
    fake.scratch = scratch
    ours, kernels = Launcher(adds, CONSTANTS), {}
    for name, (pointers, scalars) in VARIANTS.items():
        adds[(2, 3)](*pointers, *scalars, **CONSTANTS)
        kernels[name] = fake.launches[-1][4]
    assert len(set(kernels.values())) > 12, "the variants are to differ"
    for _ in range(2):
        for name, (pointers, scalars) in VARIANTS.items():
            fake.launches.clear()
            adds[(2, 3)](*pointers, *scalars, **CONSTANTS)
            ours((2, 3), pointers, *scalars)
            theirs, own = map(seen, fake.launches)
            assert own == theirs and list(map(type, own)) == list(map(type, theirs)), name
            assert own[4] == kernels[name], name
    adds.run, calls = (lambda **_: None), len(fake.launches)
    try:
        for pointers, scalars in VARIANTS.values():
            ours((2, 3), pointers, *scalars)
    finally:
        del adds.run
    assert len(fake.launches) - calls == len(VARIANTS)


def test_it_follows_the_current_device_and_stream(fake):
    ours = Launcher(adds, CONSTANTS)
    found = []
    for fake.device, fake.stream in ((0, 7), (0, 8), (1, 9), (1, 9), (0, 7)):
        ours((1,), (X, X, X), 5, 5, 0.5)
        found.append(fake.launches[-1][3:5])
    (_, first), (_, same), (_, second), (_, again), (_, back) = found
    assert [stream for stream, _ in found] == [7, 8, 9, 9, 7]
    assert first == same == back != second == again


def test_whoever_watches_sees_every_launch(fake):
    ours, shown = Launcher(adds, CONSTANTS), []
    call = ((1,), (X, X, X), 5, 5, 0.5)
    ours(*call)

    def watch(*given, **more):
        shown.append(given)

    for add, remove in (
        (runtime.launch_enter_hook.add, runtime.launch_enter_hook.remove),
        (adds.add_pre_run_hook, adds.pre_run_hooks.remove),
    ):
        add(watch)
        try:
            ours(*call)
            ours(*call)
        finally:
            remove(watch)
    assert len(shown) == 4
    ours(*call)
    assert len(shown) == 4 and len(fake.launches) == 6


def test_a_descriptor_is_made_anew_of_each_tensor(fake):
    matrices = [torch.zeros(rows, 64, dtype=torch.float16) for rows in (32, 40)]
    ours = Launcher(
        copies, dict(ROWS=16, COLUMNS=64), {0: (TensorDescriptor.from_tensor, [16, 64])}
    )
    for x in matrices:
        ours((1,), (x, X))
        described = fake.launches[-1][13]
        assert described == TensorDescriptor.from_tensor(x, [16, 64]) and described.base is x
    assert len({launch[4] for launch in fake.launches}) == 1
    for _ in range(2):
        with pytest.raises(AssertionError, match="16-byte aligned"):
            ours((1,), (matrices[0].view(-1)[1:65].view(1, 64), X))
    x = matrices[0].bfloat16()
    for _ in range(2):
        ours((1,), (x, X))
    assert fake.launches[-1][4] == fake.launches[-2][4] != fake.launches[0][4]


def test_it_remembers_no_more_than_it_may(fake, monkeypatch):
    monkeypatch.setattr(launcher, "MOST", 3)
    ours = Launcher(adds, CONSTANTS)
    for size in range(20):
        ours((1,), (X, X, X), size, 5, 0.5)
        assert len(ours._compiled) <= 3
    assert len(fake.launches) == 20


def test_constants_come_last(fake):
    with pytest.raises(ValueError, match="disordered does not end in the constants"):
        Launcher(disordered, dict(COUNT=16))
    with pytest.raises(ValueError, match="adds does not end in the constants"):
        Launcher(adds, dict(COUNT=16))


def test_elsewhere_triton_launches(monkeypatch):
    """Where nothing is known of the device, or the kernel is not a compiled one."""

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **constants: calls.append((grid, given, constants))

    calls = []
    for known in (True, False):
        monkeypatch.setattr(launcher, "known", lambda known=known: known)
        Launcher(Kernel(), dict(A=1, num_warps=4))((3,), (X, None), 5)
    assert calls == [((3,), (X, None, 5), dict(A=1, num_warps=4))] * 2


@pytest.fixture
def ops(fake, monkeypatch):
    """Modules of ``vllm_b70.ops`` that launch, with nothing left in a cache of what they made."""
    names = ("attention", "gemm", "hopper", "int4_argmax", "int4_gemm", "norm", "prompt_inputs",
             "recurrent_steps", "state_columns")  # fmt: skip
    modules = {name: importlib.import_module(f"vllm_b70.ops.{name}") for name in names}
    caches = [value for m in modules.values() for value in vars(m).values()
              if hasattr(value, "cache_clear") and value.__module__ == m.__name__]  # fmt: skip
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(tiles, "family", lambda device: "cuda-sm90")
    monkeypatch.setattr(modules["hopper"], "compiles", lambda: True)
    yield types.SimpleNamespace(**modules)
    for cache in caches:
        cache.cache_clear()


def test_every_op_launches_what_triton_would(ops, fake, monkeypatch):
    """Each launch is made thrice: by Triton, then directly for the first and for a further time."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    launched, direct = {}, Launcher.__call__

    def thrice(self, grid, pointers, *scalars):
        fake.launches.clear()
        self._launch(grid, pointers, scalars)
        direct(self, grid, pointers, *scalars)
        with monkeypatch.context() as patch:
            patch.setattr(type(self.kernel), "run", None)  # Triton's own would fail
            direct(self, grid, pointers, *scalars)
        by_triton, first, further = map(seen, fake.launches)
        assert by_triton == first == further, self.kernel
        module = self.kernel.__module__.rpartition(".")[2]
        launched[f"{module}.{self.kernel.__name__}"] = True

    monkeypatch.setattr(Launcher, "__call__", thrice)
    bf16, int32, tile = torch.bfloat16, torch.int32, tiles.Tile

    def zeros(*shape, dtype=bf16):
        return torch.zeros(shape, dtype=dtype)

    x, weight = zeros(40, 3, 128), zeros(128)
    ops.norm.add_rms_norm(x, x, weight, 1e-6, 1.0)
    ops.norm.gated_rms_norm_gpu(x[:, :2], x[:, :2], weight, 1e-6, False)

    x, weight, done, bias = zeros(40, 256), zeros(300, 256), zeros(1000, dtype=int32), zeros(300)
    for shape in (
        tile("split", 64, 16, 4, 3, 64),
        tile("walk", 64, 32, 4, 3, 64, tensor=True),
        tile("wide", 128, 32, 8, 3, 64, tensor=True, persistent=True),
    ):
        ops.gemm.launch(x, weight, bias, done, zeros(40, 300), 2, shape)
    best = zeros(150, dtype=torch.float32), zeros(150, dtype=torch.int64)
    ops.gemm.launch_argmax(x, weight, None, *best, 1, tile("walk", 64, 16, 4, 3, 64))

    x, words, scale = zeros(150, 512), zeros(4, 320, 16, dtype=int32), zeros(4, 320)
    packed = ops.int4_argmax.Int4Words(words, scale, None, 512, 300, 128)
    for left in (False, True):
        shape = tile("walk", 64, 16, 4, 3, left=left)
        ops.int4_argmax.launch(x, packed, *best, 2, shape, True)
    for shape in (
        tile("split", 64, 16, 4, 3),
        tile("walk", 64, 32, 4, 3),
        *(tile("hopper", 128, 64, 4, 1, cut=cut) for cut in ("", "tiles", "parts")),
    ):
        ops.int4_gemm.launch(
            x, words, scale, None, None, done, zeros(150, 300), 128, 1, shape, True
        )

    q, (k, v) = zeros(9, 6, 128), zeros(20, 16, 2, 256).split(128, -1)
    starts, lengths = torch.tensor([0, 1, 2, 9], dtype=int32), torch.ones(3, dtype=int32)
    ops.attention.launch(
        q, k, v, zeros(9, 6, 128), zeros(3, 8, dtype=int32), starts, lengths, 0.1, 7, 100,
        ops.attention.plan(128, 21), limit=4,
    )  # fmt: skip

    rows, heads, channels = 70, 4, (2 * 2 + 4) * 128
    inputs = (
        zeros(rows, channels), zeros(rows, heads), zeros(rows, heads), zeros(channels, 4),
        zeros(heads), zeros(heads), zeros(8, 6, channels),
        zeros(8, heads, 128, 128, dtype=torch.float32),
    )  # fmt: skip
    one = torch.zeros(1, dtype=int32)
    sequences = ops.prompt_inputs.PromptSequences(
        one, torch.tensor([0, rows], dtype=int32), one.long(), one, zeros(2, 2, dtype=int32)
    )
    ops.prompt_inputs.prompt_inputs(*inputs, sequences, rows, 2)
    table, read = zeros(2, 4, dtype=int32), zeros(2, dtype=int32)
    ops.recurrent_steps.recurrent_steps(
        *inputs, zeros(3, dtype=int32), read, table, zeros(rows, heads, 128), 2
    )
    record = ops.state_columns.StateRecord(8, torch.device("cpu"))
    ops.state_columns.place_states(
        record, zeros(3, dtype=int32), read, table, None, zeros(3, dtype=int32), read,
        table.clone(),
    )  # fmt: skip
    assert set(launched) == {
        "norm.rms_norm", "linear.split", "linear.walk", "linear_wide.walk", "linear.argmax",
        "linear.best_of", "int4_draft.prepare", "int4_draft.argmax", "int4_draft.best_of",
        "int4_linear.argmax", "int4_linear.split", "int4_linear.walk",
        "int4_linear_hopper.walk", "attention.split", "attention.merge", "attention.walk",
        "causal_conv1d.prompts", "causal_conv1d.steps", "gated_delta_rule.advance",
        "state_columns.place",
    }  # fmt: skip
