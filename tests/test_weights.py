"Which model answers: one whose weights, modules, hooks or config were changed after `LLM` had it answers as it is then, or the call says why not."

import copy, json

import pytest, torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForSequenceClassification

from batchlab import LLM, SamplingParams
from batchlab.llm.config import model_state
from batchlab.errors import EngineError, ModelError
from batchlab.models.tiny import TINY_ARCHS, tiny_model, tiny_tokenizer
from helpers import compiled_or_not, greedy, one_thread
from test_encoders import encoder

pytestmark = one_thread
TOKENIZER = tiny_tokenizer()
PROMPT = "shared beginning of some length, " * 5
GREEDY = greedy(8)


def ids(llm):
    "The tokens of the answer, or why there is none."
    [out] = llm.generate([PROMPT], GREEDY)
    return out.error or [*out.outputs[0].token_ids]


def fresh(model, **how):
    return LLM(copy.deepcopy(model), TOKENIZER, **how)


def need_kernels():
    backend = LLM(tiny_model("llama")).backend
    if backend.name != "fused":
        pytest.skip(f"no kernels: {backend.why}")


def others(model, scale=1.0):
    "Weights for `model` that give other tokens."
    g = torch.Generator().manual_seed(9)
    noise = lambda p: torch.randn(p.shape, generator=g) * p.std()
    return {k: p.detach() + scale * noise(p.detach()) for k, p in model.named_parameters()}


def each(write):
    def change(model):
        with torch.no_grad():
            for (_, p), v in zip([*model.named_parameters()], others(model).values()):
                write(p, v)

    return change


def replace_data(p, v):
    p.data = v


def train(model):
    model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def inv_freq(model):
    model.model.rotary_emb.inv_freq.data.mul_(5)


def negated(model):
    class Negated(nn.Module):
        def forward(self, w):
            return -w

    parametrize.register_parametrization(model.model.layers[0].mlp.down_proj, "weight", Negated())


def no_layer(model):
    model.model.layers = model.model.layers[:1]


def other_layer(model):
    model.model.layers[0] = tiny_model("llama", seed=5).model.layers[0]


def softer(model):
    model.model.layers[0].self_attn.scaling = 2.0


CHANGES = dict(
    data=each(lambda p, v: p.data.copy_(v)),
    data_replaced=each(replace_data),
    numpy=each(lambda p, v: p.detach().numpy().__setitem__(..., v.numpy())),
    in_place=each(lambda p, v: p.copy_(v)),
    state_dict=lambda m: m.load_state_dict(others(m), strict=False),
    step_of_training=train,
    buffer=inv_freq,
    dtype=lambda m: m.bfloat16(),
    parametrized=negated,
    module_replaced=other_layer,
    layers_dropped=no_layer,
    setting_of_a_module=softer,
)


@compiled_or_not
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_answers_as_it_is(change, compile):
    model = tiny_model("llama")
    llm = LLM(model, TOKENIZER, compile=compile)
    before = ids(llm)
    CHANGES[change](model)
    after = ids(llm)
    assert after == ids(fresh(model, compile=compile)) and (after != before or change == "dtype")
    assert ids(llm) == after and llm.stats().steps >= 3


def test_tied_embeddings_and_int8():
    need_kernels()
    model = tiny_model("llama", tie_word_embeddings=True)
    for how in (dict(quantization="int8"), {}):
        llm = LLM(model, TOKENIZER, **how)
        ids(llm)
        model.get_input_embeddings().weight.data.copy_(others(model)["model.embed_tokens.weight"])
        assert ids(llm) == ids(fresh(model, **how))
        model.get_input_embeddings().weight.data.neg_()
        assert ids(llm) == ids(fresh(model, **how))


POOLED = {
    "vectors of a decoder": (
        lambda: tiny_model("llama"),
        lambda l: l.embed([PROMPT])[0].outputs.embedding,
    ),
    "scores of a decoder": (
        lambda: tiny_model("llama"),
        lambda l: [l.score(PROMPT, "b")[0].outputs.score],
    ),
    "vectors of an encoder": (
        lambda: encoder("bert"),
        lambda l: l.embed([PROMPT])[0].outputs.embedding,
    ),
    "classes": (
        lambda: encoder("bert", AutoModelForSequenceClassification, num_labels=3),
        lambda l: l.classify([PROMPT])[0].outputs.probs,
    ),
}


@compiled_or_not
@pytest.mark.parametrize("name", POOLED)
def test_vectors_classes_and_scores_are_of_the_new_weights(name, compile):
    make, f = POOLED[name]

    def fill(model, seed, spread=0.3):
        g = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.data.copy_(torch.randn(p.shape, generator=g) * spread)
        return model

    model = fill(make(), 0)
    llm = LLM(model, TOKENIZER, compile=compile)
    before, _ = f(llm), fill(model, 1)
    after, want = f(llm), f(fresh(model, compile=compile))
    assert after == pytest.approx(want, abs=1e-5) and after != pytest.approx(before, abs=1e-3)


class Adapter(nn.Module):
    "A linear layer with an adapter beside it and the switches that PEFT's have."

    def __init__(self, base, r=4):
        super().__init__()
        self.base_layer, self._disable_adapters, self._active_adapter = base, False, ["a"]
        g = torch.Generator().manual_seed(3)
        part = lambda: nn.Parameter(torch.randn(base.out_features, base.in_features, generator=g))
        self.lora = nn.ParameterDict({n: part() for n in "ab"})
        self.scaling = dict(a=1.0, b=1.0)

    def forward(self, x):
        y = self.base_layer(x)
        if self._disable_adapters:
            return y
        for n in self._active_adapter:
            y = y + self.scaling[n] * (x @ self.lora[n].T)
        return y


def test_switches_of_adapters_inside_of_the_model():
    model = tiny_model("llama")
    plain = ids(fresh(model))
    attention = model.model.layers[1].self_attn
    attention.q_proj = adapter = Adapter(attention.q_proj)
    llm = LLM(model, TOKENIZER)
    on = ids(llm)
    adapter._disable_adapters = True
    assert ids(llm) == plain != on
    adapter._disable_adapters = False
    assert ids(llm) == on
    adapter._active_adapter[0] = "b"
    assert ids(llm) == ids(fresh(model)) != on
    adapter.scaling["b"] = 5.0
    assert ids(llm) == ids(fresh(model))


@compiled_or_not
def test_hooks_set_and_removed(compile):
    model, seen = tiny_model("llama"), []
    llm, layer = LLM(model, TOKENIZER, compile=compile), model.model.layers[0]
    before, name = ids(llm), llm.backend.name
    turn = lambda m, i, o: (-o[0], *o[1:]) if isinstance(o, tuple) else -o
    hook = layer.register_forward_hook(turn)
    assert ids(llm) == ids(fresh(model, compile=compile)) != before
    hook.remove()
    assert ids(llm) == before and llm.backend.name == name
    hook = layer.mlp.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    assert ids(llm) == before and seen  # one that looks on is called, though nothing else changes
    hook.remove()
    layer.mlp.forward = lambda x: torch.zeros_like(x)
    assert ids(llm) == ids(fresh(model, compile=compile)) != before


def test_what_no_call_can_notice_and_the_one_that_makes_it_right():
    "A row of the embedding that lies between those that are looked at."
    model = tiny_model("llama")
    llm = LLM(model, TOKENIZER, enable_lora=True)
    ids(llm)
    model.model.embed_tokens.weight.data[TOKENIZER(PROMPT)["input_ids"][0]] += 3
    llm.reload_weights()
    assert ids(llm) == ids(fresh(model))
    llm.add_request("a", GREEDY)
    with pytest.raises(EngineError, match="1 requests are under way"):
        llm.reload_weights()
    while llm.step():
        pass


def test_the_config_of_generation_and_a_switch_of_training():
    model = tiny_model("llama")
    llm = LLM(model, TOKENIZER)
    ask = lambda: llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))[0]
    first, held = list(ask().outputs[0].token_ids), llm.backend
    model.generation_config.eos_token_id = [2, first[3]]
    model.train()
    out = ask()
    c = out.outputs[0]
    assert (list(c.token_ids), c.finish_reason) == (first[:4], "stop")
    assert llm.backend is held and out.num_cached_tokens and model.training


@pytest.mark.parametrize(
    "how", [{}, dict(quantization="int8"), dict(compile=False)], ids=["packed", "int8", "torch"]
)
def test_a_model_loaded_by_its_name(how, tmp_path):
    "Its weights were given up for packed ones: a change is refused, and its files are read again on demand."
    if "quantization" in how:
        need_kernels()
    model = tiny_model("llama")
    for m in (model, TOKENIZER):
        m.save_pretrained(tmp_path)
    llm = LLM(tmp_path, **how)
    before = ids(llm)
    llm.model.model.norm.weight.data.mul_(-1)
    if llm.backend.nbytes:
        said = ids(llm)
        assert "weights of llm.model changed" in said and "llm.reload_weights()" in said
        with pytest.raises(ModelError, match="load_model"):
            llm.model.save_pretrained(tmp_path / "lacks_weights")
    else:
        assert ids(llm) != before
    llm.reload_weights()
    assert ids(llm) == before and llm.limits.max_model_len == 256
    each(lambda p, v: p.copy_(v))(model)
    model.save_pretrained(tmp_path)
    digest = llm.engines.weights_digest
    llm.reload_weights()
    assert ids(llm) == ids(LLM(tmp_path, **how)) != before and llm.engines.weights_digest != digest


def test_a_model_that_can_not_run_any_more_says_so_until_it_can():
    need_kernels()
    model = tiny_model("llama")
    llm = LLM(model, TOKENIZER, quantization="int8")
    before = ids(llm)
    hook = model.lm_head.register_forward_hook(lambda m, i, o: -o)
    for _ in range(2):
        assert ids(llm)
    hook.remove()
    assert ids(llm) == before


@pytest.mark.parametrize("arch", [*TINY_ARCHS, "dynamic"])
def test_running_a_model_is_no_change(arch):
    "Whatever its modules write into themselves as they run: else each call would begin by packing all weights."
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    dynamic = dict(rope_parameters=rope, max_position_embeddings=32)
    model = tiny_model("llama", **dynamic) if arch == "dynamic" else tiny_model(arch)
    llm = LLM(model, TOKENIZER, compile=False)
    before = model_state(model)
    llm.generate([[5] * n for n in (3, 20)], SamplingParams(max_tokens=2))
    assert (
        json.dumps(model_state(model)) == json.dumps(before) == json.dumps(llm.engines.opened_state)
    )


def test_the_report_comes_with_the_outputs():
    torch.manual_seed(1)
    llm = LLM(tiny_model("llama").bfloat16(), TOKENIZER)
    outs = llm.generate(["hello " * n for n in range(1, 10)], greedy(16), verify=True)
    assert outs.report is llm.report and outs.report.ok and outs.report.requests == 8
    assert f"verified: {outs.report.headline}" in repr(outs)
    outs[4].outputs[0].token_ids[3] += 1  # alone it is another token
    bug = llm.verify(outs, sample=None).bugs[0]
    assert (bug.number, bug.index) == (4, 3)
