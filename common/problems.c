/* problems.c - collects the lines and prints them */
#include "common/problems.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/tame.h"

static char *clean(char *text)
{
    tame_text(text);
    return text;
}

int problems_add(struct problems *p, const char *where, const char *key, const char *text, ...)
{
    if (p->n_total++ >= PROBLEMS_MAX)
        return -EINVAL;
    char line[sizeof((struct err *)0)->text];
    int n = key && *key ? snprintf(line, sizeof line, "key '%.200s': ", key) : 0;
    va_list args;
    va_start(args, text);
    vsnprintf(line + n, sizeof line - (size_t)n, text, args);
    va_end(args);
    p->items[p->n++] = (struct problem){
        .key = clean(xstrdup(key ? key : "")),
        .where = clean(xstrdup(where ? where : "")),
        .text = clean(xstrdup(line)),
    };
    return -EINVAL;
}

char *problems_text(const struct problems *p)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);
    if (!out)
        abort();
    for (size_t i = 0; i < p->n; i++) {
        const struct problem *x = &p->items[i];
        fprintf(out, "%s%s%s%s", i ? "\n" : "", x->where, *x->where ? ": " : "", x->text);
    }
    if (p->n_total > p->n)
        fprintf(out, "\nand %zu more", p->n_total - p->n);
    fclose(out);
    return text;
}

void problems_print(const struct problems *p, FILE *out)
{
    char *text = problems_text(p);
    if (p->n_total)
        fprintf(out, "%s\n", text);
    free(text);
}

int problems_err(const struct problems *p, struct err *err)
{
    if (!p->n_total)
        return 0;
    const struct problem *x = &p->items[0];
    err_set(err, -EINVAL, "%s%s%s", x->where, *x->where ? ": " : "", x->text);
    if (err && p->n_total > 1) {
        size_t n = strlen(err->text);
        snprintf(err->text + n, sizeof err->text - n, " (and %zu more)", p->n_total - 1);
    }
    return -EINVAL;
}

void problems_fini(struct problems *p)
{
    for (size_t i = 0; i < p->n; i++) {
        free(p->items[i].key);
        free(p->items[i].where);
        free(p->items[i].text);
    }
    *p = (struct problems){0};
}
