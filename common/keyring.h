/* keyring.h - keys of people and daemons: a secret file for each, lists of public ones
 *
 * A key is a line of words, in any file of keys:
 *
 *   ROLE NAME PUBLIC [until=YYYY-MM-DD] [secret=SECRET]
 *
 * NAME.key holds one with its secret and may be read by its owner alone; NAME.pub holds the same
 * line without it. A coordinator's list of those it lets in is many such lines put together, a
 * client's or worker's list of coordinators one or, while keys change, two. Keys are Z85 text;
 * lines that begin with # say nothing. */
#ifndef COMMON_KEYRING_H
#define COMMON_KEYRING_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/types.h"

#define KEY_TEXT_BYTES 41 /* 40 of Z85 and the end */
#define KEYRING_MAX    100000u

/* What its holder may do. */
enum key_role {
    KEY_COORDINATOR, /* nothing: it is the server's own */
    KEY_WORKER,      /* attach as a worker */
    KEY_VIEWER,      /* look at everything */
    KEY_USER,        /* and submit jobs, and change those of its own name */
    KEY_ADMIN,       /* and change everything */
    N_KEY_ROLES
};

struct key {
    enum key_role role;
    char    name[NAME_BYTES_MAX + 1];
    char    public_text[KEY_TEXT_BYTES], secret_text[KEY_TEXT_BYTES]; /* secret: "" if not there */
    int64_t until_s; /* UTC, the end of its last day; 0: for ever */
};

struct keyring {
    struct key *keys; /* ascending by public_text */
    size_t      n;
};

/* "worker" and so on; the reverse gives false for a word that is none. */
const char *key_role_name(enum key_role role);
bool        key_role_parse(const char *word, enum key_role *out);

/* Makes FOLDER/NAME.key, mode 0600, and FOLDER/NAME.pub; -EEXIST where one is there. */
int key_make(const char *folder, const char *name, enum key_role role, struct key *out,
             struct err *err);

/* Reads a NAME.key. -EACCES where it does not belong to this process's user or root, or others
 * may read it. */
int key_read(const char *file, struct key *out, struct err *err);

/* Reads the one line of a file that is as private as a NAME.key: TOKEN_BYTES_MIN printable
 * characters without spaces or more. */
#define TOKEN_BYTES_MIN 16
#define TOKEN_BYTES_MAX 255
int token_read(const char *file, char out_text[TOKEN_BYTES_MAX + 1], struct err *err);

/* The line of it without the secret. */
#define KEY_LINE_BYTES 256
void key_line(const struct key *k, char out_text[KEY_LINE_BYTES]);

/* Gives *out, ended with keyring_fini. Nothing in it has a secret. -EACCES where others than this
 * process's user and root may write it. A key or a name twice is refused, but for coordinators. */
int  keyring_read(const char *file, struct keyring *out, struct err *err);
void keyring_fini(struct keyring *k);

/* NULL for one that is not there, or whose time is over. */
const struct key *keyring_find(const struct keyring *k, const char *public_text, int64_t now_s);

#endif
