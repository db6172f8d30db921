/* situ.cu - y = b1 tanh(a/b1) sigmoid(a) * b2 tanh(u/b2): a gated unit with both factors bounded */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_math.cuh"
#include "kernels/cuda_pointwise.cuh"

/* of a and u */
template <typename T> struct situ {
    float b1, b2, inv1, inv2;

    __device__ void operator()(const float (&x)[2], float (&y)[1]) const
    {
        y[0] = b1 * tanh_of<T>(x[0] * inv1) * sigmoid_of<T>(x[0]) * (b2 * tanh_of<T>(x[1] * inv2));
    }
};

void cuda_situ(struct device *dev, elem_ptr y, const_elem_ptr a, const_elem_ptr u, int64_t n,
               float b1, float b2)
{
    if (n == 0)
        return;
    ELEM_DISPATCH(dev, T, pointwise<T, 2, 1> p = {{(T *)y}, {(const T *)a, (const T *)u}, n};
                  situ<T> f = {b1, b2, 1 / b1, 1 / b2}; pointwise_launch(dev, p, f));
    cuda_check(dev, "situ", "n=%lld", (long long)n);
}

/* da and du of dy, a and u */
template <typename T> struct situ_backward {
    float b1, b2, inv1, inv2;

    __device__ void operator()(const float (&x)[3], float (&y)[2]) const
    {
        float ta = tanh_of<T>(x[1] * inv1), tu = tanh_of<T>(x[2] * inv2), s = sigmoid_of<T>(x[1]);
        y[0] = x[0] * b2 * tu * s * ((1 - ta * ta) + b1 * ta * (1 - s));
        y[1] = x[0] * b1 * ta * s * (1 - tu * tu);
    }
};

void cuda_situ_backward(struct device *dev, elem_ptr da, elem_ptr du, const_elem_ptr dy,
                        const_elem_ptr a, const_elem_ptr u, int64_t n, float b1, float b2)
{
    if (n == 0)
        return;
    ELEM_DISPATCH(
        dev, T,
        pointwise<T, 3, 2> p = {{(T *)da, (T *)du}, {(const T *)dy, (const T *)a, (const T *)u}, n};
        situ_backward<T> f = {b1, b2, 1 / b1, 1 / b2}; pointwise_launch(dev, p, f));
    cuda_check(dev, "situ_backward", "n=%lld", (long long)n);
}
