// A layer described by data, and what stands between its products. Made from the cells of nbs/23_layers.ipynb by .ci/cpp: edit
// the notebook.
#include "kernels.cpp"

struct Norm {  // kind: 0 for none, 1 by the root mean square, 2 by mean and deviation; rounds: before it multiplies by weight
    const float *weight, *bias;
    float eps;
    i64 kind, rounds;
};
struct Linear {  // kind: 0 for none, 1 in panels of the dtype, 2 in bytes, 3 computed by others
    const void *weight, *bias;
    const int32_t* start;
    const float* scales;
    i64 kind, outputs, inputs, block;
};
struct Activation {  // gated: its result is multiplied by the second half of the row; a, b, c: what a kind takes
    i64 kind, gated;
    float a, b, c;
};
struct Experts {  // chapter 24; gate_up, down: the products of all experts, one behind the other
    Linear router, gate_up, down;
    Activation act;
    i64 num_experts, top_k;              // 0 for none; how many of them a token goes to
    i64 sigmoid, normed, exact, rounds;  // scores, sum of the weights, roundings
    float scale;
    const float* bias;  // is added for the choice only, or null
};
struct Layer {
    Norm before, query, key, after, mlp_before, mlp_after;
    Linear qkv, out, gate_up, down;
    Activation act;
    Experts experts;
    Shape shape;
    void *keys, *values;     // of the cache
    const float *cos, *sin;  // [positions, rotated / 2], null if nothing is rotated
    i64 rotated;             // dims of a head that are
    i64 interleaved, exact;  // against the neighbour; without rounding on the way
    i64 whole, late;         // the norms of queries and keys: over all heads at once; after the rotation
    i64 parallel, by_head;   // MLP beside attention; query, key and value of a head side by side
    i64 behind;              // the norms `after` and `mlp_after`: of the sum, not of what is added
    float residual;          // what is added to the residual stream is multiplied by this
};

struct Step {
    i64 tokens, outputs, width;                   // outputs: tokens whose logits are due
    i64 num_work_units, longest;                  // of attention's work list; tokens of the longest sequence
    i64 whole;                                    // rows see both ways, and leave nothing in the cache
    const i64* rotation_rows;                     // of each token: its row of cos and sin
    const i64* slot_mapping;                      // of each token: its place in the cache, unless `whole`
    const i64* logits_at;                         // which tokens' logits are due, ascending
    const i64 *blocks, *query_rows, *work_units;  // attention's work list
    void *stream, *normed, *qkv, *attended, *projected, *gate_up, *activated, *mlp_out, *logits;
    void* bytes;        // rows in int8, for a product in bytes
    float* byte_steps;  // and the step of each
    void* packed;       // rows in the order in which a product reads them
    void* expert_rows;  // chapter 24: rows sorted by expert
    float *router_logits, *expert_weights;
    i64 *chosen, *row_of, *token_of, *bounds;
    double* seconds;                // of each part, or null
    const struct Adapted* adapted;  // chapter 32: which rows have adapters, or null
};

template <class T>
static inline void norm_row(const T* in, T* out, const Norm& norm, i64 at, i64 width) {  // at: where its weights begin
    vf total = {}, squares = {};
    float mean = 0;
    if (norm.kind == 2) {
        for (i64 i = 0; i < width; i += W) total += load(in + i);
        mean = sum(total) / width;
    }
    for (i64 i = 0; i < width; i += W) {
        const vf v = load(in + i) - mean;
        squares += v * v;
    }
    const float scale = 1 / std::sqrt(sum(squares) / width + norm.eps);
    for (i64 i = 0; i < width; i += W) {
        vf v = (load(in + i) - mean) * scale;
        if (norm.rounds) v = as(out, v);
        if (norm.weight) v *= load(norm.weight + at + i);
        if (norm.bias) v += load(norm.bias + at + i);
        store(out + i, v);
    }
}
// Adds to a row of the residual stream what attention or the MLP gives, times `factor`. The norm `after` comes first, or `behind`
// the sum.
template <class T>
static inline void add_row(T* stream, T* added, const Norm& after, bool behind, float factor, i64 width) {
    if (after.kind && !behind) norm_row(added, added, after, 0, width);
    for (i64 i = 0; i < width; i += W) {
        vf v = load(added + i);
        if (factor != 1) v = as(added, v * factor);
        store(stream + i, load(stream + i) + v);
    }
    if (after.kind && behind) norm_row(stream, stream, after, 0, width);
}

// Rows by themselves, for chapter 27
template <class T>
static void norm(const Norm& norm, const T* x, T* out, i64 rows, i64 width) {
#pragma omp parallel for if (rows * width > 100000)
    for (i64 r = 0; r < rows; r++) norm_row(x + r * width, out + r * width, norm, 0, width);
}
EXPORT(norm)

enum { SILU, GELU, GELU_TANH, RELU, RELU2, XIELU, CLAMPED };
static inline vf verf(vf x) {  // Abramowitz and Stegun 7.1.26
    const vf a = x < 0.f ? -x : x, t = 1.f / (1.f + .3275911f * a);
    const vf p = t * (.254829592f + t * (-.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const vf e = 1.f - p * vexp(-a * a);
    return x < 0.f ? -e : e;
}
static inline vf sigmoid(vf v) { return 1.f / (1.f + vexp(v < -88.f ? all(88.f) : -v)); }
static inline vf clamp(vf v, float low, float high) { return v < low ? all(low) : v > high ? all(high) : v; }
static inline vf activation(const Activation& act, vf v) {
    if (act.kind == SILU) return v / (1.f + vexp(v < -88.f ? all(88.f) : -v));
    if (act.kind == GELU) return .5f * v * (1.f + verf(v * .70710678f));
    if (act.kind == GELU_TANH) return .5f * v * (1.f + vtanh(.79788456f * (v + .044715f * v * v * v)));
    if (act.kind == XIELU) return act.c * v + (v > 0.f ? act.a * v * v : act.b * (vexp(v < -1e-6f ? v : all(-1e-6f)) - 1.f - v));
    if (act.kind == CLAMPED) {
        const vf x = v > act.b ? all(act.b) : v;
        return x * sigmoid(act.a * x);
    }
    const vf r = v > 0.f ? v : vf{};
    return act.kind == RELU ? r : r * r;
}

// The activation of dims `from` to `to` (excluded) of a row of `inner`, times the other half of the row where it is gated; in
// place, too
template <class T>
static inline void activate_row(const T* gate_up, T* out, i64 from, i64 to, i64 inner, const Activation& act) {
    for (i64 i = from; i < to; i += W) {
        vf v = activation(act, load(gate_up + i));
        if (act.gated) {
            const vf up = load(gate_up + inner + i);
            v = as(out, v) * (act.kind == CLAMPED ? 1.f + clamp(up, -act.b, act.b) : up);
        }
        store(out + i, v);
    }
}
template <class T>
static void activate(const T* gate_up, T* out, i64 rows, i64 inner, const Activation& act) {
    constexpr i64 CHUNK = 512;
    const i64 chunks = (inner + CHUNK - 1) / CHUNK, width = act.gated ? 2 * inner : inner;
#pragma omp for
    for (i64 c = 0; c < rows * chunks; c++) {
        const i64 r = c / chunks, from = c % chunks * CHUNK, to = std::min(inner, from + CHUNK);
        activate_row(gate_up + r * width, out + r * inner, from, to, inner, act);
    }
}

template <class T>
static inline void rotate_row(T* x, const float* cos, const float* sin, const Layer& layer) {
    const i64 half = layer.rotated / 2;
    if (layer.interleaved) {
        for (i64 i = 0; i < half; i++) {
            T *a = x + 2 * i, *b = a + 1;
            const vf p = all(one(a)), q = all(one(b));
            vf pc = p * cos[i], qs = q * sin[i], qc = q * cos[i], ps = p * sin[i];
            if (!layer.exact) pc = as(x, pc), qs = as(x, qs), qc = as(x, qc), ps = as(x, ps);
            part_store(a, pc - qs, 1), part_store(b, qc + ps, 1);
        }
        return;
    }
    for (i64 i = 0; i < half; i += W) {
        const int m = std::min<i64>(W, half - i);
        vf p = part(x + i, m), q = part(x + half + i, m), c = part(cos + i, m), s = part(sin + i, m);
        vf pc = p * c, qs = q * s, qc = q * c, ps = p * s;
        if (!layer.exact) pc = as(x, pc), qs = as(x, qs), qc = as(x, qc), ps = as(x, ps);
        part_store(x + i, pc - qs, m);
        part_store(x + half + i, qc + ps, m);
    }
}

// Where head h begins in a token's row, counted through queries, keys and values
static inline i64 head_at(const Layer& layer, i64 h) {
    const Shape& s = layer.shape;
    const i64 rotated = s.heads + s.kv_heads;
    if (layer.by_head) return h % s.heads * (2 * s.dim + s.dim_v) + h / s.heads * s.dim;
    return h < rotated ? h * s.dim : rotated * s.dim + (h - rotated) * s.dim_v;
}
// Queries and keys of all tokens normed and rotated, keys and values written to their places
template <class T>
static void prepare(const Layer& layer, const Step& step) {
    const Shape& shape = layer.shape;
    const i64 rotated = shape.heads + shape.kv_heads, heads = rotated + shape.kv_heads;
    T* qkv = (T*)step.qkv;
    if (step.whole && !layer.rotated && !layer.query.kind) return;
    if (layer.whole) {
#pragma omp for
        for (i64 t = 0; t < step.tokens; t++) {
            T *q = qkv + t * shape.q_token, *k = q + shape.heads * shape.dim;
            if (layer.query.kind) norm_row(q, q, layer.query, 0, shape.heads * shape.dim);
            if (layer.key.kind) norm_row(k, k, layer.key, 0, shape.kv_heads * shape.dim);
        }
    }
#pragma omp for
    for (i64 u = 0; u < step.tokens * heads; u++) {
        const i64 t = u / heads, h = u % heads, place = step.whole ? 0 : step.slot_mapping[t];
        T* x = qkv + t * shape.q_token + head_at(layer, h);
        if (h < rotated) {
            const bool query = h < shape.heads;
            const Norm& norm = query ? layer.query : layer.key;
            const i64 at = (query ? h : h - shape.heads) * shape.dim;
            if (norm.kind && !layer.whole && !layer.late) norm_row(x, x, norm, at, shape.dim);
            if (layer.rotated) {
                const i64 row = step.rotation_rows[t] * (layer.rotated / 2);
                rotate_row(x, layer.cos + row, layer.sin + row, layer);
            }
            if (norm.kind && layer.late) norm_row(x, x, norm, at, shape.dim);
            if (!query && !step.whole) write_key(shape, x, (T*)layer.keys, h - shape.heads, place);
        } else if (!step.whole)
            write_value(shape, x, (T*)layer.values, h - rotated, place);
    }
}
