"""The warm-up makes every launch that a server may make, and only a GPU's worker warms up."""

import contextlib
import json
import logging
import types
from importlib import resources

import pytest
import torch

pytest.importorskip("vllm")
from vllm_b70.census import census, path, warm_up, worker
from vllm_b70.census.rows import RowProbe
from vllm_b70.census.steps import PROMPTS, StepProbe
from vllm_b70.ops import attention, gemm, hopper, int4_gemm, norm, split, tiles
from vllm_b70.settings import Settings

CPU = torch.device("cpu")
TABLES = ("int4_linear", "linear", "int4_argmax")


def plans():
    """Every plan of every table: (op, family, columns, depth)."""
    for op in TABLES:
        text = resources.files("vllm_b70.ops").joinpath(f"{op}.tiles.json").read_text()
        for family, shapes in json.loads(text).items():
            for shape in shapes:
                columns, depth = (4096, 4096) if shape == "default" else map(int, shape.split("x"))
                yield op, family, columns, depth


def launched(rows, op, plan, columns, depth):
    """What an INT4 or a 16-bit linear launches: all that its kernels are compiled for."""
    tile = plan.tile(rows)
    if tile.kernel == "split" and not split.fits(plan.parts, rows, columns):
        tile = tiles.replace(tile, kernel="walk")
    if tile.kernel != "hopper":
        return tile
    count = -(-rows // tile.bm) * -(-columns // hopper.BN)
    return tile, hopper.share(tile.cut, count, depth // 128, plan.parts, 132, tile.bm).cut


@pytest.mark.parametrize("most", [1, 20, 320, 2048, 8192])
def test_every_launch_of_every_table_in_the_served_range(most):
    for op, family, columns, depth in plans():
        plan = tiles.plan(op, family, columns, depth, depth // 128)
        # The argmax of drafts is launched without its table.
        chosen = path.launches_of(most, None if op == "int4_argmax" else plan)
        assert chosen[0] == 1 and chosen[-1] == most
        args = op, plan, columns, depth
        # Every row count up to 512, then one in each tile of rows.
        served = [*range(1, min(most, 512) + 1), *range(512, most + 1, 64), most]
        wanted = {launched(rows, *args) for rows in served}
        missing = wanted - {launched(rows, *args) for rows in chosen}
        assert not missing, (op, family, columns, depth)


@pytest.mark.parametrize(
    ("heads", "columns"), [(1, 4096), (1, 5120), (32, 128), (48, 128), (6, 256)]
)
@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_every_launch_of_a_norm(heads, columns, device):
    size = 1 << (columns - 1).bit_length()

    def of(tokens):
        rows = tokens * heads
        return norm.choose(rows, size, device), rows * size < norm.MANY

    assert {of(n) for n in range(1, 8193)} == {of(n) for n in path.launches_of(8192)}


@pytest.mark.parametrize("most", [1, 2, 16, 17, 64, 300])
def test_every_number_of_sequences_that_has_a_kernel(most):
    chosen = attention.sequence_counts(most)
    assert chosen[0] == 1 and chosen[-1] == most
    assert {attention._padded(n) for n in chosen} == {
        attention._padded(n) for n in range(1, most + 1)
    }
    # 17 decodes and 128 of them share a kernel, not the width of the merge.
    assert most < 128 or {2, 16, 17, 128} <= set(chosen)


def test_the_workspace_of_attention_begins_on_16_bytes(monkeypatch):
    """Else split and merge are compiled once more, for whoever comes at such a number of rows."""
    from vllm_b70.kernels import attention as kernels

    capacities = []

    class Kernel:
        def __getitem__(self, grid):
            def launch(*arguments, **constants):
                capacities.extend(
                    t.storage_offset() for t in arguments if isinstance(t, torch.Tensor)
                )

            return launch

    monkeypatch.setattr(kernels, "split", Kernel())
    monkeypatch.setattr(kernels, "merge", Kernel())
    q = torch.zeros(3, 3, 64, dtype=torch.bfloat16)
    k = torch.zeros(4, 16, 3, 64, dtype=torch.bfloat16)
    integers = dict(dtype=torch.int32)
    for tokens, workspace in ((1, 2**20), (3, 2**20), (3, 1001)):
        attention.launch(
            q[:tokens], k, k, q[:tokens].clone(), torch.zeros(tokens, 4, **integers),
            torch.arange(tokens + 1, **integers), torch.ones(tokens, **integers), 1.0, 1, 16,
            attention.plan(64, 1), workspace=workspace,
        )  # fmt: skip
    assert capacities and all(4 * offset % 16 == 0 for offset in capacities)


def row_probe(called, **change):
    def inputs(count, seed):
        return (torch.zeros(count, 1),)

    def run(x):
        called.append(len(x))
        return (x,)

    given = dict(memory=2**29, launches=(1, 16, 17, 64)) | change
    return RowProbe("linear", "8x8", 64, 1, 1024, CPU, inputs, run, (), **given)


def test_rows_are_those_of_the_launches_that_fit():
    called = []
    assert warm_up.launch_rows(row_probe(called)) == 4
    assert called == [1, 16, 17, 64]
    called.clear()
    warm_up.launch_rows(row_probe(called, memory=20 * 1024))
    assert called == [1, 16, 17, 20]


def step_probe(steps, requests=64, depth=3):
    class Session:
        def step(self, pieces, padding):
            assert all(piece.slot < min(2, requests) for piece in pieces)
            steps.append((pieces, padding))

    @contextlib.contextmanager
    def session(requests, streams):
        yield Session()

    def inputs(count, seed):
        return (torch.zeros(count, 4),)

    return StepProbe("attention", "s", CPU, inputs, session, requests, depth)


@pytest.mark.parametrize(("requests", "depth"), [(300, 3), (64, 0), (1, 16), (2, 3)])
def test_steps_of_each_kind_among_each_number_of_sequences(requests, depth):
    steps = []
    made = warm_up.launch_steps(step_probe(steps, requests, depth), requests)
    assert made == len(steps)
    kinds = set()
    for pieces, padding in steps:
        total = len(pieces) + padding
        for piece in pieces:
            inside = piece.first < piece.prompt
            kinds.add(("prompt" if inside else "step", len(pieces) > 1, total, piece.tokens))
    for total in attention.sequence_counts(requests):
        for width in {1, depth + 1}:
            assert ("step", False, total, width) in kinds
        if total > 1:
            assert ("prompt", True, total, PROMPTS[-1]) in kinds
    assert ("prompt", False, 1, PROMPTS[0]) in kinds and ("prompt", False, 1, PROMPTS[-1]) in kinds


@pytest.fixture
def device(monkeypatch):
    """A GPU that does nothing."""
    monkeypatch.setattr(warm_up, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(warm_up.memory, "of_device", lambda device: 2**20)
    monkeypatch.setattr(warm_up.memory, "release", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return torch.device("cuda")


CONFIG = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(max_num_seqs=8))


def test_target_and_draft_are_warmed_up_in_one_line(device, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="vllm.vllm_b70")
    called, drafted, steps = [], [], []
    target = [row_probe(called), path.Unknown("Odd", "x", device), step_probe(steps)]
    other = row_probe(drafted)
    other = RowProbe(**{**vars(other), "op": "draft_tokens"})
    monkeypatch.setattr(warm_up, "find", lambda models, *_: target)
    monkeypatch.setattr(warm_up, "find_of_draft", lambda model, *_: [row_probe(called), other])
    warm_up.warm_up("target", "draft", CONFIG, device)
    assert called == drafted == [1, 16, 17, 64] and steps
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith(f"vllm_b70: warm-up: {8 + len(steps)} launches of 3 ops and shapes, ")


def test_what_cannot_be_launched_is_said_and_stops_nothing(device, monkeypatch, caplog):
    def broken(x):
        raise RuntimeError("out of\nmemory")

    called = []
    first = RowProbe(**{**vars(row_probe([])), "run": broken})
    large = RowProbe(**{**vars(row_probe([])), "op": "lm_head", "width": 2**20})
    monkeypatch.setattr(warm_up, "find", lambda *_: [first, large, row_probe(called)])
    warm_up.warm_up("target", None, CONFIG, device)
    assert called
    assert "linear 8x8 is not warmed up" in caplog.text and "out of memory" in caplog.text
    assert "lm_head 8x8 is not warmed up" in caplog.text and "too little memory" in caplog.text


@pytest.mark.parametrize("mode", ["strict", "off"])
@pytest.mark.parametrize(("kind", "warm"), [("cuda", True), ("xpu", True), ("cpu", False)])
def test_a_gpus_worker_warms_up_whatever_the_census(kind, warm, mode, monkeypatch):
    events = []

    class Stock:
        device, vllm_config = torch.device(kind), None
        model_runner = types.SimpleNamespace(speculator=types.SimpleNamespace(model="draft"))

        def load_model(self, **kwargs):
            events.append("loaded")

        def get_model(self):
            return "target"

        def _settle_block_size(self):
            events.append("block size")

    Worker = type(
        "Worker", (worker.CensusMixin, Stock), {"_settle_block_size": Stock._settle_block_size}
    )
    monkeypatch.setattr(worker, "current", lambda: Settings(census=mode))
    monkeypatch.setattr(census, "certify", lambda ask, mode: events.append("asked"))
    monkeypatch.setattr(warm_up, "warm_up", lambda *models: events.append(models[:2]))
    Worker().load_model()
    expected = ["loaded"] + ["asked"] * (mode != "off")
    assert events == expected + ["block size", ("target", "draft")] * warm


@pytest.mark.parametrize(
    ("warms", "mode", "given", "chosen"),
    [
        (True, "off", "Gpu", "CensusGpuWorker"),
        (False, "off", "Cpu", "CPUWorker"),
        (False, "strict", "Cpu", "CensusCpuWorker"),
        (True, "off", "its own", "its own"),
    ],
)
def test_which_worker_serves(warms, mode, given, chosen, monkeypatch, caplog):
    from vllm_b70 import platform, workers

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(platform, "current", lambda: Settings(census=mode))
    parallel = types.SimpleNamespace(worker_cls=workers.STOCK.get(given, given))
    config = types.SimpleNamespace(parallel_config=parallel, speculative_config=None)
    platform._choose_worker(config, warms, graphs=False)
    assert parallel.worker_cls.rpartition(".")[2] == chosen
    assert ("its own does not warm up" in caplog.text) == (given == "its own")


def test_the_finder_takes_the_rows_from_the_tables(monkeypatch):
    """An INT4 layer on a Hopper: its own table's tiles, and not those of the 16-bit linears."""
    monkeypatch.setattr(tiles, "family", lambda device: "cuda-sm90")
    finder = object.__new__(path._Finder)
    finder.device, finder.dtype, finder.tokens = CPU, torch.bfloat16, 8192
    finder.special, finder.memory = (), 2**29
    layer = types.SimpleNamespace(
        input_size=4096, output_size=24576, quant_method=None, b70_scale=torch.zeros(32, 24576)
    )
    probe = finder.linear(layer)
    plan = tiles.plan(int4_gemm.OP, "cuda-sm90", 24576, 4096, 32)
    assert probe.op == "int4_linear" and set(plan.row_counts(8192)) <= set(probe.launches)
    del layer.b70_scale
    plan = gemm.plan(CPU, 24576, 4096)
    probe = finder.linear(layer)
    assert probe.op == "linear" and set(plan.row_counts(8192)) <= set(probe.launches)
