"""What every chapter begins with: the libraries say less, and `nbdev_test` can run the whole book on a small machine.

`nbdev_test` runs several chapters at once, and one after the other in the same process. So there a chapter keeps to one core,
since two processes that each take all cores slow each other down many times over, and what the chapter before it held is freed."""
import ctypes, gc, os, platform, sys

last: dict = {}                                                # the names of the chapter before, in this process


def begin(names: dict) -> None:
    "Begin a chapter, whose `globals()` are `names`."
    os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
    os.environ.setdefault('HF_HUB_DISABLE_PROGRESS_BARS', '1')
    os.environ.setdefault('TQDM_DISABLE', '1')                 # the outputs of a chapter are kept: no bars in them
    if not os.environ.get('IN_TEST'): return                   # which nbdev_test sets
    global last
    last.get('_oh', {}).clear()                                # what its cells displayed
    last.clear()
    last = names
    sys.last_traceback = sys.last_value = sys.last_exc = None
    gc.collect()
    if platform.libc_ver()[0] == 'glibc': ctypes.CDLL(None).malloc_trim(0)
    os.environ.setdefault('OMP_NUM_THREADS', '1')              # for what it starts, and for torch if that comes later
    if 'torch' in sys.modules: sys.modules['torch'].set_num_threads(1)
