"""Agents: calls to other hosts, rows between hosts, hosts that are lost, and who may connect. Hosts are processes here.

The same on real Ray and separate networks is in test_hosts.py.
"""

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from clock import idle_time
from ctrl_c import done_when, interrupted_when
from ends import in_another_thread, until
from hypothesis import given, settings
from hypothesis import strategies as st

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.backends import get_backend, register_backend
from bandmaster.callers.reached import FarPlace, FarRanks, ReachedWorkers
from bandmaster.codec import Payload, encode
from bandmaster.contract import RowFacts
from bandmaster.errors.failure import Failure
from bandmaster.hosts import agent, handshake, links
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import MAGIC, Refused, Secret, greet, welcome
from bandmaster.hosts.link import FrameKind, Link, Purpose, connect, in_memory
from bandmaster.hosts.links import BEAT_S, Agent, AgentLinks
from bandmaster.hosts.rows import RowLinks
from bandmaster.hosts.workers import AgentWorkers, FarRows
from bandmaster.platform.limits import cannot_start, start_thread
from bandmaster.testing import BackendContract
from bandmaster.testing.simulated_hosts import SimulatedHosts
from bandmaster.wire.client import MessageTicket
from bandmaster.wire.messages import Closed
from bandmaster.wire.poller import Poller
from bandmaster.wire.segments import SegmentWriter

register_backend("three-hosts", lambda: SimulatedHosts(3))
for name in ("hosts", "hosts-to-lose", "hosts-in-a-tree", "encrypted"):
    register_backend(name, SimulatedHosts)


@pytest.fixture(scope="class")
def three_hosts():
    """Keep the hosts from the first test of a class to the last: otherwise they end with each pool."""
    with bm.ResourcePool([3], backend="three-hosts") as pool:
        bm.WorkerGroup(pool, Maker)
        yield


@pytest.mark.usefixtures("three_hosts")
class TestAgents(BackendContract):
    """A group whose ranks are dealt to three hosts."""

    backend = "three-hosts"
    has_processes = False

    def test_workers_have_processes_or_have_not(self):
        with self.group(4, Maker) as group:
            assert len(set(group.process())) == 3


class Maker(bm.Worker):
    """Makes rows, and uses those of others."""

    @register(Dispatch.DP_PROTO)
    def make(self, rows):
        return {"x": rows["x"] * 2.0, "i": rows["i"]}

    @register(Dispatch.DP_PROTO)
    def use(self, rows):
        return {"y": rows["x"] + 1, "j": rows["i"]}

    @register(Dispatch.ONE_TO_ALL)
    def total(self, rows):
        return int(rows["i"].sum())

    @register(Dispatch.DP_PROTO, arguments={"names": bm.Broadcast()})
    def named(self, ids, names):
        return {name: ids * n for n, name in enumerate(names)}

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def first(self, words):
        return words[0]

    @register(Dispatch.ONE_TO_ALL)
    def n_let_go_on(self):
        """How many calls the agent here expects to fail."""
        return sum(len(ranks._resumed) for ranks in server_here().groups.values())

    @register(Dispatch.REQUEST, concurrency=2)
    async def ask(self, words):
        return words[0]


class Replaceable(Maker):
    def on_replace(self, rank, state): ...

    @register(Dispatch.ONE_TO_ALL)
    def groups(self):
        return groups_here()


@pytest.fixture(scope="module")
def kept_hosts():
    """Keep the hosts for the tests that do not harm them: to start them takes two seconds of a processor."""
    with bm.ResourcePool([1, 1, 1], backend="hosts") as pool:
        bm.WorkerGroup(pool, Maker)
        yield


@pytest.fixture
def group(kept_hosts):
    with bm.ResourcePool([2, 1, 2], backend="hosts") as pool:
        yield bm.WorkerGroup(pool, Maker)


@pytest.fixture
def group_to_lose():
    """A group on hosts of its own."""
    with bm.ResourcePool([2, 1, 2], backend="hosts-to-lose") as pool:
        yield bm.WorkerGroup(pool, Maker)


N = 20_000  # rows: enough that no host sends them inside of a message
ROWS = {"x": np.random.default_rng(0).random((N, 4)), "i": np.arange(N)}


def agents(backend="hosts"):
    return get_backend(backend)._links.agents


def test_ranks_of_a_host_are_called_together(group):
    pids = group.process()
    assert pids[0] == pids[1] != pids[2] and len(set(pids)) == 3


# --- Ctrl-C ---


def interrupted_in(name):
    """Ctrl-C is pressed in the block as a function is called first."""
    return interrupted_when(lambda frame, kind, what: kind == "call" and frame.f_code.co_name == name)


@pytest.mark.parametrize("moment", ["set_workers", "take_deaths"])
def test_a_group_that_ctrl_c_interrupts_as_it_has_started_or_ends_holds_no_agent(moment):
    with bm.ResourcePool([2], backend="hosts-to-lose") as pool:
        with interrupted_in(moment):
            bm.WorkerGroup(pool, Maker).close()
        assert [list(agent.groups) for agent in agents("hosts-to-lose").values()] == [[]]
        with bm.WorkerGroup(pool, Maker) as group:
            assert len(group.process()) == 2


@pytest.mark.parametrize("moment", ["answers", "_announce"])
def test_a_rank_is_dead_whose_replacement_ctrl_c_interrupts_before_it_is_constructed(kept_hosts, moment):
    with bm.ResourcePool([1, 1], backend="hosts") as pool, bm.WorkerGroup(pool, Replaceable) as group:
        with interrupted_in(moment):
            group.replace(0)
        with pytest.raises(bm.WorkerDied, match=r"rank 0 .*ended by the controller, because it"):
            group.process()
        group.replace(0)
        assert len(group.process()) == 2


def server_here():
    """The agent of this process."""
    (server,) = [one for one in gc.get_objects() if type(one) is AgentServer]
    return server


def groups_here():
    """The groups that the agent of this process has ranks of."""
    return [name.split()[0] for name in server_here().groups]


def interrupted(group):
    with interrupted_in("answers"):
        group.replace(1)
    group.close()


def interrupted_and_replaced_again(group):
    with interrupted_in("answers"):
        group.replace(1)
    group.replace(1)
    assert len(group.process()) == 2
    group.close()


def closed_meanwhile(group):
    workers = group._ownership.workers()
    again = workers._again
    workers._again = lambda rank: (group.close(), again(rank))[1]
    with pytest.raises(bm.ClosedError, match="the group was closed"):
        group.replace(1)


@pytest.mark.parametrize("end", [interrupted, interrupted_and_replaced_again, closed_meanwhile])
def test_a_rank_that_another_agent_starts_as_its_host_is_lost_ends_with_its_group(end):
    with bm.ResourcePool([1, 1, 1], backend="hosts-to-lose") as pool:
        bm.WorkerGroup(pool, Maker).close()
        with bm.ResourcePool([1, 1], backend="hosts-to-lose") as two, bm.WorkerGroup(two, Replaceable) as group:
            workers = group._ownership.workers()
            workers._again = lambda rank: agents("hosts-to-lose")["2"]
            os.kill(group.process()[1], signal.SIGKILL)
            while not workers.deaths:
                workers.check()
            end(group)
        with bm.WorkerGroup(pool, Replaceable) as last:
            assert last.groups() == [["Replaceable"]] * 3


def test_a_rank_stays_dead_whose_group_another_thread_closes_as_it_is_replaced(kept_hosts):
    with bm.ResourcePool([1, 1], backend="hosts") as pool:
        group = bm.WorkerGroup(pool, Replaceable)
        workers = group._ownership.workers()

        def is_answered(frame, kind, what):
            return kind == "return" and frame.f_code is AgentWorkers._answer.__code__

        with (
            done_when(is_answered, partial(in_another_thread, group.close)),
            pytest.raises(bm.ClosedError, match="the group was closed"),
        ):
            group.replace(1)
        assert set(workers.deaths) == {0, 1}, "else a request to it would wait for ever"


def test_a_rank_stays_dead_whose_new_worker_dies_before_its_host_tells_of_it(kept_hosts, monkeypatch):
    """Its host tells of the death first."""
    real = AgentWorkers._answer

    def answer(workers, agent, question, *args):
        record, rendezvous = real(workers, agent, question, *args)
        with workers.lock:
            workers.take_deaths({1: Failure.of_death("killed by SIGKILL", "", "host1", -1, "cpu")})
        return record._replace(pid=-1), rendezvous

    with bm.ResourcePool([1, 1], backend="hosts") as pool, bm.WorkerGroup(pool, Replaceable) as group:
        monkeypatch.setattr(AgentWorkers, "_answer", answer)
        with pytest.raises(bm.WorkerDied, match=r"rank 1 .*killed by SIGKILL"):
            group.replace(1)
        monkeypatch.undo()
        assert not group.healthy
        group.replace(1)
        assert group.healthy and len(group.process()) == 2


ENDED_WHILE_IT_STARTS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Secret

begun, may_start, why = threading.Semaphore(0), threading.Event(), []

def start(said, shows):
    begun.release()
    assert may_start.wait(20)
    return SimpleNamespace(stop=why.append, arrivals=None, records=[], rendezvous={}), (0,)

def replace(number):
    server.replace("group", 0, number, None)

server = AgentServer(Secret.new(), "127.0.0.1", "test", start)
with ThreadPoolExecutor(3) as threads:
    starts = [threads.submit(server.start, "group", None), *[threads.submit(replace, n) for n in (1, 2)]]
    assert begun.acquire(timeout=20) and begun.acquire(timeout=20)  # the second replacement waits for the first one
    server.stop("group", "interrupted")
    may_start.set()
print([str(start.exception()) for start in starts], why, server.groups)
"""


def test_the_ranks_of_a_group_that_is_ended_while_they_start_are_ended():
    """One may be started in place of one on a lost host; where Ctrl-C has ended the wait, another one starts none."""
    done = subprocess.run([sys.executable, "-c", ENDED_WHILE_IT_STARTS], capture_output=True, text=True, check=False)
    assert done.stdout == f"{['interrupted'] * 3} {['interrupted'] * 2} {{}}\n", done.stderr


REPLACED_WHILE_A_REQUEST_WAITS = """
from concurrent.futures import Future
from types import SimpleNamespace
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.link import FrameKind, Message
from bandmaster.hosts.rows import StoredRows
from bandmaster.contract import Reply
from bandmaster.wire.messages import MessageKind, control_message, header_of

class Workers(SimpleNamespace):
    arrivals, reports, deaths, records, rendezvous = None, {}, {}, ["rank 0", "rank 1"], {}

    def put(self, payloads):
        return list(payloads)

    def call(self, calls, tickets):
        print("call of ranks", *[call.ranks for call in calls])

    def request(self, rank, requests, take):
        print("request of rank", rank)

    def replace(self, rank):
        print("replace rank", rank)

server, rows = AgentServer(Secret.new(), "127.0.0.1", "test", lambda said, shows: (Workers(), (0, 1))), Future()
server.start("group", None)
ranks = server.groups["group"]
server._store[7, 0] = StoredRows(rows)  # as if they were on their way from another host
request = [(number, ("method", int(Reply.DROP), (), [(0, (7, 0))], None), False) for number in (1, 2)]
for rank, one in enumerate(request):
    body = control_message(MessageKind.REQUESTS, [one])[4:]
    ranks.take(Message(FrameKind.CALLS, ("group", [((rank,), body)]), {}), False)
server.replace("group", 1, 1, None)
rows.set_result("rows")
ranks.advance()
print([(ranks, header_of(body)[1]) for ranks, body in ranks.news()[0]])
"""


def test_a_request_that_waits_for_rows_is_not_for_the_worker_that_replaces_its_own():
    done = subprocess.run(
        [sys.executable, "-c", REPLACED_WHILE_A_REQUEST_WAITS], capture_output=True, text=True, check=False
    )
    assert done.stdout == "replace rank 1\nrequest of rank 0\n[((1,), 2)]\n", done.stderr


LET_GO_ON_EARLY = """
from types import SimpleNamespace
from bandmaster.contract import Reply, Ticket
from bandmaster.errors.failure import Failure
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.link import FrameKind, Message
from bandmaster.wire.messages import call_message

class Workers(SimpleNamespace):
    arrivals, reports, deaths, records, rendezvous = None, {}, {}, ["rank 0"], {}

    def put(self, payloads):
        return list(payloads)

    def call(self, calls, tickets):
        tickets[0] = next(waiting)

    def fetch(self, ticket):
        return Failure.of(ValueError("odd"))

    def resume(self, tickets):
        print("resume", [sent.index(ticket) for ticket in tickets.values()])

sent = [Ticket(), Ticket()]
waiting = iter(sent)
server = AgentServer(Secret.new(), "127.0.0.1", "test", lambda said, shows: (Workers(), (0,)))
server.start("group", None)
ranks = server.groups["group"]
for number in (7, 8):
    body = call_message(number, ("method", int(Reply.DROP), (), [], None), False, True)[4:]
    ranks.take(Message(FrameKind.CALLS, ("group", [((0,), body)]), {}), False)
for number in (7, 8):
    ranks.resume({0: number})
for ticket in sent:
    ticket.is_done = True
    ticket.on_done()
    print("replies", len(ranks.news()[0]))
"""


def test_a_rank_goes_on_that_fails_when_its_replies_are_not_waited_for_any_more():
    """The host that passes its replies on was lost, and so the controller has taken its calls for over."""
    done = subprocess.run([sys.executable, "-c", LET_GO_ON_EARLY], capture_output=True, text=True, check=False)
    assert done.stdout == "resume []\n" * 2 + "resume [0]\nreplies 1\nresume [1]\nreplies 1\n", done.stderr


def test_an_agent_forgets_calls_that_have_failed_while_nobody_waited(group):
    for _ in range(20):
        group.first.submit([])  # fails, and the rank goes on with the next one before the controller knows of it
    for _ in range(40):  # each drives one of them to its end
        group.process()
    assert group.n_let_go_on() == [0] * group.world_size


STOPPED_WHILE_ROWS_WAIT_FOR_OTHERS = """
from types import SimpleNamespace
from bandmaster.contract import KeptCopy, Reply, RowFacts, Ticket
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.link import FrameKind, Message
from bandmaster.wire.messages import ReplyKind, call_message, header_of

class Workers(SimpleNamespace):
    arrivals, reports, deaths, records, rendezvous = None, {}, {}, ["rank 0", "rank 1"], {}

    def put(self, payloads):
        return list(payloads)

    def call(self, calls, tickets):
        tickets.update(sent)

    def fetch(self, ticket):
        return KeptCopy(None, RowFacts(3, 24, {}))

    def stop(self, why):
        print("stopped")

def post(kind, name, said, **large):
    print([(ranks, header_of(body) == (ReplyKind.ROWS, 7)) for ranks, body in said])

sent = {0: Ticket(), 1: Ticket()}
server = AgentServer(Secret.new(), "127.0.0.1", "test", lambda said, shows: (Workers(), (0, 1)))
server.start("group", None)
server._controller = SimpleNamespace(post=post)
ranks = server.groups["group"]
body = call_message(7, ("method", int(Reply.KEEP), (), [], None), False, True)[4:]
ranks.take(Message(FrameKind.CALLS, ("group", [((0, 1), body)]), {}), False)
sent[0].is_done = True
sent[0].on_done()
server._tell()
print(sorted(server._store))
print(server.stop("group", "closed"))
"""


def test_the_controller_learns_of_rows_whose_group_ends_before_the_other_ranks_have_replied():
    """It releases them: they stayed on their host for as long as the controller."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_WHILE_ROWS_WAIT_FOR_OTHERS], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[(7, 0)]\nstopped\n[(7, 0)]\n", done.stderr


TOLD_BY_WAY_OF_A_HOST_THAT_IS_LOST = """
from types import SimpleNamespace
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Secret

class Link(SimpleNamespace):
    def fileno(self):
        return -1

    def close(self):
        pass

    def post(self, kind, name, said, large):
        print(self.name, len(said))

workers = SimpleNamespace(arrivals=None, reports={}, deaths={}, records=["rank 0"], rendezvous={})
server = AgentServer(Secret.new(), "127.0.0.1", "test", lambda said, shows: (workers, (0,)))
server._controller, relay = Link(name="controller"), Link(name="relay")
server.start("group", None)
server.groups["group"].home = relay
for version in (1, 2):
    workers.reports[0] = version
    server._tell()
    server._end(relay, "gone")
    server._tell()
"""


def test_what_ranks_report_is_told_again_when_the_host_is_lost_that_passes_it_on():
    script = TOLD_BY_WAY_OF_A_HOST_THAT_IS_LOST
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "relay 1\ncontroller 1\ncontroller 1\n", done.stderr


REPLACED_TWICE_AT_ONCE = """
import threading
from types import SimpleNamespace
from bandmaster.errors import ClosedError
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Secret

class Workers(SimpleNamespace):
    arrivals, reports, deaths, records, rendezvous = None, {}, {}, ["rank 0"], {}

    def replace(self, rank):
        print("begun", flush=True)
        begun.set()
        assert may_go.wait(20)
        print("done", flush=True)

begun, may_go = threading.Event(), threading.Event()
server = AgentServer(Secret.new(), "127.0.0.1", "test", lambda said, shows: (Workers(), (0,)))
server.start("group", None)
replacing = [threading.Thread(target=server.replace, args=("group", 0, number, None)) for number in (1, 2)]
replacing[0].start()
assert begun.wait(20)
begun.clear()
replacing[1].start()
print(begun.wait(0.2))
may_go.set()
for thread in replacing:
    thread.join()
try:
    server.replace("group", 0, 1, None)
except ClosedError as error:
    print(error)
"""


def test_a_rank_is_replaced_once_at_a_time_and_not_by_a_message_that_is_late():
    """Ctrl-C ends the wait of the controller for a replacement, which goes on here, and another one may come."""
    done = subprocess.run([sys.executable, "-c", REPLACED_TWICE_AT_ONCE], capture_output=True, text=True, check=False)
    expected = "begun\nFalse\ndone\nbegun\ndone\nrank 0 was replaced again meanwhile\n"
    assert done.stdout == expected, done.stderr


GROUPS_REPLACED_AT_ONCE = """
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Secret

def replace(rank):
    both.wait(10)

def start(said, shows):
    return SimpleNamespace(arrivals=None, reports={}, deaths={}, records=[0], rendezvous={}, replace=replace), (0,)

both = threading.Barrier(2)
server = AgentServer(Secret.new(), "127.0.0.1", "test", start)
for name in "ab":
    server.start(name, None)
with ThreadPoolExecutor(2) as threads:
    print(list(threads.map(lambda name: server.replace(name, 0, 1, None), "ab")))
"""


def test_a_rank_is_replaced_while_one_of_another_group_takes_long():
    done = subprocess.run([sys.executable, "-c", GROUPS_REPLACED_AT_ONCE], capture_output=True, text=True, check=False)
    assert done.stdout == "[(0, {}), (0, {})]\n", done.stderr


TAKEN_BY_ANOTHER_THREAD = """
import os, threading, time
from types import SimpleNamespace
from bandmaster.contract import Reply
from bandmaster.hosts import agent
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.link import FrameKind, Purpose, connect
from bandmaster.wire.client import MessageTicket
from bandmaster.wire.messages import call_message

agent.LOOK_S, ticket, secret = 60.0, MessageTicket(1), Secret.new()
workers = SimpleNamespace(arrivals=os.eventfd(0), reports={}, deaths={}, records=[], rendezvous={})
workers.put, workers.call, workers.fetch = list, lambda calls, sent: sent.update({0: ticket}), lambda ticket: None
server = agent.AgentServer(secret, "127.0.0.1", "test", lambda said, shows: (workers, (0,)))
server.start("group", None)
threading.Thread(target=server.run, args=(20.0,), daemon=True).start()
link = connect(server.address, secret, Purpose.MESSAGES, timeout_s=10.0)
message = call_message(1, ("method", int(Reply.DROP), (), (), None), False, False)[4:]
link.send(FrameKind.CALLS, "group", [(None, message)], [], False)
while ticket.on_done is None or server._poller._blocked is None:
    time.sleep(0.001)
ticket.is_done = True
ticket.on_done()
print(link.receive().kind == FrameKind.REPLIES, flush=True)
os._exit(0)
"""


def test_replies_that_another_thread_of_an_agent_has_taken_are_sent_at_once():
    """Such as the one that sends what a worker that is busy has not taken yet."""
    done = subprocess.run([sys.executable, "-c", TAKEN_BY_ANOTHER_THREAD], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


# --- rows between hosts ---


def received_nbytes():
    """Bytes that have come from all agents, as the kernel counts them: `tcpi_bytes_received` of linux/tcp.h."""
    links = [agent.link._socket for agent in agents().values()]
    told = [link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136) for link in links]
    return sum(int.from_bytes(info[128:136], sys.byteorder) for info in told)


def test_rows_stay_on_their_hosts(group):
    made = group.make.submit(ROWS)
    assert made.exception() is None
    before = received_nbytes()
    used = group.use.submit(made)
    assert used.exception() is None
    assert 0 < received_nbytes() - before < 10_000
    assert (used.result()["y"] == ROWS["x"] * 2 + 1).all()


def test_rows_may_have_many_columns_with_names_of_any_class(group):
    Kind = Enum("Kind", [f"FEATURE_{n}" for n in range(1_500)])  # agents and workers cannot import it
    made = group.named.submit(np.arange(10), list(Kind))
    assert (len(made), list(made.schema)) == (10, list(Kind))
    again = group.named.submit(made.select(Kind.FEATURE_2).result()[Kind.FEATURE_2], ["x"])
    assert again.result()["x"].tolist() == [0] * 10
    assert made.result()[Kind.FEATURE_1499].tolist() == [1_499 * n for n in range(10)]


def test_what_was_answered_before_a_group_is_closed_is_kept(kept_hosts):
    with bm.ResourcePool([1], backend="hosts") as pool:
        group = bm.WorkerGroup(pool, Maker)
        called = group.process.submit()
        select.select([group._ownership.workers().arrivals], (), (), 30)
        group.close()
        assert len(called.result()) == 1


def test_a_call_is_late_whose_group_another_thread_closes_as_hosts_are_asked_for_stacks(kept_hosts):
    with bm.ResourcePool([1, 1], backend="hosts") as pool:
        group = bm.WorkerGroup(pool, Maker)

        def is_asked(frame, kind, what):
            return kind == "call" and frame.f_code is AgentLinks.ask.__code__

        with (
            done_when(is_asked, partial(in_another_thread, group.close)),
            pytest.raises(bm.CallTimeout, match=r"no reply from rank 0, 1 within 0.2 s"),
        ):
            group.sleep.options(timeout=0.2)(5.0)


@settings(max_examples=25)
@given(data=st.data())
def test_any_rows_can_be_taken_on_any_host(shared, data):
    group, made = shared
    rows, expected = made, np.arange(N)
    for _ in range(data.draw(st.integers(0, 3))):
        kind = data.draw(st.sampled_from(["shuffle", "slice", "index"]))
        if kind == "shuffle":
            seed = data.draw(st.integers(0, 5))
            rows, expected = rows.shuffle(seed=seed), expected[np.random.default_rng(seed).permutation(len(expected))]
        elif kind == "slice":
            start, stop = sorted(data.draw(st.tuples(st.integers(0, len(expected)), st.integers(0, len(expected)))))
            rows, expected = rows[start:stop], expected[start:stop]
        elif len(expected):
            index = np.array(data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=9)))
            rows, expected = rows[index], expected[index]
    found = group.use.submit(rows).result()
    assert found["j"].tolist() == expected.tolist()
    assert (found["y"] == ROWS["x"][expected] * 2 + 1).all()


@pytest.fixture(scope="module")
def shared(kept_hosts):
    with bm.ResourcePool([2, 1, 2], backend="hosts") as pool:
        group = bm.WorkerGroup(pool, Maker)
        made = group.make.submit(ROWS)
        made.exception()
        yield group, made


def test_a_group_takes_rows_of_another_one_on_other_hosts(group):
    with bm.ResourcePool([1, 1], backend="hosts") as pool:
        other = bm.WorkerGroup(pool, Maker)
        assert other.total(group.make.submit(ROWS)) == [N * (N - 1) // 2] * 2


def test_groups_on_the_same_hosts_wait_for_the_same_rows_at_once(group):
    made = group.make.submit(ROWS)
    made.exception()
    last = group.process()[4]
    with bm.ResourcePool([1, 1], backend="hosts") as pool, bm.ResourcePool([1, 1], backend="hosts") as more:
        others = [bm.WorkerGroup(one, Maker) for one in (pool, more)]
        suspend(last)
        try:
            futures = [other.total.submit(made[4 * N // 5 :]) for other in others]
        finally:
            os.kill(last, signal.SIGCONT)
        total = int(ROWS["i"][4 * N // 5 :].sum())
        assert [future.result(30) for future in futures] == [[total] * 2] * 2


def test_a_result_is_not_waited_for_longer_than_its_timeout_while_a_host_sends_no_rows(group):
    pids = group.process()
    made = group.make.submit(ROWS)
    made.exception()
    some = made[N // 2 :].select("i")
    suspend(pids[2])
    try:
        for rows in made, some:
            began = idle_time()
            with pytest.raises(bm.CallTimeout, match=r"Maker.make is done, but rows .* which rank 2 .* within 0.2 s"):
                rows.result(timeout=0.2)
            assert idle_time() - began < 3
    finally:
        os.kill(pids[2], signal.SIGCONT)
    assert (made.result(timeout=30)["x"] == ROWS["x"] * 2).all()
    assert (some.result()["i"] == ROWS["i"][N // 2 :]).all()


def test_a_host_that_is_slow_to_answer_is_asked_again_for_rows(group_to_lose, monkeypatch):
    monkeypatch.setattr("bandmaster.hosts.link.HANDSHAKE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("bandmaster.hosts.handshake.HANDSHAKE_TIMEOUT_S", 0.5)
    pids = group_to_lose.process()
    made = group_to_lose.make.submit(ROWS)
    made.exception()
    suspend(pids[2])
    threading.Timer(0.8, os.kill, [pids[2], signal.SIGCONT]).start()
    assert (made.result(timeout=30)["x"] == ROWS["x"] * 2).all()


@contextlib.contextmanager
def descriptors(pid, n):
    """Allow a process no more than so many descriptors beside those that it has."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    free = (fd for fd in itertools.count() if fd not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(itertools.islice(free, n, None)), before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_many_parts_of_one_host_are_fetched_by_few_connections(group):
    parts = [group.make.submit({"x": ROWS["x"], "i": ROWS["i"] + n}) for n in range(80)]
    rows = bm.concat([part[: N // 5] for part in parts])  # all of rank 0
    assert {place.rank for place in rows.where} == {0}
    with descriptors(group.process()[0], 10):
        assert group.total(rows) == [sum(int((ROWS["i"][: N // 5] + n).sum()) for n in range(80))] * 5


def test_an_agent_without_descriptors_accepts_connections_when_it_has_some(group):
    pid = group.process()[0]
    made = group.make.submit(ROWS)
    made.exception()
    with descriptors(pid, 0), connected() as sock:
        for _ in range(3):
            group.process()  # the agent has seen the connection
        assert not select.select([sock], [], [], 0)[0]
    assert group.total(made) == [N * (N - 1) // 2] * 5


ROWS_WANTED = """
from concurrent.futures import Future
from types import SimpleNamespace
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.rows import Fetch

def fetch(wanted, place):
    fetched.append(Future())
    print(wanted.numbers)
    return fetched[-1]

def want(start, stop):
    server._fetch(Fetch(("127.0.0.1", 0), (7, 0), "rows", range(start, stop), 10), None)

server, fetched = AgentServer(Secret.new(), "127.0.0.1", "test", None), []
server._links = SimpleNamespace(fetch=fetch)
want(0, 6)
want(1, 3)  # they are on their way
fetched[0].set_exception(OSError("there is no memory"))
want(1, 3)
fetched[1].set_result("rows")
want(2, 3)
want(3, 7)
want(1, 6)
want(0, 10)
"""


def test_a_host_fetches_the_rows_that_it_lacks_and_all_at_last():
    done = subprocess.run([sys.executable, "-c", ROWS_WANTED], capture_output=True, text=True, check=False)
    assert done.stdout == "range(0, 6)\nrange(1, 3)\nrange(3, 7)\nNone\n", done.stderr


ROWS_OF_A_STOPPED_GROUP = """
from concurrent.futures import Future
from types import SimpleNamespace
from bandmaster.errors import ClosedError
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.rows import Fetch

def start(name, shows):
    def reserve(sizes, is_kept):
        if name not in server.groups:
            raise ClosedError("the group was closed")
        print("memory of", name)

    return SimpleNamespace(arrivals=None, records=[], rendezvous={}, reserve=reserve), (0,)

def fetch(wanted, place):
    places.append(place)
    return Future()

server, places = AgentServer(Secret.new(), "127.0.0.1", "test", start), []
server._links = SimpleNamespace(fetch=fetch)
for name in "ab":
    server.start(name, name)
server._fetch(Fetch(("127.0.0.1", 0), (7, 0), "rows", range(10), 10), server.groups["a"])
(place,) = places
place(0, (), (8,))
del server.groups["a"]  # as it is stopped
place(0, (), (8,))
"""


def test_rows_that_a_group_waits_for_come_though_another_one_that_had_them_fetched_is_stopped():
    done = subprocess.run([sys.executable, "-c", ROWS_OF_A_STOPPED_GROUP], capture_output=True, text=True, check=False)
    assert done.stdout == "memory of a\nmemory of b\n", done.stderr


def test_every_host_with_a_copy_of_rows_is_told_of_their_release():
    mine, theirs = link_pair()
    links = AgentLinks()
    with contextlib.closing(links), contextlib.closing(mine), contextlib.closing(theirs):
        hosts = [Agent(mine, n, f"host{n}", ("127.0.0.1", n), 0) for n in range(3)]
        rows = FarRows(hosts[0], links, (7, 0), encode(RowFacts(3, 24, {}).plain))
        for host in hosts[1:]:
            rows.fetch_to(host, range(3))
        del rows
        assert [list(host.released) for host in hosts] == [[(7, 0)]] * 3


def test_rows_whose_reply_is_lost_with_the_host_that_passes_it_on_are_released():
    mine, theirs = link_pair()
    links = AgentLinks()
    with contextlib.closing(links), contextlib.closing(mine), contextlib.closing(theirs):
        relay, below = hosts = [Agent(mine, n, f"host{n}", ("127.0.0.1", n), 0) for n in range(2)]
        workers = AgentWorkers("group", links, hosts)
        workers._relay_of = {below: relay}
        for number, tickets in ((7, workers._open), (8, workers._requests)):
            tickets[1][number] = MessageTicket(number)
        workers.host_is_lost(relay, "cut off")
        assert sorted(below.released) == [(7, 1), (8, 1)]


def test_a_connection_for_rows_ends_before_the_other_host_takes_this_one_for_gone(group, monkeypatch):
    monkeypatch.setenv("BANDMASTER_HOST_TIMEOUT", "2")
    assert len(group.make.submit(ROWS).result()["i"]) == N
    fetchers = [thread for thread in threading.enumerate() if thread.name == "bandmaster-fetch"]
    began = idle_time()
    for thread in fetchers:
        thread.join()
    assert fetchers and idle_time() - began < 2


# --- messages that are too large ---


def test_a_call_whose_message_is_too_large_for_a_link_fails_alone(group, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("bandmaster.hosts.link.MAX_HEAD_NBYTES", 50_000)
        waiting = group.process.submit()
        for submit in group.first.submit, group.ask:
            with pytest.raises(bm.ResourceError, match=r"a message to another host has 6.* at most 50000 fit"):
                submit([bytes(60_000)]).result()
        assert len(waiting.result()) == 5
    assert group.first(["a"]) == ["a"] * 5 and group.ask(["a"]).result() == "a"
    assert group.healthy


# --- hosts that are lost ---


def test_a_host_that_is_lost_is_named_with_its_ranks(group_to_lose):
    pids = group_to_lose.process()
    made = group_to_lose.make.submit(ROWS)
    made.exception()
    began = time.monotonic()
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(bm.WorkerDied, match=r"rank 2 .*host1.* is lost"):
        while time.monotonic() < began + 30:
            group_to_lose.process()
    assert not group_to_lose.healthy
    with pytest.raises(bm.RowsLost, match=r"^rows of Maker.make, which rank 2 has left on host .* again"):
        made.result()
    group_to_lose.restart()
    assert len(set(group_to_lose.process())) == 3


class Crowded(Maker):
    """On simulated hosts, ranks run in the process of their agent."""

    @register(Dispatch.ONE_TO_ALL)
    def have_no_threads(self, n):
        def start(name, *args):
            if left:
                raise cannot_start(f"thread {name}", RuntimeError(f"refusal {left.pop()}"))
            return start_thread(name, *args)

        left, agent.start_thread = list(range(n, 0, -1)), start


def test_an_agent_without_threads_says_so_and_goes_on():
    with bm.ResourcePool([1], backend="hosts-to-lose") as pool:
        group = bm.WorkerGroup(pool, Crowded)
        group.have_no_threads(1)
        with pytest.raises(bm.ResourceError, match="cannot start thread bandmaster-agent-ask: refusal 1"):
            bm.WorkerGroup(pool, Maker)
        group.have_no_threads(1)
        with pytest.raises(bm.CallTimeout):  # without stacks
            group.sleep.options(timeout=0.2)(1.0)
        group.have_no_threads(1)
        with pytest.raises(bm.ResourceError, match="refusal 1"):
            group.close()
        group.close()


def test_hosts_are_looked_after_though_there_was_no_thread_for_it_at_first(monkeypatch):
    def refuse(name, *_):
        raise cannot_start(f"thread {name}", RuntimeError("refused"))

    with bm.ResourcePool([1], backend="hosts-to-lose") as pool:
        with monkeypatch.context() as patched, pytest.raises(bm.ResourceError, match="heartbeat: refused"):
            patched.setattr(links, "start_thread", refuse)
            bm.WorkerGroup(pool, Maker)
        group = bm.WorkerGroup(pool, Maker)
        monkeypatch.setenv("BANDMASTER_HOST_TIMEOUT", "3")
        pid = group.process()[0]
        suspend(pid)
        try:
            with pytest.raises(bm.WorkerDied, match="no sign of life"):
                group.process.submit().result(timeout=30)
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_host_that_is_lost_as_a_rank_on_another_one_is_replaced_is_named(monkeypatch):
    real = AgentWorkers._announce

    def announce(workers, but):
        os.kill(pids[1], signal.SIGKILL)
        workers._rendezvous = {"MASTER_PORT": "1"}  # that ranks with processes of their own have
        real(workers, but)

    with bm.ResourcePool([1, 1], backend="hosts-to-lose") as pool:
        group = bm.WorkerGroup(pool, Replaceable)
        pids = group.process()
        monkeypatch.setattr(AgentWorkers, "_announce", announce)
        with pytest.raises(bm.WorkerDied, match=r"rank 1 .*host1.* is lost"):
            group.replace(0)


def suspend(pid):
    """Stop a process; its threads go on until each has noticed."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        pass


def test_a_host_that_gives_no_sign_of_life_is_lost(group_to_lose, monkeypatch):
    monkeypatch.setenv("BANDMASTER_HOST_TIMEOUT", "3")
    pids = group_to_lose.process()
    suspend(pids[2])
    try:
        began = idle_time()
        with pytest.raises(bm.WorkerDied, match=r"rank 2 .*no sign of life"):
            group_to_lose.process()
        assert idle_time() - began < 5
    finally:
        os.kill(pids[2], signal.SIGKILL)


def test_a_controller_that_was_suspended_as_it_sends_goes_on(group_to_lose, monkeypatch):
    monkeypatch.setenv("BANDMASTER_HOST_TIMEOUT", "2")
    real, suspensions = Poller.receive, [2.5]

    def receive(poller, timeout_s):
        if timeout_s == BEAT_S and suspensions:  # the kernel wakes it late, and without what has come
            time.sleep(suspensions.pop())
        else:
            real(poller, timeout_s)

    monkeypatch.setattr(Poller, "receive", receive)
    assert group_to_lose.total({"i": np.ones(8_000_000, np.int8)}) == [8_000_000] * 5
    assert not suspensions


def test_rows_are_waited_for_as_long_as_a_host_may_be_silent(group_to_lose, monkeypatch):
    monkeypatch.setenv("BANDMASTER_HOST_TIMEOUT", "2")
    pids, makes = group_to_lose.process(), [group_to_lose.make.submit(ROWS) for _ in range(2)]
    assert [made.exception() for made in makes] == [None, None]
    makes[0].result()  # from here on, there is a connection
    suspend(pids[2])
    try:
        began = idle_time()
        with pytest.raises(bm.RowsLost, match="the host does not answer any more"):
            makes[1].result()
        assert idle_time() - began < 5
    finally:
        os.kill(pids[2], signal.SIGKILL)


def test_rows_come_to_a_controller_that_was_suspended_as_they_came(monkeypatch):
    monkeypatch.setenv("BANDMASTER_HOST_TIMEOUT", "2")
    real, suspensions = RowLinks.fetch, [3.0]

    def place(*said):
        if suspensions:
            time.sleep(suspensions.pop())
        return in_memory(*said)

    monkeypatch.setattr(RowLinks, "fetch", lambda links, fetch: real(links, fetch, place))
    with bm.ResourcePool([1], backend="hosts-to-lose") as pool:
        group = bm.WorkerGroup(pool, Maker)
        made = group.make.submit({"x": np.ones(2_000_000), "i": np.arange(2_000_000)})
        assert made.result()["x"].sum() == 4_000_000 and not suspensions


class Slow:
    """A value whose decoding takes longer than a host may be silent, as that of a type that imports much."""

    def __reduce__(self):
        return time.sleep, (5,)


class Keeper(bm.Worker):
    @register(bm.TransferProtocol(bm.Broadcast(), bm.Concat("dp")))
    def keep(self):
        values = np.empty(2, object)
        values[:] = [Slow(), "d"] if self.rank else ["a", Slow()]
        return {"value": values, "wide": np.zeros((2, 100_000))}

    @register(bm.TransferProtocol(bm.Split("dp"), bm.Gather("dp")))
    def values(self, rows):
        return rows["value"].tolist()


def test_a_host_that_takes_long_to_cut_rows_is_waited_for(monkeypatch):
    monkeypatch.setenv("BANDMASTER_HOST_TIMEOUT", "4")
    with bm.ResourcePool([1, 1], backend="hosts") as pool:
        group = bm.WorkerGroup(pool, Keeper)
        kept = group.keep.submit()
        assert group.values(kept[[3, 0]]) == [["d"], ["a"]], "of the other host each, which decodes all of its rows"


# --- many hosts ---


class Odd(Maker):
    """A method of which fails on one rank."""

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank):
        if self.rank == rank:
            raise ValueError(f"rank {rank} is odd")
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value, self.rank

    @register(Dispatch.DP_PROTO)
    def double(self, rows):
        return rows * 2

    @register(Dispatch.ONE_TO_ALL)
    def cut_off(self, rank):
        """Have one rank end the connections by which its agent passes calls on."""
        for below in server_here()._below.values() if self.rank == rank else ():
            below._socket.shutdown(socket.SHUT_RDWR)

    @register(Dispatch.REQUEST)
    async def stay(self):
        await asyncio.sleep(600)

    @register(Dispatch.REQUEST, concurrency=2)
    async def total_here(self, rows):
        return int(rows["i"].sum())

    @register(Dispatch.ONE_TO_ALL)
    def have_no_network(self):
        def refuse(*args, **options):
            raise OSError(errno.ENETUNREACH, "the network is unreachable")

        socket.create_connection = refuse

    @register(Dispatch.DP_PROTO, arguments={"rank": bm.Broadcast(), "pid": bm.Broadcast()})
    def make_and_suspend(self, rows, rank, pid):
        if self.rank == rank:
            suspend(pid)
        return rows

    @register(Dispatch.REQUEST, is_idempotent=True, concurrency=2)
    async def stay_until(self, path):
        while not path.exists():
            await asyncio.sleep(0.05)
        return self.rank

    @register(Dispatch.REQUEST)
    async def stored_here(self):
        return list(server_here()._store)

    @register(Dispatch.REQUEST, concurrency=4)
    async def items(self, sizes):
        for size in sizes:
            yield np.full(size, self.rank)


@contextlib.contextmanager
def group_in_a_tree(backend):
    """A group on seven hosts, three of which pass calls on to the others."""
    with bm.ResourcePool([2, 1, 2, 1, 2, 1, 2], backend=backend) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BANDMASTER_TREE_FROM", "4")
            patch.setenv("BANDMASTER_HOST_TIMEOUT", "60")  # an agent gives no sign of life while it imports the class
            group = bm.WorkerGroup(pool, Odd)
        yield group


@pytest.fixture(scope="module")
def tree():
    with group_in_a_tree("hosts-in-a-tree") as group:
        yield group


def test_agents_of_many_hosts_pass_calls_on(tree):
    sent = {agent.host: agent.link._n_sent for agent in agents("hosts-in-a-tree").values()}
    large = np.arange(100_000)
    for _ in range(3):
        assert [rank for _, rank in tree.echo("x")] == list(range(11))
    assert all((value == large).all() for value, _ in tree.echo(large))
    asked = {agent.host for agent in agents("hosts-in-a-tree").values() if agent.link._n_sent - sent[agent.host] >= 4}
    assert len(asked) == 3
    assert tree.double(large).tolist() == (large * 2).tolist()
    assert tree.double(np.arange(3)).tolist() == [0, 2, 4]


def test_calls_that_are_passed_on_keep_their_order(tree):
    futures = [tree.echo.submit(n) if n % 3 else tree.double.submit(np.full(5, n)) for n in range(60)]
    for n, future in enumerate(futures):
        found = future.result(60)
        assert found[0][0] == n if n % 3 else found.tolist() == [2 * n] * 5


TREES_AT_ONCE = """
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from bandmaster.hosts import agent
from bandmaster.hosts.handshake import Secret

def connect(*args):
    both.wait(20)
    return real(*args)

def start(said, shows):
    return SimpleNamespace(arrivals=None, records=[], rendezvous={}), (0,)

real, agent.connect, both, secret = agent.connect, connect, threading.Barrier(2), Secret.new()
server, below = [agent.AgentServer(secret, "127.0.0.1", "test", start) for _ in range(2)]
for name in "ab":
    server.start(name, None)
with ThreadPoolExecutor(2) as threads:
    list(threads.map(lambda name: server.relay(name, [below.address], 1), "ab"))
print([ranks.below == [server._below[below.address]] for ranks in server.groups.values()])
"""


def test_groups_that_form_trees_at_once_share_the_link_between_two_agents_on_which_calls_keep_their_order():
    done = subprocess.run([sys.executable, "-c", TREES_AT_ONCE], capture_output=True, text=True, check=False)
    assert done.stdout == "[True, True]\n", done.stderr


ENDED_AS_ITS_GROUP_STARTS = """
from types import SimpleNamespace
from bandmaster.errors import PlacementError
from bandmaster.hosts import agent
from bandmaster.hosts.handshake import Secret

def group(name):
    server._below.clear()  # as if the link had ended meanwhile
    return SimpleNamespace()

server = agent.AgentServer(Secret.new(), "127.0.0.1", "test", None)
server._below[("10.0.0.1", 7)], server._group = None, group
try:
    server.relay("group", [("10.0.0.1", 7)], 1)
except PlacementError as error:
    print(error)
"""


def test_a_host_is_named_whose_link_to_another_one_ends_as_a_group_starts():
    done = subprocess.run(
        [sys.executable, "-c", ENDED_AS_ITS_GROUP_STARTS], capture_output=True, text=True, check=False
    )
    assert "lost its connection to the agent at 10.0.0.1:7, to which it has to pass" in done.stdout, done.stderr


def test_hosts_that_cannot_connect_to_each_other_are_named_as_a_group_starts():
    with bm.ResourcePool([1, 1, 1, 1], backend="hosts-to-lose") as pool, pytest.MonkeyPatch.context() as patch:
        with bm.WorkerGroup(pool, Odd) as group:
            ports = [agent.address[1] for agent in agents("hosts-to-lose").values()]
            group.have_no_network()
        patch.setenv("BANDMASTER_TREE_FROM", "4")
        place = rf"127\.0\.0\.1:({'|'.join(map(str, ports))})"
        with pytest.raises(bm.PlacementError, match=rf"host \S+ cannot connect to .* at {place}, .*: .*unreachable"):
            bm.WorkerGroup(pool, Odd)


def test_items_of_any_of_many_hosts_come_in_their_order(tree):
    sizes = [1, 30_000, 1, 2, 2, 5_000, 30_000, 3] * 2
    streams = [tree.items.options(replica=rank, maxsize=5).stream(sizes) for rank in range(11)]
    for size in sizes:
        found = [next(stream).tolist() for stream in streams]
        assert found == [[rank] * size for rank in range(11)]
    assert [list(stream) for stream in streams] == [[]] * 11


def test_rows_are_taken_on_any_of_many_hosts(tree):
    made = tree.make.submit(ROWS)
    used = tree.use.submit(made.shuffle(seed=3))
    del made  # the call still needs its rows
    assert used.result()["j"].tolist() == np.random.default_rng(3).permutation(N).tolist()


def test_rows_are_taken_by_another_way_than_the_one_by_which_a_host_was_told_to_fetch_them(tree):
    with bm.ResourcePool([1, 1, 1, 1], backend="hosts-in-a-tree") as pool:
        direct = bm.WorkerGroup(pool, Odd)
        made = direct.make.submit(ROWS)
        made.exception()
        of_host_1, total = made[N // 4 : N // 2], int(ROWS["i"][N // 4 : N // 2].sum())
        relay = tree.process()[0]  # of host3, too
        suspend(relay)
        try:
            passed_on = tree.total.submit(of_host_1)
            assert direct.total_here.options(replica=3, timeout=30)(of_host_1).result() == total
        finally:
            os.kill(relay, signal.SIGCONT)
        assert passed_on.result(30) == [total] * 11


def test_the_rank_that_fails_among_many_hosts_is_named(tree):
    for rank in (0, 3, 10):
        with pytest.raises(bm.RemoteError, match=rf"rank {rank} .*rank {rank} is odd"):
            tree.fail_on(rank)
    assert tree.fail_on(99) == list(range(11))


def test_the_loss_of_a_host_that_passes_calls_on_ends_calls_and_is_named():
    with group_in_a_tree("hosts-to-lose") as group:
        pids = dict(zip(range(11), group.process(), strict=True))
        os.kill(pids[0], signal.SIGKILL)  # the host of ranks 0 and 1
        with pytest.raises(bm.WorkerDied, match=r"rank 0 .*host0.* is lost"):
            while True:
                group.process()
        group.restart()
        assert len(set(group.process())) == 7


def test_rows_whose_replies_were_lost_with_a_host_that_passes_them_on_end_with_their_group():
    with group_in_a_tree("hosts-to-lose") as group, bm.ResourcePool([1] * 5, backend="hosts-to-lose") as pool:
        stored_here = bm.WorkerGroup(pool, Odd).stored_here.options(replica=4)  # host4, which host1 passes calls on to
        relay = group.process()[2]
        made = group.make_and_suspend.submit(ROWS, 6, relay)
        until(lambda: len(stored_here().result(30)) == 2)
        os.kill(relay, signal.SIGKILL)
        with pytest.raises(bm.WorkerDied):
            made.result(30)
        group.restart()
        until(lambda: not stored_here().result(30))


def test_requests_that_a_lost_host_has_passed_on_are_sent_again(tmp_path):
    with group_in_a_tree("hosts-to-lose") as group:
        relay = group.process()[2]
        asked = [group.stay_until.options(retries=1)(tmp_path / "end") for _ in range(11)]
        os.kill(relay, signal.SIGKILL)
        until(lambda: not group.healthy)
        (tmp_path / "end").touch()
        assert 2 not in {request.result(30) for request in asked}


def test_no_message_overtakes_one_that_is_passed_on_as_another_host_is_lost():
    with group_in_a_tree("hosts-to-lose") as group:
        pids = group.process()
        relay, below, lost = pids[2], 6, pids[8]  # of host1, which passes calls on to host4; host5
        suspend(relay)
        try:
            stays = group.stay.options(replica=below)()
            os.kill(lost, signal.SIGKILL)
            until(lambda: not group.healthy)
            stays.cancel()
        finally:
            os.kill(relay, signal.SIGCONT)
        with pytest.raises(bm.CallCancelled):
            stays.result(30)
        assert group.total_here.options(replica=below)(ROWS).result(30) == int(ROWS["i"].sum())


def test_a_rank_that_has_failed_is_let_go_on_directly(tree):
    """The host that passes calls on may be lost with the message."""
    (below,) = [agent for agent in agents("hosts-in-a-tree").values() if agent.host == "host4"]
    sent = below.link._n_sent
    with pytest.raises(bm.RemoteError):
        tree.fail_on(6)
    until(lambda: below.link._n_sent > sent)


def test_a_host_that_no_calls_can_be_passed_on_to_is_lost_though_it_answers_the_controller():
    with group_in_a_tree("hosts-to-lose") as group:
        with pytest.raises(bm.WorkerDied, match=r"rank 5 .*host3 .* is lost: host host0 cannot pass calls on to it"):
            while True:
                group.cut_off.options(timeout=30)(0)
        group.restart()
        assert len(set(group.process())) == 7


# --- who may connect ---


class Bomb:
    """Whoever unpickles this makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def connected():
    return socket.create_connection(next(iter(agents().values())).address, timeout=10)


def is_closed(sock):
    sock.settimeout(10)
    try:
        while sock.recv(1000):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("opening", [b"", MAGIC, MAGIC + bytes(32)], ids=["nothing", "magic", "nonce"])
def test_what_comes_before_the_proof_is_not_looked_into(group, tmp_path, opening):
    bomb = pickle.dumps(Bomb(tmp_path / "made"))
    with connected() as sock:
        with contextlib.suppress(OSError):  # it may be closed by now
            sock.sendall(opening + struct.pack("<II", len(bomb), 0) + bytes(16) + bomb * 3)
            sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    assert not (tmp_path / "made").exists()
    assert len(group.process()) == 5


@pytest.mark.parametrize("purpose", [Purpose.MESSAGES, Purpose.ROWS])
def test_a_wrong_secret_is_refused_by_both_ends(group, purpose):
    with connected() as sock, pytest.raises(Refused):
        greet(sock, Secret.new(), purpose)
    assert len(group.process()) == 5


def test_an_agent_of_another_version_is_taken_for_one(group, monkeypatch):
    monkeypatch.setattr(handshake, "MAGIC", MAGIC[:-1] + b"0")
    with pytest.raises(ConnectionResetError, match="another version"):
        connect(agents()["0"].address, get_backend("hosts")._links.secret, Purpose.ROWS)


def test_what_a_connection_is_for_cannot_be_changed_on_the_way():
    secret, (client, server) = Secret.new(), socket.socketpair()
    with client, server, ThreadPoolExecutor(1) as threads:
        between = SimpleNamespace(
            settimeout=client.settimeout,
            recv=client.recv,
            sendall=lambda said: client.sendall(said if said.startswith(MAGIC) else said[:-1] + bytes([Purpose.ROWS])),
        )
        welcomed = threads.submit(welcome, server, secret)
        greet(between, secret, Purpose.MESSAGES)
        with pytest.raises(Refused):
            welcomed.result(timeout=30)


def test_a_second_controller_is_not_served(group):
    with connected() as sock:
        trusted, _ = greet(sock, get_backend("hosts")._links.secret, Purpose.MESSAGES)
        assert is_closed(trusted)
    assert len(group.process()) == 5


def test_a_frame_that_is_not_authentic_ends_the_connection(group, tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "made"))
    with connected() as sock:
        trusted, _ = greet(sock, get_backend("hosts")._links.secret, Purpose.ROWS)
        trusted.sendall(struct.pack("<II", len(bomb), 0) + bytes(16) + bomb)
        assert is_closed(trusted)
    assert not (tmp_path / "made").exists()
    assert len(group.process()) == 5


def test_nothing_that_is_unpickled_can_be_changed_on_the_way(group_to_lose, monkeypatch):
    words = [f"harmless {n}" for n in range(20_000)]  # more than a frame has in its head
    assert group_to_lose.first(words) == ["harmless 0"] * 5
    send = Link._sent
    monkeypatch.setattr(
        Link, "_sent", lambda link, views: send(link, [bytes(view).replace(b"harmless", b"exploits") for view in views])
    )
    with pytest.raises(bm.WorkerDied):
        group_to_lose.first(words)


def test_silent_strangers_are_closed_and_hold_nobody_up(group):
    strangers = [connected() for _ in range(100)]
    try:
        assert len(group.process()) == 5
        assert group.total(group.make.submit(ROWS)) == [N * (N - 1) // 2] * 5
        assert all(is_closed(sock) for sock in strangers)
    finally:
        for sock in strangers:
            sock.close()


def test_with_encryption_nothing_can_be_read_or_said_without_it(monkeypatch):
    monkeypatch.setenv("BANDMASTER_TLS", "1")
    with bm.ResourcePool([1, 1], backend="encrypted") as pool:
        group = bm.WorkerGroup(pool, Maker)
        made = group.make.submit(ROWS)
        assert (group.use.submit(made.shuffle(seed=1).shuffle(seed=2)).result()["y"].shape) == (N, 4)
        assert (made.result()["x"] == ROWS["x"] * 2).all()
        agent = next(iter(get_backend("encrypted")._links.agents.values()))
        with socket.create_connection(agent.address, timeout=10) as sock:
            sock.sendall(MAGIC + bytes(32))
            assert is_closed(sock)
        assert len(group.process()) == 2


def test_a_worker_whose_link_turns_out_to_have_ended_as_it_finds_a_group_connects_anew(group):
    workers = get_backend("hosts")._links
    owner = ReachedWorkers("no door", "key", 5, "group")
    links, agent = AgentLinks(), next(iter(agents().values()))

    def ranks_of(name):
        place = FarPlace(agent.address, agent.host, name, agent.pid, workers.secret)
        with links.lock:
            return FarRanks.at(place, links, owner, 5)

    try:
        before = ranks_of("of another group").agents[0]
        before.link._socket.shutdown(socket.SHUT_RDWR)  # nothing that is received has told of the end
        ranks = ranks_of("of this one")
        assert before.lost is not None and ranks.agents[0].lost is None
    finally:
        links.close()
        owner.close("it is over")


# --- links ---


def awaited(link):
    """The next message of a link: content, and the bytes of its payloads."""
    return said(link.receive())


def said(message):
    """The content of a message, and the bytes of its payloads."""
    chunks = [[bytes(chunk) for chunk in (payload.head, *payload.buffers)] for payload in message.large.values()]
    return message.content, chunks


def payload_of(*chunks):
    return Payload(chunks[0], chunks[1:])


def link_pair(secret=None, timeout_s=10.0):
    secret = secret or Secret.new()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with ThreadPoolExecutor(1) as threads:
        welcomed = threads.submit(welcome, accepted, secret)
        mine = Link(*greet(client, secret, Purpose.MESSAGES), timeout_s=timeout_s)
        theirs = Link(*welcomed.result()[:2], timeout_s=timeout_s)
    return mine, theirs


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
@settings(max_examples=15)
@given(
    frames=st.lists(
        st.tuples(
            st.integers(0, 300_000),
            st.lists(st.lists(st.integers(0, 200_000), min_size=1, max_size=3), max_size=3),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_messages_arrive_as_they_were_sent(is_encrypted, frames):
    mine, theirs = link_pair(Secret(bytes(32), is_encrypted), timeout_s=0.0)
    try:
        sent = [((os.urandom(n),), [list(map(os.urandom, sizes)) for sizes in payloads]) for n, payloads in frames]
        for content, payloads in sent:
            mine.send(FrameKind.ASK, *content, large={n: payload_of(*chunks) for n, chunks in enumerate(payloads)})
        found = []
        while len(found) < len(sent):
            mine.pump()
            message = theirs.receive()
            if message is not None:
                found.append(said(message))
        assert found == sent
    finally:
        mine.close()
        theirs.close()


def test_a_message_without_payloads_is_sent_whole_by_an_end_that_waits():
    mine, theirs = link_pair()
    mine._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
    numbers = os.urandom(8 << 20)  # as of many rows that are to be fetched
    with contextlib.closing(mine), contextlib.closing(theirs), ThreadPoolExecutor(1) as threads:
        received = threads.submit(theirs.receive)
        assert mine.send(FrameKind.FETCH, numbers)
        assert received.result().content == (numbers,)


@pytest.mark.parametrize("is_array", [False, True], ids=["pickled", "array"])
def test_what_is_unpickled_is_authenticated(is_array):
    mine, theirs = link_pair()
    try:
        send = mine._sent
        mine._sent = lambda views: send([bytes(view).replace(b"good", b"evil") for view in views])
        chunks = (b"head", b"good") if is_array else (b"good", b"array")
        mine.send(FrameKind.ASK, large={1: payload_of(*chunks)})
        if is_array:
            assert awaited(theirs)[1] == [[b"head", b"evil"]]
        else:
            with pytest.raises(Closed, match="frame authentication failed"):
                awaited(theirs)
    finally:
        mine.close()
        theirs.close()


def test_a_frame_cannot_be_sent_twice():
    mine, theirs = link_pair()
    try:
        mine.send(FrameKind.ASK, "once")
        copy = mine._socket.dup()
        assert awaited(theirs)[0] == ("once",)
        head = pickle.dumps((FrameKind.ASK, (), "once"), protocol=5)
        sent = struct.pack("<II", len(head), 0)
        mac = mine._mac_out.copy()
        mac.update(struct.pack("<Q", 0) + sent + head)  # as an eavesdropper has seen it
        copy.setblocking(True)
        copy.sendall(sent + mac.digest() + head)
        copy.close()
        with pytest.raises(Closed, match="frame authentication failed"):
            awaited(theirs)
    finally:
        mine.close()
        theirs.close()


def test_a_link_that_waits_sends_everything_or_says_that_the_other_end_takes_nothing():
    mine, theirs = link_pair(timeout_s=0.2)
    try:
        assert mine.send(FrameKind.ASK, "head", large={1: payload_of(bytes(1000))})
        assert awaited(theirs)[0] == ("head",)
        with pytest.raises(Closed, match="does not answer any more"):
            mine.send(FrameKind.ASK, large={1: payload_of(bytes(50_000_000))})
        with pytest.raises(Closed, match="does not answer any more"):
            mine.receive()
    finally:
        mine.close()
        theirs.close()


def test_a_link_that_takes_what_is_sent_slowly_is_alive():
    mine, theirs = link_pair(timeout_s=0.0)
    try:
        mine.send(FrameKind.ASK, large={1: payload_of(b"", bytes(50_000_000))})
        assert mine.has_unsent
        before = mine.heard_at
        while theirs.receive() is None:
            mine.pump()
        assert mine.heard_at > before
    finally:
        mine.close()
        theirs.close()


def test_a_segment_that_is_to_be_sent_is_not_reused_before_the_other_end_has_taken_it():
    mine, theirs = link_pair(timeout_s=0.0)
    writer = SegmentWriter()
    with contextlib.closing(mine), contextlib.closing(theirs), contextlib.closing(writer):
        for number in (1, 2):  # as an agent receives calls, which it passes on to another agent that is slow
            payload = writer.reserve([1, 20_000_000])
            payload.buffers[0][:] = bytes([number]) * 20_000_000
            mine.send(FrameKind.ASK, large={number: payload})
            del payload  # the ranks of this host have run the call
        found = []
        while len(found) < 2:
            mine.pump()
            if (message := theirs.receive()) is not None:
                found += [set(payload.buffers[0]) for payload in message.large.values()]
        assert found == [{1}, {2}]
        assert not mine.has_unsent
        writer.release()
        assert not writer.has_leases


@pytest.mark.slow
def test_any_number_of_arrays_is_sent():
    mine, theirs = link_pair(timeout_s=0.0)
    n = 1_100_000
    with contextlib.closing(mine), contextlib.closing(theirs):
        mine.send(FrameKind.ASK, large={1: payload_of(b"head", *[b"x"] * n)})
        while (message := theirs.receive()) is None:
            mine.pump()
        assert len(message.large[1].buffers) == n


@pytest.mark.parametrize("timeout_s", [5, 9, 30, 1e6])
def test_an_idle_link_ends_within_the_time_that_a_host_may_be_silent(monkeypatch, timeout_s):
    monkeypatch.setenv("BANDMASTER_HOST_TIMEOUT", str(timeout_s))
    for link in link_pair():
        with contextlib.closing(link):
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            idle_s, each_s, n, limit_ms = [
                link._socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names
            ]
            assert min(timeout_s, 32_767) - 2 <= idle_s + n * each_s < timeout_s
            assert limit_ms == 0, "it would count the time in which a stopped process reads nothing"


def test_a_host_whose_process_does_not_read_is_not_cut_off(monkeypatch):
    monkeypatch.setenv("BANDMASTER_HOST_TIMEOUT", "1")
    mine, theirs = link_pair(timeout_s=0.0)
    with contextlib.closing(mine), contextlib.closing(theirs):
        mine.send(FrameKind.ASK, large={1: payload_of(b"", bytes(50_000_000))})
        time.sleep(2)  # longer than a host may be silent
        assert mine.has_unsent and not mine.is_cut
        while theirs.receive() is None:
            mine.pump()


FORKED = """
import os, signal
from test_agents import link_pair
mine, theirs = link_pair(timeout_s=5.0)
fork = os.fork()
if not fork:
    signal.pause()
mine.close()
try:
    theirs.receive()
except Exception as error:
    print(error)
os.kill(fork, signal.SIGKILL)
"""


def test_a_fork_does_not_keep_a_link_open():
    folders = os.pathsep.join([os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run([sys.executable, "-c", FORKED], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "the peer closed the connection\n", done.stderr
