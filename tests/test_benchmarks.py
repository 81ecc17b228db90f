"""What the benchmarks do with their figures, without a GPU to make them."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import depth_gpu, exact_gpu, gemm_command, profile_steps, timing
from vllm_b70.ops import tiles
from vllm_b70.ops.tiles import Tile

SLOW, FAST = Tile("walk", 64, 64, 4, 3), Tile("split", 64, 16, 4, 3)


def test_the_partition_with_the_least_times_is_chosen_and_decodes_count_three_times():
    best = {
        1: {16: (10.0, SLOW), 64: (10.0, SLOW)},
        2: {16: (9.0, FAST), 64: (13.0, SLOW)},  # 0.9 thrice against 1.3 once
        4: {16: (1.0, FAST)},  # not timed everywhere
    }
    found = gemm_command.entry(best, [16, 64])
    assert found["parts"] == 2
    assert [(t["rows"], t["kernel"]) for t in found["tiles"]] == [(16, "split"), (64, "walk")]
    assert gemm_command.entry({4: best[4]}, [16, 64]) is None
    # What comes out is what the tables are read from.
    assert tiles._plan(found["parts"], found["tiles"]).tile(17) == SLOW


def test_kept_commands_hold_no_paths(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/x.py", "tune", "--out", "/somewhere/a.json"])
    assert timing.head()["command"] == "python benchmarks/x.py tune --out a.json"


@pytest.mark.parametrize(
    ("asked", "shapes"),
    [([], [(1, 2)]), (["--shapes", "all"], [(1, 2), (3, 4)]), (["--shapes", "5x6"], [(5, 6)])],
)
def test_what_is_asked_for_is_done_and_written(asked, shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "family", lambda device: "some-family")
    calls = []

    def tune(shapes, until):
        calls.append(shapes)
        return {"1x2": {}}

    def compare(shapes, dtypes, until, save):
        calls.append((shapes, dtypes))
        save([{"ratio": 1.0}])

    for command in ("tune", "compare"):
        out = tmp_path / f"{command}.json"
        arguments = gemm_command.parser("").parse_args(
            [command, "--out", str(out), "--dtypes", "float16", *asked]
        )
        gemm_command.run(arguments, "linear", [(1, 2)], [(3, 4)], tune, compare)
    assert calls == [shapes, (shapes, [torch.float16])]
    assert json.loads((tmp_path / "tune.json").read_text()) == {"some-family": {"1x2": {}}}
    assert json.loads((tmp_path / "compare.json").read_text())["rows"] == [{"ratio": 1.0}]


def test_schedules_are_held_against_the_best_fixed_depth(tmp_path, capsys):
    def level(users, speed, step, accepted=()):
        names = ("users", "tokens_per_s", "step_ms", "acceptance")
        return dict(zip(names, (users, speed, step, list(accepted)), strict=True))

    cells = {
        "d0": (0, None, [level(1, 100, 10), level(64, 4000, 16)]),
        "d1": (1, None, [level(1, 150, 12, [0.8]), level(64, 3000, 30, [0.8])]),
        "s": (1, [[1, 8, 1], [9, 64, 0]], [level(1, 148, 12, [0.8]), level(64, 3900, 16.2)]),
    }
    folder = tmp_path / "cells"
    folder.mkdir()
    for name, (depth, schedule, levels) in cells.items():
        cell = {"depth": depth, "schedule": schedule, "levels": levels, "device": "x"}
        (folder / f"{name}.json").write_text(json.dumps(cell | {"versions": {}, "command": name}))
    assert depth_gpu.DepthModel(depth_gpu.static(folder)).schedule(2)[0][2] == 1
    arguments = type("A", (), {"cells": folder, "out": tmp_path / "out.json"})
    depth_gpu.collect(arguments)
    alone, crowd = json.loads(arguments.out.read_text())["rows"]
    assert (alone["best_depth"], alone["within_2_percent"]) == (1, True)
    assert "step_against_none" not in alone, "it drafts"
    assert (crowd["best_depth"], crowd["within_2_percent"]) == (0, False)
    assert alone["against_same_depth"] == pytest.approx(148 / 150)
    assert crowd["within_1_5_percent"] and crowd["step_against_none"] == pytest.approx(1.0125)


@pytest.mark.parametrize(("route", "again"), [("exact", 0), ("exact", 1), ("stock", 1)])
def test_a_route_of_ours_that_answers_anew_otherwise_is_an_error(route, again, tmp_path):
    level = {"users": 1, "answers": [[[1, 2], [-0.5, -0.25]]], "tokens_per_s": 1.0}
    cell = {"model": "m", "dtype": "bfloat16", "route": route, "depth": 0, "graphs": "on"}
    cell |= {"replica": 0, "prompts": [1, 1, 2], "prompt_tokens_per_s": 1.0, "device": "x"}
    cell |= {"versions": {}, "command": "c"}
    cell["levels"] = [level | {"acceptance": None, "differ_again": again}]
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "d0.json").write_text(json.dumps(cell))
    arguments = type("A", (), {"cells": tmp_path / "cells", "out": tmp_path / "out.json"})
    if again and route != "stock":
        with pytest.raises(SystemExit, match="1 cells of ours differ when asked again"):
            exact_gpu.collect(arguments)
    else:
        exact_gpu.collect(arguments)
    assert json.loads(arguments.out.read_text())["rows"][0]["differ_again"] == again


@pytest.mark.parametrize("round_", [0, 1])
def test_engines_answer_in_rounds(round_, tmp_path, capsys):
    """In a later round the first one waits for the last one of the round before."""
    for name in ("ready-1", "ready-2", "done-1-0", "done-2-0", "done-1-1")[: 3 + 2 * round_]:
        (tmp_path / name).touch()
    exact_gpu.wait_for_turn(tmp_path, "2/2", 0.2, round_)
    assert "DISTURBED" not in capsys.readouterr().out
    (tmp_path / "done-2-0").unlink(missing_ok=True)
    exact_gpu.wait_for_turn(tmp_path, "1/2", 0.2, 1)
    assert "['done-2']" in capsys.readouterr().out


def test_acceptance_is_that_of_what_ran_in_between():
    nothing, none = {"drafts": [], "accepted": []}, {"drafts": [10], "accepted": [8, 5]}
    after = {"drafts": [30], "accepted": [24, 11]}
    assert depth_gpu.acceptance(nothing, nothing) == []
    assert depth_gpu.acceptance(none, after) == [0.8, 0.3]
    assert depth_gpu.acceptance(after, after) == []


class Engine:
    """Each user gets as many tokens a step as it is told; all finish at ``max_tokens``."""

    def __init__(self, *paces):
        self.paces, self.running = list(paces), {}

    def add_request(self, name, prompt, params):
        self.running[name] = [self.paces[len(self.running)], 0, params.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        outputs = []
        for name, one in list(self.running.items()):
            one[1] = min(one[1] + one[0], one[2])
            done = one[1] == one[2]
            made = types.SimpleNamespace(token_ids=[0] * one[1])
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[made], finished=done))
            if done:
                del self.running[name]
        return outputs


def test_steps_are_counted_while_all_users_decode():
    pytest.importorskip("vllm")
    steps = depth_gpu.decode(Engine(1, 4), 2, 64)
    # From the step after the slower one has 9 tokens to the one before the other has all 64.
    assert [made for _, made in steps] == [5] * 6
    speed, step = depth_gpu.steady(Engine(1, 4), 2, 64)
    assert speed > 0 and step > 0


def test_users_who_never_decode_together_are_warmed_up_with_and_not_measured():
    """Drafts that are accepted end a short answer before another has begun."""
    pytest.importorskip("vllm")
    assert depth_gpu.decode(Engine(1, 4), 2, 24) == []
    with pytest.raises(SystemExit, match="2 users never decode together"):
        depth_gpu.steady(Engine(1, 4), 2, 24)


def test_a_checkpoint_whose_heads_agree_takes_the_place_of_its_copy(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    (tmp_path / "model").mkdir()
    names = ("model.a.down_proj.weight", "model.a.up_proj.weight", "mtp.fc.weight")
    weights = {name: torch.ones(4, 8) for name in names}
    files.save_file(weights, tmp_path / "model" / "model.safetensors")
    arguments = types.SimpleNamespace(source=tmp_path / "model", target=tmp_path / "b", noise=0.0)
    depth_gpu.agree(arguments)
    assert [path.name for path in arguments.target.iterdir()] == ["model.safetensors"]
    found = files.load_file(arguments.target / "model.safetensors")
    assert not found[names[0]].any() and found[names[1]].all()
    assert torch.equal(found[names[2]], torch.cat([torch.eye(4), torch.zeros(4, 4)], 1))
    assert torch.equal(files.load_file(arguments.source / "model.safetensors")[names[0]],
                       torch.ones(4, 8))  # fmt: skip


@pytest.mark.parametrize("own", [1, 2])
def test_a_turn_comes_when_all_are_ready_and_those_before_are_done(own, tmp_path, capsys):
    exact_gpu.wait_for_turn(tmp_path, f"{own}/2", 0.2)
    assert "DISTURBED" in capsys.readouterr().out and (tmp_path / f"ready-{own}").exists()
    # What scripts/gpu_matrix.sh does for a cell that ended, whatever came of it.
    for name in ("ready", "done"):
        (tmp_path / f"{name}-{3 - own}").touch()
    exact_gpu.wait_for_turn(tmp_path, f"{own}/2", 0.2)
    assert capsys.readouterr().out == ""


def test_what_runs_is_given_up_by_vllms_own_ids():
    """Its ids are not those that were asked with; by those nothing would be found."""
    states, gone = {"0-0-8f3a": None, "0-1-17bc": None}, []

    class Stub:
        output_processor = types.SimpleNamespace(request_states=states)

        def abort_request(self, ids, internal=False):
            gone.extend((one, internal) for one in ids)
            for one in ids:
                del states[one]

        def has_unfinished_requests(self):
            return bool(states)

    engine = object.__new__(profile_steps.Engine)
    engine.engine = Stub()
    engine.drain()
    assert gone == [("0-0-8f3a", True), ("0-1-17bc", True)]
