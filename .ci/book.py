"""What the scripts of this folder share: which notebooks there are, their cells, and files that are made from them.

Chapters have a number in front (`09_scheduler`), pages of reference about a module have none."""

import json, re, sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / "nbs"
TOUR = NBS / "000_tour.ipynb"  # at its end the list of chapters
SKIPPED = re.compile(r"^#\|\s*(slow|eval: *false)|nbdev_export\(\)", re.M)


def notebooks(folder: Path = NBS) -> list[Path]:
    "All notebooks under `folder`, by name."
    hidden = lambda p: re.search(r"(^|/)[._]", p.relative_to(folder).as_posix())
    inside = (p for p in folder.rglob("*.ipynb") if not hidden(p))
    return sorted(inside, key=lambda p: (p.stem, p.as_posix()))


def is_chapter(path: Path) -> bool:
    return re.match(r"\d\d", path.stem) is not None


def chapters(folder: Path = NBS) -> list[Path]:
    "The chapters, by number."
    return [p for p in notebooks(folder) if is_chapter(p)]


def spine(folder: Path = NBS) -> list[Path]:
    "The tour and the chapters of parts I and II."
    return [p for p in chapters(folder) if p.stem[0] in "01"]


def reference(folder: Path = NBS) -> list[Path]:
    "Notebooks about one module each, that are no chapter."
    return [p for p in notebooks(folder) if not is_chapter(p) and p.stem != "index"]


def find(stem: str, folder: Path = NBS) -> Path:
    "The notebook called `stem`."
    [path] = [p for p in notebooks(folder) if p.stem == stem]
    return path


def parts() -> dict[str, list[Path]]:
    "`{title of a part: its chapters}`, by the list of chapters in the tour."
    path, link = TOUR, re.compile(r"\]\(([\w/]+\.ipynb)\)")
    _, *found = re.split(
        r"^\*\*(Part [0IVX]+: [^*]+)\*\*", "\n\n".join(cells(path, "markdown")), flags=re.M
    )
    ends = (re.split(r"\n#", said)[0] for said in found[1::2])
    return {
        title: [path.parent / p for p in link.findall(end)] for title, end in zip(found[::2], ends)
    }


def read(path: Path) -> dict:
    "A notebook, the source of each of its cells as one string."
    nb = json.loads(path.read_text(encoding="utf-8"))
    return nb | dict(cells=[c | dict(source="".join(c["source"])) for c in nb["cells"]])


def cells(path: Path, kind: str = "") -> list[str]:
    "Sources of the cells of a notebook, of all or of a `kind`."
    return [c["source"] for c in read(path)["cells"] if kind in ("", c["cell_type"])]


def shown(out: dict) -> Iterable[str]:
    "Every text that the output of a cell shows."
    for value in [out.get("text", ""), *out.get("data", {}).values(), *out.get("traceback", [])]:
        yield "".join(value) if isinstance(value, list) else str(value)


def text(nb: Mapping) -> str:
    "A notebook as its file has it, the way that nbdev writes."
    lines = [dict(c, source="".join(c["source"]).splitlines(True)) for c in nb["cells"]]
    whole = dict(nb, cells=lines)
    return json.dumps(whole, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def write(path: Path, nb: Mapping) -> None:
    path.write_text(text(nb), encoding="utf-8")


def sync(wanted: Mapping[Path, str], check: bool) -> None:
    "Bring files to the texts `wanted`. `check`: write nothing, and end with the names of those that differ."
    differ = [
        p for p, new in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != new
    ]
    if check and differ:
        names = ", ".join(p.relative_to(ROOT).as_posix() for p in differ)
        sys.exit(f"out of date: {names}; run .ci/{Path(sys.argv[0]).name}")
    for p in differ:
        p.write_text(wanted[p], encoding="utf-8")


def flags(argv: list[str], doc: str | None, *known: str) -> set[str]:
    "The arguments of a script that takes none but `known`; ends it with its description at another."
    if {*argv} - {*known}:
        sys.exit(doc)
    return {*argv}
