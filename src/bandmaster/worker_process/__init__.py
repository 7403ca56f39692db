"""What runs next to the user's object, in the worker's process.

::

    loop ── reads messages from the lane ──► executor ── constructs the worker, runs its methods
    control_page: calls are interrupted by signals          rendezvous: the port of torch.distributed
"""
