/* Vectors of float as wide as the CPU has them. A lane computes the same in each width. */

#include <string.h>

#if defined(__AVX512F__) && !defined(NARROW)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float floats __attribute__((vector_size(LANES * sizeof(float))));

static inline floats load_floats(const float *p) {
    floats made;
    memcpy(&made, p, sizeof made);
    return made;
}

static inline void store_floats(float *p, floats given) { memcpy(p, &given, sizeof given); }

/* Return numbers of the model's type in float. */
static inline floats load_wide(const number *p) {
#ifdef BFLOAT16
    typedef uint16_t shorts __attribute__((vector_size(LANES * sizeof(uint16_t))));
    typedef uint32_t words __attribute__((vector_size(LANES * sizeof(uint32_t))));
    shorts given;
    memcpy(&given, p, sizeof given);
    return (floats)(__builtin_convertvector(given, words) << 16);
#else
    return load_floats(p);
#endif
}
