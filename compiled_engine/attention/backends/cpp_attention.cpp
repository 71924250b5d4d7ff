// Attention of decodes on a CPU over a cache in the type of the queries, and the write of K and V before it.
#include <cstdint>
#include <cstring>

#include "cpp_attention.h"
#include "cpp_packed.h"

// Attention of the first num_requests queries. element_size: 4 for float32, 2 for bfloat16. Strides count elements.
// Returns 1 for a head size that is not compiled, else 0.
extern "C" int decode(const void* q, const void* cache, void* out, const int32_t* seq_lens, const int32_t* block_table,
                      int64_t table_stride, int64_t q_token_stride, int64_t q_head_stride, int64_t out_token_stride,
                      int64_t out_head_stride, int64_t num_requests, int64_t num_kv_heads, int64_t group,
                      int64_t head_dim, int64_t block_size, float scale, int64_t window, float soft_cap,
                      const float* sinks, int64_t element_size, int64_t threads) {
    const Shape shape{num_kv_heads, group, head_dim, block_size};
    const Scoring scoring{scale, soft_cap, sinks, nullptr};
    if (element_size == 4)
        return decode_any<float, float>(shape, (const float*)q, (const float*)cache, (float*)out, seq_lens, block_table,
                                        table_stride, q_token_stride, q_head_stride, out_token_stride,
                                        out_head_stride, num_requests, shape, scoring, window, (int)threads);
    return decode_any<BFloat16, BFloat16>(shape, (const BFloat16*)q, (const BFloat16*)cache, (BFloat16*)out, seq_lens,
                                          block_table, table_stride, q_token_stride, q_head_stride, out_token_stride,
                                          out_head_stride, num_requests, shape, scoring, window, (int)threads);
}

// K and V of each token to its slot; slot -1 writes nothing. A token's heads are contiguous. Sizes and strides in bytes.
extern "C" void write_kv(const char* k, const char* v, char* cache, const int64_t* slots, int64_t num_tokens,
                         int64_t k_token_stride, int64_t v_token_stride, int64_t token_bytes, int64_t block_size) {
    const int64_t half = block_size * token_bytes;
    for (int64_t token = 0; token < num_tokens; ++token) {
        if (slots[token] < 0) continue;
        char* to = cache + slots[token] / block_size * 2 * half + slots[token] % block_size * token_bytes;
        std::memcpy(to, k + token * k_token_stride, token_bytes);
        std::memcpy(to + half, v + token * v_token_stride, token_bytes);
    }
}

PACKED(decode)
PACKED(write_kv)
