"""Groups that workers were given as arguments, and call themselves.

::

    controller                                            worker that was given the group
    WorkerGroup ── pickled: GroupReference ─────────────► CalledGroup
    Door: one socket for all groups ◄── which rank? ───── ReachedWorkers: a lane to each rank, made when it is needed
      └── passes the socket on ──► rank ◄── requests ────────┘
    ControllersRelay: calls of all ranks ◄─ any other ─── RelayedMethod

    controller                       agent                worker on another host
    ControllersRelay ◄─ FarCalls ◄── PassedCalls ◄─ Door ─── asks for ranks, and has other calls relayed
                                     HostRanks of the agent ◄── requests to its ranks ── FarRanks, if on a third host
"""
