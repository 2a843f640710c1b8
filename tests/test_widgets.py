"The widgets without a browser: a button is pressed by `click`, a field turned by its value. What threads do is waited for."

import gc, json, re, threading, time, weakref, xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial

import pytest

from helpers import BOOK, needs, scripted, until

[W] = needs("ipywidgets")

from batchlab import LLM, SamplingParams
from batchlab.llm.loop import keep_all
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.view.drawing import Picture, esc
from batchlab.view.widgets import LiveView, WatchedRequest, WidgetBox, Watch, live, request_html


PROMPTS = ["The sea", "A hill is a place", "Rain", "Wind blows over", "Snow"]
OTHERS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
WIDGET = "application/vnd.jupyter.widget-view+json"
LONG = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", max_position_embeddings=4096)


@pytest.fixture
def llm(model):
    OTHERS.clear()
    OTHERS.update(threading.enumerate())  # of files that ran before in this process
    llm = LLM(model, tiny_tokenizer(), max_num_seqs=2, compile=False)
    yield llm
    for panels in list(WidgetBox.made.values()):
        for p in list(panels):
            p.close()
    until(lambda: not own_threads())  # none is left behind
    llm.close()


def own_threads():
    names = ("batchlab-widget", "batchlab")
    return [t for t in threading.enumerate() if t.name in names and t not in OTHERS]


# The live view


def test_texts_are_the_engines(llm):
    params = [
        SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(5)
    ]
    alone = [llm.generate(p, q)[0].outputs[0] for p, q in zip(PROMPTS, params)]
    view = LiveView(llm, PROMPTS, params, rows=2)
    assert view.wait(60)
    view.one.value = 4
    shown = view.texts.value
    assert re.findall(r"<b>(\d)</b>", shown) == ["3", "4"] and esc(alone[4].text) in shown
    assert "<svg" in view.slots.value
    assert [r.text for r in view.watch.requests] == [a.text for a in alone]
    assert [r.num_tokens for r in view.watch.requests] == [len(a.token_ids) for a in alone]
    assert view.watch.num_tokens == sum(len(a.token_ids) for a in alone)
    view.watch.times.appendleft((-9.0, 10**9))  # long ago
    assert view.watch.rate() < 10**6
    view.close()


def test_at_the_end_of_the_process_this_thread_alone_makes_steps(llm):
    view = LiveView(llm, PROMPTS[:2], LONG)
    ask = partial(llm.generate, PROMPTS, LONG, use_tqdm=False)
    other = threading.Thread(target=ask, daemon=True)
    other.start()
    until(lambda: view.watch.num_tokens > 4)
    keep_all()
    assert steps_stand_still(llm) and not view.watch.done
    before = llm.stats().steps
    llm.loop.step()  # for what a program does at its end
    assert llm.stats().steps == before + 1
    llm.loop.mutex.release()
    for request_id in [*llm.loop.groups]:
        llm.cancel(request_id)
    other.join()
    view.close()


def test_answers_of_one_prompt_stand_one_below_the_other(llm):
    params = replace(LONG, n=2, temperature=1, seed=1, max_tokens=5)
    [out] = llm.generate(PROMPTS[0], params)
    view = LiveView(llm, [dict(prompt=PROMPTS[0])], params)
    assert view.wait(60)
    [r] = view.watch.requests
    want = "\n".join(a.text for a in out.outputs)
    assert (r.prompt, r.text, r.num_tokens, r.state) == (PROMPTS[0], want, 10, "length")


def test_pause_holds_and_step_is_one(llm):
    view = LiveView(llm, PROMPTS[:2], LONG)
    until(lambda: view.watch.num_tokens > 4)
    view.pause.click()
    until(lambda: steps_stand_still(llm))
    view.paint()
    assert "<b>paused" in view.status.value
    before = llm.stats().steps
    view.step.click()
    until(lambda: llm.stats().steps > before)
    assert steps_stand_still(llm) and llm.stats().steps == before + 1
    view.pause.click()
    until(lambda: llm.stats().steps > before + 3)
    view.close()


def steps_stand_still(llm):
    n = llm.stats().steps
    time.sleep(0.15)
    return llm.stats().steps == n


def test_a_click_is_a_step_whoever_has_the_engine_in_hand(llm):
    "The thread of `with llm:` may be taking requests in just then: the click waits, and is not lost."
    llm.add_request(PROMPTS[0], LONG)
    held, go = threading.Event(), threading.Event()

    def hold():
        with llm.loop.hold():
            held.set()
            go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    assert llm.step() and not llm.engines  # it waits a moment, and makes no step
    stepper = threading.Thread(target=llm.step, kwargs=dict(wait=True))
    stepper.start()
    assert stepper.is_alive()
    go.set()
    holder.join()
    stepper.join()
    assert [e.num_steps for e in llm.engines.values()] == [1]


@pytest.mark.parametrize("paused", [True, False])
def test_cancel_frees_the_slot(llm, paused):
    view = LiveView(llm, PROMPTS[:3], LONG, paused=paused)
    for _ in range(2 * paused):
        view.step.click()
    until(lambda: [r.state for r in view.watch.requests] == ["running", "running", "waiting"])
    view.cancel_one.click()
    until(lambda: view.watch.requests[0].state == "cancelled")
    [scheduler] = [e.scheduler for e in llm.engines.values()]
    running = lambda: {r.request_id for r in scheduler.running}
    assert view.watch.requests[0].request_id not in running()
    if paused:
        assert len(scheduler.running) == 1 and steps_stand_still(
            llm
        )  # free, and nobody else moved for it
    else:
        until(lambda: view.watch.requests[2].request_id in running())  # who waited has it
    view.cancel.click()
    until(lambda: view.watch.done and not llm.has_unfinished)
    assert {r.state for r in view.watch.requests} == {"cancelled"} and len(
        scheduler.running
    ) == scheduler.pool.num_held == 0
    assert llm.stats().requests == {"cancelled": 3}


def test_draws_ten_times_a_second_at_most(llm):
    view = LiveView(llm, PROMPTS[:2], LONG)
    paints, start = view.paints, time.monotonic()
    until(lambda: view.paints > paints + 4)
    assert view.paints - paints <= (time.monotonic() - start) * view.hz + 2
    assert view.watch.num_tokens > view.paints  # and the engine does not wait for it
    view.close()


def test_run_again_leaves_nothing(llm):
    views = []
    for _ in range(4):
        views.append(LiveView(llm, PROMPTS[:2], LONG, cell="one cell"))
        until(lambda: views[-1].watch.num_tokens > 2)
    assert [v.closed for v in views] == [True, True, True, False] and len(own_threads()) == 2
    assert llm.stats().running == 2
    for v in views[:3]:
        assert {r.state for r in v.watch.requests} == {"cancelled"} and not v.painter.is_alive()
        assert all(w.comm is None for w in v.kept) and not any(w._trait_notifiers for w in v.kept)
    gone = weakref.ref(views[0])
    del views[:3], v
    until(lambda: gc.collect() >= 0 and gone() is None, 5)  # a closed view is not held
    views[-1].close()
    assert llm.stats().slots_in_use == 0 and WidgetBox.made["one cell"] == []


def test_a_cancel_that_comes_too_late_leaves_no_thread(llm, monkeypatch):
    go, event, step = threading.Event(), Watch.event, llm.loop.step

    def cancel_the_rest(watch, e):
        event(watch, e)
        if e.finished:  # the other ends in the same step, and its cancel stays in the inbox
            watch.cancel(*range(len(watch.requests)))

    def step_later():
        if llm.loop.inbox and not llm.loop.groups:
            go.wait(60)
        return step()

    monkeypatch.setattr(Watch, "event", cancel_the_rest)
    monkeypatch.setattr(llm.loop, "step", step_later)
    view = LiveView(llm, PROMPTS[:2], replace(LONG, max_tokens=4))
    until(lambda: llm.loop.stopping or not view.painter.is_alive())
    assert [r.state for r in view.watch.requests] == ["length"] * 2 and llm.loop.inbox
    go.set()
    assert view.wait(60)
    until(lambda: not own_threads())


def test_two_views_in_other_cells_live_together(llm):
    a, b = (LiveView(llm, PROMPTS[:1], replace(LONG, max_tokens=30), cell=c) for c in "ab")
    assert a.wait(60) and b.wait(60) and not a.closed
    assert a.watch.requests[0].text == b.watch.requests[0].text != ""
    for v in (a, b):
        v.close()


def test_pictures_are_xml_and_hostile_text_is_text(llm):
    bad = ['<b>&"\x07\x00 ]]>', "</svg><script>alert(1)</script>"]
    view = LiveView(llm, bad, replace(LONG, max_tokens=8))
    view.wait(60)
    ET.fromstring(view.picture())
    ET.fromstring(Picture("<", "&", 9, 9, []).svg)
    assert "<script" not in view.picture() and not any(
        "<script" in w.value for w in view.kept if isinstance(w, W.HTML)
    )
    view.close()


def test_of_a_long_answer_the_end_is_shown():
    said = request_html(0, WatchedRequest("0", "", "<" * 700))
    assert said.count("&lt;") == 600 and "…" in said


# Where nobody can click


def test_bundle_has_a_picture_and_a_widget_only_if_live(llm, monkeypatch):
    view = LiveView(llm, PROMPTS[:1], replace(LONG, max_tokens=3))
    picture, widget = {"image/svg+xml", "text/plain"}, {WIDGET}
    for wanted, kinds in (("0", picture), ("1", picture | widget)):
        monkeypatch.setenv("BATCHLAB_WIDGETS", wanted)
        assert {*view._repr_mimebundle_()} == kinds
    view.close()
    assert WIDGET not in view._repr_mimebundle_()
    monkeypatch.delenv("BATCHLAB_WIDGETS")
    assert live() is False  # this is pytest


def test_a_kept_notebook_holds_pictures_and_no_widgets():
    book = json.loads(BOOK["find"]("widgets").read_text(encoding="utf-8"))
    kinds = [{*o.get("data", {})} for c in book["cells"] for o in c.get("outputs", [])]
    assert "widgets" not in book["metadata"] and not any(WIDGET in k for k in kinds)
    assert sum("image/svg+xml" in k for k in kinds) >= 4


def test_without_ipywidgets_the_page_is_written(tmp_path, llm):
    with llm.trace() as trace:
        llm.generate(PROMPTS, replace(LONG, max_tokens=4))
    trace.save(tmp_path / "run.json")
    code = (
        "import sys; sys.modules['ipywidgets'] = None\n"
        "from batchlab.cli import main; assert main(['view', 'run.json', '--no-open']) == 0\n"
        "try: import batchlab.view.widgets\nexcept ImportError as e: assert 'batchlab[widgets]' in str(e)\nelse: assert 0"
    )
    r = scripted(code, tmp_path)
    assert r.returncode == 0, r.stderr
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert r.stdout.strip() == "run.html" and page.startswith("<!DOCTYPE html>")
    assert not re.search(r'(?:src|href)="(?!#|data:,)|https?://(?!www\.w3\.org)', page)
