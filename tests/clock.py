"""A clock for limits of what may take how long: it stands still while the machine is too busy to tell."""

import contextlib
import time
from pathlib import Path


def idle_time():
    """Seconds since some moment, without those in which a process on this machine waited for a processor.

    On an idle machine it is `time.monotonic`; on a busy one, what passes says more of the machine than of the library.

    Source: PSI, https://docs.kernel.org/accounting/psi.html; a kernel without it counts all seconds.
    """
    stalled_us = 0
    with contextlib.suppress(OSError):
        first, *_ = Path("/proc/pressure/cpu").read_text().splitlines()
        stalled_us = int(first.rpartition("total=")[2])
    return time.monotonic() - stalled_us / 1e6
