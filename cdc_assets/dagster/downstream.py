"""When to build assets again that depend on lake tables.

A lake table isn't like an asset that is built now and then. It is reported twice a minute or so,
also while nothing happens to it, and under traffic a run that merges into it is nearly always under
way. ``AutomationCondition.eager()`` as it is would therefore build after every report and, because
it waits for runs that are in progress, at moments that are left to chance. Merges are atomic: a
table can be read at any time.
"""

from __future__ import annotations

import dagster as dg

EVERY_FIVE_MINUTES = "*/5 * * * *"


def after_merges(at_most: str = EVERY_FIVE_MINUTES) -> dg.AutomationCondition[dg.AssetKey]:
    """Eager for what is downstream of lake tables.

    True once a dependency's *rows* changed (a report of a quiet table has the data version of the
    one before), whoever is merging, and the asset wasn't built since the last tick of the cron
    schedule ``at_most``. A change in between is built at the next tick.
    """
    conditions = dg.AutomationCondition
    changed = conditions.any_deps_match(conditions.data_version_changed())
    built = conditions.newly_updated().since(conditions.cron_tick_passed(at_most))
    eager = (
        conditions.eager()
        .without(~conditions.any_deps_in_progress())
        .replace("any_deps_updated", changed.with_label("any_deps_changed"))
    )
    return (eager & ~built).with_label(f"after_merges({at_most})")
