// Attention of decodes on a CPU over a cache of 8 bits, and the write of K and V before it; all else is float32. A library
// of its own, so that caches in the type of the queries do not wait for its compilation.
#include <cstdint>

#include "cpp_attention.h"
#include "cpp_packed.h"

namespace {

template <typename C>
void write_codes(const float* k, const float* v, C* cache, const int64_t* slots, int64_t num_tokens,
                 int64_t k_token_stride, int64_t v_token_stride, const Layout<C>& layout, const float* kv_scales) {
    for (int64_t token = 0; token < num_tokens; ++token) {
        if (slots[token] < 0) continue;
        C* keys = cache + slots[token] / layout.block_size * 2 * layout.half();
        const int64_t slot = slots[token] % layout.block_size;
        for (int64_t half = 0; half < 2; ++half) {
            const float* from = half ? v + token * v_token_stride : k + token * k_token_stride;
            for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
                const float scale = kv_scales ? kv_scales[half * layout.num_kv_heads + head] : 1.0f;
                encode(from + head * layout.head_dim, keys + half * layout.half(), layout, slot, head, scale);
            }
        }
    }
}

}  // namespace

// Attention of the first num_requests queries. Strides count elements. kv_scales may be null; format: see
// cpp_kv_codes.h. Returns 1 for a head size that is not compiled, else 0.
extern "C" int decode_codes(const float* q, const void* cache, float* out, const int32_t* seq_lens,
                            const int32_t* block_table, int64_t table_stride, int64_t q_token_stride,
                            int64_t q_head_stride, int64_t out_token_stride, int64_t out_head_stride,
                            int64_t num_requests, int64_t num_kv_heads, int64_t group, int64_t head_dim,
                            int64_t block_size, float scale, int64_t window, float soft_cap, const float* sinks,
                            int64_t threads, const float* kv_scales, int64_t format) {
    const Shape shape{num_kv_heads, group, head_dim, block_size};
    const Scoring scoring{scale, soft_cap, sinks, kv_scales};
    const auto decode = [&](const auto* codes) {
        using C = std::remove_const_t<std::remove_pointer_t<decltype(codes)>>;
        return decode_any<float, C>(shape, q, codes, out, seq_lens, block_table, table_stride, q_token_stride,
                                    q_head_stride, out_token_stride, out_head_stride, num_requests, shape, scoring,
                                    window, (int)threads);
    };
    return format == INT8 ? decode((const Int8*)cache) : decode((const Fp8*)cache);
}

// K and V of each token to its slot; slot -1 writes nothing. A token's heads are contiguous; strides of tokens count
// elements. kv_scales may be null; format: see cpp_kv_codes.h.
extern "C" void write_kv_codes(const float* k, const float* v, void* cache, const int64_t* slots, int64_t num_tokens,
                               int64_t k_token_stride, int64_t v_token_stride, int64_t num_kv_heads, int64_t head_dim,
                               int64_t block_size, const float* kv_scales, int64_t format) {
    const auto write = [&](auto* codes) {
        const Layout<std::remove_pointer_t<decltype(codes)>> layout{num_kv_heads, head_dim, block_size};
        write_codes(k, v, codes, slots, num_tokens, k_token_stride, v_token_stride, layout, kv_scales);
    };
    if (format == INT8) write((Int8*)cache);
    else write((Fp8*)cache);
}

PACKED(decode_codes)
PACKED(write_kv_codes)
