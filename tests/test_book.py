"What the book measured, and its exercises: records that fit their code, claims that can fail, and answers that are missed when they are out."

import importlib.machinery, importlib.util, json, re, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]


def tool(name):
    "A script of `.ci` as a module."
    loader = importlib.machinery.SourceFileLoader(f"ci_{name}", str(ROOT / ".ci" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


sys.dont_write_bytecode, kept = True, sys.dont_write_bytecode
MEASURE, EXERCISES, WORDS = tool("figures"), tool("exercises"), tool("words")
sys.dont_write_bytecode = kept
sys.path.insert(0, str(ROOT / "nbs"))
import figures

FIGURES = MEASURE.figures()
CHAPTERS = EXERCISES.chapters()
TRIED = [*CHAPTERS, *sorted((ROOT / "nbs/1_basics").glob("*.ipynb"))]


def test_notebooks_keep_no_state_of_widgets():
    "A progress bar's state is longer than the chapter, and shows nothing."
    for p in sorted((ROOT / "nbs").rglob("*.ipynb")):
        nb = nbformat.read(p, 4)
        assert "widgets" not in nb.metadata, p.name
        for c in nb.cells:
            assert not any(MEASURE.BAR in o.get("data", {}) for o in c.get("outputs", ())), p.name


# --- figures


def test_each_record_is_drawn_by_a_chapter():
    assert {p.stem for p in (ROOT / "nbs/measured").glob("*.json")} == {*FIGURES}


@pytest.mark.parametrize("name", FIGURES)
def test_a_record_says_what_ran_and_with_which_inputs(name):
    "That they are those of the function that stands in the chapter, `figure` asserts when the chapter runs."
    r = json.loads((ROOT / f"nbs/measured/{name}.json").read_text(encoding="utf-8"))
    assert {"cpu", "cores", "threads", "memory_gb"} == {*r["machine"]} and {
        "python",
        "torch",
        "transformers",
        "batchlab",
    } == {*r["versions"]}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", r["date"]) and r["command"] == f".ci/figures {name}"
    assert r["function"] == name and isinstance(r["inputs"], dict) and r["code"]
    counted = all(
        key in r["by"] or key.endswith("_mb") for key in r["rounds"][0][0]
    )  # not timed: no spread
    assert len(r["rounds"]) >= (1 if counted else 3)
    rows = [[tuple(row[b] for b in r["by"]) for row in one] for one in r["rounds"]]
    assert all(one == rows[0] and len({*one}) == len(one) for one in rows), (
        "each round measures the same rows, each once"
    )


CHAPTER = """from figures import figure

@figure(by='rows', rounds=3, claims={'two cost less than twice one': lambda t: t.ms[2] < %s * t.ms[1]})
def cost_of_rows():
    "Milliseconds of a step."
    # which a comment does not change
    return [dict(rows=n, ms=1. + n / 2) for n in (1, 2)]
cost_of_rows.curves('rows', 'ms')"""


def book(folder, factor):
    "A book of one chapter that claims something."
    (folder / "figures.py").write_text(
        (ROOT / "nbs/figures.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CHAPTER % factor)]),
        folder / "01_a.ipynb",
    )
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
    keep, shown = MEASURE.needed(cells, ["speed"])
    assert keep == {0, 1, 2, 3, 4, 7, 9, 11, 13} and shown == {9, 11}


def test_measured_anew_with_claims_that_hold_and_that_do_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BATCHLAB_MEASURE", "")  # put back afterwards
    monkeypatch.setenv("BATCHLAB_WIDGETS", "0")
    assert MEASURE.main([], book(tmp_path, 2)) == 0
    record = json.loads((tmp_path / "measured/cost_of_rows.json").read_text())
    assert (
        record["rounds"] == [[dict(rows=1, ms=1.5), dict(rows=2, ms=2.0)]] * 3
        and record["title"] == "Milliseconds of a step"
    )
    assert record["code"] == figures.code_of(
        "def other():\n    return [dict(rows=n, ms=1. + n / 2) for n in (1, 2)]\n"
    )
    assert "1 figures, 0 with a claim" in capsys.readouterr().out
    assert MEASURE.main(["cost_of_rows"], book(tmp_path, 1)) == 1
    assert "no longer holds: cost_of_rows: two cost less than twice one" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no figure"):
        MEASURE.main(["cost_of_row"], tmp_path)
    assert not nbformat.read(tmp_path / "01_a.ipynb", 4).cells[0].outputs
    (tmp_path / "settings.ini").write_text((ROOT / "settings.ini").read_text())
    assert MEASURE.main(["--draw"], book(tmp_path, 1)) == 1
    [drawn] = nbformat.read(tmp_path / "01_a.ipynb", 4).cells[0].outputs  # and not how long it took
    assert "Milliseconds of a step" in drawn.data["image/svg+xml"]


def test_a_claim_is_checked_on_the_record_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.delenv("BATCHLAB_MEASURE", raising=False)

    def speed():
        return [dict(by="a", ms=3.0), dict(by="b", ms=9.0)]

    with pytest.raises(FileNotFoundError, match=r"\.ci/figures speed"):
        figures.figure("by")(speed).frame()
    figures.figure("by", rounds=3)(speed).record()
    f = figures.figure("by", claims={"b is slower": lambda t: t.ms["b"] > 2 * t.ms["a"]})(speed)
    assert (
        f.table.ms.to_dict() == dict(a=3.0, b=9.0)
        and f.measure(2).own["rounds"][0] == f.recorded["rounds"][0]
    )
    assert (
        ", yours" in f.bars("ms").desc
        and "3 rounds on" in f.caption
        and "Yours: 2 rounds" in f.caption
    )
    with pytest.raises(AssertionError, match="speed: the record does not show"):
        figures.figure("by", claims={"b is faster": lambda t: t.ms["b"] < t.ms["a"]})(speed)


def test_code_may_change_and_inputs_may_not(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.delenv("BATCHLAB_MEASURE", raising=False)

    def measured(more, rows=(1, 2)):
        def speed(rows=rows):
            return [dict(by=n, ms=n + more) for n in rows]

        return speed

    figures.figure("by", rounds=3)(measured(0)).record()
    f = figures.figure("by")(measured(0))
    assert f.recorded["inputs"] == dict(rows=[1, 2]) and "measured 2" in f.caption

    def speed(rows=(1, 2)):
        return [dict(by=n, ms=n * 1.0) for n in rows]

    assert "measured with earlier code on 2" in figures.figure("by")(speed).caption
    monkeypatch.setattr(figures, "engine", lambda: "another")
    assert "measured with earlier code on 2" in f.caption
    with pytest.raises(
        AssertionError, match=r"speed: measured with other inputs: run \.ci/figures"
    ):
        figures.figure("by")(measured(0, rows=(1, 3)))
    with pytest.raises(AssertionError, match="other inputs"):
        figures.figure("rows")(measured(0))


# --- exercises


@pytest.mark.parametrize("path", TRIED, ids=lambda p: p.stem)
def test_each_chapter_has_exercises_with_answers_checks_and_reasons(path):
    nb = nbformat.read(path, 4)
    empty, answers = EXERCISES.emptied(nb)
    assert (
        len(answers) >= 3
        and sum(bool(EXERCISES.CHECK.search(c.source)) for c in nb.cells if c.cell_type == "code")
        >= 3
    )
    assert sum(c.source.startswith("<details") for c in nb.cells) >= 3
    sources = lambda cells: [c.source for c in cells if not c.source.startswith("<details")]
    assert sources(EXERCISES.filled(empty, answers).cells) == sources(
        nb.cells
    )  # which nbdev_test runs


@pytest.fixture(scope="module")
def attempts():
    "Each chapter with its answers out, run: two at a time, on a thread each."
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        for k, v in dict(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", BATCHLAB_WIDGETS="0").items():
            patch.setenv(k, v)
        return {
            p: f.result()
            for p, f in [
                (
                    p,
                    pool.submit(
                        EXERCISES.attempt, EXERCISES.emptied(nbformat.read(p, 4))[0], p.parent
                    ),
                )
                for p in TRIED
            ]
        }


@pytest.mark.parametrize("path", TRIED, ids=lambda p: p.stem)
def test_without_the_answers_each_check_fails_and_nothing_else(path, attempts):
    assert attempts[path] == ([], [])


def test_the_emptied_edition(tmp_path):
    assert EXERCISES.main([str(tmp_path / "out")]) == 0
    assert {p.name for p in (tmp_path / "out").glob("*.ipynb")} == {p.name for p in CHAPTERS}
    for p in (tmp_path / "out").glob("*.ipynb"):
        assert "BEGIN SOLUTION" not in p.read_text(encoding="utf-8")


def test_jupyter_folds_what_the_site_folds():
    new, code = nbformat.v4.new_notebook, nbformat.v4.new_code_cell
    texts = [
        "#| export\nimport os",
        "#| solution\nx = 1",
        "#| code-fold: How\nx = 1",
        "import os",
        "#| export\nimport os\ndef f(): ...",
    ]
    folded = EXERCISES.folded(
        nbformat.writes(new(cells=[*map(code, texts), nbformat.v4.new_markdown_cell("import os")]))
    )
    assert [
        c.metadata.get("jupyter", {}).get("source_hidden", False)
        for c in nbformat.reads(folded, 4).cells
    ] == [True] * 3 + [False] * 3
    assert EXERCISES.folded(folded) == folded


# --- words


def test_words_leave_out_what_is_not_the_spine(tmp_path):
    texts = [
        "# One two",
        "three `four`\n\n| a | b |\n\nfive\n\n```\ncode\n```",
        "> **Box: Five.** six",
        "<details>seven</details>",
        "## Exercises\nnine",
        "ten",
    ]
    nbformat.write(
        nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_markdown_cell, texts)]),
        tmp_path / "01_a.ipynb",
    )
    assert WORDS.words(tmp_path / "01_a.ipynb") == 5
