"""Small changes to the path that something must notice: ``PYTHONPATH=tests python -m mutants``, or ``make mutants``.

Each mutant is one replacement of one to five lines, with one sentence. It is applied to a copy of the sources, on which
the simulation runs for a bounded time from new seeds. A table says which were found, and after how many seconds. What
nothing finds is a hole in the checks, or a line that is not needed.
"""
