/* test_conf.c - every way a file can be wrong is one line; what is right arrives in the struct */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/conf.h"
#include "common/mem.h"

struct thing {
    char    *name, *folder, *color;
    uint32_t count;
    uint64_t big, wait_ns, room_bytes, limit_s;
    int32_t  shift;
    double   rate;
    bool     on;
    int      kind;
    size_t   n_globs, n_betas, n_after;
    char   **globs;
    double  *betas;
    uint64_t *after;
};

static const char *const colors[] = {"red", "green", "off", NULL};
static const char *const kinds[] = {"small", "large", NULL};
static const struct field_spelling color_spellings[] = {{"true", "green"}, {NULL}};
static const struct field_spelling colored_spellings[] = {
    {"true", "red"}, {"false", "off"}, {NULL}};

#define AT(m) .offset = offsetof(struct thing, m)
#define LIST(m) AT(m), .count_offset = offsetof(struct thing, n_##m)

static const struct field thing_fields[] = {
    {"name", FIELD_STRING, AT(name), .max = 20, .help = "what it is called"},
    {"folder", FIELD_PATH, AT(folder), .preset = "", .help = "where it lies"},
    {"paint.color", FIELD_WORD, AT(color), .preset = "red", .words = colors,
     .spellings = color_spellings, .help = "of the outside"},
    {"paint.colored", FIELD_BOOL, .same_as = "paint.color", .spellings = colored_spellings,
     .help = "true is red"},
    {"paint.coats.count", FIELD_U32, AT(count), .preset = "1", .min = 1, .max = 1e9,
     .help = "how often"},
    {"paint.coats.shift", FIELD_I32, AT(shift), .preset = "0", .min = -5, .max = 5,
     .help = "to the left"},
    {"big", FIELD_U64, AT(big), .preset = "auto", .min = 2, .max = 18446744073709551615.0,
     .zero = "auto", .help = "a number"},
    {"rate", FIELD_DOUBLE, AT(rate), .preset = "0.5", .min = 0, .max = 1, .min_open = true,
     .max_open = true, .help = "a share"},
    {"on", FIELD_BOOL, AT(on), .preset = "true", .help = "is it on"},
    {"kind", FIELD_ENUM, AT(kind), .preset = "large", .words = kinds, .help = "which"},
    {"wait", FIELD_DURATION, AT(wait_ns), .preset = "2s", .min = 0, .max = 86400e9,
     .duration_ns = 1, .help = "how long"},
    {"limit", FIELD_DURATION, AT(limit_s), .preset = "none", .min = 1, .max = 1e7, .zero = "none",
     .duration_ns = NS_PER_S, .help = "at most"},
    {"room", FIELD_SIZE, AT(room_bytes), .preset = "16GiB", .min = 1024, .max = 0x1p50,
     .help = "space"},
    {"globs", FIELD_PATHS, LIST(globs), .preset = "", .help = "files"},
    {"betas", FIELD_DOUBLES, LIST(betas), .preset = "0.9, 0.95", .min = 0, .max = 1, .n_min = 2,
     .n_max = 2, .help = "two numbers"},
    {"after", FIELD_U64S, LIST(after), .preset = "[]", .min = 1, .max = 1e15, .help = "ids"},
};
static const struct field_table thing_table = {thing_fields,
                                               sizeof thing_fields / sizeof *thing_fields};

/* What is said about text, all lines joined; the thing is freed. */
static char *said_about(const char *text, size_t n_bytes)
{
    struct thing t;
    struct conf c;
    conf_init(&c, &thing_table, &t);
    conf_read_text(&c, "t.yaml", "/base", text, n_bytes);
    conf_finish(&c);
    char *said = problems_text(&c.problems);
    conf_fini(&c);
    fields_fini(&thing_table, &t);
    return said;
}

static const struct {
    const char *shows, *text, *said;
} wrong[] = {
    {"a right file says nothing", "name: x\n", ""},
    {"an unknown key names its neighbour", "name: x\npaimt: {color: red}\n",
     "t.yaml:2: key 'paimt': unknown; did you mean 'paint'?"},
    {"a nested unknown key too", "name: x\npaint:\n  coats:\n    cuont: 3\n",
     "t.yaml:4: key 'paint.coats.cuont': unknown; did you mean 'paint.coats.count'?"},
    {"a key that forgot its section", "name: x\nshift: 3\n",
     "t.yaml:2: key 'shift': unknown; did you mean 'paint.coats.shift'?"},
    {"a key like no other", "name: x\npaint: {zzzzzzzz: 3}\n",
     "t.yaml:2: key 'paint.zzzzzzzz': unknown; allowed here: color, coats"},
    {"a number out of its range", "name: x\npaint: {coats: {count: 0}}\n",
     "t.yaml:2: key 'paint.coats.count': 0 is out of range, allowed 1 to 1e9"},
    {"a negative count", "name: x\npaint: {coats: {count: -3}}\n",
     "t.yaml:2: key 'paint.coats.count': -3 is out of range, allowed 1 to 1e9"},
    {"beyond 64 bits", "name: x\nbig: 99999999999999999999999\n",
     "t.yaml:2: key 'big': 99999999999999999999999 is out of range, "
     "allowed auto or 2 to 1.84467e19"},
    {"a word for a number", "name: x\npaint: {coats: {count: many}}\n",
     "t.yaml:2: key 'paint.coats.count': 'many' is not a whole number, allowed 1 to 1e9"},
    {"a fraction for a whole number", "name: x\npaint: {coats: {shift: 1.5}}\n",
     "t.yaml:2: key 'paint.coats.shift': '1.5' is not a whole number, allowed -5 to 5"},
    {"quotes make text", "name: x\npaint: {coats: {count: \"3\"}}\n",
     "t.yaml:2: key 'paint.coats.count': is text in quotes, expected a whole number, "
     "allowed 1 to 1e9"},
    {"nan is no number", "name: x\nrate: .nan\n",
     "t.yaml:2: key 'rate': '.nan' is not a number, allowed more than 0 to less than 1"},
    {"an open bound", "name: x\nrate: 1\n",
     "t.yaml:2: key 'rate': 1 is out of range, allowed more than 0 to less than 1"},
    {"a wrong word lists the words", "name: x\npaint: {color: geen}\n",
     "t.yaml:2: key 'paint.color': 'geen' is not allowed; did you mean 'green'? "
     "Allowed: red, green, off"},
    {"a word for true", "name: x\non: maybe\n",
     "t.yaml:2: key 'on': 'maybe' is not true or false"},
    {"a duplicate key", "name: x\nrate: 0.1\nrate: 0.2\n",
     "t.yaml:3: key 'rate': written twice, first at t.yaml:2"},
    {"a duplicate section", "name: x\npaint: {color: red}\npaint: {color: off}\n",
     "t.yaml:3: key 'paint': written twice, first at t.yaml:2"},
    {"a key and its older spelling", "name: x\npaint:\n  color: red\n  colored: true\n",
     "t.yaml:4: key 'paint.colored': written twice, first at t.yaml:3"},
    {"a missing key", "rate: 0.1\n", "t.yaml: key 'name': missing; what it is called"},
    {"a section where a value belongs", "name: {a: 1}\n",
     "t.yaml:1: key 'name': is a section, expected text"},
    {"a list where a value belongs", "name: x\nrate: [1, 2]\n",
     "t.yaml:2: key 'rate': is a list, expected a number, allowed more than 0 to less than 1"},
    {"a value where a list belongs", "name: x\nglobs: a.txt\n",
     "t.yaml:2: key 'globs': is a single value, expected a list of paths"},
    {"a value where a section belongs", "name: x\npaint: red\n",
     "t.yaml:2: key 'paint': is a section, expected keys under it: color, coats"},
    {"a list in a list", "name: x\nglobs: [[a]]\n",
     "t.yaml:2: key 'globs': holds a list or section, expected plain values"},
    {"a bad element", "name: x\nbetas: [0.9, 7]\n",
     "t.yaml:2: key 'betas': 7 is out of range, allowed 0 to 1"},
    {"too few elements", "name: x\nbetas: [0.9]\n",
     "t.yaml:2: key 'betas': has 1 of at least 2 elements"},
    {"too many elements", "name: x\nbetas: [0.9, 0.9, 0.9]\n",
     "t.yaml:2: key 'betas': has more than 2 elements"},
    {"no value", "name:\n", "t.yaml:1: key 'name': has no value, expected text"},
    {"an empty text where one is needed", "name: ''\n",
     "t.yaml:1: key 'name': is empty, expected text"},
    {"a long text", "name: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n",
     "t.yaml:1: key 'name': is 30 bytes long, allowed up to 20"},
    {"control characters", "name: \"a\\e[2J\"\n",
     "t.yaml:1: key 'name': holds a control character (byte 0x1b)"},
    {"control characters of the upper half", "name: \"a\\x9b2J\"\n",
     "t.yaml:1: key 'name': holds a control character (byte 0xc2)"},
    {"a duration without sense", "name: x\nwait: 3 days\n",
     "t.yaml:2: key 'wait': '3 days' is not a duration (2h, 90s, 1-12:00:00), allowed 0 to 1d"},
    {"a size without sense", "name: x\nroom: 3XB\n",
     "t.yaml:2: key 'room': '3XB' is not a size (16GiB, 500MB), allowed 1KiB to 1024TiB"},
    {"two problems are two lines", "nam: x\nrate: 2\n",
     "t.yaml:1: key 'nam': unknown; did you mean 'name'?\n"
     "t.yaml:2: key 'rate': 2 is out of range, allowed more than 0 to less than 1\n"
     "t.yaml: key 'name': missing; what it is called"},
    {"a tab", "name: x\npaint:\n\tcolor: red\n",
     "t.yaml:3: not valid YAML: found character that cannot start any token (indent with spaces; "
     "a text that begins with * or @ needs quotes)"},
    {"an open bracket", "name: x\nglobs: [a, b\n",
     "t.yaml:3: not valid YAML: did not find expected ',' or ']'"},
    {"an alias", "name: &n x\nfolder: *n\n",
     "t.yaml:1: YAML anchors (&name) are not allowed; write the value out"},
    {"a glob without quotes", "name: x\nglobs: [*.txt]\n",
     "t.yaml:2: not valid YAML: did not find expected alphabetic or numeric character (indent with "
     "spaces; a text that begins with * or @ needs quotes)"},
    {"an alias without an anchor", "name: *x\n",
     "t.yaml:1: YAML aliases (*name) are not allowed; a text that begins with * needs quotes"},
    {"a tag", "name: !!python/object x\n", "t.yaml:1: YAML tags (!name) are not allowed"},
    {"two documents", "name: x\n---\nname: y\n",
     "t.yaml:2: a second document begins here; one file holds one"},
    {"a list as the file", "- a\n- b\n", "t.yaml:1: expected keys and values, as in 'name: value'"},
    {"a word as the file", "hello\n", "t.yaml:1: expected keys and values, as in 'name: value'"},
    {"a mapping as a key", "? {a: b}\n: c\n", "t.yaml:1: a key is not plain text"},
    {"an empty file", "", "t.yaml: the file is empty"},
    {"only a comment", "# nothing\n", "t.yaml: the file is empty"},
    {"a byte order mark is no text", "\xef\xbb\xbfname: x\n", ""},
    {"a list far too long is one line", "name: x\nbetas: [0.1, 0.1, 0.1, 0.1, 0.1]\n",
     "t.yaml:2: key 'betas': has more than 2 elements"},
    {"bytes that are no UTF-8", "name: x\nfolder: \xff\xfe\n",
     "t.yaml:2: not valid YAML: invalid leading UTF-8 octet"},
};

static void every_problem_is_one_line(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *said = said_about(wrong[i].text, strlen(wrong[i].text));
        if (strcmp(said, wrong[i].said) != 0)
            fail_msg("%s:\n  said     %s\n  expected %s", wrong[i].shows, said, wrong[i].said);
        free(said);
    }
}

static void large_and_binary_files_are_refused_at_once(void **state)
{
    (void)state;
    size_t n = 10u << 20;
    char *text = xcalloc(1, n);
    memset(text, 'a', n);
    char *said = said_about(text, n);
    assert_string_equal(said, "t.yaml: larger than 1024 KiB, the most allowed");
    free(said);
    said = said_about("name: \0x", 8);
    assert_string_equal(said, "t.yaml: not a text file: byte 6 is NUL");
    free(said);
    memset(text, '[', n);
    said = said_about(text, JOB_FILE_BYTES_MAX); /* deep nesting */
    assert_non_null(strstr(said, "expected keys and values"));
    free(said);
    memcpy(text, "name: ", 6);
    said = said_about(text, JOB_FILE_BYTES_MAX); /* the parser alone would take minutes */
    assert_string_equal(said, "t.yaml:1: key 'name': is a list, expected text\n"
                              "t.yaml:1: lists and sections are nested too deep");
    free(said);
    for (size_t i = 0; i < JOB_FILE_BYTES_MAX; i++)
        text[i] = i % 6 == 5 ? '\n' : "kkkk:"[i % 6]; /* 170,000 unknown keys */
    said = said_about(text, JOB_FILE_BYTES_MAX);
    if (!strstr(said, "and 90 more"))
        fail_msg("%s", said + strlen(said) - 80);
    free(said);
    free(text);
}

static void deep_sections_under_an_unknown_key_are_skipped(void **state)
{
    (void)state;
    char *text = xcalloc(1, 4096);
    strcpy(text, "name: x\nzzz: ");
    for (int i = 0; i < 50; i++)
        strcat(text, "[");
    for (int i = 0; i < 50; i++)
        strcat(text, "]");
    strcat(text, "\nrate: 7\n");
    char *said = said_about(text, strlen(text));
    assert_non_null(strstr(said, "t.yaml:3: key 'rate': 7 is out of range"));
    free(said);
    free(text);
}

static void values_arrive(void **state)
{
    (void)state;
    const char *text =
        "name: 007\nfolder: ./data\npaint:\n  color: true\n  coats: {count: 1e6, shift: -5}\n"
        "big: 18446744073709551615\nrate: .003\non: off\nkind: small\n"
        "wait: 1h30m\nlimit: 1-00:00:30\n"
        "room: 1.5KiB\nglobs: [a/*.txt, /abs/b.txt]\nbetas: [0.1, 2e-1]\nafter: [3, 4]\n";
    struct thing t;
    struct conf c;
    conf_init(&c, &thing_table, &t);
    conf_read_text(&c, "t.yaml", "/base", text, strlen(text));
    problems_print(&c.problems, stderr);
    assert_int_equal(conf_finish(&c), 0);
    assert_string_equal(t.name, "007");
    assert_string_equal(t.folder, "/base/data");
    assert_string_equal(t.color, "green");
    assert_int_equal(t.count, 1000000);
    assert_int_equal(t.shift, -5);
    assert_true(t.big == UINT64_MAX);
    assert_true(t.rate == 0.003);
    assert_false(t.on);
    assert_int_equal(t.kind, 0);
    assert_true(t.wait_ns == 5400 * NS_PER_S);
    assert_true(t.limit_s == 86430);
    assert_int_equal(t.room_bytes, 1536);
    assert_int_equal(t.n_globs, 2);
    assert_string_equal(t.globs[0], "/base/a/*.txt");
    assert_string_equal(t.globs[1], "/abs/b.txt");
    assert_true(t.n_betas == 2 && t.betas[0] == 0.1 && t.betas[1] == 0.2);
    assert_true(t.n_after == 2 && t.after[1] == 4);
    assert_string_equal(conf_where(&c, "rate"), "t.yaml:7");

    char *yaml = NULL, *again = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&yaml, &n);
    fields_print_yaml(&thing_table, &t, out);
    fclose(out);
    conf_fini(&c);
    fields_fini(&thing_table, &t);
    conf_init(&c, &thing_table, &t);
    conf_read_text(&c, "again", "/elsewhere", yaml, n);
    problems_print(&c.problems, stderr);
    assert_int_equal(conf_finish(&c), 0);
    out = open_memstream(&again, &n);
    fields_print_yaml(&thing_table, &t, out);
    fclose(out);
    assert_string_equal(yaml, again);
    free(yaml);
    free(again);
    conf_fini(&c);
    fields_fini(&thing_table, &t);
}

static void defaults_are_the_tables(void **state)
{
    (void)state;
    struct thing t;
    fields_init(&thing_table, &t);
    assert_null(t.name);
    assert_string_equal(t.color, "red");
    assert_true(t.wait_ns == 2 * NS_PER_S && t.limit_s == 0 && t.big == 0);
    assert_int_equal(t.kind, 1);
    assert_true(t.n_betas == 2 && t.betas[1] == 0.95 && t.n_after == 0);
    struct problems p = {0};
    fields_check(&thing_table, &t, &p);
    assert_int_equal(p.n_total, 1); /* the missing name */
    assert_string_equal(p.items[0].text, "key 'name': is empty, expected text");
    problems_fini(&p);
    fields_fini(&thing_table, &t);
}

static void assignments_go_through_the_same_table(void **state)
{
    (void)state;
    static const struct { const char *text, *said; } rows[] = {
        {"rate=0.25", ""},
        {"globs=[a, /b]", ""},
        {"paint.colored=false", ""},
        {"name=a=b", ""},
        {"globs=[ab].txt", ""},
        {"globs=[a, b", "--set: key 'globs': '[a, b' is not a list of paths"},
        {"globs=a]", "--set: key 'globs': 'a]' is not a list of paths"},
        {"rate", "--set: 'rate' is not key=value, as in train.steps=300"},
        {"rate=7", "--set: key 'rate': 7 is out of range, allowed more than 0 to less than 1"},
        {"paint.colr=red", "--set: key 'paint.colr': unknown; did you mean 'paint.color'?"},
        {"betas=0.1", "--set: key 'betas': has 1 of at least 2 elements"},
        {"paint=red",
         "--set: key 'paint': is a section, expected keys under it: color, coats"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct thing t;
        struct conf c;
        conf_init(&c, &thing_table, &t);
        conf_read_text(&c, "t.yaml", "/base", "name: x\nrate: 0.1", 17);
        conf_set(&c, rows[i].text);
        char *said = problems_text(&c.problems);
        assert_string_equal(said, rows[i].said);
        if (i == 0)
            assert_true(t.rate == 0.25);
        if (i == 1)
            assert_string_equal(t.globs[0], "/base/a");
        if (i == 2)
            assert_string_equal(t.color, "off");
        if (i == 3)
            assert_string_equal(t.name, "a=b");
        free(said);
        conf_fini(&c);
        fields_fini(&thing_table, &t);
    }
}

static void files_are_read_and_named(void **state)
{
    (void)state;
    char dir[] = "/tmp/test_conf.XXXXXX";
    assert_non_null(mkdtemp(dir));
    char *file = xasprintf("%s/a.yaml", dir);
    FILE *out = fopen(file, "w");
    fprintf(out, "name: x\nfolder: sub\n");
    fclose(out);
    struct thing t;
    struct err err;
    assert_int_equal(conf_read(file, &thing_table, &t, &err), 0);
    char *expected = xasprintf("%s/sub", dir);
    assert_string_equal(t.folder, expected);
    fields_fini(&thing_table, &t);
    free(expected);

    assert_int_equal(conf_read(dir, &thing_table, &t, &err), -EINVAL);
    expected = xasprintf("%s: Is a directory", dir);
    assert_string_equal(err.text, expected);
    free(expected);
    unlink(file);
    assert_int_equal(conf_read(file, &thing_table, &t, &err), -EINVAL);
    assert_non_null(strstr(err.text, "a.yaml: No such file or directory"));
    rmdir(dir);
    free(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_problem_is_one_line),
        cmocka_unit_test(large_and_binary_files_are_refused_at_once),
        cmocka_unit_test(deep_sections_under_an_unknown_key_are_skipped),
        cmocka_unit_test(values_arrive),
        cmocka_unit_test(defaults_are_the_tables),
        cmocka_unit_test(assignments_go_through_the_same_table),
        cmocka_unit_test(files_are_read_and_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
