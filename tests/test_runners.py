"A step of rows over blocks, padded rows and rows alone: each row's numbers are those that the model's own code gives it alone."

import itertools, pickle, random, sys
from dataclasses import replace
from types import SimpleNamespace

import pytest, torch
from torch.profiler import ProfilerActivity, profile

from batchlab.core.attention import PackedStep, TorchBackend, _configs, packed_forward, packed_of
from batchlab.core.batch import make_batch, pack_rows
from batchlab.core.cache import KVCache, kv_bytes_per_token, kv_shapes, reserve
from batchlab.core.request import Request, RowOutput
from batchlab.core.runners import PackedRunner, check_batch
from batchlab.core.scheduler import Scheduler
from batchlab.errors import BatchError, Unavailable
from batchlab.fast.kernels import shared_prefixes
from batchlab.fast.trial import kv_layout
from batchlab.llm.rectangle import PaddedRunner, PaddedScheduler, SoloRunner
from batchlab.models import TINY_ARCHS, max_model_len, tiny_model
from helpers import ROOT, generated, one_thread, oracle, some_ids, spoil
from invariants import check_invariants, check_pool

sys.path.append(str(ROOT / "nbs"))
from families import FAMILIES, REWRITTEN, RUN_PACKED

pytestmark = one_thread
SPECIAL = {name: how for name, _, how in FAMILIES}
MANY = (*TINY_ARCHS, "gemma2", "gpt_oss", "qwen3_moe", "phi", "deepseek_v3", "gemma3n_text")


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def tiny(arch, **more):
    "A tiny model; soft caps are so low that they change its tokens."
    caps = dict(attn_logit_softcapping=0.5) if arch == "gemma2" else {}
    return tiny_model(arch, **SPECIAL.get(arch, {}) | caps | more)


def scatter(needs, seed=0):
    "For each sequence a table of that many blocks, which lie in no order and leave some out."
    blocks = random.Random(seed).sample(range(sum(needs) + 3), sum(needs))
    return [[blocks.pop() for _ in range(n)] for n in needs]


def run_step(model, cache, batch):
    "Logits of one `batch`, and the step that attended."
    cache.prepare(batch)
    packed, last = packed_of(batch)
    step = PackedStep(cache, batch)
    return packed_forward(model, step, packed, last), step


def generate_blocks(
    model, prompts, caps, chunk=1000, size=16, tables=None, cache=None, shared=0, log=None
):
    "Greedy tokens, `caps` for each prompt (a number, or one each), by packed steps; sequence i enters in step i. `log` takes the steps."
    caps = [caps] * len(prompts) if isinstance(caps, int) else caps
    tables = tables or scatter([-(-(len(p) + n) // size) for p, n in zip(prompts, caps)])
    if cache is None:
        cache = KVCache(kv_shapes(model), max(map(max, tables)) + 1, size, model.dtype)
    tokens, computed, t = [list(p) for p in prompts], [0] + [shared] * (len(prompts) - 1), 0
    while live := [i for i, p in enumerate(prompts) if len(tokens[i]) < len(p) + caps[i]]:
        live, t = [i for i in live if i <= t], t + 1
        rows = [(computed[i], min(chunk, len(tokens[i]) - computed[i]), i) for i in live]
        rows.sort(key=lambda r: r[1] > 1)
        if not rows:
            continue
        batch = pack_rows(
            [(tokens[i][start : start + n], start) for start, n, i in rows],
            [tables[i][: -(-(start + n) // size)] for start, n, i in rows],
            size,
        )
        logits, step = run_step(model, cache, batch)
        if log is not None:
            log.append(step)
        for (_, n, i), token in zip(rows, logits.argmax(-1).tolist()):
            computed[i] += n
            if computed[i] == len(tokens[i]):
                tokens[i].append(token)
    return [x[len(p) :] for x, p in zip(tokens, prompts)]


def nan_cache(model, num_blocks, size=16, shapes=None):
    cache = KVCache(shapes or kv_layout(model), num_blocks, size, model.dtype)
    spoil(cache)
    return cache


# --- families


@pytest.mark.parametrize("name", [*SPECIAL, *REWRITTEN])
def test_which_families_run_packed(name):
    model = tiny(name)
    before = model.config._attn_implementation, [x.training for x in model.modules()]
    if name in RUN_PACKED:
        kv_layout(model)
    else:
        with pytest.raises(Unavailable):
            kv_layout(model)
    assert before == (model.config._attn_implementation, [x.training for x in model.modules()])


def test_configs_inside_of_a_config():
    inside = SimpleNamespace(name="text")
    outside = SimpleNamespace(
        sub_configs={"text_config": None, "vision_config": None, "twin": None},
        text_config=inside,
        vision_config=None,
        twin=inside,
    )
    assert _configs(outside) == [outside, inside]


@pytest.mark.parametrize("name", ["falcon", "gemma3n_text", "gpt2", "mistral"])
def test_what_a_token_takes_is_seen_and_not_read(name):
    "Falcon shares one KV head and its config names four; upper layers of gemma3n keep none of their own."
    model = tiny(name)
    seen = sum(4 * h * (k + v) for h, k, v in kv_shapes(model))
    read = kv_bytes_per_token(model.config, torch.float32)
    assert (seen == read) == (name in ("gpt2", "mistral"))


# --- rows over blocks


@pytest.mark.parametrize("arch", MANY)
def test_any_chunks_and_any_blocks(arch):
    "Lengths from one token to far beyond a window of 8, tables out of order, a cache full of NaN."
    model, rng = tiny(arch, seed=1), random.Random(arch)
    prompts = [some_ids(rng, n) for n in (1, 30, 2, 17, 9)]
    caps, log = [10, 4, 16, 12, 12], []
    want = oracle(model, prompts, caps)
    assert [generated(model, p, n) for p, n in zip(prompts, caps)] == want
    shapes = kv_layout(model)
    for chunk, size in ((1, 16), (3, 1), (8, 4), (1000, 64)):
        cache = nan_cache(model, 200, size, shapes)
        assert generate_blocks(model, prompts, caps, chunk, size, cache=cache, log=log) == want
    assert sum(0 < step.batch.num_decode < len(step.batch) for step in log) > 10


@pytest.mark.parametrize("arch", (*TINY_ARCHS, "gemma2", "gpt_oss", "deepseek_v3", "gemma3n_text"))
def test_a_prefix_whose_blocks_all_rows_name(arch):
    "A window of 8 ends before its end, across it or behind it."
    model, rng = tiny(arch, seed=1), random.Random(3)
    shared = [3 + 11 * i % 250 for i in range(20)]
    prompts = [shared + some_ids(rng, n) for n in (3, 1, 14, 6)]
    want, shapes = oracle(model, prompts, 12), kv_layout(model)
    for size in (1, 4, 20):
        n, log = 20 // size, []
        tables = scatter([-(-(len(p) + 12) // size) for p in prompts])
        tables = [tables[0], *(tables[0][:n] + t[n:] for t in tables[1:])]
        cache = nan_cache(model, max(map(max, tables)) + 1, size, shapes)
        how = dict(size=size, tables=tables, cache=cache, shared=20, log=log)
        assert generate_blocks(model, prompts, 12, **how) == want
        assert any(len(g.rows) > 1 for s in log for g in s.groups)


def test_every_chunk_size_beside_a_window():
    model = tiny_model("mistral")
    prompts = [list(range(40, 71)), [7], [5, 9, 200, 31, 6, 8, 11, 12, 13]]
    want = oracle(model, prompts, 9)
    assert [generated(model, p, 9) for p in prompts] == want
    for chunk in range(1, 33):
        assert generate_blocks(model, prompts, 9, chunk, 4) == want


def test_blocks_before_a_window_are_not_read():
    model, reads = tiny_model("mistral"), []

    class Noted(KVCache):
        def read(self, layer, blocks):
            if not layer:
                reads.append((blocks[0], blocks[-1]))
            return super().read(layer, blocks)

    cache, prompt = Noted(kv_shapes(model), 8, 4), list(range(40, 71))
    for start in range(0, 31, 8):
        end = min(start + 8, 31)
        rows = [(prompt[start:end], start)]
        run_step(model, cache, pack_rows(rows, [list(range(-(-end // 4)))], 4))
    assert [first for first, _ in reads] == [0, 0, 2, 4]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 256])
def test_lengths_around_a_block(size):
    model = tiny_model("llama")
    prompts = [[(11 * i + n) % 250 + 5 for i in range(n)] for n in (63, 64, 65, 1, 127)]
    want, cache = oracle(model, prompts, 6), nan_cache(model, 360, size)
    assert generate_blocks(model, prompts, 6, size=size, cache=cache) == want
    if size == 64:  # one row, and a window larger than everything
        for one, w in zip(prompts, want):
            assert generate_blocks(model, [one], 6) == [w]
        wide = tiny_model("mistral", sliding_window=1000)
        assert generate_blocks(wide, prompts, 6, 50) == oracle(wide, prompts, 6)


@pytest.mark.parametrize("arch", (*TINY_ARCHS, "gemma2", "gpt_oss"))
def test_logits_of_no_position_and_of_all(arch):
    model = tiny(arch)
    backend, ids = TorchBackend(model, kv_layout(model)), [(11 * i + 9) % 250 + 5 for i in range(9)]
    rows, tables = [(ids[:5], 0), (ids, 0)], [[0], [1]]
    run = lambda at: backend.execute(backend.make_cache(2), pack_rows(rows, tables, 64, at))
    assert run([]).shape == (0, 259)
    with torch.inference_mode():
        close(run(range(14))[5:], model(torch.tensor([ids])).logits[0])


def test_tables_that_need_more_blocks_than_there_are():
    backend = TorchBackend(tiny_model("llama"), kv_shapes(tiny_model("llama")), block_size=16)
    with pytest.raises(MemoryError, match="block 2 of the KV cache, which has 2"):
        backend.execute(backend.make_cache(2), pack_rows([([5], 0)], [[2]], 16))


def test_a_cache_on_a_machine_without_addresses_takes_half_as_often_as_needed():
    class SmallMachine(KVCache):
        def _reserve(self, n):
            if n > 300:
                raise MemoryError
            return super()._reserve(n)

    assert SmallMachine([(1, 1, 1)], num_blocks=1000).num_blocks == 250
    assert reserve((0, 4), torch.float32, torch.device("cpu")).shape == (0, 4)


# --- groups of rows


def blocks_read(groups, paths):
    return sum(n + sum(len(paths[r]) - n for r in rows) for rows, n in groups)


def test_groups_read_no_more_than_each_row_alone():
    head, rng = [0, 1, 2, 3, 4, 5], random.Random(0)
    seven = [[*head, n] for n in range(10, 14)] + [[0, 1, 14, 15], [0, 1, 16], [17, 18]]
    groups = shared_prefixes(seven, [len(p) - 1 for p in seven])
    assert sorted(groups) == [([0, 1, 2, 3], 6), ([4, 5], 2), ([6], 0)]
    two = shared_prefixes([[1, 2, 3, 4], [1, 2, 3, 5]], [3, 3], unit=2)
    assert two == [([0, 1], 2)]  # two blocks at a time
    path = lambda: [rng.randrange(2) + 10 * i for i in range(rng.randint(1, 6))]
    forks = [list(range(n)) for n in range(1, 1500)]  # each goes on where the last ended
    twins = [[3, 4], [3, 4]]  # both are read up to their limit
    drawn = [[path() for _ in range(rng.randint(1, 7))] for _ in range(300)]
    for forest in (*drawn, [], [[3]], twins, forks):
        found = shared_prefixes(forest, [len(p) - 1 for p in forest])
        assert sorted(r for rows, _ in found for r in rows) == list(range(len(forest)))
        for rows, n in found:
            assert all(forest[r][:n] == forest[rows[0]][:n] and n < len(forest[r]) for r in rows)
        apart = [([r], 0) for r in range(len(forest))]
        assert blocks_read(found, forest) <= blocks_read(apart, forest)


def test_rows_in_neighbouring_blocks_are_read_where_they_are():
    "A gather copies all that it reads; long rows whose blocks are neighbours are read without one."
    model, made = tiny_model("llama", num_key_value_heads=4), []
    for tables in ([list(range(8 * i, 8 * i + 8)) for i in range(8)], scatter([8] * 8)):
        cache = KVCache(kv_shapes(model), 67, 64, model.dtype)
        for t in cache.keys + cache.values:
            t.zero_()
        where, batch = [t.data_ptr() for t in cache.keys], pack_rows([([7], 511)] * 8, tables, 64)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            run_step(model, cache, batch)
        assert where == [t.data_ptr() for t in cache.keys]
        made.append(sum(max(0, e.self_cpu_memory_usage) for e in found.key_averages()))
    assert made[0] < 0.2 * made[1]


# --- rows that see both ways


# --- runners


def check_pool_of(scheduler, plan):
    check_pool(scheduler.pool)


def step(scheduler, runner, send=lambda batch: batch, check=check_invariants):
    "One step of all requests in `scheduler`: greedy tokens, or an error for a row whose logits are NaN. The plan."
    plan = scheduler.schedule()
    check(scheduler, plan)
    logits = runner.execute(send(make_batch(plan, scheduler.block_size)))
    outs, end = [], 0
    for row in plan.rows:
        end += row.num_logits
        if not row.samples:
            outs.append(RowOutput())
        elif logits[end - 1].isnan().any():
            outs.append(RowOutput(error="its logits are NaN"))
        else:
            outs.append(RowOutput([int(logits[end - 1].argmax())], [None]))
    assert len(logits) == end
    scheduler.update(plan, outs)
    return plan


def run_all(scheduler, runner, requests, preempt_every=None, send=lambda batch: batch):
    "Run `requests` to their end: the tokens of each. Every so many steps the last one that runs may lose its slot."
    for r in requests:
        scheduler.add(r)
    for i in itertools.count(1):
        if not scheduler.has_unfinished:
            return [r.output_ids for r in requests]
        if preempt_every and i % preempt_every == 0 and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
        step(scheduler, runner, send)


def requests_for(prompts, caps):
    return [Request(str(i), list(p), n) for i, (p, n) in enumerate(zip(prompts, caps))]


def whole(seats, **kwargs):
    return PaddedScheduler(seats, 512, **kwargs)


def packed(model, layout=None, block_size=16, num_blocks=512):
    layout = layout or kv_layout(model)
    return PackedRunner(TorchBackend(model, layout, block_size=block_size), num_blocks)


def ways(model, layout, seats):
    "Schedulers with the runners that go with them, by name."
    return {
        "alone": (whole(seats, recompute=True), SoloRunner(model)),
        "padded, waves": (whole(seats, barrier=True), PaddedRunner(model)),
        "padded, prefix": (whole(seats, barrier=True), PaddedRunner(model, share=True)),
        "padded": (whole(seats), PaddedRunner(model)),
        "packed": (Scheduler(seats, 24, block_size=16), packed(model, layout)),
    }


def mixed(arch):
    "Six prompts, four of which begin alike, and how many tokens each is to say."
    rng = random.Random(arch)
    some = lambda n: some_ids(rng, n)
    start = some(18)
    prompts = [
        some(1),
        start + some(12),
        start + some(40),
        some(2),
        start + some(3),
        start + some(1),
    ]
    return prompts, [9, 3, 12, 16, 1, 6]


@pytest.mark.parametrize("arch", (*TINY_ARCHS, "gemma2", "gpt_bigcode"))
def test_all_runners_give_the_models_own_tokens(arch):
    model, (prompts, n_tokens) = tiny(arch, seed=1), mixed(arch)
    want, layout = oracle(model, prompts, n_tokens), kv_layout(model)
    assert [generated(model, p, n) for p, n in zip(prompts, n_tokens)] == want
    runs = {name: (*way, None) for name, way in ways(model, layout, 3).items()}
    runs["padded, preempted"] = whole(3), PaddedRunner(model), 3
    cold = Scheduler(3, 24, block_size=16, prefix_caching=False)
    runs["packed, preempted"] = cold, packed(model, layout), 3
    for name, (scheduler, runner, every) in runs.items():
        assert run_all(scheduler, runner, requests_for(prompts, n_tokens), every) == want, name
        again = scheduler.ledger.recomputed + runner.ledger.recomputed
        assert (again > 0) == (name == "alone" or bool(every)), name


SIZES = 1, 2, 4, 16, 64, 128
EVERY_SIZE = [(arch, size) for arch in ("llama", "mistral", "gpt_oss") for size in SIZES]
OTHERS = [(arch, 4) for arch in TINY_ARCHS if arch not in ("llama", "mistral")]


@pytest.mark.parametrize("arch, size", [*EVERY_SIZE, *OTHERS])
def test_blocks_of_every_size_in_memory_full_of_nan(arch, size):
    "Ample memory and short, scattered tables, arrivals at any step, each prompt twice; what is executed is a pickled copy."
    model, (prompts, n_tokens), rng = tiny_model(arch, seed=1), mixed(arch), random.Random(size)
    layout, want, copies = kv_layout(model), oracle(model, prompts, n_tokens), []

    def send(batch):
        copies.extend(batch.copies)
        return pickle.loads(pickle.dumps(batch))

    for limit in (None, 256):
        scheduler = Scheduler(4, 24, max_kv_tokens=limit, block_size=size)
        runner = packed(model, layout, size, max(80, 1024 // size))
        runner.cache = nan_cache(model, runner.num_blocks, size, layout)
        if limit is None:  # blocks that stay held scatter the tables
            for i in rng.sample([scheduler.pool.take() for _ in range(40)], 20):
                scheduler.pool.release([i])
        for _ in range(2):
            todo = requests = requests_for(prompts, n_tokens)
            while todo or scheduler.has_unfinished:
                if todo and (rng.random() < 0.4 or not scheduler.has_unfinished):
                    scheduler.add(todo[0])
                    todo = todo[1:]
                step(scheduler, runner, send, check_invariants if limit else check_pool_of)
            assert [r.output_ids for r in requests] == want
        check_pool(scheduler.pool)
        assert scheduler.pool.num_held == (0 if limit else 20) and scheduler.ledger.reused
    assert copies or size <= 2


def test_what_newcomers_share_is_reused():
    model, head = tiny_model("llama"), list(range(100, 140))
    ends, found = [head + [9], head + [8, 7, 6], head + list(range(30, 42))], []
    for share in (False, True):
        runner = PaddedRunner(model, share=share)
        logits = runner.execute(pack_rows([(p, 0) for p in ends], [[]] * 3, 0))
        assert logits.argmax(-1).tolist() == [o[0] for o in oracle(model, ends, 1)]
        found.append((runner.ledger.reused, -runner.ledger.useful))
    assert found == [(0, 0), (64, 64)]


def test_what_a_runner_can_not_do_is_refused():
    model = tiny_model("llama")
    one, every = pack_rows([([5, 6], 0)], [[0]], 4), (SoloRunner, PaddedRunner, packed)
    for make in every:
        with pytest.raises(BatchError, match="adapter 2"):
            make(model).execute(replace(one, adapters=[2]))
    with pytest.raises(BatchError, match="adapter 3, and SoloRunner has none"):
        check_batch(replace(one, adapters=[3]), "SoloRunner")
    with pytest.raises(BatchError, match="both ways do not run with SoloRunner"):
        SoloRunner(model).execute(replace(one, causal=False))
    for batch, words in (
        (pack_rows([(range(4), 0)], [[]], 0, []), "chunked=False"),
        (pack_rows([(range(6), 4)], [[]], 0), "with 6 of its 10 tokens"),
        (pack_rows([([5, 6], 0)], [[]], 0, [0, 1]), "prompt_logprobs"),
        (replace(one, hidden=True), "gives logits, not hidden states"),
    ):
        with pytest.raises(BatchError, match=words):
            PaddedRunner(model).execute(batch)


def planted(token):
    "A tiny model whose embedding of `token` is NaN."
    model = tiny_model("llama")
    model.get_input_embeddings().weight[token] = float("nan")
    return model


def test_a_request_whose_logits_are_nan_fails_alone():
    sick, poison, rng = planted(77), [77, 30, 31, 32, 33, 34], random.Random(6)
    healthy = [[rng.randrange(100, 259) for _ in range(n)] for n in (1, 30, 3, 2, 12, 4, 1, 5, 2)]
    want = oracle(sick, healthy, 10)
    assert not any(77 in o for o in want)
    for name, (scheduler, runner) in ways(sick, kv_layout(tiny_model("llama")), 3).items():
        requests = requests_for(healthy, [10] * 9)
        for at in (0, 2, 5, 8):
            requests.insert(at, Request(f"bad {at}", [5] * at + poison, 10))
        run_all(scheduler, runner, requests)
        assert [r.output_ids for r in requests if not r.error] == want, name
        failed = [r.request_id for r in requests if r.error]
        assert failed == ["bad 0", "bad 2", "bad 5", "bad 8"], name


def test_blocks_of_a_request_that_failed_are_not_found():
    sick, well, prompt = planted(77), tiny_model("llama"), list(range(60, 80))
    layout = kv_layout(well)
    scheduler, runner = Scheduler(2, 64, block_size=4), packed(sick, layout, 4)
    first, second = Request("first", prompt, 4), Request("second", prompt + [5], 4)
    run_all(scheduler, runner, [first])
    sick.get_input_embeddings().weight[77] = well.get_input_embeddings().weight[77]
    assert run_all(scheduler, runner, [second]) == oracle(well, [prompt + [5]], 4)
    ends = first.finish_reason, second.finish_reason, second.num_cached_tokens
    assert ends == ("error", "length", 0)


def test_a_model_in_training_is_left_as_it_was_found():
    lent, prompts = tiny_model("gpt2"), [[7], [5, 9, 200, 31], list(range(40, 61))]
    want = oracle(lent, prompts, 8)
    lent.train()  # it has dropout
    lent.transformer.h[0].eval()  # and a part that is set apart

    def state():
        weights = [float(p.sum()) for p in lent.parameters()]
        return [x.training for x in lent.modules()], lent.config._attn_implementation, weights

    before = state()
    torch.manual_seed(0)
    assert oracle(lent, prompts[2:], 8) != want[2:]  # dropout at work
    for scheduler, runner in ways(lent, kv_layout(lent), 2).values():
        for r in (requests := requests_for(prompts, [8] * 3)):
            scheduler.add(r)
        while scheduler.has_unfinished:
            step(scheduler, runner)
            assert state() == before
        assert [r.output_ids for r in requests] == want
        with pytest.raises(IndexError):  # a token that is not in the vocabulary
            run_all(scheduler, runner, [Request("bad", [10_000], 3)])
        assert state() == before


@pytest.mark.parametrize("name", ["alone", "padded, waves", "padded, prefix", "padded", "packed"])
def test_edges_of_runners(name):
    model, prompts = tiny_model("gpt2"), [[7], [5, 9, 200, 31], list(range(40, 61))]
    layout, limit, counts = kv_layout(model), max_model_len(model), []
    way = lambda seats: ways(model, layout, seats)[name]

    def send(batch):
        counts.append(batch.num_tokens)
        return batch

    assert run_all(*way(1), requests_for(prompts[1:2], [1]), send=send) == oracle(
        model, prompts[1:2], 1
    )
    assert counts == [4]
    two = prompts[:2] * 2
    assert run_all(*way(4), requests_for(two, [1] * 4)) == oracle(model, two, 1)
    nine, ends = prompts * 3, [2] + [6] * 8  # one that ended stays among eight that go on
    assert run_all(*way(9), requests_for(nine, ends)) == oracle(model, nine, ends)
    assert run_all(*way(1), requests_for(prompts, [6, 3, 8])) == oracle(model, prompts, [6, 3, 8])
    counts.clear()
    budget = [list(range(3, 27))]  # exactly the budget
    assert run_all(*way(2), requests_for(budget, [2]), send=send) == oracle(model, budget, 2)
    assert counts[0] == 24
    full, counts = [[9] * (limit - 2), [7], [5, 9]], [2, 12, 12]  # to the last position
    assert run_all(*way(3), requests_for(full, counts)) == oracle(model, full, counts)
