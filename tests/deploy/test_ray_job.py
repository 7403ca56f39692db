"""`ray job submit` as docs/deploy/ray-job.md has it, to a real head on this machine; needs ray[default]."""

import os
import secrets
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
START_TIMEOUT_S = 120
TIMEOUT_S = 300
SMALL = [
    "--train",
    "dp=2",
    "--warm-up",
    "2",
    "--steps",
    "2",
    "--n-prompts",
    "8",
    "--n-samples",
    "4",
    "--n-batches",
    "2",
]

pytestmark = [
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(find_spec("aiohttp_cors") is None, reason="ray[default] is not installed"),
]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A head with a server of jobs; yields the environment in which `ray job` finds it.

    It runs in the foreground, so that it ends with this process, and other clusters of the machine are left alone.
    """
    gcs, jobs = free_port(), free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{jobs}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    start = [RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}", "--num-cpus=8"]
    start += [f"--dashboard-port={jobs}", "--dashboard-agent-listen-port=0", "--disable-usage-stats", "--num-gpus=0"]
    start += ["--object-store-memory=200000000"]
    log = tmp_path_factory.mktemp("ray") / "log"
    with log.open("w") as file, subprocess.Popen(start, env=environment, stdout=file, stderr=file) as process:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while (listed := ray_job(environment, "list")).returncode:
                assert time.monotonic() < deadline, listed.stderr
            yield environment
        finally:
            process.terminate()
            process.wait(60)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def ray_job(environment, *words):
    command = [RAY, "job", *words]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.parametrize("folder", ["examples/rlhf", None], ids=["working-dir", "path"])
def test_a_job_trains(head, folder):
    where = ["--working-dir", folder] if folder else []
    program = "grpo.py" if folder else str(ROOT / "examples" / "rlhf" / "grpo.py")
    command = [sys.executable, program, "--backend", "ray", "--engine", "toy", *SMALL]
    done = ray_job(head, "submit", *where, "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after 2 steps" in done.stdout


def test_a_job_that_is_stopped_leaves_no_worker(head):
    program = "import bandmaster as bm, time\nclass Stays(bm.Worker): pass\n"
    program += (
        "pool = bm.ResourcePool([2], backend='ray')\ngroup = bm.WorkerGroup(pool, Stays, name='stays_in_a_job')\n"
    )
    program += "print('it runs', flush=True)\ntime.sleep(600)"
    command = ["submit", "--no-wait", "--submission-id", "stays", "--", sys.executable, "-c", f"'{program}'"]
    started = ray_job(head, *command)
    assert started.returncode == 0, started.stdout + started.stderr
    following = [RAY, "job", "logs", "--follow", "stays"]
    with subprocess.Popen(following, env=head, stdout=subprocess.PIPE, text=True) as followed:
        assert any("it runs" in line for line in followed.stdout)
        stopped = ray_job(head, "stop", "stays")
        followed.communicate(timeout=TIMEOUT_S)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    listed = subprocess.run(
        [sys.executable, "-m", "bandmaster", "ps"], env=head, capture_output=True, text=True, check=True
    )
    assert "stays_in_a_job" not in listed.stdout
