"""Lanes: which rank did what and when, with overlapping requests in rows above each other. Pure.

::

    controller   [send]      [return]                    one row
    rollout                                              requests that wait for a place
      rank 0     waiting  [decode│run│encode]
                       [decode│  run  │encode]           a second row: it overlaps the first
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bandmaster import RankTimes
from bandmaster.timeline.run import Call, Rank, Run

CONTROLLER = "controller"


class Item(NamedTuple):
    """The part of one call that is drawn in a lane; times in seconds.

    Attributes:
        call: The index of the call in the run.
        begun: The beginning of the item.
        queued: How long the call had waited for the rank before that.
        decoded: Length of decoding, which comes first.
        ran: Length of the method's work.
        encoded: Length of encoding.
        moved: Time from then until the controller had the reply.
    """

    call: int
    begun: float
    queued: float
    decoded: float
    ran: float
    encoded: float
    moved: float

    @property
    def end(self) -> float:
        """The end of what the rank does."""
        return self.begun + self.decoded + self.ran + self.encoded


@dataclass(frozen=True)
class Lane:
    """The calls that one rank ran.

    Attributes:
        group: The group; `CONTROLLER` for the controller's own lane.
        rank: The rank; -1 for the controller.
        place: Its host, pid and device, as text.
        rows: The items by row, those of a row in order; they do not overlap.
        versions: Times at which the rank told of another version of its weights, and that version.
    """

    group: str
    rank: int
    place: str
    rows: Sequence[Sequence[Item]]
    versions: Sequence[tuple[float, int]] = ()


def lanes_of(run: Run) -> list[Lane]:
    """The lanes of a run: that of the controller, then the ranks of each group, in the order of first use."""
    items: dict[Rank, list[Item]] = {}
    versions: dict[Rank, list[tuple[float, int]]] = {}
    for number, call in enumerate(run.calls):
        for rank, moments in call.moments.items():
            item = Item(number, moments.begun, *RankTimes.of(moments, call.sent))
            items.setdefault((call.group, rank), []).append(item)
            if rank in call.versions:
                versions.setdefault((call.group, rank), []).append((moments.encoded, call.versions[rank]))
    order = {group: n for n, group in enumerate(dict.fromkeys(group for group, _ in items))}
    lanes = [Lane(CONTROLLER, -1, "", [sorted(_of_the_controller(run.calls), key=lambda item: item.begun)])]
    for group, rank in sorted(items, key=lambda key: (order[key[0]], key[1])):
        place, known = run.places.get((group, rank), ""), versions.get((group, rank), [])
        lanes.append(Lane(group, rank, place, stacked(items[group, rank]), _changes(known)))
    return lanes


def stacked(items: Sequence[Item]) -> list[list[Item]]:
    """Put items into as few rows as possible, so that those of a row do not overlap."""
    rows: list[list[Item]] = []
    free: list[tuple[float, int]] = []  # the end of each row, and its number
    unused: list[int] = []  # rows that had ended when the present item began; the lowest is taken first
    for item in sorted(items, key=lambda item: item.begun):
        while free and free[0][0] <= item.begun + 1e-9:
            heapq.heappush(unused, heapq.heappop(free)[1])
        if unused:
            number = heapq.heappop(unused)
        else:
            number = len(rows)
            rows.append([])
        rows[number].append(item)
        heapq.heappush(free, (item.end, number))
    return rows


def _of_the_controller(calls: Sequence[Call]) -> Iterator[Item]:
    """Yield the planning and sending of calls, and the joining of results.

    A result that has come is joined when it is asked for: not before the last thing that the controller did otherwise.
    """
    moments = sorted([moment for call in calls for moment in (call.sent, call.done or 0.0, *_received(call))])
    for number, call in enumerate(calls):
        sent = call.encoded if call.is_request else call.sent
        yield Item(number, call.begun, 0.0, 0.0, sent - call.begun, 0.0, 0.0)
        if call.done is not None and call.moments:
            since = moments[max(0, bisect.bisect_left(moments, call.done) - 1)]
            if max(_received(call)) <= since < call.done:
                yield Item(number, since, 0.0, 0.0, call.done - since, 0.0, 0.0)


def _received(call: Call) -> list[float]:
    return [times.received for times in call.moments.values()]


def _changes(known: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    changes: list[tuple[float, int]] = []
    for moment, version in sorted(known):
        if not changes or version > changes[-1][1]:
            changes.append((moment, version))
    return changes


def columns_of(lanes: Sequence[Lane]) -> dict[str, NDArray[np.generic]]:
    """The items of all lanes as columns, ordered by lane, row and time; ``row_starts`` has the first of each row."""
    items = [item for lane in lanes for row in lane.rows for item in row]
    table = np.array(items, dtype=np.float64).reshape(len(items), len(Item._fields))
    columns: dict[str, NDArray[np.generic]] = {"begun": table[:, 1], "call": table[:, 0].astype("<u4")}
    for n, name in enumerate(Item._fields[2:], 2):
        columns[name] = table[:, n].astype("<f4")
    lengths = [len(row) for lane in lanes for row in lane.rows]
    columns["row_starts"] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<u4")
    return columns
