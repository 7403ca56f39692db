"""What workers write and log, as the controller shows it, and the progress of a start.

::

    worker: stdout, stderr ── pipes ──► streams ── prefix ──► screen: one terminal for all ranks
    worker: log records (log_sender) ──► log_sink ──► the controller's loggers
"""
