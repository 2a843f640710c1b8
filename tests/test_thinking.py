"What a model thinks is told from what it answers: in Python, files, tables and over HTTP; with a limit, and with forms that the answer alone is held to."

import asyncio, csv, json
from functools import cache

import pytest
import torch
from tokenizers import AddedToken

from helpers import write_lines
from batchlab import LLM, AsyncLLM, CompletionOutput, SamplingParams
from batchlab.api.aio import add_event
from batchlab.core.params import StructuredOutputsParams
from batchlab.core.text import Detokenizer
from batchlab.errors import ParamError
from batchlab.jobs.schema import Parts, answer_body
from batchlab.models.tiny import tiny_model, tiny_tokenizer
from batchlab.tasks.thinking import Marks, Thought, ThoughtMask
from batchlab.tasks.thinking import marks_of, place_after, say_no_thoughts
from helpers import json_lines

GREEDY = dict(max_tokens=24, temperature=0)
TALK = [dict(role="user", content="Hi")]
HEAD = "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>{% endfor %}"
OPENED = HEAD + "{% if add_generation_prompt %}<turn>assistant\n<think>\n{% endif %}"
TOLD = (
    HEAD + "{% if add_generation_prompt %}<turn>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}\n{% endif %}"
)


@cache
def tokenizer(template, special=False):
    "With the marks of thoughts as tokens, and those of turns as special ones."
    t = tiny_tokenizer()
    t.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    t.add_tokens(
        [AddedToken(w, special=special, normalized=False) for w in ("<think>", "</think>")]
    )
    t.chat_template = template
    return t


@torch.no_grad()
def scripted(t, text):
    "A model that writes `text`, of characters that come once each, after a line break, and ends."
    m = tiny_model("llama", vocab_size=len(t), hidden_size=256, tie_word_embeddings=False)
    for name, p in m.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            p.zero_()  # each token says alone what comes next
    words, head = m.get_input_embeddings().weight, m.get_output_embeddings().weight
    chain = t("\n" + text, add_special_tokens=False)["input_ids"] + [t.eos_token_id]
    assert len({*chain}) == len(chain)
    head.zero_()
    for a, b in zip(chain, chain[1:]):
        head[b] += words[a] / words[a].norm()
    return m


@cache
def llm(template=TOLD, text="<think>ab c</think>xyz", special=False):
    t = tokenizer(template, special)
    return LLM(scripted(t, text), t, max_num_seqs=2)


WAYS = [(TOLD, "<think>ab c</think>xyz"), (OPENED, "ab c</think>xyz")]
each_way = pytest.mark.parametrize("template, text", WAYS)


def said(out):
    [c] = out.outputs
    return c.reasoning, c.text, c.finish_reason


@each_way
@pytest.mark.parametrize("special", [False, True])
def test_a_thought_is_told_from_the_answer(template, text, special):
    [out] = llm(template, text, special).chat(TALK, GREEDY)
    assert said(out) == ("ab c", "xyz", "stop")
    assert out.outputs[0].num_reasoning_tokens == len("ab c") + 1 + (template == TOLD)
    assert out.num_tokens == out.outputs[0].num_reasoning_tokens + len("xyz") + 1


def test_a_model_may_answer_at_once():
    assert said(llm(text="xyz").chat(TALK, GREEDY)[0]) == ("", "xyz", "stop")


def test_thinking_may_be_turned_off():
    [out] = llm(text="xyz").chat(TALK, GREEDY, enable_thinking=False)
    assert out.prompt.endswith("<think>\n\n</think>\n") and said(out) == ("", "xyz", "stop")
    [out] = llm(text="xyz").chat(TALK, GREEDY, reasoning_effort="low")
    assert out.prompt.endswith("low\n")


def test_a_thought_that_is_cut_off_leaves_no_answer():
    assert said(llm().chat(TALK, GREEDY | dict(max_tokens=3))[0]) == ("ab", "", "length")


def test_a_plain_prompt_has_its_text_whole():
    [out] = llm().generate("Hi\n", SamplingParams(**GREEDY, skip_special_tokens=False))
    assert out.outputs[0].reasoning is None
    assert out.outputs[0].text.startswith("<think>ab c</think>xyz")


def test_a_model_without_marks_has_no_thoughts(caplog):
    say_no_thoughts.cache_clear()
    plain = LLM(tiny_model("llama"), tiny_tokenizer())
    [out] = outs = plain.chat(TALK, GREEDY | dict(thinking_token_budget=1))
    plain.chat(TALK, GREEDY | dict(thinking_token_budget=2))
    assert sum("thinking_token_budget" in r.message for r in caplog.records) == 1
    assert out.outputs[0].reasoning is None and "reasoning" not in outs.to_pandas()
    body = answer_body(out, "chat", "a", "m")
    assert {*body["choices"][0]["message"]} == {"role", "content", "refusal"}
    assert "completion_tokens_details" not in body["usage"]


@each_way
def test_stop_strings_are_looked_for_in_the_answer_alone(template, text):
    stop = GREEDY | dict(stop=["b", "y"])
    assert said(llm(template, text).chat(TALK, stop)[0]) == ("ab c", "x", "stop")


@each_way
@pytest.mark.parametrize("budget", range(6))
def test_a_budget_ends_the_thought_and_the_answer_follows(template, text, budget):
    [out] = llm(template, text).chat(TALK, GREEDY | dict(thinking_token_budget=budget))
    assert said(out) == ("ab c"[:budget], "xyz", "stop")


def test_a_budget_is_for_conversations():
    [out] = llm().generate("Hi", SamplingParams(**GREEDY, thinking_token_budget=1))
    assert out.error.startswith("thinking_token_budget")
    with pytest.raises(ParamError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-1)


FORM = dict(structured_outputs=StructuredOutputsParams(regex="[0-9]{2}"))
needs_grammar = pytest.mark.skipif(
    pytest.importorskip("importlib.util").find_spec("llguidance") is None,
    reason="needs llguidance: pip install '.[dev]'",
)


@needs_grammar
@each_way
@pytest.mark.parametrize("budget, thought", [(None, "ab c"), (2, "ab")])
def test_a_form_is_for_the_answer(template, text, budget, thought):
    params = GREEDY | FORM | dict(thinking_token_budget=budget)
    reasoning, answer, reason = said(llm(template, text).chat(TALK, params)[0])
    assert (reasoning, reason) == (thought, "stop") and len(answer) == 2 and answer.isdigit()
    params["structured_outputs"] = StructuredOutputsParams(choice=["no", "yes"])
    reasoning, answer, reason = said(llm(template, text).chat(TALK, params)[0])
    assert (reasoning, reason) == (thought, "stop") and answer in ("no", "yes")


@needs_grammar
def test_a_form_holds_without_a_thought_and_through_one_that_would_not_end():
    [out] = llm(text="xyz").chat(TALK, GREEDY | FORM, enable_thinking=False)
    assert out.outputs[0].text.isdigit() and out.outputs[0].reasoning == ""
    params = GREEDY | FORM | dict(thinking_token_budget=5)
    [out] = llm(OPENED, "ab").chat(TALK, params)  # it ends within the thought
    assert out.outputs[0].text.isdigit() and len(out.outputs[0].token_ids) == 5 + 1 + 2 + 1


@needs_grammar
@each_way
def test_thoughts_are_verified(template, text):
    params = GREEDY | FORM | dict(thinking_token_budget=2)
    outs = llm(template, text).chat([TALK, TALK], params, verify=True)
    assert outs.report.ok
    assert llm(template, text).chat(TALK, GREEDY | dict(stop="y"), verify=True).report.ok


@each_way
def test_a_stream_gives_the_same_in_parts(template, text):
    events = [*llm(template, text).stream([dict(messages=TALK)], GREEDY, chat=True)]
    assert "".join(e.reasoning for e in events) == "ab c"
    assert "".join(e.text for e in events) == "xyz"

    async def asked():
        async with AsyncLLM(llm(template, text)) as a:
            return [o async for o in a.chat(TALK, SamplingParams(**GREEDY))]

    *parts, last = asyncio.run(asked())
    seen = [(p.outputs[0].reasoning or "", p.outputs[0].text) for p in parts]
    assert all("ab c".startswith(r) and (r == "ab c" or not t) for r, t in seen)
    thought = last.outputs[0].num_reasoning_tokens
    part, counted = CompletionOutput(0), []
    for event in events:
        add_event(part, event)
        counted.append((part.num_reasoning_tokens, len(part.token_ids)))
    assert len(counted) > 2 and all(n == min(thought, tokens) for n, tokens in counted)
    assert events[-1].num_reasoning_tokens == thought > 0
    assert said(last) == ("ab c", "xyz", "stop")


def deltas(data, key="delta"):
    events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line[6:7] == "{"]
    return [c[key] for e in events for c in e["choices"]]


def test_answers_and_parts_of_the_api_have_thoughts():
    outs = []

    async def asked():
        async with AsyncLLM(llm()) as a:
            outs.extend([o async for o in a.chat(TALK, SamplingParams(**GREEDY, logprobs=0))])

    asyncio.run(asked())
    body = answer_body(outs[-1], "chat", "a", "m")
    [choice] = body["choices"]
    thought = dict(reasoning_content="ab c", reasoning="ab c")
    assert choice["message"] == dict(role="assistant", content="xyz", refusal=None) | thought
    assert body["usage"]["completion_tokens_details"] == dict(reasoning_tokens=6)
    parts = Parts("chat", "a", "m", top=0)
    found = [d for o in outs for d in deltas(parts.since(o.outputs))]
    for key, want in (("content", "xyz"), *thought.items()):
        assert "".join(d.get(key) or "" for d in found) == want
    assert all(len(d.keys() & {"content", "reasoning"}) == 1 for d in found[1:] if d)
    at_once = Parts("text", "a", "m").since(outs[-1].outputs)  # a thought's end and what follows
    assert deltas(at_once, "text") == ["xyz"]


GOES_ON = dict(add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    "begun, thought", [("<think>\n", "ab c"), ("<think>\na", "b c"), (" <think>a", "b c")]
)
def test_a_thought_that_was_begun_is_gone_on_with(begun, thought, tmp_path):
    "By a call, a line of a file and the Messages API; with a limit, too."
    from batchlab.api.run import run
    from batchlab.serve.messages import conversation_of

    talk, thinks = [*TALK, dict(role="assistant", content=begun)], llm(text="ab c</think>xyz")
    [out] = thinks.chat(talk, GREEDY, **GOES_ON)
    want = thinks.tokenizer.apply_chat_template(talk, **GOES_ON, return_dict=False)
    assert [*out.prompt_token_ids] == want and said(out) == (thought, "xyz", "stop")
    [cut] = thinks.chat(talk, GREEDY | dict(thinking_token_budget=1), **GOES_ON)
    assert said(cut) == (thought[0], "xyz", "stop")
    (tmp_path / "in.jsonl").write_text(json.dumps(dict(messages=talk, **GREEDY, **GOES_ON)))
    run(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), model=thinks)
    answered = json.loads((tmp_path / "out.jsonl").read_text())
    assert (answered["reasoning"], answered["text"]) == (thought, "xyz")
    if not begun[-1:].isspace():  # which that API refuses
        [out] = thinks.chat([conversation_of(None, talk)], GREEDY)
        assert [*out.prompt_token_ids] == want and said(out) == (thought, "xyz", "stop")


@pytest.mark.parametrize("times", [1, 2])
def test_blanks_around_a_thought_are_left_out_of_the_answer(times):
    "And a second mark right behind the first, as where a limit has closed a thought."
    t = tokenizer(OPENED)
    ids = lambda s: t(s, add_special_tokens=False)["input_ids"]
    marks = marks_of(t)
    text = Detokenizer(t, SamplingParams(), ids("?"), aside=Thought(marks, "thought"))
    shown = [text.add(i) for i in [*ids("a é"), *[marks.close] * times, *ids(" \n\n é b")]]
    assert "".join([*shown, text.finish()]) == text.text == "é b"
    assert text.kept == "a é" and text.new_kept() == "a é" and text.new_kept() == ""


PLACES = """
[[1, 5], "start"]
[[1, 5, 7], "thought"]
[[1, 5, 7, 3], "thought"]
[[1, 7, 5, 3], "thought"]
[[7, 1, 5], "start"]
[[1, 7, 3, 8, 3], "answer"]
[[1, 7, 3, 8, 5], "start"]
[[8], "answer"]
[[], "start"]
"""


@pytest.mark.parametrize("ids, place", json_lines(PLACES))
def test_where_an_answer_begins(ids, place):
    assert place_after(ids, Marks(7, 8), {1}, [3]) == place


def test_a_budget_forbids_all_but_the_mark():
    mask = ThoughtMask(Marks(7, 8), "start", 1, None, [])
    may = lambda ids: mask.mask_(torch.zeros(1, 9), ids).isfinite().nonzero()[:, 1].tolist()
    assert may([7, 5]) == [8] and may([7]) == may([7, 5, 8]) == may([5, 7, 5]) == [*range(9)]


def test_a_response_template_names_the_marks():
    t = tiny_tokenizer()
    t.add_tokens(["<think>", "</think>", "<muse>", "</muse>"])
    assert t.convert_ids_to_tokens(marks_of(t).open) == "<think>"
    t = tiny_tokenizer()
    t.add_tokens(["<think>", "</think>", "<muse>", "</muse>"])
    t.response_template = dict(fields=dict(thinking=dict(open="<muse>\n", close="</muse>")))
    assert t.convert_ids_to_tokens(marks_of(t).open) == "<muse>"
    assert marks_of(tiny_tokenizer()) is None


def test_files_and_tables_have_thoughts(tmp_path):
    from batchlab.api.run import run

    lines = [
        dict(messages=TALK, **GREEDY),
        dict(messages=TALK, **GREEDY, thinking_token_budget=1),
        dict(messages=TALK, **GREEDY, enable_thinking=False),
    ]
    file = tmp_path / "in.jsonl"
    write_lines(file, lines)
    for name in ("out.jsonl", "out.csv"):
        run(str(file), str(tmp_path / name), model=llm())
    records = [json.loads(line) for line in open(tmp_path / "out.jsonl")]
    rows = [*csv.DictReader(open(tmp_path / "out.csv"))]
    records.sort(key=lambda r: r["line"])
    for found in (records, rows):
        assert [(r["reasoning"] or "", r["text"]) for r in found][:2] == [("ab c", "xyz"), ("a", "xyz")]  # fmt: skip
    assert records[0]["usage"]["completion_tokens_details"] == dict(reasoning_tokens=6)
    bodies = [dict(custom_id=str(i), method="POST", url="/v1/chat/completions", body=d) for i, d in enumerate(lines)]  # fmt: skip
    write_lines(file, bodies)
    run(str(file), str(tmp_path / "batch.jsonl"), model=llm())
    answered = [json.loads(line) for line in open(tmp_path / "batch.jsonl")]
    bodies = {d["custom_id"]: d["response"]["body"] for d in answered}
    assert bodies["0"]["choices"][0]["message"]["reasoning"] == "ab c"
