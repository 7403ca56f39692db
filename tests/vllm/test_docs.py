"""The first programs of docs/engines.md and docs/serve.md run, with another path and smaller options."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "says"), [("engines.md", r"'length'|'stop'"), ("serve.md", r"\(1, 128\)")])
def test_the_first_program_runs(model_path, tmp_path, page, says):
    (code,) = re.findall(r"```py\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    code = code.replace('"path/of/model"', repr(model_path))
    code = code.replace("max_model_len=256", "max_model_len=256, kv_cache_memory_bytes=1 << 27, enforce_eager=True")
    program = tmp_path / "program.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search(says, done.stdout)
