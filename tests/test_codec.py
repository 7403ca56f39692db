"""The codec: what arrives equals what was sent, is the receiver's own and writable, and large memory is not copied."""

import gc
import pickle
import subprocess
import sys
import types
import weakref
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import TensorDict

from bandmaster.codec.pickling import Payload, decode, encode

N = 2000  # items, enough for a buffer of its own in every dtype of four bytes or more


def sent(value):
    """What the receiver of a value gets."""
    return decode(encode(value).private())


# --- numpy ------------------------------------------------------------------------------------------------------


ARRAYS = {
    "bool": np.arange(N) % 3 == 0,
    "int8": np.arange(N).astype(np.int8),
    "uint64": np.arange(N, dtype=np.uint64),
    "big-endian": np.arange(N, dtype=">i4"),
    "float16": np.arange(N, dtype=np.float16),
    "longdouble": np.arange(N, dtype=np.longdouble),
    "complex64": np.arange(N, dtype=np.complex64) * 1j,
    "strings": np.array(["a", "ünï", ""] * N),
    "bytes": np.array([b"a", b"bcd"] * N),
    "datetime64": np.arange(N).astype("M8[us]"),
    "NaT": np.array(["2024-02-29", "NaT"], dtype="M8[D]"),
    "timedelta64": np.arange(N).astype("m8[h]"),
    "void": np.arange(N, dtype=np.int32).view("V4"),
    "structured": np.array([(1, 2.5, b"x")] * N, dtype=[("a", "i4"), ("b", "f8"), ("c", "S3")]),
    "aligned": np.zeros(N, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "subarray": np.ones(N, dtype=[("a", "i4", (2, 2))]),
    "object": np.array([1, "a", None, [2], {"b": 3}], dtype=object),
    "structured object": np.array([(1, "a")], dtype=[("n", int), ("x", object)]),
    "StringDType": np.array(["a", "a much longer string than the others"], dtype=np.dtypes.StringDType()),
    "StringDType with a list": np.array(["a"], dtype=np.dtypes.StringDType(na_object=[])),
    "StringDType with None": np.array(["a", None], dtype=np.dtypes.StringDType(na_object=None)),
    "0-d": np.array(7.5),
    "no rows": np.zeros((0, 3)),
    "no columns": np.zeros((3, 0), order="F"),
    "empty strings": np.array([], dtype="U"),
    "small": np.arange(3),
    "C order": np.arange(6 * N).reshape(2, 3, N),
    "F order": np.asfortranarray(np.arange(3 * N).reshape(3, N)),
    "every other": np.arange(2 * N)[::2],
    "reversed": np.arange(N)[::-1],
    "columns": np.arange(4 * N).reshape(N, 4)[:, 1:3],
    "permuted": np.arange(6 * N).reshape(2, 3, N).transpose(1, 0, 2),
    "broadcast": np.broadcast_to(np.arange(N), (3, N)),
}


@pytest.mark.parametrize("is_writable", [True, False], ids=["writable", "read-only"])
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays(kind, is_writable):
    original = ARRAYS[kind].view()
    original.flags.writeable = is_writable and original.flags.writeable

    array = sent(original)

    assert type(array) is np.ndarray
    assert (array.dtype, array.shape) == (original.dtype, original.shape)
    np.testing.assert_array_equal(array, original)
    assert array.flags.writeable
    assert array.flags.f_contiguous >= original.flags.f_contiguous
    before = original.copy()
    array[...] = np.zeros((), array.dtype)
    np.testing.assert_array_equal(original, before)


@given(hnp.arrays(hnp.scalar_dtypes() | hnp.array_dtypes(), hnp.array_shapes(min_dims=0, min_side=0)))
def test_any_array(original):
    array = sent(original)

    assert (array.dtype, array.shape, array.flags.writeable) == (original.dtype, original.shape, True)
    assert array.tobytes() == original.tobytes()


@pytest.mark.parametrize(
    "original",
    [
        np.ma.MaskedArray(np.arange(N), np.arange(N) % 2),
        np.rec.array([(1, 2.0)] * N, dtype=[("a", int), ("b", float)]),
        np.float32(1.5),
        np.datetime64("2024-02-29"),
        np.str_("ab"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_like_an_array(original):
    arrived = sent(original)

    assert type(arrived) is type(original)
    np.testing.assert_array_equal(arrived, original)


RECORDS = [("a", "i1"), ("b", "f8")]
ALIKE = {  # dtypes that are equal, and yet not the same
    "plain": np.dtype(RECORDS),
    "record": np.dtype((np.record, RECORDS)),
    "metadata": np.dtype(RECORDS, metadata={"unit": "m"}),
    "other metadata": np.dtype(RECORDS, metadata={"unit": "s"}),
    "number": np.dtype("i4"),
    "number with metadata": np.dtype("i4", metadata={"enum": {"a": 1}}),
    "number with other metadata": np.dtype("i4", metadata={"enum": {"a": 2}}),
}


@pytest.mark.parametrize("order", [list(ALIKE), list(reversed(ALIKE))], ids=["forwards", "backwards"])
def test_dtypes_that_are_equal_are_not_confused(order):
    for name in order:
        dtype = sent(np.zeros(N, ALIKE[name])).dtype
        assert (dtype.type, dtype.metadata) == (ALIKE[name].type, ALIKE[name].metadata)


def test_a_dtype_of_a_class_that_can_be_imported_nowhere():
    class Local(np.void):
        n = 3

    assert sent(np.zeros(2, np.dtype((Local, RECORDS))))[0].n == 3
    assert sent(np.zeros(2, np.dtype("i4", metadata={"kind": Local}))).dtype.metadata["kind"].n == 3


# --- torch ------------------------------------------------------------------------------------------------------

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 10_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype(dtype, n):
    original = (torch.arange(n) % 2).to(getattr(torch, dtype))

    tensor = sent(original)

    assert (type(tensor), tensor.dtype, tensor.shape) == (torch.Tensor, original.dtype, original.shape)
    assert torch.equal(tensor.view(torch.uint8), original.view(torch.uint8))


TENSORS = {
    "0-d": torch.tensor(1.5),
    "no rows": torch.zeros(0, 3),
    "no columns": torch.zeros(3, 0).t(),
    "transposed": torch.arange(2.0 * N).reshape(2, N).t(),
    "permuted": torch.arange(6.0 * N).reshape(2, 3, N).permute(2, 0, 1),
    "channels last": torch.randn(2, 3, 20, 20).contiguous(memory_format=torch.channels_last),
    "one wide": torch.arange(1.0 * N).reshape(1, N, 1)[:, :, :1],
}


@pytest.mark.parametrize("kind", TENSORS)
def test_strides_are_kept_where_memory_has_no_holes(kind):
    original = TENSORS[kind]
    tensor = sent(original)

    assert torch.equal(tensor, original)
    assert (tensor.dtype, tensor.stride()) == (original.dtype, original.stride())


@pytest.mark.parametrize(
    "original",
    [
        torch.arange(2.0 * N)[::2],
        torch.arange(4.0 * N).reshape(N, 4)[:, 1:3],
        torch.arange(1.0 * N).expand(3, N),
        torch.ones(1).expand(N),
        torch.complex(torch.arange(1.0 * N), torch.ones(N)).conj(),
        torch.complex(torch.arange(1.0 * N), torch.ones(N)).conj().imag,
    ],
    ids=["every other", "columns", "expanded", "one expanded", "conjugate", "negative"],
)
def test_other_tensors_arrive_in_memory_of_their_own(original):
    before = original.clone()
    tensor = sent(original)

    assert torch.equal(tensor, before)
    assert tensor.is_contiguous()
    tensor.fill_(7)
    assert torch.equal(original, before)


def test_a_view_does_not_carry_the_whole():
    assert encode(torch.zeros(1000 * N)[:N]).nbytes < 5 * N
    assert encode(np.zeros(1000 * N, np.float32)[:N]).nbytes < 5 * N


def test_whether_a_tensor_requires_grad_is_kept():
    leaf = torch.ones(N, requires_grad=True)

    assert sent(leaf).requires_grad
    assert sent(leaf * 2).requires_grad
    assert not sent(leaf.detach()).requires_grad
    assert sent(leaf * 2).is_leaf
    with torch.inference_mode():
        inference = torch.ones(N)
    assert torch.equal(sent(inference), torch.ones(N))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters(requires_grad):
    original = torch.nn.Parameter(torch.ones(N), requires_grad)
    parameter = sent(original)

    assert type(parameter) is torch.nn.Parameter
    assert (parameter.requires_grad, parameter.is_leaf) == (requires_grad, True)
    assert torch.equal(parameter, original)


@pytest.mark.parametrize("make", [torch.ones, lambda n: torch.nn.Parameter(torch.ones(n))], ids=["tensor", "parameter"])
def test_what_a_user_sets_on_a_tensor_goes_with_it(make):
    original = make(N)
    original.is_sharded, original.itself = True, original
    payload = encode(original)
    tensor = decode(payload.private())

    assert tensor.is_sharded
    assert tensor.itself is tensor
    assert len(payload.buffers) == 1


def test_modules_keep_what_they_share():
    module = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.BatchNorm1d(80), torch.nn.Linear(80, 80))
    module[2].weight = module[0].weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    copy, copy_of_optimizer = sent((module, optimizer))

    assert copy[2].weight is copy[0].weight
    assert copy_of_optimizer.param_groups[0]["params"][0] is copy[0].weight
    assert str(copy.state_dict()) == str(module.state_dict())
    with torch.no_grad():
        copy[0].weight.zero_()
    assert module[0].weight.abs().sum() > 0


def test_sparse_tensors():
    original = torch.eye(3).to_sparse()
    tensor = sent(original)

    assert tensor.layout is torch.sparse_coo
    assert torch.equal(tensor.to_dense(), torch.eye(3))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_bsc], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch's, that it may change
def test_sparse_tensors_are_collected_with_their_last_reference(layout):
    blocks = {"blocksize": (2, 2)} if layout is torch.sparse_bsc else {}
    original = torch.eye(4).to_sparse(layout=layout, **blocks)
    original.mark = "sharded"
    tensor = sent(original)
    assert (tensor.layout, tensor.mark) == (layout, "sharded")
    assert torch.equal(tensor.to_dense(), torch.eye(4))
    reference = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("lengths", [(3, 0, 2), (N, 2 * N), ()])
def test_jagged_tensors(lengths):
    values = torch.arange(sum(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    original = torch.nested.nested_tensor_from_jagged(values, offsets)
    payload = encode(original)
    tensor = decode(payload.private())

    assert (tensor.is_nested, tensor.layout, tensor.dtype) == (True, torch.jagged, torch.int64)
    assert [row.tolist() for row in tensor.unbind()] == [row.tolist() for row in original.unbind()]
    assert len(payload.buffers) == (sum(lengths) > 512)


def test_tensordicts():
    original = TensorDict({"ids": torch.arange(N), "inner": {"x": torch.zeros(N, 2)}, "name": "a"}, batch_size=[N])
    payload = encode(original)
    batch = decode(payload.private())

    assert (type(batch), batch.batch_size, batch["name"]) == (TensorDict, (N,), "a")
    assert (batch == original).all()
    assert len(payload.buffers) == 2
    batch["inner", "x"].fill_(1)
    assert original["inner", "x"].sum() == 0


# --- everything else --------------------------------------------------------------------------------------------

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.fractions() | st.dates() | st.complex_numbers(allow_nan=False)
)  # fmt: skip
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())


@given(
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner) | st.sets(LEAVES),
        max_leaves=12,
    )
)
def test_nested_values(value):
    assert sent(value) == value


@given(st.lists(st.integers(0, 3000), max_size=5))
def test_buffers_come_back_in_their_places(sizes):
    value = {
        n: [np.full(size, n), torch.full((size,), n), bytearray(size), {"name": str(n)}] for n, size in enumerate(sizes)
    }
    for n, (array, tensor, raw, meta) in sent(value).items():
        assert array.tolist() == tensor.tolist() == [n] * sizes[n]
        assert (len(raw), meta) == (sizes[n], {"name": str(n)})


@pytest.mark.parametrize("large", [np.zeros(N), torch.zeros(N), bytearray(9 * N), bytes(9 * N)], ids=type)
def test_what_is_shared_stays_shared(large):
    inner = {"large": large}
    first, second, third = sent([inner, inner, large])

    assert first is second
    assert first["large"] is third
    assert encode([inner, inner, large]).nbytes < 10 * N


@pytest.mark.parametrize("large", [np.zeros(N), bytes(9 * N)], ids=type)
def test_cycles_close(large):
    parent, child = {"large": large}, []
    parent["child"] = child
    child.append(parent)
    copy = sent(parent)

    assert copy["child"][0] is copy
    assert bytes(copy["large"]) == bytes(large)


class Box:
    def __init__(self, *inside):
        self.inside = inside


CONTAINERS = [list, tuple, lambda inside: dict(enumerate(inside)), lambda inside: Box(*inside)]
SIZES = st.sampled_from([3, 5000])  # in the pickle stream, and out of band


@st.composite
def graphs(draw):
    """A value whose parts are shared by containers and objects in any way; a list in it may hold the whole."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=3))
    parts = [draw(st.sampled_from([bytes, bytearray, np.zeros]))(size) for size in sizes]
    for kind in draw(st.lists(st.sampled_from(CONTAINERS), min_size=1, max_size=6)):
        parts.append(kind(draw(st.lists(st.sampled_from(parts), min_size=1, max_size=3))))
    whole = tuple(draw(st.lists(st.sampled_from(parts), min_size=2, max_size=4)))
    lists = [part for part in parts if type(part) is list]
    if lists and draw(st.booleans()):
        lists[0].append(whole)
    return whole


def structure(value):
    """What a value is made of, and which of its parts are the same object."""
    numbers, found = {id(value): 0}, [value]  # grows as it is looked through
    described = []
    for part in found:
        kind = type(part)
        inside = list(part.values()) if kind is dict else part if kind in (list, tuple) else ()
        inside = part.inside if kind is Box else inside
        for item in inside:
            if id(item) not in numbers:
                numbers[id(item)] = len(found)
                found.append(item)
        described.append((kind, len(inside), [numbers[id(item)] for item in inside]))
    return described


@given(graphs())
def test_what_is_one_object_arrives_as_one_just_as_through_pickle(value):
    assert structure(sent(value)) == structure(pickle.loads(pickle.dumps(value)))


@pytest.mark.parametrize(
    "large",
    [bytearray(9 * N), bytes(9 * N), [bytes(9 * N)], {"a": [bytes(9 * N)]}],
    ids=["bytearray", "bytes", "list", "dict"],
)
def test_what_an_object_refers_to_stays_the_same_as_what_lies_beside_it(large):
    payload = encode((large, Box(large), [large]))
    first, box, third = decode(payload.private())

    assert first is box.inside[0] is third[0]
    assert first == large
    assert len(payload.buffers) == 1
    assert payload.nbytes < 10 * N


PAIRS = {"list": lambda a: [a, a], "tuple": lambda a: (a, a), "dict": lambda a: {0: a, 1: a}}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("innermost", [1, bytes(9 * N)], ids=["small", "large"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_what_is_shared_in_many_ways_is_sent_once(pair, innermost):
    value = pair(innermost)
    for _ in range(50):
        value = pair(value)  # 2 ** 50 paths to the innermost

    assert encode(value).nbytes < 2000 + 9 * N


@pytest.mark.parametrize("wrap", [lambda a: [a], lambda a: (a,), lambda a: {0: a}], ids=["list", "tuple", "dict"])
def test_values_that_pickle_can_nest_so_deeply_can_be_sent(wrap):
    value = bytes(9 * N)
    for _ in range(300):
        value = wrap(value)

    payload = encode(value)

    assert len(payload.buffers) == 1
    assert decode(payload.private()) == value


class Point:  # the receiver may not be able to import the module that it is defined in
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return self.x == other.x


def test_classes_and_functions_that_can_be_imported_nowhere():
    class Local(Point):
        factor = 3

    scale = 2
    point, cls, function = sent((Local(np.arange(N)), Local, lambda x: scale * x))

    assert point.x.tolist() == list(range(N))
    assert (point.factor, cls(5).x, function(4)) == (3, 5, 8)


def test_functions_are_found_wherever_they_are_among_arrays():
    class Local(Point):
        pass

    array, scale = np.arange(N), 2
    for value in ({Local: array}, [array, ({"f": [lambda x: scale * x]}, array)], np.array([lambda x: scale * x])):
        received = sent(value)
        if isinstance(value, dict):
            assert [cls(3).x for cls in received] == [3]
        else:
            function = received[1][0]["f"][0] if isinstance(value, list) else received[0]
            assert function(4) == 8


def test_classes_of_main_are_sent_whole():
    import __main__

    exec("class InMain:\n    x = 3\n    def double(self): return 2 * self.x", vars(__main__))
    payload = encode(__main__.InMain())
    del __main__.InMain

    assert decode(payload).double() == 6


RETURNED = """if True:
    import pickle, sys
    from bandmaster.codec import encode
    value = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(encode(value).head)
"""


def test_what_another_process_makes_of_a_class_with_slots_comes_back():
    @dataclass(slots=True)
    class Sample:
        text: str
        reward: float = 0.5

    sent_there = encode([Sample("a"), Sample("b", 2.0)]).head
    done = subprocess.run([sys.executable, "-c", RETURNED], input=sent_there, capture_output=True, timeout=60)
    assert pickle.loads(done.stdout) == [Sample("a"), Sample("b", 2.0)], done.stderr.decode()


RECORDS_SENT = """if True:
    import sys
    import numpy as np
    from bandmaster.codec import encode
    sys.stdout.buffer.write(encode(np.zeros(3, [("x", "f8")]).view(np.recarray)).head)
"""


def test_records_are_sent_by_name_also_before_numpy_has_imported_their_module():
    done = subprocess.run([sys.executable, "-c", RECORDS_SENT], capture_output=True, timeout=60)
    records = pickle.loads(done.stdout)
    assert type(records) is np.recarray
    assert records[1:].x.tolist() == [0, 0]


def test_code_keeps_the_name_of_its_file_for_tracebacks_and_debuggers():
    def outer():
        return lambda: None

    received = sent(outer)
    assert received.__code__.co_filename == received().__code__.co_filename == __file__


def test_importable_values_are_sent_by_name():
    assert sent(Fraction) is Fraction
    assert sent(Point(3)) == Point(3)


class Pair(NamedTuple):
    first: object
    second: object = None


class Noted(Pair):  # has a dict, and so may refer to more than its items
    pass


@pytest.mark.parametrize("second", [None, "a", b"b", bytes(9 * N), [{"c": 1.5}], np.arange(N)], ids=type)
def test_named_tuples_are_sent_by_name(second):
    value = {"pairs": [Pair(1, second), Pair(Pair(2), second)]}
    received = sent(value)
    (first, last), (_, kept) = received["pairs"], value["pairs"]
    assert type(first) is type(last) is type(last.first) is Pair
    assert first.second is last.second and np.array_equal(first.second, kept.second)
    assert (first.first, last.first) == (1, (2, None))


def test_named_tuples_may_hold_what_only_cloudpickle_can_pickle():
    class Local(NamedTuple):
        x: int

    noted = Noted(1)
    noted.function = lambda: 4
    pair, local, received = sent([Pair(lambda: 3, Local), Local(5), noted])
    assert (pair.first(), pair.second(6).x, local.x, received.function()) == (3, 6, 5, 4)


def test_named_tuples_of_a_module_that_is_registered_are_sent_whole():
    module = types.ModuleType("only_here")
    exec("from typing import NamedTuple\nclass Pair(NamedTuple):\n    x: int", vars(module))
    sys.modules["only_here"] = module
    cloudpickle.register_pickle_by_value(module)
    try:
        payload = encode([module.Pair(3)])
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules["only_here"]
    assert decode(payload)[0].x == 3


def test_what_cannot_be_pickled_says_so():
    with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
        encode([1, (n for n in range(3))])


# --- payloads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "original",
    [
        np.zeros(5000, np.uint8),
        np.zeros((100, 50), np.uint8, order="F"),
        torch.zeros(5000, dtype=torch.uint8),
        torch.zeros(100, 50, dtype=torch.uint8).t(),
        torch.zeros(9000, dtype=torch.uint8)[2000:7000],
    ],
    ids=["array", "F order", "tensor", "transposed", "slice"],
)
def test_encoding_large_memory_copies_nothing(original):
    (buffer,) = encode(original).buffers
    original[:] = 1

    assert bytes(buffer) == b"\1" * 5000


def test_encoding_a_read_only_array_copies_nothing():
    original = np.arange(N)
    original.flags.writeable = False

    (buffer,) = encode(original).buffers

    assert np.shares_memory(np.frombuffer(buffer, np.uint8), original)


def test_a_payload_keeps_the_memory_it_shares():
    payload = encode([np.arange(N), np.broadcast_to(np.arange(N), (2, N)), torch.arange(N)])

    assert [value.tolist() for value in decode(payload)] == [list(range(N)), [list(range(N))] * 2, list(range(N))]


def test_decoding_copies_nothing():
    payload = encode(np.zeros(N)).private()
    decode(payload)[:] = 1

    assert decode(payload).min() == 1


def test_every_private_copy_is_its_readers_own():
    original = {"array": np.zeros(N), "tensor": torch.zeros(N), "small": np.zeros(2), "list": [0]}
    payload = encode(original)
    first, second = decode(payload.private()), decode(payload.private())
    for value in first.values():
        value[0] = 1

    for untouched in (second, original):
        assert [float(value[0]) for value in untouched.values()] == [0, 0, 0, 0]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_payload_survives_a_pickle(protocol):
    value = {"array": np.arange(N), "tensor": torch.arange(N), "name": "a"}
    payload = pickle.loads(pickle.dumps(encode(value), protocol))

    arrived = decode(payload.private())
    assert (arrived["array"].tolist(), arrived["tensor"].tolist(), arrived["name"]) == ([*range(N)], [*range(N)], "a")


MEANWHILE = """
import pickle, sys, threading
from bandmaster.codec.pickling import decode

payload = pickle.load(sys.stdin.buffer)
threading.Thread(target=__import__, args=["torch"]).start()
while "torch" not in sys.modules:
    pass
print(decode(payload.private()).tolist())
"""


def test_a_tensor_is_decoded_while_another_thread_imports_torch():
    payload = pickle.dumps(encode(torch.arange(3)))
    done = subprocess.run([sys.executable, "-c", MEANWHILE], input=payload, capture_output=True, timeout=60)
    assert done.stdout.split() == [b"[0,", b"1,", b"2]"], done.stderr.decode()


def test_nbytes_counts_all_of_it():
    payload = encode(np.zeros(N))

    assert payload.nbytes == len(payload.head) + 8 * N
    assert Payload(b"abc").nbytes == 3
