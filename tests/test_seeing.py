"What is printed and shown: results, engines and traces in a few lines, a bar where somebody watches, and memory that is given back."

import gc, pickle, platform, re, sys, weakref
from dataclasses import asdict

import pytest

from batchlab.llm.config import Limits
from batchlab.core.ledger import Ledger
from batchlab import LLM, ParamError, SamplingParams
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.llm.outputs import (
    CompletionOutput,
    MemoryPlan,
    Outputs,
    RequestOutput,
    Score,
    Stats,
    StreamEvent,
)
from batchlab.core.sampling import Logprob
from helpers import ROOT, but_compiler, greedy, ids, kept_model, needs, python, scripted

README = (ROOT / "README.md").read_text(encoding="utf-8")
BAD = '<script>alert(1)</script> & "quotes" \x00 \ud800 '


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny_model("llama", max_position_embeddings=4096), tiny_tokenizer(), max_num_seqs=4)


def request(i, n=1, tokens=300):
    logprobs = [{t: Logprob(-0.5, 1, "x")} for t in range(tokens)]
    whole = BAD * 40, [*range(tokens)]
    answers = [CompletionOutput(k, *whole, -150.0, logprobs, "length") for k in range(n)]
    return RequestOutput(str(i), *whole, answers, prompt_logprobs=[None, *logprobs])


MANY = Outputs(request(i, n=2) for i in range(200))
ERROR = BAD * 50
ANSWER = MANY[0].outputs[0]
SHOWN = dict(
    outputs=MANY,
    output=MANY[0],
    answer=ANSWER,
    failed=Outputs([RequestOutput(str(i), BAD, error=f"{i} {ERROR}") for i in range(200)]),
    empty=Outputs(),
    ids=RequestOutput("0", None, [*range(9000)]),
    score=Score([*range(9000)], [-0.5] * 8999),
    scores=Outputs([Score([1] * 300, [-1.0] * 299)] * 200),
    event=StreamEvent(
        "0",
        text=BAD * 40,
        token_ids=[*range(300)],
        logprobs=ANSWER.logprobs,
        output=MANY[0],
        finished=True,
    ),
    plan=MemoryPlan(200, *[10**10] * 8, {i: "why it is refused " * 4 for i in range(5000)}, 99, 64),
    stats=Stats(dict(length=200), *[10**8] * 16, *[1234.56789] * 3),
    new=Stats({}, *[0] * 16, *[float("nan")] * 3),
    ledger=Ledger(10**9, 10**6, 1, 2, 3),
    limits=Limits(64, 512, None, 10**10, 0),
)


@pytest.mark.parametrize("name", [*SHOWN])
def test_shown_short(name):
    assert 0 < len(repr(SHOWN[name])) < 1000


def test_engine_shown(llm):
    parts = llm.backend, llm.limits, llm.stats(), llm.ledger, llm.plan(["Hi"] * 200), llm.trace()
    for x in (llm, *parts):
        assert len(repr(x)) < 1000, x
    assert llm.backend.name in repr(llm.backend) and llm.backend.name in repr(llm)
    assert "object at" not in repr(llm) and "4,096" in repr(llm)
    plain = LLM(llm.model, llm.tokenizer, compile=False)
    why = "compile=False"
    assert "torch" in repr(plain.backend) and why in repr(plain.backend)  # its name, and why


def test_results_are_a_list(llm):
    outs = llm.generate(
        ["Hi", "Once upon"], SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    )
    assert isinstance(outs, list) and type(outs) is Outputs and type(outs[0]) is RequestOutput
    plain = [*outs]
    assert outs == plain and outs[:1] == plain[:1] and outs + plain == plain + plain
    short, score = dict(max_tokens=1), llm.logprobs(["Hi there"])
    talk = llm.chat([[dict(role="user", content="Hi")]], short)
    lists = outs[:1], outs + [], outs.copy(), sum([outs, outs], []), score + outs, talk, score
    assert {type(x) for x in lists} == {Outputs}
    with pytest.raises(TypeError):
        (1,) + outs
    assert pickle.loads(pickle.dumps(outs)) == outs
    assert asdict(outs[0])["outputs"][0]["token_ids"] == outs[0].outputs[0].token_ids
    assert repr(outs[0].outputs[0].text[:5])[1:-1] in repr(outs) and "failed" not in repr(outs)


def test_failures_are_counted(llm):
    prompts = ["Hi", [10**9], [10**9 + 1], "x" * 9000]
    outs = llm.generate(prompts, SamplingParams(max_tokens=2))
    head = repr(outs).splitlines()[0]
    assert head.startswith("4 results, 2 tokens; 3 failed: ") and f"{10**9}" in head
    assert "→ error: " in repr(outs) and "error: " in repr(outs[1])


def test_lists_of_anything():
    "What is no result is shown as in any list; rows of several kinds stand under their own columns."
    answer = RequestOutput("0", outputs=[CompletionOutput(0, "a", [5])])
    frame = Outputs([answer, Score([1, 2], [-0.5])]).to_pandas()
    assert frame.perplexity.round(2).tolist()[1] == 1.65 and frame.text.isna().tolist() == [
        False,
        True,
    ]
    assert repr(Outputs(["x"])) == "['x']"


def test_the_bar_says_its_speed_ten_times_a_second(llm):
    from tqdm import tqdm

    said = []

    class Bar(tqdm):
        def set_postfix_str(self, s="", refresh=True):
            said.append(s)

    outs = llm.generate(["Hi"] * 30, SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=Bar)
    seconds = outs[-1].metrics["latency"]
    assert said[-1].startswith("900 tok, ") and len(said) <= min(300, 12 + 10 * seconds)


def test_to_pandas(llm):
    [pd] = needs("pandas")
    params = SamplingParams(n=2, max_tokens=3, seed=1, logprobs=2, ignore_eos=True)
    outs = llm.generate(["Hi", "Once", [10**9]], params)
    table = outs.to_pandas()
    assert [*table.index] == [0, 0, 1, 1, 2] and [*table["index"]] == [0, 1, 0, 1, 0]
    counts = table[["index", "prompt_tokens", "completion_tokens", "cached_tokens"]]
    assert {*counts.dtypes.astype(str)} == {"int64"}
    assert [*table.completion_tokens] == [3, 3, 3, 3, 0]
    assert [*table.error.isna()] == [True] * 4 + [False]
    for i, o in enumerate(outs[0].outputs):
        assert (table.text[0].iloc[i], table.logprobs[0].iloc[i]) == (o.text, o.logprobs)
        assert table.cumulative_logprob[0].iloc[i] == o.cumulative_logprob
    frame = pd.DataFrame(dict(key=[7, 8, 9], text_in=["Hi", "Once", None]))
    joined = frame.set_index("key").join(outs.to_pandas(index=frame.key))
    assert [*joined.index] == [7, 7, 8, 8, 9] and [*joined.completion_tokens] == [3, 3, 3, 3, 0]
    with pytest.raises(ParamError, match="2 entries for 3 results"):
        outs.to_pandas(index=[1, 2])
    plain = llm.generate(["Hi"], SamplingParams(max_tokens=3)).to_pandas()
    assert not {"logprobs", "cumulative_logprob"} & {*plain.columns}
    empty = Outputs().to_pandas()
    assert [*empty.columns] == [*plain.columns] and len(empty) == 0
    scores = llm.logprobs(["Hi there", "Two messages", None])
    assert [*scores.to_pandas().perplexity[:2]] == [s.perplexity for s in scores[:2]]


def test_to_pandas_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        MANY[:2].to_pandas()


def test_event_logprobs(llm):
    prompts, came, outs = ["Hi", "Once upon a time", "x"], {}, {}
    params = SamplingParams(n=2, seed=3, max_tokens=9, logprobs=2, stop=["e"])
    for e in llm.stream(prompts, params):
        assert len(e.logprobs) == len(e.token_ids)
        came.setdefault((e.index, e.completion), []).extend(e.logprobs)
        if e.output:
            outs[e.index] = e.output
    assert came == {(i, o.index): o.logprobs for i, out in outs.items() for o in out.outputs}
    assert {e.logprobs for e in llm.stream(prompts, SamplingParams(max_tokens=3))} == {None}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, whose objects are looked at too
def test_what_has_ended_is_freed_with_its_last_reader(llm):
    "No circle keeps it until the garbage is collected."
    params = SamplingParams(max_tokens=20, logprobs=5, ignore_eos=True)
    run = lambda: llm.generate(["Hi there", "Once upon a time"] * 8, params)
    count = lambda: sum(isinstance(x, Logprob) for x in gc.get_objects())
    run()
    gc.collect()
    gc.disable()
    try:
        before = count()
        outs = run()
        assert count() > before
        del outs
        assert count() == before
    finally:
        gc.enable()


CLOSE = """
import ctypes, gc, psutil
from batchlab import LLM
from batchlab.models import tiny_model
from batchlab.core.params import SamplingParams
rss = lambda: psutil.Process().memory_info().rss / 1e6
llm = LLM(tiny_model('llama', head_dim=256, max_position_embeddings=2048), compile=False)
gc.disable()
llm.generate([[5 + i, *range(9, 250)] * 4 for i in range(24)], SamplingParams(max_tokens=12, logprobs=50, ignore_eos=True))
ran = rss()
llm.close()
closed = rss()
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
print(ran, closed, rss())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the allocator of glibc")
def test_close_gives_back_what_the_allocator_holds(tmp_path):
    out = python(CLOSE, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    ran, closed, least = map(float, out.stdout.split())
    assert closed - least < 50 and ran - closed > 30, (ran, closed, least)


def test_close_lets_go_of_the_weights_that_an_interrupted_call_still_refers_to(
    tmp_path, monkeypatch
):
    "As a notebook does, which keeps the last traceback; and the next call reads the files again."
    folder = kept_model(tmp_path)
    for how in (dict(compile=False), {}):
        llm = LLM(folder, **how)
        ask = lambda: llm.generate(["Hi there", "You"], greedy(5))
        want, backend = ids(ask()), type(llm.backend)
        execute = backend.execute

        def interrupted(self, *args):
            raise KeyboardInterrupt

        monkeypatch.setattr(backend, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            ask()
        monkeypatch.setattr(backend, "execute", execute)
        weights = [weakref.ref(x) for x in (llm.model, llm.backend, llm.pooler)]
        steps = llm.stats().steps
        llm.close()
        gc.collect()
        assert [w() for w in weights] == [None] * 3 and "closed" in repr(llm)
        assert llm.stats().steps == steps and kept.traceback
        assert ids(ask()) == want and isinstance(llm.backend, backend)


def in_a_kernel(*cells):
    "The outputs of `cells`, run in a kernel as a notebook's."
    nbformat, nbclient = needs("nbformat", "nbclient")
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(nb, timeout=300, kernel_name="python3").execute()
    return [c.outputs for c in nb.cells]


RUN = """
from batchlab import LLM, SamplingParams
from batchlab.models import tiny_model, tiny_tokenizer
llm = LLM(tiny_model('llama'), tiny_tokenizer(), compile=False)
outs = llm.generate(['Hi there'] * 3, SamplingParams(max_tokens=4))
"""


def test_a_notebook(monkeypatch):
    "A bar without being asked, and results short; none with `TQDM_DISABLE`, as in the book, or if told so."
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    silent = 'llm.generate(["Hi"], use_tqdm=False); None'
    disabled = 'import os; os.environ["TQDM_DISABLE"] = "1"; llm.generate(["Hi"]); None'
    bar, quiet, off, shown, backend = in_a_kernel(RUN, silent, disabled, "outs", "llm")
    assert len(bar) == 1 and not quiet and not off
    assert "application/vnd.jupyter.widget-view+json" in bar[0].get("data", {}) or bar[0].text
    assert len(shown[0].data["text/plain"]) < 1000
    assert "torch backend" in backend[0].data["text/plain"]


def test_a_script_has_no_bar_in_a_file_and_needs_no_widgets(tmp_path):
    "It is said what is missing where one is asked for."
    code = """
import sys
for missing in ('ipywidgets', 'IPython', 'comm'):
    sys.modules[missing] = None
    from batchlab import *
    try: from batchlab import LiveView
    except ImportError as e: print(e)
    del sys.modules[missing]
"""
    out = scripted(code + RUN, tmp_path)
    assert out.stdout.count("pip install 'batchlab[widgets]'\n") == 3, out.stderr
    assert out.returncode == 0 and but_compiler(out.stderr) == "", out.stderr


def test_timeline_of_an_llm(llm, tmp_path):
    from batchlab import LiveView, timeline
    from batchlab.errors import PromptError, TraceError

    llm = LLM(llm.model, llm.tokenizer, max_num_seqs=4, compile=False)
    run = lambda llm, n: llm.generate(["Hi"], SamplingParams(max_tokens=n))
    with pytest.raises(TraceError, match="llm.trace"):
        timeline(llm)
    with llm.trace() as first:
        run(llm, 3)
    file = str(first.save(tmp_path / "t.json"))
    assert llm.recorder is first and len({timeline(x).svg for x in (llm, first, file)}) == 1
    with llm.trace() as second:
        run(llm, 5)
    assert llm.recorder is second
    always = LLM(llm.model, llm.tokenizer, compile=False, trace=True)
    with always.trace():
        run(always, 3)
    assert always.recorder in always.watchers and "3 steps" in repr(always.recorder)
    assert timeline(always).svg
    with pytest.raises(PromptError, match="at least one prompt"):
        LiveView(llm)


def test_cached_tokens_are_green(llm):
    "Three identical prompts: in the timeline, the page and the live view."
    from batchlab.view.pictures import timeline
    from batchlab.view.tracefile import slot_runs
    from batchlab.view.viewer import letters
    from batchlab.view.widgets import Watch, watch_picture

    prompt, params = (
        "The same beginning, and the same end, for each of the three.",
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    )
    llm.reset_prefix_cache()
    with llm.trace() as trace:
        outs = llm.generate([prompt] * 3, params)
    lanes = slot_runs(trace.steps).values()
    runs = {run.request: run for lane in lanes for run in lane if run.cached}
    shares = [o.num_cached_tokens / len(o.prompt_token_ids) for o in outs]
    assert [runs[i].cached if i in runs else 0 for i in range(3)] == shares
    assert min(shares[1:]) > 0.9 and all(run.end - run.first == 1 for run in runs.values())
    assert sum("C" in letters(s) for s in trace.steps) == len({run.first for run in runs.values()})
    green = lambda svg: re.findall(r'<(?:path|rect) class="bl-cached"', svg) and ">cached" in svg
    watch = Watch(llm)
    for _ in range(3):
        watch.add(prompt, params)
    while llm.step():
        pass
    watch.trace.stop()
    assert green(timeline(trace).svg) and green(watch_picture(watch).svg)


def test_readme_runs_from_top_to_bottom(tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert len(blocks) >= 2
    monkeypatch.chdir(tmp_path)
    names = {}
    for i, block in enumerate(blocks):
        exec(compile(block, f"block {i}", "exec"), names)
    names["llm"].close()
