"""Programmatic dependent launch: a kernel starts while the one before it still runs.

A kernel launched so must ``wait`` before it touches what a step computes; before that it may
``fetch`` weights, which no kernel of a step writes (the Hopper kernel loads its first ones). It
lets the next kernel start after its ``wait``, so that whoever has waited sees what all kernels
before it wrote. Triton has it for CUDA only; elsewhere kernels are compiled without it (their
constant PDL is false).
"""

import triton
import triton.language as tl

_cuda = getattr(tl.extra, "cuda", None)

if hasattr(_cuda, "gdc_wait"):
    wait, let_next_start = _cuda.gdc_wait, _cuda.gdc_launch_dependents

    @triton.jit
    def fetch(at):
        """Bring the cache lines at these addresses into the L2, through which every write goes: so
        what is read there later is not stale."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

else:

    @triton.jit
    def wait():
        """Wait for the kernel before this one and for what it wrote."""

    @triton.jit
    def let_next_start():
        """Allow the next kernel to start."""

    @triton.jit
    def fetch(at):
        """Bring cache lines into the L2."""
