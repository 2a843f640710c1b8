"What several files of tests share."

import contextlib, runpy, threading, time
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
