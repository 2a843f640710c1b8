"pydantic-ai, unchanged: text whole and streamed, a form, and a tool, by the chat endpoint and by responses."

import asyncio

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Colour(BaseModel):
    red: int = Field(ge=0, le=255)


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def llm(request, url, model):
    return request.param(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any"))


def settings(**more):
    return dict(temperature=0) | more


def test_text(llm):
    agent = Agent(llm, instructions="Be brief.", model_settings=settings(extra_body=dict(stop=".")))
    whole = asyncio.run(agent.run("Name three colours."))

    async def main():
        async with agent.run_stream("Name three colours.") as run:
            return [text async for text in run.stream_text(delta=True)]

    assert whole.output and "".join(asyncio.run(main())).strip() == whole.output.strip()
    assert (
        whole.usage.output_tokens > 0
        if not callable(whole.usage)
        else whole.usage().output_tokens > 0
    )


def test_a_form(llm):
    agent = Agent(llm, output_type=NativeOutput(Colour), model_settings=settings(max_tokens=100))
    assert isinstance(asyncio.run(agent.run("Is red bright?")).output, Colour)


def test_a_tool(llm, tools):
    if not tools:
        pytest.skip("the model's template knows no tools")
    agent = Agent(llm, output_type=Colour, model_settings=settings(max_tokens=200))
    assert isinstance(asyncio.run(agent.run("Is red bright?")).output, Colour)
