/* main.c - ballast-coordinator: the command line and the configuration file */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/conf.h"
#include "common/keyring.h"
#include "common/link.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/stdio.h"
#include "common/usage.h"
#include "common/versions.h"
#include "coordinator/auth.h"
#include "coordinator/http.h"
#include "coordinator/server.h"
#include "coordinator/store.h"

#define PROGRAM "ballast-coordinator"

static const char usage[] =
    "usage: " PROGRAM " --config FILE [--check-config]\n"
    "\n"
    "Takes jobs from `ballast`, gives them to workers, and keeps the record of both.\n"
    "\n"
    "  -c, --config FILE   the configuration, in YAML\n"
    "      --check-config  say whether FILE is right, and stop\n"
    "      --print-config  write every key of FILE with its value or default, and stop\n"
    "      --help-config   what every key means\n"
    "      --version       versions of this program and its libraries\n"
    "  -h, --help          this text\n"
    "\n"
    "A configuration needs two keys:\n"
    "\n"
    "  listen: [ipc:///run/ballast/coordinator.sock]\n"
    "  state_dir: /var/lib/ballast\n"
    "\n"
    "examples:\n"
    "  " PROGRAM " --config coordinator.yaml\n"
    "  " PROGRAM " --config coordinator.yaml --check-config\n"
    "  kill -HUP $(cat STATE_DIR/lock)    # read log_level and authorized_keys again\n"
    "  kill -USR1 $(cat STATE_DIR/lock)   # write the present state to the log\n";

static int check_token(const struct server_config *c, struct err *err)
{
    char token[TOKEN_BYTES_MAX + 1];
    int rc = 0;
    if (*c->http_token && !*c->http_listen)
        rc = err_set(err, -EINVAL, "goes with http.listen");
    else if (*c->http_token)
        rc = token_read(c->http_token, token, err);
    explicit_bzero(token, sizeof token);
    return rc;
}

static int check_http(const struct server_config *c, const char *file, struct err *err)
{
    if (*c->http_listen && http_address_check(c->http_listen, *c->http_token, err) < 0)
        return err_prefix(err, "%s: key 'http.listen'", file);
    return check_token(c, err) < 0 ? err_prefix(err, "%s: key 'http.token'", file) : 0;
}

static int read_config(const char *file, struct server_config *out, struct err *err)
{
    int rc = conf_read(file, &server_config_table, out, err);
    if (rc < 0)
        return rc;
    struct auth auth;
    for (size_t i = 0; i < out->n_listen && rc == 0; i++)
        if ((rc = link_address_check(out->listen[i], *out->key_file, err)) < 0)
            err_prefix(err, "%s: key 'listen'", file);
    if (rc == 0)
        rc = check_http(out, file, err);
    if (rc == 0 && (rc = auth_open(out->key_file, out->authorized_keys, &auth, err)) == 0)
        auth_fini(&auth);
    if (rc < 0)
        fields_fini(&server_config_table, out);
    return rc;
}

/* On SIGHUP: what can change without a restart. */
static void reload(void *file)
{
    struct server_config config;
    struct err err = {0};
    if (read_config(file, &config, &err) < 0) {
        log_warn("msg=\"configuration not read again: %s\"", err.text);
        return;
    }
    log_init(PROGRAM, (enum log_level)config.log_level);
    log_info("msg=\"log_level read again\"");
    fields_fini(&server_config_table, &config);
}

struct options {
    char *file;
    bool only_check, only_print;
};

/* Returns an exit code where it ends with them, else -1. */
static int parse_options(int argc, char **argv, struct options *o)
{
    enum { CHECK = 256, PRINT, EXPLAIN, VERSION };
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'}, {"check-config", no_argument, NULL, CHECK},
        {"print-config", no_argument, NULL, PRINT}, {"help-config", no_argument, NULL, EXPLAIN},
        {"version", no_argument, NULL, VERSION},
        {"help", no_argument, NULL, 'h'}, {0},
    };
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, "c:h", options, NULL)) != -1;)
        switch (option) {
        case 'c': o->file = optarg; break;
        case CHECK: o->only_check = true; break;
        case PRINT: o->only_print = true; break;
        case EXPLAIN:
            fields_print_markdown(&server_config_table, stdout);
            return EXIT_SUCCESS;
        case VERSION:
            version_print(PROGRAM);
            return EXIT_SUCCESS;
        case 'h':
            fputs(usage, stdout);
            return EXIT_SUCCESS;
        default:
            return usage_error(PROGRAM, "'%s' is unknown, or lacks its value", argv[optind - 1]);
        }
    if (optind < argc)
        return usage_error(PROGRAM, "'%s' is no option", argv[optind]);
    if (!o->file)
        return usage_error(PROGRAM, "--config FILE is missing");
    return -1;
}

int main(int argc, char **argv)
{
    struct options o = {0};
    struct server_config config;
    struct err err = {0};
    stdio_hold_places();
    mem_keep_freed(); /* the planner thinks of layer after layer */
    int rc = parse_options(argc, argv, &o);
    if (rc >= 0)
        return rc;
    log_init(PROGRAM, LOG_INFO);
    if (read_config(o.file, &config, &err) < 0) {
        fprintf(stderr, PROGRAM ": %s\n", err.text);
        return EXIT_USAGE;
    }
    if (o.only_check) {
        printf("%s is in order: listens on %s%s\n", o.file, config.listen[0],
               config.n_listen > 1 ? " and more" : "");
        rc = 0;
    } else if (o.only_print) {
        fields_print_yaml(&server_config_table, &config, stdout);
        rc = 0;
    } else {
        log_init(PROGRAM, (enum log_level)config.log_level);
        rc = server_run(&config, reload, o.file, &err);
    }
    if (rc < 0)
        fprintf(stderr, PROGRAM ": %s\n", err.text);
    fields_fini(&server_config_table, &config);
    return rc < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
