/* coll_nccl_memory.c - what was told to which communicator */
#include "worker/coll_nccl_memory.h"

#include <stdlib.h>

#include "common/log.h"
#include "common/mem.h"

/* A library that is older than the header, or a header than the library, is none that fails. */
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *p, size_t n_bytes, void **out_handle)
    __attribute__((weak));
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) __attribute__((weak));

static bool can_register(void)
{
    return ncclCommRegister != NULL && ncclCommDeregister != NULL;
}

static void refuse(struct nccl_memory *m, const char *why)
{
    if (!m->is_refused)
        log_warn("msg=\"NCCL does not register memory (%s); tensors travel as without "
                 "parallel.register_buffers\"", why);
    m->is_refused = true;
}

void nccl_memory_add(struct nccl_memory *m, const ncclComm_t *comms, void *p, size_t n_bytes)
{
    struct nccl_known x = {.p = p};
    if (!can_register()) {
        refuse(m, "it is older than 2.19");
        return;
    }
    for (uint32_t i = 0; i < COLL_GROUPS_MAX && !m->is_refused; i++) {
        ncclResult_t r = comms[i] ? ncclCommRegister(comms[i], p, n_bytes, &x.handles[i])
                                  : ncclSuccess;
        if (r != ncclSuccess) {
            x.handles[i] = NULL;
            refuse(m, ncclGetErrorString(r));
        }
    }
    m->known = xrealloc(m->known, (m->n_known + 1) * sizeof *m->known);
    m->known[m->n_known++] = x;
}

/* One that fails leaves a communicator with what it knows, which its end takes along. */
static void drop(const struct nccl_known *x, const ncclComm_t *comms)
{
    for (uint32_t i = 0; i < COLL_GROUPS_MAX; i++)
        if (x->handles[i])
            ncclCommDeregister(comms[i], x->handles[i]);
}

void nccl_memory_drop(struct nccl_memory *m, const ncclComm_t *comms, const void *p)
{
    for (size_t i = 0; i < m->n_known; i++)
        if (m->known[i].p == p) {
            drop(&m->known[i], comms);
            m->known[i] = m->known[--m->n_known];
            return;
        }
}

void nccl_memory_drop_all(struct nccl_memory *m, const ncclComm_t *comms)
{
    for (size_t i = 0; i < m->n_known; i++)
        drop(&m->known[i], comms);
    nccl_memory_forget(m);
}

void nccl_memory_forget(struct nccl_memory *m)
{
    free(m->known);
    m->known = NULL;
    m->n_known = 0;
}
