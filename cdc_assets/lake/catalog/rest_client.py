"""A REST catalog through pyiceberg whose requests end, and that knows what its server told it.

pyiceberg waits for an answer without end. A request that nobody answers would hold a table's writer
lock, and a follower's thread, until somebody restarts the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.utils.config import Config, merge_config
from requests import Session
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ReadTimeoutError
from urllib3.util import Retry

# For a connection; and between two bytes of an answer, which a server may work on for long.
SECONDS = (10.0, 120.0)


class TimedRest(RestCatalog):
    """``given``: the properties that its server had no say in."""

    def __init__(self, name: str, **properties: Any) -> None:
        self.given: Mapping[str, Any] = properties
        super().__init__(name, **properties)

    def _config_headers(self, session: Session) -> None:
        """Called with each session before it is used: its first request is for a token."""
        super()._config_headers(session)
        session.request = partial(session.request, timeout=SECONDS)  # type: ignore[method-assign]

    def _create_session(self) -> Session:
        """Where requests are signed, pyiceberg has ten more tries for one that failed."""
        session = super()._create_session()
        for adapter in session.adapters.values():
            if isinstance(adapter, HTTPAdapter):
                tries = adapter.max_retries
                adapter.max_retries = _Awaited(tries.total, connect=tries.connect, read=tries.read)
        return session


class _Awaited(Retry):
    """Tries, but none after an answer that was awaited in vain: it would be ten times as long."""

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: Any = None,
        error: Exception | None = None,
        *more: Any,
        **named: Any,
    ) -> Self:
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(method, url, response, error, *more, **named)


def rest_catalog(name: str, properties: Mapping[str, str]) -> TimedRest:
    """As ``load_catalog`` opens it: with what the user's own file of pyiceberg says."""
    return TimedRest(name, **merge_config(Config().get_catalog_config(name) or {}, {**properties}))
