"""The life of a group's workers: argument checks, construction, replacement, deaths, and ownership.

::

    WorkerGroup(...) ── checks ──► construction ──► Workers ◄── death_watch: on_death callbacks
                                                       ▲
                                                       └────── ownership: stops them, releases their slots
"""
