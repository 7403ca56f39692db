"""verl's own tests of its single controller, which come in its wheel, on verl or on bandmaster, on CPUs.

    run.py WHEEL_FOLDER (verl | bandmaster) [test_x ...]

Prints a line for each file. Two need NCCL or a rendezvous of GPUs, and fail on verl as well; they are left out.
"""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
LEFT_OUT = {"test_ray_collectives", "test_rvdz"}
SMALLER = {"batch_size = 4096": "batch_size = 256"}  # 2 GiB of rows, which these machines lack


def main(folder, on, *chosen):
    tests = unpacked(Path(folder), on)
    environment = {
        **os.environ,
        "VERL_ON": on,
        "N_FAKE_GPUS": "8",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)]),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    failed = []
    for test in sorted(tests.glob("test_*.py")):
        if test.stem in LEFT_OUT or (chosen and test.stem not in chosen):
            continue
        begin = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            os.devnull,
            "--rootdir",
            str(tests),
            "-q",
            "-p",
            "no:cacheprovider",
            "--timeout=300",
            str(test),
        ]
        run = subprocess.run(command, env=environment, cwd=tests, capture_output=True, text=True)
        print(f"{test.stem:40} {run.stdout.strip().splitlines()[-1]} ({time.monotonic() - begin:.0f} s)", flush=True)
        if run.returncode:
            failed.append(test.stem)
            print(run.stdout + run.stderr)
    sys.exit(f"failed on {on}: {', '.join(failed)}" if failed else 0)


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
