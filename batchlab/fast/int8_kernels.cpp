// Bytes instead of numbers: mixing, rounding, products. Made from the cells of nbs/4_fast/int8_kernels.ipynb by .ci/cpp: edit the
// notebook.
#include "grouped.cpp"

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
        if (M <= FEW && !soon) fetch_ahead(b + k * NR * 4, NR * 4);
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
                    for (int i = 0; i < M; i++) t[i][j] = multiply_add(all(a[4 * (k * M + i) + d] - 128), f, t[i][j]);
                }
            }
        for (int i = 0; i < M; i++)
            for (int j = 0; j < NV; j++) s[i][j] += __builtin_convertvector(t[i][j], vi);
    }
#endif
    for (int i = 0; i < M; i++)
        for (int j = 0; j < NV; j++) memcpy(sums + i * NR + j * W, &s[i][j], sizeof(vi));
}

template <class T>  // sums of m rows, of which r is the first, for panel p
static auto scaling(const float* steps, const float* scales, const float* bias, T* out, i64 N) {
    return [=](const int32_t* sums, i64 m, i64 r, i64 p) {
        const i64 c = p * NR, at = c % N, n = std::min<i64>(NR, N - at);
        for (int j = 0; j < n; j += W) {
            const int some = std::min<i64>(W, n - j);
            const vf scale = part(scales + c + j, some), more = bias ? part(bias + c + j, some) : all(-0.f);  // x - 0 is x
            for (i64 i = 0; i < m; i++) {
                vi v;
                memcpy(&v, sums + i * NR + j, sizeof v);
                const vf f = multiply_add(__builtin_convertvector(v, vf) * scale, all(steps[r + i]), more);
                part_store(out + (r + i) * N + at + j, f, some);
            }
        }
    };
}
template <class F>
static auto multiplying(const uint8_t* bytes, const int32_t* start, i64 K, F put) {
    return [=](auto m, i64 r, i64 p, const int8_t* b, const char* soon, int lines) {
        int32_t sums[m * NR];
        bytes_block<m>(bytes + r * K, K, b, start + p * NR, sums, soon, lines);
        put(sums, m, r, p);
    };
}

namespace shared {
template <class T>
static void bytes_product(const uint8_t* bytes, const float* steps, const int8_t* w, const int32_t* start, const float* scales,
                          const float* bias, T* out, i64 M, i64 N, i64 K, uint8_t* packed) {
    const auto put = scaling(steps, scales, bias, out, N);
#ifdef TILES
    if (tiles)
        return tile_product(
            bytes, w, M, N, K, [=](i64 p) { return start + p * NR; },
            [=](const int32_t (*sums)[NR], int m, i64 r, i64 p) { put(sums[0], m, r, p); });
#endif
    for_panels(w, M, N, K, multiplying(pack(bytes, packed, M, K), start, K, put));
}
}  // namespace shared
template <class T>
static void bytes_product(const T* x, const int8_t* w, const int32_t* start, const float* scales, const float* bias, T* out,
                          i64 M, i64 N, i64 K, i64 B) {
    std::vector<uint8_t> bytes(M * K), packed(M > 1 && !has_tiles() ? M * K : 0);
    std::vector<float> steps(M);
#pragma omp parallel if (M * N * K > 100000)
    {
        shared::quantize(x, bytes.data(), steps.data(), M, K, B, 127);
        shared::bytes_product(bytes.data(), steps.data(), w, start, scales, bias, out, M, N, K, packed.data());
    }
}
EXPORT(bytes_product)

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
