"The Responses API: it gives what the chat endpoint gives, in items and events, and the openai package uses it unchanged."

import asyncio, csv, json
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from helpers import (
    assistant,
    by_a_failing_engine,
    drawn,
    json_lines,
    junk,
    needs,
    posted,
    serving,
    user,
    write_lines,
)

openai, *_ = needs("openai", "httpx", "fastapi", "uvicorn")
from openai.types.responses import Response
from pydantic import BaseModel

from batchlab.api import LLM
from batchlab.jobs.job import Job, tally
from batchlab.jobs.progress import JobResult
from batchlab.models import tiny_model, tiny_tokenizer
from test_batches import valid
from test_server import CHAT, client_of

URL = "/v1/responses"
HOLD = dict(temperature=0, max_output_tokens=9)
STOPS = dict(temperature=0, extra_body=dict(stop="e"))  # an answer that ends by itself
WEATHER = dict(
    type="function",
    name="weather",
    description="The weather.",
    parameters=dict(
        type="object",
        required=["days"],
        properties=dict(days=dict(type="integer", minimum=1, maximum=9)),
        additionalProperties=False,
    ),
)
NOW = dict(type="function", name="now")


@pytest.fixture(scope="module")
def tools():
    "A server whose chat template takes tools."
    needs("llguidance")
    from test_tools import TEMPLATES

    tok = tiny_tokenizer()
    tok.chat_template = TEMPLATES["hermes"]
    with serving(llm=LLM(tiny_model("llama", max_position_embeddings=2048), tok)) as s:
        yield s


@pytest.fixture(scope="module")
def client(s):
    with client_of(s, strict=True) as c:
        yield c


def message(role, *texts):
    kind = "output_text" if role == "assistant" else "input_text"
    return dict(type="message", role=role, content=[dict(type=kind, text=t) for t in texts])


def said(response):
    "The text of a response that is one message."
    [item] = response["output"]
    return item["content"][0]["text"]


def chat_of(s, messages, **more):
    "The choice and the usage that the chat endpoint gives."
    given = dict(messages=messages, temperature=0, max_tokens=9) | more
    d = posted(s.web, CHAT, **given)
    return d["choices"][0], d["usage"]


def whole(s, **body):
    "A response, by plain HTTP, which both the published schema and the openai package's types accept."
    return checked(posted(s.web, URL, **body))


def checked(response):
    Response.model_validate(response, strict=True)
    return valid(response, "Response")


def events_of(s, **body):
    r = s.web.post(URL, json=body | dict(stream=True))
    assert r.headers["content-type"].startswith("text/event-stream"), r.text
    found = []
    for event in r.text.split("\n\n")[:-1]:
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def told(response):
    "What a response says, without ids and times."
    gone = {"id", "created_at", "completed_at", "call_id"}
    keep = lambda d: {k: v for k, v in d.items() if k not in gone}
    return keep(response) | dict(output=[keep(item) for item in response["output"]])


# What is asked

SAME = dict(
    text=(dict(input="Hello"), [user("Hello")]),
    items=(
        dict(
            input=[
                message("user", "Hi", "there"),
                message("assistant", "Yes?"),
                message("user", "Go"),
            ]
        ),
        [user("Hi\nthere"), assistant("Yes?"), user("Go")],
    ),
    easy=(
        dict(input=[dict(role="developer", content="Be brief."), user("Hello")]),
        [dict(role="system", content="Be brief."), user("Hello")],
    ),
    thoughts=(
        dict(input=[message("user", "Hello"), dict(type="reasoning", id="rs_1", summary=[])]),
        [user("Hello")],
    ),
    late=(
        dict(input=[message("user", "Hello"), message("system", "Be brief.")]),
        [user("Hello"), dict(role="system", content="Be brief.")],
    ),
    instructions=(
        dict(
            input=[dict(role="system", content="Be kind."), user("Hello")], instructions="Be brief."
        ),
        [dict(role="system", content="Be brief.\n\nBe kind."), user("Hello")],
    ),
)


@pytest.mark.parametrize("name", SAME)
def test_the_tokens_are_those_of_the_chat(s, name):
    body, messages = SAME[name]
    choice, used = chat_of(s, messages)
    got = whole(s, **body, **HOLD)
    assert said(got) == choice["message"]["content"]
    assert got["instructions"] == body.get("instructions")
    assert got["usage"]["input_tokens"] == used["prompt_tokens"]
    assert got["usage"]["output_tokens"] == used["completion_tokens"] == 9
    assert got["usage"]["total_tokens"] == used["total_tokens"]


@pytest.mark.parametrize(
    "more", [dict(seed=3, temperature=1.0, top_p=0.9), dict(top_k=5, seed=1), dict(stop="e")]
)
def test_settings_reach_the_engine(s, more):
    choice, _ = chat_of(s, [user("Hello")], **more)
    got = whole(s, input="Hello", **HOLD | more)
    assert said(got) == choice["message"]["content"]
    assert got["temperature"] == more.get("temperature", 0)


def test_log_probabilities(s):
    choice, _ = chat_of(s, [user("Hello")], logprobs=True, top_logprobs=2)
    want = choice["logprobs"]["content"]
    asked = dict(input="Hello", include=["message.output_text.logprobs"], top_logprobs=2, **HOLD)
    assert whole(s, **asked)["output"][0]["content"][0]["logprobs"] == want
    events = events_of(s, **asked)
    parts = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert sum(parts, []) == want
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == want


ECHO = dict(
    metadata=dict(a="b"),
    user="u",
    safety_identifier="s",
    prompt_cache_key="k",
    service_tier="flex",
    parallel_tool_calls=False,
    truncation="auto",
    max_tool_calls=3,
    tool_choice="none",
    tools=[],
    reasoning=dict(effort="low", summary="auto"),
    text=dict(verbosity="low"),
    include=["reasoning.encrypted_content"],
    store=False,
    prompt_cache_retention="24h",
    stream_options=dict(include_obfuscation=False),
    client_metadata=dict(turn_id="t"),
)


def test_parameters_are_in_the_response_and_change_nothing(s):
    plain = whole(s, input="Hello", **HOLD)
    got = whole(s, input="Hello", **HOLD, **ECHO)
    assert told(got)["output"] == told(plain)["output"]
    unlike = {
        "reasoning",
        "text",
        "include",
        "prompt_cache_retention",
        "stream_options",
        "client_metadata",
    }
    for k, v in ECHO.items():
        assert k in unlike or got[k] == v, k
    assert got["reasoning"]["effort"] == got["text"]["verbosity"] == "low"
    assert plain["service_tier"] == "default" and plain["metadata"] == {}


CALL = dict(type="function_call", call_id="c", name="n")
WRONG = dict(
    tool_choice=[dict(type="web_search")],
    truncation=["last"],
    conversation=["conv_1"],
    prompt=[dict(id="pmpt_1")],
    messages=[[]],
    input=[[], None, [dict(type="function_call_output", call_id="c9", output="x")]],
    include=[["everything"]],
    max_output_tokens=[0, 10**6],
    max_tokens=[5],
    n=[2],
    temperature=[-1],
    text=[dict(format=dict(type="grammar"))],
    metadata=[dict(a=1), {str(i): "x" for i in range(17)}],
    top_logprobs=[21],
    topp=[1],
    tools=[[NOW]],
)
REFUSED = [({key: value}, key) for key, values in WRONG.items() for value in values]
REFUSED += [
    (dict(input=[user([dict(type=kind)])]), "input[0].content[0]")
    for kind in ("input_image", "input_file", "input_audio")
]
REFUSED += [
    (dict(tools=[dict(WEATHER, type=kind)]), "tools[0].type")
    for kind in "web_search file_search computer_use_preview code_interpreter mcp custom namespace".split()
]
REFUSED += [
    (dict(input=[item]), f"input[0].{key}")
    for item, key in (
        (dict(type="web_search_call", id="ws_1"), "type"),
        (dict(type="item_reference", id="msg_1"), "type"),
        (message("tool", "a"), "role"),
        (CALL, "arguments"),
    )
]
REFUSED += [
    (dict(input=[message("user", "a"), 3]), "input[1]"),
    (dict(text=dict(format=dict(type="json_schema", name="x"))), "text.format"),
    (dict(background=True, store=False), "background"),
    (dict(background=True, stream=True), "stream"),
]


@pytest.mark.parametrize("more, param", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_is_not_supported_is_refused_by_name(s, more, param):
    r = s.web.post(URL, json=dict(input="Hello") | more)
    error = r.json()["error"]
    assert {*error} == {"message", "type", "param", "code"}
    assert (r.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert "messages" not in error["message"] or param in ("messages", "input"), error


def test_a_prompt_that_is_too_long_by_the_words_that_clients_look_for(s):
    r = s.web.post(URL, json=dict(input="x" * 3000, stream=True))
    error = r.json()["error"]
    assert (r.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "input" and "maximum context length is 256 tokens" in error["message"]


def test_a_model_that_is_none(client):
    with pytest.raises(openai.NotFoundError) as e:
        client.responses.create(model="gpt-9", input="Hello")
    assert e.value.code == "model_not_found"


# What is answered


def test_an_answer_that_is_cut_off_is_incomplete(s):
    got = whole(s, input="Hello", **HOLD)
    assert got["status"] == got["output"][0]["status"] == "incomplete"
    assert got["incomplete_details"] == dict(reason="max_output_tokens")
    assert got["completed_at"] is None


def test_an_answer_that_ends_is_complete(s, client):
    r = client.responses.create(model="tiny", input="Hello", **STOPS)
    assert r.status == r.output[0].status == "completed" and r.incomplete_details is None
    assert r.completed_at >= r.created_at and r.object == "response" and r.id.startswith("resp_")


def order_of(events):
    "The types of `events`, one for each run of deltas."
    kinds = [e["type"] for e in events]
    return [k for i, k in enumerate(kinds) if k[-5:] != "delta" or k != kinds[i - 1]]


def check_events(events):
    "They are as published, and numbered; what is done is what was added and grew. Returns the response."
    assert [e["sequence_number"] for e in events] == [*range(len(events))]
    text, items = {}, []
    for e in events:
        kind = e["type"].removeprefix("response.")
        valid(
            e,
            f"Response{kind.replace('output_text', 'text').replace('.', '_').title().replace('_', '')}Event",
        )
        if kind == "output_item.added":
            assert e["output_index"] == len(items) and e["item"]["status"] == "in_progress"
            items.append(e["item"]["id"])
            text[items[-1]] = ""
        elif kind.endswith(".delta"):
            assert e["item_id"] == items[e["output_index"]] == items[-1]
            text[e["item_id"]] += e["delta"]
        elif kind in ("output_text.done", "function_call_arguments.done"):
            assert (e["text"] if "text" in e else e["arguments"]) == text[e["item_id"]]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert done == last["output"] and [item["id"] for item in done] == items
    assert {e["response"]["id"] for e in events if "response" in e} == {last["id"]}
    return checked(last)


TEXT_ORDER = """created in_progress output_item.added content_part.added output_text.delta output_text.done content_part.done
    output_item.done""".split()
CALL_ORDER = """output_item.added function_call_arguments.delta function_call_arguments.done output_item.done""".split()


def named(*kinds):
    return [f"response.{k}" for k in kinds]


@pytest.mark.parametrize(
    "more, end", [(HOLD, "incomplete"), (dict(temperature=0, stop="e"), "completed")]
)
def test_a_stream_is_the_whole_in_the_published_order(s, more, end):
    events = events_of(s, input="Hello", **more)
    assert order_of(events) == named(*TEXT_ORDER, end)
    got, want = told(check_events(events)), told(whole(s, input="Hello", **more))
    cached = [r["usage"].pop("input_tokens_details")["cached_tokens"] for r in (got, want)]
    assert got == want and cached[1] > 0  # the second prompt is in the cache


def test_an_engine_that_fails_ends_the_stream_with_an_event():
    body = dict(input="Hello", temperature=0, max_output_tokens=200, ignore_eos=True)
    with serving() as s:
        [found] = by_a_failing_engine(s, True, lambda: events_of(s, **body))
    last = check_events(found)
    assert found[-1]["type"] == "response.failed" and last["status"] == "failed"
    assert last["error"]["code"] == "server_error" and "no more memory" in last["error"]["message"]
    assert last["output"][0]["status"] == "incomplete"


def test_what_a_model_thinks_is_an_item_before_the_answer(tmp_path):
    "Which alone has log probabilities."
    from test_thinking import TALK, llm

    asked = dict(input=TALK, temperature=0, max_output_tokens=24, top_logprobs=1)
    [row] = on_lines([asked], tmp_path, llm.__wrapped__(), "a.csv")
    assert (row["text"], row["reasoning"]) == ("xyz", "ab c")
    with serving(llm=llm.__wrapped__()) as s, client_of(s, strict=True) as client:
        events = events_of(s, **asked)
        for got in (whole(s, **asked), check_events(events)):
            assert [item["type"] for item in got["output"]] == ["reasoning", "message"]
            assert got["output"][0]["content"] == [dict(type="reasoning_text", text="ab c")]
            [part] = got["output"][1]["content"]
            assert part["text"] == "xyz"
            assert "".join(x["token"] for x in part["logprobs"]).startswith("xyz")
            assert got["usage"]["output_tokens_details"]["reasoning_tokens"] == len("ab c") + 2
        assert "response.reasoning_text.delta" in {e["type"] for e in events}
        with client.responses.stream(model="tiny", **asked) as stream:
            assert [*stream] and stream.get_final_response().output_text == "xyz"


# Tools


def chat_tools(*tools):
    own = [{k: v for k, v in t.items() if k != "type"} for t in tools]
    return [dict(type="function", function=f) for f in own]


CHOICES = """
["required", "required"]
[{"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}]
[{"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}}]
["auto", "auto"]
["none", "none"]
"""


@pytest.mark.parametrize(
    "ours, theirs", json_lines(CHOICES), ids=["required", "named", "allowed", "auto", "none"]
)
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_those_of_the_chat(tools, ours, theirs, parallel):
    more = dict(parallel_tool_calls=parallel, seed=5, temperature=1.0)
    asked = dict(tools=chat_tools(WEATHER, NOW), tool_choice=theirs, max_tokens=90, **more)
    want = chat_of(tools, [user("Rain?")], **asked)[0]["message"]
    functions = [c["function"] for c in want.get("tool_calls", ())]
    body = dict(input="Rain?", tools=[WEATHER, NOW], tool_choice=ours, max_output_tokens=90, **more)
    for r in (whole(tools, **body), check_events(events_of(tools, **body))):
        calls = [item for item in r["output"] if item["type"] == "function_call"]
        texts = [item["content"][0]["text"] for item in r["output"] if item["type"] == "message"]
        assert [dict(name=c["name"], arguments=c["arguments"]) for c in calls] == functions
        assert "".join(texts) == (want["content"] or "")
        assert r["tools"][0]["parameters"] == WEATHER["parameters"] and r["tool_choice"] == ours
    assert calls or ours in ("auto", "none")


@pytest.mark.parametrize("given", [[], [WEATHER, NOW]])
def test_input_tokens_are_those_that_the_response_counts(tools, given):
    body = dict(input="Hi", instructions="Be brief.", tools=given)
    with client_of(tools, strict=True) as c:
        counted = c.responses.input_tokens.count(model="tiny", **body)
        used = whole(tools, **body, max_output_tokens=1)["usage"]
    assert counted.input_tokens == used["input_tokens"] > 0


def test_a_call_in_events(tools):
    body = dict(input="Rain?", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    events = events_of(tools, **body, temperature=0)
    assert order_of(events) == named("created", "in_progress", *CALL_ORDER, "completed")


def test_a_call_that_is_cut_is_the_same_whole_and_in_events(tools):
    "What stands behind a call is an item behind it: a whole call is completed, and the text of the next, cut in its head, is not."
    found = set()
    for seed in range(12):
        more = dict(tools=[WEATHER, NOW], tool_choice="required", temperature=1.0, seed=seed)
        body = dict(input="Rain?", **more, max_output_tokens=(45, 60, 90)[seed % 3])
        streamed, got = check_events(events_of(tools, **body)), whole(tools, **body)
        assert told(got)["output"] == told(streamed)["output"] and got["status"] == "incomplete"
        for item in got["output"]:
            if item["type"] == "function_call":
                assert (item["status"] == "completed") == item["arguments"].endswith("}")
        found.add(tuple((item["type"], item["status"]) for item in got["output"][-2:]))
    assert (("function_call", "completed"), ("message", "incomplete")) in found


def test_a_round_trip_with_tools(tools):
    "A client calls what the model asked for, and sends the result behind the model's own items."
    with client_of(tools, strict=True) as c:
        ask = dict(model="tiny", tools=[WEATHER | dict(strict=True)], temperature=0)
        forced = dict(tool_choice="required", parallel_tool_calls=False)
        first = c.responses.create(input="Rain?", **forced, **ask)
        [call] = first.output
        assert 1 <= json.loads(call.arguments)["days"] <= 9
        result = dict(type="function_call_output", call_id=call.call_id, output="no")
        items = [user("Rain?"), call.model_dump(), result]
        again = c.responses.create(input=items, tool_choice="none", max_output_tokens=9, **ask)
    f = dict(name=call.name, arguments=call.arguments)
    calls = [dict(id="c", type="function", function=f)]
    talk = [
        user("Rain?"),
        assistant(None, tool_calls=calls),
        dict(role="tool", tool_call_id="c", content="no"),
    ]
    choice, used = chat_of(tools, talk, tools=chat_tools(WEATHER), tool_choice="none")
    assert again.output_text == choice["message"]["content"]
    assert again.usage.input_tokens == used["prompt_tokens"]


# The openai package


class Verdict(BaseModel):
    kind: Literal["good", "bad"]
    sure: bool


def test_an_object_of_pydantic(client):
    needs("llguidance")
    ask = dict(model="tiny", input="Hello", temperature=0)
    r = client.responses.parse(**ask, text_format=Verdict)
    assert isinstance(r.output_parsed, Verdict) and r.text.format.name == "Verdict"
    with client.responses.stream(**ask, text_format=Verdict) as stream:
        assert [*stream] and stream.get_final_response().output_parsed == r.output_parsed
    form = dict(format=dict(type="json_object"))
    loose = client.responses.create(**ask, text=form, max_output_tokens=20)
    assert loose.output_text.lstrip()[0] == "{"


def test_sync_and_async_clients(s, client):
    ask = dict(model="tiny", input="Hello", **STOPS)
    want = client.responses.create(**ask).output_text
    *parts, last = client.responses.create(**ask, stream=True)
    deltas = [e.delta for e in parts if e.type == "response.output_text.delta"]
    assert "".join(deltas) == want and last.type == "response.completed"

    async def main():
        async with client_of(s, strict=True, kind=openai.AsyncOpenAI) as c:
            async with c.responses.stream(**ask) as stream:
                assert [e async for e in stream][-1].type == last.type
                whole = await stream.get_final_response()
            return whole.output_text, (await c.responses.create(**ask)).output_text

    assert asyncio.run(main()) == (want, want)


# Whatever is sent


ITEMS = [
    user("Hello"),
    message("assistant", "Yes?"),
    message("system", "Be", "brief."),
    dict(type="function_call", call_id="a", name="now", arguments="{}"),
    dict(type="function_call_output", call_id="a", output="5"),
    dict(type="reasoning", id="rs_1", summary=[]),
    dict(type="item_reference", id="msg_1"),
    dict(role="tool", content=[dict(type="refusal", refusal="No.")]),
]


BODY = drawn(
    junk("message", "input_image", "now", "auto", keys=["type", "role", "content", "format"]),
    dict(
        instructions=["Be brief."],
        previous_response_id=["resp_1"],
        tools=[[WEATHER, NOW | dict(parameters={})], [WEATHER], [dict(type="web_search")]],
        tool_choice=["auto", "none", "required", dict(type="function", name="weather")],
        text=[dict(format=dict(type=kind)) for kind in ("text", "json_object")],
        include=[["message.output_text.logprobs"]],
        reasoning=[dict(effort="low")],
        metadata=[dict(a="b")],
        store=[True, False],
        background=[False],
        stream=[True, False],
        temperature=[0, 1.5],
        top_logprobs=[0, 20],
        service_tier=["flex"],
        truncation=["auto"],
        chat_template_kwargs=[dict(x=1)],
    ),
    input=st.sampled_from(["", "Hi"]) | st.lists(st.sampled_from(ITEMS), min_size=1, max_size=4),
)


@pytest.mark.parametrize("path", [URL, f"{URL}/input_tokens"])
@settings(max_examples=300, deadline=None, suppress_health_check=[*HealthCheck])
@given(body=BODY)
def test_whatever_is_sent_is_answered_or_refused(tools, path, body):
    asked = body | (dict(max_output_tokens=2) if path == URL else {})
    r = tools.web.post(path, content=json.dumps(asked).encode())
    assert r.status_code < 500, (body, r.text)
    if r.status_code != 200:
        assert {*r.json()["error"]} == {"message", "type", "param", "code"}, r.text
    elif path != URL:
        assert r.json()["input_tokens"] > 0
    elif body.get("stream"):
        assert '"type":"response.failed"' not in r.text
    else:
        checked(r.json())


# On a line of a file


def on_lines(bodies, folder, llm, output="out.jsonl", url=URL):
    "The records of a file of `bodies`, in order, or the rows of its table."
    lines = [dict(custom_id=f"r{i}", url=url, body=body) for i, body in enumerate(bodies)]
    write_lines(folder / "in.jsonl", lines)
    Job(folder / "in.jsonl", folder / output).run(llm)
    if output.endswith("csv"):
        return list(csv.DictReader((folder / output).open()))
    records = [json.loads(x) for x in (folder / output).read_text().splitlines()]
    return sorted(records, key=lambda r: r["custom_id"])


@pytest.fixture(scope="module")
def llm(tools):
    "The model of `tools`, in no server."
    return LLM(tools.llm.model, tools.llm.tokenizer, max_num_seqs=4)


FORCED = dict(
    input="Hi", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, temperature=0
)


def test_on_a_line_it_is_what_the_server_gives(tools, llm, tmp_path):
    form = dict(type="json_schema", name="n", schema=dict(type="boolean"))
    bodies = [
        dict(input="Hello", **HOLD),
        dict(input="Hello there, who are you?", instructions="Be brief.", store=False, **HOLD),
        dict(input=[message("user", "Yes or no?")], text=dict(format=form), temperature=0),
        dict(input="Go", top_logprobs=2, metadata=dict(a="b"), **HOLD),
        FORCED,
    ]
    found = on_lines(bodies, tmp_path, llm)
    for body, record in zip(bodies, found):
        assert record["error"] is None and record["response"]["status_code"] == 200
        own, theirs = checked(record["response"]["body"]), whole(tools, **body)
        cached = [r["usage"].pop("input_tokens_details") for r in (own, theirs)]
        assert len(cached) == 2 and told(own) == told(theirs) | dict(model=own["model"])
    assert len({r["response"]["body"]["id"] for r in found}) == len(found)
    tally(result := JobResult(1), found[0])
    assert result.cut == 1


def test_in_a_table_it_is_as_a_chat(llm, tmp_path):
    talks = ["Hello", "Hello there, who are you?"]
    chats = [dict(messages=[user(t)], temperature=0, max_tokens=9) for t in talks]
    ours = on_lines([dict(input=t, **HOLD) for t in talks], tmp_path, llm, "a.csv")
    theirs = on_lines(chats, tmp_path, llm, "b.csv", CHAT)
    keys = "text", "finish_reason", "prompt_tokens", "completion_tokens", "error"
    of = lambda rows: {r["custom_id"]: [r[k] for k in keys] for r in rows}
    assert of(ours) == of(theirs) and all(r["text"] for r in ours)


def test_a_call_in_a_table(tools, llm, tmp_path):
    [row] = on_lines([FORCED], tmp_path, llm, "a.csv")
    [call], [item] = json.loads(row["text"])["tool_calls"], whole(tools, **FORCED)["output"]
    assert call["function"] == dict(name=item["name"], arguments=item["arguments"])
    assert row["finish_reason"] == "tool_calls"


def test_what_a_line_can_not_have_is_refused_by_name(llm, tmp_path):
    wrong = dict(
        stream=True,
        background=True,
        previous_response_id="resp_1",
        store=True,
        messages=[],
        max_output_tokens=0,
        text=dict(format=dict(type="json_schema", name="n")),
    )
    bodies = [dict(input="a", **HOLD) | {k: v} for k, v in wrong.items()]
    *bad, good = on_lines([*bodies, dict(input="a", **HOLD)], tmp_path, llm)
    assert good["error"] is None and good["response"]["body"]["object"] == "response"
    for name, record in zip(wrong, bad):
        said = record["error"]["message"]
        assert record["response"]["status_code"] == 400
        assert name.replace("text", "text.format") in said
