"""`StagedWeightsEngine`: loads weights that a worker has staged into vLLM's model. Imported by vLLM alone.

::

    worker: VLLM ── StagedWeights, a file in memory; or LentWeights, the trainer's tensors on this GPU
                          │ their address
    vLLM's process, one for each device: StagedWeightsEngine
                          │ model.load_weights
                          ▼
    the model's layers, which cut, fuse and pack the tensors as they did at the start
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from bandmaster.rl.engine_weights.staged import StagedWeights
from bandmaster.rl.lent_weights import PREFIX, LentWeights

LOG = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The information before the first update: there is none."""


@dataclass
class Some(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Some of the weights of a sync.

    Attributes:
        address: Of the weights.
        names: Those to load.
    """

    address: str
    names: list[str]


class StagedWeightsEngine(WeightTransferEngine[NoInit, Some]):  # type: ignore[misc]
    """Loads staged weights layer by layer, into the memory of those in use."""

    init_info_cls, update_info_cls = NoInit, Some

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing, as each update says where the weights are."""

    def start_weight_update(self) -> None:
        """Have the model's layers take weights in the form of a checkpoint."""
        self._opened: StagedWeights | LentWeights | None = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Some) -> None:
        """Load some weights. After an error, all have to be loaded again."""
        try:
            if self._opened is None:
                kind = LentWeights if update_info.address.startswith(PREFIX) else StagedWeights
                self._opened = kind.opened(update_info.address)
            self.model.load_weights([(name, self._opened[name]) for name in update_info.names])
        except BaseException:
            self._finish()  # else layers would count what they have got to the next update
            raise

    def finish_weight_update(self) -> None:
        """Have the layers pack what they have got."""
        self._finish()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load some weights, and wait until the device has them."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Unmap the weights."""
        self._opened = None

    def _finish(self) -> None:
        self._opened = None
        without = {type(layer).__name__ for layer in self.model.modules() if not [*layer.parameters()]}

        def is_meant(record: logging.LogRecord) -> bool:
            """Whether a layer could have got weights: vLLM warns of those that have none to get, such as rotations."""
            return not (isinstance(record.args, tuple) and without.issuperset(map(str, record.args)))

        LOG.addFilter(is_meant)
        try:
            finalize_layerwise_reload(self.model, self.model_config)
        finally:
            LOG.removeFilter(is_meant)
