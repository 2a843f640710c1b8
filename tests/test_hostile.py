"A server among clients that send byte by byte, nonsense, too much, or leave: who behaves is served meanwhile, and nothing is left behind."

import asyncio, contextlib, http.client, json, random, re, signal, socket, struct, sys, time
from functools import partial

import pytest

from helpers import needs, refusal, streamed

httpx, *_ = needs("httpx", "fastapi", "uvicorn")

from batchlab.serve.answers import RETRY_AFTER
from batchlab.serve.app import Server, create_app, listen, url_of
from helpers import (
    added_up,
    draws,
    events_of,
    greedy,
    paused_after,
    posted,
    server_process,
    serving,
    texts,
    tiny_llm,
    until,
)

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


small = partial(tiny_llm, max_num_seqs=16)


def state(server):
    "What `server` holds now, for requests and beside them."
    llm, http, stats = server.api.llm, server.server_state, server.api.llm.stats()
    held = dict(answers=llm.answers, groups=llm.llm.loop.groups, tasks=http.tasks)
    return {k: len(v) for k, v in held.items()} | dict(
        connections=len(http.connections),
        pending=server.api.limits.pending,
        running=stats.running,
        waiting=stats.waiting,
        blocks=stats.blocks_in_use,
    )


def until_idle(s):
    until(lambda: not any(state(s.server).values()))


@contextlib.contextmanager
def besieged(llm=None, **kw):
    "A server of which at the end nothing of any client may be left."
    with serving(llm or small(), **kw) as s:
        yield s
        s.web.close()
        until_idle(s)


@pytest.fixture(scope="module")
def s():
    with besieged() as s:
        yield s


def connect(s):
    c = socket.create_connection(s.where, timeout=100)
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return c


def post(body, head=HEAD):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def read_all(c):
    "What comes until the server closes; a reset ends it too."
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := c.recv(2**16):
            got += part
    return got


def answers(raw):
    "Status and body of each answer in `raw`."
    out = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        length = re.search(rb"(?i)\ncontent-length:\s*(\d+)", head)
        if status in (100, 102):
            continue
        end = int(length[1]) if length else len(raw)
        out.append((status, raw[:end]))
        raw = raw[end:]
    return out


def alone(raw):
    [(status, body)] = answers(raw)
    return status, json.loads(body)["error"]["code"]


def fine(s):
    posted(httpx, f"{s.url}/v1/completions", prompt="a", max_tokens=3)


# who sends too slowly, or not at all


def test_heads_and_bodies_that_come_byte_by_byte_end():
    "Others are served meanwhile."
    kinds = [b"POST /v1/completions HTTP/1.1\r\nHost: xxxxxxxxxx", b'{"prompt": "']
    with besieged(patience=0.5, connections=400) as s, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(s)) for _ in range(100)]
        for c in slow[1::2]:
            c.sendall(HEAD + b"Content-Length: 100\r\n\r\n")
        ended, place = {}, 0
        while len(ended) < 100:
            for i, c in enumerate(slow):
                if i in ended:
                    continue
                c.setblocking(True)
                with contextlib.suppress(OSError):
                    c.sendall(kinds[i % 2][place : place + 1] or b"x")
                c.setblocking(False)
                try:
                    ended[i] = c.recv(2**16)
                except BlockingIOError:
                    pass
                except ConnectionResetError:
                    ended[i] = b""
            place += 1
            fine(s)
        told = [alone(ended[i]) for i in ended if ended[i]]
        assert {*told} == {(408, "timeout")} and len(told) >= 45  # a reset may overtake an answer
        assert not any(ended[i] for i in range(0, 100, 2)), "half a head gets no answer"


def test_what_never_comes_is_not_waited_for():
    "That there are no files here is known without the body."
    halves = [
        (b"", []),
        (HEAD + b"Content-Le", []),
        (HEAD + b"Content-Length: 5\r\n\r\n{", [408]),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", [408]),
        (b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n12", [404]),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\nGET", [200]),
    ]
    with besieged(patience=0.3) as s, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(s)) for _ in halves]
        for c, (sent, _) in zip(held, halves):
            c.sendall(sent)
        for c, (sent, said) in zip(held, halves):
            got = read_all(c)
            assert [status for status, _ in answers(got)] == said, sent
            assert 408 not in said or b"connection: close" in got


def test_an_answer_given_early_is_heard_and_the_rest_of_the_body_dropped(s):
    "100 MB, with a length and in chunks."

    def chunks():
        for _ in range(100):
            yield b"x" * 10**6

    for headers in ({"Content-Length": str(10**8)}, {}):
        ask = lambda path: httpx.post(s.url + path, content=chunks(), headers=headers, timeout=100)
        r = ask("/v1/completions")
        assert refusal(r) == (413, "request_too_large")
        assert r.headers["connection"] == "close"
        assert ask("/v1/nothing").status_code in (404, 413)


def test_a_body_that_is_too_long_is_refused_before_it_has_come():
    chunk = b"3e8\r\n" + b"a" * 1000 + b"\r\n1\r\na\r\n"  # the end of the next never comes
    with besieged(max_body=1000) as s:
        for sent, said in (
            (HEAD + b"Content-Length: 1001\r\n\r\n", (413, "request_too_large")),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk, (413, "request_too_large")),
            (post(b"{}"), (400, "invalid_request")),
        ):
            with connect(s) as c:
                c.sendall(sent)
                r = http.client.HTTPResponse(c)
                r.begin()
                assert (r.status, json.loads(r.read())["error"]["code"]) == said
                assert r.status == 400 or r.getheader("connection") == "close"
        posted(s.web, "/v1/completions", prompt="a", user="x" * 900)


def test_too_many_connections():
    with besieged(connections=8) as s:
        count = lambda: state(s.server)["connections"]
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(connect(s)) for _ in range(8)]
            until(lambda: count() == 8)
            r = httpx.post(f"{s.url}/v1/completions", json=dict(prompt="a"))
            assert refusal(r) == (503, "unavailable")
            told = r.headers["retry-after"], r.headers["connection"]
            assert told == (str(RETRY_AFTER), "close")
            more = [stack.enter_context(connect(s)) for _ in range(30)]
            # two to be told, and the others are closed
            until(lambda: count() <= 10)
            assert sum(not read_all(c) for c in more[-20:]) == 20
            for c in held:  # who has a place keeps it
                c.sendall(post(dict(prompt="a", max_tokens=1)))
                assert c.recv(12) == b"HTTP/1.1 200"
        until(lambda: not count())
        fine(s)


# nonsense


def test_bytes_at_random(s):
    rand, whole = random.Random(1), post(dict(prompt="Once", max_tokens=1))

    def odd(kind):
        if kind == 0:
            return rand.randbytes(rand.randint(1, 3000))
        if kind == 1:
            return bytes(b if rand.random() > 0.03 else rand.randrange(256) for b in whole)
        if kind == 2:
            return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + rand.randbytes(50)
        return HEAD + rand.randbytes(30).replace(b"\n", b"") + b": x\r\n" + whole[len(HEAD) :]

    for i in range(160):
        with connect(s) as c:
            c.sendall(odd(i % 4) + b"\r\n\r\n")
            c.shutdown(socket.SHUT_WR)
            for status, body in answers(read_all(c)):
                assert status in (200, 400, 404, 405, 413, 414, 415, 431) and body, (status, body)
    fine(s)


HEADS = [
    (b"X: " + b"y" * 200_000, 400),
    (b"X: y\r\n" * 40_000, 400),
    (b"Transfer-Encoding: chunked", 400),
    (b"no colon", 400),
    (b"Content-Length: 2\r\nContent-Length: 3", 400),
    (b"Content-Length: -1", 400),
    (b"Content-Length: " + b"9" * 5000, 400),
    (b"Transfer-Encoding: gzip", 400),
    (b"X: a\x00b", 400),
    (b"X\xff: a", 400),
    (b"Authorization: Bearer \xff\xfe", 200),
    (b"Upgrade: websocket\r\nConnection: Upgrade", 200),
    (b"Content-Encoding: gzip", 415),
    (b"Content-Type: \xff; charset=\xff", 200),
    (b"Range: bytes=5-", 200),
]


@pytest.mark.parametrize("head,status", HEADS, ids=[h[:40].decode("latin-1") for h, _ in HEADS])
def test_heads(s, head, status):
    with connect(s) as c:
        with contextlib.suppress(ConnectionError):
            rest = post(dict(prompt="a", max_tokens=1), b"")
            c.sendall(HEAD + head + b"\r\nConnection: close\r\n" + rest)
        got = answers(read_all(c))
        assert [x for x, _ in got] in ([status], [] if status == 400 else None), got
        for _, body in got:
            assert status == 400 or (json.loads(body).get("error") is None) == (status == 200)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        HEAD + b"Host: y\r\n\r\n",
        b"GET /" + b"x" * 200_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
        b"hello there\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000,
    ],
)
def test_what_is_no_http_ends_the_connection(s, sent):
    with connect(s) as c:
        with contextlib.suppress(ConnectionError):
            c.sendall(sent)
        got = read_all(c)
    assert got.startswith(b"HTTP/1.1 400 ") or not got and len(sent) > 10**5  # a reset overtook it
    fine(s)


@pytest.mark.parametrize("guards", [{}, dict(api_key="k", origins=["https://a"]), dict(names=[])])
@pytest.mark.parametrize("method", [b"POST", b"OPTIONS"])
def test_two_lengths_of_a_body_end_the_connection(guards, method):
    "Who stands before the server may read the other, and take the rest for another request: that comes before the key, the name and a browser's question."
    asks = b"Origin: https://a\r\nAccess-Control-Request-Method: POST\r\n"
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with besieged(**guards) as s, connect(s) as c:
        c.sendall(method + HEAD.removeprefix(b"POST") + asks + both)
        c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        got = answers(read_all(c))
    assert len(got) == 1 and got[0][0] == 400 and b"send one of them" in got[0][1]


@streamed
@pytest.mark.parametrize("prompts", [1, 3])
def test_who_hangs_up_is_cancelled(s, stream, prompts):
    "While the engine stands, so that nothing but the hanging up can end the requests, before an answer begins or after."
    count = lambda: s.llm.stats().requests.get("cancelled", 0)
    ended, ask = (
        count(),
        dict(prompt=["a"] * prompts, max_tokens=200, ignore_eos=True, stream=stream),
    )
    with paused_after(s.llm, 12 * prompts if stream else 0):
        with connect(s) as c:
            c.sendall(post(ask))
            if stream:
                assert c.recv(9) == b"HTTP/1.1 "
            until(lambda: state(s.server)["groups"] == prompts)
        until_idle(s)
    assert count() == ended + prompts and "the client left" in s.said[-1]


def test_a_client_that_leaves_while_it_sends(s):
    until(lambda: not state(s.server)["tasks"])
    del s.said[:]
    with connect(s) as c:
        c.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    until(lambda: s.said)
    assert "the client left" in s.said[0]


def test_a_target_that_is_a_whole_url():
    "As RFC 9112 wants it, and the name in it is the Host's."
    with besieged(names=[]) as s:
        for host, status in ((b"localhost", 200), (b"evil.example", 403)):
            with connect(s) as c:
                c.sendall(
                    b"GET http://%s/health?x=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                    % host
                )
                assert [said for said, _ in answers(read_all(c))] == [status]


BODIES_SENT = [
    (b'{"prompt": "a\\u0000b", "max_tokens": 1}', 200, ""),
    (b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}', 200, ""),
    (b'{"prompt": "a", "prompt": "b", "max_tokens": 1}', 400, "stands twice"),
    (b'{"prompt": "\\ud800", "max_tokens": 1}', 400, "Unicode"),
    (b'{"prompt": "a\x00"}', 400, "JSON"),
    (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, "nested"),
    (b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}", 400, "digits"),
    (b'{"prompt": "a", "n": ' + b"9" * 4000 + b"}", 400, "n must be"),
    (b'{"prompt": "a", "' + b"k" * 10**6 + b'": 1}', 400, "kkk"),
    (b'{"prompt": "a", "logit_bias": {"5": ' + b"9" * 400 + b"}}", 400, "logit_bias"),
    (dict(prompt=["a"] * 10**5), 400, "at once"),
]


@pytest.mark.parametrize("body,status,word", BODIES_SENT, ids=[*map(str, range(len(BODIES_SENT)))])
def test_bodies(s, body, status, word):
    "Each is answered as what it is."
    raw = body if isinstance(body, bytes) else json.dumps(dict(prompt="a") | body).encode()
    r = httpx.post(f"{s.url}/v1/completions", content=raw, timeout=100)
    assert r.status_code == status and word in r.text and len(r.text) < 2000, r.text[:300]


def test_requests_in_a_row_on_one_connection(s):
    "All sent before the first is answered."
    with connect(s) as c:
        c.sendall(b"".join(post(dict(prompt=f"{i}", max_tokens=1)) for i in range(50)))
        c.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        got = answers(read_all(c))
    assert [x for x, _ in got] == [200] * 51
    counts = [json.loads(body)["usage"]["prompt_tokens"] for _, body in got[:50]]
    assert counts == [len(str(i)) for i in range(50)]


@streamed
def test_http_1_0_has_no_chunks(s, stream):
    ask = dict(prompt="a", max_tokens=5, stream=stream)
    with connect(s) as c:
        c.sendall(post(ask, b"POST /v1/completions HTTP/1.0\r\n"))
        [(status, body)] = answers(read_all(c))
    done = body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)["choices"]
    assert status == 200 and done


def test_a_client_that_asks_first(s):
    "`Expect: 100-continue`: told to go on, or that it need not."
    body = json.dumps(dict(prompt="a", max_tokens=1)).encode()
    for size, said in ((len(body), b"HTTP/1.1 100"), (10**9, b"HTTP/1.1 413")):
        with connect(s) as c:
            head = HEAD + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            c.sendall(head % size)
            got = c.recv(12)
            assert got == said
            if size == len(body):
                c.sendall(body)
                assert answers(got + read_all(c))[0][0] == 200


# who does not read, and who waits


def test_a_long_wait_in_a_stream_is_not_silent():
    "Comments come while the engine stands, before the first part and after it; the parts are what they are without."
    body = dict(prompt="a", max_tokens=30, ignore_eos=True, temperature=0)
    with besieged(keep_alive=0.01) as s, contextlib.ExitStack() as stack:
        want = posted(s.web, "/v1/completions", **body)["choices"]
        stack.enter_context(paused_after(s.llm, 0))
        events, quiet, waits = [], 0, 0
        with s.web.stream("POST", "/v1/completions", json=body | dict(stream=True)) as r:
            assert r.status_code == 200 and r.headers["cache-control"] == "no-cache"
            assert r.headers["x-accel-buffering"] == "no"  # or nginx keeps all to the end
            for line in r.iter_lines():
                quiet = quiet + 1 if line == ": keep-alive" else 0 if line else quiet
                events += events_of(line)
                if quiet >= 3 and s.llm.loop.paused:
                    quiet, waits = 0, waits + 1
                    if waits == 1:
                        stack.enter_context(paused_after(s.llm, 15))
                    s.llm.resume()
        assert waits == 2 and line == ""
        assert added_up(events)[0]["text"] == want[0]["text"]


def test_who_never_reads_is_let_go():
    "An answer that is larger than what sockets hold; others are served, and what the server holds of it is a part or two."
    with besieged(patience=0.2, sndbuf=4096) as s:
        most = 0
        with socket.socket() as c:
            c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            c.settimeout(100)
            c.connect(s.where)
            ask = dict(prompt="a", max_tokens=250, ignore_eos=True, n=8, logprobs=20, stream=True)
            c.sendall(post(ask))
            held = lambda: list(s.server.server_state.connections)
            sizes = lambda: [x.transport.get_write_buffer_size() for x in held()]
            # asyncio's limit, at which the answer waits
            until(lambda: max(sizes(), default=0) > 2**16)
            for _ in range(3):
                fine(s)
            while state(s.server)["pending"]:
                most = max([most, *sizes()])
                time.sleep(0.005)
        assert 2**16 < most < 2**22


# crowds

SAME = dict(temperature=0, ignore_eos=True)
BODIES = [
    dict(SAME, prompt="Once " * (i % 7), max_tokens=1 + i * 5 % 40, stream=i % 3 > 0)
    for i in range(24)
]


def text_in(raw):
    "The text of an answer, whole or in parts; bytes of one that is none."
    head, _, body = raw.decode(errors="replace").partition("\r\n\r\n")
    if "200 OK" not in head[:20] or "event-stream" in head and "data: [DONE]" not in body:
        return raw[:60]
    [choice] = added_up(events_of(body)) if "event-stream" in head else json.loads(body)["choices"]
    return choice["text"]


async def crowd(where, count, together, want, seed):
    """`count` requests, as many at once as `together`; a third of their clients leave at random places. How many were answered, and
    the answers that are not those of `want`."""
    rand, gate, wrong = random.Random(seed), asyncio.Semaphore(together), []

    async def ask(i, leave=None, reset=False):
        raw = post(BODIES[i % 24], HEAD + b"Connection: close\r\n")
        for attempt in range(50):
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*where)
                break
            await asyncio.sleep(0.05)
        try:
            if leave is not None and leave < 3:  # before all is sent
                writer.write(raw[: rand.randrange(len(raw)) if leave else 0])
                await writer.drain()
                return None
            writer.write(raw)
            if leave == 3:
                return await asyncio.sleep(rand.random() * 0.05)
            if leave is not None:
                return await reader.read(rand.randint(1, 2000))
            return text_in(await reader.read(-1))
        finally:
            if reset:
                at_once = socket.SO_LINGER, struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, *at_once)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def one(i, how):
        async with gate:
            try:
                got = await ask(i, *how)
            except OSError as e:
                got = repr(e)
            if how[0] is None and got != want[i % 24]:
                wrong.append((i, got))

    leaves = lambda: (rand.randrange(6), rand.random() < 0.5)
    hows = [leaves() if rand.random() < 1 / 3 else (None, False) for _ in range(count)]
    await asyncio.gather(*(one(i, how) for i, how in enumerate(hows)))
    return sum(how[0] is None for how in hows), wrong


def test_a_crowd_of_which_a_third_hangs_up(s):
    "Answers are those of `generate`, and none of those who left ends in an error."
    outs = s.llm.generate([b["prompt"] for b in BODIES], [greedy(b["max_tokens"]) for b in BODIES])
    failed = lambda: [s.llm.stats().requests.get(why, 0) for why in ("error", "timeout")]
    before = failed()
    said, wrong = asyncio.run(crowd(s.where, draws(300), 100, texts(outs), seed=2))
    assert not wrong and said > draws(150)
    until_idle(s)
    assert failed() == before


def serve(descriptors):
    "A server in a process of its own, whose state is at /state. Says where it listens."
    import logging, resource, tempfile
    from fastapi import APIRouter
    from batchlab.serve.batches import BatchRunner, BatchStore

    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
    router, sock = APIRouter(), listen("127.0.0.1", 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @router.get("/state")
    async def look():
        return state(server) | dict(room=server.config.limit_concurrency)

    def ready():
        print("a tiny model is served at", url_of(sock), file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        llm = small()
        batches = BatchRunner(BatchStore(folder), llm, "tiny")
        server = Server(create_app(llm, "tiny", routers=[router], batches=batches), ready=ready)
        server.run([sock])


def where_of(url):
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.mark.skipif(sys.platform != "linux", reason="file descriptors as Linux has them")
def test_a_server_with_few_file_descriptors():
    "It says 503 to some, closes others, goes on, and writes no flood of errors."
    form = dict(files=dict(file=("a.jsonl", b"{}")), data=dict(purpose="batch"))
    with (
        server_process(__file__, "96") as (p, url, said),
        httpx.Client(base_url=url, timeout=100) as web,
    ):
        state = lambda: web.get("/state").json()
        post = lambda path, **more: web.post(f"/v1/{path}", **more).status_code
        room = state()["room"]
        assert 8 < room < 48
        with contextlib.ExitStack() as stack:
            for _ in range(150):
                stack.enter_context(socket.create_connection(where_of(url), timeout=100))
            until(lambda: state()["connections"] >= room)
            # there may be no file descriptor left for it
            assert post("files", **form) in (200, 503)
            # who has a connection is served
            assert post("completions", json=dict(prompt="a", max_tokens=2)) == 200
        until(lambda: state()["connections"] == 1)
        assert post("files", **form) == 200 and p.poll() is None
    assert len(said) < 500, said[:20]


if __name__ == "__main__":
    serve(int(sys.argv[1]))
