"""A census between the loading of weights and everything that runs the model."""

from __future__ import annotations

from typing import Any

from vllm_b70.compat.seams import require
from vllm_b70.settings import current

require("worker_load")


class CensusMixin:
    """Mixin over a worker class of vLLM."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        mode = current().census
        if mode != "off":
            from vllm_b70.census.census import enforce

            enforce(self.take_census(), mode)

    def take_census(self, anew: bool = False) -> Any:
        """The certificate of the loaded model and its draft model; see ``census.take``."""
        from vllm_b70.census.census import take

        worker: Any = self
        models = [worker.get_model(), worker.get_draft_model()]
        models = [model for model in models if model is not None]
        return take(models, worker.vllm_config, worker.device, anew)
