"""Who gets what: meshes, protocols, batches, and the plan of a call. Pure: no process, no I/O.

::

    args, kwargs ── binding ──► BoundArgument ── arguments, rows, batch ──► CallPlan: what goes to which ranks
    result ◄────────────────────────────────── collection ◄───────────────── the values of the ranks
"""
