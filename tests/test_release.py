"""What a release needs is there and agrees; `make dist` builds it and tries the wheel."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import bandmaster as bm
from bandmaster.cli import main

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)")


def test_the_version_is_that_of_the_first_heading_of_the_changelog_and_of_the_citation():
    first = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    version, date = HEADING.fullmatch(first).groups()
    assert version == bm.__version__
    assert f"\nversion: {version}\ndate-released: {date}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_installed_package_and_the_command_say_the_same_version(capsys):
    assert importlib.metadata.version("bandmaster") == bm.__version__
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"bandmaster {bm.__version__}\n"


def test_the_base_install_needs_numpy_and_cloudpickle_alone():
    needed = [name for name in importlib.metadata.requires("bandmaster") if "extra ==" not in name]
    assert sorted(re.split("[<>=]", name)[0] for name in needed) == ["cloudpickle", "numpy"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_classifiers_name_the_pythons_that_the_wheel_is_tried_on():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [match[1] for line in project["classifiers"] if (match := re.fullmatch(r".*:: (3\.\d+)", line))]
    assert named == [f"3.{minor}" for minor in dist().MINORS]
    assert project["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("minor", [10, 11, 12, 13, 14])
def test_the_constraints_have_one_version_of_each_package_which_installs_on_this_python(minor):
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        pin = None if line.startswith("#") else Requirement(line)
        if pin is not None and (pin.marker is None or pin.marker.evaluate({"python_version": f"3.{minor}"})):
            assert pins.setdefault(canonicalize_name(pin.name), pin) is pin, "it has two versions"
    assert {"numpy", "cloudpickle", "ray", "torch"} <= set(pins)
    for found in importlib.metadata.distributions():  # others have no say here: PyPI alone knows what they need
        pin = pins.get(canonicalize_name(found.name))
        if pin is not None and pin.specifier.contains(found.version) and "Requires-Python" in found.metadata:
            needed = SpecifierSet(found.metadata["Requires-Python"])
            assert needed.contains(f"3.{minor}.5"), f"{pin} needs Python {needed}"


def test_a_version_without_an_entry_in_the_changelog_is_not_released():
    tool = dist()
    tool.check_changelog(bm.__version__)
    with pytest.raises(tool.Failed, match=r"'## 9\.9\.9 - YEAR-MONTH-DAY'"):
        tool.check_changelog("9.9.9")


def test_a_distribution_with_stray_files_or_paths_of_the_machine_is_not_released():
    tool = dist()
    good = {"bandmaster/__init__.py": b"", "about/METADATA": b""}
    tool.check_files("wheel", good, {"bandmaster/__init__.py"}, ("about/",))
    for more, said in [
        ({"bandmaster/scratch.py": b""}, "scratch"),
        ({"about/RECORD": bytes(ROOT)}, r"this folder in \['about/RECORD'\]"),
    ]:
        with pytest.raises(tool.Failed, match=said):
            tool.check_files("wheel", good | more, {"bandmaster/__init__.py"}, ("about/",))
    with pytest.raises(tool.Failed, match=r"lacks \['bandmaster/py.typed'\]"):
        tool.check_files("wheel", good, {"bandmaster/__init__.py", "bandmaster/py.typed"}, ("about/",))


def dist():
    """The program behind `make dist`."""
    spec = importlib.util.spec_from_file_location("dist", ROOT / "tools/dist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
