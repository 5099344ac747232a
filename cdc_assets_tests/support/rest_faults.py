"""What may happen to a commit at a REST catalog, or on the way there and back.

Each commit of a deed meets it in turn, and what failed is done again, as followers and runs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from pyiceberg.exceptions import CommitFailedException
from pyspark.sql import SparkSession

from cdc_assets.lake.tables import LakeTable
from cdc_assets_tests.support.rest_catalog import Answer, Commit, RestCatalog

Meets = Callable[[Commit], Answer | None]


def refused(_: Commit) -> Answer | None:
    raise CommitFailedException("somebody else came first")


def unavailable(_: Commit) -> Answer | None:
    return 503, {"error": {"message": "later", "type": "ServiceUnavailable", "code": 503}}


def broken(_: Commit) -> Answer | None:
    raise RuntimeError("nothing was done")


def done_and_broken(commit: Commit) -> Answer | None:
    commit()
    raise RuntimeError("it is done, and nobody says so")


def done_and_cut_off(commit: Commit) -> Answer | None:
    commit()
    return None


def stranger(session: SparkSession, lake: LakeTable) -> Meets:
    """Somebody else, who has the table's files written anew just before."""

    def first(commit: Commit) -> Answer | None:
        rewritten = "options => map('rewrite-all', 'true')"
        call = f"rewrite_data_files(table => {lake.procedure_name}, {rewritten})"
        session.sql(f"call lake.system.{call}").collect()
        return commit()

    return first


def each_in_turn(
    server: RestCatalog, meets: Meets, before: Callable[[], None], do: Callable[[], None]
) -> Iterator[int]:
    """Have another commit of ``do`` meet it each time, until none is left; yields after each."""
    for nth in range(30):
        before()
        made = count()

        def at_commit(commit: Commit) -> Answer | None:
            return meets(commit) if next(made) == nth else commit()  # noqa: B023

        server.at_commit = at_commit
        until_it_ends_well(do)
        server.at_commit = lambda commit: commit()
        yield nth
        if next(made) <= nth:
            return
    raise AssertionError("it never ends")


def until_it_ends_well(do: Callable[[], None]) -> None:
    for left in reversed(range(5)):
        try:
            do()
        except Exception:
            if not left:
                raise
        else:
            return
