"What programs that are not ours send, and what they read from the answers. The programs themselves run in `.ci/clients`."

import asyncio, importlib.machinery, importlib.util
from pathlib import Path
from typing import Literal

import pytest

openai = pytest.importorskip("openai", reason="needs openai: pip install '.[dev]'")
httpx = pytest.importorskip("httpx", reason="needs httpx: pip install '.[dev]'")
pytest.importorskip("fastapi", reason="needs fastapi: pip install '.[dev]'")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install '.[dev]'")
from pydantic import BaseModel

from batchlab.models import tiny_tokenizer
from batchlab.jobs.tools import format_of
from test_server import CHAT, TALK, TEXT, client_of, events_of, serving

ROOT = Path(__file__).resolve().parents[1]
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
)


@pytest.fixture(scope="module")
def s():
    with serving() as s:
        yield s


@pytest.fixture(scope="module")
def web(s):
    with httpx.Client(base_url=s.url, timeout=100) as c:
        yield c


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_sent_along_changes_nothing(web, stream):
    body = dict(messages=TALK, max_tokens=5, temperature=0, stream=stream)

    def said(**more):
        r = web.post(CHAT, json=body | more)
        assert r.status_code == 200, r.text
        if not stream:
            return r.json()["choices"]
        parts = [e["choices"][0] for e in events_of(r.text)]
        return "".join(p["delta"].get("content") or "" for p in parts), parts[-1]["finish_reason"]

    plain = said()
    assert said(**HARMLESS) == plain
    for k, v in HARMLESS.items():
        assert said(**{k: v}) == plain, k


@pytest.mark.parametrize(
    "more", [dict(web_search_options={}), dict(audio=dict(voice="x")), dict(modalities=["audio"])]
)
def test_what_would_change_the_answer_is_refused_by_name(web, more):
    r = web.post(CHAT, json=dict(messages=TALK) | more)
    assert (r.status_code, r.json()["error"]["param"]) == (400, next(iter(more)))


class Verdict(BaseModel):
    kind: Literal["good", "bad"]
    sure: bool


def test_answers_are_objects_of_pydantic(s):
    pytest.importorskip("llguidance", reason="needs llguidance: pip install '.[dev]'")
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


def test_an_evaluation_reads_likelihoods(s, web):
    "As lm-eval's local-completions asks and adds up: token ids of several texts, the last token made and cut off."
    texts, before = [[70, 71, 72, 73, 74], [80, 81, 82], [70, 71, 90, 91]], [2, 1, 3]
    ask = dict(model="tiny", temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    choices = web.post(TEXT, json=ask | dict(prompt=texts)).json()["choices"]
    how = dict(max_tokens=1, temperature=0, prompt_logprobs=1)
    for choice, n, own in zip(choices, before, s.llm.generate(texts, how)):
        steps = zip(own.prompt_token_ids[n:], own.prompt_logprobs[n:])
        want = [(step[t].logprob, step[t].rank == 1) for t, step in steps]
        got = choice["logprobs"]
        pairs = zip(got["token_logprobs"][n:-1], got["top_logprobs"][n:-1])
        assert [(x, x == max(top.values())) for x, top in pairs] == want
    assert [c["index"] for c in choices] == [0, 1, 2]


def test_a_client_without_a_tokenizer(s, web):
    "As lm-eval's remote tokenizer asks."
    info, tok = web.get("/tokenizer_info").json(), s.llm.get_tokenizer()
    assert (info["eos_token"], info["chat_template"]) == (tok.eos_token, tok.chat_template)
    post = lambda path, **body: web.post(path, json=body).json()
    ids = post("/tokenize", prompt=info["eos_token"], add_special_tokens=False)["tokens"]
    assert ids == [tok.eos_token_id]
    assert post("/detokenize", tokens=[70, 71])["prompt"] == tok.decode([70, 71])


def test_a_prompt_that_is_too_long_by_the_words_that_clients_look_for(s, web):
    "litellm finds it by these words, langchain-openai by the code."
    long = [dict(role="user", content="x" * 400)]
    e = web.post(CHAT, json=dict(messages=long)).json()["error"]
    said = f"this model's maximum context length is {s.llm.max_model_len} tokens"
    assert e["message"].startswith(said) and e["code"] == "context_length_exceeded"


def test_the_template_of_the_checks_knows_tools():
    loader = importlib.machinery.SourceFileLoader("ci_clients", str(ROOT / ".ci" / "clients"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("ci_clients", loader))
    loader.exec_module(module)
    found = format_of(tiny_tokenizer(), module.TEMPLATE)
    assert found and found.name == "hermes" and found.writes_calls and found.parallel
