"""Agents on Ray: an actor without resources on each host that has ranks of a group, and what the controller does there.

Ray places, starts, monitors and ends agents and workers. An agent starts the actors of its own host, so that the
controller sends one message per host to start a group, as it does to call one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bandmaster.backends.agents.fabric import Agent, Fabric, link_of
from bandmaster.backends.agents.messages import FOR_MESSAGES
from bandmaster.backends.agents.server import AgentServer, Host
from bandmaster.backends.agents.workers import AgentWorkers
from bandmaster.backends.ray_attached import AdoptedWorkers
from bandmaster.backends.ray_session import RaySession
from bandmaster.backends.ray_workers import START_TIMEOUT_S, RayWorkers
from bandmaster.contract import CLOSED, NOT_STARTED, Call, Launch, Reply, Slot, WorkerRecord
from bandmaster.errors import ClosedError, PlacementError
from bandmaster.failure import Failure
from bandmaster.platform.limits import start_thread
from bandmaster.transport.handshake import HANDSHAKE_TIMEOUT_S, Refused, Secret, greet
from bandmaster.transport.probes import answering

__all__ = ["RayAgentWorkers", "RayAgents", "nodes_of"]

END_TIMEOUT_S = 2.0  # for Ray to end an agent
PROBE_TIMEOUT_S = 3.0  # for a host to take a connection
NOTICED_AFTER_S = 30.0  # Ray itself knows by then which hosts are lost
PATIENCE_S = 60.0  # of an agent, for its controller to connect
StartActor = Callable[[Launch, int], Any]
_log = logging.getLogger(__name__)


class AgentFacts(NamedTuple):
    """Where an agent is.

    Attributes:
        address: Where it listens.
        host: Name of its host.
        pid: Its process.
    """

    address: tuple[str, int]
    host: str
    pid: int


class BandmasterAgent:
    """The process of an agent."""

    def bandmaster_open(self, secret: Secret, controller: str) -> AgentFacts:
        """Listen for the controller, and serve it until it is gone; then this process ends, and the workers with it."""
        server = AgentServer(secret, ray.util.get_node_ip_address(), _RayHost(), controller)
        start_thread("bandmaster-agent", self._serve, server)
        return AgentFacts(server.address, os.uname().nodename, os.getpid())

    @staticmethod
    def _serve(server: AgentServer) -> None:
        try:
            server.run(PATIENCE_S)
        except BaseException:
            _log.exception("the agent of this host has failed")
        finally:
            os._exit(0)


class _RayHost(Host):
    def start(self, said: bytes) -> tuple[RayWorkers, Sequence[int], Any]:
        """Start the actors of some ranks; what finds the rendezvous, if rank 0 is one of them."""
        paths, pickled = pickle.loads(said)
        sys.path.extend(path for path in paths if path not in sys.path and os.path.isdir(path))
        launch, start_actor, ranks = pickle.loads(pickled)
        workers = RayWorkers(launch, start_actor, ranks)
        return workers, ranks, workers.rendezvous if 0 in ranks else None


class RayAgents:
    """The agents of this controller. They end when no group has ranks, and no future rows, on their hosts.

    Any thread may call its methods. Finalizers may call `let_go` at any moment, so it waits for no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while agents are started or ended
        self._is_due = False  # to look which ones are not needed
        self._fabric: Fabric | None = None
        self._actors: dict[str, Any] = {}  # by node
        self._lost_at: dict[str, float] = {}  # by node: when it could not be reached
        self._session: RaySession | None = None
        self._numbers = itertools.count()

    def start(self, launch: Launch, start_actor: StartActor, nodes: Sequence[str]) -> RayAgentWorkers | None:
        """Start the workers of a group by the agents of their hosts; None if some host cannot be reached directly.

        Args:
            launch: The group.
            start_actor: Starts an actor on its host.
            nodes: Ray's id of the node of each rank.
        """
        with self._lock:
            reached = self._reach(list(dict.fromkeys(nodes)))
            workers = None
            if reached is not None and self._fabric is not None:
                name = f"{launch.group} {next(self._numbers)}"
                workers = AgentWorkers(name, self._fabric, [reached[node] for node in nodes])
        if self._is_due:
            self.let_go()
        return None if workers is None else RayAgentWorkers(launch, start_actor, workers, self.reach)

    def reach(self, nodes: Sequence[str]) -> dict[str, Agent] | None:
        """The agents of some nodes, which are started where there are none; None if one cannot be reached."""
        with self._lock:
            return self._reach(nodes)

    def _reach(self, nodes: Sequence[str]) -> dict[str, Agent] | None:
        if self._session is None or not self._session.is_current:
            self._close()
            self._actors, self._session = {}, RaySession()
        fabric = self._fabric = self._fabric or Fabric(self.let_go)
        agents = fabric.agents
        missing = [node for node in nodes if node not in agents]
        me = f"pid {os.getpid()} on {socket.gethostname()}"
        asked = {self._started(node).bandmaster_open.remote(fabric.secret, me): node for node in missing}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=START_TIMEOUT_S) if asked else ([], [])
        for reference, node in asked.items():
            try:
                facts: AgentFacts = ray.get(reference, timeout=0.0 if reference not in ready else None)
                fabric.add(_connected(node, facts, fabric.secret))
            except (RayError, OSError, Refused) as error:
                _log.warning(
                    "calls to workers on other hosts go through Ray, more slowly: there is no direct link to the "
                    "agent on node %s: %s; see `bandmaster doctor`",
                    node,
                    error,
                )
                self._is_due = True
                return None
        return {node: agents[node] for node in nodes}

    def _started(self, node: str) -> Any:
        """The actor of a new agent."""
        made = ray.remote(BandmasterAgent).options(**_on(node), max_restarts=0)
        actor = self._actors[node] = made.remote()
        return actor

    def lost_nodes(self) -> set[str]:
        """Those of the nodes whose agents are gone, though nobody has ended them, that cannot be reached either."""
        gone = set() if self._fabric is None else self._actors.keys() - self._fabric.agents
        now = time.monotonic()
        known = {node for node, found_at in self._lost_at.items() if node in gone and now - found_at < NOTICED_AFTER_S}
        asked = [node for node in (ray.nodes() if gone - known else ()) if node["NodeID"] in gone - known]
        addresses = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in asked]
        answers = answering(addresses, PROBE_TIMEOUT_S)
        lost = {node["NodeID"] for node, address in zip(asked, addresses, strict=True) if address not in answers}
        self._lost_at |= dict.fromkeys(lost, now)
        return known | lost

    def let_go(self) -> None:
        """End the agents that are not needed, now or when a thread that starts or ends some has done so."""
        self._is_due = True
        while self._is_due and self._lock.acquire(blocking=False):
            try:
                self._is_due = False
                self._end_unneeded()
            finally:
                self._lock.release()

    def _end_unneeded(self) -> None:
        if self._fabric is None:
            return
        for node, actor in list(self._actors.items()):
            agent = self._fabric.agents.get(node)
            if agent is not None and agent.is_needed:
                agent.awaits_release = not agent.groups
                continue
            del self._actors[node]
            if self._session is not None and self._session.is_current:
                ray.kill(actor)  # before its link ends, at which it would end by itself: Ray would report that
            if agent is not None:
                agent.await_end(END_TIMEOUT_S)
                self._fabric.remove(agent)
        if not self._actors:
            self._close()

    def _close(self) -> None:
        fabric, self._fabric = self._fabric, None
        if fabric is not None:
            fabric.close()


def _connected(node: str, facts: AgentFacts, secret: Secret) -> Agent:
    sock = socket.create_connection(facts.address, timeout=HANDSHAKE_TIMEOUT_S)
    try:
        trusted, keys = greet(sock, secret, FOR_MESSAGES)
    except BaseException:
        sock.close()
        raise
    return Agent(link_of(trusted, keys), node, facts.host, facts.address, facts.pid)


def _on(node: str) -> dict[str, Any]:
    """Options of a task or an actor without resources on a node."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _is_alive(node: str) -> bool:
    return any(known["Alive"] for known in ray.nodes() if known["NodeID"] == node)


def nodes_of(slots: Sequence[Slot]) -> list[str]:
    """Ray's id of the node of each slot."""
    tables: dict[Any, Mapping[int, str]] = {}
    found = []
    for slot in slots:
        group = slot.reservation.groups[slot.node]
        if group.id not in tables:
            tables[group.id] = placement_group_table(group)["bundles_to_node_id"]
        found.append(tables[group.id][slot.reservation.bundles[slot.node][slot.index]])
    return found


class RayAgentWorkers:
    """The workers of a group on other hosts: called by way of agents, until somebody asks for an actor handle.

    Then all calls go through Ray, so that they keep their order with those that the user makes by the handle.
    """

    ranks_are_own = True

    def __init__(
        self,
        launch: Launch,
        start_actor: StartActor,
        workers: AgentWorkers,
        reach: Callable[[Sequence[str]], Mapping[str, Agent] | None],
    ) -> None:
        self._launch, self._start_actor, self._reach = launch, start_actor, reach
        self._workers = workers
        self._left: AdoptedWorkers | None = None
        try:
            self._start()
        except BaseException:
            self.stop(NOT_STARTED)
            raise

    def _start(self) -> None:
        workers = self._workers
        try:
            found = workers.start({agent: self._said(workers.ranks_on(agent)) for agent in workers.hosts})
        except ClosedError as error:
            raise PlacementError(f"group {self._launch.group!r} cannot be started: {error}; start it again") from error
        self._rendezvous = next(rendezvous for rendezvous in found if rendezvous is not None)
        workers.open(self._rendezvous, sys.path)

    def _said(self, ranks: Sequence[int]) -> bytes:
        """What an agent needs to know to start some ranks."""
        return pickle.dumps((sys.path, cloudpickle.dumps((self._launch, self._start_actor, ranks))))

    @property
    def _now(self) -> Any:
        return self._workers if self._left is None else self._left

    @property
    def deaths(self) -> Mapping[int, Failure]:
        """As `contract.Workers.deaths`."""
        found: Mapping[int, Failure] = self._now.deaths
        return found

    @property
    def records(self) -> Sequence[WorkerRecord]:
        """As `contract.Workers.records`."""
        return self._workers.records_with(self._handle) if self._left is None else self._left.records

    @property
    def arrivals(self) -> int | None:
        """As `contract.Workers.arrivals`."""
        found: int | None = self._now.arrivals
        return found

    def put(self, payloads: Sequence[Any]) -> Sequence[Any]:
        """As `contract.Workers.put`."""
        return [_Put(payload) for payload in payloads]

    def call(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        """As `contract.Workers.call`."""
        if self._left is None and any(call.reply is Reply.NATIVE for call in calls):
            self._leave()
        now = self._now
        calls = [
            call._replace(
                parts=tuple([part.placed(now) for part in call.parts]),
                rows=tuple([(label, part.placed(now)) for label, part in call.rows]),
            )
            for call in calls
        ]
        now.call(calls, tickets)

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """As `contract.Workers.wait`."""
        found: list[Any] = self._now.wait(tickets, timeout_s)
        return found

    def fetch(self, ticket: Any) -> Any:
        """As `contract.Workers.fetch`."""
        return self._now.fetch(ticket)

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """As `contract.Workers.interrupt`."""
        self._now.interrupt(tickets, kill_because)

    def resume(self, tickets: Mapping[int, Any]) -> None:
        """As `contract.Workers.resume`."""
        self._now.resume(tickets)

    def stacks(self, tickets: Mapping[int, Any]) -> Mapping[int, str]:
        """As `contract.Workers.stacks`."""
        found: Mapping[int, str] = self._now.stacks(tickets)
        return found

    def check(self, is_thorough: bool = True) -> bool:
        """As `contract.Workers.check`."""
        return bool(self._now.check(is_thorough))

    def replace(self, rank: int) -> None:
        """As `contract.Workers.replace`."""
        if self._left is not None:
            self._left.replace(rank)
            return
        if self._workers.agent_of(rank).lost is not None:
            self._move(rank)
        record, rendezvous = self._workers.told(rank, "replace", rank)
        self._workers.replaced(rank, record)
        if rank == 0:
            self._rendezvous = rendezvous
            self._workers.tell_living("do", "announce", rendezvous)

    def _move(self, rank: int) -> None:
        """Have the rank be one of another agent's, since its own is gone."""
        (node,) = nodes_of([self._launch.slots[rank]])
        reached = self._reach([node]) if _is_alive(node) else None
        if reached is None:
            lost = self._workers.agent_of(rank)
            raise PlacementError(
                f"rank {rank} cannot be replaced on its slot, as host {lost.host} ({lost.address[0]}) is lost; "
                "restart() the group, if its pool was made with spare nodes (spares=), or make another one on a pool "
                "of the hosts that are left"
            )
        self._workers.move(rank, reached[node], self._said(()), self._rendezvous, sys.path)

    def stop(self, why: str = CLOSED) -> None:
        """As `contract.Workers.stop`."""
        if self._left is not None:
            self._left.stop(why)
        self._workers.stop(why)
        for rank in self._workers.ranks_of_lost_hosts():
            with contextlib.suppress(ValueError, RayError):  # Ray may have found out itself
                ray.kill(ray.get_actor(self._launch.worker_names[rank]))  # else its name would stay taken

    def _handle(self, rank: int) -> Any:
        self._leave()
        assert self._left is not None, "it has just left"
        return self._left.records[rank].handle()

    def _leave(self) -> None:
        """Call all ranks through Ray from here on, after all that was sent before."""
        if self._left is None:
            self._workers.tell_all("do", "leave")
            self._workers.settle()
            actors = [ray.get_actor(name) for name in self._launch.worker_names]
            self._left = AdoptedWorkers(self._launch, actors, self._start_actor)


class _Put:
    """A payload or kept rows, as the workers name it that are called at the time."""

    __slots__ = ("_by", "_placed", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._by: Any = None
        self._placed: Any = None

    def placed(self, workers: Any) -> Any:
        if self._by is not workers:
            self._by, self._placed = workers, workers.put([self.value])[0]
        return self._placed
