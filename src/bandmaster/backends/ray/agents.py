"""Agents on Ray: an actor without resources on each node that has ranks of a group, and the controller's links to them.

Ray starts and ends agents; they fork the workers of their node, as backend ``"local"`` does, so that the controller
sends one message per node to start a group, as it does to call one. An agent ends with its controller, and its workers
with it. The groups of a controller share the agent of a node, unless a ``runtime_env`` of their own sets them apart.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bandmaster.backends.host_workers import HostShare, HostWorkers
from bandmaster.backends.local import LocalBackend, default_modules
from bandmaster.backends.ray.session import START_TIMEOUT_S, RaySession
from bandmaster.callers.door import Door
from bandmaster.callers.passed import PassedCalls
from bandmaster.contract import NOT_STARTED, Launch, ShowOutput
from bandmaster.errors import ClosedError, PlacementError, ResourceError
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Refused, Secret
from bandmaster.hosts.link import Address, Purpose, connect
from bandmaster.hosts.links import Agent, AgentLinks
from bandmaster.hosts.workers import AgentWorkers
from bandmaster.platform.limits import start_thread
from bandmaster.platform.locks import run_if_free
from bandmaster.platform.settings import AGENTS_DOOR

END_TIMEOUT_S = 2.0  # for Ray to end an agent
PROBE_TIMEOUT_S = 3.0  # for a host to take a connection
PATIENCE_S = 24 * 3600.0  # of an agent, for its controller to connect: Ray ends it if the controller ends before
_log = logging.getLogger(__name__)

Place = tuple[str, Address, int]  # of an agent: the name of its host, where it listens, and its process


class AgentKey(NamedTuple):
    """The identity of an agent of a controller.

    Attributes:
        node: Ray's id of its node.
        runtime_env: The ``runtime_env`` that it was started with, as JSON; empty for that of the job.
    """

    node: str
    runtime_env: str = ""


class BandmasterAgent:
    """The actor of an agent."""

    def bandmaster_open(
        self, secret: Secret, controller: str, paths: Sequence[str], argv: Sequence[str], modules: Sequence[str]
    ) -> Place:
        """Listen for the controller, and serve it until it is gone; then this process ends, and the workers with it.

        Args:
            secret: What both ends of a link prove.
            controller: What messages call the controller.
            paths: Its ``sys.path``.
            argv: Its ``sys.argv``.
            modules: What a zygote imports by default.
        """
        address = ray.util.get_node_ip_address()
        sys.path.extend(path for path in paths if path not in sys.path and os.path.isdir(path))
        sys.argv[:] = argv
        local = LocalBackend(are_zygotes_kept=True)
        local.prepare(modules)

        def start(said: tuple[Launch, HostShare], shows: ShowOutput) -> tuple[HostWorkers, Sequence[int]]:
            launch, share = said
            return local.start_ranks(launch, replace(share, address=address), (), shows), share.ranks

        # at the end, zygotes wait for their workers: where nobody waits for orphans, these would stay as zombies
        server = AgentServer(secret, address, controller, start, local.close)
        os.environ[AGENTS_DOOR] = Door(PassedCalls(server)).address
        start_thread("bandmaster-agent", self._serve, server)
        return os.uname().nodename, server.address, os.getpid()

    @staticmethod
    def _serve(server: AgentServer) -> None:
        try:
            server.run(PATIENCE_S)
        except BaseException:
            _log.exception("the agent of this host has failed")
        finally:
            os._exit(0)


class RayAgents:
    """The agents of this controller. They end when no pool has slots, no group ranks and no future rows on their nodes.

    Any thread may call its methods. Finalizers may call `release` and `release_agents` at any moment: neither blocks.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()  # held while agents are started or ended
        self._is_due = False  # to look which ones are not needed
        self._links: AgentLinks | None = None
        self._actors: dict[AgentKey, Any] = {}
        self._opened: dict[AgentKey, Any] = {}  # the ObjectRef of the facts of agents without a link
        self._held: dict[weakref.ref[object], Sequence[AgentKey]] = {}  # by reservation, also one that nobody has
        self._session: RaySession | None = None
        self._numbers = itertools.count()

    def prepare(self, reservation: object, keys: Sequence[AgentKey]) -> None:
        """Start agents for a reservation, without waiting for them; they stay until it is released."""
        with self._lock:
            self._held[weakref.ref(reservation)] = keys
            self._begin(keys)
        self._look_if_due()

    def release(self, reservation: object) -> None:
        """End the agents that were started for a reservation, unless they are needed for more."""
        self._held.pop(weakref.ref(reservation), None)
        self.release_agents()

    def start(self, launch: Launch, places: Mapping[AgentKey, HostShare]) -> AgentWorkers:
        """Start the workers of a group by the agents of their nodes.

        Raises:
            PlacementError: An agent cannot be started or be reached, or it cannot start its workers.
        """
        by_rank = {rank: key for key, place in places.items() for rank in place.ranks}
        keys = [by_rank[rank] for rank in range(len(launch.slots))]

        def said(ranks: Sequence[int]) -> tuple[Launch, HostShare]:
            return launch.sent(), replace(places[keys[ranks[0]]], ranks=tuple(ranks))

        workers: AgentWorkers | None = None
        try:
            with self._lock:
                reached = self._reach(list(places))
                assert self._links is not None, "agents were reached by it"
                name = f"{launch.group} {next(self._numbers)}"
                workers = AgentWorkers(name, self._links, [reached[key] for key in keys])
                workers.hold_agents()
            self._look_if_due()
            workers.begin(launch, said, lambda rank: self._again(keys[rank], rank))
        except BaseException:
            if workers is not None:
                workers.stop(NOT_STARTED)
            raise
        return workers

    def _again(self, key: AgentKey, rank: int) -> Agent:
        """The agent of a rank whose own is gone.

        Raises:
            PlacementError: Its node is lost.
        """
        if not is_alive(key.node):
            raise host_lost(rank)
        with self._lock:
            return self._reach([key])[key]

    def _reach(self, keys: Sequence[AgentKey]) -> dict[AgentKey, Agent]:
        """The agents of some nodes, which are started where there are none.

        Raises:
            PlacementError: One cannot be started or be reached.
        """
        links = self._begin(keys)
        for key in [key for key in keys if key in self._opened]:
            place: Place | None = None
            try:
                host, address, pid = place = ray.get(self._opened.pop(key), timeout=START_TIMEOUT_S)
                link = connect(address, links.secret, Purpose.MESSAGES)
                with links.lock:
                    links.add(Agent(link, key, host, address, pid))
            except (RayError, OSError, Refused) as error:
                self._is_due = True
                raise _unreachable(key, place, error) from error
        return {key: links.agents[key] for key in keys}

    def _begin(self, keys: Sequence[AgentKey]) -> AgentLinks:
        """Start agents where there are none. Returns the links of the present session; those of a former are closed."""
        if self._session is None or not self._session.is_current:
            self._close()
            self._actors, self._opened, self._session = {}, {}, RaySession()
        self._links = self._links or AgentLinks(self.release_agents)
        for key in keys:
            self._open(self._links, key)
        return self._links

    def _open(self, links: AgentLinks, key: AgentKey) -> None:
        """Start an agent, unless there is one."""
        if key in links.agents or key in self._opened:
            return
        me = f"pid {os.getpid()} on {socket.gethostname()}"
        strategy = NodeAffinitySchedulingStrategy(key.node, soft=False)
        more = {"runtime_env": json.loads(key.runtime_env)} if key.runtime_env else {}
        made = ray.remote(BandmasterAgent).options(num_cpus=0, scheduling_strategy=strategy, max_restarts=0, **more)
        self._actors[key] = made.remote()
        said = links.secret, me, tuple(sys.path), tuple(sys.argv), default_modules()
        self._opened[key] = self._actors[key].bandmaster_open.remote(*said)

    def lost_nodes(self) -> set[str]:
        """The nodes that cannot be reached, of those whose agents are gone although they were not ended."""
        has_link = set() if self._links is None else set(self._links.agents)
        gone = {key.node for key in self._actors.keys() - has_link - self._opened.keys()}
        asked = [node for node in (ray.nodes() if gone else ()) if node["Alive"] and node["NodeID"] in gone]
        with ThreadPoolExecutor(max(1, len(asked))) as threads:  # of all nodes at the same time
            are_reached = list(threads.map(_takes_connections, asked))
        return {node["NodeID"] for node, is_reached in zip(asked, are_reached, strict=True) if not is_reached}

    def release_agents(self) -> None:
        """End the agents that are not needed, now or when a thread that starts or ends some has done so."""
        self._is_due = True
        self._look_if_due()

    def _look_if_due(self) -> None:
        while self._is_due and not self._lock._is_owned():  # else this thread looks when it has done so
            links = self._links
            if links is not None and links.lock.is_inside:  # a finalizer within a call: the next heartbeat looks
                return
            if not run_if_free(self._lock, self._end_unneeded):
                return

    def _end_unneeded(self) -> None:
        self._is_due = False
        if self._links is None:
            return
        held = {key for holder, keys in list(self._held.items()) if holder() is not None for key in keys}
        for key, actor in list(self._actors.items()):
            agent = self._links.agents.get(key)
            if key in held or (agent is not None and agent.is_needed):
                continue
            if agent is not None:
                with contextlib.suppress(ClosedError, TimeoutError, ResourceError):
                    self._links.answers([self._links.ask(agent, AgentServer.end)], END_TIMEOUT_S)
            if self._session is not None and self._session.is_current:
                ray.kill(actor)  # before its link ends, at which it would end by itself: Ray would report that
            if agent is not None:
                agent.await_end(END_TIMEOUT_S)
                with self._links.lock:
                    self._links.lose(agent)
            self._opened.pop(key, None)
            del self._actors[key]  # last: Ctrl-C may come before, and then it is ended the next time
        if not self._actors:
            self._close()

    def _close(self) -> None:
        links, self._links = self._links, None
        if links is not None:
            links.close()


def host_lost(rank: int) -> PlacementError:
    """The error of a rank that cannot be started, as the host of its slot is lost."""
    return PlacementError(
        f"rank {rank} cannot be started on its slot, as its host is lost; restart() the group, if its pool was made "
        "with spare nodes (spares=), or make another one on a pool of the hosts that are left"
    )


def _unreachable(key: AgentKey, place: Place | None, error: Exception) -> PlacementError:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    if place is None:
        return PlacementError(f"Ray could not start the agent of node {key.node}, which starts its workers: {reason}")
    host, (address, port), _ = place
    return PlacementError(
        f"this process cannot connect to the agent on host {host} at {address}:{port}, which starts the workers "
        f"there: {reason}; let the hosts of the cluster connect to each other on all ports, and see `bandmaster doctor "
        "--ray`"
    )


def _takes_connections(node: Mapping[str, Any]) -> bool:
    """Whether the process by which Ray keeps a node takes a connection. Ray itself takes a while to notice."""
    with contextlib.suppress(OSError):
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        socket.create_connection(address, timeout=PROBE_TIMEOUT_S).close()
        return True
    return False


def is_alive(node: str) -> bool:
    """Whether Ray takes a node for alive, by its id."""
    with contextlib.suppress(RayError):
        return any(known["Alive"] for known in ray.nodes() if known["NodeID"] == node)
    return False
