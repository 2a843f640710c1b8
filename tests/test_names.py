"Names that people bring from vLLM, transformers and the OpenAI API: each works, is refused by name, or is reported; and calls of which nothing can run raise."

import inspect, logging, re, warnings
from functools import cache, partial

import pytest, torch

from helpers import ROOT, assistant, json_lines, needs, same, user
from test_package import py

from batchlab import LLM, AsyncLLM, SamplingParams
from batchlab.compat import vllm
from batchlab.core.params import RULES
from batchlab.errors import ModelError, ModelNotFoundError, ParamError, PromptError
from batchlab.llm.inputs import split_settings
from batchlab.models import encode_chat, tiny_model, tiny_tokenizer
from batchlab.llm.pooling_params import PoolingParams
from batchlab.jobs.schema import parse_online
from batchlab.jobs.settings import BadRequest

TALK = [
    user("hi"),
    assistant("yo"),
    user("so"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@cache
def tiny(chat=True):
    return tiny_model("llama"), tiny_tokenizer(chat=chat)


@pytest.fixture(scope="module")
def llm():
    return LLM(*tiny())


@pytest.fixture
def lines(caplog, monkeypatch):
    "What batchlab has logged, as a function."
    monkeypatch.setattr(logging.getLogger("batchlab"), "propagate", True)
    caplog.set_level(logging.WARNING, "batchlab")
    return lambda: [
        r.getMessage()
        for r in caplog.records
        if r.name == "batchlab" and r.levelno >= logging.WARNING
    ]


# --- settings


SETTINGS = """
[{"temprature": 1}, "'temperature'"]
[{"temprature": null}, "'temperature'"]
[{"max_new_tokens": 4}, "'max_tokens'"]
[{"guided_json": {}}, "guided_json"]
[{"do_sample": true}, "do_sample"]
[{"best_of": 2}, "best_of"]
"""


@pytest.mark.parametrize("kw, words", json_lines(SETTINGS))
def test_a_setting_that_there_is_not_is_refused_with_a_near_name(kw, words):
    with pytest.raises(TypeError, match=words):
        SamplingParams(**kw)
    with pytest.raises(ParamError, match=[*kw][0]):
        SamplingParams.of(kw)  # a dict of settings, as files and calls have it


@pytest.mark.parametrize("kw", [dict(temprature=1), {"max-tokens": 3}])
def test_a_near_name_in_a_dict_of_a_prompt_is_refused(kw):
    with pytest.raises(ParamError, match="'temperature'|'max_tokens'"):
        split_settings(dict(prompt="p", **kw))


def test_positions_and_names_do_not_meet():
    assert SamplingParams(2, max_tokens=3) == SamplingParams(n=2, max_tokens=3)
    for make in (lambda: SamplingParams(2, n=3), lambda: LLM(tiny()[0], model=3)):
        with pytest.raises(TypeError, match="multiple values"):
            make()


# --- vLLM's engine


ARGUMENTS = """
["max_num_seq", "Did you mean 'max_num_seqs'"]
["gpu_memory_utilization", "gpu_memory_utilization"]
["max_tokens", "max_tokens"]
["voice", "voice"]
"""


@pytest.mark.parametrize("name, words", json_lines(ARGUMENTS))
def test_an_argument_that_there_is_not_is_a_type_error(name, words):
    with pytest.raises(TypeError, match=words):
        LLM(tiny()[0], **{name: 1})


@pytest.mark.parametrize(
    "name",
    ["speculative_config", "hf_overrides", "tokenizer_mode", "load_format", "kv_cache_dtype"],
)
@pytest.mark.parametrize("kind", [LLM, vllm.LLM])
def test_what_would_change_the_answers_is_refused(name, kind):
    "Also by the class for programs written for vLLM: what it has not got is no argument."
    with pytest.raises(TypeError, match=name):
        kind(tiny()[0], **{name: "x"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("tiny")
    for part in tiny():
        part.save_pretrained(at)
    return str(at)


def test_arguments_of_vllm(folder, lines):
    made = vllm.LLM(
        model=folder,
        tokenizer=folder,
        dtype="bfloat16",
        gpu_memory_utilization=0.9,
        tensor_parallel_size=2,
        kv_cache_memory_bytes=2**20,
        enforce_eager=True,
        seed=0,
        trust_remote_code=True,
        task="generate",
    )
    assert (made.model.dtype, made.limits.kv_bytes) == (torch.bfloat16, 2**20)
    assert made.get_tokenizer()("a") == tiny()[1]("a")
    [said] = [s for s in lines() if "without effect" in s]
    idle = ("gpu_memory_utilization=0.9", "tensor_parallel_size=2", "enforce_eager", "trust_remote")
    assert all(k in said for k in idle) and "seed" not in said
    with pytest.raises(ModelError):
        LLM(folder, "./nowhere")
    with pytest.raises(ModelError, match="came without a tokenizer"):
        LLM(tiny()[0]).get_tokenizer()


def test_default_sampling_params_are_the_models(llm):
    model = tiny_model("llama")
    assert LLM(model).get_default_sampling_params() == SamplingParams()
    model.generation_config.update(
        temperature=0.6, top_k=5, max_new_tokens=7, do_sample=True, eos_token_id=2
    )
    assert LLM(model).get_default_sampling_params() == SamplingParams(
        temperature=0.6, top_k=5, max_tokens=7
    )


EXAMPLE = """
from batchlab.compat.vllm import LLM, SamplingParams, RequestOutput
from batchlab.compat.vllm import GuidedDecodingParams, StructuredOutputsParams
assert GuidedDecodingParams is StructuredOutputsParams
shared = 'You are an expert school principal, skilled in effectively managing faculty and staff. '
prompts = [shared + p for p in ('Hello, my name is', 'The capital of France is', 'The future of AI is')]
params = SamplingParams(temperature=0.0)
texts = []
for caching in (False, True):
    llm = LLM(model={folder!r}, enable_prefix_caching=caching, gpu_memory_utilization=0.4)
    llm.generate(prompts[0], params)
    outputs: list[RequestOutput] = llm.generate(prompts, params)
    texts.append([o.outputs[0].text for o in outputs])
    print(all(o.num_cached_tokens for o in outputs))
    llm.close()
print(texts[0] == texts[1])
"""


def test_a_program_for_vllm_runs_with_its_imports_changed(folder, tmp_path):
    strict = 'import warnings; warnings.simplefilter("error", DeprecationWarning)\n'
    said = py(strict + EXAMPLE.format(folder=folder), tmp_path)
    assert said.split() == ["False", "True", "True"]


# --- conversations


def ids_of(tokenizer, messages, **kw):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kw)[
        "input_ids"
    ]


PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ mood }}"
)
CALL = dict(type="function", function=dict(name="f", description="d", parameters={}, arguments={}))


GOES_ON = dict(continue_final_message=True)


@pytest.mark.parametrize(
    "messages, kw, theirs",
    [
        (TALK, {}, dict(add_generation_prompt=True)),
        (TALK[:2], GOES_ON, GOES_ON),
        (TALK[:2], dict(add_generation_prompt=False), {}),
        (
            [*TALK, dict(role="assistant", tool_calls=[CALL]), dict(role="tool", content="5")],
            dict(tools=[CALL], chat_template=PLAIN, chat_template_kwargs=dict(mood="!")),
            dict(tools=[CALL], chat_template=PLAIN, mood="!"),
        ),
    ],
)
def test_conversations_are_what_transformers_writes(llm, messages, kw, theirs):
    own = dict(messages=messages, **kw)
    outs = [
        *llm.chat(messages, GREEDY, **kw),
        *llm.generate(own, GREEDY),
        *llm.chat([messages, TALK], GREEDY, **kw)[:1],
        *llm.chat([own], GREEDY),
        *(e.output for e in llm.stream([own], GREEDY, chat=True) if e.output),
    ]
    got = [(o.prompt_token_ids, o.error) for o in outs]
    assert got == [(ids_of(llm.tokenizer, messages, **theirs), None)] * 5


def test_a_template_may_be_a_file_and_content_may_come_in_parts(llm, tmp_path):
    (tmp_path / "plain.jinja").write_text(PLAIN)
    prompt_of = lambda talk, **kw: llm.chat(talk, GREEDY, **kw)[0].prompt
    file = tmp_path / "plain.jinja"
    assert prompt_of(TALK, chat_template=file) == prompt_of(TALK, chat_template=PLAIN)
    said = lambda content: [user(content)]
    parts = [dict(type="text", text=t) for t in "ab"]
    assert prompt_of(said(parts)) == prompt_of(said("a\nb"))


def test_a_conversation_in_add_request_and_asyncio(llm):
    import asyncio

    prompt, got = dict(messages=TALK[:2], **GOES_ON, max_tokens=2, temperature=0), []
    llm.add_request(prompt, stream_callback=lambda e: got.append(e.output))
    while llm.has_unfinished:
        llm.step()
    want = got[-1].outputs[0].token_ids

    async def both():
        async with AsyncLLM(llm) as asked:
            streams = asked.generate(prompt), asked.chat(TALK[:2], GREEDY, **GOES_ON)
            return [[o async for o in stream][-1] for stream in streams]

    ends = asyncio.run(both())
    assert [e.outputs[0].token_ids[:2] for e in ends] == [want, want] and len(want) == 2
    for prompt in ("hi", dict(prompt="hi")):
        refused(ParamError, "prompt first", llm.add_request, "id1", prompt, GREEDY)


def test_a_chat_has_a_priority_and_a_time(llm):
    import asyncio

    async def read(**how):
        return [o async for o in AsyncLLM(llm).chat(TALK, GREEDY, **how)]

    seen, note = [], lambda _, event, x: event == "queued" and seen.append(x.priority)
    llm.watchers.append(note)
    outs = llm.chat(TALK, GREEDY, priority=7, timeout=1e-9)
    for how in (dict(timeout=1e-9), dict(priority=8)):
        outs += asyncio.run(read(**how))[-1:]
    llm.watchers.remove(note)
    llm.stop()
    reasons = [o.outputs[0].finish_reason for o in outs]
    assert (reasons, seen) == (["timeout", "timeout", "length"], [7, 8])


def test_an_answer_begun_and_closed_is_said(llm):
    with pytest.warns(UserWarning, match="continue_final_message=True"):
        llm.chat(TALK[:2], GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.chat(TALK[:2], GREEDY, **GOES_ON)
        llm.logprobs([TALK[:2]])


def test_conversations_are_scored_as_the_template_writes_them(llm):
    one, two = llm.logprobs([TALK[:2], TALK])
    [same] = llm.logprobs(TALK)
    ids = ids_of(llm.tokenizer, TALK)
    logits = llm.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    theirs = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert two.token_ids == ids == same.token_ids and one.token_ids == ids_of(
        llm.tokenizer, TALK[:2]
    )
    torch.testing.assert_close(torch.tensor(two.logprobs), theirs, atol=1e-4, rtol=1e-4)


# --- loud


def refused(error, words, call, *args, **kw):
    with pytest.raises(error, match=words):
        call(*args, **kw)


def test_what_is_wrong_with_all_of_a_call_raises(llm):
    import pandas as pd
    from tqdm import tqdm

    errors = ModelError, PromptError, ParamError, TypeError
    model, prompt, param, name = [partial(refused, error) for error in errors]
    bare, plain = LLM(tiny()[0]), LLM(*tiny(chat=False))
    streamed = lambda llm, given: [*llm.stream(given)]
    for given in (["hi", "yo"], [None, "yo"]):
        model("without a tokenizer", bare.generate, given)
    model("without a tokenizer", streamed, bare, "hi")
    for call in (bare.plan, bare.logprobs):
        model("tokenizer", call, "hi")
    model("no chat template", plain.chat, TALK)
    prompt("llm.generate", llm.chat, "hello")
    prompt("messages must be", llm.chat, ["a", "b"])
    for given in ([TALK], TALK):
        prompt("llm.chat", llm.generate, given)
    prompt("llm.chat", streamed, llm, TALK)
    prompt(r"frame\['prompt'\]", llm.generate, pd.DataFrame(dict(prompt=["a"])))
    prompt(r"d\['prompt'\]", llm.generate, dict(prompt=["a", "b"]))
    prompt("got 7", llm.generate, 7)
    prompt("None", llm.generate, None)
    prompt("None", llm.plan, [None])
    param("use_tqdm", llm.logprobs, "hi", ["yo"])
    param("max_tokens", llm.generate, dict(prompt="a", max_tokns=3))
    param("chat_template", llm.chat, TALK, chat_template="nowhere.jinja")
    param("tools must be", llm.chat, TALK, tools="f")
    param("got int", LLM, tiny()[0], 5)
    param("temperature", llm.logprobs, dict(prompt="a", temperature=0))
    param("tokenizer", AsyncLLM, llm, "nowhere")
    param("max_num_seqs", AsyncLLM, llm, max_num_seqs=3)
    param("lora_request", llm.generate, "a", lora_request=7)
    name("Did you mean 'timeout'", llm.generate, "a", time_out=3)
    name("system", LLM, *tiny(), system="x")
    name("max_tokens", llm.generate, "a", GREEDY, max_tokens=3)
    name("temperature", llm.logprobs, "a", temperature=0)
    name("stream", llm.generate, "a", stream=True)
    assert llm.generate([]) == [] == llm.chat([]) and not llm.has_unfinished
    assert llm.generate("hi", GREEDY, use_tqdm=tqdm)[0].error is None
    assert plain.chat(TALK, GREEDY, chat_template="{{ messages[0].content }}")[0].prompt == "hi"


def test_a_models_fault_with_some_prompts_is_theirs(llm):
    plain = LLM(*tiny(chat=False))
    one, two = plain.generate(["a", {"messages": TALK}], GREEDY)
    assert one.error is None and one.outputs[0].token_ids and "no chat template" in two.error
    one, two = LLM(tiny()[0]).generate([[5, 6], "yo"], GREEDY)
    assert one.error is None and "without a tokenizer" in two.error


def test_what_a_conversations_dict_says_is_checked(llm, tmp_path):
    (file := tmp_path / "secret").write_text("{{ messages }}")
    wrong = dict(
        chat_template_kwargs=dict(chat_template_kwargs="x"),
        return_tensors=dict(chat_template_kwargs=dict(return_tensors="pt")),
        add_generation_prompt=dict(add_generation_prompt="false"),
        tools=dict(tools="f"),
        chat_template=dict(chat_template=str(file)),
    )
    talks = [dict(messages=TALK, **kw) for kw in wrong.values()]
    first, *outs = llm.generate(["a", *talks], GREEDY)
    assert first.error is None and all(word in o.error for o, word in zip(outs, wrong))
    first = [[dict(role=role, content="be brief")] for role in ("developer", "system")]
    one, other = [llm.chat([*said, *TALK], GREEDY)[0].prompt for said in first]
    assert one == other


def test_scores_of_dicts_and_of_short_prompts(llm):
    talk, ids = {"messages": TALK}, [5, 6, 7]
    scored = [s.token_ids for p in ([talk], talk, TALK) for s in llm.logprobs(p)]
    assert scored == [scored[0]] * 3
    short, long = llm.logprobs([ids, [*ids, 8, 9, 10]], start=5)
    assert (short.error, short.logprobs, long.error, len(long.logprobs)) == (None, [], None, 1)
    assert llm.logprobs([ids], start=3)[0].logprobs == []
    last = llm.logprobs([ids])[0].logprobs[-1:]
    assert same(last, llm.logprobs([ids], start=2)[0].logprobs, llm.backend)


def test_none_in_a_prompts_dict_says_nothing():
    assert split_settings(
        dict(prompt="p", temperature=None, top_p=float("nan"), max_tokens=None, seed=3)
    ) == (dict(prompt="p"), dict(max_tokens=None, seed=3))


def test_a_greedy_default_keeps_what_a_prompt_samples_by(llm):
    narrow = dict(temperature=0, top_k=5, top_p=0.5)
    [out] = llm.generate([dict(prompt="a", temperature=0.7)], narrow)
    assert (out.params.temperature, out.params.top_k, out.params.top_p) == (0.7, 5, 0.5)
    hot = SamplingParams(temperature=1, seed=1, top_k=3)
    first, _ = llm.generate(["a", "bc"], [SamplingParams(**narrow, min_p=0.1), hot])
    [plain] = llm.generate("a", SamplingParams(temperature=0))
    assert first.outputs[0].token_ids == plain.outputs[0].token_ids


IDLE = """
{"logprobs": 5, "logprob_token_ids": [1]}
{"logprob_token_ids": []}
{"logprobs_mode": "raw_logits"}
{"structured_outputs": {"jsno": {}}}
"""


@pytest.mark.parametrize("kw", json_lines(IDLE))
def test_settings_without_effect_are_refused(kw):
    with pytest.raises(ParamError, match="json" if "jsno" in str(kw) else next(reversed(kw))):
        SamplingParams(**kw)


def test_true_asks_for_log_probabilities_everywhere():
    for made in (
        SamplingParams(logprobs=True),
        SamplingParams.of(dict(logprobs=True)),
        SamplingParams(**split_settings(dict(prompt="p", logprobs=True))[1]),
        SamplingParams(logprobs=True, max_tokens=16),
    ):
        assert made == SamplingParams(logprobs=0)
    assert SamplingParams(logprobs=False) == SamplingParams()


def test_vllms_structured_outputs_are_read():
    from batchlab import StructuredOutputsParams

    want = vars(StructuredOutputsParams(regex="a"))
    none = dict(backend="xgrammar", disable_fallback=True, whitespace_pattern=None)
    assert vars(vllm.StructuredOutputsParams(regex="a", **none)) == want
    wish = vllm.SamplingParams(guided_decoding=vllm.GuidedDecodingParams(regex="a"))
    assert vars(wish.structured_outputs) == want
    for kw in (dict(jsno={}), dict(regex="a", structural_tag="x")):
        refused(TypeError, [*kw][-1], StructuredOutputsParams, **kw)


def test_the_log_of_failures_is_short(lines):
    from batchlab.llm.inputs import log_failures
    from batchlab.llm.outputs import RequestGroup, RequestOutput

    def refused(i):
        "What becomes of a prompt that is refused in words of its own, by the statement that refuses all of them."
        group = RequestGroup(str(i))
        try:
            raise PromptError(f"a prompt must be a string, got {i} {i * i}")
        except PromptError as e:
            group.refuse(e)
        return group.result()

    others = [RequestOutput(x, error=f"{x} {x}") for x in map(chr, range(97, 110))]
    log_failures([*map(refused, range(300)), *others])
    [said] = lines()
    assert "300 ×" in said and "9 others" in said and len(said) < 1200


def test_settings_of_a_call_and_of_a_prompt(llm):
    [want] = llm.generate("hi", GREEDY)
    ids = llm.tokenizer("hi")["input_ids"]
    outs = [
        *llm.generate("hi", dict(temperature=0, max_tokens=4)),
        *llm.generate(prompts="hi", sampling_params=GREEDY, lora_request=None),
        *llm.generate([dict(prompt="hi", max_tokens=4)], dict(temperature=0, max_tokens=9)),
        *llm.generate([dict(prompt_token_ids=ids, temperature=0, max_tokens=4)]),
    ]
    assert [o.outputs[0].token_ids for o in outs] == [want.outputs[0].token_ids] * 4
    assert outs[2].params == GREEDY
    theirs = vllm.LLM(*tiny())
    [out] = theirs.chat(TALK, GREEDY, None, None, "{{ messages[0].content }}", "auto")
    assert (out.error, out.prompt) == (None, "hi")
    refused(ParamError, "lora_request", theirs.chat, TALK, lora_request=7)


def test_requests_that_failed_are_counted_by_reason(llm, lines):
    outs = llm.generate(["a"] * 3 + [[999999]] * 2 + ["x " * 300, "x " * 301, None], GREEDY)
    [said] = lines()
    assert said.startswith("5 of 8") and sum(o.error is not None for o in outs) == 5
    assert re.search(r"2 × .*999999.*outputs\[3\].*2 × .*outputs\[5\].*1 × ", said)
    llm.generate(["a", "b"], GREEDY)
    assert len(lines()) == 1


def test_encode_chat_tells_the_models_fault_from_the_messages():
    tok = tiny_tokenizer()
    for messages in ("hi", [], [dict(role="user")], [user([dict(type="image_url")])]):
        refused(PromptError, None, encode_chat, tok, messages)
    tok.chat_template = "{{ raise_exception('no') }}"
    refused(PromptError, "refuses these messages", encode_chat, tok, TALK)
    refused(ModelError, None, encode_chat, None, TALK)


def test_tools_that_the_template_does_not_know_are_refused(llm):
    [out] = llm.chat(TALK, GREEDY, tools=[CALL])
    assert "knows no tools" in out.error


# --- numbers: whole ones may be floats, and none is too large for an error

WHOLE = dict(
    n=2,
    top_k=5,
    seed=7,
    max_tokens=3,
    min_tokens=1,
    logprobs=2,
    prompt_logprobs=1,
    prompt_logprob_start=1,
    truncate_prompt_tokens=4,
)
HUGE = 10**400, -(10**400), 10**5000


def test_a_whole_number_may_be_written_as_a_float(llm):
    assert SamplingParams(**{k: float(v) for k, v in WHOLE.items()}) == SamplingParams(**WHOLE)
    for floats, ints in (
        (dict(stop_token_ids=[5.0]), dict(stop_token_ids=[5])),
        (dict(allowed_token_ids=[6.0]), dict(allowed_token_ids=[6])),
        (dict(bad_words=[[8.0]]), dict(bad_words=[[8]])),
        (dict(logit_bias={9.0: 1}), dict(logit_bias={9: 1})),
        (dict(logprob_token_ids=[3.0]), dict(logprob_token_ids=[3])),
    ):
        assert SamplingParams(**floats) == SamplingParams(**ints)
    layered = PoolingParams(dimensions=4.0, layers=[0.0, -1.0])
    assert layered == PoolingParams(dimensions=4, layers=(0, -1))
    how = dict(max_tokens=2.0, temperature=0.0)
    [one] = llm.generate([[5.0, 6.0]], how, priority=1.0, timeout=100)
    assert one.prompt_token_ids == [5, 6] and len(one.outputs[0].token_ids) == 2
    small = LLM(*tiny(), max_num_seqs=4.0, max_model_len=50.0).limits
    assert (small.max_num_seqs, small.max_model_len) == (4, 50)
    assert {type(n) for n in (*one.prompt_token_ids, small.max_num_seqs)} == {int}
    asked = parse_online(dict(prompt=[5.0, 6.0], max_tokens=3.0, n=2.0, priority=1.0), "text")
    assert (asked.params.max_tokens, asked.params.n, asked.priority) == (3, 2, 1)
    refused(BadRequest, "128", parse_online, dict(prompt="x", n=200.0), "text")
    for wrong in (2.5, True, "3", float("inf"), float("nan")):
        refused(ParamError, None, SamplingParams, max_tokens=wrong)


each_huge = pytest.mark.parametrize("huge", HUGE, ids=("long", "negative", "unwritable"))


@each_huge
def test_a_number_of_any_size_is_read_or_refused_by_name(huge):
    for name in RULES:
        try:
            SamplingParams(**{name: huge})
        except ParamError as e:
            assert name in str(e) and len(str(e)) < 400
    for kw in (
        dict(stop=huge),
        dict(bad_words=[huge]),
        dict(stop_token_ids=huge),
        dict(logit_bias={huge: "x"}),
        dict(logit_bias={5: huge}),
    ):
        refused(ParamError, [*kw][0], SamplingParams, **kw)


@each_huge
def test_a_request_may_hold_a_number_of_any_size(llm, huge):
    ask = lambda prompt=(5,), call={}, **kw: llm.generate(
        [[*prompt]], SamplingParams(**kw), **call
    )[0]
    for call in (dict(priority=huge), dict(timeout=huge)):
        try:
            assert not ask(call=call, max_tokens=1).error
        except ParamError as e:
            assert "timeout" in str(e)
    if huge < 0:
        return
    for kw in (
        dict(stop_token_ids=[huge]),
        dict(logit_bias={huge: 1}),
        dict(allowed_token_ids=[huge]),
        dict(bad_words=[[huge]]),
    ):
        said = ask(**kw).error
        assert [*kw][0] in said and len(said) < 400
    assert len(ask([5, huge]).error) < 400
    long = ask(max_tokens=huge, ignore_eos=True, stop_token_ids=[*range(259)])
    assert long.outputs[0].token_ids


# --- a prompt that is too long, cut to its end


def test_the_end_of_a_prompt_is_kept_where_that_is_asked_for():
    llm, text = LLM(*tiny(), max_model_len=64), "abcdefgh" * 20
    ids = llm.tokenizer(text)["input_ids"]
    run = lambda prompt=text, **kw: llm.generate([prompt], SamplingParams(temperature=0, **kw))[0]
    for n in (None, 10**9):
        out = run(max_tokens=4, truncate_prompt_tokens=n)
        assert out.outputs[0].finish_reason == "too_long"
    for n, kept, most in (
        (10, 10, 4),
        (-1, 60, 4),
        (-1, 63, None),  # room for one token
        (-1, 32, 1000),  # never less than half
    ):
        out = run(max_tokens=most, truncate_prompt_tokens=n)
        assert (out.prompt_token_ids, out.prompt, out.error) == (ids[-kept:], text, None)
        alone = run(ids[-kept:], max_tokens=most)
        assert out.outputs[0].token_ids == alone.outputs[0].token_ids
    assert run("ab", truncate_prompt_tokens=-1).prompt_token_ids == run("ab").prompt_token_ids
    five = dict(truncate_prompt_tokens=5)
    for outs in (
        llm.generate([dict(prompt=text, **five)]),
        llm.generate(text, five),
        llm.chat([user(text)], five),
    ):
        assert len(outs[0].prompt_token_ids) == 5
    asked = parse_online(dict(prompt="x", truncate_prompt_tokens=-1), "text")
    assert asked.params.truncate_prompt_tokens == -1


def test_names_of_vllm_point_to_what_there_is(llm, tmp_path):
    from batchlab.models import load_model

    refused(AttributeError, "get_metrics", getattr, llm, "get_metrics")
    refused(AttributeError, "has no", getattr, llm, "nothing_such")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(ModelNotFoundError, "LoRARequest", load_model, str(tmp_path))


def test_slots_are_not_counted_for_each_kind_of_request():
    llm = LLM(*tiny(), max_num_seqs=8)
    llm.generate("a", dict(max_tokens=1))
    llm.embed("a")
    assert llm.stats().slots == 8


def test_an_interrupt_is_no_preemption():
    llm = LLM(*tiny(), max_num_seqs=8)

    def stop(engine, event, x):
        if event == "sample" and engine.num_steps == 2:
            raise KeyboardInterrupt

    llm.watchers.append(stop)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=5, ignore_eos=True))
    llm.watchers.clear()
    out = llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert llm.stats().preemptions == 0 and all(len(o.outputs[0].token_ids) == 5 for o in out)


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_no_public_argument_is_of_any_type(cls):
    "For an editor can say nothing of it."
    calls = [f for k, f in inspect.getmembers(cls, inspect.isfunction) if k[0] != "_"]
    types = [
        t for f in [*calls, cls.__init__] for k, t in f.__annotations__.items() if k != "return"
    ]
    assert types and not [t for t in types if re.search(r"\bAny\b", t)]


def test_an_editor_knows_what_calls_take_and_give():
    [jedi] = needs("jedi")
    code = "from batchlab import LLM\nllm = LLM()\n"
    here = jedi.Project(ROOT, added_sys_path=[str(ROOT)])
    how = dict(project=here, environment=jedi.api.environment.InterpreterEnvironment())
    script = lambda text: jedi.Script(code + text, **how)
    [shown] = script("llm.generate(").get_signatures()
    assert "prompts: Prompts, sampling_params: ParamsEach=None" in shown.to_string()
    assert shown.to_string().endswith("-> Outputs[RequestOutput]")
    assert all(":" in p.to_string() for p in shown.params)
    [told] = script("llm.generate").help(3, 6)
    assert shown.to_string() in told.docstring() and len(told.docstring(raw=True)) > 20
    of = lambda text: {c.name for c in script(text).complete()}
    methods = "generate chat stream embed verify stats add_request cancel"
    assert of("llm.") >= {*methods.split()}
    assert of("llm.generate(['a'])[0].") >= {"outputs", "prompt_token_ids", "finished", "error"}
