"""verl's own tests of its single controller, which come in its wheel, on verl or on bandmaster, on CPUs.

    run.py WHEEL_FOLDER (verl | bandmaster) [test_x ...]

Prints a line for each file. Two need NCCL or a rendezvous of GPUs, and fail on verl as well; they are left out.
"""

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cpu_environment import environment

HERE = Path(__file__).parent
N_AT_ONCE = 2  # files, which mostly wait
LEFT_OUT = {"test_ray_collectives", "test_rvdz"}
SMALLER = {"batch_size = 4096": "batch_size = 256"}  # 2 GiB of rows, which these machines lack


def main(folder, on, *chosen):
    tests = unpacked(Path(folder), on)
    chosen = [
        test
        for test in sorted(tests.glob("test_*.py"))
        if test.stem not in LEFT_OUT and (not chosen or test.stem in chosen)
    ]
    with ThreadPoolExecutor(N_AT_ONCE) as threads:
        passed = list(threads.map(lambda test: passes(test, environment(on)), chosen))
    failed = [test.stem for test, has_passed in zip(chosen, passed, strict=True) if not has_passed]
    sys.exit(f"failed on {on}: {', '.join(failed)}" if failed else 0)


def passes(test, variables):
    """Run a file, with a Ray of its own. Prints a line about it, and all that it printed if it fails."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(test.parent), "-q"]
    command += ["-p", "no:cacheprovider", "--timeout=300", str(test)]
    with tempfile.TemporaryDirectory(prefix="ray") as directory:  # where Ray notes the cluster that runs
        own = {**variables, "RAY_TMPDIR": directory}
        run = subprocess.run(command, env=own, cwd=test.parent, capture_output=True, text=True)
    said = f"{test.stem:40} {run.stdout.strip().splitlines()[-1]} ({time.monotonic() - begin:.0f} s)"
    print(said, *[run.stdout + run.stderr] * bool(run.returncode), sep="\n", flush=True)
    return run.returncode == 0


def unpacked(folder, on):
    """A folder with verl's test files as they are, beside `beneath.py`."""
    (wheel,) = folder.glob("verl-*.whl")
    target = folder.resolve() / f"tests_on_{on}"
    target.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("tests/single_controller/test_"):
                text = archive.read(name).decode()
                for old, new in SMALLER.items():
                    text = text.replace(old, new)
                (target / Path(name).name).write_text(text)
    (target / "conftest.py").write_text((HERE / "beneath.py").read_text())
    return target


if __name__ == "__main__":
    main(*sys.argv[1:])
