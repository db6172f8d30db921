/* stack.c - opens the parts of a rank and runs ranks as threads */
#include "worker/stack.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "common/mem.h"
#include "kernels/spans.h"

#define OPEN_TIMEOUT_NS (30 * NS_PER_S)

struct run {
    const struct stack_config *config;
    stack_fn run;
    void *arg;
    uint8_t id[16];
    atomic_bool cancelled;
    pthread_mutex_t lock;
    struct err first; /* code 0: none yet */
};

struct rank_thread {
    struct run *run;
    uint32_t rank;
    pthread_t thread;
};

static void open_dispatch(struct stack *s)
{
    const struct stack_config *c = s->config;
    const struct rank_group *ep = &s->layout.ep;
    uint32_t *nodes = xcalloc(ep->n_ranks, sizeof *nodes);

    for (uint32_t i = 0; i < ep->n_ranks; i++)
        nodes[i] = c->n_nodes ? ep->ranks[i] * c->n_nodes / c->degrees.world : 0;
    s->dispatch = dispatch_open(&(struct dispatch_config){
        .layout = &s->layout, .slots = &s->slots, .coll = s->coll, .dev = s->dev,
        .top_k = c->spec->top_k, .width = c->spec->latent, .nodes = nodes,
        .hierarchical = c->hierarchical, .n_chunks = c->n_chunks,
        .chunk_tokens = memory_chunk_tokens(model_spec_expert_flops(c->spec), !s->dev->is_host,
                                            c->recompute),
    });
    free(nodes);
}

static int stack_open(struct stack *s, struct run *run, struct err *err)
{
    const struct stack_config *c = s->config;
    struct coll_host_config host = {
        .id = run->id, .rank = s->rank, .world = c->degrees.world,
        .open_timeout_ns = OPEN_TIMEOUT_NS, .cancelled = &run->cancelled,
    };
    int rc;

    if ((rc = layout_init(c->degrees, c->spec->n_experts, s->rank, &s->layout, err)) < 0 ||
        (rc = coll_host_open(&host, &s->coll, err)) < 0 ||
        (rc = device_open(c->device ? c->device : "cpu", c->elem, 1, c->deterministic, &s->dev,
                          err)) < 0 ||
        (rc = slots_init(&s->slots, c->spec, &s->layout, c->n_spare, err)) < 0)
        return rc;
    spans_open(s->dev);
    s->coll->dev = s->dev;
    s->coll->is_blocking = c->is_blocking;
    if ((rc = shard_open(c->map, c->spec, &s->layout, &s->slots, s->coll, s->dev, &s->shard,
                         err)) < 0)
        return rc;
    if (c->spec->n_experts > 0)
        open_dispatch(s);
    struct model_config model = {
        .spec = c->spec, .map = c->map, .lora = c->lora, .layout = &s->layout, .slots = &s->slots,
        .shard = s->shard, .dispatch = s->dispatch, .dev = s->dev, .tokens_max = c->tokens_max,
        .recompute = c->recompute, .segment_rows = c->segment_rows,
        .count_margins = c->count_margins,
        .index_stage = c->index_stage, .index_joint = c->index_joint, .index_weight = 1,
        .rules = c->rules,
    };
    return model_open(&model, &s->model, err);
}

static void stack_close(struct stack *s)
{
    model_close(s->model);
    dispatch_close(s->dispatch);
    shard_close(s->shard);
    if (s->coll)
        s->coll->ops->close(s->coll);
    spans_close(s->dev);
    if (s->dev)
        s->dev->ops->close(s->dev);
    slots_fini(&s->slots);
    layout_fini(&s->layout);
}

/* The others then fail with -ECANCELED, which is no error of their own. */
static void note_failure(struct run *run, struct stack *s, int rc, const struct err *err)
{
    pthread_mutex_lock(&run->lock);
    if (!run->first.code || run->first.code == -ECANCELED) {
        run->first = *err;
        run->first.code = rc;
    }
    pthread_mutex_unlock(&run->lock);
    atomic_store(&run->cancelled, true);
    if (s->coll)
        s->coll->ops->abort(s->coll);
}

static void *rank_main(void *arg)
{
    struct rank_thread *t = arg;
    struct stack s = { .config = t->run->config, .rank = t->rank };
    struct err err = {0};

    int rc = stack_open(&s, t->run, &err);
    if (rc == 0)
        rc = t->run->run(&s, t->run->arg, &err);
    if (rc == 0) /* who leaves is missed by those that still wait for others */
        rc = s.coll->ops->barrier(s.coll, &s.coll->world_group, &err);
    if (rc < 0)
        note_failure(t->run, &s, rc, &err);
    stack_close(&s);
    return NULL;
}

int stack_run(const struct stack_config *config, stack_fn fn, void *arg, struct err *err)
{
    struct run run = { .config = config, .run = fn, .arg = arg };
    uint32_t n = config->degrees.world, started = 0;

    if (getrandom(run.id, sizeof run.id, 0) != (ssize_t)sizeof run.id)
        return err_set(err, -errno, "getrandom: %s", strerror(errno));
    pthread_mutex_init(&run.lock, NULL);
    struct rank_thread *threads = xcalloc(n, sizeof *threads);
    for (; started < n; started++) {
        threads[started] = (struct rank_thread){ .run = &run, .rank = started };
        int code = pthread_create(&threads[started].thread, NULL, rank_main, &threads[started]);
        if (code) {
            err_set(&run.first, -code, "thread of rank %u: %s", started, strerror(code));
            atomic_store(&run.cancelled, true);
            break;
        }
    }
    for (uint32_t i = 0; i < started; i++)
        pthread_join(threads[i].thread, NULL);
    free(threads);
    pthread_mutex_destroy(&run.lock);
    if (run.first.code && err)
        *err = run.first;
    return run.first.code;
}
