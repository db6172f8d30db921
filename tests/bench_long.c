/* bench_long.c - one layer's attention over one long sequence, forward and backward, in segments
 *
 * The layer's own code runs as in training, with all of its weights trained. Latent attention is
 * over keys that an indexer chooses, and the indexer learns. With --check the same is done at once
 * for the first --check tokens, and compared. BALLAST_OP_TIMES=1 shows where a GPU's time goes. */
#include <getopt.h>
#include <stdio.h>

#include "common/clock.h"
#include "common/hf_config.h"
#include "tests/one_layer.h"

#define FACTORS 64 /* rows are made of so many random numbers each */

struct options {
    const char *config, *layer, *device, *dtype;
    int64_t tokens, segment, check;
    uint32_t n_threads;
    uint32_t index[3]; /* heads, their width, keys chosen: of models that have no indexer */
    bool learns;
};

static const char usage[] =
    "usage: bench_long --config DIR --layer kda|dsa --tokens N [--segment ROWS] [--check N]\n"
    "           [--device cpu|cuda:N] [--dtype f32|bf16] [--threads N] [--no-index-loss]\n"
    "           [--index HEADS,WIDTH,KEYS]\n";

static double seconds_since(struct device *dev, uint64_t start)
{
    dev->ops->synchronize(dev);
    return (double)(clock_now_ns() - start) / NS_PER_S;
}

/* x (n, width) = random (n, FACTORS) times random (FACTORS, width): no row is another's double. */
static int fill_rows(struct device *dev, elem *x, int64_t n, int64_t width, uint64_t seed)
{
    elem *few = dev->ops->alloc(dev, (size_t)(n * FACTORS) * elem_size(dev));
    elem *w = dev->ops->alloc(dev, (size_t)(width * FACTORS) * elem_size(dev));
    if (!few || !w)
        return -ENOMEM;
    one_layer_fill(dev, few, n * FACTORS, 0, 1.7f, seed);
    one_layer_fill(dev, w, width * FACTORS, 0, 1.7f / 8, seed + 1);
    for (int64_t row = 0; row < n; row += 65536) { /* as rows of a product are counted in words */
        int64_t m = n - row < 65536 ? n - row : 65536;
        dev->ops->linear(dev, elem_at(dev, x, row * width), elem_at(dev, few, row * FACTORS), w, m,
                         FACTORS, width, 0);
    }
    dev->ops->synchronize(dev);
    dev->ops->free(dev, few);
    dev->ops->free(dev, w);
    return 0;
}

static elem *take_rows(struct device *dev, int64_t n, int64_t width)
{
    elem *x = dev->ops->alloc(dev, (size_t)(n * width) * elem_size(dev));
    if (!x) {
        fprintf(stderr, "bench_long: the device has no %.1f GiB\n",
                (double)(n * width) * (double)elem_size(dev) / 0x1p30);
        exit(1);
    }
    return x;
}

/* Some rows of x (n, width), as floats. */
#define SEEN_ROWS 512
static float *look(struct device *dev, const elem *x, int64_t n, int64_t width)
{
    int64_t each = SEEN_ROWS / 8, step = n / 8;
    float *host = xcalloc((size_t)(SEEN_ROWS * width), sizeof *host);
    float *floats = dev->ops->alloc(dev, (size_t)(each * width) * sizeof *floats);
    for (int64_t i = 0; floats && i < 8; i++) { /* the last rows of each eighth */
        int64_t row = (i + 1) * step - each;
        if (row < 0)
            continue;
        dev->ops->to_f32(dev, floats, const_elem_at(dev, x, row * width), each * width);
        dev->ops->to_host(dev, host + i * each * width, floats,
                          (size_t)(each * width) * sizeof *host);
    }
    dev->ops->free(dev, floats);
    return host;
}

static double norm_of(const float *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sqrt(sum / (double)n);
}

static double distance(const float *a, const float *b, int64_t n)
{
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(difference / norm);
}

struct measured {
    double forward_s, backward_s, index_loss;
    float *y, *dx, *gradients; /* samples; gradients whole, where asked for */
    struct device_memory memory;
};

static void measured_free(struct measured *m)
{
    free(m->y);
    free(m->dx);
    free(m->gradients);
}

/* dx goes where y was. */
static int measure(struct one_layer *l, int64_t n, int64_t segment, const elem *x, const elem *dy,
                   elem *y, bool learns, bool keeps, struct measured *out, struct err *err)
{
    struct device *dev = l->dev;
    int64_t hidden = l->spec.hidden;
    int32_t cu_seqlens[2] = {0, (int32_t)n};
    struct one_layer_saved s = {0};
    double losses[2];

    one_layer_begin(l, cu_seqlens, 1, segment, learns ? INDEX_SPARSE : INDEX_FROZEN);
    int rc = one_layer_reserve(l, err);
    if (rc < 0)
        return rc;
    dev->ops->synchronize(dev);
    uint64_t start = clock_now_ns();
    one_layer_forward(l, x, y, &s);
    out->forward_s = seconds_since(dev, start);
    out->y = look(dev, y, n, hidden);
    start = clock_now_ns();
    one_layer_backward(l, x, dy, y, &s);
    out->backward_s = seconds_since(dev, start);
    out->dx = look(dev, y, n, hidden);
    dev->ops->to_host(dev, losses, l->losses, sizeof losses);
    out->index_loss = losses[1] / (double)n;
    dev->ops->memory(dev, &out->memory);
    if (keeps) {
        out->gradients = xcalloc((size_t)l->n_weights, sizeof(float));
        dev->ops->to_host(dev, out->gradients, l->gradients, (size_t)l->n_weights * sizeof(float));
    }
    return activations_check(&l->act, err);
}

static int check(struct one_layer *l, const struct options *o, const elem *x, const elem *dy,
                 elem *y, struct err *err)
{
    struct measured whole = {0}, cut = {0};
    int64_t seen = SEEN_ROWS * (int64_t)l->spec.hidden;
    int64_t segment = o->check / 4 / 64 * 64;
    int rc = measure(l, o->check, 0, x, dy, y, o->learns, true, &whole, err);
    if (rc == 0)
        rc = measure(l, o->check, segment, x, dy, y, o->learns, true, &cut, err);
    if (rc == 0)
        printf("layer=%s tokens=%lld segment=%lld y_distance=%.2g dx_distance=%.2g "
               "weights_distance=%.2g index_loss=%.6f instead of %.6f\n", o->layer,
               (long long)o->check, (long long)segment, distance(cut.y, whole.y, seen),
               distance(cut.dx, whole.dx, seen),
               distance(cut.gradients, whole.gradients, l->n_weights), cut.index_loss,
               whole.index_loss);
    measured_free(&whole);
    measured_free(&cut);
    return rc;
}

static int run(struct one_layer *l, const struct options *o, struct err *err)
{
    struct device *dev = l->dev;
    int64_t hidden = l->spec.hidden, seen = SEEN_ROWS * hidden;
    struct measured m = {0};
    elem *x = take_rows(dev, o->tokens, hidden), *dy = take_rows(dev, o->tokens, hidden);
    elem *y = take_rows(dev, o->tokens, hidden);
    int rc = one_layer_turn(l, o->tokens, err);

    if (rc == 0 && (fill_rows(dev, x, o->tokens, hidden, 1000) < 0 ||
                    fill_rows(dev, dy, o->tokens, hidden, 2000) < 0))
        rc = err_set(err, -ENOMEM, "no memory for the inputs");
    if (rc == 0 && o->check)
        rc = check(l, o, x, dy, y, err);
    for (int i = 0; i < 3; i++) /* what has been is not timed by op */
        dev->ops->step_over(dev);
    if (rc == 0)
        rc = measure(l, o->tokens, o->segment, x, dy, y, o->learns, false, &m, err);
    dev->ops->step_over(dev);
    if (rc == 0) {
        double tokens = (double)o->tokens;
        printf("layer=%s tokens=%lld segment=%lld forward_s=%.3f backward_s=%.3f "
               "tokens_per_s=%.0f activations_gib=%.1f peak_gib=%.1f scratch_gib=%.1f "
               "y_rms=%.4f dx_rms=%.4f index_loss=%.4f\n", o->layer, (long long)o->tokens,
               (long long)o->segment, m.forward_s, m.backward_s,
               tokens / (m.forward_s + m.backward_s), (double)l->act.peak / 0x1p30,
               (double)(m.memory.peak + m.memory.overhead) / 0x1p30,
               (double)m.memory.scratch / 0x1p30, norm_of(m.y, seen), norm_of(m.dx, seen),
               m.index_loss);
        fflush(stdout);
    }
    measured_free(&m);
    dev->ops->free(dev, x);
    dev->ops->free(dev, dy);
    dev->ops->free(dev, y);
    return rc;
}

/* The model's width and heads, but one layer, and next to no feed-forward. */
static int read_model(const struct options *o, struct model_spec *out, struct err *err)
{
    int rc = hf_config_read(o->config, out, err);
    bool is_kda = strcmp(o->layer, "kda") == 0;
    if (rc < 0)
        return rc;
    out->n_layers = 1;
    out->layers[0] = (struct layer_spec){is_kda ? ATTENTION_KDA : ATTENTION_MLA, MLP_DENSE};
    out->dense_inter = 64;
    if (!out->index_top_k) {
        out->index_heads = o->index[0];
        out->index_head_dim = o->index[1];
        out->index_top_k = o->index[2];
        out->index_norm_eps = out->norm_eps;
    }
    if ((is_kda && !out->kda_heads) || (!is_kda && !out->q_lora_rank))
        return err_set(err, -EINVAL, "%s: the model has no such layer", o->config);
    return 0;
}

static int parse(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {
        {"config", required_argument, NULL, 'c'}, {"layer", required_argument, NULL, 'l'},
        {"tokens", required_argument, NULL, 'n'}, {"segment", required_argument, NULL, 's'},
        {"check", required_argument, NULL, 'k'},  {"device", required_argument, NULL, 'd'},
        {"dtype", required_argument, NULL, 'e'},  {"threads", required_argument, NULL, 'j'},
        {"index", required_argument, NULL, 'i'},  {"no-index-loss", no_argument, NULL, 'q'}, {0},
    };
    *o = (struct options){.layer = "kda", .device = "cpu", .dtype = "f32", .segment = 32768,
                          .n_threads = 1, .index = {64, 128, 2048}, .learns = true};
    for (int which; (which = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        switch (which) {
        case 'c': o->config = optarg; break;
        case 'l': o->layer = optarg; break;
        case 'n': o->tokens = atoll(optarg); break;
        case 's': o->segment = atoll(optarg); break;
        case 'k': o->check = atoll(optarg); break;
        case 'd': o->device = optarg; break;
        case 'e': o->dtype = optarg; break;
        case 'j': o->n_threads = (uint32_t)atoi(optarg); break;
        case 'q': o->learns = false; break;
        case 'i':
            if (sscanf(optarg, "%u,%u,%u", &o->index[0], &o->index[1], &o->index[2]) != 3)
                return -1;
            break;
        default: return -1;
        }
    }
    bool is_known = !strcmp(o->layer, "kda") || !strcmp(o->layer, "dsa");
    return optind == argc && o->config && is_known && o->tokens >= 64 && o->tokens <= INT32_MAX &&
                   o->segment >= 64 && o->segment % 64 == 0 && o->check <= o->tokens &&
                   (o->check == 0 || o->check >= 256)
               ? 0
               : -1;
}

int main(int argc, char **argv)
{
    struct device *dev = NULL;
    struct model_spec spec;
    struct one_layer l;
    struct options o;
    struct err err = {0};

    if (parse(argc, argv, &o) < 0) {
        fputs(usage, stderr);
        return 2;
    }
    enum elem_type type = strcmp(o.dtype, "bf16") == 0 ? ELEM_BF16 : ELEM_F32;
    int rc = read_model(&o, &spec, &err);
    if (rc == 0)
        rc = device_open(o.device, type, o.n_threads, false, &dev, &err);
    if (rc == 0 && (rc = one_layer_open(&l, dev, &spec, &err)) == 0) {
        rc = run(&l, &o, &err);
        one_layer_close(&l);
    }
    if (rc < 0)
        fprintf(stderr, "bench_long: %s\n", err.text);
    if (dev)
        dev->ops->close(dev);
    return rc < 0;
}
