/* bench_cases_parts.h - what the families of bench's cases share
 *
 * The shapes are those of a small hybrid: 8 documents of 256 tokens, hidden 256, 4 heads of 64,
 * 32 experts of width 64 with 4 chosen. */
#ifndef WORKER_BENCH_CASES_PARTS_H
#define WORKER_BENCH_CASES_PARTS_H

#include "worker/bench_cases.h"

#define TOKENS  2048
#define DOCS    8
#define HEADS   4
#define EXPERTS 32
#define TOP_K   4

/* Input i: n numbers of that width. */
void bench_set_in(struct bench_case *c, int i, int64_t n, float width);
/* Bytes of every tensor once, which is the least; accumulating ops add what they read again. */
void bench_count_bytes(struct bench_case *c);

#define CASE(op, shape, declare, run, ...) {op, shape, declare, run, __VA_ARGS__}

struct bench_family {
    const struct bench_case *cases;
    size_t n;
};
extern const struct bench_family bench_products, bench_rows, bench_mixers;

#endif
