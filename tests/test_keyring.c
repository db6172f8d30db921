/* test_keyring.c - files of keys: what is made, who may read it, and what a list may hold */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/keyring.h"
#include "common/link_trust.h"

#define PUBLIC "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
#define OTHER  "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"

struct folder {
    char path[64], file[96];
};

static void folder_make(struct folder *f)
{
    strcpy(f->path, "/tmp/test_keyring.XXXXXX");
    assert_non_null(mkdtemp(f->path));
    snprintf(f->file, sizeof f->file, "%s/list", f->path);
}

static void folder_remove(struct folder *f)
{
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", f->path);
    assert_int_equal(system(command), 0);
}

static void put(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    assert_int_equal(chmod(path, 0644), 0);
}

static mode_t mode_of(const char *path)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    return st.st_mode & 07777;
}

static void a_key_is_made_and_read(void **state)
{
    (void)state;
    struct folder f;
    struct key made, read;
    struct err err = {0};
    char secret[96], open_one[96], other[96];
    folder_make(&f);
    snprintf(secret, sizeof secret, "%s/ada.key", f.path);
    snprintf(open_one, sizeof open_one, "%s/ada.pub", f.path);
    umask(0);
    assert_int_equal(key_make(f.path, "ada", KEY_ADMIN, &made, &err), 0);
    umask(022);
    assert_int_equal(mode_of(secret), 0600);
    assert_int_equal(mode_of(open_one), 0644);
    assert_int_equal(key_read(secret, &read, &err), 0);
    assert_memory_equal(&made, &read, sizeof made);
    assert_int_equal(key_make(f.path, "ada", KEY_USER, &made, &err), -EEXIST);
    assert_non_null(strstr(err.text, "is there already"));

    struct keyring ring;
    assert_int_equal(keyring_read(open_one, &ring, &err), 0);
    const struct key *k = keyring_find(&ring, read.public_text, 0);
    assert_non_null(k);
    assert_string_equal(k->name, "ada");
    assert_int_equal(k->role, KEY_ADMIN);
    assert_string_equal(k->secret_text, "");
    keyring_fini(&ring);

    assert_int_equal(chmod(secret, 0640), 0);
    assert_int_equal(key_read(secret, &read, &err), -EACCES);
    assert_non_null(strstr(err.text, "has mode 0640, so that others may read it; type: chmod 600"));
    assert_int_equal(key_read(open_one, &read, &err), -EINVAL);
    assert_non_null(strstr(err.text, "ada.pub: is the part for others; expected the .key"));
    snprintf(other, sizeof other, "%s/ada", f.path);
    assert_int_equal(rename(open_one, other), 0);
    assert_int_equal(key_read(other, &read, &err), -EACCES);
    assert_int_equal(chmod(other, 0600), 0);
    assert_int_equal(key_read(other, &read, &err), -EINVAL);
    assert_non_null(strstr(err.text, "holds no secret key"));
    assert_int_equal(key_read(f.path, &read, &err), -EISDIR);
    assert_int_equal(key_make(f.path, "../x", KEY_USER, &made, &err), -EINVAL);
    if (geteuid() == 0) {
        assert_int_equal(chmod(secret, 0600), 0);
        assert_int_equal(chown(secret, 12345, 12345), 0);
        assert_int_equal(key_read(secret, &read, &err), -EACCES);
        assert_non_null(strstr(err.text, "belongs to user 12345"));
    }
    folder_remove(&f);
}

static void lists_say_what_is_wrong_and_no_secret(void **state)
{
    (void)state;
    static const struct {
        const char *what, *text, *expected;
    } rows[] = {
        {"a role", "boss ada " PUBLIC "\n", ":1: the first word is no role"},
        {"a name", "# people\n\nuser a/b " PUBLIC "\n", ":3: the second word is no name"},
        {"a short key", "user ada abc\n", ":1: the third word is no public key"},
        {"no Z85", "user ada \"q:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7\n", ":1: the third word"},
        {"a missing word", "user ada\n", ":1: expected ROLE NAME PUBLIC"},
        {"a day", "user ada " PUBLIC " until=soon\n", ":1: until= wants a day"},
        {"something else", "user ada " PUBLIC " admin\n", ":1: expected ROLE NAME PUBLIC"},
        {"a secret", "user ada " PUBLIC " secret=" OTHER "\n", ":1: a secret key"},
        {"a name twice", "user ada " PUBLIC "\nuser ada " OTHER "\n", "name ada is there twice"},
        {"a key twice", "user ada " PUBLIC "\nuser bob " PUBLIC "\n", "is there twice"},
    };
    struct folder f;
    folder_make(&f);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct keyring ring;
        struct err err = {0};
        put(f.file, rows[i].text);
        if (keyring_read(f.file, &ring, &err) >= 0 || !strstr(err.text, rows[i].expected))
            fail_msg("%s: %s", rows[i].what, err.text);
        if (strstr(err.text, OTHER))
            fail_msg("%s: it tells the secret: %s", rows[i].what, err.text);
    }
    struct keyring ring;
    struct err err = {0};
    put(f.file, "user ada " PUBLIC "\n");
    assert_int_equal(chmod(f.file, 0664), 0);
    assert_int_equal(keyring_read(f.file, &ring, &err), -EACCES);
    assert_non_null(strstr(err.text, "others may write it; type: chmod 644"));
    folder_remove(&f);
}

static void a_key_ends_with_its_day(void **state)
{
    (void)state;
    struct folder f;
    struct keyring ring;
    struct err err = {0};
    char line[KEY_LINE_BYTES];
    folder_make(&f);
    put(f.file, "user ada " PUBLIC " until=2027-01-31\nviewer bob " OTHER "\n");
    assert_int_equal(keyring_read(f.file, &ring, &err), 0);
    assert_non_null(keyring_find(&ring, PUBLIC, 1801439999)); /* 2027-01-31 23:59:59 */
    assert_null(keyring_find(&ring, PUBLIC, 1801440000));
    assert_non_null(keyring_find(&ring, OTHER, 1801440000));
    assert_null(keyring_find(&ring, "rq", 0));
    key_line(keyring_find(&ring, PUBLIC, 0), line);
    assert_string_equal(line, "user ada " PUBLIC " until=2027-01-31");
    keyring_fini(&ring);
    folder_remove(&f);
}

static void trust_needs_both_files(void **state)
{
    (void)state;
    struct folder f;
    struct link_trust t;
    struct key k;
    struct err err = {0};
    char secret[96];
    folder_make(&f);
    snprintf(secret, sizeof secret, "%s/ada.key", f.path);
    assert_int_equal(key_make(f.path, "ada", KEY_USER, &k, &err), 0);
    assert_int_equal(link_trust_open("", NULL, &t, &err), 0);
    assert_null(link_trust_keys(&t));
    assert_int_equal(link_trust_open(secret, "", &t, &err), -EINVAL);
    assert_non_null(strstr(err.text, "coordinator_key is missing"));
    put(f.file, "user bob " PUBLIC "\n");
    assert_int_equal(link_trust_open(secret, f.file, &t, &err), -EINVAL);
    assert_non_null(strstr(err.text, "bob is no coordinator's key but a user's"));
    put(f.file, "# nothing\n");
    assert_int_equal(link_trust_open(secret, f.file, &t, &err), -EINVAL);
    put(f.file, "coordinator c " PUBLIC "\ncoordinator c " OTHER "\n"); /* while it changes */
    assert_int_equal(link_trust_open(secret, f.file, &t, &err), 0);
    assert_int_equal(link_trust_keys(&t)->n_servers, 2);
    link_trust_close(&t);
    folder_remove(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_key_is_made_and_read),
        cmocka_unit_test(lists_say_what_is_wrong_and_no_secret),
        cmocka_unit_test(a_key_ends_with_its_day),
        cmocka_unit_test(trust_needs_both_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
