"""A second lake: the log of one source is passed on, and becomes the log of another one, too.

The *first* source streams and stages. The second (``log:`` in its YAML) has tables, copies, merges
and care of its own, and neither slot nor staged files: its log's entries name the first one's
files. Both logs are in one coordination schema, and so one transaction passes entries on.

**The same offsets.** A table's entries have the offsets in the second log that they have in the
first. So nothing is translated; where the second log ends (``log_seq``) says what is passed on; and
the second lake's cursor is, as it is, the cursor of its consumer group in the first log.

**A table begins** (``beginning``) while the first one logs it, which it does without a gap from its
pin on, for as long as that copy of it lasts. The group's cursor is set to the end of the first log:
it names that copy, and holds what is registered from now on. Only then the table's pin is taken,
and whatever commits at the pin's point or above is registered after that. So the second log has all
of it, whatever was removed of the first one before.

**Entries are passed on** (``passing``) in steps, each one transaction. A step reads how far the
first log is flushed, F; or where it has a marker before that, which ends a flush; or, of a long
backlog, where some table has so many entries. It inserts the entries whose transactions all ended
at or below F, of each table whose copy, in that statement's snapshot, is the one that the group's
cursor names; and moves the second ``flushed_lsn`` to F. A flush is one transaction, and F is read
first: the entries up to F are all there. A table's entries rise in commit order, so they are a
prefix of what is to be passed on, and invariants 1 to 3 hold of the second log as they do of the
first; so do marks, which are made where a log is level. Before the step commits, each table whose
copy isn't the cursor's any more begins a copy of its own anew: what its log lacks up to F doesn't
count then. Killed anywhere, a step was done or wasn't.

**What the first one does** to a table. Its resync, its parking and its giving up all end the log of
a copy, by another epoch or another state, in a transaction before any entry is left out. So no step
passes on an entry behind a gap. A copy of the whole first log that can't be continued
(``begin_anew``) ends all of them.

**What is held.** The group's cursor follows the second lake's, while its table streams; the first
one's maintenance waits for it, and for its own grace (invariant 11). The first one can't look at
the second lake's tables, and one that was set back needs what the cursor is past. So the first
removes nothing that the second log has of a table that is held (``log.groups.lakes``): the second
one's maintenance has to be through first, which reads its lake table's cursor, and has a grace of
its own. It takes the group's cursor back, too, where a table was set back. Of a table that isn't
held, the entries go from both logs before the file does. While a table is copied, the cursor stays.
A table that is parked or given up holds nothing: only a new copy, from a new pin, takes it up
again. If somebody drops the group, what follows may be removed at any moment: each table with a
copy is parked, and says so. The log is given up by ``drop-source`` alone, which lets go of the
group: until then nothing begins with another ``log:``, or without it (``first.refuse_other_log``).
What a step passes on meanwhile is gone with the rest: it moves ``flushed_lsn`` only where there is
one.
"""
