"""Runs a program on a backend, and says where what comes is not what the oracle expects."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import faulthandler
import gc
import io
import itertools
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections import Counter
from dataclasses import dataclass

import numpy as np
from hosts import spread

import bandmaster as bm
from fuzz.oracle import MODULES, Expected, bump, columns_of, show
from fuzz.scenes import SCENES
from fuzz.steps import Interrupt, MakeGroup, expectations
from fuzz.subject import BUMP, CLASSES, HELPERS, METHODS, SHOW, class_code

LONGEST_S = 30  # a program takes a hundredth of it
LONGEST_ON_RAY_S = 90  # as new groups take seconds
MOST_RANKS = 24  # of groups that are kept for later programs
MOST_DESCRIPTORS = 40  # that a rank may have more than after its first program, for memory that is used again
UNSENT = "was interrupted before it was sent"  # by design an earlier call may say so, if Ctrl-C in a later one sent it
STANDARD = (asyncio, collections, contextlib, copy, dataclasses, io, itertools, os)  # what helpers use
STANDARD += (resource, signal, subprocess, sys, threading, time)


@dataclass(frozen=True)
class Failure:
    """A difference.

    Attributes:
        number: Of the step.
        kind: In a few words that stay the same when the program shrinks.
        got: What came.
        want: What the oracle expects, or None.
    """

    number: int
    kind: str
    got: str
    want: str | None


class Leak(Exception):
    """Something is left behind in processes that still run."""


class TooLong(BaseException):
    """A step has not ended in time."""


class Groups:
    """Groups on a backend that programs use one after the other, each as new, since starting processes takes long.

    Args:
        backend: Its name.
        is_shared: Whether groups are kept at all.

    Attributes:
        longest_s: How long a program may take.
    """

    def __init__(self, backend, is_shared=True):
        self.backend, self._is_shared = backend, is_shared
        self.longest_s = LONGEST_ON_RAY_S if backend == "ray" else LONGEST_S
        self._free, self._used = [], []  # what was asked for, and the groups; those used least recently first
        self._descriptors = {}  # of the ranks of a group, when it had run one program
        self._seen = []  # weak references to all that programs have bound to names
        self.scope = _scope(backend)

    def of(self, axes, is_other, roles):
        """Groups with these axes, on this backend or on another: one, or one for each role."""
        kind = axes, is_other, roles
        found = next((i for i in reversed(range(len(self._free))) if self._free[i][0] == kind), None)
        groups = self._new(*kind) if found is None else self._free.pop(found)[1]
        self._used.append((kind, groups))
        return groups

    def _new(self, axes, is_other, roles):
        backend = self.scope["OTHER" if is_other else "BACKEND"]
        mesh = bm.Mesh(**dict(axes))
        while self._free and sum(len(groups[0].worker_names) for _, groups in self._free) + mesh.size > MOST_RANKS:
            self._close(self._free.pop(0)[1])
        pool = bm.ResourcePool(spread([mesh.size]), backend=backend)
        if not roles:
            return (bm.WorkerGroup(pool, self.scope["Subject"], mesh=mesh),)
        of_each = dict.fromkeys(roles, self.scope["Subject"])
        both = bm.colocate(pool, meshes=dict.fromkeys(roles, mesh), **of_each)
        return *(both.role(role) for role in roles), both

    def give_back(self, are_well):
        """The program has ended; its groups are used again if nothing has failed.

        Raises:
            Leak: The ranks of a group have more and more descriptors.
        """
        used, self._used = self._used, []
        for kind, groups in used:
            if not (are_well and self._is_shared):
                self._close(groups)
                continue
            self._free.append((kind, groups))
            for group in groups[:2]:
                group.forget()
            if self.scope["OTHER" if kind[1] else "BACKEND"] == "inprocess":
                continue
            now, before = groups[0].descriptors(), self._descriptors.get(id(groups))
            if before is None or len(before) != len(now):
                self._descriptors[id(groups)] = now
            elif max(np.subtract(now, before)) > MOST_DESCRIPTORS:
                gc.collect()  # what the program has dropped may hold rows until then
                now = groups[0].descriptors()
                if max(np.subtract(now, before)) > MOST_DESCRIPTORS:
                    raise Leak(f"the ranks of {groups[0]} have {now} descriptors, and had {before}")

    def _close(self, groups):
        self._descriptors.pop(id(groups), None)
        groups[-1].close()

    def close(self):
        """Close all of them."""
        for _, groups in self._free:
            self._close(groups)
        self._free.clear()

    def remember(self, values):
        """Note what a program has bound to names, and will drop."""
        self._seen += [one for value in values for one in _weak(value)]

    def never_collected(self):
        """The types of what programs have bound to names, and is still there after a collection."""
        seen, self._seen = self._seen, []
        return Counter(type(value).__name__ for one in seen if (value := one()) is not None)


def _weak(value):
    """Weak references to a value and to what it holds, where there can be any."""
    columns = columns_of(value)
    inside = list(columns.values()) if columns is not None else value if isinstance(value, list | tuple) else []
    found = [one for inner in inside for one in _weak(inner)]
    with contextlib.suppress(TypeError):
        found.append(weakref.ref(value))
    return found


def _scope(backend):
    other = "local" if backend == "inprocess" else "inprocess"
    scope = {"bm": bm, **MODULES, "zlib": zlib, "BACKEND": backend, "OTHER": other, "__name__": "fuzz_program"}
    scope |= {module.__name__: module for module in STANDARD} | {"concurrent": concurrent}
    exec("\n".join([*CLASSES.values(), BUMP, class_code(METHODS), *HELPERS.values()]), scope)
    exec("\n".join([SHOW, *[scene.code for scene in SCENES.values()]]), scope)
    return scope


def run(program, groups, expected=None):
    """Run a program; return the first `Failure`, or None.

    Args:
        program: Its steps.
        groups: `Groups`, or the name of a backend, on which groups are started then for this program alone.
        expected: Of each step, if that is known already.
    """
    expected = expectations(program) if expected is None else expected
    groups = Groups(groups, is_shared=False) if isinstance(groups, str) else groups
    scope = {**groups.scope, "bump": bump}
    early, number, failure, is_unsent = set(), 0, None, False
    logged = Logged()
    try:
        with within(groups.longest_s):
            for number, (step, want) in enumerate(zip(program, expected, strict=True)):
                if isinstance(step, MakeGroup):
                    found = groups.of(step.axes, step.is_other, step.roles)
                    scope |= zip(step.names, found, strict=False)
                    signal.setitimer(signal.ITIMER_REAL, groups.longest_s)  # anew: others may have had the processors
                elif not early.isdisjoint(step.uses()):
                    early.add(step.out)
                elif (found := _run_step(step, want, scope, early)) is not None:
                    is_unsent = UNSENT in found[1] and any(isinstance(one, Interrupt) for one in program)
                    failure = None if is_unsent else Failure(number, *found)
                    break
            groups.remember(
                scope[step.out] for step in program if step.out in scope and not isinstance(step, MakeGroup)
            )
            scope.clear()
            groups.give_back(are_well=failure is None and not is_unsent)
            if failure is None and logged.records:
                failure = Failure(number, "logs an error", logged.records[0], None)
    except Leak as error:
        failure = Failure(len(program) - 1, "leak", str(error), None)
    except TooLong:
        failure = Failure(min(number, len(program) - 1), "too long", f"not ended in {groups.longest_s} s", None)
        with contextlib.suppress(TooLong), within(groups.longest_s):
            groups.give_back(are_well=False)
    finally:
        logged.end()
    return failure


class Logged(logging.Handler):
    """The errors that the library logs from now on, or loses in a finalizer, which no program should see."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.records = []
        logging.getLogger("bandmaster").addHandler(self)
        self._before, sys.unraisablehook = sys.unraisablehook, self._ignored

    def _ignored(self, lost):
        if str(getattr(lost.object, "__module__", "")).startswith("bandmaster"):
            self.records.append(f"{lost.exc_value!r} is ignored in {lost.object!r}")
        self._before(lost)

    def emit(self, record):
        self.records.append(record.getMessage())

    def end(self):
        logging.getLogger("bandmaster").removeHandler(self)
        sys.unraisablehook = self._before


def _run_step(step, want, scope, early):
    try:
        exec(step.code(), scope)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        if not isinstance(want, Expected):
            return f"raises {type(error).__name__}", got, want
        if not isinstance(error, getattr(bm, want.error, AttributeError)):
            return f"raises {type(error).__name__}, not {want.error}", got, want.error
        if want.ranks and not _names(error, want.ranks):
            return "names another rank", got, f"{want.error} of ranks {want.ranks}"
        if any(words not in str(error) for words in want.says):
            return "says something else", got, f"{want.error} with {want.says!r}"
        if step.may_be_early:
            early.add(step.out)
        return None
    if isinstance(want, Expected):
        return None if step.may_be_early else ("raises nothing", "no error", want.error)
    if step.is_seen and (got := show(scope[step.out])) != want:
        return "another value", got, want
    return None


def _names(error, ranks):
    if isinstance(error, bm.CallTimeout):
        return set(ranks) <= set(error.missing)  # others may be on their way
    return error.rank in ranks


@contextlib.contextmanager
def within(seconds):
    """Raise `TooLong` in the block, with all stacks on standard error, after so many seconds."""

    def stop(*_):
        faulthandler.dump_traceback(sys.__stderr__)  # a scene may have another
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
