"""``MegatronWorker`` of verl up to 0.5: a worker that says where Megatron has put its rank."""

from __future__ import annotations

from typing import Any

from bandmaster.single_controller.base.worker import DistGlobalInfo, DistRankInfo, Worker

__all__ = ["DistGlobalInfo", "DistRankInfo", "MegatronWorker"]


class MegatronWorker(Worker):
    """A worker whose coordinates are those of Megatron's parallel state, once its constructor has initialized it."""

    def get_megatron_global_info(self) -> DistGlobalInfo:
        """The sizes of Megatron's tensor, data, pipeline and context parallelism."""
        state = _parallel_state()
        return DistGlobalInfo(
            tp_size=state.get_tensor_model_parallel_world_size(),
            dp_size=state.get_data_parallel_world_size(),
            pp_size=state.get_pipeline_model_parallel_world_size(),
            cp_size=state.get_context_parallel_world_size(),
        )

    def get_megatron_rank_info(self) -> DistRankInfo:
        """The coordinates of this rank in Megatron's tensor, data, pipeline and context parallelism."""
        state = _parallel_state()
        return DistRankInfo(
            tp_rank=state.get_tensor_model_parallel_rank(),
            dp_rank=state.get_data_parallel_rank(),
            pp_rank=state.get_pipeline_model_parallel_rank(),
            cp_rank=state.get_context_parallel_rank(),
        )


def _parallel_state() -> Any:
    from megatron.core import parallel_state  # a worker that calls this has initialized it

    return parallel_state
