/* link_key.c - keys by libzmq's own functions */
#include "common/link_key.h"

#include <errno.h>
#include <string.h>

#include <zmq.h>

bool link_key_is_one(const char *text)
{
    unsigned char bytes[32];
    return strlen(text) == KEY_TEXT_BYTES - 1 && zmq_z85_decode(bytes, text);
}

int link_key_make(char out_public[KEY_TEXT_BYTES], char out_secret[KEY_TEXT_BYTES],
                  struct err *err)
{
    if (!zmq_has("curve") || zmq_curve_keypair(out_public, out_secret) < 0)
        return err_set(err, -ENOTSUP, "this libzmq has no CURVE, which keys need");
    return 0;
}

bool link_key_public(const char *secret, char out_public[KEY_TEXT_BYTES])
{
    return link_key_is_one(secret) && zmq_curve_public(out_public, secret) == 0;
}
