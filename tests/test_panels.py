"""Panels kept on the disk: the same answers with and without them, whatever is in the file."""

import errno
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import told
from batchlab import LLM, SamplingParams
from batchlab.errors import ModelError
from batchlab.fast import panels as P
from batchlab.fast.kernels import load_kernels
from batchlab.models import load_model, tiny_gguf
from batchlab.models.load import keeps_groups


@pytest.fixture
def folder(tmp_path, monkeypatch):
    "A cache folder in which panels of any size are kept."
    load_kernels()  # from the folder that has them
    monkeypatch.setenv("BATCHLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(P, "LEAST", 0)
    return tmp_path / "cache" / "panels"


def some_panels(seed=0, n=3):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (2, 3, 50), generator=gen, dtype=torch.uint8) for _ in range(n)]


def packed(file, want):
    "Pack the panels `want` of `file`, as `pack_blocks` does."
    kept, mine = P.KeptPanels(file, sum(p.nbytes + 63 for p in want)), []
    for panels in want:
        found = kept.take(panels.shape)
        changed = len(panels)
        if found is None:
            found = panels.clone()
        else:
            changed = int((found != panels).flatten(1).any(1).sum())
            found.copy_(panels)
        kept.changed += changed
        mine.append(found)
    return kept, mine


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def spoiled(data):
    "What may be in a file, by what has happened to it."
    other = bytearray(data)
    other[len(data) // 2] ^= 1
    return dict(
        damaged=bytes(other),
        torn=data[: len(data) // 2],
        longer=data + bytes(64),
        zeros=bytes(len(data)),
        foreign=os.urandom(len(data)),
        empty=b"",
    )


@pytest.mark.parametrize("what", spoiled(bytes(4)))
def test_a_file_that_is_not_right_changes_nothing_and_is_written_anew(folder, file, what):
    want = some_panels()
    packed(file, want)[0].keep()
    path = P.place_of(file)
    whole = path.read_bytes()
    path.write_bytes(spoiled(whole)[what])
    kept, mine = packed(file, want)
    assert all(torch.equal(a, b) for a, b in zip(mine, want))
    assert path.read_bytes() == spoiled(whole)[what] or what == "foreign"  # not written through
    kept.keep()
    packed(file, want)[0].keep()
    assert path.read_bytes() == whole and [*folder.iterdir()] == [path]
    assert packed(file, want)[0].changed == 0


def test_panels_of_another_model_in_their_place_are_not_believed(folder, file):
    packed(file, some_panels())[0].keep()
    kept, mine = packed(file, some_panels(1, 4))
    assert kept.changed == 8 and all(torch.equal(a, b) for a, b in zip(mine, some_panels(1, 4)))


def test_two_that_write_at_once_leave_one_whole_file(folder, file):
    want = some_panels()
    (a, _), (b, _) = packed(file, want), packed(file, want)
    a.keep()
    mapped, mine = packed(file, want)
    b.keep()
    assert len([*folder.iterdir()]) == 1 and packed(file, want)[0].changed == 0
    assert mapped.changed == 0 and all(torch.equal(x, y) for x, y in zip(mine, want))


def test_other_files_and_other_kernels_have_other_places(folder, file, tmp_path, monkeypatch):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUG")
    first = P.place_of(file)
    assert len({first, P.place_of(other)}) == 2
    other.write_bytes(b"GGUF")
    assert P.place_of(other) == first
    assert P.place_of(file, "another dtype") != first
    monkeypatch.setattr(P, "SOURCE", P.SOURCE + " ")
    assert P.place_of(file) != first


def test_those_that_were_used_last_stay(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHLAB_PANELS", "0.000002")  # 2,000 bytes
    files = []
    for i in range(4):
        files.append(tmp_path / f"{i}.gguf")
        files[i].write_bytes(bytes([i]))
        packed(files[i], some_panels(i))[0].keep()  # 960 bytes
        os.utime(P.place_of(files[i]), (i, i))
    there = lambda: [P.place_of(f).exists() for f in files]
    assert there() == [False, False, True, True]
    packed(files[2], some_panels(2))[0].keep()  # used, not written
    packed(files[0], some_panels(0))[0].keep()
    assert there() == [True, False, True, False]


def fails(*args, **kw):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "when", "little writing renaming folder off small many few full elsewhere".split()
)
def test_without_room_nothing_is_kept_and_nothing_fails(folder, file, monkeypatch, when, caplog):
    allocate, made = os.posix_fallocate, []
    monkeypatch.setattr(os, "posix_fallocate", lambda *x: (made.append(x), allocate(*x)))
    if when == "little":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    elif when == "full":
        monkeypatch.setattr(os, "posix_fallocate", fails)
    elif when == "elsewhere":
        monkeypatch.delattr(os, "posix_fallocate")  # macOS has none
    elif when == "writing":
        monkeypatch.setattr(P.tempfile, "NamedTemporaryFile", fails)
    elif when == "renaming":
        monkeypatch.setattr(os, "link", fails)
    elif when == "folder":
        folder.parent.write_bytes(b"")  # a file in its place
    elif when == "small":
        monkeypatch.setattr(P, "LEAST", 2**20)
    else:
        limits = dict(off="0", many="0.0000001", few="0.0000008")  # of 900 bytes
        monkeypatch.setenv("BATCHLAB_PANELS", limits[when])
    kept, mine = packed(file, some_panels())
    kept.keep()
    assert all(torch.equal(a, b) for a, b in zip(mine, some_panels()))
    assert not folder.is_dir() or not [*folder.iterdir()]
    assert len(made) == (when == "renaming")  # nothing is written in vain
    assert caplog.text.count("packed anew at each start") == (when in ("little", "many", "few"))


def test_what_a_killed_process_left_goes_before_another_looks_for_room(folder, file, monkeypatch):
    old, new = folder / "panels-old.tmp", folder / "panels-new.tmp"
    folder.mkdir(parents=True)
    for path in (old, new):
        path.write_bytes(b"GGUF")
    os.utime(old, (0, 0))
    free = lambda _: SimpleNamespace(free=1000 * (not old.exists()))
    monkeypatch.setattr(shutil, "disk_usage", free)
    packed(file, some_panels(n=1))[0].keep()
    assert sorted(folder.iterdir()) == sorted([P.place_of(file), new])


@pytest.mark.parametrize("value", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(file, monkeypatch, value):
    monkeypatch.setenv("BATCHLAB_PANELS", value)
    with pytest.raises(ModelError, match="BATCHLAB_PANELS"):
        P.place_of(file)


def answers(llm):
    params = SamplingParams(max_tokens=9, temperature=1, seed=3, ignore_eos=True, logprobs=2)
    outs = llm.generate([[1, 5, 9], [7], [*range(20, 40)]], params)
    return told(outs)


@pytest.fixture
def changes(monkeypatch):
    "Of each panel that was asked for, whether it was new."
    seen, note = [], P.KeptPanels.note
    monkeypatch.setattr(P.KeptPanels, "note", lambda self, n: (seen.append(n), note(self, n))[1])
    return seen


@pytest.mark.skipif(not keeps_groups(torch.float32, "cpu"), reason="it gets plain numbers")
def test_a_model_has_the_same_answers_with_kept_panels(folder, tmp_path, changes, monkeypatch):
    from batchlab.models import tiny_model
    from gguf_files import gguf_file

    path = gguf_file(tmp_path / "tiny.gguf", tiny_model("llama").to(torch.bfloat16), form="Q4_0")
    want = answers(LLM(*load_model(path, dtype="fp32")))
    assert answers(LLM(path, dtype="fp32")) == want
    [kept] = folder.iterdir()
    n = len(changes)
    assert n and all(changes)
    assert answers(LLM(path, dtype="fp32")) == want
    assert len(changes) == 2 * n and not any(changes[n:])
    data = bytearray(kept.read_bytes())
    data[len(data) // 3] ^= 255
    kept.write_bytes(data)
    assert answers(LLM(path, dtype="fp32")) == want
    assert len(changes) == 3 * n and sum(map(bool, changes[2 * n :])) == 1
    assert not kept.exists()
    for share in 0.99, 1.1:  # of what they take: it is known before
        monkeypatch.setenv("BATCHLAB_PANELS", str(share * len(data) / 1e9))
        assert answers(LLM(path, dtype="fp32")) == want and kept.exists() == (share > 1)


def test_a_file_without_blocks_keeps_nothing(folder, tmp_path):
    path = tiny_gguf(tmp_path / "tiny.gguf")
    answers(LLM(path, dtype="fp32"))
    assert not folder.exists()
