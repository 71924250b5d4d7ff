// What comes before attention on a CPU, in float32: the norm of q and k, their rotation, and the write of K and V.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpp_kv_codes.h"
#include "cpp_packed.h"

namespace {

constexpr int64_t WORTH_A_THREAD = 1 << 15;  // elements
constexpr int64_t LARGEST_HEAD = 256;

// Of a head: what norms have, and the angles of the token. width: of each rotated element, or half of it for each pair.
struct Rotation {
    const float *cos, *sin;
    int64_t width, rotary_dim, interleaved, norm_last;
    float eps, offset;
};

void normalise(const float* x, const float* weight, const Rotation& r, int64_t head_dim, float* out) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < head_dim; ++i) squares += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(squares / (float)head_dim + r.eps);
    for (int64_t i = 0; i < head_dim; ++i) out[i] = x[i] * scale * (weight[i] + r.offset);
}

void rotate_head(const float* x, const float* norm_weight, const Rotation& r, int64_t head_dim, float* out) {
    float normed[LARGEST_HEAD];
    if (norm_weight && !r.norm_last) {
        normalise(x, norm_weight, r, head_dim, normed);
        x = normed;
    }
    const int64_t half = r.rotary_dim / 2;
    if (r.interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const int64_t a = r.width == half ? i : 2 * i, b = r.width == half ? i : 2 * i + 1;
            out[2 * i] = x[2 * i] * r.cos[a] - x[2 * i + 1] * r.sin[a];
            out[2 * i + 1] = x[2 * i + 1] * r.cos[b] + x[2 * i] * r.sin[b];
        }
    } else {
        const int64_t second = r.width == half ? 0 : half;
        for (int64_t i = 0; i < half; ++i) out[i] = x[i] * r.cos[i] - x[i + half] * r.sin[i];
        for (int64_t i = 0; i < half; ++i)
            out[i + half] = x[i + half] * r.cos[i + second] + x[i] * r.sin[i + second];
    }
    std::memcpy(out + r.rotary_dim, x + r.rotary_dim, (head_dim - r.rotary_dim) * sizeof(float));
    if (norm_weight && r.norm_last) normalise(out, norm_weight, r, head_dim, out);
}

// Keys of a token, normed and rotated, and its values, to a slot.
template <typename C>
void write_token(const float* k, int64_t k_head, const float* v, int64_t v_head, const float* k_norm_weight,
                 const Rotation& r, C* cache, int64_t slot, const Layout<C>& layout, const float* kv_scales) {
    C* keys = cache + slot / layout.block_size * 2 * layout.half();
    float rotated[LARGEST_HEAD];
    for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
        const float key_scale = kv_scales ? kv_scales[head] : 1.0f;
        const float value_scale = kv_scales ? kv_scales[layout.num_kv_heads + head] : 1.0f;
        rotate_head(k + head * k_head, k_norm_weight, r, layout.head_dim, rotated);
        encode(rotated, keys, layout, slot % layout.block_size, head, key_scale);
        encode(v + head * v_head, keys + layout.half(), layout, slot % layout.block_size, head, value_scale);
    }
}

}  // namespace

// q [T, H, d] to `rotated`, contiguous; k and v [T, K, d] to each token's slot of the cache [N, 2, P, K, d]; slot -1
// stores nothing. Strides, in elements: of a token and of a head. Norm weights may be null, and so may kv_scales; d is
// at most 256. format: see cpp_kv_codes.h.
extern "C" void rotate_and_write(const float* q, const float* k, const float* v, const float* q_norm_weight,
                                const float* k_norm_weight, float eps, float offset, const float* cos,
                                const float* sin, int64_t cos_stride, int64_t sin_stride, int64_t width,
                                int64_t rotary_dim, int64_t interleaved, int64_t norm_last, void* cache,
                                const float* kv_scales, int64_t format, const int64_t* slots, float* rotated,
                                int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                int64_t block_size, int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head,
                                int64_t v_token, int64_t v_head, int64_t threads) {
    const bool alone = num_tokens * (num_heads + 2 * num_kv_heads) * head_dim < WORTH_A_THREAD;
#pragma omp parallel for num_threads(threads) if (!alone && threads > 1)
    for (int64_t token = 0; token < num_tokens; ++token) {
        const Rotation r{cos + token * cos_stride, sin + token * sin_stride, width, rotary_dim, interleaved, norm_last,
                         eps, offset};
        for (int64_t head = 0; head < num_heads; ++head)
            rotate_head(q + token * q_token + head * q_head, q_norm_weight, r, head_dim,
                        rotated + (token * num_heads + head) * head_dim);
        const int64_t slot = slots[token];
        if (slot < 0) continue;
        const auto write = [&](auto* elements) {
            const Layout<std::remove_pointer_t<decltype(elements)>> layout{num_kv_heads, head_dim, block_size};
            write_token(k + token * k_token, k_head, v + token * v_token, v_head, k_norm_weight, r, elements, slot,
                        layout, kv_scales);
        };
        switch (format) {
            case INT8: write((Int8*)cache); break;
            case FP8: write((Fp8*)cache); break;
            default: write((float*)cache);
        }
    }
}

PACKED(rotate_and_write)
