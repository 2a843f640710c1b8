"""Which notebooks there are: chapters have a number in front (`11_scheduler`), pages of reference about a module have none."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / "nbs"


def notebooks(folder: Path = NBS) -> list[Path]:
    "All notebooks under `folder`, by name."
    inside = (
        p
        for p in folder.rglob("*.ipynb")
        if not re.search(r"(^|/)[._]", p.relative_to(folder).as_posix())
    )
    return sorted(inside, key=lambda p: (p.stem, p.as_posix()))


def is_chapter(path: Path) -> bool:
    return re.match(r"\d\d", path.stem) is not None and path.parent.name != "modules"


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
