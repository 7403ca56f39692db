"""What the benchmarks share: peers in processes of their own, rounds that alternate between them, tables.

::

    noop.py ... (one file per question) ─► stage: peers started, cells measured in alternating rounds
                                              │ peer_process: lines of JSON
                                              ▼
                          child, in the interpreter that has the peer ─► peers/<name>.py ─► its workers
"""
