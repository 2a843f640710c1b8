"Programs in the shapes of vLLM's published examples, with `batchlab` where they import `vllm`; the examples themselves run in `.ci/examples`."

import pytest
from transformers import AutoModelForSequenceClassification

from batchlab.compat.vllm import (
    LLM,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    LoRARequest,
    PoolerConfig,
    PoolingParams,
    SamplingParams,
    TokensPrompt,
    print_embeddings,
)
from batchlab.errors import ParamError, PromptError
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.models.tiny import tiny_adapter
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
    judge = encoder("bert", AutoModelForSequenceClassification, num_labels=1)
    return saved(judge, tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    return str(tiny_adapter(folder, tiny_model("llama"), 4, modules=("up_proj",)))


def parsed(folder, *flags, **defaults):
    "The arguments of a program, as vLLM's examples read them."
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    how = dict(runner="pooling", enforce_eager=True, trust_remote_code=True)
    parser.set_defaults(model=folder, **how, **defaults)
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
    assert (config.max_model_len, config.model) == (90, judge)
    assert config.hf_config.id2label == {0: "LABEL_0"}


def test_a_template_writes_the_pair_that_is_scored(judge):
    llm = LLM(model=judge, runner="pooling")
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    got = llm.score(*PAIR, chat_template=template)
    want = llm.classify([f"[query] {PAIR[0]} [document] {d} " for d in PAIR[1]])
    scores = [o.outputs.score for o in got]
    assert scores == [o.outputs.probs[0] for o in want]
    assert scores != [o.outputs.score for o in llm.score(*PAIR)]
    with pytest.raises(PromptError, match="query and a document"):
        llm.score(*PAIR, chat_template='{{ messages[5].content }}{{ raise_exception("no") }}')
    with pytest.raises(ParamError, match="compares vectors"):
        LLM(encoder("bert"), tiny_tokenizer()).score(*PAIR, chat_template=template)


def test_keywords_of_vllm_for_pooling():
    config = PoolerConfig(seq_pooling_type="CLS", normalize=False, task="embed")
    llm, long = LLM(encoder("bert"), tiny_tokenizer(), pooler_config=config), "one two three " * 9
    five = dict(truncate_prompt_tokens=5)
    [one] = llm.embed(long, tokenization_kwargs=five)
    [other] = llm.embed(long, pooling_params=PoolingParams(**five))
    [same] = llm.embed(TokensPrompt(prompt_token_ids=one.prompt_token_ids))
    assert one.prompt_token_ids == other.prompt_token_ids and len(one.prompt_token_ids) == 5
    assert one.outputs == other.outputs == same.outputs
    with pytest.raises(ParamError, match="pooling_task="):
        PoolerConfig(task="token_embed")
    with pytest.raises(TypeError, match="step_tag_id"):
        PoolerConfig(step_tag_id=3)
    for call in (llm.embed, llm.encode):
        with pytest.raises(TypeError, match="max_tokens"):
            call("a", max_tokens=3)


def test_an_engine_stepped_by_hand_runs_adapters_and_the_model_alone(text, adapter):
    how = dict(enable_lora=True, max_loras=1, max_lora_rank=8, max_num_seqs=4)
    engine = LLMEngine.from_engine_args(EngineArgs(model=text, **how))
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
    assert not any(found[i].error for i in "0123") and "tokens" in found["4"].error
    plain, first, again, _ = (found[i].outputs[0].token_ids for i in "0123")
    [alone] = engine.llm.generate("A robot may not", greedy)
    assert first == again != plain == alone.outputs[0].token_ids
    engine.add_request("x", "Hello", greedy)
    engine.abort_request("x")
    assert [o.outputs[0].finish_reason for o in engine.step()] == ["cancelled"]
    assert not engine.has_unfinished_requests()
