/* message.c - copies by way of the wire form, which every message has */
#include "proto/message.h"

#include <assert.h>
#include <stdlib.h>

void *message_copy(const void *message, struct arena *arena)
{
    const ProtobufCMessage *m = message;
    size_t n_bytes = protobuf_c_message_get_packed_size(m);
    uint8_t *bytes = xcalloc(1, n_bytes);
    protobuf_c_message_pack(m, bytes);
    ProtobufCMessage *copy = protobuf_c_message_unpack(m->descriptor,
                                                       arena ? arena_pb(arena) : NULL, n_bytes,
                                                       bytes);
    free(bytes);
    assert(copy);
    return copy;
}
