"""LLM batch inference on PyTorch and transformers, built chapter by chapter in `nbs/`.

Names resolve on first use (PEP 562), so that `import batchlab` is quick and imports neither torch nor transformers."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "api": ("LLM",),
    "api.aio": ("AsyncLLM",),
    "core.params": ("SamplingParams", "StructuredOutputsParams"),
    "tasks.lora": ("LoRARequest",),
    "llm.pooling_params": ("PoolingParams", "PoolerConfig"),
    "llm.pooled": (
        "PoolingRequestOutput",
        "EmbeddingRequestOutput",
        "ClassificationRequestOutput",
        "ScoringRequestOutput",
    ),
    "models": ("load_model",),
    "errors": ("BatchlabError",),
    "llm.outputs": ("RequestOutput", "CompletionOutput", "Outputs", "StreamEvent"),
    "view.tracefile": ("Trace",),
    "view.pictures": ("timeline",),
    "api.run": ("run",),
}
_lazy = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "StructuredOutputsParams",
    "LoRARequest",
    "PoolingParams",
    "PoolerConfig",
    "PoolingRequestOutput",
    "EmbeddingRequestOutput",
    "ClassificationRequestOutput",
    "ScoringRequestOutput",
    "load_model",
    "BatchlabError",
    "RequestOutput",
    "CompletionOutput",
    "Outputs",
    "StreamEvent",
    "Trace",
    "timeline",
    "run",
]
_lazy |= {  # not by *: widgets want a package of their own, and errors are caught by their base
    "LiveView": "view.widgets",
} | dict.fromkeys(("JobError", "ModelError", "ParamError", "PromptError"), "errors")

if TYPE_CHECKING:
    from .api import LLM
    from .core.params import SamplingParams, StructuredOutputsParams
    from .errors import (
        BatchlabError,
        JobError as JobError,
        ModelError as ModelError,
        ParamError as ParamError,
        PromptError as PromptError,
    )
    from .api.run import run
    from .llm.outputs import CompletionOutput, Outputs, RequestOutput, StreamEvent
    from .models import load_model
    from .api.aio import AsyncLLM
    from .tasks.lora import LoRARequest
    from .llm.pooled import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from .llm.pooling_params import PoolerConfig, PoolingParams
    from .view.pictures import timeline
    from .view.tracefile import Trace
    from .view.widgets import LiveView as LiveView


def __getattr__(name: str):
    if name not in _lazy:
        from .errors import no_name

        raise no_name("batchlab", name, _meant(name))
    from importlib import import_module

    from .machine import no_collection

    with no_collection():
        value = globals()[name] = getattr(import_module(f"batchlab.{_lazy[name]}"), name)
    return value


def _meant(name: str) -> str:
    "The public name that is meant by `name`, as a question; '' if there is none."
    from difflib import get_close_matches

    public = {n.lower(): n for n in _lazy}
    near = get_close_matches(name.lower(), public, 1)
    return f": did you mean {public[near[0]]!r}?" if near and not name.startswith("_") else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *_lazy})
