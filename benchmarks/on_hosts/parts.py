"""The questions, one function each. Each starts its peers anew, so that no more are there than take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import proc
from harness.rows import Row
from harness.stage import Cell, MiB, say, size_name

from on_hosts.peers import AGENTS, EIGHT_EACH, FLOOR, LOCAL, MONARCH, ONE_EACH, PLAIN
from on_hosts.stage import CONTROLLER, OTHERS, HostStage, SimulatedStage, closing

RATES = {"no limit": None, "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit"}
SIZES = (64 << 10, MiB, 16 * MiB, 256 * MiB)
OF_ARRAY, OF_ROWS = "x the array", "x the rows"
SETTLE_S = 5.0


@dataclass(frozen=True)
class Run:
    """What is measured, and where.

    Attributes:
        hosts: The testbed; None for parts that need none.
        is_smoke: Tiny sizes: does it work at all?
        rounds: Turns of each peer.
    """

    hosts: Any
    is_smoke: bool
    rounds: int

    @property
    def large(self) -> int:
        """Bytes of a large array."""
        return MiB if self.is_smoke else 256 * MiB

    def stage(self, names: Sequence[str], n_workers: int) -> Any:
        """Peers on the hosts, as a context manager."""
        return closing(HostStage(self.hosts, names, n_workers, self.is_smoke))

    def cell(self, question: str, op: str, nbytes: int) -> Cell:
        """A call, several times in a round if it is short."""
        if nbytes >= 16 * MiB:
            return Cell(question, op, nbytes, self.rounds, n_min=2, n_max=3, budget_s=0.5, n_warm=3)
        most = 10 if self.is_smoke else 1000
        return Cell(question, op, nbytes, self.rounds, n_min=5, n_max=most, budget_s=0.5, n_warm=most // 50 + 2)


def noop(run: Run) -> list[Row]:
    """What does a call cost that does nothing? The number 1 to each of 16 ranks, 8 on each of two other hosts, and
    back. bandmaster local has 16 ranks on the controller's host."""
    with run.stage((AGENTS, PLAIN, MONARCH, LOCAL), 4 if run.is_smoke else 16) as stage:
        return [row for _, rows in stage.run([run.cell("noop", "noop", 0)]) for row in rows]


def broadcast(run: Run) -> list[Row]:
    """What does it cost to give every rank the same array? To each of 16 ranks, 8 on each of two other hosts, which
    read 64 places of it. The floor sends it to one process on each host, both at the same time."""
    cell = run.cell("broadcast", "broadcast", run.large)
    with run.stage((AGENTS, PLAIN, MONARCH, FLOOR), 4 if run.is_smoke else 16) as stage:
        rows = [row for _, rows in stage.run([cell]) for row in rows]
        what = f"{cell.what}: sent by the controller's host"
        return rows + _traffic(stage, cell, what, OF_ARRAY, lambda hosts: hosts[CONTROLLER][1])


def split(run: Run) -> list[Row]:
    """What does a data-parallel call cost? Rows split over 8 ranks, 4 on each of two other hosts, each adds 1, and the
    results are joined in order. The floor sends half to a process on each host, which adds 1, and receives the halves
    straight into the result."""
    with run.stage((AGENTS, PLAIN, MONARCH, FLOOR), 4 if run.is_smoke else 8) as stage:
        return [row for _, rows in stage.run([run.cell("split", "split_inc_concat", run.large)]) for row in rows]


def chain(run: Run) -> list[Row]:
    """What does it cost to pass rows by reference? A rank on one host makes rows, a rank on another reads 64 places of
    them; the controller, on a third, has only their handle. Making them is part of the time."""
    cell = run.cell("chain", "make_and_read", MiB if run.is_smoke else 64 * MiB)
    with run.stage((AGENTS, PLAIN), 2) as stage:
        rows = [row for _, rows in stage.run([cell]) for row in rows]
        between, through = (
            f"{cell.what}: sent by the host that made them",
            f"{cell.what}: through the controller's host",
        )
        rows += _traffic(stage, cell, between, OF_ROWS, lambda hosts: max(hosts[host][1] for host in OTHERS))
        return rows + _traffic(stage, cell, through, OF_ROWS, lambda hosts: sum(hosts[CONTROLLER]))


def rows(run: Run) -> list[Row]:
    """What do rows cost between hosts, by the agents' direct path and by Ray's object store? A rank on one host has
    made them; a rank on another reads 64 places of them, and only this is timed. The network has a limit for what each
    host sends and receives."""
    cells = [run.cell("rows", "read_made", nbytes) for nbytes in (SIZES[:2] if run.is_smoke else SIZES)]
    found = []
    with run.stage((AGENTS, PLAIN), 2) as stage:
        for name, rate in RATES.items():
            say(f"network: {name}")
            run.hosts.limit(rate)
            try:
                for cell, measured in stage.run(cells):
                    found += [replace(row, what=row_name(cell.nbytes, name)) for row in measured]
            finally:
                run.hosts.limit(None)
    return found


def row_name(nbytes: int, rate: str) -> str:
    """What a row of `rows` is called."""
    return f"{size_name(nbytes)}, {rate}"


def many(run: Run) -> list[Row]:
    """What does a call cost the controller that does nothing, on many hosts? Its processor time, all threads. Hosts are
    simulated: each is a process with an agent, whose ranks are objects."""
    cell = Cell("many", "noop", 0, run.rounds, n_min=5, n_max=50, budget_s=0.5, n_warm=5)
    found = []
    for n_hosts in (4,) if run.is_smoke else (2, 8, 32, 128):
        with closing(SimulatedStage((ONE_EACH, EIGHT_EACH), n_hosts, run.is_smoke)) as stage:
            for _, measured in stage.run([cell]):
                found += [replace(row, what=f"{n_hosts} hosts") for row in measured]
    return found


def idle(run: Run) -> list[Row]:
    """What do 16 ranks on two other hosts cost that nobody calls? Processor time of workers, agents and the controller.
    Agents and plain Ray's workers are Ray actors, whose own threads never sleep for long."""
    duration_s = 2.0 if run.is_smoke else 20.0
    with run.stage((AGENTS, PLAIN), 4 if run.is_smoke else 16) as stage:
        say(f"idle: {duration_s:g} s, {stage.n_workers} workers")
        time.sleep(min(SETTLE_S, duration_s))
        begun, before = time.monotonic(), _all_cpu_s(stage)
        if not all(used for kinds in before.values() for used in kinds.values()):
            raise RuntimeError(f"there are no processes of one kind: {before}")
        time.sleep(duration_s)
        elapsed, after = time.monotonic() - begun, _all_cpu_s(stage)
        shares = {
            name: {kind: (after[name][kind] - before[name][kind]) / elapsed * 100 for kind in kinds}
            for name, kinds in before.items()
        }
        return [_idle_row(stage, name, shares.get(name, {}), duration_s) for name in stage.names]


def _idle_row(stage: HostStage, name: str, shares: dict[str, float], duration_s: float) -> Row:
    note = ", ".join(f"{kind} {share:.2f}" for kind, share in shares.items())
    rounds = ((sum(shares.values()),),) if shares else ()
    what = f"{duration_s:g} s of nothing"
    return Row("idle", what, name, stage.n_workers, "% of a core", rounds, stage.why_not.get(name, ""), note)


def _all_cpu_s(stage: HostStage) -> dict[str, dict[str, float]]:
    """Processor time so far of each peer that runs, by kind of process."""
    pids = [pid for host in OTHERS for pid in proc.tree(stage.hosts.first_process(host))]
    titles = {pid: _title(pid) for pid in pids}
    agents = [pid for pid, title in titles.items() if title.startswith("ray::BandmasterAgent")]
    forked = {pid for agent in agents for pid in proc.tree(agent)}.difference(agents)  # their zygotes and workers
    holders = [pid for pid, title in titles.items() if title.startswith("ray::Holder")]
    on_hosts = {AGENTS: {"workers": forked, "agents": agents}, PLAIN: {"workers": holders}}
    return {
        name: {"controller": proc.cpu_s(process.tree())}
        | {kind: proc.cpu_s(its) for kind, its in on_hosts[name].items()}
        for name, process in stage.running.items()
    }


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _traffic(
    stage: HostStage, cell: Cell, what: str, unit: str, count: Callable[[list[tuple[float, float]]], float]
) -> list[Row]:
    """What a call moves over the network, over the bytes of its array."""
    found = []
    for name in stage.names:
        rounds = tuple((count(hosts) / cell.nbytes,) for hosts in stage.traffic[cell, name])
        if rounds and not stage.why_not.get(name):
            found.append(Row(cell.question, what, name, stage.n_workers, unit, rounds))
    return found


PARTS: dict[str, Callable[[Run], list[Row]]] = {
    part.__name__: part for part in (noop, broadcast, split, chain, rows, many, idle)
}
WITHOUT_HOSTS = ("many",)
