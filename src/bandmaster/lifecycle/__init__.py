"""The life cycle of a group's workers: argument checks, construction, replacement, death watches, ownership, turns.

::

    WorkerGroup(...) ── checks ──► construction ──► Workers ◄── death_watch: on_death callbacks
                                                       ▲
                                                       ├────── ownership: stops them, releases their slots
    WorkerGroup.turn() ── turns ── turn_order              │
                            └──► participant: on_yield, on_resume
"""
