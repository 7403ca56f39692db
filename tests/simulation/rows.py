"""Steps of programs: rows that ranks keep, operations on them, and calls that take them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

import bandmaster as bm
from bandmaster.rows import kept
from simulation.columns import NAMES, chosen, made, passed_on_of, stacked, value_of
from simulation.drawn import Sent
from simulation.maps import take_map

if TYPE_CHECKING:
    from simulation.program import Program

MOST_ROWS = 40
DEEPEST = 6  # operations on operations


def use_rows(program: Program, draw: random.Random, mine: list[Sent], can_await: bool) -> None:
    """Make rows, derive others from them, pass them to calls, before or after they are there, or let go of them."""
    handles = [sent for sent in (*mine, *program.calls) if sent.columns is not None and sent.future is not None]
    if handles and draw.random() < program.kind.joining / 5:
        if draw.random() < 0.5:
            _look(program, draw.choice(handles))
        else:
            _batches(program, draw, mine, draw.choice(handles))
        return
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
    is_named = draw.random() < program.kind.joining
    if draw.random() < 0.2:
        sent = Sent(next(program.tokens), "operation", {})
        sent.columns = made(sent.token, 0, is_named)
        batch = value_of(sent.columns)
        _keep(program, draw, mine, sent, lambda: program.group.put(batch))
        return
    sent = program.drawn(draw, asking=0.0)
    sent.method, sent.has_ballast = "columns" if is_named else "rows", False
    sent.columns = stacked([made(sent.token, rank, is_named) for rank in range(program.kind.n_ranks)])
    _submit(program, draw, mine, sent)


def _submit(program: Program, draw: random.Random, mine: list[Sent], sent: Sent) -> None:
    program.calls.append(sent)
    if sent.columns is None and draw.random() < 0.2:
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
    sent = Sent(next(program.tokens), "operation", {})
    sent.parents = [one]
    is_of_columns = None not in one.columns and draw.random() < 0.5
    make = (_of_columns if is_of_columns else _of_rows)(draw, sent, one, handles)
    if make is not None and sent.n_rows <= MOST_ROWS:
        _keep(program, draw, mine, sent, make)


def _of_rows(draw: random.Random, sent: Sent, one: Sent, handles: list[Sent]) -> Any:
    """Some rows, or the rows of several futures. Returns what makes them."""
    n, rows = one.n_rows, one.future
    how = draw.choice(["slice", "take", "mask", "repeat", "shuffle", "concat"])
    if how == "concat":
        widths = _widths(one)
        others = [other for other in handles if _widths(other) == widths and _depth(other) <= DEEPEST]
        sent.parents += draw.choices(others, k=draw.choice([1, 2]))
        sent.columns = stacked([parent.columns for parent in sent.parents])
        futures = [parent.future for parent in sent.parents]
        return lambda: bm.concat(futures)
    index: Any = np.array([draw.randrange(n) for _ in range(draw.randint(0, n))], dtype=int)
    make: Any = lambda: rows[index]  # noqa: E731
    if how == "slice":
        index = slice(draw.randint(0, n), draw.randint(0, n), draw.choice([1, 1, -1, 2]))
    elif how == "mask":
        index = np.array([draw.random() < 0.5 for _ in range(n)], dtype=bool)
    elif how == "repeat":
        index, make = np.repeat(np.arange(n), 2), lambda: rows.repeat(2)
    elif how == "shuffle":
        index = np.random.default_rng(sent.token).permutation(n)
        make = lambda: rows.shuffle(seed=sent.token)  # noqa: E731
    sent.columns = chosen(one.columns, index)
    return make


def _of_columns(draw: random.Random, sent: Sent, one: Sent, handles: list[Sent]) -> Any:
    """Some columns, others with these, or the rows in the order of one. Returns what makes them; None for nothing."""
    columns, rows = one.columns, one.future
    free = [name for name in NAMES if name not in columns]
    how = draw.choice(["select", "drop", "rename", "sort", "join", "join", "join"])
    if how == "select":
        names = draw.sample([*columns], draw.randint(1, len(columns)))
        sent.columns = {name: columns[name] for name in names}
        return lambda: rows.select(*names)
    if how == "drop":
        names = draw.sample([*columns], draw.randrange(len(columns)))
        sent.columns = {name: column for name, column in columns.items() if name not in names}
        return lambda: rows.drop(*names)
    if how == "rename":
        n_new = draw.randint(0, min(len(free), len(columns)))
        new = dict(zip(draw.sample([*columns], n_new), draw.sample(free, n_new), strict=True))
        sent.columns = {new.get(name, name): column for name, column in columns.items()}
        return lambda: rows.rename(new)
    if how == "sort":
        name = draw.choice([*columns])
        sent.columns = chosen(columns, np.argsort(columns[name].ids, kind="stable"))
        return (lambda: rows.sort_by(name)) if columns[name].width == 1 else None
    same = [other for other in handles if other.n_rows == one.n_rows and None not in other.columns]
    other = draw.choice([other for other in same if _depth(other) <= DEEPEST])
    twice = [name for name in other.columns if name in columns]
    unused = [name for name in free if name not in other.columns]
    if len(twice) > len(unused):
        return None
    new = dict(zip(twice, unused, strict=False))
    sent.parents.append(other)
    sent.columns = {**columns, **{new.get(name, name): column for name, column in other.columns.items()}}
    others = other.future
    return lambda: rows.join(others.rename(new) if new else others)


def _widths(sent: Sent) -> dict[Any, int]:
    return {name: column.width for name, column in sent.columns.items()}


def _batches(program: Program, draw: random.Random, mine: list[Sent], one: Sent) -> None:
    """Batches of rows, each of which a call takes; they are released, or dropped, while calls wait for them."""
    size, rows = draw.randint(1 + one.n_rows // 4, 1 + one.n_rows), one.future
    futures: list[Any] = []
    with program.judged(one):
        began = program.world.now
        futures += rows.batches(size)
        program.check_lateness(one, began)
        program.world.check(len(futures) == -(-one.n_rows // size), "batches are missing", one.token, len(futures))
    for number, future in enumerate(futures):
        batch = Sent(next(program.tokens), "operation", {})
        batch.parents, batch.columns = [one], chosen(one.columns, slice(number * size, (number + 1) * size))
        _keep(program, draw, mine, batch, lambda future=future: future)
        if batch.future is not None:
            _pass_one(program, draw, mine, batch, [batch])
        if batch.future is not None and draw.random() < 0.5:
            _let_go(program, draw, batch)


def _look(program: Program, one: Sent) -> None:
    """Look at what a future knows of its rows."""
    rows, columns, began = one.future, one.columns, program.world.now
    program.world.note("looks at", one.token)
    with program.judged(one):
        n, schema, places = len(rows), rows.schema, rows.where
        shapes = {name: column.shape for name, column in schema.items()}
        program.check_lateness(one, began)
        world, nbytes = program.world, 8 * n * sum(_widths(one).values())
        is_known = n == one.n_rows and [*shapes] == [*columns]
        is_known &= shapes == {name: (width,) for name, width in _widths(one).items()}
        world.check(is_known, "a future does not know its rows", one.token, n, shapes)
        world.check(rows.nbytes >= nbytes - 1, "a future does not know its size", one.token, rows.nbytes, nbytes)
        n_placed = sum(place.n_rows for place in places)
        is_placed = n_placed == n or (n_placed > n and None not in columns)  # columns may lie elsewhere
        world.check(is_placed, "a future does not know the places of its rows", one.token, places)


def _pass(program: Program, draw: random.Random, mine: list[Sent], handles: list[Sent]) -> None:
    """Pass rows to a call or a request."""
    one = draw.choice(handles)
    if _depth(one) <= DEEPEST:
        _pass_one(program, draw, mine, one, handles)


def _pass_one(program: Program, draw: random.Random, mine: list[Sent], one: Sent, handles: list[Sent]) -> None:
    asking = draw.random() < 0.3
    sent = program.drawn(draw, asking=float(asking))
    sent.parents, sent.has_ballast = [one], False
    if not asking:
        sent.method = draw.choice(["take", "take", "pass_on"])
    if sent.method == "pass_on":
        sent.columns = passed_on_of(one.columns, sent.token)
    elif sent.method == "take" and draw.random() < 0.2:
        sent.parents.append(draw.choice([other for other in handles if other.n_rows == one.n_rows]))
    _submit(program, draw, mine, sent)


def _map(program: Program, draw: random.Random, mine: list[Sent], one: Sent, can_await: bool) -> None:
    """Map a method over rows that ranks keep."""
    size, n = draw.choice([1, 2, 3]), one.n_rows
    if any(len(set(ids.tolist())) < n for ids, _ in one.columns.values()) or not 0 < n <= 12 or _depth(one) > DEEPEST:
        return  # requests are told from each other by their rows
    whole = Sent(next(program.tokens), "map", {})
    whole.parents, whole.chunk = [one], size
    for start in range(0, n, size):
        part = program.drawn(draw, asking=1.0)
        part.method, part.parents, part.has_ballast = "score", [one], False
        part.taken = chosen(one.columns, slice(start, start + size))
        part.columns = passed_on_of(part.taken, part.token)
        whole.parts.append(part)
    whole.columns = stacked([part.columns for part in whole.parts])
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


def check_over(world: Any) -> None:
    """No rows are kept any more, neither those that futures refer to nor copies on other hosts."""
    world.check(not kept._living, "kept rows are left", [str(part.origin) for part in kept._living])
    stores = {process: server._store for process, server in world.servers.items() if server._store}
    is_cut = world.network.cut_at or world.network.gone  # so that a host may not have been told
    world.check(not stores or is_cut, "hosts have rows that nobody has", stores)
