"""The life of a call: from `group.method(...)` to its result.

::

    method ── plan ──► submission ── encoding ──► Workers.put, Workers.call
                            └──► PendingCall ── reads replies, escalates, collects ──► Future
"""
