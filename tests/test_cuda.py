"Decode on a GPU, in full where there is one: tokens against the oracle, replays against Python, the engine on top."

import copy, functools, gc, inspect, random

import pytest, torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from batchlab.fast import cuda
from batchlab.core.attention import TorchBackend, _additive, attend_plain
from batchlab.fast.trial import BackendOptions, kv_layout
from batchlab.errors import Unavailable
from batchlab.fast.backends import REGISTRY, select_backend
from batchlab.core.batch import pack_rows
from batchlab.fast.cuda import (
    CudaBackend,
    CudaGraphs,
    StaticStep,
    attend_paged,
    bucket,
    cuda_backend,
    find_varlen,
)
from batchlab.models import TINY_ARCHS, tiny_model
from helpers import generated, greedy, ids, oracle

GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch.cuda.is_available() is false: there is no GPU here"
)
ARCHS = {
    **{a: {} for a in TINY_ARCHS},
    "gemma2": dict(attn_implementation="eager"),
    "gpt_oss": {},
    "qwen3_moe": {},
}


def gpu(test):
    return pytest.mark.cuda(GPU(test))


@pytest.fixture(autouse=True)
def exact():
    before = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_num_threads(),
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
    torch.set_num_threads(before[2])


def varlen(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    "torch's `varlen_attn` over blocks as its documentation has it: nothing but a row's own columns is multiplied."
    assert {t.dtype for t in (cu_seq_q, seqused_k, block_table)} == {torch.int32} and window_size[
        1
    ] == 0
    at = torch.arange(len(query))
    row = torch.searchsorted(cu_seq_q[1:].long(), at, right=True)
    last = (seqused_k - cu_seq_q[1:]).index_select(0, row) + at
    col = torch.arange(block_table.shape[1] * key.shape[1])
    seen = (col <= last[:, None]) & (
        col >= last[:, None] - window_size[0] if window_size[0] >= 0 else col >= 0
    )
    k, v = (
        t.index_select(0, block_table.flatten())
        .view(len(block_table), -1, *t.shape[2:])
        .index_select(0, row)
        for t in (key, value)
    )
    k, v = (torch.where(seen[:, :, None, None], t, 0).transpose(1, 2) for t in (k, v))
    return attend_plain(
        query[:, :, None], k, v, _additive(seen, torch.float32)[:, None, None], scale
    )[:, :, 0]


def record_tape(run):
    "What stands in for a CUDA graph: does again what `run()` does now, on the same memory."
    ops = []

    class Tape(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            ops.append((func, args, kwargs or {}, out))
            return out

    with Tape():
        out = run()

    @torch.inference_mode()
    def replay():
        now = {}

        def renew(x):
            return now.get(id(x), x) if isinstance(x, torch.Tensor) else x

        for func, args, kwargs, made in ops:
            new = func(*tree_map(renew, args), **tree_map(renew, kwargs))
            now.update((id(a), b) for a, b in zip(tree_leaves(made), tree_leaves(new)))
        return out.copy_(renew(out))

    return replay


PAGED = functools.partial(attend_paged, varlen)
SETTINGS = dict(
    python={},
    tape=dict(record=record_tape, after=1),
    few=dict(record=record_tape, max_graphs=2),
    paged=dict(paged=PAGED),
    paged_tape=dict(record=record_tape, paged=PAGED),
)


def backend_of(model, how):
    "The `CudaBackend` of those `SETTINGS`, all with blocks of 64, which the stand-in takes too."
    backend = CudaBackend(model, kv_layout(model), **SETTINGS[how])
    backend.block_size = 64
    return backend


def drawn(seed, n=6):
    "Prompts of different lengths, and how many tokens each gets."
    rng = random.Random(seed)
    lengths = [1, 63, *(rng.randint(2, 70) for _ in range(n - 2))]
    prompts = [[rng.randrange(3, 259) for _ in range(k)] for k in lengths]
    return prompts, [rng.randint(4, 20) for _ in lengths]


def nan_cache(backend, num_blocks):
    cache = backend.make_cache(num_blocks)
    for t in cache.keys + cache.values:
        t[:num_blocks] = torch.nan
    return cache


def serve(backend, prompts, caps, chunk=1000, renew=None, seed=0):
    "Greedy tokens: requests enter at drawn steps, in drawn blocks, over a cache of NaN; `renew`: at that step the cache goes."
    rng, t, size = random.Random(seed), 0, backend.block_size
    each = [-(-(len(p) + n) // size) for p, n in zip(prompts, caps)]
    blocks = rng.sample(range(sum(each) + 5), sum(each))
    tables = [[blocks.pop() for _ in range(n)] for n in each]
    cache = nan_cache(backend, sum(each) + 5)
    enters, tokens = [rng.randrange(8) for _ in prompts], [list(p) for p in prompts]
    done = [0] * len(prompts)
    while live := [i for i, p in enumerate(prompts) if len(tokens[i]) < len(p) + caps[i]]:
        if t == renew:
            cache, done = nan_cache(backend, cache.num_blocks), [0] * len(prompts)
        rows = [(i, min(chunk, len(tokens[i]) - done[i])) for i in live if enters[i] <= t]
        rows.sort(key=lambda r: r[1] > 1)
        t += 1
        if not rows:
            continue
        parts = [(tokens[i][done[i] : done[i] + n], done[i]) for i, n in rows]
        held = [tables[i][: -(-(done[i] + n) // size)] for i, n in rows]
        batch = pack_rows(parts, held, size)
        for (i, n), token in zip(rows, backend.execute(cache, batch).argmax(-1).tolist()):
            done[i] += n
            if done[i] == len(tokens[i]):
                tokens[i].append(token)
    return [x[len(p) :] for x, p in zip(tokens, prompts)]


# --- without a GPU: what the notebook has not


@pytest.mark.parametrize("seed", range(4))
def test_drawn_mixes_on_a_tape(seed):
    model = tiny_model(("llama", "mistral")[seed % 2], seed=seed)  # mistral has a window
    prompts, caps = drawn(seed)
    want, shapes = oracle(model, prompts, caps), kv_layout(model)
    assert serve(TorchBackend(model, shapes), prompts, caps, 7, renew=9, seed=seed) == want
    for how in SETTINGS:
        for chunk in (7, 1000):
            backend = backend_of(model, how)
            assert serve(backend, prompts, caps, chunk, seed=seed, renew=9) == want
            assert not backend.why and bool(backend.num_recorded) == ("record" in SETTINGS[how])


def test_padding_never_meets_a_row():
    "Padding writes to the scratch block alone and reads it alone; rows read their own blocks alone; the scratch block is nobody's."
    rng, backend = random.Random(0), CudaBackend(tiny_model("llama"), [(1, 8, 8)])
    backend.block_size = 4
    cache = backend.make_cache(200)
    assert cache.num_blocks == 200 and len(cache.keys[0]) == 201
    with pytest.raises(MemoryError):
        cache.prepare(pack_rows([([5], 0)], [[200]], 4))
    for _ in range(300):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 20))]
        tables = [
            rng.sample(range(200), -(-n // 4) + rng.randrange(2)) for n in lengths
        ]  # maybe one more than needed
        batch = pack_rows([([rng.randrange(99)], n - 1) for n in lengths], tables, 4)
        num_rows, num_blocks = bucket(batch, 4, in_place=True)
        step = backend.steps.setdefault(
            (num_rows, num_blocks), StaticStep(cache, num_rows, num_blocks)
        )
        step.place(batch)
        ids, positions = step.packed.input_ids[0].tolist(), step.packed.position_ids[0].tolist()
        n, places, table = len(lengths), step.slot_mapping.tolist(), step.block_table.tolist()
        assert (ids[:n], positions[:n], places[:n], step.lengths[:n].tolist()) == (
            batch.ids,
            batch.positions,
            batch.slot_mapping,
            lengths,
        )
        for i in range(n):
            k = -(-lengths[i] // 4)
            assert table[i] == tables[i][:k] + tables[i][k - 1 : k] * (num_blocks - k)
        for i in range(n, num_rows):
            assert (places[i], set(table[i]), positions[i], int(step.lengths[i])) == (
                200 * 4,
                {200},
                0,
                1,
            ) and ids[i] in ids[:n]


def test_a_nan_stays_its_rows():
    "One request's keys are not numbers: nobody else's logits change by that."
    model = tiny_model("llama")
    for how in SETTINGS:
        backend = backend_of(model, how)
        cache, size = nan_cache(backend, 4), backend.block_size
        backend.execute(
            cache, pack_rows([([3, 4], 0), ([5, 6], 0), ([7, 8, 9], 0)], [[2], [0], [1]], size)
        )
        batch = pack_rows([([1], 2), ([2], 2), ([3], 3)], [[2], [0], [1]], size)
        want = [backend.execute(cache, batch) for _ in range(3)][-1]
        for t in cache.keys + cache.values:
            t[0] = torch.nan
        got = backend.execute(cache, batch)
        assert got[1].isnan().all() and torch.equal(got[[0, 2]], want[[0, 2]])


def test_what_varlen_lacks_is_found():
    model = tiny_model("llama")
    shapes, cpu = kv_layout(model), torch.device("cpu")

    def like(f):
        f.__signature__ = inspect.signature(varlen)
        return f

    @like
    def refuses_splits(*args, **kw):
        if kw.pop("num_splits", None):
            raise RuntimeError("num_splits requires FA3")
        return varlen(*args, **kw)

    @like
    def sees_too_much(*args, **kw):
        return varlen(*args, **kw | dict(seqused_k=kw["seqused_k"] + 1))

    find = lambda f, shapes=shapes: find_varlen(4, shapes, torch.float32, cpu, f)
    assert find(varlen)[0].keywords == dict(edges=True, num_splits=1)
    assert find(refuses_splits)[0].keywords == dict(edges=True)
    assert find(sees_too_much)[0] is None
    assert "head sizes" in find(varlen, [(2, 12, 12)])[1]
    backend = cuda_backend(model, shapes, record_tape, varlen)
    assert backend.paged is not None
    assert (backend.block_size, backend.why, backend.num_recorded) == (256, "", 0)
    model = tiny_model("gpt_oss")
    backend = cuda_backend(model, kv_layout(model), record_tape, varlen)
    assert backend.paged is None and backend.block_size == 64
    assert "soft caps nor sinks" in backend.why


def test_no_word_about_gpus_on_a_cpu():
    model = tiny_model("llama")
    with pytest.raises(Unavailable) as e:
        cuda.open_backend(model, kv_layout(model), BackendOptions())
    assert str(e.value) == ""
    backend = select_backend(model, kv_layout(model))
    assert "cuda" not in backend.name and "GPU" not in backend.why


@pytest.mark.parametrize("arch", ["llama", "mistral", "gpt_oss"])
def test_engine_on_a_tape(arch, monkeypatch):
    "The engine's plans: prefixes, shared and copied blocks, preemptions, steps of every kind."
    from batchlab.api import LLM

    class Hooked(CudaBackend):
        def static_step(self, cache, batch):
            made.append(super().static_step(cache, batch))
            return made[-1]

    monkeypatch.setattr(cuda, "CudaBackend", Hooked)
    make = lambda model, shapes, options: cuda_backend(model, shapes, record_tape, kernel)
    monkeypatch.setitem(REGISTRY, "cuda", make)
    model, made, rng = tiny_model(arch, seed=2), [], random.Random(arch)
    head = [rng.randrange(3, 259) for _ in range(40)]
    prompts = [
        head[: rng.randint(1, 40)] + [rng.randrange(3, 259)] * rng.randint(0, 9) for _ in range(14)
    ]
    caps = [rng.randint(1, 40) for _ in prompts]
    want = oracle(model, prompts, caps)
    for kernel in (None, varlen):
        for how in ({}, dict(max_num_seqs=3, max_num_batched_tokens=16)):
            llm = LLM(model, **how)
            for _ in range(2):
                assert ids(llm.generate(prompts, [*map(greedy, caps)])) == want
            assert llm.backend.name == "cuda graphs" and llm.backend.num_recorded, llm.backend.why
            assert bool(llm.backend.paged) == (kernel is not None and arch != "gpt_oss")
    assert {type(s) for s in made} == {StaticStep, type(None)}


def test_steps_keep_no_cache_alive():
    model = tiny_model("llama")
    backend = CudaBackend(model, kv_layout(model))
    cache = backend.make_cache(2)
    step = backend.static_step(cache, pack_rows([([5], 3)], [[0]], 64))
    del cache
    gc.collect()
    assert step.cache is None


# --- with a GPU


@gpu
@pytest.mark.parametrize("arch", ARCHS)
def test_tokens_in_fp32(arch):
    model, (prompts, caps) = tiny_model(arch, seed=1, **ARCHS[arch]).to("cuda"), drawn(arch)
    want = oracle(model, prompts, caps)
    assert [generated(model, p, n) for p, n in zip(prompts, caps)] == want
    for record in (CudaGraphs(model.device), None):
        backend = cuda_backend(model, kv_layout(model), record)
        for chunk in (7, 1000):
            assert serve(backend, prompts, caps, chunk) == want
        if record and arch not in ("gpt2", "mixtral", "gpt_oss", "qwen3_moe"):
            assert backend.num_recorded, backend.why


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_is_python_bit_for_bit(dtype):
    how = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    model = tiny_model("llama", **how).to("cuda", dtype)
    paged, _ = find_varlen(4, kv_layout(model), dtype, model.device)

    def outs(record, paged, n=6):
        backend = CudaBackend(model, kv_layout(model), record, paged)
        cache, gen = backend.make_cache(6), torch.Generator("cuda").manual_seed(0)
        for t in cache.keys + cache.values:
            t.copy_(torch.randn(t.shape, generator=gen, device="cuda"))
        rows = [((5 + t, 9 + t), (6, 40 + t), (7, 12 + t)) for t in range(n)]
        got = [
            backend.execute(
                cache, pack_rows([([i], s) for i, s in at], [[4], [0], [2]], backend.block_size)
            )
            for at in rows
        ]
        return torch.stack(got), backend

    for f in {paged, None}:
        eager, _ = outs(None, f)
        replayed, backend = outs(CudaGraphs(model.device), f)
        assert backend.num_recorded == 1 and torch.equal(eager, replayed), backend.why


@gpu
def test_a_new_cache_invalidates():
    "In place of a resize, which blocks do not have."
    model, (prompts, caps) = tiny_model("llama").to("cuda"), drawn(3)
    want = oracle(model, prompts, caps)
    backend = CudaBackend(model, kv_layout(model), CudaGraphs(model.device), after=1)
    for at in (3, 9, 12):
        assert serve(backend, prompts, caps, renew=at) == want
    cache = backend.make_cache(4)
    backend.execute(cache, pack_rows([([5], 0)], [[1]], backend.block_size))
    assert backend.num_recorded == 1
    backend.static_step(backend.make_cache(4), pack_rows([([5], 1)], [[1]], backend.block_size))
    assert backend.num_recorded == 0
    few = CudaBackend(model, kv_layout(model), CudaGraphs(model.device), after=1, max_graphs=1)
    assert serve(few, prompts, caps) == want and len(few.steps) == 1 and not few.why
    few.close()
    assert serve(few, prompts, caps) == want and not few.why


@gpu
def test_what_cannot_be_recorded_goes_on_without(caplog):
    model, (prompts, caps) = tiny_model("llama").to("cuda"), drawn(5)
    want, shapes = oracle(model, prompts, caps), kv_layout(model)
    model.model.norm.register_forward_pre_hook(
        lambda module, args: None if args[0].isnan().any().item() else None
    )
    backend = CudaBackend(model, shapes, CudaGraphs(model.device))
    assert serve(backend, prompts, caps) == want
    assert backend.why and backend.num_recorded == 0
    assert sum("without recordings" in r.message for r in caplog.records) == 1
    assert (
        serve(
            CudaBackend(tiny_model("llama").to("cuda"), shapes, CudaGraphs(model.device)),
            prompts,
            caps,
        )
        == want
    )  # the device is none the worse


@gpu
@pytest.mark.parametrize("heads,kv", [(4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_is_found_or_says_why(heads, kv, dim, dtype):
    paged, why = find_varlen(heads, [(kv, dim, dim)], dtype, torch.device("cuda"))
    assert (paged is None) == bool(why)
    if torch.cuda.get_device_capability() >= (8, 0):
        assert paged, why


@gpu
def test_flash_logits_in_bf16():
    """Teacher-forced: flash attention, recorded, against packed steps in fp32, over blocks in any order and lengths across buckets:
    off by no more than 1.5 times what packed steps in bf16 are off, in the mean of all logits."""
    how = dict(
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    for arch in ("llama", "mistral"):
        model = tiny_model(arch, **how).to("cuda", torch.bfloat16)
        shapes = kv_layout(model)
        paged, why = find_varlen(8, shapes, model.dtype, model.device)
        assert paged, why
        backend, (prompts, _) = (
            CudaBackend(model, shapes, CudaGraphs(model.device), paged, after=1),
            drawn(7),
        )
        prompts[1] = prompts[1] * 3  # 189, and past a block of 256
        plain, judge = (
            TorchBackend(m, shapes, block_size=backend.block_size)
            for m in (model, copy.deepcopy(model).float())
        )
        runs, tables = (
            [(x, nan_cache(x, 12)) for x in (backend, plain, judge)],
            [[2 * i + 1, 2 * i] for i in range(len(prompts))],
        )
        off = torch.zeros(2)
        for t in range(81):
            rows = (
                [(p, 0) for p in prompts]
                if not t
                else [([(7 * t + i) % 250], len(p) + t - 1) for i, p in enumerate(prompts)]
            )
            blocks = [
                table[: -(-(s + len(ids)) // backend.block_size)]
                for table, (ids, s) in zip(tables, rows)
            ]
            got, packed, want = (
                x.execute(cache, pack_rows(rows, blocks, backend.block_size)).float().cpu()
                for x, cache in runs
            )
            off += torch.stack([(got - want).abs().mean(), (packed - want).abs().mean()])
        assert off[0] <= 1.5 * off[1], off
        assert backend.num_recorded >= 2 and not backend.why


@gpu
def test_nothing_waits_but_the_tokens():
    "A decode step that is replayed, and begins no block, does nothing that synchronises, up to its logits."
    model = tiny_model("llama").to("cuda")
    backend = CudaBackend(model, kv_layout(model), CudaGraphs(model.device), after=1)
    cache = backend.make_cache(4)
    step = lambda t: pack_rows([([5], t)] * 3, [[0], [1], [2]], backend.block_size)
    for t in range(3):
        backend.execute(cache, step(t))
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = backend.execute(cache, step(3))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(set(logits.argmax(-1).tolist())) == 1 and logits.isfinite().all()


@gpu
def test_backend_of_the_engine():
    from batchlab.api import LLM

    model, (prompts, caps) = tiny_model("llama").to("cuda"), drawn(11)
    want, llm = oracle(model, prompts, caps), LLM(model)
    assert ids(llm.generate(prompts, [*map(greedy, caps)])) == want
    assert llm.backend.name == "cuda graphs", llm.backend.why


@gpu
def test_measures():
    from batchlab.bench.profiling import bandwidth
    from batchlab.api import LLM

    model = tiny_model(
        "llama",
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
    ).to("cuda", torch.bfloat16)
    got = bandwidth(LLM(model), slots=(1, 5), context=20, steps=8, vocab=(3, 259))
    for rate, share in got.values():
        assert rate > 0 and share > 0, got
