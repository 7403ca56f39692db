"""How long does the import take? In a fresh interpreter each time, what it has to load for a first program."""

from __future__ import annotations

import subprocess

from harness.cli import Options, run
from harness.environments import Found
from harness.rows import Row
from harness.stage import say

STATEMENTS = {
    "floor": "import numpy, cloudpickle",
    "bandmaster_local": "import bandmaster",
    "bandmaster_ray": "import bandmaster, bandmaster.backends.ray",
    "plain_ray": "import ray",
    "monarch": "from monarch.actor import Actor, endpoint, this_host",
    "verl": "from verl.single_controller.ray import RayWorkerGroup; from verl.single_controller.base import Worker",
}


def measure(options: Options) -> list[Row]:
    """Rounds that alternate between the peers, after one that does not count and leaves everything compiled."""
    samples: dict[str, list[tuple[float]]] = {found.kind.name: [] for found in options.peers}
    why_not = {found.kind.name: found.why_not for found in options.peers}
    for turn in range(1 + (2 if options.is_smoke else 4)):
        say(f"import: round {turn}")
        for found in options.peers:
            if not why_not[found.kind.name]:
                try:
                    seconds = _import(found)
                except subprocess.SubprocessError as error:
                    why_not[found.kind.name] = f"failed: {type(error).__name__}"
                else:
                    samples[found.kind.name] += [(seconds,)] if turn else []
    return [
        Row(
            "import_time",
            "import",
            name,
            0,
            "s",
            () if why_not[name] else tuple(rounds),
            why_not[name],
            STATEMENTS[name],
        )
        for name, rounds in samples.items()
    ]


def _import(found: Found) -> float:
    program = (
        f"import time; t = time.perf_counter(); {STATEMENTS[found.kind.name]}; print('s', time.perf_counter() - t)"
    )
    done = subprocess.run(
        [found.python, "-I", "-c", program], check=True, capture_output=True, timeout=120, text=True, cwd="/"
    )
    return float(done.stdout.splitlines()[-1].removeprefix("s "))


if __name__ == "__main__":
    run(__doc__, measure)
