"What `import batchlab` does, and what it leaves alone: each test in a process of its own, outside the checkout's folder."

import configparser, json, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = """
    StructuredOutputsParams LLM AsyncLLM SamplingParams RequestOutput CompletionOutput load_model
    BatchlabError LoRARequest Outputs StreamEvent Trace timeline run PoolingParams PoolerConfig
    PoolingRequestOutput EmbeddingRequestOutput ClassificationRequestOutput ScoringRequestOutput
"""
PUBLIC = {*NAMES.split()}


def py(code, cwd):
    "The output of `code` in a new interpreter."
    r = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert r.returncode == 0, r.stderr
    return r.stdout.strip()


def test_import_does_nothing_else(tmp_path):
    # An audit hook sees every socket, process and written file, whichever library asks for it.
    out = py(
        """
import sys
seen = []
def hook(event, args):
    if event.startswith(('socket.', 'subprocess.', 'os.fork', 'os.posix_spawn', '_thread.start')): seen.append(event)
    if event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+') and '__pycache__' not in str(args[0]):
        seen.append(f'writes {args[0]}')
sys.addaudithook(hook)
import batchlab, threading
dir(batchlab), batchlab.__all__, batchlab.__version__
heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'huggingface_hub', 'pandas', 'nbdev'} & {*sys.modules}
own = [m for m in sys.modules if m.startswith('batchlab.')]
print(seen, sorted(heavy), own, threading.active_count())
""",
        tmp_path,
    )
    assert out == "[] [] [] 1"


def test_names_resolve_lazily(tmp_path):
    out = py(
        f"""
import sys, batchlab
assert {{*batchlab.__all__}} == {PUBLIC!r}, batchlab.__all__
assert {PUBLIC!r} <= {{*dir(batchlab)}} and 'torch' not in sys.modules
from batchlab import BatchlabError, SamplingParams
SamplingParams(n=2)
assert not {{'torch', 'transformers'}} & {{*sys.modules}}
from batchlab.models import BatchlabError as same
assert BatchlabError is same and 'BatchlabError' in vars(batchlab) and 'LLM' not in vars(batchlab)
from batchlab import *
missing = [n for n in {PUBLIC!r} if not callable(globals().get(n))]
import batchlab.models, batchlab.core.sampling
assert load_model is batchlab.models.load_model and SamplingParams is batchlab.core.params.SamplingParams
print(missing)
""",
        tmp_path,
    )
    assert out == "[]"


def test_unknown_attribute():
    import batchlab

    with pytest.raises(AttributeError, match="module 'batchlab' has no attribute 'Lm'"):
        _ = batchlab.Lm
    with pytest.raises(AttributeError, match="did you mean 'timeline'?"):
        _ = batchlab.Timeline
    with pytest.raises(ImportError, match="cannot import name 'Lm' from 'batchlab'"):
        exec("from batchlab import Lm")
    assert not hasattr(batchlab, "__wrapped__")


def test_what_is_tested_is_what_is_installed():
    """The checkout's own package only if it is installed in place (pip install -e); one in an environment
    inside the checkout is not its own."""
    import batchlab
    from importlib.metadata import distribution

    source = json.loads(distribution("batchlab").read_text("direct_url.json") or "{}")
    in_place = source.get("dir_info", {}).get("editable", False)
    assert (Path(batchlab.__file__).resolve().parents[1] == ROOT) == in_place


def test_version():
    import batchlab
    from importlib.metadata import version

    ini = configparser.ConfigParser(delimiters=["="])
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    assert batchlab.__version__ == ini["DEFAULT"]["version"] == version("batchlab")
