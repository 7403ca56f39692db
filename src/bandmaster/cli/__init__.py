"""The command ``bandmaster``: look at a machine, at the groups on it, and at a pool that is not made yet.

The one part of the library that prints. Each command is a module: facts are gathered as plain values, judged by pure
functions, and printed at the end. The modules are imported by the command that needs them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bandmaster.errors import UsageError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: What follows the command's name; that of this process by default.

    Returns:
        The exit status: 0, or 1 where something is wrong or could not be done, or 2 for input that makes no sense.

    Raises:
        SystemExit: argparse has printed the help, or what it does not understand (status 2).
    """
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except UsageError as error:
        print(f"bandmaster {arguments.command}: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "doctor":
        from bandmaster.cli.doctor import doctor

        return doctor(ray_address=arguments.ray, is_quick=arguments.quick)
    if arguments.command == "plan":
        from bandmaster.cli.plan import plan_pool

        return plan_pool(arguments.places, arguments.gpus, arguments.axes, arguments.protocol, arguments.rows)
    from bandmaster.cli.processes import kill, ps

    return ps() if arguments.command == "ps" else kill(arguments.groups, arguments.all, arguments.orphans)


def _parser() -> argparse.ArgumentParser:
    from bandmaster import __version__

    parser = argparse.ArgumentParser(prog="bandmaster", description="Groups of workers on this machine.")
    parser.add_argument("--version", action="version", version=f"bandmaster {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_doctor(commands)
    commands.add_parser("ps", help="the groups that you have on this machine")
    _add_kill(commands)
    _add_plan(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help="what this machine offers, what is wrong with it, and what mends that")
    doctor.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS", help="also a Ray cluster that runs; none is started"
    )
    doctor.add_argument("--quick", action="store_true", help="do not start a worker to see whether that works")


def _add_kill(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    kill = commands.add_parser("kill", help="end the workers of groups, with all processes that they started")
    which = kill.add_mutually_exclusive_group(required=True)
    which.add_argument("groups", nargs="*", default=[], metavar="GROUP", help="as ps calls them, or GROUP@CONTROLLER")
    which.add_argument("--all", action="store_true", help="all your groups on this machine, and what --orphans ends")
    which.add_argument("--orphans", action="store_true", help="groups and zygotes whose controller is gone")


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser("plan", help="who would be where in a pool, and who would get which rows")
    plan.add_argument("places", help="places on each node, as in 4,4")
    plan.add_argument("--gpus", action="store_true", help="every place has a GPU of its own")
    plan.add_argument("--axes", metavar="NAME=SIZE,...", help="the mesh, slowest axis first, as in pp=2,dp=2,tp=2")
    plan.add_argument("--protocol", help="a transfer protocol, as in 3D_PROTO")
    plan.add_argument("--rows", type=int, help="rows of the batch under the protocol; one per rank by default")
