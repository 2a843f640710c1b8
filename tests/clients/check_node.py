"OpenAI's client for node and the AI SDK, unchanged: `check_node.mjs` has what they are asked, and here is a test for each."

import json, os, subprocess
from pathlib import Path

import pytest

CHECKS = "chat responses structured background compatible sdk_chat sdk_responses".split()


@pytest.fixture(scope="module")
def results():
    script = Path(__file__).with_suffix(".mjs")
    how = dict(cwd=os.environ["BATCHLAB_NODE"], capture_output=True, text=True, timeout=900)
    done = subprocess.run(["node", str(script)], **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_node(results, name):
    assert results[name] == "ok", results[name]


def test_each_check_has_a_test(results):
    assert [*results] == CHECKS
