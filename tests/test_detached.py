"""Detached groups: workers that outlive their controller, and controllers in other processes that attach to them."""

import os
import queue
import re
import signal
import sys
import tempfile
import time
from dataclasses import replace

import cloudpickle
import pytest
from controller import Controller

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.cli.discovery import discover
from bandmaster.cli.processes import shown

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the classes of scripts are


class Notes(bm.Worker):
    def __init__(self, start="start"):
        self.notes = [start]

    @register(Dispatch.DP_PROTO)
    def over_dp(self, rows):
        return [(row, self.rank) for row in rows]

    @register(bm.TransferProtocol(bm.Broadcast(), bm.Gather("dp", tp=0)))
    def note(self, value):
        self.notes.append(value)
        return list(self.notes)

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def read(self, fifo):
        """Wait on rank 0 until what writes to the named pipe closes it."""
        if self.rank == 0:
            with open(fifo) as file:
                file.read()


class NotesGroup(bm.GroupOf[Notes], Notes):
    pass


class Other(bm.Worker):
    pass


class OtherGroup(bm.GroupOf[Other], Other):
    pass


class Fails(bm.Worker):
    def __init__(self):
        raise ValueError("no weights")


class Waits(bm.Worker):
    """A worker whose construction does not end."""

    def __init__(self, begun):
        with open(begun, "w"):
            pass
        signal.pause()


# --- what controllers do ---


def start_cluster(kept):
    from ray.cluster_utils import Cluster

    kept["cluster"] = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    return kept["cluster"].address


def stop_cluster(kept):
    kept["cluster"].shutdown()


def connect(kept):
    """Connect for good: groups and pools find a connection and leave it."""
    import ray

    ray.init(log_to_driver=False, logging_level="ERROR")


def start(kept, name, cls, n, *args):
    if "pool" not in kept:
        kept["pool"] = bm.ResourcePool([n], backend="ray", is_detached=True)
    kept[name] = bm.WorkerGroup(kept["pool"], cls, *args, name=name, is_detached=True)
    return kept[name].execute_all_sync("pid") if hasattr(cls, "pid") else None


def attach(kept, name, group_class=bm.WorkerGroup):
    kept[name] = group_class.attach(name)
    return repr(kept[name])


def call(kept, name, method, *args):
    return getattr(kept[name], method)(*args)


def over_dp_twice(kept, name, rows):
    return kept[name].over_dp(kept[name].over_dp.submit(rows))


def pid_within(kept, name, timeout):
    return kept[name].pid.options(timeout=timeout)()


def watch_deaths(kept, name):
    kept["died"] = queue.SimpleQueue()
    kept[name].on_death(lambda error: kept["died"].put(error))


def next_death(kept):
    return str(kept["died"].get(timeout=20))


def is_healthy(kept, name):
    return kept[name].healthy


def close_pool(kept):
    kept.pop("pool").close()


def note_often(kept, name, values):
    """Submit calls without waiting for them; returns what the last one has seen on each rank."""
    return [kept[name].note.submit(value) for value in values][-1].result()


def wait_until_dead(kept, name, deadline_s=20):
    deadline = time.monotonic() + deadline_s
    while name in left(kept)[0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polling for Ray


def wait_until_job_ended(kept, pid, deadline_s=20):
    from ray._private.state import jobs

    deadline = time.monotonic() + deadline_s
    while not all(job["IsDead"] for job in jobs() if job["DriverPid"] == pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polling for Ray


def left(kept):
    """The names of the living actors, and how many placement groups stand."""
    import ray

    actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    standing = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    return sorted(actors), len(standing)


def set_version(kept, name, version):
    from bandmaster.backends.ray_detached import _Record

    record = _Record.read(name)
    replace(record, version=version).write(overwrite=True)
    return record.version


# --- the controllers ---


@pytest.fixture(scope="module")
def make_controller():
    """Makes controllers on one cluster, which is started for this module."""
    made = []
    with tempfile.TemporaryDirectory(prefix="ray") as directory:  # where Ray notes the cluster that runs
        host = Controller(RAY_TMPDIR=directory)
        address = host.run(start_cluster)

        def make():
            made.append(Controller(RAY_ADDRESS=address))
            return made[-1]

        yield make
        for controller in made:
            controller.kill()
        host.run(stop_cluster)
        host.end()


@pytest.fixture(scope="module")
def one(make_controller):
    """A controller that stays."""
    controller = make_controller()
    controller.submit(connect)
    return controller


@pytest.fixture(scope="module")
def two(make_controller, one):
    """Another controller that stays. Each of them imports Ray while the other one does."""
    controller = make_controller()
    controller.run(connect)
    one.result()
    return controller


@pytest.fixture(scope="module")
def actor(make_controller, one, two):
    """The process ids of the workers of a detached group, whose controller has ended."""
    controller = make_controller()
    pids = controller.run(start, "actor", Notes, 2, "first")
    assert controller.run(call, "actor", "note", "second") == [["first", "second"]] * 2
    controller.end()
    return pids


def test_workers_outlive_their_controller_and_are_called_by_those_that_attach(actor, one, two):
    assert one.run(attach, "actor") == (
        "<WorkerGroup actor of 2 on ResourcePool([2], backend='ray'), Mesh(dp=2), attached>"
    )
    assert one.run(call, "actor", "over_dp", [10, 20, 30]) == [(10, 0), (20, 0), (30, 1)]
    assert one.run(over_dp_twice, "actor", [1, 2]) == [((1, 0), 0), ((2, 1), 1)], "rows that stay on the ranks"
    assert one.run(call, "actor", "pid") == actor
    table = one.run(call, "actor", "describe")
    assert all(f"actor_0:{rank}  {rank} " in table and str(pid) in table for rank, pid in enumerate(actor))
    one.run(call, "actor", "close")
    two.run(attach, "actor", NotesGroup)
    assert two.run(call, "actor", "note", "third") == [["first", "second", "third"]] * 2
    with pytest.raises(bm.ClosedError, match=r"has let go of its workers; WorkerGroup\.attach\('actor'\)\.end\(\)"):
        one.run(call, "actor", "end")
    with pytest.raises(bm.ArgumentError, match="must be Other or a subclass, but detached group 'actor' has Notes"):
        one.run(attach, "actor", OtherGroup)


def test_each_rank_runs_the_calls_of_two_controllers_in_the_order_of_each(actor, one, two):
    for controller in (one, two):
        controller.run(attach, "actor")
    mine, others = [f"one {n}" for n in range(50)], [f"two {n}" for n in range(50)]
    one.submit(note_often, "actor", mine)
    two.submit(note_often, "actor", others)
    one.result(), two.result()
    for notes in one.run(call, "actor", "note", "end"):
        assert [note for note in notes if note in mine] == mine
        assert [note for note in notes if note in others] == others


def test_a_busy_group_can_be_attached_and_its_calls_show_their_stacks(actor, one, two, tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    one.run(attach, "actor")
    one.submit(call, "actor", "read", fifo)
    with open(fifo, "w"):  # once the worker opens it
        two.run(attach, "actor")
        with pytest.raises(bm.CallTimeout, match=r"got no reply from rank 0 (?s:.*)in read"):
            two.run(pid_within, "actor", 0.5)
        assert f" {actor[0]} " in two.run(call, "actor", "describe")
    one.result()
    assert two.run(call, "actor", "pid") == actor


def test_names_are_taken_once_and_unknown_ones_are_answered_with_those_that_there_are(actor, one):
    with pytest.raises(bm.UsageError, match=r"a detached group called 'actor' already: WorkerGroup\.attach\('actor'\)"):
        one.run(start, "actor", Notes, 1)
    assert one.run(left) == (["actor_0:0", "actor_0:1"], 1), "nothing was started"
    with pytest.raises(bm.UsageError, match=r"no detached group is called 'critic' .*; its detached groups: 'actor'"):
        one.run(attach, "critic")


def test_another_version_of_bandmaster_is_refused(actor, one):
    version = one.run(set_version, "actor", "0.0.1")
    with pytest.raises(bm.UsageError, match=rf"started by bandmaster 0\.0\.1, but this is {re.escape(version)}"):
        one.run(attach, "actor")
    one.run(set_version, "actor", version)


@pytest.mark.parametrize(("method", "args"), [("restart", ()), ("replace", (0,)), ("turn", ())])
def test_what_only_the_first_controller_can_do_is_refused(actor, one, method, args):
    one.run(attach, "actor")
    with pytest.raises(
        bm.UsageError, match=rf"{method}\(\) of group 'actor' is for the controller that has started it"
    ):
        one.run(call, "actor", method, *args)


def test_the_command_line_shows_detached_groups_and_does_not_take_them_for_orphans(actor):
    (group,) = [group for group in discover().groups if group.name == "actor"]
    assert (group.is_detached, group.is_orphan) == (True, False)
    assert re.search(r"^actor +detached +0-1 of 2 ", shown(discover()), re.MULTILINE)


def test_a_group_with_a_dead_rank_can_be_attached_and_ended(actor, one, two):
    one.run(attach, "actor")
    one.run(watch_deaths, "actor")
    os.kill(actor[1], signal.SIGKILL)
    two.run(wait_until_dead, "actor_0:1")
    assert "on rank 1 (dp=1, " in one.run(next_death)
    with pytest.raises(bm.WorkerDied, match=r"Notes\.note lost its process on rank 1 \(dp=1"):  # it was attached before
        one.run(call, "actor", "note", "never")
    two.run(attach, "actor")
    with pytest.raises(bm.WorkerDied, match=r"on rank 1 \(dp=1, .*it had died before this controller attached to it"):
        two.run(call, "actor", "note", "never")
    assert two.run(is_healthy, "actor") is False
    assert re.search(r"^1 +actor_0:1 +1 .* dead ", two.run(call, "actor", "describe"), re.MULTILINE)
    os.kill(actor[0], signal.SIGKILL)
    two.run(wait_until_dead, "actor_0:0")
    two.run(attach, "actor")
    two.run(call, "actor", "end")
    assert two.run(left) == ([], 0)
    with pytest.raises(bm.UsageError, match="its detached groups: none"):
        two.run(attach, "actor")
    one.run(call, "actor", "end")  # nothing: that group has ended


def test_slots_are_released_with_the_last_group_on_them(one, two):
    one.run(start, "actor", Notes, 1)
    one.run(start, "critic", Notes, 1)
    two.run(attach, "actor")
    two.run(attach, "critic")
    two.run(call, "critic", "end")
    assert two.run(left) == (["actor_0:0"], 1), "'actor' still uses them"
    one.run(call, "actor", "end")
    assert two.run(left) == ([], 1), "the pool still has them"
    assert one.run(start, "actor", Notes, 1), "the name is free"
    one.run(call, "actor", "end")
    one.run(close_pool)
    assert two.run(left) == ([], 0)


def test_another_controller_ends_a_group_while_the_first_one_has_its_pool(one, two):
    one.run(start, "actor", Notes, 1)
    two.run(attach, "actor")
    one.run(call, "actor", "restart")
    with pytest.raises(bm.WorkerDied):
        two.run(call, "actor", "note", 1)
    two.run(attach, "actor")
    assert two.run(call, "actor", "note", 1) == [["start", 1]]
    two.run(call, "actor", "end")
    with pytest.raises(bm.WorkerDied):
        one.run(call, "actor", "note", 1)
    with pytest.raises(bm.ClosedError, match="the slots of group 'actor' were released by another controller"):
        one.run(start, "actor", Notes, 1)
    one.run(close_pool)
    assert one.run(left) == ([], 0)


def test_a_group_that_cannot_be_constructed_leaves_no_name(one, two):
    with pytest.raises(bm.ConstructorError, match="no weights"):
        one.run(start, "actor", Fails, 1)
    with pytest.raises(bm.UsageError, match="its detached groups: none"):
        two.run(attach, "actor")
    one.run(close_pool)
    assert two.run(left) == ([], 0)


def test_what_a_controller_leaves_that_dies_as_it_starts_a_group_is_ended_by_the_next_one(
    make_controller, one, two, tmp_path
):
    os.mkfifo(begun := tmp_path / "begun")
    controller = make_controller()
    controller.submit(start, "actor", Waits, 1, begun)
    with open(begun):  # once the constructor opens it
        pass
    with pytest.raises(bm.UsageError, match="has not started: attach to it later"):
        one.run(attach, "actor")
    controller.kill()
    two.run(wait_until_job_ended, controller.process.pid)
    with pytest.raises(bm.UsageError, match="has not started: its controller has ended meanwhile, so start it again"):
        one.run(attach, "actor")
    assert one.run(start, "actor", Notes, 1)
    one.run(call, "actor", "end")
    one.run(close_pool)
    assert two.run(left) == ([], 0)


# --- what is refused before anything is started ---


@pytest.mark.parametrize("other", ["inprocess", "local"])
def test_other_backends_have_no_detached_groups(other):
    pool = bm.ResourcePool([1], backend=other, is_detached=True)
    with pytest.raises(bm.UsageError, match=rf"needs a pool on backend 'ray': workers on backend '{other}' end with"):
        bm.WorkerGroup(pool, Notes, name="actor", is_detached=True)


def test_a_detached_group_needs_a_detached_pool_and_a_name():
    pool = bm.ResourcePool([1], backend="ray")
    with pytest.raises(
        bm.UsageError, match=r"slots that outlive its controller: ResourcePool\(..., is_detached=True\)"
    ):
        bm.WorkerGroup(pool, Notes, name="actor", is_detached=True)
    pool = bm.ResourcePool([1], backend="ray", is_detached=True)
    with pytest.raises(bm.UsageError, match=r"needs a name .* name='actor'"):
        bm.WorkerGroup(pool, Notes, is_detached=True)
    with pytest.raises(bm.UsageError, match="both name='actor' and name_prefix='my-'"):
        bm.WorkerGroup(pool, Notes, name="actor", name_prefix="my-", is_detached=True)
    with pytest.raises(bm.UsageError, match="is_detached of WorkerGroup must be True or False, got 'actor'"):
        bm.WorkerGroup(pool, Notes, is_detached="actor")


@pytest.mark.parametrize("name", [3, "", "two\nlines", None])
def test_attach_takes_a_name(name):
    with pytest.raises(
        bm.UsageError, match=r"name of WorkerGroup\.attach must be a string of printable characters, got"
    ):
        bm.WorkerGroup.attach(name)


def test_a_ray_that_ends_with_the_controller_is_refused(monkeypatch):
    from bandmaster.backends import ray as backend

    monkeypatch.setattr(backend, "_running_cluster", lambda: None)
    pool = bm.ResourcePool([1], backend="ray", is_detached=True)
    with pytest.raises(bm.UsageError, match="detached groups need a Ray cluster that outlives this process: start one"):
        bm.WorkerGroup(pool, Notes, name="actor", is_detached=True)
    with pytest.raises(bm.UsageError, match="detached groups need a Ray cluster that outlives this process: start one"):
        bm.WorkerGroup.attach("actor")


def test_colocated_groups_are_not_attached_to():
    with pytest.raises(bm.UsageError, match="there is no ColocatedGroup to attach to"):
        bm.ColocatedGroup.attach("actor")


def test_a_name_names_any_group_and_end_is_close_where_it_is_not_detached():
    with bm.ResourcePool([2], backend="inprocess") as pool:
        group = bm.WorkerGroup(pool, Notes, name="actor")
        assert (group.name, group.worker_names, group.is_detached) == ("actor", ["actor_0:0", "actor_0:1"], False)
        group.end()
        group.end()
        assert repr(group).endswith(", closed>")
