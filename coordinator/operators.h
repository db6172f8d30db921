/* operators.h - what of a model's operators is built, and what building the rest needs */
#ifndef COORDINATOR_OPERATORS_H
#define COORDINATOR_OPERATORS_H

#include "common/outline.h"

enum operator_status { OPERATOR_FUSED, OPERATOR_COMPOSED, OPERATOR_MISSING };

struct operator_fact {
    const char *name;
    enum operator_status status;
    const char *note;    /* what it is built from, or what is lacking */
    const char *formula; /* of missing ones: the definition */
    const char *source;  /* of missing ones: where the definition can be read */
};

const struct operator_fact *operator_fact(enum outline_op op);
const char *operator_status_name(enum operator_status status); /* "fused", ... */

/* In how many layers op stands; beside the layers it counts as one. */
uint32_t operator_layers(const struct outline *o, enum outline_op op);

/* How many of the model's operators are missing. */
uint32_t operators_missing(const struct outline *o);

#endif
