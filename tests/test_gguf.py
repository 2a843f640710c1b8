"""Weights that stay in the groups of a GGUF file: the numbers of the library's own reader, and the bits of bf16 and fp32."""

import sys
import warnings
from collections import Counter

import gguf
import numpy as np
import pytest
import torch
from batchlab import LLM, SamplingParams
from batchlab.errors import Unavailable
from batchlab.fast import fused, grouped as B
from batchlab.fast.grouped import GroupedLinear, Groups, dequantize_blocks, group_form_of
from batchlab.fast.grouped import grouped_product, pack_blocks, pack_groups, panel_table
from batchlab.fast.kernels import load_kernels
from batchlab.fast.packed import PackedLinear, plain_weight
from batchlab.models import gguf as G, load_model, tiny_gguf, tiny_model
from batchlab.models.gguf import numbers_of
from batchlab.models.load import keeps_groups
from torch import nn
from gguf_files import files_of_families
from helpers import generated, greedy, ids, in_threads, kept_model, told

FAMILIES = ["llama", "qwen3", "gemma3_text"]

HALVES = dict(
    Q4_0=[0], Q4_1=[0, 2], Q5_0=[0], Q5_1=[0, 2], Q8_0=[0], Q4_K=[0, 2], Q5_K=[0, 2], Q6_K=[208]
)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    return files_of_families(tmp_path_factory)


needs_groups = pytest.mark.skipif(
    not keeps_groups(torch.float32, "cpu"), reason="this processor gets plain numbers"
)


def random_blocks(form, n, K, seed=0):
    "Rows of blocks of `form` with any numbers in them, and scales of ordinary size."
    size, weights, *_ = G.QUANT_TYPES[form]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n, K // weights, size), dtype=np.uint8)
    for at in HALVES[form]:
        scales = rng.normal(size=(n, K // weights, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(n, -1)


def grouped(form, n, K, dtype, seed=0):
    return G.GroupedTensor(G.Blocks(torch.from_numpy(random_blocks(form, n, K, seed)), form), dtype)


def linear_of(weight, bias=None):
    layer = nn.Linear(1, 1)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return layer


@pytest.mark.parametrize("form", G.QUANT_TYPES)
def test_blocks_are_the_numbers_of_the_library(form):
    raw, kind = random_blocks(form, 33, 512), gguf.GGMLQuantizationType[form]
    want = gguf.quants.dequantize(raw, kind)
    assert np.array_equal(G.dequantize(raw, kind), want)
    weight = grouped(form, 33, 512, torch.bfloat16)
    assert torch.equal(weight.dequantize(), torch.from_numpy(want).to(torch.bfloat16))


def test_forms_that_do_not_stay_in_groups_go_to_the_library():
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float16)
    assert np.array_equal(G.dequantize(x, gguf.GGMLQuantizationType.F16), x.astype(np.float32))


BESIDE = [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", "Q8_0", None), ("Q4_1", "Q4_1", "Q4_1")]


@pytest.mark.parametrize("forms", [*((form,) for form in G.QUANT_TYPES), *BESIDE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_have_the_bits_of_those_by_plain_numbers(forms, dtype):
    "Of layers alone and side by side, which may have different forms, or none."
    kernels, gen = load_kernels(), torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=gen).to(dtype)
    for sizes, K in (((96, 32, 40), 256), ((70, 24, 8), 512), ((3, 64, 40), 2048)):
        kinds = [*zip(forms, sizes)]
        weights = [
            draw(n, K) if form is None else grouped(form, n, K, dtype, n) for form, n in kinds
        ]
        biases = [draw(n) if n in (70, 40) else None for _, n in kinds]
        mine = GroupedLinear(*map(linear_of, weights, biases), kernels=kernels)
        plain = PackedLinear(*map(linear_of, map(plain_weight, weights), biases), kernels=kernels)
        assert mine.sizes == plain.sizes
        assert mine.panels._length_ == -(-sum(n for _, n in kinds) // 32)
        if len(forms) == 1:
            full = sizes[0] == 96
            assert mine.weights[0][1] >= 0 and (not full or mine.nbytes < 1.03 * weights[0].nbytes)
        for rows in (0, 1, 2, 4, 8, 11, 12, 13, 16, 17, 23, 32, 33, 64, 65, 128, 129, 300):
            x = draw(rows, K)
            assert torch.equal(mine(x), plain(x)), (sizes, K, rows)


def random_weight(form, n, dtype):
    "A weight whose rows are in another order than those of its file."
    raw = torch.from_numpy(random_blocks(form, n, 512, 5))
    order = torch.from_numpy(np.random.default_rng(n).permutation(n))
    return G.GroupedTensor(G.Blocks(raw, form, order), dtype)


@pytest.mark.parametrize("form", G.QUANT_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_read_blocks_as_torch_does(form, dtype):
    weight, kernels = random_weight(form, 70, dtype), load_kernels()
    plain = weight.dequantize()
    assert torch.equal(plain, numbers_of(weight.raw, form, dtype)[weight.order])
    for at in (slice(None), slice(3, 40), torch.tensor([69, 0, 0]), slice(0, 0)):
        assert torch.equal(dequantize_blocks(kernels, weight, at), plain[at])
    panels, (_, kind) = pack_blocks([weight], kernels, dtype), B.BLOCKS[form]
    table, one = panel_table([(panels, kind.index)]), torch.eye(512, dtype=dtype)
    assert torch.equal(grouped_product(kernels, one, table, None, 70).T, plain)


def kept_rows(model):
    linears = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return sum(len(w) for w in linears if hasattr(w, "groups"))


@needs_groups
@pytest.mark.parametrize("arch", FAMILIES)
def test_opening_reads_each_weight_twice(file_of, arch, monkeypatch):
    "Once for the answers of the model's own code, once to pack it; by torch no more than is looked up."
    path, read = file_of(arch, "Q4_0"), Counter()
    rows = kept_rows(load_model(path, dtype="fp32", grouped=True)[0])

    def count(owner, name, rows_of):
        what = getattr(owner, name)

        def counted(*args, **more):
            read[name] += rows_of(*args)
            return what(*args, **more)

        monkeypatch.setattr(owner, name, counted)

    whole = lambda kernels, w, at: len(range(len(w))[at]) if isinstance(at, slice) else 0
    count(B, "dequantize_blocks", whole)
    count(B, "pack_blocks", lambda weights, *_: sum(map(len, weights)))
    count(G, "numbers_of", lambda raw, *_: len(raw))
    llm = LLM(path, dtype="fp32")
    assert llm.backend.name == "fused"
    assert read["dequantize_blocks"] == read["pack_blocks"] == rows
    assert read["numbers_of"] < 100 * (2 + 2 * llm.model.config.num_hidden_layers)


def test_what_layers_ask_does_not_depend_on_their_numbers(file_of):
    from batchlab.fast.trial import layer_specs

    for arch in FAMILIES:
        model = load_model(file_of(arch, "Q8_0"), dtype="fp32", grouped=True)[0]
        want = layer_specs(model)
        with G.without_numbers(model):
            assert layer_specs(model) == want
        ids = torch.tensor([[1, 2, 3]])
        with torch.inference_mode():
            assert model(ids).logits.abs().max() > 0  # they are back


def plainly(path):
    "The answers of a file whose weights are dequantised."
    return answers(LLM(*load_model(path, dtype="fp32")))


@needs_groups
def test_panels_that_are_not_the_weights_are_found_out(file_of, monkeypatch):
    "The model then runs in another way, by the file's weights, which are still there."
    path = file_of("llama", "Q4_0")
    want = plainly(path)
    pack = B.pack_blocks
    monkeypatch.setattr(B, "pack_blocks", lambda *args, **more: pack(*args, **more).flip(0))
    llm = LLM(path, dtype="fp32")
    assert llm.backend.name != "fused" and "differ from those alone" in llm.backend.why
    assert [a for a, _ in answers(llm)] == [a for a, _ in want]


@needs_groups
@pytest.mark.skipif(
    sys.platform != "linux", reason="pages of a mapped file are given back on Linux"
)
def test_pages_of_a_file_are_given_back_before_the_model_is_tried(file_of, monkeypatch):
    "So panels and the file don't take memory together; what is read again afterwards is the same."
    path, given, tried = file_of("llama", "Q4_0"), [], []
    want = plainly(path)
    release, check = fused.release_mapped_pages, fused.check_backend
    note = lambda raw, files: given.append((raw.nbytes, release(raw, files)))
    monkeypatch.setattr(fused, "release_mapped_pages", note)
    monkeypatch.setattr(
        fused, "check_backend", lambda *args: (tried.append(len(given)), check(*args))
    )
    model, tokenizer = load_model(path, dtype="fp32", grouped=True)
    llm = LLM(model, tokenizer)
    assert llm.backend.name == "fused" and answers(llm) == want
    before = given[: tried[0]]
    linears = [m for m in load_model(path, dtype="fp32")[0].modules() if isinstance(m, nn.Linear)]
    assert len(before) == len(linears) and any(back for _, back in before)
    assert all(n - back < 8192 for n, back in before)  # all but parts of pages


@needs_groups
def test_rows_are_looked_up_by_any_index_and_none_beyond_the_last(file_of):
    model = load_model(file_of("llama", "Q8_0"), dtype="fp32", grouped=True)[0]
    embedding, kernels = model.get_input_embeddings().weight, load_kernels()
    kernels.set_threads(1)
    at = torch.tensor([5, 1, 5, len(embedding) - 1])
    marked = torch.zeros(len(embedding), dtype=torch.bool).index_fill_(0, at, True)
    for index in (at, at.int(), marked, slice(1, 5), at[:0]):
        assert torch.equal(B.dequantize_blocks(kernels, embedding, index), embedding.rows(index))
    for beyond in (-1, len(embedding)):
        with pytest.raises(IndexError, match=str(beyond)):
            B.dequantize_blocks(kernels, embedding, torch.tensor([3, beyond]))


@needs_groups
def test_kernels_that_read_a_format_otherwise_are_not_used(file_of, monkeypatch):
    path = file_of("llama", "Q4_0")
    want = plainly(path)
    right = B.dequantize_blocks
    monkeypatch.setattr(
        B, "dequantize_blocks", lambda *args: right(*args).nextafter(torch.tensor(9.0))
    )
    model = load_model(path, dtype="fp32", grouped=True)[0]
    with pytest.raises(Unavailable, match="otherwise"), B.quick_rows(model, load_kernels()):
        pass
    llm = LLM(path, dtype="fp32")
    assert llm.backend.name != "fused"
    assert [a for a, _ in answers(llm)] == [a for a, _ in want]


def test_a_grouped_tensor_is_its_numbers_for_torch():
    w = nn.Parameter(grouped("Q4_1", 40, 64, torch.bfloat16), requires_grad=False)
    plain, x = w.dequantize(), torch.randn(3, 64).bfloat16()
    assert type(plain) is torch.Tensor and w.shape == (40, 64) and w.nbytes == 40 * 2 * 20
    assert torch.equal(nn.functional.linear(x, w), nn.functional.linear(x, plain))
    ids = torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(nn.functional.embedding(ids, w), plain[ids])
    assert torch.equal(w[:16], plain[:16]) and torch.equal(w + 1, plain + 1)
    assert torch.equal(w.float(), plain.float()) and torch.equal(w.T, plain.T)


def test_metadata_read_at_once_is_what_the_library_reads(tmp_path):
    path = tiny_gguf(tmp_path / "tiny.gguf")
    mine, theirs = G.open_gguf(path), gguf.GGUFReader(path)
    assert [*mine.fields] == [*theirs.fields]
    for a, b in zip(mine.fields.values(), theirs.fields.values()):
        assert (a.types, a.contents()) == (b.types, b.contents())
    for a, b in zip(mine.tensors, theirs.tensors):
        assert a.name == b.name and np.array_equal(a.data, b.data)


PROMPTS = [[1, 5, 9], [1, *range(30, 42)], [7], [1, 50, 51, 52, 53], [1, *range(60, 160)]]


def answers(llm, n=9):
    params = [
        SamplingParams(max_tokens=n, temperature=t, seed=3, ignore_eos=True, logprobs=2)
        for t in (0, 1)
    ]
    outs = llm.generate(PROMPTS * 4, params * 10)
    return told(outs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_answers_have_the_bits_of_those_by_plain_numbers(file_of, arch, kind, dtype):
    "Also of a prompt of several steps, in some of which the head has no rows."
    path = file_of(arch, kind)
    model, tok = load_model(path, dtype=dtype)
    plain = LLM(model, tokenizer=tok)
    mine = LLM(path, dtype=dtype, max_num_seqs=8, max_num_batched_tokens=64)
    assert mine.backend.name == plain.backend.name == "fused"
    if keeps_groups(model.dtype, "cpu"):  # else they were dequantised
        assert mine.backend.nbytes < plain.backend.nbytes
    assert answers(mine) == answers(plain)
    for prompt in PROMPTS if dtype == "fp32" else PROMPTS[-1:]:
        got = ids(mine.generate([prompt], greedy(9)))
        if dtype == "fp32":
            assert got == [generated(model, prompt, 9)]
        else:
            assert got == ids(plain.generate([prompt], greedy(9)))


@pytest.mark.parametrize(
    "options",
    [
        dict(compile=False),
        dict(quantization="int8"),
        dict(strategy="loop"),
        dict(strategy="static"),
    ],
    ids=str,
)
def test_ways_that_know_no_groups_get_plain_numbers(file_of, options):
    path = file_of("llama", "Q4_0")
    plain, mine = (
        LLM(*load_model(path, dtype="fp32"), **options),
        LLM(path, dtype="fp32", **options),
    )
    assert not kept_rows(mine.model)
    assert [a for a, _ in answers(mine)] == [a for a, _ in answers(plain)]


def test_what_does_not_fit_is_refused():
    kernels, w = load_kernels(), grouped("Q8_0", 64, 96, torch.float32)
    groups, x = Groups(*w.groups()), torch.randn(2, 96)
    assert group_form_of(groups._replace(scales=groups.scales[:, :2].repeat(1, 2))) is None
    assert group_form_of(groups._replace(scales=groups.scales.bfloat16())) is None
    form, wider = group_form_of(groups), groups._replace(scales=groups.scales.float())
    table = panel_table([(pack_groups(groups, form, kernels, torch.float32), form.index)])
    layer = GroupedLinear(linear_of(w), kernels=kernels)
    for call, words in (
        (lambda: grouped_product(kernels, x, table, None, 70), "70 outputs have 3 panels"),
        (lambda: pack_groups(wider, form, kernels, torch.float32), "a kernel wants"),
        (lambda: layer(x.bfloat16()), "packed for torch.float32"),
        (lambda: w.mul_(2), "can't be written"),
        (lambda: w.copy_(torch.zeros(64, 96)), "can't be written"),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    assert nn.functional.embedding(torch.zeros(0, dtype=torch.int64), w).shape == (0, 96)


def test_another_thread_builds_modules_with_numbers_meanwhile(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM as auto

    make, built = auto.from_config, []

    def slowly(*args, **how):
        built.extend(in_threads(lambda: nn.Linear(2, 2)))
        return make(*args, **how)

    monkeypatch.setattr(auto, "from_config", slowly)
    model, _ = load_model(tiny_gguf(tmp_path / "tiny.gguf"))
    assert [p.is_meta for m in (*built, model) for p in m.parameters()].count(True) == 0


def test_threads_that_load_leave_the_process_as_it_was(tmp_path):
    "transformers sets torch's dtype meanwhile; without a lock the second keeps what the first has set."
    from transformers.utils import logging as tl

    want = [tiny_model("llama", seed).to(torch.bfloat16) for seed in range(2)] * 2
    files = [tiny_gguf(tmp_path / f"{seed}.gguf", seed) for seed in range(2)]
    files += [kept_model(tmp_path / str(seed), want[seed]) for seed in range(2)]
    state = lambda: (
        torch.get_default_dtype(),
        tl.get_verbosity(),
        len(warnings.filters),
        gguf.GGUFReader,
    )
    before = state()
    loads = [lambda f=f: [load_model(f, dtype="bf16") for _ in range(5)] for f in files]
    for some, model in zip(in_threads(*loads), want):
        numbers = model.state_dict()
        for loaded, _ in some:
            assert all(torch.equal(p, numbers[k]) for k, p in loaded.state_dict().items())
    assert state() == before


def test_a_generation_config_beside_the_file_counts(tmp_path):
    from transformers import GenerationConfig

    path = tiny_gguf(tmp_path / "tiny.gguf")
    assert load_model(path)[0].generation_config.eos_token_id == 2
    GenerationConfig(eos_token_id=[2, 9], do_sample=True, temperature=0.5).save_pretrained(tmp_path)
    for kept in (False, True):
        found = load_model(path, grouped=kept)[0].generation_config
        assert found.eos_token_id == [2, 9] and found.temperature == 0.5


def test_advice_knows_weights_in_groups(file_of):
    from batchlab.jobs.advice import try_int8

    path = file_of("llama", "Q4_0")
    kept, plain = LLM(path, dtype="fp32"), LLM(*load_model(path, dtype="fp32"))
    [said] = [m.said(str) for m in try_int8(plain)]
    assert "half as large as in bf16" in said
    [said] = [m.said(str) for m in try_int8(kept)]
    assert ("whole numbers" in said) == keeps_groups(torch.float32, "cpu")
