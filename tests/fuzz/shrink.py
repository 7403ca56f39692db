"""Makes a failing program small: fewer steps, then smaller values, as long as it fails in the same way."""

from __future__ import annotations

import time
from dataclasses import fields, replace

from fuzz.oracle import Invalid
from fuzz.steps import expectations


def shrink(program, failure, fails, seconds=20.0):
    """The smallest program that is found.

    Args:
        program: One that fails.
        failure: How.
        fails: Returns the `Failure` of a program, or None, given also what is expected of its steps.
        seconds: For which it may look.
    """
    end = time.monotonic() + seconds
    program, known = program[: failure.number + 1], failure
    is_smaller = True
    while is_smaller and time.monotonic() < end:
        is_smaller = False
        for candidate in _candidates(program):
            if time.monotonic() > end:
                break
            found = _same_failure(candidate, failure, fails)
            if found is not None:
                program, known, is_smaller = candidate[: found.number + 1], found, True
                break
    return program, known


def _same_failure(candidate, failure, fails):
    try:
        expected = expectations(candidate)
    except Invalid:
        return None
    found = fails(candidate, expected)
    return found if found is not None and found.kind == failure.kind else None


def _candidates(program):
    """Smaller programs, the smallest first: without many steps, without one, with one that is smaller."""
    for size in (len(program) // 2, len(program) // 4, 2, 1):
        for start in range(len(program) - size, -1, -1) if size else ():
            yield program[:start] + program[start + size :]
    for i, step in enumerate(program):
        yield from (_with(program, i, less) for less in step.smaller())
    for i, step in enumerate(program):  # a handle of a handle, or a value in place of one
        for other in step.uses():
            without = program[:i] + program[i + 1 :]
            if step.out and any(step.out in later.uses() for later in without[i:]):
                yield tuple(_renamed(later, step.out, other) for later in without)
    sizes = {getattr(getattr(step, "value", None), "n", None) for step in program} - {None}
    for n in sorted(sizes - {0, 1}, reverse=True):  # all values of a size together, since calls need equal ones
        yield tuple(_resized(step, n) for step in program)


def _with(program, i, step):
    return (*program[:i], step, *program[i + 1 :])


def _renamed(step, old, new):
    """The step with another name for what it uses."""

    def swap(value):
        if isinstance(value, tuple):
            return tuple(map(swap, value))
        if hasattr(value, "names"):
            return type(value)(tuple(map(swap, value.names)))
        return new if value == old else value

    taken = {"group", "args", "handles", "handle", "name", "value"} - ({"name"} if hasattr(step, "what") else set())
    return replace(step, **{f.name: swap(getattr(step, f.name)) for f in fields(step) if f.name in taken})


def _resized(step, n):
    value = getattr(step, "value", None)
    is_such = getattr(value, "n", None) == n and hasattr(value, "resized")
    return replace(step, value=value.resized(n - 1)) if is_such else step
