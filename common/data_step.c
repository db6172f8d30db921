/* data_step.c - the samples of a step, dealt out in order, a micro-batch to a rank at a time */
#include "common/data_step.h"

#include <stdlib.h>

#include "common/mem.h"

uint64_t data_step_passes(const struct data_step *s)
{
    return s->global_batch / ((uint64_t)s->micro_batch * s->world);
}

uint64_t data_step_sample(const struct data_step *s, uint32_t rank, uint64_t pass)
{
    return s->first + (pass * s->world + rank) * s->micro_batch;
}

static uint64_t labels_of(const struct data_batch *b, size_t document)
{
    uint64_t n = 0;
    for (int32_t i = b->cu_seqlens[document]; i < b->cu_seqlens[document + 1]; i++)
        n += b->labels[i] >= 0;
    return n;
}

/* Fills in the documents of a sequence of which all else is said. */
static int add_sequence(const struct data *d, struct data_read read, struct data_batch *b,
                        struct data_read **reads, size_t *n, struct err *err)
{
    struct data_piece *pieces;
    data_batch_clear(b);
    read.epoch = read.sample / data_windows(d);
    read.window = data_order(d, read.sample);
    int rc = data_sample(d, read.sample, b, err);
    if (rc < 0)
        return rc;
    size_t n_pieces = data_pieces(d, read.window, &pieces);
    *reads = xrealloc(*reads, (*n + n_pieces) * sizeof **reads);
    for (size_t i = 0; i < n_pieces; i++) {
        read.piece = pieces[i];
        read.n_labels = labels_of(b, i);
        (*reads)[(*n)++] = read;
    }
    free(pieces);
    return 0;
}

int data_step_reads(const struct data *d, const struct data_step *s, struct data_read **reads,
                    size_t *n, struct err *err)
{
    struct data_batch batch = {0};
    int rc = 0;
    for (uint64_t pass = 0; pass < data_step_passes(s) && rc == 0; pass++)
        for (uint32_t rank = 0; rank < s->world && rc == 0; rank++)
            for (uint32_t i = 0; i < s->micro_batch && rc == 0; i++) {
                uint64_t sample = data_step_sample(s, rank, pass) + i;
                struct data_read read = {.step = s->step, .sample = sample, .pass = pass,
                                         .sequence = (uint32_t)(sample - s->first), .rank = rank};
                rc = add_sequence(d, read, &batch, reads, n, err);
            }
    data_batch_fini(&batch);
    return rc;
}
