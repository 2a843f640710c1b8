"What Sphinx is given: the notebooks in the book's order, a page for each module, and which name means what."

import ast, functools, html, json, re, shutil, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import book

from book import ROOT, TOUR

LIB = ROOT / "batchlab"
HIDDEN = re.compile(r"^#\s*\|\s*(hide|default_exp)\b", re.M)
EXPORT, DEFAULT = (
    re.compile(r"^#\s*\|\s*export[is]?\b", re.M),
    re.compile(r"^#\s*\|\s*default_exp\s+([\w.]+)", re.M),
)
ELSEWHERE = re.compile(r"^#\s*\|\s*export[is]?[ \t]+([\w.]+)", re.M)
DIRECTIVE = re.compile(r"^#\s*\|.*\n?", re.M)
SOLUTION, FOLD = (
    re.compile(r"^#\s*\|\s*solution\b", re.M),
    re.compile(r"^#\s*\|\s*code-fold:\s*(.+)", re.M),
)
MARKS = re.compile(r"^\s*### (BEGIN|END) SOLUTION\n?", re.M)
BOX = re.compile(r"> \*\*Box: (.+?)\.?\*\*\s*")
SCOPED = re.compile(
    r"<style scoped>.*?</style>", re.S
)  # which browsers take for a style of the whole page
TASKS = "80_tasks"  # who wants to get something done begins there


# --- what there is


def notebooks():
    "Paths of the notebooks in the site's order: the page of tasks, then the book by name; without the index."
    return sorted(book.chapters(), key=lambda p: (p.stem != TASKS, p.stem))


load, cells = functools.cache(book.read), functools.cache(book.cells)


def module_of(path):
    "The module that a notebook exports, as in 'jobs.job', or None."
    return next(
        (
            m[1].removesuffix(".__init__")
            for source in cells(path, "code")
            if (m := DEFAULT.search(source))
        ),
        None,
    )


def file_of(module):
    "The file of a module or package."
    path = LIB.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def title_of(path):
    return cells(path, "markdown")[0].splitlines()[0].lstrip("# ")


@functools.cache
def modules():
    "`{module: the notebook that explains it}` in the book's order; a module that takes one cell of a chapter stands before the chapter's own."
    found = {}
    for p in notebooks():
        other = [
            m[1].removesuffix(".__init__")
            for source in cells(p, "code")
            for m in ELSEWHERE.finditer(source)
        ]
        for m in [*other, module_of(p)]:
            if m and file_of(m).exists():
                found.setdefault(m, p)
    for p in book.reference():
        found.setdefault(module_of(p), p)
    return found


def small():
    "Notebooks without a number: each makes a module."
    return book.reference()


@functools.cache
def definitions(path):
    "Names that the exported cells of a notebook define."
    return {
        name
        for source in cells(path, "code")
        if EXPORT.search(source)
        for name in defined(ast.parse(DIRECTIVE.sub("", source)).body)
    }


@functools.cache
def homes():
    "`{(module, name): the notebook that defines it}`: a cell may export into the module of another chapter."
    found = {}
    for p in [*notebooks(), *small()]:
        for source in cells(p, "code"):
            if not EXPORT.search(source):
                continue
            module = (
                m[1].removesuffix(".__init__") if (m := ELSEWHERE.search(source)) else module_of(p)
            )
            for name in defined(ast.parse(DIRECTIVE.sub("", source)).body):
                found.setdefault((module, name), p)
    return found


def repeats(module, name=""):
    "Whether a module is for others' names, to which nothing links; or whether its `name` is one that the package has elsewhere."
    if not module.startswith("compat."):
        return False
    return not name or any(name in public_names(m) for m in modules() if not repeats(m))


def explained(module, name):
    "The notebook that defines `name` of a module, or the one that explains the module."
    return homes().get((module, name), modules()[module])


@functools.cache
def parsed(module):
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def summary(module):
    return (ast.get_docstring(parsed(module)) or "").split("\n\n")[0].replace("\n", " ")


def all_names(module):
    "What `__all__` of a module says."
    return next(
        (
            ast.literal_eval(n.value)
            for n in parsed(module).body
            if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"
        ),
        [],
    )


def public_names(module):
    "What `__all__` of a module says, without what it took from another."
    taken = {
        a.asname or a.name
        for n in parsed(module).body
        if isinstance(n, ast.ImportFrom)
        for a in n.names
    }
    return [name for name in all_names(module) if name not in taken]


# --- which name means what


def split(full):
    "`(module, name in it)` of a full name such as 'batchlab.jobs.job.Job.run'; the module is '' if it is none of ours."
    module = max(
        (m for m in modules() if f"{full}.".startswith(f"batchlab.{m}.")), key=len, default=""
    )
    return module, full.removeprefix("batchlab.").removeprefix(module).lstrip(".")


def is_patch(node):
    return any(
        getattr(getattr(d, "func", d), "id", "") == "patch"
        for d in getattr(node, "decorator_list", [])
    )


def defined(body):
    "Names of the functions and classes of a body, without what `@patch` puts elsewhere."
    return [
        n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not is_patch(n)
    ]


def members(module):
    "`(class, member)` of all public methods and fields that stand in a module, those put in by `@patch` too."
    for node in parsed(module).body:
        if isinstance(node, ast.ClassDef):
            for x in node.body:
                name = getattr(x, "name", None) or getattr(getattr(x, "target", None), "id", None)
                if name:
                    yield node.name, name
        elif is_patch(node):
            yield getattr(node.args.args[0].annotation, "id", ""), node.name


WHOLE = "LLM", "Engine", "Scheduler"  # classes whose page shows what they inherit too


def inherited(name):
    "The public members of class `name` and of all classes of the package that it is put together from."
    for module in modules():
        for node in parsed(module).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield from (x for owner, x in members(module) if owner == name and x[0] != "_")
                for base in node.bases:
                    yield from inherited(getattr(base, "id", ""))


@functools.cache
def known():
    "`{name: [full names]}` of modules, their public names, and `Class.member`."
    own = [m for m in modules() if not repeats(m)]
    names = {f"batchlab.{m}": [f"batchlab.{m}"] for m in own}
    for m in own:
        for name in public_names(m):
            names.setdefault(name, []).append(f"batchlab.{m}.{name}")
    for m in own:
        for owner, name in members(m):
            home = names.get(owner, ())
            if name[0] != "_" and len(home) == 1:
                names[f"{owner}.{name}"] = [f"{home[0]}.{name}"]
    return names | {f"{c}.{x}": [f"{names[c][0]}.{x}"] for c in WHOLE for x in inherited(c)}


@functools.cache
def member_names():
    return {name for m in modules() for _, name in members(m)}


def meant(text, module=None):
    """The full name that `text`, code in the prose of `module`, means, or None.

    Its own module goes first, then the only one that has the name. A lowercase name that is a method or field somewhere
    as well may mean that one, so it stays as it is; so does a plain word before the chapter that makes it a name."""
    m = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", text, re.S)
    full, order = known().get(m[1], []) if m else [], [*modules()]
    home = lambda f: split(f)[0]
    if own := [f for f in full if home(f) == module]:
        return own[0]
    if m and not re.search(r"[A-Z.]", m[1]):
        if m[1] in member_names():
            return None
        if "_" not in m[1]:
            full = [f for f in full if module and order.index(home(f)) < order.index(module)]
    return full[0] if len(full) == 1 else None


# --- what is folded


def only_imports(code):
    "Whether code holds imports, and besides them at most what a module hands on by name (`_all_`, `__getattr__`) and its `log`."
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return False  # such as C++
    imports = lambda nodes: all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in nodes)
    named = lambda n: (
        isinstance(n, ast.Assign)
        and all(
            getattr(t, "id", "") in ("_all_", "__all__", "__getattr__", "log") for t in n.targets
        )
    )
    typing = lambda n: (
        isinstance(n, ast.If)
        and ast.unparse(n.test) == "TYPE_CHECKING"
        and imports(n.body)
        and not n.orelse
    )
    return bool(body) and all(imports([n]) or named(n) or typing(n) for n in body)


def fold(source):
    "What a code cell is folded under: an answer, a title of its own, or imports; '' if it stays open."
    if SOLUTION.search(source):
        return "A worked answer"
    if m := FOLD.search(source):
        return m[1].strip()
    return "Imports" if only_imports(DIRECTIVE.sub("", source)) else ""


# --- terms


@functools.cache
def terms():
    "`{anchor: definition}` of the glossary, as plain text."
    found = {}
    for cell in cells(book.find("82_glossary"), "markdown"):
        if m := re.match(r"### ([^\n]+)\n+([^\n]+)", cell):
            text = re.sub(
                r"\s*\[Chapter [^\]]*\]\([^)]*\)(, more in \[chapter [^\]]*\]\([^)]*\))?", "", m[2]
            )
            found[m[1].strip().replace(" ", "-")] = (
                re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").strip()
            )
    return found


# --- pages


def picture(svg):
    "What myst-nb needs to know of an SVG: its text alternative and whether it is too wide for a telephone."
    alt = re.search(r"<title[^>]*>(.*?)</title>", svg, re.S) or re.search(
        r'aria-label="([^"]*)"', svg
    )
    width = re.search(r'<svg[^>]*?\bwidth="([\d.]+)', svg) or re.search(
        r'viewBox="[\d.-]+ [\d.-]+ ([\d.]+)', svg
    )
    return dict(
        alt=html.unescape(alt[1]) if alt else "a picture, described in the text",
        classes="wide" if width and float(width[1]) > 480 else "small",
    )


def link_chapters(text, own):
    "Prose in which `chapter 10` is a link, unless it is one already, or stands in code or in a heading."
    stems = {p.stem.split("_")[0]: p.stem for p in notebooks() if p.stem != own}
    link = lambda m: f"[{m[0]}]({stems[m[1]]}.ipynb)" if m[1] in stems else m[0]
    parts = re.split(r"(```.*?```|`[^`]*`|\[[^\]]*\]\([^)]*\)|^#[^\n]*$)", text, flags=re.S | re.M)
    parts[::2] = [re.sub(r"\b[Cc]hapter (\d\d\d?)\b", link, p) for p in parts[::2]]
    return "".join(parts)


def to_pages(text):
    "Prose whose links to notebooks, in whatever folder, are links to their pages."
    return re.sub(r"\]\((?:\.\./)?(?:\w+/)?(\w+\.ipynb)(#[^)]*)?\)", r"](\1\2)", text)


def admonition(text):
    "A cell that is a box as MyST's admonition, other text as it is."
    m = BOX.match(text)
    if not m:
        return text
    body = re.sub("^> ?", "", "> " + text[m.end() :].removeprefix("> "), flags=re.M)
    return f"````{{admonition}} {m[1]}\n:class: box\n\n{body}\n````"


def unfolded(text):
    "Prose in which what `<details>` holds is read as Markdown: that wants an empty line around it."
    return (
        re.sub(r"\s*(</details>)", r"\n\n\1", re.sub(r"(</summary>)\s*", r"\1\n\n", text))
        if "<details" in text
        else text
    )


def chapter(path):
    "A notebook for the site: hidden cells and directives out, exported cells marked, answers and imports folded, links as they are here."
    nb, module, out = load(path), module_of(path), []
    for i, cell in enumerate(nb["cells"]):
        closed = cell["metadata"].get("jupyter", {}).get("source_hidden")
        source, cell = cell["source"], dict(cell, metadata={})
        if cell["cell_type"] == "code":
            if HIDDEN.search(source):
                continue
            code = MARKS.sub("", DIRECTIVE.sub("", source)).strip()
            if not code and not cell["outputs"]:
                continue
            if EXPORT.search(source):
                anchors = "".join(
                    f'<span id="def-{n}"></span>' for n in defined(ast.parse(code).body)
                )
                if anchors:
                    out.append(
                        dict(cell_type="markdown", metadata={}, source=anchors, id=f"anchor-{i}")
                    )
                cell["metadata"]["tags"] = ["export"]
            if title := fold(source) or "Code" * bool(closed):
                cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), "hide-input"]
                cell["metadata"]["mystnb"] = dict(code_prompt_show=title, code_prompt_hide=title)
            for o in cell["outputs"]:
                data = o.get("data", {})
                if svg := "".join(data.get("image/svg+xml", "")):
                    cell["metadata"].setdefault("mystnb", {})["image"] = picture(svg)
                if table := "".join(data.get("text/html", "")):
                    data["text/html"] = SCOPED.sub("", table)
            if code.startswith("%%cpp"):  # C++, shown as such
                cell = dict(cell_type="markdown", metadata=cell["metadata"], id=f"cpp-{i}")
                code = f"```cpp\n{code.partition(chr(10))[2]}\n```"
            cell["source"] = code
        else:
            source = re.sub(r"\]\((\.\./)+", "](", unfolded(to_pages(source)))
            cell["source"] = admonition(link_chapters(source, path.stem))
            if not out:
                cell["source"] = re.sub(r"^(?!# )\s*", "# ", cell["source"])
            if not out and module:
                cell["source"] += f"\n\n{{.module}}\nBuilds [`batchlab.{module}`](api/{module}.md)."
        out.append(cell)
    return dict(nb, cells=out)


def part_of(stem):
    "The Roman number of the part that a notebook is in: the tour is part 0, 01 to 06 are part I, 07 to 17 part II; then by its first digit."
    number = int(stem[:2])
    if number < 20:
        return "0" if number == 0 else "I" if number < 7 else "II"
    return ("III", "IV", "V", "VI", "VII", "VIII", "IX", "IX")[number // 10 - 2]


def toctree(caption, rows):
    return (
        f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
        + "".join(f"{t} <{d}>\n" for t, d in rows)
        + "```\n\n"
    )


def home():
    "The index, with the order of everything."
    nb = chapter(ROOT / "nbs/index.ipynb")
    parts = re.findall(
        r"^\*\*Part ([0IVX]+): ([^*]*)\*\*",
        "".join(cells(TOUR, "markdown")),
        re.M,
    )  # in its list of chapters
    book = toctree("To use it", [(title_of(p), p.stem) for p in notebooks() if p.stem == TASKS])
    book += "".join(
        toctree(
            f"Part {number}: {name}",
            [
                (f"{p.stem.split('_')[0]} {title_of(p).split(':')[0]}", p.stem)
                for p in notebooks()
                if part_of(p.stem) == number and p.stem != TASKS
            ],
        )
        for number, name in parts
    )
    api = [("All modules", "api/index")] + [(m, f"api/{m}") for m in modules()]
    rest = [(title_of(p), p.stem) for p in small()]
    working = [("Contributing", "CONTRIBUTING")]
    order = (
        book
        + toctree("API", api)
        + toctree("Small modules", rest)
        + toctree("Working on it", working)
    )
    return dict(
        nb, cells=nb["cells"] + [dict(cell_type="markdown", metadata={}, id="order", source=order)]
    )


def constants(module):
    "`{name: value}` of the public names that are neither functions nor classes; a long value is an ellipsis."
    body, values = parsed(module).body, {}
    for n in body:
        if isinstance(n, ast.Assign):
            values |= {getattr(t, "id", ""): ast.unparse(n.value) for t in n.targets}
    rest = [n for n in public_names(module) if n not in defined(body)]
    return {n: v if len(v := values.get(n, "…")) <= 200 else "…" for n in rest}


def api_page(module, path):
    rest = "".join(
        f"\n.. py:data:: {name}\n   :value: {value}\n" for name, value in constants(module).items()
    )
    own = public_names(module)
    others = ", ".join(
        n for n in all_names(module) if n not in own or repeats(module, n) or n in WHOLE
    )  # they stand on another page, or below
    rest += "".join(
        f"\n.. autoclass:: {name}\n   :inherited-members:\n"
        for name in WHOLE
        if name in own and not repeats(module, name)
    )
    return (
        f"# {module}\n\n{{.module}}\nBuilt in [{path.stem}](../{path.name}).\n\n"
        f"```{{eval-rst}}\n.. automodule:: batchlab.{module}\n"
        f"{f'   :exclude-members: {others}' if others else ''}\n\n"
        f".. py:currentmodule:: batchlab.{module}\n{rest}```\n"
    )


def api_index():
    import batchlab

    rows = "".join(f"| [`batchlab.{m}`]({m}.md) | {summary(m)} |\n" for m in modules())
    return (
        f"# All modules\n\n`from batchlab import …` knows {', '.join(f'`{n}`' for n in batchlab.__all__)}.\n\n"
        f"| module | what you can do with it |\n|---|---|\n{rows}"
    )


ABOUT = re.compile(r"(?:^|(?<=[.;!?)] )|(?<=\n))((?:`\*{0,2}\w+`(?:, | and )?)+): ", re.M)
AFTER = re.compile(r"(?<=[.;]) (?=(?:Raises|Returns|Yields|Gives)\b)")


def told(doc, names):
    """`(doc without what it tells of parameters, {parameter: what it tells})` of a docstring.

    "`a`, `b`: sizes in bytes. `c`: a name." tells of `a`, `b` and `c`, if all of those are in `names`."""
    kept, found = [], {}
    for paragraph in doc.split("\n\n"):
        pieces = ABOUT.split(" ".join(paragraph.split()) if ABOUT.search(paragraph) else paragraph)
        rest = pieces[0]
        for head, text in zip(pieces[1::2], pieces[2::2]):
            asked = re.findall(r"\w+", head)
            text, *after = AFTER.split(text, maxsplit=1)
            if {*asked} <= {*names}:
                found |= dict.fromkeys(asked, text.strip().removesuffix(";"))
            else:
                rest += f"{head}: {text}"
            rest += " ".join(after) + " " * bool(after)
        kept.append(rest.strip())
    return "\n\n".join(filter(None, kept)), found


def write(folder):
    "All sources of the site into `folder`."
    pages = {p.name: json.dumps(chapter(p), ensure_ascii=False) for p in [*notebooks(), *small()]}
    pages |= {"index.ipynb": json.dumps(home(), ensure_ascii=False), "api/index.md": api_index()}
    pages |= {f"api/{m}.md": api_page(m, p) for m, p in modules().items()}
    pages |= {
        name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "LICENSE")
    }
    (folder / "api").mkdir(parents=True)
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "nbs/images", folder / "images")
