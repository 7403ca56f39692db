"""``python -m fuzz``, in tests/: random programs for some minutes, on each backend. See `fuzz`."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
import warnings

from hosts import Hosts, why_not

from fuzz.campaign import Campaign
from fuzz.run import ON_HOSTS


def main() -> int:
    """Print what is found; return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="of the first program; the next ones follow")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--programs", type=int, help="how many at most")
    parser.add_argument(
        "--backends", default="inprocess,local,weights", help="also ray; hosts: Ray, on other hosts alone"
    )
    parser.add_argument("--scripts", help="a folder for the scripts of failures, besides printing them")
    given = parser.parse_args()
    if "hosts" in given.backends.split(","):
        return on_hosts(sys.argv[1:])
    seed = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    warnings.simplefilter("ignore")  # pandas' and torch's, about kinds of values
    if "ray" in given.backends:
        start_ray()
    end = time.monotonic() + given.minutes * 60
    with Campaign(given.backends.split(","), given.scripts) as campaign:
        while time.monotonic() < end and campaign.n_programs != given.programs:
            campaign.run(seed + campaign.n_programs)
    print(campaign.summary())
    return 1 if campaign.failures else 0


def start_ray():
    """Start a Ray of this machine, or connect to that of several hosts."""
    import ray

    here = {} if ON_HOSTS else {"address": "local", "num_cpus": 64, "include_dashboard": False}
    ray.init(**here, log_to_driver=False)


def on_hosts(options):
    """Run this program with all ranks on other hosts than its own; return its exit status."""
    reason = why_not()
    if reason is not None:
        print(f"SKIPPED: there are no other hosts, because {reason}")
        return 0
    with Hosts(3, cpus=32) as hosts:
        command = hosts.command(0, [sys.executable, "-m", "fuzz", *(one.replace("hosts", "ray") for one in options)])
        return subprocess.run(command, env=hosts.environment | {"BANDMASTER_TEST_HOSTS": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
