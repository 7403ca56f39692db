"""Ranks on other hosts, which a worker that was given their group reaches by links of its own to their agents.

::

    ReachedWorkers ── FarRanks, for each other host ── link ──► agent ── HostRanks, for each caller ── lanes ──► ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from bandmaster.contract import Reports
from bandmaster.errors.failure import Failure
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.link import FOR_CALLERS, Address, FrameKind, connect
from bandmaster.hosts.links import Agent, AgentLinks
from bandmaster.hosts.workers import AgentWorkers


class FarPlace(NamedTuple):
    """The place of a rank on another host.

    Attributes:
        address: The address of the agent there.
        host: Name of the host.
        group: The name by which the agent knows the group.
        pid: The process of the rank.
        secret: The secret of the agent; None where it is known.
    """

    address: Address
    host: str
    group: str
    pid: int
    secret: Secret | None


class OwnsFarRanks(Protocol):
    """The workers of the whole group.

    Attributes:
        reports: What they have reported.
    """

    reports: Reports

    def far_has_died(self, ranks: FarRanks, rank: int, failure: Failure | None) -> None:
        """Take the death of a rank, as far as it is known how it died; the lock is held."""


class FarRanks(AgentWorkers):
    """The ranks of a group on one other host. It is made while the lock of the links is held.

    Args:
        place: The place of one of them.
        links: The links of the workers of the whole group.
        agent: The agent there.
        owner: These workers.
        n_ranks: The number of ranks of the group.
    """

    def __init__(self, place: FarPlace, links: AgentLinks, agent: Agent, owner: OwnsFarRanks, n_ranks: int) -> None:
        super().__init__(place.group, links, [agent] * n_ranks)
        self.reports, self._owner = owner.reports, owner
        agent.groups[place.group] = self
        links.send(agent, FrameKind.CALLS, place.group, [], [], False)  # so that it tells of reports and deaths

    @classmethod
    def at(cls, place: FarPlace, links: AgentLinks, owner: OwnsFarRanks, n_ranks: int) -> FarRanks:
        """The ranks at a place, to which there is a link from here on.

        Raises:
            Refused, OSError: The agent there cannot be reached.
        """
        agent = links.agents.get(place.address)
        if agent is None:
            assert place.secret is not None, "the door has told it"
            link = connect(place.address, place.secret, FOR_CALLERS)
            agent = Agent(link, place.address, place.host, place.address, 0)
            links.serve(agent)
        known = agent.groups.get(place.group)
        return known if isinstance(known, cls) else cls(place, links, agent, owner, n_ranks)

    def take_deaths(self, deaths: Mapping[int, Failure]) -> None:
        """Take the deaths of ranks that their agent tells of."""
        for rank in deaths:
            self._owner.far_has_died(self, rank, None)

    def host_is_lost(self, agent: Agent, why: str) -> None:
        """Take the end of the host."""
        failure = Failure.of_death(f"host {agent.host} ({agent.address[0]}) is lost: {why}", "", agent.host, 0, "")
        for rank in range(len(self._agents)):
            self._owner.far_has_died(self, rank, failure)

    def fail(self, rank: int, failure: Failure) -> None:
        """Fail the requests to a rank that has died; the lock is held."""
        super().take_deaths({rank: failure})
