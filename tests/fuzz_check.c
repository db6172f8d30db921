/* fuzz_check.c - any two frames, any sender: check answers and never crashes
 *
 * The input is a byte of sender and kind, u16 the length of the head, the head, the payload. With
 * the first bit of the first byte the head is made well, of a method, so that payloads are
 * reached. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "proto/check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void well_made_head(const uint8_t *data, size_t size, struct arena *arena,
                           struct wire_bytes out_frames[WIRE_FRAMES])
{
    static uint8_t key[IDEMPOTENCY_KEY_BYTES];
    Ballast__Envelope e = BALLAST__ENVELOPE__INIT;
    Ballast__Status ok = BALLAST__STATUS__INIT;
    e.method = data[1] % 64;
    const struct check_method *m = check_method(e.method);
    bool is_response = data[2] & 1;
    e.kind = is_response ? BALLAST__KIND__KIND_RESPONSE
                         : m ? m->kind : BALLAST__KIND__KIND_REQUEST;
    e.status = is_response ? &ok : NULL;
    e.idempotency_key = (ProtobufCBinaryData){sizeof key, key};
    wire_pack(&e, NULL, arena, out_frames);
    e.payload_bytes = (uint32_t)(size - 3);
    /* Packed again by hand, because wire_pack counts the payload itself. */
    uint8_t *head = arena_alloc(arena, WIRE_PRELUDE_BYTES + ballast__envelope__get_packed_size(&e));
    memcpy(head, out_frames[0].bytes, WIRE_PRELUDE_BYTES);
    size_t n = ballast__envelope__pack(&e, head + WIRE_PRELUDE_BYTES);
    out_frames[0] = (struct wire_bytes){head, WIRE_PRELUDE_BYTES + n};
    out_frames[1] = (struct wire_bytes){data + 3, size - 3};
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 3)
        return 0;
    struct arena arena = {0};
    struct wire_bytes frames[WIRE_FRAMES];
    if (data[0] & 1) {
        well_made_head(data, size, &arena, frames);
    } else {
        size_t n_head = (size_t)(data[1] | data[2] << 8);
        n_head = n_head < size - 3 ? n_head : size - 3;
        frames[0] = (struct wire_bytes){data + 3, n_head};
        frames[1] = (struct wire_bytes){data + 3 + n_head, size - 3 - n_head};
    }
    struct checked_message m;
    Ballast__Status status;
    struct err err = {0};
    Ballast__TrainerMessage *trainer;
    check_message(frames, WIRE_FRAMES, data[0] >> 1 & 7, &arena, &m, &status);
    check_trainer_message(frames[1].bytes, frames[1].n_bytes, &arena, &trainer, &err);
    arena_fini(&arena);
    return 0;
}
