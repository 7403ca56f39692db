"""The steps of a program: frozen data, each of which renders to a line of Python and knows what the oracle expects."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fuzz import oracle as plain
from fuzz.mistakes import MISTAKES
from fuzz.oracle import SCOPE, SPLIT, Expected, Group, Invalid, columns_of, n_rows, names_of, take, with_columns
from fuzz.scenes import SCENES
from fuzz.subject import METHODS
from fuzz.values import Columns, Leaf


@dataclass(frozen=True)
class Each:
    """An argument: a list of one value per rank."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Ranks:
    """An argument: the ranks that are to fail, or to do something else."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Numbers:
    """Numbers of rows, as an array."""

    rows: tuple[int, ...]
    dtype: str


Arg = str | Each | Ranks


def arg_code(arg: Arg) -> str:
    if isinstance(arg, Each):
        return f"[{', '.join(arg.names)}]"
    return repr(arg.ranks) if isinstance(arg, Ranks) else arg


def arg_value(oracle, arg):
    if isinstance(arg, Each):
        return [oracle.argument(name) for name in arg.names]
    return arg.ranks if isinstance(arg, Ranks) else oracle.argument(arg)


def names_in(arg: Arg):
    return list(arg.names) if isinstance(arg, Each) else [] if isinstance(arg, Ranks) else [arg]


@dataclass(frozen=True)
class Step:
    """One line of a program.

    Attributes:
        out: The name that it binds.
        is_seen: Whether what it binds is a value, which is compared.
        may_be_early: Whether an error that is expected of the handle may come at once as well.
        needs_processes: Whether it has no meaning on backend ``inprocess``.
    """

    out: str
    is_seen: ClassVar[bool] = False
    may_be_early: ClassVar[bool] = False
    needs_processes = False

    def code(self) -> str:
        raise NotImplementedError

    def expect(self, oracle) -> Any:
        """Do it on plain values; return the value that it binds.

        Raises:
            Expected: This error must come instead.
            Invalid: The step has no meaning here.
        """
        raise NotImplementedError

    def uses(self) -> list[str]:
        return []

    def smaller(self):
        return iter(())


@dataclass(frozen=True)
class MakeGroup(Step):
    """Start a group, or two whose workers share processes.

    Attributes:
        axes: Of the mesh: their names and sizes.
        is_other: Whether it is on another backend than the program.
        roles: For two groups, which `colocate` makes, the names of these roles; ``out`` is the first of them.
    """

    axes: tuple[tuple[str, int], ...]
    is_other: bool = False
    roles: tuple[str, ...] = ()

    @property
    def names(self):
        """The names of its groups in the program."""
        return (self.out, f"{self.out}_{self.roles[1]}") if self.roles else (self.out,)

    def code(self):
        mesh = ", ".join(f"{name}={size}" for name, size in self.axes)
        pool = f"bm.ResourcePool([{Group(self.axes).size}], backend={'OTHER' if self.is_other else 'BACKEND'})"
        if not self.roles:
            return f"{self.out} = bm.WorkerGroup({pool}, Subject, mesh=bm.Mesh({mesh}))"
        roles = ", ".join(f"{role}=Subject" for role in self.roles)
        meshes = f"meshes=dict.fromkeys({list(self.roles)}, bm.Mesh({mesh}))"
        made = f"{self.out}_both = bm.colocate({pool}, {meshes}, {roles})"
        return f"{made}; {', '.join(self.names)} = map({self.out}_both.role, {list(self.roles)})"

    def expect(self, oracle):
        for name in self.names:
            oracle.groups[name] = Group(self.axes, is_role=bool(self.roles))

    def smaller(self):
        if self.is_other:
            yield replace(self, is_other=False)
        if self.roles:
            yield replace(self, roles=())
        for i, (name, size) in enumerate(self.axes):
            if size > 1:
                yield replace(self, axes=(*self.axes[:i], (name, size - 1), *self.axes[i + 1 :]))
            if name != "dp" and len(self.axes) > 1:
                yield replace(self, axes=self.axes[:i] + self.axes[i + 1 :])


@dataclass(frozen=True)
class Let(Step):
    value: Leaf | Columns

    def code(self):
        return f"{self.out} = {self.value.code()}"

    def expect(self, oracle):
        oracle.values[self.out] = eval(self.value.code(), SCOPE)

    def smaller(self):
        return (replace(self, value=less) for less in self.value.smaller())


@dataclass(frozen=True)
class Invoke(Step):
    """What `Call`, `Submit` and `Stream` have in common."""

    group: str
    method: str
    args: tuple[Arg, ...]

    def arguments(self):
        return ", ".join(map(arg_code, self.args))

    def uses(self):
        return [self.group, *(name for arg in self.args for name in names_in(arg))]

    def checked(self, oracle):
        group = oracle.group(self.group)
        if self.method in ("widen", "sift") and not _is_plain_numbers(arg_value(oracle, self.args[0])):
            raise Invalid("no numbers")
        if self.method == "sift" and not _is_dense(arg_value(oracle, self.args[0])):
            raise Invalid("no rows that can be chosen one by one")
        values = [arg for arg in self.args if isinstance(arg, str) and arg in oracle.values]
        if len(set(values)) < len(values):
            raise Invalid("one object twice, which a rank may get as one or as two")
        if any(rank >= group.size for arg in self.args if isinstance(arg, Ranks) for rank in arg.ranks):
            raise Invalid("no such rank")
        args = [arg_value(oracle, arg) for arg in self.args]
        if METHODS[self.method][0] in SPLIT and len({n_rows(a) for a in args if type(a) is not tuple}) != 1:
            raise Invalid("unequal rows")
        if METHODS[self.method][0] == "ALL_TO_ALL" and len(args[0]) != group.size:
            raise Invalid("one value per rank")
        return group, args

    def smaller(self):
        if self.method in ("three", "micro", "keep", "bumped", "padded", "cells", "widen", "sift", "recat", "order"):
            yield replace(self, method="same")


@dataclass(frozen=True)
class Call(Invoke):
    """A call.

    Attributes:
        chunk: Rows of each request of a map; 0 if it is no map.
        group_by: The column of which equal values come into one chunk.
    """

    is_seen = True
    chunk: int = 0
    group_by: Any = None

    def map(self):
        by = "" if self.group_by is None else f", group_by={self.group_by!r}"
        return f"{self.group}.map_{self.method}.map({self.arguments()}, chunk={self.chunk}{by})"

    def code(self):
        if self.chunk:
            return f"{self.out} = {self.map()}.result()"
        return f"{self.out} = {self.group}.{self.method}({self.arguments()})"

    def expect(self, oracle):
        group, args = self.checked(oracle)
        oracle.values[self.out] = group.call(self.method, args)
        return oracle.values[self.out]

    def smaller(self):
        yield from super().smaller()
        if self.chunk:
            yield replace(self, chunk=0)


@dataclass(frozen=True)
class Submit(Call):
    is_seen = False
    may_be_early = True

    def code(self):
        if self.chunk:
            return f"{self.out} = {self.map()}.future"
        return f"{self.out} = {self.group}.{self.method}.submit({self.arguments()})"

    def expect(self, oracle):
        try:
            group, args = self.checked(oracle)
            oracle.handles[self.out] = group.call(self.method, args)
        except Expected as error:
            oracle.handles[self.out] = error

    def smaller(self):
        yield from super().smaller()
        yield Call(self.out, self.group, self.method, self.args, self.chunk, self.group_by)


@dataclass(frozen=True)
class Stream(Invoke):
    is_seen = True

    def code(self):
        numbers = "None if i.numbers is None else list(map(int, i.numbers))"
        items = f"[(i.rank, {numbers}, i.result()) for i in {self.group}.{self.method}.stream({self.arguments()})]"
        return f"{self.out} = sorted({items}, key=lambda item: item[0])"

    def expect(self, oracle):
        group, args = self.checked(oracle)
        outcomes, numbers = group.outcomes(self.method, args)
        made = []
        for rank in sorted(group.sources(METHODS[self.method][0])):
            items = outcomes[rank] if self.method == "items" else [outcomes[rank]]
            made += [(rank, None if numbers[rank] is None else list(numbers[rank]), item) for item in items]
        oracle.values[self.out] = made
        return made


@dataclass(frozen=True)
class Put(Step):
    group: str
    value: str

    def code(self):
        return f"{self.out} = {self.group}.put({self.value})"

    def uses(self):
        return [self.group, self.value]

    def expect(self, oracle):
        oracle.group(self.group)
        oracle.handles[self.out] = oracle.argument(self.value)


@dataclass(frozen=True)
class Operate(Step):
    """An operation of a handle: its text, with the names of handles and data in it.

    Attributes:
        name: ``"rows"``, ``"select"``, ``"drop"``, ``"rename"``, ``"join"``, ``"concat"``, ``"repeat"``,
            ``"shuffle"``, ``"sort_by"`` or ``"batches"``.
    """

    may_be_early = True
    name: str
    handles: tuple[str, ...]
    what: Any = None

    def uses(self):
        return list(self.handles)

    def code(self):
        rows, what = self.handles[0], self.what
        if self.name == "rows":
            text = f"{rows}[{_index_code(what)}]"
        elif self.name == "concat":
            text = f"bm.concat([{', '.join(self.handles)}])"
        elif self.name == "batches":
            text = f"bm.concat([{rows}[:0], *{rows}.batches({what})])"
        elif self.name in ("select", "drop"):
            text = f"{rows}.{self.name}({', '.join(map(repr, what))})"
        elif self.name == "join":
            text = f"{rows}.join({', '.join(self.handles[1:])})"
        else:
            argument = f"seed={what}" if self.name == "shuffle" else repr(dict(what) if self.name == "rename" else what)
            text = f"{rows}.{self.name}({argument})"
        return f"{self.out} = {text}"

    def expect(self, oracle):
        try:
            rows = [oracle.handle(name) for name in self.handles]
        except Expected as error:
            oracle.handles[self.out] = error
            return
        oracle.handles[self.out] = self._made(rows)
        oracle.origins[self.out] = {origin for name in self.handles for origin in (name, *oracle.origins.get(name, ()))}

    def _made(self, rows):
        first, what, n = rows[0], self.what, n_rows(rows[0])
        names = names_of(first)
        if self.name in ("select", "drop", "rename", "sort_by", "join") and names is None:
            raise Invalid("no columns")
        if self.name == "rows":
            return take(first, _chosen(what, n))
        if self.name in ("repeat", "shuffle"):
            if self.name == "repeat":
                return take(first, [i for i in range(n) for _ in range(what)])
            return take(first, np.random.default_rng(what).permutation(n))
        if self.name == "batches":
            return copy.deepcopy(first)
        if self.name == "concat":
            if len({plain.form_of(one) for one in rows}) > 1:
                raise Invalid("other columns")
            return plain.concat(rows)
        if self.name == "join":
            return _joined_columns(rows)
        if self.name == "sort_by":
            if what not in names:
                raise Invalid(what)
            return take(first, _order(first[what]))
        asked = [old for old, _ in what] if self.name == "rename" else list(what)
        if not set(asked) <= set(names):
            raise Invalid("no such column")
        if self.name == "rename":
            chosen = {dict(what).get(name, name): name for name in names}
            if len(chosen) < len(names):
                raise Invalid("one name twice")
        else:
            chosen = {name: name for name in (asked if self.name == "select" else names)}
            if self.name == "drop":
                chosen = {name: name for name in names if name not in asked}
        if not chosen:
            raise Invalid("no column is left")
        if (columns := columns_of(first)) is not None:
            return copy.deepcopy(with_columns(first, {new: columns[old] for new, old in chosen.items()}))
        names = SCOPE["pd"].Index(list(chosen), name=first.columns.name)
        return first[list(chosen.values())].set_axis(names, axis=1).copy()

    def smaller(self):
        if self.name == "concat" and len(self.handles) > 1:
            yield replace(self, handles=self.handles[:1])
        if self.name in ("repeat", "batches") and self.what > 1:
            yield replace(self, what=self.what - 1)
        if self.name == "shuffle" and self.what:
            yield replace(self, what=0)
        if self.name == "rows":
            yield replace(self, what=(0, None, None))


def _index_code(what):
    if isinstance(what, Numbers):
        return f"np.array({list(what.rows)}, {what.dtype!r})"
    if isinstance(what, tuple):
        return ":".join("" if part is None else str(part) for part in what)
    return repr(what)


def _chosen(what, n):
    what = list(what.rows) if isinstance(what, Numbers) else what
    if isinstance(what, tuple):
        return range(n)[slice(*what)]
    if what and isinstance(what[0], bool):
        if len(what) != n:
            raise Invalid("mask of another length")
        return [i for i in range(n) if what[i]]
    if any(not -n <= i < n for i in what):
        raise Invalid("no such row")
    return [i % n for i in what]


def _joined_columns(rows):
    names = [name for one in rows for name in names_of(one) or [None]]
    if len(set(names)) < len(names) or None in names or len({n_rows(one) for one in rows}) > 1:
        raise Invalid("columns that do not fit")
    if len({type(one) for one in rows}) > 1:
        raise Invalid("two kinds of rows")
    if columns_of(rows[0]) is not None:
        return copy.deepcopy(with_columns(rows[0], {name: column for one in rows for name, column in one.items()}))
    if any(one.index.tolist() != rows[0].index.tolist() for one in rows):
        raise Invalid("another index")
    return SCOPE["pd"].concat(rows, axis=1)


def _is_plain_numbers(value):
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iuf"
    return isinstance(value, SCOPE["torch"].Tensor) and not value.is_complex() and str(value.dtype) != "torch.bool"


def _is_dense(value):
    return getattr(value, "layout", SCOPE["torch"].strided) is SCOPE["torch"].strided


def _is_writable(value):
    if (columns := columns_of(value)) is not None:
        return all(map(_is_writable, columns.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_writable, value))
    if isinstance(value, np.ndarray):
        return value.flags.writeable
    return 0 not in value.stride() if hasattr(value, "stride") else True


def _order(column):
    """The numbers of the rows, ascending by a column, equal ones as they are."""
    if hasattr(column, "iloc"):
        try:
            return column.reset_index(drop=True).sort_values(kind="stable").index
        except TypeError:
            raise Invalid("values that cannot be compared") from None
    if (
        isinstance(column, SCOPE["torch"].Tensor)
        and column.layout is SCOPE["torch"].strided
        and str(column.dtype) != "torch.bfloat16"
    ):
        column = column.detach().numpy()
    if not isinstance(column, np.ndarray) or column.ndim > 1 or column.dtype.kind not in "biufUSmM":
        raise Invalid("no column to sort by")
    return np.argsort(column, kind="stable")


@dataclass(frozen=True)
class Read(Step):
    """Read a handle: the same object each time, which is the caller's own."""

    is_seen = True
    handle: str

    def code(self):
        return f"{self.out} = {self.handle}.result()"

    def uses(self):
        return [self.handle]

    def expect(self, oracle):
        value = oracle.handle(self.handle)
        oracle.values[self.out] = oracle.results.setdefault(self.handle, copy.deepcopy(value))
        return oracle.values[self.out]


@dataclass(frozen=True)
class Await(Read):
    """Read a handle in an event loop of its own."""

    def code(self):
        return f"{self.out} = asyncio.run(awaited({self.handle}))"

    def smaller(self):
        yield Read(self.out, self.handle)


@dataclass(frozen=True)
class Overwrite(Step):
    """The caller overwrites a value of its own, in place."""

    name: str

    def code(self):
        return f"{self.out} = bump({self.name})"

    def uses(self):
        return [self.name]

    def expect(self, oracle):
        if not _is_writable(oracle.value(self.name)):
            raise Invalid(self.name)
        plain.bump(oracle.value(self.name))


@dataclass(frozen=True)
class Look(Step):
    """The caller looks at a value of its own, which no call may have changed."""

    is_seen = True
    name: str

    def code(self):
        return f"{self.out} = {self.name}"

    def uses(self):
        return [self.name]

    def expect(self, oracle):
        return oracle.value(self.name)


@dataclass(frozen=True)
class Release(Step):
    """Release a handle, and read it: its rows are lost."""

    is_seen = True
    handle: str

    def code(self):
        return f"{self.handle}.release(); {self.out} = {self.handle}.result()"

    def uses(self):
        return [self.handle]

    def expect(self, oracle):
        if self.handle in oracle.results:
            raise Invalid("read before")
        found = oracle.handles.pop(self.handle, None)
        if found is None or isinstance(found, Expected):
            raise Invalid("no rows")
        for name in [name for name, origins in oracle.origins.items() if self.handle in origins]:
            oracle.handles.pop(name, None)  # what was made of it may be lost, or not
        raise Expected("RowsLost")


def end_of(handles):
    """Waits for calls."""
    return f"[{', '.join(f'{name}.exception()' for name in handles)}]"


def check_all_end(handles, oracle):
    """Raise Invalid if these are not all handles that there are."""
    if set(handles) != oracle.handles.keys():
        raise Invalid("calls may be on the way")


def check_is_alone(group):
    """Raise Invalid if the group shares its processes, with which it cannot be restarted."""
    if group.is_role:
        raise Invalid("a role")


@dataclass(frozen=True)
class Restart(Step):
    """Restart a group, whose calls have ended by then: its objects are new, and handles stay."""

    group: str
    handles: tuple[str, ...]  # of calls that may not have ended; handles that are gone by then are not waited for

    def code(self):
        return f"{end_of(self.handles)}; {self.group}.restart()"

    def uses(self):
        return [self.group, *self.handles]

    def expect(self, oracle):
        check_all_end(self.handles, oracle)
        group = oracle.group(self.group)
        check_is_alone(group)
        group.renew()


@dataclass(frozen=True)
class Interrupt(Call):
    """Press Ctrl-C while a call runs, or just before or after; later calls are made, and callbacks run, as ever.

    Attributes:
        seconds: After each of which it is pressed.
        at: It is done for each of these, and Ctrl-C comes as so many functions have begun or ended, if any; if the
            number is negative, counted from where a pipe, a thread or a process is made first.
        how: What is done: one of `INTERRUPTED`.
    """

    is_seen = True
    seconds: tuple[float, ...] = ()
    at: tuple[int, ...] = (0,)
    how: str = "call"

    def code(self):
        if self.chunk and self.how in INTERRUPTED_MAPS:
            call = INTERRUPTED_MAPS[self.how].format(self.map())
        else:
            call = INTERRUPTED[self.how].format(f"{self.group}.{self.method}", self.arguments(), self.group)
        heard = f"{self.out} = heard({self.group}, lambda: {call}, {self.seconds}, {self.at})"
        heard += f" and answered({self.group})" if "ask" in self.how else ""
        pool = "bm.ResourcePool([1], backend=BACKEND, preload=[])"  # has workers that are started in a way of its own
        return heard if self.how != "started" else f"with {pool} as slots: {heard}"

    def expect(self, oracle):
        self.checked(oracle)
        return True

    def smaller(self):
        if self.how != "call":
            yield replace(self, how="call")
        if len(self.at) > 1:
            yield from (replace(self, at=self.at[:i] + self.at[i + 1 :]) for i in range(len(self.at)))


INTERRUPTED = {
    "call": "{0}({1})",
    "told": "told({0}.submit({1}))",
    "awaited": "asyncio.run(awaited({0}.submit({1})))",
    "streamed": "list({0}.stream({1}))",
    "cancelled": "{0}.submit({1}).cancel()",
    "asked": "[one.result() for one in [{2}.ask(0, 0.002) for _ in range(3)]]",
    "asked in a loop": "asyncio.run(awaited({2}.ask(0, 0.002)))",
    "asked in vain": "[one.cancel() for one in [{2}.ask(0, 0.02) for _ in range(3)]]",
    "started": "setattr(slots, 'kept', bm.WorkerGroup(slots, bm.Worker))",  # which the pool closes
}
INTERRUPTED_MAPS = {
    "call": "{0}.result()",
    "told": "told({0}.future)",
    "awaited": "asyncio.run(awaited({0}.future))",
    "streamed": "list({0})",
    "cancelled": "{0}.cancel()",
}


@dataclass(frozen=True)
class Mistake(Invoke):
    """Something that is refused before anything is sent.

    Attributes:
        how: Which of `MISTAKES`.
        n: The number of rows.
    """

    is_seen = True
    how: str = "none"
    n: int = 0

    def _filled(self, text, size=0):
        rows = self.args[0]
        handle = rows if rows.startswith("h") else f"{self.group}.put({rows})"
        return text.format(g=self.group, m=self.method, v=rows, h=handle, n=self.n, more=self.n + 1, size=size)

    def code(self):
        return f"{self.out} = {self._filled(MISTAKES[self.how].code)}"

    def expect(self, oracle):
        group, (rows,) = self.checked(oracle)
        if n_rows(rows) != self.n:
            raise Invalid("another number of rows")
        wrong = MISTAKES[self.how]
        raise Expected(wrong.error, says=tuple(self._filled(words, group.size) for words in wrong.says))


@dataclass(frozen=True)
class Play(Invoke):
    """One of `SCENES`, with a group, rows and some ranks of it.

    Attributes:
        name: Of the scene.
        handles: As those of `Restart`, if all calls must have ended before.
    """

    is_seen = True
    name: str = ""
    handles: tuple[str, ...] = ()

    @property
    def needs_processes(self):
        return SCENES[self.name].needs_processes

    def code(self):
        ends = f"{end_of(self.handles)}; " if self.handles else ""
        return f"{ends}{self.out} = {self.name}({self.group}, {self.arguments()})"

    def uses(self):
        return [*super().uses(), *self.handles]

    def expect(self, oracle):
        scene = SCENES[self.name]
        group, (rows, ranks) = self.checked(oracle)
        if (scene.needs_processes or scene.needs_values) and self.args[0] in oracle.handles:
            raise Invalid("the call may wait for rows instead")
        if scene.is_quiet:
            check_all_end(self.handles, oracle)
            check_is_alone(group)
        oracle.values[self.out] = scene.comes(group, rows, ranks)
        return oracle.values[self.out]


def expectations(program):
    """For each step, what must come: a value as text, an `Expected` error, or None.

    Raises:
        Invalid: The program has no meaning.
    """
    oracle, found = plain.Oracle(), []
    for step in program:
        found.append(expectation(step, oracle))
    return found


def expectation(step, oracle):
    try:
        value = step.expect(oracle)
    except Expected as error:
        return error
    if step.may_be_early:
        rows = oracle.handles[step.out]
        return rows if isinstance(rows, Expected) else None
    return plain.show(value) if step.is_seen else None
