"""Runs next to the user's object in the worker's process. Backends import from its modules.

::

    controller ── lane ──► loop ── one call ──► executor ── constructs the worker, runs its methods
               ◄─ lane ───┘ ◄───── reply ──────┘
               ── signal ──► status_page: interrupts the running call; its thread writes the stacks
                          event_loop: runs the coroutines of async methods, tells where its tasks wait ◄── executor
    any process ◄─ memory ── activity: which method runs, and since when
    other ranks ── TCP ────► rendezvous: the port of torch.distributed, on rank 0
"""
