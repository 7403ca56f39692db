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


TESTS = {  # what tests the room of a mutant, the quickest first; "on hosts:" has the ranks on other hosts
    "calls": ("test_cancel", "test_waiting", "test_timeouts", "test_handles", "test_group", "faults/test_calls"),
    "wire": ("test_lane", "test_wire", "test_cancel", "test_wire_faults", "test_requests", "faults/test_calls"),
    "flow": ("test_map", "test_streams"),
    "backends": ("test_request_streams", "faults/test_interrupts"),
    "answering": ("test_request_streams", "test_requests"),
    "requests": ("test_map", "test_requests", "test_request_streams", "test_cancel", "test_callers"),
    "callers": ("test_callers", "test_agents"),
    "hosts": ("test_agents", "test_hosts", "on hosts:test_contract", "on hosts:test_handles", "on hosts:test_requests"),
    "watching": ("test_stalls", "test_stall_shapes", "test_stall_policies"),
    "rl": ("test_shared_weights", "test_engine_weights", "test_weights"),
}

MUTANTS = [
    Mutant(
        "met-as-sent",
        "calls/call.py",
        "            if self.is_watched:  # perhaps since before its tickets were there\n"
        "                self.read_in_background()\n",
        "            pass\n",
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
        "self._requests[rank].pop(number, None)",
        "self._requests[rank].pop(next(iter(self._requests[rank]), 0), None)",
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
        "                self._read_to_the_end(rank)\n                self.note_death(rank)\n",
        "                self.note_death(rank)\n",
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
        "        n_kept, refused = 0",
        "        self._is_woken = False\n        n_kept, refused = 0",
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
        "failed-unlocked",
        "calls/submission.py",
        "                call.fail(error)  # here, as another thread that finds it without tickets takes it for done\n",
        "",
        "A call that Ctrl-C breaks as it is sent can be taken for done before it has failed.",
    ),
    Mutant(
        "cancel-unheard",
        "calls/call.py",
        "            if tickets := dict(self.tickets):  # none if it was never sent\n",
        "            if tickets := {}:\n",
        "A call that is cancelled does not interrupt its ranks.",
    ),
    Mutant(
        "order-of-sending",
        "calls/open_work.py",
        "        for other in sorted(self._sent.copy(), key=_place):",
        "        for other in self._sent.copy():",
        "A thread takes the order in which calls were noted for that in which ranks get them.",
    ),
    Mutant(
        "not-advanced",
        "calls/open_work.py",
        "            parents = () if one.is_sent_in_background else one.parents\n",
        "            parents = ()\n",
        "A call that waits for rows is sent by no thread unless one waits for it.",
    ),
    Mutant(
        "given-up-not",
        "calls/open_work.py",
        "        for call in gone:  # not under the lock, as it may run callbacks\n            call.tell()\n",
        "",
        "The callbacks of a call that fails as it is sent are not called.",
    ),
    Mutant(
        "never-stops-waiting",
        "calls/escalation.py",
        "(Step.STOP_WAITING, now + wait_s)",
        "(Step.STOP_WAITING, math.inf)",
        "A call waits for all ranks though one has died.",
    ),
    Mutant(
        "grace-from-failure",
        "calls/escalation.py",
        "                if step is Step.INTERRUPT:\n",
        "                if False:\n",
        "The grace of ranks that were interrupted never begins.",
    ),
    Mutant(
        "death-unheard",
        "wire/lanes.py",
        "            if not self.is_stopped:\n                self.note_death(rank)\n            return False\n",
        "            return False\n",
        "The end of a lane does not tell of a death.",
    ),
    Mutant(
        "room-unasked",
        "wire/lanes.py",
        "                self._poller.ask_for_room(lane.fileno(), True)\n                break\n",
        "                break\n",
        "Nobody asks when a full lane has room again.",
    ),
    Mutant(
        "cancel-request-unsent",
        "wire/lanes.py",
        "                    self._send_control(rank, control_message(MessageKind.CANCEL, (ticket.number,)))\n",
        "",
        "The cancellation of a request is not sent.",
    ),
    Mutant(
        "claims-kept",
        "wire/lane.py",
        "            self._received.clear()\n            self._claims = {}\n",
        "            self._received.clear()\n",
        "The claims of a message stay until another one names the same segments.",
    ),
    Mutant(
        "segment-with-reader",
        "wire/segments.py",
        "                elif not segment.readers:\n",
        "                else:\n",
        "A segment is free when one of its readers has ended its lease.",
    ),
    Mutant(
        "two-leases-one",
        "wire/segments.py",
        "                left = segment.readers.pop(reader, 1) - 1\n",
        "                left = segment.readers.pop(reader, 1) * 0\n",
        "The first lease that a reader ends ends all that it has of a segment.",
    ),
    Mutant(
        "failed-not-seen",
        "wire/client.py",
        "            if n_dead != len(self.deaths) or n_failed != self._n_failed:\n                break\n",
        "",
        "A thread that waits for several ranks does not hear of the first failure or death.",
    ),
    Mutant(
        "must-be-left",
        "wire/client.py",
        "            if self.lock.must_be_left:\n                return None\n",
        "",
        "A thread that waits for replies keeps Ctrl-C back.",
    ),
    Mutant(
        "not-acknowledged",
        "wire/poller.py",
        "                    with contextlib.suppress(OSError):  # nothing was written, or it was closed\n"
        "                        os.eventfd_read(fd)\n",
        "                    pass\n",
        "The thread that was woken does not acknowledge it, and spins.",
    ),
    Mutant(
        "two-routers",
        "requests/router.py",
        "            router = routers.get(key)\n"
        "            if isinstance(router, Router) and router.workers is workers:\n"
        "                return router\n"
        "            router = cls",
        "            router = cls",
        "The first requests of a method that two threads make have a router each.",
    ),
    Mutant(
        "wake-unnoted",
        "requests/router.py",
        "        self._is_woken = True  # first: a thread that looks may have taken all that wait\n",
        "",
        "A place that becomes free is not noted.",
    ),
    Mutant(
        "calls-overtake",
        "calls/open_work.py",
        "        if outgoing is not None:\n            outgoing.flush()\n",
        "",
        "A call overtakes requests that were submitted before it.",
    ),
    Mutant(
        "answer-unread",
        "requests/request.py",
        "        if self.is_done:  # another thread has read the reply meanwhile, and knew of nobody to tell\n"
        "            self.wait(0.0)\n",
        "        if self.is_done:\n            pass\n",
        "A callback that is added as another thread reads the reply is not called.",
    ),
    Mutant(
        "cancelled-first-not",
        "requests/request.py",
        "            self.is_cancelled = True  # first: it is not sent any more\n",
        "",
        "A request that is cancelled has the error of its ranks.",
    ),
    Mutant(
        "loop-not-told",
        "requests/reader.py",
        "        self._arrived.append(waiter)\n        self._wake_soon()\n",
        "        self._wake_soon()\n",
        "A task that awaits a request is not woken.",
    ),
    Mutant(
        "loop-told-once",
        "requests/reader.py",
        "        self._is_scheduled = False  # first: what is told from here on is not missed\n",
        "",
        "An event loop is woken once.",
    ),
    Mutant(
        "map-unnoted",
        "requests/map.py",
        "            self._is_noted = True\n            progress.look_at(self)\n",
        "            self._is_noted = True\n",
        "The thread of callbacks is not told of a request of a map that has ended.",
    ),
    Mutant(
        "map-noted-late",
        "requests/map.py",
        "        self._is_noted = False  # first: what is noted from here on is not missed\n"
        "        try:\n"
        "            with self._looking:  # and not `lock`: other calls may begin now\n"
        "                self._router.advance()\n"
        "                with self.lock:\n"
        "                    ended = [*self._taken(), *self._late()]\n"
        "                    done = [one for one in ended if one in self._running]  # else Ctrl-C came\n",
        "        try:\n"
        "            with self._looking:  # and not `lock`: other calls may begin now\n"
        "                self._router.advance()\n"
        "                with self.lock:\n"
        "                    ended = [*self._taken(), *self._late()]\n"
        "                    done = [one for one in ended if one in self._running]  # else Ctrl-C came\n"
        "                self._is_noted = False\n",
        "A request of a map that ends as the map is looked at is not noted.",
    ),
    Mutant(
        "map-share-lost",
        "flow/feed.py",
        "                if error is None or self.are_requests:\n",
        "                if error is None:\n",
        "A request of a map that fails keeps its place.",
    ),
    Mutant(
        "map-over-early",
        "flow/feed.py",
        "            is_over = not self._running and not any(map(self._has_more, self._free))\n",
        "            is_over = not any(map(self._has_more, self._free))\n",
        "A map ends when its last request was sent.",
    ),
    Mutant(
        "map-not-taken",
        "flow/feed.py",
        "            self._ahead[self._place(future.rank)] -= 1\n",
        "            pass\n",
        "A value that is taken makes no room for another one.",
    ),
    Mutant(
        "map-row-twice",
        "requests/map.py",
        "        number, label = self._n_sent, self.site.method\n",
        "        number, label = max(0, self._n_sent - 1), self.site.method\n",
        "The first row of a map is sent twice, the last one never.",
    ),
    Mutant(
        "map-goes-on",
        "requests/map.py",
        "            if not (request.is_cancelled and request.is_sent):\n                request.cancel()\n",
        "            pass\n",
        "Requests of a map that was closed as it sent others run on.",
    ),
    Mutant(
        "map-unordered",
        "requests/map.py",
        "sorted(self.arrivals.drained(), key=lambda part: next(iter(numbers_of(part)), 0))",
        "self.arrivals.drained()",
        "The values of a map are in the order in which they came.",
    ),
    Mutant(
        "map-end-untold",
        "flow/feed.py",
        "            self._ended.set()\n            self.arrivals.put(self.done)\n",
        "            self._ended.set()\n",
        "An iteration is not told that its map has ended.",
    ),
    Mutant(
        "map-told-twice",
        "requests/request.py",
        "        tell_map = self.tell_map  # which the map may take away meanwhile\n"
        "        if tell_map is not None:\n"
        "            tell_map(self)\n",
        "        tell_map = self.tell_map\n        if self.tell_map is not None:\n            self.tell_map(self)\n",
        "A request tells a map that has let go of it meanwhile.",
    ),
    Mutant(
        "stream-goes-on",
        "flow/feed.py",
        "            for future in list(self._running):\n                future.cancel()\n",
        "            pass\n",
        "The parts of a stream or map that is closed run on.",
    ),
    Mutant(
        "calls-behind-map",
        "flow/feed.py",
        "        elif not self._sent.is_set():\n            self._sent.set()\n            self.work.advance()\n",
        "",
        "Calls behind a stream that waits for rows are sent when it ends.",
    ),
    Mutant(
        "host-reply-late",
        "hosts/ranks.py",
        "            if is_whole or is_flushed or any(_has_failed(body) for _, body, _ in unsent):\n",
        "            if is_whole:\n",
        "An agent keeps the failure of a rank until all have replied.",
    ),
    Mutant(
        "host-queue-stays",
        "hosts/ranks.py",
        "                self._fail(number, [rank for rank in call.ranks if is_meant(rank, number)], why)\n",
        "",
        "Calls that are cancelled as they wait for rows on a host are never answered.",
    ),
    Mutant(
        "host-queue-outlives",
        "hosts/agent.py",
        "                those.forget(rank)\n",
        "                pass\n",
        "Requests that wait for rows on a host reach the worker that replaces theirs.",
    ),
    Mutant(
        "host-order",
        "hosts/ranks.py",
        "        while self._queue and self._queue[0].is_ready:\n"
        "            calls, are_requests = self._queue.popleft()\n",
        "        while (ready := [one for one in self._queue if one.is_ready]):\n"
        "            calls, are_requests = ready[0]\n"
        "            self._queue.remove(ready[0])\n",
        "Calls on a host overtake those that wait for rows.",
    ),
    Mutant(
        "host-fence",
        "hosts/ranks.py",
        "            if last == number:\n",
        "            if last != number:\n",
        "Ranks on a host that have failed are not let go on.",
    ),
    Mutant(
        "host-lost-silently",
        "hosts/workers.py",
        "                self.deaths[rank] = failure\n                self._fail_open(rank, failure)\n",
        "                self.deaths[rank] = failure\n",
        "Calls to a host that is lost are not failed.",
    ),
    Mutant(
        "host-rows-kept",
        "hosts/workers.py",
        "    for other in (agent, *copies):\n        other.released.append(key)\n",
        "    pass\n",
        "Hosts are not told that nobody refers to rows any more.",
    ),
    Mutant(
        "host-copy-unfetched",
        "hosts/agent.py",
        "            if copy.numbers is None or contains(copy.numbers, fetch.rows):\n",
        "            if True:\n",
        "A host that has some rows of a table is taken to have all.",
    ),
    Mutant(
        "stopped-moves",
        "watching/calls.py",
        '        if signs.state == "R" or is_busy or (begun_anew and signs.method):',
        "        if True:",
        "Every rank is taken to move, so that nothing is noticed.",
    ),
    Mutant(
        "computing-stalls",
        "watching/calls.py",
        '        if signs.state == "R" or is_busy or (begun_anew and signs.method):',
        "        if begun_anew and signs.method:",
        "A rank that computes is taken to stand still.",
    ),
    Mutant(
        "replicas-unasked",
        "rl/group_sync.py",
        "        if index == 0:\n",
        "        if False:\n",
        "A sync does not compare the ranks of the source that have the same part.",
    ),
    Mutant(
        "stage-of-another",
        "rl/weights.py",
        "        if self._staged is None or self._staged.sync != sync:\n",
        "        if self._staged is None:\n",
        "A rank uses weights that another sync has staged.",
    ),
    Mutant(
        "half-a-switch",
        "rl/weights.py",
        "            self._use(tensors, version)\n            raise\n",
        "            raise\n",
        "A rank that is interrupted as it changes to new weights has some old and some new ones.",
    ),
    Mutant(
        "used-though-called-off",
        "rl/engine_weights/target.py",
        "            if self._called_off == weights.sync:  # while requests ended, for example\n",
        "            if False:\n",
        "An engine changes to weights of a sync that was called off while its requests ended.",
    ),
    Mutant(
        "no-way-back",
        "rl/engine_weights/target.py",
        "        if self._used is not None and self._used.sync == sync and self._before is not None:\n",
        "        if False:\n",
        "An engine keeps weights that another replica has refused.",
    ),
    Mutant(
        "two-copies",
        "rl/engine_weights/target.py",
        "        if self._used is not None and self._used.sync == sync:\n            self._before = None\n",
        "        pass\n",
        "The weights before those in use are never freed.",
    ),
    Mutant(
        "any-base",
        "rl/engine_weights/target.py",
        "        elif self._used is None or self._used.sync != base:\n",
        "        elif self._used is None:\n",
        "Changes are made to other weights than those they are for.",
    ),
    Mutant(
        "lent-as-kept",
        "rl/engine_weights/target.py",
        "            if isinstance(before.weights, LentWeights):\n",
        "            if False:\n",
        "An engine goes back to weights that it had read in the memory of the trainer, which has others now.",
    ),
    Mutant(
        "checksums-unread",
        "rl/engine_weights/packing.py",
        "        if part.checksum != found\n",
        "        if False\n",
        "A receiver does not compare checksums.",
    ),
    Mutant(
        "others-keep-theirs",
        "rl/engine_weights/sync.py",
        '            self.quietly("revert_weights", alive, sync)\n            raise\n'
        "        if len(errors) < len(alive):\n",
        "            raise\n        if len(errors) < len(alive):\n",
        "A sync that one replica refuses leaves the others with the new weights.",
    ),
    Mutant(
        "held-before",
        "rl/engine_weights/sync.py",
        "            self.held = Held(sync, version)\n",
        "            self.held = self.held or Held(sync, version)\n",
        "A replica that was replaced asks for the weights of the first sync.",
    ),
    Mutant(
        "snapshot-of-now",
        "rl/engine_weights/source.py",
        "piece: one.clone() if one.untyped_storage().data_ptr() in own else one for",
        "piece: one for",
        "The copy that the source keeps changes with its weights.",
    ),
    Mutant(
        "lent-unreverted",
        "rl/shared_sync.py",
        '                    self._tell("revert_weights", sync)  # after which no replica reads any more\n',
        "",
        "A shared sync that one replica refuses leaves the others with the new weights.",
    ),
    Mutant(
        "lent-unasked",
        "rl/shared_sync.py",
        '            for error in self._ask("takes_weights", lambda _: ()) if self._is_engine else ():\n',
        "            for error in ():\n",
        "A shared sync begins although a replica cannot take weights, and leaves the others without any.",
    ),
    Mutant(
        "one-loan",
        "rl/engine_weights/source.py",
        "        self._loans = {**self._loans, sync: lent}\n",
        "        self._loans = {sync: lent}\n",
        "A second loan ends the first one, which is still read.",
    ),
    Mutant(
        "ended-link",
        "callers/reached.py",
        "            if agent.lost is None:\n                return ranks\n",
        "            return ranks\n",
        "A worker reaches the ranks of a group by a link that has ended as it found them.",
    ),
    Mutant(
        "items-out-of-order",
        "answering/requests.py",
        "            self._queue()  # first: items come in their order\n",
        "",
        "A large item of a stream overtakes the small ones that were made before.",
    ),
    Mutant(
        "no-more-items",
        "requests/stream.py",
        "<= self._most // 2",
        "< 0",
        "The reader of a stream never lets its generator make more items.",
    ),
    Mutant(
        "items-kept-by-host",
        "hosts/ranks.py",
        "        return bool(self._done or self._items or self._unsent) or not is_told\n",
        "        return bool(self._done or self._unsent) or not is_told\n",
        "An agent sends the items of a stream only with something else.",
    ),
    Mutant(
        "version-of-lost",
        "rl/engine_weights/target.py",
        "            self._used, self._before, self.weights_version = None, None, None\n",
        "            self._used, self._before = None, None\n",
        "An engine that has lost its weights goes back to its first ones under the version of those that it has lost.",
    ),
    Mutant(
        "lent-by-anyone",
        "rl/lent_weights.py",
        "        if lacks is None:\n",
        "        if True:\n",
        "A rank that has a part of a tensor lends it as the whole.",
    ),
    Mutant(
        "gone-unheard",
        "backends/inprocess.py",
        "rank in self.deaths or not self._open[rank]",
        "not self._open[rank]",
        "In process, a call that waits for requests to end does not notice that its worker is gone.",
    ),
    Mutant(
        "in-circle-for-good",
        "callers/circles.py",
        "            one.is_over = True\n            self._chains.end(one)\n",
        "            pass\n",
        "A call that is not waited for any more still counts as one that is, in the search for circles.",
    ),
    Mutant(
        "circles-of-all-ranks",
        "callers/door.py",
        "        if len(ranks) > 1:\n",
        "        if False:\n",
        "A call is taken for one that waits for all of its ranks, also for those that have replied.",
    ),
    Mutant(
        "circles-unlooked",
        "callers/circles.py",
        "elif not ranks or waiting.since",
        "elif True or waiting.since",
        "Nobody is told of calls that wait for each other.",
    ),
    Mutant(
        "spins-behind-others",
        "requests/request.py",
        "(not self._request.tickets and self._request.router.can_advance)",
        "self._request.router.can_advance",
        "A wait for a request that was sent ends again and again as long as another one waits for a place.",
    ),
    Mutant(
        "again-when-asked",
        "requests/router.py",
        "            request.read_in_background()  # its caller may wait for others\n",
        "            pass\n",
        "Nobody sends a request again, unless somebody waits for it.",
    ),
    Mutant(
        "segments-of-the-dead",
        "wire/segments.py",
        "for _ in range(n)], reader, is_spoiled=True)",
        "for _ in range(n)], reader)",
        "What a rank that is about to be ended may read is written anew.",
    ),
    Mutant(
        "waits-for-all",
        "calls/result.py",
        "    while not any(result.done is not None for result in needed_by):\n",
        "    while True:\n",
        "A thread waits for the rows of a call that another one has cancelled.",
    ),
    Mutant(
        "told-of-once",
        "callers/circles.py",
        "            elif ranks != told_of:  #",
        "            elif told is None:  #",
        "The controller is not told that a request waits for another replica now.",
    ),
]
