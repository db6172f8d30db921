/* bench_coll.c - collectives of the ranks of one machine, one line per operation and size
 *
 *   bench_coll [--pin] [--ms N] [--op NAME] [--bytes N] [RANKS [HOSTS]]
 *                                       through shared memory, 4 ranks unless said; or as if they
 *                                       were on several hosts, through the network's loopback
 *   bench_coll --gpus N [--registered] [host|nccl]
 *                                       every operation, a GPU for each rank, beside NCCL's plain
 *                                       calls; host: through host memory instead; registered: ours
 *                                       from memory that NCCL is told of
 *
 * Ranks are processes; --pin gives each a core of those the program may use. On the CPU the arrays
 * lie in memory that travels, as gradients do. Calls begin together, each takes as long as its
 * slowest rank, and no rank goes on before all have ended: one that does would keep another, with
 * which it shares a core, from seeing the end. A time is the median over as many calls as take
 * about N ms, 250 unless said, and cpu_ms is what a call takes of all cores. Peers are timed alike
 * by bench_coll_peers.py. On GPUs a time is the median over rounds of calls one after another,
 * ours and the plain ones in turns; results are checked first. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/version.h"
#include "tests/pin.h"
#include "worker/coll.h"
#include "worker/coll_choose.h"
#include "worker/coll_wire.h"
#if BALLAST_HAS_CUDA
#include "tests/nccl_plain.h"
#endif

#define CALLS_MAX 400
#define CALLS_MIN 5
#define RANKS_MAX_HERE 64

struct options {
    uint32_t world, n_hosts, budget_ms;
    const char *op; /* that alone, and of that size; NULL and 0: all */
    size_t n_bytes;
    bool on_gpus, is_pinned, registers; /* registers: parallel.register_buffers */
    enum coll_wish wish;
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, size_t n)
{
    qsort(x, n, sizeof *x, by_value);
    return x[n / 2];
}

static void must(int rc, const struct err *err)
{
    if (rc < 0) {
        fprintf(stderr, "bench_coll: %s\n", err->text);
        exit(1);
    }
}

/* ---- on the CPU ----------------------------------------------------------------------------- */

static const char *const cpu_names[] = {"all_reduce", "all_to_all", "all_gather",
                                        "reduce_scatter"};
enum cpu_op { CPU_ALL_REDUCE, CPU_ALL_TO_ALL, CPU_ALL_GATHER, CPU_REDUCE_SCATTER, N_CPU_OPS };

struct arrays {
    float *x, *y;
    const float *values; /* that x has before each call */
};

/* n floats are all that a rank sums, sends, ends with or begins with. */
static int cpu_call(struct coll *c, enum cpu_op op, const struct arrays *a, size_t n,
                    struct err *err)
{
    const struct coll_group *g = &c->world_group;
    size_t part = n / c->world;
    int64_t rows[RANKS_MAX_HERE];
    for (uint32_t i = 0; i < c->world; i++)
        rows[i] = 1;
    switch (op) {
    case CPU_ALL_REDUCE:
        return c->ops->all_reduce(c, g, COLL_SUM, ELEM_F32, a->x, n, err);
    case CPU_ALL_TO_ALL:
        return coll_all_to_all_rows(c, g, a->x, rows, a->y, rows, part * sizeof(float), err);
    case CPU_ALL_GATHER:
        return coll_all_gather(c, g, ELEM_F32, a->x, part, 1, a->y, err);
    default:
        return coll_reduce_scatter(c, g, ELEM_F32, a->x, part, 1, a->y, err);
    }
}

static double cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

/* Milliseconds, and those of this rank's core. */
static double time_cpu_call(struct coll *c, enum cpu_op op, const struct arrays *a, size_t n,
                            double *out_cpu_ms)
{
    struct err err = {0};
    memcpy(a->x, a->values, n * sizeof *a->x);
    must(c->ops->barrier(c, &c->world_group, &err), &err);
    double cpu_began = cpu_ms();
    uint64_t began = clock_now_ns();
    must(cpu_call(c, op, a, n, &err), &err);
    double ms = (double)(clock_now_ns() - began) / 1e6;
    *out_cpu_ms = cpu_ms() - cpu_began;
    must(c->ops->barrier(c, &c->world_group, &err), &err);
    return ms;
}

static void over_ranks(struct coll *c, enum coll_op op, double *x, size_t n)
{
    struct err err = {0};
    must(c->ops->all_reduce_f64(c, &c->world_group, op, x, n, &err), &err);
}

static void measure(struct coll *c, enum cpu_op op, const struct arrays *a, size_t n_bytes,
                    const struct options *o)
{
    double ms[CALLS_MAX], cpu[CALLS_MAX], ignored;
    size_t n = n_bytes / sizeof(float);
    time_cpu_call(c, op, a, n, &ignored);
    double first = time_cpu_call(c, op, a, n, &ignored);
    over_ranks(c, COLL_MAX, &first, 1);
    double wanted = o->budget_ms / first;
    size_t n_calls = wanted > CALLS_MAX ? CALLS_MAX : wanted < CALLS_MIN ? CALLS_MIN
                                                                        : (size_t)wanted;
    for (size_t k = 0; k < n_calls; k++)
        ms[k] = time_cpu_call(c, op, a, n, &cpu[k]);
    over_ranks(c, COLL_MAX, ms, n_calls);
    over_ranks(c, COLL_SUM, cpu, n_calls);
    double middle = median(ms, n_calls);
    if (c->rank == 0)
        printf("%s ranks=%u hosts=%u MB=%.3f median_ms=%.3f best_ms=%.3f cpu_ms=%.3f\n",
               cpu_names[op], c->world, o->n_hosts, (double)n_bytes / 1e6, middle, ms[0],
               median(cpu, n_calls));
    fflush(stdout);
}

static void bench_cpu(struct coll *c, const struct options *o)
{
    static const size_t sizes[] = {64,      64000,   500000,   1000000,
                                   2000000, 8000000, 32000000, 64000000};
    enum { N_SIZES = sizeof sizes / sizeof *sizes };
    size_t most = o->n_bytes > sizes[N_SIZES - 1] ? o->n_bytes : sizes[N_SIZES - 1];
    float *values = malloc(most);
    struct arrays a = {c->ops->alloc(c, most), c->ops->alloc(c, most), values};
    for (size_t i = 0; i < most / sizeof *values; i++)
        values[i] = (float)(i % 1000) * 1e-3f + (float)c->rank;
    for (enum cpu_op op = CPU_ALL_REDUCE; op < N_CPU_OPS; op++)
        for (size_t i = 0; i < (o->n_bytes ? 1 : N_SIZES); i++)
            if (!o->op || !strcmp(o->op, cpu_names[op]))
                measure(c, op, &a, o->n_bytes ? o->n_bytes : sizes[i], o);
    free(values);
}

/* What the ranks' processes tell each other before they can. */
struct board {
    _Atomic uint32_t n_told;
    uint32_t hosts[RANKS_MAX_HERE];
    char     addresses[RANKS_MAX_HERE][WIRE_ADDRESS_BYTES];
    uint8_t  keys[RANKS_MAX_HERE][WIRE_KEY_BYTES];
};

static void tell(struct board *b, uint32_t rank, uint32_t world, struct wire_peer *peers,
                 struct wire **out_wire)
{
    struct err err = {0};
    must(wire_open("tcp://127.0.0.1:*", out_wire, &err), &err);
    strcpy(b->addresses[rank], wire_address(*out_wire));
    memcpy(b->keys[rank], wire_key(*out_wire), WIRE_KEY_BYTES);
    atomic_fetch_add(&b->n_told, 1);
    while (atomic_load(&b->n_told) < world)
        usleep(1000);
    for (uint32_t r = 0; r < world; r++)
        peers[r] = (struct wire_peer){b->addresses[r], b->keys[r]};
}

/* ---- on GPUs -------------------------------------------------------------------------------- */

#if BALLAST_HAS_CUDA
#define MB         ((size_t)1 << 20)
#define MB_MAX     256u
#define ROUNDS     5
#define ROUND_NS   (40 * NS_PER_MS)
#define COUNTS_MAX 64

struct bench {
    struct coll *c;
    struct device *dev;
    struct plain *plain;
    float *in, *out;
    int64_t send[COUNTS_MAX], recv[COUNTS_MAX];
};

static const char *const names[] = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all",
                                    "move"};

/* n_bytes is what a rank ends with, starts with, or sends: n floats of one part. */
static size_t part_of(const struct bench *b, enum plain_op op, size_t n_bytes)
{
    size_t n = n_bytes / sizeof(float);
    return op == PLAIN_ALL_REDUCE || op == PLAIN_MOVE ? n : n / b->c->world;
}

static void set_counts(struct bench *b, enum plain_op op)
{
    uint32_t world = b->c->world;
    for (uint32_t i = 0; i < world; i++) {
        b->send[i] = op == PLAIN_ALL_TO_ALL || i == (b->c->rank + 1) % world;
        b->recv[i] = op == PLAIN_ALL_TO_ALL || i == (b->c->rank + world - 1) % world;
    }
}

static void our_call(struct bench *b, enum plain_op op, size_t n)
{
    struct coll *c = b->c;
    const struct coll_group *g = &c->world_group;
    struct err err = {0};
    int rc = 0;
    switch (op) {
    case PLAIN_ALL_GATHER:
        rc = coll_all_gather(c, g, ELEM_F32, b->in, n, 1, b->out, &err);
        break;
    case PLAIN_REDUCE_SCATTER:
        rc = coll_reduce_scatter(c, g, ELEM_F32, b->in, n, 1, b->out, &err);
        break;
    case PLAIN_ALL_REDUCE:
        rc = c->ops->all_reduce(c, g, COLL_SUM, ELEM_F32, b->out, n, &err);
        break;
    case PLAIN_ALL_TO_ALL:
    case PLAIN_MOVE:
        rc = coll_all_to_all_rows(c, g, b->in, b->send, b->out, b->recv, n * sizeof(float), &err);
        break;
    }
    must(rc, &err);
}

/* Milliseconds a call, over as many as take ROUND_NS together, the same number on all ranks. */
static double time_calls(struct bench *b, enum plain_op op, size_t n, bool is_plain, int n_calls)
{
    struct err err = {0};
    b->dev->ops->synchronize(b->dev);
    must(b->c->ops->barrier(b->c, &b->c->world_group, &err), &err);
    uint64_t began = clock_now_ns();
    for (int k = 0; k < n_calls; k++)
        if (is_plain)
            plain_call(b->plain, op, b->in, b->out, n);
        else
            our_call(b, op, n);
    b->dev->ops->synchronize(b->dev);
    return (double)(clock_now_ns() - began) / 1e6 / n_calls;
}

static int count_calls(struct bench *b, double ms)
{
    double calls = (double)ROUND_NS / 1e6 / ms;
    struct err err = {0};
    must(b->c->ops->all_reduce_f64(b->c, &b->c->world_group, COLL_MAX, &calls, 1, &err), &err);
    return calls < 3 ? 3 : calls > 500 ? 500 : (int)calls;
}

/* Bytes that leave a rank, at best. */
static double bytes_sent(const struct bench *b, enum plain_op op, size_t n_bytes)
{
    double share = (double)(b->c->world - 1) / b->c->world, all = (double)n_bytes;
    return op == PLAIN_MOVE ? all : op == PLAIN_ALL_REDUCE ? 2 * share * all : share * all;
}

static void measure_gpu(struct bench *b, enum plain_op op, size_t n_bytes)
{
    size_t n = part_of(b, op, n_bytes);
    double ours[ROUNDS], plain[ROUNDS], gb = bytes_sent(b, op, n_bytes) / 1e9;
    set_counts(b, op);
    time_calls(b, op, n, true, 2);
    time_calls(b, op, n, false, 2);
    int n_calls = count_calls(b, time_calls(b, op, n, false, 2));
    for (int k = 0; k < ROUNDS; k++) {
        plain[k] = time_calls(b, op, n, true, n_calls);
        ours[k] = time_calls(b, op, n, false, n_calls);
    }
    double mine = median(ours, ROUNDS), theirs = median(plain, ROUNDS);
    if (b->c->rank == 0)
        printf("%-14s %7zu %10.3f %10.3f %10.1f %10.1f %8.2f\n", names[op], n_bytes / MB, mine,
               theirs, gb / mine * 1e3, gb / theirs * 1e3, theirs / mine);
    fflush(stdout);
}

/* What rank puts at i; sums of it are exact. */
static float value(uint32_t rank, size_t i)
{
    return (float)(rank + 1) + (float)(i % 1009);
}

static float expected(const struct bench *b, enum plain_op op, size_t n, size_t i)
{
    uint32_t world = b->c->world, rank = b->c->rank;
    float sum = 0;
    size_t at = op == PLAIN_REDUCE_SCATTER ? rank * n + i : i;
    for (uint32_t r = 0; r < world; r++)
        sum += value(r, at);
    switch (op) {
    case PLAIN_ALL_GATHER:
        return value((uint32_t)(i / n), i % n);
    case PLAIN_ALL_TO_ALL:
        return value((uint32_t)(i / n), rank * n + i % n);
    case PLAIN_MOVE:
        return value((rank + world - 1) % world, i);
    case PLAIN_REDUCE_SCATTER:
    case PLAIN_ALL_REDUCE:
        break;
    }
    return sum;
}

static void check(struct bench *b, enum plain_op op)
{
    enum { N_BYTES = 1 << 20 };
    size_t n = part_of(b, op, N_BYTES), n_in = N_BYTES / sizeof(float);
    size_t n_out = op == PLAIN_REDUCE_SCATTER ? n : op == PLAIN_ALL_GATHER ? n * b->c->world
                                                : op == PLAIN_ALL_TO_ALL   ? n * b->c->world
                                                                           : n_in;
    float *host = malloc(N_BYTES);
    for (size_t i = 0; i < n_in; i++)
        host[i] = value(b->c->rank, i);
    b->dev->ops->to_device(b->dev, b->in, host, N_BYTES);
    b->dev->ops->to_device(b->dev, b->out, host, N_BYTES);
    set_counts(b, op);
    our_call(b, op, n);
    b->dev->ops->to_host(b->dev, host, b->out, n_out * sizeof(float));
    for (size_t i = 0; i < n_out; i++)
        if (host[i] != expected(b, op, n, i)) {
            fprintf(stderr, "bench_coll: rank %u: %s gives %g at %zu instead of %g\n", b->c->rank,
                    names[op], (double)host[i], i, (double)expected(b, op, n, i));
            exit(1);
        }
    free(host);
}

static void bench_gpus(struct coll *host, uint32_t rank, const struct options *o)
{
    struct layout_degrees degrees = {.world = host->world, .fsdp = host->world, .ep = host->world};
    struct bench b = {.c = host};
    struct layout layout;
    struct err err = {0};
    char device[16], said[COLL_SAID_BYTES];
    snprintf(device, sizeof device, "cuda:%u", rank);
    must(layout_init(degrees, host->world, rank, &layout, &err), &err);
    must(device_open(device, ELEM_F32, 1, false, &b.dev, &err), &err);
    must(coll_choose(&b.c, b.dev, o->wish, &layout, said, &err), &err);
    b.c->registers_memory = o->registers;
    b.plain = plain_open(b.c, b.dev);
    b.in = b.c->ops->alloc(b.c, MB_MAX * MB);
    b.out = b.c->ops->alloc(b.c, MB_MAX * MB);
    if (!b.in || !b.out)
        must(err_set(&err, -1, "no memory for 2 x %u MB", MB_MAX), &err);
    for (enum plain_op op = PLAIN_ALL_GATHER; op <= PLAIN_MOVE; op++)
        check(&b, op);
    if (rank == 0)
        printf("# %u ranks through %s; results are right\n%-14s %7s %10s %10s %10s %10s %8s\n",
               host->world, said, "op", "MiB", "ms", "plain ms", "GB/s", "plain GB/s", "speed");
    for (enum plain_op op = PLAIN_ALL_GATHER; op <= PLAIN_MOVE; op++)
        for (size_t mb = 1; mb <= MB_MAX; mb *= 4)
            measure_gpu(&b, op, mb * MB);
    plain_close(b.plain);
    b.c->ops->close(b.c);
    b.dev->ops->close(b.dev);
    layout_fini(&layout);
}
#endif

/* ---- ranks ---------------------------------------------------------------------------------- */

static int bench_rank(const struct options *o, const uint8_t *id, uint32_t rank,
                      struct board *board)
{
    struct wire_peer peers[RANKS_MAX_HERE];
    struct coll_hosts hosts = {.hosts = board->hosts, .peers = peers};
    struct coll_host_config config = {.id = id, .rank = rank, .world = o->world,
                                      .open_timeout_ns = 30 * NS_PER_S};
    struct coll *c = NULL;
    struct err err = {0};
    if (o->is_pinned)
        pin_to(rank);
    if (o->n_hosts > 1) {
        tell(board, rank, o->world, peers, &hosts.wire);
        config.hosts = &hosts;
    }
    must(coll_host_open(&config, &c, &err), &err);
#if BALLAST_HAS_CUDA
    if (o->on_gpus) {
        bench_gpus(c, rank, o);
        return 0;
    }
#endif
    bench_cpu(c, o);
    c->ops->close(c);
    return 0;
}

/* False where the arguments are no use. */
static bool read_options(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {
        {"gpus", required_argument, NULL, 'g'}, {"pin", no_argument, NULL, 'p'},
        {"ms", required_argument, NULL, 'm'},   {"op", required_argument, NULL, 'o'},
        {"bytes", required_argument, NULL, 'b'}, {"registered", no_argument, NULL, 'r'}, {0},
    };
    struct err err = {0};
    *o = (struct options){.world = 4, .n_hosts = 1, .budget_ms = 250, .wish = COLL_WISH_AUTO};
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        if (c == 'g') {
            o->on_gpus = true;
            o->world = (uint32_t)strtoul(optarg, NULL, 10);
        } else if (c == 'p') {
            o->is_pinned = true;
        } else if (c == 'm') {
            o->budget_ms = (uint32_t)strtoul(optarg, NULL, 10);
        } else if (c == 'o') {
            o->op = optarg;
        } else if (c == 'b') {
            o->n_bytes = strtoul(optarg, NULL, 10);
        } else if (c == 'r') {
            o->registers = true;
        } else {
            return false;
        }
    }
    argv += optind;
    if (o->on_gpus)
        return BALLAST_HAS_CUDA && o->world >= 1 && o->world <= RANKS_MAX_HERE &&
               coll_wish_parse(argv[0] ? argv[0] : "nccl", &o->wish, &err) == 0;
    if (argv[0])
        o->world = (uint32_t)strtoul(argv[0], NULL, 10);
    if (argv[0] && argv[1])
        o->n_hosts = (uint32_t)strtoul(argv[1], NULL, 10);
    return o->world >= 1 && o->world <= RANKS_MAX_HERE && o->n_hosts >= 1 &&
           o->n_hosts <= o->world;
}

int main(int argc, char **argv)
{
    struct options o;
    uint8_t id[16] = "bench";
    uint32_t pid = (uint32_t)getpid();
    if (!read_options(argc, argv, &o)) {
        fprintf(stderr, "usage: bench_coll [--pin] [--ms N] [--op NAME] [--bytes N] [RANKS, 1 to "
                        "64 [HOSTS]]\n       bench_coll --gpus N [--registered] [host|nccl]%s\n",
                BALLAST_HAS_CUDA ? "" : ", which this build cannot");
        return 2;
    }
    memcpy(id + 8, &pid, sizeof pid);
    struct board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (uint32_t r = 0; r < o.world; r++)
        board->hosts[r] = r * o.n_hosts / o.world;
    for (uint32_t r = 1; r < o.world; r++)
        if (fork() == 0)
            _exit(bench_rank(&o, id, r, board));
    int rc = bench_rank(&o, id, 0, board);
    for (int status; wait(&status) > 0;)
        rc |= status != 0;
    return rc;
}
