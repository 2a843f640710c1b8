"Reference pages are made from the code: what they show is what the code says now."

import os, subprocess, sys

import pytest

pytest.importorskip("execnb.shell", reason="needs execnb, which nbdev brings")

from helpers import BOOK, ROOT

SEEN = ("93_recipes", "80_tasks")  # whose outputs are answers of a model, or have no tables
PAGES = [
    p
    for p in BOOK["chapters"]()
    if p.parent.name == "reference" and "from pages" in p.read_text("utf-8") and p.stem not in SEEN
]
RUN = """
import sys
from pathlib import Path
from execnb.shell import CaptureShell
folder, *pages = map(Path, sys.argv[1:])
for page in pages:
    CaptureShell(page.parent).execute(page, folder / page.name, exc_stop=True)
"""


def tables(path):
    "The Markdown that the outputs of a notebook hold."
    outs = [out for cell in BOOK["read"](path)["cells"] for out in cell.get("outputs", [])]
    found = [out["data"]["text/markdown"] for out in outs if "text/markdown" in out.get("data", {})]
    return ["".join(text) for text in found]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    "A folder with the pages, run in a process of their own."
    folder = tmp_path_factory.mktemp("pages")
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-c", RUN, folder, *PAGES]
    subprocess.run(command, cwd=PAGES[0].parent, env=env, check=True)
    return folder


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_tables_are_up_to_date(path, ran):
    assert tables(ran / path.name) == tables(path)


def test_the_page_on_models_has_the_families_that_chapter_70_has(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "nbs")
    from families import FAMILIES

    [text] = tables(BOOK["find"]("88_models"))
    rows = [line.split("|")[1:3] for line in text.splitlines()[2:]]
    assert [(name.strip(" `"), how.strip()) for name, how in rows] == [f[:2] for f in FAMILIES]


@pytest.mark.parametrize(
    "text",
    [
        "```sh\nbatchlab run -i a.jsonl -o b.jsonl --odered\n```",
        "```sh\ncat a | FOO=1 batchlab generate --max-token 3 'Hello' > b && echo\n```",
        "```sh\nbatchlab rnu -i a.jsonl\n```",
    ],
)
def test_a_wrong_command_on_a_page_is_found(text, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "nbs")
    from pages import check_command, commands

    with pytest.raises(Exception, match="did you mean|unknown"):
        [*map(check_command, commands(text))]
