"Reference pages are made from the code: what they show is what the code says now."

import asyncio, functools, json, re

import pytest

from helpers import BOOK, ROOT, json_lines, needs, scripted, tiny_llm, user

needs("execnb.shell")

from transformers import T5Config

import batchlab
from batchlab.compat.vllm import engine_options
from batchlab.errors import JobError, ModelError, PromptError
from batchlab.jobs.lines import parse_line
from batchlab.jobs.responses import read_response
from batchlab.jobs.schema import parse_online
from batchlab.jobs.settings import BadRequest
from batchlab.jobs.tables import encoding_of
from batchlab.models import encode_chat, load_model, tiny_model, tiny_tokenizer
from batchlab.serve.messages import chat_of_message

SEEN = ("93_recipes", "80_tasks")  # whose outputs are answers of a model, or have no tables
PAGES = [
    p
    for p in BOOK["chapters"]()
    if p.parent.name == "reference" and "from pages" in p.read_text("utf-8") and p.stem not in SEEN
]
RUN = f"""
import os
from pathlib import Path
from execnb.shell import CaptureShell
folder, pages = Path.cwd(), [*map(Path, {[*map(str, PAGES)]})]
os.chdir(pages[0].parent)
for page in pages:
    CaptureShell(page.parent).execute(page, folder / page.name, exc_stop=True)
"""


def tables(path):
    "The Markdown that the outputs of a notebook hold."
    outs = [out for cell in BOOK["read"](path)["cells"] for out in cell.get("outputs", [])]
    found = [out["data"]["text/markdown"] for out in outs if "text/markdown" in out.get("data", {})]
    return ["".join(text) for text in found]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    "A folder with the pages, run in a process of their own."
    folder = tmp_path_factory.mktemp("pages")
    done = scripted(RUN, folder, timeout=300)
    assert not done.returncode, done.stderr
    return folder


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_tables_are_up_to_date(path, ran):
    assert tables(ran / path.name) == tables(path)


def test_the_page_on_models_has_the_families_that_chapter_70_has(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "nbs")
    from families import FAMILIES

    [text] = tables(BOOK["find"]("88_models"))
    rows = [line.split("|")[1:3] for line in text.splitlines()[2:]]
    assert [(name.strip(" `"), how.strip()) for name, how in rows] == [f[:2] for f in FAMILIES]


@pytest.mark.parametrize(
    "text",
    [
        "```sh\nbatchlab run -i a.jsonl -o b.jsonl --odered\n```",
        "```sh\ncat a | FOO=1 batchlab generate --max-token 3 'Hello' > b && echo\n```",
        "```sh\nbatchlab rnu -i a.jsonl\n```",
    ],
)
def test_a_wrong_command_on_a_page_is_found(text, pages):
    with pytest.raises(Exception, match="did you mean|unknown"):
        [*map(pages.check_command, pages.commands(text))]


PROSE = [*BOOK["notebooks"](), ROOT / "CONTRIBUTING.md"]
# Of other programs: docker, the tests' scripts, SGLang; and names that stand for any.
OTHERS = {"--cpus", "--vllm", "--enable-deterministic-inference"}
OTHERS |= {"--help", "--flag", "--reasoning-parser"}


def prose(path):
    "The prose of a page, but for what other programs are called in the glossary."
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    text = "\n\n".join(BOOK["cells"](path, "markdown"))
    return re.sub(r"^\*Elsewhere:.*$", "", text, flags=re.M)


@pytest.fixture
def pages(monkeypatch):
    "What checks pages, in nbs."
    monkeypatch.syspath_prepend(ROOT / "nbs")
    import pages

    return pages


def test_what_pages_name_is_there(pages):
    "Every command, flag, route and argument."
    wrong = {p.stem: {*pages.misnamed(prose(p))} - OTHERS for p in PROSE}
    assert {page: names for page, names in wrong.items() if names} == {}


MISNAMED = r"""
["`--max-num-seq` is", "--max-num-seq"]
["POST to `/v1/chat/completion`", "/v1/chat/completion"]
["`LLM(max_num_seq=4)` has", "LLM(max_num_seq=…)"]
["```python\nllm.generate(p, verfy=True)\n```", "llm(verfy=…)"]
["as `llm.generat` does", "llm.generat"]
["`batchlab generate --quantization int9 a` says", "int9"]
["`batchlab answer`", "unknown command"]
"""


@pytest.mark.parametrize("text, name", json_lines(MISNAMED))
def test_a_name_that_is_not_there_is_found(text, name, pages):
    [said] = pages.misnamed(text)
    assert name in said


# --- what pages deny

DENIES = r"not\s+supported|unsupported|but\s+not\s+the|not\s+implemented|(is|are)\s+refused|(without|no)\s+effect"
SENTENCES = r"(?<=[.!?;])\s+|\n\n|\n(?=[|*-])"


@functools.cache
def llm():
    return tiny_llm(tiny_model("llama", num_hidden_layers=1))


def refused(read, body, *names):
    "That `read` refuses a body with each of these names, and says it."
    for name, value in names:
        with pytest.raises(BadRequest, match=name):
            read(body | {name: value})
    return True


def response(body):
    needs("fastapi")
    from batchlab.serve.responses import request_for

    return asyncio.run(request_for(read_response(body), None))


def line(body):
    about = dict(custom_id="a", method="POST", url="/v1/responses", body=body)
    if failure := parse_line(1, json.dumps(about).encode()).failure:
        raise BadRequest(failure[1])


def no_other_kinds(folder):
    T5Config().save_pretrained(folder)
    parts = (dict(type=kind) for kind in ("image_url", "input_audio"))
    for content in parts:
        with pytest.raises(PromptError):
            encode_chat(tiny_tokenizer(), [user([content])])
    with pytest.raises(ModelError, match="encoder-decoder"):
        load_model(str(folder))
    return True


def job_refused(folder):
    "That a failed row, read with the encoding that it needs, is refused once its job has begun."
    (folder / "in.csv").write_bytes("prompt\nGrüße\n".encode("cp1252"))
    run = functools.partial(batchlab.run, folder / "in.csv", folder / "out.csv")
    params = dict(max_tokens=1)
    assert run(params, model=llm()).failed == 1
    with pytest.raises(JobError, match="retry_errors"):
        run(params, model=llm(), encoding="cp1252")
    return run(params, model=llm(), encoding="cp1252", retry_errors=True).failed == 0


def finished_refused(folder):
    "That lines which come after a job is finished are answered by force alone."
    source = folder / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    run = functools.partial(batchlab.run, source, folder / "out.jsonl", dict(max_tokens=1))
    assert run(model=llm()).answered == 1
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(JobError, match="is finished, and 1 requests"):
        run(model=llm())
    return run(model=llm(), force=True).answered == 2


def no_field_inside(folder):
    with pytest.raises(PromptError, match="chat_template_kwargs has tools"):
        llm().generate(CHAT | dict(chat_template_kwargs=dict(tools=[])))
    return True


def mark_refused(folder):
    with pytest.raises(JobError, match="byte order mark of UTF-16"):
        encoding_of(b"\xff\xfea\0", folder / "in.csv", "utf-8")
    return True


CHAT = dict(messages=[user("Hi")])
MESSAGE = CHAT | dict(model="any", max_tokens=1)
ASKED = dict(input="Hi")
KEPT = ("store", True), ("background", True), ("previous_response_id", "resp_1")
# What a sentence on README or a page of reference says that there is not: that it is so.
DENIED = {
    "A field of OpenAI's API that the server can't honour": lambda folder: refused(
        lambda body: parse_online(body, "chat"),
        CHAT,
        ("audio", {"voice": "a"}),
        ("modalities", ["audio"]),
    ),
    "`background` or `previous_response_id` is refused": lambda _: refused(response, ASKED, *KEPT),
    "`stream`, `background`, `previous_response_id` and `store: true`": lambda _: refused(
        line, ASKED, ("stream", True), *KEPT
    ),
    "`cache_control`, `metadata`": lambda _: (
        chat_of_message(MESSAGE | dict(metadata=dict(user_id="a"), service_tier="auto"))
        == chat_of_message(MESSAGE)
    ),
    "400 from `/v1/messages`": lambda _: refused(
        chat_of_message, MESSAGE, ("container", "a"), ("mcp_servers", [{"url": "a"}])
    ),
    "Encoder-decoders, images and sound": no_other_kinds,
    "`chat_template_kwargs` are variables of the template": no_field_inside,
    "`auto` and `disabled` are the same": lambda _: all(
        response(ASKED | dict(truncation=how)) for how in ("auto", "disabled")
    ),
    "A mark that contradicts `--encoding`": mark_refused,
    "a failed line was edited, or is read with another `--encoding`": job_refused,
    "a finished output is refused, and for JSONL `--force` adds them": finished_refused,
    "`tensor_parallel_size` has no effect": lambda _: (
        engine_options(dict(tensor_parallel_size=2)) == {}
    ),
}


def test_what_pages_deny_is_not_there():
    "A sentence that says so has a probe above."
    assert re.search(DENIES, "JSON schemas and tools, but not the\nResponses API.")
    pages = [BOOK["find"]("index"), *(p for p in PROSE if p.parent.name == "reference")]
    texts = [re.sub(r"```.*?```", "", prose(p), flags=re.S) for p in pages]
    said = [s for text in texts for s in re.split(SENTENCES, text) if re.search(DENIES, s)]
    said = [" ".join(s.split()) for s in said if re.search("`|API|support", s)]
    assert [s for s in said if not any(words in s for words in DENIED)] == []
    assert [words for words in DENIED if not any(words in s for s in said)] == []


@pytest.mark.parametrize("words", DENIED)
def test_what_a_page_denies_is_so(words, tmp_path):
    assert DENIED[words](tmp_path)
