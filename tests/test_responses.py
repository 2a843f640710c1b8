"The Responses API: it gives what the chat endpoint gives, in items and events, and the openai package uses it unchanged."

import asyncio, contextlib, csv, json
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

openai = pytest.importorskip("openai", reason="needs openai: pip install '.[dev]'")
httpx = pytest.importorskip("httpx", reason="needs httpx: pip install '.[dev]'")
pytest.importorskip("fastapi", reason="needs fastapi: pip install '.[dev]'")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install '.[dev]'")
from openai.types.responses import Response
from pydantic import BaseModel

from batchlab.api import LLM
from batchlab.jobs.job import Job
from batchlab.jobs.responses import ResponseParts, read_response, request_of, response_head
from batchlab.jobs.settings import BadRequest
from batchlab.models import tiny_model, tiny_tokenizer
from test_batches import valid
from test_server import CHAT, client_of, nothing_left, paused_after, serving, thread, tiny
from helpers import until

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
def s():
    with serving() as s:
        yield s


@pytest.fixture(scope="module")
def tools():
    "A server whose chat template takes tools."
    pytest.importorskip("llguidance", reason="needs llguidance: pip install '.[dev]'")
    from test_tools import TEMPLATES

    tok = tiny_tokenizer()
    tok.chat_template = TEMPLATES["hermes"]
    with serving(llm=LLM(tiny_model("llama", max_position_embeddings=2048), tok)) as s:
        yield s


@pytest.fixture(scope="module")
def client(s):
    with client_of(s, strict=True) as c:
        yield c


@pytest.fixture
def web(s):
    with httpx.Client(base_url=s.url, timeout=100) as c:
        yield c


def message(role, *texts):
    kind = "output_text" if role == "assistant" else "input_text"
    return dict(type="message", role=role, content=[dict(type=kind, text=t) for t in texts])


def chat_of(s, messages, **more):
    "The choice and the usage that the chat endpoint gives."
    body = dict(messages=messages, temperature=0, max_tokens=9) | more
    with httpx.Client(base_url=s.url, timeout=100) as web:
        r = web.post(CHAT, json=body)
    assert r.status_code == 200, r.text
    return r.json()["choices"][0], r.json()["usage"]


def whole(s, **body):
    "A response, by plain HTTP, which both the published schema and the openai package's types accept."
    with httpx.Client(base_url=s.url, timeout=100) as web:
        r = web.post(URL, json=body)
    assert r.status_code == 200, r.text
    return checked(r.json())


def checked(response):
    Response.model_validate(response, strict=True)
    return valid(response, "Response")


def events_of(s, **body):
    with httpx.Client(base_url=s.url, timeout=100) as web:
        r = web.post(URL, json=body | dict(stream=True))
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
    text=("Hello", [dict(role="user", content="Hello")]),
    items=(
        [message("user", "Hi", "there"), message("assistant", "Yes?"), message("user", "Go")],
        [
            dict(role="user", content="Hi\nthere"),
            dict(role="assistant", content="Yes?"),
            dict(role="user", content="Go"),
        ],
    ),
    easy=(
        [dict(role="developer", content="Be brief."), dict(role="user", content="Hello")],
        [dict(role="system", content="Be brief."), dict(role="user", content="Hello")],
    ),
    thoughts=(
        [message("user", "Hello"), dict(type="reasoning", id="rs_1", summary=[])],
        [dict(role="user", content="Hello")],
    ),
    late=(
        [message("user", "Hello"), message("system", "Be brief.")],
        [dict(role="user", content="Hello"), dict(role="system", content="Be brief.")],
    ),
)


@pytest.mark.parametrize("name", SAME)
def test_the_tokens_are_those_of_the_chat(s, name):
    items, messages = SAME[name]
    choice, used = chat_of(s, messages)
    got = whole(s, input=items, **HOLD)
    [item] = got["output"]
    assert item["content"][0]["text"] == choice["message"]["content"]
    assert got["usage"]["input_tokens"] == used["prompt_tokens"]
    assert got["usage"]["output_tokens"] == used["completion_tokens"] == 9
    assert got["usage"]["total_tokens"] == used["total_tokens"]


def test_instructions_are_the_system_message(s):
    user = dict(role="user", content="Hello")
    choice, used = chat_of(s, [dict(role="system", content="Be brief.\n\nBe kind."), user])
    items = [dict(role="system", content="Be kind."), user]
    got = whole(s, input=items, instructions="Be brief.", **HOLD)
    assert got["output"][0]["content"][0]["text"] == choice["message"]["content"]
    assert got["usage"]["input_tokens"] == used["prompt_tokens"]
    assert got["instructions"] == "Be brief."


@pytest.mark.parametrize(
    "more",
    [dict(seed=3, temperature=1.0, top_p=0.9), dict(top_k=5, seed=1), dict(stop="e"), dict(x=1)][
        :3
    ],
)
def test_settings_reach_the_engine(s, more):
    choice, _ = chat_of(s, [dict(role="user", content="Hello")], **more)
    got = whole(s, input="Hello", **HOLD | more)
    assert got["output"][0]["content"][0]["text"] == choice["message"]["content"]
    assert got["temperature"] == more.get("temperature", 0)


def test_log_probabilities(s):
    choice, _ = chat_of(s, [dict(role="user", content="Hello")], logprobs=True, top_logprobs=2)
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
    reasoning=dict(effort="low"),
    text=dict(verbosity="low"),
    include=["reasoning.encrypted_content"],
    store=False,
    prompt_cache_retention="24h",
    stream_options=dict(include_obfuscation=False),
)


def test_parameters_are_in_the_response_and_change_nothing(s):
    plain = whole(s, input="Hello", **HOLD)
    got = whole(s, input="Hello", **HOLD, **ECHO)
    assert told(got)["output"] == told(plain)["output"]
    unlike = {"reasoning", "text", "include", "prompt_cache_retention", "stream_options"}
    for k, v in ECHO.items():
        assert k in unlike or got[k] == v, k
    assert got["reasoning"]["effort"] == got["text"]["verbosity"] == "low"
    assert plain["service_tier"] == "default" and plain["metadata"] == {}


REFUSED = [
    (dict(input=[message("user", "a") | dict(content=[dict(type=t)])]), "input[0].content[0]")
    for t in ("input_image", "input_file", "input_audio")
]
REFUSED += [
    (dict(tools=[dict(type=t)]), "tools[0].type")
    for t in ("web_search", "file_search", "computer_use_preview", "code_interpreter", "mcp")
]
REFUSED += [
    (dict(tools=[WEATHER | dict(type="custom")]), "tools[0].type"),
    (dict(tool_choice=dict(type="web_search")), "tool_choice"),
    (dict(truncation="last"), "truncation"),
    (dict(conversation="conv_1"), "conversation"),
    (dict(prompt=dict(id="pmpt_1")), "prompt"),
    (dict(messages=[]), "messages"),
    (dict(input=[dict(type="web_search_call", id="ws_1")]), "input[0].type"),
    (dict(input=[dict(type="item_reference", id="msg_1")]), "input[0].type"),
    (dict(input=[]), "input"),
    (dict(input=None), "input"),
    (dict(input=[message("user", "a"), 3]), "input[1]"),
    (dict(input=[message("tool", "a")]), "input[0].role"),
    (dict(input=[dict(type="function_call_output", call_id="c9", output="x")]), "input"),
    (dict(input=[dict(type="function_call", call_id="c", name="n")]), "input[0].arguments"),
    (dict(include=["everything"]), "include"),
    (dict(max_output_tokens=0), "max_output_tokens"),
    (dict(max_output_tokens=10**6), "max_output_tokens"),
    (dict(max_tokens=5), "max_tokens"),
    (dict(n=2), "n"),
    (dict(temperature=-1), "temperature"),
    (dict(text=dict(format=dict(type="grammar"))), "text"),
    (dict(text=dict(format=dict(type="json_schema", name="x"))), "text.format"),
    (dict(metadata=dict(a=1)), "metadata"),
    (dict(metadata={str(i): "x" for i in range(17)}), "metadata"),
    (dict(background=True, store=False), "background"),
    (dict(background=True, stream=True), "stream"),
    (dict(top_logprobs=21), "top_logprobs"),
    (dict(topp=1), "topp"),
    (dict(tools=[NOW]), "tools"),
]


@pytest.mark.parametrize("more, param", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_is_not_supported_is_refused_by_name(web, more, param):
    r = web.post(URL, json=dict(input="Hello") | more)
    assert r.status_code == 400, r.text
    error = r.json()["error"]
    assert {*error} == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "messages" not in error["message"] or param in ("messages", "input"), error


def test_a_prompt_that_is_too_long_by_the_words_that_clients_look_for(web):
    r = web.post(URL, json=dict(input="x" * 3000, stream=True))
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
    for r in (got, want):
        r["usage"].pop("input_tokens_details")  # the second prompt may be in the cache
    assert got == want


def test_an_engine_that_fails_ends_the_stream_with_an_event():
    def fail():
        raise RuntimeError("no more memory")

    with serving() as s, contextlib.ExitStack() as stack:
        found = []
        ask = dict(input="Hello", temperature=0, max_output_tokens=200, ignore_eos=True)
        with paused_after(s.llm, 12):
            stack.enter_context(thread(lambda: found.extend(events_of(s, **ask))))
            until(lambda: s.llm.loop.paused and [*s.llm.engines.values()])
            failing = [*s.llm.engines.values()]
            for e in failing:
                e.step = fail
        stack.close()
        for e in failing:
            del e.step
    last = check_events(found)
    assert found[-1]["type"] == "response.failed" and last["status"] == "failed"
    assert last["error"]["code"] == "server_error" and "no more memory" in last["error"]["message"]
    assert last["output"][0]["status"] == "incomplete"


def test_thoughts_are_an_item_of_their_own():
    asked = request_of(read_response(dict(input="Hello")))
    parts = ResponseParts(response_head(asked.wanted, asked.params, "1", "tiny"))
    sent = parts.begin()
    for delta in (dict(reasoning_content="Hm"), dict(reasoning_content="m."), dict(content="Hi")):
        sent += parts.take(delta)
    usage = dict(prompt_tokens=1, completion_tokens=3, total_tokens=4)
    usage |= dict(completion_tokens_details=dict(reasoning_tokens=2))
    sent += parts.end("stop", usage | dict(prompt_tokens_details=dict(cached_tokens=0)))
    events = [json.loads(x[6:]) for x in sent.decode().splitlines() if x[:5] == "data:"]
    got = check_events(events)
    assert [item["type"] for item in got["output"]] == ["reasoning", "message"]
    assert got["output"][0]["content"] == [dict(type="reasoning_text", text="Hmm.")]
    assert got["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def test_a_thinking_model_has_log_probabilities_of_its_text_alone():
    from test_thinking import TALK, llm

    with serving(llm=llm.__wrapped__()) as s:
        asked = dict(input=TALK, temperature=0, max_output_tokens=24, top_logprobs=1)
        want = whole(s, **asked)["output"]
        got = check_events(events_of(s, **asked))["output"]
    assert [item["type"] for item in got] == ["reasoning", "message"]
    scores = got[1]["content"][0]["logprobs"]
    assert "".join(x["token"] for x in scores).startswith("xyz")
    assert scores == want[1]["content"][0]["logprobs"]


def test_what_a_model_thinks_is_an_item_before_the_answer():
    from test_thinking import TALK, llm

    with serving(llm=llm.__wrapped__()) as s, client_of(s, strict=True) as client:
        asked = dict(model="tiny", input=TALK, temperature=0, max_output_tokens=24)
        whole = client.responses.create(**asked)
        thought, answer = whole.output
        assert [c.text for c in thought.content] == ["ab c"] and whole.output_text == "xyz"
        assert whole.usage.output_tokens_details.reasoning_tokens == len("ab c") + 2
        with client.responses.stream(**asked) as events:
            kinds = [e.type for e in events]
            got = events.get_final_response()
        assert "response.reasoning_text.delta" in kinds and got.output_text == "xyz"
        assert [c.text for c in got.output[0].content] == ["ab c"]


def test_who_hangs_up_is_cancelled(s):
    with httpx.Client(base_url=s.url, timeout=100) as web:
        body = dict(input="Hello", max_output_tokens=200, stream=True, ignore_eos=True)
        with web.stream("POST", URL, json=body) as r:
            next(r.iter_lines())
    until(lambda: nothing_left(s))


# Tools


def chat_tools(*tools):
    own = [{k: v for k, v in t.items() if k != "type"} for t in tools]
    return [dict(type="function", function=f) for f in own]


CHOICES = [
    ("required", "required"),
    (dict(type="function", name="weather"), dict(type="function", function=dict(name="weather"))),
    (
        dict(type="allowed_tools", mode="required", tools=[dict(type="function", name="now")]),
        dict(
            type="allowed_tools",
            allowed_tools=dict(
                mode="required", tools=[dict(type="function", function=dict(name="now"))]
            ),
        ),
    ),
    ("auto", "auto"),
    ("none", "none"),
]


@pytest.mark.parametrize(
    "ours, theirs", CHOICES, ids=["required", "named", "allowed", "auto", "none"]
)
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_those_of_the_chat(tools, ours, theirs, parallel):
    more = dict(parallel_tool_calls=parallel, seed=5, temperature=1.0)
    talk = [dict(role="user", content="Rain?")]
    asked = dict(tools=chat_tools(WEATHER, NOW), tool_choice=theirs, max_tokens=90, **more)
    choice, _ = chat_of(tools, talk, **asked)
    want = choice["message"]
    body = dict(input="Rain?", tools=[WEATHER, NOW], tool_choice=ours, max_output_tokens=90, **more)
    got, streamed = whole(tools, **body), check_events(events_of(tools, **body))
    for r in (got, streamed):
        calls = [item for item in r["output"] if item["type"] == "function_call"]
        texts = [item["content"][0]["text"] for item in r["output"] if item["type"] == "message"]
        pairs = [(c["name"], c["arguments"]) for c in calls]
        functions = [c["function"] for c in want.get("tool_calls", ())]
        assert pairs == [(f["name"], f["arguments"]) for f in functions]
        assert "".join(texts) == (want["content"] or "")
        assert r["tools"][0]["parameters"] == WEATHER["parameters"] and r["tool_choice"] == ours
    if ours not in ("auto", "none"):
        assert calls


@pytest.mark.parametrize("given", [[], [WEATHER, NOW]])
def test_input_tokens_are_those_that_the_response_counts(tools, given):
    body = dict(input="Hi", instructions="Be brief.", tools=given)
    with client_of(tools, strict=True) as c:
        counted = c.responses.input_tokens.count(model="tiny", **body)
        used = whole(tools, **body, max_output_tokens=1)["usage"]
    assert counted.input_tokens == used["input_tokens"] > 0


def test_what_codex_asks_is_answered(tools):
    "With its hosted search and its agents turned off; these are refused by name."
    body = dict(
        model="tiny",
        input=[message("developer", "Be brief.") | dict(id="m"), message("user", "Hi")],
        tools=[WEATHER | dict(strict=False), NOW | dict(parameters=dict(type="object"))],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning=dict(summary="auto"),
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata=dict(turn_id="t"),
    )
    assert events_of(tools, **body, max_output_tokens=9)[-1]["type"] == "response.incomplete"
    for kind in ("web_search", "namespace"):
        more = dict(tools=[*body["tools"], dict(type=kind)])
        r = httpx.post(f"{tools.url}{URL}", json=body | more)
        assert (r.status_code, r.json()["error"]["param"]) == (400, "tools[2].type")


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
        items = [dict(role="user", content="Rain?"), *[i.model_dump() for i in first.output]]
        items.append(dict(type="function_call_output", call_id=call.call_id, output="no"))
        again = c.responses.create(input=items, tool_choice="none", max_output_tokens=9, **ask)
    f = dict(name=call.name, arguments=call.arguments)
    talk = [
        dict(role="user", content="Rain?"),
        dict(
            role="assistant", content=None, tool_calls=[dict(id="c", type="function", function=f)]
        ),
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
    pytest.importorskip("llguidance", reason="needs llguidance: pip install '.[dev]'")
    ask = dict(model="tiny", input="Hello", temperature=0)
    r = client.responses.parse(**ask, text_format=Verdict)
    assert isinstance(r.output_parsed, Verdict) and r.text.format.name == "Verdict"
    with client.responses.stream(**ask, text_format=Verdict) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == r.output_parsed
    form = dict(format=dict(type="json_object"))
    loose = client.responses.create(**ask, text=form, max_output_tokens=20)
    assert loose.output_text.lstrip()[0] == "{"


def test_sync_and_async_clients(s, client):
    ask = dict(model="tiny", input="Hello", **STOPS)
    want = client.responses.create(**ask).output_text
    with client.responses.stream(**ask) as stream:
        kinds = [e.type for e in stream]
        assert stream.get_final_response().output_text == want
    parts = [e for e in client.responses.create(**ask, stream=True)]
    deltas = [e.delta for e in parts if e.type == "response.output_text.delta"]
    assert "".join(deltas) == want and kinds[-1] == parts[-1].type == "response.completed"

    async def main():
        async with client_of(s, strict=True, kind=openai.AsyncOpenAI) as c:
            r = await c.responses.create(**ask)
            async with c.responses.stream(**ask) as stream:
                async for _ in stream:
                    pass
                return r.output_text, (await stream.get_final_response()).output_text

    assert asyncio.run(main()) == (want, want)


# Whatever is sent

LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
)
JUNK = st.recursive(
    LEAF,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3),
    max_leaves=6,
)
TYPES = "message function_call function_call_output reasoning item_reference computer_call".split()
PARTS = st.lists(
    st.fixed_dictionaries(
        dict(type=st.sampled_from(["input_text", "output_text", "refusal", "input_image"])),
        optional=dict(text=st.text(max_size=9) | JUNK, refusal=st.text(max_size=3)),
    ),
    max_size=3,
)
ITEM = st.fixed_dictionaries(
    {},
    optional=dict(
        type=st.sampled_from(TYPES) | JUNK,
        role=st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
        content=st.text(max_size=9) | PARTS | JUNK,
        call_id=st.sampled_from(["a", "b"]),
        name=st.sampled_from(["weather", "now"]) | JUNK,
        arguments=st.sampled_from(["{}", '{"a": 1}', "x"]) | JUNK,
        output=st.text(max_size=3) | PARTS | JUNK,
        id=JUNK,
    ),
)
TOOL = st.sampled_from([WEATHER, NOW, dict(type="web_search")]) | JUNK
BODY = st.fixed_dictionaries(
    dict(input=st.text(max_size=9) | st.lists(ITEM, min_size=1, max_size=4) | JUNK),
    optional=dict(
        instructions=st.text(max_size=9) | JUNK,
        previous_response_id=st.text(max_size=3) | JUNK,
        tools=st.lists(TOOL, max_size=3) | JUNK,
        tool_choice=st.sampled_from(["auto", "none", "required"]) | JUNK,
        text=st.fixed_dictionaries(dict(format=JUNK)) | JUNK,
        include=st.just(["message.output_text.logprobs"]) | JUNK,
        reasoning=JUNK,
        metadata=JUNK,
        store=st.booleans() | JUNK,
        background=JUNK,
        stream=st.booleans(),
        temperature=st.floats(0, 2) | JUNK,
        top_logprobs=st.integers(0, 20) | JUNK,
        service_tier=JUNK,
        truncation=JUNK,
        chat_template_kwargs=JUNK,
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[*HealthCheck])
@given(body=BODY)
def test_whatever_is_sent_is_answered_or_refused(tools, body):
    with httpx.Client(base_url=tools.url, timeout=100) as web:
        r = web.post(URL, content=json.dumps(body | dict(max_output_tokens=2)).encode())
    assert r.status_code < 500, (body, r.text)
    if r.status_code != 200:
        assert {*r.json()["error"]} == {"message", "type", "param", "code"}, r.text
    elif body.get("stream"):
        assert '"type":"response.failed"' not in r.text
    else:
        checked(r.json())


@settings(max_examples=100, deadline=None, suppress_health_check=[*HealthCheck])
@given(body=BODY)
def test_whatever_is_sent_is_counted_or_refused(tools, body):
    with httpx.Client(base_url=tools.url, timeout=100) as web:
        r = web.post(f"{URL}/input_tokens", content=json.dumps(body).encode())
    assert r.status_code < 500, (body, r.text)
    if r.status_code != 200:
        assert {*r.json()["error"]} == {"message", "type", "param", "code"}, r.text
    else:
        assert r.json()["input_tokens"] > 0


@settings(max_examples=300, deadline=None)
@given(body=BODY)
def test_a_body_is_read_or_refused(body):
    try:
        request_of(read_response(body))
    except BadRequest as e:
        assert str(e)


# On a line of a file


@pytest.fixture(scope="module")
def llm():
    "The model of `s`, in no server."
    return tiny()


def on_lines(bodies, folder, llm, output="out.jsonl", url=URL):
    "The records of a file of `bodies`, in order, or the rows of its table."
    lines = [dict(custom_id=f"r{i}", url=url, body=body) for i, body in enumerate(bodies)]
    (folder / "in.jsonl").write_text("".join(json.dumps(d) + "\n" for d in lines))
    Job(folder / "in.jsonl", folder / output).run(llm)
    if output.endswith("csv"):
        return list(csv.DictReader((folder / output).open()))
    records = [json.loads(x) for x in (folder / output).read_text().splitlines()]
    return sorted(records, key=lambda r: r["custom_id"])


def test_on_a_line_it_is_what_the_server_gives(s, llm, tmp_path):
    form = dict(type="json_schema", name="n", schema=dict(type="boolean"))
    bodies = [
        dict(input="Hello", **HOLD),
        dict(input="Hello there, who are you?", instructions="Be brief.", store=False, **HOLD),
        dict(input=[message("user", "Yes or no?")], text=dict(format=form), temperature=0),
        dict(input="Go", top_logprobs=2, metadata=dict(a="b"), **HOLD),
    ]
    found = on_lines(bodies, tmp_path, llm)
    for body, record in zip(bodies, found):
        assert record["error"] is None and record["response"]["status_code"] == 200
        own, theirs = checked(record["response"]["body"]), whole(s, **body)
        cached = [r["usage"].pop("input_tokens_details") for r in (own, theirs)]
        assert len(cached) == 2 and told(own) == told(theirs) | dict(model=own["model"])
    assert len({r["response"]["body"]["id"] for r in found}) == len(found)


def test_in_a_table_it_is_as_a_chat(llm, tmp_path):
    talks = ["Hello", "Hello there, who are you?"]
    chats = [
        dict(messages=[dict(role="user", content=t)], temperature=0, max_tokens=9) for t in talks
    ]
    ours = on_lines([dict(input=t, **HOLD) for t in talks], tmp_path, llm, "a.csv")
    theirs = on_lines(chats, tmp_path, llm, "b.csv", CHAT)
    keys = "text", "finish_reason", "prompt_tokens", "completion_tokens", "error"
    of = lambda rows: {r["custom_id"]: [r[k] for k in keys] for r in rows}
    assert of(ours) == of(theirs) and all(r["text"] for r in ours)


def test_a_call_on_a_line(tools, tmp_path):
    body = dict(input="Hi", tools=[WEATHER], tool_choice="required", temperature=0)
    body["parallel_tool_calls"] = False
    llm = LLM(tools.llm.model, tools.llm.tokenizer)
    [record] = on_lines([body], tmp_path, llm)
    own, theirs = record["response"]["body"], whole(tools, **body)
    assert told(own)["output"] == told(theirs)["output"]
    [row] = on_lines([body], tmp_path, llm, "a.csv")
    [call] = json.loads(row["text"])["tool_calls"]
    kept = own["output"][0]
    assert call["function"] == dict(name=kept["name"], arguments=kept["arguments"])
    assert row["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "more, named",
    [
        (dict(stream=True), "stream"),
        (dict(background=True), "background"),
        (dict(previous_response_id="resp_1"), "previous_response_id"),
        (dict(store=True), "store"),
        (dict(messages=[]), "messages"),
        (dict(max_output_tokens=0), "max_output_tokens"),
        (dict(text=dict(format=dict(type="json_schema", name="n"))), "text.format"),
    ],
)
def test_what_a_line_can_not_have_is_refused_by_name(llm, tmp_path, more, named):
    [bad, good] = on_lines([dict(input="a") | more, dict(input="a", **HOLD)], tmp_path, llm)
    assert good["error"] is None and good["response"]["body"]["object"] == "response"
    assert bad["response"]["status_code"] == 400 and named in bad["error"]["message"]
