"""Notices calls and requests that make no progress, and says which ranks hold them up, and where these are.

::

    WorkerGroup ── begin ──► Watcher: a thread, once a second
                               OpenWork.unanswered ──► calls that are older than their `stall_after`
                               Workers.signs ────────► Life of each rank that owes a reply: has it moved?
                               Workers.stacks ───────► notice: who waits for whom, logged once

A rank moves if it uses the processor, as Python and native code do that compute, or begins another method. A call has
stalled if none of the ranks that owe a reply has moved for `stall_after`, or one has not, while all others that move
are in collectives, where they may spin. Constructors that wait, turns that are never given back, and requests whose
place never becomes free have notices as well.
"""
