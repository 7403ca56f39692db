"""The code beside the user's object in a worker: what features may hook into it."""

import pytest

import bandmaster as bm
from bandmaster.codec import decode, encode
from bandmaster.contract import CONSTRUCT, RUN, Reply
from bandmaster.errors.failure import Failure
from bandmaster.worker import WorkerContext
from bandmaster.worker_process.executor import Executor


class Adder(bm.Worker):
    def add(self, a, b=0):
        return a + b

    async def add_later(self, a, b=0):
        return a + b

    def fail(self, a):
        raise ValueError(a)


@pytest.fixture
def executor():
    mesh = bm.Mesh(dp=1)
    made = Executor()
    made.prepare(WorkerContext(0, 1, 0, 1, 0, "cpu", mesh, {}))
    assert made.call(CONSTRUCT, Reply.DROP, [encode((Adder, (), {}))]) is None
    yield made
    made.close()


def call(executor, method, *items):
    outcome = executor.call(method, Reply.RETURN, [encode(items)])
    return outcome if outcome is None or isinstance(outcome, Failure) else decode(outcome)


@pytest.mark.parametrize("method", ["add", "add_later"])
def test_hooks_are_called_before_and_after_a_method(executor, method):
    seen = []
    executor.before.append(lambda worker, *rest: seen.append(("before", worker, *rest)))
    executor.after.append(lambda worker, *rest: seen.append(("after", worker, *rest)))
    assert call(executor, method, ("b", 2), (0, 1)) == 3
    worker = executor.worker
    assert seen == [("before", worker, method, [1], {"b": 2}), ("after", worker, method, [1], {"b": 2})]


def test_a_hook_may_take_away_a_keyword_that_is_meant_for_it(executor):
    taken = []
    executor.before.append(lambda worker, method, args, kwargs: taken.append(kwargs.pop("b", None)))
    assert call(executor, "add", ("b", 2), (0, 1)) == 1
    assert taken == [2]


def test_a_hook_that_raises_fails_the_call_and_a_method_that_raises_has_no_hook_after_it(executor):
    seen = []
    executor.after.append(lambda *_: seen.append("after"))
    assert call(executor, "fail", (0, "why")).summary == "ValueError: why"
    assert seen == []
    executor.before.append(lambda *_: 1 / 0)
    assert isinstance(call(executor, "add", (0, 1)), Failure)


def test_a_function_may_be_run_with_the_executor(executor):
    assert (
        call(executor, RUN, (0, Executor.prepare), (1, WorkerContext(0, 1, 0, 1, 0, "cuda:7", bm.Mesh(dp=1), {})))
        is None
    )
    assert executor.device == "cuda:7"
