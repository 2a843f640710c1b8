// Mixtures of experts. Made from the cells of nbs/4_fast/24_experts.ipynb by .ci/cpp: edit the notebook.
#include "layers.cpp"

constexpr int EXPERTS = 512;  // at most
// What a token's logits say of all experts, by softmax or sigmoid
template <class T>
static inline void score(const Experts& experts, const float* logits, float* scores) {
    const T* like = nullptr;
    const i64 n = experts.num_experts;
    vf top = all(-INFINITY), sums = {};
    for (i64 e = 0; e < n; e += W) {
        const int m = std::min<i64>(W, n - e);
        vf v = part(logits + e, m);
        for (int i = m; i < W; i++) v[i] = -INFINITY;
        if (!experts.exact) v = as(like, v);
        store(scores + e, v), top = top > v ? top : v;
    }
    const float largest = most(top);
    for (i64 e = 0; e < n; e += W) {
        const vf v = experts.sigmoid ? sigmoid(load(scores + e)) : vexp(load(scores + e) - largest);
        store(scores + e, v), sums += v;
    }
    const float factor = experts.sigmoid ? 1 : 1 / sum(sums);
    for (i64 e = 0; e < n; e++) scores[e] *= factor;
}
// Which experts a token goes to, in the order of their numbers, and with which weights
template <class T>
static inline void route(const Experts& experts, const float* logits, i64* chosen, float* weights) {
    const T* like = nullptr;
    const i64 n = experts.num_experts, k = experts.top_k;
    float scores[EXPERTS + W], keys[EXPERTS], total = 0;
    bool taken[EXPERTS] = {};
    score<T>(experts, logits, scores);
    for (i64 e = 0; e < n; e++) keys[e] = experts.bias ? scores[e] + experts.bias[e] : scores[e];
    for (i64 j = 0; j < k; j++) {
        i64 best = -1;
        for (i64 e = 0; e < n; e++)
            if (!taken[e] && (best < 0 || keys[e] > keys[best])) best = e;
        taken[best] = true;
    }
    for (i64 e = 0, j = 0; e < n; e++)
        if (taken[e]) chosen[j] = e, weights[j++] = scores[e], total += scores[e];
    for (i64 j = 0; j < k; j++) {
        const vf w = all(experts.scale * (experts.normed ? weights[j] / total : weights[j]));
        weights[j] = (experts.rounds ? as(like, w) : w)[0];
    }
}

// Rows sorted by expert: those of expert e begin at bounds[e]; token_of says of which token each is, row_of where a token's are.
// Behind the n + 2 bounds: how many experts have rows, and which.
static void group(const Experts& experts, const Step& step, i64 tokens) {
    const i64 n = experts.num_experts, rows = tokens * experts.top_k;
    i64 *bounds = step.bounds, *busy = bounds + n + 2;
    std::fill(bounds, busy + 1, 0);
    for (i64 i = 0; i < rows; i++) bounds[step.chosen[i] + 2]++;
    for (i64 e = 0; e < n; e++) {
        if (bounds[e + 2]) busy[++busy[0]] = e;
        bounds[e + 2] += bounds[e + 1];
    }
    for (i64 i = 0; i < rows; i++) {
        const i64 at = bounds[step.chosen[i] + 1]++;
        step.row_of[i] = at, step.token_of[at] = i / experts.top_k;
    }
}
// The router's product for all tokens, their choice, and the order of their rows
template <class T>
static void choose(const Experts& experts, const Step& step, const T* x, i64 tokens) {
    const Linear& router = experts.router;
    const i64 n = router.outputs, k = experts.top_k;
    const T* packed = shared::pack(x, (T*)step.packed, tokens, router.inputs);
    for_panels((const T*)router.weight, tokens, n, router.inputs,
               multiplying(packed, (const T*)router.bias, step.router_logits, n, router.inputs));
#pragma omp for
    for (i64 t = 0; t < tokens; t++)
        route<T>(experts, step.router_logits + t * n, step.chosen + t * k, step.expert_weights + t * k);
#pragma omp single
    group(experts, step, tokens);
}

// The rows of each expert, packed: row(i) says which of x is the i-th
template <class T, class F>
static const T* pack_rows(const Experts& experts, const Step& step, const T* x, i64 inputs, F row) {
    const i64 *bounds = step.bounds, *busy = bounds + experts.num_experts + 2;
    auto* to = (T*)step.packed;
#pragma omp for schedule(dynamic)
    for (i64 j = 0; j < busy[0]; j++) {
        const i64 first = bounds[busy[1 + j]], end = bounds[busy[1 + j] + 1], each = Blocks(end - first).each;
        for (i64 from = first; from < end; from += each)
            pack_block([=](int i) { return (const uint32_t*)(x + row(from + i) * inputs); }, (uint32_t*)(to + from * inputs),
                       std::min(each, end - from), inputs * sizeof(T) / 4);
    }
    return to;
}
// Each panel of each expert that has rows: multiplied with these, by threads that take some panels at a time
template <class T, class F>
static void for_experts(const Experts& experts, const Step& step, const T* weight, i64 panels, i64 inputs, F call) {
    const i64 *bounds = step.bounds, *busy = bounds + experts.num_experts + 2, n = busy[0] * panels;
    const i64 some = std::clamp<i64>(n / (8 * omp_get_num_threads()), 1, 8);
#pragma omp for schedule(dynamic, some)
    for (i64 u = 0; u < n; u++) {
        const i64 e = busy[1 + u / panels], p = e * panels + u % panels;
        const i64 rows = bounds[e + 1] - bounds[e];
        one_panel(weight + p * NR * inputs, p, bounds[e], rows, 0, Blocks(rows).n, inputs, call);
    }
}
// A product of all experts. x: their rows, sorted by expert, or rows of tokens
template <class T>
static void expert_linear(const Experts& experts, const Linear& l, const Step& step, const T* x, T* out, i64 tokens,
                          bool sorted) {
    const i64 N = l.outputs / experts.num_experts, K = l.inputs, rows = tokens * experts.top_k, *token_of = step.token_of;
    auto row = [=](i64 i) { return sorted ? i : token_of[i]; };
    if (l.kind == 1) {
        const T* packed = pack_rows(experts, step, x, K, row);
        for_experts(experts, step, (const T*)l.weight, N / NR, K, multiplying(packed, (const T*)l.bias, out, N, K));
    }
    if (l.kind == 2) {
        const auto* bytes = (const uint8_t*)step.bytes;
        float* steps = sorted ? step.byte_steps : step.byte_steps + tokens;
        shared::quantize(x, (uint8_t*)step.bytes, step.byte_steps, sorted ? rows : tokens, K, l.block, 127);
        if (!sorted) {
#pragma omp for
            for (i64 i = 0; i < rows; i++) steps[i] = step.byte_steps[token_of[i]];
        }
        const uint8_t* packed = pack_rows(experts, step, bytes, K, row);
        for_experts(experts, step, (const int8_t*)l.weight, N / NR, K,
                    multiplying(packed, l.start, K, scaling((const float*)steps, l.scales, (const float*)l.bias, out, N)));
    }
}

// The results of a token's experts, weighted, and that of the shared expert, in its row of mlp_out
template <class T>
static inline void mix_row(const Layer& layer, const Step& step, i64 token) {
    const Experts& experts = layer.experts;
    const i64 width = step.width, k = experts.top_k, *rows = step.row_of + token * k;
    const float *weights = step.expert_weights + token * k, *logits = step.router_logits + token * experts.router.outputs;
    const bool gated = experts.router.outputs > experts.num_experts;
    T* out = (T*)step.mlp_out + token * width;
    const vf gate = gated ? as(out, sigmoid(as(out, all(logits[experts.num_experts])))) : vf{};
    for (i64 i = 0; i < width; i += W) {
        vf total = {};
        for (i64 j = 0; j < k; j++) {
            const vf v = load((const T*)step.expert_rows + rows[j] * width + i) * weights[j];
            total += experts.rounds ? as(out, v) : v;
        }
        if (layer.gate_up.kind) {
            const vf v = load(out + i);
            total = as(out, total) + (gated ? as(out, gate * v) : v);
        }
        store(out + i, total);
    }
}

// A whole mixture by itself, for fast.modules: `chosen` and `expert_weights` are given
template <class T>
static void mixture(const Layer& layer, const Step& step, const T* x) {
    const Experts& experts = layer.experts;
    const i64 tokens = step.tokens, rows = tokens * experts.top_k, inner = experts.down.inputs;
#pragma omp parallel if (rows * experts.gate_up.inputs * inner > 100000)
    {
#pragma omp single
        group(experts, step, tokens);
        expert_linear(experts, experts.gate_up, step, x, (T*)step.gate_up, tokens, false);
        activate((const T*)step.gate_up, (T*)step.activated, rows, inner, experts.act);
        expert_linear(experts, experts.down, step, (const T*)step.activated, (T*)step.expert_rows, tokens, true);
#pragma omp for
        for (i64 t = 0; t < tokens; t++) mix_row<T>(layer, step, t);
    }
}
EXPORT(mixture)
