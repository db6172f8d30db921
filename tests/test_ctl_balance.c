/* test_ctl_balance.c - `ballast balance`: files in, plans out, every mistake with its line */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/json.h"
#include "common/mem.h"
#include "tests/folder.h"

static void write_file(const char *name, const char *text)
{
    char *path = xasprintf("%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    free(path);
}

/* Runs `ballast balance ARGS` in the folder; gives what it printed, stderr included. */
static char *run(const char *args, int *out_code)
{
    static char text[1 << 16];
    const char *bin = getenv("BALLAST_BIN");
    char *command = xasprintf("cd %s && '%s/ballast' balance %s 2>&1", folder, bin ? bin : "bin",
                              args);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    *out_code = WEXITSTATUS(pclose(f));
    free(command);
    return text;
}

static void mistakes_name_their_line(void **state)
{
    (void)state;
    static const struct {
        const char *what, *loads, *text;
    } rows[] = {
        { "not a number", "layer,expert,load\n0,0,1\n0,1,nan\n",
          "ballast: l.csv:3: load is 'nan': must be a number from 0 to 1000000000000000\n" },
        { "negative", "layer,expert,load\n0,0,-1\n",
          "ballast: l.csv:2: load is '-1': must be a number from 0 to 1000000000000000\n" },
        { "twice", "layer,expert,load\n0,0,1\n0,0,2\n",
          "ballast: l.csv:3: layer 0 expert 0 was there already, in line 2\n" },
        { "a gap", "layer,expert,load\n0,0,1\n0,2,2\n",
          "ballast: l.csv:2: layer 0: expert 1 is missing; every layer needs one load for each of "
          "the experts 0 to 2\n" },
        { "too large an id", "layer,expert,load\n0,99999,1\n",
          "ballast: l.csv:2: expert is '99999': must be a whole number from 0 to 8191\n" },
        { "no header", "layer,expert\n0,0\n",
          "ballast: l.csv:1: no column 'load'; the first line names the columns: layer, expert, "
          "load, window (optional)\n" },
        { "a strange column", "layer,expert,load,colour\n",
          "ballast: l.csv:1: column 'colour' is unknown; the first line names the columns: layer, "
          "expert, load, window (optional)\n" },
        { "a short line", "layer,expert,load\n0,0\n",
          "ballast: l.csv:2: 2 fields: the first line has 3\n" },
        { "nothing", "", "ballast: l.csv: the file is empty\n" },
        { "no rows", "layer,expert,load\n", "ballast: l.csv: no loads after the first line\n" },
        { "a window without a layer", "window,layer,expert,load\n0,0,0,1\n0,1,0,1\n1,0,0,1\n",
          "ballast: l.csv:4: window 1, layer 1: expert 0 is missing; every layer needs one load "
          "for each of the experts 0 to 0\n" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int code;
        write_file("l.csv", rows[i].loads);
        assert_string_equal(run("--loads l.csv --devices 2", &code), rows[i].text);
        assert_int_equal(code, 2);
    }
}

static struct json *run_json(const char *args)
{
    int code;
    struct err err;
    struct json *root;
    char *text = run(args, &code);
    assert_int_equal(code, 0);
    assert_int_equal(json_parse(text, strlen(text), 1 << 20, &root, &err), 0);
    return root;
}

static double number(const struct json *layer, const char *key)
{
    double x = -1;
    struct err err;
    assert_int_equal(json_get_double(layer, key, &x, &err), 0);
    return x;
}

static void a_known_load_is_balanced_and_stays(void **state)
{
    (void)state;
    write_file("l.csv", "expert,layer,load\r\n0,3,90\r\n1,3,30\r\n2,3,20\r\n3,3,20\r\n");
    struct json *root = run_json("--loads l.csv --devices 2 --json --placement-out p.csv");
    const struct json *layer = json_at(json_get(root, "layers"), 0);
    assert_true(number(layer, "layer") == 3 && number(layer, "mean") == 80);
    assert_true(number(layer, "max_over_mean") < 1.0001);
    assert_true(number(layer, "lower_bound") == 1);
    assert_int_equal(json_count(json_get(layer, "placement")), 2);
    assert_int_equal(json_count(json_at(json_get(layer, "shares"), 0)), 3);
    json_destroy(root);
    root = run_json("--loads l.csv --devices 2 --json --previous p.csv");
    assert_true(number(json_at(json_get(root, "layers"), 0), "moves") == 0);
    json_destroy(root);
}

static void degenerate_loads_are_planned(void **state)
{
    (void)state;
    write_file("l.csv", "layer,expert,load\n0,0,0\n0,1,0\n1,0,5\n1,1,0\n");
    struct json *root = run_json("--loads l.csv --devices 2 --json");
    assert_true(number(json_at(json_get(root, "layers"), 0), "max_over_mean") == 1);
    assert_true(number(json_at(json_get(root, "layers"), 1), "max_over_mean") < 1.0001);
    json_destroy(root);
}

static void a_history_is_scored_on_what_came(void **state)
{
    (void)state;
    write_file("l.csv", "window,layer,expert,load\n"
                        "5,0,0,900\n5,0,1,100\n5,0,2,100\n5,0,3,100\n"
                        "7,0,0,900\n7,0,1,100\n7,0,2,100\n7,0,3,100\n");
    struct json *root = run_json("--loads l.csv --devices 2 --json");
    const struct json *windows = json_get(root, "windows");
    assert_int_equal(json_count(windows), 2);
    const struct json *first = json_at(json_get(json_at(windows, 0), "layers"), 0);
    assert_true(number(json_at(windows, 0), "window") == 5);
    assert_true(number(first, "next_resplit") < 1.0001);
    assert_true(number(first, "next_fixed") >= number(first, "next_resplit") - 1e-9);
    json_destroy(root);
}

static void many_devices_take_bounded_work(void **state)
{
    (void)state;
    int code;
    write_file("few.csv", "layer,expert,load\n0,0,1\n0,1,30\n0,2,500\n0,3,7000\n");
    const char *text = run("--loads few.csv --devices 2048 --no-header", &code);
    assert_int_equal(code, 0);
    assert_non_null(strstr(text, "fresh: ")); /* and to what ratio */
    double ratio = 0;
    assert_int_equal(sscanf(text, "%*u %lf", &ratio), 1);
    assert_true(ratio >= 1 && ratio < 1.05);
    assert_non_null(strstr(run("--loads few.csv --devices 8193", &code),
                           "--devices must be 1 to 8192"));
    assert_int_equal(code, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mistakes_name_their_line),
        cmocka_unit_test(a_known_load_is_balanced_and_stays),
        cmocka_unit_test(degenerate_loads_are_planned),
        cmocka_unit_test(a_history_is_scored_on_what_came),
        cmocka_unit_test(many_devices_take_bounded_work),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
