"""What a user holds: worker groups, their methods, and groups whose roles share processes.

::

    WorkerGroup.method(x) ── method: which way the call goes ──► bandmaster.calls
    colocate(...) ── colocation ──► one group of processes, and one WorkerGroup for each role
"""
