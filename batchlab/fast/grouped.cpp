// Weights that stay in groups of whole numbers with scales. Made from the cells of nbs/4_fast/23_four_bits.ipynb by .ci/cpp: edit
// the notebook.
#include "packed.cpp"

struct fp16 {
    uint16_t x;
};
[[maybe_unused]] static inline float one(const fp16* p) {
    const uint32_t sign = (uint32_t)(p->x & 0x8000) << 16;
    uint32_t u = (uint32_t)(p->x & 0x7fff) << 13;
    if ((p->x & 0x7c00) != 0x7c00) {
        float f;
        memcpy(&f, &u, 4), f *= 0x1p112f, memcpy(&u, &f, 4);  // the exponent of fp32; also right for the smallest numbers
    } else
        u |= 0x7f800000;  // an infinity, or no number
    u |= sign;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
// How groups are stored: of NR outputs the scales, in fp32 (`wide`) or fp16, and the offsets (`offsets` is 1) or the zero points
// (2) if there are some; then the numbers, of which those of 4 bits are stored plus `zero`
struct Form {
    i64 bits, group, zero, wide, offsets;
    i64 scales() const { return NR * (wide ? 4 : 2) * (offsets ? 2 : 1); }
    i64 bytes() const { return scales() + NR * group * bits / 8; }
};
static const Form FORMS[] = {
    {4, 32, 8, 0, 0}, {4, 32, 0, 0, 1},  {4, 32, 0, 1, 1}, {8, 32, 0, 0, 0}, {8, 32, 0, 0, 1},  {8, 32, 0, 1, 1},
    {8, 16, 0, 1, 0}, {4, 32, 0, 0, 2},  {4, 64, 8, 0, 0}, {4, 64, 0, 0, 2}, {4, 128, 8, 0, 0}, {4, 128, 0, 0, 2},
    {4, 32, 8, 1, 0}, {4, 128, 8, 1, 0}, {4, 32, 0, 1, 2}, {8, 32, 0, 0, 2}, {8, 128, 0, 0, 0}, {8, 128, 0, 0, 2},
    {8, 32, 0, 1, 0}, {8, 128, 0, 1, 0}, {8, 32, 0, 1, 2},
};
// Where number k of output o is among the numbers of a group, counted in bits / 8 bytes
static inline i64 number_at(const Form& f, i64 o, i64 k) {
    const i64 lane = o % 8 * 2 + k % 2, eight = o / 8;
    return f.bits == 8 ? (k / 2 * 4 + eight) * 16 + lane : ((k / 16 * 4 + eight) * 16 + lane) * 8 + k % 16 / 2;
}

// Whole numbers [N, K] and their scales and offsets or zero points [N, K / group] as panels; the last is filled up with zeros.
// at(form, output, k) says where a number is, counted in bits / 8 bytes; one of 8 bits is stored plus `more`.
template <class T, class F>
static void put_groups(const int8_t* numbers, const T* scales, const T* offsets, uint8_t* to, i64 N, i64 K, const Form& f, F at,
                       int more) {
    const i64 n = K / f.group, size = f.wide ? 4 : 2;
#pragma omp parallel for schedule(dynamic)
    for (i64 p = 0; p < (N + NR - 1) / NR; p++)
        for (i64 g = 0; g < n; g++) {
            uint8_t *group = to + (p * n + g) * f.bytes(), *q = group + f.scales();
            memset(group, 0, f.bytes());
            for (i64 o = 0; o < NR && p * NR + o < N; o++) {
                const i64 r = p * NR + o;
                memcpy(group + o * size, (const uint8_t*)scales + (r * n + g) * size, size);
                if (f.offsets) memcpy(group + (NR + o) * size, (const uint8_t*)offsets + (r * n + g) * size, size);
                const int8_t* x = numbers + r * K + g * f.group;
                for (i64 k = 0; k < f.group; k++) {
                    const i64 i = at(f, o, k);
                    if (f.bits == 8)
                        q[i] = x[k] + more;
                    else
                        q[i / 2] |= (x[k] + f.zero) << i % 2 * 4;
                }
            }
        }
}
template <class T>
static void pack_groups(const int8_t* numbers, const T* scales, const T* offsets, uint8_t* to, i64 N, i64 K, i64 form) {
    put_groups(numbers, scales, offsets, to, N, K, FORMS[form], number_at, 0);
}
EXPORT(pack_groups)

#ifdef __AVX512F__
static inline vf twice(const float* p) {  // p[0], p[0], p[1], p[1], ...
    const __m512i at = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return (vf)_mm512_permutexvar_ps(at, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}
static inline vf twice(const fp16* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p), low = _mm_unpacklo_epi16(x, x), high = _mm_unpackhi_epi16(x, x);
    return (vf)_mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}
template <class S>
static inline void read_scales(const uint8_t* from, const Form& f, vf (&a)[4], vf (&b)[4]) {  // of 8 outputs in each
    for (int o = 0; o < 4; o++) {
        a[o] = twice((const S*)from + 8 * o);
        if (f.offsets) b[o] = twice((const S*)from + NR + 8 * o);
        if (f.offsets == 2) b[o] *= -a[o];  // (x - b) a = a x - b a
    }
}
#endif

#ifdef __AVX512F__
// Calls put(v) for numbers k and k + 1 of all outputs of a panel, k ascending: v[o] has outputs 8 o to 8 o + 7, for each the k-th
// and the next
template <int BITS, class F>
static inline void expand(const uint8_t* from, const Form& f, i64 K, F put) {
    vf table, a[4], b[4] = {all(-0.f), all(-0.f), all(-0.f), all(-0.f)};
    for (int i = 0; i < 16; i++) table[i] = i - f.zero;
    for (i64 k = 0; k < K; k += 16) {
        if (k % f.group == 0) {
            f.wide ? read_scales<float>(from, f, a, b) : read_scales<fp16>(from, f, a, b);
            from += f.scales();
        }
        __m512i four[4];
        if (BITS == 4)
            for (int o = 0; o < 4; o++, from += 64) four[o] = _mm512_loadu_si512(from);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            vf v[4];
            for (int o = 0; o < 4; o++) {
                __m512 x;
                if (BITS == 4)  // the lower 4 bits of each lane choose
                    x = _mm512_permutexvar_ps(_mm512_srli_epi32(four[o], 4 * j), (__m512)table);
                else {
                    x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
                    from += 16;
                }
                v[o] = (vf)_mm512_fmadd_ps((__m512)a[o], x, (__m512)b[o]);
            }
            put(v);
        }
    }
}
#endif

#ifdef __AVX512F__
static inline __m512i rounded(vf a, vf b) {  // in bf16
#ifdef __AVX512BF16__
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    const __m256i p = _mm512_cvtepi32_epi16((__m512i)nearest(a)), q = _mm512_cvtepi32_epi16((__m512i)nearest(b));
    return _mm512_inserti64x4(_mm512_castsi256_si512(p), q, 1);
#endif
}
static inline void put_rows(bf16* to, const vf (&v)[4]) {
    _mm512_storeu_si512(to, rounded(v[0], v[1])), _mm512_storeu_si512(to + NR, rounded(v[2], v[3]));
}
static inline void put_rows(float* to, const vf (&v)[4]) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    for (int i = 0; i < 4; i++) {
        const __m512 a = (__m512)v[i % 2 * 2], b = (__m512)v[i % 2 * 2 + 1];
        store(to + i * W, (vf)_mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(i / 2)), b));
    }
}
template <class T>
static void expand_panel(const uint8_t* from, const Form& f, i64 K, T* to) {
    const auto put = [&](const vf(&v)[4]) { put_rows(to, v), to += 2 * NR; };
    f.bits == 4 ? expand<4>(from, f, K, put) : expand<8>(from, f, K, put);
}
#else
static inline float scale_at(const uint8_t* from, const Form& f, i64 i) {
    return f.wide ? one((const float*)from + i) : one((const fp16*)from + i);
}
template <class T>
static void expand_panel(const uint8_t* from, const Form& f, i64 K, T* to) {
    float x[2 * NR];
    for (i64 g = 0; g < K / f.group; g++, from += f.bytes())
        for (i64 k = 0; k < f.group; k += 2, to += 2 * NR) {
            for (i64 o = 0; o < NR; o++)
                for (i64 i = 0; i < 2; i++) {
                    const i64 at = number_at(f, o, k + i);
                    const uint8_t* q = from + f.scales();
                    const int number = f.bits == 4 ? (int)(q[at / 2] >> at % 2 * 4 & 15) - (int)f.zero : (int8_t)q[at];
                    const float scale = scale_at(from, f, o), offset = f.offsets ? scale_at(from, f, NR + o) : -0.f;
                    x[std::is_same_v<T, float> ? i * NR + o : 2 * o + i] =
                        scale * number + (f.offsets == 2 ? -scale * offset : offset);
                }
            for (i64 i = 0; i < 2 * NR; i += W) store(to + i, load(x + i));
        }
}
#endif

#ifdef __AVX512BF16__
// A block of M rows, multiplied while the numbers are in registers; they are put into `room`, too, if that is not null
template <int M, int BITS, bool KEEP>
static void first_block(const bf16* a, const uint8_t* from, const Form& f, const bf16* bias, i64 K, bf16* c, i64 ldc, int n,
                        bf16* room) {
    vf s[M][2] = {};
    expand<BITS>(from, f, K, [&](const vf(&v)[4]) {
        const __m512i y[2] = {rounded(v[0], v[1]), rounded(v[2], v[3])};
        if (KEEP) _mm512_storeu_si512(room, y[0]), _mm512_storeu_si512(room + NR, y[1]), room += 2 * NR;
        for (int i = 0; i < M; i++) {
            int32_t pair;
            memcpy(&pair, a + 2 * i, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            for (int j = 0; j < 2; j++) s[i][j] = (vf)_mm512_dpbf16_ps((__m512)s[i][j], x, (__m512bh)y[j]);
        }
        a += 2 * M;
    });
    for (int i = 0; i < M; i++)
        for (int j = 0; j < 2; j++) {
            const int m = std::clamp(n - j * W, 0, W);
            const vf added = bias ? part(bias + j * W, m) : n == NR ? vf{} : all(-0.f);  // as `block` does it
            if (m) part_store(c + i * ldc + j * W, s[i][j] + added, m);
        }
}
#endif

struct Panel {
    const void* at;
    i64 form;  // of FORMS; -1 for a panel of the dtype
};
// The rows of a product: the first block is small, since its sums share the registers with what expands a panel for all
struct RowBlocks {
    i64 rows, first, others;
    RowBlocks(i64 rows)
        : rows(rows), first(rows > std::min(8, MR) ? std::min(5, MR) : rows), others((rows - first + MR - 1) / MR) {}
    i64 count() const { return 1 + others; }
    i64 begin(i64 q) const { return q < 2 ? q * first : first + (rows - first) * (q - 1) / others; }
    i64 size(i64 q) const { return begin(q + 1) - begin(q); }
};
// Blocks first to last (excluded) of all packed rows by a panel, the p-th of N outputs
template <class T>
static void grouped_panel(const T* x, const Panel& panel, i64 p, const T* bias, T* out, i64 M, i64 N, i64 K, i64 first,
                          i64 last) {
    static thread_local std::vector<T> room;
    const T *b = (const T*)panel.at, *added = bias ? bias + p * NR : bias;
    const int n = std::min<i64>(NR, N - p * NR);
    const RowBlocks blocks(M);
    i64 bytes = NR * K * sizeof(T);
    const auto at = [&](i64 q) { return out + blocks.begin(q) * N + p * NR; };
    if (panel.form >= 0) {
        const Form& f = FORMS[panel.form];
        const auto* from = (const uint8_t*)panel.at;
        room.resize(NR * K), b = room.data(), bytes = K / f.group * f.bytes();
#ifdef __AVX512BF16__
        if constexpr (std::is_same_v<T, bf16>) {
            by_count<MR>(blocks.size(first), [&](auto m) {
                const T* a = x + blocks.begin(first) * K;
                const auto multiply = [&](auto bits, auto keep) {
                    first_block<m, bits, keep>(a, from, f, added, K, at(first), N, n, room.data());
                };
                const std::integral_constant<int, 4> four;
                const std::integral_constant<int, 8> eight;
                if (last - first > 1)
                    f.bits == 4 ? multiply(four, std::true_type()) : multiply(eight, std::true_type());
                else
                    f.bits == 4 ? multiply(four, std::false_type()) : multiply(eight, std::false_type());
            });
            first++;
        } else
#endif
            expand_panel(from, f, K, room.data());
    }
    const char* soon = (const char*)panel.at + bytes;  // the next panel, in parts
    const int lines = last > first ? bytes / 64 / (last - first) : 0;
    for (i64 q = first; q < last; q++, soon += lines * 64)
        by_count<MR>(blocks.size(q), [&](auto m) { block<m>(x + blocks.begin(q) * K, b, added, K, at(q), N, n, soon, lines); });
}

namespace shared {
template <class T>
static void grouped_product(const T* x, const Panel* panels, const T* bias, T* out, i64 M, i64 N, i64 K, T* packed) {
    if (!M) return;
    const RowBlocks blocks(M);
#pragma omp for
    for (i64 q = 0; q < blocks.count(); q++) {
        const i64 r = blocks.begin(q);
        pack_block([=](int i) { return (const uint32_t*)(x + (r + i) * K); }, (uint32_t*)(packed + r * K), blocks.size(q),
                   K * sizeof(T) / 4);
    }
    const i64 count = (N + NR - 1) / NR, threads = omp_get_num_threads();
    const i64 parts = std::clamp<i64>(4 * threads / count, 1, blocks.count() / 4 + 1);
#pragma omp for
    for (i64 u = 0; u < count * parts; u++) {
        const i64 p = u / parts, i = u % parts;
        grouped_panel<T>(packed, panels[p], p, bias, out, M, N, K, blocks.count() * i / parts, blocks.count() * (i + 1) / parts);
    }
}
}  // namespace shared
template <class T>
static void grouped_product(const T* x, const Panel* panels, const T* bias, T* out, i64 M, i64 N, i64 K) {
    std::vector<T> packed(M * K);
#pragma omp parallel if (M * N * K > 100000)
    shared::grouped_product(x, panels, bias, out, M, N, K, packed.data());
}
EXPORT(grouped_product)
