// Products of bf16 on a matrix unit (AMX): a part of packed.cpp. Made from the cells of nbs/4_fast/28_matrix_unit.ipynb by
// .ci/cpp: edit the notebook.
#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
static const bool tiles = !syscall(SYS_arch_prctl, 0x1023, 18);  // Linux gives the registers of the unit to a process that asks
constexpr int TR = 16, TK = 32, SPAN = 192, GROUP = 16;          // SPAN: numbers of each row of a group of blocks at a time
// Of the eight registers 0 to 3 hold sums of two times 16 rows and two times 16 outputs, 4 and 5 rows, 6 and 7 weights
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    TileShapes(int m) {
        const int first = std::min(m, TR), second = m - first, of[] = {first, first, second, second, first, second, TR, TR};
        for (int t = 0; t < 8; t++)
            if (of[t]) rows[t] = of[t], bytes[t] = 64;
        asm volatile("" : : "r"(this) : "memory");  // it is read where the compiler does not see it
    }
};
#endif

#ifdef TILES
// Add to sums numbers k to end of up to 32 rows a times a panel b
template <bool TWO>
static i64 tile_sums(const bf16* a, const bf16* b, i64 k, i64 end, i64 K, float (*sums)[NR]) {
    if (k) {
        _tile_loadd(0, sums[0], 4 * NR);
        _tile_loadd(1, sums[0] + TR, 4 * NR);
        if (TWO) {
            _tile_loadd(2, sums[TR], 4 * NR);
            _tile_loadd(3, sums[TR] + TR, 4 * NR);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (TWO) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (; k + TK <= end; k += TK) {
        _tile_loadd(6, b + k * NR, 4 * NR);
        _tile_loadd(4, a + k, 2 * K);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + k * NR + NR, 4 * NR);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, a + TR * K + k, 2 * K);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 4 * NR);
    _tile_stored(1, sums[0] + TR, 4 * NR);
    if (TWO) {
        _tile_stored(2, sums[TR], 4 * NR);
        _tile_stored(3, sums[TR] + TR, 4 * NR);
    }
    return k;
}
#endif

#ifdef TILES
static void store_sums(const float (*sums)[NR], const bf16* bias, bf16* c, i64 ldc, int m, int n) {
    for (int i = 0; i < m; i++, c += ldc)
        if (n == NR) {
            const vf low = load(sums[i]), high = load(sums[i] + W);
            const __m512bh h = bias ? _mm512_cvtne2ps_pbh((__m512)(high + load(bias + W)), (__m512)(low + load(bias)))
                                    : _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            memcpy(c, &h, sizeof h);
        } else
            for (int j = 0; j < n; j += W) {
                const int part_of = std::min(n - j, W);
                const __m256bh h =
                    _mm512_cvtneps_pbh((__m512)(bias ? load(sums[i] + j) + part(bias + j, part_of) : load(sums[i] + j)));
                memcpy(c + j, &h, 2 * part_of);
            }
}
#endif

#ifdef TILES
// Blocks first to last (excluded) of up to 32 rows, times panel p. shaped: for how many rows the registers are set
static void tile_panel(const bf16* x, const bf16* w, const bf16* bias, bf16* out, i64 M, i64 N, i64 K, i64 p, i64 first, i64 last,
                       int& shaped) {
    alignas(64) float sums[GROUP][2 * TR][NR];
    const Blocks<2 * TR> blocks(M);
    const bf16* b = w + p * NR * K;
    for (i64 begin = first; begin < last; begin += GROUP) {
        const i64 stop = std::min(begin + GROUP, last), span = stop - begin > 1 ? SPAN : std::max<i64>(K, TK);
        for (i64 k = 0; k < K; k += span)
            for (i64 q = begin; q < stop; q++) {
                const i64 at = q * blocks.each, end = std::min(k + span, K);
                const int m = std::min(blocks.each, M - at);
                if (m != shaped) {
                    const TileShapes shapes(shaped = m);
                    _tile_loadconfig(&shapes);
                }
                auto* s = sums[q - begin];
                i64 d = (m > TR ? tile_sums<true> : tile_sums<false>)(x + at * K, b, k, end, K, s);
                if (end < K) continue;
                for (; d < K; d += 2)  // what fills no tile
                    for (int i = 0; i < m; i++) {
                        vf v[1][NV] = {load(s[i]), load(s[i] + W)};
                        multiply(x + (at + i) * K + d, 0, b + d * NR, NR, v);
                        store(s[i], v[0][0]), store(s[i] + W, v[0][1]);
                    }
                store_sums(s, bias ? bias + p * NR : bias, out + at * N + p * NR, N, m, std::min<i64>(NR, N - p * NR));
            }
    }
}
#endif

#ifdef TILES
namespace shared {
static void tile_product(const bf16* x, const bf16* w, const bf16* bias, bf16* out, i64 M, i64 N, i64 K) {
    const i64 panels = (N + NR - 1) / NR, blocks = Blocks<2 * TR>(M).n, kept = std::max<i64>(1, (1 << 20) / (4 * TR * K));
    const i64 parts = std::max((blocks + kept - 1) / kept, std::clamp<i64>(4 * omp_get_num_threads() / panels, 1, blocks));
    int shaped = 0;
#pragma omp for
    for (i64 u = 0; u < panels * parts; u++) {
        const i64 i = u / panels;
        tile_panel(x, w, bias, out, M, N, K, u % panels, blocks * i / parts, blocks * (i + 1) / parts, shaped);
    }
    _tile_release();
}
}  // namespace shared
namespace alone {
static void tile_product(const bf16* x, const bf16* w, const bf16* bias, bf16* out, i64 M, i64 N, i64 K) {
    int shaped = 0;
    for (i64 p = 0; p * NR < N; p++) tile_panel(x, w, bias, out, M, N, K, p, 0, Blocks<2 * TR>(M).n, shaped);
    _tile_release();
}
}  // namespace alone
#endif
extern "C" int has_tiles() {
#ifdef TILES
    return tiles;
#else
    return 0;
#endif
}
