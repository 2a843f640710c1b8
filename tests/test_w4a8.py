"""Weights of 4 bits times activations of 8: what the arithmetic says, the same bits in any company, and answers of whole models."""

import pytest
import torch
from batchlab import LLM, SamplingParams
from batchlab.fast.trial import kv_layout
from batchlab.errors import Unavailable, UnsupportedModelError
from batchlab.fast.fused import fuse
from batchlab.fast.grouped import (
    BLOCKS,
    GROUP_FORMS,
    Groups,
    pack_blocks,
)
from batchlab.fast.int8 import Int8Linear
from batchlab.fast.kernels import load_kernels
from batchlab.fast.modules import ModuleBackend
from batchlab.fast.w4a8 import W4A8Head, W4A8Linear, quads_right, quantize_groups
from batchlab.models import gguf as G, load_model, tiny_model, tiny_tokenizer
from helpers import generated, ids, oracle, raising
from test_gguf import grouped, linear_of, random_weight
from torch import nn
from gguf_files import files_of_families

FAMILIES = ["llama", "qwen3", "gemma3_text"]

DTYPES = [torch.float32, torch.bfloat16]
PROMPTS = [[1, 5, 9], [1, *range(30, 130)], [7], [1, 50, 51, 52, 53], [*range(3, 250)]]


def by_the_book(x, weight):
    "Each 32 activations rounded by themselves, times the numbers that the weight stands for, in fp64."
    parts = x.float().unflatten(1, (-1, 32))
    largest = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    whole = (parts.double() * (127 / largest).double()).round()
    return (whole * (largest / 127).double()).flatten(1) @ weight.double().T


@pytest.mark.parametrize("form", G.QUANT_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_rounded_activations(form, dtype):
    kernels, gen = load_kernels(), torch.Generator().manual_seed(1)
    for n, K in ((96, 256), (70, 512), (3, 2048)):
        weight = grouped(form, n, K, torch.float32, n)
        bias = torch.randn(n, generator=gen).to(dtype) if n == 70 else None
        layer = W4A8Linear(linear_of(weight, bias), kernels=kernels)
        x = torch.randn(130, K, generator=gen).to(dtype)
        x[:, 5] *= 100  # which spoils no more than its own group
        want = by_the_book(x, weight.dequantize()) + (0 if bias is None else bias.double())
        got = layer(x)
        off = (got.double() - want).abs().max() / want.abs().max()
        assert off < (2e-4 if dtype == torch.float32 else 4e-3) and got.dtype == dtype
        for rows in (0, 1, 2, 5, 6, 7, 12, 13, 64):  # whatever is beside them
            assert torch.equal(layer(x[20 : 20 + rows]), got[20 : 20 + rows]), (n, K, rows)


@pytest.mark.parametrize("form", G.QUANT_TYPES)
def test_panels_are_packed_from_the_bytes_of_a_file(form, monkeypatch):
    "Those of one weight with all rows, to the byte; no tensor of the numbers is made on the way."
    kernels = load_kernels()
    weights = [random_weight(form, n, torch.float32) for n in (64, 32, 6)]
    raw, (_, kind) = torch.cat([w.raw[w.order] for w in weights]), BLOCKS[form]
    joined = G.GroupedTensor(G.Blocks(raw, form), torch.float32)
    want = pack_blocks([joined], kernels, torch.float32, kernel="pack_quad_blocks")
    monkeypatch.setattr(G, "split", raising(AssertionError("it was taken apart")))
    for make in (W4A8Linear, W4A8Head):
        apart = make(*map(linear_of, weights), kernels=kernels)
        assert torch.equal(torch.cat([p for p, _ in apart.weights]), want)
        assert {i for _, i in apart.weights} == {kind.index}


def test_more_threads_give_the_same_bits():
    layer = W4A8Linear(linear_of(grouped("Q4_K", 320, 512, torch.float32)), kernels=load_kernels())
    x = torch.randn(100, 512)
    want = layer(x), layer(x[:1])
    torch.set_num_threads(4)
    try:
        assert torch.equal(layer(x), want[0]) and torch.equal(layer(x[:1]), want[1])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(bad):
    layer = W4A8Linear(linear_of(grouped("Q4_0", 64, 256, torch.float32)), kernels=load_kernels())
    x = torch.randn(9, 256)
    want, x[4, 77] = layer(x), bad
    got = layer(x)
    rest = [i for i in range(9) if i != 4]
    assert got[4].isnan().all() and torch.equal(got[rest], want[rest])
    assert torch.equal(layer(torch.zeros(2, 256)), torch.zeros(2, 64))


@pytest.mark.parametrize("forms", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", None, "Q8_0")])
@pytest.mark.parametrize("sizes", [(64, 32, 40), (40, 24, 8)])
def test_layers_side_by_side_may_have_different_forms(forms, sizes):
    kernels = load_kernels()
    weights = [
        torch.randn(n, 256) if form is None else grouped(form, n, 256, torch.float32, n)
        for form, n in zip(forms, sizes)
    ]
    joined = W4A8Linear(*map(linear_of, weights), kernels=kernels)
    x = torch.randn(7, 256)
    apart = [W4A8Linear(linear_of(w), kernels=kernels)(x) for w in weights]
    if sizes[0] % 32 == 0:  # else all are rounded anew, together
        assert torch.equal(joined(x), torch.cat(apart, 1))
    assert (joined(x) - torch.cat(apart, 1)).norm() < 0.1 * torch.cat(apart, 1).norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_fit_four_bits_are_found_again(dtype):
    gen = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (40, 64), generator=gen, dtype=torch.int8)
    numbers[:, ::32], numbers[:, 1::32] = 0, 15
    scales = 0.5 ** torch.randint(0, 4, (40, 2), generator=gen).half()
    offsets = -scales * torch.randint(0, 9, (40, 2), generator=gen).half()
    weight = Groups(numbers, scales, offsets, 4).plain(dtype)
    found = quantize_groups(weight[:24], weight[24:], kernels=load_kernels())
    assert torch.equal(found.numbers, numbers) and torch.equal(found.plain(dtype), weight)


def test_rounding_to_groups_is_better_than_by_the_ends():
    kernels, w = load_kernels(), torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    groups = quantize_groups(w, kernels=kernels)
    parts = w.unflatten(1, (-1, 32))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = (high - low) / 15
    ends = (((parts - low) / step).round() * step + low).flatten(1)
    assert (groups.plain(torch.float32) - w).norm() < 0.95 * (ends - w).norm()
    assert int(groups.numbers.min()) == 0 and int(groups.numbers.max()) == 15
    eight = quantize_groups(w, kernels=kernels, bits=8)
    assert (eight.plain(torch.float32) - w).norm() < 0.01 * w.norm()
    flat = quantize_groups(torch.full((2, 64), 0.75), torch.zeros(1, 64), kernels=kernels)
    assert flat.plain(torch.float32).tolist() == [[0.75] * 64] * 2 + [[0.0] * 64]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_are_not_finite_are_refused(value, bits):
    w = torch.randn(33, 64)
    w[32, 40] = value
    with pytest.raises(Unavailable, match="not finite"):
        quantize_groups(w, kernels=load_kernels(), bits=bits)


@pytest.mark.parametrize("size", [1e-12, 1e-8, 1e-6, 1, 1e7])
@pytest.mark.parametrize("make", [W4A8Linear, W4A8Head])
def test_weights_of_any_size_keep_their_numbers(size, make):
    layer = nn.Linear(64, 32, bias=False)
    layer.weight.data = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * size
    x = torch.randn(5, 64)
    with torch.inference_mode():
        got, want = make(layer, kernels=load_kernels())(x), layer(x)
    assert (got - want).norm() < 0.15 * want.norm()


@pytest.mark.parametrize("more", [dict(intermediate_size=80), dict(hidden_size=48, head_dim=16)])
@pytest.mark.parametrize("named", [True, False])
def test_models_whose_layers_fill_no_groups_are_refused_whole(tmp_path, more, named):
    model = tiny_model("llama", **more)
    if named:
        model.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="multiple of 32 inputs"):
        LLM(str(tmp_path) if named else model, quantization="w4a8")


def test_inputs_that_fill_no_groups_are_refused():
    with pytest.raises(Unavailable, match="multiple of 32 inputs, and this has 48"):
        W4A8Linear(nn.Linear(48, 8), kernels=load_kernels())
    with pytest.raises(UnsupportedModelError, match="w4a8"):
        LLM(tiny_model("llama"), quantization="w4a8", compile=False)


def test_wrong_kernels_are_noticed():
    kernels = load_kernels()

    apart = [f for f in GROUP_FORMS if f.block == f.group]  # the others are of blocks only
    found = [*quads_right(kernels)]
    assert all(found) and len(found) == 2 * len(apart) + len(BLOCKS)

    def checks(name, change):
        "What is found of kernels of which `name` is called otherwise."

        class Changed(dict):
            def __getitem__(self, key):
                call = kernels.calls[key]
                return (lambda *a: call(*change(*a))) if key[0] == name else call

        wrong = type(kernels).__new__(type(kernels))
        wrong.calls, wrong.tiles = Changed(), kernels.tiles
        return [*quads_right(wrong)]

    late = checks("quads_product", lambda *a: (*a[:2], None, *a[3:-2], a[-2] - 1, a[-1]))
    assert not all(late)
    short = checks("pack_quad_blocks", lambda *a: (*a[:3], a[3] - 1, *a[4:]))
    assert all(short[: -len(BLOCKS)]) and not any(short[-len(BLOCKS) :])


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    return files_of_families(tmp_path_factory)


@pytest.mark.parametrize("arch", FAMILIES)
def test_answers_are_those_of_the_models_own_code_on_such_layers(file_of, arch):
    mine = LLM(file_of(arch), dtype="fp32", quantization="w4a8")
    assert not any(m for m in mine.model.modules() if type(m) is nn.Linear)
    model, _ = load_model(file_of(arch), dtype="fp32", grouped=True, exact=False)
    assert any(hasattr(p, "groups") for p in model.parameters())
    fuse(model, load_kernels(), kv_layout(model), own=True, linear=W4A8Linear)
    prompts = [p[:40] for p in PROMPTS]
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    got = ids(mine.generate(prompts, params))
    want = oracle(model, prompts, 9)
    # rounding is a step function: the other code's last bits may cross one, and then a near tie
    assert sum(a == b for a, b in zip(got, want)) >= len(prompts) - 1
    theirs = [generated(model, p, 9) for p in prompts]
    assert sum(a == b for a, b in zip(got, theirs)) >= len(prompts) - 1


def test_the_numbers_of_a_file_stay_as_they_are(file_of):
    model, _ = load_model(file_of("llama"), dtype="fp32", grouped=True, exact=False)
    weight = model.model.layers[0].mlp.down_proj.weight
    layer = W4A8Linear(linear_of(weight), kernels=load_kernels())
    x = 127 * torch.eye(weight.shape[1])  # scales of 1
    assert torch.equal(layer(x).T, 127 * weight.dequantize())


@pytest.mark.parametrize("family", ["llama", "phimoe", "qwen3_moe", "gpt2"])
def test_other_ways_and_families(family):
    "Fused layers and modules; experts stay in int8; near to what bf16 and fp32 give."
    model = tiny_model(family)
    plain, mine = LLM(tiny_model(family)), LLM(model, quantization="w4a8")
    assert mine.backend.name in ("fused", "modules") and mine.backend.nbytes < plain.backend.nbytes
    if isinstance(mine.backend, ModuleBackend):
        made = {new for _, was, new, _ in mine.backend.modules.replaced if was == "Linear"}
        assert {"W4A8Linear", "W4A8Head"} & made
    else:
        assert type(mine.backend.fused.head) is W4A8Head
        experts = [x.gate_up for x in mine.backend.fused.experts if x is not None]
        assert {*map(type, experts)} <= {Int8Linear}
    hidden = [llm.logprobs([PROMPTS[1]])[0].logprobs for llm in (plain, mine)]
    a, b = (torch.tensor(x) for x in hidden)
    assert (a - b).norm() < 0.4 * a.norm()
