// A step through all layers in one call. Made from the cells of nbs/4_fast/25_fused.ipynb by .ci/cpp: edit the notebook.
#include "adapters.cpp"

template <class T>
static void linear(const Linear& l, const T* x, T* out, i64 rows, const Step& step) {
    if (l.kind == 1) shared::product(x, (const T*)l.weight, (const T*)l.bias, out, rows, l.outputs, l.inputs, (T*)step.packed);
    if (l.kind == 2) {
        auto* bytes = (uint8_t*)step.bytes;
        shared::quantize(x, bytes, step.byte_steps, rows, l.inputs, l.block, 127);
        shared::bytes_product((const uint8_t*)bytes, step.byte_steps, (const int8_t*)l.weight, l.start, l.scales,
                              (const float*)l.bias, out, rows, l.outputs, l.inputs, (uint8_t*)step.packed);
    }
    const auto* panels = (const Panel*)l.weight;
    if (l.kind == 4) shared::grouped_product(x, panels, (const T*)l.bias, out, rows, l.outputs, l.inputs, (T*)step.packed);
    if (l.kind == 5) shared::quads_product(x, panels, (const T*)l.bias, out, rows, l.outputs, l.inputs, step.packed);
}
// A product, of all of a model the `index`-th, and what adapters add to it; late: of the tokens whose logits are due
template <class T>
static void product_of(const Linear& l, i64 index, const T* x, T* out, i64 rows, bool late, const Step& step) {
    linear(l, x, out, rows, step);
    if (step.adapted && l.kind != 3) adapt(*step.adapted, index, x, l.inputs, out, l.outputs, late);
}
template <class T>
static void take(T* x, const i64* rows, i64 n, i64 width) {  // ascending
    for (i64 i = 0; i < n; i++) memmove(x + i * width, x + rows[i] * width, width * sizeof(T));
}

// Part 0: what the layer before left is added to the residual stream, then the norm before attention
template <class T>
static inline void begin_row(const Layer* before, const Layer& layer, T* stream, T* projected, T* mlp_out, T* normed, i64 width) {
    if (before && before->parallel) add_row(stream, projected, before->after, before->norm_sums, before->residual, width);
    if (before) add_row(stream, mlp_out, before->mlp_after, before->norm_sums, before->residual, width);
    if (layer.before.kind) norm_row(stream, normed, layer.before, 0, width);
}
template <class T>
static void begin_layer(const Layer* before, const Layer& layer, const Step& step, i64 rows) {
    const auto row = [&](void* p, i64 r) { return (T*)p + r * step.width; };
#pragma omp for
    for (i64 r = 0; r < rows; r++) {
        if (before && before->experts.num_experts) mix_row<T>(*before, step, r);
        begin_row(before, layer, row(step.stream, r), row(step.projected, r), row(step.mlp_out, r), row(step.normed, r),
                  step.width);
    }
}
// Part 2: attention; of the last layer's rows those stay whose logits are due
template <class T>
static void attend_layer(const Layer& layer, const Step& step, bool last) {
    prepare<T>(layer, step);
    Shape shape = layer.shape;
    if (shape.window >= step.longest) shape.window = 0;
    T* attended = (T*)step.attended;
    const T *q = (const T*)step.qkv, *k = q + head_at(layer, shape.heads), *v = q + head_at(layer, shape.heads + shape.kv_heads);
    if (step.whole)
        shared::attend_whole(shape, q, k, v, shape.q_token, shape.q_head, shape.q_token,
                             layer.by_head ? shape.q_head : shape.dim_v, attended, step.work_units, step.num_work_units);
    else
        shared::attend(shape, q, (const T*)layer.keys, (const T*)layer.values, attended, step.blocks, step.query_rows,
                       step.work_units, step.num_work_units);
    if (!last || step.outputs == step.tokens) return;
#pragma omp single
    {
        const i64 *rows = step.logits_at, n = step.outputs;
        take(attended, rows, n, shape.heads * shape.dim_v), take((T*)step.stream, rows, n, step.width);
        if (layer.parallel) take((T*)step.normed, rows, n, step.width);
    }
}
// Part 4: what attention gave is added to the residual stream, then the norm before the MLP
template <class T>
static inline void middle_row(const Layer& layer, T* stream, T* projected, T* normed, i64 width) {
    if (!layer.parallel) add_row(stream, projected, layer.after, layer.norm_sums, layer.residual, width);
    if (layer.mlp_before.kind) norm_row(stream, normed, layer.mlp_before, 0, width);
}
template <class T>
static void after_attention(const Layer& layer, const Step& step, i64 rows) {
    if (layer.parallel && !layer.mlp_before.kind) return;
    const auto row = [&](void* p, i64 r) { return (T*)p + r * step.width; };
#pragma omp for
    for (i64 r = 0; r < rows; r++)
        middle_row(layer, row(step.stream, r), row(step.projected, r), row(step.normed, r), step.width);
}

constexpr int PARTS = 12;   // of a layer; behind the last layer there are two more, final norm and head
constexpr int SPARE = 256;  // rows that a step's memory has beside those of its tokens
template <class T>
static void part_of(const Layer* layers, i64 n, const Step& step, i64 p) {
    const i64 i = p / PARTS, part = p % PARTS;
    const Layer& layer = layers[i];
    const Experts& experts = layer.experts;
    if (part > 7 && !experts.num_experts) return;
    const bool late = i == n || (i == n - 1 && part > 2);
    const i64 rows = late ? step.outputs : step.tokens, product = 4 * i + part / 2;
    T *stream = (T*)step.stream, *normed = (T*)step.normed, *gate_up = (T*)step.gate_up, *activated = (T*)step.activated;
    const T* mlp_in = layer.mlp_before.kind || (layer.parallel && layer.before.kind) ? normed : stream;
    switch (part) {
        case 0:
            return begin_layer<T>(i ? layers + i - 1 : nullptr, layer, step, rows);
        case 1:
            return product_of(layer.qkv, product, (const T*)(layer.before.kind ? normed : stream),
                              (T*)(i == n ? step.logits : step.qkv), rows, late, step);
        case 2:
            return attend_layer<T>(layer, step, i == n - 1);
        case 3:
            return product_of(layer.out, product, (const T*)step.attended, (T*)step.projected, rows, late, step);
        case 4:
            return after_attention<T>(layer, step, rows);
        case 5:
            return product_of(layer.gate_up, product, mlp_in, gate_up, rows, late, step);
        case 6:
            if (layer.down.kind) activate((const T*)gate_up, activated, rows, layer.down.inputs, layer.act);
            return;
        case 7:
            return product_of(layer.down, product, (const T*)activated, (T*)step.mlp_out, rows, late, step);
        case 8:
            return choose(experts, step, mlp_in, rows);
        case 9:
            return expert_linear(experts, experts.gate_up, step, mlp_in, gate_up, rows, false);
        case 10:
            return activate((const T*)gate_up, activated, rows * experts.top_k, experts.down.inputs, experts.act);
        case 11:
            return expert_linear(experts, experts.down, step, (const T*)activated, (T*)step.expert_rows, rows, true);
    }
}

// Adds the time since the last part to part p, in thread 0
struct Clock {
    double* seconds;
    double begin = 0;
    Clock(const Step& step) : seconds(omp_get_thread_num() ? nullptr : step.seconds) {
        if (seconds) begin = omp_get_wtime();
    }
    void part(i64 p) {
        if (!seconds) return;
        const double now = omp_get_wtime();
        seconds[p % PARTS] += now - begin, begin = now;
    }
};
// Whether a layer's products take the way of `chain`: `rows` enough for all threads, weights that stay in the third cache and, in
// bf16, no matrix unit, which would wait for them
template <class T>
static bool chained(const Layer& l, const Linear& next, const Step& step, i64 rows, i64 threads) {
    if (std::is_same_v<T, bf16> && has_tiles()) return false;
    i64 weights = 0;
    for (const Linear* p : {&l.out, &l.gate_up, &l.down, &next}) {
        if (p->kind != 1) return false;
        weights += p->outputs * p->inputs * sizeof(T);
    }
    return !l.experts.num_experts && !step.adapted && threads <= SPARE && rows >= 4 * MR * threads && weights <= 32 << 20;
}
// From the output product of a layer to the product for queries, keys and values of the next, rows need nothing of each other. So
// a thread takes some of them all the way, as many as leave in its second cache what they leave for each part's next.
template <class T>
static void chain(const Layer* layer, i64 rows, bool further, const Step& step, Clock& clock) {
    const Layer &l = layer[0], &next = layer[1];
    const i64 width = step.width, inner = l.down.inputs, most = (512 << 10) / sizeof(T) / (l.gate_up.outputs + inner);
    const i64 parts = (rows + std::clamp<i64>(most, MR, 8 * MR) - 1) / std::clamp<i64>(most, MR, 8 * MR),
              threads = omp_get_num_threads();
    const i64 even = (parts + threads - 1) / threads * threads, each = (rows + even - 1) / even,
              own = omp_get_thread_num() * each;
    const auto mine = [&](void* p, i64 width) { return (T*)p + own * width; };
    T *packed = mine(step.packed, std::max({l.out.inputs, inner, width})), *projected = mine(step.projected, width);
    T *gate_up = mine(step.gate_up, l.gate_up.outputs), *mlp_out = mine(step.mlp_out, width);
    const auto product = [&](const Linear& p, const T* x, T* out, i64 m) {
        alone::product(x, (const T*)p.weight, (const T*)p.bias, out, m, p.outputs, p.inputs, packed);
    };
#pragma omp for schedule(dynamic)
    for (i64 first = 0; first < rows; first += each) {
        const i64 m = std::min(each, rows - first);
        T *stream = (T*)step.stream + first * width, *normed = (T*)step.normed + first * width;
        product(l.out, (const T*)step.attended + first * l.out.inputs, projected, m), clock.part(3);
        if (!l.parallel || l.mlp_before.kind)
            for (i64 at = 0; at < m * width; at += width) middle_row(l, stream + at, projected + at, normed + at, width);
        clock.part(4);
        product(l.gate_up, l.mlp_before.kind || (l.parallel && l.before.kind) ? normed : stream, gate_up, m), clock.part(5);
        for (i64 r = 0; r < m; r++) activate_row(gate_up + r * l.gate_up.outputs, gate_up + r * inner, 0, inner, inner, l.act);
        clock.part(6);
        product(l.down, gate_up, mlp_out, m), clock.part(7);
        for (i64 at = 0; at < m * width; at += width)
            begin_row(&l, next, stream + at, projected + at, mlp_out + at, normed + at, width);
        clock.part(0);
        if (further) product(next.qkv, next.before.kind ? normed : stream, (T*)step.qkv + first * next.qkv.outputs, m);
        if (further) clock.part(1);
    }
    clock.part(7);
}

// Parts `first` to `last` (excluded) of all layers, by one team of threads
template <class T>
static void run(const Layer* layers, i64 n, const Step& step, i64 first, i64 last) {
#pragma omp parallel if (step.tokens * step.width * layers[0].qkv.outputs > 100000)
    {
        const i64 threads = omp_get_num_threads();
        Clock clock(step);
        for (i64 p = first; p < last;) {
            const i64 i = p / PARTS, rows = i == n - 1 ? step.outputs : step.tokens, next = (i + 1) * PARTS;
            const bool further = i + 1 < n && last > next + 1;
            if (p % PARTS == 3 && last > next &&
                chained<T>(layers[i], further ? layers[i + 1].qkv : layers[i].out, step, rows, threads)) {
                chain<T>(layers + i, rows, further, step, clock);
                p = next + 1 + further;
            } else {
                part_of<T>(layers, n, step, p);
                clock.part(p++);
            }
        }
    }
}
EXPORT(run)
