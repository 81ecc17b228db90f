"""Faults for a runner's captured graphs, on any device; used by tests/xpu and tests/gpu."""

from contextlib import contextmanager

import torch

#: What each fault must be found as, at the least: the part whose results it changes.
SEEN_IN = {
    "ulp": "target's hidden states",
    "draft": "drafter's drafts",
    "state slots": "target's recurrent state",
    "slots to continue from": "target's hidden states",
    "slot mapping": "target's KV cache",
}


@contextmanager
def replaced(owner, name, value):
    """An attribute with another value meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def after_replay(graphs, requests, width, fault):
    """The graph for so many requests does something else besides."""
    key = next(k for k in graphs if (k.num_reqs, k.uniform_token_count) == (requests, width))
    replay = graphs[key].replay

    def replay_and_more():
        replay()
        fault()

    with replaced(graphs[key], "replay", replay_and_more):
        yield


@contextmanager
def each_time(owner, name, method):
    """A buffer that a method replaces at every call, where it ought to fill it."""
    # All of them live on: a graph on a device reads what it was captured with.
    original, buffers = getattr(owner, method), [getattr(owner, name)]

    def replacing(*args, **kwargs):
        buffers.append(buffers[-1].clone())
        setattr(owner, name, buffers[-1])
        return original(*args, **kwargs)

    with replaced(owner, method, replacing):
        try:
            yield
        finally:
            setattr(owner, name, buffers[0])


def plants(runner, requests, width):
    """Faults by name, each with what puts it in and out; all are in the graphs of one size."""
    manager, drafter, tables = runner.cudagraph_manager, runner.speculator, runner.block_tables
    decode = drafter.decode_cudagraph_manager
    builder = next(
        group.get_metadata_builder()
        for groups in runner.attn_groups
        for group in groups
        if hasattr(group.get_metadata_builder(), "record_states")
    )

    def one_ulp():
        manager.hidden_states.view(torch.int16)[1, 7] += 1

    def another_draft():
        drafter.draft_tokens[0, 1] += 1

    return {
        "ulp": lambda: after_replay(manager.graphs, requests, width, one_ulp),
        "draft": lambda: after_replay(decode.graphs, requests, 1, another_draft),
        "state slots": lambda: each_time(builder, "_table", "build"),
        "slots to continue from": lambda: each_time(builder, "_read", "build"),
        "slot mapping": lambda: each_time(tables, "slot_mappings", "compute_slot_mappings"),
    }
