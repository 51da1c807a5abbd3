// Kernels for test_nvcc.py: what compilers of C++ make of memory that is not in registers.
#include <cassert>
#include <cstdio>

struct Pair { float low; int count; double high; };
struct Weights { int rows; float of[6]; const float *extra; };

__constant__ float coefficients[4] = {1.0f, 2.0f, 3.0f, 4.0f};
__device__ int steps[4] = {5, 6, 7, 8};
__device__ int *step = steps + 1;
__device__ unsigned launches;

__device__ __noinline__ Pair pair(float x, int n)
{
    Pair made = {x, n, x * n};
    return made;
}

__device__ __noinline__ float polynomial(const float *c, float x)
{
    float sum = 0.0f;
    for (int i = 0; i < 4; i++)
        sum = sum * x + c[i];
    return sum;
}

extern "C" __global__ void sums(float *out, const Weights weights, int n)
{
    __shared__ float turned[64];
    extern __shared__ float dynamic[];
    float own[8];
    int i = threadIdx.y * blockDim.x + threadIdx.x;
    assert(i < n);
    for (int j = 0; j < 8; j++)
        own[j] = weights.of[i % 6] * j;
    turned[i] = own[(weights.rows + i) & 7];
    dynamic[i] = weights.extra[i];
    __syncthreads();
    Pair p = pair(weights.of[i % 6], i);
    out[i] = polynomial(coefficients, turned[n - 1 - i]) + dynamic[n - 1 - i] + p.low + p.count + p.high + *step;
    if (i == 3)
        printf("%d: %5.2f of %s, %u\n", i, p.high, "sums", launches);
    if (i == 0)
        atomicAdd(&launches, 1u);
}

// The first program tells the second one that its part is there.
extern "C" __global__ void __launch_bounds__(64) handed_on(int *out, int *data, int *flag)
{
    int i = threadIdx.x, seen = 0;
    if (blockIdx.x == 0) {
        data[i] = i * i;
        __syncthreads();
        if (i == 0)
            asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(flag) : "memory");
    } else {
        do
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        while (seen < 1);
        out[i] = data[63 - i];
    }
}
