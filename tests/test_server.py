"""The server: driven by OpenAI's own client, it gives what `LLM` gives, and stays up whatever its clients send, drop or leave unread."""

import asyncio, contextlib, http.client, json, os, random, re, signal, socket, subprocess, sys, threading
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.serve.app import Server, create_app, listen, url_of
from helpers import NO_KERNELS, running, same, until

LONG = dict(max_tokens=200, extra_body=dict(ignore_eos=True))
TALK = [dict(role="user", content="Hello")]
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@contextlib.contextmanager
def serving(drain=60, llm=None, **kw):
    "A server with a tiny model in a thread of its own: its `url`, `llm`, `api`, `server`, `thread`, and the lines `said`."
    llm, said, up = (
        llm or LLM(tiny_model("llama"), tiny_tokenizer(), max_num_seqs=4),
        [],
        threading.Event(),
    )
    sock = listen("127.0.0.1", 0)
    server = Server(create_app(llm, "tiny", say=said.append, **kw), drain, up.set)
    with running(server, sock, up) as thread:
        yield SimpleNamespace(
            url=url_of(sock), llm=llm, api=server.api, server=server, thread=thread, said=said
        )


@pytest.fixture(scope="module")
def s():
    with serving() as s:
        yield s


@pytest.fixture
def client(s):
    with openai.OpenAI(
        base_url=f"{s.url}/v1",
        api_key="any",
        max_retries=0,
        timeout=100,
        _strict_response_validation=True,
    ) as c:
        yield c


@pytest.fixture
def loose(s):
    "The client for streams of completions: its types, unlike the API, have a reason for the end in every part."
    with openai.OpenAI(base_url=f"{s.url}/v1", api_key="any", max_retries=0, timeout=100) as c:
        yield c


@pytest.fixture
def web(s):
    with httpx.Client(base_url=s.url, timeout=100) as c:
        yield c


def nothing_left(s):
    return (
        not s.llm.has_unfinished
        and not s.api.llm.answers
        and s.api.pending == 0
        and s.llm.stats().running == 0
    )


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


def text_of(chunks, index=0):
    choices = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
    return "".join((c.text if hasattr(c, "text") else c.delta.content) or "" for c in choices)


def reason_of(chunks, index=0):
    return [
        c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].index == index
    ][-1]


# what is answered


@pytest.mark.parametrize("role", ["system", "developer"])
def test_chat_is_what_llm_gives(s, client, role):
    talk = [dict(role=role, content="Be brief."), *TALK]
    [out] = s.llm.chat([talk], dict(temperature=0, max_tokens=9))
    r = client.chat.completions.create(
        model="tiny", messages=talk, temperature=0, max_completion_tokens=9
    )
    assert (r.choices[0].message.content, r.choices[0].finish_reason) == (
        out.outputs[0].text,
        out.outputs[0].finish_reason,
    )
    assert (r.usage.prompt_tokens, r.usage.completion_tokens) == (
        len(out.prompt_token_ids),
        len(out.outputs[0].token_ids),
    )
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=talk,
            temperature=0,
            max_completion_tokens=9,
            stream=True,
            stream_options=dict(include_usage=True),
        )
    )
    assert (
        text_of(chunks) == out.outputs[0].text and reason_of(chunks) == out.outputs[0].finish_reason
    )
    assert chunks[0].choices[0].delta.role == "assistant" and len({c.id for c in chunks}) == 1
    assert not chunks[-1].choices and chunks[-1].usage.total_tokens == r.usage.total_tokens
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0  # it was asked before


@pytest.mark.parametrize(
    "prompt", ["abc", ["a longer prompt than the other", "b"], [5, 6, 7], [[5], [7, 8, 9] * 20], ""]
)
def test_prompts_of_all_forms(s, client, loose, prompt):
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    outs = s.llm.generate(prompts, dict(temperature=0, max_tokens=11))
    r = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=11)
    assert [(c.index, c.text, c.finish_reason) for c in r.choices] == [
        (i, o.outputs[0].text, o.outputs[0].finish_reason) for i, o in enumerate(outs)
    ]
    assert r.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in outs)
    chunks = list(
        loose.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=11, stream=True
        )
    )
    assert [text_of(chunks, i) for i in range(len(prompts))] == [o.outputs[0].text for o in outs]
    assert [reason_of(chunks, i) for i in range(len(prompts))] == [
        o.outputs[0].finish_reason for o in outs
    ]


def test_defaults_are_the_apis(client):
    assert (
        client.completions.create(
            model="tiny", prompt="a", extra_body=dict(ignore_eos=True)
        ).usage.completion_tokens
        == 16
    )
    assert (
        client.chat.completions.create(
            model="tiny", messages=TALK, extra_body=dict(ignore_eos=True)
        ).usage.total_tokens
        == 256
    )


def test_several_answers_to_several_prompts(s, client, loose):
    how = dict(n=3, seed=7, temperature=0.8, max_tokens=8)
    outs = s.llm.generate(["a", "bcd"], how)
    texts = [c.text for o in outs for c in o.outputs]
    r = client.completions.create(model="tiny", prompt=["a", "bcd"], **how)
    assert (
        [c.text for c in r.choices] == texts
        and [c.index for c in r.choices] == list(range(6))
        and len({*texts}) > 2
    )
    chunks = list(loose.completions.create(model="tiny", prompt=["a", "bcd"], stream=True, **how))
    assert [text_of(chunks, i) for i in range(6)] == texts
    talk = client.chat.completions.create(model="tiny", messages=TALK, **how)
    chunks = list(client.chat.completions.create(model="tiny", messages=TALK, stream=True, **how))
    assert [text_of(chunks, i) for i in range(3)] == [c.message.content for c in talk.choices]


def test_settings_reach_the_engine(s, client):
    "Each is compared with the engine's own answer, and all but two with an answer that lacks it."
    plain = s.llm.generate("Once", dict(temperature=0, max_tokens=12))[0].outputs[0]
    ids, text = plain.token_ids, plain.text
    for api, extra in (
        (dict(logit_bias={str(ids[0]): -100}), {}),
        (dict(stop=text[3]), {}),
        (dict(presence_penalty=2.0), {}),
        (dict(frequency_penalty=2.0), {}),
        ({}, dict(repetition_penalty=3.0)),
        ({}, dict(stop_token_ids=[ids[2]])),
        ({}, dict(bad_words=[[ids[0]]])),
        ({}, dict(allowed_token_ids=[70, 71])),
        (dict(seed=3, temperature=1.0), dict(top_k=4)),
        (dict(seed=3, temperature=1.0), dict(min_p=0.2)),
        (dict(seed=4, temperature=1.0, top_p=0.5), {}),
        ({}, dict(min_tokens=2, stop_token_ids=[ids[0]])),
        ({}, dict(structured_outputs=dict(choice=["red", "green"]))),
    ):
        how = dict(temperature=0, max_tokens=12) | api
        want = s.llm.generate("Once", how | extra)[0].outputs[0]
        got = client.completions.create(
            model="tiny", prompt="Once", extra_body=extra, **how
        ).choices[0]
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason), (api, extra)
        assert got.text != text, (api, extra)


def test_structured_outputs(client):
    pytest.importorskip("llguidance")
    schema = dict(
        type="object",
        properties=dict(n=dict(enum=[1, 2])),
        required=["n"],
        additionalProperties=False,
    )
    form = dict(type="json_schema", json_schema=dict(name="n", schema=schema, strict=True))
    for seed in range(3):
        r = client.chat.completions.create(
            model="tiny",
            messages=TALK,
            response_format=form,
            seed=seed,
            max_tokens=100,
            extra_body=dict(structured_outputs=None),
        )
        assert json.loads(r.choices[0].message.content)["n"] in (1, 2)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=TALK, response_format=form, seed=2, max_tokens=100, stream=True
        )
    )
    assert text_of(chunks) == r.choices[0].message.content


def test_log_probabilities(s, client, loose):
    [out] = s.llm.chat([TALK], dict(temperature=0, max_tokens=9, logprobs=2))
    want = [
        [l.logprob for l in sorted(step.values(), key=lambda l: l.rank)[:2]]
        for step in out.outputs[0].logprobs
    ]
    how = dict(
        model="tiny", messages=TALK, temperature=0, max_tokens=9, logprobs=True, top_logprobs=2
    )
    r = client.chat.completions.create(**how).choices[0].logprobs
    whole = r.content
    assert r.model_dump()["refusal"] is None and "refusal" in r.model_fields_set  # it must be there
    assert same([[t.logprob for t in x.top_logprobs] for x in whole], want, s.llm.backend)
    parts = [
        x
        for c in client.chat.completions.create(stream=True, **how)
        for x in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])
    ]
    assert same([p.model_dump() for p in parts], [w.model_dump() for w in whole], s.llm.backend)
    how = dict(model="tiny", prompt="abc", temperature=0, max_tokens=9, logprobs=2)
    whole = client.completions.create(**how).choices[0].logprobs
    chunks = [c.choices[0].logprobs for c in loose.completions.create(stream=True, **how)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [x for c in chunks if c for x in getattr(c, name)]
        assert same(streamed, getattr(whole, name), s.llm.backend), name


@pytest.mark.parametrize("prompt", ["abcd", [100, 101, 102, 103]])
def test_echo_with_log_probabilities_of_the_prompt(s, web, prompt):
    "As programs score texts; the first token has no log probability, so OpenAI's client is not strict here."
    text = "abcd" if isinstance(prompt, str) else bytes(i - 3 for i in prompt).decode()
    score = [None, *s.llm.logprobs([prompt])[0].logprobs]
    for most in (0, 3):
        body = dict(prompt=prompt, echo=True, logprobs=1, max_tokens=most, temperature=0)
        d = web.post("/v1/completions", json=body).json()
        got = d["choices"][0]
        assert got["text"].startswith(text) and (most or got["text"] == text)
        assert (
            got["logprobs"]["token_logprobs"][:4] == score
            and len(got["logprobs"]["tokens"]) == 4 + most
        )
        assert (
            got["logprobs"]["text_offset"][:5] == [0, 1, 2, 3, 4][: 4 + most]
            and got["logprobs"]["tokens"][0] == text[0]
        )
        assert d["usage"]["completion_tokens"] == most and got["finish_reason"] == "length"
        events = [
            json.loads(x[6:])
            for x in web.post("/v1/completions", json=body | dict(stream=True)).text.split("\n\n")
            if x and "DONE" not in x
        ]
        parts = [e["choices"][0] for e in events]
        assert "".join(p["text"] for p in parts) == got["text"]
        for name in got["logprobs"]:
            assert [x for p in parts if p["logprobs"] for x in p["logprobs"][name]] == got[
                "logprobs"
            ][name]


def test_echo_and_prompt_logprobs(s, client, loose, web):
    want = s.llm.generate("abc", dict(temperature=0, max_tokens=5))[0].outputs[0].text
    for stream in (False, True):
        r = loose.completions.create(
            model="tiny",
            prompt=["abc", [70, 71]],
            echo=True,
            temperature=0,
            max_tokens=5,
            stream=stream,
        )
        assert (text_of(list(r)) if stream else r.choices[0].text) == "abc" + want
    [out] = s.llm.generate("abc", dict(temperature=0, max_tokens=1, prompt_logprobs=2))
    d = web.post(
        "/v1/completions", json=dict(prompt="abc", max_tokens=1, temperature=0, prompt_logprobs=2)
    ).json()["choices"][0]["prompt_logprobs"]
    assert d[0] is None and [{int(k): v["logprob"] for k, v in x.items()} for x in d[1:]] == [
        {k: v.logprob for k, v in x.items()} for x in out.prompt_logprobs[1:]
    ]
    assert (
        len(
            web.post(
                "/v1/chat/completions", json=dict(messages=TALK, max_tokens=1, prompt_logprobs=0)
            ).json()["prompt_logprobs"]
        )
        == 23
    )


def test_chat_template_options(s, web):
    ask = lambda **more: web.post(
        "/v1/chat/completions",
        json=dict(messages=[*TALK, dict(role="assistant", content="Well")], max_tokens=1, **more),
    ).json()["usage"]["prompt_tokens"]
    assert ask() - ask(add_generation_prompt=False) == len("assistant:") + 1
    assert ask(add_generation_prompt=False, continue_final_message=True) < ask(
        add_generation_prompt=False
    )


def test_who_matters_more_goes_first(s, web):
    order = []

    def ask(name, priority):
        web_ = httpx.Client(base_url=s.url, timeout=100)
        order.append(
            (
                name,
                web_.post(
                    "/v1/completions", json=dict(prompt=name, max_tokens=1, priority=priority)
                ).status_code,
            )
        )

    began = []

    def watch(_, event, x):
        if event == "ended":
            began.append(x.prompt_ids)

    s.llm.watchers.append(watch)
    with paused_after(s.llm, 0):
        threads = [threading.Thread(target=ask, args=(chr(97 + i) * 3, -i)) for i in range(8)]
        for i, t in enumerate(threads):
            t.start()
            until(lambda: len(s.llm.groups) == i + 1)
    for t in threads:
        t.join()
    s.llm.watchers.remove(watch)
    assert [chr(ids[0] - 3) for ids in began[:4]] == list("hgfe") or {
        chr(ids[0] - 3) for ids in began[:4]
    } == {*"hgfe"}
    assert {status for _, status in order} == {200}


def test_a_crowd_of_async_clients(s):
    "Different lengths, whole and in parts, in one batch; each has what it has alone."
    rand = random.Random(1)
    prompts = [
        "".join(rand.choice("abc de") for _ in range(rand.randint(1, 80))) for _ in range(40)
    ]
    settings = [dict(temperature=0, max_tokens=rand.randint(1, 30)) for _ in prompts]
    expected = [o.outputs[0].text for o in s.llm.generate(prompts, settings, use_tqdm=False)]

    async def one(c, loose, i):
        if i % 2:
            return (
                (await c.completions.create(model="tiny", prompt=prompts[i], **settings[i]))
                .choices[0]
                .text
            )
        return "".join(
            [
                x.choices[0].text
                async for x in await loose.completions.create(
                    model="tiny", prompt=prompts[i], stream=True, **settings[i]
                )
            ]
        )

    async def crowd():
        how = dict(base_url=f"{s.url}/v1", api_key="any", timeout=100)
        async with (
            openai.AsyncOpenAI(**how, _strict_response_validation=True) as c,
            openai.AsyncOpenAI(**how) as loose,
        ):
            return await asyncio.gather(*(one(c, loose, i) for i in range(len(prompts))))

    assert asyncio.run(crowd()) == expected
    until(lambda: nothing_left(s))


def test_tokens_of_one_reader_come_one_by_one(s, client, loose):
    "What the engine made is sent though it makes no more for now."
    with paused_after(s.llm, 12):
        stream = loose.completions.create(model="tiny", prompt="a", stream=True, **LONG)
        first = next(iter(stream))
        assert first.choices[0].finish_reason is None
        assert len(s.llm.groups) == 1
        stream.close()
    until(lambda: nothing_left(s))


# beside the answers


def test_models(client):
    [m] = client.models.list().data
    assert (m.id, m.object, client.models.retrieve("tiny").id) == ("tiny", "model", "tiny")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("an/other")


def test_other_names_of_the_model():
    with serving(others=["/models/tiny", "org/tiny"]) as s:
        for name in ("tiny", "/models/tiny", "org/tiny", None):
            assert (
                httpx.post(f"{s.url}/v1/completions", json=dict(model=name, prompt="a")).status_code
                == 200
            )
        assert httpx.get(f"{s.url}/v1/models/org/tiny").json()["id"] == "tiny"


def test_tokens_and_back(s, web):
    d = web.post("/tokenize", json=dict(model="tiny", prompt="né", return_token_strs=True)).json()
    assert (
        d["tokens"] == s.llm.tokenizer("né")["input_ids"]
        and d["count"] == 3 == len(d["token_strs"])
        and d["max_model_len"] == 256
    )
    assert web.post("/detokenize", json=dict(tokens=d["tokens"])).json() == dict(prompt="né")
    [out] = s.llm.chat([TALK], dict(max_tokens=1))
    assert web.post("/tokenize", json=dict(messages=TALK)).json()["tokens"] == out.prompt_token_ids
    assert web.post("/tokenize", json=dict(messages=TALK, add_generation_prompt=False)).json()[
        "count"
    ] < len(out.prompt_token_ids)
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", dict(prompt=5), "prompt"),
        ("/tokenize", dict(prompt="a", x=1), "x"),
        ("/detokenize", dict(tokens=[-1]), "tokens"),
        ("/detokenize", dict(tokens="a"), "tokens"),
        ("/detokenize", dict(tokens=[10**9]), "tokens"),
        ("/tokenize", dict(messages=[5]), None),
    ):
        r = web.post(path, json=body)
        assert r.status_code == 400 and r.json()["error"]["param"] in (param, "messages"), (
            path,
            body,
            r.text,
        )


def test_health_version_and_figures(s, web):
    from prometheus_client.parser import text_string_to_metric_families
    from batchlab import __version__

    def figures():
        return {
            x.name + str(x.labels.get("finished_reason", x.labels.get("le", ""))): x.value
            for f in text_string_to_metric_families(web.get("/metrics").text)
            for x in f.samples
        }

    assert web.get("/health").status_code == 200 and web.get("/version").json() == dict(
        version=__version__
    )
    before = figures()
    usage = web.post(
        "/v1/completions", json=dict(prompt="abcde", max_tokens=5, ignore_eos=True)
    ).json()["usage"]
    web.post(
        "/v1/completions", json=dict(prompt="abcde", max_tokens=3, ignore_eos=True, stream=True)
    )
    until(lambda: nothing_left(s))
    now = figures()
    more = lambda name: now["vllm:" + name] - before.get("vllm:" + name, 0)
    assert (
        more("prompt_tokens_total"),
        more("generation_tokens_total"),
        more("request_success_totallength"),
    ) == (10, 8, 2) and usage["completion_tokens"] == 5
    assert (
        more("time_to_first_token_seconds_count"),
        more("e2e_request_latency_seconds_count"),
        more("inter_token_latency_seconds_count"),
    ) == (2, 2, 6)
    assert more("time_to_first_token_seconds_bucket+Inf") == 2
    assert (now["vllm:num_requests_running"], now["vllm:num_requests_waiting"]) == (
        0,
        0,
    ) and 0 <= now["vllm:kv_cache_usage_perc"] <= 1
    with (
        paused_after(s.llm, 12),
        openai.OpenAI(base_url=f"{s.url}/v1", api_key="any").completions.create(
            model="tiny", prompt="a", stream=True, **LONG
        ) as stream,
    ):
        next(iter(stream))
        held = figures()
        assert held["vllm:num_requests_running"] == 1 and held["vllm:kv_cache_usage_perc"] > 0


def test_a_line_for_each_request(s, web):
    until(lambda: not s.server.server_state.tasks)  # a line may come after its answer
    del s.said[:]
    some = dict(prompt="abc", max_tokens=2, ignore_eos=True)
    asks = [
        partial(web.post, "/v1/completions?token=secret", json=some),
        partial(web.post, "/v1/completions", json=some | dict(stream=True)),
        partial(web.post, "/v1/completions", json=dict(prompt="abc", stop=["a secret", 5])),
        partial(web.get, "/v1/%0a%1b[31mnope"),
    ]
    for i, ask in enumerate(asks, 1):
        ask()
        until(lambda: len(s.said) == i)
    number = re.compile(r"\d+\.\d\d s")
    assert [number.sub("T s", x) for x in s.said] == [
        "POST /v1/completions 200, T s, 3 tokens in, 2 out"
    ] * 2 + [
        "POST /v1/completions 400, T s, invalid_request: stop must be a string or a list of strings, none of them empty",
        "GET /v1/%0a%1b[31mnope 404, T s, not_found: /v1/\\n\\x1b[31mnope is not served here: see /v1/models and /v1/chat/completions",
    ]


def test_the_log_quotes_nothing_of_a_request(s, web):
    secret = """it's a "secret" """
    bodies = [
        dict(prompt="a", stop=[secret, 5]),
        dict(prompt="a", model=secret),
        {"prompt": "a", secret: 1},
        dict(prompt=dict(a=secret)),
        dict(prompt="a", user=secret, temperature=secret),
        dict(prompt="a", structured_outputs=dict(regex="(secret")),
        dict(messages=[dict(role=secret, content="")]),
        dict(messages=[dict(role="user", content=[dict(type=secret)])]),
    ]
    for body in bodies:
        until(lambda: not s.server.server_state.tasks)
        del s.said[:]
        assert web.post(
            "/v1/chat/completions" if "messages" in body else "/v1/completions", json=body
        ).status_code in (400, 404)
        until(lambda: len(s.said) == 1)
        assert "secret" not in s.said[0] and ": " in s.said[0], s.said


# what goes wrong

BAD = [  # body, status, code, param, words of the message
    (b'{"prompt": "a"', 400, "invalid_request", None, "not JSON"),
    (b"\xff\xfe", 400, "invalid_request", None, "UTF-8"),
    (b"[1]", 400, "invalid_request", None, "JSON object"),
    (b"[" * 100_000, 400, "invalid_request", None, "nested"),
    (b"", 400, "invalid_request", None, "not JSON"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "invalid_request", None, "NaN"),
    (dict(), 400, "invalid_request", "prompt", "prompt must be"),
    (dict(prompt=5), 400, "invalid_request", "prompt", "prompt must be"),
    (dict(prompt=["a", 5]), 400, "invalid_request", "prompt", "prompt must be"),
    (dict(prompt=[]), 400, "invalid_request", "prompt", "prompt must be"),
    (dict(prompt={"messages": []}), 400, "invalid_request", "prompt", "prompt must be"),
    (dict(prompt=[10**6]), 400, "invalid_request", "prompt", "1000000"),
    (dict(prompt="a", model="gpt-4"), 404, "model_not_found", "model", "'gpt-4' does not exist"),
    (dict(prompt="a", model=5), 400, "invalid_request", "model", "a string"),
    (dict(prompt="a", temprature=1), 400, "invalid_request", "temprature", "did you mean"),
    (dict(prompt="a", max_tokens=-1), 400, "invalid_request", "max_tokens", "max_tokens"),
    (dict(prompt="a", max_tokens=0), 400, "invalid_request", "max_tokens", "max_tokens"),
    (dict(prompt="a", n=129), 400, "invalid_request", "n", "128"),
    (dict(prompt="a", best_of=2), 400, "invalid_request", "best_of", "best_of"),
    (dict(prompt="a", stream=1), 400, "invalid_request", "stream", "true or false"),
    (dict(prompt="a", logit_bias={"999": 1}), 400, "invalid_request", "logit_bias", "logit_bias"),
    (dict(prompt="a" * 300), 400, "context_length_exceeded", "prompt", "300 tokens"),
    (
        dict(prompt="a", stream_options={"include_usage": True}),
        400,
        "invalid_request",
        "stream_options",
        "stream",
    ),
    (dict(prompt="a", logprobs=21), 400, "invalid_request", "logprobs", "20"),
    (
        dict(prompt="a", stream=True, stream_options=dict(often=True)),
        400,
        "invalid_request",
        "stream_options",
        "often",
    ),
    (
        dict(prompt="a", response_format=dict(type="xml")),
        400,
        "invalid_request",
        "response_format",
        "json_schema",
    ),
    (
        dict(prompt="a", structured_outputs=dict(regex="(")),
        400,
        "invalid_request",
        "structured_outputs",
        "regex",
    ),
    (dict(prompt="a", priority="high"), 400, "invalid_request", "priority", "whole number"),
    (
        dict(messages=TALK, tools=[dict(type="function", function=dict(name="f"))]),
        400,
        "invalid_request",
        "tools",
        "not supported",
    ),
    (dict(messages=[]), 400, "invalid_request", "messages", "messages must be"),
    (dict(messages="hi"), 400, "invalid_request", "messages", "messages must be"),
    (
        dict(
            messages=[dict(role="user", content=[dict(type="image_url", image_url=dict(url="x"))])]
        ),
        400,
        "invalid_request",
        "messages",
        "only text",
    ),
    (
        dict(messages=[dict(role="wizard", content="a")]),
        400,
        "invalid_request",
        "messages",
        "has the role 'wizard'",
    ),
    (
        dict(messages=[dict(role="user", content="caf\ud800")]),
        400,
        "invalid_request",
        "messages",
        "character 3 is half of one",
    ),
    (dict(prompt="caf\ud800"), 400, "invalid_request", "prompt", "character 3 is half of one"),
    (
        dict(messages=TALK, logprobs=True, top_logprobs=50),
        400,
        "invalid_request",
        "top_logprobs",
        "top_logprobs must be a whole number from 0 to 20",
    ),
    (
        dict(messages=TALK, prompt="a"),
        400,
        "invalid_request",
        "prompt",
        "ask there, or give messages",
    ),
    (
        dict(prompt="a", max_tokens=10**6),
        400,
        "invalid_request",
        "max_tokens",
        "the model holds 256 tokens",
    ),
    (
        dict(messages=TALK, max_completion_tokens=257),
        400,
        "invalid_request",
        "max_completion_tokens",
        "max_completion_tokens is 257",
    ),
    (dict(messages=[dict(role="user")]), 400, "invalid_request", "messages", "content"),
    (
        dict(messages=TALK, chat_template="{{ 1 }}"),
        400,
        "invalid_request",
        "chat_template",
        "not supported",
    ),
    (dict(messages=TALK, top_logprobs=2), 400, "invalid_request", "top_logprobs", "logprobs"),
    (
        dict(messages=[dict(role="user", content="x" * 400)]),
        400,
        "context_length_exceeded",
        "messages",
        "tokens",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body,status,code,param,words", BAD)
def test_bad_requests(s, web, body, status, code, param, words, stream):
    path = (
        "/v1/chat/completions"
        if isinstance(body, dict) and "messages" in body
        else "/v1/completions"
    )
    if isinstance(body, dict):
        if stream and "stream" not in body and "stream_options" not in body:
            body = body | dict(stream=True)
        body = json.dumps(body).encode()
    r = web.post(path, content=body)
    e = r.json()["error"]
    assert (r.status_code, e["code"], e["param"], e["type"]) == (
        status,
        code,
        param,
        "invalid_request_error",
    ), r.text
    assert words in e["message"] and "\n" not in e["message"]
    until(lambda: nothing_left(s))


def test_paths_that_are_not_served(client, web):
    with pytest.raises(openai.NotFoundError, match="v1/moderations is not served here") as e:
        client.moderations.create(model="tiny", input="a")
    assert e.value.code == "not_found"
    with pytest.raises(openai.NotFoundError, match="no responses: use /v1/chat/completions"):
        client.responses.create(model="tiny", input="a")
    for method, path, status in (
        ("GET", "/", 404),
        ("POST", "/v2/x", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/completions/", 404),
        ("GET", "/docs", 404),
    ):
        r = web.request(method, path)
        assert r.status_code == status and r.json()["error"]["code"] == (
            "not_found" if status == 404 else "method_not_allowed"
        ), r.text
        assert status == 404 or r.headers["allow"]


def test_values_at_random_are_never_a_500(s, web):
    "Any JSON for any key: an answer, or an error that names what is wrong."
    from batchlab.jobs.schema import OPTIONS

    rand, until_now = random.Random(3), len(s.said)
    odd = [
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3.5,
        10**30,
        1e308,
        -1e308,
        "",
        "a",
        "\ud800",
        "\x00",
        [],
        [1],
        ["a"],
        [[]],
        [[1]],
        [None],
        {},
        {"a": 1},
        {"5": 1},
        {"type": "json_object"},
        "x" * 300,
    ]
    keys = sorted(
        {
            *OPTIONS,
            "stream",
            "stream_options",
            "echo",
            "prompt_logprobs",
            "priority",
            "model",
            "prompt",
            "messages",
            "logprobs",
            "top_logprobs",
            "response_format",
            "tools",
            "tool_choice",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
            "user",
            "metadata",
            "suffix",
            "functions",
            "guided_json",
            "timeout",
            "x",
        }
    )
    for k in range(500):
        chat = rand.random() < 0.5
        body = dict(messages=TALK) if chat else dict(prompt="ab")
        body |= dict(max_tokens=2) | {
            rand.choice(keys): rand.choice(odd) for _ in range(rand.choice([1, 1, 2, 3]))
        }
        r = web.post(
            "/v1/chat/completions" if chat else "/v1/completions", content=json.dumps(body).encode()
        )
        assert r.status_code < 500, (body, r.text)
        if r.status_code != 200:
            assert {*r.json()["error"]} == {"message", "type", "param", "code"}, r.text
        elif body.get("stream") is True:
            assert r.text.endswith("data: [DONE]\n\n") and '"error"' not in r.text, (body, r.text)
    until(lambda: nothing_left(s))
    assert not [x for x in s.said[until_now:] if "server_error" in x]


def test_a_body_that_is_too_long_is_refused_before_it_has_come():
    with serving(max_body=1000) as s:
        host, port = s.url.removeprefix("http://").split(":")

        def answer(head, parts):
            with socket.create_connection((host, int(port)), timeout=100) as c:
                c.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
                for part in parts:
                    c.sendall(part)
                r = http.client.HTTPResponse(c)
                r.begin()
                return r.status, json.loads(r.read())["error"]["code"], r.getheader("connection")

        assert answer("Content-Length: 1001", []) == (413, "request_too_large", "close")
        chunk = b"3e8\r\n" + b"a" * 1000 + b"\r\n"
        assert answer("Transfer-Encoding: chunked", [chunk, b"1\r\na\r\n"]) == (
            413,
            "request_too_large",
            "close",
        )  # its end never comes
        assert answer("Content-Length: 2", [b"{}"])[:2] == (400, "invalid_request")
        assert (
            httpx.post(f"{s.url}/v1/completions", json=dict(prompt="a", user="x" * 900)).status_code
            == 200
        )


def test_a_client_that_leaves_while_it_sends(s):
    host, port = s.url.removeprefix("http://").split(":")
    until(lambda: not s.server.server_state.tasks)
    until_now = len(s.said)
    with socket.create_connection((host, int(port))) as c:
        c.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prom')
    until(lambda: len(s.said) > until_now)
    assert "the client left" in s.said[-1]


def test_too_many_at_once():
    with (
        serving(max_pending=3) as s,
        openai.OpenAI(base_url=f"{s.url}/v1", api_key="any", max_retries=0, timeout=100) as c,
    ):
        with paused_after(s.llm, 0):
            got = []
            threads = [
                threading.Thread(
                    target=lambda n: got.append(
                        c.completions.create(model="tiny", prompt="a", max_tokens=3, n=n)
                    ),
                    args=(n,),
                )
                for n in (1, 2)
            ]
            for t in threads:
                t.start()
            until(lambda: s.api.pending == 3)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError, match="ask again later") as e:
                    c.completions.create(model="tiny", prompt="a", stream=stream)
                assert (
                    e.value.code,
                    e.value.type,
                    int(e.value.response.headers["retry-after"]) >= 1,
                ) == ("rate_limit_exceeded", "rate_limit_error", True)
            assert (
                httpx.get(f"{s.url}/health").status_code == 200
            )  # who asks for no answer needs no place
        for t in threads:
            t.join()
        assert sorted(len(r.choices) for r in got) == [1, 2]
        with pytest.raises(openai.BadRequestError, match="takes 3 at once"):
            c.completions.create(model="tiny", prompt=["a"] * 4)
        assert c.completions.create(model="tiny", prompt=["a"] * 3).usage.prompt_tokens == 3
        assert c.with_options(max_retries=2).completions.create(model="tiny", prompt="a").choices


def test_keys():
    with serving(api_key="s3cret") as s:
        ask = lambda key, path="/v1/models": httpx.get(
            s.url + path, headers={} if key is None else {"Authorization": key}
        )
        for key in (None, "", "Bearer", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret"):
            r = ask(key)
            assert (r.status_code, r.json()["error"]["code"], r.headers["www-authenticate"]) == (
                401,
                "invalid_api_key",
                "Bearer",
            ), key
        assert ask("Bearer s3cret").status_code == ask("bearer s3cret").status_code == 200
        assert [ask(None, p).status_code for p in ("/health", "/version", "/metrics")] == [
            200
        ] * 3 and ask(None, "/tokenize").status_code == ask(None, "/nope").status_code == 401
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{s.url}/v1", api_key="wrong").models.list()
        assert openai.OpenAI(base_url=f"{s.url}/v1", api_key="s3cret").models.list().data
        assert not any("s3cre" in x for x in s.said)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_who_hangs_up_is_cancelled(s, stream, prompts):
    "While the engine stands, so that nothing but the hanging up can end the requests."
    ended = s.llm.stats().requests.get("cancelled", 0)
    body = json.dumps(
        dict(prompt=["a"] * prompts, max_tokens=200, ignore_eos=True, stream=stream)
    ).encode()
    with paused_after(s.llm, 0 if not stream else 12 * prompts):
        host, port = s.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=100) as c:
            c.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                % len(body)
                + body
            )
            if stream:
                assert c.recv(9) == b"HTTP/1.1 "
            until(lambda: len(s.llm.groups) == prompts)
        until(lambda: nothing_left(s))
    assert s.llm.stats().requests["cancelled"] == ended + prompts
    until(lambda: not s.server.server_state.tasks)  # a line may come after all else
    assert "the client left" in s.said[-1]


def test_a_hundred_clients_a_third_hang_up(s):
    rand = random.Random(5)
    prompts = [[rand.randrange(5, 250) for _ in range(rand.randint(1, 90))] for _ in range(100)]
    settings = [
        dict(temperature=0, max_tokens=rand.randint(1, 40), ignore_eos=True) for _ in prompts
    ]
    expected = [o.outputs[0].text for o in s.llm.generate(prompts, settings, use_tqdm=False)]
    doomed, before = {*rand.sample(range(100), 33)}, dict(s.llm.stats().requests)

    async def one(c, i):
        body, leave = dict(prompt=prompts[i], stream=i % 2 == 0, **settings[i]), rand.randint(0, 12)
        try:
            if not body["stream"]:
                return (
                    await asyncio.wait_for(
                        c.post("/v1/completions", json=body), leave / 200 if i in doomed else 100
                    )
                ).json()["choices"][0]["text"]
            got = ""
            async with c.stream("POST", "/v1/completions", json=body) as r:
                async for line in r.aiter_lines():
                    if i in doomed and (leave := leave - 1) < 0:
                        return None
                    if line.startswith("data: {"):
                        got += json.loads(line[6:])["choices"][0]["text"]
            return got
        except TimeoutError:
            return None

    async def crowd():
        async with httpx.AsyncClient(
            base_url=s.url, timeout=100, limits=httpx.Limits(max_connections=None)
        ) as c:
            return await asyncio.gather(*(one(c, i) for i in range(100)))

    got = asyncio.run(crowd())
    for i, x in enumerate(got):
        assert x == expected[i] or x is None and i in doomed
    until(lambda: nothing_left(s))
    more = {k: n - before.get(k, 0) for k, n in s.llm.stats().requests.items()}
    assert (
        sum(x is not None for x in got) >= 67
        and sum(more.values()) <= 100
        and not more.get("error")
        and not more.get("timeout")
    )


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_fails_in_the_middle(caplog, begun):
    with (
        serving() as s,
        openai.OpenAI(base_url=f"{s.url}/v1", api_key="any", max_retries=0, timeout=100) as c,
    ):

        def fail():
            raise RuntimeError("no more memory")

        with paused_after(s.llm, 12 if begun else 0):
            got, wrong = [], []

            def read():
                try:
                    got.extend(c.completions.create(model="tiny", prompt="a", stream=True, **LONG))
                except openai.APIError as e:
                    wrong.append(e)

            def ask():
                try:
                    c.completions.create(model="tiny", prompt="b", **LONG)
                except openai.APIError as e:
                    wrong.append(e)

            reader, asker = threading.Thread(target=read), threading.Thread(target=ask)
            (
                reader.start(),
                until(lambda: s.llm.groups and (not begun or s.llm.paused)),
                asker.start(),
            )
            until(lambda: len(s.llm.groups) == 2)
            for e in s.llm.engines.values():
                e.step = fail
        reader.join(), asker.join()
        for e in s.llm.engines.values():
            del e.step
        assert len(wrong) == 2 and all("no more memory" in str(e) for e in wrong)
        assert {getattr(e, "status_code", None) for e in wrong} == (
            {None, 500} if begun else {500}
        )  # in a stream that has begun, an event says so
        until(lambda: nothing_left(s))
        assert c.completions.create(model="tiny", prompt="a").choices  # it goes on


async def visit(app, body, send, path="/v1/completions"):
    "Call ASGI application `app` without a server."
    sent, never = [dict(type="http.request", body=json.dumps(body).encode())], asyncio.Event()

    async def receive():
        if sent:
            return sent.pop()
        await never.wait()

    await app(
        dict(
            type="http",
            method="POST",
            path=path,
            raw_path=path.encode(),
            headers=[],
            query_string=b"",
            root_path="",
            scheme="http",
            http_version="1.1",
            client=("x", 1),
            server=("x", 2),
        ),
        receive,
        send,
    )


def test_a_reader_that_does_not_read_holds_nobody_up():
    "It gets all of its answer in two parts when it goes on; meanwhile others are answered."

    async def slow():
        app = create_app(LLM(tiny_model("llama"), tiny_tokenizer(), max_num_seqs=2), "tiny")
        llm, parts, others, stuck, go = app.state.api.llm, [], [], asyncio.Event(), asyncio.Event()

        async def send(message):
            parts.append(message.get("body", b""))
            if len(parts) == 2:
                stuck.set(), await go.wait()

        async def quick(message):
            others.append(message.get("body", b""))

        body = dict(prompt="a", max_tokens=200, ignore_eos=True, stream=True, temperature=0)
        task = asyncio.create_task(visit(app, body, send))
        await stuck.wait()
        for _ in range(3):
            await visit(app, body | dict(stream=False, max_tokens=3), quick)
        while llm.llm.has_unfinished:
            await asyncio.sleep(0.001)  # its own request is done as well
        assert len(parts) == 2 and len(others) == 6 and not task.done()
        go.set()
        await task
        await llm.shutdown()
        texts = [
            json.loads(e[6:])["choices"][0]["text"]
            for p in parts
            for e in p.decode().split("\n\n")
            if e.startswith("data: {")
        ]
        [out] = llm.llm.generate("a", dict(max_tokens=200, ignore_eos=True, temperature=0))
        assert len(parts) <= 5 and "".join(texts) == out.outputs[0].text

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
        assert (
            web.get("/v1/files", params=dict(limit=3)).json() == dict(limit=3)
            and httpx.get(f"{s.url}/v1/files").status_code == 401
        )
        r = web.get("/v1/files", params=dict(limit="x"))
        assert (r.status_code, r.json()["error"]["param"]) == (400, "limit")
        assert [web.post("/v1/files", content=b"x" * n).status_code for n in (20, 21)] == [
            200,
            413,
        ] and web.post("/v1/completions", content=b"x" * 11).status_code == 413


# the end


def test_what_is_under_way_is_answered_before_the_end():
    with serving() as s:
        with paused_after(s.llm, 12):
            got = []

            def read():
                got.append(
                    httpx.post(
                        f"{s.url}/v1/completions",
                        timeout=100,
                        json=dict(prompt="a", stream=True, max_tokens=200, ignore_eos=True),
                    ).text
                )

            reader = threading.Thread(target=read)
            reader.start()
            until(lambda: s.llm.paused)
            s.server.should_exit = True
            until(lambda: s.api.draining)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{s.url}/health")
        reader.join()
        assert (
            got[0].endswith("data: [DONE]\n\n")
            and '"finish_reason":"length"' in got[0]
            and '"error"' not in got[0]
        )


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
    p = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *args],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env},
    )
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
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.socket() as c:
        return c.connect_ex((host, int(port))) != 0


@posix
@pytest.mark.parametrize("sig", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_what_is_not_done_in_time(sig):
    with (
        process("--drain", "0") as (p, url, lines),
        openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=100) as c,
    ):
        assert [
            httpx.get(f"{url}/models", headers=h).status_code
            for h in (dict(host="evil.example"), dict(origin="https://evil.example"), {})
        ] == [403, 403, 200]
        stream = iter(c.completions.create(model=None, prompt="a", stream=True, **LONG))
        next(stream)
        p.send_signal(getattr(signal, sig))
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        assert p.wait(100) == 0
    assert [x for x in lines[1:] if "POST" not in x and "GET" not in x] == [
        "batchlab: stopping: 1 answers under way have 0 s to end\n",
        "batchlab: stopped\n",
    ]


@posix
def test_a_second_signal_ends_it_at_once():
    with process("--drain", "1000") as (p, url, lines), httpx.Client(timeout=100) as c:
        with c.stream(
            "POST",
            f"{url}/completions",
            json=dict(prompt="a", max_tokens=200, ignore_eos=True, stream=True),
        ) as r:
            next(r.iter_bytes())
            p.terminate()
            until(lambda: closed(url))
            assert p.poll() is None
            p.terminate()
            assert p.wait(100) == 130
    assert not [x for x in lines if "Traceback" in x], lines


@posix
def test_the_command_s_flags():
    with process("--no-request-log", "--served-model-name", "mine", BATCHLAB_API_KEY="k3y") as (
        p,
        url,
        lines,
    ):
        assert httpx.get(f"{url}/models").status_code == 401
        assert httpx.get(
            f"{url}/models", headers=dict(Authorization="Bearer k3y", origin="https://a.page")
        ).json()["data"][0]["id"] == "mine" and lines[0].startswith("batchlab: mine is served")
        p.terminate()
        assert p.wait(100) == 0
    assert lines[1:] == ["batchlab: stopping\n", "batchlab: stopped\n"]


@pytest.mark.parametrize(
    "args,words",
    [
        (["--port", "65536"], "0 to 65535"),
        (["--port", "x"], "--port"),
        (["--host", "256.0.0.1", "--port", "0"], "can't listen on 256.0.0.1"),
        (["--api-key", " "], "API key"),
        (["--max-pending", "0"], "--max-pending"),
        (["--temperature", "1"], "unknown flag --temperature"),
        (["--model", "no such model", "--port", "0"], "no such model"),
    ],
)
def test_mistakes_in_flags(args, words, capsys):
    from batchlab.cli import main

    status, err = main(["serve", *args]), capsys.readouterr().err
    assert (
        status == 2
        and len(err.splitlines()) == 1
        and err.startswith("batchlab: error: ")
        and words in err
    ), err


def test_a_port_that_is_taken(capsys):
    from batchlab.cli import main

    with listen("127.0.0.1", 0) as sock:
        assert main(["serve", "--port", url_of(sock).split(":")[-1]]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "give another --port" in err


def test_without_the_libraries(tmp_path):
    (tmp_path / "fastapi.py").write_text(
        'raise ModuleNotFoundError("No module named \'fastapi\'", name="fastapi")'
    )
    code = f'import sys; sys.path.insert(0, {str(tmp_path)!r}); from batchlab.cli import main; sys.exit(main(["serve"]))'
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (p.returncode, p.stderr) == (
        2,
        "batchlab: error: the server needs fastapi: pip install 'batchlab[server]'\n",
    )


# what other servers take, and other clients meet


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_part(s, web, path):
    ask = dict(stream=True, max_tokens=5, n=2, ignore_eos=True, seed=1) | (
        dict(messages=TALK) if "chat" in path else dict(prompt="abc")
    )
    parts = lambda **more: [
        json.loads(line[6:])
        for line in web.post(path, json=ask | dict(stream_options=more)).text.split("\n\n")
        if line.startswith("data: {")
    ]
    told = parts(include_usage=True, continuous_usage_stats=True)
    for part in told:
        assert (
            part["usage"]["total_tokens"]
            == part["usage"]["prompt_tokens"] + part["usage"]["completion_tokens"]
        )
    for i in (0, 1):
        counts = [
            p["usage"]["completion_tokens"]
            for p in told
            if p["choices"] and p["choices"][0]["index"] == i
        ]
        assert counts == sorted(counts) and counts[-1] == 5 and counts[0] >= 1
    assert not told[-1]["choices"] and told[-1]["usage"]["completion_tokens"] == 10
    assert {p["usage"] is None for p in parts(include_usage=True)[:-1]} == {True}
    assert not any("usage" in p for p in parts(include_usage=False, continuous_usage_stats=True))


def test_what_has_no_effect_is_said_once(web, caplog):
    from batchlab.jobs.schema import IGNORED, say_ignored

    say_ignored.cache_clear()
    for _ in range(2):
        for k in IGNORED:
            assert (
                web.post(
                    "/v1/chat/completions", json=dict(messages=TALK, max_tokens=1) | {k: "low"}
                ).status_code
                == 200
            )
    assert len([r for r in caplog.records if "has no effect here" in r.getMessage()]) == len(
        IGNORED
    )
    assert (
        web.post("/v1/completions", json=dict(prompt="a", messages=TALK)).json()["error"]["param"]
        == "messages"
    )


@pytest.mark.parametrize("key", [None, "k"])
def test_pages_of_other_sites(key):
    asks = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    auth = {"Authorization": "Bearer k"} if key else {}
    post = lambda s, origin: httpx.post(
        f"{s.url}/v1/completions",
        json=dict(prompt="a", max_tokens=1),
        headers={"Origin": origin} | auth,
        timeout=100,
    )
    with serving(api_key=key, names=None if key else []) as s:
        r = httpx.options(f"{s.url}/v1/completions", headers=asks)
        assert (
            r.status_code == 403
            and "--allowed-origins" in r.text
            and not any(k.startswith("access-control") for k in r.headers)
        )
        assert post(s, "https://a.example").headers.get("access-control-allow-origin") is None
    for origins in (["https://a.example"], ["*"]):
        with serving(api_key=key, names=None if key else [], origins=origins) as s:
            r = httpx.options(f"{s.url}/v1/completions", headers=asks)
            assert (r.status_code, r.headers["access-control-allow-origin"]) == (
                200,
                origins[0],
            ) and "authorization" in r.headers["access-control-allow-headers"]
            r = post(s, "https://a.example")
            assert (r.status_code, r.headers["access-control-allow-origin"]) == (200, origins[0])
            r = post(s, "https://b.example")
            assert (r.headers.get("access-control-allow-origin") == "*") == (origins == ["*"])
            assert r.status_code == (403 if not key and origins != ["*"] else 200)
            if key:
                assert (
                    httpx.get(
                        f"{s.url}/v1/models", headers={"Origin": "https://a.example"}
                    ).status_code
                    == 401
                )
            assert httpx.get(f"{s.url}/health", headers={"Host": "evil.example"}).status_code == (
                200 if key else 403
            )


def test_head_is_get_without_a_body(web):
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/version", "/metrics", "/v1/nope"):
        head, get = web.head(path), web.get(path)
        assert (
            head.status_code,
            head.content,
            head.headers["content-type"] if get.content else "",
        ) == (get.status_code, b"", get.headers["content-type"] if get.content else "")
    assert web.head("/v1/completions").status_code == 405
    assert web.get("/v1/models").status_code == 200  # the connection still works


@pytest.mark.parametrize(
    "path,words",
    [
        ("//v1/chat/completions", "/v1/chat/completions is: a base_url"),
        ("/v1/v1/chat/completions", "/v1/chat/completions is: a base_url"),
        ("/v1//completions", "/v1/completions is"),
        ("/chat/completions", "/v1/chat/completions is"),
        ("/v1/completions/", "/v1/completions is"),
        ("/v1/files", "--data FOLDER"),
        ("/v1/responses", "no responses"),
        ("/v2/nope", "see /v1/models"),
    ],
)
def test_paths_that_are_nearly_right(web, path, words):
    r = web.post(path, json={})
    assert r.status_code == 404 and words in r.json()["error"]["message"]


def test_a_model_that_is_none_names_those_that_there_are(s, web, monkeypatch):
    monkeypatch.setattr("batchlab.serve.app.adapter_names", lambda llm: ["pirate", "poet"])
    r = web.post("/v1/completions", json=dict(prompt="a", model="pirat"))
    assert (
        r.status_code == 404
        and "this server has 'tiny', and with adapters 'pirate', 'poet'"
        in r.json()["error"]["message"]
    )


def test_what_the_command_takes():
    from batchlab.errors import JobError
    from batchlab.cli.flags import parse_args

    assert (
        parse_args(["serve", "a/model", "--port", "0"]).model
        == parse_args(["serve", "--model", "a/model"]).model
        == "a/model"
        and parse_args(["serve"]).model is None
    )
    assert parse_args(
        ["serve", "--allowed-origins", "https://a.example/,http://b.example:5173"]
    ).allowed_origins == ["https://a.example", "http://b.example:5173"]
    assert (
        parse_args(["serve", "--allowed-origins", '["*"]']).allowed_origins == ["*"]
        and parse_args(["serve"]).allowed_origins == []
    )
    for argv, words in (
        (["a/model", "--model", "b"], "give one of them"),
        (["--allowed-origins", "a.example"], "expected origins"),
        (["--allowed-origins", "https://a.example/x"], "without a path"),
    ):
        with pytest.raises(JobError, match=words):
            parse_args(["serve", *argv])
