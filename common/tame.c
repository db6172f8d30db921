/* tame.c - which bytes of foreign text a terminal may see
 *
 * One definition for error lines, logs and tables: where each had its own, each forgot another
 * kind of control character. */
#include "common/tame.h"

#include <stdbool.h>
#include <string.h>

/* Of three bytes: marks that turn the direction of text or break lines, U+200e, 200f, 2028..202e
 * and 2066..2069. They would show a name as what it is not. */
static bool turns_text(const unsigned char *s)
{
    return s[0] == 0xe2 && ((s[1] == 0x80 && (s[2] == 0x8e || s[2] == 0x8f ||
                                              (s[2] >= 0xa8 && s[2] <= 0xae))) ||
                            (s[1] == 0x81 && s[2] >= 0xa6 && s[2] <= 0xa9));
}

size_t tame_printable(const char *text, size_t n)
{
    const unsigned char *s = (const unsigned char *)text;
    if (n && s[0] >= 0x20 && s[0] < 0x7f)
        return 1;
    size_t length = !n ? 0 : s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : s[0] >= 0xe0 && s[0] < 0xf0 ? 3
                  : s[0] >= 0xf0 && s[0] < 0xf5 ? 4 : 0;
    if (!length || length > n || (s[0] == 0xc2 && s[1] < 0xa0)) /* U+0080..9f are controls */
        return 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    return length == 3 && turns_text(s) ? 0 : length;
}

void tame_bytes(char *text, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t length = tame_printable(text + i, n - i);
        if (!length)
            text[i] = '?';
        i += length ? length : 1;
    }
}

void tame_text(char *text)
{
    tame_bytes(text, strlen(text));
}
