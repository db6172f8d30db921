/* message.h - what any message can do */
#ifndef PROTO_MESSAGE_H
#define PROTO_MESSAGE_H

#include "common/mem.h"

/* A deep copy of a generated message, of the same type. Lives in the arena; with arena NULL it is
 * the caller's, ended with the type's free_unpacked. */
void *message_copy(const void *message, struct arena *arena);

#endif
