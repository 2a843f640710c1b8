"What several files of tests share."

import contextlib, json, runpy, threading, time
from pathlib import Path

import pytest

BOOK = runpy.run_path(
    str(Path(__file__).resolve().parents[1] / ".ci/book.py")
)  # which notebooks there are


@contextlib.contextmanager
def running(server, sock, up):
    "`server` of batchlab at work on `sock`, in the thread that is given; it sets `up` when it listens."
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    assert up.wait(60)
    try:
        yield thread
    finally:
        server.should_exit = True
        server.api.llm.llm.resume()
        thread.join(60)
        assert not thread.is_alive()


def until(f, seconds=100):
    "Wait for `f()` to be true."
    end = time.monotonic() + seconds
    while not f():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def need_same_bits(backend):
    "Skip where a token's bits depend on its company: without kernels, and on a matrix unit."
    why = (
        f"no kernels: {backend.why}"
        if backend.why
        else "the processor's matrix unit rounds by itself, so that company changes bits"
    )
    if not backend.batch_invariant:
        pytest.skip(why)


NO_KERNELS = "plain torch runs the model, "


def but_compiler(err):
    "What stands on standard error, but for the line that says that there is no compiler, where there is none."
    return "".join(
        line
        for line in err.splitlines(True)
        if not (NO_KERNELS in line and "no C++ compiler" in line)
    )


def same(x, y, backend):
    "Whether two answers are equal, numbers to the bit where `backend` promises that in any company, and else to rounding."
    if isinstance(x, str) and isinstance(y, str) and x.startswith('{"') and y.startswith('{"'):
        x, y = json.loads(x), json.loads(y)
    with contextlib.suppress(ValueError, TypeError):  # a table of text has its numbers as text
        if isinstance(x, str) and "." in x:
            x, y = float(x), float(y)
    if isinstance(x, float) and isinstance(y, float) and not backend.batch_invariant:
        return x == pytest.approx(y, abs=1e-4)
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(same(x[k], y[k], backend) for k in x)
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(same(a, b, backend) for a, b in zip(x, y))
    return x == y
