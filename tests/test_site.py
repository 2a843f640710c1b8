"The book as a whole: links between notebooks, and the site that Sphinx makes of them."

import importlib.util, re, sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from helpers import BOOK, ROOT, run

NBS, PAGES = ROOT / "nbs", BOOK["notebooks"]()
missing = [m for m in ("sphinx", "myst_nb", "furo") if importlib.util.find_spec(m) is None]
needs_docs = pytest.mark.skipif(
    bool(missing), reason="the site needs its packages: pip install -c constraints.txt '.[docs]'"
)


def prose(path):
    return "\n\n".join(BOOK["cells"](path, "markdown"))


# --- without the site's packages


@pytest.mark.parametrize(
    "path", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.stem
)
def test_links_between_files(path):
    text = prose(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    links = re.findall(
        r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S)
    )
    dead = [l for l in links if not re.match(r"\w+:", l) and not (path.parent / l).exists()]
    assert not dead


def test_every_module_is_made_by_a_notebook():
    lib = ROOT / "batchlab"
    exported = {p for p in lib.rglob("*.py") if p.read_bytes() and p.stem != "_modidx"}
    named = re.compile(r"^#\s*\|\s*(?:default_exp|export[is]?)[ \t]+([\w.]+)", re.M)
    code = "\n".join(c for p in PAGES for c in BOOK["cells"](p, "code"))
    made = {lib / f"{m.replace('.', '/')}.py" for m in named.findall(code)}
    assert exported - {lib / "__init__.py"} == made


def test_every_chapter_is_in_one_part_of_the_list():
    listed = [p for part in BOOK["parts"]().values() for p in part]
    assert sorted(listed) == sorted(BOOK["chapters"]())


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
    made = "-m sphinx -qW --keep-going -c .ci/site nbs".split()
    done = run(sys.executable, *made, str(out), cwd=ROOT, timeout=900)
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
@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_page_of_a_notebook(path, pages):
    page = pages[path.relative_to(NBS).with_suffix(".html").as_posix()]
    hide = re.compile(r"#\s*\|\s*(hide|default_exp)|%%(cpp|page)")
    code = [c for c in BOOK["read"](path)["cells"] if c["cell_type"] == "code"]
    cells = [c for c in code if not hide.match(c["source"])]
    pictures = [o for c in cells for o in c["outputs"] if "image/svg+xml" in o.get("data", {})]
    assert page.text.count('class="cell_output') == sum(bool(c["outputs"]) for c in cells)
    assert page.text.count("<img ") >= len(pictures)
    assert "#|" not in page.text.replace('<span class="pre">#|</span>', "")  # prose may name one
    assert len(re.findall('<li class="toctree-l1 current', page.text)) == (path.stem != "index")
    answers = [c for c in cells if re.match(r"#\|\s*solution", c["source"])]
    assert page.text.count("A worked answer") >= len(answers)


@needs_docs
def test_pages_link_to_terms_chapters_and_files(pages):
    links = pages["2_core/10_attention.html"].links
    assert any(x.startswith("../reference/82_glossary.html#") for x in links)
    assert "../1_basics/01_prefill.html" in links
    policies = pages["2_core/76_policies.html"].text
    assert "<math" in policies and "$a$" not in policies
    assert any(x.endswith("CONTRIBUTING.md") for x in pages["index.html"].links)


@needs_docs
@pytest.mark.parametrize("width", [390, 1400])
def test_no_page_scrolls_sideways(site, browser, width):
    page = browser.new_page(viewport=dict(width=width, height=900))
    wide = []
    for path in PAGES:
        name = path.relative_to(NBS).with_suffix(".html")
        page.goto((site / name).as_uri())
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(name)
    page.close()
    assert not wide


@needs_docs
def test_search_finds_a_chapter(site, browser):
    page = browser.new_page()
    page.goto((site / "search.html").as_uri() + "?q=preemption")
    page.wait_for_selector('ul.search li a[href*="09_scheduler"]', timeout=15_000)
    page.close()


@needs_docs
def test_an_answer_unfolds(site, browser):
    page = browser.new_page(color_scheme="dark")
    page.goto((site / "1_basics/01_prefill.html").as_uri())
    fold = page.locator('details:has(summary:has-text("A worked answer"))').first
    code = fold.locator("pre").first
    assert not code.is_visible()
    fold.locator("summary").click()
    assert code.is_visible()
    page.close()
