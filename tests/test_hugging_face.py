"""Datasets, and the mappings of transformers, are batches: cut over the ranks and joined again."""

import pickle

import numpy as np
import pytest
import torch
from later import Later

import bandmaster as bm
from bandmaster import Dispatch, Gather, Split, TransferProtocol, register
from bandmaster.plan.batch import concat_rows, count_rows, take_rows

datasets, tokenizers, transformers = Later("datasets"), Later("tokenizers"), Later("transformers")
modeling_outputs = Later("transformers.modeling_outputs")
IDS = torch.arange(10).reshape(5, 2)


class Cutter(bm.Worker):
    @register(TransferProtocol(Split("dp"), Gather("dp")))
    def look(self, table):
        return type(table), count_rows(table)

    @register(Dispatch.DP_PROTO)
    def echo(self, table):
        return table


def tokenized():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return fast(["a b", "b a", "a a", "b b", "a b"], return_tensors="np")


def table_of(n_rows):
    return datasets.Dataset.from_dict({"n": range(n_rows), "text": [f"row {n}" for n in range(n_rows)]})


def reordered():
    return table_of(5).select([4, 2, 0, 1, 3]).with_format("numpy", columns=["n"])


TABLES = {
    "BatchEncoding": lambda: transformers.BatchEncoding({"input_ids": IDS, "attention_mask": IDS > 2}),
    "BatchEncoding of a fast tokenizer": tokenized,
    "ModelOutput": lambda: modeling_outputs.CausalLMOutput(logits=IDS, loss=None),
    "Dataset": lambda: table_of(5),
    "Dataset in another order and format": reordered,
}
every_table = pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)


def plain(value):
    """The rows of a table as lists and dicts, so that they can be compared."""
    if isinstance(value, datasets.Dataset):
        return value.to_dict(), str(value.format), value.features
    columns = {key: column.tolist() for key, column in value.items()}
    known = getattr(value, "encodings", None)
    return columns, known and [row.tokens for row in known]


@every_table
def test_what_is_cut_can_be_joined_again(make):
    table = make()
    parts = [take_rows(table, range(2)), take_rows(table, range(2, 2)), take_rows(table, range(2, 5))]

    assert [count_rows(part) for part in parts] == [2, 0, 3]
    joined = concat_rows([pickle.loads(pickle.dumps(part)) for part in parts])
    assert {type(value) for value in [joined, *parts]} == {type(table)}
    assert plain(joined) == plain(table)
    assert count_rows(concat_rows([parts[1], parts[1]])) == 0


@every_table
def test_each_rank_gets_its_rows_in_the_type_of_the_table(make, group):
    table = make()

    assert group.look(table) == [(type(table), 3), (type(table), 2)]
    assert plain(group.echo(table)) == plain(table)


@pytest.fixture(scope="module")
def group():
    with bm.ResourcePool([2], backend="inprocess") as pool:  # elsewhere each worker would import transformers
        yield bm.WorkerGroup(pool, Cutter)


def test_encodings_that_are_not_one_for_each_row_are_left_out():
    table = tokenized()
    text = transformers.BatchEncoding(
        {"input_ids": np.arange(5)}, table.encodings[:1]
    )  # as of one text, whose rows are its tokens

    assert take_rows(text, range(2)).encodings is None
    assert concat_rows([table, transformers.BatchEncoding(dict(table))]).encodings is None


def test_rows_of_a_dataset_in_memory_are_sent_without_the_others():
    table = table_of(20_000)
    whole = len(pickle.dumps(table))

    assert len(pickle.dumps(take_rows(table, range(10, 20)))) < whole / 20
    assert len(pickle.dumps(take_rows(table.select(range(19_999, 0, -1)), range(10, 20)))) < whole / 20


def test_rows_of_a_dataset_in_files_stay_there(tmp_path, monkeypatch):
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # the bar that is shown would leave a thread
    table_of(5).save_to_disk(tmp_path / "table")
    part = take_rows(datasets.load_from_disk(tmp_path / "table"), range(1, 3))

    assert part.cache_files
    assert part["n"][:] == [1, 2]
