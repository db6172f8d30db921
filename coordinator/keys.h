/* keys.h - idempotency keys: which job a person's intent has made already
 *
 * (user, key) leads to the digest of the request and the job. A key is kept at least until its
 * time is over; keys_prune then forgets it. */
#ifndef COORDINATOR_KEYS_H
#define COORDINATOR_KEYS_H

#include "common/types.h"

#define DIGEST_BYTES 16

struct key_entry {
    uint64_t user_hash;
    uint8_t  key[IDEMPOTENCY_KEY_BYTES], digest[DIGEST_BYTES];
    job_id   job; /* 0: an empty slot */
    uint64_t until_ns;
};

struct keys {
    struct key_entry *slots;
    size_t            n_slots, n;
};

/* The digest of a request's bytes; not cryptographic, keys are one user's own. */
void keys_digest(const void *bytes, size_t n_bytes, uint8_t out_digest[DIGEST_BYTES]);

/* Lives until the next keys_add or keys_prune; NULL if it is not there. */
const struct key_entry *keys_find(const struct keys *k, const char *user, const uint8_t *key);

/* Leaves a key that is there already alone. */
void keys_add(struct keys *k, const char *user, const uint8_t *key, const uint8_t *digest,
              job_id job, uint64_t until_ns);

/* Moves all ends by that much later: replay runs at time 0, before the clock is known. */
void keys_shift(struct keys *k, uint64_t by_ns);
void keys_prune(struct keys *k, uint64_t now_ns);
void keys_fini(struct keys *k);

#endif
