/* check.c - reads a foreign message step by step and stops at the first thing that is not allowed
 *
 * Frames, prelude, envelope, method, sender, key, sizes; then one walk over the payload by its
 * own description: texts are UTF-8 without control characters, lists have bounded counts, enums
 * are known, sub-messages are there. Bounds that differ from the general ones are rows of a
 * table (check_bounds.c); what fields mean together is a function per message
 * (check_together.c). */
#include "proto/check.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/check_parts.h"

#define VIOLATIONS_MAX 16
#define FIELD_PATH_BYTES 160

/* ---- violations ------------------------------------------------------------------------------ */

static int write_path(const struct place *at, char *out, size_t n)
{
    int used = at->parent ? write_path(at->parent, out, n) : 0;
    if (used < 0 || (size_t)used >= n)
        return used;
    int more = snprintf(out + used, n - (size_t)used, at->index < 0 ? "%s%s" : "%s%s[%ld]",
                        used ? "." : "", at->field, at->index);
    return used + more;
}

void check_violation(struct walk *w, const char *field, const char *text)
{
    Ballast__Status *s = w->status;
    if (s->n_violations == VIOLATIONS_MAX)
        return;
    if (!s->violations)
        s->violations = arena_alloc(w->arena, VIOLATIONS_MAX * sizeof *s->violations);
    Ballast__FieldViolation *v = arena_alloc(w->arena, sizeof *v);
    ballast__field_violation__init(v);
    v->field = arena_strdup(w->arena, field);
    v->text = arena_strdup(w->arena, text);
    s->violations[s->n_violations++] = v;
}

static int violate(struct walk *w, const struct place *at, const char *text)
{
    char path[FIELD_PATH_BYTES] = "";
    if (at)
        write_path(at, path, sizeof path);
    check_status(w->status, w->arena, BALLAST__CODE__INVALID_ARGUMENT, "BAD_FIELD", "%s: %s",
                 path, text);
    check_violation(w, path, text);
    return -EINVAL;
}

int check_violate_field(struct walk *w, const struct place *parent, const char *field,
                        const char *text)
{
    struct place at = {parent, field, -1};
    return violate(w, &at, text);
}

/* ---- the walk -------------------------------------------------------------------------------- */

static int walk_message(struct walk *w, const struct place *at, const ProtobufCMessage *m);

static int check_text(struct walk *w, const struct place *at, const struct check_bound *b,
                      const char *text)
{
    char why[128];
    if (b->form == TEXT_LINES && strlen(text) <= b->max && strlen(text) >= b->min &&
        check_is_lines(text, b->max))
        return 0;
    if (b->form == TEXT_NAME || (b->form == TEXT_NAME_OR_EMPTY && text[0])) {
        if (check_is_name(text))
            return 0;
        snprintf(why, sizeof why, "expected a name: 1 to %d letters, digits, '.', '_' or '-', "
                 "a letter or digit first", NAME_BYTES_MAX);
        return violate(w, at, why);
    }
    if (strlen(text) > b->max)
        snprintf(why, sizeof why, "%zu bytes, at most %" PRIu64 " are allowed", strlen(text),
                 b->max);
    else if (b->form == TEXT_LINES && strlen(text) < b->min)
        snprintf(why, sizeof why, "is empty");
    else if (b->form == TEXT_LINES || !check_is_text(text, b->max))
        snprintf(why, sizeof why, "expected UTF-8 without control characters");
    else
        return 0;
    return violate(w, at, why);
}

static int check_number(struct walk *w, const struct place *at, const struct check_bound *b,
                        uint64_t x)
{
    char why[96];
    if (x >= b->min && x <= b->max)
        return 0;
    snprintf(why, sizeof why, "%" PRIu64 " is out of range, allowed %" PRIu64 " to %" PRIu64, x,
             b->min, b->max);
    return violate(w, at, why);
}

static int check_enum(struct walk *w, const struct place *at, const struct check_bound *b,
                      const ProtobufCEnumDescriptor *words, int *x)
{
    char why[96];
    if (protobuf_c_enum_descriptor_get_value(words, *x))
        return *x >= 0 ? check_number(w, at, b, (uint64_t)*x) : 0;
    if (w->is_response) {
        *x = 0; /* every enum's UNKNOWN (or OK) */
        return 0;
    }
    snprintf(why, sizeof why, "%d is no %s of this version", *x, words->name);
    return violate(w, at, why);
}

static size_t element_bytes(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    default:
        return 4;
    }
}

static int check_value(struct walk *w, const struct place *at, const struct check_bound *b,
                       const ProtobufCFieldDescriptor *f, void *value)
{
    char why[96];
    switch (f->type) {
    case PROTOBUF_C_TYPE_STRING:
        return check_text(w, at, b, *(char **)value);
    case PROTOBUF_C_TYPE_MESSAGE:
        return walk_message(w, at, *(ProtobufCMessage **)value);
    case PROTOBUF_C_TYPE_BYTES: {
        size_t n = ((ProtobufCBinaryData *)value)->len;
        if (n >= b->min && n <= b->max)
            return 0;
        snprintf(why, sizeof why, "%zu bytes, allowed %" PRIu64 " to %" PRIu64, n, b->min, b->max);
        return violate(w, at, why);
    }
    case PROTOBUF_C_TYPE_ENUM:
        return check_enum(w, at, b, f->descriptor, value);
    case PROTOBUF_C_TYPE_UINT64:
        return check_number(w, at, b, *(uint64_t *)value);
    case PROTOBUF_C_TYPE_UINT32:
        return check_number(w, at, b, *(uint32_t *)value);
    default:
        return 0; /* signed, floating and boolean values mean something to the core only */
    }
}

static int walk_list(struct walk *w, const struct place *parent, const struct check_bound *b,
                     const ProtobufCFieldDescriptor *f, uint8_t *bytes)
{
    char why[96];
    size_t n = *(size_t *)(bytes + f->quantifier_offset);
    struct place at = {parent, f->name, -1};
    if (n < b->min || n > b->max) {
        snprintf(why, sizeof why, "%zu elements, allowed %" PRIu64 " to %" PRIu64, n, b->min,
                 b->max);
        return violate(w, &at, why);
    }
    struct check_bound element = {b->message, b->field, b->element_form, 0, b->element_max, 0, 0};
    if (!element.max)
        element.max = f->type == PROTOBUF_C_TYPE_STRING ? PATH_BYTES_MAX : UINT64_MAX;
    uint8_t *items = *(uint8_t **)(bytes + f->offset);
    for (size_t i = 0; i < n; i++) {
        at.index = (long)i;
        int rc = check_value(w, &at, &element, f, items + i * element_bytes(f->type));
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int walk_message(struct walk *w, const struct place *parent, const ProtobufCMessage *m)
{
    const ProtobufCMessageDescriptor *d = m->descriptor;
    uint8_t *bytes = (uint8_t *)m;
    for (unsigned i = 0; i < d->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &d->fields[i];
        struct check_bound b = check_bound_of(d, f);
        struct place at = {parent, f->name, -1};
        int rc = 0;
        if (f->label == PROTOBUF_C_LABEL_REPEATED) {
            rc = walk_list(w, parent, &b, f, bytes);
        } else if (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) {
            if (*(uint32_t *)(bytes + f->quantifier_offset) == f->id)
                rc = check_value(w, &at, &b, f, bytes + f->offset);
        } else if (f->type == PROTOBUF_C_TYPE_MESSAGE && !*(void **)(bytes + f->offset)) {
            rc = w->is_response || !b.min ? 0 : violate(w, &at, "is missing");
        } else {
            rc = check_value(w, &at, &b, f, bytes + f->offset);
        }
        if (rc < 0)
            return rc;
    }
    return check_together(w, parent, m);
}

/* ---- the message ----------------------------------------------------------------------------- */

static int check_prelude(struct walk *w, const struct wire_bytes *head, size_t n_frames,
                         uint32_t from)
{
    uint16_t major, minor;
    size_t n_max = from == CHECK_COORDINATOR ? WIRE_FRAMES_MAX : WIRE_FRAMES;
    if (n_frames < WIRE_FRAMES || n_frames > n_max) {
        check_status(w->status, w->arena, BALLAST__CODE__INVALID_ARGUMENT, "BAD_FRAMES",
                     "a message has %d frames, this one %zu", WIRE_FRAMES, n_frames);
        return -EPROTO;
    }
    switch (wire_read_prelude(head->bytes, head->n_bytes, &major, &minor)) {
    case WIRE_OURS:
        return 0;
    case WIRE_OTHER_VERSION:
        check_status(w->status, w->arena, BALLAST__CODE__FAILED_PRECONDITION, "VERSION",
                     "the peer speaks protocol %u.%u, this side %u.%u: install the same version "
                     "on both", major, minor, WIRE_MAJOR, WIRE_MINOR);
        return -EPROTO;
    default:
        check_status(w->status, w->arena, BALLAST__CODE__INVALID_ARGUMENT, "NOT_BALLAST",
                     "the first frame does not begin like a message of ballast");
        return -EPROTO;
    }
}

static int read_envelope(struct walk *w, const struct wire_bytes *head,
                         Ballast__Envelope **out_envelope)
{
    Ballast__Envelope *e = NULL;
    if (head->n_bytes <= WIRE_HEAD_BYTES_MAX)
        e = ballast__envelope__unpack(arena_pb(w->arena), head->n_bytes - WIRE_PRELUDE_BYTES,
                                      head->bytes + WIRE_PRELUDE_BYTES);
    if (!e) {
        check_status(w->status, w->arena, BALLAST__CODE__INVALID_ARGUMENT, "BAD_ENVELOPE",
                     "the envelope (%zu bytes) cannot be read", head->n_bytes);
        return -EPROTO;
    }
    *out_envelope = e;
    return 0;
}

static int refuse(struct walk *w, Ballast__Code code, const char *reason, const char *text)
{
    check_status(w->status, w->arena, code, reason, "%s", text);
    return -EINVAL;
}

static bool is_refusal(const Ballast__Envelope *e)
{
    return e->kind == BALLAST__KIND__KIND_RESPONSE && e->status &&
           e->status->code != BALLAST__CODE__OK;
}

static int check_envelope(struct walk *w, const Ballast__Envelope *e, uint32_t from,
                          const struct check_method **out_method)
{
    const struct check_method *m = check_method(e->method);
    if (is_refusal(e) && from & CHECK_COORDINATOR) {
        *out_method = m; /* also of a request that could not be read, or that is not known there */
        return 0;
    }
    if (!m) {
        check_status(w->status, w->arena, BALLAST__CODE__UNIMPLEMENTED, "METHOD",
                     "method %d is not known here", (int)e->method);
        return -EINVAL;
    }
    bool is_response = e->kind == BALLAST__KIND__KIND_RESPONSE;
    if (is_response ? !m->response : e->kind != m->kind) {
        check_status(w->status, w->arena, BALLAST__CODE__INVALID_ARGUMENT, "KIND",
                     "%s cannot be of kind %d", m->name, (int)e->kind);
        return -EINVAL;
    }
    if (!(from & (is_response ? (uint32_t)CHECK_COORDINATOR : m->from)))
        return refuse(w, BALLAST__CODE__PERMISSION_DENIED, "SENDER",
                      "this party may not send that method");
    if (e->deadline_ms > DEADLINE_MS_MAX)
        return check_violate_field(w, NULL, "deadline_ms", "is longer than 10 minutes");
    size_t n_key = e->idempotency_key.len;
    if (n_key ? n_key != IDEMPOTENCY_KEY_BYTES : m->needs_key && !is_response)
        return check_violate_field(w, NULL, "idempotency_key",
                                   "expected 16 bytes, random per intent");
    if (is_response && !e->status)
        return refuse(w, BALLAST__CODE__INVALID_ARGUMENT, "STATUS", "a response has a status");
    *out_method = m;
    return 0;
}

static int check_payload(struct walk *w, const struct check_method *m, const Ballast__Envelope *e,
                         const struct wire_bytes *frame, ProtobufCMessage **out_payload)
{
    size_t n_max = w->is_response ? m->response_bytes_max : m->request_bytes_max;
    if (frame->n_bytes != e->payload_bytes || frame->n_bytes > n_max) {
        check_status(w->status, w->arena, BALLAST__CODE__INVALID_ARGUMENT, "PAYLOAD_SIZE",
                     "%s: the payload has %zu bytes, %u were announced, %zu are allowed", m->name,
                     frame->n_bytes, e->payload_bytes, n_max);
        return -EINVAL;
    }
    ProtobufCMessage *p = protobuf_c_message_unpack(w->is_response ? m->response : m->request,
                                                    arena_pb(w->arena), frame->n_bytes,
                                                    frame->bytes);
    if (!p) {
        check_status(w->status, w->arena, BALLAST__CODE__INVALID_ARGUMENT, "PAYLOAD",
                     "%s: the payload cannot be read", m->name);
        return -EINVAL;
    }
    int rc = walk_message(w, NULL, p);
    if (rc < 0)
        return rc;
    *out_payload = p;
    return 0;
}

/* The payload's frames, put together. */
static struct wire_bytes join(const struct wire_bytes *frames, size_t n_frames, struct arena *arena)
{
    if (n_frames == WIRE_FRAMES)
        return frames[1];
    size_t n_first = frames[1].n_bytes, n_rest = frames[2].n_bytes;
    uint8_t *bytes = arena_alloc(arena, n_first + n_rest + 1);
    if (n_first > 0)
        memcpy(bytes, frames[1].bytes, n_first);
    if (n_rest > 0)
        memcpy(bytes + n_first, frames[2].bytes, n_rest);
    return (struct wire_bytes){bytes, n_first + n_rest};
}

int check_message(const struct wire_bytes *frames, size_t n_frames, uint32_t from,
                  struct arena *arena, struct checked_message *out_message,
                  Ballast__Status *out_status)
{
    struct checked_message m = {0};
    struct walk w = {arena, out_status, false};
    ballast__status__init(out_status);
    *out_message = m;

    int rc = check_prelude(&w, frames, n_frames, from);
    if (rc < 0 || (rc = read_envelope(&w, frames, &m.envelope)) < 0)
        return rc;
    out_message->envelope = m.envelope;
    w.is_response = m.envelope->kind == BALLAST__KIND__KIND_RESPONSE;
    if (m.envelope->status && (rc = walk_message(&w, NULL, &m.envelope->status->base)) < 0)
        return rc;
    if ((rc = check_envelope(&w, m.envelope, from, &m.method)) < 0)
        return rc;
    const struct wire_bytes payload = join(frames, n_frames, arena);
    if (!is_refusal(m.envelope) &&
        (rc = check_payload(&w, m.method, m.envelope, &payload, &m.payload)) < 0)
        return rc;
    *out_message = m;
    return 0;
}

int check_trainer_message(const uint8_t *bytes, size_t n_bytes, struct arena *arena,
                          Ballast__TrainerMessage **out_message, struct err *err)
{
    Ballast__Status status;
    struct walk w = {arena, &status, false};
    Ballast__TrainerMessage *m = NULL;
    ballast__status__init(&status);
    if (n_bytes <= BULK_BYTES_MAX)
        m = ballast__trainer_message__unpack(arena_pb(arena), n_bytes, bytes);
    if (!m)
        return err_set(err, -EPROTO, "a message of %zu bytes between daemon and trainer cannot be "
                       "read", n_bytes);
    int rc = walk_message(&w, NULL, &m->base);
    if (rc < 0)
        return err_set(err, rc, "message between daemon and trainer: %s", status.message);
    if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT__NOT_SET)
        return err_set(err, -EPROTO, "a message between daemon and trainer says nothing");
    *out_message = m;
    return 0;
}
