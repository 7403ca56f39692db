"""Several calls as one: streams, and waiting for several futures.

::

    values of ranks ────────┐
    items ──────────────────┼──► feed: sends the parts ──► stream: part by part, as they are done
    requests of a map ──────┘    of one call
    futures ──► waiting: wait, as_completed
"""
