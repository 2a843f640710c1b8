"""The server: driven by OpenAI's own client, it gives what `LLM` gives, and stays up whatever its clients send, drop or leave unread."""

import asyncio, contextlib, json, os, re, signal, socket, sys, threading
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from helpers import needs, refusal, streamed

openai, httpx, *_ = needs("openai", "httpx", "fastapi", "uvicorn")

from transformers import PreTrainedTokenizerBase

from batchlab.jobs.lines import ParamsCache, parse_line
from batchlab.jobs.runner import admit_line
from batchlab.jobs.schema import DONE, as_messages
from batchlab.jobs.settings import BadRequest, IGNORED, OPTIONS, say_ignored
from batchlab.llm import inputs
from batchlab.models import control
from batchlab.models.lengths import chars_in
from batchlab.serve.answers import RETRY_AFTER, StreamedAnswer, merged
from batchlab.serve.app import create_app, listen, url_of
from helpers import added_up, assistant, by_a_failing_engine, events_of, json_lines, junk
from helpers import (
    nothing_left,
    paused_after,
    posted,
    same,
    server_process,
    serving,
    tiny_llm,
    until,
    user,
)

LONG = dict(max_tokens=200, extra_body=dict(ignore_eos=True))
TALK = [user("Hello")]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
tiny = partial(tiny_llm, max_num_seqs=4)


def client_of(s, strict=False, kind=openai.OpenAI, **kw):
    """OpenAI's client. Not strict for streams of completions: its types, unlike the API, have a
    reason for the end in every part."""
    how = dict(api_key="any", max_retries=0, timeout=100, _strict_response_validation=strict)
    return kind(**dict(base_url=f"{getattr(s, 'url', s)}/v1") | how | kw)


@pytest.fixture(scope="module")
def client(s):
    with client_of(s, strict=True) as c:
        yield c


@pytest.fixture(scope="module")
def loose(s):
    with client_of(s) as c:
        yield c


@contextlib.contextmanager
def thread(f, *args, **kw):
    "`f(*args, **kw)` at work beside what is in the `with`."
    t = threading.Thread(target=f, args=args, kwargs=kw)
    t.start()
    yield t
    t.join()


def address(url):
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    return host, int(port)


def line_of(s, ask):
    "What `ask()` gives, and the line that the server says of it; no other request is under way."
    until(lambda: not s.server.server_state.tasks)
    del s.said[:]
    answer = ask()
    until(lambda: s.said)
    return answer, s.said[0]


# what is answered


def test_a_call_that_was_cut_off_can_be_sent_back(s, web):
    "So can an answer that refused. What is no beginning of an object can not."
    call = lambda text: [dict(id="c", type="function", function=dict(name="f", arguments=text))]
    said = lambda **m: [*TALK, dict(role="assistant") | m, *TALK]
    refusals = [None, [dict(type="refusal", refusal="No.")]]
    for m in (
        *(
            dict(content="", tool_calls=call(text))
            for text in ("", "{", '{"a": [1, "b', '{"a": 1}')
        ),
        *(dict(content=content, refusal="No.") for content in refusals),
    ):
        posted(web, CHAT, messages=said(**m), max_tokens=1)
    for text in ("[1", "x", '{"a": 1} x', '"a'):
        r = web.post(CHAT, json=dict(messages=said(tool_calls=call(text))))
        assert r.status_code == 400 and "must be a JSON object" in r.text
    whole = as_messages(said(tool_calls=call('{"a": [1, "b'), content=None))[1]
    assert whole["tool_calls"][0]["function"]["arguments"] == dict(a=[1, "b"])


SEVERAL = dict(n=2, temperature=1, seed=3)
ECHOES = [dict(echo=True), dict(echo=True, max_tokens=0), dict(echo=True, logprobs=1)]
STREAMED = [(CHAT, more) for more in ({}, SEVERAL, dict(logprobs=True, top_logprobs=2))]
STREAMED += [(TEXT, more) for more in (*ECHOES, SEVERAL, dict(logprobs=2), dict(stop="e"))]
STREAMED += [(TEXT, SEVERAL | dict(prompt=p)) for p in (["a", "bcd"], [[5], [7, 8, 9] * 20])]


def asked(path, **more):
    "A body for `path`, greedy if `more` says nothing else."
    given = dict(messages=TALK) if path == CHAT else dict(prompt="né 7")
    return given | dict(temperature=0, max_tokens=9) | more


def bare(d):
    "`d` without what is None, at any depth of objects."
    return {k: bare(v) if isinstance(v, dict) else v for k, v in d.items() if v is not None}


@pytest.mark.parametrize("path, more", STREAMED)
def test_a_stream_adds_up_to_the_whole_answer(s, web, path, more):
    body = asked(path, return_token_ids=True) | more
    whole = posted(web, path, **body)
    parts = events_of(web.post(path, json=body | dict(stream=True)).text)
    choices = added_up(parts)
    for c in choices:
        if path == CHAT:
            c["message"] = c.pop("delta")
    assert same(choices, [bare(c) for c in whole["choices"]], s.llm.backend)
    assert {p["id"] for p in parts} == {parts[0]["id"]}
    if path == CHAT:
        prompts = [p["prompt_token_ids"] for p in parts if "prompt_token_ids" in p]
        assert prompts == [whole["prompt_token_ids"]] * len(choices)
    assert "prompt_token_ids" in (parts if path == CHAT else parts[0]["choices"])[0]


@pytest.mark.parametrize(
    "path, sampled, more",
    [(path, d, {}) for path in (TEXT, CHAT) for d in ({}, SEVERAL)]
    + [(TEXT, {}, d) for d in ECHOES],
)
def test_token_ids_as_vllm_gives_them(s, web, path, sampled, more):
    "Of the answer in each choice, of the prompt in the choice of a text and beside those of a chat."
    how = dict(temperature=0, max_tokens=9, ignore_eos=True) | sampled
    [out] = s.llm.chat([TALK], how) if path == CHAT else s.llm.generate(["né 7"], how)
    body = asked(path, **how | more)
    whole = posted(web, path, **body, return_token_ids=True)
    ids = [c.token_ids[: body["max_tokens"]] for c in out.outputs]
    assert [c["token_ids"] for c in whole["choices"]] == ids
    for d in [whole] if path == CHAT else whole["choices"]:
        assert d["prompt_token_ids"] == out.prompt_token_ids
    assert "token_ids" not in str(posted(web, path, **body, return_token_ids=False))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_chat_is_what_llm_gives(s, client, role):
    talk, how = [dict(role=role, content="Be brief."), *TALK], dict(temperature=0)
    [out] = s.llm.chat([talk], how | dict(max_tokens=9))
    [want] = out.outputs
    ask = partial(
        client.chat.completions.create, model="tiny", messages=talk, max_completion_tokens=9, **how
    )
    r = ask()
    assert (r.choices[0].message.content, r.choices[0].finish_reason) == (
        want.text,
        want.finish_reason,
    )
    assert r.usage.prompt_tokens == len(out.prompt_token_ids)
    assert r.usage.completion_tokens == len(want.token_ids)
    *chunks, last = ask(stream=True, stream_options=dict(include_usage=True))
    [whole] = added_up(c.model_dump() for c in chunks)
    assert whole["delta"] == assistant(want.text)
    assert not last.choices and last.usage.total_tokens == r.usage.total_tokens
    assert {c.usage for c in chunks} == {None}
    assert last.usage.prompt_tokens_details.cached_tokens > 0  # it was asked before


@pytest.mark.parametrize(
    "prompt, more",
    [
        ("abc", {}),
        (["a longer prompt than the other", "b"], {}),
        ([5, 6, 7], {}),
        ([[5], [7, 8, 9] * 20], {}),
        ("", {}),
        (["a", "bcd"], dict(n=3, seed=7, temperature=0.8)),
    ],
)
def test_prompts_of_all_forms(s, client, prompt, more):
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    how = dict(temperature=0, max_tokens=11) | more
    outs = s.llm.generate(prompts, how)
    want = [(c.text, c.finish_reason) for o in outs for c in o.outputs]
    r = client.completions.create(model="tiny", prompt=prompt, **how)
    assert [(c.text, c.finish_reason) for c in r.choices] == want
    assert [c.index for c in r.choices] == [*range(len(want))]
    assert r.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in outs)


def test_defaults_are_the_apis(client):
    more = dict(model="tiny", extra_body=dict(ignore_eos=True))
    assert client.completions.create(prompt="a", **more).usage.completion_tokens == 16
    assert client.chat.completions.create(messages=TALK, **more).usage.total_tokens == 256


def test_settings_reach_the_engine(s, web):
    "Each is compared with the engine's own answer, and with an answer that lacks it."
    greedy = dict(temperature=0, max_tokens=12)
    plain = s.llm.generate("Once", greedy)[0].outputs[0]
    ids, hot = plain.token_ids, dict(seed=3, temperature=1.0)
    for setting in (
        dict(logit_bias={str(ids[0]): -100}),
        dict(stop=plain.text[3]),
        dict(presence_penalty=2.0),
        dict(frequency_penalty=2.0),
        dict(repetition_penalty=3.0),
        dict(stop_token_ids=[ids[2]]),
        dict(bad_words=[[ids[0]]]),
        dict(allowed_token_ids=[70, 71]),
        dict(hot, top_k=4),
        dict(hot, min_p=0.2),
        dict(seed=4, temperature=1.0, top_p=0.5),
        dict(min_tokens=2, stop_token_ids=[ids[0]]),
        dict(structured_outputs=dict(choice=["red", "green"])),
    ):
        want = s.llm.generate("Once", greedy | setting)[0].outputs[0]
        [got] = posted(web, TEXT, **dict(prompt="Once") | greedy | setting)["choices"]
        assert (got["text"], got["finish_reason"]) == (want.text, want.finish_reason), setting
        assert got["text"] != plain.text, setting


def test_log_probabilities(s, client):
    how = dict(temperature=0, max_tokens=9)
    [out] = s.llm.chat([TALK], how | dict(logprobs=2))
    want = [
        [l.logprob for l in sorted(step.values(), key=lambda l: l.rank)[:2]]
        for step in out.outputs[0].logprobs
    ]
    ask = partial(client.chat.completions.create, model="tiny", messages=TALK, **how)
    r = ask(logprobs=True, top_logprobs=2).choices[0].logprobs
    assert r.model_dump()["refusal"] is None and "refusal" in r.model_fields_set  # it must be there
    assert same([[t.logprob for t in x.top_logprobs] for x in r.content], want, s.llm.backend)


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("prompt", ["abcd", [100, 101, 102, 103]])
def test_echo_with_log_probabilities_of_the_prompt(s, web, prompt, most):
    "As programs score texts; the first token has no log probability, so OpenAI's client is not strict here."
    [out] = s.llm.generate([prompt], dict(temperature=0, max_tokens=3, prompt_logprobs=1))
    steps = [*zip(out.prompt_token_ids, out.prompt_logprobs)][1:]
    score = [(step[t].logprob, step[t].rank == 1) for t, step in steps]
    d = posted(
        web, TEXT, prompt=[prompt, "a"], echo=True, logprobs=1, max_tokens=most, temperature=0
    )
    got, other = d["choices"]
    logprobs = got["logprobs"]
    assert got["text"] == "abcd" + out.outputs[0].text * (most > 0) and other["text"][0] == "a"
    told = zip(logprobs["token_logprobs"][1:4], logprobs["top_logprobs"][1:4])
    assert [(x, x == max(top.values())) for x, top in told] == score
    assert logprobs["token_logprobs"][0] is None and len(logprobs["tokens"]) == 4 + most
    assert logprobs["text_offset"][:5] == [0, 1, 2, 3, 4][: 4 + most]
    assert logprobs["tokens"][0] == "a"
    assert d["usage"]["completion_tokens"] == 2 * most and got["finish_reason"] == "length"


def test_log_probabilities_of_a_prompt(s, web):
    how = dict(temperature=0, max_tokens=1, prompt_logprobs=2)
    [out] = s.llm.generate("abc", how)
    [got] = posted(web, TEXT, prompt="abc", **how)["choices"]
    first, *steps = got["prompt_logprobs"]
    assert first is None and [{int(k): v["logprob"] for k, v in x.items()} for x in steps] == [
        {k: v.logprob for k, v in x.items()} for x in out.prompt_logprobs[1:]
    ]
    chat = posted(web, CHAT, messages=TALK, max_tokens=1, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == 23


def test_chat_template_options(web):
    talk = [*TALK, assistant("Well")]

    def ask(**more):
        return posted(web, CHAT, messages=talk, max_tokens=1, **more)["usage"]["prompt_tokens"]

    bare = ask(add_generation_prompt=False)
    assert ask() - bare == len("assistant:") + 1
    assert ask(add_generation_prompt=False, continue_final_message=True) < bare
    talk[0] = user("<eos>")
    assert ask() - ask(allow_special=True) == len("<eos>") - 1


def test_who_matters_more_goes_first(s):
    began = []
    body = lambda i: dict(prompt=chr(97 + i) * 3, max_tokens=1, priority=-i)

    def watch(_, event, x):
        if event == "ended":
            began.append(chr(x.prompt_ids[0] - 3))

    s.llm.watchers.append(watch)
    with contextlib.ExitStack() as stack, paused_after(s.llm, 0):
        for i in range(8):
            stack.enter_context(thread(posted, s.web, TEXT, **body(i)))
            until(lambda: len(s.llm.loop.groups) == i + 1)
        s.llm.resume()
    s.llm.watchers.remove(watch)
    assert {*began[:4]} == {*"hgfe"} and len(began) == 8


def test_tokens_of_one_reader_come_one_by_one(s, loose):
    "What the engine made is sent though it makes no more for now."
    with paused_after(s.llm, 12):
        stream = loose.completions.create(model="tiny", prompt="a", stream=True, **LONG)
        assert next(iter(stream)).choices[0].finish_reason is None
        assert len(s.llm.loop.groups) == 1
        stream.close()
    until(lambda: nothing_left(s))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_in_every_part(web, path):
    ask = asked(path, **SEVERAL, stream=True, ignore_eos=True) | dict(max_tokens=5)
    parts = lambda **more: events_of(web.post(path, json=ask | dict(stream_options=more)).text)
    told = parts(include_usage=True, continuous_usage_stats=True)
    for u in (part["usage"] for part in told):
        assert u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"]
    for i in (0, 1):
        own = [p for p in told if p["choices"] and p["choices"][0]["index"] == i]
        counts = [p["usage"]["completion_tokens"] for p in own]
        assert counts == sorted(counts) and counts[-1] == 5 and counts[0] >= 1
    assert not told[-1]["choices"] and told[-1]["usage"]["completion_tokens"] == 10
    assert {p["usage"] is None for p in parts(include_usage=True)[:-1]} == {True}
    assert not any("usage" in p for p in parts(include_usage=False, continuous_usage_stats=True))


# beside the answers


def test_models(client):
    [m] = client.models.list().data
    assert (m.id, m.object, client.models.retrieve("tiny").id) == ("tiny", "model", "tiny")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("an/other")


BODIES = """
["/v1/completions", {"prompt": "a"}]
["/v1/responses", {"input": "a"}]
["/v1/responses/input_tokens", {"input": "a"}]
["/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}]
["/v1/embeddings", {"input": "a"}]
["/score", {"text_1": "a", "text_2": "b"}]
["/tokenize", {"prompt": "a"}]
["/detokenize", {"tokens": [5]}]
"""


def test_other_names_of_the_model():
    with serving(others=["/models/tiny", "org/tiny"]) as s:
        for name in ("tiny", "/models/tiny", "org/tiny", None):
            posted(s.web, TEXT, model=name, prompt="a")
        assert s.web.get("/v1/models/org/tiny").json()["id"] == "tiny"


@pytest.mark.parametrize("path, body", json_lines(BODIES))
def test_a_model_that_is_none_names_those_that_there_are(web, monkeypatch, path, body):
    monkeypatch.setattr("batchlab.serve.answers.adapter_names", lambda llm: ["pirate", "poet"])
    r = web.post(path, json=body | dict(model="pirat"))
    said = r.json()["error"]["message"]
    assert r.status_code == 404 and all(repr(x) in said for x in ("tiny", "pirate", "poet"))


def test_tokens_and_back(s, web):
    "And what a client without a tokenizer asks, as lm-eval's does."
    d = posted(web, "/tokenize", model="tiny", prompt="né", return_token_strs=True)
    assert d["tokens"] == s.llm.tokenizer("né")["input_ids"]
    assert (d["count"], len(d["token_strs"]), d["max_model_len"]) == (3, 3, 256)
    assert posted(web, "/detokenize", tokens=d["tokens"]) == dict(prompt="né")
    [out] = s.llm.chat([TALK], dict(max_tokens=1))
    assert posted(web, "/tokenize", messages=TALK)["tokens"] == out.prompt_token_ids
    bare = posted(web, "/tokenize", messages=TALK, add_generation_prompt=False)
    assert bare["count"] < len(out.prompt_token_ids)
    info, tok = web.get("/tokenizer_info").json(), s.llm.tokenizer
    assert (info["eos_token"], info["chat_template"]) == (tok.eos_token, tok.chat_template)
    end = posted(web, "/tokenize", prompt=tok.eos_token, add_special_tokens=False)
    assert end["tokens"] == [tok.eos_token_id]


MANY_IDS = [5] * 2**17
MANY_KEYS = {f"k{i}": 1 for i in range(4001)}


@pytest.mark.parametrize(
    "path, body, param, word",
    [
        *(
            ("/tokenize", body, param, "")
            for body, param in (
                ({}, "prompt"),
                (dict(prompt=None), "prompt"),
                (dict(prompt="a", messages=TALK), "prompt"),
                (dict(prompt=5), "prompt"),
                (dict(prompt="a", x=1), "x"),
                ({"prompt": "a", "\ud800": 1}, None),
                (dict(prompt="a", add_generation_prompt=True), "add_generation_prompt"),
                (dict(messages=TALK, add_special_tokens=True), "add_special_tokens"),
                (dict(messages=TALK, chat_template_kwargs=[]), "chat_template_kwargs"),
                (dict(messages=TALK, chat_template_kwargs=dict(tools=1)), "chat_template_kwargs"),
                (dict(messages=[5]), "messages"),
            )
        ),
        *(("/detokenize", dict(tokens=tokens), "tokens", "") for tokens in ([-1], "a", [10**9])),
        (
            CHAT,
            dict(messages=TALK, logit_bias={str(i): 1 for i in range(2**18 + 1)}),
            "logit_bias",
            "262,144",
        ),
        (TEXT, dict(prompt="a", bad_words=["a" * 1000] * 66), "bad_words", "65,536 characters"),
        ("/v1/embeddings", {"input": "a"} | MANY_KEYS, None, "4,000 keys"),
        ("/v1/responses", dict(input="a", metadata=MANY_KEYS), "metadata", "metadata"),
        ("/v1/embeddings", dict(input=["a", *MANY_IDS]), "input", "2048 entries"),
        ("/detokenize", dict(tokens=[5, "a"]), "tokens", "token ids"),
        ("/v1/embeddings", dict(input="a", normalize="x"), "normalize", "True"),
        ("/pooling", dict(input="a", layers=[9]), "layers", "token_embed"),
        ("/pooling", dict(input="a", task="classify"), "task", "no task"),
    ],
)
def test_what_is_refused_elsewhere(web, path, body, param, word):
    "What is too much, by its number."
    r = web.post(path, content=json.dumps(body))
    e = r.json()["error"]
    assert (r.status_code, e["param"]) == (400, param) and word in e["message"], r.text


@pytest.mark.parametrize("own", [dict(tools=[]), dict(tokenize=False), dict(chat_template="a"), dict(add_generation_prompt=False)], ids=str)  # fmt: skip
def test_what_is_no_variable_of_a_template_is_refused_where_it_would_change_nothing(web, own):
    for path in (CHAT, "/tokenize"):
        r = web.post(path, json=dict(messages=TALK, chat_template_kwargs=own))
        assert r.status_code == 400 and next(iter(own)) in r.json()["error"]["message"]
    for fine in (dict(add_generation_prompt=True), dict(tools=None), dict(x=1)):
        posted(web, CHAT, messages=TALK, chat_template_kwargs=fine, max_tokens=1)


def test_health_version_and_figures(s, web):
    from prometheus_client.parser import text_string_to_metric_families
    from batchlab import __version__

    def figures():
        families = text_string_to_metric_families(web.get("/metrics").text)
        key = lambda x: x.name + str(x.labels.get("finished_reason", x.labels.get("le", "")))
        return {key(x).removeprefix("vllm:"): x.value for f in families for x in f.samples}

    assert web.get("/health").status_code == 200
    assert web.get("/version").json() == dict(version=__version__)
    before, body = figures(), dict(prompt="abcde", max_tokens=5, ignore_eos=True)
    assert posted(web, TEXT, **body)["usage"]["completion_tokens"] == 5
    web.post(TEXT, json=body | dict(max_tokens=3, stream=True))
    until(lambda: nothing_left(s))
    now = figures()
    for name, more in dict(
        prompt_tokens_total=10,
        generation_tokens_total=8,
        request_success_totallength=2,
        time_to_first_token_seconds_count=2,
        e2e_request_latency_seconds_count=2,
        inter_token_latency_seconds_count=6,
        **{"time_to_first_token_seconds_bucket+Inf": 2},
    ).items():
        assert now[name] - before.get(name, 0) == more, name
    assert now["num_requests_running"] == now["num_requests_waiting"] == 0
    assert 0 <= now["kv_cache_usage_perc"] <= 1
    with (
        paused_after(s.llm, 12),
        client_of(s).completions.create(model="tiny", prompt="a", stream=True, **LONG) as stream,
    ):
        next(iter(stream))
        held = figures()
        assert held["num_requests_running"] == 1 and held["kv_cache_usage_perc"] > 0
    until(lambda: "request_success_totalabort" in figures())  # as vLLM calls it


def test_a_line_for_each_request(s, web):
    some = dict(prompt="abc", max_tokens=2, ignore_eos=True)
    wrong = dict(prompt="", stop=["a secret", 5])
    ask = lambda path, body: line_of(s, lambda: web.post(path, json=body))[1]
    for line, said in (
        (ask(f"{TEXT}?token=secret", some), f"POST {TEXT} 200, T s, 3 tokens in, 2 out"),
        (ask(TEXT, some | dict(stream=True)), " 200, T s, 3 tokens in, 2 out"),
        (ask(TEXT, wrong), " 400, T s, invalid_request: stop"),
        (ask("/v1/%0a%1b[31mno", {}), "POST /v1/%0a%1b[31mno 404, T s, not_found: /v1/\\n\\x1b"),
    ):
        line = re.sub(r"\d+\.\d\d s", "T s", line)
        assert said in line and "secret" not in line and "\n" not in line


SECRET = """it's a "secret" """


@pytest.mark.parametrize(
    "body",
    [
        dict(prompt="a", stop=[SECRET, 5]),
        dict(prompt="a", model=SECRET),
        {"prompt": "a", SECRET: 1},
        dict(prompt=dict(a=SECRET)),
        dict(prompt="a", user=SECRET, temperature=SECRET),
        dict(prompt="a", stream=SECRET),
        dict(prompt="a", structured_outputs=dict(regex="(secret")),
        dict(messages=[dict(role=SECRET, content="")]),
        dict(messages=[user([dict(type=SECRET)])]),
    ],
)
def test_the_log_quotes_nothing_of_a_request(s, web, body):
    path = CHAT if "messages" in body else TEXT
    r, said = line_of(s, lambda: web.post(path, json=body))
    assert r.status_code in (400, 404) and "secret" not in said and ": " in said, said


# what goes wrong

FORM = dict(type="function", function=dict(name="f"))
IMAGE = [dict(type="image_url", image_url=dict(url="x"))]
say = lambda content, role="user": dict(messages=[dict(role=role, content=content)])
text = lambda **more: dict(prompt="a") | more
chat = lambda **more: dict(messages=TALK) | more
BAD = [  # body, a word of the message, and its status and code if it has others than most
    (b'{"prompt": "a"', "not JSON"),
    (b"\xff\xfe", "UTF-8"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    *((text(prompt=p), "prompt") for p in (None, 5, ["a", 5], [], {"messages": []})),
    ({}, "prompt"),
    (text(prompt=[10**6]), "1000000"),
    (text(prompt="caf\ud800"), "half"),
    (text(model=5), "string"),
    (text(temprature=1), "did you mean"),
    *((text(max_tokens=n), "max_tokens") for n in (-1, 0, 10**6)),
    (text(logit_bias={"999": 1}), "logit_bias"),
    (text(stream_options={"include_usage": True}), "stream"),
    (text(stream=True, stream_options=dict(often=True)), "often"),
    (text(stream=True, stream_options=dict(include_usage=1)), "true or false"),
    (text(stream=True, prompt_logprobs=1), "stream"),
    (text(logprobs=21), "20"),
    (text(structured_outputs=dict(regex="(")), "regex"),
    (text(stop=["x"] * 129), "128"),
    (text(messages=TALK), "prompt"),
    (chat(tools=[FORM]), "not supported"),
    (dict(messages=[]), "messages"),
    (say(IMAGE), "text"),
    (say("a", "wizard"), "wizard"),
    (say("caf\ud800"), "half"),
    (dict(messages=[dict(role="user")]), "content"),
    (chat(prompt="a"), "messages"),
    (chat(max_completion_tokens=257), "257"),
    (chat(chat_template="{{ 1 }}"), "not supported"),
    (chat(chat_template_kwargs=dict(tokenize=False)), "no variable"),
    (chat(guided_regex="["), "compiled"),
    (text(guided_json="x"), "not JSON"),
    (chat(logprobs=3), "true or false"),
    (chat(logprobs=True, top_logprobs=50), "20"),
    (text(model="gpt-4"), "gpt-4", 404, "model_not_found"),
    (text(prompt="a" * 300), "300", 400, "context_length_exceeded"),
    (
        say("x" * 400),
        "this model's maximum context length is 256 tokens",
        400,
        "context_length_exceeded",
    ),
]


@streamed
@pytest.mark.parametrize(
    "body, word, status, code", [(*r, 400, "invalid_request")[:4] for r in BAD]
)
def test_bad_requests(s, web, body, word, status, code, stream):
    "The key that is wrong is the last."
    param, path = None, TEXT
    if isinstance(body, dict):
        path = CHAT if [*body][:1] == ["messages"] else TEXT
        param = [*body][-1] if body else "prompt"
        if "stream_options" not in body:
            body = dict(stream=stream) | body
        body = json.dumps(body).encode()
    r = web.post(path, content=body)
    e = r.json()["error"]
    assert (r.status_code, e["code"], e["param"]) == (status, code, param), r.text
    assert e["type"] == "invalid_request_error"
    assert word in e["message"] and "\n" not in e["message"]
    until(lambda: nothing_left(s))


PATHS = """
["GET", "/", ""]
["GET", "/docs", ""]
["GET", "/v1/batches", "--data FOLDER"]
["POST", "//v1/chat/completions", "base_url"]
["POST", "/v1/v1/chat/completions", "base_url"]
["POST", "/chat/completions", "base_url"]
["POST", "/v1/completions/", "base_url"]
["POST", "/v1/files", "--data FOLDER"]
["POST", "/v1/responses/resp_1/cancel", "--data FOLDER"]
["POST", "/v1/audio/speech", "/v1/chat/completions"]
["POST", "/v1/moderations", "/v1/moderations"]
["POST", "/v2/nope", "/v1/models"]
"""


@pytest.mark.parametrize("method, path, word", json_lines(PATHS))
def test_paths_that_are_not_served(web, method, path, word):
    r = web.request(method, path, json={})
    e = r.json()["error"]
    assert (r.status_code, e["code"]) == (404, "not_found") and word in e["message"]


@pytest.mark.parametrize(
    "method, path, own", [("GET", TEXT, "POST"), ("DELETE", "/v1/models", "GET")]
)
def test_methods_that_are_not_served(web, method, path, own):
    r = web.request(method, path)
    e = r.json()["error"]
    assert (r.status_code, e["code"]) == (405, "method_not_allowed")
    assert own in e["message"] and own in r.headers["allow"]


def test_head_is_get_without_a_body(web):
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/version", "/metrics", "/v1/nope"):
        head, get = web.head(path), web.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert not get.content or head.headers["content-type"] == get.headers["content-type"]
    assert web.head(TEXT).status_code == 405
    assert web.get("/v1/models").status_code == 200  # the connection still works


KEYS = """stream stream_options echo prompt_logprobs priority model prompt messages logprobs top_logprobs response_format tools
    tool_choice chat_template_kwargs add_generation_prompt continue_final_message user metadata suffix functions guided_json timeout
    x \ud800""".split()
JUNK = junk(
    "a",
    "\ud800",
    "\x00",
    "x" * 300,
    1e308,
    -1e308,
    "json_object",
    keys=["a", "5", "type", "\ud800"],
)


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(
    st.sampled_from([TEXT, CHAT]),
    st.dictionaries(st.sampled_from(sorted({*OPTIONS, *KEYS})), JUNK, min_size=1, max_size=3),
)
def test_values_at_random_are_never_a_500(s, path, odd):
    "Any JSON for any key: an answer, or an error that names what is wrong."
    until_now = len(s.said)
    body = asked(path, max_tokens=2) | odd
    r = s.web.post(path, content=json.dumps(body).encode())
    assert r.status_code < 500, r.text
    if r.status_code != 200:
        assert {*r.json()["error"]} == {"message", "type", "param", "code"}, r.text
    elif body.get("stream") is True:
        assert r.text.endswith("data: [DONE]\n\n") and '"error"' not in r.text, r.text
    until(lambda: nothing_left(s))
    assert not [x for x in s.said[until_now:] if "server_error" in x]


def test_what_has_no_effect_is_said_once(web, caplog):
    say_ignored.cache_clear()
    for k in [*IGNORED] * 2:
        body = dict(prompt="a", max_tokens=1) | {k: "low"}
        assert web.post(TEXT, json=body).status_code == 200
    said = [r for r in caplog.records if "no effect" in r.getMessage()]
    assert len(said) == len(IGNORED)


MARKS = "<eos>" * 2**17
SAID = [user(MARKS)]


@pytest.fixture
def looked_at(monkeypatch):
    "How many characters are stained and tokenised, and how many ids looked at, while a test runs."
    seen = []

    def spy(owner, name):
        real = getattr(owner, name)

        def spied(*args, **kw):
            seen.append(1 if name == "whole_number" else chars_in(args))
            return real(*args, **kw)

        monkeypatch.setattr(owner, name, spied)

    spy(control, "stain_of")
    spy(PreTrainedTokenizerBase, "__call__")
    spy(inputs, "whole_number")
    return seen


@pytest.mark.parametrize(
    "path,body,key",
    [
        (CHAT, dict(messages=SAID), "messages"),
        (CHAT, dict(messages=TALK, chat_template_kwargs=dict(x=MARKS)), None),
        (TEXT, dict(prompt=MARKS), "prompt"),
        (TEXT, dict(prompt=MANY_IDS), "prompt"),
        (TEXT, dict(prompt=[MANY_IDS, [5.0, *MANY_IDS]]), "prompt"),
        (TEXT, dict(prompt=[5.0, *["a"] * 2**17]), "prompt"),
        ("/v1/responses", dict(input=MARKS), "input"),
        ("/v1/responses/input_tokens", dict(input=MARKS), "input"),
        ("/v1/messages", dict(model="tiny", messages=SAID, max_tokens=1), None),
        ("/v1/messages/count_tokens", dict(model="tiny", messages=SAID), None),
        ("/tokenize", dict(prompt=MARKS), "prompt"),
        ("/tokenize", dict(messages=SAID), "messages"),
        ("/detokenize", dict(tokens=MANY_IDS), "tokens"),
        ("/v1/embeddings", dict(input=MARKS), "input"),
        ("/v1/embeddings", dict(input=MANY_IDS), "input"),
        ("/score", dict(text_1="a", text_2=MARKS), "text_2"),
    ],
)
def test_what_is_surely_too_long_is_refused_before_it_is_looked_at(s, web, looked_at, path, body, key):  # fmt: skip
    r = web.post(path, json=body)
    if key is None and path == CHAT:
        assert r.status_code == 200  # its template does not write that
        return
    assert r.status_code == 400 and sum(looked_at) < 20, r.text
    said = r.json()["error"]
    assert "maximum context length is 256 tokens" in said["message"]
    assert key is None or (said["code"], said["param"]) == ("context_length_exceeded", key)
    if path in (CHAT, TEXT, "/v1/embeddings") and key != "tokens":
        line = json.dumps(dict(custom_id="a", method="POST", url=path, body=body)).encode()
        line = parse_line(1, line)
        if not line.failure:  # several prompts are none
            assert admit_line(s.llm, line, ParamsCache()) is None
            assert line.failure[0] == "context_length_exceeded" and sum(looked_at) < 40


def test_too_many_at_once():
    with serving(max_pending=3) as s, contextlib.ExitStack() as stack:
        got = []
        ask = lambda n: got.append(posted(s.web, TEXT, prompt="a", max_tokens=3, n=n))
        with paused_after(s.llm, 0):
            for n in (1, 2):
                stack.enter_context(thread(ask, n))
            until(lambda: s.api.limits.pending == 3)
            for stream in (False, True):
                r = s.web.post(TEXT, json=dict(prompt="a", stream=stream))
                e = r.json()["error"]
                assert (r.status_code, r.headers["retry-after"]) == (429, str(RETRY_AFTER))
                assert (e["code"], e["type"]) == ("rate_limit_exceeded", "rate_limit_error")
            assert s.web.get("/health").status_code == 200  # which needs no place
        stack.close()
        assert sorted(len(d["choices"]) for d in got) == [1, 2]
        for body, param in ((dict(prompt=["a"] * 4), "prompt"), (dict(prompt="a", n=4), "n")):
            r = s.web.post(TEXT, json=body)
            assert (r.status_code, r.json()["error"]["param"]) == (400, param)
        assert posted(s.web, TEXT, prompt=["a"] * 3)["usage"]["prompt_tokens"] == 3


def test_keys():
    with serving(api_key="s3cret") as s:

        def ask(key, path="/v1/models"):
            return s.web.get(path, headers={} if key is None else {"Authorization": key})

        for key in (None, "", "Bearer", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret"):
            r = ask(key)
            assert refusal(r) == (401, "invalid_api_key"), key
            assert r.headers["www-authenticate"] == "Bearer"
        assert ask("Bearer s3cret").status_code == ask("bearer s3cret").status_code == 200
        status = lambda path: ask(None, path).status_code
        assert {status(p) for p in ("/health", "/version", "/metrics")} == {200}
        assert {status(p) for p in ("/tokenize", "/nope")} == {401}
        assert not any("s3cre" in x for x in s.said)


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_fails_in_the_middle(begun):
    "In a stream that has begun, an event says so."
    with serving() as s:
        c = client_of(s, http_client=s.web)

        def ask(**more):
            with pytest.raises(openai.APIError, match="no more memory") as e:
                list(c.completions.create(model="tiny", **LONG, **more))
            return getattr(e.value, "status_code", None)

        asks = partial(ask, prompt="a", stream=True), partial(ask, prompt="b")
        statuses = by_a_failing_engine(s, begun, *asks)
        assert statuses == [None if begun else 500, 500]
        assert StreamedAnswer.failed(None, BadRequest("x")).endswith(DONE)
        assert c.completions.create(model="tiny", prompt="a").choices  # it goes on


async def visit(app, body, send):
    "Ask ASGI application `app` for a completion, without a server."
    sent, never = [dict(type="http.request", body=json.dumps(body).encode())], asyncio.Event()

    async def receive():
        if sent:
            return sent.pop()
        await never.wait()

    scope = dict(type="http", method="POST", path=TEXT, raw_path=TEXT.encode(), headers=[])
    scope |= dict(query_string=b"", root_path="", scheme="http", http_version="1.1")
    await app(scope | dict(client=("x", 1), server=("x", 2)), receive, send)


def test_a_reader_that_does_not_read_holds_nobody_up():
    "It gets all of its answer in two parts when it goes on; meanwhile others are answered."

    async def slow():
        app = create_app(tiny(), "tiny")
        llm, parts, others, stuck, go = app.state.api.llm, [], [], asyncio.Event(), asyncio.Event()

        async def send(message):
            parts.append(message.get("body", b""))
            if len(parts) == 2:
                stuck.set()
                await go.wait()

        async def quick(message):
            others.append(message.get("body", b""))

        body = dict(prompt="a", max_tokens=200, ignore_eos=True, temperature=0)
        task = asyncio.create_task(visit(app, body | dict(stream=True), send))
        await stuck.wait()
        for _ in range(3):
            await visit(app, body | dict(max_tokens=3), quick)
        while llm.llm.has_unfinished:
            await asyncio.sleep(0.001)  # its own request is done as well
        assert len(parts) == 2 and len(others) == 6 and not task.done()
        go.set()
        await task
        await llm.shutdown()
        events = events_of(b"".join(parts).decode())
        [out] = llm.llm.generate("a", dict(max_tokens=200, ignore_eos=True, temperature=0))
        assert "".join(e["choices"][0]["text"] for e in events) == out.outputs[0].text
        assert len(parts) <= 5

    asyncio.run(asyncio.wait_for(slow(), 100))


def test_no_answer_runs_ahead_of_its_reader():
    made = []

    async def grows():
        for n in range(50):
            made.append(n)
            yield SimpleNamespace(finished=n == 49)

    async def ahead():
        most = read = 0
        async for _ in merged([grows(), grows()]):
            read += 1
            most = max(most, len(made) - read)
            await asyncio.sleep(0)
        return most

    assert asyncio.run(ahead()) < 6


def test_more_endpoints():
    from fastapi import APIRouter

    router = APIRouter()

    @router.get("/v1/files")
    def files(limit: int = 20):
        return dict(limit=limit)

    @router.post("/v1/files")
    async def upload():
        return {}

    with serving(routers=[router], api_key="k", max_body=10, max_upload=20) as s:
        assert s.web.get("/v1/files").status_code == 401
        s.web.headers["Authorization"] = "Bearer k"
        assert s.web.get("/v1/files", params=dict(limit=3)).json() == dict(limit=3)
        r = s.web.get("/v1/files", params=dict(limit="x"))
        assert (r.status_code, r.json()["error"]["param"]) == (400, "limit")
        for path, size, status in (("/v1/files", 20, 200), ("/v1/files", 21, 413), (TEXT, 11, 413)):
            assert s.web.post(path, content=b"x" * size).status_code == status


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("origins", [[], ["https://a.example"], ["*"]])
def test_pages_of_other_sites(key, origins):
    auth = {"Authorization": "Bearer k"} if key else {}
    asks = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    allowed = "access-control-allow-origin"

    def post(origin):
        headers = {"Origin": origin} | auth
        return s.web.post(TEXT, json=text(max_tokens=1), headers=headers)

    with serving(api_key=key, names=None if key else [], origins=origins) as s:
        r = s.web.options(TEXT, headers=asks)
        if not origins:
            assert r.status_code == 403 and "--allowed-origins" in r.text
            assert not any(k.startswith("access-control") for k in r.headers)
            assert allowed not in post("https://a.example").headers
            return
        assert (r.status_code, r.headers[allowed]) == (200, origins[0])
        assert "authorization" in r.headers["access-control-allow-headers"]
        r = post("https://a.example")
        assert (r.status_code, r.headers[allowed]) == (200, origins[0])
        r = post("https://b.example")
        assert (r.headers.get(allowed) == "*") == (origins == ["*"])
        assert r.status_code == (403 if not key and origins != ["*"] else 200)
        if key:
            r = s.web.get("/v1/models", headers={"Origin": "https://a.example"})
            assert r.status_code == 401
        r = s.web.get("/health", headers={"Host": "evil.example"})
        assert r.status_code == (200 if key else 403)


# the end


def test_what_is_under_way_is_answered_before_the_end():
    body = dict(prompt="a", stream=True, max_tokens=200, ignore_eos=True)
    with serving() as s, contextlib.ExitStack() as stack:
        got = []
        with paused_after(s.llm, 12):
            ask = lambda: got.append(httpx.post(s.url + TEXT, timeout=100, json=body).text)
            stack.enter_context(thread(ask))
            until(lambda: s.llm.loop.paused)
            s.server.should_exit = True
            until(lambda: s.api.limits.draining)
            assert httpx.get(f"{s.url}/health").status_code == 503
            r = httpx.post(s.url + TEXT, json=body)
            assert refusal(r) == (503, "unavailable")
        stack.close()
        s.thread.join(60)
        assert closed(s.url)
        assert got[0].endswith("data: [DONE]\n\n") and '"error"' not in got[0]
        assert '"finish_reason":"length"' in got[0]


SCRIPT = """
import sys
from batchlab.cli import main
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
llm, count = LLM(tiny_model('llama'), tiny_tokenizer(), max_num_seqs=4), 0
def watch(*_):
    global count
    count += 1
    if count == 12: llm.pause()
llm.watchers.append(watch)
sys.exit(main(['serve', '--port', '0', *sys.argv[1:]], llm))
"""


# `batchlab serve` in a process of its own, whose engine stops early in the first request
command = partial(server_process, "-c", SCRIPT)


def closed(url):
    with socket.socket() as c:
        return c.connect_ex(address(url)) != 0


@posix
def test_a_signal_ends_what_is_not_done_in_time():
    with command("--drain", "0") as (p, url, lines), client_of(url, base_url=url) as c:
        for headers, status in (
            (dict(host="evil.example"), 403),
            (dict(origin="https://evil.example"), 403),
            ({}, 200),
        ):
            assert httpx.get(f"{url}/models", headers=headers).status_code == status
        stream = iter(c.completions.create(model=None, prompt="a", stream=True, **LONG))
        next(stream)
        p.terminate()
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        assert p.wait(100) == 0
    said = [x for x in lines[1:] if "POST" not in x and "GET" not in x]
    assert len(said) == 2 and "stopping: 1 answers" in said[0] and "stopped" in said[1]


@posix
def test_a_second_signal_ends_it_at_once():
    body = dict(prompt="a", max_tokens=200, ignore_eos=True, stream=True)
    with command("--drain", "1000") as (p, url, lines), httpx.Client(timeout=100) as c:
        with c.stream("POST", f"{url}/completions", json=body) as r:
            next(r.iter_bytes())
            p.terminate()
            until(lambda: closed(url))
            assert p.poll() is None
            p.terminate()
            assert p.wait(100) == 130
    assert not [x for x in lines if "Traceback" in x], lines


@posix
def test_the_command_s_flags():
    flags = "--no-request-log", "--served-model-name", "mine"
    with command(*flags, BATCHLAB_API_KEY="k3y") as (p, url, lines):
        assert httpx.get(f"{url}/models").status_code == 401
        headers = dict(Authorization="Bearer k3y", origin="https://a.page")
        assert httpx.get(f"{url}/models", headers=headers).json()["data"][0]["id"] == "mine"
        assert "mine is served" in lines[0]
        p.send_signal(signal.SIGINT)
        assert p.wait(100) == 0
    assert lines[1:] == ["batchlab: stopping\n", "batchlab: stopped\n"]


MISTAKES = r"""
["--port 65536", "65535"]
["--port x", "--port"]
["--port TAKEN", "--port"]
["--host 256.0.0.1 --port 0", "256.0.0.1"]
["--api-key=\t", "API key"]
["--max-pending 0", "--max-pending"]
["--temperature 1", "--temperature"]
["a/model --model b", "b"]
["--allowed-origins a.example", "a.example"]
["--allowed-origins https://a.example/x", "a.example/x"]
["--model no/such/model --port 0", "no/such/model"]
"""


@pytest.mark.parametrize("args, words", json_lines(MISTAKES))
def test_mistakes_in_flags(args, words, capsys):
    from batchlab.cli import main

    with listen("127.0.0.1", 0) as sock:
        args = args.replace("TAKEN", url_of(sock).split(":")[-1])
        assert main(["serve", *args.split(" ")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("batchlab: error: ") and err.count("\n") == 1 and words in err


def test_without_the_libraries(monkeypatch, capsys):
    from batchlab.cli import main

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "batchlab.serve.app")
    assert main(["serve"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "batchlab[server]" in err


def test_what_the_command_takes():
    from batchlab.cli.flags import parse_args

    parsed = lambda *args: parse_args(["serve", *args])
    assert parsed("a/model", "--port", "0").model == parsed("--model", "a/model").model == "a/model"
    assert parsed().model is None and parsed().allowed_origins == []
    sites = ["https://a.example", "http://b.example:5173"]
    for text, origins in (("/,".join(sites), sites), ('["*"]', ["*"])):
        assert parsed("--allowed-origins", text).allowed_origins == origins
