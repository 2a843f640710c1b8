// Products of a few rows with a weight, in fp32 and bf16. Made from the cells of nbs/4_fast/20_product.ipynb by .ci/cpp: edit the
// notebook.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>
#include <omp.h>
#if defined(__AVX512F__) || defined(__AVXVNNI__) || defined(__FMA__)
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
// a b + c. It is never left to the compiler whether a product and a sum are rounded once: a row's bits would depend on its block
static inline vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    vf s;
    for (int i = 0; i < W; i++) s[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return s;
#else
    return a * b + c;
#endif
}
static inline vf load(const float* p) { return *(const vfu*)p; }
static inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(*(const vhu*)p, vu) << 16); }
static inline vu nearest(vf v) {  // its bf16, in the lower half
#ifdef __AVX512BF16__
    return (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
#endif
    vu u = (vu)v, r = (u + 0x7fff + ((u >> 16) & 1)) >> 16, nan = (vu)(v != v);
    return (r & ~nan) | (0x7fc0 & nan);
}
static inline void store(float* p, vf v) { *(vfu*)p = v; }
static inline void store(bf16* p, vf v) {
#ifdef __AVX512BF16__
    *(vhu*)p = (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    *(vhu*)p = __builtin_convertvector(nearest(v), vh);
#endif
}
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
#define EXPORT(name)                 \
    extern "C" {                     \
    auto* name##_fp32 = name<float>; \
    auto* name##_bf16 = name<bf16>;  \
    }
extern "C" void set_threads(int n) { omp_set_num_threads(n); }

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
static inline vi first_numbers() {  // 0, 1, 2 …
    vi x;
    for (int i = 0; i < W; i++) x[i] = i;
    return x;
}
static inline vf taken(vf a, vf b, vi at) {  // of the numbers of a, and behind them b, those
#ifdef __AVX512F__
    return (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)at, (__m512)b);
#elif defined(__clang__)
    vf y;
    for (int i = 0; i < W; i++) y[i] = at[i] < W ? a[at[i]] : b[at[i] - W];
    return y;
#else
    return __builtin_shuffle(a, b, at);
#endif
}
// Number r becomes `op` of all numbers of v[r], for N up to W, in the order of `sum`
template <int N, class F>
static inline vf of_rows(const vf (&v)[N], F op) {
    vf x[N];
    for (int i = 0; i < N; i++) x[i] = v[i];
    const vi lane = first_numbers();
    vi row = {};
    for (int s = W / 2, n = N, bit = 1; s; s /= 2, n = (n + 1) / 2, bit *= 2) {
        row |= (lane & bit) == 0 ? vi{} : vi{} + s;
        const vi from = (lane & s) == 0 ? lane : lane + W, with = from ^ s;
        for (int k = 0; k < n; k += 2) {
            const vf a = x[k], b = x[k + 1 < n ? k + 1 : k];
            x[k / 2] = op(taken(a, b, from), taken(a, b, with));
        }
    }
    return taken(x[0], x[0], row);
}

// AHEAD: so many blocks of rows fetch the next panel; FEW: for so many rows weights are fetched 4 KB before they are read
constexpr int NR = 32, NV = NR / W, MR = W == 16 ? 12 : 3, AHEAD = 8, FEW = 4;
// In line, since a compiler may leave out the call of a function that does nothing else
__attribute__((always_inline)) static inline void fetch_ahead(const void* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + 4096 + i);
}
// s[M][V * W] += a[M][2] b[2][V * W]. A row of a lies lda behind the one before. In bf16 the two numbers of a row lie together,
// and the rows of b in pairs; in fp32 the second one lies lda2 behind the first, and the rows of b lie ld apart.
template <int M, int V>
static inline void multiply(const float* a, i64 lda, const float* b, i64 ld, vf (&s)[M][V], i64 lda2 = 1) {
    for (int k = 0; k < 2; k++) {
        vf x[V];
        for (int j = 0; j < V; j++) x[j] = load(b + k * ld + j * W);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < V; j++) s[i][j] = multiply_add(all(a[i * lda + k * lda2]), x[j], s[i][j]);
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
        const vf p = all(one(a + i * lda)), q = all(one(a + i * lda + 1));
        for (int j = 0; j < V; j++) s[i][j] = multiply_add(q, odd[j], multiply_add(p, even[j], s[i][j]));
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
#ifdef __AVX512F__
static inline void turn(__m512i* x) {  // number j of x[i], of 16, becomes number i of x[j]
#pragma GCC unroll 4
    for (int s = 1; s < W; s *= 2) {
        const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, other = lane ^ s;
        const __m512i low = (__m512i)((lane & s) == 0 ? lane : W + other), high = (__m512i)((lane & s) == 0 ? other : W + lane);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
            if (!(i & s)) {
                const __m512i a = x[i], b = x[i + s];
                x[i] = _mm512_permutex2var_epi32(a, low, b), x[i + s] = _mm512_permutex2var_epi32(a, high, b);
            }
    }
}
#endif
// 4 bytes of each of m rows, then the next 4 of each, behind them or ld times 4 bytes behind the first: row(i) is where the i-th
// begins, n times 4 bytes long
template <class F>
static inline void pack_block(F row, uint32_t* to, int m, i64 n, i64 ld = 0) {
    if (!ld) ld = m;
    int turned = 0;
#ifdef __AVX512F__
    if (n % W == 0)
        for (; turned + W <= m; turned += W)  // 16 by 16, transposed
            for (i64 k = 0; k < n; k += W) {
                __m512i x[W];
                for (int j = 0; j < W; j++) x[j] = _mm512_loadu_si512(row(turned + j) + k);
                turn(x);
                for (int j = 0; j < W; j++) _mm512_storeu_si512(to + (k + j) * ld + turned, x[j]);
            }
#endif
    const int i = m / 4 * 4;
    const i64 whole = n / 4 * 4;
    for (i64 k = 0; k < whole; k += 4)
        for (int i = turned; i + 4 <= m; i += 4) {  // four by four
            v4 x[4];
            for (int j = 0; j < 4; j++) memcpy(&x[j], row(i + j) + k, 16);
            const v4 p = shuffled<0, 4, 1, 5>(x[0], x[1]), q = shuffled<2, 6, 3, 7>(x[0], x[1]);
            const v4 r = shuffled<0, 4, 1, 5>(x[2], x[3]), s = shuffled<2, 6, 3, 7>(x[2], x[3]);
            const v4 y[4] = {shuffled<0, 1, 4, 5>(p, r), shuffled<2, 3, 6, 7>(p, r), shuffled<0, 1, 4, 5>(q, s),
                             shuffled<2, 3, 6, 7>(q, s)};
            for (int j = 0; j < 4; j++) memcpy(to + (k + j) * ld + i, &y[j], 16);
        }
    for (int j = turned; j < m; j++)
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
        if (M <= FEW && !soon) fetch_ahead(b, 2 * NR * sizeof(T));
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
// call(rows of a block, its first row, panel, its weights, where its part of the next panel begins, lines of 64 bytes in that);
// a few rows fetch their own panel instead
template <class T, class F>
static inline void one_panel(const T* b, i64 p, i64 from, i64 rows, i64 first, i64 last, i64 K, F call) {
    const Blocks blocks(rows);
    const int fetching = rows > FEW ? std::min<i64>(last - first, AHEAD) : 0, total = NR * K * sizeof(T) / 64;
    const int share = fetching ? (total + fetching - 1) / fetching : 0;
    for (i64 q = first; q < last; q++) {
        const i64 at = q * blocks.each;
        const char* soon = fetching ? (const char*)(b + NR * K) + (q - first) * share * 64 : nullptr;
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

#include "matrix_unit.cpp"
namespace shared {
template <class T>  // packed: room for the rows
static void product(const T* x, const T* w, const T* bias, T* out, i64 M, i64 N, i64 K, T* packed) {
#ifdef TILES
    if constexpr (std::is_same_v<T, bf16>)
        if (tiles) return tile_product(x, w, M, N, K, no_sums, storing(bias, out, N));
#endif
    for_panels(w, M, N, K, multiplying(pack(x, packed, M, K), bias, out, N, K));
}
}  // namespace shared
namespace alone {
template <class T>  // by the thread that calls it, on vectors
static void product(const T* x, const T* w, const T* bias, T* out, i64 M, i64 N, i64 K, T* packed) {
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
