"Fused layers of every family: the model's own logits, the same bits alone and in company, and weights that are given up."

import copy, random, weakref

import pytest, torch
from transformers.activations import ACT2FN

from helpers import spoil, weight_bytes
from batchlab.core.attention import TorchBackend
from batchlab.fast.trial import kv_layout
from batchlab.errors import Unavailable
from batchlab.fast import fused
from batchlab.fast.experts import PackedExperts, describe_router
from batchlab.fast.fused import Fused, FusedBackend, fuse
from batchlab.fast.int8 import Int8Linear
from batchlab.fast.layers import FAMILIES, Family, activation_of, describe_layer, family_of
from batchlab.fast.native import DTYPES
from batchlab.fast.packed import PlainLinear
from batchlab.core.batch import pack_rows
from batchlab.models import tiny_model

MORE = {
    "ministral": dict(head_dim=16),
    "hunyuan_v1_dense": dict(head_dim=16),
    "hunyuan_v1_moe": dict(head_dim=16),
    "dots1": dict(num_local_experts=4, n_shared_experts=2, first_k_dense_replace=1)
    | dict(num_experts_per_tok=2),
    "gemma2": dict(attn_implementation="eager"),
}
MIXTURES = (
    "mixtral qwen2_moe qwen3_moe olmoe gpt_oss granitemoe glm4_moe ernie4_5_moe exaone_moe flex_olmo dots1 hunyuan_v1_moe solar_open mellum"
).split()

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(family, **more):
    "A tiny model whose experts are not chosen by their scores alone, where the family has a correction of these."
    name = "gemma3" if family == "gemma3_text" else family
    model = tiny_model(name, **MORE.get(family, {}) | more)
    for name, t in [*model.named_buffers(), *model.named_parameters()]:
        if "correction_bias" in name:
            t.data.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return model


def three_steps(backend, size=259):
    "Logits of three sequences: prefill of the first in two chunks, the second beside it, then decode."
    rng = random.Random(0)
    ids = [[rng.randrange(3, size) for _ in range(n)] for n in (70, 23, 5)]
    cache, tables, out = backend.make_cache(6), [[5, 2], [1], [4]], []
    if backend.name != "torch":
        spoil(cache)
    for rows in ([(0, 0, 60), (1, 0, 23)], [(2, 0, 4), (0, 60, 9)], [(0, 69, 1), (2, 4, 1)]):
        rows.sort(key=lambda r: r[2] > 1)
        parts = [(ids[r][a : a + n], a) for r, a, n in rows]
        batch = pack_rows(parts, [tables[r] for r, *_ in rows], backend.block_size)
        out.append(backend.execute(cache, batch))
    return torch.cat(out).float()


def plain(model, shapes=None):
    "The same by the model's own code."
    return three_steps(TorchBackend(model, shapes or kv_layout(model)))


def fused_steps(fused, shapes):
    return three_steps(FusedBackend(fused, shapes))


def off(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


def agree(got, want, model):
    "Whether `got` is as near to the logits `want` of `model` as fp32 allows; in bf16, as near to those in fp32 as `want` is, or nearly."
    if model.dtype == torch.float32:
        return off(got, want) < 2e-5
    exact = plain(copy.deepcopy(model).float())
    return off(got, want) < 0.03 or off(got, exact) < 1.2 * off(want, exact)


def last_logits(backend, cuts, others=()):
    "Of a sequence of 80 tokens, computed in `cuts`, beside `others`: prompts that come in with its last cut."
    ids, at = [(7 * i) % 251 + 3 for i in range(80)], 0
    cache, tables = (
        backend.make_cache(2 + len(others)),
        [[1, 0], *([2 + j] for j in range(len(others)))],
    )
    spoil(cache)
    for i, n in enumerate(cuts):
        rows = [(ids[at : at + n], at, tables[0])]
        if i == len(cuts) - 1:
            rows += [(o, 0, table) for o, table in zip(others, tables[1:])]
        rows.sort(key=lambda r: len(r[0]) > 1)
        logits = backend.execute(cache, pack_rows([r[:2] for r in rows], [r[2] for r in rows], 64))
        at += n
    return logits[[r[2] for r in rows].index(tables[0])]


COMPANY = [5, 6, 7], [8] * 33, [9]


def same_bits(backend, *more):
    "Whether the last logits are the same bits however the sequence is cut and whatever is beside it, where that is promised."
    whole, cuts = last_logits(backend, [80]), [([1] * 80, ()), ([79, 1], COMPANY), ([80], COMPANY)]
    got = [last_logits(backend, *how) for how in (*cuts, *more)]
    return not backend.batch_invariant or all(torch.equal(x, whole) for x in got)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_models_own_and_the_same_bits_in_any_company(kernels, family, dtype):
    model = tiny(family)
    shapes = kv_layout(model)  # of an fp32 model: in bf16 its own check may fail
    backend = FusedBackend(Fused(model.to(dtype), kernels), shapes)
    want = plain(model, shapes)
    assert agree(three_steps(backend), want, model)
    assert agree(fused_steps(Fused(model, kernels, linear=PlainLinear), shapes), want, model)
    assert same_bits(backend, ([7] * 11 + [3], ()))


OTHERWISE = dict(
    gpt_neox=[dict(use_parallel_residual=False), dict(attention_bias=False)],
    gpt_bigcode=[dict(multi_query=False)],
    qwen2_moe=[dict(mlp_only_layers=[0]), dict(norm_topk_prob=True)],
    qwen3_moe=[
        dict(decoder_sparse_step=2),
        dict(norm_topk_prob=True),
        dict(num_experts=40, num_local_experts=40, num_experts_per_tok=7),
    ],
    stablelm=[
        dict(use_parallel_residual=True),
        dict(qk_layernorm=True),
        dict(use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True),
    ],
    nemotron=[dict(attention_bias=True, mlp_bias=True), dict(hidden_act="silu")],
    phi=[dict(qk_layernorm=True)],
)


@pytest.mark.parametrize(
    "family, more", [(family, more) for family in OTHERWISE for more in OTHERWISE[family]], ids=str
)
def test_layers_that_a_config_builds_otherwise(kernels, family, more):
    model = tiny(family, **more)
    shapes = kv_layout(model)
    assert off(fused_steps(fuse(model, kernels, shapes), shapes), plain(model, shapes)) < 2e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_that_give_their_weights_up(kernels, family, dtype):
    assert family in FAMILIES
    model, twin = tiny(family).to(dtype), tiny(family).to(dtype)
    shapes, before = kv_layout(model), weight_bytes(model)
    want, own = fused_steps(fuse(twin, kernels, shapes), shapes), plain(twin, shapes)
    fused = fuse(model, kernels, shapes, own=True)
    assert torch.equal(fused_steps(fused, shapes), want)
    assert agree(plain(model, shapes), own, twin)  # its own code, on packed weights
    routers = sum(x.router.nbytes for x in fused.experts if x)
    assert weight_bytes(model) + fused.nbytes <= before + routers


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_weights_are_gone_once_they_are_packed(kernels, family, monkeypatch):
    model, left = tiny(family, num_hidden_layers=4), []
    shapes = kv_layout(model)
    stay = "embed", "lm_head", "wte", "wpe", "gate.", "router."
    big = [
        weakref.ref(p.untyped_storage())
        for name, p in model.named_parameters()
        if p.ndim > 1 and not any(w in name for w in stay)
    ]
    assert len(big) >= 16

    def watched(*args, **more):
        left.append(sum(r() is not None for r in big))
        return describe_layer(*args, **more)

    monkeypatch.setattr(fused, "describe_layer", watched)
    fuse(model, kernels, shapes, own=True)
    assert left[:4] == [len(big)] * 4 and left[4:] == [0] * 4


@pytest.mark.parametrize("family", [*MIXTURES, "stablelm", "nemotron"])
def test_in_int8(kernels, family):
    model, twin = tiny(family), tiny(family)
    shapes = kv_layout(model)
    backend = FusedBackend(fuse(model, kernels, shapes, own=True, linear=Int8Linear), shapes)
    got = three_steps(backend)
    near = off(got, plain(model, shapes))  # the same bytes, by the model's own code
    assert near < 0.05 and near < off(got, plain(twin, shapes))
    assert same_bits(backend)


def test_experts_of_many_rows_and_threads(kernels):
    model = tiny("qwen3_moe", num_experts=24, num_experts_per_tok=3)
    shapes = kv_layout(model)
    backend = FusedBackend(Fused(model, kernels), shapes)
    ids = [(11 * i) % 250 + 3 for i in range(600)]

    def logits(threads):
        torch.set_num_threads(threads)
        return backend.execute(backend.make_cache(10), pack_rows([(ids, 0)], [[*range(10)]], 64))

    assert torch.equal(logits(1), logits(4))
    torch.set_num_threads(1)


def test_what_is_refused(kernels):
    for family, more, why in (
        ("phimoe", {}, "is none of"),
        ("opt", dict(do_layer_norm_before=False), "norms or embeddings"),
        ("opt", dict(word_embed_proj_dim=32), "norms or embeddings"),
        ("olmoe", dict(clip_qkv=3.0), "clips"),
        ("gpt2", dict(add_cross_attention=True), "attends to another"),
    ):
        with pytest.raises(Unavailable, match=why):
            family_of(tiny(family, **more))
    router = tiny("phimoe").model.layers[0].mlp.router
    with pytest.raises(Unavailable, match="PhimoeTopKRouter is none"):
        describe_router(router, 64)
    mixture = tiny("glm4_moe", num_local_experts=8, n_group=4, topk_group=2).model.layers[1].mlp
    with pytest.raises(Unavailable, match="router is none|Router is none"):
        describe_router(mixture.gate, 64)
    mixture = tiny("mixtral", intermediate_size=40).model.layers[0].mlp
    with pytest.raises(Unavailable, match="multiples of 16"):
        PackedExperts(mixture, kernels, PlainLinear)
    for act in torch.nn.Softsign(), torch.nn.ReLU6(), ACT2FN["gelu_10"]:  # two cut off far from 0
        mixture.experts.act_fn = act
        with pytest.raises(Unavailable, match="activation"):
            PackedExperts(mixture, kernels, PlainLinear)
        with pytest.raises(Unavailable, match="activation"):
            activation_of(mixture.experts, True)


def test_a_family_that_changed_runs_by_its_own_code(kernels, monkeypatch):
    model = tiny("llama")
    monkeypatch.setitem(FAMILIES, "llama", Family(("norm_1", "", "norm_2", "")))
    with pytest.raises(Unavailable, match="another form .AttributeError"):
        fuse(model, kernels, kv_layout(model))
