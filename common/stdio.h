/* stdio.h - the first three descriptors */
#ifndef COMMON_STDIO_H
#define COMMON_STDIO_H

/* Whoever started this program may have closed stdin, stdout or stderr; the next thing opened
 * would then be taken for it (libuv aborts). Puts /dev/null there: reading ends at once, writing
 * fails as it would have. Call it first in main. */
void stdio_hold_places(void);

#endif
