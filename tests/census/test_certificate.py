"""The certificate: its key, what a damaged file does, and strict, warn and off."""

import json
import logging
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("vllm")
from vllm_b70.census import census, certificate
from vllm_b70.census.certificate import Certificate, load, make_key, path_of, save
from vllm_b70.census.verdict import Verdict

CPU = torch.device("cpu")
GOOD = Verdict("linear", "8x8 bfloat16", True, "", "1-32", 90, 0.5)
BAD = Verdict("int4_linear", "16x8 group 8 bfloat16", False, "5-8 rows", "1-32", 90, 0.5)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    # vLLM's logger keeps its records to itself.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return tmp_path


def key(shapes=(GOOD,), **limits):
    return make_key(CPU, list(shapes), {"drafts": 3} | limits)


def test_what_is_kept_is_what_is_loaded(root):
    kept = Certificate(key(), (GOOD,), 1.5)
    path = save(kept)
    assert path == path_of(key()) and root in path.parents
    assert load(key()) == (kept, "")
    assert not list(path.parent.glob("*.tmp")), "nothing half written stays"
    found = json.loads(path.read_text())
    assert found["ops"][0]["op"] == "linear" and found["device"]["name"]
    for name in ("torch", "vllm", "numba"):
        assert found["versions"][name], name


def test_nothing_is_loaded_of_a_failed_census():
    save(Certificate(key(), (GOOD, BAD), 1.5))
    assert load(key()) == (None, "")


def changes(monkeypatch):
    yield "another shape", key([GOOD, BAD])
    yield "other limits", key(drafts=4)
    for variable in (
        "TRITON_INTERPRET", "OMP_SCHEDULE", "VLLM_CPU_OMP_THREADS_BIND", "MKL_CBWR",
        "VLLM_B70_LINEAR", "FLA_TRIL_PRECISION", "VLLM_KV_CACHE_LAYOUT",
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(variable, "x")
            yield variable, key()
    for name, value in (
        ("_versions", lambda: {"torch": "0"}),
        ("_device", lambda device: {"name": "another"}),
        ("sources", lambda: "edited"),
        ("FORMAT", 0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(certificate, name, value)
            yield name, key()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 97)
        yield "threads", key()


def test_all_that_can_change_a_census_is_in_its_key(monkeypatch):
    paths = {name: path_of(changed) for name, changed in changes(monkeypatch)}
    assert len({path_of(key()), *paths.values()}) == 1 + len(paths)
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_B70_STEP_TRACE", "/tmp/else")
        patch.setenv("VLLM_PORT", "1234")
        assert path_of(key()) == path_of(key()), "where a server writes or listens is not"


def test_sources_follow_kernels_and_tables(monkeypatch, tmp_path):
    before = certificate.sources()
    package = tmp_path / "package"
    (package / "kernels").mkdir(parents=True)
    digests = {before}
    monkeypatch.setattr(certificate.resources, "files", lambda name: package)
    for file in ("kernels/a.py", "kernels/tiles.json", "readme.md"):
        (package / file).write_text("1")
        digests.add(certificate.sources())
    (package / "kernels/tiles.json").write_text("2")
    digests.add(certificate.sources())
    assert len(digests) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("bfloat16", "float16"),
        lambda text: text.replace('"exact": true', '"exact": false'),
        lambda text: "\x00" * 100,
    ],
)
def test_a_damaged_file_is_said_to_be(damage):
    path = save(Certificate(key(), (GOOD,), 1.5))
    path.write_text(damage(path.read_text()))
    found, wrong = load(key())
    assert found is None and wrong
    save(Certificate(key(), (GOOD,), 1.5))
    assert load(key())[0] is not None, "and the next one is kept in its place"


class Counted:
    """A probe that says how often it was asked."""

    op, shape, asked, least_memory = "linear", "8x8", 0, 0

    def judge(self):
        self.asked += 1
        return GOOD


@pytest.fixture
def taken(monkeypatch):
    probe = Counted()
    monkeypatch.setattr(census, "find", lambda *_: [probe])
    monkeypatch.setattr(census, "limits", lambda config: {})
    monkeypatch.setattr(census, "set_current_vllm_config", lambda config: nullcontext())
    return probe


def test_a_second_start_asks_nothing(taken, caplog):
    caplog.set_level(logging.INFO, logger="vllm.vllm_b70")
    census.take([], None, CPU)
    assert taken.asked == 1 and "1 of 1 ops and shapes exact" in caplog.text
    caplog.clear()
    census.take([], None, CPU)
    assert taken.asked == 1 and "certified before" in caplog.text
    census.take([], None, CPU, anew=True)
    assert taken.asked == 2


def test_a_damaged_certificate_runs_it_again_and_says_so(taken, caplog):
    census.take([], None, CPU)
    found = list(certificate.path_of({}).parent.glob("*.json"))
    assert len(found) == 1
    found[0].write_text("{")
    census.take([], None, CPU)
    assert taken.asked == 2 and "damaged" in caplog.text


def test_a_cache_that_cannot_be_written_stops_nothing(taken, caplog, root):
    (root / "vllm_b70").write_text("a file where the folder should be")
    assert census.take([], None, CPU).failures == []
    assert "cannot be kept" in caplog.text


def test_an_op_that_raises_is_a_failure_that_says_what_it_raised(monkeypatch, root):
    class Broken:
        op, shape, device, least_memory = "norm", "8", CPU, 0

        def judge(self):
            raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(census, "find", lambda *_: [Broken()])
    monkeypatch.setattr(census, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(census, "limits", lambda config: {})
    (failure,) = census.take([], None, CPU).failures
    assert "RuntimeError: out of memory" in failure.differs


def test_strict_stops_with_one_sentence_and_warn_says_the_same(caplog):
    found = Certificate(key(), (GOOD, BAD), 1.5)
    with pytest.raises(census.CensusError) as error:
        census.enforce(found, "strict")
    sentence = str(error.value)
    for part in ("int4_linear", "16x8 group 8", "5-8 rows", "VLLM_B70_CENSUS=warn"):
        assert part in sentence
    assert "\n" not in sentence and "linear 8x8" not in sentence
    census.enforce(found, "warn")
    assert "NOT exact" in caplog.text and "5-8 rows" in caplog.text
    census.enforce(Certificate(key(), (GOOD,), 1.5), "strict")


@pytest.mark.parametrize(("mode", "asked"), [("strict", 1), ("warn", 1), ("off", 0)])
def test_the_worker_asks_once_its_weights_are_loaded(mode, asked, monkeypatch):
    from vllm.platforms import current_platform

    from vllm_b70.census import worker
    from vllm_b70.settings import Settings

    events = []

    class Stock:
        device, vllm_config = CPU, None

        def load_model(self, **kwargs):
            events.append("loaded")

        def get_model(self):
            return "model"

    class Worker(worker.CensusMixin, Stock):
        pass

    def take(models, config, device, anew):
        assert models == ["model"]
        events.append("asked")
        return Certificate(key(), (BAD,), 1.0)

    monkeypatch.setattr(census, "take", take)
    monkeypatch.setattr(worker, "current", lambda: Settings(census=mode))
    monkeypatch.setattr(
        type(current_platform),
        "update_block_size_for_backend",
        staticmethod(lambda config: events.append("block size")),
    )
    if mode == "strict":
        with pytest.raises(census.CensusError):
            Worker().load_model(load_dummy_weights=False)
    else:
        Worker().load_model(load_dummy_weights=False)
    assert events == ["loaded"] + ["block size", "asked"] * asked
