"""Runs pytest on the first of several hosts, so that all ranks are on the others: see `hosts.py`.

The command ``python tests/on_hosts.py tests/test_contract.py -k TestRay`` runs the contract of a backend there.
"""

import subprocess
import sys

from hosts import Hosts, why_not


def main():
    """Returns the exit status of pytest; 0, with the reason, where there can be no testbed."""
    reason = why_not()
    if reason is not None:
        print(f"SKIPPED: no hosts to run {' '.join(sys.argv[1:])} on, because {reason}")
        return 0
    with Hosts(3, gpus=4) as hosts:
        environment = {**hosts.environment, "BANDMASTER_TEST_HOSTS": "1"}
        command = hosts.command(0, [sys.executable, "-m", "pytest", *sys.argv[1:]])
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
