"""Names of groups: one open group has a name, a new one of it takes its place, and the others get readable ones."""

import logging
import os
import subprocess
import sys
import textwrap

import pytest

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register

pytestmark = pytest.mark.backends("inprocess", "local")


class Actor(bm.Worker):
    def __init__(self, number=0):
        self.number = number

    @register(Dispatch.ONE_TO_ALL)
    def get(self):
        return self.number


class Critic(Actor):
    pass


def test_a_group_is_named_by_its_class_and_a_number_if_that_is_taken(make_pool):
    pool = make_pool([1])
    first, second = bm.WorkerGroup(pool, Actor), bm.WorkerGroup(pool, Actor)
    assert (first.name, second.name, bm.WorkerGroup(pool, Critic).name) == ("Actor", "Actor-2", "Critic")
    assert second.worker_names == ["Actor-2_0:0"]
    first.close()
    assert bm.WorkerGroup(pool, Actor).name == "Actor", "it is free again"
    assert second.get() == [0]
    assert bm.WorkerGroup(make_pool([1], name_prefix="train-"), Actor).name == "train-Actor"


def test_a_new_group_takes_the_place_of_the_one_of_its_name(make_pool, caplog):
    pool = make_pool([2])
    other = bm.WorkerGroup(pool, Actor, 7, name="other")
    former = bm.WorkerGroup(pool, Actor, 1, name="actor")
    with caplog.at_level(logging.INFO, logger="bandmaster"):
        group = bm.WorkerGroup(pool, Critic, 2, name="actor")
    assert "group 'actor' is closed, because a new group of that name replaces it" in caplog.text
    assert (group.get(), other.get()) == ([2, 2], [7, 7])
    why = "because a new group of that name replaced it; use that one, or create it again if its start has failed"
    with pytest.raises(bm.ClosedError, match=f"group 'actor' was closed, {why}"):
        former.get()
    bm.WorkerGroup(pool, Actor, name="actor").close()
    assert bm.WorkerGroup(pool, Actor, 3, name="actor").get() == [3, 3]


def test_a_mistake_leaves_the_former_group_alone(make_pool):
    pool = make_pool([2])
    group = bm.WorkerGroup(pool, Actor, 1, name="actor")
    for wrong in ({"mesh": Mesh(dp=3)}, {"nonsense": 1}, {"output": 3}, {"logging": "LOUD"}):
        with pytest.raises(bm.UsageError):
            bm.WorkerGroup(pool, Actor, name="actor", **wrong)
    assert group.get() == [1, 1]


def test_a_group_with_a_prefix_gets_a_number_too_if_its_name_is_taken(make_pool):
    pool = make_pool([1])
    first, second = (bm.WorkerGroup(pool, Actor, n, name_prefix="my") for n in (1, 2))
    assert (first.name, second.name) == ("myActor", "myActor-2")
    assert (first.get(), second.get()) == ([1], [2])


def test_a_name_that_bandmaster_ps_could_not_show_is_refused(make_pool):
    pool = make_pool([1])
    assert bm.WorkerGroup(pool, Actor, name="ö" * 60).get() == [0]
    with pytest.raises(bm.UsageError, match="the name of a WorkerGroup must have at most 120 bytes, got 122: 'öö"):
        bm.WorkerGroup(pool, Actor, name="ö" * 61)
    assert bm.WorkerGroup(pool, Actor, name_prefix="x" * 115).get() == [0]
    with pytest.raises(bm.UsageError, match=r"at most 120 bytes, got 121: 'x+Actor'; give it a shorter one with name="):
        bm.WorkerGroup(pool, Actor, name_prefix="x" * 116)


def test_colocated_groups_have_names(make_pool):
    pool = make_pool([1])
    first = bm.colocate(pool, actor=Actor, critic=Critic)
    second = bm.colocate(pool, actor=Actor, critic=Critic)
    assert (first.name, second.name, second.critic.name) == ("actor_critic", "actor_critic-2", "actor_critic-2.critic")
    both = bm.colocate(pool, name="both", actor=Actor)
    _plain = bm.WorkerGroup(pool, Critic, name="both")
    with pytest.raises(bm.ClosedError, match="a new group of that name replaced it"):
        both.actor.get()
    again = bm.colocate(pool, name="both", actor=(Actor, 4))
    assert again.actor.get() == [4]


@pytest.mark.backends("inprocess")
def test_a_cell_that_makes_the_pool_as_well_can_be_run_again(make_pool, monkeypatch):
    """The slots of the former pool go to the new one, although a variable still refers to it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("bandmaster.backends.machine.count_gpus", lambda: 2)
    former = make_pool([2], use_gpu=True)
    _replaced = bm.WorkerGroup(former, Actor, name="actor")
    pool = make_pool([2], use_gpu=True)
    group = bm.WorkerGroup(pool, Actor, 5, name="actor")
    assert group.get() == [5, 5]
    with pytest.raises(bm.PlacementError):
        bm.WorkerGroup(former, Critic)
    group.close()
    pool.close()
    assert bm.WorkerGroup(former, Critic).get() == [0, 0], "the former pool takes slots when it needs them"


@pytest.mark.backends("ray")
def test_the_slots_on_a_cluster_go_to_the_pool_of_the_cell_that_is_run_again(make_pool):
    groups = []
    for n in range(2):
        pool = make_pool([2], cpus_per_worker=8, placement_timeout=20)  # all that there is, which Ray frees soon
        groups.append(bm.WorkerGroup(pool, Actor, n, name="actor"))
    assert groups[1].get() == [1, 1]
    with pytest.raises(bm.ClosedError, match="a new group of that name replaced it"):
        groups[0].get()


@pytest.mark.backends("inprocess")
def test_slots_with_other_groups_are_kept(make_pool, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("bandmaster.backends.machine.count_gpus", lambda: 2)
    former = make_pool([2], use_gpu=True)
    kept = bm.WorkerGroup(former, Critic, 1)
    _replaced = bm.WorkerGroup(former, Actor, name="actor")
    with pytest.raises(bm.PlacementError, match="held by pool"):
        bm.WorkerGroup(make_pool([1], use_gpu=True), Actor, name="actor")
    assert kept.get() == [1, 1]


def test_close_all_ends_groups_and_pools(make_pool):
    first, second = make_pool([1]), make_pool([2])
    groups = [bm.WorkerGroup(first, Actor), bm.WorkerGroup(second, Actor, name="actor"), bm.colocate(second, a=Actor)]
    bm.close_all()
    for group in groups:
        with pytest.raises(bm.ClosedError):
            group.describe()
    for pool in (first, second):
        with pytest.raises(bm.ClosedError):
            bm.WorkerGroup(pool, Actor)
    bm.close_all()
    assert bm.WorkerGroup(make_pool([1]), Actor).name == "Actor"


def test_tables_show_where_ranks_are_and_what_can_be_called(make_pool):
    pool = make_pool([2])
    group = bm.WorkerGroup(pool, Actor, mesh=Mesh(pp=1, dp=2, tp=1), name="actor")
    header = group.describe().splitlines()[1].split()
    assert header[:5] == ["rank", "worker", "dp", "host", "pid"]
    shown = group._repr_html_()
    assert "<th>rank</th><th>worker</th><th>dp</th><th>host</th><th>pid</th><th>device</th>" in shown
    assert "<td>get()</td><td>Dispatch.ONE_TO_ALL</td>" in shown
    assert "<td>cpu</td>" in shown
    roles = bm.colocate(pool, actor=Actor)
    assert "<td>get()</td>" in roles.actor._repr_html_()
    group.close()
    assert "<th>pid</th>" not in group._repr_html_()
    assert "<td>actor_0:1</td>" in group._repr_html_()


class Fails(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def step(self, rows):
        raise ValueError("on purpose")


def test_errors_show_axes_that_are_larger_than_one(make_pool):
    group = bm.WorkerGroup(make_pool([2]), Fails, mesh=Mesh(pp=1, dp=2, tp=1))
    with pytest.raises(bm.RemoteError, match=r"rank 0 \(dp=0, host ") as caught:
        group.step([1, 2])
    assert caught.value.coordinates[1] == {"pp": 0, "dp": 1, "tp": 0}


def test_pytest_shows_no_frames_of_this_library(backend, tmp_path):
    program = f"""
        import bandmaster as bm

        class Fails(bm.Worker):
            @bm.register(bm.Dispatch.DP_PROTO)
            def step(self, rows):
                raise ValueError("on purpose")

        def test_it():
            with bm.ResourcePool([1], backend={backend!r}) as pool:
                bm.WorkerGroup(pool, Fails).step([1])

        def test_a_mistake():
            with bm.ResourcePool([1], backend={backend!r}) as pool:
                bm.WorkerGroup(pool, Fails).step(1)
    """
    (tmp_path / "test_fails.py").write_text(textwrap.dedent(program))
    shown = {}
    for full in ("0", "1"):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_fails.py"]
        own = {**os.environ, "BANDMASTER_FULL_TRACEBACKS": full}
        run = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=60)
        shown[full] = run.stdout
    assert "bandmaster/groups/" not in shown["0"], shown["0"]
    assert "bandmaster/groups/method.py" in shown["1"], shown["1"]
    for text in shown.values():
        assert "> " in text and "step([1])" in text and 'raise ValueError("on purpose")' in text
        assert "2 failed" in text
