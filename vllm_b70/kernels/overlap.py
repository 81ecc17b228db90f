"""Programmatic dependent launch: a kernel starts while the one before it still runs.

A kernel launched so must ``wait`` before it touches memory. Triton has it for CUDA only; elsewhere
the kernels are compiled without it (their constant PDL is false).
"""

import triton
import triton.language as tl

_cuda = getattr(tl.extra, "cuda", None)

if hasattr(_cuda, "gdc_wait"):
    wait, let_next_start = _cuda.gdc_wait, _cuda.gdc_launch_dependents
else:

    @triton.jit
    def wait():
        """Wait for the kernel before this one and for what it wrote."""

    @triton.jit
    def let_next_start():
        """Allow the next kernel to start."""
