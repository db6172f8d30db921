/* outline_check.h - an outline beside a checkpoint's tensors: every one of them accounted for */
#ifndef COMMON_OUTLINE_CHECK_H
#define COMMON_OUTLINE_CHECK_H

#include "common/outline.h"
#include "common/tensor_list.h"

#define CHECK_LINES_MAX 12u

struct outline_check {
    uint64_t n_used;     /* tensors that the outline has */
    uint64_t n_scales;   /* of packed weights */
    uint64_t n_carried;  /* vision, next-token layers, stored tables: not trained */
    uint64_t n_unknown;  /* of the text model, but of no tensor of the outline */
    bool     has_shapes; /* the numbers below hold */
    uint64_t text, mtp, vision; /* parameters, unpacked, without scales and tables */
    uint64_t text_experts;      /* the routed experts' share of text */
    uint32_t n_lines;    /* what does not agree, a line each; n_more beyond them */
    uint32_t n_more;
    char     lines[CHECK_LINES_MAX][200];
};

void outline_check(const struct outline *o, const struct tensor_list *list,
                   struct outline_check *out);

#endif
