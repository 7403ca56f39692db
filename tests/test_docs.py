"""The Python in the pages of docs/ runs as it stands, and commands there have options that exist."""

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


EXAMPLES = Path(__file__).parents[1] / "examples" / "rlhf"


def test_commands_of_pages_have_options_that_the_examples_know():
    known = {
        "--" + name.replace("_", "-")
        for path in EXAMPLES.glob("*.py")
        for name in re.findall(r"^    (\w+): \w+ = option\(", path.read_text(), re.MULTILINE)
    } | {"--plot", "--engines"}  # of curves.py
    n_commands = 0
    for page in Path(__file__).parents[1].glob("docs/**/*.md"):
        blocks = "\n".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)).replace("\\\n", " ")
        for program, words in re.findall(r"^.*python (examples/rlhf/\w+\.py)(.*)$", blocks, re.MULTILINE):
            n_commands += 1
            assert (EXAMPLES.parents[1] / program).exists(), page
            assert set(re.findall(r"--[a-z-]+", words.partition("#")[0])) <= known, (page, words)
    assert n_commands >= 14
