"""The programs of docs/engines.md that need vLLM run as they stand, but for the model's path and smaller options."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_first_program_runs(model_path, tmp_path):
    (code,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = code.replace('"path/of/model"', repr(model_path))
    code = code.replace("max_model_len=256", "max_model_len=256, kv_cache_memory_bytes=1 << 27, enforce_eager=True")
    program = tmp_path / "program.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "'length'" in done.stdout or "'stop'" in done.stdout
