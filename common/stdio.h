/* stdio.h - the first three descriptors, and files that may not grow */
#ifndef COMMON_STDIO_H
#define COMMON_STDIO_H

/* Whoever started this program may have closed stdin, stdout or stderr; the next thing opened
 * would then be taken for it (libuv aborts). Puts /dev/null there: reading ends at once, writing
 * fails as it would have. From then on a limit on file sizes (ulimit -f) is a full disk to who
 * writes, not the end of the process. Call it first in main. */
void stdio_hold_places(void);

#endif
