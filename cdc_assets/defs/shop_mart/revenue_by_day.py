"""What the shop earned by day: an example of an asset that is built on lake tables.

It reads the Iceberg tables, not Postgres, and writes an Iceberg table beside them in one atomic
step. Each lake table is read as of one merge; two of them may be a few seconds apart (``books``
reads tables that aren't).
"""

# No postponed annotations here: Dagster looks at the type of `context` itself.
import dagster as dg

from cdc_assets.dagster.downstream import after_merges
from cdc_assets.dagster.resources.owner import end_with_owner
from cdc_assets.dagster.resources.sources import configuration
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.lake.catalog.catalog import CATALOG

ORDERS, LINES = dg.AssetKey(["shop", "orders"]), dg.AssetKey(["shop", "order_lines"])
TABLE = "mart.revenue_by_day"
COLUMNS = {
    "day": ("date", "of the order, in UTC", [(ORDERS, "placed_at")]),
    "orders": ("bigint", "that were placed", [(ORDERS, "id")]),
    "revenue": ("decimal(22,2)", "their totals, in euros", [(ORDERS, "total")]),
    "articles": ("bigint", "in all their lines", [(LINES, "quantity")]),
}
_SELECT = f"""
select cast(o.placed_at as date) as day, count(*) as orders, sum(o.total) as revenue,
       sum(coalesce(l.quantity, 0)) as articles
  from {CATALOG}.shop.orders o
  left join (select order_id, sum(quantity) as quantity
               from {CATALOG}.shop.order_lines group by order_id) l on l.order_id = o.id
 group by cast(o.placed_at as date)
"""


@dg.asset(
    key=["mart", "revenue_by_day"],
    deps=[ORDERS, LINES],
    group_name="shop",
    kinds={"spark", "iceberg"},
    owners=["team:shop"],
    description="Orders, revenue and articles by day, from the lake's tables.",
    automation_condition=after_merges(),
    required_resource_keys={"spark_shop"},
    metadata={
        "dagster/table_name": TABLE,
        "dagster/column_schema": dg.TableSchema(
            columns=[
                dg.TableColumn(name, kind, description=said)
                for name, (kind, said, _) in COLUMNS.items()
            ]
        ),
        "dagster/column_lineage": dg.TableColumnLineage(
            {
                name: [dg.TableColumnDep(asset_key=key, column_name=column) for key, column in deps]
                for name, (_, _, deps) in COLUMNS.items()
            }
        ),
    },
)
def revenue_by_day(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
    end_with_owner()
    session = spark_session(context.resources.spark_shop, configuration("shop"))
    session.sql(f"create namespace if not exists {CATALOG}.mart")
    session.sql(f"create or replace table {CATALOG}.{TABLE} using iceberg as {_SELECT}")
    built = session.table(f"{CATALOG}.{TABLE}")
    return dg.MaterializeResult(metadata={"dagster/row_count": built.count()})


@dg.definitions
def marts() -> dg.Definitions:
    """The sensor that asks for the runs; on from the start, as the others are."""
    sensor = dg.AutomationConditionSensorDefinition(
        "marts_shop",
        target=dg.AssetSelection.keys(["mart", "revenue_by_day"], ["mart", "books"]),
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=15,
        description="Builds what is built on lake tables again once their rows changed.",
    )
    return dg.Definitions(assets=[revenue_by_day], sensors=[sensor])
