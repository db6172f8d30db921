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

struct check_bound check_bound_of(const ProtobufCMessageDescriptor *message,
                                  const ProtobufCFieldDescriptor *f);

#endif
