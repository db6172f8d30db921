/* cluster.h - the machines that a job is planned for: nodes, GPUs, memory, links
 *
 * Read from a cluster.yaml; every key has the value of a measured H200 where it is not said. Rates
 * are what this engine reaches, not what data sheets promise: ballast-worker bench --cluster
 * measures those of a machine. */
#ifndef COMMON_CLUSTER_H
#define COMMON_CLUSTER_H

#include <string.h>

#include "common/field.h"

struct cluster {
    char    *name;
    uint32_t nodes, gpus_per_node;
    /* bytes; reserve: of the runtime, the network library, fragments */
    uint64_t gpu_memory, gpu_reserve;
    uint64_t host_memory;             /* bytes of one machine, for what is offloaded */
    char    *device;                  /* "cuda" or "cpu" */
    double   peak_tflops;             /* that utilisation is measured against */
    /* Rates of products without bound on rows and widths. With r rows of a matrix whose sides'
     * geometric mean is w, 1 / ((1 + half_rows / r) (1 + half_width / w)) of that is reached. */
    double   product_tflops, product_f32_tflops, grouped_tflops, half_width, half_rows;
    double   attention_tflops, attention_back_tflops;
    double   scan_ns, scan_back_ns;   /* of a token and head of 128 x 128 */
    double   pointwise_tb_per_s, optimizer_tb_per_s; /* both ways together */
    double   launch_us;               /* of one operator */
    double   node_gb_per_s, call_us;  /* of one GPU to the others of its node, one way */
    double   network_gb_per_s, latency_us; /* to other nodes; latency beside call_us */
    double   host_gb_per_s;           /* to the memory of its host */
};

static inline bool cluster_is_cpu(const struct cluster *c)
{
    return strcmp(c->device, "cpu") == 0;
}

/* What a CPU does for a query and a key besides products, in numbers of a head, key and value
 * together, that would cost as much: the exponential, sums, the edges of tiles. A GPU's rates are
 * of heads as they are. */
#define CLUSTER_SOFTMAX_DIMS      128.0
#define CLUSTER_SOFTMAX_BACK_DIMS 64.0
#define CLUSTER_TIMED_DIMS        160.0 /* of the head that a CPU's rates are measured with */

/* Work of a recurrence for one token and head, in operations of its products: scan_ns is that of
 * 128 x 128. Besides products a channel's decays, exponentials and loads count, and the triangle of
 * a chunk, which is solved row by row; channels are taken 32 at a time. */
double cluster_scan_work(double key_dim, double value_dim);

extern const struct field_table cluster_table;

#endif
