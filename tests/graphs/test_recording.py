"""Nothing waits for the device while a graph is recorded, and everything may before and after."""

import types

import pytest
import torch

from vllm_b70.graphs import recording
from vllm_b70.graphs.verify import GraphError


class Waits:
    def synchronize(self):
        return "waited"


class Device:
    """Stands for ``torch.xpu``."""

    __name__ = "xpu"

    def __init__(self):
        self.Stream, self.Event = type("Stream", (Waits,), {}), type("Event", (Waits,), {})
        self.capturing, self.ended = False, []
        self.synchronize = self.empty_cache = lambda: "waited"

    def is_current_stream_capturing(self):
        return self.capturing

    def graph(self, graph, pool, stream=None):
        return Capture(self)


class Capture:
    def __init__(self, device):
        self.device = device

    def __enter__(self):
        assert self.device.synchronize() == "waited"
        self.device.capturing = True

    def __exit__(self, kind, error, trace):
        self.device.capturing = False
        self.device.ended.append(kind)
        if self.device.__dict__.get("breaks") and kind is not None:
            raise RuntimeError("the capture is invalid")


@pytest.fixture
def device(monkeypatch):
    found = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    monkeypatch.setattr(torch.cuda, "graph", found.graph)
    return found


def capture(region):
    with (
        recording.guarded(torch.device("xpu")),
        torch.cuda.graph(object(), (0, 0), stream=None),
    ):
        region()


REGIONS = {
    "synchronize": lambda d: d.synchronize(),
    "accelerator": lambda d: torch.accelerator.synchronize(),
    "stream": lambda d: d.Stream().synchronize(),
    "event": lambda d: d.Event().synchronize(),
    "empty_cache": lambda d: d.empty_cache(),
    "item": lambda d: torch.ones(1, device="meta").item(),
    "tolist": lambda d: torch.ones(2, device="meta").tolist(),
    "cpu": lambda d: torch.ones(2, device="meta").cpu(),
    "bool": lambda d: bool(torch.ones(1, device="meta")),
    "capture": lambda d: torch.cuda.graph(object(), (0, 0)).__enter__(),
}


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("name", REGIONS)
def test_what_waits_is_refused_while_recording(name, breaks, device):
    device.breaks = breaks
    with pytest.raises(GraphError, match=f"(?i){name}.* would wait for the device") as error:
        capture(lambda: REGIONS[name](device))
    assert "\n" not in str(error.value)
    assert device.ended and device.ended[0] is not None and not device.capturing


def test_everything_waits_again_afterwards(device):
    before = {name: getattr(torch.Tensor, name) for name in recording.TO_HOST}
    graph = torch.cuda.graph
    capture(lambda: None)
    for name in ("item", "cpu"):
        with pytest.raises(GraphError):
            capture(lambda name=name: REGIONS[name](device))
    assert device.synchronize() == device.Event().synchronize() == "waited"
    assert torch.ones(1).item() == 1 and torch.cuda.graph == graph
    assert {name: getattr(torch.Tensor, name) for name in recording.TO_HOST} == before
    # What was inherited is inherited again.
    assert "synchronize" not in vars(device.Event)


def test_tensors_on_the_host_are_no_concern(device):
    def region():
        assert torch.ones(1).item() == 1 and torch.ones(1).tolist() == [1] and torch.ones(1)

    capture(region)


def test_between_captures_everything_may_wait(device):
    with recording.guarded(torch.device("xpu")):
        assert device.synchronize() == "waited" and torch.ones(1).item() == 1


def test_another_error_is_the_one_that_came_first(device):
    def full():
        raise torch.OutOfMemoryError("no room")

    device.breaks = True
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        capture(full)
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / 0)


def test_cuda_is_asked_to_tell(monkeypatch):
    """It knows more places that wait than these; its word is put into the sentence."""
    modes = ["default"]
    module = types.SimpleNamespace(
        graph=lambda *a, **k: Capture(Device()), is_current_stream_capturing=lambda: False
    )
    for name in ("synchronize", "empty_cache"):
        setattr(module, name, lambda: None)
    for name in ("Stream", "Event"):
        setattr(module, name, type(name, (Waits,), {}))
    module.__name__ = "torch.cuda"
    module.get_sync_debug_mode = lambda: modes[-1]
    module.set_sync_debug_mode = modes.append
    monkeypatch.setattr(torch, "cuda", module)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def region():
        assert modes[-1] == "error" and torch.ones(1).item() == 1
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(GraphError, match="called a synchronizing CUDA operation.* would wait"):
        capture(region)
    assert modes == ["default", "error", "default"]
