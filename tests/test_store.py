"A prefix cache that outlives its process: the same tokens with it and without, whatever has happened to its files."

import asyncio, copy, errno, itertools, json, os, random, shutil, sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from batchlab import LLM, AsyncLLM, LoRARequest
from batchlab.core.batch import make_batch
from batchlab.core.blocks import BlockPool, Hit
from batchlab.core.cache import KVCache
from batchlab.core.request import Request
from batchlab.core.scheduler import Scheduler
from batchlab.errors import ParamError, Unavailable
from batchlab.llm import kvfiles
from batchlab.llm import store as store_module
from batchlab.llm.kvfiles import BlockFiles, clear_store, stored, worlds
from batchlab.llm.store import facts_of_backend, facts_of_machine, facts_of_model
from batchlab.models import tiny_gguf, tiny_model
from batchlab.models.tiny import tiny_adapter
from batchlab.jobs.job import Job
from helpers import ROOT, generated, greedy, ids, in_threads, oracle, python, until

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


# --- an LLM with a store


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", max_position_embeddings=1024)


def prompts(seed=0, n=5):
    "Prompts of different lengths that begin with the same 200 tokens, and one that does not."
    rng = random.Random(seed)
    begin = [rng.randrange(3, 250) for _ in range(200)]
    ends = [[rng.randrange(3, 250) for _ in range(3 + 20 * i)] for i in range(n)]
    return [begin + end for end in ends] + [ends[-1]]


def asked(ps):
    return [dict(prompt_token_ids=p) for p in ps]


def answers(llm, ps, n=8):
    return ids(llm.generate(asked(ps), greedy(n), use_tqdm=False))


def opened(model, store, **more):
    return LLM(model, **dict(prefix_store=store, max_num_seqs=4) | more)


def blocks_of(store):
    return sum(w.blocks for w in worlds(store))


def flat(llm):
    "Costs that always let a block be read: a tiny model is computed at once."
    llm.engines.store.costs.worth = lambda: True
    return llm


@pytest.mark.parametrize("compile", ["auto", False])
def test_tokens_after_a_restart_are_those_of_generate_and_of_the_oracle(model, tmp_path, compile):
    ps = prompts()
    want = [generated(model, p, 8) for p in ps]
    assert want == oracle(model, ps, 8)
    first = opened(model, tmp_path, compile=compile)
    assert answers(first, ps) == want
    first.close()
    assert first.stats().stored_blocks == blocks_of(tmp_path) >= 3
    again = flat(opened(model, tmp_path, compile=compile))
    assert answers(again, ps[::-1]) == want[::-1]
    s = again.stats()
    assert s.loaded_blocks >= 3 and s.cached_tokens >= 3 * 64 and not s.lost_blocks
    assert s.loaded_bytes == s.loaded_blocks * again.engines["packed"].runner.cache.block_bytes
    assert "blocks stored" in repr(first.stats()) and "store" not in repr(LLM(model).stats())
    assert again.engines["packed"].scheduler.pool.num_held == 0


def kv_of(llm, ps):
    "What lies in the full blocks of a prompt, by their hash."
    answers(llm, ps)
    e = llm.engines["packed"]
    blocks = e.scheduler.pool.blocks
    return {b.hash: e.runner.cache.block_data(i) for i, b in enumerate(blocks) if b.hash}


def test_a_plan_says_what_the_store_holds_and_how_much_it_may(model, tmp_path):
    ps = prompts()
    llm = opened(model, tmp_path, prefix_store_bytes=64_000_000)
    answers(llm, ps)
    llm.close()
    again = opened(model, tmp_path, prefix_store_bytes=64_000_000)
    plan = again.plan(asked(ps), greedy(8))
    assert plan.store_bytes == sum(w.nbytes for w in worlds(tmp_path)) > 0
    assert plan.store_limit_bytes == 64_000_000
    assert plan.store_block_bytes == plan.block_size * again.limits.kv_bytes_per_token
    assert f"{64_000_000 * 15 // 16 // plan.store_block_bytes:,} blocks" in str(plan)
    assert "prefix store" not in str(LLM(model).plan(asked(ps), greedy(8)))


def test_a_block_has_the_bits_that_were_computed(model, tmp_path):
    ps = prompts(1)[:1]
    first = opened(model, tmp_path)
    computed = kv_of(first, ps)
    first.close()
    again = flat(opened(model, tmp_path))
    loaded = kv_of(again, ps)
    assert again.stats().loaded_blocks >= 2
    assert all(torch.equal(computed[h], loaded[h]) for h in computed) and len(computed) == 3


def test_blocks_that_memory_evicts_come_back_in_the_same_process(model, tmp_path):
    llm = flat(opened(model, tmp_path, kv_cache_bytes=6 * 64 * 512, max_num_seqs=1))
    ps = [prompts(seed, 1)[0] for seed in range(8)]
    want = [generated(model, p, 8) for p in ps]
    assert llm.limits.kv_tokens < 8 * 128
    for _ in range(2):
        assert [answers(llm, [p])[0] for p in ps] == want
        llm.engines.store.writer.flush()
    assert llm.stats().loaded_blocks >= 8 and llm.engines["packed"].scheduler.pool.evictions > 8


def test_a_resume_of_a_conversation_over_a_restart(model, tmp_path):
    text = prompts(3)[3]
    llm = opened(model, tmp_path)
    text = text + answers(llm, [text], 60)[0] + [9, 8, 7]
    llm.close()
    llm = flat(opened(model, tmp_path))
    assert answers(llm, [text]) == [generated(model, text, 8)]
    assert llm.stats().cached_tokens == (len(text) - 3) // 64 * 64  # its answer too


def test_another_process_finds_what_a_script_left_that_closed_nothing(model, tmp_path):
    code = """
import sys
from batchlab import LLM, SamplingParams
from batchlab.models import tiny_gguf, tiny_model
llm = LLM(tiny_model("llama", max_position_embeddings=1024), prefix_store=sys.argv[1])
ids = [3 + i * i % 200 for i in range(200)]
out = llm.generate([dict(prompt_token_ids=ids)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
print([*out[0].outputs[0].token_ids], llm.stats().loaded_blocks, llm.stats().stored_blocks)
"""
    first, second = (python(code, str(tmp_path), OMP_NUM_THREADS="1") for _ in range(2))
    assert first.returncode == 0, first.stderr
    want = generated(model, [3 + i * i % 200 for i in range(200)], 4)
    assert first.stdout == f"{want} 0 0\n" and second.stdout == f"{want} 3 0\n"
    assert blocks_of(tmp_path) == 3


def test_two_at_once_write_and_read_the_same_folder(model, tmp_path):
    ps = prompts(5)
    want = [generated(model, p, 8) for p in ps]
    llms = [flat(opened(model, tmp_path, kv_cache_bytes=10 * 64 * 512)) for _ in range(2)]

    def work(llm, seed):
        rng, right = random.Random(seed), []
        for _ in range(6):
            some = rng.sample(range(len(ps)), 3)
            right.append(answers(llm, [ps[i] for i in some]) == [want[i] for i in some])
            llm.reset_prefix_cache()
        return right

    found = in_threads(*(partial(work, llm, i) for i, llm in enumerate(llms)))
    assert found == [[True] * 6] * 2
    assert all(llm.stats().loaded_blocks for llm in llms)
    assert not list(tmp_path.glob("*/*.tmp"))


# --- what tells worlds apart


def test_weights_that_differ_in_one_number_have_nothing_in_common(model, tmp_path):
    ps = prompts(6, 2)
    opened_first = opened(model, tmp_path)
    answers(opened_first, ps)
    opened_first.close()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight[-1, -1] *= 1.01  # no first number of a row
    llm = flat(opened(other, tmp_path))
    assert answers(llm, ps) == [generated(other, p, 8) for p in ps]
    assert not llm.stats().loaded_blocks and len(worlds(tmp_path)) == 2


@pytest.mark.parametrize(
    "name, change",
    [
        ("rope", lambda m: m.config.rope_parameters.update(rope_theta=77.0)),
        ("config", lambda m: setattr(m.config, "rms_norm_eps", 1e-3)),
        ("a setting of a module", lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.3)),
        ("a buffer", lambda m: m.model.rotary_emb.inv_freq.mul_(1.5)),
        ("dtype", lambda m: m.to(torch.bfloat16)),
    ],
)
def test_the_world_changes_with(model, name, change):
    other = copy.deepcopy(model)
    assert facts_of_model(other) == facts_of_model(model)
    change(other)
    assert facts_of_model(other) != facts_of_model(model), name


def test_the_world_changes_with_the_backend_and_its_ways(model, monkeypatch):
    how = [dict(), dict(compile=False), dict(quantization="int8")]
    ways = [facts_of_backend(LLM(model, **h).backend, h.get("quantization")) for h in how]
    assert len({str(w) for w in ways}) == 3
    before = facts_of_machine(model.device)
    monkeypatch.setattr(store_module, "own_code", lambda: "other code")
    assert facts_of_machine(model.device) != before


def test_what_can_not_be_known_has_no_store(model, tmp_path, caplog):
    hooked = copy.deepcopy(model)
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    llm = opened(hooked, tmp_path, compile=False)
    assert llm.engines.store is None and "has a hook" in caplog.text
    assert answers(llm, ps := prompts(7, 2)) == [generated(hooked, p, 8) for p in ps]


def test_a_weight_that_changes_without_notice_poisons_nothing(model, tmp_path, caplog):
    mine = copy.deepcopy(model)
    llm = opened(mine, tmp_path, compile=False)
    ps = prompts(8, 2)
    answers(llm, ps[:1])
    mine.model.layers[0].mlp.up_proj.weight.data[5, 7] += 3.0  # where `model_state` does not look
    answers(llm, ps)
    llm.close()
    assert blocks_of(tmp_path) == 0 and "weights have changed" in caplog.text
    llm.reload_weights()
    assert answers(llm, ps) == [generated(mine, p, 8) for p in ps]
    llm.close()
    assert blocks_of(tmp_path) >= 2


def test_adapters_are_told_apart_by_their_content(model, tmp_path):
    folders = [tiny_adapter(tmp_path / f"lora{i}", model, 4, i) for i in range(2)]
    store, p = tmp_path / "store", prompts(9, 1)[:1]

    def run(folder, **more):
        llm = opened(model, store, enable_lora=True, **more)
        flat(llm)
        out = llm.generate(
            asked(p), greedy(8), lora_request=LoRARequest("x", 1, str(folder)), use_tqdm=False
        )
        llm.close()
        return ids(out), llm.stats().loaded_blocks

    plain = opened(model, store, enable_lora=True)
    alone = answers(plain, p)
    plain.close()
    first, second = run(folders[0]), run(folders[1])
    assert first[1] == second[1] == 0 and len({str(x) for x in (first[0], second[0], alone)}) == 3
    assert run(folders[0]) == (first[0], 3) and run(folders[1]) == (second[0], 3)
    shutil.copytree(folders[0], tmp_path / "copy")  # the same by another name
    assert run(tmp_path / "copy") == (first[0], 3)


def test_a_job_says_what_came_from_the_store(model, tmp_path):
    lines = [json.dumps(dict(prompt=p)) + "\n" for p in prompts(11, 3)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    for found in (0, 1):
        llm = flat(opened(model, tmp_path / "store"))
        params = dict(max_tokens=2)
        result = Job(
            tmp_path / "in.jsonl", tmp_path / f"{found}.jsonl", sampling_params=params
        ).run(llm)
        assert result.stored_tokens == llm.stats().loaded_blocks * llm.backend.block_size
        assert bool(result.stored_tokens) == found == ("in the prefix store)" in str(result))
        llm.close()


# --- files that are no blocks


def test_no_file_is_believed_whatever_has_happened_to_it(model, tmp_path, caplog):
    ps = prompts(10, 3)
    want = [generated(model, p, 8) for p in ps]
    llm = opened(model, tmp_path)
    answers(llm, ps)
    llm.close()
    rng, llm, seen = random.Random(0), flat(opened(model, tmp_path)), Counter()
    for round in range(40):
        files = sorted(tmp_path.glob("*/*.kv"))
        for file in rng.sample(files, 1):
            how = rng.choice(["flip", "cut", "empty", "gone", "other", "longer", "zeros", "folder"])
            spoil(file, how, rng, files)
            seen[how] += 1
        assert answers(llm, ps) == want, round
        llm.reset_prefix_cache()
        for path in tmp_path.glob("*/*.kv"):
            if path.is_dir():
                path.rmdir()
    assert len(seen) == 8 and llm.stats().loaded_blocks > 20
    assert caplog.text.count("has damaged files: they are removed") == 1  # said once


def spoil(file, how, rng, files):
    data = bytearray(file.read_bytes()) if file.is_file() else bytearray(1)
    if how == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[rng.randrange(len(data)) :]
    elif how == "longer":
        data += b"\0"
    elif how == "zeros":
        data[rng.randrange(len(data)) :] = bytes(len(data))
    elif how == "other":
        other = rng.choice(files)
        data = bytearray(other.read_bytes()) if other.is_file() else data
    file.unlink(missing_ok=True)
    if how == "folder":
        file.mkdir()
    elif how == "empty":
        file.touch()
    elif how != "gone":
        file.write_bytes(data)


def test_a_name_with_other_tokens_is_not_believed(tmp_path):
    files = BlockFiles(tmp_path, bytes(32), 10**6)
    assert files.write(b"n" * 16, [1, 2], b"data")
    assert files.read(b"n" * 16, [1, 2]) == b"data"
    assert files.read(b"n" * 16, [1, 3]) is None and not files.has(b"n" * 16)


def test_a_file_that_can_not_be_read_stays_and_no_file_is_held_open(tmp_path, monkeypatch):
    files = BlockFiles(tmp_path, bytes(32), 10**6)
    assert files.write(b"n" * 16, [1, 2], b"data")
    data = files.read(b"n" * 16, [1, 2])
    path = files.path(b"n" * 16)
    path.write_bytes(b"")  # what was read does not change with the file
    assert data == b"data" and files.read(b"n" * 16, [1, 2]) is None and not path.exists()
    assert files.write(b"n" * 16, [1, 2], b"data")

    def fails(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as m:
        m.setattr("builtins.open", fails)
        assert files.read(b"n" * 16, [1, 2]) is None
    assert files.read(b"n" * 16, [1, 2]) == b"data"


def test_a_disk_that_is_full_at_the_start_can_be_read(tmp_path, monkeypatch):
    assert BlockFiles(tmp_path, bytes(32), 10**6).write(b"n" * 16, [1], b"data")

    def full(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(kvfiles, "write_whole", full)
    assert BlockFiles(tmp_path, bytes(32), 10**6).read(b"n" * 16, [1]) == b"data"


def test_room_is_made_for_more_than_one_file_and_only_what_went_counts(tmp_path, monkeypatch):
    files = BlockFiles(tmp_path, bytes(32), 64_000)
    for i in range(200):
        assert files.write(bytes([i]) * 16, [i], bytes(500))
    room = files.room
    room.make(60_001 - room.total - room.since)  # a byte too many
    assert room.total <= room.limit * 7 // 8
    there = room.total

    def stays(*_, **__):
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", stays)
    assert not room.make(60_001 - there) and room.total == sum(f.nbytes for f in stored(tmp_path))


def test_blocks_that_are_loaded_count_as_used_though_no_row_has_them():
    cache = KVCache([(1, 4, 4)], 8, block_size=2)
    batch = SimpleNamespace(block_table=[[0]], loads=[(None, 5)])
    cache.count_used(batch)
    assert cache.num_used == 6
    with pytest.raises(MemoryError):
        cache.count_used(SimpleNamespace(block_table=[], loads=[(None, 8)]))


def test_a_full_disk_costs_a_line_and_no_answer(model, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    llm = flat(opened(model, tmp_path))
    monkeypatch.setattr(kvfiles, "write_whole", full)
    for seed in range(3):
        ps = prompts(seed, 2)
        assert answers(llm, ps) == [generated(model, p, 8) for p in ps]
        llm.reset_prefix_cache()
    said = [r for r in caplog.records if "can't be written" in r.getMessage()]
    assert len(said) == 1 and llm.stats().lost_blocks >= 6 and not llm.stats().stored_blocks


def test_a_writer_that_dies_leaves_nothing_that_counts(tmp_path, monkeypatch):
    files = BlockFiles(tmp_path, bytes(32), 10**6)

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(os, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            files.write(b"n" * 16, [1], b"data")
    assert not files.has(b"n" * 16) and not list(tmp_path.glob("*/*.tmp"))
    left = files.folder / "kv-old.tmp"  # of one that was killed
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    files = BlockFiles(tmp_path, bytes(32), 10**6)  # a new process looks at all that is there
    assert files.write(b"n" * 16, [1], b"data") and not left.exists()


@pytest.mark.parametrize("writers", [1, 3])
def test_the_least_recently_used_go_first_and_the_limit_holds_for_all(tmp_path, writers):
    limit, size = 60_000, 500
    all_files = [BlockFiles(tmp_path, bytes([i]) * 32, limit) for i in range(writers)]
    foreign = tmp_path / "mine.txt"
    foreign.write_text("not a block")
    kept, rng, clock = bytes(16), random.Random(0), itertools.count(10**18, 10**9)
    assert all_files[0].write(kept, [0], bytes(size))
    for i in range(1, 400):
        files = rng.choice(all_files)
        name = i.to_bytes(16, "big")
        assert files.write(name, [i], bytes(size))
        files.touch(name, next(clock))
        all_files[0].touch(kept, next(clock))
        assert sum(f.nbytes for f in stored(tmp_path)) <= limit
    there = [i for i in range(400) if any(f.has(i.to_bytes(16, "big")) for f in all_files)]
    assert there[0] == 0 and there[1:] == [*range(there[1], 400)] and foreign.exists()
    assert not all_files[0].write(b"b" * 16, [1], bytes(limit + 1))
    assert sum(w.blocks for w in clear_store(tmp_path)) == len(there) and foreign.exists()
    assert worlds(tmp_path) == [] and all_files[0].write(kept, [0], bytes(size))


def test_at_the_end_what_was_used_last_goes_first_where_room_is_short(model, tmp_path):
    rng = random.Random(13)
    ps = [[rng.randrange(3, 250) for _ in range(200)] for _ in range(5)]
    llm = opened(model, tmp_path, prefix_store_bytes=6 * 34_000)
    for p in ps:
        answers(llm, [p])
    llm.close()
    assert 3 <= blocks_of(tmp_path) <= 6
    for p, loaded in ((ps[-1], 3), (ps[0], 0)):
        llm = flat(opened(model, tmp_path))
        assert answers(llm, [p]) == [generated(model, p, 8)]
        assert llm.stats().loaded_blocks == loaded


def test_reading_that_takes_longer_than_computing_is_left_out(model, tmp_path):
    ps = prompts(11, 2)
    llm = opened(model, tmp_path)
    answers(llm, ps)
    llm.close()
    llm = opened(model, tmp_path)
    llm.engines.store.costs.computing, llm.engines.store.costs.reading = 1e-9, 1.0
    assert answers(llm, ps) == [generated(model, p, 8) for p in ps]
    assert llm.stats().loaded_blocks == 0


@pytest.mark.parametrize(
    "how, said",
    [
        (dict(strategy="static"), "needs strategy='continuous'"),
        (dict(enable_prefix_caching=False), "needs enable_prefix_caching=True"),
        (dict(prefix_store=None, prefix_store_bytes=10**9), "needs prefix_store"),
        (dict(prefix_store_bytes=1000), "holds less than two blocks"),
        (dict(prefix_store_bytes=-1), "at least 1"),
        (dict(prefix_store="/dev/null/x"), "no folder that can be made"),
        (dict(prefix_store=5), "must be a folder"),
    ],
)
def test_what_is_asked_wrongly_is_said(model, tmp_path, how, said):
    with pytest.raises(ParamError, match=said):
        opened(model, tmp_path, **how)


# --- commands


def test_the_commands_share_a_folder(tmp_path):
    from batchlab.cli import main

    tiny_gguf(gguf := tmp_path / "tiny.gguf")
    jobs, store = tmp_path / "in.jsonl", str(tmp_path / "store")
    text = "a long instruction that all of the requests begin with, word for word, " * 3
    jobs.write_text("".join(json.dumps(dict(prompt=text + x)) + "\n" for x in "abc"))
    found = []
    for i in range(2):
        out = str(tmp_path / f"out{i}.jsonl")
        flags = "--model", str(gguf), "--temperature", "0", "--max-tokens", "4"
        assert main(["run", "-i", str(jobs), "-o", out, *flags, "--prefix-store", store]) == 0
        lines = map(json.loads, Path(out).read_text().splitlines())
        found.append([x["text"] for x in lines])
    assert found[0] == found[1] and len(found[0]) == 3
    assert Path(store).is_dir()


def test_metrics_count_what_came_from_the_store(model, tmp_path):
    prometheus = pytest.importorskip("prometheus_client", reason="needs the extra server")
    from batchlab.serve.app import Metrics

    llm = opened(model, tmp_path)
    answers(llm, ps := prompts(12, 2))
    llm.close()
    llm = flat(opened(model, tmp_path))
    answers(llm, ps)
    text = Metrics(SimpleNamespace(stats=llm.stats, llm=llm), "m").text().decode()
    loaded = 64 * llm.stats().loaded_blocks
    assert loaded and prometheus
    assert f'vllm:external_prefix_cache_hits_total{{model_name="m"}} {loaded:.1f}' in text


def test_a_writer_that_fails_in_its_own_way_ends_and_the_next_block_starts_another(tmp_path):
    class Broken:
        root = tmp_path

        def write(self, *_):
            raise ZeroDivisionError

    writer = store_module.BlockWriter(Broken())
    some = store_module.Waiting(b"n" * 16, [1], torch.zeros(4, dtype=torch.uint8))
    writer.add(some)
    until(lambda: not writer.names and writer.thread is None)
    writer.files = BlockFiles(tmp_path, bytes(32), 10**6)
    writer.add(some)
    writer.flush()
    assert writer.stored == 1 and writer.files.has(b"n" * 16)


def test_names_of_blocks_that_were_not_written_are_given_free(tmp_path):
    class Killed:
        root = tmp_path

        def write(self, *_):
            raise KeyboardInterrupt

    writer = store_module.BlockWriter(Killed())
    for i in range(3):
        name = bytes([i]) * 16
        writer.queue.append(store_module.Waiting(name, [1], torch.zeros(4, dtype=torch.uint8)))
        writer.names.add(name)
    with pytest.raises(KeyboardInterrupt):
        writer.write_queue()
    assert not writer.names


def test_a_store_that_fails_costs_the_cache_and_no_answer(model, tmp_path, monkeypatch, caplog):
    ps = prompts(15, 3)
    llm = opened(model, tmp_path)
    answers(llm, ps)
    llm.close()

    def fails(*_):
        raise MemoryError("no room")

    llm = flat(opened(model, tmp_path, kv_cache_bytes=10 * 64 * 512))
    monkeypatch.setattr(BlockFiles, "read", fails)
    monkeypatch.setattr(BlockFiles, "has", lambda self, name: self.path(name).exists())
    monkeypatch.setattr(BlockFiles, "touch", fails)
    monkeypatch.setattr(kvfiles.FileRoom, "make", fails)
    assert answers(llm, ps) == [generated(model, p, 8) for p in ps]
    llm.close()
    said = [r for r in caplog.records if "lost a block" in r.getMessage()]
    assert len(said) == 1 and llm.stats().lost_blocks and not llm.stats().loaded_blocks


def test_weights_that_change_unseen_take_with_them_what_was_written_since(model, tmp_path, caplog):
    mine = copy.deepcopy(model)
    watch = store_module.WeightWatch(mine)
    writer = store_module.BlockWriter(BlockFiles(tmp_path, bytes(32), 10**6), watch)
    block = lambda i: store_module.Waiting(bytes([i]) * 16, [1], torch.zeros(4).view(torch.uint8))
    writer.write(block(1))
    writer.confirm()
    mine.model.layers[0].mlp.up_proj.weight.data[5, 7] += 3.0
    assert watch.quick() and not watch.whole()
    writer.write(block(2))
    writer.confirm_rarely()  # not yet
    writer.next_look = 0.0
    writer.confirm_rarely()
    assert writer.off and blocks_of(tmp_path) == 1 and "weights have changed" in caplog.text
    with torch.no_grad():
        mine.model.layers[0].mlp.up_proj.weight[5, 7] += 1  # torch counts this one
    assert not watch.quick()


def test_a_look_at_the_weights_that_fails_turns_the_store_off(model, tmp_path, caplog):
    watch = store_module.WeightWatch(model)
    watch.seen = None
    writer = store_module.BlockWriter(BlockFiles(tmp_path, bytes(32), 10**6), watch)
    writer.check()
    assert writer.off and "can't be looked at" in caplog.text


def test_what_one_step_loads_is_limited(model, tmp_path, monkeypatch):
    rng = random.Random(16)
    ps = [[rng.randrange(3, 250) for _ in range(200)] for _ in range(4)]
    llm = opened(model, tmp_path)
    answers(llm, ps)
    llm.close()
    monkeypatch.setattr(store_module, "LOADS", 1)
    llm, seen = flat(opened(model, tmp_path)), []
    real = Scheduler.schedule

    def schedule(self):
        plan = real(self)
        seen.append(len(plan.loads))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    assert answers(llm, ps) == [generated(model, p, 8) for p in ps]
    assert [n for n in seen if n] == [3] * 4  # one prompt a step


def test_a_model_in_4_bits_without_kernels_keeps_its_store(tmp_path, caplog):
    file, store = tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "store"
    text = "the beginning that both of them have in common, word for word, and it is long " * 2
    for _ in range(2):
        llm = LLM(str(file), compile=False, prefix_store=store)
        flat(llm)
        llm.generate([text + "a"], greedy(4), use_tqdm=False)
        llm.close()
    assert llm.stats().loaded_blocks and "the prefix store is off" not in caplog.text


def test_a_config_that_changes_leaves_the_store_of_a_packed_model(tmp_path, caplog):
    llm = LLM(str(tiny_gguf(tmp_path / "tiny.gguf")), prefix_store=tmp_path / "store")
    if not llm.engines.runs_packed_copy:
        pytest.skip("this machine has no kernels")
    assert llm.engines.store is not None
    llm.model.config.rms_norm_eps = 0.5
    llm.engines.begin_call()
    assert llm.engines.store is None and "config has changed" in caplog.text


def test_a_forward_that_was_replaced_is_another_world(model, monkeypatch):
    kind, before = type(model.model.layers[0].mlp), facts_of_model(model)["code"]
    real = kind.forward

    def forward(self, x):
        return self.down_proj(self.up_proj(x))

    def captured(self, x):
        return real(self, x)

    monkeypatch.setattr(kind, "forward", forward)
    assert facts_of_model(model)["code"] != before
    monkeypatch.setattr(kind, "forward", captured)
    with pytest.raises(Unavailable, match="closure"):
        facts_of_model(model)


def test_what_a_module_of_ones_own_has_counts_or_there_is_no_store(model):
    class Own(type(model.model.layers[0].mlp)):
        pass

    other = copy.deepcopy(model)
    mlp = other.model.layers[0].mlp
    mlp.__class__, mlp.scale = Own, torch.ones(3)
    one = facts_of_model(other)["code"]
    mlp.scale = torch.zeros(3)
    assert facts_of_model(other)["code"] != one
    mlp.scale = SimpleNamespace(by=2)
    with pytest.raises(Unavailable, match="SimpleNamespace"):
        facts_of_model(other)


def test_settings_of_torch_that_change_turn_the_store_off(model, tmp_path, caplog):
    llm = opened(model, tmp_path)
    try:
        torch.use_deterministic_algorithms(True)
        llm.engines.begin_call()
    finally:
        torch.use_deterministic_algorithms(False)
    assert llm.engines.store.writer.off and "settings of torch" in caplog.text


def test_a_server_that_is_shut_down_keeps_its_prefixes(model, tmp_path):
    p = prompts(14, 1)[0]

    async def answer():
        async with AsyncLLM(model, prefix_store=tmp_path) as llm:
            flat(llm.llm)
            asked = dict(prompt_token_ids=p)
            outs = [out async for out in llm.generate(asked, greedy(8))]
            return list(outs[-1].outputs[0].token_ids), llm.stats().loaded_blocks

    want = generated(model, p, 8)
    assert [asyncio.run(answer()) for _ in range(2)] == [(want, 0), (want, 3)]


@pytest.mark.parametrize("quantization", ["int8", None])
def test_a_model_in_4_bits_and_a_quantized_one_resume_too(tmp_path, quantization):
    "Weights that stay in the groups of their file, and those that are packed otherwise."
    file, store = tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "store"
    text = "the beginning that both of them have in common, word for word, and it is long " * 2
    found = []
    for _ in range(2):
        llm = LLM(str(file), quantization=quantization, prefix_store=store)
        flat(llm)
        found.append(ids(llm.generate([text + "a", text + "bcd"], greedy(8), use_tqdm=False)))
        llm.close()
    alone = LLM(str(file), quantization=quantization)
    assert found == [ids(alone.generate([text + "a", text + "bcd"], greedy(8), use_tqdm=False))] * 2
    assert llm.stats().loaded_blocks >= 1
