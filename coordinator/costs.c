/* costs.c - sums what a model's layers cost per token, from the shapes of their tensors
 *
 * Products follow from the matrices. What is kept for the backward pass is what the engine keeps
 * of the kinds that it has (memory_model), and of others the outputs of their products. */
#include "coordinator/strategy.h"

#include <math.h>
#include <string.h>

#define CHUNK        64.0
#define INDEX_COST   1.3 /* of an indexer's product, with the choice, beside attention's */
#define MIXER_CALLS  14u /* operators of a block beside its products */
#define FFN_CALLS    6u
#define MOE_CALLS    24u

static bool has(const struct outline_block *b, enum outline_op op)
{
    return b->ops >> op & 1;
}

static double max(double a, double b)
{
    return a > b ? a : b;
}

/* Floats that a token's products make in the block, experts apart. */
static double product_outputs(const struct outline_block *b, enum outline_part part)
{
    double n = 0;
    for (uint32_t i = 0; i < b->n_tensors; i++)
        if (b->tensors[i].part == part && b->tensors[i].in > 1)
            n += (double)b->tensors[i].out;
    return n;
}

static double tensor_flops(const struct outline_tensor *t)
{
    return t->in > 1 ? 2.0 * (double)t->out * (double)t->in : 0;
}

static double part_flops(const struct outline_block *b, enum outline_part part)
{
    double n = 0;
    for (uint32_t i = 0; i < b->n_tensors; i++)
        if (b->tensors[i].part == part)
            n += tensor_flops(&b->tensors[i]);
    return n;
}

/* What is slow about narrow matrices. */
static double tensor_slow(const struct outline_tensor *t)
{
    return t->in > 1 ? tensor_flops(t) / sqrt((double)t->out * (double)t->in) : 0;
}

/* ---- mixers --------------------------------------------------------------------------------- */

/* Keys that a token meets on average, with all before it or with a window. */
static double mean_keys(const struct outline_block *b, double length)
{
    double most = b->index_top_k ? b->index_top_k : b->window ? b->window : length;
    return most < length ? most - most * most / (2 * length) : length / 2;
}

/* Of one token: products, and what a CPU does besides. */
static void add_core(double products, double besides, double besides_back, struct costs *c)
{
    c->core_flops += 2 * products;
    c->core_back_flops += 5 * products;
    c->core_besides += 2 * besides;
    c->core_back_besides += 5 * besides_back;
}

static void add_softmax(const struct outline_block *b, double length, struct costs *c)
{
    double pairs = b->heads * mean_keys(b, length);
    double dims = (double)b->key_dim + b->value_dim;
    bool is_sparse = has(b, OP_SPARSE_ATTENTION) && has(b, OP_MLA);
    /* Chosen keys are read in the latent's space, which is wider, and gathered one by one: besides
     * products they cost in proportion to their width. */
    if (is_sparse)
        dims = 2 * 512 + 64;
    double wide = is_sparse ? dims / CLUSTER_TIMED_DIMS : 1;
    add_core(pairs * dims, pairs * wide * CLUSTER_SOFTMAX_DIMS,
             pairs * wide * CLUSTER_SOFTMAX_BACK_DIMS, c);
    if (b->index_top_k) {
        double index = INDEX_COST * 2.0 * b->index_heads * b->index_dim * length / 2;
        c->core_flops += index;
        c->core_besides += index * CLUSTER_SOFTMAX_DIMS / CLUSTER_TIMED_DIMS;
    }
    c->key_width += b->kv_heads == 1 ? dims : (double)b->kv_heads * dims;
}

static void add_scan(const struct outline_block *b, struct costs *c)
{
    c->scan_units += b->heads * cluster_scan_work(b->key_dim, b->value_dim) /
                     cluster_scan_work(128, 128);
    c->state += (double)b->n_state;
}

/* Of common/recompute.h: first projections and what the core gives stay, the rest is made again. */
static double mixer_kept_some(const struct outline_block *b, uint64_t hidden)
{
    double n = (double)b->heads * b->value_dim + b->heads + b->index_top_k;
    for (uint32_t i = 0; i < b->n_tensors; i++)
        if (b->tensors[i].part == PART_ATTENTION && b->tensors[i].in == hidden)
            n += (double)b->tensors[i].out;
    return n + (double)b->n_state / CHUNK;
}

static double ffn_kept_some(const struct outline_block *b)
{
    if (!b->n_experts)
        return 0;
    return 2.0 * b->n_experts + 4.0 * b->top_k + ((double)b->top_k + 1) * b->expert_in;
}

/* A delta rule keeps queries, keys and values three times, its gates, and a state a chunk. */
static double mixer_kept(const struct outline_block *b)
{
    double wide = (double)b->heads * b->value_dim, outputs = product_outputs(b, PART_ATTENTION);
    if (!b->n_state)
        return outputs + wide + b->heads + b->index_top_k;
    return max(outputs, 8 * wide) + 6 * wide + (double)b->n_state / CHUNK +
           b->heads * (2 * CHUNK + 2.0 * b->key_dim);
}

/* ---- feed-forward --------------------------------------------------------------------------- */

static double ffn_kept(const struct outline_block *b, double *out_row)
{
    double dense = 1.5 * (product_outputs(b, PART_DENSE) + product_outputs(b, PART_SHARED));
    *out_row = 0;
    if (!b->n_experts)
        return dense;
    /* Logits and scores are f32, so count twice; every token gets top_k rows back. */
    *out_row = b->expert_in + (double)b->expert_matrices * b->expert_inter;
    return dense + 2.0 * b->n_experts + 4.0 * b->top_k +
           product_outputs(b, PART_LATENT) + (double)b->top_k * b->expert_in;
}

static void add_experts(const struct outline_block *b, struct costs *c)
{
    c->n_moe++;
    c->top_k = b->top_k > c->top_k ? b->top_k : c->top_k;
    c->n_experts = b->n_experts > c->n_experts ? b->n_experts : c->n_experts;
    c->row_width = b->expert_in > c->row_width ? b->expert_in : c->row_width;
    for (uint32_t i = 0; i < b->n_tensors; i++)
        if (b->tensors[i].part == PART_EXPERTS)
            c->expert_slow += tensor_slow(&b->tensors[i]) * b->top_k;
    c->expert_flops += part_flops(b, PART_EXPERTS) * b->top_k;
}

/* ---- the model ------------------------------------------------------------------------------ */

static void add_parameters(const struct outline_block *b, struct costs *c, uint64_t *dense,
                           uint64_t *experts)
{
    uint64_t all, active;
    outline_block_count(b, &all, &active);
    for (uint32_t i = 0; i < b->n_tensors; i++) {
        const struct outline_tensor *t = &b->tensors[i];
        uint64_t n = t->n_copies * t->out * (t->in ? t->in : 1);
        *(t->part == PART_EXPERTS ? experts : dense) += n;
        if (t->part == PART_ATTENTION && t->in > 1 && strstr(t->names, "_proj"))
            c->adapters += t->out + t->in;
    }
    c->active += active;
}

static void add_products(const struct outline_block *b, uint32_t n_calls, struct costs *c)
{
    for (uint32_t i = 0; i < b->n_tensors; i++) {
        const struct outline_tensor *t = &b->tensors[i];
        if (t->part == PART_EXPERTS || t->part == PART_EMBEDDING)
            continue;
        c->dense_flops += tensor_flops(t);
        c->dense_slow += tensor_slow(t);
        c->n_calls += t->in > 1;
    }
    c->n_calls += n_calls;
}

static void add_layer(const struct outline *o, uint32_t l, double length, struct costs *c)
{
    double kept = 3.0 * o->hidden, some = o->hidden, row = 0;
    uint64_t dense = 0, experts = 0;
    if (o->layers[l].mixer != OUTLINE_NONE) {
        const struct outline_block *b = &o->blocks[o->layers[l].mixer];
        kept += mixer_kept(b);
        some += mixer_kept_some(b, o->hidden);
        if (b->n_state)
            add_scan(b, c);
        else
            add_softmax(b, length, c);
        add_products(b, MIXER_CALLS, c);
        add_parameters(b, c, &dense, &experts);
    }
    if (o->layers[l].ffn != OUTLINE_NONE) {
        const struct outline_block *b = &o->blocks[o->layers[l].ffn];
        kept += ffn_kept(b, &row);
        some += ffn_kept_some(b);
        if (b->n_experts)
            add_experts(b, c);
        add_products(b, b->n_experts ? MOE_CALLS : FFN_CALLS, c);
        add_parameters(b, c, &dense, &experts);
    }
    c->kept += kept;
    c->kept_some += some;
    c->kept_max = max(c->kept_max, kept);
    c->row_kept = max(c->row_kept, row);
    c->dense += dense;
    c->experts += experts;
    c->layer_dense_max = dense > c->layer_dense_max ? dense : c->layer_dense_max;
    c->layer_experts_max = experts > c->layer_experts_max ? experts : c->layer_experts_max;
}

/* Rows of the stream that stay: one a layer, a bank of block outputs, or several streams. */
static double stream_rows(const struct outline *o)
{
    double rows = o->n_layers + 2.0;
    for (uint32_t i = 0; i < o->n_blocks; i++) {
        if (has(&o->blocks[i], OP_HYPER_CONNECTIONS))
            return 4 * rows;
        if (has(&o->blocks[i], OP_ATTN_RES))
            return rows + 9;
    }
    return rows;
}

void costs_init(const struct outline *o, uint32_t sequence_length, struct costs *out)
{
    struct costs c = {.n_layers = o->n_layers, .hidden = o->hidden};
    uint64_t none = 0;
    for (uint32_t l = 0; l < o->n_layers; l++)
        add_layer(o, l, sequence_length, &c);
    add_parameters(&o->top, &c, &c.dense, &none);
    c.embedding = (o->is_tied ? 1ull : 2ull) * o->hidden * o->vocab;
    c.dense_flops += 2.0 * o->hidden * o->vocab;
    c.dense_slow += 2.0 * sqrt((double)o->hidden * o->vocab);
    c.active -= o->is_tied ? 0 : (uint64_t)o->hidden * o->vocab;
    c.stream = stream_rows(o) * o->hidden;
    *out = c;
}
