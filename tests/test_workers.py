"""Which worker class serves, and what it is made of."""

import pytest

from vllm_b70 import workers
from vllm_b70.census.worker import CensusMixin
from vllm_b70.graphs.worker import GraphsMixin
from vllm_b70.speculation.workers import GpuMixin

GPU = workers.STOCK["Gpu"]


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, GPU),
        ({"census": True}, "vllm_b70.workers.CensusGpuWorker"),
        ({"skipping": True}, "vllm_b70.workers.SkippingGpuWorker"),
        ({"census": True, "skipping": True}, "vllm_b70.workers.CensusSkippingGpuWorker"),
        ({"graphs": True}, "vllm_b70.workers.GraphsGpuWorker"),
        (
            {"census": True, "graphs": True, "skipping": True},
            "vllm_b70.workers.CensusGraphsSkippingGpuWorker",
        ),
    ],
)
def test_names(asked, name):
    assert workers.over(GPU, **asked) == name
    # A configuration made from another has our class already; nothing is lost.
    assert workers.over(name, **asked) == name
    more = workers.over(name, census=True)
    assert more is not None and "Census" in more and ("Skipping" in more) == ("skipping" in asked)


def test_a_worker_of_somebody_else_has_no_class_over_it():
    assert workers.over("vllm.v1.worker.worker_base.WorkerBase", census=True) is None


def test_classes_are_made_over_vllms():
    made = workers.CensusGraphsSkippingGpuWorker
    assert made.__mro__[1:4] == (CensusMixin, GraphsMixin, GpuMixin)
    assert f"{made.__mro__[4].__module__}.{made.__mro__[4].__name__}" == GPU
    with pytest.raises(AttributeError):
        _ = workers.NoSuchWorker


def test_a_cpu_has_no_graphs():
    assert not any("Graphs" in name and "Cpu" in name for name in workers._NAMES)
