"""Parts of the programs in examples/: options of the command line, folders of runs, losses, replicas that die."""

import importlib
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from by_value import sent_by_value

import bandmaster as bm
from bandmaster import Dispatch, register, rl

FOLDER = Path(__file__).parent.parent / "examples" / "rlhf"


@pytest.fixture(scope="module", autouse=True)
def programs():
    """The modules of the programs, importable here and sent to workers by value."""
    with sent_by_value(FOLDER, *sorted(path.stem for path in FOLDER.glob("*.py"))):
        yield


@pytest.fixture
def given(monkeypatch):
    """``given("grpo", "--steps", "1")``: the options that a program takes from its command line."""

    def given(program, *words):
        monkeypatch.setattr(sys, "argv", [program, *words])
        module = importlib.import_module(program)
        return importlib.import_module("options").of_command_line(module.DEFAULTS(), None)

    return given


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        ("grpo", ["--n-samples", "1"], "--n-samples must be at least 2, got 1"),
        ("async_grpo", ["--n-samples", "1"], "--n-samples must be at least 2, got 1"),
        ("agent_grpo", ["--n-samples", "1"], "--n-samples must be at least 2, got 1"),
        ("ppo", ["--n-batches", "0"], "--n-batches must be at least 1, got 0"),
        ("grpo", ["--n-prompts", "0"], "--n-prompts must be at least 1, got 0"),
        ("grpo", ["--warm-up", "-1"], "--warm-up must be at least 0, got -1"),
        ("grpo", ["--nodes", "0"], "--nodes must be at least 1, got 0"),
        ("grpo", ["--engine", "toy", "--replicas", "0"], "--replicas must be at least 1, got 0"),
        ("async_grpo", ["--rollouts", "0"], "--rollouts must be at least 1, got 0"),
        ("grpo", ["--resume"], "--resume needs --out"),
        ("grpo", ["--plot", "x.foo"], "--plot takes a file that ends with .svg, .*; got 'x.foo'"),
        ("agent_grpo", ["--timeline", "last"], "--timeline takes a file that ends with .html, .*; got 'last'"),
    ],
    ids=str,
)
def test_an_option_without_a_meaning_is_named(given, program, words, message):
    with pytest.raises(SystemExit, match=message):
        given(program, *words)


@pytest.mark.parametrize("words", [["--placement", "Split"], ["--labels", "rihgt"]], ids=str)
def test_an_unknown_word_is_an_error_that_names_the_known_ones(given, capsys, words):
    with pytest.raises(SystemExit):
        given("grpo", *words)
    assert f"argument {words[0]}: invalid choice: '{words[1]}'" in capsys.readouterr().err


def test_options_at_their_least_values_are_taken(given):
    assert given("ppo", "--n-samples", "1").n_samples == 1
    options = given("grpo", "--eval-every", "0", "--save-every", "0", "--warm-up", "0", "--plot", "curves.svg")
    assert (options.eval_every, options.save_every, options.warm_up) == (0, 0, 0)


def test_spare_hosts_are_for_ray():
    options = importlib.import_module("surviving").SpareOptions(spares=1, out="runs/a")
    with pytest.raises(SystemExit, match="--spares needs --backend ray and --out"):
        options.pool(1)


def test_one_answer_has_no_advantage_over_others():
    with pytest.raises(ValueError, match="2 or more answers to a prompt, got n_samples=1"):
        importlib.import_module("losses").group_advantages(torch.ones(4), 1)


def test_models_restart_when_rows_are_lost_with_a_host():
    options, seen = importlib.import_module("surviving").SpareOptions(spares=1), []

    def train():
        seen.append(options.resume)
        if len(seen) == 1:
            raise bm.RowsLost("rows lay on a host that was lost")

    group = SimpleNamespace(restart=lambda: seen.append("restart"))
    importlib.import_module("surviving").surviving(options, [group], train)
    assert seen == [False, "restart", True]


class Model(bm.Worker):
    """Stands for a model in training: its weights are a number, which the steps of the run change."""

    def __init__(self):
        self.weights = 0

    @register(Dispatch.ONE_TO_ALL)
    def save(self, path, step):
        Path(path).mkdir(parents=True, exist_ok=True)
        Path(path, "saved").write_text(f"{self.weights} {step}")
        Path(path, ".metadata").touch()

    @register(Dispatch.ONE_TO_ALL)
    def load(self, path):
        self.weights, step = map(int, Path(path, "saved").read_text().split())
        return step

    @register(Dispatch.ONE_TO_ALL)
    def imitate(self, rows, lr):
        self.weights += 100

    @register(Dispatch.ONE_TO_ALL)
    def forget(self):
        pass

    @register(Dispatch.ONE_TO_ALL)
    def update(self, n=1):
        self.weights += n
        return self.weights

    @register(Dispatch.DP_PROTO)
    def generate(self, prompts, temperature):
        return {"reward": torch.ones(len(prompts["prompt"]))}

    @register(Dispatch.DP_PROTO)
    def score(self, rows):
        return rows


@pytest.fixture
def run(tmp_path):
    """``run(steps=2)``: the metrics of a run in a folder, and the weights of its reference and in the end."""

    def run(roles=("actor",), **options):
        running = importlib.import_module("running")
        small = {"warm_up": 1, "n_prompts": 2, "n_samples": 2, "save_every": 1, "log": "none", "backend": "inprocess"}
        chosen = importlib.import_module("options").Options(**{**small, "out": str(tmp_path / "run"), **options})
        reference = []
        with bm.ResourcePool([1], backend="inprocess") as pool:
            groups = {role: bm.WorkerGroup(pool, Model) for role in roles}
            actor = groups.pop("actor")
            with running.Run(chosen, actor, actor) as run:
                start = run.begin(lambda: reference.extend(actor.update(0)), **groups)
                for metrics in run.steps(start):
                    metrics["weights"] = actor.update()[0]
            return run.metrics, reference[0], actor.update(0)[0]

    return run


def steps_of(metrics):
    return [line["step"] for line in metrics]


def test_a_new_run_leaves_the_folder_of_another_one_alone(run):
    run(steps=2)
    with pytest.raises(SystemExit, match=r"--out .*run has a run already: add --resume, or name another folder"):
        run(steps=1)
    with pytest.raises(SystemExit, match=r"--out .*run has a run but no checkpoint of actor and critic"):
        run(roles=("actor", "critic"), steps=3, resume=True)
    metrics, reference, weights = run(steps=3, resume=True)
    assert steps_of(metrics) == [0, 1, 2, 3] and (reference, weights) == (100, 103)


def test_resume_begins_where_nothing_is_to_go_on_from(run, tmp_path):
    (tmp_path / "run" / "warm-up" / "actor").mkdir(parents=True)  # was killed while it saved the weights
    assert steps_of(run(steps=1, resume=True)[0]) == [0, 1]


def test_a_run_goes_on_without_its_metrics(run, tmp_path):
    run(steps=2)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert steps_of(run(steps=3, resume=True)[0]) == [2, 3]
    metrics, _, weights = run(steps=4, resume=True)
    assert steps_of(metrics) == [2, 3, 4] and weights == 104


def test_the_reference_is_the_policy_after_the_warm_up(run, tmp_path):
    run(steps=2)
    (tmp_path / "run" / "warm-up").rename(tmp_path / "kept")
    with pytest.raises(SystemExit, match=r"--resume needs .*warm-up, the weights of the reference"):
        run(steps=3, resume=True)


def test_a_picture_that_cannot_be_written_costs_no_step(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        run(steps=2, timeline=str(tmp_path / "file" / "last.html"))
    assert steps_of(run(steps=2, resume=True, timeline=str(tmp_path / "new" / "last.html"))[0]) == [0, 1, 2]
    assert run(steps=3, resume=True, timeline=str(tmp_path / "new" / "last.html"))[2] == 103
    assert (tmp_path / "new" / "last.html").exists()


def test_evaluations_may_be_left_out_but_for_the_last(run):
    metrics, *_ = run(steps=3, eval_every=0)
    assert [line["step"] for line in metrics if "accuracy" in line] == [0, 3]


def test_there_are_not_more_prompts_than_problems(run):
    with pytest.raises(SystemExit, match="--n-prompts is at most 9500, all problems, got 9501"):
        run(n_prompts=9501)


class Replica(rl.HoldsWeights):
    """One weight, which says of which version it is."""

    def __init__(self):
        self.weight = torch.zeros(1)

    def weights(self):
        return {"weight": self.weight}

    @register(Dispatch.ONE_TO_ALL)
    def set(self, value):
        self.weight.fill_(value)

    @register(Dispatch.ONE_TO_ALL)
    def state(self):
        return float(self.weight), self.weights_version

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()

    def on_replace(self, rank, state):
        pass


@pytest.mark.slow
def test_all_replicas_have_the_weights_that_they_say_after_one_has_died():
    heal = importlib.import_module("async_grpo").heal
    with bm.ResourcePool([1]) as trainers, bm.ResourcePool([2]) as servers:
        actor, rollout = bm.WorkerGroup(trainers, Replica), bm.WorkerGroup(servers, Replica)
        sync = rl.WeightSync(actor, rollout)
        sync(version=0)
        os.kill(rollout.process()[0], signal.SIGKILL)
        actor.set(1)
        error = sync.submit(version=1).exception()
        heal(rollout, [error], sync, 1)
        assert rollout.state() == [(1.0, 1), (1.0, 1)]
        heal(rollout, [error], sync, 1)  # is known, and the replica that it names is new
        assert rollout.state() == [(1.0, 1), (1.0, 1)]
        with pytest.raises(RuntimeError, match="a bug"):
            heal(rollout, [RuntimeError("a bug")], sync, 1)
