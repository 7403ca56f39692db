"""Requests as verl's clients make them, with `bandmaster.compat.verl_rollout`: in an environment with verl.

`make test-verl-requests` runs them, `make test-verl-fast` as well.
"""

import asyncio
import re

import pytest
import torch
from hot_path import CONFIG, Engine
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

import bandmaster as bm
from bandmaster import rl
from bandmaster.compat import verl_rollout
from bandmaster.compat.verl_rollout import EngineClient, EngineHandle, Engines


class Echo(Engine):
    """Answers with what it was asked for."""

    asked = None

    async def answers(self, prompt, sampling):
        type(self).asked = sampling
        if prompt[0] == 13:
            return [rl.Answer([], [], [], "abort")]
        n = sampling.max_tokens
        return [rl.Answer([self.rank] * n, None, [*[3] * (n - 1), 4], "length")]


@pytest.fixture(scope="module")
def engines():
    with bm.ResourcePool([2], backend="inprocess") as pool:
        yield Engines(
            bm.WorkerGroup(pool, Echo, mesh=bm.Mesh(dp=2)), {"retries": 1}, prompt_length=8, response_length=6
        )


def ask(engines, prompt=(1, 2), name="one", more=None, **params):
    client = EngineClient(CONFIG, engines)
    return asyncio.run(client.generate(name, prompt_ids=list(prompt), sampling_params=params, **(more or {})))


def test_verl_finds_the_rollout_by_its_name():
    assert get_rollout_replica_class("bandmaster") is verl_rollout.EngineReplica
    assert get_rollout_class("bandmaster") is verl_rollout.ServerAdapter


def test_turns_of_a_conversation_go_to_one_replica_and_name_their_weights(engines):
    first = ask(engines)
    assert len(set(first.token_ids)) == 1
    assert [ask(engines).token_ids for _ in range(4)] == [first.token_ids] * 4
    assert first.stop_reason == "completed"
    assert (first.extra_fields["min_global_steps"], first.extra_fields["max_global_steps"]) == (3, 4)
    assert ask(engines, prompt=[13]).stop_reason == "aborted"


@pytest.mark.parametrize(
    ("prompt", "params", "n_tokens"),
    [
        ([1], {"max_tokens": 3}, 3),
        ([1], {"max_new_tokens": 2}, 2),
        ([1, 2], {}, 6),
        (range(1, 11), {}, 4),
        (range(1, 30), {}, 1),
    ],
)
def test_an_answer_has_as_many_tokens_as_verl_leaves_room_for(engines, prompt, params, n_tokens):
    assert len(ask(engines, prompt=prompt, **params).token_ids) == n_tokens


def test_verls_parameters_are_those_of_the_engine(engines):
    ask(engines, temperature=0.5, top_p=0.9, top_k=-1, repetition_penalty=1.0, logprobs=True, stop=["x"])
    assert Echo.asked == rl.Sampling(max_tokens=6, temperature=0.5, top_p=0.9, top_k=0, logprobs=0, stop=["x"])
    ask(engines, repetition_penalty=1.2, logprobs=False, top_k=5)
    assert Echo.asked == rl.Sampling(max_tokens=6, top_k=5, logprobs=None, extra={"repetition_penalty": 1.2})


def test_images_are_refused_before_anything_is_sent(engines):
    with pytest.raises(bm.UsageError, match="prompts of text, and this one comes with image_data; use verl's own"):
        ask(engines, more={"image_data": ["a picture"]})
    assert ask(engines, more={"image_data": None, "video_data": [], "priority": 3}).token_ids


def test_a_handle_is_one_replica_as_the_balancer_hands_it_out(engines):
    for replica in range(2):
        handle = EngineHandle(engines, replica)
        output = asyncio.run(_awaited(handle.generate.remote(request_id="a", prompt_ids=[1], sampling_params={})))
        assert set(output.token_ids) == {replica}


async def _awaited(one):
    return await one


class Loads(Echo):
    """Takes two weights, and keeps them."""

    loaded = None

    def weights_specs(self):
        return {"a": ((2, 3), "float32"), "b": ((2,), "float32")}

    def load_weights(self, weights):
        type(self).loaded = {name: tensor.clone() for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"b": None}, "'b' of shape (2,)"), ({"a": torch.ones(3, 2)}, "'a' of shape (2, 3)")],
)
def test_weights_of_which_one_is_missing_or_of_another_shape_are_not_loaded(monkeypatch, wrong, said):
    class Adapter(verl_rollout.ServerAdapter):
        def __init__(self):  # without verl's configuration
            self._replica_rank, self._is_first, self._n_syncs, self._specs = 0, True, 0, None

    def bring(weights):
        given = [(name, tensor) for name, tensor in weights.items() if tensor is not None]
        asyncio.run(Adapter().update_weights(iter(given), global_steps=1))

    right = {"a": torch.ones(2, 3), "b": torch.ones(2), "more": torch.ones(1)}
    with bm.ResourcePool([1], backend="inprocess") as pool:
        engines = Engines(bm.WorkerGroup(pool, Loads, mesh=bm.Mesh(dp=1)), {}, prompt_length=8, response_length=6)
        monkeypatch.setitem(verl_rollout._leads, 0, verl_rollout._Lead(engines, 0))
        bring(right)
        assert {name: tensor.sum().item() for name, tensor in Loads.loaded.items()} == {"a": 6, "b": 2}
        Loads.loaded = None
        with pytest.raises(bm.UsageError, match=re.escape(f"the training worker did not send {said}")):
            bring({**right, **wrong})
        assert Loads.loaded is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.Engine", "cannot be imported: No module named 'nowhere'"),
        ("os.path", "no class derived from"),
        ("Engine", "cannot be"),
    ],
)
def test_an_engine_that_is_none_is_an_error_that_names_the_setting(name, said):
    with pytest.raises(bm.UsageError, match=f"rollout.custom.engine is '{name}'.*{said}"):
        verl_rollout._class_named(name)
