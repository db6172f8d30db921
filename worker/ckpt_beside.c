/* ckpt_beside.c - copies and writes the small files of a checkpoint */
#include "worker/ckpt_beside.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/file.h"
#include "common/hf_config.h"
#include "common/mem.h"

int ckpt_write_json(const struct json *o, const char *to, struct err *err)
{
    char *text = json_text(o, true);
    FILE *f = fopen(to, "we");
    int rc = 0;
    if (!f || fprintf(f, "%s\n", text) < 0 || fflush(f) != 0 || fsync(fileno(f)) < 0)
        rc = err_set(err, -errno, "%s: %s", to, strerror(errno));
    if (f)
        fclose(f);
    free(text);
    return rc;
}

int ckpt_copy_file(const char *from, const char *to, struct err *err)
{
    char bytes[65536];
    size_t n;
    FILE *in = file_stream(from, err), *out = in ? fopen(to, "we") : NULL;
    int rc = 0;
    if (!in)
        return err->code;
    if (!out)
        rc = err_set(err, -errno, "%s: %s", to, strerror(errno));
    while (rc == 0 && (n = fread(bytes, 1, sizeof bytes, in)) > 0)
        if (fwrite(bytes, 1, n, out) != n)
            rc = err_set(err, -errno, "%s: %s", to, strerror(errno));
    if (rc == 0 && (fflush(out) != 0 || fsync(fileno(out)) < 0))
        rc = err_set(err, -errno, "%s: %s", to, strerror(errno));
    fclose(in);
    if (out)
        fclose(out);
    return rc;
}

/* As it is, but weights that are written plain must not be called packed. */
static int copy_config(const char *from, bool is_packed, const char *to, struct err *err)
{
    struct json *o;
    int rc = json_read_file(from, HF_CONFIG_BYTES_MAX, &o, err);
    if (rc < 0)
        return rc;
    rc = !is_packed && json_remove(o, "quantization_config") ? ckpt_write_json(o, to, err)
                                               : ckpt_copy_file(from, to, err);
    json_destroy(o);
    return rc;
}

int ckpt_copy_model_files(const char *model_path, bool is_packed, const char *folder,
                          struct err *err)
{
    static const char *const names[] = {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "tokenizer.model", "tiktoken.model", "chat_template.jinja",
    };
    int rc = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names && rc == 0; i++) {
        char *from = xasprintf("%s/%s", model_path, names[i]);
        char *to = xasprintf("%s/%s", folder, names[i]);
        if (i == 0)
            rc = copy_config(from, is_packed, to, err);
        else if (access(from, R_OK) == 0)
            rc = ckpt_copy_file(from, to, err);
        free(from);
        free(to);
    }
    return rc;
}
