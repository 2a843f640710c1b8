// The kernels: products and attention over blocks, in fp32 and bf16. Made from the cells of
// nbs/20_kernels.ipynb by .ci/cpp: edit the notebook.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>
#include <omp.h>
#if defined(__AVX512F__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif
#ifdef __AVX512F__
constexpr int W = 16, RB = 6;  // floats in a vector; rows of queries computed together
#else
constexpr int W = 8, RB = 2;
#endif
typedef float vf __attribute__((vector_size(4 * W)));
typedef float vfu __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef uint16_t vhu __attribute__((vector_size(2 * W), aligned(2)));
typedef int64_t i64;
struct bf16 {
    uint16_t x;
};

static inline vf all(float f) { return f - vf{}; }
static inline vf load(const float* p) { return *(const vfu*)p; }
static inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(*(const vhu*)p, vu) << 16); }
static inline vu nearest(vf v) {  // its bf16, in the lower half
    vu u = (vu)v, r = (u + 0x7fff + ((u >> 16) & 1)) >> 16, nan = (vu)(v != v);
    return (r & ~nan) | (0x7fc0 & nan);
}
static inline void store(float* p, vf v) { *(vfu*)p = v; }
static inline void store(bf16* p, vf v) { *(vhu*)p = __builtin_convertvector(nearest(v), vh); }
[[maybe_unused]] static inline vf as(const float*, vf v) { return v; }
[[maybe_unused]] static inline vf as(const bf16*, vf v) { return (vf)(nearest(v) << 16); }

template <class T>
static inline vf part(const T* p, int m) {
    T t[W] = {};
    return m == W ? load(p) : (memcpy(t, p, m * sizeof(T)), load(t));
}
template <class T>
static inline void part_store(T* p, vf v, int m) {
    T t[W];
    if (m == W)
        store(p, v);
    else
        store(t, v), memcpy(p, t, m * sizeof(T));
}
[[maybe_unused]] static inline float one(const float* p) { return *p; }
[[maybe_unused]] static inline float one(const bf16* p) {
    uint32_t u = (uint32_t)p->x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
// call(n) for an n from 1 to MOST, as a constant that the compiler can unroll a loop by
template <int MOST, class F>
static inline void by_count(int n, F call) {
    if constexpr (MOST > 1) {
        if (n < MOST) return by_count<MOST - 1>(n, call);
    }
    call(std::integral_constant<int, MOST>());
}

template <int S>
static inline vf partner(vf v) {  // v[i ^ S]
#ifdef __clang__
    vf y;
    for (int i = 0; i < W; i++) y[i] = v[i ^ S];
    return y;
#else
    vi at;
    for (int i = 0; i < W; i++) at[i] = i ^ S;
    return __builtin_shuffle(v, at);
#endif
}
template <int S>
static inline vf larger(vf v) {
    vf y = partner<S>(v);
    return v > y ? v : y;
}
static inline float sum(vf v) {
    if (W == 16) v += partner<W / 2>(v);
    v += partner<4>(v), v += partner<2>(v), v += partner<1>(v);
    return v[0];
}
static inline float most(vf v) {
    if (W == 16) v = larger<W / 2>(v);
    return larger<1>(larger<2>(larger<4>(v)))[0];
}
static inline void store_weights(float* p, vf v) { store(p, v); }
static inline void store_weights(bf16* p, vf v) {
#ifdef __AVX512BF16__
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &h, sizeof h);
#else
    store(p, v);
#endif
}
#define EXPORT(name)                 \
    extern "C" {                     \
    auto* name##_fp32 = name<float>; \
    auto* name##_bf16 = name<bf16>;  \
    }
extern "C" void set_threads(int n) { omp_set_num_threads(n); }

static inline vf vexp(vf x) {                                                                  // x up to 88
    const vf y = x < -150.f ? all(-150.f) : x, n = y * 1.44269502f + 12582912.f - 12582912.f;  // 1.5 * 2^23: n is whole
    const vf f = y * 1.44269502f - n + y * 1.92596299e-8f;
    vf p = all(1.53533620e-4f);
    p = p * f + 1.33988750e-3f, p = p * f + 9.61843692e-3f, p = p * f + 5.55033237e-2f;
    p = p * f + 2.40226477e-1f, p = p * f + 6.93147182e-1f, p = p * f + 1.f;
#ifdef __AVX512F__
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return x < -87.f ? all(0.f) : p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
#endif
}
// The same where the result becomes a T
[[maybe_unused]] static inline vf vexp_as(const float*, vf x) { return vexp(x); }
[[maybe_unused]] static inline vf vexp_as(const bf16*, vf x) {
#ifdef __AVX512DQ__
    const vf y = x * 1.44269502f, f = (vf)_mm512_reduce_ps((__m512)y, 1);  // y less the whole number below it
    vf p = f * 1.86707261e-03f + 9.01715088e-03f;
    p = p * f + 5.57998288e-02f, p = p * f + 2.40164472e-01f, p = p * f + 6.93151310e-01f, p = p * f + 1.f;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)y);
#else
    return vexp(x);
#endif
}
static inline vf vtanh(vf x) {
    const vf e = vexp(x < 0.f ? 2.f * x : -2.f * x), t = (1.f - e) / (1.f + e);
    return x < 0.f ? -t : t;
}

constexpr int NR = 32, NV = NR / W, MR = W == 16 ? 12 : 3, AHEAD = 8;  // AHEAD: so many blocks of rows fetch the next panel
// s[M][V * W] += a[M][2] b[2][V * W]. A row of a lies lda behind the one before. In bf16 the two numbers of a row lie together,
// and the rows of b in pairs; in fp32 the second one lies lda2 behind the first, and the rows of b lie ld apart.
template <int M, int V>
static inline void multiply(const float* a, i64 lda, const float* b, i64 ld, vf (&s)[M][V], i64 lda2 = 1) {
    for (int k = 0; k < 2; k++) {
        vf x[V];
        for (int j = 0; j < V; j++) x[j] = load(b + k * ld + j * W);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < V; j++) s[i][j] += a[i * lda + k * lda2] * x[j];
    }
}
template <int M, int V>
static inline void multiply(const bf16* a, i64 lda, const bf16* b, i64, vf (&s)[M][V], i64 = 0) {
#ifdef __AVX512BF16__
    __m512bh x[V];
    for (int j = 0; j < V; j++) x[j] = (__m512bh)_mm512_loadu_si512(b + j * 2 * W);
    for (int i = 0; i < M; i++) {
        int32_t pair;
        memcpy(&pair, a + i * lda, 4);
        for (int j = 0; j < V; j++) s[i][j] = (vf)_mm512_dpbf16_ps((__m512)s[i][j], (__m512bh)_mm512_set1_epi32(pair), x[j]);
    }
#else
    vf even[V], odd[V];
    for (int j = 0; j < V; j++) {
        vu u;
        memcpy(&u, b + j * 2 * W, sizeof u);
        even[j] = (vf)(u << 16), odd[j] = (vf)(u & 0xffff0000);
    }
    for (int i = 0; i < M; i++) {
        const float p = one(a + i * lda), q = one(a + i * lda + 1);
        for (int j = 0; j < V; j++) s[i][j] += p * even[j], s[i][j] += q * odd[j];
    }
#endif
}

// Rows are multiplied in blocks of up to MOST, all of nearly the same size
template <int MOST = MR>
struct Blocks {
    i64 n, each;
    Blocks(i64 rows) : n((rows + MOST - 1) / MOST), each(n ? (rows + n - 1) / n : 0) {}
};
typedef uint32_t v4 __attribute__((vector_size(16)));
template <int A, int B, int C, int D>
static inline v4 shuffled(v4 a, v4 b) {  // of the eight numbers of a and b these
    const auto at = [=](int i) { return i < 4 ? a[i] : b[i - 4]; };
    return v4{at(A), at(B), at(C), at(D)};
}
// 4 bytes of each of m rows, then the next 4 of each, behind them or ld times 4 bytes behind the first: row(i) is where the i-th
// begins, n times 4 bytes long
template <class F>
static inline void pack_block(F row, uint32_t* to, int m, i64 n, i64 ld = 0) {
    if (!ld) ld = m;
    const int i = m / 4 * 4;
    const i64 whole = n / 4 * 4;
    for (i64 k = 0; k < whole; k += 4)
        for (int i = 0; i + 4 <= m; i += 4) {  // four by four, transposed
            v4 x[4];
            for (int j = 0; j < 4; j++) memcpy(&x[j], row(i + j) + k, 16);
            const v4 p = shuffled<0, 4, 1, 5>(x[0], x[1]), q = shuffled<2, 6, 3, 7>(x[0], x[1]);
            const v4 r = shuffled<0, 4, 1, 5>(x[2], x[3]), s = shuffled<2, 6, 3, 7>(x[2], x[3]);
            const v4 y[4] = {shuffled<0, 1, 4, 5>(p, r), shuffled<2, 3, 6, 7>(p, r), shuffled<0, 1, 4, 5>(q, s),
                             shuffled<2, 3, 6, 7>(q, s)};
            for (int j = 0; j < 4; j++) memcpy(to + (k + j) * ld + i, &y[j], 16);
        }
    for (int j = 0; j < m; j++)
        for (i64 k = j < i ? whole : 0; k < n; k++) to[k * ld + j] = row(j)[k];
}
template <class T>  // the q-th block of rows, of K numbers each
static inline void pack_some(const T* x, T* to, const Blocks<>& blocks, i64 q, i64 rows, i64 K) {
    const i64 r = q * blocks.each;
    const i64 m = std::min(blocks.each, rows - r);
    pack_block([=](int i) { return (const uint32_t*)(x + (r + i) * K); }, (uint32_t*)(to + r * K), m, K * sizeof(T) / 4);
}
namespace shared {
template <class T>  // all rows
static const T* pack(const T* x, T* to, i64 rows, i64 K) {
    if (rows < 2) return x;
    const Blocks blocks(rows);
#pragma omp for
    for (i64 q = 0; q < blocks.n; q++) pack_some(x, to, blocks, q, rows, K);
    return to;
}
}  // namespace shared

template <int M, class T, class O>
static void block(const T* a, const T* b, const T* bias, int K, O* c, i64 ldc, int n, const char* soon, int lines) {
    vf s[M][NV] = {};
    for (int k = 0, due = 0; k < K / 2; k++, a += 2 * M, b += 2 * NR) {
        for (due += lines; due >= K / 2; due -= K / 2, soon += 64) __builtin_prefetch(soon, 0, 2);
        multiply(a, 4 / sizeof(T), b, NR, s, M);
    }
    if (n == NR) {  // the compiler keeps the sums in registers only if nothing depends on n
        const auto put = [&](auto add) {
            for (int i = 0; i < M; i++)
                for (int j = 0; j < NV; j++) store(c + i * ldc + j * W, s[i][j] + add(j));
        };
        return bias ? put([=](int j) { return load(bias + j * W); }) : put([](int) { return vf{}; });
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < NV; j++) {
            const int m = std::clamp(n - j * W, 0, W);
            if (m) part_store(c + i * ldc + j * W, bias ? s[i][j] + part(bias + j * W, m) : s[i][j], m);
        }
}
// For blocks first to last (excluded) of `rows` packed rows, of which row `from` is the first, and a panel b, the p-th:
// call(rows of a block, its first row, panel, its weights, where its part of the next panel begins, lines of 64 bytes in that)
template <class T, class F>
static inline void one_panel(const T* b, i64 p, i64 from, i64 rows, i64 first, i64 last, i64 K, F call) {
    const Blocks blocks(rows);
    const int fetching = rows > 4 ? std::min<i64>(last - first, AHEAD) : 0, total = NR * K * sizeof(T) / 64;
    const int share = fetching ? (total + fetching - 1) / fetching : 0;
    for (i64 q = first; q < last; q++) {
        const i64 at = q * blocks.each;
        const char* soon = (const char*)(b + NR * K) + (q - first) * share * 64;
        by_count<MR>(std::min(blocks.each, rows - at),
                     [&](auto m) { call(m, from + at, p, b, soon, q - first < fetching ? share : 0); });
    }
}
// For all rows and panels, shared out to the threads
template <class T, class F>
static void for_panels(const T* w, i64 M, i64 N, i64 K, F call) {
    const i64 panels = (N + NR - 1) / NR, threads = omp_get_num_threads(), blocks = Blocks(M).n;
    const i64 parts = std::clamp<i64>(4 * threads / panels, 1, blocks / 4 + 1);
#pragma omp for
    for (i64 u = 0; u < panels * parts; u++) {
        const i64 p = u / parts, i = u % parts;
        one_panel(w + p * NR * K, p, 0, M, blocks * i / parts, blocks * (i + 1) / parts, K, call);
    }
}
// What is to be done for a block. Panels of several weights, each with N outputs, may lie one behind the other.
template <class T, class O>
static auto multiplying(const T* x, const T* bias, O* out, i64 N, i64 K) {
    return [=](auto m, i64 r, i64 p, const T* b, const char* soon, int lines) {
        const i64 c = p * NR, at = c % N;
        const int n = std::min<i64>(NR, N - at);
        block<m>(x + r * K, b, bias ? bias + c : bias, K, out + r * N + at, N, n, soon, lines);
    };
}

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
namespace shared {
template <class T>  // packed: room for the rows
static void product(const T* x, const T* w, const T* bias, T* out, i64 M, i64 N, i64 K, T* packed) {
#ifdef TILES
    if constexpr (std::is_same_v<T, bf16>)
        if (tiles) return tile_product(x, w, bias, out, M, N, K);
#endif
    for_panels(w, M, N, K, multiplying(pack(x, packed, M, K), bias, out, N, K));
}
}  // namespace shared
namespace alone {
template <class T>  // by the thread that calls it
static void product(const T* x, const T* w, const T* bias, T* out, i64 M, i64 N, i64 K, T* packed) {
#ifdef TILES
    if constexpr (std::is_same_v<T, bf16>)
        if (tiles) return tile_product(x, w, bias, out, M, N, K);
#endif
    const Blocks blocks(M);
    for (i64 q = 0; q < blocks.n; q++) pack_some(x, packed, blocks, q, M, K);
    for (i64 p = 0; p * NR < N; p++)
        one_panel(w + p * NR * K, p, 0, M, 0, blocks.n, K, multiplying((const T*)packed, bias, out, N, K));
}
}  // namespace alone
template <class T>
static void product(const T* x, const T* w, const T* bias, T* out, i64 M, i64 N, i64 K) {
    std::vector<T> packed(M > 1 ? M * K : 0);
#pragma omp parallel if (M * N * K > 100000)
    shared::product(x, w, bias, out, M, N, K, packed.data());
}
EXPORT(product)

constexpr int COLUMNS = 64, CV = 4, TILE = CV * W, STEP = 128, ROWS = 64, DIM = 256;
// What will be read next, fetched into the second cache bit by bit: up to so many stretches of memory
struct Prefetch {
    const char *from[2 * STEP / COLUMNS], *end[2 * STEP / COLUMNS];
    int n = 0, at = 0;
    void add(const void* p, i64 bytes) { from[n] = (const char*)p, end[n++] = (const char*)p + bytes; }
    inline void some() {
        if (at == n) return;
        const char*& p = from[at];
        for (int i = 0; i < 4; i++) __builtin_prefetch(p + 64 * i, 0, 2);
        if ((p += 256) >= end[at]) at++;
    }
    void rest() {
        while (at < n) some();
    }
};
// s[N][n] = scale q[N][D] k[n / 64][D][64], n up to STEP, each 64 columns where k says; computed up to the next multiple of W
template <int N, class T>
static void scores(const T* q, int D, const T* const* k, int n, float scale, float* s, Prefetch& ahead) {
    for (int c = 0; c < n; c += TILE) {
        const T* tile = k[c / COLUMNS] + c % COLUMNS * (4 / sizeof(T));
        by_count<CV>((n - c + W - 1) / W, [&](auto vectors) {
            vf a[N][vectors] = {};
            for (int d = 0; d < D; d += 2) {
                ahead.some();
                multiply(q + d, D, tile + d * COLUMNS, COLUMNS, a);
            }
            for (int i = 0; i < N; i++)
                for (int j = 0; j < vectors; j++) store(s + i * STEP + c + j * W, a[i][j] * scale);
        });
    }
}

// o[N][M * W] += p[N][n] v[n / 64][64][M * W], n even, `at` numbers into each tile
template <int N, int M, class T>
static void weigh(const T* p, const T* const* v, int at, int n, float* o, int D, Prefetch& ahead) {
    vf a[N][M];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++) a[i][j] = load(o + i * D + j * W);
    for (int tile = 0; tile < n; tile += COLUMNS) {
        const T* w = v[tile / COLUMNS] + at;
        for (int c = 0; c < std::min(COLUMNS, n - tile); c += 2) {
            ahead.some();
            multiply(p + tile + c, STEP * 4 / sizeof(T), w + c * D, D, a);
        }
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++) store(o + i * D + j * W, a[i][j]);
}
template <int N, class T>
static void weigh_all(const T* p, const T* const* v, int n, float* o, int D, Prefetch& ahead) {
    constexpr int E = 4 / sizeof(T);
    int d = 0;
    for (; d + 4 * W <= D; d += 4 * W) weigh<N, 4>(p, v, d * E, n, o + d, D, ahead);
    for (; d + 2 * W <= D; d += 2 * W) weigh<N, 2>(p, v, d * E, n, o + d, D, ahead);
    for (; d < D; d += W) weigh<N, 1>(p, v, d * E, n, o + d, D, ahead);
}
template <class T>
static void last_pair(const T* v, int D, T* pair) {
    const int each = 4 / sizeof(T);
    memset(pair, 0, 2 * D * sizeof(T));
    for (int d = 0; d < D; d++) pair[d * each] = v[d * each];
}

// x[0:lo] and x[hi:n] are out of sight; p, in the place of x, gets the weights; returns by how much all before this step fades
template <class T>
static inline float soften(float* x, T* p, int lo, int hi, int n, float cap, float& m, float& l) {
    const int full = (n + W - 1) / W * W;
    if (cap)
        for (int i = 0; i < full; i += W) store(x + i, cap * vtanh(load(x + i) * (1 / cap)));
    for (int i = 0; i < lo; i++) x[i] = -INFINITY;
    for (int i = hi; i < full; i++) x[i] = -INFINITY;
    if (hi <= lo) {
        for (int i = 0; i < full; i += W) store(p + i, vf{});
        return 1;
    }
    vf top = all(m);
    for (int i = 0; i < full; i += W) {
        vf y = load(x + i);
        top = top > y ? top : y;
    }
    const float now = most(top),
                fade = m == now || m == -INFINITY ? 1 : vexp(all(m - now))[0];  // in the first step nothing fades
    vf t = {};
    for (int i = 0; i < full; i += W) {
        vf e = vexp_as(p, load(x + i) - now);
        store_weights(p + i, e);
        t += e;
    }
    l = l * fade + sum(t), m = now;
    return fade;
}

struct Shape {
    i64 heads, kv_heads, dim, dim_v, q_token, q_head, k_block, k_head, v_block, v_head, block_size, window;
    float scale, softcap;  // softcap: 0 for none
    const float* sinks;    // one for each head, or null
};
template <class T>
struct Unit {  // rows of queries, and what they have gathered; a row sees columns begin to end (excluded)
    T q[ROWS * DIM];
    float s[RB * STEP], o[ROWS * DIM], m[ROWS], l[ROWS];
    i64 begin[ROWS], end[ROWS];
};
template <class T>
struct Stretch {  // columns of one KV head that a block table leads to
    const T *K, *V;
    const i64* table;
    i64 from, to;
};
template <class T>
struct Tiles {  // those of a step: up to 128 columns
    const T *k[STEP / COLUMNS], *v[STEP / COLUMNS];
    int n = 0;
    // Of the columns from c on, up to a multiple of 128 or the end
    Tiles(const Shape& z, const Stretch<T>& x, i64 c) {
        if (c >= x.to) return;
        n = std::min(x.to, c / STEP * STEP + STEP) - c;
        const i64* block = x.table + c / z.block_size;
        i64 offset = c % z.block_size;
        for (int i = 0; i * COLUMNS < n; i++) {
            k[i] = x.K + *block * z.k_block + offset * z.dim, v[i] = x.V + *block * z.v_block + offset * z.dim_v;
            if ((offset += COLUMNS) == z.block_size) offset = 0, block++;
        }
    }
    Prefetch prefetch(const Shape& z) const {
        Prefetch a;
        for (int i = 0; i * COLUMNS < n; i++) a.add(k[i], COLUMNS * z.dim * sizeof(T));
        for (int i = 0; i * COLUMNS < n; i++) a.add(v[i], std::min(COLUMNS, n - i * COLUMNS) * z.dim_v * sizeof(T));
        return a;
    }
};
// Rows first to last (excluded) go through x; `next` is what the thread goes through then
template <class T>
static void walk(const Shape& z, Unit<T>& u, int first, int last, const Stretch<T>& x, const Stretch<T>& next) {
    const int D = z.dim, DV = z.dim_v;
    T pair[2 * DIM];
    const T* odd = pair;
    Tiles<T> now(z, x, x.from);
    for (i64 c = x.from; c < x.to;) {
        const int cols = now.n, even = cols / 2 * 2;
        const Tiles<T> soon = c + cols < x.to ? Tiles<T>(z, x, c + cols) : Tiles<T>(z, next, next.from);
        Prefetch ahead = soon.prefetch(z);
        if (even < cols) last_pair(now.v[even / COLUMNS] + even % COLUMNS * DV, DV, pair);
        for (int r = first; r < last; r += RB)
            by_count<RB>(last - r, [&](auto n) {
                const T* p = (const T*)u.s;
                scores<n>(u.q + r * D, D, now.k, cols, z.scale, u.s, ahead);
                for (int i = 0; i < n; i++) {
                    const int lo = std::clamp<i64>(u.begin[r + i] - c, 0, cols), hi = std::clamp<i64>(u.end[r + i] - c, 0, cols);
                    float* o = u.o + (r + i) * DV;
                    const float fade =
                        soften(u.s + i * STEP, (T*)(u.s + i * STEP), lo, hi, cols, z.softcap, u.m[r + i], u.l[r + i]);
                    if (fade != 1)
                        for (int d = 0; d < DV; d += W) store(o + d, load(o + d) * fade);
                }
                weigh_all<n>(p, now.v, even, u.o + r * DV, DV, ahead);
                if (even < cols) weigh_all<n>(p + even, &odd, 2, u.o + r * DV, DV, ahead);
            });
        ahead.rest();
        c += cols, now = soon;
    }
}

// What attention goes through: units, each for all KV heads; of a unit first what its query rows share, then each one's own
template <class T>
struct Route {
    const Shape& z;
    const T *K, *V;
    const i64 *blocks, *members, *units;
    i64 n;
    bool shares(const i64* unit) const { return unit[3] && !z.window; }
    Stretch<T> stretch(i64 h, i64 table, i64 from, i64 to) const {
        return {K + h * z.k_head, V + h * z.v_head, blocks + table, from, to};
    }
    Stretch<T> own(const i64* unit, i64 i, i64 h) const {  // of query row i
        const i64* a = members + 4 * i;
        const i64 from = z.window ? std::max<i64>(0, a[3] + 1 - z.window) / COLUMNS * COLUMNS : unit[3];
        return stretch(h, a[2], from, a[3] + a[1]);
    }
    Stretch<T> first(i64 u) const {
        if (u >= n * z.kv_heads) return {};
        const i64 *unit = units + u / z.kv_heads * 4, h = u % z.kv_heads;
        return shares(unit) ? stretch(h, unit[2], 0, unit[3]) : own(unit, unit[0], h);
    }
};
template <class T>
static void one_unit(const Route<T>& all, const T* q, T* out, i64 number, const Stretch<T>& then) {
    const Shape& z = all.z;
    const i64 *members = all.members, *unit = all.units + number / z.kv_heads * 4, h = number % z.kv_heads;
    const int G = z.heads / z.kv_heads, D = z.dim, DV = z.dim_v;
    Unit<T> u;
    int R = 0;
    for (i64 i = unit[0]; i < unit[1]; i++)
        for (i64 j = 0; j < members[4 * i + 1] * G; j++, R++) {
            const i64 *a = members + 4 * i, head = h * G + j % G;
            memcpy(u.q + R * D, q + (a[0] + j / G) * z.q_token + head * z.q_head, D * sizeof(T));
            memset(u.o + R * DV, 0, DV * sizeof(float));
            u.m[R] = z.sinks ? z.sinks[head] : -INFINITY, u.l[R] = z.sinks ? 1 : 0;
            u.end[R] = a[3] + j / G + 1, u.begin[R] = z.window ? u.end[R] - z.window : 0;
        }
    if (all.shares(unit)) walk(z, u, 0, R, all.first(number), all.own(unit, unit[0], h));
    R = 0;
    for (i64 i = unit[0]; i < unit[1]; i++) {
        const i64 *a = members + 4 * i, n = a[1] * G;
        walk(z, u, R, R + n, all.own(unit, i, h), i + 1 < unit[1] ? all.own(unit, i + 1, h) : then);
        for (int j = 0; j < n; j++) {
            T* row = out + ((a[0] + j / G) * z.heads + h * G + j % G) * DV;
            for (int d = 0; d < DV; d += W) store(row + d, load(u.o + (R + j) * DV + d) / u.l[R + j]);
        }
        R += n;
    }
}
namespace shared {
template <class T>
static void attend(const Shape& z, const T* q, const T* K, const T* V, T* out, const i64* blocks, const i64* members,
                   const i64* units, i64 n) {
    const Route<T> all{z, K, V, blocks, members, units, n};
    const i64 threads = omp_get_num_threads(), total = n * z.kv_heads;
    const i64 each = std::max<i64>(1, total / (16 * threads)), chunks = (total + each - 1) / each;
#pragma omp for schedule(dynamic)
    for (i64 c = 0; c < chunks; c++) {
        const i64 end = std::min(total, c * each + each);
        for (i64 u = c * each; u < end; u++) one_unit(all, q, out, u, all.first(u + 1 < end ? u + 1 : (c + threads) * each));
    }
}
}  // namespace shared
template <class T>
static void attend(const Shape& z, const T* q, const T* K, const T* V, T* out, const i64* blocks, const i64* members,
                   const i64* units, i64 n) {
#pragma omp parallel
    shared::attend(z, q, K, V, out, blocks, members, units, n);
}
EXPORT(attend)

// Keys and values `from` to `to` (excluded) of a head, in tiles: k and v point to those of the row's first token
template <class T>
static void lay_out(const Shape& z, const T* k, const T* v, i64 k_token, i64 v_token, T* K, T* V, i64 from, i64 to) {
    constexpr i64 E = 4 / sizeof(T);
    for (i64 c = from; c < to; c += COLUMNS)
        pack_block([=](i64 i) { return (const uint32_t*)(k + (c + i) * k_token); }, (uint32_t*)(K + c * z.dim),
                   std::min(to - c, (i64)COLUMNS), z.dim / E, COLUMNS);
    for (i64 c = from; c < to; c++) {
        if (E == 1)
            memcpy(V + c * z.dim_v, v + c * v_token, z.dim_v * sizeof(T));
        else
            for (i64 d = 0; d < z.dim_v; d++) V[c / E * E * z.dim_v + d * E + c % E] = v[c * v_token + d];
    }
}
// Queries `first` to `last` (excluded) of a row of n tokens, in pieces; K and V: its tiles
template <class T>
static void one_whole(const Shape& z, const T* q, T* out, i64 n, i64 first, i64 last, i64 h, const Stretch<T>& all) {
    const i64 G = z.heads / z.kv_heads, D = z.dim, DV = z.dim_v, each = std::max<i64>(1, 48 / G);
    Unit<T> u;
    for (i64 a = first; a < last; a += each) {
        const i64 b = std::min(last, a + each), R = (b - a) * G;
        for (i64 r = 0; r < R; r++) {
            const i64 at = a + r / G, head = h * G + r % G;
            memcpy(u.q + r * D, q + at * z.q_token + head * z.q_head, D * sizeof(T));
            u.m[r] = z.sinks ? z.sinks[head] : -INFINITY, u.l[r] = z.sinks ? 1 : 0;
            u.begin[r] = z.window ? std::max<i64>(0, at + 1 - z.window) : 0, u.end[r] = z.window ? std::min(n, at + z.window) : n;
        }
        memset(u.o, 0, R * DV * sizeof(float));
        walk(z, u, 0, R, {all.K, all.V, all.table, u.begin[0] / COLUMNS * COLUMNS, u.end[R - 1]}, {});
        for (i64 r = 0; r < R; r++) {
            T* row = out + ((a + r / G) * z.heads + h * G + r % G) * DV;
            for (i64 d = 0; d < DV; d += W) store(row + d, load(u.o + r * DV + d) / u.l[r]);
        }
    }
}
namespace shared {
template <class T>
static void attend_whole(const Shape& shape, const T* q, const T* k, const T* v, i64 k_token, i64 k_head, i64 v_token, i64 v_head,
                         T* out, const i64* units, i64 n) {
    i64 tiles = 0;
    for (i64 i = 0; i < n; i++) tiles = std::max(tiles, (units[4 * i + 1] - units[4 * i] + COLUMNS - 1) / COLUMNS);
    Shape z = shape;
    z.block_size = COLUMNS, z.k_block = COLUMNS * z.dim, z.v_block = COLUMNS * z.dim_v;
    const std::unique_ptr<T[]> K(new T[tiles * z.k_block]), V(new T[tiles * z.v_block]);
    std::vector<i64> table(tiles);
    for (i64 i = 0; i < tiles; i++) table[i] = i;
#pragma omp for schedule(dynamic)
    for (i64 i = 0; i < n * z.kv_heads; i++) {
        const i64 *unit = units + i / z.kv_heads * 4, h = i % z.kv_heads, t = unit[0], size = unit[1] - t, first = unit[2] - t;
        const i64 last = unit[3] - t, from = z.window ? std::max<i64>(0, first + 1 - z.window) / COLUMNS * COLUMNS : 0;
        lay_out(z, k + t * k_token + h * k_head, v + t * v_token + h * v_head, k_token, v_token, K.get(), V.get(), from,
                z.window ? std::min(size, last - 1 + z.window) : size);
        one_whole(z, q + t * z.q_token, out + t * z.heads * z.dim_v, size, first, last, h,
                  {K.get(), V.get(), table.data(), 0, 0});
    }
}
}  // namespace shared
template <class T>
static void attend_whole(const Shape& z, const T* q, const T* k, const T* v, i64 k_token, i64 k_head, i64 v_token, i64 v_head,
                         T* out, const i64* units, i64 n) {
#pragma omp parallel
    shared::attend_whole(z, q, k, v, k_token, k_head, v_token, v_head, out, units, n);
}
EXPORT(attend_whole)

template <class T>
static inline void write_key(const Shape& z, const T* key, T* K, i64 head, i64 place) {
    constexpr int E = 4 / sizeof(T);  // numbers side by side: 2 in bf16
    const i64 c = place % z.block_size;
    T* to = K + place / z.block_size * z.k_block + head * z.k_head + c / COLUMNS * COLUMNS * z.dim + c % COLUMNS * E;
    for (i64 d = 0; d < z.dim; d++) to[d / E * COLUMNS * E + d % E] = key[d];
}
template <class T>
static inline void write_value(const Shape& z, const T* value, T* V, i64 head, i64 place) {
    constexpr int E = 4 / sizeof(T);
    const i64 c = place % z.block_size;
    T* to = V + place / z.block_size * z.v_block + head * z.v_head + c / E * E * z.dim_v + c % E;
    for (i64 d = 0; d < z.dim_v; d++) to[d * E] = value[d];
}
template <class T>
static void write(const Shape& z, const T* k, const T* v, i64 k_token, i64 k_head, i64 v_token, i64 v_head, T* K, T* V,
                  const i64* places, i64 n) {
#pragma omp parallel for if (n > 8)
    for (i64 t = 0; t < n; t++)
        for (i64 h = 0; h < z.kv_heads; h++) {
            write_key(z, k + t * k_token + h * k_head, K, h, places[t]);
            write_value(z, v + t * v_token + h * v_head, V, h, places[t]);
        }
}
EXPORT(write)

template <int S>
static inline vf hadamard_within(vf v) {
    vf sign;
    for (int i = 0; i < W; i++) sign[i] = i & S ? -1.f : 1.f;
    return partner<S>(v) + sign * v;  // a product with 1 or -1 is exact, fused or not
}
template <int B>
static inline void hadamard(vf* v) {  // B numbers
    for (int i = 0; i < B / W; i++) {
        v[i] = hadamard_within<4>(hadamard_within<2>(hadamard_within<1>(v[i])));
        if (W == 16) v[i] = hadamard_within<W / 2>(v[i]);
    }
    for (int s = 1; s < B / W; s *= 2)
        for (int i = 0; i < B / W; i++)
            if (!(i & s)) {
                vf a = v[i], b = v[i + s];
                v[i] = a + b, v[i + s] = a - b;
            }
}

template <int B, class T>
static float hadamard_row(const T* x, float* y, i64 K) {  // y; its largest magnitude, or NaN
    constexpr int V = B > W ? B / W : 1;
    vf m = all(1e-30f), odd = {};  // 0 / 0 is no byte
    for (i64 i = 0; i < K; i += V * W) {
        vf v[V];
        for (int j = 0; j < V; j++) v[j] = part(x + i + j * W, std::min<i64>(W, K - i - j * W));
        if (B > 1) hadamard<B>(v);
        for (int j = 0; j < V; j++) {
            vf a = v[j] < 0.f ? -v[j] : v[j];
            m = m > a ? m : a, odd += v[j] - v[j];  // NaN, for a NaN or an infinity
            store(y + i + j * W, v[j]);
        }
    }
    return most(m) + sum(odd);
}
template <class T>
static float quantize_row(const T* x, uint8_t* bytes, float* y, i64 K, i64 B, i64 top) {  // its step; y: room for K + W numbers
    typedef uint8_t vb __attribute__((vector_size(W)));
    const float largest = B == 64   ? hadamard_row<64>(x, y, K)
                          : B == 32 ? hadamard_row<32>(x, y, K)
                          : B == 16 ? hadamard_row<16>(x, y, K)
                                    : hadamard_row<1>(x, y, K);
    const float f = top / largest, t = top, shift = 12582913.f + top;  // 1.5 * 2^23 + top + 1
    for (i64 i = 0; i < K; i += W) {
        vf v = load(y + i) * f;
        v = v > t ? all(t) : v < -t ? all(-t) : v;
        vb b = __builtin_convertvector((vu)(v + shift) & 255, vb);
        memcpy(bytes + i, &b, std::min<i64>(W, K - i));
    }
    return largest / top;
}
namespace shared {
template <class T>
static void quantize(const T* x, uint8_t* bytes, float* steps, i64 n, i64 K, i64 B, i64 top) {
    std::vector<float> y(K + W);
#pragma omp for
    for (i64 r = 0; r < n; r++) steps[r] = quantize_row(x + r * K, bytes + r * K, y.data(), K, B, top);
}
}  // namespace shared
template <class T>
static void quantize(const T* x, uint8_t* bytes, float* steps, i64 n, i64 K, i64 B, i64 top) {
#pragma omp parallel if (n > 8)
    shared::quantize(x, bytes, steps, n, K, B, top);
}
EXPORT(quantize)

template <class T>
static void dequantize(const float* sums, const float* steps, const float* scales, const float* bias, T* out, i64 n, i64 N) {
#pragma omp parallel for if (n > 1)
    for (i64 r = 0; r < n; r++)
        for (i64 i = 0; i < N; i += W) {
            const int p = std::min<i64>(W, N - i);
            vf v = part(sums + r * N + i, p) * part(scales + i, p) * steps[r];
            part_store(out + r * N + i, bias ? v + part(bias + i, p) : v, p);
        }
}
EXPORT(dequantize)

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define VNNI
static inline vi dot4(vi s, int32_t a, vi w) {
#ifdef __AVX512VNNI__
    return (vi)_mm512_dpbusd_epi32((__m512i)s, _mm512_set1_epi32(a), (__m512i)w);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)s, _mm256_set1_epi32(a), (__m256i)w);
#endif
}
#endif
template <int M>
static void bytes_block(const uint8_t* a, i64 K, const int8_t* b, [[maybe_unused]] const int32_t* start, int32_t* sums,
                        [[maybe_unused]] const char* soon, [[maybe_unused]] int lines) {
    const int steps = K / 4;
    vi s[M][NV] = {};
#ifdef VNNI
    for (int j = 0; j < NV; j++) {
        vi v;
        memcpy(&v, start + j * W, sizeof v);
        for (int i = 0; i < M; i++) s[i][j] = v;
    }
    for (int k = 0, due = 0; k < steps; k++) {
        for (due += lines; due >= steps; due -= steps, soon += 64) __builtin_prefetch(soon, 0, 2);
        vi x[NV];
        for (int j = 0; j < NV; j++) memcpy(&x[j], b + (k * NR + j * W) * 4, sizeof(vi));
        for (int i = 0; i < M; i++) {
            int32_t quad;
            memcpy(&quad, a + 4 * (k * M + i), 4);
            for (int j = 0; j < NV; j++) s[i][j] = dot4(s[i][j], quad, x[j]);
        }
    }
#else
    for (int from = 0; from < steps; from += 256) {  // 1,024 products: exact in fp32
        vf t[M][NV] = {};
        for (int k = from; k < std::min(steps, from + 256); k++)
            for (int j = 0; j < NV; j++) {
                vi w;
                memcpy(&w, b + (k * NR + j * W) * 4, sizeof w);
                for (int d = 0; d < 4; d++) {
                    vf f = __builtin_convertvector((vi)((vu)w << (24 - 8 * d)) >> 24, vf);
                    for (int i = 0; i < M; i++) t[i][j] += (float)(a[4 * (k * M + i) + d] - 128) * f;
                }
            }
        for (int i = 0; i < M; i++)
            for (int j = 0; j < NV; j++) s[i][j] += __builtin_convertvector(t[i][j], vi);
    }
#endif
    for (int i = 0; i < M; i++)
        for (int j = 0; j < NV; j++) memcpy(sums + i * NR + j * W, &s[i][j], sizeof(vi));
}

template <class T>
static auto multiplying(const uint8_t* bytes, const float* steps, const int32_t* start, const float* scales, const float* bias,
                        T* out, i64 N, i64 K) {
    return [=](auto m, i64 r, i64 p, const int8_t* b, const char* soon, int lines) {
        const i64 c = p * NR, at = c % N;
        const int n = std::min<i64>(NR, N - at);
        int32_t sums[m * NR];
        bytes_block<m>(bytes + r * K, K, b, start + c, sums, soon, lines);
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j += W) {
                const int some = std::min(W, n - j);
                vi v;
                memcpy(&v, sums + i * NR + j, sizeof v);
                vf f = __builtin_convertvector(v, vf) * part(scales + c + j, some) * steps[r + i];
                part_store(out + (r + i) * N + at + j, bias ? f + part(bias + c + j, some) : f, some);
            }
    };
}
namespace shared {
template <class T>
static void bytes_product(const uint8_t* bytes, const float* steps, const int8_t* w, const int32_t* start, const float* scales,
                          const float* bias, T* out, i64 M, i64 N, i64 K, uint8_t* packed) {
    for_panels(w, M, N, K, multiplying(pack(bytes, packed, M, K), steps, start, scales, bias, out, N, K));
}
}  // namespace shared
template <class T>
static void bytes_product(const T* x, const int8_t* w, const int32_t* start, const float* scales, const float* bias, T* out,
                          i64 M, i64 N, i64 K, i64 B) {
    std::vector<uint8_t> bytes(M * K), packed(M > 1 ? M * K : 0);
    std::vector<float> steps(M);
#pragma omp parallel if (M * N * K > 100000)
    {
        shared::quantize(x, bytes.data(), steps.data(), M, K, B, 127);
        shared::bytes_product(bytes.data(), steps.data(), w, start, scales, bias, out, M, N, K, packed.data());
    }
}
EXPORT(bytes_product)

// A panel of NR rows, n times 4 bytes long
template <class F>
static inline void fill_panel(F row, uint32_t* to, i64 n) {
    constexpr i64 SOME = 256;
    for (i64 k = 0; k < n; k += SOME) pack_block([=](int i) { return row(i) + k; }, to + k * NR, NR, std::min(SOME, n - k));
}
// rows: where each of N rows of K numbers lies. The last panel is filled up with zeros.
template <class T>
static void pack_weight(const i64* rows, T* to, i64 N, i64 K) {
    const i64 panels = (N + NR - 1) / NR, n = K * sizeof(T) / 4;
    const std::vector<uint32_t> zeros(n);
#pragma omp parallel for schedule(dynamic)
    for (i64 p = 0; p < panels; p++) {
        const auto row = [&](int i) { return p * NR + i < N ? (const uint32_t*)rows[p * NR + i] : zeros.data(); };
        fill_panel(row, (uint32_t*)(to + p * NR * K), n);
    }
}
EXPORT(pack_weight)
// As `quantize`, signed. start: what the sum of each output begins with; it has a number for each row of each panel, steps for
// each of N.
template <class T>
static void pack_bytes(const i64* rows, int8_t* to, int32_t* start, float* steps, i64 N, i64 K, i64 B, i64 top) {
    const i64 panels = (N + NR - 1) / NR;
#pragma omp parallel
    {
        std::vector<float> y(K + W);
        std::vector<uint8_t> bytes(NR * K);
#pragma omp for schedule(dynamic)
        for (i64 p = 0; p < panels; p++) {
            for (i64 i = 0; i < NR; i++) {
                uint8_t* x = bytes.data() + i * K;
                const i64 r = p * NR + i;
                if (r < N) steps[r] = quantize_row((const T*)rows[r], x, y.data(), K, B, top);
                int32_t total = 0;
                for (i64 k = 0; k < K; k++) {
                    x[k] = r < N ? x[k] - (uint8_t)(top + 1) : 0;
                    total += (int8_t)x[k];
                }
                start[r] = -128 * total;
            }
            fill_panel([&](int i) { return (const uint32_t*)(bytes.data() + i * K); }, (uint32_t*)(to + p * NR * K), K / 4);
        }
    }
}
EXPORT(pack_bytes)
