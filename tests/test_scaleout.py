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
    return [ask(i) for i in range(n)] + [
        b'{"custom_id": "torn',
        ask(3),
        ask(n, prompt="x" * 9000),
        ask(n + 1, top_p=7),
    ]


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
        self.rng, self.dies, self.say, self.workers, self.deaths, self.job, self.idle = (
            rng,
            dies,
            lambda s: None,
            workers,
            0,
            None,
            0,
        )
        limits, template = (
            SimpleNamespace(max_num_seqs=rng.choice([1, 4, 40])),
            SimpleNamespace(chat_template=None),
        )
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
    return dict(
        id=line.key,
        **line.ids,
        response=dict(status_code=200, body=dict(text=line.prompt, usage={})),
        error=None,
    )


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
    job = lambda **kw: RayJob(
        d / "in.jsonl",
        d / "out.jsonl",
        ordered=ordered,
        look_ahead=16,
        backup_after=backup,
        use_tqdm=False,
        **kw,
    )
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


def test_poison_ends_itself_alone(tmp_path):
    write(tmp_path / "in.jsonl", [ask(i) for i in range(40)])
    poison = lambda actor: any(line.prompt.startswith("tell me 7 ") for line in actor.has.values())
    result = RayJob(tmp_path / "in.jsonl", tmp_path / "out.jsonl").run(
        Played(3, random.Random(1), poison)
    )
    [bad] = [r for r in by_id(tmp_path / "out.jsonl").values() if r["error"]]
    assert (result.answered, bad["custom_id"], bad["response"]["status_code"]) == (39, "r7", 500)
    assert "died with this request alone" in bad["error"]["message"]


def test_workers_that_always_die_end_the_job(tmp_path):
    write(tmp_path / "in.jsonl", [ask(i) for i in range(40)])
    with pytest.raises(
        JobError, match="workers died and nothing was answered, the last with: gone"
    ) as e:
        RayJob(tmp_path / "in.jsonl", tmp_path / "out.jsonl").run(
            Played(2, random.Random(1), lambda actor: True)
        )
    assert e.value.status == 1


def test_a_worker_that_hangs_is_overtaken(tmp_path):
    write(tmp_path / "in.jsonl", [ask(i) for i in range(40)])
    pool = Played(2, random.Random(2))

    def dies(actor):
        actor.hangs = actor is pool.handles[0].actor and len(actor.has) > 1
        return False

    pool.dies = dies
    RayJob(tmp_path / "in.jsonl", tmp_path / "out.jsonl", backup_after=0.0).run(pool)
    assert len(by_id(tmp_path / "out.jsonl")) == 40 and pool.handles[0].actor.hangs


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


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_by_workers_that_die(tmp_path, seed):
    write(tmp_path / "in.jsonl", mixed(60))
    rng = random.Random(seed)
    with Batches(tmp_path / "data", lambda: Held(3, rng, lambda actor: rng.random() < 0.1)) as s:
        done = s.wait(id := s.create(tmp_path / "in.jsonl"))
        assert (done["status"], done["request_counts"]) == (
            "completed",
            dict(total=64, completed=61, failed=3),
        )
        assert len(s.records(id, tmp_path)) == 64


def test_workers_of_a_batch_that_always_die_are_no_fault_of_it(tmp_path):
    write(tmp_path / "in.jsonl", mixed(60))
    pools = iter([Held(2, random.Random(1), lambda actor: True), Held(2, random.Random(2))])
    with Batches(tmp_path / "data", lambda: next(pools)) as s:
        done = s.wait(id := s.create(tmp_path / "in.jsonl"))
        assert (
            done["status"] == "completed"
            and len(s.records(id, tmp_path)) == 64
            and next(pools, None) is None
        )


def test_a_batch_of_workers_is_cancelled_and_the_next_one_runs(tmp_path):
    write(tmp_path / "in.jsonl", mixed(60))
    pool = Held(2, random.Random(3), most=20)
    with Batches(tmp_path / "data", lambda: pool) as s:
        s.wait_for(id := s.create(tmp_path / "in.jsonl"), 10)  # counts go on while it runs
        assert s.runner.cancel(id)["status"] == "cancelling"
        done = s.wait(id)
        assert (
            done["status"] == "cancelled"
            and 10 <= done["request_counts"]["completed"] < 60
            and done["request_counts"]["total"] == 64
        )
        assert len(s.records(id, tmp_path)) == sum(
            done["request_counts"][k] for k in ("completed", "failed")
        )
        pool.most = 10**9
        assert s.wait(s.create_of(done["input_file_id"]))["request_counts"] == dict(
            total=64, completed=61, failed=3
        )


def test_a_batch_of_workers_is_too_late_and_one_goes_on_after_a_stop(tmp_path):
    write(tmp_path / "in.jsonl", mixed(60))
    late, pool = [0], Held(2, random.Random(4), most=20)
    with Batches(tmp_path / "data", lambda: pool) as s:
        s.wait_for(id := s.create(tmp_path / "in.jsonl"), 10)
    pool.most += 20
    with Batches(tmp_path / "data", lambda: pool, lambda: time.time() + late[0]) as s:
        before = s.wait_for(id, 20)["request_counts"]["completed"]
        late[0] = 24 * 3600
        done = s.wait(id)
        assert done["status"] == "expired" and sum(
            done["request_counts"][k] for k in ("completed", "failed")
        ) == 64 == len(found := s.records(id, tmp_path))
        assert sum(not r["error"] for r in found.values()) >= before and {
            r["error"]["code"] for r in found.values() if r["error"]
        } >= {"batch_expired"}


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
def pool(folder):
    "Two workers for all tests; afterwards none of Ray's processes may be left."
    pytest.importorskip("ray", reason="needs Ray: pip install 'batchlab[ray]'")
    os.environ["OMP_NUM_THREADS"] = "1"
    with Pool(
        2, num_cpus=1, llm=dict(model=folder, dtype="fp32", max_num_seqs=4), say=lambda s: None
    ) as pool:
        pool.ready()
        yield pool
        work, helpers = ray_children(psutil.Process())
        assert len(work) > 3
    assert psutil.wait_procs(work + helpers, timeout=60)[1] == []


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    "A file of requests, and what `Job` makes of it with one engine."
    d, before = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)
    write(d / "in.jsonl", mixed(400))
    assert (
        Job(d / "in.jsonl", d / "out.jsonl").run(LLM(folder, dtype="fp32", max_num_seqs=4)).failed
        == 4
    )
    torch.set_num_threads(before)
    return d / "in.jsonl", by_id(d / "out.jsonl")


def lines_in(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def when(path, n, do, alive=lambda: True):
    "Call `do` when file `path` has `n` lines."
    end = time.time() + 120
    while lines_in(path) < n and time.time() < end and alive():
        time.sleep(0.002)
    do()


def test_same_answers_by_two_workers(pool, alone, tmp_path):
    name, expected = alone
    result = RayJob(name, tmp_path / "out.jsonl", model_name=alone_model(expected)).run(pool)
    assert (result.answered, result.failed) == (400, 4) and by_id(
        tmp_path / "out.jsonl"
    ) == expected
    result = RayJob(
        name, tmp_path / "ordered.jsonl", model_name=alone_model(expected), ordered=True
    ).run(pool)
    assert [*by_id(tmp_path / "ordered.jsonl")] == sorted(
        expected, key=lambda k: int(k.split("_")[2])
    )
    assert by_id(tmp_path / "ordered.jsonl") == expected


def alone_model(expected):
    return next(r["response"]["body"]["model"] for r in expected.values() if not r["error"])


@posix
def test_worker_killed(pool, alone, tmp_path):
    name, expected = alone
    pid = next(handle.info.pid for handle in pool.handles if handle.info)
    killer = threading.Thread(
        target=when, args=(tmp_path / "out.jsonl", 50, lambda: os.kill(pid, signal.SIGKILL))
    )
    killer.start()
    result = RayJob(name, tmp_path / "out.jsonl", model_name=alone_model(expected)).run(pool)
    killer.join()
    assert not psutil.pid_exists(pid) and pool.deaths == 0 and result.done == 404
    assert by_id(tmp_path / "out.jsonl") == expected


@posix
def test_everything_killed_and_resumed(pool, folder, alone, tmp_path):
    name, expected = alone
    args = [
        "run",
        "-i",
        str(name),
        "-o",
        "out.jsonl",
        "--model",
        folder,
        "--dtype",
        "fp32",
        "--max-num-seqs",
        "4",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    p = subprocess.Popen(
        [sys.executable, "-m", "batchlab.cli", *args, "--ray", "1", "--ray-cpus", "1"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    work, helpers = [], []

    def kill():
        for known, found in zip((work, helpers), ray_children(psutil.Process(p.pid))):
            known += found
        p.kill()

    when(tmp_path / "out.jsonl", 40, kill, lambda: p.poll() is None)
    _, err = p.communicate(timeout=60)
    left = psutil.wait_procs(work, timeout=60)[1]  # nobody goes on without the one who writes
    for c in psutil.wait_procs(helpers, timeout=1)[1]:
        c.kill()
    assert p.returncode == -signal.SIGKILL and work and not left, err
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert 40 <= kept.count(b"\n") < 404
    result = RayJob(str(name), str(tmp_path / "out.jsonl"), model_name=Path(folder).name).run(pool)
    assert result.before >= kept.count(b"\n") and result.done == 404
    got = by_id(tmp_path / "out.jsonl")
    for r in [*got.values(), *expected.values()]:
        r["response"]["body"].pop("model", None)
    assert got == expected and (tmp_path / "out.jsonl").read_bytes().startswith(
        kept[: kept.rfind(b"\n") + 1]
    )


def test_more_than_there_is(pool, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("in.jsonl", [ask(1)])
    assert (
        main(
            [
                "run",
                "-i",
                "in.jsonl",
                "-o",
                "out.jsonl",
                "--model",
                "nowhere",
                "--ray",
                "1",
                "--ray-cpus",
                "1",
                "--ray-gpus",
                "1",
            ]
        )
        == 2
    )
    assert (
        "Ray has 0 in all: take fewer" in capsys.readouterr().err and not Path("out.jsonl").exists()
    )


def test_no_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    write("in.jsonl", [ask(1)])
    assert main(["run", "-i", "in.jsonl", "-o", "out.jsonl", "--ray", "2"]) == 2
    assert "pip install 'batchlab[ray]'" in capsys.readouterr().err


def test_rows_of_a_batch_are_read_as_those_of_tables():
    from batchlab.jobs.ray import line_of

    def read(row, *names):
        return line_of(1, dict(prompt="a") | row, setting_columns=names)

    assert read(
        dict(max_completion_tokens=3, timeout=2, text="x"), "max_completion_tokens"
    ).options == dict(max_tokens=3)
    assert read(dict(max_completion_tokens=3, temperature=36.6, n=2)).options == {}
    assert read(dict(guided_choice=["x"]), "guided_choice").options["structured_outputs"] == dict(
        choice=["x"]
    )
    assert "max_tokens" in read(dict(max_tokns=4), "max_tokns").failure[1]
    assert "several answers" in read(dict(n=2), "n").failure[1]


def test_a_folder_of_texts_is_answered_in_jsonl(tmp_path):
    from batchlab.jobs.ray import RayJob, shards

    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.csv"):
        (tmp_path / "in" / name).write_text("prompt\nx\n")
    assert [Path(j.output).name for j in shards(RayJob(tmp_path / "in", tmp_path / "out"))] == [
        "a.txt.jsonl",
        "b.csv",
    ]


@posix
def test_a_batch_of_a_server_over_the_kill_of_a_worker_and_of_the_server(
    pool, folder, alone, tmp_path
):
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name)
    httpx = pytest.importorskip("httpx")
    path, expected = alone
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    args = [
        "serve",
        "--port",
        "0",
        "--data",
        "data",
        "--model",
        folder,
        "--dtype",
        "fp32",
        "--max-num-seqs",
        "4",
        "--no-request-log",
    ]
    p = subprocess.Popen(
        [sys.executable, "-m", "batchlab.cli", *args, "--ray", "1", "--ray-cpus", "1"],
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = next(line.split()[-1] for line in p.stderr if "is served at" in line)
    with httpx.Client(base_url=url, timeout=120) as http:
        file = http.post(
            "/files", files=dict(file=("in.jsonl", path.read_bytes())), data=dict(purpose="batch")
        ).json()["id"]
        id = http.post(
            "/batches",
            json=dict(input_file_id=file, endpoint="/v1/completions", completion_window="24h"),
        ).json()["id"]
        counts = lambda: http.get(f"/batches/{id}").json()["request_counts"]
        while counts()["completed"] < 20:
            time.sleep(0.01)
        answer = http.post(
            "/completions",
            json=dict(model=Path(folder).name, prompt="beside it", max_tokens=3, temperature=0),
        ).json()
        assert answer["usage"]["completion_tokens"] <= 3 and counts()["total"] == 404
    work, helpers = ray_children(psutil.Process(p.pid))
    p.kill()
    p.communicate(timeout=60)
    assert (
        work and not psutil.wait_procs(work, timeout=60)[1]
    )  # nobody goes on without the one who writes
    for c in psutil.wait_procs(helpers, timeout=1)[1]:
        c.kill()
    batches = Batches(
        tmp_path / "data", lambda: pytest.fail("the pool is at work"), model_name=Path(folder).name
    )
    batches.workers.pool = pool  # it has been entered already
    with batches as s:
        s.wait_for(id, 100)
        os.kill(next(handle.info.pid for handle in pool.handles if handle.info), signal.SIGKILL)
        assert s.wait(id)["request_counts"] == dict(total=404, completed=400, failed=4)
        got = s.records(id, tmp_path)

    def by_line(found):  # an id ends with what stands for the settings
        return {
            id.rpartition("_")[0]: (
                r["custom_id"],
                r["response"]["body"].get("choices"),
                r["error"],
            )
            for id, r in found.items()
        }

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


def test_a_server_without_ray(tmp_path, monkeypatch, capsys):
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--port", "0", "--data", str(tmp_path / "data"), "--ray", "2"]) == 2
    assert (
        "pip install 'batchlab[ray]'" in capsys.readouterr().err
        and not (tmp_path / "data").exists()
    )
    assert (
        main(["serve", "--port", "0", "--ray", "2"]) == 2
        and "--ray is for batches: say with --data" in capsys.readouterr().err
    )


def test_a_mark_that_is_none_stays(tmp_path):
    "A file with the name of a shard's mark is replaced only with force."
    from batchlab.jobs.ray import _run_shard

    tiny_llm = lambda: LLM(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer())
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    mark, job = (
        tmp_path / "out.jsonl.done",
        Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sampling_params=dict(max_tokens=2)),
    )
    for text in ('{"mine": 1}', "mine", "[]"):
        mark.write_text(text)
        with pytest.raises(JobError, match="out.jsonl.done is there already"):
            _run_shard(job, tiny_llm)
        assert mark.read_text() == text and not (tmp_path / "out.jsonl").exists()
    mark.write_text("")
    assert _run_shard(job, tiny_llm).before == 0 and _run_shard(job, tiny_llm).before == 1
