"""The objects that a user calls: worker groups, their methods, and groups whose roles share processes.

::

    AnyGroup (base) ── method(x): chooses the path of the call ──► bandmaster.calls
       ├── GroupOf, WorkerGroup (group)   start, restart and end the processes of the workers
       │      └── ColocatedGroup          what `colocate` returns: one group of processes for several roles
       └── RoleGroup (colocation)         the methods of one role, on the processes of the colocated group
"""
