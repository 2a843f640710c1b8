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
static inline vf load(const fp16* p) {
#ifdef __AVX512F__
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = one(p + i);
    return v;
#endif
}
static inline vf load(const int8_t* p) {
#ifdef __AVX512F__
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = p[i];
    return v;
#endif
}
// How groups are stored: of NR outputs the scales, in fp32 (`wide`) or fp16, and the offsets if there are some, for each `block`
// of numbers; if this has several groups, then a byte of each output for each group, by which its scale is multiplied, and one
// for the offset. Then come the numbers of its groups, those of less than 8 bits plus `zero`
struct Form {
    i64 bits, group, zero, wide, offsets, block;
    i64 groups() const { return block / group; }
    i64 scales() const { return NR * ((wide ? 4 : 2) + (groups() > 1 ? groups() : 0)) * (offsets ? 2 : 1); }
    i64 numbers() const { return NR * group * bits / 8; }
    i64 bytes() const { return scales() + groups() * numbers(); }
};
static const Form FORMS[] = {
    {4, 32, 8, 0, 0, 32},  {4, 32, 0, 0, 1, 32}, {4, 32, 0, 1, 1, 32},  {8, 32, 0, 0, 0, 32},  {8, 32, 0, 1, 0, 32},
    {5, 32, 16, 0, 0, 32}, {5, 32, 0, 0, 1, 32}, {4, 32, 0, 0, 1, 256}, {5, 32, 0, 0, 1, 256}, {6, 16, 32, 0, 0, 256},
};
// The groups of a panel, one behind the other
struct Walk {
    const Form& f;
    const i64 groups, ahead, size, share;  // in a block; bytes of its scales, of a group's numbers, and of a block for each group
    const uint8_t *scales, *numbers, *line;  // of the block; of the group; what is fetched goes by even shares
    i64 g = 0;                               // which of the block it is
    alignas(64) float block[2 * NR];         // of several groups: the scales of the block, and minus its offsets
    Walk(const uint8_t* from, const Form& f)
        : f(f),
          groups(f.groups()),
          ahead(f.scales()),
          size(f.numbers()),
          share(f.bytes() / groups),
          scales(from),
          numbers(from + ahead),
          line(from) {}
    inline void next() {
        numbers += size, line += share;
        if (++g == groups) g = 0, scales = numbers, numbers += ahead;
    }
    inline void read_block() {  // before the scales of a group are read
        if (g || groups == 1) return;
        for (i64 o = 0; o < NR; o += W) {
            store(block + o, load((const fp16*)scales + o));
            if (f.offsets) store(block + NR + o, -load((const fp16*)scales + NR + o));
        }
    }
    template <int BITS = 8>
    __attribute__((always_inline)) inline void fetch() const {
        if (BITS != 5) return fetch_ahead(line, share);
        for (i64 i = 0; i < share; i += 64) __builtin_prefetch(line + 6144 + i, 0, 2);
    }
};
// Where number k of output o is among the numbers of a group, counted in half bytes, if these have 4 bits; else in bytes, once
// they have 8
static inline i64 number_at(const Form& f, i64 o, i64 k) {
    const i64 lane = o % 8 * 2 + k % 2, eight = o / 8;
    return f.bits == 4 ? ((k / 16 * 4 + eight) * 16 + lane) * 8 + k % 16 / 2 : (k / 2 * 4 + eight) * 16 + lane;
}

typedef uint8_t b16 __attribute__((vector_size(16)));
// An order of numbers. Those of `FLAT` bits stay as they are: put(o, x, q) puts 32 numbers x of output o among the numbers q of
// their group. Others are bytes, see `pieces`: arrange(bits, count, line, n) is given n lines of 4 neighbours of each output, of
// which there are `count`, and puts them in order
struct Pairs {
    static constexpr i64 FLAT = 4;
    static inline void put(i64 o, const int8_t* x, uint8_t* q) {
        v4 a, b;
        memcpy(&a, x, 16), memcpy(&b, x + 16, 16);
        a |= a >> 12, b |= b >> 12;  // two pairs each in the lower 16 bits, the even ones first
        const b16 v = (b16)((a & 0xffff) | b << 16);
        const b16 woven = {v[0], v[4], v[8], v[12], v[1], v[5], v[9], v[13], v[2], v[6], v[10], v[14], v[3], v[7], v[11], v[15]};
        memcpy(q + 8 * o, &woven, 8), memcpy(q + 8 * NR + 8 * o, (const uint8_t*)&woven + 8, 8);
    }
    static inline void arrange(i64, i64, uint32_t* line, i64 n) {  // the first two of each, then the others
        for (; n--; line += NR) {
            vu v[NV];
            memcpy(v, line, sizeof v);
            for (int j = 0; j < NV; j++) {
                const vh two[] = {__builtin_convertvector(v[j], vh), __builtin_convertvector(v[j] >> 16, vh)};
                for (int i = 0; i < 2; i++) memcpy((uint16_t*)line + NR * i + W * j, two + i, sizeof *two);
            }
        }
    }
};
#ifdef TILES
// As `Pairs`, for a matrix unit: of each 32 numbers of 4 bits, the k-th of an output and the 8th, 16th and 24th behind it are
// 16 bits, and the outputs' 16 bytes lie one behind the other
struct TilePairs : Pairs {
    static inline void put(i64 o, const int8_t* x, uint8_t* q) {
        uint64_t eight[4];
        memcpy(eight, x, 32);
        const __m128i low = _mm_cvtsi64_si128(eight[0] | eight[1] << 4), high = _mm_cvtsi64_si128(eight[2] | eight[3] << 4);
        _mm_storeu_si128((__m128i*)(q + 16 * o), _mm_unpacklo_epi8(low, high));
    }
};
#endif

// Where numbers of 4, 5 or 6 bits lie, of a line of 4 NR bytes: call(line, by, mask) for each piece of them, whose bits, those of
// `mask`, are `by` bits higher in the bytes of that line. With 5 and 6 bits the first lines are bytes with bits to spare, in
// which the others lie in pieces. In line, so that r is a constant
template <int BITS, class F>
__attribute__((always_inline)) static inline void pieces(int r, F call) {
    if (BITS == 4)
        call(r / 2, r % 2 * 4, 15);
    else if (r < (BITS == 5 ? 5 : 3))
        call(r, 0, (1 << BITS) - 1);
    else if (BITS == 6)
        call(0, 6, 3), call(1, 4, 12), call(2, 2, 48);
    else if (r < 7)
        call(2 * r - 10, 5, 7), call(2 * r - 9, 2, 24);
    else
        call(4, 5, 7), call(1, 4, 8), call(3, 3, 16);
}
template <int BITS>
constexpr int GROUP = BITS == 6 ? 16 : 32;
// A group's numbers x in bytes, as q
template <int BITS>
static inline void put_pieces(const uint8_t* x, uint8_t* q) {
    constexpr i64 L = 4 * NR, N = GROUP<BITS> / 4;
    memset(q, 0, L * N * BITS / 8);
    for (int r = 0; r < N; r++, x += L)
        pieces<BITS>(r, [=](int line, int by, int mask) {
            for (i64 i = 0; i < L; i++) q[line * L + i] |= (x[i] & mask) << by;
        });
}
// Vector j of line r of a group's numbers, in bytes again
template <int BITS>
__attribute__((always_inline)) static inline vu line_of(const uint8_t* q, int r, int j) {
    vu v = {};
    q += j * sizeof v;
    if constexpr (BITS == 8)
        memcpy(&v, q + r * 4 * NR, sizeof v);
    else
        pieces<BITS>(r, [&](int line, int by, uint32_t mask) __attribute__((always_inline)) {
            vu x;
            memcpy(&x, q + line * 4 * NR, sizeof x);
            v |= x >> by & mask * 0x01010101u;
        });
    return v;
}
// call(bits), as a constant
template <class F>
static inline void by_bits(i64 bits, F call) {
    if (bits == 4) return call(std::integral_constant<int, 4>());
    if (bits == 5) return call(std::integral_constant<int, 5>());
    if (bits == 6) return call(std::integral_constant<int, 6>());
    call(std::integral_constant<int, 8>());
}
// A group's numbers in bytes, less `zero`
static void widen(i64 bits, const uint8_t* q, uint8_t zero, uint8_t* to) {
    typedef uint8_t vb __attribute__((vector_size(4 * W)));
    by_bits(bits, [=](auto b) {
        constexpr int BITS = b;
        const auto all = [=](auto less) {
#pragma GCC unroll 8
            for (int r = 0; r < GROUP<BITS> / 4; r++)
                for (int j = 0; j < NV; j++) {
                    vb v = (vb)line_of<BITS>(q, r, j);
                    if (less) v -= zero;
                    memcpy(to + r * 4 * NR + j * sizeof v, &v, sizeof v);
                }
        };
        zero ? all(std::true_type()) : all(std::false_type());
    });
}

// Fills the numbers of a block of a panel; row(o) is where those of output o are, of `count`, until all are there
template <class ORDER, class F>
static inline void put_numbers(const Form& f, uint8_t* to, i64 count, F row) {
    alignas(64) static const int8_t none[256] = {};
    alignas(64) uint32_t lines[64 * NR];
    const int8_t* x[NR];
    for (i64 o = 0; o < NR; o++) x[o] = o < count ? row(o) : none;
    const i64 size = f.numbers(), groups = f.groups();
    if constexpr (ORDER::FLAT > 0)
        if (f.bits == ORDER::FLAT) {
            for (i64 o = 0; o < count; o++)
                for (i64 g = 0; g < groups; g++) ORDER::put(o, x[o] + 32 * g, to + g * size);
            return;
        }
    pack_block([&](int o) { return (const uint32_t*)x[o]; }, lines, NR, f.block / 4);
    ORDER::arrange(f.bits, count, lines, f.block / 4);
    by_bits(f.bits, [&](auto b) {
        constexpr int BITS = b;
        const uint8_t* bytes = (const uint8_t*)lines;
        if constexpr (BITS == 8)
            memcpy(to, bytes, size);
        else
            for (i64 g = 0; g < groups; g++) put_pieces<BITS>(bytes + g * NR * f.group, to + g * size);
    });
}

// Whole numbers [N, K] and their scales and offsets [N, K / group] as panels; the last is filled up with zeros
template <class ORDER, class T>
static void panels_of_groups(const int8_t* numbers, const T* scales, const T* offsets, uint8_t* to, i64 N, i64 K, const Form& f) {
    const i64 n = K / f.group, size = f.wide ? 4 : 2;
#pragma omp parallel for schedule(dynamic)
    for (i64 p = 0; p < (N + NR - 1) / NR; p++)
        for (i64 g = 0; g < n; g++) {
            uint8_t* group = to + (p * n + g) * f.bytes();
            memset(group, 0, f.bytes());
            alignas(64) int8_t rows[NR][32];
            put_numbers<ORDER>(f, group + f.scales(), std::min<i64>(NR, N - p * NR), [&](i64 o) {
                const i64 r = p * NR + o;
                memcpy(group + o * size, (const uint8_t*)scales + (r * n + g) * size, size);
                if (f.offsets) memcpy(group + (NR + o) * size, (const uint8_t*)offsets + (r * n + g) * size, size);
                int8_t* x = rows[o];
                for (i64 k = 0; k < f.group; k++) x[k] = numbers[r * K + g * f.group + k] + f.zero;
                return x;
            });
        }
}
template <class T>
static void pack_groups(const int8_t* numbers, const T* scales, const T* offsets, uint8_t* to, i64 N, i64 K, i64 form) {
#ifdef TILES
    if (std::is_same_v<T, bf16> && tiles) return panels_of_groups<TilePairs>(numbers, scales, offsets, to, N, K, FORMS[form]);
#endif
    panels_of_groups<Pairs>(numbers, scales, offsets, to, N, K, FORMS[form]);
}
EXPORT(pack_groups)

// The formats of GGUF files: the bytes of a block, and the form of its groups
struct Block {
    const char* name;
    i64 bytes, form;
};
static const Block BLOCKS[] = {
    {"Q4_0", 18, 0}, {"Q4_1", 20, 1},  {"Q5_0", 22, 5},  {"Q5_1", 24, 6},
    {"Q8_0", 34, 3}, {"Q4_K", 144, 7}, {"Q5_K", 176, 8}, {"Q6_K", 210, 9},
};
// A block, taken apart: its whole numbers, as they are stored; its scale and offset; and by what they are multiplied for each
// group
struct Unpacked {
    alignas(64) int8_t x[256];
    uint16_t half[2];
    int8_t by[2][16];
};
static inline void nibbles(const uint8_t* q, int8_t* x, i64 n) {  // the lower halves of n bytes, then the upper ones
    b16 v;
    for (i64 i = 0; i < n; i += 16) {
        memcpy(&v, q + i, 16);
        const b16 low = v & 15, high = v >> 4;
        memcpy(x + i, &low, 16), memcpy(x + n + i, &high, 16);
    }
}
static inline void fifth_bits(const uint8_t* h, int8_t* x) {
    uint32_t bits;
    memcpy(&bits, h, 4);
    for (int i = 0; i < 32; i++) x[i] |= (bits >> i & 1) << 4;
}
template <int BITS>
static inline void high_bits(const uint8_t* h, int8_t* x) {  // of each of 32 bytes the lowest bits, then the next, ...
    for (int i = 0; i < 32; i += 16) {
        b16 v, number;
        memcpy(&v, h + i, 16);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j += BITS) {
            int8_t* at = x + 32 * j / BITS + i;
            memcpy(&number, at, 16);
            number |= (v >> j & (uint8_t)((1 << BITS) - 1)) << 4;
            memcpy(at, &number, 16);
        }
    }
}
static inline void k_scales(const uint8_t* b, Unpacked& u) {  // of 8 groups: 6 bits of each are in 12 bytes
    uint32_t x[3];
    memcpy(u.half, b, 4), memcpy(x, b + 4, 12);
    for (int j = 0; j < 2; j++) {
        const uint32_t four[] = {x[j] & 0x3f3f3f3f, (x[2] >> 4 * j & 0x0f0f0f0f) | (x[j] >> 2 & 0x30303030)};
        memcpy(u.by[j], four, 8);
    }
}
static inline void unpack_k(i64 kind, const uint8_t* b, Unpacked& u) {  // of blocks of 256
    if (kind == 7) {
        for (int j = 0; j < 2; j++) {
            nibbles(b + 64 * j, u.x + 128 * j, 64);
            high_bits<2>(b + 128 + 32 * j, u.x + 128 * j);
        }
        memcpy(u.by, b + 192, 16), memcpy(u.half, b + 208, 2);
        return;
    }
    k_scales(b, u);
    for (int j = 0; j < 4; j++) nibbles(b + (kind == 5 ? 16 : 48) + 32 * j, u.x + 64 * j, 32);
    if (kind == 6) high_bits<1>(b + 16, u.x);
}

static inline void unpack(i64 kind, const uint8_t* b, Unpacked& u) {
    if (kind > 4) return unpack_k(kind, b, u);
    const i64 size = kind == 1 || kind == 3 ? 4 : 2;
    memcpy(u.half, b, size), b += size;
    if (kind == 4) {
        memcpy(u.x, b, 32);
        return;
    }
    const bool five = kind > 1;
    nibbles(five ? b + 4 : b, u.x, 16);
    if (five) fifth_bits(b, u.x);
}
template <class ORDER>
static void pack_panel(const i64* rows, uint8_t* to, i64 left, i64 K, i64 kind) {  // of so many rows the first NR
    const Block z = BLOCKS[kind];
    const Form f = FORMS[z.form];
    const i64 count = std::min<i64>(NR, left), parts = 1 + f.offsets, groups = f.groups() > 1 ? f.groups() : 0;
    if (count < NR) memset(to, 0, K / f.block * f.bytes());
    Unpacked all[NR];
    for (i64 i = 0; i < K / f.block; i++, to += f.bytes())
        put_numbers<ORDER>(f, to + f.scales(), count, [&](i64 o) {
            Unpacked& u = all[o];
            unpack(kind, (const uint8_t*)rows[o] + i * z.bytes, u);
            if (o + NR < left)  // of the next panel
                for (i64 j = 0; j < z.bytes; j += 64) __builtin_prefetch((const uint8_t*)rows[o + NR] + i * z.bytes + j, 0, 2);
            for (i64 j = 0; j < parts; j++) {
                memcpy(to + (j * NR + o) * 2, u.half + j, 2);
                for (i64 g = 0; g < groups; g++) to[((2 + g) * parts + j) * NR + o] = u.by[j][g];
            }
            return u.x;
        });
}

// rows: where each of N rows of K weights in blocks of this kind lies; `to`: panels, of which the last is filled up with zeros.
// With `changed` only those are written that are others than what is there, and counted
template <class ORDER>
static void panels_of_blocks(const i64* rows, uint8_t* to, i64* changed, i64 N, i64 K, i64 kind) {
    const Form f = FORMS[BLOCKS[kind].form];
    const i64 bytes = K / f.block * f.bytes();
    i64 others = 0;
#pragma omp parallel for schedule(dynamic, 4) reduction(+ : others)
    for (i64 p = 0; p < (N + NR - 1) / NR; p++) {
        static thread_local std::vector<uint8_t> room;
        uint8_t* panel = to + p * bytes;
        if (changed) room.resize(bytes);
        uint8_t* packed = changed ? room.data() : panel;
        pack_panel<ORDER>(rows + p * NR, packed, N - p * NR, K, kind);
        if (changed && memcmp(panel, packed, bytes)) memcpy(panel, packed, bytes), others++;
    }
    if (changed) *changed = others;
}
template <class T>
static void pack_blocks(const i64* rows, uint8_t* to, i64* changed, i64 N, i64 K, i64 kind) {
#ifdef TILES
    if (std::is_same_v<T, bf16> && tiles) return panels_of_blocks<TilePairs>(rows, to, changed, N, K, kind);
#endif
    panels_of_blocks<Pairs>(rows, to, changed, N, K, kind);
}
EXPORT(pack_blocks)

template <int GROUP, class T>
static inline void scale_group(int8_t* x, int zero, float scale, float offset, T* to) {
    for (int k = 0; k < GROUP; k++) x[k] -= zero;
    for (int k = 0; k < GROUP; k += W) store(to + k, multiply_add(load(x + k), all(scale), all(offset)));  // the product is exact
}
template <class T>
static void dequantize_blocks(const i64* rows, T* to, i64 N, i64 K, i64 kind) {
    const Block z = BLOCKS[kind];
    const Form f = FORMS[z.form];
    const i64 n = K / f.block, groups = f.groups();
#pragma omp parallel for if (N * K > 100000)
    for (i64 r = 0; r < N; r++) {
        Unpacked u = {};
        for (i64 i = 0; i < n; i++) {
            unpack(kind, (const uint8_t*)rows[r] + i * z.bytes, u);
            const float of[] = {one((const fp16*)u.half), one((const fp16*)u.half + 1)};
            for (i64 g = 0; g < groups; g++) {
                const auto at = [&](int j) { return of[j] * (groups > 1 ? u.by[j][g] : 1); };
                const float scale = at(0), offset = !f.offsets ? -0.f : groups > 1 ? -at(1) : at(1);
                T* at_group = to + r * K + i * f.block + g * f.group;
                if (f.group == 32)
                    scale_group<32>(u.x + g * 32, f.zero, scale, offset, at_group);
                else
                    scale_group<16>(u.x + g * 16, f.zero, scale, offset, at_group);
            }
        }
    }
}
EXPORT(dequantize_blocks)

// The scales (j = 0) or offsets (1) of a group, of W outputs from o on
static inline vf scales_of(const Walk& at, i64 j, i64 o) {
    const Form& f = at.f;
    o += j * NR;
    if (f.wide) return load((const float*)at.scales + o);
    if (at.groups == 1) return load((const fp16*)at.scales + o);
    return load(at.block + o) * load((const int8_t*)at.scales + (2 + at.g) * (f.offsets ? 2 : 1) * NR + o);
}
#ifdef __AVX512F__
static inline void read_scales(const Walk& at, vf (&a)[4], vf (&b)[4]) {  // each twice: of 8 outputs in each vector
    const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const auto twice = [&](vf(&to)[4], i64 j) {
        for (int o = 0; o < 4; o += 2) {
            const __m512 x = (__m512)scales_of(at, j, 8 * o);
            to[o] = (vf)_mm512_permutexvar_ps(low, x), to[o + 1] = (vf)_mm512_permutexvar_ps(high, x);
        }
    };
    twice(a, 0);
    if (at.f.offsets) twice(b, 1);
}
#endif

#ifdef __AVX512F__
// The numbers of a panel, of which the k-th is the next. BITS: 4, or 8 for all others
template <int BITS>
struct Expander {
    Walk at;
    const uint8_t* from = nullptr;
    uint8_t* const room;  // for numbers that are not in bytes yet
    i64 k = 0;
    vf table, a[4], b[4];
    Expander(const uint8_t* from, const Form& f) : at(from, f), room(group_room()) {
        for (auto& v : b) v = all(-0.f);
        for (int i = 0; i < 16; i++) table[i] = i - f.zero;
    }
    static uint8_t* group_room() {
        alignas(64) static thread_local uint8_t room[32 * NR];
        return room;
    }
    // Calls put(v) for numbers k and k + 1 of all outputs, k ascending, up to `end`, a multiple of 16: v[o] has outputs 8 o to
    // 8 o + 7, for each the k-th and the next
    template <class F>
    inline void to(i64 end, F put) {
        for (; k < end; k += 16) some(put);
    }
    inline void begin_group() {
        at.fetch(), at.read_block();
        read_scales(at, a, b);
        from = at.numbers;
        if (BITS == 8 && at.f.bits < 8) widen(at.f.bits, from, at.f.zero, room), from = room;
        at.next();
    }
    template <class F>
    inline void some(F put) {
        if (k % at.f.group == 0) begin_group();
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
                    x = (__m512)load((const int8_t*)from);
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
template <class T>
static void expand_panel(const uint8_t* from, const Form& f, i64 K, T* to) {
    float a[NR], b[NR], x[2 * NR];
    uint8_t bytes[32 * NR];
    Walk at(from, f);
    for (i64 g = 0; g < K / f.group; g++, at.next()) {
        at.read_block();
        for (i64 o = 0; o < NR; o += W)
            store(a + o, scales_of(at, 0, o)), store(b + o, f.offsets ? scales_of(at, 1, o) : all(-0.f));
        if (f.bits != 4) widen(f.bits, at.numbers, f.zero, bytes);
        for (i64 k = 0; k < f.group; k += 2, to += 2 * NR) {
            for (i64 o = 0; o < NR; o++)
                for (i64 i = 0; i < 2; i++) {
                    const i64 j = number_at(f, o, k + i);
                    const int number = f.bits == 4 ? (at.numbers[j / 2] >> j % 2 * 4 & 15) - (int)f.zero : (int8_t)bytes[j];
                    x[std::is_same_v<T, float> ? i * NR + o : 2 * o + i] = std::fma(a[o], (float)number, b[o]);
                }
            for (i64 i = 0; i < 2 * NR; i += W) store(to + i, load(x + i));
        }
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
        b = room, bytes = K / f.block * f.bytes();
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
// The numbers of a panel that is in the order of `TilePairs`, 32 of each output at a time: one output's behind another's
struct RowExpander {
    Walk at;
    vf numbers;
    i64 k = 0;                        // numbers before
    alignas(64) bf16 tables[NR][16];  // what the 16 numbers of 4 bits stand for, by output
    RowExpander(const uint8_t* from, const Form& f) : at(from, f) {
        for (int i = 0; i < 16; i++) numbers[i] = i - f.zero;
    }
    inline void read_tables() {
        alignas(64) float a[NR], b[NR];
        at.read_block();
        for (int o = 0; o < NR; o += W)
            store(a + o, scales_of(at, 0, o)), store(b + o, at.f.offsets ? scales_of(at, 1, o) : all(-0.f));
        // a and b are then read from memory: repeating a register's number takes a permutation
        asm volatile("" : : : "memory");
        const auto line = [&](int o) { return (vf)_mm512_fmadd_ps(_mm512_set1_ps(a[o]), (__m512)numbers, _mm512_set1_ps(b[o])); };
        for (int o = 0; o < NR; o += 2) _mm512_store_si512(tables[o], rounded(line(o), line(o + 1)));
    }
    inline void next(bf16* to) {  // 32 numbers
        const __m512i by = _mm512_inserti64x4(_mm512_set1_epi64(0), _mm256_set1_epi16(8), 1);
        const __m512i shifts = _mm512_add_epi16(by, _mm512_maskz_set1_epi64(0xcc, 0x0004000400040004));
        read_tables();
        // the lowest 5 bits of each lane choose: the table is there twice, so the fifth says nothing
#pragma GCC unroll 4
        for (int o = 0; o < NR; o++) {
            const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)tables[o]));
            const __m512i four = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(at.numbers + 16 * o)));
            _mm512_store_si512(to + 32 * o, _mm512_permutexvar_epi16(_mm512_srlv_epi16(four, shifts), table));
        }
        at.fetch(), at.next();
        k += 32;
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
        } else if (const auto* from = (const uint8_t*)at; FORMS[form].bits != 4)
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
