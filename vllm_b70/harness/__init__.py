"""The harness: proves on a running server that a request's tokens do not depend on its company.

It speaks HTTP to any OpenAI-style vLLM server and imports neither vLLM nor torch, so the same code
judges this plugin, a stock server and a server on another machine.

========== ========================================================================================
prompts    seeded prompts of raw token ids
client     one request to ``/v1/completions``; fails when token ids are missing
oracle     the reference answers: every prompt alone, saved with a hash of the prompts
load       the same prompts, many at a time
compare    sequences that differ, where they differ first, and the hash of all tokens
steps      how many requests and which widths really shared an engine step
metrics    draft acceptance from the server's Prometheus counters
server     starts and stops a real ``vllm serve``
results    the results file and the final table
identity   runs the levels against an oracle on one server
quickstart the matrix of servers that makes up the proof
cli        the ``quickstart`` and ``verify`` commands
========== ========================================================================================
"""
