"""Sessions beside a session, for what is done side by side."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import first_line
from cdc_assets.lake.spark.session import prepare_session

logger = logging.getLogger(__name__)


@contextmanager
def sessions_beside(
    session: SparkSession, config: SourceConfig, number: int
) -> Iterator[list[SparkSession]]:
    """``session`` and others on its server, ``number`` in all; on a server that is too old, it.

    All are made now, because a session in use can't be cloned; the others are stopped at the end.
    Not within :func:`session.summary`: they would have the statement's settings, too.
    """
    sessions = [session]
    with ExitStack() as cleanup:
        try:
            for _ in range(number - 1):
                sessions.append(_another(session, config))
                cleanup.callback(sessions[-1].stop)
        except PySparkException as error:
            logger.warning("tables are merged one by one: %s", first_line(error))
        yield sessions


def leave(session: SparkSession) -> None:
    """Have ``session`` stop without a word to its server, which is lost.

    Each would try for as long as a request is repeated. If the server is there again, it forgets
    the session after an hour.
    """
    vars(session)["release_session_on_close"] = False


def _another(session: SparkSession, config: SourceConfig) -> SparkSession:
    clone: SparkSession = session.cloneSession()  # type: ignore[attr-defined]
    # PySpark 4.1 doesn't set this, and a session can't be stopped without it.
    vars(clone)["release_session_on_close"] = True
    prepare_session(clone, config)
    return clone
