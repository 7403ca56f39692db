"""The Python in the pages of docs/ runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = [page for page in sorted(Path(__file__).parents[1].glob("docs/**/*.md")) if "```python\n" in page.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path):
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
