/* tame.h - foreign text in lines for people: nothing in it may steer a terminal, or show as what
 * it is not */
#ifndef COMMON_TAME_H
#define COMMON_TAME_H

#include <stddef.h>

/* Length of the printable UTF-8 sequence that begins here; 0 for a control character (U+0080 to
 * 9f too), a mark that turns or breaks lines of text, and bytes that are no UTF-8. */
size_t tame_printable(const char *text, size_t n_bytes);

/* Each byte of what is not printable becomes '?'. */
void tame_bytes(char *text, size_t n_bytes);
void tame_text(char *text);

#endif
