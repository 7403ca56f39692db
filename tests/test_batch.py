"""What has rows, by type and never by length: counting, cutting and joining rows of every kind of batch."""

import pickle
import re
import subprocess
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields, is_dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorClass, TensorDict, lazy_stack, tensorclass

from bandmaster import BatchError, UsageError, register_batch_type
from bandmaster.plan.batch import concat_rows, count_rows, take_rows


@tensorclass
class Decorated:
    ids: torch.Tensor
    name: str


class Derived(TensorClass):
    ids: torch.Tensor


class Prompts:
    def __init__(self, texts):
        self.texts = texts


class LongPrompts(Prompts):
    pass


class Columns(NamedTuple):
    ids: Any
    mask: Any = None


@dataclass(frozen=True)
class Rollout:
    ids: Any
    rewards: Any
    total: Any = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "total", self.rewards.cumsum(0))
        object.__setattr__(self, "n", len(self.ids))


@dataclass
class Node:
    left: Any
    right: Any


class Lookup(Mapping):
    """A mapping whose copies would share what it holds."""

    def __init__(self, items):
        self.items_of = dict(items)

    def __getitem__(self, key):
        return self.items_of[key]

    def __iter__(self):
        return iter(self.items_of)

    def __len__(self):
        return len(self.items_of)


class Named(Lookup):
    """Cannot be made from its items alone."""

    def __init__(self, name, items):
        super().__init__(items)


class Unfinished(Lookup):
    """Has a value that is still to be given, as configs of Hydra do."""

    def __getitem__(self, key):
        raise LookupError("no value")


class Labelled(dict):
    """A dict that knows more than its items."""

    label = None


class Measured(np.ndarray):
    """An array with a unit."""

    def __array_finalize__(self, other):
        self.unit = getattr(other, "unit", None)


class Attributes(dict):
    """A dict whose items are its attributes too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


register_batch_type(
    Prompts,
    rows=lambda value: len(value.texts),
    split=lambda value, start, stop: type(value)(value.texts[start:stop]),
    concat=lambda values: type(values[0])([text for value in values for text in value.texts]),
)


def jagged(*lengths):
    return torch.nested.nested_tensor([torch.full((n,), n) for n in lengths], layout=torch.jagged)


def batches():
    """One batch of five rows of every kind."""
    numbers = torch.arange(10.0).reshape(5, 2)
    return {
        "array": np.arange(10).reshape(5, 2),
        "strings": np.array(["a", "b", "c", "dd", "e"]),
        "masked array": np.ma.MaskedArray(np.arange(5), [0, 1, 0, 1, 1]),
        "recarray": np.rec.array([(n, 2.0 * n) for n in range(5)], dtype=[("n", int), ("x", float)]),
        "tensor": numbers,
        "bf16": numbers.to(torch.bfloat16),
        "u16": torch.arange(5).to(torch.uint16),
        "jagged": jagged(3, 1, 2, 1, 4),
        "sparse": numbers.to_sparse(),
        "list": ["a", None, 3, [], {}],
        "dict": {"ids": numbers, "meta": {"names": list("abcde"), "mask": np.ones((5, 1), bool)}},
        "OrderedDict": OrderedDict(ids=np.arange(5)),
        "UserDict": UserDict(ids=numbers, names=list("abcde")),
        "defaultdict": defaultdict(list, ids=numbers),
        "a dict with attributes": Attributes(ids=np.arange(5)),
        "a mapping's view": MappingProxyType({"ids": numbers}),
        "a user's mapping": Lookup({"ids": numbers, "inner": UserDict(x=np.arange(5))}),
        "NamedTuple": Columns(numbers, np.arange(5)),
        "dataclass": Rollout(numbers, np.arange(5)),
        "dataclass of others": Node(Columns(list("abcde"), numbers), {"x": np.arange(5)}),
        "TensorDict": TensorDict({"ids": numbers, "inner": {"x": torch.arange(5)}}, batch_size=[5]),
        "TensorDict with jagged": TensorDict({"ids": jagged(3, 1, 2, 1, 4)}, batch_size=[5]),
        "lazy stack": lazy_stack([TensorDict({"ids": torch.zeros(n)}) for n in range(5)]),
        "tensorclass": Decorated(ids=numbers, name="x", batch_size=[5]),
        "TensorClass": Derived(ids=numbers, batch_size=[5]),
        "registered": Prompts(list("abcde")),
        "subclass of a registered one": LongPrompts(list("abcde")),
    }


def plain(value):
    """The rows of a batch as lists, dicts and numbers, so that they can be compared."""
    if isinstance(value, np.ma.MaskedArray):
        return list(zip(value.data.tolist(), np.ma.getmaskarray(value).tolist(), strict=True))
    if isinstance(value, torch.Tensor):
        return [row.tolist() for row in (value.to_dense() if value.is_sparse else value).unbind()]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, TensorDict | Decorated | Derived) or hasattr(value, "tensordicts"):
        return [plain(row.to_dict()) if row.batch_dims else str(row.to_dict()) for row in value.unbind(0)]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Columns):
        return plain(value._asdict())
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value.texts if isinstance(value, Prompts) else value


every_kind = pytest.mark.parametrize("kind", batches())


@every_kind
def test_count(kind):
    assert count_rows(batches()[kind]) == 5


@every_kind
def test_what_is_cut_can_be_joined_again(kind):
    batch = batches()[kind]
    parts = [take_rows(batch, range(2)), take_rows(batch, range(2, 3)), take_rows(batch, range(3, 5))]

    assert [count_rows(part) for part in parts] == [2, 1, 2]
    joined = concat_rows(parts)
    assert count_rows(joined) == 5
    assert plain(joined) == plain(batch)
    assert {type(value) for value in [joined, *parts]} == {type(batch)}


@every_kind
def test_no_rows_are_a_batch_too(kind):
    batch = batches()[kind]
    nothing = take_rows(batch, range(5, 5))

    assert count_rows(nothing) == 0
    assert count_rows(concat_rows([nothing, nothing])) == 0
    assert plain(concat_rows([batch, nothing])) == plain(batch)


@every_kind
@pytest.mark.parametrize("numbers", [[3, 0, 1, 1, 4], [2], []])
def test_rows_are_taken_by_number(kind, numbers):
    batch = batches()[kind]
    taken = take_rows(batch, np.array(numbers, dtype=np.int64))

    assert count_rows(taken) == len(numbers)
    expected = concat_rows([take_rows(batch, range(n, n + 1)) for n in numbers] or [take_rows(batch, range(0))])
    assert type(taken) is type(expected)
    assert plain(taken) == plain(expected)


@every_kind
def test_joining_leaves_its_inputs_alone(kind):
    batch, before = batches()[kind], plain(batches()[kind])
    joined = concat_rows([batch, take_rows(batch, range(2))])

    assert count_rows(joined) == 7
    assert plain(batch) == before


def test_dtypes_are_kept():
    for kind in ("strings", "tensor", "bf16", "jagged", "recarray"):
        batch = batches()[kind]
        assert take_rows(batch, range(1, 1)).dtype == batch.dtype
        assert concat_rows([take_rows(batch, range(2)), batch]).dtype == batch.dtype


def test_joined_arrays_keep_what_the_first_knows_beyond_its_items():
    measured = np.arange(3).view(Measured)
    measured.unit = "s"
    masked = np.ma.MaskedArray([1, 2], [0, 1], fill_value=-1)

    assert concat_rows([measured[:2], measured[2:]]).unit == "s"
    assert concat_rows([masked, masked]).fill_value == concat_rows([np.zeros(1, int), masked]).fill_value == -1


def test_slices_are_views_and_joins_are_not():
    array, tensor = np.zeros((4, 2)), torch.zeros(4, 2)
    take_rows(array, range(1, 3))[:] = 1
    take_rows({"x": tensor}, range(1, 3))["x"][:] = 1
    assert array.tolist() == tensor.tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]

    concat_rows([array, array])[:] = 7
    concat_rows([tensor, tensor])[:] = 7
    assert array.max() == tensor.max() == 1


def test_nested_tensors_in_the_strided_layout():
    nested = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)])

    assert count_rows(nested) == 2
    assert plain(concat_rows([take_rows(nested, range(1, 2)), take_rows(nested, range(1))])) == [[0], [0, 1, 2]]
    with pytest.raises(BatchError, match=r"torch.strided layout cannot have 0 rows, which.*layout=torch.jagged"):
        take_rows(nested, range(1, 1))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            lambda: torch.eye(4).to_sparse_csr(),
            r"in the torch.sparse_csr layout; use to_dense\(\) or to_sparse_coo\(\)",
        ),
        (lambda: torch.eye(4).to_sparse_bsc((2, 2)), r"in the torch.sparse_bsc layout; use to_dense"),
        (
            lambda: torch.quantize_per_channel(torch.eye(3), torch.ones(3), torch.zeros(3), 0, torch.qint8),
            r"that are quantized in this way; use dequantize\(\)",
        ),
    ],
    ids=["csr", "bsc", "quantized by channel"],
)
def test_tensors_whose_rows_torch_cannot_cut(tensor, words):
    assert count_rows(tensor()) in (3, 4)
    with pytest.raises(BatchError, match=f"torch cannot cut or join rows {words}"):
        take_rows(tensor(), range(2))
    with pytest.raises(BatchError, match=f"torch cannot cut or join rows {words}"):
        concat_rows([tensor(), tensor()])


@pytest.mark.parametrize(
    "value",
    [(1, 2), "ab", b"ab", 2, None, range(2), {1, 2}, np.array(2), torch.tensor(2), np.float32(2), {}, {"a": 1}, object,
     TensorDict({"a": torch.zeros(2)}, batch_size=[]), {"a": {}}, {"a": (1, 2), "b": "cd"}, UserDict(), UserDict(a=1),
     Unfinished({"a": [1]}), Columns([1, 2]), Columns(np.zeros(2), 0.5), Node([1], None), Node({"a": [1], "b": 2}, "x"),
     Node({"a": [1], "b": [1, 2]}, 3), Node, Columns],
    ids=lambda value: re.sub(" at 0x.*", ">", str(value)),  # processes that share the tests compare their names
)  # fmt: skip
def test_what_is_no_batch(value):
    assert count_rows(value) is None
    with pytest.raises(BatchError, match="has no rows; batches are arrays and tensors with a row dim, list"):
        take_rows(value, range(1))


def test_a_mapping_that_cannot_be_made_anew_is_cut_to_dicts():
    part = take_rows(Named("x", {"ids": np.arange(5)}), range(1, 3))

    assert type(part) is dict
    assert part["ids"].tolist() == [1, 2]


def test_a_cut_keeps_what_a_mapping_knows_beyond_its_items():
    batch = Labelled(ids=np.arange(5))
    batch.label = "train"
    part = take_rows(batch, range(1, 3))

    assert (type(part), part.label, part["ids"].tolist()) == (Labelled, "train", [1, 2])
    assert batch["ids"].tolist() == [0, 1, 2, 3, 4]
    assert take_rows(defaultdict(list, ids=[1, 2]), range(1))["other"] == []


def test_rows_have_the_same_columns_as_items_and_as_attributes():
    batch = Attributes(ids=np.arange(5), names=list("abcde"))
    part, joined = take_rows(batch, range(1, 3)), concat_rows([batch, batch])

    assert (part.ids.tolist(), part.names, len(joined.ids), len(batch.ids)) == ([1, 2], ["b", "c"], 10, 5)
    received = pickle.loads(pickle.dumps(part))
    assert concat_rows([received, received]).ids.tolist() == [1, 2, 1, 2]


def test_a_mapping_whose_attributes_would_keep_columns_of_other_rows_is_cut_to_dicts():
    batch = Labelled(ids=np.arange(5))
    batch.label = batch["ids"]

    assert type(take_rows(batch, range(1, 3))) is dict


def test_a_dataclass_is_made_anew_by_its_own_constructor():
    part = take_rows(Rollout(np.zeros((5, 2)), np.ones(5)), range(3, 5))

    assert part.n == 2
    assert part.total.tolist() == [4, 5], "a field is cut, whatever the constructor made of the others"


def test_what_holds_itself_is_no_batch():
    ring = Node(None, [1])
    ring.left = ring
    loop = {"ids": [1, 2]}
    loop["self"] = loop

    assert count_rows(ring) is count_rows(loop) is None


@given(st.lists(st.integers(-99, 99)), st.lists(st.integers(0, 9), max_size=4))
def test_any_cuts_join_to_the_same_rows(rows, cuts):
    batch = {"list": rows, "array": np.array(rows), "tensor": torch.tensor(rows)}
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]

    joined = concat_rows([take_rows(batch, range(start, stop)) for start, stop in pairwise(bounds)])

    assert plain(joined) == {"list": rows, "array": rows, "tensor": rows}


# --- registered types -------------------------------------------------------------------------------------------


def test_a_registration_holds_for_subclasses_and_comes_before_what_they_derive_from():
    class Rows(list):
        pass

    before = count_rows(Rows([1, 2, 3]))
    register_batch_type(Rows, rows=lambda _: 1, split=lambda value, start, stop: value, concat=lambda _: "joined")

    class More(Rows):
        pass

    assert count_rows(More([1, 2, 3])) == 1
    assert before == 3, "what it was before it was registered"
    assert concat_rows([More([1]), Rows([2])]) == "joined"
    assert count_rows([1, 2, 3]) == 3


@pytest.mark.parametrize(
    ("cls", "functions", "message"),
    [
        (Prompts([]), {}, "the first argument of register_batch_type must be a class, got <"),
        (Prompts, {"split": None}, "split of register_batch_type must be callable, got None"),
        (Prompts, {"take": 3}, "take of register_batch_type must be callable, got 3"),
    ],
)
def test_mistakes_in_a_registration(cls, functions, message):
    with pytest.raises(UsageError, match=message):
        register_batch_type(cls, **({"rows": len, "split": print, "concat": print} | functions))


# --- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"ids": np.zeros(3), "meta": {"lr": 0.1}},
            "a dict mixes batches with other values: 'ids' has 3 rows, 'meta' is dict without rows",
        ),
        (
            {"ids": [1, 2, 3], "mask": torch.zeros(2)},
            "a dict has batches of unequal row counts: 'ids' has 3, 'mask' has 2",
        ),
        (
            {"outer": {"ids": [1], "mask": torch.tensor(2)}, "x": [1]},
            "a dict mixes batches with other values: 'ids' has 1 rows, 'mask' is torch.Tensor without rows",
        ),
        (
            UserDict(ids=[1], rate=0.1),
            "a UserDict mixes batches with other values: 'ids' has 1 rows, 'rate' is float without rows",
        ),
        (Columns([1], [1, 2]), "a Columns has batches of unequal row counts: 'ids' has 1, 'mask' has 2"),
        (Node(np.zeros(3), [1, 2]), "a Node has batches of unequal row counts: 'left' has 3, 'right' has 2"),
        (
            Node([1], {"ids": [1], "rate": 0.1}),
            "a dict mixes batches with other values: 'ids' has 1 rows, 'rate' is float without rows",
        ),
    ],
)
def test_tables_that_are_no_batch(value, message):
    with pytest.raises(BatchError) as caught:
        count_rows(value)
    assert message == str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1], np.array([1])], r"cannot join list \(part 0\) and numpy.ndarray \(part 1\)"),
        ([[1], [2], 3], r"cannot join list \(part 0\) and int \(part 2\)"),
        ([{"a": [1]}, {"a": np.array([1])}], r"cannot join list \(part 0\) and numpy.ndarray \(part 1\)"),
        ([{"a": [1]}, {"b": [1]}], r"cannot join dicts with keys \['a'\] \(part 0\) and \['b'\] \(part 1\)"),
        (
            [Columns([1], [2]), Node([1], [2])],
            r"cannot join test_batch.Columns \(part 0\) and test_batch.Node \(part 1\)",
        ),
        ([Columns([1], [2]), {"ids": [1]}], r"cannot join test_batch.Columns \(part 0\) and dict \(part 1\)"),
        ([np.zeros((1, 2)), np.zeros((1, 3))], "cannot join 2 values of type numpy.ndarray: all the input array dim"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], "cannot join 2 values of type torch.Tensor: Sizes of tensors must"),
        ([3, 4], "int has no rows; batches are arrays and tensors with a row dim, list, TensorDict"),
    ],
)
def test_what_cannot_be_joined(values, message):
    with pytest.raises(BatchError, match=message):
        concat_rows(values)


@pytest.mark.parametrize("dtype", [">i4", "<f8", "U3", "O", "M8[ns]", [("x", ">i2"), ("y", "f4")]], ids=str)
def test_arrays_are_joined_in_their_own_dtype(dtype):
    parts = [np.zeros(2, dtype), np.zeros(0, dtype), np.zeros(3, dtype)]
    joined = concat_rows(parts)
    assert joined.dtype == np.dtype(dtype)
    assert len(joined) == 5


def test_what_cannot_be_cut_names_the_type_and_the_reason():
    @dataclass
    class Tokenized:
        ids: Any
        tokenizer: InitVar[Any]

        def __post_init__(self, tokenizer):
            pass

    with pytest.raises(BatchError, match=r"cannot split the rows of test_batch\..*Tokenized: .*InitVar 'tokenizer'"):
        take_rows(Tokenized([1, 2], None), range(1))


def test_joining_arrays_does_not_import_masked_ones():
    code = (
        "import sys, numpy as np; from bandmaster.plan.batch import concat_rows; "
        "concat_rows([np.ones(2), np.ones(3)]); sys.exit('numpy.ma' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
