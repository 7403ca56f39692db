"""The mutants: file, what stands there, what stands there instead, and the sentence."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A change to one file of the library.

    Attributes:
        name: Its name.
        file: The file, below ``src/bandmaster``.
        old: What stands there, once.
        new: What stands there instead.
        says: What it does, in one sentence.
    """

    name: str
    file: str
    old: str
    new: str
    says: str


MUTANTS = [
    Mutant(
        "met-as-sent",
        "calls/call.py",
        "        if self.is_watched:  # another thread met it as it was sent: before its tickets were there\n"
        "            self.read_in_background()\n",
        "",
        "A call that another thread meets as it is sent is not told of (mended in 5718b1e).",
    ),
    Mutant(
        "missed",
        "calls/call.py",
        "        if self.is_watched and (self._was_missed or (self.has_ended and self.done is None)):\n",
        "        if False:\n",
        "The reader does not tell the thread of callbacks that it has missed the lock.",
    ),
    Mutant(
        "early-resume",
        "calls/call.py",
        "            if fenced and not self._work.has_unanswered(self.failures):\n",
        "            if fenced:\n",
        "A failed rank goes on though a call that was made as one with its call runs on.",
    ),
    Mutant(
        "resume-at-failure",
        "calls/call.py",
        "                self.failures.fenced[rank] = ticket\n",
        "                self.workers.resume({rank: ticket})\n",
        "A failed rank goes on at once, though others still run the call.",
    ),
    Mutant(
        "queued-not-cancelled",
        "wire/lanes.py",
        "                    self._queues[rank].remove(outgoing)\n",
        "",
        "A call that is cancelled before it was sent is sent all the same.",
    ),
    Mutant(
        "no-wake-of-others",
        "wire/poller.py",
        "            if self._n_waiting:\n",
        "            if False:\n",
        "The thread that returns from the kernel does not wake those that wait for it.",
    ),
    Mutant(
        "no-wake-of-blocked",
        "wire/poller.py",
        "            if n_ready and self._blocked is not None:\n                self.wake()\n",
        "            pass\n",
        "A thread that has read what another is blocked for does not wake it.",
    ),
    Mutant(
        "no-wake-at-all",
        "wire/poller.py",
        "        if self._blocked is not None:\n            self.wake()\n\n    def wake(",
        "        pass\n\n    def wake(",
        "A reply that was made here, such as that of a dead rank, does not wake the blocked thread.",
    ),
    Mutant(
        "looks-without-pipe",
        "calls/progress.py",
        '                    os.write(self._waker, b"1")\n',
        "                    pass\n",
        "The thread of callbacks is not woken when there is something to look at.",
    ),
    Mutant(
        "ends-with-watches",
        "calls/progress.py",
        "                if is_idle and not watches:\n",
        "                if is_idle:\n",
        "The thread of callbacks ends though it has something to watch.",
    ),
    Mutant(
        "forgets-watch",
        "calls/progress.py",
        "                    with self.lock:\n                        self._watches[id(watch)] = watch\n",
        "                    pass\n",
        "A call that is not done yet is watched no longer.",
    ),
    Mutant(
        "swapped",
        "wire/client.py",
        "            ticket = self._open[rank].pop(number, None) or self._requests[rank].pop(number, None)\n",
        "            table = self._open[rank] or self._requests[rank]\n"
        "            ticket = table.pop(next(iter(table)), None) if table else None\n",
        "A reply goes to the first open call of its rank.",
    ),
    Mutant(
        "several-swapped",
        "wire/client.py",
        "            ticket = requests.get(number) if kind == _TIMES else requests.pop(number, None)\n",
        "            ticket = requests.pop(next(iter(requests)), None) if requests else None\n",
        "A reply to a request goes to the first open request of its rank.",
    ),
    Mutant(
        "dead-tickets",
        "wire/client.py",
        "                _, ticket = table.popitem()\n                self._finish(ticket, why)\n",
        "                _, ticket = table.popitem()\n",
        "The calls of a rank that dies are forgotten.",
    ),
    Mutant(
        "last-words",
        "wire/lanes.py",
        "            self._take(rank, 0)\n        self._note_death(rank)\n",
        "            break\n        self._note_death(rank)\n",
        "What a rank has replied before it died is lost if a message to it fails.",
    ),
    Mutant(
        "place-kept",
        "requests/router.py",
        "        for replica in request.replicas:\n            replica.remove(request)\n        self.wake()\n",
        "        for replica in request.replicas:\n            replica.remove(request)\n",
        "A request that has ended does not tell those that wait for its place.",
    ),
    Mutant(
        "woken-late",
        "requests/router.py",
        "        if not n_places:\n            return\n        kept",
        "        self._is_woken = False\n        if not n_places:\n            return\n        kept",
        "A place that becomes free as places are counted is missed.",
    ),
    Mutant(
        "one-too-many",
        "requests/request.py",
        "        return self.most - len(self.open)\n",
        "        return self.most + 1 - len(self.open)\n",
        "A replica gets one request more than the method allows.",
    ),
    Mutant(
        "never-escalates",
        "calls/escalation.py",
        "            if DONE < moment <= now:\n",
        "            if False:\n",
        "Ranks that go on with a failed call are never interrupted.",
    ),
    Mutant(
        "lease-kept",
        "wire/lane.py",
        "            (self._forked if self.reader.was_forked(number) else self._returned).append(number)\n",
        "            pass\n",
        "The end of leases is not told to the other end.",
    ),
    Mutant(
        "reused-early",
        "wire/segments.py",
        "        segment.readers[reader] = segment.readers.get(reader, 0) + 1\n",
        "        segment.readers[reader] = segment.readers.get(reader, 0)\n",
        "A segment is free when its writer has dropped it, though a reader has it.",
    ),
    Mutant(
        "callback-lost",
        "calls/result.py",
        "        self.tell()  # also if another thread has found it done meanwhile\n",
        "",
        "A callback that is added as another thread finds the call done is not called.",
    ),
    Mutant(
        "not-driven",
        "calls/call.py",
        "        earlier = self._work.ahead_of(self)\n        if not earlier:\n",
        "        earlier = []\n        if not earlier:\n",
        "A thread that waits for a call does not drive the failed calls before it.",
    ),
    Mutant(
        "unsent-forgotten",
        "wire/lanes.py",
        "        if queue and self._sender is None:\n",
        "        if False:\n",
        "No thread sends what a busy rank has not taken.",
    ),
    Mutant(
        "cancel-unsent",
        "requests/router.py",
        "            if request.is_cancelled:  # meanwhile\n",
        "            if False:\n",
        "A request that is cancelled as it is sent runs on.",
    ),
    Mutant(
        "fence-of-one-thread",
        "calls/call.py",
        "                moments.append(time.monotonic() + FENCE_LOOK_S)\n",
        "                pass\n",
        "A thread that waits behind a failed call does not look again when that has ended.",
    ),
]
