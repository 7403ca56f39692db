"""What a user sees who works in a notebook: cells that are run again, tables, tracebacks, progress bars."""

import asyncio
import contextlib
import os
import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from test_tutorials import OwnKernel, seen, without_starts

pytestmark = pytest.mark.slow

DEFINE = """
import sys
import bandmaster as bm

class Actor(bm.Worker):
    @bm.register(bm.Dispatch.DP_PROTO)
    def double(self, rows):
        return [2 * row for row in rows]

    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def fail(self):
        raise ValueError("on purpose")  # a comment in the cell

    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def show_bar(self):
        for n in range(100):
            sys.stderr.write(f"\\r{n + 1}%")
        sys.stderr.write("\\n")
"""
MAKE = """
pool = bm.ResourcePool([2])
group = bm.WorkerGroup(pool, Actor, name="actor")
group.double([1, 2, 3])
"""
FAIL = "group.fail()"


class Notebook:
    """A notebook whose cells are run one by one, in one kernel."""

    def __init__(self, folder):
        self._client = NotebookClient(
            nbformat.v4.new_notebook(),
            kernel_manager_class=OwnKernel,
            timeout=60,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )

    async def run(self, *sources):
        """The outputs of cells, each a list of texts."""
        shown = []
        async with self._client.async_setup_kernel(env={**os.environ, "BANDMASTER_FULL_TRACEBACKS": "0"}):
            for source in sources:
                cell = nbformat.v4.new_code_cell(source)
                self._client.nb.cells.append(cell)
                with contextlib.suppress(CellExecutionError):
                    await self._client.async_execute_cell(cell, len(self._client.nb.cells) - 1)
                shown.append([_text(output) for output in cell.outputs])
        return shown


def _text(output):
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return output.data.get("text/html", output.data["text/plain"])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run(cell, cell)``: what is shown below each cell."""
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return lambda *sources: asyncio.run(Notebook(tmp_path).run(*sources))


def test_a_notebook(run):
    _, first, second, shown, failed, bar, ended = run(
        DEFINE, MAKE, MAKE, "group", FAIL, "_ = group.show_bar()\ngroup.close()", "bm.close_all()\nprint(pool)"
    )
    for outputs in (first, second):  # the cell can be run again; it tells of a start that takes long, until it is over
        assert without_starts(seen("".join(outputs))).split() == ["[2,", "4,", "6]"]
    assert "<td>actor_0:1</td>" in shown[0] and "<td>double(rows)</td>" in shown[0] and "<th>pid</th>" in shown[0]
    lines = [line for line in seen("".join(bar)).splitlines() if line.strip()]  # streams are joined below a cell
    assert sorted(lines) == ["[actor 0] 100%", "[actor 1] 100%"], bar
    (traceback,) = failed
    assert "a comment in the cell" in traceback, "the source line of the worker"
    traceback = re.sub(r"\x1b\[[0-9;]*m", "", traceback)  # its colours
    assert "group.fail()" in traceback
    assert "src/bandmaster" not in traceback, traceback
    assert ended == ["<closed ResourcePool([2], backend='local')>\n"]
