"""Errors raised by the checkpoint tools."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be used, or cannot be written.

    The message is one sentence that says what is wrong, why it matters and what to do.
    """
