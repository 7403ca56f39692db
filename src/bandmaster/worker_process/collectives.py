"""Tells which operation of ``torch.distributed`` this worker has entered last in each process group, and its number.

::

    the thread that runs methods: all_reduce(...) ── waits in C code, where no Python code can run
    the teller's thread: blocked, until somebody who reads stacks signals it ──► torch's flight recorder ──► status page

The thread is started with the first process group. It costs nothing until it is asked, and nothing is added to
operations: torch counts and records them itself.

Source: the flight recorder of torch, https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from bandmaster.errors import ResourceError
from bandmaster.platform.after_import import AfterImport
from bandmaster.platform.limits import start_thread
from bandmaster.wire.status_page import STACKS_SIGNAL, StatusPage

_MODULE = "torch.distributed.distributed_c10d"


def tell_of_collectives(page: StatusPage) -> None:
    """Have others learn of the operations of this process by its status page, once it has a process group."""
    AfterImport(_MODULE, lambda: _start_with_the_first_group(page))


def _start_with_the_first_group(page: StatusPage) -> None:
    module: Any = sys.modules[_MODULE]
    update: Any = getattr(module, "_update_default_pg", None)  # called as a group is made
    is_started = False

    def update_and_start(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_started
        value = update(*args, **kwargs)
        if not is_started:
            is_started = True
            with suppress(ResourceError):
                start_thread("bandmaster-collectives", _tell, page)
        return value

    if update is not None:
        module._update_default_pg = update_and_start


def _tell(page: StatusPage) -> None:
    """Tell of the operations each time that the thread which runs this is asked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])  # of this thread alone
    page.tells_of_collectives(threading.get_native_id())
    while signal.sigwait([STACKS_SIGNAL]):
        try:
            told = "\n".join(_operations())
        except Exception as error:  # torch's format has changed
            told = f"  its collectives are unknown: {error!r}"
        page.tell_of_collectives(told)


def _operations() -> list[str]:
    """A line for each process group, about the last operation that this rank has entered there."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump(True, False)).get("entries", []) if dump is not None else []
    last: dict[str, Any] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            last[_group_of(entry)] = entry
    return [
        f"  collective: {entry['profiling_name'].rpartition(':')[2]}, number {entry['collective_seq_id']} of process "
        f"group {group}, {'ended' if entry['retired'] else 'not ended'}"
        for group, entry in last.items()
    ]


def _group_of(entry: Any) -> str:
    name, description = (*entry["process_group"], "")[:2]
    return str(description if description and description != "undefined" else name)
