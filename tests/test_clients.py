"What programs that are not ours send, and what they read from the answers. The programs themselves run in `.ci/clients`."

import asyncio
from typing import Literal


from helpers import added_up, events_of, needs, streamed

openai, *_ = needs("openai", "httpx", "fastapi", "uvicorn")
from pydantic import BaseModel

from test_server import CHAT, TALK, client_of

HARMLESS = dict(
    reasoning_effort="low",
    verbosity="low",
    user="u",
    store=True,
    metadata=dict(a="b"),
    service_tier="auto",
    safety_identifier="s",
    prompt_cache_key="k",
    prompt_cache_retention="24h",
    prediction=dict(type="content", content="x"),
    parallel_tool_calls=False,
    modalities=["text"],
    tool_choice="none",
    functions=[],
    structured_outputs=None,
)


@streamed
def test_what_is_sent_along_changes_nothing(web, stream):
    body = dict(messages=TALK, max_tokens=5, temperature=0, stream=stream)

    def said(**more):
        r = web.post(CHAT, json=body | more)
        assert r.status_code == 200, r.text
        return added_up(events_of(r.text)) if stream else r.json()["choices"]

    plain = said()
    assert said(**HARMLESS) == plain
    for k, v in HARMLESS.items():
        assert said(**{k: v}) == plain, k


class Verdict(BaseModel):
    kind: Literal["good", "bad"]
    sure: bool


def test_answers_are_objects_of_pydantic(s):
    needs("llguidance")
    ask = dict(model="tiny", messages=TALK, response_format=Verdict, max_tokens=100, temperature=0)
    with client_of(s, strict=True) as c:
        whole = c.chat.completions.parse(**ask).choices[0].message.parsed
        with c.chat.completions.stream(**ask) as events:
            kinds = {e.type for e in events}
            assert events.get_final_completion().choices[0].message.parsed == whole

    async def main():
        async with client_of(s, strict=True, kind=openai.AsyncOpenAI) as c:
            return (await c.chat.completions.parse(**ask)).choices[0].message.parsed

    assert isinstance(whole, Verdict) and asyncio.run(main()) == whole
    assert {"content.delta", "content.done"} <= kinds
