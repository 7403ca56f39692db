"""Random programs over the public names of bandmaster, and an oracle in plain Python that knows what each step gives.

::

    seed ─ generate ──► program: a tuple of steps, which are data
                          ├─ step.code() ── one line of Python, run by `run` on each backend ──┐
                          ├─ step.expect(oracle) ── the value, or the error, that must come ───┴─► Failure
                          └─ shrink ──► the smallest program that still fails ── script ──► 30 lines that run alone

Nothing here knows the inside of the library: `bandmaster`'s public names only, and `bandmaster.testing`'s.
"""
