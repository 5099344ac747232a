"""Processes beside a command: Spark, and a flusher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import SparkProblem
from cdc_assets.flusher.child import flusher_child
from cdc_assets.lake.spark.session import open_session, server, spark_problem
from cdc_assets.process.children import Child


class Spark:
    """Spark for one command: reached or started at first use, stopped if it was started here."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._local = None if config.spark.remote else server(config)
        self._used = False

    def begin(self) -> None:
        """Let a local server start while something else is done."""
        if self._local is not None and self._local.url() is None:
            self._used = True
            self._local.start()

    @contextmanager
    def session(self) -> Iterator[SparkSession]:
        """A session of its own; nobody else changes its settings."""
        self._used = True
        if self._local is None and (problem := spark_problem(self._config)) is not None:
            # The client would try for minutes.
            raise SparkProblem(
                f"Spark Connect can't be reached: {problem}.", "Start it, or correct spark.remote."
            )
        url = self._local.ensure() if self._local is not None else self._config.spark.remote
        session = open_session(self._config, url)
        try:
            yield session
        finally:
            session.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._local is not None and self._used:
            self._local.stop()


@contextmanager
def flushing(config: SourceConfig) -> Iterator[None]:
    """Run a flusher as a child process meanwhile, so that WAL doesn't pile up during a copy.

    If another flusher is active, the child waits behind it and does nothing.
    """
    child = Child.start(flusher_child(config))
    try:
        yield
    finally:
        child.stop()
