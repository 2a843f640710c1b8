// Weights that stay in groups of whole numbers with scales. Made from the cells of nbs/4_fast/23_four_bits.ipynb by .ci/cpp: edit
// the notebook.
#include "packed.cpp"

struct fp16 {
    uint16_t x;
};
[[maybe_unused]] static inline float one(const fp16* p) {
    uint32_t u = (uint32_t)(p->x & 0x7fff) << 13, sign = (uint32_t)(p->x & 0x8000) << 16;
    float f;
    if (u >= 31 << 23) u |= 0x7f800000;  // no number
    memcpy(&f, &u, 4);
    f *= 0x1p112f;  // the exponent of fp32; also right for fp16's smallest numbers
    memcpy(&u, &f, 4);
    u |= sign, memcpy(&f, &u, 4);
    return f;
}
// A group of a panel: the scales of its NR outputs, in S; the offsets, in S, if it has some; then for each output G whole numbers
// of BITS bits. A number of 4 bits is less ZERO.
template <int BITS, class S, bool OFFSETS, int G, int ZERO = 0>
struct Form {
    static constexpr int bits = BITS, group = G, zero = ZERO;
    static constexpr bool offsets = OFFSETS;
    static constexpr i64 scales = NR * sizeof(S) * (1 + OFFSETS), bytes = scales + NR * G * BITS / 8;
    typedef S scale;
};
// Where number k of output o is among the numbers of a group, counted in BITS
template <int BITS>
static inline i64 number_at(i64 o, i64 k) {
    const i64 lane = o % 8 * 2 + k % 2, eight = o / 8;
    if (BITS == 8) return (k / 2 * 4 + eight) * 16 + lane;
    return ((k / 16 * 4 + eight) * 16 + lane) * 8 + k % 16 / 2;
}

#ifdef __AVX512F__
static inline vf twice(const float* p) {  // p[0], p[0], p[1], p[1], ...
    const __m512i at = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return (vf)_mm512_permutexvar_ps(at, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}
static inline vf twice(const fp16* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p), low = _mm_unpacklo_epi16(x, x), high = _mm_unpackhi_epi16(x, x);
    return (vf)_mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}
// Two rows of a panel, k and k + 1, of 16 outputs: each lane of a and b has an output's k, the next lane its k + 1
static inline void put_pairs(bf16* to, vf a, vf b) {
#ifdef __AVX512BF16__
    const __m512i y = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    const __m256i p = _mm512_cvtepi32_epi16((__m512i)nearest(a)), q = _mm512_cvtepi32_epi16((__m512i)nearest(b));
    const __m512i y = _mm512_inserti64x4(_mm512_castsi256_si512(p), q, 1);
#endif
    _mm512_storeu_si512(to, y);
}
static inline void put_pairs(float* to, vf a, vf b) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    store(to, (vf)_mm512_permutex2var_ps((__m512)a, even, (__m512)b));
    store(to + NR, (vf)_mm512_permutex2var_ps((__m512)a, odd, (__m512)b));
}
#endif
// The numbers of groups, n of them, as a panel of T
template <class F, class T>
static void expand(const uint8_t* from, T* to, i64 n) {
    typedef const typename F::scale* Scales;
    for (i64 g = 0; g < n; g++, from += F::bytes) {
        const uint8_t* q = from + F::scales;
#ifdef __AVX512F__
        constexpr i64 next = std::is_same_v<T, float> ? W : NR;  // from the first 16 outputs to the second
        vf table, a[4], b[4];
        for (int i = 0; i < 16; i++) table[i] = i - F::zero;
        for (int o = 0; o < 4; o++) {
            a[o] = twice((Scales)from + 8 * o);
            b[o] = F::offsets ? twice((Scales)from + NR + 8 * o) : all(-0.f);
        }
        for (int k = 0; k < F::group; k += 16) {
            __m512i four[4];
            if (F::bits == 4)
                for (int o = 0; o < 4; o++, q += 64) four[o] = _mm512_loadu_si512(q);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++, to += 2 * NR) {
                vf v[4];
                for (int o = 0; o < 4; o++) {
                    if (F::bits == 4)  // the lower 4 bits of each lane choose
                        v[o] = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(four[o], 4 * j), (__m512)table);
                    else {
                        v[o] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)q)));
                        q += 16;
                    }
                    v[o] = F::offsets ? (vf)_mm512_fmadd_ps((__m512)a[o], (__m512)v[o], (__m512)b[o]) : a[o] * v[o];
                }
                put_pairs(to, v[0], v[1]), put_pairs(to + next, v[2], v[3]);
            }
        }
#else
        for (int k = 0; k < F::group; k += 2, to += 2 * NR) {
            float x[2 * NR];
            for (int o = 0; o < NR; o++)
                for (int i = 0; i < 2; i++) {
                    const i64 at = number_at<F::bits>(o, k + i);
                    const int number = F::bits == 4 ? (q[at / 2] >> at % 2 * 4 & 15) - F::zero : (int8_t)q[at];
                    const float offset = F::offsets ? one((Scales)from + NR + o) : -0.f;
                    x[std::is_same_v<T, float> ? i * NR + o : 2 * o + i] = one((Scales)from + o) * number + offset;
                }
            for (int i = 0; i < 2 * NR; i += W) store(to + i, load(x + i));
        }
#endif
    }
}

template <class T>
struct Expander {
    i64 bits, group, bytes, zero, wide, offsets;
    void (*expand)(const uint8_t*, T*, i64);
};
template <class F, class T>
constexpr Expander<T> expander = {F::bits, F::group, F::bytes, F::zero, sizeof(typename F::scale) == 4, F::offsets, expand<F, T>};
template <class T>
static const Expander<T>& form_of(i64 i) {
    static const Expander<T> forms[] = {
        expander<Form<4, fp16, false, 32, 8>, T>, expander<Form<4, fp16, true, 32>, T>, expander<Form<4, float, true, 32>, T>,
        expander<Form<8, fp16, false, 32>, T>,    expander<Form<8, fp16, true, 32>, T>, expander<Form<8, float, true, 32>, T>,
        expander<Form<8, float, false, 16>, T>,
    };
    return forms[i];
}
struct Panel {
    const void* at;
    i64 form;  // of `form_of`; -1 for a panel of the dtype
};

// Whole numbers [N, K] and their scales and offsets [N, K / group] as panels; the last is filled up with zeros
template <class T>
static void pack_groups(const int8_t* numbers, const T* scales, const T* offsets, uint8_t* to, i64 N, i64 K, i64 form) {
    const Expander<T>& f = form_of<T>(form);
    const i64 n = K / f.group, size = f.wide ? 4 : 2, first = NR * size * (1 + f.offsets);
#pragma omp parallel for schedule(dynamic)
    for (i64 p = 0; p < (N + NR - 1) / NR; p++)
        for (i64 g = 0; g < n; g++) {
            uint8_t* group = to + (p * n + g) * f.bytes;
            memset(group, 0, f.bytes);
            for (i64 o = 0; o < NR && p * NR + o < N; o++) {
                const i64 r = p * NR + o;
                memcpy(group + o * size, (const uint8_t*)scales + (r * n + g) * size, size);
                if (f.offsets) memcpy(group + (NR + o) * size, (const uint8_t*)offsets + (r * n + g) * size, size);
                const int8_t* x = numbers + r * K + g * f.group;
                for (i64 k = 0; k < f.group; k++)
                    if (f.bits == 8)
                        group[first + number_at<8>(o, k)] = x[k];
                    else {
                        const i64 at = number_at<4>(o, k);
                        group[first + at / 2] |= (x[k] + f.zero) << at % 2 * 4;
                    }
            }
        }
}
EXPORT(pack_groups)

constexpr int PIECE = 64;  // numbers of a row that are expanded at a time: a piece of a panel stays in the first cache
template <int M, class T>
static void piecewise(const T* a, const uint8_t* b, const Expander<T>& f, const T* bias, i64 K, T* c, i64 ldc, int n) {
    alignas(64) T piece[PIECE * NR];
    vf s[M][NV] = {};
    for (i64 k = 0; k < K; k += PIECE) {
        const i64 some = std::min<i64>(PIECE, K - k);
        f.expand(b, piece, some / f.group), b += some / f.group * f.bytes;
        for (i64 i = 0; i < some / 2; i++, a += 2 * M) multiply(a, 4 / sizeof(T), piece + 2 * NR * i, NR, s, M);
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < NV; j++) {
            const int m = std::clamp(n - j * W, 0, W);
            if (m) part_store(c + i * ldc + j * W, bias ? s[i][j] + part(bias + j * W, m) : s[i][j], m);
        }
}

// Blocks first to last (excluded) of all packed rows by a panel, the p-th of N outputs
template <class T>
static void grouped_panel(const T* x, const Panel& panel, i64 p, const T* bias, T* out, i64 M, i64 N, i64 K, i64 first,
                          i64 last) {
    static thread_local std::vector<T> room;
    const T *b = (const T*)panel.at, *added = bias ? bias + p * NR : bias;
    const int n = std::min<i64>(NR, N - p * NR);
    const Blocks blocks(M);
    if (panel.form >= 0 && last - first > 1) {
        const Expander<T>& f = form_of<T>(panel.form);
        room.resize(NR * K);
        f.expand((const uint8_t*)panel.at, room.data(), K / f.group), b = room.data();
    }
    for (i64 q = first; q < last; q++) {
        const i64 r = q * blocks.each;
        const T* a = x + r * K;
        T* c = out + r * N + p * NR;
        by_count<MR>(std::min(blocks.each, M - r), [&](auto m) {
            if (panel.form >= 0 && last - first == 1)
                piecewise<m>(a, (const uint8_t*)panel.at, form_of<T>(panel.form), added, K, c, N, n);
            else
                block<m>(a, b, added, K, c, N, n, nullptr, 0);
        });
    }
}
namespace shared {
template <class T>
static void grouped_product(const T* x, const Panel* panels, const T* bias, T* out, i64 M, i64 N, i64 K, T* packed) {
    const T* rows = pack(x, packed, M, K);
    const i64 count = (N + NR - 1) / NR, threads = omp_get_num_threads(), blocks = Blocks(M).n;
    const i64 parts = std::clamp<i64>(4 * threads / count, 1, blocks / 4 + 1);
#pragma omp for
    for (i64 u = 0; u < count * parts; u++) {
        const i64 p = u / parts, i = u % parts;
        grouped_panel(rows, panels[p], p, bias, out, M, N, K, blocks * i / parts, blocks * (i + 1) / parts);
    }
}
}  // namespace shared
template <class T>
static void grouped_product(const T* x, const Panel* panels, const T* bias, T* out, i64 M, i64 N, i64 K) {
    std::vector<T> packed(M > 1 ? M * K : 0);
#pragma omp parallel if (M * N * K > 100000)
    shared::grouped_product(x, panels, bias, out, M, N, K, packed.data());
}
EXPORT(grouped_product)
