"What several files of tests share."

import contextlib, csv, gzip, itertools, json, os, runpy, socket, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

streamed = pytest.mark.parametrize("stream", [False, True])
compiled_or_not = pytest.mark.parametrize("compile", ["auto", False])
one_thread = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[1]


def tool(name):
    "What a script of `.ci` defines."
    return SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / name), run_name=name))


BOOK = vars(tool("book.py"))  # which notebooks there are


def draws(n):
    "How many cases a test draws: `n` times the number that the variable BATCHLAB_DRAWS gives (1)."
    return n * int(os.environ.get("BATCHLAB_DRAWS", 1))


def run(*command, cwd=None, timeout=300, **env):
    "A finished process, with the variables `env` besides those of this one."
    env = os.environ | env
    return subprocess.run(
        command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True
    )


def python(code, *args, **how):
    "A finished process that ran Python code; see `run`."
    return run(sys.executable, "-c", code, *args, **how)


def greedy(max_tokens, **more):
    "Parameters of greedy sampling that no token ends."
    from batchlab import SamplingParams

    return SamplingParams(**dict(temperature=0, max_tokens=max_tokens, ignore_eos=True) | more)


def ids(outs):
    "The token ids of each answer."
    return [list(o.outputs[0].token_ids) for o in outs]


def some_ids(rng, n):
    "So many ids of tokens that are no control tokens."
    return [rng.randrange(3, 259) for _ in range(n)]


def told(outs):
    "The token ids of each answer, and their log probabilities."
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outs]


def weight_bytes(model):
    return sum(p.nbytes for p in model.parameters())


def spoil(cache):
    "Fill a cache with what no step may read."
    for t in cache.keys + cache.values:
        t.fill_(float("nan"))


def refusal(r):
    "The status and the code of a refusal."
    return r.status_code, r.json()["error"]["code"]


def oracle(model, prompts, max_tokens, eos_ids=()):
    "The tokens that the generator without a cache gives for each prompt; `max_tokens`: for all, or for each its own."
    from batchlab.basics.prefill import generate_naive

    counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    return [generate_naive(model, p, n, eos_ids) for p, n in zip(prompts, counts)]


def generated(model, prompt, max_tokens):
    "The tokens of transformers' greedy `generate` for one prompt, alone; none ends it."
    import torch

    prompt = torch.tensor([prompt], device=model.device)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=model.config.get_text_config().vocab_size,
        pad_token_id=0,
    )
    return out[0, prompt.shape[1] :].tolist()


def in_threads(*jobs):
    "What the jobs return, each in a thread of its own."
    threads = ThreadPoolExecutor(len(jobs))
    try:
        return [f.result(120) for f in [threads.submit(job) for job in jobs]]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def texts(outs):
    "The text of each answer."
    return [o.outputs[0].text for o in outs]


@contextlib.contextmanager
def running(server, sock, up):
    "`server` of batchlab at work on `sock`, in the thread that is given; it sets `up` when it listens."
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    assert up.wait(60)
    try:
        yield thread
    finally:
        server.should_exit = True
        server.api.llm.llm.resume()
        thread.join(60)
        assert not thread.is_alive()


def until(f, seconds=100):
    "Wait for `f()` to be true."
    end = time.monotonic() + seconds
    while not f():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def need_same_bits(backend):
    "Skip where a token's bits depend on its company: without kernels."
    if not backend.batch_invariant:
        pytest.skip(f"no kernels: {backend.why}")


def step_of(s):
    "A checked step of scheduler `s`, in which each row that samples gets a token: its plan."
    from batchlab.core.request import RowOutput
    from invariants import check_invariants

    check_invariants(s, plan := s.schedule())
    s.update(plan, [RowOutput([7] if row.samples else []) for row in plan.rows])
    return plan


NO_KERNELS = "plain torch runs the model, "


def but_compiler(err):
    "What stands on standard error, but for the line that says that there is no compiler, where there is none."
    return "".join(
        line
        for line in err.splitlines(True)
        if not (NO_KERNELS in line and "no C++ compiler" in line)
    )


def same(x, y, backend):
    "Whether two answers are equal, numbers to the bit where `backend` promises that in any company, and else to rounding."
    if isinstance(x, str) and isinstance(y, str) and x.startswith('{"') and y.startswith('{"'):
        x, y = json.loads(x), json.loads(y)
    with contextlib.suppress(ValueError, TypeError):  # a table of text has its numbers as text
        if isinstance(x, str) and "." in x:
            x, y = float(x), float(y)
    if isinstance(x, float) and isinstance(y, float) and not backend.batch_invariant:
        return x == pytest.approx(y, abs=1e-4)
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(same(x[k], y[k], backend) for k in x)
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(same(a, b, backend) for a, b in zip(x, y))
    return x == y


def longrope():
    "A model that rotates all rows of a batch otherwise if one of them is longer than 16 tokens."
    from batchlab.models import tiny_model

    factors = dict(short_factor=[1.0] * 8, long_factor=[4.0] * 8)
    rope = dict(rope_type="longrope", rope_theta=10_000.0, **factors)
    switch = dict(original_max_position_embeddings=16)
    return tiny_model(
        "phi3", seed=3, max_position_embeddings=128, rope_parameters=rope | switch, **switch
    )


def drain(llm):
    "Make steps of `llm` until nothing is left to do."
    while llm.step():
        pass


def noting(found):
    "A listener that keeps what ended, `{id: output}`, in `found`."
    return lambda e: e.finished and found.update({e.request_id: e.output})


def json_lines(text):
    "The value of each line of `text` that is not empty."
    return [json.loads(line) for line in text.split("\n") if line]


def raising(error):
    "A function that raises `error`, whatever it is given."

    def fail(*args, **kwargs):
        raise error

    return fail


# Files of requests and of answers, and the commands that read them

ENV = os.environ | dict(
    OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONUTF8="0", LC_ALL="C.UTF-8"
)  # of a command
posix = pytest.mark.skipif(os.name != "posix", reason="signals, limits and devices of POSIX")


def examples(n):
    "For hypothesis: `n` cases, the same each time, each of which may take its time."
    from hypothesis import HealthCheck, settings

    how = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    return settings(max_examples=n, **how)


def line(i, url, **body):
    "A line of the Batch API, greedy."
    return dict(custom_id=f"r{i}", method="POST", url=url, body=dict(temperature=0) | body)


def ask(i, **body):
    "A line for a few tokens after a prompt."
    own = dict(prompt=f"tell me {i} " + "more " * (i % 6), max_tokens=1 + i % 5)
    return line(i, "/v1/completions", **own | body)


def chat(i, **body):
    "A line for a few tokens in a conversation."
    said = dict(system="Be brief." * (i % 2), user=f"What is {i}?")
    talk = [dict(role=role, content=text) for role, text in said.items()]
    return line(i, "/v1/chat/completions", **dict(messages=talk, max_tokens=2 + i % 4) | body)


def write_lines(path, lines):
    "A file of JSON, a line each; a text is a line as it stands."
    lines = [s if isinstance(s, str) else json.dumps(s) for s in lines]
    Path(path).write_text("".join(f"{s}\n" for s in lines), encoding="utf-8", newline="")


def read_lines(path):
    return [json.loads(s) for s in Path(path).read_text(encoding="utf-8").splitlines()]


def by_line(records):
    "Records of the Batch API by the line that they answer, each once, without what a clock or a cache puts in."
    found = {}
    for r in records:
        number, body = int(r["id"].split("_")[2]), (r["response"] or {}).get("body") or {}
        body.pop("created", None)
        body.get("usage", {}).pop("prompt_tokens_details", None)
        assert found.setdefault(number, r) is r, f"line {number} twice"
    return found


def read_table(path):
    "The rows of a file of answers of any kind, as dicts; those of CSV are all text."
    if (name := str(path)).endswith(".parquet"):
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "rt", newline="", encoding="utf-8") as f:
        if ".jsonl" in name:
            return [*map(json.loads, f)]
        return [*csv.DictReader(f, delimiter="\t" if ".tsv" in name else ",")]


def kept_model(folder, model=None):
    "A model, a tiny llama if none is given, and the tiny tokenizer in `folder`: its path."
    from batchlab.models import tiny_model, tiny_tokenizer

    (model or tiny_model("llama")).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def ended_by(sig, command, folder, out, size=0):
    "The process of `command` in `folder`, to which `sig` was sent when file `out` was larger than `size`."
    import psutil
    from warm import warm

    with ThreadPoolExecutor(1) as threads:
        p = threads.submit(warm, command, folder, ENV)
        until(lambda: p.done() or out.exists() and out.stat().st_size > size)
        ours = psutil.Process().children()
        started = [child for server in ours for child in server.children()] or ours
        if not p.done():
            max(started, key=lambda child: child.create_time()).send_signal(sig)
        return p.result(60)


@contextlib.contextmanager
def ctrl_c(llm, steps=0):
    "Within, a job that runs on `llm` ends by Ctrl-C after that many steps."
    step, count = llm.loop.step, itertools.count()

    def once():
        if next(count) == steps:
            raise KeyboardInterrupt
        return step()

    llm.loop.step = once
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        del llm.loop.step


def scripted(code, folder, env=ENV, **how):
    "A finished process that ran Python code in `folder`, with the imports of the command done before."
    from warm import warm

    (folder / "script.py").write_text(code, encoding="utf-8")
    return warm([sys.executable, "-m", "script"], folder, env, **how)


# --- servers and their clients


def needs(*names):
    "The modules of these names: without one of them what asks is skipped."
    why = "needs {0}: pip install '.[dev]'"
    return [pytest.importorskip(name, reason=why.format(name)) for name in names]


def tiny_llm(model=None, tokenizer=None, **how):
    "An `LLM` of a tiny model, or of those that are given."
    from batchlab.api import LLM
    from batchlab.models import tiny_model, tiny_tokenizer

    return LLM(model or tiny_model("llama"), tokenizer or tiny_tokenizer(), **how)


@contextlib.contextmanager
def serving(llm=None, drain=60, connections=None, patience=100.0, sndbuf=None, **kw):
    """A server with a tiny model in a thread of its own: its `url`, `where` it listens, `llm`, `api`, `server`, `thread`, the
    lines `said`, and a client, `web`. `sndbuf`: how many bytes its sockets hold."""
    import httpx
    from batchlab.serve.app import Server, create_app, listen, url_of

    llm, said, up = llm or tiny_llm(max_num_seqs=4), [], threading.Event()
    sock = listen("127.0.0.1", 0)
    if sndbuf:  # those that it accepts have it too
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
    app = create_app(llm, "tiny", say=said.append, patience=patience, **kw)
    server, url = Server(app, drain, up.set, connections, patience), url_of(sock)
    s = SimpleNamespace(url=url, where=sock.getsockname(), llm=llm, api=server.api, said=said)
    with httpx.Client(base_url=url, timeout=100) as s.web:
        with running(server, sock, up) as s.thread:
            s.server = server
            yield s


@contextlib.contextmanager
def server_process(*command, **env):
    "A server in a process of its own, its `url`, and the lines that it writes to standard error, of which the first names the `url`."
    env, lines = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1") | env, []
    p = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True, env=env)
    written = (line for line in p.stderr if NO_KERNELS not in line)
    reader = threading.Thread(target=lambda: lines.extend(written), daemon=True)
    reader.start()
    try:
        until(lambda: lines or p.poll() is not None)
        assert " is served at http://127.0.0.1:" in lines[0], lines
        yield p, lines[0].split()[-1], lines
    finally:
        p.kill()
        p.wait()
        reader.join()


@contextlib.contextmanager
def paused_after(llm, events):
    "The engine pauses after that many things that its watchers hear of, or at once."
    count = 0

    def watch(*_):
        nonlocal count
        count += 1
        if count == events:
            llm.pause()

    if events:
        llm.watchers.append(watch)
    else:
        llm.start().pause()
    try:
        yield
    finally:
        if events:
            llm.watchers.remove(watch)
        llm.resume()


def by_a_failing_engine(s, begun, *asks):
    "What `asks` return, each in a thread of its own, of an engine that fails once all are there and, if `begun`, `s.web` has the head of the first answer."

    def fail():
        raise RuntimeError("no more memory")

    head = threading.Event()
    s.web.event_hooks = dict(response=[lambda _: head.set()])
    with ThreadPoolExecutor() as threads:
        with paused_after(s.llm, 12 * begun):
            asked = []
            for ask in asks:
                asked.append(threads.submit(ask))
                until(lambda: len(s.llm.loop.groups) == len(asked))
                until(lambda: s.llm.loop.paused and head.is_set() >= begun)
            until(lambda: s.llm.engines)
            failing = [*s.llm.engines.values()]
            for e in failing:
                e.step = fail
        got = [one.result(100) for one in asked]
    for e in failing:  # others may have taken their places
        del e.step
    until(lambda: nothing_left(s))
    return got


def nothing_left(s):
    held = s.llm.has_unfinished or s.api.llm.answers or s.api.limits.pending
    return not held and s.llm.stats().running == 0


def user(content):
    return dict(role="user", content=content)


def assistant(content, **more):
    return dict(role="assistant", content=content, **more)


def posted(web, path, **body):
    "The answer to a body that is fine."
    r = web.post(path, json=body)
    assert r.status_code == 200, r.text
    return r.json()


def events_of(text):
    "What the events of a stream hold, but for the one that says that it is done."
    lines = [line for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def grow(whole, part):
    "Add `part` of a stream to what there is: strings and lists behind what they go on with, calls of tools each to its own."
    for k, v in part.items():
        if k == "tool_calls":
            for call in v or ():
                calls = whole.setdefault(k, {})
                grow(calls.setdefault(call["index"], {}), call)
        elif isinstance(v, dict):
            whole[k] = grow(whole.get(k) or {}, v)
        elif isinstance(v, str | list):
            whole[k] = (whole.get(k) or v[:0]) + v
        elif v is not None:
            whole[k] = v
    return whole


def added_up(events):
    "The choices that the events of a stream add up to, in order."
    found = {}
    for e in events:
        for choice in e["choices"]:
            own = found.setdefault(choice["index"], {})
            assert "finish_reason" not in own, "nothing comes after the end"
            grow(own, choice)
    return [found[i] for i in sorted(found)]


def junk(*words, keys=(), max_leaves=8):
    "A strategy that draws any JSON, with `words` in it and, if there are `keys`, with those in its objects."
    from hypothesis import strategies as st

    leaf = st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False)
    leaf |= st.text(max_size=5) | st.sampled_from(["", 10**30, *words])
    key = st.sampled_from(keys) if keys else st.text(max_size=4)
    more = lambda v: st.lists(v, max_size=3) | st.dictionaries(key, v, max_size=3)
    return st.recursive(leaf, more, max_leaves=max_leaves)


def spoiled(value, junk):
    "A strategy that draws JSON like `value`, but for one part at some depth, or one too many, which is `junk`."
    from hypothesis import strategies as st

    parts = value | dict(x=None) if isinstance(value, dict) else {}
    if isinstance(value, list):
        parts = dict(enumerate(value))
    if not parts:
        return junk

    def inside(at):
        put = lambda part: (parts if isinstance(value, list) else value) | {at: part}
        return spoiled(parts[at], junk).map(put)

    whole = st.sampled_from([*parts]).flatmap(inside)
    return junk | (whole.map(lambda d: [*d.values()]) if isinstance(value, list) else whole)


def drawn(junk, may, **must):
    "A strategy that draws bodies with the fields of `must` and some of `may`, of values that are right, or with a part that is `junk`."
    from hypothesis import strategies as st

    some = lambda d: {k: st.sampled_from(v) if isinstance(v, list) else v for k, v in d.items()}
    body = st.fixed_dictionaries(some(must), optional=some(may))
    odd = body.flatmap(lambda b: spoiled(b, junk)).filter(lambda b: isinstance(b, dict))
    return body | odd | odd
