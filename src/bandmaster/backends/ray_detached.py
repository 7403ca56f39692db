"""The detached groups of a Ray cluster, which any controller on it finds by their names.

::

    controller 1 ── claim, publish ──► Ray's key-value store   "group actor"        a `_Record`, as JSON
                                                               "description actor"  pickled: class, meshes, slots
    controller 2 ── find ────────────► both
                 ── attach ──────────► actors "actor_0:0" …, in Ray's namespace "bandmaster"
                 ── end ─────────────► kills the actors, removes the placement groups, and last the entries

The descriptions are in the key-value store of the cluster's head, rather than in an actor. An actor runs its calls in
order, so that a busy one would not answer; and the description would be lost with a rank that died. The store answers
whatever the workers do, takes a name for one controller alone, and lists the names. The record is JSON, which can be
read, and the group ended, whatever version of bandmaster wrote it; the description is unpickled by the same version.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray._private.state import jobs
from ray._raylet import PlacementGroupID
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util.placement_group import PlacementGroup, remove_placement_group

from bandmaster.backends.ray_attached import NamedWorkers
from bandmaster.codec import Payload
from bandmaster.contract import Launch
from bandmaster.errors import UsageError
from bandmaster.platform.version import VERSION

__all__ = ["NAMESPACE", "RayDetachedGroups"]

NAMESPACE = "bandmaster"  # of the actors' names and of the entries: controllers have namespaces of their own
END_TIMEOUT_S = 10.0  # for Ray to free the names of killed actors
POLL_S = 0.02  # Ray has no event for "a name became free"
_GROUP, _DESCRIPTION = "group ", "description "
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Record:
    """What is known of a detached group without unpickling anything.

    Attributes:
        name: Its name.
        identity: Tells it from later groups of the same name.
        version: The version of bandmaster that started it.
        job: Ray's id of the job of its first controller.
        workers: The names of its actors, in rank order.
        placement_groups: The ids of its placement groups.
        is_started: Whether all workers were constructed.
    """

    name: str
    identity: str
    version: str
    job: str
    workers: Sequence[str]
    placement_groups: Sequence[str]
    is_started: bool = False

    @classmethod
    def read(cls, name: str) -> _Record | None:
        """The record of the group of this name; None if there is none."""
        found = _internal_kv_get(_GROUP + name, namespace=NAMESPACE)
        return None if found is None else cls(**json.loads(found))

    def write(self, overwrite: bool) -> bool:
        """Store the record; False if another one is there and is not to be overwritten."""
        text = json.dumps(asdict(self))
        is_there = _internal_kv_put(_GROUP + self.name, text, overwrite, namespace=NAMESPACE)
        return overwrite or not is_there

    @property
    def is_abandoned(self) -> bool:
        """Whether its controller has ended as it started the group."""
        return not self.is_started and all(job["IsDead"] for job in jobs() if job["JobID"] == self.job)


class RayDetachedGroups:
    """The detached groups of the cluster that this process is connected to; see `contract.DetachedGroups`.

    Args:
        keep: Called with the id of a placement group of a group that ends. Whether a pool of this process has it, and
            removes it later.
    """

    def __init__(self, keep: Callable[[str], bool]) -> None:
        self._keep = keep

    def check_free(self, name: str) -> None:
        """As `bandmaster.contract.DetachedGroups.check_free`."""
        record = _Record.read(name)
        if record is None:
            return
        if not record.is_abandoned:
            raise _taken(name)
        _log.warning("the controller of detached group %r has ended before the group had started; ending it", name)
        self.end(name, record.identity)

    def claim(self, launch: Launch, identity: str, description: Payload) -> None:
        """As `bandmaster.contract.DetachedGroups.claim`."""
        groups = dict.fromkeys(_id_of(slot.reservation.groups[slot.node]) for slot in launch.slots)
        job = ray.get_runtime_context().get_job_id()
        record = _Record(launch.group, identity, VERSION, job, launch.worker_names, list(groups))
        if not record.write(overwrite=False):
            raise _taken(launch.group)
        pickled = pickle.dumps(description, protocol=5)
        _internal_kv_put(_DESCRIPTION + launch.group, pickled, namespace=NAMESPACE)

    def publish(self, name: str) -> None:
        """As `bandmaster.contract.DetachedGroups.publish`."""
        record = _Record.read(name)
        if record is not None:  # else another controller has ended it meanwhile
            replace(record, is_started=True).write(overwrite=True)

    def find(self, name: str) -> tuple[str, Payload]:
        """As `bandmaster.contract.DetachedGroups.find`."""
        record = _Record.read(name)
        if record is None:
            known = ", ".join(map(repr, _names())) or "none"
            raise UsageError(f"no detached group is called {name!r} on this cluster; its detached groups: {known}")
        if record.version != VERSION:
            raise UsageError(
                f"detached group {name!r} was started by bandmaster {record.version}, but this is {VERSION}; attach to "
                "it with the same version"
            )
        if not record.is_started:
            why = (
                "its controller has ended meanwhile, so start it again" if record.is_abandoned else "attach to it later"
            )
            raise UsageError(f"detached group {name!r} has not started: {why}")
        description: Payload = pickle.loads(_internal_kv_get(_DESCRIPTION + name, namespace=NAMESPACE))
        return record.identity, description

    def attach(self, launch: Launch) -> NamedWorkers:
        """As `bandmaster.contract.DetachedGroups.attach`."""
        return NamedWorkers(launch, [_actor(name) for name in launch.worker_names])

    def end(self, name: str, identity: str) -> None:
        """As `bandmaster.contract.DetachedGroups.end`. Returns when the names of the actors are free."""
        record = _Record.read(name)
        if record is None or record.identity != identity:
            return
        for actor in filter(None, map(_actor, record.workers)):
            ray.kill(actor)
        deadline = time.monotonic() + END_TIMEOUT_S
        while any(map(_actor, record.workers)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for group in record.placement_groups:
            if not self.is_used(group, but_for=name) and not self._keep(group):
                remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))
        for kind in (_DESCRIPTION, _GROUP):  # the record last: until then, this can be done again
            _internal_kv_del(kind + name, namespace=NAMESPACE)

    @staticmethod
    def is_used(group: str, but_for: str | None = None) -> bool:
        """Whether a detached group has workers in a placement group, which is given by its id."""
        records = (_Record.read(name) for name in _names() if name != but_for)
        return any(group in record.placement_groups for record in records if record is not None)


def _names() -> list[str]:
    keys = _internal_kv_list(_GROUP, namespace=NAMESPACE)
    return sorted(key.decode().removeprefix(_GROUP) for key in keys)


def _actor(name: str) -> Any:
    """The actor of this name; None if it is dead."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _id_of(group: PlacementGroup) -> str:
    return str(group.id.hex())


def _taken(name: str) -> UsageError:
    return UsageError(
        f"this cluster has a detached group called {name!r} already: WorkerGroup.attach({name!r}) returns it, and "
        f"WorkerGroup.attach({name!r}).end() ends it; or choose another name"
    )
