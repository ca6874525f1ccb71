/* Numbers as the models' types have them, float or with -DBFLOAT16 bfloat16, and functions of them. */

#include <math.h>
#include <stdint.h>

#ifdef BFLOAT16
typedef uint16_t number;

static inline float wide(number x) {
    union { uint32_t bits; float value; } u = {.bits = (uint32_t)x << 16};
    return u.value;
}

static inline number narrow(float x) {
    union { float value; uint32_t bits; } u = {.value = x};
    uint32_t rounded = (u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16;
    return x != x ? 0x7fc0 : rounded;
}
#else
typedef float number;

static inline float wide(number x) { return x; }

static inline number narrow(float x) { return x; }
#endif

/* e^x for x <= 0: Cephes' polynomial, within two roundings of the last place. */
static inline float power(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    float whole = rintf(bounded * 1.44269504f);
    float rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    union { int32_t bits; float value; } u = {.bits = ((int32_t)whole + 127) << 23};
    return x < -87.0f ? 0.0f : sum * u.value;
}

/* Write the RMS norm (Zhang and Sennrich 2019) of x to out, which may be x, with a weight that is
   float if `is_wide`. */
static inline void norm(
    const number *x, const void *weight, int is_wide, int64_t count, float eps, number *out
) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < count; i++) squares += wide(x[i]) * wide(x[i]);
    float scale = 1 / sqrtf(squares / count + eps);
    const float *floats = weight;
    const number *numbers = weight;
    if (is_wide)
        for (int64_t i = 0; i < count; i++) out[i] = narrow(wide(narrow(wide(x[i]) * scale)) * floats[i]);
    else
        for (int64_t i = 0; i < count; i++)
            out[i] = narrow(wide(narrow(wide(x[i]) * scale)) * wide(numbers[i]));
}
