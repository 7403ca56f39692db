"""Shows the output of workers in the controller: lines, progress bars, log records, and the progress of slow starts.

::

    worker: stdout, stderr ── pipes ──► streams ──┬──► screen: lines with a prefix, a live region of rich
    worker: RecordSender ──── socket ─────────────┘       └──► log_records: the controller's loggers
    lifecycle.construction: Start ── WATCHERS ───────────► screen: the ranks that are late
"""
