"""Scraping a flusher's endpoint, as Prometheus does."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def got(port: int, path: str, token: str | None = None, accept: str = "*/*") -> tuple[int, str]:
    """Status and body; raises OSError where nobody answers."""
    headers = {"Accept": accept}
    headers |= {"Authorization": f"Bearer {token}"} if token is not None else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


def verdict(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """What ``/live`` or ``/ready`` says."""
    status, body = got(port, path)
    found: dict[str, Any] = json.loads(body)
    return status, found


def scraped(port: int, source: str, token: str | None = None) -> dict[tuple[str, ...], float]:
    """Values by name and the labels' values, in the order of the labels.

    Without what all have: ``cdc_assets_``, and the source's label.
    """
    status, text = got(port, "/metrics", token)
    if status != 200:
        raise OSError(f"HTTP {status}")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sorted(sample.labels.items()))
            assert labels.pop("source") == source
            key = (sample.name.removeprefix("cdc_assets_"), *labels.values())
            assert key not in found
            found[key] = sample.value
    return found
