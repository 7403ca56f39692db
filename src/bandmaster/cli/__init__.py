"""The command ``bandmaster``: inspect a machine, list and end the groups on it, and preview a pool.

Each command is a module that gathers facts as plain values, judges them with pure functions, and prints the result. A
command's module is imported only when the command runs::

    doctor:    gather ──► Facts ──► findings.judge ──► text
    ps, kill:  discovery ──► Discovered ──► processes ──► text, signals
    top:       discovery ──► usage.Moment ──► top_view ──► text, live with rich; or web ──► a browser
    stack:     discovery ──► Discovered ──► status pages ──► text
    why:       discovery ──► Discovered ──► signs of life, stacks ──► places ──► text, JSON
    debug:     discovery ──► the socket of a rank's debugger ◄──► terminal
    replay:    a recorded call ──► its method in this process ──► text, pdb
    plan:      arguments ──► pool, mesh, protocol ──► text
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence

from bandmaster.errors import UsageError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; by default the arguments of this process.

    Returns:
        The exit status: 0 on success, 1 if the command found a problem or could not complete, 2 for invalid input.

    Raises:
        SystemExit: argparse printed the help (status 0) or a usage error (status 2).
    """
    arguments = _parser().parse_args(argv)
    try:
        status = _run(arguments)
        print(end="", flush=True)  # there may be no standard output
    except UsageError as error:
        print(f"bandmaster {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not _has_lost_its_reader():
            raise
        return 0
    return status


def _has_lost_its_reader() -> bool:
    """Whether nobody reads standard output any more, as after ``| head``; what is left to write is dropped then."""
    descriptor, output = sys.stdout.fileno(), select.poll()
    output.register(descriptor, 0)  # errors alone
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return True


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "doctor":
        from bandmaster.cli.doctor import doctor

        return doctor(ray_address=arguments.ray, is_quick=arguments.quick)
    if arguments.command == "plan":
        from bandmaster.cli.plan import plan_pool

        return plan_pool(arguments.places, arguments.gpus, arguments.axes, arguments.protocol, arguments.rows)
    if arguments.command == "top":
        if arguments.web:
            from bandmaster.cli.web import web

            return web(arguments.port, arguments.interval, arguments.controller)
        from bandmaster.cli.top import top

        return top(arguments.once, arguments.interval, arguments.controller)
    if arguments.command == "stack":
        from bandmaster.cli.stack import stack

        return stack(arguments.group, arguments.rank, arguments.controller)
    if arguments.command == "why":
        from bandmaster.cli.why import why

        return why(arguments.group, arguments.json, arguments.controller)
    if arguments.command == "replay":
        from bandmaster.cli.replay import replay

        return replay(arguments.path, arguments.rank, arguments.run)
    if arguments.command == "debug":
        from bandmaster.cli.debug import debug

        return debug(arguments.group, arguments.rank, arguments.controller)
    from bandmaster.cli.processes import kill, ps

    if arguments.command == "ps":
        return ps(arguments.controller)
    assert arguments.command == "kill", "each command of the parser is run above"
    return kill(arguments.groups, arguments.all, arguments.orphans, arguments.yes, arguments.controller)


def _parser() -> argparse.ArgumentParser:
    from bandmaster import __version__

    parser = argparse.ArgumentParser(prog="bandmaster", description="Inspect this machine and its worker groups.")
    parser.add_argument("--version", action="version", version=f"bandmaster {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_doctor(commands)
    _add_controller(commands.add_parser("ps", help="list your worker groups on this machine"))
    _add_top(commands)
    _add_stack(commands)
    _add_why(commands)
    _add_debug(commands)
    _add_replay(commands)
    _add_kill(commands)
    _add_plan(commands)
    return parser


def _add_controller(command: argparse.ArgumentParser) -> None:
    command.add_argument("--controller", type=int, metavar="PID", help="consider only the groups of this controller")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help="show what this machine offers, its problems and their fixes")
    doctor.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS", help="also check a running Ray cluster; never starts one"
    )
    doctor.add_argument("--quick", action="store_true", help="skip the test that starts a worker")


GROUP = "name of a group as ps shows it; GROUP@CONTROLLER, with the controller's pid, if several have it"


def _add_top(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    top = commands.add_parser("top", help="show live what the ranks of your groups on this machine do and use")
    top.add_argument("--once", action="store_true", help="print one snapshot as plain text")
    top.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between two updates; default: 1"
    )
    top.add_argument("--web", action="store_true", help="show it in a browser, on 127.0.0.1")
    top.add_argument("--port", type=int, default=8325, help="port of --web, 0 for any that is free; default: 8325")
    _add_controller(top)


def _add_stack(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    stack = commands.add_parser("stack", help="show where the ranks of a group are in their Python code")
    stack.add_argument("group", metavar="GROUP", help=GROUP)
    stack.add_argument("rank", metavar="RANK", nargs="?", type=int, help="show only this rank; default: all of them")
    _add_controller(stack)


def _add_why(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    why = commands.add_parser(
        "why", help="show what ranks run, for how long, and where; those first that others wait for"
    )
    why.add_argument("group", metavar="GROUP", nargs="?", help=f"{GROUP}; default: all your groups")
    why.add_argument("--json", action="store_true", help="print one object for each group, a line each")
    _add_controller(why)


def _add_debug(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    debug = commands.add_parser("debug", help="attach this terminal to a rank that waits at breakpoint()")
    debug.add_argument("group", metavar="GROUP", help=GROUP)
    debug.add_argument("rank", metavar="RANK", nargs="?", type=int, help="default: the one that waits")
    _add_controller(debug)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser("replay", help="run a recorded call, which is a pickle, in this process under pdb")
    replay.add_argument("path", metavar="PATH", help="a recorded call, or the folder that testing.record wrote to")
    replay.add_argument("--rank", type=int, help="only calls of this rank; default: any")
    replay.add_argument("--run", action="store_true", help="print the result or the traceback, without a debugger")


def _add_kill(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    kill = commands.add_parser("kill", help="end the workers of groups and all processes that they started")
    which = kill.add_mutually_exclusive_group(required=True)
    which.add_argument("groups", nargs="*", default=[], metavar="GROUP", help=GROUP)
    which.add_argument(
        "--all",
        action="store_true",
        help="end all your groups on this machine, and zygotes (processes that fork workers) without a controller",
    )
    kill.add_argument("--yes", action="store_true", help="with --all: end them without asking")
    which.add_argument("--orphans", action="store_true", help="end groups and zygotes whose controller has ended")
    _add_controller(kill)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser("plan", help="preview the ranks of a pool and the rows that each would get")
    plan.add_argument("places", metavar="SLOTS", help="slots on each node, such as 4,4")
    plan.add_argument("--gpus", action="store_true", help="every slot has a GPU of its own")
    plan.add_argument(
        "--axes",
        metavar="NAME=SIZE,...",
        help="the mesh, slowest axis first, such as pp=2,dp=2,tp=2; gen_pp and gen_tp refine it",
    )
    plan.add_argument("--protocol", help="a transfer protocol, such as 3D_PROTO")
    plan.add_argument("--rows", type=int, help="rows of the batch that the protocol transfers; default: one per rank")
