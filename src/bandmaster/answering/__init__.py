"""Answers the requests of callers: runs them beside each other in the worker's process, on its event loop.

::

    worker_process.loop ── its first request ──► requests ──► request_tasks ──► executor: methods that are async
                                                     │              └─ item_stream: async generators
    callers ── a lane of each ───────────────────────┘
"""
