"""Foreign errors, in words that name the thing and the way out.

Messages of Postgres, Spark, the catalog and the file system may carry a stack trace of Python or
Java. A person gets one sentence instead (:func:`explained`), and the trace is in a file that the
sentence names; neither has a value of a row (``messages.foreign_words``). Errors that this package
raises on purpose are sentences already.
"""

from __future__ import annotations

import re

import psycopg
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.config.addresses import coordination_dsn, replication_dsn, source_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import (
    CdcError,
    CoordinationError,
    EnvironmentProblem,
    SparkProblem,
    first_line,
)
from cdc_assets.log.moving.frozen import is_frozen
from cdc_assets.process.traces import keep_trace

_LOGIN = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry"
    r'|(role|database) ".*" does not exist'
)
# How a remedy begins where a login was refused, and where nobody answers.
ANSWERS, OUT = "The server answers; ", "Start it, mend the network, or "
_LACKS = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.InvalidSchemaName,
)


def explained(error: Exception, config: SourceConfig | None) -> CdcError:
    """``error`` for a person; ours stay as they are, the trace of any other is kept."""
    if isinstance(error, CdcError):
        return error
    kind, what, remedy = _known(error, config)
    where = keep_trace(error)
    details = f"The details are in {where}." if where is not None else ""
    return kind(what, f"{remedy} {details}".strip())


def _known(error: Exception, config: SourceConfig | None) -> tuple[type[CdcError], str, str]:
    said, package = first_line(error), type(error).__module__.partition(".")[0]
    if isinstance(error, psycopg.OperationalError) and is_lost(error):
        who, setting = _whose(str(error), config)
        if refuses_login(error):
            what, remedy = f"{who} doesn't take the login: {said}.", f"{ANSWERS}correct {setting}."
            return EnvironmentProblem, what, remedy
        remedy = f"{OUT}correct {setting}."
        return EnvironmentProblem, f"{who} can't be reached, or ended: {said}.", remedy
    if isinstance(error, _LACKS) and config is not None:
        schema = config.state.schema_
        what = f"the coordination schema {schema} isn't whole, or a table is gone: {said}."
        remedy = "Restore the schema from a backup, or drop it and begin anew with resync --all."
        return CoordinationError, what, remedy
    if config is not None and is_frozen(error, config.name):
        what = f"the state of source {config.name} was moved while this worked with it: {said}."
        return CoordinationError, what, "Where it is now: cdc-assets check."
    if isinstance(error, psycopg.Error):
        return CdcError, f"Postgres refused a statement: {said}.", "See what check says."
    if package in ("pyspark", "grpc"):
        return SparkProblem, f"Spark can't do it: {said}.", "See the log of the Spark server."
    if package in ("pyiceberg", "requests", "sqlalchemy"):
        return EnvironmentProblem, f"the catalog can't do it: {said}.", "See what check says."
    if package == "botocore":
        remedy = "See the key, its rights and the region, and what check says."
        return EnvironmentProblem, f"AWS can't do it: {said}.", remedy
    if isinstance(error, OSError) or package == "pyarrow":
        remedy = "See that it is there, that there is room, and who may write."
        return EnvironmentProblem, f"a file can't be used: {said}.", remedy
    what = f"cdc-assets has a defect: {type(error).__name__}: {said}."
    return CdcError, what, "Please report it."


def refuses_login(error: Exception) -> bool:
    """Whether a server that answers refused role, password or database.

    An error of libpq's own, while it connects, has no SQL state: its words have to do.
    """
    if not isinstance(error, psycopg.OperationalError):
        return False
    if error.sqlstate is not None:
        return error.sqlstate.startswith(("28", "3D"))
    return _LOGIN.search(str(error)) is not None


def is_lost(error: psycopg.OperationalError) -> bool:
    """Whether the connection is to blame: a statement that was cancelled is of this class, too."""
    return error.sqlstate is None or error.sqlstate.startswith(("08", "28", "3D", "53", "57P"))


def _whose(said: str, config: SourceConfig | None) -> tuple[str, str]:
    """The database that a message is about, by the address in it; and the settings that name it."""
    if config is None:
        return "Postgres", "its address"
    here = f"the Postgres of source {config.name}"
    if config.postgres.embedded:
        return here, "postgres.dsn"
    source, state = f"the source {config.name}", "the coordination database"
    dsns = [(source, "postgres.dsn", source_dsn(config))]
    if config.postgres.replication_dsn is not None:
        dsns.append((source, "postgres.replication_dsn", replication_dsn(config)))
    if config.state.postgres_url is not None:
        dsns.append((state, "state.postgres_url", coordination_dsn(config)))
    named = [each for each in dsns if _names(said, each[2])]
    # Where the addresses are the same, the role decides.
    named = [
        each for each in named if f'"{conninfo_to_dict(each[2]).get("user")}"' in said
    ] or named
    whose = {who for who, *_ in named} if len(dsns) > 1 else set()
    settings = " or ".join(setting for _, setting, _ in named or dsns)
    return (whose.pop() if len(whose) == 1 else here), settings


def _names(said: str, dsn: str) -> bool:
    at = conninfo_to_dict(dsn)
    port = str(at.get("port") or "5432")
    return str(at.get("host") or "") in said and f"port {port}" in said
