"""What happens between the loading of weights and everything that runs the model."""

from __future__ import annotations

from typing import Any

from vllm_b70.compat.seams import require
from vllm_b70.settings import NATIVE, current

require("worker_load", "block_size")


class CensusMixin:
    """Mixin over a worker class of vLLM."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        settings = current()
        if settings.linear in NATIVE:
            from vllm_b70.census.linears import settle

            worker: Any = self
            settle([worker.get_model()], worker.vllm_config)
        mode = settings.census
        if mode != "off":
            from vllm_b70.census.census import certify

            certify(self.take_census, mode)
        self.warm_up()

    def warm_up(self) -> None:
        """Have the kernels of a GPU compiled before anybody waits for them."""
        worker: Any = self
        if worker.device.type == "cpu":
            return
        from vllm_b70.census.warm_up import warm_up

        self._settle_block_size()
        draft = getattr(getattr(worker.model_runner, "speculator", None), "model", None)
        warm_up(worker.get_model(), draft, worker.vllm_config, worker.device)

    def take_census(self, anew: bool = False) -> Any:
        """The certificate of the loaded model; see ``census.take``. Drafts are verified by it, so
        that nothing in the draft model can change a token."""
        from vllm_b70.census.census import take

        worker: Any = self
        self._settle_block_size()
        return take([worker.get_model()], worker.vllm_config, worker.device, anew)

    def _settle_block_size(self) -> None:
        """Blocks of the KV cache grow to the page of a recurrent state. The executor settles that
        only when load_model is done, from what is known before; twice gives the same."""
        from vllm.platforms import current_platform

        current_platform.update_block_size_for_backend(self.vllm_config)  # type: ignore[attr-defined]
