/* failpoint.h - places where a test may make a process fail: BALLAST_FAILPOINT="name[:n]:action"
 *
 * At the n-th time (from 1, the default) that it comes by, the process dies (kill), the call fails
 * as with a full disk (enospc) or some other way (error), or it sleeps (sleep_MS, or while_PATH: as
 * long as there is such a file). With slow_MS it sleeps every time, and says nothing of it. Unset,
 * it costs one comparison. */
#ifndef COMMON_FAILPOINT_H
#define COMMON_FAILPOINT_H

/* 0, or the negative errno that the caller must behave as if it had got. */
int failpoint(const char *name);

#endif
