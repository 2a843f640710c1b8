// Products on a matrix unit (AMX): a part of packed.cpp. Made from the cells of nbs/4_fast/28_matrix_unit.ipynb by .ci/cpp: edit
// the notebook.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
static const bool tiles = !syscall(SYS_arch_prctl, 0x1023, 18);  // Linux gives the registers of the unit to a process that asks
constexpr int TR = 16, SPAN = 12, GROUP = 16;  // SPAN: times 64 bytes of each row of a group of blocks at a time
template <class T>
constexpr i64 TK = 64 / sizeof(T);  // numbers in a row of a tile
template <class T>
using Sum = std::conditional_t<sizeof(T) == 1, int32_t, float>;
// Of the eight registers 0 to 3 hold sums of two times 16 rows and two times 16 outputs, 4 and 5 rows, 6 and 7 weights
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    TileShapes(int m, int wide = 64) {  // of m rows, so many bytes of each
        const int first = std::min(m, TR), second = m - first, weights = wide / 4;
        const int of[] = {first, first, second, second, first, second, weights, weights};
        for (int t = 0; t < 8; t++)
            if (of[t]) rows[t] = of[t], bytes[t] = t == 4 || t == 5 ? wide : 64;
        asm volatile("" : : "r"(this) : "memory");  // it is read where the compiler does not see it
    }
};
#endif

#ifdef TILES
#define ADD_TILES(sums, rows, weights)     \
    if constexpr (sizeof(T) == 1)          \
        _tile_dpbusd(sums, rows, weights); \
    else                                   \
        _tile_dpbf16ps(sums, rows, weights)
// Add to sums, or to a row `start` for each of them, numbers k to end of up to 32 rows a times a panel b
template <bool TWO, class T, class B>
static i64 tile_sums(const T* a, const B* b, const Sum<T>* start, i64 k, i64 end, i64 K, Sum<T> (*sums)[NR]) {
    const auto* from = k ? sums[0] : start;
    const i64 apart = k ? 4 * NR : 0;
    _tile_loadd(0, from, apart);
    _tile_loadd(1, from + TR, apart);
    if (TWO) {
        from = k ? sums[TR] : start;
        _tile_loadd(2, from, apart);
        _tile_loadd(3, from + TR, apart);
    }
    for (; k + TK<T> <= end; k += TK<T>) {
        _tile_loadd(6, b + k * NR, 4 * NR);
        _tile_loadd(4, a + k, sizeof(T) * K);
        ADD_TILES(0, 4, 6);
        _tile_loadd(7, (const char*)(b + k * NR) + 64, 4 * NR);
        ADD_TILES(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, a + TR * K + k, sizeof(T) * K);
            ADD_TILES(2, 5, 6);
            ADD_TILES(3, 5, 7);
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
// The same for 4 bytes of one row
static inline void add_rest(const bf16* a, const bf16* b, float* s) {
    vf v[1][NV] = {load(s), load(s + W)};
    multiply(a, 0, b, NR, v);
    store(s, v[0][0]), store(s + W, v[0][1]);
}
static inline void add_rest(const uint8_t* a, const int8_t* b, int32_t* s) {
    int32_t quad;
    memcpy(&quad, a, 4);
    for (int j = 0; j < NV; j++, s += W, b += 4 * W)
        _mm512_storeu_si512(s, _mm512_dpbusd_epi32(_mm512_loadu_si512(s), _mm512_set1_epi32(quad), _mm512_loadu_si512(b)));
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
// Blocks first to last (excluded) of up to 32 rows x, times a panel b: put(sums, how many rows, the first of them). shaped: for
// how many rows the registers are set
template <class T, class B, class F>
static void tile_panel(const T* x, const B* b, const Sum<T>* start, i64 M, i64 K, i64 first, i64 last, int& shaped, F put) {
    alignas(64) Sum<T> sums[GROUP][2 * TR][NR];
    const Blocks<2 * TR> blocks(M);
    for (i64 begin = first; begin < last; begin += GROUP) {
        const i64 stop = std::min(begin + GROUP, last), span = stop - begin > 1 ? SPAN * TK<T> : std::max<i64>(K, TK<T>);
        for (i64 k = 0; k < K; k += span)
            for (i64 q = begin; q < stop; q++) {
                const i64 at = q * blocks.each, end = std::min(k + span, K);
                const int m = std::min(blocks.each, M - at);
                if (m != shaped) {
                    const TileShapes shapes(shaped = m);
                    _tile_loadconfig(&shapes);
                }
                auto* s = sums[q - begin];
                i64 d = (m > TR ? tile_sums<true, T, B> : tile_sums<false, T, B>)(x + at * K, b, start, k, end, K, s);
                if (end < K) continue;
                for (; d < K; d += 4 / sizeof(T))  // what fills no tile
                    for (int i = 0; i < m; i++) add_rest(x + (at + i) * K + d, b + d * NR, s[i]);
                put(s, m, at);
            }
    }
}
#endif

#ifdef TILES
namespace shared {
template <class T, class B, class F>  // make(p): the first sums of panel p, and what puts its sums
static void tile_product(const T* x, const B* w, i64 M, i64 N, i64 K, F make) {
    if (!M) return;
    const i64 panels = (N + NR - 1) / NR, blocks = Blocks<2 * TR>(M).n;
    const i64 kept = std::max<i64>(1, (1 << 20) / (2 * TR * K * sizeof(T)));
    const i64 parts = std::max((blocks + kept - 1) / kept, std::clamp<i64>(4 * omp_get_num_threads() / panels, 1, blocks));
    int shaped = 0;
#pragma omp for
    for (i64 u = 0; u < panels * parts; u++) {
        const i64 i = u / panels, p = u % panels;
        const auto [start, put] = make(p);
        tile_panel(x, w + p * NR * K, start, M, K, blocks * i / parts, blocks * (i + 1) / parts, shaped, put);
    }
    _tile_release();
}
}  // namespace shared
namespace alone {
template <class T, class B, class F>
static void tile_product(const T* x, const B* w, i64 M, i64 N, i64 K, F make) {
    int shaped = 0;
    for (i64 p = 0; p * NR < N; p++) {
        const auto [start, put] = make(p);
        tile_panel(x, w + p * NR * K, start, M, K, 0, Blocks<2 * TR>(M).n, shaped, put);
    }
    _tile_release();
}
}  // namespace alone
static auto storing(const bf16* bias, bf16* out, i64 N) {
    return [=](i64 p) {
        static const float zeros[NR] = {};
        const auto put = [=](const float (*sums)[NR], int m, i64 at) {
            store_sums(sums, bias ? bias + p * NR : bias, out + at * N + p * NR, N, m, std::min<i64>(NR, N - p * NR));
        };
        return std::pair(zeros, put);
    };
}
#endif
extern "C" int has_tiles() {
#ifdef TILES
    return tiles;
#else
    return 0;
#endif
}
