"""What bad input gets: an error of the library's tree that says what was asked and what to do; nothing is lost."""

import inspect
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import bandmaster as bm
from bandmaster import (
    Broadcast,
    Concat,
    Dispatch,
    Execute,
    Gather,
    Mesh,
    Reduce,
    Split,
    TransferProtocol,
    collect_all_to_all,
    register,
)
from bandmaster.single_controller.ray import RayResourcePool, RayWorkerGroup

PADDED = Split("dp", pad=True)


class OutOfLuck(Exception):
    """A user's own exception."""


class HoldsLock(Exception):
    """Cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class TakesTwo(Exception):
    """Its constructor takes other arguments than those that unpickling would call it with."""

    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")


class Mute(Exception):
    """Cannot even be printed."""

    def __str__(self):
        raise RuntimeError("no words")


class Stop(BaseException):
    """Not an Exception."""


def load():
    raise ValueError("made by a newer version")


class NeverArrives:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return load, ()


class NeverLeaves:
    """Cannot be pickled, for a reason of its own."""

    def __reduce__(self):
        raise ValueError("is open")


class LeavesNoWords:
    """Cannot be pickled, and what it raises cannot be printed."""

    def __reduce__(self):
        raise Mute


class StopsOnArrival:
    """Ends the program where it is unpickled."""

    def __reduce__(self):
        return sys.exit, ("on arrival",)


def interrupt():
    raise KeyboardInterrupt("on arrival")


class InterruptsOnArrival:
    """Looks like Ctrl-C where it is unpickled."""

    def __reduce__(self):
        return interrupt, ()


def load_and_signal():
    signal.raise_signal(signal.SIGUSR1)
    return ["loaded"]


class SignalsOnArrival:
    """Is unpickled while a signal comes."""

    def __reduce__(self):
        return load_and_signal, ()


class StopsOnLeaving:
    """Raises no Exception where it is pickled."""

    def __reduce__(self):
        raise Stop("on leaving")


class ErrorThatStopsOnArrival(Exception):
    __reduce__ = StopsOnArrival.__reduce__


class ErrorThatStopsOnLeaving(Exception):
    __reduce__ = StopsOnLeaving.__reduce__


FAILURES = {
    "builtin": lambda: KeyError("loss"),
    "the user's own": lambda: OutOfLuck(7, "cards"),
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": lambda: GeneratorExit("gone"),
    "BaseException": lambda: Stop("at once"),
    "cannot be pickled": lambda: HoldsLock("held"),
    "takes two": lambda: TakesTwo("stuck", "layer 3"),
    "cannot be printed": lambda: Mute(),
    "stops on arrival": lambda: ErrorThatStopsOnArrival("poison"),
    "stops on leaving": lambda: ErrorThatStopsOnLeaving("poison"),
}
RESULTS = {
    "float": lambda rank: 0.5,
    "float on rank 1": lambda rank: [rank] if rank == 0 else 0.5,
    "other type on rank 1": lambda rank: [rank] if rank == 0 else np.zeros(1),
    "shapes": lambda rank: np.zeros((2, 3 + rank)),
    "keys": lambda rank: {f"loss{rank}": [rank]},
    "mixed dict": lambda rank: {"ids": [rank], "loss": 0.5},
    "unequal dict": lambda rank: {"ids": [rank], "labels": [rank, rank]},
    "lock": lambda rank: threading.Lock(),
    "lock on rank 1": lambda rank: [rank] if rank == 0 else threading.Lock(),
    "never leaves": lambda rank: NeverLeaves(),
    "never arrives": lambda rank: NeverArrives(),
    "leaves no words": lambda rank: LeavesNoWords(),
    "stops on arrival": lambda rank: StopsOnArrival(),
    "stops on leaving": lambda rank: StopsOnLeaving(),
    "signals on arrival": lambda rank: SignalsOnArrival(),
    "interrupts on arrival": lambda rank: InterruptsOnArrival(),
}


class Ledger(bm.Worker):
    """Counts its calls."""

    def __init__(self):
        self.n_calls = 0

    unit = "calls"

    def calls(self):
        return self.n_calls

    @property
    def total(self):
        return self.n_calls

    def unregistered(self, x):
        self.n_calls += 1
        return x

    @register(Dispatch.ONE_TO_ALL)
    def tell(self, x, y=0):
        self.n_calls += 1
        return x, y

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def lead(self, x):
        self.n_calls += 1

    @register(Dispatch.ALL_TO_ALL)
    def each(self, x):
        self.n_calls += 1
        return x

    @register(Dispatch.DP_PROTO)
    def rows(self, batch, labels=None):
        self.n_calls += 1
        return batch

    @register(Dispatch.DP_PROTO, arguments={"rate": Split("dp")})
    def step(self, batch, rate):
        self.n_calls += 1

    @register({"dispatch_fn": lambda group, x: (([x] * 3,), {}), "collect_fn": collect_all_to_all})
    def three_for_two(self, x):
        self.n_calls += 1

    @register({"dispatch_fn": lambda group, x: [x], "collect_fn": collect_all_to_all})
    def no_pair(self, x):
        self.n_calls += 1

    @register(TransferProtocol(Broadcast(), Concat("dp")))
    def give(self, what):
        return RESULTS[what](self.rank)

    @register(TransferProtocol(Broadcast(), Reduce("sum")))
    def add_up(self):
        return [2, "two"][self.rank]

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, how, on=(0, 1)):
        if self.rank in on:
            raise FAILURES[how]()
        return self.rank


def compressed_rows():
    import torch  # here, as the workers import this module, and torch takes them seconds

    return torch.eye(2).to_sparse_csr()


@pytest.fixture(scope="module")
def pool(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield pool


@pytest.fixture(scope="module")
def ledger(pool):
    return bm.WorkerGroup(pool, Ledger)


# --- calls that are refused before anything is sent -------------------------------------------------------------

CALLS = {
    "an argument is missing": (
        lambda group: group.tell(),
        bm.ArgumentError,
        ["Ledger.tell(x, y=0)", "missing a required argument: 'x'"],
    ),
    "one too many": (lambda group: group.tell(1, 2, 3), bm.ArgumentError, ["Ledger.tell(x, y=0)", "too many"]),
    "unexpected keyword": (lambda group: group.tell(1, z=2), bm.ArgumentError, ["Ledger.tell(x, y=0)", "'z'"]),
    "a misspelt keyword": (
        lambda group: group.tell(xs=1),
        bm.ArgumentError,
        ["Ledger.tell() got an unexpected keyword argument 'xs'; did you mean 'x'?", "Ledger.tell(x, y=0)"],
    ),
    "the same argument twice": (lambda group: group.tell(1, x=2), bm.ArgumentError, ["multiple values", "'x'"]),
    "when submitted": (lambda group: group.tell.submit(), bm.ArgumentError, ["Ledger.tell(x, y=0)"]),
    "on rank zero": (lambda group: group.lead(), bm.ArgumentError, ["Ledger.lead(x)"]),
    "by name": (lambda group: group.execute_all_sync("unregistered"), bm.ArgumentError, ["Ledger.unregistered(x)"]),
    "by name, not waiting": (lambda group: group.execute_all_async("tell"), bm.ArgumentError, ["Ledger.tell(x, y=0)"]),
    "by name, on rank zero": (
        lambda group: group.execute_rank_zero_sync("tell", 1, 2, 3),
        bm.ArgumentError,
        ["Ledger.tell(x, y=0)"],
    ),
    "a name that nothing has": (
        lambda group: group.execute_all_sync("tel", 1),
        bm.ArgumentError,
        ["Ledger has no method 'tel'; did you mean 'tell'?"],
    ),
    "a method instead of its name": (
        lambda group: group.execute_all_sync(group.tell, 1),
        bm.ArgumentError,
        ["Ledger has no method <group method Ledger.tell(x, y=0)"],
    ),
    "a property instead of a method": (
        lambda group: group.execute_all_sync("total"),
        bm.ArgumentError,
        ["Ledger.total is a property, not a method", "add a method that returns it"],
    ),
    "a class attribute instead of a method": (
        lambda group: group.execute_rank_zero_sync("unit"),
        bm.ArgumentError,
        ["Ledger.unit is a str, not a method", "add a method that returns it"],
    ),
    "a timeout that is no number": (
        lambda group: group.tell.options(timeout=float("nan"))(1),
        bm.UsageError,
        ["timeout must be a non-negative number of seconds or None, got nan"],
    ),
    "too few values for the ranks": (
        lambda group: group.each([1]),
        bm.ArgumentError,
        ["argument 'x' of Ledger.each has 1 values for 2 ranks", "one value per rank"],
    ),
    "too many values for the ranks": (lambda group: group.each([1, 2, 3]), bm.ArgumentError, ["3 values for 2 ranks"]),
    "a number for the ranks": (lambda group: group.each(7), bm.ArgumentError, ["got int", "pass a list of 2 values"]),
    "a string for the ranks": (lambda group: group.each("ab"), bm.ArgumentError, ["got str", "a list of 2 values"]),
    "a set for the ranks": (lambda group: group.each({1, 2}), bm.ArgumentError, ["got set", "a list of 2 values"]),
    "a generator for the ranks": (
        lambda group: group.each(value for value in (1, 2)),
        bm.ArgumentError,
        ["got generator", "a list of 2 values"],
    ),
    "a dispatch function with too many values": (
        lambda group: group.three_for_two(1),
        bm.ArgumentError,
        ["argument 'x' of Ledger.three_for_two has 3 values for 2 ranks"],
    ),
    "a dispatch function that returns no pair": (
        lambda group: group.no_pair(1),
        bm.ArgumentError,
        ["the dispatch_fn of Ledger.no_pair returned list; return (args, kwargs)"],
    ),
    "batches of unequal length": (
        lambda group: group.rows([1, 2], np.zeros(3)),
        bm.BatchError,
        ["Ledger.rows", "'batch' has 2", "'labels' has 3", "arguments={'labels': Broadcast()}"],
    ),
    "a dict of batches and other things": (
        lambda group: group.rows({"ids": [1, 2], "rate": 0.5}),
        bm.BatchError,
        ["argument 'batch' of Ledger.rows", "'ids' has 2 rows", "'rate' is float", "arguments={'batch': Broadcast()}"],
    ),
    "a dict of unequal batches": (
        lambda group: group.rows({"ids": [1, 2], "labels": [1, 2, 3]}),
        bm.BatchError,
        ["argument 'batch' of Ledger.rows", "'ids' has 2", "'labels' has 3", "arguments={'batch': Broadcast()}"],
    ),
    "a number that was declared to be split": (
        lambda group: group.step([1, 2], 0.5),
        bm.BatchError,
        ["argument 'rate' of Ledger.step cannot be split: float has no rows", "arguments={'rate': Broadcast()}"],
    ),
    "rows that cannot be cut": (
        lambda group: group.rows(compressed_rows()),
        bm.BatchError,
        ["argument 'batch' of Ledger.rows", "torch.sparse_csr layout", "arguments={'batch': Broadcast()}"],
    ),
    "an argument that cannot be pickled": (
        lambda group: group.tell(1, threading.Lock()),
        bm.ArgumentError,
        ["argument 'y' of Ledger.tell (lock) cannot be pickled"],
    ),
    "a row that cannot be pickled": (
        lambda group: group.rows([1, threading.Lock()], labels=[1, 2]),
        bm.ArgumentError,
        ["argument 'batch' of Ledger.rows (list) cannot be pickled"],
    ),
    "a value for rank 1 that cannot be pickled": (
        lambda group: group.each([1, NeverLeaves()]),
        bm.ArgumentError,
        ["argument 'x' of Ledger.each (NeverLeaves) cannot be pickled: ValueError: is open"],
    ),
    "an argument whose error cannot be printed": (
        lambda group: group.tell(1, LeavesNoWords()),
        bm.ArgumentError,
        ["argument 'y' of Ledger.tell (LeavesNoWords) cannot be pickled: ", "Mute: <"],
    ),
    "an argument that stops the program when it is pickled": (
        lambda group: group.tell(1, StopsOnLeaving()),
        bm.ArgumentError,
        ["argument 'y' of Ledger.tell (StopsOnLeaving) cannot be pickled: test_bad_input.Stop: on leaving"],
    ),
    "by name, what cannot be pickled": (
        lambda group: group.execute_all_sync("unregistered", x=NeverLeaves()),
        bm.ArgumentError,
        ["argument 'x' of Ledger.unregistered (NeverLeaves) cannot be pickled: ValueError: is open"],
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), CALLS.values(), ids=CALLS)
def test_a_bad_call_is_refused_before_anything_is_sent(ledger, call, error, words):
    before = ledger.execute_all_sync("calls")
    with pytest.raises(error) as refused:
        call(ledger)
    assert [word for word in words if word not in str(refused.value)] == []
    assert ledger.execute_all_sync("calls") == before
    assert ledger.tell(1) == [(1, 0), (1, 0)], "the group is as good as before"


class TakesNumPy(bm.Worker):
    def on_replace(self, rank, state):
        self.replaced = rank

    @register(Dispatch.ONE_TO_ALL)
    def load(self, version):
        bm.report(self, version=version, load=np.float32(0))
        return getattr(self, "replaced", None)

    @register(Dispatch.REQUEST, concurrency=np.int64(2), is_idempotent=True)
    async def echo(self, rows):
        return rows


@pytest.mark.backends("inprocess", "local")
def test_numbers_may_be_those_of_numpy(make_group):
    one, second = np.int64(1), np.float32(30)
    mesh = Mesh(dp=np.int64(2), tp=one)
    assert (mesh, repr(mesh)) == (Mesh(dp=2, tp=1), "Mesh(dp=2, tp=1)")
    assert repr(mesh.refine(gen_tp=one)) == "Mesh(dp=2, tp=1).refine(gen_tp=1)"
    assert Gather(dp=one) == Gather(dp=1)
    group = make_group(mesh, TakesNumPy, start_timeout=second)
    group.set_default_options(timeout=second, grace=one)
    group.replace(one)
    assert group.load(np.int64(7)) == [1, 1]
    assert group.echo.options(min_version=np.int64(7), replica=one, spill=one, maxsize=one)(3).result(second) == 3
    assert group.echo.options(retries=one, timeout=second)(3).result() == 3
    assert group.echo.map(np.arange(5), in_flight=one, chunk=np.int64(2)).result(second).tolist() == [0, 1, 2, 3, 4]
    assert len(list(group.echo.map(np.arange(5), maxsize=one))) == 5
    assert not bm.wait([group.load.options(timeout=second).submit(7)], timeout=second).not_done
    with group.turn(timeout=second), pytest.raises(bm.UsageError, match="min_version must be a whole number or None"):
        group.echo.options(min_version=np.bool_(True))
    with pytest.raises(bm.UsageError, match="has ranks 0 to 1, got rank"):
        group.replace(np.int64(2))


IN_THE_CONTROLLER = {
    "Future": (lambda group: group.tell.submit(1), "pass the value of future.result()"),
    "GroupMethod": (lambda group: group.tell, "pass the group, or the values that the workers need"),
    "ResourcePool": (lambda group: bm.ResourcePool([1], backend="inprocess"), "pass the values that the workers need"),
}


@pytest.mark.parametrize("is_deep", [False, True], ids=["itself", "deep inside"])
@pytest.mark.parametrize(("make", "advice"), IN_THE_CONTROLLER.values(), ids=IN_THE_CONTROLLER)
def test_what_lives_in_the_controller_is_refused_as_an_argument(ledger, make, advice, is_deep):
    thing = make(ledger)
    argument = {"inside": [thing]} if is_deep else thing
    with pytest.raises(bm.ArgumentError, match=r"argument 'y' of Ledger\.tell \(\w+\) cannot be pickled: ") as refused:
        ledger.tell(1, argument)
    assert advice in str(refused.value)
    assert ledger.tell(2) == [(2, 0), (2, 0)]


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (bm.ArgumentError, TypeError),
        (bm.BatchError, ValueError),
        (bm.MeshError, ValueError),
        (bm.ProtocolError, ValueError),
        (bm.ClosedError, RuntimeError),
        (bm.RemoteError, RuntimeError),
        (bm.ConstructorError, bm.RemoteError),
        (bm.CollectError, TypeError),
        (bm.PlacementError, RuntimeError),
        (bm.WorkerDied, RuntimeError),
        (bm.CallTimeout, TimeoutError),
    ],
)
def test_every_error_is_of_the_tree_and_an_honest_builtin(error, builtin):
    assert issubclass(error, bm.BandmasterError)
    assert issubclass(error, builtin)


def test_calling_what_is_not_registered_says_what_to_do(ledger):
    with pytest.raises(AttributeError) as refused:
        ledger.unregistered(1)
    assert str(refused.value) == (
        "Ledger.unregistered is not registered: put @bandmaster.register(...) above it, "
        "or call execute_all_sync('unregistered', ...)"
    )
    assert ledger.execute_all_sync("unregistered", 1) == [1, 1]
    for wrong, meant in [("tel", "tell"), ("world_siz", "world_size"), ("execute_al", "execute_all")]:
        with pytest.raises(AttributeError, match=f"no attribute '{wrong}'; did you mean '{meant}'") as refused:
            getattr(ledger, wrong)
        shown = "".join(traceback.format_exception(refused.value))
        assert shown.lower().count("did you mean") == 1, "Python adds no suggestion of its own"
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'; Ledger has .*tell"):
        ledger.zzz()
    assert not hasattr(ledger, "_tel")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("remote", r"'remote'; call it, or submit\(\.\.\.\) it for a future"),
        ("map", "'map', which methods have that are registered with Dispatch.REQUEST"),
        ("submitt", r"'submitt'; did you mean 'submit'\?"),
        ("zzz", "'zzz'$"),
    ],
)
def test_what_a_method_of_a_group_lacks_says_what_there_is(ledger, name, hint):
    with pytest.raises(AttributeError, match=f"group method Ledger.tell has no attribute {hint}") as refused:
        getattr(ledger.tell, name)
    assert "Did you mean" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.backends("inprocess", "local")
def test_static_and_class_methods_are_bound_by_their_own_signature(make_group):
    class Tools(bm.Worker):
        @staticmethod
        def double(x):
            return x * 2

        @classmethod
        def named(cls, x):
            return cls.__name__, x

    group = make_group(1, Tools)
    assert group.execute_all_sync("double", 4) == [8]
    assert group.execute_all_sync("named", x=4) == [("Tools", 4)]
    with pytest.raises(
        bm.ArgumentError,
        match=r"Tools\.double\(\) got too many positional arguments; the signature is Tools\.double\(x\)",
    ):
        group.execute_all_sync("double", 4, 5)


def test_a_class_wrapped_by_ray_keeps_the_signatures_that_its_author_wrote(ray_cluster):
    class Wrapped(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def tell(self, x): ...

    ray_cluster.remote(Wrapped)
    with bm.ResourcePool([1], backend="inprocess") as pool:
        group = bm.WorkerGroup(pool, Wrapped)
        assert str(inspect.signature(group.tell)) == "(x)"
        with pytest.raises(bm.ArgumentError, match=r"Wrapped\.tell\(\) got .*'_ray_trace_ctx'; .* Wrapped\.tell\(x\)$"):
            group.tell(1, _ray_trace_ctx=None)
        with pytest.raises(
            bm.ArgumentError, match=r"Wrapped\.__init__\(\) got too many .*; .* Wrapped\.__init__\(\) -> 'None'$"
        ):
            bm.WorkerGroup(pool, Wrapped, 1)


# --- what goes wrong on the workers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        ("float", 0, ["float, which has no rows for Concat to join", "Gather() or Reduce('mean')"]),
        ("float on rank 1", 1, ["float, which has no rows for Concat to join", "Gather() or Reduce('mean')"]),
        ("other type on rank 1", 1, ["returned ndarray, but rank 0 returned list"]),
        ("shapes", 0, ["rank 0: ndarray of shape (2, 3), rank 1: ndarray of shape (2, 4)"]),
        ("keys", 0, ["['loss0'] (part 0) and ['loss1'] (part 1)"]),
        ("mixed dict", 0, ["'ids' has 1 rows, 'loss' is float without rows", "Gather() or Reduce('mean')"]),
        ("unequal dict", 0, ["'ids' has 1, 'labels' has 2", "Gather() or Reduce('mean')"]),
        ("lock", 0, ["and on rank 1", "the returned lock cannot be pickled"]),
        ("lock on rank 1", 1, ["the returned lock cannot be pickled"]),
        ("never leaves", 0, ["and on rank 1", "the returned NeverLeaves cannot be pickled: ValueError: is open"]),
        ("never arrives", 0, ["and on rank 1", "cannot be unpickled in the controller", "made by a newer version"]),
        ("leaves no words", 0, ["and on rank 1", "the returned LeavesNoWords cannot be pickled: ", "Mute: <"]),
        ("stops on arrival", 0, ["and on rank 1", "cannot be unpickled in the controller: SystemExit: on arrival"]),
        (
            "stops on leaving",
            0,
            ["and on rank 1", "the returned StopsOnLeaving cannot be pickled: test_bad_input.Stop: on leaving"],
        ),
    ],
)
def test_a_result_that_cannot_be_sent_or_joined_names_rank_and_type(ledger, what, rank, words):
    with pytest.raises(bm.CollectError) as caught:
        ledger.give(what)
    error = caught.value
    assert (error.method, error.rank, error.coordinates[rank]) == ("Ledger.give", rank, {"dp": rank})
    assert str(error).startswith(f"Ledger.give failed on rank {rank} (dp={rank}")
    assert [word for word in words if word not in str(error)] == []
    for _ in range(2):
        assert ledger.tell(1) == [(1, 0), (1, 0)]


def test_a_result_that_looks_like_ctrl_c_as_it_arrives_interrupts_its_own_call_alone(ledger):
    with pytest.raises(KeyboardInterrupt, match="on arrival"):
        ledger.give("interrupts on arrival")
    for _ in range(2):
        assert ledger.tell(1) == [(1, 0), (1, 0)]


def test_a_signal_handler_that_ends_the_program_while_a_result_arrives_is_not_taken_for_the_results_fault(ledger):
    def end(*_):
        if not has_come:
            has_come.append(True)
            sys.exit("told to end")

    has_come, before = [], signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(SystemExit, match="told to end"):
            ledger.give("signals on arrival")
        assert ledger.tell(1) == [(1, 0), (1, 0)]
        assert ledger.give("signals on arrival") == ["loaded", "loaded"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_result_that_cannot_be_reduced_names_every_type(ledger):
    with pytest.raises(bm.CollectError, match=r"Reduce\('sum'\) cannot reduce \(rank 0: int, rank 1: str\)") as caught:
        ledger.add_up()
    assert isinstance(caught.value.__cause__, TypeError)
    assert ledger.tell(1) == [(1, 0), (1, 0)]


def test_a_method_that_raises_on_one_rank_is_named_with_its_place_and_cause(ledger):
    with pytest.raises(bm.RemoteError) as caught:
        ledger.fail("the user's own", on=[1])
    error = caught.value
    assert (error.method, error.rank, list(error.failures)) == ("Ledger.fail", 1, [1])
    assert error.coordinates == {1: {"dp": 1}}
    assert type(error.__cause__) is OutOfLuck
    assert error.__cause__.args == (7, "cards")
    failure = error.failures[1]
    where = f"(dp=1, host {failure.host}, pid {failure.pid}, device cpu, group {ledger.name})"
    assert str(error).splitlines()[0] == f"Ledger.fail failed on rank 1 {where}: {failure.summary}"
    assert failure.summary.endswith("OutOfLuck: (7, 'cards')")
    assert "raise FAILURES[how]()" in str(error), "the remote traceback"
    assert ledger.fail("builtin", on=[]) == [0, 1]


def test_all_ranks_that_raise_are_in_failures(ledger):
    with pytest.raises(
        bm.RemoteError, match=r"Ledger\.fail failed on rank 0 .*, and on rank 1: KeyError: 'loss'"
    ) as caught:
        ledger.fail("builtin")
    assert list(caught.value.failures) == [0, 1]
    assert [type(failure.exception) for failure in caught.value.failures.values()] == [KeyError, KeyError]
    assert caught.value.coordinates == {0: {"dp": 0}, 1: {"dp": 1}}
    assert ledger.tell(1) == [(1, 0), (1, 0)]


@pytest.mark.parametrize(
    ("how", "cause", "words"),
    [
        ("SystemExit", SystemExit, "SystemExit: 3"),
        ("GeneratorExit", GeneratorExit, "GeneratorExit: gone"),
        ("BaseException", Stop, "Stop: at once"),
        ("cannot be pickled", type(None), "HoldsLock: held"),
        ("takes two", TakesTwo, "TakesTwo: stuck at layer 3"),
        ("cannot be printed", Mute, "Mute: <"),
        ("stops on arrival", type(None), "ErrorThatStopsOnArrival: poison"),
        ("stops on leaving", type(None), "ErrorThatStopsOnLeaving: poison"),
    ],
)
def test_whatever_a_method_raises_becomes_a_remote_error(ledger, how, cause, words):
    with pytest.raises(bm.RemoteError) as caught:
        ledger.fail(how)
    assert words in str(caught.value)
    assert type(caught.value.__cause__) is cause
    assert ledger.tell(1) == [(1, 0), (1, 0)]


@pytest.mark.backends("inprocess", "local")
def test_async_methods_may_raise_anything_too(make_group):
    class Async(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        async def fail(self, how):
            raise FAILURES[how]()

        @register(Dispatch.ONE_TO_ALL)
        async def tell(self, x):
            return x

    group = make_group(1, Async)
    for how in FAILURES:
        with pytest.raises(bm.RemoteError):
            group.fail(how)
        assert group.tell(1) == [1]


@pytest.mark.parametrize(
    ("argument", "cause", "words"),
    [(NeverArrives(), ValueError, "made by a newer version"), (StopsOnArrival(), SystemExit, "on arrival")],
    ids=["never arrives", "stops on arrival"],
)
def test_an_argument_that_cannot_be_unpickled_fails_on_its_rank_alone(ledger, argument, cause, words):
    before = ledger.execute_all_sync("calls")
    with pytest.raises(bm.RemoteError, match=rf"Ledger\.each failed on rank 1 .*{words}") as caught:
        ledger.each([0, argument])
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.__cause__, cause)
    assert ledger.execute_all_sync("calls") == [before[0] + 1, before[1]]
    assert ledger.tell(1) == [(1, 0), (1, 0)]


# --- groups -----------------------------------------------------------------------------------------------------


class Fragile(bm.Worker):
    def __init__(self, weights=None, *, breaks_on=(), after=None):
        if self.rank in breaks_on:
            while after and not after.exists():  # another rank is there, and will not be interrupted as it begins
                time.sleep(0.001)
            raise OutOfLuck(7, "no weights")
        if after:
            after.touch()

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        return self.rank


class HidesTwo(bm.Worker):
    @register()
    def close(self): ...

    @register()
    def workers(self): ...

    @register()
    def fine(self): ...


class HidesInside(bm.Worker):
    @register()
    def _pool(self): ...


class IsHidden(bm.Worker):
    @register()
    def device(self): ...

    @register()
    def rank(self): ...


class HoldsGlobalLock(bm.Worker):
    lock = threading.Lock()


class Awaits(bm.Worker):
    async def __init__(self): ...


def goes_by(protocol, **arguments):
    """A class with a method of this protocol, and rules for its argument ``x``."""

    class Mover(bm.Worker):
        @register(protocol, arguments=arguments)
        def move(self, x): ...

    return Mover


GROUPS = {
    "no worker class": (lambda pool: bm.WorkerGroup(pool, dict), bm.UsageError, ["bandmaster.Worker", "dict"]),
    "an instance": (
        lambda pool: bm.WorkerGroup(pool, Fragile.__new__(Fragile)),
        bm.UsageError,
        ["Fragile", "pass the class"],
    ),
    "no pool": (
        lambda pool: bm.WorkerGroup([2], Fragile),
        bm.UsageError,
        ["the first argument of WorkerGroup must be a ResourcePool, got list ([2])"],
    ),
    "pool and class the wrong way round": (
        lambda pool: bm.WorkerGroup(Fragile, pool),
        bm.UsageError,
        ["the first argument of WorkerGroup must be a ResourcePool, got type (<class "],
    ),
    "an async constructor": (
        lambda pool: bm.WorkerGroup(pool, Awaits),
        bm.UsageError,
        ["Awaits.__init__ is async", "nothing would await it", "async method"],
    ),
    **{
        f"{value!r} seconds for the constructors": (
            lambda pool, value=value: bm.WorkerGroup(pool, Fragile, start_timeout=value),
            bm.UsageError,
            ["start_timeout of WorkerGroup must be a non-negative number of seconds or None", f"got {value!r}"],
        )
        for value in ("a", -1, float("nan"), True)
    },
    "constructor arguments that do not fit": (
        lambda pool: bm.WorkerGroup(pool, Fragile, 1, 2, speed=3),
        bm.ArgumentError,
        ["Fragile.__init__(weights=None, *, breaks_on=(), after=None)"],
    ),
    "arguments for a constructor without any": (
        lambda pool: bm.WorkerGroup(pool, HoldsGlobalLock, 1),
        bm.ArgumentError,
        ["HoldsGlobalLock.__init__()"],
    ),
    "arguments in two places": (
        lambda pool: bm.WorkerGroup(pool, bm.ClassWithInitArgs(Fragile, 1), 2),
        bm.ArgumentError,
        ["ClassWithInitArgs"],
    ),
    "a constructor argument that cannot be pickled": (
        lambda pool: bm.WorkerGroup(pool, Fragile, weights=threading.Lock()),
        bm.ArgumentError,
        ["argument 'weights' of Fragile.__init__ (lock) cannot be pickled"],
    ),
    "a mesh of another size": (
        lambda pool: bm.WorkerGroup(pool, Fragile, mesh=Mesh(dp=2, tp=2)),
        bm.MeshError,
        ["Mesh(dp=2, tp=2) has 4 ranks", "has 2 slots", "Mesh(dp=2)"],
    ),
    "no mesh": (lambda pool: bm.WorkerGroup(pool, Fragile, mesh={"dp": 2}), bm.MeshError, ["Mesh(dp=2)", "{'dp': 2}"]),
    "a name that is no string": (
        lambda pool: bm.WorkerGroup(pool, Fragile, name_prefix=b"actor"),
        bm.UsageError,
        ["name_prefix of WorkerGroup must be a string", "got b'actor'"],
    ),
    "methods that hide the group's own": (
        lambda pool: bm.WorkerGroup(pool, HidesTwo),
        bm.UsageError,
        ["HidesTwo registers 'close', 'workers'", "rename"],
    ),
    "a method that hides what the group keeps": (
        lambda pool: bm.WorkerGroup(pool, HidesInside),
        bm.UsageError,
        ["HidesInside registers '_pool'", "rename"],
    ),
    "methods that the worker's attributes hide": (
        lambda pool: bm.WorkerGroup(pool, IsHidden),
        bm.UsageError,
        ["IsHidden registers 'device', 'rank'", "rename"],
    ),
    "a protocol that splits over an axis that the mesh does not have": (
        lambda pool: bm.WorkerGroup(pool, goes_by(TransferProtocol(Split("dp", "ep"), Concat("dp")))),
        bm.MeshError,
        [
            "Mover.move uses Split('dp', 'ep'), but Mesh(dp=2) has no axis 'ep', only 'dp'",
            "give the group another mesh=",
        ],
    ),
    "a protocol that collects along such an axis": (
        lambda pool: bm.WorkerGroup(pool, goes_by(TransferProtocol(Broadcast(), Gather(ep=-1)))),
        bm.MeshError,
        ["Mover.move uses Gather(ep=-1), but Mesh(dp=2) has no axis 'ep', only 'dp'", "give the group another mesh="],
    ),
    "such an axis for one argument": (
        lambda pool: bm.WorkerGroup(pool, goes_by(Dispatch.DP_PROTO, x=Split("ep"))),
        bm.MeshError,
        ["argument 'x' of Mover.move uses Split('ep'), but Mesh(dp=2) has no axis 'ep', only 'dp'"],
    ),
    "a coordinate outside its axis": (
        lambda pool: bm.WorkerGroup(pool, goes_by(TransferProtocol(Broadcast(), Gather(dp=5)))),
        bm.MeshError,
        ["Mover.move uses Gather(dp=5), but dp=5 is outside axis 'dp' of size 2 in Mesh(dp=2)"],
    ),
    "a coordinate outside an axis that counts as size 1": (
        lambda pool: bm.WorkerGroup(pool, goes_by(TransferProtocol(Broadcast(), Gather(tp=1)))),
        bm.MeshError,
        [
            "Mover.move uses Gather(tp=1), but tp=1 is outside axis 'tp', which counts as size 1: Mesh(dp=2) does",
        ],
    ),
    "axes that overlap": (
        lambda pool: bm.WorkerGroup(
            pool,
            goes_by(TransferProtocol(Split("tp", "gen_tp"), Concat("tp"))),
            mesh=Mesh(dp=1, tp=2).refine(gen_tp=1),
        ),
        bm.MeshError,
        ["Mover.move uses Split('tp', 'gen_tp'), but axes 'tp' and 'gen_tp'", "overlap"],
    ),
}


@pytest.mark.parametrize(("make", "error", "words"), GROUPS.values(), ids=GROUPS)
def test_a_bad_group_is_refused_before_anything_is_started(pool, ledger, make, error, words):
    with pytest.raises(error) as refused:
        make(pool)
    assert [word for word in words if word not in str(refused.value)] == []
    assert ledger.tell(1) == [(1, 0), (1, 0)], "the pool is as good as before"


@pytest.mark.backends("inprocess", "local")
def test_a_constructor_that_returns_a_value_fails_the_group(make_pool):
    class Returns(bm.Worker):
        def __init__(self):
            return 3

    with pytest.raises(bm.ConstructorError, match=r"Returns\.__init__\(\) should return None, not 'int'"):
        bm.WorkerGroup(make_pool([1]), Returns)


def test_a_class_that_cannot_be_pickled_is_named(pool):
    class Local(bm.Worker):
        lock = threading.Lock()

    with pytest.raises(bm.ArgumentError, match=r"class Local \(type\) cannot be pickled"):
        bm.WorkerGroup(pool, Local)


@pytest.mark.backends("inprocess", "local")
def test_a_constructor_that_raises_fails_the_group_and_gives_its_places_back(make_pool, tmp_path):
    pool = make_pool([2], max_colocate_count=1)
    with pytest.raises(bm.ConstructorError) as caught:
        bm.WorkerGroup(pool, Fragile, breaks_on=[1], after=tmp_path / "made")
    error = caught.value
    assert (error.method, error.rank, list(error.failures)) == ("Fragile.__init__", 1, [1])
    assert error.coordinates == {1: {"dp": 1}}
    assert type(error.__cause__) is OutOfLuck
    failure = error.failures[1]
    where = f"(dp=1, host {failure.host}, pid {failure.pid}, device cpu, group {error.group})"
    assert str(error).splitlines()[0] == f"Fragile.__init__ failed on rank 1 {where}: {failure.summary}"
    assert error.group.endswith("Fragile")
    assert 'raise OutOfLuck(7, "no weights")' in str(error), "the remote traceback"
    assert bm.WorkerGroup(pool, Fragile).where() == [0, 1]


@pytest.mark.backends("inprocess", "local")
def test_a_constructor_argument_that_cannot_be_unpickled_fails_the_group(make_pool):
    pool = make_pool([1], max_colocate_count=1)
    with pytest.raises(bm.ConstructorError, match=r"Fragile\.__init__ failed on rank 0 .*newer version") as caught:
        bm.WorkerGroup(pool, Fragile, NeverArrives())
    assert isinstance(caught.value.__cause__, ValueError)
    assert bm.WorkerGroup(pool, Fragile).where() == [0]


@pytest.mark.backends("inprocess", "local")
def test_more_groups_than_a_place_may_hold_are_refused_by_the_names_of_the_holders(make_pool):
    pool = make_pool([1], max_colocate_count=1)
    actor = bm.WorkerGroup(pool, Fragile, name_prefix="actor")
    with pytest.raises(bm.PlacementError) as refused:
        bm.WorkerGroup(pool, Fragile, name_prefix="critic")
    for words in ("no room for group 'criticFragile'", "1 groups of at most 1 (actorFragile)", "max_colocate_count"):
        assert words in str(refused.value)
    assert actor.where() == [0]
    actor.close()
    assert bm.WorkerGroup(pool, Fragile, name_prefix="critic").where() == [0]


@pytest.mark.backends("inprocess", "local")
def test_a_closed_group_says_so_however_it_is_called(make_pool):
    pool = make_pool([1])
    group = bm.WorkerGroup(pool, Fragile, name_prefix="actor")
    group.close()
    for call in (
        group.where,
        group.where.submit,
        lambda: group.execute_all_sync("where"),
        lambda: group.execute_all_async("where"),
        lambda: group.execute_rank_zero_sync("where"),
        lambda: group.workers,
    ):
        with pytest.raises(bm.ClosedError, match="group 'actorFragile' was closed; make a new WorkerGroup"):
            call()
    assert bm.WorkerGroup(pool, Fragile).where() == [0], "the pool is still open"


@pytest.mark.backends("inprocess", "local")
def test_what_is_closed_looks_closed(make_pool):
    pool = make_pool([2])
    part = bm.split_resource_pool(pool, 1)[0]
    group = bm.WorkerGroup(part, Fragile)
    looks = {thing: (repr(thing), thing._repr_html_()) for thing in (pool, part, group)}
    assert not any("closed" in look for seen in looks.values() for look in seen)
    group.close()
    assert repr(group) == looks[group][0].replace(">", ", closed>")
    assert "closed" in group._repr_html_()
    assert (repr(part), repr(pool)) == (looks[part][0], looks[pool][0])
    pool.close()
    for closed in (pool, part):
        assert repr(closed) == f"<closed {looks[closed][0]}>"
        assert "closed ResourcePool(" in closed._repr_html_()


def test_a_closed_pool_says_so_whatever_is_asked_of_it(make_pool):
    pool = make_pool([2])
    pool.close()
    for use in (
        lambda: bm.WorkerGroup(pool, Fragile),
        pool.reserve,
        pool.__enter__,
        lambda: bm.split_resource_pool(pool, 1),
        lambda: bm.merge_resource_pool(make_pool([1]), pool),
    ):
        with pytest.raises(bm.ClosedError, match=r"ResourcePool\(\[2\].* was closed; make a new pool"):
            use()


# --- pools ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [[], [0], [2, 0], [-1], "4", [2.5], ["2"], [True], 4, None], ids=repr)
def test_a_pool_of_no_sensible_size_is_refused(make_pool, nodes):
    with pytest.raises(
        bm.UsageError, match=r"process_on_nodes must be a list|every node must have an integer number of slots"
    ):
        make_pool(nodes)


@pytest.mark.parametrize(
    "options",
    [
        {"max_colocate_count": 0},
        {"max_colocate_count": 1.5},
        {"max_colocate_count": True},
        {"cpus_per_worker": -1},
        {"cpus_per_worker": "two"},
        {"cpus_per_worker": True},
        {"cpus_per_worker": float("nan")},
        {"placement_timeout": -1},
        {"placement_timeout": float("nan")},
        {"placement_timeout": None},
        {"placement_timeout": True},
        {"placement_timeout": float("nan")},
        {"name_prefix": 3},
        {"name_prefix": True},
        {"use_gpu": "yes"},
        {"use_gpu": 2},
    ],
    ids=repr,
)
def test_an_option_of_a_pool_that_makes_no_sense_is_refused(make_pool, options):
    ((name, value),) = options.items()
    with pytest.raises(bm.UsageError) as refused:
        make_pool([2], **options)
    assert name in str(refused.value)
    assert repr(value) in str(refused.value)


def test_values_in_other_places_than_in_verl_are_refused_by_name(pool):
    with pytest.raises(bm.UsageError, match=r"^detached must be True or False, got 0\.5; "):
        RayResourcePool([2], True, None, 1, 0.5)
    with pytest.raises(bm.UsageError, match=r"^bin_pack of RayWorkerGroup must be True or False, got 'mine'"):
        RayWorkerGroup(pool, Fragile, "mine")
    with pytest.raises(bm.UsageError, match=r"^name_prefix of RayWorkerGroup must be a string, or None .*, got True$"):
        RayWorkerGroup(pool, Fragile, True, True)


def test_an_unknown_backend_is_answered_with_the_known_ones():
    with pytest.raises(bm.UsageError, match=r"no backend is called 'mpi'; expected .*'inprocess'.*'ray'"):
        bm.ResourcePool([2], backend="mpi")


def test_pools_that_cannot_be_split_or_merged_so_are_refused(make_pool):
    pool = make_pool([2, 1])
    for size in (2, 0, [1, 1], [3, 0], "3", 1.5):
        with pytest.raises(bm.UsageError):
            bm.split_resource_pool(pool, size)
    with pytest.raises(bm.UsageError, match="cannot split 3 slots into parts of 2"):
        bm.split_resource_pool(pool, 2)
    with pytest.raises(bm.UsageError, match=r"cannot split 3 slots into \[1, 1\], which are 2"):
        bm.split_resource_pool(pool, [1, 1])
    with pytest.raises(bm.UsageError, match="two pools or more, got 1"):
        bm.merge_resource_pool(pool)
    with pytest.raises(bm.UsageError, match="share slots"):
        bm.merge_resource_pool(pool, bm.split_resource_pool(pool, 1)[0])
    with pytest.raises(bm.UsageError, match="cpus_per_worker must be equal, got 1 and 2"):
        bm.merge_resource_pool(pool, make_pool([1], cpus_per_worker=2))
    with pytest.raises(bm.UsageError, match=r"takes ResourcePools, got int \(3\)"):
        bm.merge_resource_pool(pool, 3)
    with pytest.raises(bm.UsageError, match=r"takes ResourcePools, got int \(3\)"):
        bm.split_resource_pool(3, 1)


def test_more_gpus_than_there_are_is_an_error_at_once(make_pool):
    pool = make_pool([1000], use_gpu=True, name_prefix="big")
    with pytest.raises(bm.PlacementError, match=r"pool 'big' cannot place 1000 GPU workers as \[1000\]"):
        bm.WorkerGroup(pool, Fragile)
    with pytest.raises(bm.PlacementError), pool:
        pass


def test_a_machine_without_gpus_says_how_to_do_without(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(bm.PlacementError, match=r"0 GPUs.*no node has a GPU; make the pool with use_gpu=False"):
        bm.WorkerGroup(bm.ResourcePool([1], backend="inprocess", use_gpu=True), Fragile)


def test_more_gpus_than_ray_has_says_what_every_node_has(ray_cluster):
    with pytest.raises(bm.PlacementError) as refused:
        bm.ResourcePool([9], backend="ray", use_gpu=True).reserve()
    address = ray_cluster.util.get_node_ip_address()
    assert f"node {address} has 8 GPUs and 16 CPUs, room for 8; ask for [8]" in str(refused.value)


# --- register ---------------------------------------------------------------------------------------------------


def mark(*args, **kwargs):
    @register(*args, **kwargs)
    def step(self, batch): ...


def without_parentheses():
    @register
    def step(self): ...


def above_a_property():
    @register()
    @property
    def step(self): ...


CUSTOM = {"dispatch_fn": len, "collect_fn": len}
REGISTRATIONS = {
    "an unknown name": (
        lambda: mark("4D_PROTO"),
        ["'4D_PROTO'", "ONE_TO_ALL, 3D_PROTO, 3D_ALL_MICRO_DP, 3D_PP_ONLY, DP_PROTO, ALL_TO_ALL"],
    ),
    "no parentheses": (without_parentheses, ["@register needs parentheses", "above step"]),
    "no function": (above_a_property, ["@register must decorate a function", "property"]),
    "a partial": (
        lambda: register(Dispatch.ONE_TO_ALL)(partial(print, end="")),
        ["@register must decorate a function, got functools.partial(", "write it directly above the def"],
    ),
    "a partial of a request": (
        lambda: register(Dispatch.REQUEST)(partial(print, end="")),
        ["@register must decorate a function, got functools.partial("],
    ),
    "no protocol": (lambda: mark(3), ["a transfer protocol must be a member of bandmaster.Dispatch", "got 3"]),
    "no execute mode": (lambda: mark(execute_mode="all"), ["Execute.ALL or Execute.RANK_ZERO", "'all'"]),
    "a mesh for a custom protocol": (lambda: mark(CUSTOM, mesh="train"), ["use no axes of a mesh; remove mesh="]),
    "a mesh for rank zero": (
        lambda: mark(execute_mode=Execute.RANK_ZERO, mesh="train"),
        ["use no axes of a mesh; remove mesh="],
    ),
    "arguments for rank zero": (
        lambda: mark(execute_mode=Execute.RANK_ZERO, arguments={"batch": Broadcast()}),
        ["a method of rank 0 alone gets its arguments unsplit", "remove execute_mode= or arguments="],
    ),
    "a mesh instead of its name": (lambda: mark(mesh=Mesh(dp=2)), ["must be the name of one of the group's meshes"]),
    "half a custom protocol": (lambda: mark({"dispatch_fn": len}), ["'dispatch_fn' and 'collect_fn'"]),
    "a custom protocol of no functions": (
        lambda: mark({**CUSTOM, "collect_fn": 7}),
        ["collect_fn", "must be callable, got 7"],
    ),
    "a custom protocol on rank zero": (lambda: mark(CUSTOM, Execute.RANK_ZERO), ["remove execute_mode"]),
    "a custom protocol and arguments": (lambda: mark(CUSTOM, arguments={"batch": Broadcast()}), ["arguments="]),
    "an argument that the method has not": (
        lambda: mark(arguments={"table": Broadcast()}),
        ["@register(arguments=...) names 'table', but mark.<locals>.step has only the parameters ['batch']"],
    ),
    "a transfer that is none": (
        lambda: mark(arguments={"batch": "dp"}),
        ["'batch' must be a Split, Broadcast or PerRank, got 'dp'"],
    ),
    "arguments that are no dict": (lambda: mark(arguments=["batch"]), ["arguments must be a dict", "got ['batch']"]),
    "padding that would come back": (
        lambda: mark(TransferProtocol(PADDED, Gather())),
        ["Split('dp', pad=True) adds padding, but Gather() cannot remove it", "collect with Concat"],
    ),
    "padding of one argument that would come back": (
        lambda: mark(Dispatch.ONE_TO_ALL, arguments={"batch": PADDED}),
        ["Split('dp', pad=True) adds padding, but Gather() cannot remove it", "collect with Concat"],
    ),
    "a split of nothing": (lambda: Split(), ["Split requires at least one axis"]),
    "a split of a number": (lambda: Split(2), ["must be strings, got 2"]),
    "an axis twice": (lambda: Split("dp", "dp"), ["names axis 'dp' twice"]),
    "an axis joined and fixed": (lambda: Concat("dp", dp=0), ["joins over axis 'dp'", "remove one of them"]),
    "a coordinate that is no number": (lambda: Gather(dp="last"), ["the coordinate dp", "an integer, got 'last'"]),
    "an unknown reduction": (lambda: Reduce("median"), ["'median'", "'sum', 'mean', 'min', 'max' or a function"]),
    "half a protocol": (lambda: TransferProtocol(Split("dp"), "list"), ["'list'", "Concat, Gather, Reduce or Only"]),
}


@pytest.mark.parametrize(("use", "words"), REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_a_protocol_that_makes_no_sense_is_refused_where_it_is_written(use, words):
    with pytest.raises(bm.ProtocolError) as refused:
        use()
    assert [word for word in words if word not in str(refused.value)] == []


def test_register_returns_the_method_unchanged():
    def step(self, batch): ...

    assert register("DP_PROTO")(step) is step
    assert str(inspect.signature(step)) == "(self, batch)"


@pytest.mark.backends("inprocess")
def test_reserved_names_are_refused_with_their_list_which_the_docs_have(make_pool):
    pool = make_pool([1])
    own = {*dir(bm.WorkerGroup), *bm.Worker.__annotations__}
    reserved = sorted(name for name in own if not name.startswith("_"))
    assert {"turn", "calls", "put", "name", "rank"} <= set(reserved)
    for name in reserved:
        cls = type("Hides", (bm.Worker,), {name: register(Dispatch.ONE_TO_ALL)(lambda self: 1)})
        with pytest.raises(bm.UsageError, match=f"Hides registers '{name}'.*rename the method") as refused:
            bm.WorkerGroup(pool, cls)
        assert ", ".join(reserved) in str(refused.value)
    page = (Path(__file__).parents[1] / "docs/concepts/protocols.md").read_text()
    assert ", ".join(f"`{name}`" for name in reserved) in " ".join(page.split())


def test_a_registered_method_that_an_attribute_of_every_worker_would_hide(make_pool):
    class Hidden(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def device(self):
            return "never"

    with pytest.raises(bm.UsageError, match=r"Hidden registers 'device'.*rename the method"):
        bm.WorkerGroup(make_pool([1]), Hidden)
