"""Pictures of a run that was traced, and a sentence that says where its time went.

::

    Trace ── calls ──► Run ──┬──► causes: findings, diagnosis      where the time went, in words
             stalls          └──► lanes ──┬──► page: HTML, drawn by view.js on a canvas
                                          └──► plot: SVG and PNG, by matplotlib

`bandmaster.Trace.timeline` makes a `Timeline`, `bandmaster.Trace.diagnosis` the sentence. All of it is computed when it
is asked for, from records. The core does not import this room before that.
"""

from bandmaster.timeline.causes import Finding, diagnosis, findings
from bandmaster.timeline.run import Call, Moments, Run
from bandmaster.timeline.timeline import Timeline
from bandmaster.timeline.waits import Sample, Waits

__all__ = ["Call", "Finding", "Moments", "Run", "Sample", "Timeline", "Waits", "diagnosis", "findings"]
