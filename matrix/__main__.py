"""Write what follows from ``torch.toml``: ``python -m matrix``; ``github`` prints the CI matrix."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from matrix import HERE, ROOT, Matrix, Row, read
from matrix.results import Result, load, tree_hash

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = "<!-- support table: written by `python -m matrix` -->\n"
END = "<!-- end of the support table -->\n"


def constraints(row: Row) -> str:
    """Return the text of a row's constraints file."""
    lines = (f"torch=={row.torch}", *row.pins)
    return f"# Tested with torch {row.minor}; from matrix/torch.toml\n" + "\n".join(lines) + "\n"


def cell(result: Result | None, tree: str) -> str:
    """Say in a few words what is known of one session."""
    if result is None:
        return "not run"
    if result.tree != tree:
        return "stale"
    counts = f"{result.passed} passed, {result.skipped} skipped"
    return f"**{result.failed} failed**, {counts}" if result.failed else counts


def table(matrix: Matrix, results: dict[str, Result], tree: str) -> str:
    """Return the support table: a line per torch minor, a cell per tested Python."""
    lines = [
        f"Package tree `{tree}`. *stale*: the package has changed since that run.",
        "",
        "| torch | tested on | oldest Python | newest Python |",
        "|---|---|---|---|",
    ]
    for row in matrix.rows.values():
        names = {python: name for name, python in row.sessions.items()}
        main = results.get(row.minor)
        ran_on = ".".join(main.python.split(".")[:2]) if main else row.python
        cells = [f"{row.torch}", f"Python {ran_on}: {cell(main, tree)}"]
        for python in row.pythons:
            same = python == row.python
            found = "as tested" if same else cell(results.get(names[python]), tree)
            cells.append(f"{python}: {found}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def insert(readme: str, text: str) -> str:
    """Return README with ``text`` as its support table."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def github(matrix: Matrix) -> str:
    """Return the job matrix for a workflow, one job per session."""
    jobs = [
        {"session": f"tests-{name}", "python": python}
        for row in matrix.rows.values()
        for name, python in row.sessions.items()
    ]
    return json.dumps({"include": jobs})


def generate(root: Path = ROOT) -> None:
    """Write the constraints files and README's table."""
    matrix = read()
    folder = HERE / "constraints"
    folder.mkdir(exist_ok=True)
    for stray in set(folder.glob("*.txt")) - {row.constraints for row in matrix.rows.values()}:
        stray.unlink()
    for row in matrix.rows.values():
        row.constraints.write_text(constraints(row))
    readme = root / "README.md"
    readme.write_text(insert(readme.read_text(), table(matrix, load(), tree_hash())))


if __name__ == "__main__":
    if sys.argv[1:] == ["github"]:
        print(f"matrix={github(read())}")
    else:
        generate()
