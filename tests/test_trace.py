"The recorder against the engine's own numbers, over drawn mixes, threads, faults and limits; and pictures of what comes of it."

import contextlib, functools, json, logging, random, re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from xml.dom.minidom import parseString

import pytest, torch
from hypothesis import given, strategies as st

from batchlab.view import pictures
from batchlab.llm.settings import STRATEGIES
from batchlab import LLM, SamplingParams
from batchlab.errors import TraceError
from batchlab.core.ledger import Ledger
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.core.runners import PackedRunner
from batchlab.view.trace import Recorder, StepLog
from batchlab.view.drawing import Canvas, axis
from batchlab.view.viewer import POLICY, view_html, write_page
from batchlab.view.tracefile import LEDGER_FIELDS, PARTS, SlotRun, TraceRow, Trace, slot_runs
from helpers import examples, greedy, ids

V2 = Path(__file__).parent / "data" / "trace_v2.json"


@pytest.fixture(autouse=True)
def quiet(one_thread):
    log = logging.getLogger("batchlab")
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(logging.NOTSET)


@functools.cache
def model(arch):
    return tiny_model(arch)


def made(arch="llama", **kw):
    "An `LLM` of a tiny model."
    return LLM(model(arch), tiny_tokenizer(), **kw)


def sampled(max_tokens, **kw):
    "Settings of an answer of that many tokens."
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kw)


def parsed(svg):
    return parseString(svg).documentElement


def prompts_of(n, seed, longest=40):
    rng = random.Random(seed)
    heads = [rng.choices(range(3, 259), k=k) for k in (0, 16, 33)]
    return [heads[i % 3] + rng.choices(range(3, 259), k=rng.randint(1, longest)) for i in range(n)]


def check_events(events: Sequence[dict]) -> int:
    "Check that `events` keep the rules of Chrome's trace-event format; returns how many there are."
    number = lambda x: isinstance(x, (int, float)) and x >= 0
    named, open_, slices = set(), Counter(), []
    needed = dict(
        X=lambda e: number(e.get("dur")),
        M=lambda e: {"name", "sort_index"} & {*e["args"]},
        C=lambda e: all(map(number, e["args"].values())),
        i=lambda e: e.get("s") in tuple("gpt"),
    )
    span = lambda e: e.get("cat") and e.get("id2", {}).get("local")
    needed |= dict.fromkeys("bne", span)
    for e in events:
        track, kind = (e["pid"], e["tid"]), e["ph"]
        assert all(isinstance(x, int) for x in track) and isinstance(e["name"], str), e
        assert number(e["ts"]) and needed[kind](e), e
        if kind in "be":
            open_[e["pid"], e["id2"]["local"], e["name"]] += (kind == "b") * 2 - 1
        if kind == "X":
            slices.append((*track, e["ts"], -e["dur"]))
        if e["name"] == "thread_name":
            named.add(track)
    assert not any(open_.values()), "a span that does not end, or does not begin"
    assert {s[:2] for s in slices} <= named, "a track without a name"
    stack = []
    for *track, start, minus in sorted(slices):
        end = start - minus
        while stack and (track != stack[-1][0] or start >= stack[-1][1] - 1e-3):
            stack.pop()
        assert not stack or end <= stack[-1][1] + 1e-3, "slices that overlap"
        stack.append((track, end))
    return len(events)


TOTALS = """requests prompt_tokens output_tokens cached_tokens recomputed padded masked preemptions
    steps""".split()


def agrees(trace, llm, ledger=None):
    "Everything that both count is the same, and the parts of the trace fit together."
    t, steps, requests, stats = trace.totals, trace.steps, trace.requests, vars(llm.stats())
    assert vars(trace.ledger) == (ledger or vars(llm.ledger))
    assert {k: t[k] for k in TOTALS} == {k: stats[k] for k in TOTALS}
    for k in LEDGER_FIELDS:
        assert sum(s[k] for s in steps) == t[k], k
    for k in ("prompt_tokens", "output_tokens", "cached_tokens", "preemptions"):
        assert sum(r[k] for r in requests) == t[k], k
    assert Counter(r["finish_reason"] for r in requests) == t["requests"]
    assert [s["step"] for s in steps] == list(range(t["steps"] + t["broken"]))
    whole = [s for s in steps if not s["error"]]
    sampled = Counter(row[1] for s in whole for row in s["rows"] if row[5])
    for r in requests:
        assert r["finish_reason"] == "error" or sampled[r["request"]] == r["output_tokens"]
    for s in whole:
        if s["engine"] == "packed":
            assert s["tokens"] == s["useful"] + s["recomputed"] and s["cached"] == s["reused"]
            assert sum(row[4] for row in s["rows"]) == s["recomputed"]
        for slot, number, start, n, again, samples, prefill, drafts in s["rows"]:
            assert 0 <= slot < s["slots"] and n > drafts and start + n - drafts <= s["held"][slot]
        assert 0 <= s["blocks_shared"] <= s["blocks_held"] <= s["blocks"] - s["blocks_cached"]
        assert all(s[k] >= 0 for k in PARTS)
    for a, b in pairwise(steps):
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


@examples(40)
@given(cases())
def test_whatever_ran_the_trace_counts_as_the_engine_does(case):
    llm = made(
        case["arch"],
        strategy=case["strategy"],
        max_num_seqs=case["seqs"],
        trace=True,
        enable_prefix_caching=case["caching"],
        max_num_batched_tokens=case["budget"],
    )
    if case["kv"] and llm.limits.kv_bytes_per_token:
        llm.limits.kv_bytes = case["kv"] * llm.limits.kv_bytes_per_token
        llm.limits.max_model_len = min(llm.max_model_len or 10**9, case["kv"])
        llm.engines.apply_limits()
    texts, prompts = {}, prompts_of(12, 1)
    for i, (p, n, answers, priority, wait) in enumerate(case["requests"]):
        for _ in range(wait):
            llm.step()

        def hear(e, i=i, answers=answers):
            key = f"{i}-{e.completion}" if answers > 1 else f"{i}"
            texts[key] = texts.get(key, "") + e.text

        how = dict(request_id=str(i), priority=priority)
        llm.add_request(prompts[p], sampled(n, seed=i, n=answers), hear, **how)
        if case["cancels"].get(i) == 0:
            llm.cancel(str(i))
    steps = 0
    while llm.has_unfinished:
        llm.step()
        steps += 1
        for i, at in case["cancels"].items():
            if at == steps:
                llm.cancel(str(i))
        assert steps < 2000
    ledger = vars(
        Ledger(
            *(getattr(llm.engines.past_ledger, k) + getattr(llm.ledger, k) for k in LEDGER_FIELDS)
        )
    )
    agrees(llm.recorder, llm, ledger)
    assert not llm.recorder.request_log.unfinished
    assert {r["id"]: "".join(r["pieces"]) for r in llm.recorder.requests} == texts


def test_the_cases_do_what_they_are_for():
    "Preemption, prefixes and cancelling do come up in a trace, on settings as above."
    seen, per_token = Counter(), LLM(model("llama")).limits.kv_bytes_per_token
    in_all = "preemptions", "recomputed", "reused", "cached_tokens"
    in_steps = "preempted", "copies", "blocks_shared"
    for kv, n, count in ((256, 100, 8), (640, 60, 8), (5000, 20, 30)):
        limits = dict(max_num_batched_tokens=40, kv_cache_bytes=kv * per_token)
        llm = made(max_num_seqs=5, trace=True, **limits)
        for i, p in enumerate(prompts_of(count, 1)):
            prompt = [9] * 70 * (count > 8) + p
            llm.add_request(prompt, sampled(n, seed=i), request_id=str(i))
        for _ in range(5):
            llm.step()
        llm.cancel("1")
        while llm.step():
            pass
        agrees(llm.recorder, llm)
        seen.update({k: llm.recorder.totals[k] for k in in_all})
        seen.update(k for s in llm.recorder.steps for k in in_steps if s[k])
        assert llm.recorder.totals["requests"]["cancelled"] == 1
    assert all(seen[k] for k in in_all + in_steps), seen


def test_several_kinds_of_engine_in_one_trace():
    "Prompt log probabilities on a padded model run alone, the rest in batches: slots are those of their engine."
    llm = made("bloom", max_num_seqs=3, trace=True)
    asked = [None, 0, None, 0, None]
    params = [SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=n) for n in asked]
    llm.generate(prompts_of(5, 2), params)
    agrees(llm.recorder, llm)
    assert {s["engine"] for s in llm.recorder.steps} == {"padded", "solo"}
    for draw in (pictures.timeline, pictures.waste):
        parsed(draw(llm.recorder).svg)


def test_recorders_come_and_go_while_a_thread_runs():
    llm = made(max_num_seqs=3)
    whole, inner, seen = Recorder(llm).start(), [], []

    def listen(e):
        if len(seen) == 5:
            inner.append(llm.trace().start())  # inside a step, from the thread that makes it
        if len(seen) == 100:
            inner[0].stop()
        seen.append(e)

    with llm:
        for i, p in enumerate(prompts_of(12, 3)):
            llm.add_request(p, sampled(12, seed=i), listen)
        for _ in range(30):
            with llm.trace(text=False) as brief:
                json.dumps(brief.data)
            json.dumps(whole.steps_from(max(0, whole.num_steps - 2)))
    whole.stop().stop()
    assert llm.watchers == []
    agrees(whole, llm)
    check = inner[0]
    assert 0 < check.totals["steps"] < whole.totals["steps"]
    for s in check.steps:
        assert {row[1] for row in s["rows"]} <= {r["request"] for r in check.requests}
    texts = {r["id"]: "".join(r["pieces"]) for r in whole.requests}
    ended = [r for r in check.requests if r["end"] is not None]
    assert ended
    for r in ended:
        assert "".join(r["pieces"]) == texts[r["id"]] and len(r["pieces"]) == r["output_tokens"]


@pytest.mark.parametrize("event", "queued begin schedule forward sample text ended".split())
def test_a_fault_in_the_recorder_is_nobody_elses(monkeypatch, event):
    llm, note = made(), StepLog.note
    run = lambda: ids(llm.generate(prompts_of(4, 4), greedy(6)))
    plain = run()

    def fault(self, source, e, *x):
        1 / 0 if e == event else note(self, source, e, *x)

    with monkeypatch.context() as m, llm.trace() as trace:
        m.setattr(StepLog, "note", fault)
        assert run() == plain and llm.watchers == []
    json.dumps(trace.data)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_recording_changes_no_token(strategy):
    llm = made(strategy=strategy, max_num_seqs=3)
    params = [SamplingParams(seed=i, temperature=1.2, max_tokens=3 + i) for i in range(6)]
    run = lambda: ids(llm.generate(prompts_of(6, 5), params))
    plain = run()
    llm.reset_prefix_cache()
    with llm.trace():
        assert run() == plain


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
    llm = made(max_num_seqs=2, trace=True)
    for i, p in enumerate(prompts_of(3, 6)):
        llm.add_request(p, sampled(5, seed=i))
    while llm.has_unfinished:
        with contextlib.suppress(KeyboardInterrupt):
            llm.step()
    agrees(llm.recorder, llm)
    assert llm.recorder.totals["broken"] == 1
    assert llm.recorder.steps[2]["error"] == type(error).__name__


def test_limits_hold_and_sums_stay():
    llm = made(max_num_seqs=4)
    with llm.trace(max_rows=120, max_text=500) as small, llm.trace() as whole:
        for call in range(3):
            llm.generate(prompts_of(20, call), sampled(9, seed=1))
    times = {*PARTS, "seconds", "tracing"}
    a, b = ({k: v for k, v in t.totals.items() if k not in times} for t in (small, whole))
    assert a == b and a["requests"] == {"length": 60}
    assert small.step_log.num_rows == sum(len(s["rows"]) for s in small.steps) <= 120
    kept = {r["request"]: r for r in small.requests}
    assert {row[1] for s in small.steps for row in s["rows"]} <= kept.keys()
    assert len(kept) + small.dropped["requests"] == 60
    assert small.dropped["steps"] + len(small.steps) == a["steps"]
    texts = [
        len(r["prompt_ids"]) + len(r["output_ids"]) for r in kept.values() if "prompt_ids" in r
    ]
    assert sum(texts) == small.request_log.num_text_tokens <= 500 and small.dropped["texts"]
    last, own = whole.steps[-1], small.steps[-1]
    assert own == last | {k: own[k] for k in (*PARTS, "start", "rows")}
    for r, w in ((kept[n], whole.request(n)) for n in kept):
        assert r["output_tokens"] == w["output_tokens"] and r["slots"] == w["slots"]


def test_files(tmp_path):
    llm = made(trace=True)
    llm.generate(["Grüße, 世界 🎉", "a\nb"], sampled(9, seed=1))
    path = llm.recorder.save(tmp_path / "t.json")
    assert Trace.load(path).data == llm.recorder.data == json.loads(path.read_text())
    assert {*"a\nb"} <= {*llm.recorder.tokens.values()}
    with pytest.raises(OSError):
        llm.recorder.save(tmp_path / "no" / "such.json")
    with pytest.raises(TypeError):
        Trace(dict(a={1})).save(tmp_path / "half.json")
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


WHOLE = V2.read_bytes()


OTHERS = dict(
    **{f"cut {cut}": WHOLE[:cut] for cut in (0, 1, len(WHOLE) // 3, len(WHOLE) - 2)},
    bytes=b"\xff\xfe\x00",
    null=b"null",
    list=b"[]",
    object=b"{}",
    unversioned=b'{"format":"batchlab-trace"}',
    deep=b"[" * 10**5,
)
for version in (1, 3, 99, 0, -1, True, "2", 2.0, None):
    whole = json.loads(WHOLE) | dict(version=version)
    OTHERS[f"version {version!r}"] = json.dumps(whole).encode()


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_is_no_trace_is_refused_by_name(name, tmp_path):
    (tmp_path / "other.json").write_bytes(OTHERS[name])
    with pytest.raises(TraceError, match="other.json") as e:
        Trace.load(tmp_path / "other.json")
    assert not name.startswith("version") or name in str(e.value)


def test_a_file_of_version_2_still_opens(tmp_path):
    "Two requests that were recorded from their middle on; read as it is, drawn, and saved again."
    old, t = json.loads(WHOLE), Trace.load(V2)
    assert old["version"] == 2 and t.data == old
    counts = [(r["prompt_tokens"], r["output_tokens"], len(r["pieces"])) for r in t.requests]
    assert counts == [(4, 12, 12), (1, 12, 12)]
    assert len(t.steps) == t.totals["steps"] == 8 and [len(s["rows"]) for s in t.steps] == [2] * 8
    assert Trace.load(t.save(tmp_path / "again.json")).data == old
    for draw in (pictures.timeline, pictures.waste):
        parsed(draw(V2).svg)
    assert check_events(t.events()["traceEvents"]) and t.frame().shape[0] == len(t.steps)
    old["requests"][0]["end"] = None  # it runs: no span is without an end
    assert check_events(Trace(old).events()["traceEvents"])
    page = view_html(old | dict(model="</script>"))
    assert page.count("</script>") == 2 and POLICY in page
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(TraceError, match="is no page"):
        write_page(V2, tmp_path / "mine.html")


@pytest.mark.parametrize("count", [1, 2, 24, 500])
def test_pictures(count):
    "Each parses, has its texts and both sets of colours, and stays small; nothing lies outside."
    rng, traces, prompts = random.Random(count), {}, prompts_of(count, count)
    params = [greedy(rng.randint(1, 12)) for _ in prompts]
    for strategy in ("static", "continuous"):
        llm = made(strategy=strategy, max_num_seqs=max(2, min(64, count // 3)))
        with llm.trace() as traces[strategy]:
            llm.generate(prompts, params)
    one, barrier = traces["continuous"], traces["static"]
    drawn = [pictures.timeline(traces, by=by) for by in ("steps", "time")]
    drawn += [draw(one) for draw in (pictures.packed_row, pictures.prefixes)]
    drawn += [pictures.waste(traces), pictures.packed_row(barrier, step=0)]
    for p in drawn:
        root = parsed(p.svg)
        assert [n.tagName for n in root.childNodes[:3]] == ["title", "desc", "style"]
        assert p.title and p.desc and len(p.svg) < 150_000, p.title
        dark = root.getElementsByTagName("style")[0].firstChild.data
        for kind in set(re.findall(r'class="bl-(?:s-)?(\w+)"', p.svg)):
            assert f"-{kind}{{" in dark
        for r in root.getElementsByTagName("rect"):
            x, y, w, h = (float(r.getAttribute(k)) for k in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + w <= p.width + 1 and y + h <= p.height + 1, p.title
        for t in root.getElementsByTagName("text"):
            assert 0 < float(t.getAttribute("y")) < p.height


SHAPES = """
M400 14h100v19H400z
M100 70h20v20H100z
M120 70h10v20H120zM120 80h20v10H120z
100 14 99.4 19
request 7: prefill, slot 0, steps 0 to 2
400 17.6 99.4 11.8
request 7: decode, slot 0, steps 6 to 8
100,34 100,38
200,34 200,38
300,34 300,38
400,34 400,38
500,34 500,38
100,34 500,34
64 31 531.9 20
a: 3 useful
596.5 31 176.9 20
a: 1 padding, or fed after the end
64,60 64,64
241.5,60 241.5,64
419,60 419,64
596.5,60 596.5,64
774,60 774,64
64,60 774,60
64 96 11 11
132.8 96 11 11
"""


def test_shapes_lie_where_their_numbers_say():
    "Two runs of a slot with a pause between, an axis, and what two tokens of a prompt see; then the bar of a ledger."
    c, lane = Canvas(), [SlotRun(0, 2, "prefill", 7, 5), SlotRun(2, 4, "decode", 7, 2)]
    steps = [dict(start=t, schedule=0, forward=1, sample=0, text=0) for t in (0, 1, 6, 7)]
    at = pictures.edges(
        Trace(dict(steps=steps)), "time"
    )  # the engine had nothing to do for a while
    pictures.draw_lanes(c, {("packed", 0): lane}, 100, 500, 20, at)
    axis(c, 100, 500, 0, 4, "steps")
    pictures.draw_seen(c, TraceRow(0, 0, 2, 2, 0, 1, 1), 100, 10, 20)
    svg = c.picture("a", "b").svg + pictures.waste(dict(a=Ledger(useful=3, padded=1))).svg
    shape = r'x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)" f|points="(.*?)"|tle>([^<]*: [^<]*)|d="(M.*?)"'
    found = [" ".join(filter(None, x)) for x in re.findall(shape, svg)]
    assert found == SHAPES.strip().split("\n")


def test_many_steps_become_few_shapes():
    "A trace of thousands of steps is put together to the width of the picture."
    llm = made(max_num_seqs=2)
    with llm.trace() as trace:
        llm.generate([[5], [5, 7, 8]], greedy(60))
    assert "4 tokens, 3 if" in pictures.prefixes(trace).desc
    data = trace.data
    steps = [s | dict(step=i, start=i * 0.01) for i, s in enumerate(data["steps"] * 80)]
    long = Trace(data | dict(steps=steps))
    assert len(steps) > 4000
    svg = pictures.timeline(long).svg
    assert parsed(svg) and len(svg) < 150_000
    for lane in slot_runs(long.steps).values():
        assert len(lane) < len(steps) / 6 and all(a.end <= b.first for a, b in pairwise(lane))


def test_lanes_say_what_the_steps_say():
    "Runs, step by step: each row of the trace, 'held' between two of a request, and else empty, if the slot was there."
    llm = made(max_num_seqs=5, max_num_batched_tokens=24)
    with llm.trace() as trace:
        llm.generate(prompts_of(17, 4), greedy(6))
    lanes = slot_runs(trace.steps)
    runs = [run for lane in lanes.values() for run in lane]
    assert sum(run.tokens for run in runs) == sum(s["tokens"] for s in trace.steps)
    for (_, slot), lane in lanes.items():
        assert all(a.end <= b.first for a, b in pairwise(lane))
        at = {i: run for run in lane for i in range(run.first, run.end)}
        for i, s in enumerate(trace.steps):
            rows = {row[0]: (TraceRow(*row).phase, row[1]) for row in s["rows"]}
            if slot in rows:
                assert (at[i].kind, at[i].request) == rows[slot]
            elif slot >= s["slots"]:
                assert i not in at
            else:
                assert at[i].kind in ("held", "blocked" if s["waiting"] else "idle")


def test_a_place_is_empty_whether_somebody_waits_for_it_or_not():
    kinds = "idle", "blocked", "held", "decode"
    lane = [SlotRun(i, i + 1, kind) for i, kind in enumerate(kinds)]
    assert pictures.share_idle({("packed", 0): lane}) == 0.5


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

    for x in (5, None, object(), [5], {"a": None}, Name(), tmp_path):
        with pytest.raises(TraceError):
            pictures.timeline(x)


def test_traces_without_drafts_are_read():
    "Files of before there were drafts have fewer numbers."
    data = json.loads(V2.read_text())
    for name in ("drafted", "rejected"):
        data["totals"].pop(name, None)
        for step in data["steps"]:
            step.pop(name, None)
    for step in data["steps"]:
        step["rows"] = [row[:7] for row in step["rows"]]
    old = Trace(data)
    assert TraceRow(*data["steps"][0]["rows"][0]).drafts == 0
    assert old.ledger.drafted == old.ledger.rejected == 0 < old.ledger.useful
    assert old.events()["traceEvents"] and "wrong" not in pictures.waste(old).svg
    svg = pictures.waste(dict(a=Ledger(useful=5, rejected=7))).svg
    assert re.search("7 wrong drafts.*>drafts that were wrong<", svg)
