"A step belongs to the thread and the model that it runs for; families that drop what they do not know run packed, too."

import copy, threading

import pytest, torch

from batchlab.core.attention import (
    PackedStep,
    TorchBackend,
    _thread,
    attention_override,
    packed_forward,
    packed_of,
)
from batchlab.fast.trial import check_backend, kv_layout
from batchlab.errors import EngineError, Unavailable
from batchlab.fast.layers import describe_norm
from batchlab.core.batch import pack_rows
from batchlab.api import LLM
from batchlab.models import tiny_model
from batchlab.core.cache import KVCache
from helpers import generated, greedy, ids, one_thread, oracle

DROP = {
    "stablelm": {},
    "stablelm, parallel": dict(use_parallel_residual=True),
    "stablelm, normed": dict(qk_layernorm=True),
    "nemotron": {},
}  # keywords
PROMPTS = [[5, 9, 33], [*range(40, 70)], [44], [7] * 11, [*range(40, 66)] + [9]]
MEANWHILE = "do not call it from another thread"

pytestmark = one_thread


def tiny(name, **more):
    return tiny_model(name.split(",")[0], **DROP.get(name, {}) | more)


def run(model, attended=lambda: None, rows=([5, 9, 200, 31], [8, 6])):
    "Logits of `rows` in one step, with `attended()` called in each of its layers."
    batch = pack_rows([(r, 0) for r in rows], [[i] for i in range(len(rows))], 16)

    class Watched(PackedStep):
        def attention(self, *args):
            attended()
            return super().attention(*args)

    packed, last = packed_of(batch)
    cache = KVCache([(2, 16, 16)] * 2, len(rows), 16)
    cache.prepare(batch)
    return packed_forward(model, Watched(cache, batch), packed, last)


def own(model, rows=([5, 9, 200, 31], [8, 6])):
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([r]), use_cache=False).logits[0, -1] for r in rows])


def test_a_head_computes_what_is_due_alone():
    model, rows = tiny("nemotron"), []
    model.lm_head.register_forward_hook(lambda m, x, y: rows.append(y.shape[1]))
    run(model)
    assert rows == [2]


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def error_of(f):
    "What `f()` raises in another thread, or None."
    caught = []

    def call():
        try:
            f()
        except Exception as e:
            caught.append(e)

    thread = threading.Thread(target=call)
    thread.start(), thread.join(60)
    return caught[0] if caught else None


@pytest.mark.parametrize("name", DROP)
def test_packed_logits_are_the_models_own(name):
    model = tiny(name)
    close(run(model), own(model))
    for size in (1, 4, 64):
        check_backend(model, TorchBackend(model, kv_layout(model), block_size=size))


@pytest.mark.parametrize("compile", [True, False], ids=["fused", "torch"])
@pytest.mark.parametrize("name", DROP)
def test_answers_are_transformers_own(name, compile, request):
    if compile:
        request.getfixturevalue("kernels")
    model = tiny(name, seed=4)
    want = oracle(model, PROMPTS, 10)
    assert [generated(model, p, 10) for p in PROMPTS] == want
    llm = LLM(model, max_num_seqs=3, max_num_batched_tokens=20, compile=compile)
    assert llm.backend.name == ("fused" if compile else "torch"), llm.backend.why
    outs = llm.generate(PROMPTS, greedy(10), use_tqdm=False)
    assert ids(outs) == want and llm.verify(outs).ok


@pytest.mark.parametrize("name", ["stablelm, normed", "nemotron"])
def test_answers_in_int8_are_the_same_alone_and_together(kernels, name):
    llm = LLM(tiny(name), quantization="int8", max_num_seqs=3)
    assert llm.backend.name == "fused"
    answers = lambda prompts: ids(llm.generate(prompts, greedy(10), use_tqdm=False))
    assert answers(PROMPTS) == [answers([p])[0] for p in PROMPTS]


@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_another_thread_that_calls_the_model_gets_an_error_and_the_step_goes_on(name):
    model, other = tiny(name), tiny("nemotron")
    want, call = own(model), lambda: model(torch.tensor([[5, 6]]))
    for there in (call, lambda: run(other, call)):  # also in a step of its own
        errors = []
        close(run(model, lambda: errors.append(error_of(there))), want)
        assert [type(e) for e in errors] == [EngineError] * 2
        assert all(MEANWHILE in str(e) for e in errors)
    close(own(model), want)


@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_another_thread_that_makes_a_step_waits(name):
    model, got, threads = tiny(name), [], []
    want = own(model)

    def other():
        if threads:
            return
        threads.append(threading.Thread(target=lambda: got.append(run(model))))
        threads[0].start()
        threads[0].join(0.2)
        assert threads[0].is_alive() and not got

    close(run(model, other), want)
    threads[0].join(60)
    close(got[0], want)


def test_a_step_within_a_step():
    outer, inner, got = tiny("stablelm"), tiny("nemotron"), []
    want, other = own(outer), own(inner)
    close(run(outer, lambda: got.append(run(inner))), want)
    assert len(got) == 2
    for x in got:
        close(x, other)
    got.clear()  # of the same model, and a plain call of another one
    close(run(outer, lambda: got.extend([run(outer), own(inner)])), want)
    for x, y in zip(got, [want, other] * 2):
        close(x, y)


@pytest.mark.parametrize("name", ["llama", "stablelm"])
@pytest.mark.parametrize("where", ["model", "model.layers.1.self_attn"])
def test_a_hook_that_calls_its_own_model(name, where):
    model, inside = tiny(name), []

    def nested(*args):
        if not inside:
            inside.append(1)
            model(torch.tensor([[5, 6, 7, 8, 9, 10]]))

    want, hook = own(model), model.get_submodule(where).register_forward_pre_hook(nested)
    shapes = kv_layout(tiny(name))
    batch = pack_rows([([5, 9, 200, 31], 0), ([8, 6], 0)], [[0], [1]], 64)
    with pytest.raises(EngineError, match="more than once"):
        TorchBackend(model, shapes).execute(TorchBackend(model, shapes).make_cache(2), batch)
    hook.remove()
    close(own(model), want)


def test_nothing_is_left_of_a_step():
    model, seen = tiny("stablelm"), []
    before, names = model.config.to_dict(), {*vars(model.config)}

    def look():
        seen.append(copy.deepcopy(model.config).to_dict())
        assert {*vars(model.config)} == names and _thread.runs[0] is not None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, look)
    assert seen[0] == before == model.config.to_dict() and _thread.runs[0] is None
    with attention_override(model, "batchlab") as configs:
        assert configs == [model.config]
        with pytest.raises(EngineError, match=MEANWHILE):
            model(torch.tensor([[5, 6]]))


def test_what_runs_by_code_of_its_own_is_refused_still():
    for family, why in (
        ("gpt_neo", "0 times"),
        ("bloom", "position_ids"),
        ("diffllama", "more than once"),
    ):
        with pytest.raises(Unavailable, match=why):
            kv_layout(tiny_model(family))


def test_norms_of_both_families():
    norm = tiny("nemotron").to(torch.bfloat16).model.norm
    about, (weight, bias) = describe_norm(norm, 64)
    assert about.kind == 2 and torch.equal(bias, norm.bias.float())
    assert torch.equal(weight, (norm.weight + 1).float())  # it rounds
    heads = tiny("stablelm, normed").model.layers[0].self_attn.q_layernorm
    about, (weight,) = describe_norm(heads, 64)
    assert about.kind == 2 and about.bias is None
    assert torch.equal(weight, torch.cat([n.weight for n in heads.norms]))
    heads.norms[1] = torch.nn.RMSNorm(16, eps=1e-5).requires_grad_(False)
    with pytest.raises(Unavailable, match="no norm that the kernels know"):
        describe_norm(heads, 64)
