"""What forks and earlier versions of verl rely on beyond verl 0.9.1. Runs of their own code: `tests/verl/clients`."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import bandmaster as bm
from bandmaster.compat.fork import installed
from bandmaster.single_controller.base import decorator
from bandmaster.single_controller.base.decorator import Dispatch, get_predefined_dispatch_fn, register
from bandmaster.single_controller.base.megatron.worker import DistGlobalInfo, DistRankInfo, MegatronWorker
from bandmaster.single_controller.base.worker import Worker
from bandmaster.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from bandmaster.single_controller.ray.base import create_colocated_worker_cls, func_generator, get_random_string
from bandmaster.single_controller.ray.megatron import MegatronRayWorkerGroup, NVMegatronRayWorkerGroup

inprocess = pytest.mark.backends("inprocess")


@pytest.fixture
def pool(make_pool):
    return make_pool([2])


# --- DataProtos ---


@dataclass
class DataProto:
    """The attributes that every fork's DataProto has, and no method to cut it."""

    batch: TensorDict | None = None
    non_tensor_batch: dict = field(default_factory=dict)
    meta_info: dict = field(default_factory=dict)

    def __len__(self):  # as in verl 0.1
        return self.batch.batch_size[0]

    @staticmethod
    def concat(parts):
        batch = None if parts[0].batch is None else torch.cat([part.batch for part in parts])
        names = parts[0].non_tensor_batch
        columns = {name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in names}
        return type(parts[0])(batch, columns, parts[0].meta_info)


class CutsOtherwise(DataProto):
    def slice(self, index):  # as in PRIME
        raise AssertionError("it is not called with one index")


@pytest.fixture(params=[DataProto, CutsOtherwise])
def proto_class(request, monkeypatch):
    made = type("DataProto", (request.param,), {"__module__": "verl.protocol"})
    protocol = ModuleType("verl.protocol")
    protocol.DataProto, protocol.DataProtoFuture = made, type("DataProtoFuture", (), {})
    monkeypatch.setitem(sys.modules, "verl.protocol", protocol)
    return made


class Rows(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def same(self, data):
        data.meta_info["rank"] = self.rank
        return data

    @register(Dispatch.DP_COMPUTE_PROTO)
    def metrics(self, data):
        return type(data)(meta_info={"metrics": {"n": len(data)}})


@inprocess
def test_a_dataproto_of_any_fork_is_cut(pool, proto_class):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Rows))
    columns = {"ids": np.array(["a", "b", "c"], dtype=object)}
    data = proto_class(TensorDict({"x": torch.arange(3)}, batch_size=[3]), columns, {"step": 1})
    back = group.same(data)
    assert (back.batch["x"].tolist(), back.non_tensor_batch["ids"].tolist()) == ([0, 1, 2], ["a", "b", "c"])
    assert data.meta_info == {"step": 1}, "each part has a dict of its own"
    assert group.metrics(data).meta_info == {"metrics": {"n": 2}}, "of a DataProto without rows"


# --- names ---


class Named(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def tell(self, text):
        self.print_rank0(text, self.rank, sep=":", end=";")

    @register(Dispatch.ONE_TO_ALL)
    def variables(self, *names):
        return [os.environ.get(name) for name in names]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, rows):
        return rows * 2

    @register(Dispatch.ONE_TO_ALL)
    def rank_plus(self, x):
        return self.rank + x


@inprocess
def test_print_rank0_prints_on_rank_0(pool, capsys):
    RayWorkerGroup(pool, RayClassWithInitArgs(Named)).tell("here")
    assert capsys.readouterr().out == "here:0;"


@pytest.mark.backends("local")
def test_workers_know_their_place_on_the_node(pool):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Named))
    assert group.variables("RAY_LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE") == [["0", "2"], ["1", "2"]]


@inprocess
def test_a_method_made_by_func_generator_calls_the_group(pool):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Named))
    split, joined = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO).values()
    double = func_generator(group, "double", split, joined, group.execute_all, True)
    assert double(np.arange(3)).tolist() == [0, 2, 4] and double.__name__ == "double"
    _, as_list = get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL).values()
    assert func_generator(group, "rank_plus", lambda _, x: ((x,), {}), as_list, group.execute_rank_zero, True)(5) == 5


def test_a_random_string_has_letters_and_digits():
    made = {get_random_string(6) for _ in range(20)}
    assert len(made) == 20 and all(len(each) == 6 and each.isalnum() and each.isascii() for each in made)


def test_a_pool_says_where_its_slots_are():
    pool = RayResourcePool([2, 1], use_gpu=False)
    assert (pool.local_world_size_list(), pool.local_rank_list()) == ([2, 2, 1], [0, 1, 0])
    assert (pool.n_gpus_per_node, pool.accelerator_type) == (2, None)


class Client(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def clients(self):
        return sys.modules["verl.utils.transferqueue_utils"].made


@inprocess
def test_workers_become_clients_of_the_transfer_queue(pool, monkeypatch):
    """The signatures of verl 0.6 and 0.7; the function itself is verl's."""
    utils, made = ModuleType("verl.utils.transferqueue_utils"), []
    utils.create_transferqueue_client, utils.made = (lambda **given: made.append(given)), made
    for name in ("verl", "verl.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.utils.transferqueue_utils", utils)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Client))
    config = type("Config", (), {"transfer_queue": "queue"})
    group.create_transferqueue_client(config)
    group.create_transferqueue_client("controllers", "storages", role="rollout")
    assert made == [
        {"client_id": "worker_0", "config": "queue"},
        {"client_id": "worker_1", "config": "queue"},
        {"client_id": "rollout_worker_0", "controller_infos": "controllers", "storage_infos": "storages"},
        {"client_id": "rollout_worker_1", "controller_infos": "controllers", "storage_infos": "storages"},
    ]


def test_actors_are_found_and_called_as_in_earlier_versions(ray_cluster):
    """By the register center and the names of actors, with their place on the node, by a function of one's own."""
    ray = ray_cluster
    with RayResourcePool([2], use_gpu=False, name_prefix="centered") as pool:
        group = RayWorkerGroup(pool, create_colocated_worker_cls({"named": RayClassWithInitArgs(Named)}))
        role = group.spawn(["named"])["named"]
        prefix = role.name_prefix
        assert group.worker_names == [f"{prefix}WorkerDict_0:{rank}" for rank in range(2)]
        center = ray.get_actor(f"{prefix}_register_center")
        node = ray.get_runtime_context().get_node_id()
        assert ray.get(center.get_worker_info.remote()) == {0: node, 1: node}
        address = ray.get(center.get_rank_zero_info.remote())
        assert (address["MASTER_ADDR"], address["MASTER_PORT"]) == (role.master_address, role.master_port)
        attached = RayWorkerGroup.from_detached(worker_names=group.worker_names, ray_cls_with_init=group._inner._cls)
        assert attached.name_prefix == prefix
        assert role.variables("RAY_LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE") == [["0", "2"], ["1", "2"]]
        to_all, as_list = get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL).values()
        assert func_generator(role, "rank_plus", to_all, as_list, role.execute_all, True)(x=1) == [1, 2]
        handle = group.workers[0]
        assert ray.get(handle._get_node_ip.remote()) == ray.util.get_node_ip_address()
        assert ray.get(handle._get_free_port.remote()) > 0 and ray.get(handle.named_rank_plus.remote(2)) == 2
        group.close()
        again = RayWorkerGroup(pool, RayClassWithInitArgs(Named), name_prefix=prefix)
        center = ray.get_actor(f"{again.name_prefix}_register_center")
        assert ray.get(center.get_rank_zero_info.remote())["MASTER_PORT"] == again.master_port
        again.restart()
        assert ray.get(center.get_rank_zero_info.remote())["MASTER_PORT"] == again.master_port


# --- Megatron ---

TP, CP, DP, PP = 2, 1, 2, 2


class Megatron(MegatronWorker):
    """A worker of a Megatron with 2 x 2 x 2 ranks, in Megatron's order; Megatron itself has no part in it."""

    def get_megatron_rank_info(self):
        tp, dp, pp = self.rank % TP, self.rank // TP % DP, self.rank // (TP * DP)
        return DistRankInfo(tp_rank=tp, dp_rank=dp, pp_rank=pp)

    def get_megatron_global_info(self):
        return DistGlobalInfo(tp_size=TP, dp_size=DP, pp_size=PP)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def log_probs(self, rows):
        return {"x": rows["x"], "rank": np.full(len(rows["x"]), self.rank)}

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def log_probs_later(self, rows):
        return self.log_probs(rows)

    @register(Dispatch.MEGATRON_COMPUTE)
    def own(self, x):
        return x, self.rank

    @register(Dispatch.MEGATRON_PP_AS_DP_PROTO)
    def generate(self, rows):
        return {"x": rows["x"], "rank": np.full(len(rows["x"]), self.rank)}

    @register(Dispatch.MEGATRON_PP_AS_DP)
    def generate_parts(self, x):
        return x, self.rank

    @register(Dispatch.MEGATRON_PP_ONLY)
    def names(self):
        return self.rank

    def init_megatron(self, default_megatron_kwargs=None):
        self.given = default_megatron_kwargs

    @register(Dispatch.ONE_TO_ALL)
    def was_given(self):
        return self.given


@pytest.fixture
def megatron(make_pool):
    return NVMegatronRayWorkerGroup(make_pool([8]), RayClassWithInitArgs(Megatron))


@inprocess
def test_megatrons_modes_are_those_of_hybridflow(megatron):
    rows = {"x": np.arange(6)}
    found = megatron.log_probs(rows)
    assert (found["x"].tolist(), found["rank"].tolist()) == ([0, 1, 2, 3, 4, 5], [4, 4, 4, 6, 6, 6])
    assert megatron.log_probs_later(rows).get()["rank"].tolist() == [4, 4, 4, 6, 6, 6]
    assert megatron.own(["a", "b"]) == [("a", 4), ("b", 6)]
    found = megatron.generate({"x": np.arange(4)})
    assert dict(zip(found["rank"].tolist(), found["x"].tolist(), strict=True)) == {0: 0, 4: 1, 2: 2, 6: 3}
    assert megatron.generate_parts(list("abcd")) == [("a", 0), ("c", 2), ("b", 4), ("d", 6)]
    assert megatron.names() == [0, 4]
    assert (megatron.tp_size, megatron.dp_size, megatron.pp_size, megatron.cp_size) == (2, 2, 2, 1)
    assert megatron.get_megatron_rank_info(rank=5) == DistRankInfo(tp_rank=1, dp_rank=0, pp_rank=1, cp_rank=0)
    assert megatron.get_megatron_global_info().dp_size == 2
    with pytest.raises(IndexError, match="rank 8 is not among the 8"):
        megatron.get_megatron_rank_info(8)


class WithContext(Megatron):
    """A worker of a Megatron of 8 ranks with context parallelism 2 in place of tensor parallelism."""

    def get_megatron_rank_info(self):
        return DistRankInfo(tp_rank=0, cp_rank=self.rank % 2, dp_rank=self.rank // 2 % 2, pp_rank=self.rank // 4)

    def get_megatron_global_info(self):
        return DistGlobalInfo(tp_size=1, cp_size=2, dp_size=2, pp_size=2)


@inprocess
def test_megatrons_modes_know_of_context_parallelism(make_pool):
    group = NVMegatronRayWorkerGroup(make_pool([8]), RayClassWithInitArgs(WithContext))
    assert group.own(["a", "b"]) == [("a", 4), ("b", 6)], "of the last stage and of one context rank"
    assert group.generate_parts(list("abcdefgh")) == list(zip("aecgbfdh", range(8), strict=True))


@inprocess
def test_stages_that_have_exchanged_their_rows_are_collected_once(megatron, monkeypatch):
    monkeypatch.setattr(decorator, "_stages_share_rows", False)
    decorator.let_stages_share_rows()
    assert megatron.generate_parts(list("abcd")) == [("a", 0), ("c", 2)]


@inprocess
def test_megatrons_groups_have_roles(make_pool):
    given = create_colocated_worker_cls({"actor": RayClassWithInitArgs(Megatron)})
    group = NVMegatronRayWorkerGroup(resource_pool=make_pool([8]), ray_cls_with_init=given)
    actor = group.spawn(prefix_set=["actor"])["actor"]
    assert isinstance(actor, NVMegatronRayWorkerGroup) and issubclass(given.cls, MegatronWorker)
    assert actor.log_probs({"x": np.arange(2)})["rank"].tolist() == [4, 6]


@inprocess
def test_megatrons_workers_are_initialized_by_the_group(make_pool):
    given = RayClassWithInitArgs(Megatron)
    group = MegatronRayWorkerGroup(make_pool([8]), given, default_megatron_kwargs={"seed": 1})
    assert group.was_given() == [{"seed": 1}] * 8


@inprocess
def test_megatrons_modes_need_megatrons_group(make_pool):
    group = RayWorkerGroup(make_pool([8]), RayClassWithInitArgs(Megatron))
    with pytest.raises(bm.ProtocolError, match="NVMegatronRayWorkerGroup"):
        group.log_probs({"x": np.arange(2)})


# --- the switch ---

FORKS_WORKER = """
from .decorator import Dispatch, register
from .register_center.ray import create_worker_group_register_center


class DistRankInfo:
    tp_rank: int
    dp_rank: int
    pp_rank: int


class Helper:
    size = 3

    def helped(self):
        return "helped"


class Worker(Helper):
    kind = "forked"
    low, high = [bound for bound in (1, 2)]
    _local_rank: int

    def __init__(self):
        raise AssertionError("it is not the fork's worker")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self):
        return self.kind, self.rank

    @property
    def is_first(self):
        return self.rank == 0

    def above(self):
        return super().__repr__()

    def __own(self):
        return self.helped(), self.size, self.low, self.high

    try:
        import a_module_that_is_missing
    except ImportError:
        def all_of_it(self):
            return self.__own()
    else:
        def with_the_module(self):
            return self.__own()
"""

PROGRAM = """
from bandmaster import ResourcePool
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

class Mine(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def first(self):
        return self.is_first, hasattr(self, "above"), self.all_of_it()

with ResourcePool([2], backend="inprocess") as pool:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Mine))
    print(group.where(), group.first())
    from bandmaster.single_controller.base import decorator
    print(decorator._stages_share_rows)
try:
    import verl.single_controller.remote
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.fixture
def fork(tmp_path):
    package = tmp_path / "fork" / "verl"
    base = package / "single_controller" / "base"
    base.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.3.1.fork"\n')
    (base / "worker.py").write_text(FORKS_WORKER)
    (tmp_path / "program.py").write_text(PROGRAM)
    return package


def switched(program, *path):
    command = [sys.executable, "-m", "bandmaster.compat.verl", str(program)]
    ours = Path(bm.__file__).parents[1]  # the one that is tested, which need not be the one that is installed
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ours]))}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_what_a_fork_has_added_to_its_worker_is_taken_over(fork, tmp_path):
    run = switched(tmp_path / "program.py", fork.parent)
    all_of_it = ("helped", 3, 1, 2)
    taken_over = f"{[('forked', 0), ('forked', 1)]} {[(True, False, all_of_it), (False, False, all_of_it)]}"
    missing = "verl.single_controller.remote has no counterpart in bandmaster.single_controller"
    assert run.stdout.splitlines()[:2] == [taken_over, "True"], run.stderr
    assert run.stdout.splitlines()[2].startswith(missing)
    assert f"this is verl 0.3.1.fork of {fork}; those that have been tried are " in run.stderr
    (line,) = [line for line in run.stderr.splitlines() if "taken over" in line]
    names = ["kind", "low", "high", "where", "is_first", "above", "_Worker__own", "all_of_it", "size", "helped"]
    reasons = {"above": " not, because it calls super()"}
    assert line.endswith(": " + ", ".join(f"Worker.{name}{reasons.get(name, '')}" for name in names))


def test_the_version_is_that_of_the_verl_that_is_imported(fork, tmp_path):
    """A first one lies beside the program, which then imports another one, whose worker cannot be read."""
    beside = tmp_path / "verl"
    (beside / "version").mkdir(parents=True)
    (beside / "__init__.py").touch()
    (beside / "version" / "version").write_text("0.2.0.dev\n")
    path = fork / "single_controller" / "base" / "worker.py"
    path.write_text("import a_module_that_is_missing\n" + FORKS_WORKER)
    program = f"import sys; sys.path.insert(0, {str(fork.parent)!r})\nimport verl.single_controller"
    (tmp_path / "program.py").write_text(program)
    run = switched(tmp_path / "program.py")
    assert f"this is verl 0.2.0.dev of {beside}" in run.stderr
    assert f"the program imports verl 0.3.1.fork of {fork}" in run.stderr
    assert "Worker.where not, because of ModuleNotFoundError: No module named 'a_module_that_is_missing'" in run.stderr


def test_a_verl_is_found_that_a_finder_of_an_editable_installation_knows(tmp_path, monkeypatch):
    (package := tmp_path / "src_of_verl").mkdir()
    (package / "__init__.py").write_text('__version__ = "0.7.0"\n')

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return spec_from_file_location(name, package / "__init__.py") if name == "verl" else None

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert installed() == ("0.7.0", package)
