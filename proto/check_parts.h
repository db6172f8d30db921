/* check_parts.h - what the files of the check share; nobody else includes it */
#ifndef PROTO_CHECK_PARTS_H
#define PROTO_CHECK_PARTS_H

#include "proto/check.h"

enum check_form { TEXT_FREE, TEXT_NAME, TEXT_NAME_OR_EMPTY, TEXT_LINES };

struct check_bound {
    const ProtobufCMessageDescriptor *message;
    const char     *field;
    enum check_form form;
    uint64_t        min, max; /* of a number; of the bytes of a text; of a list's count; a message
                               * with a min of 1 must be there */
    enum check_form element_form; /* of a list of texts */
    uint64_t        element_max;  /* 0: the general one */
};

/* ---- check_bounds ---------------------------------------------------------------------------- */

struct check_bound check_bound_of(const ProtobufCMessageDescriptor *message,
                                  const ProtobufCFieldDescriptor *f);

/* ---- check ----------------------------------------------------------------------------------- */

/* Where the walk is: steps[3].phases[0]. */
struct place {
    const struct place *parent;
    const char *field;
    long index; /* -1: not a list */
};

struct walk {
    struct arena    *arena;
    Ballast__Status *status;
    bool             is_response; /* a newer coordinator may know more words than we do */
};

/* Adds a violation to the status, of a field by its path; text is copied. */
void check_violation(struct walk *w, const char *field, const char *text);
/* The same of a field of the message at parent, as the reason BAD_FIELD. Returns -EINVAL. */
int  check_violate_field(struct walk *w, const struct place *parent, const char *field,
                         const char *text);

/* ---- check_together -------------------------------------------------------------------------- */

/* 0, or -EINVAL with the violation in the status; of a message whose fields are each sound. */
int check_together(struct walk *w, const struct place *at, const ProtobufCMessage *m);

#endif
