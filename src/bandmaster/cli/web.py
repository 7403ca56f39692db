"""``bandmaster top --web``: the groups of this machine in a browser, with what each rank ran in the last minute.

::

    a thread: usage.Sampler ──► the state, and the spans of each rank ──► GET /state ──► web.html, every second
                                                    why._said ──► GET /why, when a button is pressed

The server listens on 127.0.0.1, and answers only requests that name it so, which keeps pages of other sites out.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

from bandmaster.cli.discovery import discover
from bandmaster.cli.top import SHORTEST_INTERVAL_S
from bandmaster.cli.usage import Moment, RankUsage, Sampler
from bandmaster.cli.why import seen
from bandmaster.errors import UsageError

HOST = "127.0.0.1"
KEPT_S = 60.0  # of the spans
Span = list[Any]  # begin, end, method


class History:
    """The state of all ranks now, and what they ran in the last minute.

    Args:
        sample: Returns the present state.
        interval_s: Seconds between two samples.
    """

    def __init__(self, sample: Callable[[], Moment], interval_s: float) -> None:
        self._sample, self._interval_s = sample, interval_s
        self._spans: dict[tuple[str, int], list[Span]] = {}
        self._state: dict[str, Any] = {"now": 0.0, "kept": KEPT_S, "groups": []}
        self._lock = threading.Lock()

    def run(self, is_over: threading.Event) -> None:
        """Sample until it is over."""
        while True:
            self.add(self._sample(), time.time())
            if is_over.wait(self._interval_s):
                return

    def add(self, moment: Moment, now: float) -> None:
        """Add the state at a moment; the method that a rank runs may have begun before it."""
        groups = []
        for group in moment.groups:
            ranks = []
            for rank in group.ranks:
                spans = self._spans.setdefault((group.name, rank.rank), [])
                _extend(spans, rank, now, self._interval_s)
                ranks.append({**_shown(rank), "spans": [list(span) for span in spans]})
            groups.append({"name": group.name, "note": group.note, "size": group.world_size, "ranks": ranks})
        known = {(group.name, rank.rank) for group in moment.groups for rank in group.ranks}
        self._spans = {key: spans for key, spans in self._spans.items() if key in known}
        with self._lock:
            self._state = {"now": now, "kept": KEPT_S, "groups": groups}

    @property
    def state(self) -> dict[str, Any]:
        """The last state, as JSON has it."""
        with self._lock:
            return self._state


def _extend(spans: list[Span], rank: RankUsage, now: float, interval_s: float) -> None:
    method = "" if rank.activity is None else rank.activity.method
    if method and rank.activity is not None:
        begun = now - rank.activity.seconds
        last = spans[-1] if spans else None
        if last is not None and last[2] == method and begun <= last[1] + interval_s / 10:
            last[1] = now
        else:
            spans.append([max(begun, last[1] if last else begun), now, method])
    while spans and spans[0][1] < now - KEPT_S:
        del spans[0]


def _shown(rank: RankUsage) -> dict[str, Any]:
    activity = rank.activity
    return {
        "rank": rank.rank,
        "pid": rank.pid,
        "method": "" if activity is None else activity.method,
        "seconds": 0.0 if activity is None else round(activity.seconds, 2),
        "tasks": 0 if activity is None else activity.n_tasks,
        "more": 0 if activity is None else activity.n_more,
        "cpu": rank.cpu_percent,
        "memory": rank.rss_nbytes,
        "held": rank.held_nbytes,
        "device": rank.device,
        "debugger": rank.is_in_debugger,
    }


def application(history: History, controller: int | None) -> Any:
    """The application: the page, the state and the places of ranks."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    page = resources.files("bandmaster.cli").joinpath("web.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": "default-src 'self' 'unsafe-inline'", "Cache-Control": "no-store"}

    def root(_: Any) -> Any:
        return HTMLResponse(page, headers=headers)

    def state(_: Any) -> Any:
        return JSONResponse(history.state, headers=headers)

    def why(_: Any) -> Any:
        return JSONResponse(seen(discover(controller).groups), headers=headers)

    routes = [Route("/", root), Route("/state", state), Route("/why", why)]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])])


def web(port: int, interval_s: float, controller: int | None = None) -> int:
    """Serve the page until Ctrl-C.

    Args:
        port: The port on 127.0.0.1; 0 chooses a free one.
        interval_s: Seconds between two samples.
        controller: Pid of the only controller whose groups are shown.

    Returns:
        The exit status: 0, or 1 if a package is missing or the port cannot be had.

    Raises:
        UsageError: The interval is too short, or there is no such port.
    """
    if not interval_s >= SHORTEST_INTERVAL_S:
        raise UsageError(f"--interval must be at least {SHORTEST_INTERVAL_S:g} seconds, got {interval_s:g}")
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port must be from 0 to 65535, got {port}")
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        print(f"bandmaster top --web needs {error.name}: pip install 'bandmaster[serve]'", file=sys.stderr)
        return 1
    import socket

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
            listening.listen()
        except OSError as error:
            print(f"bandmaster top --web cannot listen on {HOST}:{port}: {error.strerror}", file=sys.stderr)
            return 1
        sampler, is_over = Sampler(controller), threading.Event()
        history = History(sampler.sample, interval_s)
        thread = threading.Thread(target=history.run, args=(is_over,), name="bandmaster-top", daemon=True)
        thread.start()
        url = f"http://{HOST}:{listening.getsockname()[1]}/"
        print(f"{url} shows your groups on this machine; Ctrl-C ends it", flush=True)
        config = uvicorn.Config(application(history, controller), log_level="warning", access_log=False)
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:
            pass
        finally:
            is_over.set()
            thread.join()
    return 0
