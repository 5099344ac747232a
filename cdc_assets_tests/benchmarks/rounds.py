"""Runs over all tables of a source, launched as a sensor or a schedule would."""

from __future__ import annotations

from collections.abc import Callable

from cdc_assets.dagster.names import SOURCE_TAG, WORK_TAG, job_name
from cdc_assets.dagster.part import PART_TAG
from cdc_assets_tests.e2e.dev_server import DevServer

_LAUNCH = """
mutation ($selector: JobOrPipelineSelector!, $tags: [ExecutionTag!]) {
  launchRun(executionParams: {selector: $selector, executionMetadata: {tags: $tags}}) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  }
}"""
_STATUS = "query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
_NODES = (
    "{ repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } } }"
)


def launched(server: DevServer, source: str, work: str) -> Callable[[], bool]:
    """Begin a run of ``work`` over all tables; whether it is over."""
    (found,) = server.ask(_NODES)["repositoriesOrError"]["nodes"]
    names = {"repositoryName": found["name"], "repositoryLocationName": found["location"]["name"]}
    tags = {SOURCE_TAG: source, WORK_TAG: work, PART_TAG: "true"}
    asked = server.ask(
        _LAUNCH,
        selector={**names, "jobName": job_name(source, work)},
        tags=[{"key": key, "value": value} for key, value in tags.items()],
    )
    run = asked["launchRun"]["run"]["runId"]

    def is_over() -> bool:
        status = server.ask(_STATUS, id=run)["runOrError"]["status"]
        assert status != "FAILURE", f"the run {work} failed"
        return bool(status == "SUCCESS")

    return is_over
