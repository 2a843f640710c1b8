"Many engines, one writer: workers that die, hang or answer late, and a job that is killed, lose and double nothing."

import functools, json, os, random, signal, subprocess, sys, threading, time
from pathlib import Path
from types import SimpleNamespace

import psutil, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

from batchlab.jobs import ray as scaleout
from batchlab.cli import main
from batchlab.api import LLM
from batchlab.serve.batches import (
    ENDED,
    BatchRunner,
    BatchStore,
    create_file,
    get_batch,
    open_file,
    show_batch,
)
from batchlab.serve.workers import BatchWorkers
from batchlab.jobs.job import Job, JobError
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.jobs.ray import Pool, RayJob, WorkerHandle, WorkerInfo

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def ask(i, **body):
    body = (
        dict(prompt=f"tell me {i} " + "more " * (i % 6), max_tokens=2 + i % 9, temperature=0) | body
    )
    return dict(custom_id=f"r{i}", method="POST", url="/v1/completions", body=body)


def write(path, rows):
    Path(path).write_bytes(
        b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows)
    )


def job_in(folder, **kw):
    "A job for the requests of `in.jsonl` in `folder`, whose answers are in `out.jsonl`."
    return RayJob(folder / "in.jsonl", folder / "out.jsonl", **kw)


def by_id(path):
    "Records by the line that they answer, each once, without what a clock or a cache puts in."
    found = {}
    for s in Path(path).read_text(encoding="utf-8").splitlines():
        d = json.loads(s)
        for k in ("created", "usage"):
            (d["response"] or dict(body={}))["body"].pop(k, None)
        assert found.setdefault(d["id"], d) is d, f"{d['id']} twice"
    return found


def mixed(n):
    "Requests, and among them a line that is not JSON, an id twice, a prompt that is too long and a bad parameter."
    bad = b'{"custom_id": "torn', ask(3), ask(n, prompt="x" * 9000), ask(n + 1, top_p=7)
    return [ask(i) for i in range(n)] + [*bad]


@pytest.fixture
def forty(tmp_path):
    "A folder with forty requests in `in.jsonl`."
    write(tmp_path / "in.jsonl", [ask(i) for i in range(40)])
    return tmp_path


@pytest.fixture
def sixty(tmp_path):
    "A file of sixty requests, and four lines that are wrong in some way."
    write(tmp_path / "in.jsonl", mixed(60))
    return tmp_path / "in.jsonl"


# Without Ray: the dealing itself, with workers that are played


class Lost(Exception):
    pass


class Actor:
    "A worker that is played: it holds lines, and what becomes of them is drawn by `pool`."

    def __init__(self, pool):
        self.pool, self.has, self.hangs = pool, {}, False

    def __getattr__(self, name):
        return SimpleNamespace(remote=functools.partial(getattr(self, f"_{name}")))

    def _begin(self, job):
        self.has.clear()
        return SimpleNamespace(actor=self, lines=None)

    def _exchange(self, lines):
        assert not any(line.number in self.has for line in lines)
        self.has |= {line.number: line for line in lines}
        return SimpleNamespace(actor=self, lines=lines)


class Played(Pool):
    "A `Pool` whose workers die with what `dies` says, and otherwise answer some of their lines in any order."

    def __init__(self, workers, rng, dies=lambda actor: False):
        super().__init__(workers, say=lambda s: None)
        self.rng, self.dies, self.idle = rng, dies, 0
        limits = SimpleNamespace(max_num_seqs=rng.choice([1, 4, 40]))
        template = SimpleNamespace(chat_template=None)
        self.info = WorkerInfo(limits, "continuous", "w", None, template, "played", 0)
        self.ray = SimpleNamespace(exceptions=SimpleNamespace(RayActorError=Lost))
        self.handles = [self.start_worker() for _ in range(workers)]

    def start_worker(self):
        return WorkerHandle(Actor(self), info=self.info)

    def stop_worker(self, handle):
        handle.actor.has = None

    def returned(self, timeout=None):
        handles = [h for h in self.handles if h.ref and not h.actor.hangs]
        self.idle = 0 if handles else self.idle + 1
        assert self.idle < 3, "nobody is working: this would wait for ever"
        if not handles:
            return []
        handle = self.rng.choice(handles)
        actor, ref, handle.ref = handle.actor, handle.ref, None
        if ref.lines is None:
            return [(handle, [])]
        if self.dies(actor):
            return [(handle, Lost("gone"))]
        done = self.rng.sample(
            sorted(actor.has), self.rng.randint(min(1, len(actor.has)), len(actor.has))
        )
        return [(handle, [(n, played(actor.has.pop(n))) for n in done])]


def played(line):
    if line.options.get("top_p") == 7:
        return scaleout.failure_of(line, "invalid_request", "top_p")
    body = dict(text=line.prompt, usage={})
    return dict(id=line.key, **line.ids, response=dict(status_code=200, body=body), error=None)


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    seed=st.integers(0, 10**6),
    workers=st.integers(1, 5),
    share=st.sampled_from([0, 0.05, 0.3]),
    ordered=st.booleans(),
    stops=st.integers(0, 2),
    backup=st.sampled_from([0, 1e9]),
)
def test_any_order_of_deaths(tmp_path_factory, seed, workers, share, ordered, stops, backup):
    d, rng, n = tmp_path_factory.mktemp("played"), random.Random(seed), 60
    write(d / "in.jsonl", mixed(n))
    job = lambda: job_in(d, ordered=ordered, look_ahead=16, backup_after=backup, use_tqdm=False)
    steps = [0]

    def dies(actor):
        steps[0] += 1
        if steps[0] == stop:
            raise KeyboardInterrupt
        return rng.random() < share

    for stop in [rng.randint(1, 12) for _ in range(stops)] + [None]:
        steps[0] = 0
        try:
            result = job().run(Played(workers, rng, dies))
        except (KeyboardInterrupt, JobError) as e:
            assert stop or "workers died" in str(e)
    if share == 0.3:
        result = job().run(Played(workers, rng))  # those that gave up for too many deaths go on
    found = by_id(d / "out.jsonl")
    assert len(found) == n + 4 and result.done == n + 4
    if ordered:
        assert [int(k.split("_")[2]) for k in found] == [*range(1, n + 5)]
    good = {r["custom_id"] for r in found.values() if not r["error"]}
    if share == 0:
        assert good == {f"r{i}" for i in range(n)} | {f"r{n}"}


def test_poison_ends_itself_alone(forty):
    poison = lambda actor: any(line.prompt.startswith("tell me 7 ") for line in actor.has.values())
    result = job_in(forty).run(Played(3, random.Random(1), poison))
    [bad] = [r for r in by_id(forty / "out.jsonl").values() if r["error"]]
    assert (result.answered, bad["custom_id"], bad["response"]["status_code"]) == (39, "r7", 500)
    assert "died" in bad["error"]["message"]


def test_workers_that_always_die_end_the_job(forty):
    with pytest.raises(JobError, match="died.*gone") as e:
        job_in(forty).run(Played(2, random.Random(1), lambda actor: True))
    assert e.value.status == 1


def test_a_worker_that_hangs_is_overtaken(forty):
    pool = Played(2, random.Random(2))

    def dies(actor):
        actor.hangs = actor is pool.handles[0].actor and len(actor.has) > 1
        return False

    pool.dies = dies
    job_in(forty, backup_after=0.0).run(pool)
    assert len(by_id(forty / "out.jsonl")) == 40 and pool.handles[0].actor.hangs


class Held(Played):
    "A `Played` pool of a server's batches, which waits after `most` answers."

    def __init__(self, *args, most=10**9, **more):
        super().__init__(*args, **more)
        self.most, self.answered = most, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def returned(self, timeout=None):
        if self.answered >= self.most:
            time.sleep(0.002)
            return []
        got = super().returned()
        self.answered += sum(
            len(records) for _, records in got if not isinstance(records, Exception)
        )
        return got


NOBODY = SimpleNamespace(
    start=lambda: None,
    weights_digest="w",
    quantization=None,
    tokenizer=SimpleNamespace(chat_template=None),
    limits=SimpleNamespace(max_num_seqs=4),
    strategy="continuous",
)  # the engine of the server, which is not for batches


class Batches:
    "The batches of a server in `folder`, answered by the pools of `make_pool`."

    def __init__(self, folder, make_pool, clock=time.time, model_name="played"):
        self.store, self.workers = BatchStore(folder, clock), BatchWorkers(make_pool)
        self.runner = BatchRunner(
            self.store, NOBODY, model_name, look_ahead=16, workers=self.workers
        )

    def __enter__(self):
        self.runner.start()
        return self

    def __exit__(self, *_):
        self.runner.stop()
        self.store.close()

    def create(self, path):
        return self.create_of(create_file(self.store, "in.jsonl", Path(path).read_bytes())["id"])

    def create_of(self, file):
        return self.runner.create(
            dict(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
        )["id"]

    def shown(self, id):
        return show_batch(self.runner, get_batch(self.store, id))

    def wait(self, id, until=lambda batch: batch["status"] in ENDED):
        end = time.time() + 120
        while not until(batch := self.shown(id)):
            assert time.sleep(0.002) or time.time() < end, batch
        return batch

    def wait_for(self, id, n):
        return self.wait(id, lambda batch: batch["request_counts"]["completed"] >= n)

    def records(self, id, tmp_path):
        batch = get_batch(self.store, id)
        with open(tmp_path / "records", "wb") as f:
            for k in ("output_file_id", "error_file_id"):
                f.write(open_file(self.store, batch[k]).read() if batch.get(k) else b"")
        return by_id(tmp_path / "records")


def counts(batch):
    "Of a batch: its status, and how many of its lines are completed and failed."
    found = batch["request_counts"]
    assert found["total"] == 64
    return batch["status"], found["completed"], found["failed"]


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_by_workers_that_die(sixty, tmp_path, seed):
    rng = random.Random(seed)
    with Batches(tmp_path / "data", lambda: Held(3, rng, lambda actor: rng.random() < 0.1)) as s:
        assert counts(s.wait(id := s.create(sixty))) == ("completed", 61, 3)
        assert len(s.records(id, tmp_path)) == 64


def test_workers_of_a_batch_that_always_die_are_no_fault_of_it(sixty, tmp_path):
    pools = iter([Held(2, random.Random(1), lambda actor: True), Held(2, random.Random(2))])
    with Batches(tmp_path / "data", lambda: next(pools)) as s:
        assert s.wait(id := s.create(sixty))["status"] == "completed"
        assert len(s.records(id, tmp_path)) == 64 and next(pools, None) is None


def test_a_batch_of_workers_is_cancelled_and_the_next_one_runs(sixty, tmp_path):
    pool = Held(2, random.Random(3), most=20)
    with Batches(tmp_path / "data", lambda: pool) as s:
        s.wait_for(id := s.create(sixty), 10)  # counts go on while it runs
        assert s.runner.cancel(id)["status"] == "cancelling"
        status, completed, failed = counts(done := s.wait(id))
        assert status == "cancelled" and 10 <= completed < 60
        assert len(s.records(id, tmp_path)) == completed + failed
        pool.most = 10**9
        assert counts(s.wait(s.create_of(done["input_file_id"]))) == ("completed", 61, 3)


def test_a_batch_of_workers_is_too_late_and_one_goes_on_after_a_stop(sixty, tmp_path):
    late, pool = [0], Held(2, random.Random(4), most=20)
    with Batches(tmp_path / "data", lambda: pool) as s:
        s.wait_for(id := s.create(sixty), 10)
    pool.most += 20
    with Batches(tmp_path / "data", lambda: pool, lambda: time.time() + late[0]) as s:
        _, before, _ = counts(s.wait_for(id, 20))
        late[0] = 24 * 3600
        status, completed, failed = counts(s.wait(id))
        found = s.records(id, tmp_path).values()
        assert status == "expired" and completed + failed == 64 == len(found)
        errors = [r["error"] for r in found]
        assert errors.count(None) >= before
        assert "batch_expired" in {e["code"] for e in errors if e}


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
def pool(folder, tmp_path_factory):
    "Two workers for all tests; afterwards none of Ray's processes may be left, and their prefixes are."
    pytest.importorskip("ray", reason="needs Ray: pip install 'batchlab[ray]'")
    os.environ["OMP_NUM_THREADS"] = "1"
    d = tmp_path_factory.mktemp("shared")
    llm = dict(model=folder, dtype="fp32", max_num_seqs=4, prefix_store=str(d / "store"))
    with Pool(2, num_cpus=1, llm=llm, say=lambda s: None) as pool:
        pool.ready()
        yield pool
        write(d / "in.jsonl", [ask(i, prompt=[*range(5, 205), 9 + i]) for i in range(8)])
        assert job_in(d, model_name=Path(folder).name).run(pool).answered == 8
        work, helpers = ray_children(psutil.Process())
        assert len(work) > 3
    assert psutil.wait_procs(work + helpers, timeout=60)[1] == []
    reads_what_workers_stored(d, llm)


def reads_what_workers_stored(d, llm):
    "This process finds in the folder what the workers have written to it, and answers as they did."
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have it
    beside = LLM(**llm)
    beside.engines.store.costs.worth = lambda: True  # a tiny model is computed at once
    job = Job(d / "in.jsonl", d / "beside.jsonl", model_name=Path(llm["model"]).name)
    assert job.run(beside).answered == 8 and beside.stats().loaded_blocks >= 3
    assert by_id(d / "beside.jsonl") == by_id(d / "out.jsonl")
    beside.close()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    "A file of requests, and what `Job` makes of it with one engine, by the name of the folder."
    d, before = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)
    write(d / "in.jsonl", mixed(400))
    llm = LLM(folder, dtype="fp32", max_num_seqs=4)
    job = Job(d / "in.jsonl", d / "out.jsonl", model_name=Path(folder).name)
    assert job.run(llm).failed == 4
    torch.set_num_threads(before)
    return d / "in.jsonl", by_id(d / "out.jsonl")


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
        )

    return start


def kill_all(p):
    "Kill process `p`: no worker goes on without the one who writes."
    work, helpers = ray_children(psutil.Process(p.pid))
    p.kill()
    _, said = p.communicate(timeout=60)
    assert work and not psutil.wait_procs(work, timeout=60)[1], said
    for c in psutil.wait_procs(helpers, timeout=1)[1]:
        c.kill()


def kill_worker(pool):
    "Kill a worker that has its model: its process id."
    pid = next(handle.info.pid for handle in pool.handles if handle.info)
    os.kill(pid, signal.SIGKILL)
    return pid


def lines_in(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(path, n, alive=lambda: True):
    end = time.time() + 120
    while lines_in(path) < n and time.time() < end and alive():
        time.sleep(0.002)


@pytest.mark.parametrize("ordered", [False, True])
def test_same_answers_by_two_workers(pool, alone, tmp_path, folder, ordered):
    name, expected = alone
    job = RayJob(name, tmp_path / "out.jsonl", model_name=Path(folder).name, ordered=ordered)
    result, found = job.run(pool), by_id(tmp_path / "out.jsonl")
    assert (result.answered, result.failed) == (400, 4) and found == expected
    if ordered:
        assert [*found] == sorted(expected, key=lambda k: int(k.split("_")[2]))


@posix
def test_worker_killed(pool, alone, tmp_path, folder):
    name, expected = alone
    killed = []

    def kill():
        wait_for_lines(tmp_path / "out.jsonl", 50)
        killed.append(kill_worker(pool))

    killer = threading.Thread(target=kill)
    killer.start()
    result = RayJob(name, tmp_path / "out.jsonl", model_name=Path(folder).name).run(pool)
    killer.join()
    assert not psutil.pid_exists(*killed) and pool.deaths == 0 and result.done == 404
    assert by_id(tmp_path / "out.jsonl") == expected


@posix
def test_everything_killed_and_resumed(pool, folder, alone, tmp_path, program):
    (name, expected), out = alone, tmp_path / "out.jsonl"
    p = program(f"run -i {name} -o out.jsonl")
    wait_for_lines(out, 40, lambda: p.poll() is None)
    kill_all(p)
    kept = out.read_bytes()
    assert 40 <= kept.count(b"\n") < 404
    result = RayJob(str(name), str(out), model_name=Path(folder).name).run(pool)
    assert result.before >= kept.count(b"\n") and result.done == 404
    assert by_id(out) == expected
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])


RUN = "run -i in.jsonl -o out.jsonl"


def test_more_than_there_is(pool, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("in.jsonl", [ask(1)])
    assert main(f"{RUN} --model nowhere --ray 1 --ray-cpus 1 --ray-gpus 1".split()) == 2
    assert "take fewer" in capsys.readouterr().err and not Path("out.jsonl").exists()


@pytest.mark.parametrize(
    "command, made", [(RUN, "out.jsonl"), ("serve --port 0 --data data", "data")]
)
def test_no_ray(tmp_path, monkeypatch, capsys, command, made):
    if command is not RUN:
        for name in ("fastapi", "uvicorn"):
            pytest.importorskip(name, reason=f"needs {name}: pip install '.[dev]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    write("in.jsonl", [ask(1)])
    assert main([*command.split(), "--ray", "2"]) == 2
    assert "pip install 'batchlab[ray]'" in capsys.readouterr().err and not Path(made).exists()


def test_a_server_has_workers_for_its_batches_only(capsys):
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason=f"needs {name}: pip install '.[dev]'")
    assert main("serve --port 0 --ray 2".split()) == 2 and "--data" in capsys.readouterr().err


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
    assert scaleout.line_of(1, dict(prompt="a") | row, setting_columns=names).options == options


@pytest.mark.parametrize("row, word", [(dict(max_tokns=4), "max_tokens"), (dict(n=2), "several")])
def test_a_row_of_a_batch_that_can_not_run(row, word):
    _, why = scaleout.line_of(1, dict(prompt="a") | row, setting_columns=[*row]).failure
    assert word in why


def test_a_folder_of_texts_is_answered_in_jsonl(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.csv"):
        (tmp_path / "in" / name).write_text("prompt\nx\n")
    jobs = scaleout.shards(RayJob(tmp_path / "in", tmp_path / "out"))
    assert [Path(j.output).name for j in jobs] == ["a.txt.jsonl", "b.csv"]


@posix
def test_a_batch_of_a_server_over_the_kill_of_a_worker_and_of_the_server(
    pool, folder, alone, tmp_path, program
):
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason=f"needs {name}: pip install '.[dev]'")
    httpx = pytest.importorskip("httpx", reason="needs httpx: pip install '.[dev]'")
    path, expected = alone
    p = program("serve --port 0 --data data --no-request-log")
    url = next(line.split()[-1] for line in p.stderr if "is served at" in line)
    with httpx.Client(base_url=url, timeout=120) as http:
        post = lambda to, **kw: http.post(to, **kw).json()
        file = dict(files=dict(file=("in.jsonl", path.read_bytes())), data=dict(purpose="batch"))
        what = dict(endpoint="/v1/completions", completion_window="24h")
        id = post("/batches", json=what | dict(input_file_id=post("/files", **file)["id"]))["id"]
        counts = lambda: http.get(f"/batches/{id}").json()["request_counts"]
        while counts()["completed"] < 20:
            time.sleep(0.01)
        beside = dict(model=Path(folder).name, prompt="beside it", max_tokens=3, temperature=0)
        answer = post("/completions", json=beside)
        assert answer["usage"]["completion_tokens"] <= 3 and counts()["total"] == 404
    kill_all(p)
    batches = Batches(
        tmp_path / "data", lambda: pytest.fail("the pool is at work"), model_name=Path(folder).name
    )
    batches.workers.pool = pool  # it has been entered already
    with batches as s:
        s.wait_for(id, 100)
        kill_worker(pool)
        assert s.wait(id)["request_counts"] == dict(total=404, completed=400, failed=4)
        got = s.records(id, tmp_path)

    def by_line(found):  # an id ends with what stands for the settings
        said = lambda r: (r["custom_id"], r["response"]["body"].get("choices"), r["error"])
        return {id.rpartition("_")[0]: said(r) for id, r in found.items()}

    assert by_line(got) == by_line(expected) and len(got) == 404
    while not all(handle.info for handle in pool.handles):
        [*pool.events()]  # for those who come after


def test_ray_outlives_the_thread_that_asked_for_it():
    "Its processes would end with the thread that started them, and after a minute this one with them."
    pytest.importorskip("ray", reason="needs Ray: pip install 'batchlab[ray]'")
    program = """
import os, threading, time
from contextlib import ExitStack
import psutil
from batchlab.jobs.ray import ray_session
stack, found = ExitStack(), []
t = threading.Thread(target=lambda: found.append(stack.enter_context(ray_session(num_cpus=1))))
t.start(); t.join()
assert not psutil.wait_procs([p for p in psutil.Process().children() if p.name() in ('raylet', 'gcs_server')], timeout=1)[0]
[ray] = found
print(ray.get(ray.remote(lambda: 'at work').remote(), timeout=60))
stack.close()
"""
    p = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert p.stdout.strip() == "at work" and not p.returncode, p.stderr


@pytest.fixture
def shard(tmp_path):
    "A job of a line, the function that gives its engine, and the mark of its end."
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    job = Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sampling_params=dict(max_tokens=2))
    tiny_llm = lambda: LLM(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer())
    return job, tiny_llm, tmp_path / "out.jsonl.done"


@pytest.mark.parametrize("text", ['{"mine": 1}', "mine", "[]"])
def test_a_mark_that_is_none_stays(shard, text):
    job, llm, mark = shard
    mark.write_text(text)
    with pytest.raises(JobError, match="done"):
        scaleout._run_shard(job, llm)
    assert mark.read_text() == text and not Path(job.output).exists()


def test_an_empty_mark_is_of_a_loss_of_power(shard):
    job, llm, mark = shard
    mark.write_text("")
    run = lambda: scaleout._run_shard(job, llm).before
    assert (run(), run()) == (0, 1)
