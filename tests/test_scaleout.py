"Many engines, one writer: workers that die, and a job that is killed, lose and double nothing."

import asyncio, functools, os, pickle, random, signal, subprocess, sys, threading, time
from pathlib import Path
from types import SimpleNamespace

import psutil, pytest, torch
from hypothesis import given, strategies as st

from batchlab.api import LLM, ray as scaleout
from batchlab.cli import main
from batchlab.jobs.job import Job
from batchlab.jobs.lines import JobLine
from batchlab.jobs.runner import model_digest
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.api.ray import LineQueue, LineWorker, RayJob, RayRun, Tries
import helpers
from helpers import by_line, examples, needs, posix, read_lines, write_lines
from test_embed_work import TEXTS, close, kept_encoder, vectors


def ask(i, **body):
    return helpers.ask(i, **dict(max_tokens=2 + i % 9) | body)


def answers(path):
    "Records by the line that they answer."
    return by_line(read_lines(path))


def mixed(n):
    "Requests, and among them a line that is not JSON, an id twice, a prompt that is too long and a bad parameter."
    bad = '{"custom_id": "torn', ask(3), ask(n, prompt="x" * 9000), ask(n + 1, top_p=7)
    return [ask(i) for i in range(n)] + [*bad]


# Without Ray: what workers return is played


class Played(RayJob):
    "A `RayJob` without Ray: rows come back in any order, and what becomes of one is drawn by `fate`: 'lost', 'twice' or None."

    fate = staticmethod(lambda lines, times: None)

    def start(self, stack):
        limits, template = SimpleNamespace(max_num_seqs=40), SimpleNamespace(chat_template=None)
        settings = SimpleNamespace(strategy="continuous", quantization=None)
        about = dict(settings=settings, engines=SimpleNamespace(weights_digest="w"))
        return SimpleNamespace(limits=limits, tokenizer=template, **about)

    def begin(self, llm, book, outbox):
        return PlayedRun(self, llm, book, outbox)


class PlayedRun(RayRun):
    def results(self, portions, at_once, times):
        rows = [*portions]
        random.Random(0).shuffle(rows)
        for lines in rows:
            fate = self.job.fate(lines, times)
            if fate == "lost":
                yield [], ""
            for _ in range({"twice": 2, "lost": 0}.get(fate, 1)):
                yield [(line.number, played(line)) for line in lines], ""


def played(line):
    if line.options.get("top_p") == 7:
        return scaleout.failure_record(line, "invalid_request", "top_p")
    body = dict(text=line.prompt, usage={})
    return dict(id=line.key, **line.ids, response=dict(status_code=200, body=body), error=None)


@examples(100)
@given(
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0, 0.05, 0.5]),
    ordered=st.booleans(),
    stops=st.integers(0, 2),
    look_ahead=st.sampled_from([16, 1024]),
)
def test_any_order_of_losses(tmp_path_factory, seed, share, ordered, stops, look_ahead):
    d, rng, n = tmp_path_factory.mktemp("played"), random.Random(seed), 60
    write_lines(d / "in.jsonl", mixed(n))
    poison = rng.randrange(n)

    def fate(lines, times):
        if (left := left_to_do[0]) is not None and left <= 0:
            raise KeyboardInterrupt
        left_to_do[0] = left and left - 1
        if any(line.ids["custom_id"] == f"r{poison}" for line in lines):
            return "lost"
        return "lost" if times > 1 and rng.random() < share else rng.choice(["twice", None])

    for left in [rng.randint(1, 30) for _ in range(stops)] + [None]:
        left_to_do = [left]
        job = Played(d / "in.jsonl", d / "out.jsonl", ordered=ordered, look_ahead=look_ahead)
        job.fate, job.use_tqdm = fate, False
        try:
            result = job.run()
        except KeyboardInterrupt:
            assert left
    found = answers(d / "out.jsonl")
    assert len(found) == n + 4 and result.done == n + 4
    if ordered:
        assert [*found] == [*range(1, n + 5)]
    good = {r["custom_id"] for r in found.values() if not r["error"]}
    assert good == {f"r{i}" for i in range(n + 1)} - {f"r{poison}"}
    own = [r["error"] for r in found.values() if r["custom_id"] == f"r{poison}"]
    [why] = [e["message"] for e in own if e["code"] != "duplicate_custom_id"]
    assert "died" in why


def actor(tries):
    "A `Tries` as a worker sees it."

    async def begin(row):
        return tries.begin(row)

    remote = lambda call: SimpleNamespace(remote=call)
    return SimpleNamespace(begin=remote(begin), end=remote(tries.end))


@pytest.mark.parametrize(
    "digest, enough, begun, answers, trouble",
    [
        (None, 9, 0, 1, ""),
        (None, 9, 2, 0, ""),  # begun twice before, it is not begun again
        (None, 1, 1, 0, "workers die"),  # something was begun before, and nothing has ended
        ("other", 9, 0, 0, "different models"),
    ],
)
def test_what_a_worker_runs(folder, digest, enough, begun, answers, trouble):
    engine, tries = ("nowhere", dict(model=folder, dtype="fp32", max_num_seqs=4)), Tries(2)
    own = model_digest(scaleout.engine_facts(*engine))
    for _ in range(begun):
        tries.begin(7)
    worker = LineWorker(Job("-"), engine, digest or own, actor(tries), enough)
    line = JobLine(1, "", prompt="Hi", options=dict(max_tokens=2))
    row = dict(row=7, lines=pickle.dumps([line]))
    records, why = pickle.loads(asyncio.run(worker(row))["result"])
    assert len(records) == answers and bool(why) == bool(trouble) and trouble in why
    assert (tries.since == 0) == bool(answers)


@pytest.mark.parametrize("error, raised", [(OSError, OSError), (SystemExit, RuntimeError)])
def test_what_fails_in_a_queue_fails_all_that_wait(folder, error, raised):
    def fail(out):
        raise error

    async def both():
        lines = [JobLine(n, f"{n}", prompt="Hi", options=dict(max_tokens=2)) for n in (1, 2)]
        return await asyncio.gather(
            *[queue.answer([line]) for line in lines], return_exceptions=True
        )

    queue = LineQueue(Job("-"), LLM(folder, dtype="fp32", max_num_seqs=4))
    queue.collect = lambda: [fail(queue.ended.popleft()) for _ in [*queue.ended]]
    assert [type(e) for e in asyncio.run(both())] == [raised] * 2
    queue.llm.stop()


# On Ray: real workers, killed for real


def ray_children(p):
    "Processes of Ray's under `p`: those that work, and helpers, which look for the others for a minute after a kill."
    found = [
        c
        for c in p.children(recursive=True)
        if c.name() in ("raylet", "gcs_server") or c.name().startswith("ray::")
    ]
    return [c for c in found if "Agent" not in c.name()], [c for c in found if "Agent" in c.name()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", num_hidden_layers=1).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def on_ray(folder, tmp_path_factory):
    "A `RayJob` with two workers; afterwards none of Ray's processes may be left, and their prefixes are."
    needs("ray")
    os.environ["OMP_NUM_THREADS"] = "1"
    d, before = tmp_path_factory.mktemp("shared"), os.getcwd()
    llm = dict(model=folder, dtype="fp32", max_num_seqs=4, prefix_store="store")  # from there
    os.chdir(d)
    with scaleout.ray_session(num_cpus=2):
        more = dict(num_cpus=1, llm=llm, model_name=Path(folder).name, use_tqdm=False)
        yield functools.partial(RayJob, **more)
        write_lines("in.jsonl", [ask(i, prompt=[*range(5, 205), 9 + i]) for i in range(8)])
        assert RayJob("in.jsonl", "out.jsonl", workers=1, **more).run().answered == 8
        work, helpers = ray_children(psutil.Process())
        assert len(work) > 3
    assert psutil.wait_procs(work + helpers, timeout=60)[1] == []
    reads_what_workers_stored(d, llm)
    os.chdir(before)


def reads_what_workers_stored(d, llm):
    "This process finds in the folder what the workers have written to it, and answers as they did."
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have it
    beside = LLM(**llm)
    beside.engines.store.costs.worth = lambda: True  # a tiny model is computed at once
    job = Job(d / "in.jsonl", d / "beside.jsonl", model_name=Path(llm["model"]).name)
    assert job.run(beside).answered == 8 and beside.stats().loaded_blocks >= 3
    assert answers(d / "beside.jsonl") == answers(d / "out.jsonl")
    beside.close()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    "A file of requests, and what `Job` makes of it with one engine, by the name of the folder."
    d, before = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)
    write_lines(d / "in.jsonl", mixed(400))
    llm = LLM(folder, dtype="fp32", max_num_seqs=4)
    job = Job(d / "in.jsonl", d / "out.jsonl", model_name=Path(folder).name)
    assert job.run(llm).failed == 4
    torch.set_num_threads(before)
    return d / "in.jsonl", answers(d / "out.jsonl")


def lines_in(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(path, n, alive=lambda: True):
    end = time.time() + 240
    while lines_in(path) < n and time.time() < end and alive():
        time.sleep(0.002)


@posix
def test_same_answers_by_two_workers_one_of_which_is_killed_and_a_line_that_kills(
    on_ray, alone, tmp_path
):
    "The line ends itself alone."
    (name, expected), out, killed = alone, tmp_path / "out.jsonl", []

    def kill():
        wait_for_lines(out, 50)
        while not killed:
            killed.extend(p for p in ray_children(psutil.Process())[0] if "LineW" in p.name())
        killed[0].kill()

    def poison(out):
        if out.prompt.startswith("tell me 7 "):
            os.kill(os.getpid(), signal.SIGKILL)
        return len(out.outputs[0].token_ids)

    killer = threading.Thread(target=kill)
    killer.start()
    result = on_ray(name, out, ordered=True, postprocess=poison).run()
    killer.join()
    assert (result.answered, result.failed) == (399, 5) and not killed[0].is_running()
    found, expected = answers(out), dict(expected)
    assert [*found] == sorted(found)
    bad = found[8]["error"]
    assert bad["code"] == "server_error" and "died" in bad["message"]
    expected[8] = found[8]
    for r in found.values():
        for choice in ((r["response"] or {}).get("body") or {}).get("choices", ()):
            made = r["response"]["body"]["usage"]["completion_tokens"]
            assert choice.pop("results") == dict(result=made)
    assert found == expected


@pytest.fixture
def program(folder, tmp_path):
    "A function that starts a command of batchlab with a worker of its own, in `tmp_path`."

    def start(command):
        more = f"--model {folder} --dtype fp32 --max-num-seqs 4 --ray 1 --ray-cpus 1"
        return subprocess.Popen(
            [sys.executable, "-m", "batchlab.cli", *command.split(), *more.split()],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


@posix
@pytest.mark.parametrize("ctrl_c", [False, True])
def test_everything_ended_and_resumed(
    on_ray, folder, alone, tmp_path, program, ctrl_c, capsys, one_thread
):
    "No worker goes on without the one who writes; meanwhile nobody else may write. Workers go on, or one engine."
    (name, expected), out = alone, tmp_path / "out.jsonl"
    p = program(f"run -i {name} -o out.jsonl")
    wait_for_lines(out, 40, lambda: p.poll() is None)
    assert main(["run", "-i", str(name), "-o", str(out), "--ray", "1"]) == 2
    assert "another run is writing" in capsys.readouterr().err
    work, helpers = ray_children(psutil.Process(p.pid))
    os.killpg(p.pid, signal.SIGINT) if ctrl_c else p.kill()
    _, said = p.communicate(timeout=120)
    assert work and not psutil.wait_procs(work, timeout=60)[1], said
    for c in psutil.wait_procs(helpers, timeout=1)[1]:
        c.kill()
    assert not ctrl_c or p.returncode == 130 and "the same command goes on" in said
    kept = out.read_bytes()
    assert 40 <= kept.count(b"\n") < 404
    if ctrl_c:
        llm = LLM(folder, dtype="fp32", max_num_seqs=4)
        result = Job(name, out, model_name=Path(folder).name).run(llm)
    else:
        result = on_ray(name, out, workers=1).run()
    assert result.before >= kept.count(b"\n") and result.done == 404
    assert answers(out) == expected
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])


RUN = "run -i in.jsonl -o out.jsonl"


@pytest.mark.parametrize(
    "more, words",
    [
        ("--ray 1 --ray-cpus 1 --ray-gpus 1", "take fewer"),
        ("--ray 1 --ray-cpus 1 --model nowhere/nothing", "nowhere/nothing"),
        ("--ray 1 -i .", "run it for each file of the folder"),
    ],
)
def test_what_can_not_run_on_ray(on_ray, tmp_path, capsys, monkeypatch, more, words):
    monkeypatch.chdir(tmp_path)
    write_lines("in.jsonl", [ask(1)])
    assert main([*RUN.split(), *more.split()]) == 2
    assert words in capsys.readouterr().err and not Path("out.jsonl").exists()


def test_vectors_by_a_worker(on_ray, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = kept_encoder(tmp_path / "encoder")
    # the last is longer than the model takes
    rows = [*TEXTS, *(f"text {'and more ' * (i % 7)}{i}" for i in range(40)), "z" * 200]
    Path("in.txt").write_text("\n".join(rows))
    command = f"embed -i in.txt -o out.jsonl --model {model} --ray 1 --ray-cpus 1"
    assert main(command.split()) == 1
    assert "46 of 46 requests done, 1 failed" in capfd.readouterr().err
    *found, last = read_lines("out.jsonl")
    assert [r["line"] for r in found] == [*range(1, 46)] and last["line"] == 46
    assert "the model takes" in last["error"]["message"] and last["embedding"] is None
    close([r["embedding"] for r in found], vectors(LLM(model, compile=False), rows[:-1]))


def test_a_cluster_that_is_not_there_is_named_at_once():
    with pytest.raises(scaleout.JobError, match="127.0.0.1:1"):
        scaleout._start(None, "ray://127.0.0.1:1", {})


def test_no_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    write_lines("in.jsonl", [ask(1)])
    assert main([*RUN.split(), "--ray", "2"]) == 2
    assert "pip install 'batchlab[ray]'" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


def test_what_is_gone_says_what_to_do(capsys):
    assert main("serve --data data --ray 2".split()) == 2
    assert "batchlab run --ray" in capsys.readouterr().err


# Rows of Ray Data


@pytest.mark.parametrize(
    "row, names, options",
    [
        (
            dict(max_completion_tokens=3, timeout=2, text="x"),
            ["max_completion_tokens"],
            dict(max_tokens=3),
        ),
        (dict(max_completion_tokens=3, temperature=36.6, n=2), [], {}),
        (dict(guided_choice=["x"]), ["guided_choice"], dict(structured_outputs=dict(choice=["x"]))),
    ],
)
def test_rows_of_a_batch_are_read_as_those_of_tables(row, names, options):
    assert scaleout.line_of_row(1, dict(prompt="a") | row, setting_columns=names).options == options


@pytest.mark.parametrize("row, word", [(dict(max_tokns=4), "max_tokens"), (dict(n=2), "several")])
def test_a_row_of_a_batch_that_can_not_run(row, word):
    _, why = scaleout.line_of_row(1, dict(prompt="a") | row, setting_columns=[*row]).failure
    assert word in why
