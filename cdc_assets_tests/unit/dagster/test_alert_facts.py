"""What Dagster knows and alerts are made of: runs that failed, checks that failed or aren't run."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.checks import sample, values
from cdc_assets.dagster.checks.tables import LOOKED_AT_AGAIN
from cdc_assets.dagster.names import all_tables, run_tags
from cdc_assets.dagster.sensors.observe import alerts
from cdc_assets.log.sessions.flusher_status import FlusherStatus
from cdc_assets.messages.texts import described
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import Facts, FailedCheck, Unchecked
from cdc_assets.observe.status import SourceStatus, TableStatus

CONFIG = parse_config(
    {
        "name": "shop",
        "postgres": {"dsn": "postgresql://nowhere/db"},
        "tables": [{"name": "public.t"}, {"name": "public.u"}],
    },
    "test",
)
T, U = (dg.AssetCheckKey(names.lake, "rows_match_source") for names in all_tables(CONFIG))


def _ran(instance: dg.DagsterInstance, work: str, *, well: bool) -> None:
    status = dg.DagsterRunStatus.SUCCESS if well else dg.DagsterRunStatus.FAILURE
    instance.add_run(
        dg.DagsterRun(work, str(uuid.uuid4()), status=status, tags=run_tags(CONFIG, work))
    )


def test_what_runs_seldom_and_fails_is_not_well_because_others_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alerts, "_RUNS", 5)

    def failed(instance: dg.DagsterInstance) -> list[tuple[str, int]]:
        return [(run.name, run.in_a_row) for run in alerts.failed_runs(instance, CONFIG)]

    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(3):
            _ran(instance, "maintain", well=False)
        for _ in range(9):
            _ran(instance, "materialize", well=True)
        assert failed(instance) == [("maintain", 3)]
        _ran(instance, "maintain", well=True)
        assert failed(instance) == []


def test_a_check_that_failed_has_failed_until_it_is_evaluated_again() -> None:
    @dg.asset_check(asset=T.asset_key, name=T.name)
    def check() -> dg.AssetCheckResult:
        raise RuntimeError("its run dies")

    job = dg.define_asset_job("again", selection=dg.AssetSelection.checks(check))
    again = dg.Definitions(asset_checks=[check], jobs=[job]).resolve_job_def("again")

    def failed(instance: dg.DagsterInstance) -> list[str]:
        found: tuple[FailedCheck, ...] = alerts.failed_checks(alerts.evaluations(instance, [T, U]))
        return [one.asset for one in found]

    with dg.DagsterInstance.ephemeral() as instance:

        def evaluated(*, passed: bool) -> None:
            instance.report_runless_asset_event(
                dg.AssetCheckEvaluation(check_name=T.name, asset_key=T.asset_key, passed=passed)
            )

        assert failed(instance) == []
        evaluated(passed=False)
        assert failed(instance) == ["shop/t"]
        instance.create_run_for_job(again)  # it waits in the queue
        assert failed(instance) == ["shop/t"]
        assert not again.execute_in_process(instance=instance, raise_on_error=False).success
        assert failed(instance) == ["shop/t"]
        evaluated(passed=True)
        assert failed(instance) == []


@pytest.mark.parametrize(
    ("said", "what", "remedy"),
    [
        (f"Values that have no form: v: 3. {values.REMEDY}", "no form: v: 3.", values.REMEDY),
        (f"{sample.REMEDY}", "", sample.REMEDY),
        (
            f"t wasn't looked at: the Postgres is away. {LOOKED_AT_AGAIN}",
            "t wasn't looked at: the Postgres is away.",
            LOOKED_AT_AGAIN,
        ),
        ("t doesn't exist.", "t doesn't exist.", None),
    ],
)
def test_what_a_check_says_is_to_be_done_is_said_once(
    said: str, what: str, remedy: str | None
) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                check_name=T.name,
                asset_key=T.asset_key,
                passed=False,
                description=described(said),
            )
        )
        [found] = alerts.failed_checks(alerts.evaluations(instance, [T]))
    assert found.said.endswith(what) and found.remedy == remedy
    assert remedy is None or remedy not in found.said


def test_checks_that_nobody_runs_are_told_however_green_they_are() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(check_name=T.name, asset_key=T.asset_key, passed=True)
        )
        known = alerts.evaluations(instance, [T, U])
    at = datetime.fromtimestamp(known[T].create_timestamp, UTC)
    found = alerts.unchecked(known, [T, U])
    assert found == (Unchecked(T.name, 1, at), Unchecked(T.name, 1, None))

    def grades(later: timedelta) -> list[tuple[str, str | None]]:
        facts = Facts(at + later, unchecked=found)
        return [
            (c.key, c.limits.grade((facts.now - (c.since or at)).total_seconds()))
            for c in conditions(facts, CONFIG)
        ]

    both = ["unchecked:rows_match_source", "unchecked:rows_match_source:never"]
    assert grades(timedelta(hours=23)) == [(key, None) for key in both]
    assert grades(timedelta(hours=25)) == [(key, "warn") for key in both]
    assert grades(timedelta(days=7)) == [(key, "fail") for key in both]


def _status(flusher: str, state: str) -> SourceStatus:
    table = TableStatus("public.t", "shop.t", state, epoch=1)
    return SourceStatus("shop", (table,), "cdc_shop", None, FlusherStatus(flusher), {})


def test_a_table_that_nobody_takes_up_is_told_unless_the_source_was_given_up() -> None:
    def keys(flusher: str, state: str) -> list[str]:
        facts = Facts(datetime.now(UTC), status=_status(flusher, state))
        return [condition.key for condition in conditions(facts, CONFIG)]

    assert keys("streaming", "new") == ["new:public.t"]
    assert keys("dropped", "new") == []
