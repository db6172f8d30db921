/* test_gpu_health.c - what a GPU says of itself, over a library that plays NVML; who is sick */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "coordinator/fleet.h"
#include "proto/gpu.h"
#include "tests/fake_nvml.h"
#include "worker/agent.h"
#include "worker/gpu_health.h"

static struct fake_gpu *gpu;

static int well(void **state)
{
    (void)state;
    *gpu = (struct fake_gpu){.percent = 75, .celsius = 41, .milliwatts = 350500, .sm_mhz = 1980,
                             .memory_mhz = 3201, .used = 10, .total = 100, .throttle = 4,
                             .corrected = 2, .rows_corrected = 1, .link_errors = 7};
    unsetenv("CUDA_VISIBLE_DEVICES");
    return 0;
}

static void everything_is_told(void **state)
{
    (void)state;
    struct gpu_health *g = gpu_health_create("cuda:3");
    const Ballast__GpuHealth *h = gpu_health_look(g);
    assert_non_null(h);
    assert_int_equal(gpu->index, 3);
    assert_string_equal(h->name, "Fake H200");
    assert_true(h->utilization == 0.75);
    assert_true(h->memory_used_bytes == 10 && h->memory_bytes == 100);
    assert_int_equal(h->temperature_celsius, 41);
    assert_true(h->power_watts == 350.5 && h->power_limit_watts == 0);
    assert_true(h->sm_clock_mhz == 1980 && h->memory_clock_mhz == 3201);
    assert_int_equal(h->throttle_reasons, 4);
    assert_true(h->ecc_corrected == 2 && h->ecc_uncorrected == 0);
    assert_true(h->rows_remapped_corrected == 1 && !h->row_remap_pending);
    assert_int_equal(h->nvlink_errors, 7);
    assert_string_equal(h->sick, "");
    gpu_health_destroy(g);
    assert_int_equal(gpu->n_inits, 0);
}

static void what_makes_one_sick(void **state)
{
    (void)state;
    static const struct {
        const char *shows, *says; /* says NULL: well */
        struct fake_gpu gpu;
    } rows[] = {
        {"a hot, throttled GPU is slow", NULL, {.celsius = 95, .throttle = 0x60}},
        {"corrected errors are", NULL, {.corrected = 100000}},
        {"a row that waits for a reset is no harm", NULL, {.remap_pending = 1}},
        {"errors that were not corrected", "3 uncorrectable errors", {.uncorrected = 3}},
        {"a row that could not be remapped", "could not be remapped", {.remap_failed = 1}},
        {"a lost device", "the GPU is lost", {.result = 15}},
        {"one that needs a reset", "needs a reset", {.result = 16}},
        {"questions that it does not answer", NULL, {.result = 3}},
        {"a program's own fault (Xid 31)", NULL, {.xids = {31}}},
        {"a fall off the bus (Xid 79)", "fallen off the bus (Xid 79)", {.xids = {79, 31}}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        well(NULL);
        struct gpu_health *g = gpu_health_create("cuda:0");
        assert_string_equal(gpu_health_look(g)->sick, "");
        *gpu = rows[i].gpu;
        gpu->n_inits = 1;
        const Ballast__GpuHealth *h = gpu_health_look(g);
        if (rows[i].says ? !strstr(h->sick, rows[i].says) : h->sick[0])
            fail_msg("%s: sick '%s'", rows[i].shows, h->sick);
        gpu_health_destroy(g);
    }
}

static void a_device_is_found_as_cuda_counts(void **state)
{
    (void)state;
    setenv("CUDA_VISIBLE_DEVICES", "5,GPU-abc,2", 1);
    for (int i = 0; i < 4; i++) {
        const char *const names[] = {"cuda:0", "cuda:1", "cuda:2", "cuda:3"};
        struct gpu_health *g = gpu_health_create(names[i]);
        const Ballast__GpuHealth *h = gpu_health_look(g);
        assert_true((i == 3) == (h == NULL)); /* there are three */
        if (i == 1)
            assert_string_equal(gpu->uuid, "GPU-abc");
        else if (i < 3)
            assert_int_equal(gpu->index, i == 0 ? 5 : 2);
        gpu_health_destroy(g);
    }
}

static void without_a_library_nothing_is_known(void **state)
{
    (void)state;
    setenv("BALLAST_NVML", "/nowhere/libnvidia-ml.so.1", 1);
    struct gpu_health *g = gpu_health_create("cuda:0");
    assert_null(gpu_health_look(g));
    assert_null(gpu_health_look(g));
    gpu_health_destroy(g);
    setenv("BALLAST_NVML", FAKE_NVML, 1);
    assert_null(gpu_health_create("cpu"));
}

/* ---- who is told ---------------------------------------------------------------------------- */

static void a_sick_gpu_is_told_at_once(void **state)
{
    (void)state;
    struct agent_config config = agent_config_default();
    config.name = "w0";
    config.node = config.device = config.version = "";
    config.worker_epoch = 7;
    struct agent *a = agent_create(&config);
    struct agent_turn t = {0};
    Ballast__GpuHealth said = BALLAST__GPU_HEALTH__INIT;
    said.sick = (char *)"it is broken";
    agent_begin(a, &t, 1);
    agent_gpu(a, &t, &said);
    agent_gpu(a, &t, &said); /* not said again */
    agent_connected(a, &t);
    agent_tick(a, &t);
    size_t n_notes = 0, n_hellos = 0;
    for (size_t i = 0; i < t.n_effects; i++) {
        const struct effect *e = &t.effects[i];
        n_notes += e->kind == EFFECT_NOTE && strstr(e->note, "gets no new work: it is broken");
        if (e->kind != EFFECT_SEND || e->envelope.method != BALLAST__METHOD__METHOD_HELLO)
            continue;
        n_hellos++;
        assert_string_equal(((const Ballast__Hello *)e->payload)->gpu->sick, "it is broken");
    }
    assert_int_equal(n_notes, 1);
    assert_int_equal(n_hellos, 1);
    agent_turn_fini(&t);
    agent_destroy(a);
}

static void a_sick_worker_gets_no_work(void **state)
{
    (void)state;
    const struct fleet_config config = {.heartbeat_floor_ns = NS_PER_S, .heartbeats_per_s = 1000};
    Ballast__GpuHealth said = BALLAST__GPU_HEALTH__INIT;
    struct arena arena = {0};
    struct fleet f;
    fleet_init(&f, &config);
    struct worker *w = fleet_add(&f, "w");
    fleet_set_peer(&f, w, 1);
    fleet_heard(&f, w, 0);
    said.sick = (char *)"it is broken";
    fleet_set_gpu(w, &said);
    assert_false(fleet_is_free(w, 0));
    Ballast__Worker *shown = fleet_describe(w, 0, &arena);
    assert_int_equal(shown->state, BALLAST__WORKER_STATE__WORKER_SICK);
    assert_string_equal(shown->reason, "it is broken");
    said.sick = (char *)"";
    fleet_set_gpu(w, &said);
    assert_true(fleet_is_free(w, 0));
    assert_string_equal(shown->gpu->sick, "it is broken"); /* a copy */
    assert_int_equal(fleet_describe(w, 0, &arena)->state, BALLAST__WORKER_STATE__WORKER_IDLE);
    fleet_fini(&f);
    arena_fini(&arena);
}

int main(void)
{
    setenv("BALLAST_NVML", FAKE_NVML, 1);
    void *library = dlopen(FAKE_NVML, RTLD_NOW); /* stays, whatever is closed */
    fake_nvml_fn get;
    if (!library)
        return 1;
    *(void **)&get = dlsym(library, "fake_nvml");
    gpu = get();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(everything_is_told, well),
        cmocka_unit_test_setup(what_makes_one_sick, well),
        cmocka_unit_test_setup(a_device_is_found_as_cuda_counts, well),
        cmocka_unit_test_setup(without_a_library_nothing_is_known, well),
        cmocka_unit_test(a_sick_gpu_is_told_at_once),
        cmocka_unit_test(a_sick_worker_gets_no_work),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
