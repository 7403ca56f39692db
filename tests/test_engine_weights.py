"""Weights into engines: changes alone, syncs that fail, and replicas that die; by engines that keep what they get."""

import asyncio
import json
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from ctrl_c import done_when, interrupted_when
from ends import until
from hypothesis import given
from hypothesis import strategies as st

import bandmaster as bm
from bandmaster import Dispatch, register, rl
from bandmaster.rl.engine_weights.changes import changes, patch
from bandmaster.rl.engine_weights.checkpoint import as_engine_has_them, checkpoint_specs
from bandmaster.rl.engine_weights.healing import Healing
from bandmaster.rl.engine_weights.packing import pack_pieces, unpack_pieces
from bandmaster.rl.engine_weights.peers import PeerWeights
from bandmaster.rl.engine_weights.staged import StagedWeights
from bandmaster.rl.engine_weights.sync import EngineSync
from bandmaster.rl.engines.vllm_checkpoint import checkpoint_weights
from bandmaster.rl.exchange import fill, pack
from bandmaster.rl.layout import Box
from bandmaster.serve import Endpoint

pytestmark = pytest.mark.backends("inprocess", "local")
DEADLINE_S = 60
SHAPES = {"embed": (300, 40), "layer.weight": (40, 40), "layer.bias": (40,), "norm": ()}


class Source(rl.HoldsWeights):
    """A trainer of a few tensors in float32, cut along tp."""

    def __init__(self, sizes=SHAPES, seed=0):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        torch.set_num_threads(1)
        self.made = {}
        for number, (name, shape) in enumerate(sizes.items()):
            torch.manual_seed(seed + number)
            whole = torch.randn(shape)
            if "tp" in self.mesh.axis_names:
                mesh = rl.device_mesh(self, "dp", "tp")
                dim = len(shape) - 1
                whole = distribute_tensor(whole, mesh, [Replicate(), Shard(dim) if shape else Replicate()])
            self.made[name] = whole

    def weights(self):
        return self.made

    @register(Dispatch.ONE_TO_ALL)
    def step(self, seed, size=1e-6):
        """A step of an optimizer with a learning rate of ``size``: each element moves by about as much."""
        for number, weight in enumerate(self.made.values()):
            local = getattr(weight, "_local_tensor", weight)
            place = (
                self.mesh.coordinates(self.rank).get("tp", 0) if weight.ndim else 0
            )  # ranks with the same move alike
            torch.manual_seed(seed * 100 + number + 100_000 * place)
            local.add_(torch.randn(local.shape).sign() * size)

    @register(Dispatch.ONE_TO_ALL)
    def whole(self):
        return {n: (w.full_tensor() if hasattr(w, "full_tensor") else w).clone() for n, w in self.weights().items()}

    @register(Dispatch.ONE_TO_ALL)
    def set(self, name, tensor):
        self.made = {**self.made, name: tensor}

    @register(Dispatch.ONE_TO_ALL)
    def drift(self, rank):
        if self.rank == rank:
            self.made["norm"].add_(1)

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()

    def on_replace(self, rank, state):
        pass


class Rotary(Source):
    """Has tensors that torch conjugates and negates only when they are read."""

    def weights(self):
        return {"angles": self.made["angles"].conj(), "sines": self.made["angles"].conj().imag}


class Recorder(rl.Engine):
    """An engine that keeps the weights that it gets, in bfloat16, and answers with the prompt.

    Args:
        shapes: Of its tensors.
        dtype: Of its tensors.
    """

    vocab_size, max_model_len = 100, 32

    def __init__(self, shapes=SHAPES, dtype="bfloat16"):
        self.specs = {name: (tuple(shape), dtype) for name, shape in shapes.items()}
        self.loaded, self.n_loads, self.fails_at = {}, 0, set()
        self.is_paused, self.going = False, asyncio.Event()
        self.dies = False

    def weights_specs(self):
        return self.specs

    def load_weights(self, weights):
        self.n_loads += 1
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.n_loads in self.fails_at:
            self.loaded = {"half": torch.zeros(1)}
            raise RuntimeError("this engine does not like them")
        self.loaded = {name: tensor.clone() for name, tensor in weights.items()}

    def first_weights(self):
        return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, (shape, _) in self.specs.items()}

    async def increments(self, prompt, sampling):
        for token in prompt[: sampling.max_tokens]:
            yield rl.Answer([token], [0.0], [self.version], None)
        yield rl.Answer([], [], [], "length")

    async def answers(self, prompt, sampling):
        return [rl.Answer.joined([part async for part in self.increments(prompt, sampling)])]

    async def pause(self, mode="abort"):
        await super().pause(mode)
        self.is_paused = True

    async def resume(self):
        self.is_paused = False

    async def abort(self): ...
    async def sleep(self): ...
    async def wake(self): ...
    async def reset_cache(self): ...

    @property
    def is_ready(self):
        return not self.is_paused

    @register(Dispatch.ONE_TO_ALL)
    def state(self):
        return self.loaded, self.weights_version, self.n_loads

    @register(Dispatch.ONE_TO_ALL)
    def fail_at(self, rank, *loads, dies=False):
        if self.rank == rank:
            self.fails_at, self.dies = {self.n_loads + load for load in loads}, dies

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def memory_files(self):
        """How many versions of the weights this rank holds in memory."""
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        return sum("bandmaster-weights" in link for link in links)


def assert_has(engine, source, version, ranks=None):
    """All replicas have the weights of the source, cast."""
    expected = source.whole()[0]
    for rank, (loaded, its_version, _) in enumerate(engine.state()):
        if ranks is None or rank in ranks:
            assert its_version == version
            assert loaded.keys() == expected.keys()
            for name, tensor in loaded.items():
                assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


@pytest.fixture(scope="module")
def source(backend):
    """A source of dp=2, tp=2, where ranks have processes."""
    mesh = bm.Mesh(dp=1) if backend == "inprocess" else bm.Mesh(dp=2, tp=2)
    with bm.ResourcePool([mesh.size], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Source, mesh=mesh)
        group.set_default_options(timeout=DEADLINE_S)
        yield group


@pytest.fixture(scope="module")
def engine(backend, source):
    """Two replicas that have had a sync."""
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Recorder)
        group.set_default_options(timeout=DEADLINE_S)
        rl.WeightSync(source, group)(version=0)
        yield group


@pytest.fixture
def mortal(make_group):
    """Two replicas for a test that kills them."""
    group = make_group(2, Recorder)
    group.set_default_options(timeout=DEADLINE_S)
    return group


# --- changes ---


@pytest.mark.backends("inprocess")
def test_what_the_source_keeps_is_its_own(source, make_group):
    """In the trainer's own dtype, too, for which nothing has to be cast."""
    engine = make_group(2, Recorder, SHAPES, "float32")
    sync = rl.WeightSync(source, engine, delta=True)
    for version in range(1, 4):
        source.step(version, size=0.01)
        sync(version=version)
        assert_has(engine, source, version)


@given(st.data())
def test_changes_make_the_old_array_the_new_one(data):
    n = data.draw(st.integers(0, 2000))
    dtype = data.draw(st.sampled_from([np.uint8, np.int16, np.int32, np.int64]))
    old = np.random.default_rng(0).integers(0, 100, n).astype(dtype)
    new = old.copy()
    for place in data.draw(st.lists(st.integers(0, max(0, n - 1)), max_size=40)) if n else []:
        new[place] += 1
    found = changes(old, new)
    if found is None:
        assert new.nbytes <= 3 * (np.count_nonzero(old != new) + 1) * (new.itemsize + 4)
    else:
        assert found.nbytes < new.nbytes
        patch(old, found)
        assert np.array_equal(old, new)


@pytest.mark.parametrize("share", [0.1, 0.01, 0.001, 0.0001])
def test_changes_take_few_bytes(share):
    rng = np.random.default_rng(1)
    old = rng.integers(0, 1 << 15, 1_000_000).astype(np.int16)
    new = np.where(rng.random(len(old)) < share, old ^ 1, old)
    found = changes(old, new)
    assert found.nbytes < 2 * new.nbytes * share * 1.05, "at most two bytes for a step"
    patch(old, found)
    assert np.array_equal(old, new)


@pytest.mark.backends("inprocess")
@pytest.mark.parametrize("delta", [False, True])
def test_conjugate_and_negated_weights_come_to_engines(make_group, delta):
    angles = torch.polar(torch.ones(64), torch.arange(64.0))
    source, engine = make_group(1, Rotary, {}), make_group(1, Recorder, {})
    source.set("angles", angles)
    sync = rl.WeightSync(source, engine, delta=delta)
    for version in (1, 2):
        sync(version=version)
        assert_has(engine, source, version)
        angles[3] += 1
        source.set("angles", angles)


def test_pieces_that_differ_from_what_was_sent_are_an_error():
    tensor, place = torch.arange(60.0).view(6, 10), torch.zeros(12, 10)
    box = Box((3, 0), (6, 10))
    packed = pack_pieces([(tensor, None)])
    unpack_pieces(packed, [("w", box)], lambda _: place[3:9])
    assert torch.equal(place[3:9], tensor)
    packed.data[17] ^= 1
    with pytest.raises(bm.UsageError, match=r"checksums of 1 of 1 pieces differ.*'w' \[3:9, 0:10\]"):
        unpack_pieces(packed, [("w", box)], lambda _: place[3:9])
    changed = tensor.clone()
    changed[2, 2] = 100
    packed = pack_pieces([(changed, tensor)])
    assert packed.parts[0].n_changes == 1 and len(packed.data) <= 16
    columns = torch.zeros(6, 20)
    columns[:, 5:15] = tensor
    unpack_pieces(packed, [("w", box)], lambda _: columns[:, 5:15])  # a part of each row
    assert torch.equal(columns[:, 5:15], changed)
    with pytest.raises(bm.UsageError, match="checksums"):
        unpack_pieces(packed, [("w", box)], lambda _: torch.zeros(6, 10))  # not the base


def test_staged_weights_are_mapped_by_others_and_go_with_their_owner():
    specs = {"a": ((3, 5), "bfloat16"), "b": ((), "float32"), "c": ((0, 4), "int64")}
    weights = StagedWeights(7, specs)
    weights["a"].copy_(torch.arange(15).view(3, 5))
    weights["b"].fill_(2.5)
    other = StagedWeights.opened(weights.address)
    assert other.sync == 7 and list(other) == ["a", "b", "c"]
    assert torch.equal(other["a"], weights["a"]) and float(other["b"]) == 2.5 and other["c"].shape == (0, 4)
    other["b"].fill_(3)
    assert float(weights["b"]) == 2.5, "what others write is their own"
    copied = weights.copy(8)
    assert copied.sync == 8 and torch.equal(copied["a"], weights["a"]) and copied.path != weights.path
    path = weights.path
    del weights
    assert not os.path.exists(path) and float(other["b"]) == 3, "who has mapped it may use it on"


def test_specs_of_a_checkpoint(tmp_path):
    from safetensors.torch import save_file

    save_file(
        {"b": torch.zeros(4, 2, dtype=torch.float32), "a": torch.zeros(3, dtype=torch.float32)},
        tmp_path / "1.safetensors",
    )
    save_file({"c": torch.zeros(2, dtype=torch.float16)}, tmp_path / "2.safetensors")
    specs = checkpoint_specs(tmp_path)
    assert specs == {"b": ((4, 2), "float32"), "a": ((3,), "float32"), "c": ((2,), "float16")}
    assert as_engine_has_them(specs, "bfloat16")["b"][1] == "bfloat16"
    assert as_engine_has_them(specs, "bfloat16")["c"][1] == "float16", "not the main dtype"
    assert checkpoint_specs(tmp_path / "nowhere") is None


def test_other_files_beside_those_of_the_model_do_not_count(tmp_path):
    from safetensors.torch import save_file

    for number, name in enumerate("bc", 1):
        save_file({name: torch.full((2,), float(number))}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    index = {"b": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({"b": torch.zeros(2), "lora": torch.zeros(2)}, tmp_path / "other.safetensors")
    specs = checkpoint_specs(tmp_path)
    assert list(specs) == ["b", "c"]
    weights = checkpoint_weights(tmp_path, specs)
    assert [weights[name].tolist() for name in specs] == [[1, 1], [2, 2]]
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert checkpoint_specs(tmp_path).keys() == {"a"}


# --- syncs ---


@pytest.mark.parametrize(
    "options", [{}, {"delta": True}, {"bucket_nbytes": 5000}, {"bucket_nbytes": 5000, "delta": True}], ids=str
)
def test_weights_are_cast_and_come_to_all_replicas(source, engine, options):
    sync = rl.WeightSync(source, engine, **options)
    for version in range(1, 4):
        source.step(version, size=0.01)
        sync(version=version)
        assert_has(engine, source, version)
    n_replicas_here = len(set(engine.process()))
    assert engine.memory_files() == [2 // n_replicas_here] * 2, "of each replica one version"
    assert sync.plan.nbytes == 2 * (300 * 40 + 40 * 40 + 40 + 1)


@pytest.mark.slow
@pytest.mark.backends("local")
def test_changes_alone_are_sent_through_a_hundred_steps_with_drops_and_restarts(make_group):
    source = make_group(bm.Mesh(dp=2, tp=2), Source, {"a": (600, 500), "b": (500, 40)})
    engine = make_group(2, Recorder, {"a": (600, 500), "b": (500, 40)})
    sync = rl.WeightSync(source, engine, delta=True, bucket_nbytes=200_000)
    whole, sent = sync.plan.nbytes, []
    for step in range(1, 101):
        source.step(step)
        if step % 10 == 3:
            continue  # several steps in one sync
        if step == 30:
            os.kill(engine.process()[1], signal.SIGKILL)
            with pytest.raises(bm.WorkerDied):
                sync(version=step)
            engine.replace(1)
        if step == 50:
            engine.restart()
        if step == 60:
            os.kill(source.process()[1], signal.SIGKILL)
            with pytest.raises(bm.WorkerDied):
                source.step(step)
            source.restart()
        if step == 70:
            engine.fail_at(0, 1)
            with pytest.raises(bm.RemoteError, match="does not like them"):
                sync(version=step)
        sync(version=step)
        sent.append(sync.sent_nbytes)
        if step % 10 == 0:
            assert_has(engine, source, step)
    assert_has(engine, source, 100)
    small = sorted(sent)[: len(sent) * 3 // 4]
    assert max(small) < 0.03 * whole, "at a learning rate of 1e-6, with headers"
    assert sorted(sent)[-1] >= whole, "the first one, and for replicas that were replaced"


@pytest.mark.backends("local")
def test_replicas_of_the_source_that_differ_are_an_error(source, engine):
    sync = rl.WeightSync(source, engine)
    sync(version=1)
    source.drift(3)
    with pytest.raises(bm.RemoteError, match=r"1 of \d+ weights of which this rank is a replica differ: 'norm'"):
        sync(version=2)
    assert [version for _, version, _ in engine.state()] == [1, 1]
    rl.WeightSync(source, engine, is_compared=False)(version=3)
    source.drift(0)
    source.drift(1)
    source.drift(2)


def test_a_shape_that_differs_is_an_error_before_anything_is_sent(source, make_group):
    engine = make_group(2, Recorder, {**SHAPES, "embed": (301, 40)})
    with pytest.raises(
        bm.LayoutError, match=r"'embed' is bfloat16 of shape \(300, 40\) in the source, and .*\(301, 40\)"
    ):
        rl.WeightSync(source, engine)
    more = make_group(2, Recorder, {**SHAPES, "head": (4,)})
    with pytest.raises(bm.LayoutError, match="the target has a tensor 'head', which the source does not have"):
        rl.WeightSync(source, more)


@pytest.mark.backends("inprocess")
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("n_rows", [20, 60])
def test_a_weight_of_another_shape_than_when_the_sync_was_made_is_refused(make_group, n_rows, delta):
    source, engine = make_group(1, Source), make_group(2, Recorder)
    sync = rl.WeightSync(source, engine, delta=delta)
    sync(version=1)
    expected = engine.state()[0][0]
    source.set("layer.weight", torch.ones(n_rows, 40))
    with pytest.raises(
        bm.RemoteError,
        match=rf"'layer\.weight' is float32 of shape \({n_rows}, 40\) on this rank, but .*\(40, 40\); .*a new",
    ):
        sync(version=2)
    for loaded, version, _ in engine.state():
        assert version == 1 and all(torch.equal(loaded[name], expected[name]) for name in expected)
    source.set("layer.weight", torch.ones(40, 40, dtype=torch.float64))
    sync(version=3)  # which casts it
    assert_has(engine, source, 3)
    source.set("layer.weight", torch.ones(n_rows, 40))
    engine = make_group(2, Recorder, {**SHAPES, "layer.weight": (n_rows, 40)})
    rl.WeightSync(source, engine, delta=delta)(version=4)
    assert_has(engine, source, 4)


def test_options_that_are_no_such_are_errors(source, engine):
    sync = rl.WeightSync(source, engine)
    with pytest.raises(bm.UsageError, match="in_flight must be one of 'keep', 'wait', 'abort', got 'stop'"):
        sync(in_flight="stop")
    with pytest.raises(bm.UsageError, match=r"to_ranks=\[1\].*restore\(replica\)"):
        rl.WeightSync(source, engine, to_ranks=[1])
    with pytest.raises(bm.UsageError, match="delta=True is for groups of engines"):
        rl.WeightSync(source, source, from_ranks=[0], to_ranks=[], delta=True)
    with pytest.raises(bm.UsageError, match="there was no sync yet"):
        sync.restore(0)
    with pytest.raises(bm.UsageError, match="has replicas 0 to 1, got 2"):
        sync.restore(2)
    with pytest.raises(bm.UsageError, match="heals=True"):
        sync.wait_until_healed()


# --- failures ---


@pytest.mark.backends("inprocess")
def test_the_first_weights_are_refused(source, make_group):
    engine = make_group(2, Recorder)
    sync = rl.WeightSync(source, engine)
    engine.fail_at(1, 1)
    with pytest.raises(bm.RemoteError, match="does not like them"):
        sync(version=1)
    for loaded, version, _ in engine.state():
        assert version is None and not loaded["embed"].any(), "those before the first sync"
    sync(version=1)
    assert_has(engine, source, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_refuses_weights_leaves_the_old_ones_everywhere(source, engine, rank):
    sync = rl.WeightSync(source, engine)
    sync(version=1)
    before = engine.state()
    source.step(1, size=1.0)
    engine.fail_at(rank, 1)
    with pytest.raises(bm.RemoteError, match="does not like them"):
        sync(version=2)
    for (loaded, version, _), (expected, _, _) in zip(engine.state(), before, strict=True):
        assert version == 1 and all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert engine.request([7, 8]).result()[0].versions == [1, 1]
    sync(version=3)
    assert_has(engine, source, 3)


class LoadsByAwaiting(Recorder):
    """An engine that awaits as it loads weights, as one that is reached over HTTP does."""

    async def load_weights(self, weights):
        await asyncio.sleep(0)
        super().load_weights(weights)


@pytest.mark.backends("inprocess")
def test_an_engine_may_await_as_it_loads_weights(source, make_group):
    engine = make_group(2, LoadsByAwaiting)
    sync = rl.WeightSync(source, engine)
    sync(version=1)
    assert_has(engine, source, 1)
    engine.fail_at(0, 1)
    with pytest.raises(bm.RemoteError, match="does not like them"):
        sync(version=2)
    assert_has(engine, source, 1)


def test_an_engine_that_cannot_go_back_says_so_and_a_later_sync_mends_it(source, engine, monkeypatch):
    sync = rl.WeightSync(source, engine)
    sync(version=1)
    engine.fail_at(1, 1, 2)
    with pytest.raises(bm.RemoteError, match="does not like them"):
        sync(version=2)
    with pytest.raises(bm.RemoteError, match=r"rank 1 is not usable: it could not load new weights: .*nor could it"):
        engine.request.options(replica=1)([1]).result()
    with pytest.raises(bm.RemoteError, match="rank 1 is not usable"):
        engine.generate({"prompt": [[1], [2]]})
    with pytest.raises(bm.RemoteError, match="rank 1 is not usable"):
        engine.complete.options(replica=1)(rl.Prompt(ids=[1])).result()
    with pytest.raises(bm.RemoteError, match="rank 1 is not usable"):
        next(engine.completion_parts.options(replica=1).stream(rl.Prompt(ids=[1])))
    monkeypatch.setattr("bandmaster.requests.request.LOAD_FRESH_S", 0.0)  # the loads of others are forgotten by then
    for _ in range(6):
        assert engine.request([1]).result()[0].versions == [1]
        assert engine.request.options(min_version=1)([1]).result()[0].versions == [1]
    sync(version=3)
    assert_has(engine, source, 3)
    assert engine.request.options(replica=1)([1]).result()[0].versions == [3]


@pytest.mark.backends("inprocess")
def test_clients_of_an_endpoint_are_told_to_ask_again_if_an_engine_has_lost_its_weights(source, make_group):
    engine = make_group(1, Recorder)
    engine.fail_at(0, 1, 2)
    with Endpoint(engine, model="recorder") as endpoint:
        with pytest.raises(bm.RemoteError, match="does not like them"):
            rl.WeightSync(source, engine)(version=1)
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(endpoint.url.removesuffix("/v1") + "/health", timeout=DEADLINE_S)
        assert raised.value.code == 503
        assert json.load(raised.value)["replicas"] == [{"replica": 0, "state": "unusable", "version": None}]
        raised.value.close()
        for is_stream in (False, True):
            body = json.dumps({"model": "recorder", "prompt": [1, 2], "stream": is_stream}).encode()
            request = urllib.request.Request(f"{endpoint.url}/completions", body, {"Content-Type": "application/json"})
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(request, timeout=DEADLINE_S)
            assert raised.value.code == 503 and raised.value.headers["Retry-After"]
            assert "has lost its weights" in json.load(raised.value)["error"]["message"]
            raised.value.close()


def test_a_version_that_was_taken_back_is_no_replicas(source, make_group):
    engine = make_group(2, Recorder)
    engine.fail_at(1, 1)
    with pytest.raises(bm.RemoteError, match="does not like them"):
        rl.WeightSync(source, engine)(version=1)
    with pytest.raises(bm.CallTimeout, match="no replica has version 1 of its weights: replica 0 none, replica 1 none"):
        engine.request.options(min_version=1, timeout=0.1)([1])
    assert engine.request([1]).result(DEADLINE_S)[0].versions == [0]


def test_a_pause_of_the_user_outlasts_a_sync_that_waits_for_requests(source, make_group):
    engine = make_group(1, Stubborn)
    sync = rl.WeightSync(source, engine)
    sync(version=1)
    asked = engine.request([5])
    until(lambda: engine.metrics().result()["n_open"])
    ended = sync.submit(version=2, in_flight="wait")
    until(lambda: not engine.facts().result().is_ready)
    engine.pause.all("keep").result()
    engine.go.all().result()
    ended.result(DEADLINE_S)
    assert asked.result(DEADLINE_S)[0].versions == [1]
    assert not engine.facts().result().is_ready
    engine.resume.all().result()
    assert engine.facts().result().is_ready


class Failing(Recorder):
    """An engine of which one step around the change of the weights fails once."""

    fails = ""

    @register(Dispatch.ONE_TO_ALL)
    def fail_once(self, step):
        self.fails = step

    def _step(self, name):
        if self.fails == name:
            self.fails = ""
            raise RuntimeError(f"no {name} now")

    async def pause(self, mode="abort"):
        await super().pause(mode)
        self._step("pause")

    async def reset_cache(self):
        self._step("reset")


@pytest.mark.parametrize("step", ["pause", "reset"])
def test_an_engine_goes_on_after_a_sync_that_has_failed_as_it_was_held(source, make_group, step):
    engine = make_group(1, Failing)
    sync = rl.WeightSync(source, engine)
    sync(version=1)
    engine.fail_once(step)
    with pytest.raises(bm.RemoteError, match=f"no {step} now"):
        sync(version=2)
    facts = engine.facts().result()
    assert (facts.is_ready, facts.version) == (True, 1)
    sync(version=3)
    assert_has(engine, source, 3)


class FallsAsleep(Recorder):
    """An engine that is put to sleep as new weights are staged, whose pause that is here."""

    is_asleep = False

    async def pause(self, mode="abort"):
        await super().pause(mode)
        self.is_asleep = True

    async def wake(self):
        self.is_asleep = False


def test_an_engine_that_has_gone_to_sleep_since_the_sync_began_gets_no_weights(source, make_group):
    engine = make_group(1, FallsAsleep)
    with pytest.raises(bm.RemoteError, match=r"the engine is asleep; call wake\.all"):
        rl.WeightSync(source, engine)(version=1)
    assert engine.state()[0][1:] == (None, 0)


def test_a_replica_that_sleeps_is_restored_when_it_is_awake(source, make_group):
    engine = make_group(2, FallsAsleep)
    sync = rl.WeightSync(source, engine)
    engine.pause.all("keep").result()  # so that the sync does not
    engine.wake.all().result()
    sync(version=1)
    engine.pause.options(replica=1)("keep").result()
    with pytest.raises(bm.RemoteError, match=r"the engine is asleep; call wake\.all"):
        sync.restore(1)
    engine.wake.all().result()
    sync.restore(1)


class SleepsAgain(Recorder):
    """An engine that is asleep when it has started again.

    Args:
        folder: It tells of its start there.
    """

    is_asleep = False

    def __init__(self, folder):
        super().__init__()
        self.is_asleep = (folder / f"begun {self.rank}").exists()
        (folder / f"{'again' if self.is_asleep else 'begun'} {self.rank}").touch()

    async def wake(self):
        self.is_asleep = False


@pytest.mark.backends("local")
@pytest.mark.parametrize("has_source", [True, False])
def test_a_replica_that_sleeps_as_it_is_replaced_gets_its_weights_when_it_is_awake(
    source, make_group, tmp_path, has_source
):
    engine = make_group(2, SleepsAgain, tmp_path)
    sync = rl.WeightSync(source, engine, heals=has_source)
    healing = sync._healing if has_source else Healing(PeerWeights(engine, 2))
    sync(version=1)
    os.kill(engine.process()[1], signal.SIGKILL)
    until((tmp_path / "again 1").exists)
    assert not healing.wait(0.5), "it sleeps"
    engine.wake.all().result(DEADLINE_S)
    assert healing.wait(DEADLINE_S)
    assert_has(engine, source, 1)


class Waiting(Recorder):
    """An engine that waits for weights from the beginning."""

    def __init__(self):
        super().__init__()
        self.await_weights()


def test_an_engine_without_weights_answers_nobody_until_it_has_some(source, make_group):
    engine = make_group(1, Waiting)
    whole = [engine.request([1]), engine.complete(rl.Prompt(ids=[1]))]
    stream = engine.completion_parts.stream(rl.Prompt(ids=[1]))
    for one in whole:
        with pytest.raises(bm.CallTimeout):
            one.result(0.05)
    rl.WeightSync(source, engine)(version=4)
    assert whole[0].result(DEADLINE_S)[0].versions == [4]
    assert whole[1].result(DEADLINE_S).version == 4
    assert next(stream).answer.versions == [4]


@pytest.mark.backends("local")
def test_ranks_of_a_replica_have_one_version(source, make_group):
    engine = make_group(bm.Mesh(dp=2, tp=2), Recorder)
    engine.set_default_options(timeout=DEADLINE_S)
    sync = rl.WeightSync(source, engine)
    sync(version=1)
    assert engine.memory_files() == [1, 0, 1, 0], "ranks of a replica map what the first one has staged"
    source.step(1, size=1.0)
    for rank in range(4):
        engine.fail_at(rank, 1)
        with pytest.raises(bm.RemoteError, match="does not like them"):
            sync(version=2)
        assert [version for _, version, _ in engine.state()] == [1] * 4
        first, *others = [loaded for loaded, _, _ in engine.state()]
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)
        engine.generate({"prompt": [[1], [2]]})
    sync(version=2)
    assert_has(engine, source, 2)


@pytest.mark.backends("local")
def test_a_receiver_that_dies_before_the_change_leaves_the_others_as_they_were(source, mortal):
    engine = mortal
    sync = rl.WeightSync(source, engine)
    sync(version=1)
    os.kill(engine.process()[0], signal.SIGKILL)
    with pytest.raises(bm.WorkerDied, match="rank 0"):
        sync(version=2)
    engine.replace(0)
    assert [version for _, version, _ in engine.state()] == [None, 1]
    sync.restore(0)
    assert [version for _, version, _ in engine.state()] == [1, 1]
    assert_has(engine, source, 1)
    sync(version=2)
    assert_has(engine, source, 2)


@pytest.mark.backends("local")
def test_a_receiver_that_dies_in_the_change_leaves_the_others_with_the_new_ones(source, mortal):
    engine = mortal
    sync = rl.WeightSync(source, engine)
    sync(version=1)
    engine.fail_at(1, dies=True)
    source.step(1, size=0.1)
    with pytest.raises(bm.WorkerDied, match="rank 1"):
        sync(version=2)
    assert engine.request.options(min_version=2, timeout=DEADLINE_S)([1]).result()[0].versions == [2]
    engine.replace(1)
    sync.restore(1)
    assert_has(engine, source, 2)


@pytest.mark.backends("local")
def test_a_replica_without_peers_takes_weights_from_the_copy_of_the_source(source, make_group):
    engine = make_group(1, Recorder)
    for delta in (False, True):
        sync = rl.WeightSync(source, engine, delta=delta)
        sync(version=1)
        expected = engine.state()[0][0]
        source.step(1, size=1.0)  # training goes on
        os.kill(engine.process()[0], signal.SIGKILL)
        with pytest.raises(bm.WorkerDied):
            engine.state()
        engine.replace(0)
        if not delta:
            with pytest.raises(bm.UsageError, match=r"the source keeps no copy.*delta=True"):
                sync.restore(0)
            continue
        sync.restore(0)
        loaded, version, _ = engine.state()[0]
        assert version == 1 and all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.backends("local")
def test_a_copy_that_the_source_has_lost_is_an_error_and_not_the_weights_of_now(make_group):
    source, engine = make_group(1, Source), make_group(1, Recorder)
    sync = rl.WeightSync(source, engine, delta=True)
    sync(version=1)
    source.restart()
    os.kill(engine.process()[0], signal.SIGKILL)
    with pytest.raises(bm.WorkerDied):
        engine.state()
    engine.replace(0)
    with pytest.raises(bm.RemoteError, match=r"rank 0 has lost its copy of the weights of this sync.*sync again"):
        sync.restore(0)
    sync(version=2)
    assert_has(engine, source, 2)


# --- healing ---


@pytest.mark.backends("local")
def test_replicas_that_die_are_replaced_and_get_traffic_at_the_right_version(source, mortal, caplog):
    engine = mortal
    sync = rl.WeightSync(source, engine, heals=True)
    sync(version=1)
    with caplog.at_level(logging.WARNING, "bandmaster.rl"):
        for version in range(2, 6):
            victim = version % 2
            os.kill(engine.process()[victim], signal.SIGKILL)
            ask = engine.request.options(retries=2, timeout=DEADLINE_S)
            answers = [ask([1, 2]) for _ in range(20)]
            source.step(version, size=0.1)  # training goes on
            sync(version=version)
            assert all(set(one.result()[0].versions) <= {version - 1, version} for one in answers)
            assert sync.wait_until_healed(DEADLINE_S)
            while not engine.healthy:  # it is told of the death only now
                assert sync.wait_until_healed(DEADLINE_S)
            for replica in range(2):
                asked = engine.request.options(replica=replica, min_version=version, timeout=DEADLINE_S)
                assert asked([1]).result()[0].versions == [version]
            assert_has(engine, source, version)
    told = [record.getMessage() for record in caplog.records if record.name == "bandmaster.rl"]
    assert len(told) == 4, "each death is told of once"
    assert all("died, and was replaced in" in one for one in told)


class SlowAgain(Recorder):
    """An engine that takes as long to start as one likes, but for the first time.

    Args:
        folder: It tells of its start in a file there, and goes on when there is another one.
    """

    def __init__(self, folder):
        if (folder / "begun").exists():
            (folder / "again").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        super().__init__()


@pytest.mark.backends("local")
@pytest.mark.parametrize("delta", [False, True])
def test_syncs_go_on_while_a_replica_starts_again(source, make_group, tmp_path, delta):
    engine = make_group(2, SlowAgain, tmp_path)
    sync = rl.WeightSync(source, engine, heals=True, delta=delta)
    sync(version=1)
    (tmp_path / "begun").touch()
    os.kill(engine.process()[1], signal.SIGKILL)
    while not (tmp_path / "again").exists():
        engine.healthy  # noqa: B018  # it is told of the death then
    for version in (2, 3):
        source.step(version, size=0.1)
        sync.submit(version=version).result(DEADLINE_S)
        ask = engine.request.options(min_version=version, timeout=DEADLINE_S)
        assert ask([1]).result()[0].versions == [version]
    (tmp_path / "go").touch()
    assert sync.wait_until_healed(DEADLINE_S)
    assert_has(engine, source, 3)
    source.step(4, size=0.1)
    sync(version=4)
    assert_has(engine, source, 4)


@pytest.mark.backends("local")
def test_replicas_heal_by_their_peers_whoever_has_brought_the_weights(source, mortal, caplog):
    engine = mortal
    weights = PeerWeights(engine, 2)
    healing = Healing(weights)
    weights.level()  # there are none yet
    sync = rl.WeightSync(source, engine)
    with caplog.at_level(logging.WARNING, "bandmaster.rl"):
        for version in (1, 2):
            source.step(version, size=0.1)
            sync(version=version)
            os.kill(engine.process()[version % 2], signal.SIGKILL)
            for replica in range(2):
                ask = engine.request.options(replica=replica, min_version=version, timeout=DEADLINE_S)
                while True:
                    try:
                        assert ask([1]).result()[0].versions == [version]
                        break
                    except bm.WorkerDied:
                        assert healing.wait(DEADLINE_S)
            assert_has(engine, source, version)
    told = [record.getMessage() for record in caplog.records if record.name == "bandmaster.rl"]
    assert ["of the weights from replica" in one for one in told] == [True, True], told
    engine.replace(0)  # without weights, as one that has missed a sync
    weights.level()
    assert_has(engine, source, 2)


@pytest.mark.backends("local")
def test_weights_that_no_replica_has_any_more_are_an_error_and_not_those_of_the_beginning(source, mortal):
    engine = mortal
    weights = PeerWeights(engine, 2)
    healing = Healing(weights)
    rl.WeightSync(source, engine)(version=1)
    weights.level()
    for process in engine.process():
        os.kill(process, signal.SIGKILL)
    with pytest.raises(bm.WorkerDied):
        engine.request.options(timeout=DEADLINE_S)([1]).result()
    with pytest.raises(bm.UsageError, match=r"no replica of .* that is left has weights; bring new ones to all"):
        while healing.wait(DEADLINE_S):
            engine.healthy  # noqa: B018  # it is told of deaths then
    assert not engine.healthy


@pytest.mark.backends("local")
def test_all_replicas_die_at_once(source, mortal):
    engine = mortal
    sync = rl.WeightSync(source, engine, heals=True)
    sync(version=1)
    expected = engine.state()[0][0]
    source.step(1, size=1.0)
    for process in engine.process():
        os.kill(process, signal.SIGKILL)
    asked = engine.request.options(min_version=1, timeout=DEADLINE_S)
    while True:
        try:
            assert asked([1]).result()[0].versions == [1]
            break
        except (bm.WorkerDied, bm.CallCancelled, bm.ClosedError):  # the last if the group is just restarted
            assert sync.wait_until_healed(DEADLINE_S)
    while not engine.healthy:  # the other replica
        assert sync.wait_until_healed(DEADLINE_S)
    for loaded, version, _ in engine.state():
        assert version == 1 and all(torch.equal(loaded[name], expected[name]) for name in expected)
    for process in engine.process():
        os.kill(process, signal.SIGKILL)
    sync(version=2)  # waits until there are replicas again
    assert_has(engine, source, 2)


@pytest.mark.backends("local")
def test_healing_has_ended_when_all_replicas_are_replaced(source, mortal):
    engine = mortal
    weights = PeerWeights(engine, 2)
    healing = Healing(weights)
    rl.WeightSync(source, engine)(version=1)
    before = engine.process()
    for replica in range(2):
        weights.on_engine_death(replica, RuntimeError("its engine died"))
    assert healing.wait(DEADLINE_S)
    assert not set(before) & set(engine.process())


@pytest.mark.backends("local")
def test_a_death_is_waited_for_before_its_replacement_has_begun(source, mortal):
    engine, may_go_on = mortal, threading.Event()
    engine.on_death(lambda _: may_go_on.wait(DEADLINE_S))  # the replacement begins in the same thread after it
    sync = rl.WeightSync(source, engine, heals=True)
    sync(version=1)
    os.kill(engine.process()[0], signal.SIGKILL)
    sync(version=2)  # of the other replica
    assert not sync.wait_until_healed(0.01)
    waited = threading.Thread(target=may_go_on.set)
    waited.start()
    assert sync.wait_until_healed(DEADLINE_S)
    waited.join()
    assert_has(engine, source, 2)
    may_go_on.clear()
    os.kill(engine.process()[1], signal.SIGKILL)
    sync(version=3)
    engine.close()
    assert sync.wait_until_healed(DEADLINE_S), "there is nothing to replace any more"
    may_go_on.set()


class Fragile(Recorder):
    """An engine whose constructor fails while a file is there."""

    def __init__(self, file):
        if os.path.exists(file):
            raise RuntimeError("no room on the device")
        super().__init__()


@pytest.mark.backends("local")
def test_a_sync_waits_for_no_replica_that_nobody_replaces_any_more(source, make_group, tmp_path):
    engine = make_group(1, Fragile, tmp_path / "fails")
    sync = rl.WeightSync(source, engine, heals=True)
    sync(version=1)
    (tmp_path / "fails").touch()
    os.kill(engine.process()[0], signal.SIGKILL)
    with pytest.raises(bm.ConstructorError, match="no room on the device"):
        while sync.wait_until_healed(DEADLINE_S):
            engine.healthy  # noqa: B018  # it is told of deaths then
    with pytest.raises(bm.WorkerDied):
        sync.submit(version=2).result(DEADLINE_S)
    (tmp_path / "fails").unlink()
    engine.replace(0)
    sync(version=3)
    os.kill(engine.process()[0], signal.SIGKILL)
    sync(version=4)  # waits for the replacement, though the last one has failed
    assert_has(engine, source, 4)


class Refusing(Recorder):
    """An engine that takes no weights but its first ones while a file is there."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def load_weights(self, weights):
        if os.path.exists(self.file) and any(tensor.any() for tensor in weights.values()):
            raise RuntimeError("no room on the device")
        super().load_weights(weights)


@pytest.mark.backends("local")
def test_a_replica_that_was_replaced_and_refuses_its_weights_gets_no_requests(source, make_group, tmp_path):
    engine = make_group(2, Refusing, tmp_path / "fails")
    sync = rl.WeightSync(source, engine, heals=True)
    sync(version=1)
    (tmp_path / "fails").touch()
    os.kill(engine.process()[0], signal.SIGKILL)
    with pytest.raises(bm.RemoteError, match="no room on the device"):
        while sync.wait_until_healed(DEADLINE_S):
            engine.healthy  # noqa: B018  # it is told of deaths then
    asked = [engine.request.options(timeout=DEADLINE_S)([1]) for _ in range(4)]
    assert [one.result()[0].versions for one in asked] == [[1]] * 4
    (tmp_path / "fails").unlink()
    sync(version=2)
    assert engine.request.options(replica=0, timeout=DEADLINE_S)([1]).result()[0].versions == [2]


async def awaited(sync):
    await sync.submit(version=5)


def test_a_submitted_sync_can_be_awaited(source, engine):
    asyncio.run(awaited(rl.WeightSync(source, engine)))
    assert_has(engine, source, 5)


def test_ctrl_c_as_a_sync_is_submitted_leaves_no_other_sync_beside_it(source, make_group):
    engine = make_group(2, Stubborn)
    sync = rl.WeightSync(source, engine)
    asked = engine.request.options(replica=0)([5])
    until(lambda: engine.metrics.options(replica=0)().result()["n_open"])
    with interrupted_when(lambda frame, kind, _: kind == "return" and frame.f_code is threading.Thread.start.__code__):
        sync.submit(version=1, in_flight="wait")  # its thread goes on
    engine.go.all().result()
    sync(version=2)  # waits for it
    assert_has(engine, source, 2)
    assert asked.result(DEADLINE_S)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "bandmaster-weights"])


@pytest.mark.backends("local")
def test_ctrl_c_ends_a_sync_that_waits_for_replicas_while_these_start_again(source, make_group, tmp_path):
    engine, may_go_on = make_group(bm.Mesh(dp=1, tp=2), SlowAgain, tmp_path), threading.Event()
    engine.on_death(lambda _: may_go_on.wait(DEADLINE_S))  # the replacement begins in the same thread after it
    sync = rl.WeightSync(source, engine, heals=True)
    sync(version=1)
    (tmp_path / "begun").touch()

    def press():
        until((tmp_path / "again").exists)
        os.kill(os.getpid(), signal.SIGINT)
        is_interrupted.wait(5)
        (tmp_path / "go").touch()

    is_interrupted, pressing = threading.Event(), threading.Thread(target=press)
    pressing.start()
    os.kill(engine.process()[1], signal.SIGKILL)
    with (
        pytest.raises(KeyboardInterrupt),
        done_when(lambda frame, *_: frame.f_code is EngineSync._is_healed.__code__, may_go_on.set),
    ):
        sync(version=2)
    assert not (tmp_path / "go").exists()
    is_interrupted.set()
    pressing.join()
    assert sync.wait_until_healed(DEADLINE_S)
    sync(version=3)
    assert_has(engine, source, 3)


@pytest.mark.backends("local")
def test_replicas_of_several_ranks_are_restarted_together(source, make_group, monkeypatch):
    engine = make_group(bm.Mesh(dp=2, tp=2), Recorder)
    sync = rl.WeightSync(source, engine, heals=True)
    sync(version=1)
    told = threading.Event()
    monkeypatch.setattr(logging.getLogger("bandmaster.rl"), "warning", lambda *_: told.set())
    os.kill(engine.process()[3], signal.SIGKILL)
    assert told.wait(DEADLINE_S)
    assert sync.wait_until_healed(DEADLINE_S)
    assert_has(engine, source, 1)


def test_tensors_without_elements_are_packed_with_others():
    tensors = [torch.ones(3, 2), torch.empty(0, 4, dtype=torch.bfloat16), torch.empty(0), torch.full((2,), True)]
    for some in (tensors, tensors[1:3]):
        packed = pack(some)
        for place, data in zip(some, packed.split([one.numel() * one.itemsize for one in some]), strict=True):
            found = torch.empty_like(place)
            fill(found, data)
            assert torch.equal(found, place)


# --- deadlines ---


class Stubborn(Recorder):
    """An engine whose requests do not end until they are told to."""

    async def increments(self, prompt, sampling):
        self.n_open += 1
        await self.going.wait()
        self.n_open -= 1
        yield rl.Answer([prompt[0]], [0.0], [self.version], "length")

    async def pause(self, mode="abort"):
        await super().pause(mode)
        while mode == "wait" and self.n_open:
            await asyncio.sleep(0.001)

    @register(Dispatch.REQUEST, concurrency=8)
    async def go(self):
        self.going.set()

    n_open = 0


def test_a_sync_that_waits_too_long_is_called_off(source, make_group):
    engine = make_group(2, Stubborn)
    sync = rl.WeightSync(source, engine)
    sync(version=1)
    asked = engine.request.options(replica=0)([5])
    while not engine.metrics.options(replica=0)().result()["n_open"]:
        pass
    engine.set_default_options(timeout=0.5)
    with pytest.raises(bm.CallTimeout):
        sync(version=2, in_flight="wait")
    engine.set_default_options(timeout=DEADLINE_S)
    engine.go.all().result()
    assert asked.result()[0].versions == [1]
    assert [figures["version"] for figures in engine.metrics.all().result()] == [1, 1]
    assert engine.state()[0][2] == 1, "the replica that had waited did not load what was called off"
    sync(version=3, in_flight="wait")
    assert_has(engine, source, 3)


def test_of_two_syncs_at_a_time_the_later_one_is_in_use(source, make_group):
    engine = make_group(2, Stubborn)
    first, later = rl.WeightSync(source, engine), rl.WeightSync(source, engine)
    asked = engine.request.options(replica=0)([5])
    until(lambda: engine.metrics.options(replica=0)().result()["n_open"])
    waiting = first.submit(version=1, in_flight="wait")
    until(lambda: engine.metrics.options(replica=1)().result()["version"] == 1)
    ended = later.submit(version=2, in_flight="keep")
    until(lambda: engine.metrics.options(replica=1)().result()["version"] == 2)
    engine.go.all().result()
    with pytest.raises(bm.RemoteError, match="another sync to this group has begun since"):
        waiting.result(DEADLINE_S)
    ended.result(DEADLINE_S)
    assert [figures["version"] for figures in engine.metrics.all().result()] == [2, 2]
    assert asked.result(DEADLINE_S)


def test_a_later_sync_that_waits_is_not_called_off_with_the_earlier_one(source, make_group):
    engine = make_group(2, Stubborn)
    first, later = rl.WeightSync(source, engine), rl.WeightSync(source, engine)
    asked = [engine.request.options(replica=0)([5])]
    until(lambda: engine.metrics.options(replica=0)().result()["n_open"])
    waiting = first.submit(version=1, in_flight="wait")
    until(lambda: engine.metrics.options(replica=1)().result()["version"] == 1)
    asked.append(engine.request.options(replica=1)([5]))
    until(lambda: engine.metrics.options(replica=1)().result()["n_open"])
    ended = later.submit(version=2, in_flight="wait")
    until(lambda: not engine.facts.options(replica=1)().result().is_ready)
    engine.go.options(replica=0)().result()
    until(lambda: engine.metrics.options(replica=0)().result()["version"] == 2)
    engine.go.options(replica=1)().result()
    with pytest.raises(bm.RemoteError, match="another sync to this group has begun since"):
        waiting.result(DEADLINE_S)
    ended.result(DEADLINE_S)
    assert [figures["version"] for figures in engine.metrics.all().result()] == [2, 2]
    assert all(one.result(DEADLINE_S) for one in asked)
