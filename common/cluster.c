/* cluster.c - the keys of a cluster.yaml */
#include "common/cluster.h"

#define AT(member) .offset = offsetof(struct cluster, member)

static const struct field fields[] = {
    {"name", FIELD_STRING, AT(name), .preset = "h200", .max = NAME_BYTES_MAX,
     .help = "how the report calls it"},
    {"nodes", FIELD_U32, AT(nodes), .preset = "16", .min = 1, .max = RANKS_MAX,
     .help = "machines"},
    {"gpus_per_node", FIELD_U32, AT(gpus_per_node), .preset = "8", .min = 1, .max = 1024,
     .help = "of each machine, one worker each"},
    {"gpu_memory", FIELD_SIZE, AT(gpu_memory), .preset = "141GB", .min = 1 << 20, .max = 0x1p50,
     .help = "of one GPU"},
    {"gpu_reserve", FIELD_SIZE, AT(gpu_reserve), .preset = "4GB", .max = 0x1p50,
     .help = "of it that the runtime, the network library and fragments take"},
    {"host_memory", FIELD_SIZE, AT(host_memory), .preset = "2TB", .max = 0x1p53,
     .help = "of one machine, for what is offloaded to it"},
    {"peak_tflops", FIELD_DOUBLE, AT(peak_tflops), .preset = "989", .max = 1e6, .min_open = true,
     .help = "of bf16 by the data sheet; utilisation is measured against it"},
    {"product_tflops", FIELD_DOUBLE, AT(product_tflops), .preset = "804", .max = 1e6,
     .min_open = true, .help = "measured, of large bf16 products"},
    {"memory_tb_per_s", FIELD_DOUBLE, AT(memory_tb_per_s), .preset = "4.27", .max = 1e4,
     .min_open = true, .help = "measured, bytes read and written"},
    {"node_gb_per_s", FIELD_DOUBLE, AT(node_gb_per_s), .preset = "360", .max = 1e5,
     .min_open = true, .help = "of one GPU to those of its node, one way"},
    {"network_gb_per_s", FIELD_DOUBLE, AT(network_gb_per_s), .preset = "45", .max = 1e5,
     .min_open = true, .help = "of one GPU to other nodes, one way"},
    {"latency_us", FIELD_DOUBLE, AT(latency_us), .preset = "20", .max = 1e6,
     .help = "of one collective between nodes"},
};

const struct field_table cluster_table = {fields, sizeof fields / sizeof *fields};
