/* seal.c - AES-256-GCM and HMAC-SHA256 of OpenSSL's libcrypto */
#include "worker/seal.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "common/mem.h"

#define NONCE_BYTES 12u

struct seal {
    EVP_CIPHER *cipher;
    EVP_CIPHER_CTX *context;
    uint8_t  secret[SEAL_SECRET_BYTES];
    uint32_t from, to;
    enum seal_end end;
    uint64_t n_records;
    bool     is_broken;
};

int seal_make_secret(uint8_t out_secret[SEAL_SECRET_BYTES], struct err *err)
{
    ssize_t n = getrandom(out_secret, SEAL_SECRET_BYTES, 0);
    if (n != (ssize_t)SEAL_SECRET_BYTES)
        return err_set(err, -EIO, "the kernel gives no random numbers");
    return 0;
}

/* Of the records from number n_records on. */
static void take_key(struct seal *s)
{
    struct {
        char     purpose[16];
        uint32_t from, to;
        uint64_t number;
    } const what = {"ballast seal", s->from, s->to, s->n_records / SEAL_RECORDS_PER_KEY};
    uint8_t key[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    bool is_made = HMAC(EVP_sha256(), s->secret, sizeof s->secret, (const uint8_t *)&what,
                        sizeof what, key, &n) != NULL;
    assert(is_made && n == 32);
    int rc = EVP_CipherInit_ex2(s->context, s->cipher, key, NULL, s->end == SEAL_CLOSES, NULL);
    assert(rc == 1);
    OPENSSL_cleanse(key, sizeof key);
}

struct seal *seal_create(const uint8_t secret[SEAL_SECRET_BYTES], uint32_t from, uint32_t to,
                         enum seal_end end)
{
    struct seal *s = xcalloc(1, sizeof *s);
    s->cipher = EVP_CIPHER_fetch(NULL, "AES-256-GCM", NULL);
    s->context = EVP_CIPHER_CTX_new();
    assert(s->cipher && s->context);
    memcpy(s->secret, secret, sizeof s->secret);
    s->from = from;
    s->to = to;
    s->end = end;
    return s;
}

void seal_destroy(struct seal *s)
{
    if (!s)
        return;
    EVP_CIPHER_CTX_free(s->context); /* wipes its key */
    EVP_CIPHER_free(s->cipher);
    OPENSSL_cleanse(s->secret, sizeof s->secret);
    free(s);
}

/* The number of a record is never used again, also not with the next key. */
static void begin_record(struct seal *s, size_t n_bytes)
{
    uint8_t nonce[NONCE_BYTES] = {0};
    assert(n_bytes <= INT_MAX);
    if (s->n_records % SEAL_RECORDS_PER_KEY == 0)
        take_key(s);
    memcpy(nonce + NONCE_BYTES - sizeof s->n_records, &s->n_records, sizeof s->n_records);
    s->n_records++;
    int rc = EVP_CipherInit_ex2(s->context, NULL, NULL, nonce, -1, NULL);
    assert(rc == 1);
}

void seal_close(struct seal *s, const void *plain, size_t n_bytes, uint8_t *out)
{
    int n = 0, last = 0;
    assert(s->end == SEAL_CLOSES);
    begin_record(s, n_bytes);
    bool is_done = EVP_EncryptUpdate(s->context, out, &n, plain, (int)n_bytes) == 1 &&
                   EVP_EncryptFinal_ex(s->context, out + n, &last) == 1 &&
                   EVP_CIPHER_CTX_ctrl(s->context, EVP_CTRL_AEAD_GET_TAG, SEAL_TAG_BYTES,
                                       out + n_bytes) == 1;
    assert(is_done && (size_t)n == n_bytes);
}

int seal_open(struct seal *s, const uint8_t *record, size_t n_bytes, void *out)
{
    uint8_t tag[SEAL_TAG_BYTES];
    int n = 0, last = 0;
    assert(s->end == SEAL_OPENS);
    if (s->is_broken)
        return -EBADMSG;
    begin_record(s, n_bytes);
    memcpy(tag, record + n_bytes, sizeof tag);
    if (EVP_DecryptUpdate(s->context, out, &n, record, (int)n_bytes) == 1 &&
        EVP_CIPHER_CTX_ctrl(s->context, EVP_CTRL_AEAD_SET_TAG, SEAL_TAG_BYTES, tag) == 1 &&
        EVP_DecryptFinal_ex(s->context, (uint8_t *)out + n, &last) == 1)
        return 0;
    s->is_broken = true;
    return -EBADMSG;
}
