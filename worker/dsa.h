/* dsa.h - latent attention over few keys, which an indexer chooses; model.md part 4
 *
 * The sparse core of an MLA layer: it takes the place of expanding keys and values and of dense
 * attention. Queries are brought into the latent's space, where all heads share keys and values
 * (absorbed form), so what is gathered per key is one latent row and one rotary row.
 *
 * The indexer reads its inputs detached: nothing of its gradient reaches them. */
#ifndef WORKER_DSA_H
#define WORKER_DSA_H

#include "worker/layer.h"

/* In a segment, rows of keys lie after those of the segments before, and are counted from the start
 * of the document that the segment begins in. */
struct dsa_saved {
    int32_t *selected;            /* (n, columns) rows of keys; -1 after the last */
    int32_t  columns;
    elem    *q_latent, *o_latent; /* (n, heads, kv_lora_rank) */
    elem    *index_k;             /* (n, index_head_dim); NULL: made where it is needed */
    bool     is_chosen;           /* selected is there, and lse */
    float   *later, *index_later; /* (n, latent + rope) and (n, index_head_dim): what later
                                   * segments gave to the keys' gradients; NULL: there are none */
};

/* Of the layer around it; strides as in mla.h. Keys and values are those of the pass; what segments
 * before made of theirs lies before them. */
struct dsa_inputs {
    const elem *x;      /* (n, hidden) */
    const elem *cq;     /* (n, q_lora_rank), the query's normed latent */
    const elem *q;      /* (n, heads, nope + rope), turned */
    const elem *latent; /* (n, kv_lora_rank), normed */
    const elem *k_rope; /* (n, rope), turned */
    float scale;        /* of scores */
};

/* Of keys: what segments share. Of queries: the rest. */
void dsa_carve_keys(struct pass *p, enum carve what, struct dsa_saved *out);
void dsa_carve_queries(struct pass *p, enum carve what, struct dsa_saved *out);

/* Writes s, o (n, heads, v) and lse (n, heads); unless it is chosen, selected too. */
void dsa_forward(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in, elem *o,
                 float *lse, struct dsa_saved *s);

/* What was carved to be made again; o too. */
void dsa_again(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in, elem *o,
               struct dsa_saved *s);

/* While counting: the scratch of a forward, released again. */
void dsa_count_forward(struct pass *p);

/* The queries in the latent's space, for dsa_learn where dsa_forward has not been. */
void dsa_turn_queries(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
                      struct dsa_saved *s);

/* The indexer's loss is added to the pass, and its gradients to u's where it has some. kv NULL: the
 * sparse stage, of what dsa_forward chose; else the dense one, over all keys as kv (n, heads,
 * nope + v) expands them. lse is the main attention's. Takes scratch and gives it back. */
void dsa_learn(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
               const elem *kv, const float *lse, const struct dsa_saved *s);

struct dsa_gradients {
    elem *q_latent, *o_latent; /* (n, heads, kv_lora_rank), scratch */
    elem *q, *latent, *k_rope; /* assigned, in the shapes of the inputs; still turned */
};

/* The gradient of kv_b is added. */
void dsa_backward(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
                  const elem *d_o, const float *lse, struct dsa_gradients *d,
                  const struct dsa_saved *s);

#endif
