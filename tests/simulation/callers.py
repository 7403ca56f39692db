"""Steps of programs: calls of workers, which call another group in turn; and how they do."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import bandmaster as bm
from simulation import workers
from simulation import world as worlds
from simulation.drawn import Sent

if TYPE_CHECKING:
    from simulation.program import Program

LIMITS = None, None, None, 0.0, 1e-3, 0.05


def call_callers(program: Program, draw: random.Random, mine: list[Sent]) -> None:
    """Call the workers of the group that calls the other one."""
    method = draw.choice(["call_others", "call_others_alone", "ask_others", "ask_others"])
    sent = program.drawn(draw, asking=float(method == "ask_others"))
    sent.method, sent.has_ballast, sent.is_callers = method, False, True
    for rank in range(1 if sent.is_request else program.kind.n_ranks):
        sent.inner[rank] = [_drawn(program, draw) for _ in range(draw.choice([0, 1, 2, 6]))]
    program.calls.append(sent)
    if draw.random() < 0.4:
        program.call(sent)
        return
    program.submit_it(sent)
    if sent.future is not None:
        mine.append(sent)


def _drawn(program: Program, draw: random.Random) -> tuple[Sent, float | None]:
    """A call of a worker, and its limit of time."""
    limit = draw.choice(LIMITS) if draw.random() < program.kind.cancelling * 3 else None
    return program.drawn(draw, asking=draw.choice([0.0, 1.0, 1.0])), limit


def _program() -> Program:
    program: Program = worlds.world.program  # type: ignore[union-attr]
    return program


def _inner(token: int, rank: int) -> list[tuple[Sent, float | None]]:
    sent = _program().by_token.get(token)
    return [] if sent is None else sent.inner.get(rank, [])


async def call_beside(called: Any, token: int, rank: int) -> None:
    """Make the calls of a worker, and await them beside each other."""
    await asyncio.gather(*[_awaited(called, sent, limit) for sent, limit in _inner(token, rank)])


async def _awaited(called: Any, sent: Sent, limit: float | None) -> None:
    program, worker = _program(), workers.here(worlds.world)  # type: ignore[arg-type]
    world = program.world
    assert worker is not None, "a worker calls"
    world.note("calls from", worker.pid, sent.method, sent.token)
    sent.is_cancelled |= limit is not None
    worker.open.add(sent)
    try:
        future, began = _submitted(called, sent), world.now
        sent.waited_since = began
        value = await (future if limit is None else asyncio.wait_for(_value(future), limit))
    except asyncio.TimeoutError:
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


def _submitted(called: Any, sent: Sent) -> Any:
    method = getattr(called, sent.method)
    return method(*sent.args) if sent.is_request else method.submit(*sent.args)


def call_in_order(called: Any, token: int, rank: int) -> None:
    """Make the calls of a worker, and wait for each."""
    program, worker = _program(), workers.here(worlds.world)  # type: ignore[arg-type]
    assert worker is not None, "a worker calls"
    for sent, limit in _inner(token, rank):
        program.world.note("calls from", worker.pid, sent.method, sent.token)
        worker.open.add(sent)
        try:
            _wait(program, called, sent, limit)
        finally:
            worker.open.discard(sent)


def _wait(program: Program, called: Any, sent: Sent, limit: float | None) -> None:
    world = program.world
    future = None
    try:
        future, began = _submitted(called, sent), world.now
        sent.waited_since = began
        value = future.result(limit)
    except bm.CallTimeout:
        world.check(limit is not None, "a wait without a limit has ended by one", sent.token)
        assert future is not None, "it was waited for"
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
