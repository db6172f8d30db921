/* device.c - devices by name */
#include "kernels/device.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/version.h"

#define DIGITS_MAX 3 /* of a GPU's number */

int device_check(const char *name, struct err *err)
{
    if (!strcmp(name, "cpu"))
        return 0;
    const char *number = name + strlen("cuda:");
    size_t n_digits = strncmp(name, "cuda:", strlen("cuda:")) ? 0 : strlen(number);
    if (n_digits < 1 || n_digits > DIGITS_MAX || strspn(number, "0123456789") != n_digits)
        return err_set(err, -EINVAL, "device '%s': expected cpu or cuda:N, as in cuda:0", name);
    if (!BALLAST_HAS_CUDA)
        return err_set(err, -ENOTSUP,
                       "device '%s': this build has no GPU code; configure it with "
                       "-DBALLAST_CUDA=on, or use --device cpu", name);
    return 0;
}

int device_open(const char *name, enum elem_type type, uint32_t n_threads, bool deterministic,
                struct device **out, struct err *err)
{
    int rc = device_check(name, err);
    if (rc < 0)
        return rc;
#if BALLAST_HAS_CUDA
    if (strcmp(name, "cpu") != 0) {
        rc = device_cuda_open((uint32_t)strtoul(name + strlen("cuda:"), NULL, 10), type,
                              deterministic, out, err);
        if (rc == 0 && n_threads > 0)
            (*out)->n_threads = n_threads;
        return rc;
    }
#endif
    if (type != ELEM_F32)
        return err_set(err, -EINVAL, "device cpu: computes in f32 only; use precision f32, or a "
                       "GPU");
    return device_cpu_open(n_threads, deterministic, out, err);
}
