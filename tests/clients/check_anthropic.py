"Anthropic's own client, unchanged: messages and what `count_tokens` says of them, streams, structured answers, tools by hand and by its runner, errors by their class."

import asyncio

import anthropic, httpx, pytest
from anthropic.types import Message, MessageTokensCount
from pydantic import BaseModel, Field

TALK = [dict(role="user", content="Name three colours.")]
GREEDY = dict(temperature=0)  # newer models have none, so newer clients take it as an extra
TOOL = dict(
    name="get_weather",
    description="The weather in a city.",
    input_schema=dict(
        type="object", properties=dict(city=dict(type="string", maxLength=10)), required=["city"]
    ),
)


class Colour(BaseModel):
    name: str = Field(max_length=10)
    red: int = Field(ge=0, le=255)


@pytest.fixture(scope="module")
def settings(url):
    return dict(base_url=url, api_key="any", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def client(settings):
    with anthropic.Anthropic(**settings, _strict_response_validation=True) as c:
        yield c


@pytest.fixture
def ask(model):
    return dict(model=model, max_tokens=12, messages=TALK, extra_body=GREEDY)


def words(message):
    return "".join(b.text for b in message.content if b.type == "text")


def test_messages(client, ask, url, model):
    message = client.messages.create(**ask)
    Message.model_validate(message.model_dump(), strict=True)
    chat = dict(model=model, messages=TALK, max_tokens=12, temperature=0)
    r = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=300).json()
    assert words(message) == r["choices"][0]["message"]["content"]
    assert message.stop_reason == "max_tokens" and message._request_id.startswith("req_")
    u = message.usage
    assert u.output_tokens == r["usage"]["completion_tokens"] == 12
    counted = client.messages.count_tokens(model=model, messages=TALK)
    assert isinstance(counted, MessageTokensCount)
    assert counted.input_tokens == u.input_tokens + u.cache_read_input_tokens
    again = client.messages.create(**ask)
    assert words(again) == words(message) and again.usage.cache_read_input_tokens > 0


def test_a_conversation(client, ask):
    talk = [*TALK, client.messages.create(**ask).to_param(), dict(role="user", content="More.")]
    system = [dict(type="text", text="Be brief.", cache_control=dict(type="ephemeral"))]
    assert words(client.messages.create(**ask | dict(messages=talk, system=system)))


def test_streams(client, ask):
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == words(final) == words(whole) and len(texts) > 1
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    kinds = [e.type for e in client.messages.create(**ask, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_async_streams(settings, client, ask):
    async def main():
        async with anthropic.AsyncAnthropic(**settings) as c:
            async with c.messages.stream(**ask) as stream:
                return await stream.get_final_message()

    assert words(asyncio.run(main())) == words(client.messages.create(**ask))


def test_stop_sequences(client, ask):
    said = words(client.messages.create(**ask))
    stop = said[3:6]
    message = client.messages.create(**ask, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert words(message) == said.split(stop)[0]


def test_structured_answers(client, ask):
    message = client.messages.parse(**ask | dict(max_tokens=100), output_format=Colour)
    assert isinstance(message.parsed_output, Colour) and message.stop_reason == "end_turn"


def test_models(client, model):
    assert model in [m.id for m in client.models.list()]
    assert client.models.retrieve(model).max_input_tokens > 0


def test_errors(client, ask, model):
    with pytest.raises(anthropic.NotFoundError) as e:
        client.messages.create(**ask | dict(model="no-such-model"))
    assert e.value.body["error"]["type"] == "not_found_error"
    image = [dict(type="image", source=dict(type="url", url="http://x/y.png"))]
    search = [dict(type="web_search_20250305", name="web_search")]
    long = [dict(role="user", content="a " * 20_000)]
    for more, word in (
        (dict(messages=[dict(role="user", content=image)]), "'image'"),
        (dict(tools=search), "web_search_20250305"),
        (dict(messages=long), "prompt is too long: "),
    ):
        for send in (client.messages.create, client.messages.stream):
            with pytest.raises(anthropic.BadRequestError, match=word) as e:
                with contextless(send(**ask | more)):
                    pass
            assert e.value.request_id == e.value.body["request_id"]


class contextless:
    "A manager of what a call gave, be it one or an answer."

    def __init__(self, given):
        self.given = given

    def __enter__(self):
        return self.given.__enter__() if hasattr(self.given, "__enter__") else self.given

    def __exit__(self, *error):
        return self.given.__exit__(*error) if hasattr(self.given, "__exit__") else None


# of the server whose template knows tools


@pytest.mark.parametrize(
    "choice", [dict(type="any"), dict(type="tool", name="get_weather")], ids=lambda c: c["type"]
)
def test_tools_by_hand(client, ask, choice):
    with_tools = ask | dict(tools=[TOOL], max_tokens=64)
    message = client.messages.create(**with_tools, tool_choice=choice)
    assert message.stop_reason == "tool_use"
    [call] = [b for b in message.content if b.type == "tool_use"]
    assert call.name == "get_weather" and isinstance(call.input["city"], str)
    with client.messages.stream(**with_tools, tool_choice=choice) as stream:
        [streamed] = [b for b in stream.get_final_message().content if b.type == "tool_use"]
    assert (streamed.name, streamed.input) == (call.name, call.input)
    result = dict(type="tool_result", tool_use_id=call.id, content="Sunny.")
    talk = [*TALK, message.to_param(), dict(role="user", content=[result])]
    body = with_tools | dict(messages=talk)
    answer = client.messages.create(**body, tool_choice=dict(type="none"))
    assert words(answer)
    own = {k: body[k] for k in ("model", "messages", "tools")}
    counted = client.messages.count_tokens(**own, tool_choice=dict(type="none"))
    u = answer.usage
    assert counted.input_tokens == u.input_tokens + u.cache_read_input_tokens


def test_tools_by_the_runner(client, ask):
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        "The weather in a city."
        asked.append(city)
        return "Sunny."

    runner = client.beta.messages.tool_runner(
        **ask | dict(max_tokens=64),
        tools=[get_weather],
        tool_choice=dict(type="any"),
        max_iterations=2,
    )
    messages = list(runner)
    assert len(messages) == 2 and asked
