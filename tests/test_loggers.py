"""`--log` of the examples: metrics go to TensorBoard, wandb or trackio, in processes without a network."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from later import Later

transformers = Later("transformers")
RLHF = Path(__file__).parents[1] / "examples" / "rlhf"
SMALL = ["--train", "dp=1", "--backend", "inprocess", "--warm-up", "2", "--steps", "2", "--n-prompts", "4"]
SMALL += ["--n-samples", "4", "--n-batches", "1"]


def grpo(*words, **environment):
    command = [sys.executable, str(RLHF / "grpo.py"), *SMALL, *words]
    environment = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_metrics_are_logged_and_a_trained_model_is_exported(tmp_path):
    done = grpo("--out", str(tmp_path / "out"), "--log", "tensorboard", "--export", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    has_written(tmp_path, "out/events.out.tfevents.*")
    transformers.utils.logging.disable_progress_bar()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "llama"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "written"), [("wandb", "out/wandb/offline-run-*/run-*.wandb"), ("trackio", "trackio/*.db")]
)
def test_metrics_are_logged_by(tmp_path, name, written):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    done = grpo("--out", str(tmp_path / "out"), "--log", name, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert done.returncode == 0, done.stderr
    has_written(tmp_path, written)


def has_written(folder, pattern):
    (found,) = folder.glob(pattern)
    assert found.stat().st_size > 0


@pytest.mark.slow
def test_a_logger_that_is_not_known():
    assert "--log takes tensorboard, wandb, trackio, none; got 'x'" in grpo("--log", "x").stderr


def test_a_logger_that_has_no_folder():
    program = "import loggers, options; loggers.logger(options.Options(log='wandb'))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=RLHF, capture_output=True, text=True, timeout=60, check=False)
    assert "--log wandb needs --out" in done.stderr
