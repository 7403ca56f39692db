"""Debuggers in workers: `breakpoint()` waits for a terminal or an IDE, and calls can be recorded for a replay.

::

    breakpoint() ── breakpoints ──┬─► debugger ◄── socket ── bandmaster debug
                                  └─► ide ◄────── debugpy ── an IDE
"""
