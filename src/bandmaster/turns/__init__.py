"""Turns: groups that share slots use them one after the other.

::

    group.turn() ──► turns: who has which slots, who waits
                       └──► taker: a group's calls, and its hooks on_yield and on_resume
"""
