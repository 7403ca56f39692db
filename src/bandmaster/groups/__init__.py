"""The objects that a user calls: worker groups, their methods, and groups whose roles share processes.

::

    WorkerGroup.method(x) ── method: chooses the path of the call ──► bandmaster.calls
    colocate(...) ── colocation ──► one group of processes, and one WorkerGroup for each role
"""
