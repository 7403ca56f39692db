"""Torch in workers: process groups along the axes of a mesh, seeds, checkpoints that resume on another mesh."""

import errno
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl
from bandmaster.testing.recording import random_states, restore_random_states


class Torch(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def ranks_along(self, *axes):
        """The ranks that a collective along some axes reaches, and the dims of the DeviceMesh."""
        mesh = rl.device_mesh(self, *axes)
        assert rl.device_mesh(self, *axes) is mesh
        whole = mesh.get_group() if mesh.ndim == 1 else None
        seen = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(whole))]
        dist.all_gather(seen, torch.tensor([self.rank]), whole)
        return [int(rank) for rank in seen], mesh.mesh_dim_names, mesh.mesh.tolist()

    @register(Dispatch.ONE_TO_ALL)
    def drawn(self, number, alike=()):
        torch.tensor(0)
        rl.seed(self, number, alike)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    @register(Dispatch.ONE_TO_ALL)
    def train(self, path, n_before, n_after):
        """Train for some steps, save, and train on; the losses."""
        self._make()
        losses = [self._step(step) for step in range(n_before)]
        rl.save(path, self.model, self.optimizer, step=n_before)
        return losses + [self._step(step) for step in range(n_before, n_before + n_after)]

    @register(Dispatch.ONE_TO_ALL)
    def resume(self, path, n_steps, n_groups):
        self._make(n_groups)
        begin = rl.load(path, self.model, self.optimizer, step=0)["step"]
        return begin, [self._step(step) for step in range(begin, begin + n_steps)]

    @register(Dispatch.ONE_TO_ALL)
    def train_and_keep(self, folder, n_steps):
        """Resume from the newest of the checkpoints that are kept, and train on, with a checkpoint after each step."""
        self._make()
        checkpoints = rl.Checkpoints(folder, keep=2)
        begin = checkpoints.load(self.model, self.optimizer, step=0)["step"]
        losses = []
        for step in range(begin, begin + n_steps):
            losses.append(self._step(step))
            checkpoints.save(step + 1, self.model, self.optimizer, step=step + 1)
        checkpoints.wait()
        return begin, losses, checkpoints.numbers()

    def _make(self, n_groups=1):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        fully_shard(self.model, mesh=rl.device_mesh(self, "dp"))
        weights = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW([{"params": weights[i::n_groups]} for i in range(n_groups)], lr=0.1)

    def _step(self, step):
        rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        loss = (self.model(rows) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


@pytest.fixture(scope="module")
def four():
    with bm.ResourcePool([4]) as pool:
        yield bm.WorkerGroup(pool, Torch, mesh=Mesh(dp=2, tp=2).refine(gen_tp=1))


@pytest.mark.parametrize("axes", [["dp"], ["tp"], ["gen_tp"], ["micro_dp"], ["micro_tp"]])
def test_a_collective_along_an_axis_reaches_the_ranks_that_the_mesh_names(four, axes):
    for rank, (seen, names, ranks) in enumerate(four.ranks_along(*axes)):
        group = next(group for group in four.mesh.groups(*axes) if rank in group)
        assert tuple(seen) == tuple(ranks) == group
        assert names == tuple(axes)


def test_a_device_mesh_of_several_axes(four):
    for _, names, ranks in four.ranks_along():
        assert (names, ranks) == (("dp", "tp"), [[0, 1], [2, 3]])
    for rank, (_, names, ranks) in enumerate(four.ranks_along("gen_tp", "micro_dp")):
        own = [0, 1] if rank < 2 else [2, 3]
        assert (names, ranks) == (("gen_tp", "micro_dp"), [own])
    with pytest.raises(bm.RemoteError, match=r"has no axis 'pp'"):
        four.ranks_along("pp")
    with pytest.raises(bm.RemoteError, match=r"axes 'tp' and 'micro_tp' .* overlap"):
        four.ranks_along("tp", "micro_tp")


def test_ranks_draw_what_their_place_says(four):
    drawn = four.drawn(1)
    assert len({number for numbers in drawn for number in numbers}) == 12
    assert four.drawn(1) == drawn != four.drawn(2)
    a, b, c, d = four.drawn(1, ["tp"])
    assert a == b != c == d


def test_a_call_that_is_run_again_draws_the_same_numbers():
    def drawn():
        return random.random(), np.random.rand(), torch.rand(2).tolist()

    states = random_states()
    numbers = drawn()
    assert drawn() != numbers
    restore_random_states(states)
    assert drawn() == numbers


def test_a_checkpoint_resumes_on_another_mesh_and_in_other_parameter_groups(tmp_path):
    with bm.ResourcePool([4]) as pool:
        losses, *others = bm.WorkerGroup(pool, Torch).train(str(tmp_path), 3, 3)
        assert others == [losses] * 3
    for n_ranks, n_groups in [(2, 1), (1, 2)]:  # of the optimizer
        with bm.ResourcePool([n_ranks]) as pool:
            for step, resumed in bm.WorkerGroup(pool, Torch).resume(str(tmp_path), 3, n_groups):
                assert step == 3
                assert resumed == pytest.approx(losses[3:], abs=1e-6)


def test_checkpoints_are_written_while_training_goes_on_and_the_last_ones_stay(tmp_path):
    def run(n_ranks, n_steps):
        with bm.ResourcePool([n_ranks]) as pool:
            first, *others = bm.WorkerGroup(pool, Torch).train_and_keep(str(tmp_path / "run"), n_steps)
            assert [(begin, numbers) for begin, _, numbers in others] == [(first[0], first[2])] * len(others)
            return first

    begin, losses, numbers = run(2, 4)
    assert (begin, numbers) == (0, [3, 4])
    begin, more, numbers = run(1, 2)
    assert (begin, numbers) == (4, [5, 6])
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 2
    with bm.ResourcePool([1]) as pool:
        _, run_of_six, _ = bm.WorkerGroup(pool, Torch).train_and_keep(str(tmp_path / "other"), 6)[0]
    assert losses + more == pytest.approx(run_of_six, abs=1e-5)


def test_a_checkpoint_that_a_run_has_not_completed_is_not_loaded_and_goes_with_those_before_it(tmp_path):
    checkpoints = rl.Checkpoints(tmp_path, keep=1)
    read = of_one_weight(0)
    assert checkpoints.load(read, step=7) == {"step": 7} and read.weight.item() == 0
    checkpoints.save(1, of_one_weight(1), step=1)
    checkpoints.wait()
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoints.numbers() == [1]
    assert checkpoints.load(read, step=0) == {"step": 1} and read.weight.item() == 1
    checkpoints.save(3, of_one_weight(3), step=3)
    assert checkpoints.load(read, step=0) == {"step": 3} and read.weight.item() == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [".last", "checkpoint-3", "notes"]


def of_one_weight(value):
    made = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(made.weight, value)
    return made


def gone_back(folder, read, keep):
    """The checkpoints of a run that goes back to the first of three."""
    checkpoints = rl.Checkpoints(folder)
    for number in (10, 20, 30):
        checkpoints.save(number, of_one_weight(number), step=number)
    checkpoints.wait()
    checkpoints = rl.Checkpoints(folder, keep=keep)
    assert checkpoints.load(read, number=10, step=0) == {"step": 10}
    return checkpoints


def test_a_run_that_goes_back_to_an_older_checkpoint_goes_on_from_there(tmp_path):
    read, kept = of_one_weight(0), []
    checkpoints = gone_back(tmp_path, read, keep=3)
    for number in (11, 12, 13):
        checkpoints.save(number, of_one_weight(-number), step=number)
        checkpoints.wait()
        kept.append(checkpoints.numbers())
    assert kept == [[10, 11, 30], [10, 11, 12], [11, 12, 13]]
    checkpoints.save(12, of_one_weight(5), step=12)
    checkpoints.wait()
    assert rl.Checkpoints(tmp_path).load(read, step=0) == {"step": 12} and read.weight.item() == 5


def test_a_checkpoint_that_a_run_has_left_is_not_taken_for_its_own(tmp_path):
    class Fails:
        def __deepcopy__(self, memo):
            return self

        def __reduce__(self):
            raise OSError("no space left on device")

    read = of_one_weight(0)
    checkpoints = gone_back(tmp_path, read, keep=2)
    for _ in range(2):  # now that it saves less often
        checkpoints.save(25, of_one_weight(-25), step=25, more=Fails())
        with pytest.raises(RuntimeError, match="no space left"):
            checkpoints.wait()
        assert rl.Checkpoints(tmp_path).load(read, step=0) == {"step": 10}
    checkpoints.save(25, of_one_weight(-25), step=25)
    assert checkpoints.load(read, step=0) == {"step": 25}
    assert checkpoints.numbers() == [10, 25]


def test_a_checkpoint_that_is_written_again_is_not_complete_meanwhile(tmp_path):
    writes, goes_on = threading.Event(), threading.Event()

    class Slow:
        def __deepcopy__(self, memo):
            return self

        def __reduce__(self):
            writes.set()
            assert goes_on.wait(30)
            return int, ()

    checkpoints = rl.Checkpoints(tmp_path)
    checkpoints.save(10, of_one_weight(1), step=10, more=0)
    checkpoints.save(20, of_one_weight(2), step=20, more=0)
    checkpoints.wait()
    checkpoints.save(20, of_one_weight(3), step=20, more=Slow())
    try:
        assert writes.wait(30)
        found, read = rl.Checkpoints(tmp_path), of_one_weight(0)
        assert found.numbers() == [10]
        assert found.load(read, step=0) == {"step": 10} and read.weight.item() == 1
    finally:
        goes_on.set()
    checkpoints.wait()
    assert found.load(read, step=0) == {"step": 20} and read.weight.item() == 3


def test_a_checkpoint_that_was_overwritten_in_part_is_not_loaded(tmp_path):
    class Saves(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def saved(self, path, value, fails):
            rl.start_torch_distributed(self)
            mesh = rl.device_mesh(self, "dp")
            write = FileSystemWriter.write_data

            def full(*args):
                if self.rank == 1:
                    raise OSError(errno.ENOSPC, "no space left on device")
                return write(*args)

            with pytest.MonkeyPatch.context() as patch:
                if fails:
                    patch.setattr(FileSystemWriter, "write_data", full)
                rl.save(path, self._made(mesh, value))

        @register(Dispatch.ONE_TO_ALL)
        def loaded(self, path):
            model = self._made(rl.device_mesh(self, "dp"), 0.0)
            rl.load(path, model)
            return model.weight.full_tensor().flatten().tolist()

        def _made(self, mesh, value):
            model = torch.nn.Linear(1, 2, bias=False)
            torch.nn.init.constant_(model.weight, value)
            return fully_shard(model, mesh=mesh)

    with bm.ResourcePool([2]) as pool:
        group, path = bm.WorkerGroup(pool, Saves, mesh=Mesh(dp=2)), str(tmp_path / "last")
        group.saved(path, 1.0, False)
        assert group.loaded(path) == [[1, 1]] * 2
        with pytest.raises(bm.RemoteError, match="could not be written: rank 1: OSError"):
            group.saved(path, 2.0, True)
        with pytest.raises(bm.RemoteError, match="could not be read"):
            group.loaded(path)
        group.saved(path, 3.0, False)
        assert group.loaded(path) == [[3, 3]] * 2


def test_a_checkpoint_that_is_removed_in_part_is_not_complete(tmp_path, monkeypatch):
    checkpoints = rl.Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, of_one_weight(1))
    checkpoints.save(2, of_one_weight(2))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path, **_: (path / "__0_0.distcp").unlink())  # as if killed then
        checkpoints.wait()
    assert checkpoints.numbers() == [2]
    with pytest.raises(bm.UsageError, match="no complete checkpoint 1; there are 2"):
        checkpoints.load(of_one_weight(0), number=1)
    checkpoints.save(3, of_one_weight(3))
    checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".last", "checkpoint-3"]


@pytest.mark.parametrize("is_async", [False, True])
def test_dicts_and_lists_are_loaded_whole_whatever_there_was_before(tmp_path, is_async):
    more = {"seen": {"a": 1, 2: {"b": []}}, "none": {}, "rows": [{"x": 1}, {"y": 2}], "tensors": {"t": torch.ones(2)}}
    if is_async:
        checkpoints = rl.Checkpoints(tmp_path)
        checkpoints.save(1, of_one_weight(1), **more)
        more["seen"]["a"] = more["rows"][0]["x"] = 1000  # it was copied
        checkpoints.wait()
    else:
        rl.save(tmp_path / "checkpoint-1", of_one_weight(1), **more)
    found = rl.load(
        tmp_path / "checkpoint-1", of_one_weight(0), seen={}, none={"a": 0}, rows=[], tensors={"t": torch.zeros(2)}
    )
    assert found["seen"] == {"a": 1, 2: {"b": []}} and found["none"] == {} and found["rows"] == [{"x": 1}, {"y": 2}]
    assert found["tensors"]["t"].tolist() == [1, 1]


def trained(model, optimizer, n_steps):
    """What some steps make of a model: its weights, and the optimizer's count of steps."""
    for _ in range(n_steps):
        optimizer.zero_grad()
        model(torch.ones(4, 1)).sum().backward()
        optimizer.step()
    return model.weight.item(), [float(state["step"]) for state in optimizer.state.values() if "step" in state]


OPTIMIZERS = [
    lambda weights: torch.optim.AdamW(weights, lr=0.1),
    lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    lambda weights: torch.optim.SGD(weights, lr=0.1, weight_decay=0.1),
    lambda weights: torch.optim.Rprop(weights, lr=0.1),
    lambda weights: torch.optim.NAdam(weights, lr=0.1),
]


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("optimizer_of", OPTIMIZERS)
def test_a_checkpoint_before_the_first_step_changes_nothing_of_the_training(tmp_path, optimizer_of, has_gradients):
    def fresh():
        model = of_one_weight(1)
        optimizer = optimizer_of(model.parameters())
        if has_gradients:
            model(torch.ones(4, 1)).sum().backward()
        return model, optimizer

    expected = trained(*fresh(), 2)
    model, optimizer = fresh()
    gradient = model.weight.grad
    checkpoints = rl.Checkpoints(tmp_path)
    checkpoints.save(0, model, optimizer)
    rl.save(tmp_path / "other", model, optimizer)
    assert model.weight.grad is gradient and not optimizer.state
    assert trained(model, optimizer, 2) == expected
    for path in (tmp_path / "checkpoint-0", tmp_path / "other"):
        checkpoints.wait()
        model, optimizer = fresh()
        gradient = model.weight.grad
        rl.load(path, model, optimizer)
        assert model.weight.grad is gradient
        assert trained(model, optimizer, 2) == expected


@pytest.mark.parametrize("optimizer_of", OPTIMIZERS)
def test_an_optimizer_that_has_gradients_and_no_state_is_loaded(tmp_path, optimizer_of):
    model = of_one_weight(1)
    optimizer = optimizer_of(model.parameters())
    trained(model, optimizer, 2)
    rl.save(tmp_path / "two", model, optimizer)
    expected = trained(model, optimizer, 1)
    model = of_one_weight(1)
    optimizer = optimizer_of(model.parameters())
    model(torch.ones(4, 1)).sum().backward()
    rl.load(tmp_path / "two", model, optimizer)
    assert trained(model, optimizer, 1) == expected


@pytest.mark.parametrize("before", ["", "a step of the other weight", "a checkpoint without a state"])
def test_a_weight_without_a_gradient_has_no_state_in_a_checkpoint(tmp_path, before):
    def fresh():
        model = torch.nn.ModuleDict({"used": of_one_weight(1), "unused": of_one_weight(1)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer, n_steps):
        return trained(model["used"], optimizer, n_steps)

    model, optimizer = fresh()
    train(model, optimizer, 2)
    rl.save(tmp_path / "two", model, optimizer)
    expected = train(model, optimizer, 1)
    model, optimizer = fresh()
    if before == "a step of the other weight":
        trained(model["unused"], optimizer, 1)
    elif before == "a checkpoint without a state":
        rl.save(tmp_path / "none", model, optimizer)
        rl.load(tmp_path / "none", model, optimizer)
    rl.load(tmp_path / "two", model, optimizer)
    assert train(model, optimizer, 1) == expected and not optimizer.state.get(model["unused"].weight)


def test_to_save_and_load_an_optimizer_without_a_state_is_no_step(tmp_path):
    model = of_one_weight(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    trained(model, optimizer, 1)
    for name in ("with a gradient", "without"):
        rl.save(tmp_path / name, model, optimizer)
        rl.load(tmp_path / name, model, optimizer)
        model.zero_grad()
    assert len(steps) == 1


def test_a_load_that_fails_leaves_an_optimizer_without_a_step_as_it_was(tmp_path):
    model = of_one_weight(1)
    rl.save(tmp_path / "model", model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="could not be read"):
        rl.load(tmp_path / "model", model, optimizer)
    assert not optimizer.state


def test_none_loads_what_was_saved(tmp_path):
    more = {
        "data": {"epoch": 3},
        "order": [4, 1],
        "one": ([1],),
        "two": (1, 2),
        "rng": torch.arange(3),
        "nothing": None,
    }
    rl.save(tmp_path / "saved", of_one_weight(1), **more, parts={"t": torch.ones(2)})
    found = rl.load(tmp_path / "saved", of_one_weight(0), **dict.fromkeys(more))
    assert found.pop("rng").tolist() == [0, 1, 2] and more.pop("rng") is not None
    assert found == more
    assert rl.load(tmp_path / "saved", of_one_weight(0), one=(), two=()) == {"one": ([1],), "two": (1, 2)}


@pytest.mark.parametrize("given", [{}, None, [], {"t": torch.zeros(2), "seen": {}}])
def test_a_place_for_what_was_saved_beside_tensors_is_not_left_empty(tmp_path, given):
    rl.save(tmp_path, of_one_weight(1), data={"t": torch.ones(2), "seen": {"a": 1}, "none": {}})
    with pytest.raises(bm.UsageError, match=r"has 'more\.data\..*', but 'more\.data.*' is .*; as there are tensors"):
        rl.load(tmp_path, of_one_weight(0), data=given)
    data = {"t": torch.zeros(2), "seen": {"a": 0}, "none": {}}
    assert rl.load(tmp_path, of_one_weight(0), data=data)["data"]["seen"] == {"a": 1}


def test_a_key_that_is_no_text_has_no_other_values_beside_tensors(tmp_path):
    state = {"state": {0: {"average": torch.ones(2), "step": 3}}}
    with pytest.raises(bm.UsageError, match=r"'more\.other\.state' has tensors, and under the key 0 other values"):
        rl.save(tmp_path, of_one_weight(1), other=state)
    with pytest.raises(bm.UsageError, match="under the key 0 other values"):
        rl.Checkpoints(tmp_path).save(1, of_one_weight(1), other=state)
    assert list(tmp_path.iterdir()) == []
    rl.save(tmp_path, of_one_weight(1), other={0: {1: torch.ones(2)}})
    filled = rl.load(tmp_path, of_one_weight(0), other={0: {1: torch.zeros(2)}})["other"]
    assert filled[0][1].tolist() == [1, 1] and [*filled] == [0]
    with pytest.raises(RuntimeError, match=r"Missing key in checkpoint state_dict: more\.seen"):
        rl.load(tmp_path, of_one_weight(0), seen={1: 2})


def test_what_ranks_save_under_one_name_is_that_of_rank_0(tmp_path):
    class Saves(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def kept(self, folder):
            rl.start_torch_distributed(self)
            mesh = rl.device_mesh(self, "dp")
            more = {"seen": self.rank, "rng": torch.tensor([self.rank]), "rank": {"is": self.rank}}
            own, none = {f"of_{self.rank}": self.rank}, dict.fromkeys(more)
            cut = dist.tensor.distribute_tensor(torch.arange(4), mesh, [dist.tensor.Shard(0)])
            rl.save(f"{folder}/saved", of_one_weight(1), **more, **own, cut={"x": cut})
            checkpoints = rl.Checkpoints(folder)
            checkpoints.save(1, of_one_weight(1), **more)
            saved = rl.load(f"{folder}/saved", of_one_weight(0), **none, **own, cut={"x": torch.zeros_like(cut)})
            return {**saved, "cut": saved["cut"]["x"].to_local().tolist()}, checkpoints.load(of_one_weight(0), **none)

    with bm.ResourcePool([2]) as pool:
        for rank, (saved, kept) in enumerate(bm.WorkerGroup(pool, Saves, mesh=Mesh(dp=2)).kept(str(tmp_path))):
            assert saved.pop(f"of_{rank}") == rank
            assert saved.pop("cut") == [2 * rank, 2 * rank + 1]
            assert saved == kept == {"seen": 0, "rng": torch.tensor([0]), "rank": {"is": 0}}


def test_ctrl_c_as_a_checkpoint_is_waited_for_leaves_it_to_the_next_wait(tmp_path):
    waits, goes_on = threading.Event(), threading.Event()

    class Slow:
        def __deepcopy__(self, memo):
            return self

        def __reduce__(self):
            assert waits.wait(30)
            os.kill(os.getpid(), signal.SIGINT)  # which the main thread gets
            assert goes_on.wait(30)
            return int, ()

    checkpoints = rl.Checkpoints(tmp_path)
    checkpoints.save(1, of_one_weight(1), more=Slow())
    try:
        with pytest.raises(KeyboardInterrupt):
            waits.set()
            checkpoints.wait()
        assert checkpoints.numbers() == []
    finally:
        goes_on.set()
    checkpoints.wait()
    assert checkpoints.numbers() == [1]


@pytest.mark.parametrize("number", [-1, 2.0, "4", True, None])
def test_a_checkpoint_whose_number_would_not_be_found_again_is_refused(tmp_path, number):
    checkpoints, read = rl.Checkpoints(tmp_path), of_one_weight(0)
    with pytest.raises(bm.UsageError, match=rf"number .* 0 or more, got {number!r}; pass"):
        checkpoints.save(number, of_one_weight(1), step=number)
    assert list(tmp_path.iterdir()) == []
    checkpoints.save(np.int64(0), of_one_weight(1), step=0)
    assert checkpoints.load(read, step=7) == {"step": 0} and read.weight.item() == 1


@pytest.mark.parametrize("keep", [0, 2.0, "3", True, None])
def test_a_number_of_checkpoints_that_cannot_be_kept_is_refused(tmp_path, keep):
    with pytest.raises(bm.UsageError, match=rf"keep must be a whole number of 1 or more, got {keep!r}"):
        rl.Checkpoints(tmp_path, keep=keep)


def test_a_parameter_group_gets_the_settings_that_its_first_parameter_had(tmp_path):
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    model = torch.nn.ParameterList(weights)
    groups = [{"params": [weight], "lr": rate} for weight, rate in zip(weights, (0.1, 0.2), strict=True)]
    rl.save(tmp_path / "saved", model, torch.optim.SGD(groups))
    for merged, rate in ((weights, 0.1), (weights[::-1], 0.2)):
        optimizer = torch.optim.SGD(merged, lr=0.5)
        rl.load(tmp_path / "saved", model, optimizer)
        assert optimizer.param_groups[0]["lr"] == rate


def test_checkpoints_that_cannot_be_written_or_are_not_there_are_errors(tmp_path):
    model = torch.nn.Linear(1, 1)
    checkpoints = rl.Checkpoints(tmp_path)
    with pytest.raises(bm.UsageError, match="no complete checkpoint 4; there are none"):
        checkpoints.load(model, number=4)
    (tmp_path / "checkpoint-1").write_text("not a folder")
    checkpoints.save(1, model)
    with pytest.raises(RuntimeError, match=r"could not be written: rank 0: FileExistsError.*checkpoint-1"):
        checkpoints.save(2, model)
    checkpoints.save(3, model)  # is usable after that
    checkpoints.wait()
    assert checkpoints.numbers() == [3]
    metadata = tmp_path / "checkpoint-3" / ".metadata"
    for torn in (metadata.read_bytes()[:100], b""):
        metadata.write_bytes(torn)
        with pytest.raises(RuntimeError, match=r"checkpoint-3 could not be read: rank 0: \w+Error"):
            checkpoints.load(model, torch.optim.AdamW(model.parameters()), step=None)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RuntimeError, match=r"could not be written: \w+: .*file"):
        rl.Checkpoints(tmp_path / "file" / "run").save(1, model)
    with pytest.raises(RuntimeError, match=r"file could not be written: rank 0: FileExistsError"):
        rl.save(tmp_path / "file", model)
    with pytest.raises(RuntimeError, match=r"nowhere could not be read: rank 0: \w+Error"):
        rl.load(tmp_path / "nowhere", model)


def test_ranks_that_share_a_process_are_refused():
    with (
        bm.ResourcePool([2], backend="inprocess") as pool,
        pytest.raises(bm.RemoteError, match="takes a process for each of 2 ranks, and these share one; use"),
    ):
        bm.WorkerGroup(pool, Torch).ranks_along()
