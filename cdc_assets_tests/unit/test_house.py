"""The house: which folder may import which, held against the imports of every file.

The table in ``docs/architecture.md`` is made from here:
``python -m cdc_assets_tests.unit.test_house`` prints it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cdc_assets

ROOT = Path(cdc_assets.__file__).parent
TESTS = Path(__file__).parents[1]
# From the ground up. A room (a folder, or a module of the root) imports rooms of lower layers, and
# none of its own.
LAYERS = (
    ("messages",),
    ("compiled", "errors", "masks"),
    ("postgres", "process"),
    ("embedded",),
    ("config", "demo"),
    ("log",),
    ("lake", "pipeline", "poller", "relay"),
    ("maintenance", "readiness"),
    ("observe", "pins", "setup"),
    ("flusher", "materializer", "snapshot"),
    ("verify",),
    ("backfill", "consumers"),
    ("operations",),
    ("marks",),
    ("dagster",),
    ("assets", "cli", "components", "defs", "spark"),
    ("__main__", "definitions"),
)
FLOOR = {room: floor for floor, rooms in enumerate(LAYERS) for room in rooms}
DAGSTER = {"assets", "components", "dagster", "definitions", "defs"}
DEMO = {"cli", "dagster", "demo"}
MODULES, LINES, TEST_LINES = 12, 350, 400

Imports = Mapping[str, set[str]]


def name_of(path: Path, root: Path = ROOT) -> str:
    """``flusher/decode/rows.py`` as ``flusher.decode.rows``; an ``__init__`` as its folder."""
    return (
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix("__init__").strip(".")
    )


def imported(tree: ast.Module, *, lazily: bool = True) -> Iterator[str]:
    """Every module that a file imports; ``lazily``: not only when it is loaded."""
    for node in ast.walk(tree) if lazily else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def ours(trees: Mapping[str, ast.Module], *, lazily: bool = True) -> dict[str, set[str]]:
    """Of each module the modules of the package that it imports."""
    found = {}
    for name, tree in trees.items():
        theirs = {m.removeprefix("cdc_assets.") for m in imported(tree, lazily=lazily)}
        found[name] = {m for m in theirs if m in trees and m and m != name}
    return found


def room(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def upward(imports: Imports) -> list[str]:
    """What is imported from a higher layer, or from another room of the same one."""
    return [
        f"{module} imports {other}"
        for module, others in imports.items()
        for other in sorted(others)
        if module and room(module) != room(other) and FLOOR[room(module)] <= FLOOR[room(other)]
    ]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return sources()


def test_every_room_has_its_floor(trees: Mapping[str, ast.Module]) -> None:
    assert {room(module) for module in trees if module} == FLOOR.keys()


def test_nothing_imports_upward(trees: Mapping[str, ast.Module]) -> None:
    assert upward(ours(trees)) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("postgres.lsn", "from cdc_assets.log.store import LogStore"),
        ("snapshot.landing", "import cdc_assets.materializer.merge"),
        ("observe.status", "def lazy():\n    from cdc_assets.operations import drop"),
    ],
)
def test_a_planted_import_upward_is_found(
    trees: Mapping[str, ast.Module], module: str, line: str
) -> None:
    assert upward(ours({**trees, module: ast.parse(line)}))


def test_no_folder_imports_another_one_in_a_circle(trees: Mapping[str, ast.Module]) -> None:
    """A folder's own modules count one by one if it has folders: its floor, and its rooms."""
    parents = {m.rpartition(".")[0] for m in trees if (ROOT / m.replace(".", "/")).is_dir()}

    def place(module: str) -> str:
        folder = module if (ROOT / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]
        return module if folder in parents else folder

    graph: dict[str, set[str]] = {}
    for module, others in ours({m: without_types(tree) for m, tree in trees.items()}).items():
        graph.setdefault(place(module), set()).update({place(o) for o in others} - {place(module)})
    circle(graph)


def test_no_module_imports_itself_by_way_of_others(trees: Mapping[str, ast.Module]) -> None:
    circle(ours(trees, lazily=False))


def without_types(tree: ast.Module) -> ast.Module:
    """``tree`` without what only a type checker imports."""
    body = [
        n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test))
    ]
    return ast.Module(body, [])


def circle(graph: Imports) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def foreign(trees: Mapping[str, ast.Module], *packages: str, lazily: bool = True) -> set[str]:
    """The modules that import one of these packages of others."""
    return {
        module
        for module, tree in trees.items()
        if {n.split(".")[0] for n in imported(tree, lazily=lazily)} & set(packages)
    }


def test_only_what_dagster_loads_imports_dagster(trees: Mapping[str, ast.Module]) -> None:
    assert {room(module) for module in foreign(trees, "dagster")} <= DAGSTER


def test_the_demo_is_needed_by_nothing_else(trees: Mapping[str, ast.Module]) -> None:
    needed = {room(m) for m, others in ours(trees).items() if "demo" in map(room, others)}
    assert needed <= DEMO


@pytest.mark.parametrize(
    ("program", "without", "lazily"),
    [
        ("flusher.flusher", {"pyspark"}, True),
        ("flusher.decoder_process.loop", {"pyspark", "pydantic", "psycopg", "yaml"}, False),
        ("cli.main", {"pyspark", "pyiceberg", "numba"}, False),  # a command imports what it needs
        ("components", {"numba"}, False),
        ("snapshot.coordinator", {"numba"}, False),
    ],
)
def test_a_program_takes_nothing_heavy_along(
    trees: Mapping[str, ast.Module], program: str, without: set[str], lazily: bool
) -> None:
    trees = {m: without_types(tree) for m, tree in trees.items()}
    imports, reached, due = ours(trees, lazily=lazily), set[str](), [program]
    while due:
        module = due.pop()
        if module not in reached:
            reached.add(module)
            parents = (module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1))
            due += [*imports[module], *parents]
    found = {m: foreign({m: trees[m]}, *without, lazily=lazily) for m in reached}
    assert [module for module, heavy in found.items() if heavy] == []


def test_a_folder_is_taken_in_at_a_glance() -> None:
    folders = [ROOT, *(path for path in ROOT.rglob("*/") if any(path.glob("*.py")))]
    crowded = {
        folder.name: count
        for folder in folders
        if (count := sum(path.stem != "__init__" for path in folder.glob("*.py"))) > MODULES
    }
    assert crowded == {}
    packages = [folder for folder in folders if (folder / "__init__.py").exists()]
    assert [folder for folder in packages if not sentence(folder)] == []


def test_a_file_has_one_idea() -> None:
    assert longer(ROOT, LINES) == set()
    assert longer(TESTS, TEST_LINES) == set()


def test_a_test_lies_in_the_room_of_what_it_tests() -> None:
    folders = [path for kind in ("unit", "integration") for path in (TESTS / kind).glob("*/")]
    rooms = {folder.name for folder in folders if any(folder.glob("*.py"))}
    assert rooms - FLOOR.keys() == {"cluster", "machines"}  # of all rooms, on machines


def longer(root: Path, lines: int) -> set[str]:
    """The files of more than so many lines."""
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if path.read_text().count("\n") > lines
    }


def sentence(folder: Path) -> str:
    """What a folder, or a module, says of itself first."""
    path = folder / "__init__.py" if folder.is_dir() else folder
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def table() -> str:
    """The rooms from the ground up, as the architecture's page shows them."""
    rows = ["| layer | room | what it is |", "|---|---|---|"]
    for floor, rooms in enumerate(LAYERS):
        for name in rooms:
            folder, module = ROOT / name, ROOT / f"{name}.py"
            what = (f"`{name}/`", folder) if folder.is_dir() else (f"`{name}.py`", module)
            rows.append(f"| {floor} | {what[0]} | {sentence(what[1])} |")
    return "\n".join(rows)


def test_the_architecture_page_shows_this_house() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    found = re.search(r"^\| layer \| room .*?(?=\n\n)", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    assert found[0] == table()


if __name__ == "__main__":
    print(table())  # noqa: T201 - for the page
