"Tables in and out: every row, every column, in order, with its type; what a column is for; what is refused before anything runs."

import bz2, csv, functools, gzip, json, lzma, os, random, subprocess, sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from batchlab.errors import JobError, ParamError, PromptError
from batchlab.cli.flags import parser_of
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.jobs.settings import INSTEAD, KNOWN_SETTINGS
from batchlab.core.params import SamplingParams
from batchlab.jobs.frames import map_frame
from batchlab.jobs.run import run
from batchlab.jobs.job import Job
from batchlab.jobs.journal import journal_of, settings_file, stamp_of
from batchlab.jobs.lines import parse_line
from batchlab.jobs.tables import (
    ANSWER,
    NO_SETTINGS,
    AnswerTable,
    Columns,
    Row,
    TableFile,
    literal,
    type_of,
)

pa = pytest.importorskip("pyarrow", reason="tables need pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="tables need pyarrow with Parquet built in")
pd = pytest.importorskip("pandas", reason="frames need pandas")
pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def llm():
    return LLM(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=16)


SHORT = dict(max_tokens=2, ignore_eos=True)


def write(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows(rows)


def read(path):
    with open(path, newline="", encoding="utf-8") as f:
        return [*csv.DictReader(f)]


def left(folder, name):
    return sorted(
        p.name for p in Path(folder).iterdir() if p.name.startswith(name) and p.name != name
    )


# --- columns, order and types


def wide(n):
    "A header and `n` rows of 12 columns, with what is easily lost: leading zeros, gaps, long numbers, line breaks."
    names = "id zip question text price seen big flag note n_words when lang".split()
    return [
        names,
        *(
            [
                1000 + 7 * i,
                f"{i:05d}",
                f'Say "{i}",\nplease',
                f"old {i}",
                "" if i % 10 == 3 else f"{i / 4}",
                i % 2 == 0,
                2**60 + i,
                "true" if i % 3 else "False",
                "" if i % 4 else 'ä, "b"',
                "" if i % 5 == 0 else i,
                f"2026-01-{1 + i % 28:02d}",
                "de" if i % 2 else "fr",
            ]
            for i in range(n)
        ),
    ]


TEMPLATE = "{lang} {id}"

JOB = """
import sys, resource
from pathlib import Path
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.jobs.job import Job
name, out, stop = sys.argv[1], sys.argv[2], int(sys.argv[3])
llm = LLM(tiny_model('llama', num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=16)
llm.generate(['warm'] * 20, dict(max_tokens=2))
job = Job(name, out, prompt_template='{lang} {id}', sampling_params=dict(max_tokens=1), use_tqdm=False, id_column='id')
class Stop(BaseException): pass
step = llm.step
def mortal():
    if stop and job.result.done >= stop: raise Stop
    return step()
llm.step = mortal
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try: job.run(llm)
except Stop: pass
print(job.result.done, job.result.before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_ten_thousand_rows_come_back_by_their_key(tmp_path):
    "Twelve columns, ended in the middle and gone on with: every row once, types kept; five times the rows take no more memory."
    grown = {}
    for n in (2000, 10_000):
        write(tmp_path / f"{n}.csv", wide(n))
        for stop in (n // 2, 0):
            p = subprocess.run(
                [sys.executable, "-c", JOB, f"{n}.csv", f"{n}.parquet", str(stop)],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert p.returncode == 0, p.stderr
            done, before, grown[n] = map(int, p.stdout.split())
        assert (done, before >= n // 2, left(tmp_path, f"{n}.parquet")) == (n, True, [])
    assert grown[10_000] < grown[2000] + 40_000, grown
    source, found = (
        pd.read_csv(tmp_path / "10000.csv", dtype=dict(zip=str)),
        pd.read_parquet(tmp_path / "10000.parquet"),
    )
    assert [*found.id] == [*source.id] and found.id.dtype == source.id.dtype == "int64"
    both = source.merge(found, on="id", suffixes=("_then", ""))
    assert (
        len(both) == 10_000
        and both.error.isna().all()
        and (both.completion_tokens == 1).all()
        and found.completion_tokens.dtype == "Int64"
    )
    for name in (n for n in source.columns if n not in ("id", "text")):
        pd.testing.assert_series_equal(
            both[f"{name}_then"].astype("Float64" if name == "n_words" else both[name].dtype),
            both[name].astype("Float64" if name == "n_words" else both[name].dtype),
            check_names=False,
        )
    assert (
        [*both.text] == [*both.text_then]
        and found.zip[7] == "00007"
        and found.big.dtype == "int64"
        and found.n_words.dtype == "Int64"
    )


def test_text_and_error_of_every_row_equal_a_call_of_its_own(tmp_path):
    write(tmp_path / "in.csv", wide(40))
    run(tmp_path / "in.csv", tmp_path / "out.csv", SHORT, model=llm(), prompt_template=TEMPLATE)
    rows, asked = read(tmp_path / "out.csv"), wide(40)
    assert [[*r.values()][:12] for r in rows] == [[str(c) for c in row] for row in asked[1:]] and [
        *rows[0]
    ][:4] == ["id", "zip", "question", "text"]
    outs = llm().generate(
        [f"{r['lang']} {r['id']}" for r in rows],
        SamplingParams(temperature=0, **SHORT),
        use_tqdm=False,
    )
    clean = lambda s: s.encode("utf-8", "replace").decode()
    assert [r["answer"] for r in rows] == [clean(o.outputs[0].text) for o in outs] and {
        r["completion_tokens"] for r in rows
    } == {"2"}


def test_parquet_types_pass_through(tmp_path):
    import datetime, decimal

    n = 300
    table = pa.table(
        dict(
            id=pa.array(range(n), pa.uint16()),
            prompt=[f"p {i}" if i % 7 else None for i in range(n)],
            tags=[["a", "b"][: i % 3] for i in range(n)],
            nested=[dict(a=i, b=[dict(c="x")]) for i in range(n)],
            when=pa.array([datetime.datetime(2026, 1, 1)] * n, pa.timestamp("us", "Europe/Berlin")),
            cost=[decimal.Decimal("1.50")] * n,
            raw=[b"\xff\0"] * n,
            kind=pa.array(["x", "y", None] * 100).dictionary_encode(),
            error=[1.5] * n,
        )
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=77)
    said = []
    result = run(
        tmp_path / "in.parquet",
        tmp_path / "out.parquet",
        dict(SHORT, n=2, temperature=1.0, seed=1, logprobs=1),
        model=llm(),
        say=said.append,
    )
    found = pq.read_table(tmp_path / "out.parquet")
    assert (
        result.failed == 43
        and len(found) == 2 * 257 + 43
        and said
        == [
            "columns of the input keep their names; the answers' stand there as others: error as error_2"
        ]
    )
    first = (
        found.filter(pa.compute.not_equal(pa.compute.fill_null(found["index"], 0), 1))
        if hasattr(pa, "compute")
        else None
    )
    import pyarrow.compute as pc

    first = found.filter(pc.not_equal(pc.fill_null(found["index"], 0), 1))
    for name in table.column_names:
        assert first[name].combine_chunks().equals(table[name].combine_chunks()), name
    assert found.schema.field("prompt_tokens").type == pa.int64() and set(
        found["completion_tokens"].to_pylist()
    ) == {2, None}
    assert {r["error_2"] for r in found.to_pylist() if r["error_2"]} == {
        f"row {i + 1}: the prompt is empty" for i in range(0, n, 7)
    }
    one = found.to_pylist()[2]
    assert len(json.loads(one["logprobs"])["tokens"]) == 2 and one[
        "cumulative_logprob"
    ] == pytest.approx(sum(json.loads(one["logprobs"])["token_logprobs"]))
    assert pd.read_parquet(tmp_path / "out.parquet").prompt_tokens.dtype == "Int64"
    run(tmp_path / "in.parquet", tmp_path / "out.csv", SHORT, model=llm())
    assert read(tmp_path / "out.csv")[1]["nested"] == json.dumps(dict(a=1, b=[dict(c="x")]))


def test_pandas_index_and_int_columns_with_gaps_survive(tmp_path):
    frame = pd.DataFrame(
        dict(prompt=["a", "b"], k=pd.array([1, None], dtype="Int64")),
        index=pd.Index(["x", "y"], name="key"),
    )
    frame.to_parquet(tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out.parquet", SHORT, model=llm())
    found = pd.read_parquet(tmp_path / "out.parquet")
    assert (
        [*found.index] == ["x", "y"]
        and found.index.name == "key"
        and found.k.dtype == "Int64"
        and found.completion_tokens.dtype == "Int64"
    )


def test_jsonl_records_of_a_table_have_its_columns(tmp_path):
    pq.write_table(
        pa.table(dict(id=[5, 6], prompt=["a", ""], text=["x", "y"], row=[8.0, float("nan")])),
        tmp_path / "in.parquet",
    )
    run(tmp_path / "in.parquet", tmp_path / "out.jsonl", SHORT, model=llm(), id_column="id")
    a, b = sorted(
        (json.loads(s) for s in (tmp_path / "out.jsonl").read_text().splitlines()),
        key=lambda r: r["row_2"],
    )
    assert (a["id"], a["custom_id"], a["text"], a["row"], a["row_2"]) == (
        5,
        5,
        "x",
        8.0,
        1,
    )
    assert (b["id"], b["row"], b["error"]["message"]) == (
        6,
        None,
        "row 2: the prompt is empty",
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_an_empty_cell_is_no_prompt(tmp_path, kind):
    "In a CSV as in Parquet the row fails, in the same words, and no token is made up for it."
    frame = pd.DataFrame(dict(prompt=["a", None, "c"]))
    frame.to_csv(tmp_path / "in.csv") if kind == "csv" else frame.to_parquet(
        tmp_path / "in.parquet"
    )
    result = run(tmp_path / f"in.{kind}", tmp_path / f"out.{kind}", SHORT, model=llm())
    found = (
        pd.read_csv(tmp_path / "out.csv")
        if kind == "csv"
        else pd.read_parquet(tmp_path / "out.parquet")
    )
    assert (result.answered, result.failed) == (2, 1) and found.error[
        1
    ] == "row 2: the prompt is empty"
    if kind == "csv":
        assert (
            read(tmp_path / "out.csv")[1]["prompt_tokens"] == ""
            and read(tmp_path / "out.csv")[0]["prompt_tokens"].isdigit()
        )


@pytest.mark.parametrize(
    "text",
    [
        "7",
        "007",
        "-0",
        "+1",
        "1.0",
        "1e3",
        " 1",
        "1_0",
        "nan",
        "True",
        "9223372036854775807",
        "9223372036854775808",
        "0.1234567890123456789",
        "１",
        "",
        ".5",
    ],
)
def test_types_of_a_csv_lose_nothing(text):
    "What is read as a number is written as the same number; everything else stays text."
    v = literal(text)
    if isinstance(v, bool):
        assert str(v).lower() == text.lower()
    elif isinstance(v, int):
        assert str(v) == text
    elif isinstance(v, float):
        assert v == float(text)
    else:
        assert v == text
    assert type_of(["x", text]).cast(text) == (text or None)


def test_bytes_of_a_csv_that_are_no_utf8_come_back(tmp_path):
    (tmp_path / "in.csv").write_bytes(b"prompt,other\na,caf\xe9\nb,x\n")
    run(tmp_path / "in.csv", tmp_path / "out.csv", SHORT, model=llm())
    assert b",caf\xe9," in (tmp_path / "out.csv").read_bytes().splitlines()[1]
    run(tmp_path / "in.csv", tmp_path / "out.parquet", SHORT, model=llm())
    assert pq.read_table(tmp_path / "out.parquet")["other"].to_pylist() == ["caf\ufffd", "x"]


# --- what a column is for

NAMES = st.sampled_from(
    sorted(
        {*KNOWN_SETTINGS}
        | {*INSTEAD}
        | {
            "timeout",
            "priority",
            "tools",
            "chat_template",
            "messages",
            "system",
            "label",
            "lang",
            "score",
            "format",
            "temprature",
            "max_tokns",
            "stops",
            "body",
            "url",
            "model",
            "user",
            "text",
            "error",
            "index",
            "row",
            "request_id",
        }
    )
)


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    name=NAMES,
    cell=st.sampled_from(
        ["", "1", "0.5", "x", '["a"]', '{"a": 1}', "true", '[{"role": "user", "content": "x"}]']
    ),
    data=st.booleans(),
)
def test_each_column_is_used_or_refused_or_comes_through(tmp_path_factory, name, cell, data):
    names, where = ["prompt", name], "the table"
    try:
        columns = Columns(names, where, text=True, setting_columns=() if data else [name])
    except JobError as e:
        assert repr(name) in str(e) and not data
        return
    assert columns.settings == ([] if data else [name])
    line = parse_line(1, columns.row({"prompt": "p", name: cell}), "plain")
    assert line.ignored == ()
    if name in columns.settings and cell:
        assert (
            line.failure
            or line.options
            or line.timeout
            or name in ("response_format", "logprobs", "structured_outputs")
        ), line
    elif name == "messages" and cell:
        assert line.failure
    else:
        assert (line.failure, line.options, line.prompt) == (None, {}, "p")
    path = tmp_path_factory.mktemp("c") / "in.csv"
    write(path, [names, ["p", cell]])
    record = dict(
        request_id="batch_req_1_00000000",
        row=1,
        text="t",
        finish_reason="stop",
        usage=dict(prompt_tokens=1, completion_tokens=1),
        error=None,
    )
    table = AnswerTable(lambda: iter([(1, record)]), TableFile(path))
    table.write_csv(path.with_suffix(".out.csv"), "out.csv")
    [row] = read(path.with_suffix(".out.csv"))
    called = table.names.of
    assert row[name] == cell and row[called("text")] == "t"
    assert {called(k) for k in ANSWER} <= row.keys()


def test_settings_in_columns_count_as_in_lines(tmp_path):
    "The same settings in a CSV, in Parquet and in lines of JSONL give the same answers; an empty cell leaves it open."
    given = [
        dict(max_tokens=3, temperature=0),
        dict(max_tokens=1, temperature=None),
        dict(max_tokens=None, temperature=1.0),
        dict(max_tokens=4, temperature=0.5),
    ]
    asks = [
        dict(
            prompt=f"ask {i}",
            seed=i,
            ignore_eos=None if i == 3 else True,
            guided_choice=["ab", "cd"] if i == 3 else None,
            stop="5",
            **g,
        )
        for i, g in enumerate(given)
    ]
    frame = pd.DataFrame(asks)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "b.parquet")
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({k: v for k, v in a.items() if v is not None}) + "\n" for a in asks)
    )
    cells = frame.guided_choice.map(lambda v: json.dumps(v) if isinstance(v, list) else v)
    frame.assign(guided_choice=cells).to_csv(tmp_path / "a.csv", index=False)
    found = []
    for name in ("a.csv", "b.parquet", "c.jsonl"):
        columns = [c for c in frame.columns if c != "prompt"] if name != "c.jsonl" else []
        result = run(
            tmp_path / name,
            tmp_path / f"{name}.csv",
            dict(max_tokens=2, temperature=0),
            model=llm(),
            setting_columns=columns,
        )
        found.append(
            [
                (r["text"], r["completion_tokens"], r["error"])
                for r in read(tmp_path / f"{name}.csv")
            ]
        )
        assert result.failed == 0, found
    assert (
        found[0] == found[1] == found[2]
        and [r[1] for r in found[0]][:3] == ["3", "1", "2"]
        and found[0][3][0] in ("ab", "cd")
    )


def test_messages_and_system_of_a_table(tmp_path):
    talk = [[dict(role="user", content=f"Hi {i}")] for i in range(3)]
    write(
        tmp_path / "in.csv",
        [["messages", "tone"], *([json.dumps(m), t] for m, t in zip(talk, ("kind", "curt", "")))],
    )
    pq.write_table(
        pa.table(dict(messages=talk, tone=["kind", "curt", None])), tmp_path / "in.parquet"
    )
    want = [
        o.outputs[0].text
        for o in llm().chat(
            [[dict(role="system", content=f"Be {t}."), *m] for m, t in zip(talk, ("kind", "curt"))],
            SamplingParams(temperature=0, **SHORT),
            use_tqdm=False,
        )
    ]
    for name in ("in.csv", "in.parquet"):
        result = run(
            tmp_path / name, tmp_path / f"{name}.out.csv", SHORT, model=llm(), system="Be {tone}."
        )
        rows = read(tmp_path / f"{name}.out.csv")
        assert [r["text"] for r in rows[:2]] == [
            w.encode("utf-8", "replace").decode() for w in want
        ] and result.failed == 1
        assert rows[2]["error"] == "row 3: column 'tone' is empty: empty='' lets it be"


def test_a_timeout_in_a_line_counts_and_a_priority_is_refused(tmp_path):
    lines = [
        dict(prompt="a", max_tokens=500, ignore_eos=True, timeout=1e-9),
        dict(prompt="b", max_tokens=1),
        dict(prompt="c", priority=1),
        dict(prompt="d", timeout="soon"),
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(d) + "\n" for d in lines))
    run(tmp_path / "in.jsonl", tmp_path / "out.csv", model=llm())
    assert [r["error"] for r in read(tmp_path / "out.csv")] == [
        "line 1: not done after 1e-09 seconds",
        "",
        "line 3: priority means nothing in a file: its requests run in whichever "
        "order is the quickest, so leave it out",
        "line 4: timeout must be a number of seconds above 0, got 'soon'",
    ]


def test_options_of_a_conversation_reach_the_template(tmp_path):
    talk = [dict(role="user", content="Hi"), dict(role="assistant", content="The sea")]
    line = parse_line(
        1,
        json.dumps(
            dict(messages=talk, continue_final_message=True, add_generation_prompt=False)
        ).encode(),
        "plain",
    )
    assert line.failure is None and line.conversation == dict(
        messages=talk, continue_final_message=True, add_generation_prompt=False
    )
    assert (
        "chat_template"
        in parse_line(
            1, json.dumps(dict(messages=talk, chat_template="/etc/passwd")).encode(), "plain"
        ).failure[1]
    )
    body = dict(
        custom_id="a",
        url="/v1/chat/completions",
        method="POST",
        body=dict(messages=talk, tools=[dict(type="function")]),
    )
    assert "tools[0].function must be" in parse_line(1, json.dumps(body).encode()).failure[1]
    lines = [
        dict(messages=talk, **d)
        for d in ({}, dict(continue_final_message=True, add_generation_prompt=False))
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(d) + "\n" for d in lines))
    assert run(tmp_path / "in.jsonl", tmp_path / "out.csv", SHORT, model=llm()).failed == 0
    tokens = [int(r["prompt_tokens"]) for r in read(tmp_path / "out.csv")]
    assert tokens[1] < tokens[0]


# --- refused before anything runs, and nothing left behind


@pytest.mark.parametrize(
    "args, words",
    [
        (dict(prompt_column="nope"), ["no column 'nope'", "'question'"]),
        (dict(prompt_column="questoin"), ["did you mean 'question'?"]),
        (dict(prompt_column="question", id_column="nope"), ["'nope'", "'id'"]),
        (dict(prompt_template="{lng}: {id}"), ["did you mean 'lang'?"]),
        (dict(prompt_template='{"a": 1}'), ["{{"]),
        (dict(prompt_template="{lang"), ["{{"]),
        (dict(prompt_column="question", system="Be brief."), ["chat"]),
        (dict(prompt_column="question", setting_columns=["x"]), ["'x'"]),
        (dict(prompt_column="question", output="o.xlsx"), [".xlsx"]),
        (dict(prompt_column="question", output="o.parquet.gz"), ["Parquet is compressed"]),
        (dict(prompt_column="question", error_file="e.csv"), ["JSONL"]),
        (dict(input="t.xlsx"), ["read_excel"]),
        (dict(input="t.feather"), ["read_feather"]),
        (dict(input="t.docx"), ["can't be read"]),
        (dict(input="bad.csv", setting_columns=["max_tokns"]), ["'max_tokns'", "max_tokens"]),
        (dict(input="sys.csv", setting_columns=["system"]), ["{system}"]),
        (dict(input="p.jsonl", prompt_template="{a}"), ["no column 'a'", "'prompt'"]),
        (dict(input="p.txt", prompt_column="a"), ["one prompt a line"]),
        (dict(input="cut.parquet"), ["not a Parquet file"]),
        (dict(input="arr.json"), ["array"]),
        (dict(input="semi.csv", prompt_column="q", delimiter=","), ["no column 'q'"]),
        (dict(input="semi.csv", encoding="utf-99"), ["utf-99"]),
        (dict(input="."), ["is no file"]),
        (dict(input="p.jsonl", delimiter=";"), ["CSV"]),
        (dict(input="semi.csv", delimiter=";;"), ["one character"]),
        (dict(input="quote.csv"), ["the header, line 1"]),
    ],
)
def test_mistakes_are_refused_and_leave_nothing(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    write("in.csv", [["id", "lang", "question"], [1, "de", "x"]])
    write("bad.csv", [["prompt", "max_tokns"], ["a", 1]])
    write("sys.csv", [["prompt", "system"], ["a", "b"]])
    Path("semi.csv").write_text("id;q\n1;a\n")
    Path("quote.csv").write_text('"prompt,q\n1;a\n')
    for name in ("t.xlsx", "t.feather", "t.docx", "cut.parquet"):
        Path(name).write_bytes(b"PK\x03\x04xxxx")
    Path("p.jsonl").write_text('{"prompt": "a"}\n')
    Path("p.txt").write_text("a\n")
    Path("arr.json").write_text('[{"prompt": "a"},')
    before = sorted(os.listdir())
    with pytest.raises(JobError) as e:
        Job(**dict(input="in.csv", output="out.csv") | args).run(
            lambda: pytest.fail("a model is loaded")
        )
    assert all(w in str(e.value) for w in words), e.value
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "name, data",
    [
        ("p.txt", 'Say one\nSay "two"\r\n\n  Say three\n'),
        ("p.tsv", 'prompt\tx\nSay one\t1\n"Say ""two"""\t2\n  Say three\t3\n'),
        (
            "p.json",
            '[{"prompt": "Say one"},\n {"prompt": "Say \\"two\\""}, {"prompt": "  Say three"}]',
        ),
        ("p", '{"prompt": "Say one"}\n{"prompt": "Say \\"two\\""}\n{"prompt": "  Say three"}'),
    ],
)
def test_kinds_of_files(tmp_path, name, data):
    (tmp_path / name).write_bytes(data.encode())
    assert run(tmp_path / name, tmp_path / "out.tsv", SHORT, model=llm()).answered == 3
    with open(tmp_path / "out.tsv", newline="", encoding="utf-8") as f:
        rows = [*csv.DictReader(f, delimiter="\t")]
    want = [
        o.outputs[0].text
        for o in llm().generate(
            ["Say one", 'Say "two"', "  Say three"],
            SamplingParams(temperature=0, **SHORT),
            use_tqdm=False,
        )
    ]
    assert [r["text"] for r in rows] == [w.encode("utf-8", "replace").decode() for w in want]


def test_a_check_needs_neither_torch_nor_transformers(tmp_path):
    write(tmp_path / "in.csv", [["id", "lang", "max_tokens"], [1, "de", 3], [2, "", "ten"]])
    code = "import sys; from batchlab.cli import main; print(main(sys.argv[1:]), {'torch', 'transformers'} & {*sys.modules})"
    p = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "run",
            "-i",
            "in.csv",
            "--dry-run",
            "--prompt-template",
            "In {lang}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert p.stdout.splitlines()[-1] == "1 set()" and "row 2: column 'lang' is empty" in p.stdout, (
        p.stderr
    )


# --- one folder, gone when it is done; the output says how it was made


@pytest.mark.parametrize(
    "name", ["out.csv", "out.tsv.gz", "out.parquet", "out.jsonl", "out.jsonl.gz"]
)
def test_a_finished_output_is_its_own_journal(tmp_path, name):
    "The same command finds all done and touches nothing, adds what is new, tries failures again, and refuses other settings."

    def rows(n):
        write(
            tmp_path / "in.csv",
            [
                ["id", "prompt", "label"],
                *([i, f"ask {i}" if i != 2 else "", f"l{i}"] for i in range(n)),
            ],
        )

    job = lambda **kw: Job(
        tmp_path / "in.csv", tmp_path / name, sampling_params=dict(SHORT), id_column="id", **kw
    )

    def table():
        return {
            r["id"] if "id" in r else r["custom_id"]: {k: v for k, v in r.items() if k != "usage"}
            for r in records()
        }

    def records():
        import gzip

        if "parquet" in name:
            return pq.read_table(tmp_path / name).to_pylist()
        f = (gzip.open if name.endswith(".gz") else open)(
            tmp_path / name, "rt", encoding="utf-8", newline=""
        )
        with f:
            return (
                [json.loads(s) for s in f]
                if "jsonl" in name
                else [*csv.DictReader(f, delimiter="\t" if "tsv" in name else ",")]
            )

    rows(5)
    assert job().run(llm()).failed == 1 and left(tmp_path, name) == []
    first, data, when = (
        table(),
        (tmp_path / name).read_bytes(),
        (tmp_path / name).stat().st_mtime_ns,
    )
    assert (
        job().run(None).before,
        (tmp_path / name).read_bytes(),
        (tmp_path / name).stat().st_mtime_ns,
    ) == (5, data, when)
    for change, words in (
        (dict(sampling_params=dict(max_tokens=3)), "other sampling parameters"),
        (dict(prompt_template="{id}"), "not what it was|other columns"),
        (dict(chat=True), "other columns"),
    ):
        with pytest.raises(JobError, match=words):
            Job(
                **dict(
                    input=tmp_path / "in.csv",
                    output=tmp_path / name,
                    sampling_params=dict(SHORT),
                    id_column="id",
                )
                | change
            ).run(llm())
    rows(8)
    other = LLM(tiny_model("llama", seed=1, num_hidden_layers=1), tiny_tokenizer())
    with pytest.raises(JobError, match="other model"):
        job().run(other)
    assert (tmp_path / name).read_bytes() == data and left(tmp_path, name) == []
    r = job(keep_journal=True).run(llm())
    assert (r.before, r.answered, r.failed) == (5, 7, 1) and left(tmp_path, name) == [
        f"{name}.batchlab"
    ]
    assert {k: v for k, v in table().items() if k in first} == first and len(table()) == 8
    again = job(retry_errors=True).run(llm())
    assert (again.before, again.failed, left(tmp_path, name), len(records())) == (7, 1, [], 8)


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.jsonl.gz"])
def test_files_of_others_beside_the_output_stay(tmp_path, name):
    "Only what a job made is replaced or taken away, whatever it is called."
    write(tmp_path / "in.csv", [["prompt"], ["a"], [""]])
    own = [tmp_path / f"{name}{end}" for end in (".new", ".job", ".lock", ".jsonl")]
    for i, path in enumerate(own):
        path.write_text('{"mine": %d}' % i)
    new = tmp_path / f"{name}.batchlab.new"
    new.write_text("of a run that was killed")
    for again in range(2):
        job = Job(
            tmp_path / "in.csv",
            tmp_path / name,
            sampling_params=dict(SHORT),
            ordered=True,
            retry_errors=bool(again),
        )
        assert (job.run(llm()).before, job.result.failed) == (again, 1)
        assert [path.read_text() for path in own] == [
            '{"mine": %d}' % i for i in range(4)
        ] and not new.exists()


def test_an_interrupt_before_the_first_answer_leaves_nothing(tmp_path):
    write(tmp_path / "in.csv", [["prompt"], ["a"]])

    class Never:
        def __getattr__(self, name):
            return getattr(llm(), name)

        def step(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Job(tmp_path / "in.csv", tmp_path / "out.csv").run(Never())
    assert os.listdir(tmp_path) == ["in.csv"]


def test_killed_while_the_table_is_written(tmp_path, monkeypatch):
    "The journal goes only after the table stands; a death in between costs nothing."
    import batchlab.jobs.job as jobs

    write(tmp_path / "in.csv", [["id", "prompt"], *([i, f"ask {i}"] for i in range(9))])

    class Died(BaseException):
        pass

    def die(*_):
        raise Died

    for name in ("export_records", "drop_side"):
        out = tmp_path / f"{name}.parquet"
        with monkeypatch.context() as m:
            m.setattr(jobs, name, die)
            with pytest.raises(Died):
                Job(tmp_path / "in.csv", out, sampling_params=dict(SHORT)).run(llm())
        assert Path(journal_of(out)).exists() and settings_file(out).exists()
        assert Job(tmp_path / "in.csv", out, sampling_params=dict(SHORT)).run(None).before == 9
        assert (
            pq.read_table(out)["id"].to_pylist() == [*range(9)] and left(tmp_path, out.name) == []
        )


def test_a_stamp_names_what_differs():
    now = dict(form="plain", sampling_params=dict(top_k=1), model="m", prompt_column="prompt")
    assert len(stamp_of(now)) == 12 and stamp_of(
        now | dict(prompt_template=None, chat=False, ordered=True)
    ) == stamp_of(now)
    differs = [
        stamp_of(now | d) for d in (dict(sampling_params=None), dict(model="n"), dict(system="x"))
    ]
    assert [[a[i : i + 4] == stamp_of(now)[i : i + 4] for i in (0, 4, 8)] for a in differs] == [
        [False, True, True],
        [True, False, True],
        [True, True, False],
    ]


# --- frames


def arrow_like(table):
    "A class of somebody's that gives and takes Arrow, as polars does."

    class Frame:
        def __init__(self, table):
            self.table = table

        def __arrow_c_stream__(self, requested_schema=None):
            return self.table.__arrow_c_stream__(requested_schema)

    return Frame(table)


def test_frames_of_every_kind_give_the_same(tmp_path):
    rng = random.Random(1)
    frame = pd.DataFrame(
        dict(
            q=[f"ask {rng.random()}" for _ in range(20)],
            lang=["de", ""] * 10,
            max_tokens=[1 + i % 3 for i in range(20)],
            error=range(20),
        ),
        index=[f"k{i}" for i in range(20)],
    )
    table = pa.Table.from_pandas(frame, preserve_index=False)
    frame.to_csv(tmp_path / "in.csv", index=False)
    args = dict(
        template="{lang}: {q}",
        sampling_params=dict(temperature=0, ignore_eos=True),
        setting_columns=["max_tokens"],
    )
    pandas, arrow, rows = (llm().map(f, **args) for f in (frame, table, table.to_pylist()))
    other = llm().map(arrow_like(table), **args)
    run(
        tmp_path / "in.csv",
        tmp_path / "out.parquet",
        dict(ignore_eos=True),
        model=llm(),
        prompt_template="{lang}: {q}",
        setting_columns=["max_tokens"],
    )
    assert (
        type(other).__name__ == "Frame" and other.table.equals(arrow) and arrow.to_pylist() == rows
    )
    assert [*pandas.index] == [*frame.index] and [*pandas.columns] == arrow.column_names == [
        *rows[0]
    ] == ["q", "lang", "max_tokens", "error", *ANSWER][:-1] + ["error_2"]
    assert pandas.completion_tokens.dtype == "Int64" and pandas.completion_tokens.fillna(
        0
    ).tolist() == [(1 + i % 3) * (i % 2 == 0) for i in range(20)]
    assert (
        [None if pd.isna(t) else t for t in pandas.text]
        == arrow["text"].to_pylist()
        == pq.read_table(tmp_path / "out.parquet")["text"].to_pylist()
    )
    assert frame.columns.tolist() == [
        "q",
        "lang",
        "max_tokens",
        "error",
    ]  # the caller's own is untouched


def test_a_frame_with_several_answers_and_functions(caplog):
    frame = pd.DataFrame(dict(prompt=["a", None, "c"]), index=[7, 8, 9])
    made = llm().map(
        frame,
        None,
        dict(n=2, max_tokens=3, ignore_eos=True, logprobs=1),
        output="answer",
        postprocess=dict(
            size=lambda out: len(out.outputs[0].token_ids),
            bad=lambda out: 1 // (9 - out.outputs[0].index * 9),
        ),
    )
    assert (
        [*made.index] == [7, 7, 8, 9, 9]
        and made["index"].fillna(-1).tolist() == [0, 1, -1, 0, 1]
        and made["size"].fillna(0).tolist() == [3, 3, 0, 3, 3]
    )
    assert made.error.notna().tolist() == [
        False,
        True,
        True,
        False,
        True,
    ] or made.error.notna().tolist() == [True, True, True, True, True]
    assert (
        "bad of the answer failed (ZeroDivisionError" in made.error.iloc[1]
        and isinstance(made.answer.iloc[1], str)
        and made.bad.iloc[0] == 0
    )
    assert "1 of 3 rows can not run, the first is row 2: the prompt is empty" in caplog.text
    empty = llm().map(frame.iloc[:0])
    assert len(empty) == 0 and [*empty.columns] == ["prompt", *ANSWER]


@pytest.mark.parametrize(
    "frame, args, error, words",
    [
        ("text", {}, PromptError, "llm.generate takes prompts"),
        (dict(prompt=["a"]), {}, PromptError, "pandas.DataFrame"),
        (pd.Series(["a"]), {}, PromptError, "to_frame"),
        (pd.DataFrame(dict(q=["a"])), {}, JobError, "no column 'prompt'"),
        (pd.DataFrame(dict(q=["a"])), dict(template="{x}"), JobError, "no column 'x'"),
        (
            pd.DataFrame(dict(prompt=["a"])),
            dict(sampling_params=dict(temprature=1)),
            ParamError,
            "temperature",
        ),
        (pd.DataFrame(dict(prompt=["a"])), dict(system="x"), JobError, "chat=True"),
        (pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]), {}, PromptError, "two columns"),
    ],
)
def test_a_frame_that_is_none_is_refused(frame, args, error, words):
    with pytest.raises(error, match=words):
        llm().map(frame, **args)


def test_run_goes_on_and_keeps_what_functions_made(tmp_path):
    write(tmp_path / "in.csv", [["id", "prompt"], *([i, f"ask {i}"] for i in range(6))])
    called = []

    def made(out):
        called.append(1)
        return dict(size=len(out.outputs[0].token_ids), words=["a", "b"])

    args = dict(
        sampling_params=SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        model=llm(),
        postprocess=made,
        use_tqdm=False,
    )
    assert run(tmp_path / "in.csv", tmp_path / "out.parquet", **args, limit=4).done == 4
    assert (
        run(tmp_path / "in.csv", tmp_path / "out.parquet", **args).before == 4 and len(called) == 6
    )
    found = pq.read_table(tmp_path / "out.parquet")
    assert (
        found["size"].to_pylist() == [2] * 6
        and found.schema.field("size").type == pa.int64()
        and json.loads(found["words"][5].as_py()) == ["a", "b"]
    )
    with pytest.raises(JobError, match="other columns"):
        run(tmp_path / "in.csv", tmp_path / "out.parquet", **args | dict(postprocess=None))
    with pytest.raises(ParamError, match="prompt_template"):
        run(tmp_path / "in.csv", tmp_path / "o.csv", **args, prompt_tempalte="x")
    import batchlab

    assert (
        batchlab.run is run
        and map_frame.__name__ == "map_frame"
        and NO_SETTINGS
        and Row("a").prompt == "a"
    )


# --- what must not be lost on the way out

RECORD = dict(
    request_id="batch_req_1_00000000",
    row=1,
    text="t",
    finish_reason="stop",
    usage=dict(prompt_tokens=1, completion_tokens=1),
    error=None,
)


def answered(path, out):
    "One answer to the only row of table `path` in file `out`."
    from batchlab.jobs.formats import export_records

    export_records(lambda: iter([(1, RECORD)]), out, TableFile(path))


def test_a_table_is_on_the_disk_before_its_journal_goes(tmp_path, monkeypatch):
    import batchlab.jobs.job as jobs

    write(tmp_path / "in.csv", [["prompt"], ["a"]])
    done, fsync, drop, replace = [], os.fsync, jobs.drop_side, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)),
    )
    monkeypatch.setattr(
        os, "replace", lambda a, b: (done.append("replace " + os.path.basename(b)), replace(a, b))
    )
    monkeypatch.setattr(jobs, "drop_side", lambda p: (done.append("drop"), drop(p)))
    run(tmp_path / "in.csv", tmp_path / "out.csv", SHORT, model=llm())
    assert done[-4:] == ["out.csv.batchlab.new", "replace out.csv", tmp_path.name, "drop"]


def test_pandas_metadata_of_clashes(tmp_path):
    frame = pd.DataFrame(dict(prompt=["a"], prompt_tokens=[7]), index=pd.Index(["k"], name="text"))
    frame.to_parquet(tmp_path / "in.parquet")
    answered(tmp_path / "in.parquet", tmp_path / "out.parquet")
    found = pd.read_parquet(tmp_path / "out.parquet")
    assert (
        found.index.name,
        [*found.index],
        found.prompt_tokens.iloc[0],
        found.prompt_tokens_2.iloc[0],
        found.prompt_tokens_2.dtype,
    ) == ("text", ["k"], 7, 1, "Int64")


def test_what_arrow_can_not_hold_comes_back(tmp_path):
    assert type_of([1, 2**70], text=False).name == "string" and literal("1１") == "1１"
    (tmp_path / "in.csv").write_bytes(b"prompt,caf\xe9\na,1\n")
    answered(tmp_path / "in.csv", tmp_path / "a.parquet")
    assert "caf\ufffd" in pq.read_table(tmp_path / "a.parquet").column_names
    pq.write_table(
        pa.table(dict(prompt=pa.array(["a"], pa.string_view()), x=[1])), tmp_path / "v.parquet"
    )
    answered(tmp_path / "v.parquet", tmp_path / "b.parquet")
    assert pq.read_table(tmp_path / "b.parquet")["prompt"].to_pylist() == ["a"] and [
        *TableFile(tmp_path / "v.parquet").rows(["x"])
    ] == [(1, dict(x=1))]
    pq.write_table(
        pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["prompt", "prompt"]),
        tmp_path / "twice.parquet",
    )
    with pytest.raises(JobError, match="two columns 'prompt'"):
        Job(tmp_path / "twice.parquet", tmp_path / "c.csv").check()


def test_a_row_with_a_cell_too_many_keeps_its_cells(tmp_path):
    write(tmp_path / "in.csv", [["id", "prompt"], ["k1", "a", "b"]])
    for name in ("out.csv", "out.parquet", "out.jsonl"):
        assert (
            run(tmp_path / "in.csv", tmp_path / name, SHORT, model=llm(), id_column="id").failed
            == 1
        )
    assert (
        read(tmp_path / "out.csv")[0]["id"]
        == pq.read_table(tmp_path / "out.parquet")["id"][0].as_py()
        == json.loads((tmp_path / "out.jsonl").read_text())["custom_id"]
        == "k1"
    )


def test_columns_that_are_no_settings():
    names = [
        "prompt",
        *ANSWER,
        "logprobs",
        "index",
        "speed",
        "top",
        "stops",
        "seeds",
        "n",
        "temperature",
    ]
    assert Columns(names).settings == [] and Columns(names).alike == ["n", "temperature"]
    columns = Columns(names, setting_columns=["n", "logprobs"])
    assert columns.settings == ["logprobs", "n"] and columns.alike == ["temperature"]
    cells = dict.fromkeys(columns.names) | dict(prompt="a", logprobs='{"tokens": []}')
    assert columns.row(cells).given is None and columns.row(
        cells | dict(logprobs="2")
    ).given == dict(logprobs=2)
    assert (
        "nested"
        in Columns(["prompt", "logit_bias"], setting_columns=["logit_bias"])
        .row(dict(prompt="a", logit_bias="[" * 200000))
        .failure
    )
    for bad in ("{a:{b}}", "{a!z}", "{a:zz}"):
        with pytest.raises(JobError, match="written"):
            Columns(["a", "b"], prompt_template=bad)
    with pytest.raises(JobError, match="one of them"):
        Columns(["a", "nope"], prompt_template="{a}", prompt_column="nope")


def test_settings_of_columns_are_said(tmp_path):
    "A patient's temperature is no temperature to sample at, whatever its column is called."
    write(
        tmp_path / "in.csv",
        [
            ["prompt", "temperature", "max_tokens", "seed"],
            ["a", 36.6, 1, 2],
            ["b", -2, "many", "x"],
        ],
    )
    said = []
    run(tmp_path / "in.csv", tmp_path / "out.csv", SHORT, model=llm(), say=said.append)
    assert said[0] == (
        "columns with names of settings are data here: temperature, max_tokens, seed; "
        "setting_columns=['temperature', 'max_tokens', 'seed'] makes them settings of their row"
    )
    run(
        tmp_path / "in.csv",
        tmp_path / "x.csv",
        SHORT,
        model=llm(),
        say=said.append,
        spell=parser_of("run").spell,
    )
    assert any("; --setting-columns temperature,max_tokens,seed makes them" in s for s in said)
    found = read(tmp_path / "out.csv")
    assert [(r["temperature"], r["completion_tokens"], r["error"]) for r in found] == [
        ("36.6", "2", ""),
        ("-2", "2", ""),
    ]
    run(
        tmp_path / "in.csv",
        tmp_path / "set.csv",
        SHORT,
        model=llm(),
        setting_columns=["max_tokens"],
    )
    assert [r["completion_tokens"] for r in read(tmp_path / "set.csv")] == [
        "1",
        "",
    ] and "max_tokens" in read(tmp_path / "set.csv")[1]["error"]
    frame = llm().map(
        pd.DataFrame(dict(prompt=["a"], temperature=[36.6], max_tokens=[1])),
        sampling_params=SHORT,
        setting_columns=["max_tokens"],
    )
    assert frame.completion_tokens[0] == 1 and frame.temperature[0] == 36.6


def test_records_of_odd_cells(tmp_path):
    pq.write_table(
        pa.table(
            dict(
                prompt=["a", "b"],
                x=[float("inf"), 1.0],
                raw=[b"z", b"\xff"],
                e=["", "q"],
                k=[1.0, None],
            )
        ),
        tmp_path / "in.parquet",
    )
    columns = Columns(["prompt", "x", "raw", "e", "k"], id_column="k", keep=True)
    (_, first), _ = TableFile(tmp_path / "in.parquet").rows()
    row = columns.row(first)
    assert (row.cells["x"], row.cells["raw"], row.cells["e"], parse_line(1, row, "plain").ids) == (
        None,
        "z",
        "",
        dict(custom_id=1),
    )


def test_maps_that_need_no_column_and_plain_values():
    import numpy as np

    assert len(llm().map(pd.DataFrame(dict(x=[1, 2])), "Tell a joke", SHORT)) == 2
    made = llm().map(
        [dict(prompt="a")],
        None,
        SHORT,
        postprocess=lambda out: dict(size=np.int64(3), some=[np.float32(1)]),
    )
    assert made[0]["size"] == 3 and json.loads(made[0]["some"]) == [1.0]
    for name in ("id", "custom_id", "row", "line", "request_id"):
        assert (
            "column of the answer"
            in llm().map([dict(prompt="a")], None, SHORT, postprocess={name: len})[0]["error"]
            or name
        )
    assert (
        "column of the answer"
        in llm().map([dict(prompt="a")], None, SHORT, postprocess=lambda out: dict(id=1))[0][
            "error"
        ]
    )
    with pytest.raises(ParamError, match="another column"):
        llm().map([dict(prompt="a")], output="error")


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_a_table_without_answers_has_its_header(tmp_path, name):
    write(tmp_path / "in.csv", [["id", "prompt"], [1, ""]])
    args = dict(
        sampling_params=SHORT, model=llm(), error_file=tmp_path / "e.jsonl", say=lambda s: None
    )
    assert run(tmp_path / "in.csv", tmp_path / name, **args).failed == 1
    found = pd.read_csv(tmp_path / name) if "csv" in name else pd.read_parquet(tmp_path / name)
    assert len(found) == 0 and [*found.columns] == ["id", "prompt", *ANSWER, "request_id"]
    assert run(tmp_path / "in.csv", tmp_path / name, **args).before == 1


def test_a_finished_table_through_pandas_and_a_second_try(tmp_path):
    write(tmp_path / "in.csv", [["prompt"], ["a"], [""]])
    run(tmp_path / "in.csv", tmp_path / "out.csv", SHORT, model=llm())
    pd.read_csv(tmp_path / "out.csv").to_csv(tmp_path / "out.csv", index=False)
    settings_file(tmp_path / "out.csv").parent.mkdir()
    (settings_file(tmp_path / "out.csv").parent / "answers.jsonl.new").touch()
    assert (
        run(tmp_path / "in.csv", tmp_path / "out.csv", SHORT, model=llm()).before == 2
        and left(tmp_path, "out.csv") == []
    )
    data = (tmp_path / "out.csv").read_bytes()
    with pytest.raises(JobError, match="other model"):
        run(
            tmp_path / "in.csv",
            tmp_path / "out.csv",
            SHORT,
            model=LLM(tiny_model("llama", seed=1, num_hidden_layers=1), tiny_tokenizer()),
            retry_errors=True,
        )
    assert (tmp_path / "out.csv").read_bytes() == data and left(tmp_path, "out.csv") == []


def test_a_line_that_the_model_can_not_run_fails_alone(tmp_path):
    base = LLM(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer())
    base.tokenizer.chat_template = None
    lines = [dict(prompt="a"), dict(messages=[dict(role="user", content="x")]), dict(prompt="b")]
    for some, failed in ((lines, 1), (lines[1:], None)):
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(d) + "\n" for d in some))
        job = Job(
            tmp_path / "in.jsonl", tmp_path / f"{len(some)}.jsonl", sampling_params=dict(SHORT)
        )
        if failed:
            assert job.run(base).failed == failed
        else:
            with pytest.raises(JobError, match="template"):
                job.run(base)


@pytest.mark.parametrize("args", [dict(system="x"), dict(prompt_column="q"), dict(id_column="q")])
@pytest.mark.parametrize("name, data", [("in.txt", "a\n"), ("in.jsonl", '{"prompt": "a"}\n')])
def test_arguments_without_effect_are_refused(tmp_path, name, data, args):
    (tmp_path / name).write_text(data)
    with pytest.raises(JobError):
        Job(tmp_path / name, tmp_path / "o.jsonl", **args).check()


def test_a_second_try_keeps_what_it_does_not_run_again(tmp_path):
    "A failure beyond the limit stays; answers of rows that the input has no more are not dropped without a word."
    rows = [["id", "prompt"], [1, "a"], [2, "b"], [3, ""], [4, "d"], [5, ""]]
    write(tmp_path / "in.csv", rows)
    job = lambda **kw: run(
        tmp_path / "in.csv", tmp_path / "out.csv", SHORT, model=llm(), id_column="id", **kw
    )
    job()
    before = read(tmp_path / "out.csv")
    assert len(before) == 5 and [bool(r["error"]) for r in before] == [
        False,
        False,
        True,
        False,
        True,
    ]
    job(limit=3, retry_errors=True)
    assert read(tmp_path / "out.csv") == before
    write(tmp_path / "in.csv", rows[:4])
    with pytest.raises(JobError, match="has lost rows: its last is 3, and 1 beyond it, from 4 on"):
        job(retry_errors=True)
    write(tmp_path / "in.csv", rows)
    assert job(retry_errors=True).done == 5 and read(tmp_path / "out.csv") == before


# --- rows that a reader could lose without a word


@pytest.mark.parametrize(
    "tail, said",
    [
        ('"c,3\nd,4\ne,5\n', "a quote in row 3, line 4, is never closed"),
        ('"c, cut off here', "a quote in row 3, line 4, is never closed"),
        (
            '"c,3\nd,4\n"e",5\nf,6\n',
            "a quote in row 3, line 4, takes all up to line 6 into one cell",
        ),
    ],
)
@pytest.mark.parametrize("name", ["in.csv", "in.csv.gz", "in.tsv"])
def test_a_quote_that_swallows_rows_is_an_error(tmp_path, name, tail, said):
    "What stands before it is answered, no row of what it took is made up, and the mended file goes on from there."
    mended = tail.replace('"', "")
    text = lambda end: ("prompt,x\na,1\nb,2\n" + end).replace(
        ",", "\t" if name == "in.tsv" else ","
    )
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(text(tail).encode()))
    job = lambda: Job(tmp_path / name, tmp_path / "out.csv", sampling_params=SHORT)
    for again in range(2):  # also where nothing is left to do but the broken part
        with pytest.raises(JobError) as e:
            job().run(llm())
        assert (
            e.value.status == 1
            and said in str(e.value)
            and "beyond row 2" in str(e.value)
            and not (tmp_path / "out.csv").exists()
        )
    with pytest.raises(JobError, match="beyond row 2"):
        job().dry_run()
    with pytest.raises(JobError, match="beyond row 2"):
        job().plan(llm(), calibrate=False)
    (tmp_path / name).write_bytes(pack(text(mended).encode()))
    result = job().run(llm())
    assert (
        result.before == 2
        and result.failed == 0
        and result.answered == mended.count("\n") + 2 + (not mended.endswith("\n"))
    )


@pytest.mark.parametrize("source", ["csv", "jsonl"])
@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_a_result_that_is_called_as_a_column_of_the_input_stands_beside_it(tmp_path, source, name):
    if source == "csv":
        write(tmp_path / "in.csv", [["prompt", "own"], ["a", "1"], ["b", "2"]])
    else:
        (tmp_path / "in.jsonl").write_text('{"prompt":"a","own":"1"}\n{"prompt":"b","own":"2"}\n')
    job = lambda: Job(
        tmp_path / f"in.{source}",
        tmp_path / name,
        sampling_params=SHORT,
        postprocess=lambda o: dict(own="made", own_2="too", free=3),
    )
    assert job().run(llm()).failed == 0
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = lambda path: (
        parquet.read_table(path).to_pylist() if name == "out.parquet" else read(path)
    )
    found = [{k: str(v) for k, v in r.items()} for r in rows(tmp_path / name)]
    assert [(r["own"], r["own_2"], r["own_2_result"], r["free"]) for r in found] == [
        ("1", "made", "too", "3"),
        ("2", "made", "too", "3"),
    ]
    assert job().run(llm()).before == 2  # and it is known again


@pytest.mark.parametrize("name", ["in.csv.gz", "in.csv.bz2", "in.csv.xz", "in.txt.bz2"])
def test_a_damaged_stream_behind_a_whole_one_is_an_error(tmp_path, name):
    "A file that was appended to: what follows the first stream is read or missed aloud; zeros at its end are padding."
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[name.split(".")[-1]]
    head = b"" if ".txt" in name else b"prompt\n"
    first, second = pack(head + b"a\nb\n"), pack(b"".join(b"row %d\n" % i for i in range(2000)))
    job = lambda: Job(tmp_path / name, tmp_path / "out.jsonl", sampling_params=SHORT)
    for damaged in (second[:-9], second[:40] + b"!!!!" + second[44:], b"no stream at all"):
        (tmp_path / name).write_bytes(first + damaged)
        with pytest.raises(JobError, match="mend the file"):
            job().dry_run()
    (tmp_path / name).write_bytes(first + second + b"\0" * 512)
    assert job().dry_run().requests == 2002


def test_a_quote_that_ends_in_a_cell_fails_its_row_alone(tmp_path):
    (tmp_path / "in.csv").write_text('prompt,x\na,1\n"b" said, 2\n"c ""d""",3\n')
    result = Job(tmp_path / "in.csv", tmp_path / "out.csv", sampling_params=SHORT).run(llm())
    assert (result.answered, result.failed) == (2, 1) and "written twice" in read(
        tmp_path / "out.csv"
    )[1]["error"]
    result = Job(
        tmp_path / "in.csv",
        tmp_path / "as_it_is.jsonl",
        sampling_params=SHORT,
        quotes=False,
        ordered=True,
    ).run(llm())
    assert result.failed == 0 and [
        r["prompt"] for r in map(json.loads, (tmp_path / "as_it_is.jsonl").open())
    ][1:] == ['"b" said', '"c ""d"""']


@pytest.mark.parametrize("form", ["utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
@pytest.mark.parametrize("comma, end", [(";", "\r\n"), ("\t", "\n"), (",", "\n"), ("|", "\r\n")])
def test_every_way_to_write_a_csv(tmp_path, form, comma, end):
    "Semicolons, tabs and marks of an encoding are found, and said; what can't be found is given. Lines end as they did."
    said, rows = [], [["id", "prompt"], ["1", "Grüße, Zoë; bis bald"], ["2", "x" * 30]]
    (tmp_path / "in.csv").write_bytes(
        "".join(comma.join(f'"{c}"' for c in row) + end for row in rows).encode(form)
    )
    given = dict(
        encoding=form if form in ("utf-16-le", "cp1252") else None,
        delimiter="|" if comma == "|" else None,
    )
    assert (
        run(
            tmp_path / "in.csv", tmp_path / "out.csv", SHORT, model=llm(), say=said.append, **given
        ).failed
        == 0
    )
    data = (tmp_path / "out.csv").read_bytes()
    assert data.count(b"\n") == 3 and data.count(b"\r\n") == (3 if end == "\r\n" else 0)
    assert [[r["id"], r["prompt"]] for r in read(tmp_path / "out.csv")] == rows[1:]
    assert any("semicolons" in s for s in said) == (comma == ";") and any(
        "tabs" in s for s in said
    ) == (comma == "\t")
    assert any("UTF-16" in s for s in said) == (form == "utf-16")


def test_an_encoding_that_is_not_named_is_asked_for(tmp_path):
    (tmp_path / "in.csv").write_bytes("prompt\nGrüße\nx\n".encode("cp1252"))
    result = run(tmp_path / "in.csv", tmp_path / "out.csv", SHORT, model=llm())
    assert result.failed == 1 and "--encoding" in result.first_failure
    (tmp_path / "wide.csv").write_bytes("prompt\nGrüße\n".encode("utf-16-le"))
    with pytest.raises(JobError, match="looks like UTF-16.*utf-16-le"):
        run(tmp_path / "wide.csv", tmp_path / "o.csv", SHORT, model=llm())
    (tmp_path / "in.jsonl").write_bytes('{"prompt": "Grüße"}\n'.encode("utf-16"))
    failed = Job(
        tmp_path / "in.jsonl", tmp_path / "o.jsonl", form="plain", sampling_params=SHORT
    ).run(llm())
    assert "--encoding utf-16" in failed.first_failure
    assert (
        Job(tmp_path / "in.jsonl", tmp_path / "p.jsonl", encoding="utf-16", sampling_params=SHORT)
        .run(llm())
        .answered
        == 1
    )


def test_rows_that_are_gone_are_said(tmp_path):
    "An output that has answers of lines beyond the input's end is not called done."
    lines = [json.dumps(dict(prompt=f"say {i}")) + "\n" for i in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    job = lambda **kw: Job(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", sampling_params=SHORT, **kw
    )
    assert job().run(llm()).answered == 5
    assert job(limit=3).run(llm()).total == 3  # a limit is no loss
    (tmp_path / "in.jsonl").write_text("".join(lines[:3]))
    with pytest.raises(
        JobError, match="has lost rows: its last is 3, and 2 beyond it, from 4 on.* force=True"
    ):
        job().run(llm())
    assert (
        job(force=True).run(llm()).total == 3
        and len((tmp_path / "out.jsonl").read_text().splitlines()) == 5
    )


def test_a_file_without_requests_says_so(tmp_path):
    said = []
    for name, data in (("in.jsonl", ""), ("in.csv", "prompt\n")):
        (tmp_path / name).write_text(data)
        assert (
            Job(tmp_path / name, tmp_path / f"{name}.out.jsonl", say=said.append).run(llm()).total
            == 0
        )
    assert [s.rpartition("/")[2] for s in said] == [
        "in.jsonl has no request in it",
        "in.csv has no request in it",
    ]


def test_a_damaged_parquet_file_is_an_error_of_one_line(tmp_path):
    import pyarrow as pa

    pq.write_table(
        pa.table(dict(prompt=[f"hello {i}" for i in range(500)], n=range(500))),
        tmp_path / "whole.parquet",
        write_page_checksum=True,
    )
    whole, rng = (tmp_path / "whole.parquet").read_bytes(), random.Random(3)
    want = [*TableFile(tmp_path / "whole.parquet").rows()]
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 4])):
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        (tmp_path / "d.parquet").write_bytes(data)
        try:
            found = [*TableFile(tmp_path / "d.parquet").rows()]
        except JobError as e:
            assert "is not a Parquet file that can be read" in str(e) and "\n" not in str(e)
        else:
            assert len(found) == len(want)


# --- lines of JSONL with keys of their own

GSM = [
    dict(question_id=7, category="math", question="2 + 2?", text="four", hints=["a", None]),
    dict(question_id=8, category=None, question="3 + 3?"),
    dict(question_id=9, category="x", question="", user="me"),
]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "jsonl.gz"])
@pytest.mark.parametrize(
    "args, first",
    [
        (dict(prompt_column="question"), "2 + 2?"),
        (dict(prompt_template="{category}: {question}", empty="-"), "math: 2 + 2?"),
        (dict(prompt_column="question", chat=True, system="Be brief."), None),
    ],
)
def test_keys_of_a_line_are_its_columns(tmp_path, kind, args, first):
    "They make its prompt as a table's columns do, and stand beside the answer, also after a second run of the same output."
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(d) + "\n" for d in GSM))
    out = tmp_path / f"out.{kind}"
    job = lambda **kw: Job(
        tmp_path / "in.jsonl",
        out,
        sampling_params=SHORT,
        ordered=True,
        id_column="question_id",
        **args,
        **kw,
    )
    assert (
        job().dry_run().requests
        == job().plan(llm(), calibrate=False).requests
        == (3 if args.get("empty") else 2)
    )
    job(limit=1).run(llm())
    result = job().run(llm())
    assert (result.before, result.failed, result.cut) == (
        1,
        0 if args.get("empty") else 1,
        2 - (not args.get("empty")),
    )
    if kind == "csv":
        found = [{k: v or None for k, v in r.items()} for r in read(out)]
    elif kind == "parquet":
        found = pq.read_table(out).to_pylist()
    else:
        found = [json.loads(s) for s in (gzip.open if kind == "jsonl.gz" else open)(out, "rt")]
    assert (
        [str(r["question_id"]) for r in found]
        == [str(r["custom_id"]) for r in found]
        == ["7", "8", "9"]
    )
    assert (
        [r.get("category") for r in found] == ["math", None, "x"]
        and found[0]["text"] == "four"
        and "answer" in found[0]
        and found[2].get("user") == "me"
    )
    assert [r["finish_reason"] for r in found[:2]] == ["length"] * 2 and "id" not in found[0]
    if first:
        assert (
            found[0]["answer"]
            == llm()
            .generate(first, SamplingParams(temperature=0, **SHORT), use_tqdm=False)[0]
            .outputs[0]
            .text.encode("utf-8", "replace")
            .decode()
        )
    if kind == "csv":
        assert [*found[0]][:2] == ["line", "custom_id"] and json.loads(found[0]["hints"]) == [
            "a",
            None,
        ]


def test_lines_without_a_prompt_say_which_key_could_be_one(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(d) + "\n" for d in GSM))
    plan = Job(tmp_path / "in.jsonl").dry_run()
    assert (
        plan.failed == 3
        and "prompt_column='question' (--prompt-column question)" in plan.failures[0]
    )
    with pytest.raises(JobError, match="no column 'qestion', did you mean 'question'"):
        Job(tmp_path / "in.jsonl", prompt_column="qestion").dry_run()
    (tmp_path / "batch.jsonl").write_text(
        json.dumps(dict(custom_id="a", url="/v1/completions", method="POST", body=dict(prompt="x")))
        + "\n"
    )
    with pytest.raises(JobError, match="lines of the Batch API"):
        Job(tmp_path / "batch.jsonl", prompt_column="x").dry_run()


def test_an_empty_cell_may_stand_for_something(tmp_path):
    write(tmp_path / "in.csv", [["a", "n"], ["x", "1"], ["y", ""]])
    job = dict(prompt_template="{a} {n:>3}", model=llm())
    assert run(tmp_path / "in.csv", tmp_path / "o.csv", SHORT, **job).failed == 1
    assert read(tmp_path / "o.csv")[1]["error"].endswith("is empty: empty='' lets it be")
    assert run(tmp_path / "in.csv", tmp_path / "p.csv", SHORT, empty="", **job).failed == 0
    assert llm().map([dict(a="y", n=None)], "{a} {n}", SHORT, empty="")[0]["error"] is None


def test_a_summary_counts_what_was_cut_and_says_how_to_try_again(tmp_path):
    write(tmp_path / "in.csv", [["prompt"], ["a"], ["b" * 1000]])
    result = str(run(tmp_path / "in.csv", tmp_path / "o.csv", SHORT, model=llm()))
    assert (
        "1 failed (the first: row 2" in result
        and "retry_errors=True runs these again" in result
        and ", 1 ended at max_tokens;" in result
    )


def test_advice_about_rows_and_retries_is_in_the_words_of_the_caller(tmp_path, capsys):
    from batchlab.cli import main

    write(tmp_path / "in.csv", [["a", "n"], ["x", "1"], ["y", ""]])
    flags = [
        "-i",
        str(tmp_path / "in.csv"),
        "-o",
        str(tmp_path / "o.csv"),
        "--prompt-template",
        "{a} {n}",
        "--max-tokens",
        "2",
    ]
    assert main(["run", *flags], llm=llm()) == 1
    said = capsys.readouterr().err
    assert "--retry-errors runs these again" in said and "retry_errors" not in said
    assert read(tmp_path / "o.csv")[1]["error"].endswith("is empty: --empty '' lets it be")
    job = Job(
        tmp_path / "in.csv", tmp_path / "p.csv", sampling_params=SHORT, prompt_template="{a} {n}"
    )
    assert "--" not in str(job.run(llm())) and "--" not in read(tmp_path / "p.csv")[1]["error"]


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl", "jsonl.gz"])
@pytest.mark.parametrize("given", [None, "label"])
@pytest.mark.parametrize("source", ["in.csv", "in.jsonl"])
def test_columns_of_the_input_keep_their_names(kind, given, source, tmp_path):
    "Ended in between, done, and asked again: the input's columns as they were, the answers' beside them."
    rows = [
        dict(q=f"Say {i}", text=f"t{i}", error=f"e{i}", request_id=f"r{i}", answer_2="x")
        for i in range(3)
    ]
    path, out = tmp_path / source, tmp_path / f"out.{kind}"
    if source == "in.csv":
        write(path, [[*rows[0]], *([*r.values()] for r in rows)])
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    job = lambda **more: Job(
        path, out, None, SHORT, prompt_template="{q}", **dict(output_column=given) | more
    )
    assert job(limit=1).run(llm()).done == 1
    with pytest.raises(
        JobError, match="begun with output column|made with other columns|is there already"
    ):
        job(output_column="other").run(llm())
    assert job().run(llm()).before == 1
    again = job().run(llm())
    assert (again.before, again.failed) == (3, 0)
    if kind in ("csv", "tsv"):
        with open(out, newline="") as f:
            found = [*csv.DictReader(f, delimiter="\t" if kind == "tsv" else ",")]
    elif kind == "parquet":
        found = pq.read_table(out).to_pylist()
    else:
        found = [json.loads(s) for s in (gzip.open if kind == "jsonl.gz" else open)(out, "rt")]
    mine = lambda r: {k: r[k] for k in rows[0]}
    assert sorted(map(mine, found), key=str) == rows
    alone = llm().generate([r["q"] for r in rows], SamplingParams(temperature=0, **SHORT))
    texts = {r["q"]: o.outputs[0].text for r, o in zip(rows, alone)}
    assert [r[given or "answer"] for r in found] == [texts[r["q"]] for r in found]
    assert all(r["request_id_2"].startswith("batch_req_") and not r["error_2"] for r in found)


def test_a_name_of_an_output_column_that_is_taken_is_refused(tmp_path):
    write(tmp_path / "in.csv", [["prompt", "text"], ["a", "b"]])
    for name in ("text", "prompt", "error"):
        with pytest.raises(JobError, match="give a free one"):
            run(tmp_path / "in.csv", tmp_path / "o.csv", SHORT, model=llm(), output_column=name)


def test_keys_beside_a_line_of_the_batch_api_stand_in_its_record(tmp_path):
    line = dict(
        custom_id="a",
        url="/v1/completions",
        body=dict(prompt="Say", max_tokens=1),
        category="math",
        error="mine",
    )
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    for name in ("out.jsonl", "out.csv"):
        run(tmp_path / "in.jsonl", tmp_path / name, model=llm())
    found = json.loads((tmp_path / "out.jsonl").read_text())
    assert (found["category"], found["error"], found["error_2"]) == ("math", "mine", None)
    [row] = read(tmp_path / "out.csv")
    assert (row["category"], row["error"], row["error_2"]) == ("math", "mine", "")
    again = run(tmp_path / "in.jsonl", tmp_path / "out.csv", model=llm())
    assert (again.before, again.failed) == (1, 0)


def test_names_of_columns_stay_those_that_a_job_was_begun_with(tmp_path):
    "Killed in between, a job goes on with its names only; force mixes no two."
    write(tmp_path / "in.csv", [["prompt", "text"], *([f"a{i}", "mine"] for i in range(40))])
    job = lambda **more: Job(
        tmp_path / "in.csv",
        tmp_path / "out.csv",
        sampling_params=SHORT,
        look_ahead=1,
        max_errors=0,
        **more,
    )
    failing, begun = llm(), job()
    step = failing.step

    def mortal():
        if begun.result.done >= 2:
            failing.step = step
            raise KeyboardInterrupt
        return step()

    failing.step = mortal
    try:
        with pytest.raises(KeyboardInterrupt):
            begun.run(failing)
    finally:
        failing.step = step
    assert settings_file(tmp_path / "out.csv").exists()
    for force in (False, True):
        with pytest.raises(JobError, match="begun with output column 'answer', and it is 'label'"):
            job(output_column="label", force=force).run(llm())
    result = job().run(llm())
    assert (result.done, result.failed, result.before > 0) == (40, 0, True)
    rows = read(tmp_path / "out.csv")
    assert [r["text"] for r in rows] == ["mine"] * 40 and all(r["answer"] for r in rows)


def test_a_frame_keeps_its_columns(caplog):
    rows = [dict(prompt="a", text="mine", error="x")]
    for frame in (pd.DataFrame(rows), pa.Table.from_pylist(rows), rows):
        out = llm().map(frame, sampling_params=SHORT)
        found = (
            out
            if isinstance(out, list)
            else [*getattr(out, "to_pylist", lambda: out.to_dict("records"))()]
        )
        assert found[0]["text"] == "mine" and found[0]["error"] == "x"
        assert isinstance(found[0]["answer"], str) and not found[0]["error_2"] == found[0]["error"]
    assert "text as answer" in caplog.text
    with pytest.raises(ParamError, match="a column of the frame"):
        llm().map(rows, sampling_params=SHORT, output="prompt")
