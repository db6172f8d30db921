/* machine.c - which machine a worker is on, as its trainers' memory sees it */
#include "worker/machine.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"

char *machine_name(const char *domain)
{
    char boot[40] = "";
    struct stat space = {0};
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, boot, 36);
    if (fd >= 0)
        close(fd);
    if (n < 36) /* another name than anybody's: then nothing is shared */
        gethostname(boot, sizeof boot - 1);
    if (stat("/proc/self/ns/net", &space) < 0)
        space.st_ino = (ino_t)getpid();
    return xasprintf("%s.%lu/%u%s%s", boot, (unsigned long)space.st_ino, (unsigned)geteuid(),
                     *domain ? "/" : "", domain);
}

bool machine_has_same_kernel(const char *a, const char *b)
{
    size_t n = strcspn(a, "/");
    return n == strcspn(b, "/") && strncmp(a, b, n) == 0;
}
