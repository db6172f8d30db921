/* cluster.h - the machines that a job is planned for: nodes, GPUs, memory, links
 *
 * Read from a cluster.yaml; every key has the value of a measured H200 where it is not said. Rates
 * are what programs reach, not what data sheets promise. */
#ifndef COMMON_CLUSTER_H
#define COMMON_CLUSTER_H

#include "common/field.h"

struct cluster {
    char    *name;
    uint32_t nodes, gpus_per_node;
    uint64_t gpu_memory, gpu_reserve; /* reserve: of the runtime, the network library, fragments */
    uint64_t host_memory;             /* of one machine, for what is offloaded */
    double   peak_tflops;             /* that utilisation is measured against */
    double   product_tflops;          /* bf16 products of large matrices */
    double   memory_tb_per_s;         /* read and written together */
    double   node_gb_per_s;           /* of one GPU to the others of its node, one way */
    double   network_gb_per_s;        /* of one GPU to other nodes, one way */
    double   latency_us;              /* of one collective */
};

extern const struct field_table cluster_table;

#endif
