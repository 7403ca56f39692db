"""Steps of programs: a thread waits for several calls at once."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import bandmaster as bm
from simulation.drawn import LATE_S, Sent

if TYPE_CHECKING:
    from simulation.program import Program


def wait_for_some(program: Program, draw: random.Random, mine: list[Sent]) -> None:
    """Wait for some calls, or take them as they end."""
    known = [sent for sent in dict.fromkeys([*mine, *program.calls]) if sent.future is not None]
    chosen = draw.sample(known, min(len(known), draw.choice([1, 2, 5])))
    futures = [sent.future for sent in chosen]
    timeout, began = draw.choice([None, None, 0.0, 0.01]), program.world.now
    program.world.note("waits for", [sent.token for sent in chosen], timeout)
    if timeout is None:
        for sent in chosen:
            sent.waited_since = min(sent.waited_since, began)
    if draw.random() < 0.5:
        _as_completed(program, chosen, futures, timeout)
        return
    until = draw.choice(["ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"])
    done, not_done = bm.wait(futures, timeout, until)
    world = program.world
    world.check(done | not_done == set(futures) and not done & not_done, "futures are missing", done, not_done)
    ended = [future for future in futures if future in done]  # in this order, as that of a set is not the seed's
    world.check(all(future.done() for future in ended), "a future is not done", done)
    if timeout is None and futures:
        is_enough = not not_done if until == "ALL_COMPLETED" else bool(done)
        if until == "FIRST_EXCEPTION":
            is_enough = not not_done or any(future.exception() is not None for future in ended)
        world.check(is_enough, "a wait has ended too early", until, done, not_done)
        first = min if until == "FIRST_COMPLETED" else max
        if until != "FIRST_EXCEPTION" and not any(isinstance(sent.outcome, BaseException) for sent in chosen):
            late_s = world.now - max(first(map(program.ended, chosen)), began)
            is_late = late_s >= LATE_S and late_s < math.inf
            world.check(program.is_cut or not is_late, f"a wait for several ends {late_s:.2f} s late", chosen)


def _as_completed(program: Program, chosen: list[Sent], futures: list[object], timeout: float | None) -> None:
    left = dict(zip(map(id, futures), chosen, strict=True))
    try:
        for future in bm.as_completed(futures, timeout):
            sent = left.pop(id(future), None)
            program.world.check(sent is not None, "a future comes twice", future)
            if sent is not None:
                program.world.check(future.done(), "a future is not done", sent.token)
                if sent.future is not None:
                    program.wait(sent, None)
    except TimeoutError:
        program.world.check(timeout is not None, "a limit that was not set")
        return
    program.world.check(not left, "futures do not come", left)
