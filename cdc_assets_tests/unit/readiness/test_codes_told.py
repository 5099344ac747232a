"""Every code that a finding can have is in the guide, which says what to do about it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import cdc_assets

ROOT = Path(cdc_assets.__file__).parent
DOCS = ROOT.parent / "docs"


def _fields(node: ast.ClassDef) -> list[str]:
    annotated = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
    return [target.id for target in annotated if isinstance(target, ast.Name)]


def _takers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What takes a code: its name, and which of its arguments it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "code" in _fields(node):
            yield node.name, _fields(node).index("code")
        elif isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args]
            if "code" in names:
                yield node.name, names.index("code")


def _codes(tree: ast.Module, takers: dict[str, int]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            given = node.args[takers[name] :][:1] if name in takers else []
            given += [k.value for k in node.keywords if name in takers and k.arg == "code"]
        elif isinstance(node, ast.Assign):  # code, what = "…", …
            pairs = [(target, node.value) for target in node.targets]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
            given = [v for t, v in pairs if isinstance(t, ast.Name) and t.id == "code"]
        else:
            continue
        for one in given:
            for value in [one.body, one.orelse] if isinstance(one, ast.IfExp) else [one]:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def _given() -> set[str]:
    """The codes in the source: of findings, and of what findings are made from."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")]
    classes = {
        name: place
        for tree in trees
        for name, place in _takers(tree)
        if name[0].isupper()  # they are imported elsewhere; helpers are their module's own
    }
    return {code for tree in trees for code in _codes(tree, classes | dict(_takers(tree)))}


def _told() -> set[str]:
    """The codes that begin a row of the table of codes, or a point of the list of faults."""
    table = (DOCS / "operations.md").read_text(encoding="utf-8").split("| you see |")[0]
    faults = (DOCS / "faults/source.md").read_text(encoding="utf-8")
    heads = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    heads += re.findall(r"^- (`[^:]*):", faults, re.MULTILINE)
    return {code for head in heads for code in re.findall(r"`([a-z0-9_]+)`", head)}


def test_every_code_is_told() -> None:
    given = _given()
    # One of each kind: of Finding, of a helper, of what a finding is made from, of a variable.
    kinds = {"lake_table_gone", "table_mode", "publication_column_list", "transport_alerts"}
    assert given >= kinds
    assert sorted(given - _told()) == []


def test_no_code_is_told_that_nothing_has() -> None:
    assert sorted(_told() - _given()) == []
