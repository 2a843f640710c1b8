"autobatcher, unchanged: a drop-in AsyncOpenAI whose requests become background responses, or lines of a batch."

import asyncio

import pytest
from autobatcher import BatchOpenAI

TALK = [dict(role="user", content="Name three colours.")]


@pytest.mark.parametrize("window", [None, "24h"])
def test_as_the_plain_client(url, model, window):
    how = dict(completion_window=window, poll_interval_seconds=0.5)

    async def main():
        async with BatchOpenAI(base_url=f"{url}/v1", api_key="any", **how) as client:
            chats = [
                client.chat.completions.create(
                    model=model, messages=TALK, temperature=0, max_tokens=n
                )
                for n in (16, 20)
            ]
            asked = dict(model=model, input="Name three colours.", temperature=0)
            responses = [client.responses.create(**asked, max_output_tokens=16)]
            return await asyncio.gather(*chats, *responses)

    short, long, response = asyncio.run(main())
    text = short.choices[0].message.content
    assert (
        text and long.choices[0].message.content.startswith(text) and response.output_text == text
    )
    assert short.usage.completion_tokens == response.usage.output_tokens == 16
