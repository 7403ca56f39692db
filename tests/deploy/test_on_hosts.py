"""The recipes of docs/deploy/ that need several hosts, on hosts of the testbed: GRPO on two of them, from nothing.

Each runs where the programs that it is about are installed, and is skipped elsewhere.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import by_ssh
import pytest
import slurm
from hosts import Hosts, address, why_not

ROOT = Path(__file__).parents[2]
VENV = Path(sys.executable).parents[1]
N_CPUS = 4
TIMEOUT_S = 500
SMALL = ["--train", "dp=2", "--nodes", "2", "--warm-up", "2", "--steps", "2"]
SMALL += ["--n-prompts", "8", "--n-samples", "4", "--n-batches", "2"]
ENGINE = ["--engine", "toy", "--replicas", "2"]

pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


@pytest.fixture
def bare(request):
    """Hosts without Ray."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(2, ray=False) as hosts:
        yield hosts


def skip_without(programs):
    if programs:
        pytest.skip(f"not installed: {', '.join(programs)}")


def without_ray(environment):
    """An environment that says nothing of a Ray, and in which programs find this checkout."""
    left = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
    return {**left, "VENV": str(VENV), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "CUDA_VISIBLE_DEVICES": ""}


def has_rank(hosts, host):
    """Whether a host has a rank of a group, by what `bandmaster ps` says there."""
    command = hosts.command(host, [sys.executable, "-m", "bandmaster", "ps"])
    done = subprocess.run(command, env=without_ray(os.environ), capture_output=True, text=True, check=True)
    return "actor_reference_reward" in done.stdout


def metrics_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_gloo_takes_the_interface_to_the_other_hosts_where_the_hosts_name_has_no_address(bare):
    said = "import os\nfrom bandmaster.rl.gloo_interface import choose_interface\n"
    said += f"choose_interface('{address(1)}')\nprint(os.environ.get('GLOO_SOCKET_IFNAME'))"

    def chosen(**environment):
        command = bare.command(0, [sys.executable, "-c", said])
        environment = {**without_ray(os.environ), **environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert chosen() == "eth0"
    assert chosen(GLOO_SOCKET_IFNAME="other") == "other"


def test_slurm(bare, tmp_path):
    skip_without(slurm.missing())
    with slurm.slurm(bare, tmp_path, N_CPUS) as run:
        out = tmp_path / "run"
        told = ["--wait", "--nodes=2", f"--output={tmp_path}/said"]
        done = run("sbatch", *told, "examples/deploy/slurm.sh", *SMALL, *ENGINE, "--out", str(out), timeout=TIMEOUT_S)
        said = (tmp_path / "said").read_text()
        assert done.returncode == 0, said + done.stderr + slurm.logs(tmp_path)
        assert [line["step"] for line in metrics_of(out)] == [0, 1, 2]

        failed = run("sbatch", *told, "examples/deploy/slurm.sh", "--train", "x", timeout=TIMEOUT_S)
        assert failed.returncode == 1, "the job fails if the program does"
        assert "--train takes the sizes of dp and tp" in (tmp_path / "said").read_text()


def test_ssh(bare, tmp_path):
    skip_without(by_ssh.missing())
    out = tmp_path / "run"
    with by_ssh.sshd(bare, tmp_path) as ssh:
        environment = {
            **without_ray(bare.environment),
            "SSH": " ".join(ssh),
            "RAY_START_OPTIONS": f"--num-cpus={N_CPUS}",
        }
        program = [str(VENV / "bin" / "python"), "examples/rlhf/grpo.py", "--backend", "ray", *SMALL, *ENGINE]
        command = ["examples/deploy/ssh.sh", address(1), "--", *program, "--out", str(out)]
        done = subprocess.run(
            bare.command(0, command), env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert [line["step"] for line in metrics_of(out)] == [0, 1, 2]
        for host in range(bare.n):
            left = subprocess.run(bare.command(host, ["pgrep", "-f", "raylet|gcs_server"]), capture_output=True)
            assert not left.stdout, f"Ray still runs on host {host}"


def test_a_spot_host_is_taken_away(tmp_path):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    out = tmp_path / "run"
    with Hosts(4, cpus=N_CPUS) as hosts:
        program = [sys.executable, "-u", "examples/rlhf/grpo.py", "--backend", "ray", *SMALL, "--steps", "40"]
        program += ["--save-every", "1", "--spares", "1", "--out", str(out)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = {**hosts.environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        with subprocess.Popen(hosts.command(0, program), env=environment, cwd=ROOT, **pipes) as process:
            watchdog = threading.Timer(TIMEOUT_S, hosts.power_off, [0])
            watchdog.start()
            try:
                while not (out / "step-00001" / "actor" / ".metadata").exists() and process.poll() is None:
                    time.sleep(0.1)  # polling for the program
                hosts.power_off(next(host for host in hosts.others() if has_rank(hosts, host)))
                said = process.communicate()[0]
            finally:
                watchdog.cancel()
    assert process.returncode == 0, said
    assert "going on from the last checkpoint, on a spare host" in said
    assert [line["step"] for line in metrics_of(out)] == list(range(41))
