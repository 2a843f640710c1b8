"""Figures of speed, memory and quality: measured apart, kept in `measured/`, drawn by the cell that claims them, measured anew on request.

A chapter writes one round of a measurement as a function, and `figure` makes a `Figure` of it. Its record, a file in `measured/`,
names the function and its inputs, and says on which machine it ran, when, with which versions, and every round. A claim is checked on the
record each time that the chapter runs. Code may change without a new measurement: a drawing says on which day it was measured, and
whether the engine or the function that measured it has changed since. `.ci/figures` measures anew; a reader calls `measure()` in the
notebook, and the next drawing shows both."""

import ast, functools, hashlib, inspect, json, math, os, platform, textwrap, time
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pandas as pd

import batchlab
from batchlab.view.drawing import (
    COLOURS,
    Canvas,
    Picture,
    bars,
    heading,
    legend,
    mark_axis,
    scale,
    ticks,
    written_lines,
)

FOLDER = Path(__file__).resolve().parent / "measured"
ENGINE = "basics", "core", "models", "fast", "llm", "tasks"  # the folders that a figure measures
KINDS = [k for k in ("decode", "prefill", "cached", "again", "padded", "ink") if k in COLOURS]


def short(n: float, digits: int) -> str:
    "A number in `digits` digits, or whole from a thousand on."
    return f"{n:,.{digits}g}" if abs(n) < 1000 else f"{n:,.0f}"


def powers(low: float, high: float) -> list[float]:
    """Powers of two from `low` to `high`, or of ten if those would be more than ten: the marks
    of a logarithmic axis."""
    two = [
        2.0**i
        for i in range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    ]
    if len(two) <= 10:
        return two
    return [
        10.0**i
        for i in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    ]


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    title: str = "",
    kinds: Sequence[str] = ("decode", "prefill", "cached", "again", "padded", "ink"),
    log: str = "",
    spread: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    dashed: Iterable[str] = (),
    caption: str = "",
) -> Picture:
    """A `Picture` of `lines`, `{name: [(x, y), …]}`, on one scale; y from 0, or from the least
    if that is below.

    `log`: which axes are logarithmic: '', 'x', 'y' or 'xy'. `spread`:
    `{name: [(x, low, high), …]}`, drawn as thin upright lines. `dashed`: names of lines to be
    drawn so. `caption`: a line below. At most six lines, one for each of `kinds`. Raises
    `ValueError` beyond that, or with nothing to draw."""
    points = [p for line in lines.values() for p in line]
    if not points or len(lines) > len(kinds):
        raise ValueError(f"between one and {len(kinds)} lines can be told apart, got {len(lines)}")
    c, left, right, spread = Canvas(), 64, 836, spread or {}
    (x0, x1), (y0, y1) = [(min(v), max(v)) for v in zip(*points)]
    y1 = max([y1, *(high for marks in spread.values() for _, _, high in marks)])
    if "y" not in log:
        y0 = min(0, y0)
    if title:
        heading(c, left, title)
    c.text(left, c.y + 8, y_label, "dim")
    c.y += 214
    on = lambda axis, v: math.log(v) if axis in log else v
    across, up = (
        scale(on("x", x0), on("x", x1), left, right),
        scale(on("y", y0), on("y", y1), c.y, c.y - 200),
    )
    x, y = lambda v: across(on("x", v)), lambda v: up(on("y", v))
    for v in powers(y0, y1) if "y" in log else ticks(y0, y1, 4):
        c.line([(left, y(v)), (right, y(v))], "idle")
        c.text(left - 6, y(v) + 4, f"{v:,.10g}", "dim", "end")
    for (name, line), kind in zip(lines.items(), kinds):
        c.line(
            [(x(a), y(b)) for a, b in line],
            kind,
            2,
            **(dict(stroke_dasharray="5 4") if name in dashed else {}),
        )
        for a, low, high in spread.get(name, ()):
            c.line([(x(a), y(low)), (x(a), y(high))], kind, 1.2)
    c.y += 2
    marks = powers(x0, x1) if "x" in log else ticks(x0, x1)
    mark_axis(c, left, right, [(x(v), v) for v in marks], x_label)
    legend(c, left, list(zip(kinds, lines)))
    written_lines(c, left, caption)
    at = lambda p: f"{short(p[1], 4)} at {short(p[0], 4)}"
    said = [
        f"{name}: "
        + (", ".join(map(at, line)) if len(line) <= 12 else f"{at(line[0])} to {at(line[-1])}")
        for name, line in lines.items()
    ]
    return c.picture(
        title or y_label,
        "; ".join([f"{y_label} by {x_label}", *said, *([caption] if caption else [])]),
    )


def wanted(name):
    "Whether `BATCHLAB_MEASURE`, '1' or names with commas between them, asks for this figure to be measured."
    asked = os.environ.get("BATCHLAB_MEASURE", "")
    return asked == "1" or name in asked.split(",")


def code_of(source):
    "A digest of what a function does: its code without name, decorators, comments and docstring."
    f = ast.parse(textwrap.dedent(source)).body[0]
    f.decorator_list, f.name = [], ""
    if ast.get_docstring(f) is not None:
        f.body = f.body[1:]
    return hashlib.sha256(ast.dump(f).encode()).hexdigest()[:12]


def without_docstrings(source):
    "What the code of a module does, as syntax trees in writing: of its definitions, in whichever order, without imports and `__all__`."
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    parts = [
        ast.dump(node) for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    return "\n".join(sorted(x for x in parts if "Name(id='__all__'" not in x[:60]))


@functools.cache
def engine():
    "A digest of the code in the folders `ENGINE` of the package, without comments and docstrings."
    found = hashlib.sha256()
    for path in sorted(Path(batchlab.__file__).parent.rglob("*.*")):
        if path.parent.name in ENGINE and path.suffix in (".py", ".cpp"):
            text = path.read_text(encoding="utf-8")
            found.update((without_docstrings(text) if path.suffix == ".py" else text).encode())
    return found.hexdigest()[:12]


def dated(record, other_function=False):
    "The day of a record, and in parentheses what has changed since."
    changed = {None: ["the record does not name its engine"], engine(): []}.get(
        record.get("engine"), ["the engine's code has changed since"]
    )
    changed += ["the measuring function has changed since"] * other_function
    return f"{record['date']} ({'; '.join(changed)})" if changed else record["date"]


def inputs_of(run):
    "`{parameter: value}` of what a round is called with: the defaults of its function."
    defaults = {k: p.default for k, p in inspect.signature(run).parameters.items()}
    return json.loads(json.dumps(defaults))


@functools.cache
def machine():
    "The processor's name, the cores that this process may use, torch's threads and the memory in GB."
    import psutil, torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return dict(
        cpu=names[0] if names else platform.processor() or platform.machine(),
        cores=cores,
        threads=torch.get_num_threads(),
        memory_gb=round(psutil.virtual_memory().total / 2**30),
    )


class Figure:
    """One measurement: `run()` is a round of it, `recorded` what is in its file, `own` what this session measured; both may be None.

    `by`: the column, or the two, that name a row of a round; all others are measured. `claims`: `{sentence: function of the table}`."""

    def __init__(self, run, by, rounds, claims):
        self.run, self.by, self.rounds, self.claims = (
            run,
            [by] if isinstance(by, str) else [*by],
            rounds,
            claims or {},
        )
        self.name, self.title = (
            run.__name__,
            (run.__doc__ or run.__name__).strip().splitlines()[0].rstrip("."),
        )
        self.code = code_of(inspect.getsource(run))
        self.file, self.own = FOLDER / f"{self.name}.json", None
        self.recorded = (
            json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else None
        )

    def measure(self, rounds=None):
        "Run it here, `rounds` times, and keep what came out beside the record."
        measured = [self.run() for _ in range(rounds or self.rounds)]
        self.own = dict(
            title=self.title,
            function=self.name,
            inputs=inputs_of(self.run),
            by=self.by,
            command=f".ci/figures {self.name}",
            code=self.code,
            engine=engine(),
            date=f"{date.today()}",
            machine=machine(),
            rounds=measured,
            versions=dict(
                python=platform.python_version(),
                **{p: version(p) for p in ("torch", "transformers", "batchlab")},
            ),
        )
        return self

    def record(self):
        "Measure, and write what came out to the record's file."
        start = time.perf_counter()
        self.measure()
        rows = lambda one: "[" + ",\n   ".join(json.dumps(r) for r in one) + "]"
        about = json.dumps({k: v for k, v in self.own.items() if k != "rounds"}, indent=1)[:-2]
        FOLDER.mkdir(exist_ok=True)
        self.file.write_text(
            about + ',\n "rounds": [\n  ' + ",\n  ".join(map(rows, self.own["rounds"])) + "]\n}\n",
            encoding="utf-8",
        )
        self.recorded, self.own = json.loads(self.file.read_text(encoding="utf-8")), None
        print(
            f"{self.name}: {len(self.recorded['rounds'])} rounds in {time.perf_counter() - start:.0f} s"
        )

    def frame(self, kind="median", of=None):
        "The 'median', 'min' or 'max' of all rounds of the record, or of another: a DataFrame indexed by the columns of `by`."
        of = of or self.recorded
        if of is None:
            raise FileNotFoundError(f"no record of {self.name}: run .ci/figures {self.name}")
        each = pd.concat([pd.DataFrame(r) for r in of["rounds"]])
        return getattr(each.groupby(self.by, sort=False), kind)()

    @property
    def table(self):
        "Medians of the record."
        return self.frame()

    def broken(self, of=None):
        "Those claims that the record, or another, does not bear out."
        return [text for text, holds in self.claims.items() if not holds(self.frame(of=of))]

    @property
    def fits(self):
        "Whether the record is one of this function with these inputs."
        mine = dict(function=self.name, inputs=inputs_of(self.run), by=self.by)
        return mine == {k: self.recorded.get(k) for k in mine}

    @property
    def caption(self):
        "What ran, where and when, in a line."

        def said(r):
            m, v = r["machine"], r["versions"]
            return (
                f"{len(r['rounds'])} rounds on {m['cpu']}, {m['threads']} threads, torch {v['torch']}, "
                f"batchlab {v['batchlab']}, measured {dated(r, self.code != r.get('code'))}"
            )

        mine = f" Yours: {said(self.own)}." if self.own else ""
        return f"Median, least and most of {said(self.recorded)}: {self.recorded['command']}.{mine}"

    def _lines(self, x, y, of, suffix=""):
        middle, low, high = (self.frame(k, of).reset_index() for k in ("median", "min", "max"))
        rest = [b for b in self.by if b != x]
        group = lambda t: t.groupby(rest[0], sort=False) if rest else [(y, t)]
        lines = {f"{k}{suffix}": list(zip(t[x].tolist(), t[y].tolist())) for k, t in group(middle)}
        spread = {
            f"{k}{suffix}": list(zip(a[x].tolist(), a[y].tolist(), b[y].tolist()))
            for (k, a), (_, b) in zip(group(low), group(high))
        }
        return lines, spread

    def curves(self, x, y, log="", x_label="", y_label="", more=None) -> Picture:
        "`y` over `x`, a line for each value of the other column of `by`. `log`: '', 'x', 'y' or 'xy'. `more`: other lines, `{name: [(x, y), …]}`, dashed."
        lines, spread = self._lines(x, y, self.recorded)
        if self.own:
            mine, also = self._lines(x, y, self.own, ", yours")
            lines, spread = {**lines, **mine}, {**spread, **also}
        return curves(
            {**lines, **(more or {})},
            x_label or x,
            y_label or y,
            self.title,
            log=log,
            spread=spread,
            dashed=[*(more or {})],
            caption=self.caption,
        )

    def bars(self, *parts, label="", names=None, note=None) -> Picture:
        """A bar for each row of the table, of the columns `parts` one after the other. `names`: `{column: what it means}`.

        `note`: a function of a row of the table to the text beside its bar; without, the least and most if there is one part."""
        rows, notes = {}, {}
        for of, suffix in [(self.recorded, ""), (self.own, ", yours")]:
            if of is None:
                continue
            t, low, high = (self.frame(k, of) for k in ("median", "min", "max"))
            for i in t.index:
                name = " ".join(map(str, i if isinstance(i, tuple) else [i])) + suffix
                rows[name] = {p: float(t.loc[i, p]) for p in parts}
                if note:
                    notes[name] = note(t.loc[i])
                elif len(parts) == 1:
                    notes[name] = " to ".join(short(t.loc[i, parts[0]], 3) for t in (low, high))
        said = names or ({} if len(parts) > 1 else {parts[0]: ""})  # a single one is the axis's
        key = {p: (k, said.get(p, p)) for p, k in zip(parts, KINDS)}
        return bars(rows, key, label or parts[0], notes, self.title, caption=self.caption)


def figure(by, rounds=5, claims=None):
    "Make a `Figure` of a function that measures one round: it returns a list of dicts, the same keys in each round."

    def make(run):
        f = Figure(run, by, rounds, claims)
        if wanted(f.name):
            f.record()
        if f.recorded is None:
            return f  # drawing it says what to do
        if not f.fits:
            raise AssertionError(f"{f.name}: measured with other inputs: run .ci/figures {f.name}")
        if broken := f.broken():
            if not os.environ.get("BATCHLAB_MEASURE"):
                raise AssertionError(f"{f.name}: the record does not show that {broken}\n{f.table}")
            print(f"BROKEN {f.name}: " + "; ".join(broken))
        return f

    return make


def recorded(name):
    "The figure `name` of another chapter, as its record has it; it is measured there."
    about = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))

    def run():
        raise RuntimeError(f"{name} is measured in its own chapter: .ci/figures {name}")

    run.__name__, run.__doc__ = name, about["title"]
    of_another = Figure(run, about["by"], len(about["rounds"]), {})
    of_another.code = about["code"]
    return of_another


RUNGS = {  # of the ladder, `{rung: the chapter that builds it}`
    "no cache": "01",
    "a KV cache": "01",
    "a batch that waits": "03",
    "rows that come and go": "02",
    "prompts together too": "03",
    "their prefix shared": "04",
    "packed rows": "05",
    "slots that remember": "06",
    "the core, on torch": "14",
    "its kernels": "20",
    "bf16": "25",
    "4 bits": "23",
    "int8": "22",
}


def ladder(chapter: str = "") -> Picture:
    "Output tokens a second of the same requests on each rung, from the record of the tour; the rungs of `chapter` are lit."
    record = json.loads((FOLDER / "the_ladder.json").read_text(encoding="utf-8"))
    each = pd.concat([pd.DataFrame(r) for r in record["rounds"]])
    speed = each.groupby("engine", sort=False)["tokens_s"].median().to_dict()
    lit = {rung: RUNGS[rung] == chapter or not chapter for rung in speed}
    rows = {rung: {"here" if lit[rung] else "there": round(n)} for rung, n in speed.items()}
    first = speed["no cache"]
    short = max(speed.values()) / 15  # a bar without room for its number
    notes = {
        rung: " · ".join(
            [f"{n:,.0f}"] * (n < short) + [f"{n / first:,.0f} ×"] * (rung != "no cache")
        )
        for rung, n in speed.items()
    }
    m = record["machine"]
    n = record["inputs"]["num_requests"]
    caption = f"Median of {len(record['rounds'])} rounds on {m['cpu']}, {m['threads']} threads, {dated(record)}: {record['command']}"
    title = f"The ladder: output tokens a second, the same {n} requests"
    key = {"here": ("decode", ""), "there": ("held", "")}
    return bars(rows, key, "tokens a second", notes, title, caption=caption)
