"The engine under load: drawn mixes of requests, thousands of them, several threads, and faults in the middle."

import asyncio, dataclasses, functools, gc, itertools, logging, random, signal
import sys, threading, time
from collections import Counter

import psutil, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

from batchlab import LLM, SamplingParams
from batchlab.fast.trial import kv_layout
from batchlab.basics.padding import PaddedEngine
from batchlab.basics.prefill import Session
from batchlab.basics.slots import SlotEngine
from batchlab.core.attention import TorchBackend
from batchlab.core.engine import Engine
from batchlab.core.generation import make_request
from batchlab.core.runners import PackedRunner
from batchlab.core.sampling import SamplingRow
from batchlab.llm.config import (
    Limits,
    choose_limits,
    context_limit,
    free_memory,
    model_and_tokenizer,
    probe_model,
    rope_side,
    weights_digest,
)
from batchlab.llm.settings import STRATEGIES
from batchlab.fast.fused import fuse
from batchlab.fast.int8 import Int8Linear
from batchlab.fast.kernels import KernelStep, TiledCache, load_kernels
from batchlab.errors import EngineError, ModelError, ParamError, UnsupportedModelError
from batchlab.models import eos_token_ids, tiny_model, tiny_tokenizer
from batchlab.llm.outputs import RequestGroup, RequestOutput
from batchlab.core.request import Request
from batchlab.core.scheduler import Scheduler
from invariants import check_invariants, check_pool
from batchlab.core.cache import KVCache
from helpers import (
    compiled_or_not,
    drain,
    draws,
    generated,
    greedy,
    ids,
    in_threads,
    json_lines,
    longrope,
    need_same_bits,
    noting,
    oracle,
    python,
    raising,
    some_ids,
    told,
    until,
)

# windows, positions that are learned, soft caps, sinks, experts; the last is not fused
ARCHS = "llama", "mistral", "gpt2", "gemma2", "gpt_oss", "qwen3_moe", "phimoe"
PATHS = dict(
    auto={}, torch=dict(compile=False), int8=dict(quantization="int8")
)  # ways through `LLM`
LONGEST = 24


@pytest.fixture(autouse=True)
def log_as_before(one_thread):
    yield
    logging.getLogger("batchlab").setLevel(logging.NOTSET)


def int8_runs(arch):
    "Whether this machine runs a model of `arch` in int8, with the same bits in any company."
    try:
        return LLM(tiny_model(arch), quantization="int8").backend.batch_invariant
    except UnsupportedModelError:
        return False


def made(arch):
    "A model, and prompts that share beginnings."
    # some versions' default drops its soft cap
    eager = dict(attn_implementation="eager") if arch == "gemma2" else {}
    model, rng = tiny_model(arch, seed=4, **eager), random.Random(arch)
    heads = [some_ids(rng, n) for n in (0, 16, 33, 48)]
    prompts = [
        heads[i % 4] + [rng.randrange(3, 259) for _ in range(rng.choice((1, 1, 3, 9, 20)))]
        for i in range(10)
    ]
    return model, prompts


@functools.cache
def reference(arch, int8=False):
    "What the model's own code gives for each prompt, without a cache; for every other one compared here with transformers' own; in fp32 or on weights in 8 bits."
    model, prompts = made(arch)
    if int8:
        fuse(model, load_kernels(), kv_layout(model), own=True, linear=Int8Linear)
    best = oracle(model, prompts, LONGEST)
    same = sum(a == generated(model, p, LONGEST) for a, p in [*zip(best, prompts)][::2])
    assert same == 5 or int8 and same >= 4  # with its cache, other rounding
    return best


@functools.cache
def pool(arch, path="auto"):
    "A model, an `LLM` of it, prompts, and what each of them gives alone: greedy, and by seed."
    if path == "int8" and not int8_runs(arch):
        return pool(arch)
    (model, prompts), best = made(arch), reference(arch, path == "int8")
    alone = LLM(model, max_num_seqs=1, enable_prefix_caching=False, **PATHS[path])
    each = lambda params: [ids(alone.generate(p, params(i)))[0] for i, p in enumerate(prompts)]
    if path == "int8":
        # 8 bits make steps of rounding errors: other code can change a near tie, company can't
        own = each(lambda i: greedy(LONGEST))
        assert sum(a == b for a, b in zip(own, best)) >= 8, "int8 is not what such layers give"
        best = own
    return model, LLM(model, **PATHS[path]), prompts, best, each(lambda i: sampling(i, LONGEST))


@functools.cache
def prompt_logprobs(arch, path, prompt):
    "The log probabilities of `prompt` but its first token, alone in an `LLM` of its own."
    model, llm, *_ = pool(arch, path)
    how = PATHS["int8" if llm.settings.quantization else path if path != "int8" else "auto"]
    llm = LLM(model, max_num_seqs=1, enable_prefix_caching=False, **how)
    return llm.logprobs([list(prompt)])[0].logprobs


def sampling(i, n):
    return SamplingParams(seed=i, temperature=1.3, top_p=0.95, max_tokens=n, ignore_eos=True)


def expected(tokens, n, eos_ids):
    "What is left of `tokens` after `max_tokens` and EOS."
    end = next((i + 1 for i, t in enumerate(tokens) if t in eos_ids), len(tokens))
    return tokens[: min(n, end)]


@st.composite
def cases(draw):
    seqs = draw(st.integers(1, 6))
    request = st.tuples(
        st.integers(0, 9),
        st.integers(1, LONGEST),
        st.booleans(),
        st.integers(-1, 1),
        st.integers(0, 3),
        st.sampled_from((None, None, 0.0, 0.3, 0.8, 0.999)),
    )  # where of its prompt its log probabilities begin
    return dict(
        arch=draw(st.sampled_from(ARCHS)),
        path=draw(st.sampled_from(("auto", *PATHS))),
        seqs=seqs,
        budget=seqs + draw(st.integers(1, 40)),
        kv_tokens=draw(st.sampled_from((None, 128, 192, 320, 512))),
        caching=draw(st.booleans()),
        requests=draw(
            st.lists(request, min_size=1, max_size=12)
        ),  # prompt, max_tokens, sampled, priority, steps before it, start
        cancels=draw(st.sets(st.integers(0, 11), max_size=3)),
        preempts=draw(st.sets(st.integers(0, 25), max_size=4)),
    )


seen, ways = Counter(), set()  # what happened among the draws, and how the models ran


@settings(
    max_examples=draws(150),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_whatever_the_mix_each_request_gets_what_it_gets_alone(case):
    model, llm, prompts, best, sampled = pool(case["arch"], case["path"])
    eos = eos_token_ids(model)
    kv = case["kv_tokens"] and case["kv_tokens"] * llm.limits.kv_bytes_per_token
    # a small KV cache limits the context, and says so
    logging.getLogger("batchlab").setLevel(logging.ERROR)
    size = dict(max_num_seqs=case["seqs"], max_num_batched_tokens=case["budget"])
    llm.loaded.limits = choose_limits(model, llm.loaded.shapes, kv_cache_bytes=kv, **size)
    llm.loaded.settings = dataclasses.replace(llm.settings, enable_prefix_caching=case["caching"])
    llm.engines.apply_limits()
    ends, want = {}, {}

    def end(e):
        if e.finished:
            assert ends.setdefault(e.request_id, e.output) is e.output, "ended twice"

    def step():
        nonlocal steps
        llm.step()
        steps += 1
        engine = llm.engines.get("packed")
        if engine and engine.scheduler.running and steps in case["preempts"]:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        if engine and not hasattr(engine.scheduler, "checked"):
            engine.scheduler.checked, schedule = True, engine.scheduler.schedule

            def checked():
                plan = schedule()
                check_invariants(engine.scheduler, plan)
                return plan

            engine.scheduler.schedule = checked

    steps = 0
    for i, (p, n, by_seed, priority, wait, start) in enumerate(case["requests"]):
        for _ in range(wait):
            step()
        params = sampling(p, n) if by_seed else SamplingParams(temperature=0, max_tokens=n)
        if start is not None:
            params = dataclasses.replace(
                params, prompt_logprobs=0, prompt_logprob_start=int(start * len(prompts[p]))
            )
        rid = llm.add_request(prompts[p], params, end, priority=priority)
        want[rid] = sampled[p][:n] if by_seed else expected(best[p], n, eos)
        if i in case["cancels"]:
            llm.cancel(rid)
    while llm.has_unfinished:
        step()
        assert steps < 2000, "no progress"
    assert ends.keys() == want.keys()
    for rid, out in ends.items():
        got, why = out.outputs[0].token_ids, out.outputs[0].finish_reason
        assert not out.error, out.error
        told, start = out.prompt_logprobs, out.params.prompt_logprob_start
        if told and start + 1 < len(told):
            prompt = tuple(out.prompt_token_ids)
            told = [d[t].logprob for d, t in zip(told[start + 1 :], prompt[start + 1 :])]
            alone = prompt_logprobs(case["arch"], case["path"], prompt)[start:]
            assert told == pytest.approx(alone[: len(told)], abs=1e-3)
            assert why == "cancelled" or len(told) == len(alone)
            assert out.num_cached_tokens <= start
        if why == "cancelled":
            assert got == want[rid][: len(got)]
        else:
            assert got == want[rid] and why in ("stop", "length")
    scheduler = llm.engines["packed"].scheduler
    assert not scheduler.pool.num_held and not scheduler.has_unfinished and not llm.loop.groups
    check_pool(scheduler.pool)
    seen.update(
        preempted=scheduler.num_preemptions > 0,
        reused=llm.ledger.reused > 0,
        recomputed=llm.ledger.recomputed > 0,
        cancelled=bool(case["cancels"]),
        crowded=len(case["requests"]) > case["seqs"],
    )
    ways.add((llm.backend.name, llm.settings.quantization))


def test_the_cases_preempt_reuse_and_cancel():
    "The draws above are worth something: each thing that can go wrong did happen among them, on each way through a model."
    if not seen:
        test_whatever_the_mix_each_request_gets_what_it_gets_alone()
    assert len(seen) == 5 and min(seen.values()) >= 20, seen
    if int8_runs("llama"):
        assert ways >= {("torch", None), ("modules", None), ("fused", None), ("fused", "int8")}


def test_ten_thousand_requests_end_once_each(caplog):
    caplog.set_level(logging.CRITICAL, "batchlab")
    rng, model = random.Random(0), tiny_model("llama", num_hidden_layers=1)
    llm = LLM(model, tiny_tokenizer(), max_num_seqs=32, max_num_batched_tokens=256)
    threads = threading.active_count()
    ends, text, reasons, held = Counter(), Counter(), Counter(), []
    breaking = set()

    def alive():
        gc.collect()
        kinds = Request, RequestGroup, RequestOutput
        return Counter(type(o).__name__ for o in gc.get_objects() if type(o) in kinds)

    there = alive()  # what other tests keep

    def listen(e):
        if e.request_id in breaking and not e.finished:
            raise ValueError("the listener broke")
        text[e.request_id] = (text[e.request_id] or "") + e.text
        if e.finished:
            ends[e.request_id] += 1
            out, said = e.output.outputs[0], text.pop(e.request_id)
            assert e.output.error or said == out.text
            reasons[out.finish_reason] += 1

    process = psutil.Process()
    llm.start()
    for i in range(10_000):
        rid, timeout = f"r{i}", rng.choice((None,) * 9 + (1e-6, 0.01, 0.1, 60))
        if rng.random() < 0.05:
            breaking.add(rid)
        prompt = [rng.randrange(3, 259) for _ in range(rng.randint(1, 24))]
        params = SamplingParams(temperature=rng.choice((0, 1)), max_tokens=rng.randint(1, 6))
        llm.add_request(prompt, params, listen, rid, priority=rng.randint(-1, 1), timeout=timeout)
        if rng.random() < 0.1:
            llm.cancel(f"r{rng.randint(max(0, i - 50), i)}")
        while len(llm.loop.groups) > 500:
            time.sleep(0.001)
        if i % 2500 == 2499:
            gc.collect()
            held.append(process.memory_info().rss)
    llm.stop()
    assert len(ends) == 10_000 and set(ends.values()) == {1}
    assert {"cancelled", "timeout", "error", "length"} <= reasons.keys()
    scheduler = llm.engines["packed"].scheduler
    queues = scheduler.waiting, scheduler.running, llm.loop.groups, llm.loop.inbox, text
    assert not any(queues) and not scheduler.pool.num_held and len(llm.loop.deadlines) < 200
    assert threading.active_count() == threads and llm.loop.thread is None
    left = alive() - there
    assert sum(left.values()) < 200, left
    # Bytes, between 5,000 requests and 10,000. Before that, caches fill: oneDNN keeps a kernel for each number of rows.
    assert held[-1] < held[1] + 20e6, held


PROMPTS = [[5], [6, 7], [8] * 30, list(range(9, 29)), [8] * 30 + [7]]
GREEDY = dict(temperature=0, max_tokens=10, ignore_eos=True)


def failing(llm, wrong):
    "`llm`, whose next steps run `wrong(batch, number of the step)` first."
    llm.generate([4])
    runner, steps = llm.engines["packed"].runner, itertools.count(1)
    execute = runner.execute

    def execute_or_fail(batch):
        wrong(batch, next(steps))
        return execute(batch)

    runner.execute = execute_or_fail
    return llm


def right(llm):
    "That prompts of different lengths get the oracle's tokens."
    assert ids(llm.generate(PROMPTS, GREEDY)) == oracle(llm.model, PROMPTS, 10)


def test_generate_from_threads_beside_the_background():
    model = tiny_model("qwen3")
    llm, want = LLM(model, max_num_seqs=3), oracle(model, PROMPTS, 10)
    job = lambda: [ids(llm.generate(PROMPTS, GREEDY)) for _ in range(4)]
    assert in_threads(job, job, job) == [[want] * 4] * 3
    with llm:
        assert in_threads(job, job) == [[want] * 4] * 2
    assert llm.loop.thread is None and llm.stats().slots_in_use == 0


def test_two_engines_on_one_model():
    model = tiny_model("gemma3")
    limits = dict(max_num_seqs=2), dict(max_num_batched_tokens=70), dict(strategy="static")
    call = lambda llm: [ids(llm.generate(PROMPTS, GREEDY)) for _ in range(4)]
    jobs = [functools.partial(call, LLM(model, **how)) for how in limits]
    assert in_threads(*jobs) == [[oracle(model, PROMPTS, 10)] * 4] * 3
    assert model.config._attn_implementation == "sdpa" and not model.training


@pytest.mark.parametrize("drain", [True, False])
def test_stop_while_running(drain):
    llm, ends = LLM(tiny_model("llama"), max_num_seqs=2).start(), {}
    for p in PROMPTS:
        llm.add_request(p, greedy(100), noting(ends))
    until(lambda: llm.stats().steps)
    llm.stop(drain)
    assert llm.loop.thread is None and len(ends) == len(PROMPTS) and not llm.has_unfinished
    reasons = {o.outputs[0].finish_reason for o in ends.values()}
    assert reasons == {"length"} if drain else "cancelled" in reasons
    right(llm)  # it goes on working


def test_a_crash_in_the_loop_ends_those_in_it_and_no_others(caplog):
    def crash(batch, step):
        if step == 5:
            raise RuntimeError("a fuse blew")

    model, ends, told = tiny_model("llama"), {}, []
    llm, want = failing(LLM(model, max_num_seqs=2), crash), oracle(model, PROMPTS, 10)
    llm.watchers.append(lambda engine, event, x: told.append(event))
    with llm:
        for i, p in enumerate(PROMPTS):
            llm.add_request(p, GREEDY, noting(ends), request_id=str(i))
    failed = [o for o in ends.values() if o.error]
    assert len(ends) == 5 and 1 <= len(failed) <= 2
    assert {o.error for o in failed} == {"the step failed with RuntimeError: a fuse blew"}
    assert all(o.outputs[0].finish_reason == "error" for o in failed)
    assert all(o.error or o.outputs[0].token_ids == want[int(i)] for i, o in ends.items())
    assert any("a fuse blew" in str(r.exc_info) for r in caplog.records)
    assert not llm.engines["packed"].scheduler.pool.num_held
    broke = told.index("broke")
    assert told.count("broke") == 1 and told[broke - 2 : broke] == ["begin", "schedule"]
    assert len({told.count(event) for event in ("forward", "sample", "text")}) == 1


def test_ctrl_c_leaves_the_engine_usable():
    def interrupt(batch, step):
        if step == 4:
            raise KeyboardInterrupt

    llm = failing(LLM(tiny_model("llama"), max_num_seqs=2), interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert not llm.has_unfinished and llm.stats().slots_in_use == 0
    right(llm)


def bits(outs):
    "Tokens and log probabilities of each answer."
    return told(outs)


@pytest.mark.parametrize(
    "arch, how",
    [
        *((a, {}) for a in ("llama", "qwen3", "mistral", "phi3")),
        ("llama", dict(quantization="int8")),
        ("llama", dict(quantization="w4a8")),
        ("qwen3", dict(quantization="w4a8")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_changes_no_bit(arch, how, dtype):
    """Log probabilities of every token, to the last bit: alone, in company, in small chunks, with a prefix cache and without, and where
    requests read the same blocks together, whose first owner leaves before them and whose blocks others take over."""
    model, rng = tiny_model(arch).to(dtype), random.Random(1)
    try:
        alone = LLM(model, max_num_seqs=1, enable_prefix_caching=False, **how)
    except UnsupportedModelError as e:
        pytest.skip(f"no kernels for int8: {e}")
    need_same_bits(alone.backend)
    draw = lambda n: some_ids(rng, n)
    heads = [[], [], draw(300), draw(140)]
    prompts = [heads[i % 4] + draw(rng.randint(1, 20 + 70 * (i % 4 < 2))) for i in range(28)]
    prompts[5] = prompts[4][:40] + [7]
    params = [greedy(rng.randint(1, 16), logprobs=2) for _ in prompts]
    want = [bits(alone.generate([p], s))[0] for p, s in zip(prompts, params)]
    together = Counter()

    def watch(engine, event, plan):  # how many rows begin with the same two blocks
        if event == "schedule":
            rows = [tuple(r.request.block_table[:2]) for r in plan.rows if r.start >= 128]
            together.update({k: n for k, n in Counter(rows).items() if n >= 3})

    for seqs, tokens in ((16, 50), (3, 9), (6, 64)):
        llm = LLM(model, max_num_seqs=seqs, max_num_batched_tokens=tokens, **how)
        llm.watchers.append(watch)
        for _ in range(2):  # the second time from what the first left in the slots
            assert bits(llm.generate(prompts, params)) == want
    assert together.total()  # or nothing was shared, and nothing tried


def spoil(cache, blocks, n=0):
    "NaN in these blocks of `cache`, behind the first `n` tokens."
    size = cache.block_size
    at = torch.tensor([b * size + i for b in blocks for i in range(n, size)], dtype=torch.int64)
    nan = lambda *shape: torch.full((len(at), *shape), torch.nan, dtype=cache.dtype)
    for layer, (h, k, v) in enumerate(cache.shapes):
        cache.write(layer, nan(h, k), nan(h, v), at)


@pytest.mark.parametrize("n", [1, 5, 63, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [KVCache, TiledCache])
def test_a_copied_block_is_zero_behind_its_tokens(kind, dtype, n):
    "NaN behind the tokens of the source stays there: a mask multiplies it by 0, which is NaN again."
    cache = kind([(2, 16, 32), (1, 16, 16)], 4, 64, dtype)
    token = torch.arange(1, n + 1)[:, None, None]
    spoil(cache, range(4))
    for layer, (h, k, v) in enumerate(cache.shapes):
        cache.write(layer, *(token.expand(n, h, d).to(dtype) for d in (k, v)), 64 + torch.arange(n))
    cache.copy(1, 2, n)
    for layer in range(2):
        for was, got in zip(cache.read(layer, [1]), cache.read(layer, [2])):
            assert was[n:].isnan().all() and torch.equal(got[:n], was[:n]) and not got[n:].any()
            assert torch.equal(got[:n, 0, 0], token[:, 0, 0].to(dtype))


@pytest.mark.parametrize(
    "arch, compile, best, fits",
    [
        ("llama", False, "torch", None),
        ("llama", "auto", "fused", True),
        ("phimoe", "auto", "modules", True),
        ("phimoe", "auto", "modules", False),
    ],
)
def test_what_lies_in_the_cache_before_reaches_no_token(arch, compile, best, fits, monkeypatch):
    "Memory that begins as NaN, and a prefix that ends inside a block whose rest is NaN: each request gets what it gets alone."
    model, use, copied = tiny_model(arch), KVCache.count_used, []

    def used(cache, batch):
        before = cache.num_used
        use(cache, batch)
        spoil(cache, range(before, cache.num_used))
        copied.extend((type(cache), n) for *_, n in batch.copies)

    monkeypatch.setattr(KVCache, "count_used", used)
    if fits is False:  # as where a layer is not for the kernels
        monkeypatch.setattr(KernelStep, "fits", lambda *a: False)
    llm = LLM(model, max_num_seqs=4, max_num_batched_tokens=40, compile=compile)
    head = list(range(9, 34))
    if llm.backend.name != best:
        pytest.skip(f"no kernels: {llm.backend.why}")
    prompts = [
        head + list(range(40, 70)),
        head[:5] + [7, 8],
        head[:3] + [6] * 70,
        head + [5],
        [4],
        head[:5] + [8],
    ]
    want = oracle(model, prompts, 10)
    assert ids(llm.generate(prompts[:1], GREEDY)) == want[:1]
    engine = llm.engines["packed"]
    # all but what the next will copy of it
    spoil(engine.runner.cache, engine.scheduler.pool.cached, 5)
    assert ids(llm.generate(prompts[1:3], GREEDY)) == want[1:3]
    assert copied[:2] == [(KVCache if best == "torch" else TiledCache, n) for n in (5, 3)]
    llm.reset_prefix_cache()
    for _ in range(2):
        assert ids(llm.generate(prompts, GREEDY)) == want


def test_an_asyncio_caller_beside_the_thread_and_new_weights_between_calls():
    """An event loop adds and cancels in its executor, others call `generate`, the thread steps; whenever all is answered, the weights
    change. Each answer is of the weights of its time, and no memory stays behind with those of before."""
    model = tiny_model("llama")
    llm = LLM(model, max_num_seqs=3, kv_cache_bytes=64 * 10 * 256 * 2)

    async def ask(prompt, cancel):
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def on_event(e):
            if e.finished:
                loop.call_soon_threadsafe(done.set_result, e.output)

        rid = await loop.run_in_executor(None, llm.add_request, prompt, GREEDY, on_event)
        if cancel:
            await loop.run_in_executor(None, llm.cancel, rid)
        return await done

    async def main():
        loop, answers = asyncio.get_running_loop(), set()
        for turn in range(6):
            singles = [ask(p, i % 4 == 3) for i, p in enumerate(PROMPTS * 4)]
            calls = [loop.run_in_executor(None, llm.generate, PROMPTS, GREEDY) for _ in range(2)]
            outs = await asyncio.wait_for(asyncio.gather(*singles, *calls), 120)
            want = oracle(model, PROMPTS, 10)
            for call in outs[len(singles) :]:
                assert ids(call) == want
            for out, w in zip(outs, want * 4):
                got, why = out.outputs[0].token_ids, out.outputs[0].finish_reason
                assert why in ("length", "cancelled"), out.error
                assert got == w[: len(got) if why == "cancelled" else None]
            answers.add(str(want))
            with torch.no_grad():
                model.model.layers[turn % 2].mlp.down_proj.weight.mul_(-1 if turn % 3 else 2)
        return answers

    with llm:
        assert len(asyncio.run(main())) > 3
    assert llm.loop.thread is None and not llm.has_unfinished
    assert llm.stats().kv_bytes == 0 and not sum(llm.engines.budget.claims.values())
    assert sum(llm.stats().requests.values()) == 6 * (20 + 10)


def test_a_cancel_that_comes_too_late_does_not_reach_the_next_of_that_name():
    llm, ends = LLM(tiny_model("llama")), []
    one = greedy(1)

    def end(e):
        if not e.finished:
            return
        ends.append((e.request_id, e.output.outputs[0].finish_reason))
        if e.request_id == "a":
            assert llm.cancel("x")  # which has its last token already
        elif len(ends) == 2:
            llm.add_request([7], one, end, request_id="x")

    for name in "ax":
        llm.add_request([5, 6], one, end, request_id=name)
    drain(llm)
    assert ends == [("a", "length"), ("x", "length"), ("x", "length")]


def test_a_model_that_can_not_be_run_any_more_ends_requests_and_not_the_thread(caplog, monkeypatch):
    ends, refuse = [], raising(MemoryError("no room for other weights"))

    def listen(e):
        ends.append(e.finish_reason)
        if len(ends) < 2:  # tries again at once
            llm.add_request([5], GREEDY, listen)

    with LLM(tiny_model("llama")) as llm:
        right(llm)
        with torch.no_grad():
            llm.model.lm_head.weight.mul_(1)
        with monkeypatch.context() as m:
            m.setattr("batchlab.llm.loaded.probe_model", refuse)
            llm.add_request([5], GREEDY, listen)
            until(lambda: len(ends) == 2)
            assert "no room for other weights" in llm.generate([6], GREEDY)[0].error
        right(llm)
    assert ends == ["error"] * 2


def test_stop_and_close_from_several_threads():
    llm = LLM(tiny_model("llama"))
    for _ in range(5):
        llm.start()
        in_threads(*[llm.stop] * 4, *[llm.close] * 2)
        assert llm.loop.thread is None and llm.loop.stopping is None


def test_what_a_callback_may_not_do():
    llm, errors = LLM(tiny_model("llama")), []
    each = llm.step, llm.stop, llm.close, llm.reset_prefix_cache
    each += (lambda: llm.generate([5]),)

    def callback(e):
        for wrong in each:
            try:
                wrong()
            except EngineError as x:
                errors.append(str(x))
        if not e.finished:
            llm.add_request([7], dict(max_tokens=1))  # this it may

    with llm:
        llm.add_request([5, 6], greedy(2), callback)
        until(lambda: not llm.has_unfinished)
    assert len(errors) == 10 and all("callback" in e for e in errors)
    assert llm.stats().requests["length"] == 2


def test_each_call_counts_its_own_positions_once():
    llm = LLM(tiny_model("llama"), enable_prefix_caching=False)
    seen = []
    for _ in range(3):
        llm.generate([[5, 6, 7], [8, 9]], greedy(4))
        seen.append((llm.ledger.useful, llm.stats().steps))
    assert seen == [(3 + 2 + 2 * 3, 4 * k) for k in (1, 2, 3)]
    with torch.no_grad():
        llm.model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    llm.generate([[5, 6, 7]], greedy(4))
    assert llm.stats().steps == 16, "steps before the weights changed are forgotten"


def test_an_interrupted_stop_leaves_an_engine_that_works():
    llm = LLM(tiny_model("llama")).start()
    thread, join = llm.loop.thread, llm.loop.thread.join
    llm.add_request([5, 6, 7], greedy(200))
    thread.join = raising(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.stop()
    join(60)
    assert llm.loop.thread is None and llm.loop.stopping is None
    assert llm.generate([[5, 6]], GREEDY)[0].error is None
    with llm:
        assert llm.generate([[5, 6]], GREEDY)[0].error is None


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError])
def test_what_finished_in_a_step_that_broke_is_told(fault):
    llm, got = LLM(tiny_model("llama")), []

    def watch(engine, event, x):
        if event == "text" and any(r.finish_reason for r in x):
            raise fault("just now")

    llm.watchers.append(watch)
    llm.add_request([5, 6, 7], greedy(1), got.append)
    llm.add_request([8, 9], greedy(1), got.append)
    for _ in range(4):
        try:
            llm.step()
        except KeyboardInterrupt:
            pass
    assert not llm.has_unfinished
    assert [e.finish_reason for e in got if e.finished] == ["length"] * 2


def test_ctrl_c_in_a_callback_loses_no_other_answer():
    llm, got = LLM(tiny_model("llama")), []

    def interrupt(e):
        if e.finished:
            raise KeyboardInterrupt

    llm.add_request([5, 6, 7], GREEDY, interrupt)
    llm.add_request([8, 9], GREEDY, got.append)
    with pytest.raises(KeyboardInterrupt):
        drain(llm)
    for _ in range(3):
        llm.step()
    assert not llm.has_unfinished and got[-1].finished
    streamed = [t for e in got for t in e.token_ids]
    assert [streamed] == ids([got[-1].output]) == oracle(llm.model, [[8, 9]], 10)


def test_a_fused_model_ran_twice_by_its_own_code(monkeypatch):
    "Once to see what its layers ask of attention, and once for the probe: each time reads all weights."
    model, calls = tiny_model("llama"), []
    forward = type(model).forward

    @functools.wraps(forward)
    def counted(self, *args, **kwargs):
        calls.append(tuple(kwargs["input_ids"].shape))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counted)
    need_same_bits(LLM(model).backend)
    assert calls == [(1, 13), (3, 13)]


@compiled_or_not
def test_a_model_that_decodes_wrong_packed_is_not_run_packed(compile):
    "It passes all that `layer_specs` asks, and its prefill is right: only a backend's own trial sees it, that of plain torch too."
    model = tiny_model("llama")

    def late(module, args, kwargs):
        if module.config._attn_implementation == "batchlab" and kwargs["input_ids"].shape[1] == 3:
            kwargs["position_ids"] = kwargs["position_ids"] + 5
        return args, kwargs

    model.register_forward_pre_hook(late, with_kwargs=True)
    llm = LLM(model, compile=compile)
    assert llm.loaded.shapes is None and llm.loaded.paddable
    right(llm)


def test_loading_leaves_the_garbage_collector_as_it_was(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "batchlab.llm.loaded.model_and_tokenizer",
        lambda *args: seen.append(gc.isenabled()) or model_and_tokenizer(*args),
    )
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            LLM(tiny_model("llama"))
            with pytest.raises(ParamError):
                LLM(3)
            assert gc.isenabled() == on
        finally:
            gc.enable()
    assert seen == [False] * 4


def test_a_plan_is_what_the_call_takes():
    rng, model = random.Random(0), tiny_model("llama")
    draw = lambda n: [rng.randrange(3, 60) for _ in range(n)]
    several = [[draw(rng.randrange(1, 40)) for _ in range(12)] for _ in range(8)]
    for prompts in (*several, [draw(87)] * 4):
        llm = LLM(model, max_num_seqs=4)
        params = [dict(GREEDY, max_tokens=rng.choice([5, 30, 120])) for _ in prompts]
        plan = llm.plan(prompts, params)
        llm.generate(prompts, params)
        taken = llm.stats().kv_bytes, llm.ledger.reused, 4
        assert (plan.kv_bytes, plan.shared_tokens, plan.slots) == taken
    assert plan.shared_tokens > 0
    assert not llm.plan(prompts, dict(GREEDY, prompt_logprobs=0)).shared_tokens
    assert LLM(model, strategy="loop", max_num_seqs=4).plan(PROMPTS, GREEDY).slots == 1
    alone = LLM(tiny_model("mamba")).plan(PROMPTS, GREEDY)
    assert (alone.slots, alone.kv_bytes) == (1, 0)


def test_a_padded_engine_keeps_no_rectangle_once_it_is_idle():
    llm = LLM(tiny_model("llama"), strategy="static")
    llm.generate(PROMPTS, GREEDY)
    assert llm.stats().kv_bytes == 0 and not sum(llm.engines.budget.claims.values())


def test_many_query_heads_on_one_kv_head():
    "More than the kernels have room for: the model runs another way."
    heads = dict(num_attention_heads=72, num_key_value_heads=1, head_dim=256)
    llm = LLM(tiny_model("llama", hidden_size=576, num_hidden_layers=1, **heads))
    assert llm.backend.name != "fused"
    right(llm)


def test_ending_many_that_wait_takes_time_for_each_once():
    s = Scheduler()
    rs = [s.add(Request(str(i), [5])) for i in range(3000)]
    compared = Counter()

    class Rank(tuple):
        def __lt__(self, other):
            compared["n"] += 1
            return tuple.__lt__(self, other)

    for r in rs:
        r.rank = Rank(r.rank)
    for r in random.Random(0).sample(rs, len(rs)):
        s.finish(r, "cancelled")
    assert not s.waiting and compared["n"] < 20 * len(rs)


def test_a_signal_at_any_line_of_a_step_loses_nothing():
    "It takes effect behind the step: what was streamed, the answers and whose log probabilities they have are as without it."
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has none
    llm = LLM(
        tiny_model("llama"),
        tiny_tokenizer(),
        max_num_seqs=2,
        max_num_batched_tokens=9,
        enable_prefix_caching=False,
    )
    drawn = SamplingParams(n=2, seed=1, max_tokens=3, ignore_eos=True)
    asked = ([5, 6] * 6, greedy(4, logprobs=1)), ([7], drawn), ([8, 9], greedy(2))

    def told(after):
        "The parts of all answers, where Ctrl-C came after so many lines; and whether it did."
        left, parts, raised = after, [], 0
        for prompt, params in asked:
            llm.add_request(prompt, params, parts.append)

        def trace(frame, event, arg):
            nonlocal left
            if "batchlab" not in frame.f_code.co_filename:
                return None
            if event == "line":
                left -= 1
                if not left:
                    signal.raise_signal(signal.SIGINT)
            return trace

        old = sys.gettrace()
        while llm.has_unfinished:
            sys.settrace(trace if left > 0 else old)
            try:
                llm.step()
            except KeyboardInterrupt:
                raised += 1
            finally:
                sys.settrace(old)
        said = lambda x: (x.text, x.token_ids, x.finish_reason, [*map(list, x.logprobs or ())])
        return [
            said(x) for e in parts for x in (e, *(e.output.outputs if e.output else ()))
        ], raised

    want, _ = told(0)
    for after in itertools.count(1, 97):
        got, raised = told(after)
        assert got == want, after
        if not raised:
            break
    assert after > 2000


WORKERS = """
import os, sys, time
import torch
from batchlab.machine import _openmp, release_threads

torch.set_num_threads(2)
work = lambda: torch.exp(torch.ones(2**20)).sum()  # a loop that is worth two threads
threads = lambda: len(os.listdir("/proc/self/task"))
want = float(work())
if not _openmp():
    sys.exit(3)
for _ in range(3):
    busy = threads()
    release_threads()
    while threads() >= busy:  # they end by themselves
        time.sleep(0.001)
    assert float(work()) == want and torch.get_num_threads() == 2
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is torch's on Linux")
def test_workers_that_were_released_end_and_come_back():
    done = python(WORKERS, OMP_NUM_THREADS="2")
    if done.returncode == 3:
        pytest.skip("this torch has another OpenMP, which counts no workers")
    assert done.returncode == 0


def test_a_thread_that_leaves_the_steps_to_another_keeps_no_workers(monkeypatch):
    "Workers that sleep count as well: with more than there are cores, none spins between two loops of a step."
    released, by_another, done = [], threading.Event(), threading.Event()
    mine = threading.get_ident()

    class OpenMP:
        def omp_pause_resource_all(self, kind):
            released.append(threading.get_ident())
            if released[-1] != mine:
                by_another.set()

    monkeypatch.setattr("batchlab.machine._openmp", lambda: [OpenMP()])
    llm = LLM(tiny_model("llama"), tiny_tokenizer())
    assert released == [mine]  # who loads a model need not be who makes the steps
    llm.start()
    assert released.count(mine) == 2
    llm.add_request("Hi", dict(max_tokens=2), lambda event: event.finished and done.set())
    assert done.wait(60) and by_another.wait(60)  # the thread has nothing to do
    llm.generate("Hi", dict(max_tokens=2))
    assert released.count(mine) == 3
    llm.stop()


# --- the engine by itself


def request(prompt, n=8, **kw):
    params = SamplingParams(**(dict(temperature=0, max_tokens=n) | kw))
    return make_request(SamplingRow.make(params, prompt, {2}))


def seeded(prompts=PROMPTS):
    return [request(p, temperature=1.0, seed=3, ignore_eos=True) for p in prompts]


def run_engine(requests, execute=lambda batch: None, watch=(), **limits):
    "The engine that ran `requests`, on a runner that calls `execute(batch)` first."
    model = tiny_model("llama")

    class Runner(PackedRunner):
        def execute(self, batch):
            execute(batch)
            return super().execute(batch)

    runner = Runner(TorchBackend(model, kv_layout(model)))
    engine = Engine(Scheduler(**limits), runner, list(watch))
    for r in requests:
        engine.scheduler.add(r)
    while engine.scheduler.has_unfinished:
        try:
            engine.step()
        except KeyboardInterrupt:
            assert not engine.scheduler.running and not engine.runner.nbytes
    return engine


def tokens(requests):
    return [r.output_ids for r in requests]


@pytest.mark.parametrize(
    "event, fault",
    [
        ("schedule", KeyboardInterrupt()),
        ("forward", torch.OutOfMemoryError("no more")),
        ("sample", torch.OutOfMemoryError("no more")),
    ],
)
def test_a_step_that_broke_is_computed_again_with_the_same_random_numbers(event, fault):
    free, broken, steps = seeded(), seeded(), itertools.count(1)
    run_engine(free)

    def watch(engine, what, x):
        if what == event and next(steps) == 4:
            raise fault

    run_engine(broken, watch=[watch], max_num_seqs=3)
    assert tokens(broken) == tokens(free) and next(steps) > 4
    assert [r.num_preemptions for r in broken] == [0] * 5


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("can't allocate memory: you tried"),
    ],
)
def test_where_memory_ends_fewer_run_and_one_that_is_too_much_alone_fails(fault, caplog):
    short = [[9, 8, 7], [20], [4] * 12, list(range(30, 37))]
    free, tight, alone = seeded(short), seeded(short) + [request([5] * 70, 4)], []

    def small(batch):
        if sum(batch.seq_lens) > 26:
            alone.append(len(batch))
            raise fault

    run_engine(free)
    engine = run_engine(tight, small)
    assert tokens(tight[:-1]) == tokens(free) and engine.ledger.recomputed > 0
    assert [r.finish_reason for r in tight] == ["length"] * len(free) + ["error"]
    assert "out of memory with this request alone" in tight[-1].error
    assert engine.scheduler.max_num_seqs == 1 in alone and "going on with at most" in caplog.text


def test_memory_follows_the_tokens_and_reset_gives_it_back():
    model, process = tiny_model("llama", head_dim=256), psutil.Process()
    runner = PackedRunner(TorchBackend(model, kv_layout(model)), num_blocks=20_000)
    engine = Engine(Scheduler(max_num_seqs=64, max_num_batched_tokens=1024), runner)

    def serve(n):
        for i in range(n):
            engine.scheduler.add(request([5 + i] * 100, 4, ignore_eos=True))
        while engine.scheduler.has_unfinished:
            engine.step()

    serve(2)  # what torch takes once
    serve(64)
    before, touched = process.memory_info().rss, runner.nbytes
    assert touched < runner.cache.num_blocks * runner.cache.block_bytes / 50
    engine.reset()
    assert not runner.nbytes and before - process.memory_info().rss > touched * 0.9


# --- how a model runs


AROUND = [[7, 8, 9], list(range(40, 52)), list(range(60, 85)), list(range(90, 130))]


def test_models_that_write_nothing_are_refused():
    for model, words in (
        (tiny_model("bert"), "BertLMHeadModel is not causal"),
        (tiny_model("llama").model, "load one with AutoModelForCausalLM"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            probe_model(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_changes_with_its_longest_row(strategy):
    model = longrope()
    want = oracle(model, AROUND, 8)
    assert PaddedEngine(model).run(AROUND, 8)[0] != want[0], "rows change with their company"
    small = SlotEngine(model)
    requests = [small.add_request(p, 8, eos_ids=()) for p in AROUND]
    assert small.way == "alone" and [small.wait(r) for r in requests] == want
    llm = LLM(model, strategy=strategy)
    assert ids(llm.generate(AROUND, greedy(8))) == want
    for p, w in zip(AROUND, want):
        if rope_side(Session(p, 8), 16) != "across":  # there some versions keep its old keys
            assert generated(model, p, 8) == w


@pytest.mark.parametrize(
    "arch, more",
    [
        ("llama4_text", dict(floor_scale=20, attn_scale=0.5, no_rope_layers=[1, 0])),
        ("llama4_text", dict(attention_chunk_size=24, attn_temperature_tuning=False)),
        ("gpt_neo", dict(window_size=24)),
    ],
)
def test_what_begins_beyond_a_trial(arch, more):
    "Llama 4 scales queries by column and attends in chunks, GPT-Neo in a window: from tokens on that no short trial gets to."
    model, prompts = tiny_model(arch, **more), [[*range(5, 5 + n)] for n in (3, 90, 1, 17)]
    want, engine = oracle(model, prompts, 12), SlotEngine(model, 4)
    requests = [engine.add_request(p, 12, eos_ids=()) for p in prompts]
    assert [engine.wait(r) for r in requests] == want
    assert ids(LLM(model).generate(prompts, greedy(12))) == want


def test_three_engines_share_one_budget():
    model, most = longrope(), []
    llm = LLM(model, kv_cache_bytes=256 * 2 * 2 * 2 * 16 * 4, max_num_seqs=4)
    llm.watchers.append(
        lambda engine, event, x: most.append(sum(llm.engines.budget.claims.values()))
    )
    outs = llm.generate(AROUND * 4, greedy(8))
    assert ids(outs) == oracle(model, AROUND, 8) * 4
    assert llm.engines.budget.limit == 256 >= max(most)
    assert sorted(llm.engines) == ["beyond", "packed", "solo"]


@pytest.mark.parametrize("arch", ["mamba", "bloom", "recurrent_gemma"])
def test_models_that_do_not_run_packed_say_so_once(arch, caplog):
    llm = LLM(tiny_model(arch))
    assert ids(llm.generate(PROMPTS, GREEDY)) == oracle(llm.model, PROMPTS, 10)
    assert len([r for r in caplog.records if "ForCausalLM" in r.getMessage()]) == 1


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sampled_answers_do_not_depend_on_what_runs_beside(strategy, size):
    model, tok = tiny_model("llama"), tiny_tokenizer()
    kind = dict(max_tokens=12, temperature=1.2, top_p=0.9, repetition_penalty=1.1)
    own = [SamplingParams(seed=i, n=1 + i % 3, **kind) for i in range(7)]
    words = ["a", "some words", "a rather longer prompt", "x y z", "?", "the end", "one more"]
    answers = lambda outs: [[c.token_ids for c in o.outputs] for o in outs]
    one = LLM(model, tok)
    alone = [answers(one.generate(w, p))[0] for w, p in zip(words, own)]
    llm = LLM(model, tok, strategy=strategy, max_num_seqs=size)
    assert answers(llm.generate(words, own)) == alone
    # the third of three is that of the seed two higher
    assert answers(one.generate("the end", dict(seed=7, **kind)))[0] == alone[5][2:]


# --- limits and arguments


def test_limits_of_a_model():
    model = tiny_model("llama")
    limits = functools.partial(choose_limits, model, kv_layout(model))
    assert (context_limit(model), context_limit(model, 20)) == (256, 20)
    assert free_memory(model.device) > 0
    assert limits(kv_cache_bytes=2**20).max_model_len == 256
    assert limits(kv_cache_bytes=70_000).max_model_len == 128
    whole = Limits(4, 64, 320, 320 * 100, 100)
    whole.fit(256)
    assert (whole.kv_tokens, whole.max_model_len) == (256, 256)  # whole blocks
    with pytest.raises(ParamError, match="kv_cache_bytes"):
        whole.fit(512)
    assert model_and_tokenizer(model, None, "auto", "auto") == (model, None)


# Settings of an `LLM`, and what is said of them.
REFUSED = r"""
[{"strategy": "fast"}, "choose 'loop', 'static'"]
[{"compile": "yes"}, "compile must be 'auto', True or False"]
[{"quantization": "int4"}, "quantization must be None, 'int8' or 'w4a8'"]
[{"quantization": "int8", "strategy": "static"}, "needs strategy='continuous'"]
[{"max_num_seqs": 0}, "max_num_seqs must be"]
[{"kv_cache_bytes": 100}, "raise kv_cache_bytes"]
[{"max_num_seqs": 64, "max_num_batched_tokens": 64}, "must be more than max_num_seqs=64"]
[{"max_model_len": 200, "kv_cache_bytes": 70000}, "lower it, or raise"]
[{"max_model_len": 1000000000}, "lower it"]
[{"dtype": "bf16"}, "loaded by name"]
[{"logprobs_mode": "processed"}, "raw_logprobs.*processed_logits"]
[{"logprobs_mode": null}, "raw_logprobs.*processed_logits"]
[{"speculation": "eagle"}, "None or 'lookup', got 'eagle'"]
[{"speculation": "lookup", "strategy": "static"}, "needs strategy='continuous'"]
[{"enable_lora": true, "max_loras": 2, "max_cpu_loras": 1}, "max_cpu_loras=1"]
[{"enable_lora": true, "strategy": "static"}, "strategy='continuous'"]
"""


@pytest.mark.parametrize("how, words", json_lines(REFUSED), ids=str)
def test_settings_that_are_refused(how, words):
    with pytest.raises((ParamError, ModelError), match=words):
        LLM(tiny_model("llama"), **how)


def test_what_is_no_model_and_what_a_model_alone_can_not_do():
    for model, words in (
        (torch.nn.Linear(2, 2), "got Linear"),
        (7, "got int"),
        ("./nowhere", "no model './nowhere'"),
    ):
        with pytest.raises((ParamError, ModelError), match=words):
            LLM(model)
    with pytest.raises((ParamError, ModelError), match="without a tokenizer"):
        LLM(tiny_model("llama")).generate("text")


def test_a_digest_names_the_weights():
    same, other = tiny_model("llama"), tiny_model("llama", seed=1)
    assert weights_digest(same) == weights_digest(tiny_model("llama")) != weights_digest(other)
    assert weights_digest(same) != weights_digest(tiny_model("llama").bfloat16())


def test_edges_of_a_call():
    model = tiny_model("llama")
    llm = LLM(model, max_model_len=8)
    assert llm.generate([]) == []
    (out,) = llm.generate([5, 6], dict(temperature=0, max_tokens=None, ignore_eos=True))
    assert (len(ids([out])[0]), out.outputs[0].finish_reason) == (6, "length")  # all the context
    outs = llm.generate([[5] * 7, [5] * 8], dict(max_tokens=4))
    assert outs[1].outputs[0].finish_reason == "too_long"
    [[first]] = oracle(model, [[5, 6]], 1)
    (out,) = llm.generate([5, 6], dict(temperature=0, stop_token_ids=[first]))
    assert (out.outputs[0].token_ids, out.outputs[0].stop_reason) == ([first], first)
    llm.stop()  # never started: nothing to do


def test_a_call_that_is_left_early_leaves_nothing():
    model = tiny_model("llama")
    llm = LLM(model)
    model.train()
    stopping = llm.stream([[5], [6]], dict(max_tokens=2))
    assert next(e.output for e in stopping if e.output).finished
    stopping.close()
    assert not llm.has_unfinished and not llm.stats().slots_in_use
    assert model.training and model.model.layers[0].training
    assert model.config._attn_implementation == "sdpa"


# --- events


def test_whatever_happens_each_request_ends_once():
    llm, ends, long = LLM(tiny_model("llama"), tiny_tokenizer()), [], greedy(12)

    def note(name, at_token=None, do=None):
        seen = []

        def callback(e):
            seen.extend(e.token_ids)
            if e.finished:
                [c] = e.output.outputs
                ends.append((name, c.finish_reason, len(c.token_ids)))
            elif at_token == len(seen):
                do()

        return callback

    llm.add_request([5, 6], long, note("whole"))
    llm.cancel(llm.add_request([7], long, note("at once")))
    cancel = lambda: llm.cancel("self")
    llm.add_request([8], long, note("third token", 3, cancel), request_id="self")
    llm.add_request([9], long, note("no time"), timeout=1e-9)
    llm.add_request([10], long, note("broken", 2, lambda: 1 / 0))
    llm.add_request([11], long, note("steps", 2, llm.step))
    drain(llm)
    assert sorted(ends) == [
        ("at once", "cancelled", 0),
        ("broken", "error", 2),
        ("no time", "timeout", 0),
        ("steps", "error", 2),
        ("third token", "cancelled", 3),
        ("whole", "length", 12),
    ]
    assert not llm.engines["packed"].scheduler.pool.num_held
    before = llm.stats()
    assert before.requests == dict(length=1, cancelled=2, timeout=1, error=2)
    assert not (before.running or before.waiting or before.slots_in_use or before.blocks_in_use)
    llm.close()
    after = llm.stats()
    assert (after.kv_bytes, after.blocks, after.output_tokens) == (0, 0, before.output_tokens)


def test_a_callback_that_fails_ends_the_answers_of_its_prompt_that_still_run(caplog):
    caplog.set_level(logging.CRITICAL, "batchlab")
    llm, told = LLM(tiny_model("llama")), []

    def listen(e):
        told.append((e.completion, e.finish_reason, e.finished))
        if len(told) == 2:
            raise ValueError("broken")

    [a, b] = oracle(llm.model, [[5], [5]], 1)
    llm.add_request([5], dict(n=2, seed=1, max_tokens=2, ignore_eos=True), listen)
    drain(llm)
    assert told[-1] == (1, "error", True) and [e for *_, e in told].count(True) == 1
    assert llm.stats().requests["error"] >= 1 and not llm.loop.groups


@pytest.mark.parametrize("where", ["callback", "queued", "forward", "ended"])
def test_an_exit_in_the_thread_ends_what_it_hits_and_not_the_thread(where, caplog):
    "Asked for by a callback, or by a watcher."
    caplog.set_level(logging.CRITICAL, "batchlab")
    llm, told, leave = LLM(tiny_model("llama")), [], raising(SystemExit)
    listen = lambda e: told.append(e.finish_reason) or where == "callback" and leave()
    with llm:
        thread = llm.loop.thread
        llm.watchers.append(lambda _, event, x: event == where and leave())
        llm.add_request([5], GREEDY, listen)
        until(lambda: not llm.has_unfinished)
        assert told[-1] == ("error" if where in ("callback", "forward") else "length")
        assert llm.loop.thread is thread


def test_paused_it_hears_and_makes_no_step_and_nothing_is_lost():
    llm, ended, long = LLM(tiny_model("llama"), tiny_tokenizer(), max_num_seqs=2), {}, greedy(30)
    ask = lambda name, **how: llm.add_request("a bc def", long, noting(ended), name, **how)
    how = lambda name: (ended[name].outputs[0].finish_reason, len(*ids([ended[name]])))
    written = lambda: len(llm.loop.groups["kept"].requests[0].output_ids)
    with llm:
        in_threads(*[llm.pause, llm.resume] * 20)
        llm.pause()
        ask("kept")
        ask("cancelled")
        ask("late", timeout=0.05)
        llm.cancel("cancelled")
        until(lambda: len(ended) == 2)
        assert (how("cancelled"), how("late")) == (("cancelled", 0), ("timeout", 0))
        assert written() == 0
        with pytest.raises(EngineError, match="is not done yet: give another id"):
            ask("kept")
        llm.step()
        assert written() == 1
        llm.resume()
        until(lambda: "kept" in ended)
        llm.pause()
        outs = llm.generate(["other"], long)  # steps by itself, and is not held
        ask("left")
    assert len(*ids(outs)) == 30 and not llm.loop.paused
    with llm:
        ask("again")
        llm.stop()
    with pytest.raises(ZeroDivisionError), llm:
        llm.pause()
        ask("gone")
        raise ZeroDivisionError
    assert [*map(how, ("kept", "left", "again"))] == [("length", 30)] * 3  # leaving goes on
    assert how("gone")[0] == "cancelled"  # but not by an error
    assert llm.stats().slots_in_use == 0


# --- planned, and shared


def test_prompts_that_begin_alike_are_computed_once():
    model, head = tiny_model("llama"), list(range(30, 130))
    prompts = [head + [t] * 3 for t in (5, 6, 7, 8)]
    llm = LLM(model)
    outs = llm.generate(prompts, GREEDY)
    assert ids(outs) == oracle(model, prompts, 10)
    assert [o.num_cached_tokens for o in outs] == [0] + [100] * 3
    (three,) = llm.generate([head + [40, 41]], dict(n=3, seed=1, max_tokens=4))
    assert three.num_cached_tokens == 100
    assert llm.ledger.reused >= 2 * (len(three.prompt_token_ids) - 1)


def test_memory_that_was_given_is_used_before_a_prefix_is_evicted():
    llms = [LLM(tiny_model("llama"), kv_cache_bytes=n) for n in (None, 2**19)]
    cached = lambda llm, i: llm.generate([[i] * 130], greedy(1))[0].num_cached_tokens
    assert [[cached(llm, i) for i in (5, 6, 7, 5)][-1] for llm in llms] == [0, 129]
    assert not any(cached(llms[1], i) for i in range(20, 40))
    pool, most = llms[1].engines["packed"].scheduler.pool, llms[1].limits.kv_tokens
    assert len(pool) == most // pool.block_size > 8 and pool.evictions
