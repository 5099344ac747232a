"""One thing that is wrong, and after how long it is a warning and a failure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from cdc_assets.config.alerts import Severity, WindowConfig
from cdc_assets.observe.facts import Facts

COMMAND = "cdc-assets --config FILE"


@dataclass(frozen=True, slots=True)
class Limits:
    """After how many seconds a condition is a warning, and a failure."""

    warn: float
    fail: float

    @classmethod
    def of(cls, window: WindowConfig) -> Limits:
        return cls(window.warn.total_seconds(), window.fail.total_seconds())

    def grade(self, seconds: float) -> Severity | None:
        if seconds >= self.fail:
            return "fail"
        return "warn" if seconds >= self.warn else None


WARN, FAIL = Limits(0.0, math.inf), Limits(0.0, 0.0)


def at_once(severity: Severity) -> Limits:
    return FAIL if severity == "fail" else WARN


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that is wrong: ``what`` it is, how bad (``detail``), and the ``remedy``.

    ``since`` is set where the facts know it; else the condition began when it was first seen.
    """

    key: str
    what: str
    detail: str
    remedy: str
    limits: Limits = FAIL
    since: datetime | None = None


def ago(facts: Facts, seconds: float) -> datetime:
    return facts.now - timedelta(seconds=seconds)
