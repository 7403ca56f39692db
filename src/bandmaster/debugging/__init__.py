"""Debuggers in workers: `breakpoint()` waits for a terminal or an IDE.

::

    breakpoint() ── breakpoints ──┬─► debugger ── terminal ◄── socket ── bandmaster debug
                                  └─► debugpy ◄── TCP ──────── an IDE
"""
