/* channel.h - the socketpair between a worker's daemon and its trainer
 *
 * A frame is a u32 length, little endian, and that many bytes of a packed TrainerMessage. The
 * daemon reads on its loop and so uses the reader and channel_pack; the trainer has a channel,
 * whose one thread reads and writes, so that a slow daemon never holds a training step up. */
#ifndef WORKER_CHANNEL_H
#define WORKER_CHANNEL_H

#include "common/err.h"
#include "common/types.h"
#include "proto/ballast.pb-c.h"

#define CHANNEL_FD 3 /* in the trainer */

/* An orphaned trainer ends itself after this long, whatever its step loop does. */
#define CHANNEL_ORPHAN_MS 1500

/* ---- frames ----------------------------------------------------------------------------- */

/* Gives *out_bytes, freed with free(); returns its size. */
size_t channel_pack(const Ballast__TrainerMessage *m, uint8_t **out_bytes);

/* All zero is an empty reader. */
struct channel_reader {
    uint8_t *bytes;
    size_t   n_bytes, n_alloc, n_taken;
};

void channel_reader_add(struct channel_reader *r, const void *bytes, size_t n_bytes);

/* Returns 1 with the packed message of the next frame, which lives until the next call, 0 when no
 * whole frame is there yet, or -EPROTO for a length that none has: nothing after it can be read. */
int  channel_reader_next(struct channel_reader *r, const uint8_t **out_bytes, size_t *out_n_bytes,
                         struct err *err);
void channel_reader_fini(struct channel_reader *r);

/* ---- the trainer's end ------------------------------------------------------------------- */

struct channel;

/* These run on the channel's thread, so they only set flags, copy, and call coll's abort. What they
 * are given lives until they return. */
struct channel_events {
    /* NULL when the daemon is gone: the process then ends by itself after CHANNEL_ORPHAN_MS, and no
     * other event comes. A repeated STOP comes again, perhaps with a harder mode. */
    void (*stop)(void *user, const Ballast__Stop *stop);
    void (*prepare)(void *user, const Ballast__Prepare *prepare);
    void (*abort_plan)(void *user, const Ballast__AbortPlan *abort_plan);
    void (*settings)(void *user, const Ballast__Settings *settings);
    void (*peers)(void *user, const Ballast__Peers *peers);
};

/* Takes fd and starts the thread; keeps events. They may come from now until channel_close. */
int channel_open(int fd, const struct channel_events *events, void *user,
                 struct channel **out_channel, struct err *err);

/* Blocks until the START is here. *out_start is the channel's and lives until channel_close.
 * Returns -ECONNRESET if the daemon went away first. */
int channel_wait_start(struct channel *c, const Ballast__Start **out_start, struct err *err);

/* All copy what they are given, never block, and may be called by any thread. A newer state
 * replaces one that the daemon has not read yet, so every state repeats all that holds. When the
 * daemon reads too slowly the oldest waiting reports go first; states are never lost. */
void channel_send_state(struct channel *c, const Ballast__RankState *state);
void channel_send_step(struct channel *c, const Ballast__StepReport *step);
void channel_send_load(struct channel *c, const Ballast__LoadReport *load);

/* Waits until all that was sent has left this process, at most a second. */
void channel_settle(struct channel *c);

/* While on, the last state is sent again every second in which this process has made progress
 * (common/progress.h): the daemon then knows that it is alive. */
void channel_repeat_state(struct channel *c, bool is_on);

/* Waits until all is sent, at most one second, and ends the thread. NULL is fine. */
void channel_close(struct channel *c);

#endif
