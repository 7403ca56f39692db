"""Steps of programs: maps, and streams of results and of items."""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np

import bandmaster as bm
from simulation.columns import Column
from simulation.drawn import Sent
from simulation.loop import Loop

if TYPE_CHECKING:
    from simulation.program import Program


def map_rows(program: Program, draw: random.Random, mine: list[Sent], can_await: bool) -> None:
    """Map a method over rows; iterate over the values, or have them as one, now or later."""
    whole = Sent(next(program.tokens), "map", {})
    whole.parts = [program.drawn(draw, asking=1.0) for _ in range(draw.choice([1, 2, 5, 12]))]
    whole.returns_errors = draw.random() < 0.3
    if not whole.returns_errors and draw.random() < 0.3:
        whole.chunk, width = draw.choice([1, 2, 3]), draw.choice([1, 10_000])
        ids = np.repeat([part.token for part in whole.parts], whole.chunk)
        whole.columns = {None: Column(ids, width)}
        for part in whole.parts:
            part.method, part.columns = "chunk", {None: Column(np.full(whole.chunk, part.token), width)}
    if not whole.returns_errors and whole.hows & {"raise", "die"}:
        for part in whole.parts:
            part.is_cancelled = True  # perhaps, as another one has failed
    is_iterated, method = draw.random() < 0.5, draw.choice(["ask", "ask", "exclusive"])
    n_again = 1 if method == "ask" and whole.chunk is None and draw.random() < program.kind.retrying else 0
    method = "repeat" if n_again else method
    if whole.chunk is None:
        for part in whole.parts:
            part.method = method
            if n_again:
                part.may_come_again(draw, method, n_again)
    options = {
        "in_flight": draw.choice([None, None, 1, 3]),
        "maxsize": draw.choice([None, 1, 4]) if is_iterated else None,
        "on_error": "return" if whole.returns_errors else "raise",
    }
    program.world.note("maps", method, whole.token, [part.token for part in whole.parts], options)
    with program.judged(whole):
        tokens: Any = [part.token for part in whole.parts]
        if whole.chunk is None:
            mapped = program.with_options(getattr(program.group, method), whole.parts[0]).map(tokens, **options)
        else:
            mapped = program.group.chunk.map(ids, width, chunk=whole.chunk, **options)
        take_map(program, draw, whole, mapped, mine, is_iterated, can_await)


def take_map(
    program: Program,
    draw: random.Random,
    whole: Sent,
    mapped: Any,
    mine: list[Sent],
    is_iterated: bool,
    can_await: bool,
) -> None:
    """Iterate over a map, or have the values as one, now or later."""
    if is_iterated:
        _iterate(program, draw, whole, mapped, can_await)
    elif draw.random() < 0.5:
        program.calls.append(whole)
        whole.future = mapped.future
        mine.append(whole)
    else:
        began = program.world.now
        program.judge(whole, mapped.result())
        program.check_lateness(whole, began)


def _iterate(program: Program, draw: random.Random, whole: Sent, mapped: Any, can_await: bool) -> None:
    """Take values of a map as they come: all, or some, and then close it."""
    n_taken = draw.choice([math.inf, math.inf, 0, 1, 3])
    left = dict(enumerate(whole.parts))

    def take(future: Any, began: float) -> bool:
        """Take one; whether it was the last that is wanted."""
        row = future.numbers[0] // (whole.chunk or 1)
        program.world.check(row in left, "a row comes twice", whole.token, row)
        part = left.pop(row)
        size = part.n_rows or 1
        program.world.check(len(future.numbers) == size, "the numbers of a chunk", whole.token, future.numbers)
        try:
            program.judge(part, future.result())
            program.check_lateness(part, began)
        except bm.BandmasterError as error:
            program.judge(part, error)
        return len(whole.parts) - len(left) >= n_taken

    async def take_all() -> None:
        began = program.world.now
        async for future in mapped:
            if take(future, began):
                break
            began = program.world.now

    if can_await and draw.random() < 0.3:
        loop = Loop()
        try:
            loop.run_until_complete(take_all())
        finally:
            loop.close()
            asyncio.set_event_loop(None)
    else:
        began = program.world.now
        for future in mapped if n_taken else ():
            if take(future, began):
                break
            began = program.world.now
    if n_taken is math.inf:
        program.world.check(not left, "rows do not come", whole.token, [part.token for part in left.values()])
        return
    for part in left.values():
        part.is_cancelled = True
    mapped.close()
    for part in left.values():
        part.cancel_at(program.world.now)


def stream(program: Program, draw: random.Random) -> None:
    """Take the results of a call as they come: all, or some, and then close the stream."""
    sent, n_taken = program.drawn(draw, asking=0.0), draw.choice([math.inf, math.inf, 0, 1])
    left = set(range(program.kind.n_ranks))
    program.world.note("streams", sent.token, n_taken)
    with program.judged(sent):
        began = program.world.now
        stream = program.group.work.stream(*sent.args)
        for future in stream if n_taken else ():
            program.world.check(future.rank in left, "the value of a rank comes twice", sent.token, future.rank)
            left.remove(future.rank)
            token, rank, *_ = future.result()
            program.world.check((token, rank) == (sent.token, future.rank), "another's value", sent.token, token, rank)
            if program.kind.n_ranks - len(left) >= n_taken:
                break
        else:
            if n_taken:
                program.world.check(not left, "values of ranks do not come", sent.token, left)
                program.check_lateness(sent, began)
        sent.is_cancelled = bool(left)
        stream.close()
        if left:
            sent.cancel_at(program.world.now)


def read_items(program: Program, draw: random.Random) -> None:
    """Read the items of a request as they come: all, or some, and then close the stream."""
    sent, n_taken, n = program.drawn(draw, asking=1.0), draw.choice([math.inf, math.inf, 0, 1, 3]), 0
    sent.method, sent.has_ballast, maxsize = "tokens", False, draw.choice([1, 2, 5])
    program.world.note("reads items", sent.token, n_taken, maxsize)
    with program.judged(sent):
        stream = program.group.tokens.options(maxsize=maxsize).stream(sent.token)
        for array, number in stream if n_taken else ():
            is_right = number == n and len(array) in (10, 12_000) and bool((array == sent.token).all())
            program.world.check(is_right, "another item", sent.token, n, number)
            n += 1
            if n >= n_taken:
                break
        else:
            if n_taken:
                program.world.check(n == sent.token % 9, "items do not come", sent.token, n)
                program.world.check(sent.hows <= {"value", "large"}, "a generator that fails has ended", sent.token)
        sent.is_cancelled = True
        stream.close()
        sent.cancel_at(program.world.now)


def take_items(program: Program, draw: random.Random) -> None:
    """Take the items of generators as they come: all, or some, and then close the stream."""
    sent, n_taken = program.drawn(draw, asking=0.0), draw.choice([math.inf, math.inf, 0, 1, 3])
    sent.method, maxsize = "items", draw.choice([1, 2, 5])
    came = dict.fromkeys(range(program.kind.n_ranks), 0)
    program.world.note("takes items", sent.token, n_taken, maxsize)
    with program.judged(sent):
        stream = program.group.items.options(maxsize=maxsize).stream(sent.token)
        for future in stream if n_taken else ():
            found = future.result()
            expected = (sent.token, future.rank, came[future.rank])
            program.world.check(found == expected, "another item", found, expected)
            came[future.rank] += 1
            if sum(came.values()) >= n_taken:
                break
        else:
            if n_taken:
                n_items = {*came.values(), sent.token % 4}
                program.world.check(len(n_items) == 1, "items do not come", sent.token, came)
                program.world.check(sent.hows <= {"value", "large"}, "a generator that fails has ended", sent.token)
        sent.is_cancelled = True
        stream.close()
        sent.cancel_at(program.world.now)
