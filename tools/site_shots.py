"""Opens every page of the built site in a headless Chromium, and takes screenshots of five in light and dark mode.

Run it after ``make docs``, with Debian's chromium installed: ``python tools/site_shots.py FOLDER``. It serves the
site on a free port of 127.0.0.1. A page fails if one of its requests does, or if its script raises.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

SITE = Path(__file__).resolve().parents[1] / "site"
SHOWN = ("", "start/first-group/", "concepts/mesh/", "reference/groups/", "benchmarks/results/2026-11-22/")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=4000",
]
SIZE = (1280, 1500)


class Recorder(SimpleHTTPRequestHandler):
    """Serves files, and notes the requests that failed."""

    failed: ClassVar[list[str]] = []

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """As the base class; notes the path."""
        self.failed.append(f"{code} {self.path}")
        super().send_error(code, message, explain)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def served() -> Iterator[str]:
    """The address at which the site is served."""
    handler = functools.partial(Recorder, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def chromium() -> str:
    """The browser.

    Raises:
        SystemExit: There is none.
    """
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("there is no chromium; install it: apt-get install chromium")
    return found


def opened(url: str, *options: str) -> str:
    """Open a page; what the browser says about it, its DOM included if that is asked for."""
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium(), *FLAGS, f"--user-data-dir={profile}", "--enable-logging=stderr", *options, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    return done.stdout + done.stderr


def shoot(address: str, page: str, folder: Path, is_dark: bool) -> Path:
    """Take a picture of a page as it is in one of the modes."""
    name = page.strip("/").replace("/", "-") or "index"
    path = folder / f"{name}-{'dark' if is_dark else 'light'}.png"
    mode = ["--blink-settings=preferredColorScheme=0"] if is_dark else ["--blink-settings=preferredColorScheme=1"]
    opened(f"{address}/{page}", f"--screenshot={path}", f"--window-size={SIZE[0]},{SIZE[1]}", *mode)
    return path


def problems(address: str, page: str) -> list[str]:
    """What is wrong with a page."""
    said = opened(f"{address}/{page}", "--dump-dom")
    found = [line for line in said.splitlines() if "CONSOLE" in line and ("Error" in line or "Failed" in line)]
    return [f"{page}: {line}" for line in found]


def main() -> int:
    """Look at all pages; the exit status."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "site-shots")
    folder.mkdir(parents=True, exist_ok=True)
    pages = sorted(path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html"))
    with served() as address:
        found = [problem for page in pages for problem in problems(address, "" if page == "." else f"{page}/")]
        for page in SHOWN:
            for is_dark in (False, True):
                print(shoot(address, page, folder, is_dark))
    found += [f"a request failed: {line}" for line in sorted(set(Recorder.failed))]
    print("\n".join([*found, f"{len(pages)} pages, {len(found)} problems"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
