"""The tutorials run from top to bottom in a fresh kernel, and show the results that their text promises.

A cell that matters has a tag in its metadata, and the tests compare what the tagged cells show. The notebooks are stored
with their outputs, which have to be those of a run. After a change, this renews them::

    jupyter execute --inplace --NotebookClient.record_timing=False docs/tutorials/*.ipynb
"""

import asyncio
import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
CELL_TIMEOUT_S = 120

pytestmark = pytest.mark.timeout(300)  # a run starts Ray, and up to 40 actors


class OwnKernel(AsyncKernelManager):
    """The kernel of this very interpreter: ipykernel starts it where no directory has another one of its name."""

    def _kernel_spec_manager_default(self):
        return KernelSpecManager(kernel_dirs=[])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run("name.ipynb")``: the cells of the stored notebook after a run, in a kernel of this very interpreter."""
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))

    def execute(name):
        notebook = nbformat.read(TUTORIALS / name, as_version=4)
        for cell in code_cells(notebook):
            cell.outputs = []
        where = {"metadata": {"path": str(tmp_path)}}
        client = NotebookClient(notebook, kernel_manager_class=OwnKernel, timeout=CELL_TIMEOUT_S, resources=where)
        asyncio.run(client.async_execute())
        return code_cells(notebook)

    return execute


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell):
    """The text that a cell shows, with Ray's ids, new in each run, made equal."""
    texts = [output.text if output.output_type == "stream" else output.data["text/plain"] for output in cell.outputs]
    return re.sub(r"\b[0-9a-f]{16,}\b", "<id>", "".join(texts)).strip()


def by_tag(cells):
    return {tag: shown(cell) for cell in cells for tag in cell.metadata.get("tags", [])}


def tensors(*values):
    return "[" + ", ".join(f"tensor([{value}.])" for value in values) + "]"


def test_ray_basics(run):
    results = by_tag(run("01-ray-basics.ipynb"))
    assert results == {
        "one-square": "49",
        "squares": "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]",
        "parallel": "in parallel: True",
        "square-of-square": "81",
        "accumulator-at-first": "0",
        "accumulator-after-add": "10",
        "actor-of-actor": "'a tune from the player'",
        "band-by-hand": "[1, 2, 3, 4]",
    }
