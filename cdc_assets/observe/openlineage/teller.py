"""Sends a source's events by OpenLineage's client."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError, EnvironmentProblem
from cdc_assets.lake.tables import LakeTable
from cdc_assets.messages.texts import bounded
from cdc_assets.observe.openlineage.datasets import lake_dataset, location_of, source_dataset
from cdc_assets.observe.openlineage.steps import COMPLETE, COPY, Step, Told, remember, steps
from cdc_assets.observe.status import TableStatus
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import RunEvent
    from openlineage.client.facet_v2 import RunFacet

_RUNS = uuid.UUID("5f0b4a3e-8b0d-4c55-9d0e-3f6d4b1f7a10")
_PRODUCER = f"urn:cdc-assets:{version('cdc-assets')}"
# A parked table's reason is a sentence; a backend shows it in a line.
_REASON = 2_000


class Teller:
    """Tells a backend, by its ``client``, of the tables of one source."""

    def __init__(self, pipeline: Pipeline, client: OpenLineageClient, namespace: str) -> None:
        self._pipeline, self._client, self._namespace = pipeline, client, namespace

    def tell(self, table: TableStatus, before: Told | None, now: datetime) -> int:
        """Send what happened to ``table``, and remember that; the number of events.

        Raises EnvironmentProblem if the backend doesn't take one; all are sent again the next time.
        """
        found = [*steps(table, before, now)]
        for event in self._events(table, found):
            self._send(event)
        same = before if before is not None and before.epoch == table.epoch else None
        copied = table.state in COMPLETE or (same is not None and same.copied)
        told = Told(table.epoch, table.state, copied, table.applied_offset, now)
        if same is None or replace(told, at=same.at) != same:
            remember(self._pipeline.store, table.name, told)
        return len(found)

    def _send(self, event: RunEvent) -> None:
        try:
            self._client.emit(event)
        except Exception as error:  # noqa: BLE001 - of whatever library its transport uses
            # Its text has the address, which may be a secret.
            status = getattr(getattr(error, "response", None), "status_code", "")
            said = f"{type(error).__name__} {status}".rstrip()
            raise EnvironmentProblem(
                f"the OpenLineage backend didn't take an event: {said}.",
                "Look at openlineage.url and its key; it is told all the next time.",
            ) from None

    def _events(self, table: TableStatus, found: Sequence[Step]) -> Iterator[RunEvent]:
        from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
        from openlineage.client.facet_v2 import error_message_run, job_type_job

        config, store = self._pipeline.config, self._pipeline.store
        row = store.table(TableId.parse(table.name)) if found else None
        if row is None:
            return
        lake = LakeTable(config, config.table(row.table), row)
        source, place = source_dataset(lake), location_of(lake)
        for step in found:
            kind = job_type_job.JobTypeJobFacet(
                "BATCH" if step.work == COPY else "STREAMING", "CDC_ASSETS", step.work.upper()
            )
            failed: dict[str, RunFacet] = {}
            if step.reason is not None:
                said = bounded(step.reason, _REASON)
                failed["errorMessage"] = error_message_run.ErrorMessageRunFacet(said, "PYTHON")
            run = str(uuid.uuid5(_RUNS, f"{config.name} {table.name} {step.run}"))
            name = f"{config.name}.{step.work}.{table.name}"
            yield RunEvent(
                eventTime=step.at.isoformat(),
                eventType=RunState[step.type],
                run=Run(run, failed),
                job=Job(self._namespace, name, {"jobType": kind}),
                producer=_PRODUCER,
                inputs=[source],
                outputs=[lake_dataset(lake, place, source, step.rows)],
            )


def client_of(config: SourceConfig) -> OpenLineageClient:
    """The client of a source; raises ConfigurationError without an address, or its package."""
    asked = config.openlineage
    assert asked is not None
    try:
        from openlineage.client import OpenLineageClient
        from openlineage.client.transport.console import ConsoleTransport
        from openlineage.client.transport.http import HttpConfig, HttpTransport
    except ImportError as error:
        raise ConfigurationError(
            f"openlineage: its client isn't installed ({error}).",
            "pip install openlineage-python",
        ) from error
    transport: HttpTransport | None = None
    if asked.url is not None:
        # The next look sends again, and a tick has a minute: a retry waits as long as it is told.
        once = {"total": 0, "status_forcelist": ()}
        # Its client takes the last part of a path that doesn't end with / for a file's name.
        url = f"{asked.url.get_secret_value().rstrip('/')}/"
        settings = {"url": url, "timeout": 5.0, "retry": once}
        if asked.api_key is not None:
            settings["auth"] = {"type": "api_key", "apiKey": asked.api_key.get_secret_value()}
        try:
            transport = HttpTransport(HttpConfig.from_dict(settings))
        except ValueError:  # its text has the address, which may be a secret
            raise ConfigurationError(
                "openlineage.url: it is no address.", "Write https://host:port."
            ) from None
        transport.session.max_redirects = 0  # where it leads to, a GET would arrive, no event
    client = OpenLineageClient(transport=transport)
    if isinstance(client.transport, ConsoleTransport) and not client.config.transport:
        raise ConfigurationError(
            "openlineage: no backend is named.",
            "Write openlineage.url; or set OPENLINEAGE_URL or OPENLINEAGE_CONFIG for its client.",
        )
    return client
