"""Triton kernels for CUDA and XPU, one file an op; they allocate nothing and import no vLLM."""
