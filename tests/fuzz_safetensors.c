/* fuzz_safetensors.c - any bytes as a safetensors file: refused, or readable to the last byte */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    char path[64];
    struct safetensors *st;
    struct err err = {0};
    int fd = memfd_create("fuzz", MFD_CLOEXEC);

    if (fd < 0 || write(fd, bytes, n_bytes) != (ssize_t)n_bytes)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (safetensors_open(path, &st, &err) == 0) {
        uint64_t sum = 0;
        for (size_t i = 0; i < safetensors_count(st); i++) {
            const struct st_view *v = safetensors_at(st, i);
            for (uint64_t b = 0; b < v->n_bytes; b++)
                sum += v->data[b];
            float x;
            if (v->n_elements && st_read_f32(v, v->n_elements - 1, 1, &x, &err) == 0)
                sum += x > 0;
            if (safetensors_find(st, v->tensor.name) != v)
                abort();
        }
        safetensors_close(st);
        close(fd);
        return sum == UINT64_MAX;
    }
    close(fd);
    if (!err.code || !err.text[0])
        abort(); /* a refusal says why */
    return 0;
}
