"""What happens with a group in a few lines: threads, event loops, long chains, faults, and what must come of it.

A scene is a function of a group, rows and some ranks: its text, and what the oracle expects of it, given its own group,
rows and the same ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuzz.oracle import Expected, Invalid, bump, n_rows, show


@dataclass(frozen=True)
class Scene:
    """One kind of scene.

    Attributes:
        code: The definition of the function.
        comes: What it returns, by the oracle: a function of a group, rows and ranks, which may raise `Expected`.
        is_trouble: Whether ranks hang, fail or die in it.
        is_heavy: Whether it takes as long as many steps.
        is_quiet: Whether all calls must have ended before it.
        needs_values: Whether the rows may not be a handle.
        is_large: Whether its rows are so large that they stay on the ranks.
        needs_processes: Whether it has no meaning on backend ``inprocess``.
    """

    code: str
    comes: Callable[..., Any]
    is_trouble: bool = False
    is_heavy: bool = False
    is_quiet: bool = False
    needs_values: bool = False
    needs_processes: bool = False
    is_large: bool = False


def same(group, rows, ranks):
    return group.call("same", [rows])


def items_of(method):
    def comes(group, rows, ranks):
        outcomes, _ = group.outcomes(method, [rows])
        return sorted((rank, show(item)) for rank in group.sources("DP_PROTO") for item in outcomes[rank])

    return comes


def partial_items(group, rows, ranks):
    if not set(ranks) <= set(group.sources("DP_PROTO")):
        raise Invalid("a rank that is not collected")
    sources = sorted(group.sources("DP_PROTO"))
    return [(rank, end) for rank in sources for end in ("NoneType", "RemoteError" if rank in ranks else "NoneType")]


def few(group, rows, ranks):
    if not 0 < n_rows(rows) <= 7:
        raise Invalid("as many calls as rows")
    return same(group, rows, ranks)


def evenly(group, rows, ranks):
    costs = next(iter(rows.values())) if isinstance(rows, dict) else rows
    if not isinstance(costs, np.ndarray) or costs.dtype.kind not in "biuf" or costs.ndim > 1:
        raise Invalid("no costs")
    return True


def in_parts(group, rows, ranks):
    """Chunks of two rows of which those of one row fail."""
    if not hasattr(rows, "shape") or n_rows(rows) % 2 == 0:
        raise Invalid("no chunk of one row")
    n = n_rows(rows)
    return list(range(n - 1)), [([n - 1], "RemoteError")]


def other_types(group, rows, ranks):
    if not isinstance(rows, np.ndarray) or len(rows) % 2 == 0 or len(rows) == 1:
        raise Invalid("no chunk of one row")
    raise Expected("CollectError", range(group.size))


def items_of_others(group, rows, ranks):
    if not set(ranks) <= set(group.sources("DP_PROTO")):
        raise Invalid("a rank of which another one is collected, whose items end as well")
    group.renew()
    others = sorted(set(group.sources("DP_PROTO")) - set(ranks))
    return [(rank, "NoneType") for rank in others for _ in range(2)]


def after_being_stuck(group, rows, ranks):
    if group.size == 1:
        raise Invalid("no other rank")
    group.renew()
    raise Expected("BandmasterError", says="asked to")


def of_a_new_worker(group, rows, ranks):
    if ranks[0] not in group.sources("DP_PROTO"):
        raise Invalid("its items are not collected")
    group.renew(ranks[:1])
    raise Expected("BandmasterError")


def after_replacing(group, rows, ranks):
    group.renew(ranks[:1])
    raise Expected("WorkerDied", ranks[:1], says="last words of rank")


def after_restart(group, rows, ranks):
    group.renew()
    raise Expected("WorkerDied", ranks, says="last words of rank")


def after_its_time(group, rows, ranks):
    raise Expected("CallTimeout", ranks, says="nobody has seen why")


def tidied(group, rows, ranks):
    group.renew(ranks[:1])
    return [0] * group.size


def put_again(group, rows, ranks):
    again = copy.deepcopy(rows)
    return [group.call("count", [rows]), same(group, rows, ranks), same(group, bump(again), ranks)]


def after_cancel(group, rows, ranks):
    raise Expected("CallCancelled")


SCENES = {
    "in_threads": Scene(
        """
def in_threads(group, rows, ranks):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        return [one.result() for one in [pool.submit(group.bumped, rows) for _ in range(3)]]
""",
        lambda group, rows, ranks: [group.call("bumped", [rows]) for _ in range(3)],
    ),
    "left_early": Scene(
        """
def left_early(group, rows, ranks):
    with contextlib.closing(group.items.stream(rows)) as stream:
        return len([item.result() for item in itertools.islice(stream, len(ranks))])
""",
        lambda group, rows, ranks: min(len(ranks), 2 * len(group.sources("DP_PROTO"))),
    ),
    "shared_by_threads": Scene(
        """
def shared_by_threads(group, rows, ranks):
    stream = group.drip.stream(rows)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        taken = [pool.submit(list, stream) for _ in range(3)]
        return sorted((item.rank, show(item.result())) for one in taken for item in one.result())
""",
        items_of("drip"),
    ),
    "shared_by_tasks": Scene(
        """
def shared_by_tasks(group, rows, ranks):
    async def take(stream): return [(item.rank, show(item.result())) async for item in stream]
    async def main():
        stream = group.items.stream(rows)
        return await asyncio.gather(take(stream), take(stream))
    return sorted(item for one in asyncio.run(main()) for item in one)
""",
        items_of("items"),
    ),
    "closed_elsewhere": Scene(
        """
def closed_elsewhere(group, rows, ranks):
    stream = group.endless.stream(rows)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        taken = pool.submit(list, stream)
        next(stream)
        stream.close()
        return len(taken.result()) >= 0
""",
        lambda group, rows, ranks: True,
    ),
    "between_items": Scene(
        """
def between_items(group, rows, ranks):
    with group.crawl.options(maxsize=500).stream(rows) as stream:
        next(stream)
        return group.same.options(timeout=4)(rows)
""",
        same,
        needs_processes=True,
    ),
    "some_items": Scene(
        """
def some_items(group, rows, ranks):
    stream = group.trickle.options(on_error="return").stream(rows, ranks)
    items = [(item.rank, item.exception()) for item in stream]
    return sorted([(rank, type(error).__name__) for rank, error in items], key=lambda item: item[0])
""",
        partial_items,
        is_trouble=True,
    ),
    "some_chunks": Scene(
        """
def some_chunks(group, rows, ranks):
    found = group.not_one.options(pull=2, on_error="return")(rows)
    return found.numbers, [(list(one.numbers), type(one.error).__name__) for one in found.failed]
""",
        in_parts,
        is_trouble=True,
    ),
    "other_types": Scene(
        """
def other_types(group, rows, ranks):
    return group.unlike.options(pull=2)(rows)
""",
        other_types,
    ),
    "forked": Scene(
        """
def forked(group, rows, ranks):
    kept = group.put(rows)
    queued = [group.forks.submit(kept), group.same.submit(kept), group.same.submit(kept)]
    return [one.result() for one in queued]
""",
        lambda group, rows, ranks: [same(group, rows, ranks) for _ in range(3)],
        needs_processes=True,
    ),
    "fading": Scene(
        """
def fading(group, rows, ranks):
    stream = group.fades.options(on_error="return").stream(rows, ranks)
    items = [(item.rank, type(item.exception()).__name__) for item in stream]
    group.restart()
    return sorted(item for item in items if item[0] not in ranks)
""",
        items_of_others,
        is_trouble=True,
        is_quiet=True,
        needs_processes=True,
    ),
    "await_the_stuck": Scene(
        """
def await_the_stuck(group, rows, ranks):
    failing = group.deaf.options(grace=0.1).submit(rows, ranks[:1])
    behind = group.same.submit(rows)
    try: return asyncio.run(awaited(behind))
    finally: group.restart()
""",
        after_being_stuck,
        is_trouble=True,
        is_quiet=True,
        needs_processes=True,
    ),
    "stale": Scene(
        """
def stale(group, rows, ranks):
    stream = group.items.options(maxsize=1).stream(rows)
    group.replace(ranks[0])  # which calls on_replace
    return list(stream)
""",
        of_a_new_worker,
        is_trouble=True,
        is_quiet=True,
    ),
    "behind_late": Scene(
        """
def behind_late(group, rows, ranks):
    first = rows
    for _ in range(4): first = group.slow.submit(first)
    with contextlib.suppress(bm.CallTimeout): group.same.options(timeout=0.001)(first)
    return asyncio.run(awaited(group.same.submit(rows)))
""",
        same,
    ),
    "behind_chunks": Scene(
        """
def behind_chunks(group, rows, ranks):
    with bm.ResourcePool([1], backend=BACKEND) as slots:
        made = bm.WorkerGroup(slots, Subject).slow.submit(rows)
        chunks, behind = group.same.options(pull=1).submit(made), group.same.options(timeout=20).submit(rows)
        return [behind.result(), chunks.result()]
""",
        lambda group, rows, ranks: [few(group, rows, ranks), few(group, rows, ranks)],
        is_heavy=True,
    ),
    "long_chain": Scene(
        """
def long_chain(group, rows, ranks):
    rows = stuck = group.hang.submit(rows, ranks)
    for _ in range(24): rows = group.same.submit(group.same.options(pull=3).submit(rows)[::-1])
    with contextlib.suppress(bm.CallTimeout): rows.result(timeout=0.001)
    stuck.cancel()
    return rows.result()
""",
        after_cancel,
        is_trouble=True,
        needs_processes=True,
    ),
    "deep": Scene(
        """
def deep(group, rows, ranks):
    rows = group.slow.submit(rows)
    for _ in range(1200): rows = rows[::-1]
    return rows.result()
""",
        same,
        is_heavy=True,
    ),
    "freed": Scene(
        """
def freed(group, rows, ranks):
    futures, held = [], []
    for _ in range(3):
        made = [group.slow.submit(rows), group.slow.options(pull=2).submit(rows)] * 2
        futures += [*made, *[one.shuffle(0) for one in made], *[group.same.submit(one) for one in made]]
        for one in futures[-12:]: one.release()
        for one in futures[-12:]: one.exception()
        held.append(settled(held[0] + 5 if held else 10**9))
    return held[2] <= held[0] + 5
""",
        lambda group, rows, ranks: True,
        is_quiet=True,
        is_large=True,
    ),
    "given_up": Scene(
        """
def given_up(group, rows, ranks):
    held = []
    for _ in range(3):
        calls = [group.hang.submit(rows, ranks), *[group.same.submit(rows) for _ in range(8)]]
        for one in reversed(calls): one.cancel()
        for one in calls: one.exception()
        group.count(rows)
        held.append(settled(held[0] + 5 if held else 10**9))
    return held[2] <= held[0] + 5
""",
        lambda group, rows, ranks: True,
        is_trouble=True,
        is_quiet=True,
        is_large=True,
        needs_processes=True,
    ),
    "idle": Scene(
        """
def idle(group, rows, ranks):
    few = settled(10**9, "bandmaster-rows") + 9 * group.world_size  # which are kept for later rows
    futures = [group.same.submit(rows) for _ in range(24)]
    for one in futures: one.exception()
    for one in futures: one.release()
    return settled(few, "bandmaster-rows") <= few
""",
        lambda group, rows, ranks: True,
        is_heavy=True,
        is_quiet=True,
        is_large=True,
        needs_processes=True,
    ),
    "put_again": Scene(
        """
def put_again(group, rows, ranks):
    kept = group.put(rows)
    first, _, last = group.count.submit(kept), group.slow.submit(rows), group.same.submit(kept)
    n = first.result()
    del kept
    other = group.same.submit(group.put(bump(copy.deepcopy(rows))))
    return [n, last.result(), other.result()]
""",
        put_again,
        is_large=True,
        needs_values=True,
    ),
    "tidied": Scene(
        """
def tidied(group, rows, ranks):
    stream = group.tidy.options(maxsize=1).stream(rows)
    group.clock()  # behind the first items
    group.slow.submit(rows)
    stream.close()
    group.replace(ranks[0])  # which calls on_replace
    return group.left_open()
""",
        tidied,
        is_trouble=True,
        is_quiet=True,
    ),
    "asked": Scene(
        """
def asked(group, rows, ranks):
    future = (group.waits if len(ranks) % 2 else group.hang).submit(rows, ranks)
    def ask(_):
        for _ in range(20):
            try: return future.result(timeout=0.002)
            except bm.CallTimeout: pass
            except bm.CallCancelled as error: return error
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask, one) for one in range(2)]
        for _ in range(40): group.same.submit(rows).cancel()
        future.cancel()
    for one in asking: one.result()
    return future.result()
""",
        after_cancel,
        is_trouble=True,
        needs_processes=True,
    ),
    "closed_unhurt": Scene(
        """
def closed_unhurt(group, rows, ranks):
    deaths = []
    with bm.ResourcePool([1], backend=BACKEND) as slots:
        for nth in range(2 + len(ranks) % 2, 20, 2):
            with bm.WorkerGroup(slots, bm.Worker) as short:
                reached = held_up(nth)  # the thread that looks after the group
                short.on_death(deaths.append)
                reached.wait(0.1)
                threading.setprofile(None)
    return deaths
""",
        lambda group, rows, ranks: [],
        is_quiet=True,
        needs_processes=True,
    ),
    "dropped": Scene(
        """
def dropped(group, rows, ranks):
    stuck = group.hang.submit(rows, ranks)
    queued = [group.same.submit(rows) for _ in range(4)]
    for one in reversed(queued): one.cancel()
    stuck.cancel()
    return [type(one.exception()).__name__ for one in queued]
""",
        lambda group, rows, ranks: ["CallCancelled"] * 4,
        is_trouble=True,
        needs_processes=True,
    ),
    "not_held_up": Scene(
        """
def not_held_up(group, rows, ranks):
    stuck = group.hang.submit(rows, ranks)
    behind = group.same.submit(stuck)
    stream = group.same.stream(rows)
    stuck.cancel()
    return type(behind.exception()).__name__, len(list(stream))
""",
        lambda group, rows, ranks: ("CallCancelled", len(group.sources("DP_PROTO"))),
        is_trouble=True,
        needs_processes=True,
    ),
    "take_turns": Scene(
        """
def take_turns(group, rows, ranks):
    with bm.ResourcePool([1], backend=BACKEND) as slots, concurrent.futures.ThreadPoolExecutor(2) as threads:
        one, rival = bm.WorkerGroup(slots, Subject), bm.WorkerGroup(slots, Subject)
        end = time.monotonic() + 8
        def hold():
            while time.monotonic() < end:
                with one.turn(timeout=20): time.sleep(0.002)
        held = [threads.submit(hold) for _ in range(2)]
        with rival.turn(timeout=5): end = 0.0
        return [one.result() for one in held]
""",
        lambda group, rows, ranks: [None] * 2,
        is_heavy=True,
    ),
    "evenly": Scene(
        """
def evenly(group, rows, ranks):
    costs = rows if isinstance(rows, np.ndarray) else next(iter(rows.values()))
    same = group.costs({"a": costs}) == group.costs({"a": costs.astype(float)})
    return same and show(group.evened({"a": costs})) == show({"a": costs})
""",
        evenly,
        needs_values=True,
    ),
    "of_rank_zero": Scene(
        """
def of_rank_zero(group, rows, ranks):
    return group.execute_rank_zero_async("everyone", rows).result()
""",
        lambda group, rows, ranks: (0, rows),
    ),
    "late": Scene(
        """
def late(group, rows, ranks):
    future = group.waits.submit(rows, ranks)
    for _ in range(100):
        try: return future.result(timeout=0.05)
        except bm.CallTimeout as error: found = error
        if all("in waits" in found.stacks.get(rank, "") for rank in ranks): break  # else one has not begun yet
    else: return "not in waits"
    future.cancel()
    raise found
""",
        after_its_time,
        is_trouble=True,
        needs_processes=True,
    ),
    "cancelled": Scene(
        """
def cancelled(group, rows, ranks):
    future = group.hang.submit(rows, ranks)
    future.cancel()
    return future.result()
""",
        after_cancel,
        is_trouble=True,
        needs_processes=True,
    ),
    "fenced": Scene(
        """
def fenced(group, rows, ranks):
    failing, next_call = group.apart.submit(rows, ranks), group.clock.submit()
    times = next_call.result()
    try: return min(times[rank][0] for rank in ranks) >= max(ended for _, ended in times)
    finally: failing.exception()
""",
        lambda group, rows, ranks: True,
        is_trouble=True,
        needs_processes=True,
    ),
    "fallen": Scene(
        """
def fallen(group, rows, ranks):
    deaths = []
    group.on_death(deaths.append)
    try:
        with contextlib.redirect_stderr(SlowTerminal()): return group.die(rows, ranks)
    finally:
        end = time.monotonic() + 5
        while not deaths and time.monotonic() < end: time.sleep(0.001)
        group.restart()
        assert len(deaths) == 1
""",
        after_restart,
        is_trouble=True,
        is_quiet=True,
        needs_processes=True,
    ),
    "replaced": Scene(
        """
def replaced(group, rows, ranks):
    try:
        with contextlib.redirect_stderr(SlowTerminal()): return group.die(rows, ranks[:1])
    finally: group.replace(ranks[0])  # which calls on_replace
""",
        after_replacing,
        is_trouble=True,
        is_quiet=True,
        needs_processes=True,
    ),
}
