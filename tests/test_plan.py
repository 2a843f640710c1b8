"A plan says what a call takes in all, and whether that fits."

import json
from types import SimpleNamespace

import pytest, torch

from batchlab.api import LLM, SamplingParams
from batchlab.tasks import plan as planning
from batchlab.cli import main
from batchlab.errors import UnsupportedModelError
from batchlab.llm import config
from batchlab.machine import memory_limits
from batchlab.llm.outputs import MemoryPlan, memory_lines
from batchlab.models import tiny_model, tiny_tokenizer
from helpers import python

HOW = dict(max_num_seqs=2, max_model_len=64, kv_cache_bytes=10**6)
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = ["One, two,", "Red, green,", "The sea", "a" * 100]


def outline(folder, model):
    "A folder with the config of `model`, a tokenizer, and no weights."
    model.config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def machine(monkeypatch, total, free):
    "A machine with so many bytes of memory."
    for module in (planning, config):
        for name, n in dict(total_memory=total, free_memory=free).items():
            monkeypatch.setattr(module, name, lambda device, n=n: n, raising=False)


@pytest.mark.parametrize("strategy, step", [("continuous", -1), ("static", 1)])
def test_the_longest_are_queued_first_unless_the_order_given_counts(strategy, step):
    longer = [SimpleNamespace(requests=[SimpleNamespace(max_tokens=n)]) for n in (1, 2)]
    way = SimpleNamespace(strategy=strategy)
    assert planning.queue_order(way, longer) == longer[::step]


@pytest.mark.parametrize(
    "total, free, fits, said",
    [
        (1000, 600, True, "it fits: the machine has"),
        (1000, 599, False, "it does not fit now: of the machine's"),
        (599, 300, False, "or lower max_num_seqs or max_model_len"),
        (200, 100, False, "take a smaller model or dtype"),
    ],
)
def test_the_sum_and_whether_it_fits(total, free, fits, said):
    p = MemoryPlan(1, 1, 1, 2, 1, 300, 200, 1, 200, {}, adapters_bytes=40, workspace_bytes=60)
    assert p.total_bytes == 600 and p.fits is None and not memory_lines(p)
    p.memory_bytes, p.free_bytes = total, free
    assert p.fits is fits and said in memory_lines(p)[1] and said in str(p)
    assert all(f"{name} 0.0 MB" in memory_lines(p)[0] for name in ("weights", "KV", "workspace"))
    assert ("lower" in memory_lines(p)[1]) == (total == 599)


def test_a_loaded_model_fits_with_what_it_holds_already(monkeypatch):
    llm = LLM(tiny_model("llama"), tiny_tokenizer(), compile=False, **HOW)
    machine(monkeypatch, 10**9, 10**8)
    plan = llm.plan(PROMPTS[:3], GREEDY)
    assert plan.weights_bytes == sum(p.nbytes for p in llm.model.parameters())
    assert plan.free_bytes == 10**8 + plan.weights_bytes + plan.libraries_bytes and plan.fits
    assert plan.libraries_bytes == planning.LIBRARIES_BYTES and not plan.loading_bytes
    widest = llm.model.config.intermediate_size
    logits = 8 * plan.slots * llm.loaded.vocab_size
    assert plan.workspace_bytes == 10**7 + 3 * 512 * widest * 4 + logits
    machine(monkeypatch, 10**9, 1000)
    assert not llm.plan(PROMPTS[:3], GREEDY).fits


@pytest.mark.parametrize(
    "size, fits, said",
    [(1000, True, "it fits into 0.0 MB"), (899, False, "it does not fit into 0.0 MB; take a")],
)
def test_loading_may_take_the_most(size, fits, said):
    how = dict(libraries_bytes=400, loading_bytes=500, workspace_bytes=60)
    p = MemoryPlan(1, 1, 1, 2, 1, 100, 200, 1, 200, {}, **how)
    p.memory_bytes = p.free_bytes = size
    p.given = True
    assert (p.running_bytes, p.total_bytes, p.fits) == (760, 900, fits)
    first, then, verdict = memory_lines(p)
    assert "while the model is loaded" in first and then.startswith("then 0.0 MB: weights")
    assert verdict.startswith(said) and ("lower" in verdict) is False


OPENED = """
import json, re, sys
from batchlab import LLM
from batchlab.fast import fused
from batchlab.models import tiny_model

def own():
    with open("/proc/self/status") as f:
        return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", f.read())[1])

def watched(self, *args, **kw):
    out = join(self, *args, **kw)
    seen.append(own())
    return out

LLM(tiny_model("llama"))  # loads what is loaded when first used
join, fused.WeightPacker.join = fused.WeightPacker.join, watched
seen = [own()]
llm = LLM(sys.argv[1], dtype="fp32")
print(json.dumps(dict(peak=max(seen) - seen[0], planned=llm.loaded.loading_bytes)))
"""


def test_packing_takes_what_the_plan_says(tmp_path):
    "The old weights go as the packed ones come: also small ones, which the C library would keep."
    sizes = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=12, head_dim=64)
    model = tiny_model("llama", **sizes, num_attention_heads=9, num_key_value_heads=3)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    done = python(OPENED, str(tmp_path), OMP_NUM_THREADS="1")
    found = json.loads(done.stdout or "{}")
    assert found, done.stderr
    assert found["peak"] < found["planned"] + 30e6


def test_a_plan_for_another_machines_memory(tmp_path, monkeypatch, capsys):
    folder, how = outline(tmp_path, tiny_model("llama")), dict(max_num_seqs=4, max_model_len=64)
    tiny_model("llama").save_pretrained(folder)
    llm = LLM(folder, device="cpu", dtype="bf16", **how)
    most = llm.plan(PROMPTS[:3] * 4, GREEDY, memory_bytes=10**12)
    one = llm.plan(PROMPTS[:3] * 4, GREEDY, memory_bytes=planning.LIBRARIES_BYTES)
    assert most.fits and most.slots == 4 and most.kv_limit_bytes > 10**11
    assert not one.fits and one.slots == 1 and one.kv_limit_bytes < most.kv_bytes
    small = LLM(folder, device="cpu", dtype="bf16", quantization="int8", **how)
    of, of_small = llm.loaded, small.loaded
    assert of_small.loading_bytes == of.loading_bytes > of.weights_bytes > of_small.weights_bytes
    (tmp_path / "in.jsonl").write_text(json.dumps(dict(prompt="Hi")))
    args = ["plan", "-i", str(tmp_path / "in.jsonl"), "--max-model-len", "64", "--memory"]
    assert main([*args, "8GB"], llm) == 0
    assert "it fits into 8,000.0 MB" in capsys.readouterr().out
    assert main([*args, "400MB"], llm) == 0
    assert "it does not fit into 400.0 MB" in capsys.readouterr().out


def group(folder, names, values, idle):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, values):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{idle} 50\n")


V2 = ("memory.max", "memory.current"), "inactive_file"
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"


def test_limits_of_all_groups_above_a_process_count(tmp_path):
    (tmp_path / "self").write_text(
        "3:cpu:/a\n2:hugetlb,memory:/job/7\n0::/system.slice/b.service\n"
    )
    limits = lambda: memory_limits(tmp_path, tmp_path / "self")
    assert limits() == [] and memory_limits(tmp_path, tmp_path / "none") == []
    group(tmp_path / "system.slice" / "b.service", V2[0], (900, 400), V2[1])
    group(tmp_path / "system.slice", V2[0], ("max", 500), V2[1])
    group(tmp_path, V2[0], (5000, 20), V2[1])
    assert limits() == [(900, 350), (5000, 0)]
    group(tmp_path / "memory" / "job" / "7", V1[0], (800, 90), V1[1])
    group(tmp_path / "memory", V1[0], (2**63 - 4096, 100), V1[1])
    assert limits()[:2] == [(800, 40), (2**63 - 4096, 50)] and len(limits()) == 4


@pytest.mark.parametrize(
    "limits, total, free", [([], 5000, 3000), ([(1000, 400), (9000, 1)], 1000, 600)]
)
def test_a_containers_limit_is_the_machines_memory(monkeypatch, limits, total, free):
    memory = type("M", (), dict(total=5000, available=3000))
    monkeypatch.setattr(config.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(config, "memory_limits", lambda: limits)
    cpu = torch.device("cpu")
    assert (config.total_memory(cpu), config.free_memory(cpu)) == (total, free)


@pytest.mark.parametrize(
    "config, words",
    [
        (dict(architectures=["LlamaForMaskedLM"]), "those of a Llama"),
        (dict(model_type="mine"), "mine"),
        (dict(model_type="vit", architectures=[]), "neither a causal"),
    ],
)
def test_what_can_not_load_is_refused_by_its_config(tmp_path, config, words):
    outline(tmp_path, tiny_model("llama"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(UnsupportedModelError, match=words):
        LLM(tmp_path, device="cpu")


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "unheard of"])
def test_packed_folders_are_refused_before_weights_are_read(tmp_path, method):
    outline(tmp_path, tiny_model("llama"))
    file = tmp_path / "config.json"
    packed = dict(quantization_config=dict(quant_method=method, bits=4))
    file.write_text(json.dumps(json.loads(file.read_text()) | packed))
    with pytest.raises(UnsupportedModelError, match=rf"{method}.*\.gguf file"):
        LLM(tmp_path, device="cpu")
