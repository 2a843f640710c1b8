"A draft model: the same tokens as without, to the bit, whichever model drafts; and what it may take."

import copy, random

import pytest, torch

from batchlab.api import LLM
from batchlab.core.params import SamplingParams
from batchlab.api.unloaded import UnloadedLLM
from batchlab.errors import ParamError
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.models.tiny import tiny_adapter
from batchlab.tasks.speculation import StepTimes, TimeAccount, rounds_worth
from helpers import generated, greedy, ids, oracle
from test_encoders import encoder
from test_speculation import WAYS, checked, drafted, drawn_params, drawn_prompts, seen


def perturbed(model, by=0.05):
    "A copy of `model` whose weights are a little off."
    other, gen = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for p in other.parameters():
        p.data += (by * p.abs().mean() * torch.randn(p.shape, generator=gen)).to(p.dtype)
    return other


def drafters(model):
    "Models that draft for `model`: nearly the same, another, itself, and one of another family."
    return dict(
        near=perturbed(model),
        another=tiny_model("llama", seed=77),
        itself=copy.deepcopy(model),
        gpt2=tiny_model("gpt2", seed=3, num_hidden_layers=1),
    )


def drafting(model, small, **how):
    "An `LLM` that drafts whatever it costs, and is checked at each step."
    llm = checked(LLM(model, tiny_tokenizer(), speculation=small, **how))
    llm.proposer.always = True
    return llm


@pytest.mark.parametrize(
    "way, dtype", [*((way, "fp32") for way in WAYS), ("kernels", "bf16"), ("int8", "bf16")]
)
def test_all_that_is_seen_is_the_same(way, dtype):
    "Seeds, stop strings, grammars, log probabilities; few slots and little memory: as without, for any draft model."
    model = tiny_model("llama", seed=5).to(dict(fp32=torch.float32, bf16=torch.bfloat16)[dtype])
    plain = LLM(model, tiny_tokenizer(), enable_prefix_caching=False, **WAYS[way])
    exact = plain.backend.batch_invariant
    if not exact and dtype == "bf16":
        pytest.skip("no kernels: speculation is off in bf16")
    rng = random.Random(f"draft {way} {dtype}")
    prompts = drawn_prompts(rng, 16)
    params = [drawn_params(rng) for _ in prompts]
    outs = plain.generate(prompts, params, use_tqdm=False)
    small = dict(max_num_seqs=4, max_num_batched_tokens=24, kv_cache_bytes=2**17)
    hows = [dict(), small, small, dict()]
    for (name, draft), how in zip(drafters(model).items(), hows, strict=True):
        llm = drafting(model, draft, **WAYS[way], **how)
        got = llm.generate(prompts, params, use_tqdm=False)
        for a, b in zip(outs, got):
            if exact:
                assert seen(a) == seen(b), (name, a.params)
            else:
                assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        n, right = llm.stats().drafts["draft"]
        assert 0 <= right < n, (name, right, n)
        assert not llm.proposer.model.rows and not llm.proposer.model.pool.num_held


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma3"])
def test_as_the_oracle_and_generate(arch):
    model = tiny_model(arch, seed=4)
    prompts = drawn_prompts(random.Random(arch), 5)
    want = oracle(model, prompts, 20)
    assert want == [generated(model, p, 20) for p in prompts]
    for draft in (perturbed(model), tiny_model("llama", seed=77)):
        llm = drafting(model, draft, max_num_seqs=3)
        assert ids(llm.generate(prompts, greedy(20), use_tqdm=False)) == want
        assert drafted(llm)[0] > 0


def test_a_model_drafts_what_it_writes_itself():
    "Nearly all its drafts are right, but for what lies behind the last token; another's nearly never."
    model = tiny_model("llama", seed=5)
    prompts, shares = drawn_prompts(random.Random(3), 6), {}
    for name, draft in drafters(model).items():
        llm = drafting(model, draft, compile=False)
        llm.generate(prompts, greedy(46), use_tqdm=False)
        n, right = llm.stats().drafts["draft"]
        shares[name] = right / n
    assert shares["itself"] > 0.97 and shares["another"] < 0.2, shares
    assert shares["another"] < shares["near"] < 1, shares


def test_what_was_found_goes_first():
    "A grammar's tokens and repetitions are drafted without the model; each kind is counted."
    model = tiny_model("llama", seed=5)
    form = dict(type="object", properties=dict(long_name=dict(enum=["a", "b"])))
    params = [
        greedy(60),
        SamplingParams(
            temperature=0,
            max_tokens=60,
            structured_outputs=dict(json=form | dict(required=["long_name"])),
        ),
    ]
    plain = LLM(model, tiny_tokenizer())
    want = [seen(o) for o in plain.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)]
    llm = drafting(model, perturbed(model))
    got = llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
    assert [seen(o) for o in got] == want
    s = llm.stats()
    assert {"forced", "draft"} <= {*s.drafts}
    assert sum(n for n, _ in s.drafts.values()) == s.drafted_tokens
    assert sum(n for _, n in s.drafts.values()) == s.accepted_tokens
    assert "draft " in repr(s)


def test_little_memory_and_who_is_cancelled():
    "Preempted requests, and one that is cancelled; the draft model forgets those that ended."
    model = tiny_model("llama", seed=5)
    prompts = drawn_prompts(random.Random(8), 8)
    want = ids(LLM(model).generate(prompts, greedy(120), use_tqdm=False))
    llm = checked(LLM(model, speculation=perturbed(model), kv_cache_bytes=2**18))
    llm.proposer.always = True
    llm.proposer.model.open(256)  # not enough for all
    assert ids(llm.generate(prompts, greedy(120), use_tqdm=False)) == want
    assert llm.stats().preemptions and llm.stats().drafts["draft"][1]
    got = {}
    each = lambda i: lambda e: got.setdefault(i, []).extend(e.token_ids)
    names = [llm.add_request(p, greedy(40), stream_callback=each(i)) for i, p in enumerate(prompts)]
    for _ in range(3):
        llm.step()
    llm.cancel(names[1])
    while llm.step():
        pass
    for i, w in enumerate(want):
        assert got[i] == w[: len(got[i])] and (len(got[i]) == 40 or i == 1)
    assert not llm.proposer.model.rows and len(got[1]) < 40
    llm.close()
    assert llm.proposer.model.runner.nbytes == 0
    assert ids(llm.generate(prompts[:2], greedy(9), use_tqdm=False)) == [w[:9] for w in want[:2]]


def test_long_prompts_are_caught_up_over_steps():
    model = tiny_model("llama", seed=5, max_position_embeddings=2048)
    prompts = [[3 + i % 200 for i in range(n)] for n in (700, 900, 12)]
    want = ids(LLM(model).generate(prompts, greedy(20), use_tqdm=False))
    llm = drafting(model, copy.deepcopy(model))
    assert ids(llm.generate(prompts, greedy(20), use_tqdm=False)) == want
    n, right = llm.stats().drafts["draft"]
    assert right > 0.8 * n


def test_a_short_context_and_ids_that_it_lacks():
    "Rows that the draft model has no place or no token for go without it."
    model = tiny_model("llama", seed=5, vocab_size=300)
    small = tiny_model("llama", seed=6, max_position_embeddings=24)
    small.config.vocab_size = 300  # as ids are compared by tokenizers, where there are some
    prompts = [[5, 6, 7], [8, 299, 9], [5] * 30]
    want = ids(LLM(model).generate(prompts, greedy(30), use_tqdm=False))
    llm = checked(LLM(model, speculation=small))
    small.config.vocab_size = llm.proposer.model.vocab_size = 259
    llm.proposer.always = True
    assert ids(llm.generate(prompts, greedy(30), use_tqdm=False)) == want
    assert not llm.proposer.broken


@pytest.mark.parametrize("where", ["round", "follow", "forget_ended"])
def test_a_broken_draft_model_costs_drafts_alone(where, caplog):
    model = tiny_model("llama", seed=5)
    prompts = drawn_prompts(random.Random(3), 4)
    want = ids(LLM(model).generate(prompts, greedy(20), use_tqdm=False))
    llm = drafting(model, perturbed(model))
    calls = []

    def broken(*_):
        calls.append(1)
        raise RuntimeError("no draft")

    setattr(llm.proposer.model, where, broken)
    assert ids(llm.generate(prompts, greedy(20), use_tqdm=False)) == want
    said = [r for r in caplog.records if "speculation failed" in r.message]
    assert len(said) == 1 and calls and (where == "forget_ended" or len(calls) == 1)


def test_adapters_are_ignored_by_the_draft_model(tmp_path):
    model = tiny_model("llama", seed=5)
    folder = tiny_adapter(tmp_path / "a", model)
    prompts, names = drawn_prompts(random.Random(3), 4), [None, "a", None, "a"]
    plain = LLM(model, lora_modules=[f"a={folder}"])
    want = ids(plain.generate(prompts, greedy(20), lora_request=names, use_tqdm=False))
    llm = checked(LLM(model, lora_modules=[f"a={folder}"], speculation=copy.deepcopy(model)))
    llm.proposer.always = True
    got = llm.generate(prompts, greedy(20), lora_request=names, use_tqdm=False)
    assert ids(got) == want and llm.stats().drafts["draft"][1]


def test_named_by_a_folder(tmp_path):
    "Loaded as models are; a plan counts its memory, and a request may do without."
    model, small = tiny_model("llama", seed=5), tiny_model("llama", seed=5, num_hidden_layers=1)
    for name, m in dict(model=model, small=small).items():
        m.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    prompts = drawn_prompts(random.Random(3), 4)
    llm = LLM(str(tmp_path / "model"), speculation=tmp_path / "small", dtype="fp32")
    llm.proposer.always = True
    want = ids(LLM(model).generate(prompts, greedy(20), use_tqdm=False))
    assert ids(llm.generate(prompts, greedy(20), use_tqdm=False)) == want
    n = llm.stats().drafts["draft"][0]
    llm.generate(prompts, greedy(20, speculate=False), use_tqdm=False)
    assert llm.stats().drafts["draft"][0] == n > 0
    plan = llm.plan(prompts, greedy(20))
    draft = llm.draft
    kv = plan.blocks * plan.block_size * draft.kv_bytes_per_token
    assert plan.draft_bytes == draft.weights_bytes + kv and "draft model" in str(plan)
    alone = LLM(str(tmp_path / "model"), dtype="fp32").plan(prompts, greedy(20))
    more = llm.plan(prompts, greedy(20)).running_bytes - alone.running_bytes
    assert more == plan.draft_bytes + plan.workspace_bytes - alone.workspace_bytes
    assert "draft model" not in str(alone) and "prefix store" not in str(alone)


def test_a_plan_without_weights_reads_none_of_the_draft_model(tmp_path):
    for name, layers in dict(model=2, small=1).items():
        tiny_model("llama", num_hidden_layers=layers).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    how = dict(speculation=tmp_path / "small", dtype="fp32", device="cpu")
    outline = UnloadedLLM(str(tmp_path / "model"), **how)
    assert outline.draft.model.device.type == "meta"
    llm = LLM(str(tmp_path / "model"), **how)
    assert outline.draft.kv_bytes_per_token == llm.draft.kv_bytes_per_token
    plan = outline.plan([[5, 6, 7]], greedy(20))
    assert plan.draft_bytes >= sum(p.nbytes for p in llm.draft.model.parameters())


def test_a_request_longer_than_the_draft_model_holds_nothing_of_it():
    model = tiny_model("llama", max_position_embeddings=256)
    small = tiny_model("llama", seed=1, max_position_embeddings=32)
    llm = LLM(model, speculation=small)
    llm.proposer.always = True
    prompts = [[5, 6, 7] * 4, [8, 9] * 10, [3] * 60]
    want = ids(LLM(model).generate(prompts, greedy(60), use_tqdm=False))
    memory, held = llm.draft, []
    follow = memory.follow

    def watched(request, end, wanted):
        row = follow(request, end, wanted)
        held.append((end > 32, row is None, len(memory.rows[request].copy.block_table)))
        return row

    memory.follow = watched
    assert ids(llm.generate(prompts, greedy(60), use_tqdm=False)) == want
    assert any(not late for late, *_ in held)
    assert all(none and blocks == 0 for late, none, blocks in held if late)


def test_which_models_are_refused(tmp_path):
    model = tiny_model("llama")
    with pytest.raises(ParamError, match="has 200 tokens, and the model 259"):
        LLM(model, speculation=tiny_model("llama", vocab_size=200))
    with pytest.raises(ParamError, match="weights, and the model .* must be smaller"):
        LLM(model, speculation=tiny_model("llama", num_hidden_layers=3))
    with pytest.raises(ParamError, match="needs strategy='continuous'"):
        LLM(model, strategy="static", speculation=model)
    model.save_pretrained(tmp_path)
    other = tiny_tokenizer()
    other.add_tokens(["mill"])
    other.save_pretrained(tmp_path)
    with pytest.raises(ParamError, match="id 259 is 'mill', and None in the model"):
        LLM(model, tiny_tokenizer(), speculation=str(tmp_path))
    for wrong in ("no-such", "", torch.nn.Linear(2, 2)):
        with pytest.raises(ParamError, match="speculation must be None, 'lookup' or a draft model"):
            LLM(model, speculation=wrong)
    with pytest.raises(ParamError, match="is for models that write text: leave it out"):
        LLM(encoder("bert"), speculation=model)


def test_rounds_only_where_they_pay():
    times = StepTimes(rise=0.001)
    for width in (1, 8, 64):
        times.note(width, 1.0)
    counts = [rounds_worth(0.7, 1, 1, 1, times, part)[0] for part in (0.02, 0.1, 0.3, 0.7)]
    assert counts == sorted(counts, reverse=True) and counts[0] > 3 and counts[-1] == 0, counts
    assert rounds_worth(0.7, 1, 1, 1, times, 0.1, catch_up=5.0) == (0, 0.0)
    assert rounds_worth(0.5, 8, 8, 8, times, 0.4)[0] == 1, "a round is shared by its rows"


def test_what_may_be_lost_is_limited():
    "Whatever is drafted in vain: a fiftieth of the time, and ten steps at most beyond that."
    account, lost = TimeAccount(), 0.0
    for _ in range(5000):
        spent = 0.7 if account.open else 0.0
        lost += spent
        account.note(1.0, 10.0, spent)
    assert 90 < lost < 0.02 * 5000 + 12
    for _ in range(20):
        account.note(1.0, 10.0, 0.5, earned=1.0)
    assert 5 < account.left <= 10


def test_a_model_that_is_never_right_is_left_alone():
    "By the policy's own count, after what it may lose in trying."
    model = tiny_model("llama", seed=5)
    prompts = drawn_prompts(random.Random(4), 4)
    llm = checked(LLM(model, speculation=tiny_model("llama", seed=77)))
    p = llm.proposer
    timed = p.timed
    p.timed = lambda seconds: (setattr(p, "spent", p.spent and 0.5), timed(1.0 + p.spent))
    want = ids(LLM(model).generate(prompts, greedy(150), use_tqdm=False))
    assert ids(llm.generate(prompts, greedy(150), use_tqdm=False)) == want
    assert llm.stats().drafts.get("draft", (0, 0))[0] < 300
