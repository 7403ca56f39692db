"""Groups that workers were given as arguments, and call themselves.

::

    controller                                            worker that was given the group
    WorkerGroup ── pickled: GroupReference ─────────────► CalledGroup
    Door: one socket for all groups ◄── which rank? ───── ReachedWorkers: a lane to each rank, made when it is needed
      └── passes the socket on ──► rank ◄── requests ────────┘
    Relay: makes the calls of all ranks ◄── any other call ── RelayedMethod
"""
