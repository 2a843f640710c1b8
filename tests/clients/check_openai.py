"OpenAI's own client, unchanged and with every answer held to its types: chat, streams, completions, JSON, tools, errors by their class."

import asyncio, io, json, time

import openai, pytest
from pydantic import BaseModel, Field

TALK = [dict(role="user", content="Name three colours.")]
SHORT = dict(messages=TALK, max_completion_tokens=12, temperature=0)
# what programs send along: each changes no answer here
HARMLESS = dict(
    user="u",
    store=True,
    metadata=dict(a="b"),
    service_tier="auto",
    safety_identifier="s",
    prompt_cache_key="k",
    parallel_tool_calls=True,
)


class Colour(BaseModel):
    name: str = Field(max_length=10)
    red: int = Field(ge=0, le=255)


class Colours(BaseModel):
    colours: list[Colour] = Field(max_length=2)


class Weather(BaseModel):
    "The weather in a city."

    city: str = Field(max_length=10)


@pytest.fixture(scope="module")
def settings(url):
    return dict(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def client(settings):
    with openai.OpenAI(**settings, _strict_response_validation=True) as c:
        yield c


@pytest.fixture(scope="module")
def loose(settings):
    "Without its check of types, which lack two nulls that the API's completions have: no reason to stop in a part of a stream, no log probability of a first token."
    with openai.OpenAI(**settings) as c:
        yield c


@pytest.fixture(scope="module")
def whole(client, model):
    return client.chat.completions.create(model=model, **SHORT)


def test_models(client, model):
    assert [m.id for m in client.models.list()] == [client.models.retrieve(model).id]


def test_chat(client, model, whole):
    same = client.chat.completions.create(model=model, **SHORT, **HARMLESS)
    assert (
        whole.choices[0].message.content
        and whole.usage.completion_tokens == 12
        and same.choices == whole.choices
    )
    said = client.chat.completions.create(
        model=model, **SHORT, logprobs=True, top_logprobs=2
    ).choices[0]
    assert (
        "".join(t.token for t in said.logprobs.content)
        == said.message.content
        == whole.choices[0].message.content
    )


def test_stream(client, model, whole):
    parts = list(
        client.chat.completions.create(
            model=model, **SHORT, stream=True, stream_options=dict(include_usage=True)
        )
    )
    assert (
        "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        == whole.choices[0].message.content
    )
    assert (
        parts[-1].usage.completion_tokens == 12
        and [p for p in parts if p.choices][-1].choices[0].finish_reason == "length"
    )
    with client.chat.completions.stream(model=model, **SHORT, logprobs=True) as s:
        assert {"content.delta", "content.done", "logprobs.content.done"} <= {e.type for e in s}
        assert (
            s.current_completion_snapshot.choices[0].message.content
            == whole.choices[0].message.content
        )


def test_completions(client, loose, model):
    ask = dict(model=model, prompt="One, two,", max_tokens=5, temperature=0)
    one = client.completions.create(**ask, logprobs=2)
    assert one.choices[0].text == "".join(
        p.choices[0].text for p in loose.completions.create(**ask, stream=True)
    )
    many = client.completions.create(
        **ask | dict(prompt=["One, two,", "A, B,"], n=2, temperature=0.5, seed=1)
    )
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    scored = loose.completions.create(**ask | dict(max_tokens=1), echo=True, logprobs=1).choices[0]
    assert (
        scored.text.startswith("One, two,")
        and "".join(scored.logprobs.tokens) == scored.text
        and scored.logprobs.token_logprobs[0] is None
    )


def test_json(client, model):
    ask = dict(
        model=model,
        messages=TALK,
        response_format=Colours,
        max_completion_tokens=200,
        temperature=0,
    )
    answer = client.chat.completions.parse(**ask).choices[0].message
    assert isinstance(answer.parsed, Colours)
    with client.chat.completions.stream(**ask) as s:
        assert s.get_final_completion().choices[0].message.parsed == answer.parsed
    free = client.chat.completions.create(
        model=model,
        messages=[dict(role="user", content="Tell me a joke about cats.")],
        response_format=dict(type="json_object"),
        max_completion_tokens=300,
        temperature=0,
        frequency_penalty=0.5,
    ).choices[0]
    assert free.finish_reason == "length" or isinstance(json.loads(free.message.content), dict)


def test_tools(client, model, tools):
    ask = dict(
        model=model,
        messages=TALK,
        tools=[openai.pydantic_function_tool(Weather)],
        max_completion_tokens=60,
        temperature=0,
    )
    if not tools:  # the model's template knows none
        with pytest.raises(openai.BadRequestError) as e:
            client.chat.completions.create(**ask)
        assert e.value.param == "tools"
        return
    first = client.chat.completions.parse(
        **ask, tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    [call] = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and isinstance(
        call.function.parsed_arguments, Weather
    )
    after = client.chat.completions.create(
        **ask
        | dict(
            messages=[
                *TALK,
                first.message,
                dict(role="tool", tool_call_id=call.id, content="sunny"),
            ]
        )
    )
    assert after.usage.prompt_tokens
    with client.chat.completions.stream(
        **ask, tool_choice=dict(type="function", function=dict(name="Weather"))
    ) as s:
        assert "tool_calls.function.arguments.done" in {e.type for e in s}
        assert (
            s.get_final_completion().choices[0].message.tool_calls[0].function.parsed_arguments
            == call.function.parsed_arguments
        )


def test_responses(client, model, whole):
    "The tokens are the chat's: whole, streamed, in the background, and as the beginning of a conversation."
    ask = dict(model=model, input="Name three colours.", max_output_tokens=12, temperature=0)
    first = client.responses.create(**ask)
    assert first.output_text == whole.choices[0].message.content
    assert client.responses.retrieve(first.id) == first
    deltas = [e.delta for e in client.responses.create(**ask, stream=True) if "delta" in e.type]
    assert "".join(deltas) == first.output_text
    queued = client.responses.create(**ask, background=True, service_tier="flex")
    while queued.status in ("queued", "in_progress"):
        time.sleep(0.1)
        queued = client.responses.retrieve(queued.id)
    assert (queued.status, queued.output_text) == ("incomplete", first.output_text)
    talk = [
        *TALK,
        dict(role="assistant", content=first.output_text),
        dict(role="user", content="And three more?"),
    ]
    chat = client.chat.completions.create(model=model, **SHORT | dict(messages=talk))
    more = dict(input="And three more?", previous_response_id=first.id)
    assert client.responses.create(**ask | more).output_text == chat.choices[0].message.content
    held = dict(model=model, input="A colour, as JSON.", temperature=0, max_output_tokens=200)
    assert isinstance(client.responses.parse(**held, text_format=Colour).output_parsed, Colour)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_errors_by_class(client, model):
    ask = dict(model=model, **SHORT)
    cases = [
        (
            openai.NotFoundError,
            lambda: client.chat.completions.create(**ask | dict(model="gpt-4")),
            "model_not_found",
            "model",
        ),
        (
            openai.BadRequestError,
            lambda: client.chat.completions.create(**ask | dict(temperature=-1)),
            "invalid_request",
            "temperature",
        ),
        (
            openai.BadRequestError,
            lambda: client.chat.completions.create(
                **ask | dict(messages=[dict(role="user", content="a " * 20_000)])
            ),
            "context_length_exceeded",
            "messages",
        ),
        (
            openai.BadRequestError,
            lambda: client.embeddings.create(
                model=model, input="a", encoding_format="float", dimensions=0
            ),
            "invalid_request",
            "dimensions",
        ),
        (
            openai.NotFoundError,
            lambda: client.responses.retrieve("resp_none"),
            "not_found",
            "response_id",
        ),
        (openai.NotFoundError, lambda: client.files.retrieve("file-none"), "not_found", "file_id"),
        (
            openai.NotFoundError,
            lambda: client.batches.retrieve("batch-none"),
            "not_found",
            "batch_id",
        ),
    ]
    for kind, ask_it, code, param in cases:
        with pytest.raises(kind) as e:
            ask_it()
        assert (e.value.code, e.value.param) == (code, param)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(
            **ask | dict(max_completion_tokens=400)
        )


def test_async(settings, model, whole):
    async def main():
        async with openai.AsyncOpenAI(**settings, _strict_response_validation=True) as c:

            async def one():
                return (
                    (await c.chat.completions.create(model=model, **SHORT))
                    .choices[0]
                    .message.content
                )

            async def parts():
                return "".join(
                    [
                        p.choices[0].delta.content or ""
                        async for p in await c.chat.completions.create(
                            model=model, **SHORT, stream=True
                        )
                    ]
                )

            assert {*await asyncio.gather(*(f() for f in (one, parts) for _ in range(4)))} == {
                whole.choices[0].message.content
            }
            parsed = await c.chat.completions.parse(
                model=model,
                messages=TALK,
                response_format=Colours,
                max_completion_tokens=200,
                temperature=0,
            )
            assert isinstance(parsed.choices[0].message.parsed, Colours) and [
                m.id async for m in c.models.list()
            ]
            f = await c.files.create(
                file=io.BytesIO(
                    json.dumps(
                        dict(
                            custom_id="a",
                            method="POST",
                            url="/v1/completions",
                            body=dict(model=model, prompt="a"),
                        )
                    ).encode()
                ),
                purpose="batch",
            )
            b = await c.batches.create(
                input_file_id=f.id, endpoint="/v1/completions", completion_window="24h"
            )
            while (b := await c.batches.retrieve(b.id)).status != "completed":
                await asyncio.sleep(0.1)
            assert b.request_counts.completed == 1

    asyncio.run(main())
