"""What chapter 60 measures an engine with: the parts of a step, the speed of decode steps, and memory beside the plan."""

import contextlib, random, re, time
from collections import Counter, defaultdict
from statistics import median
from unittest import mock

import torch

import batchlab.core.engine
from batchlab import SamplingParams, bench
from batchlab.core.attention import PackedStep
from batchlab.fast.native import PARTS


class Clock:
    "`seconds` spent in the methods that are watched, by label. On a GPU it waits for it at each, which slows the whole down."

    def __init__(self):
        self.seconds, self.inside = defaultdict(float), set()

    @contextlib.contextmanager
    def running(self, label):
        "What runs inside counts for `label`, unless that runs already."
        if label in self.inside:
            yield
            return
        self.inside.add(label)
        begin = time.perf_counter()
        try:
            yield
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        finally:
            self.seconds[label] += time.perf_counter() - begin
            self.inside.remove(label)

    def watch(self, obj, name, label):
        "A context in which calls of method `name` of `obj`, an object or a class, count for `label`."
        call = getattr(obj, name)

        def timed(*args, **kwargs):
            with self.running(label):
                return call(*args, **kwargs)

        return mock.patch.object(obj, name, timed)


def parts_of(llm, fused):
    "Yield `(label, object, method)` of what makes up a step of `llm`, whose fused pass is `fused` or None."
    yield "sampling", batchlab.core.engine, "take_rows"
    for cls in (PackedStep, *PackedStep.__subclasses__()):
        for name in vars(cls).keys() & {"attention", "run"}:
            yield "attention", cls, name
    if fused:
        yield "forward", type(fused.kernels), "run"
    else:
        yield "forward", type(llm.model), "forward"
    linears = {type(m) for m in llm.model.modules()}
    linears = {c for c in linears if re.search("linear|conv1d", c.__name__, re.I)}
    for cls in linears | {type(m) for layer in (fused.modules if fused else ()) for m in layer}:
        yield "linears", cls, "forward"
        if fused:
            yield "forward", cls, "forward"


OF_LINEARS = (
    1,
    3,
    5,
    7,
    8,
    9,
    11,
)  # parts of a fused pass, which keeps its own time; those of experts last


@contextlib.contextmanager
def watched(llm):
    "The parts of every step of `llm`, which has run before, in a `Clock`."
    clock, fused = Clock(), getattr(llm.backend, "fused", None)
    with contextlib.ExitStack() as stack:
        for label, obj, name in parts_of(llm, fused):
            stack.enter_context(clock.watch(obj, name, label))
        if not fused:
            yield clock
            return
        fused.seconds = torch.zeros(PARTS, dtype=torch.float64)
        try:
            yield clock
        finally:
            spent, fused.seconds = fused.seconds.tolist(), None
            clock.seconds["attention"] = spent[2]
            clock.seconds["linears"] += sum(spent[i] for i in OF_LINEARS)


def exactly(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def profile(llm, w, warm=None):
    "Seconds of workload `w` in `llm` by part, `{'linears', 'attention', 'small ops', 'sampling', 'bookkeeping'}`, and its steps."

    def run(w):
        llm.generate(w.prompts, [*map(exactly, w.max_tokens)], use_tqdm=False)

    run(warm or w)
    llm.reset_prefix_cache()  # else the second run would compute nothing of the prompts
    before = llm.stats().steps
    with watched(llm) as clock, clock.running("all"):
        run(w)
    spent = clock.seconds
    small = spent["forward"] - spent["linears"] - spent["attention"]
    rest = spent["all"] - spent["forward"] - spent["sampling"]
    parts = dict(linears=spent["linears"], attention=spent["attention"])
    parts |= {"small ops": small, "sampling": spent["sampling"], "bookkeeping": rest}
    return parts, llm.stats().steps - before


def decode_rate(llm, slots, context=64, steps=32, vocab=(100, 40_000)):
    "Tokens per second in those decode steps in which each of `slots` requests, of `context` tokens before it, gets one."
    rng, rates, got = random.Random(f"{slots} {context}"), [], Counter()
    prompts = [[rng.randrange(*vocab) for _ in range(context)] for _ in range(slots)]
    llm.generate(prompts, exactly(1), use_tqdm=False)  # leaves their keys and values in the cache
    for p in prompts:
        llm.add_request(
            p, exactly(steps + 1), lambda e: got.update({e.request_id: len(e.token_ids)})
        )
    more = True
    while more:
        got.clear()
        begin = time.perf_counter()
        more = llm.step()
        took = time.perf_counter() - begin
        if len(got) == slots:
            rates.append(got.total() / took)
    return median(rates)


def start_planned(model, dtype, device, max_num_seqs, **_):
    "The source of a process that answers a workload, and says what the plan of it was and what was there before the model."
    import psutil
    from transformers import AutoTokenizer
    from batchlab import LLM, SamplingParams
    from batchlab.models import tiny_model

    first = LLM(tiny_model("llama"))  # loads what is loaded when first used
    first.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    AutoTokenizer.from_pretrained(model)
    base = psutil.Process().memory_info().rss
    llm = LLM(model, dtype=dtype, device=device, max_num_seqs=max_num_seqs)

    def run(prompts, max_tokens, max_num_seqs):
        params = greedy_params(SamplingParams, max_tokens)  # noqa: F821  of the file in front of it
        plan = llm.plan(prompts, params)
        outs = llm.generate(prompts, params, use_tqdm=False)
        assert not any(o.error for o in outs)
        return dict(base=base, weights=plan.weights_bytes, kv=plan.kv_bytes)

    return dict(run=run)


def memory_of(model, w, **how):
    "Bytes of a fresh process that answers workload `w`: `{'base', 'weights', 'kv', 'ready', 'peak'}`."
    settings = dict(model=model, dtype="bf16", device="cpu", max_num_seqs=64) | how
    text, env = bench.worker_text(start_planned), bench.peer_env("batchlab")
    with bench.started(text, settings, env=env) as worker:
        ready = bench.peak_bytes(worker.process.pid)
        plan = worker.ask("run", **w.job)["result"]
        return plan | dict(ready=ready, peak=bench.peak_bytes(worker.process.pid))
