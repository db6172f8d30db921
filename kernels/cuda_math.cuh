/* cuda_math.cuh - exponentials and what is made of them, as exact as the element type can show
 *
 * For float32 they are the accurate ones of CUDA; for bfloat16 the fast ones, whose error of a few
 * units of float32 is lost in the rounding of the result. */
#ifndef KERNELS_CUDA_MATH_CUH
#define KERNELS_CUDA_MATH_CUH

#include "kernels/cuda_elem.cuh"

template <typename T>
__device__ __forceinline__ float exp_of(float x)
{
    if constexpr (sizeof(T) == sizeof(float))
        return expf(x);
    else
        return __expf(x);
}

/* a / b; 0 where b is infinite */
template <typename T>
__device__ __forceinline__ float divide_of(float a, float b)
{
    if constexpr (sizeof(T) == sizeof(float))
        return a / b;
    else
        return __fdividef(a, b);
}

template <typename T>
__device__ __forceinline__ float sigmoid_of(float x)
{
    return divide_of<T>(1.0f, 1.0f + exp_of<T>(-x));
}

/* Fast: an odd polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel. */
template <typename T>
__device__ __forceinline__ float tanh_of(float x)
{
    if constexpr (sizeof(T) == sizeof(float)) {
        return tanhf(x);
    } else {
        float a = fabsf(x), s = x * x;
        float near_zero = x + x * s * (-1 / 3.0f + s * (2 / 15.0f + s * (-17 / 315.0f)));
        float far = copysignf(1.0f - __fdividef(2.0f, __expf(2.0f * a) + 1.0f), x);
        return a < 0.3f ? near_zero : far;
    }
}

/* log(1 + e^x) */
__device__ __forceinline__ float softplus(float x)
{
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

#endif
