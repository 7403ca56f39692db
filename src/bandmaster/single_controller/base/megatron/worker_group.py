"""``MegatronWorkerGroup`` of verl up to 0.5: a group that knows where Megatron has put its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from bandmaster.single_controller.base.worker import DistGlobalInfo, DistRankInfo
from bandmaster.single_controller.base.worker_group import WorkerGroup

__all__ = ["MegatronWorkerGroup"]


class MegatronWorkerGroup(WorkerGroup):
    """The interface of a group for the modes ``MEGATRON_…``, which `NVMegatronRayWorkerGroup` implements."""

    @property
    def megatron_ranks(self) -> Sequence[DistRankInfo]:
        """The coordinates of each rank."""
        raise NotImplementedError

    def get_megatron_rank_info(self, rank: int) -> DistRankInfo:
        """The coordinates of a rank.

        Raises:
            IndexError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not among the {self.world_size} of {self!r}")
        return self.megatron_ranks[rank]

    def get_megatron_global_info(self) -> DistGlobalInfo:
        """The sizes of tensor, data, pipeline and context parallelism."""
        raise NotImplementedError

    @property
    def tp_size(self) -> int:
        """Size of tensor parallelism."""
        return self.get_megatron_global_info().tp_size

    @property
    def dp_size(self) -> int:
        """Size of data parallelism."""
        return self.get_megatron_global_info().dp_size

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self.get_megatron_global_info().pp_size

    @property
    def cp_size(self) -> int:
        """Size of context parallelism."""
        return self.get_megatron_global_info().cp_size
