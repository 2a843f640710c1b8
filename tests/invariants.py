"What must hold of a scheduler and its blocks at every step, for tests and chapters: takes time in proportion to all tokens held."

import math

from batchlab.core import scheduler


def check_pool(pool):
    "Raise `AssertionError` unless the books of `pool` agree with each other."
    free, cached, index = set(pool.free), set(pool.cached), pool.index
    assert len(free) == len(pool.free) and not free & cached, (
        "a block is free twice, or free and cached"
    )
    assert pool.free == sorted(free), "free blocks are out of order"
    for i, b in enumerate(pool.blocks):
        assert (b.refs == 0) == (i in free or i in cached), (
            f"block {i} is held and free, or neither"
        )
        assert i not in free or not (b.token_ids or b.listed), f"free block {i} holds something"
        assert i not in cached or b.listed, f"cached block {i} can not be found"
        assert len(b.token_ids) <= pool.block_size, f"block {i} holds too much"
        assert b.listed == (i in index.children.get(b.parent, ())), (
            f"block {i} is not listed where it should be"
        )
        assert b.hash is None or b.hash == index.chain(b.token_ids, b.parent), (
            f"block {i} is not what its hash says"
        )
        assert not b.listed or b.hash is None or index.full.get(b.hash) == i, (
            f"full block {i} is not found by its hash"
        )
    assert all(pool.blocks[i].hash == h for h, i in index.full.items()), (
        "a hash leads to another block"
    )
    assert sum(map(len, index.children.values())) == sum(b.listed for b in pool.blocks), (
        "a block is listed twice"
    )
    assert len(pool.blocks) * pool.block_size <= pool.budget.left(pool), (
        "more memory than there may be"
    )


def check_requests(s, plan):
    "No request is in two places, none that has ended is still queued, and where there is work a step does some."
    running, waiting = set(s.running), set(s.waiting)
    assert len(running) == len(s.running) and len(waiting) == len(s.waiting), "twice in one queue"
    assert len(running) <= s.max_num_seqs, "too many run"
    assert not running & waiting, "both waiting and running"
    assert all(r.finish_reason is None for r in running | waiting), "ended and still queued"
    assert all(
        r.slot is None and not r.block_table and r.num_computed_tokens == 0 for r in waiting
    ), "waiting with a slot"
    assert all(a.rank < b.rank for a, b in zip(s.waiting, s.waiting[1:])), "out of order"
    alone = s.budget.left(s.pool if s.block_size else s.slots) == (
        math.inf if s.budget.limit is None else s.budget.limit
    )
    assert plan.rows or not s.has_unfinished or not alone or s.allowance == 0, (
        "there is work and the step does none"
    )
    assert set(plan.admitted) <= running, "admitted and not running"
    assert set(plan.preempted) <= waiting, "preempted and not waiting"
    slots = [r.slot for r in s.running if r.slot is not None]
    assert sorted([*slots, *s.slots.free]) == list(range(s.max_num_seqs)), (
        "a slot is used twice, or lost"
    )


def check_blocks(s, plan):
    """Each block is held as often as tables name it and holds exactly the tokens that are computed.

    A row writes only into blocks that no other request holds, and a copy's source holds what the target is said to have."""
    if not s.block_size:
        return
    check_pool(s.pool)
    held = {}
    for r in s.running:
        for i in r.block_table:
            held[i] = held.get(i, 0) + 1
        lies = [t for i in r.block_table for t in s.pool.blocks[i].token_ids]
        assert lies == r.token_ids[: r.num_computed_tokens], "blocks hold other tokens"
        assert len(set(r.block_table)) == len(r.block_table), "a block twice in one table"
    owned = dict(held)
    for source, _, _ in plan.copies:
        held[source] = held.get(source, 0) + 1
    assert all(b.refs == held.get(i, 0) for i, b in enumerate(s.pool.blocks)), (
        "a block is held by none, or by too many"
    )
    for row in plan.rows:
        first, last = row.start // s.block_size, (row.start + row.n_tokens - 1) // s.block_size
        assert last < len(row.request.block_table), "a row reaches beyond its blocks"
        assert all(owned[i] == 1 for i in row.request.block_table[first : last + 1]), (
            "a row writes into another's block"
        )
    for a, b, n in plan.copies:
        x, y = (s.pool.blocks[i].token_ids for i in (a, b))
        assert a != b and x[:n] == y[:n] != [], "copies something else"


def check_rows(s, plan):
    """Rows continue where the request stands, every decoding request has one, and the budget is kept, and used.

    No request that could take a position is left with less while some are unspent."""
    rows, barrier = {row.request: row for row in plan.rows}, getattr(s, "barrier", False)
    assert len(rows) == len(plan.rows) and set(rows) <= set(s.running), (
        "a row twice, or of a request that does not run"
    )
    assert [row.n_tokens > 1 for row in plan.rows] == sorted(
        row.n_tokens > 1 for row in plan.rows
    ), "single tokens come first"
    for r, row in rows.items():
        known, drafts = row.n_tokens - len(row.draft_ids), len(row.draft_ids)
        assert row.start == r.num_computed_tokens and 1 <= known <= r.num_pending, (
            "not the positions it needs"
        )
        assert not drafts or (known == r.num_pending and r.num_tokens + drafts < r.max_len), (
            "drafts where none can be checked, or beyond the end"
        )
    late = sum(row.n_tokens for r, row in rows.items() if r.preemptible)
    most = math.inf if s.allowance is None or barrier else s.allowance
    assert all(
        r in rows
        for r in s.running
        if r.num_pending == 1 and not (r.preemptible and most < math.inf)
    ), "a decoding request is left out"
    assert late <= most or not s.chunked, "preemptible requests have more than they are allowed"
    if s.chunked:
        assert plan.num_tokens <= s.max_num_batched_tokens, "over budget"
        wait = sum(r.num_pending for r in s.running if r.preemptible)
        wanted = sum(r.num_pending for r in s.running if not r.preemptible) + min(wait, most)
        drafts = sum(len(row.draft_ids) for row in plan.rows)
        known = plan.num_tokens - drafts
        due = min(wanted, s.max_num_batched_tokens)
        assert plan.preempted or known == due or known < due and check_prompts(s, plan), (
            "some of the budget is unused"
        )
        assert not (plan.preempted and drafts), "drafts where memory is short"
    elif not barrier:
        assert plan.num_tokens <= s.max_num_batched_tokens or len(rows) == 1, (
            "over budget in company"
        )


def check_prompts(s, plan):
    """Beside answers that somebody waits for, prompts have no more than their part of a step, and the first of those under way half of it.

    Whether there is such a limit, and all of it is used."""
    awaited = [r.online or r.preemptible for r in [*s.running, *s.waiting]]
    theirs = {row.request: row.n_tokens for row in plan.rows if not row.request.preemptible}
    prompts = {r: n for r, n in theirs.items() if r.num_pending > 1 or r in plan.admitted}
    waited = [r for r in [*s.waiting, *plan.admitted] if not r.preemptible]
    others = [r for r in s.running if r.num_pending > 1 and not r.preemptible]
    under_way = [r for r in others if r not in plan.admitted]
    beside = s.chunked and any(awaited) and (len(theirs) > len(prompts) or waited and under_way)
    most = max(scheduler.BESIDE, s.max_num_batched_tokens // 4) if beside else math.inf
    total = sum(prompts.values())
    if s.chunked and all(awaited) and not plan.preempted:
        assert total <= most, "prompts have too much of a step beside others"
        first = min(under_way, key=lambda r: r.rank, default=None)
        assert first is None or 2 * prompts[first] >= min(2 * first.num_pending, total), (
            "the first prompt under way has less than half"
        )
    lines = sum(row.n_tokens for row in plan.rows if row.request.preemptible)
    return total + lines >= most


def check_invariants(scheduler, plan):
    """Raise `AssertionError` unless `plan` and the state of `scheduler` are right, at every point that can be checked.

    To be called between `schedule` and what changes the state next: `update`, `finish`, `preempt` or `add`."""
    for check in (check_requests, check_blocks, check_rows, check_prompts):
        check(scheduler, plan)
