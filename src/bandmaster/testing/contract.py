"""`BackendContract`: a pytest suite with small examples of the laws that every backend must keep.

::

    class TestMine(BackendContract):
        backend = "mine"              # the name given to `register_backend`
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from bandmaster.errors import (
    ArgumentError,
    CallCancelled,
    CallTimeout,
    ClosedError,
    CollectError,
    ConstructorError,
    RemoteError,
    WorkerDied,
)
from bandmaster.groups.group import WorkerGroup
from bandmaster.plan.mesh import Mesh
from bandmaster.pool import ResourcePool
from bandmaster.testing.faults import BadResult, FailToUnpickle, Kill, Raise
from bandmaster.testing.faulty import with_faults
from bandmaster.testing.leaks import no_leaks
from bandmaster.testing.workers import Asked, Behaves, Counted, Echo, FailsToStart, Keeps, Notes, Restarts
from bandmaster.worker import Worker

SMALL, LARGE = 4, 200_000  # array lengths: one that may travel inside a message, and one that is too large for it
MEDIUM = 2_000  # one that may travel inside a message, but not inside its pickle stream
MESHES = [Mesh(dp=1), Mesh(dp=3), Mesh(pp=1, dp=2, tp=2), Mesh(pp=2, dp=2, tp=1)]
ROWS = [0, 1, 2, 3, 10]


class BackendContract:
    """The tests that every backend must pass. Subclass it under a name that pytest collects, and set ``backend``.

    Attributes:
        backend: Name of the backend under test.
        pool_options: Further keyword arguments of every `ResourcePool`.
        has_processes: Whether workers have processes of their own, so that one can die or hang while others work.
        can_replace: Whether the backend can replace one rank.
        timeout: Seconds that each call, and the constructors of each group, may take.
    """

    backend: ClassVar[str]
    pool_options: ClassVar[Mapping[str, Any]] = {}
    has_processes: ClassVar[bool] = True
    can_replace: ClassVar[bool] = True
    timeout: ClassVar[float] = 60.0

    def nodes(self, size: int) -> list[int]:
        """The slots on each node of a pool of ``size`` slots: by default all on one node."""
        return [size]

    @contextlib.contextmanager
    def group(self, where: int | Mesh, cls: type[Worker], *args: Any, **kwargs: Any) -> Iterator[WorkerGroup]:
        """Create a group on a pool of its own; both are closed at the end of the block."""
        mesh = Mesh(dp=where) if isinstance(where, int) else where
        with ResourcePool(self.nodes(mesh.size), backend=self.backend, **self.pool_options) as pool:
            group = WorkerGroup(pool, cls, *args, mesh=mesh, start_timeout=self.timeout, **kwargs)
            group.set_default_options(timeout=self.timeout)
            yield group

    # --- laws 1 and 6: rows come back complete and in order ---

    @pytest.mark.parametrize("mesh", MESHES, ids=repr)
    def test_an_identity_method_gives_back_what_it_was_given(self, mesh: Mesh) -> None:
        """An identity method returns arrays, lists and dicts unchanged, for any number of rows."""
        with self.group(mesh, Echo) as group:
            for rows in ROWS:
                array = np.arange(rows * 3, dtype="f4").reshape(rows, 3)
                for method in [group.over_dp, group.over_3d] if "pp" in mesh.axis_names else [group.over_dp]:
                    back = method({"array": array, "names": [f"row {i}" for i in range(rows)]})
                    assert back["array"].dtype == array.dtype
                    assert back["array"].shape == array.shape
                    assert (back["array"] == array).all()
                    assert back["names"] == [f"row {i}" for i in range(rows)]
            large = np.arange(LARGE)
            assert (group.over_dp(large) == large).all()

    def test_rows_come_back_in_the_order_they_went_out(self) -> None:
        """Rows come back in the order in which they were sent, and are split in rank order."""
        with self.group(3, Echo) as group:
            assert group.who_has(list(range(7))) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]

    # --- law 2: values are isolated ---

    def test_what_a_worker_receives_is_its_own(self) -> None:
        """A worker may write to its arguments; the caller, other workers and later calls do not see it."""
        with self.group(2, Keeps) as group:
            for n in (SMALL, LARGE):
                array, items = np.ones(n), ["the caller's"]
                for _ in range(3):
                    assert group.overwrite(array, items) == [n, n]
                group.overwrite_rows(array)
                assert (array == 1).all()
                assert items == ["the caller's"]

    def test_what_the_caller_receives_is_its_own(self) -> None:
        """The caller may write to a result, and to the arguments of an earlier call; the workers do not see it."""
        with self.group(4, Keeps) as group:  # of which several may be on one host
            for n in (SMALL, MEDIUM, LARGE):
                given = np.ones(n)
                group.keep(given)
                given[:] = 2
                first, *others = group.show()
                first[:] = 3
                assert all((other == 1).all() for other in others)
                assert all((kept == 1).all() for kept in group.show())

    def test_rows_stay_and_go_from_rank_to_rank(self) -> None:
        """The future of rows is an argument; each rank gets its own part, and may write to it."""
        with self.group(2, Keeps) as group, self.group(3, Echo) as other:
            for n in (SMALL, LARGE):
                rows = other.over_dp.submit({"array": np.arange(n), "names": [str(i) for i in range(n)]})
                assert len(rows) == n
                back = other.over_dp(rows.shuffle(seed=0)[:3])
                assert back["array"].tolist() == np.random.default_rng(0).permutation(n)[:3].tolist()
                assert back["names"] == [str(i) for i in back["array"]]
                ones = group.put(np.ones(n))
                for _ in range(2):
                    assert group.overwrite(ones, []) == [n, n]
                assert (ones.result() == 1).all()

    def test_a_call_keeps_the_values_it_was_sent_with(self) -> None:
        """The caller may change an argument as soon as `submit` has returned; the call uses the earlier value."""
        with self.group(2, Behaves) as group:
            array = np.ones(LARGE)
            futures = [group.sum_of.submit(array)]
            array[:] = 2
            futures.append(group.sum_of.submit(array))
            assert [future.result() for future in futures] == [[LARGE] * 2, [2 * LARGE] * 2]

    # --- laws 3 and 4: each value is encoded once, and only if a reader needs it ---

    def test_a_payload_is_encoded_once_however_many_ranks_read_it(self) -> None:
        """A broadcast value, one value given for each rank, and each row are pickled once."""
        with self.group(Mesh(dp=2, tp=2), Behaves) as group:
            calls: list[tuple[Callable[[], list[bool]], int, int]] = [
                (lambda: group.knows(Counted()), 1, 4),
                (lambda: group.knows_its_own([Counted()] * 4), 1, 4),
                (lambda: group.execute_all_sync("knows", Counted()), 1, 4),
                (lambda: group.know([Counted() for _ in range(5)], table=Counted()), 6, 5),
            ]
            for call, n_values, n_results in calls:
                Counted.n_pickled = 0
                assert call() == [True] * n_results
                assert Counted.n_pickled == n_values

    def test_a_rank_that_is_not_collected_does_not_encode_its_value(self) -> None:
        """A rank whose value is not collected may return a value that cannot be pickled."""
        with self.group(Mesh(dp=2, tp=2), Behaves) as group:
            assert group.only_first_of_tp() == [0, 2]

    # --- law 5: order ---

    def test_calls_run_in_the_order_of_submission(self) -> None:
        """Small, large, sync and async calls, on all ranks and on one, run in submission order."""
        with self.group(2, Notes) as group:
            futures = []
            for entry in range(0, 30, 5):
                futures.append(group.note.submit(entry))
                futures.append(group.note_with.submit(entry + 1, np.ones(LARGE)))
                futures.append(group.note_later.submit(entry + 2))
                futures.append(group.note_on_zero.submit(entry + 3))
                group.execute_all_async("note", entry + 4)
            assert group.read() == [list(range(30)), [entry for entry in range(30) if entry % 5 != 3]]
            assert all(future.done() for future in futures)

    # --- laws 7 and 8: mistakes are errors at the call, failing constructors at the construction ---

    def test_mistakes_are_errors_before_anything_is_sent(self) -> None:
        """A call with wrong arguments raises `ArgumentError` and reaches no rank."""
        with self.group(2, Notes) as group:
            with pytest.raises(ArgumentError, match=r"Notes\.note\(\) missing.*'entry'; .*Notes\.note\(entry"):
                group.note()
            with pytest.raises(ArgumentError, match="pickled"):
                group.note(n for n in range(3))
            assert group.read() == [[], []]

    def test_a_constructor_that_fails_names_rank_host_and_cause(self) -> None:
        """A failing constructor ends the other ranks' constructors, and the slots can be used again."""
        with ResourcePool([2], backend=self.backend, **self.pool_options) as pool:
            start = time.monotonic()
            with pytest.raises(ConstructorError, match=r"rank 1.*no such weights") as caught:
                WorkerGroup(pool, FailsToStart, 1, self.has_processes, start_timeout=self.timeout)
            assert time.monotonic() - start < self.timeout
            assert caught.value.rank == 1
            assert isinstance(caught.value.__cause__, KeyError)
            host = caught.value.failures[1].host
            assert host and re.search(rf"rank 1 \(dp=1, host {re.escape(host)}", str(caught.value))
            if not self.has_processes:
                assert host == socket.gethostname()
            assert WorkerGroup(pool, Behaves).echo(1) == [1, 1]

    # --- law 9: every wait ends ---

    def test_a_rank_that_fails_is_named_and_the_group_stays_usable(self) -> None:
        """The error names rank 1 and no other, and later calls work."""
        faults = [Raise(1, 2, error=ValueError("boom")), BadResult(1, 4), FailToUnpickle(1, 6)]
        with self.group(3, with_faults(Behaves, *faults)) as group:
            for error in (RemoteError, CollectError, CollectError):
                assert group.echo(1) == [1, 1, 1]
                with pytest.raises(error, match=r"Behaves.echo failed on rank 1 \(dp=1") as caught:
                    group.echo(2)
                assert list(caught.value.failures) == [1]
            assert group.echo(3) == [3, 3, 3]

    def test_a_rank_that_dies_is_named(self) -> None:
        """The pending call and every later one raise `WorkerDied`, which names the rank."""
        self._needs_processes()
        with self.group(3, with_faults(Behaves, Kill(1, 2))) as group:
            assert group.echo(1) == [1, 1, 1]
            for _ in range(2):
                with pytest.raises(WorkerDied, match=r"Behaves.echo lost its process on rank 1 \(dp=1"):
                    group.echo(2)
            assert not group.healthy

    def test_a_rank_that_fails_frees_the_others(self) -> None:
        """If one rank raises, the others are interrupted, and the group stays usable."""
        self._needs_processes()
        with self.group(3, Behaves) as group:
            with pytest.raises(RemoteError, match=r"on rank 1 ") as caught:
                group.wait_on([0, 2], raising=[1])
            assert isinstance(caught.value.__cause__, ValueError)
            assert group.echo(1) == [1, 1, 1]

    def test_a_rank_that_fails_does_not_meet_the_others_in_the_next_call(self) -> None:
        """A rank that has failed a call begins the next call only after all ranks have ended the first.

        The clocks of the hosts have to agree within half a second.
        """
        self._needs_processes()
        with self.group(3, Behaves) as group:
            failed, following = group.wait_on.submit([0], raising=[1]), group.times.submit()
            (stopped, _), (_, begun), _ = following.result()
            assert begun > stopped
            assert isinstance(failed.exception(), RemoteError)

    def test_a_timeout_shows_where_the_ranks_are_and_the_call_can_be_given_up(self) -> None:
        """`CallTimeout` has the stacks of the missing ranks; after a cancel, the group stays usable."""
        self._needs_processes()
        with self.group(3, Behaves) as group:
            with pytest.raises(CallTimeout) as caught:
                group.wait_on.options(timeout=0.5)([0, 2], raising=[])
            assert caught.value.missing == (0, 2)
            assert set(caught.value.stacks) == {0, 2}
            assert all("in wait_on" in stack for stack in caught.value.stacks.values())
            assert caught.value.future.cancel()
            with pytest.raises(CallCancelled):
                caught.value.future.result()
            assert group.echo(1) == [1, 1, 1]

    # --- closing, restarting, replacing ---

    # --- requests ---

    def test_requests_run_beside_each_other_on_the_least_busy_replicas(self) -> None:
        """Each request gets its own value back, small or large, and goes to the replica with the fewest of them."""
        with self.group(2, Asked) as group:
            for n in (SMALL, LARGE):
                given = [np.full(n, number) for number in range(8)]
                futures = [group.meet.options(replica=number % 2)(4, array) for number, array in enumerate(given)]
                for array in given:
                    array += 100
                found = [(rank, int(array[0])) for rank, array in (future.result() for future in futures)]
                assert found == [(number % 2, number) for number in range(8)]
                assert group.count() == [(4, 0), (4, 0)]
            held = [group.hold() for _ in range(4)]
            group.open.all().result()
            assert [future.result() for future in held] == [0, 1, 0, 1]

    def test_requests_read_the_rows_that_they_take_and_leave_theirs(self) -> None:
        """A map over rows that lie on the ranks, small or large, leaves its own there, which other requests take."""
        with self.group(2, Asked) as group:
            for n in (2, LARGE):
                rows = group.put({"id": np.arange(6), "wide": np.ones((6, n))})
                for _ in range(2):
                    rows = group.add.map(rows[::-1], chunk=2).future
                assert rows.result()["wide"].tolist() == np.full((6, n), 3.0).tolist()
                assert group.add(rows[2:4]).result()["id"].tolist() == [2, 3]

    def test_a_call_begins_when_the_requests_before_it_have_ended(self) -> None:
        """A call of all ranks runs alone: after the requests that were sent before, and before those behind it."""
        self._needs_processes()
        with self.group(2, Asked) as group:
            held = group.hold.all()
            group.open.all().result()
            first = [group.meet(1, 0) for _ in range(4)]
            counted = group.count.submit()
            second = [group.meet(1, 1) for _ in range(2)]
            assert counted.result() == [(2, 0), (2, 0)]
            assert held.result() == [0, 1]
            assert [future.result()[1] for future in (*first, *second)] == [0] * 4 + [1] * 2
            assert group.count() == [(1, 0), (1, 0)]

    def test_a_request_can_be_cancelled(self) -> None:
        """Its coroutine is cancelled, and the requests beside it go on."""
        with self.group(2, Asked) as group:
            first, second = group.hold.options(replica=0)(), group.hold.options(replica=0)()
            assert first.cancel()
            with pytest.raises(CallCancelled):
                first.result()
            group.open.all().result()
            assert second.result() == 0
            assert group.count()[0][1] <= 1  # none if it had not begun

    def test_items_of_a_request_are_read_until_its_stream_is_closed(self) -> None:
        """They are those of one replica, in order; a call waits for the streams, and does not hold up their items."""
        with self.group(2, Asked) as group:
            for n in (SMALL, LARGE):
                repeat = group.repeat.options(replica=1, maxsize=3)
                with repeat.stream(np.full(n, 5), 10**6) as endless, repeat.stream(np.full(n, 7), 8) as stream:
                    counted = [group.count.submit()] if self.has_processes else []
                    assert [int(array[-1]) for array in stream] == [7] * 8
                    assert [int(next(endless)[0]) for _ in range(8)] == [5] * 8
                assert [*counted, group.count.submit()][0].result() == [(0, 0), (0, 2)]

    def test_what_workers_report_comes_with_their_replies(self) -> None:
        """Requests that need a version go to the replicas that have it, and wait as long as there are none."""
        with self.group(2, Asked) as group:
            with pytest.raises(CallTimeout, match="no replica has version 5 of its weights"):
                group.meet.options(min_version=5, timeout=0.05)(1, 0)
            group.upgrade.options(replica=1)(5).result()
            assert {group.meet.options(min_version=5)(1, 0).result()[0] for _ in range(4)} == {1}
            group.upgrade_all(6)
            for replica in (0, 1):
                assert group.meet.options(min_version=6, replica=replica)(1, 0).result() == (replica, 0)

    def test_a_replica_that_dies_fails_its_requests_alone(self) -> None:
        """They raise `WorkerDied`, which names the rank; requests to other replicas go on, and later ones go there."""
        self._needs_processes()
        with self.group(3, Asked) as group:
            held = [group.hold.options(replica=replica)() for replica in range(3)]
            for future in (group.end.options(replica=1)(), held[1]):
                with pytest.raises(WorkerDied, match=r"on rank 1 \(dp=1"):
                    future.result()
            assert {group.meet(1, 0).result()[0] for _ in range(6)} <= {0, 2}
            for replica in (0, 2):
                group.open.options(replica=replica)().result()
            assert [held[replica].result() for replica in (0, 2)] == [0, 2]

    def test_closing_leaves_nothing_and_can_be_done_twice(self) -> None:
        """Closing, even with a busy worker, releases every resource; a second close does nothing."""
        with self.group(1, Behaves):
            pass  # the backend creates its long-lived resources, such as the zygote, before the check
        with no_leaks(), ResourcePool([2], backend=self.backend, **self.pool_options) as pool:
            groups = [WorkerGroup(pool, Behaves), WorkerGroup(pool, Behaves)]
            groups[0].sum_of(np.ones(LARGE))
            if self.has_processes:
                groups[1].wait_on.submit([0], raising=[])
            for group in groups:
                group.close()
                group.close()
                with pytest.raises(ClosedError):
                    group.echo(1)
                assert not group.healthy
            assert WorkerGroup(pool, Behaves).echo(1) == [1, 1]

    def test_workers_have_processes_or_have_not(self) -> None:
        """Workers have distinct processes if and only if ``has_processes`` is set."""
        with self.group(2, Behaves) as group:
            assert len(set(group.process())) == (2 if self.has_processes else 1)

    def test_a_group_can_be_restarted(self) -> None:
        """A restart calls the constructors with their original arguments, and ``on_restart`` with the state."""
        with self.group(2, Restarts, start=10) as group:
            assert group.add(5) == [15, 15]
            group.restart(state="state")
            assert group.add(1) == [11, 11]
            assert group.heard() == [["state"]] * 2
            assert group.healthy

    def test_a_rank_can_be_replaced(self) -> None:
        """A replacement keeps the state of the other ranks, and calls ``on_replace`` on every rank."""
        if not self.can_replace:
            pytest.skip("can_replace is False")
        with self.group(2, Restarts, start=10) as group:
            assert group.add(5) == [15, 15]
            group.replace(1, state="state")
            assert group.add(1) == [16, 11]
            assert group.heard() == [[(1, "state")]] * 2

    def _needs_processes(self) -> None:
        if not self.has_processes:
            pytest.skip("has_processes is False")
