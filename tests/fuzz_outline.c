/* fuzz_outline.c - any bytes as a config.json: refused with a reason, or an outline that adds up */
#include <stdlib.h>
#include <string.h>

#include "common/outline_config.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    struct outline *o;
    struct err err = {0};

    if (outline_parse("fuzz", (const char *)bytes, n_bytes, &o, &err) < 0) {
        if (!err.code || strncmp(err.text, "fuzz: ", 6) != 0 || strchr(err.text, '\n'))
            abort(); /* a refusal is one line that says why */
        return 0;
    }
    struct outline_counts c = outline_count(o);
    uint64_t total = 0;
    for (int i = 0; i < OUTLINE_PARTS; i++)
        total += c.parts[i];
    if (total != c.total || c.active > c.total || c.live > c.total)
        abort();
    free(o);
    return 0;
}
