"""Checkpoints: INT4 packing, tiny random Qwen3.5 models, checks on what is about to be loaded."""
