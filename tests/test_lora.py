"Adapters by request: their products, their tokens, their places in memory, what can't be loaded, and where requests name them."

import asyncio, copy, json, os, pickle, shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import has_compiler
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from batchlab import LLM, LoRARequest, run
from batchlab.api.ray import LineQueue, RayJob, RayRun, engine_facts, engine_in
from batchlab.fast.trial import BackendOptions, kv_layout
from batchlab.fast.backends import select_backend
from batchlab.fast import kernels, modules
from batchlab.fast.adapters import linear_shapes
from batchlab.core.batch import pack_rows
from batchlab.errors import AdapterError, ParamError, UnsupportedModelError
from batchlab.tasks.lora import Adapters, read_adapter, read_modules
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.core.request import Request
from batchlab.core.scheduler import Scheduler
from batchlab.jobs.job import Job, JobError
from batchlab.models.tiny import tiny_adapter
from helpers import drain, generated, greedy, ids, json_lines, needs, noting, one_thread, step_of
from test_encoders import encoder

pytestmark = one_thread
compiled = pytest.mark.skipif(not has_compiler(), reason="needs a compiler")
GREEDY = greedy(8)
ASKED = dict(prompt="hi", max_tokens=8, ignore_eos=True, temperature=0)
ATTENTION = "q_proj", "v_proj", "c_attn", "qkv_proj", "query_key_value"


def merged(model, folder, max_rank=256):
    "A copy of `model` whose weights have the adapter in `folder` added, by the definition of LoRA."
    model = copy.deepcopy(model)
    for name, p in read_adapter(folder, linear_shapes(model), max_rank).items():
        m = model.get_submodule(name)
        added = (p.scale * p.up.double() @ p.down.double()).to(m.weight.dtype)
        m.weight.data += added.T if type(m).__name__ == "Conv1D" else added
    return model


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    "A tiny model, three adapters for it of different ranks, and it merged with none and with each."
    model, root = tiny_model("llama"), tmp_path_factory.mktemp("adapters")
    model.generation_config.eos_token_id = [2]
    folders = [
        tiny_adapter(root / "a", model, 3, 1),
        tiny_adapter(root / "b", model, 8, 2, ATTENTION),
        tiny_adapter(root / "c", model, 40, 3),
    ]
    return (
        model,
        [LoRARequest(f.name, i, f) for i, f in enumerate(folders, 1)],
        [model, *(merged(model, f) for f in folders)],
    )


def engine(three, **kwargs):
    return LLM(three[0], tiny_tokenizer(), enable_lora=True, max_lora_rank=64, **kwargs)


def alone(model, prompt):
    "What transformers generates by itself."
    return generated(model, prompt, 8)


def said(llm, model, prompt):
    "What transformers generates by itself, as text."
    return llm.tokenizer.decode(alone(model, llm.tokenizer(prompt)["input_ids"]))


def three_ranks(root, model, *modules):
    "Adapters of three ranks for `model`, for all linear layers or for those that `modules` names."
    named = modules or (None,) * 3
    return [
        tiny_adapter(root / str(i), model, r, i, m) for i, r, m in zip(range(3), (3, 8, 40), named)
    ]


class Rows:
    "Rows of a step with different adapters, through the backend that `open_backend` makes of a copy of `model`."

    IDS = [[5], [7], [9], [3], [8], [3, 4, 5] * 10, [8] * 5, [60, 61] * 14, [8, 9, 10] * 7]
    OF = [0, 1, 2, 3, 2, 2, 0, 3, 1]

    def __init__(self, model, folders, open_backend):
        self.refs, self.model = [model, *(merged(model, f) for f in folders)], copy.deepcopy(model)
        self.adapters = Adapters(linear_shapes(model), 4, 4, 64)
        self.backend = open_backend(self.model, kv_layout(model))
        self.adapters.bind(self.backend)
        requests = [LoRARequest(str(i), i, f) for i, f in enumerate(folders, 1)]
        self.held = [self.adapters.admit(r) for r in requests]
        self.numbers = [0, *(a.number for a in self.held)]

    def run(self, rows, of=None):
        size, tables = self.backend.block_size, [[2 * i, 2 * i + 1] for i in range(len(rows))]
        numbers = [0] * len(rows) if of is None else [self.numbers[a] for a in of]
        batch = pack_rows([(r, 0) for r in rows], tables, size, adapters=numbers)
        return self.backend.execute(self.backend.make_cache(2 * len(rows)), batch)

    def each(self):
        "The rows, one at a time."
        return torch.cat([self.run([r], [a]) for r, a in zip(self.IDS, self.OF)])

    def wanted(self):
        "What the merged model of each row says."
        pairs = [(self.refs[a], torch.tensor([ids])) for ids, a in zip(self.IDS, self.OF)]
        return [m(ids, use_cache=False).logits[0, -1] for m, ids in pairs]

    def check(self):
        "Each row is as of its merged model; gives the outputs."
        got = self.run(self.IDS, self.OF)
        for y, want in zip(got, self.wanted()):
            assert (y - want).abs().max() <= 1e-4 * want.abs().max()
        return got


@compiled
@pytest.mark.parametrize(
    "arch", ["llama", "gpt2", "phi3", "gpt_neox", "olmo2", "cohere", "qwen2_moe"]
)
def test_rows_of_a_step_have_their_adapters_and_the_same_bits_alone(arch, tmp_path):
    model = tiny_model(arch)
    some = None if arch != "qwen2_moe" else ("q_proj", "k_proj", "o_proj")
    folders, how = three_ranks(tmp_path, model, some, ATTENTION, some), BackendOptions(own=True)
    rows = Rows(model, folders, lambda *of: select_backend(*of, how))
    assert rows.backend.name == "fused"
    got = rows.check()
    assert torch.equal(got, rows.each())  # in any company
    # and those without as if there were none
    assert torch.equal(got[[0, 6]], rows.run(rows.IDS)[[0, 6]])


@compiled
@pytest.mark.parametrize("quantization", [None, "int8", "w4a8"])
@pytest.mark.parametrize("own", [True, False])
def test_adapters_on_bf16_and_bytes(quantization, own, tmp_path):
    model = tiny_model("llama").bfloat16()
    folders = three_ranks(tmp_path, model)
    # without room for packed weights the products are the model's own: those rows are added to behind them
    room = None if own or quantization else 0
    how = BackendOptions(own=own, room=room, quantization=quantization)
    opened = lambda model, layout: select_backend(model.bfloat16(), layout, how)
    rows = Rows(model.float(), folders, opened)
    got = rows.run(rows.IDS, rows.OF)
    if rows.backend.batch_invariant:
        assert torch.equal(got, rows.each())
    for y, base, want, a in zip(got, rows.run(rows.IDS), rows.wanted(), rows.OF):
        # as near as such rounding lets it be
        assert not a or (y - want).norm() < 0.35 * (base - want).norm()


@pytest.mark.parametrize(
    "kind",
    ["torch", pytest.param("kernels", marks=compiled), pytest.param("modules", marks=compiled)],
)
@pytest.mark.parametrize("arch", ["llama", "gpt2", "mixtral"])
def test_the_models_own_code_runs_adapters(kind, arch, tmp_path):
    model = tiny_model(arch)
    folders = three_ranks(tmp_path, model, *[("q_proj", "o_proj")] * 3 * (arch == "mixtral"))
    how = BackendOptions(own=kind == "modules", compile="auto" if kind != "torch" else False)
    opened = dict(kernels=kernels.open_backend, modules=modules.open_backend, torch=select_backend)
    rows = Rows(model, folders, lambda *of: opened[kind](*of, how))
    assert rows.backend.name == kind
    rows.check()
    assert not any(m._forward_hooks for m in rows.model.modules())  # left as it was


@pytest.mark.parametrize("compile", [pytest.param("auto", marks=compiled), False])
def test_any_mix_gives_the_tokens_of_merged_models(three, compile):
    model, requests, refs = three
    # chunks, and queues
    llm = engine(three, compile=compile, max_num_seqs=6, max_num_batched_tokens=24)
    start = "All of them begin with the same words, long enough to be found again: "
    prompts, of = [start + "x" * (i % 5) for i in range(24)], [i % 4 for i in range(24)]
    loras = [None, *requests]
    for again in (False, True):
        outs = llm.generate(prompts, GREEDY, lora_request=[loras[a] for a in of])
        assert ids(outs) == [alone(refs[a], o.prompt_token_ids) for o, a in zip(outs, of)]
        assert [o.lora_request for o in outs] == [loras[a] for a in of]
        cached = [o.num_cached_tokens for o in outs]  # what one adapter computed is no other's
        assert min(cached) >= 64 if again else cached[:4] == [0] * 4 and max(cached) > 64
    report = llm.verify(outs)
    assert report.ok and report.requests
    events = llm.stream(prompts[:4], GREEDY, lora_request=loras)
    ended = {e.index: e.output for e in events if e.finished}
    assert ids(ended[i] for i in range(4)) == ids(outs[:4])


def test_vectors_and_choices_with_adapters_are_those_of_merged_models(three):
    "Alone and where others begin alike, which one adapter computed for itself; and again, from the cache."
    llm = engine(three, compile=False, max_num_seqs=6)
    longer = "A much longer prompt, of other words, which ends so:"
    prompts = ["The sea is"] * 4 + [longer, "x", "The sea was", "The sea is"]
    choices, loras = [" blue", " warm and wide", " so"], [None, *three[1]] * 2
    plain = [LLM(ref, tiny_tokenizer(), compile=False) for ref in three[2]] * 2
    scores = [ref.choose(prompt, choices)[0] for ref, prompt in zip(plain, prompts)]
    assert len({o.logprobs[" so"] for o in scores[:4]}) == 4
    for _ in range(2):
        outs = llm.choose(prompts, choices, lora_request=loras)
        assert [o.lora_request for o in outs] == loras
        for out, want in zip(outs, scores, strict=True):
            for choice in choices:
                near = pytest.approx(want.token_logprobs[choice], abs=1e-4)
                assert out.token_logprobs[choice] == near
    one, other = llm.choose(prompts[:2], choices, lora_request=three[1][0])
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    for prompt, ref, out in zip(prompts, plain, llm.embed(prompts, lora_request=loras)):
        near = pytest.approx(ref.embed(prompt)[0].outputs.embedding, rel=1e-3, abs=1e-4)
        assert out.outputs.embedding == near


def test_what_a_configuration_says_of_rank_and_scale(tmp_path):
    model = tiny_model("llama")

    def scales(name, **config):
        folder = tiny_adapter(tmp_path / name, model, **config)
        parts = read_adapter(folder, linear_shapes(model), 256)
        return {name.split(".", 1)[1]: part.scale for name, part in parts.items()}

    assert {*scales("plain", rank=4, lora_alpha=6).values()} == {1.5}
    assert {*scales("roots", rank=16, lora_alpha=6, use_rslora=True).values()} == {1.5}
    patterns = dict(
        modules=("q_proj", "k_proj"),
        rank_pattern={"q_proj": 16},
        alpha_pattern={r"layers\.1\.self_attn\.k_proj": 40},
    )
    found = scales("patterns", rank=4, lora_alpha=8, **patterns)
    attention = [f"layers.{i}.self_attn.{part}" for part in ("q_proj", "k_proj") for i in (0, 1)]
    assert found == dict(zip(attention, [0.5, 0.5, 2.0, 10.0]))


def test_other_ways_to_write_an_adapter(tmp_path):
    model = tiny_model("llama")
    shapes, folder = linear_shapes(model), tiny_adapter(tmp_path, model, 2, modules=("q_proj",))
    want, file = read_adapter(folder, shapes, 8), folder / "adapter_model.safetensors"
    tensors = load_file(file)
    file.unlink()

    def read(name=str, change=lambda t: t):
        changed = {name(k): change(t) for k, t in tensors.items()}
        torch.save(changed, folder / "adapter_model.bin")
        return read_adapter(folder, shapes, 8)

    for name in (
        lambda k: k.replace(".weight", ".default.weight"),  # an older PEFT
        lambda k: k.replace(".model.model.", ".model."),  # trained without the head
    ):
        got = read(name)
        assert got.keys() == want.keys() and all(torch.equal(got[n].up, want[n].up) for n in want)
    with pytest.raises(AdapterError, match="int8"):  # quantised, its scales elsewhere
        read(change=lambda t: t.to(torch.int8))


# Settings of a configuration, and a word of what is said of them. No number comes of the last.
BROKEN = r"""
[{"use_dora": true}, "DoRA"]
[{"modules_to_save": ["score"]}, "modules_to_save"]
[{"peft_type": "LOHA"}, "PEFT type LOHA"]
[{"bias": "all"}, "bias='all'"]
[{"init_lora_weights": "pissa"}, "changed base"]
[{"init_lora_weights": "of_a_later_peft"}, "later_peft"]
[{"from_a_later_peft": true}, "from_a_later_peft"]
[{"r": 5}, "rank 4"]
[{"r": "many"}, "adapter_config.json"]
[{"target_parameters": ["experts"]}, "target_parameters"]
[{"lora_alpha": NaN}, "a scale of nan"]
[{"alpha_pattern": {"q_proj": "x"}}, "gives no scale"]
[{"lora_alpha": 1e308, "alpha_pattern": {"q_proj": Infinity}}, "a scale of inf"]
[{"rank_pattern": {"(": 3}}, "gives no scale"]
"""


@pytest.mark.parametrize("config, words", json_lines(BROKEN), ids=str)
def test_what_is_more_than_lora_or_no_number_is_refused_by_name(config, words, tmp_path):
    model = tiny_model("llama")
    with pytest.raises(AdapterError, match=words):
        read_adapter(tiny_adapter(tmp_path / "bad", model, **config), linear_shapes(model), 64)


def first_of(tensors):
    return next(iter(tensors))


def and_weights_of(part):
    return lambda tensors: tensors | {f"base_model.model.{part}": torch.ones(2, 2)}


# What is said, what the tensors of an adapter become, and of what it is made.
SPOILT = [
    ("no linear layer", lambda d: {k.replace("q_proj", "qq_proj"): t for k, t in d.items()}, {}),
    ("for this model they must be", dict, dict(model=tiny_model("llama", hidden_size=32))),
    ("max_lora_rank=65", dict, dict(rank=65)),
    ("one half", lambda d: {k: t for k, t in d.items() if k != first_of(d)}, {}),
    ("weights of its own", and_weights_of("score.weight"), {}),
    ("save_embedding_layers=False", and_weights_of("lm_head.base_layer.weight"), {}),
    ("LoRA of an embedding", and_weights_of("model.embed_tokens.lora_embedding_A"), {}),
    ("has no weights", lambda d: {}, {}),
    ("can't be read", dict, {}),
    ("nor adapter_model.bin", dict, {}),
    ("no adapter_config.json", dict, {}),
    ("there is no folder", dict, {}),
]


def test_what_can_not_be_loaded_says_why_and_stops_nobody(three, tmp_path):
    model, requests, refs = three
    llm, loras = engine(three, compile=False), [requests[0]]
    for i, (words, change, how) in enumerate(SPOILT, 10):
        folder, made = tmp_path / words, dict(model=model, base_model_name_or_path="other/model")
        file = tiny_adapter(folder, **made | how) / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)
        loras.append(LoRARequest(words, i, folder))
    (tmp_path / "can't be read" / file.name).write_bytes(b"{")
    (tmp_path / "nor adapter_model.bin" / file.name).unlink()
    (tmp_path / "no adapter_config.json" / "adapter_config.json").unlink()
    shutil.rmtree(folder)
    good, *outs = llm.generate(["a"] * len(loras), GREEDY, lora_request=loras)
    assert ids([good]) == [alone(refs[1], good.prompt_token_ids)]
    for out, (words, *_) in zip(outs, SPOILT, strict=True):
        assert out.refused and words in out.error and "\n" not in out.error, (words, out.error)
    assert "'other/model'" in outs[0].error
    twice = LoRARequest("other", 1, loras[3].lora_path)
    (out,) = llm.generate("a", GREEDY, lora_request=twice)
    assert "'a' has: give it another lora_int_id" in out.error


def opened(model, **how):
    return LLM(model, enable_lora=True, compile=False, **how)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: opened(tiny_model("bloom")), UnsupportedModelError, "packed"),
        (lambda: read_modules(["just-a-name"]), ParamError, "name=folder"),
        (lambda: LoRARequest("x", 0, "y"), ValueError, "lora_int_id"),
        (lambda: LoRARequest("x", True, "y"), ValueError, "lora_int_id"),
        (lambda: LoRARequest("x", 1, ""), ValueError, "lora_path"),
        (lambda: LoRARequest("", 1, "y"), ValueError, "lora_name"),
    ],
)
def test_settings_that_can_not_be_meant(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_names_and_folders_are_written_in_several_ways():
    assert read_modules(["a=b=c", '{"name": "d", "path": "e"}'])["a"].lora_path == "b=c"
    assert read_modules({"x": Path("y")})["x"].lora_int_id == 1


def test_at_most_so_many_are_in_memory_and_have_requests(three):
    model, requests, refs = three
    llm, seen = engine(three, max_loras=1, max_cpu_loras=2, compile=False), []

    def watch(who, event, x):
        if event == "schedule":
            running = {r.request.adapter for r in x.rows} - {0}
            seen.append((running, len(llm.adapters.loaded)))

    llm.watchers.append(watch)
    plan = llm.plan([[5]] * 3, GREEDY, lora_request=requests)
    for _ in range(2):  # those that had to go come again
        prompts = [[5 + i, 9] for i in range(12)]
        outs = llm.generate(prompts, GREEDY, lora_request=requests * 4)
        assert ids(outs) == [alone(ref, p) for ref, p in zip(refs[1:] * 4, prompts)]
    assert set.union(*(running for running, _ in seen)) == {1, 2, 3}
    assert max(len(running) for running, _ in seen) == 1 and max(n for _, n in seen) <= 2
    parts = [read_adapter(Path(r.lora_path), llm.adapters.shapes, 64).values() for r in requests]
    largest = sorted(sum(p.down.nbytes + p.up.nbytes for p in some) for some in parts)[1:]
    assert plan.adapters_bytes == sum(largest) <= plan.adapters_limit_bytes
    assert llm.adapters.nbytes <= plan.adapters_limit_bytes


def test_seats_for_adapters_without_a_model():
    s = Scheduler(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=4,
        may_enter=Adapters({}, 4, max_loras=1).may_enter,
    )
    s.patience = 6

    def step():
        return {row.request.request_id for row in step_of(s).rows}

    add = lambda name, adapter, n=1: s.add(Request(name, [3, 4], n, adapter=adapter))
    for name, adapter in (("a", 1), ("b", 2), ("c", 1), ("d", 0)):
        add(name, adapter, 2)
    assert step() == {"a", "c", "d"} == step()
    assert step() == {"b"}  # those behind b were let past, for a while
    add("w", 1, 99)
    add("x", 3)
    for i in range(20):
        add(f"y{i}", 1)
    ran = set()
    for _ in range(8):
        ran |= step()
    assert ran & {"x", *(f"y{i}" for i in range(20))} == {f"y{i}" for i in range(6)}  # not for ever


def test_adapters_come_and_go_while_requests_run(three, tmp_path):
    model, requests, refs = three
    llm, folder = engine(three, compile=False), tiny_adapter(tmp_path / "x", model, seed=5)
    x = LoRARequest("x", 7, folder)
    old = merged(model, folder)
    assert llm.add_lora(x) and llm.list_loras() == {7} and [*llm.adapters.loaded] == [1]
    events = []
    llm.add_request([5, 6], GREEDY, events.append, lora_request=x)
    llm.step()
    assert llm.remove_lora(7) and not llm.remove_lora(7)
    assert llm.list_loras() == set() and not llm.adapters.loaded
    tiny_adapter(folder, model, seed=6)  # another one, in its place
    new = merged(model, folder)
    (out,) = llm.generate([[5, 6]], GREEDY, lora_request=x)
    assert ids([out]) == [alone(new, [5, 6])] and out.num_cached_tokens == 0
    # the first ran to its end with what it had
    assert ids([events[-1].output]) == [alone(old, [5, 6])]
    assert len(llm.adapters.alive) == 1  # and the old one went with it
    tiny_adapter(folder, model, seed=5)
    anew = LoRARequest("x", 7, folder, load_inplace=True)
    again = llm.generate([[5, 6]] * 2, GREEDY, lora_request=[x, anew])
    assert ids(again) == [alone(m, [5, 6]) for m in (new, old)]  # it is read again for who says so


def test_a_file_that_goes_takes_its_own_requests_alone(three, tmp_path):
    model, requests, refs = three
    llm = engine(three, compile=False)
    folder = tiny_adapter(tmp_path / "x", model)
    got = {}
    loras = dict(gone=LoRARequest("x", 7, folder), base=None, other=requests[0])
    for name, lora in loras.items():
        llm.add_request([5, 6], GREEDY, noting(got), name, lora_request=lora)
    shutil.rmtree(folder)  # after it was looked at, before it was read
    drain(llm)
    assert "adapter 'x'" in got["gone"].error and "ask for it again" in got["gone"].error
    assert ids([got["base"], got["other"]]) == [alone(m, [5, 6]) for m in refs[:2]]


@pytest.fixture
def job(three, tmp_path):
    "An `LLM` that knows three adapters by name, and `run(lines)`: the records of a job over them."
    modules = {r.lora_name: r.lora_path for r in three[1]}
    llm = LLM(three[0], tiny_tokenizer(), lora_modules=modules, max_lora_rank=64, compile=False)

    def run(lines, kind=Job, **more):
        source, to = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n".join(map(json.dumps, lines)))
        to.unlink(missing_ok=True)
        kind(source, to, ordered=True, say=lambda s: None, model_name="x/tiny", **more).run(llm)
        return json_lines(to.read_text())

    return llm, run


def served(llm):
    "A client of a server of `llm`, which it calls tiny."
    [testclient] = needs("starlette.testclient")
    from batchlab.serve.app import create_app

    return testclient.TestClient(create_app(llm, "tiny"))


class OneWorker(RayRun):
    "The run of a job on Ray whose only worker is in this process."

    def results(self, portions, at_once, times):
        queue = LineQueue(self.job, engine_in(*self.llm.engine))
        with asyncio.Runner() as runner:
            for lines in map(pickle.loads, map(pickle.dumps, portions)):
                records = runner.run(queue.answer(lines))
                yield [(line.number, record) for line, record in zip(lines, records)], ""
            queue.llm.close()


class WithoutRay(RayJob):
    def start(self, stack):
        engine = os.getcwd(), self.llm
        return SimpleNamespace(**vars(engine_facts(*engine)), engine=engine)

    def begin(self, llm, book, outbox):
        return OneWorker(self, llm, book, outbox)


def test_lines_of_a_file_name_adapters(three, job, tmp_path, monkeypatch):
    "Also for a worker on Ray, which finds their folders from where the job is."
    llm, run = job
    want = [said(llm, m, "hi") for m in three[2]]
    named = [dict(model="a"), dict(adapter="b"), {}, dict(adapter="zz"), dict(model="gpt-4")]
    lines = [ASKED | d for d in [*named, dict(model="x/tiny")]]
    monkeypatch.chdir(tmp_path)
    for part in (llm.model, llm.tokenizer):
        part.save_pretrained("model")
    for r in three[1]:
        shutil.copytree(r.lora_path, r.lora_name)
    how = dict(model="model", lora_modules={n: n for n in "abc"}, max_lora_rank=64, compile=False)
    for kind in (Job, partial(WithoutRay, use_tqdm=False, llm=how)):
        records = run(lines, kind, any_model=True)
        assert [r["text"] for r in records] == [want[1], want[2], want[0], None, None, want[0]]
        assert "known are a, b, c" in records[3]["error"]["message"]
        other = records[4]["error"]["message"]  # also with any_model
        assert "line 5: there is no model 'gpt-4'" in other and "its adapters a, b, c" in other


def test_a_batch_file_names_adapters(three, job):
    llm, run = job
    vectors = llm.embed(["hi"] * 3, lora_request=[None, *three[1][:2]])
    asked = [("completions", dict(ASKED, model="c"))]
    asked += [("embeddings", dict(model=name, input="hi")) for name in ("tiny", "a", "b")]
    answer, *bodies = (
        record["response"]["body"]
        for record in run(
            dict(custom_id=str(i), method="POST", url=f"/v1/{url}", body=body)
            for i, (url, body) in enumerate(asked)
        )
    )
    assert (answer["model"], answer["choices"][0]["text"]) == ("c", said(llm, three[2][3], "hi"))
    for body, want in zip(bodies, vectors, strict=True):
        assert body["data"][0]["embedding"] == pytest.approx(want.outputs.embedding, abs=1e-5)
    assert [b["model"] for b in bodies[1:]] == ["a", "b"]


def test_the_command_line_names_adapters():
    from batchlab.cli import llm_options, parse_args

    flags = "run -i x -o y --lora-modules a=here b=/there --max-lora-rank 64 --max-loras 2"
    options = llm_options(parse_args(flags.split()))
    assert options["lora_modules"] == ["a=here", "b=/there"]  # workers go to the same folder
    assert (options["max_lora_rank"], options["max_loras"]) == (64, 2)


def test_the_server_has_adapters_as_models(three, job):
    llm, requests, names = job[0], three[1], ("tiny", "a", "b")
    want = [said(llm, m, "hi") for m in three[2]]
    vectors = llm.embed(["hi"] * 3, lora_request=[None, *requests[:2]])
    with served(llm) as client:
        post = lambda url, **body: client.post(f"/v1/{url}", json=body)
        cards = client.get("/v1/models").json()["data"]
        parents = {c["id"]: c["parent"] for c in cards}
        assert parents == dict(tiny=None, a="tiny", b="tiny", c="tiny")
        assert client.get("/v1/models/b").json()["id"] == "b"
        assert not any(r.lora_path in str(cards) for r in requests)
        for name, text, vector in zip(names, want, vectors):
            answer = post("completions", model=name, **ASKED).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
            lines = post("completions", model=name, stream=True, **ASKED).text.splitlines()
            parts = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
            assert {p["model"] for p in parts} == {name}
            assert "".join(c["text"] for p in parts for c in p["choices"]) == text
            body, near = post("embeddings", model=name, input="hi").json(), vector.outputs.embedding
            assert body["data"][0]["embedding"] == pytest.approx(near, abs=1e-5)
            assert body["model"] == name


def test_clients_bring_in_no_adapters_and_take_none_out(three, tmp_path):
    model, [a, b, _], _ = three
    llm = opened(
        model, tokenizer=tiny_tokenizer(), lora_modules={"a": a.lora_path}, max_lora_rank=64
    )
    (tmp_path / "a").symlink_to(b.lora_path)
    urls = {
        "/v1/completions": ASKED,
        "/v1/embeddings": dict(input="hi"),
        "/tokenize": dict(prompt="hi"),
        "/detokenize": dict(tokens=[5]),
    }
    given = dict(lora_name="b", lora_int_id=1, lora_path=b.lora_path)
    paths = b.lora_path, f"a/../{b.lora_path}", str(tmp_path / "a"), f"b={b.lora_path}"
    with served(llm) as client:
        post = lambda url, **body: client.post(url, json=urls.get(url, {}) | body)
        status = lambda url, **body: post(url, **body).status_code
        for url in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert status(url, **given) == 404
        for url in urls:
            for name in (*paths, "./a", "A", "a ", "", "b"):  # a name is no path
                assert "/v1/" not in url or status(url, model=name) == 404, name
            for bad in (["a"], {"name": "a", "path": b.lora_path}, 1):
                assert status(url, model=bad) == 400, (bad, url)
        for key, value in dict(lora_request=given, lora_path=b.lora_path, adapter="a").items():
            answer = post("/v1/completions", model="tiny", **{key: value})
            assert answer.status_code == 400 and key in answer.json()["error"]["message"]
        assert [c["id"] for c in client.get("/v1/models").json()["data"]] == ["tiny", "a"]
        assert llm.list_loras() == {1}


def test_a_server_begins_with_adapters_that_work_and_names_that_are_one_things(three, tmp_path):
    needs("fastapi")
    from batchlab.serve.app import create_app

    model, [a, _, c], _ = three
    make = lambda modules: opened(
        model, tokenizer=tiny_tokenizer(), lora_modules=modules, max_lora_rank=3
    )
    serve = lambda modules, *others: create_app(make(modules), "tiny", others=others)
    source, of_a = tmp_path / "in.jsonl", {"a": a.lora_path}
    source.write_text('{"prompt": "hi", "model": "tiny"}')
    job = Job(source, tmp_path / "out.jsonl", model_name="tiny")
    for call, error, words in (
        (lambda: serve({"tiny": a.lora_path}), ParamError, "an adapter are both called 'tiny'"),
        (lambda: serve({"also": a.lora_path}, "also"), ParamError, "both called 'also'"),
        (lambda: serve(of_a | {"x": tmp_path / "no"}), AdapterError, "'x': there is no folder"),
        (lambda: serve({"big": c.lora_path}), AdapterError, "max_lora_rank=40"),
        (lambda: make(["a=x", "a=y"]), ParamError, "two adapters 'a'"),
        (lambda: job.run(make({"tiny": a.lora_path})), JobError, "both called 'tiny'"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_a_table_with_a_column_of_adapters(three, tmp_path):
    modules = dict(zip("abc", [a.lora_path for a in three[1]]))
    llm = engine(three, compile=False, lora_modules=modules)
    names = dict(zip(("", "a", "b", "c"), three[2]))
    rows = [dict(q=f"row {'x' * i}", adapter=name) for i, name in enumerate(["", *"abca"])]
    rows[3]["q"] = ""  # it has no prompt; those after it keep their adapters
    lines = "".join(f"{r['q']},{r['adapter']}\n" for r in rows)
    (tmp_path / "in.csv").write_text("q,adapter\n" + lines)
    how = dict(prompt_template="{q}", setting_columns=["adapter"], ordered=True, model=llm)
    run(tmp_path / "in.csv", tmp_path / "out.jsonl", GREEDY, **how)
    found = json_lines((tmp_path / "out.jsonl").read_text())
    wanted = [r["q"] and said(llm, names[r["adapter"]], r["q"]) for r in rows]
    assert [r["text"] or "" for r in found] == wanted
    assert "'q' is empty" in found[3]["error"]["message"]


@pytest.mark.parametrize(
    "call",
    [
        lambda llm, n, lora: llm.choose(["a"] * n, [" b", " c"], lora_request=lora),
        lambda llm, n, lora: llm.generate(["a"] * n, GREEDY, lora_request=lora),
    ],
    ids=["choose", "generate"],
)
def test_an_adapter_that_can_not_be_had_is_one_prompts_error_in_all_calls(three, call):
    llm, plain = engine(three, compile=False), LLM(three[0], tiny_tokenizer(), compile=False)
    loras = [LoRARequest("missing", 9, "nowhere"), three[1][0], "nobody"]
    missing, good, nobody = call(llm, 3, loras)
    assert "'missing': there is no folder" in missing.error and good.error is None
    assert "no adapter 'nobody': known are" in nobody.error
    for asked, lora, words in (
        (llm, loras[:2], "2 values of lora_request for 1"),
        (llm, 7, "must be a LoRARequest or the name"),
        (llm, b"x", "must be a LoRARequest or the name"),
        (plain, loras[1], "enable_lora"),
    ):
        with pytest.raises(ParamError, match=words):
            call(asked, 1, lora)


@pytest.mark.parametrize("compile", [False, "auto"])
def test_a_part_in_what_no_step_runs_is_its_requests_error(compile, tmp_path):
    "A classifier's head and a pooler get a text when it has ended: an adapter's part there would be left out, or meet other rows."
    make = lambda family: encoder(family, AutoModelForSequenceClassification, num_labels=1)
    judge, bert = make("llama"), make("bert")
    for model, part in ((judge, "score"), (bert, "classifier"), (bert, "bert.pooler.dense")):
        llm = LLM(copy.deepcopy(model), enable_lora=True, compile=compile)
        folders = [
            tiny_adapter(tmp_path / f"{part}{i}", model, 4, 1, ("q_proj", "query")) for i in "12"
        ]
        n, k = model.get_submodule(part).weight.shape
        halves = dict(A=torch.ones(4, k), B=torch.ones(n, 4))
        own = {f"base_model.model.{part}.lora_{ab}.weight": t for ab, t in halves.items()}
        save_file(own, folders[0] / "adapter_model.safetensors")
        bad, good = LoRARequest("bad", 1, folders[0]), LoRARequest("good", 2, folders[1])
        plain, ill, well = llm.classify([[5, 6, 7]] * 3, lora_request=[None, bad, good])
        assert ill.refused and f"a part in {part}" in ill.error
        assert not plain.error and not well.error and well.outputs.probs != plain.outputs.probs
