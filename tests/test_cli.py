"`python -m batchlab.cli` in processes of its own, with a tiny model: pipes, signals, exit statuses."

import csv, json, os, signal, subprocess, sys, time
import pytest

from helpers import but_compiler

ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUTF8": "0",
    "LC_ALL": "C.UTF-8",
}
CMD = [sys.executable, "-m", "batchlab.cli"]
posix = pytest.mark.skipif(os.name != "posix", reason="signals and devices of POSIX")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from batchlab.models import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def cli(model, tmp_path):
    def call(*args, stdin="", model=model):
        with_model = ["--model", model, "--max-tokens", "6"] if model else []
        return subprocess.run(
            [*CMD, "generate", *args, *with_model],
            input=stdin,
            text=True,
            encoding="utf-8",
            capture_output=True,
            cwd=tmp_path,
            env=ENV,
            timeout=50,
        )

    return call


def rows(path):
    return [json.loads(s) for s in path.read_text(encoding="utf-8").splitlines()]


def fails_in_one_line(p, status, *words):
    assert p.returncode == status, p.stderr
    assert len(but_compiler(p.stderr).splitlines()) == 1 and but_compiler(p.stderr).startswith(
        "batchlab: error: "
    ), p.stderr
    for w in words:
        assert w in p.stderr, p.stderr


def test_help_and_version_need_no_torch():
    code = (
        'import sys; from batchlab.cli import main; s = [main(a) for a in (["--help"], ["generate", "--help"], '
        '["--version"])]; assert s == [0, 0, 0] and "torch" not in sys.modules'
    )
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert p.returncode == 0, p.stderr
    assert "--max-num-seqs" in p.stdout and "batchlab 0" in p.stdout


def test_a_mistake_in_a_flag_needs_no_torch():
    code = (
        'import sys; from batchlab.cli import main; s = [main(a) for a in (["run"], ["run", "-i", "x"], ["generate", "--frobnicate"], ["genrate"])]; '
        'assert s == [2] * 4 and "torch" not in sys.modules'
    )
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert p.returncode == 0, p.stderr
    assert len(p.stderr.splitlines()) == 4 and all(
        s.startswith("batchlab: error: ") for s in p.stderr.splitlines()
    )


def test_text_on_a_pipe(cli):
    p = cli("a", "a longer prompt", "é")
    assert (p.returncode, but_compiler(p.stderr)) == (0, "")
    heads = [s for s in p.stdout.split("\n") if s.startswith("[")]
    assert [h for h in heads if h in ("[1] a", "[2] a longer prompt", "[3] é")] == [
        "[1] a",
        "[2] a longer prompt",
        "[3] é",
    ]


def test_jobs_in_order_with_bad_lines(cli, tmp_path):
    lines = [
        '{"id": "x", "prompt": "first"}',
        '{"prompt": ',
        "",
        '{"prompt": 5}',
        '{"messages": [{"role": "user", "content": "hi there"}], "custom_id": "c", "max_tokens": 2}',
        '{"prompt": "p", "temperature": -1}',
        '{"prompt": "p", "max_tokens": null, "temperature": "hot"}',
        '{"messages": []}',
        '{"prompt": "last and rather longer", "stop": ["zzz"], "ignore_eos": true}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    p = cli("--prompts-file", "in.jsonl", "--output", "out.jsonl")
    out = rows(tmp_path / "out.jsonl")
    assert p.returncode == 1 and len(but_compiler(p.stderr).splitlines()) == 2, (
        p.stderr
    )  # the blank line; the failures
    assert "5 of 8 requests failed" in p.stderr and "line 2" in p.stderr
    assert [r["index"] for r in out] == [*range(8)]
    assert [r["error"] is None for r in out] == [
        True,
        False,
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    for r, line in zip([out[i] for i in (1, 2, 4, 5, 6)], (2, 4, 6, 7, 8)):
        assert r["error"].startswith(f"line {line}: ")
    assert (
        out[0]["id"] == "x"
        and out[3]["custom_id"] == "c"
        and out[3]["usage"]["completion_tokens"] <= 2
    )
    assert (
        out[7]["usage"]["completion_tokens"] == 6 and out[7]["text"] == out[7]["outputs"][0]["text"]
    )


def test_batch_equals_alone(cli, tmp_path):
    prompts = ["a", "some words", "a prompt of more words than the others have"]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    texts = []
    for k, strategy in enumerate(("continuous", "loop", "static", "bucketed", "prefix")):
        assert (
            cli(
                "--prompts-file",
                "p.txt",
                "--output",
                f"{k}.jsonl",
                "--strategy",
                strategy,
                "--dtype",
                "fp32",
                "--max-num-seqs",
                "2",
            ).returncode
            == 0
        )
        texts.append([r["text"] for r in rows(tmp_path / f"{k}.jsonl")])
    assert len(texts) == 5 and all(t == texts[0] for t in texts) and any(texts[0])


def test_standard_input_and_samples(cli, tmp_path):
    p = cli(
        "--prompts-file",
        "-",
        "--output",
        "o.jsonl",
        "--do-sample",
        "--seed",
        "3",
        "--n",
        "2",
        "--logprobs",
        "1",
        stdin="one\r\n\ntwo words\n",
    )
    assert (p.returncode, but_compiler(p.stderr)) == (
        0,
        "batchlab: standard input: 1 blank line skipped\n",
    )
    out = rows(tmp_path / "o.jsonl")
    assert [r["prompt"] for r in out] == ["one", "two words"] and [
        len(r["outputs"]) for r in out
    ] == [2, 2]
    for c in out[1]["outputs"]:
        assert len(c["logprobs"]) == len(c["token_ids"])


@pytest.mark.parametrize(
    "args,words",
    [
        (["a", "--max-tokens", "0"], ["--max-tokens"]),
        (["a", "--max-tokens", "-1"], ["--max-tokens"]),
        (["a", "--temperature", "-0.1"], ["--temperature"]),
        (["a", "--top-p", "0"], ["--top-p"]),
        (["a", "--top-p", "1.01"], ["--top-p"]),
        (["a", "--top_p", "1"], ["--top_p", "did you mean --top-p?"]),
        (["a", "--logit-bias", "{"], ["JSON"]),
        (["a", "--stop-token-ids", "x"], ["token ids"]),
        ([], ["standard input"]),
        (["--prompts-file", "nowhere"], ["nowhere", "no such file"]),
        (["--prompts-file", "empty"], ["empty", "no prompts"]),
        (["--prompts-file", "latin"], ["UTF-8", "line 2"]),
        (["a", "--output", "no/dir/o.jsonl"], ["can't write no/dir/o.jsonl"]),
        (["a", "--output", "latin"], ["--overwrite"]),
        (["a", "--device", "tpu"], ["tpu"]),
        (["a", "--model", "no such model"], ["no such model"]),
    ],
)
def test_setup_errors(tmp_path, args, words, capsys, monkeypatch):
    from batchlab.cli import main

    (tmp_path / "empty").write_bytes(b"\n \n")
    (tmp_path / "latin").write_bytes(b"ok\n\xe9\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    status, err = main(["generate", *args]), capsys.readouterr().err
    assert status == 2 and len(err.splitlines()) == 1 and err.startswith("batchlab: error: "), err
    for w in words:
        assert w in err, err
    assert (tmp_path / "latin").read_bytes() == b"ok\n\xe9\n"


def test_overwrite_only_when_asked_and_able(cli, tmp_path):
    (tmp_path / "o.jsonl").write_text("old\n")
    fails_in_one_line(cli("a", "--output", "o.jsonl"), 2, "already there")
    fails_in_one_line(
        cli("a", "--output", "o.jsonl", "--overwrite", "--model", "no such model", model=None), 2
    )
    assert (tmp_path / "o.jsonl").read_text() == "old\n"
    assert cli("a", "--output", "o.jsonl", "--overwrite").returncode == 0
    assert [r["prompt"] for r in rows(tmp_path / "o.jsonl")] == ["a"]


def test_bad_prompts_fail_alone(cli, tmp_path):
    p = cli("a", "", "x" * 100_000, "b", "--output", "o.jsonl")
    out = rows(tmp_path / "o.jsonl")
    assert p.returncode == 1 and len(out) == 4
    assert "100,000 characters" in out[2]["error"] and out[2]["finish_reason"] == "error"
    assert [r["error"] for r in (out[0], out[1], out[3])] == [None] * 3 and out[3]["outputs"][0][
        "text"
    ] is not None
    assert out[1]["prompt"] == "" and out[1]["usage"] == dict(prompt_tokens=1, completion_tokens=6)
    assert "an empty prompt starts from token 1 (<bos>)" in p.stderr


@posix
def test_full_disk_is_one_line(model, tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full, the device that is always full")
    args = [*CMD, "generate", "a", "b", "--model", model, "--max-tokens", "3"]
    p = subprocess.run([*args, "--output", "/dev/full"], capture_output=True, text=True, env=ENV)
    fails_in_one_line(p, 1, "can't write /dev/full", "0 of 2")
    with open("/dev/full", "w") as full:
        p = subprocess.run(args, stdout=full, stderr=-1, text=True, env=ENV)
    fails_in_one_line(p, 1, "can't write standard output")


@posix
def test_reader_leaves(model, tmp_path):
    r, w = os.pipe()
    os.close(r)
    p = subprocess.run(
        [*CMD, "generate", "a", "b", "--model", model], stdout=w, stderr=-1, text=True, env=ENV
    )
    os.close(w)
    assert (p.returncode, but_compiler(p.stderr)) == (1, "")


@posix
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_what_is_finished(model, tmp_path, sig):
    (tmp_path / "p.txt").write_text("\n".join("word " * (i % 7 + 1) for i in range(3000)))
    out = tmp_path / "o.jsonl"
    p = subprocess.Popen(
        [
            *CMD,
            "generate",
            "--prompts-file",
            "p.txt",
            "--output",
            "o.jsonl",
            "--model",
            model,
            "--ignore-eos",
            "--max-tokens",
            "20",
            "--max-num-seqs",
            "4",
        ],
        cwd=tmp_path,
        env=ENV,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.time() + 40
    while p.poll() is None and time.time() < end and not (out.exists() and out.stat().st_size):
        time.sleep(0.05)
    p.send_signal(sig)
    _, err = p.communicate(timeout=30)
    done = rows(out)
    assert p.returncode == 130 and 0 < len(done) < 3000, err
    assert but_compiler(err).splitlines() == [
        f"batchlab: interrupted: {len(done)} of 3000 requests finished, they are in o.jsonl"
    ]
    assert len({r["index"] for r in done}) == len(done) and all(r["error"] is None for r in done)


def test_a_setting_is_used_or_fails_its_line(cli, model, tmp_path):
    "`generate` and `run` read a plain line alike."
    lines = [
        dict(prompt="a", max_completion_tokens=2, ignore_eos=True, topic="x"),
        dict(prompt="b", tools=[{}]),
        dict(prompt="c", sampling_params=dict(max_tokens=3), ignore_eos=True),
        dict(prompt="d", num_beams=2),
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(d) + "\n" for d in lines))
    p = cli("--prompts-file", "in.jsonl", "--output", "one.jsonl")
    run = [*CMD, "run", "-i", "in.jsonl", "-o", "two.jsonl", "--ordered", "--model", model]
    q = subprocess.run(run, text=True, capture_output=True, cwd=tmp_path, env=ENV, timeout=50)
    assert (
        p.returncode == 1 and p.stderr.count("keys without meaning here, ignored: topic\n") == 1
    ), p.stderr
    assert (
        q.returncode == 1
        and "ignored" not in q.stderr
        and rows(tmp_path / "two.jsonl")[0]["topic"] == "x"
    ), q.stderr  # `run` keeps it
    for name in ("one.jsonl", "two.jsonl"):
        out = rows(tmp_path / name)
        assert [r["usage"] and r["usage"]["completion_tokens"] for r in out if not r["error"]] == [
            2,
            3,
        ]
        assert [
            "tools=[{}]" in str(out[1]["error"]),
            "give it to llm.beam_search" in str(out[3]["error"]),
        ] == [True, True]


def test_messages_may_come_in_parts(cli, model, tmp_path):
    "`generate` reads a conversation as `run` does: content in parts, the role of developers, an owner's NaN."
    said = dict(
        role="user", content=[dict(type="text", text="Hello"), dict(type="text", text="world")]
    )
    lines = [
        dict(messages=[dict(role="developer", content="Be brief."), said], score=float("nan")),
        dict(
            messages=[
                dict(role="system", content="Be brief."),
                dict(role="user", content="Hello\nworld"),
            ]
        ),
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(d) + "\n" for d in lines))
    p = cli("--prompts-file", "in.jsonl", "--output", "one.jsonl")
    run = [
        *CMD,
        "run",
        "-i",
        "in.jsonl",
        "-o",
        "two.jsonl",
        "--ordered",
        "--max-tokens",
        "6",
        "--model",
        model,
    ]
    q = subprocess.run(run, text=True, capture_output=True, cwd=tmp_path, env=ENV, timeout=50)
    assert (p.returncode, q.returncode) == (0, 0), p.stderr + q.stderr
    assert (
        len({r["text"] for name in ("one.jsonl", "two.jsonl") for r in rows(tmp_path / name)}) == 1
    )


def test_a_table_keeps_samples_and_log_probabilities(model, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "n": 1}\n')
    p = subprocess.run(
        [
            *CMD,
            "run",
            "-i",
            "in.jsonl",
            "-o",
            "out.csv",
            "--model",
            model,
            "--n",
            "2",
            "--temperature",
            "1",
            "--seed",
            "3",
            "--logprobs",
            "2",
            "--max-tokens",
            "4",
        ],
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env=ENV,
        timeout=50,
    )
    assert p.returncode == 0, p.stderr
    with open(tmp_path / "out.csv", encoding="utf-8", newline="") as f:
        found = [*csv.DictReader(f)]
    assert sorted((r["line"], r["index"]) for r in found) == [("1", "0"), ("1", "1"), ("2", "")]
    for r in found:
        assert 0 < len(json.loads(r["logprobs"])["token_logprobs"]) <= 4


@pytest.mark.parametrize("command", ["run", "generate"])
def test_what_is_said_for_programs_is_json(model, tmp_path, command):
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "one two three"}\n{"prompt": "one two three"}\n{"prompt": 5}\n'
    )
    given = (
        ["-i", "in.jsonl", "-o", "out.jsonl"]
        if command == "run"
        else ["--prompts-file", "in.jsonl", "--output", "out.jsonl"]
    )
    p = subprocess.run(
        [*CMD, command, *given, "--model", model, "--max-tokens", "4", "--log-json"],
        text=True,
        encoding="utf-8",
        capture_output=True,
        cwd=tmp_path,
        env=ENV,
        timeout=50,
    )
    said = [json.loads(s) for s in p.stderr.splitlines()]
    assert p.returncode == 1 and all({"time", "level", "message"} <= d.keys() for d in said), (
        p.stderr
    )
    [last] = [d for d in said if "total" in d]
    assert (last["total"], last["answered"], last["failed"], last["seconds_left"]) == (
        3,
        2,
        1,
        0.0,
    ), last
    assert last["prompt_tokens"] > last["cached_tokens"] >= 0 and last["output_tokens"] <= 8


def test_a_mistake_is_json_too(tmp_path):
    p = subprocess.run(
        [*CMD, "run", "-i", "nowhere.jsonl", "-o", "out.jsonl", "--log-json"],
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env=ENV,
    )
    [said] = [json.loads(s) for s in p.stderr.splitlines()]
    assert p.returncode == 2 and said["level"] == "error" and "nowhere.jsonl" in said["message"]


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--guided-choice", "--structured-outputs"),
        ("--json", "--structured-outputs"),
        ("--max-tokns", "--max-tokens"),
        ("--frobnicate", "unknown flag --frobnicate (see"),
    ],
)
def test_an_unknown_flag_says_what_was_meant(flag, said, capsys):
    from batchlab.cli import main

    assert main(["generate", "a", flag, "x"]) == 2
    assert said in capsys.readouterr().err


def test_a_run_says_why_its_first_failure_failed(model, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"txt": "b"}\n{"prompt": 5}\n')
    p = subprocess.run(
        [*CMD, "run", "-i", "in.jsonl", "-o", "out.jsonl", "--model", model, "--max-tokens", "2"],
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env=ENV,
    )
    assert p.returncode == 1 and "2 failed (the first: line " in p.stderr.splitlines()[-1], p.stderr


def test_errors_that_docstrings_name_are_at_the_top():
    import batchlab
    from batchlab import errors

    assert all(
        getattr(batchlab, n) is getattr(errors, n)
        for n in ("JobError", "ModelError", "ParamError", "PromptError")
    )


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"


def said(capsys, *args, **kw):
    "The exit status of a command in this process, and what it says on standard error."
    from batchlab.cli import main

    return main([*args], **kw), capsys.readouterr().err


@pytest.mark.parametrize("form", ["file", "text"])
def test_a_chat_template_of_ones_own(model, tmp_path, capsys, form):
    (tmp_path / "own.jinja").write_text(TEMPLATE, encoding="utf-8")
    given = str(tmp_path / "own.jinja") if form == "file" else TEMPLATE
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi there"}\n')
    out = tmp_path / "out.jsonl"
    for command, *rest in (
        ["generate", "-i", str(tmp_path / "in.jsonl"), "--chat", "-o", str(out)],
        ["run", "-i", str(tmp_path / "in.jsonl"), "--chat", "-o", str(tmp_path / "run.jsonl")],
    ):
        status, err = said(
            capsys, command, *rest, "--model", model, "--chat-template", given, "--max-tokens", "2"
        )
        assert status == 0, err
    from batchlab.models.tiny import tiny_tokenizer

    asked = len(tiny_tokenizer()("<user> Hi there\n")["input_ids"])
    assert (
        rows(out)[0]["usage"]["prompt_tokens"]
        == rows(tmp_path / "run.jsonl")[0]["usage"]["prompt_tokens"]
        == asked
    )


def test_a_template_belongs_to_the_llm_that_it_was_given():
    from batchlab.api import LLM
    from batchlab.models.tiny import tiny_model, tiny_tokenizer

    tok = tiny_tokenizer()
    before, llm = (
        tok.chat_template,
        LLM(tiny_model("llama"), tok, chat_template=TEMPLATE, compile=False),
    )
    [out] = llm.chat([dict(role="user", content="Hi")], dict(max_tokens=1))
    assert out.prompt == "<user> Hi\n" and tok.chat_template == before


@pytest.mark.parametrize("command", ["generate", "run", "plan", "serve"])
def test_what_the_command_line_names_is_looked_at_before_a_model_is(tmp_path, capsys, command):
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9{{ x }}")
    (tmp_path / "dora").mkdir()
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    config = dict(peft_type="LORA", r=32, lora_alpha=16)
    (tmp_path / "dora" / "adapter_config.json").write_text(json.dumps(config | dict(use_dora=True)))
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "adapter_config.json").write_text(json.dumps(config))
    given = dict(
        generate=["Hi"],
        run=["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "o.jsonl")],
        plan=["-i", str(tmp_path / "in.jsonl")],
        serve=["--port", "0"],
    )[command]
    for flags, words in [
        (["--chat-template", str(tmp_path / "nowhere.jinja")], ["--chat-template", "No such file"]),
        (["--chat-template", str(tmp_path / "latin.jinja")], ["--chat-template", "UTF-8"]),
        (["--chat-template", str(tmp_path / "bad.jinja")], ["--chat-template", "line 1", "endfor"]),
        (["--lora-modules", f"a={tmp_path}/nowhere"], ["adapter 'a'", "nowhere"]),
        (["--lora-modules", f"a={tmp_path}/dora"], ["DoRA"]),
        (
            ["--lora-modules", f"a={tmp_path}/big"],
            ["rank of 32", "above --max-lora-rank 16", "give --max-lora-rank 32"],
        ),
        (["--lora-modules", "pirate"], ["--lora-modules", "name=folder"]),
    ]:
        status, err = said(capsys, command, *given, "--model", "no such model", *flags)
        assert (
            status == 2
            and len(err.splitlines()) == 1
            and "no such model" not in err
            and "LLM(" not in err
        ), err
        for w in words:
            assert w in err, err


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--structured-outputs", '{"grammar": "start: missing"}'], ["structured"]),
        (["--structured-outputs", '{"regex": "["}'], ["regex"]),
        (["--stop-token-ids", "99999"], ["99999"]),
        (["--logit-bias", '{"99999": 1}'], ["99999"]),
        (["--max-model-len", "9999999"], ["--max-model-len 9999999"]),
        (
            ["--max-num-seqs", "9", "--max-num-batched-tokens", "3"],
            ["--max-num-batched-tokens 3", "--max-num-seqs 9"],
        ),
        (
            ["--quantization", "int8", "--strategy", "loop"],
            ["--quantization int8", "--strategy continuous"],
        ),
    ],
)
@pytest.mark.parametrize("command", ["generate", "run"])
def test_settings_are_tried_on_the_model_before_a_line_is(
    model, tmp_path, capsys, flags, words, command
):
    pytest.importorskip("llguidance")
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    out = tmp_path / "o.jsonl"
    status, err = said(
        capsys, command, "-i", str(tmp_path / "in.jsonl"), "-o", str(out), "--model", model, *flags
    )
    assert status == 2 and len(err.splitlines()) == 1 and not (out.exists() and out.read_text()), (
        err
    )
    for w in words:
        assert w in err, err


def test_help_without_a_command_and_what_was_meant(capsys):
    from batchlab.cli import main

    assert [main([]), main(["help"]), main(["help", "run"])] == [0, 0, 0]
    assert "--max-tokens" in capsys.readouterr().out
    for given, words in [
        ("rnu", "did you mean run?"),
        ("run-batch", "did you mean run?"),
        ("frobnicate", "expected one of generate"),
    ]:
        status, err = said(capsys, given)
        assert status == 2 and words in err, err
    p = subprocess.run(
        [sys.executable, "-m", "batchlab", "--version"], capture_output=True, text=True, env=ENV
    )
    assert p.returncode == 0 and p.stdout.startswith("batchlab 0"), p.stderr


def test_flags_of_other_engines(model, capsys):
    status, err = said(
        capsys,
        "generate",
        "Hi",
        "--model",
        model,
        "--max-tokens",
        "1",
        "--gpu-memory-utilization",
        "0.5",
        "--enforce-eager",
        "--swap-space=2",
    )
    assert (
        status == 0
        and "without effect here: --gpu-memory-utilization, --enforce-eager, --swap-space" in err
    )
    for flags, words in [
        (["--load-format", "dummy"], "unknown flag --load-format"),
        (["--torch-dtype", "fp32"], "did you mean --dtype?"),
    ]:
        status, err = said(capsys, "generate", "Hi", "--model", model, *flags)
        assert status == 2 and words in err, err
    for flags, words in [
        (["--num-prompts", "10"], "did you mean --scale?"),
        (["--dataset-path", "a.jsonl"], "did you mean --input?"),
        (["--tensor-parallel-size", "2"], "would change nothing here: leave it out"),
    ]:
        status, err = said(capsys, "bench", *flags)
        assert status == 2 and words in err, err


@pytest.mark.parametrize(
    "text, number",
    [("2GB", 2 * 10**9), ("512MiB", 2**29), ("1.5k", 1500), ("700", 700), ("2 gib", 2**31)],
)
def test_bytes_with_units(text, number):
    from batchlab.cli.flags import parse_args

    assert parse_args(["generate", "Hi", "--kv-cache-bytes", text]).kv_cache_bytes == number
    from batchlab.errors import JobError

    with pytest.raises(JobError, match="512MiB"):
        parse_args(["generate", "Hi", "--kv-cache-bytes", "2 GX"])


@posix
@pytest.mark.parametrize(
    "args",
    [
        ["generate", "hi"],
        ["plan", "-i", "in.jsonl"],
        ["run", "-i", "in.jsonl", "--dry-run"],
        ["run", "-i", "in.jsonl", "-o", "-"],
        ["embed", "hi"],
        ["models"],
        ["cache"],
        ["batch", "list"],
        ["bench"],
        ["completion", "bash"],
        ["view", "x.trace"],
    ],
)
def test_closed_standard_output_is_said_before_anything_else(args, capsys, monkeypatch):
    from batchlab.cli import main

    monkeypatch.setattr(sys, "stdout", None)
    assert main(args) == 2
    monkeypatch.undo()
    err = capsys.readouterr().err
    assert (
        err.startswith("batchlab: error: standard output is closed") and len(err.splitlines()) == 1
    )


@posix
def test_a_job_needs_no_standard_streams(model, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    command = f"exec {sys.executable} -m batchlab.cli run -i in.jsonl -o out.jsonl --model {model} --max-tokens 2 <&- >&- 2>&-"
    p = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=ENV, timeout=50)
    assert p.returncode == 0 and len(rows(tmp_path / "out.jsonl")) == 1


@posix
@pytest.mark.parametrize(
    "env",
    [
        dict(PYTHONIOENCODING="ascii"),
        dict(PYTHONIOENCODING="cp1252"),
        dict(LC_ALL="C", PYTHONCOERCECLOCALE="0"),
    ],
    ids=["ascii", "cp1252", "C"],
)
def test_letters_that_standard_output_can_not_write(model, tmp_path, env):
    (tmp_path / "in.csv").write_text("wort\nStraße\n", encoding="utf-8")

    def call(*args):
        return subprocess.run(
            [*CMD, *args, "--model", model, "--max-tokens", "4"],
            capture_output=True,
            cwd=tmp_path,
            env=ENV | env,
            timeout=50,
        )

    p = call("generate", "grüße 日本", "-i", "in.csv", "--prompt-template", "größer {wort}")
    assert p.returncode == 0 and p.stdout.count(b"[") >= 2 and b"\\u65e5" in p.stdout, p.stderr
    p = call(
        "generate",
        "grüße 日本",
        "-i",
        "in.csv",
        "--prompt-template",
        "größer {wort}",
        "-o",
        "o.jsonl",
    )
    assert p.returncode == 0 and [r["prompt"] for r in rows(tmp_path / "o.jsonl")] == [
        "grüße 日本",
        "größer Straße",
    ], p.stderr
    p = call("plan", "-i", "in.csv", "--prompt-template", "größer {wort}", "--no-calibration")
    assert p.returncode == 0 and b"1 request" in p.stdout, p.stderr


def test_a_profile_of_ones_own_file_says_what_costs(model, tmp_path, capsys):
    from batchlab.bench.__main__ import main

    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 3}\n')
    report = tmp_path / "report.json"
    assert (
        main(
            [
                "--profile",
                "--input",
                str(tmp_path / "in.jsonl"),
                "--model",
                model,
                "--dtype",
                "fp32",
                "--json",
                str(report),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "| in.jsonl |" in said and "in.jsonl: " in said.split("| in.jsonl |")[1]
    found = json.loads(report.read_text())
    assert [*found["profile"]] == ["in.jsonl"] and any(
        "% of the time: " in s for s in found["said"]
    )
    for args, words in [
        (["--json", str(tmp_path / "no" / "x.json")], "can't write"),
        (["--frobnicate"], "unknown flag --frobnicate"),
        (["--input", "x"], "is for --profile"),
    ]:
        assert main(args) == 2 and words in capsys.readouterr().err
