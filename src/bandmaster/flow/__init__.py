"""Several calls as one: streams, chunks that go to free replicas, and waiting for several futures.

::

    values of ranks ──┐                          ┌──► stream: part by part, as they are done
    items ────────────┼──► feed: sends the parts ┤
    chunks (pure) ────┘    of one call           └──► pulled: the parts joined, for a future
    futures ──► waiting: wait, as_completed
"""
