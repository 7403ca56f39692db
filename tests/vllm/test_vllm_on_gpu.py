"""vLLM on a CUDA device: answers, weights from a trainer on the same device, and memory that engines give up."""

import subprocess
from functools import partial

import pytest
import tiny_model
import torch
from engine_contract import Source
from small_vllm import OPTIONS
from yielding import Yielding

import bandmaster as bm
from bandmaster import rl
from bandmaster.rl import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [14, 8], [20, 21, 22, 23, 24], [9] * 40]
CACHE_NBYTES = 4 << 30
LOG_PROBS_DIFFER = 1e-2  # vLLM's kernels for GPUs multiply float32 less exactly than those for CPUs: 0.003 was seen
OPTIONS = {**OPTIONS, "kv_cache_memory_bytes": CACHE_NBYTES, "enable_sleep_mode": True}


class Trainer(Source):
    """A trainer whose model is on the GPU."""

    def __init__(self, path):
        super().__init__(partial(tiny_model.load, path), lambda model, worker: model.to(worker.device))

    @staticmethod
    def _whole(weight):
        return weight.detach().cpu()


class Rollout(Yielding):
    """An engine that gives up its device in the turns of others."""

    def __init__(self, model):
        super().__init__(model, **OPTIONS)


def used_nbytes():
    """Memory of the GPU that processes use, by its driver."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def answers(engine):
    return [one.tolist() for one in engine.generate({"prompt": PROMPTS}, GREEDY)["answer"]]


def assert_has_weights_of(reference, engine):
    """All tokens of an engine are the most probable ones, or nearly, and its log-probs are those of the reference."""
    rows = engine.generate({"prompt": PROMPTS}, GREEDY)
    for prompt, answer, found in zip(PROMPTS, rows["answer"], rows["log_probs"], strict=True):
        expected = reference.log_probs(prompt, answer.tolist())
        chosen = expected.gather(1, torch.as_tensor(answer)[:, None])[:, 0]
        assert (expected.max(dim=1).values - chosen).max() <= LOG_PROBS_DIFFER
        assert (torch.as_tensor(found) - chosen).abs().max() <= LOG_PROBS_DIFFER


@pytest.fixture(scope="module")
def pool():
    with bm.ResourcePool([1], backend="local", use_gpu=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def engine(pool, model_path):
    return bm.WorkerGroup(pool, rl.VLLM, model_path, **OPTIONS)


@pytest.fixture(scope="module")
def trainer(pool, model_path):
    return bm.WorkerGroup(pool, Trainer, model_path)


def test_answers_and_log_probs_are_those_of_transformers(engine, reference):
    assert answers(engine) == [reference.greedy(prompt, 12) for prompt in PROMPTS]
    assert_has_weights_of(reference, engine)
    (answer,) = engine.request(PROMPTS[0], GREEDY).result()
    assert answer.tokens == reference.greedy(PROMPTS[0], 12)
    assert rl.Answer.joined(list(engine.tokens.stream(PROMPTS[0], GREEDY))).tokens == answer.tokens


@pytest.mark.parametrize("option", [None, "delta", "share"])
def test_weights_of_a_trainer_on_the_same_gpu(option, engine, trainer, reference):
    sync = rl.WeightSync(trainer, engine, **({option: True} if option else {}))
    first = {None: 1, "delta": 11, "share": 21}[option]
    for version in range(first, first + 5):
        trainer.nudge(version)
        sync(version=version)
        reference.follow(trainer)
        assert_has_weights_of(reference, engine)


def test_sleep_gives_the_cache_and_the_weights_up(engine):
    expected, before = answers(engine), used_nbytes()
    engine.sleep.all().result()
    asleep = used_nbytes()
    assert before - asleep > 0.9 * CACHE_NBYTES
    engine.wake.all("weights").result()
    assert used_nbytes() < asleep + 0.1 * CACHE_NBYTES
    engine.wake.all("kv_cache").result()
    assert used_nbytes() > asleep + 0.9 * CACHE_NBYTES
    assert answers(engine) == expected


@pytest.mark.parametrize("share", [False, True])
def test_a_trainer_and_an_engine_in_one_process_take_turns(share, pool, model_path):
    reference = tiny_model.Reference(model_path)
    both = bm.colocate(pool, actor=(Trainer, model_path), rollout=(Rollout, model_path))
    actor, rollout = both.actor, both.rollout
    with actor.turn(rollout):
        sync = rl.WeightSync(actor, rollout, share=share)
    for version in range(1, 4):
        with actor.turn():
            actor.draw(version)
            reference.follow(actor)
        with actor.turn(rollout):
            sync(version=version)
        with rollout.turn():
            assert_has_weights_of(reference, rollout)
