"""The output of workers, as the controller shows it: lines, progress bars, log records, and starts that take long.

::

    worker: stdout, stderr ── pipes ──► streams ──┬──► screen: lines with a prefix, a live region of rich
    worker: RecordSender ──── socket ─────────────┘       └──► log_records: the controller's loggers
    lifecycle.construction: Start ── WATCHERS ───────────► screen: which ranks are late
"""
