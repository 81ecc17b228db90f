"""Captured graphs of decode steps: which there are, and that each gives the bits of an eager step.

vLLM captures; ``worker`` puts around it what is here. A server without graphs imports none of this.
"""
