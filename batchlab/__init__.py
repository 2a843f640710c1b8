"""LLM batch inference on PyTorch and transformers, built chapter by chapter in `nbs/`.

Names resolve on first use (PEP 562), so that `import batchlab` is quick and imports neither torch nor transformers."""
import sys, warnings
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_lazy = {'LLM': 'llm', 'RequestOutput': 'outputs', 'CompletionOutput': 'outputs', 'SamplingParams': 'sampling',
         'StructuredOutputsParams': 'sampling', 'AsyncLLM': 'async_llm', 'load_model': 'models', 'BatchlabError': 'errors'}
__all__ = ['LLM', 'RequestOutput', 'CompletionOutput', 'SamplingParams', 'StructuredOutputsParams', 'AsyncLLM', 'load_model',
           'BatchlabError']

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .llm import LLM
    from .outputs import CompletionOutput, RequestOutput
    from .errors import BatchlabError
    from .models import load_model
    from .sampling import SamplingParams, StructuredOutputsParams


# to see with; the widgets want a package of their own, and stay out of `import *`
_lazy |= {'Outputs': 'outputs', 'StreamEvent': 'outputs', 'Trace': 'tracefile', 'timeline': 'views.pictures',
          'LiveView': 'views.widgets', 'Playground': 'views.widgets', 'Scrubber': 'views.scrubber'}
__all__ += ['Outputs', 'StreamEvent', 'Trace', 'timeline']

if TYPE_CHECKING:
    from .outputs import Outputs, StreamEvent
    from .tracefile import Trace
    from .views.pictures import timeline
    from .views.scrubber import Scrubber as Scrubber
    from .views.widgets import LiveView as LiveView, Playground as Playground


def __getattr__(name: str):
    if name in _Moved.names and f'{__name__}.{_Moved.names[name]}' in sys.modules:      # as if it had been imported here
        from importlib import import_module
        return import_module(f'{__name__}.{name}')
    if name not in _lazy: raise AttributeError(f"module 'batchlab' has no attribute {name!r}{_meant(name)}")
    from importlib import import_module
    value = globals()[name] = getattr(import_module(f'batchlab.{_lazy[name]}'), name)
    return value


def _meant(name: str) -> str:
    "The public name that is nearest to `name`, as a question; '' if there is none."
    from difflib import get_close_matches
    public = {n.lower(): n for n in _lazy}
    near = get_close_matches(name.lower(), public, 1)
    return f': did you mean {public[near[0]]!r}?' if near and not name.startswith('_') else ''


class _Moved:
    "Finds a module under the name that it had, with a `DeprecationWarning`: `import batchlab.jobs` gives `batchlab.work.jobs`."
    names = {'kernels': 'backends.kernels', 'fused': 'backends.fused', 'int8': 'backends.int8', 'cuda': 'backends.cuda',
             'drawing': 'views.drawing', 'pictures': 'views.pictures', 'widgets': 'views.widgets', 'viewer': 'views.viewer',
             'jobs': 'work.jobs', 'scaleout': 'work.scaleout'}

    @classmethod
    def find_spec(cls, name: str, path=None, target=None):
        package, _, module = name.rpartition('.')
        if package != __name__ or module not in cls.names: return None
        from importlib.machinery import ModuleSpec
        warnings.warn(f'{name} is now {__name__}.{cls.names[module]}', DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, cls)                                                       # type: ignore[arg-type]

    @classmethod
    def get_code(cls, name: str): raise ImportError(f"{name} is now {__name__}.{cls.names[name.rpartition('.')[2]]}")      # python -m

    @classmethod
    def create_module(cls, spec):
        from importlib import import_module
        module = import_module(f"{__name__}.{cls.names[spec.name.rpartition('.')[2]]}")
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module): module.__spec__ = module.__spec__.loader_state               # it has run under its own name


if not any(getattr(f, '__module__', '') == __name__ for f in sys.meta_path): sys.meta_path.append(_Moved)   # type: ignore[arg-type]


class _Misspelled:
    "Asked last: `from batchlab import X` looks for a module X before it gives up, and an `ImportError` from here says which was meant."
    @staticmethod
    def find_spec(name: str, path=None, target=None):
        package, _, wanted = name.rpartition('.')
        if package == __name__ and (meant := _meant(wanted)):
            raise ImportError(f"cannot import name {wanted!r} from 'batchlab'{meant}", name=name)


if not any(getattr(f, '__name__', '') == '_Misspelled' for f in sys.meta_path): sys.meta_path.append(_Misspelled)   # type: ignore[arg-type]


def __dir__() -> list[str]: return sorted({*globals(), *_lazy})
