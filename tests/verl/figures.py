"""The same calls through verl's import paths, on verl and on bandmaster, in turn, on CPUs: `make bench-verl`.

The methods are those of verl's trainers in kind: rows in a TensorDict over a mesh that the workers have registered, the
same without waiting, rows in a DataProto, and a call without rows. The workers do next to nothing, and actor handles
were handed out, as verl's trainers do. Times are the controller's.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

N_ROUNDS = 5
N_WORKERS, N_ROWS, N_TOKENS = 4, 128, 1024
CALLS = {
    "no rows": "ONE_TO_ALL, nothing",
    "TensorDict": "registered mesh (dp 2, each part to 2 ranks), 128 rows of 3 x 1024 int64 and 512 float32",
    "TensorDict, later": "the same with blocking=False and get(), one number per row comes back",
    "DataProto": "DP_COMPUTE_PROTO, the same rows",
}


def measure(on):
    """In a process of its own: milliseconds per call, elapsed and of processor time, and seconds to start the group."""
    if on == "bandmaster":
        import bandmaster.compat.verl  # noqa: F401
    import ray
    import torch
    from tensordict import TensorDict
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    over_train = make_nd_compute_dataproto_dispatch_fn("train")

    class Trainer(Worker):
        def __init__(self):
            super().__init__()
            self._register_dispatch_collect_info("train", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

        @register(Dispatch.ONE_TO_ALL)
        def nothing(self):
            pass

        @register(over_train)
        def log_probs(self, data):
            return TensorDict({"log_probs": torch.zeros(len(data), 512)}, batch_size=[len(data)])

        @register(over_train, blocking=False)
        def update(self, data):
            return TensorDict({"loss": torch.zeros(len(data))}, batch_size=[len(data)])

        @register(Dispatch.DP_COMPUTE_PROTO)
        def values(self, data):
            return DataProto.from_dict({"values": torch.zeros(len(data), 512)})

    ray.init(address="local", num_cpus=100, include_dashboard=False, log_to_driver=False)
    begin = time.perf_counter()
    group = RayWorkerGroup(RayResourcePool([N_WORKERS], use_gpu=False), RayClassWithInitArgs(ray.remote(Trainer)))
    group.nothing()
    found = {"start": [time.perf_counter() - begin]}
    handles = group.workers
    names = ("input_ids", "attention_mask", "position_ids")
    columns = {name: torch.randint(0, 1000, (N_ROWS, N_TOKENS)) for name in names}
    rows = TensorDict({**columns, "old_log_probs": torch.zeros(N_ROWS, 512)}, batch_size=[N_ROWS])
    proto = DataProto(batch=rows)
    calls = [
        group.nothing,
        lambda: group.log_probs(rows),
        lambda: group.update(rows).get(),
        lambda: group.values(proto),
    ]
    for name, call in zip(CALLS, calls, strict=True):
        for _ in range(5):
            call()
        gc.collect()  # of the million objects that the imports have left, which takes longer than all the calls
        n = 200 if name == "no rows" else 40
        begin, spent = time.perf_counter(), time.process_time()
        for _ in range(n):
            call()
        found[name] = [(time.perf_counter() - begin) / n * 1e3, (time.process_time() - spent) / n * 1e3]
    del handles
    print(json.dumps(found))


def main():
    found = {"verl": [], "bandmaster": []}
    for round_ in range(N_ROUNDS):
        for on in sorted(found, reverse=round_ % 2):
            here = Path(__file__).resolve()
            paths = [str(here.parents[2] / "src"), str(here.parent)]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "VERL_PLATFORM": "cpu",
                "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
                "N_FAKE_GPUS": "8",
                "RAY_prestart_worker_first_driver": "0",
                "OMP_NUM_THREADS": "1",
            }
            run = subprocess.run([sys.executable, here, on], env=environment, capture_output=True, text=True)
            assert run.returncode == 0, run.stderr
            found[on].append(json.loads(run.stdout.strip().splitlines()[-1]))
    print(
        f"medians of {N_ROUNDS} rounds, {N_WORKERS} workers; ms per call: elapsed (processor time of the controller)\n"
    )
    print("| call | verl | bandmaster | ratio |\n| --- | --- | --- | --- |")
    for name, what in CALLS.items():
        (theirs, their_cpu), (ours, our_cpu) = (_medians(found[on], name) for on in ("verl", "bandmaster"))
        ratio = f"{theirs / ours:.1f} ({their_cpu / our_cpu:.1f})"
        print(f"| {name}: {what} | {theirs:.2f} ({their_cpu:.2f}) | {ours:.2f} ({our_cpu:.2f}) | {ratio} |")
    (theirs,), (ours,) = (_medians(found[on], "start") for on in ("verl", "bandmaster"))
    print(f"| start of the group, in seconds | {theirs:.1f} | {ours:.1f} | {theirs / ours:.2f} |")


def _medians(rounds, name):
    return [statistics.median(values) for values in zip(*(found[name] for found in rounds), strict=True)]


if __name__ == "__main__":
    if sys.argv[1:]:
        measure(sys.argv[1])
    else:
        main()
