// A layer described by data, and what stands between its products. Made from the cells of nbs/4_fast/layers.ipynb by .ci/cpp:
// edit the notebook.
#include "kernels.cpp"

struct Norm {
    const float *weight, *bias;  // or null
    float eps;                   // added to the mean square
    i64 kind, rounds;            // 0 none, 1 root mean square, 2 mean and deviation; rounded to the dtype before the weight
};
struct Linear {
    const void *weight, *bias;         // packed; bias or null
    const int32_t* start;              // kind 2: what the sum of each output begins with
    const float* scales;               // kind 2: of each output
    i64 kind, outputs, inputs, block;  // 0 none, 1 panels, 2 int8, 3 computed outside, 4 in groups, 5 in w4a8; dims mixed in int8
};
struct Activation {
    i64 kind, gated;  // which of the enum; its result is multiplied by the second half of the row
    float a, b, c;    // constants that XIELU and CLAMPED take
};
struct Experts {                         // chapter 24
    Linear router, gate_up, down;        // products of all experts, one expert after the other
    Activation act;                      // between gate_up and down
    i64 num_experts, top_k;              // 0 for none; how many of them a token goes to
    i64 sigmoid, normed, exact, rounds;  // scores; weights sum to 1; logits stay fp32; weights and results are rounded
    float scale;                         // of the weights
    const float* bias;                   // added for the choice only, or null
};
struct Layer {
    Norm before, query, key, after;   // of attention's input, of queries, of keys, of attention's result
    Norm mlp_before, mlp_after;       // of the MLP's input and result
    Linear qkv, out, gate_up, down;   // queries, keys, values; attention's output; gate and up, or up alone; down
    Activation act;                   // between gate_up and down
    Experts experts;                  // in place of the MLP, or beside it
    Shape shape;                      // heads, and where they are in rows and in the cache
    void *keys, *values;              // of this layer in the cache
    const float *cos, *sin;           // [positions, rotated / 2], or null
    i64 rotated;                      // dims of a head that are rotated
    i64 interleaved, exact_rotation;  // a dim's partner is its neighbour; only sums are rounded, not products
    i64 norm_all_heads;               // norms of queries and keys are over all heads at once
    i64 norm_after_rotation;          // of queries and keys
    i64 parallel, by_head;            // MLP and attention have one input; a head's query, key and value are side by side
    i64 norm_sums;                    // `after` and `mlp_after` are of the sum, not of what is added
    float residual;                   // what is added to the residual stream is multiplied by this
};

struct Step {
    i64 tokens, outputs, width;                   // of the step; of them, whose logits are due; of the residual stream
    i64 num_work_units, longest;                  // of attention's work list; tokens of the longest sequence
    i64 whole;                                    // rows see both ways, and leave nothing in the cache
    const i64* rotation_rows;                     // of each token: its row of cos and sin
    const i64* slot_mapping;                      // of each token: its cache index, unless `whole`
    const i64* logits_at;                         // which tokens' logits are due, ascending
    const i64 *blocks, *query_rows, *work_units;  // attention's work list
    void *stream, *normed;                        // the residual stream; the same after a norm
    void *qkv, *attended, *projected;             // queries, keys, values; attention's result, and after the output product
    void *gate_up, *activated, *mlp_out;          // gate and up; after the activation; what the MLP adds
    void* logits;                                 // [outputs, vocabulary]
    void* bytes;                                  // rows in int8, for a product in int8
    float* byte_steps;                            // the scale of each of these rows
    void* packed;                                 // rows in the order in which a product reads them
    void* expert_rows;                            // chapter 24: rows sorted by expert
    float *router_logits, *expert_weights;        // [tokens, experts]; [tokens, top_k]
    i64 *chosen, *row_of, *token_of, *bounds;     // chapter 24: which experts, and the order of the rows
    double* seconds;                              // of each part, or null
    const struct Adapted* adapted;                // chapter 32: which rows have adapters, or null
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
        squares = multiply_add(v, v, squares);
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
static inline void add_row(T* stream, T* added, const Norm& after, bool norm_sum, float factor, i64 width) {
    if (after.kind && !norm_sum) norm_row(added, added, after, 0, width);
    for (i64 i = 0; i < width; i += W) {
        vf v = load(added + i);
        if (factor != 1) v = as(added, v * factor);
        store(stream + i, load(stream + i) + v);
    }
    if (after.kind && norm_sum) norm_row(stream, stream, after, 0, width);
}

// Rows by themselves, for fast.modules
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
            if (!layer.exact_rotation) pc = as(x, pc), qs = as(x, qs), qc = as(x, qc), ps = as(x, ps);
            part_store(a, pc - qs, 1), part_store(b, qc + ps, 1);
        }
        return;
    }
    for (i64 i = 0; i < half; i += W) {
        const int m = std::min<i64>(W, half - i);
        vf p = part(x + i, m), q = part(x + half + i, m), c = part(cos + i, m), s = part(sin + i, m);
        vf pc = p * c, qs = q * s, qc = q * c, ps = p * s;
        if (!layer.exact_rotation) pc = as(x, pc), qs = as(x, qs), qc = as(x, qc), ps = as(x, ps);
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
    if (layer.norm_all_heads) {
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
            if (norm.kind && !layer.norm_all_heads && !layer.norm_after_rotation) norm_row(x, x, norm, at, shape.dim);
            if (layer.rotated) {
                const i64 row = step.rotation_rows[t] * (layer.rotated / 2);
                rotate_row(x, layer.cos + row, layer.sin + row, layer);
            }
            if (norm.kind && layer.norm_after_rotation) norm_row(x, x, norm, at, shape.dim);
            if (!query && !step.whole) write_key(shape, x, (T*)layer.keys, h - shape.heads, place);
        } else if (!step.whole)
            write_value(shape, x, (T*)layer.values, h - rotated, place);
    }
}
