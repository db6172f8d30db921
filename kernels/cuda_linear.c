/* cuda_linear.c - on the GPU: y = x w^T and its gradients, also a head at a time */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_products.h"

/* What in the cpu's terms is product(y, x, transposed(w)). */
static void forward(struct device *dev, const char *op, void *y, enum elem_type y_type,
                    const void *x, const void *w, int64_t n, int64_t in, int64_t out, float beta)
{
    struct cuda_product p = {
        .c = y, .a = x, .b = w, .m = n, .n = out, .k = in, .c_stride = out, .a_stride = in,
        .b_stride = in, .b_transposed = true, .type = dev->elem, .c_type = y_type, .alpha = 1,
        .beta = beta,
    };
    cuda_product(dev, op, &p);
}

void cuda_linear(struct device *dev, elem_ptr y, const_elem_ptr x, const_elem_ptr w, int64_t n,
                 int64_t in, int64_t out, float beta)
{
    forward(dev, "linear", y.p, dev->elem, x.p, w.p, n, in, out, beta);
}

void cuda_linear_f32(struct device *dev, float *y, const_elem_ptr x, const_elem_ptr w, int64_t n,
                     int64_t in, int64_t out, float beta)
{
    forward(dev, "linear_f32", y, ELEM_F32, x.p, w.p, n, in, out, beta);
}

void cuda_linear_dx(struct device *dev, elem_ptr dx, const_elem_ptr dy, const_elem_ptr w,
                    int64_t n, int64_t in, int64_t out, float beta)
{
    struct cuda_product p = {
        .c = dx.p, .a = dy.p, .b = w.p, .m = n, .n = in, .k = out, .c_stride = in,
        .a_stride = out, .b_stride = in, .type = dev->elem, .c_type = dev->elem, .alpha = 1,
        .beta = beta,
    };
    cuda_product(dev, "linear_dx", &p);
}

void cuda_linear_dw(struct device *dev, float *acc_dw, const_elem_ptr dy, const_elem_ptr x,
                    int64_t n, int64_t in, int64_t out)
{
    struct cuda_product p = {
        .c = acc_dw, .a = dy.p, .b = x.p, .m = out, .n = in, .k = n, .c_stride = in,
        .a_stride = out, .b_stride = in, .a_transposed = true, .type = dev->elem,
        .c_type = ELEM_F32, .alpha = 1, .beta = 1,
    };
    if (n > 0)
        cuda_product(dev, "linear_dw", &p);
}

/* ---- a head at a time: rows of a head are n_heads strides apart ---- */

void cuda_heads_linear(struct device *dev, elem_ptr y, int64_t y_stride, const_elem_ptr x,
                       int64_t x_stride, const_elem_ptr w, int64_t w_stride, int64_t n,
                       int32_t n_heads, int64_t in, int64_t out, float beta)
{
    struct cuda_product p = {
        .c = y.p, .a = x.p, .b = w.p, .m = n, .n = out, .k = in, .c_stride = n_heads * y_stride,
        .a_stride = n_heads * x_stride, .b_stride = in, .b_transposed = true, .type = dev->elem,
        .c_type = dev->elem, .n_batches = n_heads, .c_batch = y_stride, .a_batch = x_stride,
        .b_batch = w_stride, .alpha = 1, .beta = beta,
    };
    cuda_product(dev, "heads_linear", &p);
}

void cuda_heads_linear_dx(struct device *dev, elem_ptr dx, int64_t x_stride, const_elem_ptr dy,
                          int64_t y_stride, const_elem_ptr w, int64_t w_stride, int64_t n,
                          int32_t n_heads, int64_t in, int64_t out, float beta)
{
    struct cuda_product p = {
        .c = dx.p, .a = dy.p, .b = w.p, .m = n, .n = in, .k = out,
        .c_stride = n_heads * x_stride, .a_stride = n_heads * y_stride, .b_stride = in,
        .type = dev->elem, .c_type = dev->elem, .n_batches = n_heads, .c_batch = x_stride,
        .a_batch = y_stride, .b_batch = w_stride, .alpha = 1, .beta = beta,
    };
    cuda_product(dev, "heads_linear_dx", &p);
}

void cuda_heads_linear_dw(struct device *dev, float *acc_dw, int64_t w_stride, const_elem_ptr dy,
                          int64_t y_stride, const_elem_ptr x, int64_t x_stride, int64_t n,
                          int32_t n_heads, int64_t in, int64_t out)
{
    struct cuda_product p = {
        .c = acc_dw, .a = dy.p, .b = x.p, .m = out, .n = in, .k = n, .c_stride = in,
        .a_stride = n_heads * y_stride, .b_stride = n_heads * x_stride, .a_transposed = true,
        .type = dev->elem, .c_type = ELEM_F32, .n_batches = n_heads, .c_batch = w_stride,
        .a_batch = y_stride, .b_batch = x_stride, .alpha = 1, .beta = 1,
    };
    if (n > 0)
        cuda_product(dev, "heads_linear_dw", &p);
}
