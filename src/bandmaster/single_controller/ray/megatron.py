"""Megatron's groups under their import path in verl up to 0.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bandmaster.single_controller.base.megatron.worker_group import MegatronWorkerGroup
from bandmaster.single_controller.base.worker import DistGlobalInfo, DistRankInfo
from bandmaster.single_controller.ray.groups import RayWorkerGroup

__all__ = ["MegatronRayWorkerGroup", "NVMegatronRayWorkerGroup"]


class NVMegatronRayWorkerGroup(RayWorkerGroup, MegatronWorkerGroup):
    """A `RayWorkerGroup` of `MegatronWorker`, which are asked once where Megatron has put their ranks.

    They are asked when a method needs it first, so that they may initialize Megatron in a method of theirs.
    """

    @property
    def megatron_ranks(self) -> Sequence[DistRankInfo]:
        """The coordinates of each rank, as ``get_megatron_rank_info`` of its worker returns them."""
        if "_megatron_rank_info" not in vars(self):
            vars(self)["_megatron_rank_info"] = self.execute_all_sync("get_megatron_rank_info")
        return vars(self)["_megatron_rank_info"]  # type: ignore[no-any-return]

    def get_megatron_global_info(self) -> DistGlobalInfo:
        """The sizes of tensor, data, pipeline and context parallelism, as worker 0 returns them."""
        if "_megatron_global_info" not in vars(self):
            vars(self)["_megatron_global_info"] = self.execute_rank_zero_sync("get_megatron_global_info")
        return vars(self)["_megatron_global_info"]  # type: ignore[no-any-return]


class MegatronRayWorkerGroup(NVMegatronRayWorkerGroup):
    """An `NVMegatronRayWorkerGroup` whose workers initialize Megatron in their method ``init_megatron``.

    Args:
        resource_pool: As for `RayWorkerGroup`.
        ray_cls_with_init: As for `RayWorkerGroup`.
        default_megatron_kwargs: The keyword of that name that ``init_megatron`` of every worker gets.
        **kwargs: As for `RayWorkerGroup`.
    """

    def __init__(
        self,
        resource_pool: Any = None,
        ray_cls_with_init: Any = None,
        default_megatron_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(resource_pool, ray_cls_with_init, **kwargs)
        if resource_pool is not None:
            self.init_megatron(default_megatron_kwargs)

    def init_megatron(self, default_megatron_kwargs: Mapping[str, Any] | None = None) -> None:
        """Call ``init_megatron`` of every worker."""
        self.execute_all_sync("init_megatron", default_megatron_kwargs=default_megatron_kwargs)
