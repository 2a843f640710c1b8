"""LLM batch inference on PyTorch and transformers, built chapter by chapter in `nbs/`.

Names resolve on first use (PEP 562), so that `import batchlab` is quick and imports neither torch nor transformers."""
__version__ = "0.1.0"

_lazy = {'LLM': 'engine', 'RequestOutput': 'engine', 'CompletionOutput': 'engine', 'SamplingParams': 'sampling',
         'StructuredOutputsParams': 'sampling', 'load_model': 'models', 'BatchlabError': 'models'}
__all__ = [*_lazy]


def __getattr__(name):
    if name not in _lazy: raise AttributeError(f"module 'batchlab' has no attribute {name!r}")
    from importlib import import_module
    value = globals()[name] = getattr(import_module(f'batchlab.{_lazy[name]}'), name)
    return value


def __dir__(): return sorted({*globals(), *_lazy})
