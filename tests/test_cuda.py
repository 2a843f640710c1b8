"Decode on a GPU, in full where there is one: tokens against the oracle, replays against Python, the engine on top."
import gc, random

import pytest, torch

from batchlab import cuda
from batchlab.attention import PackedStep, kv_layout, packed_forward
from batchlab.cuda import (GraphedDecode, Greedy, StaticStep, cuda_backend, find_flash, graphed, has_room, padded_rows,
                           record_tape, round_rows)
from batchlab.models import TINY_ARCHS, tiny_model
from batchlab.prefill import generate_naive
from batchlab.ragged import pack
from batchlab.slots import SlotCache

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason='torch.cuda.is_available() is false: there is no GPU here')
ARCHS = {**{a: {} for a in TINY_ARCHS}, 'gemma2': dict(attn_implementation='eager'), 'gpt_oss': {}, 'qwen3_moe': {}}


def gpu(test): return pytest.mark.cuda(GPU(test))


@pytest.fixture(autouse=True)
def exact():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.get_num_threads()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
    torch.set_num_threads(before[2])


def hf_generate(model, prompt, n):
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False,
                         eos_token_id=model.config.get_text_config().vocab_size, pad_token_id=0)
    return out[0, ids.shape[1]:].tolist()


def drawn(seed, n=6):
    "Prompts of different lengths, and how many tokens each gets."
    rng = random.Random(seed)
    lengths = [1, 63, *(rng.randint(2, 70) for _ in range(n - 2))]
    return [[rng.randrange(3, 259) for _ in range(k)] for k in lengths], [rng.randint(4, 20) for _ in lengths]


def serve(decode, prompts, caps, chunk=1000, slots=None, capacity=128, resize=None, seed=0):
    "Greedy tokens: requests enter at drawn steps, in drawn slots, over a cache of NaN; `resize`: at a step, to a shape."
    rng, model, t = random.Random(seed), decode.model, 0
    slots = slots or rng.sample(range(len(prompts) + 3), len(prompts))
    cache = SlotCache(kv_layout(model), max(slots) + 1, capacity, model.dtype, model.device)
    for x in cache.keys + cache.values: x.fill_(torch.nan)
    for s in slots: cache.begin(s, 0)
    enters, tokens, done = [rng.randrange(8) for _ in prompts], [list(p) for p in prompts], [0] * len(prompts)
    while live := [i for i, p in enumerate(prompts) if len(tokens[i]) < len(p) + caps[i]]:
        if resize and t == resize[0]: cache.resize(max(slots) + 2, resize[1])
        live, t = [i for i in live if enters[i] <= t], t + 1
        rows = sorted(((slots[i], done[i], min(chunk, len(tokens[i]) - done[i]), i) for i in live),
                      key=lambda r: (r[2] > 1, r[0]))
        if not rows: continue
        packed = pack([tokens[i][a:a + n] for _, a, n, i in rows], [r[1] for r in rows])
        logits = decode(decode.make_step(cache, [r[:3] for r in rows]), packed, packed.last)
        for (_, _, n, i), token in zip(rows, Greedy(logits).wait()[0]):
            done[i] += n
            if done[i] == len(tokens[i]): tokens[i].append(token)
    return [x[len(p):] for x, p in zip(tokens, prompts)]


# --- without a GPU: what the notebook has not

@pytest.mark.parametrize('seed', range(4))
def test_drawn_mixes_on_a_tape(seed):
    model, (prompts, caps) = tiny_model('llama', seed=seed), drawn(seed)
    want = [generate_naive(model, p, n, ()) for p, n in zip(prompts, caps)]
    for how in (dict(record=record_tape, after=1), dict(record=record_tape, max_graphs=2)):
        for chunk in (7, 1000):
            decode = GraphedDecode(model, **how)
            assert serve(decode, prompts, caps, chunk, seed=seed, resize=(9, 192)) == want
            assert not decode.why


def test_padding_never_meets_a_row():
    rng = random.Random(0)
    for _ in range(2000):
        capacity = rng.choice([1, 2, 64])
        rows = [(s, rng.randrange(capacity), 1) for s in sorted(rng.sample(range(40), rng.randint(1, 20)))]
        if not has_room(rows, round_rows(len(rows)), capacity): continue
        positions, slots, columns, lengths, whose = padded_rows(rows, round_rows(len(rows)))
        read = {(s, c) for s, n in zip(slots[:len(rows)], lengths) for c in range(n)}
        for i in range(len(rows), len(slots)):
            assert (slots[i], columns[i]) not in read and columns[i] < capacity and 1 <= lengths[i] <= columns[i]
            assert positions[i] < capacity and 0 <= whose[i] < len(rows)


@pytest.mark.parametrize('arch', ['llama', 'mistral', 'gpt_oss'])
def test_engine_on_a_tape(arch, monkeypatch):
    "The engine's plans: prefixes, moves, resizes, preemptions, steps of every kind."
    from batchlab import engine
    class Hooked(engine.PackedRunner):
        def make_step(self, rows):
            made.append(self.forward.make_step(self.cache, rows))
            return made[-1]
    monkeypatch.setattr(engine, 'PackedRunner', Hooked)
    model, made, rng = tiny_model(arch, seed=2), [], random.Random(arch)
    head = [rng.randrange(3, 259) for _ in range(40)]
    prompts = [head[:rng.randint(1, 40)] + [rng.randrange(3, 259)] * rng.randint(0, 9) for _ in range(14)]
    caps = [rng.randint(1, 40) for _ in prompts]
    want = [generate_naive(model, p, n, ()) for p, n in zip(prompts, caps)]
    for how in ({}, dict(max_num_seqs=3, max_num_batched_tokens=16)):
        llm = engine.LLM(model, compile=False, **how)
        llm.backend = cuda_backend(model, llm.shapes, record=record_tape)
        params = [engine.SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in caps]
        for _ in range(2):
            outs = llm.generate(prompts, params)
            assert [o.outputs[0].token_ids for o in outs] == want
        assert llm.backend.name == 'cuda graphs' and llm.backend.forward.num_recorded, llm.backend.why
    assert {type(s) for s in made} == {StaticStep, PackedStep}


def test_steps_keep_no_cache_alive():
    model = tiny_model('llama')
    cache = SlotCache(kv_layout(model), 2, 64)
    step = GraphedDecode(model, record=None).make_step(cache, [(0, 3, 1)])
    del cache
    gc.collect()
    assert step.cache is None


# --- with a GPU

@gpu
@pytest.mark.parametrize('arch', ARCHS)
def test_tokens_in_fp32(arch):
    model, (prompts, caps) = tiny_model(arch, seed=1, **ARCHS[arch]).to('cuda'), drawn(arch)
    want = [generate_naive(model, p, n, ()) for p, n in zip(prompts, caps)]
    assert [hf_generate(model, p, n) for p, n in zip(prompts, caps)] == want
    for record in ('auto', None):
        decode, why = graphed(model, kv_layout(model), record)
        for chunk in (7, 1000): assert serve(decode, prompts, caps, chunk) == want
        if record and arch not in ('gpt2', 'mixtral', 'gpt_oss', 'qwen3_moe'): assert decode.num_recorded, (why, decode.why)


@gpu
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_replay_is_python_bit_for_bit(dtype):
    how = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    model = tiny_model('llama', **how).to('cuda', dtype)
    flash, _ = find_flash(4, kv_layout(model), dtype, model.device)
    rows = [(0, 9, 1), (2, 40, 1), (4, 12, 1)]
    def outs(record, flash, n=6):
        decode = GraphedDecode(model, record, flash)
        cache = SlotCache(kv_layout(model), 6, 64, dtype, model.device)
        gen = torch.Generator('cuda').manual_seed(0)
        for t in cache.keys + cache.values: t.copy_(torch.randn(t.shape, generator=gen, device='cuda'))
        for s in range(6): cache.begin(s, 64)
        got = []
        for t in range(n):
            at = [(s, start + t, 1) for s, start, _ in rows]
            got.append(decode(decode.make_step(cache, at), pack([[5 + t], [6], [7]], [a for _, a, _ in at])).clone())
        return torch.stack(got), decode
    for f in {flash, None}:
        eager, _ = outs(None, f)
        replayed, decode = outs('auto', f)
        assert decode.num_recorded == 1 and torch.equal(eager, replayed), decode.why


@gpu
def test_resize_invalidates():
    model, (prompts, caps) = tiny_model('llama').to('cuda'), drawn(3)
    want = [generate_naive(model, p, n, ()) for p, n in zip(prompts, caps)]
    decode = GraphedDecode(model, after=1)
    for at in (3, 9, 12): assert serve(decode, prompts, caps, resize=(at, 256)) == want
    cache = SlotCache(kv_layout(model), 4, 64, device=model.device)
    cache.begin(1, 0)
    decode(decode.make_step(cache, [(1, 0, 1)]), pack([[5]], [0]))
    assert decode.num_recorded == 1
    cache.resize(4, 128)
    decode.make_step(cache, [(1, 1, 1)])
    assert decode.num_recorded == 0


@gpu
def test_what_cannot_be_recorded_goes_on_without(caplog):
    model, (prompts, caps) = tiny_model('llama').to('cuda'), drawn(5)
    want = [generate_naive(model, p, n, ()) for p, n in zip(prompts, caps)]
    model.model.norm.register_forward_pre_hook(lambda module, args: None if args[0].isnan().any().item() else None)
    decode = GraphedDecode(model)
    assert serve(decode, prompts, caps) == want
    assert decode.why and decode.num_recorded == 0
    assert sum('without recordings' in r.message for r in caplog.records) == 1
    assert serve(GraphedDecode(tiny_model('llama').to('cuda')), prompts, caps) == want       # the device is none the worse


@gpu
@pytest.mark.parametrize('heads,kv', [(4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize('dim', [16, 64, 128])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_flash_is_found_or_says_why(heads, kv, dim, dtype):
    flash, why = find_flash(heads, [(kv, dim, dim)], dtype, torch.device('cuda'))
    assert (flash is None) == bool(why)
    if torch.cuda.get_device_capability() >= (8, 0): assert flash, why


@gpu
def test_flash_logits_in_bf16():
    "Teacher-forced: flash attention, recorded, against packed steps, over slots and lengths across buckets."
    how = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    for arch in ('llama', 'mistral'):
        model = tiny_model(arch, **how).to('cuda', torch.bfloat16)
        shapes = kv_layout(model)
        flash, why = find_flash(8, shapes, model.dtype, model.device)
        assert flash, why
        decode, (prompts, _) = GraphedDecode(model, flash=flash, after=1), drawn(7)
        a, b = (SlotCache(shapes, 9, 192, model.dtype, model.device) for _ in range(2))
        for cache in (a, b):
            for t in cache.keys + cache.values: t.fill_(torch.nan)
            for i in range(len(prompts)): cache.begin(i, 0)
            for i, p in enumerate(prompts):
                packed_forward(model, PackedStep(cache, [(i, 0, len(p))]), pack([p], [0], model.device))
        for t in range(80):
            rows = [(i, len(p) + t, 1) for i, p in enumerate(prompts)]
            ids = [[(7 * t + i) % 250] for i in range(len(prompts))]
            starts = [r[1] for r in rows]
            got = decode(decode.make_step(a, rows), pack(ids, starts)).float()
            want = packed_forward(model, PackedStep(b, rows), pack(ids, starts, model.device)).float()
            assert (got - want).abs().max() <= 5e-2 * want.abs().max()
        assert decode.num_recorded >= 2 and not decode.why


@gpu
def test_nothing_waits_but_the_tokens():
    "A decode step that is replayed does nothing that synchronises, up to its tokens."
    model = tiny_model('llama').to('cuda')
    decode = GraphedDecode(model, after=1)
    cache = SlotCache(kv_layout(model), 4, 64, device=model.device)
    for s in range(4): cache.begin(s, 0)
    for t in range(3): decode(decode.make_step(cache, [(s, t, 1) for s in range(3)]), pack([[5]] * 3, [t] * 3))
    torch.cuda.set_sync_debug_mode('error')
    try: found = Greedy(decode(decode.make_step(cache, [(s, 3, 1) for s in range(3)]), pack([[5]] * 3, [3] * 3)))
    finally: torch.cuda.set_sync_debug_mode('default')
    ids, sound = found.wait()
    assert len(set(ids)) == 1 and sound == [True] * 3


@gpu
def test_backend_of_the_engine():
    from batchlab.engine import LLM, SamplingParams
    model, (prompts, caps) = tiny_model('llama').to('cuda'), drawn(11)
    want = [generate_naive(model, p, n, ()) for p, n in zip(prompts, caps)]
    llm = LLM(model)
    outs = llm.generate(prompts, [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in caps])
    assert [o.outputs[0].token_ids for o in outs] == want
    assert llm.backend.name == 'cuda graphs', llm.backend.why


@gpu
def test_measures():
    model = cuda.llama_shape('cuda', hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, head_dim=64, vocab_size=1000, tie_word_embeddings=False)
    for r in cuda.measure(model, [1, 5], 20, 8):
        assert r['step'] > 0 and 0 < r['share'], r
        assert all(isinstance(t, float) for t in r['jobs'].values()), r
