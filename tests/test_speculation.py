"Speculation: the same tokens as without, to the bit, whatever is drafted; and drafts only where they pay."

import itertools, logging, random

import pytest, torch

from batchlab.api import LLM
from batchlab.core.generation import Generation
from batchlab.core.params import SamplingParams
from batchlab.core.request import Request, Row, StepPlan
from batchlab.core.scheduler import Scheduler
from batchlab.errors import ParamError
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.tasks.speculation import Lookup, NgramTable, Rate, StepTimes, TextPool, num_worth
from helpers import generated, greedy, ids, oracle
from invariants import check_invariants

WAYS = dict(
    kernels={},
    torch=dict(compile=False),
    int8=dict(quantization="int8"),
    w4a8=dict(quantization="w4a8"),
)
SCHEMA = dict(
    type="object",
    properties=dict(name=dict(enum=["red", "green"]), count=dict(type="integer", maximum=99)),
    required=["name", "count"],
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


def drawn_params(rng, structured=True):
    "Settings of a request, of any kind that sampling knows."
    seed, n = rng.randrange(99), rng.choice((1, 4, 12, 24))
    kinds = [
        dict(temperature=0),
        dict(temperature=0, logprobs=2),
        dict(temperature=0, ignore_eos=True, prompt_logprobs=1),
        dict(temperature=1.2, seed=seed),
        dict(temperature=1.2, seed=seed, top_p=0.9, logprobs=1, ignore_eos=True),
        dict(temperature=0.9, seed=seed, top_k=20, n=2),
        dict(temperature=0, frequency_penalty=0.8, presence_penalty=0.3),
        dict(temperature=1, seed=seed, repetition_penalty=1.3, min_tokens=min(n, 4)),
        dict(temperature=0, bad_words=[[5, 6], [7]], logit_bias={9: 2.0}),
        dict(temperature=1, seed=seed, stop=["e", "th"], logprobs=0),
        dict(temperature=0, stop_token_ids=[*range(40, 60)], logprobs=1),
        dict(temperature=1, seed=seed, logprobs=2, logprobs_mode="processed_logprobs", min_p=0.1),
    ]
    if structured:
        kinds.append(dict(temperature=0, structured_outputs=dict(json=SCHEMA)))
        kinds.append(
            dict(temperature=1, seed=seed, structured_outputs=dict(json=SCHEMA), logprobs=1)
        )
        kinds.append(dict(temperature=1, seed=seed, structured_outputs=dict(regex="(ab|cd){2,9}!")))
    return SamplingParams(max_tokens=n, **rng.choice(kinds))


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


def answers_of(outs):
    "The tokens of each answer, by prompt and index."
    return {
        (tuple(o.prompt_token_ids), c.index): list(c.token_ids) for o in outs for c in o.outputs
    }


def drafted(llm):
    "How many tokens `llm` drafted, and how many of them were wrong."
    past, now = llm.engines.past, llm.ledger
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
    outs = plain.generate(prompts, params, use_tqdm=False)
    for how in (dict(), dict(max_num_seqs=4, max_num_batched_tokens=24, kv_cache_bytes=2**17)):
        llm = LLM(model, tiny_tokenizer(), speculation="lookup", **WAYS[way], **how)
        assert llm.proposer is not None
        llm.proposer = Drawn(answers_of(outs), 1)
        got = checked(llm).generate(prompts, params, use_tqdm=False)
        for a, b in zip(outs, got):
            if exact:
                assert seen(a) == seen(b), a.params
            else:
                assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        n, wrong = drafted(llm)
        assert 0 < wrong < n, (n, wrong)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3_moe", "gemma2", "gpt_oss"])
def test_as_the_oracle_and_generate(arch):
    eager = dict(attn_implementation="eager") if arch == "gemma2" else {}
    model = tiny_model(arch, seed=4, **eager)
    rng = random.Random(arch)
    prompts = drawn_prompts(rng, 5)
    want = oracle(model, prompts, 20)
    assert want == [generated(model, p, 20) for p in prompts]
    llm = LLM(model, speculation="lookup", max_num_seqs=3)
    known = {(tuple(p), 0): w for p, w in zip(prompts, want)}
    llm.proposer = Drawn(known, 2)
    assert ids(checked(llm).generate(prompts, greedy(20), use_tqdm=False)) == want
    assert drafted(llm)[0] > 0
