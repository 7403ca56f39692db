"""A testbed: several hosts on one machine, each with a network, processes, host name and /dev/shm of its own.

    with Hosts(3) as hosts:                      # a Ray cluster of three; the first has no CPUs for workers
        subprocess.run(hosts.command(0, ["python", "script.py"]), env=hosts.environment)
        hosts.power_off(2)

Hosts are Linux namespaces on one bridge, with the addresses 10.78.0.1, 10.78.0.2, …: what is no network does not
connect them. All of it ends with the processes that hold the namespaces, and they end with this process. Needs root.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAMS = ["ip", "mount", "nsenter", "tc", "unshare"]
RAY_PORT = 6379
START_TIMEOUT_S = 120
INIT = """
import contextlib, os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
while signal.sigwait([signal.SIGCHLD]):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]: pass
"""  # the first process of a host, which waits for those that have lost their parents
SHM_SIZE = "4g"


ON_HOSTS = bool(os.environ.get("BANDMASTER_TEST_HOSTS"))  # all ranks are on other hosts: see on_hosts.py


def spread(process_on_nodes):
    """The nodes of a pool; where there are other hosts, its slots are on two of them if it has as many."""
    if ON_HOSTS and len(process_on_nodes) == 1 and (n := process_on_nodes[0]) > 1:
        return [n - n // 2, n // 2]
    return process_on_nodes


def why_not():
    """Why there can be no testbed here; None if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"the programs {', '.join(missing)} are missing"
    kinds = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork"]
    links = (
        "ip link add test0 type bridge && ip link add test1 type veth peer name test2 && mount -t tmpfs tmpfs /dev/shm"
    )
    tried = subprocess.run(["unshare", *kinds, "sh", "-c", links], capture_output=True, text=True)
    return f"namespaces cannot be made: {tried.stderr.strip()}" if tried.returncode else None


class Hosts:
    """Hosts with a Ray cluster on them, in which each has a label with its number, and the odd ones one thing odd.

    Args:
        n: How many.
        cpus: What Ray is told of the CPUs of each but the first, which has none.
        gpus: The same for GPUs.
        ray: Whether a cluster is started; otherwise the hosts are bare.
    """

    def __init__(self, n, cpus=8, gpus=0, ray=True):
        self.n, self._cpus, self._gpus, self._has_ray = n, cpus, gpus, ray
        self._holders = []
        self._pids = []
        self._off = set()

    @property
    def environment(self):
        """For programs on the first host."""
        return {**os.environ, "RAY_ADDRESS": f"{address(0)}:{RAY_PORT}", "RAY_AUTH_MODE": "token"}

    def command(self, host, command):
        """What runs a command on a host, in the working directory of this process."""
        return [*_inside(self._pids[host]), "--", "env", "-C", os.getcwd(), *command]

    def others(self):
        """The hosts but the first that were not powered off."""
        return [host for host in range(1, self.n) if host not in self._off]

    def power_off(self, host):
        """End all processes of a host at once."""
        os.kill(self._pids[host], signal.SIGKILL)
        self._off.add(host)

    def cut(self, host):
        """Take a host off the network."""
        self._on_switch("ip", "link", "set", f"port{host}", "down")

    def mend(self, host):
        """Put a host on the network again."""
        self._on_switch("ip", "link", "set", f"port{host}", "up")

    def limit_shared_memory(self, host, size):
        """What ``/dev/shm`` of a host has room for, as mount writes it, like "64k"."""
        _checked(self.command(host, ["mount", "-o", f"remount,size={size}", "/dev/shm"]))

    def limit(self, rate):
        """Limit what each host sends and receives to a rate as tc writes it, like "1gbit"; None ends the limit."""
        kind = ["tbf", "rate", rate, "burst", "256kb", "latency", "200ms"] if rate else ["noqueue"]
        for host in range(self.n):
            self._on_switch("tc", "qdisc", "replace", "dev", f"port{host}", "root", *kind)
            _checked(self.command(host, ["tc", "qdisc", "replace", "dev", "eth0", "root", *kind]))

    def traffic(self, host):
        """Bytes that a host has received from the network so far, and bytes that it has sent."""
        lines = Path(f"/proc/{self._pids[host]}/net/dev").read_text().splitlines()
        counts = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
        return int(counts[0]), int(counts[8])

    def first_process(self, host):
        """What Ray's processes on a host descend from, by its number outside of the host."""
        return self._pids[host]

    def __enter__(self):
        try:
            self._switch = self._held("--net")
            self._on_switch("ip", "link", "add", "switch", "type", "bridge")
            self._on_switch("ip", "link", "set", "switch", "up")
            Path("/tmp/ray").mkdir(exist_ok=True)
            for host in range(self.n):
                self._pids.append(self._held("--net", "--mount", "--uts", "--ipc", "--pid"))
                self._wire(host)
            if self._has_ray:
                self._start_ray()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def _held(self, *kinds):
        """New namespaces; the process that holds them, as this one sees it."""
        command = ["unshare", *kinds, "--fork", "--kill-child", sys.executable, "-c", INIT]
        holder = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._holders.append(holder)
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        deadline = time.monotonic() + 10
        while not (found := children.read_text().split()):
            if time.monotonic() > deadline:
                raise RuntimeError("no namespaces within 10 s")
            time.sleep(0.005)
        return int(found[0])

    def _wire(self, host):
        pid = self._pids[host]
        self._on_switch("ip", "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._on_switch("ip", "link", "set", f"port{host}", "master", "switch", "up")
        for command in (
            ["ip", "address", "add", f"{address(host)}/24", "dev", "eth0"],
            ["ip", "link", "set", "eth0", "up"],
            ["ip", "link", "set", "lo", "up"],
            ["hostname", f"host{host}"],
            ["mount", "-t", "proc", "proc", "/proc"],
            ["mount", "-t", "tmpfs", "-o", f"size={SHM_SIZE}", "tmpfs", "/dev/shm"],
            ["mount", "-t", "tmpfs", "tmpfs", "/tmp/ray"],
        ):
            _checked(self.command(host, command))

    def _start_ray(self):
        ray = str(Path(sys.executable).with_name("ray"))
        subprocess.run([ray, "get-auth-token", "--generate"], capture_output=True, check=False)  # there may be one
        head = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false", "--num-cpus=0"]
        other = [f"--address={address(0)}:{RAY_PORT}", f"--num-cpus={self._cpus}", f"--num-gpus={self._gpus}"]

        def start(host):
            place = [f"--node-ip-address={address(host)}", f"--labels=number={host}"]
            place += ['--resources={"odd": 1}'] if host % 2 else []
            command = [ray, "start", *(other if host else head), *place]
            command += ["--object-store-memory=1000000000", "--disable-usage-stats"]
            _checked(self.command(host, command), env=self.environment, timeout=START_TIMEOUT_S)

        start(0)
        with ThreadPoolExecutor() as threads:  # each waits for a part of its start
            list(threads.map(start, range(1, self.n)))

    def _on_switch(self, *command):
        _checked(["nsenter", "-t", str(self._switch), "-n", "--", *command])


def address(host):
    """The IP address of a host."""
    return f"10.78.0.{host + 1}"


def _inside(pid):
    return ["nsenter", "-t", str(pid), "-n", "-m", "-u", "-i", "-p"]


def _checked(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
