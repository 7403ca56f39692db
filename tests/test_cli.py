"""The command ``bandmaster``: what it prints, what it ends, and its exit status."""

import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from commands import MINE
from ends import runs, until, wait_until_gone

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register
from bandmaster.cli import main
from bandmaster.cli.discovery import Discovered, Group, Process, discover, is_orphaned_zygote
from bandmaster.cli.facts import Cores, Facts, Gpus, Kernel, Memory, Software
from bandmaster.cli.findings import judge
from bandmaster.cli.names import complaints_about
from bandmaster.cli.processes import chosen, shown
from bandmaster.plan.placement import Node
from bandmaster.platform.cgroups import Cgroups, Limit
from bandmaster.platform.proc import stat
from bandmaster.wire.status_page import WorkerIdentity

GiB = 1 << 30


def test_it_is_a_module_too():
    run = subprocess.run([sys.executable, "-m", "bandmaster", "--version"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, f"bandmaster {bm.__version__}\n"), run.stderr


def test_output_that_nobody_reads_to_the_end_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)  # as `head` does when it has its lines
    command = [sys.executable, "-m", "bandmaster", "plan", "8,8"]
    run = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("arguments", ["plan 8,8", "ps", "top --once", "top"])
def test_standard_output_that_is_closed_is_no_error(arguments):
    command = f"exec {shlex.quote(sys.executable)} -m bandmaster {arguments} >&-"
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")


# --- plan -------------------------------------------------------------------------------------------------------


def test_plan_of_places(capsys):
    assert main(["plan", "2,1", "--gpus"]) == 0

    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "ResourcePool([2, 1], backend='local', use_gpu=True)"
    assert lines[:4] == [
        "rank  node  local rank  device",
        "0     0     0           GPU 0",
        "1     0     1           GPU 1",
        "2     1     0           GPU 0",
    ]


def test_plan_with_axes_and_a_protocol(capsys):
    assert main(["plan", "4,4", "--axes", "pp=2,dp=2,tp=2", "--protocol", "3D_PROTO", "--rows", "10"]) == 0

    places, transfer = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert "rank  node  local rank  device  pp  dp  tp" in places
    assert "5     1     1           cpu     1   0   1" in places
    assert transfer == str(bm.plan("3D_PROTO", Mesh(pp=2, dp=2, tp=2), rows=10))


def test_plan_of_a_generation_layout(capsys):
    axes = "pp=1,dp=2,tp=4,gen_tp=2"
    assert main(["plan", "8", "--axes", axes, "--protocol", "3D_ALL_MICRO_DP"]) == 0

    expected = bm.plan("3D_ALL_MICRO_DP", Mesh(pp=1, dp=2, tp=4).refine(gen_tp=2), rows=8)
    assert str(expected) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("4,x", "got 'x' in [4, 'x']"),
        ("4,0", "got 0 in [4, 0]"),
        ("4,", "got '' in [4, '']"),
        ("8 --axes dp=4", "Mesh(dp=4) has 4 ranks, but ResourcePool([8], backend='local') has 8 slots"),
        ("4 --axes dp=2.5", "the size of axis 'dp' must be a positive integer, got '2.5'"),
        ("4 --axes dp,tp", "such as pp=2,dp=2,tp=2, got 'dp'"),
        ("4 --axes dp=2,dp=2", "axis 'dp' is given twice"),
        ("4 --axes dp=4,gen_tp=2", "gen_tp=2 splits axis 'tp'"),
        ("4 --protocol SCATTER", "unknown transfer protocol 'SCATTER'; use one of ONE_TO_ALL"),
        ("4 --protocol DP_PROTO --rows -1", "rows must be a non-negative number, got -1"),
        ("4 --rows 10", "--protocol"),
        ("8,8 --axes self=2,dp=4", "self=2"),
    ],
)
def test_plan_of_nonsense_is_one_line(arguments, message, capsys):
    assert main(["plan", *arguments.split()]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bandmaster plan: ") and err.count("\n") == 1 and message in err


# --- doctor: judging --------------------------------------------------------------------------------------------

HEALTHY = Facts(
    Software("3.11.7", {"bandmaster": "0.1.0", "numpy": "2.4.6", "torch": "2.9.0", "ray": "2.60.0"}, "12.8"),
    Cores(16, 16, None, {}),
    Memory(64 * GiB, 60 * GiB, None, 32 * GiB, 32 * GiB),
    Gpus(("0", "1"), None, "570.86.15", True, ""),
    Kernel("6.1.0", True, True, True, Limit(1024, 10), 1 << 20, None),
)


def changed(part, **values):
    return replace(HEALTHY, **{part: replace(getattr(HEALTHY, part), **values)})


def test_nothing_is_wrong_with_a_healthy_machine():
    assert judge(HEALTHY) == judge(HEALTHY, uses_ray=True) == []


NO_TORCH = {"bandmaster": "0.1.0", "numpy": "2.4.6", "torch": None, "ray": None}
NO_GPUS = Gpus((), None, None, False, "")
HARMLESS = {
    "no GPU, torch with CUDA": replace(HEALTHY, gpus=NO_GPUS),
    "no GPU, torch without": replace(changed("software", torch_cuda=""), gpus=NO_GPUS),
    "no torch": changed("software", packages=NO_TORCH, torch_cuda=""),
    "a CUDA newer than this table": changed("software", torch_cuda="19.1"),
    "a driver of unknown version": changed("gpus", driver=""),
    "GPUs by their names": changed("gpus", visible=("GPU-1", "GPU-2"), variable="GPU-1, GPU-2"),
    "threads as many as cores": changed("cores", thread_variables={"OMP_NUM_THREADS": "16,1"}),
    "a quota that threads respect": changed("cores", quota=2.0, thread_variables={"OMP_NUM_THREADS": "2"}),
    "small /dev/shm, but no Ray": replace(
        changed("memory", shm_available=64 << 20), software=replace(HEALTHY.software, packages=NO_TORCH)
    ),
}


@pytest.mark.parametrize("facts", HARMLESS.values(), ids=HARMLESS)
def test_harmless(facts):
    assert judge(facts) == []


WRONG = {
    "few open files": (changed("kernel", open_files=Limit(256, 10)), "enough for 82 local workers", "ulimit -n 4096"),
    "few open files, hardly more to be had": (
        changed("kernel", open_files=Limit(256, 10), open_files_hard=1024), "256 open files", "ulimit -n 1024"
    ),
    "few open files for good": (
        changed("kernel", open_files=Limit(256, 10), open_files_hard=300), "256 open", "raise the hard limit of 300"
    ),
    "few processes": (changed("kernel", processes=Limit(1000, 900)), "room for 100 more processes", "--pids-limit"),
    "no memfd": (changed("kernel", has_memfd=False), "memfd_create does not work", "backend='ray'"),
    "no pidfd": (changed("kernel", has_pidfd=False), "pidfd_open does not work", "Linux 5.3"),
    "workers unseen": (changed("kernel", can_see_workers=False), "cannot be opened in /proc", "SYS_PTRACE"),
    "too many threads": (
        changed("cores", thread_variables={"OMP_NUM_THREADS": "64"}), "OMP_NUM_THREADS=64", "unset OMP_NUM_THREADS"
    ),
    "no number of threads": (
        changed("cores", thread_variables={"MKL_NUM_THREADS": "many"}),
        "is not a number of threads", "unset MKL_NUM_THREADS"
    ),
    "a power of threads": (
        changed("cores", thread_variables={"OMP_NUM_THREADS": "²"}), "'²' is not a number of threads", "unset OMP"
    ),
    "a quota": (changed("cores", quota=1.5), "1.5 CPUs of the 16", "export OMP_NUM_THREADS=1,"),
    "no memory left": (changed("memory", available=GiB // 2), "0.5 GiB of 64.0 GiB of memory is free", "bandmaster ps"),
    "no memory left in the cgroup": (
        changed("memory", limit=Limit(40 * GiB, 40 * GiB - 1)), "0.0 GiB of 40.0 GiB of memory is free", "ps"
    ),
    "NVML is missing": (changed("gpus", has_nvml=False), "NVML is not installed", "pip install 'bandmaster[gpu]'"),
    "NVML fails": (changed("gpus", nvml_error="Driver/library version mismatch"), "version mismatch", "restart"),
    "a GPU that is not there": (
        changed("gpus", variable="0,1,7"),
        "names '7', which does not exist: only 2 are used", "unset CUDA_VISIBLE_DEVICES"
    ),
    "torch without CUDA": (changed("software", torch_cuda=""), "torch 2.9.0 is built without CUDA", "pytorch.org"),
    "an old driver": (
        changed("software", torch_cuda="13.0"), "CUDA 13.0, which needs driver 580 or newer, not 570.86.15", "update"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "what", "fix"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_comes_with_a_fix_of_one_line(facts, what, fix):
    (finding,) = judge(facts)

    assert finding.is_wrong
    assert what in finding.what and fix in finding.fix
    assert str(finding) == f"problem: {finding.what}\n  fix: {finding.fix}" and str(finding).count("\n") == 1


def test_what_may_be_meant_so_is_a_note():
    hidden = judge(changed("gpus", visible=(), variable=""))
    limited = judge(changed("memory", limit=Limit(16 * GiB, GiB)))

    assert [finding.is_wrong for finding in hidden + limited] == [False, False]
    assert "hides all GPUs" in str(hidden[0])
    assert str(limited[0]).startswith("note: the cgroup may use 16.0 GiB of the machine's 64.0 GiB")


def test_shared_memory_matters_to_ray_alone():
    facts = changed("memory", shm_available=64 << 20)
    (note,), (wrong,) = judge(facts), judge(facts, uses_ray=True)

    assert (note.is_wrong, wrong.is_wrong) == (False, True)
    assert "--shm-size=10g" in wrong.fix


def test_what_is_wrong_comes_first():
    facts = replace(changed("gpus", visible=(), variable=""), memory=replace(HEALTHY.memory, available=0))
    assert [finding.is_wrong for finding in judge(facts)] == [True, False]


# --- doctor: control groups -------------------------------------------------------------------------------------


def make_cgroups(directory, membership, files):
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(content)
    (directory / "membership").write_text(membership)
    return Cgroups(directory, directory / "membership")


def test_no_limits(tmp_path):
    files = {"memory.max": "max\n", "memory.current": "5\n", "cpu.max": "max 100000\n", "pids.max": "max\n"}
    cgroups = make_cgroups(tmp_path, "0::/\n", files)
    nothing = make_cgroups(tmp_path / "none", "", {"x": ""})

    assert (cgroups.memory(), cgroups.processes(), cgroups.cpu_quota()) == (None, None, None)
    assert (nothing.memory(), nothing.processes(), nothing.cpu_quota()) == (None, None, None)


def test_limits_of_version_2_hold_for_the_groups_below(tmp_path):
    files = {
        "a/memory.max": "1000", "a/memory.current": "900", "a/memory.stat": "anon 1\ninactive_file 300\n",
        "a/b/memory.max": "800", "a/b/memory.current": "100",
        "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000",
        "a/pids.max": "50", "a/pids.current": "20",
        "a/b/pids.max": "max", "a/b/pids.current": "20",
    }  # fmt: skip
    cgroups = make_cgroups(tmp_path, "0::/a/b\n", files)

    assert cgroups.memory() == Limit(1000, 600), "less is left there than in a/b"
    assert cgroups.memory().left == 400
    assert cgroups.cpu_quota() == 1.5
    assert cgroups.processes() == Limit(50, 20)


def test_limits_of_version_1(tmp_path):
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5",
        "memory/job/memory.limit_in_bytes": "1000", "memory/job/memory.usage_in_bytes": "700",
        "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
        "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
        "cpu/job/cpu.cfs_quota_us": "400000", "cpu/job/cpu.cfs_period_us": "100000",
        "pids/pids.max": "70", "pids/pids.current": "7",
    }  # fmt: skip
    membership = "9:pids:/named/by/the/host\n4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n"
    cgroups = make_cgroups(tmp_path, membership, files)

    assert (cgroups.memory(), cgroups.cpu_quota()) == (Limit(1000, 500), 4.0)
    assert cgroups.processes() == Limit(70, 7)


# --- doctor: on this machine ------------------------------------------------------------------------------------


@pytest.fixture
def few_open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_doctor_names_a_limit_that_is_too_low_and_a_fix(few_open_files, capsys):
    assert main(["doctor", "--quick"]) == 1

    out = capsys.readouterr().out
    assert re.search(rf"^bandmaster +{re.escape(bm.__version__)}$", out, re.MULTILINE)
    assert "problem: a process may have 256 open files" in out and "  fix: " in out
    assert out.splitlines()[-1].endswith((" problem found", " problems found"))


def test_doctor_says_the_same_as_its_exit_status(capsys):
    status = main(["doctor", "--quick"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert (last == "no problems found") == (status == 0)


def test_doctor_starts_a_worker(zygote, capsys):
    main(["doctor"])

    line = capsys.readouterr().out.splitlines()[-2]
    assert line.startswith("a local worker: started in ") and "answered in " in line and "closed in " in line


def test_doctor_says_when_no_worker_can_be_started():
    program = "import resource, sys; from bandmaster.cli import main; import numpy.random; "
    program += "resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12)); sys.exit(main(['doctor']))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert run.returncode == 1, run.stdout + run.stderr
    assert "problem: a local worker cannot be started and called: " in run.stdout, run.stderr


def test_doctor_imports_nothing_slow():
    program = "import sys; from bandmaster.cli import main; main(['doctor', '--quick']); "
    program += "sys.exit(bool({'torch', 'ray', 'multiprocessing'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


def run_doctor_with_ray(address):
    command = [sys.executable, "-m", "bandmaster", "doctor", "--quick", "--ray", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_doctor_shows_a_cluster(ray_cluster):
    def shows_all_as_free():
        run = run_doctor_with_ray(ray_cluster.get_runtime_context().gcs_address)
        assert "the Ray cluster\nnode" in run.stdout, run.stdout + run.stderr
        return "16 of 16" in run.stdout and "8 of 8" in run.stdout

    until(shows_all_as_free)  # Ray may yet have to hear of the slots of the last test, and then that they are free


def test_doctor_says_that_no_group_can_have_workers_where_it_cannot_connect(monkeypatch, capsys):
    nodes = [(Node("10.0.0.1", {"CPU": 4}, {"CPU": 4}), None), (Node("10.0.0.2", {"CPU": 4}, {"CPU": 4}), "timed out")]
    monkeypatch.setattr("bandmaster.cli.ray.links_and_nodes", lambda address: nodes)

    assert main(["doctor", "--quick", "--ray", "10.0.0.1:6379"]) == 1
    words = "cannot connect to a process on node 10.0.0.2 (timed out), so no group can be made with workers there"
    assert words in capsys.readouterr().out


def test_doctor_starts_no_cluster():
    run = run_doctor_with_ray("127.0.0.1:1")

    assert run.returncode == 1
    assert "problem: no Ray cluster answers at '127.0.0.1:1'" in run.stdout and "fix: ray start --head" in run.stdout
    assert "problem: no Ray cluster runs" in run_doctor_with_ray("local").stdout


# --- ps and kill ------------------------------------------------------------------------------------------------

CONTROLLER = """
import os, subprocess, sys, time
import bandmaster as bm
from bandmaster import Dispatch, register

class Busy(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def start(self):
        return [os.getpid(), subprocess.Popen(["sleep", "300"]).pid, os.getppid()]

    @register(Dispatch.ONE_TO_ALL)
    def work(self):
        time.sleep(300)

group = bm.WorkerGroup(bm.ResourcePool([2]), Busy, name_prefix=sys.argv[1])
pids = sum(group.start(), [])
calls = group.work.submit()
os.setsid()  # so that the kernel does not continue the zygote when this process is gone
print(*pids, flush=True)
time.sleep(300)
"""


class Controller:
    """A process with a group of two busy workers, each of which has a child."""

    def __init__(self, prefix):
        environment = {**os.environ, "BANDMASTER_PRELOAD": ""}
        command = [sys.executable, "-c", CONTROLLER, prefix]
        self.group = f"{prefix}Busy"
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        pids = list(map(int, self.process.stdout.readline().split()))
        self.workers, self.children, (self.zygote, _) = pids[0::3], pids[1::3], pids[2::3]

    @property
    def full_name(self):
        return f"{self.group}@{self.process.pid}"

    def die(self):
        """As if killed, without its zygote being able to do anything about the workers."""
        os.kill(self.zygote, signal.SIGSTOP)
        self.process.kill()
        self.process.wait()

    def close(self):
        for pid in (self.process.pid, self.zygote, *self.workers, *self.children):
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start_controller():
    controllers = []

    def start(prefix):
        controllers.append(Controller(f"{prefix}{os.getpid()}"))
        return controllers[-1]

    yield start
    for controller in controllers:
        controller.close()


def line_of(name, text):
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return line


class Mine(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @bm.register(bm.Dispatch.DP_PROTO)
    def rows(self, rows):
        return rows


@pytest.mark.backends("local", "ray")
def test_a_group_is_shown_and_ended(make_pool, capsys):
    pool = make_pool([2])
    group, other = bm.WorkerGroup(pool, Mine, name=f"mine-{os.getpid()}"), bm.WorkerGroup(pool, Mine)
    pids = group.pid()

    assert main(["ps", *MINE]) == 0
    line = line_of(group.name, capsys.readouterr().out)
    assert f" {os.getpid()} " in line and " 0-1 of 2 " in line and " MiB " in line
    assert line.endswith(" ".join(map(str, pids)))
    assert "  -  " in line, "it holds no rows"
    rows = group.rows.submit([[0] * 1_000_000] * 4)
    assert len(rows) == 4
    assert main(["ps", *MINE]) == 0
    assert re.search(r"MiB  ([4-9]|1.) MiB  ", line_of(group.name, capsys.readouterr().out))
    del rows

    assert main(["kill", group.name, *MINE]) == 0
    assert f"group {group.name}@{os.getpid()}: ended {pids[0]} {pids[1]}\n" in capsys.readouterr().out
    with pytest.raises(bm.WorkerDied):
        group.pid()
    assert len(other.pid()) == 2, "other groups go on"
    assert group.name not in [found.name for found in discover().groups]


def test_what_workers_have_started_ends_with_them(start_controller, capsys):
    controller = start_controller("whole")

    assert main(["kill", controller.group]) == 0
    wait_until_gone(controller.workers + controller.children)
    assert runs(controller.process.pid) and runs(controller.zygote)


def test_orphans(start_controller, capsys):
    controller, living = start_controller("orphan"), start_controller("living")
    controller.die()

    assert main(["ps"]) == 0
    out = capsys.readouterr().out
    assert f" {controller.process.pid} (gone) " in line_of(controller.group, out)
    assert "(gone)" not in line_of(living.group, out)
    assert "without a controller" in out and line_of(controller.zygote, out)

    assert main(["kill", "--orphans", "--controller", str(living.process.pid)]) == 0
    assert capsys.readouterr().out == "nothing to end\n"
    assert main(["kill", "--orphans", "--controller", str(controller.process.pid)]) == 0
    out = capsys.readouterr().out
    assert f"group {controller.full_name}: ended {' '.join(map(str, controller.workers))}\n" in out
    assert "zygotes: ended " in out and str(controller.zygote) in out
    wait_until_gone([controller.zygote, *controller.workers, *controller.children])
    assert all(map(runs, [living.process.pid, living.zygote, *living.workers, *living.children]))


@pytest.mark.parametrize("ticks_before, is_orphan", [(0, False), (1, True)])
def test_a_pid_that_is_used_again_tells_an_orphan_and_not_a_worker_that_is_older(ticks_before, is_orphan):
    """Ray gives an actor a process that it has started before."""
    with subprocess.Popen(["sleep", "60"]) as controller:
        started = stat(controller.pid).start - ticks_before
        page = os.memfd_create(str(WorkerIdentity(os.getpid(), controller.pid, started, 0, 1, "older")))
        (group,) = discover(controller.pid).groups
        os.close(page)
        controller.kill()
    assert group.is_orphan == is_orphan


class WatchesChild(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def watch(self, forks):
        """Keep a descriptor of a child that has ended, in a fork of this process or here. Returns who keeps it."""
        child = subprocess.Popen(["true"])
        os.pidfd_open(child.pid)
        child.wait()
        if not forks:
            return os.getpid()
        if not (pid := os.fork()):
            time.sleep(60)
            os._exit(0)
        return pid


@pytest.mark.backends("local")
@pytest.mark.parametrize("forks", [False, True])
def test_a_worker_that_has_watched_a_child_is_no_zygote(make_pool, forks):
    group = bm.WorkerGroup(make_pool([1]), WatchesChild)
    (pid,) = group.watch(forks)
    assert runs(pid) and not is_orphaned_zygote(pid)


def test_names_that_do_not_say_which_group(start_controller, capsys):
    first = start_controller("same")
    second = start_controller("same")

    assert main(["kill", first.group]) == 1
    out, err = capsys.readouterr()
    assert out == "" and first.full_name in err and second.full_name in err

    assert main(["kill", f"seme{os.getpid()}Bussy"]) == 1
    assert f"did you mean {first.group!r}" in capsys.readouterr().err
    assert all(map(runs, first.workers + second.workers)), "nothing is ended by halves"

    assert main(["kill", second.full_name]) == 0
    wait_until_gone(second.workers)
    assert all(map(runs, first.workers))


EVIL_NAMES = [
    "bandmaster-worker-4 a b c d e f",
    "bandmaster-worker",
    "bandmaster-worker-4 1 2 3 4",
    f"bandmaster-worker-4 {10**24} 1 7 0 1 x",
    f"bandmaster-worker-4 PID {10**24} 7 0 1 x",
    f"bandmaster-worker-4 PID 1 7 {10**24} {10**25} x",
    "bandmaster-worker-4 PID 1 7 5 4 x",
    "bandmaster-worker-4 PID -1 7 0 1 x",
    "bandmaster-worker-4 PID ٣ 7 0 1 x",
    "bandmaster-worker-4 PID 4 7 0 1 \x1b[31mred\nline \u202e\xff",
]
HAS_NAMES = """
import ctypes, os, sys
for name in sys.argv[1:]:
    os.memfd_create(name.replace("PID", str(os.getpid())))
if os.environ.get("ANOTHER_USER"):
    os.setgroups([]); os.setgid(65533); os.setuid(65533)
    ctypes.CDLL(None).prctl(4, 0)  # which has its directory in /proc look like root's
print(flush=True)
input()
"""


@pytest.mark.parametrize("user", ["", pytest.param("other", marks=pytest.mark.skipif("os.geteuid() != 0"))])
def test_names_that_somebody_made_up_do_no_harm(capsys, user):
    environment = {**os.environ, "ANOTHER_USER": user}
    command = [sys.executable, "-S", "-c", HAS_NAMES, *EVIL_NAMES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as evil:
        evil.stdout.readline()
        found = [
            (identity.rank, identity.world_size)
            for g in discover().groups
            for identity, p in g.workers
            if p.pid == evil.pid
        ]
        assert main(["ps"]) == 0
        table = capsys.readouterr().out
        assert main(["kill", "no such group"]) == 1
        complaint = capsys.readouterr().err
        evil.communicate("\n")
    assert found == ([] if user else [(0, 1)])
    assert ("[31mred\\nline \\u202e" in table) == (not user)
    for text in (table, complaint):
        assert all(character.isprintable() for line in text.split("\n") for character in line)


@pytest.mark.backends("local")
def test_a_name_with_a_slash_is_found(make_pool, capsys):
    group = bm.WorkerGroup(make_pool([1]), Mine, name="exp1/actor")
    group.pid()
    for command in ("stack", "why"):
        assert main([command, group.name, *MINE]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments, status", [("ps", 0), ("top --once", 0), ("why", 0), ("stack actor", 1)])
def test_a_controller_without_groups_is_named(arguments, status, capsys):
    assert main([*arguments.split(), "--controller", "1"]) == status
    assert "controller 1 has no groups on this machine\n" in "".join(capsys.readouterr())


def test_kill_has_to_be_told_what(capsys):
    for arguments in ([], ["some", "--all"], ["--all", "--orphans"]):
        with pytest.raises(SystemExit) as exit:
            main(["kill", *arguments])
        assert exit.value.code == 2


def made_up(name, controller, is_orphan, ranks=(0, 1), age_s=0):
    started_s = time.clock_gettime(time.CLOCK_BOOTTIME) - age_s
    workers = [(WorkerIdentity(n, controller, 0, n, 8, name), Process(n, started_s, 3 << 20)) for n in ranks]
    return Group(name, controller, 8, is_orphan, tuple(workers))


def test_which_are_chosen():
    living, orphan = made_up("actor", 1, False), made_up("critic", 2, True)
    discovered = Discovered((living, orphan), (Process(3, 0.0, 1),))

    assert chosen(discovered, [], is_all=True, is_orphans=False) == discovered
    assert chosen(discovered, [], is_all=False, is_orphans=True) == Discovered((orphan,), discovered.orphaned_zygotes)
    assert chosen(discovered, ["actor"], is_all=False, is_orphans=False) == Discovered((living,))
    assert chosen(discovered, ["critic@2"], is_all=False, is_orphans=False) == Discovered((orphan,))


def test_a_name_that_reads_as_that_of_a_group_of_one_controller_is_ambiguous():
    discovered = Discovered((made_up("actor", 1, False), made_up("actor@1", 2, False)))
    (complaint,) = complaints_about(["actor@1"], discovered)
    assert complaint == "several controllers have a group 'actor@1'; give one of actor@1, actor@1@2"
    assert complaints_about(["actor", "actor@1@2"], discovered) == []


def test_what_is_shown():
    assert shown(Discovered()) == "you have no groups on this machine"
    assert "  0-2,5,7 of 8  15 MiB  -  " in shown(Discovered((made_up("actor", 1, False, ranks=(0, 1, 2, 5, 7)),)))
    assert "  on another host  " in shown(Discovered((made_up("actor", 0, False),)))


@pytest.mark.parametrize(
    ("age_s", "words"), [(5, "5 s"), (95, "1 min 35 s"), (7300, "2 h 1 min"), (200_000, "2 d 7 h")]
)
def test_ages(age_s, words):
    assert f"  {words}  " in shown(Discovered((made_up("actor", 1, False, age_s=age_s),)))
