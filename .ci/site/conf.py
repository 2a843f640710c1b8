"Sphinx's settings for the notebooks as they are: sphinx-build -qW --keep-going -c .ci/site nbs _docs"

import html, re, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import book
from docutils import nodes
from docutils.utils.math import latex2mathml

project, copyright = "batchlab", "the batchlab authors"
extensions = ["myst_nb"]
root_doc = "index"
nb_execution_mode = "off"  # outputs are those in the notebooks
nb_merge_streams = True
nb_render_markdown_format = "myst"  # so that tables in outputs are tables
nb_ipywidgets_js: dict = {}  # widgets' scripts would come from the network: their pictures stand in
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"  # which browsers draw by themselves
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header"]

html_theme, html_title = "furo", "batchlab"
html_static_path, html_css_files = ["static"], ["site.css"]
html_copy_source = html_show_sphinx = html_use_index = False

DIRECTIVE = re.compile(r"^#\s*\|.*\n?", re.M)
TITLE = re.compile(r"^#\s*\|\s*(?:code-fold: *(.+)|(solution)\b)", re.M)
OUT = re.compile(r"#\s*\|\s*(hide|default_exp)\b")
OTHER = re.compile(r"%%(cpp \w+|page (\w+))\n")


def order():
    "The order of all pages, which stands at the end of the first."
    for caption, paths in (book.parts() | {"Modules": book.reference()}).items():
        rows = [p.relative_to(book.NBS).with_suffix("").as_posix() for p in paths]
        yield from ["```{toctree}", ":hidden:", f":caption: {caption}", "", *rows, "```", ""]


def adapt(cell):
    "A cell with what myst-nb is to know of it: marks for its directives, its language, and the titles of its pictures."
    source, tags, said = cell["source"], [], {}
    if cell["cell_type"] == "markdown":
        return cell | dict(source=re.sub(r"\]\((?=[./]+CONTRIBUTING)", "](path:", source))
    if found := OTHER.match(source):
        language = found[2] or "cpp"
        code = f"```{language}\n{source[found.end() :]}\n```"
        return dict(cell_type="markdown", id=cell["id"], metadata={}, source=code)
    if OUT.match(source):
        tags.append("remove-cell")
    if re.match(r"#\s*\|\s*export", source):
        tags.append("export")
    title = TITLE.search(source)
    if title or cell["metadata"].get("jupyter", {}).get("source_hidden"):
        tags.append("hide-input")
        said["code_prompt_show"] = (title[1] or "A worked answer") if title else "Code"
    for out in cell["outputs"]:
        svg = "".join(out.get("data", {}).get("image/svg+xml", ""))
        if title := re.search(r"<title[^>]*>(.*?)</title>", svg, re.S):
            said["image"] = dict(alt=html.unescape(title[1]))
    return cell | dict(source=DIRECTIVE.sub("", source), metadata=dict(tags=tags, mystnb=said))


def read(app, docname, source):
    nb = book.read(Path(app.env.doc2path(docname)))
    cells = [*map(adapt, nb["cells"])]
    if docname == root_doc:
        cells.append(dict(cell_type="markdown", id="order", metadata={}, source="\n".join(order())))
    source[0] = book.text(nb | dict(cells=cells))


def draw_math(page, node):
    block = isinstance(node, nodes.math_block)
    page.body.append(latex2mathml.tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def setup(app):
    app.connect("source-read", read)
    app.add_html_math_renderer("mathml", (draw_math, None), (draw_math, None))
