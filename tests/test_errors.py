"""The tree of errors: drawn as it is, honest builtins at its leaves, and able to travel between processes."""

import builtins
import pickle
import re
import subprocess
import sys
import threading

import pytest

from bandmaster import errors
from bandmaster.errors import (
    STILL_RUNS,
    ArgumentError,
    BandmasterError,
    CallTimeout,
    CollectError,
    ConstructorError,
    MeshError,
    RemoteError,
    UsageError,
    WorkerDied,
)
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.plan.mesh import Mesh

PUBLIC = {name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, BandmasterError)}
PUBLIC = sorted(name for name in PUBLIC if not name.startswith("_"))


def drawn_tree():
    """``(name, parent, builtin)`` of every line of the drawing in the docstring."""
    path, tree = [], []
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+)(.*)", line)
        if match is None:
            continue
        branches, name, rest = match.groups()
        del path[len(branches) // 4 :]
        builtin = re.search(r"\((\w+Error)\)", rest)
        tree.append((name, path[-1] if path else "Exception", builtin.group(1) if builtin else None))
        path.append(name)
    return tree


def test_the_drawing_shows_exactly_the_public_classes():
    assert sorted(name for name, _, _ in drawn_tree()) == PUBLIC


@pytest.mark.parametrize(("name", "parent", "builtin"), drawn_tree(), ids=str)
def test_every_error_stands_where_it_is_drawn(name, parent, builtin):
    cls = getattr(errors, name)
    leaves = {name for name, _, _ in drawn_tree()} - {parent for _, parent, _ in drawn_tree()}

    assert issubclass(cls, getattr(errors, parent, Exception))
    assert builtin is None or issubclass(cls, getattr(builtins, builtin))
    assert name not in leaves or issubclass(cls, (TypeError, ValueError, RuntimeError, OSError))


RANK_ERRORS = [RemoteError, ConstructorError, CollectError, WorkerDied]
PLAIN_ERRORS = {getattr(errors, name) for name in PUBLIC} - {*RANK_ERRORS, CallTimeout}


@pytest.mark.parametrize("cls", sorted(PLAIN_ERRORS, key=str))
def test_errors_survive_a_pickle(cls):
    error = pickle.loads(pickle.dumps(cls("what was asked; the next step")))

    assert type(error) is cls
    assert str(error) == "what was asked; the next step"


def raised(error):
    """The error with a traceback, as if a method had raised it."""
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("cls", RANK_ERRORS)
def test_errors_of_ranks_survive_a_pickle_with_all_they_know(cls):
    failures = {3: Failure.of(raised(KeyError("b"))), 1: Failure.of(raised(ValueError("a")))}
    before = cls("Actor.step", failures, {1: {"dp": 0, "tp": 1}, 3: {"dp": 1, "tp": 1}})

    error = pickle.loads(pickle.dumps(before))

    assert type(error) is cls
    assert str(error) == str(before)
    assert (error.method, error.rank, list(error.failures)) == ("Actor.step", 1, [1, 3])
    assert error.coordinates == {1: {"dp": 0, "tp": 1}, 3: {"dp": 1, "tp": 1}}
    assert [repr(failure.exception) for failure in error.failures.values()] == ["ValueError('a')", "KeyError('b')"]
    assert repr(error.__cause__) == "ValueError('a')"


def test_a_timeout_survives_a_pickle():
    error = pickle.loads(pickle.dumps(CallTimeout("Actor.step", (0, 2), 1.5)))

    assert (error.method, error.missing) == ("Actor.step", (0, 2))
    assert str(error) == (
        "Actor.step got no reply from rank 0, 2 within 1.5 s; the call still runs: wait again with "
        "error.future.result(), or cancel it with error.future.cancel()"
    )


@pytest.mark.parametrize(
    ("why", "what_next", "text"),
    [
        ("", STILL_RUNS, "; it was cancelled: make it again"),
        (
            "B.use takes its rows: ",
            "wait again with error.future.result()",
            "; B.use takes its rows: it was cancelled:",
        ),
        ("", "each replica runs 2 requests; give it more", "; give it more; it was cancelled: make it again"),
    ],
)
def test_a_timeout_that_has_cancelled_says_so_and_not_to_wait_again(why, what_next, text):
    error = CallTimeout("Actor.step", (0,), 1.5, what_next=what_next, why=why)
    error.has_cancelled()
    assert text in str(error) and "wait again" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("cls", "verb", "next_step"),
    [
        (RemoteError, "failed", ""),
        (ConstructorError, "failed", ""),
        (CollectError, "failed", ""),
        (WorkerDied, "lost its process", "\ncall restart() on the group, or replace(rank) if its class supports that"),
    ],
)
def test_the_message_says_what_where_and_why(cls, verb, next_step):
    died = Failure(FailureKind.DIED, "killed by SIGKILL", host="node-a", pid=42)

    assert str(cls("Actor.step", {2: died, 5: died}, {2: {"dp": 1, "tp": 0}})) == (
        f"Actor.step {verb} on rank 2 (dp=1, tp=0, host node-a, pid 42), and on rank 5: killed by SIGKILL{next_step}"
    )
    assert str(cls("Actor.step", {0: Failure(FailureKind.DIED, "gone")})) == f"Actor.step {verb} on rank 0: gone"


def test_the_message_ends_with_the_remote_traceback():
    failure = Failure.of(raised(ValueError("too long")))
    text = str(RemoteError("Actor.step", {0: failure}))

    assert "on rank 0 (host " in text
    assert "): ValueError: too long\n--- on rank 0 ---\nTraceback (most recent call last):\n" in text
    assert text.endswith("raise error\nValueError: too long")


def test_the_message_says_the_lines_of_an_exception_once():
    first, other = (Failure.of(raised(ValueError(f"{name}\nfield required\n"))) for name in "ab")
    text = str(RemoteError("Actor.step", {2: first, 3: other, 0: other, 1: first}))

    assert text.startswith("Actor.step failed on rank 0 (host ")
    assert "), and on rank 1, 2, 3: ValueError: b\n--- on rank 0 ---\n" in text
    assert text.count("field required") == 1
    assert [line.rpartition(": ")[2] for line in text.splitlines()[-3:]] == ["a", "a", "b"]


def test_who_is_to_blame_can_be_told_by_the_family():
    assert issubclass(ArgumentError, UsageError)
    assert not issubclass(RemoteError, UsageError)
    assert not issubclass(WorkerDied, RemoteError)
    assert issubclass(ConstructorError, BandmasterError)


# --- failures: what a worker says of an exception ---------------------------------------------------------------


class Demanding(Exception):
    """The usual way of writing an exception with two arguments, which unpickling would call with one."""

    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")
        self.code = code


class Unloadable(Exception):
    """Pickles, and cannot be unpickled."""

    def __reduce__(self):
        return Demanding, ("one",)


class Reduced(Exception):
    """Has a way of its own to be pickled."""

    def __reduce_ex__(self, protocol):
        return Reduced, ("without its lock",)


class Sealed(Exception):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__("sealed")
        self.frame = sys._getframe()


class NotAnError(Exception):
    """Unpickles as something else."""

    def __reduce__(self):
        return str, ("no error",)


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (Unloadable("x"), "Unloadable: x"),
        (Sealed(), "Sealed: sealed"),
        (NotAnError("x"), "NotAnError: x"),
    ],
)
def test_a_failure_survives_where_its_exception_cannot(error, summary):
    failure = pickle.loads(pickle.dumps(Failure.of(raised(error))))

    assert failure.exception is None
    assert failure.summary.endswith(summary)
    assert "raise error" in failure.traceback
    assert str(pickle.loads(pickle.dumps(RemoteError("Actor.step", {0: failure})))).startswith("Actor.step failed on")


def test_an_exception_of_a_local_class_travels_with_its_attributes():
    class Local(Exception):
        pass

    error = Local("x")
    error.rows = [1, 2]
    failure = pickle.loads(pickle.dumps(Failure.of(raised(error), FailureKind.RESULT)))

    assert failure.exception.rows == [1, 2]
    assert failure.kind is FailureKind.RESULT


RAISED = """if True:
    import pickle, sys
    from bandmaster.errors.failure import Failure
    class Sample:
        __slots__ = ("text",)
    sys.stdout.buffer.write(pickle.dumps(Failure.of(KeyError(Sample()))))
"""


def test_what_an_exception_holds_keeps_its_slots():
    done = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, timeout=60)
    assert not hasattr(pickle.loads(done.stdout).exception.args[0], "__dict__")


def test_an_exception_whose_constructor_takes_other_arguments_travels():
    several = ValueError(Demanding(7, "no"), Demanding(8, "nor this"))
    failures = [Failure.of(raised(error)) for error in (Demanding(7, "no"), several, Reduced(threading.Lock()))]
    one, inner, reduced = (failure.exception for failure in pickle.loads(pickle.dumps(failures)))

    assert (type(one), str(one), one.code) == (Demanding, "7: no", 7)
    assert str(reduced) == "without its lock"
    assert [error.code for error in inner.args] == [7, 8]


@pytest.mark.parametrize("full", ["0", "1"])
def test_a_failure_leaves_out_the_frames_inside_the_library_of_errors_that_it_raises_in_a_method(monkeypatch, full):
    monkeypatch.setenv("BANDMASTER_FULL_TRACEBACKS", full)

    def method():
        return Mesh(dp=2).coordinates(5)

    with pytest.raises(MeshError) as caught:
        method()
    text = Failure.of(caught.value).traceback

    assert "return Mesh(dp=2).coordinates(5)" in text
    assert ("/bandmaster/plan/" in text) == (full == "1")


def test_a_failure_shows_what_the_error_was_caused_by():
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        failure = Failure.of(error)

    assert "KeyError: 'inner'\n\nThe above exception was the direct cause" in failure.traceback
    assert failure.summary == "ValueError: outer"


def test_leaving_the_program_is_a_failure_too():
    failure = pickle.loads(pickle.dumps(Failure.of(raised(SystemExit(3)))))

    assert failure.exception.code == 3
    assert failure.summary == "SystemExit: 3"
