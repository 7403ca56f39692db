"""The life cycle of a group's workers: argument checks, construction, replacement, death watches and ownership.

::

    WorkerGroup(...) ── checks ──► construction ──► Workers ◄── death_watch: on_death callbacks
                                                       ▲
                                                       └────── ownership: stops them, releases their slots
"""
