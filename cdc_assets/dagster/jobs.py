"""Operations on a source as jobs: the same functions that the commands call.

Each reports what it did as metadata of its operation's output. Maintenance has a job of its own
(``maintain_<source>_tables``).
"""

# No postponed annotations here: Dagster looks at the types of `context` and `config` itself.
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import dagster as dg
from pydantic import Field

from cdc_assets.config.addresses import selected
from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.names import SOURCE_TAG
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.errors import ConfigurationError, TableProblem, TablesFailed
from cdc_assets.flusher.reach import reach
from cdc_assets.log.asked import wishes as pauses
from cdc_assets.log.store import LogStore
from cdc_assets.messages.texts import counted, described
from cdc_assets.operations import copying
from cdc_assets.operations.drop import drop_source, refuse_unmeant
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.operations.repair import repairer
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.verify.compare import verify
from cdc_assets.verify.difference import Comparison

AS_IN_SQL = 'as SQL spells them, like ["public.orders", "public.\\"My.Table\\""]'


class NamedTables(dg.Config):
    """Tables by name."""

    tables: list[str] = Field(description=f"Which tables, {AS_IN_SQL}.")


class TablesOrAll(dg.Config):
    """Tables by name, or everything."""

    tables: list[str] = Field(
        default_factory=list,
        description=f"Which tables, {AS_IN_SQL}. None named: the whole source.",
    )


class Verified(TablesOrAll):
    """Tables to compare, and what is done then."""

    repair: bool = Field(
        default=False, description="Correct the rows that differ, and compare those tables again."
    )


class DropTableConfig(dg.Config):
    """A table that is out of the configuration."""

    table: str = Field(description="Which table, as SQL spells it, like public.orders.")
    purge: bool = Field(
        default=False, description="Drop the lake table, too, with its files: it can't be undone."
    )


class DropConfig(dg.Config):
    """What has to be typed before a source is given up."""

    source: str = Field(
        description="Type the source's name. Its slot and its publication are removed, so later"
        " changes don't reach the lake; the lake tables stay as they are."
    )
    files: bool = Field(default=False, description="Delete the staged changes, too.")


def operation_jobs(source: SourceConfig) -> list[dg.JobDefinition]:
    """``resync_<source>``, and the like for what else a person decides."""
    none_yet: dict[str, Any] = {"tables": []}
    compares = [
        job_of(
            source,
            "verify",
            _verify(source),
            "Compares every row of source and lake at one LSN, and names the keys that differ."
            " Costs about one copy. With repair: true, these keys are corrected.",
            {**none_yet, "repair": False},
        )
    ]
    return [
        job_of(
            source,
            "resync",
            _resync(source),
            "Copies tables anew, whatever state they are in, while the others flow. Readers see the"
            " old rows until it is complete. The sensors do the work: see the snapshot's runs.",
            none_yet,
        ),
        job_of(
            source,
            "pause",
            _pausing(source, "pause", pauses.pause),
            "Applies nothing more to tables, or to the whole source, until it is resumed. Changes"
            " go on being staged, so the source keeps no WAL for it.",
            none_yet,
        ),
        job_of(
            source,
            "resume",
            _pausing(source, "resume", pauses.resume),
            "Ends a pause: what has waited is applied. A dropped source is taken up again, and"
            " every table copied anew.",
            none_yet,
        ),
        *(compares if source.query is None else ()),
        job_of(
            source,
            "remove",
            _remove(source),
            "Gives a table up that is out of the configuration: nothing of it is staged any more.",
            {"table": "", "purge": False},
        ),
        job_of(
            source,
            "drop",
            _drop(source),
            "Gives the source up: removes its slot and its publication. The lake tables stay.",
            {"source": "", "files": False},
        ),
    ]


def job_of(
    source: SourceConfig,
    verb: str,
    work: dg.OpDefinition,
    description: str,
    config: dict[str, Any],
) -> dg.JobDefinition:
    """A job of one operation; ``config`` is what its launchpad begins with."""

    @dg.job(
        name=f"{verb}_{source.name}",
        description=description,
        config=dg.RunConfig(ops={verb: {"config": config}}),
        tags={SOURCE_TAG: source.name},
        executor_def=dg.in_process_executor,
    )
    def job() -> None:
        work.alias(verb)()

    return job


def _resync(source: SourceConfig) -> dg.OpDefinition:
    @dg.op(name=f"resync_tables_of_{source.name}")
    @run_of(source)
    def resync(context: dg.OpExecutionContext, config: NamedTables) -> None:
        if not config.tables:
            raise ConfigurationError("name the tables to copy anew under tables:.")
        tables = selected(source, config.tables)
        with Pipeline.open(source) as pipeline:
            copying.mark_for_copy(pipeline, tables)
        context.add_output_metadata({"copied anew": _listed(tables)})

    return resync


def _pausing(
    source: SourceConfig, name: str, do: Callable[[LogStore, Any], object]
) -> dg.OpDefinition:
    @dg.op(name=f"{name}_tables_of_{source.name}")
    @run_of(source)
    def work(context: dg.OpExecutionContext, config: TablesOrAll) -> None:
        with Pipeline.open(source) as pipeline:
            for table in selected(source, config.tables) if config.tables else []:
                do(pipeline.store, table)
            if not config.tables and name == "resume" and copying.resume(pipeline):
                context.log.info("The source was dropped: every table will be copied anew.")
            elif not config.tables:
                do(pipeline.store, None)
            paused = pauses.paused(pipeline.store)
        said = [f"{table} since {since}" for table, since in sorted(paused.items())]
        context.add_output_metadata({"paused now": _listed(said)})

    return work


def _verify(source: SourceConfig) -> dg.OpDefinition:
    resource = f"spark_{source.name}"

    @dg.op(name=f"verify_tables_of_{source.name}", required_resource_keys={resource})
    @run_of(source)
    def compare(context: dg.OpExecutionContext, config: Verified) -> None:
        session = spark_session(getattr(context.resources, resource), source)
        with Pipeline.open(source) as pipeline:
            found = verify(
                pipeline,
                session,
                selected(source, config.tables),
                partial(reach, pipeline),
                on_progress=context.log.info,
                mend=repairer(pipeline, session) if config.repair else None,
            )
        context.add_output_metadata({"comparison": dg.MetadataValue.md(comparison_markdown(found))})
        odd = [one for one in found if not one.equal]
        if odd:
            raise TablesFailed(
                [
                    TableProblem(
                        one.table,
                        one.problem
                        or f"{counted(one.differing, 'key', 'differ')}: {'; '.join(one.keys)}",
                        _remedy(one),
                    )
                    for one in odd
                ]
            )

    return compare


def _remedy(one: Comparison) -> str:
    if one.problem is not None:
        return ""
    if one.unrepaired is not None:
        return f"They weren't corrected: {one.unrepaired}"
    return "Report it, and have it corrected: repair: true."


def comparison_markdown(found: Sequence[Comparison]) -> str:
    """What verify found, as a table."""
    rows = [
        f"| {described(str(one.table))} | {one.source_rows:,} | {one.lake_rows:,} |"
        f" {described(one.problem or str(one.differing or 'equal'))} | {one.lsn or ''} |"
        f" {one.seconds:.1f} s | {described('; '.join(one.remarks))} |"
        for one in found
    ]
    head = ["| table | source rows | lake rows | keys that differ | at LSN | took | remarks |"]
    return "\n".join([*head, "|---|---|---|---|---|---|---|", *rows])


def _remove(source: SourceConfig) -> dg.OpDefinition:
    @dg.op(name=f"drop_table_of_{source.name}")
    @run_of(source)
    def drop(context: dg.OpExecutionContext, config: DropTableConfig) -> None:
        try:
            table = TableId.parse(config.table)
        except ValueError as error:
            raise ConfigurationError(f"table: {error}.") from error
        with Pipeline.open(source) as pipeline:
            done = drop_table(pipeline, table, purge=config.purge)
        context.add_output_metadata(
            {
                "publications": _listed(done.publications),
                "still in": _listed(done.still_in),
                "left to its owner": _listed(done.refused),
                "purged": ", ".join(done.purged) or "nothing",
                "files": done.files,
                "bytes": done.bytes,
            }
        )

    return drop


def _drop(source: SourceConfig) -> dg.OpDefinition:
    @dg.op(name=f"drop_source_{source.name}")
    @run_of(source)
    def drop(context: dg.OpExecutionContext, config: DropConfig) -> None:
        refuse_unmeant(source, config.source, f"Type source: {source.name} if that is meant.")
        with Pipeline.open(source) as pipeline:
            done = drop_source(pipeline, files=config.files)
        context.add_output_metadata(
            {
                "slot": done.slot or "there was none",
                "publication": done.publication or "none was removed",
                "left to its owner": _listed(done.refused),
                "files": done.files,
                "bytes": done.bytes,
            }
        )

    return drop


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "nothing"
