"Beam search: the beams of transformers, whatever else runs, and nothing left behind when it breaks off."

import functools, gc, math, random

import pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

from batchlab import LLM, BeamSearchParams, SamplingParams
from batchlab.tasks.beam import BeamSearchInstance, BeamSearchOutput, rank
from batchlab.errors import ModelError, ParamError, PromptError, UnsupportedModelError
from batchlab.models import TINY_ARCHS, tiny_model, tiny_tokenizer
from batchlab.core.sampling import Logprob
from helpers import draws, in_threads, need_same_bits

ARCHS = (*TINY_ARCHS, "gemma2", "bloom")  # bloom runs padded
# end tokens: one, many, so that most beams meet one, none
ENDS = {1: [2], 30: [2, *range(40, 69)], 0: None}

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def model(arch, ends=1):
    m = tiny_model(arch, seed=4, **(dict(attn_implementation="eager") if arch == "gemma2" else {}))
    m.generation_config.eos_token_id = ENDS[ends]
    if not ENDS[ends]:
        m.config.eos_token_id = None
    return m


@functools.cache
def llm(arch="llama", ends=1, how=()):
    return LLM(model(arch, ends), **dict(how))


def beams(m, ids, width, n, **how):
    "What transformers' `generate` gives for one prompt with so many beams."
    x = torch.tensor([ids])
    usual = dict(attention_mask=torch.ones_like(x), do_sample=False, pad_token_id=0)
    number = dict(num_beams=width, num_return_sequences=width, max_new_tokens=n)
    return m.generate(x, **usual, **number, **how)


def hf(m, ids, width, n, penalty=1.0):
    "transformers' beams of one prompt and their scores, without what it pads them with; None for the scores of a greedy answer."
    how = dict(length_penalty=penalty, early_stopping=False)
    out = beams(m, ids, width, n, **how, return_dict_in_generate=True, output_scores=True)
    ends, seqs = m.generation_config.eos_token_id or [], out.sequences[:, len(ids) :].tolist()
    end = lambda s: next((i + 1 for i, t in enumerate(s) if t in ends), len(s))
    return [s[: end(s)] for s in seqs], out.sequences_scores.tolist() if width > 1 else None


def narrowest(m, ids, width, n, penalty):
    "The smallest difference by which a search of `m` chose between two beams or two answers."
    ends, gap = m.generation_config.eos_token_id or (), math.inf
    search = BeamSearchInstance(ids, width, n, ends, penalty)
    while search.running:
        with torch.no_grad():
            logits = m(torch.tensor([b.tokens for b in search.running])).logits[:, -1]
        scores = logits.float().log_softmax(-1).tolist()
        tops = [{t: Logprob(l) for t, l in enumerate(row)} for row in scores]
        ranked = rank([b.cum_logprob for b in search.running], tops)
        totals = [total for total, *_ in ranked[: 2 * search.num_logprobs]]
        search.advance(tops)
        ended = [s.score for s in search.finished]
        ended += [search.score(b.cum_logprob) for b in search.running[:1]]
        for xs in (totals, sorted(ended, reverse=True)):
            gap = min([gap, *(a - b for a, b in zip(xs, xs[1:]))])
    return gap


def check(m, ids, out, width, n, penalty=1.0):
    "`out` is what transformers finds, unless two beams are so near each other that rounding decides."
    assert out.error is None
    seqs, scores = hf(m, ids, width, n, penalty)
    if [s.output_ids for s in out.sequences] != seqs:
        assert narrowest(m, ids, width, n, penalty) < 1e-4, (out.sequences, seqs)
    elif scores:
        assert [s.score for s in out.sequences] == pytest.approx(scores, abs=1e-4, rel=1e-4)
    ends = m.generation_config.eos_token_id or []
    for s in out.sequences:
        assert s.tokens == ids + s.output_ids and len(s.logprobs) == len(s.output_ids) <= n
        own = [d[t].logprob for d, t in zip(s.logprobs, s.output_ids)]
        assert abs(sum(own) - s.cum_logprob) < 1e-6
        assert abs(s.score - s.cum_logprob / len(own) ** penalty) < 1e-9
        ended = ("stop", s.tokens[-1]) if s.tokens[-1] in ends else ("length", None)
        assert (s.finish_reason, s.stop_reason) == ended


HOW = [
    dict(compile=False),
    dict(max_num_seqs=3),
    dict(enable_prefix_caching=False),
    dict(max_num_batched_tokens=70, max_num_seqs=8),
    dict(kv_cache_bytes=2**20),
    dict(logprobs_mode="raw_logits"),
    *(dict(strategy=name) for name in ("static", "loop", "prefix")),
]
CASE = st.fixed_dictionaries(
    dict(
        arch=st.sampled_from(ARCHS),
        ends=st.sampled_from([*ENDS]),
        seed=st.integers(0, 999),
        num=st.integers(1, 4),
        width=st.integers(1, 5),
        n=st.integers(1, 12),
        penalty=st.sampled_from([1.0, 0.0, 2.0, 0.5, -1.0]),
        shared=st.sampled_from([0, 0, 20, 70]),
        limit=st.sampled_from([None, 1, 2]),
        how=st.sampled_from([(), *(tuple(how.items()) for how in HOW)]),
    )
)


@settings(max_examples=draws(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CASE)
def test_beams_are_those_of_transformers(case):
    rng, m = random.Random(case["seed"]), model(case["arch"], case["ends"])
    draw = lambda n: [rng.choice([*range(3, 40), *range(69, 259)]) for _ in range(n)]
    head = draw(case["shared"])
    prompts = [head + draw(rng.choice((1, 1, 3, 9, 20, 64))) for _ in range(case["num"])]
    params = BeamSearchParams(case["width"], case["n"], length_penalty=case["penalty"])
    own = llm(case["arch"], case["ends"], case["how"])
    outs = own.beam_search(prompts, params, concurrency_limit=case["limit"])
    for ids, out in zip(prompts, outs, strict=True):
        check(m, ids, out, case["width"], case["n"], case["penalty"])
    assert not own.has_unfinished


def test_end_tokens_can_be_ignored():
    ids, own = [9, 8, 7], llm(ends=30)
    [out] = own.beam_search(ids, BeamSearchParams(4, 12, ignore_eos=True))
    want = beams(own.model, ids, 4, 12, eos_token_id=999)
    assert [s.tokens for s in out.sequences] == want.tolist()
    assert {s.finish_reason for s in out.sequences} == {"length"}
    [out] = own.beam_search(ids, BeamSearchParams(4, 12))
    assert "stop" in {s.finish_reason for s in out.sequences}


@pytest.mark.parametrize("path", ["bf16", "int8"])
def test_beams_are_the_same_in_any_company(path):
    m = tiny_model("llama", seed=4)
    try:
        big = LLM(m.bfloat16()) if path == "bf16" else LLM(m, quantization="int8")
    except UnsupportedModelError:
        pytest.skip("this machine runs no int8")
    need_same_bits(big.backend)
    rng = random.Random(path)
    draw = lambda n: [rng.randrange(3, 259) for _ in range(n)]
    head = draw(70)
    prompts = [head[: rng.choice((0, 20, 70))] + draw(rng.choice((1, 3, 9, 30))) for _ in range(6)]
    p = BeamSearchParams(4, 12, length_penalty=0.5)
    said = lambda outs: [[(s.output_ids, s.cum_logprob) for s in o.sequences] for o in outs]
    together = said(big.beam_search(prompts, p))
    alone = [said(big.beam_search([ids], p, concurrency_limit=1))[0] for ids in prompts]
    big.reset_prefix_cache()
    with big:  # and while others are served
        other = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
        assert all(big.add_request(ids, other) for ids in prompts)
        busy = said(big.beam_search(prompts[::-1], p))[::-1]
    assert together == alone == busy


def test_a_fork_costs_one_position():
    "Every step takes one position a beam; all else comes from the cache, and steps are as many as tokens."
    own = LLM(model("llama", 0), max_num_seqs=16)
    prompts, k, n = [[*range(3, 33)], [*range(40, 140)]], 4, 10
    own.beam_search(prompts, BeamSearchParams(k, n))
    s = own.stats()
    computed = sum(map(len, prompts)) + len(prompts) * k * (n - 1)
    assert s.prompt_tokens - s.cached_tokens == computed
    assert (s.steps, s.recomputed, s.blocks_in_use) == (n, 0, 0)


# --- limits and forms of prompts


def test_at_the_limit_of_the_context():
    own = LLM(model("llama", 0), max_model_len=64)
    for left, n in ((1, 5), (3, 5), (3, None), (1, None)):
        ids = [*range(3, 3 + 64 - left)]
        check(own.model, ids, own.beam_search(ids, BeamSearchParams(3, n))[0], 3, left)
    long, short = own.beam_search([[*range(3, 67)], [5, 6]], BeamSearchParams(3, 4))
    assert long.sequences == [] and "shorten it to 63 tokens" in long.error
    assert short.error is None


def test_more_beams_than_slots_tokens_and_ids():
    m = model("llama", 0)
    check(m, [5, 6], LLM(m, max_num_seqs=2).beam_search([5, 6], BeamSearchParams(7, 4))[0], 7, 4)
    # there are 259 answers of one token
    [out] = llm(ends=0).beam_search([5, 6], BeamSearchParams(300, 1))
    assert len(out.sequences) == 259 and len({s.tokens[-1] for s in out.sequences}) == 259
    assert abs(sum(math.exp(s.cum_logprob) for s in out.sequences) - 1) < 1e-4


@functools.cache
def talker():
    return LLM(model("llama"), tiny_tokenizer())


def test_prompts_in_every_form():
    own, p, ids = talker(), BeamSearchParams(2, 5), tiny_tokenizer()("The sea")["input_ids"]
    want = [s.tokens for s in own.beam_search([ids], p)[0].sequences]
    talk = [dict(role="user", content="hi")]
    forms = dict(prompt="The sea"), dict(prompt_token_ids=ids), ["The sea"], [ids]
    for one in ("The sea", ids, tuple(ids), torch.tensor(ids), *forms):
        (out,) = own.beam_search(one, p)
        assert [s.tokens for s in out.sequences] == want and type(out) is BeamSearchOutput
    assert own.beam_search([], p) == []
    [chat] = own.beam_search({"messages": talk}, p)
    [same] = own.generate([{"messages": talk}], SamplingParams(max_tokens=1))
    assert chat.sequences[0].orig_prompt["prompt"] == same.prompt
    settings = dict(beam_width=2, max_tokens=5)
    assert own.beam_search("The sea", settings)[0].sequences[0].tokens == want[0]
    [named] = own.beam_search(prompts="The sea", params=p, lora_request=None)
    assert named.sequences[0].tokens == want[0]
    bad = own.beam_search(["The sea", 7, dict(prompt="x", temperature=0), [300], "", []], p)
    assert [o.error is None for o in bad] == [True, False, False, False, True, False]
    assert "temperature stands in a prompt" in bad[2].error and "300" in bad[3].error


def test_text_is_that_of_prompt_and_answer():
    m = tiny_model("llama", seed=4)
    m.generation_config.eos_token_id = ENDS[30]
    own, kept, cut = LLM(m, tiny_tokenizer()), 0, 0
    prompts = ["The sea", "A", "one two three"]
    with_end = own.beam_search(prompts, BeamSearchParams(4, 8, include_stop_str_in_output=True))
    for a, b in zip(own.beam_search(prompts, BeamSearchParams(4, 8)), with_end):
        for s, t in zip(a.sequences, b.sequences):
            assert s.tokens == t.tokens and t.text == own.tokenizer.decode(t.tokens)
            own_tokens = s.tokens[:-1] if s.finish_reason == "stop" else s.tokens
            assert s.text == own.tokenizer.decode(own_tokens)
            kept, cut = kept + (s.text == t.text), cut + (s.text != t.text)
    assert kept and cut
    [out] = llm().beam_search([[5, 6]], BeamSearchParams(2, 3))
    assert out.sequences[0].text is None and "[" in repr(out)


# --- what is refused


@pytest.mark.parametrize(
    "kw, words",
    [
        (dict(beam_width=0), "beam_width must be a whole number of at least 1, got 0"),
        (dict(beam_width=2.5), "beam_width"),
        (dict(beam_width=True), "beam_width"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(length_penalty=float("nan")), "length_penalty"),
        (dict(length_penalty=11), "length_penalty"),
        (dict(temperature=1), "temperature must be 0"),
        (dict(temperature=None), "temperature must be 0"),
        (dict(ignore_eos=None), "ignore_eos"),
        (dict(include_stop_str_in_output="x"), "include_stop_str_in_output"),
        (dict(top_k=3), "'top_k'"),
        (dict(beam_widht=3), "id you mean 'beam_width'"),
    ],
)
def test_settings_are_used_or_refused_by_name(kw, words):
    kw = dict(beam_width=2) | kw
    unknown = not kw.keys() <= BeamSearchParams.__dataclass_fields__.keys()
    for make, error in (
        (lambda: BeamSearchParams(**kw), TypeError if unknown else ParamError),
        (lambda: BeamSearchParams.of(kw), ParamError),
        (lambda: llm().beam_search([5], kw), ParamError),
    ):
        with pytest.raises(error, match=words):
            make()


def test_arguments_are_used_or_refused():
    p, b = BeamSearchParams(2, 2), llm().beam_search
    talk = [dict(role="user", content="hi")]
    for error, words, args, more in (
        (ParamError, "BeamSearchParams", [], {}),
        (ParamError, "BeamSearchParams", [SamplingParams()], {}),
        (ParamError, "beam_width", [dict(max_tokens=3)], {}),
        (ParamError, "concurrency_limit", [p], dict(concurrency_limit=0)),
        (ParamError, "concurrency_limit", [p], dict(concurrency_limit=1.5)),
        (ParamError, "use_tqdm", [p], dict(use_tqdm=3)),
        (ParamError, "lora_request", [p], dict(lora_request=7)),
        *((TypeError, key, [p], {key: p}) for key in ("beam_width", "params", "foo", "stop")),
    ):
        with pytest.raises(error, match=words):
            b([5], *args, **more)
    for prompts in (None, 7, [None], [talk]):
        with pytest.raises(PromptError):
            b(prompts, p)
    with pytest.raises(ModelError, match="tokenizer"):
        b(["text", "more"], p)
    outs = b(["text", [5, 6]], p)
    assert "tokenizer" in outs[0].error and outs[1].error is None
    endless = LLM(tiny_model("bloom"))
    if endless.max_model_len is None:
        assert "give max_tokens" in endless.beam_search([5], BeamSearchParams(2, None))[0].error


# --- what can break off


def still_works(own):
    s = own.stats()
    assert not own.has_unfinished and s.blocks_in_use == s.running == s.waiting == 0
    check(own.model, [9, 8, 7], own.beam_search([9, 8, 7], BeamSearchParams(3, 5))[0], 3, 5)


def test_an_interrupt_leaves_nothing_behind():
    own, steps = LLM(model("llama")), []

    def watch(engine, event, x):
        if event == "forward" and (steps.append(event) or len(steps) == 3):
            raise KeyboardInterrupt

    own.watchers.append(watch)
    with pytest.raises(KeyboardInterrupt):
        own.beam_search([[5, 6], [7] * 30], BeamSearchParams(4, 8))
    own.watchers.remove(watch)
    still_works(own)


def test_a_beam_that_fails_fails_its_prompt_alone():
    own = LLM(model("llama", 0), compile=False, max_num_seqs=8)
    good, bad = [9, 8, 7], [13, 14, 15]
    p, want = BeamSearchParams(3, 6), own.beam_search([good], BeamSearchParams(3, 6))[0]

    def cancel(_, event, r):  # somebody ends a beam of the second prompt
        if event == "queued" and r.prompt_ids[:3] == bad and len(r.prompt_ids) == 5:
            own.cancel(r.request_id)

    own.watchers.append(cancel)
    outs = own.beam_search([good, bad], p)
    own.watchers.remove(cancel)
    assert outs[1].sequences == [] and outs[1].error == "a beam has ended: cancelled"
    assert [s.tokens for s in outs[0].sequences] == [s.tokens for s in want.sequences]
    still_works(own)


def test_logits_that_are_no_numbers_are_an_error():
    own = LLM(tiny_model("llama"), compile=False)
    own.model.lm_head.weight.data[7] = math.nan
    (out,) = own.beam_search([5, 6], BeamSearchParams(2, 4))
    assert out.sequences == [] and "not finite" in out.error and not own.has_unfinished
    assert "error" in repr(out) and out.rows()[0]["error"] == out.error


def test_memory_that_is_too_small_is_an_error():
    own = LLM(model("llama", 0), kv_cache_bytes=64 * 10 * 256 * 2, max_model_len=250)
    size = own.limits.kv_tokens
    for ids in ([5] * 30, [5] * 200):
        check(own.model, ids, own.beam_search([ids], BeamSearchParams(4, 12))[0], 4, 12)
    assert size is not None and own.stats().kv_bytes <= own.limits.kv_bytes


def test_in_the_background_from_several_threads():
    own, prompts = LLM(model("llama")), [[5, 6], [7] * 30, [9, 8, 7], [11]]
    pairs = [*zip(prompts, prompts[-1:] + prompts)]
    job = lambda pair: lambda: own.beam_search(list(pair), BeamSearchParams(3, 6))
    with own:
        found = in_threads(*map(job, pairs))
    for pair, outs in zip(pairs, found):
        for ids, out in zip(pair, outs, strict=True):
            check(own.model, ids, out, 3, 6)
    assert not own.has_unfinished


def test_nothing_is_held_afterwards():
    own = llm()
    own.beam_search([[5, 6]], BeamSearchParams(3, 4))
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is BeamSearchInstance]


# --- what it looks like


def test_results_print_and_make_tables():
    pytest.importorskip("pandas", reason="needs pandas: pip install '.[dev]'")
    outs = talker().beam_search(["The sea", "x" * 999, "A"], BeamSearchParams(3, 4))
    assert "1 failed" in repr(outs) and outs[1].error[:30] in repr(outs)
    assert outs[1].error[:30] in outs._repr_html_()
    frame = outs.to_pandas()
    assert [*frame.index] == [0, 0, 0, 1, 2, 2, 2] and [*frame["rank"][:3]] == [0, 1, 2]
    scores = frame["score"][[0, 2]].groupby(level=0)
    assert scores.apply(lambda s: s.is_monotonic_decreasing).all()
    assert outs[0].num_tokens == sum(len(s.output_ids) for s in outs[0].sequences)


# --- the search alone


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 9999), st.integers(2, 4), st.integers(1, 5), st.sampled_from([0.0, 1.0, 0.5]))
def test_a_width_without_limit_finds_the_likeliest_answer(seed, ids, n, penalty):
    "With as many beams as there are answers nothing is ever dropped: the search is exhaustive."
    rng = random.Random(seed)
    table = {}

    def top(tokens):
        if tokens not in table:
            weights = [rng.random() + 0.01 for _ in range(ids)]
            table[tokens] = {i: Logprob(math.log(w / sum(weights))) for i, w in enumerate(weights)}
        return table[tokens]

    def answers(tokens, total):
        for i, l in top(tokens).items():
            if i == 0 or len(tokens) == n - 1:
                yield [*tokens, i], (total + l.logprob) / (len(tokens) + 1) ** penalty
            else:
                yield from answers((*tokens, i), total + l.logprob)

    search = BeamSearchInstance([99], ids**n, n, (0,), penalty)
    while search.running:
        search.advance([top(tuple(b.output_ids)) for b in search.running])
    want = sorted(answers((), 0.0), key=lambda a: -a[1])
    scores = [s.score for s in search.finished]
    assert scores == pytest.approx([score for _, score in want], rel=0, abs=1e-9)
    assert search.finished[0].output_ids == want[0][0]
