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
        """The certificate of the loaded model; see ``census.take``. Drafts are verified by it, so
        that nothing in the draft model can change a token."""
        from vllm_b70.census.census import take

        worker: Any = self
        return take([worker.get_model()], worker.vllm_config, worker.device, anew)
