"""Routes of linears: settled alike for a shape, kept once for all starts, refused where need be."""

import errno
import json
import logging
import os
import re
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
from vllm_b70.census import certificate, linears, settled
from vllm_b70.census.rows import RowProbe
from vllm_b70.layers import native
from vllm_b70.layers.linear import RowInvariantEmbeddingMethod, RowInvariantLinearMethod
from vllm_b70.ops import native as ops
from vllm_b70.ops import row_classes
from vllm_b70.plugin import PluginError
from vllm_b70.settings import Settings


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    # vLLM's logger keeps its records to itself.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    # Certifying is row_classes' own test; here a few counts do.
    monkeypatch.setattr(row_classes, "ALWAYS", 2)
    monkeypatch.setattr(linears, "WORK", {"cpu": 2**31})
    monkeypatch.setattr(linears, "MOST", 64)
    monkeypatch.setattr(linears, "MOST_HEAD", 16)
    native.take_waiting()
    return tmp_path


@pytest.fixture
def mode(monkeypatch):
    def choose(linear):
        for module in (native, linears, settled):
            monkeypatch.setattr(module, "current", lambda: Settings(linear=linear))

    choose("native")
    return choose


def config(**change):
    given = {
        "scheduler_config": types.SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        "speculative_config": types.SimpleNamespace(num_speculative_tokens=3),
        "parallel_config": types.SimpleNamespace(rank=0, tensor_parallel_size=1),
        "additional_config": {},
    }
    return types.SimpleNamespace(**given | change)


def layer(columns=96, depth=64, prefix="model.layers.0.mlp.down_proj"):
    made = torch.nn.Module()
    made.prefix = prefix
    made.weight = torch.nn.Parameter(torch.randn(columns, depth).bfloat16(), requires_grad=False)
    made.quant_method = RowInvariantLinearMethod.__new__(RowInvariantLinearMethod)
    made.quant_method.process_weights_after_loading(made)
    return made


def settle(**change):
    found = config(**change)
    linears.settle([torch.nn.Module()], found)
    return found.additional_config[linears.FIELD]


def files(root):
    return sorted((root / "vllm_b70" / "linears").glob("*/*"))


def test_layers_of_a_shape_are_settled_alike_and_multiply(mode, root, caplog):
    caplog.set_level(logging.INFO, logger="vllm.vllm_b70")
    layers = [layer(), layer(), layer(columns=32)]
    with pytest.raises(PluginError, match="no route was chosen for the layer model.layers.0"):
        layers[0].quant_method.apply(layers[0], torch.randn(2, 64).bfloat16())
    found = settle()
    assert [one[:2] for one in found] == [
        ["linear", "96x64 bfloat16"],
        ["linear", "32x64 bfloat16"],
    ]
    assert layers[0].b70_native == layers[1].b70_native == tuple(found[0][2]) != ()
    x = torch.randn(50, 64).bfloat16()
    for made in layers:
        whole = made.quant_method.apply(made, x)
        want = x.float() @ made.weight.float().t()
        assert torch.allclose(whole.float(), want, atol=0.2, rtol=0.02)
        for rows in (1, 7, 33):
            assert torch.equal(made.quant_method.apply(made, x[:rows]), whole[:rows])
    text = caplog.text
    assert "linear 96x64 bfloat16: the vendor's kernel, class of" in text
    assert "4 rows in 1 of 4, 16 rows in 1 of 64, 64 rows in 1 of 64" in text
    assert "4-bit linears: our own kernels" in text
    assert "2 of 2 shapes native, digest" in text and str(files(root)[0].parent.parent) in text


def test_a_second_start_takes_what_the_first_one_kept(mode, root, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="vllm.vllm_b70")
    made = layer()
    first = settle()
    monkeypatch.setattr(linears, "_decide", lambda *arguments: pytest.fail("it asked again"))
    again = layer()
    assert settle() == first and again.b70_native == made.b70_native
    assert "(0 found now" in caplog.text and len(files(root)) == 1


def test_what_is_settled_enters_the_keys_of_certificate_and_compile_cache(mode, monkeypatch):
    monkeypatch.undo()
    from vllm.config import VllmConfig

    plain, noted = VllmConfig(), VllmConfig()
    before = plain.compute_hash()
    noted.additional_config[linears.FIELD] = [["linear", "8x8", [1, 8, 1]]]
    assert noted.compute_hash() != before


def refuse(number):
    def call(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return call


def test_what_lies_where_a_choice_is_kept_is_not_taken_for_one(mode, root):
    mode("auto")
    layer()
    key = settled.key_of(native._waiting[0], torch.device("cpu"), (0, 1))
    folder = settled.path_of(key).parent
    folder.mkdir(parents=True)
    (folder / "left behind").touch()
    with pytest.raises(OSError):
        settled.keep(key, settled.Settled("linear", "96x64 bfloat16", (5, 9, 1), "a choice"))
    assert settled.load(key) is None


@pytest.mark.parametrize("linear", ["native", "auto"])
def test_the_first_of_two_servers_counts(mode, linear, root, monkeypatch):
    """Both found no file, and the other one wrote it first: its choice is taken, also on a file
    system that has no hard links."""
    mode(linear)
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    other = settled.Settled("linear", "96x64 bfloat16", (5, 9, 1), "by another server")
    decide = linears._decide

    def slowly(*arguments):
        found = decide(*arguments)
        settled.keep(key, other)
        return found

    made = layer()
    key = settled.key_of(native._waiting[0], torch.device("cpu"), (0, 1))
    monkeypatch.setattr(linears, "_decide", slowly)
    assert settle() == [["linear", "96x64 bfloat16", [5, 9, 1]]]
    assert made.b70_native == (5, 9, 1)
    assert [path.suffix for path in files(root)] == [".json"]
    assert len(list(files(root)[0].parent.parent.iterdir())) == 1, "nothing half written stays"


@pytest.mark.parametrize("drafts", [None, 0, 1, 7])
def test_drafts_users_and_budgets_have_no_say(drafts, mode, root, monkeypatch):
    """A server that speculates answers as one that does not, so it has the same row classes."""
    kept = [layer()]
    first = settle()
    monkeypatch.setattr(linears, "_decide", lambda *arguments: pytest.fail("it asked again"))
    kept.append(layer())
    change = {
        "scheduler_config": types.SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        "speculative_config": None
        if drafts is None
        else types.SimpleNamespace(num_speculative_tokens=drafts),
    }
    assert settle(**change) == first and len(files(root)) == 1


def test_shapes_are_kept_one_by_one(mode, root, monkeypatch):
    """A draft model brings shapes of its own; those of the target do not move."""
    kept = [layer()]
    first = settle()
    kept += [layer(), layer(columns=32)]
    decide, asked = linears._decide, []
    monkeypatch.setattr(linears, "_decide", lambda w: asked.append(w.shape) or decide(w))
    assert settle()[0] == first[0] and asked == ["32x64 bfloat16"] and len(files(root)) == 2


def test_the_digest_is_that_of_what_answers(mode, caplog):
    caplog.set_level(logging.INFO, logger="vllm.vllm_b70")
    digests = []
    for drafts in (0, 1):
        target = torch.nn.ModuleList([layer()])
        kept = [target] + [layer(columns=32)] * drafts
        linears.settle([target], config())
        digests += re.findall(r"(\d) of \d shapes native, digest (\w+)", caplog.text)[drafts:]
        assert kept
    assert [native for native, _ in digests] == ["1", "2"] and digests[0][1] == digests[1][1]


def test_another_card_of_the_kind_and_other_folders_take_the_same_file(mode, monkeypatch):
    def key(capability, **environ):
        device = {"name": "card", "driver": "1", "capability": capability}
        with monkeypatch.context() as patch:
            patch.setattr(certificate, "_device", lambda _: dict(device))
            for name, value in environ.items():
                patch.setenv(name, value)
            named = types.SimpleNamespace(op="linear", shape="96x64 bfloat16")
            return settled.key_of(named, torch.device("cpu"), (0, 1))

    cuda = "_CudaDeviceProperties(name='card', multi_processor_count={}, uuid={}, pci_bus_id={})"
    first = key(cuda.format(132, "0a-1b", 3), CUDA_VISIBLE_DEVICES="0", TRITON_CACHE_DIR="a")
    assert first == key(cuda.format(132, "9c-8d", 4), ZE_AFFINITY_MASK="1", TRITON_CACHE_DIR="b")
    assert first != key(cuda.format(114, "0a-1b", 3))
    assert first != key(cuda.format(132, "0a-1b", 3), CUBLAS_WORKSPACE_CONFIG=":4096:8")


def test_ranks_and_switches_have_files_of_their_own(mode, root):
    kept = [layer()]
    settle()
    kept.append(layer())
    settle(parallel_config=types.SimpleNamespace(rank=1, tensor_parallel_size=2))
    mode("auto")
    kept.append(layer())
    settle()
    assert len(files(root)) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"spans": [\n   1', '"spans": [\n   2'),
        lambda text: text.replace("bfloat16", "float16"),
        lambda text: "[]",
    ],
)
def test_a_file_that_cannot_be_believed_stops_the_server(damage, mode, root):
    kept = [layer()]
    settle()
    (path,) = files(root)
    text = path.read_text()
    path.write_text(damage(text))
    assert path.read_text() != text
    kept.append(layer())
    with pytest.raises(PluginError, match="copy it from a server of the same configuration") as e:
        settle()
    assert str(path) in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("faster", ["vendor", "own"])
def test_auto_keeps_the_faster_route_and_says_both_times(faster, mode, root, monkeypatch):
    mode("auto")
    asked = []

    def times(calls, device):
        results = [call() for call in calls]
        assert torch.allclose(*(r.float() for r in results), atol=0.2, rtol=0.02)
        asked.append(len(results[0]))
        return [1e-5, 2e-5] if faster == "vendor" else [3e-5, 1e-5]

    monkeypatch.setattr(linears, "times", times)
    made = layer()
    ((_, _, spans),) = settle()
    assert bool(spans) == (faster == "vendor") and asked == [1, 4, 64]
    assert bool(made.b70_native) == bool(spans)
    # Our kernel has its own form of the weight, and the loaded one goes.
    assert hasattr(made, "b70_weight") == (not spans) == (made.weight.numel() == 0)
    assert made.quant_method.apply(made, torch.randn(5, 64).bfloat16()).shape == (5, 96)
    found = json.loads(files(root)[0].read_text())["settled"]
    assert "4 rows" in found["why"] and "us" in found["why"]


def test_times_are_medians_of_turns():
    calls = []

    def call(name):
        return lambda: calls.append(name)

    assert len(linears.times([call("a"), call("b")], torch.device("cpu"))) == 2
    assert "".join(calls) == "ab" * (linears.ROUNDS + 1)


def test_a_choice_by_the_clock_that_cannot_be_kept_stops_the_server(mode, root, caplog):
    (root / "vllm_b70").write_text("a file where the folder should be")
    kept = [layer()]
    kept.append(layer(columns=32))
    settle()
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "cannot be kept" in line, "what native finds, another start finds too"
    assert f"make {root / 'vllm_b70' / 'linears'} writable, or set VLLM_CACHE_ROOT" in line
    mode("auto")
    kept.append(layer())
    with pytest.raises(PluginError, match="its choice cannot be kept"):
        settle()


@pytest.mark.parametrize("linear", ["native", "auto"])
def test_a_cache_that_cannot_be_read_stops_the_server(mode, linear, root, monkeypatch):
    """What is there is not known, and choosing anew might choose otherwise."""
    mode(linear)
    kept = [layer()]
    monkeypatch.setattr(Path, "read_text", refuse(errno.EACCES))
    with pytest.raises(PluginError, match="cannot look for its earlier choice .*denied") as e:
        settle()
    assert f"make {root / 'vllm_b70' / 'linears'} readable" in str(e.value)
    assert "VLLM_CACHE_ROOT" in str(e.value) and "\n" not in str(e.value) and kept


def test_a_choice_that_is_cut_off_leaves_nothing(mode, root, monkeypatch, caplog):
    kept = [layer()]
    monkeypatch.setattr(os, "rename", refuse(errno.EIO))
    settle()
    assert "cannot be kept" in caplog.text and kept
    assert list((root / "vllm_b70" / "linears").iterdir()) == []


def test_native_without_any_certified_class_stops_the_server(mode, monkeypatch):
    monkeypatch.setattr(row_classes, "certify", lambda *arguments: "it is broken")
    made = layer()
    with pytest.raises(PluginError, match="no linear of this model has a certified.*is broken"):
        settle()
    mode("auto")
    made = layer(columns=32)
    assert settle() == [["linear", "32x64 bfloat16", []]]
    assert made.quant_method.apply(made, torch.randn(5, 64).bfloat16()).shape == (5, 32)


def test_what_takes_too_long_stops_the_server(mode, monkeypatch):
    monkeypatch.setattr(linears, "LIMIT", 0.0)
    kept = [layer(), layer(columns=32)]
    with pytest.raises(PluginError, match="1 of 2 shapes"):
        settle()
    assert kept[1].b70_native is None
    native.take_waiting()
    kept.append(layer())
    assert settle(), "the last one is settled, however late"


def test_a_tied_head_waits_like_a_head(mode):
    embedding = torch.nn.Module()
    embedding.weight = torch.nn.Parameter(torch.randn(96, 64).bfloat16(), requires_grad=False)
    embedding.quant_method = RowInvariantEmbeddingMethod.__new__(RowInvariantEmbeddingMethod)
    embedding.quant_method.process_weights_after_loading(embedding)
    model = torch.nn.Module()
    model.lm_head = embedding
    found = config()
    linears.settle([model], found)
    ((op, _, spans),) = found.additional_config[linears.FIELD]
    assert op == "lm_head" and embedding.b70_native == tuple(spans) and spans
    # Fewer rows than other linears have.
    assert max(row_classes.members_of(tuple(spans))) == 16
    x = torch.randn(9, 64).bfloat16()
    got = embedding.quant_method.apply(embedding, x)
    assert torch.allclose(got.float(), x.float() @ embedding.weight.float().t(), atol=0.2)


def test_layers_of_images_and_other_switches_wait_for_nothing(mode):
    assert hasattr(layer(prefix="visual.blocks.0.mlp"), "b70_weight")
    mode("triton")
    assert hasattr(layer(), "b70_weight") and native.take_waiting() == []


def test_weights_that_are_loaded_again_keep_their_route(mode):
    made = layer()
    settle()
    spans = made.b70_native
    made.quant_method.process_weights_after_loading(made)
    assert made.b70_native == spans and native.take_waiting() == []


def test_what_was_dropped_after_loading_is_not_asked(mode):
    kept, dropped = layer(), layer(columns=32)
    del dropped
    assert [one[1] for one in settle()] == ["96x64 bfloat16"] and kept.b70_native


@pytest.mark.parametrize(
    ("spans", "exact"), [((9, 16, 1), True), ((1, 8, 1), True), ((1, 16, 1), False)], ids=str
)
def test_the_census_judges_the_route_that_is_installed(spans, exact, mode, monkeypatch):
    """A class that is none, as a damaged choice might have it, is caught by what asks anew."""
    made = layer()
    settle()

    def vendors(weight):
        def gemm(x):
            packed = weight.t().contiguous()
            y = torch.ops.vllm_b70.linear(x, packed, None)
            bits = y.view(torch.int16)
            return (bits + (len(x) >= 9) * (bits % 5 == 0).to(torch.int16)).view(y.dtype)

        return gemm

    monkeypatch.setattr(ops, "linear_gemm", vendors)
    made.b70_native = spans

    def inputs(count, seed):
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(count, 64, generator=generator).bfloat16(),)

    def run(x):
        return (made.quant_method.apply(made, x),)

    probe = RowProbe("linear", "96x64", 64, 1, 192, torch.device("cpu"), inputs, run)
    assert probe.judge().exact is exact
