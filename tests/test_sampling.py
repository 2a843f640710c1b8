"Settings of a request against transformers' processors, rows alone and in a batch, and the frequencies of what is drawn."

import math, random
from dataclasses import replace

import pytest, torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchlab.core.params import SamplingParams
from batchlab.core.sampling import (
    BAD_LOGITS,
    NO_TOKEN,
    SamplingRow,
    _check_vocab,
    _generator,
    _word_ids,
    draw_ids,
    probabilities,
    processed_logits,
    sample,
)
from batchlab.core.text import Detokenizer
from batchlab.errors import ParamError
from helpers import json_lines, one_thread

pytestmark = one_thread
seeded = lambda s: torch.Generator().manual_seed(s)


# --- what is refused


REFUSED = r"""
[{"temperature": -1}, "temperature must be a finite number of at least 0, got -1"]
[{"top_p": NaN}, "top_p must be a number above 0"]
[{"n": 2, "temperature": 0}, "n must be 1 with temperature=0"]
[{"temprature": 1}, "did you mean 'temperature'"]
[{"num_beams": 4}, "unknown setting 'num_beams'"]
[{"min_tokens": 20}, "min_tokens must be at most max_tokens=16"]
[{"stop": "END", "detokenize": false}, "use stop_token_ids instead"]
["greedy", "a dict of its fields or None, got 'str'"]
"""


@pytest.mark.parametrize("wrong, words", json_lines(REFUSED), ids=str)
def test_what_makes_no_sense_is_refused(wrong, words):
    with pytest.raises(ParamError, match=words):
        SamplingParams.of(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(stop_token_ids=[300]),
        dict(logit_bias={60000: 1}),
        dict(bad_words=[[1, 300]]),
        dict(allowed_token_ids=[0, 300]),
    ],
)
def test_ids_that_the_model_does_not_have(wrong):
    _check_vocab(SamplingParams(stop_token_ids=[299]), 300)
    with pytest.raises(ParamError, match=next(iter(wrong))):
        _check_vocab(SamplingParams(**wrong), 300)


def test_what_needs_a_tokenizer():
    with pytest.raises(ParamError, match="needs a tokenizer"):
        _word_ids(["blue"], None)
    with pytest.raises(ParamError, match="needs a tokenizer"):
        Detokenizer(None, SamplingParams(stop="END"))


def test_a_row_has_a_copy_of_its_settings():
    mine = SamplingParams(seed=0, temperature=0.5)
    row = SamplingRow.make(mine, [5])
    mine.temperature = -3
    assert row.params.temperature == 0.5
    with pytest.raises(ParamError):
        SamplingRow.make(mine, [5])


def test_a_row_that_fails_fails_alone():
    x = torch.randn(4, 300, generator=seeded(0))
    x[:2, 7] = math.nan
    none_left = dict(allowed_token_ids=[5], bad_words=[[5]])
    settings = dict(seed=1), dict(temperature=0), none_left, dict(temperature=0)
    out = sample(x, [SamplingRow.make(s, [5]) for s in settings])
    assert out.token_ids == [None, None, None, int(x[3].argmax())]
    assert out.errors == {0: BAD_LOGITS, 1: BAD_LOGITS, 2: NO_TOKEN}


# --- against transformers


def reference(logits, row):
    "What transformers' processors make of one row's `logits` `[V]`, in the order of this chapter."
    p, n_vocab, output = row.params, len(logits), torch.tensor([row.output_ids], dtype=torch.int64)
    ids = torch.cat([torch.tensor([row.prompt_ids]), output], -1)
    times = torch.bincount(output[0], minlength=n_vocab)
    x = logits.float()[None]
    if p.allowed_token_ids:
        x = SuppressTokensLogitsProcessor(
            [i for i in range(n_vocab) if i not in p.allowed_token_ids]
        )(ids, x)
    if p.bad_words:
        x = NoBadWordsLogitsProcessor(p.bad_words)(output, x)
    x = MinNewTokensLengthLogitsProcessor(
        len(row.prompt_ids), p.min_tokens, [*row.eos_ids, *p.stop_token_ids]
    )(ids, x)
    if p.logit_bias:
        x = SequenceBiasLogitsProcessor({(i,): b for i, b in p.logit_bias.items()})(ids, x)
    x = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, x)
    x = x - times * p.frequency_penalty - (times > 0) * p.presence_penalty
    if p.greedy:
        return x.masked_fill(x < x.max(), -math.inf)[0]
    x = TemperatureLogitsWarper(p.temperature)(ids, x)
    if p.min_p:
        x = MinPLogitsWarper(p.min_p)(ids, x)
    if p.top_k:
        x = TopKLogitsWarper(p.top_k)(ids, x)
    return (TopPLogitsWarper(p.top_p)(ids, x) if p.top_p < 1 else x)[0]


def any_params(rng, V):
    "Random settings: all kinds together, or one alone."
    r = rng.choice
    kinds = dict(
        top_p=r([1.0, 0.1, 0.5, 0.9, 0.99]),
        top_k=r([0, 1, 3, 40, 200]),
        min_p=r([0, 0, 0.05, 0.3]),
        repetition_penalty=r([1.0, 1.2, 0.8]),
        presence_penalty=r([0, 0.7]),
        frequency_penalty=r([0, -0.5]),
        min_tokens=r([0, 12]),
        logprobs=r([None, 0, 3]),
        stop_token_ids=rng.sample(range(V), 2),
        bad_words=r([[], [[5], [7, 8]]]),
        logit_bias=r([None, {9: 3.0, 11: -100}]),
        allowed_token_ids=r([None, None, rng.sample(range(V), V // 2)]),
    )
    if rng.random() < 0.5:
        kinds = dict([r([*kinds.items()])])
    temperature = r([0, 0.3, 0.7, 1.0, 1.5, 3.0])
    return SamplingParams(seed=rng.randrange(99), temperature=temperature, **kinds)


def any_row(rng, V):
    prompt, output = (
        [rng.randrange(V) for _ in range(rng.randrange(a, b))] for a, b in ((1, 9), (0, 20))
    )
    row = SamplingRow.make(any_params(rng, V), prompt, {2}, vocab_size=V)
    row.output_ids += output + rng.choice([[], [7]])
    return row


def test_every_setting_is_what_transformers_makes_of_it():
    rng = random.Random(0)
    for size in (61, 259, 1000, 5000):
        for _ in range(20):
            rows = [any_row(rng, size) for _ in range(6)]
            x = torch.randn(6, size, generator=seeded(rng.randrange(9999))) * rng.choice([1, 3, 6])
            for r, l, ours in zip(rows, x, processed_logits(x, rows)):
                ref = reference(l, r)
                assert torch.equal(ours.isfinite(), ref.isfinite())
                assert torch.allclose(ours.softmax(-1), ref.softmax(-1), atol=1e-6)


def again(rows):
    "The same rows, with generators set back."
    return [replace(r, generator=_generator(r.params, 0)) for r in rows]


def test_rows_alone_and_in_any_order_give_the_same_bits():
    "In bf16 too, where a vocabulary of thousands shares a few hundred values."
    rng = random.Random(1)
    for trial in range(60):
        size = rng.choice([61, 259, 1000, 5000])
        rows = [any_row(rng, size) for _ in range(7)]
        dtype = torch.bfloat16 if trial % 2 else torch.float32
        x = (torch.randn(7, size, generator=seeded(trial)) * 3).to(dtype)
        out, turned = sample(x, again(rows)), sample(x.flip(0), again(rows)[::-1])
        single = [sample(x[b : b + 1], [r]) for b, r in enumerate(again(rows))]
        assert out.token_ids == [s.token_ids[0] for s in single] == turned.token_ids[::-1]
        assert out.logprobs == [s.logprobs[0] for s in single]
        allowed = processed_logits(x, rows).isfinite()
        assert all(allowed[b, t] for b, t in enumerate(out.token_ids))


# --- frequencies


def chi_square(ids, probs):
    expect = probs.double() / probs.double().sum() * len(ids)
    return (
        ((torch.bincount(ids, minlength=len(probs)) - expect) ** 2 / expect)[probs > 0].sum().item()
    )


def test_tokens_are_drawn_as_often_as_they_are_likely():
    "With 7 degrees of freedom the statistic stays below 24.3 in 999 runs of 1000."
    eight = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.08, 0.06, 0.04, 0.02])
    u = torch.rand(20_000, dtype=torch.float64, generator=seeded(0))
    assert chi_square(draw_ids(eight.expand(20_000, 8), u), eight) < 24.3
    assert chi_square(draw_ids(eight.expand(20_000, 8), u**1.1), eight) > 24.3  # not uniform
    first = lambda s: torch.rand((), dtype=torch.float64, generator=seeded(s)).item()
    firsts = torch.tensor([first(s) for s in range(4_000)], dtype=torch.float64)
    assert chi_square(draw_ids(eight.expand(4_000, 8), firsts), eight) < 24.3


def test_steps_draw_what_temperature_and_filters_leave():
    "4,000 rows of one distribution, with a seed for each."
    setting = dict(temperature=0.8, top_k=20, top_p=0.9)
    x = 3 * torch.randn(1, 1000, generator=seeded(5))
    make = lambda seed: SamplingRow.make(dict(seed=seed, **setting), [5])
    target, ids = probabilities(x, [make(0)])[0], []
    for first in range(0, 4_000, 100):
        rows = [make(s) for s in range(first, first + 100)]
        ids += sample(x.expand(100, 1000), rows).token_ids
    ids = torch.tensor(ids)
    df = int((target > 0).sum()) - 1
    assert df > 2 and (target[ids] > 0).all()
    assert chi_square(ids, target) < df + 3.3 * (2 * df) ** 0.5 + 4
