/* safetensors.h - reads and writes the safetensors format, one file or a folder of shards
 *
 * Reading maps the files and checks the whole header at open: the tensors cover the data without
 * holes or overlaps, names are unique and printable, sizes fit dtype and shape. Writing is in two
 * parts, so that many processes fill one file: a layout says where every tensor lies, one process
 * creates the file of its final size, and each writes its slices in place. */
#ifndef COMMON_SAFETENSORS_H
#define COMMON_SAFETENSORS_H

#include "common/err.h"
#include "common/types.h"

/* An element may be part of a byte (F4, F6): sizes are counted in bits. */
enum st_dtype {
    ST_BOOL, ST_F4, ST_F6_E2M3, ST_F6_E3M2, ST_U8, ST_I8, ST_F8_E5M2, ST_F8_E4M3, ST_F8_E8M0,
    ST_F8_E4M3FNUZ, ST_F8_E5M2FNUZ, ST_I16, ST_U16, ST_F16, ST_BF16, ST_I32, ST_U32, ST_F32,
    ST_C64, ST_F64, ST_I64, ST_U64,
    ST_DTYPES
};

const char *st_dtype_name(enum st_dtype dtype);
uint32_t    st_dtype_bits(enum st_dtype dtype);

struct st_tensor {
    const char *name;
    enum st_dtype dtype;
    uint32_t n_dims;                /* 0: a scalar */
    uint64_t dims[TENSOR_DIMS_MAX]; /* row-major; a 0 makes it empty */
};

/* What a tensor's bytes add up to, taken slice by slice in any order: of its words, of the dtype's
 * width, x[i], the sums of x[i] and of (i + 1) x[i] modulo 2^64. */
struct st_sum {
    uint64_t plain, weighted;
};

/* ---- reading ---- */

struct safetensors;

struct st_view {
    struct st_tensor tensor;
    uint64_t       n_elements, n_bytes;
    const uint8_t *data;  /* little-endian, unaligned; lives until safetensors_close */
    const char    *file;  /* its path */
};

/* path: a .safetensors file, a .safetensors.index.json, or a folder that holds model.safetensors
 * or model.safetensors.index.json. Gives *out. -ENOENT, -EINVAL, -EFBIG or the error of the
 * system, with the file's name and the tensor. */
int  safetensors_open(const char *path, struct safetensors **out, struct err *err);
void safetensors_close(struct safetensors *st);

size_t safetensors_count(const struct safetensors *st);
/* In ascending order of names. */
const struct st_view *safetensors_at(const struct safetensors *st, size_t i);
/* NULL if there is none of that name. */
const struct st_view *safetensors_find(const struct safetensors *st, const char *name);

/* Elements first .. first + n as floats. F32, BF16 and F16; -ENOTSUP names any other dtype. */
int st_read_f32(const struct st_view *v, uint64_t first, uint64_t n, float *out, struct err *err);
/* Of the whole tensor, as it lies in the file. */
struct st_sum st_sum(const struct st_view *v);
/* The same of I32 as int32. */
int st_read_i32(const struct st_view *v, uint64_t first, uint64_t n, int32_t *out,
                struct err *err);

/* ---- writing ---- */

struct st_layout {
    const struct st_tensor *tensors; /* the caller's; kept until st_layout_fini */
    size_t    n_tensors;
    uint64_t *offset;  /* of each tensor's first byte in the file */
    char     *header;  /* length, JSON and padding: the file's first header_bytes */
    size_t    header_bytes;
    uint64_t  file_bytes;
};

/* Tensors lie in the order given. -EINVAL for a name that is empty, unprintable or given twice,
 * or a size that overflows. Gives *out, ended with st_layout_fini. */
int  st_layout_init(const struct st_tensor *tensors, size_t n_tensors, struct st_layout *out,
                    struct err *err);
void st_layout_fini(struct st_layout *l);

struct st_writer;

/* Makes path, of its final size, with the header; an old file of that name is replaced. By one
 * process, before the others open it. */
int st_create(const char *path, const struct st_layout *l, struct err *err);

/* Opens what st_create made. Keeps l until close. Gives *out. */
int st_writer_open(const char *path, const struct st_layout *l, struct st_writer **out,
                   struct err *err);
/* Elements first .. first + n of tensor i, converted to its dtype: F32, BF16 or F16, to nearest,
 * ties to even. -ERANGE names a finite number that the dtype has no room for. */
int st_write_f32(struct st_writer *w, size_t i, uint64_t first, uint64_t n, const float *values,
                 struct err *err);
/* The whole of tensor i as it lies in a file: what its dtype and shape make in bytes. */
int st_write_bytes(struct st_writer *w, size_t i, const uint8_t *bytes, struct err *err);
/* Of what w has written of tensor i. */
struct st_sum st_writer_sum(const struct st_writer *w, size_t i);
/* Makes what was written durable and ends w, in every case. */
int st_writer_close(struct st_writer *w, struct err *err);

#endif
