"Tables in and out: every row, every column, in order, with its type; what a column is for; what is refused before anything runs."

import csv, functools, gzip, itertools, json, os, random, shutil, sys, time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from helpers import ENV, ctrl_c, examples, needs, read_table, write_lines
from warm import warm
from batchlab.cli.flags import parser_of
from batchlab import LLM, JobError, ParamError, SamplingParams, run
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.jobs.formats import export_records
from batchlab.jobs.settings import INSTEAD, KNOWN_SETTINGS
from batchlab.jobs.job import Job
from batchlab.jobs.journal import finished_lines, journal_of, settings_file
from batchlab.jobs.lines import parse_line
from batchlab.jobs.tables import (
    ANSWER,
    AnswerNames,
    AnswerTable,
    Columns,
    TableFile,
    Template,
    file_kind,
    value_kind,
    opener_of,
    type_of,
)

pa, pq, arrow_csv, pd = needs("pyarrow", "pyarrow.parquet", "pyarrow.csv", "pandas")
pytestmark = pytest.mark.usefixtures("one_thread", "folder")

SHORT = dict(max_tokens=2, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, **SHORT)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    "An empty folder in which the test runs."
    monkeypatch.chdir(tmp_path)
    return tmp_path


@functools.cache
def llm(seed=0):
    model = tiny_model("llama", seed=seed, num_hidden_layers=1)
    return LLM(model, tiny_tokenizer(), max_num_seqs=16)


def ask(source, output, **kw):
    "A run of the model over a file, with short answers."
    return run(source, output, SHORT, **dict(model=llm()) | kw)


def clean(text):
    "A text as UTF-8 has it."
    return text.encode("utf-8", "replace").decode()


def texts_of(prompts):
    "The greedy short answers to `prompts`, as a file has them."
    return [clean(o.outputs[0].text) for o in llm().generate(prompts, GREEDY)]


def write(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows(rows)


def left(name):
    "What stands beside output `name`."
    return sorted(n for n in os.listdir() if n.startswith(name) and n != name)


# --- columns, order and types


def wide(n):
    "A header and `n` rows of 12 columns, with what is easily lost: leading zeros, gaps, long numbers, line breaks."
    names = "id zip question text price seen big flag note n_words when lang".split()
    row = lambda i: [
        1000 + 7 * i,
        f"{i:05d}",
        f'Say "{i}",\nplease',
        f"old {i}",
        "" if i % 10 == 3 else f"{i / 4}",
        i % 2 == 0,
        2**60 + i,
        "True" if i % 3 else "False",
        "" if i % 4 else 'ä, "b"',
        "" if i % 5 == 0 else i,
        f"2026-01-{1 + i % 28:02d}",
        "de" if i % 2 else "fr",
    ]
    return [names, *map(row, range(n))]


JOB = """
import sys, resource
from batchlab import LLM
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
def test_ten_thousand_rows_come_back_by_their_key():
    "Twelve columns, ended in the middle and gone on with: every row once, types kept; five times the rows take no more memory."
    grown = {}
    Path("job.py").write_text(JOB)
    for n in (2000, 10_000):
        write(f"{n}.csv", wide(n))
        for stop in (n // 2, 0):
            job = "-m", "job", f"{n}.csv", f"{n}.parquet", stop
            p = warm([sys.executable, *job], Path.cwd(), ENV, timeout=500)
            assert p.returncode == 0, p.stderr
            done, before, grown[n] = map(int, p.stdout.split())
        assert (done, before >= n // 2, left(f"{n}.parquet")) == (n, True, [])
    assert grown[10_000] < grown[2000] + 40_000, grown
    source = pd.read_csv("10000.csv", dtype=str)
    found = pd.read_parquet("10000.parquet")
    assert [*found.id] == [*source.id]
    assert found.error.isna().all() and (found.completion_tokens == 1).all()
    assert found.completion_tokens.dtype == "Int64"
    for name in source.columns:
        assert [*source[name].fillna("")] == [*found[name].fillna("")], name


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet", "jsonl.gz"])
def test_text_and_columns_of_every_row_equal_a_call_of_its_own(kind):
    write("in.csv", asked := wide(40))
    source, out = f"in.{kind}", f"out.{kind}"
    frame = pd.read_csv("in.csv", dtype=str, keep_default_na=False)
    assert frame.values.tolist() == [[*map(str, row)] for row in asked[1:]]
    if kind == "parquet":
        frame.to_parquet(source)
    elif kind == "jsonl.gz":
        frame.to_json(source, orient="records", lines=True)
    elif kind == "csv.gz":
        frame.to_csv(source, index=False)
    assert ask(source, out, prompt_template="{lang} {id}").failed == 0 and left(out) == []
    rows = sorted(read_table(out), key=lambda r: int(r["id"]))
    assert kind == "jsonl.gz" or rows == read_table(out) and [*rows[0]][:12] == asked[0]
    assert [{k: r[k] for k in asked[0]} for r in rows] == frame.to_dict("records")
    want = texts_of([f"{r['lang']} {r['id']}" for r in rows])
    assert [clean(r["answer"]) for r in rows] == want
    assert {int(r.get("usage", r)["completion_tokens"]) for r in rows} == {2}


def test_parquet_types_pass_through():
    import datetime, decimal
    import pyarrow.compute as pc

    n = 300
    table = pa.table(
        dict(
            id=pa.array(range(n), pa.uint16()),
            prompt=[f"p {i}" if i % 7 else None for i in range(n)],
            tags=[["a", "b"][: i % 3] for i in range(n)],
            nested=[dict(a=i, b=[dict(c="x")]) for i in range(n)],
            when=pa.array([datetime.datetime(2026, 1, 1)] * n, pa.timestamp("us", "Europe/Berlin")),
            late=pa.array([2**62] * n, pa.timestamp("us")),  # no datetime holds it
            cost=[decimal.Decimal("1.50")] * n,
            raw=[b"\xff\0"] * n,
            kind=pa.array(["x", "y", None] * 100).dictionary_encode(),
            error=[1.5] * n,
        )
    )
    pq.write_table(table, "in.parquet", row_group_size=77)
    said = []
    more = dict(SHORT, n=2, temperature=1.0, seed=1, logprobs=1)
    result = run("in.parquet", "out.parquet", more, model=llm(), say=said.append)
    found = pq.read_table("out.parquet")
    assert result.failed == 43 and len(found) == 2 * 257 + 43
    assert len(said) == 1 and "error as error_2" in said[0]
    first = found.filter(pc.not_equal(pc.fill_null(found["index"], 0), 1))
    for name in table.column_names:
        assert first[name].combine_chunks().equals(table[name].combine_chunks()), name
    assert found.schema.field("prompt_tokens").type == pa.int64()
    assert {*found["completion_tokens"].to_pylist()} == {2, None}
    failed = {f"row {i + 1}: the prompt is empty" for i in range(0, n, 7)}
    assert {*found["error_2"].to_pylist()} - {None} == failed
    one = found.drop_columns("late").to_pylist()[2]
    logprobs = json.loads(one["logprobs"])
    assert len(logprobs["tokens"]) == 2
    assert one["cumulative_logprob"] == pytest.approx(sum(logprobs["token_logprobs"]))
    assert pd.read_parquet("out.parquet", columns=["prompt_tokens"]).dtypes.iloc[0] == "Int64"
    pq.write_table(table.drop_columns("late"), "less.parquet")
    ask("less.parquet", "out.csv")
    assert read_table("out.csv")[1]["nested"] == json.dumps(dict(a=1, b=[dict(c="x")]))


def test_bytes_of_a_csv_that_are_no_utf8_come_back():
    Path("in.csv").write_bytes(b"prompt,caf\xe9\na,\xe9t\xe9\nb,x\n")
    ask("in.csv", "out.csv")
    assert b",\xe9t\xe9," in Path("out.csv").read_bytes().splitlines()[1]
    ask("in.csv", "out.parquet")
    assert [r["caf\ufffd"] for r in read_table("out.parquet")] == ["\ufffdt\ufffd", "x"]


# --- what a column is for

OTHERS = """timeout priority tools chat_template messages system label lang score format temprature max_tokns stops
    body url model user text error index row request_id"""
NAMES = st.sampled_from(sorted({*KNOWN_SETTINGS, *INSTEAD, *OTHERS.split()}))
CELLS = ["", "1", "0.5", "x", '["a"]', '{"a": 1}', "true", '[{"role": "user", "content": "x"}]']
RECORD = dict(
    request_id="batch_req_1_00000000",
    row=1,
    text="t",
    finish_reason="stop",
    usage=dict(prompt_tokens=1, completion_tokens=1),
    error=None,
)
records = lambda: iter([(1, RECORD)])


@examples(300)
@given(name=NAMES, cell=st.sampled_from(CELLS), data=st.booleans())
def test_each_column_is_used_or_refused_or_comes_through(name, cell, data):
    names = ["prompt", name]
    try:
        columns = Columns(names, text=True, setting_columns=() if data else [name])
    except JobError as e:
        assert repr(name) in str(e) and not data
        return
    assert columns.settings == ([] if data else [name])
    line = parse_line(1, columns.row({"prompt": "p", name: cell}), "plain")
    assert line.ignored == ()
    if name in columns.settings and cell:
        silent = name in ("response_format", "logprobs", "structured_outputs")
        assert line.failure or line.options or line.timeout or silent, line
    elif name == "messages" and cell:
        assert line.failure
    else:
        assert (line.failure, line.options, line.prompt) == (None, {}, "p")
    write("in.csv", [names, ["p", cell]])
    table = AnswerTable(records, TableFile("in.csv"))
    table.write_csv("out.csv", "out.csv")
    [row] = read_table("out.csv")
    called = table.names.of
    assert row[name] == cell and row[called("text")] == "t"
    assert {called(k) for k in ANSWER} <= row.keys()


def test_settings_in_columns_count_as_in_lines():
    "The same settings in a CSV, in Parquet and in lines of JSONL give the same answers; an empty cell leaves it open."
    given = [
        dict(max_tokens=3, temperature=0, ignore_eos=True),
        dict(max_tokens=1, temperature=None, ignore_eos=True),
        dict(max_tokens=None, temperature=1.0, ignore_eos=True),
        dict(max_tokens=4, temperature=0.5, guided_choice=["ab", "cd"]),
    ]
    asks = [dict(prompt=f"ask {i}", seed=i, stop="5", **g) for i, g in enumerate(given)]
    frame = pd.DataFrame(asks)
    cells = frame.guided_choice.map(lambda v: json.dumps(v) if isinstance(v, list) else v)
    frame.assign(guided_choice=cells).to_csv("a.csv", index=False)
    frame.to_parquet("b.parquet")
    write_lines("c.jsonl", [{k: v for k, v in a.items() if v is not None} for a in asks])
    found = []
    for name in ("a.csv", "b.parquet", "c.jsonl"):
        columns = [c for c in frame.columns if c != "prompt"] if name != "c.jsonl" else []
        rest = dict(max_tokens=2, temperature=0)
        assert run(name, "out.csv", rest, model=llm(), setting_columns=columns).failed == 0
        found.append([(r["text"], r["completion_tokens"]) for r in read_table("out.csv")])
        os.unlink("out.csv")
    assert found[0] == found[1] == found[2]
    assert [n for _, n in found[0]][:3] == ["3", "1", "2"] and found[0][3][0] in ("ab", "cd")


def test_messages_and_system_of_a_table():
    talk, tones = [[dict(role="user", content=f"Hi {i}")] for i in range(3)], ["kind", "curt", None]
    frame = pd.DataFrame(dict(messages=talk, tone=tones))
    frame.to_parquet("in.parquet")
    frame.assign(messages=frame.messages.map(json.dumps)).to_csv("in.csv", index=False)
    asked = [[dict(role="system", content=f"Be {t}."), *m] for m, t in zip(talk, tones) if t]
    want = [o.outputs[0].text for o in llm().chat(asked, GREEDY)]
    for name in ("in.csv", "in.parquet"):
        assert ask(name, f"{name}.csv", system="Be {tone}.").failed == 1
        rows = read_table(f"{name}.csv")
        assert [r["text"] for r in rows[:2]] == [*map(clean, want)]
        assert rows[2]["error"] == "row 3: column 'tone' is empty: empty='' lets it be"


def test_a_timeout_in_a_line_counts_and_a_priority_is_refused():
    lines = [
        dict(prompt="a", max_tokens=500, ignore_eos=True, timeout=1e-9),
        dict(prompt="b", max_tokens=1),
        dict(prompt="c", priority=1),
        dict(prompt="d", timeout="soon"),
    ]
    write_lines("in.jsonl", lines)
    run("in.jsonl", "out.csv", model=llm())
    a, b, c, d = (r["error"] for r in read_table("out.csv"))
    assert a == "line 1: not done after 1e-09 seconds" and b == ""
    assert c.startswith("line 3: priority") and d.startswith("line 4: timeout")


def test_options_of_a_conversation_reach_the_template():
    "A template of its own is text: a file that it names is not read."
    talk = [dict(role="user", content="Hi"), dict(role="assistant", content="The sea")]
    closed, goes_on = dict(add_generation_prompt=False), dict(continue_final_message=True)
    file = dict(chat_template="/etc/passwd")
    typed = dict(messages=[dict(role="user", content="<eos>")])
    lines = [dict(messages=talk, **d) for d in ({}, closed, closed | goes_on)]
    write_lines("in.jsonl", [*lines, typed, typed | dict(allow_special=True), typed | file])
    assert Job("in.jsonl").dry_run().failed == ask("in.jsonl", "out.csv").failed == 1
    *rows, refused = read_table("out.csv")
    begun, closed, open_, plain, special = (int(r["prompt_tokens"]) for r in rows)
    assert (
        open_ < closed < begun
        and plain - special == len("<eos>") - 1
        and "chat_template" in refused["error"]
    )


# --- refused before anything runs, and nothing left behind

Q = dict(prompt_column="question")


MISTAKES = {
    "prompt_column=nope": "no column 'nope' 'question'",
    "prompt_column=questoin": "mean 'question'?",
    "prompt_column=question id_column=nope": "'nope' 'id'",
    "prompt_template={lng}:{id}": "mean 'lang'?",
    'prompt_template={"a":1}': "{{",
    "prompt_template={lang": "{{",
    "prompt_template={id}{lang:{id}}": "written",
    "prompt_template={lang!z}": "written",
    "prompt_template={lang:zz}": "written",
    "prompt_template={id} prompt_column=lang": "one of them",
    "prompt_column=question system=brief": "chat",
    "prompt_column=question setting_columns=x": "'x'",
    "prompt_column=question output=o.xlsx": ".xlsx",
    "prompt_column=question output=o.parquet.gz": "compressed",
    "prompt_column=question error_file=e.csv": "JSONL",
    "prompt_column=question output_column=error": "free one",
    "prompt_column=question output_column=question": "free one",
    "input=text.csv output_column=text": "free one",
    "input=t.xlsx": "read_excel",
    "input=t.feather": "read_feather",
    "input=t.docx": "can't be read",
    "input=bad.csv setting_columns=max_tokns": "'max_tokns' max_tokens",
    "input=sys.csv setting_columns=system": "{system}",
    "input=p.jsonl prompt_template={a}": "no column 'a' 'prompt'",
    "input=p.jsonl system=x": "chat",
    "input=p.jsonl prompt_column=q": "'q'",
    "input=p.jsonl id_column=q": "'q'",
    "input=p.jsonl delimiter=;": "CSV",
    "input=p.txt prompt_column=a": "one prompt a line",
    "input=p.txt id_column=a": "one prompt a line",
    "input=p.txt system=x": "chat",
    "input=batch.jsonl prompt_column=x": "Batch API",
    "input=cut.parquet": "not a Parquet file",
    "input=twice.parquet": "two columns 'prompt'",
    "input=arr.json": "array",
    "input=semi.csv prompt_column=q delimiter=,": "no column 'q'",
    "input=semi.csv encoding=utf-99": "utf-99",
    "input=semi.csv delimiter=;;": "one character",
    "input=wide.csv": "UTF-16 utf-16-le",
    "input=marked.txt": "UTF-16 (utf-16)",
    "input=in.csv.xz": "pack it as .gz",
    "input=in.txt.bz2": "pack it as .gz",
    "prompt_column=question output=o.jsonl.xz": ".gz",
    "prompt_column=question output=o.npy": ".parquet",
    "input=.": "no file",
    "input=quote.csv": "header, line 1",
}


@pytest.mark.parametrize("args, words", MISTAKES.items())
def test_mistakes_are_refused_and_leave_nothing(args, words):
    write_lines("in.csv", ["id,lang,question", "1,de,x"])
    write_lines("bad.csv", ["prompt,max_tokns", "a,1"])
    write_lines("sys.csv", ["prompt,system", "a,b"])
    write_lines("text.csv", ["prompt,text", "a,b"])
    write_lines("semi.csv", ["id;q", "1;a"])
    Path("quote.csv").write_text('"prompt,q\n1;a\n')
    Path("wide.csv").write_bytes("prompt\nGrüße\n".encode("utf-16-le"))
    Path("marked.txt").write_bytes("Grüße\n".encode("utf-16"))
    for name in ("t.xlsx", "t.feather", "t.docx", "cut.parquet", "in.csv.xz", "in.txt.bz2"):
        Path(name).write_bytes(b"PK\x03\x04xxxx")
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * 2, ["prompt"] * 2), "twice.parquet")
    write_lines("p.jsonl", [dict(prompt="a")])
    batch = dict(custom_id="a", url="/v1/completions", method="POST", body=dict(prompt="x"))
    write_lines("batch.jsonl", [batch])
    write_lines("p.txt", ["a"])
    write_lines("arr.json", ['[{"prompt": "a"},'])
    before = sorted(os.listdir())
    given = dict(input="in.csv", output="out.csv") | dict(a.split("=", 1) for a in args.split())
    if "setting_columns" in given:
        given["setting_columns"] = [given["setting_columns"]]
    with pytest.raises(JobError) as e:
        Job(**given).run(lambda: pytest.fail("a model is loaded"))
    assert all(w in str(e.value) for w in words.split()), e.value
    assert sorted(os.listdir()) == before


LINES = 'Say one|Say "two"|  Say three'
KINDS = {
    "p.txt": LINES.replace("|", "\r\n\n", 1),
    "old_mac.txt": LINES.replace("|", "\r"),
    "p.tsv": 'prompt\tx|Say one\t1|"Say ""two"""\t2|  Say three\t3',
    "p.json": '[{"prompt": "Say one"},|{"prompt": "Say \\"two\\""}, {"prompt": "  Say three"}]',
    "p": '{"prompt": "Say one"}|{"prompt": "Say \\"two\\""}|{"prompt": "  Say three"}',
}
KINDS |= {
    f"{end}.jsonl": KINDS["p"].replace("|", text) for end, text in (("mac", "\r"), ("dos", "\r\n"))
}


@pytest.mark.parametrize("name, data", KINDS.items())
def test_kinds_of_files_and_of_ends_of_lines(name, data):
    Path(name).write_bytes(data.replace("|", "\n").encode())
    assert Job(name).dry_run().requests == ask(name, "out.tsv").answered == 3
    want = texts_of(["Say one", 'Say "two"', "  Say three"])
    assert [r["text"] for r in read_table("out.tsv")] == want


def test_of_a_line_that_is_too_long_only_the_beginning_is_read(monkeypatch):
    monkeypatch.setattr("batchlab.jobs.formats.LONGEST_LINE", 9)
    write_lines("in.jsonl", ["x" * 99, "y"])
    assert [len(raw) for _, raw in Job("in.jsonl").raw()] == [10, 1]


# --- one folder, gone when it is done; the output says how it was made


@pytest.mark.parametrize(
    "name", ["out.csv", "out.tsv.gz", "out.parquet", "out.jsonl", "out.jsonl.gz"]
)
def test_a_job_with_failures_is_gone_on_with(name):
    "The same command finds all done and changes nothing, adds what is new, tries failures again, and refuses other settings; without failures it is finished."

    def rows(n, second=""):
        some = [f"{i},{f'ask {i}' if i != 2 else second},l{i}" for i in range(n)]
        write_lines("in.csv", ["id,prompt,label", *some])

    def job(**kw):
        return Job(**dict(input="in.csv", output=name, sampling_params=SHORT, id_column="id") | kw)

    def table():
        return {r["id"]: {k: v for k, v in r.items() if k != "usage"} for r in read_table(name)}

    state = lambda: (read_table(name), left(name))
    rows(5)
    assert job().run(llm()).failed == 1 and left(name) == [f"{name}.batchlab"]
    first, then = table(), state()
    assert (job().run(None).before, state()) == (5, then)
    for change in (dict(prompt_template="{id}"), dict(chat=True)):
        with pytest.raises(JobError, match="begun with (prompt template|chat)"):
            job(**change).run(llm())
    rows(8)
    with pytest.raises(JobError, match="begun with model"):
        job().run(llm(1))
    assert state() == then
    r = job().run(llm())
    assert (r.before, r.answered, r.failed) == (5, 7, 1) and left(name) == [f"{name}.batchlab"]
    assert {k: v for k, v in table().items() if k in first} == first and len(table()) == 8
    rows(8, "mended")
    again = job(retry_errors=True).run(llm())
    assert (again.before, again.failed, left(name), len(read_table(name))) == (7, 0, [], 8)
    assert job(ordered=True).run(None).before == 8  # which asks for the same answers


def test_which_keys_of_lines_were_read_is_a_setting():
    write_lines("in.jsonl", [dict(q=c, a=c, b=c * 2) for c in "xy"])
    go_on = functools.partial(ask, "in.jsonl", "out.jsonl", prompt_column="q", limit=1)
    assert go_on(id_column="a").answered == 1
    for other in (dict(id_column="b"), {}):
        with pytest.raises(JobError, match="begun with columns"):
            go_on(**other)
    assert go_on(id_column="a", limit=None).answered == 2


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.jsonl.gz"])
def test_files_of_others_beside_the_output_stay(name):
    "Only what a job made is replaced or taken away, whatever it is called."
    own = [Path(f"{name}{end}") for end in (".new", ".job", ".lock", ".jsonl")]
    for path in own:
        path.write_text(f'{{"mine": "{path}"}}')
    new = Path(f"{name}.batchlab.new")
    new.write_text("of a run that was killed")
    for again in (False, True):
        write_lines("in.csv", ["prompt", "a", "b" if again else '""'])
        result = ask("in.csv", name, ordered=True, retry_errors=again)
        assert (result.before, result.failed) == (again, not again)
        assert [path.read_text() for path in own] == [f'{{"mine": "{path}"}}' for path in own]
    assert not new.exists()


def test_an_interrupt_before_the_first_answer_leaves_nothing():
    write_lines("in.csv", ["prompt", "a"])
    with ctrl_c(llm()):
        Job("in.csv", "out.csv").run(llm())
    assert os.listdir() == ["in.csv"]


@pytest.mark.parametrize("name", ["export_records", "drop_side"])
def test_killed_while_the_table_is_written(monkeypatch, name):
    "The journal goes only after the table stands; a death in between costs nothing."
    write_lines("in.csv", ["id,prompt", *(f"{i},ask {i}" for i in range(9))])

    class Died(BaseException):
        pass

    def die(*_):
        raise Died

    with monkeypatch.context() as m:
        m.setattr(f"batchlab.jobs.job.{name}", die)
        with pytest.raises(Died):
            ask("in.csv", "out.parquet")
    assert Path(journal_of("out.parquet")).exists() and settings_file("out.parquet").exists()
    assert Job("in.csv", "out.parquet", sampling_params=SHORT).run(None).before == 9
    assert [r["id"] for r in read_table("out.parquet")] == [*map(str, range(9))] and left(
        "out.parquet"
    ) == []


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("header", ["n,prompt", "n,question"])
def test_an_input_that_is_another_at_the_end_gets_no_answers_beside_its_rows(kind, header):
    "Rows are read for hours, and their answers put beside those of the file as it is then."
    name, rows = f"in.{kind}", [f"{i},ask {i}" for i in range(6)]

    def save(*lines):
        write_lines("in.csv", lines)
        kind == "csv" or pd.read_csv("in.csv").to_parquet(name)

    save("n,prompt", *rows)
    with pytest.raises(JobError, match="row 1 .* is not what it was|no column 'prompt'"):
        ask(name, "out.csv", postprocess=lambda out: save(header, *rows[::-1]))
    assert not Path("out.csv").exists()
    save("n,prompt", *rows)
    assert ask(name, "out.csv", postprocess=str).before == 6
    assert [r["text"] for r in read_table("out.csv")] == texts_of(f"ask {i}" for i in range(6))


# --- functions of the answer


def test_run_goes_on_and_keeps_what_functions_made():
    write_lines("in.csv", ["id,prompt", *(f"{i},ask {i}" for i in range(6))])
    called = []

    def made(out):
        called.append(1)
        return dict(size=len(out.outputs[0].token_ids), words=["a", "b"])

    go = functools.partial(ask, "in.csv", "out.parquet", postprocess=made)
    assert go(limit=4).done == 4
    with pytest.raises(JobError, match="begun with postprocess"):
        go(postprocess=None)
    assert go().before == 4 and len(called) == 6
    found = pq.read_table("out.parquet")
    assert found["size"].to_pylist() == [2] * 6 and found.schema.field("size").type == pa.int64()
    assert json.loads(found["words"][5].as_py()) == ["a", "b"]
    assert go(postprocess=None).before == 6
    with pytest.raises(ParamError, match="prompt_template"):
        go(prompt_tempalte="x")


# --- what must not be lost on the way out


def test_a_table_is_on_the_disk_before_its_journal_goes(monkeypatch, folder):
    import batchlab.jobs.job as jobs

    write_lines("in.csv", ["prompt", "a"])
    done, fsync, drop, replace = [], os.fsync, jobs.drop_side, os.replace
    name_of = lambda fd: os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
    renamed = lambda a, b: (done.append("replace " + os.path.basename(b)), replace(a, b))
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(name_of(fd)), fsync(fd)))
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(jobs, "drop_side", lambda p: (done.append("drop"), drop(p)))
    ask("in.csv", "out.csv")
    assert done[-4:] == ["out.csv.batchlab.new", "replace out.csv", folder.name, "drop"]
    assert "answers.jsonl" in done


def test_a_table_that_does_not_fit_leaves_no_half(monkeypatch):
    def half(self, path, name):
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    write_lines("in.csv", ["prompt", "a"])
    monkeypatch.setattr(AnswerTable, "write_csv", half)
    with pytest.raises(JobError, match="make room"):
        ask("in.csv", "out.csv")
    assert left("out.csv") == ["out.csv.batchlab"]


def answered(path, out):
    "One answer to the only row of table `path` in file `out`."
    export_records(records, out, TableFile(path))


def test_index_and_types_of_pandas_survive_where_names_clash():
    cells = dict(prompt=["a"], prompt_tokens=[7], gaps=pd.array([None], dtype="Int64"))
    pd.DataFrame(cells, index=pd.Index(["k"], name="text")).to_parquet("in.parquet")
    answered("in.parquet", "out.parquet")
    found = pd.read_parquet("out.parquet")
    assert (found.index.name, [*found.index]) == ("text", ["k"])
    assert (found.prompt_tokens.iloc[0], found.prompt_tokens_2.iloc[0]) == (7, 1)
    types = found.dtypes[["prompt_tokens", "prompt_tokens_2", "gaps"]]
    assert [*types.astype(str)] == ["int64", "Int64", "Int64"]


def test_what_arrow_can_not_hold_comes_back():
    assert type_of(map(value_kind, [1, 2**70])) == "string"
    try:
        pq.write_table(pa.table(dict(prompt=pa.array(["a"], pa.string_view()), x=[1])), "v.parquet")
    except (AttributeError, pa.ArrowNotImplementedError):
        pytest.skip("this pyarrow can't write it, and reads it as text")
    answered("v.parquet", "b.parquet")
    assert [r["prompt"] for r in read_table("b.parquet")] == ["a"]
    assert [*TableFile("v.parquet").rows(["x"])] == [(1, dict(x=1), "")]


def test_a_row_with_a_cell_too_many_keeps_its_cells():
    write_lines("in.csv", ["id,prompt", "k1,a,b"])
    for name in ("out.csv", "out.parquet", "out.jsonl"):
        assert ask("in.csv", name, id_column="id").failed == 1
        assert read_table(name)[0]["id"] == "k1"
    assert read_table("out.jsonl")[0]["custom_id"] == "k1"


def test_a_cell_that_is_no_setting():
    columns = Columns(["prompt", "logprobs"], setting_columns=["logprobs"])
    given = lambda cell: columns.row(dict(prompt="a", logprobs=cell)).given
    assert given('{"tokens": []}') is None and given("2") == dict(logprobs=2)
    names = ["messages", "enable_thinking", "logit_bias"]
    chats, talk = Columns(names, text=True, setting_columns=names[1:]), '[{"role": "user"}]'
    row = lambda thinks, bias="": chats.row(dict(zip(names, (talk, thinks, bias))))
    assert [row(text).given["enable_thinking"] for text in ("True", "FALSE")] == [True, False]
    assert "not JSON" in row("yes").failure and "nested" in row("", "[" * 200000).failure


def test_settings_of_columns_are_said():
    "A patient's temperature is no temperature to sample at, whatever its column is called."
    write_lines("in.csv", ["prompt,temperature,max_tokens,seed", "a,36.6,1,2", "b,-2,many,x"])
    said = []
    ask("in.csv", "out.csv", say=said.append)
    assert "temperature, max_tokens, seed; setting_columns=['temperature', " in said[0]
    ask("in.csv", "x.csv", say=said.append, spell=parser_of("run").spell)
    assert any("; --setting-columns temperature,max_tokens,seed makes them" in s for s in said)
    found = [(r["temperature"], r["completion_tokens"], r["error"]) for r in read_table("out.csv")]
    assert found == [("36.6", "2", ""), ("-2", "2", "")]
    ask("in.csv", "set.csv", setting_columns=["max_tokens"])
    rows = read_table("set.csv")
    assert [r["completion_tokens"] for r in rows] == ["1", ""] and "max_tokens" in rows[1]["error"]


def test_records_of_odd_cells():
    inf = float("inf")
    cells = dict(prompt=["a", "b"], x=[inf, 1.0], raw=[b"z", b"\xff"], e=["", "q"], k=[1.0, None])
    pq.write_table(pa.table(cells), "in.parquet")
    (_, first, _), _ = TableFile("in.parquet").rows()
    row = Columns([*cells], id_column="k", keep=True).row(first)
    assert {k: row.cells[k] for k in "x raw e".split()} == dict(x=None, raw="z", e="")
    assert parse_line(1, row, "plain").ids == dict(custom_id=1)


def test_plain_values_of_functions():
    import numpy as np

    write_lines("in.csv", ["prompt", "a"])

    def one(made):
        "What the only answer has with what it `made`."
        output = f"{len(os.listdir())}.parquet"
        ask("in.csv", output, postprocess=lambda out: made)
        return read_table(output)[0]

    made = one(dict(size=np.int64(3), some=[np.float32(1)], none=float("nan")))
    assert (made["size"], json.loads(made["some"]), made["none"]) == (3, [1.0], None)
    assert one(5)["result"] == 5
    for name in ("id", "custom_id", "row", "line", "request_id"):
        assert "column of the answer" in one({name: 1})["error"]


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_a_table_without_answers_has_its_header(name):
    write_lines("in.csv", ["id,prompt", "1,"])
    go = functools.partial(ask, "in.csv", name, error_file="e.jsonl")
    assert go().failed == 1
    found = pd.read_csv(name) if "csv" in name else pd.read_parquet(name)
    assert len(found) == 0 and [*found.columns] == ["id", "prompt", *ANSWER, "request_id"]
    assert go().before == 1


def test_a_finished_table_through_pandas_and_a_second_try():
    write_lines("in.csv", ["prompt", "a", '""'])
    ask("in.csv", "out.csv")
    pd.read_csv("out.csv").to_csv("out.csv", index=False)
    data, side = Path("out.csv").read_bytes(), settings_file("out.csv").parent
    os.utime("out.csv", ns=(time.time_ns() + 10**9,) * 2)  # edited, by the coarsest clock too
    for kept in (True, False):  # by its journal, then by the table alone
        result = ask("in.csv", "out.csv")
        assert (result.before, result.failed, side.exists()) == (2, 1, kept)
        with pytest.raises(JobError, match="begun with model" if kept else "is finished, and 1"):
            ask("in.csv", "out.csv", model=llm(1), retry_errors=True)
        assert Path("out.csv").read_bytes() == data
        shutil.rmtree(side, ignore_errors=True)


def test_a_line_that_the_model_can_not_run_fails_alone():
    base = LLM(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer())
    base.tokenizer.chat_template = None
    lines = [dict(prompt="a"), dict(messages=[dict(role="user", content="x")]), dict(prompt="b")]
    write_lines("in.jsonl", lines)
    assert ask("in.jsonl", "out.jsonl", model=base).failed == 1
    write_lines("in.jsonl", lines[1:])
    with pytest.raises(JobError, match="template"):
        ask("in.jsonl", "o.jsonl", model=base)


def test_a_second_try_keeps_what_it_does_not_run_again():
    "A failure beyond the limit stays; answers of rows that the input has no more are not dropped without a word."
    rows = ["id,prompt", "1,a", "2,b", "3,", "4,d", "5,"]
    write_lines("in.csv", rows)
    again = functools.partial(ask, "in.csv", "out.csv", id_column="id")
    again()
    before = read_table("out.csv")
    assert [bool(r["error"]) for r in before] == [False, False, True, False, True]
    assert again(limit=3, retry_errors=True).total == 3  # a limit is no loss
    assert read_table("out.csv") == before
    write_lines("in.csv", rows[:4])
    lost = "has lost rows: its last is 3, and 1 beyond it, from 4 on.* force=True"
    with pytest.raises(JobError, match=lost):
        again(retry_errors=True)
    write_lines("in.csv", rows)
    assert again(retry_errors=True).done == 5 and read_table("out.csv") == before
    write_lines("in.csv", rows[:4])
    assert again(force=True).total == 3 and read_table("out.csv") == before
    with pytest.raises(JobError, match="row 4 was answered"):
        again(force=True, retry_errors=True)


# --- rows that a reader could lose without a word


@pytest.mark.parametrize(
    "tail, said",
    [
        ('"c,3\nd,4\ne,5\n', "is never closed"),
        ('"c, cut off here', "is never closed"),
        ('"c,3\nd,4\n"e",5\nf,6\n', "takes all up to line 6 into one cell"),
    ],
)
@pytest.mark.parametrize("name", ["in.csv", "in.csv.gz", "in.tsv"])
def test_a_quote_that_swallows_rows_is_an_error(name, tail, said):
    "What stands before it is answered, no row of what it took is made up, and the mended file goes on from there."

    def end_with(end):
        text = f"prompt,x\na,1\nb,2\n{end}".replace(",", "\t" if name == "in.tsv" else ",")
        Path(name).write_bytes((gzip.compress if ".gz" in name else bytes)(text.encode()))

    end_with(tail)
    job = Job(name, "out.csv", sampling_params=SHORT)
    runs = lambda: job.run(llm()), lambda: job.plan(llm(), calibrate=False)
    for go in (*runs, runs[0], job.dry_run):  # also where only the broken part is left
        with pytest.raises(JobError, match="beyond row 2") as e:
            go()
        assert f"a quote in row 3, line 4, {said}" in str(e.value)
        assert e.value.status == 1 and not Path("out.csv").exists()
    mended = tail.replace('"', "")
    end_with(mended)
    result = ask(name, "out.csv")
    assert (result.before, result.failed) == (2, 0)
    assert result.answered == len(mended.splitlines()) + 2


@pytest.mark.parametrize("source", ["csv", "jsonl"])
@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_a_result_that_is_called_as_a_column_of_the_input_stands_beside_it(source, name):
    write_lines("in.csv", ["prompt,own", "a,1", "b,2"])
    write_lines("in.jsonl", [dict(prompt="a", own="1"), dict(prompt="b", own="2")])
    made = lambda out: dict(own="made", own_2="too", free=3)
    assert ask(f"in.{source}", name, postprocess=made).failed == 0
    found = [
        [str(r[k]) for k in ("own", "own_2", "own_2_result", "free")] for r in read_table(name)
    ]
    assert found == [["1", "made", "too", "3"], ["2", "made", "too", "3"]]
    assert ask(f"in.{source}", name, postprocess=made).before == 2  # and it is known again


@pytest.mark.parametrize("name", ["in.csv.gz", "in.txt.gz"])
def test_a_damaged_stream_behind_a_whole_one_is_an_error(name):
    "A file that was appended to: what follows the first stream is read or missed aloud; zeros at its end are padding."
    pack = gzip.compress
    first = pack((b"" if ".txt" in name else b"prompt\n") + b"a\nb\n")
    second = pack(b"".join(b"row %d\n" % i for i in range(2000)))
    for damaged in (second[:-9], second[:40] + b"!!!!" + second[44:], b"no stream at all"):
        Path(name).write_bytes(first + damaged)
        with pytest.raises(JobError, match="mend the file"):
            Job(name).dry_run()
    Path(name).write_bytes(first + second + b"\0" * 512)
    assert Job(name).dry_run().requests == 2002


@pytest.mark.parametrize(
    "name, data",
    [
        ("out.csv", b'text\n"a\n'),
        ("out.csv.gz", gzip.compress(b"text\n")[:10] + b"\xff" * 9),
        ("out.jsonl.gz", gzip.compress(b'{"error": ' + b"[" * 9999)),
    ],
)
def test_an_output_that_can_not_be_read_is_that_of_no_job(name, data):
    write_lines("in.csv", ["prompt", "a"])
    Path(name).write_bytes(data)
    with pytest.raises(JobError, match="no job made it"):
        ask("in.csv", name)
    assert Path(name).read_bytes() == data


def test_a_quote_that_ends_in_a_cell_fails_its_row_alone():
    Path("in.csv").write_text('prompt,x\na,1\n"b" said, 2\n"c ""d""",3\n')
    result = ask("in.csv", "out.csv")
    assert (result.answered, result.failed) == (2, 1)
    assert "written twice" in read_table("out.csv")[1]["error"]
    assert ask("in.csv", "as_it_is.jsonl", quotes=False, ordered=True).failed == 0
    assert [r["prompt"] for r in read_table("as_it_is.jsonl")][1:] == ['"b" said', '"c ""d"""']


@pytest.mark.parametrize("form", ["utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
@pytest.mark.parametrize(
    "comma, end, first",
    [
        (";", "\r\n", ""),
        ("\t", "\n", ""),
        (",", "\n", ""),
        ("|", "\r\n", ""),
        (";", "\n", "sep=;\n"),  # as Excel writes
        (";", "\r\n", '"sep=;"\r\n'),
    ],
)
def test_every_way_to_write_a_csv(form, comma, end, first):
    "Semicolons and tabs are found, and said; what can't be found is given. Lines end as they did."
    said, rows = [], [["id", "prompt"], ["1", "Grüße, Zoë; bis bald"], ["2", "x" * 30]]
    text = first + "".join(comma.join(f'"{c}"' for c in row) + end for row in rows)
    Path("in.csv").write_bytes(text.encode(form))
    encoding = None if form == "utf-8-sig" else form
    delimiter = "|" if comma == "|" else None
    form_of = dict(encoding=encoding, delimiter=delimiter)
    assert ask("in.csv", "out.csv", say=said.append, **form_of).failed == 0
    data = Path("out.csv").read_bytes()
    assert (data.count(b"\n"), data.count(b"\r\n")) == (3, 3 if end == "\r\n" else 0)
    assert [[r["id"], r["prompt"]] for r in read_table("out.csv")] == rows[1:]
    names = {";": "semicolons", "\t": "tabs"}
    wanted = [] if first else [name for mark, name in names.items() if mark == comma]
    assert [name for name in names.values() if name in str(said)] == wanted


def test_an_encoding_that_is_not_named_is_asked_for():
    "A row that failed may be tried with another: what is named is the way that runs it again, and not the one that keeps its failure."
    Path("in.csv").write_bytes("prompt\nGrüße\nx\n".encode("cp1252"))
    go = functools.partial(ask, "in.csv", "out.csv")
    assert (result := go()).failed == 1 and "--encoding" in result.first_failure
    with pytest.raises(JobError, match="row 1 .* when it failed: give retry_errors=True") as e:
        go(encoding="cp1252")
    assert "force" not in str(e.value)
    assert go(encoding="cp1252", retry_errors=True).failed == 0
    assert [r["prompt"] for r in read_table("out.csv")] == ["Grüße", "x"]
    Path("in.jsonl").write_bytes('{"prompt": "Grüße"}\n'.encode("utf-16"))
    assert "--encoding utf-16" in ask("in.jsonl", "o.jsonl", form="plain").first_failure
    assert ask("in.jsonl", "p.jsonl", encoding="utf-16").answered == 1


@pytest.mark.parametrize("name, data", [("in.jsonl", ""), ("in.csv", "prompt\n")])
def test_a_file_without_requests_says_so(name, data):
    Path(name).write_text(data)
    for kind in ("jsonl", "csv", "parquet", "jsonl.gz"):
        said, more = [], dict(error_file=f"{kind}.errors.jsonl")
        assert ask(name, f"out.{kind}", say=said.append, **more).total == 0
        assert said == [f"{name} has no request in it"]
        assert read_table(f"out.{kind}") == read_table(more["error_file"]) == []
        assert left(f"out.{kind}") == [] or kind == "jsonl"


def test_a_damaged_parquet_file_is_an_error_of_one_line():
    table = pa.table(dict(prompt=[f"hello {i}" for i in range(500)], n=range(500)))
    pq.write_table(table, "whole.parquet", write_page_checksum=True)
    whole, rng = Path("whole.parquet").read_bytes(), random.Random(3)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 4])):
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        Path("d.parquet").write_bytes(data)
        try:
            found = [*TableFile("d.parquet").rows()]
        except JobError as e:
            assert "is not a Parquet file that can be read" in str(e) and "\n" not in str(e)
        else:
            assert len(found) == 500


# --- lines of JSONL with keys of their own

GSM = [
    dict(question_id=7, category="math", question="2 + 2?", hints=["a", None]),
    dict(question_id=8, category=None, question="3 + 3?", text="six"),
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
def test_keys_of_a_line_are_its_columns(kind, args, first):
    "They make its prompt as a table's columns do, and stand beside the answer, also after a second run of the same output."
    write_lines("in.jsonl", GSM)
    out, good = f"out.{kind}", 3 if args.get("empty") else 2
    args = dict(sampling_params=SHORT, ordered=True, id_column="question_id", **args)
    job = lambda **kw: Job("in.jsonl", out, **args, **kw)
    assert job().dry_run().requests == job().plan(llm(), calibrate=False).requests == good
    job(limit=1).run(llm())
    result = job().run(llm())
    assert (result.before, result.failed, result.cut) == (1, 3 - good, good - 1)
    found = [{k: None if v == "" else v for k, v in r.items()} for r in read_table(out)]
    for name in ("question_id", "custom_id"):
        assert [str(r[name]) for r in found] == ["7", "8", "9"]
    assert [r.get("category") for r in found] == ["math", None, "x"]
    assert found[1]["text"] == "six" and "answer" in found[0] and found[2].get("user") == "me"
    assert [r["finish_reason"] for r in found[:2]] == ["length"] * 2 and "id" not in found[0]
    if first:
        [want] = texts_of([first])
        assert clean(found[0]["answer"]) == want
    if "jsonl" not in kind:  # a key that comes late stands once
        keys = {key for line in GSM for key in line}
        own = {"line", "custom_id", "answer", *ANSWER, "request_id"}
        assert [*found[0]][:2] == ["line", "custom_id"] and {*found[0]} == keys | own
        assert json.loads(found[0]["hints"]) == ["a", None]


def test_lines_without_a_prompt_say_which_key_could_be_one():
    write_lines("in.jsonl", GSM)
    plan = Job("in.jsonl").dry_run()
    assert plan.failed == 3
    assert "prompt_column='question' (--prompt-column question)" in plan.failures[0]
    with pytest.raises(JobError, match="no column 'qestion', did you mean 'question'"):
        Job("in.jsonl", prompt_column="qestion").dry_run()


def test_advice_is_in_the_words_of_the_caller(capsys):
    "About an empty cell, which may stand for something, and about a second try."
    from batchlab.cli import main

    write_lines("in.csv", ["a,n", "x,1", "y,"])
    job = functools.partial(ask, "in.csv", prompt_template="{a} {n:>3}")
    said = str(job("o.csv"))
    for part in ("1 failed (the first: row 2", "retry_errors=True", ", 1 ended at max_tokens;"):
        assert part in said
    assert "--" not in said
    assert read_table("o.csv")[1]["error"].endswith("empty: empty='' lets it be")
    assert job("p.csv", empty="").failed == 0
    flags = "run -i in.csv -o c.csv --max-tokens 2 --prompt-template".split()
    assert main([*flags, "{a} {n}"], llm=llm()) == 1
    said = capsys.readouterr().err
    assert "--retry-errors runs these again" in said and "retry_errors" not in said
    assert read_table("c.csv")[1]["error"].endswith("empty: --empty '' lets it be")


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl", "jsonl.gz"])
@pytest.mark.parametrize("given", [None, "label"])
@pytest.mark.parametrize("source", ["in.csv", "in.parquet", "in.jsonl"])
def test_columns_of_the_input_keep_their_names(kind, given, source):
    "Ended in between, done, and asked again: the input's columns as they were, the answers' beside them."
    frame, out, said = pd.DataFrame(dict(q=[f"Say {i}" for i in range(3)])), f"out.{kind}", []
    for name in ("text", "error", "request_id", "row", "answer_2", "custom_id", "id"):
        frame[name] = [f"{name}{i}" for i in range(3)]
    frame["empty"] = None
    frame.to_csv("in.csv", index=False)
    frame.to_parquet("in.parquet")
    frame.to_json("in.jsonl", orient="records", lines=True)
    again = functools.partial(ask, source, out, prompt_template="{q}", say=said.append)
    assert again(limit=1, output_column=given).done == 1
    with pytest.raises(JobError, match="begun with output column"):
        again(output_column="other")
    assert again(output_column=given).before == 1
    result = again(output_column=given)
    assert (result.before, result.failed) == (3, 0)
    assert any("text as" in s for s in said) == (given is None), said
    assert any("request_id as request_id_2" in s for s in said)
    found = sorted(read_table(out), key=lambda r: r["q"])
    assert [{k: r[k] or None for k in frame} for r in found] == frame.to_dict("records")
    alone = llm().generate([*frame.q], GREEDY)
    assert [r[given or "answer"] for r in found] == [o.outputs[0].text for o in alone]
    if source != "in.jsonl" and "jsonl" in kind:
        assert [r["row_2"] for r in found] == [1, 2, 3]
    assert all(r["request_id_2"].startswith("batch_req_") and not r["error_2"] for r in found)


def test_keys_beside_a_line_of_the_batch_api_stand_in_its_record():
    body = dict(prompt="Say", max_tokens=1)
    line = dict(custom_id="a", url="/v1/completions", body=body, category="math", error="mine")
    write_lines("in.jsonl", [line])
    for name, nothing in (("out.jsonl", None), ("out.csv", "")):
        run("in.jsonl", name, model=llm())
        [row] = read_table(name)
        assert (row["category"], row["error"], row["error_2"]) == ("math", "mine", nothing)
    again = run("in.jsonl", "out.csv", model=llm())
    assert (again.before, again.failed) == (1, 0)


def test_names_of_columns_stay_those_that_a_job_was_begun_with():
    "Killed in between, a job goes on with its names only; force mixes no two."
    write_lines("in.csv", ["prompt,text", *(f"a{i},mine" for i in range(40))])
    job = functools.partial(ask, "in.csv", "out.csv", look_ahead=1, max_errors=0)
    with ctrl_c(llm(), 3):
        job()
    assert settings_file("out.csv").exists()
    for force in (False, True):
        with pytest.raises(JobError, match="begun with output column 'answer', and it is 'label'"):
            job(output_column="label", force=force)
    result = job()
    assert (result.done, result.failed, result.before > 0) == (40, 0, True)
    rows = read_table("out.csv")
    assert [r["text"] for r in rows] == ["mine"] * 40 and all(r["answer"] for r in rows)


# --- what is written reads back, by everybody

MARKS = [*map(chr, range(33)), *"\x7f\x85\xa0\u2028\u2029\ufeff\",;|'\\=", "é", "😀"]
LOOKS = """1 -7 007 -0 +1 1.10 1.5 -0.0 .5 12E5 1e5 1e16 1e+16 1_0 ９ 9223372036854775807
    9223372036854775808 True TRUE true False NaN inf null None NA""".split()


def nasty(rng):
    "A cell that some reader or writer might take for something else."
    some = "".join(rng.choices(MARKS, k=rng.randint(1, 4)))
    return rng.choice(["", rng.choice(LOOKS), some, f"a{some[0]}", f"{some[0]}b", f"a{some[0]}b"])


def drawn(rng):
    "`(names, rows)` of a table of text, some of whose columns look like numbers."
    alike = (
        "1 22 -3",
        "0.5 2.25",
        "1 2.5",
        "True False",
        "1.10 1.9",
        "TRUE FALSE",
        "10 ",
        "1e5 2e5",
        "007 10001",
    )
    pools = [rng.choice([None, *alike]) for _ in range(rng.randint(1, 4))]
    names = [f"{rng.choice('ab')}{rng.choice(MARKS)}{i}" for i in range(len(pools))]
    names[-1] = rng.choice([names[-1], "text", "error", "prompt_tokens"])
    cell = lambda pool: rng.choice(pool.split(" ")) if pool else nasty(rng)
    return names, [[cell(pool) for pool in pools] for _ in range(rng.randint(1, 6))]


def record_of(number, text):
    key, usage = f"batch_req_{number}_{number:08x}", RECORD["usage"]
    return dict(RECORD, request_id=key, row=number, text=text, usage=usage)


def read_by_all(path):
    "A file as `(names, rows of text)`, by Python's csv, pandas and pyarrow; numbers as Python writes them."
    text = lambda v: "" if v is None or v is pd.NA or v != v else str(v)
    if file_kind(path) == "parquet":
        frame = pd.read_parquet(path)
        yield [*frame.columns], [[*map(text, row)] for row in zip(*(frame[n] for n in frame))]
        table = pq.read_table(path)
        yield table.column_names, [[*map(text, row.values())] for row in table.to_pylist()]
        return
    mark = "\t" if file_kind(path) == "tsv" else ","
    with opener_of(path)(path, "rt", newline="", encoding="utf-8") as f:
        names, *rows = csv.reader(f, delimiter=mark)
        yield names, rows
    if pd.__version__ >= "3" or "\\x00" not in repr([names, rows]):
        frame = pd.read_csv(path, sep=mark, dtype=str, keep_default_na=False)
        yield [*frame.columns], frame.values.tolist()  # pandas 2 ends a cell at a NUL
    form = arrow_csv.ParseOptions(delimiter=mark, newlines_in_values=True)
    types = arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    table = arrow_csv.read_csv(path, parse_options=form, convert_options=types)
    yield table.column_names, [[*row.values()] for row in table.to_pylist()]


def check_comes_back(names, rows, texts, source, out):
    "Cells of `source` and `texts` that answer them stand in `out` as they are, whoever reads it, and a job knows it again."
    end = "\t" if file_kind(source) == "tsv" else ","
    if file_kind(source) == "parquet":
        pq.write_table(pa.table(dict(zip(names, zip(*rows)))), source)
    else:
        with open(source, "w", newline="", encoding="utf-8") as f:
            how = dict(delimiter=end, quoting=csv.QUOTE_ALL, lineterminator="\n")
            csv.writer(f, **how).writerows([names, *rows])
    table, answers = TableFile(source), [*map(record_of, itertools.count(1), texts)]
    called = AnswerNames(names)
    export_records(lambda: enumerate(answers, 1), out, table, called)
    want = [[*row, text] for row, text in zip(rows, texts)]
    if ".parquet" in out:  # numbers of CSV have no type, but how they are written
        assert {pq.read_schema(out).field(name).type for name in names} == {pa.string()}
    for found, cells in read_by_all(out):
        assert found[: len(names)] == names
        shown = [*range(len(names)), found.index(called.of("text"))]
        assert [[row[i] for i in shown] for row in cells] == want
    assert [n for n, *_ in finished_lines(out, called)] == [*range(1, len(rows) + 1)]


def test_drawn_tables_come_back_cell_by_cell(tables=40):
    rng = random.Random(7)
    for _ in range(tables):
        names, rows = drawn(rng)
        source = rng.choice(["in.csv", "in.tsv", "in.parquet"])
        out = rng.choice(["out.csv", "out.tsv", "out.csv.gz", "out.parquet"])
        check_comes_back(names, rows, [nasty(rng) for _ in rows], source, out)


@pytest.mark.parametrize("out", ["out.csv", "out.tsv", "out.parquet"])
def test_every_control_character_comes_back(out):
    "Alone, at an end and in the middle, in a cell of the input and in an answer, and in the name of a column."
    cells = [f"{a}{mark}{b}" for mark in MARKS for a in ("", "a") for b in ("", "b")]
    for mark in MARKS:
        check_comes_back([f"a{mark}"], [[mark]], [mark], "in.csv", out)
    check_comes_back(["a", "b"], [[c, "x"] for c in cells], cells, "in.csv", out)


@pytest.mark.parametrize("name", ["out.csv", "out.tsv"])
@pytest.mark.parametrize("bias", [100, -100])
def test_a_carriage_return_tears_no_row(name, bias):
    "In answers, or in a cell of the input: as many rows as requests, and the same command knows its own output."
    with open("in.csv", "w", newline="") as f:
        rows = ["prompt", "id"], ["a\rb", 0], ["c", 1]
        csv.writer(f, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    params = dict(max_tokens=3, temperature=0, logit_bias={3 + ord("\r"): bias})
    go = lambda: run("in.csv", name, params, model=llm())
    assert go().answered == 2 and [r["id"] for r in read_table(name)] == ["0", "1"]
    assert ("\r" in read_table(name)[1]["text"]) == (bias > 0) and go().before == 2


def test_a_format_that_only_pads_takes_a_cell_as_it_stands():
    fill = lambda text, **cells: Template(text, [*cells]).fill(cells)
    assert fill("{v:>6}|{v:*<5s}|{v:^}", v="1.10") == "  1.10|1.10*|1.10"
    assert fill("{v:.1f}|{n:03d}|{v:6}", v="1.10", n="7") == "1.1|007|   1.1"
    for text in ("007", "1_0", "nan", "1１"):  # are no numbers
        with pytest.raises(ValueError, match="can not write"):
            fill("{v:03d}", v=text)


# --- marks at the beginning of a file


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "txt"])
@pytest.mark.parametrize(
    "written, given, good",
    [
        ("utf-8-sig", "utf-8", True),
        ("utf-8-sig", "UTF8", True),
        ("utf-8", "utf-8", True),
        ("utf-16", "utf-16-le", True),
        ("cp1252", "cp1252", True),
        ("utf-8-sig", "cp1252", False),
        ("utf-8-sig", "utf-16", False),
        ("utf-16", "utf-8", False),
        ("utf-32", "cp1252", False),
    ],
)
def test_a_byte_order_mark_and_an_encoding_agree_or_are_refused(kind, written, given, good):
    text = "Grüße" if kind == "txt" else "prompt\nGrüße\n"
    text = '{"prompt": "Grüße"}\n' if kind == "jsonl" else text
    Path(f"in.{kind}").write_bytes(text.encode(written))
    job = Job(f"in.{kind}", "out.jsonl", encoding=given, form="plain" if kind == "jsonl" else None)
    if not good:
        with pytest.raises(JobError, match=f"mark of UTF-.*encoding='{given}' was given"):
            job.dry_run()
        return
    job.check()
    [row] = job.raw()
    assert job.line(*row).prompt == "Grüße"


def test_a_name_with_other_marks_in_it_tells_nothing_of_a_file():
    Path("in.csv").write_text('"a;\tb\nc\u2028",prompt,prompt\nx,y\n', encoding="utf-8")
    assert TableFile("in.csv").names == ["a;\tb\nc\u2028", "prompt", "prompt.1"]


# --- what is short, empty or twice


def test_rows_with_fewer_cells_than_the_header_are_said_once():
    Path("in.csv").write_text("prompt,x,y\na,1,2\nb\nc,3\n")
    said = []
    job = lambda **how: Job("in.csv", say=said.append, sampling_params=SHORT, **how)
    assert job().dry_run().requests == job(output="out.csv").run(llm()).answered == 3
    assert said == ["in.csv: row 2 is the first with fewer cells than the header: those are taken as empty"] * 2  # fmt: skip
    assert [(r["x"], r["y"]) for r in read_table("out.csv")] == [("1", "2"), ("", ""), ("3", "")]


# --- conversations in Parquet

CALL = lambda name, **arguments: dict(
    role="assistant",
    content=None,
    tool_calls=[dict(id=name, type="function", function=dict(name=name, arguments=arguments))],
)
TOOL = lambda name, **properties: dict(
    type="function",
    function=dict(name=name, description="", parameters=dict(type="object", properties=properties)),
)
USER = dict(role="user", content="?")
CITY = dict(type="string", enum=["Rome", None], default=None)
TALKS = [
    dict(
        messages=[USER, CALL("weather", city="Rome", days=[dict(at=1)])],
        tools=[TOOL("weather", city=CITY)],
        structured_outputs=dict(json=dict(type="object", properties=dict(a=dict(type="null")))),
    ),
    dict(
        messages=[
            CALL("now", zone="UTC", days=[dict(to="x")]),
            dict(role="tool", tool_call_id="now", content="7"),
        ],
        tools=[TOOL("now", zone=dict(type="string")), TOOL("then", at=dict(type="integer"))],
        structured_outputs=dict(regex="x"),
    ),
]


@pytest.mark.parametrize("prompt_column", ["messages", "talk"])
def test_conversations_in_structs_are_those_of_lines(prompt_column):
    "Arrow gives each object the fields of all others, as null: a call, a tool and a schema have their own alone."
    keys = {"messages": prompt_column}
    rows = [{keys.get(k, k): v for k, v in row.items()} for row in TALKS]
    pq.write_table(pa.Table.from_pylist(rows), "in.parquet")
    own = dict(setting_columns=["tools", "structured_outputs"], prompt_column=prompt_column)
    own |= dict(chat=True) if prompt_column == "talk" else {}
    job = Job("in.parquet", "out.jsonl", **own)
    job.check()
    found = [job.line(*row) for row in job.raw()]
    write_lines("in.jsonl", TALKS)
    lines = Job("in.jsonl", form="plain")
    want = [lines.line(*row) for row in lines.raw()]
    each = lambda line: (line.failure, line.messages, line.chat_options, line.options)
    assert [*map(each, found)] == [*map(each, want)]
    assert found[0].chat_options["tools"][0]["function"]["parameters"]["properties"]["city"] == CITY
    assert found[0].cells[prompt_column][0] == rows[0][prompt_column][0] | dict(
        tool_calls=None, tool_call_id=None
    )  # what is copied stays as it is there
