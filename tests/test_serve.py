"""What stands on the server together: tools over HTTP, streamed and whole, and batches beside online requests, through the command itself."""

import contextlib, json, os
from functools import partial

import jsonschema, pytest

from helpers import needs, one_thread

openai, *_ = needs("openai", "fastapi", "uvicorn", "httpx", "llguidance")

from batchlab.models import tiny_model, tiny_tokenizer

from helpers import added_up, greedy, server_process, serving, texts, tiny_llm, until
from test_server import client_of
from test_tools import CITY, TEMPLATES, TOOLS, function

pytestmark = one_thread
TALK = [dict(role="user", content="How is the weather in Rome?")]


strict = partial(client_of, strict=True)


@pytest.fixture(scope="module")
def chat():
    "Asks a tiny model whose chat template is that of the format hermes."
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES["hermes"]
    llm = tiny_llm(tiny_model("llama", max_position_embeddings=2048), tokenizer, max_num_seqs=4)
    with serving(llm) as s, strict(s) as c:
        yield partial(c.chat.completions.create, model="tiny", messages=TALK)


def streamed(chat, **ask):
    return added_up(e.model_dump() for e in chat(**ask, stream=True))


def functions_in(said):
    "What a message or the delta of a whole stream calls."
    calls = said.get("tool_calls") or {}
    return [c["function"] for c in (calls.values() if isinstance(calls, dict) else calls)]


@pytest.mark.parametrize("choice", ["required", function("weather")])
def test_calls_whole_and_streamed(chat, choice):
    ends, ask = [], dict(tools=TOOLS, tool_choice=choice, temperature=1, max_tokens=400, n=2)
    for seed in range(4):
        whole, parts = chat(**ask, seed=seed).model_dump(), streamed(chat, **ask, seed=seed)
        for made, part in zip(whole["choices"], parts, strict=True):
            said, came = made["message"], part["delta"]
            assert functions_in(came) == functions_in(said)
            assert (came.get("content") or "") == (said["content"] or "")
            assert part["finish_reason"] == made["finish_reason"]
            ends.append(made["finish_reason"])
            assert all(call["id"].startswith("call_") for call in said["tool_calls"] or ())
            for f in functions_in(said):
                assert f["name"] == "weather" or choice == "required"
                if f["name"] == "weather" and ends[-1] == "tool_calls":
                    jsonschema.validate(json.loads(f["arguments"]), CITY)
    assert "tool_calls" in ends


def test_auto_without_a_call_is_the_plain_answer_held_to_the_grammar(chat):
    ask = dict(tools=TOOLS, temperature=0, max_tokens=12)
    [whole], [part] = chat(**ask).choices, streamed(chat, **ask)
    assert whole.message.content == part["delta"]["content"]
    assert whole.finish_reason == part["finish_reason"]


def test_a_choice_ends_once_while_others_go_on(chat):
    "Choices of different length: each has one event that says why it ended."
    ask = dict(n=4, temperature=1.5, max_tokens=40, logit_bias={"2": 2.0})
    ends = [c["finish_reason"] for seed in range(6) for c in streamed(chat, seed=seed, **ask)]
    assert len(ends) == 24 and {*ends} == {"stop", "length"}


SCRIPT = """import sys
from batchlab.cli import serve, parse_args
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
sys.exit(serve(parse_args(sys.argv[1:]), LLM(tiny_model('llama', num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=4)))"""


@contextlib.contextmanager
def served(folder):
    "`batchlab serve --data folder` of the default model's stand-in, as a process: it and a client."
    flags = "--port 0 --served-model-name tiny --no-request-log --data".split()
    with server_process("-c", SCRIPT, "serve", *flags, str(folder)) as (p, url, _):
        with client_of(url, base_url=url) as client:
            yield p, client


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_the_command_keeps_batches_over_a_kill_and_beside_online_requests(tmp_path):
    counts = {f"r{i}": 20 + i % 50 for i in range(60)}
    prompts = [f"tell me {i} " + "more " * (i % 6) for i in range(60)]
    llm = tiny_llm(tiny_model("llama", num_hidden_layers=1), max_num_seqs=4)
    alone = llm.generate(prompts, [greedy(n) for n in counts.values()], use_tqdm=False)
    want, path = dict(zip(counts, texts(alone))), "/v1/completions"
    how = dict(model="tiny", temperature=0, ignore_eos=True)
    bodies = [how | dict(prompt=p, max_tokens=n) for p, n in zip(prompts, counts.values())]
    line = lambda k, body: json.dumps(dict(method="POST", url=path, custom_id=k, body=body))
    raw = "\n".join(map(line, counts, bodies)).encode()
    with served(tmp_path / "data") as (p, client):
        file = client.files.create(file=("in.jsonl", raw), purpose="batch")
        asked = dict(input_file_id=file.id, endpoint=path, completion_window="24h")
        batch = client.batches.create(**asked)
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
        p.terminate()
        assert p.wait(60) == 0


def test_two_servers_on_one_folder(tmp_path, capsys, monkeypatch):
    from batchlab.cli import main
    from batchlab.serve.batches import BatchStore

    flags = ["--port", "0", "--data", str(tmp_path / "data"), "--model", "x"]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with contextlib.closing(BatchStore(tmp_path / "data")):
        assert main(["serve", *flags], llm=tiny_llm()) == 2
    said = capsys.readouterr().err
    assert "another server" in said and "for spans start it by opentelemetry-instrument" in said
