/* machine.h - which machine a worker is on, as its trainers' memory sees it */
#ifndef WORKER_MACHINE_H
#define WORKER_MACHINE_H

#include <stdbool.h>

/* "KERNEL/USER" or "KERNEL/USER/DOMAIN": trainers of workers that say the same can share memory.
 * KERNEL names the boot of the machine and its network namespace, where abstract sockets are; they
 * hand memory to nobody but their own user. Gives, freed with free(). */
char *machine_name(const char *domain);

/* Whether both are the same KERNEL: what one listens to on loopback the other reaches. */
bool machine_has_same_kernel(const char *a, const char *b);

#endif
