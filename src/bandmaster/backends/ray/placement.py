"""Slots on a Ray cluster: its nodes and what is free on them, and the placement groups that reserve a pool's slots."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bandmaster.backends.ray.session import PLACE, RaySession
from bandmaster.plan.placement import Node, Request

START_TIMEOUT_S = 300.0  # for Ray to start a process
_UNIQUE = " #"  # begins the suffix that makes the name of a placement group unique; messages omit the suffix


@dataclass(frozen=True, eq=False)
class Reservation:
    """The placement groups of a pool.

    Attributes:
        name: Name of the pool.
        groups: The placement group of each entry of the request. It has one bundle, with all slots of the entry.
        nodes: Ray's id of the node of each entry.
        gpus: The GPUs of each slot, as ``CUDA_VISIBLE_DEVICES`` lists them, by entry and slot.
        session: The Ray session in which the placement groups exist.
    """

    name: str
    groups: tuple[PlacementGroup, ...]
    nodes: tuple[str, ...]
    gpus: tuple[tuple[tuple[str, ...], ...], ...]
    session: RaySession


def inventory(is_embedded: bool) -> tuple[Node, ...]:
    """The live nodes of the cluster. A private Ray instance does not count CPUs.

    Args:
        is_embedded: Whether Ray is such an instance.
    """
    holders = _holders_by_node()
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    free = {
        node.node_id: {one.resource_name: one.total - one.used for one in node.resource_usage.usage}
        for node in (*status.active_nodes, *status.idle_nodes)
        if node.resource_usage is not None
    }
    nodes = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        key, total, left = node["NodeID"], node["Resources"], free.get(node["NodeID"], {})
        nodes.append(
            Node(
                name=node["NodeManagerAddress"],
                cpus_total=None if is_embedded else total.get("CPU", 0.0),
                cpus_free=None if is_embedded else left.get("CPU", 0.0),
                gpus_total=total.get("GPU", 0.0),
                gpus_free=left.get("GPU", 0.0),
                holders=tuple(sorted(holders.get(key, ()))),
                key=key,
                hostname=node["NodeManagerHostname"],
                labels=node.get("Labels", {}),
                total=total,
                free=left,
                is_many=is_embedded,
            )
        )
    return tuple(nodes)


def name_of(pool: str, n_slots: int) -> str:
    """The name that messages give to the placement group of some slots of a pool."""
    return f"pool {pool!r} ({n_slots} slots)"


def placed(
    names: Sequence[str],
    bundles: Sequence[Sequence[Mapping[str, float]]],
    keys: Sequence[str],
    deadline: float,
    life: str | None = None,
) -> tuple[PlacementGroup, ...] | None:
    """Create a placement group on each of some nodes; None, leaving none behind, if resources were taken meanwhile.

    Args:
        names: What messages call each placement group.
        bundles: The bundles of each.
        keys: The node of each.
        deadline: Until when to wait for them, as `time.monotonic`.
        life: Their lifetime, as Ray calls it.
    """
    groups: list[PlacementGroup] = []
    try:
        for name, wanted, key in zip(names, bundles, keys, strict=True):
            unique, labels = f"{name}{_UNIQUE}{uuid.uuid4().hex}", [{"ray.io/node-id": key}] * len(wanted)
            groups.append(placement_group(list(wanted), "STRICT_PACK", unique, life, bundle_label_selector=labels))
        if all(group.wait(max(1.0, min(10.0, deadline - time.monotonic()))) for group in groups):
            return tuple(groups)
    except GetTimeoutError:
        pass
    except BaseException:
        release(groups)
        raise
    release(groups)
    return None


def release(groups: Sequence[PlacementGroup]) -> None:
    """Remove placement groups."""
    for group in groups:
        remove_placement_group(group)


def node_of(group: PlacementGroup) -> str:
    """Ray's id of the node of a placement group; empty if that is lost."""
    return str(placement_group_table(group)["bundles_to_node_id"].get(0, ""))


def bundle_of(request: Request, n_slots: int, is_embedded: bool) -> dict[str, float]:
    """The resources that Ray reserves for some slots of one node; Ray refuses an empty bundle."""
    amounts: dict[str, float] = {"GPU": request.gpus_per_worker}
    if is_embedded:
        amounts[PLACE] = 1
    else:
        amounts |= {"CPU": request.cpus_per_worker, **dict(request.resources_per_worker)}
    found = {name: n_slots * float(amount) for name, amount in amounts.items() if amount}
    return found or {"CPU": 0.01}


def gpus_of(groups: Sequence[PlacementGroup], request: Request) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The GPUs of each slot, in the order of their numbers, which only a task in a bundle can read."""
    each = request.gpus_per_worker
    if not each:
        return tuple(((),) * size for size in request.workers)
    asked = [
        gpus_of_bundle.options(
            num_gpus=each * size, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0)
        ).remote()
        for group, size in zip(groups, request.workers, strict=True)
    ]
    found = [sorted(gpus, key=device_key) for gpus in ray.get(asked, timeout=START_TIMEOUT_S)]
    return tuple(
        tuple(tuple(gpus[slot * each : (slot + 1) * each]) for slot in range(size))
        for gpus, size in zip(found, request.workers, strict=True)
    )


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def gpus_of_bundle() -> list[str]:
    """The GPUs of the bundle that this task runs in."""
    return list(map(str, ray.get_gpu_ids()))


def device_key(gpu: str) -> tuple[int, str]:
    """The sort key of a GPU: its number, if it has one."""
    return (int(gpu), "") if gpu.isdigit() else (0, gpu)


def _holders_by_node() -> dict[str, list[str]]:
    """For each node id, what messages call the placement groups that have bundles on that node."""
    holders: dict[str, list[str]] = {}
    for group in placement_group_table().values():
        name, is_ours, _ = group["name"].partition(_UNIQUE)
        for node, n in Counter(group["bundles_to_node_id"].values()).items() if group["state"] == "CREATED" else ():
            called = name if is_ours else f"{name or 'an unnamed placement group'} ({n} bundles)"
            holders.setdefault(node, []).append(called)
    return holders
