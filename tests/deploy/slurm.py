"""A Slurm of the hosts of the testbed: its controller on the first, and a node on each."""

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

from hosts import address

PROGRAMS = ["sbatch", "scontrol", "sinfo", "slurmctld", "slurmd", "srun"]
START_TIMEOUT_S = 60
CONFIGURATION = """
ClusterName=testbed
SlurmctldHost=host0({controller})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing():
    """The programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]


@contextlib.contextmanager
def slurm(hosts, folder, n_cpus):
    """Start Slurm on all hosts; yields what runs one of its commands on the first.

    Args:
        hosts: The testbed.
        folder: A folder for its configuration, state and logs.
        n_cpus: What Slurm is told of the CPUs of each host.
    """
    nodes = "\n".join(
        f"NodeName=host{host} NodeAddr={address(host)} CPUs={n_cpus} State=UNKNOWN" for host in range(hosts.n)
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(controller=address(0), folder=folder, nodes=nodes))
    (folder / "state").mkdir()
    venv = str(Path(sys.executable).parents[1])
    environment = {**hosts.environment, "SLURM_CONF": str(configuration), "VENV": venv}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        del environment[name]
    running = []

    def run(*command, **options):
        return subprocess.run(
            hosts.command(0, list(command)), env=environment, capture_output=True, text=True, check=False, **options
        )

    def start(host, *command):
        log = (folder / f"{command[0]}-{host}.out").open("w")
        running.append(subprocess.Popen(hosts.command(host, command), env=environment, stdout=log, stderr=log))
        log.close()

    try:
        start(0, "slurmctld", "-D")
        for host in range(hosts.n):
            start(host, "slurmd", "-D", "-N", f"host{host}")
        deadline = time.monotonic() + START_TIMEOUT_S
        while (states := run("sinfo", "--noheader", "--format=%T").stdout.split()) != ["idle"]:
            assert time.monotonic() < deadline, f"Slurm's nodes are {states}; {logs(folder)}"
            time.sleep(0.2)  # polling for Slurm
        yield run
    finally:
        for process in running:
            process.kill()
            process.wait()


def logs(folder):
    """What the daemons have said."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
