"""Keeps a DuckDB file current: ``python duckdb_copy.py SOURCE.yaml GROUP FILE.duckdb``."""

import sys

import duckdb

from cdc_assets.consumers import ROW_COLUMNS, Begin, Changes, Schema, SnapshotRows, Truncate, follow


def main(config, group, file, **how):
    db, key, columns = duckdb.connect(file), {}, {}
    db.execute("create table if not exists tokens (name text primary key, token text)")

    def token(table):  # where the file is, written in one transaction with its rows
        row = db.execute("select token from tokens where name = ?", [table]).fetchone()
        return row and row[0]

    with follow(config, group, token=token, **how) as stream:
        for event in stream:
            name = f'"{event.table}"'
            if isinstance(event, Begin | Schema):
                key[name] = event.key
                columns[name] = [n for n in event.schema.names if n not in ROW_COLUMNS]
            if isinstance(event, Schema):
                db.register("told", event.schema.empty_table().select(columns[name]))
                if shape(db, "told") != shape(db, name):  # older rows have values there, too
                    stream.begin_again(event.table)
                    continue
            db.begin()
            if isinstance(event, Begin):
                db.register("empty", event.schema.empty_table().select(columns[name]))
                db.execute(f"create or replace table {name} as from empty")
            elif isinstance(event, SnapshotRows):
                db.register("more", event.rows.select(columns[name]))
                db.execute(f"insert into {name} by name from more")
            elif isinstance(event, Truncate):
                db.execute(f"delete from {name}")
            elif isinstance(event, Changes):
                for row in event.rows.to_pylist():
                    apply(db, name, key[name], columns[name], row)
            db.execute("insert or replace into tokens values (?, ?)", [event.table, event.token])
            db.commit()
            event.commit()


def shape(db, name):
    return sorted(row[:2] for row in db.execute(f"describe {name}").fetchall())


def apply(db, name, key, columns, row):
    old = row["_old_key"] or row
    where, at = " and ".join(f'"{k}" = ?' for k in key), [old[k] for k in key]
    sent = [c for c in columns if c not in (row["_unchanged"] or ())]
    if len(sent) < len(columns):  # large values that Postgres didn't send stay
        places = ", ".join(f'"{c}" = ?' for c in sent)
        db.execute(f"update {name} set {places} where {where}", [row[c] for c in sent] + at)
        return
    db.execute(f"delete from {name} where {where}", at)
    if row["_op"] != "D":
        names, places = '", "'.join(sent), ", ".join("?" * len(sent))
        db.execute(f'insert into {name} ("{names}") values ({places})', [row[c] for c in sent])


if __name__ == "__main__":
    main(*sys.argv[1:])
