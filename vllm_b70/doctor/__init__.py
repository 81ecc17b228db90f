"""What a machine, its software and its settings mean for the exact route: ``vllm-b70 doctor``.

One module a group of checks, each a generator of findings; ``report`` puts them together. A check
never raises for what it finds, and says so when it cannot look. Nothing is imported before it runs.
"""
