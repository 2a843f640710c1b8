"Sphinx's settings. Nothing is fetched from the network, neither when the site is built nor when it is read."

import functools, importlib, inspect, re, sys, warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import sources
from docutils import nodes
from docutils.utils.math import latex2mathml
from fastcore.docments import docments
from sphinx import addnodes
from sphinx.environment.adapters.toctree import global_toctree_for_doc
from sphinx.util.osutil import relative_uri

project, copyright = "batchlab", "the batchlab authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "index"
exclude_patterns = ["LICENSE"]

nb_execution_mode = "off"  # outputs are those in the notebooks
nb_merge_streams = True
nb_render_markdown_format = "myst"  # so that tables in outputs are tables
nb_ipywidgets_js = {}  # widgets' scripts would come from the network: their pictures stand in
myst_enable_extensions = ["attrs_block", "dollarmath"]
html_math_renderer = "mathml"  # which browsers draw by themselves
myst_heading_anchors = 4
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header"]

autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

viewcode_follow_imported_members = False

# autodoc loads what it meets first twice, then as type checkers see it: models of pydantic can't be made so
for name in ("pydantic", "fastapi", "prometheus_client"):
    importlib.import_module(name)

html_theme = "furo"
html_title = "batchlab"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": [], "navigation_with_keys": True}
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "github-dark"


def as_rst(text):
    "A docstring, prose with names in single backticks, as reStructuredText."
    parts = re.split(r"`([^`]+)`", text)
    parts[::2] = [re.sub(r"([\\*|`]|(?<=\w)_(?!\w))", r"\\\1", p) for p in parts[::2]]
    parts[1::2] = [f"``{p}``" for p in parts[1::2]]
    parts[1::2] = [
        p + "\\ " if after[:1].isalnum() else p for p, after in zip(parts[1::2], parts[2::2])
    ]
    return "".join(parts)


ELSEWHERE = re.compile(r"(?:arguments|the rest) see\s+`([\w.]+)`")


def parameters(obj):
    "The parameters of what can be called: `[(name, type, default)]` as text."
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return []
    of = lambda x: "" if x is inspect.Parameter.empty else x
    kind = lambda x: x if isinstance(x, str) else inspect.formatannotation(x)
    return [
        (p.name, kind(of(p.annotation)).replace("typing.", ""), of(p.default))
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]


def doc_of(full):
    "The docstring of what has a full name, '' if that is None."
    if not full:
        return ""
    module, member = sources.split(full)
    module = importlib.import_module(f"batchlab.{module}")
    return inspect.getdoc(functools.reduce(getattr, member.split("."), module)) or ""


def table(rows):
    "A list-table of parameters: name, type, default, meaning."
    cell = lambda x: f"``{x}``" if x else ""
    lines = [".. list-table::", "   :class: parameters", "   :header-rows: 1", ""]
    lines += ["   * - parameter", "     - type", "     - default", "     - meaning"]
    for name, kind, default, meaning in rows:
        shown = "" if isinstance(default, str) and not default else repr(default)
        shown = shown if len(shown) <= 40 and " at 0x" not in shown else "…"
        cells = cell(name), cell(kind), cell(shown), as_rst(meaning)
        lines += [f"   {'*' if i == 0 else ' '} - {c}".rstrip() for i, c in enumerate(cells)]
    return lines


def docstring(app, what, name, obj, options, lines):
    "Docstrings as reStructuredText, and where each definition stands in the book."
    module, member = sources.split(name)
    doc = "\n".join(lines).strip()
    given = parameters(obj) if what in ("class", "function", "method") and module else []
    names = [g[0] for g in given]
    prose, told = sources.told(doc, names)
    if given:  # what its docstring leaves out, comments beside the parameters say
        told = {k: v for k, v in docments(obj).items() if k in names and v} | told
    if given and (other := ELSEWHERE.search(doc)):
        told = sources.told(doc_of(sources.meant(other[1], module)), names)[1] | told
    if told:
        lines[:] = as_rst(prose).splitlines()
        lines += ["", *table([(*g, told.get(g[0], "")) for g in given]), ""]
    else:
        lines[:] = as_rst(doc).splitlines()
    if what in ("class", "function", "exception") and module and member:
        stem, escaped = (
            sources.explained(module, member.partition(".")[0]).stem,
            re.sub("_$", r"\\_", member),
        )
        bases = [b.__name__ for b in getattr(obj, "__bases__", ()) if b is not object]
        bases = f"Extends {', '.join(f'``{b}``' for b in bases)}. " if bases else ""
        where = "In chapter" if stem[:2].isdigit() else "On page"
        lines += ["", f"{bases}`{where} {stem} <../{stem}.html#def-{escaped}>`__", ""]


def skip(app, what, name, obj, skips, options):
    "Constants stand on their page already, with their values."
    module = app.env.docname.removeprefix("api/")
    return (
        True
        if what == "module" and module in sources.modules() and name in sources.constants(module)
        else None
    )


def link_names(app, doctree):
    "Code in prose that names something public becomes a link to its API."
    at = Path(app.env.docname)
    built = {p.stem: m for m, p in sources.modules().items()}
    module = (
        built.get(at.name)
        if at.parent.name != "api"
        else at.name
        if at.name in sources.modules()
        else None
    )
    taken = nodes.title, nodes.reference, addnodes.pending_xref
    for node in list(doctree.findall(nodes.literal)):
        above = node.parent
        while above is not None and not isinstance(above, taken):
            above = above.parent
        if above is None and (full := sources.meant(node.astext(), module)):
            how = dict(
                refdomain="py",
                reftype="obj",
                refexplicit=True,
                refwarn=True,
                refdoc=app.env.docname,
            )
            node.replace_self(addnodes.pending_xref("", node.deepcopy(), reftarget=full, **how))


def explain_terms(app, doctree, docname):
    "A link to the glossary says what the term means, to whoever points at it."
    known = {anchor.replace("_", "-"): text for anchor, text in sources.terms().items()}
    for node in doctree.findall(nodes.reference):
        page, _, anchor = node.get("refuri", "").partition("#")
        if page.endswith("82_glossary.html") and anchor.replace("_", "-") in known:
            node["reftitle"] = known[anchor.replace("_", "-")]


ENTRY = re.compile(r'<li class="toctree-l1"><a class="reference internal" href="([^"#:]+)">')
MARKED = '<li class="toctree-l1 current"><a class="current reference internal" href="#">'


def tree_for(tree, uri):
    "The list of all pages, flat and with links from the top, as the page at `uri` has it: its own links, and its entry marked."
    link = lambda m: (
        MARKED if m[1] == uri else m[0].replace(f'"{m[1]}"', f'"{relative_uri(uri, m[1])}"')
    )
    lists = re.split(r"(?<=</ul>)", ENTRY.sub(link, tree))
    return "".join(x.replace("<ul>", '<ul class="current">') if MARKED in x else x for x in lists)


trees: dict = {}  # by what the theme asks for


def one_tree(app, pagename, templatename, context, doctree):
    "Beside each page stands the same list of all pages: Sphinx makes it once, not for each of 400 again."
    own, builder = context.get("toctree"), app.builder

    def toctree(**how):
        if (key := tuple(sorted(how.items()))) not in trees:
            whole = global_toctree_for_doc(app.env, "search", builder, tags=app.tags, **how)
            trees[key] = builder.render_partial(whole)["fragment"]
        tree = trees[key]
        return (
            own(**how) if "toctree-l2" in tree else tree_for(tree, builder.get_target_uri(pagename))
        )

    if own:
        context["toctree"] = toctree


def draw_math(page, node):
    text = node.astext().replace(r"\dots", r"\ldots")
    page.body.append(latex2mathml.tex2mathml(text, as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def setup(app):
    warnings.filterwarnings("ignore")  # what imported libraries say is not about the site
    app.add_html_math_renderer(
        "mathml", inline_renderers=(draw_math, None), block_renderers=(draw_math, None)
    )
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-skip-member", skip)
    app.connect("doctree-read", link_names)
    app.connect("doctree-resolved", explain_terms)
    app.connect("html-page-context", one_tree, priority=100)  # before the theme asks for it
    return dict(parallel_read_safe=True)
