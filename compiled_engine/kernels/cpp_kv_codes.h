// Elements of the KV cache, and the layout of its blocks: see compiled_engine/kv_format.py. 8-bit codes are rounded as
// in compiled_engine/attention/kv_codes.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpp_vectors.h"

namespace {

// Elements of a cache: of the queries' type, int8 with one scale per head of a token, or FP8.
enum Format : int64_t { PLAIN, INT8, FP8 };

struct Int8 {
    uint8_t bits;
};

struct Fp8 {
    uint8_t bits;
};

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

constexpr float INT8_BIAS = 128.0f, INT8_LARGEST = 127.0f, LEAST_SCALE = 0x1p-40f, FP8_LARGEST = 448.0f;

inline Words load_bytes(const void* from) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Words);
}

inline Floats load(const Int8* from) { return __builtin_convertvector((Ints)load_bytes(from), Floats) - INT8_BIAS; }

inline Floats load(const Fp8* from) {
    // Moves exponent and mantissa to their places in a float, whose exponent has another bias.
    const Words words = load_bytes(from);
    return (Floats)((words & 0x80) << 24 | (words & 0x7f) << 20) * 0x1p120f;
}

template <typename Element>
constexpr bool is_coded = std::is_same_v<Element, Int8> || std::is_same_v<Element, Fp8>;

// A cache [N, 2, P, K, w]: `half` holds the codes of a block's keys or values, and their scales if there are any.
template <typename Element>
struct Layout {
    int64_t num_kv_heads, head_dim, block_size;

    int64_t row() const { return num_kv_heads * head_dim; }
    int64_t codes() const { return block_size * row(); }
    int64_t half() const {
        return codes() + (std::is_same_v<Element, Int8> ? block_size * num_kv_heads * (int64_t)sizeof(BFloat16) : 0);
    }
    int64_t scale_at(int64_t slot, int64_t kv_head) const {
        return codes() + (slot * num_kv_heads + kv_head) * (int64_t)sizeof(BFloat16);
    }
};

inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bfloat16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint8_t to_fp8(float value) {
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    const float size = std::min(std::fabs(value), FP8_LARGEST);
    if (size < 0x1p-6f) return sign | (uint8_t)std::nearbyint(size * 0x1p9f);
    uint32_t bits;
    std::memcpy(&bits, &size, sizeof bits);
    bits += 0x7ffff + ((bits >> 20) & 1);
    return sign | (uint8_t)((bits >> 20) - (120 << 3));
}

// Returns the scale of a head at `slot` of `half`. scale: the scale of an FP8 cache.
template <typename Element>
inline float scale_of(const Element* half, const Layout<Element>& layout, int64_t slot, int64_t kv_head, float scale) {
    if constexpr (std::is_same_v<Element, Int8>) {
        uint16_t bits;
        std::memcpy(&bits, half + layout.scale_at(slot, kv_head), sizeof bits);
        return from_bfloat16(bits);
    }
    return scale;
}

// Stores a head's values at `slot` of `half`.
template <typename Element>
inline void encode(const float* values, Element* half, const Layout<Element>& layout, int64_t slot, int64_t kv_head,
                   float scale) {
    Element* to = half + slot * layout.row() + kv_head * layout.head_dim;
    if constexpr (std::is_same_v<Element, Int8>) {
        float largest = 0;
        for (int64_t i = 0; i < layout.head_dim; ++i) largest = std::max(largest, std::fabs(values[i]));
        const uint16_t bits = to_bfloat16(std::max(largest / INT8_LARGEST, LEAST_SCALE));
        scale = from_bfloat16(bits);
        std::memcpy(half + layout.scale_at(slot, kv_head), &bits, sizeof bits);
        for (int64_t i = 0; i < layout.head_dim; ++i) {
            const float code = std::floor(values[i] / scale + (INT8_BIAS + 0.5f));
            to[i].bits = (uint8_t)std::min(std::max(code, INT8_BIAS - INT8_LARGEST), INT8_BIAS + INT8_LARGEST);
        }
    } else if constexpr (std::is_same_v<Element, Fp8>) {
        for (int64_t i = 0; i < layout.head_dim; ++i) to[i].bits = to_fp8(values[i] / scale);
    } else {
        std::memcpy(to, values, layout.head_dim * sizeof(float));
    }
}

}  // namespace
