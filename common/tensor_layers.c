/* tensor_layers.c - which tensors a model has, under the names of its family's checkpoints
 *
 * One function per kind of layer states its tensors in order: role, published name, how it starts
 * and its shape. Everything else (offsets, flags, counts) follows from that. */
#include "common/tensor_map.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"

#define A_LOG_MULTIPLE 128u
#define NAME_MAX_BYTES 256

enum { BUFFER = 1, F32 = 2, UNREACHED = 4, OPTIONAL = 8 };

/* What families call the same things. */
static const struct names {
    const char *root, *layers;    /* before everything; before the number of a layer */
    const char *moe;              /* the feed-forward of layers with experts */
    const char *gate, *up, *down; /* of one expert */
} family_names[] = {
    [FAMILY_KIMI_K3]     = { "language_model.", "language_model.model.layers.",
                             "block_sparse_moe", "w1", "w3", "w2" },
    [FAMILY_KIMI_LINEAR] = { "", "model.layers.", "block_sparse_moe", "w1", "w3", "w2" },
    [FAMILY_DEEPSEEK_V3] = { "", "model.layers.", "mlp", "gate_proj", "up_proj", "down_proj" },
};
#define FAMILIES (sizeof family_names / sizeof *family_names)

struct builder {
    const struct model_spec *spec;
    const struct names *names;
    struct tensor_map *map;
    size_t   entries_cap;
    size_t   names_used, names_cap;
    uint32_t unit;
    int32_t  expert;      /* -1: dense */
    uint32_t layer;       /* of the names that are added now */
    char     prefix[128]; /* before them */
};

/* Names move while they grow, so an entry holds its name's place until the end. */
static uintptr_t name_add(struct builder *b, const char *suffix)
{
    char name[NAME_MAX_BYTES];
    int n = snprintf(name, sizeof name, "%s%s", b->prefix, suffix);
    assert(n > 0 && n < NAME_MAX_BYTES);
    size_t bytes = (size_t)n + 1;
    if (b->names_used + bytes > b->names_cap) {
        b->names_cap = (b->names_used + bytes) * 2;
        b->map->names = xrealloc(b->map->names, b->names_cap);
    }
    memcpy(b->map->names + b->names_used, name, bytes);
    uintptr_t place = b->names_used;
    b->names_used += bytes;
    return place;
}

static struct tensor_entry *add(struct builder *b, enum tensor_role role, const char *suffix,
                                enum tensor_init init, int flags, uint64_t d0, uint64_t d1,
                                uint64_t d2)
{
    struct tensor_map *map = b->map;
    map->entries = xgrow(map->entries, map->n_entries, &b->entries_cap, sizeof *map->entries);
    struct tensor_entry *e = &map->entries[map->n_entries++];
    *e = (struct tensor_entry){
        .name = (const char *)name_add(b, suffix),
        .role = role,
        .unit = b->unit,
        .expert = b->expert,
        .n_dims = d2 ? 3 : d1 ? 2 : 1,
        .dims = { d0, d1, d2 },
        .init = init,
        .is_buffer = flags & BUFFER,
        .is_unreached = flags & UNREACHED,
        .is_optional = flags & OPTIONAL,
        .is_matrix = d0 > 1 && d1 > 1 && !d2,
        .keep_f32 = flags & F32,
    };
    e->count = e->stored_count = d0 * (d1 ? d1 : 1) * (d2 ? d2 : 1);
    return e;
}

static void add_matrix(struct builder *b, enum tensor_role role, const char *suffix, uint64_t out,
                       uint64_t in)
{
    add(b, role, suffix, INIT_NORMAL, 0, out, in, 0);
}

static void add_norm(struct builder *b, enum tensor_role role, const char *suffix, uint64_t n)
{
    add(b, role, suffix, INIT_ONES, 0, n, 0, 0);
}

/* The query of an attention residual starts at zero: a plain mean over the rows. */
static void add_mixer(struct builder *b, enum tensor_role norm, const char *norm_suffix,
                      enum tensor_role proj, const char *proj_suffix, int flags)
{
    add(b, norm, norm_suffix, INIT_ONES, flags, b->spec->hidden, 0, 0);
    add(b, proj, proj_suffix, INIT_ZEROS, flags, 1, b->spec->hidden, 0);
}

/* Kimi-Linear's broadcasts as it is stored. */
static void shape_of_a_log(struct tensor_entry *a, uint64_t heads)
{
    const uint64_t dims[] = { 1, 1, heads, 1 };

    a->n_dims = 4;
    memcpy(a->dims, dims, sizeof dims);
}

static void add_kda(struct builder *b)
{
    const struct model_spec *m = b->spec;
    uint64_t d = m->kda_head_dim, h = m->kda_heads, wide = d * h;

    add_matrix(b, ROLE_KDA_Q, "self_attn.q_proj.weight", wide, m->hidden);
    add_matrix(b, ROLE_KDA_K, "self_attn.k_proj.weight", wide, m->hidden);
    add_matrix(b, ROLE_KDA_V, "self_attn.v_proj.weight", wide, m->hidden);
    add(b, ROLE_KDA_Q_CONV, "self_attn.q_conv1d.weight", INIT_CONV, F32, wide, 1, m->conv_kernel);
    add(b, ROLE_KDA_K_CONV, "self_attn.k_conv1d.weight", INIT_CONV, F32, wide, 1, m->conv_kernel);
    add(b, ROLE_KDA_V_CONV, "self_attn.v_conv1d.weight", INIT_CONV, F32, wide, 1, m->conv_kernel);
    add_matrix(b, ROLE_KDA_F_A, "self_attn.f_a_proj.weight", d, m->hidden);
    add_matrix(b, ROLE_KDA_F_B, "self_attn.f_b_proj.weight", wide, d);
    add(b, ROLE_KDA_DT_BIAS, "self_attn.dt_bias", INIT_DT_BIAS, F32, wide, 0, 0);
    struct tensor_entry *a = add(b, ROLE_KDA_A_LOG, "self_attn.A_log",
                                 m->kda_gate_bounded ? INIT_ZEROS : INIT_A_LOG, F32, h, 0, 0);
    if (m->family == FAMILY_KIMI_K3)
        a->stored_count = a->dims[0] = (h + A_LOG_MULTIPLE - 1) / A_LOG_MULTIPLE * A_LOG_MULTIPLE;
    else
        shape_of_a_log(a, h);
    add_matrix(b, ROLE_KDA_BETA, "self_attn.b_proj.weight", h, m->hidden);
    if (m->kda_gate_full_rank) {
        add_matrix(b, ROLE_KDA_G, "self_attn.g_proj.weight", wide, m->hidden);
    } else {
        add_matrix(b, ROLE_KDA_G_A, "self_attn.g_a_proj.weight", d, m->hidden);
        add_matrix(b, ROLE_KDA_G_B, "self_attn.g_b_proj.weight", wide, d);
    }
    add(b, ROLE_KDA_O_NORM, "self_attn.o_norm.weight", INIT_ONES, F32, d, 0, 0);
    add_matrix(b, ROLE_KDA_O, "self_attn.o_proj.weight", m->hidden, wide);
}

/* Trained by no loss of the model's output. K3.1's may come without the norm's bias. */
static void add_indexer(struct builder *b)
{
    const struct model_spec *m = b->spec;
    uint64_t d = m->index_head_dim, h = m->index_heads;
    int bias = UNREACHED | (m->family == FAMILY_KIMI_K3 ? OPTIONAL : 0);

    add(b, ROLE_INDEX_Q, "self_attn.indexer.wq_b.weight", INIT_NORMAL, UNREACHED, h * d,
        m->q_lora_rank, 0);
    add(b, ROLE_INDEX_K, "self_attn.indexer.wk.weight", INIT_NORMAL, UNREACHED, d, m->hidden, 0);
    add(b, ROLE_INDEX_K_NORM, "self_attn.indexer.k_norm.weight", INIT_ONES, UNREACHED, d, 0, 0);
    add(b, ROLE_INDEX_K_NORM_BIAS, "self_attn.indexer.k_norm.bias", INIT_ZEROS, bias, d, 0, 0);
    add(b, ROLE_INDEX_WEIGHTS, "self_attn.indexer.weights_proj.weight", INIT_NORMAL, UNREACHED, h,
        m->hidden, 0);
}

static void add_biases(struct builder *b)
{
    const struct model_spec *m = b->spec;

    if (m->q_lora_rank)
        add(b, ROLE_MLA_Q_A_BIAS, "self_attn.q_a_proj.bias", INIT_ZEROS, 0, m->q_lora_rank, 0, 0);
    add(b, ROLE_MLA_KV_A_BIAS, "self_attn.kv_a_proj_with_mqa.bias", INIT_ZEROS, 0,
        m->kv_lora_rank + m->qk_rope_dim, 0, 0);
    add(b, ROLE_MLA_O_BIAS, "self_attn.o_proj.bias", INIT_ZEROS, 0, m->hidden, 0, 0);
}

static void add_mla(struct builder *b)
{
    const struct model_spec *m = b->spec;
    uint64_t q_wide = (uint64_t)m->heads * (m->qk_nope_dim + m->qk_rope_dim);
    uint64_t v_wide = (uint64_t)m->heads * m->v_dim;

    if (m->q_lora_rank) {
        add_matrix(b, ROLE_MLA_Q_A, "self_attn.q_a_proj.weight", m->q_lora_rank, m->hidden);
        add_norm(b, ROLE_MLA_Q_A_NORM, "self_attn.q_a_layernorm.weight", m->q_lora_rank);
        add_matrix(b, ROLE_MLA_Q_B, "self_attn.q_b_proj.weight", q_wide, m->q_lora_rank);
    } else {
        add_matrix(b, ROLE_MLA_Q, "self_attn.q_proj.weight", q_wide, m->hidden);
    }
    add_matrix(b, ROLE_MLA_KV_A, "self_attn.kv_a_proj_with_mqa.weight",
               m->kv_lora_rank + m->qk_rope_dim, m->hidden);
    add_norm(b, ROLE_MLA_KV_A_NORM, "self_attn.kv_a_layernorm.weight", m->kv_lora_rank);
    add_matrix(b, ROLE_MLA_KV_B, "self_attn.kv_b_proj.weight",
               (uint64_t)m->heads * (m->qk_nope_dim + m->v_dim), m->kv_lora_rank);
    if (m->mla_output_gate)
        add_matrix(b, ROLE_MLA_G, "self_attn.g_proj.weight", v_wide, m->hidden);
    add_matrix(b, ROLE_MLA_O, "self_attn.o_proj.weight", m->hidden, v_wide);
    if (m->attention_bias)
        add_biases(b);
    if (m->index_top_k)
        add_indexer(b);
}

static void set_prefix(struct builder *b, const char *module)
{
    snprintf(b->prefix, sizeof b->prefix, "%s%u.%s%s", b->names->layers, b->layer, module,
             *module ? "." : "");
}

static void add_dense(struct builder *b)
{
    const struct model_spec *m = b->spec;

    set_prefix(b, m->dense_as_moe ? b->names->moe : "mlp");
    add_matrix(b, ROLE_MLP_GATE, "gate_proj.weight", m->dense_inter, m->hidden);
    add_matrix(b, ROLE_MLP_UP, "up_proj.weight", m->dense_inter, m->hidden);
    add_matrix(b, ROLE_MLP_DOWN, "down_proj.weight", m->hidden, m->dense_inter);
}

static void add_moe(struct builder *b)
{
    const struct model_spec *m = b->spec;
    uint64_t shared = (uint64_t)m->n_shared_experts * m->expert_inter;

    set_prefix(b, b->names->moe);
    add_matrix(b, ROLE_ROUTER, "gate.weight", m->n_experts, m->hidden);
    add(b, ROLE_ROUTER_BIAS, "gate.e_score_correction_bias", INIT_ZEROS,
        BUFFER | F32, m->n_experts, 0, 0);
    if (m->latent_moe) {
        add_matrix(b, ROLE_LATENT_DOWN, "routed_expert_down_proj.weight",
                   m->latent, m->hidden);
        add_matrix(b, ROLE_LATENT_UP, "routed_expert_up_proj.weight", m->hidden,
                   m->latent);
    }
    if (m->latent_norm)
        add_norm(b, ROLE_LATENT_NORM, "routed_expert_norm.weight", m->latent);
    if (shared) {
        add_matrix(b, ROLE_SHARED_GATE, "shared_experts.gate_proj.weight",
                   shared, m->hidden);
        add_matrix(b, ROLE_SHARED_UP, "shared_experts.up_proj.weight", shared,
                   m->hidden);
        add_matrix(b, ROLE_SHARED_DOWN, "shared_experts.down_proj.weight",
                   m->hidden, shared);
    }
}

static void add_expert_matrix(struct builder *b, enum tensor_role role, const char *name,
                              uint64_t out, uint64_t in)
{
    char suffix[32];
    snprintf(suffix, sizeof suffix, "%s.weight", name);
    add_matrix(b, role, suffix, out, in);
}

static void add_experts(struct builder *b)
{
    const struct model_spec *m = b->spec;

    for (uint32_t e = 0; e < m->n_experts; e++) {
        b->expert = (int32_t)e;
        snprintf(b->prefix, sizeof b->prefix, "%s%u.%s.experts.%u.", b->names->layers, b->layer,
                 b->names->moe, e);
        add_expert_matrix(b, ROLE_EXPERT_GATE, b->names->gate, m->expert_inter, m->latent);
        add_expert_matrix(b, ROLE_EXPERT_UP, b->names->up, m->expert_inter, m->latent);
        add_expert_matrix(b, ROLE_EXPERT_DOWN, b->names->down, m->latent, m->expert_inter);
    }
    b->expert = -1;
}

static void unit_begin(struct builder *b, const char *module)
{
    snprintf(b->prefix, sizeof b->prefix, "%s%s", b->names->root, module);
}

static void unit_end(struct builder *b)
{
    b->unit++;
}

static void add_layer(struct builder *b, uint32_t l)
{
    const struct model_spec *m = b->spec;

    b->layer = l;
    set_prefix(b, "");
    add_norm(b, ROLE_ATTN_NORM, "input_layernorm.weight", m->hidden);
    add_norm(b, ROLE_MLP_NORM, "post_attention_layernorm.weight", m->hidden);
    if (m->residual == RESIDUAL_ATTN_RES) {
        add_mixer(b, ROLE_ATTN_RES_NORM, "self_attention_res_norm.weight", ROLE_ATTN_RES_PROJ,
                  "self_attention_res_proj.weight", l == 0 ? UNREACHED : 0);
        add_mixer(b, ROLE_MLP_RES_NORM, "mlp_res_norm.weight", ROLE_MLP_RES_PROJ,
                  "mlp_res_proj.weight", 0);
    }
    if (m->layers[l].attention == ATTENTION_KDA)
        add_kda(b);
    else
        add_mla(b);
    if (m->layers[l].mlp == MLP_DENSE) {
        add_dense(b);
        unit_end(b);
        return;
    }
    add_moe(b);
    add_experts(b);
    unit_end(b);
}

static void names_finish(struct tensor_map *map)
{
    for (size_t i = 0; i < map->n_entries; i++)
        map->entries[i].name = map->names + (uintptr_t)map->entries[i].name;
    tensor_map_index(map);
}

int tensor_map_init(const struct model_spec *m, struct tensor_map *out_map, struct err *err)
{
    struct tensor_map map = {0};
    struct builder b = { .spec = m, .map = &map, .expert = -1 };

    if ((unsigned)m->family >= FAMILIES)
        return err_set(err, -ENOTSUP, "model family %d has no tensor names; known: kimi_k3, "
                       "kimi_linear, deepseek_v3", (int)m->family);
    b.names = &family_names[m->family];
    map.layers = b.names->layers;
    map.n_layers = m->n_layers;
    map.n_mtp_layers = m->n_mtp_layers;
    map.n_units = m->n_layers + 2;

    unit_begin(&b, "model.");
    add_matrix(&b, ROLE_EMBEDDING, "embed_tokens.weight", m->vocab, m->hidden);
    unit_end(&b);
    for (uint32_t l = 0; l < m->n_layers; l++)
        add_layer(&b, l);
    unit_begin(&b, "model.");
    add_norm(&b, ROLE_FINAL_NORM, "norm.weight", m->hidden);
    if (m->residual == RESIDUAL_ATTN_RES)
        add_mixer(&b, ROLE_OUTPUT_RES_NORM, "output_attn_res_norm.weight", ROLE_OUTPUT_RES_PROJ,
                  "output_attn_res_proj.weight", 0);
    snprintf(b.prefix, sizeof b.prefix, "%s", b.names->root);
    add(&b, ROLE_HEAD, "lm_head.weight", INIT_HEAD, 0, m->vocab, m->hidden, 0);
    unit_end(&b);
    assert(b.unit == map.n_units);

    names_finish(&map);
    *out_map = map;
    return 0;
}
