"""A census between the loading of weights and everything that runs the model."""

from __future__ import annotations

from typing import Any

from vllm_b70.compat.seams import require
from vllm_b70.settings import current

require("worker_load", "block_size")


class CensusMixin:
    """Mixin over a worker class of vLLM."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        mode = current().census
        if mode != "off":
            from vllm_b70.census.census import certify

            certify(self.take_census, mode)

    def take_census(self, anew: bool = False) -> Any:
        """The certificate of the loaded model; see ``census.take``. Drafts are verified by it, so
        that nothing in the draft model can change a token."""
        from vllm.platforms import current_platform

        from vllm_b70.census.census import take

        worker: Any = self
        # Blocks of the KV cache grow to the page of a recurrent state. The executor settles that
        # only when load_model is done, from what is known here already; twice gives the same.
        current_platform.update_block_size_for_backend(worker.vllm_config)
        return take([worker.get_model()], worker.vllm_config, worker.device, anew)
