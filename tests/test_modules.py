"Module by module: the model's own logits and answers for families in no list, weights given up and not, and a model of the user's that stays as it was."

import copy, gc, itertools, weakref

import pytest, torch
from torch import nn

from batchlab.fast.trial import BackendOptions, kv_layout
from batchlab.errors import Unavailable
from batchlab.fast.backends import select_backend
from batchlab.fast.layers import FAMILIES
from batchlab.fast.packed import PackedEmbedding, PackedLinear
from batchlab.fast.int8 import Int8Linear, module_places, put_module
from batchlab.fast.kernels import KernelBackend
from batchlab.fast.modules import ChosenExperts, PackedNorm, module_kind, norm_like, open_backend
from batchlab.fast.native import DTYPES, HugePages
from batchlab.api import LLM
from batchlab.models import tiny_model
from helpers import generated, greedy, ids, one_thread, oracle, weight_bytes
from test_layers import off, plain, three_steps

OTHERS = (
    "afmoe aria_text beam biogpt bitnet cohere2_moe ctrl flint granite_swa granitemoe_swa granitemoeshared hy_v3 hyperclovax jetmoe kolibri1 laguna lfm2 "
    "mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral3 modernbert-decoder nanochat persimmon phimoe vaultgemma"
).split()
STAY = {"minimax_m3_vl_text": {"experts"}}  # of a kind that the kernels do not know
WILD = {
    "granitemoe_swa"
}  # in fp32 its own logits are 1e-4 off those in fp64: scores are not scaled
NEW = {"linear": PackedLinear, "norm": PackedNorm, "experts": ChosenExperts}
PROMPTS = [[5, 9, 33], [*range(40, 70)], [44], [7] * 11, [*range(40, 66)] + [9]]

pytestmark = one_thread


def opened(model, shapes=None, **options):
    return open_backend(model, shapes or kv_layout(model), BackendOptions(**options))


def state(model):
    weights = [(name, p.data_ptr(), p._version) for name, p in model.named_parameters()]
    return [(name, id(m)) for name, m in model.named_modules()], weights


def nbytes(model):
    return weight_bytes(model)


def near(family, got, want, model, attended):
    "Whether `got` is as near to `want` as fp32 allows; in bf16, or as near to `attended`, of the model's own modules with attention on the kernels."
    if model.dtype == torch.float32:
        return off(got, want) < (2e-4 if family in WILD else 2e-5)
    return off(got, want) < 0.03 or off(got, attended) < 0.03


def types_in(model):
    return {type(m) for m in model.modules()}


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("family", OTHERS)
def test_logits_are_the_models_own(kernels, family, dtype):
    assert family not in FAMILIES
    model, given = tiny_model(family), tiny_model(family)
    shapes = kv_layout(model)  # of an fp32 model: in bf16 its own check may fail
    want, before = plain(model.to(dtype), shapes), state(model)
    backend = opened(model, shapes)
    kinds = {m: module_kind(m) for m in model.modules()}
    known = {m for m, kind in kinds.items() if kind and kind not in STAY.get(family, ())}
    assert {m for *_, m, _ in backend.modules.swaps} == known
    assert all(type(new) is NEW[kinds[m]] for *_, m, new in backend.modules.swaps)
    got, attended = three_steps(backend), three_steps(KernelBackend(model, shapes, kernels))
    assert near(family, got, want, model, attended)
    assert state(model) == before and not backend.batch_invariant
    other = opened(given.to(dtype), shapes, own=True)
    assert torch.equal(three_steps(other), got)  # given up, the same bits
    assert nn.Linear not in types_in(given) and not other.modules.swaps
    # its own code, on packed weights
    assert near(family, plain(given, shapes), want, model, attended)
    assert {p.dtype for p in given.parameters()} == {given.dtype} == {dtype}


@pytest.mark.parametrize("family", OTHERS)
def test_answers_are_transformers_own(kernels, family):
    model = tiny_model(family, seed=4)
    before = state(model)
    want = oracle(model, PROMPTS, 10)
    assert generated(model, PROMPTS[1], 10) == want[1]
    llm = LLM(model, max_num_seqs=3, max_num_batched_tokens=20)
    assert llm.backend.name == "modules", llm.backend.why
    assert ids(llm.generate(PROMPTS, greedy(10))) == want
    assert ids(llm.generate(PROMPTS[1:2], greedy(10))) == want[1:2]
    assert llm.verify(llm.generate(PROMPTS[:2], greedy(10))).ok
    held = weakref.ref(llm.backend.modules)
    llm.close()
    del llm
    gc.collect()
    assert held() is None and state(model) == before


@pytest.mark.parametrize(
    "family", ["phimoe", "minimax_m2", "hy_v3", "afmoe", "jetmoe", "ministral3", "persimmon"]
)
def test_int8(kernels, family):
    model, given, shapes = tiny_model(family), tiny_model(family), kv_layout(tiny_model(family))
    before = plain(model, shapes)
    backend = opened(model, shapes, quantization="int8")
    other = opened(given, shapes, quantization="int8", own=True)
    got = three_steps(backend)
    assert torch.equal(three_steps(other), got) and torch.equal(plain(model, shapes), before)
    here = off(got, plain(given, shapes))  # the same bytes, by the model's own code
    assert here < 0.05 and here < off(got, before)
    replaced = [(name, was, new) for name, was, new, _ in backend.modules.replaced]
    ends = "router.layer", "router.gate"
    routers = {new for name, _, new in replaced if name.endswith(ends)}
    assert routers == ({"PackedLinear"} if family in ("afmoe", "jetmoe") else set())
    others = {type(new) for *_, m, new in backend.modules.swaps if type(m).__name__ != "Linear"}
    assert others <= {Int8Linear, PackedNorm, ChosenExperts}
    big = {new for name, was, new in replaced if was == "Linear" and "router" not in name}
    assert big == {"Int8Linear"}


def test_weights_go_as_they_are_packed(kernels, monkeypatch):
    import batchlab.fast.modules as m

    model, left = tiny_model("laguna", num_hidden_layers=4), []
    big = [
        weakref.ref(p.untyped_storage())
        for mod in model.modules()
        if module_kind(mod) in ("linear", "experts")
        for p in mod.parameters()
        if p.ndim > 1
    ]
    before, like = nbytes(model), m.module_like

    def watched(*args, **more):
        left.append(sum(r() is not None for r in big))
        return like(*args, **more)

    monkeypatch.setattr(m, "module_like", watched)
    backend = opened(model, own=True)
    trial, packing = left[: len(left) // 2], left[len(left) // 2 :]
    assert set(trial) == {len(big)} and packing[-1] <= 2
    assert packing == sorted(packing, reverse=True)
    assert not [r for r in big if r() is not None]
    assert nbytes(model) + backend.nbytes <= before


def test_a_tied_head_is_in_memory_once(kernels):
    model, twin, other = (tiny_model("ministral3", tie_word_embeddings=True) for _ in range(3))
    want, before = plain(twin), nbytes(model)
    backend = opened(model, own=True)
    assert type(model.get_input_embeddings()) is PackedEmbedding
    assert off(three_steps(backend), want) < 2e-5
    assert nbytes(model) + backend.nbytes <= before
    opened(other, own=True, quantization="int8")
    assert type(other.get_input_embeddings()) is nn.Embedding


def test_with_too_little_room_only_norms(kernels):
    model = tiny_model("phimoe")
    backend = opened(model, room=10)
    assert {new for *_, new, _ in backend.modules.replaced} == {"PackedNorm"}
    assert backend.nbytes == 0 and "load it by name" in backend.why
    assert off(three_steps(backend), plain(model)) < 2e-5


class Other(nn.Module):
    "A linear layer, or a norm, of a class that nobody knows: it gives twice what the one inside gives."

    def __init__(self, inner):
        super().__init__()
        self.weight, self.inner = inner.weight, [inner]

    def forward(self, x):
        return 2 * self.inner[0](x)


class OddNorm(Other):
    "A norm by its name, and none that is known."


OddNorm.forward = lambda self, x: (x - x.amax(-1, keepdim=True)) * self.weight


def test_what_is_not_known_stays(kernels):
    model = tiny_model("phimoe")
    layer, other = model.model.layers
    attention, norm = layer.self_attn, layer.input_layernorm
    attention.q_proj, layer.input_layernorm = Other(attention.q_proj), OddNorm(norm)
    attention.k_proj.register_forward_hook(lambda m, args, out: 3 * out)
    inner = copy.deepcopy(attention.v_proj)
    attention.v_proj.forward = lambda x, inner=inner: inner(x) + 1
    inner = other.self_attn.q_proj
    inner.weight = nn.Parameter(inner.weight.double(), requires_grad=False)
    other.self_attn.q_proj = nn.Sequential(Cast(torch.float64), inner, Cast(torch.float32))
    want, backend = plain(model), opened(model)
    there = {m for *_, m, _ in backend.modules.swaps}
    unknown = {attention.q_proj, attention.k_proj, attention.v_proj, layer.input_layernorm, inner}
    assert not there & unknown and len(there) == 11
    assert off(three_steps(backend), want) < 2e-5


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


class Gated(nn.RMSNorm):
    "A norm that takes a gate, as some do."

    def forward(self, x, gate=None):
        return super().forward(x) * (1 if gate is None else gate.sigmoid())


def test_norms_that_are_not_what_they_look_like(kernels):
    x = torch.randn(5, 64)
    for module, why in (
        (nn.LayerNorm(40), "multiple of 16"),
        (nn.RMSNorm((5, 64)), "multiple of 16"),
        (nn.GroupNorm(4, 64), "no norm"),
    ):
        with pytest.raises((Unavailable, RuntimeError), match=why):
            norm_like(module.requires_grad_(False), x[:, : module.weight.shape[-1]], kernels)
    gated = Gated(64, eps=1e-6).requires_grad_(False)
    new = norm_like(gated, x, kernels)
    with pytest.raises(TypeError):
        new(x, x)  # never the same answer without the gate
    assert torch.equal(new(x.double()), gated(x.double())) and new(x[:0]).shape == (0, 64)
    layer = nn.LayerNorm(64, eps=1e-3, bias=False).requires_grad_(False)
    torch.testing.assert_close(norm_like(layer, x, kernels)(x * 1e-3), layer(x * 1e-3))


def test_a_shared_module_is_replaced_in_all_its_places(kernels):
    model = tiny_model("ministral3")
    first, second = model.model.layers
    second.self_attn.q_proj, second.mlp = first.self_attn.q_proj, first.mlp
    want, backend = plain(model), opened(model)
    assert sum(m is first.self_attn.q_proj for *_, m, _ in backend.modules.swaps) == 2
    assert off(three_steps(backend), want) < 2e-5
    opened(model, own=True)
    assert first.self_attn.q_proj is second.self_attn.q_proj
    assert type(first.self_attn.q_proj) is PackedLinear


def test_nothing_to_replace_and_a_trial_that_fails(kernels, monkeypatch):
    model = tiny_model("ministral3")
    for m, places in module_places(model, module_kind).items():
        put_module(places, Other(m))
    with pytest.raises(Unavailable, match="^$"):
        opened(model)
    assert select_backend(model, kv_layout(model)).name == "kernels"
    model = tiny_model("ministral3")
    monkeypatch.setattr("batchlab.fast.modules.gives_the_same", lambda *a: True)
    monkeypatch.setattr("batchlab.fast.modules.norm_rows", lambda kernels, about, x: x)
    before = state(model)
    with pytest.raises(Unavailable, match="differ from those alone"):
        opened(model, own=True)
    assert state(model) == before


def test_whatever_breaks_leaves_the_model_as_it_was(kernels):
    model = tiny_model("phimoe")
    before, backend = state(model), opened(model)
    # later than the trial: not called, as it stands aside
    hook = model.model.norm.register_forward_hook(lambda *a: 1 / 0)
    three_steps(backend)
    hook.remove()
    hook = model.model.layers[1].register_forward_hook(lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        three_steps(backend)
    hook.remove()
    assert state(model) == before
    # of somebody's own since then: that one runs, and stays
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight.data *= 2
    three_steps(backend)
    assert type(model.lm_head) is nn.Linear


def test_new_weights_are_packed_anew(kernels):
    model = tiny_model("ministral3")
    llm = LLM(model)
    llm.generate(PROMPTS, greedy(8))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert ids(llm.generate(PROMPTS, greedy(8))) == oracle(model, PROMPTS, 8)


def test_experts_give_a_row_the_same_bits_in_any_company(kernels):
    model = tiny_model("phimoe", num_local_experts=24, num_experts_per_tok=3)
    own, gen = model.model.layers[0].mlp.experts, torch.Generator().manual_seed(0)
    x, weights = torch.randn(300, 64, generator=gen), torch.rand(300, 3, generator=gen)
    index = torch.stack([torch.randperm(24, generator=gen)[:3] for _ in range(300)])
    for make, dtype in itertools.product((PackedLinear, Int8Linear), DTYPES):
        packed = ChosenExperts(own.to(dtype), kernels, make, HugePages())
        a, w = x.to(dtype), weights.to(dtype)
        whole = packed(a, index, w)
        exact = (make, dtype) == (PackedLinear, torch.float32)
        assert off(whole.float(), own(a, index, w).float()) < (1e-5 if exact else 0.05)
        for at in (slice(0, 1), slice(3, 40), slice(100, 300)):
            assert torch.equal(packed(a[at], index[at], w[at]), whole[at])
        torch.set_num_threads(4)
        assert torch.equal(packed(a, index, w), whole)
        torch.set_num_threads(1)
    for wrong in (index + 24, index - 24):
        with pytest.raises(IndexError, match="a router chose another"):
            packed(a, wrong, w)


def test_elsewhere_than_on_a_cpu_torch_runs():
    model = tiny_model("llama")
    shapes = kv_layout(model)
    backend = select_backend(model.to("meta"), shapes)
    assert backend.name == "torch" and "on the CPU" in backend.why
