"What holds for the package as a whole: its imports, what an editor sees of it, its type hints, and that its kernels load."

import ast, importlib.resources, os, runpy, shutil, subprocess, sys, tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SIZE = runpy.run_path(str(ROOT / ".ci/size"))
MODULES = {
    ".".join(["batchlab", *path.relative_to(ROOT / "batchlab").with_suffix("").parts]): path
    for path in sorted((ROOT / "batchlab").rglob("*.py"))
    if path.stem != "_modidx"
}
MODULES = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = CONTRACTS["tool"]["importlinter"]["contracts"]
LAYERS, TORCHLESS = (
    next(c for c in CONTRACTS if c["type"] == kind) for kind in ("layers", "forbidden")
)


def pytest_in(folder, *args, **env):
    "What pytest says of `args` in a new process with the variables `env`."
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *args],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout


def contracts(folder):
    "The exit status and the report of import-linter on the package that lies in `folder`."
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
        + ["--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_imports_keep_the_contracts():
    status, report = contracts(ROOT)
    assert status == 0, report


@pytest.fixture
def copy(tmp_path):
    "The package and its contracts, copied."
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignore = shutil.ignore_patterns("__pycache__", "*.cpp")
    shutil.copytree(ROOT / "batchlab", tmp_path / "batchlab", ignore=ignore)
    return tmp_path


@pytest.mark.parametrize(
    "module, code, said",
    [
        (
            "core/blocks",
            "def f():\n    from ..serve import client\n",
            "core is not allowed to import",
        ),
        ("jobs/formats", "import batchlab.view.viewer\n", "jobs is not allowed to import"),
        ("core/blocks", "from . import engine\n", "no circle among the files of a room BROKEN"),
        ("core/hashes", "def f():\n    import torch\n", "hashes is not allowed to import torch"),
        ("core/hashes", "from .runners import F\n", "core.runners -> torch"),
        ("stray", "", "a floor imports only floors below it BROKEN"),
    ],
    ids=[
        "up, in a function",
        "across",
        "in a circle",
        "torch",
        "torch, at two removes",
        "on no floor",
    ],
)
def test_a_planted_import_breaks_a_contract(copy, module, code, said):
    with (copy / f"batchlab/{module}.py").open("a", encoding="utf-8") as f:
        f.write(f"\n{code}")
    status, report = contracts(copy)
    assert status == 1 and said in report, report


def test_an_import_for_an_editor_alone_breaks_none(copy):
    with (copy / "batchlab/api/__init__.py").open("a", encoding="utf-8") as f:
        f.write("\nif TYPE_CHECKING:\n    from .cli import main\n")
    status, report = contracts(copy)
    assert status == 0, report


def test_what_is_ignored_must_be_there(copy):
    config = (copy / "pyproject.toml").read_text(encoding="utf-8")
    gone = config.replace(
        "ignore_imports = [\n",
        'ignore_imports = [\n    "batchlab.core.blocks -> batchlab.cli",\n',
        1,
    )
    (copy / "pyproject.toml").write_text(gone, encoding="utf-8")
    status, report = contracts(copy)
    assert status == 1 and "No matches for ignored import" in report, report


def circles(graph):
    "The modules of `graph`, `{module: modules}`, that lead back to themselves."

    def reach(name):
        found, left = set(), [name]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    return sorted(name for name in graph if name in reach(name))


def test_no_circle_among_the_files():
    "A package and a file in it too, and imports in functions; but for what the contracts ignore."
    import grimp

    built = grimp.build_graph("batchlab", exclude_type_checking_imports=True, cache_dir=None)
    ignored = {tuple(line.split(" -> ")) for line in LAYERS["ignore_imports"]}
    graph = {
        name: {m for m in built.find_modules_directly_imported_by(name) if (name, m) not in ignored}
        for name in built.modules
    }
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def private(name):
    "The underscore names of other modules that the module `name` imports, as 'module: name of module'."
    path, inside = MODULES[name], name.split(".")
    inside = inside if path.stem == "__init__" else inside[:-1]
    for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(n, ast.ImportFrom):
            start = inside[: len(inside) + 1 - n.level] if n.level else []
            base = ".".join([*start, *filter(None, [n.module])])
            for a in n.names:
                if base.startswith("batchlab") and a.name[0] == "_" and a.name[:2] != "__":
                    yield f"{name}: {a.name} of {base}".replace("batchlab.", "")


def test_no_module_imports_an_underscore_name_of_another():
    found = {line for name in MODULES for line in private(name)}
    assert found == set(), "imports of underscore names"


@pytest.mark.parametrize("name", TORCHLESS["source_modules"])
def test_imports_no_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300).returncode == 0


def test_no_method_is_put_on_a_class_from_outside():
    assert {m: lines for m, s in SIZE["sources"]().items() if (lines := SIZE["patches"](s))} == {}


def test_size_counts_code_only():
    code = (
        '"""Doc\nof a module."""\n__all__ = ["f"]\n\n@patch(as_prop=True)\ndef f(self:A, é: "int" = 1, *, b) -> int:  # why\n'
        '    "Doc"\n    x: int = é\n    return f"{x} of {b!r}" + """a\nb"""\n'
    )
    tokens = '@ patch ( as_prop = True ) def f ( self , é = 1 , * , b ) : x = é return f"" + """"""'.split()
    assert SIZE["count"](code) == (len(tokens), 4, 8) and SIZE["patches"](code) == [5]
    assert SIZE["hints"](code) == [1, 2, 1, 1]


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
        lacking = [a.arg for a in args if a.annotation is None] + ["return"] * (
            d.returns is None and d.name != "__init__"
        )
        if lacking:
            yield f"{name}: {', '.join(lacking)}"


@pytest.mark.parametrize("name", MODULES)
def test_type_hints_on_all_that_is_public(name):
    lacking = [*untyped(ast.parse(MODULES[name].read_text(encoding="utf-8")).body)]
    assert not lacking, "\n".join(lacking)


def test_what_lacks_a_hint_is_seen():
    code = (
        "def f(a, b: int, *c): ...\nclass A:\n  def __init__(self, x): ...\n  def g(self) -> int: ...\n  @staticmethod\n"
        "  def h(s) -> int: ...\n  def _i(self, x): ...\n"
    )
    assert [*untyped(ast.parse(code).body)] == ["f: a, c, return", "A.__init__: x", "A.h: s"]


def test_the_package_says_that_it_is_typed():
    "In the checkout, and in what is installed: a file that is no module has to be named in setup.py."
    assert (ROOT / "batchlab/py.typed").is_file()
    installed = importlib.resources.files("batchlab")
    others = [
        p.relative_to(ROOT / "batchlab")
        for p in (ROOT / "batchlab").rglob("*")
        if p.is_file() and p.suffix not in (".py", ".pyc")
    ]
    assert [str(p) for p in others if not installed.joinpath(*p.parts).is_file()] == []


def test_an_editor_completes_the_methods_of_llm():
    import jedi

    code, project = (
        "from batchlab import LLM; llm = LLM()\nllm.",
        jedi.Project(ROOT, added_sys_path=[str(ROOT)]),
    )
    script = lambda s: jedi.Script(
        s, project=project, environment=jedi.api.environment.InterpreterEnvironment()
    )
    names = {c.name for c in script(code).complete()}
    assert {"generate", "chat", "stream", "add_request", "cancel", "verify"} <= names
    [call] = script(f"{code}generate(").get_signatures()
    assert call.params and [p.to_string() for p in call.params if ":" not in p.to_string()] == []
    assert " -> " in call.to_string() and "RequestOutput" in call.to_string().rpartition(" -> ")[2]
    [shown] = script(f"{code}generate").help(2, 6)
    assert call.to_string() in shown.docstring() and len(shown.docstring(raw=True)) > 20


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


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
def test_kernels_that_do_not_load_are_seen(tmp_path):
    broken, cache = tmp_path / "c++", tmp_path / "cache"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\necho "error: broken" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    # A test that would skip for want of kernels fails too, and skips only where there is no compiler.
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_skips.py").write_text(
        "import pytest\ndef test_kernels(): pytest.skip('no kernels: so slow')\n"
        "def test_other(): pytest.skip('no GPU')\n"
    )
    said = pytest_in(
        tmp_path,
        f"{__file__}::test_kernels_load_where_there_is_a_compiler",
        CXX=str(broken),
        BATCHLAB_CACHE=str(cache),
    )
    assert "1 failed" in said and "CompileError" in said and "error: broken" in said, said
    said = pytest_in(tmp_path, "test_skips.py", CXX=str(broken))
    assert "1 failed, 1 skipped" in said and "though there is a C++ compiler" in said, said
    assert "2 skipped" in pytest_in(tmp_path, "test_skips.py", CXX="/no/such/compiler")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.parametrize(
    "flags, fails",
    [((), "rounds"), (("amx_bf16",), "lacks")],
    ids=["no matrix unit", "a matrix unit"],
)
def test_skips_for_a_matrix_unit_are_right(flags, fails, tmp_path):
    "With a processor that has none, and one that has it, whatever this one is: the wrong skip fails, and the right one is a skip."
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/book.py", tmp_path / ".ci")
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(Path(__file__).parent / "conftest.py", tests)
    shutil.copy(Path(__file__).parent / "helpers.py", tests)
    (tests / "test_skips.py").write_text(f"""
import pytest, types
from batchlab import machine
from helpers import need_same_bits
machine.processor_flags = lambda: {{*{flags!r}}}
def test_lacks(): pytest.skip('this processor has no matrix unit (amx_bf16)')
def test_old_compiler(): pytest.skip('the compiler knows no matrix unit (amx_bf16): take a newer one')
def test_rounds(): need_same_bits(types.SimpleNamespace(why='', batch_invariant=False))
def test_same_bits(): need_same_bits(types.SimpleNamespace(why='', batch_invariant=True))
""")
    said = pytest_in(tests, "test_skips.py", "-rf", CXX=sys.executable)
    assert "1 failed, 1 passed, 2 skipped" in said and f"::test_{fails}" in said, said
