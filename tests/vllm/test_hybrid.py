"""A trainer and vLLM on the same ranks, which take turns: weights go from one to the other inside of each rank."""

import os
from functools import partial

import pytest
import tiny_model
from engine_contract import Source
from small_vllm import OPTIONS
from yielding import Yielding

import bandmaster as bm
from bandmaster import rl
from bandmaster.rl import Sampling

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [14, 8], [20, 21, 22, 23, 24], [9] * 40]


class Rollout(Yielding):
    """An engine that gives up its device in the turns of others."""

    def __init__(self, model):
        super().__init__(model, **OPTIONS)

    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def state(self):
        return os.getpid(), self.is_asleep


class Actor(Source):
    """A trainer that can see the engine of its rank."""

    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def state(self):
        return os.getpid(), self.roles["rollout"].is_asleep


@pytest.mark.parametrize("layout", [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], ids=["dp=2", "tp=2"])
def test_answers_follow_a_trainer_on_the_same_ranks(layout, model_path):
    mesh, reference = bm.Mesh(**layout), tiny_model.Reference(model_path)
    source = (Actor, partial(tiny_model.load, model_path), tiny_model.cut)
    with bm.ResourcePool([2], backend="local") as pool:
        both = bm.colocate(pool, meshes={"actor": mesh, "rollout": mesh}, rollout=(Rollout, model_path), actor=source)
        actor, rollout = both.actor, both.rollout
        with actor.turn(rollout):
            sync = rl.WeightSync(actor, rollout)
        for version in range(1, 4):
            with actor.turn():
                actor.draw(version)
                reference.follow(actor)
                processes, are_asleep = zip(*actor.state(), strict=True)
                assert all(are_asleep), "the engine has given up the device"
                with pytest.raises(bm.UsageError, match="has its turn on slots of group"):
                    rollout.state()
            with actor.turn(rollout):
                sync(version=version)
            with rollout.turn():
                rows = rollout.generate({"prompt": PROMPTS}, GREEDY)
                states = rollout.state()
            assert [one.tolist() for one in rows["answer"]] == [reference.greedy(prompt, 12) for prompt in PROMPTS]
            assert {token for one in rows["versions"] for token in one.tolist()} == {version}
            assert states == [(process, False) for process in processes], "in the same processes, and awake"
