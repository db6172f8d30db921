/* tensor_kind.h - what a checkpoint's tensor is, by its name */
#ifndef COMMON_TENSOR_KIND_H
#define COMMON_TENSOR_KIND_H

#include "common/tensor_list.h"

enum tensor_kind { TENSOR_TEXT, TENSOR_SCALE, TENSOR_TABLE, TENSOR_MTP, TENSOR_VISION };

enum tensor_kind tensor_kind_of(const struct tensor_group *g);

/* How many numbers one stored element holds: 4-bit values lie two in a byte, eight in a word.
 * bits: of the checkpoint's packing, 0 where it is not known. */
uint64_t tensor_unpacked(const struct tensor_group *g, uint32_t bits);

/* The name as it would be unpacked. */
#define TENSOR_NAME_BYTES 512
void tensor_plain_name(const char *name, char out[TENSOR_NAME_BYTES]);

#endif
