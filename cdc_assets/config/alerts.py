"""The sections ``alerts:``, ``openlineage:`` and ``metrics:``: what is told, and to whom.

Webhook addresses and passwords are secrets: write ``${VAR}``, the environment has the value.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from cdc_assets.config.base import Duration, HttpAddress, PlainSecret, Section, Size

Severity = Literal["warn", "fail"]


class WindowConfig(Section):
    """How long a problem may last before it is reported as a warning, then as a failure."""

    warn: Duration = timedelta(minutes=1)
    """After so long it is a warning."""
    fail: Duration = timedelta(minutes=5)
    """After so long it is a failure."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.warn > self.fail:
            raise ValueError("warn has to be at most fail")
        return self


class SlotLimitsConfig(Section):
    """From where on the slot is a danger to the source."""

    retained_warn: Size = 5 * 10**9
    """WAL that the slot keeps: a warning."""
    retained_fail: Size = 20 * 10**9
    """WAL that the slot keeps: a failure."""
    inactive: WindowConfig = WindowConfig(warn=timedelta(minutes=10), fail=timedelta(hours=1))
    """How long nobody may read it."""
    xmin_age_warn: Annotated[int, Field(ge=1)] = 100_000_000
    """Transactions since ``catalog_xmin``: the catalog isn't vacuumed beyond it. The server begins
    to force vacuums at 200 million and stops writing at 2 billion."""
    xmin_age_fail: Annotated[int, Field(ge=1)] = 500_000_000
    """The same: a failure."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.retained_warn > self.retained_fail or self.xmin_age_warn > self.xmin_age_fail:
            raise ValueError("…_warn has to be at most …_fail")
        return self


class _Sink(Section):
    min_severity: Severity = "warn"
    """Problems that never reach it aren't reported here."""


class LogSink(_Sink):
    """The log of the process that runs the sensors."""

    type: Literal["log"] = "log"


# Where services that take a key are reached.
PUBLIC = {
    "pagerduty": "https://events.pagerduty.com/v2/enqueue",
    "opsgenie": "https://api.opsgenie.com/v2/alerts",
}


class WebhookSink(_Sink):
    """An HTTP POST of JSON, as ``format`` has it."""

    type: Literal["webhook"]
    format: Literal["slack", "teams", "pagerduty", "opsgenie"] = "slack"
    """slack: an incoming webhook of Slack's, or of those who imitate it. teams: a Teams workflow.
    pagerduty: Events API v2. opsgenie: its Alert API. The last two open and close one incident a
    problem."""
    url: HttpAddress | None = None
    """Its address, which is a secret as a rule; pagerduty and opsgenie have one of their own."""
    key: PlainSecret | None = None
    """The integration key of pagerduty, the API key of opsgenie."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        keyed = self.format in PUBLIC
        if keyed is not (self.key is not None):
            raise ValueError(f"key: format {self.format} " + ("needs one" if keyed else "has none"))
        if self.url is None and not keyed:
            raise ValueError("url: missing; it is required")
        return self

    @property
    def keeps_incidents(self) -> bool:
        """Whether the service opens and closes an incident for each problem."""
        return self.format in PUBLIC

    @property
    def address(self) -> str:
        return self.url.get_secret_value() if self.url is not None else PUBLIC[self.format]


class SnsSink(_Sink):
    """A topic of Amazon SNS; keys and role as boto3 finds them."""

    type: Literal["sns"]
    topic_arn: Annotated[str, Field(pattern=r"^arn:[^:]+:sns:[^:]+:[^:]+:.+$")]
    """The topic."""
    endpoint: str | None = None
    """The address of a service that isn't AWS's."""


class MailSink(_Sink):
    """Mail through an SMTP server."""

    type: Literal["mail"]
    host: str
    """The server."""
    port: Annotated[int, Field(ge=1, le=65535)] = 587
    """Its port."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """How the connection is protected."""
    username: str | None = None
    """Who logs in; nobody by default."""
    password: SecretStr | None = None
    """The password of ``username``."""
    sender: Annotated[str, Field(alias="from")]
    """The address that it is from."""
    to: Annotated[tuple[str, ...], Field(min_length=1)]
    """The addresses that get it."""

    @model_validator(mode="after")
    def _no_password_in_the_clear(self) -> Self:
        if (self.username is None) != (self.password is None):
            raise ValueError("give username and password, or neither")
        if self.password is not None and self.security == "none":
            raise ValueError("a password needs security: starttls or tls")
        return self


SinkConfig = Annotated[LogSink | WebhookSink | SnsSink | MailSink, Field(discriminator="type")]


class AlertsConfig(Section):
    """When and where problems and recoveries are reported."""

    sinks: tuple[SinkConfig, ...] = (LogSink(),)
    """Where to; by default to the log alone."""
    health: WindowConfig = WindowConfig()
    """For the parts of a source: Postgres, flusher, staging, materializer, Spark."""
    slot: SlotLimitsConfig = SlotLimitsConfig()
    min_interval: Duration = timedelta(minutes=1)
    """Messages are at least so far apart; what happens meanwhile is in the next one."""
    remind: Duration | None = timedelta(hours=12)
    """How often a lasting problem is reported again; null: only changes are."""


class OpenLineageConfig(Section):
    """Events of copies and merges for an OpenLineage backend; its client is the extra openlineage.

    Without a url that client's own configuration counts: OPENLINEAGE_CONFIG, OPENLINEAGE_URL, ….
    """

    url: HttpAddress | None = None
    """The backend's address, as of Marquez: https://host:5000."""
    api_key: PlainSecret | None = None
    """Its key; best ${OPENLINEAGE_API_KEY}."""
    namespace: Annotated[str, Field(min_length=1)] = "cdc_assets"
    """Of the jobs, <source>.copy.<table> and <source>.merge.<table>."""
    every: Annotated[Duration, Field(ge=timedelta(seconds=30))] = timedelta(minutes=5)
    """How often; the merges of a table in between are one run."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.api_key is not None and self.url is None:
            raise ValueError("api_key goes with url")
        return self


def sink_keys(config: AlertsConfig) -> list[str]:
    """A name for each sink, by its place; no address, which may be a secret."""
    return [f"{place}:{sink.type}" for place, sink in enumerate(config.sinks)]


class MetricsConfig(Section):
    """The flusher's endpoint: /metrics for Prometheus, /live and /ready; none without a port."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Where it listens."""
    host: str = "127.0.0.1"
    """On which address; without a token, whoever reaches it may read all metrics."""
    token: PlainSecret | None = None
    """What /metrics wants as Authorization: Bearer …; /live and /ready want nothing."""
    tables: bool = False
    """Whether there are figures of each table, besides those of the source: some ten a table."""
