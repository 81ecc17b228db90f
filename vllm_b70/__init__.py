"""vllm_b70: a vLLM plugin that gives a request the same tokens whoever else is on the server.

Importing this package imports nothing else; vLLM reaches it through the two entry points in
``vllm_b70.plugin``.
"""
