/* test_trace.c - a trace file is one that a strict reader takes, whatever goes on beside what */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/json.h"
#include "common/mem.h"
#include "tests/folder.h"
#include "worker/phases.h"
#include "worker/trace.h"

/* An instant of our time: as a double of microseconds it has a quarter of one to spare. */
#define NOW_NS INT64_C(1793416509123456789)

static const struct row {
    const char *shows;
    struct span spans[4]; /* begin_ns since NOW_NS; as they end */
    uint64_t    lines[4]; /* that they stand on */
} rows[] = {
    {"one within another, a nanosecond from its ends",
     {{PHASE_GATHER, 1, 1, 999}, {PHASE_KDA, 1, 0, 1001}, {PHASE_KDA, 2, 1001, 5},
      {PHASE_OTHER, -1, 0, 1007}}, {0, 0, 0, 0}},
    {"what goes on beside, one after another",
     {{PHASE_GATHER_HIDDEN, 1, 0, 1000}, {PHASE_GATHER_HIDDEN, 2, 1000, 1000},
      {PHASE_REDUCE_HIDDEN, 2, 2001, 1000}, {PHASE_KDA, 2, 0, 9000}}, {1, 1, 1, 0}},
    {"and at once",
     {{PHASE_GATHER_HIDDEN, 1, 0, 1000}, {PHASE_DISPATCH_HIDDEN, 1, 600, 1000},
      {PHASE_REDUCE_HIDDEN, 1, 300, 2000}, {PHASE_GATHER_HIDDEN, 2, 1600, 2000}}, {1, 2, 3, 1}},
};

static double number(const struct json *event, const char *key)
{
    double x = -1;
    assert_true(json_as_double(json_get(event, key), &x));
    return x;
}

static void check(const struct row *row, int64_t now_ns, const struct json *events)
{
    size_t n = 0;
    for (size_t i = 0; i < json_count(events); i++) {
        const struct json *e = json_at(events, i);
        if (strcmp(json_as_string(json_get(e, "ph")), "M") == 0)
            continue;
        const struct span *s = &row->spans[n];
        int64_t begin_ns = now_ns + s->begin_ns, end_ns = begin_ns + s->duration_ns;
        double ts = number(e, "ts"), dur = number(e, "dur");
        assert_int_equal(number(e, "tid"), row->lines[n]);
        assert_string_equal(json_as_string(json_get(e, "name")), phase_names[s->kind]);
        assert_true(ts == (double)(begin_ns / 250) / 4);
        assert_true(ts + dur == (double)(end_ns / 250) / 4); /* no bit is lost */
        n++;
    }
    assert_int_equal(n, 4);
}

static void trace_row(const struct row *row, uint32_t rank, int64_t now_ns)
{
    struct trace *t = trace_create(folder, rank, "here", 7, 1);
    char *path = xasprintf("%s/rank-%u.json", folder, rank);
    struct json *events;
    struct err err = {0};
    assert_false(trace_begins(t, 6));
    assert_true(trace_begins(t, 7));
    for (int k = 0; k < 4; k++) {
        struct span s = row->spans[k];
        s.begin_ns += now_ns;
        trace_span(t, &s);
    }
    assert_false(trace_begins(t, 8));
    trace_destroy(t);
    if (json_read_file(path, 1 << 20, &events, &err) < 0)
        fail_msg("%s: %s", row->shows, err.text);
    check(row, now_ns, events);
    json_destroy(events);
    free(path);
}

static void events_of_a_line_never_overlap(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int64_t k = 0; k < 100; k++)
            trace_row(&rows[i], i, NOW_NS + 2503 * k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_of_a_line_never_overlap),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
