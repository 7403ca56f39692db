"""verl's ``Worker``: a `bandmaster.Worker` with verl's attributes, and the meshes that workers register themselves."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import bandmaster.worker
from bandmaster.single_controller.base.decorator import Dispatch, Execute, register

__all__ = ["DistGlobalInfo", "DistRankInfo", "Worker", "WorkerHelper"]


@dataclass
class DistRankInfo:
    """Coordinates of a rank in tensor, data, pipeline and context parallelism; verl before 0.4 has no ``cp_rank``."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int = 0


@dataclass
class DistGlobalInfo:
    """Sizes of tensor, data, pipeline and context parallelism."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int = 1


class WorkerHelper:
    """Addresses and ports for libraries that do not use the group's own rendezvous."""

    @staticmethod
    def _get_node_ip() -> str:
        ray = sys.modules.get("ray")
        return "127.0.0.1" if ray is None else str(ray.util.get_node_ip_address())

    @staticmethod
    def _get_free_port() -> int:
        with socket.socket() as sock:
            sock.bind(("", 0))
            return int(sock.getsockname()[1])

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """Address of this node, and a port on it that was free a moment ago."""
        return self._get_node_ip().strip("[]"), str(self._get_free_port())

    def get_availale_master_addr_port(self) -> tuple[str, str]:
        """`get_available_master_addr_port` under its former, misspelt name."""
        warnings.warn("the name is misspelt; call get_available_master_addr_port", stacklevel=2)
        return self.get_available_master_addr_port()


def _see_one_device() -> None:
    """Set the environment of a process that sees one device: libraries take ``LOCAL_RANK`` as the device's index.

    If Ray is told not to set the visible devices, each process sees all of them, and its own is made current.
    """
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    ray, torch = sys.modules.get("ray"), sys.modules.get("torch")
    if ray is not None and os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "0") not in ("", "0"):
        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if devices:
            os.environ["LOCAL_RANK"] = devices[0]
            if torch is not None and torch.cuda.is_available():
                torch.cuda.set_device(int(devices[0]))


class Worker(bandmaster.worker.Worker, WorkerHelper):
    """The base class of workers in verl programs; a subclass calls ``super().__init__()`` first.

    As in verl, a worker on Ray then has ``LOCAL_RANK=0`` in its environment, the index of the one device that it sees;
    its place on the node is the attribute ``local_rank``.

    A `RayWorkerGroup` sets all attributes before ``__init__`` runs. An object that is made outside of one takes them
    from the environment variables that torchrun sets.
    """

    fused_worker_attr_name = "fused_worker_dict"
    fused_worker_dict: Mapping[str, Any] = {}

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        """Set verl's attributes.

        Args:
            cuda_visible_devices: The new value of the environment variable ``CUDA_VISIBLE_DEVICES``.
        """
        for name in ("rank", "world_size", "local_rank", "local_world_size"):
            if name not in vars(self):
                default = "1" if name == "local_world_size" else "0"
                vars(self)[name] = int(os.environ.get(name.upper(), default))
        if os.environ.get("WG_BACKEND") == "ray":
            os.environ["RAY_LOCAL_RANK"] = str(self.local_rank)
            _see_one_device()
        self._rank, self._world_size = self.rank, self.world_size
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._master_addr, self._master_port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices

    @classmethod
    def env_keys(cls) -> list[str]:
        """The names of the environment variables that identify a worker."""
        names = ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
        return [*names, "CUDA_VISIBLE_DEVICES"]

    def get_master_addr_port(self) -> tuple[str, str]:
        """Address and port of the group's rendezvous."""
        return self._master_addr, self._master_port

    def get_cuda_visible_devices(self) -> str:
        """The environment variable ``CUDA_VISIBLE_DEVICES``; ``"not set"`` without it."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def print_rank0(self, *values: object, **options: Any) -> None:
        """Call `print` with these arguments on rank 0, and do nothing on other ranks."""
        if self.rank == 0:
            print(*values, **options)

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """The worker of another role in this process; None if there is no such role."""
        return self.fused_worker_dict.get(worker_name)

    # --- meshes that workers register themselves ---

    @property
    def _registered(self) -> dict[str, tuple[int, bool]]:
        """By name of the mesh: this worker's data-parallel rank, and whether its values are collected."""
        known: dict[str, tuple[int, bool]] = vars(self).setdefault("_registered_meshes", {})
        return known

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Register this worker's place on a mesh, for methods with ``make_nd_compute_dataproto_dispatch_fn``.

        Args:
            mesh_name: Name of the mesh.
            dp_rank: Number of the part of the rows that this worker gets.
            is_collect: Whether the caller gets the rows that this worker returns.

        Raises:
            ValueError: The worker has registered a mesh of this name before.
        """
        if mesh_name in self._registered:
            raise ValueError(f"mesh {mesh_name!r} is registered already, with {self._registered[mesh_name]}")
        self._registered[mesh_name] = (int(dp_rank), bool(is_collect))

    @register(Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        return self._place_on(mesh_name)[0]

    @register(Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        return self._place_on(mesh_name)[1]

    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether the values of this worker are collected on a mesh."""
        return self._place_on(mesh_name)[1]

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """The registered meshes, in the form that `set_dispatch_collect` of another worker takes."""
        return {
            "dispatch_dp_rank": {name: dp_rank for name, (dp_rank, _) in self._registered.items()},
            "collect_dp_rank": {name: is_collect for name, (_, is_collect) in self._registered.items()},
        }

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: Mapping[str, int], collect_dp_rank: Mapping[str, bool]
    ) -> None:
        """Register the place of another worker on one of its meshes as this worker's place on ``mesh_name``.

        Args:
            mesh_name: The name here.
            dispatch_dp_rank: The data-parallel rank by the other worker's name for its mesh, of which it has one, or
                one of the same name as here.
            collect_dp_rank: Whether its values are collected, in the same way.

        Raises:
            AssertionError: This worker has registered a mesh of this name before.
            ValueError: The other worker has registered several meshes, none of them under this name.
        """
        assert mesh_name not in self._registered, f"mesh {mesh_name!r} is registered already"
        if not dispatch_dp_rank:
            return
        name = mesh_name if mesh_name in dispatch_dp_rank else next(iter(dispatch_dp_rank))
        places = {(dispatch_dp_rank[key], collect_dp_rank[key]) for key in dispatch_dp_rank}
        if name != mesh_name and len(places) > 1:
            raise ValueError(
                f"the other worker has registered {', '.join(dispatch_dp_rank)}, with different places; call "
                f"one of them {mesh_name!r}"
            )
        self._register_dispatch_collect_info(mesh_name, dispatch_dp_rank[name], collect_dp_rank[name])

    def _place_on(self, mesh_name: str) -> tuple[int, bool]:
        if mesh_name not in self._registered:
            known = ", ".join(map(repr, self._registered)) or "no mesh"
            raise ValueError(
                f"{type(self).__name__} has not registered mesh {mesh_name!r}, only {known}; call "
                f"self._register_dispatch_collect_info({mesh_name!r}, dp_rank=..., is_collect=...)"
            )
        return self._registered[mesh_name]

    # --- the transfer queue of verl 0.6 and 0.7 ---

    @register(Dispatch.ONE_TO_ALL)
    def create_transferqueue_client(self, *args: Any, **kwargs: Any) -> None:
        """Make this process a client of verl's transfer queue, by the installed verl's own function for it.

        Args:
            *args: The trainer's ``config``, whose ``transfer_queue`` goes to the client (verl 0.7); or
                ``controller_infos`` and ``storage_infos`` (verl 0.6).
            **kwargs: The same by name, and ``role`` (verl 0.6), the prefix of the client's name.
        """
        from verl.utils.transferqueue_utils import create_transferqueue_client  # a program that calls this has verl

        names = ("controller_infos", "storage_infos", "role")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if "storage_infos" in given:
            client_id = f"{given.pop('role', 'train')}_worker_{self.rank}"
            create_transferqueue_client(client_id=client_id, **given)
        else:
            config = kwargs["config"] if kwargs else args[0]
            create_transferqueue_client(client_id=f"worker_{self.rank}", config=config.transfer_queue)

    # --- functions passed by the caller ---

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func(worker, *args, **kwargs)`` on every rank, with the rows of the arguments split."""
        return func(self, *args, **kwargs)

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func(*args, **kwargs)`` on rank 0."""
        return func(*args, **kwargs)
