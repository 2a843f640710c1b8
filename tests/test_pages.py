"Reference pages are made from the code: what they show is what the code says now."

import pytest

execnb = pytest.importorskip("execnb.shell", reason="needs execnb, which nbdev brings")

from helpers import BOOK, ROOT

PAGES = [
    p
    for p in BOOK["chapters"]()
    if p.parent.name == "reference" and "from pages" in p.read_text("utf-8")
]
SEEN = ("93_recipes", "80_tasks")  # whose outputs are answers of a model, or have no tables


def tables(path):
    "The Markdown that the outputs of a notebook hold."
    outs = [out for cell in BOOK["read"](path)["cells"] for out in cell.get("outputs", [])]
    found = [out["data"]["text/markdown"] for out in outs if "text/markdown" in out.get("data", {})]
    return ["".join(text) for text in found]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("path", [p for p in PAGES if p.stem not in SEEN], ids=lambda p: p.stem)
def test_tables_are_up_to_date(path, tmp_path, monkeypatch):
    monkeypatch.chdir(path.parent)
    ran = tmp_path / path.name
    execnb.CaptureShell(path.parent).execute(path, ran, exc_stop=True)
    assert tables(ran) == tables(path)


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
