"""Programs from seeds: each step is drawn among those that have a meaning in what the oracle knows by then."""

from __future__ import annotations

import contextlib
import itertools
import random

import numpy as np
from hosts import ON_HOSTS

from fuzz.mistakes import MISTAKES
from fuzz.oracle import RETURNS_ROWS, Expected, Invalid, Oracle, n_rows, names_of
from fuzz.scenes import SCENES
from fuzz.steps import (
    INTERRUPTED,
    Await,
    Call,
    Each,
    Interrupt,
    Let,
    Look,
    MakeGroup,
    Mistake,
    Numbers,
    Operate,
    Overwrite,
    Play,
    Put,
    Ranks,
    Read,
    Release,
    Restart,
    Stream,
    Submit,
    expectation,
)
from fuzz.subject import METHODS, NOT_DRAWN
from fuzz.values import LARGE, WIDE, Leaf, random_value, uneven_value

MESHES = [{"dp": 1}, {"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2}, {"tp": 2, "dp": 1}]
MESHES += [{"pp": 2, "dp": 1, "tp": 2}]
FEW_MESHES = [{"dp": 2}, {"dp": 3}]  # where a new group takes seconds
TWO_ARGUMENTS = ["second", "pair"]
N_STEPS = 14
RESTARTS = 0.01  # of steps, as each takes as long as a new group
TROUBLES = 0.3  # of programs, in which ranks hang and die and calls are interrupted
SLOWLY = 0.2  # of these, where a new group takes seconds
OTHERS = 0.05  # of groups, on another backend
COLOCATED = 0.1  # of groups, which are two
HEAVY = 0.15  # of the scenes that take long, are played
PLAYED = {name: scene for name, scene in SCENES.items() if scene.of_hosts in (None, ON_HOSTS)}
CALM = [name for name, scene in PLAYED.items() if not scene.is_trouble]
TROUBLED = [name for name, scene in PLAYED.items() if scene.is_trouble]
IN_CHUNKS = ["same", "micro", "pair", "sift"]  # methods of maps
UNEVEN = ["widen", "sift", "sift", "recat", "order"]  # methods: other dtypes, or another order, by rank


class Generator:
    """Draws one program.

    Args:
        seed: The same seed gives the same program.
        is_slow: Whether a new group takes seconds, so that programs have few kinds of groups, and rarely new ones.
    """

    def __init__(self, seed, is_slow=False):
        self.rng, self._is_slow = random.Random(seed), is_slow
        self.oracle = Oracle()
        self.program = []
        self._numbers = itertools.count()

    def draw(self):
        """The program."""
        rng, meshes = self.rng, FEW_MESHES if self._is_slow else MESHES
        for name in ["g0", "g1"][: rng.choice([1, 1, 2])]:
            roles = ("actor", "critic") if rng.random() < COLOCATED and not self._is_slow else ()
            self._add(MakeGroup(name, tuple(rng.choice(meshes).items()), rng.random() < OTHERS, roles))
        self._let()
        kinds = [self._let, self._call, self._call, self._submit, self._submit, self._submit, self._put, self._stream]
        kinds += [self._operate] * 5 + [self._read, self._overwrite, self._overwrite, self._fail, self._release]
        kinds += [self._await, self._mistake, self._chain] + [lambda: self._play(CALM)] * 2
        if rng.random() < TROUBLES * (SLOWLY if self._is_slow else 1):
            kinds += [self._interrupt] * 4 + [lambda: self._play(TROUBLED)] * 6
        for _ in range(rng.randint(2, N_STEPS)):
            (self._restart if rng.random() < RESTARTS and not self._is_slow else rng.choice(kinds))()
        ends = [Read("", name) for name in self.oracle.handles] + [Look("", name) for name in self.oracle.values]
        ends += [Call("", name, "kept_rows", ()) for name in self.oracle.groups]
        rng.shuffle(ends)
        for step in ends:
            self._add(step)
        return tuple(self.program)

    def _add(self, step):
        prefix = "g" if isinstance(step, MakeGroup) else "h" if isinstance(step, Submit | Put | Operate) else "v"
        if not step.out:
            step = type(step)(f"{prefix}{next(self._numbers)}", *list(step.__dict__.values())[1:])
        with contextlib.suppress(Invalid):
            expectation(step, self.oracle)  # which changes nothing if the step has no meaning
            self.program.append(step)

    def _let(self):
        n = n_rows(self.rng.choice(self._rows())[1]) if self._rows() and self.rng.random() < 0.6 else None
        self._add(Let("", random_value(self.rng, n, names=self.rng.choice(["abc", "def", "abc", (0, 1, "a")]))))

    def _rows(self):
        """Names and values that can be arguments."""
        lets = {step.out for step in self.program if isinstance(step, Let)}
        known = {name: value for name, value in self.oracle.values.items() if name in lets}
        known |= {name: value for name, value in self.oracle.handles.items() if not isinstance(value, Expected)}
        return list(known.items())

    def _handles(self):
        return [name for name in self.oracle.handles if name in dict(self._rows())]

    def _drawn(self):
        """A group, a method and its arguments."""
        rng = self.rng
        group = rng.choice(list(self.oracle.groups))
        method = rng.choice([name for name in METHODS if name not in NOT_DRAWN])
        if method in ("kept_rows", "bump_kept"):
            return group, method, ()
        rows = self._rows()
        name, value = rng.choice(rows)
        if method == "each":
            names = [name for name, _ in rows if name not in self.oracle.handles]
            return group, method, (Each(tuple(rng.choice(names) for _ in range(self.oracle.groups[group].size))),)
        if method in TWO_ARGUMENTS:
            fit = [other for other, more in rows if n_rows(more) == n_rows(value)]
            fit = [other for other in fit if other != name or name in self.oracle.handles] or [name]
            return group, method, (name, rng.choice(fit))
        return group, method, (name,)

    def _call(self):
        group, method, args = self._drawn()
        self._add(Call("", group, method, args, *self._chunks(method, args)))

    def _chunks(self, method, args):
        """For a call with these arguments: how many rows a chunk has, and by what rows are grouped."""
        rng = self.rng
        if method not in IN_CHUNKS or rng.random() < 0.5:
            return 0, None
        rows = dict(self._rows())[args[0]]
        texts = [name for name in names_of(rows) or () if isinstance(name, str)]
        names = [name for name in texts if isinstance(rows[name], np.ndarray) and rows[name].ndim == 1]
        return rng.randint(1, 4), rng.choice([None, *names])

    def _submit(self):
        group, method, args = self._drawn()
        kind = Submit if METHODS[method][0] in RETURNS_ROWS else Call
        self._add(kind("", group, method, args, *self._chunks(method, args)))

    def _chain(self):
        """Rows that are not alike on all ranks, operations on them, and a call that takes what comes of these."""
        rng, handles = self.rng, self.oracle.handles
        group, method, n_before = rng.choice(list(self.oracle.groups)), rng.choice(UNEVEN), len(handles)
        self._add(Let("", uneven_value(rng, method)))
        args = (self.program[-1].out,)
        self._add(Submit("", group, method, args, *self._chunks(method, args)))
        for _ in range(rng.randint(1, 3) if len(handles) > n_before else 0):
            self._operate(list(handles)[-1])
        if len(handles) > n_before:
            last, method = list(handles)[-1], rng.choice(["same", "bumped", "sift"])
            self._add(Call("", rng.choice(list(self.oracle.groups)), method, (last,), *self._chunks(method, (last,))))

    def _fail(self):
        group = self.rng.choice(list(self.oracle.groups))
        size = self.oracle.groups[group].size
        at = tuple(sorted(self.rng.sample(range(size), self.rng.randint(0, min(size, 2)))))
        name = self.rng.choice(self._rows())[0]
        self._add(self.rng.choice([Call, Submit])("", group, "fail", (name, Ranks(at))))

    def _interrupt(self):
        rng = self.rng
        method = rng.choice(["slow", "same", "micro"])
        args = (rng.choice(self._rows())[0],)
        seconds = tuple(round(rng.uniform(0, 0.02), 4) for _ in range(rng.choice([1, 1, 2, 3])))
        how = rng.choice(list(INTERRUPTED))
        if rng.random() < 0.8:
            most, n = (1700, 1) if how == "started" else (500, rng.randint(1, 6))
            seconds, at = (), tuple(rng.choice([rng.randint(1, most), -rng.randint(1, most // 9)]) for _ in range(n))
        else:
            at = (0,)
        if groups := self._own_groups():
            self._add(Interrupt("", rng.choice(groups), method, args, rng.choice([0, 0, 1]), None, seconds, at, how))

    def _own_groups(self):
        """Those on the backend of the program."""
        made = [step for step in self.program if isinstance(step, MakeGroup) and not step.is_other]
        return [name for step in made for name in step.names]

    def _play(self, scenes):
        rng = self.rng
        name = rng.choice(scenes)
        scene = SCENES[name]
        groups = self._own_groups() if scene.is_trouble or scene.needs_processes else list(self.oracle.groups)
        if not groups or (scene.is_heavy and rng.random() > HEAVY):
            return
        group, rows = rng.choice(groups), rng.choice(self._rows())[0]
        size = self.oracle.groups[group].size
        if scene.is_large:
            leaf = Leaf(rng.choice(["numpy", "torch"]), rng.choice(LARGE), rng.randint(4, 9), 0, WIDE)
            self._add(Let("", leaf))
            rows = self.program[-1].out
        args = rows, Ranks(tuple(sorted(rng.sample(range(size), rng.randint(1, size)))))
        if not scene.is_quiet:
            self._add(Play("", group, "same", args, name))
        elif not any(isinstance(one, Expected) for one in self.oracle.handles.values()):
            self._add(Play("", group, "same", args, name, tuple(self.oracle.handles)))

    def _mistake(self):
        method = self.rng.choice(["same", "three", "bumped", "padded"])
        group, (name, rows) = self.rng.choice(list(self.oracle.groups)), self.rng.choice(self._rows())
        for how in self.rng.sample(list(MISTAKES), 3):  # which take no time
            self._add(Mistake("", group, method, (name,), how, n_rows(rows)))

    def _stream(self):
        group = self.rng.choice(list(self.oracle.groups))
        method = self.rng.choice(["items", "same", "bumped", "three"])
        self._add(Stream("", group, method, (self.rng.choice(self._rows())[0],)))

    def _put(self):
        lets = [name for name, _ in self._rows() if name not in self.oracle.handles]
        self._add(Put("", self.rng.choice(list(self.oracle.groups)), self.rng.choice(lets)))

    def _read(self):
        if self.oracle.handles:
            self._add(Read("", self.rng.choice(list(self.oracle.handles))))

    def _await(self):
        if self.oracle.handles:
            self._add(Await("", self.rng.choice(list(self.oracle.handles))))

    def _release(self):
        if handles := self._handles():
            self._add(Release("", self.rng.choice(handles)))

    def _restart(self):
        handles = self.oracle.handles
        if not any(isinstance(one, Expected) for one in handles.values()):
            self._add(Restart("", self.rng.choice(list(self.oracle.groups)), tuple(handles)))

    def _overwrite(self):
        self._add(Overwrite("", self.rng.choice(list(self.oracle.values))))

    def _operate(self, first=None):
        handles = self._handles()
        if not handles:
            return self._put()
        rng = self.rng
        first = first if first in handles else rng.choice(handles)
        rows = self.oracle.handles[first]
        names, n = names_of(rows), n_rows(rows)
        operations = ["rows", "rows", "repeat", "shuffle", "concat", "batches"]
        operations += ["select", "drop", "rename", "join", "join", "sort_by"] if names else []
        operations += ["sort_by"] * 2 if type(rows).__name__ == "DataFrame" else []
        name, handles_of, what = rng.choice(operations), (first,), None
        if name == "rows":
            ends = [None, *range(-n - 1, n + 2)]
            slices = (rng.choice(ends), rng.choice(ends), rng.choice([None, 1, 2, -1, -2]))
            numbers = [rng.randrange(-n, n) for _ in range(rng.randrange(5))] if n else []
            dtype = rng.choice(["uint8", "int8", "int64", "uint64"])
            info = np.iinfo(dtype)
            array = Numbers(tuple(i for i in numbers if info.min <= i <= info.max), dtype)
            rising = [i for i in range(rng.randint(0, n), n) if rng.random() < 0.5]  # of the last ranks
            what = rng.choice([slices, slices, numbers, array, [rng.random() < 0.5 for _ in range(n)], rising])
        elif name == "repeat":
            what = rng.choice([0, 1, 2, 3])
        elif name in ("shuffle", "batches"):
            what = rng.randint(1, 4)
        elif name in ("select", "drop"):
            what = tuple(rng.sample(names, rng.randint(1, len(names))))
        elif name == "rename":
            what = tuple((old, rng.choice("abcdefxyz")) for old in rng.sample(names, rng.randint(1, len(names))))
        elif name == "sort_by":
            what = rng.choice(names)
        elif name == "join" and rng.random() < 0.5:  # with itself, under other names
            self._add(Operate("", "rename", (first,), tuple(zip(names, rng.sample("uvwxyz", len(names)), strict=True))))
            handles_of = (first, rng.choice([list(self.oracle.handles)[-1], *handles]))
        else:
            handles_of = (first, *rng.choices(handles, k=rng.randint(1, 2)))
        self._add(Operate("", name, handles_of, what))
        return None


def program_of(seed, is_slow=False):
    """The program of a seed."""
    return Generator(seed, is_slow).draw()
