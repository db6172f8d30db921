/* field_text.c - reads one number, duration or size from the whole of a text */
#include "common/field_text.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

bool text_double(const char *text, double *out)
{
    char *end;
    if (!*text || strspn(text, "+-.0123456789eE") != strlen(text))
        return false;
    double x = strtod(text, &end);
    if (*end)
        return false;
    *out = x;
    return true;
}

int text_integer(const char *text, uint64_t *out_magnitude, bool *out_negative)
{
    const char *digits = text + (*text == '+' || *text == '-');
    double d;
    if (*digits && strspn(digits, "0123456789") == strlen(digits)) {
        errno = 0;
        unsigned long long x = strtoull(digits, NULL, 10);
        if (errno)
            return -ERANGE;
        *out_magnitude = x;
        *out_negative = *text == '-';
        return 0;
    }
    if (!text_double(text, &d) || d != floor(d)) /* 1e6 is a whole number too */
        return -EINVAL;
    if (fabs(d) >= 0x1p53)
        return -ERANGE;
    *out_magnitude = (uint64_t)fabs(d);
    *out_negative = d < 0;
    return 0;
}

bool text_count(const char *text, uint64_t min, uint64_t max, uint64_t *out)
{
    uint64_t x;
    bool is_negative;
    if (text_integer(text, &x, &is_negative) < 0 || (is_negative && x > 0) || x < min || x > max)
        return false;
    *out = x;
    return true;
}

bool text_bool(const char *text, uint64_t *out)
{
    static const char *const words[] = {"false", "true", "no", "yes", "off", "on"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strcasecmp(text, words[i])) {
            *out = i % 2;
            return true;
        }
    return false;
}

/* [D-]HH:MM:SS */
static bool text_clock(const char *text, double *out_seconds)
{
    unsigned days = 0, hours, minutes, seconds;
    int n = 0;
    if (!isdigit((unsigned char)*text))
        return false;
    if (sscanf(text, "%5u-%2u:%2u:%2u%n", &days, &hours, &minutes, &seconds, &n) != 4 ||
        text[n]) {
        days = 0;
        n = 0;
        if (sscanf(text, "%5u:%2u:%2u%n", &hours, &minutes, &seconds, &n) != 3 || text[n])
            return false;
    }
    if (minutes > 59 || seconds > 59)
        return false;
    *out_seconds = ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds;
    return true;
}

/* Reads the digits at the start of text; returns what follows them, or NULL if there are none. */
static const char *leading_number(const char *text, double *out)
{
    char digits[32];
    size_t n = strspn(text, ".0123456789");
    if (n >= sizeof digits)
        return NULL;
    memcpy(digits, text, n);
    digits[n] = '\0';
    return text_double(digits, out) ? text + n : NULL;
}

bool text_duration(const char *text, double *out_seconds)
{
    static const struct { const char *unit; double seconds; } units[] = {
        {"ms", 1e-3}, {"us", 1e-6}, {"d", 86400}, {"h", 3600}, {"m", 60}, {"s", 1},
    };
    const size_t n_units = sizeof units / sizeof *units;
    double sum = 0, x;
    if (text_clock(text, out_seconds))
        return true;
    if (text_double(text, &x)) {
        if (x < 0)
            return false;
        *out_seconds = x;
        return true;
    }
    if (!*text)
        return false;
    while (*text) {
        size_t u = 0;
        text = leading_number(text, &x);
        while (text && u < n_units && strncmp(text, units[u].unit, strlen(units[u].unit)) != 0)
            u++;
        if (!text || u == n_units)
            return false;
        sum += x * units[u].seconds;
        text += strlen(units[u].unit);
    }
    *out_seconds = sum;
    return true;
}

bool text_size(const char *text, double *out_bytes)
{
    static const struct { const char *unit; double bytes; } units[] = {
        {"", 1}, {"B", 1},
        {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
        {"Ki", 0x1p10}, {"Mi", 0x1p20}, {"Gi", 0x1p30}, {"Ti", 0x1p40},
        {"KB", 1e3}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12},
    };
    double x;
    const char *unit = leading_number(text, &x);
    if (!unit)
        return false;
    unit += *unit == ' ';
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (!strcmp(unit, units[i].unit)) {
            *out_bytes = x * units[i].bytes;
            return true;
        }
    return false;
}

void text_shortest(double x, char out[NUMBER_TEXT_BYTES])
{
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(out, NUMBER_TEXT_BYTES, "%.*g", digits, x);
        if (strtod(out, NULL) != x)
            continue;
        if (digits <= 15 && fabs(x) >= 1 && fabs(x) < 1e7) /* 700 rather than 7e+02 */
            snprintf(out, NUMBER_TEXT_BYTES, "%.15g", x);
        break;
    }
}
