/* shape.h - a model of random weights on random tokens, for what is measured without data */
#ifndef TESTS_SHAPE_H
#define TESTS_SHAPE_H

/* Of the Kimi-Linear family: every fourth layer is latent attention, the others KDA; all layers
 * have experts. Heads are of head_dim in both. */
struct shape {
    const char *name;
    unsigned hidden, n_layers, n_heads, head_dim, rope_dim, latent;
    unsigned n_experts, top_k, expert_width, vocab;
    unsigned sequence_length, n_sequences; /* of a step */
};

/* One that is known by its name, or NULL. */
const struct shape *shape_find(const char *name);

/* Makes config.json and tokens.bin, of u16, there. Ends the program where that fails. */
void shape_write(const struct shape *s, const char *folder);

#endif
