"""What stands on the server together: tools over HTTP, streamed and whole, and batches beside online requests, through the command itself."""

import json, os, signal, subprocess, sys, time

import jsonschema, pytest

for name in ("fastapi", "uvicorn", "httpx", "llguidance"):
    pytest.importorskip(name)
openai = pytest.importorskip("openai")

from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.core.params import SamplingParams

from test_server import serving
from test_tools import CITY, TEMPLATES, XML_CITY, function, tools

pytestmark = pytest.mark.usefixtures("one_thread")
TALK = [dict(role="user", content="How is the weather in Rome?")]


def client_of(s, strict=True):
    return openai.OpenAI(
        base_url=f"{s.url}/v1",
        api_key="any",
        max_retries=0,
        timeout=100,
        _strict_response_validation=strict,
    )


def speaking(name):
    "A tiny model whose chat template is that of format `name`."
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    return LLM(tiny_model("llama", max_position_embeddings=2048), tokenizer, max_num_seqs=4)


@pytest.fixture(scope="module")
def hermes():
    with serving(llm=speaking("hermes")) as s:
        yield s


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
                call["name"], call["arguments"] = (
                    call["name"] or t.function.name,
                    call["arguments"] + (t.function.arguments or ""),
                )
            f["reason"] = c.finish_reason
    return found


@pytest.mark.parametrize(
    "choice", ["required", dict(type="function", function=dict(name="weather"))]
)
def test_calls_whole_and_streamed(hermes, choice):
    with client_of(hermes) as client:
        ends = []
        for seed in range(4):
            ask = dict(
                model="tiny",
                messages=TALK,
                tools=tools(),
                tool_choice=choice,
                seed=seed,
                temperature=1,
                max_tokens=400,
                n=2,
            )
            whole = client.chat.completions.create(**ask)
            parts = joined(client.chat.completions.create(**ask, stream=True))
            for c in whole.choices:
                calls, got = c.message.tool_calls or [], parts[c.index]
                assert got["reason"] == c.finish_reason and [
                    (t.function.name, t.function.arguments) for t in calls
                ] == [(t["name"], t["arguments"]) for t in got["calls"].values()]
                assert (c.message.content or "") == got["content"]
                if c.finish_reason != "tool_calls":
                    continue
                for t in calls:
                    assert t.id.startswith("call_") and t.type == "function"
                    if t.function.name == "weather":
                        jsonschema.validate(json.loads(t.function.arguments), CITY)
            ends += [c.finish_reason for c in whole.choices]
            if isinstance(choice, dict):
                assert {
                    t.function.name for c in whole.choices for t in c.message.tool_calls or ()
                } == {"weather"}
        assert "tool_calls" in ends


def test_a_conversation_with_a_call_goes_on(hermes):
    call = dict(
        id="call_1",
        type="function",
        function=dict(name="weather", arguments='{"city": "Rome", "days": 1}'),
    )
    talk = [
        *TALK,
        dict(role="assistant", content=None, tool_calls=[call]),
        dict(role="tool", tool_call_id="call_1", content="sunny"),
    ]
    with client_of(hermes) as client:
        ask = dict(model="tiny", messages=talk, temperature=0, max_tokens=6)
        a, b = (
            client.chat.completions.create(**ask, **more)
            for more in ({}, dict(tools=tools(), tool_choice="none"))
        )
        assert (
            a.usage.prompt_tokens
            == b.usage.prompt_tokens
            > client.chat.completions.create(**ask | dict(messages=TALK)).usage.prompt_tokens
        )
        assert (
            a.choices[0].message.content == b.choices[0].message.content
            and a.choices[0].message.tool_calls is None
        )


def test_auto_without_a_call_is_the_plain_answer_held_to_the_grammar(hermes):
    with client_of(hermes) as client:
        ask = dict(model="tiny", messages=TALK, tools=tools(), temperature=0, max_tokens=12)
        whole, parts = (
            client.chat.completions.create(**ask),
            joined(client.chat.completions.create(**ask, stream=True)),
        )
        assert (
            whole.choices[0].message.content == parts[0]["content"]
            and parts[0]["reason"] == whole.choices[0].finish_reason
        )


@pytest.mark.parametrize(
    "more, param",
    [
        (dict(tools=[function("a b")]), "tools"),
        (dict(tools=tools(), tool_choice="sometimes"), "tool_choice"),
        (dict(tool_choice="required"), "tool_choice"),
        (dict(tools=tools(), response_format=dict(type="json_object")), "tools"),
        (
            dict(tools=tools(), tool_choice=dict(type="function", function=dict(name="nobody"))),
            "tool_choice",
        ),
    ],
)
def test_wrong_tools(hermes, more, param):
    with client_of(hermes) as client, pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="tiny", messages=TALK, **more)
    assert e.value.param == param and e.value.body["type"] == "invalid_request_error"


def test_a_template_that_knows_no_tools():
    with (
        serving() as s,
        client_of(s) as client,
        pytest.raises(openai.BadRequestError, match="tools are not supported by this model") as e,
    ):
        client.chat.completions.create(
            model="tiny", messages=TALK, tools=[function("weather", XML_CITY)]
        )
    assert e.value.param == "tools"


def served(folder):
    "`batchlab serve --data folder` of the default model's stand-in, as a process: it and its URL."
    code = """import sys
from batchlab.cli import serve, parse_args
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
sys.exit(serve(parse_args(sys.argv[1:]), LLM(tiny_model('llama', num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=4)))"""
    p = subprocess.Popen(
        [
            sys.executable,
            "-c",
            code,
            "serve",
            "--port",
            "0",
            "--data",
            str(folder),
            "--served-model-name",
            "tiny",
            "--no-request-log",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | dict(OMP_NUM_THREADS="1"),
    )
    said = []
    for line in p.stderr:
        said.append(line)
        if "is served at" in line:
            return p, line.split()[-1]
    raise AssertionError("".join(said))


def finished(client, batch):
    end = time.monotonic() + 120
    while (b := client.batches.retrieve(batch.id)).status not in (
        "completed",
        "failed",
        "cancelled",
        "expired",
    ):
        assert time.monotonic() < end, b
        time.sleep(0.05)
    return b


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_the_command_keeps_batches_over_a_kill_and_beside_online_requests(tmp_path):
    lines = [
        dict(
            custom_id=f"r{i}",
            method="POST",
            url="/v1/completions",
            body=dict(
                model="tiny",
                prompt=f"tell me {i} " + "more " * (i % 6),
                max_tokens=20 + i % 50,
                temperature=0,
                ignore_eos=True,
            ),
        )
        for i in range(60)
    ]
    alone = LLM(
        tiny_model("llama", num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=4
    ).generate(
        [d["body"]["prompt"] for d in lines],
        [
            SamplingParams(temperature=0, max_tokens=d["body"]["max_tokens"], ignore_eos=True)
            for d in lines
        ],
        use_tqdm=False,
    )
    want = {d["custom_id"]: o.outputs[0].text for d, o in zip(lines, alone)}
    p, url = served(tmp_path / "data")
    try:
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=100) as client:
            file = client.files.create(
                file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch"
            )
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            answer = client.completions.create(
                model="tiny",
                prompt="beside it",
                max_tokens=5,
                temperature=0,
                extra_body=dict(ignore_eos=True),
            )
            assert answer.usage.completion_tokens == 5
        p.kill()
        p.wait()
        p.stderr.close()
        p, url = served(tmp_path / "data")
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=100) as client:
            done = finished(client, batch)
            assert (
                done.status == "completed"
                and done.request_counts.completed == 60
                and done.error_file_id is None
            )
            got = [
                json.loads(line)
                for line in client.files.content(done.output_file_id).text.splitlines()
            ]
        assert (
            len(got) == 60
            and {d["custom_id"]: d["response"]["body"]["choices"][0]["text"] for d in got} == want
        )
        p.send_signal(signal.SIGTERM)
        assert p.wait(60) == 0
    finally:
        p.kill()
        p.wait()
        p.stderr.close()


def test_two_servers_on_one_folder(tmp_path, capsys):
    from batchlab.cli import main
    from batchlab.serve.batches import BatchStore

    store = BatchStore(tmp_path / "data")
    try:
        assert (
            main(
                ["serve", "--port", "0", "--data", str(tmp_path / "data"), "--model", "x"],
                llm=LLM(tiny_model("llama"), tiny_tokenizer()),
            )
            == 2
        )
    finally:
        store.close()
    assert "another server uses" in capsys.readouterr().err


def test_without_a_folder_files_are_not_served():
    with (
        serving() as s,
        client_of(s) as client,
        pytest.raises(openai.NotFoundError, match="--data"),
    ):
        client.batches.list()


def test_a_choice_ends_once_while_others_go_on(hermes):
    "Two choices of different length: each has one event that says why it ended."
    with client_of(hermes) as client:
        ends = {}
        for seed in range(6):
            for e in client.chat.completions.create(
                model="tiny",
                messages=TALK,
                n=4,
                seed=seed,
                temperature=1.5,
                max_tokens=40,
                stream=True,
                logit_bias={"2": 2.0},
            ):
                for c in e.choices:
                    ends.setdefault((seed, c.index), []).extend(
                        [c.finish_reason] * bool(c.finish_reason)
                    )
        assert (
            len(ends) == 24
            and {len(x) for x in ends.values()} == {1}
            and {x[0] for x in ends.values()} == {"stop", "length"}
        )
