"""Colocated roles: a worker of each in one process per slot, and a group of each."""

import copy
import gc
import os
import threading
import weakref

import numpy as np
import pytest

import bandmaster as bm
from bandmaster import Concat, Dispatch, Gather, Mesh, Split, TransferProtocol, register


class Actor(bm.Worker):
    def __init__(self, start, step=1):
        self.version, self.step = start, step
        self.seen_at_first = sorted(self.roles)

    @register(Dispatch.DP_PROTO)
    def act(self, rows):
        return rows + self.roles["critic"].bonus

    @register(Dispatch.ONE_TO_ALL)
    def update(self, by=0):
        self.version += by or self.step
        return self.version

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        return os.getpid(), self.rank, dict(self.mesh.shape), self.seen_at_first, sorted(self.roles)

    @register(Dispatch.ONE_TO_ALL)
    async def later(self, value):
        return value, self.rank

    @register(Dispatch.ONE_TO_ALL)
    def counted(self, n):
        yield from range(n)

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, ranks):
        if self.rank in ranks:
            raise ValueError("a bad batch")
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def die_on(self, ranks):
        if self.rank in ranks:
            os._exit(3)

    def unregistered(self, x):
        return "actor", x, self.rank

    def copy_self(self):
        return copy.deepcopy(self).version


class Critic(bm.Worker):
    def __init__(self, bonus=0, fails_on=()):
        self.bonus, self.told = bonus, []
        if self.rank in fails_on:
            raise KeyError("no weights")

    @register(TransferProtocol(Split("tp"), Concat("tp")))
    def act(self, rows):
        return rows * 2

    @register(TransferProtocol(bm.Broadcast(), Gather("tp")))
    def where(self):
        return os.getpid(), self.rank, dict(self.mesh.shape)

    @register(Dispatch.ONE_TO_ALL)
    def told_so_far(self):
        return self.told

    def on_restart(self, state):
        self.told.append(("restart", state))

    def on_replace(self, rank, state):
        self.told.append(("replace", rank, state))


class Both(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def add_up(self):
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        total = torch.tensor([self.rank + 1.0])
        dist.all_reduce(total)
        return total.item()


@pytest.fixture(scope="module")
def pool(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield pool


@pytest.fixture(scope="module")
def group(pool):
    meshes = {"critic": Mesh(dp=1, tp=2)}
    with bm.colocate(pool, meshes=meshes, actor=(Actor, 5), critic=bm.ClassWithInitArgs(Critic, bonus=10)) as group:
        group.actor.later(0)  # starts the thread of async methods, which stays
        yield group


def test_each_role_has_its_own_methods_and_mesh_in_shared_processes(group):
    rows = np.arange(5)
    assert group.actor.act(rows).tolist() == [10, 11, 12, 13, 14], "which asks the critic in its own process"
    assert group.critic.act(rows).tolist() == [0, 2, 4, 6, 8], "a method of the same name"
    actors, critics = group.actor.where(), group.critic.where()
    assert [pid for pid, *_ in actors] == [pid for pid, *_ in critics]
    assert [rank for _, rank, *_ in actors] == [rank for _, rank, *_ in critics] == [0, 1]
    assert actors[0][2:] == ({"dp": 2}, [], ["actor", "critic"])
    assert critics[1][2] == {"dp": 1, "tp": 2}
    assert (group.actor.mesh, group.critic.mesh) == (Mesh(dp=2), Mesh(dp=1, tp=2))
    assert group.role_names == ("actor", "critic")


class Refined(bm.Worker):
    @register(Dispatch.DP_PROTO, mesh="rollout")
    def generate(self, rows):
        return [(row, self.rank, sorted(self.meshes)) for row in rows]


def test_a_role_may_have_several_meshes(pool):
    meshes = {"actor": {"train": Mesh(dp=2), "rollout": Mesh(dp=1, tp=2)}}
    with bm.colocate(pool, meshes=meshes, actor=Refined) as group:
        assert group.actor.generate([1, 2]) == [(1, 0, ["rollout", "train"]), (2, 0, ["rollout", "train"])]
        assert group.actor.meshes == meshes["actor"]


def test_a_role_is_called_in_all_ways_that_a_group_is(group):
    actor = group.actor
    assert actor.later(3) == [(3, 0), (3, 1)]
    assert actor.later.submit(4).result(timeout=30) == [(4, 0), (4, 1)]
    assert actor.execute_all_sync("unregistered", [1, 2]) == [("actor", 1, 0), ("actor", 2, 1)]
    assert actor.execute_rank_zero_sync("unregistered", 1) == ("actor", 1, 0)
    assert actor.update.options(timeout=30)(by=1) == [actor.execute_rank_zero_sync("update", 1) - 1] * 2
    assert sorted((item.rank, item.result()) for item in actor.counted.stream(2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert group.critic.execute_all_sync("told_so_far") == [[], []]
    assert [future.result()[1] for future in actor.execute_all_async("unregistered", [1, 2])] == [1, 2]
    assert {"act", "update", "where"} <= set(dir(actor))
    assert {"actor", "critic"} <= set(dir(group))
    with pytest.raises(AttributeError, match=r"Critic\.on_restart is not registered"):
        group.critic.on_restart(1)
    with pytest.raises(AttributeError, match="has no attribute 'reward'"):
        group.reward.act(1)
    with pytest.raises(bm.UsageError, match="has no role 'reward'; its roles are actor, critic"):
        group.role("reward")


def test_a_failure_names_the_roles_class_rank_and_group_and_the_group_stays_usable(group):
    with pytest.raises(bm.RemoteError, match=r"Actor\.fail_on failed on rank 1 \(dp=1, .*\.actor\)") as caught:
        group.actor.fail_on([1])
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(bm.ArgumentError, match=r"Actor\.update\(\) got an unexpected keyword argument 'to'"):
        group.actor.update(to=3)
    assert group.critic.act(np.ones(2)).tolist() == [2, 2]


def test_a_role_lives_as_long_as_somebody_uses_it(pool):
    actor = bm.colocate(pool, actor=(Actor, 1), critic=Critic).actor
    assert actor.update() == [2, 2]


@pytest.mark.parametrize("method", ["restart", "close", "__enter__"])
def test_what_is_about_the_processes_is_asked_of_the_colocated_group(group, method):
    name = "close" if method == "__enter__" else method
    with pytest.raises(AttributeError, match=rf"shares its processes with the other roles; call {name}\(\) of the co"):
        getattr(group.actor, method)
    assert isinstance(group.actor, bm.WorkerGroup)
    assert group.actor.fail_on([]) == [0, 1]


def test_what_is_set_for_the_colocated_group_is_set_for_all_roles(pool):
    with bm.colocate(pool, self=Critic, cls=Critic) as group:
        group.set_default_options(timeout=np.float32(30))
        with pytest.raises(bm.UsageError, match="timeout"):
            group.set_default_options(timeout="long")
        assert group.self.told_so_far() == [[], []]
        assert group.cls.told_so_far.options(grace=1).submit()._call.site.limits().timeout == 30


class Shares(bm.Worker):
    def __init__(self, given):
        self.given = given

    @register(Dispatch.ONE_TO_ALL)
    def add(self, item):
        self.given.append(item)
        return self.given


def test_roles_do_not_share_what_their_constructors_were_given(pool):
    given = []
    with bm.colocate(pool, a=(Shares, given), b=(Shares, given)) as group:
        assert group.a.add(1) == [[1], [1]]
        assert group.b.add(2) == [[2], [2]]


@pytest.mark.backends("inprocess")
def test_the_workers_of_a_closed_group_are_gone_at_once(pool):
    group = bm.colocate(pool, actor=(Actor, 1), critic=Critic)
    gone = [weakref.ref(worker) for worker in group.actor.workers]
    gc.disable()
    try:
        group.close()
        assert [worker() for worker in gone] == [None, None]
    finally:
        gc.enable()


class HookWithoutState(bm.Worker):
    def on_restart(self): ...


class NoHooks(bm.Worker):
    on_restart = on_replace = None

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


@pytest.mark.backends("inprocess", "local")
def test_hooks_that_do_not_fit_are_found_before_anything_is_done(pool):
    with bm.colocate(pool, bad=HookWithoutState, good=NoHooks) as group:
        with pytest.raises(bm.ArgumentError, match=r"HookWithoutState\.on_restart\(\) got too many"):
            group.restart()
        assert group.healthy
    with bm.colocate(pool, good=NoHooks) as group:
        before = group.good.pid()
        with pytest.raises(bm.UsageError, match=r"define a method on_replace.* in the worker class of good"):
            group.replace(0)
        group.restart()
        assert (group.good.pid() == before) == (before[0] == os.getpid())
    with pytest.raises(bm.ClosedError):
        group.replace(0)


@pytest.mark.backends("local")
def test_a_callback_tells_of_a_death(pool):
    with bm.colocate(pool, actor=(Actor, 1), critic=Critic) as group:
        told = threading.Event()
        group.critic.on_death(lambda _: told.set())
        with pytest.raises(bm.WorkerDied):
            group.actor.die_on([0])
        assert told.wait(timeout=10)
        assert len(group.actor.workers) == 2


def test_a_constructor_that_fails_ends_all_roles(pool):
    with pytest.raises(bm.ConstructorError, match=r"actor_critic\.__init__ failed on rank 1 .*no weights") as caught:
        bm.colocate(pool, actor=(Actor, 1), critic=bm.ClassWithInitArgs(Critic, fails_on=[1]))
    assert isinstance(caught.value.__cause__, KeyError)
    with bm.colocate(pool, critic=Critic) as group:
        assert group.critic.told_so_far() == [[], []]


def test_restart_constructs_all_roles_again_and_tells_each_its_part(pool):
    with bm.colocate(pool, actor=(Actor, 1), critic=Critic) as group:
        actor, critic = group.actor, group.critic
        assert actor.update() == [2, 2]
        group.restart({"critic": "resumed"})
        assert actor.update() == [2, 2], "the same object goes on"
        assert critic.told_so_far() == [[("restart", "resumed")]] * 2
        with pytest.raises(
            bm.UsageError, match=r"restart\(\) got a state for 'actor', but only roles with a method on"
        ):
            group.restart({"actor": 1})
        with pytest.raises(bm.UsageError, match=r"define a method on_replace.* in the worker class of actor"):
            group.replace(1)


@pytest.mark.backends("local", "ray")
def test_a_death_is_that_of_all_roles(pool):
    with bm.colocate(pool, actor=(Actor, 1), critic=Critic) as group:
        with pytest.raises(bm.WorkerDied, match=r"Actor\.die_on lost its process on rank 1"):
            group.actor.die_on([1])
        with pytest.raises(bm.WorkerDied, match=r"Critic\.told_so_far lost its process on rank 1"):
            group.critic.told_so_far()
        assert not group.actor.healthy
        group.restart()
        assert group.actor.healthy


@pytest.mark.backends("local")
def test_a_rank_of_all_roles_is_replaced(pool):
    with bm.colocate(pool, first=Critic, second=(Critic, 3)) as group:
        before = [pid for pid, *_ in group.first.execute_all_sync("where")]
        group.replace(1, {"second": "s"})
        after = [pid for pid, *_ in group.second.execute_all_sync("where")]
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]
        assert group.first.told_so_far() == [[("replace", 1, None)]] * 2
        assert group.second.told_so_far() == [[("replace", 1, "s")]] * 2


class Joined(Critic):
    @classmethod
    def why_not_replaced(cls, mesh):
        return f"{mesh.shape['tp']} ranks start together" if "tp" in mesh.shape else ""


def test_a_role_is_asked_with_its_own_mesh_whether_a_rank_can_be_replaced(pool):
    meshes, alone = {"critic": Mesh(tp=2)}, pytest.raises(bm.UsageError, match="2 ranks start together")
    with bm.colocate(pool, meshes=meshes, critic=Joined) as group, alone:
        group.replace(0)


@pytest.mark.backends("local")
def test_roles_share_one_process_group(pool):
    with bm.colocate(pool, one=Both, other=Both) as group:
        assert group.one.add_up() == [3.0, 3.0]
        assert group.other.add_up() == [3.0, 3.0]


MISTAKES = {
    "no role": (lambda pool: bm.colocate(pool), bm.UsageError, "at least one role"),
    "a pool of another kind": (lambda pool: bm.colocate([2], a=Actor), bm.ArgumentError, "must be a ResourcePool"),
    "no worker class": (lambda pool: bm.colocate(pool, a=dict), bm.UsageError, "not a subclass of bandmaster.Worker"),
    "a worker": (
        lambda pool: bm.colocate(pool, a=bm.Worker()),
        bm.UsageError,
        "got a Worker in place of its class; pass the class, and the arguments of its constructor beside it",
    ),
    "a name that is no identifier": (
        lambda pool: bm.colocate(pool, **{"a/b": Critic}),
        bm.UsageError,
        "must be an identifier without a leading underscore, got 'a/b'",
    ),
    "the mesh of a group": (
        lambda pool: bm.colocate(pool, mesh=Mesh(dp=2), a=Critic),
        bm.UsageError,
        r"a role cannot be called 'mesh'.*give meshes={role: Mesh",
    ),
    "meshes without roles": (
        lambda pool: bm.colocate(pool, meshes=Mesh(dp=2), a=Critic),
        bm.MeshError,
        "meshes of colocate must be a dict by role",
    ),
    "a misspelt option": (
        lambda pool: bm.colocate(pool, start_timout=5, a=Critic),
        bm.UsageError,
        "role 'start_timout': 5 is not a subclass of bandmaster.Worker",
    ),
    "a name that the group needs": (
        lambda pool: bm.colocate(pool, restart=Critic),
        bm.UsageError,
        "a role cannot be called 'restart'",
    ),
    "arguments that do not fit": (
        lambda pool: bm.colocate(pool, actor=Actor),
        bm.ArgumentError,
        r"Actor\.__init__\(\) missing a required argument: 'start'",
    ),
    "a mesh of no role": (
        lambda pool: bm.colocate(pool, meshes={"actr": Mesh(dp=2)}, actor=(Actor, 1)),
        bm.UsageError,
        "meshes names 'actr', but the roles are actor",
    ),
    "a mesh of another size": (
        lambda pool: bm.colocate(pool, meshes={"actor": Mesh(dp=3)}, actor=(Actor, 1)),
        bm.MeshError,
        r"Mesh\(dp=3\) has 3 ranks, but .* has 2 slots",
    ),
    "a mesh without an axis of a protocol": (
        lambda pool: bm.colocate(pool, actor=(Actor, 1), critic=Odd),
        bm.MeshError,
        r"Odd\.move uses Split\('ep'\), but Mesh\(dp=2\) has no axis 'ep'",
    ),
}


class Odd(bm.Worker):
    @register(TransferProtocol(Split("ep"), Concat("ep")))
    def move(self, rows): ...


@pytest.mark.parametrize(("make", "error", "words"), MISTAKES.values(), ids=MISTAKES)
def test_what_makes_no_sense_is_refused_before_anything_is_started(pool, group, make, error, words):
    with pytest.raises(error, match=words):
        make(pool)
    assert group.actor.fail_on([]) == [0, 1]
