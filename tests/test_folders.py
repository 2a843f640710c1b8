"""Folders that AWQ, GPTQ or compressed-tensors packed: the weights of the published formula, to the bit, and the answers of the dequantised model."""

import json, shutil

import pytest
import torch
from batchlab import LLM, SamplingParams
from batchlab.api.unloaded import UnloadedLLM
from batchlab.cli import main
from batchlab.errors import ModelError, UnsupportedModelError
from batchlab.fast.grouped import FORMS, GroupedLinear, Groups, form_of
from batchlab.fast.kernels import load_kernels
from batchlab.fast.packed import PackedLinear, densify, plain_weight
from batchlab.llm.config import weights_digest
from batchlab.models import load, load_model, tiny_model, tiny_tokenizer
from batchlab.models.gguf import GroupedTensor
from batchlab.models.load import keeps_groups
from batchlab.models.tiny import tiny_adapter
from batchlab.tasks.lora import LoRARequest
from helpers import generated, greedy, ids
from safetensors.torch import load_file, save_file
from torch import nn

DTYPES = [torch.float32, torch.bfloat16]


def words(numbers, bits):
    "Rows of numbers without a sign as rows of int32 words, the first number in the lowest bits."
    per, rows = 32 // bits, []
    for row in numbers:
        row, packed = list(row), []
        for i in range(0, len(row), per):
            word = 0
            for j, number in enumerate(row[i : i + per]):
                assert 0 <= number < 2**bits
                word |= number << (bits * j)
            packed.append(word - 2**32 if word >= 2**31 else word)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


def quantise(w, bits, index, symmetric, scales):
    "Numbers `[N, K]` and zero points `[N, groups]` without a sign, and scales of a dtype; column k is of group `index[k]`."
    w, parts, zeros = w.double(), [], []
    for g in range(int(index.max()) + 1):
        own = w[:, index == g]
        if symmetric:
            scale, zero = own.abs().amax(1) / (2 ** (bits - 1) - 1), None
        else:
            low = own.amin(1).clamp(max=0)
            scale = (own.amax(1).clamp(min=0) - low) / (2**bits - 1)
            zero = (-low / scale).round().clamp(1, 2**bits - 1)
        parts.append(scale.clamp(min=1e-4).to(scales))
        zeros.append(torch.full_like(scale, 2 ** (bits - 1)) if zero is None else zero)
    s, z = torch.stack(parts, 1), torch.stack(zeros, 1).long()
    q = (w / s.double()[:, index]).round() + z[:, index]
    return q.clamp(0, 2**bits - 1).long(), z, s


def formula(q, z, s, index, dtype):
    "The weight, by a product of whole numbers and scales that fp64 holds without rounding."
    return ((q - z[:, index]).double() * s.double()[:, index]).to(torch.float32).to(dtype)


def awq(q, z, s, index, bits, **_):
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the output in each place of a word
    mixed = lambda row: [row[i + j] for i in range(0, len(row), 8) for j in order]
    pack = lambda x: words(map(mixed, x.T.tolist()), 4)
    return dict(qweight=pack(q), qzeros=pack(z), scales=s.T)


def gptq(q, z, s, index, bits, version=1, g_idx=True, **_):
    less = 1 if version == 1 else 0
    found = dict(
        qweight=words(q.tolist(), bits).T, qzeros=words((z - less).T.tolist(), bits), scales=s.T
    )
    return found | (dict(g_idx=index.int()) if g_idx else {})


def compressed(q, z, s, index, bits, symmetric, order=None, **_):
    found = dict(weight_packed=words(q.tolist(), bits), weight_shape=torch.tensor(q.shape))
    found["weight_scale"] = s
    if not symmetric:
        found["weight_zero_point"] = words(z.T.tolist(), bits).T
    return found | (dict(weight_g_idx=index.int()) if order == "group" else {})


def int8(q, z, s, index, bits, symmetric, **_):
    middle = 2 ** (bits - 1)
    found = dict(weight=(q - middle).to(torch.int8), weight_scale=s)
    return found | ({} if symmetric else dict(weight_zero_point=(z - middle).to(torch.int8)))


def config_of(write, bits, group, symmetric, order=None, version=1, skip=(), **_):
    "What such a folder's `quantization_config` says."
    if write is awq:
        names = dict(modules_to_not_convert=[*skip]) if skip else {}
        about = dict(quant_method="awq", bits=4, group_size=group, version="gemm")
        return about | dict(zero_point=not symmetric) | names
    if write is gptq:
        about = dict(quant_method="gptq", bits=bits, group_size=group, sym=symmetric)
        more = dict(checkpoint_format="gptq_v2") if version == 2 else {}
        return about | dict(desc_act=order is not None) | more
    how = dict(num_bits=bits, type="int", symmetric=symmetric, dynamic=False, actorder=order)
    how |= dict(strategy="channel" if group < 0 else "group")
    how |= {} if group < 0 else dict(group_size=group)
    form = "int-quantized" if write is int8 else "pack-quantized"
    scheme = dict(targets=["Linear"], weights=how, input_activations=None, output_activations=None)
    return dict(
        quant_method="compressed-tensors",
        format=form,
        quantization_status="compressed",
        ignore=["lm_head", *skip],
        config_groups=dict(group_0=scheme),
    )


def index_of(K, group, order, seed=0):
    "The group of each of `K` columns: in turn, or drawn."
    plain = torch.arange(K) // (group if group > 0 else K)
    if order is None:
        return plain
    return plain[torch.randperm(K, generator=torch.Generator().manual_seed(seed))]


def write_folder(
    folder, model, write, bits=4, group=128, symmetric=True, scales=torch.float16, own=None, **how
):
    """`model` in `folder` with packed linear layers, all but the head and those in `skip`; and the
    weights that the formula gives, by the names in the file and dtype. `own`: for a name what is
    other with its layer, or None if it is not packed."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    kept, want = load_file(folder / "model.safetensors"), {}
    other = ("embed", "norm", "lm_head", "gate.weight", *how.get("skip", ()))
    for name, w in [*kept.items()]:
        if w.dim() < 2 or any(part in name for part in other):
            continue
        usual = dict(bits=bits, group=group, symmetric=symmetric)
        if (other_than := own(name) if own else {}) is None:
            continue
        z = usual | other_than
        index = index_of(w.shape[1], z["group"], how.get("order"))
        parts = quantise(kept.pop(name), z["bits"], index, z["symmetric"], scales)
        more = write(*parts, index, bits=z["bits"], symmetric=z["symmetric"], **how)
        layer = name.removesuffix(".weight")
        kept |= {f"{layer}.{end}": t.contiguous() for end, t in more.items()}
        want[name] = {d: formula(*parts, index, d) for d in DTYPES}
    save(folder, kept, config_of(write, bits, group, symmetric, **how))
    return want


def save(folder, weights, packing):
    "Put `weights` in the place of those in `folder`, and `packing` into its configuration."
    weights = {name: x.contiguous().clone() for name, x in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))
    about = json.loads((folder / "config.json").read_text()) | dict(quantization_config=packing)
    (folder / "config.json").write_text(json.dumps(about))


def sized(arch="llama", **more):
    "A tiny model whose layers have whole groups of 128, and heads whose keys fill no whole panel."
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=32)
    return tiny_model(arch, **sizes | dict(num_key_value_heads=2) | more)


HALF, BRAIN = torch.float16, torch.bfloat16
KINDS = {
    "awq": dict(write=awq, symmetric=False),
    "awq, groups of 64": dict(write=awq, group=64, symmetric=False),
    "awq, groups of 32": dict(write=awq, group=32, symmetric=False),
    "awq, no zero points": dict(write=awq),
    "gptq": dict(write=gptq),
    "gptq, zero points": dict(write=gptq, group=64, symmetric=False),
    "gptq_v2": dict(write=gptq, group=32, symmetric=False, version=2),
    "gptq, a scale a row": dict(write=gptq, group=-1, g_idx=False),
    "gptq, 8 bits": dict(write=gptq, bits=8, group=32),
    "gptq, 8 bits and zero points": dict(write=gptq, bits=8, group=-1, symmetric=False),
    "gptq_v2, 8 bits": dict(write=gptq, bits=8, symmetric=False, version=2),
    "gptq, desc_act": dict(write=gptq, group=32, order="group"),
    "gptq, desc_act, a scale a row": dict(write=gptq, group=-1, order="group"),
    "compressed": dict(write=compressed, scales=BRAIN),
    "compressed, zero points": dict(write=compressed, group=32, symmetric=False, scales=BRAIN),
    "compressed, a scale a row": dict(write=compressed, group=-1, scales=BRAIN),
    "compressed, zero points, a row": dict(write=compressed, group=-1, symmetric=False),
    "compressed, 8 bits": dict(write=compressed, bits=8, group=-1, scales=torch.float32),
    "compressed, 8 bits, zero points": dict(write=compressed, bits=8, group=64, symmetric=False),
    "compressed, ordered": dict(write=compressed, group=64, order="group", symmetric=False),
    "int8": dict(write=int8, bits=8, group=-1, scales=BRAIN),
    "int8, zero points": dict(write=int8, bits=8, group=-1, symmetric=False),
}
APART = {"gptq, desc_act", "compressed, ordered"}  # what can't stay in groups


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A folder of a kind of `KINDS`, made once, and the weights of the formula."
    found = {}

    def make(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp("packed")
            found[kind] = folder, write_folder(folder, sized().to(HALF), **KINDS[kind])
        return found[kind]

    return make


@pytest.fixture
def any_machine(monkeypatch):
    "Groups stay, whatever this machine's kernels make of them."
    monkeypatch.setattr(load, "keeps_groups", lambda *_: True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_formula(made, any_machine, kind, dtype):
    folder, want = made(kind)
    kept, plain = (load_model(folder, dtype=dtype, grouped=g)[0] for g in (True, False))
    packed = {name for name, p in kept.named_parameters() if isinstance(p, GroupedTensor)}
    assert packed == (set() if kind in APART else want.keys())
    assert not any(isinstance(p, GroupedTensor) for p in plain.parameters())
    for model in (kept, plain):
        own = dict(model.named_parameters())
        assert all(torch.equal(plain_weight(own[name]), w[dtype]) for name, w in want.items())
        assert not hasattr(model.config, "quantization_config") and model.dtype == dtype
    assert weights_digest(kept) == weights_digest(plain)
    rest = sized().to(HALF).state_dict()
    assert all(
        torch.equal(p, rest[name].to(dtype))
        for name, p in kept.named_parameters()
        if name not in want
    )
    densify(kept)
    assert all(torch.equal(p, plain.state_dict()[n]) for n, p in kept.state_dict().items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256, -1])
@pytest.mark.parametrize(
    "write, bits", [(awq, 4), (gptq, 4), (gptq, 8), (compressed, 4), (int8, 8)]
)
def test_products_have_the_bits_of_those_by_plain_numbers(
    tmp_path, any_machine, write, bits, group, symmetric, scales, dtype
):
    kernels, gen = load_kernels(), torch.Generator().manual_seed(group + 2)
    for N, K in ((40, 256), (104, 512)):
        index = index_of(K, group, None)
        w = torch.randn(N, K, generator=gen) * torch.rand(N, 1, generator=gen)
        parts = quantise(w, bits, index, symmetric, scales)
        tensors = write(*parts, index, bits=bits, symmetric=symmetric)
        weight = read(tmp_path, tensors, write, bits, group, dtype)
        assert torch.equal(weight.dequantize(), formula(*parts, index, dtype))
        some = torch.tensor([N - 1, 3, 9])
        assert torch.equal(weight.rows(some), weight.dequantize()[some])
        assert torch.equal(weight[3:21], weight.dequantize()[3:21])
        layer = linear_of(weight)
        mine, plain = GroupedLinear(layer, kernels=kernels), plain_linear(layer, kernels)
        assert mine.weights[0][1] >= 0 and mine.nbytes < N * K * dtype.itemsize
        for rows in (1, 5, 13, 64):
            x = torch.randn(rows, K, generator=gen).to(dtype)
            assert torch.equal(mine(x), plain(x)), (N, K, rows)


def read(folder, tensors, write, bits, group, dtype, name="model.safetensors"):
    "The weight of one packed layer of a file."
    from batchlab.models.quantized import packing_of, read_weights

    save_file({f"up.{end}": t.contiguous() for end, t in tensors.items()}, folder / name)
    config = type("Config", (), {})
    config.quantization_config = config_of(write, bits, group, True)
    return read_weights([folder / name], packing_of(config), dtype, True).state["up.weight"]


def linear_of(weight, bias=None):
    layer = nn.Linear(1, 1, bias=False)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def plain_linear(layer, kernels):
    return PackedLinear(linear_of(plain_weight(layer.weight)), kernels=kernels)


@pytest.mark.parametrize("K, filled", [(192, False), (192, True), (960, False), (480, False)])
def test_the_last_group_may_be_short(tmp_path, K, filled):
    "Also where the columns could be shared out evenly."
    gen, index = torch.Generator().manual_seed(2), index_of(K, 128, None)
    parts = quantise(torch.randn(48, K, generator=gen), 4, index, False, HALF)
    weight = read(tmp_path, gptq(*parts, index, 4, g_idx=filled), gptq, 4, 128, torch.float32)
    assert torch.equal(plain_weight(weight), formula(*parts, index, torch.float32))


def test_a_layer_may_have_other_bits_than_its_folder(tmp_path):
    gen, index = torch.Generator().manual_seed(3), index_of(256, 64, None)
    for filled in (True, False):
        parts = quantise(torch.randn(48, 256, generator=gen), 8, index, False, HALF)
        weight = read(tmp_path, gptq(*parts, index, 8, g_idx=filled), gptq, 4, 64, torch.float32)
        assert torch.equal(plain_weight(weight), formula(*parts, index, torch.float32))


def test_an_order_that_was_never_filled_in_is_none(tmp_path):
    gen, index = torch.Generator().manual_seed(4), index_of(256, 64, None)
    parts = quantise(torch.randn(48, 256, generator=gen), 4, index, False, HALF)
    tensors = gptq(*parts, index, 4) | dict(g_idx=torch.zeros(256, dtype=torch.int32))
    weight = read(tmp_path, tensors, gptq, 4, 64, torch.float32)
    assert torch.equal(plain_weight(weight), formula(*parts, index, torch.float32))


DYNAMIC = dict(quant_method="gptq", bits=4, dynamic={"-:.*(down": {}})


@pytest.mark.parametrize(
    "packing", ["gptq", ["gptq"], dict(quant_method="gptq", bits="four"), DYNAMIC], ids=str
)
def test_a_damaged_configuration_is_named(tmp_path, made, packing):
    shutil.copytree(made("gptq")[0], tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | dict(quantization_config=packing)))
    with pytest.raises(ModelError) as e:
        load_model(tmp_path / "m")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_that_need_fp32(tmp_path, any_machine, dtype):
    "Without zero points they stay in groups; with them a product is not exact, and the weight is dequantised."
    gen, index = torch.Generator().manual_seed(1), index_of(256, 64, None)
    for symmetric in (True, False):
        parts = quantise(torch.randn(48, 256, generator=gen), 4, index, symmetric, torch.float32)
        tensors = compressed(*parts, index, bits=4, symmetric=symmetric)
        weight = read(tmp_path, tensors, compressed, 4, 64, dtype)
        assert isinstance(weight, GroupedTensor) == symmetric
        q, z, s = parts
        want = ((q - z[:, index]).float() * s[:, index]).to(dtype)
        assert torch.equal(plain_weight(weight), want)
        if symmetric:
            kernels = load_kernels()
            mine, plain = (
                GroupedLinear(linear_of(weight), kernels=kernels),
                plain_linear(linear_of(weight), kernels),
            )
            x = torch.randn(3, 256, generator=gen).to(dtype)
            assert mine.weights[0][1] >= 0
            assert torch.equal(mine(x), plain(x))


def test_layers_side_by_side_may_have_groups_of_different_sizes(tmp_path, any_machine):
    kernels, layers = load_kernels(), []
    for i, (N, group) in enumerate([(64, 128), (32, 256), (40, -1), (24, 64)]):
        index = index_of(256, group, None)
        parts = quantise(torch.randn(N, 256), 4, index, True, HALF)
        tensors = gptq(*parts, index, bits=4)
        layers.append(
            linear_of(read(tmp_path, tensors, gptq, 4, group, torch.float32, f"{i}.safetensors"))
        )
    x = torch.randn(7, 256)
    for joined in (layers, layers[:3], layers[2:]):
        apart = torch.cat([plain_linear(l, kernels)(x) for l in joined], 1)
        assert torch.equal(GroupedLinear(*joined, kernels=kernels)(x), apart)


def test_a_form_is_the_one_of_the_largest_groups():
    numbers = torch.zeros(32, 768, dtype=torch.int8)
    size = lambda n, **more: (
        form_of(Groups(numbers, torch.ones(32, n, dtype=HALF), None, 4, **more)).group
    )
    assert [size(n) for n in (24, 12, 6, 3, 1)] == [32, 64, 128, 128, 128]
    assert size(8) == 32 and len({(f.bits, f.group, f.scale, f.offsets) for f in FORMS}) == len(
        FORMS
    )


PROMPTS = [[1, 5, 9], [1, 30, 31, 32, 33, 34, 35, 40, 41, 42, 43, 44, 45], [7], [1, 50, 51, 52, 53]]


def answers(llm, n=8):
    seeded = SamplingParams(max_tokens=n, temperature=1, seed=3, ignore_eos=True, logprobs=2)
    outs = llm.generate(PROMPTS * 4, [greedy(n, logprobs=2), seeded] * 8)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outs]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_have_the_bits_of_the_dequantised_model(made, kind, dtype):
    folder, _ = made(kind)
    model, tok = load_model(folder, dtype=dtype)
    plain, mine = LLM(model, tokenizer=tok), LLM(folder, dtype=dtype)
    assert mine.backend.name == plain.backend.name == "fused"
    if keeps_groups(model.dtype, "cpu") and kind not in APART:
        assert mine.backend.nbytes < plain.backend.nbytes
    assert answers(mine) == answers(plain)
    if dtype == "fp32":
        for prompt in PROMPTS:
            assert ids(mine.generate([prompt], greedy(8)))[0] == generated(model, prompt, 8)


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
def test_ways_that_know_no_groups_get_plain_numbers(made, options):
    folder, _ = made("awq")
    model, tok = load_model(folder, dtype="fp32")
    plain, mine = LLM(model, tokenizer=tok, **options), LLM(folder, dtype="fp32", **options)
    assert not any(isinstance(p, GroupedTensor) for p in mine.model.parameters())
    assert [a for a, _ in answers(mine)] == [a for a, _ in answers(plain)]


FAMILIES = {
    "qwen2": dict(),
    "qwen3": dict(tie_word_embeddings=True),
    "gemma3": dict(tie_word_embeddings=True),
    "phi3": dict(),
    "gpt_neox": dict(),
    "opt": dict(),
    "mixtral": dict(),
    "qwen3_moe": dict(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("write", [awq, gptq, compressed])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_as_transformers_reads_the_same_numbers(
    tmp_path, any_machine, family, write, dtype
):
    "Also where it renames and joins weights, as those of experts, and ties the head."
    (packed := tmp_path / "packed").mkdir()
    model = tiny_model(family, **FAMILIES[family])
    want = write_folder(packed, model, write, group=32, symmetric=False)
    model.save_pretrained(plain := tmp_path / "plain")
    weights = load_file(plain / "model.safetensors")
    weights |= {name: w[torch.float32] for name, w in want.items()}
    save_file(weights, plain / "model.safetensors", metadata=dict(format="pt"))
    mine, theirs = (load_model(f, dtype=dtype, grouped=True)[0] for f in (packed, plain))
    assert any(isinstance(p, GroupedTensor) for p in mine.parameters())
    x = torch.tensor([[1, 20, 40, 60]])
    with torch.inference_mode():
        assert torch.equal(mine(x).logits, theirs(x).logits)
    tied = lambda m: m.get_output_embeddings().weight is m.get_input_embeddings().weight
    assert tied(mine) == tied(theirs)
    densify(mine)
    own = theirs.state_dict()
    assert all(torch.equal(p, own[name]) for name, p in mine.state_dict().items())


def test_layers_that_are_not_packed_stay_as_they_are(tmp_path, any_machine):
    how = dict(write=awq, symmetric=False, skip=("layers.0.", "down_proj"))
    want = write_folder(tmp_path, sized().to(HALF), **how)
    model, _ = load_model(tmp_path, dtype="fp32", grouped=True)
    packed = {name for name, p in model.named_parameters() if isinstance(p, GroupedTensor)}
    assert packed == want.keys() and len(packed) == 6


def by_name(**rules):
    "What `own` of `write_folder` is, by parts of names: the first that a layer's has, else as usual."
    return lambda name: next((own for part, own in rules.items() if part in name), {})


def but(*parts):
    "Only layers with one of these parts in their names are packed."
    return lambda name: {} if any(part in name for part in parts) else None


def groups_of_layers(**targets):
    "Schemes of 4 bits in groups of 128 for these `targets`."
    how = config_of(compressed, 4, 128, True)["config_groups"]["group_0"]
    return {name: how | dict(targets=t) for name, t in targets.items()}


EIGHT = config_of(compressed, 8, -1, True)["config_groups"]["group_0"]
# of each: how it is written, which layers are others than usual, and what the configuration says of it
CHOSEN = {
    "awq, parts of names": (
        dict(write=awq, symmetric=False),
        by_name(**{"layers.0.": None, "down_proj": None}),
        dict(modules_to_not_convert=["layers.0.", "down_proj"]),
    ),
    "gptq, dynamic": (
        dict(write=gptq),
        by_name(
            **{"layers.0.self_attn": None},
            down_proj=dict(bits=8, group=32),
            up_proj=dict(group=64, symmetric=False),
        ),
        dict(
            dynamic={
                r"-:.*\.0\.self_attn\.": {},
                r"+:.*\.down_proj": dict(bits=8, group_size=32),
                r".*\.up_proj": dict(group_size=64, sym=False),
            }
        ),
    ),
    "gptq, names in a block": (
        dict(write=gptq, group=32),
        but("self_attn.q_proj", "mlp.gate_proj"),
        dict(modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.gate_proj"]]),
    ),
    "compressed, targets by expression": (
        dict(write=compressed),
        but("mlp"),
        dict(config_groups=groups_of_layers(one=["re:.*mlp.*"])),
    ),
    "compressed, targets by name": (
        dict(write=compressed),
        but("layers.1.mlp.up_proj", "layers.0.self_attn.o_proj"),
        dict(
            config_groups=groups_of_layers(
                one=["model.layers.1.mlp.up_proj"], two=["model.layers.0.self_attn.o_proj"]
            )
        ),
    ),
    "compressed, two schemes and what is ignored": (
        dict(write=compressed),
        by_name(
            **{"layers.1.mlp.gate_proj": None, "layers.0.": None}, down_proj=dict(bits=8, group=-1)
        ),
        dict(
            config_groups=groups_of_layers(one=["Linear"])
            | dict(two=EIGHT | dict(targets=["re:.*down_proj$"])),
            # the last is the name of no linear layer
            ignore=[
                "lm_head",
                r"re:.*layers\.0\.",
                "model.layers.1.mlp.gate_proj",
                "model.layers.1.self_attn",
            ],
        ),
    ),
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_plans_know_which_layers_are_packed(tmp_path, any_machine, kind):
    "By the configuration alone, the very layers that are packed in the files, and how many bytes they take."
    how, own, about = CHOSEN[kind]
    want = write_folder(tmp_path, sized().to(HALF), own=own, **how)
    weights = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    save(tmp_path, weights, config | about)
    read, planned = (
        {name: p for name, p in model.named_parameters() if isinstance(p, GroupedTensor)}
        for model in (
            load_model(tmp_path, dtype="fp32", grouped=True)[0],
            load.load_outline(tmp_path, "fp32", "cpu", True)[0],
        )
    )
    assert read.keys() == planned.keys() == want.keys() and 0 < len(want) < 14
    for name, p in read.items():
        assert torch.equal(plain_weight(p), want[name][torch.float32])
        packed = GroupedLinear(linear_of(p), kernels=load_kernels()).nbytes
        assert planned[name].nbytes == pytest.approx(packed, rel=0.01), name


@pytest.mark.parametrize("kind", KINDS)
def test_plans_know_what_stays_in_groups(made, any_machine, kind):
    folder, want = made(kind)
    outline, *_ = load.load_outline(folder, "fp32", "cpu", True)
    planned = {name for name, p in outline.named_parameters() if isinstance(p, GroupedTensor)}
    assert planned == (set() if kind in APART else want.keys())


@pytest.mark.parametrize("write", [awq, gptq])
def test_plans_leave_a_head_of_another_name_as_it_is(tmp_path, any_machine, write):
    want = write_folder(tmp_path, tiny_model("gpt_neox"), write, group=32, symmetric=False)
    outline, *_ = load.load_outline(tmp_path, "fp32", "cpu", True)
    assert isinstance(outline.get_output_embeddings(), nn.Linear)
    planned = {name for name, p in outline.named_parameters() if isinstance(p, GroupedTensor)}
    assert planned == want.keys()


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_may_be_packed_too(tmp_path, any_machine, tied):
    "Also beside an embedding that the configuration ties to it."
    model = sized(vocab_size=272)
    write_folder(tmp_path, model, gptq, group=32)
    weights = load_file(tmp_path / "model.safetensors")
    index = index_of(128, 32, None)
    head = weights.pop("lm_head.weight")
    parts = quantise(head, 4, index, True, HALF)
    head = gptq(*parts, index, bits=4)
    weights |= {f"lm_head.{end}": t for end, t in head.items()}
    about = json.loads((tmp_path / "config.json").read_text()) | dict(tie_word_embeddings=tied)
    (tmp_path / "config.json").write_text(json.dumps(about))
    save(tmp_path, weights, config_of(gptq, 4, 32, True) | dict(lm_head=True))
    found, tok = load_model(tmp_path, dtype="fp32", grouped=True)
    assert torch.equal(plain_weight(found.lm_head.weight), formula(*parts, index, torch.float32))
    assert answers(LLM(tmp_path, dtype="fp32")) == answers(
        LLM(load_model(tmp_path, dtype="fp32")[0], tok)
    )


def test_keys_that_fill_no_whole_panel(tmp_path):
    model = sized(num_attention_heads=4, head_dim=24, num_key_value_heads=1)
    write_folder(tmp_path, model, awq, group=32, symmetric=False)
    plain, tok = load_model(tmp_path, dtype="bf16")
    assert answers(LLM(tmp_path, dtype="bf16")) == answers(LLM(plain, tok))


def test_biases_of_zeros_that_writers_add_are_left_out(tmp_path):
    want = write_folder(tmp_path, sized(), gptq)
    weights, about = load_file(tmp_path / "model.safetensors"), config_of(gptq, 4, 128, True)
    bias = {
        name.removesuffix("weight") + "bias": torch.zeros(len(w[torch.float32]))
        for name, w in want.items()
    }
    save(tmp_path, weights | bias, about)
    load_model(tmp_path)
    bias = {name: x + 1 for name, x in bias.items()}
    save(tmp_path, weights | bias, about)
    with pytest.raises(UnsupportedModelError, match="has no place for .*bias"):
        load_model(tmp_path)


def test_several_files(tmp_path, made):
    folder, _ = made("compressed")
    weights = load_file(folder / "model.safetensors")
    for f in folder.iterdir():
        (tmp_path / f.name).write_bytes(f.read_bytes())
    (tmp_path / "model.safetensors").unlink()
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in {*where.values()}:
        save_file({n: x for n, x in weights.items() if where[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(metadata={}, weight_map=where)))
    a, b = (load_model(f, dtype="fp32")[0] for f in (folder, tmp_path))
    assert weights_digest(a) == weights_digest(b)
    (tmp_path / "model-0.safetensors").unlink()
    with pytest.raises(ModelError, match="missing"):
        load_model(tmp_path)


SCHEME = dict(weights=dict(num_bits=4, type="int", strategy="group", group_size=32))
CT = dict(quant_method="compressed-tensors", format="pack-quantized")


def scheme(**more):
    "A configuration of compressed-tensors whose only scheme has `more`."
    return CT | dict(config_groups=dict(group_0=SCHEME | more))


def of_weights(**more):
    return scheme(weights=SCHEME["weights"] | more)


@pytest.mark.parametrize(
    "packing, said",
    [
        (dict(quant_method="awq", bits=4, version="gemv"), "AWQ in the form 'gemv'"),
        (dict(quant_method="awq", bits=4, version="GEMV_FAST"), "AWQ in the form 'gemv_fast'"),
        (dict(quant_method="awq", bits=4, version="marlin"), "AWQ in the form 'marlin'"),
        (dict(quant_method="awq", bits=4, backend="llm-awq"), "AWQ in the form 'llm-awq'"),
        (dict(quant_method="awq", w_bit=3), "AWQ in 3 bits"),
        (dict(quant_method="gptq", bits=3), "GPTQ in 3 bits"),
        (dict(quant_method="gptq", bits=2), "GPTQ in 2 bits"),
        (
            dict(quant_method="gptq", bits=4, dynamic={"+:.*down": dict(bits=3)}),
            "GPTQ in 3 bits in some layers",
        ),
        (
            dict(quant_method="gptq", bits=4, checkpoint_format="marlin"),
            "GPTQ in the form 'marlin'",
        ),
        (dict(quant_method="gptq", bits=4, is_marlin_format=True), "GPTQ in the form 'marlin'"),
        (dict(quant_method="gptq", bits=4, pack_dtype="int64"), "GPTQ in words of int64"),
        (dict(quant_method="gptq", bits=4, adapter=dict(rank=8)), "GPTQ with 'adapter'"),
        (scheme(input_activations=dict(num_bits=8)), "4 bits, for activations in few bits too"),
        (scheme(format="nvfp4-pack-quantized"), "the form 'nvfp4-pack-quantized'"),
        (scheme() | dict(format="float-quantized"), "the form 'float-quantized'"),
        (scheme() | dict(format="marlin-24"), "the form 'marlin-24'"),
        (scheme() | dict(sparsity_config=dict(format="sparse-24-bitmask")), "'sparsity_config'"),
        (scheme() | dict(transform_config=dict(config_groups=dict(u={}))), "'transform_config'"),
        (of_weights(num_bits=3), "3 bits of type 'int'"),
        (of_weights(num_bits=8, type="float"), "8 bits of type 'float'"),
        (of_weights(strategy="block"), "scales by 'block'"),
        (of_weights(actorder="hessian"), "columns ordered by 'hessian'"),
        (CT | dict(config_groups={}), "a scheme without weights"),
        (CT | dict(config_groups=dict(W4A16=["Linear"])), "a scheme without weights"),
        (dict(quant_method="of my own"), "'of my own'"),
    ],
    ids=str,
)
def test_other_forms_are_refused_by_name_before_weights_are_read(tmp_path, packing, said):
    sized().save_pretrained(tmp_path)
    save(tmp_path, {}, packing)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    for look in (load_model, lambda f: UnloadedLLM(f, device="cpu")):
        with pytest.raises(UnsupportedModelError) as e:
            look(tmp_path)
        assert said in str(e.value) and "take a checkpoint" in str(e.value)
        assert "\n" not in str(e.value)


def test_a_zero_point_of_0_in_the_first_form_of_gptq_is_refused(tmp_path):
    "Its writers store it in different ways, and what is beside it."
    write_folder(tmp_path, sized(), gptq, symmetric=False)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.qzeros"][0, 0] |= 15
    save(tmp_path, weights, config_of(gptq, 4, 128, False))
    with pytest.raises(UnsupportedModelError, match="zero points of 0.*gptq_v2"):
        load_model(tmp_path)
    save(tmp_path, weights, config_of(gptq, 4, 128, False, version=2))
    load_model(tmp_path)


def test_families_with_weights_the_other_way_round_are_refused(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    save(tmp_path, {}, dict(quant_method="gptq", bits=4))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        load_model(tmp_path)


def cut(folder, weights):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without(end):
    return lambda folder, w: {n: x for n, x in w.items() if not n.endswith(f"1.mlp.up_proj.{end}")}


def changed(end, change):
    def damage(folder, weights):
        name = f"model.layers.1.mlp.up_proj.{end}"
        return weights | {name: change(weights[name])}

    return damage


@pytest.mark.parametrize(
    "kind, damage",
    [
        ("awq", cut),
        ("awq", without("scales")),
        ("awq", without("qzeros")),
        ("awq", changed("qweight", lambda x: x[:-1])),
        ("awq", changed("qweight", lambda x: x.long())),
        ("awq", changed("scales", lambda x: x[:, :-8])),
        ("gptq", without("qweight")),
        ("gptq", changed("qzeros", lambda x: x[:, :-1])),
        ("gptq", changed("g_idx", lambda x: x + 1)),
        ("gptq", changed("g_idx", lambda x: x - 1)),
        ("compressed", without("weight_shape")),
        ("compressed", without("weight_scale")),
        ("compressed", changed("weight_shape", lambda x: x * 2)),
        ("int8", without("weight_scale")),
    ],
)
def test_broken_files_are_named(tmp_path, made, kind, damage):
    folder, _ = made(kind)
    for f in folder.iterdir():
        (tmp_path / f.name).write_bytes(f.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    if (weights := damage(tmp_path, weights)) is not None:
        save_file(weights, tmp_path / "model.safetensors", metadata=dict(format="pt"))
    with pytest.raises(ModelError) as e:
        load_model(tmp_path)
    assert not isinstance(e.value, UnsupportedModelError)
    assert "can't be read" in str(e.value) and "\n" not in str(e.value)
    assert damage is cut or "up_proj" in str(e.value)


def test_what_is_dequantised_is_said(made, any_machine, caplog):
    said = []
    for kind, grouped in (("gptq, desc_act", True), ("gptq", False), ("gptq", True)):
        caplog.clear()
        load_model(made(kind)[0], dtype="bf16", grouped=grouped)
        said.append(" ".join(r.getMessage() for r in caplog.records))
    assert "14 of its 14 packed layers (gptq, 4 bits) are dequantised" in said[0]
    assert "side by side" in said[0] and "side by side" not in said[1]
    assert "memory and the time of bfloat16" in said[1] and not said[2]


@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed, 8 bits", "int8"])
def test_plans_count_weights_in_groups(made, kind):
    folder, _ = made(kind)
    how = dict(max_num_seqs=2, max_model_len=64, kv_cache_bytes=10**6, dtype="fp32")
    known, guess = LLM(folder, **how), UnloadedLLM(folder, device="cpu", **how)
    a, b = (llm.plan(PROMPTS, greedy(8)).weights_bytes for llm in (known, guess))
    assert a == known.weights_bytes and abs(a - b) < 0.05 * a
    plain = LLM(load_model(folder, dtype="fp32")[0], compile=False).weights_bytes
    if keeps_groups(torch.float32, "cpu"):
        assert a < 0.6 * plain and guess.loading_bytes < plain
    dense = UnloadedLLM(folder, device="cpu", compile=False, **how)
    assert dense.weights_bytes == plain


def test_verify_and_a_job_take_a_packed_folder(made, tmp_path, capsys):
    folder, _ = made("awq")
    llm = LLM(folder, dtype="fp32")
    outs = llm.generate(PROMPTS, greedy(6))
    assert llm.verify(outs).ok
    lines = [dict(prompt=p) for p in ("One", "The sea")]
    (source := tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    target = tmp_path / "out.jsonl"
    args = ["-i", str(source), "-o", str(target), "--temperature", "0", "--max-tokens", "5"]
    assert main(["run", *args, "--model", str(folder), "--dtype", "fp32"]) == 0
    found = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    want = llm.generate(["One", "The sea"], SamplingParams(temperature=0, max_tokens=5))
    assert sorted(found) == sorted(o.outputs[0].text for o in want)  # written as they are done


def test_adapters_on_a_packed_folder(made, tmp_path):
    folder, _ = made("gptq, zero points")
    model, tok = load_model(folder, dtype="fp32")
    adapter = tiny_adapter(tmp_path / "adapter", model)
    request = LoRARequest("mine", 1, str(adapter))
    plain, mine = LLM(model, tok, enable_lora=True), LLM(folder, dtype="fp32", enable_lora=True)
    a, b = (ids(x.generate(PROMPTS, greedy(6), lora_request=request)) for x in (plain, mine))
    assert a == b != ids(mine.generate(PROMPTS, greedy(6)))
