"What holds for the package as a whole: its imports, what an editor sees of it, its type hints, and that its kernels load."

import ast, graphlib, importlib.resources, shutil, sys, tomllib
from pathlib import Path

import pytest

from helpers import ROOT, python, run, tool

MODULES = {
    ".".join(["batchlab", *path.relative_to(ROOT / "batchlab").with_suffix("").parts]): path
    for path in sorted((ROOT / "batchlab").rglob("*.py"))
    if path.stem != "_modidx"
}
MODULES = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = CONTRACTS["tool"]["importlinter"]["contracts"]
LAYERS = next(c for c in CONTRACTS if c["type"] == "layers")
TORCHLESS = """errors machine core.request core.scheduler core.blocks core.params core.batch core.hashes
    core.ledger llm.settings""".split()
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")


def pytest_in(folder, *args, **env):
    "What pytest says of `args` in a new process with the variables `env`."
    options = "-q", "-p", "no:cacheprovider", "-rs"
    return run(sys.executable, "-m", "pytest", *options, *args, cwd=folder, **env).stdout


def parsed(name):
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def contracts(folder):
    "The exit status and the report of import-linter on the package that lies in `folder`."
    code = "from importlinter.cli import lint_imports_command as c; c()"
    done = python(code, "--no-cache", cwd=folder, PYTHONPATH=str(folder), COLUMNS="200")
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "module, code, said",
    [
        (
            "core/blocks",
            "def f():\n    from ..serve import client",
            "core is not allowed to import",
        ),
        ("jobs/formats", "import batchlab.view.viewer", "jobs is not allowed to import"),
        ("bench/peers", "import batchlab.serve.app", "bench is not allowed to import"),
        ("core/blocks", "from . import engine", "no circle among the files of a room BROKEN"),
        ("stray", "", "a floor imports only floors below it BROKEN"),
        (
            "api/__init__",
            "if TYPE_CHECKING:\n    from ..cli import main",
            "api is not allowed to import",
        ),
    ],
    ids=[
        "up, in a function",
        "across",
        "from bench",
        "in a circle",
        "on no floor",
        "for an editor",
    ],
)
def test_a_planted_import_breaks_a_contract(tmp_path, module, code, said):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignore = shutil.ignore_patterns("__pycache__", "*.cpp")
    shutil.copytree(ROOT / "batchlab", tmp_path / "batchlab", ignore=ignore)
    with (tmp_path / f"batchlab/{module}.py").open("a", encoding="utf-8") as f:
        f.write(f"\n{code}\n")
    status, report = contracts(tmp_path)
    assert status == bool(said) and said in report, report


def test_no_circle_among_the_files():
    "A package and a file in it too, imports in functions, and those for an editor."
    import grimp

    built = grimp.build_graph("batchlab", exclude_type_checking_imports=False, cache_dir=None)
    arrows = {name: built.find_modules_directly_imported_by(name) for name in built.modules}
    graphlib.TopologicalSorter(arrows).prepare()  # raises CycleError


def private(name):
    "The underscore names of other modules that the module `name` imports, as 'module: name of module'."
    inside = name.split(".")
    inside = inside if MODULES[name].stem == "__init__" else inside[:-1]
    for n in ast.walk(parsed(name)):
        if isinstance(n, ast.ImportFrom):
            start = inside[: len(inside) + 1 - n.level] if n.level else []
            base = ".".join([*start, *filter(None, [n.module])])
            for a in n.names:
                if base.startswith("batchlab") and a.name[0] == "_" and a.name[:2] != "__":
                    yield f"{name}: {a.name} of {base}"


def test_no_module_imports_an_underscore_name_of_another():
    assert [line for name in MODULES for line in private(name)] == []


def test_functions_have_at_most_60_lines():
    "The only bound on length: a class stands whole in one cell, however long its reader can bear."
    long = [
        f"{name}: {d.name}"
        for name in MODULES
        for d in ast.walk(parsed(name))
        if isinstance(d, (ast.FunctionDef, ast.AsyncFunctionDef)) and d.end_lineno - d.lineno >= 60
    ]
    assert long == []


def test_what_plans_a_step_imports_no_torch():
    names = ", ".join(f"batchlab.{name}" for name in TORCHLESS)
    heavy = "bool({'torch', 'transformers'} & {*sys.modules})"
    assert python(f"import sys, {names}; sys.exit({heavy})").returncode == 0


def test_what_an_llm_seldom_needs_is_imported_when_it_is_asked_for():
    "And each of its settings is an argument of `LLM`, in the same order and with the same default."
    code = """
import inspect, sys
from dataclasses import fields
from batchlab import LLM
from batchlab.llm.settings import LLMSettings
late = ("batchlab.view.trace", "batchlab.tasks.verify", "batchlab.tasks.choices")
assert not {*late} & {*sys.modules}
taken = [(p.name, p.default) for p in inspect.signature(LLM).parameters.values()]
assert taken == [(f.name, f.default) for f in fields(LLMSettings)]
"""
    assert (done := python(code)).returncode == 0, done.stderr


def test_size_counts_code_only():
    code = (
        '"""Doc\nof a module."""\n__all__ = ["f"]\n\n@cache(as_prop=True)\ndef f(self:A, é: "int" = 1, *, b) -> int:  # why\n'
        '    "Doc"\n    x: int = é\n    return f"{x} of {b!r}" + """a\nb"""\n'
    )
    tokens = "__all__ = ['f'] @ cache ( as_prop = True ) def f ( self : A , é : 'int' = 1 , * , b ) -> int :"
    tokens += ' x : int = é return f"" + """"""'
    assert tool("size").count(code) == len(tokens.split()) + 2  # the brackets of a list


def untyped(body, of_class=""):
    "Yield what lacks a type hint among the public functions and methods of `body`: names of arguments, or 'return'."
    for d in body:
        name = of_class + getattr(d, "name", "_")
        if isinstance(d, ast.ClassDef) and d.name[0] != "_":
            yield from untyped(d.body, f"{name}.")
        if not isinstance(d, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if d.name[0] == "_" and d.name not in ("__init__", "__call__"):
            continue
        static = any(ast.unparse(x) == "staticmethod" for x in d.decorator_list)
        args = [*d.args.posonlyargs, *d.args.args][bool(of_class) and not static :]
        args += [*d.args.kwonlyargs, *filter(None, [d.args.vararg, d.args.kwarg])]
        lacking = [a.arg for a in args if a.annotation is None]
        lacking += ["return"] * (d.returns is None and d.name != "__init__")
        if lacking:
            yield f"{name}: {', '.join(lacking)}"


def test_type_hints_on_all_that_is_public():
    lacking = {name: [*untyped(parsed(name).body)] for name in MODULES}
    assert {name: some for name, some in lacking.items() if some} == {}
    code = "def f(a, b: int, *c): ...\nclass A:\n  def __init__(self, x): ...\n  def g(self) -> int: ..."
    assert [*untyped(ast.parse(code).body)] == ["f: a, c, return", "A.__init__: x"]


def test_the_package_says_that_it_is_typed():
    "In the checkout, and in what is installed: a file that is no module has to be named in setup.py."
    files = [p for p in (ROOT / "batchlab").rglob("*") if p.is_file()]
    others = [p.relative_to(ROOT / "batchlab") for p in files if p.suffix not in (".py", ".pyc")]
    installed = importlib.resources.files("batchlab")
    assert Path("py.typed") in others
    assert [str(p) for p in others if not installed.joinpath(*p.parts).is_file()] == []


def test_kernels_load_where_there_is_a_compiler(compiler):
    "The kernels fall back to torch without a word: where they can be had, they must be."
    if not compiler:
        pytest.skip(
            "the kernels need Linux and a C++ compiler: install g++, or name one in the variable CXX"
        )
    from batchlab import LLM
    from batchlab.fast.kernels import load_kernels
    from batchlab.models import tiny_model

    load_kernels()
    for how in ({}, dict(quantization="int8")):
        backend = LLM(tiny_model("llama"), **how).backend
        assert backend.name == "fused", backend.why


@linux
def test_kernels_that_do_not_load_are_seen(tmp_path):
    broken, cache = tmp_path / "c++", tmp_path / "cache"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\necho "error: broken" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    here = f"{__file__}::test_kernels_load_where_there_is_a_compiler"
    said = pytest_in(tmp_path, here, CXX=str(broken), BATCHLAB_CACHE=str(cache))
    assert "1 failed" in said and "CompileError" in said and "error: broken" in said, said
    # A test that would skip for want of kernels fails too, and skips only where there is no compiler.
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_skips.py").write_text(
        "import pytest\ndef test_kernels(): pytest.skip('no kernels: so slow')\n"
        "def test_other(): pytest.skip('no GPU')\n"
    )
    said = pytest_in(tmp_path, "test_skips.py", CXX=str(broken))
    assert "1 failed, 1 skipped" in said and "though there is a C++ compiler" in said, said
    assert "2 skipped" in pytest_in(tmp_path, "test_skips.py", CXX="/no/such/compiler")


@linux
@pytest.mark.parametrize(
    "flags, counts",
    [((), "1 passed, 2 skipped"), (("amx_bf16",), "1 failed, 1 passed, 1 skipped")],
    ids=["no matrix unit", "a matrix unit"],
)
def test_skips_for_a_matrix_unit_are_right(flags, counts, tmp_path):
    "With a processor that has none, and one that has it, whatever this one is: the wrong skip fails, and the right one is a skip."
    for name in (".ci/book.py", "tests/conftest.py", "tests/helpers.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests/test_skips.py").write_text(f"""
import pytest, types
from batchlab import machine
from helpers import need_same_bits
machine.processor_flags = lambda: {{*{flags!r}}}
def test_lacks(): pytest.skip('this processor has no matrix unit (amx_bf16)')
def test_old_compiler(): pytest.skip('the compiler knows no matrix unit (amx_bf16): take a newer one')
def test_same_bits(): need_same_bits(types.SimpleNamespace(why='', batch_invariant=True))
""")
    said = pytest_in(tmp_path / "tests", "test_skips.py", "-rf", CXX=sys.executable)
    assert counts in said and ("::test_lacks" in said) == bool(flags), said
