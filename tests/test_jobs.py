"Jobs killed, starved, fed with rubbish and run twice: every line has one record, and every good line its answer."

import contextlib, functools, gzip, json, os, random, signal, subprocess, sys, threading
from collections import Counter
from pathlib import Path

import pytest

from helpers import (
    ENV,
    ask,
    but_compiler,
    by_line,
    chat,
    ended_by,
    examples,
    kept_model,
    needs,
    one_thread,
    posix,
    read_lines,
    read_table,
    same,
    write_lines,
)
from warm import warm
from filelock import FileLock
from hypothesis import example, given, strategies as st

from batchlab import LLM, JobError, SamplingParams
from batchlab.api.run import options_of
from batchlab.jobs.job import Job, Run, lock
from batchlab.jobs.journal import drop_side, journal_of, settings_file
from batchlab.jobs.progress import JobResult, Progress
from batchlab.jobs.lines import ParamsCache, parse_line
from batchlab.models import tiny_model, tiny_tokenizer

CMD = [sys.executable, "-m", "batchlab.cli", "run"]

pytestmark = one_thread


@functools.cache
def llm():
    return LLM(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kept_model(tmp_path_factory.mktemp("model"))


def error_of(record):
    return record["error"] and record["error"]["code"]


@pytest.fixture
def job(tmp_path):
    "Makes a job from in.jsonl to out.jsonl, and writes the requests that it is given."

    def make(asked=None, input="in.jsonl", output="out.jsonl", **more):
        if asked is not None:
            write_lines(tmp_path / input, asked)
        if "error_file" in more:
            more["error_file"] = tmp_path / more["error_file"]
        return Job(tmp_path / input, tmp_path / output, **more)

    return make


def texts(path):
    "Text and finish reason by id; each id once, nothing failed."
    found = [(r["custom_id"], r["response"]["body"]["choices"][0]) for r in read_lines(path)]
    assert len({i for i, _ in found}) == len(found)
    of = lambda c: (c.get("message") or {}).get("content", c.get("text"))
    return {i: (of(c), c["finish_reason"]) for i, c in found}


def command(folder, *args):
    return [*CMD, "-i", "in.jsonl", "--model", folder, "--max-num-seqs", "4", *args]


@posix
def test_killed_at_random_moments(folder, tmp_path, job):
    n, rng, model = 600, random.Random(5), LLM(folder, dtype="fp32", max_num_seqs=4)
    calm = job([(chat if i % 3 else ask)(i) for i in range(n)], output="calm.jsonl")
    assert calm.run(model).answered == n
    out, sizes = tmp_path / "out.jsonl", [0]
    run = command(folder, "--dtype", "fp32", "-o", "out.jsonl")
    for _ in range(3):
        ended_by(signal.SIGKILL, run, tmp_path, out, sizes[-1] + rng.randrange(1, 60_000))
        sizes.append(out.stat().st_size)
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
    out = tmp_path / "out.jsonl"
    p = ended_by(sig, command(folder, "-o", "out.jsonl"), tmp_path, out)
    done = len(texts(out))
    assert p.returncode == 130 and 0 < done < 2000, p.stderr
    [said] = but_compiler(p.stderr).splitlines()
    assert f" {done} of 2000 requests done" in said
    assert job(force=True, limit=done + 5).run(llm()).done >= done


@posix
def test_full_disk(folder, tmp_path, job):
    import resource

    goes_on, out = job([ask(i) for i in range(60)]), tmp_path / "out.jsonl"
    p = subprocess.run(
        command(folder, "-o", "out.jsonl"),
        cwd=tmp_path,
        env=ENV | dict(PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)),
    )
    [said] = but_compiler(p.stderr).splitlines()
    assert p.returncode == 1 and "out.jsonl (File too large)" in said
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
    assert (result.done, result.total, len(read_lines(tmp_path / "out.jsonl"))) == (2, 2, 2)


@functools.cache
def example_job(ordered=False):
    "Bytes of a job's input, its answers and its settings, undisturbed."
    import tempfile

    asked = [(chat if i % 2 else ask)(i) for i in range(12)] + [ask(3), ask(13, temperature=-1)]
    with tempfile.TemporaryDirectory() as d:
        source, out = Path(d) / "in.jsonl", Path(d) / "out.jsonl"
        write_lines(source, asked)
        assert Job(source, out, ordered=ordered, keep_journal=True).run(llm()).failed == 2
        return source.read_bytes(), out.read_bytes(), settings_file(out).read_bytes()


def by_key(data):
    return by_line(map(json.loads, data.splitlines()))


@examples(120)
@given(
    cut=st.integers(0, 10_000),
    tail=st.sampled_from((None, b"", b"\0" * 100, b'{"id": "batch_req_', b"\xff")),
    ordered=st.booleans(),
)
def test_torn_anywhere(tmp_path_factory, cut, tail, ordered):
    d = tmp_path_factory.mktemp("torn")
    requests, answers, side = example_job(ordered)
    (d / "in.jsonl").write_bytes(requests)
    settings_file(d / "out.jsonl").parent.mkdir()
    settings_file(d / "out.jsonl").write_bytes(side)
    kept = answers[: cut % (len(answers) + 1)]  # None: less the end of its last line
    kept = kept.rpartition(b"\n")[0] if tail is None else kept + tail
    (d / "out.jsonl").write_bytes(kept)
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


@examples(150)
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
    known = dict(max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    bodies = (
        ("chat/completions", shared | dict(max_completion_tokens=9, n=2, seed=1)),
        ("chat/completions", shared | usual | known),
        ("completions", dict(model="m", prompt=["Hi"], logprobs=2, seed=3)),
        ("moderations", dict(model="m", input="x")),
    )
    asked = [
        dict(custom_id=f"request-{i}", method="POST", url=f"/v1/{url}", body=body)
        for i, (url, body) in enumerate(bodies, 1)
    ]
    refused = job(asked, output="no.jsonl", model_name="tiny").run(llm())
    assert refused.failed == 4 and "--any-model" in refused.first_failure
    assert [*map(error_of, read_lines(tmp_path / "no.jsonl"))].count("model_not_found") == 3
    said, how = [], dict(error_file="err.jsonl", model_name="tiny", any_model=True)
    result = job(say=said.append, **how).run(llm())
    assert (result.answered, result.failed, said) == (3, 1, [])
    found = sorted(read_lines(tmp_path / "out.jsonl"), key=lambda r: r["custom_id"])
    for r in found:
        assert set(r) == {"id", "custom_id", "response", "error"} and r["error"] is None
        assert set(r["response"]) == {"status_code", "request_id", "body"}
        body = r["response"]["body"]
        assert {"id", "object", "created", "model", "choices", "usage"} == set(body)
        assert (r["response"]["status_code"], body["model"]) == (200, "tiny")
        assert {c["finish_reason"] for c in body["choices"]} <= {"stop", "length"}
    one, two, three = (r["response"]["body"] for r in found)
    assert [c["index"] for c in one["choices"]] == [0, 1]
    tokens = two["choices"][0]["logprobs"]["content"]
    assert len(tokens) == two["usage"]["completion_tokens"]
    assert all(len(t["top_logprobs"]) == 3 for t in tokens)
    logprobs, used = three["choices"][0]["logprobs"], three["usage"]
    assert three["object"] == "text_completion" and used["completion_tokens"] <= 16
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert len({len(logprobs[k]) for k in ("tokens", "token_logprobs", "text_offset")}) == 1
    [bad] = read_lines(tmp_path / "err.jsonl")
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("request-4", 400)
    assert bad["response"]["body"]["error"]["code"] == error_of(bad) == "invalid_url"


def test_answers_that_came_in_any_order_are_put_in_order(tmp_path, job):
    how = dict(ignore_eos=True)
    job([ask(i, max_tokens=40 // (i + 1), **how) for i in range(4)]).run(llm())
    ids = lambda: [r["custom_id"] for r in read_lines(tmp_path / "out.jsonl")]
    assert ids()[0] != "r0" and job(ordered=True).run(None).before == 4
    assert ids() == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("name", ["err.jsonl", "link.jsonl"])
def test_one_run_at_a_time(tmp_path, job, name):
    "Whatever the file is called."
    (tmp_path / "link.jsonl").symlink_to("err.jsonl")
    side = tmp_path / "err.jsonl.batchlab"
    side.mkdir()
    one = job([ask(1)], error_file=name)
    writing = pytest.raises(JobError, match=f"another run is writing .*{name}")
    with FileLock(side / "lock"), writing:
        one.run(llm())
    assert not (tmp_path / "out.jsonl.batchlab").exists()  # of what was refused nothing is left
    assert one.run(llm()).answered == 1
    names = ["err.jsonl", "in.jsonl", "link.jsonl", "out.jsonl"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


@posix
def test_one_run_at_a_time_of_a_file_with_two_names(tmp_path, job):
    (tmp_path / "out.jsonl").touch()
    os.link(tmp_path / "out.jsonl", twin := tmp_path / "twin.jsonl")
    with contextlib.ExitStack() as other:
        lock(twin, other)
        with pytest.raises(JobError, match="another run is writing .*out.jsonl"):
            job([ask(1)]).run(llm())
    with pytest.raises(JobError, match="must be different files"):
        job(error_file="twin.jsonl").run(llm())
    assert job().run(llm()).answered == 1 and twin.read_bytes()


def test_what_can_not_be_written_is_said_before_a_model_is_loaded(tmp_path, job, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for how, why in (
        (dict(output="no/out.jsonl"), "can't write .*no/out.jsonl"),
        (dict(error_file="no/e.jsonl"), "can't write .*no/e.jsonl"),
        (dict(output="out.parquet"), "needs pyarrow"),
    ):
        wrong = job([ask(1)], **how)
        for go in (wrong.dry_run, lambda: wrong.plan(llm(), False), lambda: wrong.run(llm())):
            with pytest.raises(JobError, match=why):
                go()
    assert job().dry_run().requests == 1 and [*tmp_path.iterdir()] == [tmp_path / "in.jsonl"]


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
    more = dict(force=True, keep_journal=True)
    assert first([ask(i) for i in (0, 1, 2, 3, 9, 10)], **more).run(other).answered == 6
    assert settings_file(out).exists()
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
    out.symlink_to(tmp_path / f"its-{name}")
    begun = again([ask(i) for i in range(3)], limit=2).run(llm())
    assert (begun.answered, settings_file(out).exists()) == (2, True)
    os.utime(out, (2**31, 2**31))  # by another machine's clock
    by_file = again(output=f"its-{name}").run(llm())
    assert (by_file.before, settings_file(out).exists()) == (2, False)
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
    assert out.is_symlink()


def test_retry_and_errors_in_their_own_file(tmp_path, job):
    out, err = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    asked = [ask(i) for i in range(8)] + [ask(99, n=0)]
    late = job(asked, error_file="err.jsonl", timeout=1e-9).run(llm())
    assert (late.answered, late.failed, late.prompt_tokens, out.read_bytes()) == (0, 9, 0, b"")
    assert {r["response"]["status_code"] for r in read_lines(err)} == {400, 408}
    again = lambda **more: job(error_file="err.jsonl", **more)
    assert again().run(None).before == 9  # a failure is an answer, until it is asked for again
    result = again(retry_errors=True).run(llm())
    assert (result.answered, result.failed) == (8, 1)
    assert len(texts(out)) == 8 and len(read_lines(err)) == 1
    with pytest.raises(JobError, match="more than 0"):
        again(retry_errors=True, max_errors=0).run(llm())
    assert len(texts(out)) == 8 and len(read_lines(err)) == 1


def test_cut_compression(tmp_path, job):
    asked = [ask(i, user=str(random.Random(i).random())) for i in range(400)]
    whole = gzip.compress("".join(json.dumps(d) + "\n" for d in asked).encode())
    packed = lambda: job(input="in.jsonl.gz", output="out.jsonl.gz")
    for part in (2, 4):  # then also of what was answered some is missing
        (tmp_path / "in.jsonl.gz").write_bytes(whole[: len(whole) // part])
        with pytest.raises(JobError, match="beyond line") as e:
            packed().run(llm())
    done = len(read_lines(journal_of(tmp_path / "out.jsonl.gz")))
    assert e.value.status == 1 and 50 < done < 400
    (tmp_path / "in.jsonl.gz").write_bytes(whole)
    result = packed().run(llm())
    assert (result.before, result.answered) == (done, 400)
    answers = gzip.open(tmp_path / "out.jsonl.gz", "rt")
    assert len({json.loads(s)["custom_id"] for s in answers}) == 400


def test_broken_rows_of_a_table(tmp_path, job):
    table = b'prompt,custom_id\ngood,a\ncaf\xe9,b\n"%s",c\nshort\n,d\n"half",a\nlast,e\n'
    (tmp_path / "in.csv").write_bytes(table % (b"x" * 1000))
    job(input="in.csv", sampling_params=dict(max_tokens=2)).run(llm())
    found = {r["row"]: error_of(r) for r in read_lines(tmp_path / "out.jsonl")}
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
        found = [r["custom_id"] for r in read_lines(tmp_path / "out.jsonl")]
        assert found == [f"r{i}" for i in range(300)]


@posix
def test_pipes(folder, tmp_path, job):
    "Requests from standard input; answers to standard output, until its reader leaves."
    calm = job([ask(i) for i in range(40)], output="calm.jsonl")
    assert calm.run(LLM(folder, dtype="fp32")).answered == 40
    data, want = (tmp_path / "in.jsonl").read_text(encoding="utf-8"), texts(tmp_path / "calm.jsonl")

    def run(source, *args, input=data, **how):
        words = ["-i", source, "--model", folder, "--dtype", "fp32", "-o", *args]
        return warm([*CMD, *words], tmp_path, ENV, input=input, **how)

    p = run("-", "-", "--trace", "trace.json")
    (tmp_path / "piped.jsonl").write_text(p.stdout, encoding="utf-8")
    assert p.returncode == 0 and texts(tmp_path / "piped.jsonl") == want, p.stderr
    assert "can not go on" in p.stderr and not [*tmp_path.glob("-*")]
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert trace["totals"]["requests"] == dict(Counter(f for _, f in want.values()))
    assert run("-", "kept.jsonl", "--limit", "15").returncode == 0
    assert len(read_lines(tmp_path / "kept.jsonl")) == 15
    # the same input again: it goes on
    assert "15 of them before" in run("-", "kept.jsonl").stderr
    assert texts(tmp_path / "kept.jsonl") == want
    os.mkfifo(fifo := tmp_path / "fifo")
    threading.Thread(target=lambda: fifo.write_text(data)).start()
    for pipe in ("/dev/stdin", "fifo"):  # read whole first: a job reads its input twice
        p = run(pipe, "named.jsonl")
        assert p.returncode == 0 and texts(tmp_path / "named.jsonl") == want, p.stderr
        (tmp_path / "named.jsonl").unlink()
    with pytest.raises(JobError, match="is no file"):
        job(input="fifo").check()
    p = run("-", "none.jsonl", input="")
    assert p.returncode == 2 and "standard input is empty" in p.stderr
    r, w = os.pipe()
    head = os.fdopen(r)
    threading.Thread(target=lambda: (head.readline(), head.close())).start()
    p = run("-", "-", stdout=w)
    assert head.closed and p.returncode == 1 and "Traceback" not in p.stderr


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
    assert job(look_ahead=1).plan(llm(), calibrate=False).shared_tokens == 0  # of a block alone


def plain(keys):
    "A line with a prompt and the text `keys`, as it is read."
    return parse_line(1, f'{{"prompt": "p", {keys}}}'.encode(), "plain")


JSON = dict(structured_outputs=dict(json=dict(type="object")))
USED = {
    '"guided_json": {"type": "object"}': JSON,
    """"response_format": {"type": "json_schema", "json_schema":
        {"name": "x", "schema": {"type": "object"}}}""": JSON,
    '"response_format": {"type": "text"}': {},
    '"response_format": null, "sampling_params": null, "tools": null, "num_beams": null': {},
    '"max_completion_tokens": 3': dict(max_tokens=3),
    '"max_completion_tokens": 3, "max_tokens": 3': dict(max_tokens=3),
    '"max_tokens": null': dict(max_tokens=None),
    '"max_completion_tokens": null': dict(max_tokens=None),
    '"sampling_params": {"top_k": 4, "max_completion_tokens": 2, "guided_choice": ["a"]}': dict(
        top_k=4, max_tokens=2, structured_outputs=dict(choice=["a"])
    ),
    '"sampling_params": {"seed": 1}, "n": 2, "temperature": 1': dict(seed=1, n=2, temperature=1),
    '"guided_regex": "a+"': dict(structured_outputs=dict(regex="a+")),
    '"guided_grammar": "x"': dict(structured_outputs=dict(grammar="x")),
    '"logprobs": 2': dict(logprobs=2),
    '"logprobs": true, "top_logprobs": 3': dict(logprobs=3),
    """"tools": [], "stream": false, "best_of": 1, "tool_choice": "none", "detokenize": true, "suffix": "",
        "use_beam_search": false, "spaces_between_special_tokens": true, "function_call": "none", "echo": false,
        "functions": [], "modalities": ["text"], "logits_processors": []""": {},
    '"score": NaN, "max_tokens": 2': dict(max_tokens=2),  # as Python writes what is missing
    '"temperature": 1e400': dict(temperature="1e400"),
}


@pytest.mark.parametrize("keys, want", USED.items())
def test_settings_of_a_plain_line_are_used(keys, want):
    line = plain(keys)
    assert (line.failure, line.options) == (None, want)
    assert line.ignored == ("score",) * ("score" in keys)


REFUSED = {
    '"tools": [{}]': "tools",
    '"best_of": 3': "best_of=3",
    '"stream": true': "stream=true",
    '"tool_choice": "auto", "functions": [1]': "functions",
    '"num_beams": 4': "'num_beams' transformers'",
    '"max_length": 9': "'max_length' max_tokens",
    '"do_sample": true': "do_sample temperature",
    '"maxTokens": 9': "'maxTokens' 'max_tokens'",
    '"guided_decoding_backend": "x"': "guided_decoding_backend",
    '"prompt_logprobs": 1': "prompt_logprobs /v1/completions llm.logprobs",
    '"prompt_logprob_start": 1': "prompt_logprob_start SamplingParams",
    '"echo": true': "echo=true /v1/completions llm.logprobs",
    '"system": "Be brief."': "'system' role",
    '"chat_template": "x"': "chat_template",
    '"extra_body": {"top_k": 1}': "extra_body top_k",
    '"parameters": {"seed": 1}': "parameters",
    '"sampling_params": {"best_of": 2}': "best_of=2",
    '"sampling_params": {"label": "x"}': "'label'",
    '"sampling_params": [1]': "sampling_params object",
    '"sampling_params": {"n": 1}, "n": 2': "n",
    '"max_new_tokens": 4': "'max_new_tokens' 'max_tokens'",
    '"max_tokens": 3, "max_completion_tokens": 4': "max_completion_tokens=4 max_tokens=3",
    '"top_logprobs": 2': "top_logprobs",
    '"guided_regex": "a", "guided_choice": ["a"]': "guided_regex guided_choice",
    '"id": [1]': "id must be",
    '"custom_id": 0.5': "custom_id",
    '"response_format": {"type": "xml"}': "response_format json_schema",
    '"top_a": 0.1': "top_a",
    '"json_schema": {}': "structured_outputs",
    '"prompt": "a"': "not JSON (  stands twice",
    '"x": [{"y": 1, "y": 1}]': "not JSON (  stands twice",
}


@pytest.mark.parametrize("keys, words", REFUSED.items())
def test_settings_nobody_can_honour_fail_their_line(keys, words):
    line = plain(keys)
    assert line.failure and all(w in line.failure[1] for w in words.split()), line.failure


def test_what_a_line_leaves_open():
    usual = SamplingParams(temperature=0, max_tokens=256)
    assert ParamsCache().of(plain('"id": 1')) == usual
    assert options_of(SamplingParams()) == dict(temperature=1.0, max_tokens=16)


def test_a_failure_keeps_the_id_that_is_good():
    assert plain('"id": [1], "custom_id": "c"').ids == dict(custom_id="c")


def test_no_setting_of_ours_or_of_transformers_is_passed_over():
    "Whatever its name, a setting is used or fails its line: none is among the ignored keys."
    from dataclasses import fields
    from transformers import GenerationConfig

    theirs = {k for k in GenerationConfig().to_dict() if k[0] != "_"}
    for k in sorted({f.name for f in fields(SamplingParams)} | theirs):
        line = plain(f'"{k}": "x"')
        assert line.failure or line.options and not line.ignored, k


BESIDE = dict(response_format=dict(type="json_object"))


@pytest.mark.parametrize(
    "asked, why",
    [
        (ask(1) | BESIDE, "'response_format' stands beside the body"),
        (ask(1, guided_choice=["a"], max_completion_tokens=1), "max_completion_tokens=1 and max_"),
        (ask(1, seed=float("nan")), "NaN"),
        (ask(1) | dict(label="x", metadata=dict(n=3), model="m"), None),
    ],
)
def test_settings_of_a_line_of_the_batch_api_stand_in_its_body(asked, why):
    line = parse_line(1, json.dumps(asked).encode())
    assert why in line.failure[1] if why else (line.failure, line.ignored) == (None, ("label",))


@pytest.mark.parametrize("first", ["plain", "batch"])
def test_a_line_of_the_other_form_says_so(tmp_path, job, first):
    "A file is of the form of its first good line, and a line of the other fails as such, with its id."
    lines = dict(plain=dict(custom_id="p", prompt="Hi", max_tokens=1), batch=ask(1))
    good, other = lines.pop(first), *lines.values()
    assert job([good, other]).run(llm()).failed == 1
    [bad] = [r for r in read_lines(tmp_path / "out.jsonl") if r["error"]]
    assert bad["custom_id"] == other["custom_id"]
    assert "line 2" in bad["error"]["message"] and "file of its own" in bad["error"]["message"]


def test_answers_of_older_jobs_are_known():
    "What names a line or a row in a file of answers is what it always was."
    from batchlab.jobs.lines import digest_of
    from batchlab.jobs.tables import AskedRow

    assert [digest_of(raw) for raw in (b"{}", AskedRow("a"))] == ["d905e156", "5eae67b9"]
    fields = "messages", "given", "system", "failure"  # more is hashed, where there is more
    assert len({digest_of(AskedRow("a", **{k: v})) for k in fields for v in "bc"}) == 8


def test_plain_lines_end_to_end(tmp_path, job):
    "A constraint holds, what can't be honoured fails alone, and keys of the owner are named once."
    needs("llguidance")
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
    found = {r["id"]: r for r in read_lines(tmp_path / "out.jsonl")}
    assert found[1]["text"] in ("salt", "sweet") and found[2]["text"] in ("true", "false")
    assert found[3]["error"]["message"].startswith("line 4: tools=")
    assert found[4]["usage"]["completion_tokens"] == 2
    [alone] = llm().generate("Salt or sweet?", SamplingParams(temperature=0, **params))
    assert found[0]["text"] == alone.outputs[0].text


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("form", ["plain", "text", "chat"])
def test_tables_keep_every_answer(tmp_path, kind, form, job):
    "With n and logprobs a table has all that the records have, and each row the tokens of its own answer."
    parquet, plain = kind == "parquet", form == "plain"
    if parquet:
        needs("pyarrow.parquet")
    of_plain = lambda i, **b: dict(custom_id=f"r{i}", **ask(i, **b)["body"])
    make = dict(text=ask, chat=chat, plain=of_plain)[form]
    k = dict(logprobs=True, top_logprobs=2) if form == "chat" else dict(logprobs=2)
    paths = [tmp_path / f"{name}.{kind}" for name in ("whole", "again")]

    def run(lines):
        job(lines, output=f"whole.{kind}", keep_journal=True).run(llm())
        job(output=f"again.{kind}", limit=2).run(llm())
        job(output=f"again.{kind}").run(llm())  # gone on with: the same
        whole, again = map(read_table, paths)
        assert same(again, whole, llm().backend)
        left = Path(journal_of(paths[1])).exists()
        assert left == any(t["error"] for t in whole)  # to try again
        return whole

    front = ["line" if plain else "id", "custom_id"]
    usual = ["text", "finish_reason", "prompt_tokens", "completion_tokens", "error"]
    end = ["request_id"] * plain
    old = run([make(i) for i in range(3)])
    assert [*old[0]] == [*front, *usual, *end] and len(old) == 3
    for path in paths:
        path.unlink()
        drop_side(path)
    several = make(1, n=3, seed=1, temperature=1.0, **k)
    new = run([make(0), several, make(2, temperature=-1), make(3, **k)])
    more = ["logprobs", *["cumulative_logprob"] * plain]
    assert [*new[0]] == [*front, "index", *usual, *more, *end] and len(new) == 6
    none = lambda x: None if x == "" and not parquet else x
    clean = lambda s: s.encode("utf-8", "replace").decode()
    for r in read_lines(journal_of(paths[0])):
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
    llm, ticks = LLM(tiny_model("llama"), tiny_tokenizer(), **limits), iter(range(5, 10**6))
    monkeypatch.setattr(jobs, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    # one step reads all, each further one writes four tokens
    assert jobs.speed(llm, [[5 + i] * 8 for i in range(4)], 16) == (4 * 8 / 1, 4)
    long = [[3 + i] * 200 for i in range(6)]  # four steps to a prompt
    (slow, fast), (least, most), tried = jobs.rates(llm, long, budget=400)
    assert tried == 2 and 0 < slow <= fast <= 64 and 0 < least <= most <= 6
    plan = jobs.JobPlan(prompt_tokens=30, shared_tokens=10, max_output_tokens=8)
    plan.prompt_rates, plan.output_rates = (1, 2), (2, 4)
    assert (plan.least_seconds, plan.seconds) == (10, 1.25 * (20 + 4))
    sample = jobs.PromptSample(3)
    for i in range(30):
        sample.add(i, [i], None)
    found = [ids for ids, _ in sample.some]
    assert len(found) == 3 and max(found) > [9] and min(sample.longest)[0] == 27


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


def test_a_plan_says_what_is_slow(tmp_path, capsys, monkeypatch, folder):
    from batchlab.cli import main

    monkeypatch.chdir(tmp_path)
    write_lines("in.jsonl", [dict(prompt="a"), dict(prompt="b"), dict(prompt="c" * 400)])
    usual = ["-i", "in.jsonl", "--model", folder]
    cut = ["-o", "usual.jsonl", "--max-tokens", "2", "--truncate", "auto"]
    assert main(["run", *usual, *cut]) == 0
    assert {r["line"]: r for r in read_lines("usual.jsonl")}[3]["usage"]["prompt_tokens"] == 254
    slots = ["--truncate", "20", "--max-num-seqs", "1", "--no-calibration"]
    assert main(["plan", *usual, *slots]) == 0
    assert "give --max-num-seqs 64" in capsys.readouterr().out


def test_a_number_that_no_float_holds_is_kept(tmp_path, job):
    first = '{"prompt": "a", "x": [1e400, -1e400, 1e300], "y": NaN}'
    asked = [first, '{"prompt": "a", "temperature": 1e400}']
    assert job(asked, sampling_params=dict(max_tokens=1)).run(llm()).failed == 1
    found, bad = sorted(read_lines(tmp_path / "out.jsonl"), key=lambda r: r["line"])
    assert (found["x"], found["y"]) == (["1e400", "-1e400", 1e300], None)
    assert "temperature" in bad["error"]["message"]


@pytest.mark.parametrize("form", ["batch", "plain"])
@pytest.mark.parametrize("output", ["out.jsonl", "out.csv"])
def test_a_line_whose_id_is_used_already_says_which(tmp_path, job, form, output):
    "Its record has its id, and takes it from no line that still waits for its answer."
    line = ask if form == "batch" else lambda i: dict(custom_id=f"r{i}", **ask(i)["body"])
    asked = [line(1), line(2), line(1)]
    go = lambda **how: job(asked, output=output, error_file="err.jsonl", **how).run(llm())
    assert (go().answered, go().before) == (2, 3)
    [bad] = read_lines(tmp_path / "err.jsonl")
    assert (bad["custom_id"], error_of(bad)) == ("r1", "duplicate_custom_id")
    (tmp_path / output).unlink()  # as if killed before their answers
    assert (go().answered, go(retry_errors=True).answered) == (2, 2)
    assert len(read_lines(tmp_path / "err.jsonl")) == 1


def test_a_summary_says_how_many_drafted_tokens_were_right(job):
    drafting = LLM(tiny_model("llama"), tiny_tokenizer(), speculation="lookup", max_num_seqs=4)
    drafting.engines.proposer.always = True
    one = job([ask(i, prompt="one two one two " * 4, max_tokens=9) for i in range(6)])
    result, stats = one.run(drafting), drafting.stats()
    assert result.drafted_tokens == stats.drafted_tokens > 0
    said = f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens were right"
    assert said in str(result) and result.figures["drafted_tokens"] == stats.drafted_tokens
    assert JobResult(10, answered=6, before=4, seconds=2).left() == 4
    said = []
    Progress(JobResult(10, answered=6), said.append, use_tqdm=False, every=0).update()
    assert said[0].startswith("6 of 10 done, 0 failed, ")
