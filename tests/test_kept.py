"Responses that are kept: fetched, continued and deleted, and run in the background through any end of the server."

import json, random, threading, time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from helpers import examples, needs, posix, streamed, until

openai, httpx, *_ = needs("openai", "httpx", "fastapi", "uvicorn")

from batchlab.api import LLM
from batchlab.jobs import runner
from batchlab.jobs.job import Job
from batchlab.jobs.lines import parse_line
from batchlab.jobs.responses import read_response, request_of
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.serve import batches
from batchlab.serve.batches import PRIORITY, BatchRunner, BatchStore
from batchlab.serve.responses import KEPT, BackgroundLines, ResponseRunner, create_response
import test_batches
from test_batches import Clock, Forks, full_database
from test_responses import BODY, HOLD, STOPS, URL, chat_of, checked, events_of, message, whole
from test_server import CHAT, client_of, paused_after, serving, tiny

LONG = dict(max_output_tokens=200, temperature=0, ignore_eos=True)
OVER = "completed", "incomplete", "failed", "cancelled"


@contextmanager
def keeping(folder, llm=None, clock=time.time, **more):
    "A server that keeps responses in `folder`."
    llm = llm or tiny()
    store = BatchStore(folder, clock)
    with serving(llm=llm, batches=BatchRunner(store, llm, "tiny"), **more) as s:
        s.store = store
        with httpx.Client(base_url=s.url, timeout=100) as s.web:
            yield s


@pytest.fixture
def s(tmp_path):
    with keeping(tmp_path / "data") as s:
        yield s


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    "A server for many tests, with a chat template that takes messages without content."
    tok = tiny_tokenizer()
    tok.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% endfor %}<a>"
    llm = LLM(tiny_model("llama"), tok, max_num_seqs=4)
    with keeping(tmp_path_factory.mktemp("data"), llm) as s:
        yield s


@pytest.fixture(scope="module")
def client(shared):
    with client_of(shared, strict=True) as c:
        yield c


def fetched(s, id):
    r = s.web.get(f"{URL}/{id}")
    return checked(r.json()) if r.status_code == 200 else r.json()["error"]["code"]


def post(s, **body):
    "The answer to a request, which is short if nothing else is said."
    return s.web.post(URL, json=dict(input="Hello", **HOLD) | body)


def queued(s, **body):
    "The id of a response in the background."
    return post(s, background=True, **body).json()["id"]


def ended(s, id):
    until(lambda: fetched(s, id)["status"] in OVER)
    return fetched(s, id)


def text_of(response):
    return "".join(p["text"] for i in response["output"] for p in i.get("content", ()))


# Roles

SAID = "<bos>{{ m.role }}:{{ m.content }}<eos>"
TURNS = (  # a user and an assistant by turns, a system message only as the first, or none
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% else %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}"
    + SAID
    + "{% endfor %}"
)
DROPS = "{% for m in messages %}{% if loop.first or m.role != 'system' %}" + SAID + "{% endif %}{% endfor %}"  # fmt: skip
NONE = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}" + SAID + "{% endfor %}"  # fmt: skip
ALL = "{% for m in messages %}" + SAID + "{% endfor %}"
ODD = [("user", "1"), ("user", "2"), ("assistant", "3"), ("developer", "B"), ("user", "4")]
FIT = "<bos>system:A\n\nB<eos><bos>user:1\n2<eos><bos>assistant:3<eos><bos>user:4<eos>"
CUT = "<bos>user:1<eos><bos>user:2<eos><bos>assistant:3<eos>"


@pytest.mark.parametrize(
    "template, want",
    [
        (TURNS, FIT),
        (DROPS, "<bos>system:A\n\nB<eos>" + CUT + "<bos>user:4<eos>"),
        (NONE, CUT.replace("user:1", "user:A\n\nB\n\n1") + "<bos>user:4<eos>"),
        (ALL, "<bos>system:A<eos>" + CUT + "<bos>system:B<eos><bos>user:4<eos>"),
    ],
    ids=["turns", "drops", "none", "all"],
)
def test_roles_that_the_template_refuses_stand_elsewhere(template, want, tmp_path):
    "At /v1/responses, whole, in events, in the background and in a file, and at /v1/messages; a chat is what it says."
    tok = tiny_tokenizer()
    tok.chat_template = template
    llm, other = (LLM(tiny_model("llama"), tok, max_num_seqs=4) for _ in range(2))
    ids = tok(want, add_special_tokens=False)["input_ids"]
    items = [message(role, text) for role, text in ODD]
    body = dict(input=items, instructions="A", max_output_tokens=1)
    talk = [dict(role=role, content=text) for role, text in ODD if role != "developer"]
    said = dict(model="tiny", system="A", max_tokens=1, messages=talk)
    seen = []

    def spied(llm):
        submit = llm.loop.submit
        llm.loop.submit = lambda groups: (
            seen.extend(g.prompt_token_ids for g in groups) or submit(groups)
        )
        return llm

    with keeping(tmp_path / "data", spied(llm)) as s:
        assert whole(s, **body)["usage"]["input_tokens"] == len(ids)
        events_of(s, **body)
        until(lambda: len(seen) == 2)
        httpx.post(f"{s.url}{URL}", json=body | dict(background=True))
        until(lambda: len(seen) == 3)
        line = dict(custom_id="a", method="POST", url=URL, body=body)
        (tmp_path / "in.jsonl").write_text(json.dumps(line))
        Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", form="batch").run(spied(other))
        assert seen == [ids] * 4
        late = dict(role="system", content="B")
        r = httpx.post(
            f"{s.url}/v1/messages", json=said | dict(messages=[*talk[:3], late, talk[3]])
        )
        assert r.status_code == 200
        chat = httpx.post(f"{s.url}{CHAT}", json=dict(messages=[late, *talk]))
        assert (chat.status_code == 400) == (template in (TURNS, NONE))


# Kept


@streamed
@pytest.mark.parametrize("store", [False, True])
def test_what_was_answered_can_be_fetched_if_it_is_to_be_kept(shared, stream, store):
    body = dict(input="Hello", metadata=dict(a="b"), **HOLD) | (
        dict(store=False) if not store else {}
    )
    got = events_of(shared, **body)[-1]["response"] if stream else whole(shared, **body)
    assert got["store"] is store and fetched(shared, got["id"]) == (got if store else "not_found")


def test_delete(client):
    r = client.responses.create(model="tiny", input="Hello", **HOLD)
    client.responses.delete(r.id)
    for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            act(r.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(r.id)


def test_input_items(shared, client):
    call = dict(type="function_call", call_id="c", name="now", arguments="{}")
    out = dict(type="function_call_output", call_id="c", output="noon")
    items = [message("user", "a", "b"), call, out, message("user", "c")]
    r = client.responses.create(model="tiny", input=items, **HOLD)
    listed = [*client.responses.input_items.list(r.id, order="asc", limit=2)]
    assert [i.type for i in listed] == [i["type"] for i in items]
    assert [p.text for p in listed[0].content] == ["a", "b"] and listed[2].output == "noon"
    assert [*client.responses.input_items.list(r.id)] == listed[::-1]
    test_batches.valid(shared.web.get(f"{URL}/{r.id}/input_items").json(), "ResponseItemList")


@pytest.mark.parametrize(
    "query", [dict(limit=0), dict(limit=101), dict(order="x"), dict(after="x")]
)
def test_pages_of_items_that_are_none(shared, query):
    id = whole(shared, input="Hello", **HOLD)["id"]
    r = shared.web.get(f"{URL}/{id}/input_items", params=query)
    assert (r.status_code, r.json()["error"]["param"]) == (400, next(iter(query)))


def test_items_that_are_sent_with_one_id_are_listed_once_each(shared):
    items = [message("user", str(i)) | dict(id="same") for i in range(5)]
    id = whole(shared, input=items, **HOLD)["id"]
    after, seen = None, []
    for _ in range(3):
        q = dict(limit=2, order="asc") | (dict(after=after) if after else {})
        page = shared.web.get(f"{URL}/{id}/input_items", params=q).json()
        seen += [item["content"][0]["text"] for item in page["data"]]
        after = page["last_id"]
    assert seen == [*"01234"] and not page["has_more"]


def test_a_clock_that_jumps_ahead_ends_nothing(tmp_path, monkeypatch):
    "Until the server starts again: by then it is either right, or the time has come."
    with keeping(tmp_path, clock=None) as s:
        id, own = whole(s, input="a", **HOLD)["id"], s.server.batches
        file = batches.create_file(s.store, "a", b"{}")
        waits = batches.create_batch(s.store, test_batches.wish(file))["id"]  # which nobody begins
        late = SimpleNamespace(time=lambda: time.time() + 31 * 24 * 3600, monotonic=time.monotonic)
        monkeypatch.setattr(batches, "time", late)
        s.store.clock = late.time
        whole(s, input="b", **HOLD)
        assert fetched(s, id)["id"] == id and batches.why_ended(own, waits) is None
        monkeypatch.setattr(batches, "_BEGAN", late.time() - time.monotonic())
        assert fetched(s, id) == "not_found"


def test_responses_end_with_their_time(tmp_path):
    clock = Clock()
    with keeping(tmp_path, clock=clock) as s:
        first, other = (whole(s, input=x, **HOLD)["id"] for x in ("a", "b"))
        clock.late = KEPT - 60
        second = whole(s, input="c", previous_response_id=first, **HOLD)["id"]
        clock.late = KEPT + 60
        assert fetched(s, other) == "not_found", "its time is over"
        assert fetched(s, second)["id"] == second
        assert whole(s, input="d", previous_response_id=second, **HOLD)["status"] == "incomplete"
        assert s.store.rows("select count(*) from responses where id=?", other) == [(0,)]


# Continued


def test_a_conversation_by_ids_is_the_conversation_in_full(shared, client):
    talk, id = [], None
    for text in ("Hello", "And then?", "Go on"):
        talk.append(dict(role="user", content=text))
        choice, used = chat_of(shared, [dict(role="system", content="Be brief."), *talk])
        more = dict(instructions="Be brief.", previous_response_id=id) | HOLD
        r = client.responses.create(model="tiny", input=text, **more)
        assert r.output_text == choice["message"]["content"] and r.previous_response_id == id
        assert r.usage.input_tokens == used["prompt_tokens"]
        talk.append(dict(role="assistant", content=r.output_text))
        id = r.id


def test_instructions_are_not_carried_over(shared):
    first = whole(shared, input="a", instructions="Be brief.", **HOLD)
    second = whole(shared, input="b", previous_response_id=first["id"], **HOLD)
    talk = [
        dict(role="user", content="a"),
        dict(role="assistant", content=text_of(first)),
        dict(role="user", content="b"),
    ]
    assert chat_of(shared, talk)[0]["message"]["content"] == text_of(second)


def test_a_conversation_with_a_gap_is_refused(shared):
    first = whole(shared, input="a", **HOLD)["id"]
    second = whole(shared, input="b", previous_response_id=first, **HOLD)["id"]
    shared.web.delete(f"{URL}/{first}")
    for id in (second, "resp_none"):
        r = post(shared, previous_response_id=id)
        error = r.json()["error"]
        assert (r.status_code, error["param"]) == (400, "previous_response_id")
        assert error["code"] == "previous_response_not_found"


def test_a_server_without_a_folder_says_so():
    with serving() as s, httpx.Client(base_url=s.url, timeout=100) as web:
        needs = dict(previous_response_id="resp_1", background=True, store=True)
        for k, v in needs.items():
            error = web.post(URL, json={"input": "a", k: v}).json()["error"]
            assert error["param"] == k and "--data" in error["message"]
        assert whole(s, input="Hello", **HOLD)["store"] is False
        r = web.get(f"{URL}/resp_1")
        assert r.status_code == 404 and "--data" in r.json()["error"]["message"]


@pytest.mark.parametrize("given", [{}, dict(store=True)])
@streamed
def test_a_full_disk_is_said(s, monkeypatch, given, stream):
    "A finished answer is given all the same, unless its client asked that it be kept."
    monkeypatch.setattr(s.store, "change", full_database)
    if given and not stream:
        assert post(s, **given).status_code == 507
        return
    body = dict(input="Hello", **given, **HOLD)
    got = events_of(s, **body)[-1]["response"] if stream else whole(s, **body)
    assert (got["status"], got["store"]) == ("incomplete", False) and text_of(got)


def test_what_is_kept_of_any_text_can_be_fetched(shared):
    body = dict(input="\ud800", instructions="\ud800", background=True)
    r = shared.web.post(URL, content=json.dumps(body).encode())
    assert r.status_code == 200, r.text
    for path in ("", "/input_items"):
        got = shared.web.get(f"{URL}/{r.json()['id']}{path}")
        assert got.status_code == 200 and "\\ud800" in got.text


# In the background


def test_polled_to_its_end(shared, client):
    want = client.responses.create(model="tiny", input="Hello", **STOPS)
    r = client.responses.create(model="tiny", input="Hello", background=True, **STOPS)
    assert r.status == "queued" and r.background and r.output == [] and r.usage is None
    done = ended(shared, r.id)
    assert done["status"] == "completed" and text_of(done) == want.output_text
    assert client.responses.cancel(r.id).status == "completed", "it stays as it is"
    short = client.responses.create(model="tiny", input="Hello", **HOLD)
    more = client.responses.create(
        model="tiny", input="On", previous_response_id=short.id, background=True, **HOLD
    )
    assert ended(shared, more.id)["status"] == "incomplete"


def test_the_states_while_it_runs(s):
    with paused_after(s.llm, 5):
        id = queued(s, **LONG)
        until(lambda: s.llm.loop.paused)
        assert fetched(s, id)["status"] == "in_progress"
        error = post(s, previous_response_id=id).json()["error"]
        assert error["param"] == "previous_response_id", "what is no answer yet can't be continued"
        assert "not answered yet" in error["message"]
    assert ended(s, id)["usage"]["output_tokens"] == 200


def test_many_at_once_are_what_they_are_alone(shared):
    prompts = [f"what is {i}? " + "so " * (i % 5) for i in range(40)]
    tier = ["auto", "flex"]
    ids = [queued(shared, input=p, service_tier=tier[i % 2]) for i, p in enumerate(prompts)]
    for p, id in zip(prompts, ids):
        want = chat_of(shared, [dict(role="user", content=p)])[0]["message"]["content"]
        assert text_of(ended(shared, id)) == want


def test_cancel_while_it_runs_and_before(s):
    with paused_after(s.llm, 5):
        ids = [queued(s, **LONG) for _ in range(20)]
        until(lambda: s.llm.loop.paused)
        got = [s.web.post(f"{URL}/{id}/cancel").json() for id in ids]
        assert {checked(r)["status"] for r in got} == {"cancelled"}
    assert [fetched(s, id)["status"] for id in ids] == ["cancelled"] * 20
    until(lambda: s.llm.stats().running == 0 and not s.api.responses.running)
    assert "length" not in s.llm.stats().requests  # none ran on
    assert ended(s, queued(s))["status"] == "incomplete", "others go on"


def test_as_many_may_wait_as_the_server_takes(tmp_path):
    with keeping(tmp_path, max_pending=2) as s:
        with paused_after(s.llm, 0):
            ids = [queued(s) for _ in range(2)]
            full = post(s, background=True)
            assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
            assert full.json()["error"]["code"] == "rate_limit_exceeded"
        assert [ended(s, id)["status"] for id in ids] == ["incomplete"] * 2
        assert ended(s, queued(s))["status"] == "incomplete"


def test_a_server_that_stops_takes_none_in_the_background(s):
    s.api.limits.draining = True
    refused = post(s, background=True)
    s.api.limits.draining = False
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert s.store.rows("select count(*) from responses") == [(0,)]


def test_deleted_while_it_runs(s):
    with paused_after(s.llm, 5):
        id = queued(s, **LONG)
        until(lambda: s.llm.loop.paused)
        assert s.web.delete(f"{URL}/{id}").json()["deleted"] is True
    until(lambda: s.llm.stats().running == 0)
    assert fetched(s, id) == "not_found" and "length" not in s.llm.stats().requests


def test_only_background_can_be_cancelled(shared):
    id = whole(shared, input="Hello", **HOLD)["id"]
    assert shared.web.post(f"{URL}/{id}/cancel").status_code == 400


def test_one_that_can_not_run_fails(shared):
    failed = ended(shared, queued(shared, input="x" * 3000))
    assert failed["status"] == "failed" and failed["error"]["code"] == "invalid_prompt"
    assert failed["error"]["message"].startswith("the prompt has")


def test_flex_makes_way(s):
    "A response of the service tier flex has the low priority of batches."
    seen = {}

    def watch(*_):
        seen.update(
            {r.priority: r.preemptible for g in s.llm.loop.groups.values() for r in g.requests}
        )

    s.llm.watchers.append(watch)
    ids = [queued(s, **more) for more in (dict(service_tier="flex"), {}, dict(priority=7))]
    done = [ended(s, id) for id in ids]
    assert [r["service_tier"] for r in done] == ["flex", "default", "default"]
    assert seen == {PRIORITY: True, 0: False, 7: False}


def test_the_time_of_one_in_the_background_begins_at_its_end(tmp_path):
    clock = Clock()
    with keeping(tmp_path, clock=clock) as s, paused_after(s.llm, 0):
        done, cancelled = queued(s), queued(s)
        clock.late = KEPT + 60
        s.web.post(f"{URL}/{cancelled}/cancel")
        assert fetched(s, cancelled)["status"] == "cancelled"
        s.llm.resume()
        assert ended(s, done)["status"] == "incomplete"


def waiting_in(folder, model):
    "A response to a request for `model` waits in `folder`: its id."
    store, llm = BatchStore(folder), tiny()
    asked = read_response(dict(input="Hello", model=model, background=True, **HOLD))
    id = create_response(ResponseRunner(store, llm, model), request_of(asked, kept=True), model)
    store.close()
    return id["id"]


@pytest.mark.parametrize("others", [[], ["old"]])
def test_after_a_restart_another_model_does_not_answer_but_one_of_another_name(tmp_path, others):
    id = waiting_in(tmp_path, "old")
    with keeping(tmp_path, others=others) as s:
        done = ended(s, id)
        if others:
            assert (done["status"], done["model"]) == ("incomplete", "tiny")
        else:
            assert done["status"] == "failed" and "'old'" in done["error"]["message"]


def test_no_id_is_that_of_the_line_of_a_batch(s):
    seen, real = [], s.llm.loop.submit
    s.llm.loop.submit = lambda groups: seen.extend(groups) or real(groups)
    id = queued(s)
    number, text = s.store.rows("select number, line from responses where id=?", id)[0]
    ended(s, id)
    [group] = seen
    assert group.request_id != parse_line(number, text.encode()).key


def try_again(monkeypatch):
    "Each line fails at its first try."
    real = runner.record_of
    fail = lambda *args, again, **more: real(*args, again=again, **more) if again else None
    monkeypatch.setattr(runner, "record_of", fail)


def test_one_that_waits_for_another_try_is_not_cancelled_while_it_begins(s, monkeypatch):
    try_again(monkeypatch)
    free, real, changed = [], BackgroundLines.retry, s.api.responses.changed

    def look():
        free.append(changed.acquire(blocking=False))
        if free[-1]:
            changed.release()

    def retry(lines):
        other = threading.Thread(target=look)
        other.start()
        other.join()
        real(lines)

    monkeypatch.setattr(BackgroundLines, "retry", retry)
    id = queued(s)
    assert ended(s, id)["status"] == "incomplete" and free == [False]


def test_others_begin_though_one_was_cancelled(s):
    "What was cancelled is not to be tried again, so nothing waits for the end of all that run."
    with paused_after(s.llm, 0):
        ids = [queued(s, **LONG) for _ in range(2)]
        until(lambda: len(s.api.responses.running) == 2)
        s.web.post(f"{URL}/{ids[1]}/cancel")
        until(lambda: len(s.llm.loop.groups) == 1)
        other = queued(s)
        until(lambda: fetched(s, other)["status"] == "in_progress")
    states = [ended(s, id)["status"] for id in (*ids, other)]
    assert states == ["incomplete", "cancelled", "incomplete"]


def test_nothing_spins_while_one_waits_for_another_try(s, monkeypatch):
    try_again(monkeypatch)
    waits, own = [], s.api.responses
    collect, wait = BackgroundLines.collect, s.llm.loop.progress.wait

    def collect_and_pause(lines):
        collect(lines)
        if lines.again and lines.live and not waits:
            s.llm.pause()
            own.news = True  # as if another came

    def seen(timeout=None):
        if threading.current_thread() is own.thread and own.news:
            waits.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(BackgroundLines, "collect", collect_and_pause)
    monkeypatch.setattr(s.llm.loop.progress, "wait", seen)
    with paused_after(s.llm, 0):
        ids = [queued(s, **LONG), queued(s)]
        until(lambda: len(own.running) == 2)
        s.llm.resume()
        until(lambda: waits)
    assert {ended(s, id)["status"] for id in ids} == {"incomplete"}


def test_a_table_that_can_not_be_written_for_a_while(s, monkeypatch):
    from batchlab.serve import responses

    real, tries = responses.write_ended, []

    def fail(*args):  # for a moment, in which it is not tried a second time
        tries.append(time.monotonic())
        return full_database() if tries[-1] < tries[0] + 0.3 else real(*args)

    monkeypatch.setattr(responses, "write_ended", fail)
    id = queued(s)
    assert ended(s, id)["status"] == "incomplete" and len(tries) == 2


FIELDS = dict(
    background=st.booleans(),
    previous_response_id=st.sampled_from(["resp_1", "\ud800", ""]),
    store=st.booleans(),
    priority=st.sampled_from([0, -1, 10**30, -(10**30), 1.5]),
    service_tier=st.sampled_from(["flex", "auto", "x"]),
    metadata=st.just({"\ud800": "\ud800"}),
)


@examples(100)
@given(body=BODY, more=st.fixed_dictionaries({}, optional=FIELDS))
def test_whatever_is_sent_is_answered_or_refused(shared, body, more):
    r = shared.web.post(URL, content=json.dumps(body | dict(max_output_tokens=2) | more).encode())
    assert r.status_code < 500, (body, more, r.text)
    if r.status_code == 200 and not body.get("stream"):
        got = checked(r.json())
        assert (
            got["status"] in (*OVER, "queued") and (got["status"] == "queued") == got["background"]
        )
        if got["store"]:
            ended(shared, got["id"])


# Killed

PROMPTS = [f"what is {i}? " + "please " * (i % 7) for i in range(60)]


def body_of(i):
    more = dict(service_tier="flex") if i % 2 else {}
    bad = dict(input="x" * 5000) if i % 20 == 7 else {}
    most = 4 + i % 30
    return dict(input=PROMPTS[i], temperature=0, max_output_tokens=most, **more) | bad


def serve(folder):
    "A server in a process of its own, without HTTP, that is to be killed. It queues what is not queued yet, and ends when all have."
    store = BatchStore(folder)
    runner = ResponseRunner(store, test_batches.model(num_hidden_layers=1), "tiny").start()
    print("runs", flush=True)
    known = {id for (id,) in store.rows("select id from responses")}
    for i in range(len(PROMPTS)):
        if f"resp_{i}" not in known:
            asked = request_of(read_response(body_of(i) | dict(background=True)), kept=True)
            create_response(runner, asked, "tiny", str(i))
    while store.rows("select 1 from responses where waits limit 1"):
        time.sleep(0.005)


def ended_in(folder):
    "The responses that have ended, as they are written, by id, as another process sees them."
    import sqlite3

    try:
        with sqlite3.connect(f"file:{folder / 'state.sqlite'}?mode=ro", uri=True) as db:
            return dict(db.execute("select id, response from responses where not waits"))
    except sqlite3.Error:
        return {}


def over(folder):
    return len(ended_in(folder))


def results_in(folder):
    store = BatchStore(folder)
    rows = store.rows("select id, waits, response from responses")
    store.close()
    found = {}
    for id, waits, text in rows:
        r = checked(json.loads(text))
        assert not waits and r["status"] in OVER
        used = {k: v for k, v in r.get("usage", {}).items() if "details" not in k}
        found[id] = r["status"], text_of(r), used, r["error"]
    return found


@posix
def test_killed_at_random_moments(tmp_path):
    "Each response ends once, as in a calm run, wherever the process is killed."
    calm, killed, rng, inside = tmp_path / "calm", tmp_path / "killed", random.Random(3), 0
    with Forks(script=__file__) as forks:
        forks.start(calm)
        assert forks.end() == 0
        firsts = {}
        for _ in range(5):
            done, more = over(killed), rng.randrange(1, 24)
            forks.start(killed)
            while not forks.ended() and over(killed) < min(done + more, len(PROMPTS)):
                time.sleep(0.001)
            forks.kill()
            inside += over(killed) < len(PROMPTS)
            firsts |= {k: v for k, v in ended_in(killed).items() if k not in firsts}
        forks.start(killed)
        assert forks.end() == 0
    want = results_in(calm)
    assert len(want) == len(PROMPTS) and results_in(killed) == want and inside >= 2
    last = ended_in(killed)
    assert firsts == {k: last[k] for k in firsts}, "what had ended was not run again"
    assert {v[0] for v in want.values()} >= {"incomplete", "failed"}


if __name__ == "__main__":
    test_batches.serve = serve
    test_batches.template()
