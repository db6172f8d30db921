/* cluster.c - the keys of a cluster.yaml */
#include "common/cluster.h"

#include <math.h>

#define SCAN_CHUNK    64.0  /* tokens */
#define SCAN_TILE     32.0  /* channels */
#define SCAN_CHANNEL  184.0 /* what is no product, for a channel */
#define SCAN_TRIANGLE 4.0   /* a chunk's, beside a product of its size */

#define AT(member) .offset = offsetof(struct cluster, member)
#define RATE(is, most) .preset = is, .max = most, .min_open = true

static const char *const devices[] = {"cuda", "cpu", NULL};

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
    {"device", FIELD_WORD, AT(device), .preset = "cuda", .words = devices,
     .help = "what a worker computes on; the cpu computes in f32"},
    {"peak_tflops", FIELD_DOUBLE, AT(peak_tflops), RATE("989", 1e6),
     .help = "of bf16 by the data sheet; utilisation is measured against it"},
    {"product_tflops", FIELD_DOUBLE, AT(product_tflops), RATE("700", 1e6),
     .help = "products of many rows and wide matrices; on a cpu in f32"},
    {"product_f32_tflops", FIELD_DOUBLE, AT(product_f32_tflops), RATE("56", 1e6),
     .help = "the same in f32"},
    {"grouped_tflops", FIELD_DOUBLE, AT(grouped_tflops), RATE("724", 1e6),
     .help = "products of experts, with many rows each and wide matrices"},
    {"half_width", FIELD_DOUBLE, AT(half_width), .preset = "460", .max = 1e6,
     .help = "sides of a matrix, their geometric mean, at which a product runs at half its rate"},
    {"half_rows", FIELD_DOUBLE, AT(half_rows), .preset = "100", .max = 1e6,
     .help = "rows at which it does"},
    {"attention_tflops", FIELD_DOUBLE, AT(attention_tflops), RATE("428", 1e6),
     .help = "attention over a sequence, forward"},
    {"attention_back_tflops", FIELD_DOUBLE, AT(attention_back_tflops), RATE("266", 1e6),
     .help = "backward"},
    {"scan_ns", FIELD_DOUBLE, AT(scan_ns), RATE("2.8", 1e9),
     .help = "a recurrence's token and head of 128 x 128, forward"},
    {"scan_back_ns", FIELD_DOUBLE, AT(scan_back_ns), RATE("6.8", 1e9), .help = "backward"},
    {"pointwise_tb_per_s", FIELD_DOUBLE, AT(pointwise_tb_per_s), RATE("3.4", 1e4),
     .help = "operators between products, bytes read and written"},
    {"optimizer_tb_per_s", FIELD_DOUBLE, AT(optimizer_tb_per_s), RATE("4.03", 1e4),
     .help = "the optimizer, bytes read and written"},
    {"launch_us", FIELD_DOUBLE, AT(launch_us), .preset = "4", .max = 1e6,
     .help = "of an operator, however small it is"},
    {"node_gb_per_s", FIELD_DOUBLE, AT(node_gb_per_s), RATE("305", 1e5),
     .help = "of one GPU to those of its node, one way"},
    {"call_us", FIELD_DOUBLE, AT(call_us), .preset = "100", .max = 1e6,
     .help = "of one collective inside a node, however small it is"},
    {"network_gb_per_s", FIELD_DOUBLE, AT(network_gb_per_s), RATE("45", 1e5),
     .help = "of one GPU to other nodes, one way"},
    {"latency_us", FIELD_DOUBLE, AT(latency_us), .preset = "20", .max = 1e6,
     .help = "that a collective between nodes takes more"},
    {"host_gb_per_s", FIELD_DOUBLE, AT(host_gb_per_s), RATE("40", 1e5),
     .help = "of one GPU to its host's memory"},
};

const struct field_table cluster_table = {fields, sizeof fields / sizeof *fields};

double cluster_scan_work(double key_dim, double value_dim)
{
    double k = SCAN_TILE * ceil(key_dim / SCAN_TILE), v = SCAN_TILE * ceil(value_dim / SCAN_TILE);
    return 6 * k * v + (1.5 * SCAN_CHUNK + SCAN_CHANNEL) * (k + v) +
           SCAN_TRIANGLE * SCAN_CHUNK * SCAN_CHUNK;
}
