"A prefix cache that outlives its process: the same tokens with it and without, whatever has happened to its files."

import random
import sys
from types import SimpleNamespace

import pytest

from batchlab.core.batch import make_batch
from batchlab.core.blocks import BlockPool, Hit
from batchlab.core.request import Request
from batchlab.core.scheduler import Scheduler
from helpers import ROOT

sys.path.append(str(ROOT / "nbs"))
from simulate import FakeModel, check_invariants, check_pool, outputs


# --- the pool and its second tier


class Shelf:
    "A second tier in memory: token ids, as `FakeModel` keeps them. `lose`: how often a block is gone when it is fetched."

    def __init__(self, kv=None, seed=0, lose=0.0):
        self.kv, self.lose, self.rng = kv, lose, random.Random(seed)
        self.kept, self.puts, self.fetched = {}, 0, 0

    def has(self, name):
        return name in self.kept

    def fetch(self, name, ids):
        assert self.kept[name] == ids, "a name leads to other tokens"
        if self.rng.random() < self.lose:
            return self.kept.pop(name) and None
        self.fetched += 1
        return SimpleNamespace(data=list(ids))

    def put(self, block, about):
        assert about.hash and (self.kv is None or self.kv[block] == about.token_ids)
        self.puts += 1
        self.kept[about.hash] = list(about.token_ids)


def commit(pool, table, ids, start=0, root=b""):
    "As if a request had computed the rest of `ids`, and ended."
    assert pool.grow(table, len(ids))
    pool.commit(table, start, ids[start:], root)
    pool.release(table)
    pool.loading.clear()
    check_pool(pool)


def test_a_block_that_was_evicted_is_found_in_the_second_tier():
    pool = BlockPool(block_size=2)
    pool.tier = Shelf()
    commit(pool, [], ids := [5, 6, 7, 8, 9])
    pool.keep()
    pool.forget()
    assert (pool.tier.puts, len(pool.tier.kept)) == (2, 2)  # not the one with a single token
    hit = pool.find([5, 6, 7, 8, 1])
    assert (hit.blocks, hit.num_tokens, hit.source, len(hit.stored)) == ([], 4, None, 2)
    table, copies, n = pool.enter(ids, hit)
    assert (len(table), copies, n) == (2, [], 4)
    assert [(x.data, i) for x, i in pool.loading] == [([5, 6], table[0]), ([7, 8], table[1])]
    again, _, n = pool.enter(ids, pool.find(ids))  # in the same step: one load for both
    assert (again, n, len(pool.loading)) == (table, 4, 2)
    assert pool.find(ids, root=b"adapter").num_tokens == 0
    assert not pool.find([5, 6]).stored  # the last is to be computed


def test_memory_comes_first_and_a_part_of_a_block_behind_what_is_loaded():
    pool = BlockPool(block_size=2)
    pool.tier = Shelf()
    commit(pool, table := [], [1, 2, 3, 4, 5, 6])
    pool.keep()
    for i in table[:2]:  # the second is taken, and the third and its child stay
        pool.share(i)
    pool.release([table[1]], keep=False)
    hit = pool.find([1, 2, 3, 4, 5, 9])
    assert hit == Hit([table[0]], 5, table[2], 1, hit.stored) and len(hit.stored) == 1
    got, copies, n = pool.enter([1, 2, 3, 4, 5, 9], hit)
    assert (n, len(got), copies) == (5, 3, [(table[2], got[2], 1)])
    check = dict(pool.tier.kept)
    pool.tier.kept.clear()
    assert pool.find([1, 2, 3, 4, 5, 9]).num_tokens == 5 and check


def test_what_is_gone_when_it_is_fetched_is_computed():
    pool = BlockPool(block_size=2)
    pool.tier = Shelf(lose=1.0)
    commit(pool, [], ids := [1, 2, 3, 4, 5])
    pool.keep()
    pool.forget()
    hit = pool.find(ids)
    assert hit.num_tokens == 4
    assert pool.enter(ids, hit) == ([], [], 0) and not pool.loading and pool.hits == 0


def test_a_block_that_was_not_filled_yet_is_not_put_back():
    pool = BlockPool(block_size=2)
    pool.tier = Shelf()
    commit(pool, [], ids := [1, 2, 3])
    pool.keep()
    pool.forget()
    table, _, _ = pool.enter(ids, pool.find(ids))
    pool.release(table)
    pool.tier.kept.clear()
    pool.keep()
    assert not pool.tier.kept and pool.loading
    pool.loading.clear()  # the step is made
    pool.keep()
    assert len(pool.tier.kept) == 1


def play(seed):
    "Short memory, many prompts that begin alike, blocks that go missing; a new scheduler goes on with what the one before left."
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 16])
    begins = [[rng.randrange(50) for _ in range(rng.randrange(24))] for _ in range(3)]
    shelf = Shelf(lose=rng.choice([0, 0.2]))
    for life in range(3):
        limit = rng.choice([None, 64, 96])
        s = Scheduler(rng.choice([1, 2, 4]), 16, limit, block_size=size)
        model, shelf.kv = FakeModel(size), None
        shelf.kv = model.kv
        s.pool.tier = shelf
        requests = []
        for i in range(12):
            ids = rng.choice(begins) + [rng.randrange(50) for _ in range(rng.randint(1, 5))]
            adapter, priority = rng.choice([0, 0, 1]), rng.randrange(2)
            r = Request(str(i), ids, rng.randint(1, 6), priority, adapter=adapter)
            r.preemptible = bool(priority)
            requests.append(r)
        todo, steps = list(requests), 0
        while todo or s.has_unfinished:
            if todo:
                s.add(todo.pop())
            plan = s.schedule()
            check_invariants(s, plan)
            s.update(plan, outputs(plan, model.execute(make_batch(plan, size))))
            steps += 1
            assert steps < 5000
        assert all(r.output_ids == model.alone(r) for r in requests)
        s.pool.keep()
        s.reset()
    return shelf.fetched, shelf.puts


def test_tokens_of_a_scheduler_with_a_second_tier():
    played = [play(seed) for seed in range(30)]
    assert all(sum(n) > 100 for n in zip(*played)), played
