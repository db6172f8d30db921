/* unpack.c - rows of a packed matrix as elements */
#include "kernels/ops_cpu.h"

#include "kernels/cpu.h"
#include "kernels/packed.h"

#define PIECE 16 /* rows */

struct rows {
    float *out;
    struct packed w;
    int64_t first, n_rows;
};

static void unpack_pieces(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct rows *s = arg;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        packed_decode(s->out + i * PIECE * s->w.cols, &s->w, s->first + i * PIECE,
                      min_i64(PIECE, s->n_rows - i * PIECE), 0, s->w.cols);
}

void cpu_unpack(struct device *dev, float *out, const uint8_t *w, enum packing packing,
                int64_t rows, int64_t cols, int64_t first, int64_t n_rows)
{
    struct rows s = {out, {packing, w, rows, cols}, first, n_rows};
    cpu_for(dev, cpu_n_tasks(n_rows, PIECE), 1, unpack_pieces, &s);
}
