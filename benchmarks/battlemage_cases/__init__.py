"""What ``benchmarks/battlemage.py`` compiles: a file for each file of ``vllm_b70/kernels``."""
