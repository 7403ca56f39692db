"""Builds the distributions, checks them, and tries the wheel on every supported Python that is at hand.

Run it by ``make dist``. Each Python gets an empty environment and an empty home, outside the checkout: first the wheel
alone, with which the quickstart has to run, then what the tests need, with which a selection of them has to pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence, Set
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
MINORS = (10, 11, 12, 13)  # of the Pythons 3.x that are supported
TESTS = ("mesh", "transfer", "placement", "handle_arithmetic", "contract", "lane", "waiting", "testing", "pool_threads")
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis", "psutil")
USERS_READ = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md"}
IN_SDIST = {*USERS_READ, "MANIFEST.in", "PKG-INFO", "pyproject.toml", "setup.cfg"}  # besides the package
CHOICE = "not ray and not Ray and not torch and not placement_group"  # what needs no more than that
TIMEOUT_S = 900.0


class Failed(Exception):
    """A step of the release failed; the text says which and why."""


def main() -> int:
    """Build, check and try; the exit status."""
    try:
        version = declared_version()
        check_changelog(version)
        wheel = build()
        check_wheel(wheel, version)
        check_sdist(version)
    except Failed as error:
        print(f"make dist: {error}", file=sys.stderr)
        return 1
    lines = [("Python", "installed", "quickstart", f"tests ({', '.join(TESTS)})")]
    for minor in MINORS:
        lines.append(tried(minor, wheel))
        print("  ".join(lines[-1]), flush=True)
    print(f"\n{wheel.name}\n{table(lines)}")
    return 1 if any("failed" in cell for line in lines for cell in line) else 0


# --- what is released ---


def declared_version() -> str:
    """The version, as the package says it."""
    found: dict[str, str] = {}
    exec((ROOT / "src/bandmaster/platform/version.py").read_text(), found)
    return found["VERSION"]


def check_changelog(version: str) -> None:
    """Raise unless the first heading of the changelog is that of the version, with its date."""
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    if not headings or not headings[0].startswith(f"## {version} - "):
        raise Failed(
            f"the version is {version}, but CHANGELOG.md begins with {headings[:1]}; give it a heading "
            f"'## {version} - YEAR-MONTH-DAY', or change src/bandmaster/platform/version.py"
        )


def build() -> Path:
    """Make the sdist, and the wheel from the sdist; the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], "the build")
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(DIST.iterdir()))], "twine check")
    (wheel,) = DIST.glob("*.whl")
    return wheel


def check_wheel(wheel: Path, version: str) -> None:
    """Raise unless the wheel has the package, all of it, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    about = f"bandmaster-{version}.dist-info/"
    metadata = Parser().parsestr(files.get(f"{about}METADATA", b"").decode())
    check_files("wheel", files, {name.removeprefix("src/") for name in tracked("src/bandmaster")}, (about,))
    if f"{about}licenses/LICENSE" not in files:
        raise Failed("the wheel lacks the licence")
    if metadata["Version"] != version:
        raise Failed(f"the wheel's version is {metadata['Version']}, the package's {version}")
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    if sorted(requirement.split(">")[0] for requirement in base) != ["cloudpickle", "numpy"]:
        raise Failed(f"the base install has to need numpy and cloudpickle alone, but needs {base}")


def check_sdist(version: str) -> None:
    """Raise unless the sdist has what the wheel is built from, what users read, and nothing else."""
    with tarfile.open(DIST / f"bandmaster-{version}.tar.gz") as archive:
        entries = [entry for entry in archive.getmembers() if entry.isfile()]
        files = {entry.name.partition("/")[2]: archive.extractfile(entry).read() for entry in entries}
    check_files("sdist", files, tracked("src/bandmaster") | IN_SDIST, ("src/bandmaster.egg-info/",))


def check_files(what: str, files: Mapping[str, bytes], wanted: Set[str], generated: tuple[str, ...]) -> None:
    """Raise unless a distribution has the wanted files and besides them only generated ones, and names no folder here.

    Args:
        what: What messages call the distribution.
        files: What it has, by name.
        wanted: The names that it has to have.
        generated: How the names of generated files begin.
    """
    missing, others = wanted - set(files), {name for name in set(files) - wanted if not name.startswith(generated)}
    here = os.fspath(ROOT).encode()
    with_path = [name for name, content in files.items() if here in content]
    if missing or others or with_path:
        raise Failed(
            f"the {what} lacks {sorted(missing)}, has {sorted(others)}, which git does not know or which do not belong "
            f"into it, and names this folder in {sorted(with_path)}"
        )


def tracked(folder: str) -> set[str]:
    """The files below a folder that git knows: what lies there besides them is not released."""
    return set(run(["git", "-C", str(ROOT), "ls-files", folder], "git ls-files").splitlines())


# --- trying it ---


def tried(minor: int, wheel: Path) -> tuple[str, ...]:
    """What the table says of one Python."""
    python = interpreter(minor)
    if python is None:
        return (f"3.{minor}", f"not at hand: no python3.{minor} on PATH or in pyenv", "-", "-")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        cells = [full_version(python)]
        for step in (install, quickstart, tests):
            try:
                cells.append(step(python, wheel, place))
            except Failed as error:
                print(error, file=sys.stderr)
                cells.append("failed")
                break
        return tuple([*cells, "-", "-"][:4])


def interpreter(minor: int) -> str | None:
    """The path of a Python 3.``minor``; None if there is none."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [*sorted(root.glob(f"versions/3.{minor}.*/bin/python"), reverse=True)]
    on_path = shutil.which(f"python3.{minor}")
    for candidate in ([on_path] if on_path else []) + [str(path) for path in candidates]:
        done = subprocess.run(
            [candidate, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True
        )
        if done.stdout.strip() == str(minor):
            return candidate
    return None


def full_version(python: str) -> str:
    """Such as ``3.12.1``."""
    program = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def install(python: str, wheel: Path, place: Path) -> str:
    """Put the wheel into an empty environment."""
    run([python, "-m", "venv", str(place / "env")], "making an environment")
    pip(place, str(wheel))
    python = str(place / "env/bin/python")
    imported = run([python, "-c", "import bandmaster; print(bandmaster.__file__)"], "the import", place).strip()
    if not Path(imported).is_relative_to(place / "env"):
        raise Failed(f"Python imports {imported} instead of the installed wheel")
    freeze = run([python, "-m", "pip", "freeze", "--quiet"], "pip freeze")
    installed = [line.split(" @")[0] for line in freeze.splitlines()]
    return ", ".join(name for name in installed if not name.startswith("bandmaster"))


def quickstart(python: str, wheel: Path, place: Path) -> str:
    """Run the quickstart with the wheel alone."""
    script = shutil.copy(ROOT / "examples/quickstart.py", place)
    run([str(place / "env/bin/python"), script], "the quickstart", place)
    run([str(place / "env/bin/bandmaster"), "doctor", "--quick"], "bandmaster doctor", place, is_status_1_fine=True)
    return "ran"


def tests(python: str, wheel: Path, place: Path) -> str:
    """Run the selection of the tests against the installed wheel."""
    pip(place, *FOR_TESTS)
    shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", place)
    files = [f"tests/test_{name}.py" for name in TESTS]
    pytest = [str(place / "env/bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOICE]
    said = run([*pytest, *files], "the tests", place)
    return said.strip().splitlines()[-1].strip("= ")


def pip(place: Path, *requirements: str) -> None:
    """Install something into the environment of a place."""
    command = [str(place / "env/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*command, *requirements], f"installing {', '.join(requirements)}")


def run(command: Sequence[str], what: str, place: Path | None = None, is_status_1_fine: bool = False) -> str:
    """Run a command, in a place whose home is empty if there is one; its output.

    Raises:
        Failed: It did not succeed, or took longer than `TIMEOUT_S`.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if place is not None:
        (place / "home").mkdir(exist_ok=True)
        environment["HOME"] = str(place / "home")
    try:
        done = subprocess.run(
            command,
            cwd=place or ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{what} did not end within {TIMEOUT_S:g} s") from error
    if done.returncode and not (is_status_1_fine and done.returncode == 1):
        raise Failed(f"{what} failed with status {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def table(lines: Sequence[Sequence[str]]) -> str:
    """Lines with equal columns."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
