/* bench_load.c - what expert load of 92 layers x 896 experts costs each second: time and bytes
 *
 * Seconds are simulated; the time is what this machine spends on them. Usage: bench_load [SECONDS
 * [NODES]]. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "coordinator/store_load.h"
#include "proto/check.h"

enum { LAYERS = 92, EXPERTS = 896, MEAN_TOKENS = 9400 };

struct report {
    Ballast__LayerLoad layers[LAYERS], *pointers[LAYERS];
    Ballast__LoadReport message;
};

static double cpu_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double unit(unsigned *seed)
{
    return ((double)rand_r(seed) + 1) / ((double)RAND_MAX + 2);
}

/* Log-normal, so that some experts are hot. */
static void fill(struct report *r, uint64_t step, uint32_t n_nodes, unsigned *seed)
{
    r->message.first_step = r->message.last_step = step;
    for (size_t l = 0; l < LAYERS; l++)
        for (size_t i = 0; i < n_nodes * EXPERTS; i++) {
            double z = sqrt(-2 * log(unit(seed))) * cos(6.283185307 * unit(seed));
            r->layers[l].tokens[i] = (uint32_t)(MEAN_TOKENS / n_nodes * exp(0.6 * z - 0.18));
        }
}

static void make(struct report *r, uint32_t n_nodes)
{
    ballast__load_report__init(&r->message);
    r->message.job_id = r->message.attempt = 1;
    r->message.n_nodes = n_nodes;
    r->message.n_experts = EXPERTS;
    r->message.layers = r->pointers;
    r->message.n_layers = LAYERS;
    for (uint32_t l = 0; l < LAYERS; l++) {
        ballast__layer_load__init(&r->layers[l]);
        r->layers[l].layer = l + 1;
        r->layers[l].n_tokens = n_nodes * EXPERTS;
        r->layers[l].tokens = xcalloc(r->layers[l].n_tokens, sizeof(uint32_t));
        r->pointers[l] = &r->layers[l];
    }
}

static void must(int rc, const struct err *err)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s\n", err->text);
    exit(1);
}

/* Bytes of the counts of one window of that level, mean. */
static double bytes_of_level(sqlite3 *db, int level)
{
    sqlite3_stmt *s;
    struct err err = {0};
    must(db_prepare(db, "SELECT sum(length(c.tokens)) * 1.0 / count(DISTINCT w.id) FROM "
                    "load_windows w JOIN load_counts c ON c.key / 1024 = w.id WHERE w.level = ?1",
                    &s, &err), &err);
    sqlite3_bind_int(s, 1, level);
    double bytes = db_next(s, &err) > 0 ? sqlite3_column_double(s, 0) : 0;
    sqlite3_finalize(s);
    return bytes;
}

struct costs {
    double check_s, store_s, tend_s, tend_most_s;
    size_t wire_bytes;
};

static void one_second(struct store_tables *t, struct report *r, int64_t now_ns, bool tends,
                       struct costs *c)
{
    struct arena arena = {0}, received = {0};
    struct wire_bytes frames[WIRE_FRAMES];
    Ballast__Envelope e = BALLAST__ENVELOPE__INIT;
    struct checked_message m;
    Ballast__Status status;
    struct err err = {0};
    bool more = true, any;
    e.kind = BALLAST__KIND__KIND_NOTICE;
    e.method = BALLAST__METHOD__METHOD_LOAD;
    wire_pack(&e, &r->message.base, &arena, frames);
    c->wire_bytes = frames[1].n_bytes;

    double from_s = cpu_s();
    if (check_message(frames, WIRE_FRAMES, CHECK_WORKER, &received, &m, &status) < 0)
        exit(1);
    c->check_s += cpu_s() - from_s;
    from_s = cpu_s();
    struct turn_load load = {1, (const Ballast__LoadReport *)m.payload};
    must(db_run(tables_statement(t, S_STATS_BEGIN), &err), &err);
    must(load_write(t, &load, now_ns, &err), &err);
    must(db_run(tables_statement(t, S_STATS_COMMIT), &err), &err);
    c->store_s += cpu_s() - from_s;
    from_s = cpu_s();
    while (tends && more)
        must(load_tend(t, now_ns, &more, &any, &err), &err);
    double tend_s = cpu_s() - from_s;
    c->tend_s += tend_s;
    c->tend_most_s = tend_s > c->tend_most_s ? tend_s : c->tend_most_s;
    arena_fini(&arena);
    arena_fini(&received);
}

int main(int argc, char **argv)
{
    int n_seconds = argc > 1 ? atoi(argv[1]) : 1500;
    uint32_t n_nodes = argc > 2 ? (uint32_t)atoi(argv[2]) : 1;
    char folder[] = "/tmp/bench_load.XXXXXX", path[64], command[64];
    struct store_tables t = {0};
    struct report r = {0};
    struct costs c = {0};
    struct err err = {0};
    struct stat st;
    unsigned seed = 1;
    if (!mkdtemp(folder))
        return 1;
    must(tables_open(&t, folder, &err), &err);
    make(&r, n_nodes);
    for (int i = 1; i <= n_seconds; i++) {
        if (i % 50 == 1) /* new numbers are dearer than all the rest */
            fill(&r, (uint64_t)i, n_nodes, &seed);
        r.message.first_step = r.message.last_step = (uint64_t)i;
        one_second(&t, &r, (int64_t)(3600000 + i) * (int64_t)NS_PER_S, i % 2 == 0, &c);
        if (i % 20 == 0)
            db_checkpoint(t.stats);
    }
    double raw = bytes_of_level(t.stats, LOAD_RAW), ten = bytes_of_level(t.stats, LOAD_10S);
    double minute = bytes_of_level(t.stats, LOAD_1M);
    double hour = 4.0 * LAYERS * EXPERTS; /* millions of tokens: four bytes */
    printf("a report of %d layers x %d experts x %u nodes: %.1f KB on the wire\n", LAYERS, EXPERTS,
           n_nodes, (double)c.wire_bytes / 1e3);
    printf("CPU a report: unpack and check %.2f ms, store %.2f ms, tidy %.2f ms (most at once "
           "%.1f ms): %.2f %% of a core at one a second\n", 1e3 * c.check_s / n_seconds,
           1e3 * c.store_s / n_seconds, 1e3 * c.tend_s / n_seconds, 1e3 * c.tend_most_s,
           100 * (c.check_s + c.store_s + c.tend_s) / n_seconds);
    printf("bytes of counts: report %.0f KB, 10 s %.0f KB, 1 min %.0f KB, 1 h %.0f KB\n", raw / 1e3,
           ten / 1e3, minute / 1e3, hour / 1e3);
    printf("kept: %.0f MB after 1 day, %.0f MB after 90 days; new for good each day %.1f MB; "
           "written each day %.1f GB\n", (600 * raw + 360 * ten + 1440 * minute + 24 * hour) / 1e6,
           (600 * raw + 360 * ten + 1440 * minute + 2160 * hour) / 1e6, 24 * hour / 1e6,
           (86400 * raw + 8640 * ten + 1440 * minute + 24 * hour) / 1e9);
    snprintf(path, sizeof path, "%s/stats.db", folder);
    if (stat(path, &st) == 0)
        printf("stats.db after %d s: %.0f MB\n", n_seconds, (double)st.st_size / 1e6);
    tables_close(&t);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}
