"""Backend ``"ray"``: Ray reserves slots and keeps agents; the workers are forked on their hosts, as on ``"local"``.

::

    RayBackend.reserve ───────────────► a placement group for each node of the pool
    RayBackend.start ─┬─ ranks on this host ───────────────► LocalBackend.start_ranks ── fork ──► workers
                      └─ otherwise ── agents ── link ──► BandmasterAgent, an actor per node ── fork ──► workers

`session` connects to Ray, `backend` reserves and is the backend itself, `agents` starts agents, and `in_worker`
connects a worker that uses Ray to the cluster of its controller. Importing this package imports no Ray.
"""
