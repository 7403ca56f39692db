"""The backend ``"ray"``: reserves slots by placement groups, and forks workers here or has agents fork them."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
import socket
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bandmaster.backends.host_workers import HostShare, HostWorkers
from bandmaster.backends.local import LocalBackend, default_modules
from bandmaster.backends.ray.agents import AgentKey, RayAgents
from bandmaster.backends.ray.in_worker import SETUP_HOOK, is_name
from bandmaster.backends.ray.session import PLACE, START_TIMEOUT_S, RayConnection, RaySession
from bandmaster.contract import NOT_STARTED, Launch
from bandmaster.errors import UsageError
from bandmaster.hosts.workers import AgentWorkers
from bandmaster.plan.placement import Node, Request, assign_nodes, cannot_place
from bandmaster.platform.limits import start_thread
from bandmaster.platform.proc import Stat, peer_of, stat
from bandmaster.platform.settings import CONTROLLERS_RAY

POLL_S = 0.1  # Ray has no event for "a resource became free"
LOOK_S = 0.5  # how often to look whether the user has left Ray, or it has ended, of which Ray tells nobody
_UNIQUE = " #"  # begins the suffix that makes the name of a placement group unique; messages omit the suffix
# A group of ours, with Ray's id of the process that made it at the end of its suffix, if that is no driver.
_NAMED = re.compile(rf"pool .* \(\d+ slots\){_UNIQUE}[0-9a-f]{{32}}([0-9a-f]*)")
_UNSET = re.compile(r"\$\{[A-Z0-9_]+\}")
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")  # to an environment variable
_BY_POOL = (
    "the pool decides about it: use_gpu=, gpus_per_worker=, cpus_per_worker= and resources_per_worker= of ResourcePool"
)
_BY_GROUP = "the group decides about it: name= of WorkerGroup names the workers, which end with their controller"
_IN_ORDER = "workers are processes that the group calls in order, and that restart() and replace() renew"
REFUSED_OPTIONS = {  # of @ray.remote, and what to do instead
    **dict.fromkeys(("num_cpus", "num_gpus", "resources", "accelerator_type", "label_selector"), _BY_POOL),
    **dict.fromkeys(("memory", "object_store_memory", "scheduling_strategy", "fallback_strategy"), _BY_POOL),
    **dict.fromkeys(("placement_group", "placement_group_bundle_index"), _BY_POOL),
    **dict.fromkeys(("name", "namespace", "lifetime", "get_if_exists"), _BY_GROUP),
    **dict.fromkeys(("max_restarts", "max_task_retries", "max_pending_calls"), _IN_ORDER),
    **dict.fromkeys(("max_concurrency", "concurrency_groups", "allow_out_of_order_execution"), _IN_ORDER),
}


class PlacementGroups(list[PlacementGroup]):
    """Placement groups that this process has made. They are removed when nothing refers to this any more.

    The name of each is noted before it is made, so that none is left behind, whenever Ctrl-C comes. As a context
    manager, it removes them at once if the block raises: a notebook keeps the traceback, which refers to this.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._session = RaySession()
        self._end = weakref.finalize(self, _remove, self._names, self._session)
        self._end.atexit = False  # Ray removes them with their job, and `_remove_orphans` those that a task leaves

    def __reduce__(self) -> tuple[object, ...]:
        return tuple, (tuple(self),)

    def __enter__(self) -> PlacementGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.remove_all()

    def make(self, name: str, bundles: Sequence[Mapping[str, float]], node: str, life: str | None) -> None:
        """Make one more.

        Args:
            name: What messages call it.
            bundles: Its bundles.
            node: Ray's id of the node that they are to be on.
            life: Its lifetime, as Ray calls it.
        """
        context = ray.get_runtime_context()
        maker = context.get_worker_id() if life is None and context.worker.mode == ray.WORKER_MODE else ""
        self._names.append(f"{name}{_UNIQUE}{uuid.uuid4().hex}{maker}")
        labels = [{"ray.io/node-id": node}] * len(bundles)
        made = placement_group(list(bundles), "STRICT_PACK", self._names[-1], life, bundle_label_selector=labels)
        self.append(made)

    def remove_all(self) -> None:
        """Remove them. It may be called again."""
        _remove(self._names, self._session)
        self.keep()

    def keep(self) -> None:
        """Leave them to whoever knows their names."""
        self._end.detach()


def _remove_orphans() -> None:
    """Remove placement groups of tasks and actors whose processes have died: Ray waits until their job ends."""
    groups = placement_group_table()
    living = ray._private.state.workers()  # after the groups, whose makers are listed before they make them
    for key, group in groups.items():
        ours = _NAMED.fullmatch(group["name"])
        if ours and ours[1] and ours[1] not in living and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(key)))


def _remove(names: Sequence[str], session: RaySession) -> None:
    for name in names if session.is_current else ():
        with contextlib.suppress(ValueError):  # it was not made, or was removed
            remove_placement_group(get_placement_group(name))


@dataclass(frozen=True, eq=False)
class RayReservation:
    """The placement groups of a pool.

    Attributes:
        name: Name of the pool.
        groups: The placement group of each entry of the request. It has one bundle, with all slots of the entry.
        nodes: Ray's id of the node of each entry.
        gpus: The GPUs of each slot, as ``CUDA_VISIBLE_DEVICES`` lists them, by entry and slot.
        session: The Ray session in which the placement groups exist.
    """

    name: str
    groups: Sequence[PlacementGroup]
    nodes: tuple[str, ...]
    gpus: tuple[tuple[tuple[str, ...], ...], ...]
    session: RaySession


class RayBackend:
    """Backend whose slots are reserved on a Ray cluster.

    Attributes:
        local: Forks the workers of this host.
        connection: The connection to Ray.
        agents: The agents of other hosts.

    Args:
        local: The same.
        connection: The same; by default a new one.
        agents: The same.
    """

    def __init__(
        self, local: LocalBackend, connection: RayConnection | None = None, agents: RayAgents | None = None
    ) -> None:
        self.local, self.connection, self.agents = local, connection or RayConnection(), agents or RayAgents()

    def inventory(self) -> tuple[Node, ...]:
        """The live nodes of the cluster, to which this connects if needed. A private Ray instance does not count CPUs.

        Raises:
            UsageError: The cluster can only be reached through Ray Client.
        """
        with self.connection.staying():  # a private Ray that this starts ends with it if nothing is reserved
            self.connection.connect()
            return self._nodes()

    def _nodes(self) -> tuple[Node, ...]:
        is_embedded, holders = self.connection.is_embedded, _holders_by_node()
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
            key = node["NodeID"]
            nodes.append(
                Node(
                    name=node["NodeManagerAddress"],
                    total=node["Resources"],
                    free=free.get(key, {}),
                    holders=tuple(sorted(holders.get(key, ()))),
                    key=key,
                    hostname=node["NodeManagerHostname"],
                    labels=node.get("Labels", {}),
                    is_many=is_embedded,
                )
            )
        return tuple(nodes)

    def reserve(self, request: Request, timeout_s: float) -> RayReservation:
        """Create a placement group on the node chosen for each entry of the request, and start agents on other nodes.

        Waits at most ``timeout_s`` seconds for resources that others hold.

        Raises:
            PlacementError: The request can never fit, or the resources did not become free in time.
            UsageError: The cluster can only be reached through Ray Client.
        """
        with self.connection.staying():
            reservation = self._waited_for(request, timeout_s)
            self.connection.hold(reservation)
            here = ray.get_runtime_context().get_node_id()
            far = [AgentKey(node) for node in dict.fromkeys(reservation.nodes) if node != here]
            if far:
                self.agents.prepare(reservation, far)
        return reservation

    def _waited_for(self, request: Request, timeout_s: float) -> RayReservation:
        begin = collects_at = time.monotonic()
        deadline = begin + timeout_s
        while True:
            nodes = self.inventory()
            if assign_nodes(request, nodes, free=False) is None:
                raise cannot_place(request, nodes, free=False)
            assigned = assign_nodes(request, nodes)
            if assigned is not None:
                reservation = self._reserved(request, [nodes[index].key for index in assigned], deadline)
                if reservation is not None:
                    return reservation
            elif (now := time.monotonic()) >= collects_at:
                gc.collect()  # dropped pools hold their slots as long as they are in cycles
                _remove_orphans()
                collects_at = now + max(1.0, now - begin)  # it takes a while; a pool may be dropped meanwhile
            if time.monotonic() >= deadline:
                raise cannot_place(request, nodes, waited_s=timeout_s)
            time.sleep(POLL_S)

    def _reserved(self, request: Request, keys: Sequence[str], deadline: float) -> RayReservation | None:
        """Create a placement group with one bundle for each entry; None if resources were taken meanwhile.

        Args:
            request: The slots.
            keys: Ray's id of the node of each entry.
            deadline: Until when to wait for the placement groups, as `time.monotonic`.
        """
        names = [name_of(request.name, size) for size in request.workers]
        bundles = [[bundle_of(request, size, self.connection.is_embedded)] for size in request.workers]
        groups = placed(names, bundles, keys, deadline)
        if groups is None:
            return None
        with groups:
            return RayReservation(request.name, groups, tuple(keys), gpus_of(groups, request), RaySession())

    def nodes(self, reservation: RayReservation) -> list[Node | None]:
        """The node of each entry; where the agent of a host is gone, it is found out at once whether the host is."""
        reservation.session.check(f"pool {reservation.name!r}")
        lost = self.agents.lost_nodes()
        living = {node.key: node for node in self.inventory() if node.key not in lost}
        return [living.get(node_of(group)) for group in reservation.groups]

    def release(self, reservation: RayReservation) -> None:
        """Remove the placement groups of a reservation. A private Ray instance ends with its last reservation."""
        self.agents.release(reservation)
        self.local.release_zygotes(reservation)
        if isinstance(reservation.groups, PlacementGroups):
            reservation.groups.remove_all()
        self.connection.end_hold(reservation)

    def start(self, launch: Launch) -> HostWorkers | AgentWorkers:
        """Fork a worker process for every slot: here if all slots are on this node, else by the agents of the nodes.

        Raises:
            UsageError: The class asks for an option of ``@ray.remote`` that has no meaning here.
            ClosedError: The Ray session of the pool has ended.
            PlacementError, WorkerDied, CallTimeout: As for `bandmaster.contract.Backend.start`.
        """
        for name, value in launch.options.items():
            if value and name in REFUSED_OPTIONS and (name, value) != ("max_concurrency", 1):
                raise UsageError(
                    f"{launch.class_name} asks Ray for {name}={value!r}, but {REFUSED_OPTIONS[name]}; leave this out "
                    "of @ray.remote(...)"
                )
        for slot in launch.slots:
            slot.reservation.session.check(f"pool {slot.reservation.name!r}")
        nodes = [slot.reservation.nodes[slot.node] for slot in launch.slots]
        ours, variables, runtime_env = _environment(launch.options.get("runtime_env"))
        is_here = not runtime_env and set(nodes) == {ray.get_runtime_context().get_node_id()}
        known = _expanded(variables) if is_here else _plain(variables)  # Ray sets the others in agents
        launch = replace(launch, variables={**ours, **known, **launch.env, **launch.variables})
        if is_here:
            place = self._place(launch, range(len(nodes)), ray.util.get_node_ip_address())
            session, raylet = launch.slots[0].reservation.session, _raylet(ray.get_runtime_context().get_node_id())
            workers = self.local.start_ranks(launch, place, [slot.reservation for slot in launch.slots])
            watched = weakref.ref(workers)
            try:
                start_thread("bandmaster-ray-session", _end_with_ray, watched, launch.group, session, raylet)
            except BaseException:
                workers.stop(NOT_STARTED)
                raise
            return workers
        ranks: dict[str, list[int]] = {}
        for rank, node in enumerate(nodes):
            ranks.setdefault(node, []).append(rank)
        asked = dict(launch.options.get("runtime_env") or {})
        theirs = asked.get("env_vars", {})
        needs_own = asked.keys() - {"env_vars"} or _plain(theirs) != theirs  # plain variables need no agent
        env = json.dumps(asked, sort_keys=True) if needs_own else ""
        return self.agents.start(
            launch, {AgentKey(node, env): self._place(launch, mine) for node, mine in ranks.items()}
        )

    @staticmethod
    def _place(launch: Launch, ranks: Sequence[int], address: str = "") -> HostShare:
        slots = {rank: launch.slots[rank] for rank in ranks}
        gpus = {rank: slot.reservation.gpus[slot.node][slot.index] for rank, slot in slots.items()}
        return HostShare(tuple(ranks), address, gpus, default_modules(launch.imports))


def name_of(pool: str, n_slots: int) -> str:
    """The name that messages give to the placement group of some slots of a pool."""
    return f"pool {pool!r} ({n_slots} slots)"


def placed(
    names: Sequence[str],
    bundles: Sequence[Sequence[Mapping[str, float]]],
    keys: Sequence[str],
    deadline: float,
    life: str | None = None,
) -> PlacementGroups | None:
    """Create a placement group on each of some nodes; None, leaving none behind, if resources were taken meanwhile.

    Args:
        names: What messages call each placement group.
        bundles: The bundles of each.
        keys: The node of each.
        deadline: Until when to wait for them, as `time.monotonic`.
        life: Their lifetime, as Ray calls it.
    """
    with PlacementGroups() as groups, contextlib.suppress(GetTimeoutError):
        for name, wanted, key in zip(names, bundles, keys, strict=True):
            groups.make(name, wanted, key, life)
        if all(group.wait(1.0) for group in groups):
            return groups
        gc.collect()  # dropped pools hold their slots, which Ray may have said to be free shortly after they were taken
        if all(group.wait(max(1.0, min(10.0, deadline - time.monotonic()))) for group in groups):
            return groups
    groups.remove_all()
    return None


def node_of(group: PlacementGroup) -> str:
    """Ray's id of the node of a placement group; empty if that is lost."""
    return str(placement_group_table(group)["bundles_to_node_id"].get(0, ""))


def is_lost(group: PlacementGroup) -> bool:
    """Whether the node of a placement group is lost for good: Ray places those made elsewhere again, on another one."""
    known = placement_group_table(group)
    return _NAMED.fullmatch(known.get("name", "")) is not None and known["state"] == "RESCHEDULING"


def bundle_of(request: Request, n_slots: int, is_embedded: bool) -> dict[str, float]:
    """The resources that Ray reserves for some slots of one node; Ray refuses an empty bundle."""
    each = {"GPU": request.gpus_per_worker, PLACE: 1} if is_embedded else request.each
    found = {name: n_slots * float(amount) for name, amount in each.items() if amount}
    return found or {"memory": 1.0}  # a byte, which every node has


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


def _environment(asked: Mapping[str, Any] | None) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    """The variables by which workers find Ray, those that ``runtime_env`` asks for, and the rest of it.

    Args:
        asked: The ``runtime_env`` of the class. That of the job is added.
    """
    context = ray.get_runtime_context()
    # `ray job submit` has prepared this process with what it was given as the job's
    of_job = {} if "RAY_JOB_CONFIG_JSON" in os.environ else dict(context.runtime_env)
    merged = {**of_job, **dict(asked or {})}
    jobs = of_job.get("env_vars", {})
    if context.worker.mode == ray.WORKER_MODE:  # Ray has expanded the others in this process
        jobs = _plain(jobs)
    variables = {**jobs, **dict(asked or {}).get("env_vars", {})}
    hook = merged.pop(SETUP_HOOK) if is_name(merged.get(SETUP_HOOK)) else None
    rest = {name: value for name, value in merged.items() if name not in ("env_vars", "_ray_commit") and value}
    said = {"namespace": context.namespace, "runtime_env": dict(context.runtime_env), "hook": hook}
    found = {"RAY_ADDRESS": context.gcs_address, CONTROLLERS_RAY: json.dumps(said)}
    return found, variables, rest


def _plain(asked: Mapping[str, str]) -> dict[str, str]:
    """The environment variables in which Ray expands nothing."""
    return {name: value for name, value in asked.items() if "$" not in value}


def _expanded(asked: Mapping[str, str]) -> dict[str, str]:
    """Environment variables as Ray sets them in its processes, in this order; ``${NAME}`` stands for another one."""
    known = dict(os.environ)
    for name, value in sorted(asked.items()):
        known[name] = _UNSET.sub("", _REFERENCE.sub(lambda found: known.get(found[1] or found[2], found[0]), value))
    return {name: known[name] for name in asked}


@functools.lru_cache(maxsize=1)
def _raylet(node: str) -> Stat | None:
    """The process by which Ray keeps this node, given by Ray's id; None if it is not visible, as from a container."""
    name = next(known["RayletSocketName"] for known in ray.nodes() if known["NodeID"] == node)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(name)
        return stat(peer_of(sock)[0])
    return None


def _end_with_ray(workers: weakref.ref[HostWorkers], group: str, session: RaySession, raylet: Stat | None) -> None:
    """End workers on this host once the Ray that their slots are on has ended, or the user has left it.

    Ray itself ends agents.

    Args:
        workers: The workers.
        group: Name of their group.
        session: The Ray session of their slots.
        raylet: The process by which Ray keeps this node; None if it is not visible.
    """
    while (running := workers()) is not None and not running.is_stopped:
        with contextlib.suppress(OSError, MemoryError):  # there is no descriptor to look with at the moment
            found = raylet and stat(raylet.pid)
            if not session.is_current:
                running.stop(session.ended(f"group {group!r}"))
            elif raylet and (found is None or found.start != raylet.start or found.state in "ZX"):
                running.stop(
                    f"Ray has ended on this host, and with it the slots of group {group!r} (raylet, pid {raylet.pid}); "
                    "connect to Ray again, and create the pool and its groups again"
                )
        del running
        time.sleep(LOOK_S)  # Ray tells nobody of `ray.shutdown`
