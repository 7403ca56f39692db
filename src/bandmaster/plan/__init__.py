"""Plans a call: meshes, transfer protocols, batches, and the arguments of each rank. Pure: no process, no I/O.

::

    args, kwargs ── binding ──► BoundArgument ── arguments, rows, batch ──► CallPlan: the arguments of each rank
    result ◄────────────────────────────────── collection ◄───────────────── the return values of the ranks
"""
