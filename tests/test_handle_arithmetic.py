"""Handle arithmetic equals the same operations on plain values, for any chain of them."""

import copy
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bandmaster.plan.batch import as_batch
from bandmaster.plan.columns import RowFacts, schema_of
from bandmaster.rows import table as handles


def kept(values):
    """The result of a call that has left a value on each rank."""
    return handles.table_of([Part(value) for value in values])


class Part:
    """The rows of one rank."""

    def __init__(self, value):
        self.value, self.facts = value, RowFacts(len(value["a"]), 0, schema_of(value))


def read(table):
    return handles.assemble(table, lambda part: part.value)


def addressed(table):
    """What a receiver gets for a table, and by label the values of all parts."""
    plan = handles.Elsewhere(handles.addressed(table, id))
    return plan, {id(part): part.value for part in parts_of(table)}


def parts_of(table):
    return {leaf[0] for block in table.blocks for leaf in block.leaves}


@st.composite
def chains(draw):
    """A table and the plain value that it stands for."""
    scale = draw(st.sampled_from([1, 32]))
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


def masked(draw, table, plain):
    index = np.flatnonzero(np.arange(table.n_rows) % draw(st.integers(1, 3)) == 0)
    return handles.take(table, index), rows_of(plain, index)


def shuffled(draw, table, plain):
    index = np.random.default_rng(draw(st.integers(0, 9))).permutation(table.n_rows)
    return handles.take(table, index), rows_of(plain, index)


def repeated(draw, table, plain):
    index = np.repeat(np.arange(table.n_rows), 2)
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


def test_a_window_over_results_refers_to_few_of_them():
    window, plain = kept([{"a": np.arange(4)}]), np.arange(4)
    for step in range(20):
        value = np.arange(4) + step * [1, 0.5, 2][step % 3]
        window = handles.concat([handles.take(window, range(2, 6)) if step else window, kept([{"a": value}])], ["", ""])
        plain = np.concatenate([plain[2:6] if step else plain, value])
    assert len(parts_of(window)) <= 5
    for _ in range(3):
        window, plain = handles.take(window, np.arange(len(plain))[::-1]), plain[::-1]
        window, plain = handles.concat([window, window], ["", ""]), np.concatenate([plain, plain])
    assert len(parts_of(window)) <= 5
    np.testing.assert_array_equal(read(window)["a"], plain)
    assert read(handles.take(window, range(1)))["a"].dtype == plain.dtype == np.float64


@given(st.data())
def test_a_receiver_takes_rows_of_a_concatenation_of_several_dtypes(data):
    values = [{"a": np.arange(3)}, {"a": np.arange(2) / 2}, {"a": np.arange(4)}]
    table = handles.concat([kept([value]) for value in values], [""] * 3)
    plain = np.concatenate([value["a"] for value in values])
    if data.draw(st.booleans()):
        table, plain = handles.take(table, np.arange(9)[::-1]), plain[::-1]
    plan, parts = addressed(table)
    start = data.draw(st.integers(0, 9))
    rows = handles.take(plan.share(0), range(start, data.draw(st.integers(start, 9))))
    column = handles.assemble(rows, lambda label: parts[label])["a"]
    np.testing.assert_array_equal(column, plain[start : start + len(column)])
    assert len(column) == rows.n_rows
    assert column.dtype == np.float64


STEPS = [sliced, indexed, masked, shuffled, repeated, renamed, joined, stacked]


@given(chains())
def test_any_chain_equals_the_same_operations_on_plain_values(chain):
    table, plain = chain
    value = read(table)
    assert table.n_rows == len(plain[next(iter(plain))])
    assert list(table.schema) == list(table.block_of) == list(plain)
    check_equal(value, plain)


@given(chains())
def test_rows_that_were_fetched_are_only_copied_out_of_memory_that_others_read(chain):
    table, plain = chain
    plan, values = addressed(table)
    present = handles.rows_needed(plan, [])
    fetched = {label: rows_of(values[label], np.asarray(rows, dtype=np.int64)) for label, rows in present.items()}
    value = handles.assemble(
        plan.share(0), lambda label: copy.deepcopy(fetched[label]), lambda label: as_batch(fetched[label]), present
    )
    check_equal(value, plain)
    arrays = [column for column in value.values() if isinstance(column, np.ndarray)]
    assert not any(np.shares_memory(array, one["a"]) for array in arrays for one in fetched.values())


@given(chains())
def test_rows_that_are_taken_twice_are_two_objects(chain):
    table, plain = chain
    plan, values = addressed(table)
    lists = {
        label: {name: [[row] for row in column] for name, column in value.items()} for label, value in values.items()
    }
    value = handles.assemble(plan.share(0), lambda label: copy.deepcopy(lists[label]))
    assert value == {name: [[row] for row in column] for name, column in plain.items()}
    rows = [id(row) for column in value.values() for row in column]
    assert len(set(rows)) == len(rows)


def check_equal(value, plain):
    assert list(value) == list(plain)
    for name, column in plain.items():
        assert type(value[name]) is type(column)
        assert list(value[name]) == list(column)
