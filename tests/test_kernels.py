"The C++ kernels: odd sizes against plain torch, wrong arguments, other processors, and whether they are installed."

import ctypes, itertools, math, os, random, shutil, zipfile

import pytest, torch
import torch.nn.functional as F

from batchlab import LLM, SamplingParams
from batchlab.core.sampling import SamplingRow, processed_logits
from batchlab.fast.trial import kv_layout
from batchlab.fast import kernels as kernels_module, native
from batchlab.fast.fused import fuse
from batchlab.fast.kernels import (
    AttentionWorklist,
    TiledCache,
    attend_rows,
    check_kernels,
    layout,
    prefix_groups,
)
from batchlab.fast.layers import ACTIVATIONS
from batchlab.fast.native import (
    DTYPES,
    SOURCE,
    Kernels,
    build,
    find_compiler,
    pack_bytes,
    pack_weight,
    unpack_rows,
)
from batchlab.fast.packed import PackedLinear
from batchlab.core.backend import AttentionParams
from batchlab.core.batch import pack_rows, cache_indices
from batchlab.errors import CompileError, ModelError, ParamError
from batchlab.machine import processor_flags
from batchlab.models.fetch import find_model
from batchlab.models.load import cache_dir, cpu_has_fast_bf16
from batchlab.models import tiny_model
from helpers import ROOT, python, run, spoil

NEAR = {torch.float32: dict(rtol=1e-4, atol=1e-4), torch.bfloat16: dict(rtol=2e-2, atol=2e-2)}


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(x, w, b):
    return F.linear(x.float(), w.float(), b.float()).to(x.dtype)


FEW = itertools.product((1, 2, 11, 12, 13, 50), (1, 31, 32, 33, 100), (2, 16, 62))
MANY = itertools.product((17, 33, 70, 600), (31, 64, 100), (32, 190, 200, 416, 1000))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_number_of_rows(kernels, dtype):
    w, b, x = (drawn(*s, dtype=dtype) for s in ((100, 576), (100,), (40, 576)))
    panels = pack_weight(w)
    whole = kernels.product(x, panels, b, 100)
    for m in range(1, 41):
        assert torch.equal(kernels.product(x[:m], panels, b, 100), whole[:m])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[*FEW], [*MANY]], ids=["few", "many"])
def test_products_of_any_size(kernels, sizes, dtype):
    "Few rows; and many, in groups and spans."
    exact = dtype == torch.float32
    for M, N, K in sizes:
        x, w, b = (drawn(*s, dtype=dtype) for s in ((M, K), (N, K), (N,)))
        packed, near = pack_weight(w), NEAR[dtype]
        if exact and K > 99:
            near = dict(rtol=2e-2, atol=1e-3)
        got = kernels.product(x, packed, b, N)
        torch.testing.assert_close(got, linear(x, w, b), **near)
        for part in [slice(r, r + 1) for r in (0, M // 2, M - 1)] + [slice(5, 16)] * (M > 5):
            assert torch.equal(got[part], kernels.product(x[part], packed, b, N))
        assert torch.equal(unpack_rows(packed, torch.arange(N)), w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_bytes(kernels, dtype):
    for M, N, K in itertools.product((1, 13, 40), (1, 33), (4, 64, 2116)):
        x, w = drawn(M, K, dtype=dtype), torch.randint(-127, 128, (N, K)).to(torch.int8)
        x[0], w[0] = 3, 127
        block, scales = 64 if K % 64 == 0 else 1, torch.rand(N)
        bytes, steps = kernels.quantize(x, block, 127)
        sums = ((bytes.long() - 128) @ w.long().T).float()
        for bias in (None, torch.randn(N)):
            got = kernels.bytes_product(x, pack_bytes(w), scales, bias, block)
            want = sums * scales * steps[:, None]
            if bias is None:
                assert torch.equal(got, want.to(dtype))
            want = (want if bias is None else want + bias).to(dtype)
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-5)
            alone = kernels.bytes_product(x[-1:], pack_bytes(w), scales, bias, block)
            assert torch.equal(alone, got[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_in_bytes_is_the_same_in_blocks_of_any_size(kernels, dtype):
    x, scales, bias = drawn(40, 64, dtype=dtype), torch.rand(70), torch.randn(70)
    w = pack_bytes(torch.randint(-127, 128, (70, 64)).to(torch.int8))
    alone = [kernels.bytes_product(row[None], w, scales, bias, 64) for row in x]
    for M in range(2, 41):
        got = kernels.bytes_product(x[:M], w, scales, bias, 64)
        assert torch.equal(got, torch.cat(alone[:M])), M


def compiler_knows(macro):
    "Whether the compiler, making code for this processor, defines `macro`."
    command = [find_compiler(), "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    return macro in run(*command).stdout


def test_the_matrix_unit_is_used_where_linux_gives_it(kernels):
    if "amx_bf16" not in native.processor_flags():
        assert not kernels.tiles
        pytest.skip("this processor has no matrix unit (amx_bf16)")
    if not compiler_knows("__AMX_BF16__"):
        assert not kernels.tiles
        pytest.skip("the compiler knows no matrix unit (amx_bf16): take a newer one")
    layer = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    assert kernels.tiles and PackedLinear(layer, kernels=kernels).invariant


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_is_what_torch_makes_of_it(kernels, dtype):
    many = (1,), (32,), (70,), (64, 32, 100), (20, 44, 1)
    for sizes, K in itertools.product(many, (4, 48, 2116)):
        stacked = drawn(2 * sum(sizes), K + 4, dtype=dtype)[::2, :K]  # rows with gaps between them
        weights = stacked.split(sizes)
        assert torch.equal(kernels.pack_weight(*weights), pack_weight(*weights))
        for block in (1, 16) if K % 16 == 0 else (1,):
            bytes, steps = kernels.quantize(stacked.contiguous(), block, 127)
            want = *pack_bytes((bytes ^ 128).view(torch.int8)), steps
            assert all(map(torch.equal, kernels.pack_bytes(*weights, block=block), want))
    x = drawn(3, 48, dtype=dtype)
    for wrong in ([x.T], [x, x[:, :16]], [x, x.half()], [x.to("meta")]):
        with pytest.raises(TypeError):
            kernels.pack_weight(*wrong)
        with pytest.raises(TypeError):
            kernels.pack_bytes(*wrong, block=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_kernels_of_any_size(kernels, dtype):
    for T in (1, 9, 17):
        for block, K in ((1, 3), (1, 61), (16, 48), (32, 96), (64, 128)):
            bytes, steps = kernels.quantize(drawn(T, K, dtype=dtype), block, 127)
            assert bytes.min() >= 1 and steps.isfinite().all()


def part(kernels, layers, at, dtype, T, **buffers):
    "Run one part of described layers for T tokens of 48 numbers."
    at_ = {name: t.data_ptr() for name, t in buffers.items()}
    step = native.Step(tokens=T, outputs=T, width=48, **at_)
    kernels.run(dtype, layers, step, at, at + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_layer_are_what_torch_makes_of_them(kernels, dtype):
    w, b = torch.randn(48), torch.randn(48)
    norms = {  # kind, rounds, with a bias
        (1, 1, False): lambda x: F.rms_norm(x.float(), (48,), eps=1e-5).to(dtype).float() * w,
        (1, 0, False): lambda x: F.rms_norm(x.float(), (48,), eps=1e-5) * w,
        (2, 0, True): lambda x: F.layer_norm(x.float(), (48,), w, b),
    }
    for T, ((kind, rounds, biased), norm), residual in itertools.product(
        (1, 9, 17), norms.items(), (1, 0.5)
    ):
        layers, (h, m) = (native.Layer * 2)(), (drawn(T, 48, dtype=dtype, seed=i) for i in range(2))
        layers[0].residual, x = residual, torch.empty_like(h)
        bias = b.data_ptr() if biased else None
        layers[1].before = native.Norm(w.data_ptr(), bias, 1e-5, kind, rounds)
        want = h + m * residual
        part(kernels, layers, native.PARTS, dtype, T, stream=h, mlp_out=m, normed=x)
        assert torch.equal(h, want)
        torch.testing.assert_close(x, norm(want).to(dtype), **NEAR[dtype])
        layers[0].mlp_after, m_ = native.Norm(w.data_ptr(), None, 1e-5, 1, 0), m.clone()
        want = h + norms[1, 0, False](m).to(dtype) * residual
        part(kernels, layers, native.PARTS, dtype, T, stream=h, mlp_out=m_, normed=x)
        torch.testing.assert_close(h, want, **NEAR[dtype])
    for T, (kind, f), gated in itertools.product((1, 5), enumerate(ACTIVATIONS), (0, 1)):
        layers, g = (native.Layer * 2)(), drawn(T, (1 + gated) * 528, dtype=dtype) * 4
        layers[0].act, u = native.Activation(kind, gated), drawn(T, 528, dtype=dtype)
        layers[0].down = native.Linear(kind=1, inputs=528)
        part(kernels, layers, 6, dtype, T, gate_up=g, activated=u)
        want = f(g[:, :528].float()) * (g[:, 528:].float() if gated else 1)
        torch.testing.assert_close(u, want.to(dtype), **NEAR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, dim, value_dim", [(1, 1, 16, 16), (6, 2, 48, 32), (64, 1, 256, 256)]
)
def test_attention_of_any_size(kernels, dtype, heads, kv_heads, dim, value_dim):
    rows, rng = [(0, 1), (127, 1), (128, 1), (191, 1), (0, 3), (130, 66)], random.Random(0)
    blocks = iter(rng.sample(range(20), 20))
    tables = [[next(blocks) for _ in range(math.ceil((start + n) / 64))] for start, n in rows]
    tables[2][:2] = tables[1]
    batch = pack_rows([([5] * n, start) for start, n in rows], tables, 64)
    cache = TiledCache([(kv_heads, dim, value_dim)], 20, 64, dtype)
    q, at = drawn(batch.num_tokens, heads, dim, dtype=dtype), torch.arange(20 * 64)
    k = drawn(len(at), kv_heads, dim, dtype=dtype, seed=1)
    v = drawn(len(at), kv_heads, value_dim, dtype=dtype, seed=2)
    kernels.write(
        layout(cache, 0, q, AttentionParams(1.0)), k, v, cache.keys[0], cache.values[0], at
    )
    copy = TiledCache(cache.shapes, 20, 64, dtype)
    copy.write(0, k, v, at)
    assert torch.equal(cache.keys[0], copy.keys[0]) and torch.equal(cache.values[0], copy.values[0])
    for window, softcap, sinks in ((None, None, None), (70, 2.0, torch.ones(heads))):
        asked = AttentionParams(dim**-0.5, window, softcap, sinks)
        z = layout(cache, 0, q, asked)
        work = AttentionWorklist(batch, prefix_groups(batch, 64), 64, heads // kv_heads, kv_heads)
        got = kernels.attend(z, q, cache.keys[0], cache.values[0], work).float()
        want = attend_rows(cache, 0, batch, q, asked)
        torch.testing.assert_close(got, want, **NEAR[dtype])


def cache_for(rows, KV, D, Dv, dtype, size=64, seed=0):
    """A cache with noise where `rows` have tokens, NaN elsewhere, and their `Batch`.

    A row is `(first column, tokens, n)` and begins with n blocks that all rows with as many or more have in common."""
    rng, need = random.Random(seed), [-(-(start + n) // size) for start, n, _ in rows]
    blocks = rng.sample(range(sum(need) + 9), sum(need) + 9)
    prefix = [blocks.pop() for _ in range(max(n for *_, n in rows))]
    tables = [prefix[:n] + [blocks.pop() for _ in range(k - n)] for k, (*_, n) in zip(need, rows)]
    batch = pack_rows([([5] * n, start) for start, n, _ in rows], tables, size)
    cache = TiledCache([(KV, D, Dv)], sum(need) + 9, size, dtype)
    spoil(cache)
    at = torch.tensor(
        sorted({p for t, n in zip(tables, batch.seq_lens) for p in cache_indices(t, 0, n, size)})
    )
    k, v = (drawn(len(at), KV, d, dtype=dtype, seed=seed + d) for d in (D, Dv))
    cache.write(0, k, v, at)
    return cache, batch


def attended(kernels, q, cache, batch, groups=None, threads=None, **asks):
    "Attention by the kernels, the rows grouped by their prefixes or as `groups` says."
    K, size, H = cache.keys[0], cache.block_size, q.shape[1]
    groups, KV = groups or prefix_groups(batch, size), K.shape[1]
    work = AttentionWorklist(batch, groups, size, H // KV, KV, threads)
    z = layout(cache, 0, q, AttentionParams(q.shape[2] ** -0.5, **asks))
    return kernels.attend(z, q, K, cache.values[0], work)


ROWS = [(300, 1, 0), (0, 1, 0), (63, 1, 0), (599, 1, 8), (560, 1, 5)]
ROWS += [(0, 50, 0), (200, 70, 3), (512, 40, 8)]
SHAPES = (9, 3, 64, 64), (4, 4, 16, 32), (6, 1, 80, 80), (32, 4, 128, 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 192])
def test_attention_in_a_cache_full_of_nan(kernels, dtype, size):
    for H, KV, D, Dv in SHAPES:
        rows = [(s, n, k * 64 // size) for s, n, k in ROWS]
        cache, batch = cache_for(rows, KV, D, Dv, dtype, size)
        q = drawn(batch.num_tokens, H, D, dtype=dtype)
        for window, softcap, sinks in itertools.product((None, 40), (None, 3.0), (None, drawn(H))):
            asks = dict(window=window, softcap=softcap, sinks=sinks)
            want = attend_rows(cache, 0, batch, q, AttentionParams(D**-0.5, **asks))
            off = (attended(kernels, q, cache, batch, **asks).float() - want).abs().max()
            assert off < (1e-5 if dtype == torch.float32 else 2e-2)


ASKED = [
    dict(window=w, softcap=c, sinks=s)
    for w in (None, 40, 130)
    for c, s in ((None, None), (3.0, drawn(9)))
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asks", ASKED, ids=lambda a: "-".join(k for k in a if a[k] is not None))
def test_a_row_has_the_same_bits_alone_and_in_chunks(kernels, dtype, asks):
    for H, KV, D, Dv in ((9, 3, 64, 64), (6, 1, 80, 48)):
        cache, batch = cache_for(ROWS, KV, D, Dv, dtype)
        q = drawn(batch.num_tokens, H, D, dtype=dtype)
        asked = asks | dict(sinks=None if asks["sinks"] is None else asks["sinks"][:H])
        together = attended(kernels, q, cache, batch, **asked)
        for i, n in enumerate(batch.lengths):
            cuts = [
                (0, n),
                *((j, min(7, n - j)) for j in range(0, n, 7)),
                *((j, 1) for j in range(n)),
            ]
            for a, m in cuts:
                row = [([5] * m, batch.starts[i] + a)], [batch.block_table[i]]
                at = slice(batch.cu_seqlens[i] + a, batch.cu_seqlens[i] + a + m)
                got = attended(kernels, q[at], cache, pack_rows(*row, 64), **asked)
                assert torch.equal(got, together[at])


def copied(cache, batch):
    "The same rows with all that they share copied: each has blocks of its own."
    ends = itertools.accumulate(map(len, batch.block_table), initial=0)
    tables = [list(range(a, a + len(t))) for t, a in zip(batch.block_table, ends)]
    other = TiledCache(cache.shapes, sum(map(len, tables)), cache.block_size, cache.dtype)
    for ours, theirs in ((other.keys[0], cache.keys[0]), (other.values[0], cache.values[0])):
        for a, b in zip(tables, batch.block_table):
            ours[a] = theirs[b]
    rows = [([5] * n, s) for s, n in zip(batch.starts, batch.lengths)]
    return other, pack_rows(rows, tables, cache.block_size)


def test_a_prefix_may_be_shared_or_not_and_no_bit_changes(kernels):
    rng, found = random.Random(0), 0
    for trial in range(30):  # prefixes that end anywhere
        lengths = [rng.choice([1, 1, 1, rng.randrange(2, 80)]) for _ in range(6)]
        lengths.sort(key=lambda n: n > 1)
        starts = [rng.randrange(700) for _ in lengths]
        rows = [(s, n, rng.randrange(s // 64 + 1)) for s, n in zip(starts, lengths)]
        dtype, (H, KV, D, Dv) = rng.choice(list(DTYPES)), rng.choice(SHAPES)
        asks = dict(rng.choice(ASKED))
        asks["sinks"] = None if asks["sinks"] is None else drawn(H)
        cache, batch = cache_for(rows, KV, D, Dv, dtype, seed=trial)
        q = drawn(batch.num_tokens, H, D, dtype=dtype)
        want = attended(kernels, q, cache, batch, **asks)
        found += sum(n > 0 for _, n in prefix_groups(batch, 64))
        alone = [([r], 0) for r in range(6)]
        assert torch.equal(attended(kernels, q, cache, batch, groups=alone, **asks), want)
        assert torch.equal(attended(kernels, q, cache, batch, threads=9, **asks), want)
        assert torch.equal(attended(kernels, q, *copied(cache, batch), **asks), want)
    assert found > 10


class Louder(Kernels):
    def attend(self, *args):
        return super().attend(*args) * 1.1


class OneMore(Kernels):
    def product(self, *args):
        return super().product(*args) + 1


class OneMoreByte(Kernels):
    def bytes_product(self, *args):
        return super().bytes_product(*args) + 1


class Astray(Kernels):
    "Looks for shared columns in the blocks of another row."

    def attend(self, z, q, K, V, work):
        work.work_units[:, 2] = work.query_rows[0, 2]
        return super().attend(z, q, K, V, work)


class Short(Kernels):
    "Takes the last token of a row for the first of the next."

    def attend_whole(self, z, q, k, v, units):
        units[:, 1] -= (units[:, 1] - units[:, 0] > 1).long()
        return super().attend_whole(z, q, k, v, units)


class NoSinks(Kernels):
    def attend(self, z, *args):
        z.sinks = None
        return super().attend(z, *args)


class InCompany(Kernels):
    "Rounds otherwise where there are several rows, as compilers do that may choose."

    def product(self, x, *args):
        return super().product(x, *args) * (1 + (len(x) > 1) * 2**-23)


class OtherBits(Kernels):
    def attend(self, z, q, *args):
        return super().attend(z, q, *args) * (1 + (len(q) > 1) * 2**-23)


@pytest.mark.parametrize(
    "kind", [Louder, OneMore, OneMoreByte, Astray, Short, NoSinks, InCompany, OtherBits]
)
def test_kernels_that_are_a_little_wrong_are_noticed(kernels, kind):
    with pytest.raises(CompileError, match="compute wrong"):
        check_kernels(kind(kernels.path))


def test_a_default_dtype_changes_nothing(kernels):
    "That of torch may be another, set by the program, or by a thread that loads a model."
    x, w = torch.randn(3, 50), torch.randn(70, 64)
    rows = [SamplingRow.make(SamplingParams(temperature=0.7), [1]) for _ in x]
    made = lambda: (processed_logits(x, rows), kernels.pack_bytes(w, block=64)[2])
    want = made()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(made(), want))
        check_kernels(kernels)
    finally:
        torch.set_default_dtype(torch.float32)


def test_threads_are_given_back(kernels):
    before = torch.get_num_threads()
    with native.limit_threads(kernels):
        assert 1 <= torch.get_num_threads() <= before
    assert torch.get_num_threads() == before


def test_panels_of_several_weights():
    for dtype, sizes in itertools.product(DTYPES, ((64, 32, 100), (20, 44))):
        parts = [drawn(n, 16, dtype=dtype) for n in sizes]
        rows = unpack_rows(pack_weight(*parts), torch.arange(sum(sizes)))
        assert torch.equal(rows, torch.cat(parts))
    panels, starts = pack_bytes(torch.full((33, 8), 3, dtype=torch.int8))
    assert panels.shape == (2, 2, 32, 4)
    assert starts.tolist() == [-128 * 3 * 8] * 33 + [0] * 31


def test_wrong_arguments_are_refused(kernels):
    x, w = drawn(3, 48), pack_weight(drawn(70, 48))
    for wrong in (x.half(), drawn(48, 3).T, x.to("meta"), drawn(3, 32), x.bfloat16()):
        with pytest.raises(TypeError):
            kernels.product(wrong, w, None, 70)
    for wrong in (w[:2], w.int(), w.bfloat16()):
        with pytest.raises(TypeError, match="and got"):
            kernels.product(x, wrong, None, 70)
    with pytest.raises(TypeError, match="wants 70 numbers without gaps, torch.float32 on the CPU"):
        kernels.product(x, w, drawn(69), 70)
    with pytest.raises(TypeError, match="fp32 and bf16, and this is torch.float16"):
        kernels.calls["product", torch.float16]
    with pytest.raises(TypeError, match="arguments"):
        kernels.calls["product", torch.float32](1)
    with pytest.raises(TypeError):
        kernels.quantize(x.T, 1, 127)


def test_both_sides_take_the_same(kernels):
    assert {name for name, _ in kernels.calls} == set(native.signatures(SOURCE))


@pytest.mark.parametrize(
    "flags",  # two are optimised little, as that compiles in a third of the time
    [
        ["-O1", "-msse2", "-Wno-psabi"],
        ["-mavx2", "-mfma"],
        ["-O1", "-march=native", "-mno-amx-int8"],
    ],
)
def test_other_processors(kernels, flags, tmp_path, monkeypatch):
    "What is compiled for a processor without AVX, as for ARM, for one with AVX2, and for one without a matrix unit, computes right here."
    if "-march=native" in flags and not kernels.tiles:
        pytest.skip("this processor has no matrix unit to leave out")
    if native.platform.machine() != "x86_64" or "avx2" not in native.processor_flags():
        pytest.skip("tries what the compiler makes of AVX2, which this processor lacks")
    monkeypatch.setenv("BATCHLAB_CACHE", str(tmp_path))
    usual = [f for f in native.FLAGS if f != "-march=native"]
    monkeypatch.setattr(native, "FLAGS", (*usual, *flags))
    kernels = Kernels(build(SOURCE))
    check_kernels(kernels)
    for dtype in DTYPES:
        test_a_row_in_bytes_is_the_same_in_blocks_of_any_size(kernels, dtype)
    for arch in ("llama", "gemma2", "cohere"):
        for dtype in DTYPES:
            if (arch, dtype) == ("gemma2", torch.bfloat16):
                continue  # too small: its own code packed is too far from itself alone
            model = tiny_model(arch, attn_implementation="eager").to(dtype)
            fuse(model, kernels, kv_layout(model))  # raises if the logits are not the model's own


def test_installed_with_the_package(tmp_path):
    files = "setup.py settings.ini README.md LICENSE MANIFEST.in constraints.txt pyproject.toml"
    for name in files.split():
        shutil.copy(ROOT / name, tmp_path)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "batchlab", tmp_path / "batchlab", ignore=ignore)
    code = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    done = python(code, cwd=tmp_path)
    assert not done.returncode, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "batchlab").rglob("*.cpp")}
    assert sources and sources <= {*zipfile.ZipFile(wheel).namelist()}


@pytest.mark.parametrize("left", [0, 64, 1000, -1])
def test_a_library_that_was_cut_short_is_compiled_anew(kernels, left, tmp_path, monkeypatch):
    "It would end the process by a signal when it is loaded; so would one with other bytes in it."
    monkeypatch.setenv("BATCHLAB_CACHE", str(tmp_path))
    source, said = 'extern "C" int twice(int x) { return 2 * x; }', []
    path = build(source, said.append)
    whole = path.read_bytes()
    assert build(source, said.append) == path and len(said) == 1 and "once" in said[0]
    path.write_bytes(whole[:left])
    assert build(source, said.append).stat().st_size == len(whole) and len(said) == 2
    path.write_bytes(whole[:100] + b"?" + whole[101:])
    assert ctypes.CDLL(str(build(source))).twice(21) == 42


def test_the_switch_hides_what_the_processor_can_do(monkeypatch):
    def seen(most):
        "What is said to be there where nobody has asked before."
        monkeypatch.setenv("BATCHLAB_MAX_CPU", most)
        processor_flags.cache_clear()
        known = {"avx512f", "avx512_bf16", "avx2", "amx_bf16"} & processor_flags()
        return sorted(known), cpu_has_fast_bf16(), native.compiler_flags()[1]

    try:
        if "avx512f" not in seen("")[0]:
            pytest.skip("this processor has nothing beyond AVX2 to hide")
        assert seen("avx2") == (["avx2"], False, "-march=haswell")
        assert seen("avx512") == (["avx2", "avx512f"], False, "-march=skylake-avx512")
        with pytest.raises(ParamError, match="BATCHLAB_MAX_CPU is "):
            seen("pentium")
    finally:
        monkeypatch.undo()
        processor_flags.cache_clear()


def test_without_a_compiler_one_sentence_says_what_that_costs(monkeypatch, caplog):
    def none():
        raise CompileError("no C++ compiler (g++): install g++")

    monkeypatch.setattr(kernels_module, "load_kernels", none)
    kernels_module._warn_of_torch.cache_clear()
    with caplog.at_level("WARNING", "batchlab"):
        for arch in ("llama", "gpt2"):
            assert LLM(tiny_model(arch)).backend.name == "torch"
        LLM(tiny_model("llama"), compile=False)
    [said] = [r.getMessage() for r in caplog.records]
    assert "a quarter to two fifths of the speed" in said and "install g++" in said
    kernels_module._warn_of_torch.cache_clear()


def test_the_first_compilation_is_said(monkeypatch, capsys):
    def slow(source, say):
        say("compiling")
        raise CompileError("c++ failed")

    monkeypatch.setattr(kernels_module, "build", slow)
    with pytest.raises(CompileError):
        kernels_module.load_kernels.__wrapped__()
    assert capsys.readouterr().err == "batchlab: compiling\n"


def test_a_user_without_a_home_folder(monkeypatch, compiler):
    "What lies elsewhere is loaded and runs, on torch; the message says which variable helps."
    monkeypatch.delenv("BATCHLAB_CACHE", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ModelError, match="BATCHLAB_CACHE"):
        cache_dir()
    if compiler:
        with pytest.raises(CompileError, match="HOME"):
            build("int x;")
    with pytest.raises(ModelError, match="there is none"):
        find_model("~nobody/model")
