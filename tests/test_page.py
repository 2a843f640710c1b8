"""The page of a server: what it shows is what the engine has, it costs nothing while nobody looks, and neither names nor answers nor other sites do anything in it."""

import base64, contextlib, hashlib, json, re, threading
from html.parser import HTMLParser

import pytest

from helpers import needs, one_thread, refusal

httpx, *_ = needs("httpx", "fastapi", "uvicorn")

from batchlab.cli import page_from_args
from batchlab.core.request import Request
from batchlab.models import tiny_model
from batchlab.serve import page as page_module
from batchlab.serve.batches import BatchRunner, BatchStore, NewFile
from batchlab.cli.flags import parse_args
from batchlab.serve.page import Lookout, page_router, steps_of, trusted
from batchlab.view.trace import Live, StepLog
from batchlab.view import trace as trace_module

from helpers import greedy, paused_after, posted, serving, tiny_llm, until

pytestmark = one_thread
SECRET = "nobody else may read this"
LONG = dict(max_tokens=150, temperature=0, ignore_eos=True)


def lookouts(llm):
    return [w for w in llm.watchers if isinstance(w, Live)]


@contextlib.contextmanager
def looking(url, **kw):
    "Somebody looks at the page of a server: an iterator over the states that come."
    with httpx.stream("GET", f"{url}/page/events", timeout=100, **kw) as r:
        assert r.status_code == 200, r.read()
        yield (json.loads(line[6:]) for line in r.iter_lines() if line.startswith("data: "))


def asking(url, prompt, **more):
    "A request under way, in a thread."
    how = dict(json=dict(prompt=prompt) | LONG | more, timeout=100)
    t = threading.Thread(target=httpx.post, args=[f"{url}/v1/completions"], kwargs=how)
    t.start()
    return t


@contextlib.contextmanager
def held(s, asks, events):
    "The engine stands after `events` more of what its watchers hear of, which begin when all of `asks` are there. They are done at the end."
    s.llm.start().pause()
    threads = [asking(s.url, **a) for a in asks]
    until(lambda: len(s.llm.loop.groups) == len(asks))
    with paused_after(s.llm, events):
        s.llm.resume()
        until(lambda: s.llm.loop.paused)
        yield
    for t in threads:
        t.join()


@pytest.fixture(scope="module")
def s():
    llm = tiny_llm(max_num_seqs=2, max_num_batched_tokens=16)
    with serving(llm, routers=[page_router()]) as s:
        yield s


# what it shows


def test_a_state_is_what_the_engine_has(s):
    with looking(s.url) as states:
        next(states)  # it is looked at from the first step on
        with held(s, [dict(prompt=f"{SECRET} {i}", stream=i < 2) for i in range(4)], 60):
            state = next(x for x in states if x["waiting"] == 2)
            [scheduler] = [e.scheduler for e in s.llm.engines.values()]
            while state["made"] < sum(len(r.output_ids) for r in scheduler.running):
                state = next(states)  # of the step that is the last for now
            stats = s.llm.stats()
            assert (state["running"], state["kv"]["held"]) == (2, stats.blocks_in_use)
            assert stats.running == state["streams"] == state["seats"] == 2
            shown = sorted([*x[:2], *x[3:5], *x[6:8]] for x in state["slots"])
            assert shown == sorted(
                [
                    r.slot,
                    r.request_id,
                    len(r.prompt_ids),
                    r.num_computed_tokens,
                    len(r.output_ids),
                    150,
                ]
                for r in scheduler.running
            )
            assert [q[1] for q in state["queue"]] == [len(r.prompt_ids) for r in scheduler.waiting]
            assert SECRET not in json.dumps(state)
        # whose ends were told, which follows the last step
        after = next(x for x in states if sum(x["totals"]["ended"].values()) == 4)
        stats = s.llm.stats()
        assert after["totals"] == dict(
            prompt=stats.prompt_tokens,
            cached=stats.cached_tokens,
            out=stats.output_tokens,
            preempted=0,
            ended=stats.requests,
        )
    assert after["made"] == 600 and state["made"] == sum(x[6] for x in state["slots"])


def test_of_many_that_wait_the_first_are_shown():
    llm = tiny_llm(max_num_seqs=2)
    for _ in range(30):
        llm.add_request([5], greedy(9))
    llm.step()
    assert len(trace_module.snapshot(llm)["queue"]) == 24
    whole = Request("0", [5, 6], 9, output_ids=[7])  # in an engine that keeps nothing
    assert trace_module.slot_facts(whole, 0)[:5] == [0, "0", "decode", 2, 3]
    llm.close()


def test_letters_are_what_the_trace_says():
    llm = tiny_llm(max_num_seqs=3, max_num_batched_tokens=16)
    eye, sea = Lookout(llm), "The sea is deep and the hills"
    rain = "Rain falls on all of them in the end"
    prompts = [f"{sea} are", rain, sea, "A", "B", "The sea is deep and then"]
    with eye.viewer() as live, llm.trace() as trace:
        llm.generate(prompts, [greedy(n) for n in (5, 9, 3, 7, 4, 6)])
    llm.close()
    data, began = json.loads(json.dumps(trace.data)), set()
    steps = steps_of(live, 0, live.num_steps)
    assert len(data["steps"]) == len(steps) == live.num_steps
    for step, (cells, decode, prefill) in zip(data["steps"], steps):
        assert decode + prefill == step["tokens"]
        assert decode == sum(r[3] for r in step["rows"] if not r[6])
        for slot, number, start, n, again, _, is_prefill, _ in step["rows"]:
            first = number not in began
            letter = "a" if again else "d" if not is_prefill else "c" if start and first else "p"
            assert cells[slot] == (letter.upper() if first else letter)
            began.add(number)
        assert sum(c in "dDpPcCaA" for c in cells) == len(step["rows"])
    assert live.request_log.made == sum(r["output_tokens"] for r in data["requests"])
    assert any("C" in cells for cells, _, _ in steps)


# what it costs, and whom


def test_nothing_for_nobody(s, monkeypatch):
    made, of = [], trace_module.snapshot
    monkeypatch.setattr(trace_module, "snapshot", lambda llm: made.append(llm) or of(llm))
    asked, look = [], Live.look
    monkeypatch.setattr(Live, "look", lambda live: asked.append(live) or look(live))
    asking(s.url, "a").join()
    assert not lookouts(s.llm) and not made
    with looking(s.url) as a, looking(s.url) as b:
        next(a), next(b)
        assert len(lookouts(s.llm)) == 1  # one for all who look
        asking(s.url, "a").join()
        done = lambda x: x["totals"]["ended"] and not x["running"] and x["num_steps"] >= 150
        next(filter(done, a))
        assert len(made) <= len(asked), "a state is made when one is asked for, not at every step"
    until(lambda: not lookouts(s.llm))


def can_look(url):
    with httpx.stream("GET", f"{url}/page/events") as r:
        return r.status_code == 200


def test_no_more_viewers_than_there_are_places(s, monkeypatch):
    monkeypatch.setattr(page_module, "MOST_VIEWERS", 2)
    with looking(s.url) as a:
        next(a)
        with looking(s.url) as b:
            next(b)
            r = s.web.get("/page/events")
            assert refusal(r) == (429, "rate_limit_exceeded")
            assert r.headers["retry-after"]
        until(lambda: can_look(s.url))
        with looking(s.url) as b:
            next(b)
    until(lambda: not lookouts(s.llm))


def test_a_mistake_in_the_page_ends_no_request(s, monkeypatch):
    monkeypatch.setattr(StepLog, "note", lambda *_: 1 / 0)
    with looking(s.url) as states:
        next(states)
        usage = posted(s.web, "/v1/completions", prompt="a", **LONG)["usage"]
        assert usage["completion_tokens"] == 150 and not lookouts(s.llm)
        assert next(x for x in states if x["totals"]["ended"])  # the figures go on


def test_an_open_page_does_not_hold_up_the_end():
    with serving(routers=[page_router()]) as s:  # which waits 60 s for those who hold it up
        with looking(s.url) as states:
            next(states)
            s.server.should_exit = True
            for _ in states:
                pass  # the feed comes to its end
        s.thread.join(30)
        assert not s.thread.is_alive() and not lookouts(s.llm)


# who may look


def test_with_a_key_the_page_is_open_and_its_data_are_not():
    with serving(api_key="sesame", routers=[page_router()]) as s:
        r = s.web.get("/")
        assert r.status_code == 200 and "tiny" not in r.text
        assert s.web.get("/page/events").status_code == 401
        known = dict(Authorization="Bearer sesame", Host="batchlab.example")
        with looking(s.url, headers=known) as states:
            assert next(states)["model"] == "tiny"


def test_other_sites_may_not_look():
    headers = lambda h: {k.replace("_", "-"): v for k, v in h.items()}
    hidden = lambda r: not any(k.startswith("access-control") for k in r.headers)
    with serving(routers=[page_router(names=["Box.lan"])]) as s:
        events = "/page/events"
        for h in (
            *(dict(Sec_Fetch_Site=site) for site in ("cross-site", "same-site")),
            dict(Host="evil.example"),  # its name leads here now
            # all that a browser says on plain HTTP
            *(dict(Origin=site) for site in ("https://evil.example", "http://[", "null")),
        ):
            assert s.web.get(events, headers=headers(h)).status_code == 403
        asked = dict(
            Origin="https://evil.example",
            Access_Control_Request_Method="GET",
            Access_Control_Request_Headers="authorization",
        )
        r = s.web.options(events, headers=headers(asked))
        assert r.status_code == 403 and hidden(r)
        for host in ("box.lan:80", "localhost", s.url[7:]):
            own = dict(Host=host, Origin=f"http://{host}")
            with s.web.stream("GET", events, headers=own) as r:
                assert r.status_code == 200 and hidden(r)
    hosts = "", "[", "127.0.0.1.evil.example", "localhost.evil.example", "1.2.3.4:x"
    assert [trusted(h, []) for h in hosts] == [False] * 4 + [True]


def test_the_policy_allows_this_script_and_no_other(s):
    r, found = s.web.get("/"), []

    def harmful(key, value):
        outside = key in ("src", "href") and not value.startswith(("#", "data:,"))
        return key.startswith("on") or key == "style" or outside

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.append(tag)
            assert not [key for key, value in attrs if harmful(key, value)], attrs

    Parser().feed(r.text)
    assert found.count("script") == found.count("style") == 1
    policy = dict(p.strip().split(" ", 1) for p in r.headers["content-security-policy"].split(";"))
    for tag in ("script", "style"):
        text = re.search(f"<{tag}>(.*)</{tag}>", r.text, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    for part in ("default-src", "base-uri", "frame-ancestors", "form-action"):
        assert policy[part] == "'none'"
    assert policy["connect-src"] == "'self'"


def test_the_flag():
    routers = lambda *flags: page_from_args(parse_args(["serve", *flags]), None)
    assert routers("--no-page") == []
    assert [r.path for r in routers()[0].routes] == ["/", "/page/events"]


# in a browser


@contextlib.contextmanager
def opened(browser, url, **kw):
    "A page of its own at `url`: at its end nothing was wrong with it, and it has asked nobody else for anything."
    context = browser.new_context(**dict(viewport=dict(width=1280, height=900)) | kw)
    page, asked, said = context.new_page(), [], []
    page.set_default_timeout(60_000)
    page.on("request", lambda r: asked.append(r.url))
    page.on("pageerror", lambda e: said.append(str(e)))
    page.on(
        "console",
        lambda m: (
            said.append(m.text)
            if m.type in ("error", "warning") and "willReadFrequently" not in m.text
            else None
        ),
    )
    page.said = said
    page.goto(url)
    yield page
    assert (
        said == []
        and [u for u in asked if not u.startswith((url, "data:", f"blob:{url}"))] == []
        and page.evaluate("window.harm") is None
    )
    context.close()


def reads(page, selector, text):
    until(lambda: text in (page.locator(selector).text_content() or ""))


def test_slots_fill_and_the_playground_answers_by_keyboard(browser):
    with (
        serving(
            tiny_llm(tiny_model("llama", max_position_embeddings=2048), max_num_seqs=4),
            routers=[page_router()],
        ) as s,
        opened(browser, s.url) as page,
    ):
        reads(page, "#state", "Live")
        assert page.locator("#more").inner_text().startswith("Nothing runs")
        with held(s, [dict(prompt=f"{SECRET} {i}", max_tokens=800) for i in range(6)], 60):
            until(
                lambda: (
                    page.locator("#slots tr").count() == 4
                    and page.locator("#f-waiting").inner_text() == "2"
                )
            )
            assert (
                page.locator("#f-running").inner_text() == "4"
                and page.locator("#chips li").count() == 2
                and SECRET not in page.content()
            )
            painted = "() => { const c = document.getElementById('roll'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, s = new Set(); for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return [...s]; }"
            light = page.evaluate(painted)
            assert {0x2F6FB5, 0xD9730D} <= {
                *light
            }  # decode and prefill, in the colours of all pictures
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "To the playground"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab") if page.evaluate("document.activeElement.id") != "say" else None
        page.keyboard.type("Hello")
        page.locator("#max").fill("9")
        page.locator("#warm").fill("0")
        page.locator("#say").press("Enter")
        reads(page, "#said", "Done")
        out = s.llm.chat([[dict(role="user", content="Hello")]], dict(temperature=0, max_tokens=9))[
            0
        ]
        assert (
            page.locator(".model span").inner_text() == out.outputs[0].text.strip()
            and f"{len(out.outputs[0].token_ids)} out" in page.locator("#said").inner_text()
        )
        page.locator("#max").fill("1900")
        page.locator("#say").fill("Hello")
        with paused_after(s.llm, 100):  # in the middle of the answer
            page.locator("#say").press("Enter")
            until(lambda: len(page.locator(".model span").nth(1).text_content() or "") > 3)
            page.locator("#stop").press("Enter")
            reads(page, "#said", "stopped after")
            until(lambda: not s.llm.has_unfinished)  # the engine has heard of it
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.locator("#theme").press("Enter")
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
            and page.evaluate(painted) != light
        )
        page.locator("#pause").press("Enter")
        until(lambda: not lookouts(s.llm))
        page.locator("#pause").press("Enter")
        reads(page, "#state", "Live")
        page.set_viewport_size(dict(width=390, height=800))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


HOSTILE = '"><img src=x onerror="window.harm = 1"><script>window.harm = 2</script>'


def test_names_and_answers_are_text(browser, tmp_path):
    llm = tiny_llm(max_num_seqs=4)
    runner = BatchRunner(BatchStore(tmp_path), llm, "tiny")
    with serving(
        llm=llm, batches=runner, api_key="sesame", routers=[page_router(batches=True)]
    ) as s:
        with httpx.Client(base_url=f"{s.url}/v1", headers=dict(Authorization="Bearer sesame")) as c:
            lines = [
                json.dumps(
                    dict(
                        custom_id=str(i),
                        method="POST",
                        url="/v1/completions",
                        body=dict(prompt="a", max_tokens=3),
                    )
                )
                for i in range(3)
            ] + ["{"]
            with NewFile(runner.store) as new:  # a name that no client library lets through
                new.write("\n".join(lines).encode())
                file = new.keep(HOSTILE, "batch", None)
            made = c.post(
                "/batches",
                json=dict(
                    input_file_id=file["id"], endpoint="/v1/completions", completion_window="24h"
                ),
            ).json()
            until(lambda: c.get(f"/batches/{made['id']}").json()["status"] == "completed")
            answers = c.get(
                f"/files/{c.get('/batches/' + made['id']).json()['output_file_id']}/content"
            ).text
        with opened(
            browser, s.url, accept_downloads=True, reduced_motion="reduce", color_scheme="dark"
        ) as page:
            page.wait_for_selector("#key", state="visible")
            assert page.evaluate("document.activeElement.id") == "key"
            page.keyboard.type("wrong")
            page.keyboard.press("Enter")
            reads(page, "#wrong", "not the one")
            page.keyboard.type("sesame")
            page.keyboard.press("Enter")
            page.wait_for_selector("#batches li")
            assert (
                page.locator("#batches .name").inner_text() == HOSTILE
                and "4 of 4, 1 failed" in page.locator("#batches").inner_text()
            )
            with page.expect_download() as got:
                page.get_by_role("link", name="answers of").press("Enter")
            assert open(got.value.path(), encoding="utf-8").read() == answers
            event = f"data: {json.dumps(dict(choices=[dict(delta=dict(content=HOSTILE))]))}\n\n"
            page.route(
                "**/v1/chat/completions",
                lambda route: route.fulfill(
                    status=200, content_type="text/event-stream", body=event
                ),
            )
            page.locator("#say").fill(HOSTILE)
            page.locator("#send").click()
            reads(page, "#said", "stopped after")
            assert (
                page.locator("#talk span").all_inner_texts() == [HOSTILE] * 2
                and page.locator("#talk img").count() == 0
            )
            page.said[:] = [x for x in page.said if "401" not in x]  # Chromium's own line for it
