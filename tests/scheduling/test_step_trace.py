"""The step trace is what the harness reads."""

import json
from collections import Counter

from vllm_b70.scheduling.step_trace import Step, StepTrace


def test_lines(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = StepTrace(path)
    trace.write(Step(requests=3, prompt_tokens=64, widths=Counter({4: 1, 1: 1}), cuts=1))
    trace.write(Step(requests=1, widths=Counter({1: 1}), preempted=2))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "step": 0,
        "requests": 3,
        "prompt_tokens": 64,
        "widths": {"1": 1, "4": 1},
        "preempted": 0,
        "cuts": 1,
    }
    assert second["step"] == 1 and second["preempted"] == 2


def test_the_harness_reads_what_the_scheduler_writes(tmp_path):
    from vllm_b70.harness.steps import read_trace

    path = tmp_path / "trace.jsonl"
    trace = StepTrace(path)
    for width in (1, 4, 4, 2):
        trace.write(Step(requests=2, widths=Counter({width: 2})))
    steps = read_trace(path)
    assert steps.requests == Counter({2: 4})
    assert steps.widths == Counter({4: 4, 1: 2, 2: 2})
    assert steps.width_changes == 2
