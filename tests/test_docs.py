"What holds for all documents: README's two commands, outputs without paths, and the counting of `.ci/run`."
import json, re, runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT/'nbs').glob('[!_.]*.ipynb'))
# An absolute path of a machine: a folder that every system has, or a home, at the start of a word.
MACHINE_PATH = re.compile(r'(?<![\w./:<-])(?:/(?:home|root|Users|tmp|var|usr|opt|work|mnt|private)/[\w.-]|[A-Z]:\\\\?Users)')


def test_readme_commands():
    blocks = re.findall(r'^```sh\n(.*?)^```', (ROOT/'README.md').read_text(encoding='utf-8'), re.M | re.S)
    assert len(blocks) >= 2
    for block in blocks[:2]: assert len(block.strip().splitlines()) == 1
    assert 'batchlab generate' in blocks[0]
    assert 'nbdev_test' in blocks[1] and 'pytest' in blocks[1]
    for block in blocks[:2]: assert block.startswith('pip install -c constraints.txt ')


def test_chapter_map():
    linked = {*re.findall(r'\]\(nbs/([\w-]+\.ipynb)\)', (ROOT/'README.md').read_text(encoding='utf-8'))}
    assert linked == {p.name for p in NOTEBOOKS} - {'index.ipynb'}


def texts(out):
    "Every text that a cell output shows."
    for value in [out.get('text', ''), *out.get('data', {}).values(), *out.get('traceback', [])]:
        yield ''.join(value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize('path', NOTEBOOKS + sorted((ROOT/'nbs'/'modules').glob('*.ipynb')), ids=lambda p: p.stem)
def test_outputs_hold_no_machine_path(path):
    nb = json.loads(path.read_text(encoding='utf-8'))
    found = [t for c in nb['cells'] for o in c.get('outputs', []) for t in texts(o) if MACHINE_PATH.search(t)]
    assert not found


def test_machine_path_is_seen():
    for bad in ('File "/home/ann/x.py"', "'/tmp/tmpab12/m.gguf'", r'C:\Users\ann'): assert MACHINE_PATH.search(bad)
    for good in ('tokens/s and 1/2', 'see https://x.org/home/page', '/v1/chat', 'a/tmp/b'): assert not MACHINE_PATH.search(good)


@pytest.mark.parametrize('path', sorted((ROOT/'nbs/images').glob('*.svg')), ids=lambda p: p.stem)
def test_a_picture_that_stands_alone_is_one_that_a_notebook_drew(path):
    kept = {t for p in NOTEBOOKS for c in json.loads(p.read_text(encoding='utf-8'))['cells'] for o in c.get('outputs', []) for t in texts(o)}
    assert path.read_text(encoding='utf-8') in kept
    assert f'images/{path.name})' in (ROOT/'README.md').read_text(encoding='utf-8')


def test_every_chapter_shows_something():
    exempt = lambda stem: stem in ('index', '01_models') or stem.startswith('8')       # pages of part IX are to look things up
    bare = [p.stem for p in NOTEBOOKS if not exempt(p.stem) and 'image/svg+xml' not in p.read_text(encoding='utf-8')]
    assert not bare


@pytest.mark.parametrize('log, status, expected', [
    ('Success.\n12 passed in 3.10s\n', 0, (15, 0)),
    ('12 passed in 3.10s\n', 0, (12, 1)),                                        # no notebook was run
    ('WARNING: pip says\nSuccess.\n.F\n1 failed, 11 passed, 2 warnings in 63.10s (0:01:03)\n', 1, (14, 1)),
    ('Success.\n4 passed, 2 errors in 1.00s\n', 1, (7, 2)),
    ('nbdev Tests Failed On The Following Notebooks:\n====\n\t00_a.ipynb\n\t01_b.ipynb\n', 1, (1, 2)),
    ('ERROR: No matching distribution found for torch\n', 1, (0, 1)),
    ('Success.\n', 137, (3, 1)),
    ('', 0, (0, 1)),
])
def test_ci_count(log, status, expected):
    count = runpy.run_path(str(ROOT/'.ci/count'))['count']
    assert count(log, status, ['00_a', '01_b', '02_c']) == expected
