"Log probabilities of what was asked about: modes, chosen tokens, prompts from a position on, and whole choices."
import functools, math, random

import pytest, torch
from batchlab.choices import choose
from batchlab.config import choose_limits
from batchlab.errors import ParamError
from batchlab.llm import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.sampling import SamplingParams, SamplingRow, processed_logits, sample
from batchlab.scheduler import check_invariants

GREEDY = dict(temperature=0, max_tokens=1)


@pytest.fixture(autouse=True)
def _one_thread(one_thread): pass


@functools.cache
def tiny(arch='llama'): return tiny_model(arch, seed=2)


def alone(model, ids):
    "The log probabilities `[n, V]` after each of `ids`, by transformers."
    with torch.inference_mode(): return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def by_hand(model, ids, start):
    "The log probability of each of `ids` from index `start` on."
    return alone(model, ids)[start - 1:-1].gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()


def told(out): return [d and d[t].logprob for d, t in zip(out.prompt_logprobs, out.prompt_token_ids)]


def rows_of(rng, n, shared=40): return [[*range(30, 30 + shared), *(rng.randrange(3, 259) for _ in range(rng.randint(1, 60)))] for _ in range(n)]


# modes


def test_modes_report_what_the_row_drew_from():
    torch.manual_seed(0)
    x, ids = torch.randn(5, 300), [5, 9, 33]
    settings = [dict(temperature=0), dict(seed=1), dict(seed=2, temperature=.5, top_k=4), dict(seed=3, top_p=.6, allowed_token_ids=[3, 5, 9, 33]),
                dict(temperature=0, repetition_penalty=1.5, logit_bias={7: 2.}, allowed_token_ids=[5, 7])]
    for mode in ('raw_logprobs', 'processed_logprobs', 'raw_logits', 'processed_logits'):
        rows = [SamplingRow.make(dict(s, logprobs=3, logprobs_mode=mode), ids) for s in settings]
        before = x.clone()
        got = sample(x, rows)
        assert torch.equal(x, before)
        plain = [SamplingRow.make(dict(s, temperature=1) if s.get('temperature') == 0 else s, ids) for s in settings]
        want = processed_logits(x, plain) if mode.startswith('processed') else x
        if mode.endswith('logprobs'): want = want.log_softmax(-1)
        for row, token, d in zip(want, got.token_ids, got.logprobs):
            assert next(iter(d)) == token
            for i, l in d.items():
                assert l.logprob == pytest.approx(row[i].item(), abs=1e-5)
                assert l.rank == 1 + int((row > row[i]).sum())
                assert l.logprob > -math.inf
        single = [sample(x[b:b + 1], [r]).logprobs[0] for b, r in enumerate(SamplingRow.make(r.params, ids) for r in rows)]
        assert single == got.logprobs, 'the same bits alone and in company'
    drawn = [sample(x, [SamplingRow.make(dict(s, logprobs_mode=m), ids) for s in settings]).token_ids for m in (None, 'processed_logits')]
    assert drawn[0] == drawn[1], 'what is reported changes nothing of what is drawn'


def test_the_llms_mode_holds_unless_a_request_has_its_own():
    llm = LLM(tiny(), tiny_tokenizer(), logprobs_mode='processed_logprobs')
    two = dict(GREEDY, allowed_token_ids=[50, 60], logprobs=2)
    [a], [b] = llm.generate([[5, 6, 7]], two), llm.generate([[5, 6, 7]], dict(two, logprobs_mode='raw_logprobs'))
    assert sum(math.exp(l.logprob) for l in a.outputs[0].logprobs[0].values()) == pytest.approx(1, abs=1e-5)
    lp = alone(tiny(), [5, 6, 7])[-1]
    t = b.outputs[0].token_ids[0]
    assert b.outputs[0].logprobs[0][t].logprob == pytest.approx(lp[t].item(), abs=1e-4)
    for bad in ('raw', 'processed', None, 1):
        with pytest.raises(ParamError, match='raw_logprobs.*processed_logits'): LLM(tiny(), logprobs_mode=bad)
    with pytest.raises(ParamError, match='logprobs_mode'): SamplingParams(logprobs_mode='logprobs')


def test_choices_held_to_a_grammar_are_likely_among_themselves():
    pytest.importorskip('llguidance')
    llm = LLM(tiny(), tiny_tokenizer(), logprobs_mode='processed_logprobs')
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=-1, structured_outputs=dict(choice=['yes', 'no']))
    for out in llm.generate(['Is it?', 'Really, is it so?'], params):
        first = {l.decoded_token: math.exp(l.logprob) for l in out.outputs[0].logprobs[0].values()}
        assert all('yes'.startswith(t) or 'no'.startswith(t) for t in first)
        assert sum(first.values()) == pytest.approx(1, abs=1e-5)


def test_verify_knows_the_mode():
    for mode in ('processed_logprobs', 'raw_logits', 'processed_logits'):
        llm = LLM(tiny(), tiny_tokenizer(), logprobs_mode=mode)
        outs = llm.generate([[5, 6, 7], [9] * 20], [dict(GREEDY, max_tokens=5, logprobs=1, repetition_penalty=1.3), dict(seed=1, temperature=.7, max_tokens=5, logprobs=0)])
        assert not llm.verify(outs, sample=2).divergences
        c = outs[0].outputs[0]
        c.logprobs[2][c.token_ids[2]].logprob += .5
        assert [d.what for d in llm.verify(outs, sample=2).divergences] == ['logprob']


# chosen tokens


def test_logprob_token_ids_are_exactly_those_and_the_sampled_one():
    llm, ids = LLM(tiny(), tiny_tokenizer()), [7, 250, 3]
    prompts = rows_of(random.Random(1), 6)
    each = [dict(GREEDY, logprob_token_ids=ids) if i % 2 else dict(GREEDY, max_tokens=3, logprobs=5, logprob_token_ids=ids[:i]) for i in range(6)]
    for i, out in enumerate(llm.generate(prompts, each)):
        c = out.outputs[0]
        lp = alone(tiny(), out.prompt_token_ids + c.token_ids)
        for t, (token, d) in enumerate(zip(c.token_ids, c.logprobs, strict=True)):
            if ids[:i] or i % 2: assert set(d) == {token, *(ids if i % 2 else ids[:i])}
            for j, l in d.items(): assert l.logprob == pytest.approx(lp[len(out.prompt_token_ids) - 1 + t, j].item(), abs=1e-4)
    out = llm.generate(prompts[0], dict(GREEDY, logprob_token_ids=[5, 99_999]))[0]
    assert 'logprob_token_ids has token ids [99999]' in out.error
    with pytest.raises(ParamError, match='logprob_token_ids must be a list'): SamplingParams(logprob_token_ids=7)


# prompts from a position on


WAYS = dict(auto={}, torch=dict(compile=False), small=dict(max_num_seqs=3, max_num_batched_tokens=7), uncached=dict(enable_prefix_caching=False),
            loop=dict(strategy='loop'), static=dict(strategy='static'), prefix=dict(strategy='prefix'), bucketed=dict(strategy='bucketed'))


@pytest.mark.parametrize('way', WAYS)
def test_prompt_logprobs_from_a_position_on(way):
    rng = random.Random(way)
    llm, prompts = LLM(tiny(), tiny_tokenizer(), **WAYS[way]), rows_of(rng, 12, 70)
    for _ in range(2):                                                 # cold, then cached
        starts = [rng.choice([0, len(p) - 1, rng.randrange(len(p)), 64, 63, 65]) for p in prompts]
        outs = llm.generate(prompts, [dict(GREEDY, max_tokens=rng.randint(1, 4), prompt_logprobs=2, prompt_logprob_start=s) for s in starts])
        for p, s, out in zip(prompts, starts, outs):
            assert not out.error and len(out.prompt_logprobs) == len(p)
            assert out.prompt_logprobs[:s + 1] == [None] * (s + 1)
            assert told(out)[s + 1:] == pytest.approx(by_hand(tiny(), p, s + 1), abs=1e-4)
            assert out.num_cached_tokens <= s
    if way in ('auto', 'torch'): assert max(o.num_cached_tokens - s for o, s in zip(outs, starts)) == 0, 'hits reach the position'


@pytest.mark.parametrize('arch', ['gemma2', 'mistral', 'bloom', 'gpt2'])
def test_other_models_too(arch):
    try: model = tiny(arch)
    except Exception: pytest.skip(f'no tiny {arch}')
    llm, prompts = LLM(model, tiny_tokenizer()), rows_of(random.Random(arch), 4, 30)
    for _ in range(2):
        for p, out in zip(prompts, llm.generate(prompts, dict(GREEDY, prompt_logprobs=0, prompt_logprob_start=29))):
            assert told(out)[30:] == pytest.approx(by_hand(model, p, 30), abs=1e-3)
    [o] = choose(llm, [prompts[0]], [[7], [8, 9], [8, 10, 11]])
    for c, ids in o.token_ids.items(): assert o.token_logprobs[c] == pytest.approx(by_hand(model, prompts[0] + ids, len(prompts[0])), abs=1e-3)


def test_a_hit_ends_before_the_position_and_is_shared_in_one_call():
    llm, head = LLM(tiny(), tiny_tokenizer(), compile=False), [*range(10, 110)]
    prompts = [head + [t, t + 1, t + 2] for t in range(20, 30)]
    outs = llm.generate(prompts, dict(GREEDY, prompt_logprobs=0, prompt_logprob_start=99))
    assert [o.num_cached_tokens for o in outs] == [0] + [99] * 9
    assert llm.ledger.useful == 103 + 9 * 4
    for p, o in zip(prompts, outs): assert told(o)[100:] == pytest.approx(by_hand(tiny(), p, 100), abs=1e-4)
    again = llm.generate(prompts[0], dict(GREEDY, prompt_logprobs=0))[0]
    assert again.num_cached_tokens == 0 and told(again)[1:] == pytest.approx(by_hand(tiny(), prompts[0], 1), abs=1e-4)


def test_preempted_while_its_prompt_is_told():
    "Chunks of a few tokens, blocks that run out, and a preemption in the middle of each prompt: nothing is told twice or left out."
    llm = LLM(tiny(), tiny_tokenizer(), compile=False)
    rng = random.Random(5)
    for case in range(6):
        llm.limits = choose_limits(tiny(), llm.shapes, max_num_seqs=3, max_num_batched_tokens=rng.randint(5, 30), kv_cache_bytes=256 * llm.limits.kv_bytes_per_token)
        llm.engines.configure()
        prompts, outs = rows_of(rng, 5), {}
        starts = [rng.randrange(len(p)) for p in prompts]
        for i, (p, s) in enumerate(zip(prompts, starts)):
            llm.add_request(p, dict(GREEDY, max_tokens=6, prompt_logprobs=0, prompt_logprob_start=s), lambda e, i=i: e.finished and outs.setdefault(i, e.output))
        steps, preempted = 0, 0
        while llm.has_unfinished:
            llm.step()
            s = llm.engines['packed'].scheduler
            if steps % 3 == 2 and s.running: s.preempt(rng.choice(s.running))
            preempted += steps % 3 == 2
            steps += 1
            assert steps < 2000
        assert s.num_preemptions > 0
        for i, out in outs.items(): assert told(out)[starts[i] + 1:] == pytest.approx(by_hand(tiny(), prompts[i], starts[i] + 1), abs=1e-4)


def test_the_scheduler_keeps_its_rules():
    llm = LLM(tiny(), tiny_tokenizer(), compile=False, max_num_seqs=4, max_num_batched_tokens=20)
    prompts = rows_of(random.Random(3), 8)
    llm.generate(prompts[0], GREEDY)
    scheduler = llm.engines['packed'].scheduler
    schedule, logits = scheduler.schedule, []

    def checked():
        plan = schedule()
        check_invariants(scheduler, plan)
        logits.extend(row.num_logits for row in plan.rows)
        return plan
    scheduler.schedule = checked
    llm.generate(prompts, [dict(GREEDY, prompt_logprobs=0, prompt_logprob_start=len(p) - 2) for p in prompts])
    assert sum(logits) == 2 * len(prompts), 'the logits of two positions each, and no more'


def test_a_start_is_checked():
    llm = LLM(tiny(), tiny_tokenizer())
    out = llm.generate([[5, 6, 7]], dict(GREEDY, prompt_logprobs=0, prompt_logprob_start=3))[0]
    assert 'prompt_logprob_start must be below 3' in out.error
    for bad in (-1, 1.5, 'a', None):
        with pytest.raises(ParamError, match='prompt_logprob_start'): SamplingParams(prompt_logprobs=0, prompt_logprob_start=bad)
    with pytest.raises(ParamError, match='none are asked for'): SamplingParams(prompt_logprob_start=2)
    with pytest.raises(ParamError, match='start'): llm.score([[5, 6]], start=0)


def test_score_from_a_token_on():
    llm, prompts = LLM(tiny(), tiny_tokenizer()), rows_of(random.Random(4), 5)
    whole, part = llm.score(prompts), llm.score(prompts, start=41)
    assert [s.logprobs[40:] for s in whole] == [pytest.approx(s.logprobs, abs=1e-5) for s in part]
    assert [len(s.logprobs) for s in whole] == [len(p) - 1 for p in prompts]


def test_only_the_first_of_several_answers_tells_of_the_prompt():
    llm, prompt = LLM(tiny(), tiny_tokenizer(), compile=False), [*range(10, 90)]
    [out] = llm.generate([prompt], SamplingParams(n=4, seed=1, max_tokens=3, prompt_logprobs=0))
    assert told(out)[1:] == pytest.approx(by_hand(tiny(), prompt, 1), abs=1e-4)
    assert llm.ledger.useful < 80 + 4 * 8, 'the others share it'
