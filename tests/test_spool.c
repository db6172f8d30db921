/* test_spool.c - output kept, stored, dropped beyond rate and size */
#include "worker/spool.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/mem.h"
#include "tests/folder.h"

static char path[64]; /* of the output */

static int make_path(void **state)
{
    int rc = make_folder(state);
    snprintf(path, sizeof path, "%s/output", folder);
    return rc;
}

static void bytes_come_back_from_any_offset(void **unused)
{
    (void)unused;
    struct spool *s;
    char text[64];
    assert_int_equal(spool_open(path, &s, NULL), 0);
    spool_write(s, "step 1\n", 7, NS_PER_S);
    spool_write(s, "step 2\n", 7, NS_PER_S);
    assert_int_equal(spool_bytes(s), 14);
    assert_int_equal(spool_read(s, 5, text, 4), 4);
    assert_memory_equal(text, "1\nst", 4);
    assert_int_equal(spool_read(s, 7, text, sizeof text), 7);
    assert_int_equal(spool_read(s, 14, text, sizeof text), 0);
    spool_close(s);
    assert_int_equal(access(path, F_OK), -1);
}

static void beyond_the_rate_bytes_are_dropped_and_counted(void **unused)
{
    (void)unused;
    struct spool *s;
    size_t n = 1u << 20;
    char *block = xcalloc(1, n);
    assert_int_equal(spool_open(path, &s, NULL), 0);
    for (size_t i = 0; i < 3 * SPOOL_BURST_BYTES / n; i++)
        spool_write(s, block, n, NS_PER_S);
    assert_int_equal(spool_bytes(s), SPOOL_BURST_BYTES);
    assert_int_equal(spool_dropped_bytes(s), 2 * SPOOL_BURST_BYTES);
    spool_write(s, block, n, NS_PER_S + NS_PER_S / 2); /* half a second later half of it fits */
    assert_int_equal(spool_bytes(s), SPOOL_BURST_BYTES + SPOOL_RATE_BYTES_PER_S / 2);
    spool_close(s);
    free(block);
}

static void stored_bytes_make_room(void **unused)
{
    (void)unused;
    struct spool *s;
    size_t n = 1u << 20;
    char *block = xcalloc(1, n), byte;
    uint64_t now_ns = NS_PER_S;
    memset(block, 'x', n);
    assert_int_equal(spool_open(path, &s, NULL), 0);
    for (size_t i = 0; i < SPOOL_BYTES_MAX / n + 5; i++, now_ns += NS_PER_S)
        spool_write(s, block, n, now_ns);
    assert_int_equal(spool_bytes(s), SPOOL_BYTES_MAX); /* full, whatever the rate */
    assert_int_equal(spool_dropped_bytes(s), 5 * n);

    spool_trim(s, SPOOL_BYTES_MAX / 2 + 100);
    spool_write(s, block, n, now_ns);
    assert_int_equal(spool_bytes(s), SPOOL_BYTES_MAX + n);
    assert_int_equal(spool_read(s, SPOOL_BYTES_MAX / 2 + 100, &byte, 1), 1);
    assert_int_equal(byte, 'x'); /* what is not stored elsewhere stays */
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_true((uint64_t)st.st_blocks * 512 < SPOOL_BYTES_MAX / 2 + 2 * n);
    spool_trim(s, 5); /* a late acknowledgement */
    spool_trim(s, UINT64_MAX);
    spool_close(s);
    free(block);
}

static void without_a_folder_output_is_kept_in_memory(void **unused)
{
    (void)unused;
    struct spool *s;
    struct err err = {0};
    char text[16];
    assert_int_equal(spool_open("/no/such/folder", &s, &err), 1);
    assert_non_null(strstr(err.text, "'/no/such/folder' for a trainer's output: No such file"));
    size_t n = 1u << 20;
    char *block = xcalloc(1, n);
    spool_write(s, block, n, NS_PER_S);
    spool_write(s, "step 1\n", 7, NS_PER_S);
    spool_trim(s, n);
    assert_int_equal(spool_read(s, n, text, sizeof text), 7);
    assert_memory_equal(text, "step 1\n", 7);
    spool_close(s);
    free(block);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_come_back_from_any_offset),
        cmocka_unit_test(beyond_the_rate_bytes_are_dropped_and_counted),
        cmocka_unit_test(stored_bytes_make_room),
        cmocka_unit_test(without_a_folder_output_is_kept_in_memory),
    };
    return cmocka_run_group_tests(tests, make_path, remove_folder);
}
