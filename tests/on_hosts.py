"""Runs pytest on the first of several hosts, so that all ranks are on the others: see `hosts.py`.

The command ``python tests/on_hosts.py tests/test_contract.py -k TestRay`` runs the contract of a backend there.
"""

import subprocess
import sys

from hosts import Hosts, why_not


def main(arguments, module="pytest", **resources):
    """Run a module on the first host; returns its exit status: 0, with the reason, where there can be no testbed."""
    reason = why_not()
    if reason is not None:
        print(f"SKIPPED: no hosts to run {' '.join(arguments)} on, because {reason}")
        return 0
    with Hosts(3, **resources) as hosts:
        environment = {**hosts.environment, "BANDMASTER_TEST_HOSTS": "1"}
        command = hosts.command(0, [sys.executable, "-m", module, *arguments])
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], gpus=4))
