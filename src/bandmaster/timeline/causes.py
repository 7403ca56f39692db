"""Finds where the time of a run went: findings, each with its share of the run, and a sentence of them. Pure.

A finding says which share of the run would be gained without its cause:

::

    slow       a rank, or a replica, runs longer than the others in most calls
    uneven     the ranks of a call run unequally long, each time another one
    tail       few long requests run on while most places for requests are empty
    link       rows are moved, slower than memory allows, or by one rank slower than by others
    controller no rank works, and nothing is on its way
    small      calls that are shorter than what each call costs
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bandmaster import CallRecord
from bandmaster.timeline.run import Call, Moments, named

SLOW = 1.15  # a rank that runs so many times as long as the others is called slow
SLOW_REPLICA = 1.3  # the same for requests, which differ more than calls
LEAST = {"slow": 0.03, "uneven": 0.1, "tail": 0.08, "link": 0.08, "controller": 0.1, "small": 0.2}  # shares of the run
LONG_TAIL = 2.0  # the longest request runs so many times as long as the median one
MEMORY_NBYTES = 1e9  # bytes in a second; a link that is slower than that is said to be slow
LARGE_NBYTES = 1e6  # a group that moves fewer bytes has no slow link, and a call that moves more is not small
SLOW_LINK = 2.0  # a rank that moves its rows so many times as long as the others has a slow link
LATE_NBYTES = 1e6  # bytes in a second; a reply that takes longer was read late by the controller
TOGETHER_S = 1e-3  # ranks whose ends differ by less have ended together
SHORT_S = 0.02  # calls that take longer are never small
MANY = 20  # calls that may be called small
MOST_TOLD = 3

Spans = list[tuple[float, float]]
Movement = tuple[Call, int, Spans]  # the rank, and the times in which something of the call was moved


class Finding(NamedTuple):
    """One cause of lost time.

    Attributes:
        kind: ``"slow"``, ``"uneven"``, ``"tail"``, ``"link"``, ``"controller"`` or ``"small"``.
        share: The share of the run that it costs, from 0 to 1.
        text: The finding, in words.
        group: The group; "" for the controller.
        method: ``"Class.method"``; "" if it is no single one.
        ranks: The ranks; empty if it is no single one.
    """

    kind: str
    share: float
    text: str
    group: str = ""
    method: str = ""
    ranks: tuple[int, ...] = ()


def diagnosis(calls: Iterable[CallRecord | Call], more: Sequence[Finding] = ()) -> str:
    """One sentence that says where the time of some calls went.

    Args:
        calls: The calls, such as those of a trace.
        more: Further findings about them, such as those of `Waits`; all of them count.

    Example:
        >>> from bandmaster.timeline import Call, Moments, diagnosis
        >>> def call(number, seconds):
        ...     begun = 3.0 * number
        ...     ranks = {rank: Moments(*[begun] * 2, *[begun + s] * 3) for rank, s in enumerate(seconds)}
        ...     return Call(number, "actor", "Actor.update", begun, begun, begun, begun + max(seconds), ranks)
        >>> diagnosis([call(number, [2.0, 2.0, 2.0, 3.0]) for number in range(8)])
        'Rank 3 of actor runs Actor.update 1.5 times as long as the others (33 %); the controller takes 0.0 %'
    """
    known = _Known(calls)
    if not known.calls:
        return "no call has ended"
    told = [finding.text for finding in _findings(known, more)][:MOST_TOLD]
    if not told:
        most, seconds = _longest(known.calls)
        told = [f"{most} runs for {percent(seconds / known.total)} of the time, and no cause of delay stands out"]
    if not any(text.startswith("the controller") for text in told):
        told.append(f"the controller takes {percent(known.controller_s / known.total)}")
    sentence = "; ".join(told)
    return sentence[0].upper() + sentence[1:]


def findings(calls: Iterable[CallRecord | Call], more: Sequence[Finding] = ()) -> list[Finding]:
    """The causes that have cost time which could be gained, the most expensive first; empty if nothing stands out.

    Args:
        calls: The calls, such as those of a trace.
        more: Further findings about them, such as those of `Waits`; all of them count.
    """
    return _findings(_Known(calls), more)


def _findings(known: _Known, more: Sequence[Finding]) -> list[Finding]:
    if not known.calls:
        return []
    found: list[Finding] = []
    methods: dict[tuple[str, str, bool], list[Call]] = {}
    for call in known.calls:
        methods.setdefault((call.group, call.method, call.is_request), []).append(call)
    small: list[Call] = []
    for (group, method, is_request), some in methods.items():
        if is_request:
            found += [*_tail(group, method, some, known.total), *_slow_replicas(group, method, some, known.total)]
            continue
        found += _slow_ranks(group, method, some, known.total)
        if costly := _small(group, method, some, known.total):
            small += some
            found += costly
    found += [*_links(known), _controller(known, small)]
    kept = [finding for finding in found if finding.share >= LEAST[finding.kind]]
    return sorted([*more, *kept], key=lambda finding: -finding.share)


class _Known:
    """Calls that have ended, and times that several findings are made of."""

    def __init__(self, calls: Iterable[CallRecord | Call]) -> None:
        known = [call if isinstance(call, Call) else Call.of(call) for call in calls]
        self.calls = [call for call in known if call.done is not None and call.moments]
        self.total = 1e-9
        if self.calls:
            self.total += max(call.end for call in self.calls) - min(call.begun for call in self.calls)

    @cached_property
    def work(self) -> Spans:
        """The times in which a method runs on a rank."""
        return merged([(times[1], times[2]) for call in self.calls for times in call.moments.values()])

    @cached_property
    def movements(self) -> list[Movement]:
        """The times in which something is on its way, or decoded or encoded."""
        return list(_movements(self.calls))

    @cached_property
    def busy(self) -> Spans:
        """The times in which a rank works, or something is on its way."""
        return merged([*self.work, *(span for _, _, spans in self.movements for span in spans)])

    @property
    def controller_s(self) -> float:
        """Seconds in which no rank works, and nothing is on its way."""
        return max(0.0, self.total - length(self.busy))


# --- ranks that are slower than others ---


def _slow_ranks(group: str, method: str, calls: Sequence[Call], total: float) -> list[Finding]:
    """Ranks that run longer than others. Calls whose ranks have waited for each other do not tell."""
    alike: dict[tuple[int, ...], list[list[float]]] = {}
    for call in calls:
        if len(call.moments) > 1 and not have_waited(list(call.moments.values())):
            ran = [times.ran - times.decoded for times in call.moments.values()]
            alike.setdefault(tuple(call.moments), []).append(ran)
    found: list[Finding] = []
    for ranks, each in alike.items():
        table = np.array(each)  # calls x ranks
        typical = np.median(table, axis=0)
        slow = _outliers(typical)
        lost = np.maximum(0.0, table[:, slow].max(axis=1) - table[:, ~slow].max(axis=1)).sum() if slow.any() else 0.0
        if lost and (table.argmax(axis=1)[:, None] == np.flatnonzero(slow)).any(axis=1).mean() > 0.5:
            factor = float(np.median(typical[slow]) / np.median(typical[~slow]))
            found.append(_slow(group, method, [ranks[n] for n in np.flatnonzero(slow)], factor, float(lost), total))
        else:
            lost = float((table.max(axis=1) - table.mean(axis=1)).sum())
            text = f"the ranks{_of(group, method)} run {method} unequally long, each time others"
            text = f"{text} ({percent(lost / total)})"
            found.append(Finding("uneven", lost / total, text, group, method))
    return found


def have_waited(ranks: Sequence[Moments]) -> bool:
    """Whether the ranks of a call waited for each other: they have begun at different times, and ended at one."""
    begun, ended = [times.decoded for times in ranks], [times.ran for times in ranks]
    apart = max(begun) - min(begun)
    return apart > TOGETHER_S and max(ended) - min(ended) < max(TOGETHER_S, 0.1 * apart)


def _outliers(typical: NDArray[np.float64], factor: float = SLOW) -> NDArray[np.bool_]:
    """Mark the ranks that are slower than the others, at most half of all; of two, the slower one."""
    middle = np.sort(typical)[(len(typical) - 1) // 2]
    marked: NDArray[np.bool_] = typical > np.maximum(factor * middle, middle + TOGETHER_S / 2)
    return marked


def _slow(group: str, method: str, ranks: Sequence[int], factor: float, lost: float, total: float) -> Finding:
    verb = "runs" if len(ranks) == 1 else "run"
    text = f"{named(ranks)}{_of(group, method)} {verb} {method} {factor:.1f} times as long as the others"
    return Finding("slow", lost / total, f"{text} ({percent(lost / total)})", group, method, tuple(sorted(ranks)))


def _slow_replicas(group: str, method: str, calls: Sequence[Call], total: float) -> list[Finding]:
    """Replicas whose requests run longer than those of others."""
    by_rank: dict[int, list[float]] = {}
    for call in calls:
        for rank, times in call.moments.items():
            by_rank.setdefault(rank, []).append(times.ran - times.decoded)
    ranks = [rank for rank, ran in by_rank.items() if len(ran) >= 5]
    if len(ranks) < 2:
        return []
    typical = np.array([statistics.median(by_rank[rank]) for rank in ranks])
    slow = _outliers(typical, SLOW_REPLICA)
    if not slow.any():
        return []
    of_slow = [ranks[n] for n in np.flatnonzero(slow)]
    factor = float(np.median(typical[slow]) / np.median(typical[~slow]))
    # The others would have had their work done by then, if all were as fast as they are.
    own = [(t.decoded, t.ran) for call in calls for rank, t in call.moments.items() if rank in of_slow]
    lost = (1 - 1 / factor) * length(merged(own))
    return [_slow(group, method, of_slow, factor, lost, total)]


# --- requests that end late ---


def _tail(group: str, method: str, calls: Sequence[Call], total: float) -> list[Finding]:
    """The long requests at the end of each wave of requests that overlap."""
    lost = 0.0
    for wave in _waves(calls):
        ran = [max(t.ran - t.decoded for t in call.moments.values()) for call in wave]
        if len(wave) >= 4 and max(ran) > LONG_TAIL * statistics.median(ran):
            lost += _empty_s(wave)
    text = f"the longest requests of {method}{_of(group, method)} hold {percent(lost / total)} of the time"
    return [Finding("tail", lost / total, text, group, method)]


def _waves(calls: Sequence[Call]) -> list[list[Call]]:
    """Requests that overlap, or follow each other without a pause, in waves."""
    waves: list[list[Call]] = []
    end = -1.0
    for call in sorted(calls, key=lambda call: call.begun):
        if not waves or call.begun > end:
            waves.append([])
        waves[-1].append(call)
        end = max(end, call.end)
    return waves


def _empty_s(wave: Sequence[Call]) -> float:
    """Seconds after the last request of a wave was sent, weighted by the share of the places that were empty."""
    since = max(call.sent for call in wave)
    ends = sorted(max(times.encoded for times in call.moments.values()) for call in wave)
    left = [end for end in ends if end > since]
    steps = enumerate(pairwise([since, *left]))  # the number of those that have ended, and the time until the next one
    return sum((end - before) * n_ended / len(left) for n_ended, (before, end) in steps)


# --- rows on their way ---


def _links(known: _Known) -> Iterator[Finding]:
    """Yield ranks that take longer than others to get and give their rows, and rows that are moved slowly by all."""
    by_group: dict[str, list[Movement]] = {}
    for movement in known.movements:
        by_group.setdefault(movement[0].group, []).append(movement)
    for group, movements in by_group.items():
        nbytes = sum(_nbytes(call) / len(call.moments) for call, _, _ in movements)
        if nbytes < LARGE_NBYTES:  # whatever takes its time, it is not the link
            continue
        by_rank: dict[int, float] = {}
        for _, rank, spans in movements:
            by_rank[rank] = by_rank.get(rank, 0.0) + sum(stop - start for start, stop in spans)
        middle = sorted(by_rank.values())[(len(by_rank) - 1) // 2]
        slowest = max(by_rank, key=by_rank.__getitem__)
        excess = (by_rank[slowest] - middle) / known.total
        if len(by_rank) > 1 and by_rank[slowest] > SLOW_LINK * middle and excess > LEAST["link"]:
            own = nbytes / len(by_rank) / by_rank[slowest]
            factor = by_rank[slowest] / max(middle, 1e-9)
            text = f"rank {slowest} of {group} takes {factor:.1f} times as long as the others to move its rows"
            text = f"{text}, at {_rate(own)} ({percent(excess)})"
            yield Finding("link", excess, text, group, "", (slowest,))
        else:
            spans = [span for _, _, some in movements for span in some]
            alone = (length(merged([*known.work, *spans])) - length(known.work)) / known.total
            rate = nbytes / max(1e-9, length(merged(spans)))
            if rate < MEMORY_NBYTES:
                text = f"moving the rows of {group}, at {_rate(rate)}, takes {percent(alone)} of the time"
                yield Finding("link", alone, text, group)


def _movements(calls: Sequence[Call]) -> Iterator[Movement]:
    """Yield the times in which something of a call was moved to or from a rank, or decoded or encoded there."""
    last: dict[tuple[str, int], float] = {}
    for call in sorted(calls, key=lambda call: call.sent):
        share = call.returned_nbytes / len(call.moments)
        for rank, (begun, decoded, ran, encoded, received) in call.moments.items():
            key = (call.group, rank)
            known = min(received, encoded + max(TOGETHER_S, share / LATE_NBYTES))
            free = max(call.sent, last.get(key, 0.0))
            spans = [(begun, decoded), (ran, known)]
            if not call.is_request and begun > free:
                spans.append((free, begun))
            last[key] = max(last.get(key, 0.0), encoded)
            yield call, rank, spans


def _nbytes(call: Call) -> int:
    return call.sent_nbytes + call.returned_nbytes + sum(call.read_nbytes.values())


# --- the controller ---


def _controller(known: _Known, small: Sequence[Call]) -> Finding:
    """The controller's own time, but for that of small calls, which have a finding of their own."""
    seconds = known.controller_s
    if small:
        within = [(call.begun, call.done or call.begun) for call in small]
        seconds -= length(merged([*within, *known.busy])) - length(known.busy)
    share = max(0.0, seconds) / known.total
    return Finding("controller", share, f"the controller takes {percent(share)}, while no rank works")


def _small(group: str, method: str, calls: Sequence[Call], total: float) -> list[Finding]:
    """Many calls that cost more than they do. While one of them works, those submitted behind it cost nothing."""
    work = merged((times.decoded, times.ran) for call in calls for times in call.moments.values())
    ran = length(work)
    lost = length(merged([*work, *((call.begun, call.finish) for call in calls)])) - ran
    is_costly = ran + lost < SHORT_S * len(calls) and lost > ran / 2
    if len(calls) < MANY or not is_costly or statistics.median(map(_nbytes, calls)) >= LARGE_NBYTES:
        return []
    each, work_ms = 1000 * lost / len(calls), 1000 * ran / len(calls)
    text = (
        f"{len(calls):,} calls of {method} are small: each works for {work_ms:.2g} ms and costs {each:.2g} ms more "
        f"({percent(lost / total)})"
    )
    return [Finding("small", lost / total, text, group, method)]


def _longest(calls: Sequence[Call]) -> tuple[str, float]:
    """The method in which ranks work for the longest time, and that time."""
    by_method: dict[str, Spans] = {}
    for call in calls:
        by_method.setdefault(call.method, []).extend((times[1], times[2]) for times in call.moments.values())
    lengths = {method: length(merged(spans)) for method, spans in by_method.items()}
    most = max(lengths, key=lengths.__getitem__)
    return most, lengths[most]


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """The union of some intervals, as intervals that do not overlap, in order."""
    union: Spans = []
    for start, stop in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], stop)
        elif stop > start:
            union.append((start, stop))
    return union


def length(union: Spans) -> float:
    """The length of intervals that do not overlap."""
    return sum(stop - start for start, stop in union)


def _of(group: str, method: str) -> str:
    """Name the group, unless the method does: by default, a group has the name of its class."""
    return "" if method.startswith(f"{group}.") else f" of {group}"


def percent(share: float) -> str:
    """Format a share, such as ``"38 %"``."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def _rate(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB/s" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB/s"
