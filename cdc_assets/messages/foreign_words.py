"""Messages of foreign errors, without the values that they quote.

Postgres, Spark, pyarrow and Python name the value that they stumble over, and a value belongs in no
message, log or trace. This is the one place where a foreign message becomes ours: :func:`said`
returns its sentence, and ``process.traces.trace`` its stack. Hints at the place stay: the class of
the error, names, types, places, addresses. Quoted text, which may be a row's, becomes an ellipsis.

It needs only :mod:`re`: Spark's Python workers and the decoder use it, too.
"""

from __future__ import annotations

import re

from cdc_assets.messages.texts import bounded

HIDDEN = "…"
_LENGTH = 500

# Where a stack trace begins, in a message or in a log.
_STACK = re.compile(
    r"\n[^\S\n]*(at [\w.$/<>]+\(|JVM stacktrace|Driver stacktrace|Caused by: "
    r"|Traceback \(most recent)"
)
_GRPC_DETAILS = re.compile(r'\n[^\S\n]*details = "(.*)"')
# From the first quotation mark to the last: quoted text may have quotation marks itself. An
# apostrophe within a word is none. If no mark closes it, the rest is quoted.
_QUOTED = re.compile(
    r"""(?:\b[bBrRuU])?(?P<single>(?:(?<!\w)|(?<=\b[bBrRuU]))')(?:.*'(?!\w)|.*)"""
    r"""|(?P<double>")(?:.*"|.*)|(?P<tick>`)(?:.*`|.*)""",
    re.DOTALL,
)
# The numbers of an address stay.
_NUMBER = re.compile(r"(?P<address>\b\w+://\S+)|(?<![\w.])[-+]?\d[\d.,:/eE+-]*(?!\w)")
# How pyarrow says which file it can't read.
_PARQUET = re.compile(r"\ACould not open Parquet input source '.*?': ")
# A folder of a partitioned table is called after its rows' values.
_PARTITION = re.compile(r"(?<=/)([^/=\s]+=)[^/\s'\"]*")
# An expression over a table's rows, as Iceberg prints it.
_EXPRESSION = re.compile(r"\bref\(.*", re.DOTALL)

# SQL states whose messages name objects of the catalog, and no values. Not a syntax error, which
# quotes some of the statement.
_NAMING = re.compile("(?!42601)(?:0[8A]|2[3568BD]|3[4BDF]|4[02]|5[34578]|F0)")
# States that are the server's own. Any other is a function's, whose message may have anything, also
# if it raises one of these.
_SERVERS = re.compile("0[1-389ABFLPZ]|2[0-8BDF]|3[489BDF]|4[024]|5[34578]|72|F0|HV|XX")
_IN_FUNCTION = re.compile(r"\nCONTEXT: .*function")

# Parameters of Spark's messages, with their conditions, that are types, names or places. Any other
# may be a value, also an ``url``: CANNOT_DECODE_URL quotes a row's.
_NAME = re.compile(
    r"(?!INVALID_VARIANT_GET_PATH |CANNOT_PARSE_JSON_FIELD )\S+ (?:"
    r"(?:source|target|required|actual|expected|input|data|stmt|src|conf|dataSource)Type"
    r"|(?:object|relation|table|column|col|field|routine|function|catalog|schema|conf|config"
    r"|property|option)Name|fieldNames|struct|namespace|sessionCatalog|searchPath|provider"
    r"|config|ansiConfig|sqlConf|configKey|path|paths|fileName|filePath|left|right|proposal"
    r"|precision|scale|operat.*)|CANNOT_MODIFY_(?:STATIC_)?CONFIG key"
)
# The message's condition, after the error's class if pyspark has none of that name.
_CONDITION = re.compile(r"\A\s*(?:\([\w.$]+\)\s*)?\[([A-Z0-9_]+(?:\.[A-Z0-9_]+)*)\]")
# Errors about files and addresses: their numbers are sizes, ports, statuses.
_STORAGE = re.compile(r"org\.apache\.iceberg|software\.amazon\.awssdk")
# pyiceberg's errors of a namespace or table that doesn't exist, or exists already.
_CATALOGS = re.compile(r"NoSuch\w+|\w+AlreadyExists\w*")


def without_stack(text: str) -> str:
    """``text`` up to where a stack trace begins."""
    found = _STACK.search("\n" + text)
    return text[: max(0, found.start() - 1)].rstrip() if found else text


def masked(text: str, *, numbers: bool = True) -> str:
    """``text`` without what it quotes, and without its ``numbers``."""
    text = _QUOTED.sub(_ellipsis, _EXPRESSION.sub(HIDDEN, text))
    return _NUMBER.sub(lambda found: found["address"] or HIDDEN, text) if numbers else text


def _ellipsis(found: re.Match[str]) -> str:
    mark = found["single"] or found["double"] or found["tick"]
    return f"{mark}{HIDDEN}{mark}"


def said(error: BaseException) -> str:
    """The sentence of a foreign error that a person needs, in one line and without values."""
    packages = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    text = str(error).strip()
    if (orig := getattr(error, "orig", None)) is not None and "sqlalchemy" in packages:
        return said(orig)  # SQLAlchemy's text has the statement and its parameters
    if "psycopg" in packages:
        told = _of_postgres(error, text)
    elif "grpc" in packages or _unavailable(error):
        told = details[1] if (details := _GRPC_DETAILS.search(text)) else text
    elif "pyspark" in packages:
        told = _of_spark(error, text)
    elif "pyiceberg" in packages:
        told = text if _CATALOGS.fullmatch(type(error).__name__) else masked(text, numbers=False)
    elif "botocore" in packages:  # a service's answer, or what this machine lacks
        answered = any(cls.__name__ == "ClientError" for cls in type(error).__mro__)
        told = masked(text, numbers=False) if answered else " ".join(text.split())
    elif "requests" in packages:  # it quotes headers
        told = masked(text, numbers=False)
    elif isinstance(error, OSError):
        told = text  # paths and addresses
    else:
        text = without_stack(text)
        place = file[0] if (file := _PARQUET.match(text)) else ""
        told = place + masked(text[len(place) :])
    lines = _PARTITION.sub(rf"\1{HIDDEN}", told).strip().splitlines()
    return bounded(lines[0], _LENGTH) if lines else type(error).__name__


def of_server(text: str, state: str | None, context: str = "") -> str:
    """A message of a Postgres server, without values.

    ``state``: its SQL state, if known; ``context``: where it was raised, if that isn't in the text.
    """
    if state is None:
        return masked(text, numbers=False)
    raised = "function" in context or _IN_FUNCTION.search(text) is not None
    if not _SERVERS.match(state) or (raised and state[:2] != "57"):
        return f"a function raised an error of its own (SQL state {state})"
    if _NAMING.match(state):
        return text
    text = masked(text, numbers=state[:2] == "22").split("\n", 1)[0]
    return f"{text} (SQL state {state})"


def _of_postgres(error: BaseException, text: str) -> str:
    state = getattr(error, "sqlstate", None)
    diag = getattr(error, "diag", None)
    primary = getattr(diag, "message_primary", None)
    if primary is None:  # libpq's, about the connection, or psycopg's own, about a value
        names = {cls.__name__ for cls in type(error).__mro__}
        if state is None and not names & {"OperationalError", "InterfaceError"}:
            return masked(text)
        return text if state is None else of_server(text, state)
    return of_server(primary, state, getattr(diag, "context", None) or "")


def _unavailable(error: BaseException) -> bool:
    code = getattr(error, "getGrpcStatusCode", None)
    return code is not None and code().name == "UNAVAILABLE"


def _of_spark(error: BaseException, text: str) -> str:
    parameters: dict[str, str] = (getattr(error, "getMessageParameters", dict)() or {}).copy()
    text = without_stack(text).split("\n== SQL", 1)[0]
    if text.startswith("<"):  # gRPC's own form begins with its class
        details = _GRPC_DETAILS.search(str(error))
        return details[1] if details else masked(text)
    condition = _CONDITION.match(text)
    if condition is None:
        return masked(text, numbers=_STORAGE.search(text) is None)
    for name, value in sorted(parameters.items(), key=lambda item: -len(item[1])):
        if _NAME.fullmatch(f"{condition[1]} {name}") or not value:
            continue
        if value not in text:
            return f"[{condition[1]}]"
        text = text.replace(value, HIDDEN)
    if not parameters:
        text = f"[{condition[1]}]{masked(text[condition.end() :])}"
    return text
