"""An OpenAI-compatible endpoint over a group of engines: agents call it, and trainers read what they saw.

::

    agent: openai, or any framework            the process that has the group: the controller, or a worker
      │  HTTP, SSE                               a thread with an event loop: uvicorn ── starlette
      └─────────────────────────────────────────►  limits ► fields ► sessions ─┐        ▲
                                                   episodes ◄──────────────────┤        │ JSON, events
                                                                               ▼        │
                                              group.complete, group.completion_parts ───┘
                                                                               │  requests, by key
                                              rl.Engine, one for each replica ◄┘  template, tokens, parser

`Endpoint` is the server, `app` the application for a server of your own, and `rows` makes columns of `Episode`s for a
trainer. Templates, tokens and tool calls are the engines' business; nothing here imports torch or vLLM. The room needs
the extra ``serve``. Nothing else imports it.
"""

try:
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(f"bandmaster.serve needs {error.name}: pip install 'bandmaster[serve]'") from error

from bandmaster.serve.app import app
from bandmaster.serve.endpoint import Endpoint
from bandmaster.serve.episodes import Episode, Turn, rows
from bandmaster.serve.options import Options

__all__ = ["Endpoint", "Episode", "Options", "Turn", "app", "rows"]
