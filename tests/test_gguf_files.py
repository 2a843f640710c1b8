"GGUF files as llama.cpp's converter writes them: the answers of the model that was converted, or a refusal that names what stands in the way."

import functools, re
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from batchlab import LLM, SamplingParams
from batchlab.errors import ModelError, UnsupportedModelError
from batchlab.fast.packed import densify
from batchlab.llm.config import weights_digest
from batchlab.models import load, load_model, tiny_model
from batchlab.models.gguf import GGUFFile
from batchlab.models.gguf_model import ARCHITECTURES, IDLE_KEYS, read_config
from batchlab.models.gguf_tokenizer import CUTS, IDLE_TOKENIZER_KEYS, read_tokenizer, special_ids
from batchlab.models.load import load_tokenizer
from gguf_files import gguf_file, words, write
from helpers import ROOT, generated, greedy, ids, json_lines

ROPE = dict(rope_type="default", rope_theta=10_000.0)
SCALED = ROPE | dict(factor=4.0, original_max_position_embeddings=64)
LLAMA3 = SCALED | dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
LINEAR, YARN = ROPE | dict(rope_type="linear", factor=4.0), SCALED | dict(rope_type="yarn")
FACTORS = dict(long_factor=[1.5, 2, 3, 4, 5, 6], short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
LONG = SCALED | FACTORS | dict(rope_type="longrope", partial_rotary_factor=0.75)
LONG.pop("factor")
GEMMA3 = dict(num_hidden_layers=7, layer_types=["sliding_attention"] * 5 + ["full_attention"] * 2)
GEMMA3["layer_types"][6] = "sliding_attention"
ROPES = lambda rope: dict(
    rope_parameters=dict(full_attention=rope | dict(rope_theta=1e6), sliding_attention=ROPE)
)
TIED = dict(tie_word_embeddings=True)
GRANITE = dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0078125)
FAMILIES = {
    "Llama 2": ("llama", {}),
    "Llama 3": ("llama", TIED | dict(rope_parameters=LLAMA3)),
    "Llama, linear": ("llama", dict(rope_parameters=LINEAR)),
    "Llama, YaRN": ("llama", dict(rope_parameters=YARN)),
    "Llama, other heads": ("llama", dict(head_dim=32)),
    "Llama, biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "Mistral": ("mistral", dict(sliding_window=None)),
    "Mixtral": ("mixtral", dict(sliding_window=None)),
    "Qwen 2.5": ("qwen2", {}),
    "Qwen 2.5, YaRN": ("qwen2", dict(rope_parameters=YARN)),
    "Qwen 2, experts": ("qwen2_moe", dict(shared_expert_intermediate_size=96)),
    "Qwen 3": ("qwen3", TIED),
    "Qwen 3, experts": ("qwen3_moe", dict(norm_topk_prob=True)),
    "Gemma": ("gemma", TIED),
    "Gemma 2": ("gemma2", TIED | dict(num_hidden_layers=4)),
    "Gemma 3": ("gemma3_text", TIED | GEMMA3 | ROPES(ROPE)),
    "Gemma 3, linear": ("gemma3_text", TIED | GEMMA3 | ROPES(LINEAR)),
    "Phi 3": ("phi3", dict(sliding_window=16)),
    "Phi 4": ("phi3", dict(sliding_window=None)),
    "Phi 4 mini": (
        "phi3",
        TIED | dict(sliding_window=None, original_max_position_embeddings=64, rope_parameters=LONG),
    ),
    "StarCoder 2": (
        "starcoder2",
        TIED | dict(sliding_window=None, rope_parameters=ROPE | dict(rope_theta=999999.44)),
    ),
    "Granite": ("granite", GRANITE | dict(logits_scaling=8.0)),
    "OLMo 2": ("olmo2", {}),
    "SmolLM 3": ("smollm3", TIED | dict(num_hidden_layers=5)),
    "StableLM": ("stablelm", {}),
    "Nemotron": ("nemotron", {}),
    "LFM2": (
        "lfm2",
        TIED | dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    ),
    "GPT-2": ("gpt2", TIED),
}
PROMPTS = [[1, *range(20, 50)], [1, 5, 9], [i * 37 % 250 + 3 for i in range(70)]]


def family(name):
    arch, own = FAMILIES[name]
    return tiny_model(arch, **own)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    "The file of a tiny model of a family, made once."
    folder = tmp_path_factory.mktemp("families")
    return functools.cache(lambda name: gguf_file(folder / f"{name}.gguf", family(name)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_answers_as_the_model_that_was_converted(path_of, name):
    model, (mine, _) = family(name), load_model(path_of(name), dtype="fp32")
    for prompt in PROMPTS:
        with torch.inference_mode():
            assert torch.equal(
                mine(torch.tensor([prompt])).logits, model(torch.tensor([prompt])).logits
            )
    got = ids(LLM(path_of(name), dtype="fp32").generate(PROMPTS, greedy(5)))
    assert got == [generated(model, prompt, 5) for prompt in PROMPTS]


OF_FORMS = dict(Q8_0="Llama 3,Granite,Phi 4,Gemma 2,GPT-2,Mixtral", Q4_0="Llama 2,Qwen 3,Gemma 3")
FORMS = [(name, form) for form, names in OF_FORMS.items() for name in names.split(",")]


@pytest.mark.parametrize("name, form", FORMS)
def test_weights_in_groups_are_those_that_are_dequantised(
    tmp_path, name, form, monkeypatch, caplog
):
    "Also on a machine whose kernels would have plain numbers. That they are is said once."
    monkeypatch.setattr(load, "keeps_groups", lambda *_: True)
    path = gguf_file(tmp_path / "model.gguf", family(name), form=form, outer="Q8_0")
    mine, plain = (load_model(path, dtype="bf16", grouped=kept)[0] for kept in (True, False))
    kept = [p for p in mine.parameters() if hasattr(p, "groups")]
    assert len(kept) >= mine.config.num_hidden_layers
    assert not any(hasattr(p, "groups") for p in plain.parameters())
    assert weights_digest(mine) == weights_digest(plain)
    prompt = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        assert torch.equal(mine(prompt).logits, plain(prompt).logits)
    caplog.clear()
    densify(mine), densify(mine)
    [said] = caplog.records
    assert "dequantised" in said.message
    own = plain.state_dict()
    assert all(torch.equal(p, own[name]) for name, p in mine.state_dict().items())
    tied = [
        m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in (mine, plain)
    ]
    assert tied[0] == tied[1]


def test_each_architecture_has_a_family_here():
    assert {a.model_type for a in ARCHITECTURES.values()} == {
        family(name).config.model_type.replace("mistral", "llama") for name in FAMILIES
    }


@pytest.mark.parametrize("layers, scale", [(46, 32**-0.5), (26, 16**-0.5)])
def test_gemma_27b_scales_attention_by_its_width(tmp_path, layers, scale):
    model = tiny_model("gemma2", num_hidden_layers=1, hidden_size=128, **TIED)
    path = gguf_file(tmp_path / "gemma.gguf", model, {".block_count": layers})
    config = read_config(GGUFFile(path), {})
    assert config.query_pre_attn_scalar**-0.5 == scale
    assert config.layer_types[:3] == ["sliding_attention", "full_attention", "sliding_attention"]


def refused(path, about):
    with pytest.raises(UnsupportedModelError) as e:
        load_model(path, dtype="fp32")
    assert e.value.field == about and about in str(e.value) and "\n" not in str(e.value)
    return str(e.value)


ODD = np.ones(64, np.float32)


# A key of the metadata, and what stands under it, or nothing.
KEYS = r"""
[".rope.scaling.type", "longrope"]
[".attention.clamp_kqv", 1]
[".rope.dimension_count", 8]
[".attention.value_length", 8]
[".attention.head_count", [4, 2]]
[".attention.sliding_window", 16]
[".attention.causal", false]
[".pooling_type", 1]
[".context_length", null]
[".of_another_year", 7]
["tokenizer.ggml.model", "t5"]
["tokenizer.ggml.pre", "gpt-3"]
["tokenizer.ggml.pre", null]
["tokenizer.ggml.remove_extra_whitespaces", true]
["tokenizer.ggml.of_another_year", 7]
["tokenizer.ggml.token_type", null]
["general.type", "adapter"]
"""


@pytest.mark.parametrize(
    "about, metadata, tensors",
    [
        *(("llama" * (key[0] == ".") + key, {key: x}, {}) for key, x in json_lines(KEYS)),
        ("token_embd.weight", words(260), {}),
        ("tokenizer.ggml.tokens", {"tokenizer.ggml.tokens": ["a"] * 259}, {}),
        ("blk.0.attn_k.bias", {}, {"blk.0.attn_q.bias": ODD}),
        ("rope_freqs.weight", {}, {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}),
        ("llama.rope.scaling.factor", {".rope.scaling.factor": 8.0}, {"rope_freqs.weight": ODD[:8]}),
        *(
            (name, {}, {name: None if n is None else ODD[:n]})
            for name, n in [
                ("blk.1.ffn_down.bias", 64),
                ("blk.1.post_attention_norm.weight", 64),
                ("blk.0.attn_sinks.weight", 4),
                ("blk.1.ffn_down.weight", None),
                ("output_norm.weight", None),
                ("token_embd.weight", None),
                ("blk.0.ffn_norm.weight", 63),
                ("rope_freqs.weight", 4),
            ]
        ),
    ],
)  # fmt: skip
def test_what_may_change_the_tokens_is_refused_by_name(tmp_path, about, metadata, tensors):
    refused(gguf_file(tmp_path / "model.gguf", tiny_model("llama"), metadata, tensors), about)


def test_an_architecture_that_is_not_known_is_refused_by_name(tmp_path):
    path = write(tmp_path / "model.gguf", "bloom", words(259), {})
    assert "bloom" in refused(path, "general.architecture")


def test_what_changes_no_token_is_taken(tmp_path):
    idle = {".vocab_size": 7, ".attention.causal": True, ".expert_count": 0, ".pooling_type": 3}
    idle |= {".rope.scaling.finetuned": True, "tokenizer.ggml.fim_pad_token_id": 5}
    model, ones = tiny_model("llama"), {"rope_freqs.weight": ODD[:8]}
    path = gguf_file(tmp_path / "model.gguf", model, idle | {"some.tool": "said this"}, ones)
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        assert torch.equal(load_model(path, dtype="fp32")[0](ids).logits, model(ids).logits)


def key_names():
    "The keys of models and tokenizers that `gguf` knows, without the name of an architecture."
    groups = gguf.constants.Keys.LLM, gguf.constants.Keys.Attention, gguf.constants.Keys.Rope
    for group in (*groups, gguf.constants.Keys.Tokenizer):
        for name, key in vars(group).items():
            if not name.startswith("_") and isinstance(key, str):
                yield key.removeprefix("{arch}").format(dense="dense_2", name="rag", id=0)


def page_keys():
    "What page 88 says of keys: those that are read, and those that change no token."
    page = (ROOT / "nbs/reference/88_models.ipynb").read_text(encoding="utf-8")
    rows = re.findall(r'"\| (read|change no token)[^|]*\|(.*?)\|\\n"', page)
    assert len(rows) >= 4
    found = {"read": set(), "change no token": set()}
    for what, keys in rows:
        found[what] |= set(re.findall(r"`([^`]+)`", keys))
    return found["read"], found["change no token"]


def test_page_88_says_what_is_done_with_each_key(path_of, tmp_path):
    asked = {
        key.removeprefix(file.arch)
        for name in FAMILIES
        for file in [GGUFFile(path_of(name))]
        for special in [special_ids(file)]
        if read_tokenizer(file, special) and read_config(file, special)
        for key in file.asked
    }
    spm = GGUFFile(sentencepiece_file(tmp_path / "spm.gguf"))
    read_tokenizer(spm, special_ids(spm))
    asked = {key for key in {*asked, *spm.asked} if key.startswith((".", "tokenizer."))}
    read, idle = page_keys()
    spelled = lambda keys: {key if key.startswith("tokenizer") else f".{key}" for key in keys}
    assert spelled(read) == asked
    assert spelled(idle) == (IDLE_KEYS | IDLE_TOKENIZER_KEYS).keys() - asked
    known = {key for key in key_names() if key != "tokenizer.chat_template.rag"}
    for key in known - asked - spelled(idle):
        file = GGUFFile(path_of("Llama 2"))
        name = file.arch + key if key.startswith(".") else key
        file.fields[name] = SimpleNamespace(contents=lambda: 7)
        with pytest.raises(UnsupportedModelError) as e:
            read_tokenizer(file, special_ids(file))
            read_config(file, {})
        assert e.value.field == name


# tokenizers


def tokenizer_with(tmp_path, **more):
    path = write(tmp_path / "words.gguf", more.pop("arch", "llama"), words(259, **more), {})
    return load_tokenizer(path)


# The name of a way to cut, and the pieces of "It's 1234,  OpenAI\n\n" by llama.cpp's tokenizer.
PIECES_OF = r"""
["gpt-2", ["It", "'s", " 1234", ",", " ", " OpenAI", "\n\n"]]
["smollm", ["It", "'s", " ", "1", "2", "3", "4", ",", " ", " OpenAI", "\n\n"]]
["llama-bpe", ["It", "'s", " ", "123", "4", ",", " ", " OpenAI", "\n\n"]]
["qwen2", ["It", "'s", " ", "1", "2", "3", "4", ",", " ", " OpenAI", "\n\n"]]
["minicpm5", ["It", "'s", " ", "123", "4", ",", " ", " OpenAI", "\n\n"]]
["seed-coder", ["It", "'s", " ", "1", "2", "3", "4", ",", " ", " OpenAI", "\n\n"]]
["tekken", ["It", "'s", " ", "1", "2", "3", "4", ",", " ", " Open", "AI", "\n\n"]]
["gpt-4o", ["It's", " ", "123", "4", ",", " ", " Open", "AI", "\n\n"]]
["deepseek-coder", ["It", "'", "s", " ", "1", "2", "3", "4", ",", " ", " OpenAI", "\n", "\n"]]
["deepseek-v3", ["It", "'s", " ", "123", "4", ",", " ", " OpenAI", "\n\n"]]
["falcon", ["It", "'", "s", " ", "123", "4", ",", " ", " OpenAI", "\n\n"]]
["viking", ["It's", " ", "1", "2", "3", "4", ", ", " OpenAI", "\n\n"]]
["bloom", ["It's", " 1234", ", ", " OpenAI", "\n\n"]]
"""
CUT = dict(json_lines(PIECES_OF))


@pytest.mark.parametrize("pre", CUT)
def test_a_text_is_cut_as_the_file_says(tmp_path, pre):
    cutter = tokenizer_with(tmp_path, **{"ggml.pre": pre}).backend_tokenizer.pre_tokenizer
    pieces = cutter.pre_tokenize_str("It's 1234,  OpenAI\n\n")
    assert [p.replace("Ġ", " ").replace("Ċ", "\n") for p, _ in pieces] == CUT[pre]


def test_each_rule_of_cutting_is_tried_and_a_form_of_unicode_where_the_model_had_one(tmp_path):
    assert {CUTS[name] for name in CUT} == {*CUTS.values()}
    texts = "e\u0301", "\u00e9"
    for pre, same in dict(qwen2=True, smollm=False).items():
        tok = tokenizer_with(tmp_path, **{"ggml.pre": pre})
        a, b = (tok(text)["input_ids"] for text in texts)
        assert (a == b) == same


def test_texts_begin_and_end_as_flags_say(tmp_path):
    ids_of = lambda **more: tokenizer_with(tmp_path, **more)("a")["input_ids"]
    a = ord("a") + 3
    assert ids_of() == [a]
    assert ids_of(**{"ggml.add_bos_token": True, "ggml.add_eos_token": True}) == [1, a, 2]
    assert ids_of(**{"ggml.pre": "llama-bpe"}) == [1, a]
    assert ids_of(**{"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}) == [a]


PIECES = {"▁": -5, "a": -6, "b": -7, "▁a": -1, "ab": -2, "aab": -3, "▁ab": -4, "c ": 0, "<|x|>": 0}


def sentencepiece_file(path, arch="llama", **more):
    "A file with a vocabulary of `PIECES`: one token a user defined, one control token."
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
    types = [2, 3, 3] + [6] * 256 + [1] * 7 + [4, 3]
    scores = [0.0] * 259 + [float(x) for x in PIECES.values()]
    said = {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores}
    said |= {"token_type": types, "unknown_token_id": 0} | more
    return write(path, arch, {f"tokenizer.ggml.{k}": v for k, v in said.items()}, {})


JOINED = """
["ab", ["▁ab"], ["ab"]]
["aab", ["▁a", "ab"], ["aab"]]
[" a", ["▁", "▁a"], ["▁a"]]
["ac b", ["▁a", "c ", "▁", "b"], ["a", "c ", "b"]]
["a<|x|>a", ["▁a", "<|x|>", "▁a"], ["a", "<|x|>", "a"]]
["é", ["▁", "<0xC3>", "<0xA9>"], ["<0xC3>", "<0xA9>"]]
"""


@pytest.mark.parametrize("text, prefixed, bare", json_lines(JOINED))
def test_a_sentencepiece_vocabulary_joins_the_best_pair_first(tmp_path, text, prefixed, bare):
    for more, want in (({}, prefixed), (dict(add_space_prefix=False), bare)):
        tok = load_tokenizer(sentencepiece_file(tmp_path / "spm.gguf", **more))
        ids = tok(text)["input_ids"]
        assert ids[0] == 1 and tok.convert_ids_to_tokens(ids[1:]) == want
        if "<" not in text and "c" not in text:
            assert tok.decode(ids[1:]) == text


def test_control_tokens_of_phi_3_take_the_whitespace_behind_them(tmp_path):
    for arch, n in dict(llama=3, phi3=2).items():
        tok = load_tokenizer(sentencepiece_file(tmp_path / "spm.gguf", arch, add_bos_token=False))
        assert len(tok("<|x|>\na")["input_ids"]) == n + (arch == "llama")


END, TEXT = 203, SamplingParams(temperature=0, max_tokens=8, logit_bias={203: 100})


@pytest.mark.parametrize(
    "name, more",
    [
        ("<|end|>", {}),
        ("<end_of_turn>", {}),
        ("<|im_end|>", {}),
        ("<|stop|>", {"ggml.eot_token_id": END}),
        ("<|stop|>", {"ggml.eom_token_id": END}),
        ("<|stop|>", {"chat_template": "{% for m in messages %}{{ m.content + '<|stop|>\n' }}{% endfor %}"}),
    ],
)  # fmt: skip
def test_a_chat_ends_with_its_turn(tmp_path, name, more):
    said = words(259, **more)
    said["tokenizer.ggml.tokens"][END] = name
    said["tokenizer.ggml.token_type"][END] = 3
    llm = LLM(gguf_file(tmp_path / "m.gguf", tiny_model("llama"), said), dtype="fp32")
    [out] = llm.chat([dict(role="user", content="Hi")], TEXT)
    [answer] = out.outputs
    assert (answer.finish_reason, list(answer.token_ids), answer.text) == ("stop", [END], "")


def test_a_token_for_unknown_text_is_no_end_by_its_name(tmp_path):
    said = words(259, **{"ggml.unknown_token_id": END})
    said["tokenizer.ggml.tokens"][END] = "<|endoftext|>"
    assert special_ids(GGUFFile(write(tmp_path / "a", "llama", said, {})))["eos_token_id"] == [2]
    del said["tokenizer.ggml.unknown_token_id"]
    file = GGUFFile(write(tmp_path / "b", "llama", said, {}))
    assert special_ids(file)["eos_token_id"] == [2, END]


def test_several_chat_templates_keep_their_names(tmp_path):
    more = {"chat_templates": ["tool_use"], "chat_template.tool_use": "T"}
    found = tokenizer_with(tmp_path, chat_template="D", **more).chat_template
    assert found == dict(default="D", tool_use="T")


# a model in several parts


@pytest.fixture
def parts(tmp_path):
    "A model in several parts, the first without a tensor."
    how = dict(split_max_tensors=8, small_first_shard=True)
    gguf_file(tmp_path / "m.gguf", tiny_model("llama"), **how)
    return sorted(tmp_path.glob("m-0000*.gguf"))


def test_all_parts_of_a_model_are_read(parts):
    assert len(parts) == 4 and parts[0].name == "m-00001-of-00004.gguf"
    want = tiny_model("llama").state_dict()
    for path in (parts[0], parts[2]):
        found = load_model(path, dtype="fp32")[0].state_dict()
        assert found.keys() == want.keys() and all(
            torch.equal(x, want[k]) for k, x in found.items()
        )


def test_parts_of_two_models_do_not_make_one(parts):
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelError, match="its parts have 13 tensors, and the model has 21"):
        load_model(parts[0])


def test_a_part_that_is_not_there_is_named(parts, tmp_path):
    parts[2].rename(tmp_path / "away")
    with pytest.raises(ModelError, match="m-00003-of-00004.gguf is not beside it"):
        load_model(parts[0])
    for path in parts:
        if path.exists():
            path.rename(tmp_path / path.name.replace("-of-", "of"))
    with pytest.raises(ModelError, match="does not end in -00001-of-00004.gguf"):
        load_model(tmp_path / "m-00001of00004.gguf")
