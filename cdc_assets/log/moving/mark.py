"""The mark of a source whose log moves, or has moved, from one coordination schema to another.

Both schemas have a mark while it moves, so that at no moment both of them can be worked with:

| old | new | a move that is killed then leaves |
|---|---|---|
| ``leaving`` | nothing, or ``arriving`` | the old rows, frozen: move it again, or undo the move |
| ``gone`` | ``arriving`` | the new rows, whole and compared: move it again, which ends the move |
| ``gone`` | nothing | nothing to do: it has ended |

Both marks have the move's number, so that rows which one left behind half-way are never taken for
those of another one. Every session of the schema looks for the mark first (:func:`refuse_moved`).
One that was there before is ended, and can't write in any case (``log.moving.frozen``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.errors import CoordinationError
from cdc_assets.messages.texts import command

# Key in pipeline_meta.
MOVED = "moved"


class Move(StrEnum):
    """What a mark says of the schema that it is in."""

    LEAVING = "leaving"
    GONE = "gone"
    ARRIVING = "arriving"


@dataclass(frozen=True, slots=True)
class Mark:
    """``place``: the other schema's, without secrets; ``since``: by the server's clock.

    ``number``: what the marks of one move have in common, and those of no other one.
    """

    move: Move
    place: str
    since: str
    number: str

    @classmethod
    def parse(cls, text: str) -> Self:
        found = json.loads(text)
        return cls(Move(found["move"]), str(found["place"]), str(found["since"]), found["number"])

    def error(self, source: str) -> CoordinationError:
        """Why nothing works with the schema, and the way out."""
        if self.move == Move.GONE:
            return CoordinationError(
                f"the state of source {source} was moved to {self.place} at {self.since}, and the"
                " configuration names its former place.",
                "Set state.postgres_url to the new one, in every file that has this source.",
            )
        again = command("state", "migrate", "--to", "DSN")
        if self.move == Move.LEAVING:
            return CoordinationError(
                f"the state of source {source} is being moved to {self.place}, since {self.since}.",
                f"Wait; or, if nobody does that any more: {again} again, or"
                f" {command('state', 'migrate', '--undo')}.",
            )
        return CoordinationError(
            f"the state of source {source} hasn't come here from {self.place} as a whole yet: the"
            f" move that began at {self.since} is under way, or was interrupted.",
            f"Wait; or end it, by the configuration that names {self.place}: {again} again.",
        )


def place_of(connection: psycopg.Connection[Any], schema: str) -> str:
    """Where a coordination schema is, for a person: no role, no password."""
    info = connection.info
    # Of several hosts all are named: which of them is the primary changes.
    given = conninfo_to_dict(info.dsn)
    host = given.get("host") or info.host or "localhost"
    port = given.get("port") or info.port
    return f"{host}:{port}/{info.dbname} (schema {schema})"


def mark_of(connection: psycopg.Connection[Any], source: str, schema: str) -> Mark | None:
    """The source's mark in ``schema``, whose tables have to be there."""
    row = connection.execute(
        sql.SQL("select value from {} where source = %s and key = %s").format(
            sql.Identifier(schema, "pipeline_meta")
        ),
        (source, MOVED),
    ).fetchone()
    return Mark.parse(row[0]) if row is not None else None


def set_mark(
    connection: psycopg.Connection[Any], source: str, move: Move, place: str, number: str
) -> None:
    """Mark the source in the schema that ``connection`` has entered; another mark is replaced."""
    connection.execute(
        "insert into pipeline_meta (source, key, value) values (%s, %s, pg_catalog"
        ".jsonb_build_object('move', %s::text, 'place', %s::text,"
        " 'number', %s::text,"
        " 'since', pg_catalog.date_trunc('second', clock_timestamp())::text)::text)"
        " on conflict (source, key) do update set value = excluded.value",
        (source, MOVED, move, place, number),
    )


def remove_mark(connection: psycopg.Connection[Any], source: str) -> None:
    """Let the source be worked with again where ``connection`` is."""
    connection.execute("delete from pipeline_meta where source = %s and key = %s", (source, MOVED))


def refuse_moved(connection: psycopg.Connection[Any], source: str, schema: str) -> None:
    """Raise CoordinationError if the source's log isn't here any more, or isn't here yet."""
    if (mark := mark_of(connection, source, schema)) is not None:
        raise mark.error(source)
