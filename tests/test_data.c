/* test_data.c - windows, documents, order and refusals of the token files */
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

#include "worker/data.h"

static char folder[] = "/tmp/ballast-data-XXXXXX";

static void put(const char *name, const void *bytes, size_t n)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

static int open_data(const char *pattern, enum data_format format, uint32_t length, bool pack,
                     uint32_t vocab, struct data **out, struct err *err)
{
    char path[256], *patterns[] = {path};
    snprintf(path, sizeof path, "%s/%s", folder, pattern);
    struct data_config c = {.patterns = patterns, .n_patterns = 1, .what = "data.train",
                            .format = format, .sequence_length = length, .vocab = vocab,
                            .pack = pack, .seed = 7};
    return data_open(&c, out, err);
}

static void setup_text(void)
{
    put("a.txt", "abcdefg", 7);
    put("b.txt", "hij", 3);
    put("c.txt", "klmnopqrst", 10);
}

static void a_packed_window_knows_its_documents(void **state)
{
    (void)state;
    struct data *d = NULL;
    struct data_batch b = {0};
    struct err err = {0};
    setup_text();
    assert_int_equal(open_data("?.txt", DATA_BYTES, 6, true, 256, &d, &err), 0);
    assert_int_equal(data_tokens(d), 20);
    assert_int_equal(data_windows(d), 3);
    assert_int_equal(data_window(d, 1, &b, &err), 0); /* g | hij | kl */
    assert_int_equal(b.n_tokens, 6);
    assert_int_equal(b.n_docs, 3);
    assert_memory_equal(b.tokens, ((int32_t[]){'g', 'h', 'i', 'j', 'k', 'l'}), 24);
    assert_memory_equal(b.labels, ((int32_t[]){-1, 'i', 'j', -1, 'l', 'm'}), 24);
    assert_memory_equal(b.cu_seqlens, ((int32_t[]){0, 1, 4, 6}), 16);
    assert_int_equal(b.n_labels, 4);
    assert_int_equal(data_window(d, 0, &b, &err), 0); /* appended */
    assert_int_equal(b.n_docs, 4);
    assert_int_equal(b.cu_seqlens[4], 12);
    assert_int_equal(b.labels[11], 'g');
    data_batch_fini(&b);
    data_close(d);
}

static void unpacked_windows_stay_inside_their_file(void **state)
{
    (void)state;
    struct data *d = NULL;
    struct data_batch b = {0};
    struct err err = {0};
    setup_text();
    assert_int_equal(open_data("?.txt", DATA_BYTES, 4, false, 256, &d, &err), 0);
    assert_int_equal(data_windows(d), 2 + 1 + 3);
    static const struct {
        uint64_t window;
        const char *tokens, *labels;
    } rows[] = {
        {0, "abcd", "bcde"}, {1, "ef", "fg"}, {2, "hi", "ij"}, {3, "klmn", "lmno"}, {5, "s", "t"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        data_batch_clear(&b);
        assert_int_equal(data_window(d, rows[i].window, &b, &err), 0);
        assert_int_equal(b.n_tokens, strlen(rows[i].tokens));
        assert_int_equal(b.n_docs, 1);
        for (int64_t k = 0; k < b.n_tokens; k++) {
            assert_int_equal(b.tokens[k], rows[i].tokens[k]);
            assert_int_equal(b.labels[k], rows[i].labels[k]);
        }
    }
    data_batch_fini(&b);
    data_close(d);
}

static void an_epoch_sees_every_window_once(void **state)
{
    (void)state;
    struct data *d = NULL;
    struct err err = {0};
    uint16_t tokens[1001];
    for (uint32_t i = 0; i < 1001; i++)
        tokens[i] = (uint16_t)i;
    put("w.bin", tokens, sizeof tokens);
    assert_int_equal(open_data("w.bin", DATA_U16, 10, true, 1001, &d, &err), 0);
    assert_int_equal(data_windows(d), 100);
    int32_t first[2][100];
    for (uint64_t epoch = 0; epoch < 2; epoch++) {
        uint32_t seen[100] = {0}, n_in_place = 0;
        for (uint64_t i = 0; i < 100; i++) {
            struct data_batch b = {0}, again = {0};
            assert_int_equal(data_sample(d, epoch * 100 + i, &b, &err), 0);
            assert_int_equal(data_sample(d, epoch * 100 + i, &again, &err), 0);
            assert_memory_equal(b.tokens, again.tokens, 40);
            assert_int_equal(b.labels[9], b.tokens[0] + 10);
            first[epoch][i] = b.tokens[0];
            seen[b.tokens[0] / 10]++;
            n_in_place += (uint64_t)b.tokens[0] / 10 == i;
            data_batch_fini(&b);
            data_batch_fini(&again);
        }
        for (uint32_t i = 0; i < 100; i++)
            assert_int_equal(seen[i], 1);
        assert_true(n_in_place < 10);
    }
    assert_memory_not_equal(first[0], first[1], sizeof first[0]);
    data_close(d);
}

static void what_cannot_be_trained_on_is_one_line(void **state)
{
    (void)state;
    put("empty.txt", "", 0);
    put("odd.bin", "abc", 3);
    put("short.txt", "abcd", 4);
    char fifo[256];
    snprintf(fifo, sizeof fifo, "%s/fifo.txt", folder);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    put("big.bin", "\x01\x00\x00\x00\x02\x01\x00\x00\x00\x00\x00\x00", 12);
    static const struct {
        const char *what, *pattern;
        enum data_format format;
        const char *text;
    } rows[] = {
        {"nothing matches", "none-*.txt", DATA_BYTES, "data.train: no file matches '/tmp/"},
        {"an empty file", "empty.txt", DATA_BYTES, "empty.txt: empty"},
        {"half a token", "odd.bin", DATA_U16, "odd.bin: 3 bytes are no whole number of 2-byte"},
        {"too little", "short.txt", DATA_BYTES, "data.train: 4 tokens are too few: one sequence "
                                                "needs 5"},
        {"a folder", ".", DATA_BYTES, "not a regular file"},
        {"a FIFO that nobody writes", "fifo.txt", DATA_BYTES, "fifo.txt: not a regular file"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct data *d = NULL;
        struct err err = {0};
        assert_true(open_data(rows[i].pattern, rows[i].format, 4, true, 256, &d, &err) < 0);
        assert_null(d);
        if (!strstr(err.text, rows[i].text))
            fail_msg("%s: expected '%s' in '%s'", rows[i].what, rows[i].text, err.text);
    }
    struct data *d = NULL;
    struct data_batch b = {0};
    struct err err = {0};
    assert_int_equal(open_data("big.bin", DATA_U32, 2, true, 256, &d, &err), 0);
    assert_int_equal(data_window(d, 0, &b, &err), -EINVAL);
    assert_non_null(strstr(err.text, "big.bin: token 258 at offset 4 is outside the model's "
                                     "vocabulary of 256"));
    data_batch_fini(&b);
    data_close(d);
    enum data_format format;
    assert_int_equal(data_format_parse("megatron", &format, &err), -ENOTSUP);
}

static int remove_folder(void **state)
{
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

int main(void)
{
    if (!mkdtemp(folder))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_packed_window_knows_its_documents),
        cmocka_unit_test(unpacked_windows_stay_inside_their_file),
        cmocka_unit_test(an_epoch_sees_every_window_once),
        cmocka_unit_test(what_cannot_be_trained_on_is_one_line),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
