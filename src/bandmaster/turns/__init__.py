"""Turns: groups that share slots use them one after the other.

::

    group.turn() ──► turns: the groups that have slots, and the requests that wait
                       └──► taker: a group's calls, and its hooks on_yield and on_resume
"""
