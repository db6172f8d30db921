/* test_data_step.c - what is told of a step is what the trainers' batches hold, token by token
 *
 * The files are made by a rule, so that every token is known from its file, document and place. The
 * trainer's own step_batch makes the batches of all ranks, over the ends of epochs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/data_step.h"
#include "proto/job_data.h"
#include "tests/a_job.h"
#include "tests/folder.h"
#include "worker/step_batch.h"

#define FILES     3u
#define DOCS      7u /* of a file that holds many; some are empty */
#define VOCAB     60000u
#define LENGTH    16u
#define NO_LABEL  (-100)

/* ---- files that are made by a rule ----------------------------------------------------------- */

struct form {
    const char *format, *ending;
    uint32_t bytes;  /* of a token; 0: a line of text holds them */
    bool     is_many; /* documents of a file */
};
static const struct form forms[] = {
    {"bytes", ".txt", 1, false}, {"u16", ".bin", 2, false}, {"u32", ".u32", 4, false},
    {"megatron", "", 2, true}, {"jsonl", ".jsonl", 0, true},
};

static uint32_t n_tokens(const struct form *f, uint32_t file, uint32_t doc)
{
    if (!f->is_many)
        return 70 + 13 * file;
    return doc == 2 || doc == 5 ? 0 : 3 + 9 * ((doc + file) % 5);
}

static int32_t token(const struct form *f, uint32_t file, uint32_t doc, uint64_t i)
{
    uint32_t x = file * 20000 + doc * 1000 + (uint32_t)i;
    return (int32_t)(f->bytes == 1 ? x * 37 % 251 : x);
}

/* Of place i, the one that the place before learns to say. */
static int32_t label(const struct form *f, uint32_t file, uint32_t doc, uint64_t i)
{
    if (i >= n_tokens(f, file, doc) || (f->bytes == 0 && (doc + i) % 3 == 0))
        return -1;
    return token(f, file, doc, i);
}

static char *path_of(const struct form *f, uint32_t file, const char *more)
{
    return xasprintf("%s/%s-%c%s%s", folder, f->format, 'a' + (char)file, f->ending, more);
}

static FILE *create(const struct form *f, uint32_t file, const char *more)
{
    char *path = path_of(f, file, more);
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    free(path);
    return out;
}

static void put(FILE *out, uint64_t x, size_t bytes)
{
    assert_int_equal(fwrite(&x, 1, bytes, out), bytes);
}

static void put_tokens(const struct form *f, uint32_t file, FILE *out)
{
    for (uint32_t doc = 0; doc < (f->is_many ? DOCS : 1); doc++)
        for (uint32_t i = 0; i < n_tokens(f, file, doc); i++)
            put(out, (uint64_t)token(f, file, doc, i), f->bytes);
}

static void put_index(const struct form *f, uint32_t file)
{
    FILE *out = create(f, file, ".idx");
    uint64_t at = 0;
    assert_int_equal(fwrite("MMIDIDX\0", 1, 9, out), 9);
    put(out, 1, 8);
    put(out, 8, 1); /* u16 */
    put(out, DOCS, 8);
    put(out, DOCS + 1, 8);
    for (uint32_t doc = 0; doc < DOCS; doc++)
        put(out, n_tokens(f, file, doc), 4);
    for (uint32_t doc = 0; doc < DOCS; at += 2 * n_tokens(f, file, doc++))
        put(out, at, 8);
    for (uint32_t doc = 0; doc <= DOCS; doc++)
        put(out, doc, 8);
    fclose(out);
}

static void put_list(const struct form *f, uint32_t file, uint32_t doc, bool labels, FILE *out)
{
    for (uint32_t i = 0; i < n_tokens(f, file, doc); i++) {
        int32_t x = labels ? label(f, file, doc, i) : token(f, file, doc, i);
        fprintf(out, "%s%d", i ? ", " : "", x < 0 ? NO_LABEL : x);
    }
}

/* A document without tokens is an empty line. */
static void put_lines(const struct form *f, uint32_t file, FILE *out)
{
    for (uint32_t doc = 0; doc < DOCS; doc++) {
        if (n_tokens(f, file, doc)) {
            fprintf(out, "{\"input_ids\": [");
            put_list(f, file, doc, false, out);
            fprintf(out, "], \"labels\": [");
            put_list(f, file, doc, true, out);
            fprintf(out, "]}");
        }
        putc('\n', out);
    }
}

static void put_files(const struct form *f)
{
    for (uint32_t file = 0; file < FILES; file++) {
        bool is_indexed = !strcmp(f->format, "megatron");
        FILE *out = create(f, file, is_indexed ? ".bin" : "");
        if (f->bytes)
            put_tokens(f, file, out);
        else
            put_lines(f, file, out);
        fclose(out);
        if (is_indexed)
            put_index(f, file);
    }
}

/* ---- what is told of a document -------------------------------------------------------------- */

static uint32_t file_of(const struct form *f, const char *path)
{
    for (uint32_t file = 0; file < FILES; file++) {
        char *name = path_of(f, file, !strcmp(f->format, "megatron") ? ".bin" : "");
        bool is_it = !strcmp(name, path);
        free(name);
        if (is_it)
            return file;
    }
    fail_msg("%s is none of the files", path);
    return 0;
}

/* The place in the file holds what the rule says. */
static void check_place(const struct form *f, const struct data_piece *p, uint32_t file)
{
    FILE *in = fopen(p->path, "r");
    uint32_t doc = (uint32_t)p->number;
    assert_non_null(in);
    assert_int_equal(fseek(in, (long)p->at, SEEK_SET), 0);
    if (f->bytes) {
        uint64_t x = 0;
        assert_int_equal(fread(&x, 1, f->bytes, in), f->bytes);
        assert_int_equal(x, token(f, file, doc, p->first));
    } else {
        int first = -1;
        assert_int_equal(fscanf(in, "{\"input_ids\": [%d", &first), 1);
        assert_int_equal(first, token(f, file, doc, 0));
    }
    fclose(in);
}

/* The document is what the batch has from `at` on, which moves behind it. */
static void check_read(const struct form *f, const struct data_read *r, const struct data_batch *b,
                       int64_t *at)
{
    const struct data_piece *p = &r->piece;
    uint32_t file = file_of(f, p->path), doc = (uint32_t)p->number;
    uint64_t n_labels = 0;
    assert_true(p->n_tokens > 0 && p->first + p->n_tokens <= n_tokens(f, file, doc));
    assert_true(*at + (int64_t)p->n_tokens <= b->n_tokens);
    for (uint64_t i = p->first; i < p->first + p->n_tokens; i++, ++*at) {
        assert_int_equal(b->tokens[*at], token(f, file, doc, i));
        assert_int_equal(b->labels[*at], label(f, file, doc, i + 1));
        n_labels += b->labels[*at] >= 0;
    }
    assert_int_equal(r->n_labels, n_labels);
    check_place(f, p, file);
}

/* ---- the trainers' batches ------------------------------------------------------------------- */

struct layout_case {
    uint32_t world, micro_batch, global_batch;
    uint64_t step, sample; /* where the run begins: another one made what is before */
};
static const struct layout_case layouts[] = {
    {1, 8, 8, 0, 0}, {1, 1, 6, 0, 0}, {2, 2, 8, 0, 0}, {4, 1, 8, 0, 0}, {4, 3, 24, 5, 777},
    {2, 1, 2, 100, 3},
};

/* One rank's batches of a step are its documents of what is told, in that order. */
static void check_rank(const struct form *f, struct run *run, const struct data_read *reads,
                       size_t n)
{
    size_t k = 0;
    struct err err = {0};
    for (uint64_t pass = 0; pass < step_n_batches(run); pass++) {
        int64_t at = 0;
        if (step_batch(run, pass, &err) < 0)
            fail_msg("%s", err.text);
        for (int32_t doc = 0; doc < run->batch.n_docs; doc++, k++) {
            while (k < n && reads[k].rank != run->coll->rank)
                k++;
            assert_true(k < n);
            assert_int_equal(reads[k].pass, pass);
            assert_int_equal(at, run->batch.cu_seqlens[doc]);
            check_read(f, &reads[k], &run->batch, &at);
        }
        assert_int_equal(at, run->batch.n_tokens);
    }
    while (k < n && reads[k].rank != run->coll->rank)
        k++;
    assert_int_equal(k, n);
}

static void check_order(const struct data *d, const struct data_step *s,
                        const struct data_read *reads, size_t n)
{
    uint64_t sample = s->first;
    for (size_t i = 0; i < n; i++) {
        sample += i > 0 && reads[i].sample != reads[i - 1].sample;
        assert_int_equal(reads[i].sample, sample);
        assert_int_equal(reads[i].sequence, sample - s->first);
        assert_int_equal(reads[i].epoch, sample / data_windows(d));
        assert_int_equal(reads[i].step, s->step);
    }
    assert_int_equal(sample, s->first + s->global_batch - 1);
}

/* As step_train does it: every rank, then on. */
static void check_steps(const struct form *f, Ballast__JobSpec *spec, struct data *d,
                        const struct layout_case *l)
{
    struct device dev = {0};
    struct coll coll = {.world = l->world};
    struct run run = {.spec = spec, .coll = &coll, .dev = &dev, .train = d};
    struct err err;
    run.state.step = l->step;
    run.state.next_sample = l->sample;
    for (int i = 0; i < 6; i++) {
        struct data_read *reads = NULL;
        size_t n = 0;
        struct data_step s = job_data_step(spec, run.state.step + 1, run.state.next_sample);
        assert_int_equal(data_step_reads(d, &s, &reads, &n, &err), 0);
        check_order(d, &s, reads, n);
        for (coll.rank = 0; coll.rank < l->world; coll.rank++)
            check_rank(f, &run, reads, n);
        run.state.step++;
        run.state.next_sample += l->global_batch;
        free(reads);
    }
    data_batch_fini(&run.batch);
}

static void what_is_told_is_what_is_read(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2 * sizeof forms / sizeof *forms; i++)
        for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
            const struct form *f = &forms[i / 2];
            const struct layout_case *l = &layouts[k];
            Ballast__JobSpec spec;
            struct data_config config;
            struct data *d = NULL;
            struct err err = {0};
            put_files(f);
            a_job_init(&spec, l->world);
            spec.train_global_batch = l->global_batch;
            spec.train_micro_batch = l->micro_batch;
            spec.data_sequence_length = LENGTH;
            spec.data_pack = i % 2;
            free(spec.data_format);
            spec.data_format = xstrdup(f->format);
            free(spec.data_train[0]);
            spec.data_train[0] = xasprintf("%s/%s-[abc]%s", folder, f->format, f->ending);
            if (job_data_config(&spec, JOB_TRAIN, VOCAB, &config, &err) < 0 ||
                data_open(&config, &d, &err) < 0)
                fail_msg("%s", err.text);
            assert_in_range(data_windows(d), 10, 40); /* so that steps cross epochs' ends */
            check_steps(f, &spec, d, l);
            data_close(d);
            a_job_fini(&spec);
        }
}

int main(void)
{
    if (make_folder(NULL) < 0)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_told_is_what_is_read),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
