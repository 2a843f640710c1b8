"Names that people bring from vLLM, transformers and the OpenAI API: each works, is refused by name, or is reported; and calls of which nothing can run raise."

import dataclasses, inspect, logging, re, sys, warnings
from functools import cache

import pytest, torch

from helpers import same
from test_package import py

from batchlab import LLM, AsyncLLM, SamplingParams
from batchlab.compat import vllm
from batchlab.compat.vllm import EngineArgs
from batchlab.core.params import RULES
from batchlab.errors import ModelError, ModelNotFoundError, ParamError, PromptError
from batchlab.llm.inputs import split_settings
from batchlab.models import encode_chat, tiny_model, tiny_tokenizer
from batchlab.tasks.beam_params import BeamSearchParams
from batchlab.llm.pooled import PoolingParams
from batchlab.jobs.schema import BadRequest, parse_online

TALK = [
    dict(role="user", content="hi"),
    dict(role="assistant", content="yo"),
    dict(role="user", content="so"),
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


@pytest.mark.parametrize(
    "kw, words",
    [
        (dict(temprature=1), "temprature.*Did you mean 'temperature'"),
        (dict(max_new_tokens=4), "max_new_tokens.*Did you mean 'max_tokens'"),
        (dict(guided_json={}), "guided_json"),
        (dict(stop_strings="a"), "stop_strings"),
        (dict(do_sample=True), "do_sample"),
        (dict(num_return_sequences=2), "num_return_sequences"),
        (dict(best_of=2), "best_of"),
        (dict(output_kind=1), "output_kind"),
        (dict(temprature=None), "temprature"),
        (dict(foo=1), "foo"),
    ],
)
def test_a_setting_that_there_is_not_is_a_type_error_with_a_near_name(kw, words):
    with pytest.raises(TypeError, match=words):
        SamplingParams(**kw)
    with pytest.raises(ParamError, match=[*kw][0]):
        SamplingParams.of(kw)  # a dict of settings, as files and calls have it


def test_a_near_name_in_a_dict_of_a_prompt_is_refused():
    for kw, words in (
        (dict(temprature=1), "did you mean 'temperature'"),
        ({"max-tokens": 3}, "'max_tokens'"),
    ):
        with pytest.raises(ParamError, match=words):
            split_settings(dict(prompt="p", **kw))


def test_positions_and_names_do_not_meet():
    assert SamplingParams(2, max_tokens=3) == SamplingParams(n=2, max_tokens=3)
    for make in (lambda: SamplingParams(2, n=3), lambda: LLM(tiny()[0], model=3)):
        with pytest.raises(TypeError, match="multiple values"):
            make()


def test_the_signature_is_that_of_the_class():
    assert [*inspect.signature(SamplingParams).parameters] == [
        f.name for f in dataclasses.fields(SamplingParams)
    ]
    assert {"model", "tokenizer", "kv_cache_bytes"} <= inspect.signature(
        LLM
    ).parameters.keys() and "sampling_params" in inspect.signature(LLM.generate).parameters


# --- vLLM's engine


@pytest.mark.parametrize(
    "kw, words",
    [
        (dict(max_num_seq=4), "Did you mean 'max_num_seqs'"),
        (dict(torch_dtype="bfloat16"), "torch_dtype"),
        (dict(gpu_memory_utilization=0.4), "gpu_memory_utilization"),
        (dict(revision="main"), "revision"),
        (dict(max_tokens=3), "max_tokens"),
        (dict(voice="alto"), "voice"),
    ],
)
def test_an_argument_that_there_is_not_is_a_type_error(kw, words):
    with pytest.raises(TypeError, match=words):
        LLM(tiny()[0], **kw)


@pytest.mark.parametrize(
    "name, value",
    [
        ("speculative_config", dict(a=1)),
        ("hf_overrides", dict(a=1)),
        ("tokenizer_mode", "slow"),
        ("disable_sliding_window", True),
        ("load_format", "dummy"),
        ("kv_cache_dtype", "fp8"),
        ("code_revision", "main"),
    ],
)
def test_what_would_change_the_answers_is_refused(name, value):
    "Also by the class for programs written for vLLM: what it has not got is no argument."
    for kind in (LLM, vllm.LLM, EngineArgs):
        with pytest.raises(TypeError, match=name):
            kind(tiny()[0], **{name: value})


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
        gpu_memory_utilization=0.4,
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
    idle = ("gpu_memory_utilization=0.4", "tensor_parallel_size=2", "enforce_eager", "trust_remote")
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


def test_engine_args_are_silent_at_their_defaults(folder, lines):
    from batchlab.compat.vllm import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser.add_argument_group("engine")).set_defaults(model=folder)
    parser.add_argument("--max-tokens", type=int)
    args = vars(
        parser.parse_args(["--max_tokens", "5", "--max_num_seqs=3", "--max-model-len", "99"])
    )
    assert args.pop("max_tokens") == 5
    made = vllm.LLM(**args)
    assert (made.limits.max_num_seqs, made.max_model_len, lines()) == (3, 99, [])
    assert vars(EngineArgs(model=folder)) == {**args, "max_num_seqs": None, "max_model_len": None}
    args = parser.parse_args(
        [
            "--quantization",
            "None",
            "--compile",
            "false",
            "--device",
            "cpu",
            "--kv-cache-memory-bytes",
            "5",
        ]
    )
    assert (args.quantization, args.compile, args.device, args.kv_cache_memory_bytes) == (
        None,
        False,
        "cpu",
        5,
    )
    with pytest.raises(TypeError, match="tensor_parallel_sizes"):
        EngineArgs(tensor_parallel_sizes=2)


EXAMPLE = """
from batchlab.compat.vllm import LLM, SamplingParams, RequestOutput
from batchlab.compat.vllm import GuidedDecodingParams, StructuredOutputsParams, cleanup_dist_env_and_memory
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
    del llm
    cleanup_dist_env_and_memory()
print(texts[0] == texts[1])
"""


def test_a_program_for_vllm_runs_with_its_imports_changed(folder, tmp_path):
    assert py(
        'import warnings; warnings.simplefilter("error", DeprecationWarning)\n'
        + EXAMPLE.format(folder=folder),
        tmp_path,
    ).split() == ["False", "True", "True"]


# --- conversations


def ids_of(tokenizer, messages, **kw):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kw)[
        "input_ids"
    ]


def test_conversations_are_what_transformers_writes(llm, tmp_path):
    tok, begun = llm.tokenizer, TALK[:2]
    plain = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if tools %}{{ tools[0].function.name }}{% endif %}{{ mood }}"
    (tmp_path / "plain.jinja").write_text(plain)
    tools = [dict(type="function", function=dict(name="f", description="d", parameters={}))]
    cases = [
        (TALK, {}, dict(add_generation_prompt=True)),
        (begun, dict(continue_final_message=True), dict(continue_final_message=True)),
        (begun, dict(add_generation_prompt=False), {}),
        (
            TALK,
            dict(tools=tools, chat_template=plain, chat_template_kwargs=dict(mood="!")),
            dict(tools=tools, chat_template=plain, mood="!"),
        ),
    ]
    for messages, kw, theirs in cases:
        want = ids_of(tok, messages, **theirs)
        outs = [
            *llm.chat(messages, GREEDY, **kw),
            *llm.generate({"messages": messages, **kw}, GREEDY),
            *llm.chat([messages, TALK], GREEDY, **kw)[:1],
            llm.chat([{"messages": messages, **kw}], GREEDY)[0],
        ]
        assert all(o.prompt_token_ids == want and o.error is None for o in outs)
        assert [
            e.output.prompt_token_ids
            for e in llm.stream([{"messages": messages, **kw}], GREEDY, chat=True)
            if e.output
        ] == [want]
    assert (
        llm.chat(TALK, GREEDY, chat_template=tmp_path / "plain.jinja")[0].prompt
        == llm.chat(TALK, GREEDY, chat_template=plain)[0].prompt
    )
    parts = [dict(role="user", content=[dict(type="text", text="a"), dict(type="text", text="b")])]
    assert llm.chat(parts, GREEDY)[0].prompt_token_ids == ids_of(
        tok, [dict(role="user", content="a\nb")], add_generation_prompt=True
    )
    called = [
        *TALK,
        dict(
            role="assistant",
            tool_calls=[dict(type="function", function=dict(name="f", arguments={}))],
        ),
        dict(role="tool", content="5"),
    ]
    assert (
        llm.chat(called, GREEDY, chat_template=plain.replace("m.content", "m.content or ''"))[
            0
        ].error
        is None
    )


def test_a_conversation_in_add_request_and_asyncio(llm):
    import asyncio

    got, prompt = (
        [],
        {"messages": TALK[:2], "continue_final_message": True, "max_tokens": 2, "temperature": 0},
    )
    llm.add_request(prompt, stream_callback=lambda e: got.append(e.output))
    while llm.has_unfinished:
        llm.step()
    want = got[-1].outputs[0].token_ids

    async def both():
        asked = AsyncLLM(llm)
        ends = [
            [o async for o in stream][-1]
            for stream in (
                asked.generate(prompt),
                asked.chat(TALK[:2], GREEDY, continue_final_message=True),
            )
        ]
        await asked.shutdown()
        return ends

    ends = asyncio.run(both())
    assert [e.outputs[0].token_ids[:2] for e in ends] == [want, want] and len(want) == 2
    for prompt in ("hi", dict(prompt="hi")):
        with pytest.raises(ParamError, match="takes the prompt first"):
            llm.add_request("id1", prompt, GREEDY)


def test_an_answer_begun_and_closed_is_said(llm):
    with pytest.warns(UserWarning, match="continue_final_message=True"):
        llm.chat(TALK[:2], GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.chat(TALK[:2], GREEDY, continue_final_message=True)
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


def test_what_is_wrong_with_all_of_a_call_raises(llm):
    import pandas as pd
    from tqdm import tqdm

    bare, plain = LLM(tiny()[0]), LLM(*tiny(chat=False))
    wish = SamplingParams(structured_outputs=dict(regex="a"))
    calls = [
        (lambda: bare.generate(["hi", "yo"]), ModelError, "without a tokenizer"),
        (lambda: bare.generate([None, "yo"]), ModelError, "without a tokenizer"),
        (lambda: [*bare.stream("hi")], ModelError, "without a tokenizer"),
        (lambda: bare.plan("hi"), ModelError, "tokenizer"),
        (lambda: bare.logprobs("hi"), ModelError, "tokenizer"),
        (lambda: bare.generate([[5]], wish), ModelError, "needs a tokenizer"),
        (lambda: plain.chat(TALK), ModelError, "no chat template"),
        (lambda: llm.chat("hello"), PromptError, "llm.generate"),
        (lambda: llm.chat(["a", "b"]), PromptError, "messages must be"),
        (lambda: llm.generate([TALK]), PromptError, "llm.chat"),
        (lambda: llm.generate(TALK), PromptError, "llm.chat"),
        (
            lambda: llm.generate(pd.DataFrame(dict(prompt=["a"]))),
            PromptError,
            r"frame\['prompt'\].*llm.map",
        ),
        (lambda: llm.generate(dict(prompt=["a", "b"])), PromptError, r"d\['prompt'\]"),
        (lambda: llm.generate(7), PromptError, "got 7"),
        (lambda: llm.generate(None), PromptError, "None"),
        (lambda: llm.logprobs("hi", ["yo"]), ParamError, "use_tqdm"),
        (lambda: llm.plan([None]), PromptError, "None"),
        (lambda: [*llm.stream(TALK)], PromptError, "llm.chat"),
        (lambda: llm.generate({"prompt": "a", "max_tokns": 3}), ParamError, "max_tokens"),
        (lambda: llm.generate("a", time_out=3), TypeError, "Did you mean 'timeout'"),
        (lambda: llm.chat(TALK, chat_template="nowhere.jinja"), ParamError, "chat_template"),
        (lambda: llm.chat(TALK, tools="f"), ParamError, "tools must be"),
        (lambda: LLM(*tiny(), system="x"), TypeError, "system"),
        (lambda: LLM(tiny()[0], 5), ParamError, "got int"),
        (lambda: llm.logprobs({"prompt": "a", "temperature": 0}), ParamError, "temperature"),
        (lambda: llm.map([{"prompt": "a"}], lora_request=7), ParamError, "lora_request"),
        (lambda: AsyncLLM(llm, "nowhere"), ParamError, "tokenizer"),
        (lambda: AsyncLLM(llm, max_num_seqs=3), ParamError, "max_num_seqs"),
        (lambda: llm.generate("a", GREEDY, max_tokens=3), TypeError, "max_tokens"),
        (lambda: llm.generate("a", lora_request=7), ParamError, "lora_request"),
        (lambda: llm.logprobs("a", temperature=0), TypeError, "temperature"),
        (lambda: llm.generate("a", stream=True), TypeError, "stream"),
    ]
    for call, error, words in calls:
        with pytest.raises(error, match=words):
            call()
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
    talks = [{"messages": TALK} | kw for kw in wrong.values()]
    first, *outs = llm.generate(["a", *talks], GREEDY)
    assert first.error is None and all(word in o.error for o, word in zip(outs, wrong))
    developer = [dict(role="developer", content="be brief"), *TALK]
    assert (
        llm.chat(developer, GREEDY)[0].prompt
        == llm.chat([dict(developer[0], role="system"), *TALK], GREEDY)[0].prompt
    )


def test_scores_of_dicts_and_of_short_prompts(llm):
    assert [
        s.token_ids for p in ([{"messages": TALK}], {"messages": TALK}) for s in llm.logprobs(p)
    ] == [llm.logprobs(TALK)[0].token_ids] * 2
    short, long = llm.logprobs([[5, 6, 7], [5, 6, 7, 8, 9, 10]], start=5)
    assert (short.error, short.logprobs, long.error, len(long.logprobs)) == (None, [], None, 1)
    assert llm.logprobs([[5, 6, 7]], start=3)[0].logprobs == []
    last = llm.logprobs([[5, 6, 7]])[0].logprobs[-1:]
    assert same(last, llm.logprobs([[5, 6, 7]], start=2)[0].logprobs, llm.backend)


def test_none_in_a_prompts_dict_says_nothing():
    assert split_settings(
        dict(prompt="p", temperature=None, top_p=float("nan"), max_tokens=None, seed=3)
    ) == (dict(prompt="p"), dict(max_tokens=None, seed=3))


def test_a_greedy_default_keeps_what_a_prompt_samples_by(llm):
    [out] = llm.generate(
        [dict(prompt="a", temperature=0.7)], dict(temperature=0, top_k=5, top_p=0.5)
    )
    assert (out.params.temperature, out.params.top_k, out.params.top_p) == (0.7, 5, 0.5)
    many = llm.generate(
        ["a", "bc"],
        [
            SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1),
            SamplingParams(temperature=1, seed=1, top_k=3),
        ],
    )
    assert (
        many[0].outputs[0].token_ids
        == llm.generate("a", SamplingParams(temperature=0))[0].outputs[0].token_ids
    )


@pytest.mark.parametrize(
    "kw",
    [
        dict(logprobs=5, logprob_token_ids=[1]),
        dict(logprob_token_ids=[]),
        dict(logprobs_mode="raw_logits"),
        dict(structured_outputs=dict(jsno={})),
    ],
)
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

    read = vllm.StructuredOutputsParams(
        regex="a", backend="xgrammar", disable_fallback=True, whitespace_pattern=None
    )
    assert vars(read) == vars(StructuredOutputsParams(regex="a"))
    wish = vllm.SamplingParams(guided_decoding=vllm.GuidedDecodingParams(regex="a"))
    assert vars(wish.structured_outputs) == vars(StructuredOutputsParams(regex="a"))
    for kw in (dict(jsno={}), dict(regex="a", structural_tag="x")):
        with pytest.raises(TypeError, match=[*kw][-1]):
            StructuredOutputsParams(**kw)


def test_the_log_of_failures_is_short(lines):
    from batchlab.llm.inputs import log_failures
    from batchlab.llm.outputs import RequestGroup, RequestOutput

    def refused(i):
        "What becomes of a prompt that is refused in words of its own, by the statement that refuses all of them."
        group = RequestGroup(str(i))
        try:
            raise PromptError(
                f"a prompt must be a string, got '{chr(97 + i % 26)}{chr(97 + i // 26)}"
            )
        except PromptError as e:
            group.refuse(e)
        return group.result()

    others = [RequestOutput(x, error=f"{x} {x}") for x in map(chr, range(97, 110))]
    log_failures([*map(refused, range(300)), *others])
    [said] = lines()
    assert "300 × a prompt" in said and "and 9 others" in said and len(said) < 1200


def test_a_missing_llguidance_raises(llm, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ModelError, match=r"pip install 'batchlab\[structured\]'"):
        LLM(*tiny()).generate(["a", "b"], SamplingParams(structured_outputs=dict(regex="a")))


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
    assert theirs.chat(TALK, GREEDY, chat_template_content_format="auto")[0].error is None


def test_requests_that_failed_are_counted_by_reason(llm, lines):
    outs = llm.generate(["a"] * 3 + [[999999]] * 2 + ["x " * 300, "x " * 301, None], GREEDY)
    [said] = lines()
    assert (
        said.startswith("5 of 8 requests failed: 2 × token id 999999")
        and "(first: outputs[3]); 2 × the prompt has" in said
        and "(first: outputs[5]); 1 × a prompt must be" in said
    )
    assert (
        said.endswith("outputs[i].error says why") and sum(o.error is not None for o in outs) == 5
    )
    llm.generate(["a", "b"], GREEDY)
    assert len(lines()) == 1


def test_encode_chat_tells_the_models_fault_from_the_messages():
    tok = tiny_tokenizer()
    for messages in (
        "hi",
        [],
        [dict(role="user")],
        [dict(role="user", content=[dict(type="image_url")])],
    ):
        with pytest.raises(PromptError):
            encode_chat(tok, messages)
    tok.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(PromptError, match="refuses these messages"):
        encode_chat(tok, TALK)
    with pytest.raises(ModelError):
        encode_chat(None, TALK)


def test_tools_that_the_template_does_not_know_are_refused(llm):
    talk, tools = (
        [dict(role="user", content="hi")],
        [dict(type="function", function=dict(name="f", parameters={}))],
    )
    [out] = llm.chat(talk, GREEDY, tools=tools)
    assert "knows no tools" in out.error
    known = "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    [out] = llm.chat(talk, GREEDY, tools=tools, chat_template=known)
    assert out.error is None and out.prompt.startswith("f")


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
    floats = dict(
        stop_token_ids=[5.0], allowed_token_ids=[6.0, 7.0], bad_words=[[8.0]], logit_bias={9.0: 1}
    )
    assert SamplingParams(**floats) == SamplingParams(
        stop_token_ids=[5], allowed_token_ids=[6, 7], bad_words=[[8]], logit_bias={9: 1}
    )
    assert SamplingParams(logprob_token_ids=[3.0]).logprob_token_ids == [3] and BeamSearchParams(
        2.0, 3.0
    ) == BeamSearchParams(2, 3)
    assert PoolingParams(
        dimensions=4.0, truncate_prompt_tokens=-1.0, layers=[0.0, -1.0]
    ) == PoolingParams(dimensions=4, truncate_prompt_tokens=-1, layers=(0, -1))
    one = llm.generate(
        [[5.0, 6.0]], dict(max_tokens=2.0, temperature=0.0), priority=1.0, timeout=100
    )[0]
    assert (
        one.prompt_token_ids == [5, 6]
        and len(one.outputs[0].token_ids) == 2
        and all(type(i) is int for i in one.prompt_token_ids)
    )
    small = LLM(*tiny(), max_num_seqs=4.0, max_model_len=50.0)
    assert (small.limits.max_num_seqs, small.limits.max_model_len) == (4, 50) and type(
        small.limits.max_num_seqs
    ) is int
    asked = parse_online(dict(prompt=[5.0, 6.0], max_tokens=3.0, n=2.0, priority=1.0), "text")
    assert (asked.params.max_tokens, asked.params.n, asked.priority) == (3, 2, 1)
    with pytest.raises(BadRequest, match="from 1 to 128"):
        parse_online(dict(prompt="x", n=200.0), "text")
    for wrong in (2.5, True, "3", float("inf"), float("nan")):
        with pytest.raises(ParamError):
            SamplingParams(max_tokens=wrong)


@pytest.mark.parametrize("huge", HUGE, ids=("long", "negative", "unwritable"))
def test_a_number_of_any_size_is_read_or_refused_by_name(llm, huge):
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
        with pytest.raises(ParamError, match=next(iter(kw))):
            SamplingParams(**kw)
    for call in (dict(priority=huge), dict(timeout=huge)):
        try:
            assert not llm.generate([[5]], SamplingParams(max_tokens=1), **call)[0].error
        except ParamError as e:
            assert "timeout" in str(e)
    if huge > 0:
        for kw in (
            dict(stop_token_ids=[huge]),
            dict(logit_bias={huge: 1}),
            dict(allowed_token_ids=[huge]),
            dict(bad_words=[[huge]]),
        ):
            said = llm.generate([[5]], SamplingParams(**kw))[0].error
            assert next(iter(kw)) in said and len(said) < 400
        assert len(llm.generate([[5, huge]])[0].error) < 400
        assert (
            llm.generate(
                [[5]],
                SamplingParams(max_tokens=huge, ignore_eos=True, stop_token_ids=[*range(259)]),
            )[0]
            .outputs[0]
            .token_ids
        )


# --- a prompt that is too long, cut to its end


def test_the_end_of_a_prompt_is_kept_where_that_is_asked_for():
    llm = LLM(*tiny(), max_model_len=64)
    text, ids = "abcdefgh" * 20, tiny()[1]("abcdefgh" * 20)["input_ids"]
    run = lambda prompt=text, **kw: llm.generate([prompt], SamplingParams(temperature=0, **kw))[0]
    assert run(max_tokens=4).outputs[0].finish_reason == "too_long"
    for n, kept in ((10, 10), (10**9, 160), (-1, 60)):
        out = run(max_tokens=4, truncate_prompt_tokens=n)
        if kept < 64:
            assert (
                out.prompt_token_ids == ids[-kept:]
                and len(out.outputs[0].token_ids) == 4
                and not out.error
                and out.prompt == text
            )
        else:
            assert out.outputs[0].finish_reason == "too_long"
        if kept < 64:
            assert out.outputs[0].token_ids == run(ids[-kept:], max_tokens=4).outputs[0].token_ids
    assert (
        len(run(truncate_prompt_tokens=-1, max_tokens=None).prompt_token_ids) == 63
    )  # room for one token
    assert (
        len(run(truncate_prompt_tokens=-1, max_tokens=1000).prompt_token_ids) == 32
    )  # never less than half
    assert run("ab", truncate_prompt_tokens=-1).prompt_token_ids == run("ab").prompt_token_ids
    assert (
        llm.generate([dict(prompt=text, truncate_prompt_tokens=5)])[0].prompt_token_ids == ids[-5:]
    )
    assert len(llm.generate(text, dict(truncate_prompt_tokens=5))[0].prompt_token_ids) == 5
    assert (
        len(
            llm.chat([dict(role="user", content=text)], dict(truncate_prompt_tokens=7))[
                0
            ].prompt_token_ids
        )
        == 7
    )
    assert (
        parse_online(
            dict(prompt="x", truncate_prompt_tokens=-1), "text"
        ).params.truncate_prompt_tokens
        == -1
    )


def test_a_vector_of_a_text_that_is_cut():
    llm = LLM(*tiny(), max_model_len=64)
    cut = llm.embed("x" * 200, pooling_params=PoolingParams(truncate_prompt_tokens=-1))[0]
    assert not cut.error and len(cut.prompt_token_ids) == 64
    assert llm.embed("x" * 200)[0].error
    with pytest.raises(TypeError, match="truncate"):
        llm.embed("x", truncate=True)


def test_names_of_vllm_point_to_what_there_is(llm, tmp_path):
    from batchlab.models import load_model

    for name, words in dict(get_metrics="get_metrics", nothing_such="has no").items():
        with pytest.raises(AttributeError, match=words):
            getattr(llm, name)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="LoRARequest"):
        load_model(str(tmp_path))


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
def test_every_public_argument_has_a_type(cls):
    "None that an editor can say nothing of, and a return that it can complete."
    calls = [f for k, f in inspect.getmembers(cls, inspect.isfunction) if k[0] != "_"]
    loose = {
        f"{f.__name__}: {p}"
        for f in [*calls, cls.__init__]
        for p in inspect.signature(f).parameters.values()
        if p.name != "self" and (p.annotation is p.empty or re.search(r"\bAny\b", p.annotation))
    }
    assert loose == set()
    assert {f.__name__ for f in calls if "return" not in f.__annotations__} == set()


def test_an_editor_knows_what_calls_take_and_give():
    jedi = pytest.importorskip("jedi")
    code = "from batchlab import LLM\nllm = LLM()\n"
    [shown] = jedi.Script(code + "llm.generate(").get_signatures(3, 13)
    assert "prompts: Prompts, sampling_params: ParamsEach=None" in shown.to_string()
    assert shown.to_string().endswith("-> Outputs[RequestOutput]")
    of = lambda text: {c.name for c in jedi.Script(code + text).complete(3, len(text))}
    assert of("llm.") >= {"generate", "chat", "stream", "embed", "beam_search", "verify", "stats"}
    assert of("llm.generate(['a'])[0].") >= {"outputs", "prompt_token_ids", "finished", "error"}
