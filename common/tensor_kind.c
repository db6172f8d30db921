/* tensor_kind.c - tells tensors apart by how their names begin and end */
#include "common/tensor_kind.h"

#include <stdio.h>
#include <string.h>

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && !strcmp(name + n - m, end);
}

static bool ends_with_any(const char *name, const char *const *ends)
{
    for (; *ends; ends++)
        if (ends_with(name, *ends))
            return true;
    return false;
}

static bool begins_with_any(const char *name, const char *const *begins)
{
    for (; *begins; begins++)
        if (!strncmp(name, *begins, strlen(*begins)))
            return true;
    return false;
}

enum tensor_kind tensor_kind_of(const struct tensor_group *g)
{
    static const char *const scales[] = {
        "weight_scale", "weight_scale_inv", "_scales", ".scales", "weight_scale_2", "input_scale",
        "weight_shape", ".qzeros", ".g_idx", "weight_zero_point", "weight_global_scale",
        ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", "bitsandbytes__nf4",
        "bitsandbytes__fp4", ".SCB", ".weight_format", ".k_scale", ".v_scale", ".weight_scale_2",
        ".input_global_scale", ".output_scale", NULL};
    static const char *const tables[] = {"inv_freq", "tid2eid", NULL};
    static const char *const vision[] = {
        "vision", "visual.", "model.visual.", "model.vision", "mm_projector.", "image_",
        "multi_modal_projector.", "model.multi_modal_projector.", "audio", "model.audio",
        "speech_", "patch_merge", "vit_", "model.vit_", "vpm.", "resampler.", "talker.",
        "code2wav.", "code_predictor.", "thinker.visual.", "thinker.audio", NULL};
    static const char *const mtp[] = {"mtp.", "model.mtp.", "nextn", NULL};
    if (ends_with_any(g->name, tables))
        return TENSOR_TABLE;
    if (begins_with_any(g->name, vision))
        return TENSOR_VISION;
    if (ends_with_any(g->name, scales) ||
        (ends_with(g->name, ".scale") && !strcmp(g->dtype, "F8_E8M0")))
        return TENSOR_SCALE;
    return begins_with_any(g->name, mtp) ? TENSOR_MTP : TENSOR_TEXT;
}

uint64_t tensor_unpacked(const struct tensor_group *g, uint32_t bits)
{
    bool packed = ends_with(g->name, "_packed") || ends_with(g->name, "_blocks") ||
                  ends_with(g->name, ".qweight");
    uint32_t width = bits == 2 || bits == 3 || bits == 4 || bits == 8 ? bits : 4;
    if (!packed) /* bitsandbytes and NVFP4 keep the name */
        return !strcmp(g->dtype, "U8") && bits == 4 && ends_with(g->name, ".weight") ? 2 : 1;
    return !strcmp(g->dtype, "I32") ? 32 / width : !strcmp(g->dtype, "U8") ? 8 / width : 1;
}

void tensor_plain_name(const char *name, char out[TENSOR_NAME_BYTES])
{
    snprintf(out, TENSOR_NAME_BYTES, "%s", name);
    if (ends_with(out, "_packed") || ends_with(out, "_blocks"))
        out[strlen(out) - 7] = '\0';
    else if (ends_with(out, ".qweight"))
        memmove(out + strlen(out) - 7, "weight", 7);
}
