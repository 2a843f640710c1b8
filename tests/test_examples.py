"Programs in the shapes of vLLM's published examples, with `batchlab` where they import `vllm`; the examples themselves run in `.ci/examples`."

import json, sys
from types import ModuleType, SimpleNamespace

import pytest, torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from batchlab import (
    LLM,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PoolerConfig,
    PoolingParams,
    SamplingParams,
    TokensPrompt,
)
from batchlab.errors import ParamError, PromptError
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.utils.argparse_utils import FlexibleArgumentParser
from batchlab.utils.print_utils import print_embeddings
from batchlab.work import lm_eval
from test_encoders import encoder

pytestmark = pytest.mark.usefixtures("one_thread")
PAIR = (
    "What is the capital of France?",
    ["The capital of Brazil is Brasilia.", "The capital of France is Paris."],
)


def saved(model, at):
    model.save_pretrained(at)
    tiny_tokenizer().save_pretrained(at)
    return str(at)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return saved(tiny_model("llama"), tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return saved(
        encoder("bert", AutoModelForSequenceClassification, num_labels=1),
        tmp_path_factory.mktemp("judge"),
    )


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, text):
    at, config, g = (
        tmp_path_factory.mktemp("adapter"),
        tiny_model("llama").config,
        torch.Generator().manual_seed(0),
    )
    halves = {
        f"base_model.model.model.layers.{i}.mlp.up_proj.lora_{ab}.weight": torch.randn(
            shape, generator=g
        )
        for i in range(config.num_hidden_layers)
        for ab, shape in dict(A=(4, config.hidden_size), B=(config.intermediate_size, 4)).items()
    }
    save_file(halves, at / "adapter_model.safetensors")
    (at / "adapter_config.json").write_text(
        json.dumps(dict(peft_type="LORA", r=4, lora_alpha=8, target_modules=["up_proj"]))
    )
    return str(at)


def parsed(folder, *flags, **defaults):
    "The arguments of a program, as vLLM's examples read them."
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(
        model=folder, runner="pooling", enforce_eager=True, trust_remote_code=True, **defaults
    )
    return vars(parser.parse_args(flags))


def test_a_program_that_scores_and_looks_into_the_engine(judge, capsys):
    llm = LLM(**parsed(judge, "--max_model_len", "90"))
    scores = [o.outputs.score for o in llm.score(*PAIR)]
    alone = [llm.score(PAIR[0], d)[0].outputs.score for d in PAIR[1]]
    assert scores == alone and all(0 < s < 1 for s in scores) and scores[0] != scores[1]
    [out] = llm.encode(PAIR[0], pooling_task="classify")
    print_embeddings(out.outputs.data.tolist(), prefix="Reward")
    print_embeddings([0.5] * 7)
    assert capsys.readouterr().out.splitlines() == [
        f"Reward: {out.outputs.data.tolist()} (size=1)",
        "Embeddings: [0.5, 0.5, 0.5, 0.5, ...] (size=7)",
    ]
    config = llm.llm_engine.vllm_config.model_config
    assert (config.hf_config.id2label, config.max_model_len, config.model) == (
        {0: "LABEL_0"},
        90,
        judge,
    )


def test_a_template_writes_the_pair_that_is_scored(judge):
    llm = LLM(model=judge, runner="pooling")
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    got = llm.score(*PAIR, chat_template=template)
    want = llm.classify([f"[query] {PAIR[0]} [document] {d} " for d in PAIR[1]])
    assert (
        [o.outputs.score for o in got]
        == [o.outputs.probs[0] for o in want]
        != [o.outputs.score for o in llm.score(*PAIR)]
    )
    with pytest.raises(PromptError, match="query and a document"):
        llm.score(*PAIR, chat_template='{{ messages[5].content }}{{ raise_exception("no") }}')
    with pytest.raises(ParamError, match="compares vectors"):
        LLM(encoder("bert"), tiny_tokenizer()).score(*PAIR, chat_template=template)


def test_keywords_of_vllm_for_pooling():
    llm, long = (
        LLM(
            encoder("bert"),
            tiny_tokenizer(),
            pooler_config=PoolerConfig(seq_pooling_type="CLS", normalize=False, task="embed"),
        ),
        "one two three " * 9,
    )
    cut = [
        llm.embed(long, **how)[0]
        for how in (
            dict(truncate_prompt_tokens=5),
            dict(tokenization_kwargs=dict(truncate_prompt_tokens=5)),
            dict(pooling_params=PoolingParams(truncate_prompt_tokens=5)),
        )
    ]
    assert (
        all(
            o.prompt_token_ids == cut[0].prompt_token_ids and o.outputs == cut[0].outputs
            for o in cut
        )
        and len(cut[0].prompt_token_ids) == 5
    )
    assert (
        llm.embed(TokensPrompt(prompt_token_ids=cut[0].prompt_token_ids))[0].outputs
        == cut[0].outputs
    )
    for wrong, words in (
        (dict(task="token_embed"), "pooling_task="),
        (dict(step_tag_id=3), "step_tag_id"),
    ):
        with pytest.raises(ParamError, match=words):
            PoolerConfig(**wrong)
    for call in (llm.embed, llm.encode):
        with pytest.raises(ParamError, match="max_tokens"):
            call("a", max_tokens=3)


def test_an_engine_stepped_by_hand_runs_adapters_and_the_model_alone(text, adapter):
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=text, enable_lora=True, max_loras=1, max_lora_rank=8, max_num_seqs=4)
    )
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    left = [
        ("A robot may not", greedy, None),
        ("A robot may not", greedy, LoRARequest("first", 1, adapter)),
        ("A robot may not", greedy, LoRARequest("again", 1, adapter)),
        ("To be or not", greedy, LoRARequest("second", 2, adapter)),
        ("x" * 9999, greedy, None),
    ]
    found, n = {}, 0
    while left or engine.has_unfinished_requests():
        if left:
            prompt, params, lora = left.pop(0)
            engine.add_request(str(n), prompt, params, lora_request=lora)
            n += 1
        for out in engine.step():
            assert out.finished and out.request_id not in found
            found[out.request_id] = out
    ids = [found[i].outputs[0].token_ids for i in "0123"]
    assert not any(found[i].error for i in "0123") and "tokens" in found["4"].error
    assert (
        ids[1] == ids[2] != ids[0]
        and ids[0] == engine.llm.generate("A robot may not", greedy)[0].outputs[0].token_ids
    )
    engine.add_request("x", "Hello", greedy)
    engine.abort_request("x")
    assert [o.outputs[0].finish_reason for o in engine.step()] == [
        "cancelled"
    ] and not engine.has_unfinished_requests()


# --- lm-eval, whose base class is stood in for where it is not installed; the real one answers in .ci/lm-eval


class Template:
    "What the adapter needs of lm-eval's `TemplateLM`: it splits texts into tokens."

    def __init__(self):
        self.rank = 0

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = []
        for context, more in (r.args for r in requests):
            whole, front = (
                self.tok_encode(context + more),
                self.tok_encode(context) if context else [],
            )
            pairs.append(
                (
                    (context, more),
                    front,
                    whole[len(front) :]
                    if context
                    else self.tok_encode(more, add_special_tokens=False),
                )
            )
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)


@pytest.fixture
def harness(monkeypatch):
    "The class for lm-eval, with modules in lm-eval's place."
    known = {}

    def module(name, **has):
        made = ModuleType(name)
        vars(made).update(has)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    api = module(
        "lm_eval.api",
        model=module("lm_eval.api.model", TemplateLM=Template),
        registry=module(
            "lm_eval.api.registry",
            register_model=lambda name: lambda cls: known.setdefault(name, cls),
        ),
    )
    module("lm_eval", api=api, models=module("lm_eval.models"))
    lm_eval.lm_class.cache_clear()
    made = lm_eval.lm_class()
    assert known == dict(batchlab=made)
    yield made
    lm_eval.lm_class.cache_clear()


def of(*args):
    return SimpleNamespace(args=args)


def test_lm_eval_gets_what_transformers_says(harness, text):
    lm = harness(text, dtype="float32", max_length=64, batch_size="auto")
    assert (lm.max_length, lm.eot_token_id, lm.prefix_token_id) == (
        64,
        lm.tokenizer.eos_token_id,
        lm.tokenizer.bos_token_id,
    )
    model = tiny_model("llama")

    def logprobs(ids, n):
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)[-n - 1 : -1]
        return rows.gather(1, torch.tensor(ids[-n:])[:, None]).sum().item(), rows.argmax(
            -1
        ).tolist() == ids[-n:]

    tok = lambda s, special=True: lm.tokenizer(s, add_special_tokens=special)["input_ids"]
    first = lm.generate_until([of("Fish live in", dict(until=[], max_gen_toks=1))])[0]
    asked = [("Fish live in", c) for c in (first or "x", "a", "b", " water", " the trees")] + [
        ("", "Snow"),
        ("long " * 40, "er"),
    ]
    want = [
        logprobs(
            (tok(c + m) if c else [lm.prefix_token_id, *tok(m, False)])[-65:], len(tok(m, False))
        )
        for c, m in asked
    ]
    got = lm.loglikelihood([of(*a) for a in asked], disable_tqdm=True)
    assert [x for x, _ in got] == pytest.approx([x for x, _ in want], abs=1e-3) and [
        x for _, x in got
    ] == [x for _, x in want]
    long = "The tide comes in twice a day, " * 5
    parts = lm_eval.windows(tok(long), lm.prefix_token_id, 64)
    assert [t for _, more in parts for t in more] == tok(long) and all(
        len(c) + len(m) <= 65 for c, m in parts
    )
    assert lm.loglikelihood_rolling([of(long), of("a")], True) == pytest.approx(
        [
            sum(logprobs([*c, *m], len(m))[0] for c, m in parts),
            logprobs([lm.prefix_token_id, *tok("a")], len(tok("a")))[0],
        ],
        abs=5e-3,
    )


def test_lm_eval_stops_where_a_task_says_and_runs_adapters(harness, text, adapter):
    plain, tuned = (
        harness(text, dtype="float32"),
        harness(text, lora_local_path=adapter, dtype="float32"),
    )
    [whole] = plain.generate_until(
        [of("Snow is", dict(until=[], max_gen_toks=12, do_sample=False, temperature=0.5))], True
    )
    stop = whole[4:6]
    assert plain.generate_until([of("Snow is", dict(until=stop, max_gen_toks=12))], True) == [
        whole[: whole.index(stop)]
    ]
    assert plain.loglikelihood([of("Snow", " is white")], True) != tuned.loglikelihood(
        [of("Snow", " is white")], True
    )
    with pytest.raises(ParamError, match="num_beams"):
        plain.generate_until([of("a", dict(num_beams=3))], True)


def test_lm_eval_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    lm_eval.lm_class.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'lm-eval\[hf\]'"):
        lm_eval.lm_class()
