"What the book measured, and its exercises: records that fit their code, claims that can fail, and answers that are missed when they are out."

import json, re, sys

import nbformat
import pytest

from helpers import BOOK, ROOT, run, tool

sys.path.insert(0, str(ROOT / "nbs"))
import figures

MEASURE, EXERCISES = tool("figures"), tool("exercises")
FIGURES = MEASURE.figures()
CHAPTERS = [p for p in BOOK["spine"]() if p.stem != "000_tour"]


def test_notebooks_keep_no_state_of_widgets():
    "A progress bar's state is longer than the chapter, and shows nothing."
    for p in BOOK["notebooks"]():
        nb = BOOK["read"](p)
        assert "widgets" not in nb["metadata"], p.name
        outputs = [o for c in nb["cells"] for o in c.get("outputs", ())]
        assert not any(MEASURE.BAR in o.get("data", {}) for o in outputs), p.name


# --- figures


def test_each_record_is_drawn_by_a_chapter():
    assert {p.stem for p in (ROOT / "nbs/measured").glob("*.json")} == {*FIGURES}


@pytest.mark.parametrize("name", FIGURES)
def test_each_round_of_a_record_measures_the_same_rows_each_once(name):
    "That its inputs are those of the function in the chapter, `figure` asserts when the chapter runs."
    r = json.loads((ROOT / f"nbs/measured/{name}.json").read_text(encoding="utf-8"))
    keys = r["rounds"][0][0]
    counted = all(key in r["by"] or key.endswith("_mb") for key in keys)  # not timed: no spread
    assert r["function"] == name and len(r["rounds"]) >= (1 if counted else 3)
    rows = [[tuple(row[b] for b in r["by"]) for row in one] for one in r["rounds"]]
    assert all(one == rows[0] and len({*one}) == len(one) for one in rows)


def test_what_captions_say_of_the_engine_is_so():
    for p in BOOK["notebooks"]():
        for cell in BOOK["read"](p)["cells"]:
            for name in {*MEASURE.captioned(cell)}:
                record = json.loads(
                    (ROOT / f"nbs/measured/{name}.json").read_text(encoding="utf-8")
                )
                said = [text for out in cell["outputs"] for text in BOOK["shown"](out)]
                dated = figures.dated(record).removesuffix(")")
                assert any(dated in text for text in said), f"{p.stem}: run .ci/figures --redraw"


class Tables(dict):
    "The table of each record, by the figure's name: its medians, or the least or the most of its rounds."

    def __init__(self, kind="median", **more):
        super().__init__(more)
        self.kind = kind

    def __missing__(self, name):
        return figures.recorded(name).frame(self.kind)

    __getattr__ = __missing__


NUMBER = r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)"
MARKED = re.compile(NUMBER + "<!-- (.+?) -->")
UNMARKED = re.compile(NUMBER + r"(?=%|\s(?:times|ms)\b)")


def untrue(number, code, drawn=None):
    "What a number in prose should be, by the code behind it, `t` the table of the figure drawn last; '' if it is that."
    if code == "counted":
        return ""
    tables = Tables(least=Tables("min"), most=Tables("max"), round=round)
    tables |= dict(t=figures.recorded(drawn).table) if drawn else {}
    digits = len(number.partition(".")[2])
    said = f"{float(eval(code, {}, tables)):,.{digits}f}"
    return "" if said == number else f"{number}, and the record has {said}: {code}"


@pytest.mark.parametrize("path", BOOK["notebooks"](), ids=lambda p: p.stem)
def test_numbers_of_records_in_prose_are_those_of_the_records(path):
    drawn, wrong = [], []
    for cell in BOOK["read"](path)["cells"]:
        text = re.sub(r"```.*?```|(?<!<!-- )`[^`\n]*`|\]\([^)]*\)", "", cell["source"], flags=re.S)
        if cell["cell_type"] == "code":
            drawn += MEASURE.captioned(cell)
            continue
        if text.startswith("#"):
            drawn = []
        wrong += filter(None, (untrue(*found, *drawn[-1:]) for found in MARKED.findall(text)))
        wrong += [f"{n} has no <!-- … --> behind it" for n in UNMARKED.findall(text) if drawn]
    assert not wrong


@pytest.mark.parametrize(
    "text, said",
    [
        ("0.6<!-- 100 * (t.perplexity.int8 / t.perplexity.fp32 - 1) -->% more", ""),
        ("0.4<!-- 100 * (t.perplexity.int8 / t.perplexity.fp32 - 1) -->% more", "has 0.6"),
        ("5,814<!-- int8_perplexity.tokens.int8 --> tokens", "has 5,841"),
        ("0.064<!-- least.int8_product_time.ms[8, 'int8'] --> ms", ""),
    ],
)
def test_a_number_that_a_record_does_not_have_is_found(text, said):
    [found] = MARKED.findall(text)
    assert said in untrue(*found, "int8_perplexity") and bool(said) == bool(
        untrue(*found, "int8_perplexity")
    )
    assert not UNMARKED.findall(text) and UNMARKED.findall("0.2% more, 3 times") == ["0.2", "3"]


CHAPTER = """from figures import figure

@figure(by='rows', rounds=3, claims={'two cost less than twice one': lambda t: t.ms[2] < %s * t.ms[1]})
def cost_of_rows():
    "Milliseconds of a step."
    # which a comment does not change
    return [dict(rows=n, ms=1. + n / 2) for n in (1, 2)]
cost_of_rows.curves('rows', 'ms')"""


def book(folder, factor):
    "A book of one chapter that claims something."
    for name in ("nbs/figures.py", "settings.ini"):
        text = (ROOT / name).read_text(encoding="utf-8")
        (folder / name.rpartition("/")[2]).write_text(text, encoding="utf-8")
    cell = nbformat.v4.new_code_cell(CHAPTER % factor)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "01_a.ipynb")
    return folder


def test_only_what_a_figure_needs_is_run():
    cells = [
        "from __future__ import annotations",
        "import math, time\nlimit = 3",
        "sizes = []\nfor n in range(limit): total = n",
        "sizes.append(4)",
        "limit = 5",
        "assert False",
        "%%writefile a.cpp\n// C++",
        "def size(sizes=[1]): return [s for s in sizes]",
        "def other(n): total = n; return total",
        '@figure(by="n")\ndef speed(): return [dict(n=n, ms=math.sqrt(n)) for n in sizes[:limit]]',
        "total",
        "rate = speed.table.ms * size()[0]",
        "print(rate)",
        'def found(): pass\nRegistry.register("by a string", found)',
    ]
    shown = MEASURE.named(cells, ["speed"])
    keep = MEASURE.needed(cells, shown)
    assert keep == {0, 1, 2, 3, 4, 7, 9, 11, 13} and shown == {9, 11}


def test_measured_anew_with_claims_that_hold_and_that_do_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BATCHLAB_MEASURE", "")  # put back afterwards
    monkeypatch.setenv("BATCHLAB_WIDGETS", "0")
    outputs = lambda: nbformat.read(tmp_path / "01_a.ipynb", 4).cells[0].outputs
    assert MEASURE.main([], book(tmp_path, 2)) == 0
    record = json.loads((tmp_path / "measured/cost_of_rows.json").read_text())
    assert record["rounds"] == [[dict(rows=1, ms=1.5), dict(rows=2, ms=2.0)]] * 3
    same = "def other():\n    return [dict(rows=n, ms=1. + n / 2) for n in (1, 2)]\n"
    assert record["code"] == figures.code_of(same)
    assert MEASURE.main(["cost_of_rows"], book(tmp_path, 1)) == 1 and not outputs()
    assert "no longer holds: cost_of_rows: two cost less than twice one" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no figure"):
        MEASURE.main(["cost_of_row"], tmp_path)
    assert MEASURE.main(["--draw"], book(tmp_path, 1)) == 1
    [drawn] = outputs()  # and not how long it took
    assert "Milliseconds of a step" in drawn.data["image/svg+xml"]


@pytest.fixture
def figure(tmp_path, monkeypatch):
    "`figure(by, claims, ms, rows)` of a function `speed` that measures so much for each row, its records in a folder of its own."
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.delenv("BATCHLAB_MEASURE", raising=False)

    def make(by="n", claims=None, ms=3.0, rows=(1, 2)):
        def speed(rows=rows):
            return [dict(n=n, ms=ms * n) for n in rows]

        return figures.figure(by, rounds=3, claims=claims)(speed)

    return make


def test_a_claim_is_checked_on_the_record_each_time(figure):
    with pytest.raises(FileNotFoundError, match=r"\.ci/figures speed"):
        figure().frame()
    figure().record()
    f = figure(claims={"two are slower": lambda t: t.ms[2] > 1.5 * t.ms[1]})
    assert f.table.ms.to_dict() == {1: 3.0, 2: 6.0}
    assert f.measure(2).own["rounds"][0] == f.recorded["rounds"][0]
    assert ", yours" in f.bars("ms").desc and "Yours: 2 rounds" in f.caption
    with pytest.raises(AssertionError, match="speed: the record does not show"):
        figure(claims={"two are faster": lambda t: t.ms[2] < t.ms[1]})


def test_code_may_change_and_inputs_may_not(figure):
    figure().record()
    f = figure()
    assert f.recorded["inputs"] == dict(rows=[1, 2]) and "since" not in f.caption

    def speed(rows=(1, 2)):
        return [dict(n=n, ms=n * 1.0) for n in rows]

    assert "(the measuring function has changed since)" in figures.figure("n")(speed).caption
    for engine, said in (
        ("0" * 12, "the engine's code has changed since"),
        (None, "does not name"),
    ):
        f.recorded["engine"] = engine
        assert said in f.caption and "function" not in f.caption
    assert figures.recorded("speed").caption == figures.figure("n")(f.run).caption
    for other in (dict(rows=(1, 3)), dict(by="rows")):
        with pytest.raises(AssertionError, match=r"other inputs: run \.ci/figures"):
            figure(**other)


# --- exercises


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    "The book with its answers out, outside of the repository."
    out = tmp_path_factory.mktemp("edition") / "exercises"
    assert EXERCISES.main([str(out)]) == 0
    return out


def test_each_check_fails_without_its_answer_then_passes_with_it_and_nothing_it_needs_fails():
    "All in one process, which imports torch once."
    env = dict(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", BATCHLAB_WIDGETS="0")
    tried = [str(ROOT / ".ci/exercises"), "--try", *(p.stem for p in CHAPTERS)]
    done = run(sys.executable, *tried, timeout=3000, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\w+): 0 wrong$", done.stdout, re.M) == [p.stem for p in CHAPTERS]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_has_three_exercises_whose_answers_are_folded(path):
    cells = BOOK["read"](path)["cells"]
    answers = [c for c in cells if EXERCISES.SOLUTION.match(c["source"])]
    assert sum(bool(EXERCISES.CHECK.match(c["source"])) for c in cells) == 3
    assert answers and all(c["metadata"]["jupyter"]["source_hidden"] for c in answers)


def test_what_an_attempt_runs():
    answer = "#| solution\n### BEGIN SOLUTION\nx = %s\n### END SOLUTION"
    first, check = answer % "y", "#| check\nassert x == held"
    cells = ["slow = 1", "y = held = 1", first, check, "z = slow"]
    empty = "#| solution\nraise NotImplementedError  # your answer"
    ran = [*EXERCISES.twice(cells)]
    assert ran == [
        (cells[1], False),
        (empty, False),
        (check, True),
        (first, False),
        (check, False),
    ]


def test_the_emptied_edition(edition):
    beside = (
        "README.md",
        "pyproject.toml",
        "tests/invariants.py",
        "tests/gguf_files.py",
    )  # what first cells and chapter 14 read
    assert all((edition / name).is_file() for name in beside)
    made = [edition / p.relative_to(ROOT) for p in BOOK["spine"]()]
    assert not any("BEGIN SOLUTION" in p.read_text(encoding="utf-8") for p in made)
    with pytest.raises(SystemExit, match="answers"):
        EXERCISES.main([str(edition)])  # which would be lost


def test_the_editions_links_lead_to_its_files(edition):
    for p in BOOK["spine"](edition / "nbs"):
        links = re.findall(r"\]\(([^)#:]+\.ipynb)", "".join(BOOK["cells"](p, "markdown")))
        assert all((p.parent / link).exists() for link in links), p.name
