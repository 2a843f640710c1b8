// 4-bit weights times activations in 8 bits. Made from the cells of nbs/4_fast/23b_w4a8.ipynb by .ci/cpp: edit the notebook.
#include "int8_kernels.cpp"

// As `Pairs`: four numbers are a lane, those of 8 bits plus 128
struct Quads {
    static constexpr i64 FLAT = 0;
    static inline void arrange(i64 bits, i64 count, uint32_t* lines, i64 n) {
        for (i64 i = 0; i < n * NR && bits == 8; i++) lines[i] ^= i % NR < count ? 0x80808080 : 0;
    }
};
static inline i64 zero_of(const Form& f) { return f.bits == 8 ? 128 : f.zero; }
template <class T>
static void pack_quads(const int8_t* numbers, const T* scales, const T* offsets, uint8_t* to, i64 N, i64 K, i64 form) {
    panels_of_groups<Quads>(numbers, scales, offsets, to, N, K, FORMS[form]);
}
EXPORT(pack_quads)
template <class T>
static void pack_quad_blocks(const i64* rows, uint8_t* to, i64* changed, i64 N, i64 K, i64 kind) {
    panels_of_blocks<Quads>(rows, to, changed, N, K, kind);
}
EXPORT(pack_quad_blocks)

template <int S>
static inline vi larger_bits(vi v) {
    const vi y = (vi)partner<S>((vf)v);
    return v > y ? v : y;
}
static inline float most_bits(vi v) {  // the largest of numbers that are not negative
    if (W == 16) v = larger_bits<W / 2>(v);
    v = larger_bits<1>(larger_bits<2>(larger_bits<4>(v)));
    return ((vf)v)[0];
}
static inline void sum_both(const vf (&v)[2], int32_t (&sums)[2]) {  // whole numbers: exact in any order; 0 for what is none
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    const vf a = v[0] + partner<W / 2>(v[0]), b = v[1] + partner<W / 2>(v[1]);
    vf both = lane < W / 2 ? a : b;
    if (W == 16) both += partner<4>(both);
    both += partner<2>(both), both += partner<1>(both);
    both = both == both ? both : vf{};
    sums[0] = both[0], sums[1] = both[W / 2];
}
template <class T>
static inline float round_group(const T* x, uint8_t* bytes, int32_t (&sums)[2]) {  // 32 numbers; their scale
    typedef uint8_t vb __attribute__((vector_size(W)));
    vf v[32 / W];
    vi m = (vi)all(1e-30f);  // 0 / 0 is no byte; without signs, the order of numbers is that of their bits, and NaN is the last
    for (int j = 0; j < 32 / W; j++) {
        v[j] = load(x + j * W);
        const vi a = (vi)v[j] & 0x7fffffff;
        m = m > a ? m : a;
    }
    const float largest = most_bits(m), f = 127 / largest, shift = 12582912.f;  // 1.5 * 2^23: the lowest bits are a whole number
    vf total[2] = {};
    for (int j = 0; j < 32 / W; j++) {
        const vf y = multiply_add(v[j], all(f), all(shift));
        const vb b = __builtin_convertvector((vu)y & 255, vb);
        memcpy(bytes + j * W, &b, W);
        total[j * W / 16] += y - shift;
    }
    sum_both(total, sums);
    return largest / 127 + (largest - largest);  // NaN, for a NaN or an infinity
}

constexpr int QR = W == 16 ? 6 : 1;  // rows multiplied together
// Rows of K numbers in 8 bits, in blocks. Of a block of m rows: bytes [K / 4][m][4]; scales [K / 32][m]; and minus 8 times the
// sums of 32 and of 16 neighbours, [K / 32][m] and [K / 16][m]; and in fp32 what the sums of 32 are worth, [K / 32][m]. For
// tiles: bytes [m][K], and what the sums of 32 and of 16 are worth in the place of sums.
struct Rounded {
    uint8_t* bytes;
    float* scales;
    int32_t *sums, *halves;
    float* worths;
    static i64 room(i64 rows, i64 K) { return rows * (K + K / 8 * 5); }  // in bytes
    Rounded(void* at, i64 rows, i64 K)
        : bytes((uint8_t*)at),
          scales((float*)(bytes + rows * K)),
          sums((int32_t*)scales + rows * K / 32),
          halves(sums + rows * K / 32),
          worths((float*)halves + rows * K / 16) {}
};
template <class T>
static void round_block(const T* x, const Rounded& to, i64 r, i64 m, i64 K, bool tiled) {  // rows r to r + m
    const i64 n = K / 32;
    float* scales = to.scales + r * n;
    int32_t *sums = to.sums + r * n, *halves = to.halves + 2 * r * n;
    for (i64 g = 0; g < n; g++) {
        uint8_t bytes[QR][32];
        for (i64 i = 0; i < m; i++) {
            int32_t s[2];
            const i64 at = (r + i) * K + 32 * g;
            scales[g * m + i] = round_group(x + at, tiled ? to.bytes + at : bytes[i], s);
            const auto put = [&](int32_t& to, int32_t total) {
                const float worth = scales[g * m + i] * (float)total;
                tiled ? (void)memcpy(&to, &worth, sizeof to) : (void)(to = -8 * total);
            };
            put(sums[g * m + i], s[0] + s[1]);
            to.worths[r * n + g * m + i] = scales[g * m + i] * (float)(s[0] + s[1]);
            for (int j = 0; j < 2; j++) put(halves[(2 * g + j) * m + i], s[j]);
        }
        if (!tiled)
            pack_block([&](int i) { return (const uint32_t*)bytes[i]; }, (uint32_t*)(to.bytes + r * K + 32 * g * m), m, 8);
    }
}

// s + 4 numbers from 0 to 255 in each lane of w times 4 signed ones
static inline vi add_quads(vi s, vi w, int32_t x) {
#ifdef __AVX512VNNI__
    return (vi)_mm512_dpbusd_epi32((__m512i)s, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)s, (__m256i)w, _mm256_set1_epi32(x));
#else
    for (int d = 0; d < 32; d += 8) s += (vi)((vu)w >> d & 255) * (int32_t)(int8_t)(x >> d);
    return s;
#endif
}
// s = the products of a block of M rows by a panel; `lines` of what is read next are fetched on the way
template <int M, int BITS, bool OFFSETS>
static inline void quads_block(const Rounded& x, i64 r, const uint8_t* from, const Form& f, i64 K, vf (&to)[M][NV],
                               const char* soon, i64 lines) {
    constexpr int G = GROUP<BITS>;
    const i64 n = K / G;
    const uint8_t* bytes = x.bytes + r * K;
    const float* scales = x.scales + r * K / 32;
    const int32_t* sums = G == 32 ? x.sums + r * K / 32 : x.halves + r * K / 16;
    const float* worths = x.worths + r * K / 32;
    const int32_t zeros = zero_of(f) / 8;
    vf s[M][NV] = {};  // here, so that they stay in registers
    i64 due = 0;
    Walk at(from, f);
    for (i64 g = 0; g < n; g++, sums += M, worths += M, at.next()) {
        for (due += lines; due >= n; due -= n, soon += 64) __builtin_prefetch(soon, 0, 2);
        if (M <= FEW && !soon) at.fetch<BITS>();
        at.read_block();
        vf scale[NV], offset[NV];
        for (int j = 0; j < NV; j++) {
            scale[j] = scales_of(at, 0, j * W);
            if (OFFSETS) offset[j] = scales_of(at, 1, j * W);
        }
        vi t[M][NV];
        for (int i = 0; i < M; i++)
            for (int j = 0; j < NV; j++) t[i][j] = sums[i] * zeros - vi{};
#pragma GCC unroll 8
        for (int k = 0; k < G / 4; k++) {
            vi w[NV];
            for (int j = 0; j < NV; j++) w[j] = (vi)line_of<BITS>(at.numbers, k, j);
            for (int i = 0; i < M; i++, bytes += 4) {
                int32_t quad;
                memcpy(&quad, bytes, 4);
                for (int j = 0; j < NV; j++) t[i][j] = add_quads(t[i][j], w[j], quad);
            }
        }
        for (int j = 0; j < NV; j++)
            for (int i = 0; i < M; i++) {
                s[i][j] = multiply_add(__builtin_convertvector(t[i][j], vf), scale[j] * scales[i], s[i][j]);
                if (OFFSETS) s[i][j] = multiply_add(offset[j], all(worths[i]), s[i][j]);
            }
        if (G == 32 || g % 2) scales += M;
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < NV; j++) to[i][j] = s[i][j];
}

// The sums of a row for panel p as outputs
template <class T>
static inline void put_sums(const vf (&s)[NV], const T* bias, T* out, i64 p, i64 N) {
    for (int j = 0; j < NV; j++) {
        const i64 at = p * NR + j * W;
        const int c = std::clamp<i64>(N - at, 0, W);
        if (c) part_store(out + at, bias ? s[j] + part(bias + at, c) : s[j], c);
    }
}
#ifdef TILES
constexpr int TG = 2, TILED = 17;  // groups whose sums wait in memory; from so many rows on
// The numbers of a panel, signed, as rows of tiles: [K / 4][NR][4]
static void spread_panel(const uint8_t* from, const Form& f, i64 K, int8_t* to) {
    Walk at(from, f);
    for (i64 k = 0; k < K; k += f.group, at.next()) widen(f.bits, at.numbers, zero_of(f), (uint8_t*)to + k * NR);
}
// t = the sums of `count` groups of up to 32 rows a, K bytes apart, by numbers w
template <int G, bool TWO>
static inline void tile_groups(const uint8_t* a, const int8_t* w, i64 K, int count, int32_t (*t)[2 * TR][NR]) {
    for (int g = 0; g < count; g++, a += G, w += G * NR) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(4, a, K);
        _tile_loadd(6, w, 4 * NR);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, w + 64, 4 * NR);
        _tile_dpbssd(1, 4, 7);
        if (TWO) {
            _tile_zero(2);
            _tile_zero(3);
            _tile_loadd(5, a + TR * K, K);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
            _tile_stored(2, t[g][TR], 4 * NR);
            _tile_stored(3, t[g][TR] + TR, 4 * NR);
        }
        _tile_stored(0, t[g][0], 4 * NR);
        _tile_stored(1, t[g][0] + TR, 4 * NR);
    }
}
#endif

#ifdef TILES
// s = the products of a block of m rows by a panel, whose numbers are spread in w
template <int G, bool TWO, bool OFFSETS>
static void quads_tile(const Rounded& x, i64 r, i64 m, const uint8_t* from, const Form& f, const int8_t* w, i64 K, vf (*s)[NV]) {
    alignas(64) int32_t t[2][TG][2 * TR][NR];  // of some groups, and of the next ones
    const i64 n = K / G;
    const uint8_t* a = x.bytes + r * K;
    const float* scales = x.scales + r * K / 32;
    const auto* worth = (const float*)(G == 32 ? x.sums + r * K / 32 : x.halves + r * K / 16);
    for (i64 i = 0; i < m; i++) s[i][0] = s[i][1] = vf{};
    const auto begin = [&](i64 first) {
        const i64 count = std::min<i64>(TG, n - first);
        tile_groups<G, TWO>(a + first * G, w + first * G * NR, K, count, t[first / TG % 2]);
    };
    Walk at(from, f);
    begin(0);
    for (i64 first = 0; first < n; first += TG)
        by_count<TG>(std::min<i64>(TG, n - first), [&](auto count) {
            begin(first + TG);  // while the vectors are at work
            const auto* sums_of = t[first / TG % 2];
            vf scale[count][NV], offset[count][NV];
            for (int g = 0; g < count; g++, at.next()) {
                at.read_block();
                for (int j = 0; j < NV; j++) {
                    scale[g][j] = scales_of(at, 0, j * W);
                    if (OFFSETS) offset[g][j] = scales_of(at, 1, j * W);
                }
            }
            for (i64 i = 0; i < m; i++) {
                vf v[NV] = {s[i][0], s[i][1]};
                for (int g = 0; g < count; g++)
                    for (int j = 0; j < NV; j++) {
                        vi sum;
                        memcpy(&sum, sums_of[g][i] + j * W, sizeof sum);
                        v[j] = multiply_add(__builtin_convertvector(sum, vf), scale[g][j] * scales[(first + g) * G / 32 * m + i],
                                            v[j]);
                        if (OFFSETS) v[j] = multiply_add(offset[g][j], all(worth[(first + g) * m + i]), v[j]);
                    }
                s[i][0] = v[0], s[i][1] = v[1];
            }
        });
}
// Blocks of up to 32 rows by a panel, the p-th of N outputs. shaped: for how many rows and numbers the registers are set
template <class T>
static void quads_tiles(const Rounded& x, const Panel& panel, const T* bias, T* out, i64 p, i64 first, i64 last,
                        const Blocks<2 * TR>& blocks, i64 M, i64 N, i64 K, int& shaped) {
    static thread_local std::vector<int8_t> own;
    const Form& f = FORMS[panel.form];
    const auto* from = (const uint8_t*)panel.at;
    int8_t* const spread = lines_of(own, K * NR);
    spread_panel(from, f, K, spread);
    asm volatile("" : : : "memory");  // tiles are loaded where the compiler does not see it
    for (i64 q = first; q < last; q++) {
        const i64 r = q * blocks.each;
        const int m = std::min(blocks.each, M - r), shape = m << 8 | f.group;
        if (shape != shaped) {
            TileShapes(m, f.group).use();
            shaped = shape;
        }
        vf s[2 * TR][NV];
        const auto multiply = [&](auto group, auto two) {
            (f.offsets ? quads_tile<group, two, true> : quads_tile<group, two, false>)(x, r, m, from, f, spread, K, s);
        };
        const auto of = [&](auto group) { m > TR ? multiply(group, std::true_type()) : multiply(group, std::false_type()); };
        f.group == 32 ? of(std::integral_constant<int, 32>()) : of(std::integral_constant<int, 16>());
        for (int i = 0; i < m; i++) put_sums(s[i], bias, out + (r + i) * N, p, N);
    }
}
#endif

// Blocks of all rows by a panel, the p-th of N outputs
template <class T>
static void quads_panel(const Rounded& x, const Panel& panel, const T* bias, T* out, i64 p, i64 first, i64 last,
                        const Blocks<QR>& blocks, i64 M, i64 N, i64 K) {
    const Form& f = FORMS[panel.form];
    const auto* from = (const uint8_t*)panel.at;
    const i64 total = K / f.block * f.bytes() / 64;
    const i64 lines = M > FEW ? total / (last - first) : 0;
    const char* soon = lines ? (const char*)from + 64 * total : nullptr;  // the next panel
    for (i64 q = first; q < last; q++, soon += 64 * lines) {
        const i64 r = q * blocks.each;
        by_count<QR>(std::min(blocks.each, M - r), [&](auto m) {
            vf s[m][NV];
            by_bits(f.bits, [&](auto bits) {
                f.offsets ? quads_block<m, bits, true>(x, r, from, f, K, s, soon, lines)
                          : quads_block<m, bits, false>(x, r, from, f, K, s, soon, lines);
            });
            for (int i = 0; i < m; i++) put_sums(s[i], bias, out + (r + i) * N, p, N);
        });
    }
}

namespace shared {
// Rows rounded, in `blocks`, then call(they, panel, its index, first and last block) for all panels
template <class B, class T, class F>
static void for_quads(const B& blocks, const T* x, const Panel* panels, i64 M, i64 N, i64 K, void* room, bool tiled, F call) {
    static thread_local std::vector<uint8_t> own;
    const bool apart = M * K <= 4096;
    if (apart) own.resize(Rounded::room(M, K)), room = own.data();
    const Rounded rounded(room, M, K);
    const auto round = [&](i64 q) {
        round_block(x, rounded, q * blocks.each, std::min(blocks.each, M - q * blocks.each), K, tiled);
    };
    if (apart)
        for (i64 q = 0; q < blocks.n; q++) round(q);
    else {
#pragma omp for
        for (i64 q = 0; q < blocks.n; q++) round(q);
    }
    const i64 count = (N + NR - 1) / NR, threads = omp_get_num_threads();
    const i64 parts = std::clamp<i64>(4 * threads / count, 1, tiled ? blocks.n : blocks.n / 4 + 1);
#pragma omp for
    for (i64 u = 0; u < count * parts; u++) {
        const i64 p = u / parts, i = u % parts;
        call(rounded, panels[p], p, blocks.n * i / parts, blocks.n * (i + 1) / parts);
    }
}
template <class T>  // room: as `Rounded` says
static void quads_product(const T* x, const Panel* panels, const T* bias, T* out, i64 M, i64 N, i64 K, void* room) {
    if (!M) return;
#ifdef TILES
    if (tiles && M >= TILED) {
        int shaped = 0;
        const Blocks<2 * TR> blocks(M);
        for_quads(blocks, x, panels, M, N, K, room, true, [&](auto& rows, auto& panel, i64 p, i64 first, i64 last) {
            quads_tiles(rows, panel, bias, out, p, first, last, blocks, M, N, K, shaped);
        });
        return _tile_release();
    }
#endif
    const Blocks<QR> blocks(M);
    for_quads(blocks, x, panels, M, N, K, room, false, [&](auto& rows, auto& panel, i64 p, i64 first, i64 last) {
        quads_panel(rows, panel, bias, out, p, first, last, blocks, M, N, K);
    });
}
}  // namespace shared
template <class T>
static void quads_product(const T* x, const Panel* panels, const T* bias, T* out, i64 M, i64 N, i64 K) {
    std::vector<uint8_t> room(Rounded::room(M, K));
#pragma omp parallel if (M * N * K > 100000)
    shared::quads_product(x, panels, bias, out, M, N, K, room.data());
}
EXPORT(quads_product)

// Weights as numbers from 0 to 15, scales and offsets of groups of 32. rows: where each of N rows of K numbers lies
template <class T>
static void quantize_groups(const i64* rows, int8_t* numbers, float* scales, float* offsets, i64 N, i64 K) {
    typedef int8_t vc __attribute__((vector_size(W)));
    constexpr int V = 32 / W;
    const float shift = 12582912.f;
#pragma omp parallel for schedule(dynamic, 16)
    for (i64 r = 0; r < N; r++)
        for (i64 g = 0; g < K / 32; g++) {
            vf v[V], low = all(INFINITY), high = all(-INFINITY), totals = {}, q[V];
            for (int j = 0; j < V; j++) {
                v[j] = load((const T*)rows[r] + 32 * g + j * W), totals += v[j];
                low = v[j] < low ? v[j] : low, high = v[j] > high ? v[j] : high;
            }
            const float least = -most(-low), total = sum(totals), width = most(high) - least;
            // of numbers that are all the same; of those that are too large for a sum of squares, NaN
            float best = INFINITY, factor = 0, scale = width > 1e-30f ? NAN : 0, offset = total / 32;
            const auto round = [&](float f) {
                for (int j = 0; j < V; j++) {
                    const vf y = multiply_add(v[j] - least, all(f), all(shift)) - shift;
                    q[j] = y < 15.f ? y : all(15.f);  // also of no number
                }
            };
            for (int i = 0; i <= 20 && width > 1e-30f; i++) {
                round((14 + .1f * i) / width);
                vf ones = {}, squares = {}, both = {}, errors = {};
                for (int j = 0; j < V; j++) ones += q[j], squares += q[j] * q[j], both += q[j] * v[j];
                const float n = sum(ones), nn = sum(squares), nv = sum(both), d = 32 * nn - n * n;
                if (!(d > 0)) continue;
                const float a = (32 * nv - n * total) / d, b = (nn * total - n * nv) / d;
                for (int j = 0; j < V; j++) {
                    const vf e = q[j] * a + b - v[j];
                    errors += e * e;
                }
                if (sum(errors) < best) best = sum(errors), factor = (14 + .1f * i) / width, scale = a, offset = b;
            }
            round(factor);
            for (int j = 0; j < V; j++) {
                const vc c = __builtin_convertvector(__builtin_convertvector(q[j], vi), vc);
                memcpy(numbers + r * K + 32 * g + j * W, &c, W);
            }
            scales[r * (K / 32) + g] = scale,
                                  offsets[r * (K / 32) + g] = offset + (total - total);  // NaN if a weight is not finite
        }
}
EXPORT(quantize_groups)
