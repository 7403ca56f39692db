"""Every type of rows, in plain calls and under every operation of a handle, is what it is in plain Python.

And every mistake of the random programs comes with its words.
"""

import warnings

import pytest
from fuzz.run import Groups, run
from fuzz.steps import Operate
from fuzz.table import MESHES, program_of_mistakes, program_of_type, types_of_rows
from fuzz.values import Columns

TYPES = types_of_rows()

# Ranks on Ray have the codec and the tables of local ones.
pytestmark = [pytest.mark.backends("inprocess", "local"), pytest.mark.slow_on("inprocess")]


@pytest.fixture(scope="module")
def groups(backend):
    kept = Groups(backend)
    for mesh in MESHES:
        (group,) = kept.of(mesh, is_other=False, roles=())
        group.ask_rank.all().result()  # so that each rank has its event loop
    kept.give_back(are_well=True)
    yield kept
    kept.close()


NAMES = [pytest.param(name, marks=pytest.mark.slow if "in a large" in name else ()) for name in TYPES]
TABLES = [name for name, value in TYPES.items() if isinstance(value, Columns)]  # with all types as their columns


@pytest.mark.backends("local")
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_each_type_are_those_of_plain_python(groups, name):
    compare_type(groups, name)


@pytest.mark.backends("inprocess")
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_each_type_are_those_of_plain_python_where_nothing_is_encoded(groups, name):
    compare_type(groups, name)


def compare_type(groups, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas' and torch's, of kinds of values
        program, expected = program_of_type(TYPES[name])
        compare(program, groups, expected)


def test_every_mistake_says_what_to_do(groups):
    program, expected = program_of_mistakes()
    compare(program, groups, expected)


def compare(program, groups, expected):
    failure = run(program, groups, expected)
    assert failure is None, f"{program[failure.number].code()}\n{failure.kind}\ngot  {failure.got}\nwant {failure.want}"


def test_the_table_has_every_operation():
    done = {step.name for step in program_of_type(TYPES["dict"])[0] if isinstance(step, Operate)}
    everything = {"rows", "select", "drop", "rename", "join", "concat", "repeat", "shuffle", "sort_by", "batches"}
    assert done == everything
