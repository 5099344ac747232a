"""A failing plan made smaller, for as long as it fails the same way.

Coarse first, because each try plays the plan: tables, then actions by halves, then transactions,
statements, rows and columns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from cdc_assets_tests.oracle.plan import Action, Plan, Statement

Fails = Callable[[Plan], bool]


def shrink(plan: Plan, fails: Fails, enough: Callable[[], bool]) -> Plan:
    """The smallest plan found that still ``fails``, until nothing helps or it is ``enough``."""
    for candidates in (_tables, _actions, _transactions, _statements, _columns):
        shrunk = True
        while shrunk and not enough():
            shrunk = False
            for smaller in candidates(plan):
                if enough():
                    break
                if fails(smaller):
                    plan, shrunk = smaller, True
                    break
    return plan


def _tables(plan: Plan) -> Iterator[Plan]:
    for number in range(len(plan.tables)):
        if len(plan.tables) > 1:
            yield without_table(plan, number)


def _actions(plan: Plan) -> Iterator[Plan]:
    """Without a half of what comes after the first action, a quarter, …, one."""
    size = (len(plan.actions) - 1 + 1) // 2
    while size:
        for at in range(len(plan.actions) - size, -1, -size):
            smaller = copy.deepcopy(plan)
            del smaller.actions[at : at + size]
            yield smaller
        size //= 2


def _transactions(plan: Plan) -> Iterator[Plan]:
    for number, action in enumerate(plan.actions):
        for at in range(len(action.get("transactions", ()))):
            smaller = copy.deepcopy(plan)
            del smaller.actions[number]["transactions"][at]
            yield smaller


def _statements(plan: Plan) -> Iterator[Plan]:
    for number, action in enumerate(plan.actions):
        for which, transaction in enumerate(_in(action)):
            for at, statement in enumerate(transaction["statements"]):
                smaller = copy.deepcopy(plan)
                del _in(smaller.actions[number])[which]["statements"][at]
                yield smaller
                if len(statement.get("rows", ())) > 1:
                    smaller = copy.deepcopy(plan)
                    rows = _in(smaller.actions[number])[which]["statements"][at]["rows"]
                    del rows[len(rows) // 2 :]
                    yield smaller


def _columns(plan: Plan) -> Iterator[Plan]:
    for number, table in enumerate(plan.tables):
        for column in table.columns:
            if column not in (*table.key, *table.required) and len(table.columns) > 1:
                yield without_column(plan, number, column)


def without_table(plan: Plan, number: int) -> Plan:
    """The plan without a table and all that names it."""
    smaller = copy.deepcopy(plan)
    del smaller.tables[number]

    def moved(t: int) -> int:
        return t - (t > number)

    kept: list[Action] = []
    for action in smaller.actions:
        if action.get("table") == number and action["do"] != "pause":
            continue
        if isinstance(action.get("table"), int):
            action["table"] = moved(action["table"])
        if "tables" in action:
            action["tables"] = [moved(t) for t in action["tables"] if t != number]
            if not action["tables"]:
                continue
        for transaction in _in(action):
            transaction["statements"] = [
                {**s, "t": moved(s["t"])} if "t" in s else s
                for s in transaction["statements"]
                if s.get("t") != number
            ]
        kept.append(action)
    smaller.actions = kept
    return smaller


def without_column(plan: Plan, number: int, column: str) -> Plan:
    """The plan without a column that isn't of the key."""
    smaller = copy.deepcopy(plan)
    table = smaller.tables[number]
    del table.columns[column]
    table.external = [c for c in table.external if c != column]
    if table.generated:
        table.generated = {}
    rules = table.settings.get("columns", {})
    rules.get("types", {}).pop(column, None)
    if column in rules.get("exclude", ()):
        del rules["exclude"]

    def kept(statement: Statement) -> bool:
        if statement.get("t") != number:
            return True
        for row in (*statement.get("rows", ()), statement.get("set", {}), statement.get("row", {})):
            row.pop(column, None)
        return statement.get("column") != column and statement.get("set") != {}

    for action in smaller.actions:
        for transaction in _in(action):
            transaction["statements"] = [s for s in transaction["statements"] if kept(s)]
    return smaller


def _in(action: Action) -> list[dict[str, Any]]:
    """The transactions of an action, whichever way they are run."""
    found: list[dict[str, Any]] = action.get("transactions", [])
    if "interleaved" in action:
        found = action["interleaved"]["sessions"]
    return found
