"Jobs killed, starved, fed with rubbish and run twice: every line has one record, and every good line its answer."

import csv, functools, gzip, json, os, random, re, signal, subprocess, sys, time
from collections import Counter
from pathlib import Path

import pytest

from helpers import but_compiler, same
from hypothesis import HealthCheck, given, settings, strategies as st

from batchlab.api import LLM
from batchlab.errors import JobError
from batchlab.jobs.job import Job, Run
from batchlab.jobs.journal import drop_side, journal_of, read_record, settings_file, write_settings
from batchlab.jobs.lines import parse_line
from batchlab.jobs.runner import model_digest
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.core.params import SamplingParams

ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUTF8": "0",
    "LC_ALL": "C.UTF-8",
}
CMD = [sys.executable, "-m", "batchlab.cli", "run"]
posix = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def llm():
    return LLM(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def ask(i, **body):
    body = (
        dict(prompt=f"tell me {i} " + "more " * (i % 6), max_tokens=1 + i % 5, temperature=0) | body
    )
    return dict(custom_id=f"r{i}", method="POST", url="/v1/completions", body=body)


def chat(i, **body):
    messages = [
        dict(role="system", content="Be brief." * (i % 2)),
        dict(role="user", content=f"What is {i}?"),
    ]
    body = dict(messages=messages, max_tokens=2 + i % 4, temperature=0) | body
    return dict(custom_id=f"r{i}", method="POST", url="/v1/chat/completions", body=body)


def write(path, rows):
    Path(path).write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def rows(path):
    return [json.loads(s) for s in Path(path).read_text(encoding="utf-8").splitlines()]


def texts(path):
    "Text and finish reason by id; each id once, nothing failed."
    found = [(r["custom_id"], r["response"]["body"]["choices"][0]) for r in rows(path)]
    assert len({i for i, _ in found}) == len(found)
    return {
        i: ((c.get("message") or {}).get("content", c.get("text")), c["finish_reason"])
        for i, c in found
    }


def wait_for(path, size, p):
    end = time.time() + 60
    while (
        p.poll() is None
        and time.time() < end
        and not (path.exists() and path.stat().st_size > size)
    ):
        time.sleep(0.01)


@posix
def test_killed_at_random_moments(folder, tmp_path):
    n, rng, model = 600, random.Random(5), LLM(folder, dtype="fp32", max_num_seqs=4)
    write(tmp_path / "in.jsonl", [(chat if i % 3 else ask)(i) for i in range(n)])
    args = [
        *CMD,
        "-i",
        "in.jsonl",
        "--model",
        folder,
        "--dtype",
        "fp32",
        "--max-num-seqs",
        "4",
        "-o",
    ]
    assert Job(tmp_path / "in.jsonl", tmp_path / "calm.jsonl").run(model).answered == n
    out, sizes = tmp_path / "out.jsonl", [0]
    for _ in range(3):
        p = subprocess.Popen([*args, "out.jsonl"], cwd=tmp_path, env=ENV, stderr=subprocess.DEVNULL)
        wait_for(out, sizes[-1] + rng.randrange(1, 60_000), p)
        p.send_signal(signal.SIGKILL)
        p.wait()
        sizes.append(out.stat().st_size if out.exists() else 0)
    kept = out.read_bytes()
    assert len({*sizes}) == 4 and sizes == sorted(sizes)  # it did get on, and lost nothing
    result = Job(tmp_path / "in.jsonl", out).run(model)
    assert result.answered == n and result.before >= kept.count(b"\n")
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert texts(out) == texts(tmp_path / "calm.jsonl") and len(texts(out)) == n


@posix
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(folder, tmp_path, sig):
    write(tmp_path / "in.jsonl", [ask(i, max_tokens=30, ignore_eos=True) for i in range(2000)])
    args = [*CMD, "-i", "in.jsonl", "-o", "out.jsonl", "--model", folder, "--max-num-seqs", "4"]
    p = subprocess.Popen(args, cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "out.jsonl", 0, p)
    p.send_signal(sig)
    _, err = p.communicate(timeout=60)
    done = len(texts(tmp_path / "out.jsonl"))
    assert p.returncode == 130 and 0 < done < 2000, err
    said = [
        line
        for line in but_compiler(err).splitlines()
        if not line.startswith("batchlab: faster: 4 slots: ")
    ]
    assert said == [
        f"batchlab: interrupted: {done} of 2000 requests done; the same command goes on"
    ]
    assert (
        Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", force=True, limit=done + 5)
        .run(llm())
        .done
        >= done
    )


@posix
def test_full_disk(folder, tmp_path):
    import resource

    write(tmp_path / "in.jsonl", [ask(i) for i in range(60)])
    args = [*CMD, "-i", "in.jsonl", "-o", "out.jsonl", "--model", folder]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
    p = subprocess.run(
        args,
        cwd=tmp_path,
        env=ENV | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    assert p.returncode == 1 and len(but_compiler(p.stderr).splitlines()) == 1, p.stderr
    assert (
        "batchlab: error: can't write out.jsonl (File too large): make room, and the same command goes on"
        in p.stderr
    )
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert 8000 < len(kept) <= 9000 and kept.endswith(b"}\n")
    assert Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl").run(LLM(folder)).before == kept.count(
        b"\n"
    )
    assert (tmp_path / "out.jsonl").read_bytes().startswith(kept) and len(
        texts(tmp_path / "out.jsonl")
    ) == 60


def test_no_room_for_small_files(tmp_path, monkeypatch):
    write(tmp_path / "in.jsonl", [ask(1)])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JobError, match="can't write .*settings.json .No space"):
        Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl").run(llm())
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


@functools.cache
def example_job(ordered=False):
    "Bytes of a job's input, its answers and its settings, undisturbed."
    import tempfile

    with tempfile.TemporaryDirectory() as d:
        d = Path(d)
        write(
            d / "in.jsonl",
            [(chat if i % 2 else ask)(i) for i in range(12)] + [ask(3), ask(13, temperature=-1)],
        )
        assert (
            Job(d / "in.jsonl", d / "out.jsonl", ordered=ordered, keep_journal=True)
            .run(llm())
            .failed
            == 2
        )
        return (
            (d / "in.jsonl").read_bytes(),
            (d / "out.jsonl").read_bytes(),
            settings_file(d / "out.jsonl").read_bytes(),
        )


def by_key(data):
    "Records by the line that they answer, without what a clock or a cache puts in."
    found = {}
    for s in data.splitlines():
        number, _, d = read_record(s)
        if body := d["response"] and d["response"]["body"]:
            body.pop("created", None)
            if "usage" in body:
                body["usage"].pop("prompt_tokens_details")
        assert found.setdefault(number, d) is d, f"line {number} twice"
    return found


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    cut=st.integers(0, 10_000),
    tail=st.sampled_from((b"", b"\0" * 100, b'{"id": "batch_req_', b"\xff")),
    ordered=st.booleans(),
)
def test_torn_anywhere(tmp_path_factory, cut, tail, ordered):
    d = tmp_path_factory.mktemp("torn")
    requests, answers, side = example_job(ordered)
    (d / "in.jsonl").write_bytes(requests)
    settings_file(d / "out.jsonl").parent.mkdir()
    settings_file(d / "out.jsonl").write_bytes(side)
    kept = answers[: cut % (len(answers) + 1)]
    (d / "out.jsonl").write_bytes(kept + tail)
    result = Job(d / "in.jsonl", d / "out.jsonl", ordered=ordered).run(llm())
    got = (d / "out.jsonl").read_bytes()
    whole = kept[: kept.rfind(b"\n") + 1]
    assert got.startswith(whole) and by_key(got) == by_key(answers)
    assert result.before in (
        whole.count(b"\n"),
        whole.count(b"\n") + 1,
    )  # one more if only its line end was torn off
    if ordered:
        assert [*by_key(got)] == [*range(1, 15)]


JUNK = st.one_of(
    st.binary(max_size=60),
    st.just(b"[" * 50_000),
    st.just(b'{"a":' * 3000),
    st.just(b'"' + b"x" * 200_000),
    st.just(b"\xef\xbb\xbf{}"),
    st.sampled_from(
        [
            b"null",
            b"{}",
            b"[]",
            b"NaN",
            b'{"custom_id": 1e999}',
            b"\xff\xfe{\0",
            b'{"custom_id": "\\ud800"}',
            b"1" * 5000,
            b"\r",
            b'{"prompt": "plain"}',
            json.dumps("é").encode("latin-1", "replace"),
        ]
    ),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=8)
    | st.just("\ud800")
    | st.just("x" * 400),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3),
    max_leaves=6,
)
KEYWORDS = [
    "type",
    "properties",
    "items",
    "anyOf",
    "enum",
    "const",
    "$ref",
    "$defs",
    "required",
    "maxLength",
    "minimum",
    "pattern",
    "additionalProperties",
    "allOf",
]
SCHEMAS = st.recursive(
    st.sampled_from(
        ["string", "integer", "object", "array", "#", "#/$defs/x", 3, -1, 10**9, 'a"b', "("]
    ),
    lambda v: st.dictionaries(
        st.sampled_from(KEYWORDS),
        v | st.lists(v, max_size=2) | st.dictionaries(st.sampled_from("xy"), v, max_size=2),
        max_size=3,
    ),
    max_leaves=8,
)
FIELDS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stop_token_ids",
    "bad_words",
    "seed",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "stream",
    "ignore_eos",
    "response_format",
    "structured_outputs",
    "tools",
    "prompt",
    "messages",
    "model",
    "best_of",
    "skip_special_tokens",
    "detokenize",
    "priority",
]


@st.composite
def twisted(draw):
    "A line with one thing wrong, or what may be wrong."
    d = draw(st.sampled_from([ask, chat]))(draw(st.integers(100, 10**6)))
    if draw(st.booleans()):
        d["body"][draw(st.sampled_from(FIELDS))] = draw(VALUES)
    elif draw(st.booleans()):
        d[draw(st.sampled_from([*d]))] = draw(VALUES)
    elif draw(st.booleans()):
        d["body"]["messages"] = [dict(role=draw(VALUES), content=draw(VALUES)), draw(VALUES)]
    elif draw(st.booleans()):
        d["body"]["response_format"] = dict(
            type="json_schema", json_schema=dict(schema=draw(VALUES | SCHEMAS))
        )
    else:
        d["body"]["structured_outputs"] = {
            draw(st.sampled_from(["json", "regex", "choice", "grammar"])): draw(
                VALUES | SCHEMAS | st.text('(a|b)*+?{}[1,]\\"', max_size=9)
            )
        }
    line = json.dumps(d).encode()
    return line[: draw(st.integers(1, len(line)))] if draw(st.integers(0, 5)) == 0 else line


@functools.cache
def alone(i):
    [out] = llm().generate(ask(i)["body"]["prompt"], dict(max_tokens=1 + i % 5, temperature=0))
    return out.outputs[0].text


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(lines=st.lists(JUNK | twisted() | st.integers(0, 20), max_size=14), crlf=st.booleans())
def test_rubbish_fails_alone(tmp_path_factory, lines, crlf):
    d = tmp_path_factory.mktemp("fuzz")
    lines = [(x, json.dumps(ask(x)).encode() if isinstance(x, int) else x) for x in lines]
    data = (b"\r\n" if crlf else b"\n").join(s for _, s in lines)
    (d / "in.jsonl").write_bytes(data)
    Job(d / "in.jsonl", d / "out.jsonl", form="batch", look_ahead=5, timeout=60).run(llm())
    found = by_key((d / "out.jsonl").read_bytes()) if (d / "out.jsonl").exists() else {}
    split = [s for s in data.split(b"\n")]
    assert sorted(found) == [k for k, s in enumerate(split, 1) if s.strip()]
    ids = Counter(r["custom_id"] for r in found.values() if r["custom_id"] is not None)
    assert not ids or max(ids.values()) == 1
    good, seen = {json.dumps(ask(x)).encode(): x for x, _ in lines if isinstance(x, int)}, set()
    for k, s in enumerate(split, 1):
        x = good.get(s.removesuffix(b"\r"))
        if x is None:
            continue
        r = found[k]
        if x in seen:
            assert r["error"]["code"] == "duplicate_custom_id" and r["custom_id"] is None
        else:
            assert r["response"]["body"]["choices"][0]["text"] == alone(x)
        seen.add(x)
    assert all(f"line {k}: " in r["error"]["message"] for k, r in found.items() if r["error"])


def test_a_hosted_file_runs_unchanged(tmp_path):
    "Lines as the guides of hosted services and of vLLM's runner show them."
    chat_body = dict(
        model="gpt-4o-mini",
        messages=[
            dict(role="developer", content="You are a helpful assistant."),
            dict(role="user", content=[dict(type="text", text="Hello world!")]),
        ],
    )
    lines = [
        dict(
            custom_id="request-1",
            method="POST",
            url="/v1/chat/completions",
            body=chat_body | dict(max_completion_tokens=9, n=2, seed=1),
        ),
        dict(
            custom_id="request-2",
            method="POST",
            url="/v1/chat/completions",
            body=chat_body
            | dict(
                max_tokens=6,
                temperature=0,
                logprobs=True,
                top_logprobs=3,
                stream=False,
                user="u",
                response_format=dict(type="text"),
                tools=None,
            ),
        ),
        dict(
            custom_id="request-3",
            method="POST",
            url="/v1/completions",
            body=dict(model="m", prompt=["Hi"], logprobs=2, seed=3),
        ),
        dict(
            custom_id="request-4",
            method="POST",
            url="/v1/moderations",
            body=dict(model="m", input="x"),
        ),
    ]
    write(tmp_path / "in.jsonl", lines)
    said = []
    refused = Job(tmp_path / "in.jsonl", tmp_path / "no.jsonl", model_name="tiny").run(llm())
    assert (
        refused.failed == 4
        and "there is no model 'gpt-4o-mini' here: tiny answers" in refused.first_failure
        and "--any-model" in refused.first_failure
    )
    assert [r["error"]["code"] for r in rows(tmp_path / "no.jsonl")].count("model_not_found") == 3
    result = Job(
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        error_file=tmp_path / "err.jsonl",
        say=said.append,
        model_name="tiny",
        any_model=True,
    ).run(llm())
    assert (result.answered, result.failed, said) == (3, 1, [])
    one, two, three = sorted(rows(tmp_path / "out.jsonl"), key=lambda r: r["custom_id"])
    for r in (one, two, three):
        assert set(r) == {"id", "custom_id", "response", "error"} and r["error"] is None
        assert (
            set(r["response"]) == {"status_code", "request_id", "body"}
            and r["response"]["status_code"] == 200
        )
        body = r["response"]["body"]
        assert {"id", "object", "created", "model", "choices", "usage"} == set(body) and body[
            "model"
        ] == "tiny"
        u = body["usage"]
        assert u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] and all(
            c["finish_reason"] in ("stop", "length") for c in body["choices"]
        )
    assert [c["index"] for c in one["response"]["body"]["choices"]] == [0, 1]
    tokens = two["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(tokens) == two["response"]["body"]["usage"]["completion_tokens"] and all(
        len(t["top_logprobs"]) == 3 for t in tokens
    )
    choice = three["response"]["body"]["choices"][0]
    assert (
        three["response"]["body"]["object"] == "text_completion"
        and three["response"]["body"]["usage"]["completion_tokens"] <= 16
    )
    assert (
        len(choice["logprobs"]["tokens"])
        == len(choice["logprobs"]["token_logprobs"])
        == len(choice["logprobs"]["text_offset"])
    )
    [bad] = rows(tmp_path / "err.jsonl")
    assert (
        bad["custom_id"] == "request-4"
        and bad["response"]["status_code"] == 400
        and bad["error"]["message"].startswith("line 4: url must be")
    )
    assert bad["response"]["body"]["error"]["code"] == bad["error"]["code"] == "invalid_url"


def test_seeds_hold_whatever_runs_beside(tmp_path):
    asked = [ask(i, temperature=1.2, seed=i, max_tokens=12, ignore_eos=True) for i in range(20)]
    write(tmp_path / "a.jsonl", asked)
    write(tmp_path / "b.jsonl", asked[::-3] + [ask(30)])
    for name in "ab":
        Job(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.out.jsonl").run(llm())
    a, b = texts(tmp_path / "a.out.jsonl"), texts(tmp_path / "b.out.jsonl")
    assert {i: t for i, t in b.items() if i != "r30"} == {i: a[i] for i in b if i != "r30"}


def test_one_run_at_a_time(tmp_path):
    write(tmp_path / "in.jsonl", [ask(1)])
    (tmp_path / "err.jsonl.batchlab").mkdir()
    code = f"from filelock import FileLock; l = FileLock({str(tmp_path / 'err.jsonl.batchlab' / 'lock')!r}); l.acquire(); print(1, flush=True); input()"
    p = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    p.stdout.readline()
    job = lambda out: Job(tmp_path / "in.jsonl", tmp_path / out, error_file=tmp_path / "err.jsonl")
    with pytest.raises(JobError, match="another run is writing .*err.jsonl"):
        job("out.jsonl").run(llm())
    p.communicate(b"\n")
    assert not (tmp_path / "out.jsonl.batchlab").exists()  # of what was refused nothing is left
    assert job("out.jsonl").run(llm()).answered == 1 and sorted(
        p.name for p in tmp_path.iterdir()
    ) == ["err.jsonl", "in.jsonl", "out.jsonl"]


def test_what_changed_is_refused(tmp_path):
    write(tmp_path / "in.jsonl", [ask(i) for i in range(4)])
    first = dict(
        input=str(tmp_path / "in.jsonl"),
        output=str(tmp_path / "out.jsonl"),
        sampling_params=dict(top_k=3),
    )
    Job(**first, limit=2).run(llm())
    kept = (tmp_path / "out.jsonl").read_bytes()
    other = LLM(tiny_model("llama", seed=1, num_hidden_layers=1), tiny_tokenizer())
    for kept_journal in (
        False,
        True,
    ):  # by the stamps of a finished output, or by the settings beside it
        changes = (
            (
                dict(sampling_params=dict(top_k=4)),
                llm(),
                "'top_k': 3" if kept_journal else "other sampling parameters",
            ),
            (dict(sampling_params=None), llm(), "sampling param"),
            (dict(error_file=str(tmp_path / "e")), llm(), "error file"),
            ({}, other, "model"),
        )
        for change, model, word in changes:
            with pytest.raises(JobError, match=re.escape(word)):
                Job(**first | change).run(model)
            assert (tmp_path / "out.jsonl").read_bytes() == kept and settings_file(
                tmp_path / "out.jsonl"
            ).exists() == kept_journal
        if kept_journal:
            break
        settings_file(tmp_path / "out.jsonl").parent.mkdir()
        write_settings(
            settings_file(tmp_path / "out.jsonl"),
            Job(**first, form="batch").settings() | dict(model=model_digest(llm())),
        )
    drop_side(tmp_path / "out.jsonl")
    requests = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "in.jsonl").write_bytes(requests.replace(b"tell me 1", b"tell me I"))
    with pytest.raises(JobError, match="line 2 of .* is not what it was"):
        Job(**first).run(llm())
    (tmp_path / "in.jsonl").write_bytes(
        requests + json.dumps(ask(9)).encode()
    )  # more to do is no change
    assert Job(**first).run(llm()).answered == 5
    (tmp_path / "in.jsonl").write_bytes(
        requests + json.dumps(ask(9)).encode() + b"\n" + json.dumps(ask(10)).encode()
    )
    assert Job(**first, force=True).run(other).answered == 6
    assert not settings_file(tmp_path / "out.jsonl").exists()
    data = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(
        re.sub(rb'("id": "batch_req_\d+_[0-9a-f]{8})_[0-9a-f]{12}', rb"\1", data)
    )
    with pytest.raises(JobError, match="does not say how it was made"):
        Job(**first).run(llm())
    (tmp_path / "out.jsonl").unlink()
    assert (
        Job(**first | dict(sampling_params=None)).run(llm()).answered == 6
    )  # taken away: a new beginning


def test_a_foreign_file_is_left_alone(tmp_path):
    write(tmp_path / "in.jsonl", [ask(1)])
    for data in (
        b"my thesis\n",
        b'{"custom_id": "r1"}\n',
        b"one\ntwo",
        json.dumps(dict(id="batch_req_x")).encode(),
    ):
        for name in ("out.jsonl", "err.jsonl"):
            (tmp_path / name).write_bytes(data)
            for force in (False, True):
                with pytest.raises(JobError, match="is no answer of a job"):
                    Job(
                        tmp_path / "in.jsonl",
                        tmp_path / "out.jsonl",
                        error_file=tmp_path / "err.jsonl",
                        force=force,
                    ).run(llm())
            assert (tmp_path / name).read_bytes() == data
            (tmp_path / name).unlink()


def test_retry_and_errors_in_their_own_file(tmp_path):
    write(tmp_path / "in.jsonl", [ask(i) for i in range(8)] + [ask(99, n=0)])
    job = dict(
        input=tmp_path / "in.jsonl",
        output=tmp_path / "out.jsonl",
        error_file=tmp_path / "err.jsonl",
    )
    late = Job(**job, timeout=1e-9).run(llm())
    assert (late.answered, late.failed) == (0, 9) and {
        r["response"]["status_code"] for r in rows(tmp_path / "err.jsonl")
    } == {400, 408}
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    assert Job(**job).run(None).before == 9  # a failure is an answer, until it is asked for again
    again = Job(**job, retry_errors=True).run(llm())
    assert (
        (again.answered, again.failed) == (8, 1)
        and len(texts(tmp_path / "out.jsonl")) == 8
        and len(rows(tmp_path / "err.jsonl")) == 1
    )
    with pytest.raises(JobError, match="more than 0 requests failed"):
        Job(**job, retry_errors=True, max_errors=0).run(llm())
    assert len(texts(tmp_path / "out.jsonl")) == 8 and len(rows(tmp_path / "err.jsonl")) == 1


def test_cut_compression(tmp_path):
    whole = gzip.compress(
        "".join(
            json.dumps(ask(i, user=str(random.Random(i).random()))) + "\n" for i in range(400)
        ).encode()
    )
    (tmp_path / "in.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    job = dict(input=tmp_path / "in.jsonl.gz", output=tmp_path / "out.jsonl.gz")
    with pytest.raises(JobError, match="beyond line") as e:
        Job(**job).run(llm())
    done = len(rows(journal_of(tmp_path / "out.jsonl.gz")))
    assert e.value.status == 1 and 50 < done < 400
    (tmp_path / "in.jsonl.gz").write_bytes(whole)
    result = Job(**job).run(llm())
    assert (result.before, result.answered) == (done, 400)
    assert (
        len({json.loads(s)["custom_id"] for s in gzip.open(tmp_path / "out.jsonl.gz", "rt")}) == 400
    )


@pytest.mark.parametrize("kind", ["csv", "csv.xz", "parquet", "jsonl.bz2"])
def test_tables(tmp_path, kind):
    import bz2, csv, io, lzma

    prompts = {f"q{i}": f'What is "{i}",\nand why?' * (1 + i % 3) for i in range(30)}
    text = io.StringIO()
    csv.writer(text).writerows([["id", "question"], *prompts.items()])
    data = text.getvalue().encode()
    if kind == "parquet":
        pa = pytest.importorskip(
            "pyarrow", reason="Parquet files need pyarrow, which batchlab does without"
        )
        pytest.importorskip(
            "pyarrow.parquet", reason="Parquet files need pyarrow with Parquet built in"
        ).write_table(
            pa.table(dict(id=[*prompts], question=[*prompts.values()])), tmp_path / "in.parquet"
        )
    elif kind == "jsonl.bz2":
        (tmp_path / "in.jsonl.bz2").write_bytes(
            bz2.compress(
                b"\n".join(json.dumps(dict(id=k, prompt=v)).encode() for k, v in prompts.items())
            )
        )
    else:
        (tmp_path / f"in.{kind}").write_bytes(lzma.compress(data) if kind == "csv.xz" else data)
    column = {} if kind == "jsonl.bz2" else dict(prompt_column="question", id_column="id")
    Job(
        str(tmp_path / f"in.{kind}"),
        str(tmp_path / f"out.{kind}"),
        sampling_params=dict(max_tokens=4),
        **column,
    ).run(llm())
    want = {
        i: llm().generate(p, SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].text
        for i, p in prompts.items()
    }
    if kind == "parquet":
        found = sys.modules["pyarrow.parquet"].read_table(tmp_path / "out.parquet").to_pylist()
    elif kind == "jsonl.bz2":
        found = [json.loads(s) for s in bz2.open(tmp_path / "out.jsonl.bz2", "rt")]
    else:
        found = [
            *csv.DictReader(
                (lzma.open if kind == "csv.xz" else open)(
                    tmp_path / f"out.{kind}", "rt", encoding="utf-8", newline=""
                )
            )
        ]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("out")] == [f"out.{kind}"]
    clean = lambda s: s.encode("utf-8", "replace").decode()
    assert [*{r["id"]: 0 for r in found}] == [*want] or kind == "jsonl.bz2"  # in order
    assert {r["id"]: clean(r["text"]) for r in found} == {
        i: clean(t) for i, t in want.items()
    } and len(found) == 30


def test_broken_rows_of_a_table(tmp_path):
    (tmp_path / "in.csv").write_bytes(
        b"prompt,custom_id\ngood,a\ncaf\xe9,b\n"
        + b'"'
        + b"x" * 1000
        + b'",c\nshort\n,d\n"half",a\nlast,e\n'
    )
    Job(tmp_path / "in.csv", tmp_path / "out.jsonl", sampling_params=dict(max_tokens=2)).run(llm())
    found = {r["row"]: r for r in rows(tmp_path / "out.jsonl")}
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7]
    assert {k: r["error"]["code"] for k, r in found.items() if r["error"]} == {
        2: "invalid_request",
        3: "context_length_exceeded",
        5: "invalid_request",
        6: "duplicate_custom_id",
    }
    for data, word in ((b"a,b\n1,2\n", "no column"), (b"", "no column")):
        (tmp_path / "bad.csv").write_bytes(data)
        with pytest.raises(JobError, match=word):
            Job(tmp_path / "bad.csv", tmp_path / "o.jsonl").run(llm())


def test_only_a_block_is_held(tmp_path, monkeypatch):
    "Lines read and not yet settled stay within the look-ahead; in input order, early answers held do too."
    for ordered in (False, True):
        write(
            tmp_path / "in.jsonl",
            [ask(i, max_tokens=40 if i % 50 == 0 else 1, ignore_eos=True) for i in range(300)],
        )
        job, most, read = (
            Job(
                tmp_path / "in.jsonl",
                tmp_path / f"out{ordered}.jsonl",
                ordered=ordered,
                look_ahead=16,
            ),
            [0, 0],
            [],
        )
        line = job.line

        def counted(*a):
            read.append(a[0])
            return line(*a)

        job.line = counted
        flush = Run.flush

        def look(self):
            flush(self)
            if read:
                most[:] = (
                    max(most[0], len(read) - job.result.done),
                    max(most[1], len(self.outbox.held)),
                )

        monkeypatch.setattr(Run, "flush", look)
        job.run(llm())
        monkeypatch.undo()
        room = 4 * 5 // 4 + 1
        assert most[0] <= 16 + room and most[1] <= (4 * 16 + 16 if ordered else 0), most
        if ordered:
            assert [r["custom_id"] for r in rows(tmp_path / "outTrue.jsonl")] == [
                f"r{i}" for i in range(300)
            ]


@posix
def test_pipes(folder, tmp_path):
    "Requests from standard input; answers to standard output, until its reader leaves."
    write(tmp_path / "in.jsonl", [ask(i) for i in range(40)])
    data, args = (
        (tmp_path / "in.jsonl").read_bytes(),
        [*CMD, "-i", "-", "--model", folder, "--dtype", "fp32", "-o"],
    )
    run = lambda *a: subprocess.run(
        [*args, *a], cwd=tmp_path, env=ENV, input=data, capture_output=True, timeout=120
    )
    assert (
        Job(tmp_path / "in.jsonl", tmp_path / "calm.jsonl").run(LLM(folder, dtype="fp32")).answered
        == 40
    )
    p = run("-", "--trace", "trace.json")
    (tmp_path / "piped.jsonl").write_bytes(p.stdout)
    assert p.returncode == 0 and texts(tmp_path / "piped.jsonl") == texts(
        tmp_path / "calm.jsonl"
    ), p.stderr
    assert (
        b"can not go on" in p.stderr
        and not (tmp_path / "-").exists()
        and not [*tmp_path.glob("-*")]
    )
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["totals"][
        "requests"
    ] == dict(Counter(f for _, f in texts(tmp_path / "calm.jsonl").values()))
    assert (
        run("kept.jsonl", "--limit", "15").returncode == 0
        and len(rows(tmp_path / "kept.jsonl")) == 15
    )
    p = run("kept.jsonl")  # the same input again: it goes on
    assert b"15 of them before" in p.stderr and texts(tmp_path / "kept.jsonl") == texts(
        tmp_path / "calm.jsonl"
    )
    os.mkfifo(tmp_path / "fifo")
    for pipe in ("/dev/stdin", "fifo"):  # read whole first: a job reads its input twice
        whole = " ".join([*args, "named.jsonl"]).replace("-i -", f"-i {pipe}")
        feed = "cat in.jsonl > fifo & " if pipe == "fifo" else "cat in.jsonl | "
        p = subprocess.run(
            feed + whole, shell=True, cwd=tmp_path, env=ENV, capture_output=True, timeout=120
        )
        assert p.returncode == 0 and texts(tmp_path / "named.jsonl") == texts(
            tmp_path / "calm.jsonl"
        ), p.stderr
        (tmp_path / "named.jsonl").unlink()
    with pytest.raises(JobError, match="is no file"):
        Job(tmp_path / "fifo", tmp_path / "o.jsonl").check()
    p = subprocess.run(
        [*args, "none.jsonl"], cwd=tmp_path, env=ENV, input=b"", capture_output=True, timeout=120
    )
    assert p.returncode == 2 and b"standard input is empty" in p.stderr
    head = subprocess.run(
        f"{' '.join(args)} - < in.jsonl | head -n 1",
        shell=True,
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        timeout=120,
    )
    assert len(head.stdout.splitlines()) == 1 and b"Traceback" not in head.stderr


def test_public_submit():
    "What a job does with an engine, by public names."
    from batchlab.tasks.admit import admit
    from batchlab.llm.inputs import Settings, read_prompt
    from batchlab.llm.outputs import RequestGroup

    e, events = LLM(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=2), []
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    e.submit(
        [
            admit(
                e,
                RequestGroup(f"p{i}", i, events.append),
                read_prompt("why " * (i + 1), Settings(params)),
            )
            for i in range(5)
        ]
    )
    while e.has_unfinished:
        e.step()
    done = {x.request_id: x.output.outputs[0].token_ids for x in events if x.finished}
    assert done == {
        f"p{i}": llm().generate("why " * (i + 1), params)[0].outputs[0].token_ids for i in range(5)
    }


def test_plan_counts_what_runs(tmp_path):
    write(
        tmp_path / "in.jsonl",
        [
            ask(i, prompt="one beginning for all of these prompts, " + "x" * i, ignore_eos=True)
            for i in range(30)
        ]
        + [ask(1)],
    )
    job = Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    plan = job.plan(llm())
    assert not (tmp_path / "out.jsonl").exists()
    result = job.run(llm())
    assert (plan.requests, plan.failed, plan.prompt_tokens, plan.max_output_tokens) == (
        30,
        1,
        result.prompt_tokens,
        result.output_tokens,
    )
    assert (
        29 * 32 <= plan.shared_tokens < plan.prompt_tokens
        and plan.seconds > 0
        and plan.memory.slots == 4
    )
    assert "if each takes all its tokens" in str(plan) and "is that of line 2 already" in str(plan)


@pytest.mark.parametrize(
    "args,words",
    [
        (["-i", "nowhere", "-o", "o"], ["can't read nowhere"]),
        (["-i", "in"], ["--output"]),
        (["-i", "in", "-o", "in"], ["different files"]),
        (["-i", "in", "-o", "no/dir/o"], ["can't write no/dir/o"]),
        (["-i", "in", "-o", "."], ["no file"]),
        (["-i", "in", "-o", "o", "--timeout", "0"], ["--timeout"]),
        (["-i", "in", "-o", "o", "--retry"], ["--retry", "did you mean --retry-errors?"]),
        (["-i", "in", "-o", "o", "--chat"], ["plain prompts"]),
        (["-i", "in", "-o", "-", "--error-file", "e"], ["standard output is not kept"]),
        (["-i", "in", "-o", "-", "--ray", "2"], ["--ray takes files"]),
        (
            ["-i", "in", "-o", "o", "--structured-outputs", '{"regx": "a"}'],
            ["--structured-outputs"],
        ),
        (["-i", "in", "-o", "o", "--top-p", "0"], ["--top-p"]),
        (["-i", "in", "-o", "o", "--model", "no such model"], ["no such model"]),
    ],
)
def test_mistakes_are_one_line(tmp_path, args, words, capsys, monkeypatch):
    from batchlab.cli import main

    monkeypatch.chdir(tmp_path)
    write("in", [ask(1)])
    status, err = main(["run", *args]), capsys.readouterr().err
    assert status == 2 and len(err.splitlines()) == 1 and err.startswith("batchlab: error: "), err
    for w in words:
        assert w in err, err


def test_commands(tmp_path, capsys, monkeypatch):
    from batchlab.cli import main

    monkeypatch.chdir(tmp_path)
    write("in.jsonl", [ask(i) for i in range(5)] + [ask(7, max_tokens="x")])
    assert main(["run", "-i", "in.jsonl", "--dry-run"]) == 1
    assert "line 6: max_tokens must be" in capsys.readouterr().out
    assert main(["plan", "-i", "in.jsonl", "--no-calibration"], llm=llm()) == 1
    assert "in 4 slots" in capsys.readouterr().out
    assert (
        main(["run", "-i", "in.jsonl", "-o", "out.jsonl", "--error-file", "err.jsonl"], llm=llm())
        == 1
    )
    assert "6 of 6 requests done, 1 failed" in capsys.readouterr().err
    for command in ("run", "plan", "generate", "bench"):
        assert main([command, "--help"]) == 0
    assert "--retry-errors" in capsys.readouterr().out


SCHEMA = dict(type="object", properties=dict(a=dict(type="boolean")), required=["a"])


@pytest.mark.parametrize(
    "keys,want",
    [
        (
            dict(
                response_format=dict(type="json_schema", json_schema=dict(name="x", schema=SCHEMA))
            ),
            dict(structured_outputs=dict(json=SCHEMA)),
        ),
        (dict(response_format=dict(type="text")), {}),
        (dict(response_format=None), {}),
        (dict(max_completion_tokens=3), dict(max_tokens=3)),
        (dict(max_completion_tokens=3, max_tokens=3), dict(max_tokens=3)),
        (dict(max_tokens=None), dict(max_tokens=None)),
        (dict(max_completion_tokens=None), dict(max_tokens=None)),
        (
            dict(sampling_params=dict(top_k=4, max_completion_tokens=2, guided_choice=["a"])),
            dict(top_k=4, max_tokens=2, structured_outputs=dict(choice=["a"])),
        ),
        (dict(sampling_params=dict(seed=1), n=2, temperature=1), dict(seed=1, n=2, temperature=1)),
        (dict(sampling_params=None), {}),
        (dict(guided_json=SCHEMA), dict(structured_outputs=dict(json=SCHEMA))),
        (dict(guided_regex="a+"), dict(structured_outputs=dict(regex="a+"))),
        (
            dict(guided_grammar='root ::= "a"'),
            dict(structured_outputs=dict(grammar='root ::= "a"')),
        ),
        (dict(logprobs=2), dict(logprobs=2)),
        (dict(logprobs=True, top_logprobs=3), dict(logprobs=3)),
        (dict(tools=[], stream=False, best_of=1, tool_choice="none", detokenize=True), {}),
        (dict(tools=None, num_beams=None), {}),
    ],
)
def test_settings_of_a_plain_line_are_used(keys, want):
    line = parse_line(1, json.dumps(dict(prompt="p", **keys)).encode(), "plain")
    assert (line.failure, line.options, line.ignored) == (None, want, ())


@pytest.mark.parametrize(
    "keys,words",
    [
        (dict(tools=[{}]), ["tools=[{}]"]),
        (dict(best_of=3), ["best_of=3"]),
        (dict(stream=True), ["stream=true"]),
        (dict(tool_choice="auto", functions=[1]), ["functions"]),
        (dict(num_beams=4), ["'num_beams'", "give it to llm.beam_search"]),
        (dict(max_length=9), ["'max_length'", "give max_tokens"]),
        (dict(do_sample=True), ["do_sample", "temperature"]),
        (dict(maxTokens=9), ["'maxTokens'", "'max_tokens'"]),
        ({"top-p": 0.5}, ["'top-p'", "'top_p'"]),
        (dict(guided_decoding_backend="x"), ["guided_decoding_backend"]),
        (dict(prompt_logprobs=1), ["prompt_logprobs"]),
        (dict(system="Be brief."), ["'system'", "role system"]),
        (dict(chat_template="x"), ["chat_template"]),
        (dict(extra_body=dict(top_k=1)), ["extra_body", "top_k"]),
        (dict(parameters=dict(seed=1)), ["parameters"]),
        (dict(sampling_params=dict(best_of=2)), ["best_of=2"]),
        (dict(sampling_params=dict(label="x")), ["'label'"]),
        (dict(sampling_params=[1]), ["sampling_params must be an object"]),
        (dict(sampling_params=dict(n=1), n=2), ["n stands in"]),
        (dict(max_new_tokens=4), ["'max_new_tokens'", "'max_tokens'"]),
        (
            dict(max_tokens=3, max_completion_tokens=4),
            ["max_completion_tokens=4", "max_tokens=3", "one of them"],
        ),
        (dict(top_logprobs=2), ["top_logprobs needs logprobs"]),
        (
            dict(guided_regex="a", guided_choice=["a"]),
            ["guided_regex and guided_choice: give one of them"],
        ),
        (dict(id=[1]), ["id must be"]),
        (dict(custom_id=0.5), ["custom_id must be"]),
        (dict(response_format=dict(type="xml")), ["response_format", "json_schema"]),
        (dict(top_a=0.1), ["top_a"]),
        (dict(length_penalty=1.0), ["length_penalty"]),
        (dict(json_schema={}), ["structured_outputs"]),
    ],
)
def test_settings_nobody_can_honour_fail_their_line(keys, words):
    line = parse_line(1, json.dumps(dict(prompt="p", **keys)).encode(), "plain")
    assert line.failure and all(w in line.failure[1] for w in words), line.failure


def test_no_setting_of_ours_or_of_transformers_is_passed_over():
    "Whatever its name, a setting is used or fails its line: none is among the ignored keys."
    from dataclasses import fields
    from transformers import GenerationConfig

    theirs = {k for k in GenerationConfig().to_dict() if k[0] != "_"}
    for k in sorted({f.name for f in fields(SamplingParams)} | theirs):
        line = parse_line(1, json.dumps(dict(prompt="p", **{k: "x"})).encode(), "plain")
        assert line.failure or line.options and not line.ignored, k


def test_a_setting_beside_the_body_is_no_setting():
    line = parse_line(
        1, json.dumps(ask(1) | dict(response_format=dict(type="json_object"))).encode()
    )
    assert "'response_format' stands beside the body" in line.failure[1]
    line = parse_line(
        1, json.dumps(ask(1) | dict(label="x", metadata=dict(n=3), model="m")).encode()
    )
    assert (line.failure, line.ignored) == (None, ("label",))
    line = parse_line(1, json.dumps(ask(1, guided_choice=["a"], max_completion_tokens=1)).encode())
    assert line.failure[1].startswith("max_completion_tokens=1 and max_tokens=")


def test_plain_lines_may_have_nan_and_batch_lines_not():
    "Python writes NaN where a value is missing; the API's JSON knows none."
    line = parse_line(1, b'{"prompt": "p", "score": NaN, "max_tokens": 2}', "plain")
    assert (line.failure, line.options, line.ignored) == (None, dict(max_tokens=2), ("score",))
    assert (
        "NaN is not a JSON number"
        in parse_line(1, json.dumps(ask(1, seed=float("nan"))).encode()).failure[1]
    )


def test_a_failure_keeps_the_id_that_is_good():
    line = parse_line(1, b'{"prompt": "p", "id": [1], "custom_id": "c"}', "plain")
    assert (line.failure[1], line.ids) == (
        "id must be a string or a whole number, got [1]",
        dict(custom_id="c"),
    )


def test_a_line_of_the_other_form_says_so(tmp_path):
    "A file is of the form of its first good line, and a line of the other fails as such, with its id."
    plain, batch = dict(custom_id="p", prompt="Hi", max_tokens=1), ask(1)
    for first, other, words in (
        (plain, batch, "line 2: a line of the Batch API in a file that is read as plain lines"),
        (batch, plain, "line 2: a plain line in a file that is read as lines of the Batch API"),
    ):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        write(tmp_path / "in.jsonl", [first, other])
        assert Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl").run(llm()).failed == 1
        [bad] = [r for r in rows(tmp_path / "out.jsonl") if r["error"]]
        assert (
            bad["custom_id"] == other["custom_id"]
            and bad["error"]["message"].startswith(words)
            and "file of its own" in bad["error"]["message"]
        )
    assert "id must be a string" in parse_line(1, b'{"prompt": "p", "custom_id": 5}').failure[1]


def test_answers_of_older_jobs_are_known():
    "What names a line or a row in a file of answers is what it always was."
    from batchlab.jobs.lines import digest_of
    from batchlab.jobs.tables import Row

    assert [digest_of(raw) for raw in (b"{}", Row("a"))] == ["d905e156", "5eae67b9"]


def test_plain_lines_end_to_end(tmp_path):
    "A constraint holds, what can't be honoured fails alone, and keys of the owner are named once."
    pytest.importorskip("llguidance", reason="structured outputs need llguidance")
    plain = [dict(id=i, prompt="Salt or sweet?", label="salt", source=i) for i in range(6)]
    plain[1] |= dict(guided_choice=["salt", "sweet"])
    plain[2] |= dict(
        response_format=dict(
            type="json_schema", json_schema=dict(name="x", schema=dict(type="boolean"))
        )
    )
    plain[3] |= dict(tools=[dict(type="function")])
    plain[5] |= dict(extra=1)
    plain[4] |= dict(max_completion_tokens=2, ignore_eos=True)
    write(tmp_path / "in.jsonl", plain)
    job, said = (
        Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sampling_params=dict(max_tokens=9)),
        [],
    )
    job.say = said.append
    assert "ignored" not in str(job.dry_run()) + str(job.plan(llm(), calibrate=False))
    assert (job.run(llm()).failed, said) == (1, [])
    found = {r["id"]: r for r in rows(tmp_path / "out.jsonl")}
    assert found[1]["text"] in ("salt", "sweet") and found[2]["text"] in ("true", "false")
    assert (
        found[3]["error"]["message"].startswith("line 4: tools=")
        and found[4]["usage"]["completion_tokens"] == 2
    )
    assert (
        found[0]["text"]
        == llm()
        .generate("Salt or sweet?", SamplingParams(max_tokens=9, temperature=0))[0]
        .outputs[0]
        .text
    )


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
@pytest.mark.parametrize("form", ["plain", "text", "chat"])
def test_tables_keep_every_answer(tmp_path, kind, form):
    "With n and logprobs a table has all that the records have, and each row the tokens of its own answer."
    if kind == "parquet":
        pq = pytest.importorskip(
            "pyarrow.parquet", reason="Parquet files need pyarrow with Parquet built in"
        )
    make = dict(
        text=ask, chat=chat, plain=lambda i, **b: dict(custom_id=f"r{i}", **ask(i, **b)["body"])
    )[form]
    k = dict(logprobs=True, top_logprobs=2) if form == "chat" else dict(logprobs=2)

    def table(name):
        if kind == "parquet":
            return pq.read_table(tmp_path / f"{name}.{kind}").to_pylist()
        with (gzip.open if kind == "csv.gz" else open)(
            tmp_path / f"{name}.{kind}", "rt", encoding="utf-8", newline=""
        ) as f:
            return [*csv.DictReader(f)]

    def run(name, lines):
        write(tmp_path / f"{name}.jsonl", lines)
        job = dict(input=str(tmp_path / f"{name}.jsonl"), output=str(tmp_path / f"{name}.{kind}"))
        Job(**job, keep_journal=True).run(llm())
        whole, again = table(name), job | dict(output=str(tmp_path / f"{name}_again.{kind}"))
        Job(**again, limit=2).run(llm())
        Job(**again).run(llm())  # gone on with from a finished table: the same
        assert (
            same(table(f"{name}_again"), whole, llm().backend)
            and not Path(journal_of(again["output"])).exists()
        )
        return whole

    old = run("old", [make(i) for i in range(3)])
    front, end = (
        ["line" if form == "plain" else "id", "custom_id"],
        ["request_id"] * (form == "plain"),
    )
    assert [*old[0]] == [
        *front,
        "text",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "error",
        *end,
    ] and len(old) == 3
    new = run(
        "new",
        [
            make(0),
            make(1, n=3, seed=1, temperature=1.0, **k),
            make(2, temperature=-1),
            make(3, **k),
        ],
    )
    assert [*new[0]] == [
        *front,
        "index",
        "text",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "error",
        "logprobs",
        *["cumulative_logprob"] * (form == "plain"),
        *end,
    ] and len(new) == 6
    none = lambda x: x if kind == "parquet" or x != "" else None
    clean = lambda s: s.encode("utf-8", "replace").decode()
    for r in rows(journal_of(tmp_path / f"new.{kind}")):
        mine = [t for t in new if t["custom_id"] == r["custom_id"]]
        body = r if form == "plain" else r["response"]["body"]
        if r["error"]:
            assert [(none(t["index"]), none(t["logprobs"]), t["error"]) for t in mine] == [
                (None, None, r["error"]["message"])
            ]
        else:
            choices = body.get("choices") or body.get("outputs") or [body]
            assert len(mine) == len(choices) == (3 if r["custom_id"] == "r1" else 1)
            for c, t in zip(choices, mine):
                assert (
                    t["text"] == clean(c["message"]["content"] if form == "chat" else c["text"])
                    and t["finish_reason"] == c["finish_reason"]
                )
                assert int(t["completion_tokens"]) == c.get(
                    "completion_tokens", body["usage"]["completion_tokens"]
                )
                assert none(t["index"]) == (
                    None
                    if len(choices) == 1
                    else c["index"]
                    if kind == "parquet"
                    else str(c["index"])
                )
                assert (none(t["logprobs"]) and json.loads(t["logprobs"])) == c.get("logprobs")
            assert (
                sum(int(t["completion_tokens"]) for t in mine) == body["usage"]["completion_tokens"]
            )


def test_a_speed_that_is_tried_is_a_possible_one(monkeypatch):
    "By a clock that ticks once a step, whatever the machine does meanwhile."
    from types import SimpleNamespace
    from batchlab.api import LLM
    from batchlab.models.tiny import tiny_model, tiny_tokenizer
    from batchlab.jobs import job as jobs

    llm, ticks = (
        LLM(
            tiny_model("llama"),
            tiny_tokenizer(),
            max_num_seqs=8,
            max_num_batched_tokens=64,
            compile=False,
        ),
        iter(range(10**6)),
    )
    monkeypatch.setattr(jobs, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert jobs.speed(llm, [[5 + i] * 8 for i in range(4)], 16) == (
        4 * 8 / 1,
        4,
    )  # one step reads all, each further one writes four tokens
    long = [[3 + i] * 200 for i in range(6)]  # four steps to a prompt
    (slow, fast), (least, most), tried = jobs.rates(llm, long, budget=400)
    assert tried == 2 and 0 < slow <= fast <= 64 and 0 < least <= most <= 6


def test_a_plan_says_what_would_help(tmp_path):
    from batchlab.api import LLM
    from batchlab.models.tiny import tiny_model, tiny_tokenizer
    from batchlab.jobs.job import Job

    (tmp_path / "in.jsonl").write_text(
        "".join(
            json.dumps(dict(prompt="The same beginning of all, and then " + "a" * i)) + "\n"
            for i in range(12)
        )
    )
    make = lambda **kw: LLM(tiny_model("llama"), tiny_tokenizer(), **kw)
    plan = lambda llm: Job(tmp_path / "in.jsonl", sampling_params=dict(max_tokens=4)).plan(
        llm, calibrate=False
    )
    slow = plan(make(max_num_seqs=1, compile=False, enable_prefix_caching=False))
    said = str(slow)
    assert (
        "faster: 1 slot: 12 requests would fit at once: give max_num_seqs=64" in said
        and "leave out compile=False" in said
    )
    assert (
        "leave out enable_prefix_caching=False" in said
        and slow.shared_tokens == 0
        and ", in 1 slot\n" in said
    )
    good = str(plan(make()))
    assert (
        "would fit" not in good
        and "enable_prefix_caching" not in good
        and "compile" not in good.split("faster: it runs without")[0]
    )
    assert "strategy='loop' is there to compare" in str(plan(make(strategy="loop")))
    assert "holds" in str(plan(make(kv_cache_bytes=2**16))) and "raise kv_cache_bytes" in str(
        plan(make(kv_cache_bytes=2**16))
    )
    assert "was not checked" in str(Job(tmp_path / "in.jsonl").dry_run())


def test_a_run_with_slow_settings_says_so(tmp_path, capsys):
    from batchlab.cli import main
    from batchlab.models.tiny import tiny_model, tiny_tokenizer

    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "%s"}\n' % ("c" * 400)
    )
    run = lambda out, *flags: main(
        [
            "run",
            "-i",
            str(tmp_path / "in.jsonl"),
            "-o",
            str(tmp_path / out),
            "--model",
            str(tmp_path / "model"),
            "--max-tokens",
            "2",
            *flags,
        ]
    )
    assert run("slow.jsonl", "--max-num-seqs", "1") == 1
    assert (
        "faster: 1 slot: 3 requests would fit at once: give --max-num-seqs 64"
        in capsys.readouterr().err
    )
    assert run("usual.jsonl", "--truncate", "auto") == 0 and "faster" not in capsys.readouterr().err
    rows = {
        r["line"]: r for r in map(json.loads, (tmp_path / "usual.jsonl").read_text().splitlines())
    }
    assert rows[3]["usage"]["prompt_tokens"] == 254
    assert (
        main(
            [
                "plan",
                "-i",
                str(tmp_path / "in.jsonl"),
                "--model",
                str(tmp_path / "model"),
                "--truncate",
                "20",
                "--max-num-seqs",
                "1",
                "--no-calibration",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "3 requests\n" in said and "give --max-num-seqs 64" in said
