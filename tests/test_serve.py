"""What stands on the server together: tools over HTTP, streamed and whole, and batches beside online requests, through the command itself."""

import contextlib, json, os, signal, subprocess, sys
from functools import partial

import jsonschema, pytest

for name in ("fastapi", "uvicorn", "httpx", "llguidance"):
    pytest.importorskip(name, reason=f"needs {name}: pip install '.[dev]'")
openai = pytest.importorskip("openai", reason="needs openai: pip install '.[dev]'")

from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer

from helpers import greedy, texts, until
from test_server import client_of, serving
from test_tools import CITY, TEMPLATES, TOOLS, function

pytestmark = pytest.mark.usefixtures("one_thread")
TALK = [dict(role="user", content="How is the weather in Rome?")]


strict = partial(client_of, strict=True)


def speaking(name):
    "A tiny model whose chat template is that of format `name`."
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    return LLM(tiny_model("llama", max_position_embeddings=2048), tokenizer, max_num_seqs=4)


@pytest.fixture(scope="module")
def hermes():
    with serving(llm=speaking("hermes")) as s:
        yield s


@pytest.fixture(scope="module")
def chat(hermes):
    with strict(hermes) as c:
        yield partial(c.chat.completions.create, model="tiny", messages=TALK)


def joined(events):
    "`(content, calls, reason)` that the events of a stream add up to, by choice."
    found = {}
    for e in events:
        for c in e.choices:
            f = found.setdefault(c.index, dict(content="", calls={}, reason=None))
            assert f["reason"] is None, "nothing comes after the end"
            f["content"] += c.delta.content or ""
            for t in c.delta.tool_calls or ():
                call = f["calls"].setdefault(t.index, dict(name=None, arguments=""))
                if t.id:
                    call["id"] = t.id
                call["name"] = call["name"] or t.function.name
                call["arguments"] += t.function.arguments or ""
            f["reason"] = c.finish_reason
    return found


def whole_of(choice):
    "Of a choice what `joined` has of a streamed one."
    calls = choice.message.tool_calls or []
    made = {i: dict(t.function.model_dump(), id=t.id) for i, t in enumerate(calls)}
    return dict(content=choice.message.content or "", calls=made, reason=choice.finish_reason)


def without_ids(choice):
    calls = {i: call | dict(id=None) for i, call in choice["calls"].items()}
    return choice | dict(calls=calls)


@pytest.mark.parametrize(
    "choice", ["required", dict(type="function", function=dict(name="weather"))]
)
def test_calls_whole_and_streamed(chat, choice):
    ends, ask = [], dict(tools=TOOLS, tool_choice=choice, temperature=1, max_tokens=400, n=2)
    for seed in range(4):
        whole, parts = chat(**ask, seed=seed), joined(chat(**ask, seed=seed, stream=True))
        for c in whole.choices:
            made = whole_of(c)
            assert without_ids(parts[c.index]) == without_ids(made)
            ends.append(made["reason"])
            for call in made["calls"].values():
                assert call["id"].startswith("call_")
                assert call["name"] == "weather" or choice == "required"
                if call["name"] == "weather" and made["reason"] == "tool_calls":
                    jsonschema.validate(json.loads(call["arguments"]), CITY)
    assert "tool_calls" in ends


def test_a_conversation_with_a_call_goes_on(chat):
    call = dict(name="weather", arguments='{"city": "Rome", "days": 1}')
    calls = [dict(id="call_1", type="function", function=call)]
    talk = [
        *TALK,
        dict(role="assistant", content=None, tool_calls=calls),
        dict(role="tool", tool_call_id="call_1", content="sunny"),
    ]
    ask = dict(temperature=0, max_tokens=6)
    a = chat(messages=talk, **ask)
    b = chat(messages=talk, tools=TOOLS, tool_choice="none", **ask)
    assert a.usage.prompt_tokens == b.usage.prompt_tokens > chat(**ask).usage.prompt_tokens
    assert a.choices[0].message.content == b.choices[0].message.content
    assert a.choices[0].message.tool_calls is None


def test_auto_without_a_call_is_the_plain_answer_held_to_the_grammar(chat):
    ask = dict(tools=TOOLS, temperature=0, max_tokens=12)
    whole, parts = chat(**ask).choices[0], joined(chat(**ask, stream=True))[0]
    assert whole.message.content == parts["content"] and whole.finish_reason == parts["reason"]


def test_wrong_tools(chat):
    with pytest.raises(openai.BadRequestError) as e:
        chat(tools=TOOLS, tool_choice=function("nobody"))
    assert e.value.param == "tool_choice" and e.value.body["type"] == "invalid_request_error"


def test_a_template_that_knows_no_tools():
    with serving() as s, strict(s) as c, pytest.raises(openai.BadRequestError) as e:
        c.chat.completions.create(model="tiny", messages=TALK, tools=[function("weather", CITY)])
    assert e.value.param == "tools"


def test_a_choice_ends_once_while_others_go_on(chat):
    "Choices of different length: each has one event that says why it ended."
    ends = {}
    ask = dict(n=4, temperature=1.5, max_tokens=40, stream=True, logit_bias={"2": 2.0})
    for seed in range(6):
        for e in chat(seed=seed, **ask):
            for c in e.choices:
                ended = [c.finish_reason] if c.finish_reason else []
                ends.setdefault((seed, c.index), []).extend(ended)
    assert len(ends) == 24 and {len(x) for x in ends.values()} == {1}
    assert {x[0] for x in ends.values()} == {"stop", "length"}


@contextlib.contextmanager
def served(folder):
    "`batchlab serve --data folder` of the default model's stand-in, as a process: it and a client."
    code = """import sys
from batchlab.cli import serve, parse_args
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
sys.exit(serve(parse_args(sys.argv[1:]), LLM(tiny_model('llama', num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=4)))"""
    flags = "--port 0 --served-model-name tiny --no-request-log --data".split()
    command, env = [sys.executable, "-c", code, "serve", *flags, str(folder)], os.environ
    how = dict(stderr=subprocess.PIPE, text=True, env=env | dict(OMP_NUM_THREADS="1"))
    with subprocess.Popen(command, **how) as p:
        try:
            url = next(line.split()[-1] for line in p.stderr if "is served at" in line)
            with client_of(url, base_url=url) as client:
                yield p, client
        finally:
            p.kill()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_the_command_keeps_batches_over_a_kill_and_beside_online_requests(tmp_path):
    counts = {f"r{i}": 20 + i % 50 for i in range(60)}
    prompts = [f"tell me {i} " + "more " * (i % 6) for i in range(60)]
    llm = LLM(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=4)
    alone = llm.generate(prompts, [greedy(n) for n in counts.values()], use_tqdm=False)
    want = dict(zip(counts, texts(alone)))
    how = dict(model="tiny", temperature=0, ignore_eos=True)
    bodies = [how | dict(prompt=p, max_tokens=n) for p, n in zip(prompts, counts.values())]
    url = dict(method="POST", url="/v1/completions")
    lines = [url | dict(custom_id=k, body=body) for k, body in zip(counts, bodies)]
    with served(tmp_path / "data") as (p, client):
        raw = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", raw), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        ask = dict(model="tiny", prompt="beside it", max_tokens=5)
        answer = client.completions.create(**ask, extra_body=dict(ignore_eos=True))
        assert answer.usage.completion_tokens == 5
    with served(tmp_path / "data") as (p, client):
        ends = "completed", "failed", "cancelled", "expired"
        until(lambda: client.batches.retrieve(batch.id).status in ends, 120)
        done = client.batches.retrieve(batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 60)
        assert done.error_file_id is None
        got = map(json.loads, client.files.content(done.output_file_id).text.splitlines())
        found = [(d["custom_id"], d["response"]["body"]["choices"][0]["text"]) for d in got]
        assert len(found) == 60 and dict(found) == want
        p.send_signal(signal.SIGTERM)
        assert p.wait(60) == 0


def test_two_servers_on_one_folder(tmp_path, capsys, monkeypatch):
    from batchlab.cli import main
    from batchlab.serve.batches import BatchStore

    flags = ["--port", "0", "--data", str(tmp_path / "data"), "--model", "x"]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with contextlib.closing(BatchStore(tmp_path / "data")):
        llm = LLM(tiny_model("llama"), tiny_tokenizer())
        assert main(["serve", *flags], llm=llm) == 2
    said = capsys.readouterr().err
    assert "another server" in said and "for spans start it by opentelemetry-instrument" in said


def test_without_a_folder_files_are_not_served():
    with serving() as s, strict(s) as client, pytest.raises(openai.NotFoundError, match="--data"):
        client.batches.list()
