/* fuzz_hf_config.c - any bytes as a config.json: refused with a reason, or a model that adds up */
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"
#include "common/tensor_map.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

/* A model of a few thousand tensors: its map holds what its count says. */
static void check_map(const struct model_spec *m)
{
    struct tensor_map map;
    uint64_t total = 0;

    if ((uint64_t)m->n_layers * m->n_experts > 4096)
        return;
    if (tensor_map_init(m, &map, NULL) < 0)
        abort();
    for (size_t i = 0; i < map.n_entries; i++)
        total += map.entries[i].count;
    if (total != model_spec_count(m).total)
        abort();
    tensor_map_fini(&map);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    static struct model_spec m;
    struct err err = {0};

    if (hf_config_parse("fuzz", (const char *)bytes, n_bytes, &m, &err) == 0)
        check_map(&m);
    else if (!err.code || strncmp(err.text, "fuzz: ", 6) != 0 || strchr(err.text, '\n'))
        abort(); /* a refusal is one line that says why */
    return 0;
}
