"""Tables of pandas and of the user's own, cut over the ranks and joined again; what is no table is refused."""

import pickle
from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas
import pytest

import bandmaster as bm
from bandmaster import Concat, Dispatch, Gather, Split, TransferProtocol, register
from bandmaster.plan.batch import concat_rows, count_rows, slice_rows


class Columns(NamedTuple):
    ids: np.ndarray
    names: list


@dataclass
class Rollout:
    ids: np.ndarray
    meta: dict


class Cutter(bm.Worker):
    @register(TransferProtocol(Split("dp"), Gather("dp")))
    def look(self, table):
        return type(table), count_rows(table)

    @register(Dispatch.DP_PROTO)
    def echo(self, table, config=None):
        return table

    @register(TransferProtocol(Split("dp", pad=True), Concat("dp")))
    def echo_padded(self, table):
        return table


def tables():
    """One batch of five rows of each kind."""
    frame = pandas.DataFrame({"n": range(5), "kind": pandas.Categorical(list("aabca")), "text": list("vwxyz")})
    return {
        "DataFrame": frame,
        "DataFrame with an index": frame.set_index("text"),
        "Series": frame["text"],
        "UserDict": UserDict(ids=np.arange(5), frame=frame),
        "NamedTuple": Columns(np.arange(5), list("abcde")),
        "dataclass": Rollout(np.arange(5), {"names": list("abcde")}),
    }


every_table = pytest.mark.parametrize("kind", tables())


def plain(value):
    """The rows of a table as lists and dicts, so that they can be compared."""
    if isinstance(value, pandas.DataFrame | pandas.Series):
        return value.to_dict(), str(value.index), str(getattr(value, "dtypes", ""))
    if isinstance(value, dict | UserDict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Columns | Rollout):
        return {name: plain(getattr(value, name)) for name in value.__annotations__}
    return value.tolist() if hasattr(value, "tolist") else value


@every_table
def test_what_is_cut_can_be_joined_again(kind):
    table = tables()[kind]
    parts = [slice_rows(table, 0, 2), slice_rows(table, 2, 2), slice_rows(table, 2, 5)]

    assert [count_rows(part) for part in parts] == [2, 0, 3]
    joined = concat_rows([pickle.loads(pickle.dumps(part)) for part in parts])
    assert {type(value) for value in [joined, *parts]} == {type(table)}
    assert plain(joined) == plain(table)
    assert count_rows(concat_rows([parts[1], parts[1]])) == 0


@pytest.fixture(scope="module")
def cutter(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield bm.WorkerGroup(pool, Cutter)


@every_table
def test_each_rank_gets_its_rows_in_the_type_of_the_table(cutter, kind):
    table = tables()[kind]

    assert cutter.look(table) == [(type(table), 3), (type(table), 2)]
    assert plain(cutter.echo(table)) == plain(table)


def test_padding_of_a_table_does_not_come_back(cutter):
    table = tables()["DataFrame"]

    assert plain(cutter.echo_padded(table)) == plain(table)


class Opaque:
    """A type of the user's own that nothing is known of."""


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ((np.arange(5), np.arange(5)), "'table' is tuple. "),
        (Rollout(np.arange(5), {"seed": 1}), "'table' is test_tables.Rollout, whose field 'meta' is dict. "),
        (Opaque(), "'table' is test_tables.Opaque. "),
    ],
    ids=["tuple", "config", "unknown type"],
)
def test_a_call_without_a_batch_is_refused(cutter, table, words):
    with pytest.raises(bm.BatchError) as refused:
        cutter.echo(table)
    assert f"Cutter.echo splits batches by Split('dp'), but no argument is a batch: {words}" in str(refused.value)
    with pytest.raises(bm.BatchError, match=r"arguments=\{'table': Broadcast\(\), 'config': Broadcast\(\)\}"):
        cutter.echo.submit(table, config=0.5)


def test_a_config_is_broadcast_beside_a_batch(cutter):
    assert cutter.echo([1, 2, 3], config=Rollout(np.arange(5), {"seed": 1})) == [1, 2, 3]
