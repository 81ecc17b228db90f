"""Kernels run in Triton's interpreter here: scripts/test.sh sets TRITON_INTERPRET=1."""

import os

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    # Tensors are small here, and pytest-xdist's processes would wait for one another's threads.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Every kernel test runs so."""
    patch_once(monkeypatch)
    order_dots(monkeypatch)


def patch_once(monkeypatch):
    """The interpreter prepares Triton's language anew for every function that a kernel calls, a
    third of the time of these tests; once a launch is enough."""
    import triton.language as tl
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang
    call = interpreter.GridExecutor.__call__
    prepared = set()

    def once(function):
        modules = {id(v) for v in function.__globals__.values() if v is tl or v is tl.core}
        if modules <= prepared:
            return interpreter._LangPatchScope()
        prepared.update(modules)
        return prepare(function)

    def launch(self, *arguments, **options):
        prepared.clear()
        return call(self, *arguments, **options)

    monkeypatch.setattr(interpreter, "_patch_lang", once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)


def order_dots(monkeypatch):
    """Replace three things of the interpreter: a dot by BLAS, which is not invariant to the row
    count, and a conversion to bfloat16 that cuts off instead of rounding, neither of which a GPU
    does; and numpy's exp2, which may differ from torch's, by one that rounds correctly."""
    import triton.language as tl
    from triton.runtime import interpreter

    handle = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    convert = builder.create_fp_trunc

    def widen(tensor):
        if tensor.dtype.scalar == tl.bfloat16:
            return (tensor.data.astype(np.uint32) << 16).view(np.float32)
        return tensor.data.astype(np.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right, total = widen(a), widen(b), d.data.astype(np.float32)
        for k in range(left.shape[1]):
            total = total + left[:, k, None] * right[None, k, :]
        return handle(total, d.dtype.scalar)

    def create_fp_trunc(self, source, kind):
        if kind.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
            return convert(self, source, kind)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = np.isnan(source.data)
        return handle(np.where(nan, 0x7FC0, rounded).astype(np.uint16), kind.scalar)

    def create_exp2(self, source):
        exact = np.exp2(source.data.astype(np.float64)).astype(np.float32)
        return handle(exact, source.dtype.scalar)

    monkeypatch.setattr(builder, "create_exp2", create_exp2)
    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "create_fp_trunc", create_fp_trunc)
