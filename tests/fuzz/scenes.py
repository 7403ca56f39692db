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
        is_large: Whether its rows are so large that they stay on the ranks.
        needs_values: Whether the rows may not be a handle.
        needs_processes: Whether it has no meaning on backend ``inprocess``.
        of_hosts: Whether the ranks must be on other hosts, or on this one; None if they may be anywhere.
    """

    code: str
    comes: Callable[..., Any]
    is_trouble: bool = False
    is_heavy: bool = False
    is_quiet: bool = False
    needs_processes: bool = False
    is_large: bool = False
    needs_values: bool = False
    of_hosts: bool | None = None


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


def in_debugger(group, rows, ranks):
    """What is shown after some lines, of which the last ends the method."""
    if ranks[0] not in group.sources("DP_PROTO"):
        raise Invalid("its result is not collected")
    n = sum(ranks, len(ranks)) % 4
    return ([f"stage is {n}"] if n < 3 else []), ["NoneType"] * len(group.sources("DP_PROTO"))


def seen_from_outside(group, rows, ranks):
    shown = f"crowd (tasks: {len(ranks) + 1})"
    return [shown if rank in ranks else "idle" for rank in range(group.size)]


def last_rows_thrice(group, rows, ranks):
    some = [(39 - i * (1 + len(ranks))) * 2000 for i in reversed(range(8))]
    return [[number + 1 for number in some], some, some]


def after_its_time(group, rows, ranks):
    raise Expected("CallTimeout", ranks, says="nobody has seen why")


def tidied(group, rows, ranks):
    group.renew(ranks[:1])
    return [0] * group.size


def put_again(group, rows, ranks):
    again = copy.deepcopy(rows)
    return [group.call("count", [rows]), same(group, rows, ranks), same(group, bump(again), ranks)]


def restarted(group, rows, ranks):
    group.renew()
    return True


def bumped(group, rows, ranks):
    return group.call("bump_all", [rows])[0]


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
    found = group.map_not_one.map(rows, chunk=2, on_error="return").result()
    return found.numbers, [(list(one.numbers), type(one.error).__name__) for one in found.failed]
""",
        in_parts,
        is_trouble=True,
    ),
    "other_types": Scene(
        """
def other_types(group, rows, ranks):
    return group.map_unlike.map(rows, chunk=2).result()
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
        chunks, behind = group.map_same.map(made, chunk=1).future, group.same.options(timeout=20).submit(rows)
        return [behind.result(), chunks.result()]
""",
        lambda group, rows, ranks: [few(group, rows, ranks), few(group, rows, ranks)],
        is_heavy=True,
    ),
    "dropping": Scene(
        """
def dropping(group, rows, ranks):
    future = group.same.submit(np.zeros((8 * group.world_size, 9000)))
    for number in range(6):
        results = [future[:1].result() for _ in range(60)]
        interrupted(lambda: results.clear(), [number * 0.0001])
""",
        lambda group, rows, ranks: None,
        needs_processes=True,
    ),
    "long_chain": Scene(
        """
def long_chain(group, rows, ranks):
    rows = stuck = group.hang.submit(rows, ranks)
    for _ in range(24): rows = group.same.submit(group.map_same.map(rows, chunk=3).future[::-1])
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
    for i in range(7):  # some of which fill what each rank keeps for later rows
        made = [group.slow.submit(rows), group.map_slow.map(rows, chunk=2).future] * 2
        futures += [*made, *[one.shuffle(0) for one in made], *[group.same.submit(one) for one in made]]
        for one in futures[-12:]: one.release()
        for one in futures[-12:]: one.exception()
        held.append(settled(held[-1] if i > 2 else 10**9))
        if i > 2 and held[-1] <= held[-2]: return True
    return False
""",
        lambda group, rows, ranks: True,
        is_quiet=True,
        is_large=True,
    ),
    "given_up": Scene(
        """
def given_up(group, rows, ranks):
    for one in [group.same.submit(rows) for _ in range(9)]: one.exception()  # fills what is kept for later rows
    held = []
    for _ in range(9):
        calls = [group.hang.submit(rows, ranks), *[group.same.submit(rows) for _ in range(8)]]
        for one in reversed(calls): one.cancel()
        for one in calls: one.exception()
        group.count(rows)
        held.append(settled(held[-1] + 5 if held else 10**9))
        if len(held) > 2 and held[-1] <= held[-2] + 5: return True
    return False
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
    wrong = []
    for dtype in ("bool", "uint8", "int16", "uint64", "float16"):
        costs = (np.arange(2 + 3 * group.world_size + len(ranks)) * 7 % 5).astype(dtype)
        same = group.costs({"a": costs}) == group.costs({"a": costs.astype(float)})
        wrong += [] if same and show(group.evened({"a": costs})) == show({"a": costs}) else [dtype]
    return wrong
""",
        lambda group, rows, ranks: [],
    ),
    "ask_many": Scene(
        """
def ask_many(group, rows, ranks):
    async def main():
        tasks = [asyncio.ensure_future(awaited(group.ask(rows, 0.003 * (n % 3)))) for n in range(20)]
        await asyncio.sleep(0.002)
        for task in tasks[::7]: task.cancel()
        alone = group.everyone.submit(0)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await alone
        return [one for one in found if not isinstance(one, asyncio.CancelledError)]
    first, *others = asyncio.run(main())
    return first if all(show(other) == show(first) for other in others) else others
""",
        bumped,
        needs_values=True,
    ),
    "ask_from_threads": Scene(
        """
def ask_from_threads(group, rows, ranks):
    def ask(n):
        chosen = group.ask.options(key=n % 3, spill=n % 2)
        futures = [chosen(rows) for _ in range(6)]
        futures[0].cancel()
        return [future.result() for future in futures[1:]]
    with concurrent.futures.ThreadPoolExecutor(4) as pool: found = list(pool.map(ask, range(8)))
    first = found[0][0]
    return first if all(show(one) == show(first) for some in found for one in some) else found
""",
        bumped,
        needs_values=True,
    ),
    "ask_from_workers": Scene(
        """
def ask_from_workers(group, rows, ranks):
    class Asker(bm.Worker):
        @bm.register(bm.Dispatch.ONE_TO_ALL)
        async def many(self, given, rows, n_cancelled):
            asyncio = __import__("asyncio")
            async def ask(n): return await given.ask(rows, 0.003 * (n % 3))
            tasks = [asyncio.ensure_future(ask(n)) for n in range(10)]
            await asyncio.sleep(0.002)
            for task in tasks[:n_cancelled]: task.cancel()
            alone = given.everyone.submit(0)
            found = await asyncio.gather(*tasks, return_exceptions=True)
            await alone
            return [one for one in found if not isinstance(one, asyncio.CancelledError)]
    with bm.ResourcePool([2]) as pool:
        asker = bm.WorkerGroup(pool, Asker)
        with concurrent.futures.ThreadPoolExecutor(1) as beside:
            own = beside.submit(lambda: [group.ask(rows).result() for _ in range(5)])
            found = [*asker.many(group, rows, len(ranks))[0], *asker.many(group, rows, 0)[1], *own.result()]
    first, *others = found
    return first if all(show(other) == show(first) for other in others) else others
""",
        bumped,
        is_heavy=True,
        needs_values=True,
        of_hosts=False,
    ),
    "ask_for_items": Scene(
        """
def ask_for_items(group, rows, ranks):
    async def read(most):
        found = []
        async for item in group.ask_items.options(maxsize=1 + most % 3).stream(rows, 5):
            found.append(show(item))
            if len(found) == most: break
        return found
    async def main(): return await asyncio.gather(*[read(most) for most in range(1, 12)])
    found = asyncio.run(main()) + [[show(item) for item in group.ask_items.stream(rows, n)] for n in (0, len(ranks))]
    return [len(some) for some in found], sorted({item for some in found for item in some})
""",
        lambda group, rows, ranks: (
            [1, 2, 3, 4, *[5] * 7, 0, len(ranks)],
            [show(group.call("bump_all", [rows])[0])],
        ),
        needs_values=True,
    ),
    "ask_again": Scene(
        """
def ask_again(group, rows, ranks):
    again = group.ask_safely.options(retries=2)
    try:
        n, found = asyncio.run(as_one_ends(group, len(ranks), again, rows, 16))
        answers = [show(one) for one in found if not isinstance(one, bm.WorkerDied)]
        return len(set(answers)) <= 1 and (n == 1 or len(answers) == len(found))
    finally: group.restart()
""",
        restarted,
        is_trouble=True,
        is_quiet=True,
        needs_values=True,
        needs_processes=True,
    ),
    "ask_versions": Scene(
        """
def ask_versions(group, rows, ranks):
    async def main():
        n = len(group.ask_rank.all().result())
        await asyncio.gather(*[group.ask_version.options(replica=k)(version=0) for k in range(n)])
        newer = [asyncio.ensure_future(awaited(group.ask_version.options(min_version=1)())) for _ in range(6)]
        others = await asyncio.gather(*[awaited(group.ask(rows)) for _ in range(3)])
        was_early = any([one.done() for one in newer])
        chosen = await group.ask_version.options(replica=len(ranks) % n)(version=1)
        return was_early, {await one for one in newer} == {chosen}, len(set(map(show, others)))
    return asyncio.run(main())
""",
        lambda group, rows, ranks: (False, True, 1),
        needs_values=True,
    ),
    "ask_the_dead": Scene(
        """
def ask_the_dead(group, rows, ranks):
    try:
        _, found = asyncio.run(as_one_ends(group, len(ranks), group.ask, rows, 24))
        return len({show(one) for one in found if not isinstance(one, bm.WorkerDied)}) <= 1
    finally: group.restart()
""",
        restarted,
        is_trouble=True,
        is_quiet=True,
        needs_values=True,
        needs_processes=True,
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
    "closed_loop": Scene(
        """
def closed_loop(group, rows, ranks):
    stuck = group.hang.submit(rows, ranks)
    with contextlib.suppress(TimeoutError): asyncio.run(asyncio.wait_for(awaited(stuck), 0.001))
    return type(stuck.exception()).__name__
""",
        lambda group, rows, ranks: "CallCancelled",
        needs_processes=True,
    ),
    "scarce": Scene(
        """
def scarce(group, rows, ranks):
    big, held = np.ones((12, 2 << 20), "uint8"), []
    kept = [group.same.submit(big), group.same.submit(big)[1:]]
    for one in kept: one.exception()
    what = resource.RLIMIT_AS if len(ranks) % 2 else resource.RLIMIT_NOFILE
    with open("/proc/self/statm") as statm, open(os.devnull) as first:
        used = first.fileno() if what == resource.RLIMIT_NOFILE else (int(statm.read().split()[0]) << 12) + (2 << 20)
    before = resource.getrlimit(what)
    resource.setrlimit(what, (used, before[1]))
    try:
        for read in [lambda: group.same(rows), *[one.result for one in kept], *[lambda: group.same(big)] * 3]:
            with contextlib.suppress(bm.ResourceError): held.append(read())
    finally: resource.setrlimit(what, before)
    return [one.result().shape for one in kept], group.same(rows)
""",
        lambda group, rows, ranks: ([(12, 2 << 20), (11, 2 << 20)], same(group, rows, ranks)),
        is_quiet=True,
        needs_processes=True,
        of_hosts=False,
    ),
    "other_system": Scene(
        """
def other_system(group, rows, ranks):
    lines = ["import select, os; del select.epoll, os.memfd_create, os.eventfd, os.pidfd_open; import bandmaster as bm"]
    lines += ["class One(bm.Worker): same = bm.register('DP_PROTO')(lambda self, rows: rows)"]
    lines += ["for name in ('inprocess', 'local', 'ray'):", " try: pool = bm.ResourcePool([2], backend=name)"]
    lines += [" except bm.UsageError as error: print(*[one for one in ('Linux', 'inprocess') if one in str(error)])"]
    lines += [" else: print(bm.WorkerGroup(pool, One).same([1, 2, 3]))"]
    command = [sys.executable, "-c", "\\n".join(lines)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
""",
        lambda group, rows, ranks: ["[1, 2, 3]", "Linux inprocess", "Linux inprocess"],
        is_heavy=True,
    ),
    "watched": Scene(
        """
def watched(group, rows, ranks):
    pids, end = group.pid(), time.monotonic() + 10
    crowd, shown = group.crowd.submit(rows, ranks), []
    while sum("tasks" in one for one in shown) < len(ranks) and time.monotonic() < end:
        top = subprocess.run([sys.executable, "-m", "bandmaster", "top", "--once"], capture_output=True, text=True)
        found = [line.partition(f" {pid}  ")[2].lstrip() for pid in pids for line in top.stdout.splitlines()]
        shown = [one.partition("  ")[0] for one in found if one]
    crowd.cancel()
    crowd.exception()
    return shown
""",
        seen_from_outside,
        is_heavy=True,
        is_quiet=True,
        needs_processes=True,
        of_hosts=False,
    ),
    "debugged": Scene(
        """
def debugged(group, rows, ranks):
    stream, n = group.stops.options(timeout=0.05).stream(rows, ranks[:1]), sum(ranks, len(ranks)) % 4
    def take():
        found = []
        while True:
            try:
                for item in stream: found.append(type(item.exception()).__name__)
                return found
            except bm.CallTimeout as error:
                if "deadlines wait" in str(error): raise  # in a debugger
    command = [sys.executable, "-m", "bandmaster", "debug", f"{group.name}@{os.getpid()}", str(ranks[0])]
    said = ["s" if len(ranks) % 2 and n < 3 else "n"] * (2 * n + (sys.version_info >= (3, 13)))
    said += ["print('stage is', stage)", "c", ""]
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        taken, end, shown = threads.submit(take), time.monotonic() + 15, ""
        while "goes on" not in shown and time.monotonic() < end:
            shown = subprocess.run(command, input="\\n".join(said), capture_output=True, text=True).stdout
        return [line.split(") ")[-1] for line in shown.splitlines() if "stage is" in line], taken.result(timeout=9)
""",
        in_debugger,
        is_heavy=True,
        is_quiet=True,
        needs_processes=True,
        of_hosts=False,
    ),
    "fetched": Scene(
        """
def fetched(group, rows, ranks):
    kept = group.same.submit(np.arange(40 * 2000).reshape(40, 2000))
    some = kept[[39 - i * (1 + len(ranks)) for i in reversed(range(8))]]
    return [made[:, 0].tolist() for made in (group.bumped(some), group.same(some), group.second(some, some))]
""",
        last_rows_thrice,
    ),
    "squeezed": Scene(
        """
def squeezed(group, rows, ranks):
    parts, before = [group.same.submit(np.full((6, 9000), number)) for number in range(60)], group.sockets()
    for one in parts: one.exception()
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        group.squeeze(0)
        refused = [threads.submit(one.result) for one in parts[:6]]
        for _ in range(3): group.pid()  # the agents have seen who connects
        group.squeeze(None)
        for one in refused: one.exception()
        came = [threads.submit(one.result) for one in parts[6:]]
        whole = group.same(bm.concat([one[:2] for one in parts[6:]]))
        is_few = int(max(np.subtract(group.sockets(), before))) <= 13  # four of each other host
        return whole[:, 0].tolist(), [int(one.result()[0, 0]) for one in came], is_few
""",
        lambda group, rows, ranks: ([i // 2 for i in range(12, 120)], list(range(6, 60)), True),
        is_quiet=True,
        of_hosts=True,
        needs_processes=True,
    ),
    "paused": Scene(
        """
def paused(group, rows, ranks):
    kept = group.same.submit(np.ones((6, 20000)))
    kept.exception()
    pause = group.pause.submit(5)
    with contextlib.suppress(bm.CallTimeout): pause.result(timeout=0.3)
    end = time.monotonic() + 3
    try:
        kept.result(timeout=0.2)
        is_soon = time.monotonic() < end
    except bm.CallTimeout: is_soon = True
    pause.exception()
    return is_soon, kept.result().shape
""",
        lambda group, rows, ranks: (True, (6, 20000)),
        is_quiet=True,
        of_hosts=True,
        needs_processes=True,
    ),
}
