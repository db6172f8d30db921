/* config.c - the keys of a worker's file, and the defaults that depend on the machine */
#include "worker/config.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/link.h"
#include "common/link_trust.h"
#include "common/mem.h"
#include "kernels/device.h"
#include "proto/check.h"
#include "worker/coll_wire.h"
#include "worker/machine.h"

#define AT(member) offsetof(struct worker_config, member)

static const char *const log_levels[] = {"error", "warn", "info", "debug", NULL};

static const char *const collectives[] = {"auto", "host", "nccl", NULL};

static const struct field fields[] = {
    {.path = "name", .type = FIELD_STRING, .offset = AT(name), .preset = "",
     .help = "unique in the cluster; empty: the host's name and the device, as in node1-cpu"},
    {.path = "node", .type = FIELD_STRING, .offset = AT(node), .preset = "",
     .help = "the machine it is on; empty: the host's name"},
    {.path = "coordinator", .type = FIELD_STRING, .offset = AT(coordinator),
     .help = "the coordinator's address, ipc://PATH or tcp://HOST:PORT"},
    {.path = "key", .type = FIELD_PATH, .offset = AT(key_file), .preset = "",
     .help = "file of this worker's key (`ballast keygen NAME --role worker`), for a coordinator "
     "that wants keys"},
    {.path = "coordinator_key", .type = FIELD_PATH, .offset = AT(coordinator_key), .preset = "",
     .help = "the coordinator's .pub; two lines while its key changes"},
    {.path = "state_dir", .type = FIELD_PATH, .offset = AT(state_dir),
     .help = "a folder of this worker's own: output of its trainers; made, with those above it, if "
     "missing"},
    {.path = "allowed_roots", .type = FIELD_PATHS, .offset = AT(allowed_roots),
     .count_offset = AT(n_allowed_roots), .n_min = 1, .n_max = 64,
     .help = "the model, data and checkpoint of a job must lie under one of these folders"},
    {.path = "device", .type = FIELD_STRING, .offset = AT(device), .preset = "cpu",
     .help = "cpu or cuda:N"},
    {.path = "collectives", .type = FIELD_WORD, .offset = AT(collectives), .preset = "auto",
     .words = collectives, .help = "how tensors of a job travel; auto: through NCCL where every "
     "rank has a GPU of its own, else through host memory"},
    {.path = "data_address", .type = FIELD_STRING, .offset = AT(data_address),
     .preset = "tcp://127.0.0.1:*", .help = "where a trainer listens for ranks on other machines, "
     "tcp://IP:* or tcp://IP:PORT, with a number of this machine that they can reach"},
    {.path = "memory_domain", .type = FIELD_STRING, .offset = AT(memory_domain), .preset = "",
     .help = "ranks on one machine share memory where this is the same; others go through the "
     "network, as if they were on another machine"},
    {.path = "cores", .type = FIELD_U32, .offset = AT(cores), .preset = "auto", .min = 0,
     .max = 4096, .zero = "auto",
     .help = "threads of a trainer; auto: the machine's cores over the job's ranks on this node"},
    {.path = "log_level", .type = FIELD_WORD, .offset = AT(log_level), .preset = "info",
     .words = log_levels, .help = "what the daemon writes to stderr"},
};

const struct field_table worker_config_table = {fields, sizeof fields / sizeof *fields};

/* Anything of a host's or device's name that no worker's name may hold becomes a dash. Takes and
 * gives the text. */
static char *name_of(char *text)
{
    for (char *p = text; *p; p++)
        if (!isalnum((unsigned char)*p) && *p != '.' && *p != '_')
            *p = '-';
    return text;
}

static void fill_defaults(struct worker_config *c)
{
    char host[256] = "localhost";
    gethostname(host, sizeof host - 1);
    if (!*c->node) {
        free(c->node);
        c->node = name_of(xasprintf("%.*s", NAME_BYTES_MAX, host));
    }
    if (!*c->name) {
        free(c->name);
        c->name = name_of(xasprintf("%.50s-%s", c->node, c->device));
    }
}

int worker_config_read(const char *file, const char *device, struct worker_config *out_config,
                       struct err *err)
{
    struct worker_config c;
    int rc = conf_read(file, &worker_config_table, &c, err);
    if (rc < 0)
        return rc;
    c.machine = NULL;
    if (device) {
        free(c.device);
        c.device = xstrdup(device);
    }
    fill_defaults(&c);
    if ((rc = device_check(c.device, err)) < 0)
        goto fail;
    if (!check_is_name(c.name) || !check_is_name(c.node)) {
        rc = err_set(err, -EINVAL, "%s: name '%s' and node '%s' must be 1 to %d letters, digits, "
                     "'.', '_' or '-'", file, c.name, c.node, NAME_BYTES_MAX);
        goto fail;
    }
    if ((rc = link_address_check(c.coordinator, *c.key_file, err)) < 0) {
        err_prefix(err, "%s: key 'coordinator'", file);
        goto fail;
    }
    struct link_trust trust;
    if ((rc = link_trust_open(c.key_file, c.coordinator_key, &trust, err)) < 0)
        goto fail;
    link_trust_close(&trust);
    if (*c.memory_domain && !check_is_name(c.memory_domain)) {
        rc = err_set(err, -EINVAL, "%s: key 'memory_domain': '%.70s' must be letters, digits, '.', "
                     "'_' or '-'", file, c.memory_domain);
        goto fail;
    }
    if ((rc = wire_address_check(c.data_address, err)) < 0) {
        err_prefix(err, "%s: key 'data_address'", file);
        goto fail;
    }
    c.machine = machine_name(c.memory_domain);
    *out_config = c;
    return 0;
fail:
    worker_config_fini(&c);
    return rc;
}

void worker_config_fini(struct worker_config *config)
{
    free(config->machine);
    fields_fini(&worker_config_table, config);
}
