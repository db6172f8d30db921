/* ctl_adapt_keys.c - the keys of a config.json that no reader asks for
 *
 * What a new model does differently may stand in a key that nobody here has heard of, and leave no
 * other trace. Keys of tokenizers, generation and storage stand in every configuration. */
#include "coordinator/ctl_adapt.h"

#include <string.h>

#include "common/hf_config.h"

static const char *const known[] = {
    /* what wrote the file, and what it stands beside */
    "_name_or_path", "auto_map", "dtype", "return_dict", "tf_legacy_loss", "torch_dtype",
    "torchscript", "transformers_version", "use_bfloat16", "use_cache", "vision_config",
    "output_attentions", "output_hidden_states", "output_scores", "is_decoder",
    "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "pruned_heads",
    "id2label", "label2id", "chunk_size_feed_forward", "remove_invalid_values",
    "return_dict_in_generate", "quantization_config", "compression_config",
    /* tokens */
    "bos_token_id", "eos_token_id", "pad_token_id", "ignore_index", "image_placeholder",
    "media_placeholder_token_id", "model_max_length",
    /* generation */
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "repetition_penalty", "temperature", "top_k", "top_p",
    "typical_p",
    /* training as its authors did it, which a job says for itself */
    "aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux", "router_aux_loss_coef",
    "output_router_logits",
    /* implied by others that are read, or without a meaning where they are not */
    "first_k_dense_replace", "qk_head_dim", "rope_theta",
};

/* Objects whose members change what is computed. */
static const char *const inner[] = {
    "text_config", "llm_config", "language_config", "rope_scaling", "rope_parameters",
    "linear_attn_config", "dsa_config",
};

static bool is_among(const char *key, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(key, list[i]))
            return true;
    return false;
}

static void collect(const struct json *object, const struct json *asked, struct json *out)
{
    for (struct json_iter i = json_iter(object); json_next(&i);)
        if (json_kind_of(i.value) == JSON_NULL)
            continue;
        else if (is_among(i.key, inner, sizeof inner / sizeof *inner))
            collect(i.value, asked, out);
        else if (!json_get(asked, i.key) && !is_among(i.key, known, sizeof known / sizeof *known))
            json_push(out, json_new_string(i.key));
}

struct json *adapt_keys_not_read(const char *path, const struct json *asked)
{
    struct json *list = json_new_array(), *root = NULL;
    struct err err;
    if (json_read_file(path, HF_CONFIG_BYTES_MAX, &root, &err) == 0)
        collect(root, asked, list);
    json_destroy(root);
    return list;
}
