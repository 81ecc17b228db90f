"""What the census may take of a small card, and what it says where that is not enough."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm_b70.census import census, memory, path
from vllm_b70.census.rows import ALWAYS, RowProbe, judge_rows
from vllm_b70.census.steps import PROMPTS, TAIL

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.parametrize(
    ("free", "allowed"),
    [(0, 0), (7, 0), (8, 1), (100 * MIB, 8 * MIB), (12 * 2**30, memory.MOST), (2**40, memory.MOST)],
)
def test_the_budget_is_a_power_of_two_of_what_is_free(free, allowed):
    assert memory.budget(free) == allowed
    assert memory.HELD * allowed <= free


def test_the_device_is_asked_after_torch_gave_back_what_it_kept(monkeypatch):
    events = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: events.append("released"))

    def info(device):
        events.append("asked")
        return 100 * MIB, 32 * 2**30

    monkeypatch.setattr(torch.accelerator, "get_memory_info", info)
    assert memory.of_device(torch.device("cuda")) == 8 * MIB
    assert events == ["released", "asked"]
    assert memory.of_device(CPU) == memory.MOST


def probe(memory, width=1024, rows=8192):
    largest = []

    def inputs(count, seed):
        largest.append(count * width)
        return (torch.zeros(count, 1),)

    made = RowProbe(
        "op", "s", rows, 1, width, CPU, inputs, lambda x: (x,), memory=memory
    )  # fmt: skip
    return made, largest


@pytest.mark.parametrize("allowed", [32 * 1024, 2**20])
def test_no_call_is_larger_than_the_budget(allowed):
    made, largest = probe(allowed)
    assert judge_rows(made).exact
    assert allowed / 2 < max(largest) <= allowed
    assert made.least_memory == ALWAYS * 1024 <= allowed


def steps(memory, requests=64):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=requests),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
        model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=4096),
    )
    layer = SimpleNamespace(
        get_kv_cache_spec=lambda config: SimpleNamespace(page_size_bytes=MIB, block_size=16)
    )

    class Kind:
        @staticmethod
        def units_of(spec, tokens):
            assert tokens == max(PROMPTS) + TAIL
            return 4

    finder = path._Finder(config, torch.device("cuda"), memory)
    return finder.steps("op", "s", None, Kind, layer, "layer")


@pytest.mark.parametrize(
    ("allowed", "requests", "served"), [(2**29, 64, 64), (2**24, 16, 64), (2**19, 2, 64), (1, 1, 1)]
)
def test_a_cache_is_for_as_many_requests_as_fit(allowed, requests, served):
    made = steps(allowed, served)
    assert made.requests == requests
    assert made.least_memory == min(2, served) * MIB


def test_what_does_not_fit_at_all_is_one_sentence(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    small, _ = probe(1024)
    large = replace(small, op="lm_head", shape="248320x4096", width=4 * 248320)
    monkeypatch.setattr(census, "find", lambda *_: [small, large])
    monkeypatch.setattr(census, "limits", lambda config: {})
    monkeypatch.setattr(census, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(memory, "of_device", lambda device: 8 * MIB)

    def ask():
        return census.take([], None, CPU)

    with pytest.raises(census.CensusError) as error:
        census.certify(ask, "strict")
    sentence = str(error.value)
    for part in ("129 MiB of cpu", "lm_head 248320x4096", "64 to 128 MiB", "VLLM_B70_CENSUS=off"):
        assert part in sentence
    assert "\n" not in sentence
    census.certify(ask, "warn")
    assert "NOT certified" in caplog.text and "lm_head" in caplog.text
