"""The widgets in a real JupyterLab and the viewer's page, both in headless Chromium: what a person would click is clicked.

Skipped where Chromium or `playwright` is missing: `pip install playwright`, and Chromium from your system, or its path in
the variable CHROMIUM."""

import contextlib, json, os, re, shutil, signal, socket, subprocess, sys, time, urllib.request

import pytest

pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install '.[dev]'")

from helpers import BOOK, ROOT, greedy

CELLS = [
    """
from batchlab import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.core.params import SamplingParams
from batchlab.view.widgets import LiveView, WidgetBox
model, tokenizer = tiny_model('llama', max_position_embeddings=4096), tiny_tokenizer()
llm = LLM(model, tokenizer, max_num_seqs=2, max_num_batched_tokens=16, compile=False)
long = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
""",
    "LiveView(llm, ['The sea', 'A hill is', 'Rain falls on'], long, paused=True)",
    """
import threading
print('threads', sum(t.name.startswith('batchlab') for t in threading.enumerate()), 'panels', sum(map(len, WidgetBox.made.values())),
      'in use', llm.stats().slots_in_use, dict(llm.stats().requests))
""",
]


def notebook(cells):
    "A notebook of code cells, as text."
    bare = dict(cell_type="code", metadata={}, outputs=[], execution_count=None)
    cells = [bare | dict(id=f"c{i}", source=s.strip()) for i, s in enumerate(cells)]
    spec = dict(display_name="Python 3", language="python", name="python3")
    whole = dict(cells=cells, metadata=dict(kernelspec=spec), nbformat=4, nbformat_minor=5)
    return json.dumps(whole)


def answers(address):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"{address}/api", timeout=5).status == 200


@contextlib.contextmanager
def jupyter_lab(folder):
    "A JupyterLab of its own for `folder`: yields its address, and ends it with its kernels."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    own, address = folder / ".jupyter", f"http://127.0.0.1:{port}"
    settings = own / "settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    for name, values in dict(
        themes=dict(theme="JupyterLab Light"),
        notification=dict(fetchNews="false", checkForUpdates=False),
    ).items():
        (settings / f"{name}.jupyterlab-settings").write_text(json.dumps(values))
    env = dict(OMP_NUM_THREADS="1") | os.environ | dict(JUPYTER_PREFER_ENV_PATH="1")
    folders = (
        "JUPYTER_CONFIG JUPYTER_RUNTIME JUPYTER_DATA JUPYTERLAB_SETTINGS JUPYTERLAB_WORKSPACES"
    )
    env |= {f"{k}_DIR": str(own / k.split("_")[1].lower()) for k in folders.split()}
    flags = f"""--no-browser --allow-root --ServerApp.port={port} --ServerApp.port_retries=0
        --IdentityProvider.token= --LabApp.expose_app_in_browser=True""".split()
    command = [sys.executable, "-m", "jupyterlab", *flags, f"--ServerApp.root_dir={folder}"]
    with open(folder / "lab.log", "w") as log:
        how = dict(env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        server = subprocess.Popen(command, **how)
        try:
            for _ in range(600):
                if answers(address):
                    break
                assert server.poll() is None, (folder / "lab.log").read_text()[-2000:]
                time.sleep(0.1)
            yield address
        finally:
            server.send_signal(signal.SIGTERM)  # it ends its kernels
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


CELLS_NOW = (
    "[...window.jupyterapp.shell.currentWidget.content.model.cells].filter(c => c.type === 'code')"
)
OUTPUTS = f"{CELLS_NOW}.flatMap(c => c.outputs.toJSON())"
ERRORS = f"{OUTPUTS}.filter(o => o.output_type === 'error')"


def run_all(page, address, name, seconds=80):
    "Open a notebook, run all its cells, and wait until every one has run. Returns the errors that are in its outputs."
    page.goto(f"{address}/lab/tree/{name}?reset")
    ready = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
    idle = f"() => {ready}?.connectionStatus === 'connected' && {ready}.status === 'idle'"
    page.wait_for_function(idle, timeout=60_000)
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    done = f"() => {CELLS_NOW}.every(c => c.executionCount) || {ERRORS}.length"
    page.wait_for_function(done, timeout=seconds * 1000, polling=200)
    return page.evaluate(f"() => {ERRORS}.map(o => o.evalue)")


def until(condition, seconds=30):
    "Wait for `condition()`, which may fail meanwhile; what it gave."
    end = time.monotonic() + seconds
    while not (got := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return got


# In JupyterLab


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    (folder / "small.ipynb").write_text(notebook(CELLS))
    shutil.copy(ROOT / "nbs/chapter.py", folder)
    chapter = json.loads(BOOK["find"]("widgets").read_text(encoding="utf-8"))
    chapter["cells"] = [c for c in chapter["cells"] if "nbdev_export" not in "".join(c["source"])]
    (folder / "widgets.ipynb").write_text(json.dumps(chapter))
    with jupyter_lab(folder) as address:
        yield address


@pytest.fixture(scope="module")
def page(browser, lab):
    "The small notebook, all of its cells run."
    page = browser.new_page(viewport=dict(width=1280, height=1000))
    page.set_default_timeout(30_000)
    page.problems = []
    page.on("pageerror", lambda e: page.problems.append(str(e)))
    assert run_all(page, lab, "small.ipynb") == []
    yield page
    page.close()


def cell(page, i):
    return page.locator(".jp-CodeCell").nth(i)


def output(page, i):
    return cell(page, i).locator(".jp-OutputArea-output")


def run_cell(page, i):
    "Run cell `i` and wait for it."
    page.evaluate(
        f"() => {{ const n = window.jupyterapp.shell.currentWidget.content; n.activeCellIndex = {i}; n.deselectAll();"
        " return window.jupyterapp.commands.execute('notebook:run-cell'); }"
    )


def test_live_view_steps_streams_and_cancels(page):
    out = output(page, 1)
    assert "paused" in out.inner_text()
    tokens = lambda: [
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) tokens$", out.inner_text(), re.M)
    ][-3:]
    for k in (1, 2, 3):
        out.get_by_role("button", name="Step", exact=True).click()
        assert until(lambda: tokens()[:2] == [k, k]), out.inner_text()
    out.get_by_role("spinbutton").fill("1")
    out.get_by_role("spinbutton").press("Enter")
    out.get_by_role("button", name="Cancel this").click()  # while it is paused
    assert until(lambda: "cancelled" in out.inner_text())
    assert tokens()[0] == 3  # nobody else has moved
    out.get_by_role("button", name="Go on").click()
    seen = set()
    until(lambda: seen.add(tokens()[0]) or len(seen) >= 4)
    assert len(seen) >= 4 and "tokens/s" in out.inner_text()  # it streams
    assert until(lambda: out.locator('[data-request="2"]').count())  # who waited has a slot
    out.get_by_role("button", name="Cancel all").click()  # while it runs
    assert until(lambda: "done: 0 running, 0 waiting, 3 done" in " ".join(out.inner_text().split()))
    assert until(lambda: out.inner_text().count("ended: cancelled") == 3) and max(tokens()) < 3000
    run_cell(page, 2)
    said = output(page, 2).inner_text()
    assert "in use 0" in said and "'cancelled': 3" in said and "threads 0" in said


def test_cell_run_again_ends_the_first(page):
    for _ in range(3):
        run_cell(page, 1)
    assert until(lambda: "paused" in output(page, 1).inner_text())
    run_cell(page, 2)
    said = output(page, 2).inner_text()
    # the engine's and the painter's
    assert "threads 2" in said and "panels 1" in said and "in use 0" in said
    output(page, 1).get_by_role("button", name="Cancel all").click()
    assert until(lambda: "cancelled" in output(page, 1).inner_text())
    assert page.problems == []


def test_notebook_runs(browser, lab):
    "The chapter itself, as a reader runs it: each widget has a picture for elsewhere."
    page = browser.new_page(viewport=dict(width=1280, height=1000))
    assert run_all(page, lab, "widgets.ipynb", 300) == []
    views = page.evaluate(f"() => {OUTPUTS}.map(o => Object.keys(o.data ?? {{}}))")
    live = [v for v in views if "application/vnd.jupyter.widget-view+json" in v]
    assert len(live) >= 3 and all("image/svg+xml" in v for v in live)
    page.close()


# The viewer's page

PROMPTS = [
    "The sea",
    "</script><script>window.harm = 1</script>",
    "Rain falls on the hills",
    '<img src=x onerror="window.harm = 2">',
    "A",
]


@pytest.fixture(scope="module", params=["continuous", "static"])
def trace(request):
    from batchlab import LLM
    from batchlab.models import tiny_model, tiny_tokenizer

    how = dict(max_num_seqs=2, max_num_batched_tokens=16, compile=False, strategy=request.param)
    llm = LLM(tiny_model("llama"), tiny_tokenizer(), **how)
    with llm.trace() as trace:
        llm.generate(PROMPTS, [greedy(n) for n in (5, 9, 3, 7, 4)])
    llm.close()
    return trace


@pytest.fixture
def written(tmp_path):
    "The address of the page of a trace, in a file."
    from batchlab.view.viewer import view_html

    def write(trace):
        (tmp_path / "page.html").write_text(view_html(trace), encoding="utf-8")
        return (tmp_path / "page.html").as_uri()

    return write


def shares_of(data, step):
    "Of each row of a step, in the order of the packed row: its request, what it had written, and what came."
    requests, found = {r["request"]: r for r in data["requests"]}, []
    rows = sorted(step["rows"], key=lambda r: (r[3] > 1, r[0]))
    for _, number, start, n, _, samples, _, _ in rows:
        r = requests[number]
        k = start + n - r["prompt_tokens"]  # tokens of its answer that it has read
        came = r["pieces"][k : k + 1] if samples and k >= 0 else []
        found.append([str(number), "".join(r["pieces"][: max(0, k)] + came)])
    return found


def test_page_shows_what_the_trace_says(browser, trace, written):
    data = json.loads(json.dumps(trace.data))
    context = browser.new_context(viewport=dict(width=480, height=900), color_scheme="dark")
    page, asked, problems = context.new_page(), [], []
    page.on("request", lambda r: asked.append(r.url))
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.goto(written(trace))
    texts = {}
    for step in data["steps"]:
        line = page.locator("#line").inner_text()
        counts = f"{step['tokens']} token", f"{step['useful']} useful", f"{step['waiting']} waiting"
        assert line.startswith(f"step {step['step']} of ") and all(c in line for c in counts)
        parts = shares_of(data, step)
        assert page.locator(".part b").all_inner_texts() == [number for number, _ in parts]
        came = page.evaluate(
            "() => [...document.querySelectorAll('#texts .answer')].map(a => [a.firstChild.textContent, "
            "a.childNodes[5].textContent + a.querySelector('mark').textContent])"
        )
        assert sorted(came) == sorted(parts)
        texts.update(parts)
        slots = page.locator("#slots tr").all_inner_texts()
        assert len(slots) == sum(n > 0 for n in step["held"])
        assert page.evaluate("document.documentElement.scrollWidth") <= 480
        page.keyboard.press("ArrowRight")
    assert texts == {str(r["request"]): "".join(r["pieces"]) for r in data["requests"]}
    assert page.evaluate("window.harm") is None and problems == []
    assert [u for u in asked if not u.startswith(("file:", "data:,"))] == []  # no network
    context.close()


def test_page_by_keyboard(browser, trace, written):
    page, last = browser.new_page(), len(trace.data["steps"]) - 1
    page.goto(written(trace) + "#step=2")
    at = lambda: int(page.locator("#slider").input_value())
    assert at() == 2
    for key, where in (
        ("Home", 0),
        ("ArrowRight", 1),
        ("Shift+ArrowRight", 11),
        ("End", last),
        ("ArrowRight", last),
        ("ArrowLeft", last - 1),
    ):
        page.keyboard.press(key)
        assert at() == min(where, last), key
    page.keyboard.press("Home")
    page.locator("#pace").select_option("15")
    page.locator("#run").press("Enter")
    assert until(lambda: at() > 2)
    page.locator("#run").press("Enter")
    page.locator("summary").press("Enter")
    assert page.locator("#all tr").count() == len(PROMPTS)
    ground = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = ground()
    page.locator("#theme").press("Enter")
    assert ground() != light
    page.close()


def test_page_of_a_trace_without_texts(browser, trace, written):
    "As `batchlab run --trace` records it: how many tokens a part has stands in the place of what they say."
    said = {"prompt", "prompt_ids", "output_ids", "pieces"}
    bare = [{k: r[k] for k in r.keys() - said} for r in trace.data["requests"]]
    page = browser.new_page()
    page.goto(written(trace.data | dict(requests=bare, tokens={})))
    rows = sorted(trace.data["steps"][0]["rows"], key=lambda r: (r[3] > 1, r[0]))
    shown = page.locator("#row .part").all_inner_texts()
    assert shown == [f"{r[1]}{r[3]} tokens" for r in rows]
    page.close()


@pytest.mark.parametrize(
    "around, tone",
    [
        ("<html>", 0),
        ('<html style="color-scheme:dark">', 1),
        ('<body data-jp-theme-light="false"><div class="bl">', 1),
        ('<body class="vscode-dark"><div class="bl">', 1),
        ('<body data-jp-theme-light="true"><div class="bl">', 0),
    ],
)
def test_pictures_are_light_or_dark_as_the_page_is(browser, around, tone):
    "Whatever the reader's system says: a page's own scheme, JupyterLab's theme, VS Code's."
    from batchlab.view.drawing import COLOURS, HTML_STYLE, bars

    system = None if around == "<html>" else "light" if tone else "dark"
    page = browser.new_page(color_scheme=system)
    picture = bars(dict(x=dict(n=1)), dict(n=("decode", "a place")), "places").svg
    page.set_content(f"{around}<style>{HTML_STYLE}</style>{picture}")
    fill = page.evaluate("getComputedStyle(document.querySelector('.bl-decode')).fill")
    hex_of = "".join(f"{int(n):02x}" for n in re.findall(r"\d+", fill))
    assert f"#{hex_of}" == COLOURS["decode"][tone]
    page.close()
