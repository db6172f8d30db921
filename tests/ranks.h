/* ranks.h - several ranks of one job as threads of a test, and a model that fits in a hand */
#ifndef TESTS_RANKS_H
#define TESTS_RANKS_H

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/bf16.h"
#include "common/layout.h"
#include "common/model_spec.h"
#include "common/tensor_map.h"
#include "kernels/device.h"
#include "worker/coll.h"
#include "worker/shard.h"

#define TEST_RANKS_MAX 8u
#define TEST_SPARE     2u /* slots of each rank beyond what its experts need */

struct test_rank {
    uint8_t id[16];
    uint32_t rank;
    struct layout_degrees degrees;
    const struct model_spec *spec;
    const struct tensor_map *map;
    struct layout  layout;
    struct slots   slots;
    struct coll   *coll;
    struct device *dev;
    struct shard  *shard;
    void (*body)(struct test_rank *r);
    void *user;
    struct err err;
    int rc; /* the body's result; 0: fine */
};

/* The first complaint stays. */
static inline void test_rank_complain(struct test_rank *r, int line, const char *condition)
{
    if (r->rc != 0)
        return;
    if (r->err.text[0])
        err_prefix(&r->err, "rank %u line %d: %s", r->rank, line, condition);
    else
        err_set(&r->err, -EBADMSG, "rank %u line %d: %s", r->rank, line, condition);
    r->rc = -EBADMSG;
}

/* What ranks keep weights as. The CPU computes with float32 alone, but moves and casts both. */
static enum elem_type test_elem = ELEM_F32;

static inline float test_value_at(struct device *dev, const elem *x, uint64_t i)
{
    uint16_t half = 0;
    float value = 0;
    x = const_elem_at(dev, x, (int64_t)i);
    dev->ops->to_host(dev, dev->elem == ELEM_F32 ? (void *)&value : &half, x, elem_size(dev));
    return dev->elem == ELEM_F32 ? value : bf16_value(half);
}

/* A float of the device's. */
static inline float test_get(struct device *dev, const float *x)
{
    float value;
    dev->ops->to_host(dev, &value, x, sizeof value);
    return value;
}

static inline void test_put(struct device *dev, float *x, float value)
{
    dev->ops->to_device(dev, x, &value, sizeof value);
}

/* x as an element. */
static inline float test_rounded(const struct device *dev, float x)
{
    return dev->elem == ELEM_F32 ? x : bf16_value(bf16_of(x));
}

__attribute__((no_sanitize("address"))) /* an op may, see kernels/apart.h */
static inline void test_to_bf16(struct device *dev, elem_ptr y, const float *x, int64_t n)
{
    (void)dev;
    for (int64_t i = 0; i < n; i++)
        ((uint16_t *)y.p)[i] = bf16_of(x[i]);
}

/* In a body, which runs on a thread where cmocka cannot fail. */
#define RANK_CHECK(r, condition)                                                                   \
    do {                                                                                           \
        if (!(condition))                                                                          \
            test_rank_complain(r, __LINE__, #condition);                                           \
    } while (0)

/* Three layers: KDA with a dense MLP, latent attention and KDA with eight experts, top-2. */
static inline struct model_spec test_spec(void)
{
    return (struct model_spec){
        .family = FAMILY_KIMI_K3, .n_layers = 3,
        .layers = {{ATTENTION_KDA, MLP_DENSE}, {ATTENTION_MLA, MLP_MOE}, {ATTENTION_KDA, MLP_MOE}},
        .residual = RESIDUAL_ATTN_RES, .attn_res_block = 2, .hidden = 32, .vocab = 256,
        .norm_eps = 1e-5f, .latent_norm_eps = 1e-6f, .init_std = 0.02f, .kda_heads = 2,
        .kda_head_dim = 16, .conv_kernel = 4, .kda_gate_bounded = true,
        .kda_gate_lower_bound = -5.0f, .kda_gate_full_rank = true, .heads = 2, .q_lora_rank = 16,
        .kv_lora_rank = 16, .qk_nope_dim = 16, .qk_rope_dim = 8, .v_dim = 16,
        .mla_output_gate = true, .activation = ACTIVATION_SITU, .situ_beta = 4.0f,
        .situ_linear_beta = 25.0f, .dense_inter = 48, .n_experts = 8, .top_k = 2,
        .expert_inter = 24, .n_shared_experts = 1, .latent = 16, .latent_moe = true,
        .latent_norm = true, .renormalize = true, .routed_scale = 1.0f,
    };
}

/* Freezes every other dense tensor, and one of the three matrices of every expert. */
static inline void test_freeze_some(struct tensor_map *map)
{
    for (size_t i = 0; i < map->n_entries; i++)
        if (map->entries[i].expert < 0 ? i % 2 : map->entries[i].role == ROLE_EXPERT_UP)
            map->entries[i].is_unreached = true;
    tensor_map_index(map);
}

/* Memory of the rank's device with what the host has; NULL: zeros. Freed with its ops. */
static inline void *test_upload(struct device *dev, const void *host, size_t n_bytes)
{
    void *p = dev->ops->alloc(dev, n_bytes);
    if (host)
        dev->ops->to_device(dev, p, host, n_bytes);
    return p;
}

static inline void *test_rank_main(void *arg)
{
    struct test_rank *r = arg;
    struct device_ops ops;
    struct coll_host_config config = {.id = r->id, .rank = r->rank, .world = r->degrees.world,
                                      .open_timeout_ns = 20 * NS_PER_S,
                                      .call_timeout_ns = 60 * NS_PER_S};
    if ((r->rc = layout_init(r->degrees, r->spec->n_experts, r->rank, &r->layout, &r->err)) == 0 &&
        (r->rc = device_cpu_open(1, true, &r->dev, &r->err)) == 0 &&
        (r->rc = coll_host_open(&config, &r->coll, &r->err)) == 0 &&
        (r->rc = slots_init(&r->slots, r->spec, &r->layout, TEST_SPARE, &r->err)) == 0) {
        r->coll->dev = r->dev;
        ops = *r->dev->ops;
        r->dev->elem = test_elem;
        if (test_elem == ELEM_BF16) {
            ops.to_elem = test_to_bf16;
            r->dev->ops = &ops;
        }
        r->rc = shard_open(r->map, r->spec, &r->layout, &r->slots, r->coll, r->dev, &r->shard,
                           &r->err);
        if (r->rc == 0)
            r->body(r);
        /* One that leaves is missed by others that still wait, be it not for it. */
        if (r->rc == 0)
            r->rc = r->coll->ops->barrier(r->coll, &r->coll->world_group, &r->err);
    }
    if (r->rc < 0 && r->coll)
        r->coll->ops->abort(r->coll);
    shard_close(r->shard);
    if (r->coll)
        r->coll->ops->close(r->coll);
    if (r->dev)
        r->dev->ops->close(r->dev);
    slots_fini(&r->slots);
    layout_fini(&r->layout);
    return NULL;
}

/* Runs body on every rank; fails the test with the first rank's complaint. */
static inline void test_ranks_run(struct layout_degrees degrees, const struct model_spec *spec,
                                  const struct tensor_map *map, void (*body)(struct test_rank *),
                                  void *user)
{
    static uint32_t n_runs;
    struct test_rank ranks[TEST_RANKS_MAX];
    pthread_t threads[TEST_RANKS_MAX];
    uint32_t id[4] = {(uint32_t)getpid(), ++n_runs, 0x74657374u, degrees.world};
    for (uint32_t i = 0; i < degrees.world; i++) {
        ranks[i] = (struct test_rank){.rank = i, .degrees = degrees, .spec = spec, .map = map,
                                      .body = body, .user = user};
        memcpy(ranks[i].id, id, sizeof id);
        assert_int_equal(pthread_create(&threads[i], NULL, test_rank_main, &ranks[i]), 0);
    }
    for (uint32_t i = 0; i < degrees.world; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < degrees.world; i++)
        if (ranks[i].rc != 0 && ranks[i].rc != -ECANCELED)
            fail_msg("world %u fsdp %u ep %u shard %u: %s", degrees.world, degrees.fsdp, degrees.ep,
                     degrees.expert_shard, ranks[i].err.text);
    for (uint32_t i = 0; i < degrees.world; i++)
        assert_int_equal(ranks[i].rc, 0);
}

/* Every way to cut 1, 2 and 4 ranks (and a few of 8). */
static const struct layout_degrees test_layouts[] = {
    {1, 1, 1, 0}, {2, 1, 1, 0}, {2, 1, 1, 1}, {2, 2, 1, 0}, {2, 1, 2, 0}, {2, 2, 2, 0},
    {4, 1, 1, 1}, {4, 1, 1, 2}, {4, 1, 1, 0}, {4, 2, 1, 1}, {4, 2, 1, 2}, {4, 2, 1, 0},
    {4, 4, 1, 0}, {4, 1, 2, 1}, {4, 1, 2, 0}, {4, 2, 2, 1}, {4, 2, 2, 0}, {4, 4, 2, 0},
    {4, 1, 4, 0}, {4, 2, 4, 0}, {4, 4, 4, 0}, {8, 4, 2, 2}, {8, 2, 8, 0},
};
#define N_TEST_LAYOUTS (sizeof test_layouts / sizeof *test_layouts)

#endif
