/* bench_main.c - the command `ballast-worker bench` */
#include "worker/bench.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "common/field_text.h"
#include "common/file.h"
#include "common/usage.h"

#define PROGRAM     "ballast-worker bench"
#define THREADS_MAX 9999u

static const char usage[] =
    "usage: ballast-worker bench [--op NAME] [--device cpu|cuda:N] [--threads N] [--json]\n"
    "       ballast-worker bench --cluster [--ranks N] [--threads N] [--device cpu|cuda]\n"
    "           [--out FILE]\n"
    "\n"
    "Times every op of a device beside the floor that the machine sets. With --cluster it\n"
    "measures this machine for ballast adapt --cluster FILE: products, memory, links, calls.\n"
    "\n"
    "  --op NAME    only this op\n"
    "  --device D   cpu or cuda:N, with --cluster cpu or cuda, a GPU for each rank; default: cpu\n"
    "  --threads N  of a rank; default: 0, all cores\n"
    "  --json       an object a line\n"
    "  --ranks N    processes that measure at once; default: 1\n"
    "  --out FILE   writes there; default: stdout\n"
    "\n"
    "Examples\n"
    "  ballast-worker bench --op rms_norm --json\n"
    "  ballast-worker bench --cluster --ranks 2 --threads 1 --out cluster.yaml\n";

struct options {
    struct bench_options bench;
    const char *path; /* NULL: stdout */
    bool is_cluster;
};

/* Returns an exit code where it ends with them, else -1. */
static int parse_options(int argc, char **argv, struct options *o)
{
    static const struct option options[] = {
        {"op", required_argument, NULL, 'o'},      {"device", required_argument, NULL, 'd'},
        {"threads", required_argument, NULL, 't'}, {"json", no_argument, NULL, 'j'},
        {"cluster", no_argument, NULL, 'c'},       {"ranks", required_argument, NULL, 'r'},
        {"out", required_argument, NULL, 'f'},     {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    uint64_t n;
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, "h", options, NULL)) != -1;)
        switch (option) {
        case 'o': o->bench.op = optarg; break;
        case 'd': o->bench.device = optarg; break;
        case 'j': o->bench.json = true; break;
        case 'c': o->is_cluster = true; break;
        case 'f': o->path = optarg; break;
        case 't':
            if (!text_count(optarg, 0, THREADS_MAX, &n))
                return usage_error(PROGRAM, "--threads takes a whole number up to %u", THREADS_MAX);
            o->bench.n_threads = (uint32_t)n;
            break;
        case 'r':
            if (!text_count(optarg, 1, RANKS_HERE_MAX, &n))
                return usage_error(PROGRAM, "--ranks takes a whole number from 1 to %u",
                                   RANKS_HERE_MAX);
            o->bench.n_ranks = (uint32_t)n;
            break;
        case 'h':
            fputs(usage, stdout);
            return EXIT_SUCCESS;
        default:
            return usage_error(PROGRAM, "'%s' is unknown, or lacks its value", argv[optind - 1]);
        }
    if (optind < argc)
        return usage_error(PROGRAM, "'%s' is no option", argv[optind]);
    if (!o->is_cluster && (o->bench.n_ranks > 1 || o->path))
        return usage_error(PROGRAM, "--ranks and --out go with --cluster");
    return -1;
}

/* A file is whole or not there. */
static int measure_cluster(const struct bench_options *o, const char *path, struct err *err)
{
    FILE *f = path ? file_create(path, err) : stdout;
    if (!f)
        return err->code;
    int rc = bench_cluster(o, f, err);
    if (path && fclose(f) != 0 && rc == 0)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    if (path && rc < 0)
        remove(path);
    return rc;
}

int bench_main(int argc, char **argv)
{
    struct options o = {.bench.n_ranks = 1};
    struct err err = {0};
    int code = parse_options(argc, argv, &o);
    if (code >= 0)
        return code;
    if ((o.is_cluster ? measure_cluster(&o.bench, o.path, &err)
                      : bench_run(&o.bench, stdout, &err)) == 0)
        return EXIT_SUCCESS;
    fprintf(stderr, PROGRAM ": %s\n", err.text);
    return EXIT_FAILURE;
}
