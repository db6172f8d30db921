/* seal.h - a sequence of records from one rank to another, which nobody else reads or changes
 *
 * libcrypto's home. A record is encrypted and authenticated by AES-256-GCM straight from the
 * caller's memory, and opened straight into it. Both ends have the same secret, of this direction
 * alone, and count: the number of a record is its nonce, so that one that is missing, comes again,
 * in another order or from elsewhere does not open, and no nonce comes twice. Keys are made from
 * the secret, both ranks and the number of the key (HMAC-SHA256), and each seals a bounded number
 * of records. */
#ifndef WORKER_SEAL_H
#define WORKER_SEAL_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define SEAL_SECRET_BYTES 32u
#define SEAL_TAG_BYTES    16u /* that a record is longer than what is in it */
#define SEAL_RECORDS_PER_KEY ((uint64_t)1 << 20)

enum seal_end { SEAL_CLOSES, SEAL_OPENS };

struct seal;

/* From the kernel's random numbers. */
int seal_make_secret(uint8_t out_secret[SEAL_SECRET_BYTES], struct err *err);

/* Ended with seal_destroy; NULL is fine there. */
struct seal *seal_create(const uint8_t secret[SEAL_SECRET_BYTES], uint32_t from, uint32_t to,
                         enum seal_end end);
void seal_destroy(struct seal *s);

/* The next record: n_bytes + SEAL_TAG_BYTES go to out, which does not overlap. */
void seal_close(struct seal *s, const void *plain, size_t n_bytes, uint8_t *out);
/* The same n_bytes again, which may be where the record is. -EBADMSG if this is not the next
 * record: out then holds nothing of use, and no later one opens either. */
int  seal_open(struct seal *s, const uint8_t *record, size_t n_bytes, void *out);

#endif
