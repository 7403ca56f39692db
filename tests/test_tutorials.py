"""The tutorials run from top to bottom in a fresh kernel, and show the results that their text promises.

A cell that matters has a tag in its metadata, and the tests compare what the tagged cells show. The notebooks are
stored with their outputs, which have to be those of a run; ``python tests/test_tutorials.py`` renews them, or those of
notebooks that it is given.
"""

import asyncio
import os
import re
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
EXAMPLES = Path(__file__).parents[1] / "examples" / "rlhf"
CELL_TIMEOUT_S = 120
VARYING = {"timeline", "why", "breakpoint"}  # cells that show times, or where a process is

pytestmark = pytest.mark.slow  # a run starts Ray, and up to 40 actors


class OwnKernel(AsyncKernelManager):
    """The kernel of this very interpreter: ipykernel starts it where no directory has another one of its name."""

    def _kernel_spec_manager_default(self):
        return KernelSpecManager(kernel_dirs=[])


def execute(name, folder):
    """The notebook after a run in a fresh kernel, with nothing of its metadata but what belongs in it."""
    notebook = nbformat.read(TUTORIALS / name, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_manager_class=OwnKernel,
        timeout=CELL_TIMEOUT_S,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    # Ray imports tqdm where it finds it, which then asks the reader to install ipywidgets
    warnings = {"PYTHONWARNINGS": "ignore:IProgress not found"}
    path = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(EXAMPLES)])
    )  # the folder is not docs/tutorials
    asyncio.run(client.async_execute(env={**os.environ, **warnings, "PYTHONPATH": path}))
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run("name.ipynb")``: what every tagged cell shows in a run; the outputs that are stored have to be the same."""
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))

    def run(name):
        stored = code_cells(nbformat.read(TUTORIALS / name, as_version=4))
        cells = code_cells(execute(name, tmp_path))
        for old, new in zip(stored, cells, strict=True):
            if VARYING.intersection(new.metadata.get("tags", [])):
                continue
            assert shown(new) == shown(old), f"{name} is stored with other outputs; in the cell\n{new.source}"
        return {tag: shown(cell) for cell in cells for tag in cell.metadata.get("tags", [])}

    return run


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell):
    """What a reader sees below a cell, without what is new in each run: Ray's ids, hosts, processes, slow starts."""
    texts = [output.text if output.output_type == "stream" else richest(output.data) for output in cell.outputs]
    text = without_starts(seen("".join(texts)))
    text = re.sub(r"\b[0-9a-f]{16,}\b", "ID", text)
    return re.sub(r"<td>[\w.-]+</td><td>\d+</td>(?=<td>(cpu|cuda))", "<td>HOST</td><td>PID</td>", text).strip()


def without_starts(text):
    """A text without the lines about groups that start slowly, as on a busy machine."""
    return re.sub(r"^starting \w+: .*\d s(; late: rank .*)?\n", "", text, flags=re.MULTILINE)


def seen(text):
    """A text with carriage returns, as a terminal shows it: a line that was begun again is not seen."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def richest(data):
    return next(data[kind] for kind in ("text/html", "image/svg+xml", "text/plain") if kind in data)


def tensors(*values):
    return "[" + ", ".join(f"tensor([{value}.])" for value in values) + "]"


def test_basics(run):
    assert run("01-ray-basics.ipynb") == {
        "one-square": "49",
        "squares": "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]",
        "parallel": "in parallel: True",
        "square-of-square": "81",
        "accumulator-at-first": "0",
        "accumulator-after-add": "10",
        "actor-of-actor": "'a tune from the player'",
        "band-by-hand": "[1, 2, 3, 4]",
    }


def test_worker_groups(run):
    results = run("02-worker-groups.ipynb")
    listed = {tag: " ".join(text.split()) for tag, text in results.items()}  # long lists are shown in several lines

    assert listed["four-accumulators"] == tensors(1, 2, 3, 4)
    assert results["local-ranks"].splitlines() == ["[0, 1, 2, 3]", "[4, 4, 4, 4]"]
    assert listed["workers"] == f"[{', '.join(['Actor(GPUAccumulator, ID)'] * 4)}]"
    assert listed["worker-names"] == str([f"firstGPUAccumulator_0:{rank}" for rank in range(4)])
    assert results["actor-by-name"].splitlines() == ["tensor([4.])"] * 2

    assert results["merged-local-ranks"].splitlines() == ["[0, 1, 2, 3]", "[0, 1, 2, 3, 0, 1, 2, 3]"]
    assert listed["new-pool"] == tensors(2, 3, 4, 5)
    assert listed["merged-pool"] == tensors(3, 4, 5, 6, 7, 8, 9, 10)
    assert results["merged-pool-table"].count("firstGPUAccumulator, bothGPUAccumulator") == 4
    assert results["merged-pool-table"].count("secondGPUAccumulator, bothGPUAccumulator") == 4

    assert listed["one-to-all-add"] == tensors(10, 11, 12, 13)
    assert results["two-to-all"] == "[8, 10, 8, 10]"
    assert results["rank-zero"] == "5"

    signed = {
        "ONE_TO_ALL": [f"model@{rank}" for rank in range(8)],
        "3D_PROTO": rows_by_rank({4: range(5), 6: range(5, 10)}),
        "3D_ALL_MICRO_DP": rows_by_rank({0: range(3), 4: range(3, 6), 2: range(6, 8), 6: range(8, 10)}),
        "3D_PP_ONLY": ["stage 0@0", "stage 1@4"],
        "DP_PROTO": rows_by_rank({0: range(5), 2: range(5, 10)}),
        "ALL_TO_ALL": [f"{letter}@{rank}" for rank, letter in enumerate("abcdefgh")],
    }
    for protocol, answer in signed.items():
        assert listed[protocol] == str(answer)
        assert results[f"drawing-{protocol}"].count(">rank ") == 8, "the drawing has a box for every rank"
    assert results["same-without-ray"].splitlines() == ["True", "True"]


def test_rows_by_reference(run):
    results = run("03-rows-by-reference.ipynb")
    drawn = {
        tag: re.findall(r">(rank \d|\d rows?|\w+)</text>", text) for tag, text in results.items() if "<svg" in text
    }

    assert "10 rows of {'prompt': int64[], 'tokens': int64[50000], 'length': int64[]}" in results["handle"]
    assert "4 MB on ranks {0: 3, 1: 3, 2: 2, 3: 2}" in results["handle"]
    ranks = ["rank 0", "3 rows", "rank 1", "3 rows", "rank 2", "2 rows", "rank 3", "2 rows"]
    assert drawn["handle"] == ["generate", *ranks]
    assert results["passed-on"].splitlines()[:2] == [
        "read from shared memory: 4 MB",
        "through the controller: less than 10 kB: True",
    ]
    assert drawn["passed-on"][-5:] == ["log_probs", "rank 0", "5 rows", "rank 1", "5 rows"]
    assert results["chain"] == "True"
    assert "[4 6 2 7] [4 6 2 7]" in results["operations"]
    assert "generate" in drawn["operations"] and "log_probs" in drawn["operations"]
    shuffled = np.random.default_rng(1).permutation(10)
    assert results["mini-batches"].splitlines() == [
        "[4, 4, 2]",
        str([0.5 * (7 * n % 10 + n) for n in shuffled.tolist()]),
    ]
    assert results["lifetime"].splitlines()[0] == "[0 7 4]"
    assert "the rows that Actor.generate has left on rank 0 were released" in results["lifetime"]
    assert results["stream"].strip().startswith("{(0, 1, 2): [0, 1, 2], (3, 4, 5): [3, 4, 5]")


def test_training(run):
    results = run("04-training.ipynb")
    assert results["learnt"] == "more sevens than at first: True"
    said, _, picture = results["timeline"].partition("<iframe")
    assert "he controller takes" in said  # alone, or after what takes more
    assert "<svg" in picture or "srcdoc" in picture
    assert results["deadline"] == "ranks that have not answered: (0, 1)"
    guilty, waiting = results["why"].splitlines()[1:3]
    assert "rank 1: update" in guilty and "in get, called by update" in guilty
    assert "rank 0: update" in waiting and "waiting for other ranks in all_reduce" in waiting
    assert "(nan, 0)" in results["breakpoint"] and "['updated']" in results["breakpoint"]
    assert results["resumed"] == "step 9 on {'dp': 1, 'tp': 2}; as many sevens as before: True"


def rows_by_rank(rows):
    return [f"{row}@{rank}" for rank in rows for row in rows[rank]]


if __name__ == "__main__":
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        if sys.argv[1:] and path.name not in sys.argv[1:]:
            continue
        nbformat.write(execute(path.name, path.parent), path)
