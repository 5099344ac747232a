"""Plans from seeds: tables of every shape, and what happens to them, in random order.

A *focus* makes one class of events frequent; without one everything happens now and then.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from cdc_assets_tests.oracle.plan import Action, Plan, Table
from cdc_assets_tests.oracle.traffic import Traffic
from cdc_assets_tests.oracle.values import INNER_NAMES, KEYS, NAMES, PLAIN

FOCUSES = ("cursor", "keyless", "pin", "leaf", "publication", "keys", "ddl", "names", "refused")
# Settings of a source's database that a client may have chosen; nothing of ours may depend on them.
_DATABASE = {
    "datestyle": "German, DMY",
    "intervalstyle": "iso_8601",
    "bytea_output": "escape",
    "timezone": "America/New_York",
    "extra_float_digits": "0",
}


def make(seed: int, focus: str = "") -> Plan:
    """The plan of a seed: the same seed and focus, the same plan."""
    return _Maker(seed, focus).plan()


class _Maker:
    def __init__(self, seed: int, focus: str) -> None:
        self.rnd = random.Random(f"{seed} {focus}")
        self.seed, self.focus = seed, focus

    def chance(self, share: float, focus: str = "-") -> bool:
        """True with that chance, and four of five times in its focus."""
        return self.rnd.random() < (max(0.8, share) if focus == self.focus else share)

    def plan(self) -> Plan:
        rnd = self.rnd
        tables = [self.table(i) for i in range(rnd.choice((2, 2, 3, 4)))]
        if all(table.refused for table in tables):
            tables[0] = self.keyed(0)
        database = _DATABASE if rnd.random() < 0.3 else {}
        settings: dict[str, Any] = {"lake": {"format_version": rnd.choice((3, 3, 3, 2))}}
        if rnd.random() < 0.2:
            settings["lake"]["merge_bytes"] = "1MB"
        return Plan(
            self.seed,
            tables,
            self.actions(tables),
            dict(database),
            rnd.random() < 0.4,
            self.focus == "keys",
            settings,
        )

    # --- tables ---

    def table(self, number: int) -> Table:
        if self.chance(0.25, "keyless"):
            return self.keyless(number)
        if self.chance(0.2, "leaf"):
            return self.partitioned(number)
        if self.chance(0.05, "refused"):
            return self.refused(number)
        if self.chance(0.05, "leaf"):
            return self.parent(number)
        return self.keyed(number)

    def refused(self, number: int) -> Table:
        """A shape that the product names and sets aside while the others go on."""
        table = self.keyed(number)
        table.refused, table.generated = True, {}
        which = self.rnd.choice(("parent", "unlogged", "taken", "unmarked", "unidentified"))
        if which == "parent":
            table.child = True
        elif which == "unlogged":
            table.unlogged = True
        elif which == "taken":  # by a column that the mode adds
            mode, column = self.rnd.choice((("append", "_op"), ("soft_delete", "_deleted_at")))
            table.settings = {"mode": mode}
            table.columns[column] = "text"
        elif which == "unidentified":
            table.identity, table.settings = "nothing", {"mode": "mirror"}
        else:
            table.key, table.identity, table.settings = [], "full", {"mode": "soft_delete"}
        return table

    def parent(self, number: int) -> Table:
        """One with a child, of which only its own rows count."""
        table = self.keyed(number)
        table.child, table.generated = True, {}
        table.settings["only"] = True
        return table

    def named(self, number: int) -> tuple[str, str]:
        rnd = self.rnd
        schema = rnd.choice(("public", "public", "public", "Other s"))
        return schema, rnd.choice(("t", "T", "a b", 'sel"ect', "x`y", "é")) + str(number)

    def columns(self, key_kinds: list[str]) -> tuple[dict[str, str], list[str]]:
        rnd = self.rnd
        pool = INNER_NAMES if self.chance(0.0, "names") else NAMES
        names = rnd.sample(pool, k=len(key_kinds) + rnd.randrange(1, 7))
        kinds = list(PLAIN)
        columns = dict(zip(names, key_kinds, strict=False))
        columns |= {c: rnd.choice(kinds) for c in names[len(key_kinds) :]}
        key = names[: len(key_kinds)]
        order = list(columns)
        if rnd.random() < 0.4:
            rnd.shuffle(order)
        return {c: columns[c] for c in order}, key

    def settings(self, table: Table, modes: tuple[str, ...]) -> None:
        rnd = self.rnd
        mode = rnd.choice(modes)
        if self.focus == "pin" and "append" in modes:
            mode = rnd.choice([other for other in modes if other != "mirror"])
        table.settings = {"mode": mode, "chunk_pages": 1}
        columns: dict[str, Any] = {}
        if rnd.random() < 0.2:
            columns["unrepresentable"] = "clamp"
        rest = [c for c in table.columns if c not in table.key]
        if rest and rnd.random() < 0.2:
            columns["types"] = {rnd.choice(rest): "string"}  # references are in values only
        if len(rest) > 1 and table.key and rnd.random() < 0.15:
            excluded = rnd.choice(rest)
            columns["exclude"] = [_written(excluded)]
            columns.get("types", {}).pop(excluded, None)
        if columns:
            table.settings["columns"] = columns
        if len(table.key) == 1 and rnd.random() < 0.15:
            kind = table.columns[table.key[0]]
            if kind in ("integer", "bigint", "text") and table.key[0].isalnum():
                table.settings["partition_by"] = [f"bucket(2, {table.key[0]})"]
        texts = [c for c, kind in table.columns.items() if kind == "text" and c not in table.key]
        if texts and rnd.random() < 0.6:
            table.external = [rnd.choice(texts)]

    def keyed(self, number: int) -> Table:
        rnd = self.rnd
        kinds = [rnd.choice(KEYS) for _ in range(rnd.choice((1, 1, 1, 2, 3)))]
        if rnd.random() < 0.5:
            kinds[0] = rnd.choice(("integer", "bigint"))
        columns, key = self.columns(kinds)
        identity = rnd.choice(("default",) * 4 + ("full", "index"))
        table = Table(*self.named(number), columns, key, identity)
        if rnd.random() < 0.4:
            free = next(c for c in ("doc", "doc2") if c not in columns)
            table.columns[free] = "text"
        self.settings(table, ("mirror", "mirror", "soft_delete", "append"))
        numbers = [c for c in columns if columns[c] == "integer"]
        if numbers and "exclude" not in table.settings.get("columns", {}) and rnd.random() < 0.2:
            source = rnd.choice(numbers)
            quoted = source.replace('"', '""')
            table.generated = {"gen": f'bigint generated always as ("{quoted}"::bigint * 2)'}
        return table

    def keyless(self, number: int) -> Table:
        rnd = self.rnd
        columns, _ = self.columns([])
        if self.focus == "keyless" or rnd.random() < 0.5:
            columns = {c: rnd.choice(("date", "timestamptz", "double precision", "integer[]"))
                       for c in list(columns)[:2]}  # fmt: skip
        table = Table(*self.named(number), columns, [], rnd.choice(("full", "full", "nothing")))
        self.settings(table, ("mirror", "mirror", "append"))
        if table.identity == "nothing":
            table.settings["mode"] = "append"
        return table

    def partitioned(self, number: int) -> Table:
        rnd = self.rnd
        columns, key = self.columns([rnd.choice(("integer", "bigint"))])
        table = Table(*self.named(number), columns, key)
        self.settings(table, ("mirror", "mirror", "soft_delete", "append"))
        column = key[0].replace('"', '""')
        table.part_by = f'{rnd.choice(("hash", "range"))} ("{column}")'
        bounds = ["with (modulus 2, remainder 0)", "with (modulus 2, remainder 1)"]
        if table.part_by.startswith("range"):
            bounds = ["from (minvalue) to (0)", "from (0) to (maxvalue)"]
        table.columns["code"], table.required = "bigint", ["code"]
        for i, bound in enumerate(bounds):
            part, identity = f"{table.name}_{i}", "default"
            if self.chance(0.2, "leaf"):
                index = (part + "_ri").replace('"', '""')
                identity = rnd.choice(("full", "full", "nothing", f'using index "{index}"'))
                # Its changes would lack the key; or there would be none of updates and deletes.
                apart = identity.startswith("using") or (
                    identity == "nothing" and table.mode != "append"
                )
                table.refused = table.refused or apart
            table.parts.append(
                {
                    "name": part,
                    "bound": f"for values {bound}",
                    "identity": identity,
                }
            )
        return table

    # --- actions ---

    def actions(self, tables: list[Table]) -> list[Action]:
        rnd = self.rnd
        traffic = Traffic(rnd, tables, odd=0.15, keys=self.focus == "keys", ddl=self.focus == "ddl")
        first: Action = {"do": "traffic", "transactions": traffic.first()}
        found = [first]
        if self.chance(0.5):
            found.append({"do": "start"})
        if self.chance(0.25, "pin"):
            found += self.copied_in_parts(traffic)
        else:
            found += [{"do": "copy"}] if self.chance(0.7) else [self.killed({"do": "copy"})]
        found.append({"do": "traffic", "transactions": traffic.some()})
        live = [i for i, table in enumerate(tables) if not table.refused]
        choices: list[tuple[float, Callable[[], list[Action]]]] = [
            (5, lambda: [{"do": "traffic", "transactions": traffic.some()}]),
            (2, lambda: [{"do": "traffic", "transactions": traffic.some(), "beside": True}]),
            (1, lambda: [{"do": "traffic", "interleaved": traffic.interleaved()}]),
            (2, lambda: [{"do": "merge", "tables": rnd.sample(live, k=1)}]),
            (1, lambda: [self.killed({"do": "merge", "tables": rnd.sample(live, k=1)})]),
            (0.7, lambda: [{"do": "maintain", "tables": rnd.sample(live, k=1)}]),
            (0.4, lambda: [self.killed({"do": "maintain", "tables": rnd.sample(live, k=1)})]),
            (1, lambda: [{"do": "start"}]),
            (0.5, lambda: [{"do": "stop"}]),
            (1, lambda: [{"do": "kill", "after_ms": rnd.choice((0, 20, 300))}]),
            (0.5, lambda: [{"do": "kill decoder"}]),
            (1, lambda: [{"do": "cut", "what": rnd.choice(("flusher", "log", "pin", "all"))}]),
            (0.5, lambda: [{"do": "resync", "table": rnd.choice(live)}]),
            (0.4, lambda: [{"do": "pause", "table": rnd.choice((*live, None))}]),
            (0.4, lambda: [{"do": "resume"}]),
            (0.4, lambda: [{"do": "log away", "ms": rnd.choice((100, 1500))}]),
            (self.weight(0.6, "cursor"), lambda: self.foreign_care(rnd.choice(live), traffic)),
            (0.3, lambda: [{"do": "rollback", "table": rnd.choice(live)}]),
            (self.weight(0.5, "publication"), lambda: self.publication(rnd.choice(live), traffic)),
        ]
        if parted := [i for i in live if tables[i].parts]:
            choices.append(
                (self.weight(0.5, "leaf"), lambda: self.partition(rnd.choice(parted), traffic))
            )
        weights = [weight for weight, _ in choices]
        for _ in range(rnd.randrange(3, 9)):
            found += rnd.choices(choices, weights)[0][1]()
        found.append({"do": "traffic", "transactions": traffic.some()})
        return found

    def weight(self, usual: float, focus: str) -> float:
        return 8 if focus == self.focus else usual

    def killed(self, action: Action) -> Action:
        """By SIGKILL, so long after it has begun its work."""
        return {**action, "killed_ms": self.rnd.choice((30, 150, 400, 800, 1500, 2500))}

    def copied_in_parts(self, traffic: Traffic) -> list[Action]:
        """Some chunks land, the pin is lost, rows change, the rest is read."""
        return [
            {"do": "copy", "share": self.rnd.choice((0.3, 0.5, 0.8))},
            {"do": "traffic", "transactions": traffic.some()},
            {"do": "cut", "what": "pin"},
            {"do": "copy"},
        ]

    def foreign_care(self, table: int, traffic: Traffic) -> list[Action]:
        """Somebody else's compaction, and expiry, of a table that was merged into."""
        return [
            {"do": "merge", "tables": [table]},
            {
                "do": "foreign care",
                "table": table,
                "compact": self.chance(0.8),
                "expire": self.chance(0.8),
            },
            {"do": "traffic", "transactions": traffic.some()},
        ]

    def publication(self, table: int, traffic: Traffic) -> list[Action]:
        """It is altered and put back while nobody looks, or under the flusher's eyes."""
        how = self.rnd.choice(("operations", "via root", "table", "unlogged"))
        return [
            *([{"do": "kill", "after_ms": 0}] if self.chance(0.7) else []),
            {
                "do": "publication",
                "how": how,
                "table": table,
                "transactions": traffic.some(only=table),
            },
        ]

    def partition(self, table: int, traffic: Traffic) -> list[Action]:
        """One of its partitions is emptied, or goes and comes back, while somebody looks or not."""
        # A history keeps the rows of a partition that left, and then has them twice.
        keeps = traffic.tables[table].mode == "append"
        how = "truncate" if keeps else self.rnd.choice(("truncate", "detach"))
        return [
            *([{"do": "kill", "after_ms": 0}] if self.chance(0.5) else []),
            {
                "do": "partition",
                "how": how,
                "table": table,
                "part": self.rnd.randrange(len(traffic.tables[table].parts)),
                "transactions": traffic.some(only=table),
            },
        ]


def _written(text: str) -> str:
    """As a configuration has it, where ${…} is a reference."""
    return text.replace("${", "$${")
