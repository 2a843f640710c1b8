"What is printed and shown: results, engines and traces in a few lines, a bar where somebody watches, and memory that is given back."

import gc, pickle, platform, re, subprocess, sys, threading, xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

import pytest

from batchlab.llm.config import Limits
from batchlab.errors import ParamError
from batchlab.core.ledger import Ledger
from batchlab.api import LLM
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
from batchlab.core.params import SamplingParams
from batchlab.llm.shown import brief, short

ROOT = Path(__file__).resolve().parents[1]
BAD = '<script>alert(1)</script> & "quotes" \x00 \ud800 '


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny_model("llama", max_position_embeddings=4096), tiny_tokenizer(), max_num_seqs=4)


def request(i, n=1, tokens=300):
    logprobs = [{t: Logprob(-0.5, 1, "x")} for t in range(tokens)]
    answers = [
        CompletionOutput(k, BAD * 40, [*range(tokens)], -150.0, logprobs, "length")
        for k in range(n)
    ]
    return RequestOutput(
        str(i), BAD * 40, [*range(tokens)], answers, prompt_logprobs=[None, *logprobs]
    )


MANY = Outputs(request(i, n=2) for i in range(200))
ERROR = BAD * 50
SHOWN = dict(
    outputs=MANY,
    output=MANY[0],
    answer=MANY[0].outputs[0],
    failed=Outputs([RequestOutput(str(i), BAD, error=f"{i} {ERROR}") for i in range(200)]),
    empty=Outputs(),
    ids=RequestOutput("0", None, [*range(9000)]),
    score=Score([*range(9000)], [-0.5] * 8999),
    scores=Outputs([Score([1] * 300, [-1.0] * 299)] * 200),
    event=StreamEvent(
        "0",
        text=BAD * 40,
        token_ids=[*range(300)],
        logprobs=MANY[0].outputs[0].logprobs,
        output=MANY[0],
        finished=True,
    ),
    plan=MemoryPlan(
        200,
        60_000,
        60_000,
        600,
        64,
        10**9,
        10**8,
        4608,
        10**10,
        {i: "why it is refused " * 4 for i in range(200)},
        99,
        64,
    ),
    stats=Stats(
        dict(length=200),
        60_000,
        60_000,
        5,
        0,
        0,
        0,
        0,
        300,
        0,
        0,
        64,
        0,
        64,
        0,
        9,
        10**8,
        0.123456789,
        0.0123456789,
        1234.56789,
    ),
    new=Stats({}, *[0] * 16, *[float("nan")] * 3),
    ledger=Ledger(10**9, 10**6, 1, 2, 3),
    limits=Limits(64, 512, None, 10**10, 0),
)


@pytest.mark.parametrize("name", [*SHOWN])
def test_shown_short_and_whole(name):
    x = SHOWN[name]
    assert 0 < len(repr(x)) < 1000
    for form in ("_repr_html_", "_repr_svg_"):
        if not hasattr(x, form):
            continue
        text = getattr(x, form)()
        ET.fromstring(
            f"<div>{text}</div>"
        )  # well-formed: a control character or a bare < would not be
        assert "<script" not in text and len(text) < 60_000
        if name == "outputs":
            assert text.count("<tr>") == 21 and "… 380 more rows" in text


def test_engine_shown(llm):
    for x in (
        llm,
        llm.backend,
        llm.limits,
        llm.stats(),
        llm.ledger,
        llm.plan(["Hi"] * 200),
        llm.trace(),
    ):
        assert len(repr(x)) < 1000, x
    assert (
        llm.backend.name in repr(llm.backend)
        and llm.backend.name in repr(llm)
        and "object at" not in repr(llm)
    )
    plain = LLM(llm.model, llm.tokenizer, compile=False)
    assert "torch" in repr(plain.backend) and "compile=False" in repr(
        plain.backend
    )  # its name, and why
    assert (
        "compile=False" in plain._repr_html_()
        and ET.fromstring(f"<div>{plain._repr_html_()}</div>") is not None
    )
    assert "4,096 tokens of context" in repr(llm)


def test_results_are_a_list(llm):
    outs = llm.generate(
        ["Hi", "Once upon"], SamplingParams(temperature=0, max_tokens=4, logprobs=1), use_tqdm=False
    )
    assert isinstance(outs, list) and type(outs) is Outputs and type(outs[0]) is RequestOutput
    assert (
        outs == [*outs]
        and [*outs] == outs
        and outs[:1] == [outs[0]]
        and (outs + outs)[2:] == outs
        and [*outs, *outs] == outs + [*outs]
    )
    assert {type(x) for x in (outs[:1], outs + [], outs.copy())} == {Outputs}
    assert (
        pickle.loads(pickle.dumps(outs)) == outs
        and asdict(outs[0])["outputs"][0]["token_ids"] == outs[0].outputs[0].token_ids
    )
    assert repr(outs[0].outputs[0].text[:5])[1:-1] in repr(outs) and "failed" not in repr(outs)
    assert (
        type(
            llm.chat(
                [[{"role": "user", "content": "Hi"}]], SamplingParams(max_tokens=1), use_tqdm=False
            )
        )
        is Outputs
    )
    assert type(llm.logprobs(["Hi there"], use_tqdm=False)) is Outputs


def test_failures_are_counted(llm):
    outs = llm.generate(
        ["Hi", [10**9], [10**9 + 1], "x" * 9000], SamplingParams(max_tokens=2), use_tqdm=False
    )
    head = repr(outs).splitlines()[0]
    assert head.startswith("4 results, 2 tokens; 3 failed: ") and f"{10**9}" in head
    assert "1: 1 token ids → error: " in repr(outs) and "error: " in repr(outs[1])


def plain_columns(llm):
    return llm.generate(["Hi"], SamplingParams(max_tokens=1), use_tqdm=False).to_pandas()


def test_lists_of_anything():
    "What is no result is shown as in any list; rows of several kinds stand under their own columns."
    a, score = Outputs([request(0, tokens=3)]), Score([1, 2], [-0.5])
    assert {type(x) for x in (sum([a, a], []), [score] + a, a + [score])} == {Outputs} and (
        [score] + a
    )[0] is score
    with pytest.raises(TypeError):
        (1,) + a
    mixed = (a + [score])._repr_html_()
    heads, *rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in mixed.split("<tr>")[1:]
    ]
    assert (
        {len(row) for row in rows} == {len(heads)}
        and rows[1][heads.index("perplexity")] == "1.65"
        and rows[1][heads.index("text")] == ""
    )
    a[0] = "x"
    assert repr(a) == "['x']" and a._repr_html_() is None


def test_a_plan_names_ten_refusals():
    lines = str(
        MemoryPlan(5000, 0, 0, 0, 1, 0, 0, 0, 0, {i: "why" for i in range(5000)})
    ).splitlines()
    assert len(lines) == 13 and lines[-1] == "and 4,990 more are refused"


def test_the_bar_says_its_speed_ten_times_a_second(llm, capsys):
    from tqdm import tqdm

    said = []

    class Bar(tqdm):
        def set_postfix_str(self, s="", refresh=True):
            said.append(s)

    outs = llm.generate(["Hi"] * 30, SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=Bar)
    assert said[-1].startswith("900 tok, ") and len(said) <= 2 + 10 * (
        outs[-1].metrics["latency"] + 1
    )
    assert len(said) < 300


def test_to_pandas(llm):
    pd = pytest.importorskip("pandas", reason="needs pandas")
    frame = pd.DataFrame(dict(key=[7, 8, 9], text_in=["Hi", "Once", None]))
    outs = llm.generate(
        ["Hi", "Once", [10**9]],
        SamplingParams(n=2, max_tokens=3, seed=1, logprobs=2, ignore_eos=True),
        use_tqdm=False,
    )
    table = outs.to_pandas()
    assert [*table.index] == [0, 0, 1, 1, 2] and [*table["index"]] == [0, 1, 0, 1, 0]
    assert {
        str(table[k].dtype)
        for k in ("index", "prompt_tokens", "completion_tokens", "cached_tokens")
    } == {"int64"}
    assert [*table.completion_tokens] == [3, 3, 3, 3, 0] and [*table.error.isna()] == [True] * 4 + [
        False
    ]
    assert [*table.text[:2]] == [o.text for o in outs[0].outputs] and [
        *table.cumulative_logprob[:2]
    ] == [o.cumulative_logprob for o in outs[0].outputs]
    assert table.logprobs.iloc[0] == outs[0].outputs[0].logprobs
    joined = frame.set_index("key").join(outs.to_pandas(index=frame.key))
    assert [*joined.index] == [7, 7, 8, 8, 9] and [*joined.completion_tokens] == [3, 3, 3, 3, 0]
    with pytest.raises(ParamError, match="2 entries for 3 results"):
        outs.to_pandas(index=[1, 2])
    assert [*Outputs().to_pandas().columns] == [*plain_columns(llm)] and not len(
        Outputs().to_pandas()["text"]
    )
    plain = llm.generate(["Hi"], SamplingParams(max_tokens=3), use_tqdm=False).to_pandas()
    assert not {"logprobs", "cumulative_logprob"} & {*plain.columns}
    scores = llm.logprobs(["Hi there", "Once"], use_tqdm=False)
    assert [*scores.to_pandas().perplexity] == [s.perplexity for s in scores] and len(
        Outputs().to_pandas()
    ) == 0


def test_to_pandas_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        MANY[:2].to_pandas()


def test_short_texts():
    assert short(" a \n b ", 9) == "a b" and short("abcdef", 4) == "abc…"
    assert brief("a\nb", 9) == r"'a\nb'" and len(brief("x" * 99, 10)) == 12


def test_event_logprobs(llm):
    prompts, params = (
        ["Hi", "Once upon a time", "x"],
        SamplingParams(n=2, seed=3, max_tokens=9, logprobs=2, stop=["e"]),
    )
    came, outs = {}, {}
    for e in llm.stream(prompts, params):
        assert e.logprobs is not None and len(e.logprobs) == len(e.token_ids)
        came.setdefault((e.index, e.completion), []).extend(e.logprobs)
        if e.output:
            outs[e.index] = e.output
    assert came == {(i, o.index): o.logprobs for i, out in outs.items() for o in out.outputs}
    assert {e.logprobs is None for e in llm.stream(prompts, SamplingParams(max_tokens=3))} == {True}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, whose objects are looked at too
def test_what_has_ended_is_freed_with_its_last_reader(llm):
    "No circle keeps it until the garbage is collected."
    run = lambda: llm.generate(
        ["Hi there", "Once upon a time"] * 8,
        SamplingParams(max_tokens=20, logprobs=5, ignore_eos=True),
        use_tqdm=False,
    )
    run()
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(x, Logprob) for x in gc.get_objects())
        outs = run()
        assert sum(isinstance(x, Logprob) for x in gc.get_objects()) > before
        del outs
        assert sum(isinstance(x, Logprob) for x in gc.get_objects()) == before
    finally:
        gc.enable()


CLOSE = """
import ctypes, gc, psutil
from batchlab.api import LLM
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


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc",
    reason="needs glibc, whose allocator gives back what it is asked for",
)
def test_close_gives_back_what_the_allocator_holds(tmp_path):
    out = subprocess.run(
        [sys.executable, "-c", CLOSE], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr
    ran, closed, least = map(float, out.stdout.split())
    assert closed - least < 50 and ran - closed > 30, (ran, closed, least)


def in_a_kernel(*cells):
    "The outputs of `cells`, run in a kernel as a notebook's."
    nbformat, nbclient = (
        pytest.importorskip(name, reason=f"needs {name}") for name in ("nbformat", "nbclient")
    )
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
    "A bar without being asked, results short and as a table; none with `TQDM_DISABLE`, as in the book, or if told so."
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    run, quiet, shown, backend = in_a_kernel(
        RUN, 'llm.generate(["Hi"], use_tqdm=False); None', "outs", "llm"
    )
    seen = [
        o.data["application/vnd.jupyter.widget-view+json"] if "data" in o else o.text for o in run
    ]
    assert len(seen) == 1 and not quiet
    assert (
        len(shown[0].data["text/plain"]) < 1000
        and "<table>" in shown[0].data["text/html"]
        and "torch backend" in backend[0].data["text/html"]
    )
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert in_a_kernel(RUN) == [[]]


def test_no_bar_in_a_file(tmp_path):
    out = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0 and out.stderr == "", out.stderr


def test_widgets_say_what_is_missing(tmp_path):
    code = """
import sys
for missing in ('ipywidgets', 'IPython', 'comm'):
    sys.modules[missing] = None
    from batchlab import *
    for name in ('LiveView', 'Playground', 'Scrubber'):
        try: exec(f'from batchlab import {name}')
        except ImportError as e: print(e)
    del sys.modules[missing]
"""
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert out.stdout == "the widgets need ipywidgets: pip install 'batchlab[widgets]'\n" * 9, (
        out.stderr
    )


def test_timeline_of_an_llm(tmp_path):
    from batchlab import LiveView, Playground, Scrubber, timeline
    from batchlab.errors import PromptError, TraceError

    llm = LLM(
        tiny_model("llama", max_position_embeddings=4096),
        tiny_tokenizer(),
        max_num_seqs=4,
        compile=False,
    )
    with pytest.raises(TraceError, match=r"with llm.trace\(\):"):
        timeline(llm)
    with llm.trace() as first:
        llm.generate(["Hi"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert (
        llm.recorder is first
        and timeline(llm).svg
        == timeline(first).svg
        == timeline(str(first.save(tmp_path / "t.json"))).svg
    )
    with llm.trace() as second:
        llm.generate(["Hi"], SamplingParams(max_tokens=5), use_tqdm=False)
    assert llm.recorder is second
    always = LLM(llm.model, llm.tokenizer, compile=False, trace=True)
    with always.trace():
        always.generate(["Hi"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert (
        always.recorder in always.watchers
        and "3 steps" in repr(always.recorder)
        and Scrubber(always).data["steps"]
    )
    with pytest.raises(PromptError, match="give at least one prompt"):
        LiveView(llm)
    Playground(llm).close()


def test_cached_tokens_are_green(llm):
    "Three identical prompts: in the timeline, the page, the scrubber's picture, and the live view."
    from batchlab.view.pictures import timeline
    from batchlab.view.scrubber import Scrubber
    from batchlab.view.tracefile import slot_runs
    from batchlab.view.viewer import letters
    from batchlab.view.widgets import Watch, watch_picture

    prompt, params = (
        "The same beginning, and the same end, for each of the three.",
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    )
    llm.reset_prefix_cache()
    with llm.trace() as trace:
        outs = llm.generate([prompt] * 3, params, use_tqdm=False)
    lanes = slot_runs(trace.steps).values()
    runs = {run.request: run for lane in lanes for run in lane if run.cached}
    shares = [o.num_cached_tokens / len(o.prompt_token_ids) for o in outs]
    assert [runs[i].cached if i in runs else 0 for i in range(3)] == shares
    assert min(shares[1:]) > 0.9 and all(run.end - run.first == 1 for run in runs.values())
    assert sum("C" in letters(s) for s in trace.steps) == len({run.first for run in runs.values()})
    green = lambda svg: re.findall(r'<(?:path|rect) class="bl-cached"', svg) and ">cached" in svg
    scrubber = Scrubber(trace, runs[1].first)
    watch = Watch(llm)
    for _ in range(3):
        watch.add(prompt, params)
    while llm.step():
        pass
    watch.trace.stop()
    assert green(timeline(trace).svg) and green(scrubber.picture())
    assert green(watch_picture(watch).svg)
    scrubber.close()


def defaults_in_readme():
    "`(temperature, max_tokens)` of each row of README's table of defaults, as text."
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    first = rows.index(["", "`temperature`", "`max_tokens`"])
    return [tuple(row[1:]) for row in rows[first + 2 : first + 6]]


def test_defaults_are_as_readme_and_help_say():
    from batchlab.cli.flags import parser_of
    from batchlab.jobs.lines import DEFAULTS

    python = SamplingParams()
    forms = [
        (python.temperature, python.max_tokens),
        *(
            (DEFAULTS[k]["temperature"], DEFAULTS[k]["max_tokens"])
            for k in ("plain", "chat", "text")
        ),
    ]
    assert defaults_in_readme() == [(f"{t:g}", str(n or "up to the context")) for t, n in forms]
    (t, n), (own_t, own_n) = forms[:2]
    for command in ("generate", "run", "plan"):
        words = " ".join(parser_of(command).format_help().split())
        assert (
            f"temperature {own_t:g} and {own_n} tokens here; temperature {t:g} and {n} tokens in Python"
            in words
        )


def test_readme_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    import ast, asyncio, inspect

    pytest.importorskip("pandas", reason="needs pandas")
    pytest.importorskip("ipywidgets", reason="needs ipywidgets")
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert len(blocks) >= 4
    monkeypatch.chdir(tmp_path)
    names = {}

    async def run():
        for i, block in enumerate(blocks):
            found = eval(
                compile(block, f"block {i}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names
            )
            if inspect.isawaitable(found):
                await found

    asyncio.run(run())
    for t in threading.enumerate():
        if t.name == "batchlab-widget":
            t.join(60)  # of the live view
    names["llm"].close()
