"""The operations of the demo's shop: small transactions of every kind a replica must survive.

Each operation takes a connection inside a transaction that the caller opened, and a random source,
and returns how many row changes it committed (cascades not counted). The same seed on the same rows
gives the same operations. Pace, counting and reconnection do not belong here.
"""

from __future__ import annotations

import base64
import json
import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]
Operation = Callable[[Connection, random.Random], int]

_TIERS = ("bronze", "silver", "gold", "platinum")
_STATUSES = ("new", "paid", "shipped", "returned")
# Text that naive quoting breaks: JSON, CSV, arrays, COPY, LIKE, and characters outside the BMP.
_NASTY = (
    '"quoted"',
    "back\\slash \\N \\.",
    "tab\tline\nreturn\r",
    "{a,b}",
    "é 漢字 😀",
    "",
    " ",
    "null",
    "NULL",
    "%s",
)
_MIXED = 'shop."Mixed Case.Table"'


def _uuid(rng: random.Random) -> uuid.UUID:
    return uuid.UUID(int=rng.getrandbits(128), version=4)


def _time(rng: random.Random) -> datetime:
    return datetime(2025, 6, 1, tzinfo=UTC) + timedelta(microseconds=rng.randrange(10**13))


def _profile(rng: random.Random) -> str:
    # Random base64 can't be compressed: from about 2 kB on it is kept out of line.
    size = rng.choice((10, 200, 3_000, 6_000, 12_000))
    bio = base64.b64encode(rng.randbytes(size)).decode()
    return json.dumps({"name": rng.choice(_NASTY), "visits": rng.randrange(10**6), "bio": bio})


def _one(connection: Connection, query: str, values: tuple[object, ...]) -> Any:
    row = connection.execute(query.encode(), values).fetchone()
    return row[0] if row else None


def _some_customer(connection: Connection, rng: random.Random) -> uuid.UUID:
    """The first key from a random point on; by the index."""
    at = _uuid(rng)
    query = "select id from shop.customers where id >= %s order by id limit 1"
    found = _one(connection, query, (at,)) or _one(connection, query, (uuid.UUID(int=0),))
    return found if found is not None else _new_customer(connection, rng)


def _some_order(connection: Connection, rng: random.Random) -> int:
    top = _one(connection, "select max(id) from shop.orders", ()) or 0
    query = "select id from shop.orders where id >= %s order by id limit 1"
    found = _one(connection, query, (rng.randint(0, top),))
    return int(found) if found is not None else _new_order(connection, rng)


def _new_customer(connection: Connection, rng: random.Random) -> uuid.UUID:
    key = _uuid(rng)
    connection.execute(
        "insert into shop.customers values (%s, %s, %s, %s, %s, %s, %s, %s)",
        (
            *(key, f"{key.hex[:8]}@example.com", rng.choice(_TIERS), _profile(rng)),
            rng.sample(_NASTY, rng.randrange(4)),
            *(rng.choice((None, round(rng.uniform(-999, 999), 2))), _time(rng), rng.choice(_NASTY)),
        ),
    )
    return key


def _new_order(connection: Connection, rng: random.Random) -> int:
    order = _one(
        connection,
        "insert into shop.orders (customer_id, status, total, placed_at, comment)"
        " values (%s, 'new', %s, %s, %s) returning id",
        (
            *(_some_customer(connection, rng), round(rng.uniform(0, 9999), 2), _time(rng)),
            rng.choice((None, *_NASTY)),
        ),
    )
    return int(order)


def insert_customer(connection: Connection, rng: random.Random) -> int:
    _new_customer(connection, rng)
    return 1


def insert_order(connection: Connection, rng: random.Random) -> int:
    """An order and its lines, by one statement of many rows."""
    order = _new_order(connection, rng)
    lines = rng.randint(1, 5)
    connection.execute(
        "insert into shop.order_lines select %s, n, 'SKU-' || n, n, n * 1.05, 1.0 / n, null"
        " from generate_series(1, %s) n",
        (order, lines),
    )
    return 1 + lines


def copy_lines(connection: Connection, rng: random.Random) -> int:
    order = _new_order(connection, rng)
    rows = rng.randint(5, 40)
    with connection.cursor() as cursor, cursor.copy("copy shop.order_lines from stdin") as copy:
        for line in range(1, rows + 1):
            attributes = json.dumps({"text": rng.choice(_NASTY)}) if line % 2 else None
            price = round(rng.uniform(0, 99), 2)
            copy.write_row((order, line, rng.choice(_NASTY), line, price, None, attributes))
    return 1 + rows


def touch_customer(connection: Connection, rng: random.Random) -> int:
    """An update that leaves the document unchanged: it is not sent when it is out of line."""
    return connection.execute(
        "update shop.customers set tier = %s, credit = %s, tags = %s where id = %s",
        (
            *(rng.choice(_TIERS), rng.choice((None, round(rng.uniform(-999, 999), 2)))),
            *(rng.sample(_NASTY, rng.randrange(4)), _some_customer(connection, rng)),
        ),
    ).rowcount


def replace_profile(connection: Connection, rng: random.Random) -> int:
    return connection.execute(
        "update shop.customers set profile = %s where id = %s",
        (_profile(rng), _some_customer(connection, rng)),
    ).rowcount


def insert_then_touch(connection: Connection, rng: random.Random) -> int:
    """Insert and partial update in one transaction: the update's document is in no target yet."""
    key = _new_customer(connection, rng)
    connection.execute("update shop.customers set tier = 'gold' where id = %s", (key,))
    connection.execute("update shop.customers set note = null where id = %s", (key,))
    return 3


def advance_order(connection: Connection, rng: random.Random) -> int:
    return connection.execute(
        "update shop.orders set status = %s, shipped_at = %s where id = %s",
        (rng.choice(_STATUSES), rng.choice((None, _time(rng))), _some_order(connection, rng)),
    ).rowcount


def update_many_lines(connection: Connection, rng: random.Random) -> int:
    first = _some_order(connection, rng)
    return connection.execute(
        "update shop.order_lines set quantity = quantity + 1, discount = null"
        " where order_id between %s and %s",
        (first, first + rng.randint(1, 10)),
    ).rowcount


def update_nothing(connection: Connection, rng: random.Random) -> int:
    """An update to the same values is a change like any other in the stream."""
    return connection.execute(
        "update shop.customers set note = note where id = %s", (_some_customer(connection, rng),)
    ).rowcount


def delete_order(connection: Connection, rng: random.Random) -> int:
    return connection.execute(
        "delete from shop.orders where id = %s", (_some_order(connection, rng),)
    ).rowcount


def delete_customer(connection: Connection, rng: random.Random) -> int:
    return connection.execute(
        "delete from shop.customers where id = %s", (_some_customer(connection, rng),)
    ).rowcount


def delete_and_insert_again(connection: Connection, rng: random.Random) -> int:
    """The same key leaves and comes back within one transaction."""
    order = _some_order(connection, rng)
    gone = connection.execute("delete from shop.order_lines where order_id = %s", (order,)).rowcount
    connection.execute(
        "insert into shop.order_lines values (%s, 1, 'again', 1, 1.00, null, null)", (order,)
    )
    return gone + 1


def _rekey(connection: Connection, old: uuid.UUID, new: uuid.UUID) -> None:
    connection.execute("update shop.customers set id = %s where id = %s", (new, old))


def change_key(connection: Connection, rng: random.Random) -> int:
    """A new key while the document stays: its value is known under the old key only."""
    _rekey(connection, _some_customer(connection, rng), _uuid(rng))
    return 1


def change_key_twice(connection: Connection, rng: random.Random) -> int:
    """A chain in one transaction; half of the times another update comes in between."""
    old, middle, last = _some_customer(connection, rng), _uuid(rng), _uuid(rng)
    _rekey(connection, old, middle)
    between = rng.random() < 0.5
    if between:
        connection.execute("update shop.customers set note = 'moving' where id = %s", (middle,))
    _rekey(connection, middle, last)
    return 2 + between


def swap_keys(connection: Connection, rng: random.Random) -> int:
    one, other = _some_customer(connection, rng), _some_customer(connection, rng)
    if one == other:
        return 0
    aside = _uuid(rng)
    _rekey(connection, one, aside)
    _rekey(connection, other, one)
    _rekey(connection, aside, other)
    return 3


def reuse_key(connection: Connection, rng: random.Random) -> int:
    """A row moves away and another takes its key, in one transaction."""
    key = _some_customer(connection, rng)
    _rekey(connection, key, _uuid(rng))
    connection.execute(
        "insert into shop.customers (id, email, profile, joined_at) values (%s, 'new', '{}', %s)",
        (key, _time(rng)),
    )
    return 2


def change_part_of_a_key(connection: Connection, rng: random.Random) -> int:
    return connection.execute(
        "update shop.order_lines set line_no = line_no + 1000 where order_id = %s",
        (_some_order(connection, rng),),
    ).rowcount


def roll_back(connection: Connection, rng: random.Random) -> int:
    insert_then_touch(connection, rng)
    delete_order(connection, rng)
    raise psycopg.Rollback


def roll_back_in_part(connection: Connection, rng: random.Random) -> int:
    """Savepoints: changes inside the undone ones never happened, the others did."""
    key = _new_customer(connection, rng)
    with connection.transaction():
        connection.execute("update shop.customers set note = 'undone' where id = %s", (key,))
        _new_customer(connection, rng)
        with connection.transaction():  # released, then undone with what is around it
            delete_order(connection, rng)
        raise psycopg.Rollback
    with connection.transaction():
        connection.execute("update shop.customers set note = 'kept' where id = %s", (key,))
    return 2


def mixed_case(connection: Connection, rng: random.Random) -> int:
    key = rng.randrange(100)
    if rng.random() < 0.25:
        gone = f'delete from {_MIXED} where "Id" = %s'
        return connection.execute(gone.encode(), (key,)).rowcount
    upsert = (
        f'insert into {_MIXED} values (%s, %s, %s, %s) on conflict ("Id") do update'
        ' set "Some Value" = excluded."Some Value", "select" = excluded."select"'
    )
    value = rng.choice((None, *_NASTY))
    when = _time(rng).replace(tzinfo=None)
    return connection.execute(upsert.encode(), (key, value, rng.randrange(1000), when)).rowcount


def truncate(connection: Connection, rng: random.Random) -> int:
    """A truncate and new rows in one transaction."""
    connection.execute(f"truncate {_MIXED}".encode())
    rows = rng.randint(0, 20)
    connection.execute(
        f"insert into {_MIXED} select n, 'fresh', n, null from generate_series(1, %s) n".encode(),
        (rows,),
    )
    return 1 + rows


# How often each happens. Inserts and deletes, cascades included, are in balance, so that days of
# traffic fill no disk. A truncate comes once in some 3,000, which is twice a minute: whoever
# compares its table meanwhile begins anew.
OPERATIONS: dict[Operation, float] = {
    touch_customer: 120,
    advance_order: 100,
    insert_order: 100,
    replace_profile: 40,
    update_many_lines: 30,
    delete_order: 10,
    insert_customer: 10,
    delete_customer: 34,
    insert_then_touch: 10,
    delete_and_insert_again: 15,
    change_key: 20,
    change_key_twice: 10,
    swap_keys: 10,
    reuse_key: 5,
    change_part_of_a_key: 15,
    mixed_case: 30,
    copy_lines: 5,
    update_nothing: 10,
    roll_back: 10,
    roll_back_in_part: 10,
    truncate: 0.2,
}
