/* field_text.h - numbers, durations and sizes as people write them
 *
 * The whole text is the value: no spaces, no hex, no nan, no infinity. Outputs are untouched when
 * the answer is no. */
#ifndef COMMON_FIELD_TEXT_H
#define COMMON_FIELD_TEXT_H

#include "common/types.h"

/* 300, -2, 1e6. Returns 0, -EINVAL (not a whole number) or -ERANGE (beyond 64 bits). */
int  text_integer(const char *text, uint64_t *out_magnitude, bool *out_negative);
/* A whole number of that range. */
bool text_count(const char *text, uint64_t min, uint64_t max, uint64_t *out);
bool text_double(const char *text, double *out);
/* true, yes, on and their opposites; 0 or 1. */
bool text_bool(const char *text, uint64_t *out);
/* 2h, 1h30m, 1.5s, 500ms, 1-12:00:00, 00:30:00; a bare number is seconds. Not negative. */
bool text_duration(const char *text, double *out_seconds);
/* 16GiB, 16Gi, 500MB, 4096. */
bool text_size(const char *text, double *out_bytes);

#define NUMBER_TEXT_BYTES 40
/* The fewest digits that read back as the same number. */
void text_shortest(double x, char out[NUMBER_TEXT_BYTES]);

#endif
