"""Runs a client's PPO trainer on CPUs with a tiny model, on its own single controller and on bandmaster, and compares.

    python tests/verl/clients/run.py CHECKOUT [options] [key=value ...]

CHECKOUT is a folder with the client's sources; it is not changed, and nothing is fetched. The Python that runs this
needs what the client needs, but for flash attention and vLLM, and bandmaster's own requirements. What is particular to
a client stands in `clients.json`. Further settings go to the client's configuration as they are. The README beside
this file says more.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "src"
TIMES = ("timing", "perf/", "time/", "time_per", "throughput", "tflops", "memory", "mfu", "tokens_per_sec")
PREFIX = re.compile(r"(\x1b\[\d+m)*\([^()]*pid=\d+[^()]*\)(\x1b\[\d+m)* ?")  # of a line that Ray forwards
ERROR = re.compile(r"^[ |]*((?:\w+\.)*\w*(?:Error|Exception|Exit)(?:\[\w+\])?(?:: .*|)) *$")
PASSED_ON = (
    "RayTaskError",
    "RayActorError",
    "ActorDiedError",
    "RemoteError",
    "WorkerDied",
    "CallCancelled",
)


def main():
    arguments, client = parsed()
    work = Path(arguments.work).resolve() / arguments.name
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "sums.parquet").is_file():
        command = [sys.executable, HERE / "tiny.py", work.parent, work, json.dumps(client.get("rows", {}))]
        subprocess.run(command, check=True, env=environment(client, work, "tiny"))
    results = {on: run(arguments, client, work, on) for on in arguments.on}
    for on, result in results.items():
        print(result.line(on), flush=True)
    if len(results) == 2:
        sys.exit(compared(*results.values()))
    sys.exit(max(abs(result.code) for result in results.values()))


def clients():
    """The descriptions of clients, by name."""
    return json.loads((HERE / "clients.json").read_text())


def parsed():
    """The arguments of the command line, and the description of the client."""
    known = clients()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="the folder with the client's sources")
    parser.add_argument("--client", choices=list(known), help="a description in clients.json, if the client has one")
    parser.add_argument("--on", nargs="+", choices=["own", "bandmaster"], default=["own", "bandmaster"])
    parser.add_argument("--algorithm", choices=["gae", "grpo"], default="gae")
    parser.add_argument("--module", help="the trainer's module, with a function main (default: verl.trainer.main_ppo)")
    parser.add_argument("--config", help="its configuration, in the folder config beside it (default: ppo_trainer)")
    parser.add_argument("--work", default="client-run", help="where the model, the rows and the output are put")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each run")
    parser.add_argument("settings", nargs="*", help="settings of the client's configuration, as key=value")
    arguments = parser.parse_intermixed_args()
    client = {"package": ".", "module": "verl.trainer.main_ppo", "config": "ppo_trainer", "call": "config"}
    client |= known.get(arguments.client, {})
    client |= {key: value for key in ("module", "config") if (value := getattr(arguments, key))}
    client["checkout"] = str(Path(arguments.checkout).resolve())
    client["algorithm"] = arguments.algorithm
    arguments.name = re.sub(r"\W+", "-", arguments.client or Path(client["checkout"]).name) + "-" + arguments.algorithm
    package = Path(client["checkout"], client["package"])
    if not (package / "verl" / "__init__.py").is_file():
        parser.error(f"{package} has no package verl; name the folder that contains it")
    return arguments, client


def environment(client, work, on):
    paths = [HERE / "on_cpu", Path(client["checkout"], client["package"]), SOURCES]
    more = {
        "CLIENT_RUN": on,
        "CLIENT_METRICS": str(work / f"{on}.jsonl"),
        "CLIENT_STUBS": ",".join(client.get("stubs", [])) or os.environ.get("CLIENT_STUBS", ""),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONPYCACHEPREFIX": str(work.parent / "bytecode"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_agent_register_timeout_ms": "180000",
        "RAY_worker_register_timeout_seconds": "300",
        "HYDRA_FULL_ERROR": "1",
    }
    return {**os.environ, **more, **client.get("environment", {})}


class Result:
    """How a run ended, and the metrics that it logged by step."""

    def __init__(self, code, seconds, log, metrics):
        self.code, self.seconds, self.log, self.metrics = code, seconds, log, metrics

    def line(self, on):
        ended = f"exit {self.code}" if self.code >= 0 else f"ended by signal {-self.code}"
        names = {name for metrics in self.metrics.values() for name in metrics}
        said = f"{on:10} {ended}, {len(self.metrics)} steps, {len(names)} metrics, {self.seconds:.0f} s, {self.log}"
        return said + ("" if self.code == 0 else f"\n{'':10} {cause(self.log)}")


def run(arguments, client, work, on):
    metrics, log = work / f"{on}.jsonl", work / f"{on}.log"
    metrics.write_text("")
    switch = ["-m", "bandmaster.compat.verl"] if on == "bandmaster" else []
    description = work / "client.json"
    description.write_text(json.dumps({**client, "work": str(work), "given": arguments.settings}))
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *switch, str(HERE / "start.py"), str(description)],
            cwd=work,
            env=environment(client, work, on),
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
    steps = {}
    for note in noted:
        if "step" in note:
            steps.setdefault(note["step"], {}).update(note["metrics"])
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


def errors(log):
    """The errors that a log names, in order, without those that only pass an error on."""
    lines = [PREFIX.sub("", line) for line in log.read_text(errors="replace").splitlines()]
    named = [found.group(1).strip() for line in lines if (found := ERROR.match(line))]
    return [error for error in named if not any(name in error.partition(":")[0] for name in PASSED_ON)]


def cause(log):
    """The last error that the log names, or its last line."""
    lines = log.read_text(errors="replace").splitlines()
    return (errors(log) or lines or ["no output"])[-1][:300]


def compared(own, ours):
    """Print how the runs compare. Returns the exit status: 0 if both ended alike and all metrics are equal."""
    if own.code or ours.code:
        is_same = bool(own.code and ours.code) and bool(set(errors(own.log)[-1:]) & set(errors(ours.log)))
        print("both stop with the same error" if is_same else "they end differently")
        if not is_same:
            return 1
    n_equal, n_compared, different = 0, 0, []
    for step in sorted(own.metrics.keys() | ours.metrics.keys()):
        before, after = own.metrics.get(step, {}), ours.metrics.get(step, {})
        for name in sorted(before.keys() | after.keys()):
            if any(word in name for word in TIMES):
                continue
            n_compared += 1
            if name in before and name in after and _is_equal(before[name], after[name]):
                n_equal += 1
            else:
                different.append(
                    f"step {step}: {name} is {before.get(name)} on its own, {after.get(name)} on bandmaster"
                )
    print(f"{n_equal} of {n_compared} metrics that are not times are equal")
    print("\n".join(different[:10]))
    return 0 if (n_compared or own.code) and not different else 1


def _is_equal(before, after):
    return before == after or (math.isnan(before) and math.isnan(after))


if __name__ == "__main__":
    main()
