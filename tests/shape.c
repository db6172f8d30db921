/* shape.c - writes a model's config.json and its tokens */
#include "tests/shape.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define BATCHES_OF_TOKENS 4u

static const struct shape shapes[] = {
    {"921m", 1024, 8, 8, 128, 64, 512, 64, 8, 512, 32768, 4096, 4},
    {"tiny", 64, 4, 2, 32, 16, 32, 8, 2, 32, 256, 128, 8},
};

const struct shape *shape_find(const char *name)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (!strcmp(shapes[i].name, name))
            return &shapes[i];
    return NULL;
}

static FILE *create(const char *folder, const char *name)
{
    char *path = xasprintf("%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    if (!f) {
        fprintf(stderr, "shape: %s: %s\n", path, strerror(errno));
        exit(1);
    }
    free(path);
    return f;
}

static void close_written(FILE *f)
{
    if (fclose(f) != 0) {
        fprintf(stderr, "shape: writing the model: %s\n", strerror(errno));
        exit(1);
    }
}

static void write_layers(FILE *f, const char *key, const struct shape *s, bool is_full)
{
    const char *comma = "";
    fprintf(f, "\"%s\": [", key);
    for (unsigned l = 1; l <= s->n_layers; l++)
        if ((l % 4 == 0) == is_full) {
            fprintf(f, "%s%u", comma, l);
            comma = ", ";
        }
    fprintf(f, "]");
}

static void write_config(const struct shape *s, const char *folder)
{
    FILE *f = create(folder, "config.json");
    fprintf(f, "{\"model_type\": \"kimi_linear\", \"architectures\": [\"KimiLinearForCausalLM\"],\n"
            "\"vocab_size\": %u, \"hidden_size\": %u, \"num_hidden_layers\": %u,\n"
            "\"intermediate_size\": %u, \"moe_intermediate_size\": %u,\n"
            "\"num_attention_heads\": %u, \"num_key_value_heads\": %u, \"q_lora_rank\": null,\n"
            "\"kv_lora_rank\": %u, \"qk_nope_head_dim\": %u, \"qk_rope_head_dim\": %u,\n"
            "\"v_head_dim\": %u, \"mla_use_nope\": true,\n", s->vocab, s->hidden, s->n_layers,
            s->expert_width, s->expert_width, s->n_heads, s->n_heads, s->latent, s->head_dim,
            s->rope_dim, s->head_dim);
    fprintf(f, "\"linear_attn_config\": {\"num_heads\": %u, \"head_dim\": %u,\n"
            "\"short_conv_kernel_size\": 4, ", s->n_heads, s->head_dim);
    write_layers(f, "kda_layers", s, false);
    fprintf(f, ", ");
    write_layers(f, "full_attn_layers", s, true);
    fprintf(f, "},\n\"first_k_dense_replace\": 0, \"moe_layer_freq\": 1, \"num_experts\": %u,\n"
            "\"num_experts_per_token\": %u, \"num_shared_experts\": 1,\n"
            "\"moe_renormalize\": true, \"moe_router_activation_func\": \"sigmoid\",\n"
            "\"routed_scaling_factor\": 2.446, \"num_expert_group\": 1, \"topk_group\": 1,\n"
            "\"hidden_act\": \"silu\", \"initializer_range\": 0.02, \"rms_norm_eps\": 1e-05,\n"
            "\"tie_word_embeddings\": false}\n", s->n_experts, s->top_k);
    close_written(f);
}

/* Uniform, so that no step is easier than another. */
static void write_tokens(const struct shape *s, const char *folder)
{
    FILE *f = create(folder, "tokens.bin");
    uint64_t x = 1;
    size_t n = (size_t)BATCHES_OF_TOKENS * s->n_sequences * s->sequence_length + 1;
    for (size_t i = 0; i < n; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        uint16_t token = (uint16_t)((x >> 33) % s->vocab);
        fwrite(&token, sizeof token, 1, f);
    }
    close_written(f);
}

void shape_write(const struct shape *s, const char *folder)
{
    write_config(s, folder);
    write_tokens(s, folder);
}
