// Attention over blocks, in fp32 and bf16. Made from the cells of nbs/4_fast/21_attention.ipynb by .ci/cpp: edit the notebook.
#include "w4a8.cpp"

static inline vf vexp(vf x) {  // x up to 88
    const vf y = x < -150.f ? all(-150.f) : x,
             n = multiply_add(y, all(1.44269502f), all(12582912.f)) - 12582912.f;  // 1.5 * 2^23: n is whole
    const vf f = multiply_add(y, all(1.92596299e-8f), multiply_add(y, all(1.44269502f), -n));
    vf p = all(1.53533620e-4f);
    for (float c : {1.33988750e-3f, 9.61843692e-3f, 5.55033237e-2f, 2.40226477e-1f, 6.93147182e-1f, 1.f})
        p = multiply_add(p, f, all(c));
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
    vf p = all(1.86707261e-03f);
    for (float c : {9.01715088e-03f, 5.57998288e-02f, 2.40164472e-01f, 6.93151310e-01f, 1.f}) p = multiply_add(p, f, all(c));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)y);
#else
    return vexp(x);
#endif
}
static inline vf vtanh(vf x) {
    const vf e = vexp(x < 0.f ? 2.f * x : -2.f * x), t = (1.f - e) / (1.f + e);
    return x < 0.f ? -t : t;
}

constexpr int COLUMNS = 64, CV = 4, TILE = CV * W, STEP = 128, ROWS = 64, DIM = 256;
#ifdef TILES
constexpr int TOGETHER = TR;  // rows whose scores wait together
#else
constexpr int TOGETHER = RB;
#endif
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

static inline void store_weights(float* p, vf v) { store(p, v); }
static inline void store_weights(bf16* p, vf v) {
#ifdef __AVX512BF16__
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &h, sizeof h);
#else
    store(p, v);
#endif
}
// x[N][n], its rows STEP apart, are scores, of which row i sees those from lo[i] to hi[i] (excluded),
// or all unless `hidden`. p, in the place of x, gets
// the weights, fade the factors for all that was summed before.
template <int N, class T>
static inline void soften(float* x, T* p, const int* lo, const int* hi, bool hidden, int n, float cap, float* m, float* l,
                          float* fade) {
    const int full = (n + W - 1) / W * W;
    for (int r = 0; r < N && cap; r++)
        for (int i = 0; i < full; i += W) store(x + r * STEP + i, cap * vtanh(load(x + r * STEP + i) * (1 / cap)));
    for (int r = 0; r < N && hidden; r++) {
        for (int i = 0; i < lo[r]; i++) x[r * STEP + i] = -INFINITY;
        for (int i = hi[r]; i < full; i++) x[r * STEP + i] = -INFINITY;
    }
    vf v[N];
    for (int r = 0; r < N; r++) v[r] = load(x + r * STEP);
    for (int i = W; i < full; i += W)
        for (int r = 0; r < N; r++) {
            const vf y = load(x + r * STEP + i);
            v[r] = v[r] > y ? v[r] : y;
        }
    const vf before = load(m), sums = load(l), highest = of_rows(v, [](vf a, vf b) { return a > b ? a : b; });
    const vf now = before > highest ? before : highest;
    vf gap = before - now;
    gap = vexp(before == now ? vf{} : before == -INFINITY ? vf{} : gap);  // in the first step nothing fades
    float tops[W];
    store(tops, now == -INFINITY ? vf{} : now);  // nothing seen yet
    for (int r = 0; r < N; r++) v[r] = vf{};
    for (int i = 0; i < full; i += W)
        for (int r = 0; r < N; r++) {
            const vf e = vexp_as(p, load(x + r * STEP + i) - tops[r]);
            store_weights(p + r * STEP * 4 / sizeof(T) + i, e);
            v[r] += e;
        }
    const vi row = first_numbers();
    store(fade, gap), store(m, row < N ? now : before);
    store(l, row < N ? sums * gap + of_rows(v, [](vf a, vf b) { return a + b; }) : sums);
}

// o[N][M * W] = fade o + p[N][n] v[n / 64][64][M * W], n even, `at` numbers into each tile
template <int N, int M, class T>
static void weigh(const T* p, const T* const* v, int at, int n, const float* fade, float* o, int D, Prefetch& ahead) {
    vf a[N][M];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++) a[i][j] = load(o + i * D + j * W) * fade[i];
    const T* w = v[0] + at;
    int c = 0;
    do {  // the compiler keeps the sums in registers only if a pair is sure to come
        ahead.some();
        multiply(p + c, STEP * 4 / sizeof(T), w, D, a);
        w = (c += 2) % COLUMNS ? w + 2 * D : v[c / COLUMNS % (STEP / COLUMNS)] + at;
    } while (c < n);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++) store(o + i * D + j * W, a[i][j]);
}
template <int N, class T>
static void weigh_all(const T* p, const T* const* v, int n, const float* fade, float* o, int D, Prefetch& ahead) {
    constexpr int E = 4 / sizeof(T);
    int d = 0;
    for (; d + 4 * W <= D; d += 4 * W) weigh<N, 4>(p, v, d * E, n, fade, o + d, D, ahead);
    for (; d + 2 * W <= D; d += 2 * W) weigh<N, 2>(p, v, d * E, n, fade, o + d, D, ahead);
    for (; d < D; d += W) weigh<N, 1>(p, v, d * E, n, fade, o + d, D, ahead);
}
template <class T>
static void last_pair(const T* v, int D, T* pair) {
    const int each = 4 / sizeof(T);
    memset(pair, 0, 2 * D * sizeof(T));
    for (int d = 0; d < D; d++) pair[d * each] = v[d * each];
}

struct Shape {
    i64 heads, kv_heads, dim, dim_v, q_token, q_head, k_block, k_head, v_block, v_head, block_size, window;
    float scale, softcap;  // softcap: 0 for none
    const float* sinks;    // one for each head, or null
};
template <class T>
struct Unit {  // rows of queries, and what they have gathered; a row sees columns begin to end (excluded)
    T q[ROWS * DIM];
    float s[TOGETHER * STEP], o[ROWS * DIM], m[ROWS + W], l[ROWS + W];
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
    Tiles() {}
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

// Weights of rows r to r + N (excluded) of u in the place of their scores s in n columns from c on
template <int N, class T>
static inline void weigh_rows(const Shape& z, Unit<T>& u, int r, i64 c, int n, float* s, float* fade) {
    int lo[N] = {}, hi[N] = {};
    bool hidden = n % W;
    for (int i = 0; i < N; i++) hidden |= u.begin[r + i] > c || u.end[r + i] < c + n;
    for (int i = 0; i < N && hidden; i++)
        lo[i] = std::clamp<i64>(u.begin[r + i] - c, 0, n), hi[i] = std::clamp<i64>(u.end[r + i] - c, lo[i], n);
    soften<N>(s, (T*)s, lo, hi, hidden, n, z.softcap, u.m + r, u.l + r, fade);
}
// Rows first to last (excluded) of u through the tiles of a step, whose columns are c and the next ones
template <class T>
static void one_step(const Shape& z, Unit<T>& u, int first, int last, i64 c, const Tiles<T>& tiles, Prefetch& ahead) {
    const int D = z.dim, DV = z.dim_v, cols = tiles.n, even = cols / 2 * 2;
    T pair[2 * DIM];
    const T *odd = pair, *p = (const T*)u.s;
    if (even < cols) last_pair(tiles.v[even / COLUMNS] + even % COLUMNS * DV, DV, pair);
    for (int r = first; r < last; r += RB)
        by_count<RB>(last - r, [&](auto n) {
            // columns behind what the last of these rows sees are left out, in pairs
            const i64 seen = (*std::max_element(u.end + r, u.end + r + n) - c + 1) / 2 * 2;
            if (seen <= 0) return;
            const int some = std::min<i64>(cols, seen), even = some / 2 * 2;
            float fade[W];
            scores<n>(u.q + r * D, D, tiles.k, some, z.scale, u.s, ahead);
            weigh_rows<n>(z, u, r, c, some, u.s, fade);
            if (even) weigh_all<n>(p, tiles.v, even, fade, u.o + r * DV, DV, ahead), store(fade, all(1));
            if (even < some) weigh_all<n>(p + even, &odd, 2, fade, u.o + r * DV, DV, ahead);
        });
}

#ifdef TILES
// The same on a matrix unit
static void tiled_step(const Shape& z, Unit<bf16>& u, int first, int last, i64 c, const Tiles<bf16>& tiles, Prefetch& ahead) {
    const int D = z.dim, DV = z.dim_v, cols = tiles.n, whole = cols / 32 * 32, even = cols / 2 * 2;
    bf16 rest[32 * DIM];  // the last values, filled up with zeros
    if (whole < cols) {
        const bf16* v = tiles.v[whole / COLUMNS] + whole % COLUMNS * DV;
        memcpy(rest, v, (even - whole) * DV * sizeof(bf16));
        memset((void*)(rest + (even - whole) * DV), 0, (32 + whole - even) * DV * sizeof(bf16));
        if (even < cols) last_pair(v + (even - whole) * DV, DV, rest + (even - whole) * DV);
    }
    const auto fetch = [&] {
        for (int i = 0; i < 4; i++) ahead.some();
    };
    const Blocks<TR> blocks(last - first);
    int shaped = 0;
    for (int r = first; r < last; r += blocks.each) {
        const int m = std::min<int>(blocks.each, last - r);
        if (m != shaped) shape_block(shaped = m, D % 32);
        for (int k = 0; k < cols; k += COLUMNS)
            by_count<CV>((cols - k + W - 1) / W, [&](auto n) {
                const auto keys = [&](i64 d) { return tiles.k[k / COLUMNS] + d * COLUMNS; };
                tile_block<n>(u.q + r * D, D, D, keys, 4 * COLUMNS, u.s + k, STEP, false, fetch);
            });
        for (int i = 0; i < m; i++) {
            float* s = u.s + i * STEP;
            for (int j = 0; j < cols; j += W) store(s + j, load(s + j) * z.scale);
            float fade[W], *o = u.o + (r + i) * DV;
            weigh_rows<1>(z, u, r + i, c, cols, s, fade);
            for (int d = 0; d < DV && *fade != 1; d += W) store(o + d, load(o + d) * *fade);
            if ((cols + W - 1) / W % 2) store((bf16*)s + (cols + W - 1) / W * W, vf{});
        }
        for (int d = 0; d < DV; d += CV * W)
            by_count<CV>((DV - d) / W, [&](auto n) {
                const auto values = [&](i64 k) { return 2 * d + (k < whole ? tiles.v[k / COLUMNS] + k % COLUMNS * DV : rest); };
                tile_block<n>((const bf16*)u.s, 2 * STEP, (cols + 31) / 32 * 32, values, 4 * DV, u.o + r * DV + d, DV, true,
                              fetch);
            });
    }
}
#endif

// Rows first to last (excluded) go through x; `next` is what the thread goes through then
template <class T>
static void walk(const Shape& z, Unit<T>& u, int first, int last, const Stretch<T>& x, const Stretch<T>& next) {
    Tiles<T> now(z, x, x.from);
    for (i64 c = x.from; c < x.to;) {
        const int cols = now.n;
        const Tiles<T> soon = c + cols < x.to ? Tiles<T>(z, x, c + cols) : Tiles<T>(z, next, next.from);
        Prefetch ahead = soon.prefetch(z);
        const auto step = [&](auto how) { how(z, u, first, last, c, now, ahead); };
#ifdef TILES
        if constexpr (std::is_same_v<T, bf16>)
            ::tiles ? step(tiled_step) : step(one_step<T>);
        else
#endif
            step(one_step<T>);
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
        release_tiles();
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
        walk(z, u, 0, R, Stretch<T>{all.K, all.V, all.table, u.begin[0] / COLUMNS * COLUMNS, u.end[R - 1]}, Stretch<T>{});
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
        release_tiles();
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
