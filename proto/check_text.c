/* check_text.c - names, texts and statuses */
#include "proto/check.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool check_is_name(const char *text)
{
    size_t n = strlen(text);
    if (n == 0 || n > NAME_BYTES_MAX || !isalnum((unsigned char)text[0]))
        return false;
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)text[i]) && !strchr("._-", text[i]))
            return false;
    return true;
}

/* The bytes of one well-formed character that does not steer a terminal, or 0. */
static size_t character_bytes(const unsigned char *s, size_t n)
{
    static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (s[0] < 0x80)
        return s[0] >= ' ' && s[0] != 0x7f;
    size_t size = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || size > n)
        return 0;
    uint32_t c = s[0] & (0xffu >> (size + 1));
    for (size_t i = 1; i < size; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (s[i] & 0x3f);
    }
    bool is_surrogate = c >= 0xd800 && c <= 0xdfff, is_c1 = c < 0xa0;
    return c < smallest[size] || c > 0x10ffff || is_surrogate || is_c1 ? 0 : size;
}

static bool is_clean(const char *text, size_t n_bytes_max, const char *also)
{
    size_t n = strlen(text);
    if (n > n_bytes_max)
        return false;
    for (size_t i = 0; i < n;) {
        size_t size = strchr(also, text[i]) ? 1
                    : character_bytes((const unsigned char *)text + i, n - i);
        if (!size)
            return false;
        i += size;
    }
    return true;
}

bool check_is_text(const char *text, size_t n_bytes_max)
{
    return is_clean(text, n_bytes_max, "");
}

bool check_is_lines(const char *text, size_t n_bytes_max)
{
    return is_clean(text, n_bytes_max, "\n\r\t");
}

const char *check_code_name(Ballast__Code code)
{
    const ProtobufCEnumValue *v =
        protobuf_c_enum_descriptor_get_value(&ballast__code__descriptor, (int)code);
    return v ? v->name : "UNKNOWN";
}

void check_status(Ballast__Status *status, struct arena *arena, Ballast__Code code,
                  const char *reason, const char *format, ...)
{
    ballast__status__init(status);
    status->code = code;
    if (reason)
        status->reason = arena_strdup(arena, reason);
    if (!format)
        return;
    char text[TEXT_BYTES_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    status->message = arena_strdup(arena, text);
}
