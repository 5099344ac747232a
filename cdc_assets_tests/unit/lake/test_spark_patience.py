"""How long a request to Spark is retried when nothing answers."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.lake.spark.session import RETRIES, Patience


def _refused() -> Exception:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        channel.unary_unary("/nobody/home")(b"", timeout=10)
    error: Exception = refused.value
    return error


@pytest.mark.parametrize(("spark", "retried"), [({}, False), ({"remote": "sc://far:1"}, True)])
def test_a_local_server_that_is_gone_is_not_waited_for(
    spark: dict[str, str], retried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDC_ASSETS_HOME", str(tmp_path))
    source = {"name": "src", "postgres": {"dsn": "postgresql://h"}, "tables": [{"name": "t"}]}
    config = parse_config({**source, "spark": spark}, "test")
    patience = Patience(config)
    assert patience.can_retry(_refused()) is retried
    state, waits = patience.to_state(), list[int]()
    while (wait := state.next_attempt()) is not None:
        waits.append(wait)
    assert len(waits) == RETRIES and sum(waits) < 20_000
