"""Steps of programs: threads take turns of two groups on the same slots."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import bandmaster as bm
from bandmaster.turns import turns as library
from simulation import world as worlds
from simulation.drawn import Sent

if TYPE_CHECKING:
    from simulation.program import Program


class Turns:
    """The turns of a program, and what is known of them.

    Attributes:
        rival: The group that shares the slots of the program's own one.
        inside: How many blocks of threads are in the turns of the own group and of the rival, by the thread's name.
        are_even: Whether the hooks of both groups alternate, as none has failed or was interrupted.
    """

    def __init__(self, rival: Any) -> None:
        self.rival = rival
        self.inside: dict[bool, dict[str, int]] = {False: {}, True: {}}
        self.are_even = True


def take_turn(program: Program, draw: random.Random, mine: list[Sent]) -> None:
    """Take the turn of one of the groups, and make some steps in it."""
    world, turns = program.world, program.turns
    assert turns is not None, "such steps have a rival"
    is_rivals, me = draw.random() < 0.5, world.current.name
    timeout, n_steps = draw.choice([None, None, 0.0, 0.05]), draw.choice([0, 1, 3])
    group = turns.rival if is_rivals else program.group
    has_others = bool(turns.inside[not is_rivals].get(me))
    world.note("asks for the turn", is_rivals, timeout)
    try:
        with group.turn(timeout=timeout):
            world.note("has the turn", is_rivals)
            inside = turns.inside[is_rivals]
            inside[me] = inside.get(me, 0) + 1
            try:
                world.check(not turns.inside[not is_rivals], "two rivals have their turns", turns.inside)
                for _ in range(n_steps):
                    if is_rivals:
                        _call_rival(program, draw, mine)
                    else:
                        program.step(draw, mine)
            finally:
                inside[me] -= 1
                if not inside[me]:
                    del inside[me]
                world.note("ends the turn", is_rivals)
    except KeyboardInterrupt:
        turns.are_even = False
        raise
    except bm.TurnTimeout:
        world.check(timeout is not None, "a turn without a limit has ended by one")
        turns.are_even = False  # a hook may run
    except bm.UsageError as error:
        world.check(has_others, "a turn is refused", error)
    except bm.CallTimeout:
        world.check(timeout is not None, "a turn without a limit has ended by one")
        turns.are_even = False
    except bm.WorkerDied as error:
        world.check(program.is_renewed or program.has_died(), "a worker is said to have died", error)
        turns.are_even = False


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
    turns = program.turns
    if turns is not None and turns.are_even and not (program.is_renewed or program.has_died()):
        program.world.check(is_resident == (method == "on_yield"), "hooks do not alternate", rank, method)


def check_over() -> None:
    """Check that nobody has a turn, or waits for one."""
    world = worlds.world
    assert world is not None, "a program runs"
    world.check(not (library._entered or library._waiting), "turns are left", library._entered, library._waiting)
