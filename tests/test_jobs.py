"Jobs killed, starved, fed with rubbish and run twice: every line has one record, and every good line its answer."

import csv, functools, gzip, json, os, random, shlex, signal, subprocess, sys, time
from collections import Counter
from pathlib import Path

import pytest

from helpers import but_compiler, same
from warm import warm
from hypothesis import HealthCheck, example, given, settings, strategies as st

from batchlab.api import LLM
from batchlab.errors import JobError, ParamError
from batchlab.jobs.job import Job, Run
from batchlab.jobs.journal import drop_side, journal_of, read_record, settings_file
from batchlab.jobs.lines import parse_line
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


def error_of(record):
    return record["error"] and record["error"]["code"]


@pytest.fixture
def job(tmp_path):
    "Makes a job from in.jsonl to out.jsonl, and writes the requests that it is given."

    def make(asked=None, input="in.jsonl", output="out.jsonl", **more):
        if asked is not None:
            write(tmp_path / input, asked)
        if "error_file" in more:
            more["error_file"] = tmp_path / more["error_file"]
        return Job(tmp_path / input, tmp_path / output, **more)

    return make


def texts(path):
    "Text and finish reason by id; each id once, nothing failed."
    found = [(r["custom_id"], r["response"]["body"]["choices"][0]) for r in rows(path)]
    assert len({i for i, _ in found}) == len(found)
    of = lambda c: (c.get("message") or {}).get("content", c.get("text"))
    return {i: (of(c), c["finish_reason"]) for i, c in found}


def wait_for(path, size, p):
    end = time.time() + 60
    while (
        p.poll() is None
        and time.time() < end
        and not (path.exists() and path.stat().st_size > size)
    ):
        time.sleep(0.01)


def command(folder, *args):
    return [*CMD, "-i", "in.jsonl", "--model", folder, "--max-num-seqs", "4", *args]


@posix
def test_killed_at_random_moments(folder, tmp_path, job):
    n, rng, model = 600, random.Random(5), LLM(folder, dtype="fp32", max_num_seqs=4)
    calm = job([(chat if i % 3 else ask)(i) for i in range(n)], output="calm.jsonl")
    assert calm.run(model).answered == n
    out, sizes = tmp_path / "out.jsonl", [0]
    for _ in range(3):
        args = command(folder, "--dtype", "fp32", "-o", "out.jsonl")
        p = subprocess.Popen(args, cwd=tmp_path, env=ENV, stderr=subprocess.DEVNULL)
        wait_for(out, sizes[-1] + rng.randrange(1, 60_000), p)
        p.send_signal(signal.SIGKILL)
        p.wait()
        sizes.append(out.stat().st_size if out.exists() else 0)
    kept = out.read_bytes()
    assert len({*sizes}) == 4 and sizes == sorted(sizes)  # it did get on, and lost nothing
    result = job().run(model)
    assert result.answered == n and result.before >= kept.count(b"\n")
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert texts(out) == texts(tmp_path / "calm.jsonl") and len(texts(out)) == n


@posix
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(folder, tmp_path, sig, job):
    job([ask(i, max_tokens=30, ignore_eos=True) for i in range(2000)])
    args = command(folder, "-o", "out.jsonl")
    p = subprocess.Popen(args, cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "out.jsonl", 0, p)
    p.send_signal(sig)
    _, err = p.communicate(timeout=60)
    done = len(texts(tmp_path / "out.jsonl"))
    assert p.returncode == 130 and 0 < done < 2000, err
    said = but_compiler(err).splitlines()
    said = [line for line in said if not line.startswith("batchlab: faster: ")]
    assert len(said) == 1 and f" {done} of 2000 requests done" in said[0]
    assert job(force=True, limit=done + 5).run(llm()).done >= done


@posix
def test_full_disk(folder, tmp_path, job):
    import resource

    goes_on = job([ask(i) for i in range(60)])
    p = subprocess.run(
        command(folder, "-o", "out.jsonl"),
        cwd=tmp_path,
        env=ENV | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)),
    )
    said = [s for s in but_compiler(p.stderr).splitlines() if "faster: " not in s]
    assert p.returncode == 1 and len(said) == 1 and "out.jsonl (File too large)" in said[0]
    out = tmp_path / "out.jsonl"
    kept = out.read_bytes()
    assert 8000 < len(kept) <= 9000 and kept.endswith(b"}\n")
    assert goes_on.run(LLM(folder)).before == kept.count(b"\n")
    assert out.read_bytes().startswith(kept) and len(texts(out)) == 60


def test_no_room_for_small_files(tmp_path, monkeypatch, job):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JobError, match="settings.json .No space"):
        job([ask(1)]).run(llm())
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_input_that_grows_while_it_is_answered(tmp_path, job):
    "What was counted is answered; a new key, or a column of the answers, waits for the next run."
    growing, more = job([dict(prompt="a"), dict(prompt="b")]), dict(prompt="c", text="mine")

    def begins():
        with open(tmp_path / "in.jsonl", "a") as f:
            f.write(json.dumps(more) + "\n")
        return llm()

    result = growing.run(begins)
    assert (result.done, result.total, len(rows(tmp_path / "out.jsonl"))) == (2, 2, 2)


@functools.cache
def example_job(ordered=False):
    "Bytes of a job's input, its answers and its settings, undisturbed."
    import tempfile

    asked = [(chat if i % 2 else ask)(i) for i in range(12)] + [ask(3), ask(13, temperature=-1)]
    with tempfile.TemporaryDirectory() as d:
        source, out = Path(d) / "in.jsonl", Path(d) / "out.jsonl"
        write(source, asked)
        assert Job(source, out, ordered=ordered, keep_journal=True).run(llm()).failed == 2
        return source.read_bytes(), out.read_bytes(), settings_file(out).read_bytes()


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
    n = whole.count(b"\n")
    assert result.before in (n, n + 1)  # one more if only its line end was torn off
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
KEYWORDS = """type properties items anyOf enum const $ref $defs required maxLength minimum pattern
    additionalProperties allOf""".split()
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
FIELDS = """temperature top_p top_k min_p n max_tokens max_completion_tokens stop stop_token_ids
    bad_words seed logprobs top_logprobs logit_bias allowed_token_ids min_tokens repetition_penalty
    presence_penalty stream ignore_eos response_format structured_outputs tools prompt messages
    model best_of skip_special_tokens detokenize priority""".split()


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
@example(lines=[json.dumps(ask(100, model=[])).encode(), 1], crlf=False)
def test_rubbish_fails_alone(tmp_path_factory, lines, crlf):
    d = tmp_path_factory.mktemp("fuzz")
    lines = [(x, json.dumps(ask(x)).encode() if isinstance(x, int) else x) for x in lines]
    data = (b"\r\n" if crlf else b"\n").join(s for _, s in lines)
    (d / "in.jsonl").write_bytes(data)
    Job(d / "in.jsonl", d / "out.jsonl", form="batch", look_ahead=5, timeout=60).run(llm())
    found = by_key((d / "out.jsonl").read_bytes()) if (d / "out.jsonl").exists() else {}
    split = [s for s in data.split(b"\n")]
    assert sorted(found) == [k for k, s in enumerate(split, 1) if s.strip()]
    used = [r for r in found.values() if error_of(r) != "duplicate_custom_id"]
    ids = Counter(r["custom_id"] for r in used if r["custom_id"] is not None)
    assert not ids or max(ids.values()) == 1
    good, seen = {json.dumps(ask(x)).encode(): x for x, _ in lines if isinstance(x, int)}, set()
    for k, s in enumerate(split, 1):
        x = good.get(s.removesuffix(b"\r"))
        if x is None:
            continue
        r = found[k]
        if x in seen:
            assert error_of(r) == "duplicate_custom_id" and r["custom_id"] == ask(x)["custom_id"]
        else:
            assert r["response"]["body"]["choices"][0]["text"] == alone(x)
        seen.add(x)
    assert all(f"line {k}: " in r["error"]["message"] for k, r in found.items() if r["error"])


def test_a_hosted_file_runs_unchanged(tmp_path, job):
    "Lines as the guides of hosted services and of vLLM's runner show them."
    talk = [
        dict(role="developer", content="You are a helpful assistant."),
        dict(role="user", content=[dict(type="text", text="Hello world!")]),
    ]
    shared = dict(model="gpt-4o-mini", messages=talk)
    usual = dict(stream=False, user="u", response_format=dict(type="text"), tools=None)
    bodies = (
        ("chat/completions", shared | dict(max_completion_tokens=9, n=2, seed=1)),
        (
            "chat/completions",
            shared | usual | dict(max_tokens=6, temperature=0, logprobs=True, top_logprobs=3),
        ),
        ("completions", dict(model="m", prompt=["Hi"], logprobs=2, seed=3)),
        ("moderations", dict(model="m", input="x")),
    )
    asked = [
        dict(custom_id=f"request-{i}", method="POST", url=f"/v1/{url}", body=body)
        for i, (url, body) in enumerate(bodies, 1)
    ]
    refused = job(asked, output="no.jsonl", model_name="tiny").run(llm())
    assert refused.failed == 4 and "--any-model" in refused.first_failure
    assert [*map(error_of, rows(tmp_path / "no.jsonl"))].count("model_not_found") == 3
    said, how = [], dict(error_file="err.jsonl", model_name="tiny", any_model=True)
    result = job(say=said.append, **how).run(llm())
    assert (result.answered, result.failed, said) == (3, 1, [])
    found = sorted(rows(tmp_path / "out.jsonl"), key=lambda r: r["custom_id"])
    for r in found:
        assert set(r) == {"id", "custom_id", "response", "error"} and r["error"] is None
        assert set(r["response"]) == {"status_code", "request_id", "body"}
        assert r["response"]["status_code"] == 200
        body = r["response"]["body"]
        assert {"id", "object", "created", "model", "choices", "usage"} == set(body)
        u = body["usage"]
        assert u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"]
        assert body["model"] == "tiny"
        assert {c["finish_reason"] for c in body["choices"]} <= {"stop", "length"}
    one, two, three = (r["response"]["body"] for r in found)
    assert [c["index"] for c in one["choices"]] == [0, 1]
    tokens = two["choices"][0]["logprobs"]["content"]
    assert len(tokens) == two["usage"]["completion_tokens"]
    assert all(len(t["top_logprobs"]) == 3 for t in tokens)
    logprobs = three["choices"][0]["logprobs"]
    assert three["object"] == "text_completion" and three["usage"]["completion_tokens"] <= 16
    assert len({len(logprobs[k]) for k in ("tokens", "token_logprobs", "text_offset")}) == 1
    [bad] = rows(tmp_path / "err.jsonl")
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("request-4", 400)
    assert bad["response"]["body"]["error"]["code"] == error_of(bad) == "invalid_url"


def test_an_id_that_is_used_twice_is_the_first_lines_after_an_interruption_too(tmp_path, job):
    "The second line fails at once, and its record may be the only one on the disk."
    one = job([ask(1, max_tokens=3), ask(2), ask(1)])
    one.run(llm())
    out = tmp_path / "out.jsonl"
    whole = rows(out)
    write(out, [r for r in whole if error_of(r) == "duplicate_custom_id"])
    assert [r["custom_id"] for r in rows(out)] == ["r1"]
    one.run(llm())
    by_line = lambda found: {r["id"]: error_of(r) for r in found}
    assert by_line(rows(out)) == by_line(whole)


def test_seeds_hold_whatever_runs_beside(tmp_path, job):
    asked = [ask(i, temperature=1.2, seed=i, max_tokens=12, ignore_eos=True) for i in range(20)]
    job(asked, output="a.jsonl").run(llm())
    job(asked[::-3] + [ask(30)], output="b.jsonl").run(llm())
    a, b = texts(tmp_path / "a.jsonl"), texts(tmp_path / "b.jsonl")
    del b["r30"]
    assert b.items() <= a.items() and len(b) == 7


def test_one_run_at_a_time(tmp_path, job):
    side = tmp_path / "err.jsonl.batchlab"
    side.mkdir()
    code = f"from filelock import FileLock; l = FileLock({str(side / 'lock')!r}); l.acquire(); print(1, flush=True); input()"
    p = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    p.stdout.readline()
    one = job([ask(1)], error_file="err.jsonl")
    with pytest.raises(JobError, match="another run is writing .*err.jsonl"):
        one.run(llm())
    p.communicate(b"\n")
    assert not (tmp_path / "out.jsonl.batchlab").exists()  # of what was refused nothing is left
    assert one.run(llm()).answered == 1
    names = ["err.jsonl", "in.jsonl", "out.jsonl"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_what_changed_is_refused(tmp_path, job):
    source, out, usual = tmp_path / "in.jsonl", tmp_path / "out.jsonl", dict(top_k=3)
    first = lambda asked=None, **more: job(asked, **dict(sampling_params=usual) | more)
    first([ask(i) for i in range(4)], limit=2).run(llm())
    kept, requests = out.read_bytes(), source.read_bytes()
    other = LLM(tiny_model("llama", seed=1, num_hidden_layers=1), tiny_tokenizer())
    for change, model, word in (
        (dict(sampling_params=dict(top_k=4)), llm(), "'top_k': 3"),
        (dict(sampling_params=None), llm(), "sampling param"),
        (dict(error_file="e"), llm(), "error file"),
        ({}, other, "model"),
    ):
        with pytest.raises(JobError, match=word):
            first(**change).run(model)
        assert out.read_bytes() == kept and settings_file(out).exists()
    source.write_bytes(requests.replace(b"tell me 1", b"tell me I"))
    with pytest.raises(JobError, match="line 2 of .* is not what it was"):
        first().run(llm())
    assert first([ask(i) for i in (0, 1, 2, 3, 9)]).run(llm()).answered == 5  # more is no change
    assert first([ask(i) for i in (0, 1, 2, 3, 9, 10)], force=True).run(other).answered == 6
    assert not settings_file(out).exists()
    out.unlink()  # taken away: a new beginning
    assert first(sampling_params=None).run(llm()).answered == 6


@pytest.mark.parametrize("name", ["out.jsonl", "err.jsonl"])
@pytest.mark.parametrize("force", [False, True])
def test_a_foreign_file_is_left_alone(tmp_path, job, name, force):
    for data in (b"my thesis\n", b'{"custom_id": "r1"}\n', b"one\ntwo", b'{"id": "batch_req_x"}'):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(JobError, match="is no answer of a job"):
            job([ask(1)], error_file="err.jsonl", force=force).run(llm())
        assert (tmp_path / name).read_bytes() == data


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet", "out.jsonl.gz"])
def test_a_finished_output_is_done(tmp_path, job, name):
    "It is not gone on with, and answers of its lines are asked for once."
    again, out = functools.partial(job, output=name, ordered=True), tmp_path / name
    begun = again([ask(i) for i in range(3)], limit=2).run(llm())
    assert (begun.answered, settings_file(out).exists()) == (2, True)
    assert (again().run(llm()).before, settings_file(out).exists()) == (2, False)
    kept = out.read_bytes()
    for change in ({}, dict(sampling_params=dict(top_k=4)), dict(retry_errors=True)):
        result = again(**change).run(None)
        assert (result.answered, result.before, out.read_bytes()) == (3, 3, kept)
    with pytest.raises(JobError, match="line 1 .* is not what it was when it was answered"):
        again([ask(i) for i in (7, 1, 2)]).run(None)
    grown = [ask(i) for i in range(5)]
    for force in (False, True)[: 1 + (name != "out.jsonl")]:
        with pytest.raises(JobError) as e:
            again(grown, force=force).run(None)
        assert e.value.fields["n"] == 2 and "give another output" in str(e.value)
        assert ("force=True" in str(e.value), out.read_bytes()) == (name == "out.jsonl", kept)
    if name == "out.jsonl":
        assert again(grown, force=True).run(llm()).before == 3 and len(texts(out)) == 5


def test_retry_and_errors_in_their_own_file(tmp_path, job):
    out, err = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    asked = [ask(i) for i in range(8)] + [ask(99, n=0)]
    late = job(asked, error_file="err.jsonl", timeout=1e-9).run(llm())
    assert (late.answered, late.failed, out.read_bytes()) == (0, 9, b"")
    assert {r["response"]["status_code"] for r in rows(err)} == {400, 408}
    again = lambda **more: job(error_file="err.jsonl", **more)
    assert again().run(None).before == 9  # a failure is an answer, until it is asked for again
    result = again(retry_errors=True).run(llm())
    assert (result.answered, result.failed) == (8, 1)
    assert len(texts(out)) == 8 and len(rows(err)) == 1
    with pytest.raises(JobError, match="more than 0"):
        again(retry_errors=True, max_errors=0).run(llm())
    assert len(texts(out)) == 8 and len(rows(err)) == 1


def test_cut_compression(tmp_path, job):
    asked = [ask(i, user=str(random.Random(i).random())) for i in range(400)]
    whole = gzip.compress("".join(json.dumps(d) + "\n" for d in asked).encode())
    (tmp_path / "in.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    packed = lambda: job(input="in.jsonl.gz", output="out.jsonl.gz")
    with pytest.raises(JobError, match="beyond line") as e:
        packed().run(llm())
    done = len(rows(journal_of(tmp_path / "out.jsonl.gz")))
    assert e.value.status == 1 and 50 < done < 400
    (tmp_path / "in.jsonl.gz").write_bytes(whole)
    result = packed().run(llm())
    assert (result.before, result.answered) == (done, 400)
    answers = gzip.open(tmp_path / "out.jsonl.gz", "rt")
    assert len({json.loads(s)["custom_id"] for s in answers}) == 400


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet", "jsonl.gz"])
def test_tables(tmp_path, kind, job):
    import io

    parquet = "Parquet files need pyarrow with Parquet built in"
    prompts = {f"q{i}": f'What is "{i}",\nand why?' * (1 + i % 3) for i in range(30)}
    source, out, column = tmp_path / f"in.{kind}", tmp_path / f"out.{kind}", {}
    if kind == "jsonl.gz":
        lines = [json.dumps(dict(id=k, prompt=v)) for k, v in prompts.items()]
        source.write_bytes(gzip.compress("\n".join(lines).encode()))
    else:
        column = dict(prompt_column="question", id_column="id")
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow", reason=parquet)
        pq = pytest.importorskip("pyarrow.parquet", reason=parquet)
        pq.write_table(pa.table(dict(id=[*prompts], question=[*prompts.values()])), source)
    elif column:
        text = io.StringIO()
        csv.writer(text).writerows([["id", "question"], *prompts.items()])
        with (gzip.open if kind == "csv.gz" else open)(source, "wb") as f:
            f.write(text.getvalue().encode())
    params = dict(max_tokens=4)
    job(input=source.name, output=out.name, sampling_params=params, **column).run(llm())
    greedy = SamplingParams(temperature=0, **params)
    clean = lambda out: out.outputs[0].text.encode("utf-8", "replace").decode()
    want = dict(zip(prompts, map(clean, llm().generate([*prompts.values()], greedy))))
    if kind == "parquet":
        found = pq.read_table(out).to_pylist()
    elif kind == "jsonl.gz":
        found = [json.loads(s) for s in gzip.open(out, "rt")]
    else:
        opened = gzip.open if kind == "csv.gz" else open
        found = [*csv.DictReader(opened(out, "rt", encoding="utf-8", newline=""))]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("out")] == [out.name]
    assert [r["id"] for r in found] == [*want] or kind == "jsonl.gz"  # in order
    text = lambda r: r["text"].encode("utf-8", "replace").decode()
    assert {r["id"]: text(r) for r in found} == want and len(found) == 30


def test_broken_rows_of_a_table(tmp_path, job):
    table = b'prompt,custom_id\ngood,a\ncaf\xe9,b\n"%s",c\nshort\n,d\n"half",a\nlast,e\n'
    (tmp_path / "in.csv").write_bytes(table % (b"x" * 1000))
    job(input="in.csv", sampling_params=dict(max_tokens=2)).run(llm())
    found = {r["row"]: error_of(r) for r in rows(tmp_path / "out.jsonl")}
    bad = {2: "invalid_request", 3: "context_length_exceeded", 5: "invalid_request"}
    assert found == dict.fromkeys(range(1, 8)) | bad | {6: "duplicate_custom_id"}
    for data in (b"a,b\n1,2\n", b""):
        (tmp_path / "bad.csv").write_bytes(data)
        with pytest.raises(JobError, match="no column"):
            job(input="bad.csv", output="o.jsonl").run(llm())


@pytest.mark.parametrize("ordered", [False, True])
def test_only_a_block_is_held(tmp_path, monkeypatch, ordered, job):
    "Lines read and not yet settled stay within the look-ahead; in input order, early answers held do too."
    ends = [40 if i % 50 == 0 else 1 for i in range(300)]
    asked = [ask(i, max_tokens=n, ignore_eos=True) for i, n in enumerate(ends)]
    one, read, most, held = job(asked, ordered=ordered, look_ahead=16), [], 0, 0
    line, flush = one.line, Run.flush

    def counted(*a):
        read.append(a[0])
        return line(*a)

    def look(self):
        nonlocal most, held
        flush(self)
        if read:
            most = max(most, len(read) - one.result.done)
            held = max(held, len(self.outbox.held))

    one.line = counted
    monkeypatch.setattr(Run, "flush", look)
    one.run(llm())
    room = 4 * 5 // 4 + 1
    assert most <= 16 + room and held <= (4 * 16 + 16 if ordered else 0)
    if ordered:
        found = [r["custom_id"] for r in rows(tmp_path / "out.jsonl")]
        assert found == [f"r{i}" for i in range(300)]


@posix
def test_pipes(folder, tmp_path, job):
    "Requests from standard input; answers to standard output, until its reader leaves."
    calm = job([ask(i) for i in range(40)], output="calm.jsonl")
    assert calm.run(LLM(folder, dtype="fp32")).answered == 40
    data, want = (tmp_path / "in.jsonl").read_text(encoding="utf-8"), texts(tmp_path / "calm.jsonl")
    args = [*CMD, "-i", "-", "--model", folder, "--dtype", "fp32", "-o"]
    how = dict(cwd=tmp_path, env=ENV, timeout=120)
    run = lambda *a, input=data: warm([*args, *a], input=input, **how)
    p = run("-", "--trace", "trace.json")
    (tmp_path / "piped.jsonl").write_text(p.stdout, encoding="utf-8")
    assert p.returncode == 0 and texts(tmp_path / "piped.jsonl") == want, p.stderr
    assert "can not go on" in p.stderr and not [*tmp_path.glob("-*")]
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert trace["totals"]["requests"] == dict(Counter(f for _, f in want.values()))
    assert run("kept.jsonl", "--limit", "15").returncode == 0
    assert len(rows(tmp_path / "kept.jsonl")) == 15
    assert "15 of them before" in run("kept.jsonl").stderr  # the same input again: it goes on
    assert texts(tmp_path / "kept.jsonl") == want
    os.mkfifo(tmp_path / "fifo")
    shell = lambda line: subprocess.run(line, shell=True, capture_output=True, **how)
    for pipe in ("/dev/stdin", "fifo"):  # read whole first: a job reads its input twice
        whole = shlex.join([*args, "named.jsonl"]).replace("-i -", f"-i {pipe}")
        p = shell(("cat in.jsonl > fifo & " if pipe == "fifo" else "cat in.jsonl | ") + whole)
        assert p.returncode == 0 and texts(tmp_path / "named.jsonl") == want, p.stderr
        (tmp_path / "named.jsonl").unlink()
    with pytest.raises(JobError, match="is no file"):
        job(input="fifo").check()
    p = run("none.jsonl", input="")
    assert p.returncode == 2 and "standard input is empty" in p.stderr
    head = shell(f"{shlex.join(args)} - < in.jsonl | head -n 1")
    assert len(head.stdout.splitlines()) == 1 and b"Traceback" not in head.stderr


def test_plan_counts_what_runs(tmp_path, job):
    same = "one beginning for all of these prompts, "
    asked = [ask(i, prompt=same + "x" * i, ignore_eos=True) for i in range(30)]
    one = job([*asked, ask(1)])
    plan = one.plan(llm())
    assert not (tmp_path / "out.jsonl").exists()
    result = one.run(llm())
    assert (plan.requests, plan.failed) == (30, 1)
    assert plan.prompt_tokens == result.prompt_tokens
    assert plan.max_output_tokens == result.output_tokens
    assert 29 * 32 <= plan.shared_tokens < plan.prompt_tokens
    assert plan.seconds > 0 and plan.memory.slots == 4
    assert "that of line 2 already" in str(plan)


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
    args = ["run", "-i", "in.jsonl", "-o", "out.jsonl", "--error-file", "err.jsonl"]
    assert main(args, llm=llm()) == 1
    assert "6 of 6 requests done, 1 failed" in capsys.readouterr().err


def plain(**keys):
    return parse_line(1, json.dumps(keys).encode(), "plain")


SCHEMA = dict(type="object", properties=dict(a=dict(type="boolean")), required=["a"])
JSON = dict(structured_outputs=dict(json=SCHEMA))
OPENAI_JSON = dict(type="json_schema", json_schema=dict(name="x", schema=SCHEMA))


@pytest.mark.parametrize(
    "keys,want",
    [
        (dict(response_format=OPENAI_JSON), JSON),
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
        (dict(guided_json=SCHEMA), JSON),
        (dict(guided_regex="a+"), dict(structured_outputs=dict(regex="a+"))),
        (dict(guided_grammar="x"), dict(structured_outputs=dict(grammar="x"))),
        (dict(logprobs=2), dict(logprobs=2)),
        (dict(logprobs=True, top_logprobs=3), dict(logprobs=3)),
        (dict(tools=[], stream=False, best_of=1, tool_choice="none", detokenize=True), {}),
        (dict(tools=None, num_beams=None), {}),
    ],
)
def test_settings_of_a_plain_line_are_used(keys, want):
    line = plain(prompt="p", **keys)
    assert (line.failure, line.options, line.ignored) == (None, want, ())


@pytest.mark.parametrize(
    "keys,words",
    [
        (dict(tools=[{}]), "tools"),
        (dict(best_of=3), "best_of=3"),
        (dict(stream=True), "stream=true"),
        (dict(tool_choice="auto", functions=[1]), "functions"),
        (dict(num_beams=4), "'num_beams' transformers'"),
        (dict(max_length=9), "'max_length' max_tokens"),
        (dict(do_sample=True), "do_sample temperature"),
        (dict(maxTokens=9), "'maxTokens' 'max_tokens'"),
        ({"top-p": 0.5}, "'top-p' 'top_p'"),
        (dict(guided_decoding_backend="x"), "guided_decoding_backend"),
        (dict(prompt_logprobs=1), "prompt_logprobs"),
        (dict(system="Be brief."), "'system' role"),
        (dict(chat_template="x"), "chat_template"),
        (dict(extra_body=dict(top_k=1)), "extra_body top_k"),
        (dict(parameters=dict(seed=1)), "parameters"),
        (dict(sampling_params=dict(best_of=2)), "best_of=2"),
        (dict(sampling_params=dict(label="x")), "'label'"),
        (dict(sampling_params=[1]), "sampling_params object"),
        (dict(sampling_params=dict(n=1), n=2), "n"),
        (dict(max_new_tokens=4), "'max_new_tokens' 'max_tokens'"),
        (dict(max_tokens=3, max_completion_tokens=4), "max_completion_tokens=4 max_tokens=3"),
        (dict(top_logprobs=2), "top_logprobs"),
        (dict(guided_regex="a", guided_choice=["a"]), "guided_regex guided_choice"),
        (dict(id=[1]), "id"),
        (dict(custom_id=0.5), "custom_id"),
        (dict(response_format=dict(type="xml")), "response_format json_schema"),
        (dict(top_a=0.1), "top_a"),
        (dict(length_penalty=1.0), "length_penalty"),
        (dict(json_schema={}), "structured_outputs"),
    ],
)
def test_settings_nobody_can_honour_fail_their_line(keys, words):
    line = plain(prompt="p", **keys)
    assert line.failure and all(w in line.failure[1] for w in words.split()), line.failure


def test_no_setting_of_ours_or_of_transformers_is_passed_over():
    "Whatever its name, a setting is used or fails its line: none is among the ignored keys."
    from dataclasses import fields
    from transformers import GenerationConfig

    theirs = {k for k in GenerationConfig().to_dict() if k[0] != "_"}
    for k in sorted({f.name for f in fields(SamplingParams)} | theirs):
        line = plain(prompt="p", **{k: "x"})
        assert line.failure or line.options and not line.ignored, k


def batch(d):
    return parse_line(1, json.dumps(d).encode())


def test_a_setting_beside_the_body_is_no_setting():
    line = batch(ask(1) | dict(response_format=dict(type="json_object")))
    assert "'response_format' stands beside the body" in line.failure[1]
    line = batch(ask(1) | dict(label="x", metadata=dict(n=3), model="m"))
    assert (line.failure, line.ignored) == (None, ("label",))
    line = batch(ask(1, guided_choice=["a"], max_completion_tokens=1))
    assert line.failure[1].startswith("max_completion_tokens=1 and max_tokens=")


def test_plain_lines_may_have_nan_and_batch_lines_not():
    "Python writes NaN where a value is missing; the API's JSON knows none."
    line = parse_line(1, b'{"prompt": "p", "score": NaN, "max_tokens": 2}', "plain")
    assert (line.failure, line.options, line.ignored) == (None, dict(max_tokens=2), ("score",))
    assert "NaN" in batch(ask(1, seed=float("nan"))).failure[1]


def test_a_failure_keeps_the_id_that_is_good():
    line = plain(prompt="p", id=[1], custom_id="c")
    assert line.failure[1].startswith("id must be") and line.ids == dict(custom_id="c")


@pytest.mark.parametrize("first", ["plain", "batch"])
def test_a_line_of_the_other_form_says_so(tmp_path, job, first):
    "A file is of the form of its first good line, and a line of the other fails as such, with its id."
    lines = dict(plain=dict(custom_id="p", prompt="Hi", max_tokens=1), batch=ask(1))
    good, other = lines.pop(first), *lines.values()
    assert job([good, other]).run(llm()).failed == 1
    [bad] = [r for r in rows(tmp_path / "out.jsonl") if r["error"]]
    assert bad["custom_id"] == other["custom_id"]
    assert "line 2" in bad["error"]["message"] and "file of its own" in bad["error"]["message"]


def test_answers_of_older_jobs_are_known():
    "What names a line or a row in a file of answers is what it always was."
    from batchlab.jobs.lines import digest_of
    from batchlab.jobs.tables import AskedRow

    assert [digest_of(raw) for raw in (b"{}", AskedRow("a"))] == ["d905e156", "5eae67b9"]


def test_plain_lines_end_to_end(tmp_path, job):
    "A constraint holds, what can't be honoured fails alone, and keys of the owner are named once."
    pytest.importorskip("llguidance", reason="structured outputs need llguidance")
    asked = [dict(id=i, prompt="Salt or sweet?", label="salt", source=i) for i in range(6)]
    truth = dict(name="x", schema=dict(type="boolean"))
    asked[1] |= dict(guided_choice=["salt", "sweet"])
    asked[2] |= dict(response_format=dict(type="json_schema", json_schema=truth))
    asked[3] |= dict(tools=[dict(type="function")])
    asked[5] |= dict(extra=1)
    asked[4] |= dict(max_completion_tokens=2, ignore_eos=True)
    params, said = dict(max_tokens=9), []
    one = job(asked, sampling_params=params, say=said.append)
    assert "ignored" not in str(one.dry_run()) + str(one.plan(llm(), calibrate=False))
    assert (one.run(llm()).failed, said) == (1, [])
    found = {r["id"]: r for r in rows(tmp_path / "out.jsonl")}
    assert found[1]["text"] in ("salt", "sweet") and found[2]["text"] in ("true", "false")
    assert found[3]["error"]["message"].startswith("line 4: tools=")
    assert found[4]["usage"]["completion_tokens"] == 2
    [alone] = llm().generate("Salt or sweet?", SamplingParams(temperature=0, **params))
    assert found[0]["text"] == alone.outputs[0].text


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
@pytest.mark.parametrize("form", ["plain", "text", "chat"])
def test_tables_keep_every_answer(tmp_path, kind, form, job):
    "With n and logprobs a table has all that the records have, and each row the tokens of its own answer."
    parquet, plain = kind == "parquet", form == "plain"
    if parquet:
        why = "Parquet files need pyarrow with Parquet built in"
        pq = pytest.importorskip("pyarrow.parquet", reason=why)
    of_plain = lambda i, **b: dict(custom_id=f"r{i}", **ask(i, **b)["body"])
    make = dict(text=ask, chat=chat, plain=of_plain)[form]
    k = dict(logprobs=True, top_logprobs=2) if form == "chat" else dict(logprobs=2)

    def table(name):
        if parquet:
            return pq.read_table(tmp_path / f"{name}.{kind}").to_pylist()
        opened = gzip.open if kind == "csv.gz" else open
        with opened(tmp_path / f"{name}.{kind}", "rt", encoding="utf-8", newline="") as f:
            return [*csv.DictReader(f)]

    def run(lines):
        job(lines, output=f"whole.{kind}", keep_journal=True).run(llm())
        job(output=f"again.{kind}", limit=2).run(llm())
        job(output=f"again.{kind}").run(llm())  # gone on with: the same
        whole = table("whole")
        assert same(table("again"), whole, llm().backend)
        left = Path(journal_of(tmp_path / f"again.{kind}")).exists()
        assert left == any(t["error"] for t in whole)  # to try again
        return whole

    front = ["line" if plain else "id", "custom_id"]
    usual = ["text", "finish_reason", "prompt_tokens", "completion_tokens", "error"]
    end = ["request_id"] * plain
    old = run([make(i) for i in range(3)])
    assert [*old[0]] == [*front, *usual, *end] and len(old) == 3
    for name in ("whole", "again"):
        (tmp_path / f"{name}.{kind}").unlink()
        drop_side(tmp_path / f"{name}.{kind}")
    several = make(1, n=3, seed=1, temperature=1.0, **k)
    new = run([make(0), several, make(2, temperature=-1), make(3, **k)])
    more = ["logprobs", *["cumulative_logprob"] * plain]
    assert [*new[0]] == [*front, "index", *usual, *more, *end] and len(new) == 6
    none = lambda x: None if x == "" and not parquet else x
    clean = lambda s: s.encode("utf-8", "replace").decode()
    for r in rows(journal_of(tmp_path / f"whole.{kind}")):
        mine = [t for t in new if t["custom_id"] == r["custom_id"]]
        body = r if plain else r["response"]["body"]
        if r["error"]:
            [t] = mine
            assert none(t["index"]) is none(t["logprobs"]) is None
            assert t["error"] == r["error"]["message"]
            continue
        choices = body.get("choices") or body.get("outputs") or [body]
        assert len(mine) == len(choices) == (3 if r["custom_id"] == "r1" else 1)
        for c, t in zip(choices, mine):
            text = c["message"]["content"] if form == "chat" else c["text"]
            assert (t["text"], t["finish_reason"]) == (clean(text), c["finish_reason"])
            written = c.get("completion_tokens", body["usage"]["completion_tokens"])
            assert int(t["completion_tokens"]) == written
            index = None if len(choices) == 1 else c["index"]
            assert none(t["index"]) == (index if parquet or index is None else str(index))
            assert (none(t["logprobs"]) and json.loads(t["logprobs"])) == c.get("logprobs")
        total = sum(int(t["completion_tokens"]) for t in mine)
        assert total == body["usage"]["completion_tokens"]


def test_a_speed_that_is_tried_is_a_possible_one(monkeypatch):
    "By a clock that ticks once a step, whatever the machine does meanwhile."
    from types import SimpleNamespace
    from batchlab.jobs import planning as jobs

    limits = dict(max_num_seqs=8, max_num_batched_tokens=64, compile=False)
    llm, ticks = LLM(tiny_model("llama"), tiny_tokenizer(), **limits), iter(range(10**6))
    monkeypatch.setattr(jobs, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    # one step reads all, each further one writes four tokens
    assert jobs.speed(llm, [[5 + i] * 8 for i in range(4)], 16) == (4 * 8 / 1, 4)
    long = [[3 + i] * 200 for i in range(6)]  # four steps to a prompt
    (slow, fast), (least, most), tried = jobs.rates(llm, long, budget=400)
    assert tried == 2 and 0 < slow <= fast <= 64 and 0 < least <= most <= 6


@pytest.mark.parametrize(
    "how,advice",
    [
        (dict(max_num_seqs=1), "max_num_seqs=64"),
        (dict(compile=False), "compile=False"),
        (dict(enable_prefix_caching=False), "enable_prefix_caching=False"),
        (dict(strategy="loop"), "strategy='loop'"),
        (dict(kv_cache_bytes=2**16), "kv_cache_bytes"),
    ],
)
def test_a_plan_says_what_would_help(job, how, advice):
    shared = "The same beginning of all, and then "
    one = job(
        [dict(prompt=shared + "a" * i) for i in range(12)], sampling_params=dict(max_tokens=4)
    )
    plan = lambda **kw: one.plan(LLM(tiny_model("llama"), tiny_tokenizer(), **kw), calibrate=False)
    slow, good = plan(**how), plan()
    assert advice in "\n".join(map(str, slow.advice))
    assert advice not in "\n".join(map(str, good.advice))
    assert good.shared_tokens > 0 == plan(enable_prefix_caching=False).shared_tokens


def test_a_run_with_slow_settings_says_so(tmp_path, capsys, monkeypatch, folder):
    from batchlab.cli import main

    monkeypatch.chdir(tmp_path)
    write("in.jsonl", [dict(prompt="a"), dict(prompt="b"), dict(prompt="c" * 400)])
    usual = ["-i", "in.jsonl", "--model", folder]
    run = lambda out, *flags: main(["run", *usual, "-o", out, "--max-tokens", "2", *flags])
    assert run("slow.jsonl", "--max-num-seqs", "1") == 1
    assert "faster: 1 slot: " in (err := capsys.readouterr().err) and "--max-num-seqs 64" in err
    assert run("usual.jsonl", "--truncate", "auto") == 0
    assert "faster" not in capsys.readouterr().err
    assert {r["line"]: r for r in rows("usual.jsonl")}[3]["usage"]["prompt_tokens"] == 254
    slots = ["--truncate", "20", "--max-num-seqs", "1", "--no-calibration"]
    assert main(["plan", *usual, *slots]) == 0
    assert "give --max-num-seqs 64" in capsys.readouterr().out


def test_a_key_that_stands_twice_in_an_object_fails_its_line():
    for raw in (b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "x": [{"y": 1, "y": 1}]}'):
        line = parse_line(1, raw, "plain")
        assert line.failure[1].startswith("not JSON (") and "stands twice" in line.failure[1]


def test_a_number_that_no_float_holds_is_kept(tmp_path, job):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "x": [1e400, -1e400, 1e300], "y": NaN}\n')
    assert job(sampling_params=dict(max_tokens=1)).run(llm()).failed == 0
    [found] = rows(tmp_path / "out.jsonl")
    assert (found["x"], found["y"]) == (["1e400", "-1e400", 1e300], None)
    line = parse_line(1, b'{"prompt": "a", "temperature": 1e400}', "plain")
    assert line.options == dict(temperature="1e400")
    with pytest.raises(ParamError, match="temperature"):
        SamplingParams.of(line.options)


@pytest.mark.parametrize("form", ["batch", "plain"])
@pytest.mark.parametrize("output", ["out.jsonl", "out.csv"])
def test_a_line_whose_id_is_used_already_says_which(tmp_path, job, form, output):
    "Its record has its id, and takes it from no line that still waits for its answer."
    line = ask if form == "batch" else lambda i: dict(custom_id=f"r{i}", **ask(i)["body"])
    asked = [line(1), line(2), line(1)]
    go = lambda **how: job(asked, output=output, error_file="err.jsonl", **how).run(llm())
    assert (go().answered, go().before) == (2, 3)
    [bad] = rows(tmp_path / "err.jsonl")
    assert (bad["custom_id"], error_of(bad)) == ("r1", "duplicate_custom_id")
    (tmp_path / output).unlink()  # as if killed before their answers
    assert (go().answered, go(retry_errors=True).answered) == (2, 2)
    assert len(rows(tmp_path / "err.jsonl")) == 1


def test_a_summary_says_how_many_drafted_tokens_were_right(job):
    drafting = LLM(tiny_model("llama"), tiny_tokenizer(), speculation="lookup", max_num_seqs=4)
    drafting.engines.proposer.always = True
    one = job([ask(i, prompt="one two one two " * 4, max_tokens=9) for i in range(6)])
    result, stats = one.run(drafting), drafting.stats()
    assert result.drafted_tokens == stats.drafted_tokens > 0
    said = f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens were right"
    assert said in str(result) and result.figures["drafted_tokens"] == stats.drafted_tokens
