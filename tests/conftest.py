"What several files of tests use."
import os, shutil, sys
from pathlib import Path

# Beside another worker of pytest-xdist, torch gets its share of the cores: two that each take all of them wait for each other.
if others := int(os.environ.get('PYTEST_XDIST_WORKER_COUNT', 0)):
    for name in 'OMP_NUM_THREADS', 'MKL_NUM_THREADS': os.environ.setdefault(name, str(max(1, (os.cpu_count() or 1) // others)))

import pytest


@pytest.fixture
def one_thread():
    "One thread for torch: tiny models gain nothing from more, and lose much."
    import torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope='module')
def browser():
    "Chromium."
    playwright = pytest.importorskip('playwright.sync_api', reason='needs the package playwright: pip install playwright')
    path = os.environ.get('CHROMIUM') or next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
    if not path: pytest.skip('needs Chromium: install it, or name it in the variable CHROMIUM')
    with playwright.sync_playwright() as p:
        b = p.chromium.launch(executable_path=path, args=['--no-sandbox'])
        yield b
        b.close()


def has_compiler():
    "Whether the kernels can be had here: on Linux, with the compiler that CXX names, else one of those that are tried."
    names = [os.environ['CXX']] if os.environ.get('CXX') else ['g++', 'clang++', 'c++']
    return sys.platform == 'linux' and any(map(shutil.which, names))


@pytest.fixture
def compiler(): return has_compiler()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    "A test that skips as there are no kernels fails where there is a compiler: it's they that stopped loading, or fitting."
    report = yield
    if report.skipped and has_compiler():
        why = str(call.excinfo.value)
        no_unit = 'amx_bf16' in why and 'amx_bf16' not in Path('/proc/cpuinfo').read_text()      # the unit that it skips for
        if 'no kernels' in why or no_unit: report.outcome, report.longrepr = 'failed', f'skipped, though there is a C++ compiler: {why}'
    return report
