/* keyring.c - reads and writes files of keys; who may read and write those */
#include "common/keyring.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/file.h"
#include "common/link_key.h"
#include "common/mem.h"

#define LINE_BYTES_MAX 512

static const char *const role_names[N_KEY_ROLES] = {
    [KEY_COORDINATOR] = "coordinator", [KEY_WORKER] = "worker", [KEY_VIEWER] = "viewer",
    [KEY_USER] = "user", [KEY_ADMIN] = "admin",
};

const char *key_role_name(enum key_role role)
{
    return role_names[role];
}

bool key_role_parse(const char *word, enum key_role *out)
{
    for (int r = 0; r < N_KEY_ROLES; r++)
        if (!strcmp(word, role_names[r])) {
            *out = (enum key_role)r;
            return true;
        }
    return false;
}

/* ---- a line --------------------------------------------------------------------------------- */

static bool is_name(const char *text)
{
    size_t n = strlen(text);
    if (!n || n > NAME_BYTES_MAX || !isalnum((unsigned char)*text))
        return false;
    for (; *text; text++)
        if (!isalnum((unsigned char)*text) && !strchr("._-", *text))
            return false;
    return true;
}

/* The first moment after that day. */
static bool read_day(const char *text, int64_t *out_s)
{
    struct tm day = {0};
    const char *end = strptime(text, "%Y-%m-%d", &day);
    if (!end || *end)
        return false;
    *out_s = (int64_t)timegm(&day) + 86400;
    return true;
}

static const char *read_extra(char *word, struct key *out)
{
    if (!strncmp(word, "until=", 6))
        return read_day(word + 6, &out->until_s) ? NULL : "until= wants a day, as 2027-01-31";
    if (strncmp(word, "secret=", 7) || strlen(word + 7) != KEY_TEXT_BYTES - 1)
        return "expected ROLE NAME PUBLIC [until=YYYY-MM-DD]";
    memcpy(out->secret_text, word + 7, KEY_TEXT_BYTES);
    return NULL;
}

/* What is wrong, or NULL. Never tells what stands there: it may be a secret. */
static const char *read_line(char *line, struct key *out)
{
    char *at = NULL, *words[3];
    *out = (struct key){0};
    for (int i = 0; i < 3; i++)
        if (!(words[i] = strtok_r(i ? NULL : line, " \t\r\n", &at)))
            return "expected ROLE NAME PUBLIC [until=YYYY-MM-DD]";
    if (!key_role_parse(words[0], &out->role))
        return "the first word is no role: coordinator, worker, viewer, user or admin";
    if (!is_name(words[1]))
        return "the second word is no name: 1 to 64 letters, digits, '.', '_' or '-'";
    strcpy(out->name, words[1]);
    if (!link_key_is_one(words[2]))
        return "the third word is no public key: 40 characters of Z85";
    memcpy(out->public_text, words[2], KEY_TEXT_BYTES);
    for (char *word; (word = strtok_r(NULL, " \t\r\n", &at));) {
        const char *why = read_extra(word, out);
        if (why)
            return why;
    }
    return NULL;
}

void key_line(const struct key *k, char out_text[KEY_LINE_BYTES])
{
    char until[32] = "";
    time_t last_s = (time_t)k->until_s - 1;
    struct tm day;
    if (k->until_s && gmtime_r(&last_s, &day))
        strftime(until, sizeof until, " until=%Y-%m-%d", &day);
    snprintf(out_text, KEY_LINE_BYTES, "%s %s %s%s", key_role_name(k->role), k->name,
             k->public_text, until);
}

/* ---- files ---------------------------------------------------------------------------------- */

/* What is open, not what has the name now, is looked at. */
static FILE *open_own(const char *file, mode_t forbidden, const char *what, struct err *err,
                      int *out_rc)
{
    struct stat st;
    int fd = file_open(file, &st, err);
    *out_rc = fd < 0 ? fd : 0;
    if (fd < 0)
        return NULL;
    if (st.st_uid != geteuid() && st.st_uid != 0)
        *out_rc = err_set(err, -EACCES, "%s: belongs to user %lu; a file of keys must belong to "
                          "the one who uses it, or root", file, (unsigned long)st.st_uid);
    else if (st.st_mode & forbidden)
        *out_rc = err_set(err, -EACCES, "%s: has mode %04o, so that others may %s it; type: "
                          "chmod %s %s", file, (unsigned)(st.st_mode & 07777), what,
                          forbidden & 044 ? "600" : "644", file);
    FILE *f = *out_rc < 0 ? NULL : fdopen(fd, "r");
    if (!f)
        close(fd);
    if (!f && *out_rc == 0)
        *out_rc = err_set(err, -errno, "%s: %s", file, strerror(errno));
    return f;
}

/* 1: a key, 0: the end, else -EINVAL. */
static int next_key(FILE *f, const char *file, size_t *line_number, struct key *out,
                    struct err *err)
{
    char line[LINE_BYTES_MAX];
    int rc = 0;
    while (rc == 0 && fgets(line, sizeof line, f)) {
        ++*line_number;
        bool is_whole = strchr(line, '\n') || feof(f);
        size_t first = strspn(line, " \t\r\n");
        if (is_whole && (line[first] == '#' || !line[first]))
            continue;
        const char *why = is_whole ? read_line(line, out) : "the line is too long";
        rc = why ? err_set(err, -EINVAL, "%s:%zu: %s", file, *line_number, why) : 1;
    }
    explicit_bzero(line, sizeof line);
    return rc;
}

int key_read(const char *file, struct key *out, struct err *err)
{
    struct key k;
    char public_text[KEY_TEXT_BYTES];
    size_t line_number = 0;
    int rc;
    size_t n = strlen(file);
    if (n > 4 && !strcmp(file + n - 4, ".pub"))
        return err_set(err, -EINVAL, "%s: is the part for others; expected the .key that 'ballast "
                       "keygen' wrote beside it", file);
    FILE *f = open_own(file, 077, "read", err, &rc);
    if (!f)
        return rc;
    setvbuf(f, NULL, _IONBF, 0); /* no copy of the secret stays behind */
    rc = next_key(f, file, &line_number, &k, err);
    fclose(f);
    if (rc < 0)
        return rc;
    if (rc == 0 || !*k.secret_text)
        return err_set(err, -EINVAL, "%s: holds no secret key; 'ballast keygen NAME' makes one",
                       file);
    if (!link_key_public(k.secret_text, public_text) || strcmp(public_text, k.public_text)) {
        explicit_bzero(&k, sizeof k);
        return err_set(err, -EINVAL, "%s: its secret and its public key do not belong together",
                       file);
    }
    *out = k;
    explicit_bzero(&k, sizeof k);
    return 0;
}

int token_read(const char *file, char out_text[TOKEN_BYTES_MAX + 1], struct err *err)
{
    char line[TOKEN_BYTES_MAX + 2] = "";
    int rc;
    FILE *f = open_own(file, 077, "read", err, &rc);
    if (!f)
        return rc;
    setvbuf(f, NULL, _IONBF, 0);
    size_t n = fgets(line, sizeof line, f) ? strcspn(line, "\r\n") : 0;
    fclose(f);
    line[n] = 0;
    size_t n_good = 0;
    while (line[n_good] > ' ' && line[n_good] <= '~')
        n_good++;
    if (n < TOKEN_BYTES_MIN || n > TOKEN_BYTES_MAX || n_good < n)
        rc = err_set(err, -EINVAL, "%s: expected a line of %d to %d printable characters without "
                     "spaces; 'openssl rand -hex 24' makes one", file, TOKEN_BYTES_MIN,
                     TOKEN_BYTES_MAX);
    else
        memcpy(out_text, line, n + 1);
    explicit_bzero(line, sizeof line);
    return rc;
}

/* Whole or not at all; nothing that is there is written over. */
static int write_new(const char *path, mode_t mode, const char *text, struct err *err)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    if (fd < 0 && errno == EEXIST)
        return err_set(err, -EEXIST, "%s: is there already; choose another name, or remove it "
                       "first", path);
    if (fd < 0)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    size_t n = strlen(text);
    int rc = 0;
    if (fchmod(fd, mode) < 0 || write(fd, text, n) != (ssize_t)n || fsync(fd) < 0)
        rc = err_set(err, errno ? -errno : -EIO, "%s: cannot be written: %s", path,
                     strerror(errno));
    close(fd);
    if (rc < 0)
        unlink(path);
    return rc;
}

int key_make(const char *folder, const char *name, enum key_role role, struct key *out,
             struct err *err)
{
    struct key k = {.role = role};
    char line[KEY_LINE_BYTES];
    if (!is_name(name))
        return err_set(err, -EINVAL, "'%.80s' is no name of a key: 1 to %d letters, digits, '.', "
                       "'_' or '-'", name, NAME_BYTES_MAX);
    strcpy(k.name, name);
    int rc = link_key_make(k.public_text, k.secret_text, err);
    if (rc < 0)
        return rc;
    key_line(&k, line);
    char *key_path = xasprintf("%s/%s.key", folder, name);
    char *pub_path = xasprintf("%s/%s.pub", folder, name);
    char *secret = xasprintf("# Secret: who has it is %s. %s.pub may be given to anybody.\n"
                             "%s secret=%s\n", name, name, line, k.secret_text);
    char *open_text = xasprintf("%s\n", line);
    if ((rc = write_new(pub_path, 0644, open_text, err)) == 0 &&
        (rc = write_new(key_path, 0600, secret, err)) < 0)
        unlink(pub_path);
    explicit_bzero(secret, strlen(secret));
    free(secret);
    free(open_text);
    free(key_path);
    free(pub_path);
    if (rc == 0)
        *out = k;
    explicit_bzero(&k, sizeof k);
    return rc;
}

/* ---- lists ---------------------------------------------------------------------------------- */

static int by_public(const void *a, const void *b)
{
    return strcmp(((const struct key *)a)->public_text, ((const struct key *)b)->public_text);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct key *)a)->name, ((const struct key *)b)->name);
}

/* Two people of one name would be one to the coordinator; a person with two keys has two names. */
static int check_unique(const char *file, struct keyring *k, struct err *err)
{
    if (!k->n)
        return 0;
    qsort(k->keys, k->n, sizeof *k->keys, by_name);
    for (size_t i = 1; i < k->n; i++)
        if (!by_name(&k->keys[i - 1], &k->keys[i]) && k->keys[i].role != KEY_COORDINATOR)
            return err_set(err, -EINVAL, "%s: the name %s is there twice", file, k->keys[i].name);
    qsort(k->keys, k->n, sizeof *k->keys, by_public);
    for (size_t i = 1; i < k->n; i++)
        if (!by_public(&k->keys[i - 1], &k->keys[i]))
            return err_set(err, -EINVAL, "%s: the key of %s is there twice", file,
                           k->keys[i].name);
    return 0;
}

int keyring_read(const char *file, struct keyring *out, struct err *err)
{
    struct keyring k = {0};
    size_t n_alloc = 0, line_number = 0;
    int rc;
    FILE *f = open_own(file, 022, "write", err, &rc);
    if (!f)
        return rc;
    for (struct key one; (rc = next_key(f, file, &line_number, &one, err)) == 1;) {
        if (*one.secret_text) {
            rc = err_set(err, -EINVAL, "%s:%zu: a secret key; only the line of its .pub belongs "
                         "here", file, line_number);
            break;
        }
        if (k.n == KEYRING_MAX) {
            rc = err_set(err, -EINVAL, "%s: more than %u keys", file, KEYRING_MAX);
            break;
        }
        k.keys = xgrow(k.keys, k.n, &n_alloc, sizeof *k.keys);
        k.keys[k.n++] = one;
    }
    fclose(f);
    if (rc == 0)
        rc = check_unique(file, &k, err);
    if (rc < 0) {
        keyring_fini(&k);
        return rc;
    }
    *out = k;
    return 0;
}

void keyring_fini(struct keyring *k)
{
    free(k->keys);
    *k = (struct keyring){0};
}

const struct key *keyring_find(const struct keyring *k, const char *public_text, int64_t now_s)
{
    struct key wanted;
    if (!k->n || strlen(public_text) != KEY_TEXT_BYTES - 1)
        return NULL;
    memcpy(wanted.public_text, public_text, KEY_TEXT_BYTES);
    const struct key *found = bsearch(&wanted, k->keys, k->n, sizeof *k->keys, by_public);
    return found && (!found->until_s || now_s < found->until_s) ? found : NULL;
}
