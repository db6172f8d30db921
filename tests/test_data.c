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

#include "common/data.h"
#include "tests/folder.h"

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
    assert_int_equal(data_count(d).n_tokens, 20);
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
        {"a folder", ".", DATA_BYTES, "Is a directory"},
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
    assert_int_equal(data_format_parse("parquet", &format, &err), -EINVAL);
    assert_non_null(strstr(err.text, "megatron, jsonl"));
}

/* ---- JSONL ---------------------------------------------------------------------------------- */

static void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

/* The window as one line: documents parted by |, tokens with their labels. */
static char *window_text(const struct data *d, uint64_t index)
{
    struct data_batch b = {0};
    struct err err = {0};
    static char text[1000];
    size_t n = 0;
    int64_t n_labels = 0;
    if (data_window(d, index, &b, &err) < 0)
        fail_msg("%s", err.text);
    for (int32_t k = 0; k < b.n_docs; k++)
        for (int32_t i = b.cu_seqlens[k]; i < b.cu_seqlens[k + 1]; i++) {
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%d:%d",
                                  i > b.cu_seqlens[k] ? " " : k > 0 ? " | " : "", b.tokens[i],
                                  b.labels[i]);
            n_labels += b.labels[i] >= 0;
        }
    assert_int_equal(b.n_tokens, b.cu_seqlens[b.n_docs]);
    assert_int_equal(b.n_labels, n_labels);
    data_batch_fini(&b);
    return text;
}

static void assert_windows(const char *pattern, enum data_format format, uint32_t length, bool pack,
                           const char *const *expected)
{
    struct data *d = NULL;
    struct err err = {0};
    size_t n = 0;
    if (open_data(pattern, format, length, pack, 100, &d, &err) < 0)
        fail_msg("%s", err.text);
    for (; expected[n]; n++)
        assert_string_equal(window_text(d, n), expected[n]);
    assert_int_equal(data_windows(d), n);
    data_close(d);
}

static void tasks_are_packed_whole(void **state)
{
    (void)state;
    put_text("t.jsonl",
             "{\"input_ids\": [1, 2, 3], \"labels\": [-100, -100, 3]}\n"
             "\n"
             "{\"labels\": [4, 5], \"input_ids\": [4, 5], \"attention_mask\": [1, 1]}\r\n"
             "{\"input_ids\": [6], \"labels\": [6], \"note\": \"no input has a label\"}\n"
             "{\"input_ids\": [7, 8, 9, 10], \"labels\": [7, 8, -100, 10.0]}\n"
             "{\"input_ids\": [11, 12, 13, 14, 15, 16], \"labels\": [11, 12, 13, 14, 15, 16]}");
    static const char *const packed[] = {"1:-1 2:3 | 4:5", "7:8 8:-1 9:10",
                                         "11:12 12:13 13:14 14:15", "15:16", NULL};
    static const char *const apart[] = {"1:-1 2:3", "4:5", "7:8 8:-1 9:10",
                                        "11:12 12:13 13:14 14:15", "15:16", NULL};
    assert_windows("t.jsonl", DATA_JSONL, 4, true, packed);
    assert_windows("t.jsonl", DATA_JSONL, 4, false, apart);
}

static const struct {
    const char *shows, *text, *says;
} bad_lines[] = {
    {"no JSON", "{\"input_ids\": [1, 2]", "bad.jsonl:2: not JSON"},
    {"a list", "[1, 2]", "bad.jsonl:2: not an object, expected {"},
    {"no labels", "{\"input_ids\": [1]}", "bad.jsonl:2: key 'labels' is missing or no list"},
    {"text", "{\"text\": \"x\"}", "bad.jsonl:2: key 'input_ids' is missing or no list"},
    {"a key twice", "{\"input_ids\": [1], \"input_ids\": [2], \"labels\": [1]}",
     "bad.jsonl:2: key 'input_ids' is there twice"},
    {"fewer labels", "{\"input_ids\": [1, 2], \"labels\": [1]}",
     "bad.jsonl:2: 2 input_ids, but 1 labels"},
    {"nothing", "{\"input_ids\": [], \"labels\": []}", "bad.jsonl:2: 0 input_ids, expected 1"},
    {"outside the vocabulary", "{\"input_ids\": [1, 100], \"labels\": [1, 2]}",
     "bad.jsonl:2: input_ids[1] is 100, expected a whole number from 0 to 99"},
    {"an ignored input", "{\"input_ids\": [1, -100], \"labels\": [1, 2]}",
     "bad.jsonl:2: input_ids[1] is -100"},
    {"another ignored label", "{\"input_ids\": [1, 2], \"labels\": [1, -1]}",
     "labels[1] is -1, expected a whole number from 0 to 99, the model's vocabulary, or -100"},
    {"a fraction", "{\"input_ids\": [1.5], \"labels\": [1]}", "bad.jsonl:2: input_ids[0] is 1.5"},
    {"text for a number", "{\"input_ids\": [\"1\"], \"labels\": [1]}", "input_ids[0] is \"1\""},
    {"rows of rows", "{\"input_ids\": [[1]], \"labels\": [[1]]}", "input_ids[0] is [1]"},
    {"padding", "{\"input_ids\": [1, 0], \"labels\": [1, -100], \"attention_mask\": [1, 0]}",
     "bad.jsonl:2: attention_mask[1] is not 1"},
};

static void a_bad_line_is_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_lines / sizeof *bad_lines; i++) {
        struct data *d = NULL;
        struct err err = {0};
        char text[300];
        snprintf(text, sizeof text, "{\"input_ids\": [1, 2], \"labels\": [1, 2]}\n%s\n",
                 bad_lines[i].text);
        put_text("bad.jsonl", text);
        assert_int_equal(open_data("bad.jsonl", DATA_JSONL, 4, true, 100, &d, &err), -EINVAL);
        assert_null(d);
        if (!strstr(err.text, bad_lines[i].says))
            fail_msg("%s: expected '%s' in '%s'", bad_lines[i].shows, bad_lines[i].says, err.text);
    }
    struct data *d = NULL;
    struct err err = {0};
    put_text("blank.jsonl", "\n \n");
    assert_int_equal(open_data("blank.jsonl", DATA_JSONL, 4, true, 100, &d, &err), -EINVAL);
    put_text("mute.jsonl", "{\"input_ids\": [1, 2, 3], \"labels\": [1, -100, -100]}");
    assert_int_equal(open_data("mute.jsonl", DATA_JSONL, 4, true, 100, &d, &err), -EINVAL);
    assert_non_null(strstr(err.text, "mute.jsonl: no line has a label"));
    put_text("ones.jsonl", "{\"input_ids\": [1], \"labels\": [1]}");
    assert_int_equal(open_data("ones.jsonl", DATA_JSONL, 4, true, 100, &d, &err), -EINVAL);
    assert_non_null(strstr(err.text, "1 tokens are too few: one sequence needs 2"));
}

/* Lines are counted as far as they are read, labels where they are learnt. */
static void lines_are_counted_up_to_a_bound(void **state)
{
    (void)state;
    static const char line[] = "{\"input_ids\": [1, 2, 3], \"labels\": [1, -100, 3]}\n";
    static const struct { uint64_t bytes_max, n_lines; } rows[] = {
        {0, 20}, {1, 1}, {sizeof line - 1, 1}, {sizeof line, 2}, {10 * (sizeof line - 1), 10},
        {15 * (sizeof line - 1) + 1, 16}, {100000, 20},
    };
    char text[10 * sizeof line] = "", pattern[256], *patterns[] = {pattern};
    for (int i = 0; i < 10; i++)
        strcat(text, line);
    put_text("n1.jsonl", text);
    put_text("n2.jsonl", text);
    snprintf(pattern, sizeof pattern, "%s/n?.jsonl", folder);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct data *d = NULL;
        struct err err = {0};
        struct data_config c = {.patterns = patterns, .n_patterns = 1, .what = "data.train",
                                .format = DATA_JSONL, .sequence_length = 4, .vocab = 100,
                                .lines_bytes_max = rows[i].bytes_max};
        if (data_open(&c, &d, &err) < 0)
            fail_msg("%s", err.text);
        struct data_counts n = data_count(d);
        assert_int_equal(n.n_documents, rows[i].n_lines);
        assert_int_equal(n.n_read, rows[i].n_lines * (sizeof line - 1));
        assert_int_equal(n.n_labels, rows[i].n_lines);
        assert_int_equal(n.n_tokens, 3 * rows[i].n_lines);
        assert_int_equal(n.n_files, 2);
        assert_int_equal(n.n_bytes, 20 * (sizeof line - 1));
        data_close(d);
    }
}

/* ---- whether all are tokens ------------------------------------------------------------------ */

static void tokens_are_looked_at_up_to_a_bound(void **state)
{
    (void)state;
    enum { N = 20000 };
    static uint16_t tokens[2][N];
    tokens[1][100] = 300;
    tokens[1][N - 1] = 301;
    put("v0.bin", tokens[0], sizeof tokens[0]);
    put("v1.bin", tokens[1], sizeof tokens[1]);
    static const struct {
        uint32_t vocab;
        uint64_t bytes_max, n_looked;
        const char *says;
    } rows[] = {
        {256, UINT64_MAX, 0, "v1.bin: token 300 at offset 200 is outside the model's vocabulary"},
        {256, 20000, 0, "v1.bin: token 300 at offset 200"}, /* each file's beginning */
        {256, 100, 100 + 2 * 8, NULL},
        {301, UINT64_MAX, 0, "v1.bin: token 301 at offset 39998 is outside"},
        {301, 40000, 40000 + 2 * 8, NULL},
        {302, UINT64_MAX, 2 * sizeof tokens[0], NULL},
        {65536, 0, 2 * sizeof tokens[0], NULL}, /* no need to look */
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct data *d = NULL;
        struct err err = {0};
        uint64_t n_looked = 0;
        assert_int_equal(open_data("v?.bin", DATA_U16, 8, true, rows[i].vocab, &d, &err), 0);
        int rc = data_check(d, rows[i].bytes_max, &n_looked, &err);
        if (rc != (rows[i].says ? -EINVAL : 0) || (rows[i].says && !strstr(err.text, rows[i].says)))
            fail_msg("row %zu: %d, '%s'", i, rc, err.text);
        if (!rows[i].says)
            assert_int_equal(n_looked, rows[i].n_looked);
        data_close(d);
    }
}

/* ---- Megatron ------------------------------------------------------------------------------- */

/* Documents of 3, 0, 1 + 2 and 2 tokens, 1 to 8; the bytes as Megatron writes them. */
struct megatron {
    uint64_t version, n_sequences, n_bounds;
    uint8_t  code;
    int32_t  lengths[4];
    int64_t  offsets[4], bounds[5];
    size_t   cut, n_bin;
};

static struct megatron megatron_of(uint8_t code, uint32_t bytes)
{
    return (struct megatron){
        .version = 1, .n_sequences = 4, .n_bounds = 5, .code = code, .lengths = {3, 1, 2, 2},
        .offsets = {0, 3 * bytes, 4 * bytes, 6 * bytes}, .bounds = {0, 1, 1, 3, 4},
        .n_bin = 8 * bytes,
    };
}

static void put_megatron(const struct megatron *m, const void *tokens)
{
    uint8_t bytes[200];
    size_t n = 0;
#define ADD(p, size) (memcpy(bytes + n, p, size), n += (size))
    ADD("MMIDIDX\0", 9);
    ADD(&m->version, 8);
    ADD(&m->code, 1);
    ADD(&m->n_sequences, 8);
    ADD(&m->n_bounds, 8);
    ADD(m->lengths, sizeof m->lengths);
    ADD(m->offsets, sizeof m->offsets);
    ADD(m->bounds, sizeof m->bounds);
#undef ADD
    put("g.idx", bytes, n - m->cut);
    put("g.bin", tokens, m->n_bin);
}

#define TOKENS(type) (const type[]){1, 2, 3, 4, 5, 6, 7, 8}

static void every_dtype_of_megatron_is_read(void **state)
{
    (void)state;
    const struct { uint8_t code; uint32_t bytes; const void *tokens; } rows[] = {
        {1, 1, TOKENS(uint8_t)}, {2, 1, TOKENS(int8_t)}, {3, 2, TOKENS(int16_t)},
        {4, 4, TOKENS(int32_t)}, {5, 8, TOKENS(int64_t)}, {6, 8, TOKENS(double)},
        {7, 4, TOKENS(float)}, {8, 2, TOKENS(uint16_t)},
    };
    static const char *const packed[] = {"1:2 2:3 3:-1", "4:5 5:6 6:-1", NULL};
    static const char *const apart[] = {"1:2 2:3", "4:5 5:6", "7:8", NULL};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct megatron m = megatron_of(rows[i].code, rows[i].bytes);
        put_megatron(&m, rows[i].tokens);
        assert_windows("g", DATA_MEGATRON, 4, false, apart);
        assert_windows("[g]", DATA_MEGATRON, 3, true, packed);
    }
}

static const struct {
    const char *shows;
    size_t field; /* of struct megatron */
    int64_t value;
    const char *says;
} bad_indexes[] = {
#define AT(f) offsetof(struct megatron, f)
    {"another version", AT(version), 2, "g.idx: version 2 at offset 9, expected 1"},
    {"more sequences than there are", AT(n_sequences), 5, "5 sequences and 5 document bounds"},
    {"a count that overflows", AT(n_sequences), INT64_MAX, "g.idx: 9223372036854775807 sequences"},
    {"no bounds", AT(n_bounds), 0, "4 sequences and 0 document bounds need 34"},
    {"an offset beyond the tokens", AT(offsets[3]), 14,
     "g.idx: sequence 3 is 2 tokens of 2 bytes at byte 14, but /tmp/"},
    {"an offset below", AT(offsets[3]), -2, "g.idx: sequence 3 is 2 tokens"},
    {"a gap in a document", AT(offsets[2]), 10, "g.idx: sequence 2 begins at byte 10, expected 8"},
    {"a document that ends before it begins", AT(bounds[2]), 2, NULL},
    {"a document beyond the last", AT(bounds[3]), 7, "g.idx: document 2 is sequences 1 to 7"},
    {"the last bound", AT(bounds[4]), 3, "documents begin at sequence 0 and end at 3, expected"},
    {"cut short", AT(cut), 1, "is it cut short?"},
    {"a header that is cut", AT(cut), 110, "g.idx: no Megatron index"},
};

static void a_bad_index_is_one_line(void **state)
{
    (void)state;
    struct megatron good = megatron_of(8, 2);
    for (size_t i = 0; i < sizeof bad_indexes / sizeof *bad_indexes; i++) {
        struct megatron m = good;
        struct data *d = NULL;
        struct err err = {0};
        memcpy((char *)&m + bad_indexes[i].field, &bad_indexes[i].value, 8);
        put_megatron(&m, TOKENS(uint16_t));
        int rc = open_data("g", DATA_MEGATRON, 4, true, 100, &d, &err);
        if (!bad_indexes[i].says) { /* the same documents, cut elsewhere */
            assert_int_equal(rc, 0);
            data_close(d);
            continue;
        }
        if (rc != -EINVAL || d || !strstr(err.text, bad_indexes[i].says))
            fail_msg("%s: %d, '%s'", bad_indexes[i].shows, rc, err.text);
    }
    struct data *d = NULL;
    struct data_batch b = {0};
    struct err err = {0};
    good.code = 9;
    put_megatron(&good, TOKENS(uint16_t));
    assert_int_equal(open_data("g", DATA_MEGATRON, 4, true, 100, &d, &err), -EINVAL);
    assert_non_null(strstr(err.text, "g.idx: dtype code 9 at offset 17, expected 1 to 8"));
    good = megatron_of(7, 4);
    put_megatron(&good, (const float[]){1, 2.5, 3, 4, 5, 6, 7, 8});
    assert_int_equal(open_data("g", DATA_MEGATRON, 4, true, 100, &d, &err), 0);
    assert_int_equal(data_window(d, 0, &b, &err), -EINVAL);
    assert_non_null(strstr(err.text, "g.bin: token 2.5 at offset 4 is no whole number"));
    data_batch_fini(&b);
    data_close(d);
    char path[256];
    snprintf(path, sizeof path, "%s/g.bin", folder);
    unlink(path);
    assert_int_equal(open_data("g", DATA_MEGATRON, 4, true, 100, &d, &err), -ENOENT);
    assert_non_null(strstr(err.text, "g.bin"));
}

int main(void)
{
    if (make_folder(NULL) < 0)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_packed_window_knows_its_documents),
        cmocka_unit_test(unpacked_windows_stay_inside_their_file),
        cmocka_unit_test(an_epoch_sees_every_window_once),
        cmocka_unit_test(what_cannot_be_trained_on_is_one_line),
        cmocka_unit_test(tasks_are_packed_whole),
        cmocka_unit_test(a_bad_line_is_named),
        cmocka_unit_test(lines_are_counted_up_to_a_bound),
        cmocka_unit_test(tokens_are_looked_at_up_to_a_bound),
        cmocka_unit_test(every_dtype_of_megatron_is_read),
        cmocka_unit_test(a_bad_index_is_one_line),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
