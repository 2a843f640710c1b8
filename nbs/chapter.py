"""What every chapter begins with: the libraries say less, and `nbdev_test` can run the whole book on a small machine.

`nbdev_test` runs several chapters at once, and one after the other in the same process. So there a chapter keeps to one core,
since two processes that each take all cores slow each other down many times over, and what the chapter before it held is freed."""

import ctypes, functools, gc, logging, os, platform, re, sys

last: dict = {}  # the names of the chapter before, in this process
environment: dict = {}  # as the first chapter found it: what one sets is not for the next


def begin(names: dict) -> None:
    "Begin a chapter, whose `globals()` are `names`."
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the outputs of a chapter are kept: no bars in them
    if not os.environ.get("IN_TEST"):
        return  # which nbdev_test sets
    global last
    environment.update({} if environment else os.environ)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    last.get("_oh", {}).clear()  # what its cells displayed
    last.clear()
    last = names
    sys.last_traceback = sys.last_value = sys.last_exc = None
    gc.collect()
    log = logging.getLogger("batchlab")  # which a chapter may have hushed, or listened to
    log.setLevel(logging.NOTSET)
    log.handlers.clear()
    log.propagate = True
    if attention := sys.modules.get(
        "batchlab.core.attention"
    ):  # chapter 10 registers its own function, whose names are gone now
        attention.AttentionInterface.register("batchlab", attention.packed_attention)
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # for what it starts, and for torch if that comes later
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def cpp_cells(before="", flags=()):
    """Let a chapter's cells begin with `%%cpp NAME`, and check each: it has to compile, without a warning, behind those before it.

    In `nbdev_test` they are checked together, once, where the chapter asks for them: each for itself takes a second or two.
    `before`: C++ that comes before the first. `flags`: more of the compiler's, where it knows them. Returns a function that gives the C++ of
    the cells so far, with the files that they include."""
    import subprocess
    from IPython.core.magic import register_cell_magic
    from batchlab.fast.native import FLAGS, find_compiler, with_includes
    from batchlab.errors import CompileError

    new: list[str] = []  # cells that nobody has checked yet
    parts, syntax = {}, "-Wall -Wextra -Wno-unused-function -fsyntax-only -x c++ -".split()

    def whole():
        return with_includes(before + "\n\n".join(parts.values())) + "\n"

    def said(more, text):
        command = [find_compiler(), *FLAGS, *more, *syntax]
        return subprocess.run(command, input=text, capture_output=True, text=True).stderr

    @functools.cache
    def known():
        return [] if said(flags, "") else flags

    def check():
        new.clear()
        try:
            assert not (wrong := said(known(), whole())), wrong
        except CompileError:
            return

    def cpp(name, cell):
        "C++, a part of the chapter's file."
        parts[name] = cell.strip()
        new.append(name)
        if not os.environ.get("IN_TEST"):
            check()

    def so_far():
        if new:
            check()
        return whole()

    register_cell_magic(cpp)
    return so_far


def page_cells():
    "Let a chapter's cells begin with `%%page KIND`: HTML, CSS or JavaScript of a page, which no kernel runs."
    from IPython.core.magic import register_cell_magic

    def page(kind, cell):
        "A part of the page's file of that kind."

    register_cell_magic(page)


def run_cpp(source: str, name: str, *args):
    """Compile C++ `source` and call what it exports by `EXPORT(name)`, in fp32, with tensors, structs and numbers. It runs once, so
    it is optimised a little less, which compiles in half the time and leaves the bits as they are; and what the package exports
    besides is left out, which takes most of the time."""
    import torch
    from unittest import mock
    from batchlab.fast import native

    others = "|".join(sorted(native.signatures(native.SOURCE).keys() - {name}))
    source = re.sub(rf"^EXPORT\(({others})\)$", "", source, flags=re.M)
    with mock.patch.object(native, "FLAGS", (*native.FLAGS, "-O2")):
        library = ctypes.CDLL(str(native.build(source)))
    call = ctypes.CFUNCTYPE(None, *native.signatures(source)[name]).in_dll(library, f"{name}_fp32")
    call(
        *(
            x.data_ptr()
            if isinstance(x, torch.Tensor)
            else ctypes.addressof(x)
            if isinstance(x, ctypes.Structure)
            else x
            for x in args
        )
    )


def generated(model, prompt: list[int], max_tokens: int) -> list[int]:
    "The new tokens of transformers' greedy `generate` for one prompt, alone."
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def difference(old: type, new: type, *names: str):
    "The methods `names` of class `new` as a difference to those of `old`: lines that go in red, new ones in green."
    import difflib, inspect
    from IPython.display import Markdown

    lines = lambda cls, name: (
        inspect.getsource(getattr(cls, name)).splitlines() if hasattr(cls, name) else []
    )
    changed = [
        line
        for name in names
        for line in list(difflib.unified_diff(lines(old, name), lines(new, name), n=99))[3:]
    ]
    return Markdown("\n".join(["```diff", *changed, "```"]))


# Where each chapter stands on the way of a request: its number, what it is about, and its box (x, row) in the picture.
PLACES = {
    "01": ("prefill", 446, 1),
    "02": ("decode", 550, 1),
    "03": ("padding", 320, 1),
    "04": ("prefixes", 194, 2),
    "05": ("packing", 320, 2),
    "06": ("slots", 446, 2),
    "07": ("step", 320, 0),
    "08": ("KV blocks", 194, 1),
    "09": ("scheduler", 194, 0),
    "10": ("attention", 550, 0),
    "11": ("sampling", 672, 0),
    "12": ("text", 72, 1),
    "13": ("the model", 446, 0),
    "14": ("LLM", 72, 0),
    "15": ("verify", 72, 2),
}


def place(number: str):
    "A picture of the way of a request through the engine, with chapter `number` marked; chapters before it are tinted."
    from batchlab.view.drawing import Canvas

    c, wide, high, top = Canvas(), 98, 30, 34
    about = PLACES[number][0]
    kind = lambda n: "prefill" if n == number else "held" if n < number else "idle"
    c.rect(180, 14, 604, 142, kind("07"), rx=7)
    c.rect(183, 17, 598, 136, "ground", rx=5)
    c.text(776, 28, "engine", "dim", "end", font_size=11)
    c.rect(436, top - 4, 222, 2 * high + 18, "edge", rx=6)
    c.rect(437, top - 3, 220, 2 * high + 16, "ground", rx=5)
    middle = top + high / 2
    for a, b in [(58, 72), (170, 194), (292, 320), (418, 436), (658, 672), (770, 798)]:
        c.line([(a, middle), (b - 4, middle)], "dim", 1.3)
        c.area([(b - 6, middle - 4), (b, middle), (b - 6, middle + 4)], "dim")
    c.text(10, middle + 4, "prompts", "dim", font_size=11)
    c.text(802, middle + 4, "answers", "dim", font_size=11)
    for n, (name, x, row) in PLACES.items():
        y = top + row * (high + 8)
        c.rect(x, y, wide, high, kind(n), rx=4)
        c.text(
            x + wide / 2,
            y + high / 2 + 4,
            f"{n} {name}",
            "on" if n == number else "ink" if n < number else "dim",
            "middle",
            font_size=11.5,
        )
    c.y = 166
    return c.picture(
        f"Chapter {number}: {about}",
        "prompts, LLM, scheduler, runner, model, sampling, answers: the way of a request through the engine",
    )
