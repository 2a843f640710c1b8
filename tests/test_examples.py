"Programs in the shapes of vLLM's published examples, with `batchlab` where they import `vllm`."

import pytest
from transformers import AutoModelForSequenceClassification

from batchlab.compat.vllm import (
    LLM,
    PoolerConfig,
    PoolingParams,
)
from batchlab.errors import ParamError, PromptError
from batchlab.models import tiny_tokenizer
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
def judge(tmp_path_factory):
    judge = encoder("bert", AutoModelForSequenceClassification, num_labels=1)
    return saved(judge, tmp_path_factory.mktemp("judge"))


def test_a_program_that_scores(judge):
    llm = LLM(model=judge, runner="pooling", enforce_eager=True, max_model_len=90)
    scores = [o.outputs.score for o in llm.score(*PAIR)]
    alone = [llm.score(PAIR[0], d)[0].outputs.score for d in PAIR[1]]
    assert scores == alone and all(0 < s < 1 for s in scores) and scores[0] != scores[1]


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
    [same] = llm.embed(dict(prompt_token_ids=one.prompt_token_ids))
    assert one.prompt_token_ids == other.prompt_token_ids and len(one.prompt_token_ids) == 5
    assert one.outputs == other.outputs == same.outputs
    with pytest.raises(ParamError, match="pooling_task="):
        PoolerConfig(task="token_embed")
    with pytest.raises(TypeError, match="step_tag_id"):
        PoolerConfig(step_tag_id=3)
    for call in (llm.embed, llm.encode):
        with pytest.raises(TypeError, match="max_tokens"):
            call("a", max_tokens=3)
