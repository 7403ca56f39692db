"""What a worker knows of itself, and what torch needs to find its peers."""

import errno
import os
import socket
import struct
from functools import partial

import pytest

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register

ATTRIBUTES = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")


class WithSuper(bm.Worker):
    def __init__(self):
        super().__init__()
        self.seen = {name: getattr(self, name) for name in (*ATTRIBUTES, "device", "coordinates")}

    def look(self):
        return self.seen, self.mesh


class WithoutSuper(bm.Worker):
    def __init__(self):
        self.seen = {name: getattr(self, name) for name in (*ATTRIBUTES, "device", "coordinates")}

    def look(self):
        return self.seen, self.mesh


class WithNew(WithoutSuper):
    def __new__(cls, *args):
        return super().__new__(cls)


class WithoutInit(bm.Worker):
    def look(self):
        return {name: getattr(self, name) for name in (*ATTRIBUTES, "device", "coordinates")}, self.mesh


@pytest.mark.backends("inprocess", "local")
@pytest.mark.parametrize("cls", [WithSuper, WithoutSuper, WithNew, WithoutInit])
def test_attributes_are_set_before_the_constructor_runs(make_pool, cls):
    mesh = Mesh(pp=3, dp=1)
    group = bm.WorkerGroup(make_pool([2, 1]), cls, mesh=mesh)
    seen, meshes = zip(*group.execute_all_sync("look"), strict=True)
    expected = [(0, 3, 0, 2, 0), (1, 3, 1, 2, 0), (2, 3, 0, 1, 1)]
    assert [tuple(worker[name] for name in ATTRIBUTES) for worker in seen] == expected
    assert [worker["coordinates"] for worker in seen] == [{"pp": rank, "dp": 0} for rank in range(3)]
    assert {worker["device"] for worker in seen} == {"cpu"}
    assert set(meshes) == {mesh}


class Environment(bm.Worker):
    def __init__(self):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        self.environment = {name: os.environ.get(name) for name in names}

    def look(self):
        return os.getpid(), self.environment


def test_the_usual_variables_are_set_wherever_a_worker_has_a_process_of_its_own(make_pool):
    group = bm.WorkerGroup(make_pool([2, 1]), Environment)
    pids, environments = zip(*group.execute_all_sync("look"), strict=True)
    if os.getpid() in pids:
        assert set(pids) == {os.getpid()}, "then none of them is set: it is the controller's environment"
        assert environments[0]["RANK"] == os.environ.get("RANK")
        return
    assert len(set(pids)) == 3
    assert [env["RANK"] for env in environments] == ["0", "1", "2"]
    assert [env["WORLD_SIZE"] for env in environments] == ["3"] * 3
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "1", "0"]
    assert [env["LOCAL_WORLD_SIZE"] for env in environments] == ["2", "2", "1"]
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments}) == 1


class Collective(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def rendezvous(self):
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    @register(Dispatch.ONE_TO_ALL)
    def sums_along(self, axes):
        """Along each axis of the group's mesh, the sum of the ranks' numbers."""
        import torch
        import torch.distributed as dist

        shape, names = tuple(self.mesh.shape.values()), self.mesh.axis_names
        device_mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        sums = []
        for axis in axes:
            total = torch.tensor([float(self.rank)])
            dist.all_reduce(total, group=device_mesh.get_group(axis))
            sums.append(total.item())
        return sums

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1) * (self.rank + 1)
        dist.all_reduce(total)
        dist.barrier()
        return total.item()

    @register(Dispatch.ONE_TO_ALL)
    def leave(self):
        import torch.distributed as dist

        dist.destroy_process_group()


@pytest.mark.backends("local", "ray")
def test_init_process_group_needs_no_arguments_and_its_port_cannot_be_taken(make_group):
    group = make_group(2, Collective)
    address = group.rendezvous()[0]
    with pytest.raises(OSError, match="in use"):
        socket.create_server(address)
    assert group.all_reduce() == [3.0, 3.0]
    group.leave()
    assert not _can_connect_from(address), "another program's connection would keep the next process group from it"
    assert group.all_reduce() == [3.0, 3.0], "again, in a new process group"


def _can_connect_from(address):
    """Whether Linux would choose this port for a connection of a program that does not care which it gets."""
    IP_LOCAL_PORT_RANGE = 51  # since Linux 6.3; Python 3.11 does not name it
    with socket.create_server((address[0], 0)) as elsewhere, socket.socket() as connection:
        try:
            connection.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("HH", address[1], address[1]))
        except OSError:
            pytest.skip("this Linux cannot limit a connection to one port")
        try:
            connection.connect(elsewhere.getsockname())
        except OSError as error:
            assert error.errno == errno.EADDRNOTAVAIL
            return False
        return True


@pytest.fixture(scope="module")
def gloo():
    """Gloo in this process, where it keeps a pipe from its first use on."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    dist.destroy_process_group()


@pytest.mark.backends("inprocess", "local")
def test_one_rank_has_a_process_group_of_its_own_and_leaves_nothing(gloo, make_group):
    import torch.distributed as dist

    before = dict(os.environ)
    group, other = make_group(1, Collective), make_group(1, Collective)
    assert group.all_reduce() == [1.0]
    other.close()
    group.leave()
    assert group.all_reduce() == [1.0]
    group.close()
    assert not dist.is_initialized() and dict(os.environ) == before


@pytest.mark.backends("local", "ray")
def test_a_device_mesh_has_the_axes_of_the_groups_mesh(make_group):
    group = make_group(bm.Mesh(dp=2, tp=2), Collective)
    assert group.sums_along(["dp", "tp"]) == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


# --- registrations ---


class Base(bm.Worker):
    @register(Dispatch.DP_PROTO, arguments={"table": bm.Broadcast()})
    def look_up(self, rows, table):
        return [table[row] for row in rows]

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def save(self):
        return "saved"


class Derived(Base):
    save = None

    def look_up(self, rows, table, more=0):
        return [value + more for value in super().look_up(rows, table)]

    async def where(self):
        return f"rank {super().where()}"


class Further(Derived):
    @register(Dispatch.ONE_TO_ALL)
    def look_up(self, rows, table, more=0):
        return super().look_up(rows, table, more)


@pytest.mark.backends("inprocess", "local")
def test_a_method_that_overrides_a_registered_one_is_registered_like_it(make_group):
    group = make_group(2, Derived)
    assert group.look_up([0, 1, 1], [5, 6], more=10) == [15, 16, 16], "the rows are split, the table is not"
    assert group.where() == ["rank 0", "rank 1"]
    with pytest.raises(AttributeError, match="save"):
        group.save()
    assert str(group.look_up).startswith("<group method Derived.look_up(rows, table, more=0)")


@pytest.mark.backends("inprocess")
def test_a_registration_of_its_own_comes_before_that_of_the_method_it_overrides(make_group):
    assert make_group(2, Further).look_up([1], [5, 6], more=1) == [[7], [7]]


@pytest.mark.backends("inprocess")
def test_an_override_without_a_parameter_that_its_registration_names_is_refused(make_group):
    class Other(Base):
        def look_up(self, rows, **more):
            return rows

    with pytest.raises(bm.ProtocolError, match=r"names 'table', but .*Other\.look_up has only .*@register"):
        make_group(2, Other)


class Config(dict):
    def __getattr__(self, name):
        return self[name]


class Anything:
    def __getattr__(self, name):
        return self


class SlottedConfig:
    __slots__ = ()

    def __getattr__(self, name):
        raise KeyError(name)


class Configured(bm.Worker):
    config, anything, slotted = Config(lr=0.1), Anything(), SlottedConfig()

    @register(Dispatch.ONE_TO_ALL)
    def lr(self):
        return self.config.lr


class timed:
    """A decorator that stands for its function, and forwards its attributes."""

    def __init__(self, function):
        self.function = function

    def __get__(self, worker, cls):
        return self if worker is None else partial(self, worker)

    def __call__(self, *args):
        return self.function(*args)

    def __getattr__(self, name):
        if name == "function":  # pickle asks before it is there
            raise AttributeError(name)
        return getattr(self.function, name)


@pytest.mark.backends("inprocess")
def test_a_decorator_may_stand_above_a_registration(make_group):
    class Timed(bm.Worker):
        @timed
        @register(Dispatch.ONE_TO_ALL)
        def echo(self, value):
            return value

    assert make_group(1, Timed).echo(3) == [3]


@pytest.mark.backends("inprocess", "local")
def test_a_class_may_have_attributes_that_compute_theirs(make_group):
    assert make_group(1, Configured).lr() == [0.1]
