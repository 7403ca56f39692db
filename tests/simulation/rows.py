"""Steps of programs: rows that ranks keep, operations on them, and calls that take them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

import bandmaster as bm
from simulation.drawn import Sent, made_ids, passed_on, width_of
from simulation.maps import take_map

if TYPE_CHECKING:
    from simulation.program import Program

MOST_ROWS = 40
DEEPEST = 6  # operations on operations


def use_rows(program: Program, draw: random.Random, mine: list[Sent], can_await: bool) -> None:
    """Make rows, derive others from them, pass them to calls, before or after they are there, or let go of them."""
    handles = [sent for sent in (*mine, *program.calls) if sent.ids is not None and sent.future is not None]
    what = draw.random()
    if not handles or what < 0.25:
        _make(program, draw, mine)
    elif what < 0.5:
        _derive(program, draw, mine, handles)
    elif what < 0.8:
        _pass(program, draw, mine, handles)
    elif what < 0.88:
        _map(program, draw, mine, draw.choice(handles), can_await)
    else:
        _let_go(program, draw, draw.choice(handles))


def _make(program: Program, draw: random.Random, mine: list[Sent]) -> None:
    if draw.random() < 0.2:
        sent = Sent(next(program.tokens), "operation", {})
        sent.ids, sent.width = made_ids(sent.token, 0), width_of(sent.token)
        batch = np.tile(sent.ids[:, None], sent.width)
        _keep(program, draw, mine, sent, lambda: program.group.put(batch))
        return
    sent = program.drawn(draw, asking=0.0)
    sent.method, sent.has_ballast, sent.width = "rows", False, width_of(sent.token)
    sent.ids = np.concatenate([made_ids(sent.token, rank) for rank in range(program.kind.n_ranks)])
    _submit(program, draw, mine, sent)


def _submit(program: Program, draw: random.Random, mine: list[Sent], sent: Sent) -> None:
    program.calls.append(sent)
    if sent.ids is None and draw.random() < 0.2:
        program.call(sent)
        return
    program.submit_it(sent)
    if sent.future is not None:
        mine.append(sent)
        if draw.random() < 0.3:
            program.add_callback(sent)


def _keep(program: Program, draw: random.Random, mine: list[Sent], sent: Sent, make: Any) -> None:
    """Make a future without a call."""
    program.world.note("derives", sent.token, [parent.token for parent in sent.parents])
    with program.judged(sent):  # rows that are there may have failed
        sent.future = make()
        program.calls.append(sent)
        mine.append(sent)
        if draw.random() < 0.3:
            program.add_callback(sent)


def _depth(sent: Sent) -> int:
    return 1 + max(map(_depth, sent.parents), default=0)


def _derive(program: Program, draw: random.Random, mine: list[Sent], handles: list[Sent]) -> None:
    """An operation on rows."""
    one = draw.choice(handles)
    if _depth(one) > DEEPEST:
        return
    sent, n, rows = Sent(next(program.tokens), "operation", {}), len(one.ids), one.future
    sent.parents, sent.width, how = (
        [one],
        one.width,
        draw.choice(["slice", "take", "mask", "repeat", "shuffle", "concat"]),
    )
    if how == "slice":
        chosen: Any = slice(draw.randint(0, n), draw.randint(0, n), draw.choice([1, 1, -1, 2]))
    elif how == "take":
        chosen = np.array([draw.randrange(n) for _ in range(draw.randint(0, n))], dtype=int)
    elif how == "mask":
        chosen = np.array([draw.random() < 0.5 for _ in range(n)], dtype=bool)
    elif how == "repeat":
        chosen = np.repeat(np.arange(n), 2)
    elif how == "shuffle":
        chosen = np.random.default_rng(sent.token).permutation(n)
    else:
        others = [other for other in handles if other.width == one.width and _depth(other) <= DEEPEST]
        sent.parents += draw.choices(others, k=draw.choice([1, 2]))
    sent.ids = one.ids[chosen] if how != "concat" else np.concatenate([parent.ids for parent in sent.parents])
    if len(sent.ids) > MOST_ROWS:
        return
    futures = [parent.future for parent in sent.parents]
    if how == "concat":
        _keep(program, draw, mine, sent, lambda: bm.concat(futures))
    elif how == "repeat":
        _keep(program, draw, mine, sent, lambda: rows.repeat(2))
    elif how == "shuffle":
        _keep(program, draw, mine, sent, lambda: rows.shuffle(seed=sent.token))
    else:
        _keep(program, draw, mine, sent, lambda: rows[chosen])


def _pass(program: Program, draw: random.Random, mine: list[Sent], handles: list[Sent]) -> None:
    """Pass rows to a call or a request."""
    one = draw.choice(handles)
    if _depth(one) > DEEPEST:
        return
    asking = draw.random() < 0.3
    sent = program.drawn(draw, asking=float(asking))
    sent.parents, sent.has_ballast = [one], False
    if not asking:
        sent.method = draw.choice(["take", "take", "pass_on"])
    if sent.method == "pass_on":
        sent.ids, sent.width = passed_on(one.ids, sent.token), one.width
    elif sent.method == "take" and draw.random() < 0.2:
        sent.parents.append(draw.choice([other for other in handles if len(other.ids) == len(one.ids)]))
    _submit(program, draw, mine, sent)


def _map(program: Program, draw: random.Random, mine: list[Sent], one: Sent, can_await: bool) -> None:
    """Map a method over rows that ranks keep."""
    size, n = draw.choice([1, 2, 3]), len(one.ids)
    if len(set(one.ids.tolist())) < n or not 0 < n <= 12 or _depth(one) > DEEPEST:
        return  # requests are told from each other by their rows
    whole = Sent(next(program.tokens), "map", {})
    whole.parents, whole.chunk, whole.width = [one], size, one.width
    for start in range(0, n, size):
        part = program.drawn(draw, asking=1.0)
        part.method, part.parents, part.has_ballast = "score", [one], False
        part.taken, part.width = one.ids[start : start + size], one.width
        part.ids = passed_on(part.taken, part.token)
        whole.parts.append(part)
    whole.ids = np.concatenate([part.ids for part in whole.parts])
    if whole.hows & {"raise", "die"}:
        for part in whole.parts:
            part.is_cancelled = True  # perhaps, as another one has failed
    program.by_token[whole.token] = whole
    is_iterated, rows = draw.random() < 0.5, one.future
    program.world.note("maps over rows", whole.token, one.token, [part.token for part in whole.parts])
    with program.judged(whole):
        try:
            mapped = program.group.score.map(rows, whole.token, chunk=size, in_flight=draw.choice([None, 1, 3]))
        finally:
            for lost in (whole, *whole.parts):
                lost.may_be_lost = one.may_be_released
        take_map(program, draw, whole, mapped, mine, is_iterated, can_await)


def _let_go(program: Program, draw: random.Random, one: Sent) -> None:
    """Release rows, or drop their future."""
    if draw.random() < 0.5:
        program.world.note("releases", one.token)
        one.is_releasing = True
        one.future.release()
        one.is_released = True
    elif one.n_expected == 0:
        program.world.note("drops", one.token)
        one.future = None
