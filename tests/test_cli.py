"`batchlab` in processes of its own, with a tiny model: pipes, signals, exit statuses."

import gzip, json, os, shlex, signal, subprocess, sys
import pytest

from helpers import (
    ENV,
    ask,
    but_compiler,
    ended_by,
    kept_model,
    needs,
    posix,
    python,
    read_lines,
    run,
    tiny_llm,
    write_lines,
)
from warm import warm

from batchlab.machine import signals_held, signals_to
from batchlab.cli import kind_in, main, told
from batchlab.cli.flags import COMMANDS, parse_args, parser_of
from batchlab.errors import JobError

CMD = [sys.executable, "-m", "batchlab"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return kept_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def batchlab(tmp_path):
    "Run the command in a process of its own."
    return lambda *args, **how: warm([*CMD, *args], tmp_path, ENV, **how)


@pytest.fixture
def cli(batchlab, model):
    "Run `generate` so, with the model and six tokens."
    return lambda *args, **how: batchlab(
        "generate", *args, "--model", model, "--max-tokens", "6", **how
    )


@pytest.fixture
def refuses(said):
    "That the command `args`, words or a text of them, ends with status 2 and one line that has all of `words`, several divided by &."

    def check(args, words):
        status, err = said(*(args.split() if isinstance(args, str) else args))
        assert status == 2 and len(err.splitlines()) == 1, err
        assert err.startswith("batchlab: error: "), err
        assert all(w in err for w in words.split(" & ")), err

    return check


@pytest.fixture
def said(capsys):
    "The exit status of a command in this process, and what it says on standard error."
    return lambda *args, **kw: (main([*args], **kw), capsys.readouterr().err)


def fails_in_one_line(p, status, *words):
    assert p.returncode == status, p.stderr
    err = but_compiler(p.stderr)
    assert len(err.splitlines()) == 1 and err.startswith("batchlab: error: "), err
    assert all(w in err for w in words), err


@pytest.mark.parametrize(
    "calls, status, errors",
    [
        (["--help", "generate --help", "--version"], 0, 0),
        (["run", "run -i x", "generate --frobnicate", "genrate"], 2, 4),
        (["run -i in.csv --dry-run --prompt-template {lang}"], 1, 0),
    ],
    ids=["help", "mistakes", "check"],
)
def test_what_needs_no_model_needs_no_torch(tmp_path, calls, status, errors):
    (tmp_path / "in.csv").write_text("id,lang\n1,de\n2,\n")
    code = (
        f"import sys; from batchlab.cli import main; s = [main(a.split()) for a in {calls}]; "
        f"assert s == [{status}] * len(s) and not {{'torch', 'transformers'}} & {{*sys.modules}}"
    )
    p = python(code, cwd=tmp_path)
    assert p.returncode == 0, p.stderr
    assert p.stderr.count("batchlab: error: ") == len(p.stderr.splitlines()) == errors
    assert status != 1 or "row 2: column 'lang' is empty" in p.stdout


def test_a_field_is_a_flag():
    "Each setting, argument of an engine and field of a job that has a comment, once."
    from batchlab.cli.flags import class_fields

    flags = {c: [a.dest for a in parser_of(c)._actions] for c in COMMANDS if c != "bench"}
    job = {"JobFields": "jobs/fields.py"}
    for classes, command, less in (
        ({"SamplingParams": "core/params.py"}, "generate", "prompt_logprobs detokenize stop_until"),
        (
            {"LLMSettings": "llm/settings.py"},
            "serve",
            "tokenizer trace logprobs_mode pooler_config",
        ),
        (job, "run", "sampling_params model_name say spell"),
    ):
        every = [f for part, path in classes.items() for f in class_fields(path, part)]
        found = {f.name for f in every if f.text} - {*less.split()}
        assert len(found) > 15 and found - {*flags[command]} <= {"prompt_logprob_start"}
    assert flags["embed"].count("prompt_column") == flags["plan"].count("input") == 1


def test_the_help_says_which_model_is_fetched_unless_one_is_given(monkeypatch):
    from batchlab.models.fetch import DEFAULT_EMBEDDING_MODEL, TEXT_WHEEL

    monkeypatch.setenv("COLUMNS", "300")  # whole names
    texts = {c: " ".join(parser_of(c).format_help().split()) for c in ("generate", "plan", "embed")}
    mine = f"{TEXT_WHEEL.model}, {TEXT_WHEEL.nbytes / 1e6:.0f} MB"
    assert mine in texts["generate"] and mine in texts["plan"] and mine not in texts["embed"]
    assert DEFAULT_EMBEDDING_MODEL in texts["embed"]


def test_text_on_a_pipe(model):
    "From an interpreter of its own, whose imports say nothing, and leave out what is not used."
    words = ["generate", "a", "a longer prompt", "é", "--model", model, "--max-tokens", "6"]
    words += ["--ignore-eos"]
    how = dict(encoding="utf-8", capture_output=True, timeout=50)
    code = """if True:
        import sys, torch; from batchlab.cli import main
        assert not main()
        late = {"torch._dynamo.eval_frame", "torch.distributed.tensor._api"}
        assert not late & {*sys.modules} and torch.distributed.is_available()
        assert torch.compile(torch.sign, backend="eager")(torch.ones(1)) == 1
        assert late & {*sys.modules}
    """
    p = subprocess.run([sys.executable, "-c", code, *words], env=ENV, **how)
    cut = "batchlab: 3 of 3 requests ended at max_tokens: raise --max-tokens for more\n"
    assert (p.returncode, but_compiler(p.stderr)) == (0, cut)
    want = ["[1] a", "[2] a longer prompt", "[3] é"]
    assert [s for s in p.stdout.split("\n") if s in want] == want


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
    out = read_lines(tmp_path / "out.jsonl")
    said = but_compiler(p.stderr).splitlines()  # the blank line; what was cut; the failures
    assert p.returncode == 1 and len(said) == 3, p.stderr
    assert "5 of 8 requests failed" in p.stderr and "line 2" in p.stderr
    assert [r["index"] for r in out] == [*range(8)]
    failed = {1: 2, 2: 4, 4: 6, 5: 7, 6: 8}  # {index: line}
    assert {i for i, r in enumerate(out) if r["error"]} == {*failed}
    assert all(out[i]["error"].startswith(f"line {line}: ") for i, line in failed.items())
    assert (out[0]["id"], out[3]["custom_id"]) == ("x", "c")
    assert out[3]["usage"]["completion_tokens"] <= 2
    assert out[7]["usage"]["completion_tokens"] == 6
    assert out[7]["text"] == out[7]["outputs"][0]["text"]


def test_jsonl_on_standard_output(cli, tmp_path):
    p = cli("a", "b", "--output", "-")
    assert p.returncode == 0 and not (tmp_path / "-").exists()
    assert [json.loads(line)["prompt"] for line in p.stdout.splitlines()] == ["a", "b"]


def test_standard_input_and_samples(cli, tmp_path):
    how = "--prompts-file - --output o.jsonl --do-sample --seed 3 --n 2 --logprobs 1".split()
    p = cli(*how, input="one\r\n\ntwo words\n")
    assert p.returncode == 0
    assert p.stderr.count("batchlab: standard input: 1 blank line skipped\n") == 1
    out = read_lines(tmp_path / "o.jsonl")
    assert [r["prompt"] for r in out] == ["one", "two words"]
    assert [len(r["outputs"]) for r in out] == [2, 2]
    for c in out[1]["outputs"]:
        assert len(c["logprobs"]) == len(c["token_ids"])


def test_prompts_come_before_those_of_a_file_and_a_chat_keeps_its_prompt(cli, tmp_path):
    talk = [dict(role="user", content="d")]
    write_lines(tmp_path / "in.jsonl", [dict(prompt="c", custom_id="x"), dict(messages=talk)])
    write_lines(tmp_path / "ids.jsonl", [dict(prompt=[5, 6], custom_id="x")] * 2)
    p = cli("a", "-i", "in.jsonl", "--chat", "--output", "o.jsonl", "--verify", "--prompts", "b")
    assert p.returncode == 0 and "4 requests" in p.stderr, p.stderr
    out = read_lines(tmp_path / "o.jsonl")
    assert [r.get("prompt") for r in out] == ["a", "b", "c", None] and out[3]["messages"] == talk
    assert out[2]["custom_id"] == "x"
    p = cli("-i", "ids.jsonl", "--chat", "--output", "two.jsonl")
    assert p.returncode == 1 and "2 of 2" in p.stderr
    assert cli("-i", "ids.jsonl", "--output", "three.jsonl").returncode == 0  # ids may come twice


TORN = gzip.compress(b"{}")[:10] + b"\xff" * 9  # no stream behind its head
MISTAKES = {
    "generate a --max-tokens 0": "--max-tokens",
    "generate a --temperature -0.1": "--temperature",
    "generate a --top-p 1.01": "--top-p",
    "generate a --top_p 1": "--top_p & did you mean --top-p?",
    "generate a --logit-bias {": "JSON",
    "generate a --stop-token-ids x": "token ids",
    "generate": "standard input",
    "generate --prompts-file nowhere": "nowhere & no such file",
    "generate --prompts-file empty": "empty & no prompts",
    "generate --prompts-file latin": "UTF-8 & line 2",
    "generate a --system x": "--chat",
    "generate a --output no/dir/o.jsonl": "can't write no/dir/o.jsonl",
    "generate a --output latin": "--overwrite",
    "generate a --device tpu": "tpu",
    "generate a --trace latin": "is no trace",
    "generate a --trace .": "no file",
    "run -i in -o o --trace in": "read or written already",
    "generate a --do-sample --temperature 0": "contradict",
    "generate a --model no/such/model": "no/such/model",
    "generate a --guided-choice x": "--structured-outputs",
    "generate a --json x": "--structured-outputs",
    "generate a --max-tokns x": "--max-tokens",
    "generate a --frobnicate x": "unknown flag --frobnicate (see",
    "generate a --torch-dtype fp32": "did you mean --dtype?",
    "bench --num-prompts 10": "did you mean --scale?",
    "bench --tensor-parallel-size 2": "leave it out",
    "rnu": "did you mean run?",
    "run-batch": "did you mean run?",
    "frobnicate": "generate",
    "run -i nowhere -o o": "can't read nowhere",
    "run -i torn.gz -o o": "can't read torn.gz & mend the file",
    "run -i in": "--output",
    "run -i in -o in": "different files",
    "run -i in -o no/dir/o": "can't write no/dir/o",
    "run -i in -o .": "no file",
    "run -i in -o o --timeout 0": "--timeout",
    "run -i in -o o --retry": "--retry & did you mean --retry-errors?",
    "run -i in -o o --chat": "plain prompts",
    "run -i in -o - --error-file e": "standard output is not kept",
    "run -i in -o - --ray 2": "--ray takes files",
    "run -i . -o o": "run it for each file of the folder",
    'run -i in -o o --structured-outputs {"regx":"a"}': "--structured-outputs",
    "run -i in -o o --top-p 0": "--top-p",
    "run -i in -o o --model no/such/model": "no/such/model",
    "serve --data data --ray 2": "batchlab run --ray",
}


@pytest.mark.parametrize("args, words", MISTAKES.items())
def test_mistakes_are_one_line(tmp_path, args, words, refuses, monkeypatch):
    (tmp_path / "empty").write_bytes(b"\n \n")
    (tmp_path / "latin").write_bytes(b"ok\n\xe9\n")
    (tmp_path / "torn.gz").write_bytes(TORN)
    write_lines(tmp_path / "in", [ask(1)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    refuses(args, words)
    assert (tmp_path / "latin").read_bytes() == b"ok\n\xe9\n"
    assert sorted(os.listdir()) == ["empty", "in", "latin", "torn.gz"]


def test_what_comes_through_a_pipe_is_known_by_its_beginning(tmp_path):
    kinds = {gzip.compress(b"{}"): ".jsonl.gz", b"PAR1": ".parquet", b"[{": ".json", b"a": ".txt"}
    for data, kind in kinds.items():
        (tmp_path / "pipe").write_bytes(data)
        assert kind_in(tmp_path / "pipe", True, None) == kind
    for torn in (TORN, TORN[:5]):
        (tmp_path / "pipe").write_bytes(torn)
        with pytest.raises(JobError, match="mend the file"):
            kind_in(tmp_path / "pipe", True, None)


def test_overwrite_only_when_asked_and_able(cli, batchlab, tmp_path):
    (tmp_path / "o.jsonl").write_text("old\n")
    fails_in_one_line(cli("a", "--output", "o.jsonl"), 2, "already there")
    args = ["a", "--output", "o.jsonl", "--overwrite"]
    fails_in_one_line(batchlab("generate", *args, "--model", "no such model"), 2)
    assert (tmp_path / "o.jsonl").read_text() == "old\n"
    assert cli(*args).returncode == 0
    assert [r["prompt"] for r in read_lines(tmp_path / "o.jsonl")] == ["a"]


def test_bad_prompts_fail_alone(cli, tmp_path):
    p = cli("a", "", "x" * 100_000, "b", "--output", "o.jsonl")
    out = read_lines(tmp_path / "o.jsonl")
    assert p.returncode == 1 and len(out) == 4
    assert "100,000 characters" in out[2]["error"] and out[2]["finish_reason"] == "error"
    assert [out[i]["error"] for i in (0, 1, 3)] == [None] * 3
    assert out[3]["outputs"][0]["text"] is not None
    assert out[1]["prompt"] == "" and out[1]["usage"] == dict(prompt_tokens=1, completion_tokens=6)
    assert "an empty prompt starts from token 1 (<bos>)" in p.stderr


@posix
def test_full_disk_is_one_line(cli):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full, the device that is always full")
    fails_in_one_line(cli("a", "b", "--output", "/dev/full"), 1, "can't write /dev/full", "0 of 2")
    with open("/dev/full", "w") as full:
        p = cli("a", "b", stdout=full.fileno())
    fails_in_one_line(p, 1, "can't write standard output")


@posix
def test_reader_leaves(cli):
    r, w = os.pipe()
    os.close(r)
    p = cli("a", "b", stdout=w)
    os.close(w)
    assert (p.returncode, but_compiler(p.stderr)) == (1, "")


@posix
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_what_is_finished(model, tmp_path, sig):
    (tmp_path / "p.txt").write_text("\n".join("word " * (i % 7 + 1) for i in range(3000)))
    out = tmp_path / "o.jsonl"
    args = "-i p.txt --output o.jsonl --ignore-eos --max-tokens 20 --max-num-seqs 4".split()
    p = ended_by(sig, [*CMD, "generate", *args, "--model", model], tmp_path, out)
    done = read_lines(out)
    assert p.returncode == 130 and 0 < len(done) < 3000, p.stderr
    assert but_compiler(p.stderr).splitlines() == [
        f"batchlab: interrupted: {len(done)} of 3000 requests finished, they are in o.jsonl"
    ]
    assert len({r["index"] for r in done}) == len(done) and all(r["error"] is None for r in done)


def test_what_waits_for_its_turn_is_written_at_an_interrupt(tmp_path):
    def once():
        if llm.stats().requests:
            raise KeyboardInterrupt
        return step()

    llm = tiny_llm(max_num_seqs=4)
    step, llm.loop.step = llm.loop.step, once
    long = dict(prompt="a", max_tokens=99, ignore_eos=True)
    write_lines(tmp_path / "in.jsonl", [long, dict(prompt="b", max_tokens=1)])
    files = "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "o.jsonl")
    assert main(["generate", *files], llm) == 130
    assert [r["index"] for r in read_lines(tmp_path / "o.jsonl")] == [1]


def test_a_signal_waits_for_a_record_that_is_being_written():
    written = []
    with pytest.raises(KeyboardInterrupt), signals_to(), signals_held():
        signal.raise_signal(signal.SIGTERM)
        written.append(1)
    assert written


def test_two_commands_read_a_plain_line_alike(cli, batchlab, model, tmp_path):
    "A setting is used or fails its line; content may come in parts, from a developer, beside an owner's NaN."
    parts = [dict(type="text", text=t) for t in ("Hello", "world")]
    talk = lambda role, said: [
        dict(role=role, content="Be brief."),
        dict(role="user", content=said),
    ]
    lines = [
        dict(prompt="a", max_completion_tokens=2, ignore_eos=True, topic="x"),
        dict(prompt="b", tools=[{}]),
        dict(prompt="c", sampling_params=dict(max_tokens=3), ignore_eos=True),
        dict(prompt="d", num_beams=2),
        dict(messages=talk("developer", parts), topic=float("nan")),
        dict(messages=talk("system", "Hello\nworld")),
    ]
    write_lines(tmp_path / "in.jsonl", lines)
    p = cli("--prompts-file", "in.jsonl", "--output", "one.jsonl")
    how = ["--ordered", "--max-tokens", "6", "--model", model]
    q = batchlab("run", "-i", "in.jsonl", "-o", "two.jsonl", *how)
    assert p.returncode == q.returncode == 1
    assert p.stderr.count("keys without meaning here, ignored: topic\n") == 1, p.stderr
    assert "ignored" not in q.stderr, q.stderr
    both = one, two = [read_lines(tmp_path / name) for name in ("one.jsonl", "two.jsonl")]
    for out in both:
        lengths = [r["usage"]["completion_tokens"] for r in out if not r["error"]]
        assert lengths[:2] == [2, 3] and len(lengths) == 4 and "tools=[{}]" in str(out[1]["error"])
        assert "give it to transformers' generate" in str(out[3]["error"])
    assert two[0]["topic"] == "x" and len({r["text"] for out in both for r in out[4:]}) == 1


@pytest.mark.parametrize("command", ["run", "generate"])
def test_what_is_said_for_programs_is_json(batchlab, model, tmp_path, command):
    write_lines(tmp_path / "in.jsonl", [dict(prompt=p) for p in ("one two three", "one two", 5)])
    how = ["-o", "out.jsonl", "--model", model, "--max-tokens", "4", "--log-json"]
    p = batchlab(command, "-i", "in.jsonl", *how)
    said = [json.loads(s) for s in p.stderr.splitlines()]
    assert p.returncode == 1 and all({"time", "level", "message"} <= d.keys() for d in said), (
        p.stderr
    )
    [last] = [d for d in said if "total" in d]
    counts = [last[k] for k in ("total", "answered", "failed", "seconds_left")]
    assert counts == [3, 2, 1, 0.0], last
    assert last["prompt_tokens"] > last["cached_tokens"] >= 0 and last["output_tokens"] <= 8


def test_a_mistake_is_json_too(said):
    status, err = said("run", "-i", "nowhere.jsonl", "-o", "out.jsonl", "--log-json")
    [line] = [json.loads(s) for s in err.splitlines()]
    assert status == 2 and line["level"] == "error" and "nowhere.jsonl" in line["message"]


def test_out_of_memory_is_one_line(capsys):
    assert told(MemoryError()) == 1 and "--max-num-seqs" in capsys.readouterr().err


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize("form", ["file", "text"])
@pytest.mark.parametrize("command", ["generate", "run"])
def test_a_chat_template_of_ones_own(model, tmp_path, said, form, command):
    from batchlab.models.tiny import tiny_tokenizer

    (tmp_path / "own.jinja").write_text(TEMPLATE, encoding="utf-8")
    given = str(tmp_path / "own.jinja") if form == "file" else TEMPLATE
    write_lines(tmp_path / "in.jsonl", [dict(prompt="Hi there")])
    want = len(tiny_tokenizer()("<user> Hi there\n")["input_ids"])
    files = "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "o.jsonl"), "--model", model
    status, err = said(command, *files, "--chat", "--max-tokens", "2", "--chat-template", given)
    assert status == 0, err
    assert read_lines(tmp_path / "o.jsonl")[0]["usage"]["prompt_tokens"] == want


def test_a_template_belongs_to_the_llm_that_it_was_given():
    from batchlab.api import LLM
    from batchlab.models.tiny import tiny_model, tiny_tokenizer

    tok = tiny_tokenizer()
    before = tok.chat_template
    llm = LLM(tiny_model("llama"), tok, chat_template=TEMPLATE, compile=False)
    [out] = llm.chat([dict(role="user", content="Hi")], dict(max_tokens=1))
    assert out.prompt == "<user> Hi\n" and tok.chat_template == before


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--chat-template nowhere.jinja", "--chat-template & No such file"),
        ("--chat-template latin.jinja", "--chat-template & UTF-8"),
        ("--chat-template bad.jinja", "--chat-template & line 1 & endfor"),
        ("--lora-modules a=nowhere", "adapter 'a' & nowhere"),
        ("--lora-modules a=./dora", "DoRA"),
        ("--lora-modules a=./big", "32 & --max-lora-rank 16 & --max-lora-rank 32"),
        ("--lora-modules pirate", "--lora-modules & name=folder"),
    ],
)
@pytest.mark.parametrize(
    "command", ["generate Hi", "run -i in.jsonl -o o.jsonl", "plan -i in.jsonl", "serve --port 0"]
)
def test_what_the_command_line_names_is_looked_at_before_a_model_is(
    tmp_path, monkeypatch, refuses, command, flag, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9{{ x }}")
    write_lines(tmp_path / "in.jsonl", [dict(prompt="Hi")])
    config = dict(peft_type="LORA", r=32, lora_alpha=16)
    for name, more in (("dora", dict(use_dora=True)), ("big", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config | more))
    refuses(f"{command} --model no/such/model {flag}", words)


@pytest.mark.parametrize(
    "flags, words",
    [
        ('--structured-outputs {"grammar":"start:missing"}', "structured"),
        ('--structured-outputs {"regex":"["}', "regex"),
        ("--stop-token-ids 99999", "99999"),
        ('--logit-bias {"99999":1}', "99999"),
        ("--max-model-len 9999999", "--max-model-len 9999999"),
        (
            "--max-num-seqs 9 --max-num-batched-tokens 3",
            "--max-num-batched-tokens 3 & --max-num-seqs 9",
        ),
        (
            "--quantization int8 --strategy loop",
            "--quantization int8 & --strategy continuous",
        ),
    ],
)
@pytest.mark.parametrize("command", ["generate", "run"])
def test_settings_are_tried_on_the_model_before_a_line_is(
    model, tmp_path, refuses, flags, words, command
):
    needs("llguidance")
    write_lines(tmp_path / "in.jsonl", [dict(prompt="Hi")])
    out = tmp_path / "o.jsonl"
    files = "-i", str(tmp_path / "in.jsonl"), "-o", str(out), "--model", model
    refuses([command, *files, *flags.split()], words)
    assert not (out.exists() and out.read_text())


def test_help_without_a_command(capsys):
    assert [main([]), main(["help"]), main(["help", "run"])] == [0, 0, 0]
    assert "--max-tokens" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["batchlab", "batchlab.cli"])
def test_the_command_is_a_module_too(module):
    p = run(sys.executable, "-m", module, "--version")
    assert p.returncode == 0 and p.stdout.startswith("batchlab 0"), p.stderr


def test_a_model_without_a_template_is_refused_before_it_is_loaded(tmp_path, refuses, monkeypatch):
    from batchlab.models import tiny_gguf, tiny_tokenizer

    (tmp_path / "in.txt").write_text("a\n")
    monkeypatch.setattr("batchlab.cli.load_llm", lambda args: pytest.fail("it is loaded"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    file = tiny_gguf(tmp_path / "base.gguf")
    file.write_bytes(
        file.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_tem_late")
    )
    for model in (tmp_path / "base", file):
        run = ["run", "-i", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", "--chat"]
        words = f"{model} & has no chat template & --chat-template"
        refuses([*map(str, run), "--model", str(model)], words)
        refuses(["generate", "a", "--chat", "--model", str(model)], words)


@pytest.mark.parametrize(
    "text, number",
    [("2GB", 2 * 10**9), ("512MiB", 2**29), ("1.5k", 1500), ("700", 700), ("2 gib", 2**31)],
)
def test_bytes_with_units(text, number):
    assert parse_args(["generate", "Hi", "--kv-cache-bytes", text]).kv_cache_bytes == number
    with pytest.raises(JobError, match="512MiB"):
        parse_args(["generate", "Hi", "--kv-cache-bytes", "2 GX"])


@posix
@pytest.mark.parametrize(
    "args",
    [
        "generate hi",
        "plan -i in.jsonl",
        "run -i in.jsonl --dry-run",
        "run -i in.jsonl -o -",
        "embed hi",
        "bench",
        "view x.trace",
    ],
)
def test_closed_standard_output_is_said_before_anything_else(args, refuses, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    refuses(args, "standard output is closed")


@posix
def test_a_job_needs_no_standard_streams(model, tmp_path):
    write_lines(tmp_path / "in.jsonl", [dict(prompt="Hi")])
    files = "-i", "in.jsonl", "-o", "out.jsonl", "--model", model
    command = shlex.join([sys.executable, "-m", "batchlab.cli", "run", *files, "--max-tokens", "2"])
    p = subprocess.run(
        ["sh", "-c", f"exec {command} <&- >&- 2>&-"], cwd=tmp_path, env=ENV, timeout=50
    )
    assert p.returncode == 0 and len(read_lines(tmp_path / "out.jsonl")) == 1


@posix
def test_letters_that_standard_output_can_not_write(model, tmp_path):
    "Three commands for each of three encodings of standard output, in one interpreter: that of its locale comes first."
    (tmp_path / "in.csv").write_text("wort\nStraße\n", encoding="utf-8")
    how = ["-i", "in.csv", "--prompt-template", "größer {wort}", "--model", model]
    how += ["--max-tokens", "4"]
    prompt, plan = ["generate", "grüße 日本", *how], ["plan", "--no-calibration", *how]
    calls = {e: [prompt, [*prompt, "-o", e], plan] for e in ("C", "ascii", "cp1252")}
    code = (
        "import json, sys; from batchlab.cli import main\n"
        "for e, calls in json.loads(sys.argv[1]).items():\n"
        "    if e != 'C': sys.stdout.reconfigure(encoding=e, errors='strict')\n"
        "    for a in calls: assert main(a) == 0; print('\\f', end='')"
    )
    command = [sys.executable, "-c", code, json.dumps(calls)]
    env = ENV | dict(LC_ALL="C", PYTHONCOERCECLOCALE="0")
    p = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=50)
    assert p.returncode == 0, p.stderr
    said = p.stdout.split(b"\f")
    for name, shown, plan in zip(calls, said[:9:3], said[2::3], strict=True):
        assert shown.count(b"[") >= 2 and b"\\u65e5" in shown and b"1 request" in plan
        answered = [r["prompt"] for r in read_lines(tmp_path / name)]
        assert answered == ["grüße 日本", "größer Straße"]


def test_a_variable_of_the_environment_that_is_misspelt_is_said(monkeypatch, capsys):
    monkeypatch.setenv("BATCHLAB_APIKEY", "secret")
    monkeypatch.setenv("BATCHLAB_NODE", "of somebody else")
    assert main(["view", "no_such_file"]) == 2
    said, error = capsys.readouterr().err.splitlines()
    assert "BATCHLAB_APIKEY" in said and "BATCHLAB_API_KEY" in said and "no_such_file" in error
