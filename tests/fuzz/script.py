"""Renders a failing program as a script that runs by itself."""

from __future__ import annotations

from fuzz.oracle import Expected
from fuzz.steps import expectations
from fuzz.subject import BUMP, METHODS, SHOW, class_code, without_branches, words_of

IMPORTS = {"np": "numpy", "pd": "pandas", "torch": "torch"}


def script_of(program, failure, backend, seed):
    """Python that ends with an AssertionError, or with the wrong error, as long as the program fails.

    Args:
        program: Up to the step that fails.
        failure: How.
        backend: Name of the backend.
        seed: Of which the program was made, before it was shrunk.
    """
    expected = expectations(program)
    lines = [line for step, want in zip(program[:-1], expected, strict=False) for line in _lines(step, want)]
    lines += _last_lines(program[-1], expected[-1])
    used = words_of("\n".join(lines))
    methods = class_code([name for name in METHODS if name in used] or ["same"])
    bump = without_branches(BUMP, used) if "bump" in words_of(methods) | used else ""
    show = without_branches(SHOW, used) if "show" in used else ""
    used |= words_of(methods + bump + show)
    imports = [f"import {name} as {short}" if name != short else "import torch" for short, name in IMPORTS.items()]
    imports = [line for line in imports if line.split()[-1] in used]
    if "contextlib" in used:
        imports.append("import contextlib")
    head = f"# Seed {seed}, backend {backend}: step {program[-1].out} {failure.kind}."
    text = "\n".join([head, *imports, "import bandmaster as bm", bump + show + methods, *lines, ""])
    return text.replace("backend=BACKEND", f"backend={backend!r}")


def _lines(step, want):
    if isinstance(want, Expected):
        return [f"with contextlib.suppress(bm.{want.error}): {step.code()}"]
    return [step.code()]


def _last_lines(step, want):
    if isinstance(want, Expected):
        return [*_lines(step, want), f'    raise AssertionError("{want.error} must come, of rank {want.rank}")']
    if step.is_seen:
        return [step.code(), f"want = {want!r}", f"assert show({step.out}) == want, show({step.out})"]
    return [step.code()]
