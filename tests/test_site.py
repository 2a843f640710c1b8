"The book as a whole: links between notebooks, and the site that `.ci/site/build` makes of them."

import importlib.util, json, re, sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from helpers import ROOT, run

sys.path.insert(0, str(ROOT / ".ci/site"))
import sources

BOOK = sources.notebooks()
ALL = [ROOT / "nbs/index.ipynb", *BOOK]
missing = [
    m for m in ("sphinx", "myst_nb", "furo", "ipywidgets") if importlib.util.find_spec(m) is None
]
needs_docs = pytest.mark.skipif(
    bool(missing), reason="the site needs its packages: pip install -c constraints.txt '.[docs]'"
)


def prose(path):
    return "\n\n".join(sources.cells(path, "markdown"))


# --- without the site's packages


@pytest.mark.parametrize(
    "path", [*ALL, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.stem
)
def test_links_between_files(path):
    text = prose(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    links = re.findall(
        r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S)
    )
    dead = [l for l in links if not re.match(r"\w+:", l) and not (path.parent / l).exists()]
    assert not dead


def test_every_module_has_a_page():
    exported = {p for p in sources.LIB.rglob("*.py") if p.read_bytes() and p.stem != "_modidx"}
    exported -= {sources.LIB / "__init__.py"}
    assert exported == {sources.file_of(m) for m in sources.modules()}


@pytest.mark.parametrize(
    "text, module, full",
    [
        ("KVCache", "basics.prefill", "batchlab.core.cache.KVCache"),
        ('load_model(dtype="fp32")', None, "batchlab.models.load_model"),
        ("Scheduler.schedule", "core.engine", "batchlab.core.scheduler.Scheduler.schedule"),
        ("LLM.verify", None, "batchlab.api.LLM.verify"),
        ("batchlab.core.engine", None, "batchlab.core.engine"),
        ("pad", "core.engine", "batchlab.basics.padding.pad"),
        ("pad", "basics.prefill", None),  # before its chapter it may be any word
        ("generate", "core.engine", None),  # LLM's, the command line's, or transformers' own
        ("finish_reason", "core.engine", None),  # a field there, a function of chapter 07
        ("create_batch", "core.engine", "batchlab.serve.batches.create_batch"),
        ("num_tokens - 1", "core.scheduler", None),
    ],
)
def test_names_mean(text, module, full):
    assert sources.meant(text, module) == full


def test_chapters_are_linked():
    text = "As chapter 03 says; `chapter 03`, [chapter 03](03_padding.ipynb), chapter 99 and Chapter 20.\n# chapter 03"
    assert sources.link_chapters(text, "07_sampling").count("](03_padding.ipynb)") == 2
    assert "[Chapter 20](20_product.ipynb)" in sources.link_chapters(text, "07_sampling")
    assert sources.link_chapters(text, "03_padding").count("](03_padding.ipynb)") == 1


def test_every_chapter_is_in_a_part_of_the_tours_list():
    named = re.findall(r"^\*\*Part ([0IVX]+):", prose(sources.TOUR), re.M)
    assert {sources.part_of(p.stem) for p in BOOK} == {*named}


def test_boxes_answers_and_links_for_the_site():
    box = sources.admonition("> **Box: Rows or blocks.** vLLM has\n> blocks.\n>\n> - one")
    assert box == "````{admonition} Rows or blocks\n:class: box\n\nvLLM has\nblocks.\n\n- one\n````"
    assert sources.admonition("> A quotation.") == "> A quotation."
    assert (
        sources.unfolded("<details><summary>Why</summary>\nSince.\n</details>")
        == "<details><summary>Why</summary>\n\nSince.\n\n</details>"
    )
    assert sources.to_pages("[x](../2_core/errors.ipynb#a)") == "[x](errors.ipynb#a)"
    assert "reads" in sources.terms()["block-table"] or "slot" in sources.terms()["block-table"]
    assert not [t for t in sources.terms().values() if "](" in t or "`" in t]


def test_what_a_docstring_tells_of_parameters():
    doc = "Run it: `x` times.\n\n`a`, `b`: sizes in bytes,\nof both. `c`: a name. Raises `E`.\n\n`y`: of no parameter."
    prose, told = sources.told(doc, ["a", "b", "c", "x"])
    assert told == dict(a="sizes in bytes, of both.", b="sizes in bytes, of both.", c="a name.")
    assert prose == "Run it: `x` times.\n\nRaises `E`.\n\n`y`: of no parameter."


def test_what_is_folded():
    imports = "#| export\nfrom __future__ import annotations\nimport os\n\nif TYPE_CHECKING: from x import Y\n\n_all_ = ['a']\n__getattr__ = renamed(__name__, {})"
    assert sources.fold(imports) == "Imports"
    assert sources.fold("import os") == "Imports"
    assert sources.fold(imports + "\n\ndef f(): pass") == sources.fold(imports + "\nX = 1") == ""
    assert sources.fold("#| export\n%%cpp\nint x;") == sources.fold("#| export") == ""
    assert (
        sources.fold("#| code-fold: How it is drawn\nx = 1") == "How it is drawn"
        and sources.fold("#| solution\nx = 1") == "A worked answer"
    )
    folded = [
        c
        for c in sources.chapter(sources.book.find("09_models"))["cells"]
        if c["metadata"].get("mystnb", {}).get("code_prompt_show") == "Imports"
    ]
    assert folded and all("hide-input" in c["metadata"]["tags"] for c in folded)
    assert "import torch" in folded[0]["source"]


# --- the site itself


class Page(HTMLParser):
    "What a page has and what it asks for."

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.fetched, self.scripts = set(), [], [], []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if "id" in a:
            self.ids.add(a["id"])
        if tag == "a" and "name" in a:
            self.ids.add(a["name"])
        if tag == "a" and a.get("href"):
            self.links.append(a["href"])
        elsewhere = a.get("rel") in ("canonical", "index", "search", "next", "prev")
        if tag == "link" and not elsewhere:
            self.fetched.append(a["href"])
        if tag in ("script", "img", "iframe", "source", "video", "embed") and "src" in a:
            self.fetched.append(a["src"])
        if tag == "object" and a.get("data"):
            self.fetched.append(a["data"])

    def handle_data(self, data):
        if self.get_starttag_text() and self.get_starttag_text().startswith("<script"):
            self.scripts.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "site"
    done = run(sys.executable, str(ROOT / ".ci/site/build"), str(out), timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site):
    return {p.relative_to(site).as_posix(): Page(p) for p in site.rglob("*.html")}


def dead_links(site, pages):
    "`(page, link)` of all links to files or anchors that are not there."
    dead = []
    for name, page in pages.items():
        for link in page.links + page.fetched:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (site / name).parent / unquote(url.path) if url.path else site / name
            if not target.is_file():
                dead.append((name, link))
            elif url.fragment and target.suffix == ".html" and name != "search.html":
                there = pages[target.resolve().relative_to(site.resolve()).as_posix()]
                if unquote(url.fragment) not in there.ids:
                    dead.append((name, link))
    return dead


def from_network(site, pages):
    "`(file, what)` of all that a reader's browser would fetch from elsewhere."
    found = [
        (name, x) for name, p in pages.items() for x in p.fetched if re.match(r"(https?:)?//", x)
    ]
    found += [(name, s) for name, p in pages.items() for s in p.scripts if "//" in s]
    elsewhere = re.compile(r'(?:@import|url\()\s*["\']?(?:https?:)?//[^)]*')
    return found + [
        (p.name, x)
        for p in site.rglob("*.css")
        for x in elsewhere.findall(p.read_text(encoding="utf-8"))
    ]


def test_the_checks_can_fail(tmp_path):
    links = "".join(f'<a href="{x}">x</a>' for x in ("b.html#there", "c.html", "#here", "#no"))
    scripts = (
        '<script src="https://cdn.example/x.js"></script><script>import("//cdn.example/y")</script>'
    )
    (tmp_path / "a.html").write_text(f'<p id="here">x</p>{links}{scripts}')
    (tmp_path / "b.html").write_text(
        '<h1 id="there">b</h1><img src="gone.png"><a href="https://example.org/gone">5</a>'
    )
    (tmp_path / "c.css").write_text(
        '@import url("https://fonts.example/css"); p { background: url(data:image/png,//) }'
    )
    pages = {p.name: Page(p) for p in tmp_path.glob("*.html")}
    assert sorted(dead_links(tmp_path, pages)) == [
        ("a.html", "#no"),
        ("a.html", "c.html"),
        ("b.html", "gone.png"),
    ]
    assert [name for name, _ in from_network(tmp_path, pages)] == ["a.html", "a.html", "c.css"]


@needs_docs
def test_no_dead_link(site, pages):
    assert not dead_links(site, pages)
    assert sum(len(p.links) for p in pages.values()) > 1000


@needs_docs
def test_nothing_from_the_network(site, pages):
    assert not from_network(site, pages)


@needs_docs
@pytest.mark.parametrize("path", BOOK, ids=lambda p: p.stem)
def test_chapter_page(path, pages):
    page, chapter = pages[f"{path.stem}.html"], sources.chapter(path)
    shown = sum(1 for c in chapter["cells"] if c["cell_type"] == "code" and c["outputs"])
    assert page.text.count('class="cell_output') == shown, "an output is missing"
    images = sum(
        "image/svg+xml" in o.get("data", {}) for c in chapter["cells"] for o in c.get("outputs", [])
    )
    said = page.text.replace(
        '<span class="pre">#|</span>', ""
    )  # prose may name a directive, code shows none
    assert page.text.count("<img ") >= images and "#|" not in said
    order = ["index", *(p.stem for p in BOOK)]
    before, after = (
        order[order.index(path.stem) - 1],
        [*order, "api/index"][order.index(path.stem) + 1],
    )
    assert 'rel="prev" title="' in page.text and re.search(
        rf'class="prev-page" href="{before}.html"', page.text
    )
    assert re.search(rf'class="next-page" href="{after}.html"', page.text)
    marked = r'<li class="toctree-l1 current current-page"><a class="current[^"]*" href="#">'
    assert len(re.findall(marked, page.text)) == 1
    if module := sources.module_of(path):
        assert f"api/{module}.html" in page.text


@needs_docs
@pytest.mark.parametrize("module", sources.modules())
def test_api_page(module, site, pages):
    page, index = pages[f"api/{module}.html"], (site / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(index[index.index("{") : index.rindex("}") + 1])["objects"]
    names = {
        x[-1]
        for prefix, objects in found.items()
        if prefix == f"batchlab.{module}"
        for x in objects
    }
    public = {n for n in sources.public_names(module) if not sources.repeats(module, n)}
    for name in public:
        assert f"batchlab.{module}.{name}" in page.ids, name
        assert name in names, name
    assert public or not sources.public_names(module)
    called = any((owner or name) in public for owner, name in sources.members(module))
    assert "sig-paren" in page.text or not called


@needs_docs
def test_prose_links_to_code(pages):
    assert "api/core.cache.html#batchlab.core.cache.KVCache" in pages["12_attention.html"].links
    assert "api/api.html#batchlab.api.LLM" in pages["000_tour.html"].links
    assert "../11_scheduler.html#def-Scheduler" in pages["api/core.scheduler.html"].links
    methods = {*pages["api/core.engine.html"].ids, *pages["api/api.html"].ids}
    # its prose names that chapter
    assert "03_padding.html" in pages["11_scheduler.html"].links[40:]
    assert "<math" in pages["76_policies.html"].text and "$a$" not in pages["76_policies.html"].text
    assert {
        "batchlab.api.LLM.generate",
        "batchlab.api.LLM.logprobs",
        "batchlab.core.engine.Engine.recover",
    } <= methods


@needs_docs
@pytest.mark.parametrize("path", BOOK, ids=lambda p: p.stem)
def test_boxes_and_answers_are_shown_as_such(path, pages):
    text, cells = pages[f"{path.stem}.html"].text, sources.load(path)["cells"]
    boxes = [
        c for c in cells if c["cell_type"] == "markdown" and sources.BOX.match("".join(c["source"]))
    ]
    answers = [
        c
        for c in cells
        if c["cell_type"] == "code" and sources.SOLUTION.search("".join(c["source"]))
    ]
    assert len(re.findall(r'class="box admonition|class="admonition[^"]*\bbox\b', text)) == len(
        boxes
    )
    assert text.count("A worked answer") >= len(answers) and "BEGIN SOLUTION" not in text


@needs_docs
def test_a_link_to_a_term_says_what_it_means(pages):
    links = re.findall(
        r'<a [^>]*href="82_glossary\.html#[^>]*>',
        pages["10_slots.html"].text + pages["12_attention.html"].text,
    )
    assert links and all('title="' in a for a in links)


@needs_docs
@pytest.mark.parametrize("width", [390, 1400])
def test_no_page_scrolls_sideways(site, browser, width):
    page = browser.new_page(viewport=dict(width=width, height=900))
    wide = []
    for name in ("index", *(p.stem for p in BOOK)):
        page.goto((site / f"{name}.html").as_uri())
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(name)
    page.close()
    assert not wide


@needs_docs
def test_search_finds_a_chapter(site, browser):
    page = browser.new_page()
    page.goto((site / "search.html").as_uri() + "?q=preemption")
    page.wait_for_selector("ul.search li a", timeout=15_000)
    assert page.locator('ul.search li a[href*="11_scheduler"]').count()
    page.close()


@needs_docs
def test_an_answer_unfolds(site, browser):
    page = browser.new_page(color_scheme="dark")
    page.goto((site / "01_prefill.html").as_uri())
    fold = page.locator('details:has(summary:has-text("A worked answer"))').first
    code = fold.locator("pre").first
    assert not code.is_visible()
    fold.locator("summary").click()
    assert code.is_visible()
    page.close()
