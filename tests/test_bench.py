"The benchmark from outside: contenders in processes of their own, without batchlab, ended early, or not there at all."

import contextlib, json, os, subprocess, sys
from dataclasses import replace

import psutil, pytest

from batchlab import bench
from batchlab.bench import peers, profiling, shapes
from batchlab.cli.measure import main
from batchlab.errors import ModelError, Unavailable
from batchlab.jobs.advice import conclusions
from batchlab.api import LLM
from batchlab.models import load_model, tiny_model
from batchlab.basics.prefill import generate_naive
from batchlab.view import drawing
from helpers import greedy, ids, run, until

TINY = "--dtype fp32 --device cpu --scale .03 --threads 1 --rounds 1".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A tiny model, as `save_pretrained` writes it."
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(path)
    return str(path)


def command(model, workloads, *more):
    "The command in a process of its own: status, standard output, standard error."
    args = [*TINY, "--model", model, "--workloads", *workloads.split(), *more]
    r = run(sys.executable, "-m", "batchlab", "bench", *args)
    return r.returncode, r.stdout, r.stderr


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
    who = "--contenders batchlab hf-static vllm --peer vllm=/nowhere/python".split()
    files = ["--json", str(tmp_path / "r.json"), "--svg", str(tmp_path / "r.svg")]
    status, out, err = command(folder, "uniform prefix", *who, *files)
    assert status == 0, err
    report = json.loads((tmp_path / "r.json").read_text())
    assert [r["contender"] for r in report["results"]] == ["batchlab", "hf-static"]
    assert all(w["same_tokens"] == 1 for r in report["results"] for w in r["workloads"].values())
    [left_out] = report["left_out"]
    assert left_out in out and "/nowhere/python" in left_out
    assert report["machine"]["threads"] == 1 and report["command"][:2] == ["batchlab", "bench"]
    assert (tmp_path / "r.svg").read_text().startswith("<svg")


def test_a_profile_of_a_file_in_8_bits(folder, here, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(dict(prompt=[5, 6], max_tokens=2)) + "\n")
    status, out, err = command(folder, "uniform", "--profile", "-i", str(source))
    assert status == 0 and "in.jsonl" in out, err
    status, _, err = here(folder, "uniform", "--quantization", "int8")
    assert status == 2 and "--contenders batchlab:quantization=int8" in err
    linears = [str(m) for m in conclusions(dict(linears=1.0))]
    assert "halves it" in linears[0]
    assert "halves it" not in str(conclusions(dict(linears=1.0), int8=True)[0])


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
    parts, steps = profiling.profile(llm, bench.workload("mixed", 0, (3, 259), 0.05))
    assert PackedStep.attention is before and steps > 0 and all(t > 0 for t in parts.values())


@pytest.mark.parametrize(
    "args, said",
    [
        ("--contenders llm", "contender 'llm' is unknown"),
        ("--peer vllm", "must be NAME=PYTHON"),
        ("--contenders openvino --peer openvino=/nowhere", "nobody could be measured"),
        ("--shape llama-1b", "not allowed with"),
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


def test_unknown_shape_names_those_there_are():
    with pytest.raises(ValueError, match="'qwen3-9b'.*'llama-1b'"):
        shapes.shape_folder("qwen3-9b")


def test_what_a_contender_did_before_it_died_is_reported():
    "It dies in the middle of its second workload: the first stands in table and picture."

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
    whole.rounds = dict(died.rounds, uniform=[(0.25, died.rounds["single"][0][1])])
    report = bench.as_report([whole, died])
    assert [list(r["workloads"]) for r in report["results"]] == [["single", "uniform"], ["single"]]
    assert "| died |" in bench.speed_table(report)
    assert "died" in bench.detail_table(report) and "died" in drawing.bars(*bench.bars(report)).svg


def test_a_shape_is_made_once_and_every_way_of_loading_gives_its_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHLAB_CACHE", str(tmp_path / "cache"))
    made, gemma = tmp_path / "cache/bench-shapes", shapes.SHAPES["gemma3-270m"]
    sizes = dict(num_hidden_layers=6, hidden_size=64, intermediate_size=96, vocab_size=300)
    small = gemma | sizes | dict(layer_types=gemma["layer_types"][:6])
    monkeypatch.setitem(shapes.SHAPES, "small", small)
    (made / "small-fp32-s0.tmp-killed").mkdir(parents=True)
    folder = shapes.shape_folder("small", "fp32")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert shapes.shape_folder("small", "fp32") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert sorted(p.name for p in made.iterdir()) == ["small-fp32-s0", "small-fp32-s0.lock"]
    model, tokenizer = load_model(str(folder))
    prompts = [[7, 200, 31], [5, 90, 140, 299, 8, 8]]
    want = [generate_naive(model, p, 6, ()) for p in prompts]
    assert len({tuple(w) for w in want}) == 2
    assert tokenizer.decode(tokenizer("one two").input_ids) == "one two"
    assert ids(LLM(str(folder)).generate(prompts, greedy(6), use_tqdm=False)) == want
    config = shapes.shape_folder("small", "auto") / "config.json"
    assert json.loads(config.read_text(encoding="utf-8"))["dtype"] == "bfloat16"


def test_a_file_of_weights_is_not_read_as_a_tokenizer(tmp_path, monkeypatch):
    "transformers would read all of it as text, four bytes a character, and that would be the peak."
    read = []
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *a, **k: read.append(a)
    )
    settings = dict(dtype="fp32", device="cpu", max_num_seqs=2, options={})
    (file := tmp_path / "no.gguf").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="no.gguf"):
        peers.start_batchlab(str(file), **settings)
    assert not read


def test_the_shapes_are_those_that_were_published():
    names = ("gemma3-270m", "qwen3-0.6b", "llama-1b", "llama-3b")
    gemma, qwen, llama, larger = (shapes.SHAPES[name] for name in names)
    assert (larger["num_hidden_layers"], larger["hidden_size"]) == (28, 3072)
    full = [i for i, kind in enumerate(gemma["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11, 17] and gemma["vocab_size"] == 262_144
    assert qwen["vocab_size"] == llama["vocab_size"] == 49_152
    heads = llama["num_attention_heads"], llama["num_key_value_heads"], llama["head_dim"]
    assert llama["num_hidden_layers"] == 16 and heads == (32, 8, 64)


@pytest.mark.parametrize(
    "spec, options, label",
    [
        ("llamacpp", {}, "llama.cpp, one by one"),
        (
            "llamacpp:quantization=q4_0,n_batch=64",
            dict(quantization="q4_0", n_batch=64),
            "llama.cpp, one by one (quantization=q4_0, n_batch=64)",
        ),
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


def test_llamacpp_gets_a_file_where_one_can_be_written(folder, here, shadows, tmp_path):
    "With a package in its place that reads the file's first bytes: two quantizations side by side, and a family that is not written."
    shadows("llama_cpp", LLAMA_CPP)
    kinds = ["llamacpp", "llamacpp:quantization=q4_0", "llamacpp:quantization=q5"]
    status, out, err = here(folder, "single", "--contenders", *kinds)
    assert status == 0 and "quantization=q5 is left out: quantization 'q5' is not written" in out, (
        err
    )
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| llama")]
    names = [bench.contender(kind).label for kind in kinds]
    assert rows[:2] == [f"{names[0]}, 8-bit weights", f"{names[1]}, 4-bit weights"]
    opt = str(tmp_path / "opt")
    tiny_model("opt", max_position_embeddings=2048).save_pretrained(opt)
    status, out, err = here(opt, "single", "--contenders", "batchlab", "llamacpp")
    assert status == 0 and "llamacpp is left out: 'opt' is not written as GGUF" in out, err
    assert "| batchlab |" in out and not list((tmp_path / "opt").glob("*.gguf"))


def test_batchlab_opens_the_file_that_llamacpp_gets(here, shadows, tmp_path):
    "In one run: the given file, and weights of a kind that nobody writes."
    model = str(tmp_path / "tiny")  # more ids than the tokenizer's, as a file's vocabulary needs
    tiny_model("llama", max_position_embeddings=2048, vocab_size=300).save_pretrained(model)
    given = str(shapes.gguf_of(model, tmp_path, "q8_0"))
    shadows("llama_cpp", LLAMA_CPP.replace("'rb'", f"'rb' if path == {given!r} else '-'"))
    kinds = ["llamacpp", "batchlab:weights=gguf,quantization=w4a8", "batchlab:weights=q3"]
    files = ["--gguf", given, "--json", str(tmp_path / "r.json")]
    status, out, err = here(model, "single", *files, "--contenders", *kinds)
    assert status == 0 and "weights=q3 is unknown: choose gguf, " in out, err
    report = json.loads((tmp_path / "r.json").read_text())
    assert [r["label"].rpartition(", ")[2] for r in report["results"]] == ["8-bit weights"] * 2


def test_weights_of_batchlab_are_a_file(folder, tmp_path):
    setup = bench.Setup(None, dict(model=folder, gguf=None), forms=tmp_path)
    told = lambda spec: bench.own_settings(bench.contender(spec), setup)
    written = told("batchlab:weights=q4_0,quantization=w4a8")
    assert open(written["model"], "rb").read(4) == b"GGUF"
    assert written["options"] == dict(quantization="w4a8")
    with pytest.raises(Unavailable, match="no .gguf file is there for weights=gguf: give --gguf"):
        told("batchlab:weights=gguf")
    setup.settings["gguf"] = "given.gguf"
    assert told("batchlab:weights=gguf")["model"] == "given.gguf"
    assert told("batchlab")["model"] == folder


@pytest.mark.parametrize("mode", ["profile", "memory"])
def test_modes_look_at_the_weights_that_are_named(folder, mode, monkeypatch):
    opened = []
    monkeypatch.setattr(profiling.batchlab, "LLM", lambda model, **how: opened.append((model, how)))
    monkeypatch.setattr(
        profiling, "memory_of", lambda own, w, t: opened.append((own["model"], own["options"]))
    )
    monkeypatch.setattr(profiling, "memory_table", lambda rows: "")
    args = [*TINY, f"--{mode}", "--workloads", "single", "--contenders", "batchlab:weights=gguf"]
    settings = dict(model=folder, gguf="some.gguf", dtype="fp32", device="cpu", max_num_seqs=2)
    settings |= dict(options=dict(weights="gguf"), vocab=(3, 259))
    setup = bench.Setup(bench.parser().parse_args(args), settings)
    profiling.own_llm(setup) if mode == "profile" else profiling.run_memory(setup)
    [(model, how)] = opened
    assert model == "some.gguf" and "weights" not in how
