"Adapters by request: their products, their tokens, their places in memory, what can't be loaded, and where requests name them."

import copy, json, shutil
from pathlib import Path

import pytest
import torch
from conftest import has_compiler
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, LlamaConfig

from batchlab import LLM, BeamSearchParams, LoRARequest, SamplingParams
from batchlab.fast.trial import kv_layout
from batchlab.fast.trial import BackendOptions
from batchlab.fast.backends import select_backend
from batchlab.fast import kernels, modules
from batchlab.fast.adapters import linear_shapes
from batchlab.fast.cuda import bucket
from batchlab.core.batch import pack_rows
from batchlab.errors import AdapterError, ParamError, UnsupportedModelError
from batchlab.tasks.lora import Adapters, read_adapter, read_modules
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.core.request import Request, RowOutput
from batchlab.core.scheduler import Scheduler
from batchlab.models.tiny import tiny_adapter

pytestmark = pytest.mark.usefixtures("one_thread")
compiled = pytest.mark.skipif(not has_compiler(), reason="needs a compiler")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
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


def alone(model, ids, n=8):
    "What transformers generates by itself."
    return model.generate(torch.tensor([ids]), max_new_tokens=n, min_new_tokens=n, do_sample=False)[
        0, len(ids) :
    ].tolist()


class Rows:
    "Rows of a step with different adapters, through `backend`."

    IDS = [[5], [7], [9], [3], [8], [3, 4, 5] * 10, [8] * 5, [60, 61] * 14, [8, 9, 10] * 7]
    OF = [0, 1, 2, 3, 2, 2, 0, 3, 1]

    def __init__(self, backend, shapes, folders):
        self.backend, self.adapters = backend, Adapters(shapes, 4, 4, 64)
        self.adapters.bind(backend)
        self.held = [
            self.adapters.admit(LoRARequest(str(i), i, f)) for i, f in enumerate(folders, 1)
        ]
        self.numbers = [0, *(a.number for a in self.held)]

    def run(self, rows, of=None):
        size, tables = self.backend.block_size, [[2 * i, 2 * i + 1] for i in range(len(rows))]
        numbers = [0] * len(rows) if of is None else [self.numbers[a] for a in of]
        return self.backend.execute(
            self.backend.make_cache(2 * len(rows)),
            pack_rows([(r, 0) for r in rows], tables, size, adapters=numbers),
        )

    def check(self, refs, tolerance):
        "Each row is as of its merged model; gives the outputs."
        got = self.run(self.IDS, self.OF)
        for y, ids, a in zip(got, self.IDS, self.OF):
            want = refs[a](torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert (y - want).abs().max() <= tolerance * want.abs().max()
        return got


@compiled
@pytest.mark.parametrize(
    "arch", ["llama", "gpt2", "phi3", "gpt_neox", "olmo2", "cohere", "qwen2_moe"]
)
def test_rows_of_a_step_have_their_adapters_and_the_same_bits_alone(arch, tmp_path):
    model = tiny_model(arch)
    some = None if arch != "qwen2_moe" else ("q_proj", "k_proj", "o_proj")
    folders = [
        tiny_adapter(tmp_path / str(i), model, rank, i, ATTENTION if i == 1 else some)
        for i, rank in enumerate((3, 8, 40))
    ]
    refs, shapes = [model, *(merged(model, f) for f in folders)], linear_shapes(model)
    backend = select_backend(copy.deepcopy(model), kv_layout(model), BackendOptions(own=True))
    assert backend.name == "fused"
    rows = Rows(backend, shapes, folders)
    got = rows.check(refs, 1e-4)
    each = torch.cat([rows.run([r], [a]) for r, a in zip(rows.IDS, rows.OF)])
    assert torch.equal(got, each)  # in any company
    assert torch.equal(
        got[[0, 6]], rows.run(rows.IDS)[[0, 6]]
    )  # and those without as if there were none


@compiled
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("own", [True, False])
def test_adapters_on_bf16_and_bytes(quantization, own, tmp_path):
    model = tiny_model("llama").bfloat16()
    folders = [tiny_adapter(tmp_path / str(i), model, rank, i) for i, rank in enumerate((3, 8, 40))]
    refs, shapes = [merged(model.float(), f) for f in folders], linear_shapes(model)
    # without room for packed weights the products are the model's own: those rows are added to behind them
    backend = select_backend(
        copy.deepcopy(model).bfloat16(),
        kv_layout(model),
        BackendOptions(own=own, room=None if own or quantization else 0, quantization=quantization),
    )
    rows = Rows(backend, shapes, folders)
    got = rows.run(rows.IDS, rows.OF)
    if backend.batch_invariant:
        assert torch.equal(got, torch.cat([rows.run([r], [a]) for r, a in zip(rows.IDS, rows.OF)]))
    far = rows.run(rows.IDS)
    for y, base, ids, a in zip(got, far, rows.IDS, rows.OF):
        if not a:
            continue
        want = refs[a - 1](torch.tensor([ids]), use_cache=False).logits[0, -1]
        assert (y - want).norm() < 0.35 * (
            base - want
        ).norm()  # as near as such rounding lets it be


@pytest.mark.parametrize(
    "kind",
    ["torch", pytest.param("kernels", marks=compiled), pytest.param("modules", marks=compiled)],
)
@pytest.mark.parametrize("arch", ["llama", "gpt2", "mixtral"])
def test_the_models_own_code_runs_adapters(kind, arch, tmp_path):
    model = tiny_model(arch)
    folders = [
        tiny_adapter(
            tmp_path / str(i), model, rank, i, ("q_proj", "o_proj") if arch == "mixtral" else None
        )
        for i, rank in enumerate((3, 8, 40))
    ]
    refs, shapes, mine, layout = (
        [model, *(merged(model, f) for f in folders)],
        linear_shapes(model),
        copy.deepcopy(model),
        kv_layout(model),
    )
    backend = (
        select_backend(mine, layout, BackendOptions(compile=False))
        if kind == "torch"
        else dict(kernels=kernels, modules=modules)[kind].open_backend(
            mine, layout, BackendOptions(own=kind == "modules")
        )
    )
    assert backend.name == kind
    Rows(backend, shapes, folders).check(refs, 1e-4)
    assert not any(m._forward_hooks for m in mine.modules())  # left as it was


def test_recorded_steps_are_for_rows_without_adapters():
    rows = [([1], 3), ([2], 5)]
    assert bucket(pack_rows(rows, [[0], [1]], 64), 64) and not bucket(
        pack_rows(rows, [[0], [1]], 64, adapters=[0, 2]), 64
    )


@pytest.mark.parametrize("compile", [pytest.param("auto", marks=compiled), False])
def test_any_mix_gives_the_tokens_of_merged_models(three, compile):
    model, requests, refs = three
    llm = engine(
        three, compile=compile, max_num_seqs=6, max_num_batched_tokens=24
    )  # chunks, and queues
    start = "All of them begin with the same words, long enough to be found again: "
    prompts, of = [start + "x" * (i % 5) for i in range(24)], [i % 4 for i in range(24)]
    for again in (False, True):
        outs = llm.generate(
            prompts, GREEDY, lora_request=[None if not a else requests[a - 1] for a in of]
        )
        for o, a in zip(outs, of):
            assert o.outputs[0].token_ids == alone(refs[a], o.prompt_token_ids)
            assert o.lora_request == (requests[a - 1] if a else None)
        cached = [o.num_cached_tokens for o in outs]  # what one adapter computed is no other's
        assert min(cached) >= 64 if again else cached[:4] == [0] * 4 and max(cached) > 64
    report = llm.verify(outs)
    assert report.ok and report.requests
    events = [
        e.output
        for e in llm.stream(prompts[:4], GREEDY, lora_request=[None, *requests])
        if e.finished
    ]
    assert sorted(o.outputs[0].token_ids for o in events) == sorted(
        alone(refs[a], llm.tokenizer(p)["input_ids"]) for a, p in enumerate(prompts[:4])
    )


@compiled
def test_an_adapter_changes_nobody_elses_numbers(three):
    model, requests, _ = three
    p = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
    prompts = [f"prompt {'and more ' * i}" for i in range(8)]
    plain = LLM(model, tiny_tokenizer()).generate(prompts, p)
    llm = engine(three)
    mixed = llm.generate(prompts, p, lora_request=[None, requests[0]] * 4)
    numbers = lambda o: [{t: x.logprob for t, x in d.items()} for d in o.outputs[0].logprobs]
    for i, (a, b) in enumerate(zip(plain, mixed)):
        assert (numbers(a) == numbers(b)) == (i % 2 == 0)
    llm.reset_prefix_cache()
    assert [numbers(llm.generate(prompts[i], p, lora_request=requests[0])[0]) for i in (1, 3)] == [
        numbers(mixed[i]) for i in (1, 3)
    ]


def test_vectors_with_adapters(three):
    model, requests, refs = three
    texts = ["one", "and another one"]
    llm = engine(three, compile=False)
    got = llm.embed(texts * 2, lora_request=[None, None, requests[0], requests[0]])
    want = [
        v.outputs.embedding
        for ref in refs[:2]
        for v in LLM(ref, tiny_tokenizer(), compile=False).embed(texts)
    ]
    for g, w in zip(got, want):
        torch.testing.assert_close(
            torch.tensor(g.outputs.embedding), torch.tensor(w), rtol=1e-3, atol=1e-4
        )


def test_what_a_configuration_says_of_rank_and_scale(tmp_path):
    model, ends = (
        tiny_model("llama"),
        lambda parts: {n.split(".", 1)[1]: p for n, p in parts.items()},
    )

    def read(**config):
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        return ends(
            read_adapter(tiny_adapter(tmp_path / "x", model, **config), linear_shapes(model), 256)
        )

    assert {p.scale for p in read(rank=4, lora_alpha=6).values()} == {1.5}
    assert {p.scale for p in read(rank=16, lora_alpha=6, use_rslora=True).values()} == {1.5}
    parts = read(
        rank=4,
        lora_alpha=8,
        modules=("q_proj", "k_proj"),
        rank_pattern={"q_proj": 16},
        alpha_pattern={r"layers\.1\.self_attn\.k_proj": 40},
    )
    scale = lambda i, m: parts[f"layers.{i}.self_attn.{m}"].scale
    assert [scale(0, "q_proj"), scale(1, "q_proj"), scale(0, "k_proj"), scale(1, "k_proj")] == [
        0.5,
        0.5,
        2.0,
        10.0,
    ]


def test_other_ways_to_write_an_adapter(tmp_path):
    from safetensors.torch import load_file

    model = tiny_model("llama")
    shapes, folder = (
        linear_shapes(model),
        tiny_adapter(tmp_path / "x", model, 2, modules=("q_proj",)),
    )
    want, tensors = read_adapter(folder, shapes, 8), load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    for name in (
        lambda k: k.replace(".weight", ".default.weight"),  # an older PEFT
        lambda k: k.replace(".model.model.", ".model."),
    ):  # trained on the model without its head
        torch.save({name(k): t for k, t in tensors.items()}, folder / "adapter_model.bin")
        got = read_adapter(folder, shapes, 8)
        assert got.keys() == want.keys() and all(torch.equal(got[n].up, want[n].up) for n in want)
    torch.save(
        {k: t.to(torch.int8) for k, t in tensors.items()}, folder / "adapter_model.bin"
    )  # quantised, its scales elsewhere
    with pytest.raises(AdapterError, match="are torch.int8, not floating point"):
        read_adapter(folder, shapes, 8)


BROKEN = [
    (dict(use_dora=True), "DoRA"),
    (dict(modules_to_save=["score"]), "modules_to_save"),
    (dict(peft_type="LOHA"), "PEFT type LOHA"),
    (dict(bias="all"), "bias='all'"),
    (dict(trainable_token_indices=[3]), "trainable tokens"),
    (dict(init_lora_weights="pissa"), "changed base"),
    (dict(init_lora_weights="lora_ga"), "changed base"),
    (dict(init_lora_weights="of_a_later_peft"), "later_peft"),
    (dict(from_a_later_peft=True), "from_a_later_peft"),
    (dict(r=5), "rank 4"),
    (dict(r="many"), "adapter_config.json"),
    (dict(target_parameters=["experts"]), "target_parameters"),
]


@pytest.mark.parametrize("config, said", BROKEN, ids=[str(config) for config, _ in BROKEN])
def test_what_is_more_than_lora_is_refused_by_name(three, config, said, tmp_path):
    llm = engine(three, compile=False)
    bad = LoRARequest("bad", 9, tiny_adapter(tmp_path / "bad", three[0], **config))
    good, out = llm.generate(["a", "b"], GREEDY, lora_request=[three[1][0], bad])
    assert (
        good.error is None
        and out.refused
        and out.error.startswith("adapter 'bad': ")
        and said in out.error
        and "\n" not in out.error
    )


def test_what_can_not_be_loaded_says_why_and_stops_nobody(three, tmp_path):
    model, requests, refs = three
    llm, folders = engine(three, compile=False), {}

    def bad(name, change=lambda tensors: tensors, **kwargs):
        folder = folders[name] = tiny_adapter(tmp_path / name, kwargs.pop("model", model), **kwargs)
        save_file(
            change(load_file(folder / "adapter_model.safetensors")),
            folder / "adapter_model.safetensors",
        )
        return folder

    first = lambda d: next(iter(d))
    bad(
        "no such module",
        lambda d: {k.replace("q_proj", "qq_proj"): t for k, t in d.items()},
        base_model_name_or_path="other/model",
    )
    bad("for this model they must be", model=tiny_model("llama", hidden_size=32))
    bad("max_lora_rank=65", rank=65)
    bad("one half", lambda d: {k: t for k, t in d.items() if k != first(d)})
    bad("weights of its own", lambda d: d | {"base_model.model.score.weight": torch.ones(2, 2)})
    bad(
        "save_embedding_layers=False",
        lambda d: d | {"base_model.model.lm_head.base_layer.weight": torch.ones(2, 2)},
    )
    bad(
        "LoRA of an embedding",
        lambda d: d | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)},
    )
    bad("has no weights", lambda d: {})
    (bad("can't be read") / "adapter_model.safetensors").write_bytes(b"{")
    (bad("nor adapter_model.bin") / "adapter_model.safetensors").unlink()
    (bad("no adapter_config.json") / "adapter_config.json").unlink()
    folders["there is no folder"] = tmp_path / "nowhere"
    names = [*folders]
    outs = llm.generate(
        ["a"] * (len(names) + 1),
        GREEDY,
        lora_request=[
            requests[0],
            *(LoRARequest(n, i, folders[n]) for i, n in enumerate(names, 10)),
        ],
    )
    assert outs[0].outputs[0].token_ids == alone(refs[1], outs[0].prompt_token_ids)
    for out, name in zip(outs[1:], names):
        want = dict([("no such module", "no linear layer")]).get(name, name)
        assert out.refused and want in out.error and "\n" not in out.error, (name, out.error)
    assert "'other/model'" in outs[1].error
    (out,) = llm.generate(
        "a", GREEDY, lora_request=LoRARequest("other", 1, folders["max_lora_rank=65"])
    )
    assert "'a' has: give it another lora_int_id" in out.error
    (out,) = llm.generate("a", GREEDY, lora_request="nobody")
    assert "no adapter 'nobody': known are" in out.error


def test_calls_that_can_not_be_meant(three):
    model, requests, _ = three
    with pytest.raises(ParamError, match="enable_lora"):
        LLM(model, compile=False).generate([[5]], lora_request=requests[0])
    llm = engine(three, compile=False)
    for bad in (7, b"x"):
        with pytest.raises(ParamError, match="lora_request"):
            llm.generate([[5]], lora_request=bad)
    with pytest.raises(ParamError, match="2 values of lora_request for 1"):
        llm.generate([[5]], lora_request=requests[:2])
    with pytest.raises(ParamError, match="max_cpu_loras=1"):
        LLM(model, enable_lora=True, max_loras=2, max_cpu_loras=1, compile=False)
    with pytest.raises(ParamError, match="strategy='continuous'"):
        LLM(model, enable_lora=True, strategy="static", compile=False)
    with pytest.raises(UnsupportedModelError, match="packed"):
        LLM(tiny_model("bloom"), enable_lora=True, compile=False)
    for bad in (
        dict(lora_int_id=0),
        dict(lora_int_id=True),
        dict(lora_path=""),
        dict(lora_name=""),
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            LoRARequest(**dict(lora_name="x", lora_int_id=1, lora_path="y") | bad)
    assert (
        read_modules(["a=b=c", '{"name": "d", "path": "e"}'])["a"].lora_path == "b=c"
        and read_modules({"x": Path("y")})["x"].lora_int_id == 1
    )
    with pytest.raises(ParamError, match="name=folder"):
        read_modules(["just-a-name"])


def test_at_most_so_many_are_in_memory_and_have_requests(three):
    model, requests, refs = three
    llm, seen = engine(three, max_loras=1, max_cpu_loras=2, compile=False), []
    llm.watchers.append(
        lambda who, event, x: (
            event == "schedule"
            and seen.append(({r.request.adapter for r in x.rows} - {0}, len(llm.adapters.loaded)))
        )
    )
    plan = llm.plan([[5]] * 3, GREEDY, lora_request=requests)
    most = sorted(
        sum(
            p.down.nbytes + p.up.nbytes
            for p in read_adapter(Path(r.lora_path), llm.adapters.shapes, 64).values()
        )
        for r in requests
    )[1:]
    assert plan.adapters_bytes == sum(most) <= plan.adapters_limit_bytes and "adapters 0." in str(
        plan
    )
    for _ in range(2):  # those that had to go come again
        ids = [[5 + i, 9] for i in range(12)]
        outs = llm.generate(ids, GREEDY, lora_request=[requests[i % 3] for i in range(12)])
        assert [o.outputs[0].token_ids for o in outs] == [
            alone(refs[1 + i % 3], x) for i, x in enumerate(ids)
        ]
    assert (
        {n for names, _ in seen for n in names} == {1, 2, 3}
        and max(len(names) for names, _ in seen) == 1
        and max(n for _, n in seen) <= 2
    )
    assert llm.adapters.nbytes <= plan.adapters_limit_bytes and "of 2 in memory" in str(
        llm.adapters
    )


def test_seats_for_adapters_without_a_model():
    s = Scheduler(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=4,
        may_enter=Adapters({}, 4, max_loras=1).may_enter,
    )
    s.patience = 6

    def step():
        plan = s.schedule()
        s.update(plan, [RowOutput([7] if row.samples else []) for row in plan.rows])
        return {row.request.request_id for row in plan.rows}

    add = lambda name, adapter, n=1: s.add(Request(name, [3, 4], n, adapter=adapter))
    for name, adapter in (("a", 1), ("b", 2), ("c", 1), ("d", 0)):
        add(name, adapter, 2)
    assert step() == {"a", "c", "d"} == step() and step() == {
        "b"
    }  # those behind b were let past, for a while
    add("w", 1, 99)
    add("x", 3)
    for i in range(20):
        add(f"y{i}", 1)
    ran = set()
    for _ in range(8):
        ran |= step()
    assert "x" not in ran and {i for i in range(20) if f"y{i}" in ran} == set(
        range(6)
    )  # not for ever


def test_adapters_come_and_go_while_requests_run(three, tmp_path):
    model, requests, refs = three
    llm, folder = engine(three, compile=False), tiny_adapter(tmp_path / "x", model, seed=5)
    x = LoRARequest("x", 7, folder)
    old = merged(model, folder)
    assert llm.add_lora(x) and llm.list_loras() == {7} and [*llm.adapters.loaded] == [1]
    events = []
    llm.add_request([5, 6], GREEDY, events.append, lora_request=x)
    llm.step()
    assert (
        llm.remove_lora(7)
        and not llm.remove_lora(7)
        and llm.list_loras() == set()
        and not llm.adapters.loaded
    )
    tiny_adapter(folder, model, seed=6)  # another one, in its place
    new = merged(model, folder)
    (out,) = llm.generate([[5, 6]], GREEDY, lora_request=x)
    assert out.outputs[0].token_ids == alone(new, [5, 6]) and out.num_cached_tokens == 0
    assert events[-1].output.outputs[0].token_ids == alone(
        old, [5, 6]
    )  # it ran to its end with what it had
    assert len(llm.adapters.alive) == 1  # and the old one went with it
    tiny_adapter(folder, model, seed=5)
    again = llm.generate(
        [[5, 6]] * 2, GREEDY, lora_request=[x, LoRARequest("x", 7, folder, load_inplace=True)]
    )
    assert [o.outputs[0].token_ids for o in again] == [
        alone(m, [5, 6]) for m in (new, old)
    ]  # it is read again for who says so


def test_a_file_that_goes_takes_its_own_requests_alone(three, tmp_path):
    model, requests, refs = three
    llm = engine(three, compile=False)
    folder = tiny_adapter(tmp_path / "x", model)
    got = {}
    for name, lora in (
        ("gone", LoRARequest("x", 7, folder)),
        ("base", None),
        ("other", requests[0]),
    ):
        llm.add_request(
            [5, 6],
            GREEDY,
            lambda e: got.setdefault(e.request_id, e.output) if e.output else None,
            name,
            lora_request=lora,
        )
    shutil.rmtree(folder)  # after it was looked at, before it was read
    while llm.step():
        pass
    assert "adapter 'x'" in got["gone"].error and "ask for it again" in got["gone"].error
    assert [got[n].outputs[0].token_ids for n in ("base", "other")] == [
        alone(m, [5, 6]) for m in refs[:2]
    ]


def test_files_of_requests_and_the_command_line_name_adapters(three, tmp_path, capsys):
    from batchlab.cli import llm_options, parse_args
    from batchlab.jobs.job import Job

    model, requests, refs = three
    modules = {r.lora_name: r.lora_path for r in requests}
    llm = LLM(model, tiny_tokenizer(), lora_modules=modules, max_lora_rank=64, compile=False)
    lines = [
        dict(prompt="hi", model="a"),
        dict(prompt="hi", adapter="b"),
        dict(prompt="hi"),
        dict(prompt="hi", adapter="zz"),
        dict(prompt="hi", model="gpt-4"),
        dict(prompt="hi", model="x/tiny"),
    ]
    (tmp_path / "in.jsonl").write_text(
        "\n".join(json.dumps(d | dict(max_tokens=8, ignore_eos=True)) for d in lines)
    )
    said = []
    Job(
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        ordered=True,
        say=said.append,
        model_name="x/tiny",
        any_model=True,
    ).run(llm)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = [llm.tokenizer.decode(alone(m, llm.tokenizer("hi")["input_ids"])) for m in refs]
    assert [r["text"] for r in records] == [
        texts[1],
        texts[2],
        texts[0],
        None,
        None,
        texts[0],
    ] and "known are a, b, c" in records[3]["error"]["message"]
    assert (
        records[4]["error"]["message"]
        == "line 5: there is no model 'gpt-4' here: x/tiny answers, and its adapters a, b, c"
    )  # also with any_model
    body = dict(
        custom_id="1",
        method="POST",
        url="/v1/completions",
        body=dict(model="c", prompt="hi", max_tokens=8, ignore_eos=True, temperature=0),
    )
    (tmp_path / "batch.jsonl").write_text(json.dumps(body))
    Job(tmp_path / "batch.jsonl", tmp_path / "out2.jsonl", say=said.append).run(llm)
    answer = json.loads((tmp_path / "out2.jsonl").read_text())["response"]["body"]
    assert (answer["model"], answer["choices"][0]["text"]) == ("c", texts[3])
    vectors = [
        v.outputs.embedding for v in llm.embed(["hi"] * 3, lora_request=[None, *requests[:2]])
    ]
    asked = [
        dict(custom_id=name, method="POST", url="/v1/embeddings", body=dict(model=name, input="hi"))
        for name in ("tiny", "a", "b")
    ]
    (tmp_path / "vectors.jsonl").write_text("\n".join(map(json.dumps, asked)))
    Job(
        tmp_path / "vectors.jsonl",
        tmp_path / "out3.jsonl",
        ordered=True,
        say=said.append,
        model_name="x/tiny",
    ).run(llm)
    bodies = [
        json.loads(line)["response"]["body"]
        for line in (tmp_path / "out3.jsonl").read_text().splitlines()
    ]
    for body, want in zip(bodies, vectors):
        assert body["data"][0]["embedding"] == pytest.approx(want, abs=1e-5)
    assert [b["model"] for b in bodies[1:]] == ["a", "b"] and vectors[0] != pytest.approx(
        vectors[1], abs=1e-2
    )
    args = parse_args(
        [
            "run",
            "-i",
            "x",
            "-o",
            "y",
            "--lora-modules",
            "a=here",
            "b=/there",
            "--max-lora-rank",
            "64",
            "--max-loras",
            "2",
        ]
    )
    options = llm_options(args)
    assert options["lora_modules"] == [f"a={Path('here').absolute()}", "b=/there"] and (
        options["max_lora_rank"],
        options["max_loras"],
    ) == (64, 2)


def test_the_server_has_adapters_as_models(three):
    testclient = pytest.importorskip("starlette.testclient")
    from batchlab.serve.app import create_app

    model, requests, refs = three
    llm = LLM(
        model,
        tiny_tokenizer(),
        lora_modules={r.lora_name: r.lora_path for r in requests},
        max_lora_rank=64,
        compile=False,
    )
    texts = [llm.tokenizer.decode(alone(m, llm.tokenizer("hi")["input_ids"])) for m in refs]
    with testclient.TestClient(create_app(llm, "tiny")) as client:
        cards = client.get("/v1/models").json()["data"]
        assert [(c["id"], c["parent"]) for c in cards] == [
            ("tiny", None),
            ("a", "tiny"),
            ("b", "tiny"),
            ("c", "tiny"),
        ]
        assert client.get("/v1/models/b").json()["id"] == "b" and not any(
            r.lora_path in str(cards) for r in requests
        )
        for name, text in zip(("tiny", "a", "b"), texts):
            asked = dict(model=name, prompt="hi", max_tokens=8, ignore_eos=True, temperature=0)
            answer = client.post("/v1/completions", json=asked).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
            parts = [
                json.loads(x[6:])
                for x in client.post(
                    "/v1/completions", json=asked | dict(stream=True)
                ).text.splitlines()
                if x.startswith("data: {")
            ]
            assert {p["model"] for p in parts} == {name} and "".join(
                c["text"] for p in parts for c in p["choices"]
            ) == text
        for name, vector in zip(
            ("tiny", "a", "b"), llm.embed(["hi"] * 3, lora_request=[None, *requests[:2]])
        ):
            body = client.post("/v1/embeddings", json=dict(model=name, input="hi")).json()
            assert body["model"] == name and body["data"][0]["embedding"] == pytest.approx(
                vector.outputs.embedding, abs=1e-5
            )
        assert (
            client.post("/v1/completions", json=dict(model="nobody", prompt="hi")).status_code
            == 404
        )


def test_clients_bring_in_no_adapters_and_take_none_out(three, tmp_path):
    testclient = pytest.importorskip("starlette.testclient")
    from batchlab.serve.app import create_app

    model, [a, b, _], refs = three
    llm = LLM(
        model, tiny_tokenizer(), lora_modules={"a": a.lora_path}, max_lora_rank=64, compile=False
    )
    (tmp_path / "a").symlink_to(b.lora_path)
    with testclient.TestClient(create_app(llm, "tiny")) as client:
        post = lambda path, **body: client.post(path, json=body)
        for path in ("load", "unload"):
            for url in (f"/v1/{path}_lora_adapter", f"/{path}_lora_adapter"):
                assert (
                    post(url, lora_name="b", lora_path=b.lora_path).status_code
                    == 404
                    == post(url, lora_name="a", lora_int_id=1).status_code
                )
        asked = dict(prompt="hi", max_tokens=8, ignore_eos=True, temperature=0)
        for name in (
            b.lora_path,
            f"a/../{b.lora_path}",
            str(tmp_path / "a"),
            "./a",
            "A",
            "a ",
            "",
            "b",
            f"b={b.lora_path}",
        ):  # a name is no path
            assert (
                post("/v1/completions", model=name, **asked).status_code
                == 404
                == post("/v1/embeddings", model=name, input="hi").status_code
            ), name
        for bad in (["a"], {"name": "a", "path": b.lora_path}, 1):
            for url, body in (
                ("/v1/completions", asked),
                ("/v1/embeddings", dict(input="hi")),
                ("/tokenize", dict(prompt="hi")),
                ("/detokenize", dict(tokens=[5])),
            ):
                assert post(url, model=bad, **body).status_code == 400, (bad, url)
        for key, value in (
            ("lora_request", dict(lora_name="b", lora_int_id=1, lora_path=b.lora_path)),
            ("lora_path", b.lora_path),
            ("adapter", "a"),
        ):
            said = post("/v1/completions", model="tiny", **asked, **{key: value})
            assert said.status_code == 400 and key in said.json()["error"]["message"], said.text
        answers = [
            post("/v1/completions", model=m, **asked).json()["choices"][0]["text"]
            for m in ("tiny", "a")
        ]
        assert answers == [
            llm.tokenizer.decode(alone(m, llm.tokenizer("hi")["input_ids"])) for m in refs[:2]
        ]
        assert [c["id"] for c in client.get("/v1/models").json()["data"]] == [
            "tiny",
            "a",
        ] and llm.list_loras() == {1}


def test_a_server_begins_with_adapters_that_work_and_names_that_are_one_things(three, tmp_path):
    pytest.importorskip("fastapi")
    from batchlab.jobs.job import Job, JobError
    from batchlab.serve.app import create_app

    model, [a, *_], _ = three
    make = lambda modules: LLM(
        model, tiny_tokenizer(), lora_modules=modules, max_lora_rank=8, compile=False
    )
    for others in ((), ("also",)):
        with pytest.raises(ParamError, match="model and an adapter are both called '(tiny|also)'"):
            create_app(make({"tiny" if not others else "also": a.lora_path}), "tiny", others=others)
    with pytest.raises(AdapterError, match="adapter 'x': there is no folder"):
        create_app(make({"a": a.lora_path, "x": tmp_path / "nowhere"}), "tiny")
    with pytest.raises(AdapterError, match="max_lora_rank=40"):
        create_app(make({"big": three[1][2].lora_path}), "tiny")
    with pytest.raises(ParamError, match="two adapters 'a'"):
        make(["a=x", "a=y"])
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi", "model": "tiny"}')
    with pytest.raises(JobError, match="both called 'tiny'"):
        Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model_name="tiny").run(
            make({"tiny": a.lora_path})
        )


@pytest.mark.parametrize(
    "config, said",
    [
        (dict(lora_alpha=float("nan")), "a scale of nan"),
        (dict(alpha_pattern={"(": 3}), "gives no scale"),
        (dict(alpha_pattern={"q_proj": "x"}), "gives no scale"),
        (dict(lora_alpha=1e308, alpha_pattern={"q_proj": float("inf")}), "a scale of inf"),
        (dict(rank_pattern={"(": 3}), "gives no scale"),
    ],
)
def test_no_number_comes_of_some_configurations(three, config, said, tmp_path):
    bad, good = engine(three, compile=False).generate(
        ["a", "b"],
        GREEDY,
        lora_request=[
            LoRARequest("bad", 9, tiny_adapter(tmp_path / "bad", three[0], **config)),
            None,
        ],
    )
    assert bad.refused and said in bad.error and "\n" not in bad.error and good.error is None


def test_vectors_are_verified_with_their_adapter(three):
    llm = engine(three)
    outs = llm.embed(["one", "two", "one"], lora_request=[None, three[1][0], three[1][1]])
    assert [o.lora_request and o.lora_request.lora_name for o in outs] == [
        None,
        "a",
        "b",
    ] and llm.verify(outs).ok
    outs[1].lora_request = three[1][1]  # not what it ran with
    assert not llm.verify(outs).ok


MIX = [None, 0, 1, 2]  # in a call, of three adapters and none


def mix(three, n):
    return [a if a is None else three[1][a] for a in (MIX * n)[:n]], [
        three[2][0 if a is None else a + 1] for a in (MIX * n)[:n]
    ]


@pytest.mark.parametrize("compile", [pytest.param("auto", marks=compiled), False])
def test_beams_with_adapters_are_those_of_merged_models(three, compile):
    from test_beam import check

    llm, head = engine(three, compile=compile, max_num_seqs=10), [*range(60, 130)]
    prompts = [
        head + [7],
        head + [7],
        head + [7],
        head + [7],
        [9, 8, 7],
        [20],
        [5] * 30,
        head,
    ]  # four adapters begin alike
    loras, refs = mix(three, len(prompts))
    for again in (False, True):  # from an empty cache, and from what all of them left
        outs = llm.beam_search(prompts, BeamSearchParams(3, 8), lora_request=loras)
        for ids, ref, lora, out in zip(prompts, refs, loras, outs, strict=True):
            check(ref, ids, out, 3, 8)
            assert all(s.lora_request == lora for s in out.sequences)
    assert len({tuple(o.sequences[0].output_ids) for o in outs[:4]}) == 4
    check(
        refs[2],
        [9, 8],
        llm.beam_search([9, 8], BeamSearchParams(2, 5), lora_request=three[1][1])[0],
        2,
        5,
    )  # one for all


def test_choices_with_adapters_are_those_of_merged_models(three):
    llm = engine(three, compile=False, max_num_seqs=6)
    prompts = ["The sea is"] * 4 + [
        "A much longer prompt, of other words, which ends so:",
        "x",
        "The sea was",
        "The sea is",
    ]
    choices, (loras, refs) = [" blue", " warm and wide", " so"], mix(three, len(prompts))
    for again in (False, True):
        outs = llm.choose(prompts, choices, lora_request=loras)
        for prompt, ref, lora, out in zip(prompts, refs, loras, outs, strict=True):
            assert out.lora_request == lora
            for choice in choices:
                ids = torch.tensor(
                    [
                        (n := llm.tokenizer(prompt)["input_ids"])
                        + llm.tokenizer(choice, add_special_tokens=False)["input_ids"]
                    ]
                )
                want = (
                    ref(ids)
                    .logits[0, len(n) - 1 : -1]
                    .log_softmax(-1)
                    .gather(1, ids[0, len(n) :, None])[:, 0]
                )
                assert out.token_logprobs[choice] == pytest.approx(want.tolist(), abs=1e-4)
    assert len({o.logprobs[" so"] for o in outs[:4]}) == 4
    ended = llm.choose(prompts[:2], choices, end=True, lora_request=three[1][0])
    assert ended[0].logprobs == pytest.approx(ended[1].logprobs, abs=1e-4) and [
        *map(len, ended[0].token_logprobs.values())
    ] == [len(c) + 1 for c in choices]


def test_tables_with_adapters(three):
    llm = engine(three, compile=False)
    loras, refs = mix(three, 6)
    rows = [dict(q=f"row {'x' * i}") for i in range(6)]
    rows[4]["q"] = None  # it has no prompt; those after it keep their adapters
    answers = llm.map(rows, "{q}", GREEDY, lora_request=loras)
    want = [
        None
        if row["q"] is None
        else llm.tokenizer.decode(alone(ref, llm.tokenizer(row["q"])["input_ids"]))
        for row, ref in zip(rows, refs)
    ]
    assert [a["text"] for a in answers] == want and "'q' is empty" in answers[4]["error"]
    named = [
        row | dict(adapter=name) for row, name in zip(rows, (None, "a", "b", "c", "a", "a"))
    ]  # as a column of their own
    for lora in (None, three[1][1]):
        got = [
            a["text"]
            for a in llm.map(named, "{q}", GREEDY, lora_request=lora, setting_columns=["adapter"])
        ]
        assert got[1:] == [
            want[1],
            *[
                llm.tokenizer.decode(alone(three[2][i], llm.tokenizer(rows[j]["q"])["input_ids"]))
                if i
                else None
                for i, j in ((2, 2), (3, 3), (0, 4), (1, 5))
            ],
        ]
        assert got[0] == llm.tokenizer.decode(
            alone(three[2][0 if lora is None else 2], llm.tokenizer(rows[0]["q"])["input_ids"])
        )
    [one] = llm.map(rows[:1], "{q}", GREEDY, lora_request=three[1][2])
    assert one["text"] == llm.tokenizer.decode(
        alone(three[2][3], llm.tokenizer(rows[0]["q"])["input_ids"])
    )


def test_an_adapter_that_can_not_be_had_is_one_prompts_error_in_all_calls(three):
    llm = engine(three, compile=False)
    loras = [LoRARequest("missing", 9, "nowhere"), three[1][0], "nobody"]
    beams, chosen = (
        llm.beam_search([[5, 6]] * 3, BeamSearchParams(2, 3), lora_request=loras),
        llm.choose(["a"] * 3, [" b", " c"], lora_request=loras),
    )
    rows = llm.map([dict(prompt="a")] * 3, sampling_params=GREEDY, lora_request=loras)
    for errors in ([o.error for o in beams], [o.error for o in chosen], [r["error"] for r in rows]):
        assert (
            "'missing': there is no folder" in errors[0]
            and errors[1] is None
            and "no adapter 'nobody'" in errors[2]
        )
    assert len(beams[1].sequences) == 2 and chosen[1].best and rows[1]["text"]
    for call in (
        lambda lora: llm.beam_search([[5]], BeamSearchParams(2, 3), lora_request=lora),
        lambda lora: llm.choose("a", ["b"], lora_request=lora),
        lambda lora: llm.map([dict(prompt="a")], lora_request=lora),
    ):
        with pytest.raises(ParamError, match="2 values of lora_request for 1"):
            call(loras[:2])
        with pytest.raises(ParamError, match="must be a LoRARequest or the name"):
            call(7)
    bare = LLM(three[0], tiny_tokenizer(), compile=False)
    with pytest.raises(ParamError, match="enable_lora"):
        bare.beam_search([[5]], BeamSearchParams(2, 3), lora_request=three[1][0])
    with pytest.raises(ParamError, match="enable_lora"):
        bare.choose("a", ["b"], lora_request=three[1][0])


def test_a_search_has_one_adapter_from_its_first_beam_to_its_last(three, tmp_path):
    from test_beam import check

    llm, folder, steps = (
        engine(three, compile=False),
        tiny_adapter(tmp_path / "x", three[0], seed=5),
        [],
    )
    x, old = LoRARequest("x", 7, folder, load_inplace=True), merged(three[0], folder)

    def swap(engine, event, what):
        steps.append(event)
        if steps.count("forward") == 3 and event == "forward":
            tiny_adapter(folder, three[0], seed=6)
            llm.remove_lora(7)

    llm.watchers.append(swap)
    [out] = llm.beam_search([[5, 6, 7]], BeamSearchParams(3, 8), lora_request=x)
    check(old, [5, 6, 7], out, 3, 8)
    [new] = llm.beam_search([[5, 6, 7]], BeamSearchParams(3, 8), lora_request=x)
    check(merged(three[0], folder), [5, 6, 7], new, 3, 8)
    assert (
        steps.count("forward") >= 16
        and [s.tokens for s in new.sequences] != [s.tokens for s in out.sequences]
        and len(llm.adapters.alive) == 1
    )


def test_workers_on_ray_have_adapters(three, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="needs Ray: pip install 'batchlab[ray]'")
    from batchlab.jobs.ray import Pool, RayJob

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, requests, refs = three
    model.save_pretrained("model")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained("model")
    for r in requests:
        shutil.copytree(r.lora_path, r.lora_name)  # found from here, wherever a worker runs
    lines = [
        dict(prompt=f"hi {'you ' * (i % 5)}", max_tokens=8, ignore_eos=True)
        | ({} if not i % 4 else {("model", "adapter")[i % 2]: "abc"[i % 4 - 1]})
        for i in range(24)
    ]
    Path("in.jsonl").write_text(
        "\n".join(map(json.dumps, [*lines, dict(prompt="hi", adapter="zz")]))
    )
    with Pool(
        1,
        num_cpus=1,
        llm=dict(
            model="model",
            lora_modules={n: n for n in "abc"},
            max_lora_rank=64,
            max_num_seqs=4,
            compile=False,
        ),
        say=lambda s: None,
    ) as pool:
        result = RayJob("in.jsonl", "out.jsonl", ordered=True, use_tqdm=False).run(pool)
    *records, bad = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    want = [
        tokenizer.decode(
            alone(refs[i % 4], tokenizer(d["prompt"])["input_ids"]), skip_special_tokens=True
        )
        for i, d in enumerate(lines)
    ]
    assert [r["text"] for r in records] == want and (result.answered, result.failed) == (24, 1)
    assert "known are a, b, c" in bad["error"]["message"]


@pytest.mark.parametrize("compile", [False, "auto"])
def test_a_part_in_what_no_step_runs_is_its_requests_error(compile, tmp_path):
    "A classifier's head and a pooler get a text when it has ended: an adapter's part there would be left out, or meet other rows."
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=140,
        num_labels=1,
    )
    judge = AutoModelForSequenceClassification.from_config(
        LlamaConfig(**sizes, num_key_value_heads=2, pad_token_id=None)
    ).eval()
    bert = AutoModelForSequenceClassification.from_config(BertConfig(**sizes)).eval()
    for model, part in ((judge, "score"), (bert, "classifier"), (bert, "bert.pooler.dense")):
        llm = LLM(copy.deepcopy(model), enable_lora=True, compile=compile)
        folder = tiny_adapter(tmp_path / part, model, 4, 1, ("q_proj", "query"))
        n, k = model.get_submodule(part).weight.shape
        save_file(
            {
                f"base_model.model.{part}.lora_A.weight": torch.ones(4, k),
                f"base_model.model.{part}.lora_B.weight": torch.ones(n, 4),
            },
            folder / "adapter_model.safetensors",
        )
        bad = LoRARequest("bad", 1, folder)
        good = LoRARequest(
            "good",
            2,
            tiny_adapter(
                tmp_path / f"{part}-good",
                model,
                4,
                1,
                ("q_proj",) if model is judge else ("query",),
            ),
        )
        plain, ill, well = llm.classify([[5, 6, 7]] * 3, lora_request=[None, bad, good])
        assert (
            not plain.error and f"a part in {part}" in ill.error and ill.refused and not well.error
        )
        assert well.outputs.probs != plain.outputs.probs
