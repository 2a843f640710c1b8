"The scheduler and its blocks: drawn cases with a model that costs nothing, edges, and that each check of their state can fail."

import random, sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from batchlab.core import scheduler
from batchlab.core.batch import make_batch
from batchlab.core.blocks import Block, BlockIndex, BlockPool, Hit, KVBudget
from batchlab.core.hashes import chunk_hashes
from batchlab.core.request import CountTask, Request, Row, RowOutput, StepPlan
from batchlab.core.scheduler import Scheduler, SlotTable, _append
from batchlab.llm.rectangle import PaddedScheduler
from helpers import ROOT, step_of

sys.path.append(str(ROOT / "nbs"))
from simulate import FakeModel, check_invariants, check_pool, one_step, outputs, run
from simulate import ids as random_ids


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


class Play:
    "Random moves on a pool; `memory[i]`: what really lies in block i, as `(root, token)`."

    def __init__(self, kind, seed):
        self.rng, self.memory, self.live, self.copies, self.counts = (
            random.Random(seed),
            {},
            [],
            [],
            {},
        )
        self.budget = KVBudget(self.rng.choice([None, 40, 60]))
        self.pool = kind(self.rng.choice([1, 2, 4, 16]), self.budget, self.rng.random() < 0.9)

    def enter(self):
        p, root, new = self.pool, self.rng.choice([b"", b"", b"adapter 1"]), self.rng.randint(1, 7)
        ids = [self.rng.randrange(2)] * self.rng.randrange(9) + [
            self.rng.randrange(3) for _ in range(new)
        ]
        hit = p.find(
            ids, self.rng.choice([None, chunk_hashes(ids, p.index.chunk_size, root)]), root
        )
        assert hit.num_tokens == self.longest(ids, root), "find missed something"
        table, copies, n = p.enter(ids, hit, root)
        assert sum((p.blocks[i].token_ids for i in table), [])[:n] == ids[:n] and n < len(ids), (
            "other tokens than it was told"
        )
        self.copies += copies
        self.live.append(SimpleNamespace(ids=ids, root=root, table=table, n=n))
        return (
            "shared and copied"
            if hit.blocks and copies
            else "copied"
            if copies
            else "shared"
            if table
            else "nothing found"
        )

    def longest(self, ids, root):
        "The longest prefix of `ids` that lies in blocks which can be found, the slow way."
        best, size, reach = 0, self.pool.block_size, {root: 0}
        for b in (
            sorted(self.pool.blocks, key=lambda b: len(b.token_ids), reverse=True) * 20
        ):  # parents may come later
            at = reach.get(b.parent, -1)
            if not b.listed or at < 0:
                continue
            pairs = list(zip(b.token_ids, ids[at:-1]))
            agree = next((k for k, (x, y) in enumerate(pairs) if x != y), len(pairs))
            best = max(best, at + agree)
            if agree == size:
                reach[b.hash] = at + size
        return best

    def step(self):
        "Copies that were promised are made, before anything else is written."
        for source, target, k in self.copies:
            self.memory[target] = self.memory[source][:k]
            self.pool.release([source])
        self.copies.clear()

    def grow(self):
        self.step()
        r, p, new = self.rng.choice(self.live), self.pool, self.rng.randint(1, 5)
        end = min(r.n + new, len(r.ids)) if r.n < len(r.ids) else r.n + 1
        r.ids += [self.rng.randrange(3) for _ in range(end - len(r.ids))]
        while len(r.table) < p.blocks_for(end):
            if (i := p.take(r.table[-1] if r.table else None)) is None:
                return "no memory"
            self.memory[i] = []
            r.table.append(i)
        for k in range(r.n, end):
            assert p.blocks[r.table[k // p.block_size]].refs == 1, "writes into another's block"
            self.memory[r.table[k // p.block_size]].append((r.root, r.ids[k]))
        p.commit(r.table, r.n, r.ids[r.n : end], r.root)
        r.n = end

    def end(self):
        self.step()
        r = self.live.pop(self.rng.randrange(len(self.live)))
        self.pool.release(r.table, keep=self.rng.random() < 0.8)

    def other(self):
        self.budget.claim("another", self.rng.choice([0, 8, 16]))

    def move(self):
        act = self.rng.choice(
            ["enter", "enter", "grow", "grow", "grow", "grow", "end", "step", "forget", "other"]
        )
        if act in ("grow", "end") and not self.live:
            return
        if act == "forget":
            self.pool.forget() if self.rng.random() < 0.2 else None
        else:
            act = getattr(self, act)() or act
        self.counts[act] = self.counts.get(act, 0) + 1
        check_pool(self.pool)
        promised = {target for _, target, _ in self.copies}
        assert all(
            [t for _, t in self.memory.get(i, [])] == b.token_ids
            or i in promised
            or not (b.refs or b.listed)
            for i, b in enumerate(self.pool.blocks)
        ), "the books are wrong"
        for r in self.live:
            lies = sum((self.memory.get(i, []) for i in r.table), [])
            assert promised & {*r.table} or lies[: r.n] == [(r.root, t) for t in r.ids[: r.n]], (
                "another's keys"
            )
        held = [i for r in self.live for i in r.table] + [source for source, _, _ in self.copies]
        assert all(b.refs == held.count(i) for i, b in enumerate(self.pool.blocks)), (
            "refs are wrong"
        )


def play(kind, seed, moves=150):
    game = Play(kind, seed)
    for _ in range(moves):
        game.move()
    return game


def test_the_books_of_a_pool_are_right_whatever_the_order():
    made, evictions = Counter(), 0
    for seed in range(60):
        game = play(BlockPool, seed)
        made.update(game.counts)
        evictions += game.pool.evictions
    assert len(made) == 10 and min(made.values()) > 20 and evictions > 100, made


class NeverUnlists(BlockPool):
    "An entry of the index outlives its block."

    def _empty(self, i):
        b = self.blocks[i]
        b.token_ids, b.parent, b.hash = [], b"", None


class SharesTooMuch(BlockPool):
    "The partial hit is shared, not copied."

    def enter(self, ids, hit, root=b""):
        for i in hit.blocks + [hit.source] * (hit.n > 0):
            self.share(i)
        return hit.blocks + [hit.source] * (hit.n > 0), [], hit.num_tokens


class ForgetsRoot(BlockPool):
    "Adapters are mixed up."

    def commit(self, table, start, ids, root=b""):
        super().commit(table, start, ids)


class UnpinnedSource(BlockPool):
    "A source is not held until its copy is made."

    def enter(self, ids, hit, root=b""):
        table, copies, n = super().enter(ids, hit, root)
        self.release([c[0] for c in copies])
        return table, copies, n


class NoBudget(BlockPool):
    "Takes memory that was not there."

    def take(self, after=None):
        if (i := super().take(after)) is None:
            self.blocks.append(Block(refs=1))
        return len(self.blocks) - 1 if i is None else i


@pytest.mark.parametrize(
    "kind", [NeverUnlists, SharesTooMuch, ForgetsRoot, UnpinnedSource, NoBudget]
)
def test_a_pool_with_a_mistake_is_found(kind):
    assert any(complaint(lambda: play(kind, seed)) for seed in range(60))


PLANTS = {
    "a reference is lost": lambda p: setattr(p.blocks[1], "refs", 0),
    "a free block is put down twice": lambda p: p.free.append(p.free[0]),
    "a token is exchanged": lambda p: p.blocks[2].token_ids.__setitem__(0, 55),
    "a full block is not in the index": lambda p: p.index.full.clear(),
    "a cached block is not listed": lambda p: p.index.remove(2),
    "a free block keeps its tokens": lambda p: p.blocks[0].token_ids.append(5),
    "another owner takes the budget": lambda p: p.budget.claims.update(another=30),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_books_that_disagree_are_found(plant):
    pool = BlockPool(4, KVBudget(40))  # block 0 is free, 1 and 3 are held, 2 is cached
    spare = pool.take()
    pool.release(start(pool, A)[0])
    start(pool, [1, 2, 3, 4, 70, 71])
    pool.release([spare])
    check_pool(pool)
    PLANTS[plant](pool)
    assert complaint(lambda: check_pool(pool))


def test_an_index_leads_to_blocks_and_tokens_are_compared():
    blocks = [Block(token_ids=[1, 2, 3, 4]), Block(token_ids=[1, 2, 9])]
    index = BlockIndex(blocks, 4)
    for i in range(2):
        index.add(i)
    name = blocks[0].hash
    blocks.append(Block(token_ids=[7], parent=name))
    index.add(2)
    found = [index.longest(b"", ids) for ids in ([1, 2, 9, 9], [1, 2, 3, 9], [5], [])]
    assert found == [(3, 1), (3, 0), (0, None), (0, None)]
    assert (index.longest(name, [7, 7]), index.longest(b"x", [7])) == ((1, 2), (0, None))
    for i in (1, 0):
        index.remove(i)
    assert (index.full, index.children) == ({}, {name: {2: None}})


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
    assert pool.find(A, root=b"adapter 1").num_tokens == 0
    start(pool, A, root=b"adapter 1")
    found = [pool.find(A, root=root).blocks for root in (b"", b"adapter 1", b"adapter 2")]
    assert found == [[0, 1], [3, 4], []]


@pytest.mark.parametrize(
    "size, ids", [(4, [5]), (4, [1, 2, 3, 4]), (4, [*range(8)]), (1, [5, 6, 7]), (64, [1, 2, 3])]
)
def test_all_tokens_but_the_last_are_found(size, ids):
    pool = BlockPool(size)
    pool.release(start(pool, ids)[0])
    table, n = start(pool, ids)
    assert (n, pool.num_held, pool.find([]).num_tokens) == (len(ids) - 1, len(table), 0)


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
    seqs, size, paged = (
        rng.randint(1, 8),
        rng.choice([1, 2, 4, 16, 24, 64, 128]),
        rng.random() < 0.8,
    )
    limits = (
        seqs,
        seqs + rng.randint(1, 60),
        rng.randint(256, 500) if rng.random() < 0.6 else None,
    )
    patience = rng.choice([0, 3, 256])
    online = rng.choice([0, 0.5, 1])  # the part of the requests that somebody waits for
    if paged:
        s = Scheduler(
            *limits,
            block_size=size,
            prefix_caching=rng.random() < 0.8,
            chunked=rng.random() < 0.8,
            patience=patience,
        )
    else:
        order = rng.choice([None, lambda r: r.prompt_ids[0]])
        s = PaddedScheduler(*limits, barrier=rng.random() < 0.5, order=order, patience=patience)
    heads = [random_ids(rng, 60, 60) for _ in range(3)]
    prompts = [
        rng.choice(heads)[: rng.randint(1, 60)] + random_ids(rng, 0, 60)
        for _ in range(rng.randint(1, 15))
    ]
    return s, [
        Request(
            str(i),
            p,
            rng.choice([1, 5, 20, 60, 120]),
            rng.choice([0, 0, 0, 1, -1]),
            adapter=rng.choice([0, 0, 1]),
            online=rng.random() < online,
        )
        for i, p in enumerate(prompts)
    ]


def storm(seed, seen, model=FakeModel):
    "Run one random case with everything that can happen to it; counts what has happened in `seen`."
    rng, steps = random.Random(seed), 0
    (s, requests), chance = random_case(rng), lambda p: rng.random() < p
    model, todo = model(s.block_size), list(requests)
    while todo or s.has_unfinished:
        while todo and chance(0.5):
            s.add(todo.pop())
        if chance(0.005) and s.waiting:
            s.finish(rng.choice(s.waiting), "cancelled")
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


def test_drawn_cases(monkeypatch):
    "Cancelled at any point, preempted, steps that fail: each request gets the oracle's tokens, as many as it came to."
    seen = Counter()
    monkeypatch.setattr(scheduler, "BESIDE", 8)
    for seed in range(250):
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


def test_what_a_row_reads_depends_on_its_copy():
    a = Request("a", [5, 6, 7, 8], slot=0, block_table=[0, 1])
    b = Request("b", [5, 6, 7, 9], slot=1, block_table=[0, 2])

    def second_step(copies):
        model = FakeModel(block_size=2)
        model.execute(make_batch(StepPlan([Row(a, 0, 4)]), 2))
        model.kv[2] = [1, 1]  # left there by an earlier request
        return model.execute(make_batch(StepPlan([Row(b, 3, 1)], copies), 2))[0]

    assert second_step([(1, 2, 1)]) == FakeModel().alone(b)[0] != second_step([])
    with pytest.raises(TypeError):  # never written
        FakeModel(2).execute(make_batch(StepPlan([Row(b, 3, 1)]), 2))


def test_rows_of_a_plan():
    a = Request("a", [5, 6], slot=0, block_table=[0])
    b = Request("b", [1, 2, 3, 4], slot=1, block_table=[2])
    c = Request("c", [7], output_ids=[40], num_computed_tokens=1, slot=2, block_table=[3])
    plan = StepPlan([Row(a, 1, 1), Row(c, 1, 1), Row(b, 0, 3)])
    batch = make_batch(plan, block_size=4)
    assert [(r.samples, r.num_logits) for r in plan.rows] == [(True, 1), (True, 1), (False, 0)]
    assert (plan.num_tokens, batch.logits_at) == (5, [0, 1])
    asks = Request("asks", [5, 6, 7, 8, 9], task=CountTask(3))  # how likely was its last token?
    rows = Row(asks, 0, 5).num_logits, Row(asks, 0, 3).num_logits
    assert (asks.first_logits, *rows) == (3, 2, 0)
    later = Request(
        "later", [5, 6, 7, 8, 9], max_tokens=3, output_ids=[40, 41], num_computed_tokens=6
    )
    parts = [later.tokens(3, 6), later.tokens(1, 3), later.tokens(6, 1), later.tokens(4, 2)]
    assert parts == [[8, 9, 40, 41], [6, 7, 8], [41], [9, 40]]
    assert later.append(42) == "length"  # the third of max_tokens=3


def test_tokens_beyond_the_end_and_a_text_that_raises():
    r = Request("a", [5, 6], max_tokens=3)
    assert _append(r, RowOutput([7])) == (None, None)
    assert _append(r, RowOutput([8, 9, 10])) == ("length", None)  # 10 is beyond max_tokens
    failed = _append(r, RowOutput(error="no finite logits"))
    assert (r.output_ids, failed) == ([7, 8, 9], ("error", "no finite logits"))
    text = SimpleNamespace(append=lambda *a: 1 / 0)
    why, said = _append(Request("b", [5], task=text), RowOutput([7]))
    assert why == "error" and "its text failed with ZeroDivisionError" in said


def test_the_queue_is_in_order_of_rank_whoever_leaves_it():
    s = Scheduler(2, 8, block_size=4)
    named = dict(a=1, b=0, c=0).items()
    a, b, c = (s.add(Request(name, [5, 6, 7], priority=p)) for name, p in named)
    assert s.waiting == [b, c, a]
    s.slots.enter(b, s.slots.find(b))
    s.waiting.remove(b)
    s.finish(c, "cancelled")
    s.preempt(b)
    assert (s.waiting, s.running, s.slots.free, b.num_preemptions) == ([b, a], [], [0, 1], 1)


def test_what_a_request_is_found_to_have():
    slots = SlotTable(3, BlockPool(block_size=4, budget=KVBudget(32)))
    a, b = Request("a", list(range(10))), Request("b", list(range(9)) + [40, 41])
    c, found = Request("c", list(range(10)), adapter=1), []
    for r in (a, b, c):
        copies = slots.enter(r, slots.find(r))
        found.append((r.num_computed_tokens, copies))
        assert slots.grow(r, r.num_tokens)
        for source, _, _ in copies:
            slots.pool.release([source])  # the copy is made
        slots.commit(r, r.num_computed_tokens, r.num_tokens)
    check_pool(slots.pool)
    assert found == [(0, []), (9, [(2, 3, 1)]), (0, [])]
    assert b.block_table[:2] == a.block_table[:2]
    assert (slots.grow(a, 16), slots.grow(a, 17)) == (True, False)  # seven of eight are held
    slots.leave(c)
    assert slots.grow(a, 17)


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


def test_a_prompt_that_must_be_whole_and_is_over_the_budget_has_a_step_of_its_own():
    requests = [Request("a", [1, 2], 3), Request("b", [5] * 17, 2)]
    history = run(Scheduler(2, 16, chunked=False), requests)
    assert [step.num_tokens for step in history] == [2, 1, 1, 17, 1]


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
