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
// How groups are stored: of NR outputs the scales, in fp32 (`wide`) or fp16, and the offsets if there are some; then the numbers,
// of which those of 4 bits are stored plus `zero`
struct Form {
    i64 bits, group, zero, wide, offsets;
    i64 scales() const { return NR * (wide ? 4 : 2) * (offsets ? 2 : 1); }
    i64 bytes() const { return scales() + NR * group * bits / 8; }
};
static const Form FORMS[] = {
    {4, 32, 8, 0, 0}, {4, 32, 0, 0, 1}, {4, 32, 0, 1, 1}, {8, 32, 0, 0, 0},
    {8, 32, 0, 0, 1}, {8, 32, 0, 1, 1}, {8, 16, 0, 1, 0}, {8, 32, 0, 1, 0},
};
// Where number k of output o is among the numbers of a group, counted in bits / 8 bytes
static inline i64 number_at(const Form& f, i64 o, i64 k) {
    const i64 lane = o % 8 * 2 + k % 2, eight = o / 8;
    return f.bits == 8 ? (k / 2 * 4 + eight) * 16 + lane : ((k / 16 * 4 + eight) * 16 + lane) * 8 + k % 16 / 2;
}

static inline uint64_t squeeze(uint64_t x) {  // numbers of 4 bits in bytes 0, 2, 4 and 6, in 16 bits
    x &= 0x000f000f000f000f, x = (x | x >> 12) & 0x000000ff000000ff;
    return (x | x >> 24) & 0xffff;
}
// The numbers x of a group of output o, those of 4 bits not negative, among the numbers q of its panel
template <int GROUP>
static inline void put_group(i64 bits, i64 o, const int8_t* x, uint8_t* q) {
    if (bits == 8) {
        for (int k = 0; k < GROUP; k += 2) memcpy(q + o * 2 + k * 32, x + k, 2);
        return;
    }
    for (int k = 0; k < GROUP; k += 16) {
        uint64_t a, b;
        memcpy(&a, x + k, 8), memcpy(&b, x + k + 8, 8);
        const uint64_t woven = squeeze(a) | squeeze(b) << 16 | squeeze(a >> 8) << 32 | squeeze(b >> 8) << 48;
        memcpy(q + o * 8 + k * 16, &woven, 8);
    }
}
static inline void put_row(const Form& f, i64 o, const int8_t* x, uint8_t* q) {
    f.group == 16 ? put_group<16>(f.bits, o, x, q) : put_group<32>(f.bits, o, x, q);
}
#ifdef TILES
// As `put_row`, for a matrix unit: of each 32 numbers of 4 bits, the k-th of an output and the 8th, 16th and 24th behind it are
// 16 bits, and the outputs' 16 bytes lie one behind the other
static inline void put_tile_row(const Form& f, i64 o, const int8_t* x, uint8_t* q) {
    if (f.bits == 8) return put_row(f, o, x, q);
    for (i64 k = 0; k < f.group; k += 32, x += 32, q += 16 * NR) {
        uint64_t eight[4];
        memcpy(eight, x, 32);
        const __m128i low = _mm_cvtsi64_si128(eight[0] | eight[1] << 4), high = _mm_cvtsi64_si128(eight[2] | eight[3] << 4);
        _mm_storeu_si128((__m128i*)(q + 16 * o), _mm_unpacklo_epi8(low, high));
    }
}
#endif
typedef void (*Put)(const Form& f, i64 o, const int8_t* x, uint8_t* q);  // `put_row`, or what has another order

// Whole numbers [N, K] and their scales and offsets [N, K / group] as panels; the last is filled up with zeros
template <Put PUT, class T>
static void panels_of_groups(const int8_t* numbers, const T* scales, const T* offsets, uint8_t* to, i64 N, i64 K, const Form& f) {
    const i64 n = K / f.group, size = f.wide ? 4 : 2;
#pragma omp parallel for schedule(dynamic)
    for (i64 p = 0; p < (N + NR - 1) / NR; p++)
        for (i64 g = 0; g < n; g++) {
            uint8_t* group = to + (p * n + g) * f.bytes();
            memset(group, 0, f.bytes());
            for (i64 o = 0; o < NR && p * NR + o < N; o++) {
                const i64 r = p * NR + o;
                int8_t x[32];
                for (i64 k = 0; k < f.group; k++) x[k] = numbers[r * K + g * f.group + k] + f.zero;
                memcpy(group + o * size, (const uint8_t*)scales + (r * n + g) * size, size);
                if (f.offsets) memcpy(group + (NR + o) * size, (const uint8_t*)offsets + (r * n + g) * size, size);
                PUT(f, o, x, group + f.scales());
            }
        }
}
template <class T>
static void pack_groups(const int8_t* numbers, const T* scales, const T* offsets, uint8_t* to, i64 N, i64 K, i64 form) {
#ifdef TILES
    if (std::is_same_v<T, bf16> && tiles) return panels_of_groups<put_tile_row>(numbers, scales, offsets, to, N, K, FORMS[form]);
#endif
    panels_of_groups<put_row>(numbers, scales, offsets, to, N, K, FORMS[form]);
}
EXPORT(pack_groups)

// The formats of GGUF files: the bytes and the weights of a block, and the form of its groups
struct Block {
    const char* name;
    i64 bytes, weights, form;
};
static const Block BLOCKS[] = {
    {"Q4_0", 18, 32, 0}, {"Q4_1", 20, 32, 1},   {"Q5_0", 22, 32, 3},   {"Q5_1", 24, 32, 4},
    {"Q8_0", 34, 32, 3}, {"Q4_K", 144, 256, 2}, {"Q5_K", 176, 256, 5}, {"Q6_K", 210, 256, 6},
};
// A block, taken apart: its whole numbers, and the scales and offsets of its groups in the type of the form
struct Unpacked {
    int8_t x[256];
    union {
        uint16_t half[2][16];
        float wide[2][16];
    };
};
static inline void nibbles(const uint8_t* q, int8_t* x, i64 n) {  // the lower halves of n bytes, then the upper ones
    for (i64 i = 0; i < n; i++) x[i] = q[i] & 15, x[n + i] = q[i] >> 4;
}
static inline void fifth_bits(const uint8_t* h, int8_t* x) {
    uint32_t bits;
    memcpy(&bits, h, 4);
    for (int i = 0; i < 32; i++) x[i] |= (bits >> i & 1) << 4;
}
template <int BITS>
static inline void high_bits(const uint8_t* h, int8_t* x) {  // of each of 32 bytes the lowest bits, then the next, ...
    for (int j = 0; j < 8 / BITS; j++)
        for (int i = 0; i < 32; i++) x[32 * j + i] |= (h[i] >> BITS * j & ((1 << BITS) - 1)) << 4;
}
static inline void subtract(int8_t* x, i64 n, int8_t y) {
    for (i64 i = 0; i < n; i++) x[i] -= y;
}
static inline void k_scales(const uint8_t* b, Unpacked& u) {  // of 8 groups: 6 bits of each are in 12 bytes
    const float scale = one((const fp16*)b), offset = one((const fp16*)b + 1);
    const uint8_t *low = b + 4, *mid = b + 8, *high = b + 12;
    for (int i = 0; i < 4; i++) {
        u.wide[0][i] = scale * (low[i] & 63), u.wide[0][i + 4] = scale * ((high[i] & 15) | (low[i] >> 2 & 48));
        u.wide[1][i] = -(offset * (mid[i] & 63)), u.wide[1][i + 4] = -(offset * (high[i] >> 4 | (mid[i] >> 2 & 48)));
    }
}
static inline void unpack_k(i64 kind, const uint8_t* b, Unpacked& u) {  // of blocks of 256
    if (kind == 7) {
        for (int j = 0; j < 2; j++) {
            nibbles(b + 64 * j, u.x + 128 * j, 64);
            high_bits<2>(b + 128 + 32 * j, u.x + 128 * j);
        }
        for (int g = 0; g < 16; g++) u.wide[0][g] = one((const fp16*)(b + 208)) * (int8_t)b[192 + g];
        return subtract(u.x, 256, 32);
    }
    k_scales(b, u);
    for (int j = 0; j < 4; j++) nibbles(b + (kind == 5 ? 16 : 48) + 32 * j, u.x + 64 * j, 32);
    if (kind == 6) high_bits<1>(b + 16, u.x);
}

static inline void unpack(i64 kind, const uint8_t* b, Unpacked& u) {
    if (kind > 4) return unpack_k(kind, b, u);
    const bool offsets = kind == 1 || kind == 3;
    memcpy(u.half[0], b, 2), b += 2;
    if (offsets) memcpy(u.half[1], b, 2), b += 2;
    if (kind == 4) {
        memcpy(u.x, b, 32);
        return;
    }
    const bool five = kind > 1;
    nibbles(five ? b + 4 : b, u.x, 16);
    if (five) fifth_bits(b, u.x);
    if (kind == 2) subtract(u.x, 32, 16);
}
template <Put PUT>
static void pack_panel(const i64* rows, uint8_t* to, i64 count, i64 K, i64 kind) {  // of so many rows
    const Block z = BLOCKS[kind];
    const Form f = FORMS[z.form];
    const i64 size = f.wide ? 4 : 2, groups = z.weights / f.group;
    if (count < NR) memset(to, 0, K / f.group * f.bytes());
    Unpacked u;
    for (i64 i = 0; i < K / z.weights; i++)
        for (i64 o = 0; o < count; o++) {
            unpack(kind, (const uint8_t*)rows[o] + i * z.bytes, u);
            for (i64 g = 0; g < groups; g++) {
                uint8_t* group = to + (i * groups + g) * f.bytes();
                for (i64 j = 0; j < 1 + f.offsets; j++) {
                    const void* from = f.wide ? (const void*)(u.wide[j] + g) : u.half[j] + g;
                    memcpy(group + (j * NR + o) * size, from, size);
                }
                PUT(f, o, u.x + g * f.group, group + f.scales());
            }
        }
}

// rows: where each of N rows of K weights in blocks of this kind lies; `to`: panels, of which the last is filled up with zeros.
// With `changed` only those are written that are others than what is there, and counted
template <Put PUT>
static void panels_of_blocks(const i64* rows, uint8_t* to, i64* changed, i64 N, i64 K, i64 kind) {
    const Form f = FORMS[BLOCKS[kind].form];
    const i64 bytes = K / f.group * f.bytes();
    i64 others = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : others)
    for (i64 p = 0; p < (N + NR - 1) / NR; p++) {
        static thread_local std::vector<uint8_t> room;
        uint8_t* panel = to + p * bytes;
        if (changed) room.resize(bytes);
        uint8_t* packed = changed ? room.data() : panel;
        pack_panel<PUT>(rows + p * NR, packed, std::min<i64>(NR, N - p * NR), K, kind);
        if (changed && memcmp(panel, packed, bytes)) memcpy(panel, packed, bytes), others++;
    }
    if (changed) *changed = others;
}
template <class T>
static void pack_blocks(const i64* rows, uint8_t* to, i64* changed, i64 N, i64 K, i64 kind) {
#ifdef TILES
    if (std::is_same_v<T, bf16> && tiles) return panels_of_blocks<put_tile_row>(rows, to, changed, N, K, kind);
#endif
    panels_of_blocks<put_row>(rows, to, changed, N, K, kind);
}
EXPORT(pack_blocks)

template <int GROUP, class T>
static inline void scale_group(const int8_t* x, int zero, float scale, float offset, T* to) {
    float y[GROUP];
    for (int k = 0; k < GROUP; k++) y[k] = scale * (x[k] - zero) + offset;
    for (int k = 0; k < GROUP; k += W) store(to + k, load(y + k));
}
template <class T>
static void dequantize_blocks(const i64* rows, T* to, i64 N, i64 K, i64 kind) {
    const Block z = BLOCKS[kind];
    const Form f = FORMS[z.form];
#pragma omp parallel for if (N * K > 100000)
    for (i64 r = 0; r < N; r++) {
        Unpacked u;
        for (i64 i = 0; i < K / z.weights; i++) {
            unpack(kind, (const uint8_t*)rows[r] + i * z.bytes, u);
            for (i64 g = 0; g < z.weights / f.group; g++) {
                const auto at = [&](int j) { return f.wide ? u.wide[j][g] : one((const fp16*)u.half[j] + g); };
                const float scale = at(0), offset = f.offsets ? at(1) : -0.f;
                T* at_group = to + r * K + i * z.weights + g * f.group;
                if (f.group == 32)
                    scale_group<32>(u.x + g * 32, f.zero, scale, offset, at_group);
                else
                    scale_group<16>(u.x + g * 16, f.zero, scale, offset, at_group);
            }
        }
    }
}
EXPORT(dequantize_blocks)

#ifdef __AVX512F__
static inline vf load(const fp16* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
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
    }
}
#endif

#ifdef __AVX512F__
// The numbers of a panel, of which the k-th is the next
template <int BITS>
struct Expander {
    const uint8_t* from;
    const Form& f;
    i64 k = 0;
    vf table, a[4], b[4];
    Expander(const uint8_t* from, const Form& f) : from(from), f(f) {
        for (auto& v : b) v = all(-0.f);
        for (int i = 0; i < 16; i++) table[i] = i - f.zero;
    }
    // Calls put(v) for numbers k and k + 1 of all outputs, k ascending, up to `end`, a multiple of 16: v[o] has outputs 8 o to
    // 8 o + 7, for each the k-th and the next
    template <class F>
    inline void to(i64 end, F put) {
        for (; k < end; k += 16) some(put);
    }
    template <class F>
    inline void some(F put) {
        if (k % f.group == 0) {
            fetch_ahead(from, f.scales());
            f.wide ? read_scales<float>(from, f, a, b) : read_scales<fp16>(from, f, a, b);
            from += f.scales();
        }
        fetch_ahead(from, 16 * NR * BITS / 8);
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
};
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
    f.bits == 4 ? Expander<4>(from, f).to(K, put) : Expander<8>(from, f).to(K, put);
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
                    x[std::is_same_v<T, float> ? i * NR + o : 2 * o + i] = std::fma(scale, (float)number, offset);
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
    Expander<BITS>(from, f).to(K, [&](const vf(&v)[4]) {
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
// Room for n numbers that begins where a cache line does
template <class T>
static inline T* lines_of(std::vector<T>& room, i64 n) {
    room.resize(n + 64 / sizeof(T));
    return (T*)(((uintptr_t)room.data() + 63) & ~(uintptr_t)63);
}
// Blocks first to last (excluded) of all packed rows by a panel, the p-th of N outputs
template <class T>
static void grouped_panel(const T* x, const Panel& panel, i64 p, const T* bias, T* out, i64 M, i64 N, i64 K, i64 first,
                          i64 last) {
    static thread_local std::vector<T> own;
    const T *b = (const T*)panel.at, *added = bias ? bias + p * NR : bias;
    const int n = std::min<i64>(NR, N - p * NR);
    const RowBlocks blocks(M);
    i64 bytes = NR * K * sizeof(T);
    const auto at = [&](i64 q) { return out + blocks.begin(q) * N + p * NR; };
    if (panel.form >= 0) {
        const Form& f = FORMS[panel.form];
        const auto* from = (const uint8_t*)panel.at;
        T* room = lines_of(own, NR * K);
        b = room, bytes = K / f.group * f.bytes();
#ifdef __AVX512BF16__
        if constexpr (std::is_same_v<T, bf16>) {
            by_count<MR>(blocks.size(first), [&](auto m) {
                const T* a = x + blocks.begin(first) * K;
                const auto multiply = [&](auto bits, auto keep) {
                    first_block<m, bits, keep>(a, from, f, added, K, at(first), N, n, room);
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
            expand_panel(from, f, K, room);
    }
    const char* soon = (const char*)panel.at + bytes;  // the next panel, in parts
    const int lines = last > first ? bytes / 64 / (last - first) : 0;
    for (i64 q = first; q < last; q++, soon += lines * 64)
        by_count<MR>(blocks.size(q), [&](auto m) { block<m>(x + blocks.begin(q) * K, b, added, K, at(q), N, n, soon, lines); });
}

#ifdef TILES
constexpr int LEAD = 64;  // numbers of each output that are expanded before the unit reads them
template <class E>
static void tiled_panel(const bf16* x, E numbers, const bf16* bias, bf16* out, i64 p, i64 M, i64 N, i64 K, i64 first, i64 last) {
    static thread_local std::vector<bf16> own;
    bf16 *const room = lines_of(own, NR * K), *to = room;
    const auto expand = [&](i64 end) {
        numbers.to(std::min(end, K), [&](const auto& v) { put_rows(to, v), to += 2 * NR; });
        asm volatile("" : : : "memory");  // tiles are loaded where the compiler does not see it
    };
    expand(LEAD);
    tile_panels(x, room - p * NR * K, M, K, first, last, p, p + 1, no_sums, storing(bias, out, N),
                [&](i64, i64 k) { expand(k + LEAD + 32); });
}
#endif

#ifdef TILES
// The numbers of a panel that `put_tile_row` filled, 32 of each output at a time: one output's behind another's
struct RowExpander {
    const uint8_t* from;
    const Form& f;
    vf numbers;
    i64 k = 0, left = 0;              // numbers before, and of the group
    alignas(64) bf16 tables[NR][16];  // what the 16 numbers of 4 bits stand for, by output
    RowExpander(const uint8_t* from, const Form& f) : from(from), f(f) {
        for (int i = 0; i < 16; i++) numbers[i] = i - f.zero;
    }
    template <class S>
    inline void read_tables() {
        alignas(64) float a[NR], b[NR];
        for (int o = 0; o < NR; o += W) {
            const vf scale = load((const S*)from + o), added = f.offsets ? load((const S*)from + NR + o) : all(-0.f);
            store(a + o, scale), store(b + o, added);
        }
        // a and b are then read from memory: repeating a register's number takes a permutation
        asm volatile("" : : : "memory");
        const auto line = [&](int o) { return (vf)_mm512_fmadd_ps(_mm512_set1_ps(a[o]), (__m512)numbers, _mm512_set1_ps(b[o])); };
        for (int o = 0; o < NR; o += 2) _mm512_store_si512(tables[o], rounded(line(o), line(o + 1)));
        from += f.scales(), left = f.group;
    }
    inline void next(bf16* to) {  // 32 numbers
        const __m512i by = _mm512_inserti64x4(_mm512_set1_epi64(0), _mm256_set1_epi16(8), 1);
        const __m512i shifts = _mm512_add_epi16(by, _mm512_maskz_set1_epi64(0xcc, 0x0004000400040004));
        if (!left) f.wide ? read_tables<float>() : read_tables<fp16>();
        // the lowest 5 bits of each lane choose: the table is there twice, so the fifth says nothing
#pragma GCC unroll 4
        for (int o = 0; o < NR; o++) {
            const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)tables[o]));
            const __m512i four = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(from + 16 * o)));
            _mm512_store_si512(to + 32 * o, _mm512_permutexvar_epi16(_mm512_srlv_epi16(four, shifts), table));
        }
        fetch_ahead(from, 16 * NR + f.scales());
        k += 32, left -= 32, from += 16 * NR;
        asm volatile("" : : : "memory");  // tiles are loaded where the compiler does not see it
    }
};
static inline void put_rows(bf16* to, const __m512i (&v)[2]) {
    _mm512_storeu_si512(to, v[0]), _mm512_storeu_si512(to + NR, v[1]);
}
// The same, as an `Expander` has them
struct TurnedRows : RowExpander {
    using RowExpander::RowExpander;
    template <class F>
    inline void to(i64 end, F put) {
        alignas(64) __m512i x[NR];
        while (k < end) {
            next((bf16*)x);
            turn(x), turn(x + W);
            for (int i = 0; i < W; i++) {
                const __m512i pairs[2] = {x[i], x[i + W]};
                put(pairs);
            }
        }
    }
};
#endif

#ifdef TILES
constexpr int MOST_LEFT = 128;  // so many rows are multiplied with the weights on the left
// Of the eight registers 0 to 3 hold sums of two times 16 outputs and two times 16 rows, 4 and 5 rows in pairs, 6 and 7 outputs
static void shape_rows(int m) {
    TileShapes shapes(0);
    const int first = std::min(m, TR), second = m - first;
    for (int t : {0, 2, 4}) shapes.set(t, TR, 4 * first);
    for (int t : {1, 3, 5}) shapes.set(t, second ? TR : 0, 4 * second);
    shapes.use();
}
// sums[output][row]: a panel times m rows x, packed. next(k) is where 32 numbers of each output are, from the k-th on
template <bool TWO, class F>
static void sums_of_rows(F next, const bf16* x, int m, i64 K, float (*sums)[NR]) {
    _tile_zero(0);
    _tile_zero(2);
    if (TWO) {
        _tile_zero(1);
        _tile_zero(3);
    }
    for (i64 k = 0; k < K; k += 32) {
        const bf16* w = next(k);
        _tile_loadd(4, x + k * m, 4 * m);
        if (TWO) _tile_loadd(5, x + k * m + 2 * TR, 4 * m);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 6, 4);
        if (TWO) {
            _tile_dpbf16ps(1, 6, 5);
        }
        _tile_loadd(7, w + TR * 32, 64);
        _tile_dpbf16ps(2, 7, 4);
        if (TWO) {
            _tile_dpbf16ps(3, 7, 5);
        }
    }
    _tile_stored(0, sums[0], 4 * NR);
    _tile_stored(2, sums[TR], 4 * NR);
    if (TWO) {
        _tile_stored(1, sums[0] + TR, 4 * NR);
        _tile_stored(3, sums[TR] + TR, 4 * NR);
    }
}
#endif

#ifdef TILES
static void rows_panel(const bf16* x, const uint8_t* from, const Form& f, const bf16* bias, bf16* out, i64 p, i64 M, i64 N, i64 K,
                       i64 first, i64 last) {
    static thread_local std::vector<bf16> own;
    alignas(64) float sums[2][NR][NR], turned[TR][NR];
    const i64 kept = last - first > 1 ? K : 2 * LEAD;  // all numbers, or those that are expanded ahead
    bf16* const room = lines_of(own, NR * K);
    RowExpander numbers(from, f);
    const Blocks<2 * TR> blocks(M);
    int shaped = 0, now = 0, done = 0, rows = 0;
    i64 row = 0;  // the block before: its sums are put while the next one is computed
    const auto put_some = [&] {
        const int m = std::min(TR, rows - done);
        if (!m) return;
        pack_block([&](int o) { return (const uint32_t*)sums[!now][o] + done; }, (uint32_t*)turned[0], NR, m, NR);
        storing(bias, out, N)(turned, m, row + done, p), done += m;
    };
    const auto expanded = [&](i64 k) {
        while (numbers.k < std::min(k + LEAD, K)) numbers.next(room + numbers.k % kept * NR);
        put_some();
        return room + k % kept * NR;
    };
    for (i64 q = first; q < last; q++) {
        const i64 at = q * blocks.each;
        const int m = std::min(blocks.each, M - at);
        if (m != shaped) shape_rows(shaped = m);
        (m > TR ? sums_of_rows<true, decltype(expanded)> : sums_of_rows<false, decltype(expanded)>)(expanded, x + at * K, m, K,
                                                                                                    sums[now]);
        asm volatile("" : : : "memory");
        while (done < rows) put_some();
        now = !now, done = 0, rows = m, row = at;
    }
    while (done < rows) put_some();
}
#endif

#ifdef TILES
namespace shared {
// The pairs of numbers of the rows of each block, one row's beside the other's
static const bf16* pack_pairs(const bf16* x, bf16* to, i64 M, i64 K) {
    if (M == 1) return x;
    constexpr i64 SOME = 256;
    const Blocks<2 * TR> blocks(M);
    const i64 parts = (K + SOME - 1) / SOME;
#pragma omp for
    for (i64 u = 0; u < blocks.n * parts; u++) {
        const i64 r = u / parts * blocks.each, k = u % parts * SOME, m = std::min(blocks.each, M - r);
        pack_block([=](int i) { return (const uint32_t*)(x + (r + i) * K + k); }, (uint32_t*)(to + r * K + k * m), m,
                   std::min(SOME, K - k) / 2);
    }
    return to;
}
static void grouped_tiles(const bf16* x, const Panel* panels, const bf16* bias, bf16* out, i64 M, i64 N, i64 K, bf16* packed) {
    const i64 count = (N + NR - 1) / NR, blocks = Blocks<2 * TR>(M).n, threads = omp_get_num_threads();
    const i64 parts = std::clamp<i64>(4 * threads / count, 1, blocks);
    const auto left = [&](const Panel& z) { return z.form >= 0 && FORMS[z.form].bits == 4 && M <= MOST_LEFT; };
    const bf16* pairs = std::any_of(panels, panels + count, left) ? pack_pairs(x, packed, M, K) : x;
#pragma omp for
    for (i64 u = 0; u < count * parts; u++) {
        const i64 p = u / parts, first = blocks * (u % parts) / parts, last = blocks * (u % parts + 1) / parts;
        const auto [at, form] = panels[p];
        if (form < 0) {
            const auto* w = (const bf16*)at - p * NR * K;
            tile_panels(x, w, M, K, first, last, p, p + 1, no_sums, storing(bias, out, N), fetching(w, K));
        } else if (const auto* from = (const uint8_t*)at; FORMS[form].bits == 8)
            tiled_panel(x, Expander<8>(from, FORMS[form]), bias, out, p, M, N, K, first, last);
        else if (M > MOST_LEFT)
            tiled_panel(x, TurnedRows(from, FORMS[form]), bias, out, p, M, N, K, first, last);
        else
            rows_panel(pairs, from, FORMS[form], bias, out, p, M, N, K, first, last);
    }
    _tile_release();
}
}  // namespace shared
#endif

namespace shared {
template <class T>
static void grouped_product(const T* x, const Panel* panels, const T* bias, T* out, i64 M, i64 N, i64 K, T* packed) {
    if (!M) return;
#ifdef TILES
    if constexpr (std::is_same_v<T, bf16>)
        if (tiles) return shared::grouped_tiles(x, panels, bias, out, M, N, K, packed);
#endif
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
