"""Runs a client's PPO trainer on CPUs with a tiny model, on its own single controller and on bandmaster, and compares.

    python tests/verl/clients/run.py CHECKOUT [options] [key=value ...]

CHECKOUT is the folder that contains the client's package verl; it is not changed, and nothing is fetched. The Python
that runs this needs what the client needs, but for flash attention and vLLM, and bandmaster's own requirements.
Further settings go to the client's configuration as they are. The README beside this file says more.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "src"
TIMES = ("timing", "perf/", "time/", "time_per", "throughput", "tflops", "memory", "mfu", "tokens_per_sec")


def main():
    arguments = parsed()
    work = Path(arguments.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "sums.parquet").is_file():
        subprocess.run([sys.executable, HERE / "tiny.py", work], check=True, env=environment(arguments, work, "tiny"))
    results = {on: run(arguments, work, on) for on in arguments.on}
    for on, result in results.items():
        print(result.line(on), flush=True)
    if len(results) == 2:
        sys.exit(compared(*results.values()))
    sys.exit(max(result.code for result in results.values()))


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="the folder that contains the client's package verl")
    parser.add_argument("--on", nargs="+", choices=["own", "bandmaster"], default=["own", "bandmaster"])
    parser.add_argument("--algorithm", choices=["gae", "grpo"], default="gae")
    parser.add_argument("--module", default="verl.trainer.main_ppo", help="the trainer's module, with a function main")
    parser.add_argument("--config", default="ppo_trainer", help="its configuration, in the folder config beside it")
    parser.add_argument("--work", default="client-run", help="where the model, the rows and the output are put")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each run")
    parser.add_argument("settings", nargs="*", help="settings of the client's configuration, as key=value")
    arguments = parser.parse_intermixed_args()
    if not (Path(arguments.checkout) / "verl" / "__init__.py").is_file():
        parser.error(f"{arguments.checkout} has no package verl; name the folder that contains it")
    return arguments


def environment(arguments, work, on):
    paths = [HERE / "on_cpu", Path(arguments.checkout).resolve(), SOURCES]
    more = {
        "CLIENT_RUN": on,
        "CLIENT_METRICS": str(work / f"{on}.jsonl"),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONPYCACHEPREFIX": str(work / "bytecode"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    return {**os.environ, **more}


class Result:
    """How a run ended, and the metrics that it logged by step."""

    def __init__(self, code, seconds, log, metrics):
        self.code, self.seconds, self.log, self.metrics = code, seconds, log, metrics

    def line(self, on):
        ended = f"exit {self.code}" if self.code >= 0 else f"ended by signal {-self.code}"
        names = {name for metrics in self.metrics.values() for name in metrics}
        said = f"{on:10} {ended}, {len(self.metrics)} steps, {len(names)} metrics, {self.seconds:.0f} s, {self.log}"
        return said + ("" if self.code == 0 else f"\n{'':10} {last_error(self.log)}")


def run(arguments, work, on):
    metrics, log = work / f"{on}.jsonl", work / f"{on}.log"
    metrics.write_text("")
    switch = ["-m", "bandmaster.compat.verl"] if on == "bandmaster" else []
    command = [
        sys.executable,
        *switch,
        HERE / "start.py",
        arguments.module,
        arguments.config,
        arguments.algorithm,
        work,
    ]
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*map(str, command), *arguments.settings],
            cwd=work,
            env=environment(arguments, work, on),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(arguments.timeout)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            end(process, f"CLIENT_METRICS={metrics}")
    noted = [json.loads(line) for line in metrics.read_text().splitlines()]
    controllers = {note["controller"] for note in noted if "controller" in note}
    expected = "bandmaster.single_controller.ray" if on == "bandmaster" else "verl.single_controller.ray"
    assert controllers <= {expected}, f"the run on {on} used {controllers}"
    steps = {note["step"]: note["metrics"] for note in noted if "step" in note}
    return Result(code, time.monotonic() - begin, log, steps)


def end(process, mark):
    """End the run's process, which ends its Ray, and then what is left of the run in sessions of its own.

    Args:
        process: The process that was started.
        mark: An item of the environment that all processes of the run have, and no others.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or is another user's


def last_error(log):
    """The last line of the log that names an error."""
    lines = log.read_text(errors="replace").splitlines()
    named = [line.strip() for line in lines if "Error" in line or "error:" in line.lower()]
    return (named or lines or ["no output"])[-1][:300]


def compared(own, ours):
    """Print how the metrics compare. Returns the exit status: 0 if both ended alike and all metrics are equal."""
    if own.code or ours.code:
        is_same = own.code == ours.code and last_error(own.log) == last_error(ours.log)
        print("both stop with the same error" if is_same else "they end differently")
        return 0 if is_same else 1
    n_equal, n_compared, different = 0, 0, []
    for step in sorted(own.metrics.keys() | ours.metrics.keys()):
        before, after = own.metrics.get(step, {}), ours.metrics.get(step, {})
        for name in sorted(before.keys() | after.keys()):
            if any(word in name for word in TIMES):
                continue
            n_compared += 1
            if before.get(name) == after.get(name):
                n_equal += 1
            else:
                different.append(
                    f"step {step}: {name} is {before.get(name)} on its own, {after.get(name)} on bandmaster"
                )
    print(f"{n_equal} of {n_compared} metrics that are not times are equal")
    print("\n".join(different[:10]))
    return 0 if n_compared and not different else 1


if __name__ == "__main__":
    main()
