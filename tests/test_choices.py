"Log probabilities of what was asked about: modes, chosen tokens, prompts from a position on, and whole choices."

import functools, json, math, random

import numpy as np, pytest, torch

from helpers import json_lines, needs, one_thread, raising, same
from batchlab.tasks.choices import choose
from batchlab.errors import ModelError, ParamError
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.core.generation import append_prompt, make_request
from batchlab.core.params import LOGPROBS_MODES, SamplingParams
from batchlab.core.sampling import (
    SamplingRow,
    processed_logits,
    sample,
    token_logprobs,
    token_text,
)
from invariants import check_pool

GREEDY = dict(temperature=0, max_tokens=1)

pytestmark = one_thread


@functools.cache
def tiny(arch="llama"):
    return tiny_model(arch, seed=2)


def an_llm(**how):
    return LLM(tiny(), tiny_tokenizer(), **how)


def near(want, abs=1e-4):
    return pytest.approx(want, abs=abs)


def alone(model, ids):
    "The log probabilities `[n, V]` after each of `ids`, by transformers."
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def by_hand(model, ids, start):
    "The log probability of each of `ids` from index `start` on."
    after, of = alone(model, ids)[start - 1 : -1], torch.tensor(ids[start:])[:, None]
    return after.gather(1, of)[:, 0].tolist()


def told(out):
    return [d and d[t].logprob for d, t in zip(out.prompt_logprobs, out.prompt_token_ids)]


def rows_of(rng, n, shared=40):
    own = lambda: [rng.randrange(3, 259) for _ in range(rng.randint(1, 60))]
    return [[*range(30, 30 + shared), *own()] for _ in range(n)]


# modes


def test_modes_report_what_the_row_drew_from():
    torch.manual_seed(0)
    x, ids = torch.randn(5, 300), [5, 9, 33]
    settings = [
        dict(temperature=0),
        dict(seed=1),
        dict(seed=2, temperature=0.5, top_k=4),
        dict(seed=3, top_p=0.6, allowed_token_ids=[3, 5, 9, 33]),
        dict(temperature=0, repetition_penalty=1.5, logit_bias={7: 2.0}, allowed_token_ids=[5, 7]),
    ]
    make = lambda **more: [SamplingRow.make(s | more, ids) for s in settings]
    plain = [
        SamplingRow.make(s | dict(temperature=s.get("temperature") or 1), ids) for s in settings
    ]
    for mode in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"):
        before = x.clone()
        got = sample(x, make(logprobs=3, logprobs_mode=mode))
        assert torch.equal(x, before)
        want = processed_logits(x, plain) if mode.startswith("processed") else x
        if mode.endswith("logprobs"):
            want = want.log_softmax(-1)
        for row, token, d in zip(want, got.token_ids, got.logprobs):
            assert next(iter(d)) == token
            for i, l in d.items():
                assert l.logprob == near(row[i].item(), 1e-5) and l.logprob > -math.inf
                assert l.rank == 1 + int((row > row[i]).sum())
        rows = make(logprobs=3, logprobs_mode=mode)
        single = [sample(x[b : b + 1], [r]).logprobs[0] for b, r in enumerate(rows)]
        assert single == got.logprobs, "the same bits alone and in company"
    every = sample(x, make(logprobs=-1)).logprobs
    assert [len(d) for d in every] == [300] * len(settings)
    modes = None, "processed_logits"
    drawn = [sample(x, make(logprobs=0, logprobs_mode=m)).token_ids for m in modes]
    assert drawn[0] == drawn[1], "what is reported changes nothing of what is drawn"


def test_the_llms_mode_holds_unless_a_request_has_its_own():
    llm = an_llm(logprobs_mode="processed_logprobs")
    two = dict(GREEDY, allowed_token_ids=[50, 60], logprobs=2)
    a, b = llm.generate([[5, 6, 7]] * 2, [two, dict(two, logprobs_mode="raw_logprobs")])
    assert sum(math.exp(l.logprob) for l in a.outputs[0].logprobs[0].values()) == near(1, 1e-5)
    [t] = b.outputs[0].token_ids
    assert b.outputs[0].logprobs[0][t].logprob == near(alone(tiny(), [5, 6, 7])[-1, t].item())


REFUSED = r"""
[{"logprobs_mode": "raw"}, "raw_logprobs.*processed_logits"]
[{"logprobs_mode": 1}, "raw_logprobs.*processed_logits"]
[{"prompt_logprobs": 0, "prompt_logprob_start": -1}, "prompt_logprob_start"]
[{"prompt_logprobs": 0, "prompt_logprob_start": 1.5}, "prompt_logprob_start"]
[{"prompt_logprobs": 0, "prompt_logprob_start": "a"}, "prompt_logprob_start"]
[{"prompt_logprobs": 0, "prompt_logprob_start": null}, "prompt_logprob_start"]
[{"prompt_logprob_start": 2}, "none are asked for"]
[{"logprob_token_ids": 7}, "logprob_token_ids must be a list"]
"""


@pytest.mark.parametrize("settings, words", json_lines(REFUSED), ids=str)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ParamError, match=words):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "wrong, why",
    [
        *[(x, "must be a list") for x in ("yes", {"a": 1}, None)],
        *[(["a", 3], "choice 1 must be"), ([None], "choice 0 must be"), ([b"a"], "choice 0 must")],
        *[([], "no choices"), (["a", ""], "choice 1 is empty"), (["a", "a"], "twice")],
        ([["a"], ["b"]], "2 lists of choices for 1"),
    ],
)
def test_choices_that_cannot_be_compared(wrong, why):
    with pytest.raises(ParamError, match=why):
        an_llm().choose(["x"], wrong)


def test_choices_held_to_a_grammar_are_likely_among_themselves():
    needs("llguidance")
    llm = an_llm(logprobs_mode="processed_logprobs")
    params = dict(GREEDY, max_tokens=8, logprobs=-1, structured_outputs=dict(choice=["yes", "no"]))
    for out in llm.generate(["Is it?", "Really, is it so?"], params):
        first = {l.decoded_token: math.exp(l.logprob) for l in out.outputs[0].logprobs[0].values()}
        assert all("yes".startswith(t) or "no".startswith(t) for t in first)
        assert sum(first.values()) == near(1, 1e-5)


# chosen tokens


def test_logprob_token_ids_are_exactly_those_and_the_sampled_one():
    llm, ids = an_llm(), [7, 250, 3]
    prompts = rows_of(random.Random(1), 6)
    asked = [ids if i % 2 else ids[:i] for i in range(6)]
    each = [dict(GREEDY, logprob_token_ids=some) for some in asked]
    each[0] = dict(GREEDY, max_tokens=3, logprobs=5)
    for some, out in zip(asked, llm.generate(prompts, each)):
        c, n = out.outputs[0], len(out.prompt_token_ids) - 1
        lp = alone(tiny(), out.prompt_token_ids + c.token_ids)
        for t, (token, d) in enumerate(zip(c.token_ids, c.logprobs, strict=True)):
            assert set(d) == {token, *some} or not some
            assert all(l.logprob == near(lp[n + t, j].item()) for j, l in d.items())
    out = llm.generate(prompts[0], dict(GREEDY, logprob_token_ids=[5, 99_999]))[0]
    assert "logprob_token_ids has token ids [99999]" in out.error


# prompts from a position on


WAYS = dict(
    auto={},
    torch=dict(compile=False),
    small=dict(max_num_seqs=3, max_num_batched_tokens=7),
    uncached=dict(enable_prefix_caching=False),
    loop=dict(strategy="loop"),
    static=dict(strategy="static"),
    prefix=dict(strategy="prefix"),
    bucketed=dict(strategy="bucketed"),
)


@pytest.mark.parametrize("way", WAYS)
def test_prompt_logprobs_from_a_position_on(way):
    "By the first of the answers, and of no more positions than are asked for."
    rng, counts = random.Random(way), []
    llm, prompts = an_llm(**WAYS[way]), rows_of(rng, 12, 70)
    note = lambda _, event, x: event == "schedule" and counts.extend(r.num_logits for r in x.rows)
    llm.watchers.append(note)
    for _ in range(2):  # cold, then cached
        starts = [rng.choice([0, len(p) - 1, rng.randrange(len(p)), 64, 63, 65]) for p in prompts]
        ask = lambda s: dict(
            seed=1, max_tokens=2, n=2, ignore_eos=True, prompt_logprobs=2, prompt_logprob_start=s
        )
        counts.clear()
        outs = llm.generate(prompts, [*map(ask, starts)])
        for p, s, out in zip(prompts, starts, outs):
            assert not out.error and len(out.prompt_logprobs) == len(p)
            assert out.prompt_logprobs[: s + 1] == [None] * (s + 1)
            assert told(out)[s + 1 :] == near(by_hand(tiny(), p, s + 1))
            assert out.num_cached_tokens <= s
    if way in ("auto", "torch"):  # hits reach the position
        assert max(o.num_cached_tokens - s for o, s in zip(outs, starts)) == 0
        due = sum(len(p) - s for p, s in zip(prompts, starts))
        assert sum(counts) == due + (2 + 2 - 1) * len(prompts)


def test_scores_of_a_prompt_are_the_same_in_pieces():
    "Of a vocabulary of which a cache holds three rows, eleven positions, in two steps that overlap."
    logits = torch.randn(11, 2**19 // 3, generator=torch.Generator().manual_seed(0))
    row = SamplingRow.make(SamplingParams(prompt_logprobs=2, max_tokens=1), [*range(40, 52)])
    task = make_request(row).task
    append_prompt(task, logits[:7], 0)
    append_prompt(task, logits[5:], 5)
    at_once = token_logprobs(logits, row.prompt_ids[1:], 2, [token_text(row)] * 11)
    assert task.prompt_logprobs == [None, *at_once]


@pytest.mark.parametrize("arch", ["gemma2", "mistral", "bloom", "gpt2"])
def test_other_models_too(arch):
    model, prompts = tiny(arch), rows_of(random.Random(arch), 4, 30)
    llm = LLM(model, tiny_tokenizer())
    params = dict(GREEDY, prompt_logprobs=0, prompt_logprob_start=29)
    for _ in range(2):
        for p, out in zip(prompts, llm.generate(prompts, params)):
            assert told(out)[30:] == near(by_hand(model, p, 30), 1e-3)
    [o] = choose(llm, [prompts[0]], [[7], [8, 9], [8, 10, 11]])
    for c, ids in o.token_ids.items():
        assert o.token_logprobs[c] == near(by_hand(model, prompts[0] + ids, len(prompts[0])), 1e-3)


def test_a_hit_ends_before_the_position_and_is_shared_in_one_call():
    llm, head = an_llm(compile=False), [*range(10, 110)]
    prompts = [head + [t, t + 1, t + 2] for t in range(20, 30)]
    outs = llm.generate(prompts, dict(GREEDY, prompt_logprobs=0, prompt_logprob_start=99))
    assert [o.num_cached_tokens for o in outs] == [0] + [99] * 9
    assert llm.ledger.useful == 103 + 9 * 4
    for p, o in zip(prompts, outs):
        assert told(o)[100:] == near(by_hand(tiny(), p, 100))
    again = llm.generate(prompts[0], dict(GREEDY, prompt_logprobs=0))[0]
    assert again.num_cached_tokens == 0 and told(again)[1:] == near(by_hand(tiny(), prompts[0], 1))


def test_a_start_behind_the_prompt_is_an_error():
    how = dict(GREEDY, prompt_logprobs=0, prompt_logprob_start=3)
    assert "prompt_logprob_start must be below 3" in an_llm().generate([[5, 6, 7]], how)[0].error
    with pytest.raises(ParamError, match="start"):
        an_llm().logprobs([[5, 6]], start=0)


def test_score_from_a_token_on():
    llm, prompts = an_llm(), rows_of(random.Random(4), 5)
    whole, part = llm.logprobs(prompts), llm.logprobs(prompts, start=41)
    assert [s.logprobs[40:] for s in whole] == [near(s.logprobs, 1e-5) for s in part]
    assert [len(s.logprobs) for s in whole] == [len(p) - 1 for p in prompts]


# whole choices


WORDS = "the sea is blue and warm in may but not so here".split()


def words(rng, n):
    return " ".join(rng.choice(WORDS) for _ in range(n))


def check(llm, outs, eps=1e-4):
    "Each log probability of `outs` is what the model alone says."
    for o in outs:
        assert not o.error
        for c, ids in o.token_ids.items():
            want = by_hand(llm.model, o.prompt_token_ids + ids, len(o.prompt_token_ids))
            assert o.token_logprobs[c][: len(ids)] == pytest.approx(want, abs=eps)
        assert sum(o.probabilities.values()) == pytest.approx(1)
        assert o.best == max(o.logprobs, key=o.logprobs.get)


@pytest.mark.parametrize("way", WAYS)
def test_choices_are_what_score_says_of_the_whole_text(way):
    rng = random.Random(way)
    llm = an_llm(**WAYS[way])
    choices = [" sea", " blue sea", "b", " " + words(rng, 12), "!"]
    look = lambda i: "Look: " + words(rng, rng.randint(1, 30)) + " " * (i % 2)
    prompts = ["", "a", "the sea is", *map(look, range(8))]
    cold, cached = llm.choose(prompts, choices), llm.choose(prompts[::-1], choices)[::-1]
    alone_ = [llm.choose(p, choices)[0] for p in prompts]
    for a, b, c in zip(cold, cached, alone_, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        for k in choices:
            assert a.token_logprobs[k] == near(b.token_logprobs[k])
            assert same(a.token_logprobs[k], c.token_logprobs[k], llm.backend)
    check(llm, cold)
    for p, o in zip(prompts[1:], cold[1:]):
        wholes = llm.logprobs([p + c for c in choices])
        start, n = o.prompt_token_ids, len(o.prompt_token_ids)
        assert [start + o.token_ids[c] for c in choices] == [w.token_ids for w in wholes]
        assert [*o.logprobs.values()] == near([sum(w.logprobs[n - 1 :]) for w in wholes], 1e-3)


def test_a_prompt_is_computed_once_whatever_its_choices():
    llm = an_llm(compile=False)
    heads = [[*range(40 + i, 130 + i)] for i in range(3)]
    tails = [[7], [8, 9], [8, 10, 11], [5] * 20]
    computed = []
    note = lambda engine, event, x: event == "schedule" and computed.append(x.num_tokens)
    llm.watchers.append(note)
    outs = llm.choose(heads, tails)
    assert sum(computed) == 3 * (90 + 2 + 3 + 20)
    check(llm, outs)
    computed.clear()
    llm.choose([h[:64] for h in heads], [[7], [9]])  # all but a last token is known by now
    assert sum(computed) == 3
    shared = [[*range(100, 180), t] for t in range(3, 13)]
    computed.clear()
    check(llm, llm.choose(shared, [[7], [8, 9]]))
    assert sum(computed) == 80 + 10 + 20, "what prompts share is computed once too"


@pytest.fixture(scope="module")
def smol():
    "The default model, whose tokenizer is the one at hand that has merges and a template."
    return LLM(dtype="fp32", max_num_seqs=8)


def test_tokens_that_melt_across_the_border(smol):
    tokens = lambda text: smol.tokenizer(text)["input_ids"]
    prompts = ["Answer: ", "The opposite of un", "A", "東京は日", "See https:"]
    choices = ["yes", "s", "happy", " no", "本です", "//x.org"]
    outs = smol.choose(prompts, choices)
    check(smol, outs, 1e-3)
    for p, o in zip(prompts, outs):
        for c, ids in o.token_ids.items():
            whole = tokens(p + c)
            assert (o.prompt_token_ids + ids)[-len(whole) :] == whole
    assert outs[0].prompt_token_ids == tokens("Answer:")
    a, b = smol.choose([prompts[1], tokens(prompts[1])], choices)
    assert a == b, "a prompt given as ids is the same prompt"


def test_conversations_and_ends(smol):
    tok, talk = smol.tokenizer, [dict(role="user", content="Name one city. Say only its name.")]
    cities = ["New", "New York", "Paris"]
    head = tok.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]
    for eos in smol.loaded.eos_ids:
        whole = [[*tok(c, add_special_tokens=False)["input_ids"], eos] for c in cities]
        [o], [ended] = (smol.choose([talk], of, chat=True) for of in (cities, whole))
        check(smol, [o, ended])
        assert o.prompt_token_ids == ended.prompt_token_ids == head
        for c, told, ids in zip(cities, ended.token_logprobs.values(), whole):
            assert o.token_ids[c] == ids[:-1] and told[:-1] == near(o.token_logprobs[c])
            assert told[-1] == near(alone(smol.model, head + ids)[-2, eos].item(), 1e-3)


def test_what_is_wrong_with_one_prompt_is_its_own_error(caplog):
    llm, why = an_llm(), {1: "no choices", 2: "choice 1 is empty", 3: "9999", 5: "tokens"}
    prompts = ["x", "y", "z", [5, 9999], "w", "long " * 3000]
    outs = llm.choose(prompts, [["a"], [], ["a", ""], ["b"], ["c", [7]], ["d"]])
    for i, o in enumerate(outs):
        if i in why:
            assert why[i] in o.error and o.error in repr(o)
            assert (o.best, o.logprobs, o.probabilities) == (None, {}, {})
        else:
            assert not o.error and repr(o.best) in repr(o)
    (said,) = [r.getMessage() for r in caplog.records if "failed" in r.getMessage()]
    assert said.startswith("4 of 6 requests") and "outputs[1]" in said and "outputs[5]" in said
    assert llm.choose([], ["a"]) == []
    assert list(outs[4].token_ids) == ["c", (7,)]


def test_a_conversation_in_a_dict_and_choices_in_arrays():
    llm, talk = an_llm(), [{"role": "user", "content": "Hi"}]
    [of_list] = llm.choose([talk], ["a", "b"], chat=True)
    for prompts in ([{"messages": talk}], {"messages": talk}):
        [of_dict] = llm.choose(prompts, ["a", "b"])
        assert same(vars(of_dict), vars(of_list), llm.backend)
    lists = [["a", "bc"], ["d"]]
    wanted = [vars(o) for o in llm.choose(["x", "y"], lists)]
    for arrays in ([np.array(c, dtype=object) for c in lists], np.array(lists, dtype=object)):
        assert same([vars(o) for o in llm.choose(["x", "y"], arrays)], wanted, llm.backend)


def test_an_empty_prompt_of_a_model_without_a_first_token(monkeypatch):
    none = raising(ModelError("this model has no BOS token"))
    encode = lambda tok, text, special=True: tok.encode(text, add_special_tokens=False)
    monkeypatch.setattr("batchlab.tasks.choices.start_token_id", none)
    monkeypatch.setattr("batchlab.tasks.choices.encode_text", encode)
    empty, a = an_llm().choose(["", "a"], ["b"])
    assert "no BOS" in empty.error and a.best == "b"


def test_requests_of_one_step_each_stay_in_memory():
    "All end in each step, and what the last one left is spared: never more than there may be."
    llm = an_llm(max_num_seqs=4)
    size, each = llm.backend.block_size, llm.limits.kv_bytes_per_token
    llm = an_llm(max_num_seqs=4, kv_cache_bytes=6 * size * each)
    most = 0
    for i in range(30):
        for k in range(4):
            llm.add_request([i + 3, k + 40, *range(3, 20)], dict(GREEDY, prompt_logprobs=0))
        while llm.has_unfinished:
            llm.step()
            pool = llm.engines["packed"].scheduler.pool
            check_pool(pool)
            most = max(most, len(pool) * size)
    assert most <= llm.engines.budget.limit < 8 * size and pool.evictions
    llm.reset_prefix_cache()
    assert not pool.recent


# lines, tables of the API, the command line


def test_a_line_and_a_command_ask_for_chosen_tokens_and_modes():
    from batchlab.cli import parse_args
    from batchlab.jobs.lines import parse_line

    asked = dict(logprob_token_ids=[5, 9], logprobs_mode="processed_logprobs")
    plain = lambda **more: parse_line(1, json.dumps(dict(prompt="p") | more).encode(), "plain")
    line = plain(**asked)
    assert (line.failure, line.options) == (None, asked)
    assert "prompt_logprob_start" in plain(prompt_logprob_start=2).failure[1]
    for mode in LOGPROBS_MODES:
        flags = ["generate", "x", "--logprobs-mode", mode, "--logprob-token-ids", "5"]
        assert parse_args(flags).logprobs_mode == mode


def test_answers_of_the_api_carry_chosen_tokens():
    from batchlab.jobs.schema import answer_body, text_logprobs

    def asked(ids):
        [out] = an_llm().generate([[5, 6, 7]], dict(GREEDY, max_tokens=2, logprob_token_ids=ids))
        return out, out.outputs[0]

    out, c = asked([70, 80])
    assert [len(d) for d in text_logprobs(c)["top_logprobs"]] == [len(d) for d in c.logprobs]
    for ids in ([70, 80], [c.token_ids[0]]):  # also where the sampled token is the one asked for
        out, c = asked(ids)
        told = answer_body(out, "chat", "1", "m")["choices"][0]["logprobs"]["content"]
        for step, d in zip(told, c.logprobs):
            assert [t["logprob"] for t in step["top_logprobs"]] == [d[i].logprob for i in ids]


def test_an_environments_fault_is_raised():
    with pytest.raises(ModelError, match="tokenizer"):
        LLM(tiny()).choose(["a"], ["b"])
    out = an_llm().choose(["a", "bad \ud800"], ["b"])
    assert not out[0].error
