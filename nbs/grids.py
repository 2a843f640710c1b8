"""Rows of boxes, as chapters draw masks, caches and schedules with them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from batchlab.view.drawing import Canvas, Picture, heading, inner, legend, on_top, wide


def runs(values: Iterable[Any]) -> Iterator[tuple[int, int, Any]]:
    "Neighbours that are equal, as `(first, end, value)`."
    end = 0
    for value, same in groupby(values):
        first, end = end, end + len(list(same))
        yield first, end, value


def _count(row, key):
    "In words, how many places of a row are of which kind."
    counts = Counter(key[p[0]][1] or key[p[0]][0] for p in row if p != " ")
    return ", ".join(f"{n} {label}" for label, n in counts.items()) or "nothing"


def _grid_row(c, row, key, left, unit, high):
    "The boxes of a row at `c.y`, `unit` pixels wide each, and the texts in them."
    thin, middle = unit < 5, c.y + high / 2 + 3.5
    for first, end, place in (
        runs(row) if thin else ((i, i + 1, place) for i, place in enumerate(row))
    ):
        if place == " ":
            continue
        kind, w = key[place[0]][0], (end - first) * unit - (not thin)
        c.box(left + first * unit, c.y, w, inner(high), kind)
        text = str(place[1]) if len(place) > 1 else ""
        if text and unit >= 6.2 * len(text) + 2:
            c.text(left + first * unit + w / 2, middle, text, on_top(kind), "middle", font_size=10)


def grid(
    rows: Iterable[Iterable[str | tuple[str, object]]],
    key: Mapping[str, tuple[str, str]],
    labels: Iterable[object] | None = None,
    notes: Iterable[object] | None = None,
    columns: Iterable[str] | None = None,
    title: str = "Rows of places",
    size: float = 22,
) -> Picture:
    """A `Picture` of `rows` of places, a box each, as wide as fits and at most `size` pixels.

    A place is a character of `key`, a pair (character, text to write into it), or ' ' for a gap.
    `key`: `{character: (kind, label)}` with kinds of `COLOURS`; a label of '' stays out of the
    legend. `labels` and `notes` stand left and right of the rows, `columns` above (a text for
    each place of the longest row, '' for none). Raises `ValueError` for a place that `key`
    lacks."""
    rows = [list(row) for row in rows]
    used = {p[0] for row in rows for p in row} - {" "}
    if unknown := used - set(key):
        raise ValueError(f"places {sorted(unknown)} have no entry in key, which has {sorted(key)}")
    labels, notes = (
        [str(s) for s in labels or [""] * len(rows)],
        [str(s) for s in notes or [""] * len(rows)],
    )
    c, left = Canvas(), 16 + wide(labels)
    unit = min(size, (c.right - wide(notes) - left) / max([1, *map(len, rows)]))
    high = min(26, max(12 if any(labels + notes) else 3, unit))
    heading(c, 16, title)
    if columns:
        for i, s in enumerate(columns):
            c.text(left + (i + 0.5) * unit, c.y + 9, s, "dim", "middle", font_size=10)
        c.y += 15
    for row, label, note in zip(rows, labels, notes):
        _grid_row(c, row, key, left, unit, high)
        c.text(left - 8, c.y + high / 2 + 4, label, "ink", "end")
        c.text(left + len(row) * unit + 8, c.y + high / 2 + 4, note, "dim")
        c.y += high
    c.y += 10
    legend(
        c,
        16,
        dict.fromkeys((kind, label) for ch, (kind, label) in key.items() if ch in used and label),
    )
    said = [
        f"{label}: {_count(row, key)}" if label else _count(row, key)
        for row, label in zip(rows, labels)
    ]
    return c.picture(
        title,
        "; ".join(said[:12]) + (f"; and {len(said) - 12} rows more" if len(said) > 12 else ""),
    )
