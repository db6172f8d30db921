/* keys.c - idempotency keys: which job a person's intent has made already */
#include "coordinator/keys.h"

#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/mem.h"

void keys_digest(const void *bytes, size_t n_bytes, uint8_t out_digest[DIGEST_BYTES])
{
    uint64_t pair[2] = {hash_fnv(HASH_FNV, bytes, n_bytes), 0};
    pair[1] = hash_fnv(hash_fnv(~HASH_FNV, pair, sizeof pair[0]), bytes, n_bytes);
    memcpy(out_digest, pair, DIGEST_BYTES);
}

static uint64_t user_hash(const char *user)
{
    return hash_fnv(HASH_FNV, user, strlen(user));
}

/* The slot of the key, or the empty one where it would go. */
static struct key_entry *slot(const struct keys *k, uint64_t user, const uint8_t *key)
{
    uint64_t h = hash_fnv(user, key, IDEMPOTENCY_KEY_BYTES);
    for (size_t i = (h ^ h >> 32) & (k->n_slots - 1);; i = (i + 1) & (k->n_slots - 1)) {
        struct key_entry *e = &k->slots[i];
        if (!e->job || (e->user_hash == user && !memcmp(e->key, key, sizeof e->key)))
            return e;
    }
}

const struct key_entry *keys_find(const struct keys *k, const char *user, const uint8_t *key)
{
    if (!k->n_slots)
        return NULL;
    struct key_entry *e = slot(k, user_hash(user), key);
    return e->job ? e : NULL;
}

/* Copies what is still wanted into a table with room for n entries. */
static void rebuild(struct keys *k, size_t n, uint64_t now_ns)
{
    struct keys old = *k;
    k->n = 0;
    k->n_slots = 64;
    while (k->n_slots < 2 * n)
        k->n_slots *= 2;
    k->slots = xcalloc(k->n_slots, sizeof *k->slots);
    for (size_t i = 0; i < old.n_slots; i++) {
        const struct key_entry *e = &old.slots[i];
        if (!e->job || e->until_ns <= now_ns)
            continue;
        *slot(k, e->user_hash, e->key) = *e;
        k->n++;
    }
    free(old.slots);
}

void keys_add(struct keys *k, const char *user, const uint8_t *key, const uint8_t *digest,
              job_id job, uint64_t until_ns)
{
    if (4 * (k->n + 1) > 3 * k->n_slots)
        rebuild(k, 2 * (k->n + 1), 0);
    struct key_entry *e = slot(k, user_hash(user), key);
    if (e->job)
        return;
    *e = (struct key_entry){.user_hash = user_hash(user), .job = job, .until_ns = until_ns};
    memcpy(e->key, key, sizeof e->key);
    memcpy(e->digest, digest, sizeof e->digest);
    k->n++;
}

void keys_shift(struct keys *k, uint64_t by_ns)
{
    for (size_t i = 0; i < k->n_slots; i++)
        k->slots[i].until_ns += by_ns;
}

void keys_prune(struct keys *k, uint64_t now_ns)
{
    if (k->n)
        rebuild(k, k->n, now_ns);
}

void keys_fini(struct keys *k)
{
    free(k->slots);
    *k = (struct keys){0};
}
