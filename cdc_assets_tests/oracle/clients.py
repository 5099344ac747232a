"""The source's clients: they run a plan's transactions, one session after the other or at once."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import psycopg

from cdc_assets_tests.oracle.plan import Statement, Table, sql_of

# Sessions that take turns in one thread must not wait for each other.
_LOCK_MS = 400
# "It does not have a replica identity and publishes updates": only a publication of ours does that.
_HARM = "55000"


class Clients:
    """Runs transactions; ``harms`` are statements that failed because of the product."""

    def __init__(self, dsn: str, tables: list[Table]) -> None:
        self._dsn, self._tables = dsn, tables
        self.counts: Counter[str] = Counter()
        self.harms: list[str] = []
        self._beside: list[threading.Thread] = []

    def run(self, transactions: list[dict[str, Any]]) -> None:
        with self._connect() as session:
            for transaction in transactions:
                self._begin(session)
                for statement in transaction["statements"]:
                    self._execute(session, statement)
                self._end(session, transaction)

    def run_beside(self, transactions: list[dict[str, Any]]) -> None:
        """In a thread, slowly enough that other things happen meanwhile."""

        def work() -> None:
            for transaction in transactions:
                try:
                    self.run([transaction])
                except psycopg.OperationalError:
                    self.counts["session lost"] += 1

        thread = threading.Thread(target=work)
        thread.start()
        self._beside.append(thread)

    def wait(self) -> None:
        while self._beside:
            self._beside.pop().join()

    def run_interleaved(self, sessions: list[dict[str, Any]], turns: list[int]) -> None:
        """Statement by statement, whose turn it is; the one after the last ends the session."""
        opened = [self._connect() for _ in sessions]
        left = [list(transaction["statements"]) for transaction in sessions]
        begun, ended = set[int](), set[int]()
        try:
            for turn in turns:
                if turn >= len(sessions) or turn in ended:
                    continue
                if turn not in begun:
                    begun.add(turn)
                    self._begin(opened[turn])
                if left[turn]:
                    self._execute(opened[turn], left[turn].pop(0))
                else:
                    self._end(opened[turn], sessions[turn])
                    ended.add(turn)
        finally:
            for session in opened:
                session.close()

    # --- parts ---

    def _connect(self) -> psycopg.Connection[Any]:
        session = psycopg.connect(self._dsn, autocommit=True, application_name="client")
        session.execute(f"set lock_timeout = {_LOCK_MS}".encode())
        return session

    def _begin(self, session: psycopg.Connection[Any]) -> None:
        session.execute("begin")

    def _end(self, session: psycopg.Connection[Any], transaction: dict[str, Any]) -> None:
        try:
            session.execute(transaction["ends"].encode())
            self.counts[transaction["ends"]] += 1
        except psycopg.Error as error:
            self.counts[f"{transaction['ends']} failed: {error.sqlstate}"] += 1
            session.execute("rollback")

    def _execute(self, session: psycopg.Connection[Any], statement: Statement) -> None:
        """What fails is undone, and the transaction goes on."""
        text, do = sql_of(statement, self._tables), statement.get("kind") or statement["do"]
        own = statement["do"] in ("savepoint", "rollback to", "release")
        try:
            if not own:
                session.execute("savepoint ours")
            session.execute(text.encode())
            self.counts[do] += 1
            if not own:
                session.execute("release savepoint ours")
        except psycopg.OperationalError:
            if session.broken:
                raise
            session.execute("rollback to savepoint ours" if not own else "rollback and chain")
            self.counts[f"{do}: waited too long"] += 1
        except psycopg.Error as error:
            self.counts[f"{do}: {error.sqlstate}"] += 1
            if error.sqlstate == _HARM:
                self.harms.append(f"{error.diag.message_primary} ({text[:200]})")
            session.execute("rollback to savepoint ours" if not own else "rollback and chain")
