"""The connection of this process to Ray: made when a pool needs one, and then ended with the last pool."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.util.client

from bandmaster.backends.ray.in_worker import teach_codec
from bandmaster.errors import ClosedError, UsageError
from bandmaster.platform.forks import n_forks
from bandmaster.platform.limits import working_directory
from bandmaster.platform.locks import SigintSafeLock, run_if_free

START_TIMEOUT_S = 300.0  # for Ray to start a process
PLACE = "bandmaster_place"  # custom resource of a private Ray instance; each slot takes one unit
_NO_CLIENT = (
    "backend 'ray' does not work over Ray Client (ray://), because the controller must be part of the cluster; run the "
    "script on a node of the cluster, with `ray job submit` for example, and without ray:// in ray.init and RAY_ADDRESS"
)


class RaySession:
    """A connection of this process to Ray, from `ray.init` to `ray.shutdown`. It is not valid in forks.

    It asks Ray nothing: in a process that is not connected, or no longer, `ray.get_runtime_context` starts an instance.
    """

    def __init__(self) -> None:
        node = _node()
        self._node, self._n_forks = None if node is None else weakref.ref(node), n_forks()

    def __reduce__(self) -> tuple[object, ...]:
        return RaySession, ()  # in another process it is the connection of that process

    @property
    def is_current(self) -> bool:
        """Whether Ray uses this connection. If not, Ray's calls start an instance, reach another, or hang in a fork."""
        node = _node()
        return node is not None and self._node is not None and self._node() is node and self._n_forks == n_forks()

    def check(self, what: str) -> None:
        """Check that Ray can still be called for a pool or group that was made in this session.

        Args:
            what: The pool or group, as the message names it.

        Raises:
            ClosedError: The session has ended.
        """
        if not self.is_current:
            raise ClosedError(self.ended(what))

    def ended(self, what: str) -> str:
        """The message of errors about a pool or group whose session has ended."""
        return f"the Ray session of {what} has ended (ray.shutdown()); create the pool and its groups again"


def _node() -> Any:
    """Ray's object for its node, which each `ray.init` makes anew; None if this process is not connected."""
    return ray._private.worker.global_worker.node


class RayConnection:
    """Connects this process to Ray when a reservation needs it, and disconnects it after the last one.

    If a cluster is running, it is joined. Otherwise this starts a private Ray instance, in which CPUs are not counted.
    Any thread may call its methods; finalizers may call `end_hold` at any moment.
    """

    def __init__(self) -> None:
        self.is_embedded = False  # whether Ray is a private instance
        self._session: RaySession | None = None  # that was made here last
        self._holders: set[weakref.ref[Any]] = set()  # reservations, also those that Ctrl-C has left with nobody
        self._connecting = threading.RLock()  # held while this connects or disconnects; re-entrant for finalizers

    def hold(self, reservation: Any) -> None:
        """Stay connected until `end_hold` is called with a reservation."""
        self._holders.add(weakref.ref(reservation))

    def end_hold(self, reservation: Any) -> None:
        """A reservation was released; disconnect if it was the last one and the connection was made here.

        If another thread connects, which is to reserve slots, that one looks later.
        """
        self._holders.discard(weakref.ref(reservation))
        run_if_free(self._connecting, self._disconnect_if_idle)

    def _disconnect_if_idle(self) -> None:
        sessions = [held.session for holder in list(self._holders) if (held := holder()) is not None]
        is_used = any(session is None or session.is_current for session in sessions)
        if self._is_ours and not is_used:
            ray.shutdown()
            self.is_embedded = False

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """Let no other thread disconnect during the block; afterwards disconnect if nothing is reserved."""
        making = _Making()
        with self._connecting:
            self.hold(making)
        try:
            yield
        finally:
            self.end_hold(making)

    def connect(self) -> None:
        """Connect to Ray, unless this process is connected. Threads that come here meanwhile wait.

        Joins the cluster that RAY_ADDRESS names or that runs on this machine, else starts a private Ray instance.

        Raises:
            UsageError: The cluster can only be reached through Ray Client.
            ResourceError: The working directory was removed.
        """
        teach_codec()
        with self._connecting:
            if ray.is_initialized():
                if ray.util.client.ray.is_connected():
                    raise UsageError(_NO_CLIENT)
                self.is_embedded = self.is_embedded and self._is_ours  # else the user has replaced our connection
                return
            self.is_embedded = False
            working_directory()  # raises if it was removed; ray.init needs it
            cluster = running_cluster()
            if cluster is not None:
                ray.init(cluster, logging_level=logging.WARNING)
                self._session = RaySession()
            else:
                options = {"include_dashboard": False, "logging_level": logging.WARNING, "resources": {PLACE: 1e6}}
                # Ray would start processes for tasks, which groups do not need, beside those that they wait for.
                with SigintSafeLock():  # Ctrl-C comes then: Ray would leave the processes that it has started
                    ray.init("local", **options, _system_config={"prestart_worker_first_driver": False})
                    self.is_embedded, self._session = True, RaySession()

    @property
    def _is_ours(self) -> bool:
        """Whether the present connection was made here."""
        return self._session is not None and self._session.is_current


class _Making:
    """Stands for a reservation that is being made."""

    session = None


def running_cluster() -> str | None:
    """Address of the cluster that `ray.init` would join; None if there is no cluster or the recorded one has ended.

    Raises:
        UsageError: RAY_ADDRESS asks for Ray Client.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address:
        if address.startswith("ray://"):
            raise UsageError(_NO_CLIENT)
        return address
    directory = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with contextlib.suppress(OSError, ValueError):
        recorded = Path(directory, "ray", "ray_current_cluster").read_text().strip()
        host, _, port = recorded.rpartition(":")
        socket.create_connection((host, int(port)), timeout=2.0).close()
        return recorded
    return None
