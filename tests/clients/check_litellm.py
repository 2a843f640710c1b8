"litellm, unchanged: whole and in parts, sync and async, by the names it has for an OpenAI server and for vLLM's, and its own errors."

import asyncio, os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # asks nobody for prices
import litellm, pytest

TALK = [dict(role="user", content="Name three colours.")]


@pytest.fixture(params=["openai", "hosted_vllm"])
def ask(request, url, model):
    return dict(
        model=f"{request.param}/{model}",
        api_base=f"{url}/v1",
        api_key="any",
        messages=TALK,
        max_tokens=12,
        temperature=0,
    )


def text_of(parts):
    return "".join(p.choices[0].delta.content or "" for p in parts if p.choices)


def test_completion(ask):
    whole = litellm.completion(**ask)
    parts = list(litellm.completion(**ask, stream=True, stream_options=dict(include_usage=True)))
    assert (
        whole.usage.completion_tokens == 12
        and text_of(parts) == whole.choices[0].message.content
        and parts[-1].usage.total_tokens == whole.usage.total_tokens
    )

    async def main():
        async def streamed():
            return text_of([p async for p in await litellm.acompletion(**ask, stream=True)])

        return await asyncio.gather(litellm.acompletion(**ask), streamed())

    one, other = asyncio.run(main())
    assert one.choices[0].message.content == other == whole.choices[0].message.content


@pytest.mark.parametrize(
    "more",
    [
        dict(user="u"),
        dict(seed=1),
        dict(stop=["x"]),
        dict(n=1),
        dict(logprobs=True, top_logprobs=2),
        dict(parallel_tool_calls=False),
        dict(metadata=dict(a="b")),
        dict(store=True),
        dict(service_tier="auto"),
        dict(safety_identifier="s"),
        dict(prompt_cache_key="k"),
        dict(response_format=dict(type="json_object")),
        dict(frequency_penalty=0.5, presence_penalty=0.5, top_p=0.9),
        dict(max_completion_tokens=12),
        dict(logit_bias={"5": -1}),
    ],
    ids=lambda d: " ".join(d),
)
def test_settings(ask, more):
    assert litellm.completion(**ask | more).choices


def test_text_completion(url, model):
    ask = dict(
        model=f"text-completion-openai/{model}",
        api_base=f"{url}/v1",
        api_key="any",
        prompt="One, two,",
        max_tokens=5,
        temperature=0,
    )
    assert litellm.text_completion(**ask).choices[0].text == "".join(
        p.choices[0].text or "" for p in litellm.text_completion(**ask, stream=True)
    )


def test_tools(ask, tools):
    if not tools:
        pytest.skip("the model's template knows no tools")
    weather = dict(
        type="function",
        function=dict(
            name="weather",
            parameters=dict(
                type="object",
                required=["city"],
                properties=dict(city=dict(type="string", maxLength=10)),
            ),
        ),
    )
    [call] = (
        litellm.completion(
            **ask | dict(max_tokens=60),
            tools=[weather],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        .choices[0]
        .message.tool_calls
    )
    assert call.function.name == "weather"


def test_errors(ask, model):
    for more, kind in (
        (
            dict(messages=[dict(role="user", content="a " * 20_000)]),
            litellm.ContextWindowExceededError,
        ),
        (dict(temperature=-1), litellm.BadRequestError),
        (dict(model=ask["model"].replace(model, "gpt")), litellm.NotFoundError),
    ):
        with pytest.raises(kind):
            litellm.completion(**ask | more)


def test_embeddings(url, model):
    one, two = litellm.embedding(
        model=f"openai/{model}",
        input=["a", "two words"],
        api_base=f"{url}/v1",
        api_key="any",
        encoding_format="float",
    ).data
    assert len(one["embedding"]) == len(two["embedding"]) and one["embedding"] != two["embedding"]
