/* main.c - ballast-worker: the daemon, its trainer, and what runs without daemons */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "common/field_text.h"
#include "common/log.h"
#include "common/stdio.h"
#include "common/usage.h"
#include "common/versions.h"
#include "worker/bench.h"
#include "worker/channel.h"
#include "worker/config.h"
#include "worker/control.h"
#include "worker/export.h"
#include "worker/simulate.h"
#include "worker/trainer.h"
#include "worker/validate.h"

#define PROGRAM         "ballast-worker"
#define STACK_BYTES_MIN (1u << 20)
#define SEED_MAX        9999u

static const char usage[] =
    "ballast-worker - runs the ranks of training jobs on one device\n"
    "\n"
    "  ballast-worker --config FILE [--device cpu|cuda:N] [--check-config]\n"
    "  ballast-worker --simulate N --config FILE [--simulate-loads FILE | --simulate-seed N]\n"
    "                 [--simulate-cluster FILE]\n"
    "  ballast-worker --version | --help | --help-config\n"
    "  ballast-worker validate MODEL_DIR --expect FIXTURE_DIR ...   see validate --help\n"
    "  ballast-worker export MODEL_DIR --lora ADAPTER_DIR --out DIR   merges an adapter\n"
    "  ballast-worker bench ...   times every op, or measures a cluster.yaml; see bench --help\n"
    "\n"
    "  --config FILE    what it is called, where its coordinator is, what jobs may read\n"
    "  --device DEVICE  instead of the file's device\n"
    "  --simulate N     offer N virtual workers to the coordinator: they take jobs, count steps,\n"
    "                   report loads of experts and carry out plans, and compute nothing: to try\n"
    "                   a cluster of any size\n"
    "  --simulate-loads FILE    their loads, as ballast balance --loads reads them; without it\n"
    "                           they are made up, by --simulate-seed N (1)\n"
    "  --simulate-cluster FILE  a cluster.yaml with the rates of links that moves take\n"
    "  --check-config   read the file, say what is wrong with it, start nothing\n"
    "  --help-config    every key of the file\n"
    "\n"
    "Examples\n"
    "  ballast-worker --config deploy/worker.yaml\n"
    "  ballast-worker --config /etc/ballast/worker.yaml --device cuda:1\n"
    "  ballast-worker --config worker.yaml --check-config\n"
    "\n"
    "SIGTERM stops its trainer (after a checkpoint, within a bound) and ends; another one, more\n"
    "than a second later, ends at once. SIGUSR1 writes its state to the log.\n";

/* Of threads, too: with less they would end by a fault in mid-step. */
static int check_stack(struct err *err)
{
    struct rlimit stack;
    if (getrlimit(RLIMIT_STACK, &stack) < 0 || stack.rlim_cur >= STACK_BYTES_MIN)
        return 0;
    return err_set(err, -ENOMEM, "%llu KiB of stack (ulimit -s) are too little for trainers, at "
                   "least %u are needed", (unsigned long long)(stack.rlim_cur >> 10),
                   STACK_BYTES_MIN >> 10);
}

static int run_daemon(const char *file, const char *device, bool is_check,
                      const struct simulate_options *simulate)
{
    struct worker_config config;
    struct err err = {0};
    if (worker_config_read(file, device, &config, &err) < 0) {
        fprintf(stderr, PROGRAM ": %s\n", err.text);
        return EXIT_USAGE;
    }
    int rc = 0;
    if (is_check) {
        printf("%s is in order: worker %s, device %s\n", file, config.name, config.device);
    } else {
        log_init(PROGRAM, (enum log_level)log_level_parse(config.log_level));
        if ((rc = check_stack(&err)) == 0)
            rc = simulate->n ? simulate_run(&config, simulate, &err) : control_run(&config, &err);
        if (rc < 0)
            log_error("msg=\"%s\"", err.text);
    }
    worker_config_fini(&config);
    return rc < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* The daemon starts it so; argv[2] is a label for people who look at ps. */
static int run_trainer(void)
{
    signal(SIGPIPE, SIG_IGN); /* the daemon's end is told by the channel */
    log_init("trainer", LOG_INFO);
    return trainer_main(CHANNEL_FD);
}

struct options {
    const char *file, *device;
    bool is_check;
    struct simulate_options simulate;
};

/* Returns an exit code where it ends with them, else -1. */
static int parse_options(int argc, char **argv, struct options *o)
{
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'},    {"device", required_argument, NULL, 'd'},
        {"check-config", no_argument, NULL, 'C'},    {"help", no_argument, NULL, 'h'},
        {"help-config", no_argument, NULL, 'H'},     {"version", no_argument, NULL, 'V'},
        {"simulate", required_argument, NULL, 'S'},
        {"simulate-loads", required_argument, NULL, 'L'},
        {"simulate-seed", required_argument, NULL, 'E'},
        {"simulate-cluster", required_argument, NULL, 'K'},
        {NULL, 0, NULL, 0},
    };
    bool has_seed = false;
    uint64_t n;
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, "hV", options, NULL)) != -1;)
        switch (option) {
        case 'c': o->file = optarg; break;
        case 'd': o->device = optarg; break;
        case 'C': o->is_check = true; break;
        case 'L': o->simulate.loads_file = optarg; break;
        case 'K': o->simulate.cluster_file = optarg; break;
        case 'S':
            if (!text_count(optarg, 1, SIMULATED_MAX, &n))
                return usage_error(PROGRAM, "--simulate takes a whole number from 1 to %u",
                                   SIMULATED_MAX);
            o->simulate.n = (uint32_t)n;
            break;
        case 'E':
            if (!text_count(optarg, 0, SEED_MAX, &o->simulate.seed))
                return usage_error(PROGRAM, "--simulate-seed takes a whole number up to %u",
                                   SEED_MAX);
            has_seed = true;
            break;
        case 'h':
            fputs(usage, stdout);
            return EXIT_SUCCESS;
        case 'H':
            fields_print_markdown(&worker_config_table, stdout);
            return EXIT_SUCCESS;
        case 'V':
            version_print(PROGRAM);
            return EXIT_SUCCESS;
        default:
            return usage_error(PROGRAM, "'%s' is unknown, or lacks its value", argv[optind - 1]);
        }
    if (optind < argc)
        return usage_error(PROGRAM, "'%s' is no option", argv[optind]);
    if (!o->file)
        return usage_error(PROGRAM, "--config FILE is missing");
    if (!o->simulate.n && (o->simulate.loads_file || o->simulate.cluster_file || has_seed))
        return usage_error(PROGRAM, "--simulate-loads, -seed and -cluster go with --simulate N");
    return -1;
}

int main(int argc, char **argv)
{
    struct options o = {.simulate.seed = 1};
    stdio_hold_places();
    if (argc > 1 && !strcmp(argv[1], "--trainer"))
        return run_trainer();
    if (argc > 1 && !strcmp(argv[1], "validate"))
        return validate_main(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "export"))
        return export_main(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "bench"))
        return bench_main(argc - 1, argv + 1);
    int code = parse_options(argc, argv, &o);
    return code >= 0 ? code : run_daemon(o.file, o.device, o.is_check, &o.simulate);
}
