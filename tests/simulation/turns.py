"""Steps of programs: threads and tasks take turns of two groups on the same slots, one or both at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import bandmaster as bm
from bandmaster.turns import turns as library
from simulation import sync
from simulation import world as worlds
from simulation.drawn import Raised, Sent
from simulation.loop import Loop

if TYPE_CHECKING:
    from simulation.program import Program

OWN, RIVALS, BOTH = frozenset([False]), frozenset([True]), frozenset([False, True])
HOOK = "a hook"  # in place of the token of a call


class Turns:
    """The turns of a program, and what is known of them.

    Attributes:
        rival: The group that shares the slots of the program's own one.
        inside: The blocks that are in a turn: the thread or task, and whether it is that of the rival, of each group.
        are_even: Whether the hooks of both groups alternate, as none has failed or was interrupted.
        to_press: How often Ctrl-C was still to be pressed as the main thread asked for the turn that it asks for; or 0.
        had: The groups of turns that have ended while others of them lasted, whose calls may still run.
        may_fail: Whether hooks may fail.
    """

    def __init__(self, rival: Any) -> None:
        self.rival = rival
        self.inside: list[tuple[str, frozenset[bool]]] = []
        self.had: frozenset[bool] = frozenset()
        self.are_even, self.may_fail = True, False
        self.to_press = 0

    def turn_of(self, program: Program, wanted: frozenset[bool], timeout: float | None) -> Any:
        """The turn of one group, or of both."""
        groups = [self.rival if is_rivals else program.group for is_rivals in sorted(wanted)]
        return groups[0].turn(*groups[1:], timeout=timeout)

    def _of(self, me: str) -> list[frozenset[bool]]:
        """The turns that a thread or task has."""
        return [groups for name, groups in self.inside if name == me]

    @contextmanager
    def block(self, program: Program, me: str, wanted: frozenset[bool]) -> Iterator[None]:
        """A block in a turn, which no other thread or task has with other groups."""
        world = program.world
        world.note("has the turn", *wanted)
        self.inside.append((me, wanted))
        own = {name: frozenset[bool]().union(*self._of(name)) for name, _ in self.inside}
        is_nested = own[me] in self._of(me)
        is_right = (is_nested and len({*own.values()}) == 1) or program.is_closing  # a closed group needs no turn
        world.check(is_right, "two rivals have their turns", me, wanted, self.inside)
        try:
            yield
        finally:
            self.inside.remove((me, wanted))
            self.had = self.had | wanted if self.inside else frozenset()
            world.note("ends the turn", *wanted)

    @contextmanager
    def asking(self, program: Program, timeout: float | None, is_refused: bool = False) -> Iterator[None]:
        """A block that asks for a turn; judges its error."""
        world = program.world
        if world.current is world.main:
            self.to_press = world.interrupts_left
        try:
            yield
        except KeyboardInterrupt:
            self.are_even = False
            raise
        except (bm.TurnTimeout, bm.CallTimeout):
            world.check(timeout is not None, "a turn without a limit has ended by one")
            self.are_even = False  # a hook may run
        except bm.UsageError as error:
            is_closed = program.is_closing and isinstance(error, bm.ClosedError)
            world.check(is_refused or is_closed, "a turn is refused", error)
        except bm.WorkerDied as error:
            world.check(program.is_renewed or program.has_died(), "a worker is said to have died", error)
            self.are_even = False
        except bm.RemoteError as error:
            cause = error.__cause__
            is_its = isinstance(cause, Raised) and cause.args[0] == HOOK
            world.check(is_its, "a turn fails as no hook does", error)
            self.are_even = False
        except bm.CallCancelled as error:
            world.check(program.is_renewed, "a turn was cancelled", error)
            self.are_even = False
        finally:
            if world.current is world.main:
                self.to_press = 0


def take_turn(program: Program, draw: random.Random, mine: list[Sent]) -> None:
    """Take the turn of one of the groups, or of both, and make some steps in it."""
    world, turns = program.world, program.turns
    assert turns is not None, "such steps have a rival"
    if draw.random() < 0.2 and not (world.current is world.main and program.kind.n_interrupts):
        _await_turns(program, draw)
        return
    me, wanted = world.current.name, draw.choice([OWN, OWN, RIVALS, RIVALS, BOTH])
    timeout, n_steps = draw.choice([None, None, 0.0, 0.05]), draw.choice([0, 1, 3])
    own = [groups for name, groups in turns.inside if name == me]
    if any(groups < wanted for groups in own) and timeout is None and BOTH not in own:
        timeout = 0.05  # else two threads may wait for each other
    world.note("asks for the turn", *wanted, timeout)
    is_refused = any(not groups & wanted for groups in own)
    asking = turns.asking(program, timeout, is_refused)
    with asking, turns.turn_of(program, wanted, timeout), turns.block(program, me, wanted):
        for _ in range(n_steps):
            if wanted == RIVALS or (wanted == BOTH and draw.random() < 0.5):
                _call_rival(program, draw, mine)
            else:
                program.step(draw, mine)


def _await_turns(program: Program, draw: random.Random) -> None:
    """Take turns in tasks of an event loop, some of which are cancelled meanwhile."""
    turns, world, thread = program.turns, program.world, program.world.current.name
    assert turns is not None, "such steps have a rival"
    if any(name == thread for name, _ in turns.inside):
        return  # its tasks would wait for a turn of this thread

    async def one(number: int, wanted: frozenset[bool], timeout: float | None, sent: list[Sent]) -> None:
        with turns.asking(program, timeout):
            async with turns.turn_of(program, wanted, timeout):
                with turns.block(program, f"{thread}, task {number}", wanted):
                    for each in sent:
                        await _ask(program, each)

    async def every() -> None:
        tasks = [asyncio.ensure_future(one(number, *what)) for number, what in enumerate(drawn)]
        for task, limit in zip(tasks, limits, strict=True):
            if limit is not None:
                task.get_loop().call_later(limit, task.cancel)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome

    drawn = [_drawn(program, draw) for _ in range(draw.choice([1, 2, 4]))]
    limits = [draw.choice([None, None, 0.0, 1e-3, 0.05]) for _ in drawn]
    for (_, _, sent), limit in zip(drawn, limits, strict=True):
        if limit is not None:
            turns.are_even = False
            for each in sent:
                each.is_cancelled = True
    world.note("asks for turns in tasks", [tuple(wanted) for wanted, _, _ in drawn], limits)
    loop = Loop()
    try:
        loop.run_until_complete(every())
    finally:
        loop.close()
        asyncio.set_event_loop(None)


def _drawn(program: Program, draw: random.Random) -> tuple[frozenset[bool], float | None, list[Sent]]:
    wanted = draw.choice([OWN, RIVALS, BOTH])
    sent = [program.drawn(draw, asking=1.0) for _ in range(draw.choice([0, 1, 3]))]
    for each in sent:
        each.is_rivals = draw.choice(sorted(wanted))
    return wanted, draw.choice([None, None, 0.0, 0.05]), sent


async def _ask(program: Program, sent: Sent) -> None:
    with program.judged(sent):
        program.calls.append(sent)
        future = sent.future = program.method_of(sent)(*sent.args)
        began = program.world.now
        program.judge(sent, await future)
        program.check_lateness(sent, began)


def _call_rival(program: Program, draw: random.Random, mine: list[Sent]) -> None:
    sent = program.drawn(draw)
    sent.is_rivals = True
    program.calls.append(sent)
    if draw.random() < 0.5:
        program.call(sent)
        return
    program.submit_it(sent)
    if sent.future is not None:
        mine.append(sent)


def check_hook(program: Program, rank: object, method: str, is_resident: bool) -> None:
    """Hooks alternate; no call runs beside them."""
    turns, world = program.turns, program.world
    if turns is None or world.interrupts_left < turns.to_press:  # the main thread leaves a turn whose hook is unknown
        return
    if turns.are_even and not (program.is_renewed or program.has_died()):
        world.check(is_resident == (method == "on_yield"), "hooks do not alternate", rank, method)


def check_over(settled_s: float) -> None:
    """Check that nobody has a turn, or waits for one, once hooks have ended that ran as tasks were cancelled."""
    world = worlds.world
    assert world is not None, "a program runs"
    sync._block(lambda: not (library._entered or library._waiting), settled_s, "the end of turns")
    world.check(not (library._entered or library._waiting), "turns are left", library._entered, library._waiting)
