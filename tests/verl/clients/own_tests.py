"""Runs a client's own tests of its single controller, unchanged, on its own and on bandmaster, on CPUs.

    python tests/verl/clients/own_tests.py CHECKOUT [options] [test_x ...]

CHECKOUT is the folder that contains the client's packages `verl` and `tests`. Prints for each test what it did on both,
and how many passed on each. Exits with 0 if all that pass on the client's own pass on bandmaster.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import run  # beside this file

FOLDERS = ("ray", "ray_cpu", "ray_gpu", "single_controller", "single_controller/base")
SMALLER = {"batch_size = 4096": "batch_size = 256"}  # 2 GiB of rows, which most machines lack
N_FAKE_GPUS = 8
BENEATH = """
import ray, torch, pytest
torch.cuda.device_count = lambda: {n_gpus}  # in this process alone: the tests make their pools so large

@pytest.fixture(autouse=True)
def own_ray():  # a test that fails leaves its Ray running
    yield
    ray.shutdown()
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each file")
    parser.add_argument("chosen", nargs="*", help="the files to run, without .py; all of them otherwise")
    arguments = parser.parse_intermixed_args()
    checkout = Path(arguments.checkout).resolve()
    folders = [checkout / "tests" / folder for folder in FOLDERS]
    files = [file for folder in folders for file in sorted(folder.glob("test_*.py"))]
    files = [file for file in files if not arguments.chosen or file.stem in arguments.chosen]
    n_passed = {"own": 0, "bandmaster": 0}
    lost = []
    for file in files:
        own, ours = (outcomes(checkout, file, on, arguments.timeout) for on in n_passed)
        for test in sorted(own.keys() | ours.keys()):
            before, after = own.get(test, "not run"), ours.get(test, "not run")
            n_passed["own"] += before == "passed"
            n_passed["bandmaster"] += after == "passed"
            lost += [test] * (before == "passed" != after)
            print(f"{file.stem}::{test}: {before} on its own, {after} on bandmaster", flush=True)
    print(f"{n_passed['own']} pass on its own, {n_passed['bandmaster']} on bandmaster")
    sys.exit(f"only on its own: {', '.join(lost)}" if lost else 0)


def outcomes(checkout, file, on, timeout):
    """What each test of a file did, by name, in a process of its own. Nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="client") as directory:
        work = Path(directory)
        text = file.read_text()
        for old, new in SMALLER.items():
            text = text.replace(old, new)
        (work / file.name).write_text(text)
        (work / "conftest.py").write_text(BENEATH.format(n_gpus=N_FAKE_GPUS))
        environment = run.environment({"checkout": str(checkout), "package": "."}, work, on)
        del environment["PYTHONPYCACHEPREFIX"]
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["RAY_TMPDIR"] = directory
        switch = ["-m", "bandmaster.compat.verl"] if on == "bandmaster" else []
        command = [sys.executable, *switch, str(Path(__file__).resolve().with_name("one_file.py")), file.name]
        with open(work / "log", "w") as log:
            process = subprocess.Popen(
                command, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
            finally:
                run.end(process, f"CLIENT_METRICS={work / on}.jsonl")
        if not (work / "result.xml").is_file():
            last = (work / "log").read_text(errors="replace").strip().splitlines()[-1:]
            return {"(the file)": f"ended without a result: {' '.join(last)[:200]}"}
        return dict(map(outcome, ElementTree.parse(work / "result.xml").getroot().iter("testcase")))


def outcome(case):
    """The name of a test and what it did, with the reason if it failed."""
    if case.find("skipped") is not None:
        return case.get("name"), "skipped"
    failure = case.find("failure") if case.find("failure") is not None else case.find("error")
    if failure is None:
        return case.get("name"), "passed"
    return case.get("name"), f"failed ({(failure.get('message') or '?').strip().splitlines()[0][:160]})"


if __name__ == "__main__":
    main()
