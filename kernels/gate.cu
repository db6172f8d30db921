/* gate.cu - the sigmoid, alone and as a gate on another tensor */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_math.cuh"
#include "kernels/cuda_pointwise.cuh"

template <typename T> struct sigmoid {
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const
    {
        y[0] = sigmoid_of<T>(x[0]);
    }
};

void cuda_sigmoid(struct device *dev, elem_ptr y, const_elem_ptr x, int64_t n)
{
    if (n == 0)
        return;
    ELEM_DISPATCH(dev, T, pointwise<T, 1, 1> p = {{(T *)y}, {(const T *)x}, n};
                  pointwise_launch(dev, p, sigmoid<T>()));
    cuda_check(dev, "sigmoid", "n=%lld", (long long)n);
}

/* of dy and y */
struct sigmoid_backward {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const
    {
        y[0] = x[0] * x[1] * (1 - x[1]);
    }
};

void cuda_sigmoid_backward(struct device *dev, elem_ptr dx, const_elem_ptr dy, const_elem_ptr y,
                           int64_t n)
{
    if (n == 0)
        return;
    ELEM_DISPATCH(dev, T, pointwise<T, 2, 1> p = {{(T *)dx}, {(const T *)dy, (const T *)y}, n};
                  pointwise_launch(dev, p, sigmoid_backward()));
    cuda_check(dev, "sigmoid_backward", "n=%lld", (long long)n);
}

/* of o and g */
template <typename T> struct gate {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const
    {
        y[0] = x[0] * sigmoid_of<T>(x[1]);
    }
};

void cuda_sigmoid_gate(struct device *dev, elem_ptr y, const_elem_ptr o, const_elem_ptr g,
                       int64_t n)
{
    if (n == 0)
        return;
    ELEM_DISPATCH(dev, T, pointwise<T, 2, 1> p = {{(T *)y}, {(const T *)o, (const T *)g}, n};
                  pointwise_launch(dev, p, gate<T>()));
    cuda_check(dev, "sigmoid_gate", "n=%lld", (long long)n);
}

/* d_o and dg of dy, o and g */
template <typename T> struct gate_backward {
    __device__ void operator()(const float (&x)[3], float (&y)[2]) const
    {
        float s = sigmoid_of<T>(x[2]);
        y[0] = x[0] * s;
        y[1] = x[0] * x[1] * s * (1 - s);
    }
};

void cuda_sigmoid_gate_backward(struct device *dev, elem_ptr d_o, elem_ptr dg, const_elem_ptr dy,
                                const_elem_ptr o, const_elem_ptr g, int64_t n)
{
    if (n == 0)
        return;
    ELEM_DISPATCH(dev, T,
                  pointwise<T, 3, 2> p = {{(T *)d_o, (T *)dg},
                                          {(const T *)dy, (const T *)o, (const T *)g},
                                          n};
                  pointwise_launch(dev, p, gate_backward<T>()));
    cuda_check(dev, "sigmoid_gate_backward", "n=%lld", (long long)n);
}
