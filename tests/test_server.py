"""The server: driven by OpenAI's own client, it gives what `LLM` gives, and stays up whatever its clients send, drop or leave unread."""

import asyncio, contextlib, http.client, json, os, random, re, signal, socket, subprocess, sys, threading
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="needs fastapi: pip install '.[dev]'")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install '.[dev]'")
openai = pytest.importorskip("openai", reason="needs openai: pip install '.[dev]'")
httpx = pytest.importorskip("httpx", reason="needs httpx: pip install '.[dev]'")

from transformers import PreTrainedTokenizerBase

from batchlab.api import LLM
from batchlab.jobs.lines import ParamsCache, parse_line
from batchlab.jobs.runner import admit_line
from batchlab.jobs.schema import as_messages
from batchlab.llm import inputs
from batchlab.models import control, tiny_model, tiny_tokenizer
from batchlab.models.lengths import chars_in
from batchlab.serve.answers import RETRY_AFTER
from batchlab.serve.app import Server, create_app, listen, url_of
from helpers import NO_KERNELS, running, same, until

LONG = dict(max_tokens=200, extra_body=dict(ignore_eos=True))
TALK = [dict(role="user", content="Hello")]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def tiny():
    return LLM(tiny_model("llama"), tiny_tokenizer(), max_num_seqs=4)


@contextlib.contextmanager
def serving(drain=60, llm=None, **kw):
    "A server with a tiny model in a thread of its own: its `url`, `llm`, `api`, `server`, `thread`, and the lines `said`."
    llm, said, up, sock = llm or tiny(), [], threading.Event(), listen("127.0.0.1", 0)
    server = Server(create_app(llm, "tiny", say=said.append, **kw), drain, up.set)
    with running(server, sock, up) as thread:
        yield SimpleNamespace(
            url=url_of(sock), llm=llm, api=server.api, server=server, thread=thread, said=said
        )


def client_of(s, strict=False, kind=openai.OpenAI, **kw):
    """OpenAI's client. Not strict for streams of completions: its types, unlike the API, have a
    reason for the end in every part."""
    how = dict(api_key="any", max_retries=0, timeout=100, _strict_response_validation=strict)
    return kind(**dict(base_url=f"{getattr(s, 'url', s)}/v1") | how | kw)


@pytest.fixture(scope="module")
def s():
    with serving() as s:
        yield s


@pytest.fixture(scope="module")
def client(s):
    with client_of(s, strict=True) as c:
        yield c


@pytest.fixture(scope="module")
def loose(s):
    with client_of(s) as c:
        yield c


@pytest.fixture
def web(s):
    with httpx.Client(base_url=s.url, timeout=100) as c:
        yield c


def nothing_left(s):
    held = s.llm.has_unfinished or s.api.llm.answers or s.api.limits.pending
    return not held and s.llm.stats().running == 0


@contextlib.contextmanager
def paused_after(llm, events):
    "The engine pauses after that many things that its watchers hear of, or at once."
    count = 0

    def watch(*_):
        nonlocal count
        count += 1
        if count == events:
            llm.pause()

    if events:
        llm.watchers.append(watch)
    else:
        llm.start().pause()
    try:
        yield
    finally:
        if events:
            llm.watchers.remove(watch)
        llm.resume()


@contextlib.contextmanager
def thread(f, *args):
    "`f(*args)` at work beside what is in the `with`."
    t = threading.Thread(target=f, args=args)
    t.start()
    yield t
    t.join()


def ends_of(chunks, index=0):
    "`(text, finish_reason)` that the parts of a stream add up to."
    choices = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
    texts = [(c.text if hasattr(c, "text") else c.delta.content) or "" for c in choices]
    return "".join(texts), choices[-1].finish_reason


def events_of(text):
    return [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]


def address(s):
    host, port = getattr(s, "url", s).removeprefix("http://").removesuffix("/v1").split(":")
    return host, int(port)


def line_of(s, ask):
    "What `ask()` gives, and the line that the server says of it; no other request is under way."
    until(lambda: not s.server.server_state.tasks)
    del s.said[:]
    answer = ask()
    until(lambda: s.said)
    return answer, s.said[0]


# what is answered


def test_a_target_that_is_a_whole_url(s):
    "As RFC 9112 wants it, and the name in it is the Host's."
    with serving(names=[]) as own, socket.create_connection(address(own)) as c:
        for host, status in (("localhost", 200), ("evil.example", 403)):
            target = f"http://{host}/health?x=1"
            c.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            r = http.client.HTTPResponse(c)
            r.begin()
            r.read()
            assert r.status == status


def test_a_call_that_was_cut_off_can_be_sent_back(s, web):
    "So can an answer that refused. What is no beginning of an object can not."
    call = lambda text: dict(id="c", type="function", function=dict(name="f", arguments=text))
    said = lambda **m: [*TALK, dict(role="assistant") | m, *TALK]
    for m in (
        *(
            dict(content="", tool_calls=[call(text)])
            for text in ("", "{", '{"a": [1, "b', '{"a": 1}')
        ),
        dict(content=None, refusal="No."),
        dict(content=[dict(type="refusal", refusal="No.")]),
    ):
        assert web.post(CHAT, json=dict(messages=said(**m), max_tokens=1)).status_code == 200
    for text in ("[1", "x", '{"a": 1} x', '"a'):
        r = web.post(CHAT, json=dict(messages=said(tool_calls=[call(text)])))
        assert r.status_code == 400 and "must be a JSON object" in r.text
    whole = as_messages(said(tool_calls=[call('{"a": [1, "b')], content=None))[1]
    assert whole["tool_calls"][0]["function"]["arguments"] == dict(a=[1, "b"])


MORE = [{}, dict(n=2, temperature=1, seed=3)]
ECHOES = [dict(echo=True), dict(echo=True, max_tokens=0), dict(echo=True, logprobs=1)]


@pytest.mark.parametrize("path,more", [(p, m) for p in (TEXT, CHAT) for m in MORE] + [(TEXT, m) for m in ECHOES])  # fmt: skip
def test_token_ids_as_vllm_gives_them(s, web, path, more):
    "Of the answer in each choice, of the prompt in the choice of a text and beside those of a chat; streamed, that in the first part."
    chat = path == CHAT
    body = dict(max_tokens=9, temperature=0, ignore_eos=True) | more
    given = dict(messages=TALK) if chat else dict(prompt="né 7")
    how = {k: v for k, v in body.items() if k != "echo"} | dict(
        max_tokens=max(1, body["max_tokens"])
    )
    ask = s.llm.chat if chat else s.llm.generate
    [out] = ask([TALK] if chat else ["né 7"], how)
    want = [c.token_ids if body["max_tokens"] else [] for c in out.outputs]
    body |= given | dict(return_token_ids=True)
    whole = web.post(path, json=body).json()
    assert [c["token_ids"] for c in whole["choices"]] == want
    parts = events_of(web.post(path, json=body | dict(stream=True)).text)
    for i, ids in enumerate(want):
        own = [p for p in parts if p["choices"] and p["choices"][0]["index"] == i]
        assert sum((p["choices"][0]["token_ids"] for p in own), []) == ids
        places = [
            [p if chat else p["choices"][0] for p in own],
            [whole if chat else whole["choices"][i]],
        ]
        for first, *rest in places:
            assert first["prompt_token_ids"] == out.prompt_token_ids
            assert not any("prompt_token_ids" in p for p in rest)
    plain = web.post(path, json=body | dict(return_token_ids=False)).text
    assert "token_ids" not in plain


@pytest.mark.parametrize("role", ["system", "developer"])
def test_chat_is_what_llm_gives(s, client, role):
    talk = [dict(role=role, content="Be brief."), *TALK]
    [out] = s.llm.chat([talk], dict(temperature=0, max_tokens=9))
    want = out.outputs[0].text, out.outputs[0].finish_reason
    ask = partial(
        client.chat.completions.create,
        model="tiny",
        messages=talk,
        temperature=0,
        max_completion_tokens=9,
    )
    r = ask()
    assert (r.choices[0].message.content, r.choices[0].finish_reason) == want
    assert r.usage.prompt_tokens == len(out.prompt_token_ids)
    assert r.usage.completion_tokens == len(out.outputs[0].token_ids)
    *chunks, last = ask(stream=True, stream_options=dict(include_usage=True))
    assert ends_of(chunks) == want
    assert chunks[0].choices[0].delta.role == "assistant" and len({c.id for c in chunks}) == 1
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
def test_prompts_of_all_forms(s, client, loose, prompt, more):
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    how = dict(temperature=0, max_tokens=11) | more
    outs = s.llm.generate(prompts, how)
    want = [(c.text, c.finish_reason) for o in outs for c in o.outputs]
    r = client.completions.create(model="tiny", prompt=prompt, **how)
    assert [(c.text, c.finish_reason) for c in r.choices] == want
    assert [c.index for c in r.choices] == [*range(len(want))]
    assert r.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in outs)
    chunks = list(loose.completions.create(model="tiny", prompt=prompt, stream=True, **how))
    assert [ends_of(chunks, i) for i in range(len(want))] == want


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
        [got] = web.post(TEXT, json=dict(prompt="Once") | greedy | setting).json()["choices"]
        assert (got["text"], got["finish_reason"]) == (want.text, want.finish_reason), setting
        assert got["text"] != plain.text, setting


def test_structured_outputs(client):
    pytest.importorskip("llguidance", reason="needs llguidance: pip install '.[dev]'")
    schema = dict(type="object", properties=dict(n=dict(enum=[1, 2])), required=["n"])
    schema |= dict(additionalProperties=False)
    form = dict(type="json_schema", json_schema=dict(name="n", schema=schema, strict=True))
    ask = dict(model="tiny", messages=TALK, response_format=form, max_tokens=100)
    for seed in range(3):
        r = client.chat.completions.create(
            **ask, seed=seed, extra_body=dict(structured_outputs=None)
        )
        assert json.loads(r.choices[0].message.content)["n"] in (1, 2)
    chunks = list(client.chat.completions.create(**ask, seed=2, stream=True))
    assert ends_of(chunks)[0] == r.choices[0].message.content


def test_log_probabilities(s, client, loose):
    [out] = s.llm.chat([TALK], dict(temperature=0, max_tokens=9, logprobs=2))
    want = [
        [l.logprob for l in sorted(step.values(), key=lambda l: l.rank)[:2]]
        for step in out.outputs[0].logprobs
    ]
    how = dict(model="tiny", temperature=0, max_tokens=9)
    chat = how | dict(messages=TALK, logprobs=True, top_logprobs=2)
    r = client.chat.completions.create(**chat).choices[0].logprobs
    assert r.model_dump()["refusal"] is None and "refusal" in r.model_fields_set  # it must be there
    assert same([[t.logprob for t in x.top_logprobs] for x in r.content], want, s.llm.backend)
    chunks = [c.choices[0].logprobs for c in client.chat.completions.create(stream=True, **chat)]
    parts = [x.model_dump() for c in chunks if c for x in c.content]
    assert same(parts, [w.model_dump() for w in r.content], s.llm.backend)
    text = how | dict(prompt="abc", logprobs=2)
    whole = client.completions.create(**text).choices[0].logprobs
    chunks = [c.choices[0].logprobs for c in loose.completions.create(stream=True, **text)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [x for c in chunks if c for x in getattr(c, name)]
        assert same(streamed, getattr(whole, name), s.llm.backend), name


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("prompt", ["abcd", [100, 101, 102, 103]])
def test_echo_with_log_probabilities_of_the_prompt(s, web, prompt, most):
    "As programs score texts; the first token has no log probability, so OpenAI's client is not strict here."
    text = "abcd" if isinstance(prompt, str) else bytes(i - 3 for i in prompt).decode()
    score = [None, *s.llm.logprobs([prompt])[0].logprobs]
    body = dict(prompt=prompt, echo=True, logprobs=1, max_tokens=most, temperature=0)
    d = web.post(TEXT, json=body).json()
    got = d["choices"][0]
    logprobs = got["logprobs"]
    assert got["text"].startswith(text) and (most or got["text"] == text)
    assert logprobs["token_logprobs"][:4] == score and len(logprobs["tokens"]) == 4 + most
    assert logprobs["text_offset"][:5] == [0, 1, 2, 3, 4][: 4 + most]
    assert logprobs["tokens"][0] == text[0]
    assert d["usage"]["completion_tokens"] == most and got["finish_reason"] == "length"
    events = events_of(web.post(TEXT, json=body | dict(stream=True)).text)
    parts = [e["choices"][0] for e in events]
    assert "".join(p["text"] for p in parts) == got["text"]
    for name, whole in logprobs.items():
        assert [x for p in parts if p["logprobs"] for x in p["logprobs"][name]] == whole


def test_echo_and_prompt_logprobs(s, loose, web):
    how = dict(temperature=0, max_tokens=5)
    want = s.llm.generate("abc", how)[0].outputs[0].text
    ask = dict(model="tiny", prompt=["abc", [70, 71]], echo=True, **how)
    assert loose.completions.create(**ask).choices[0].text == "abc" + want
    assert ends_of(list(loose.completions.create(stream=True, **ask)))[0] == "abc" + want
    how = dict(temperature=0, max_tokens=1, prompt_logprobs=2)
    [out] = s.llm.generate("abc", how)
    first, *d = web.post(TEXT, json=dict(prompt="abc", **how)).json()["choices"][0][
        "prompt_logprobs"
    ]
    assert first is None and [{int(k): v["logprob"] for k, v in x.items()} for x in d] == [
        {k: v.logprob for k, v in x.items()} for x in out.prompt_logprobs[1:]
    ]
    ask = dict(messages=TALK, max_tokens=1, prompt_logprobs=0)
    assert len(web.post(CHAT, json=ask).json()["prompt_logprobs"]) == 23


def test_chat_template_options(s, web):
    talk = [*TALK, dict(role="assistant", content="Well")]

    def ask(**more):
        body = dict(messages=talk, max_tokens=1, **more)
        return web.post(CHAT, json=body).json()["usage"]["prompt_tokens"]

    bare = ask(add_generation_prompt=False)
    assert ask() - bare == len("assistant:") + 1
    assert ask(add_generation_prompt=False, continue_final_message=True) < bare
    talk[0] = dict(role="user", content="<eos>")
    assert ask() - ask(allow_special=True) == len("<eos>") - 1


def test_who_matters_more_goes_first(s):
    statuses, began = [], []

    def ask(i):
        body = dict(prompt=chr(97 + i) * 3, max_tokens=1, priority=-i)
        statuses.append(httpx.post(s.url + TEXT, json=body, timeout=100).status_code)

    def watch(_, event, x):
        if event == "ended":
            began.append(chr(x.prompt_ids[0] - 3))

    s.llm.watchers.append(watch)
    with contextlib.ExitStack() as stack:
        with paused_after(s.llm, 0):
            for i in range(8):
                stack.enter_context(thread(ask, i))
                until(lambda: len(s.llm.loop.groups) == i + 1)
    s.llm.watchers.remove(watch)
    assert {*began[:4]} == {*"hgfe"} and {*statuses} == {200}


def test_tokens_of_one_reader_come_one_by_one(s, loose):
    "What the engine made is sent though it makes no more for now."
    with paused_after(s.llm, 12):
        stream = loose.completions.create(model="tiny", prompt="a", stream=True, **LONG)
        assert next(iter(stream)).choices[0].finish_reason is None
        assert len(s.llm.loop.groups) == 1
        stream.close()
    until(lambda: nothing_left(s))


@pytest.mark.parametrize("ask", [dict(messages=TALK), dict(prompt="abc")])
def test_usage_in_every_part(web, ask):
    ask |= dict(stream=True, max_tokens=5, n=2, ignore_eos=True, seed=1)
    path = CHAT if "messages" in ask else TEXT
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


def test_other_names_of_the_model():
    with serving(others=["/models/tiny", "org/tiny"]) as s:
        for name in ("tiny", "/models/tiny", "org/tiny", None):
            assert httpx.post(s.url + TEXT, json=dict(model=name, prompt="a")).status_code == 200
        assert httpx.get(f"{s.url}/v1/models/org/tiny").json()["id"] == "tiny"


def test_a_model_that_is_none_names_those_that_there_are(web, monkeypatch):
    monkeypatch.setattr("batchlab.serve.answers.adapter_names", lambda llm: ["pirate", "poet"])
    r = web.post(TEXT, json=dict(prompt="a", model="pirat"))
    said = r.json()["error"]["message"]
    assert r.status_code == 404 and all(repr(x) in said for x in ("tiny", "pirate", "poet"))


@pytest.mark.parametrize("own", [dict(tools=[]), dict(tokenize=False), dict(chat_template="a"), dict(add_generation_prompt=False)], ids=str)  # fmt: skip
def test_what_is_no_variable_of_a_template_is_refused_where_it_would_change_nothing(s, web, own):
    for path in (CHAT, "/tokenize"):
        r = web.post(path, json=dict(messages=TALK, chat_template_kwargs=own))
        assert r.status_code == 400 and next(iter(own)) in r.json()["error"]["message"]
    for fine in (dict(add_generation_prompt=True), dict(tools=None), dict(x=1)):
        body = dict(messages=TALK, chat_template_kwargs=fine, max_tokens=1)
        assert web.post(CHAT, json=body).status_code == 200


def test_tokens_and_back(s, web):
    d = web.post("/tokenize", json=dict(model="tiny", prompt="né", return_token_strs=True)).json()
    assert d["tokens"] == s.llm.tokenizer("né")["input_ids"]
    assert (d["count"], len(d["token_strs"]), d["max_model_len"]) == (3, 3, 256)
    assert web.post("/detokenize", json=dict(tokens=d["tokens"])).json() == dict(prompt="né")
    [out] = s.llm.chat([TALK], dict(max_tokens=1))
    assert web.post("/tokenize", json=dict(messages=TALK)).json()["tokens"] == out.prompt_token_ids
    bare = web.post("/tokenize", json=dict(messages=TALK, add_generation_prompt=False)).json()
    assert bare["count"] < len(out.prompt_token_ids)


@pytest.mark.parametrize(
    "path,body,param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", dict(prompt=None), "prompt"),
        ("/tokenize", dict(prompt="a", messages=TALK), "prompt"),
        ("/tokenize", dict(prompt=5), "prompt"),
        ("/tokenize", dict(prompt="a", x=1), "x"),
        ("/tokenize", {"prompt": "a", "\ud800": 1}, None),
        ("/tokenize", dict(prompt="a", add_generation_prompt=True), "add_generation_prompt"),
        ("/tokenize", dict(messages=TALK, add_special_tokens=True), "add_special_tokens"),
        ("/tokenize", dict(messages=TALK, chat_template_kwargs=[]), "chat_template_kwargs"),
        ("/tokenize", dict(messages=[5]), "messages"),
        ("/detokenize", dict(tokens=[-1]), "tokens"),
        ("/detokenize", dict(tokens="a"), "tokens"),
        ("/detokenize", dict(tokens=[10**9]), "tokens"),
    ],
)
def test_no_tokens(web, path, body, param):
    r = web.post(path, content=json.dumps(body))
    assert (r.status_code, r.json()["error"]["param"]) == (400, param), r.text


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
    assert web.post(TEXT, json=body).json()["usage"]["completion_tokens"] == 5
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


def test_a_line_for_each_request(s, web):
    some = dict(prompt="abc", max_tokens=2, ignore_eos=True)
    for ask, said in (
        (
            lambda: web.post(f"{TEXT}?token=secret", json=some),
            f"POST {TEXT} 200, T s, 3 tokens in, 2 out",
        ),
        (lambda: web.post(TEXT, json=some | dict(stream=True)), " 200, T s, 3 tokens in, 2 out"),
        (
            lambda: web.post(TEXT, json=dict(prompt="", stop=["a secret", 5])),
            " 400, T s, invalid_request: stop",
        ),
        (
            lambda: web.get("/v1/%0a%1b[31mno"),
            "GET /v1/%0a%1b[31mno 404, T s, not_found: /v1/\\n\\x1b",
        ),
    ):
        line = re.sub(r"\d+\.\d\d s", "T s", line_of(s, ask)[1])
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
        dict(messages=[dict(role="user", content=[dict(type=SECRET)])]),
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
    (b"[1]", "JSON object"),
    (b"[" * 100_000, "nested"),
    (b"", "not JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    *((text(prompt=p), "prompt") for p in (None, 5, ["a", 5], [], {"messages": []})),
    ({}, "prompt"),
    (text(prompt=[10**6]), "1000000"),
    (text(prompt="caf\ud800"), "half"),
    (text(model=5), "string"),
    (text(temprature=1), "did you mean"),
    *((text(max_tokens=n), "max_tokens") for n in (-1, 0, 10**6)),
    (text(n=129), "128"),
    (text(best_of=2), "best_of"),
    (text(stream=1), "true or false"),
    (text(logit_bias={"999": 1}), "logit_bias"),
    (text(stream_options={"include_usage": True}), "stream"),
    (text(stream=True, stream_options=dict(often=True)), "often"),
    (text(stream=True, stream_options=dict(include_usage=1)), "true or false"),
    (text(stream=True, stream_options={"\ud800": 1}), "ud800"),
    (text(stream=True, prompt_logprobs=1), "stream"),
    (text(logprobs=21), "20"),
    (text(response_format=dict(type="xml")), "json_schema"),
    (text(response_format="xml"), "object"),
    (text(structured_outputs=dict(regex="(")), "regex"),
    (text(priority="high"), "whole number"),
    (text(stop=["x"] * 129), "128"),
    (text(messages=TALK), "prompt"),
    (chat(tools=[FORM]), "not supported"),
    (dict(messages=[]), "messages"),
    (dict(messages="hi"), "messages"),
    (say(IMAGE), "text"),
    (say("a", "wizard"), "wizard"),
    (say("caf\ud800"), "half"),
    (dict(messages=[dict(role="user")]), "content"),
    (chat(prompt="a"), "messages"),
    (chat(max_completion_tokens=257), "257"),
    (chat(chat_template="{{ 1 }}"), "not supported"),
    (chat(top_logprobs=2), "logprobs"),
    (chat(logprobs=3), "true or false"),
    (chat(logprobs=True, top_logprobs=50), "20"),
    (text(model="gpt-4"), "gpt-4", 404, "model_not_found"),
    (text(prompt="a" * 300), "300", 400, "context_length_exceeded"),
    (say("x" * 400), "tokens", 400, "context_length_exceeded"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body, word, status, code", [(*r, 400, "invalid_request")[:4] for r in BAD]
)
def test_bad_requests(s, web, body, word, status, code, stream):
    "The key that is wrong is the last."
    param, path = None, TEXT
    if isinstance(body, dict):
        param = [*body, "prompt"][max(0, len(body) - 1)]
        if body.keys() & {"messages"} and (param == "prompt" or "prompt" not in body):
            path = CHAT
        if stream and not {"stream", "stream_options", "prompt_logprobs"} & body.keys():
            body = body | dict(stream=True)
        body = json.dumps(body).encode()
    r = web.post(path, content=body)
    e = r.json()["error"]
    assert (r.status_code, e["code"], e["param"]) == (status, code, param), r.text
    assert e["type"] == "invalid_request_error"
    assert word in e["message"] and "\n" not in e["message"]
    until(lambda: nothing_left(s))


@pytest.mark.parametrize(
    "method,path,status,word",
    [
        ("GET", "/", 404, ""),
        ("GET", "/docs", 404, ""),
        ("GET", TEXT, 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET"),
        ("POST", "//v1/chat/completions", 404, "base_url"),
        ("POST", "/v1/v1/chat/completions", 404, "base_url"),
        ("POST", "/chat/completions", 404, "base_url"),
        ("POST", "/v1/completions/", 404, "base_url"),
        ("POST", "/v1/files", 404, "--data FOLDER"),
        ("POST", "/v1/responses/resp_1/cancel", 404, "--data FOLDER"),
        ("POST", "/v1/audio/speech", 404, CHAT),
        ("POST", "/v1/moderations", 404, "/v1/moderations"),
        ("POST", "/v2/nope", 404, "/v1/models"),
    ],
)
def test_paths_that_are_not_served(web, method, path, status, word):
    r = web.request(method, path, json={})
    e = r.json()["error"]
    code = "not_found" if status == 404 else "method_not_allowed"
    assert (r.status_code, e["code"]) == (status, code) and word in e["message"]
    assert status == 404 or word in r.headers["allow"]


def test_head_is_get_without_a_body(web):
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/version", "/metrics", "/v1/nope"):
        head, get = web.head(path), web.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert not get.content or head.headers["content-type"] == get.headers["content-type"]
    assert web.head(TEXT).status_code == 405
    assert web.get("/v1/models").status_code == 200  # the connection still works


ODD = [None, True, False, 0, 1, -1, 2, 3.5, 10**30, 1e308, -1e308, "", "a", "\ud800", "\x00"]
ODD += [[], [1], ["a"], [[]], [[1]], [None], {}, {"a": 1}, {"5": 1}, {"type": "json_object"}]
ODD += ["x" * 300, {"\ud800": 1}]
KEYS = """stream stream_options echo prompt_logprobs priority model prompt messages logprobs top_logprobs response_format tools
    tool_choice chat_template_kwargs add_generation_prompt continue_final_message user metadata suffix functions guided_json timeout
    x \ud800""".split()


def test_values_at_random_are_never_a_500(s, web):
    "Any JSON for any key: an answer, or an error that names what is wrong."
    from batchlab.jobs.settings import OPTIONS

    rand, until_now, keys = random.Random(3), len(s.said), sorted({*OPTIONS, *KEYS})
    for _ in range(500):
        chat = rand.random() < 0.5
        body = dict(messages=TALK) if chat else dict(prompt="ab")
        body |= dict(max_tokens=2)
        body |= {rand.choice(keys): rand.choice(ODD) for _ in range(rand.choice([1, 1, 2, 3]))}
        r = web.post(CHAT if chat else TEXT, content=json.dumps(body).encode())
        assert r.status_code < 500, (body, r.text)
        if r.status_code != 200:
            assert {*r.json()["error"]} == {"message", "type", "param", "code"}, r.text
        elif body.get("stream") is True:
            assert r.text.endswith("data: [DONE]\n\n") and '"error"' not in r.text, (body, r.text)
    until(lambda: nothing_left(s))
    assert not [x for x in s.said[until_now:] if "server_error" in x]


def test_what_has_no_effect_is_said_once(web, caplog):
    from batchlab.jobs.settings import IGNORED, say_ignored

    say_ignored.cache_clear()
    for k in [*IGNORED] * 2:
        body = dict(prompt="a", max_tokens=1) | {k: "low"}
        assert web.post(TEXT, json=body).status_code == 200
    said = [r for r in caplog.records if "no effect" in r.getMessage()]
    assert len(said) == len(IGNORED)


MARKS = "<eos>" * 2**17
MANY_IDS = [5] * 2**17
SAID = [dict(role="user", content=MARKS)]


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
        ("/score", dict(text_1="a", text_2=MARKS), "text_1"),
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


@pytest.mark.parametrize(
    "path,body,word",
    [
        (CHAT, dict(messages=TALK, logit_bias={str(i): 1 for i in range(2**18 + 1)}), "262,144"),
        (TEXT, dict(prompt="a", allowed_token_ids=[5] * (2**18 + 1)), "262,144"),
        (TEXT, dict(prompt="a", bad_words=["a" * 1000] * 66), "65,536 characters"),
        ("/v1/embeddings", {"input": "a"} | {f"k{i}": 1 for i in range(4001)}, "4,000 keys"),
        ("/v1/responses", dict(input="a", metadata={str(i): 1 for i in range(4001)}), "metadata"),
        ("/v1/embeddings", dict(input=["a", *MANY_IDS]), "2048 entries"),
        ("/detokenize", dict(tokens=[5, "a"]), "token ids"),
    ],
)
def test_what_is_too_much_is_refused_by_its_number(web, path, body, word):
    r = web.post(path, json=body)
    assert r.status_code == 400 and word in r.json()["error"]["message"]


def test_a_body_that_is_too_long_is_refused_before_it_has_come():
    with serving(max_body=1000) as s:

        def answer(head, parts):
            with socket.create_connection(address(s), timeout=100) as c:
                c.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
                for part in parts:
                    c.sendall(part)
                r = http.client.HTTPResponse(c)
                r.begin()
                return r.status, json.loads(r.read())["error"]["code"], r.getheader("connection")

        large = 413, "request_too_large", "close"
        assert answer("Content-Length: 1001", []) == large
        chunk = b"3e8\r\n" + b"a" * 1000 + b"\r\n"  # the end of the next never comes
        assert answer("Transfer-Encoding: chunked", [chunk, b"1\r\na\r\n"]) == large
        assert answer("Content-Length: 2", [b"{}"])[:2] == (400, "invalid_request")
        body = dict(prompt="a", user="x" * 900)
        assert httpx.post(s.url + TEXT, json=body).status_code == 200


def test_a_client_that_leaves_while_it_sends(s):
    def send():
        with socket.create_connection(address(s)) as c:
            c.sendall(
                b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prom'
            )

    assert "the client left" in line_of(s, send)[1]


def test_too_many_at_once():
    with serving(max_pending=3) as s, client_of(s) as c, contextlib.ExitStack() as stack:
        ask, got = partial(c.completions.create, model="tiny"), []
        with paused_after(s.llm, 0):
            for n in (1, 2):
                stack.enter_context(
                    thread(lambda n: got.append(ask(prompt="a", max_tokens=3, n=n)), n)
                )
            until(lambda: s.api.limits.pending == 3)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as e:
                    ask(prompt="a", stream=stream)
                assert (e.value.code, e.value.type) == ("rate_limit_exceeded", "rate_limit_error")
                assert e.value.response.headers["retry-after"] == str(RETRY_AFTER)
            assert httpx.get(f"{s.url}/health").status_code == 200  # which needs no place
        stack.close()
        assert sorted(len(r.choices) for r in got) == [1, 2]
        for more in (dict(prompt=["a"] * 4), dict(prompt="a", n=4)):
            with pytest.raises(openai.BadRequestError) as e:
                ask(**more)
            assert e.value.param == ("n" if "n" in more else "prompt")
        assert ask(prompt=["a"] * 3).usage.prompt_tokens == 3


def test_keys():
    with serving(api_key="s3cret") as s:

        def ask(key, path="/v1/models"):
            headers = {} if key is None else {"Authorization": key}
            return httpx.get(s.url + path, headers=headers)

        for key in (None, "", "Bearer", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret"):
            r = ask(key)
            assert (r.status_code, r.json()["error"]["code"]) == (401, "invalid_api_key"), key
            assert r.headers["www-authenticate"] == "Bearer"
        assert ask("Bearer s3cret").status_code == ask("bearer s3cret").status_code == 200
        status = lambda path: ask(None, path).status_code
        assert {status(p) for p in ("/health", "/version", "/metrics")} == {200}
        assert {status(p) for p in ("/tokenize", "/nope")} == {401}
        assert not any("s3cre" in x for x in s.said)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_who_hangs_up_is_cancelled(s, stream, prompts):
    "While the engine stands, so that nothing but the hanging up can end the requests."
    ended = s.llm.stats().requests.get("cancelled", 0)
    body = dict(prompt=["a"] * prompts, max_tokens=200, ignore_eos=True, stream=stream)
    raw = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw)
    with paused_after(s.llm, 12 * prompts if stream else 0):
        with socket.create_connection(address(s), timeout=100) as c:
            c.sendall(head + raw)
            if stream:
                assert c.recv(9) == b"HTTP/1.1 "
            until(lambda: len(s.llm.loop.groups) == prompts)
        until(lambda: nothing_left(s))
    assert s.llm.stats().requests["cancelled"] == ended + prompts
    until(lambda: not s.server.server_state.tasks)
    assert "the client left" in s.said[-1]


def test_a_hundred_clients_a_third_hang_up(s):
    rand = random.Random(5)
    prompts = [[rand.randrange(5, 250) for _ in range(rand.randint(1, 90))] for _ in range(100)]
    how = dict(temperature=0, ignore_eos=True)
    settings = [how | dict(max_tokens=rand.randint(1, 40)) for _ in prompts]
    expected = [o.outputs[0].text for o in s.llm.generate(prompts, settings, use_tqdm=False)]
    leaving = {i: rand.randint(0, 12) for i in range(0, 100, 3)}  # after that many lines or moments
    before = dict(s.llm.stats().requests)

    async def stream(c, body, lines):
        got = ""
        async with c.stream("POST", TEXT, json=body | dict(stream=True)) as r:
            async for line in r.aiter_lines():
                if (lines := lines - 1) < 0:
                    return None
                got += "".join(e["choices"][0]["text"] for e in events_of(line))
        return got

    async def one(c, i):
        body = dict(prompt=prompts[i], **settings[i])
        if i % 2:
            return await stream(c, body, leaving.get(i, 10**6))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(leaving[i] / 200 if i in leaving else 100):
                return (await c.post(TEXT, json=body)).json()["choices"][0]["text"]

    async def crowd():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=s.url, timeout=100, limits=limits) as c:
            return await asyncio.gather(*(one(c, i) for i in range(100)))

    got = asyncio.run(crowd())
    for i, x in enumerate(got):
        assert x == expected[i] or x is None and i in leaving
    until(lambda: nothing_left(s))
    more = {k: n - before.get(k, 0) for k, n in s.llm.stats().requests.items()}
    assert sum(more.values()) <= 100 and not more.get("error") and not more.get("timeout")


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_fails_in_the_middle(begun):
    "In a stream that has begun, an event says so."

    def fail():
        raise RuntimeError("no more memory")

    with serving() as s, client_of(s) as c, contextlib.ExitStack() as stack:
        wrong = []

        def ask(**more):
            try:
                list(c.completions.create(model="tiny", **LONG, **more))
            except openai.APIError as e:
                wrong.append(e)

        with paused_after(s.llm, 12 if begun else 0):
            stack.enter_context(thread(lambda: ask(prompt="a", stream=True)))
            until(lambda: s.llm.loop.groups and (not begun or s.llm.loop.paused))
            stack.enter_context(thread(lambda: ask(prompt="b")))
            until(lambda: len(s.llm.loop.groups) == 2 and [*s.llm.engines.values()])
            failing = [*s.llm.engines.values()]
            for e in failing:
                e.step = fail
        stack.close()
        for e in failing:  # others may have taken their places
            del e.step
        assert len(wrong) == 2 and all("no more memory" in str(e) for e in wrong)
        statuses = {getattr(e, "status_code", None) for e in wrong}
        assert statuses == ({None, 500} if begun else {500})
        until(lambda: nothing_left(s))
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
        web = httpx.Client(base_url=s.url, headers=dict(Authorization="Bearer k"))
        assert web.get("/v1/files", params=dict(limit=3)).json() == dict(limit=3)
        assert httpx.get(f"{s.url}/v1/files").status_code == 401
        r = web.get("/v1/files", params=dict(limit="x"))
        assert (r.status_code, r.json()["error"]["param"]) == (400, "limit")
        status = lambda path, n: web.post(path, content=b"x" * n).status_code
        assert (status("/v1/files", 20), status("/v1/files", 21), status(TEXT, 11)) == (
            200,
            413,
            413,
        )


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
        return httpx.post(s.url + TEXT, json=text(max_tokens=1), headers=headers, timeout=100)

    with serving(api_key=key, names=None if key else [], origins=origins) as s:
        r = httpx.options(s.url + TEXT, headers=asks)
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
            r = httpx.get(f"{s.url}/v1/models", headers={"Origin": "https://a.example"})
            assert r.status_code == 401
        r = httpx.get(f"{s.url}/health", headers={"Host": "evil.example"})
        assert r.status_code == (200 if key else 403)


# the end


def test_what_is_under_way_is_answered_before_the_end():
    with serving() as s, contextlib.ExitStack() as stack:
        got = []
        body = dict(prompt="a", stream=True, max_tokens=200, ignore_eos=True)
        with paused_after(s.llm, 12):
            ask = lambda: got.append(httpx.post(s.url + TEXT, timeout=100, json=body).text)
            stack.enter_context(thread(ask))
            until(lambda: s.llm.loop.paused)
            s.server.should_exit = True
            until(lambda: s.api.limits.draining)
            assert httpx.get(f"{s.url}/health").status_code == 503
            r = httpx.post(s.url + TEXT, json=body)
            assert (r.status_code, r.json()["error"]["code"]) == (503, "unavailable")
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


@contextlib.contextmanager
def process(*args, **env):
    "`batchlab serve` in a process of its own, whose engine stops early in the first request: `(process, url, lines of standard error)`."
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    command = [sys.executable, "-c", SCRIPT, *args]
    p = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        lines = [p.stderr.readline()]
        if NO_KERNELS in lines[0]:
            lines = [p.stderr.readline()]
        reader = threading.Thread(target=lambda: lines.extend(p.stderr), daemon=True)
        reader.start()
        assert " is served at http://127.0.0.1:" in lines[0], lines
        yield p, lines[0].split()[-1], lines
    finally:
        p.kill()
        p.wait()
        reader.join()


def closed(url):
    with socket.socket() as c:
        return c.connect_ex(address(url)) != 0


@posix
@pytest.mark.parametrize("sig", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_what_is_not_done_in_time(sig):
    with process("--drain", "0") as (p, url, lines), client_of(url, base_url=url) as c:
        for headers, status in (
            (dict(host="evil.example"), 403),
            (dict(origin="https://evil.example"), 403),
            ({}, 200),
        ):
            assert httpx.get(f"{url}/models", headers=headers).status_code == status
        stream = iter(c.completions.create(model=None, prompt="a", stream=True, **LONG))
        next(stream)
        p.send_signal(getattr(signal, sig))
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        assert p.wait(100) == 0
    said = [x for x in lines[1:] if "POST" not in x and "GET" not in x]
    assert len(said) == 2 and "stopping: 1 answers" in said[0] and "stopped" in said[1]


@posix
def test_a_second_signal_ends_it_at_once():
    body = dict(prompt="a", max_tokens=200, ignore_eos=True, stream=True)
    with process("--drain", "1000") as (p, url, lines), httpx.Client(timeout=100) as c:
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
    with process(*flags, BATCHLAB_API_KEY="k3y") as (p, url, lines):
        assert httpx.get(f"{url}/models").status_code == 401
        headers = dict(Authorization="Bearer k3y", origin="https://a.page")
        assert httpx.get(f"{url}/models", headers=headers).json()["data"][0]["id"] == "mine"
        assert "mine is served" in lines[0]
        p.terminate()
        assert p.wait(100) == 0
    assert lines[1:] == ["batchlab: stopping\n", "batchlab: stopped\n"]


@pytest.mark.parametrize(
    "args, words",
    [
        ("--port 65536", "65535"),
        ("--port x", "--port"),
        ("--host 256.0.0.1 --port 0", "256.0.0.1"),
        ("--api-key=\t", "API key"),
        ("--max-pending 0", "--max-pending"),
        ("--temperature 1", "--temperature"),
        ("--model no/such/model --port 0", "no/such/model"),
    ],
)
def test_mistakes_in_flags(args, words, capsys):
    from batchlab.cli import main

    assert main(["serve", *args.split(" ")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("batchlab: error: ") and err.count("\n") == 1 and words in err


def test_a_port_that_is_taken(capsys):
    from batchlab.cli import main

    with listen("127.0.0.1", 0) as sock:
        assert main(["serve", "--port", url_of(sock).split(":")[-1]]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--port" in err


def test_without_the_libraries(tmp_path):
    (tmp_path / "fastapi.py").write_text(
        'raise ModuleNotFoundError("No module named \'fastapi\'", name="fastapi")'
    )
    code = f'import sys; sys.path.insert(0, {str(tmp_path)!r}); from batchlab.cli import main; sys.exit(main(["serve"]))'
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert p.returncode == 2 and p.stderr.count("\n") == 1 and "batchlab[server]" in p.stderr


def test_what_the_command_takes():
    from batchlab.errors import JobError
    from batchlab.cli.flags import parse_args

    parsed = lambda *args: parse_args(["serve", *args])
    assert parsed("a/model", "--port", "0").model == parsed("--model", "a/model").model == "a/model"
    assert parsed().model is None and parsed().allowed_origins == []
    origins = lambda text: parsed("--allowed-origins", text).allowed_origins
    assert origins("https://a.example/,http://b.example:5173") == [
        "https://a.example",
        "http://b.example:5173",
    ]
    assert origins('["*"]') == ["*"]
    for argv in (
        ["a/model", "--model", "b"],
        ["--allowed-origins", "a.example"],
        ["--allowed-origins", "https://a.example/x"],
    ):
        with pytest.raises(JobError):
            parsed(*argv)
