"Speculation: the same tokens as without, to the bit, whatever is drafted; and drafts only where they pay."

import itertools, logging, random
from types import SimpleNamespace

import pytest, torch

from batchlab import LLM, SamplingParams
from batchlab.core.generation import Generation
from batchlab.core.request import Request, Row, StepPlan
from batchlab.core.sampling import SamplingRow
from batchlab.core.scheduler import Scheduler
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.models.tiny import tiny_adapter
from batchlab.view.tracefile import Trace
from batchlab.tasks.thinking import Marks, ThoughtMask
from batchlab.tasks.speculation import (
    INDEXED,
    Lookup,
    NgramTable,
    Rate,
    StepTimes,
    TextPool,
    num_worth,
)
from helpers import drain, generated, greedy, ids, json_lines, oracle, raising
from invariants import check_invariants

WAYS = dict(
    kernels={},
    torch=dict(compile=False),
    int8=dict(quantization="int8"),
    w4a8=dict(quantization="w4a8"),
)


class Drawn(Lookup):
    "Drafts what `answers` have next, by prompt and index, some of it changed at random."

    def __init__(self, answers, seed, right=0.8, vocab=259):
        super().__init__(always=True)
        self.answers, self.rng, self.right, self.vocab = answers, random.Random(seed), right, vocab

    def draft_ids(self, request, most):
        if not isinstance(request.task, Generation):
            return []
        known = self.answers.get((tuple(request.prompt_ids), request.index), [])
        n, at = self.rng.randint(0, min(most, 9)), len(request.output_ids)
        told = [*known[at : at + n], *self.rng.choices(range(3, self.vocab), k=n)][:n]
        return [
            t if self.rng.random() < self.right else self.rng.randrange(self.vocab) for t in told
        ]


def checked(llm):
    "Check at each step of `llm` what must hold of its scheduler."

    def watch(engine, event, x):
        if event == "schedule":
            check_invariants(engine.scheduler, x)

    llm.watchers.append(watch)
    return llm


# Settings of any kind that sampling knows; the last are held to a form.
KINDS = r"""
{"temperature": 0}
{"temperature": 0, "logprobs": 2}
{"temperature": 0, "ignore_eos": true, "prompt_logprobs": 1}
{"temperature": 1.2}
{"temperature": 1.2, "top_p": 0.9, "logprobs": 1, "ignore_eos": true}
{"temperature": 0.9, "top_k": 20, "n": 2}
{"temperature": 0, "frequency_penalty": 0.8, "presence_penalty": 0.3}
{"temperature": 1, "repetition_penalty": 1.3, "min_tokens": 4}
{"temperature": 0, "bad_words": [[5, 6], [7]], "logit_bias": {"9": 2.0}}
{"temperature": 1, "stop": ["e", "th"], "logprobs": 0}
{"temperature": 0, "stop_token_ids": [40, 43, 46, 49, 52, 55, 58], "logprobs": 1}
{"temperature": 1, "logprobs": 2, "logprobs_mode": "processed_logprobs", "min_p": 0.1}
{"temperature": 0, "structured_outputs": {"json": {"enum": ["red", "green", 99]}}}
{"temperature": 1, "structured_outputs": {"json": {"enum": ["red", "green", 99]}}, "logprobs": 1}
{"temperature": 1, "structured_outputs": {"regex": "(ab|cd){2,9}!"}}
"""
MANY_ENDS = dict(min_tokens=5, stop_token_ids=[*range(3, 200)])
ALL_KINDS = [*json_lines(KINDS), *(MANY_ENDS | dict(temperature=t) for t in (0, 1))]


def drawn_params(rng):
    "Settings of a request, of any kind."
    kind, n = rng.choice(ALL_KINDS), rng.choice((1, 4, 12, 24))
    least = min(n, kind.get("min_tokens", 0))
    return SamplingParams(**kind | dict(seed=rng.randrange(99), max_tokens=n, min_tokens=least))


def seen(out):
    "All that a user sees of an answer that depends on the model."
    each = [
        (c.token_ids, c.text, c.logprobs, c.finish_reason, c.stop_reason, c.cumulative_logprob)
        for c in out.outputs
    ]
    return each, out.prompt_logprobs, out.error


def drawn_prompts(rng, n):
    head = [rng.randrange(3, 259) for _ in range(40)]
    return [
        head[: rng.choice((0, 7, 33))] + [rng.randrange(3, 259) for _ in range(rng.randint(1, 30))]
        for _ in range(n)
    ]


def known(prompts, answers):
    "The tokens of each answer, by prompt and index."
    return {(tuple(p), 0): list(tokens) for p, tokens in zip(prompts, answers, strict=True)}


def answers_of(outs):
    return {
        (tuple(o.prompt_token_ids), c.index): list(c.token_ids) for o in outs for c in o.outputs
    }


def drafted(llm):
    "How many tokens `llm` drafted, and how many of them were wrong."
    past, now = llm.engines.past_ledger, llm.ledger
    return past.drafted + now.drafted, past.rejected + now.rejected


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_all_that_is_seen_is_the_same(arch, way, dtype):
    "To the bit on kernels: log probabilities are compared as they are."
    model = tiny_model(arch, seed=5).to(dict(fp32=torch.float32, bf16=torch.bfloat16)[dtype])
    plain = LLM(model, tiny_tokenizer(), enable_prefix_caching=False, **WAYS[way])
    exact = plain.backend.batch_invariant
    if not exact and dtype == "bf16":
        pytest.skip("wider steps round differently here, and speculation is off")
    rng = random.Random(f"{arch} {way} {dtype}")
    prompts = drawn_prompts(rng, 24)
    params = [drawn_params(rng) for _ in prompts]
    outs = plain.generate(prompts, params)
    for how in (dict(), dict(max_num_seqs=4, max_num_batched_tokens=24, kv_cache_bytes=2**17)):
        llm = LLM(model, tiny_tokenizer(), speculation="lookup", **WAYS[way], **how)
        assert llm.engines.proposer is not None
        llm.engines.proposer = Drawn(answers_of(outs), 1)
        got = checked(llm).generate(prompts, params)
        for a, b in zip(outs, got):
            if exact:
                assert seen(a) == seen(b), a.params
            else:
                assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        n, wrong = drafted(llm)
        assert 0 < wrong < n, (n, wrong)


FREE = dict(temperature=0, min_tokens=0, stop_token_ids=[])


@pytest.mark.parametrize(
    "more",
    [
        dict(temperature=0),
        dict(temperature=1, seed=3),
        FREE | dict(presence_penalty=2.0),
        FREE | dict(frequency_penalty=2.0),
    ],
)
def test_rows_that_are_steered_at_first(more):
    "Right drafts for rows that may not end yet, or whose first token is steered by none, alone and among others."
    llm = LLM(tiny_model("llama", seed=1), tiny_tokenizer(), compile=False)
    drafting = LLM(llm.model, llm.tokenizer, compile=False, speculation="lookup")
    ends = dict(stop_token_ids=[*range(3, 200)], max_tokens=12)
    params = [SamplingParams(**dict(min_tokens=k, **ends) | more) for k in range(9)]
    prompts = [[10 + k] for k in range(9)]
    outs = llm.generate(prompts, params)
    drafting.engines.proposer = Drawn(answers_of(outs), 1, right=1.0)
    for some in ([4], [*range(9)], [*range(8, -1, -1)]):
        got = drafting.generate([prompts[i] for i in some], [params[i] for i in some])
        assert ids(got) == [ids(outs)[i] for i in some]
    assert drafting.stats().accepted_tokens > 0


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3_moe", "gemma2", "gpt_oss"])
def test_as_the_oracle_and_generate(arch):
    eager = dict(attn_implementation="eager") if arch == "gemma2" else {}
    model, prompts = tiny_model(arch, seed=4, **eager), drawn_prompts(random.Random(arch), 5)
    want = oracle(model, prompts, 20)
    assert want == [generated(model, p, 20) for p in prompts]
    llm = LLM(model, speculation="lookup", max_num_seqs=3)
    llm.engines.proposer = Drawn(known(prompts, want), 2)
    assert ids(checked(llm).generate(prompts, greedy(20))) == want
    assert drafted(llm)[0] > 0


@pytest.mark.parametrize("way", WAYS)
def test_what_it_looks_up_is_the_same_too(way):
    "Answers that repeat themselves, twice over, so that the pool has them; by the policy's own count."
    model = tiny_model("llama", seed=5)
    rng = random.Random(way)
    prompts = drawn_prompts(rng, 8)
    params = [
        SamplingParams(max_tokens=40, temperature=(i % 3) * 0.3, seed=i, ignore_eos=True)
        for i in range(8)
    ]
    plain = LLM(model, tiny_tokenizer(), **WAYS[way])
    want = [seen(o) for o in plain.generate(prompts, params)]
    llm = checked(LLM(model, tiny_tokenizer(), speculation="lookup", **WAYS[way]))
    for always in (True, True, False):
        llm.engines.proposer.always = always
        got = llm.generate(prompts, params)
        assert [seen(o) for o in got] == want
    stats = llm.stats()
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens, stats
    assert not llm.engines.proposer.histories, "requests that ended are still known"
    assert stats.recomputed == 0


def test_rejected_drafts_leave_blocks_as_they_were():
    "What others find of a request is what it wrote, and a draft's block goes back."
    model = tiny_model("llama", seed=5)
    plain = LLM(model, enable_prefix_caching=False)
    llm = checked(LLM(model, speculation="lookup"))
    prompt = [*range(5, 60)]
    [want] = ids(plain.generate([prompt], greedy(30)))
    llm.engines.proposer = Drawn(known([prompt], [want]), 3, right=0.4)
    assert ids(llm.generate([prompt], greedy(30))) == [want]
    longer = [prompt + want[:-1], prompt + want[:20] + [7, 8, 9]]
    found = llm.generate(longer, greedy(9))
    assert ids(found) == ids(plain.generate(longer, greedy(9)))
    assert [o.num_cached_tokens for o in found] == [len(longer[0]) - 1, len(prompt) + 20]


def test_little_memory_preempts_as_without():
    model = tiny_model("llama", seed=5)
    rng = random.Random(8)
    prompts = drawn_prompts(rng, 8)
    plain = LLM(model, enable_prefix_caching=False)
    want = ids(plain.generate(prompts, greedy(120)))
    llm = checked(LLM(model, speculation="lookup", kv_cache_bytes=2**18))
    llm.engines.proposer = Drawn(known(prompts, want), 4)
    assert ids(llm.generate(prompts, greedy(120))) == want
    stats = llm.stats()
    assert stats.preemptions and stats.drafted_tokens, stats


def test_cancelled_and_streamed():
    "What a stream gives are the tokens, several at once; who is cancelled takes nobody along."
    model = tiny_model("llama", seed=5)
    rng = random.Random(9)
    prompts = drawn_prompts(rng, 4)
    params = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    plain = LLM(model, tiny_tokenizer())
    outs = plain.generate(prompts, params)
    llm = checked(LLM(model, tiny_tokenizer(), speculation="lookup"))
    llm.engines.proposer = Drawn(answers_of(outs), 5, right=0.9)
    got, sizes = [[] for _ in prompts], set()
    ask = lambda p, told: llm.add_request(p, params, lambda e: told.extend(e.token_ids))
    names = [*map(ask, prompts, got)]
    for _ in range(3):
        llm.step()
        sizes.add(tuple(map(len, got)))
    llm.cancel(names[1])
    drain(llm)
    want = ids(outs)
    assert got[0] == want[0] and got[2:] == want[2:]
    assert got[1] == want[1][: len(got[1])] and len(got[1]) < 40
    assert max(max(s) for s in sizes) > 3, "no step gave several tokens"


def test_a_step_that_breaks_off_keeps_seeds():
    "After an error in the middle of a step the seeded tokens are those that they would have been."
    model = tiny_model("llama", seed=5)
    prompts = drawn_prompts(random.Random(10), 3)
    params = SamplingParams(temperature=1.1, seed=3, max_tokens=30, ignore_eos=True)
    outs = LLM(model, tiny_tokenizer()).generate(prompts, params)
    llm = LLM(model, tiny_tokenizer(), speculation="lookup")
    llm.engines.proposer = Drawn(answers_of(outs), 6)
    count = itertools.count()

    def watch(engine, event, x):
        if event == "sample" and next(count) == 4:
            raise MemoryError("not enough memory")

    llm.watchers.append(watch)
    assert ids(llm.generate(prompts, params)) == ids(outs)
    assert next(count) > 4


def test_forms_need_fewer_steps():
    "What a grammar leaves no choice about comes several tokens a step."
    model = tiny_model("llama", seed=5)
    fields = dict(
        type="object",
        properties={
            name: dict(enum=["small", "large"]) for name in ("first field", "second field")
        },
        required=["first field", "second field"],
    )
    how = dict(json=fields, disable_any_whitespace=True)
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=90, structured_outputs=how) for t in (0, 1)
    ]
    prompts = [[5, 6, 7], [8, 9]]
    plain, llm = (LLM(model, tiny_tokenizer(), speculation=s) for s in (None, "lookup"))
    want = [seen(o) for o in plain.generate(prompts, params)]
    llm.engines.proposer.always = True
    assert [seen(o) for o in llm.generate(prompts, params)] == want
    assert llm.stats().steps < 0.7 * plain.stats().steps, (llm.stats(), plain.stats())


def test_drafts_are_held_to_the_budget():
    "Prompts go first, and nobody waits for a draft's sake."
    many, ignore = SimpleNamespace(draft_ids=lambda request, most: [1] * most), lambda *_: None
    many.begin = many.taken = many.note = ignore
    s = Scheduler(4, 16, proposer=many)
    for i in range(4):
        s.add(Request(str(i), [3] * (5 + i), max_tokens=40))
    while s.has_unfinished:
        plan = s.schedule()
        check_invariants(s, plan)
        s.update(plan)
        if not any(row.n_tokens - len(row.draft_ids) > 1 for row in plan.rows):
            break
    assert plan.num_tokens == 16 and sum(len(row.draft_ids) for row in plan.rows) == 12


def test_tables_find_the_latest():
    table = NgramTable(2)
    table.extend([1, 2, 3, 1, 2, 4, 1])
    assert table.after([1, 2], 9) == [4, 1] and table.after([9, 1, 2], 1) == [4]
    assert table.after([4, 1], 3) == [] and table.after([2], 3) == []
    table.extend([2])
    assert table.after(table.ids, 3) == [4, 1, 2]
    pool = TextPool(2, size=6)
    pool.add([5, 6, 7, 8])
    assert pool.after([5, 6], 9) == [7, 8] and pool.after([7, 8], 9) == []
    pool.add([5, 6, 9, 9])
    assert pool.after([5, 6], 9) == [9, 9]
    for i in range(100):
        pool.add([i, i + 1, i + 2, i + 3])
    assert len(pool.new.ids) + len(pool.old.ids) <= 4 * 6
    assert pool.after([99, 100], 1) == [101] and pool.after([5, 6], 1) == []


def known_times(widths, seconds, rounds=40):
    "The times of a machine where a step of n positions takes `seconds(n)`."
    times, rng = StepTimes(), random.Random(0)
    for _ in range(rounds):
        for n in widths:
            times.note(n, seconds(n) * rng.uniform(0.95, 1.05))
    return times


def test_few_drafts_where_they_cost_much():
    times = known_times((1, 2, 4, 8, 16, 32, 64), lambda n: 10 + n)
    assert all(times.seconds(n) == pytest.approx(10 + n, rel=0.15) for n in range(1, 65))
    counts = [num_worth(p, 1, 1, times)[0] for p in (0.01, 0.3, 0.6, 0.9)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 16, counts
    each = [num_worth(0.8, n, n, times)[0] for n in (1, 2, 8, 32, 64)]
    assert each == sorted(each, reverse=True) and each[-1] == 0, each
    # where a step of 2 to 4 is slower than one of 8, drafts are many or none
    odd = known_times((1, 2, 4, 8, 16), lambda n: {1: 36, 2: 43, 4: 52, 8: 40, 16: 42}[n])
    assert num_worth(0.3, 1, 1, odd)[0] >= 5 and num_worth(0.3, 1, 1, odd, 3)[0] <= 1
    late = known_times((1, 16), lambda n: 10)
    late.note(16, 1000)
    assert late.seconds(16) < 12, "one late step counts little"
    for _ in range(2000):
        late.note(1, 20)
    assert late.seconds(16) > 20, "what is known of other widths fades"


def test_rates_follow_the_latest():
    rate = Rate()
    assert rate.chance(0.4) == 0.4
    for _ in range(20):
        rate.note(4, 4)
    assert rate.chance(0.4) > 0.9
    for _ in range(9):
        rate.note(4, 0)
    assert rate.chance(0.4) < 0.4


def test_full_batches_have_none():
    "Where a position costs as much as it gives, nothing is drafted, however well it goes."
    llm = LLM(tiny_model("llama"), speculation="lookup")
    p = llm.engines.proposer
    for n in (1, 2, 4, 8, 16, 32):
        for _ in range(20):
            p.times.note(n, 2.0 + n)
    request = Request("0", [1, 2, 3, 4, 1, 2, 3], max_tokens=30)
    request.task = Generation.__new__(Generation)
    request.task.row = SamplingRow.make(SamplingParams(), request.prompt_ids)
    row = Row(request, 6, 1)
    p.usual["own"] = Rate(good=9, seen=9)
    p.begin(StepPlan([row]))
    assert p.draft_ids(request, 9) == [4, 1, 2, 3]
    assert p.positions == 1, "what the step has no room for counts for nothing"
    p.taken(request, 4)
    assert p.positions == 5
    known = dict(p.times.points)
    p.timed(1.0)
    assert p.times.points == known, "a step that broke off says nothing of times"
    p.begin(StepPlan([row] * 60))
    assert p.draft_ids(request, 9) == []
    p.begin(StepPlan([row] * 64))
    p.always = True
    assert p.draft_ids(request, 9) == []


def test_off_where_tokens_might_change(caplog, monkeypatch):
    "One line says so. Nothing is drafted by models that write nothing, or not packed."
    model = tiny_model("llama").bfloat16()
    with caplog.at_level(logging.WARNING, logger="batchlab"):
        llm = LLM(model, compile=False, speculation="lookup")
    said = [r.getMessage() for r in caplog.records if "speculation" in r.getMessage()]
    assert llm.engines.proposer is None and len(said) == 1 and "torch backend" in said[0]
    llm.generate([[1, 2, 1, 2, 1, 2]], greedy(9))
    assert llm.stats().drafted_tokens == 0


def test_a_request_may_do_without():
    llm = LLM(tiny_model("llama", seed=5), speculation="lookup")
    llm.engines.proposer.always = True
    prompts = [[5, 6, 7, 8]] * 2
    llm.generate(prompts, greedy(20))  # so that the pool has it
    before = llm.stats().accepted_tokens
    off, on = llm.generate(prompts, [greedy(20, speculate=False), greedy(20)])
    assert off.outputs[0].token_ids == on.outputs[0].token_ids
    assert "num_drafted_tokens" not in off.metrics and on.metrics["num_drafted_tokens"] > 0
    assert on.metrics["num_accepted_tokens"] == llm.stats().accepted_tokens - before > 0


def test_adapters_and_traces(tmp_path):
    "Rows with adapters are checked as others are; a trace shows their drafts as positions of the step."
    model = tiny_model("llama", seed=5)
    folder = tiny_adapter(tmp_path / "a", model)
    plain = LLM(model, lora_modules=[f"a={folder}"])
    llm = checked(LLM(model, lora_modules=[f"a={folder}"], speculation="lookup", trace=True))
    prompts = drawn_prompts(random.Random(3), 4)
    names = [None, "a", None, "a"]
    want = ids(plain.generate(prompts, greedy(20), lora_request=names))
    assert want != ids(plain.generate(prompts, greedy(20)))
    llm.engines.proposer = Drawn(known(prompts, want), 7)
    got = ids(llm.generate(prompts, greedy(20), lora_request=names))
    assert got == want and drafted(llm)[0] > 0
    trace = llm.recorder
    assert vars(trace.ledger) == vars(llm.ledger) and trace.totals["output_tokens"] == 80
    trace.save(tmp_path / "t.json")
    assert Trace.load(tmp_path / "t.json").ledger == trace.ledger


def test_what_a_thought_leaves_to_its_grammar():
    "Nothing is forced in a thought, and anything may follow; behind it the grammar sees the answer alone."
    abc = SimpleNamespace(
        forced=lambda output_ids: [output_ids, 7],
        fitting=lambda output_ids, ids: len(output_ids),
        mask_=lambda x, output_ids: x,
    )
    mask = ThoughtMask(Marks(1, 2), "start", None, abc, [0])
    assert mask.forced([1, 5]) == [] and mask.fitting([1, 5], [8, 9]) == 2
    assert mask.forced([1, 5, 2, 6]) == [[6], 7] and mask.fitting([1, 5, 2, 6], [8, 9]) == 1
    assert mask.forced([6, 4]) == [[6, 4], 7]
    free = ThoughtMask(Marks(1, 2), "start", 9, None, [0])
    assert free.forced([3]) == [] and free.fitting([3], [8, 9]) == 2


@pytest.mark.parametrize("where", ["begin", "draft_ids", "taken", "note", "timed"])
def test_a_proposer_that_fails_costs_guesses_alone(where, caplog):
    "Wherever it fails: the same tokens, and one line."
    model, prompts = tiny_model("llama", seed=5), drawn_prompts(random.Random(3), 4)
    outs, llm = LLM(model).generate(prompts, greedy(12)), LLM(model, speculation="lookup")
    llm.engines.proposer = Drawn(answers_of(outs), 1)
    setattr(llm.engines.proposer, where, raising(ValueError(f"no {where}")))
    assert ids(checked(llm).generate(prompts, greedy(12))) == ids(outs)
    assert caplog.text.count("speculation failed") == 1
    assert bool(drafted(llm)[0]) == (where in ("taken", "note", "timed"))


def test_counts_and_records_are_of_the_tokens_that_came():
    "A stop string in the middle drops the rest: all who count agree; and pieces belong to tokens."
    model, prompts = tiny_model("llama", seed=5), drawn_prompts(random.Random(4), 8)
    how = dict(temperature=1, ignore_eos=True, max_tokens=30)
    params = [SamplingParams(seed=i, stop=["e", "t"] * (i % 2), **how) for i in range(8)]
    free = [SamplingParams(seed=i, **how) for i in range(8)]
    plain, llm = (LLM(model, tiny_tokenizer(), speculation=s) for s in (None, "lookup"))
    llm.engines.proposer = Drawn(answers_of(plain.generate(prompts, free)), 1, 1.0)
    pieces = []
    for each in (plain, llm):
        with each.trace() as trace:
            outs = each.generate(prompts, params)
        pieces.append([r["pieces"] for r in trace.requests])
        assert trace.request_log.made == sum(len(c.token_ids) for o in outs for c in o.outputs)
    assert pieces[0] == pieces[1]
    n, wrong = drafted(llm)
    total = lambda name: sum(o.metrics.get(name, 0) for o in outs)
    assert 0 < total("num_accepted_tokens") == n - wrong < n == total("num_drafted_tokens")
    at = trace.header["row"].index("drafts")
    assert sum(row[at] for s in trace.steps for row in s["rows"]) == n


def test_a_long_prompt_is_looked_at_over_several_steps():
    request, p = Request("0", [*range(INDEXED + 50)], max_tokens=9), Lookup()
    p.begin(StepPlan())
    assert len(p.history(request).text.ids) == INDEXED
    assert len(p.history(request).text.ids) == INDEXED, "twice in one step"
    p.begin(StepPlan())
    assert len(p.history(request).text.ids) == INDEXED + 50
