// The kernels: products, attention over blocks, and what is small, in fp32 and bf16. Made from the cells of
// nbs/20_kernels.ipynb by .ci/cpp: edit the notebook.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#include <omp.h>
#if defined(__AVX512BF16__) || defined(__AVX512VNNI__) || defined(__AVXVNNI__)
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
static inline vf as(const float*, vf v) { return v; }
static inline vf as(const bf16*, vf v) { return (vf)(nearest(v) << 16); }

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

static inline vf vexp(vf x) {  // x up to 88
    const auto low = x < -87.f;
    const vf y = low ? all(-87.f) : x, n = y * 1.44269504f + 12582912.f, f = n - 12582912.f;  // 1.5 * 2^23: f is whole
    const vf r = y - f * .693359375f + f * 2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f, p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f, p = p * (r * r) + r + 1.f;
    return low ? all(0.f) : p * (vf)(((vi)n + 127) << 23);
}
static inline vf vtanh(vf x) {
    const vf e = vexp(x < 0.f ? 2.f * x : -2.f * x), t = (1.f - e) / (1.f + e);
    return x < 0.f ? -t : t;
}

constexpr int NR = 32, NV = NR / W, MR = W == 16 ? 12 : 3, AHEAD = 8;  // AHEAD: so many blocks of rows fetch the next panel
// s[M][V * W] += a[M][2] b[2][V * W]: in fp32 the rows of b lie ld apart, in bf16 they lie in pairs
template <int M, int V>
static inline void multiply(const float* a, i64 lda, const float* b, i64 ld, vf (&s)[M][V]) {
    for (int k = 0; k < 2; k++) {
        vf x[V];
        for (int j = 0; j < V; j++) x[j] = load(b + k * ld + j * W);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < V; j++) s[i][j] += a[i * lda + k] * x[j];
    }
}
template <int M, int V>
static inline void multiply(const bf16* a, i64 lda, const bf16* b, i64, vf (&s)[M][V]) {
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

template <int M, bool FETCH, class T>
static void block(const T* a, i64 lda, const T* b, const T* bias, int K, T* c, i64 ldc, int n, const char* soon, int lines) {
    vf s[M][NV] = {};
    for (int k = 0, p = 0, due = 0; k < K / 2; k++) {
        if (FETCH)
            for (due += lines; due >= K / 2; due -= K / 2) __builtin_prefetch(soon + 64 * p++, 0, 2);
        multiply(a + 2 * k, lda, b + 2 * k * NR, NR, s);
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < NV; j++) {
            const int m = std::clamp(n - j * W, 0, W);
            if (m) part_store(c + i * ldc + j * W, bias ? s[i][j] + part(bias + j * W, m) : s[i][j], m);
        }
}
// For all rows and panels, shared out to the threads: call(rows of a block, whether it fetches, first row, panel, its weights,
// where its part of the next panel begins, lines of 64 bytes in that)
template <class T, class F>
static void for_panels(const T* w, i64 M, i64 N, i64 K, F call) {
    const i64 panels = (N + NR - 1) / NR, threads = omp_get_max_threads();
    const i64 parts = std::clamp<i64>(4 * threads / panels, 1, M / (4 * MR) + 1), each = (M + parts - 1) / parts;
#pragma omp parallel for if (M * N * K > 100000)
    for (i64 u = 0; u < panels * parts; u++) {
        const i64 p = u / parts, from = u % parts * each, rows = std::min(each, M - from);
        if (rows <= 0) continue;
        const T* b = w + p * NR * K;
        const int blocks = (rows + MR - 1) / MR, per = (rows + blocks - 1) / blocks, fetching = std::min(blocks, AHEAD);
        const int total = NR * K * sizeof(T) / 64, share = (total + fetching - 1) / fetching;
        for (int q = 0; q < blocks; q++) {
            const i64 r = from + q * per;
            const char* soon = (const char*)(b + NR * K) + (i64)q * share * 64;
            by_count<MR>(std::min<i64>(per, from + rows - r), [&](auto m) {
                if (q < fetching)
                    call(m, std::true_type(), r, p, b, soon, share);
                else
                    call(m, std::false_type(), r, p, b, soon, 0);
            });
        }
    }
}
template <class T>
static void product(const T* x, const T* w, const T* bias, T* out, i64 M, i64 N, i64 K) {
    for_panels(w, M, N, K, [=](auto m, auto fetch, i64 r, i64 p, const T* b, const char* soon, int lines) {
        const i64 c = p * NR;
        const int n = std::min<i64>(NR, N - c);
        block<m, fetch>(x + r * K, K, b, bias ? bias + c : bias, K, out + r * N + c, N, n, soon, lines);
    });
}
EXPORT(product)

constexpr int COLUMNS = 64, CV = 4, TILE = CV * W, STEP = 128, ROWS = 64, DIM = 256;
template <int HOW, class T>
static inline void fetch(const T* p, int n) {  // HOW: 3 into the nearest cache, 2 the next
    for (int i = 0; i < n; i += 64 / (int)sizeof(T)) __builtin_prefetch(p + i, 0, HOW);
}
// s[N][n] = scale q[N][D] k[n / 64][D][64], n up to STEP, each 64 columns where k says; computed up to the next multiple of TILE
template <int N, class T>
static void scores(const T* q, int D, const T* const* k, int n, float scale, float* s, const T* const* soon, int soon_dims) {
    for (int c = 0; c < n; c += TILE) {
        const T *tile = k[c / COLUMNS] + c % COLUMNS * (4 / sizeof(T)),
                *next = soon ? soon[c / COLUMNS] + c % COLUMNS * soon_dims : nullptr;
        const T* after = soon && c % COLUMNS == 0 && c + COLUMNS < n ? k[c / COLUMNS + 1] : nullptr;
        vf a[N][CV] = {};
        for (int d = 0; d < D; d += 2) {
            if (next && d < TILE && c + d < n) fetch<3>(next + d * soon_dims, 2 * soon_dims);
            if (after) fetch<2>(after + d * COLUMNS, 2 * COLUMNS);
            multiply(q + d, D, tile + d * COLUMNS, COLUMNS, a);
        }
        for (int i = 0; i < N; i++)
            for (int j = 0; j < CV; j++) store(s + i * STEP + c + j * W, a[i][j] * scale);
    }
}

// o[N][M * W] += p[N][n] v[n / 64][64][M * W], n even, `at` numbers into each tile; meanwhile tiles of keys are fetched
template <int N, int M, class T>
static void weigh(const T* p, const T* const* v, int at, int n, float* o, int D, const T* const* soon, int soon_dims,
                  int soon_n) {
    vf a[N][M];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++) a[i][j] = load(o + i * D + j * W);
    for (int tile = 0; tile < n; tile += COLUMNS) {
        const T *w = v[tile / COLUMNS] + at, *next = tile < soon_n ? soon[tile / COLUMNS] : nullptr;
        for (int c = 0; c < std::min(COLUMNS, n - tile); c += 2) {
            if (next) fetch<2>(next + c * soon_dims, 2 * soon_dims);
            multiply(p + tile + c, STEP * 4 / sizeof(T), w + c * D, D, a);
        }
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++) store(o + i * D + j * W, a[i][j]);
}
template <int N, class T>
static void weigh_all(const T* p, const T* const* v, int n, float* o, int D, const T* const* soon, int soon_dims, int soon_n) {
    constexpr int E = 4 / sizeof(T);
    int d = 0;
    for (; d + 4 * W <= D; d += 4 * W) weigh<N, 4>(p, v, d * E, n, o + d, D, soon, soon_dims, d ? 0 : soon_n);
    for (; d < D; d += W) weigh<N, 1>(p, v, d * E, n, o + d, D, soon, soon_dims, d ? 0 : soon_n);
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
    const float now = most(top), fade = std::exp(m - now);
    vf t = {};
    for (int i = 0; i < full; i += W) {
        vf e = vexp(load(x + i) - now);
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
struct Unit {  // rows of queries, and what they have gathered; end: columns that a row may see
    T q[ROWS * DIM];
    float s[ROWS * STEP], o[ROWS * DIM], m[ROWS], l[ROWS];
    i64 end[ROWS];
};
template <class T>
struct Tiles {
    const T *k[STEP / COLUMNS], *v[STEP / COLUMNS];
};  // one KV head's keys and values of a step
template <class T>
struct Path {  // the columns of a block table, from some multiple of 64 on
    const Shape& z;
    const T *K, *V;
    const i64* table;
    i64 offset;
    Path(const Shape& z, const T* K, const T* V, const i64* table, i64 column)
        : z(z), K(K), V(V), table(table + column / z.block_size), offset(column % z.block_size) {}
    void take(i64 n, Tiles<T>& t) {  // the next n columns
        for (int i = 0; n > 0; i++, n -= COLUMNS) {
            t.k[i] = K + *table * z.k_block + offset * z.dim, t.v[i] = V + *table * z.v_block + offset * z.dim_v;
            if ((offset += COLUMNS) == z.block_size) offset = 0, table++;
        }
    }
};
template <class T>
static void walk(const Shape& z, Unit<T>& u, int first, int last, const T* K, const T* V, const i64* table, i64 from, i64 to) {
    const int D = z.dim, DV = z.dim_v;
    auto after = [&](i64 c) { return std::min(to, c / STEP * STEP + STEP); };
    T pair[2 * DIM];
    const T* odd = pair;
    Tiles<T> now, soon;
    Path<T> path(z, K, V, table, from);
    if (from < to) path.take(after(from) - from, now);
    for (i64 c = from, end; c < to; c = end, now = soon) {
        end = after(c);
        const int cols = end - c, even = cols / 2 * 2, more = after(end) - end;
        path.take(more, soon);
        for (int r = first; r < last; r += RB) {
            by_count<RB>(last - r, [&](auto n) {
                scores<n>(u.q + r * D, D, now.k, cols, z.scale, u.s + r * STEP, r == first ? now.v : nullptr, DV);
            });
        }
        for (int r = first; r < last; r++) {
            const i64 seen = u.end[r] - c;  // columns of this step before the row's own end
            const int lo = z.window ? std::clamp<i64>(seen - z.window, 0, cols) : 0, hi = std::clamp<i64>(seen, 0, cols);
            const float fade = soften(u.s + r * STEP, (T*)(u.s + r * STEP), lo, hi, cols, z.softcap, u.m[r], u.l[r]);
            if (fade != 1)
                for (int d = 0; d < DV; d += W) store(u.o + r * DV + d, load(u.o + r * DV + d) * fade);
        }
        if (even < cols) last_pair(now.v[even / COLUMNS] + even % COLUMNS * DV, DV, pair);
        for (int r = first; r < last; r += RB) {
            const T* p = (const T*)(u.s + r * STEP);
            by_count<RB>(last - r, [&](auto n) {
                weigh_all<n>(p, now.v, even, u.o + r * DV, DV, soon.k, D, r == first ? more : 0);
                if (even < cols) weigh_all<n>(p + even, &odd, 2, u.o + r * DV, DV, soon.k, D, 0);
            });
        }
    }
}

template <class T>
static void one_unit(const Shape& z, const T* q, const T* K, const T* V, T* out, const i64* blocks, const i64* members,
                     const i64* unit, i64 h) {
    const int G = z.heads / z.kv_heads, D = z.dim, DV = z.dim_v;
    const i64 shared = unit[3];
    auto begin = [&](i64 column) { return z.window ? std::max<i64>(0, column + 1 - z.window) / COLUMNS * COLUMNS : 0; };
    auto go = [&](Unit<T>& u, int first, int last, i64 table, i64 from, i64 to) {
        walk(z, u, first, last, K + h * z.k_head, V + h * z.v_head, blocks + table, from, to);
    };
    Unit<T> u;
    int R = 0;
    for (i64 i = unit[0]; i < unit[1]; i++)
        for (i64 j = 0; j < members[4 * i + 1] * G; j++, R++) {
            const i64 *a = members + 4 * i, head = h * G + j % G;
            memcpy(u.q + R * D, q + (a[0] + j / G) * z.q_token + head * z.q_head, D * sizeof(T));
            memset(u.o + R * DV, 0, DV * sizeof(float));
            u.m[R] = z.sinks ? z.sinks[head] : -INFINITY, u.l[R] = z.sinks ? 1 : 0, u.end[R] = a[3] + j / G + 1;
        }
    if (shared && !z.window) go(u, 0, R, unit[2], 0, shared);
    R = 0;
    for (i64 i = unit[0]; i < unit[1]; i++) {
        const i64 *a = members + 4 * i, n = a[1] * G;
        go(u, R, R + n, a[2], z.window ? begin(a[3]) : shared, a[3] + a[1]);
        for (int j = 0; j < n; j++) {
            T* row = out + ((a[0] + j / G) * z.heads + h * G + j % G) * DV;
            for (int d = 0; d < DV; d += W) store(row + d, load(u.o + (R + j) * DV + d) / u.l[R + j]);
        }
        R += n;
    }
}
template <class T>
static void attend(const Shape& z, const T* q, const T* K, const T* V, T* out, const i64* blocks, const i64* members,
                   const i64* units, i64 n) {
#pragma omp parallel for schedule(dynamic)
    for (i64 u = 0; u < n * z.kv_heads; u++)
        one_unit(z, q, K, V, out, blocks, members, units + u / z.kv_heads * 4, u % z.kv_heads);
}
EXPORT(attend)

template <class T>
static void write(const Shape& z, const T* k, const T* v, i64 k_token, i64 k_head, i64 v_token, i64 v_head, T* K, T* V,
                  const i64* places, i64 n) {
    constexpr int E = 4 / sizeof(T);  // numbers side by side: 2 in bf16
#pragma omp parallel for if (n > 8)
    for (i64 t = 0; t < n; t++)
        for (i64 h = 0; h < z.kv_heads; h++) {
            const i64 block = places[t] / z.block_size, c = places[t] % z.block_size;
            const T *from = k + t * k_token + h * k_head, *of = v + t * v_token + h * v_head;
            T* to = K + block * z.k_block + h * z.k_head + c / COLUMNS * COLUMNS * z.dim + c % COLUMNS * E;
            for (i64 d = 0; d < z.dim; d++) to[d / E * COLUMNS * E + d % E] = from[d];
            T* at = V + block * z.v_block + h * z.v_head + c / E * E * z.dim_v + c % E;
            for (i64 d = 0; d < z.dim_v; d++) at[d * E] = of[d];
        }
}
EXPORT(write)

template <class T>
static void add_norm(T* h, const T* delta, const T* w, T* out, i64 n, i64 E, float eps) {
#pragma omp parallel for if (n > 8)
    for (i64 r = 0; r < n; r++) {
        T *x = h + r * E, *y = out + r * E;
        vf s = {};
        for (i64 i = 0; i < E; i += W) {
            vf v = load(x + i);
            if (delta) v = as(x, v + load(delta + r * E + i)), store(x + i, v);
            s += v * v;
        }
        const float f = 1 / std::sqrt(sum(s) / E + eps);
        for (i64 i = 0; i < E; i += W) store(y + i, as(y, load(x + i) * f) * load(w + i));
    }
}
template <class T>
static void silu_mul(const T* gu, T* out, i64 n, i64 I) {
#pragma omp parallel for if (n > 1)
    for (i64 r = 0; r < n; r++)
        for (i64 i = 0; i < I; i += W) {
            vf g = load(gu + r * 2 * I + i);
            const vf e = vexp(g < -88.f ? all(88.f) : -g);
            store(out + r * I + i, as(out, g / (1.f + e)) * load(gu + r * 2 * I + I + i));
        }
}
EXPORT(add_norm)
EXPORT(silu_mul)

template <class T>
static void rotate(T* x, i64 token, i64 heads, i64 dim, const T* cos, const T* sin, i64 rot, i64 n) {
    const i64 half = rot / 2;
#pragma omp parallel for if (n > 8)
    for (i64 t = 0; t < n; t++)
        for (i64 h = 0; h < heads; h++)
            for (i64 i = 0; i < half; i += W) {
                const int m = std::min<i64>(W, half - i);
                T *a = x + t * token + h * dim + i, *b = a + half;
                const T *c = cos + t * rot + i, *s = sin + t * rot + i;
                vf p = part(a, m), q = part(b, m);
                part_store(a, as(a, p * part(c, m)) - as(a, q * part(s, m)), m);
                part_store(b, as(a, q * part(c + half, m)) + as(a, p * part(s + half, m)), m);
            }
}
EXPORT(rotate)

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
static void quantize(const T* x, uint8_t* bytes, float* steps, i64 n, i64 K, i64 B, i64 top) {
    typedef uint8_t vb __attribute__((vector_size(W)));
#pragma omp parallel if (n > 8)
    {
        std::vector<float> y(K + W);
#pragma omp for
        for (i64 r = 0; r < n; r++) {
            float* p = y.data();
            const float largest = B == 64   ? hadamard_row<64>(x + r * K, p, K)
                                  : B == 32 ? hadamard_row<32>(x + r * K, p, K)
                                  : B == 16 ? hadamard_row<16>(x + r * K, p, K)
                                            : hadamard_row<1>(x + r * K, p, K);
            const float f = top / largest, t = top, shift = 12582913.f + top;  // 1.5 * 2^23 + top + 1
            for (i64 i = 0; i < K; i += W) {
                vf v = load(p + i) * f;
                v = v > t ? all(t) : v < -t ? all(-t) : v;
                vb b = __builtin_convertvector((vu)(v + shift) & 255, vb);
                memcpy(bytes + r * K + i, &b, std::min<i64>(W, K - i));
            }
            steps[r] = largest / top;
        }
    }
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
template <int M, bool FETCH>
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
    for (int k = 0, p = 0, due = 0; k < steps; k++) {
        if (FETCH)
            for (due += lines; due >= steps; due -= steps) __builtin_prefetch(soon + 64 * p++, 0, 2);
        vi x[NV];
        for (int j = 0; j < NV; j++) memcpy(&x[j], b + (k * NR + j * W) * 4, sizeof(vi));
        for (int i = 0; i < M; i++) {
            int32_t quad;
            memcpy(&quad, a + i * K + 4 * k, 4);
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
                    for (int i = 0; i < M; i++) t[i][j] += (float)(a[i * K + 4 * k + d] - 128) * f;
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
static void bytes_product(const T* x, const int8_t* w, const int32_t* start, const float* scales, const float* bias, T* out,
                          i64 M, i64 N, i64 K, i64 B) {
    std::vector<uint8_t> bytes(M * K);
    std::vector<float> steps(M);
    quantize(x, bytes.data(), steps.data(), M, K, B, 127);
    for_panels(w, M, N, K, [&](auto m, auto fetch, i64 r, i64 p, const int8_t* b, const char* soon, int lines) {
        const i64 c = p * NR;
        const int n = std::min<i64>(NR, N - c);
        int32_t sums[m * NR];
        bytes_block<m, fetch>(bytes.data() + r * K, K, b, start + c, sums, soon, lines);
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j += W) {
                const int some = std::min(W, n - j);
                vi v;
                memcpy(&v, sums + i * NR + j, sizeof v);
                vf f = __builtin_convertvector(v, vf) * part(scales + c + j, some) * steps[r + i];
                part_store(out + (r + i) * N + c + j, bias ? f + part(bias + c + j, some) : f, some);
            }
    });
}
EXPORT(bytes_product)
