/* gpu_health.c - asks NVML, which is loaded at run time, about one GPU, and judges the answers
 *
 * What it cannot tell stays 0. A GPU is sick when what it computes can no longer be trusted or it
 * can no longer be reached: memory errors that were not corrected, a row that could not be
 * remapped, a device that fell off the bus, or a driver's message (Xid) that means one of these. A
 * hot or throttled GPU is slow, not sick. */
#include "worker/gpu_health.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/types.h"

#define LIBRARY     "libnvidia-ml.so.1"
#define LINKS_MAX   18u
#define COUNTERS    4u   /* of errors of a link: replay, recovery, and two of checksums */
#define EVENT_XID   0x8ull
#define EVENTS_MAX  64   /* taken in one look */

/* NVML's results that mean something here. */
enum { NVML_OK = 0, NVML_NOT_FOUND = 6, NVML_LOST = 15, NVML_RESET_REQUIRED = 16 };
enum { CORRECTED, UNCORRECTED };
enum { SINCE_DRIVER };
enum { CLOCK_SM = 1, CLOCK_MEMORY = 2 };

typedef struct nvml_device *device_handle;
typedef struct nvml_events *event_set;

struct use {
    unsigned gpu, memory; /* percent */
};
struct memory {
    unsigned long long total, free, used;
};
struct event {
    device_handle device;
    unsigned long long type, data;
    unsigned instance, compute_instance;
};

struct nvml {
    int (*init)(void);
    int (*shut_down)(void);
    int (*by_index)(unsigned index, device_handle *out);
    int (*by_uuid)(const char *uuid, device_handle *out);
    int (*name)(device_handle d, char *out, unsigned n_bytes);
    int (*use)(device_handle d, struct use *out);
    int (*memory)(device_handle d, struct memory *out);
    int (*temperature)(device_handle d, int sensor, unsigned *out);
    int (*power)(device_handle d, unsigned *out_mw);
    int (*power_limit)(device_handle d, unsigned *out_mw);
    int (*clock)(device_handle d, int which, unsigned *out_mhz);
    int (*throttle)(device_handle d, unsigned long long *out);
    int (*ecc)(device_handle d, int kind, int counter, unsigned long long *out);
    int (*rows)(device_handle d, unsigned *out_corrected, unsigned *out_uncorrected,
                unsigned *out_pending, unsigned *out_failed);
    int (*link_errors)(device_handle d, unsigned link, int counter, unsigned long long *out);
    int (*events_create)(event_set *out);
    int (*events_register)(device_handle d, unsigned long long types, event_set set);
    int (*events_wait)(event_set set, struct event *out, unsigned timeout_ms);
    int (*events_free)(event_set set);
};

/* Everything but the first rows may be missing in an older library. */
#define REQUIRED 3u
static const struct {
    const char *name;
    size_t offset;
} symbols[] = {
    {"nvmlInit_v2", offsetof(struct nvml, init)},
    {"nvmlShutdown", offsetof(struct nvml, shut_down)},
    {"nvmlDeviceGetHandleByIndex_v2", offsetof(struct nvml, by_index)},
    {"nvmlDeviceGetHandleByUUID", offsetof(struct nvml, by_uuid)},
    {"nvmlDeviceGetName", offsetof(struct nvml, name)},
    {"nvmlDeviceGetUtilizationRates", offsetof(struct nvml, use)},
    {"nvmlDeviceGetMemoryInfo", offsetof(struct nvml, memory)},
    {"nvmlDeviceGetTemperature", offsetof(struct nvml, temperature)},
    {"nvmlDeviceGetPowerUsage", offsetof(struct nvml, power)},
    {"nvmlDeviceGetEnforcedPowerLimit", offsetof(struct nvml, power_limit)},
    {"nvmlDeviceGetClockInfo", offsetof(struct nvml, clock)},
    {"nvmlDeviceGetCurrentClocksThrottleReasons", offsetof(struct nvml, throttle)},
    {"nvmlDeviceGetTotalEccErrors", offsetof(struct nvml, ecc)},
    {"nvmlDeviceGetRemappedRows", offsetof(struct nvml, rows)},
    {"nvmlDeviceGetNvLinkErrorCounter", offsetof(struct nvml, link_errors)},
    {"nvmlEventSetCreate", offsetof(struct nvml, events_create)},
    {"nvmlDeviceRegisterEvents", offsetof(struct nvml, events_register)},
    {"nvmlEventSetWait_v2", offsetof(struct nvml, events_wait)},
    {"nvmlEventSetFree", offsetof(struct nvml, events_free)},
};

/* Messages of the driver after which a GPU is not to be trusted. */
static const struct {
    unsigned long long xid;
    const char *means;
} bad_xids[] = {
    {48, "a double-bit error of its memory"},
    {64, "a row of its memory could not be remapped"},
    {79, "it has fallen off the bus"},
    {95, "an error of its memory that was not contained"},
    {119, "its system processor does not answer"},
    {120, "its system processor failed"},
};

struct gpu_health {
    unsigned number; /* of cuda:N */
    bool is_open, is_opaque; /* looked for; nothing can be known */
    void *library;
    struct nvml nvml;
    device_handle device;
    event_set events; /* NULL: none */
    unsigned long long last_xid, bad_xid; /* the newest of all, and of the bad ones; 0: none */
    const char *bad_xid_means;
    Ballast__GpuHealth said;
    char name[NAME_BYTES_MAX + 1], sick[REASON_BYTES_MAX + 1];
};

struct gpu_health *gpu_health_create(const char *device)
{
    unsigned number;
    if (sscanf(device, "cuda:%u", &number) != 1)
        return NULL;
    struct gpu_health *g = xcalloc(1, sizeof *g);
    g->number = number;
    return g;
}

void gpu_health_destroy(struct gpu_health *g)
{
    if (!g)
        return;
    if (g->events)
        g->nvml.events_free(g->events);
    if (g->library && g->nvml.shut_down)
        g->nvml.shut_down();
    if (g->library)
        dlclose(g->library);
    free(g);
}

/* ---- the library and the device ------------------------------------------------------------ */

static bool load(struct gpu_health *g)
{
    const char *other = getenv("BALLAST_NVML");
    g->library = dlopen(other ? other : LIBRARY, RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; g->library && i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(g->library, symbols[i].name);
        memcpy((char *)&g->nvml + symbols[i].offset, &symbol, sizeof symbol);
        if (!symbol && i < REQUIRED) {
            g->nvml.shut_down = NULL;
            return false;
        }
    }
    if (!g->library || g->nvml.init() != NVML_OK) {
        g->nvml.shut_down = NULL;
        return false;
    }
    return true;
}

/* NVML counts all GPUs, CUDA those of CUDA_VISIBLE_DEVICES: numbers or UUIDs, with commas. */
static int find(struct gpu_health *g)
{
    const char *at = getenv("CUDA_VISIBLE_DEVICES");
    char entry[96] = "", *end;
    if (!at)
        return g->nvml.by_index(g->number, &g->device);
    for (unsigned i = 0; i < g->number && at; i++)
        at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL;
    if (at)
        snprintf(entry, sizeof entry, "%.*s", (int)strcspn(at, ","), at);
    unsigned long index = strtoul(entry, &end, 10);
    if (*entry && !*end)
        return g->nvml.by_index((unsigned)index, &g->device);
    return *entry && g->nvml.by_uuid ? g->nvml.by_uuid(entry, &g->device) : NVML_NOT_FOUND;
}

static void watch_events(struct gpu_health *g)
{
    const struct nvml *n = &g->nvml;
    if (!n->events_create || !n->events_register || !n->events_wait || !n->events_free ||
        n->events_create(&g->events) != NVML_OK) {
        g->events = NULL;
        return;
    }
    if (n->events_register(g->device, EVENT_XID, g->events) != NVML_OK) {
        n->events_free(g->events);
        g->events = NULL;
    }
}

static void call_sick(struct gpu_health *g, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The first reason stays. */
static void call_sick(struct gpu_health *g, const char *format, ...)
{
    va_list args;
    if (g->sick[0])
        return;
    va_start(args, format);
    vsnprintf(g->sick, sizeof g->sick, format, args);
    va_end(args);
}

static void note_result(struct gpu_health *g, int result)
{
    if (result == NVML_LOST)
        call_sick(g, "the GPU is lost: the driver no longer reaches it");
    else if (result == NVML_RESET_REQUIRED)
        call_sick(g, "the GPU needs a reset");
}

/* A device that is not there is no error of ours to explain: its trainers will say so. */
static void open_device(struct gpu_health *g)
{
    g->is_open = true;
    if (!load(g)) {
        g->is_opaque = true;
        return;
    }
    int result = find(g);
    note_result(g, result);
    if (result != NVML_OK && !g->sick[0])
        g->is_opaque = true;
    if (result == NVML_OK)
        watch_events(g);
}

/* ---- a look -------------------------------------------------------------------------------- */

/* Whether a question exists and was answered. */
#define ASK(g, question, ...)                                                                      \
    ((g)->nvml.question && answered(g, (g)->nvml.question((g)->device, __VA_ARGS__)))

static bool answered(struct gpu_health *g, int result)
{
    note_result(g, result);
    return result == NVML_OK;
}

static void look_at_state(struct gpu_health *g)
{
    Ballast__GpuHealth *h = &g->said;
    struct use use;
    struct memory memory;
    unsigned x;
    unsigned long long bits;
    if (ASK(g, name, g->name, (unsigned)sizeof g->name))
        h->name = g->name;
    if (ASK(g, use, &use))
        h->utilization = use.gpu / 100.0;
    if (ASK(g, memory, &memory)) {
        h->memory_used_bytes = memory.used;
        h->memory_bytes = memory.total;
    }
    if (ASK(g, temperature, 0, &x))
        h->temperature_celsius = x;
    if (ASK(g, power, &x))
        h->power_watts = x / 1e3;
    if (ASK(g, power_limit, &x))
        h->power_limit_watts = x / 1e3;
    if (ASK(g, clock, CLOCK_SM, &x))
        h->sm_clock_mhz = x;
    if (ASK(g, clock, CLOCK_MEMORY, &x))
        h->memory_clock_mhz = x;
    if (ASK(g, throttle, &bits))
        h->throttle_reasons = bits;
}

static void look_at_memory_errors(struct gpu_health *g)
{
    Ballast__GpuHealth *h = &g->said;
    unsigned corrected, uncorrected, pending, failed;
    unsigned long long n;
    if (ASK(g, ecc, CORRECTED, SINCE_DRIVER, &n))
        h->ecc_corrected = n;
    if (ASK(g, ecc, UNCORRECTED, SINCE_DRIVER, &n))
        h->ecc_uncorrected = n;
    if (ASK(g, rows, &corrected, &uncorrected, &pending, &failed)) {
        h->rows_remapped_corrected = corrected;
        h->rows_remapped_uncorrected = uncorrected;
        h->row_remap_pending = pending;
        h->row_remap_failed = failed;
    }
    if (h->row_remap_failed)
        call_sick(g, "a row of the GPU's memory could not be remapped; it needs repair");
    if (h->ecc_uncorrected)
        call_sick(g, "%llu uncorrectable errors in the GPU's memory since its driver was loaded; a "
                  "reset clears them", (unsigned long long)h->ecc_uncorrected);
}

static void look_at_links(struct gpu_health *g)
{
    unsigned long long n;
    for (unsigned link = 0; link < LINKS_MAX; link++)
        for (unsigned counter = 0; counter < COUNTERS; counter++)
            if (g->nvml.link_errors &&
                g->nvml.link_errors(g->device, link, (int)counter, &n) == NVML_OK)
                g->said.nvlink_errors += n;
}

static void look_at_events(struct gpu_health *g)
{
    struct event e = {0};
    for (int i = 0; i < EVENTS_MAX && g->events &&
                    g->nvml.events_wait(g->events, &e, 0) == NVML_OK; i++) {
        g->last_xid = e.data;
        for (size_t k = 0; k < sizeof bad_xids / sizeof *bad_xids; k++)
            if (bad_xids[k].xid == e.data) {
                g->bad_xid = e.data;
                g->bad_xid_means = bad_xids[k].means;
            }
    }
    g->said.last_xid = g->last_xid;
    if (g->bad_xid)
        call_sick(g, "the driver reported for the GPU: %s (Xid %llu)", g->bad_xid_means,
                  g->bad_xid);
}

const Ballast__GpuHealth *gpu_health_look(struct gpu_health *g)
{
    if (!g->is_open)
        open_device(g);
    if (g->is_opaque)
        return NULL;
    ballast__gpu_health__init(&g->said);
    g->sick[0] = '\0';
    if (g->device) {
        look_at_state(g);
        look_at_memory_errors(g);
        look_at_links(g);
        look_at_events(g);
    } else {
        note_result(g, find(g)); /* lost from the beginning */
    }
    if (g->sick[0])
        g->said.sick = g->sick;
    return &g->said;
}
