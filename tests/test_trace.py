"The recorder against the engine's own numbers, over drawn mixes, threads, faults and limits; and pictures of what comes of it."

import json, logging, random, re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from xml.dom.minidom import parseString

import pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

from batchlab.view import pictures
from batchlab.view.drawing import Canvas
from batchlab.llm.config import STRATEGIES
from batchlab.api import LLM
from batchlab.errors import BatchlabError, TraceError
from batchlab.core.ledger import Ledger
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.core.runners import PackedRunner
from batchlab.core.params import SamplingParams
from batchlab.view.trace import Recorder, StepLog
from batchlab.view.tracefile import LEDGER, PARTS, Row, Run, Trace, slot_runs

MODELS = {}
V2 = Path(__file__).parent / "data" / "trace_v2.json"


@pytest.fixture(autouse=True)
def quiet():
    log, before = logging.getLogger("batchlab"), torch.get_num_threads()
    torch.set_num_threads(1)
    log.setLevel(logging.CRITICAL)
    yield
    torch.set_num_threads(before)
    log.setLevel(logging.NOTSET)


def model(arch):
    if arch not in MODELS:
        MODELS[arch] = tiny_model(arch)
    return MODELS[arch]


def prompts_of(n, seed, longest=40):
    rng = random.Random(seed)
    heads = [rng.choices(range(3, 259), k=k) for k in (0, 16, 33)]
    return [heads[i % 3] + rng.choices(range(3, 259), k=rng.randint(1, longest)) for i in range(n)]


def check_events(events: Sequence[dict]) -> int:
    "Chapter 50's check that `events` keep the rules of Chrome's trace-event format; returns how many there are."

    def need(ok, what, e=None):
        if not ok:
            raise TraceError(
                f"not in the trace-event format: {what}" + (f" in {e!r:.120}" if e else "")
            )

    number, named, open_ = lambda x: isinstance(x, (int, float)) and x >= 0, set(), Counter()
    for e in events:
        need(e.get("ph") in tuple("XMCibne") and isinstance(e.get("name"), str), "ph or name", e)
        need(
            all(isinstance(e.get(k), int) for k in ("pid", "tid")) and number(e.get("ts")),
            "pid, tid or ts",
            e,
        )
        need(e["ph"] != "X" or number(e.get("dur")), "dur", e)
        need(e["ph"] != "M" or {"name", "sort_index"} & {*e["args"]}, "args of metadata", e)
        need(e["ph"] != "C" or all(map(number, e["args"].values())), "the number of a counter", e)
        need(e["ph"] != "i" or e.get("s") in tuple("gpt"), "the scope of an instant", e)
        need(
            e["ph"] not in "bne" or e.get("cat") and e.get("id2", {}).get("local"), "cat or id2", e
        )
        if e["ph"] in "be":
            open_[e["pid"], e["id2"]["local"], e["name"]] += (e["ph"] == "b") * 2 - 1
        if e["name"] == "thread_name":
            named.add((e["pid"], e["tid"]))
    need(not any(open_.values()), "a span that does not end, or does not begin")
    slices = sorted(
        (e for e in events if e["ph"] == "X"),
        key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"]),
    )
    need({(e["pid"], e["tid"]) for e in slices} <= named, "a track without a name")
    stack = []
    for e in slices:
        while stack and ((e["pid"], e["tid"]) != stack[-1][:2] or e["ts"] >= stack[-1][2] - 1e-3):
            stack.pop()
        need(not stack or e["ts"] + e["dur"] <= stack[-1][2] + 1e-3, "slices that overlap", e)
        stack.append((e["pid"], e["tid"], e["ts"] + e["dur"]))
    return len(events)


def agrees(trace, llm, ledger):
    "Everything that both count is the same, and the parts of the trace fit together."
    t, steps, requests, stats = trace.totals, trace.steps, trace.requests, vars(llm.stats())
    assert vars(trace.ledger) == ledger
    for k in (
        "requests",
        "prompt_tokens",
        "output_tokens",
        "cached_tokens",
        "recomputed",
        "padded",
        "masked",
        "preemptions",
        "steps",
    ):
        assert t[k] == stats[k], k
    for k in LEDGER:
        assert sum(s[k] for s in steps) == t[k], k
    for k in ("prompt_tokens", "output_tokens", "cached_tokens", "preemptions"):
        assert sum(r[k] for r in requests) == t[k], k
    assert Counter(r["finish_reason"] for r in requests) == t["requests"]
    assert [s["step"] for s in steps] == list(range(t["steps"] + t["broken"]))
    whole = [s for s in steps if not s["error"]]
    sampled = Counter(row[1] for s in whole for row in s["rows"] if row[5])
    assert all(
        sampled[r["request"]] == r["output_tokens"]
        for r in requests
        if r["finish_reason"] != "error"
    )
    for s in whole:
        if s["engine"] == "packed":
            assert s["tokens"] == s["useful"] + s["recomputed"] and s["cached"] == s["reused"]
            assert sum(row[4] for row in s["rows"]) == s["recomputed"]
        for slot, number, start, n, again, samples, prefill in s["rows"]:
            assert 0 <= slot < s["slots"] and n > 0 and start + n <= s["held"][slot]
        assert 0 <= s["blocks_shared"] <= s["blocks_held"] <= s["blocks"] - s["blocks_cached"]
        assert all(s[k] >= 0 for k in PARTS)
    for a, b in zip(steps, steps[1:]):
        assert b["start"] >= a["start"] + sum(a[k] for k in PARTS) - 1e-5
    check_events(trace.events()["traceEvents"])


@st.composite
def cases(draw):
    request = st.tuples(
        st.integers(0, 11),
        st.integers(1, 14),
        st.integers(1, 2),
        st.integers(-1, 1),
        st.integers(0, 2),
    )
    return dict(
        arch=draw(st.sampled_from(("llama", "llama", "gemma3", "bloom", "mamba"))),
        strategy=draw(st.sampled_from(STRATEGIES)),
        seqs=draw(st.integers(1, 5)),
        budget=draw(st.integers(6, 40)),
        kv=draw(st.sampled_from((None, 192, 320))),
        caching=draw(st.booleans()),
        requests=draw(st.lists(request, min_size=1, max_size=8)),
        cancels=draw(st.dictionaries(st.integers(0, 7), st.integers(0, 5), max_size=2)),
    )


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_whatever_ran_the_trace_counts_as_the_engine_does(case):
    llm, prompts = (
        LLM(
            model(case["arch"]),
            tiny_tokenizer(),
            strategy=case["strategy"],
            max_num_seqs=case["seqs"],
            trace=True,
            enable_prefix_caching=case["caching"],
            max_num_batched_tokens=case["budget"],
        ),
        prompts_of(12, 1),
    )
    if case["kv"] and llm.limits.kv_bytes_per_token:
        llm.limits.kv_bytes = case["kv"] * llm.limits.kv_bytes_per_token
        llm.limits.max_model_len = min(llm.max_model_len or 10**9, case["kv"])
        llm.engines.configure()
    texts = {}
    for i, (p, n, answers, priority, wait) in enumerate(case["requests"]):
        for _ in range(wait):
            llm.step()

        def hear(e, i=i):
            key = f"{i}-{e.completion}" if case["requests"][i][2] > 1 else f"{i}"
            texts[key] = texts.get(key, "") + e.text

        llm.add_request(
            prompts[p],
            SamplingParams(seed=i, n=answers, max_tokens=n, ignore_eos=True),
            hear,
            request_id=str(i),
            priority=priority,
        )
        if case["cancels"].get(i) == 0:
            llm.cancel(str(i))
    ledger, steps = Counter(), 0
    while llm.has_unfinished:
        llm.step()
        steps += 1
        for i, at in case["cancels"].items():
            if at == steps:
                llm.cancel(str(i))
        assert steps < 2000
    ledger = vars(Ledger(*(getattr(llm.engines.past, k) + getattr(llm.ledger, k) for k in LEDGER)))
    agrees(llm.recorder, llm, ledger)
    assert not llm.recorder.request_log.here
    assert {r["id"]: "".join(r["pieces"]) for r in llm.recorder.requests} == texts


def test_the_cases_do_what_they_are_for():
    "Preemption, prefixes and cancelling do come up in a trace, on settings as above."
    seen, per_token = Counter(), LLM(model("llama")).limits.kv_bytes_per_token
    for kv, n, count in ((256, 100, 8), (640, 60, 8), (5000, 20, 30)):
        llm = LLM(
            model("llama"),
            tiny_tokenizer(),
            max_num_seqs=5,
            max_num_batched_tokens=40,
            trace=True,
            kv_cache_bytes=kv * per_token,
        )
        for i, p in enumerate(prompts_of(count, 1)):
            llm.add_request(
                [9] * 70 * (count > 8) + p,
                SamplingParams(seed=i, max_tokens=n, ignore_eos=True),
                request_id=str(i),
            )
        for _ in range(5):
            llm.step()
        llm.cancel("1")
        while llm.step():
            pass
        agrees(llm.recorder, llm, vars(llm.ledger))
        seen.update(
            {
                k: llm.recorder.totals[k]
                for k in ("preemptions", "recomputed", "reused", "cached_tokens")
            }
        )
        seen.update(
            Counter(
                k
                for s in llm.recorder.steps
                for k in ("preempted", "copies", "blocks_shared")
                if s[k]
            )
        )
        assert llm.recorder.totals["requests"]["cancelled"] == 1
    assert all(
        seen[k]
        for k in (
            "preemptions",
            "recomputed",
            "reused",
            "cached_tokens",
            "preempted",
            "copies",
            "blocks_shared",
        )
    ), seen


def test_several_kinds_of_engine_in_one_trace():
    "Prompt log probabilities on a padded model run alone, the rest in batches: slots are those of their engine."
    llm = LLM(model("bloom"), tiny_tokenizer(), max_num_seqs=3, trace=True)
    llm.generate(
        prompts_of(5, 2),
        [
            SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0 if i % 2 else None)
            for i in range(5)
        ],
    )
    agrees(llm.recorder, llm, vars(llm.ledger))
    assert {s["engine"] for s in llm.recorder.steps} == {"padded", "solo"}
    for draw in (pictures.timeline, pictures.waste):
        parseString(draw(llm.recorder).svg)


def test_recorders_come_and_go_while_a_thread_runs():
    llm = LLM(model("llama"), tiny_tokenizer(), max_num_seqs=3)
    whole, inner, seen = Recorder(llm).start(), [], []

    def listen(e):
        if len(seen) == 5:
            inner.append(llm.trace().start())  # inside a step, from the thread that makes it
        if len(seen) == 100:
            inner[0].stop()
        seen.append(e)

    with llm:
        for i, p in enumerate(prompts_of(12, 3)):
            llm.add_request(p, SamplingParams(seed=i, max_tokens=12, ignore_eos=True), listen)
        for _ in range(30):
            with llm.trace(text=False) as brief:
                json.dumps(brief.data)
            json.dumps(whole.since(max(0, whole.num_steps - 2)))
    whole.stop().stop()
    assert llm.watchers == []
    agrees(whole, llm, vars(llm.ledger))
    check = inner[0]
    assert 0 < check.totals["steps"] < whole.totals["steps"]
    for s in check.steps:
        assert {row[1] for row in s["rows"]} <= {r["request"] for r in check.requests}
    texts = {r["id"]: "".join(r["pieces"]) for r in whole.requests}
    ended = [r for r in check.requests if r["end"] is not None]
    assert ended and all(
        "".join(r["pieces"]) == texts[r["id"]] and len(r["pieces"]) == r["output_tokens"]
        for r in ended
    )


def test_a_fault_in_the_recorder_is_nobody_elses(monkeypatch):
    llm = LLM(model("llama"), tiny_tokenizer())
    plain = [
        o.outputs[0].token_ids
        for o in llm.generate(prompts_of(4, 4), SamplingParams(temperature=0, max_tokens=6))
    ]
    note = StepLog.note
    for event in ("queued", "begin", "schedule", "forward", "sample", "text", "ended"):

        def fault(self, source, e, *x, event=event):
            1 / 0 if e == event else note(self, source, e, *x)

        with monkeypatch.context() as m, llm.trace() as trace:
            m.setattr(StepLog, "note", fault)
            assert [
                o.outputs[0].token_ids
                for o in llm.generate(prompts_of(4, 4), SamplingParams(temperature=0, max_tokens=6))
            ] == plain
            assert llm.watchers == []
        json.dumps(trace.data)


def test_a_recording_changes_no_token():
    for strategy in STRATEGIES:
        llm = LLM(model("llama"), tiny_tokenizer(), strategy=strategy, max_num_seqs=3)
        params = [SamplingParams(seed=i, temperature=1.2, max_tokens=3 + i) for i in range(6)]
        plain = [o.outputs[0].token_ids for o in llm.generate(prompts_of(6, 5), params)]
        llm.reset_prefix_cache()
        with llm.trace():
            assert [o.outputs[0].token_ids for o in llm.generate(prompts_of(6, 5), params)] == plain


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no more"), RuntimeError("broken"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("after", [False, True])
def test_steps_that_break(monkeypatch, error, after):
    "Before the forward or after it, when the ledger has counted: the sums still agree."
    run, calls = PackedRunner.execute, []

    def once(self, batch):
        calls.append(batch)
        got = run(self, batch) if after or len(calls) != 3 else None
        if len(calls) == 3:
            raise error
        return got

    monkeypatch.setattr(PackedRunner, "execute", once)
    llm = LLM(model("llama"), tiny_tokenizer(), max_num_seqs=2, trace=True)
    for i, p in enumerate(prompts_of(3, 6)):
        llm.add_request(p, SamplingParams(seed=i, max_tokens=5, ignore_eos=True))
    while llm.has_unfinished:
        try:
            llm.step()
        except KeyboardInterrupt:
            pass
    agrees(llm.recorder, llm, vars(llm.ledger))
    assert (
        llm.recorder.totals["broken"] == 1
        and llm.recorder.steps[2]["error"] == type(error).__name__
    )


def test_limits_hold_and_sums_stay():
    llm = LLM(model("llama"), tiny_tokenizer(), max_num_seqs=4)
    with llm.trace(max_rows=120, max_text=500) as small, llm.trace() as whole:
        for call in range(3):
            llm.generate(
                prompts_of(20, call), SamplingParams(seed=1, max_tokens=9, ignore_eos=True)
            )
    a, b = (
        {k: v for k, v in t.totals.items() if k not in (*PARTS, "seconds", "tracing")}
        for t in (small, whole)
    )
    assert a == b and a["requests"] == {"length": 60}
    assert small.step_log.num_rows == sum(len(s["rows"]) for s in small.steps) <= 120
    kept = {r["request"]: r for r in small.requests}
    assert {row[1] for s in small.steps for row in s["rows"]} <= kept.keys()
    assert (
        len(kept) + small.dropped["requests"] == 60
        and small.dropped["steps"] + len(small.steps) == a["steps"]
    )
    assert (
        sum(len(r["prompt_ids"]) + len(r["output_ids"]) for r in kept.values() if "prompt_ids" in r)
        == small.request_log.num_text
        <= 500
    )
    assert small.dropped["texts"] and small.steps[-1] == {
        **whole.steps[-1],
        **{k: small.steps[-1][k] for k in (*PARTS, "start")},
        "rows": small.steps[-1]["rows"],
    }
    for r, w in ((kept[n], whole.request(n)) for n in kept):
        assert r["output_tokens"] == w["output_tokens"] and r["slots"] == w["slots"]


def test_files(tmp_path):
    llm = LLM(model("llama"), tiny_tokenizer(), trace=True)
    llm.generate(["Grüße, 世界 🎉", "a\nb"], SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
    path = llm.recorder.save(tmp_path / "t.json")
    assert Trace.load(path).data == llm.recorder.data == json.loads(path.read_text())
    whole = path.read_bytes()
    for cut in (0, 1, len(whole) // 3, len(whole) - 1):
        (tmp_path / "torn.json").write_bytes(whole[:cut])
        with pytest.raises(TraceError, match="torn.json"):
            Trace.load(tmp_path / "torn.json")
    for text in (
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b'{"format":"batchlab-trace"}',
        b'{"format":"batchlab-trace","version":"1"}',
        b"[" * 10**5,
    ):
        (tmp_path / "other.json").write_bytes(text)
        with pytest.raises(BatchlabError, match="other.json"):
            Trace.load(tmp_path / "other.json")
    with pytest.raises(TraceError, match="can not be read"):
        Trace.load(tmp_path / "none.json")
    with pytest.raises(TraceError, match="can not be read"):
        Trace.load(tmp_path)
    with pytest.raises(OSError):
        llm.recorder.save(tmp_path / "no" / "such.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.json", "t.json", "torn.json"]


def test_a_file_of_version_2_still_opens(tmp_path):
    "Two requests that were recorded from their middle on; read as it is, drawn, and saved again."
    old, t = json.loads(V2.read_text()), Trace.load(V2)
    assert old["version"] == 2 and t.data == old
    assert [(r["prompt_tokens"], r["output_tokens"], len(r["pieces"])) for r in t.requests] == [
        (4, 12, 12),
        (1, 12, 12),
    ]
    assert len(t.steps) == t.totals["steps"] == 8 and [len(s["rows"]) for s in t.steps] == [2] * 8
    assert Trace.load(t.save(tmp_path / "again.json")).data == old
    for draw in (pictures.timeline, pictures.waste):
        parseString(draw(V2).svg)
    assert check_events(t.events()["traceEvents"]) and t.frame().shape[0] == len(t.steps)


@pytest.mark.parametrize("version", [1, 3, 99, 0, -1, True, "1", 1.5, None])
def test_a_file_of_an_unknown_version_is_refused(version, tmp_path):
    (tmp_path / "new.json").write_text(
        json.dumps(json.loads(V2.read_text()) | dict(version=version))
    )
    with pytest.raises(TraceError, match=f"version {re.escape(repr(version))}"):
        Trace.load(tmp_path / "new.json")


@pytest.mark.parametrize("count", [1, 2, 24, 500])
def test_pictures(count, tmp_path):
    "Each parses, has its texts and both sets of colours, and stays small; nothing lies outside."
    rng, traces = random.Random(count), {}
    prompts, params = (
        prompts_of(count, count),
        [
            SamplingParams(temperature=0, max_tokens=rng.randint(1, 12), ignore_eos=True)
            for _ in range(count)
        ],
    )
    for strategy in ("static", "continuous"):
        llm = LLM(
            model("llama"),
            tiny_tokenizer(),
            strategy=strategy,
            max_num_seqs=max(2, min(64, count // 3)),
        )
        with llm.trace() as traces[strategy]:
            llm.generate(prompts, params)
    one, barrier = traces["continuous"], traces["static"]
    drawn = [pictures.timeline(traces, by=by) for by in ("steps", "time")]
    drawn += [draw(one) for draw in (pictures.packed_row, pictures.prefixes)]
    drawn += [pictures.waste(traces), pictures.packed_row(barrier, step=0)]
    for p in drawn:
        root = parseString(p.svg).documentElement
        assert (
            [n.tagName for n in root.childNodes[:3]] == ["title", "desc", "style"]
            and p.title
            and p.desc
        )
        assert len(p.svg) < 150_000, p.title
        dark = root.getElementsByTagName("style")[0].firstChild.data
        for kind in set(re.findall(r'class="bl-(?:s-)?(\w+)"', p.svg)):
            assert f"-{kind}{{" in dark
        for r in root.getElementsByTagName("rect"):
            x, y, w, h = (float(r.getAttribute(k)) for k in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + w <= p.width + 1 and y + h <= p.height + 1, p.title
        for t in root.getElementsByTagName("text"):
            assert 0 < float(t.getAttribute("y")) < p.height


def test_many_steps_become_few_shapes():
    "A trace of thousands of steps is put together to the width of the picture."
    llm = LLM(model("llama"), tiny_tokenizer(), max_num_seqs=2)
    with llm.trace() as trace:
        llm.generate(
            [[5], [6, 7, 8]], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        )
    data = trace.data
    steps = [s | dict(step=i, start=i * 0.01) for i, s in enumerate(data["steps"] * 80)]
    long = Trace(data | dict(steps=steps))
    assert len(steps) > 4000
    svg = pictures.timeline(long).svg
    parseString(svg)
    assert len(svg) < 150_000
    busy = {
        ("packed", slot): [Run(i, i + 1, "prefill", i) for i in range(10_000)] for slot in range(24)
    }
    c = Canvas()
    pictures.draw_lanes(c, busy, 58, 844, 17)
    assert len(c.under["prefill"]) <= 24 * 400
    for lane in slot_runs(long.steps).values():
        assert len(lane) < len(steps) / 6 and all(a.end <= b.first for a, b in pairwise(lane))


def test_lanes_say_what_the_steps_say():
    "Runs, step by step: each row of the trace, 'held' between two of a request, and else empty, if the slot was there."
    llm = LLM(model("llama"), tiny_tokenizer(), max_num_seqs=5, max_num_batched_tokens=24)
    with llm.trace() as trace:
        llm.generate(
            prompts_of(17, 4), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        )
    lanes = {
        place: {i: run for run in lane for i in range(run.first, run.end)}
        for place, lane in slot_runs(trace.steps).items()
    }
    for i, s in enumerate(trace.steps):
        rows = {row[0]: (Row(*row).phase, row[1]) for row in s["rows"]}
        for (_, slot), lane in lanes.items():
            if slot in rows:
                assert (lane[i].kind, lane[i].request) == rows[slot]
            elif slot >= s["slots"]:
                assert i not in lane
            else:
                assert lane[i].kind == "held" or lane[i].kind == (
                    "blocked" if s["waiting"] else "idle"
                )


def test_runs_cover_every_token():
    llm = LLM(model("llama"), tiny_tokenizer(), max_num_seqs=4, max_num_batched_tokens=24)
    with llm.trace() as trace:
        llm.generate(prompts_of(15, 8), SamplingParams(seed=2, max_tokens=9, ignore_eos=True))
    lanes = slot_runs(trace.steps)
    tokens = sum(run.tokens for lane in lanes.values() for run in lane)
    assert tokens == sum(s["tokens"] for s in trace.steps)
    for lane in lanes.values():
        assert all(a.end <= b.first for a, b in pairwise(lane))


def test_facts_are_read_while_another_thread_ends_the_request():
    from batchlab.llm.outputs import RequestGroup
    from batchlab.core.request import Request
    from batchlab.view.trace import facts_of

    left = [RequestGroup("0", prompt="Hi")]

    class Ending(Request):
        group = property(lambda self: left.pop() if left else None, lambda self, x: None)

    assert facts_of(Ending("0", [1]), True)["prompt"] == "Hi" and not left


def test_what_is_no_trace_is_refused(tmp_path):
    class Name:
        def __fspath__(self):
            return str(tmp_path / "none.json")

    for x in (5, None, object(), [5], {"a": None}, Name()):
        with pytest.raises(TraceError):
            pictures.timeline(x)
