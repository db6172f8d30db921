/* checksum.c - what tells memory from memory in which a bit has turned */
#include "common/mix.h"
#include "kernels/cpu.h"
#include "kernels/ops_cpu.h"

#define BLOCK_WORDS 16384

struct words {
    const uint64_t *x;
    uint64_t first;
    uint64_t *sums; /* of blocks */
};

static void sum_blocks(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    struct words *s = arg;
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; i++)
        sum += mix_at(s->x[i], s->first + (uint64_t)i);
    s->sums[begin / BLOCK_WORDS] = sum;
}

void cpu_checksum(struct device *dev, uint64_t *acc_sum, const uint64_t *x, int64_t n_words,
                  uint64_t first)
{
    int64_t n_blocks = cpu_n_tasks(n_words, BLOCK_WORDS);
    struct words s = {x, first, cpu_shared(dev, (size_t)n_blocks * sizeof(uint64_t))};
    cpu_for(dev, n_words, BLOCK_WORDS, sum_blocks, &s);
    for (int64_t i = 0; i < n_blocks; i++)
        *acc_sum += s.sums[i];
}
