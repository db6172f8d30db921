/* config.h - a worker's configuration file */
#ifndef WORKER_CONFIG_H
#define WORKER_CONFIG_H

#include "common/conf.h"

extern const struct field_table worker_config_table;

struct worker_config {
    char  *name; /* on the cluster; by default the host's name and the device */
    char  *node; /* ranks of one node exchange tensors through its memory */
    char  *coordinator;
    char  *state_dir;
    char **allowed_roots;
    size_t n_allowed_roots;
    char  *device; /* cpu | cuda:N */
    char  *collectives; /* auto | host | nccl */
    char  *data_address;  /* where trainers listen for ranks on other machines */
    char  *memory_domain; /* of the file */
    char  *machine; /* found out: workers that share memory have the same */
    uint32_t cores; /* 0: the machine's, shared among a job's ranks on this node */
    char  *log_level;
    char  *key_file, *coordinator_key; /* "": none */
};

/* device, if not NULL, overrides the file's. Every member is filled on success; ended with
 * worker_config_fini. */
int  worker_config_read(const char *file, const char *device, struct worker_config *out_config,
                        struct err *err);
void worker_config_fini(struct worker_config *config);

#endif
