/* host_memory.c - reads what Linux says of memory under /proc and /sys */
#include "common/host_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define GROUP "/sys/fs/cgroup/memory." /* of the process, in a container; version 2 */

struct wanted {
    const char *key;
    uint64_t   *out;
};

/* Lines of "Key:   123 kB". */
static void read_kilobytes(const char *path, const struct wanted *wanted, size_t n)
{
    FILE *f = fopen(path, "re");
    char line[256];
    while (f && fgets(line, sizeof line, f))
        for (size_t i = 0; i < n; i++) {
            size_t length = strlen(wanted[i].key);
            if (strncmp(line, wanted[i].key, length) == 0 && line[length] == ':' &&
                sscanf(line + length + 1, "%" SCNu64, wanted[i].out) == 1)
                *wanted[i].out *= 1024;
        }
    if (f)
        fclose(f);
}

/* UINT64_MAX where there is no such number, as for "max". */
static uint64_t read_number(const char *path)
{
    uint64_t n = UINT64_MAX;
    FILE *f = fopen(path, "re");
    if (f && fscanf(f, "%" SCNu64, &n) != 1)
        n = UINT64_MAX;
    if (f)
        fclose(f);
    return n;
}

struct host_memory host_memory(void)
{
    struct host_memory m = {0};
    struct wanted wanted[] = {{"MemTotal", &m.total}, {"MemAvailable", &m.available}};
    read_kilobytes("/proc/meminfo", wanted, sizeof wanted / sizeof *wanted);
    uint64_t most = read_number(GROUP "max"), used = read_number(GROUP "current");
    if (most < m.total) {
        uint64_t rest = used < most ? most - used : 0;
        m.total = most;
        m.available = rest < m.available ? rest : m.available;
    }
    return m;
}

struct process_memory process_memory(void)
{
    struct process_memory m = {0};
    struct wanted wanted[] = {
        {"RssAnon", &m.anonymous}, {"RssShmem", &m.shared}, {"VmHWM", &m.peak},
    };
    read_kilobytes("/proc/self/status", wanted, sizeof wanted / sizeof *wanted);
    return m;
}
