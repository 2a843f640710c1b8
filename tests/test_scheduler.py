"The scheduler and its blocks: drawn cases with a model that costs nothing, edges, and that each check of their state can fail."

import random, sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from batchlab.core import scheduler
from batchlab.core.batch import make_batch
from batchlab.core.blocks import BlockPool, Hit, KVBudget
from batchlab.core.request import Request, RowOutput
from batchlab.core.scheduler import Scheduler, _append
from batchlab.llm.rectangle import PaddedScheduler
from helpers import ROOT, step_of

sys.path.append(str(ROOT / "nbs"))
from simulate import (
    FakeModel,
    check_invariants,
    check_pool,
    ids as random_ids,
    one_step,
    outputs,
    run,
)


def start(pool, ids, root=b""):
    "Enter `ids` and note all of them as computed: `(table, number of tokens found)`."
    table, copies, n = pool.enter(ids, pool.find(ids, root=root), root)
    while len(table) < pool.blocks_for(len(ids)):
        table.append(pool.take(table[-1] if table else None))
    for source, _, _ in copies:
        pool.release([source])
    pool.commit(table, n, ids[n:], root)
    check_pool(pool)
    return table, n


A, B = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 90, 91]


def complaint(f):
    "What the assertion says that fails in `f()`, or None."
    try:
        f()
    except AssertionError as e:
        return str(e)


# --- the blocks


def test_a_prefix_is_shared_block_by_block_and_its_last_tokens_are_copied():
    pool = BlockPool(4)
    a, _ = start(pool, A)
    assert pool.find(B) == Hit([0], 7, source=1, n=3)
    b, n = start(pool, B)
    assert (a, b, n, pool.hits) == ([0, 1, 2], [0, 3, 4], 7, 1)
    assert [x.refs for x in pool.blocks] == [2, 1, 1, 1, 1]
    pool.release(a)
    pool.release(b)
    assert list(pool.cached) == [2, 1, 4, 3, 0]  # children are evicted before their parents
    assert pool.find([*A[:9], 77]) == Hit([0, 1], 9, source=2, n=1)
    # false hashes lead nowhere
    assert pool.find(A[:9], hashes=[b"x", b"y"]) == Hit([], 4, source=0, n=4)


def test_a_prompt_that_is_cached_whole_writes_into_a_copy():
    pool, ids = BlockPool(4), [1, 2, 3, 4, 5, 6, 7, 8]
    start(pool, ids)
    assert pool.find(ids) == Hit([0], 7, source=1, n=3)  # all but its last token
    table, _ = start(pool, ids)
    with pytest.raises(AssertionError, match="block 0 is not to be written at 3"):
        pool.commit([0], 3, [4])
    # the same lies in block 1: once is enough to be found
    assert (pool.blocks[0].refs, pool.blocks[table[1]].listed) == (2, False)


def test_another_root_finds_nothing():
    pool = BlockPool(4)
    start(pool, A)
    start(pool, A, root=b"adapter 1")
    found = [pool.find(A, root=root).blocks for root in (b"", b"adapter 1", b"adapter 2")]
    assert found == [[0, 1], [3, 4], []]


def test_a_pool_without_a_cache_and_one_without_memory():
    pool = BlockPool(4, prefix_caching=False)
    table, _ = start(pool, A)
    assert pool.find(A) == Hit([], 0)
    pool.release(table)
    assert (pool.free, pool.cached) == ([0, 1, 2], {})
    assert (pool.index.full, pool.index.children) == ({}, {})
    assert BlockPool(4, KVBudget(3)).take() is None

    pool = BlockPool(4, KVBudget(8))
    pool.release(start(pool, [1, 2, 3, 4, 5, 6])[0])
    table, copies, n = pool.enter(ids := [1, 2, 3, 4, 5, 6, 7], pool.find(ids))
    # two more tokens are in block 1, which is needed for the rest
    assert (table, copies, n) == ([0], [], 4)
    with pytest.raises(AssertionError, match="blocks are held"):
        pool.clear()
    pool.release(table)
    pool.clear()
    assert (len(pool), pool.find(ids).num_tokens, dict(pool.budget.claims)) == (0, 0, {})
    assert pool.take() == 0
    check_pool(pool)


def test_owners_share_one_limit():
    budget = KVBudget(100)
    asked = ("one", 70), ("two", 40), ("two", 30), ("one", 71)
    assert [budget.claim(*c) for c in asked] == [True, False, True, False]
    assert (budget.left("one"), budget.claims) == (70, {"one": 70, "two": 30})
    budget.on_short = lambda owner: budget.claims.update(two=0)  # the other is idle
    assert (budget.has_room("one", 101), budget.claim("one", 100)) == (False, True)
    assert budget.claims == {"one": 100, "two": 0} and KVBudget().left("one") == float("inf")


# --- the scheduler


def share_block(s, p):
    a, twin = s.running[:2]
    s.pool.release(twin.block_table)
    twin.block_table = [*a.block_table]
    for i in a.block_table:
        s.pool.share(i)


def lose_block(s, p):
    s.running[2].block_table.pop()


def put(obj, **values):
    vars(obj).update(values)


def block(s, i):
    return s.pool.blocks[s.running[i].block_table[0]]


FAULTS = {
    "nothing": lambda s, p: None,
    "a decoding row dropped": lambda s, p: p.rows.pop(0),
    "a row one position too late": lambda s, p: put(p.rows[0], start=p.rows[0].start + 1),
    "a prefill row one too long": lambda s, p: put(p.rows[-1], n_tokens=p.rows[-1].n_tokens + 1),
    "a prefill row one too short": lambda s, p: put(p.rows[-1], n_tokens=p.rows[-1].n_tokens - 1),
    "the same row twice": lambda s, p: p.rows.append(p.rows[-1]),
    "a smaller budget": lambda s, p: put(s, max_num_batched_tokens=15),
    "an empty step": lambda s, p: p.rows.clear(),
    "a slot twice": lambda s, p: put(s.running[1], slot=s.running[0].slot),
    "a slot lost": lambda s, p: s.slots.free.clear(),
    "a running request ended": lambda s, p: put(s.running[0], finish_reason="length"),
    "a running request queued again": lambda s, p: s.waiting.append(s.running[0]),
    "a computed token forgotten": lambda s, p: block(s, 0).token_ids.pop(),
    "a wrong token in a block": lambda s, p: block(s, 0).token_ids.__setitem__(1, 49),
    "a wrong token in a full block": lambda s, p: block(s, 2).token_ids.__setitem__(1, 49),
    "a block held by one too many": lambda s, p: setattr(block(s, 0), "refs", 2),
    "a held block free as well": lambda s, p: s.pool.free.append(s.running[0].block_table[0]),
    "a block lost": lose_block,
    "a row into a shared block": share_block,
    "a block not where others look": lambda s, p: s.pool.index.children.clear(),
    "a copy of other tokens": lambda s, p: (
        p.copies.append((s.running[0].block_table[0], s.running[2].block_table[1], 2)),
        s.pool.share(s.running[0].block_table[0]),
    ),
    "less memory than it has": lambda s, p: put(s.budget, limit=48),
}


def complains(spoil):
    "What is said of a scheduler in the middle of its work, after `spoil(scheduler, plan)`."
    s, model = Scheduler(4, 16, 192, block_size=16), FakeModel(16)
    for name, n, adapter in (("a", 3, 0), ("twin", 3, 1), ("long", 40, 0), ("late", 4, 0)):
        s.add(Request(name, list(range(n)), 9, adapter=adapter))
    for _ in range(2):
        one_step(s, model, check_invariants)
    plan = s.schedule()
    spoil(s, plan)
    return complaint(lambda: check_invariants(s, plan))


def test_a_state_that_is_wrong_is_found():
    complaints = {name: complains(spoil) for name, spoil in FAULTS.items()}
    assert complaints.pop("nothing") is None and all(complaints.values()), complaints
    assert len(set(complaints.values())) > 12


def random_case(rng):
    "A scheduler with random limits, and random requests for it."
    seqs, patience = rng.randint(1, 8), rng.choice([0, 3, 256])
    limits = (
        seqs,
        seqs + rng.randint(1, 60),
        rng.randint(256, 500) if rng.random() < 0.6 else None,
    )
    online = rng.choice([0, 0.5, 1])  # the part of the requests that somebody waits for
    if rng.random() < 0.8:
        how = dict(prefix_caching=rng.random() < 0.8, chunked=rng.random() < 0.8)
        size = rng.choice([1, 2, 4, 16, 24, 64, 128])
        s = Scheduler(*limits, block_size=size, patience=patience, **how)
    else:
        order = rng.choice([None, lambda r: r.prompt_ids[0]])
        s = PaddedScheduler(*limits, barrier=rng.random() < 0.5, order=order, patience=patience)
    heads = [random_ids(rng, 60, 60) for _ in range(3)]
    draw = lambda i: Request(
        str(i),
        rng.choice(heads)[: rng.randint(1, 60)] + random_ids(rng, 0, 60),
        rng.choice([1, 5, 20, 60, 120]),
        rng.choice([0, 0, 0, 1, -1]),
        adapter=rng.choice([0, 0, 1]),
        online=rng.random() < online,
    )
    return s, [draw(i) for i in range(rng.randint(1, 15))]


def longest(pool, ids, root):
    "How many of `ids`, but the last, lie in blocks that can be found: the slow way."
    best, reach, behind = 0, [(root, 0)], {}
    for b in pool.blocks:
        if b.listed:
            behind.setdefault(b.parent, []).append(b)
    for parent, at in reach:
        for b in behind.get(parent, ()):
            pairs = list(zip(b.token_ids, ids[at:-1]))
            agree = next((k for k, (x, y) in enumerate(pairs) if x != y), len(pairs))
            best = max(best, at + agree)
            if agree == pool.block_size:
                reach.append((b.hash, at + agree))
    return best


def check_find(s):
    "That all is found that there is in memory of the next request."
    if s.block_size and s.pool.prefix_caching and s.waiting and s.pool.tier is None:
        r = s.waiting[0]
        there = longest(s.pool, r.token_ids[: r.first_logits + 1], s.slots.root_of(r))
        assert s.slots.find(r).num_tokens == there, "find missed something"


def storm(seed, seen, model=FakeModel, prepare=lambda s, model: None):
    "Run one random case with everything that can happen to it; counts what has happened in `seen`. The scheduler."
    rng, steps = random.Random(seed), 0
    (s, requests), chance = random_case(rng), lambda p: rng.random() < p
    model, todo = model(s.block_size), list(requests)
    prepare(s, model)
    while todo or s.has_unfinished:
        while todo and chance(0.5):
            s.add(todo.pop())
        if chance(0.005) and s.waiting:
            s.finish(rng.choice(s.waiting), "cancelled")
        if chance(0.3):
            check_find(s)
        plan = s.schedule()
        check_invariants(s, plan)
        if chance(0.005) and s.running:
            s.finish(rng.choice(s.running), "cancelled", keep=chance(0.5))
        if chance(0.005) and s.running:
            s.preempt(rng.choice(s.running))
        failed = chance(0.002)
        there = replace(
            plan, rows=[] if failed else [row for row in plan.rows if row.request.slot is not None]
        )
        tokens = outputs(there, model.execute(make_batch(there, s.block_size)))
        if failed:
            s.reset()
        else:
            found = {id(row): out for row, out in zip(there.rows, tokens)}
            s.update(plan, [found.get(id(row), RowOutput()) for row in plan.rows])
        steps += 1
        seen.update(
            steps=1,
            positions=plan.num_tokens,
            copies=len(plan.copies),
            failed=failed,
            full=not s.pool.has_room(1),
        )
        assert steps < 20_000, "it does not end"
    check_pool(s.pool)
    assert not s.running and not s.waiting and not s.pool.num_held
    assert len(s.slots.free) == s.max_num_seqs
    assert all(r.output_ids == model.alone(r)[: len(r.output_ids)] for r in requests)
    assert s.ledger.useful <= sum(r.num_tokens for r in requests)
    seen.update(
        requests=len(requests),
        preemptions=s.num_preemptions,
        found=s.pool.hits,
        evictions=s.pool.evictions,
        recomputed=s.ledger.recomputed,
        **Counter(r.finish_reason for r in requests),
    )
    return s


def test_drawn_cases(monkeypatch):
    "Cancelled at any point, preempted, steps that fail: each request gets the oracle's tokens, as many as it came to."
    seen = Counter()
    monkeypatch.setattr(scheduler, "BESIDE", 8)
    for seed in range(160):
        storm(seed, seen)
    assert seen["requests"] == seen["length"] + seen["cancelled"]
    events = "copies", "failed", "preemptions", "cancelled", "full", "evictions"
    assert all(seen[event] for event in events), seen


def wrong_block(batch):
    for table in filter(None, batch.block_table):
        table[0] = batch.block_table[0][0]
    return batch


SPOILS = {
    "nothing": lambda b: b,
    "no copies": lambda b: replace(b, copies=[]),
    "copies the wrong way round": lambda b: replace(b, copies=[(y, x, n) for x, y, n in b.copies]),
    "copies one token short": lambda b: replace(b, copies=[(x, y, n - 1) for x, y, n in b.copies]),
    "the first row's block for all": wrong_block,
    "no adapters": lambda b: replace(b, adapters=[0] * len(b)),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_batch_that_is_spoilt_is_noticed(name):
    class Spoilt(FakeModel):
        def execute(self, batch):
            return super().execute(SPOILS[name](batch))

    found = 0
    for seed in range(20):
        try:
            storm(seed, Counter(), Spoilt)
        except (AssertionError, TypeError, KeyError):
            found += 1
    assert (found > 0) == (name != "nothing")


def test_tokens_beyond_the_end_and_a_text_that_raises():
    r = Request("a", [5, 6], max_tokens=3)
    assert _append(r, RowOutput([7])) == (None, None)
    assert _append(r, RowOutput([8, 9, 10])) == ("length", None)  # 10 is beyond max_tokens
    failed = _append(r, RowOutput(error="no finite logits"))
    assert (r.output_ids, failed) == ([7, 8, 9], ("error", "no finite logits"))
    text = SimpleNamespace(append=lambda *a: 1 / 0)
    why, said = _append(Request("b", [5], task=text), RowOutput([7]))
    assert why == "error" and "its text failed with ZeroDivisionError" in said


def prompts(*lengths, max_tokens=1):
    return [Request(str(i), [i] * n, max_tokens) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    "limits, requests, tokens",
    [
        ((2, 16), prompts(3), [3]),
        ((2, 16), prompts(4, 4, 4, 4, 4), [8, 8, 4]),
        ((1, 2), prompts(3, 3, max_tokens=2), [2, 1, 1] * 2),
        ((2, 16), prompts(16, max_tokens=2), [16, 1]),
        ((2, 16), prompts(17, max_tokens=2), [16, 1, 1]),
    ],
)
def test_tokens_of_each_step(limits, requests, tokens):
    assert Scheduler(*limits).schedule().rows == []
    assert [step.num_tokens for step in run(Scheduler(*limits), requests)] == tokens


def beside_a_long_prompt(online, budget, stream, n=8000):
    """A stream or none, and one short request after the other, until a prompt of `n` tokens is answered.

    Steps until then; the positions that a short one waits for, at most; those of a step that begins later."""
    s, steps, short, longest = Scheduler(8, budget), [], None, 0
    if stream:
        s.add(Request("stream", [1, 2], 10 * n, online=online))
    for _ in range(3):
        step_of(s)
    long = s.add(Request("long", [9] * n, 1, online=online))
    while not long.finish_reason:
        if short is None or short.finish_reason:
            short, since = s.add(Request("short", [5, len(steps)], 1, online=online)), len(steps)
        steps.append(step_of(s).num_tokens)
        longest = max(longest, sum(steps[since:]))
    return len(steps), longest, max(steps[1:])


@pytest.mark.parametrize(
    "online, budget, stream, most",
    [
        (False, 512, True, (16, 8018, 512)),  # nobody waits: as few steps as there can be
        (True, 512, True, (63, 258, 129)),
        (True, 512, False, (60, 640, 128)),  # a long prompt that comes alone has a whole step
        (True, 2048, True, (16, 1026, 513)),
        (True, 128, True, (64, 256, 128)),
    ],
)
def test_a_long_prompt_leaves_room_for_others(online, budget, stream, most):
    assert beside_a_long_prompt(online, budget, stream) == most


def test_prompts_that_somebody_waits_for_all_go_on():
    "Short ones keep coming beside several long ones: the first in rank needs no more than twice its steps, and so on."
    s, steps = Scheduler(8, 64), 0
    long = [s.add(Request(f"long {i}", [i] * 640, 1, online=True)) for i in range(3)]
    for i, r in enumerate(long, 1):
        while not r.finish_reason:
            if not any(len(x.prompt_ids) < 640 for x in s.waiting):
                s.add(Request(f"short {steps}", [40, steps] * 20, 1, online=True))
            step_of(s)
            steps += 1
        assert steps <= 2 * i * 640 / 64 + 1


def test_of_prompts_that_somebody_waits_for_the_shortest_passes_the_second():
    s = Scheduler(8, 64)
    a, b, c = (s.add(Request(f"{n}", [n] * n, 1, online=True)) for n in (640, 480, 100))
    for _ in range(6):
        step_of(s)
    assert c.finish_reason and not a.finish_reason and b.num_computed_tokens < 100


@pytest.mark.parametrize(
    "steps, do, there",
    [
        (1, lambda s, rs: s.finish(rs[2], "cancelled"), [16, 0, 0]),  # it waits
        (1, lambda s, rs: s.finish(rs[0], "cancelled"), [16, 0, 0]),  # in its prompt
        (4, lambda s, rs: s.finish(rs[0], "cancelled"), [39, None, None]),  # it decodes
        (4, lambda s, rs: s.finish(rs[0], "cancelled", keep=False), [0, None, None]),
        (4, lambda s, rs: s.preempt(rs[0]), [39, None, None]),
        (4, lambda s, rs: s.reset(), [0, 0, 0]),
    ],
)
def test_what_is_left_of_a_request_serves_the_next(steps, do, there):
    s, model = Scheduler(3, 16, block_size=16), FakeModel(16)
    requests = [Request(n, [ord(n)] * 40, 4) for n in "abc"]
    for r in requests:
        s.add(r)
    for _ in range(steps):
        one_step(s, model, check_invariants)
    do(s, requests)
    for r, n in zip(requests, there):
        found = s.slots.find(Request("follower", r.prompt_ids)).num_tokens
        assert n is None or found == n
    while s.has_unfinished:
        one_step(s, model, check_invariants)
    assert all(r.output_ids == model.alone(r)[: len(r.output_ids)] for r in requests)
