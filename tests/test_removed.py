"What was taken out says, where it is asked for, what to do instead."

import pytest
from transformers import GenerationConfig

from batchlab import LLM
from batchlab.cli import main
from batchlab.cli.flags import parser_of
from batchlab.compat import vllm
from batchlab.core.params import SamplingParams
from batchlab.errors import REMOVED as ADVICE
from batchlab.errors import JobError, ParamError, RemovedAttribute, RemovedImport
from batchlab.models import tiny_model

small = tiny_model("llama", num_hidden_layers=1)


def imported(name, module="batchlab"):
    return lambda: exec(f"from {module} import {name}")


REMOVED = [  # the call, what it raises, the name at fault, what the advice names
    (lambda: LLM(small, speculation="owner/draft"), ParamError, "speculation", "lookup"),
    (lambda: LLM(small, speculation=small), ParamError, "speculation", "lookup"),
    (
        lambda: LLM(small).generate([5], GenerationConfig(num_beams=4)),
        ParamError,
        "sampling_params",
        "name each setting",
    ),
    (lambda: LLM(small).verify(LLM(small).embed([5, 6])), ParamError, "outputs", "one text alone"),
    (lambda: LLM(small).beam_search([5]), RemovedAttribute, "beam_search", "num_beams"),
    (lambda: LLM(small).map([dict(prompt="a")]), RemovedAttribute, "map", "llm.generate"),
    (imported("BeamSearchParams"), RemovedImport, "BeamSearchParams", "num_beams"),
    (
        imported("BeamSearchParams", "batchlab.compat.vllm"),
        RemovedImport,
        "BeamSearchParams",
        "num_beams",
    ),
    (lambda: vllm.LLM(small).llm_engine, RemovedAttribute, "llm_engine", "llm.add_request"),
    *(
        (imported(name, "batchlab.compat.vllm"), RemovedImport, name, instead)
        for name, instead in dict(
            EngineArgs="LLM takes",
            FlexibleArgumentParser="argparse",
            LLMEngine="llm.step()",
            TextPrompt="dict(prompt=",
            TokensPrompt="prompt_token_ids",
            cleanup_dist_env_and_memory="llm.close()",
        ).items()
    ),
]


COMMANDS = [  # a command, what the advice names
    ("batch submit in.jsonl", "Batch API"),
    ("models pull", "hf download"),
]


@pytest.mark.parametrize("args, instead", COMMANDS)
def test_what_to_do_instead_of_a_command(args, instead, capsys):
    assert main(args.split()) == 2
    [said] = capsys.readouterr().err.splitlines()
    command = args.split()[0]
    assert f"unknown command {command!r}: " in said and instead in said


@pytest.mark.parametrize("call, kind, field, instead", REMOVED)
def test_what_to_do_instead(call, kind, field, instead):
    with pytest.raises(kind) as e:
        call()
    assert e.value.field == field and instead in e.value.advice
    assert instead in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("flag", ["--speculative-config", "--reasoning-parser", "--revision"])
@pytest.mark.parametrize("kind", [LLM, vllm.LLM, SamplingParams.of])
def test_what_vllm_has_and_this_has_not_says_what_to_do(kind, flag):
    name = flag[2:].replace("-", "_")
    take = (lambda model, **kw: kind(kw)) if kind == SamplingParams.of else kind
    with pytest.raises((TypeError, ParamError)) as e:
        take(small, **{name: "x"})
    assert name in str(e.value) and str(e.value).endswith(f": {ADVICE[name]}")
    with pytest.raises(JobError, match=f"unknown flag {flag}: "):
        parser_of("run").parse_args(["-i", "a", flag, "x"])
    assert vllm.LLM(small, **{name: None}).loaded  # as vLLM's own default


def test_arguments_and_flags_that_there_were():
    with pytest.raises(TypeError, match="'kv_cache_dtype': keys and values .* dtype of the model"):
        LLM(small, kv_cache_dtype="auto")
    with pytest.raises(JobError, match="unknown flag --kv-cache-dtype: .* bf16"):
        parser_of("run").parse_args(
            ["-i", "in.jsonl", "-o", "out.jsonl", "--kv-cache-dtype", "int8"]
        )


def test_other_names_fail_as_ever():
    llm = LLM(small)
    assert not hasattr(llm, "beam_search")
    for of, said in ((llm, "'LLM' object"), (vllm, "module 'batchlab.compat.vllm'")):
        with pytest.raises(AttributeError, match=f"{said} has no attribute 'nothing'"):
            of.nothing  # noqa: B018
