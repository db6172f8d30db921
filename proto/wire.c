/* wire.c - packs and recognises the head frame of a message */
#include "proto/wire.h"

#include <string.h>

static const uint8_t magic[4] = {'B', 'L', 'S', 'T'};

struct wire_bytes wire_pack_head(Ballast__Envelope *envelope, size_t n_payload,
                                 struct arena *arena)
{
    envelope->payload_bytes = (uint32_t)n_payload;
    size_t n_head = WIRE_PRELUDE_BYTES + ballast__envelope__get_packed_size(envelope);
    uint8_t *head = arena_alloc(arena, n_head);
    memcpy(head, magic, sizeof magic);
    head[4] = WIRE_MAJOR & 0xff;
    head[5] = WIRE_MAJOR >> 8;
    head[6] = WIRE_MINOR & 0xff;
    head[7] = WIRE_MINOR >> 8;
    ballast__envelope__pack(envelope, head + WIRE_PRELUDE_BYTES);
    return (struct wire_bytes){head, n_head};
}

void wire_pack(Ballast__Envelope *envelope, const ProtobufCMessage *payload, struct arena *arena,
               struct wire_bytes out_frames[WIRE_FRAMES])
{
    size_t n_payload = payload ? protobuf_c_message_get_packed_size(payload) : 0;
    uint8_t *body = arena_alloc(arena, n_payload);
    if (payload)
        protobuf_c_message_pack(payload, body);
    out_frames[0] = wire_pack_head(envelope, n_payload, arena);
    out_frames[1] = (struct wire_bytes){body, n_payload};
}

enum wire_prelude wire_read_prelude(const uint8_t *bytes, size_t n_bytes, uint16_t *out_major,
                                    uint16_t *out_minor)
{
    *out_major = *out_minor = 0;
    if (n_bytes < WIRE_PRELUDE_BYTES || memcmp(bytes, magic, sizeof magic))
        return WIRE_FOREIGN;
    *out_major = (uint16_t)(bytes[4] | bytes[5] << 8);
    *out_minor = (uint16_t)(bytes[6] | bytes[7] << 8);
    return *out_major == WIRE_MAJOR ? WIRE_OURS : WIRE_OTHER_VERSION;
}
