// What low-rank adapters add to products. Made from the cells of nbs/4_fast/32_lora.ipynb by .ci/cpp: edit the notebook.
#include "experts.cpp"

struct Slice {  // of a product the outputs from `at` on: `scale` times `up` times `rank` of the numbers in between, from `from`
                // on
    const void* up;
    i64 at, outputs, from, rank;
    float scale;
};
struct Delta {  // what an adapter adds to a product; rank: numbers in between, of all slices, 0 for none
    const void* down;
    const Slice* slices;
    i64 rank, num_slices;
};
struct Adapted {  // units: (deltas of all products, first row, rows) of one adapter each; late: of the tokens whose outputs are
                  // due
    const i64 *units, *rows, *late_units, *late_rows;
    i64 num_units, num_late;
};

// n outputs of M rows, each where c says: plus scale a[M][K] b[K][n]
template <int M, class T>
static void add_block(const T* a, const T* b, i64 K, T* const* c, int n, float scale) {
    vf s[M][NV] = {};
    for (i64 k = 0; k < K / 2; k++, a += 2 * M, b += 2 * NR) multiply(a, 4 / sizeof(T), b, NR, s, M);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < NV; j++) {
            const int m = std::clamp(n - j * W, 0, W);
            if (m) part_store(c[i] + j * W, multiply_add(all(scale), s[i][j], part(c[i] + j * W, m)), m);
        }
}
// For m rows of one adapter, up to MR: the `share`-th of `shares` of all panels of outputs
template <class T>
static void add_rows(const Delta& d, const i64* rows, int m, const T* x, i64 K, T* out, i64 N, i64 share, i64 shares) {
    static thread_local std::vector<T> room;
    room.resize(m * (K + 2 * d.rank));
    T *between = room.data(), *packed = between + m * d.rank, *gathered = packed + m * d.rank;
    auto as_block = [m](auto row, T* to, i64 n) -> const T* {
        if (m == 1) return row(0);
        pack_block([&](int i) { return (uint32_t*)row(i); }, (uint32_t*)to, m, n * sizeof(T) / 4);
        return to;
    };
    const T* a = as_block([&](int i) { return x + rows[i] * K; }, gathered, K);
    for (i64 r = 0; r < d.rank; r += NR) {
        const T* b = (const T*)d.down + r * K;
        const int n = std::min<i64>(NR, d.rank - r);
        by_count<MR>(m, [&](auto M) { block<M>(a, b, (const T*)nullptr, K, between + r, d.rank, n, (const char*)b, 0); });
    }
    i64 panel = 0;
    for (const Slice* s = d.slices; s < d.slices + d.num_slices; s++) {
        const T* t = as_block([&](int i) { return between + i * d.rank + s->from; }, packed, s->rank);
        for (i64 c = 0; c < s->outputs; c += NR) {
            if (panel++ % shares != share) continue;
            T* to[MR];
            for (int i = 0; i < m; i++) to[i] = out + rows[i] * N + s->at + c;
            const int n = std::min<i64>(NR, s->outputs - c);
            by_count<MR>(m, [&](auto M) { add_block<M>(t, (const T*)s->up + c * s->rank, s->rank, to, n, s->scale); });
        }
    }
}

// What the adapters of a step add to a product of its rows, shared out to the threads
template <class T>
static void adapt(const Adapted& a, i64 product, const T* x, i64 K, T* out, i64 N, bool late) {
    const i64 *units = late ? a.late_units : a.units, *rows = late ? a.late_rows : a.rows, n = late ? a.num_late : a.num_units;
    const i64 shares = n ? std::max<i64>(1, omp_get_num_threads() / n) : 1;
#pragma omp for schedule(dynamic)
    for (i64 u = 0; u < n * shares; u++) {
        const i64 *unit = units + u / shares * 3, end = unit[1] + unit[2];
        const Delta& d = ((const Delta*)unit[0])[product];
        if (!d.rank) continue;
        for (i64 r = unit[1]; r < end; r += MR)
            add_rows(d, rows + r, std::min<i64>(MR, end - r), x, K, out, N, u % shares, shares);
    }
}
// For a product that others computed
template <class T>
static void adapt_rows(const Adapted& a, i64 product, const T* x, i64 K, T* out, i64 N, i64 late) {
#pragma omp parallel if (K * N > 10000)
    adapt(a, product, x, K, out, N, late);
}
EXPORT(adapt_rows)
