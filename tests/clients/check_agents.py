"The Agents SDK, unchanged, with its default, the Responses API: whole, streamed, a conversation by ids, and a tool that it calls."

import asyncio

import openai, pytest
from agents import Agent, ModelSettings, Runner, function_tool
from agents import set_default_openai_client, set_tracing_disabled

# an answer that is cut off is an error to the SDK, so that these end by themselves
SHORT = ModelSettings(temperature=0, extra_body=dict(stop="."))


@pytest.fixture(autouse=True)
def own_client(url):
    "One for each test, which has an event loop of its own."
    set_tracing_disabled(True)  # which would be sent to OpenAI
    own = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=300)
    set_default_openai_client(own, use_for_tracing=False)


def test_an_answer_whole_and_streamed(model):
    agent = Agent(name="a", instructions="Be brief.", model=model, model_settings=SHORT)

    async def main():
        whole = await Runner.run(agent, "Name three colours.")
        streamed, kinds = Runner.run_streamed(agent, "Name three colours."), set()
        async for event in streamed.stream_events():
            kinds.add(getattr(event, "data", event).type)
        more = dict(previous_response_id=whole.last_response_id)
        after = await Runner.run(agent, "And three more?", **more)
        return whole, streamed, kinds, after

    whole, streamed, kinds, after = asyncio.run(main())
    assert whole.final_output and streamed.final_output == whole.final_output
    assert {"response.output_text.delta", "response.output_item.done"} <= kinds
    inputs = [r.raw_responses[0].usage.input_tokens for r in (whole, after)]
    assert inputs[1] > inputs[0], "the first answer is a part of the second prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_the_agent_calls(model, tools, stream):
    if not tools:
        pytest.skip("the model's template knows no tools")
    called = []

    @function_tool
    def weather(city: str) -> str:
        "The weather in a city."
        called.append(city)
        return "rain"

    forced = dict(tool_choice="required", parallel_tool_calls=False)
    how = ModelSettings(temperature=0, max_tokens=400, **forced)
    agent = Agent(name="a", model=model, tools=[weather], model_settings=how)

    async def main():
        if not stream:
            return await Runner.run(agent, "Is it raining in Kyiv?", max_turns=4)
        run = Runner.run_streamed(agent, "Is it raining in Kyiv?", max_turns=4)
        async for _ in run.stream_events():
            pass
        return run

    run = asyncio.run(main())
    kinds = [item.type for item in run.new_items]
    assert called and kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert run.final_output is not None
