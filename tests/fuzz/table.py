"""A program for each type of rows: every operation of a handle and a plain call, written to in place, and kept.

::

    each type as the rows ────────────────────────────────────────────────► a program
    many types, each a column of one table, of which all do the same steps ► a program
    each mistake, once ────────────────────────────────────────────────────► a program
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from fuzz.mistakes import MISTAKES
from fuzz.oracle import Invalid, Oracle, names_of
from fuzz.steps import (
    Call,
    Let,
    Look,
    MakeGroup,
    Mistake,
    Operate,
    Overwrite,
    Put,
    Read,
    Stream,
    Submit,
    expectation,
    expectations,
)
from fuzz.values import LISTS, NUMPY, SERIES, TORCH, WIDE, Columns, Leaf

N_ROWS = 5
ONE, OTHER = "g0", "g1"
MESHES = [(("dp", 2),), (("dp", 1),)]  # of these two groups
BACK = (None, None, -1)


def types_of_rows():
    """By name, a value of each type of rows and of each dtype, and tables of many that stay on the ranks."""
    dtypes = {"numpy": NUMPY, "torch": TORCH, "list": LISTS, "series": SERIES}
    found = {f"{kind} {dtype}": Leaf(kind, dtype, N_ROWS, 1) for kind, many in dtypes.items() for dtype in many}
    found |= {f"{kind} {layout}": Leaf(kind, "int64", N_ROWS, 1, 3, layout) for kind, layout in LAYOUTS}
    together = {}
    for name, leaf in found.items():
        what = next((what for what, names in APART.items() if name in names), "all that is sorted")
        together.setdefault((leaf.kind, what), []).append((name, leaf))
    for (kind, what), many in together.items():
        table, large = ("frame", LARGE_SERIES) if kind == "series" else ("dict", LARGE_ARRAY)
        found[f"{kind}, {what}, in a large table"] = Columns(table, (*many, ("large", large)))
    arrays = ("a", Leaf("numpy", "int64", N_ROWS, 1)), ("b", Leaf("torch", "float32", N_ROWS, 2, 3))
    texts = ("c", Leaf("list", "mixed", N_ROWS, 3)), ("d", Leaf("list", "array", N_ROWS, 4))
    tensors = ("a", Leaf("torch", "int64", N_ROWS, 1)), ("b", Leaf("torch", "bfloat16", N_ROWS, 2, 3))
    nested = ("x", Columns("dict", arrays))
    return found | {
        "dict": Columns("dict", arrays + texts),
        "dict in a dict": Columns("dict", (*texts, nested)),
        "tensordict": Columns("tensordict", tensors),
        "pair": Columns("pair", arrays),
        "record": Columns("record", arrays),
        "ordered dict": Columns("ordered", (*reversed(arrays), *texts)),
        "registered": Columns("texts", (("texts", Leaf("list", "large", N_ROWS)), ("lengths", arrays[0][1]))),
        "integer names": Columns("dict", ((0, arrays[0][1]), (1, arrays[1][1]))),
        "frame with an index": Columns("frame", (("a", LARGE_SERIES),), "pairs"),
    }


LARGE_SERIES, LARGE_ARRAY = Leaf("series", "large", N_ROWS), Leaf("numpy", "float32", N_ROWS, 3, WIDE)
LAYOUTS = [
    ("numpy", "[::-1]"),
    ("numpy", ".T"),
    ("numpy", "fixed"),
    ("torch", ".T"),
    ("torch", "[::2]"),
    ("torch", "fixed"),
    ("torch", "jagged"),
    ("torch", "sparse"),
]


# Columns with which one table cannot do the same steps as with others: by these, tables are not sorted.
APART = {
    "not sorted": [f"list {dtype}" for dtype in LISTS]
    + [f"numpy {what}" for what in ("complex64", "complex128", "object", "i4,f8", "V3", "[::-1]", ".T")]
    + [f"torch {what}" for what in ("bfloat16", "complex64", ".T", "[::2]", "jagged")]
    + ["series mixed"],
    "of one row": ["numpy fixed", "torch fixed"],
    "sparse": ["torch sparse"],
}


def program_of_type(value):
    """The program for a value, and what must come of each step."""
    oracle, program, expected = Oracle(), [], []

    def add(*steps):
        for step in steps:
            step = step if step.out else replace(step, out=f"v_{len(program)}")
            with contextlib.suppress(Invalid):
                expected.append(expectation(step, oracle))
                program.append(step)

    add(MakeGroup(ONE, MESHES[0]), MakeGroup(OTHER, MESHES[1]), Let("v0", value))
    add(Call("v1", ONE, "same", ("v0",)), Call("v2", ONE, "bumped", ("v0",)), Call("v3", ONE, "everyone", ("v0",)))
    add(
        Call("v4", ONE, "padded", ("v0",)),
        Call("v5", ONE, "same", ("v0",), chunk=2),
        Stream("v6", ONE, "items", ("v0",)),
    )
    add(Put("h0", OTHER, "v0"), Submit("h1", ONE, "keep", ("v0",)), Overwrite("", "v0"))
    names = names_of(oracle.values["v0"])
    for rows in ("h0", "h1"):
        operations = [("rows", (rows,), what) for what in [(1, 4, None), BACK, (0, 0, None), [4, 0, 1, 0], []]]
        operations += [("rows", (rows,), [True, False, True, True, False]), ("batches", (rows,), 2)]
        operations += [("repeat", (rows,), 2), ("shuffle", (rows,), 7), ("concat", (rows, rows), None)]
        if names:
            some = tuple(names[::2])
            renamed = f"{rows}_{len(operations)}"
            operations += [("rename", (rows,), tuple((name, f"{name}_again") for name in names))]
            operations += [("join", (rows, renamed), None)]
            operations += [("sort_by", (rows,), name) for name in names]
            operations += [("select", (rows,), some), ("drop", (rows,), some)]
        for number, (operation, handles, what) in enumerate(operations):
            made = f"{rows}_{number}"
            add(Operate(made, operation, handles, what))
            if made not in oracle.handles:
                continue
            if operation != "sort_by" or what == names[0]:
                add(Call(f"{made}a", ONE, "second", (made, made)), Call(f"{made}b", OTHER, "bumped", (made,)))
                add(Submit(f"{made}c", ONE, "keep", (made,)))
            add(Read(f"{made}d", made), Overwrite("", f"{made}d"))
        add(Call("", ONE, "bump_kept", ()), Read(f"{rows}r", rows))
    seen = [name for name in oracle.values if name]
    add(
        Call("", ONE, "kept_rows", ()), *(Look("", name) for name in seen), *(Read("", name) for name in oracle.handles)
    )
    return tuple(program), expected


def program_of_mistakes():
    """The program with every mistake, each of which random programs make only now and then."""
    rows = Let("v0", Leaf("numpy", "int64", N_ROWS, 1))
    wrong = (Mistake(f"v_{number}", ONE, "same", ("v0",), how, N_ROWS) for number, how in enumerate(MISTAKES))
    program = (MakeGroup(ONE, MESHES[0]), rows, *wrong)
    return program, expectations(program)
