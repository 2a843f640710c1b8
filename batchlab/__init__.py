"""LLM batch inference on PyTorch and transformers, built chapter by chapter in `nbs/`.

Names resolve on first use (PEP 562), so that `import batchlab` is quick and imports neither torch nor transformers."""

import sys, warnings
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_lazy = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "SamplingParams": "params",
    "StructuredOutputsParams": "params",
    "BeamSearchParams": "params",
    "EngineArgs": "habits",
    "LoRARequest": "lora",
    "load_model": "models",
    "BatchlabError": "errors",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Outputs": "outputs",
    "StreamEvent": "outputs",
    "Trace": "tracefile",
    "timeline": "views.pictures",
    "run": "work.frames",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "StructuredOutputsParams",
    "BeamSearchParams",
    "EngineArgs",
    "load_model",
    "BatchlabError",
    "RequestOutput",
    "CompletionOutput",
    "Outputs",
    "StreamEvent",
    "Trace",
    "timeline",
    "run",
    "PoolingParams",
    "PoolerConfig",
    "LoRARequest",
    "PoolingRequestOutput",
    "EmbeddingRequestOutput",
    "ClassificationRequestOutput",
    "ScoringRequestOutput",
    "LLMEngine",
    "TextPrompt",
    "TokensPrompt",
]
_lazy |= dict.fromkeys(
    (
        "PoolingParams",
        "PoolerConfig",
        "PoolingRequestOutput",
        "EmbeddingRequestOutput",
        "ClassificationRequestOutput",
        "ScoringRequestOutput",
    ),
    "pooled",
)
_lazy |= {"LoRARequest": "lora"} | dict.fromkeys(
    ("LLMEngine", "TextPrompt", "TokensPrompt"), "habits"
)
_lazy |= {
    "LiveView": "views.widgets",
    "Playground": "views.widgets",
    "Scrubber": "views.scrubber",
}  # not by *: they want a package of their own
_lazy |= dict.fromkeys(("JobError", "ModelError", "ParamError", "PromptError"), "errors")

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .errors import (
        BatchlabError,
        JobError as JobError,
        ModelError as ModelError,
        ParamError as ParamError,
        PromptError as PromptError,
    )
    from .habits import EngineArgs, LLMEngine, TextPrompt, TokensPrompt
    from .llm import LLM
    from .lora import LoRARequest
    from .models import load_model
    from .outputs import CompletionOutput, Outputs, RequestOutput, StreamEvent
    from .params import BeamSearchParams, SamplingParams, StructuredOutputsParams
    from .pooled import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolerConfig,
        PoolingParams,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from .tracefile import Trace
    from .views.pictures import timeline
    from .views.scrubber import Scrubber as Scrubber
    from .views.widgets import LiveView as LiveView, Playground as Playground
    from .work.frames import run


def __getattr__(name: str):
    if (
        name in _Moved.names and f"{__name__}.{_Moved.names[name]}" in sys.modules
    ):  # as if it had been imported here
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    if name not in _lazy:
        raise AttributeError(f"module 'batchlab' has no attribute {name!r}{_meant(name)}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"batchlab.{_lazy[name]}"), name)
    return value


_VLLM = dict.fromkeys(
    ("AsyncLLMEngine", "AsyncEngineArgs", "AsyncEngine"), "AsyncLLM"
)  # what does their work here


def _meant(name: str) -> str:
    "The public name that is meant by `name`, as a question; '' if there is none."
    if name in _VLLM:
        return f": did you mean {_VLLM[name]!r}?"
    from difflib import get_close_matches

    public = {n.lower(): n for n in _lazy}
    near = get_close_matches(name.lower(), public, 1)
    return f": did you mean {public[near[0]]!r}?" if near and not name.startswith("_") else ""


class _Moved:
    "Finds modules under names that they had, with a `DeprecationWarning`, and those of vLLM: `batchlab.jobs` is `batchlab.work.jobs`."

    names = {
        "kernels": "backends.kernels",
        "fused": "backends.fused",
        "int8": "backends.int8",
        "cuda": "backends.cuda",
        "drawing": "views.drawing",
        "pictures": "views.pictures",
        "widgets": "views.widgets",
        "viewer": "views.viewer",
        "jobs": "work.jobs",
        "scaleout": "work.scaleout",
    }

    vllm = {
        f"{__name__}.{m}"
        for m in (
            "utils",
            "utils.argparse_utils",
            "utils.print_utils",
            "sampling_params",
            "pooling_params",
            "lora.request",
            "distributed",
        )
    }  # what programs import: `habits`

    @classmethod
    def find_spec(cls, name: str, path=None, target=None):
        package, _, module = name.rpartition(".")
        if name in cls.vllm:
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]
        if package != __name__ or module not in cls.names:
            return None
        from importlib.machinery import ModuleSpec

        warnings.warn(
            f"{name} is now {__name__}.{cls.names[module]}", DeprecationWarning, stacklevel=2
        )
        return ModuleSpec(name, cls)  # type: ignore[arg-type]

    @classmethod
    def get_code(cls, name: str):
        raise ImportError(
            f"{name} is now {__name__}.{cls.names[name.rpartition('.')[2]]}"
        )  # python -m

    @classmethod
    def create_module(cls, spec):
        if spec.submodule_search_locations is not None:
            return None
        from importlib import import_module

        module = import_module(f"{__name__}.{cls.names[spec.name.rpartition('.')[2]]}")
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module):
        if module.__spec__.submodule_search_locations is None:  # it has run under its own name
            module.__spec__ = module.__spec__.loader_state
            return
        from importlib import import_module

        habits = import_module(f"{__name__}.habits")
        module.__dict__.update(
            {name: getattr(habits, name) for name in habits.__all__}, __all__=habits.__all__
        )


if not any(getattr(f, "__module__", "") == __name__ for f in sys.meta_path):
    sys.meta_path.append(_Moved)  # type: ignore[arg-type]


class _Misspelled:
    "Asked last: `from batchlab import X` looks for a module X before it gives up, and an error from here says which was meant."

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        package, _, wanted = name.rpartition(".")
        if package == __name__ and wanted not in _lazy and (meant := _meant(wanted)):
            raise ModuleNotFoundError(
                f"cannot import name {wanted!r} from 'batchlab'{meant}", name=__name__
            )  # with `name` it would go unsaid


if not any(getattr(f, "__name__", "") == "_Misspelled" for f in sys.meta_path):
    sys.meta_path.append(_Misspelled)  # type: ignore[arg-type]


def __dir__() -> list[str]:
    return sorted({*globals(), *_lazy})
