"""Runs a program on a backend, and says where what comes is not what the oracle expects."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass

import bandmaster as bm
from fuzz.oracle import MODULES, Expected, bump, show
from fuzz.scenes import SCENES
from fuzz.steps import MakeGroup, expectations
from fuzz.subject import BUMP, CLASSES, HELPERS, METHODS, SHOW, class_code

LONGEST_S = 30  # a program takes a hundredth of it
STANDARD = (asyncio, collections, contextlib, dataclasses, itertools, os, signal, threading, time)  # what helpers use


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


class TooLong(BaseException):
    """A step has not ended in time."""


class Groups:
    """Groups on a backend that programs use one after the other, each as new, since starting processes takes long.

    Args:
        backend: Its name.
        is_shared: Whether groups are kept at all.
    """

    def __init__(self, backend, is_shared=True):
        self.backend, self._is_shared = backend, is_shared
        self._free, self._used = defaultdict(list), []
        self.scope = _scope(backend)

    def of(self, axes, is_other):
        """A group with these axes, on this backend or on another."""
        free = self._free[axes, is_other]
        group = free.pop() if free else self._new(axes, self.scope["OTHER" if is_other else "BACKEND"])
        self._used.append(((axes, is_other), group))
        return group

    def _new(self, axes, backend):
        mesh = bm.Mesh(**dict(axes))
        return bm.WorkerGroup(bm.ResourcePool([mesh.size], backend=backend), self.scope["Subject"], mesh=mesh)

    def give_back(self, are_well):
        """The program has ended; its groups are used again if nothing has failed."""
        for kind, group in self._used:
            if are_well and self._is_shared:
                group.forget()
                self._free[kind].append(group)
            else:
                group.close()
        self._used.clear()

    def close(self):
        """Close all of them."""
        for groups in self._free.values():
            for group in groups:
                group.close()
        self._free.clear()


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
    early, number, failure = set(), 0, None
    try:
        with within(LONGEST_S):
            for number, (step, want) in enumerate(zip(program, expected, strict=True)):
                if isinstance(step, MakeGroup):
                    scope[step.out] = groups.of(step.axes, step.is_other)
                elif not early.isdisjoint(step.uses()):
                    early.add(step.out)
                elif (found := _run_step(step, want, scope, early)) is not None:
                    failure = Failure(number, *found)
                    break
            scope.clear()
            groups.give_back(are_well=failure is None)
    except TooLong:
        failure = Failure(min(number, len(program) - 1), "too long", f"not ended in {LONGEST_S} s", None)
        with contextlib.suppress(TooLong), within(LONGEST_S):
            groups.give_back(are_well=False)
    return failure


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
        if want.says not in str(error):
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
        faulthandler.dump_traceback(sys.stderr)
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
