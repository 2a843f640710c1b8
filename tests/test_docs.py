"What holds for all documents: README's two commands, outputs without paths, and the counting of `.ci/run`."

import json, os, re, runpy
from pathlib import Path

import pytest

from helpers import BOOK

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = [*BOOK["chapters"](), ROOT / "nbs/index.ipynb"]
# An absolute path of a machine: a folder that every system has, or a home, at the start of a word.
MACHINE_PATH = re.compile(
    r"(?<![\w./:<-])(?:/(?:home|root|Users|tmp|var|usr|opt|work|mnt|private)/[\w.-]|[A-Z]:\\\\?Users)"
)


def test_readme_commands():
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert len(blocks) >= 2
    for block in blocks[:2]:
        assert len(block.strip().splitlines()) == 1
    assert "batchlab generate" in blocks[0]
    assert "nbdev_test" in blocks[1] and "pytest" in blocks[1]
    for block in blocks[:2]:
        assert block.startswith("pip install -c constraints.txt ")


def test_chapter_map():
    linked = {
        *re.findall(r"\]\(nbs/([\w/-]+\.ipynb)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    }
    assert linked == {p.relative_to(ROOT / "nbs").as_posix() for p in BOOK["chapters"]()}


def texts(out):
    "Every text that a cell output shows."
    for value in [out.get("text", ""), *out.get("data", {}).values(), *out.get("traceback", [])]:
        yield "".join(value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("path", BOOK["notebooks"](), ids=lambda p: p.stem)
def test_outputs_hold_no_machine_path(path):
    nb = json.loads(path.read_text(encoding="utf-8"))
    found = [
        t
        for c in nb["cells"]
        for o in c.get("outputs", [])
        for t in texts(o)
        if MACHINE_PATH.search(t)
    ]
    assert not found


def test_machine_path_is_seen():
    for bad in ('File "/home/ann/x.py"', "'/tmp/tmpab12/m.gguf'", r"C:\Users\ann"):
        assert MACHINE_PATH.search(bad)
    for good in ("tokens/s and 1/2", "see https://x.org/home/page", "/v1/chat", "a/tmp/b"):
        assert not MACHINE_PATH.search(good)


@pytest.mark.parametrize("path", sorted((ROOT / "nbs/images").glob("*.svg")), ids=lambda p: p.stem)
def test_a_picture_that_stands_alone_is_one_that_a_notebook_drew(path):
    kept = {
        t
        for p in NOTEBOOKS
        for c in json.loads(p.read_text(encoding="utf-8"))["cells"]
        for o in c.get("outputs", [])
        for t in texts(o)
    }
    assert path.read_text(encoding="utf-8") in kept
    assert f"images/{path.name})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_chapter_shows_something():
    exempt = lambda stem: (
        stem in ("index", "09_models") or stem.startswith("8")
    )  # pages of part IX are to look things up
    bare = [
        p.stem
        for p in NOTEBOOKS
        if not exempt(p.stem) and "image/svg+xml" not in p.read_text(encoding="utf-8")
    ]
    assert not bare


# --- pages to look things up


def markdown(path):
    return [
        "".join(c["source"])
        for c in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if c["cell_type"] == "markdown"
    ]


def entries(name):
    "`{heading: text}` of the entries of the glossary or the bibliography, in their order."
    return {
        m[1]: m[2]
        for cell in markdown(BOOK["find"](name))
        if (m := re.match(r"### ([^\n]+)\n+(.*)", cell, re.S))
    }


def links_to(name):
    "`(notebook, anchor)` of all links to entries of that page, from any notebook."
    paths = BOOK["notebooks"]()
    return [
        (p.stem, a)
        for p in paths
        for cell in markdown(p)
        for a in re.findall(rf"\]\([./\w]*{name}\.ipynb#([^)]+)\)", cell)
    ]


def test_every_link_to_the_glossary_finds_its_term():
    terms = entries("82_glossary")
    assert [*terms] == sorted(terms, key=str.lower), "the terms stand in the order of the alphabet"
    anchors = {t.replace(" ", "-") for t in terms}
    assert all(t == t.lower() for t in terms) and len(anchors) == len(terms)
    assert not [(nb, a) for nb, a in links_to("82_glossary") if a not in anchors]
    letters = [c[3:] for c in markdown(BOOK["find"]("82_glossary")) if c.startswith("## ")]
    assert letters == sorted({t[0] for t in terms})


def introduced(term, chapters):
    "The first of `chapters` that links to a term or has it in bold, outside of boxes, answers and exercises, or None."
    anchor, words = re.escape(term.replace(" ", "-")), re.escape(term).replace(r"\ ", r"[-\s]+")
    mark = re.compile(rf"\]\([./\w]*82_glossary\.ipynb#{anchor}\)|\*\*{words}s?\*\*", re.I)
    for path in chapters:
        cells = markdown(path)
        end = next((i for i, c in enumerate(cells) if c.startswith("## Exercises")), len(cells))
        if any(mark.search(c) for c in cells[:end] if not c.startswith(("> **Box", "<details"))):
            return path.name


def test_a_term_names_the_chapter_that_introduces_it():
    plain = lambda text: re.sub(r"[-_\s]+", " ", text.lower())
    spine = [p for p in NOTEBOOKS if p.stem[0] in "01" and p.stem != "000_tour"]
    assert (
        introduced("oracle", spine) == "01_prefill.ipynb"
        and introduced("no such term", spine) is None
    )
    wrong = {}
    for term, text in entries("82_glossary").items():
        said = re.search(
            r"\[Chapter (\d+)\]\([./\w]*?(\w+\.ipynb)\)(, more in \[chapter (\d+)\]\([./\w]*?(\w+\.ipynb)\))?\n",
            text,
        )
        first = introduced(term, spine)
        if first not in (said[2], None):
            wrong[term] = first
        for number, name in {(said[1], said[2]), (said[4] or said[1], said[5] or said[2])}:
            assert name.startswith(number), term
            told = plain(BOOK["find"](name.removesuffix(".ipynb")).read_text(encoding="utf-8"))
            if not all(word[:6] in told for word in plain(term).split()):
                wrong[term] = f"not in {name}"
        assert said[2] < (said[5] or "9"), term
    assert not wrong


def test_every_term_is_explained_and_used_by_a_chapter():
    prose = {
        p.stem: " ".join(re.sub(r"[-\s]+", " ", t.lower()) for t in markdown(p))
        for p in NOTEBOOKS
        if p.stem != "82_glossary"
    }
    everywhere, linked = (
        " ".join(prose.values()),
        {a for nb, a in links_to("82_glossary") if nb != "82_glossary"},
    )
    for term, text in entries("82_glossary").items():
        assert "*Elsewhere:*" in text, term
        assert term.replace(" ", "-") in linked or re.sub(r"[-\s]+", " ", term) in everywhere, (
            f"no chapter speaks of {term}"
        )


def test_every_citation_finds_its_entry_and_every_entry_is_cited():
    keys, cited = (
        entries("83_bibliography"),
        {a for nb, a in links_to("83_bibliography") if nb != "83_bibliography"},
    )
    assert [*keys] == sorted(keys) and not cited - {*keys}
    for key, text in keys.items():
        assert re.search(r"\[[^\]]+\]\(https://[^)]+\)", text), key
        assert (key in cited) != ("*Further reading.*" in text), (
            f"{key}: cited, or marked as further reading"
        )


def test_readme_names_the_commands_that_there_are():
    from batchlab.cli.flags import COMMANDS

    row = next(
        line
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("The commands are ")
    )
    named = [c.removeprefix("batchlab ") for c in re.findall("`([^`]+)`", row.split(";")[0])]
    assert named == [*COMMANDS]


FLOORS = "core", "llm", "fast", "tasks", "jobs", "serve", "view", "compat"


def test_the_map_shows_every_module_there_is():
    shown = " ".join(
        t
        for c in json.loads(BOOK["find"]("84_map").read_text(encoding="utf-8"))["cells"]
        for o in c.get("outputs", [])
        for t in texts(o)
    )
    modules = {
        ".".join(p.relative_to(ROOT / "batchlab").with_suffix("").parts).removesuffix(".__init__")
        for p in (ROOT / "batchlab").rglob("*.py")
    }
    missing = {m for m in modules - {"_modidx", "__init__", *FLOORS} if f">{m}<" not in shown}
    assert not missing, "run 84_map.ipynb again"


# --- the spine

SPINE = BOOK["spine"]()
tool = lambda name: runpy.run_path(str(ROOT / ".ci" / name), run_name=name)


def test_chapters_say_how_long_they_take(capsys):
    assert tool("words")["main"](["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("path", SPINE[1:], ids=lambda p: p.stem)
def test_a_chapter_opens_with_its_place(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    opening = "".join(
        "".join(c["source"]) + "\n"
        for c in cells[
            : next(i for i, c in enumerate(cells) if "".join(c["source"]).startswith("## "))
        ]
    )
    assert re.match(r"(#\| default_exp [\w.]+\n)?# .+\n+> .+", opening)
    assert f'place("{path.stem[:2]}")' in opening


@pytest.mark.parametrize("path", SPINE[1:], ids=lambda p: p.stem)
def test_three_exercises_each_with_an_answer_a_check_and_a_reason(path):
    cells = ["".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    cells = cells[cells.index("## Exercises") + 1 :]
    kinds = [
        (r"### \d\. ", "task"),
        (r"#\| ?solution\b", "answer"),
        (r"#\| ?check\b", "check"),
        ("<details", "reason"),
    ]
    found = [kind for c in cells for start, kind in kinds if re.match(start, c)]
    assert found == ["task", "answer", "check", "reason"] * 3


def test_the_first_cell_is_the_same_in_all_chapters_of_the_spine():
    first = tool("first-cell")
    have = [p for p in SPINE if f'"id": "{first["ID"]}"' in p.read_text(encoding="utf-8")]
    assert have in ([], SPINE), "run .ci/first-cell"
    for p in have:
        assert first["text"](
            first["put"](json.loads(p.read_text(encoding="utf-8")))
        ) == p.read_text(encoding="utf-8"), p.stem


def hosted(folder, cell, missing, run=lambda command: 0):
    "Run the first cell in `folder` as if the modules `missing` were not there: the folder that it ends in, and what it ran."
    from importlib.util import find_spec

    ran = []

    class Shell:
        def run_line_magic(self, name, line):
            ran.append(f"%{name} {line}")

    names = dict(get_ipython=Shell, system=lambda command: ran.append(command) or run(command))
    code = re.sub(
        r"^( *)%(\w+) (.*)$", r'\1get_ipython().run_line_magic("\2", f"""\3""")', cell, flags=re.M
    )
    code = code.replace("os.system", "system").replace(
        "from importlib.util import find_spec", "find_spec = there"
    )
    here = os.getcwd()
    try:
        os.chdir(folder)
        exec(code, names | dict(there=lambda name: None if name in missing else find_spec("json")))
        return Path(os.getcwd()), ran
    finally:
        os.chdir(here)


def test_the_first_cell(tmp_path):
    cell = tool("first-cell")["CELL"]
    (tmp_path / "clone/nbs").mkdir(parents=True)
    (tmp_path / "clone/pyproject.toml").touch()
    assert hosted(tmp_path, cell, ()) == (tmp_path, [])  # installed: nothing
    at, ran = hosted(tmp_path / "clone/nbs", cell, ("batchlab",))  # in a clone: installed from it
    assert (
        at == tmp_path / "clone/nbs"
        and len(ran) == 1
        and ran[0].startswith("%pip install")
        and "-c" not in ran[0]
    )
    _, [ran] = hosted(tmp_path / "clone/nbs", cell, ("batchlab", "torch"))
    assert "-c ../constraints.txt" in ran  # with no torch, the one that was tested
    with pytest.raises(AssertionError, match="put the address"):
        hosted(tmp_path, cell, ("batchlab", "chapter"))

    def clone(command):
        (tmp_path / "book/nbs").mkdir(parents=True)
        (tmp_path / "book/pyproject.toml").touch()
        return 0

    filled = cell.replace('address = ""', 'address = "https://example.org/batchlab"')
    at, ran = hosted(tmp_path, filled, ("batchlab", "chapter"), clone)  # one notebook alone
    assert (
        at == tmp_path / "book/nbs"
        and ran[0] == "git clone -q https://example.org/batchlab book"
        and ran[1].startswith("%pip")
    )
    at, ran = hosted(tmp_path, cell, ("chapter",))  # after a restart: no second clone
    assert at == tmp_path / "book/nbs" and not ran
    deep = tmp_path / "clone/nbs/2_core"
    deep.mkdir()
    at, [ran] = hosted(deep, cell, ("batchlab", "torch"))  # a chapter in a folder of the clone
    assert at == deep and "-c ../../constraints.txt" in ran and "'../..[tables]'" in ran


@pytest.mark.parametrize(
    "log, status, expected",
    [
        ("Success.\n12 passed in 3.10s\n", 0, (15, 0)),
        ("12 passed in 3.10s\n", 0, (12, 1)),  # no notebook was run
        (
            "WARNING: pip says\nSuccess.\n.F\n1 failed, 11 passed, 2 warnings in 63.10s (0:01:03)\n",
            1,
            (14, 1),
        ),
        ("Success.\n4 passed, 2 errors in 1.00s\n", 1, (7, 2)),
        (
            "nbdev Tests Failed On The Following Notebooks:\n====\n\t00_a.ipynb\n\t01_b.ipynb\n",
            1,
            (1, 2),
        ),
        ("ERROR: No matching distribution found for torch\n", 1, (0, 1)),
        ("Success.\n", 137, (3, 1)),
        ("", 0, (0, 1)),
    ],
)
def test_ci_count(log, status, expected):
    count = runpy.run_path(str(ROOT / ".ci/count"))["count"]
    assert count(log, status, ["00_a", "01_b", "02_c"]) == expected
