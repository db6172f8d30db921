/* child.h - one trainer process: its start, its channel, its output, its end
 *
 * The process leads a session and group of its own, so that a terminal's Ctrl-C reaches only the
 * daemon and a kill reaches whatever the trainer started. It inherits /dev/null, one pipe as
 * stdout and stderr, and the channel; everything else is closed on exec. */
#ifndef WORKER_CHILD_H
#define WORKER_CHILD_H

#include <sys/types.h>

#include "common/err.h"
#include "common/types.h"
#include "proto/ballast.pb-c.h"

struct uv_loop_s;
struct child;

/* All on the loop's thread; none may call child_destroy but exited. */
struct child_events {
    void (*message)(void *context, const uint8_t *packed, size_t n_bytes);
    void (*output)(void *context, const void *bytes, size_t n_bytes);
    /* The channel has ended (why NULL) or carried nonsense. */
    void (*closed)(void *context, const char *why);
    /* The last event: the process has been waited for, its group is dead, and everything that it
     * wrote has been told. */
    void (*exited)(void *context, int exit_code, int exit_signal);
};

struct child_options {
    const char *label;  /* for people who look at ps */
    const char *folder; /* its working directory */
};

/* events is kept and context borrowed until child_destroy. Gives *out_child. */
int child_spawn(struct uv_loop_s *loop, const struct child_options *options,
                const struct child_events *events, void *context, struct child **out_child,
                struct err *err);

/* Never blocks; a dead child's messages are thrown away. */
void child_send(struct child *c, const Ballast__TrainerMessage *message);

/* SIGKILL to its group. */
void child_kill(struct child *c);

pid_t child_pid(const struct child *c);

/* Kills it if it lives. No event comes after this; the memory goes when the loop has run its
 * close callbacks. NULL is fine. */
void child_destroy(struct child *c);

#endif
