/* coll_wire_frame.h - what goes over a link: frames, each a sealed head and what it announces
 *
 * Private to coll_wire. A link is a TCP connection that carries one way, from one rank to another.
 * It begins with a greeting, of which nothing but the rank is in the clear: who greets has proved
 * that it holds the secret that a rank of the attempt told through CURVE. */
#ifndef WORKER_COLL_WIRE_FRAME_H
#define WORKER_COLL_WIRE_FRAME_H

#include <stdint.h>

#include "worker/seal.h"

#define WIRE_PIECE_BYTES ((size_t)256 << 10) /* of a message, in a frame */
#define WIRE_BYTES_MAX   ((uint64_t)1 << 42) /* of a message */

enum frame_kind { FRAME_HELLO = 0x42570001, FRAME_DATA, FRAME_BYE };

struct frame {
    uint32_t kind, n; /* bytes of the record that follows; 0: none does */
    uint64_t tag, total, at;
};

#define FRAME_HEAD_BYTES (sizeof(struct frame) + SEAL_TAG_BYTES)
#define FRAME_MAX_BYTES  (FRAME_HEAD_BYTES + WIRE_PIECE_BYTES + SEAL_TAG_BYTES)

struct greeting {
    uint32_t magic, rank;
    uint8_t  hello[FRAME_HEAD_BYTES]; /* the first record */
};

#define GREETING_MAGIC 0x42574752u

#endif
