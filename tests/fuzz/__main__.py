"""``python -m fuzz``, in tests/: random programs for some minutes, on each backend. See `fuzz`."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import warnings

import on_hosts
from hosts import ON_HOSTS

from fuzz.campaign import Campaign


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
        return on_hosts.main([one.replace("hosts", "ray") for one in sys.argv[1:]], "fuzz", cpus=32)
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

    os.environ.setdefault("BANDMASTER_HOST_TIMEOUT", "60")  # scenes stop a host for seconds, and this one may be busy
    here = {} if ON_HOSTS else {"address": "local", "num_cpus": 64, "include_dashboard": False}
    ray.init(**here, log_to_driver=False)


if __name__ == "__main__":
    sys.exit(main())
