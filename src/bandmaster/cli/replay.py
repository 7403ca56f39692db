"""``bandmaster replay``: run a recorded call again in this process, under pdb."""

from __future__ import annotations

import asyncio
import bdb
import inspect
import pdb
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from bandmaster.errors import UsageError
from bandmaster.testing.recording import SUFFIX, restore_random_states


def replay(path: str, rank: int | None, is_run: bool) -> int:
    """Run a recorded call again, with the same worker state, arguments and states of random number generators.

    Args:
        path: A file, or a folder with recorded calls; of these the newest is run.
        rank: Only calls of this rank.
        is_run: Whether to run without a debugger.

    Returns:
        The exit status: 0, or 1 if the method raised.

    Raises:
        UsageError: There is no such call, or this process cannot load it.
    """
    file = _chosen(Path(path), rank)
    call = _loaded(file)
    if rank not in (None, call["rank"]):
        raise UsageError(f"{file} has a call of rank {call['rank']}, but --rank {rank} is given; leave that out")
    print(f"{call['label']} on rank {call['rank']} of {call['world_size']}, recorded on host {call['host']}: {file}")
    restore_random_states(call["random"])
    if is_run:
        sys.breakpointhook = lambda *_, **__: None
    try:
        result = call["method"](*call["args"], **call["kwargs"])
        if inspect.iscoroutine(result):
            result = asyncio.run(_awaited(result))
    except bdb.BdbQuit:  # at a breakpoint() of the method
        return 1
    except BaseException as error:
        traceback.print_exception(_users(error))
        if not is_run:
            pdb.post_mortem(error.__traceback__)
        return 1
    print(f"returned {result!r}")
    return 0


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


def _users(error: BaseException) -> BaseException:
    """The error without this module's frame."""
    return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)


def _chosen(path: Path, rank: int | None) -> Path:
    if path.is_file():
        return path
    everything = {file: file.stem.rpartition("-rank-")[2] for file in path.glob(f"*{SUFFIX}")}
    files = [file for file, its_rank in everything.items() if rank is None or its_rank == str(rank)]
    if files:
        return max(files, key=lambda file: file.stat().st_mtime_ns)
    ranks = sorted(int(its_rank) for its_rank in set(everything.values()) if its_rank.isdecimal())
    if not ranks:
        of_rank = "" if rank is None else f" of rank {rank}"
        raise UsageError(
            f"there is no recorded call{of_rank} in {path}; record some by bandmaster.testing.record(group, folder)"
        )
    raise UsageError(f"{path} has no recorded call of rank {rank}, but of rank {', '.join(map(str, ranks))}")


def _loaded(file: Path) -> dict[str, Any]:
    """The recorded call. This runs code that the file names."""
    try:
        with file.open("rb") as stream:
            sys.path += [entry for entry in pickle.load(stream) if entry not in sys.path]
            call: dict[str, Any] = pickle.load(stream)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{file} needs module {error.name!r}, which cannot be imported here; run the command where the script "
            "ran, or set PYTHONPATH"
        ) from error
    except Exception as error:
        raise UsageError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from error
    return call
