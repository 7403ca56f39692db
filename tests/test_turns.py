"""Groups that share slots take turns on them: hooks, mutual exclusion, and errors instead of deadlocks."""

import asyncio
import contextlib
import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from ctrl_c import pressed, pressed_when
from ends import until
from hypothesis import given, settings
from hypothesis import strategies as st

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.turns.turns import waits

DEADLINE_S = 30


class Plain(bm.Worker):
    """It has no hooks."""

    def __init__(self, name="plain", log=None):
        self.name, self.log = name, log

    def note(self, what):
        if self.log is not None:
            with open(self.log, "a") as file:  # one write per line, which the kernel does not mix with others
                file.write(f"{self.name}.{self.rank} {what}\n")

    @register(Dispatch.DP_PROTO)
    def run(self, rows):
        self.note("runs")
        return [row + 1 for row in rows]

    @register(Dispatch.ONE_TO_ALL)
    def wait_for(self, gate, what="waited"):
        while not os.path.exists(gate):
            time.sleep(0.002)  # polling for a file of the test
        self.note(what)

    @register(Dispatch.REQUEST)
    def ask(self, row):
        return row

    @register(Dispatch.REQUEST)
    async def parts(self, n):
        for part in range(n):
            yield part

    @register(Dispatch.REQUEST, concurrency=4)
    async def hold(self, gate):
        self.note("begins")
        while not os.path.exists(gate):
            await asyncio.sleep(0.002)  # polling for a file of the test
        return "held"

    @register(Dispatch.REQUEST)
    def each_after(self, gate, row):
        self.wait_for(gate, "made a row")
        return row

    @register(Dispatch.DP_PROTO)
    def rows_after(self, gate, rows):
        self.wait_for(gate, "made rows")
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def count(self, n, gate=None):
        try:
            if gate is not None:
                self.note("begins")
                self.wait_for(gate)
            yield from range(n)
        finally:
            self.note("closed")


class Model(Plain):
    """It has hooks, which can be told to go wrong."""

    fails_in = ""
    dies_in = ""

    def on_yield(self):
        self._hook("on_yield")

    def on_resume(self):
        self._hook("on_resume")

    def _hook(self, name):
        if self.fails_in == name:
            raise MemoryError(f"no room in {name}")
        if self.dies_in == name and self.rank == 0:
            os._exit(3)
        while self.fails_in == f"slow {name}" and not os.path.exists(self.gate):
            time.sleep(0.002)
        self.note(name)

    def pid(self):
        return os.getpid()

    def set(self, **attributes):
        vars(self).update(attributes)

    def on_replace(self, rank, state):
        self.note(f"replaced {rank}")

    def on_restart(self, state):
        self.note("restarted")


class Agent(bm.Worker):
    """It asks a group that it was given."""

    def __init__(self, group):
        self.group = group

    @register(Dispatch.ONE_TO_ALL)
    def ask(self, *args):
        return self.group.hold(*args).result()

    @register(Dispatch.ONE_TO_ALL)
    def read(self, n):
        return list(self.group.parts.stream(n))


class Log:
    """What has happened, from all processes."""

    def __init__(self, path):
        self.path = path
        self.clear()

    def clear(self):
        self.path.write_text("")

    def all(self):
        return self.path.read_text().splitlines()

    def of_rank_0(self):
        return [line.replace(".0", "") for line in self.all() if ".0 " in line]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return Log(tmp_path_factory.mktemp("turns") / "log")


@pytest.fixture(scope="module")
def pool(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield pool


@pytest.fixture(scope="module")
def both(pool, log):
    return tuple(bm.WorkerGroup(pool, Model, name, str(log.path), name_prefix=f"{name}-") for name in ("a", "c"))


@pytest.fixture
def actor(both, log):
    with both[0].turn():
        log.clear()
    return both[0]


@pytest.fixture
def critic(both):
    return both[1]


# --- the hooks ---


def test_a_group_yields_when_another_takes_its_turn(actor, critic, log):
    with actor.turn():
        assert actor.run([1, 2]) == [2, 3]
    with actor.turn():
        pass
    assert log.of_rank_0() == ["a runs"], "turn after turn moves nothing"
    with critic.turn():
        assert critic.run([1, 2, 3]) == [2, 3, 4]
    with actor.turn():
        pass
    assert log.of_rank_0() == ["a runs", "a on_yield", "c on_resume", "c runs", "c on_yield", "a on_resume"]
    assert sorted(log.all()).count("a.1 on_yield") == 1, "every rank yields"


@pytest.mark.backends("inprocess", "local")
def test_constructing_a_group_with_hooks_is_a_turn(make_pool, tmp_path):
    log, pool = Log(tmp_path / "log"), make_pool([1])
    actor = bm.WorkerGroup(pool, Model, "actor", str(log.path))
    assert actor.run([1]) == [2], "nobody else needs its slot yet"
    critic = bm.WorkerGroup(pool, Model, "critic", str(log.path))
    assert log.of_rank_0() == ["actor runs", "actor on_yield"], "the actor has made room"
    plain = bm.WorkerGroup(pool, Plain)
    assert log.of_rank_0() == ["actor runs", "actor on_yield"], "a group that takes no turns does not interfere"
    assert critic.run([1]) == plain.run([1]) == [2]
    with pytest.raises(bm.UsageError, match="has yielded its slots"):
        actor.run([1])
    with critic.turn(), pytest.raises(bm.UsageError, match=f"this thread has the turn of group '{critic.name}'"):
        bm.WorkerGroup(pool, Model)
    assert "yielded" in repr(actor)


@pytest.mark.backends("inprocess", "local")
def test_groups_with_hooks_that_threads_construct_at_the_same_time_wait_for_each_other(make_pool, tmp_path):
    class Slow(Model):
        def __init__(self, gate):
            super().__init__()
            self.wait_for(gate)

    pool, gate = make_pool([1]), tmp_path / "gate"
    with ThreadPoolExecutor(3) as threads:
        made = [threads.submit(bm.WorkerGroup, pool, Slow, str(gate)) for _ in range(3)]
        try:
            until(lambda: len(waits()) == 2)  # the rival of either is not constructed yet
        finally:
            gate.touch()
        for group in [one.result(DEADLINE_S) for one in made]:
            with group.turn():
                assert group.run([1]) == [2]


@pytest.mark.backends("inprocess")
def test_hooks_take_no_arguments(make_group):
    class Wrong(bm.Worker):
        def on_yield(self, level):
            pass

    with pytest.raises(bm.ArgumentError, match=r"Wrong\.on_yield.*level"):
        make_group(1, Wrong)


@pytest.mark.backends("inprocess", "local")
def test_hooks_may_be_async_and_one_is_enough(make_pool, tmp_path):
    class Async(Plain):
        async def on_yield(self):
            self.note("on_yield")

    class Back(Plain):
        def on_resume(self):
            self.note("on_resume")

    log, pool = Log(tmp_path / "log"), make_pool([1])
    one, other = (bm.WorkerGroup(pool, cls, "x", str(log.path)) for cls in (Async, Back))
    for _ in range(2):
        with one.turn(), pytest.raises(bm.UsageError):
            other.run([1])
        with other.turn():
            assert other.run([1]) == [2]
    assert log.of_rank_0() == ["x on_yield", *["x on_yield", "x on_resume", "x runs"] * 2]


# --- mutual exclusion ---


def test_calls_are_refused_outside_of_the_turn(actor, critic, log):
    with actor.turn():
        log.clear()
        for call in (
            lambda: critic.run([1, 2]),
            lambda: critic.run.submit([1, 2]),
            lambda: critic.ask.map([1, 2]),
            lambda: critic.ask(1),
            lambda: critic.count.stream(3),
            lambda: list(critic.run.stream([1, 2])),
            lambda: critic.execute_all_sync("set"),
            lambda: critic.execute_rank_zero_async("set"),
        ):
            with pytest.raises(bm.UsageError, match=f"group '{actor.name}' has its turn.*'{critic.name}'.*turn()"):
                call()
        assert not log.all(), "nothing was sent"
        actor.run([1])
    with pytest.raises(bm.UsageError, match=f"group '{critic.name}' has yielded.*with group.turn()"):
        critic.run([1, 2])
    assert actor.run([1]) == [2], "it is still resident"


@pytest.mark.backends("inprocess")
def test_groups_that_never_take_turns_are_not_checked(actor, pool):
    plain = bm.WorkerGroup(pool, Plain)
    with actor.turn():
        assert plain.run([1]) == [2]
        with pytest.raises(bm.UsageError, match="this thread has the turn of group"), plain.turn():
            pass
        with pytest.raises(bm.UsageError, match="has its turn"):
            plain.run([1])
    assert plain.run([1]) == [2], "without hooks it has nothing to resume"
    plain.close()


@pytest.mark.backends("inprocess", "local")
def test_the_turn_ends_with_an_exception(actor, critic):
    with pytest.raises(KeyError), actor.turn():
        raise KeyError
    with critic.turn(timeout=DEADLINE_S):
        assert critic.run([1]) == [2]


@pytest.mark.backends("inprocess")
def test_ctrl_c_as_a_turn_begins_leaves_it_to_others(actor, critic):
    kept = []
    for n in range(1, 2000):
        turn = actor.turn()
        was_pressed = pressed(turn.__enter__, n)
        if not was_pressed:
            turn.__exit__()
            break
        try:
            with critic.turn():
                assert critic.run([1]) == [2]
        except bm.UsageError:  # this thread has the turn
            kept.append(n)
            turn.__exit__()
            with critic.turn():
                pass
    assert kept == [n - 1], "when it has begun, where a with statement takes no notice of Ctrl-C"


@pytest.mark.backends("inprocess")
def test_ctrl_c_as_a_task_asks_for_a_turn_leaves_it_to_others(actor, critic):
    for n in range(1, 2000):
        turn, loop = actor.turn(), asyncio.new_event_loop()
        task = loop.create_task(turn.__aenter__())
        was_pressed = pressed(lambda loop=loop, task=task: loop.run_until_complete(task), n)
        if was_pressed and task.cancel():  # as `asyncio.run` does
            loop.run_until_complete(asyncio.wait([task]))
        loop.close()
        if not was_pressed:
            turn.__exit__()
            break
        with critic.turn(timeout=DEADLINE_S):
            assert critic.run([1]) == [2]
    assert 3 < n < 1999


@pytest.mark.backends("inprocess")
def test_a_turn_is_left_to_others_if_the_event_loop_of_the_task_that_waits_for_it_was_closed(actor, critic):
    loop = asyncio.new_event_loop()
    with critic.turn():
        task = loop.create_task(actor.turn().__aenter__())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    with critic.turn(timeout=DEADLINE_S):
        assert critic.run([1]) == [2]
    assert not task.done()


@pytest.mark.backends("inprocess", "local")
def test_ctrl_c_as_a_turn_waits_for_the_map_of_another_thread_leaves_that_map_alone(actor, critic):
    rows = list(range(12))
    with ThreadPoolExecutor(1) as threads:
        for n in range(1, 2000):
            with actor.turn():
                mapped = actor.ask.map(rows, in_flight=2)
            whole = threads.submit(mapped.result, DEADLINE_S)
            turn = critic.turn()
            was_pressed = pressed(turn.__enter__, n)
            assert whole.result(DEADLINE_S) == rows
            with contextlib.suppress(bm.UsageError):  # Ctrl-C came first
                turn.__exit__()
            if not was_pressed:
                break
    assert 20 < n < 1999


@pytest.mark.backends("inprocess")
def test_a_turn_begins_though_ctrl_c_has_come_as_a_call_was_sent(actor, critic):
    for n in range(1, 2000):
        with actor.turn():
            was_pressed = pressed(lambda: actor.run([1]), n)
        with critic.turn(timeout=DEADLINE_S):
            assert critic.run([1]) == [2]
        if not was_pressed:
            break
    assert 5 < n < 1999


@pytest.mark.backends("inprocess")
def test_a_turn_begins_though_ctrl_c_has_come_as_the_end_of_a_call_was_told(actor, critic):
    for n in range(1, 100):
        left = n

        def is_now(frame, kind, _):
            nonlocal left
            left -= kind == "call" and frame.f_code is threading.Condition.__enter__.__code__
            return left == 0

        with actor.turn(), contextlib.suppress(KeyboardInterrupt), pressed_when(is_now):
            actor.run([1])
        with critic.turn(timeout=DEADLINE_S):
            assert critic.run([1]) == [2]
        if left > 0:
            break
    assert 3 < n < 99


@pytest.mark.backends("inprocess", "local")
def test_a_turn_can_be_nested_in_itself_but_not_in_that_of_a_rival(actor, critic):
    with actor.turn():
        with actor.turn():
            pass
        assert actor.run([1]) == [2], "the outer one goes on"
        with pytest.raises(
            bm.UsageError, match=f"'{critic.name}' cannot.* this thread has the turn of .*'{actor.name}'"
        ):
            critic.turn().__enter__()
        assert actor.run([1]) == [2]
    with critic.turn():
        pass


def test_threads_exclude_each_other(actor, critic, log):
    inside, n_inside = set(), []

    def use(group):
        for _ in range(5):
            with group.turn(timeout=DEADLINE_S):
                inside.add(group.name)
                n_inside.append(len(inside))
                assert group.run([1, 2]) == [2, 3]
                inside.remove(group.name)

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(use, group) for group in (actor, critic)]:
            future.result(DEADLINE_S)
    assert set(n_inside) == {1}
    hooks = [line for line in log.of_rank_0() if "on_" in line]
    for name in "ac":
        mine = [line for line in hooks if line.startswith(name)]
        assert all(one != other for one, other in itertools.pairwise(mine)), "they alternate"


@pytest.mark.backends("inprocess", "local")
def test_threads_share_the_turn_of_one_group(actor, critic):
    with actor.turn():
        with ThreadPoolExecutor(1) as threads:
            joined = threads.submit(_run_in_turn, actor)
            assert joined.result(DEADLINE_S) == [2], "while this thread has the turn"
        with pytest.raises(bm.UsageError, match="has its turn"):
            critic.run([1])
    with critic.turn(timeout=DEADLINE_S):
        pass


def _run_in_turn(group, timeout=DEADLINE_S):
    with group.turn(timeout=timeout):
        return group.run([1])


@pytest.mark.backends("inprocess", "local")
def test_a_wait_for_a_turn_has_a_deadline(actor, critic):
    with ThreadPoolExecutor(1) as threads:
        with actor.turn():
            late = threads.submit(_run_in_turn, critic, 0.05).exception(DEADLINE_S)
        assert isinstance(late, bm.TurnTimeout)
        assert isinstance(late, TimeoutError)
        message = (
            f"group '{critic.name}' did not get its turn within 0.05 s: group '{actor.name}' has its turn on the same"
        )
        assert message in str(late)
        assert threads.submit(_run_in_turn, critic).result(DEADLINE_S) == [2]


@pytest.mark.backends("inprocess")
def test_mistakes_are_errors(actor, critic):
    for wrong in (-1, "soon"):
        with pytest.raises(bm.UsageError, match="timeout"):
            actor.turn(timeout=wrong)
    with pytest.raises(bm.ArgumentError, match="turn takes worker groups, got int"):
        actor.turn(3)
    turn = actor.turn()
    with turn, pytest.raises(bm.UsageError, match="a turn can be entered once"):
        turn.__enter__()


# --- pools that overlap ---


@pytest.fixture(scope="module")
def halves(backend, log):
    """Groups a and b on one half of a pool, c and d on the other, and e on both halves merged."""
    with bm.ResourcePool([2], backend=backend) as pool:
        left, right = bm.split_resource_pool(pool, 1)
        where = {"a": left, "b": left, "c": right, "d": right, "e": bm.merge_resource_pool(right, left)}
        yield {
            name: bm.WorkerGroup(part, Plain, name, str(log.path), name_prefix=f"{name}-")
            for name, part in where.items()
        }


@pytest.mark.backends("inprocess", "local")
def test_groups_share_slots_by_way_of_split_and_merged_pools(halves):
    with halves["a"].turn():
        with halves["c"].turn(timeout=DEADLINE_S):
            assert halves["c"].run([1]) == halves["a"].run([1]) == [2]
        for name in "be":
            with pytest.raises(bm.UsageError, match="this thread has the turn"):
                halves[name].turn().__enter__()
    with halves["e"].turn():
        for name in "abcd":
            with pytest.raises(bm.UsageError, match="this thread has the turn"):
                halves[name].turn().__enter__()


@pytest.mark.backends("inprocess")
def test_a_cycle_of_waits_ends_at_the_deadline_and_names_both_groups(halves):
    both_have_one = threading.Barrier(2, timeout=DEADLINE_S)

    def use(first, second, timeout):
        with halves[first].turn(timeout=DEADLINE_S):
            both_have_one.wait()
            with halves[second].turn(timeout=timeout):
                return halves[second].run([1])

    with ThreadPoolExecutor(2) as threads:
        late = threads.submit(use, "a", "d", 0.1)
        other = threads.submit(use, "c", "b", DEADLINE_S)
        error = late.exception(DEADLINE_S)
        assert other.result(DEADLINE_S) == [2], "the other thread goes on"
    assert isinstance(error, bm.TurnTimeout)
    names = f"group '{halves['d'].name}' did not get its turn .*group '{halves['c'].name}' has its turn.*same order"
    assert re.search(names, str(error))


@pytest.mark.backends("inprocess")
def test_a_request_for_many_slots_is_not_overtaken(halves):
    order = []

    def use(name, timeout):
        with halves[name].turn(timeout=timeout):
            order.append(name)

    with ThreadPoolExecutor(2) as threads:
        with halves["a"].turn():
            whole = threads.submit(use, "e", DEADLINE_S)
            while (late := threads.submit(use, "c", 0.01).exception(DEADLINE_S)) is None:
                pass  # until the request of e has come
            assert "an earlier request goes first" in str(late)
            with halves["c"].turn(timeout=DEADLINE_S):
                pass  # a thread with a turn may go first: e waits for it anyway
            order.clear()
            last = threads.submit(use, "c", DEADLINE_S)
        whole.result(DEADLINE_S)
        last.result(DEADLINE_S)
    assert order == ["e", "c"]


@pytest.mark.backends("inprocess")
def test_threads_that_join_each_others_turns_do_not_keep_a_rival_waiting(halves):
    joined, leave = threading.Event(), threading.Event()

    def join():
        with halves["a"].turn(timeout=DEADLINE_S):
            joined.set()
            leave.wait(DEADLINE_S)

    with ThreadPoolExecutor(3) as threads:
        with halves["a"].turn():
            rival = threads.submit(_run_in_turn, halves["e"])
            while threads.submit(_run_in_turn, halves["c"], 0.01).exception(DEADLINE_S) is None:
                pass  # until the request of e has come
            other = threads.submit(join)
            assert joined.wait(DEADLINE_S), "this thread may need the other one, to end its turn"
        again = threads.submit(_run_in_turn, halves["a"], 0.01).exception(DEADLINE_S)
        leave.set()
        assert isinstance(again, bm.TurnTimeout), "nobody is inside that came before the rival"
        assert "an earlier request goes first" in str(again)
        assert rival.result(DEADLINE_S) == [2]
        other.result(DEADLINE_S)


# --- calls that still run, or wait ---


@pytest.fixture
def two_models(make_pool, tmp_path):
    """Two groups on one pool, of which the first is resident, and their log."""
    log, pool = Log(tmp_path / "log"), make_pool([2])
    first, second = (bm.WorkerGroup(pool, Model, name, str(log.path), name_prefix=f"{name}-") for name in "fs")
    with first.turn():
        log.clear()
    return first, second, log


def _plain_call(group, source, gate):
    return group.wait_for.submit(gate), group.run.submit([1])


def _call_that_waits_for_rows(group, source, gate):
    rows = source.rows_after.submit(gate, [1, 2])
    return rows, group.run.submit(rows)


def _map(group, source, gate):
    return group.each_after.map(gate, list(range(6)), in_flight=3)


def _stream(group, source, gate):
    return group.rows_after.stream(gate, [1, 2])


@pytest.mark.backends("local")
@pytest.mark.parametrize("call", [_plain_call, _call_that_waits_for_rows, _map, _stream])
@pytest.mark.parametrize("has_hooks", [True, False])
def test_a_turn_begins_when_the_calls_of_the_one_before_are_over(call, has_hooks, both, halves, log, gate):
    first, second = both if has_hooks else (halves["a"], halves["b"])
    with first.turn():
        log.clear()
        kept = call(first, halves["c"], str(gate))
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(bm.CallTimeout):
            threads.submit(_run_in_turn, second, 0.1).result(DEADLINE_S)
        assert not log.all(), "the calls still run"
        turn = threads.submit(_run_in_turn, second)
        gate.touch()
        assert turn.result(DEADLINE_S) == [2]
    for rank in range(first.world_size):
        mine = [line for line in log.all() if f".{rank} " in line and line != "c.0 made rows"]
        hooks = [f"a.{rank} on_yield", f"c.{rank} on_resume"] if has_hooks else []
        end = [*hooks, f"{'c' if has_hooks else 'b'}.{rank} runs"]
        assert mine[-len(end) :] == end
        assert all(line.startswith(f"a.{rank}") for line in mine[: -len(end)])
    del kept


@pytest.mark.backends("inprocess", "local")
def test_a_stream_goes_on_in_the_turns_of_its_group_alone(actor, critic, log):
    with actor.turn():
        stream = actor.count.stream(9)
        next(stream)
    with actor.turn():
        next(stream)
    with critic.turn():
        with pytest.raises(bm.UsageError, match=f"'{actor.name}'"):
            list(stream)
        assert critic.run([1]) == [2]
    with actor.turn():
        assert "a closed" in log.of_rank_0(), "the generator lets go of what it holds"


@pytest.mark.backends("local")  # where the event loop of a worker is a thread of its own process
def test_a_turn_that_waits_for_an_open_stream_of_a_rivals_request_says_so(actor, critic):
    with actor.turn():
        stream = actor.parts.options(maxsize=1).stream(9)
        found = [next(stream)]
    with pytest.raises(bm.CallTimeout) as late:
        critic.turn(timeout=0.05).__enter__()
    message = rf"Model.parts has not ended on rank \d within 0.05 s; a stream of group '{actor.name}' is open; read it"
    assert re.match(message, str(late.value))
    assert [*found, *stream] == list(range(9)), "it goes on"
    with critic.turn(timeout=DEADLINE_S):
        pass


@pytest.mark.backends("local")
def test_a_turn_that_waits_for_a_stream_that_nobody_reads_is_noticed(actor, critic):
    def critic_turn():
        with critic.turn(timeout=DEADLINE_S):
            pass

    n_before = len(bm.stalls())
    with actor.turn():
        stream = actor.parts.options(maxsize=1, stall_after=0.1).stream(9)
        next(stream)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(critic_turn)
        deadline = time.monotonic() + DEADLINE_S
        while not (found := [one for one in bm.stalls()[n_before:] if one.group == actor.name]):
            assert time.monotonic() < deadline, "nothing was noticed"
            time.sleep(0.05)
        stream.close()
        waiting.result(DEADLINE_S)
    assert "parts" in found[0].method
    assert "turn of another group on these slots waits until the stream has ended; read it to its end" in found[0].text


@pytest.mark.backends("inprocess", "local")
def test_a_turn_begins_when_all_requests_of_a_rivals_map_have_ended(actor, critic):
    for _ in range(5):
        with actor.turn():
            whole = actor.ask.map(list(range(40)), in_flight=1).future
        with critic.turn():
            assert whole.done()
        assert whole.result() == list(range(40))


@pytest.mark.backends("inprocess")
def test_a_stream_that_is_refused_as_it_begins_closes_its_generators(actor, critic, log, tmp_path):
    def take_turn():
        until(lambda: "a begins" in log.of_rank_0())
        with critic.turn():
            pass

    def open_gate():
        until(lambda: "in its turn" in repr(critic))
        (tmp_path / "gate").touch()

    threads = [threading.Thread(target=target) for target in (take_turn, open_gate)]
    for thread in threads:
        thread.start()
    with pytest.raises(bm.UsageError, match="has its turn"):
        actor.count.stream(3, str(tmp_path / "gate"))
    for thread in threads:
        thread.join(DEADLINE_S)
    with actor.turn():
        assert {"a.0 closed", "a.1 closed"} <= {*log.all()}


@pytest.mark.backends("inprocess")  # elsewhere, an item may come behind the news that another was refused
def test_a_stream_whose_items_are_taken_in_the_turn_of_another_loses_none_later(actor, critic):
    with actor.turn():
        items = actor.count.stream(3)  # two items ahead of each rank
        found = [next(items) for _ in range(2)]
    with critic.turn():
        found += [next(items), next(items)]  # each makes room for one more, which is refused
    with actor.turn():
        found += items
    assert Counter((item.rank, item.result()) for item in found) == Counter(itertools.product(range(2), range(3)))


# --- requests of workers ---


@pytest.mark.backends("local")  # where workers have ways of their own to the ranks of a group
@pytest.mark.parametrize("cls", [Model, Plain])
def test_requests_of_workers_keep_to_the_turns_of_the_group(cls, make_pool, gate, tmp_path):
    log, pool = Log(tmp_path / "log"), make_pool([1])
    asked, rival = bm.WorkerGroup(pool, cls, "asked", str(log.path)), bm.WorkerGroup(pool, Plain)
    with asked.turn():  # a group without hooks takes turns from here on
        agents = bm.WorkerGroup(make_pool([1]), Agent, asked)
        held = agents.ask.submit(str(gate))
        deadline = time.monotonic() + DEADLINE_S
        while "asked begins" not in log.of_rank_0():
            assert time.monotonic() < deadline
            time.sleep(0.002)  # polling another process
    with pytest.raises(bm.CallTimeout, match="hold got no reply"):
        rival.turn(timeout=0.05).__enter__()
    gate.touch()
    with rival.turn():
        assert held.result(DEADLINE_S) == ["held"]
        for ask in (lambda: agents.ask(str(gate)), lambda: agents.read(3)):
            with pytest.raises(bm.RemoteError, match=r"UsageError: .* has its turn on slots of"):
                ask()

    async def read_in_turn():
        async with asked.turn():
            return await agents.read.submit(3)

    assert asyncio.run(read_in_turn()) == [[0, 1, 2]]
    with asked.turn():
        assert agents.ask(str(gate)) == ["held"]


@pytest.mark.backends("inprocess", "local")
def test_a_group_that_workers_send_requests_themselves_takes_no_turns(make_pool):
    pool = make_pool([1])
    group = bm.WorkerGroup(pool, Plain)
    agents = bm.WorkerGroup(pool, Agent, group)
    with pytest.raises(bm.UsageError, match=r"call turn\(\) once before it is given to"):
        agents.turn(group)
    assert agents.read(2) == [[0, 1]]
    others = bm.WorkerGroup(pool, Agent, agents)
    with agents.turn():  # it has no requests, and all calls of workers go by way of the controller
        pass
    del others


# --- what goes wrong ---


@pytest.mark.backends("inprocess")
def test_a_hook_that_raises_ends_the_turn_and_is_called_again(two_models):
    first, second, log = two_models
    with first.turn():
        first.execute_all_sync("set", fails_in="on_yield")
    for _ in range(2):
        with pytest.raises(bm.RemoteError, match=rf"Model\.on_yield failed on rank 0 .*group {first.name}.*no room"):
            second.turn().__enter__()
    with pytest.raises(bm.UsageError, match="a hook of group"):
        first.run([1])
    with first.turn(timeout=DEADLINE_S):
        first.execute_all_sync("set", fails_in="on_resume")
    with second.turn():
        assert second.run([1]) == [2]
    for _ in range(2):
        with pytest.raises(bm.RemoteError, match=r"Model\.on_resume failed"):
            first.turn().__enter__()
    with second.turn():
        assert second.run([1]) == [2], "others go on"
    assert log.of_rank_0()[-2:] == ["s on_resume", "s runs"]


@pytest.mark.backends("local")
def test_a_hook_that_takes_too_long_is_waited_for_by_the_next_turn(two_models, gate):
    first, second, log = two_models
    with first.turn():
        first.execute_all_sync("set", fails_in="slow on_yield", gate=str(gate))
    with pytest.raises(bm.CallTimeout, match=r"Model\.on_yield"):
        second.turn(timeout=0.05).__enter__()
    gate.touch()
    with first.turn():
        assert first.run([1]) == [2]
    assert log.of_rank_0() == ["f on_yield", "f on_resume", "f runs"]
    with second.turn():
        pass
    assert log.of_rank_0()[-2:] == ["f on_yield", "s on_resume"]


async def _until(word, group):
    """Wait until the repr of a group says "in its turn", as a turn is about to begin, or "yielded", as a hook runs."""
    deadline = time.monotonic() + DEADLINE_S
    while word not in repr(group):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


@pytest.mark.backends("local")
def test_all_wait_for_the_turn_that_a_cancelled_task_has_given_up_which_ends_with_the_hook(two_models, gate):
    first, second, _ = two_models
    with first.turn():
        first.execute_all_sync("set", fails_in="slow on_yield", gate=str(gate))

    async def enter():
        try:
            async with second.turn():
                pass
        except asyncio.CancelledError:
            for group in (first, second):
                with pytest.raises(bm.TurnTimeout):
                    async with group.turn(timeout=0.05):
                        pass
            raise

    async def enter_and_cancel():
        task = asyncio.create_task(enter())
        await _until("yielded", first)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(enter_and_cancel())
    with pytest.raises(bm.TurnTimeout):
        first.turn(timeout=0.05).__enter__()
    gate.touch()
    with first.turn(timeout=DEADLINE_S):
        assert first.run([1]) == [2]


async def _give_up(group, word, shown):
    """Enter a turn of a group in a task, which is cancelled when the repr of a group has a word; see `_until`."""

    async def enter():
        async with group.turn():
            pass

    task = asyncio.create_task(enter())
    await _until(word, shown)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.backends("local")
def test_a_turn_that_a_task_gives_up_while_a_call_of_the_rival_runs_is_left_at_once_and_runs_no_hook(two_models, gate):
    first, second, log = two_models

    with first.turn():
        call = first.wait_for.submit(str(gate))
    asyncio.run(_give_up(second, "in its turn", second))
    with first.turn(timeout=DEADLINE_S):
        later = first.run.submit([1])
        gate.touch()
        assert later.result() == [2]
    assert call.result() == [None, None]
    for thread in threading.enumerate():
        if thread.name == "bandmaster-turn":
            thread.join(DEADLINE_S)
    assert first.run([1]) == [2]
    assert log.of_rank_0() == ["f waited", "f runs", "f runs"]


@pytest.mark.backends("local")
def test_a_turn_that_is_given_up_after_a_rival_has_yielded_is_left_while_a_call_of_another_one_runs(
    make_pool, tmp_path, gate
):
    log, pool = Log(tmp_path / "log"), make_pool([2])
    first, second = (bm.WorkerGroup(pool, Model, name, str(log.path), name_prefix=f"{name}-") for name in "fs")
    last = bm.WorkerGroup(pool, Plain, "z", str(log.path), name_prefix="z-")
    for group in (last, first):
        with group.turn():
            pass
    call = last.wait_for.submit(str(gate))

    asyncio.run(_give_up(second, "yielded", first))
    until(lambda: "in its turn" not in repr(second))  # the hook has ended just now
    later = last.run.submit([1])
    gate.touch()
    assert (call.result(), later.result()) == ([None, None], [2])


@pytest.mark.backends("local")
def test_a_turn_begins_when_the_rival_is_closed_whose_call_it_waits_for(two_models, gate):
    first, second, _ = two_models
    with first.turn():
        first.wait_for.submit(str(gate))

    async def enter():
        async with second.turn(timeout=DEADLINE_S):
            return await second.run.submit([1])

    async def enter_and_close():
        task = asyncio.create_task(enter())
        await _until("in its turn", second)
        first.close()
        assert await task == [2]

    asyncio.run(enter_and_close())


@pytest.mark.backends("local")
def test_a_worker_that_dies_in_a_hook(two_models):
    first, second, _ = two_models
    with first.turn():
        first.execute_all_sync("set", dies_in="on_yield")
    for _ in range(2):  # the other rank still holds what it has
        with pytest.raises(bm.WorkerDied, match=rf"Model\.on_yield lost its process on rank 0 .*group {first.name}"):
            second.turn().__enter__()
    first.restart()
    assert first.run([1]) == [2]
    with second.turn():
        second.execute_all_sync("set", dies_in="on_yield")
    with pytest.raises(bm.WorkerDied):
        first.turn().__enter__()
    second.close()
    with first.turn():
        assert first.run([1]) == [2]


# --- restart, replace, close ---


@pytest.mark.backends("inprocess", "local")
def test_new_workers_are_resident(two_models):
    first, second, log = two_models
    with first.turn(), pytest.raises(bm.UsageError, match=f"this thread has the turn of group '{first.name}'"):
        second.restart()
    log.clear()
    second.restart()
    assert log.of_rank_0() == ["f on_yield", "s restarted"], "a restart is a turn; what was offloaded is not needed"
    second.run([1])
    first.replace(0)
    assert sorted(log.all()[-5:]) == [
        "f.0 replaced 0",
        "f.1 on_resume",
        "f.1 replaced 0",
        "s.0 on_yield",
        "s.1 on_yield",
    ]
    first.run([1])
    with first.turn():
        first.restart()
        assert first.run([1]) == [2]
    with second.turn():
        assert log.of_rank_0()[-2:] == ["f on_yield", "s on_resume"]


@pytest.mark.backends("inprocess")
def test_a_group_that_is_closed_is_in_nobodys_way(two_models):
    first, second, _ = two_models
    with first.turn(), ThreadPoolExecutor(1) as threads:
        turn = threads.submit(_run_in_turn, second)
        first.close()
        assert turn.result(DEADLINE_S) == [2]
    with pytest.raises(bm.ClosedError):
        first.turn()
    turn = second.turn()
    second.close()
    with pytest.raises(bm.ClosedError):
        turn.__enter__()


@pytest.mark.backends("local")
def test_a_turn_begins_when_the_workers_of_a_rival_that_is_closed_have_ended(two_models, gate):
    first, second, _ = two_models
    with first.turn():
        pids = first.execute_all_sync("pid")
        first.wait_for.submit(str(gate))  # so that they do not end at once
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(first.close)
        until(lambda: "closed" in repr(first))
        with second.turn(timeout=DEADLINE_S):
            assert not any(psutil.pid_exists(pid) for pid in pids), "else both have their state on the devices"
        closing.result(DEADLINE_S)


@pytest.mark.backends("inprocess")
def test_a_group_whose_workers_cannot_be_stopped_is_in_nobodys_way(two_models, monkeypatch):
    first, second, _ = two_models

    def stop(why):
        raise OSError("no answer")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no answer"):
        patch.setattr(workers := first._ownership.workers(), "stop", stop)
        first.close()
    with second.turn(timeout=DEADLINE_S):
        assert second.run([1]) == [2]
    workers.stop()


@pytest.mark.backends("inprocess")
def test_a_group_that_nobody_refers_to_is_in_nobodys_way(pool, actor):
    forgotten = bm.WorkerGroup(pool, Model)
    del forgotten
    with actor.turn():
        assert actor.run([1]) == [2]


@pytest.mark.backends("inprocess")
def test_a_constructor_that_fails_ends_the_turn(pool, actor, log):
    class Fails(Model):
        def __init__(self):
            raise KeyError("no weights")

    with pytest.raises(bm.ConstructorError):
        bm.WorkerGroup(pool, Fails)
    with actor.turn():
        assert actor.run([1]) == [2]


# --- several groups at once, roles, tasks ---


@pytest.mark.backends("inprocess")
def test_groups_can_have_their_turns_at_once(make_pool, actor, critic, pool, log):
    with actor.turn(critic):
        assert critic.run([1]) == actor.run([1]) == [2]
        assert log.of_rank_0() == ["c on_resume", "c runs", "a runs"], "the actor stays"
        with ThreadPoolExecutor(1) as threads:
            third = threads.submit(lambda: _run_in_turn(bm.WorkerGroup(pool, Plain), 0.01))
            assert isinstance(third.exception(DEADLINE_S), bm.TurnTimeout)
        with critic.turn(), actor.turn():
            assert critic.run([1]) == [2]
    with actor.turn():
        with actor.turn(critic):
            assert critic.run([1]) == [2]
        with pytest.raises(bm.UsageError, match="has its turn"):
            critic.run([1])


@pytest.mark.backends("inprocess", "local")
def test_roles_take_turns(make_pool, tmp_path):
    log = Log(tmp_path / "log")
    given = {name: (Model, name, str(log.path)) for name in ("actor", "critic")}
    with bm.colocate(make_pool([2]), **given) as group:
        with group.actor.turn():
            assert log.of_rank_0() == ["critic on_yield"], "both are resident when they are constructed"
            with pytest.raises(
                bm.UsageError, match=f"'{group.actor.name}' has its turn on slots of .*'{group.critic.name}'"
            ):
                group.critic.run([1])
            with pytest.raises(bm.UsageError, match="this thread has the turn"):
                group.critic.turn().__enter__()
            with pytest.raises(bm.UsageError, match="this thread has the turn"):
                group.restart()
        with group.critic.turn():
            assert group.critic.run([1]) == [2]
        with pytest.raises(bm.UsageError, match=r"with group\.actor\.turn\(\)"):
            group.turn()
        log.clear()
        group.restart()
        assert group.critic.run([1]) == group.actor.run([1]) == [2], "both are new"
        with group.critic.turn():
            assert log.of_rank_0() == [
                "actor restarted",
                "critic restarted",
                "critic runs",
                "actor runs",
                "actor on_yield",
            ]


@pytest.mark.backends("inprocess", "local")
def test_tasks_take_turns(actor, critic):
    inside = []

    async def use(group):
        for _ in range(3):
            async with group.turn(timeout=DEADLINE_S):
                inside.append(group.name)
                assert await group.run.submit([1]) == [2]
                assert inside.pop() == group.name
                assert not inside

    async def both():
        await asyncio.gather(use(actor), use(critic))
        async with actor.turn():
            with pytest.raises(bm.UsageError, match="this task has the turn"):
                async with critic.turn():
                    pass
            blocking = asyncio.create_task(_enter_blocking(critic))
            with pytest.raises(bm.UsageError, match=r"another task of this thread has the turn.*write async with"):
                await blocking
            waiting = asyncio.create_task(use(critic))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await actor.run.submit([1]) == [2]
        await use(critic)

    asyncio.run(both())


async def _enter_blocking(group):
    with group.turn():
        pass


ENDS_MEANWHILE = """
import asyncio, threading
import bandmaster as bm

pool, waits = bm.ResourcePool([1], backend="inprocess"), threading.Event()
first, second = bm.WorkerGroup(pool, bm.Worker), bm.WorkerGroup(pool, bm.Worker)

async def wait():
    asyncio.get_running_loop().call_soon(waits.set)  # called as soon as this awaits something
    async with second.turn():
        pass

first.turn().__enter__()
threading.Thread(target=lambda: asyncio.run(wait()), daemon=True).start()
waits.wait()
"""


def test_a_program_ends_while_a_task_of_a_daemon_thread_waits_for_a_turn():
    done = subprocess.run([sys.executable, "-c", ENDS_MEANWHILE], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


# --- any sequence ---


class Resident(bm.Worker):
    """It marks its slot as taken while it is resident."""

    def __init__(self, name, held):
        self.name, self.held = name, held
        self._take()

    def _slot(self):
        return f"{self.held}/{self.name}.{self.rank}"

    def _take(self):
        open(self._slot(), "x").close()  # fails if it is resident already

    def on_resume(self):
        self._take()

    def on_yield(self):
        os.unlink(self._slot())  # fails if it is not

    @register(Dispatch.ONE_TO_ALL)
    def run(self):
        return os.path.exists(self._slot())


SLOTS = {"left": {0, 1}, "right": {1, 2}, "other": {1}}


@pytest.mark.backends("inprocess")
def test_never_two_are_resident_on_one_slot(tmp_path_factory):
    @settings(max_examples=50)
    @given(st.lists(st.lists(st.sampled_from(sorted(SLOTS)), min_size=1, max_size=3), max_size=12))
    def check(turns):
        held = tmp_path_factory.mktemp("held")
        with bm.ResourcePool([3], backend="inprocess") as pool:
            parts = bm.split_resource_pool(pool, 1)
            pools = {
                "left": bm.merge_resource_pool(parts[0], parts[1]),
                "right": bm.merge_resource_pool(parts[1], parts[2]),
                "other": parts[1],
            }
            groups = {name: bm.WorkerGroup(pools[name], Resident, name, str(held)) for name in SLOTS}
            for names in turns:
                _take_turns(names, groups, held)

    check()


def _take_turns(names, groups, held):
    """Take the turns of some groups, each within the one before where they share no slot."""
    with contextlib.ExitStack() as stack:
        inside = set()
        for name in names:
            is_rival = any(SLOTS[name] & SLOTS[other] for other in inside - {name})
            if is_rival:
                with pytest.raises(bm.UsageError):
                    stack.enter_context(groups[name].turn())
                continue
            stack.enter_context(groups[name].turn())
            inside.add(name)
            assert all(groups[name].run())
            resident = {entry.name.partition(".")[0] for entry in held.iterdir()}
            assert inside <= resident
            for other in resident - {name}:
                assert not SLOTS[other] & SLOTS[name], "two are resident on one slot"
            for other in set(groups) - {name}:
                if SLOTS[other] & SLOTS[name]:
                    with pytest.raises(bm.UsageError):
                        groups[other].run()


@pytest.mark.backends("inprocess")
def test_threads_that_nest_turns_at_random_never_wait_forever(halves):
    """Turns of one group or two, within each other, in any order: each comes, is refused, or ends at its deadline."""
    of_slot = ["abe", "cde"]
    inside, lock = Counter(), threading.Lock()

    def use(seed):
        choose = random.Random(seed)
        for _ in range(60):
            with contextlib.ExitStack() as stack:
                for n_groups in choose.choices([1, 1, 2], k=choose.randint(1, 3)):
                    names = choose.sample("abcde", n_groups)
                    first, *others = [halves[name] for name in names]
                    try:
                        stack.enter_context(first.turn(*others, timeout=0.05))
                    except (bm.UsageError, bm.TurnTimeout):
                        break
                    assert first.run([1]) == [2]
                    if n_groups > 1:
                        break  # from here on, rivals are inside together
                    with lock:
                        inside[names[0]] += 1
                        assert all(sum(inside[name] > 0 for name in slot) <= 1 for slot in of_slot)
                    stack.callback(leave, names[0])

    def leave(name):
        with lock:
            inside[name] -= 1

    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(use, seed) for seed in range(6)]:
            future.result(2 * DEADLINE_S)
