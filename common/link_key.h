/* link_key.h - one CURVE key as Z85 text, and what a link does with keys */
#ifndef COMMON_LINK_KEY_H
#define COMMON_LINK_KEY_H

#include <stdbool.h>

#include "common/err.h"
#include "common/keyring.h"

/* Whether the text is 32 bytes in Z85. */
bool link_key_is_one(const char *text);

int link_key_make(char out_public[KEY_TEXT_BYTES], char out_secret[KEY_TEXT_BYTES],
                  struct err *err);
/* False for what is no secret key. */
bool link_key_public(const char *secret, char out_public[KEY_TEXT_BYTES]);

#endif
