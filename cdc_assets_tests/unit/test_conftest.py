"""What ``conftest.py`` does for every test."""

from __future__ import annotations

import logging

import pytest
from pyspark.logger import PySparkLogger


def test_what_is_read_of_the_log_keeps_its_form(caplog: pytest.LogCaptureFixture) -> None:
    quiet = PySparkLogger.getLogger("like_that_of_a_querys_context")
    quiet.addHandler(caplog.handler)
    try:
        logging.getLogger("ours").warning('public."ORDERS" is left out')
    finally:
        quiet.removeHandler(caplog.handler)
    assert 'public."ORDERS" is left out' in caplog.text
