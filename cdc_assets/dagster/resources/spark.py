"""Spark as a Dagster resource: dagster-pyspark's lazy resource, over Spark Connect.

Invariant: every run has a Connect session of its own. A session that two sources shared would keep
the catalog of the first one. The server's address (ours or the user's cluster) is looked up when
the session is asked for, because the local server's port isn't known before.
"""

from __future__ import annotations

from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pydantic import Field
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.resources.sources import configuration
from cdc_assets.lake.spark.session import connect_url, open_session, prepare_session


class SparkConnectResource(LazyPySparkResource):
    """A Spark Connect session for one source; ``spark.remote`` of its configuration, or local."""

    # The address isn't part of it: it may carry a token, and this is shown in the UI.
    spark_config: dict[str, Any] = Field(default_factory=dict)
    source: str

    def _init_session(self) -> None:
        if self._spark_session is None:
            config = configuration(self.source)
            self._spark_session = open_session(config, connect_url(config))

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002
        """End the session with the run: the operations of one run share it."""
        if self._spark_session is not None:
            self._spark_session.stop()
            self._spark_session = None


def spark_session(resource: LazyPySparkResource, config: SourceConfig) -> SparkSession:
    """The resource's session, fit for ``config``; any LazyPySparkResource will do."""
    session: SparkSession = resource.spark_session
    prepare_session(session, config)
    return session
