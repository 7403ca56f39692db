"""The named actor by which programs of verl up to 0.5 find out on which nodes the workers of a group are.

::

    group.name_prefix ──first read──► actor "{name_prefix}_register_center", made once per group
    ray.get_actor(...).get_worker_info.remote()  ──►  {rank: id of Ray's node}
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "WorkerGroupRegisterCenter",
    "create_worker_group_register_center",
    "get_random_string",
    "rank_zero_info",
    "register",
]


class WorkerGroupRegisterCenter:
    """Holds facts about the workers of a group.

    Args:
        rank_zero_info: ``MASTER_ADDR`` and ``MASTER_PORT`` of the group's rendezvous.
        workers_info: The id of Ray's node of each rank, by rank.
    """

    def __init__(self, rank_zero_info: Mapping[str, str], workers_info: Mapping[int, str] | None = None) -> None:
        self.rank_zero_info = dict(rank_zero_info)
        self.workers_info = dict(workers_info or {})

    def get_rank_zero_info(self) -> dict[str, str]:
        """``MASTER_ADDR`` and ``MASTER_PORT`` of the group's rendezvous."""
        return self.rank_zero_info

    def set_rank_zero_info(self, info: Mapping[str, str]) -> None:
        """Set ``MASTER_ADDR`` and ``MASTER_PORT``, which a new rank 0 has chosen."""
        self.rank_zero_info = dict(info)

    def set_worker_info(self, rank: int, node_id: str) -> None:
        """Set the node of a rank."""
        self.workers_info[rank] = node_id

    def get_worker_info(self) -> dict[int, str]:
        """The id of Ray's node of each rank, by rank."""
        return self.workers_info


def create_worker_group_register_center(
    name: str, info: Mapping[str, str], workers_info: Mapping[int, str] | None = None, is_detached: bool = False
) -> Any:
    """Start a `WorkerGroupRegisterCenter` as an actor, or find the one of this name. Does not wait for it.

    Args:
        name: Name of the actor.
        info: ``MASTER_ADDR`` and ``MASTER_PORT`` of the group's rendezvous.
        workers_info: The id of Ray's node of each rank, by rank.
        is_detached: Whether the actor outlives this process; otherwise it ends with the last handle.
    """
    import ray  # here, because the names of this module do not need it

    options: dict[str, Any] = {"name": name, "get_if_exists": True, "num_cpus": 0}
    if is_detached:
        options["lifetime"] = "detached"
    return ray.remote(WorkerGroupRegisterCenter).options(**options).remote(dict(info), dict(workers_info or {}))


def register(prefix: str, address: Sequence[str], nodes: Sequence[str], is_detached: bool) -> Any:
    """Start the register center of a group.

    Args:
        prefix: The group's ``name_prefix``.
        address: Host and port of its rendezvous.
        nodes: The id of Ray's node of each rank.
        is_detached: Whether the group's workers outlive this process.
    """
    name, workers_info = f"{prefix}_register_center", dict(enumerate(nodes))
    return create_worker_group_register_center(name, rank_zero_info(address), workers_info, is_detached=is_detached)


def rank_zero_info(address: Sequence[str]) -> dict[str, str]:
    """The facts about a rendezvous, given by host and port, that a register center has."""
    return {"MASTER_ADDR": address[0], "MASTER_PORT": address[1]}


def get_random_string(length: int) -> str:
    """Random ASCII letters and digits."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=length))
