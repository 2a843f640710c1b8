"What a program has set torch to changes no answer of a model that is loaded, or used, inside of it."

import functools

import pytest, torch

from batchlab import LLM, SamplingParams
from batchlab.models import tiny_model
from gguf_files import gguf_file
from helpers import kept_model, told

STATES = dict(
    device=(torch.set_default_device, "meta", None),
    dtype=(torch.set_default_dtype, torch.bfloat16, torch.float32),
    deterministic=(torch.use_deterministic_algorithms, True, False),
    precision=(torch.set_float32_matmul_precision, "medium", "highest"),
    denormal=(torch.set_flush_denormal, True, False),
    autocast=(functools.partial(torch.set_autocast_enabled, "cpu"), True, False),
)
HOW = dict(
    kernels=dict(speculation="lookup"),
    torch=dict(compile=False),
    padded=dict(strategy="static"),
    fp16=dict(dtype="fp16"),
    gguf={},
)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    "A folder, and a file with weights in four bits."
    d, model = tmp_path_factory.mktemp("models"), tiny_model("llama")
    return kept_model(d / "a"), gguf_file(d / "a.gguf", model.to(torch.bfloat16), form="Q4_0")


def answers(llm):
    params = SamplingParams(seed=3, max_tokens=9, logprobs=1, frequency_penalty=0.1)
    outs = llm.generate([[5, 6, 7], [*range(9, 40)]], params)
    return told(outs), [s.logprobs for s in llm.logprobs([[5, 6, 7, 8]])]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("state", STATES)
def test_a_setting_of_torch_changes_no_answer(names, state, how):
    options = dict(dtype="fp32", enable_prefix_caching=False) | HOW[how]  # the same steps each time
    made = lambda: LLM(names[how == "gguf"], **options)
    llm = made()
    want = answers(llm)
    change, value, back = STATES[state]
    change(value)
    try:
        assert answers(llm) == answers(made()) == want
        llm.close()  # it is loaded again
        assert answers(llm) == want
    finally:
        change(back)
