/* fake_nvml.c - the functions that gpu_health loads, over one struct */
#include "tests/fake_nvml.h"

#include <stdio.h>
#include <string.h>

static struct fake_gpu gpu;

#define PUBLIC __attribute__((visibility("default")))
#define ANSWER(name, ...) PUBLIC int name(__VA_ARGS__); PUBLIC int name(__VA_ARGS__)

struct fake_gpu *fake_nvml(void);
PUBLIC struct fake_gpu *fake_nvml(void)
{
    return &gpu;
}

ANSWER(nvmlInit_v2, void)
{
    gpu.n_inits++;
    return 0;
}

ANSWER(nvmlShutdown, void)
{
    gpu.n_inits--;
    return 0;
}

ANSWER(nvmlDeviceGetHandleByIndex_v2, unsigned index, void **out)
{
    gpu.index = index;
    *out = &gpu;
    return gpu.result;
}

ANSWER(nvmlDeviceGetHandleByUUID, const char *uuid, void **out)
{
    snprintf(gpu.uuid, sizeof gpu.uuid, "%s", uuid);
    *out = &gpu;
    return gpu.result;
}

ANSWER(nvmlDeviceGetName, void *d, char *out, unsigned n_bytes)
{
    (void)d;
    snprintf(out, n_bytes, "Fake H200");
    return gpu.result;
}

ANSWER(nvmlDeviceGetUtilizationRates, void *d, unsigned *out)
{
    (void)d;
    out[0] = gpu.percent;
    out[1] = 0;
    return gpu.result;
}

ANSWER(nvmlDeviceGetMemoryInfo, void *d, unsigned long long *out)
{
    (void)d;
    out[0] = gpu.total;
    out[1] = gpu.total - gpu.used;
    out[2] = gpu.used;
    return gpu.result;
}

ANSWER(nvmlDeviceGetTemperature, void *d, int sensor, unsigned *out)
{
    (void)d;
    *out = gpu.celsius;
    return sensor == 0 ? gpu.result : 2;
}

ANSWER(nvmlDeviceGetPowerUsage, void *d, unsigned *out)
{
    (void)d;
    *out = gpu.milliwatts;
    return gpu.result;
}

/* nvmlDeviceGetEnforcedPowerLimit is missing, as something is in an older library. */

ANSWER(nvmlDeviceGetClockInfo, void *d, int which, unsigned *out)
{
    (void)d;
    *out = which == 1 ? gpu.sm_mhz : gpu.memory_mhz;
    return gpu.result;
}

ANSWER(nvmlDeviceGetCurrentClocksThrottleReasons, void *d, unsigned long long *out)
{
    (void)d;
    *out = gpu.throttle;
    return gpu.result;
}

ANSWER(nvmlDeviceGetTotalEccErrors, void *d, int kind, int counter, unsigned long long *out)
{
    (void)d;
    *out = kind == 0 ? gpu.corrected : gpu.uncorrected;
    return counter == 0 ? gpu.result : 2;
}

ANSWER(nvmlDeviceGetRemappedRows, void *d, unsigned *corrected, unsigned *uncorrected,
       unsigned *pending, unsigned *failed)
{
    (void)d;
    *corrected = gpu.rows_corrected;
    *uncorrected = gpu.rows_uncorrected;
    *pending = gpu.remap_pending;
    *failed = gpu.remap_failed;
    return gpu.result;
}

/* Only the first link is there. */
ANSWER(nvmlDeviceGetNvLinkErrorCounter, void *d, unsigned link, int counter,
       unsigned long long *out)
{
    (void)d;
    *out = counter == 0 ? gpu.link_errors : 0;
    return link == 0 ? gpu.result : 2;
}

ANSWER(nvmlEventSetCreate, void **out)
{
    *out = &gpu;
    return 0;
}

ANSWER(nvmlDeviceRegisterEvents, void *d, unsigned long long types, void *set)
{
    (void)d, (void)set;
    return types == 8 ? 0 : 2;
}

struct event {
    void *device;
    unsigned long long type, data;
    unsigned instances[2];
};

ANSWER(nvmlEventSetWait_v2, void *set, struct event *out, unsigned timeout_ms)
{
    (void)set, (void)timeout_ms;
    if (!gpu.xids[0])
        return 10;
    *out = (struct event){.device = &gpu, .type = 8, .data = gpu.xids[0]};
    memmove(gpu.xids, gpu.xids + 1, sizeof gpu.xids - sizeof *gpu.xids);
    return 0;
}

ANSWER(nvmlEventSetFree, void *set)
{
    (void)set;
    return 0;
}
