// Vectors of sixteen floats, and functions on them for the C++ kernels; the compiler maps them to the processor's.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
constexpr float LOG2_E = 1.44269504088896340736f;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

struct BFloat16 {
    uint16_t bits;
};

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline Floats load(const BFloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline void store(BFloat16* to, Floats values) {
    Words bits = (Words)values;
    // Rounds to nearest, ties to even; NaN stays NaN.
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Words nan = (Words)(values != values);
    Halves halves = __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), Halves);
    std::memcpy(to, &halves, sizeof halves);
}

inline float sum(Floats values) {
    values += __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    values += __builtin_shufflevector(values, values, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    values += __builtin_shufflevector(values, values, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return values[0] + values[1];
}

// 2**x for x <= 0: the nearest integer goes into the exponent, a polynomial approximates the rest (|rest| <= 0.5).
inline Floats exp2(Floats x) {
    x = x < -126.0f ? Floats{} - 126.0f : x;  // NaN stays NaN
    const float magic = 12582912.0f;          // 1.5 * 2**23: adding it rounds to an integer
    Floats shifted = x + magic;
    Floats rest = x - (shifted - magic);
    Ints exponent = ((Ints)shifted + (127 - 0x4b400000)) << 23;
    Floats power = rest * 1.535336188319500e-4f + 1.339887440266574e-3f;
    power = power * rest + 9.618437357674640e-3f;
    power = power * rest + 5.550332471162809e-2f;
    power = power * rest + 2.402264791363012e-1f;
    power = power * rest + 6.931472028550421e-1f;
    power = power * rest + 1.0f;
    return power * (Floats)exponent;
}

inline Floats tanh(Floats x) {
    Floats absolute = x < 0.0f ? -x : x;
    Floats power = exp2(absolute * (-2.0f * LOG2_E));
    Floats result = (1.0f - power) / (1.0f + power);
    return x < 0.0f ? -result : result;  // NaN stays NaN
}

}  // namespace
