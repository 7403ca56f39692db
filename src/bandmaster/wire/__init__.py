"""Carries calls to worker processes and their replies back: clients, lanes, messages, and shared segments.

::

    LaneClient ── messages ──► a lane to each worker of this host ──► bandmaster.worker_process.loop
       │                         └── descriptors of shared segments, where large payloads lie
       ├── Client: the open calls and their replies, the same for lanes and for links between hosts
       └── Poller: one thread blocks in the kernel for all that wait

    other processes ── StatusPage of a worker: the method that runs, interrupts, stacks

`messages` has the format of what lanes and links carry, `segments` the writer of shared memory, `segment_reader` its
readers, and `stacks` makes stacks readable.
"""
