"What holds for all documents: README's two commands, links, outputs without paths, and the counting of `.ci/run`."

import os, re, sys
from pathlib import Path

import pytest

from helpers import BOOK, ROOT, run, tool

README = (ROOT / "README.md").read_text(encoding="utf-8")
# An absolute path of a machine: a folder that every system has, or a home, at the start of a word.
MACHINE_PATH = re.compile(
    r"(?<![\w./:<-])(?:/(?:home|root|Users|tmp|var|usr|opt|work|mnt|private)/[\w.-]|[A-Z]:\\\\?Users)"
)


def test_the_tour_ends_with_a_list_of_all_chapters():
    _, listed = "\n".join(BOOK["cells"](BOOK["TOUR"], "markdown")).split("## Chapters\n")
    linked = {*re.findall(r"\]\(([\w/-]+\.ipynb)\)", listed)}
    assert linked == {p.relative_to(ROOT / "nbs").as_posix() for p in BOOK["chapters"]()}


def test_next_leads_to_the_chapter_after():
    "Where it leads anywhere: no chapter is skipped."
    chapters = [p for p in BOOK["chapters"]() if p.parent.name != "reference"]
    for p, after in zip(chapters, chapters[1:]):
        text = "\n\n".join(BOOK["cells"](p, "markdown"))
        [*said] = re.findall(r"\*Next\*: (.*?\.ipynb.*?)(?:\n\n|$)", text, re.S)
        assert all(after.name in s for s in said), f"{p.stem}: {said}"


def shown(path):
    "Every text that the outputs of a notebook show."
    for c in BOOK["read"](path)["cells"]:
        for out in c.get("outputs", []):
            yield from BOOK["shown"](out)


@pytest.mark.parametrize("path", BOOK["notebooks"](), ids=lambda p: p.stem)
def test_outputs_hold_no_machine_path(path):
    assert not [t for t in shown(path) if MACHINE_PATH.search(t)]


def entries(name):
    "The headings of the entries of the glossary or the bibliography."
    cells = BOOK["cells"](BOOK["find"](name), "markdown")
    return [m[1] for cell in cells if (m := re.match(r"### ([^\n]+)\n", cell))]


@pytest.mark.parametrize("name", ["82_glossary", "83_bibliography"])
def test_every_link_to_an_entry_finds_it(name):
    anchors = [entry.replace(" ", "-") for entry in entries(name)]
    link = re.compile(rf"\]\([./\w]*{name}\.ipynb#([^)]+)\)")
    asked = {
        (p.stem, anchor)
        for p in BOOK["notebooks"]()
        for cell in BOOK["cells"](p, "markdown")
        for anchor in link.findall(cell)
    }
    assert len({*anchors}) == len(anchors) > 20
    assert asked and not [link for link in asked if link[1] not in anchors]


def test_readme_names_the_commands_that_there_are():
    from batchlab.cli.flags import COMMANDS

    [row] = re.findall(r"^The commands are ([^;\n]*)", README, re.M)
    named = [c.removeprefix("batchlab ") for c in re.findall("`([^`]+)`", row)]
    assert named == [*COMMANDS]


FLOORS = "core", "llm", "fast", "tasks", "jobs", "serve", "view", "compat"


def test_the_map_shows_every_module_there_is():
    drawn = " ".join(shown(BOOK["find"]("84_map")))
    paths = (p.relative_to(ROOT / "batchlab") for p in (ROOT / "batchlab").rglob("*.py"))
    modules = {".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in paths}
    missing = {m for m in modules - {"_modidx", "__init__", *FLOORS} if f">{m}<" not in drawn}
    assert not missing, "run 84_map.ipynb again"


def test_the_first_cell_is_the_same_in_all_chapters_of_the_spine():
    done = run(sys.executable, str(ROOT / ".ci/first-cell"), "--check")
    assert done.returncode == 0, done.stderr


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
    cell = tool("first-cell").CELL
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
    assert tool("count").count(log, status, ["00_a", "01_b", "02_c"]) == expected
