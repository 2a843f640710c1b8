"The benchmark from outside: contenders in processes of their own, without batchlab, ended early, or not there at all."

import contextlib, json, os, subprocess, sys
from dataclasses import replace

import psutil, pytest

from batchlab import bench
from batchlab.bench import peers
from batchlab.cli.measure import main
from batchlab.errors import Unavailable
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from gguf_files import gguf_file
from helpers import ENV, ROOT, until, weight_bytes
from warm import warm

sys.path.append(str(ROOT / "nbs"))
from measuring import memory_of, profile

TINY = "--dtype fp32 --device cpu --scale .03 --threads 1 --rounds 1".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A tiny model, as `save_pretrained` writes it."
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(path)
    return str(path)


@pytest.fixture
def here(capsys, one_thread):
    "The command in this process, with its contenders in their own: status, standard output, standard error."

    def call(model, workloads, *more):
        args = [*TINY, "--model", model, "--workloads", *workloads.split(), *more]
        return main(args), *capsys.readouterr()

    return call


@pytest.fixture
def shadows(tmp_path, monkeypatch):
    "`shadows(name, source)`: a module that contenders find before any other of its name."

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        monkeypatch.setenv("PYTHONPATH", path)

    return write


def gone(*processes):
    until(lambda: not any(map(bench.alive, processes)), 30)


def test_one_run_compares_and_says_who_is_missing(folder, tmp_path):
    "The command in a process of its own."
    how = "--workloads uniform prefix --contenders batchlab hf-static vllm --json r.json".split()
    args = ["--model", folder, "--peer", "vllm=/nowhere/python", *TINY, *how]
    p = warm([sys.executable, "-m", "batchlab", "bench", *args], tmp_path, ENV, timeout=300)
    assert p.returncode == 0, p.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert [r["contender"] for r in report["results"]] == ["batchlab", "hf-static"]
    assert all(w["best"] > 0 for r in report["results"] for w in r["workloads"].values())
    [left_out] = report["left_out"]
    assert left_out in p.stdout and "/nowhere/python" in left_out
    assert report["machine"]["threads"] == 1 and report["command"][:2] == ["batchlab", "bench"]


def test_a_contenders_script_needs_no_batchlab(folder, tmp_path):
    # -I leaves out the checkout and PYTHONPATH; an empty package in the way would break an import of batchlab.
    script = bench.worker_text(peers.start_hf_loop)
    (tmp_path / "peer.py").write_text('import sys; sys.modules["batchlab"] = None\n' + script)
    asked = [
        dict(model=folder, dtype="float32", device="cpu", options={}),
        dict(do="run", prompts=[[5, 6], [7]], max_tokens=[3, 2], max_num_seqs=2),
    ]
    r = subprocess.run(
        [sys.executable, "-I", tmp_path / "peer.py"],
        input="".join(json.dumps(a) + "\n" for a in asked),
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | dict(OMP_NUM_THREADS="1"),
    )
    ready, done = map(json.loads, r.stdout.splitlines())
    assert ready == dict(ready=["run"]) and list(map(len, done["result"])) == [3, 2]


def start_family(**settings):
    import subprocess, sys

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return dict(child=lambda: child.pid)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_no_process_outlives_its_worker(error):
    with pytest.raises(error) if error else contextlib.nullcontext():
        with bench.started(bench.worker_text(start_family), {}) as worker:
            child = psutil.Process(worker.ask("child")["result"])
            if error:
                raise error
    assert worker.process.returncode is not None and not bench.alive(child)


def test_killed_command_leaves_no_contender(folder):
    # transformers' continuous batching has a thread that would keep its process alive.
    args = "--rounds 100000 --patience 600 --contenders hf-cb --workloads single --model".split()
    killed = subprocess.Popen(
        [sys.executable, "-m", "batchlab", "bench", *TINY, *args, folder],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "round" not in killed.stderr.readline():
        assert killed.poll() is None
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    assert children
    gone(*children)


def test_busy_process_ends_with_a_killed_command():
    code = "from batchlab.bench import busy_core; import time\nwith busy_core() as spin: print(spin.pid, flush=True); time.sleep(600)"
    killed = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    spin = psutil.Process(int(killed.stdout.readline()))
    killed.kill()
    killed.communicate()
    gone(spin)


def test_profile_leaves_everything_as_it_was():
    from batchlab.core.attention import PackedStep

    llm, before = LLM(tiny_model("llama", max_position_embeddings=2048)), PackedStep.attention
    parts, steps = profile(llm, bench.workload("mixed", 0, (3, 259), 0.05))
    assert PackedStep.attention is before and steps > 0 and all(t > 0 for t in parts.values())


@pytest.mark.parametrize(
    "args, said",
    [
        ("--contenders llm", "contender 'llm' is unknown"),
        ("--peer vllm", "must be NAME=PYTHON"),
        ("--contenders openvino --peer openvino=/nowhere", "nobody could be measured"),
        ("--json /nowhere/r.json", "can't write /nowhere/r.json"),
        ("--frobnicate", "unknown flag --frobnicate"),
        ("--contenders batchlab:weights=gguf", "give --gguf FILE"),
        ("--contenders batchlab:weights=q4_0", "there is batchlab:weights=gguf"),
    ],
)
def test_mistakes_get_one_line(folder, args, said, capsys, one_thread):
    "In this process: `main` returns the status that the command ends with."
    argv = [*TINY, "--model", folder, "--workloads", "single", *args.split()]
    try:
        status = main(argv)
    except SystemExit as e:  # of argparse
        status = e.code
    err = capsys.readouterr().err
    assert status == 2 and said in err.splitlines()[-1] and "Traceback" not in err


def test_what_a_contender_did_before_it_died_is_reported():
    "It dies in the middle of its second workload: the first stands in the tables."

    class Dying:
        start_s, process, calls = 1.0, psutil.Process(), 0

        def ask(self, what, prompts, max_tokens, max_num_seqs):
            self.calls += 1
            if self.calls > 4:
                raise Unavailable("its process ended")
            return dict(seconds=0.5, result=[[7] * n for n in max_tokens])

    args = "--workloads single uniform --rounds 1 --scale .1".split()
    setup = bench.Setup(bench.parser().parse_args(args), dict(vocab=(3, 259)))
    died, whole = bench.Result("hf-cb", "died", 1.0), bench.Result("batchlab", "whole", 1.0)
    with pytest.raises(Unavailable):
        bench.measure(Dying(), died, setup)
    assert list(died.rounds) == ["single"]
    whole.rounds = dict(died.rounds, uniform=[(0.25, 6)])
    report = bench.as_report([whole, died])
    assert [list(r["workloads"]) for r in report["results"]] == [["single", "uniform"], ["single"]]
    assert "| died |" in bench.speed_table(report)
    assert "died" in bench.detail_table(report)


@pytest.mark.parametrize(
    "spec, options, label",
    [
        ("llamacpp", {}, "llama.cpp, one by one"),
        (
            "batchlab:weights=gguf,quantization=w4a8",
            dict(weights="gguf", quantization="w4a8"),
            "batchlab (weights=gguf, quantization=w4a8)",
        ),
        ("vllm:quantization=int8", dict(quantization="int8"), "vLLM (quantization=int8)"),
    ],
)
def test_options_of_a_contender(spec, options, label):
    c = bench.contender(spec)
    assert (c.options, c.label) == (options, label)


def test_llamacpp_without_its_package_says_so(monkeypatch):
    missing = replace(bench.CONTENDERS["llamacpp"], package="llama_cpp_that_nobody_has")
    monkeypatch.setitem(bench.CONTENDERS, "llamacpp", missing)
    with pytest.raises(Unavailable, match="llama_cpp_that_nobody_has.*--peer llamacpp=PYTHON"):
        bench.find_package("llamacpp", sys.executable)


LLAMA_CPP = """
class Llama:
    def __init__(self, path, n_ctx, n_threads, **_):
        assert open(path, 'rb').read(4) == b'GGUF' and n_threads == 1
    def generate(self, prompt, top_k, temp):
        while True: yield prompt[-1]
"""


def test_batchlab_opens_the_file_that_llamacpp_gets(folder, here, shadows, tmp_path):
    "In one run: the given file; without one, both are left out."
    model = tiny_model("llama", max_position_embeddings=2048)
    given = str(gguf_file(tmp_path / "tiny.q8_0.gguf", model, form="Q8_0"))
    shadows("llama_cpp", LLAMA_CPP.replace("'rb'", f"'rb' if path == {given!r} else '-'"))
    kinds = ["--contenders", "llamacpp", "batchlab:weights=gguf,quantization=w4a8"]
    files = ["--gguf", given, "--json", str(tmp_path / "r.json")]
    status, out, err = here(folder, "single", *files, *kinds)
    assert status == 0, err
    report = json.loads((tmp_path / "r.json").read_text())
    assert [r["label"].rpartition(", ")[2] for r in report["results"]] == ["8-bit weights"] * 2
    status, _, err = here(folder, "single", *kinds)
    assert status == 2 and err.splitlines()[-1].count("give --gguf FILE") == 2, err


def test_memory_of_a_workload_is_measured_beside_its_plan(tmp_path):
    model = tiny_model("llama", max_position_embeddings=2048)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    got = memory_of(str(tmp_path), bench.workload("single", 0, (3, 259), 0.1), dtype="fp32")
    assert got["weights"] >= weight_bytes(model) and got["kv"] > 0
    assert 0 < got["base"] < got["ready"] <= got["peak"]
