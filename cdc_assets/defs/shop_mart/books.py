"""What the bank has at each mark: an example of an asset that reads several tables at one moment.

Every transaction of the demo's bank changes an account, a teller and a branch by the same amount,
so their sums are equal at any moment of the source. Tables that are merely current are seconds
apart; the tags of a mark are of one LSN, so these sums can't tear.
"""

# No postponed annotations here: Dagster looks at the type of `context` itself.
from collections.abc import Iterator

import dagster as dg
from pyspark.sql import functions as F

from cdc_assets.dagster.resources.owner import end_with_owner
from cdc_assets.dagster.resources.sources import configuration
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.lake.catalog.catalog import CATALOG

MARKS = dg.AssetKey(["marks", "shop"])
PARTITIONS = dg.DynamicPartitionsDefinition(name="marks/shop")
TABLE = "mart.books"
_SUMS = {
    "accounts": ("pgbench_accounts", "abalance"),
    "tellers": ("pgbench_tellers", "tbalance"),
    "branches": ("pgbench_branches", "bbalance"),
}


@dg.asset(
    key=["mart", "books"],
    partitions_def=PARTITIONS,
    deps=[MARKS],
    group_name="shop",
    kinds={"spark", "iceberg"},
    owners=["team:shop"],
    description="What accounts, tellers and branches have in all, at each mark: three equal sums.",
    automation_condition=dg.AutomationCondition.eager(),
    required_resource_keys={"spark_shop"},
    check_specs=[dg.AssetCheckSpec("balanced", asset=["mart", "books"])],
    metadata={"dagster/table_name": TABLE},
)
def books(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
    end_with_owner()
    session = spark_session(context.resources.spark_shop, configuration("shop"))
    name = context.partition_key
    sums = {
        what: session.sql(
            f"select cast(coalesce(sum({column}), 0) as bigint)"
            f" from {CATALOG}.shop.{table} version as of 'mark_{name}'"
        ).collect()[0][0]
        for what, (table, column) in _SUMS.items()
    }
    session.sql(f"create namespace if not exists {CATALOG}.mart")
    columns = "mark string, accounts bigint, tellers bigint, branches bigint"
    made = f"create table if not exists {CATALOG}.{TABLE} ({columns}) using iceberg"
    session.sql(f"{made} partitioned by (mark)")
    row = session.createDataFrame([(name, *sums.values())], columns)
    row.writeTo(f"{CATALOG}.{TABLE}").overwrite(F.col("mark") == name)
    balanced = dg.AssetCheckResult(passed=len({*sums.values()}) == 1, check_name="balanced")
    yield dg.MaterializeResult(metadata=sums, check_results=[balanced])
