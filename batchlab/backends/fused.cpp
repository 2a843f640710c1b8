// A step through all layers in one call. Made from the cells of nbs/25_fused.ipynb by .ci/cpp: edit the notebook.
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
static void begin_layer(const Layer* before, const Layer& layer, const Step& step, i64 rows) {
    const i64 width = step.width;
#pragma omp for
    for (i64 r = 0; r < rows; r++) {
        T* stream = (T*)step.stream + r * width;
        if (before) {
            if (before->parallel)
                add_row(stream, (T*)step.projected + r * width, before->after, before->behind, before->residual, width);
            if (before->experts.num_experts) mix_row<T>(*before, step, r);
            add_row(stream, (T*)step.mlp_out + r * width, before->mlp_after, before->behind, before->residual, width);
        }
        if (layer.before.kind) norm_row(stream, (T*)step.normed + r * width, layer.before, 0, width);
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
static void after_attention(const Layer& layer, const Step& step, i64 rows) {
    if (layer.parallel && !layer.mlp_before.kind) return;
    const i64 width = step.width;
#pragma omp for
    for (i64 r = 0; r < rows; r++) {
        T* stream = (T*)step.stream + r * width;
        if (!layer.parallel) add_row(stream, (T*)step.projected + r * width, layer.after, layer.behind, layer.residual, width);
        if (layer.mlp_before.kind) norm_row(stream, (T*)step.normed + r * width, layer.mlp_before, 0, width);
    }
}

constexpr int PARTS = 12;  // of a layer; behind the last layer there are two more, final norm and head
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
// Parts `first` to `last` (excluded) of all layers, by one team of threads
template <class T>
static void run(const Layer* layers, i64 n, const Step& step, i64 first, i64 last) {
#pragma omp parallel if (step.tokens * step.width * layers[0].qkv.outputs > 100000)
    for (i64 p = first; p < last; p++) {
        double begin = 0;
        if (step.seconds && omp_get_thread_num() == 0) begin = omp_get_wtime();
        part_of<T>(layers, n, step, p);
        if (step.seconds && omp_get_thread_num() == 0) step.seconds[p % PARTS] += omp_get_wtime() - begin;
    }
}
EXPORT(run)
