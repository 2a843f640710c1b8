"A prefix cache that outlives its process: the same tokens with it and without, whatever has happened to its files."

import asyncio, copy, errno, itertools, json, os, random, shutil
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from batchlab import LLM, AsyncLLM, LoRARequest
from batchlab.core.blocks import BlockPool, Hit
from batchlab.core.cache import KVCache
from batchlab.core.scheduler import Scheduler
from batchlab.errors import ParamError, Unavailable
from batchlab.llm import kvfiles, store as store_module
from batchlab.llm.kvfiles import BlockFiles, stored
from batchlab.llm.store import facts_of_backend, facts_of_machine, facts_of_model
from batchlab.models import tiny_gguf, tiny_model
from batchlab.models.tiny import tiny_adapter
from batchlab.jobs.job import Job
from helpers import (
    compiled_or_not,
    generated,
    greedy,
    ids,
    in_threads,
    json_lines,
    needs,
    oracle,
    python,
    raising,
    until,
)
from invariants import check_pool
from test_scheduler import storm


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
    "A drawn case of the scheduler, three times, each on what the one before left; blocks go missing."
    shelf = Shelf(seed=seed, lose=seed % 2 / 5)

    def attach(s, model):
        shelf.kv, s.pool.tier = model.kv, shelf

    for _ in range(3):
        s = storm(seed, Counter(), prepare=attach)
        s.pool.keep()
        s.reset()
    return shelf.fetched, shelf.puts


def test_tokens_of_a_scheduler_with_a_second_tier():
    played = [play(seed) for seed in range(10)]
    assert all(sum(n) > 100 for n in zip(*played)), played


# --- an LLM with a store


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", max_position_embeddings=1024)


NAME = b"n" * 16


@pytest.fixture
def files(tmp_path):
    "The files of one world."
    return BlockFiles(tmp_path, bytes(32), 10**6)


def prompts(seed=0, n=5):
    "Prompts of different lengths that begin with the same 200 tokens, and one that does not."
    rng = random.Random(seed)
    begin = [rng.randrange(3, 250) for _ in range(200)]
    ends = [[rng.randrange(3, 250) for _ in range(3 + 20 * i)] for i in range(n)]
    return [begin + end for end in ends] + [ends[-1]]


def asked(ps):
    return [dict(prompt_token_ids=p) for p in ps]


def answers(llm, ps, n=8):
    return ids(llm.generate(asked(ps), greedy(n)))


def opened(model, store, **more):
    "An `LLM` with a store, whose costs always let a block be read: a tiny model is computed at once."
    llm = LLM(model, **dict(prefix_store=store, max_num_seqs=4) | more)
    if llm.engines.store:
        llm.engines.store.costs.worth = lambda: True
    return llm


def fill(model, store, ps, **more):
    "What an `LLM` answers that ends then and has put its blocks into the store."
    llm = opened(model, store, **more)
    found = answers(llm, ps)
    llm.close()
    return found


def check_tokens(llm, ps):
    "That prompts get the tokens that transformers gives each alone."
    assert answers(llm, ps) == [generated(llm.model, p, 8) for p in ps]


def blocks_of(store):
    return len(stored(store))


@compiled_or_not
def test_tokens_after_a_restart_are_those_of_generate_and_of_the_oracle(model, tmp_path, compile):
    ps = prompts()
    first = opened(model, tmp_path, compile=compile)
    check_tokens(first, ps)
    assert answers(first, ps) == oracle(model, ps, 8)
    first.close()
    assert first.stats().stored_blocks == blocks_of(tmp_path) >= 3
    again = opened(model, tmp_path, compile=compile)
    check_tokens(again, ps[::-1])
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
    ps, how = prompts(), dict(prefix_store_bytes=64_000_000)
    fill(model, tmp_path, ps, **how)
    again = opened(model, tmp_path, **how)
    plan = again.plan(asked(ps), greedy(8))
    assert plan.store_bytes == sum(f.nbytes for f in stored(tmp_path)) > 0
    assert plan.store_limit_bytes == 64_000_000
    assert plan.store_block_bytes == plan.block_size * again.limits.kv_bytes_per_token
    assert f"{64_000_000 * 15 // 16 // plan.store_block_bytes:,} blocks" in str(plan)
    assert "prefix store" not in str(LLM(model).plan(asked(ps), greedy(8)))


def test_a_block_has_the_bits_that_were_computed(model, tmp_path):
    first = opened(model, tmp_path)
    computed = kv_of(first, prompts(1)[:1])
    first.close()
    again = opened(model, tmp_path)
    loaded = kv_of(again, prompts(1)[:1])
    assert again.stats().loaded_blocks >= 2
    assert all(torch.equal(computed[h], loaded[h]) for h in computed) and len(computed) == 3


def test_blocks_that_memory_evicts_come_back_in_the_same_process(model, tmp_path):
    llm = opened(model, tmp_path, kv_cache_bytes=6 * 64 * 512, max_num_seqs=1)
    assert llm.limits.kv_tokens < 8 * 128
    for seed in [*range(8)] * 2:
        check_tokens(llm, prompts(seed, 1)[:1])
        llm.engines.store.writer.flush()
    assert llm.stats().loaded_blocks >= 8 and llm.engines["packed"].scheduler.pool.evictions > 8


def test_a_resume_of_a_conversation_over_a_restart(model, tmp_path):
    text = prompts(3)[3]
    llm = opened(model, tmp_path)
    text = text + answers(llm, [text], 60)[0] + [9, 8, 7]
    llm.close()
    llm = opened(model, tmp_path)
    check_tokens(llm, [text])
    assert llm.stats().cached_tokens == (len(text) - 3) // 64 * 64  # its answer too


def test_another_process_finds_what_a_script_left_that_closed_nothing(model, tmp_path):
    code = """
import sys
from batchlab import LLM, SamplingParams
from batchlab.models import tiny_model
llm = LLM(tiny_model("llama", max_position_embeddings=1024), prefix_store=sys.argv[1])
ids = [3 + i * i % 200 for i in range(200)]
out = llm.generate([dict(prompt_token_ids=ids)], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
print([*out[0].outputs[0].token_ids], llm.stats().loaded_blocks, llm.stats().stored_blocks)
"""
    done, prompt = (
        python(code, str(tmp_path), OMP_NUM_THREADS="1"),
        [3 + i * i % 200 for i in range(200)],
    )
    assert done.stdout == f"{generated(model, prompt, 8)} 0 0\n", done.stderr
    llm = opened(model, tmp_path)
    check_tokens(llm, [prompt])
    assert llm.stats().loaded_blocks == blocks_of(tmp_path) == 3


def test_two_at_once_write_and_read_the_same_folder(model, tmp_path):
    ps = prompts(5)
    want = [generated(model, p, 8) for p in ps]
    llms = [opened(model, tmp_path, kv_cache_bytes=10 * 64 * 512) for _ in range(2)]

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
    ps, other = prompts(6, 2), copy.deepcopy(model)
    fill(model, tmp_path, ps)
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight[-1, -1] *= 1.01  # no first number of a row
    llm = opened(other, tmp_path)
    check_tokens(llm, ps)
    assert not llm.stats().loaded_blocks and len([*tmp_path.iterdir()]) == 2


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
    check_tokens(llm, prompts(7, 2))


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
    check_tokens(llm, ps)
    llm.close()
    assert blocks_of(tmp_path) >= 2


def test_adapters_are_told_apart_by_their_content(model, tmp_path):
    folders = [tiny_adapter(tmp_path / f"lora{i}", model, 4, i) for i in range(2)]
    shutil.copytree(folders[0], tmp_path / "copy")  # the same by another name

    def run(folder):
        llm = opened(model, tmp_path / "store", enable_lora=True)
        lora = folder and LoRARequest("x", 1, str(folder))
        out = llm.generate(asked(prompts(9, 1)[:1]), greedy(8), lora_request=lora)
        llm.close()
        return ids(out), llm.stats().loaded_blocks

    first = [run(folder) for folder in (None, *folders)]
    assert [n for _, n in first] == [0] * 3 and len({str(tokens) for tokens, _ in first}) == 3
    for folder, (tokens, _) in zip((*folders, tmp_path / "copy"), (*first[1:], first[1])):
        assert run(folder) == (tokens, 3)


def test_a_job_says_what_came_from_the_store(model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(dict(prompt=p)) + "\n" for p in prompts(11, 3)))
    for found in (0, 1):
        llm, to = opened(model, tmp_path / "store"), tmp_path / f"{found}.jsonl"
        result = Job(source, to, sampling_params=dict(max_tokens=2)).run(llm)
        assert result.stored_tokens == llm.stats().loaded_blocks * llm.backend.block_size
        assert bool(result.stored_tokens) == found == ("in the prefix store)" in str(result))
        llm.close()


# --- files that are no blocks


def test_no_file_is_believed_whatever_has_happened_to_it(model, tmp_path, caplog):
    ps, rng, seen = prompts(10, 3), random.Random(0), Counter()
    want = fill(model, tmp_path, ps)
    assert want == [generated(model, p, 8) for p in ps]
    llm = opened(model, tmp_path)
    for round in range(40):
        files = sorted(tmp_path.glob("*/*.kv"))
        how = rng.choice(["flip", "cut", "empty", "gone", "other", "longer", "zeros", "folder"])
        spoil(rng.choice(files), how, rng, files)
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


def test_a_file_that_can_not_be_read_stays_and_no_file_is_held_open(files, monkeypatch):
    assert files.write(NAME, [1, 2], b"data")
    data = files.read(NAME, [1, 2])
    files.path(NAME).write_bytes(b"")  # what was read does not change with the file
    assert data == b"data" and files.read(NAME, [1, 2]) is None and not files.path(NAME).exists()
    assert files.write(NAME, [1, 2], b"data")
    with monkeypatch.context() as m:
        m.setattr("builtins.open", raising(OSError(errno.EMFILE, "Too many open files")))
        assert files.read(NAME, [1, 2]) is None
    assert files.read(NAME, [1, 2]) == b"data"
    assert files.read(NAME, [1, 3]) is None and not files.has(NAME)  # other tokens of that name


def test_a_disk_that_is_full_at_the_start_can_be_read(files, tmp_path, monkeypatch):
    assert files.write(NAME, [1], b"data")
    full = raising(OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr(kvfiles, "write_whole", full)
    assert BlockFiles(tmp_path, bytes(32), 10**6).read(NAME, [1]) == b"data"


def test_room_is_made_for_more_than_one_file_and_only_what_went_counts(tmp_path, monkeypatch):
    files = BlockFiles(tmp_path, bytes(32), 64_000)
    for i in range(200):
        assert files.write(bytes([i]) * 16, [i], bytes(500))
    room = files.room
    room.make(60_001 - room.total - room.since)  # a byte too many
    assert room.total <= room.limit * 7 // 8
    there = room.total
    monkeypatch.setattr(Path, "unlink", raising(PermissionError))
    assert not room.make(60_001 - there) and room.total == sum(f.nbytes for f in stored(tmp_path))


def test_blocks_that_are_loaded_count_as_used_though_no_row_has_them():
    cache = KVCache([(1, 4, 4)], 8, block_size=2)
    batch = SimpleNamespace(block_table=[[0]], loads=[(None, 5)])
    cache.count_used(batch)
    assert cache.num_used == 6
    with pytest.raises(MemoryError):
        cache.count_used(SimpleNamespace(block_table=[], loads=[(None, 8)]))


def test_a_full_disk_costs_a_line_and_no_answer(model, tmp_path, monkeypatch, caplog):
    llm = opened(model, tmp_path)
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(kvfiles, "write_whole", full)
    for seed in range(3):
        check_tokens(llm, prompts(seed, 2))
        llm.reset_prefix_cache()
    assert caplog.text.count("can't be written") == 1
    assert llm.stats().lost_blocks >= 6 and not llm.stats().stored_blocks


def test_a_writer_that_dies_leaves_nothing_that_counts(files, tmp_path, monkeypatch):
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(os, "replace", raising(KeyboardInterrupt))
        files.write(NAME, [1], b"data")
    assert not files.has(NAME) and not list(tmp_path.glob("*/*.tmp"))
    left = files.folder / "kv-old.tmp"  # of one that was killed
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    files = BlockFiles(tmp_path, bytes(32), 10**6)  # a new process looks at all that is there
    assert files.write(NAME, [1], b"data") and not left.exists()


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
    assert len(stored(tmp_path)) == len(there)


def test_at_the_end_what_was_used_last_goes_first_where_room_is_short(model, tmp_path):
    rng = random.Random(13)
    ps = [[rng.randrange(3, 250) for _ in range(200)] for _ in range(5)]
    llm = opened(model, tmp_path, prefix_store_bytes=6 * 34_000)
    for p in ps:
        answers(llm, [p])
    llm.close()
    assert 3 <= blocks_of(tmp_path) <= 6
    for p, loaded in ((ps[-1], 3), (ps[0], 0)):
        llm = opened(model, tmp_path)
        check_tokens(llm, [p])
        assert llm.stats().loaded_blocks == loaded


def test_reading_that_takes_longer_than_computing_is_left_out(model, tmp_path):
    fill(model, tmp_path, prompts(11, 2))
    llm = LLM(model, prefix_store=tmp_path, max_num_seqs=4)
    llm.engines.store.costs.computing, llm.engines.store.costs.reading = 1e-9, 1.0
    check_tokens(llm, prompts(11, 2))
    assert llm.stats().loaded_blocks == 0


ASKED_WRONGLY = r"""
[{"strategy": "static"}, "needs strategy='continuous'"]
[{"enable_prefix_caching": false}, "needs enable_prefix_caching=True"]
[{"prefix_store": null, "prefix_store_bytes": 1000000000}, "needs prefix_store"]
[{"prefix_store_bytes": 1000}, "holds less than two blocks"]
[{"prefix_store_bytes": -1}, "at least 1"]
[{"prefix_store": "/dev/null/x"}, "no folder that can be made"]
[{"prefix_store": 5}, "must be a folder"]
"""


@pytest.mark.parametrize("how, said", json_lines(ASKED_WRONGLY), ids=str)
def test_what_is_asked_wrongly_is_said(model, tmp_path, how, said):
    with pytest.raises(ParamError, match=said):
        opened(model, tmp_path, **how)


# --- commands


def test_a_command_has_a_store(tmp_path):
    from batchlab.cli import main

    gguf, source, store = tiny_gguf(tmp_path / "m.gguf"), tmp_path / "in.jsonl", tmp_path / "store"
    source.write_text("".join(json.dumps(dict(prompt=x)) + "\n" for x in "abc"))
    flags = f"run -i {source} -o {tmp_path / 'out.jsonl'} --model {gguf} --max-tokens 4"
    assert main([*flags.split(), "--prefix-store", str(store)]) == 0
    assert all(line["text"] for line in json_lines((tmp_path / "out.jsonl").read_text()))
    assert store.is_dir()


def test_metrics_count_what_came_from_the_store(model, tmp_path):
    needs("prometheus_client")
    from batchlab.serve.app import Metrics

    fill(model, tmp_path, prompts(12, 2))
    llm = opened(model, tmp_path)
    answers(llm, prompts(12, 2))
    text = Metrics(SimpleNamespace(stats=llm.stats, llm=llm), "m").text().decode()
    loaded = 64 * llm.stats().loaded_blocks
    assert loaded
    for name, n in (("external_prefix", loaded), ("prefix", llm.stats().cached_tokens)):
        assert f'vllm:{name}_cache_hits_total{{model_name="m"}} {n:.1f}' in text


def waiting(i):
    return store_module.Waiting(bytes([i]) * 16, [1], torch.zeros(4, dtype=torch.uint8))


def test_a_writer_that_fails_in_its_own_way_ends_and_the_next_block_starts_another(files):
    broken = SimpleNamespace(root=files.root, write=raising(ZeroDivisionError))
    writer = store_module.BlockWriter(broken)
    writer.add(waiting(1))
    until(lambda: not writer.names and writer.thread is None)
    writer.files = files
    writer.add(waiting(1))
    writer.flush()
    assert writer.stored == 1 and files.has(bytes([1]) * 16)


def test_names_of_blocks_that_were_not_written_are_given_free(tmp_path):
    killed = SimpleNamespace(root=tmp_path, write=raising(KeyboardInterrupt))
    writer = store_module.BlockWriter(killed)
    for block in map(waiting, range(3)):
        writer.queue.append(block)
        writer.names.add(block.name)
    with pytest.raises(KeyboardInterrupt):
        writer.write_queue()
    assert not writer.names


def test_a_store_that_fails_costs_the_cache_and_no_answer(model, tmp_path, monkeypatch, caplog):
    fill(model, tmp_path, prompts(15, 3))
    llm, fails = (
        opened(model, tmp_path, kv_cache_bytes=10 * 64 * 512),
        raising(MemoryError("no room")),
    )
    for owner, name in (BlockFiles, "read"), (BlockFiles, "touch"), (kvfiles.FileRoom, "make"):
        monkeypatch.setattr(owner, name, fails)
    monkeypatch.setattr(BlockFiles, "has", lambda self, name: self.path(name).exists())
    check_tokens(llm, prompts(15, 3))
    llm.close()
    assert caplog.text.count("lost a block") == 1
    assert llm.stats().lost_blocks and not llm.stats().loaded_blocks


def test_weights_that_change_unseen_take_with_them_what_was_written_since(model, files, caplog):
    mine = copy.deepcopy(model)
    watch = store_module.WeightWatch(mine)
    writer = store_module.BlockWriter(files, watch)
    writer.write(waiting(1))
    writer.confirm()
    mine.model.layers[0].mlp.up_proj.weight.data[5, 7] += 3.0
    assert watch.quick() and not watch.whole()
    writer.write(waiting(2))
    writer.confirm_rarely()  # not yet
    writer.next_look = 0.0
    writer.confirm_rarely()
    assert writer.off and blocks_of(files.root) == 1 and "weights have changed" in caplog.text
    with torch.no_grad():
        mine.model.layers[0].mlp.up_proj.weight[5, 7] += 1  # torch counts this one
    assert not watch.quick()


def test_a_look_at_the_weights_that_fails_turns_the_store_off(model, files, caplog):
    watch = store_module.WeightWatch(model)
    watch.seen = None
    writer = store_module.BlockWriter(files, watch)
    writer.check()
    assert writer.off and "can't be looked at" in caplog.text


def test_what_one_step_loads_is_limited(model, tmp_path, monkeypatch):
    rng = random.Random(16)
    ps = [[rng.randrange(3, 250) for _ in range(200)] for _ in range(4)]
    fill(model, tmp_path, ps)
    monkeypatch.setattr(store_module, "LOADS", 1)
    llm, seen = opened(model, tmp_path), []
    real = Scheduler.schedule

    def schedule(self):
        plan = real(self)
        seen.append(len(plan.loads))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    check_tokens(llm, ps)
    assert [n for n in seen if n] == [3] * 4  # one prompt a step


def test_a_config_that_changes_leaves_the_store_of_a_packed_model(tmp_path, caplog):
    llm = LLM(str(tiny_gguf(tmp_path / "tiny.gguf")), prefix_store=tmp_path / "store")
    if not llm.engines.runs_packed_copy:
        pytest.skip(f"this machine has no kernels: {llm.backend.why}")
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
    forward.__defaults__ = (SimpleNamespace(),)
    for other, why in ((forward, "SimpleNamespace"), (captured, "closure")):
        monkeypatch.setattr(kind, "forward", other)
        with pytest.raises(Unavailable, match=why):
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
            llm.llm.engines.store.costs.worth = lambda: True
            asked = dict(prompt_token_ids=p)
            outs = [out async for out in llm.generate(asked, greedy(8))]
            return list(outs[-1].outputs[0].token_ids), llm.stats().loaded_blocks

    want = generated(model, p, 8)
    assert [asyncio.run(answer()) for _ in range(2)] == [(want, 0), (want, 3)]


@pytest.mark.parametrize("how", [dict(quantization="int8"), {}, dict(compile=False)], ids=str)
def test_a_model_in_4_bits_and_a_quantized_one_resume_too(tmp_path, how, caplog):
    "Weights that stay in the groups of their file, and those that are packed otherwise, or not."
    file, text = str(tiny_gguf(tmp_path / "tiny.gguf")), "words that both begin with " * 8
    ask = lambda llm: ids(llm.generate([text + "a", text + "bcd"], greedy(8)))
    want = ask(LLM(file, **how))
    for _ in range(2):
        llm = opened(file, tmp_path / "store", **how)
        assert ask(llm) == want
        llm.close()
    assert llm.stats().loaded_blocks >= 1 and "the prefix store is off" not in caplog.text
