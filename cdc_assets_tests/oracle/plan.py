"""A plan: what a seed stands for, as plain data that can be written down, shortened and replayed.

A *table* is described, not spelled, so that a column can be taken out of everything that names it.
A *statement* is a mapping with ``do`` and, but for savepoints, the number of its table ``t``; an
*action* is a mapping with ``do``. :func:`sql_of` spells statements.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

Statement = dict[str, Any]
Action = dict[str, Any]


def name(text: str) -> str:
    """An identifier as SQL spells it."""
    return '"' + text.replace('"', '""') + '"'


def quoted(text: str | None) -> str:
    """A literal as SQL spells it."""
    if text is None:
        return "null"
    return ("e'" if "\\" in text else "'") + text.replace("\\", "\\\\").replace("'", "''") + "'"


@dataclass(slots=True)
class Table:
    """One table: ``identity`` is default, full, index or nothing; ``parts`` are its partitions.

    ``required`` are columns that are never NULL, ``external`` those that are never compressed,
    ``touched`` those that DDL of the plan adds, drops or alters. ``refused``: that the product is
    to refuse it by name.
    """

    schema: str
    name: str
    columns: dict[str, str]
    key: list[str]
    identity: str = "default"
    parts: list[dict[str, Any]] = field(default_factory=list)
    part_by: str = ""
    child: bool = False
    unlogged: bool = False
    required: list[str] = field(default_factory=list)
    generated: dict[str, str] = field(default_factory=dict)
    external: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    refused: bool = False

    @property
    def sql(self) -> str:
        return f"{name(self.schema)}.{name(self.name)}"

    @property
    def mode(self) -> str:
        return str(self.settings.get("mode", "mirror"))

    @property
    def only(self) -> bool:
        """Whether the rows of tables that inherit from it aren't its own."""
        return bool(self.settings.get("only", False))

    @property
    def policy(self) -> str:
        return str(self.settings.get("columns", {}).get("unrepresentable", "null"))

    @property
    def inserts_only(self) -> bool:
        """Whether Postgres can't tell changed rows apart, so that only inserts are followed."""
        identities = {self.identity, *(part["identity"] for part in self.parts)}
        return self.mode == "append" and "nothing" in identities

    def relations(self) -> list[str]:
        """It, and what its rows may be in besides."""
        parts = [f"{name(self.schema)}.{name(part['name'])}" for part in self.parts]
        children = [f"{name(self.schema)}.{name(self.name + '_child')}"] if self.child else []
        return [self.sql, *parts, *children]

    def create(self) -> list[str]:
        """Its DDL."""
        key = {*self.key, *self.required}
        columns = [
            f"{name(c)} {kind}{' not null' if c in key else ''}" for c, kind in self.columns.items()
        ] + [f"{name(c)} {what} stored" for c, what in self.generated.items()]
        if self.key and self.identity != "index":
            columns.append(f"primary key ({', '.join(name(c) for c in self.key)})")
        found = [f"create schema if not exists {name(self.schema)}"]
        by = f" partition by {self.part_by}" if self.parts else ""
        kind = "unlogged table" if self.unlogged else "table"
        found.append(f"create {kind} {self.sql} ({', '.join(columns)}){by}")
        for part in self.parts:
            found.append(
                f"create table {name(self.schema)}.{name(part['name'])} partition of {self.sql}"
                f" {part['bound']}"
            )
            leaf, identity = f"{name(self.schema)}.{name(part['name'])}", part["identity"]
            if identity.startswith("using index"):
                listed = ", ".join(name(c) for c in self.required)
                found.append(
                    f"create unique index {name(part['name'] + '_ri')} on {leaf} ({listed})"
                )
            if identity != "default":
                found.append(f"alter table {leaf} replica identity {identity}")
        if self.identity == "index":
            index = name(f"{self.name[:40]}_ri")
            listed = ", ".join(name(c) for c in self.key)
            found.append(f"create unique index {index} on {self.sql} ({listed})")
            found.append(f"alter table {self.sql} replica identity using index {index}")
        elif self.identity != "default":
            found.append(f"alter table {self.sql} replica identity {self.identity}")
        if self.child:
            found.append(
                f"create table {name(self.schema)}.{name(self.name + '_child')} ()"
                f" inherits ({self.sql})"
            )
        found += [
            f"alter table {relation} alter {name(c)} set storage external"
            for c in self.external
            for relation in self.relations()
        ]
        return found


@dataclass(slots=True)
class Plan:
    """``database``: settings of the source's database. ``apart``: the log is in another one.

    ``odd_keys``: keys may have values that the lake's type can't hold.
    """

    seed: int
    tables: list[Table]
    actions: list[Action]
    database: dict[str, str] = field(default_factory=dict)
    apart: bool = False
    odd_keys: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        """JSON with a line an action, for people and :meth:`read`."""
        head = asdict(self)
        actions = ",\n  ".join(json.dumps(action) for action in head.pop("actions"))
        tables = ",\n  ".join(json.dumps(table) for table in head.pop("tables"))
        rest = json.dumps(head)[1:-1]
        return f'{{{rest},\n "tables": [\n  {tables}],\n "actions": [\n  {actions}]}}\n'

    @classmethod
    def parse(cls, text: str) -> Self:
        data = json.loads(text)
        data["tables"] = [Table(**table) for table in data["tables"]]
        return cls(**data)

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.parse(path.read_text())


def sql_of(statement: Statement, tables: list[Table]) -> str:
    """The statement's SQL. Rows are chosen by their content, so that no state is needed."""
    do = statement["do"]
    if do in ("savepoint", "rollback to", "release"):
        return f"{do} {'savepoint ' if do == 'release' else ''}theirs"
    table = tables[statement["t"]]
    if do == "sql":
        return str(statement["text"])
    if do == "truncate":
        return f"truncate {table.sql}"
    if do in ("insert", "upsert"):
        return _insert(statement, table)
    if do == "many":
        return _many(statement, table)
    if do == "touch":
        column = name(statement["column"])
        return f"update {table.sql} set {column} = {column}"
    chosen = (
        f"(tableoid, ctid) in (select tableoid, ctid from {table.sql} as r order by md5(r::text),"
        f" r::text offset {statement.get('nth', 0)} limit {statement.get('count', 1)})"
    )
    if do == "delete":
        return f"delete from {table.sql} where {chosen}"
    if do == "update":
        listed = ", ".join(f"{name(c)} = {quoted(v)}" for c, v in statement["set"].items())
        return f"update {table.sql} set {listed} where {chosen}" if listed else "select"
    if do == "again":
        listed = ", ".join(name(c) for c in table.columns)
        return (
            f"with gone as (delete from {table.sql} where {chosen} returning *)"
            f" insert into {table.sql} ({listed}) select {listed} from gone"
        )
    if do == "swap":
        return _swap(statement, table)
    raise ValueError(do)


def _insert(statement: Statement, table: Table) -> str:
    rows = [row for row in statement["rows"] if row]
    if not rows:
        return "select"
    listed = ", ".join(name(c) for c in rows[0])
    values = ", ".join(f"({', '.join(quoted(v) for v in row.values())})" for row in rows)
    text = f"insert into {table.sql} ({listed}) values {values}"
    if statement["do"] == "upsert" and table.key:
        changed = ", ".join(
            f"{name(c)} = excluded.{name(c)}" for c in rows[0] if c not in table.key
        )
        target = ", ".join(name(c) for c in table.key)
        text += f" on conflict ({target}) do " + (f"update set {changed}" if changed else "nothing")
    elif len(rows) > 1 and table.key:
        text += " on conflict do nothing"
    return text


def _many(statement: Statement, table: Table) -> str:
    column, first, count = statement["column"], statement["first"], statement["count"]
    row = {c: quoted(v) for c, v in statement["row"].items() if c != column}
    listed = ", ".join(name(c) for c in (column, *row))
    values = ", ".join(("g", *row.values()))
    return (
        f"insert into {table.sql} ({listed}) select {values}"
        f" from generate_series({first}, {first + count - 1}) g on conflict do nothing"
    )


def _swap(statement: Statement, table: Table) -> str:
    """Two rows exchange their keys by way of a third value."""
    column = name(statement["column"])

    def chosen(variable: str, nth: int) -> str:
        rows = f"from {table.sql} as r order by r::text offset {nth} limit 1"
        return f"{variable} := (select {column} {rows});"

    return (
        f"do $swap$ declare a {table.sql}.{column}%type; b a%type; c a%type :="
        f" {quoted(statement['over'])}; begin {chosen('a', statement['nth'])}"
        f" {chosen('b', statement['nth'] + 1)} if a is not null and b is not null then"
        f" update {table.sql} set {column} = c where {column} = a;"
        f" update {table.sql} set {column} = a where {column} = b;"
        f" update {table.sql} set {column} = b where {column} = c; end if; end $swap$"
    )
