/* peft.h - an adapter as the PEFT library stores it: a folder of two files
 *
 * adapter_config.json says rank, scale and what the adapter is; adapter_model.safetensors holds A
 * and B of every module. What our adapters are not (DoRA, biases, ranks that differ, ...) is
 * refused by its key. */
#ifndef WORKER_PEFT_H
#define WORKER_PEFT_H

#include "common/lora_map.h"

#define PEFT_CONFIG_FILE  "adapter_config.json"
#define PEFT_TENSORS_FILE "adapter_model.safetensors"

struct peft {
    uint32_t r;
    double   alpha, dropout;
    char   **targets; /* n_targets: of the modules that have tensors in the file, see lora_map.h */
    size_t   n_targets;
};

/* Reads the configuration and the names of the tensors. Gives *out, ended with peft_fini. */
int  peft_open(const char *folder, struct peft *out, struct err *err);
void peft_fini(struct peft *p);

/* -EINVAL where the file holds a copy of a matrix, as lora_is_copy says, that is not the one of the
 * model in base_folder. */
int  peft_check_copies(const char *folder, const char *base_folder, struct err *err);

/* What lora_map_add takes to make just these adapters; borrows p. */
struct lora_config peft_lora(const struct peft *p);

/* -EINVAL where the adapter is not what c trains, or was made with dropout, which is not done
 * here. Which modules it has is seen when its tensors are read. */
int peft_check(const struct peft *p, const char *folder, const struct lora_config *c,
               struct err *err);

/* Durably. base_path is the folder of the model, for who loads the adapter. */
int peft_write_config(const char *folder, const struct lora_config *c,
                      const struct tensor_map *map, const char *base_path, struct err *err);

#endif
