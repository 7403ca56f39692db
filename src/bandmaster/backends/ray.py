"""Runs workers as Ray actors. Ray reserves, places and monitors them, and its object store carries large payloads.

::

    controller                                       an actor, one per rank
    put(payload) ── ray.put, once ──► object store ──► private copy ─► decode ─► method
    call ─────────── actor task ─────────────────────►                             │
    fetch ◄───────── its object ◄──────────────────────────────────── encode ◄────┘ only if collected

Only the modules called ``ray*`` import Ray: this one places and starts actors, `ray_workers` calls them, `ray_actor`
runs in them. If a Ray cluster is running, it is used. Otherwise the first pool starts a private Ray instance, in which
CPUs are not counted, and the last pool stops it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import ray.util.client
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bandmaster.backends.ray_actor import WorkerActor, actor_class
from bandmaster.backends.ray_agents import RayAgents, RayAgentWorkers, nodes_of
from bandmaster.backends.ray_attached import AttachedWorkers
from bandmaster.backends.ray_detached import NAMESPACE, RayDetachedGroups
from bandmaster.backends.ray_overlapping import OverlappingActor, has_async_methods
from bandmaster.backends.ray_session import RaySession
from bandmaster.backends.ray_workers import POLL_S, START_TIMEOUT_S, RayWorkers
from bandmaster.contract import Launch, Lifetime
from bandmaster.errors import ClosedError, UsageError
from bandmaster.plan.placement import Node, Request, assign_nodes, cannot_place, could_ever_fit
from bandmaster.platform.limits import working_directory

__all__ = ["RayBackend"]

PLACE = "bandmaster_place"  # custom resource of a private Ray instance; each slot takes one unit
RENAME_TIMEOUT_S = 10.0  # time for Ray to free the name of a killed actor
_NO_CLIENT = (
    "backend 'ray' does not work over Ray Client (ray://), because the controller must be part of the cluster; run the "
    "script on a node of the cluster, with `ray job submit` for example, and without ray:// in ray.init and RAY_ADDRESS"
)
_NO_CLUSTER = (
    "detached groups need a Ray cluster that outlives this process: start one with `ray start --head`, or set "
    "RAY_ADDRESS; a Ray instance that a pool or ray.init() starts ends with this process"
)
_UNIQUE = " #"  # begins the suffix that makes the name of a placement group unique; messages omit the suffix
REFUSED_OPTIONS = (  # actor options, and why they are refused
    (
        {"concurrency_groups", "max_restarts", "max_task_retries"},
        "a rank runs its calls in order, and workers are restarted by restart() and replace()",
    ),
    (
        {"resources", "accelerator_type", "memory", "object_store_memory"},
        "the slots of a pool contain only CPUs and GPUs, so the actor could never start",
    ),
)
PLACED_BY_POOL = {"name", "num_cpus", "num_gpus", "resources", "scheduling_strategy", "lifetime", "get_if_exists"}


class RayBackend:
    """Backend whose workers are Ray actors. A reservation is one placement group per node, with one bundle per slot."""

    def __init__(self) -> None:
        self._is_connected_here = False  # whether to disconnect from Ray with the last reservation
        self._session: RaySession | None = None  # the session that this backend opened
        self._is_embedded = False  # whether it is a private Ray instance
        self._reservations: list[Reservation] = []
        self._ended: set[str] = set()  # placement groups of pools of this process whose detached groups have ended
        self._agents = RayAgents()
        self._connecting = threading.RLock()  # held while this connects or disconnects; re-entrant for finalizers
        self._making: list[object] = []  # one for each reservation that is being made

    def inventory(self) -> tuple[Node, ...]:
        """The live nodes of the cluster, to which this connects if needed. A private Ray instance does not count CPUs.

        Raises:
            UsageError: The cluster can only be reached through Ray Client.
        """
        self._connect()
        free = ray._private.state.available_resources_per_node()
        holders = _holders_by_node()
        return tuple(
            Node(
                name=node["NodeManagerAddress"],
                cpus_total=None if self._is_embedded else node["Resources"].get("CPU", 0.0),
                cpus_free=None if self._is_embedded else free.get(node["NodeID"], {}).get("CPU", 0.0),
                gpus_total=node["Resources"].get("GPU", 0.0),
                gpus_free=free.get(node["NodeID"], {}).get("GPU", 0.0),
                holders=tuple(f"{name} ({n} slots)" for name, n in sorted(holders.get(node["NodeID"], {}).items())),
                key=node["NodeID"],
                hostname=node["NodeManagerHostname"],
                labels=node.get("Labels", {}),
                total=node["Resources"],
                free=free.get(node["NodeID"], {}),
                is_many=self._is_embedded,
            )
            for node in ray.nodes()
            if node["Alive"]
        )

    def reserve(self, request: Request, timeout_s: float) -> Reservation:
        """Create a placement group on the node chosen for each entry of the request.

        Waits at most ``timeout_s`` seconds for resources that others hold.

        Raises:
            PlacementError: The request can never fit, or the resources did not become free in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._staying_connected():
            while True:
                nodes = self.inventory()
                if not could_ever_fit(request, nodes):
                    raise cannot_place(request, nodes, free=False)
                assigned = assign_nodes(request, nodes)
                if assigned is not None:
                    reservation = self._try_to_reserve(request, [nodes[index].key for index in assigned], deadline)
                    if reservation is not None:
                        self._reservations.append(reservation)
                        return reservation
                if time.monotonic() >= deadline:
                    raise cannot_place(request, nodes, waited_s=timeout_s)
                time.sleep(POLL_S)

    def nodes(self, reservation: Reservation) -> list[Node | None]:
        """The node of each entry; where the agent of a host is gone, it is found out at once whether the host is."""
        lost = self._agents.lost_nodes()
        living = {node.key: node for node in self.inventory() if node.key not in lost}
        return [living.get(_node_of(group)) for group in reservation.groups]

    def release(self, reservation: Reservation) -> None:
        """Remove the placement groups of a reservation. A private Ray instance ends with its last reservation.

        Those of a detached pool stay, unless this process has ended the last detached group in them.
        """
        self._reservations.remove(reservation)
        self._agents.let_go()
        if reservation.session.is_current:
            for group in reservation.groups:
                if not reservation.is_detached or self._is_over(group.id.hex()):
                    remove_placement_group(group)
        self._disconnect_if_idle()

    def start(self, launch: Launch) -> RayWorkers | RayAgentWorkers:
        """Start an actor on every slot.

        Raises:
            UsageError: The class asks for an actor option of `REFUSED_OPTIONS`, for calls that overlap although it has
                no async method, or a name is taken.
            ClosedError: The Ray session of the pool has ended.
            PlacementError, WorkerDied, CallTimeout: As for `bandmaster.contract.Backend.start`.
        """
        for keys, why in REFUSED_OPTIONS:
            asked = {key: launch.options[key] for key in keys & launch.options.keys() if launch.options[key]}
            if asked:
                raise UsageError(
                    f"{launch.cls.__name__} asks Ray for {asked}, but {why}; leave this out of @ray.remote(...)"
                )
        if launch.log_level is not None:
            raise UsageError(
                "logging= needs a pool on backend 'local' or 'inprocess': on Ray, log records stay in the workers, "
                "which may print them; leave logging= out, and set up logging in the worker's __init__"
            )
        if _overlaps(launch) and not has_async_methods(launch.cls):
            raise UsageError(
                f"{launch.cls.__name__} asks Ray for max_concurrency={launch.options['max_concurrency']}, but only "
                "calls of async methods and async generators can overlap, and it has neither; leave this out of "
                "@ray.remote(...)"
            )
        _check_session(launch)
        _check_slots(launch)
        start = partial(start_actor, self._is_embedded)
        if _can_have_agents(launch) and not self._is_embedded:
            nodes = nodes_of(launch.slots)
            if not self._are_near(nodes):
                workers = self._agents.start(launch, start, nodes)
                if workers is not None:
                    return workers
        return RayWorkers(launch, start)

    @staticmethod
    def _are_near(nodes: Sequence[str]) -> bool:
        """Whether some nodes are on this host."""
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        here = ray.util.get_node_ip_address()
        return all(address.get(node) == here for node in nodes)

    def attach(self, launch: Launch, actors: Sequence[Any]) -> RayWorkers:
        """Call actors that another group has started, in this process or another one.

        Raises:
            UsageError: An actor is no worker of bandmaster.
        """
        return AttachedWorkers(launch, actors)

    def adopt(self, name: str, groups: Sequence[PlacementGroup]) -> Reservation:
        """A reservation that consists of the user's own placement groups, one per node; the user removes them."""
        return Reservation(name, tuple(groups), tuple(tuple(range(g.bundle_count)) for g in groups), RaySession())

    @contextlib.contextmanager
    def detached_groups(self) -> Iterator[RayDetachedGroups]:
        """The detached groups of the cluster, to which this process stays connected while the block runs.

        Raises:
            UsageError: There is no cluster, it would end with this process, or it can only be reached by Ray Client.
        """
        if not ray.is_initialized() and _running_cluster() is None:
            raise UsageError(_NO_CLUSTER)
        with self._staying_connected():
            self._connect()
            held = Reservation("detached groups", (), (), RaySession(), is_detached=True)
            self._reservations.append(held)
        try:
            if held.session.ends_with_process:
                raise UsageError(_NO_CLUSTER)
            yield RayDetachedGroups(self._keep)
        finally:
            self.release(held)

    def _keep(self, group: str) -> bool:
        """Whether a pool of this process has a placement group, by its id; it removes it when it is closed."""
        held = [found.id.hex() for reservation in self._reservations for found in reservation.groups]
        if group in held:
            self._ended.add(group)
        return group in held

    def _is_over(self, group: str) -> bool:
        """Whether a placement group of a detached pool has had detached groups, and has none any more."""
        is_ended = group in self._ended
        self._ended.discard(group)
        return is_ended and not RayDetachedGroups.is_used(group)

    def _try_to_reserve(self, request: Request, keys: Sequence[str], deadline: float) -> Reservation | None:
        """Create placement groups on the given nodes; None, leaving none behind, if resources were taken meanwhile."""
        resources = dict(request.resources_per_worker)
        bundle = _bundle(request.cpus_per_worker, request.gpus_per_worker, resources, self._is_embedded)
        groups: list[PlacementGroup] = []
        try:
            for n_places, key in zip(request.workers, keys, strict=True):
                labels = [{"ray.io/node-id": key}] * n_places
                name = f"pool {request.name!r}{_UNIQUE}{uuid.uuid4().hex}"
                life = "detached" if request.is_detached else None
                bundles = [bundle] * n_places
                groups.append(placement_group(bundles, "STRICT_PACK", name, life, bundle_label_selector=labels))
            for group in groups:
                if not group.wait(max(1.0, min(10.0, deadline - time.monotonic()))):
                    raise TimeoutError
            ordered = [_in_device_order(group, bool(request.gpus_per_worker)) for group in groups]
            return Reservation(request.name, tuple(groups), tuple(ordered), RaySession(), request.is_detached)
        except BaseException as error:
            for group in groups:
                remove_placement_group(group)
            if isinstance(error, TimeoutError | GetTimeoutError):
                return None
            raise

    @contextlib.contextmanager
    def _staying_connected(self) -> Iterator[None]:
        """Let no other thread disconnect while a reservation is made; disconnect if there is none in the end."""
        making = object()
        with self._connecting:
            self._making.append(making)
        try:
            yield
        finally:
            self._making.remove(making)
            self._disconnect_if_idle()

    def _connect(self) -> None:
        """Connect to Ray, unless this process is connected. Threads that come here meanwhile wait.

        Raises:
            UsageError: The cluster can only be reached through Ray Client.
        """
        with self._connecting:
            self._connect_once()

    def _connect_once(self) -> None:
        """Connect to Ray, unless this process is connected.

        Uses the cluster that RAY_ADDRESS names or that runs on this machine, else starts a private Ray instance.

        Raises:
            UsageError: The cluster can only be reached through Ray Client.
        """
        if ray.is_initialized():
            if ray.util.client.ray.is_connected():
                raise UsageError(_NO_CLIENT)
            if self._session is None or not self._session.is_current:  # the user has replaced our connection
                self._is_connected_here = self._is_embedded = False
            return
        self._is_connected_here, self._is_embedded = True, False
        working_directory()  # raises if it was removed; ray.init needs it
        cluster = _running_cluster()
        if cluster is not None:
            ray.init(cluster, logging_level=logging.WARNING)
        else:
            ray.init("local", include_dashboard=False, logging_level=logging.WARNING, resources={PLACE: 1e6})
            self._is_embedded = True
        self._session = RaySession()

    def _disconnect_if_idle(self) -> None:
        """Disconnect if nothing is reserved. If another thread connects, which is to reserve slots, it looks later."""
        if not self._connecting.acquire(blocking=False):
            return
        try:
            is_used = self._making or any(held.session.is_current for held in self._reservations)
            if self._is_connected_here and not is_used:
                if self._session is not None and self._session.is_current:
                    ray.shutdown()
                self._is_connected_here = self._is_embedded = False
        finally:
            self._connecting.release()


@dataclass(frozen=True, eq=False)
class Reservation:
    """The placement groups of a pool.

    Attributes:
        name: Name of the pool.
        groups: The placement group of each node of the request.
        bundles: For each node, the indices of its bundles in the order of their GPUs.
        session: The Ray session in which the placement groups exist.
        is_detached: Whether they stay when they are released.
    """

    name: str
    groups: tuple[PlacementGroup, ...]
    bundles: tuple[tuple[int, ...], ...]
    session: RaySession
    is_detached: bool = False


def start_actor(is_embedded: bool, launch: Launch, rank: int) -> Any:
    """Start the actor of a rank on its slot.

    Args:
        is_embedded: Whether Ray is a private instance.
        launch: The group.
        rank: The rank.
    """
    _check_session(launch)
    slot = launch.slots[rank]
    share = math.floor(slot.share * 1e4) / 1e4  # Ray rounds resources to ten-thousandths
    bundle = _bundle(launch.cpus_per_worker, int(launch.uses_gpu), launch.resources_per_worker, is_embedded)
    taken = {name: amount * share for name, amount in bundle.items()}
    options = {key: value for key, value in launch.options.items() if key not in PLACED_BY_POOL}
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=slot.reservation.groups[slot.node],
        placement_group_bundle_index=slot.reservation.bundles[slot.node][slot.index],
    )
    if launch.env:  # in the environment of its process from the start: modules read variables when they are imported
        given = options.get("runtime_env") or {}
        options["runtime_env"] = {**given, "env_vars": {**given.get("env_vars", {}), **launch.env}}
    if launch.lifetime.outlives_controller:
        options["lifetime"] = "detached"
    if launch.lifetime is Lifetime.NAMED:
        options["namespace"] = NAMESPACE
    actor = actor_class(launch.cls, OverlappingActor if _overlaps(launch) else WorkerActor).options(
        **options,
        name=launch.worker_names[rank],
        num_cpus=taken.pop("CPU", 0),
        num_gpus=taken.pop("GPU", 0),
        resources=taken,
        scheduling_strategy=strategy,
    )
    deadline = time.monotonic() + (RENAME_TIMEOUT_S if launch.is_again else 0.0)
    while True:
        try:
            return actor.remote(launch.label(rank))
        except ValueError as error:
            if time.monotonic() >= deadline:
                raise UsageError(
                    f"Ray refused to start worker {launch.worker_names[rank]!r}: {error}; actor names must be "
                    "unique in a namespace of Ray, so give every group a name of its own"
                ) from error
        time.sleep(POLL_S)  # Ray frees the name of a killed actor a little later


def _can_have_agents(launch: Launch) -> bool:
    """Whether calls of the group need not go through Ray, wherever its workers are."""
    is_wanted = os.environ.get("BANDMASTER_AGENTS") != "0"
    return is_wanted and launch.lifetime is Lifetime.GROUP and not _overlaps(launch)


def _overlaps(launch: Launch) -> bool:
    """Whether calls of the workers' async methods are to overlap."""
    return (launch.options.get("max_concurrency") or 1) > 1


def _check_session(launch: Launch) -> None:
    for slot in launch.slots:
        slot.reservation.session.check(f"pool {slot.reservation.name!r}")


def _check_slots(launch: Launch) -> None:
    """Raise ClosedError if another controller has released the slots of a detached pool."""
    for group in {slot.reservation.groups[slot.node] for slot in launch.slots if slot.reservation.is_detached}:
        if placement_group_table(group)["state"] == "REMOVED":
            raise ClosedError(
                f"the slots of group {launch.group!r} were released by another controller, which has ended the last "
                "detached group on them; make a new pool"
            )


def _running_cluster() -> str | None:
    """Address of the cluster that `ray.init` would join; None if there is no cluster or the recorded one has ended.

    Raises:
        UsageError: RAY_ADDRESS asks for Ray Client.
    """
    if "RAY_ADDRESS" in os.environ:
        if os.environ["RAY_ADDRESS"].startswith("ray://"):
            raise UsageError(_NO_CLIENT)
        return os.environ["RAY_ADDRESS"]
    address = ray._private.services.find_bootstrap_address(None)
    if not address:
        return None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError:
        return None
    return str(address)


def _bundle(cpus: float, gpus: int, resources: Mapping[str, float], is_embedded: bool) -> dict[str, float]:
    """Resources that Ray reserves for one slot; Ray refuses an empty bundle."""
    least = 0.0 if gpus or resources else 0.01
    amounts = {"GPU": gpus, PLACE: 1} if is_embedded else {"GPU": gpus, "CPU": cpus or least, **resources}
    return {name: float(amount) for name, amount in amounts.items() if amount}


def _in_device_order(group: PlacementGroup, has_gpus: bool) -> tuple[int, ...]:
    """Indices of a placement group's bundles, sorted by GPU number, which only a task in a bundle can read."""
    n_bundles = group.bundle_count
    if not has_gpus or n_bundles == 1:
        return tuple(range(n_bundles))
    strategies = [PlacementGroupSchedulingStrategy(group, index) for index in range(n_bundles)]
    asked = [_gpu_of_bundle.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    gpus = ray.get(asked, timeout=START_TIMEOUT_S)
    return tuple(sorted(range(n_bundles), key=lambda index: _device_key(gpus[index])))


@ray.remote(num_cpus=0, num_gpus=1, max_retries=0)  # type: ignore[untyped-decorator]
def _gpu_of_bundle() -> str:
    return str(ray.get_gpu_ids()[0])


def _node_of(group: PlacementGroup) -> str:
    """Ray's id of the node of a placement group; empty if that is lost."""
    return str(placement_group_table(group)["bundles_to_node_id"].get(0, ""))


def _device_key(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdigit() else (0, gpu)


def _holders_by_node() -> dict[str, Counter[str]]:
    """For each node id, the names of the placement groups on that node and their number of bundles there."""
    holders: dict[str, Counter[str]] = {}
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            for node in group["bundles_to_node_id"].values():
                name = group["name"].split(_UNIQUE)[0] or "an unnamed placement group"
                holders.setdefault(node, Counter())[name] += 1
    return holders
