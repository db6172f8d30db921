/* check.h - every limit on a foreign message, checked before a core or a person sees it
 *
 * One table says per method who sends it, as what, with which payload and how large; one walk
 * over the message's own description checks every string, list and enum; a few functions check
 * the ranges that the description cannot know. A message that passed satisfies types.h. */
#ifndef PROTO_CHECK_H
#define PROTO_CHECK_H

#include "common/err.h"
#include "common/mem.h"
#include "proto/ballast.pb-c.h"
#include "proto/wire.h"

/* Parties, one bit each. */
enum check_party {
    CHECK_CLIENT = 1,
    CHECK_WORKER = 2,
    CHECK_COORDINATOR = 4,
};

struct check_method {
    Ballast__Method                   method;
    const char                       *name;
    Ballast__Kind                     kind;  /* REQUEST or NOTICE */
    uint32_t                          from;  /* parties that may send it */
    bool                              needs_key; /* mutating: wants a 16-byte idempotency key */
    const ProtobufCMessageDescriptor *request;
    const ProtobufCMessageDescriptor *response; /* NULL for a notice */
    uint32_t                          request_bytes_max, response_bytes_max;
};

/* NULL for a method that is not in the table. */
const struct check_method *check_method(Ballast__Method method);

struct checked_message {
    Ballast__Envelope         *envelope; /* NULL if not even that could be read */
    const struct check_method *method;   /* NULL in the refusal of what is not known there */
    ProtobufCMessage          *payload;  /* of method->request or ->response; NULL in a refusal */
};

/* Unpacks and checks a message of n_frames frames (see wire.h) from one of the `from` parties.
 * The party of a response is the one that answers. Returns 0, or -EPROTO (not readable: wrong
 * frames, magic or version) or -EINVAL with *out_status saying why as a canonical code with field
 * violations; out_message->envelope is then set where it could be read, so that a request can be
 * answered. What is given out lives in the arena.
 * frames: at most n_frames of them are there; it looks at the first WIRE_FRAMES_MAX. */
int check_message(const struct wire_bytes *frames, size_t n_frames, uint32_t from,
                  struct arena *arena, struct checked_message *out_message,
                  Ballast__Status *out_status);

/* The message of a socketpair: framed by the caller, bytes without prelude and envelope. */
int check_trainer_message(const uint8_t *bytes, size_t n_bytes, struct arena *arena,
                          Ballast__TrainerMessage **out_message, struct err *err);

/* Whether the arrays of a report or a placement fit each other and mean something: every window,
 * layer, expert, slot, home and share. 0 or -EINVAL and what is wrong. */
int check_load_report(const Ballast__LoadReport *r, struct err *err);
int check_placement(const Ballast__Placement *p, struct err *err);

/* A status in the arena; reason and message may be NULL. */
void check_status(Ballast__Status *status, struct arena *arena, Ballast__Code code,
                  const char *reason, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* "NOT_FOUND" and so on; "UNKNOWN" for a number that is none. */
const char *check_code_name(Ballast__Code code);

/* 1-64 of letters, digits, '.', '_', '-', starting with a letter or digit. */
bool check_is_name(const char *text);

/* last, 1m, 1h or all: of which time expert load is asked. */
bool check_is_window(const char *word);

/* UTF-8 without control characters and within n_bytes_max. */
bool check_is_text(const char *text, size_t n_bytes_max);
/* The same, but lines may end and tabs stand in it. */
bool check_is_lines(const char *text, size_t n_bytes_max);

#endif
