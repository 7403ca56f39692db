"""Two replicas of two ranks each: batches of tensor-parallel engines, and what they leave on the host."""

import os
from pathlib import Path

import numpy as np
import pytest
from small_vllm import OPTIONS

import bandmaster as bm
from bandmaster import Dispatch, register, rl
from bandmaster.rl import Sampling

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [14, 8], [20, 21, 22, 23, 24], [9] * 40, [3]]
SHARED = Path("/dev/shm")


class Rollout(rl.VLLM):
    @register(Dispatch.ONE_TO_ALL)
    def answers_of_each(self, prompts, sampling):
        """What each rank has found for itself."""
        return [answer.tokens for answer in self._answer_together(prompts, [sampling] * len(prompts))]

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()


class Holder(rl.HoldsWeights):
    def weights(self):
        return {}


@pytest.fixture(scope="module")
def engine(model_path):
    before = set(SHARED.iterdir())
    with bm.ResourcePool([4], backend="local") as pool:
        group = bm.WorkerGroup(pool, Rollout, model_path, mesh=bm.Mesh(dp=2, tp=2), **OPTIONS)
        group.generate({"prompt": PROMPTS}, GREEDY)
        group.metrics.all().result()
        yield group
    assert [file for file in set(SHARED.iterdir()) - before if "cpushm" in file.name] == []


def test_greedy_tokens_are_those_of_transformers(engine, reference):
    rows = engine.generate({"prompt": PROMPTS}, GREEDY)
    assert [one.tolist() for one in rows["answer"]] == [reference.greedy(prompt, 12) for prompt in PROMPTS]
    for prompt, answer, log_probs in zip(PROMPTS, rows["answer"], rows["log_probs"], strict=True):
        expected = reference.log_probs(prompt, answer.tolist())[np.arange(len(answer)), answer]
        assert np.abs(expected.numpy() - log_probs).max() <= 1e-4


def test_all_ranks_of_a_replica_choose_the_same_tokens(engine):
    sampled = Sampling(max_tokens=20, ignore_eos=True)
    first, second, third, fourth = engine.answers_of_each(PROMPTS, sampled)
    assert first == second and third == fourth
    assert first != third, "replicas draw from streams of their own"


def test_no_shared_memory_has_a_name_while_the_engines_run(engine):
    assert [file.name for file in SHARED.iterdir() if "cpushm" in file.name] == []


def test_a_request_is_an_error_that_names_the_way_out(engine):
    with pytest.raises(
        bm.RemoteError, match=r"2 ranks along tp.*call generate.*gpus_per_worker=2.*tensor_parallel_size=2"
    ):
        engine.request(PROMPTS[0], GREEDY).result()
    with pytest.raises(bm.RemoteError, match="answers batches alone"):
        list(engine.tokens.stream(PROMPTS[0], GREEDY))


def test_control_reaches_all_ranks(engine):
    for begin, end in ((engine.pause, engine.resume), (engine.sleep, engine.wake)):
        begin.all().result()
        with pytest.raises(bm.RemoteError, match="paused or asleep"):
            engine.generate({"prompt": PROMPTS}, GREEDY)
        end.all().result()
    engine.abort.all().result()
    engine.reset_cache.all().result()
    assert engine.generate({"prompt": PROMPTS}, GREEDY)["n_tokens"].tolist() == [12] * 5


def test_a_bad_prompt_is_an_error_on_all_ranks_alike(engine):
    with pytest.raises(bm.RemoteError, match="prompt 1 has the token id 64"):
        engine.generate({"prompt": [[1], [1], [1], [64]]}, GREEDY)
    assert engine.generate({"prompt": PROMPTS}, GREEDY)["n_tokens"].tolist() == [12] * 5


def test_weights_of_a_gpu_are_shared_with_one_rank_alone(engine):
    with bm.ResourcePool([1], backend="local") as pool:
        holder = bm.WorkerGroup(pool, Holder)
        with pytest.raises(bm.RemoteError, match=r"share=True is for engines.*2 ranks along tp; leave it out"):
            rl.WeightSync(holder, engine, share=True)


def test_no_rank_of_several_is_replaced_alone(engine):
    with pytest.raises(bm.UsageError, match=r"2 ranks of an engine along tp start together.*restart\(\)"):
        engine.replace(1)
    assert engine.generate({"prompt": PROMPTS}, GREEDY)["n_tokens"].tolist() == [12] * 5


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        (bm.Mesh(dp=1, tp=2), {"tensor_parallel_size": 2}, "tensor_parallel_size follows from the 2 ranks"),
        (bm.Mesh(tp=2, dp=2), {}, "do not follow each other, as vLLM needs; put tp last"),
    ],
    ids=["option", "order"],
)
def test_options_that_contradict_the_mesh_are_refused(model_path, mesh, options, said):
    with (
        bm.ResourcePool([mesh.size], backend="local") as pool,
        pytest.raises(bm.ConstructorError, match=said),
    ):
        bm.WorkerGroup(pool, rl.VLLM, model_path, mesh=mesh, **options)
