"Keys and values in bytes: the kernels against torch that rounds alike, the same bits in any company, errors, plans and the store."

import copy, functools, random

import pytest, torch

from batchlab import LLM, SamplingParams
from batchlab.api.unloaded import UnloadedLLM
from batchlab.core.attention import TorchBackend
from batchlab.core.batch import pack_rows
from batchlab.errors import ParamError, UnsupportedModelError
from batchlab.fast.kernels import (
    AttentionWorklist,
    Int8Cache,
    TiledCache,
    attend_rows,
    layout,
    open_backend,
    prefix_groups,
    quantize_rows,
)
from batchlab.fast.native import DTYPES
from batchlab.fast.trial import BackendOptions, kv_layout
from batchlab.jobs.runner import model_digest
from batchlab.llm.store import facts_of_backend
from batchlab.models import tiny_model
from helpers import greedy, ids
from test_encoders import encoder

EVERY = torch.arange(20 * 64)
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ASKED = (None, None, None), (70, None, None), (None, 2.0, torch.ones(6))
SHAPES = (6, 2, 64, 64), (6, 3, 16, 32), (6, 1, 80, 48), (6, 6, 256, 256)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(seed=0):
    "Rows in decode and in prefill, two of them with a prefix in common."
    rows, rng = [(0, 1), (127, 1), (128, 1), (191, 1), (0, 3), (130, 66)], random.Random(seed)
    blocks = iter(rng.sample(range(20), 20))
    tables = [[next(blocks) for _ in range(-(-(start + n) // 64))] for start, n in rows]
    tables[2][:2] = tables[1]
    return pack_rows([([5] * n, start) for start, n in rows], tables, 64)


def attended(kernels, cache, batch, q, *asks):
    heads = q.shape[1] // cache.shapes[0][0]
    work = AttentionWorklist(batch, prefix_groups(batch, 64), 64, heads, cache.shapes[0][0])
    z = layout(cache, 0, q, q.shape[2] ** -0.5, *asks)
    return kernels.attend(z, q, cache.keys[0], cache.values[0], work)


def caches(kernels, shape, k, v, dtype, at=EVERY):
    "The same in bytes, as the kernels write it, and in numbers of `dtype`, as torch reads those."
    cache, q = Int8Cache([shape], 20, 64, dtype), torch.empty(1, shape[0], shape[1], dtype=dtype)
    for t in cache.keys + cache.values:
        t.fill_(-1)  # scales that are NaN
    kernels.write(layout(cache, 0, q, 1.0), k, v, cache.keys[0], cache.values[0], at)
    plain = TiledCache([shape], 20, 64, dtype)
    plain.write(0, *cache.read(0, range(20)), EVERY)
    return cache, plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, dim, value_dim", SHAPES)
def test_attention_over_bytes_is_attention_over_what_they_stand_for(
    kernels, dtype, heads, kv_heads, dim, value_dim
):
    "To the bit; and what is written are the bytes that torch writes."
    batch = rows_of()
    k = drawn(len(EVERY), kv_heads, dim, dtype=dtype, seed=1)
    v = drawn(len(EVERY), kv_heads, value_dim, dtype=dtype, seed=2) * 3
    k[5], k[6] = 0, k[6] * 1e-30
    cache, plain = caches(kernels, (kv_heads, dim, value_dim), k, v, dtype)
    copied = Int8Cache(cache.shapes, 20, 64, dtype)
    copied.write(0, k, v, EVERY)
    assert torch.equal(cache.keys[0], copied.keys[0])
    assert torch.equal(cache.values[0], copied.values[0])
    for x, got in zip((k, v), cache.read(0, range(20))):
        off = (got.float() - x.float()).abs()
        assert (off <= x.float().abs().amax(-1, keepdim=True) / 127).all()
    q = drawn(batch.num_tokens, heads, dim, dtype=dtype)
    for asks in ASKED:
        got = attended(kernels, cache, batch, q, *asks)
        assert torch.equal(got, attended(kernels, plain, batch, q, *asks))
        want = attend_rows(cache, 0, batch, q, dim**-0.5, *asks)
        assert (got.float() - want).abs().max() < NEAR[dtype] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_over_bytes_has_the_same_bits_alone_and_in_chunks(kernels, dtype):
    batch, k = rows_of(), drawn(len(EVERY), 3, 64, dtype=dtype, seed=1)
    cache, _ = caches(kernels, (3, 64, 64), k, drawn(*k.shape, dtype=dtype, seed=2), dtype)
    q = drawn(batch.num_tokens, 6, 64, dtype=dtype)
    for asks in ASKED:
        together = attended(kernels, cache, batch, q, *asks)
        for i, n in enumerate(batch.lengths):
            for a, m in [(0, n)] + [(j, min(7, n - j)) for j in range(0, n, 7)]:
                one = pack_rows([([5] * m, batch.starts[i] + a)], [batch.block_table[i]], 64)
                at = slice(batch.cu_seqlens[i] + a, batch.cu_seqlens[i] + a + m)
                assert torch.equal(attended(kernels, cache, one, q[at], *asks), together[at])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(kernels, dtype, bad):
    k = drawn(len(EVERY), 2, 16, dtype=dtype)
    k[70, 1, 3] = bad
    cache, _ = caches(kernels, (2, 16, 16), k, k, dtype)
    for x in cache.read(0, range(20)):
        assert x[70, 1].isnan().all() and x.isfinite().sum() == x.numel() - 16
    assert quantize_rows(k)[1].isnan().sum() == 1


# --- in an LLM


def prompts_of(seed=0):
    rng = random.Random(seed)
    tokens = lambda n: [rng.randrange(3, 250) for _ in range(n)]
    head = tokens(130)
    return [head + tokens(n) for n in (1, 9, 40)] + [tokens(n) for n in (1, 3, 70, 129)]


PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


def told(outs):
    "The tokens of `outs`, and the log probabilities of all that was likely, to the bit."
    found = [o.outputs[0] for o in outs]
    return [
        (o.token_ids, [sorted((i, l.logprob) for i, l in d.items()) for d in o.logprobs])
        for o in found
    ]


@functools.cache
def alone(arch, dtype):
    "A model, and what each of the prompts gives by itself, computed whole."
    model = tiny_model(arch, seed=4, max_position_embeddings=1024).to(dtype)
    llm = LLM(model, kv_dtype="int8", max_num_seqs=1, enable_prefix_caching=False)
    return model, [told(llm.generate([p], PARAMS, use_tqdm=False))[0] for p in prompts_of()]


def asked(llm, preempt=False):
    "What `llm` gives for all prompts together; with `preempt`, rows lose all they have now and then."
    if not preempt:
        return told(llm.generate(prompts_of(), PARAMS, use_tqdm=False))
    ends, steps = {}, 0
    for p in prompts_of():
        llm.add_request(p, PARAMS, lambda e: e.finished and ends.update({e.request_id: e.output}))
    while llm.has_unfinished:
        llm.step()
        steps += 1
        scheduler = llm.engines["packed"].scheduler
        if steps % 5 == 0 and steps < 40 and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
    assert llm.stats().preemptions > 3
    return told([ends[i] for i in sorted(ends, key=int)])


COMPANY = dict(
    together={},
    chunked=dict(max_num_seqs=3, max_num_batched_tokens=17),
    uncached=dict(enable_prefix_caching=False, max_num_batched_tokens=50, max_num_seqs=7),
)
RUN = [("llama", torch.float32), ("llama", torch.bfloat16), ("mistral", torch.float32)]
RUN += [("gpt_oss", torch.float32), ("gemma2", torch.float32)]


@pytest.mark.parametrize("arch, dtype", RUN)
def test_a_request_has_the_same_bits_in_any_company(kernels, arch, dtype, tmp_path):
    "Alone, together, in chunks, with prefixes found and not, preempted, and from a store."
    model, want = alone(arch, dtype)
    for name, how in COMPANY.items():
        llm = LLM(model, kv_dtype="int8", **how)
        assert llm.backend.kv_dtype == "int8" and asked(llm) == want, name
        assert asked(llm) == want, f"{name}, again"
    assert (
        asked(LLM(model, kv_dtype="int8", max_num_batched_tokens=33, max_num_seqs=4), True) == want
    )
    for again in (False, True):
        llm = LLM(model, kv_dtype="int8", prefix_store=tmp_path, max_num_batched_tokens=70)
        llm.engines.store.costs.worth = lambda: True  # a tiny model is computed at once
        assert asked(llm) == want
        assert (llm.stats().loaded_blocks > 0) == again
        llm.close()


def test_blocks_come_back_from_a_store_of_bytes_and_from_no_other(tmp_path):
    model, want = alone("llama", torch.float32)
    found = []
    for how in (dict(kv_dtype="int8"), dict(kv_dtype="int8"), {}, {}):
        with LLM(model, prefix_store=tmp_path, **how) as llm:
            llm.engines.store.costs.worth = lambda: True
            got = asked(llm)
            found.append(llm.stats().loaded_blocks)
        assert (got == want) == ("kv_dtype" in how)
    assert found[0] == found[2] == 0 < found[1] and found[3]
    facts = [facts_of_backend(LLM(model, kv_dtype=x).backend, None) for x in (None, "int8")]
    assert facts[0] != facts[1]


def test_tokens_are_those_of_torch_that_rounds_alike(kernels):
    "Packed steps in plain torch over the same cache: on random weights ties can turn, seldom."

    class Plain(TorchBackend):
        def make_cache(self, num_blocks):
            cache = Int8Cache(self.shapes, num_blocks, self.block_size, self.model.dtype)
            for t in cache.keys + cache.values:
                t.zero_()
            return cache

    model = tiny_model("llama", seed=4, max_position_embeddings=1024)
    llm = LLM(model, kv_dtype="int8")
    got = ids(llm.generate(prompts_of(), greedy(12), use_tqdm=False))
    plain = LLM(model, max_num_seqs=4, kv_cache_bytes=2**19)
    backend = Plain(model, plain.shapes, block_size=64)
    plain.engines.backend = backend
    plain.engines.configure()
    want = ids(plain.generate(prompts_of(), greedy(12), use_tqdm=False))
    assert isinstance(plain.engines["packed"].runner.cache, Int8Cache)
    assert sum(a == b for a, b in zip(got, want)) >= len(want) - 1


def test_the_kernels_under_a_models_own_code_keep_bytes_too(kernels):
    model = tiny_model("llama", seed=4)
    backend = open_backend(model, kv_layout(model), BackendOptions())
    backend.kv_dtype = "int8"
    cache = backend.make_cache(8)
    assert isinstance(cache, Int8Cache)
    p = prompts_of()[2][:100]
    whole = backend.execute(cache, pack_rows([(p, 0)], [[3, 1]], 64))
    other = backend.make_cache(8)
    backend.execute(other, pack_rows([(p[:37], 0)], [[5]], 64))
    assert torch.equal(backend.execute(other, pack_rows([(p[37:], 37)], [[5, 2]], 64)), whole)
    for a, b in zip(cache.read(0, [3, 1]), other.read(0, [5, 2])):
        assert torch.equal(a[:100], b[:100])


def test_what_can_not_be_kept_in_bytes_is_said():
    model = tiny_model("llama")
    with pytest.raises(ParamError, match="kv_dtype must be None or 'int8', got 'fp8'"):
        LLM(model, kv_dtype="fp8")
    with pytest.raises(ParamError, match="kv_dtype='int8' needs strategy='continuous'"):
        LLM(model, kv_dtype="int8", strategy="static")
    with pytest.raises(UnsupportedModelError, match="runs on torch .compile=False.: leave it out"):
        LLM(model, kv_dtype="int8", compile=False)
    for arch in ("phimoe", "bloom"):  # not fused; not packed
        with pytest.raises(UnsupportedModelError, match="kv_dtype='int8' is for models that give"):
            LLM(tiny_model(arch), kv_dtype="int8")
    with pytest.raises(UnsupportedModelError, match="reads texts both ways: leave it out"):
        LLM(encoder("bert"), kv_dtype="int8")
    longrope = dict(rope_type="longrope", rope_theta=1e4, factor=4.0)
    longrope |= dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    more = dict(original_max_position_embeddings=64, rope_parameters=longrope)
    with pytest.raises(UnsupportedModelError, match="in another way from 6[0-9] tokens on"):
        LLM(tiny_model("phi3", **more), kv_dtype="int8")


def test_a_plan_without_weights_refuses_the_same(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    for more, words in (
        (dict(dtype="fp16"), "is in float16"),
        (dict(compile=False), "runs on torch"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            UnloadedLLM(str(tmp_path), **dict(device="cpu", dtype="fp32") | more, kv_dtype="int8")


def test_more_tokens_in_the_same_memory(kernels, tmp_path):
    model = tiny_model("llama").bfloat16()  # 2 layers of 2 KV heads of 16 numbers
    how = dict(kv_cache_bytes=2**18, max_num_seqs=64, enable_prefix_caching=False)
    plain, small = LLM(model, **how), LLM(model, kv_dtype="int8", **how)
    each = [llm.limits.kv_bytes_per_token for llm in (plain, small)]
    assert each == [2 * 2 * 2 * 16 * 2, 2 * 2 * 2 * (16 + 4)]
    many = [[5] * 100] * 64
    assert [llm.plan(many, greedy(20)).slots for llm in (plain, small)] == [8, 12]
    small.generate(many[:3], greedy(20), use_tqdm=False)
    cache = small.engines["packed"].runner.cache
    held = sum(t[0].numel() * t.itemsize for t in cache.keys + cache.values)
    assert cache.block_bytes == held == 64 * each[1]
    model.save_pretrained(tmp_path)
    guess = UnloadedLLM(str(tmp_path), device="cpu", dtype="bf16", kv_dtype="int8", **how)
    assert guess.limits == small.limits
    assert model_digest(plain) != model_digest(small)
    assert model_digest(plain) == model_digest(LLM(copy.deepcopy(model)))


def test_verify_says_that_transformers_has_no_such_cache():
    model, _ = alone("llama", torch.float32)
    llm = LLM(model, kv_dtype="int8")
    report = llm.verify(llm.generate(prompts_of()[:2], greedy(4), use_tqdm=False))
    assert report.requests == 0 and {why[:27] for _, why in report.skipped} == {
        "keys and values are in int8"
    }
