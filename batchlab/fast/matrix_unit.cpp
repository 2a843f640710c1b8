// Products on a matrix unit (AMX): a part of packed.cpp. Made from the cells of nbs/4_fast/28_matrix_unit.ipynb by .ci/cpp: edit
// the notebook.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
static const bool tiles = !syscall(SYS_arch_prctl, 0x1023, 18);  // Linux gives the registers of the unit to a process that asks
constexpr int TR = 16;                                           // rows of a tile
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
        for (int t = 0; t < 8; t++) set(t, of[t], t == 4 || t == 5 ? wide : 64);
    }
    void set(int t, int n, int wide) {
        if (n) rows[t] = n, bytes[t] = wide;
    }
    void use() const {
        asm volatile("" : : "r"(this) : "memory");  // it is read where the compiler does not see it
        _tile_loadconfig(this);
    }
};
#endif

#ifdef TILES
#define ADD_TILES(sums, rows, weights)     \
    if constexpr (sizeof(T) == 1)          \
        _tile_dpbusd(sums, rows, weights); \
    else                                   \
        _tile_dpbf16ps(sums, rows, weights)
// In sums, up to 32 rows a times a panel b, added to the row `start`: how many numbers of each row fill tiles. meanwhile(k) is
// called as often as there are tiles in a row.
template <bool TWO, class T, class B, class F>
static i64 tile_sums(const T* a, const B* b, const Sum<T>* start, i64 K, Sum<T> (*sums)[NR], F meanwhile) {
    _tile_loadd(0, start, 0);
    _tile_loadd(1, start + TR, 0);
    if (TWO) {
        _tile_loadd(2, start, 0);
        _tile_loadd(3, start + TR, 0);
    }
    i64 k = 0;
    for (; k + TK<T> <= K; k += TK<T>) {
        _tile_loadd(4, a + k, sizeof(T) * K);
        if (TWO) _tile_loadd(5, a + TR * K + k, sizeof(T) * K);
        _tile_loadd(6, b + k * NR, 4 * NR);
        ADD_TILES(0, 4, 6);
        if (TWO) {
            ADD_TILES(2, 5, 6);
        }
        _tile_loadd(7, (const char*)(b + k * NR) + 64, 4 * NR);
        ADD_TILES(1, 4, 7);
        if (TWO) {
            ADD_TILES(3, 5, 7);
        }
        meanwhile(k);
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
// Blocks first to last (excluded) of up to 32 rows x, times panels begin to end (excluded) of w. start(p): what the sums of panel
// p begin with. put(sums, m, r, p) takes those of m rows, of which r is the first. The first block calls ahead(p, k) after
// its product by the numbers from k on.
template <class T, class B, class S, class F, class A>
static void tile_panels(const T* x, const B* w, i64 M, i64 K, i64 first, i64 last, i64 begin, i64 end, S start, F put, A ahead) {
    alignas(64) Sum<T> sums[2][2 * TR][NR];
    const Blocks<2 * TR> blocks(M);
    const int each = 2 * TR / std::clamp<i64>(K / TK<T>, 1, 2 * TR) + 1;  // rows that are put in a step
    int shaped = 0, now = 0, done = 0, rows = 0;
    i64 row = 0, panel = 0;  // the block before: its sums are put while the next one is computed
    const auto put_some = [&](int most) {
        const int m = std::min(most, rows - done);
        if (m > 0) put(sums[!now] + done, m, row + done, panel), done += m;
    };
    for (i64 q = first; q < last; q++) {
        const i64 at = q * blocks.each;
        const int m = std::min(blocks.each, M - at);
        if (m != shaped) {
            TileShapes(shaped = m).use();
        }
        for (i64 p = begin; p < end; p++) {
            const T* a = x + at * K;
            const B* b = w + p * NR * K;
            const auto meanwhile = [&](i64 k) {
                if (q == first) ahead(p, k);
                put_some(each);
            };
            i64 k = (m > TR ? tile_sums<true, T, B, decltype(meanwhile)>
                            : tile_sums<false, T, B, decltype(meanwhile)>)(a, b, start(p), K, sums[now], meanwhile);
            for (; k < K; k += 4 / sizeof(T))  // what fills no tile
                for (int i = 0; i < m; i++) add_rest(a + i * K + k, b + k * NR, sums[now][i]);
            put_some(2 * TR);
            now = !now, done = 0, rows = m, row = at, panel = p;
        }
    }
    put_some(2 * TR);
}
#endif

#ifdef TILES
// Registers 0 to 3 hold sums of m rows, up to 16, and 4 times 16 columns; 4 and 6 what is multiplied; 5 and 7 the last 16 numbers
// of a row whose length is an odd multiple of 16
static void shape_block(int m, int rest) {
    TileShapes shapes(m);
    for (int t : {2, 3}) shapes.set(t, m, 64);
    shapes.set(5, rest ? m : 0, 2 * rest), shapes.set(7, rest / 2, 64);
    shapes.use();
}
#define EACH(DO)                   \
    {                              \
        DO(0)                      \
        if constexpr (N > 1) DO(1) \
        if constexpr (N > 2) DO(2) \
        if constexpr (N > 3) DO(3) \
    }
#define BEGIN(t)                                 \
    {                                            \
        if (more)                                \
            _tile_loadd(t, c + TR * t, 4 * ldc); \
        else                                     \
            _tile_zero(t);                       \
    }
#define ADD(t)                               \
    {                                        \
        _tile_loadd(6, w + 2 * TR * t, ldb); \
        meanwhile();                         \
        _tile_dpbf16ps(t, 4, 6);             \
    }
#define ADD_REST(t)                          \
    {                                        \
        _tile_loadd(7, w + 2 * TR * t, ldb); \
        _tile_dpbf16ps(t, 5, 7);             \
    }
#define END(t)                                \
    {                                         \
        _tile_stored(t, c + TR * t, 4 * ldc); \
    }
// c = (with `more`, c +=) rows a of K numbers, times K rows of 16 N numbers: b(k) is where the k-th and the next are, in pairs;
// the next pair of rows is ldb bytes behind. meanwhile() is called for each whole kilobyte of them.
template <int N, class B, class F>
static inline void tile_block(const bf16* a, i64 lda, i64 K, B b, i64 ldb, float* c, i64 ldc, bool more, F meanwhile) {
    asm volatile("" : : : "memory");  // tiles are loaded where the compiler does not see it
    EACH(BEGIN)
    i64 k = 0;
    for (; k + 32 <= K; k += 32) {
        const bf16* w = b(k);
        _tile_loadd(4, a + k, 2 * lda);
        EACH(ADD)
    }
    if (k < K) {
        const bf16* w = b(k);
        _tile_loadd(5, a + k, 2 * lda);
        EACH(ADD_REST)
    }
    EACH(END)
    asm volatile("" : : : "memory");
}
#endif

#ifdef TILES
template <class B>
static auto fetching(const B* w, i64 K) {  // what comes 4 KB behind number k of panel p
    return [=](i64 p, i64 k) { fetch_ahead(w + (p * K + k) * NR, 2 * TR * 64); };
}
namespace shared {
template <class T, class B, class S, class F>
static void tile_product(const T* x, const B* w, i64 M, i64 N, i64 K, S start, F put) {
    if (!M) return;
    const i64 panels = (N + NR - 1) / NR, blocks = Blocks<2 * TR>(M).n, threads = omp_get_num_threads();
    const i64 kept = threads * std::max<i64>(1, (1 << 20) / (NR * K * sizeof(B)));
    const i64 groups = std::min(panels, (panels + kept - 1) / kept * threads);
    const i64 parts = std::clamp<i64>(4 * threads / groups, 1, blocks);
#pragma omp for
    for (i64 u = 0; u < groups * parts; u++) {
        const i64 g = u / parts, i = u % parts;
        const i64 begin = panels * g / groups, end = panels * (g + 1) / groups;
        tile_panels(x, w, M, K, blocks * i / parts, blocks * (i + 1) / parts, begin, end, start, put, fetching(w, K));
    }
    _tile_release();
}
}  // namespace shared
static const float* no_sums(i64) {
    static const float zeros[NR] = {};
    return zeros;
}
static auto storing(const bf16* bias, bf16* out, i64 N) {
    return [=](const float (*sums)[NR], int m, i64 r, i64 p) {
        store_sums(sums, bias ? bias + p * NR : bias, out + r * N + p * NR, N, m, std::min<i64>(NR, N - p * NR));
    };
}
#endif
static inline void release_tiles() {
#ifdef TILES
    if (tiles) _tile_release();
#endif
}
extern "C" int has_tiles() {
#ifdef TILES
    return tiles;
#else
    return 0;
#endif
}
