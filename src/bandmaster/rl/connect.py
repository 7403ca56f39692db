"""A ``torch.distributed`` process group across worker groups, for collectives between them.

::

    controller                    workers of a                          workers of b
    connect(a, b) ─ open a store ► rank 0: a TCPStore that listens
                  ─ its address ─► ranks 0 … m-1 of the process group   ranks m … m+n-1 of it
    connection.close() ──────────► destroy it                           destroy it
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from bandmaster import Dispatch, Execute, UsageError, Worker, as_completed, register
from bandmaster.rl.gloo_interface import choose_interface

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "connection"
TIMEOUT_S = 60.0


class _Facts(NamedTuple):
    """A rank's process, kind of device, the address by which others reach its group's rank 0, and its connections."""

    process: tuple[str, int]
    device: str
    address: str
    names: tuple[str, ...]


class Connectable(Worker):
    """Base class of workers that `connect` joins into process groups with workers of other groups.

    Attributes:
        process_groups: The process groups that this worker is in, by the name that `connect` was given.
    """

    process_groups: Mapping[str, ProcessGroup] = MappingProxyType({})
    _stores: Mapping[str, Any] = MappingProxyType({})

    @register(Dispatch.ONE_TO_ALL)
    def connection_facts(self) -> _Facts:
        """The facts about this rank that `connect` needs."""
        process, address = (socket.gethostname(), os.getpid()), os.environ.get("MASTER_ADDR", "")
        return _Facts(process, self.device.partition(":")[0], address, tuple(self.process_groups))

    @register(execute_mode=Execute.RANK_ZERO)
    def open_connection(self, name: str) -> tuple[str, int]:
        """Open a store on a socket that already listens, so that no process can take its port. Returns its address."""
        from torch.distributed import TCPStore

        host = os.environ["MASTER_ADDR"]
        listening = socket.create_server((host, 0), backlog=4096)
        port = listening.getsockname()[1]
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        self._stores = {**self._stores, name: store}
        return host, port

    @register(Dispatch.ONE_TO_ALL)
    def join_connection(
        self, name: str, backend: str, address: tuple[str, int], first_rank: int, n_ranks: int, timeout_s: float
    ) -> None:
        """Become rank ``first_rank + self.rank`` of the process group. Collective: all its ranks call it."""
        from torch.distributed import TCPStore, barrier

        choose_interface(address[0])
        timeout = timedelta(seconds=timeout_s)
        store = self._stores.get(name)
        if store is None or (store.host, store.port) != tuple(address):  # of a connection that could not be made
            store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
        self._stores = {**self._stores, name: store}
        group = _process_group(f"bandmaster/{name}", backend, store, first_rank + self.rank, n_ranks, timeout)
        self.process_groups = {**self.process_groups, name: group}
        barrier(group)

    @register(Dispatch.ONE_TO_ALL)
    def leave_connection(self, name: str) -> None:
        """Destroy the process group and its store on this rank, if it has them."""
        import torch.distributed as dist

        group = self.process_groups.get(name)
        self.process_groups = {other: group for other, group in self.process_groups.items() if other != name}
        self._stores = {other: store for other, store in self._stores.items() if other != name}
        if group is not None and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def _process_group(name: str, backend: str, store: Any, rank: int, n_ranks: int, timeout: timedelta) -> ProcessGroup:
    """Make a process group beside the default one, which need not exist, and register it with ``torch.distributed``."""
    from torch.distributed import distributed_c10d as c10d

    with _unbound_default_group():
        # No ranks of the default group are given, for these are others.
        group, _ = c10d._new_process_group_helper(
            n_ranks, rank, [], c10d.Backend(backend), store, c10d.GroupName(name), timeout=timeout
        )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(n_ranks)}
    return group


@contextmanager
def _unbound_default_group() -> Iterator[None]:
    """Unbind the default group from its GPU, because torch splits a new group from a bound default group."""
    import torch.distributed as dist

    default = dist.group.WORLD if dist.is_initialized() else None
    device = None if default is None else default.bound_device_id
    if default is None or device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


class Connection:
    """A process group across worker groups, as the controller knows it; made by `connect`. A context manager.

    Attributes:
        name: The name by which workers find it in their ``process_groups``.
        backend: Its backend, such as ``"gloo"``.
        n_ranks: Number of its ranks.
    """

    def __init__(self, name: str, backend: str, groups: tuple[Any, ...]) -> None:
        self.name, self.backend = name, backend
        self.n_ranks = sum(group.world_size for group in groups)
        self._groups = groups

    def ranks(self, group: Any) -> range:
        """The ranks that the workers of a group have in the process group, in their order.

        Raises:
            UsageError: The group is not part of the connection.
        """
        first = 0
        for other in self._groups:
            if other is group:
                return range(first, first + other.world_size)
            first += other.world_size
        raise UsageError(f"{group.name!r} is not part of {self.name!r}; it has {_names(self._groups)}")

    def close(self) -> None:
        """Destroy the process group on all ranks. Closing twice is fine.

        Groups with a dead worker are skipped: call it after ``group.replace(rank)``, before connecting anew.
        """
        left = [group.leave_connection.submit(self.name) for group in self._groups if group.healthy]
        for future in left:
            future.result()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(*groups: Any, backend: str | None = None, name: str = NAME, timeout: float = TIMEOUT_S) -> Connection:
    """Make a ``torch.distributed`` process group of all workers of some groups.

    Its ranks are those of the first group, then those of the second, and so on. Workers find it as
    ``self.process_groups[name]`` and pass it to ``torch.distributed``: ``dist.broadcast(tensor, 0, group)``. Their
    default process groups stay as they are; a worker needs none. A method that calls a collective has to run on all
    groups at the same time: submit it to each, then wait.

    Args:
        *groups: Groups whose workers are `Connectable`, each worker in a process of its own.
        backend: Backend of ``torch.distributed``; by default gloo for tensors on the CPU, and NCCL for those on GPUs if
            all workers have one.
        name: Name in the workers' ``process_groups``; another one for each connection that a worker is in.
        timeout: Seconds within which all ranks have to join, and after which collectives fail.

    Raises:
        UsageError: Workers are not `Connectable`, share a process, or are in a connection of that name.
        Exception: All errors of calls; then no rank is in the process group.

    Example:
        >>> import bandmaster as bm, torch, torch.distributed as dist
        >>> from bandmaster import rl
        >>> class Trainer(rl.Connectable):
        ...     @bm.register(bm.Dispatch.ONE_TO_ALL)
        ...     def share(self, value):
        ...         tensor = torch.tensor([value])
        ...         dist.broadcast(tensor, 0, self.process_groups["connection"])
        ...         return tensor.item()
        >>> with bm.ResourcePool([1]) as a, bm.ResourcePool([2]) as b:
        ...     trainer, rollout = bm.WorkerGroup(a, Trainer), bm.WorkerGroup(b, Trainer)
        ...     with rl.connect(trainer, rollout):
        ...         sent, received = trainer.share.submit(7), rollout.share.submit(0)
        ...         received.result()
        [7, 7]

    Source: the process group of trainer and engine in OpenRLHF, which has its own default group on both sides.
    """
    facts = [_facts(group) for group in groups]
    everyone = [fact for of_group in facts for fact in of_group]
    _check(everyone, groups, name)
    chosen = backend or ("gloo" if any(fact.device == "cpu" for fact in everyone) else "cpu:gloo,cuda:nccl")
    connection = Connection(name, chosen, groups)
    # A loopback address, which other hosts cannot reach, is the last choice.
    opener = min(zip(facts, groups, strict=True), key=lambda pair: pair[0][0].address.startswith("127."))[1]
    try:
        address = opener.open_connection(name)
        joining = [
            group.join_connection.submit(name, chosen, address, connection.ranks(group)[0], connection.n_ranks, timeout)
            for group in groups
        ]
        errors = [error for future in as_completed(joining) if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
    except BaseException:
        connection.close()
        raise
    return connection


def _facts(group: Any) -> list[_Facts]:
    if not callable(getattr(group, "connection_facts", None)):
        raise UsageError(
            f"the workers of {getattr(group, 'name', group)!r} cannot be connected; derive them from rl.Connectable"
        )
    facts: list[_Facts] = group.connection_facts()
    return facts


def _check(facts: Sequence[_Facts], groups: Sequence[Any], name: str) -> None:
    processes = {fact.process for fact in facts} - {(socket.gethostname(), os.getpid())}
    if len(processes) < len(facts):
        raise UsageError(
            f"a process group takes a process for each of {len(facts)} ranks, and those of {_names(groups)} have "
            f'{len(processes)} of their own; use backend "local" or "ray", and groups that share no workers'
        )
    if any(name in fact.names for fact in facts):
        raise UsageError(f"workers of {_names(groups)} are in a connection {name!r}; close it, or choose another name")


def _names(groups: Sequence[Any]) -> str:
    return " and ".join(repr(group.name) for group in groups) or "no groups"
