"""Several calls as one: streams, chunks that free replicas pull, and waiting for several futures.

::

    chunks (pure) ──► pull: sends a chunk to each free replica ──┬─► pulled: all chunks, for a future
                                                                  └─► feeds ──► stream: one by one, as they come
    futures ──► waiting: wait, as_completed
"""
