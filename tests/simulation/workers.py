"""Worker processes of the world that run the library's own code: the loop, requests, the event loop and what they call.

::

    controller ── lane ──► Loop.run, in the main thread ── Executor ── a method ──► lanes and links of its own
               ◄─ lane ───┘        Requests, on its event loop ◄── lanes ── other workers

They take twice the switches of threads of the simulated ranks in `simulation.ranks`, which call nobody.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bandmaster.answering.requests import Requests
from bandmaster.contract import Signs
from bandmaster.wire.lane import Lane
from bandmaster.wire.segment_reader import kept_name
from bandmaster.wire.segments import SegmentWriter
from bandmaster.wire.status_page import _SLOTS_AT, N_SLOTS, PAGE_NBYTES, RESUMED, ActivityWords, StatusPage
from bandmaster.worker_process.executor import Executor
from bandmaster.worker_process.loop import Loop
from simulation.net import Socket
from simulation.ranks import Plan
from simulation.world import ThreadEnds, World


class Page(StatusPage):
    """The status page of a worker, in memory of the world."""

    def __init__(self) -> None:
        self.running, self._put_off = 0, None
        page = memoryview(bytearray(PAGE_NBYTES))
        self.words, self.activity = page.cast("Q"), ActivityWords(page)


class Running(NamedTuple):
    """A call that runs."""

    token: int
    plan: Plan
    since: float


class Worker:
    """One worker process; see `simulation.ranks.Rank`.

    Attributes:
        pid: Its number.
        process: The name of its process in the world.
        agent: That which has started it; "" for the controller.
        is_alive: Whether it has not ended.
        died: How it has ended.
        running: The calls and requests that run, by token, and since when.
        open: The calls of others that it waits for.
        failed: The token of the call that it has failed last.
    """

    streams: Any = ()
    has_leases = is_stopped = False

    def __init__(self, world: World, group: Any, rank: int, pid: int, taken: Socket, context: Any) -> None:
        self.world, self.group, self.rank, self.pid = world, group, rank, pid
        self.is_alive, self.died = True, ""
        self.running: dict[int, Any] = {}
        self.open: set[Any] = set()
        self.failed: Any = None
        self.places: dict[str, int] = {}
        self.process, self.agent = f"worker {pid}", world.current.process
        self._page = Page()
        self._context = context
        self._socket = taken.moved()
        self._socket.process = self.process
        host = world.processes[world.current.process].host
        world.start_process(self.process, host, f"rank {rank} of {group.name} {pid}", self._live, pid)
        world.processes[self.process].state["worker"] = self

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.group}, {self.pid}>"

    def _live(self) -> None:
        executor = Executor(self._page.hold, self._page.activity)
        executor.prepare(self._context)
        Loop(Lane(self._socket, SegmentWriter(kept_name(self.pid))), executor, self._page, Requests).run()  # type: ignore[arg-type]
        executor.close()
        self.end("it has exited")

    def end(self, how: str) -> None:
        """End the process."""
        if self.is_alive:
            self.is_alive, self.died, self.group.died_at = False, how, self.world.now
            self.world.note("died", self.group.name, self.rank, how)
            self.world.n_died += 1  # type: ignore[attr-defined]
            for sent in self.open:
                sent.cancel_at(self.world.now)
            self.world.kill(self.process)

    # --- what it runs ---

    def begins(self, token: int) -> None:
        """Note that a call begins, and check that it may."""
        world, program = self.world, self.world.program  # type: ignore[attr-defined]
        sent = program.by_token.get(token)
        program.check_begun(token, self)
        if sent is None or sent.method == "items":  # which runs while it makes an item
            return
        beside = [program.by_token[one] for one in self.running if one in program.by_token]
        if sent.runs_beside:
            world.check(
                all(one.runs_beside for one in beside),
                "a request runs beside a call that runs alone",
                self,
                token,
                self.running,
            )
            n = sum(one.method == sent.method != "tell" for one in beside)
            n_callers = 1 + program.kind.n_ranks  # each counts its own, and those that have died are not known yet
            world.check(n < 4 * n_callers or world.n_died > 0, "more requests run than may", self, token)
        else:
            world.check(not beside, "a call that runs alone does not", self, token, list(self.running))
            for other in self.group.ranks.values():
                is_at_it = self.failed in other.running and other.is_alive
                world.check(program.is_cut or not is_at_it, "a rank passes the fence of a call that another runs", self)
        self.running[token] = world.now

    def ends(self, token: int) -> None:
        """Note that a call has ended, in whatever way."""
        self.running.pop(token, None)

    def has_ended(self, token: int, plan: Plan) -> None:
        """Note that a method has come to its end, and do what its plan says."""
        self.world.program.check_ran_on(Running(token, plan, self.running.get(token, 0.0)))  # type: ignore[attr-defined]
        if plan.how == "die":
            self.end("killed by SIGKILL")
            raise ThreadEnds
        if plan.how == "raise":
            sent = self.world.program.by_token.get(token)  # type: ignore[attr-defined]
            self.failed = None if sent is None or sent.is_request else token  # requests have no fence
            self.world.failed_at.setdefault(token, self.world.now)  # type: ignore[attr-defined]

    def interrupt(self, number: int) -> None:
        """Interrupt a call by its number."""
        self._page.words[_SLOTS_AT + number % N_SLOTS] = number
        self.world.after(1e-5, self._signalled)

    def _signalled(self) -> None:
        if self.is_alive:
            self.world.send_signal(self.process, self._page._interrupt)

    def resume(self, number: int) -> None:
        """Let it begin the next call that has failed one."""
        self._page.words[RESUMED] = number

    def signs(self) -> Signs:
        """Its signs of life."""
        index, names = self._page.words[0], self._page.activity.indices
        method = next((name for name, n in names.items() if n == index), "") if index else ""
        since = self.world.now - self._page.activity.times[1] if method else 0.0
        return Signs("S" if self.is_alive else "", 0.0, method, since)


def here(world: World) -> Worker | None:
    """The worker whose thread this is; None in the controller."""
    found: Worker | None = world.processes[world.current.process].state.get("worker")
    return found
