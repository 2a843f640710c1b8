"The small engine of part I: its tokens are the oracle's and transformers' `generate`, whatever the mix; slots, streams, threads."

import functools, json, random, re, sys, threading, time, types
from pathlib import Path

import pytest, torch

from batchlab.basics.decode import BatchEngine, draw
from batchlab.basics.padding import PaddedEngine
from batchlab.basics.prefill import SoloEngine, Session, eos_ids_of, generate_naive
from batchlab.basics.prefix import PrefixEngine, chunk_keys, common_length, common_prefix
from batchlab.basics.ragged import RaggedEngine
from batchlab.basics.slots import SlotBatch, SlotEngine
from batchlab.errors import EngineError, PromptError
from batchlab.models import tiny_model
from helpers import draws, in_threads, one_thread

pytestmark = one_thread
FAMILIES = "llama mistral qwen3 gemma3 gpt2 gpt_neox bloom mpt mamba".split()
FOLDER = Path(__file__).resolve().parents[1] / "batchlab/basics"
model = functools.cache(tiny_model)


def generated(m, prompt, n):
    "transformers' own greedy tokens, the prompt alone."
    ids = torch.tensor([prompt])
    out = m.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def mix(rng, vocab_size, most=8):
    "Prompts of different lengths, some of which begin alike, and how many tokens each is to get."
    shared = [rng.randrange(vocab_size) for _ in range(40)]
    ends = ([rng.randrange(vocab_size) for _ in range(rng.randint(1, 18))] for _ in range(most))
    prompts = [shared[: rng.choice((0, 3, 16, 33, 40))] + end for end in ends]
    return [(p, rng.randint(1, 9)) for p in prompts[: rng.randint(1, most)]]


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_on_drawn_mixes(family):
    "Ten a family: any number of slots, any chunk, prompts that come late, some of them cancelled."
    m, eos = model(family), eos_ids_of(model(family))
    way = dict(bloom="padded", mpt="padded", mamba="alone").get(family, "packed")
    reused = 0
    for seed in range(draws(10)):
        rng = random.Random(seed)
        more = dict(chunk_size=rng.choice((1, 3, 8, 64)), max_columns=rng.choice((32, 8192)))
        engine = SlotEngine(m, rng.randint(1, 4), **more)
        assert engine.way == way
        left, requests = mix(rng, m.config.get_text_config().vocab_size), []
        while left or engine.has_unfinished:
            if left and (rng.random() < 0.4 or not engine.has_unfinished):
                prompt, n = left.pop()
                requests.append((engine.add_request(prompt, n), prompt, n))
            if rng.random() < 0.03:
                engine.cancel(rng.choice(requests)[0])
            engine.step()
        for request, prompt, n in requests:
            want = generated(m, prompt, n)
            assert want == generate_naive(m, prompt, n, eos)
            if request.finish_reason == "cancelled":
                want = want[: len(request.output_ids)]
            assert request.output_ids == want, (family, seed)
        reused += getattr(engine.engine, "counts", {}).get("reused", 0)
    assert reused > 0 or way != "packed"


@pytest.mark.parametrize(
    "engine", [SoloEngine, BatchEngine, PaddedEngine, PrefixEngine, RaggedEngine]
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_each_engine_on_the_way(engine, family):
    m, eos = model(family), eos_ids_of(model(family))
    for seed in range(3):
        rng = random.Random(seed)
        asked = mix(rng, 259)
        e = engine(m, num_slots=rng.randint(1, 4))
        requests = [e.add_request(prompt, n) for prompt, n in asked]
        while e.has_unfinished:
            e.step()
        assert [r.output_ids for r in requests] == [generate_naive(m, p, n, eos) for p, n in asked]


@pytest.mark.parametrize("waves, bucketed", [(True, False), (True, True), (False, True)])
def test_waves_and_buckets(waves, bucketed):
    m, (asked, eos) = model("llama"), (mix(random.Random(5), 259, 9), eos_ids_of(model("llama")))
    for kind in (PaddedEngine, PrefixEngine):
        engine = kind(m, 3, waves=waves, bucketed=bucketed)
        requests, sizes = [engine.add_request(p, n) for p, n in asked], []
        while engine.has_unfinished:
            before = len(engine.running)
            engine.step()
            sizes.append((before, len(engine.running)))
        assert [r.output_ids for r in requests] == [generate_naive(m, p, n, eos) for p, n in asked]
        if waves:  # nobody joins those that run
            assert all(after <= before for before, after in sizes if before and after > 0)


def test_edges():
    m = model("llama")
    engine = SlotEngine(m, 2)
    with pytest.raises(PromptError, match="no tokens"):
        engine.add_request([])
    with pytest.raises(PromptError, match="256 tokens"):
        engine.add_request([1] * 256)
    last = engine.add_request([1] * 255, 9)  # room for one token
    [first] = generate_naive(m, [5, 6, 7], 1, ())
    stopped = engine.add_request([5, 6, 7], 9, eos_ids={first})
    zeros = engine.add_request([0, 0, 0], 1)  # the id that pads
    while engine.has_unfinished:
        engine.step()
    assert (len(last.output_ids), last.finish_reason) == (1, "length")
    assert (stopped.output_ids, stopped.finish_reason) == ([first], "stop")
    assert zeros.output_ids == generate_naive(m, [0, 0, 0], 1, ())
    assert engine.run([], 4) == [] and not engine.cancel(zeros)


def test_a_slot_that_was_taken_again_is_not_found_under_what_it_had():
    batch = SlotBatch(model("llama"), 1)
    shared = [(7 * i) % 259 for i in range(32)]
    batch.run([shared + [1]], 1)
    assert batch.index.find(shared) == (0, 32)
    batch.run([[200] * 20], 1)  # the only slot has another request now
    assert batch.index.find(shared) == (0, 0) and batch.index.find([200] * 20) == (0, 20)


def test_prefixes_exact_to_the_token():
    assert common_length([1, 2, 3], [1, 2, 4, 5]) == 2 and common_length([], [1]) == 0
    assert common_prefix([[1] * 40, [1] * 33 + [2]]) == 32 and common_prefix([[5]]) == 0
    assert chunk_keys([1] * 40)[1] != chunk_keys([2] * 16 + [1] * 24)[1]  # names the whole prefix
    batch = SlotBatch(model("gpt2"), 2)
    batch.run([list(range(40))], 2)
    batch.run([[*range(37), 99, 98]], 2)
    assert batch.counts["reused"] == 37
    assert batch.counts["prefill"] == 40 + 2


def test_a_long_prompt_does_not_hold_up_those_that_decode():
    engine = SlotEngine(model("llama"), 2, chunk_size=8)
    fast = engine.add_request([1, 2], 12)
    engine.step()
    slow = engine.add_request([3] * 60, 1)
    while not slow.output_ids:
        before = len(fast.output_ids)
        engine.step()
        assert len(fast.output_ids) == before + 1


def test_sampling_does_not_depend_on_company():
    m = model("llama")
    ask = dict(temperature=1.2, top_p=0.9, seed=7)
    engine = SlotEngine(m, 4, draw)
    alone = engine.add_request([9, 8, 7], 8, **ask)
    engine.wait(alone)
    crowd = [engine.add_request([i + 1] * (i + 1), 8, temperature=1.0) for i in range(3)]
    again = engine.add_request([9, 8, 7], 8, **ask)
    cold = engine.add_request([9, 8, 7], 8)
    for request in (again, cold, *crowd):
        engine.wait(request)
    assert again.output_ids == alone.output_ids
    assert cold.output_ids == generate_naive(m, [9, 8, 7], 8, eos_ids_of(m))
    assert alone.output_ids != cold.output_ids


def test_top_p_and_temperature():
    logits = torch.tensor([[3.0, 2.9, -9.0]])
    drawn = {draw(logits, [Session([1], temperature=1.0, seed=s)])[0] for s in range(40)}
    assert drawn == {0, 1}
    drawn = {draw(logits, [Session([1], temperature=1.0, top_p=0.3, seed=s)])[0] for s in range(20)}
    assert drawn == {0} == {draw(logits, [Session([1])])[0]}


def test_streams_and_callbacks():
    m, prompts = model("llama"), [[1, 2, 3], [4] * 20]
    engine, seen = SlotEngine(m, 2, chunk_size=4), []
    told = list(engine.stream(prompts, 3))
    want = [generate_naive(m, p, 3, eos_ids_of(m)) for p in prompts]
    assert [[t for i, t in told if i == k] for k in (0, 1)] == want
    engine.wait(engine.add_request(prompts[0], 3, on_token=seen.append))
    assert seen == [*want[0], None]


def test_a_thread_runs_it_and_ends():
    m, eos = model("llama"), eos_ids_of(model("llama"))
    engine = SlotEngine(m, 3)
    engine.start()
    with pytest.raises(EngineError, match="runs already"):
        engine.start()
    prompts = [[i + 1] * (i + 2) for i in range(6)]
    ask = lambda prompt: lambda: engine.wait(engine.add_request(prompt, 5))
    assert in_threads(*map(ask, prompts)) == [generate_naive(m, p, 5, eos) for p in prompts]
    endless = engine.add_request([1], 250, eos_ids=())
    engine.stop()
    engine.stop()  # again does nothing
    assert endless.finish_reason in ("cancelled", "length") and engine.thread is None
    assert not engine.has_unfinished and engine.run([[1, 2]], 2)  # by its own steps again


@pytest.mark.parametrize("family", ("llama", "gemma3", "bloom", "mamba"))
def test_a_step_that_fails_inside_the_model_leaves_an_engine_that_works(family):
    "In prefill and in decode, in the second layer, when the first has written its keys and values."
    m, prompts = model(family), [[5, 6, 7], [*range(40, 70)], [9, 8]]
    layers = next(x for x in m.modules() if isinstance(x, torch.nn.ModuleList))

    def fail(*args):
        raise RuntimeError("out of memory")

    engine = SlotEngine(m, num_slots=2)
    for steps in (0, 2):
        # one of them waits
        ends = []
        asked = [engine.add_request(prompt, 9, on_token=ends.append) for prompt in prompts]
        for _ in range(steps):
            engine.step()
        hook = layers[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        hook.remove()
        assert [r.finish_reason for r in asked] == ["error"] * 3 and ends.count(None) == 3
        assert engine.run(prompts, 6) == [generated(m, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("end", ("cancel", "stop"))
def test_the_thread_lets_others_have_the_lock_between_two_steps(end):
    "Who cancels while a step runs is next, and not the thread that takes the lock again and again."
    engine, began = SlotEngine(model("llama")), threading.Event()

    def on_token(token):
        began.set()
        while token is not None and not engine.turn.locked():  # until the other one stands there
            time.sleep(0.001)

    engine.start()
    request = engine.add_request([5, 6], 200, eos_ids=(), on_token=on_token)
    began.wait()
    if end == "cancel":
        assert engine.cancel(request)
    engine.stop()
    assert request.finish_reason == "cancelled" and len(request.output_ids) == 1


def test_a_stream_beside_the_thread_makes_no_steps_of_its_own(monkeypatch):
    engine, makers = SlotEngine(model("llama")), set()
    step = engine.engine.step
    monkeypatch.setattr(
        engine.engine, "step", lambda: (makers.add(threading.current_thread()), step())[1]
    )
    engine.start()
    worker = engine.thread
    got = [token for _, token in engine.stream([[5, 6, 7]], 6)]
    engine.stop()
    assert got == generated(model("llama"), [5, 6, 7], 6) and makers == {worker}


def typed():
    "What a reader of the six chapters types: their exported cells in order, without what they import of one another."
    for chapter in sorted((FOLDER.parents[1] / "nbs/1_basics").glob("*.ipynb")):
        for cell in json.loads(chapter.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and re.match(r"#\| export", source):
                own = r"^from (batchlab\.basics\.\w+|__future__) import (\([^)]*\)|[^\n]*)$"
                yield re.sub(own, "", source, flags=re.M)


@pytest.mark.parametrize("family", ("llama", "gemma3", "bloom", "mamba"))
def test_what_a_reader_types_is_the_engine(family, monkeypatch):
    "The cells alone, in one file: the tokens of `generate` for prompts of different lengths, some of which begin alike."
    program = "from __future__ import annotations\n" + "\n".join(typed())
    assert set(re.findall(r"\bbatchlab[\w.]*", program)) == {"batchlab.errors"}
    file = types.ModuleType("typed")
    monkeypatch.setitem(sys.modules, "typed", file)  # dataclasses look their module up
    exec(compile(program, "typed", "exec"), file.__dict__)
    m = model(family)
    asked = mix(random.Random(5), m.config.get_text_config().vocab_size)
    engine = file.SlotEngine(m, num_slots=3)
    sessions = [engine.add_request(prompt, n) for prompt, n in asked]
    got = [engine.wait(session) for session in sessions]
    assert got == [generated(m, prompt, n) for prompt, n in asked] and len({*map(len, got)}) > 1
