"""The picture of a run as one HTML page: `view.html` with the styles, the script and the data in it."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bandmaster.timeline.lanes import Lane, columns_of, lanes_of
from bandmaster.timeline.run import Call, Run

TYPES = {"<f8": "Float64Array", "<f4": "Float32Array", "<u4": "Uint32Array"}


def page(run: Run, sentence: str) -> str:
    """The page; the sentence stands above the picture."""
    lanes = lanes_of(run)
    columns = {**columns_of(lanes), **_columns_of_calls(run.calls)}
    facts, body = _packed(columns)
    numbers = {method: number for number, method in enumerate(run.methods)}
    head = {
        "sentence": sentence,
        "begin": run.begin,
        "end": run.end,
        "columns": facts,
        "methods": list(numbers),
        "method": [numbers[call.group, call.method] for call in run.calls],
        "number": [call.number for call in run.calls],
        "request": [int(call.is_request) for call in run.calls],
        "errors": {n: call.error for n, call in enumerate(run.calls) if call.error},
        "lanes": [_described(lane) for lane in lanes],
        "stalls": _stalls(run, lanes),
    }
    parts = {
        "STYLE": _file("view.css"),
        "SCRIPT": _file("view.js"),
        "HEAD": json.dumps(head, separators=(",", ":")).replace("<", "\\u003c"),
        "BODY": base64.b64encode(zlib.compress(body, 6)).decode(),
    }
    pieces = _file("view.html").split("@@")  # text, name, text, name, ...
    return "".join(parts[piece] if n % 2 else piece for n, piece in enumerate(pieces))


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _described(lane: Lane) -> dict[str, Any]:
    place = lane.place.partition("(")[2].rstrip(")")
    return {"group": lane.group, "rank": lane.rank, "place": place, "rows": len(lane.rows), "versions": lane.versions}


def _columns_of_calls(calls: Sequence[Call]) -> dict[str, NDArray[np.generic]]:
    """Times and bytes of calls, and the calls whose rows they take: each by two indices."""
    index = {call.number: n for n, call in enumerate(calls)}
    times = np.array([(c.begun, c.encoded, c.sent, c.finish) for c in calls], float)
    nbytes = np.array(
        [(c.sent_nbytes, c.returned_nbytes, c.kept_nbytes, sum(c.read_nbytes.values())) for c in calls], float
    )
    taken = [(n, index[source], rank) for n, c in enumerate(calls) for source, rank in c.takes_from if source in index]
    columns: dict[str, NDArray[np.generic]] = {"taken": np.array(taken, "<u4").ravel()}
    for n, name in enumerate(("call_begun", "call_encoded", "call_sent", "call_done")):
        columns[name] = times.reshape(-1, 4)[:, n]
    for n, name in enumerate(("sent_nbytes", "returned_nbytes", "kept_nbytes", "read_nbytes")):
        columns[name] = nbytes.reshape(-1, 4)[:, n]
    return columns


def _packed(columns: Mapping[str, NDArray[np.generic]]) -> tuple[dict[str, tuple[str, int, int]], bytes]:
    """The bytes of all columns, and for each its type in JavaScript, offset and length; the widest come first."""
    facts: dict[str, tuple[str, int, int]] = {}
    parts: list[bytes] = []
    offset = 0
    for name, column in sorted(columns.items(), key=lambda named: -named[1].dtype.itemsize):
        kind = column.dtype.str.replace("=", "<")
        facts[name] = (TYPES[kind], offset, len(column))
        parts.append(np.ascontiguousarray(column).tobytes())
        offset += len(parts[-1])
    return facts, b"".join(parts)


def _stalls(run: Run, lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """Stalls, each from its last progress to the notice, with the numbers of the lanes."""
    found = []
    for stall in run.stalls:
        at = stall.at - run.began
        of = [n for n, lane in enumerate(lanes) if lane.group == stall.group and lane.rank in stall.ranks]
        guilty = [n for n in of if lanes[n].rank in stall.guilty]
        found.append({"from": at - stall.seconds, "to": at, "lanes": of, "guilty": guilty, "text": stall.text})
    return found
