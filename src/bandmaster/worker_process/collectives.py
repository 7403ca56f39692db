"""Tells which operation of ``torch.distributed`` this worker has entered last in each process group, and its number.

The thread that writes the worker's stacks asks torch's flight recorder, also while the thread that runs methods waits
in C code of an operation. It costs nothing until then: torch counts and records the operations itself.

Source: the flight recorder of torch, https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import json
import sys
from typing import Any


def told_of_collectives() -> str:
    """A line for each process group, about the last operation that this rank has entered there; "" if it has none."""
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", bool)  # not while torch is being imported
    try:
        return "\n".join(_operations()) if is_initialized() else ""
    except Exception as error:  # torch's format has changed
        return f"  its collectives are unknown: {error!r}"


def _operations() -> list[str]:
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
