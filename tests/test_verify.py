"`verify`: which tokens a seed could have drawn, how an answer ended, and what can not be compared."

import math
from dataclasses import replace
from functools import cache

import pytest, torch

from batchlab import LLM, SamplingParams
from batchlab.core.sampling import SamplingRow, sample
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.tasks.verify import (
    CheckedAnswer,
    check_answer,
    check_end,
    could_draw,
    gap_to,
    replay,
    verify,
    why_not_compared,
)
from helpers import json_lines, longrope, one_thread, oracle

pytestmark = one_thread
FOUR = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()  # shares that end at .1, .3, .6 and 1
GREEDY = dict(temperature=0, max_tokens=4)
VARIOUS = """
{"seed": 1, "n": 3, "top_p": 0.9, "max_tokens": 12}
{"seed": 2, "top_k": 20, "min_p": 0.05, "max_tokens": 16}
{"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "max_tokens": 16}
{"seed": 3, "stop": ["e", "a"], "max_tokens": 40}
{"seed": 4, "max_tokens": 1}
{"temperature": 0, "bad_words": [[40]], "min_tokens": 8, "max_tokens": 12}
"""


@cache
def an_llm():
    return LLM(tiny_model("llama"), tiny_tokenizer(), max_model_len=160)


def one(prompt, **params):
    "The output of one prompt and its answer."
    (out,) = an_llm().generate(prompt, params)
    return out, out.outputs[0]


def row(**params):
    return SamplingRow.make(SamplingParams(seed=0, **params), [5])


def test_what_a_number_could_draw_if_logits_were_a_little_off():
    warm, could = (
        row(temperature=1.0),
        lambda **kw: [could_draw(FOUR, warm, i, **kw) for i in range(4)],
    )
    assert could(u=0.61) == [False, False, False, True]
    assert could(u=0.61, slack=0.1) == [False, False, True, True]
    assert not could_draw(FOUR, row(bad_words=[[2]]), 2, u=0.61, slack=100.0)


def test_the_gap_is_twice_the_least_slack():
    warm = row(temperature=1.0)
    least = math.log(0.61 / 0.6 * 0.4 / 0.39) / 2  # from .6 to .61
    assert gap_to(FOUR, warm, 2, 3, u=0.61) == pytest.approx(2 * least, abs=1e-3)
    assert gap_to(FOUR, row(bad_words=[[2]]), 2, 3, u=0.61) == math.inf
    assert math.isnan(gap_to(FOUR, warm, 2, None))


def test_tokens_are_drawn_again():
    llm = an_llm()
    out, c = one([5, 6, 7], seed=3, max_tokens=6, temperature=1.5, repetition_penalty=1.2)
    logits = replay(llm.model, [5, 6, 7], c.token_ids)

    def again(out, logits=logits):
        first = CheckedAnswer(llm.loaded, out, c).row()
        rows = [replace(first, output_ids=c.token_ids[:t]) for t in range(6)]  # one generator
        return sample(logits, rows).token_ids

    assert again(out) == c.token_ids
    assert again(out, logits * torch.nan) == [None] * 6


def test_how_an_answer_ended():
    llm = an_llm()
    out, c = one("Hello", seed=1, max_tokens=80, temperature=1.5, stop=list("aeiou"))
    assert (c.finish_reason, len(c.token_ids) < 80) == ("stop", True)
    found = lambda **change: check_end(CheckedAnswer(llm.loaded, out, replace(c, **change)))
    assert not found()
    gone = dict(stop_reason=None, token_ids=c.token_ids[:-1])
    assert not found(finish_reason="cancelled", **gone)
    late = found(finish_reason="length", stop_reason=None, token_ids=[*c.token_ids, 9])
    early = found(finish_reason="length", stop_reason=None)
    assert [d.kind for d in late + early] == ["bug"] * 2


def test_a_long_answer_in_pieces():
    bare = LLM(tiny_model("llama"))
    params = dict(seed=2, max_tokens=30, temperature=1.2, ignore_eos=True)
    (out,) = bare.generate(list(range(40, 60)), params)
    changed = [i + (t in (4, 17)) for t, i in enumerate(out.outputs[0].token_ids)]
    c = replace(out.outputs[0], token_ids=changed)
    whole, pieces = (check_answer(bare, out, c, max_logits=n) for n in (2**26, 7 * 259))
    about = lambda found: [(d.index, d.got, d.want, d.kind) for d in found]
    assert about(pieces) == about(whole) and {4, 17} <= {d.index for d in whole}


@cache
def some_that_failed():
    "Six outputs of which two can be compared."
    llm = LLM(tiny_model("llama"), tiny_tokenizer(), max_model_len=64)
    outs = llm.generate(["fine", 7.5, "x" * 100, [5, 10**6], "fine, too"], GREEDY)
    return llm, outs + llm.generate(["no time"], GREEDY, timeout=1e-9)


def test_what_can_not_be_compared_is_skipped():
    llm, outs = some_that_failed()
    assert [why_not_compared(o) is None for o in outs] == [True, False, False, False, True, False]
    said = "2 of 6 requests, 8 tokens: all equal; 4 skipped"
    nothing = "0 of 3 requests, 0 tokens: nothing to compare; 3 skipped"
    assert (str(llm.verify(outs)), str(llm.verify(outs[1:4]))) == (said, nothing)
    assert str(llm.verify([])) == "0 requests, 0 tokens: nothing to compare"
    assert str(llm.verify(outs[0])) == "1 request, 4 tokens: all equal"
    drawn = llm.verify(llm.generate(["a", "b"], dict(max_tokens=2)))
    assert drawn.requests == 0 and "2 skipped, 2 of them sampled without a seed" in str(drawn)


def test_what_is_too_much_for_memory_alone_is_skipped():
    llm, outs = some_that_failed()

    def no_memory(*_):
        raise torch.OutOfMemoryError("no more")

    hook = llm.model.register_forward_pre_hook(no_memory)
    try:
        report = llm.verify([outs[0], outs[4]])
    finally:
        hook.remove()
    assert report.ok and len(report.skipped) == 2
    assert "out of memory, running it alone" in report.skipped[0][1]


def test_seeds_filters_penalties_and_stop_strings_are_replayed():
    llm = an_llm()
    prompts = [
        "Rivers",
        "A cat is to a kitten",
        "To bake",
        "Once, in a house",
        "She",
        "He was late",
    ]
    report = llm.verify(llm.generate(prompts, json_lines(VARIOUS)), sample=None)
    assert report.ok and report.requests == 6


@pytest.mark.parametrize("arch", "gemma2 gpt_oss qwen3_moe gpt2 phi3 gptj codegen".split())
def test_families(arch):
    llm = LLM(tiny_model(arch), max_num_seqs=2)
    params = [
        dict(temperature=0, max_tokens=1),
        dict(seed=1, max_tokens=9),
        dict(temperature=0, max_tokens=9, logprobs=1),
    ]
    outs = llm.generate([[9], [4] * 30, [7, 8, 9]], params)
    assert llm.verify(outs).ok and llm.report.tokens > 3


def test_an_answer_that_crosses_a_switch_of_rotations():
    model, prompt = longrope(), list(range(40, 50))
    [answer] = oracle(model, [prompt], 12)
    at_once = model(torch.tensor([prompt + answer])).logits[0, 9:-1].argmax(-1).tolist()
    assert replay(model, prompt, answer).argmax(-1).tolist() == answer != at_once


@pytest.mark.parametrize("name", ["mamba", "bloom", "longrope"])
def test_models_that_do_not_run_packed(name):
    llm = LLM(longrope() if name == "longrope" else tiny_model(name))
    outs = llm.generate([[9], list(range(40, 50)), [7] * 20], dict(temperature=0, max_tokens=12))
    llm.verify(outs)
    assert (llm.report.divergences, llm.report.requests) == ([], 3)


def test_a_replay_without_numbers_is_a_bug():
    sick = LLM(tiny_model("llama"))
    outs = sick.generate([[5, 6], [77, 8]], dict(temperature=0, max_tokens=2))
    sick.model.get_input_embeddings().weight[77] = torch.nan
    found = {(d.kind, d.request_id) for d in verify(sick, outs).divergences}
    assert found == {("bug", outs[1].request_id)}
