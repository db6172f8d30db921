/* data_jsonl.c - fine-tuning documents: a JSON object with input_ids and labels on every line
 *
 * All lines are checked at open, when only their places are kept; a line is read again when it is
 * its turn. As elsewhere, labels stand at the tokens that they are: position i is trained to say
 * labels[i + 1], and -100 is no label. */
#include "common/data_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/json.h"

/* A parsed number takes tens of bytes, and a line is parsed whenever it is its turn. */
#define LINE_BYTES_MAX ((size_t)64 << 20)
#define NO_LABEL (-100)

/* The list of one key, of whole numbers below vocab or, if it is allowed, NO_LABEL. */
static int check_list(const struct data *d, const struct json *line, const char *key,
                      bool may_be_none, struct err *err)
{
    const struct json *list = json_get(line, key);
    size_t n = json_count(list);
    if (json_kind_of(list) != JSON_ARRAY)
        return err_set(err, -EINVAL, "key '%s' is missing or no list", key);
    for (size_t i = 0; i < n; i++) {
        double x = -1;
        bool is_number = json_as_double(json_at(list, i), &x);
        if (is_number && ((x >= 0 && x < d->vocab && x == (double)(int32_t)x) ||
                          (may_be_none && x == NO_LABEL)))
            continue;
        char *text = json_text(json_at(list, i), false);
        err_set(err, -EINVAL, "%s[%zu] is %.60s, expected a whole number from 0 to %u, the model's "
                "vocabulary%s", key, i, text, d->vocab - 1, may_be_none ? ", or -100" : "");
        free(text);
        return -EINVAL;
    }
    return 0;
}

/* Padding is not for documents that are packed; a mask that hides nothing says nothing. */
static int check_mask(const struct json *line, struct err *err)
{
    const struct json *mask = json_get(line, "attention_mask");
    for (size_t i = 0; i < json_count(mask); i++) {
        uint64_t x = 0;
        if (!json_as_u64(json_at(mask, i), &x) || x != 1)
            return err_set(err, -EINVAL, "attention_mask[%zu] is not 1: leave padding out", i);
    }
    return 0;
}

static int check_line(const struct data *d, const struct json *line, size_t *out_tokens,
                      struct err *err)
{
    int rc;
    if (json_kind_of(line) != JSON_OBJECT)
        return err_set(err, -EINVAL, "not an object, expected {\"input_ids\": [...], "
                       "\"labels\": [...]}");
    if ((rc = check_list(d, line, "input_ids", false, err)) < 0 ||
        (rc = check_list(d, line, "labels", true, err)) < 0 || (rc = check_mask(line, err)) < 0)
        return rc;
    size_t n = json_count(json_get(line, "input_ids"));
    size_t n_labels = json_count(json_get(line, "labels"));
    if (n != n_labels)
        return err_set(err, -EINVAL, "%zu input_ids, but %zu labels", n, n_labels);
    if (n == 0 || n > INT32_MAX)
        return err_set(err, -EINVAL, "%zu input_ids, expected 1 to %d", n, INT32_MAX);
    *out_tokens = n;
    return 0;
}

/* Of positions that are trained: nothing comes before the first. */
static uint64_t count_labels(const struct json *line)
{
    const struct json *labels = json_get(line, "labels");
    uint64_t n = 0;
    for (size_t i = 1; i < json_count(labels); i++) {
        double x = NO_LABEL;
        n += json_as_double(json_at(labels, i), &x) && x >= 0;
    }
    return n;
}

static size_t line_bytes(const struct data_file *f, uint64_t at)
{
    const uint8_t *end = memchr(f->bytes + at, '\n', f->n_bytes - at);
    return end ? (size_t)(end - f->bytes) - at : f->n_bytes - at;
}

static bool is_blank(const uint8_t *text, size_t n)
{
    while (n > 0 && strchr(" \t\r", text[n - 1]) && text[n - 1])
        n--;
    return n == 0;
}

static int parse_line(const struct data_file *f, uint64_t at, struct json **out, struct err *err)
{
    return json_parse((const char *)f->bytes + at, line_bytes(f, at), LINE_BYTES_MAX, out, err);
}

static int add_line(struct data *d, const struct data_file *f, uint64_t number, uint64_t at,
                    bool *has_any, struct err *err)
{
    struct json *line = NULL;
    size_t n_tokens = 0;
    int rc = parse_line(f, at, &line, err);
    if (rc == 0 && (rc = check_line(d, line, &n_tokens, err)) == 0) {
        uint64_t n_labels = count_labels(line);
        data_add_doc(d, number, at, n_tokens);
        d->n_labels += n_labels;
        *has_any = *has_any || n_labels > 0 || n_tokens == 1; /* of one token nothing is told */
    }
    json_destroy(line);
    return rc < 0 ? err_prefix(err, "%s:%llu", f->path, (unsigned long long)number + 1) : 0;
}

int data_jsonl_open(struct data *d, struct err *err)
{
    const struct data_file *f = &d->files[d->n_files - 1];
    uint64_t at = 0;
    int rc = 0;
    bool has_any = false, has_lines = false;
    for (uint64_t number = 0;
         at < f->n_bytes && rc == 0 && d->n_read + at < d->lines_bytes_max; number++) {
        size_t n_bytes = line_bytes(f, at);
        if (!is_blank(f->bytes + at, n_bytes)) {
            rc = add_line(d, f, number, at, &has_any, err);
            has_lines = true;
        }
        at += n_bytes + 1;
    }
    d->n_read += at < f->n_bytes ? at : f->n_bytes;
    if (rc == 0 && at >= f->n_bytes && has_lines && !has_any)
        rc = err_set(err, -EINVAL, "%s: no line has a label behind its first token, so nothing can "
                     "be learnt: all are -100", f->path);
    return rc;
}

int data_jsonl_read(const struct data *d, const struct data_doc *doc, uint64_t from, uint64_t n,
                    int32_t *out_tokens, int32_t *out_targets, struct err *err)
{
    const struct data_file *f = &d->files[doc->file];
    struct json *line = NULL;
    size_t n_tokens = 0;
    int rc = parse_line(f, doc->at, &line, err);
    if (rc == 0)
        rc = check_line(d, line, &n_tokens, err);
    if (rc == 0 && n_tokens != doc->n_tokens)
        rc = err_set(err, -EINVAL, "%zu input_ids, expected %llu as when it was opened", n_tokens,
                     (unsigned long long)doc->n_tokens);
    if (rc < 0)
        err_prefix(err, "%s: the line at byte %llu has changed", f->path,
                   (unsigned long long)doc->at);
    const struct json *ids = json_get(line, "input_ids"), *labels = json_get(line, "labels");
    for (uint64_t i = 0; rc == 0 && i < n; i++) {
        double token = 0, target = 0;
        json_as_double(json_at(ids, from + i), &token);
        json_as_double(json_at(labels, from + i), &target);
        out_tokens[i] = (int32_t)token;
        out_targets[i] = target < 0 ? -1 : (int32_t)target;
    }
    json_destroy(line);
    return rc;
}
