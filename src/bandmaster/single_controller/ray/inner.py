"""The group inside a `RayWorkerGroup`: one that has started its workers, or one attached to existing workers."""

from __future__ import annotations

import string
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bandmaster.calls.request import CallSite
from bandmaster.calls.submission import Submitter
from bandmaster.contract import Launch, Slot, Workers
from bandmaster.errors import UsageError, WorkerDied
from bandmaster.groups.group import WorkerGroup as CoreGroup
from bandmaster.lifecycle.checks import checked_mesh
from bandmaster.lifecycle.death_watch import DeathWatch
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.plan.mesh import Mesh
from bandmaster.pool import ResourcePool
from bandmaster.single_controller.ray.launch import ACTORS, ActorLaunch
from bandmaster.single_controller.ray.register_center import rank_zero_info, register
from bandmaster.turns.turns import TurnTaker

__all__ = ["AttachedGroup", "StartedGroup", "check_backend", "nsight_options", "variables_of"]

ENDED = "the group was closed by its owner"
_named: dict[str, weakref.ref[StartedGroup]] = {}  # by name, the last group of actors: Ray frees their names late

PROTECTED = ("WORLD_SIZE", "RANK", "WG_PREFIX", "WG_BACKEND", "RAY_LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class StartedGroup(CoreGroup):
    """A bandmaster group with verl's additions: actor options, environment variables and detached actors."""

    _is_numbered = False  # its actors are found by their names, each of which Ray gives once

    def __init__(
        self,
        pool: ResourcePool,
        given: Any,
        mesh: Mesh | None,
        name_prefix: str | None,
        start_timeout: float | None,
        variables: Mapping[str, str],
        is_detached: bool,
        options: Mapping[str, Any],
    ) -> None:
        self._variables, self._is_detached, self._more_options = variables, is_detached, options
        self._register_center: Any = None  # its handle, with which it ends
        if name_prefix is None:  # random letters as in verl, so that names differ between controllers
            name_prefix = pool.name_prefix + "".join(string.ascii_letters[byte % 52] for byte in uuid.uuid4().bytes[:6])
        super().__init__(pool, given, mesh=mesh, name_prefix=name_prefix, start_timeout=start_timeout)

    @property
    def prefix(self) -> str:
        """The prefix of the workers' names."""
        return self.name.removesuffix(self._cls.__name__)

    def start_register_center(self) -> None:
        """Start the actor that programs of verl up to 0.5 ask for the nodes of the workers, if they are actors."""
        if self._register_center is None and self._ownership.is_open and self._pool._lease.backend == ACTORS:
            workers: Any = self._ownership.workers()
            self._register_center = register(self.prefix, workers.address, workers.nodes, self._is_detached)

    def _start(self, launch: Launch) -> None:
        options = {**launch.options, **self._more_options}
        variables = {**self._variables, "WG_PREFIX": launch.group.removesuffix(launch.class_name)}
        launch = replace(launch, options=options, variables=variables)
        if self._pool._lease.backend == ACTORS:
            former = _named.get(launch.group)
            holder = None if former is None else former()
            is_taken = holder is not None and holder is not self and holder._ownership.is_open
            if not is_taken:
                _named[launch.group] = weakref.ref(self)
            launch = ActorLaunch.of(
                launch,
                worker_class=self._cls,
                uses_gpu=self._pool.use_gpu,
                bundle=launch.slots[0].reservation.groups[launch.slots[0].node].bundle_specs[0],
                is_detached=self._is_detached,
                is_again=former is not None and not is_taken,
            )
        super()._start(launch)

    def _watch_again(self) -> None:
        super()._watch_again()
        if self._register_center is not None:
            workers: Any = self._ownership.workers()
            self._register_center.set_rank_zero_info.remote(rank_zero_info(workers.address))

    def _turn_taker(self) -> TurnTaker:
        if (self._more_options.get("max_concurrency") or 1) > 1:
            raise UsageError(
                f"{self._cls.__name__} asks Ray for max_concurrency, with which calls overlap in an order that Ray "
                "chooses, so that it cannot take turns; leave this out of @ray.remote(...)"
            )
        return super()._turn_taker()

    def close(self) -> None:
        """End the workers, also those whose handles are kept, except detached ones; release their slots."""
        if not self._is_detached:
            self._ownership.why_stopped = ENDED
        super().close()
        self._register_center = None  # a group of the same prefix makes one of its own


StartedGroup.__name__ = "RayWorkerGroup"  # the name that users know, for messages and tables


class AttachedGroup:
    """Existing workers of another group, with the members of a group that a `RayWorkerGroup` uses."""

    def __init__(self, handles: Sequence[Any] | None, names: Sequence[str] | None, cls: Any, mesh: Mesh | None) -> None:
        if not handles and not names:
            raise UsageError("a RayWorkerGroup needs a resource_pool, or the names or handles of existing workers")
        if cls is None:
            raise UsageError("a group of existing workers needs their class: pass ray_cls_with_init")
        import ray  # only Ray's actors have names and handles

        actors = list(handles) if handles else [ray.get_actor(name) for name in names or ()]
        n = len(actors)
        self._cls, self.workers = cls, actors
        self._watches: list[DeathWatch] = []
        self.name = cls.__name__
        self.worker_names = list(names) if names else [f"{cls.__name__}_{rank}" for rank in range(n)]
        self.mesh = checked_mesh(mesh, n, f"a group of {n} existing workers")
        marked = f"{cls.__name__}_"  # behind the prefix: the class, and the worker's place
        self.prefix = self.worker_names[0].rpartition(marked)[0] if names else ""
        slots = tuple(Slot(None, 0, rank, 0, rank, n, 1.0) for rank in range(n))
        launch = ActorLaunch(self.name, cls.__name__, self.mesh, {}, slots, tuple(self.worker_names), worker_class=cls)
        self._ownership = Ownership(self, self.name)
        self._ownership.set_workers(_attached_workers(launch, actors))
        self._submitter = Submitter(self._ownership.workers, cls, self.mesh, self.name)

    def start_register_center(self) -> None:
        """Do nothing: the group that has started the workers knows their nodes."""

    def on_death(self, callback: Callable[[WorkerDied], object]) -> None:
        """Call ``callback`` once for each death of a worker; see `bandmaster.WorkerGroup.on_death`."""
        site = CallSite(self.name, self.mesh, self.name)
        self._watches.append(DeathWatch(self._ownership.workers(), site, callback))

    def close(self) -> None:
        """Release the workers, which live on."""
        for watch in self._watches:
            watch.end()
        self._ownership.close()

    def __repr__(self) -> str:
        return f"<attached to {len(self.workers)} workers of {self.name}>"


def _attached_workers(launch: ActorLaunch, actors: Sequence[Any]) -> Workers:
    from bandmaster.single_controller.ray.actor_workers import AttachedWorkers  # here, as it imports Ray

    return AttachedWorkers(launch, actors)


def check_backend(pool: ResourcePool, worker_env: Mapping[str, str] | None, detached: bool) -> None:
    """Refuse options that the pool's backend does not support."""
    if worker_env and pool.backend == "inprocess":
        raise UsageError("worker_env needs workers with processes of their own, but the pool is on backend 'inprocess'")
    if detached and pool._lease.backend != ACTORS:
        raise UsageError(f"detached=True needs a RayResourcePool, got {pool!r}")


def variables_of(pool: ResourcePool, asked: Mapping[str, str] | None) -> dict[str, str]:
    """The environment variables that verl's groups set in all workers, and those that the user asks for."""
    taken = sorted(set(PROTECTED) & set(asked or {}))
    if taken:
        raise ValueError(f"worker_env must not set {', '.join(taken)}: the group sets it")
    for name, value in (asked or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"worker_env must be a dict of strings by name, got {name!r}: {value!r}")
    sizes: Sequence[int] = getattr(pool, "store", pool.process_on_nodes)
    return {**(asked or {}), "WG_BACKEND": "ray", "RAY_LOCAL_WORLD_SIZE": str(sizes[0])}


def nsight_options(options: Mapping[str, Any], n_steps: int) -> dict[str, Any]:
    """Options of nsight with an end of the capture, by default after six ranges per step."""
    given = dict(options)
    if given.get("capture-range-end") is None:
        given["capture-range-end"] = f"repeat-shutdown:{6 * n_steps}"
    return given
