/* wire.h - the two frames of a message: prelude + envelope, payload
 *
 * The prelude is 8 bytes, "BLST", u16 major, u16 minor, little endian, so that a version can be
 * read before anything else is understood. Whether a message makes sense is check.h's business.
 * Of the coordinator a payload may come in two frames, which are one when put together: what it
 * says to many is in the first, which is packed once, and what differs in the second. */
#ifndef PROTO_WIRE_H
#define PROTO_WIRE_H

#include "common/mem.h"
#include "common/types.h"
#include "proto/ballast.pb-c.h"

#define WIRE_PRELUDE_BYTES 8
#define WIRE_MAJOR 1 /* must be equal on both sides */
#define WIRE_MINOR 0
#define WIRE_FRAMES 2 /* head, payload */
#define WIRE_FRAMES_MAX 3 /* head, what many are told, the rest */
#define WIRE_HEAD_BYTES_MAX (64u << 10) /* an envelope with a status of many violations */

struct wire_bytes {
    const uint8_t *bytes;
    size_t         n_bytes;
};

/* Packs into the arena, where the frames live. Sets the envelope's payload_bytes. A NULL payload
 * is an empty second frame. */
void wire_pack(Ballast__Envelope *envelope, const ProtobufCMessage *payload, struct arena *arena,
               struct wire_bytes out_frames[WIRE_FRAMES]);

/* Only the first frame, for a payload of n_payload bytes that was packed before. */
struct wire_bytes wire_pack_head(Ballast__Envelope *envelope, size_t n_payload,
                                 struct arena *arena);

enum wire_prelude { WIRE_OURS, WIRE_OTHER_VERSION, WIRE_FOREIGN };

/* Reads the version; both outputs are 0 for WIRE_FOREIGN. */
enum wire_prelude wire_read_prelude(const uint8_t *bytes, size_t n_bytes, uint16_t *out_major,
                                    uint16_t *out_minor);

#endif
