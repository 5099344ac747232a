"""Definitions as they are built in the process of a run, which a code server starts."""

from __future__ import annotations

import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import dagster as dg
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._grpc.types import ExecuteExternalJobArgs
from dagster._serdes import deserialize_value, serialize_value

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.build import process_defs


def built_in_a_run(
    instance: dg.DagsterInstance, run: dg.DagsterRun, settings: list[dict[str, Any]]
) -> dict[str, Any]:
    """The ``keys`` of assets and of checks, ``jobs``, and seconds of CPU, of sources' definitions.

    As in the process that executes ``run``; its job is resolved, too. ``instance``: in files.
    """
    location = GrpcServerCodeLocationOrigin(host="localhost", port=1, location_name="test")
    origin = RemoteJobOrigin(
        repository_origin=RemoteRepositoryOrigin(
            code_location_origin=location, repository_name="test"
        ),
        job_name=run.job_name,
    )
    asked = ExecuteExternalJobArgs(
        job_origin=origin, run_id=run.run_id, instance_ref=instance.get_ref()
    )
    spawned = multiprocessing.get_context("spawn")
    here, there = spawned.Pipe(duplex=False)
    arguments = (serialize_value(asked), json.dumps(settings), run.job_name, there)
    process = spawned.Process(target=_build, args=arguments)
    process.start()
    there.close()
    found: dict[str, Any] = here.recv()  # EOFError if it ended before
    process.join()
    return found


def _build(asked: str, settings: str, job: str, there: Connection) -> None:
    configs = [parse_config(each, "test") for each in json.loads(settings)]
    given = deserialize_value(asked, ExecuteExternalJobArgs)
    assert given.instance_ref is not None
    with dg.DagsterInstance.from_ref(given.instance_ref) as instance:  # as Dagster does before
        instance.get_run_by_id(given.run_id)
    began = time.process_time()
    defs = dg.Definitions.merge(*(process_defs(config) for config in configs))
    repository = defs.get_repository_def()
    repository.get_job(job)
    seconds = time.process_time() - began
    graph = repository.asset_graph
    there.send(
        {
            "keys": sorted(key.to_user_string() for key in graph.executable_asset_keys),
            "checks": sorted(
                f"{k.asset_key.to_user_string()}:{k.name}" for k in graph.asset_check_keys
            ),
            "jobs": sorted(each.name for each in repository.get_all_jobs()),
            "seconds": seconds,
        }
    )
