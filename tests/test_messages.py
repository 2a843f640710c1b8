"The Messages API: the same tokens as a chat's, its events in the order that is published, and its errors in its form. Claude's own client runs in `.ci/clients`."

import contextlib, json, re
from functools import partial

import pytest

pytest.importorskip("fastapi", reason="needs fastapi: pip install '.[dev]'")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install '.[dev]'")
httpx = pytest.importorskip("httpx", reason="needs httpx: pip install '.[dev]'")
pytest.importorskip("openai", reason="needs openai: pip install '.[dev]'")  # for test_server
from hypothesis import HealthCheck, given, settings, strategies as st

from batchlab.jobs.settings import BadRequest
from batchlab.serve.messages import chat_of_message
from helpers import until
from test_server import CHAT, TALK, nothing_left, paused_after, serving, thread

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASK = dict(model="tiny", max_tokens=12, messages=TALK, temperature=0)
NOW = dict(type="tool_use", id="toolu_1", name="now", input=dict(zone="UTC"))
CALLED = [*TALK, dict(role="assistant", content=[dict(type="text", text="Let me see."), NOW])]
RESULT = dict(type="tool_result", tool_use_id="toolu_1", content="5:12")
ENABLED = dict(type="enabled", budget_tokens=1)
TOOLS = [
    dict(
        name="weather",
        description="The weather.",
        input_schema=dict(
            type="object",
            required=["city", "days"],
            properties=dict(
                city=dict(type="string", maxLength=6),
                days=dict(type="integer", minimum=1, maximum=9),
            ),
        ),
    ),
    dict(name="now", input_schema=dict(type="object")),
]
FUNCTIONS = [
    dict(
        type="function",
        function={k: v for k, v in t.items() if k != "input_schema"}
        | dict(parameters=t["input_schema"]),
    )
    for t in TOOLS
]


def text(*texts):
    return [dict(type="text", text=t) for t in texts]


def user(content):
    return dict(role="user", content=content)


def assistant(content):
    return dict(role="assistant", content=content)


@pytest.fixture(scope="module")
def s():
    with serving() as s:
        yield s


@pytest.fixture(scope="module")
def web(s):
    with httpx.Client(base_url=s.url, timeout=100) as c:
        yield c


@pytest.fixture(scope="module")
def tools():
    "A client of a server whose model's template knows tools."
    pytest.importorskip("llguidance", reason="needs llguidance: pip install '.[dev]'")
    from test_tools import llm

    with serving(llm=llm.__wrapped__("hermes")) as s:
        with httpx.Client(base_url=s.url, timeout=100) as c:
            yield c


def post(web, path=MESSAGES, **body):
    r = web.post(path, json=body)
    assert r.status_code == 200, r.text
    return r.json()


def events_of(sent):
    "The events of a stream, each named as its data says."
    events = []
    for part in sent.removesuffix("\n\n").split("\n\n"):
        if not part.startswith(":"):
            name, data = re.fullmatch("event: (.*)\ndata: (.*)", part).groups()
            events.append(json.loads(data))
            assert events[-1]["type"] == name
    return events


def read(sent):
    "The message that a stream adds up to. Its events must come in the published order."
    events = [e for e in events_of(sent) if e["type"] != "ping"]
    message, blocks, state = events[0]["message"], [], "between"
    assert events[0]["type"] == "message_start" and message["content"] == []
    assert message["stop_reason"] is None
    for e in events[1:-2]:
        match e["type"], state:
            case "content_block_start", "between":
                assert e["index"] == len(blocks)
                blocks.append(e["content_block"])
                said, state = "", "in a block"
            case "content_block_delta", "in a block":
                assert e["index"] == len(blocks) - 1
                match e["delta"], blocks[-1]:
                    case {"type": "text_delta", "text": new}, {"type": "text"}:
                        blocks[-1]["text"] += new
                    case {"type": "thinking_delta", "thinking": new}, {"type": "thinking"}:
                        blocks[-1]["thinking"] += new
                    case {"type": "input_json_delta", "partial_json": new}, {"type": "tool_use"}:
                        said += new
                    case other:
                        raise AssertionError(other)
                assert new
            case "content_block_stop", "in a block":
                assert e["index"] == len(blocks) - 1
                if blocks[-1]["type"] == "tool_use":
                    assert blocks[-1]["input"] == {}
                    blocks[-1]["input"] = json.loads(said)
                state = "between"
            case other:
                raise AssertionError(other)
    assert state == "between" and [e["type"] for e in events[-2:]] == [
        "message_delta",
        "message_stop",
    ]
    return message | events[-2]["delta"] | dict(content=blocks, usage=events[-2]["usage"])


def same_but_ids(message):
    "`message` without what differs each time."
    content = [{k: v for k, v in b.items() if k != "id"} for b in message["content"]]
    keys = "type role model stop_reason stop_sequence".split()
    u = message["usage"]
    total = u["input_tokens"] + u["cache_read_input_tokens"] + u["cache_creation_input_tokens"]
    return {k: message[k] for k in keys}, content, total, u["output_tokens"]


# what is answered

SAME = [
    (dict(messages=TALK), dict(messages=TALK)),
    (dict(messages=[user(text("Hello"))]), dict(messages=TALK)),
    (dict(system="Be brief."), dict(messages=[dict(role="system", content="Be brief."), *TALK])),
    (
        dict(system=text("Be", "brief.")),
        dict(messages=[dict(role="system", content=text("Be", "brief.")), *TALK]),
    ),
    (
        dict(messages=[*TALK, assistant("Hi!"), user("Who are you?")]),
        dict(messages=[*TALK, assistant("Hi!"), user("Who are you?")]),
    ),
    (dict(messages=[*TALK, user("there")]), dict(messages=[user(text("Hello", "there"))])),
    (
        dict(messages=[*TALK, dict(role="system", content="Now in French.")]),
        dict(messages=[*TALK, dict(role="system", content="Now in French.")]),
    ),
    (
        dict(messages=[*TALK, assistant("I am")]),
        dict(
            messages=[*TALK, assistant("I am")],
            continue_final_message=True,
            add_generation_prompt=False,
        ),
    ),
    (dict(messages=[*TALK, assistant("")]), dict(messages=TALK)),
    (
        dict(temperature=0.9, top_p=0.9, top_k=7, seed=3),
        dict(temperature=0.9, top_p=0.9, top_k=7, seed=3),
    ),
    (
        dict(
            output_config=dict(
                format=dict(type="json_schema", schema=dict(type="integer", maximum=99))
            )
        ),
        dict(
            response_format=dict(
                type="json_schema",
                json_schema=dict(name="a", schema=dict(type="integer", maximum=99)),
            )
        ),
    ),
]


@pytest.mark.parametrize("body,chat", SAME)
def test_the_tokens_are_those_of_a_chat(web, body, chat):
    if "output_config" in body:
        pytest.importorskip("llguidance", reason="needs llguidance: pip install '.[dev]'")
    want = post(web, CHAT, **dict(messages=TALK, max_tokens=12, temperature=0) | chat)
    [choice], usage = want["choices"], want["usage"]
    message = post(web, **ASK | body)
    assert message["content"] == text(choice["message"]["content"])
    *_, prompt, answer = same_but_ids(message)
    assert (prompt, answer) == (usage["prompt_tokens"], usage["completion_tokens"])
    counted = {k: v for k, v in (ASK | body).items() if k != "max_tokens"}
    assert post(web, COUNT, **counted) == dict(input_tokens=prompt)
    streamed = read(web.post(MESSAGES, json=ASK | body | dict(stream=True)).text)
    assert same_but_ids(streamed) == same_but_ids(message)


def test_a_message(web):
    r = web.post(MESSAGES, json=ASK)
    m = r.json()
    assert (m["type"], m["role"], m["model"]) == ("message", "assistant", "tiny")
    assert (m["stop_reason"], m["stop_sequence"]) == ("max_tokens", None)
    assert m["id"] == r.headers["request-id"].replace("req_", "msg_")
    again = post(web, **ASK)["usage"]
    assert again["cache_read_input_tokens"] > 0 and again["cache_creation_input_tokens"] == 0
    first = events_of(web.post(MESSAGES, json=ASK | dict(stream=True)).text)[0]["message"]["usage"]
    told = "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"
    assert [first[k] for k in told] == [again[k] for k in told]


HARMLESS = dict(
    metadata=dict(user_id="u"),
    service_tier="auto",
    cache_control=dict(type="ephemeral"),
    thinking=dict(type="adaptive", display="summarized"),
    output_config=dict(effort="high"),
    context_management=dict(edits=[dict(type="clear_thinking_20251015", keep="all")]),
    mcp_servers=[],
    container=None,
    speed="standard",
    diagnostics=dict(previous_message_id=None),
    stop_sequences=[],
    system=[*text("x-anthropic-billing-header: cc_version=1")],
)


@pytest.mark.parametrize("key", HARMLESS)
def test_what_is_sent_along_changes_nothing(web, key):
    plain, more = (same_but_ids(post(web, **ASK | d)) for d in ({}, {key: HARMLESS[key]}))
    assert more == plain


def test_thoughts_and_marks_of_the_cache_do_not_reach_the_prompt(web):
    mark = dict(cache_control=dict(type="ephemeral", ttl="1h"))
    thoughts = [dict(type="thinking", thinking="Hm.", signature="s")]
    thoughts += [dict(type="redacted_thinking", data="x")]
    talk = [TALK[0], assistant("Hi!"), user("Well?")]
    more = [TALK[0], assistant([*thoughts, *text("Hi!")]), user([text("Well?")[0] | mark])]
    one, other = (post(web, COUNT, model="tiny", messages=m) for m in (talk, more))
    assert one == other


def test_what_a_model_thinks_is_a_block_before_the_answer():
    from test_thinking import TALK as HI, llm

    body = dict(model="tiny", max_tokens=24, temperature=0, messages=HI)
    with serving(llm=llm.__wrapped__()) as s, httpx.Client(base_url=s.url, timeout=100) as web:
        whole, short = post(web, **body), post(web, **body, thinking=ENABLED)
        assert whole["content"] == [
            dict(type="thinking", thinking="ab c", signature=""),
            *text("xyz"),
        ]
        assert [b["type"] for b in short["content"]] == ["thinking", "text"]
        assert len(short["content"][0]["thinking"]) < len("ab c")
        streamed = read(web.post(MESSAGES, json=body | dict(stream=True)).text)
        assert same_but_ids(streamed) == same_but_ids(whole)
        again = dict(messages=[*HI, assistant(whole["content"]), user("And?")])
        assert post(web, COUNT, model="tiny", **again)["input_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended(s, web, stream):
    def ended(**body):
        r = web.post(MESSAGES, json=ASK | dict(stream=stream) | body)
        m = read(r.text) if stream else r.json()
        return m["stop_reason"], m["stop_sequence"], "".join(b["text"] for b in m["content"])

    reason, _, said = ended()
    assert reason == "max_tokens"
    stop = said[2:4]
    assert ended(stop_sequences=["never", stop]) == ("stop_sequence", stop, said.split(stop)[0])
    most = s.llm.max_model_len
    assert ended(max_tokens=most, ignore_eos=True)[0] == "model_context_window_exceeded"
    form = dict(type="json_schema", schema=dict(enum=[1]))
    pytest.importorskip("llguidance", reason="needs llguidance: pip install '.[dev]'")
    assert ended(output_config=dict(format=form)) == ("end_turn", None, "1")


# tools


@pytest.mark.parametrize(
    "choice,chat",
    [
        (dict(type="any"), "required"),
        (dict(type="any", disable_parallel_tool_use=True), "required"),
        (dict(type="tool", name="now"), dict(type="function", function=dict(name="now"))),
        (dict(type="auto"), "auto"),
        (dict(type="none"), "none"),
        (None, None),
    ],
)
def test_calls_are_those_of_a_chat(tools, choice, chat):
    body = ASK | dict(tools=TOOLS, tool_choice=choice, max_tokens=200)
    own = dict(messages=TALK, tools=FUNCTIONS, tool_choice=chat, max_tokens=200, temperature=0)
    if choice and "disable_parallel_tool_use" in choice:
        own["parallel_tool_calls"] = False
    want = post(tools, CHAT, **own)
    [choice_made], usage = want["choices"], want["usage"]
    message = post(tools, **body)
    blocks = message["content"]
    said = "".join(b["text"] for b in blocks if b["type"] == "text")
    assert said == (choice_made["message"]["content"] or "")
    calls = [c["function"] for c in choice_made["message"].get("tool_calls", [])]
    found = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    assert found == [(c["name"], json.loads(c["arguments"])) for c in calls]
    assert bool(found) == (chat not in ("auto", "none", None))
    if found:
        assert message["stop_reason"] == "tool_use"
        assert all(re.fullmatch("toolu_[0-9a-f]{24}", b["id"]) for b in blocks if "id" in b)
    *_, prompt, answer = same_but_ids(message)
    assert (prompt, answer) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert post(tools, COUNT, **body) == dict(input_tokens=prompt)
    streamed = read(tools.post(MESSAGES, json=body | dict(stream=True)).text)
    assert same_but_ids(streamed) == same_but_ids(message)


def test_a_name_may_have_128_characters(tools):
    tool = TOOLS[0] | dict(name="x" * 128)
    body = ASK | dict(tools=[tool], tool_choice=dict(type="any"), max_tokens=300)
    [call] = [b for b in post(tools, **body)["content"] if b["type"] == "tool_use"][:1]
    assert call["name"] == tool["name"]
    long = body | dict(tools=[TOOLS[0] | dict(name="x" * 129)])
    assert tools.post(MESSAGES, json=long).status_code == 400


def test_a_call_that_is_cut_off_has_what_came(tools):
    whole = post(tools, **ASK | dict(tools=TOOLS[:1], tool_choice=dict(type="any"), max_tokens=200))
    n = whole["usage"]["output_tokens"]
    body = ASK | dict(tools=TOOLS[:1], tool_choice=dict(type="any"))
    seen = set()
    for most in range(1, n, max(1, n // 8)):
        cut = post(tools, **body | dict(max_tokens=most))
        assert cut["stop_reason"] == "max_tokens"
        for b in cut["content"]:
            assert b["type"] == "text" or b["input"].keys() <= whole["content"][0]["input"].keys()
            seen.add(len(b.get("input", "")))
    assert {0, 1} <= seen


def test_a_result_is_the_message_of_a_tool(tools):
    def count(path, **body):
        return post(tools, path, model="tiny", max_tokens=1, **body)

    for result, content in (
        (RESULT, "5:12"),
        (RESULT | dict(content=text("5", "12")), text("5", "12")),
        (RESULT | dict(content="no clock", is_error=True), "Error: no clock"),
        ({k: v for k, v in RESULT.items() if k != "content"}, ""),
    ):
        own = count(MESSAGES, messages=[*CALLED, user([result, *text("Thanks.")])], tools=TOOLS)
        call = dict(name="now", arguments=json.dumps(NOW["input"]))
        calls = [dict(id="toolu_1", type="function", function=call)]
        chat = [
            *TALK,
            dict(role="assistant", content="Let me see.", tool_calls=calls),
            dict(role="tool", tool_call_id="toolu_1", content=content),
            user("Thanks."),
        ]
        want = count(CHAT, messages=chat, tools=FUNCTIONS)
        assert same_but_ids(own)[2] == want["usage"]["prompt_tokens"]


def test_a_system_message_between_a_call_and_its_result_moves_behind_it():
    note = dict(role="system", content="Be brief.")
    chat = chat_of_message(ASK | dict(messages=[*CALLED, note, user([RESULT])]))
    assert [m["role"] for m in chat["messages"]] == ["user", "assistant", "tool", "system"]


def test_a_system_message_between_calls_and_results_in_two_messages_moves_behind_both():
    note = dict(role="system", content="Be brief.")
    calls = [dict(type="tool_use", id=i, name="now", input={}) for i in "ab"]
    results = [user([dict(type="tool_result", tool_use_id=i, content=i)]) for i in "ab"]
    for more in ([], [assistant("Well.")]):
        talk = [user("Hello"), assistant(calls), note, *results, *more]
        roles = [m["role"] for m in chat_of_message(ASK | dict(messages=talk))["messages"]]
        assert roles[:5] == ["user", "assistant", "tool", "tool", "system"]


def test_a_note_about_billing_is_left_out_of_the_system_prompt_alone():
    note = "x-anthropic-billing-header: cc_version=1;"
    body = ASK | dict(messages=[user(note)])
    of = lambda system: chat_of_message(body | dict(system=system))["messages"]
    asked = dict(role="user", content=note)
    assert of(text(note, "Be brief.")) == [dict(role="system", content="Be brief."), asked]
    assert of(note) == of(text(note)) == of(f"{note}\n\n") == [asked]
    assert of(f"{note}\n\nBe brief.\n") == [dict(role="system", content="Be brief.\n"), asked]
    assert of("") == [dict(role="system", content=""), asked]


# what is refused


@pytest.mark.parametrize(
    "more,word",
    [
        (dict(messages=[user([dict(type="image", source={})])]), "messages.0.content.0.*'image'"),
        (dict(messages=[user([dict(type="document", source={})])]), "'document'"),
        (dict(messages=[*CALLED, user([RESULT | dict(content=[dict(type="image")])])]), "'image'"),
        (dict(messages=[user([text("a")[0] | dict(citations=[{}])])]), "citations"),
        (dict(tools=[dict(type="web_search_20250305", name="w")]), "web_search_20250305"),
        (dict(tools=[TOOLS[0] | dict(defer_loading=True)]), "defer_loading"),
        (dict(mcp_servers=[dict(type="url")]), "mcp_servers"),
        (dict(container="c"), "container"),
        (dict(context_management=dict(edits=[dict(type="clear_tool_uses_1")])), "context_man"),
        (dict(inference_geo="eu"), "inference_geo"),
        (dict(thinking=dict(type="between_tools")), "thinking.type"),
        (dict(messages=CALLED), "'toolu_1' has no tool_result"),
        (dict(messages=[*CALLED, user("Well?")]), "'toolu_1' has no tool_result"),
        (dict(messages=[user([RESULT])]), "'toolu_1' has no such tool_use"),
        (dict(messages=[*CALLED, user([*text("a"), RESULT])]), "begin with its tool_results"),
        (dict(messages=[*CALLED, user([RESULT, RESULT])]), "one for each tool_use"),
        (dict(messages=[*TALK, assistant("I am ")]), "white space"),
        (dict(messages=[assistant([RESULT])]), "'tool_result'"),
        (dict(messages=[dict(role="tool", content="a")]), "messages.0.role"),
        (dict(messages=[]), "messages must be"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(max_tokens=10**6), "max_tokens"),
        (dict(max_tokens=None), "max_tokens"),
        (dict(stop_sequences=[""]), "stop_sequences"),
        (dict(temprature=1), "did you mean 'temperature'"),
        (dict(n=2, metadata={}, seed=1), "has no 'n'"),
        (dict(temperature="a"), "temperature"),
        (dict(tool_choice=dict(type="any")), "tool_choice"),
        (dict(tool_choice=dict(type="tool"), tools=TOOLS), "tool_choice"),
        (dict(tools=[dict(name="a b", input_schema={})]), r"tools\[0\].name"),
        (dict(tools=[dict(name="a", input_schema=dict(type="string"))]), "input_schema.type"),
        (dict(system=[dict(type="image")]), "system.0"),
    ],
)
def test_what_is_not_supported_or_wrong_is_named(web, more, word):
    for path in (MESSAGES,) if "max_tokens" in more else (MESSAGES, COUNT):
        r = web.post(path, json=ASK | more)
        e = r.json()
        assert (r.status_code, e["type"]) == (400, "error"), r.text
        assert e["error"]["type"] == "invalid_request_error"
        assert re.search(word, e["error"]["message"]), e
        assert e["request_id"] == r.headers["request-id"]


def error_of(r):
    e = r.json()
    assert {*e} == {"type", "error", "request_id"} and {*e["error"]} == {"type", "message"}
    assert e["request_id"] == r.headers["request-id"] and e["request_id"].startswith("req_")
    return r.status_code, e["error"]["type"]


def test_errors_by_status(web):
    post_ = partial(web.post, MESSAGES)
    assert error_of(post_(json=ASK | dict(model="x"))) == (404, "not_found_error")
    for path, word in (("batches", "see /v1/batches"), ("", "without a slash")):
        r = web.post(f"/v1/messages/{path}")
        assert error_of(r) == (404, "not_found_error") and word in r.text and "base" not in r.text
    r = web.post("/v1/v1/messages", json=ASK)
    assert error_of(r) == (404, "not_found_error") and "base URL" in r.text
    assert error_of(web.get(MESSAGES)) == (405, "invalid_request_error")
    assert error_of(post_(content=b"{")) == (400, "invalid_request_error")
    r = post_(json=ASK | dict(messages=[user("x" * 500)]))
    assert error_of(r) == (400, "invalid_request_error")
    assert r.json()["error"]["message"].startswith("prompt is too long: ")


def test_a_thread_is_refused_by_the_code_for_which_clients_send_all_messages(web):
    r = web.post(MESSAGES, json=ASK | dict(thread=dict(type="new")))
    error = r.json()["error"]
    assert (r.status_code, error["details"]["error_code"]) == (400, "thread_unsupported_request")


def test_a_key_in_either_header():
    with serving(api_key="s3cret", max_body=1000) as s, httpx.Client(base_url=s.url) as web:
        ask = lambda **headers: web.post(MESSAGES, json=ASK | dict(max_tokens=1), headers=headers)
        for wrong in ({}, {"x-api-key": "s3cre"}, {"x-api-key": ""}):
            assert error_of(ask(**wrong)) == (401, "authentication_error")
        for right in ({"x-api-key": "s3cret"}, {"authorization": "Bearer s3cret"}):
            assert ask(**right).status_code == 200
        own = {"x-api-key": "s3cret"}
        r = web.post(MESSAGES, content=b"x" * 1001, headers=own)
        assert error_of(r) == (413, "request_too_large")


def test_a_server_that_is_full_or_stops():
    with serving(max_pending=1) as s, httpx.Client(base_url=s.url, timeout=100) as web:
        with paused_after(s.llm, 0), contextlib.ExitStack() as stack:
            stack.enter_context(thread(lambda: httpx.post(s.url + MESSAGES, json=ASK)))
            until(lambda: s.api.limits.pending == 1)
            for stream in (False, True):
                r = web.post(MESSAGES, json=ASK | dict(stream=stream))
                assert error_of(r) == (429, "rate_limit_error")
                assert int(r.headers["retry-after"]) >= 1
            s.llm.resume()
        s.api.limits.draining = True
        r = web.post(MESSAGES, json=ASK)
        assert error_of(r) == (529, "overloaded_error") and "retry-after" in r.headers


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_fails(begun):
    "In a stream that has begun, an event says so."

    def fail():
        raise RuntimeError("no more memory")

    body = ASK | dict(max_tokens=200, ignore_eos=True, stream=True)
    with serving() as s, contextlib.ExitStack() as stack:
        got = []
        with paused_after(s.llm, 12 if begun else 0):
            ask = lambda: got.append(httpx.post(s.url + MESSAGES, json=body, timeout=100))
            stack.enter_context(thread(ask))
            until(lambda: s.llm.loop.groups and (not begun or s.llm.loop.paused))
            until(lambda: [*s.llm.engines.values()])
            failing = [*s.llm.engines.values()]
            for e in failing:
                e.step = fail
        stack.close()
        for e in failing:
            del e.step
        [r] = got
        if not begun:
            assert error_of(r) == (500, "api_error")
            return
        *_, last = events_of(r.text)
        assert (r.status_code, last["type"], last["error"]["type"]) == (200, "error", "api_error")
        assert "no more memory" in last["error"]["message"]


def test_a_stream_that_waits_has_pings_once_it_has_begun():
    with serving(keep_alive=0.001) as s, contextlib.ExitStack() as stack:
        got = []

        def ask():
            with httpx.stream("POST", s.url + MESSAGES, json=ASK | dict(stream=True)) as r:
                got.extend(iter(r.iter_raw()))

        with paused_after(s.llm, 0):
            stack.enter_context(thread(ask))
            until(lambda: len(got) > 2)
        stack.close()
        sent = b"".join(got).decode()
        assert sent.startswith(": keep-alive\n\n") and "event: ping" in sent
        assert ": keep-alive" not in sent[sent.index("event: message_start") :]
        read(sent)


def test_models_in_this_form(web):
    headers = {"anthropic-version": "2023-06-01"}
    page = web.get("/v1/models", headers=headers).json()
    [one] = page["data"]
    assert (one["type"], one["id"], page["has_more"]) == ("model", "tiny", False)
    assert web.get("/v1/models/tiny", headers=headers).json() == one
    assert web.get("/v1/models").json()["object"] == "list"


# at random

LEAF = st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from([1e308, 0.5, 10**30])
LEAF |= st.sampled_from(["", "a", "text", "user", "auto", "toolu_1", "\x00", "\ud800", "x" * 300])
WORDS = "type text id name input role content tool_use_id cache_control schema format".split()
JUNK = st.recursive(
    LEAF,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(WORDS), v, max_size=3),
    max_leaves=8,
)
BLOCK = st.sampled_from([*text("Hello", ""), NOW, RESULT, dict(type="image"), dict(type="x")])
BLOCK |= st.builds(lambda k, v, b: b | {k: v}, st.sampled_from(WORDS), JUNK, BLOCK)
CONTENT = st.sampled_from(["Hello", ""]) | st.lists(BLOCK, max_size=3) | JUNK
TURN = st.fixed_dictionaries(
    dict(role=st.sampled_from(["user", "assistant", "system", "tool"]), content=CONTENT)
)
TALKS = [TALK, [*CALLED, user([RESULT])], [*TALK, assistant("I am")], [*TALK, user(text("a", "b"))]]
FORMS = [dict(format=dict(type="json_schema", schema=dict(type="integer"))), dict(effort="low")]
GOOD = dict(
    messages=st.sampled_from(TALKS) | st.lists(TURN, max_size=4),
    system=st.sampled_from(["Be brief.", text("Be", "brief."), ""]),
    max_tokens=st.integers(1, 3),
    temperature=st.sampled_from([0, 0.5, 1]),
    top_p=st.sampled_from([0.1, 1]),
    top_k=st.integers(0, 3),
    stop_sequences=st.lists(st.text(min_size=1, max_size=2), max_size=2),
    stream=st.booleans(),
    tools=st.sampled_from([TOOLS, []]),
    tool_choice=st.sampled_from([dict(type=t) for t in ("auto", "any", "none")]),
    thinking=st.sampled_from([dict(type="enabled", budget_tokens=1), dict(type="disabled")]),
    output_config=st.sampled_from(FORMS),
    chat_template_kwargs=st.just({}),
)
BAD = st.sampled_from(
    [*GOOD, *"context_management mcp_servers container metadata x \ud800".split()]
)
BODIES = st.builds(
    lambda good, bad: good | bad,
    st.fixed_dictionaries({}, optional=GOOD),
    st.just({}) | st.dictionaries(BAD, JUNK, max_size=2),
)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_drawn_bodies_get_an_answer_or_an_error_that_names_what_is_wrong(tools, path):
    @settings(
        max_examples=120, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
    )
    @given(BODIES)
    def ask(body):
        body = dict(ASK, max_tokens=2) | body
        r = tools.post(path, content=json.dumps(body).encode())
        assert r.status_code < 500, (body, r.text)
        if r.status_code != 200:
            assert error_of(r)[1] in ("invalid_request_error", "not_found_error")
        elif path == COUNT:
            assert r.json()["input_tokens"] > 0
        elif body.get("stream"):
            events = events_of(r.text)
            assert events[-1]["type"] == "message_stop", (body, r.text)
        else:
            assert r.json()["type"] == "message"

    ask()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(BODIES)
def test_drawn_bodies_are_read_or_refused_in_one_line(body):
    try:
        chat = chat_of_message(dict(ASK) | body)
    except BadRequest as e:
        assert "\n" not in str(e)
    else:
        assert chat["messages"] or chat["max_tokens"]


def test_nothing_is_left(s):
    until(lambda: nothing_left(s))
