/* host_memory.h - the memory of this machine and what this process takes of it, in bytes */
#ifndef COMMON_HOST_MEMORY_H
#define COMMON_HOST_MEMORY_H

#include <stdint.h>

struct host_memory {
    uint64_t total;     /* of the machine or, where less, of the control group */
    uint64_t available; /* without driving out what is in use */
};

struct process_memory {
    uint64_t anonymous; /* resident now: heap, stacks, tensors of a CPU */
    uint64_t shared;    /* resident now: memory shared with other processes, theirs too */
    uint64_t peak;      /* the largest resident size so far, files included */
};

/* Zeros where the system does not say. */
struct host_memory    host_memory(void);
struct process_memory process_memory(void);

#endif
