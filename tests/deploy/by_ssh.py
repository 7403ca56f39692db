"""Hosts of the testbed that run sshd, with a key and a configuration of their own."""

import contextlib
import shutil
import subprocess
import time
from pathlib import Path

from hosts import address

PROGRAMS = ["ssh", "ssh-keygen", "/usr/sbin/sshd"]
START_TIMEOUT_S = 20


def missing():
    """The programs of OpenSSH that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextlib.contextmanager
def sshd(hosts, folder):
    """Start sshd on all hosts but the first; yields the command of ssh that reaches them."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it
    server = f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nPidFile none\nUsePAM no\n"
    (folder / "sshd_config").write_text(server)
    known = "".join(f"{address(host)} {(folder / 'host.pub').read_text()}" for host in range(hosts.n))
    (folder / "known_hosts").write_text(known)
    client = f"Host *\n IdentityFile {folder}/user\n UserKnownHostsFile {folder}/known_hosts\n BatchMode yes\n"
    (folder / "ssh_config").write_text(client)
    running = []
    try:
        for host in hosts.others():
            command = hosts.command(host, ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")])
            with (folder / f"sshd-{host}.log").open("w") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log))
        ssh = ["ssh", "-F", str(folder / "ssh_config")]
        for host in hosts.others():
            _wait_for(lambda host=host: hosts.command(0, [*ssh, address(host), "true"]))
        yield ssh
    finally:
        for process in running:
            process.kill()
            process.wait()


def _wait_for(command):
    deadline = time.monotonic() + START_TIMEOUT_S
    while (done := subprocess.run(command(), capture_output=True, text=True, check=False)).returncode:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.1)  # polling for sshd
