"""LLM batch inference on PyTorch and transformers, built chapter by chapter in `nbs/`.

Names resolve on first use (PEP 562), so that `import batchlab` is quick and imports neither torch nor transformers."""
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_lazy = {'LLM': 'llm', 'RequestOutput': 'outputs', 'CompletionOutput': 'outputs', 'SamplingParams': 'sampling',
         'StructuredOutputsParams': 'sampling', 'load_model': 'models', 'BatchlabError': 'errors'}
__all__ = ['LLM', 'RequestOutput', 'CompletionOutput', 'SamplingParams', 'StructuredOutputsParams', 'load_model',
           'BatchlabError']

if TYPE_CHECKING:
    from .llm import LLM
    from .outputs import CompletionOutput, RequestOutput
    from .errors import BatchlabError
    from .models import load_model
    from .sampling import SamplingParams, StructuredOutputsParams


def __getattr__(name: str):
    if name not in _lazy: raise AttributeError(f"module 'batchlab' has no attribute {name!r}")
    from importlib import import_module
    value = globals()[name] = getattr(import_module(f'batchlab.{_lazy[name]}'), name)
    return value


def __dir__() -> list[str]: return sorted({*globals(), *_lazy})
