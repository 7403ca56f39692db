"""Backend ``"ray-actors"``: its slots are bundles of placement groups, as verl's callers expect, and hold actors."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bandmaster.backends import get_backend
from bandmaster.backends.host_workers import HostWorkers
from bandmaster.backends.ray import backend
from bandmaster.backends.ray.backend import POLL_S, RayBackend, RayReservation
from bandmaster.backends.ray.session import START_TIMEOUT_S, RaySession
from bandmaster.contract import Launch
from bandmaster.errors import UsageError
from bandmaster.hosts.workers import AgentWorkers
from bandmaster.plan.placement import Request
from bandmaster.single_controller.ray.actor import OverlappingActor, WorkerActor, actor_class, has_async_methods
from bandmaster.single_controller.ray.actor_workers import ActorWorkers
from bandmaster.single_controller.ray.launch import ActorLaunch, ActorRequest

__all__ = ["ActorBackend", "ActorReservation"]

RENAME_TIMEOUT_S = 10.0  # time for Ray to free the name of a killed actor
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


@dataclass(frozen=True, eq=False)
class ActorReservation(RayReservation):
    """The placement groups of a `RayResourcePool`, with a bundle for each slot.

    Attributes:
        bundles: For each placement group, the indices of its bundles in the order of their GPUs.
    """

    bundles: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, name: str, groups: Sequence[PlacementGroup], are_free: bool = False) -> ActorReservation:
        """A reservation that consists of some placement groups, one per node; the user removes their own.

        Args:
            name: Name of the pool.
            groups: The placement groups.
            are_free: Whether nothing uses them yet, so that tasks in them can find out which GPUs they have.
        """
        found = [gpus_of_bundles(group) if are_free else _in_order(group.bundle_count) for group in groups]
        bundles = tuple(tuple(sorted(range(len(of)), key=of.__getitem__)) for of in found)
        gpus = tuple(tuple(of[index][1] for index in order) for of, order in zip(found, bundles, strict=True))
        nodes = tuple(map(backend.node_of, groups))
        return cls(name, groups, nodes, gpus, RaySession(), bundles)


class ActorBackend(RayBackend):
    """Backend ``"ray"`` with a bundle for each slot; it starts the workers of a `RayWorkerGroup` as actors."""

    def __init__(self) -> None:
        ray_backend = cast(RayBackend, get_backend("ray"))
        super().__init__(ray_backend.local, ray_backend.connection, ray_backend.agents)

    def _reserved(self, request: Request, keys: Sequence[str], deadline: float) -> RayReservation | None:
        is_detached = isinstance(request, ActorRequest) and request.is_detached
        bundle = backend.bundle_of(request, 1, self.connection.is_embedded)
        names = [backend.name_of(request.name, size) for size in request.workers]
        bundles = [[bundle] * size for size in request.workers]
        groups = backend.placed(names, bundles, keys, deadline, "detached" if is_detached else None)
        if groups is None:
            return None
        with groups:
            made = ActorReservation.of(request.name, groups, are_free=True)
        if is_detached:
            groups.keep()
            return replace(made, groups=tuple(groups))
        return made

    def start(self, launch: Launch) -> HostWorkers | AgentWorkers | Any:
        """Start the actors of a `RayWorkerGroup`, or the workers of another group as backend ``"ray"`` starts them.

        Raises:
            UsageError: The class asks for an actor option of `REFUSED_OPTIONS`, or for calls that overlap although it
                has no async method; or a name is taken.
            ClosedError: The Ray session of the pool has ended.
            PlacementError, WorkerDied, CallTimeout: As for `bandmaster.contract.Backend.start`.
        """
        if not isinstance(launch, ActorLaunch):
            for slot in launch.slots:
                has_gpus = bool(slot.reservation.groups[slot.node].bundle_specs[0].get("GPU"))
                if has_gpus and not slot.reservation.gpus[slot.node][slot.index]:
                    raise UsageError(
                        f"group {launch.group!r} cannot find out the GPUs of placement groups made elsewhere; make it "
                        "a RayWorkerGroup, or use a pool that reserves its own slots"
                    )
            return super().start(launch)
        for keys, why in REFUSED_OPTIONS:
            asked = {key: launch.options[key] for key in keys & launch.options.keys() if launch.options[key]}
            if asked:
                raise UsageError(
                    f"{launch.class_name} asks Ray for {asked}, but {why}; leave this out of @ray.remote(...)"
                )
        if overlaps(launch) and not has_async_methods(launch.worker_class):
            raise UsageError(
                f"{launch.class_name} asks Ray for max_concurrency={launch.options['max_concurrency']}, but only "
                "calls of async methods, and of async generators of bandmaster.register, can overlap, and it has "
                "neither; leave this out of @ray.remote(...)"
            )
        return ActorWorkers(launch, _start_actor)


def overlaps(launch: Launch) -> bool:
    """Whether calls of the workers' async methods are to overlap."""
    return (launch.options.get("max_concurrency") or 1) > 1


def _start_actor(launch: ActorLaunch, rank: int) -> Any:
    """Start the actor of a rank on its slot."""
    slot = launch.slots[rank]
    slot.reservation.session.check(f"pool {slot.reservation.name!r}")
    share = math.floor(slot.share * 1e4) / 1e4  # Ray rounds resources to ten-thousandths
    taken = {name: amount * share for name, amount in launch.bundle.items() if name != "memory"}  # see `bundle_of`
    options = {key: value for key, value in launch.options.items() if key not in PLACED_BY_POOL}
    if launch.env:  # in the environment of its process from the start: modules read variables when they are imported
        given = options.get("runtime_env") or {}
        options["runtime_env"] = {**given, "env_vars": {**given.get("env_vars", {}), **launch.env}}
    if launch.is_detached:
        options["lifetime"] = "detached"
    actor = actor_class(launch.worker_class, OverlappingActor if overlaps(launch) else WorkerActor).options(
        **options,
        name=launch.worker_names[rank],
        num_cpus=taken.pop("CPU", 0),
        num_gpus=taken.pop("GPU", 0),
        resources=taken,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=slot.reservation.groups[slot.node],
            placement_group_bundle_index=slot.reservation.bundles[slot.node][slot.index],
        ),
    )
    deadline = time.monotonic() + (RENAME_TIMEOUT_S if launch.is_again else 0.0)
    while True:
        try:
            return actor.remote(f"[{launch.group} {rank}]")
        except ValueError as error:
            if time.monotonic() >= deadline:
                raise UsageError(
                    f"Ray refused to start worker {launch.worker_names[rank]!r}: {error}; actor names must be "
                    "unique in a namespace of Ray, so give every group a name of its own"
                ) from error
        time.sleep(POLL_S)  # Ray frees the name of a killed actor a little later


Bundles = list[tuple[tuple[int, str], tuple[str, ...]]]  # of each, its sort key and its GPUs


def _in_order(n_bundles: int) -> Bundles:
    return [((index, ""), ()) for index in range(n_bundles)]


def gpus_of_bundles(group: PlacementGroup) -> Bundles:
    """The sort key and the GPUs of each bundle of a placement group; only a task in a bundle can read its GPUs."""
    n_gpus = [int(bundle.get("GPU", 0)) for bundle in group.bundle_specs]
    if not any(n_gpus):
        return _in_order(group.bundle_count)
    asked = [
        backend.gpus_of_bundle.options(
            num_gpus=n, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)
        ).remote()
        for index, n in enumerate(n_gpus)
    ]
    found = ray.get(asked, timeout=START_TIMEOUT_S)
    return [(backend.device_key(gpus[0]), tuple(gpus)) for gpus in found]
