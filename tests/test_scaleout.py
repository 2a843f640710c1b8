"Many engines, one writer: workers that die, hang or answer late, and a job that is killed, lose and double nothing."
import functools, json, os, random, signal, subprocess, sys, threading, time
from pathlib import Path
from types import SimpleNamespace

import psutil, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

from batchlab.work import scaleout
from batchlab.cli import main
from batchlab.llm import LLM
from batchlab.work.jobs import Job, JobError
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.work.scaleout import Pool, RayJob, WorkerHandle, WorkerInfo

posix = pytest.mark.skipif(os.name != 'posix', reason='signals of POSIX')


def ask(i, **body):
    body = dict(prompt=f'tell me {i} ' + 'more ' * (i % 6), max_tokens=2 + i % 9, temperature=0) | body
    return dict(custom_id=f'r{i}', method='POST', url='/v1/completions', body=body)

def write(path, rows):
    Path(path).write_bytes(b''.join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b'\n' for r in rows))

def by_id(path):
    "Records by the line that they answer, each once, without what a clock or a cache puts in."
    found = {}
    for s in Path(path).read_text(encoding='utf-8').splitlines():
        d = json.loads(s)
        for k in ('created', 'usage'): d['response']['body'].pop(k, None)
        assert found.setdefault(d['id'], d) is d, f'{d["id"]} twice'
    return found

def mixed(n):
    "Requests, and among them a line that is not JSON, an id twice, a prompt that is too long and a bad parameter."
    return [ask(i) for i in range(n)] + [b'{"custom_id": "torn', ask(3), ask(n, prompt='x' * 9000), ask(n + 1, top_p=7)]


# Without Ray: the dealing itself, with workers that are played

class Lost(Exception): pass

class Actor:
    "A worker that is played: it holds lines, and what becomes of them is drawn by `pool`."
    def __init__(self, pool): self.pool, self.has, self.hangs = pool, {}, False
    def __getattr__(self, name): return SimpleNamespace(remote=functools.partial(getattr(self, f'_{name}')))
    def _begin(self, job): return SimpleNamespace(actor=self, lines=None)
    def _exchange(self, lines):
        assert not any(line.number in self.has for line in lines)
        self.has |= {line.number: line for line in lines}
        return SimpleNamespace(actor=self, lines=lines)

class Played(Pool):
    "A `Pool` whose workers die with what `dies` says, and otherwise answer some of their lines in any order."
    def __init__(self, workers, rng, dies=lambda actor: False):
        self.rng, self.dies, self.say, self.workers, self.deaths, self.job, self.idle = rng, dies, lambda s: None, workers, 0, None, 0
        limits, template = SimpleNamespace(max_num_seqs=rng.choice([1, 4, 40])), SimpleNamespace(chat_template=None)
        self.info = WorkerInfo(limits, 'continuous', 'w', None, template, 'played', 0)
        self.ray = SimpleNamespace(exceptions=SimpleNamespace(RayActorError=Lost))
        self.handles = [self.start_worker() for _ in range(workers)]
    def start_worker(self): return WorkerHandle(Actor(self), info=self.info)
    def stop_worker(self, handle): handle.actor.has = None
    def returned(self, timeout=None):
        handles = [h for h in self.handles if h.ref and not h.actor.hangs]
        self.idle = 0 if handles else self.idle + 1
        assert self.idle < 3, 'nobody is working: this would wait for ever'
        if not handles: return []
        handle = self.rng.choice(handles)
        actor, ref, handle.ref = handle.actor, handle.ref, None
        if ref.lines is None: return [(handle, [])]
        if self.dies(actor): return [(handle, Lost('gone'))]
        done = self.rng.sample(sorted(actor.has), self.rng.randint(min(1, len(actor.has)), len(actor.has)))
        return [(handle, [(n, played(actor.has.pop(n))) for n in done])]

def played(line):
    if line.options.get('top_p') == 7: return scaleout.failure_of(line, 'invalid_request', 'top_p')
    return dict(id=line.key, **line.ids, response=dict(status_code=200, body=dict(text=line.prompt)), error=None)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), workers=st.integers(1, 5), share=st.sampled_from([0, .05, .3]), ordered=st.booleans(),
       stops=st.integers(0, 2), backup=st.sampled_from([0, 1e9]))
def test_any_order_of_deaths(tmp_path_factory, seed, workers, share, ordered, stops, backup):
    d, rng, n = tmp_path_factory.mktemp('played'), random.Random(seed), 60
    write(d/'in.jsonl', mixed(n))
    job = lambda **kw: RayJob(d/'in.jsonl', d/'out.jsonl', ordered=ordered, look_ahead=16, backup_after=backup, use_tqdm=False, **kw)
    steps = [0]
    def dies(actor):
        steps[0] += 1
        if steps[0] == stop: raise KeyboardInterrupt
        return rng.random() < share
    for stop in [rng.randint(1, 12) for _ in range(stops)] + [None]:
        steps[0] = 0
        try: result = job().run(Played(workers, rng, dies))
        except (KeyboardInterrupt, JobError) as e: assert stop or 'workers died' in str(e)
    if share == .3: result = job().run(Played(workers, rng))          # those that gave up for too many deaths go on
    found = by_id(d/'out.jsonl')
    assert len(found) == n + 4 and result.done == n + 4
    if ordered: assert [int(k.split('_')[2]) for k in found] == [*range(1, n + 5)]
    good = {r['custom_id'] for r in found.values() if not r['error']}
    if share == 0: assert good == {f'r{i}' for i in range(n)} | {f'r{n}'}


def test_poison_ends_itself_alone(tmp_path):
    write(tmp_path/'in.jsonl', [ask(i) for i in range(40)])
    poison = lambda actor: any(line.prompt.startswith('tell me 7 ') for line in actor.has.values())
    result = RayJob(tmp_path/'in.jsonl', tmp_path/'out.jsonl').run(Played(3, random.Random(1), poison))
    [bad] = [r for r in by_id(tmp_path/'out.jsonl').values() if r['error']]
    assert (result.answered, bad['custom_id'], bad['response']['status_code']) == (39, 'r7', 500)
    assert 'died with this request alone' in bad['error']['message']


def test_workers_that_always_die_end_the_job(tmp_path):
    write(tmp_path/'in.jsonl', [ask(i) for i in range(40)])
    with pytest.raises(JobError, match='workers died and nothing was answered, the last with: gone') as e:
        RayJob(tmp_path/'in.jsonl', tmp_path/'out.jsonl').run(Played(2, random.Random(1), lambda actor: True))
    assert e.value.status == 1


def test_a_worker_that_hangs_is_overtaken(tmp_path):
    write(tmp_path/'in.jsonl', [ask(i) for i in range(40)])
    pool = Played(2, random.Random(2))
    def dies(actor):
        actor.hangs = actor is pool.handles[0].actor and len(actor.has) > 1
        return False
    pool.dies = dies
    RayJob(tmp_path/'in.jsonl', tmp_path/'out.jsonl', backup_after=0.).run(pool)
    assert len(by_id(tmp_path/'out.jsonl')) == 40 and pool.handles[0].actor.hangs


# On Ray: real workers, killed for real

def ray_children(p):
    "Processes of Ray's under `p`: those that work, and helpers, which look for the others for a minute after a kill."
    found = [c for c in p.children(recursive=True) if c.name() in ('raylet', 'gcs_server') or c.name().startswith('ray::')]
    return [c for c in found if 'Agent' not in c.name()], [c for c in found if 'Agent' in c.name()]

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp('model')
    tiny_model('llama', num_hidden_layers=1).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)

@pytest.fixture(scope='module')
def pool(folder):
    "Two workers for all tests; afterwards none of Ray's processes may be left."
    pytest.importorskip('ray', reason="needs Ray: pip install 'batchlab[ray]'")
    os.environ['OMP_NUM_THREADS'] = '1'
    with Pool(2, num_cpus=1, llm=dict(model=folder, dtype='fp32', max_num_seqs=4), say=lambda s: None) as pool:
        pool.ready()
        yield pool
        work, helpers = ray_children(psutil.Process())
        assert len(work) > 3
    assert psutil.wait_procs(work + helpers, timeout=60)[1] == []

@pytest.fixture(scope='module')
def alone(folder, tmp_path_factory):
    "A file of requests, and what `Job` makes of it with one engine."
    d, before = tmp_path_factory.mktemp('alone'), torch.get_num_threads()
    torch.set_num_threads(1)
    write(d/'in.jsonl', mixed(400))
    assert Job(d/'in.jsonl', d/'out.jsonl').run(LLM(folder, dtype='fp32', max_num_seqs=4)).failed == 4
    torch.set_num_threads(before)
    return d/'in.jsonl', by_id(d/'out.jsonl')

def lines_in(path): return path.read_bytes().count(b'\n') if path.exists() else 0

def when(path, n, do, alive=lambda: True):
    "Call `do` when file `path` has `n` lines."
    end = time.time() + 120
    while lines_in(path) < n and time.time() < end and alive(): time.sleep(.002)
    do()


def test_same_answers_by_two_workers(pool, alone, tmp_path):
    name, expected = alone
    result = RayJob(name, tmp_path/'out.jsonl', model_name=alone_model(expected)).run(pool)
    assert (result.answered, result.failed) == (400, 4) and by_id(tmp_path/'out.jsonl') == expected
    result = RayJob(name, tmp_path/'ordered.jsonl', model_name=alone_model(expected), ordered=True).run(pool)
    assert [*by_id(tmp_path/'ordered.jsonl')] == sorted(expected, key=lambda k: int(k.split('_')[2]))
    assert by_id(tmp_path/'ordered.jsonl') == expected

def alone_model(expected): return next(r['response']['body']['model'] for r in expected.values() if not r['error'])


@posix
def test_worker_killed(pool, alone, tmp_path):
    name, expected = alone
    pid = next(handle.info.pid for handle in pool.handles if handle.info)
    killer = threading.Thread(target=when, args=(tmp_path/'out.jsonl', 50, lambda: os.kill(pid, signal.SIGKILL)))
    killer.start()
    result = RayJob(name, tmp_path/'out.jsonl', model_name=alone_model(expected)).run(pool)
    killer.join()
    assert not psutil.pid_exists(pid) and pool.deaths == 0 and result.done == 404
    assert by_id(tmp_path/'out.jsonl') == expected


@posix
def test_everything_killed_and_resumed(pool, folder, alone, tmp_path):
    name, expected = alone
    args = ['run', '-i', str(name), '-o', 'out.jsonl', '--model', folder, '--dtype', 'fp32', '--max-num-seqs', '4']
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    p = subprocess.Popen([sys.executable, '-m', 'batchlab.cli', *args, '--ray', '1', '--ray-cpus', '1'], cwd=tmp_path, env=env,
                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    work, helpers = [], []
    def kill():
        for known, found in zip((work, helpers), ray_children(psutil.Process(p.pid))): known += found
        p.kill()
    when(tmp_path/'out.jsonl', 40, kill, lambda: p.poll() is None)
    _, err = p.communicate(timeout=60)
    left = psutil.wait_procs(work, timeout=60)[1]                          # nobody goes on without the one who writes
    for c in psutil.wait_procs(helpers, timeout=1)[1]: c.kill()
    assert p.returncode == -signal.SIGKILL and work and not left, err
    kept = (tmp_path/'out.jsonl').read_bytes()
    assert 40 <= kept.count(b'\n') < 404
    result = RayJob(str(name), str(tmp_path/'out.jsonl'), model_name=Path(folder).name).run(pool)
    assert result.before >= kept.count(b'\n') and result.done == 404
    got = by_id(tmp_path/'out.jsonl')
    for r in [*got.values(), *expected.values()]: r['response']['body'].pop('model', None)
    assert got == expected and (tmp_path/'out.jsonl').read_bytes().startswith(kept[:kept.rfind(b'\n') + 1])


def test_more_than_there_is(pool, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write('in.jsonl', [ask(1)])
    assert main(['run', '-i', 'in.jsonl', '-o', 'out.jsonl', '--model', 'nowhere', '--ray', '1', '--ray-cpus', '1', '--ray-gpus', '1']) == 2
    assert 'Ray has 0 in all: take fewer' in capsys.readouterr().err and not Path('out.jsonl').exists()


def test_no_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'ray', None)
    write('in.jsonl', [ask(1)])
    assert main(['run', '-i', 'in.jsonl', '-o', 'out.jsonl', '--ray', '2']) == 2
    assert "pip install 'batchlab[ray]'" in capsys.readouterr().err


def test_rows_of_a_batch_are_read_as_those_of_tables():
    from batchlab.work.scaleout import line_of
    assert line_of(1, dict(prompt='a', max_new_tokens=3, timeout=2, text='x')).options == dict(max_tokens=3)
    assert line_of(1, dict(prompt='a', guided_choice=['x'])).options['structured_outputs'] == dict(choice=['x'])
    assert 'max_tokens' in line_of(1, dict(prompt='a', max_tokns=4)).failure[1] and 'several answers' in line_of(1, dict(prompt='a', n=2)).failure[1]


def test_a_folder_of_texts_is_answered_in_jsonl(tmp_path):
    from batchlab.work.scaleout import RayJob, shards
    (tmp_path/'in').mkdir()
    for name in ('a.txt', 'b.csv'): (tmp_path/'in'/name).write_text('prompt\nx\n')
    assert [Path(j.output).name for j in shards(RayJob(tmp_path/'in', tmp_path/'out'))] == ['a.txt.jsonl', 'b.csv']
