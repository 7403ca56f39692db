"""How calls reach worker processes: the worker client, channels, messages, and shared segments.

::

    WorkerClient ── messages ──► Channel: a lane, to each worker on this host ──► bandmaster.worker_process.loop
         │                          └── descriptors of shared segments, where large payloads lie
         └── poller: one thread blocks in the kernel for all that wait

The controller interrupts a running worker, and reads its stack, through the worker's control page. The worker shows on
its activity page which method it runs.
"""
