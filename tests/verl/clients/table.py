"""The matrix as a table of `docs/verl.md`, between its two markers.

python tests/verl/clients/table.py          prints it
python tests/verl/clients/table.py --write  puts it into the page
"""

import sys
from pathlib import Path

from names import read

PAGE = Path(__file__).parents[3] / "docs" / "verl.md"
BEGIN, END = "<!-- matrix: tests/verl/clients/table.py --write -->", "<!-- end of the matrix -->"
KINDS = {
    "import": "Imports, of `module:name` under `verl.single_controller`",
    "mode": "Modes",
    "member": "Attributes and methods",
    "keyword": "Keywords",
    "environment": "Environment variables of workers",
    "actor": "Names of actors",
}


def table(matrix):
    """The lines of the table: for each kind of names a heading, and a row for each name."""
    order = [client["name"] for client in matrix["clients"]]
    lines = ["| client | source | commit or version |", "| --- | --- | --- |"]
    lines += [f"| {client['name']} | {client['source']} | {client['commit']} |" for client in matrix["clients"]]
    for kind, heading in KINDS.items():
        rows = [row for row in matrix["rows"] if row["kind"] == kind and not row["unsupported"]]
        lines += ["", f"### {heading}", "", "| name | what its callers rely on | used by |", "| --- | --- | --- |"]
        lines += [f"| `{row['name']}` | {row['relies']} | {shortened(row['clients'], order)} |" for row in rows]
    return "\n".join(lines)


def shortened(clients, order):
    """The clients by name, with runs of verl's versions as ``verl 0.1 to 0.5.0``, or ``all``."""
    if len(clients) == len(order):
        return "all"
    versions = [name for name in order if name.startswith("verl ")]
    found, run = [], []
    for name in [*versions, None]:
        if name in clients:
            run.append(name.removeprefix("verl "))
        elif run:
            found.append(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}")
            run = []
    forks = [name for name in clients if name not in versions]
    verls = ["verl " + ", ".join(found)] if found else []
    missing = [name for name in order if name not in versions and name not in clients]
    if len(missing) < len(forks) and len(missing) <= 4:
        return "; ".join([*verls, "all others but " + ", ".join(missing) if missing else "all others"])
    return "; ".join([*verls, *([", ".join(forks)] if forks else [])])


def written(page, matrix):
    """The page's text with the table of today between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(matrix)}\n\n{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(), read()))
    else:
        print(table(read()))
