/* swiglu.cu - y = silu(a) u */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_math.cuh"
#include "kernels/cuda_pointwise.cuh"

/* of a and u */
template <typename T> struct swiglu {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const
    {
        y[0] = x[0] * sigmoid_of<T>(x[0]) * x[1];
    }
};

void cuda_swiglu(struct device *dev, elem_ptr y, const_elem_ptr a, const_elem_ptr u, int64_t n)
{
    if (n == 0)
        return;
    ELEM_DISPATCH(dev, T, pointwise<T, 2, 1> p = {{(T *)y}, {(const T *)a, (const T *)u}, n};
                  pointwise_launch(dev, p, swiglu<T>()));
    cuda_check(dev, "swiglu", "n=%lld", (long long)n);
}

/* da and du of dy, a and u */
template <typename T> struct swiglu_backward {
    __device__ void operator()(const float (&x)[3], float (&y)[2]) const
    {
        float s = sigmoid_of<T>(x[1]);
        y[0] = x[0] * x[2] * s * (1 + x[1] * (1 - s));
        y[1] = x[0] * x[1] * s;
    }
};

void cuda_swiglu_backward(struct device *dev, elem_ptr da, elem_ptr du, const_elem_ptr dy,
                          const_elem_ptr a, const_elem_ptr u, int64_t n)
{
    if (n == 0)
        return;
    ELEM_DISPATCH(
        dev, T,
        pointwise<T, 3, 2> p = {{(T *)da, (T *)du}, {(const T *)dy, (const T *)a, (const T *)u}, n};
        pointwise_launch(dev, p, swiglu_backward<T>()));
    cuda_check(dev, "swiglu_backward", "n=%lld", (long long)n);
}
