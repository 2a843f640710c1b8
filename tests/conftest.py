"What several files of tests use."

import contextlib, os, shutil, sys
from pathlib import Path

# Beside another worker of pytest-xdist, torch gets its share of the cores: two that each take all of them wait for each other.
if others := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    for name in "OMP_NUM_THREADS", "MKL_NUM_THREADS":
        os.environ.setdefault(name, str(max(1, (os.cpu_count() or 1) // others)))

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / ".ci"))  # what its scripts share


# With several workers these begin: xdist takes files with many tests first, and these have few that are slow.
SLOW = "scaleout book engine site cli models bench embed_work batches".split()


def pytest_configure(config):
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    rank = {f"test_{name}": i for i, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(SLOW)))


@pytest.fixture
def one_thread():
    "One thread for torch: tiny models gain nothing from more, and lose much."
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def s():
    "A server with a tiny model."
    from helpers import serving

    with serving() as s:
        yield s


@pytest.fixture(scope="module")
def web(s):
    "Its client."
    return s.web


@pytest.fixture(scope="module")
def browser():
    "Chromium."
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs the package playwright: pip install playwright"
    )
    path = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if not path:
        pytest.skip("needs Chromium: install it, or name it in the variable CHROMIUM")
    with playwright.sync_playwright() as p:
        b = p.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield b
        b.close()


def has_compiler():
    "Whether the kernels can be had here: on Linux, with the compiler that CXX names, else one of those that are tried."
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return sys.platform == "linux" and any(map(shutil.which, names))


@pytest.fixture
def compiler():
    return has_compiler()


@pytest.fixture(scope="session", autouse=True)
def compiled():
    "The kernels are compiled before the first test: it takes a while, and says so on standard error."
    if not has_compiler():
        return
    from batchlab.fast.native import SOURCE, build
    from batchlab.errors import CompileError

    with contextlib.suppress(CompileError):
        build(SOURCE)


@pytest.fixture(scope="session")
def kernels():
    "The compiled kernels."
    from batchlab.errors import CompileError
    from batchlab.fast.kernels import load_kernels
    from batchlab.fast.native import find_compiler

    try:
        find_compiler()
    except CompileError as e:
        pytest.skip(str(e))
    return load_kernels()


def matrix_unit():
    "Whether the package sees a matrix unit that multiplies bf16: `BATCHLAB_MAX_CPU` hides it."
    from batchlab.machine import processor_flags

    return "amx_bf16" in processor_flags()


def wrongly_skipped(why):
    "What speaks against a skip for the reason `why`, on a machine that has a C++ compiler; '' if nothing does."
    if "no kernels" in why:
        return "skipped, though there is a C++ compiler"
    if "has no matrix unit" in why and matrix_unit():
        return "skipped, though there is a matrix unit"
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    "A test that skips for want of what this machine has fails: the kernels stopped loading, or fitting, or using it."
    report = yield
    if report.skipped and has_compiler():
        why = str(call.excinfo.value)
        if wrong := wrongly_skipped(why):
            report.outcome, report.longrepr = "failed", f"{wrong}: {why}"
    return report
