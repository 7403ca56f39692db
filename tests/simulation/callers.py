"""Steps of programs: calls of workers, which call another group in turn; and how they do."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import bandmaster as bm
from simulation import workers
from simulation import world as worlds
from simulation.drawn import LATE_S, Sent

if TYPE_CHECKING:
    from simulation.program import Program

LIMITS = None, None, None, 0.0, 1e-3, 0.05
CIRCLE_S = 8.0  # limit of calls that may be in a circle, which is found in half of that


def call_callers(program: Program, draw: random.Random, mine: list[Sent]) -> None:
    """Call the workers of the group that calls the other one."""
    sent = _drawn_caller(program, draw, 0)
    sent.back = program.callers if program.kind.circling else None
    program.calls.append(sent)
    if draw.random() < 0.4:
        program.call(sent)
        return
    program.submit_it(sent)
    if sent.future is not None:
        mine.append(sent)


def _drawn_caller(program: Program, draw: random.Random, depth: int) -> Sent:
    """A call whose ranks call the other group in turn; ``depth`` calls wait for it."""
    method = draw.choice(["call_others", "call_others_alone", "ask_others", "ask_others"])
    sent = program.drawn(draw, asking=float(method == "ask_others"))
    sent.method, sent.has_ballast, sent.is_callers = method, False, depth % 2 == 0
    for rank in range(1 if sent.is_request else program.kind.n_ranks):
        n = draw.choice([1, 1, 2] if depth else [0, 1, 2, 6])
        sent.inner[rank] = [_drawn(program, draw, sent, depth + 1) for _ in range(n)]
    return sent


def _drawn(program: Program, draw: random.Random, caller: Sent, depth: int) -> tuple[Sent, float | None]:
    """A call of a worker, and its limit of time."""
    kind = program.kind
    limit = draw.choice(LIMITS) if draw.random() < kind.cancelling * 3 else None
    if kind.circling and limit is None:
        limit = CIRCLE_S
    if depth < 3 and kind.circling and draw.random() < kind.circling:
        sent = _drawn_caller(program, draw, depth)
    else:
        sent = program.drawn_once_or_again(draw, asking=draw.choice([0.0, 1.0, 1.0]))
        sent.is_callers = depth % 2 == 0
    sent.caller = caller
    return sent, limit


def check_refused(program: Program, sent: Sent, error: bm.UsageError) -> None:
    """A call is refused if it waits for itself: by its own callers, or by others, all of which run alone."""
    world, words, one, broken_at = program.world, str(error), sent, program.broken_at
    program.broken_at = world.now
    while (one := one.caller) is not None:
        if one.is_callers == sent.is_callers and not (one.runs_beside and sent.runs_beside):
            return
    is_circle = "as calls that run alone wait for each other" in words and _is_in_circle(program, sent)
    is_broken = world.now < broken_at + 2 * LATE_S  # the circle, by another of its calls
    world.check(is_circle or is_broken, "a call is refused that waits for none that waits for it", words)


def _is_in_circle(program: Program, sent: Sent, for_s: float = 0.0) -> bool:
    """Whether a call of a worker waits for itself, by calls that run alone, and has done so for some seconds."""
    todo, seen, latest = [sent], set[Sent](), program.world.now - for_s
    while todo:
        one = todo.pop()
        for worker in _targets(program, one):
            running = [(program.by_token[token], since) for token, since in worker.running.items()]
            if all(call.runs_beside or since > latest for call, since in running):
                continue
            waiting = {other for other in worker.open if other.waited_since <= latest}
            if sent in waiting:
                return True
            todo += waiting - seen
            seen |= waiting
    return False


def _check_not_in_circle(program: Program, sent: Sent) -> None:
    """Calls that have waited for long do not wait for each other: that is found, and one of them is refused."""
    is_missed = _is_in_circle(program, sent, CIRCLE_S / 2) and program.world.now > program.broken_at + CIRCLE_S / 2
    program.world.check(not is_missed, "calls that wait for each other are not found", sent.token)
    program.broken_at = program.world.now


def _targets(program: Program, sent: Sent) -> list[workers.Worker]:
    """The workers that a call of a worker waits for."""
    group = program.callers if sent.is_callers else program.group
    ranks = [one for one in program.world.zygote.ranks.values() if one.is_alive and one.group.name == group.name]  # type: ignore[attr-defined]
    if not sent.is_request:
        ended = program.world.ended.get(sent.token, {})  # type: ignore[attr-defined]
        return [one for one in ranks if one.rank not in ended]
    chosen = () if sent.future is None else sent.future._call.ranks
    return [one for one in ranks if one.rank in chosen]


def _program() -> Program:
    program: Program = worlds.world.program  # type: ignore[union-attr]
    return program


def _inner(token: int, rank: int) -> list[tuple[Sent, float | None]]:
    sent = _program().by_token.get(token)
    return [] if sent is None else sent.inner.get(rank, [])


async def call_beside(called: Any, token: int, rank: int, back: Any = None) -> None:
    """Make the calls of a worker, and await them beside each other; ``back`` is the group that they call in turn."""
    await asyncio.gather(*[_awaited(called, sent, limit, back) for sent, limit in _inner(token, rank)])


async def _awaited(called: Any, sent: Sent, limit: float | None, back: Any) -> None:
    program, worker = _program(), workers.here(worlds.world)  # type: ignore[arg-type]
    world = program.world
    assert worker is not None, "a worker calls"
    world.note("calls from", worker.pid, sent.method, sent.token)
    sent.is_cancelled |= limit is not None
    worker.open.add(sent)
    try:
        future, began = _submitted(called, sent, back), world.now
        sent.waited_since = began
        value = await (future if limit is None else asyncio.wait_for(_value(future), limit))
    except asyncio.TimeoutError:
        if limit == CIRCLE_S:
            _check_not_in_circle(program, sent)
        if limit:  # else the task has not begun to await it
            sent.cancel_at(world.now)
    except asyncio.CancelledError:
        sent.cancel_at(world.now)
        raise
    except bm.BandmasterError as error:
        program.judge(sent, error)
    else:
        program.judge(sent, value)
        program.check_lateness(sent, began)
    finally:
        worker.open.discard(sent)


async def _value(future: Any) -> Any:
    return await future


def _submitted(called: Any, sent: Sent, back: Any) -> Any:
    method = _program().with_options(getattr(called, sent.method), sent)
    args = (sent.token, back) if sent.inner else sent.args
    ask = method.all if sent.method == "tell" else method if sent.is_request else method.submit
    future = ask(*args)
    sent.future = future if back is not None else None
    return future


def call_in_order(called: Any, token: int, rank: int, back: Any = None) -> None:
    """Make the calls of a worker, and wait for each."""
    program, worker = _program(), workers.here(worlds.world)  # type: ignore[arg-type]
    assert worker is not None, "a worker calls"
    for sent, limit in _inner(token, rank):
        program.world.note("calls from", worker.pid, sent.method, sent.token)
        worker.open.add(sent)
        try:
            _wait(program, called, sent, limit, back)
        finally:
            worker.open.discard(sent)


def _wait(program: Program, called: Any, sent: Sent, limit: float | None, back: Any) -> None:
    world = program.world
    future = None
    try:
        future, began = _submitted(called, sent, back), world.now
        sent.waited_since = began
        value = future.result(limit)
    except bm.CallTimeout:
        world.check(limit is not None, "a wait without a limit has ended by one", sent.token)
        assert future is not None, "it was waited for"
        if limit == CIRCLE_S:
            _check_not_in_circle(program, sent)
        if future.cancel():
            sent.cancel_at(world.now)
        sent.is_cancelled = True
    except KeyboardInterrupt:  # the call of this worker was cancelled
        sent.is_cancelled = True
        if future is not None:
            future.cancel()
        raise
    except bm.BandmasterError as error:
        program.judge(sent, error)
    else:
        program.judge(sent, value)
        program.check_lateness(sent, began)
