"The Messages API: the same tokens as a chat's, its events in the order that is published, and its errors in its form. Claude's own client runs in `.ci/clients`."

import contextlib, json, re
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from batchlab.jobs.settings import BadRequest
from batchlab.serve.messages import chat_of_message, message_error
from helpers import (
    by_a_failing_engine,
    drawn,
    json_lines,
    junk,
    needs,
    nothing_left,
    paused_after,
    posted,
    streamed,
)
from helpers import assistant, grow, serving, until, user

needs("fastapi", "uvicorn", "httpx", "openai")
from test_server import CHAT, TALK, thread

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASK = dict(model="tiny", max_tokens=12, messages=TALK, temperature=0)
NOW = dict(type="tool_use", id="toolu_1", name="now", input=dict(zone="UTC"))
CALLED = [*TALK, assistant([dict(type="text", text="Let me see."), NOW])]
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


def function(name, input_schema, **more):
    return dict(type="function", function=dict(name=name, **more, parameters=input_schema))


FUNCTIONS = [function(**t) for t in TOOLS]


def text(*texts):
    return [dict(type="text", text=t) for t in texts]


@pytest.fixture(scope="module")
def tools():
    "A client of a server whose model's template knows tools."
    needs("llguidance")
    from test_tools import llm

    with serving(llm=llm.__wrapped__("hermes")) as s:
        yield s.web


def events_of(sent):
    "The events of a stream, each named as its data says."
    events = []
    for part in sent.removesuffix("\n\n").split("\n\n"):
        if not part.startswith(":"):
            name, data = re.fullmatch("event: (.*)\ndata: (.*)", part).groups()
            events.append(json.loads(data))
            assert events[-1]["type"] == name
    return events


DELTAS = dict(text="text", thinking="thinking", tool_use="input_json")


def read(sent):
    "The message that a stream adds up to. Its events must come in the published order."
    events = [e for e in events_of(sent) if e["type"] != "ping"]
    order = " ".join(e["type"].removeprefix("content_block_") for e in events)
    assert re.fullmatch("message_start( start( delta)* stop)* message_delta message_stop", order)
    message, blocks = events[0]["message"], []
    assert message["content"] == [] and message["stop_reason"] is None
    for e in events[1:-2]:
        if "content_block" in e:
            blocks.append(e["content_block"])
        assert e["index"] == len(blocks) - 1
        if "delta" in e:
            [(key, new)] = e["delta"].items() - {("type", DELTAS[blocks[-1]["type"]] + "_delta")}
            assert new and key in (*DELTAS, "partial_json")
            grow(blocks[-1], {key: new})
    for b in blocks:
        if b["type"] == "tool_use":
            assert b["input"] == {}
            b["input"] = json.loads(b.pop("partial_json"))
    return message | events[-2]["delta"] | dict(content=blocks, usage=events[-2]["usage"])


def same_but_ids(message):
    "`message` without what differs each time."
    content = [{k: v for k, v in b.items() if k != "id"} for b in message["content"]]
    keys = "type role model stop_reason stop_sequence".split()
    u = message["usage"]
    total = u["input_tokens"] + u["cache_read_input_tokens"] + u["cache_creation_input_tokens"]
    return {k: message[k] for k in keys}, content, total, u["output_tokens"]


def check_stream(web, body, message):
    "A stream adds up to the same message as the whole answer, and its prompt has as many tokens as are counted."
    streamed = read(web.post(MESSAGES, json=body | dict(stream=True)).text)
    assert same_but_ids(streamed) == same_but_ids(message)
    counted = {k: v for k, v in body.items() if k != "max_tokens"}
    assert posted(web, COUNT, **counted) == dict(input_tokens=same_but_ids(message)[2])


# what is answered

CHOSEN = dict(temperature=0.9, top_p=0.9, top_k=7, seed=3)
UP_TO_99 = dict(type="integer", maximum=99)
TURNS = [*TALK, assistant("Hi!"), user("Who are you?")]
BRIEF = dict(role="system", content="Be brief.")
SAME = [  # a body, and the chat of the same tokens, if it is another
    (dict(messages=TALK), None),
    (dict(messages=[user(text("Hello"))]), dict(messages=TALK)),
    (dict(system="Be brief."), dict(messages=[BRIEF, *TALK])),
    (
        dict(system=text("Be", "brief.")),
        dict(messages=[BRIEF | dict(content=text("Be", "brief.")), *TALK]),
    ),
    (dict(messages=TURNS), None),
    (dict(messages=[*TALK, user("there")]), dict(messages=[user(text("Hello", "there"))])),
    (dict(messages=[*TALK, BRIEF]), None),
    (
        begun := dict(messages=[*TALK, assistant("I am")]),
        begun | dict(continue_final_message=True, add_generation_prompt=False),
    ),
    (dict(messages=[*TALK, assistant("")]), dict(messages=TALK)),
    (CHOSEN, None),
    (
        dict(output_config=dict(format=dict(type="json_schema", schema=UP_TO_99))),
        dict(response_format=dict(type="json_schema", json_schema=dict(name="a", schema=UP_TO_99))),
    ),
]


@pytest.mark.parametrize("body, chat", SAME)
def test_the_tokens_are_those_of_a_chat(web, body, chat):
    if "output_config" in body:
        needs("llguidance")
    given = dict(messages=TALK, max_tokens=12, temperature=0) | (chat or body)
    want = posted(web, CHAT, **given)
    message = posted(web, MESSAGES, **ASK | body)
    assert message["content"] == text(want["choices"][0]["message"]["content"])
    used = want["usage"]["prompt_tokens"], want["usage"]["completion_tokens"]
    assert same_but_ids(message)[2:] == used
    check_stream(web, ASK | body, message)


def test_a_message(web):
    r = web.post(MESSAGES, json=ASK)
    m = r.json()
    assert (m["type"], m["role"], m["model"]) == ("message", "assistant", "tiny")
    assert (m["stop_reason"], m["stop_sequence"]) == ("max_tokens", None)
    assert m["id"] == r.headers["request-id"].replace("req_", "msg_")
    again = posted(web, MESSAGES, **ASK)["usage"]
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
    plain, more = (posted(web, MESSAGES, **ASK | d) for d in ({}, {key: HARMLESS[key]}))
    assert same_but_ids(more) == same_but_ids(plain)


def test_thoughts_and_marks_of_the_cache_do_not_reach_the_prompt(web):
    mark = dict(cache_control=dict(type="ephemeral", ttl="1h"))
    thoughts = [dict(type="thinking", thinking="Hm.", signature="s")]
    thoughts += [dict(type="redacted_thinking", data="x")]
    talk = [TALK[0], assistant("Hi!"), user("Well?")]
    more = [TALK[0], assistant([*thoughts, *text("Hi!")]), user([text("Well?")[0] | mark])]
    one, other = (posted(web, COUNT, model="tiny", messages=m) for m in (talk, more))
    assert one == other


def test_what_a_model_thinks_is_a_block_before_the_answer():
    from test_thinking import TALK as HI, llm

    body = dict(model="tiny", max_tokens=24, temperature=0, messages=HI)
    with serving(llm=llm.__wrapped__()) as s:
        ask = partial(posted, s.web, MESSAGES, **body)
        whole, short = ask(), ask(thinking=ENABLED)
        thought = dict(type="thinking", thinking="ab c", signature="")
        assert whole["content"] == [thought, *text("xyz")]
        assert [b["type"] for b in short["content"]] == ["thinking", "text"]
        assert len(short["content"][0]["thinking"]) < len("ab c")
        check_stream(s.web, body, whole)
        again = [*HI, assistant(whole["content"]), user("And?")]
        assert posted(s.web, COUNT, model="tiny", messages=again)["input_tokens"] > 0


@streamed
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
    needs("llguidance")
    assert ended(output_config=dict(format=form)) == ("end_turn", None, "1")


# tools


CHOICES = """
[{"type": "any"}, "required"]
[{"type": "any", "disable_parallel_tool_use": true}, "required"]
[{"type": "tool", "name": "now"}, {"type": "function", "function": {"name": "now"}}]
[{"type": "auto"}, "auto"]
[{"type": "none"}, "none"]
[null, null]
"""


@pytest.mark.parametrize("choice, chat", json_lines(CHOICES))
def test_calls_are_those_of_a_chat(tools, choice, chat):
    body = ASK | dict(tools=TOOLS, tool_choice=choice, max_tokens=200)
    own = body | dict(tools=FUNCTIONS, tool_choice=chat)
    if choice and "disable_parallel_tool_use" in choice:
        own["parallel_tool_calls"] = False
    want = posted(tools, CHAT, **own)
    made = want["choices"][0]["message"]
    message = posted(tools, MESSAGES, **body)
    said = "".join(b["text"] for b in message["content"] if b["type"] == "text")
    assert said == (made["content"] or "")
    blocks = [b for b in message["content"] if b["type"] == "tool_use"]
    calls = [c["function"] for c in made.get("tool_calls", [])]
    found = [(b["name"], b["input"]) for b in blocks]
    assert found == [(c["name"], json.loads(c["arguments"])) for c in calls]
    assert bool(found) == (chat not in ("auto", "none", None))
    assert all(re.fullmatch("toolu_[0-9a-f]{24}", b["id"]) for b in blocks)
    assert not found or message["stop_reason"] == "tool_use"
    used = want["usage"]["prompt_tokens"], want["usage"]["completion_tokens"]
    assert same_but_ids(message)[2:] == used
    check_stream(tools, body, message)


def test_a_name_may_have_128_characters(tools):
    body = ASK | dict(tool_choice=dict(type="any"), max_tokens=300)
    named = lambda n: dict(tools=[TOOLS[0] | dict(name="x" * n)])
    first, *_ = posted(tools, MESSAGES, **body | named(128))["content"]
    assert first["name"] == "x" * 128
    assert tools.post(MESSAGES, json=body | named(129)).status_code == 400


def test_a_call_that_is_cut_off_has_what_came(tools):
    body = ASK | dict(tools=TOOLS[:1], tool_choice=dict(type="any"))
    whole = posted(tools, MESSAGES, **body | dict(max_tokens=200))
    n, seen = whole["usage"]["output_tokens"], set()
    for most in range(1, n, max(1, n // 8)):
        cut = posted(tools, MESSAGES, **body | dict(max_tokens=most))
        assert cut["stop_reason"] == "max_tokens"
        for b in cut["content"]:
            assert b["type"] == "text" or b["input"].keys() <= whole["content"][0]["input"].keys()
            seen.add(len(b.get("input", "")))
    assert {0, 1} <= seen


@pytest.mark.parametrize(
    "result, content",
    [
        (RESULT, "5:12"),
        (RESULT | dict(content=text("5", "12")), text("5", "12")),
        (RESULT | dict(content="no clock", is_error=True), "Error: no clock"),
        ({k: v for k, v in RESULT.items() if k != "content"}, ""),
    ],
)
def test_a_result_is_the_message_of_a_tool(tools, result, content):
    ask = partial(posted, tools, model="tiny", max_tokens=1)
    own = ask(MESSAGES, messages=[*CALLED, user([result, *text("Thanks.")])], tools=TOOLS)
    call = dict(name="now", arguments=json.dumps(NOW["input"]))
    calls = [dict(id="toolu_1", type="function", function=call)]
    chat = [
        *TALK,
        assistant("Let me see.") | dict(tool_calls=calls),
        dict(role="tool", tool_call_id="toolu_1", content=content),
        user("Thanks."),
    ]
    want = ask(CHAT, messages=chat, tools=FUNCTIONS)
    assert same_but_ids(own)[2] == want["usage"]["prompt_tokens"]


RESULTS = [user([dict(type="tool_result", tool_use_id=i, content=i)]) for i in "ab"]


@pytest.mark.parametrize("results", [RESULTS[:1], RESULTS, [*RESULTS, assistant("Well.")]])
def test_a_system_message_between_calls_and_their_results_moves_behind_them(results):
    n = min(2, len(results))
    calls = [dict(type="tool_use", id=i, name="now", input={}) for i in "ab"[:n]]
    talk = [*TALK, assistant(calls), BRIEF, *results]
    roles = [m["role"] for m in chat_of_message(ASK | dict(messages=talk))["messages"]]
    assert roles[: 3 + n] == ["user", "assistant", *["tool"] * n, "system"]


def test_how_much_to_think_is_what_a_chat_says():
    asked = dict(output_config=dict(effort="low"), thinking=dict(type="disabled"))
    chat = chat_of_message(ASK | asked)
    assert chat["reasoning_effort"] == "low"
    assert chat["chat_template_kwargs"] == dict(enable_thinking=False)


def test_a_note_about_billing_is_left_out_of_the_system_prompt_alone():
    note = "x-anthropic-billing-header: cc_version=1;"
    body, brief = ASK | dict(messages=[user(note)]), "Be brief."
    for system, kept in (
        (text(note, brief), [brief]),
        (note, []),
        (text(note), []),
        (f"{note}\n\n", []),
        (f"{note}\n\n{brief}\n", [f"{brief}\n"]),
        ("", [""]),
    ):
        said = chat_of_message(body | dict(system=system))["messages"]
        assert said == [*(dict(role="system", content=c) for c in kept), user(note)]


# what is refused


WRONG = dict(  # by its key, which the message names
    mcp_servers=[[dict(type="url")]],
    container=["c"],
    context_management=[dict(edits=[dict(type="clear_tool_uses_1")])],
    inference_geo=["eu"],
    max_tokens=[0, 10**6, None],
    stop_sequences=[[""]],
    temperature=["a"],
    tool_choice=[dict(type="any")],
)
WRONG = [({key: value}, key) for key, values in WRONG.items() for value in values]
WRONG += [
    (dict(messages=messages), word)
    for messages, word in (
        ([user([dict(type="image", source={})])], "messages.0.content.0.*'image'"),
        ([user([dict(type="document", source={})])], "'document'"),
        ([*CALLED, user([RESULT | dict(content=[dict(type="image")])])], "'image'"),
        ([user([text("a")[0] | dict(citations=[{}])])], "citations"),
        (CALLED, "'toolu_1' has no tool_result"),
        ([*CALLED, user("Well?")], "'toolu_1' has no tool_result"),
        ([user([RESULT])], "'toolu_1' has no such tool_use"),
        ([*CALLED, user([*text("a"), RESULT])], "begin with its tool_results"),
        ([*CALLED, user([RESULT, RESULT])], "one for each tool_use"),
        ([*TALK, assistant("I am ")], "white space"),
        ([assistant([RESULT])], "'tool_result'"),
        ([dict(role="tool", content="a")], "messages.0.role"),
        ([], "messages must be"),
    )
]
WRONG += [
    (dict(tools=[tool]), word)
    for tool, word in (
        (dict(type="web_search_20250305", name="w"), "web_search_20250305"),
        (TOOLS[0] | dict(defer_loading=True), "defer_loading"),
        (dict(name="a b", input_schema={}), r"tools\[0\].name"),
        (dict(name="a", input_schema=dict(type="string")), "input_schema.type"),
    )
]
WRONG += [
    (dict(thinking=dict(type="between_tools")), "thinking.type"),
    (dict(temprature=1), "did you mean 'temperature'"),
    (dict(n=2, metadata={}, seed=1), "has no 'n'"),
    (dict(tool_choice=dict(type="tool"), tools=TOOLS), "tool_choice"),
    (dict(system=[dict(type="image")]), "system.0"),
]


@pytest.mark.parametrize("more, word", WRONG)
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
    post = partial(web.post, MESSAGES)
    long = [user("x" * 500)]
    for r, status, kind, word in (
        (post(json=ASK | dict(model="x")), 404, "not_found_error", "x"),
        (web.post(f"{MESSAGES}/batches"), 404, "not_found_error", "see /v1/batches"),
        (web.post(f"{MESSAGES}/"), 404, "not_found_error", "without a slash"),
        (web.post("/v1/v1/messages", json=ASK), 404, "not_found_error", "base URL"),
        (web.get(MESSAGES), 405, "invalid_request_error", ""),
        (post(content=b"{"), 400, "invalid_request_error", ""),
        (
            post(json=ASK | dict(messages=long)),
            400,
            "invalid_request_error",
            '"prompt is too long: ',
        ),
    ):
        assert error_of(r) == (status, kind) and word in r.text
        assert ("base" in r.text) == (word == "base URL")
    assert len(message_error(BadRequest("x" * 2000))[1]["error"]["message"]) == 1001


def test_a_thread_is_refused_by_the_code_for_which_clients_send_all_messages(web):
    r = web.post(MESSAGES, json=ASK | dict(thread=dict(type="new")))
    error = r.json()["error"]
    assert (r.status_code, error["details"]["error_code"]) == (400, "thread_unsupported_request")


def test_a_key_in_either_header():
    with serving(api_key="s3cret", max_body=1000) as s:
        ask = lambda **headers: s.web.post(MESSAGES, json=ASK | dict(max_tokens=1), headers=headers)
        for wrong in ({}, {"x-api-key": "s3cre"}, {"x-api-key": ""}):
            assert error_of(ask(**wrong)) == (401, "authentication_error")
        for right in ({"x-api-key": "s3cret"}, {"authorization": "Bearer s3cret"}):
            assert ask(**right).status_code == 200
        r = s.web.post(MESSAGES, content=b"x" * 1001, headers={"x-api-key": "s3cret"})
        assert error_of(r) == (413, "request_too_large")


def test_a_server_that_is_full_or_stops():
    with serving(max_pending=1) as s:
        with contextlib.ExitStack() as stack, paused_after(s.llm, 0):
            stack.enter_context(thread(posted, s.web, MESSAGES, **ASK))
            until(lambda: s.api.limits.pending == 1)
            for stream in (False, True):
                r = s.web.post(MESSAGES, json=ASK | dict(stream=stream))
                assert error_of(r) == (429, "rate_limit_error")
                assert int(r.headers["retry-after"]) >= 1
            s.llm.resume()
        s.api.limits.draining = True
        r = s.web.post(MESSAGES, json=ASK)
        assert error_of(r) == (529, "overloaded_error") and "retry-after" in r.headers


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_fails(begun):
    "In a stream that has begun, an event says so."
    body = ASK | dict(max_tokens=200, ignore_eos=True, stream=True)
    with serving() as s:
        [r] = by_a_failing_engine(s, begun, lambda: s.web.post(MESSAGES, json=body))
    if not begun:
        assert error_of(r) == (500, "api_error")
        return
    *_, last = events_of(r.text)
    assert (r.status_code, last["type"], last["error"]["type"]) == (200, "error", "api_error")
    assert "no more memory" in last["error"]["message"]


def test_a_stream_that_waits_has_pings_once_it_has_begun():
    with serving(keep_alive=0.001) as s:
        got = []

        def ask():
            with s.web.stream("POST", MESSAGES, json=ASK | dict(stream=True)) as r:
                got.extend(iter(r.iter_raw()))

        with contextlib.ExitStack() as stack, paused_after(s.llm, 0):
            stack.enter_context(thread(ask))
            until(lambda: len(got) > 2)
            with paused_after(s.llm, 12):
                s.llm.resume()
                until(lambda: b"event: ping" in b"".join(got))
        sent = b"".join(got).decode()
        assert sent.startswith(": keep-alive\n\n")
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


TURN = st.sampled_from(
    [
        *TALK,
        user(text("a", "")),
        assistant("I am"),
        assistant([NOW]),
        user([RESULT, dict(type="image")]),
        *(dict(role=role, content="a") for role in ("system", "tool")),
    ]
)
TALKS = [TALK, [*CALLED, user([RESULT])], [*TALK, assistant("I am")], [*TALK, user(text("a", "b"))]]
FORMS = [dict(format=dict(type="json_schema", schema=dict(type="integer"))), dict(effort="low")]
GOOD = dict(
    messages=st.sampled_from(TALKS) | st.lists(TURN, max_size=4),
    system=["Be brief.", text("Be", "brief."), ""],
    max_tokens=[1, 3],
    temperature=[0, 0.5, 1],
    top_p=[0.1, 1],
    top_k=[0, 3],
    stop_sequences=[[], ["a", "bc"]],
    stream=[True, False],
    tools=[TOOLS, []],
    tool_choice=[dict(type=t) for t in ("auto", "any", "none")],
    thinking=[ENABLED, dict(type="disabled")],
    output_config=FORMS,
    chat_template_kwargs=[{}],
    context_management=[dict(edits=[dict(type="clear_thinking_20251015", keep="all")])],
    mcp_servers=[[]],
    container=[None],
    metadata=[{}],
)


BODIES = drawn(
    junk("toolu_1", "\x00", "\ud800", "x" * 300, keys=["type", "text", "content", "cache_control"]),
    GOOD,
)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_drawn_bodies_get_an_answer_or_an_error_that_names_what_is_wrong(tools, path):
    @settings(
        max_examples=200, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
    )
    @given(BODIES)
    def ask(body):
        body = dict(ASK, max_tokens=2) | body
        r = tools.post(path, content=json.dumps(body).encode())
        assert r.status_code < 500, (body, r.text)
        if r.status_code != 200:
            assert error_of(r)[1] in ("invalid_request_error", "not_found_error")
            assert "\n" not in r.json()["error"]["message"]
        elif path == COUNT:
            assert r.json()["input_tokens"] > 0
        elif body.get("stream"):
            events = events_of(r.text)
            assert events[-1]["type"] == "message_stop", (body, r.text)
        else:
            assert r.json()["type"] == "message"

    ask()


def test_nothing_is_left(s):
    until(lambda: nothing_left(s))
