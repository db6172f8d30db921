/* ctl_zip.c - finds a file in an archive whose files are stored as they are */
#include "coordinator/ctl_zip.h"

#include <errno.h>
#include <string.h>

#define END_BYTES     22u /* of the record that ends an archive, without its comment */
#define ENTRY_BYTES   46u /* of an entry of the directory, without name and extras */
#define LOCAL_BYTES   30u /* of the head before a file, likewise */
#define COMMENT_MAX   65535u

static uint32_t u16(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8;
}

static uint32_t u32(const uint8_t *p)
{
    return u16(p) | u16(p + 2) << 16;
}

/* The last END record, or NULL. */
static const uint8_t *find_end(const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i <= COMMENT_MAX && i + END_BYTES <= n; i++) {
        const uint8_t *p = bytes + n - END_BYTES - i;
        if (!memcmp(p, "PK\5\6", 4) && u16(p + 20) == i)
            return p;
    }
    return NULL;
}

static bool is_named(const uint8_t *path, size_t n_path, const char *name)
{
    size_t n = strlen(name);
    return n_path > n && path[n_path - n - 1] == '/' && !memcmp(path + n_path - n, name, n);
}

/* Where the bytes of an entry are, past their own head. */
static int locate(const uint8_t *bytes, size_t n_bytes, const uint8_t *entry, const char *name,
                  const uint8_t **out, size_t *out_n, struct err *err)
{
    uint32_t method = u16(entry + 10), size = u32(entry + 24), at = u32(entry + 42);
    if (method != 0 || u32(entry + 20) != size)
        return err_set(err, -EINVAL, "%s is compressed; torch.save stores as it is", name);
    if (at > n_bytes || n_bytes - at < LOCAL_BYTES || memcmp(bytes + at, "PK\3\4", 4))
        return err_set(err, -EINVAL, "the archive is damaged at %s", name);
    uint64_t first = (uint64_t)at + LOCAL_BYTES + u16(bytes + at + 26) + u16(bytes + at + 28);
    if (first > n_bytes || n_bytes - first < size)
        return err_set(err, -EINVAL, "the archive ends within %s", name);
    *out = bytes + first;
    *out_n = size;
    return 0;
}

int zip_find(const uint8_t *bytes, size_t n_bytes, const char *name, const uint8_t **out,
             size_t *out_n, struct err *err)
{
    const uint8_t *end = find_end(bytes, n_bytes);
    if (!end)
        return err_set(err, -EINVAL, "the archive has no end; is the file whole?");
    uint64_t at = u32(end + 16);
    for (uint32_t left = u16(end + 10); left; left--) {
        if (at > n_bytes || n_bytes - at < ENTRY_BYTES || memcmp(bytes + at, "PK\1\2", 4))
            return err_set(err, -EINVAL, "the archive's directory is damaged");
        const uint8_t *entry = bytes + at;
        uint32_t n_path = u16(entry + 28);
        if (n_bytes - at - ENTRY_BYTES < n_path)
            return err_set(err, -EINVAL, "the archive's directory is damaged");
        if (is_named(entry + ENTRY_BYTES, n_path, name))
            return locate(bytes, n_bytes, entry, name, out, out_n, err);
        at += ENTRY_BYTES + n_path + u16(entry + 30) + u16(entry + 32);
    }
    return err_set(err, -ENOENT, "no %s in the archive", name);
}
