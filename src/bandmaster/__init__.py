"""bandmaster: one ordinary Python script drives groups of worker processes over many GPUs.

This module exports the public names; `README.md` introduces them. Names of features are imported when they are first
used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bandmaster.calls.future import Future, concat
from bandmaster.calls.options import CallOptions, set_default_options
from bandmaster.errors import (
    ArgumentError,
    BandmasterError,
    BatchError,
    CallCancelled,
    CallTimeout,
    ClosedError,
    CollectError,
    ConstructorError,
    LayoutError,
    MeshError,
    PlacementError,
    ProtocolError,
    RemoteError,
    ResourceError,
    RowsLost,
    Stalled,
    TurnTimeout,
    UsageError,
    WorkerDied,
)
from bandmaster.errors import hide_library_frames as _hide_library_frames
from bandmaster.groups.colocation import ColocatedGroup, RoleGroup, colocate
from bandmaster.groups.group import GroupOf, WorkerGroup, close_all
from bandmaster.plan.batch import register_batch_type
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.preview import TransferPlan, plan
from bandmaster.plan.transfer import (
    Broadcast,
    Concat,
    Dispatch,
    Execute,
    Gather,
    Only,
    PerRank,
    Reduce,
    Route,
    Split,
    TransferProtocol,
    collect_all_to_all,
)
from bandmaster.platform.version import VERSION
from bandmaster.pool import ResourcePool, merge_resource_pool, split_resource_pool
from bandmaster.registration import register
from bandmaster.worker import ClassWithInitArgs, Worker, report

if TYPE_CHECKING:
    from bandmaster.flow.stream import Stream
    from bandmaster.flow.waiting import as_completed, wait
    from bandmaster.requests.map import Mapped
    from bandmaster.requests.map_rows import FailedRows, PartialResult
    from bandmaster.tracing.ledger import Trace, trace
    from bandmaster.tracing.records import CallRecord, CallTable, RankTimes
    from bandmaster.watching.watch import Stall, stalls

__version__ = VERSION
_hide_library_frames()

_MODULES = {  # of the names of features
    "CallRecord": "tracing.records",
    "CallTable": "tracing.records",
    "FailedRows": "requests.map_rows",
    "Mapped": "requests.map",
    "PartialResult": "requests.map_rows",
    "RankTimes": "tracing.records",
    "Stall": "watching.watch",
    "Stream": "flow.stream",
    "Trace": "tracing.ledger",
    "as_completed": "flow.waiting",
    "stalls": "watching.watch",
    "trace": "tracing.ledger",
    "wait": "flow.waiting",
}


if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        _hide_library_frames()  # also of the modules that were just loaded
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})


__all__ = [
    "ArgumentError",
    "BandmasterError",
    "BatchError",
    "Broadcast",
    "CallCancelled",
    "CallOptions",
    "CallRecord",
    "CallTable",
    "CallTimeout",
    "ClassWithInitArgs",
    "ClosedError",
    "CollectError",
    "ColocatedGroup",
    "Concat",
    "ConstructorError",
    "Dispatch",
    "Execute",
    "FailedRows",
    "Future",
    "Gather",
    "GroupOf",
    "LayoutError",
    "Mapped",
    "Mesh",
    "MeshError",
    "Only",
    "PartialResult",
    "PerRank",
    "PlacementError",
    "ProtocolError",
    "RankTimes",
    "Reduce",
    "RemoteError",
    "ResourceError",
    "ResourcePool",
    "RoleGroup",
    "Route",
    "RowsLost",
    "Split",
    "Stall",
    "Stalled",
    "Stream",
    "Trace",
    "TransferPlan",
    "TransferProtocol",
    "TurnTimeout",
    "UsageError",
    "Worker",
    "WorkerDied",
    "WorkerGroup",
    "as_completed",
    "close_all",
    "collect_all_to_all",
    "colocate",
    "concat",
    "merge_resource_pool",
    "plan",
    "register",
    "register_batch_type",
    "report",
    "set_default_options",
    "split_resource_pool",
    "stalls",
    "trace",
    "wait",
]
