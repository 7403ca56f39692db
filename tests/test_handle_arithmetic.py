"""Handle arithmetic equals the same operations on plain values, for any chain of them."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bandmaster.plan import handles
from bandmaster.plan.columns import schema_of


def kept(values):
    """The result of a call that has left a value on each rank."""
    n_rows = [len(value["a"]) for value in values]
    parts = tuple(handles.Part(rank, n, 0, value) for rank, (n, value) in enumerate(zip(n_rows, values, strict=True)))
    result = handles.Result("Actor.rows", parts, schema_of(values[0]))
    return handles.Taken(result, range(sum(n_rows)))


def read(table):
    plan = handles.addressed(table, lambda part: id(part.kept))
    values = {id(part.kept): part.kept for result in handles.results_of(table) for part in result.parts}
    return handles.assemble(plan, values.__getitem__)


@st.composite
def chains(draw):
    """A table and the plain value that it stands for."""
    scale = draw(st.sampled_from([1, handles.FEW_ROWS]))
    sizes = [scale * n for n in draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))]
    starts = np.cumsum([0, *sizes])
    whole = {"a": np.arange(starts[-1]), "b": [f"row {i}" for i in range(starts[-1])]}
    values = [{"a": whole["a"][i:j], "b": whole["b"][i:j]} for i, j in pairwise(starts)]
    table, plain = kept(values), whole
    for _ in range(draw(st.integers(0, 5))):
        table, plain = draw(st.sampled_from(STEPS))(draw, table, plain)
    return table, plain


def rows_of(plain, index):
    return {
        name: column[index] if isinstance(column, np.ndarray) else [column[i] for i in index]
        for name, column in plain.items()
    }


def sliced(draw, table, plain):
    n = table.n_rows
    start = draw(st.integers(0, n))
    stop = draw(st.integers(start, n))
    return handles.take(table, range(start, stop)), rows_of(plain, np.arange(start, stop))


def indexed(draw, table, plain):
    n = table.n_rows
    index = np.array(draw(st.lists(st.integers(0, n - 1), max_size=8)) if n else [], dtype=np.int64)
    return handles.take(table, index), rows_of(plain, index)


def shuffled(draw, table, plain):
    index = handles.shuffled(table.n_rows, draw(st.integers(0, 9)))
    return handles.take(table, index), rows_of(plain, index)


def repeated(draw, table, plain):
    index = handles.repeated(table.n_rows, 2)
    return handles.take(table, index), rows_of(plain, index)


def renamed(draw, table, plain):
    names = {f"{name}_": name for name in list(plain)[::-1]}
    return handles.select(table, names), {new: plain[old] for new, old in names.items()}


def joined(draw, table, plain):
    names = {f"{len(plain)}{name}": name for name in plain}
    other, plain_other = indexed_like(draw, table, plain)
    other = handles.select(other, names)
    made = handles.join([table, other], ["this", "that"])
    return made, {**plain, **{new: plain_other[old] for new, old in names.items()}}


def indexed_like(draw, table, plain):
    n = table.n_rows
    index = np.array(draw(st.permutations(range(n))), dtype=np.int64)
    return handles.take(table, index), rows_of(plain, index)


def stacked(draw, table, plain):
    other, plain_other = sliced(draw, table, plain)
    made = {
        name: np.concatenate([column, plain_other[name]])
        if isinstance(column, np.ndarray)
        else column + plain_other[name]
        for name, column in plain.items()
    }
    return handles.concat([table, other], ["this", "that"]), made


STEPS = [sliced, indexed, shuffled, repeated, renamed, joined, stacked]


@given(chains())
def test_any_chain_equals_the_same_operations_on_plain_values(chain):
    table, plain = chain
    value = read(table)
    assert table.n_rows == len(plain[next(iter(plain))])
    assert list(table.schema) == list(plain) == list(value)
    for name, column in plain.items():
        assert type(value[name]) is type(column)
        assert list(value[name]) == list(column)
