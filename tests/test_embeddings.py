"Vectors, classes and scores: against transformers alone, the same bits in any company, and every way a request can go wrong."

import math, random

import pytest, torch
import torch.nn.functional as F
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from batchlab.errors import ModelError, ParamError, PromptError, UnsupportedModelError
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.llm.pooled import EmbeddingRequestOutput, PoolingOutput, PoolingRequestOutput
from batchlab.llm.pooling_params import PoolerConfig, PoolingParams
from batchlab.llm.rectangle import SoloRunner
from batchlab.models.tiny import tiny_adapter
from batchlab.tasks.pooling import PoolOptions, pool_prompts
from helpers import drain, ids, longrope, needs, one_thread, same
from test_encoders import encoder

pytestmark = one_thread
FAMILIES = "bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "mpnet", "llama"


def make(family, auto=AutoModel, **more):
    return encoder(family, auto, max_position_embeddings=140, **more)


def some_ids(n=14, most=120, seed=3):
    rng = random.Random(seed)
    lengths = [1, 2, 64, most, *(rng.randrange(3, most) for _ in range(n - 4))]
    return [[rng.randrange(2, 300) for _ in range(length)] for length in lengths]


def alone(model, prompt):
    "The model's own states of a prompt."
    with torch.inference_mode():
        return model.base_model(input_ids=torch.tensor([prompt])).last_hidden_state[0]


def logits(model, prompt, **more):
    "What the model's own head says of a prompt."
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt]), **more).logits[0]


def vector(out):
    return torch.tensor(out.outputs.embedding)


def vectors(outs):
    return [o.outputs.embedding for o in outs]


def near(got, want, tolerance=1e-4, rtol=1e-3):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=rtol)


@pytest.mark.parametrize("compile", [False, "auto"])
@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_those_of_the_model_alone(name, compile):
    model, prompts = make(name), some_ids()
    llm = LLM(model, compile=compile, max_num_seqs=5, max_num_batched_tokens=130)
    how = (lambda x: x[-1]) if name == "llama" else (lambda x: x.mean(0))
    outs = llm.embed(prompts)
    for prompt, out in zip(prompts, outs):
        want = F.normalize(how(alone(model, prompt)), dim=-1)
        assert F.cosine_similarity(vector(out), want, dim=0) > 0.99999, (name, len(prompt))
    assert type(outs[0]) is EmbeddingRequestOutput and not llm.loaded.can_generate
    assert not any(o.error for o in outs)
    if name == "mpnet":  # it attends by code of its own
        assert llm.loaded.shapes is None and isinstance(llm.engines["solo"].runner, SoloRunner)
    else:
        assert llm.loaded.shapes


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "mpnet"])
def test_the_same_bits_alone_in_company_and_shuffled(name, compiler):
    llm, prompts = LLM(make(name), max_num_seqs=6, max_num_batched_tokens=200), some_ids(20)
    if not compiler:
        pytest.skip("no kernels: needs a C++ compiler")
    assert llm.backend.batch_invariant, llm.backend
    want = vectors(llm.embed(prompts))
    order = random.Random(1).sample(range(20), 20)
    assert vectors(llm.embed([prompts[i] for i in order])) == [want[i] for i in order]
    assert [vectors(llm.embed([p]))[0] for p in prompts[:6]] == want[:6]


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "llama"])
def test_classes_are_those_of_the_models_own_head(name):
    model, prompts = make(name, AutoModelForSequenceClassification, num_labels=3), some_ids()
    llm = LLM(model, max_num_batched_tokens=150, max_num_seqs=8)
    for prompt, out, raw in zip(prompts, llm.classify(prompts), llm.reward(prompts)):
        want = logits(model, prompt)
        near(torch.tensor(out.outputs.probs), want.softmax(-1), 2e-4)
        near(raw.outputs.data, want, 1e-3)
    if name == "bert":  # of each token
        each = make(name, AutoModelForTokenClassification, num_labels=4)
        [out] = LLM(each).encode(prompts[:1], pooling_task="token_classify")
        near(out.outputs.data, logits(each, prompts[0]).softmax(-1))
    with pytest.raises(ModelError, match="no task 'score'"):
        llm.score("a", "b")
    with pytest.raises(ModelError, match="no task 'embed'"):
        llm.embed([[5, 6]])


def test_a_cross_encoder_gets_the_types_of_a_pair():
    model = make("bert", AutoModelForSequenceClassification, num_labels=1)
    llm, prompt, types = LLM(model, max_num_seqs=3), [5, 9, 2, 31, 7, 8], [0, 0, 0, 1, 1, 1]
    pair = {"prompt_token_ids": prompt, "token_type_ids": types}
    asked = [pair, {"prompt_token_ids": prompt}, [7, 8]]
    got = [o.outputs.score for o in pool_prompts(llm, "score", asked, None, PoolOptions())]
    each = (prompt, types), (prompt, [0] * 6), ([7, 8], [0, 0])
    want = [logits(model, p, token_type_ids=torch.tensor([t])).sigmoid().item() for p, t in each]
    assert got == pytest.approx(want, abs=1e-5) and abs(got[0] - got[1]) > 1e-4
    [bad] = llm.encode([pair | dict(token_type_ids=[0, 1])], pooling_task="classify")
    assert "token_type_ids" in bad.error and bad.refused


# Parameters, and what they take of the states `[layers, tokens, …]`.
TAKEN = [
    (dict(layers=[0, -1, 1]), lambda h: h[[0, -1, 1]]),
    (dict(layers=[1], positions=[0, -1]), lambda h: h[[1]][:, [0, -1]]),
    (None, lambda h: h[-1]),
    (dict(positions=[-1]), lambda h: h[-1][[-1]]),
    *[(dict(layers=[-1]), lambda h: h[[-1]])] * 4,
]


@pytest.mark.parametrize("compile", [False, "auto"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "llama"])
def test_layers_and_positions(name, compile):
    model, prompts = make(name), some_ids(8)
    llm = LLM(model, compile=compile, max_num_seqs=4, max_num_batched_tokens=90)
    outs = llm.encode(prompts, [params for params, _ in TAKEN])
    for prompt, out, (_, take) in zip(prompts, outs, TAKEN, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        assert type(out) is PoolingRequestOutput
        near(out.outputs.data, take(torch.stack([h[0] for h in states])), 2e-3, 2e-3)
    assert "no token 4" in llm.encode([[5, 6]], dict(positions=[4]))[0].error


def test_a_model_that_writes_embeds_too_with_its_prefix_cache(caplog):
    model = tiny_model("llama")
    llm = LLM(model, tiny_tokenizer())
    texts = [f"{'The same long beginning of every one of these texts. ' * 3}{i}" for i in range(6)]
    llm.embed(texts[:1])
    assert "not trained for embeddings" in caplog.text
    outs, said = llm.embed(texts), llm.generate(texts, dict(max_tokens=4, temperature=0))
    assert all(o.num_cached_tokens >= 100 for o in outs[1:])
    assert caplog.text.count("not trained") == 1
    for text, out in zip(texts, outs):
        want = F.normalize(alone(model, llm.tokenizer(text)["input_ids"])[-1], dim=-1)
        near(vector(out), want)
    how = dict(max_num_batched_tokens=70, max_num_seqs=3)
    mean = LLM(model, tiny_tokenizer(), pooler_config=PoolerConfig("MEAN", False), **how)
    first, second = mean.embed(texts), mean.embed(texts)  # chunks differ, bits don't
    each = [vectors(mean.embed([t]))[0] for t in texts]
    for outs in (first, second):
        assert same(vectors(outs), each, mean.backend)
    near(vector(first[0]), alone(model, llm.tokenizer(texts[0])["input_ids"]).mean(0), 1e-3)
    [states] = llm.encode(said[:1])  # of a prompt and its answer
    assert len(states.outputs.data) == len(said[0].prompt_token_ids) + 4


def test_scores_are_cosines_and_forms_are_checked():
    llm = LLM(make("bert"), tiny_tokenizer())
    query, *others = map(vector, llm.embed(["query", "a", "b", "a"]))
    many = llm.score("query", ["a", "b", "a"])
    want = [float(query @ other) for other in others]
    assert [o.outputs.score for o in many] == pytest.approx(want, abs=1e-6)
    assert len(llm.score(["a", "b"], ["c", "d"])) == 2
    cut = dict(tokenization_kwargs=dict(truncate_prompt_tokens=-1))
    [long], [fine] = llm.score("x" * 200, ["a"]), llm.score("x" * 200, ["a"], **cut)
    assert "truncate_prompt_tokens" in long.error and math.isnan(long.outputs.score)
    assert not fine.error


def test_params_and_results():
    llm, prompts = LLM(make("bert")), [[5, 6, 7], [8]]
    embed = lambda params=None, **more: llm.embed(prompts, pooling_params=params, **more)
    [whole, _], [cut, _] = embed(PoolingParams(use_activation=False)), embed(dict(dimensions=16))
    v = vector(whole)
    torch.testing.assert_close(vector(cut), F.normalize(v[:16], dim=-1))
    assert cut.outputs.hidden_size == 16 and cut.num_tokens == 3 and not (v.norm() - 1).abs() < 1e-3
    needs("pandas")
    assert [len(x) for x in embed().to_pandas().embedding] == [64, 64]
    types = AutoModelForSequenceClassification
    for call, error, words in (
        (lambda: embed(dict(dimensions=65)), ParamError, "more than the 64"),
        (lambda: embed([None]), ParamError, "1 pooling"),
        (lambda: embed(PoolingParams("classify")), ParamError, "task 'embed'"),
        (lambda: llm.generate(prompts), ModelError, "writes no text"),
        (lambda: embed(temperature=0), TypeError, "temperature"),
        (lambda: embed(tokenization_kwargs=dict(padding=True)), ParamError, "padding"),
        (lambda: embed(prompt_name="query"), ParamError, "no prompt"),
        (lambda: llm.embed(["text"]), ModelError, "tokenizer"),
        (lambda: llm.score(prompts, [[5]]), PromptError, "compare"),
        (lambda: llm.score([], [[5]]), PromptError, "compare"),
        (lambda: llm.encode(prompts, dict(layers=[4])), ParamError, "no layer 4"),
        (lambda: PoolerConfig(use_activation="false"), ParamError, "use_activation"),
        (lambda: PoolerConfig.of(5), ParamError, None),
        (lambda: PoolingParams(use_activation="false"), ParamError, "use_activation"),
        (lambda: LLM(make("albert", types, num_labels=3)), UnsupportedModelError, "as BERT"),
    ):
        with pytest.raises(error, match=words):
            call()
    outs = llm.embed([[5], [999], [], {"prompt_token_ids": [5] * 141}])
    assert [bool(o.error) for o in outs] == [False, True, True, True]
    assert "140" in outs[3].error and outs[1].outputs.embedding == []
    plan = llm.plan(prompts, PoolingParams("embed"))
    assert plan.prompt_tokens == 4 and plan.max_output_tokens == 0
    llm.pooler.how = ("cls", "mean")
    assert len(embed(dict(dimensions=100))[0].outputs.embedding) == 100
    with pytest.raises(ParamError, match="more than the 64"):
        llm.encode(prompts, dict(dimensions=100))


def test_texts_beyond_a_switch_of_rotations_change_nobody_else():
    model = longrope()
    prompts = [list(range(*at)) for at in ((7, 10), (40, 52), (60, 85), (90, 130), (5, 21))]
    for compile in (False, "auto"):
        llm = LLM(model, compile=compile)
        for prompt, out in zip(prompts, llm.embed(prompts)):
            near(vector(out), F.normalize(alone(model, prompt)[-1], dim=-1))
        assert {*llm.engines} == {"packed", "solo"}


def test_texts_are_cut_where_their_own_params_say_so_and_ids_are_no_text():
    llm = LLM(make("bert"), tiny_tokenizer())
    params = [None, dict(truncate_prompt_tokens=-1), None]
    whole, cut, other = llm.embed(["x" * 200] * 2 + ["y"], pooling_params=params)
    assert "truncate_prompt_tokens" in whole.error and not other.error
    assert len(cut.prompt_token_ids) == 140
    as_text, as_ids = "[60, 61]", [60, 61]
    scored = llm.score(as_text, [as_text, as_ids])
    assert [o.outputs.score < 0.999 for o in scored] == [False, True]


def test_a_result_does_not_hold_the_states_of_its_step():
    llm = LLM(make("bert"), pooler_config=PoolerConfig("cls", False))
    [one, *_] = llm.encode(some_ids(), pooling_task="embed")
    assert one.outputs.data.untyped_storage().nbytes() == one.outputs.data.nbytes


def test_a_text_that_begins_again_is_pooled_once():
    model, prompt = tiny_model("llama", seed=2), [5 + i % 200 for i in range(150)]
    llm, events = LLM(model, tiny_tokenizer(), max_num_batched_tokens=70, max_num_seqs=3), []
    llm.add_request(prompt, PoolingParams("token_embed"), events.append)
    llm.step()
    llm.engines["packed"].reset()  # its blocks are gone, as after an error of a step
    drain(llm)
    near(events[-1].output.outputs.data, alone(model, prompt))


@pytest.mark.parametrize("pad", [7, None])
def test_a_classifier_that_writes_takes_the_last_token_that_is_no_padding(pad):
    model = make("llama", AutoModelForSequenceClassification, pad_token_id=pad, num_labels=1)
    for compile in (False, "auto"):
        llm = LLM(model, compile=compile)
        for prompt in ([5, 9, 7], [5, 9], [7], [5, 7, 9, 7, 7]):
            near(llm.reward([prompt])[0].outputs.data, logits(model, prompt))


def test_settings_of_the_pooler_hold_for_all_tasks():
    judge, prompt = make("bert", AutoModelForSequenceClassification, num_labels=3), [5, 6, 7]
    own, plain = logits(judge, prompt), LLM(judge, pooler_config=PoolerConfig(use_activation=False))
    probs = lambda **more: torch.tensor(plain.classify([prompt], **more)[0].outputs.probs)
    near(probs(), own)
    near(probs(pooling_params=PoolingParams(use_activation=True)), own.softmax(-1))
    [states] = LLM(make("bert"), pooler_config=PoolerConfig(use_activation=True)).encode([prompt])
    torch.testing.assert_close(states.outputs.data.norm(dim=-1), torch.ones(3))
    with pytest.raises(ParamError, match="pools by itself"):
        LLM(judge, pooler_config=dict(pooling_type="cls"))
    assert PoolingOutput(torch.empty(0)) != PoolingOutput(torch.tensor([0.7]))
    assert PoolingOutput(torch.ones(2)) == PoolingOutput(torch.ones(2))


def test_every_way_to_a_vector_has_the_prompt_of_the_model():
    llm = LLM(make("bert"), tiny_tokenizer())
    llm.pooler.prompts = dict(query="find: ", document="text: ")
    llm.pooler.default_prompt = "text: "
    tokens = lambda text: {"prompt_token_ids": llm.tokenizer(text)["input_ids"]}
    by_hand = lambda text: llm.embed([tokens(text)])[0].outputs.embedding
    whole, cut = PoolingParams("embed", raw=True), PoolingParams("embed", truncate_prompt_tokens=-1)
    named, forms = dict(prompt_name="query"), ("one", ["one", "two"], [{"prompt": "one"}])
    for text, prompts, how in (
        *[("text: one", prompts, {}) for prompts in forms],
        *[("find: one", prompts, named) for prompts in forms],
        ("text: one", ["one", "two"], dict(pooling_params=[cut, None])),
        ("find: one", ["one", "two"], dict(pooling_params=[named, None])),
        ("text: one", "one", dict(prompt_name="document")),
    ):
        assert llm.embed(prompts, **how)[0].outputs.embedding == by_hand(text)
    assert llm.encode("one", whole)[0].outputs.data.tolist() == by_hand("text: one")
    one, two = (torch.tensor(by_hand(f"text: {text}")) for text in ("one", "two"))
    score = F.cosine_similarity(one, two, dim=0).item()
    for more in ({}, dict(pooling_params=PoolingParams("score"))):
        [out] = llm.score("one", "two", **more)
        assert out.outputs.score == pytest.approx(score, abs=1e-6)
    with pytest.raises(ParamError, match="prompt_name is for vectors"):
        llm.encode("one", named, pooling_task="token_embed")
    assert "two texts" in llm.encode("one", pooling_task="score")[0].error


def test_a_loaded_cross_encoder_keeps_its_activation():
    judge, prompt = make("bert", AutoModelForSequenceClassification, num_labels=1), [5, 6, 7]
    logit = logits(judge, prompt)
    near(LLM(judge).encode([prompt], pooling_task="score")[0].outputs.data, logit.sigmoid())
    judge.config.sentence_transformers = dict(activation_fn="torch.nn.modules.linear.Identity")
    near(LLM(judge).encode([prompt], pooling_task="score")[0].outputs.data, logit)


def test_types_of_tokens_that_a_model_lacks_are_one_prompts_error():
    typed = {"prompt_token_ids": [5, 6], "token_type_ids": [0, 1]}
    for model, n in (
        (make("roberta", type_vocab_size=1), 1),
        (tiny_model("gpt2"), 0),
        (make("distilbert"), 0),
    ):
        good, bad = LLM(model).encode([[5, 6], typed])
        assert not good.error and f"has {n} types" in bad.error
    assert not LLM(make("bert")).encode([typed])[0].error


def test_a_decoder_for_vectors_takes_what_it_was_trained_for():
    llm = LLM(tiny_model("llama"), tiny_tokenizer())
    llm.pooler.trained, llm.pooler.limit = True, 10
    outs = llm.embed(["x" * 40, "x" * 4], pooling_params=[dict(truncate_prompt_tokens=-1), None])
    assert len(outs[0].prompt_token_ids) == 10 and not outs[1].error
    assert "takes 10" in llm.embed("x" * 40)[0].error
    assert ids(llm.generate("x" * 40, dict(max_tokens=2)))[0]


def test_an_answer_is_read_by_the_adapter_that_wrote_it(tmp_path):
    model = tiny_model("llama")
    tiny_adapter(tmp_path / "a", model)
    llm = LLM(model, tiny_tokenizer(), lora_modules=dict(a=str(tmp_path / "a")))
    outs = [llm.generate("hi", dict(max_tokens=3), lora_request=who)[0] for who in ("a", None)]
    mine, base = (o.outputs.data for o in llm.encode(outs))
    again = [{"prompt_token_ids": [*o.prompt_token_ids, *o.outputs[0].token_ids]} for o in outs]
    assert mine.equal(llm.encode(again[0], lora_request="a")[0].outputs.data)
    assert base.equal(llm.encode(again[1])[0].outputs.data)
    assert not mine.equal(llm.encode(again[0])[0].outputs.data)


def test_texts_and_answers_share_one_engine_its_steps_and_its_blocks():
    model = tiny_model("llama", seed=2)
    prompts = [[5 + (i * j) % 200 for j in range(3 + 9 * i)] for i in range(6)]
    greedy = dict(temperature=0, max_tokens=6)
    each = [LLM(model, tiny_tokenizer()).generate(p, greedy)[0] for p in prompts]
    llm, events, both = LLM(model, tiny_tokenizer(), max_num_batched_tokens=70), {}, []

    def watch(engine, event, x):
        if event == "schedule":
            both.append(len({type(row.request.task) for row in x.rows}))

    llm.watchers.append(watch)
    for i, p in enumerate(prompts):
        for kind, params in (("write", greedy), ("pool", PoolingParams("token_embed"))):
            note = lambda e, at=(kind, i): events.update({at: e.output})
            llm.add_request(p, params, note)
    gone = lambda e: events.update(gone=e.output)
    llm.cancel(llm.add_request([9] * 50, PoolingParams("embed"), gone))
    drain(llm)
    assert "cancelled" in events["gone"].error and events["gone"].outputs.embedding == []
    assert type(events["pool", 0]) is PoolingRequestOutput and not llm.loop.groups
    assert {*llm.engines} == {"packed"} and 2 in both
    assert ids(events["write", i] for i in range(6)) == ids(each)
    for i, p in enumerate(prompts):
        near(events["pool", i].outputs.data, alone(model, p))
    again = llm.embed(prompts[-1])[0]  # what the answers left in the cache serves a vector
    assert again.num_cached_tokens == len(prompts[-1]) - 1
    near(vector(again), F.normalize(alone(model, prompts[-1])[-1], dim=-1))
