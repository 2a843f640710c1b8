"Encoders on the kernels: the model's own hidden states, the same bits alone and in any company."

import itertools, random

import pytest, torch
from helpers import spoil, weight_bytes
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForSequenceClassification

from batchlab.core.attention import TorchBackend
from batchlab.fast.trial import (
    BackendOptions,
    StateProbe,
    kv_layout,
    layer_specs,
    probe_rows,
    takes_types,
)
from batchlab.errors import Unavailable
from batchlab.fast.backends import select_backend
from batchlab.fast.fused import Fused, FusedBackend, fuse
from batchlab.fast.kernels import attend_both_ways, layout_whole, whole_rows
from batchlab.fast.layers import ENCODERS
from batchlab.fast.native import DTYPES
from batchlab.core.backend import AttentionParams
from batchlab.core.batch import pack_rows
from batchlab.models import tiny_model
from batchlab.models.tiny import _init_tiny

# enough for rows to go from layer to layer together, and for one that does not
LENGTHS = [1, 2, 5, 17, 64, 65, 130, 300]

pytestmark = pytest.mark.usefixtures("one_thread")


def encoder(family, auto=AutoModel, **more):
    "A small encoder of that model type with random weights, for 300 ids, of which 1 is the padding."
    own = dict(
        electra=dict(embedding_size=48),
        modernbert=dict(local_attention=16),
        eurobert=dict(num_key_value_heads=2),
    )
    sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128)
    sizes |= dict(dim=64, n_layers=3, n_heads=4, hidden_dim=128)  # of DistilBERT
    if family not in CONFIG_MAPPING:  # 'gte' came after 5.17
        pytest.skip(f"this transformers has no {family}")
    usual = AutoConfig.for_model(family)
    sizes = {k: v for k, v in sizes.items() if hasattr(usual, k)}
    sizes |= dict(vocab_size=300, max_position_embeddings=400)
    special = dict(pad_token_id=1, bos_token_id=2, eos_token_id=2, cls_token_id=2, sep_token_id=2)
    config = AutoConfig.for_model(family, **sizes | special | own.get(family, {}) | more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
    _init_tiny(model, 0)
    for p in model.parameters():
        p.data.mul_(0.4 if p.ndim > 1 else 1)  # in bf16 roundings would grow from layer to layer
    return model.eval().requires_grad_(False)


def texts(model, lengths=LENGTHS):
    "`(ids, token types)` of each text; some ids are the padding."
    rng = random.Random(0)
    draw = lambda: rng.choice([1, 7, 8, rng.randrange(259)])
    types = lambda n: [int(takes_types(model) and 2 * i > n) for i in range(n)]
    return [([draw() for _ in range(n)], types(n)) for n in lengths]


def whole_texts(rows, tables, size, at=None, **more):
    "The batch of a step that computes `rows` whole, with the states of the tokens `at`, or of all."
    types = [t for _, of in rows for t in of]
    at, how = range(len(types)) if at is None else at, dict(causal=False, hidden=True)
    return pack_rows(
        [(ids, 0) for ids, _ in rows], tables, size, at, token_types=types, **how, **more
    )


def states(backend, rows, size=0):
    "The hidden states of each of `rows` in one step: without blocks, or with blocks of `size` tokens, which nobody should need."
    need = [-(-len(ids) // size) if size else 0 for ids, _ in rows]
    ends = [*itertools.accumulate(need)]
    batch = whole_texts(rows, [list(range(end - n, end)) for n, end in zip(need, ends)], size)
    cache = backend.make_cache(max(1, ends[-1]))
    spoil(cache)
    return backend.execute(cache, batch).float().split([len(ids) for ids, _ in rows])


def own_states(model, rows):
    "The same by the model alone."
    found = []
    for ids, types in rows:
        told = dict(token_type_ids=torch.tensor([types])) if takes_types(model) else {}
        with torch.inference_mode():
            out = model.base_model(input_ids=torch.tensor([ids]), **told)
        found.append(out.last_hidden_state[0].float())
    return found


def selected(model, specs=None, **more):
    "What `select_backend` finds for an encoder, and the shapes of its layers."
    shapes = [s.shape for s in specs or layer_specs(model, False, True)]
    probe = StateProbe(model, probe_rows(model))
    return select_backend(model, shapes, BackendOptions(probe=probe, specs=specs, **more)), shapes


def equal(some, others):
    return all(map(torch.equal, some, others))


def off(got, want):
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want))


@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states_are_the_models_own_and_the_same_bits_in_any_company(kernels, family):
    model = encoder(family)
    specs = layer_specs(model, False, True)
    rows = texts(model)
    want = own_states(model, rows)
    backend, shapes = selected(model, specs)
    assert backend.name == "fused" and backend.batch_invariant
    for dtype in DTYPES:
        if dtype == torch.bfloat16:
            backend = FusedBackend(Fused(model.to(dtype), kernels, specs=specs), shapes[:1])
        whole = states(backend, rows)
        if dtype == torch.float32:
            assert off(whole, want) < 2e-5
        else:
            rounded = off(own_states(model, rows), want)  # how far the model's own bf16 is off
            assert off(whole, want) < max(0.03, 1.5 * rounded) < 0.1, (off(whole, want), rounded)
        alone = [states(backend, [row])[0] for row in rows]
        some = states(backend, rows[:1] + rows[:3:-1], size=64)
        assert equal(alone, whole) and equal(some, whole[:1] + whole[:3:-1])


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_some_tokens_some_layers_and_any_number_of_threads(kernels, family):
    model = encoder(family)
    rows, specs = texts(model, LENGTHS + [40] * 8), layer_specs(model, False, True)
    backend = FusedBackend(Fused(model, kernels, specs=specs), [])
    whole, ids, types = torch.cat(states(backend, rows)), *zip(*rows)

    def run(at, **more):
        batch = whole_texts(rows, [[]] * len(rows), 0, at, **more)
        return backend.execute(backend.make_cache(1), batch)

    firsts = [*itertools.accumulate(map(len, ids[:-1]), initial=0)]
    for at in (firsts, range(100, 700), [len(whole) - 1]):
        assert torch.equal(run(at), whole[[*at]])
    torch.set_num_threads(3)
    assert torch.equal(run(range(len(whole))), whole)
    assert torch.equal(run(range(100, 700)), whole[100:700])
    torch.set_num_threads(1)
    some = run(firsts, layers=(0, 1, 3))
    told = dict(token_type_ids=torch.tensor([types[-1]])) if takes_types(model) else {}
    with torch.inference_mode():
        want = model(torch.tensor([ids[-1]]), output_hidden_states=True, **told).hidden_states
    assert torch.equal(some[:, 2], whole[firsts])
    for i in (0, 1):
        torch.testing.assert_close(some[-1, i], want[i][0, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "electra"])
def test_weights_are_given_up_and_heads_stay(kernels, family):
    model, twin = (encoder(family, AutoModelForSequenceClassification) for _ in range(2))
    rows, before = texts(model), weight_bytes(model)
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear]
    heads = [m for m in linears if m.out_features == model.config.num_labels]
    backend, shapes = selected(model, own=True)
    assert backend.name == "fused"
    held = weight_bytes(model) + backend.nbytes
    assert 0.98 * before < held <= before  # biases are no parameters then
    kept = FusedBackend(fuse(twin, kernels, shapes), shapes[:1])
    assert equal(states(backend, rows), states(kept, rows))
    assert heads and all(m in [*model.modules()] for m in heads)
    ids = torch.tensor([rows[3][0]])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(Unavailable, match="no head"):
        backend.execute(backend.make_cache(1), pack_rows([([5, 6], 0)], [[0]], 64, causal=False))


@pytest.mark.parametrize("family", ["xlm-roberta-xl", "roberta-prelayernorm"])
def test_other_encoders_run_by_their_own_code(kernels, family):
    model = encoder(family)
    rows, (backend, _) = texts(model), selected(model)
    assert backend.name == "modules" and "family" in backend.why
    assert off(states(backend, rows), own_states(model, rows)) < 2e-5


def test_decoders_without_a_head_and_rows_that_see_both_ways(kernels):
    model = tiny_model("qwen3")
    shapes, rows = kv_layout(model), texts(model)
    both = FusedBackend(fuse(model, kernels, shapes), shapes)
    assert off(states(both, rows), states(TorchBackend(model, shapes), rows)) < 2e-5
    probe = StateProbe(model.base_model, probe_rows(model))
    headless = select_backend(model.base_model, shapes, BackendOptions(probe=probe))
    assert probe.causal and headless.name == "fused"
    batch = pack_rows([([5], 0), ([6, 7, 8], 0)], [[0], [1]], 64, hidden=True)
    assert equal(*[[b.execute(b.make_cache(2), batch)] for b in (headless, both)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_both_ways(kernels, dtype):
    gen = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=gen).to(dtype)

    lengths = [1, 3, 47, 48, 49, 63, 64, 65, 80, 127, 128, 129, 200, 257, 300]
    whole = pack_rows([([5] * n, 0) for n in lengths], [[]] * len(lengths), 0, causal=False)
    for H, KV, D, Dv in ((12, 12, 32, 32), (6, 2, 48, 16), (4, 4, 64, 64)):
        # as a product leaves them, side by side
        qkv = noise(whole.num_tokens, H * D + KV * (D + Dv) + 5)[:, 5:]
        parts = zip(qkv.split([H * D, KV * D, KV * Dv], 1), (H, KV, KV))
        q, k, v = (t.unflatten(1, (n, -1)) for t, n in parts)
        for window, softcap in itertools.product((None, 1, 9, 65, 200), (None, 3.0)):
            asked = AttentionParams(D**-0.5, window, softcap)
            z = layout_whole(q, KV, Dv, asked)
            got = kernels.attend_whole(z, q, k, v, whole_rows(whole))
            want = attend_both_ways(whole, q, k, v, asked)
            near = 1e-5 if dtype == torch.float32 else 2e-2
            assert (got.float() - want).abs().max() < near
            assert torch.equal(kernels.attend_whole(z, q, k, v, whole_rows(whole, 70)), got)
            for a, b in zip(whole.cu_seqlens, whole.cu_seqlens[1:]):
                one = pack_rows([([5] * (b - a), 0)], [[]], 0, causal=False)
                alone = kernels.attend_whole(z, q[a:b], k[a:b], v[a:b], whole_rows(one))
                assert torch.equal(alone, got[a:b])
