"README and the prose of the book say what there is: each command's own flags, the routes, the endings of files; and links lead somewhere. (`test_pages` looks up names and arguments, `test_site` files.)"

import re

import pytest

from helpers import BOOK, ROOT, needs

PAGES = {p.stem: "\n\n".join(BOOK["cells"](p, "markdown")) for p in BOOK["notebooks"]()}
PAGES["README"] = (ROOT / "README.md").read_text(encoding="utf-8")


def plain(text):
    "Prose without code, and without what other programs call a thing."
    return re.sub(r"^\*Elsewhere:.*$", "", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)


def sentences(text):
    return [" ".join(s.split()) for s in re.split(r"(?<=[.!?;])\s+|\n\n|\n(?=[|*-])", plain(text))]


def flags(name, text):
    "Flags that a line or a span gives to a command which has them not, and commands that are not there."
    from pages import actions, commands

    from batchlab.cli.flags import COMMANDS

    lines = [*commands(text), *re.findall(r"`(batchlab [a-z][^`\n]*)`", plain(text))]
    of = re.findall(r"`(--[a-z][^`\s]*)[^`]*` of `batchlab ([a-z]+)", plain(text))
    for line in [*lines, *(f"batchlab {command} {flag}" for flag, command in of)]:
        command = line.split()[1]
        there = (
            {f for a in actions(command) for f in a.option_strings} if command in COMMANDS else ()
        )
        line = re.split(r" -- | [|&;]", re.sub(r"'[^']*'|\"[^\"]*\"", "", line))[0]
        given = {*re.findall(r"(?<![\w-])--[a-z][\w-]*", line)} - {"--help"}
        yield from (f"{command} {f}" for f in given.difference(there))
        if not there and line != "batchlab COMMAND":
            yield f"no command {command}"


ROUTE = r"`(?:(GET|POST|DELETE) )?(/(?:v\d/|health|metrics|version|(?:de)?token|pooling|r?e?score|rerank|classify)[^\s`?]*)`"
DENIED = r"\bnot the `/|\bno route\b|\b(not|n't|nor|without)\b[^.`]*\b(served|there|have|serve|API)\b|` (is|are) (not|un)"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    "The method and the path of all that the server answers, ID for what varies."
    needs("fastapi")
    from batchlab import AsyncLLM
    from batchlab.models import tiny_model, tiny_tokenizer
    from batchlab.serve.app import create_app
    from batchlab.serve.batches import BatchRunner, BatchStore
    from batchlab.serve.page import page_router
    from batchlab.serve.responses import response_router
    from batchlab.serve.routes import batch_router

    llm = AsyncLLM(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer())
    store = BatchStore(tmp_path_factory.mktemp("data"))
    runner = BatchRunner(store, llm.llm)
    api = create_app(llm, "tiny", batches=runner).state.api
    found = [(method, path) for method, path, *_ in api.routes()]
    for router in batch_router(store, runner), response_router(api.responses), page_router():
        found += [(method, r.path) for r in router.routes for method in r.methods]
    store.close()
    return {(method, re.sub(r"\{.*?\}", "ID", path)) for method, path in found}


def routes(text, served):
    "Routes that a sentence names and the server has not, or that it denies and the server has."
    for s in sentences(text):
        for method, path in re.findall(ROUTE, s):
            path = re.sub(r"\{.*?\}", "ID", path)
            there = any(p == path and method in ("", m) for m, p in served)
            if "404" not in s and there == bool(re.search(DENIED, s)):
                yield f"{method} {path}: {s}"


OF_NO_JOB = {".cache", ".gone", ".gguf", ".html", ".ipynb", ".part", ".svg", ".trace"}


def endings(name, text):
    "Endings of files that are named as if a job read or wrote them."
    from batchlab.jobs.tables import OPENERS, SUFFIX_KINDS

    known = {*SUFFIX_KINDS, *OPENERS, *OF_NO_JOB}
    for s in sentences(text):
        if not re.search(r"refuse|\bno\b|\bnot\b|n't", s):
            yield from {*re.findall(r"`\*?(\.[a-z]\w{1,9})`", s)} - known


def anchors(name, text):
    "Anchors of links that are no heading of their page, and numbers that no chapter has."
    for page, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", plain(text)):
        there = plain(PAGES.get(page.rpartition("/")[2].removesuffix(".ipynb") or name, ""))
        heads = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", there)
        heads = [h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", heads, re.M)]
        if anchor.lower() not in [*heads, *(re.sub(r"[^\w-]", "", h) for h in heads)]:
            yield f"{page}#{anchor}"
    numbers = [m[1] for stem in PAGES if (m := re.match(r"0?(\d\d[a-z]?)\d?_", stem))]
    said = re.findall(r"\b[Cc]hapters? (\d+[a-z]?)\b", plain(text))
    yield from (f"chapter {n}" for n in said if n not in numbers)


def links(name, text):
    "The page itself, if no other leads to it."
    others = "".join(t for n, t in PAGES.items() if n != name)
    if name not in ("README", "index") and not re.search(rf"\]\([^)#\s]*\b{name}\.ipynb", others):
        yield name


@pytest.mark.parametrize("check", [flags, endings, anchors, links])
def test_what_prose_says_is_so(check, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "nbs")
    assert {n: w for n, text in PAGES.items() if (w := [*check(n, text)])} == {}


def test_routes_that_prose_names_are_served_and_those_that_it_denies_are_not(served):
    assert {n: w for n, text in PAGES.items() if (w := [*routes(text, served)])} == {}


PLANTED = [
    (flags, "```sh\nbatchlab run -i a.jsonl --drain 3\n```", "run --drain"),
    (flags, "as `batchlab serve --odered` does", "serve --odered"),
    (flags, "`--drain` of `batchlab run`", "run --drain"),
    (flags, "`batchlab models`", "no command models"),
    (endings, "It writes `.npy` too.", ".npy"),
    (anchors, "[x](86_server.ipynb#route)", "86_server.ipynb#route"),
    (anchors, "as chapter 99 says", "chapter 99"),
]


@pytest.mark.parametrize("check, text, said", PLANTED)
def test_what_is_wrong_is_found(check, text, said, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "nbs")
    assert [*check("README", text)] == [said]


@pytest.mark.parametrize(
    "text",
    [
        "`/v1/responses` is not supported.",
        "But not the `/v1/responses` API.",
        "`PUT` or `DELETE /health`",
    ],
)
def test_a_route_that_is_there_or_not_is_found(text, served):
    assert len([*routes(text, served)]) == 1
