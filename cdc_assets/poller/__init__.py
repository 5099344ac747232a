"""Query mode: changes are found by queries, by a *watermark* that each of them sets anew.

A watermark is the server's time, or a number of one sequence. Whoever asks for the rows above the
greatest one so far loses changes: two rows may have the same, and a transaction that took its
watermark first may commit last. Here is what is asked for instead, and why nothing is lost.

**The rule.** Poll i of a table notes, in this order: a *bound* b(i), which no watermark that is
taken from now on is below; then H(i), all transactions that are running, whether or not they have
written, prepared ones too (``source``). Then it reads, page by page, all rows with a watermark of
r(i) or above, and stages them as upserts. Each transaction x of an H has ``since(x)``, the bound of
the poll before the first one whose H had it: x began after that poll's H was noted, and so has no
watermark below. r(i) is the least of b(i - 1) and of since(x) for each x that was in H(i - 1) and
isn't in H(i) (``bounds``).

**Why it is right.** Let a change committed by T have the watermark w. If no poll until i has read
it, then T is in H(i), or began after H(i) was noted, and w >= b(i). For T was in no H: then it
began after some H(j) and was over before H(j + 1), so w >= b(j) >= r(j + 1), and poll j + 1, whose
statements come after H(j + 1), reads it. Or T was in H(j) and not in H(j + 1): a transaction's
lock on its own id is released after it is visible, so all statements of poll j + 1 see it, and they
begin at since(T) or below. So each change is read by the first poll that T isn't running at. Rows
that have a later change by then are read with that one. Nothing is said of how many snapshots
a poll reads under, so each page is a statement of its own, and no transaction is ever left open. A
row that moves to a higher watermark while pages are read is read by its new one, now or by the next
poll. Ties cost nothing: r(i) itself is read, too, and pages go on by watermark *and key*.

What is read twice is harmless in a mirror of states; a row *version* that the last poll staged
isn't staged again (``rows``). Were r(i) = b(i - 1) alone, or the greatest watermark so far, the
change of a transaction that commits late would be lost: tests have that as a mutation.

**A prepared transaction** has another id than the session that began it. A new one may be any of
those that ran at the last poll: its ``since`` is the least of theirs. Not only of those that ended:
for a moment both ids are held.

**What is assumed**: b(i) is below every watermark that is taken later. Of a clock, it is the
server's time, less a margin for a process that read the clock and hasn't shown its transaction yet;
a clock that is set back is noticed, and all is read from there on that may have been written since
(``clock``). Of a sequence, it is the greatest number that a row has. Numbers that a session cached,
and clocks of other servers, break that, and ``lag`` makes up for it. Hot standbys don't tell which
transactions run: there the bound is the time of the last commit that is replayed, less ``lag``,
which has to be longer than any transaction that writes.

**Where it goes on.** What is persisted of a table is the least bound that is still needed
(``Known.safe``), in one transaction with the files: killed in between, a poll is read again. A
longer transaction, or an outage, costs one longer read, and no change.

**Positions.** A poll has the LSN p that was current before anything was noted: what had committed
below it and was visible is in the log once ``flushed_lsn`` is p. Its rows have LSNs of after they
were read: whatever a row shows had committed below its ``_commit_lsn``. A copy's point is below all
of these: what it has as well is applied again, by key. Rows count once what they show is flushed.

**Deletes** show in no query of changes. The keys that the lake has are looked up at the source from
time to time (``backfill.surplus``), by the rule of backfills, which holds of this log, too: what a
lookup didn't see committed later than its horizon, and is in the log with a later LSN.
"""
