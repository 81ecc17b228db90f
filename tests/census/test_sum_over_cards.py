"""The probe of the sum over cards, asked in processes of their own over gloo, one a card."""

import types
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as multiprocessing

pytest.importorskip("vllm")

COLUMNS, TOKENS = 64, 96


def probe_of(finder_class):
    finder = object.__new__(finder_class)
    finder.dtype, finder.device = torch.bfloat16, torch.device("cpu")
    finder.tokens, finder.special, finder.memory = TOKENS, (), 2**29
    return finder.sum_over_cards(COLUMNS, 3)


def short_of_memory(probe, rank):
    """The probe where rank 1 has no room for its largest call."""

    def inputs(count, seed):
        if rank == 1 and count > TOKENS // 2:
            raise torch.OutOfMemoryError("no room")
        return probe.inputs(count, seed)

    return replace(probe, inputs=inputs)


def worker(rank, world, port, folder):
    import torch.distributed as dist

    from vllm_b70.census import census, path, ranks
    from vllm_b70.layers.communicator import RankOrderXpuCommunicator

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    communicator = RankOrderXpuCommunicator(
        cpu_group=dist.group.WORLD, device=torch.device("cpu"), device_group=dist.group.WORLD
    )

    def by_size(x):
        """As oneCCL does: small messages are added in another way, here with a rounding a rank."""
        if len(x) not in range(5, 9):
            return communicator.all_reduce(x)
        first, *others = communicator.all_gather(x[None], dim=0)
        for other in others:
            first = first + other
        return first

    path.get_tensor_model_parallel_rank = lambda: rank
    verdicts = []
    for reduce in (communicator.all_reduce, by_size):
        path.tensor_model_parallel_all_reduce = reduce
        verdicts.append(probe_of(path._Finder).judge().as_dict())
    group = types.SimpleNamespace(world_size=world, cpu_group=dist.group.WORLD)
    ranks.parallel_state = types.SimpleNamespace(
        model_parallel_is_initialized=lambda: True, get_tp_group=lambda: group
    )
    verdicts.append(census._judge(short_of_memory(probe_of(path._Finder), rank)).as_dict())
    torch.save((verdicts, ranks.least(7 + rank), ranks.least(7 - rank)), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_the_sum_passes_and_one_whose_order_follows_the_size_does_not(tmp_path, free_port):
    """Three ranks: with two, the order of an addition cannot show."""
    multiprocessing.spawn(worker, (3, free_port, str(tmp_path)), nprocs=3)
    for rank in range(3):
        (ours, by_size, unasked), first, last = torch.load(tmp_path / str(rank))
        assert ours["exact"] and ours["op"] == "all_reduce" and ours["calls"] > 100
        assert ours["shape"] == f"{COLUMNS} of 3 cards bfloat16"
        assert not by_size["exact"] and by_size["differs"].startswith("5-8 rows")
        assert (first, last) == (7, 5)
        # Nobody waits for the rank that cannot ask, and all say whose it was.
        assert not unasked["exact"] and unasked["calls"] == 0
        assert unasked["differs"] == "nothing: it raised OutOfMemoryError: no room on rank 1"


@pytest.mark.parametrize(
    ("cards", "reduced", "probes"), [(2, True, 2), (1, True, 1), (2, False, 1)]
)
def test_it_is_on_the_path_behind_each_row_parallel_linear(cards, reduced, probes, monkeypatch):
    from vllm.model_executor.layers.linear import RowParallelLinear

    from vllm_b70.census import path

    module = object.__new__(RowParallelLinear)
    torch.nn.Module.__init__(module)
    module.reduce_results, module.tp_size, module.output_size = reduced, cards, COLUMNS
    finder = object.__new__(path._Finder)
    monkeypatch.setattr(finder, "linear", lambda layer: "linear", raising=False)
    monkeypatch.setattr(finder, "sum_over_cards", lambda *sizes: sizes, raising=False)
    assert list(finder.of("o_proj", module)) == ["linear", (COLUMNS, cards)][:probes]


def test_a_rank_that_fails_while_the_others_ask_ends():
    """It would go on to another collective call than the one that they wait in."""
    from vllm_b70.census import census, path

    def fail(x):
        raise RuntimeError("a card is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path, "get_tensor_model_parallel_rank", lambda: 0)
        probe = replace(probe_of(path._Finder), run=fail)
    with pytest.raises(RuntimeError, match="other ranks wait for this one .*a card is gone"):
        census._judge(probe)


def test_ranks_of_which_one_has_no_certificate_ask_together(monkeypatch, tmp_path):
    """A sum over cards would wait forever for a rank that does not ask."""
    from contextlib import nullcontext

    from vllm_b70.census import census
    from vllm_b70.census.verdict import Verdict

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    asked = []

    class Probe:
        op, shape, least_memory = "all_reduce", "8", 0

        def judge(self):
            asked.append(self)
            return Verdict("all_reduce", "8", True, "", "1", 1, 0.0)

    monkeypatch.setattr(census, "find", lambda *_: [Probe()])
    monkeypatch.setattr(census, "limits", lambda config: {})
    monkeypatch.setattr(census, "set_current_vllm_config", lambda config: nullcontext())
    for others_have_one, calls in ((1, 1), (1, 1), (0, 2)):
        monkeypatch.setattr(census, "least", lambda mine, theirs=others_have_one: min(mine, theirs))
        census.take([], None, torch.device("cpu"))
        assert len(asked) == calls
