"""Transactions over the tables of a plan: what clients of the source do.

A model of the columns is kept so that statements make sense after DDL; whether a statement succeeds
is not known and doesn't matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from cdc_assets_tests.oracle.plan import Statement, Table, name
from cdc_assets_tests.oracle.values import ODD, PLAIN, literal

Transaction = dict[str, Any]
"""``statements``, and ``ends``: commit or rollback."""

_WIDER = {
    "smallint": "integer",
    "integer": "bigint",
    "real": "double precision",
    "numeric(10,2)": "numeric(12,2)",
    "varchar(200)": "text",
}


class Traffic:
    """Makes transactions; ``odd``: the chance of values that the lake can't hold."""

    def __init__(
        self, rnd: random.Random, tables: list[Table], *, odd: float, keys: bool, ddl: bool
    ) -> None:
        self.rnd, self.tables, self.odd, self.ddl = rnd, tables, odd, ddl
        self.odd_keys = keys
        self.columns = [dict(table.columns) for table in tables]
        # Keys meet again: rows are deleted and inserted anew, and collide.
        self.keys = [
            {c: [self._key(table.columns[c]) for _ in range(12)] for c in table.key}
            for table in tables
        ]
        self.added = 0

    def first(self) -> list[Transaction]:
        """What is there before anything is pinned: some pages a table."""
        found = []
        for t, table in enumerate(self.tables):
            statements = [self._insert(t, count=self.rnd.choice((3, 20))) for _ in range(3)]
            if (column := self._number(t)) and self.rnd.random() < 0.7:
                row = self._row(t)
                for c in table.columns:
                    if table.columns[c] == "text" and c not in table.key:
                        row[c] = "filler " * 40
                statements.append(self._many(t, column, row, 1000, self.rnd.choice((40, 120))))
            if table.child:
                statements.append(self._into_child(t))
            found.append({"statements": statements, "ends": "commit"})
        return found

    def some(self, only: int | None = None) -> list[Transaction]:
        """A few transactions, of one table or several."""
        return [self.transaction(only) for _ in range(self.rnd.choice((1, 2, 4, 8)))]

    def interleaved(self) -> dict[str, Any]:
        """Two or three sessions, statement by statement, and whose turn it is."""
        sessions = [self.transaction() for _ in range(self.rnd.choice((2, 3)))]
        turns = [i for i, s in enumerate(sessions) for _ in range(len(s["statements"]) + 1)]
        self.rnd.shuffle(turns)
        return {"sessions": sessions, "turns": turns}

    def transaction(self, only: int | None = None) -> Transaction:
        rnd = self.rnd
        statements: list[Statement] = []
        for _ in range(rnd.choice((1, 1, 2, 3, 6))):
            t = rnd.randrange(len(self.tables)) if only is None else only
            statements.append(self.statement(t))
        if rnd.random() < 0.25:
            at = rnd.randrange(len(statements) + 1)
            statements.insert(at, {"do": "savepoint"})
            statements.insert(
                rnd.randrange(at + 1, len(statements) + 1),
                {"do": rnd.choice(("rollback to", "rollback to", "release"))},
            )
        return {"statements": statements, "ends": rnd.choice(("commit",) * 6 + ("rollback",))}

    def statement(self, t: int) -> Statement:
        rnd, table = self.rnd, self.tables[t]
        nth, count = rnd.randrange(15), rnd.choice((1, 1, 2, 10))
        plain = [c for c in self.columns[t] if c not in table.key]
        choices: list[tuple[float, Callable[[], Statement]]] = [
            (4, lambda: self._insert(t)),
            (4, lambda: self._update(t, plain, nth, count)),
            (2, lambda: {"do": "delete", "t": t, "nth": nth, "count": count}),
            (1, lambda: {"do": "again", "t": t, "nth": nth, "count": count}),
            (0.25, lambda: {"do": "truncate", "t": t}),
        ]
        if plain:
            choices.append((0.5, lambda: {"do": "touch", "t": t, "column": rnd.choice(plain)}))
        if table.key:
            choices += [
                (1, lambda: {**self._insert(t), "do": "upsert"}),
                (1.5, lambda: self._update(t, table.key, nth, 1)),
                (1, lambda: self._swap(t, nth)),
            ]
        if (column := self._number(t)) is not None:
            first = rnd.randrange(2000, 3000)
            size = rnd.choice((20, 20, 400))
            choices.append((0.4, lambda: self._many(t, column, self._row(t), first, size)))
        if not table.refused and table.settings.get("columns") is None:
            choices.append((6 if self.ddl else 0.25, lambda: self._ddl(t, plain)))
        return rnd.choices([c for _, c in choices], [w for w, _ in choices])[0]()

    # --- parts ---

    def _key(self, kind: str) -> str:
        odd = 0.5 if self.odd_keys and kind in ODD else 0.0
        return literal(self.rnd, kind, odd, nulls=0) or ""

    def _row(self, t: int) -> dict[str, Any]:
        table, row = self.tables[t], dict[str, Any]()
        for c, kind in self.columns[t].items():
            if c in table.key:
                row[c] = self.rnd.choice(self.keys[t][c])
            elif c in table.required:
                row[c] = str(self.rnd.randrange(10**12))
            elif c in table.external and self.rnd.random() < 0.5:
                row[c] = f"{self.rnd.randrange(99)} " + "long " * 800
            else:
                row[c] = literal(self.rnd, kind, 0.5 if not table.key else self.odd)
        return row

    def _insert(self, t: int, count: int | None = None) -> Statement:
        rows = [self._row(t) for _ in range(count or self.rnd.choice((1, 1, 2, 5)))]
        if not self.tables[t].key and self.rnd.random() < 0.6:
            rows += rows[: self.rnd.choice((1, 2))]  # copies of a row
        if self.tables[t].key:
            rows = list({str([r[c] for c in self.tables[t].key]): r for r in rows}.values())
        return {"do": "insert", "t": t, "rows": rows}

    def _update(self, t: int, among: list[str], nth: int, count: int) -> Statement:
        row = self._row(t)
        chosen = self.rnd.sample(among, k=min(len(among), self.rnd.choice((1, 1, 2))))
        return {"do": "update", "t": t, "set": {c: row[c] for c in chosen}, "nth": nth,
                "count": count}  # fmt: skip

    def _swap(self, t: int, nth: int) -> Statement:
        column = self.rnd.choice(self.tables[t].key)
        over = self._key(self.tables[t].columns[column])
        return {"do": "swap", "t": t, "column": column, "nth": nth, "over": over}

    def _number(self, t: int) -> str | None:
        """A key column that a series can fill."""
        found = [c for c in self.tables[t].key if self.columns[t].get(c) in ("integer", "bigint")]
        return found[0] if found else None

    def _many(self, t: int, column: str, row: dict[str, Any], first: int, count: int) -> Statement:
        return {"do": "many", "t": t, "column": column, "row": row, "first": first, "count": count}

    def _into_child(self, t: int) -> Statement:
        child = self.tables[t].relations()[-1]
        text = f"insert into {child} select * from only {self.tables[t].sql} limit 3"
        return {"do": "sql", "t": t, "kind": "rows of a child", "text": text}

    def _ddl(self, t: int, plain: list[str]) -> Statement:
        """One of the supported changes of a table's columns."""
        rnd, table, columns = self.rnd, self.tables[t], self.columns[t]
        free = [c for c in plain if c not in table.external and c not in table.generated]
        numbers = [c for c in free if columns[c] in _WIDER]
        kind = rnd.choice(("add", "add default", "drop", "rename", "widen"))
        if kind in ("drop", "rename") and len(free) > 1:
            column = rnd.choice(free)
            was = columns.pop(column)
            table.touched.append(column)
            if kind == "drop":
                return self._sql(t, "drop column", f"drop column {name(column)}")
            self.added += 1
            new = f"renamed {self.added}"
            columns[new] = was
            table.touched.append(new)
            return self._sql(t, "rename column", f"rename {name(column)} to {name(new)}")
        if kind == "widen" and numbers:
            column = rnd.choice(numbers)
            columns[column] = _WIDER[columns[column]]
            table.touched.append(column)
            return self._sql(t, "widen", f"alter {name(column)} type {columns[column]}")
        self.added += 1
        column, of = f"added {self.added}", rnd.choice(list(PLAIN))
        columns[column] = of
        table.touched.append(column)
        text = f"add column {name(column)} {of}"
        if kind == "add default":
            value = literal(rnd, of, 0, 0) or ""
            escaped = value.replace("\\", "\\\\").replace("'", "''")
            return self._sql(t, "add column, default", f"{text} default e'{escaped}'")
        return self._sql(t, "add column", text)

    def _sql(self, t: int, kind: str, what: str) -> Statement:
        text = f"alter table {self.tables[t].sql} {what}"
        return {"do": "sql", "t": t, "kind": kind, "text": text}
