"""Turns: groups that share slots use them one after the other.

::

    group.turn() ── turn ──► order: who has the slots, who waits for them
                     └─────► participant: a group's calls, and its hooks on_yield and on_resume
"""
