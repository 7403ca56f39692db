"""Runs what mostly waits, such as programs in processes of their own, side by side: so it takes less time."""

from concurrent.futures import ThreadPoolExecutor


def run_side_by_side(check, cases, n_at_once):
    """Call ``check(case)`` for all cases; raises an AssertionError that names every case in which it raised."""
    with ThreadPoolExecutor(n_at_once) as threads:
        running = {case: threads.submit(check, case) for case in cases}
    failed = {case: future.exception() for case, future in running.items() if future.exception() is not None}
    assert not failed, "\n\n".join(f"in {case}: {error}" for case, error in failed.items())
