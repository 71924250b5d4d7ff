// Attention of one query per request over the paged cache on a CPU.
//
// The cache is [N, 2, P, K, d], contiguous: blocks, keys then values, slots of a block, K/V heads, head size; or it holds
// codes of 8 bits, see cpp_kv_codes.h. Products and sums are float32. The keys of a request are cut into splits of a fixed length, so that one long context keeps all
// threads busy, and so that a request's result depends on neither its neighbours nor the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpp_kv_codes.h"
#include "cpp_vectors.h"

namespace {

constexpr int TILE = 64;     // keys whose scores are held at a time
constexpr int SPLIT = 1024;  // keys of one work item

struct Shape {
    int64_t num_kv_heads, group, head_dim, block_size;
};

// soft_cap 0: scores are not capped. sinks: of each query head the score of a further key without a value, or null.
// kv_scales: of FP8 codes of keys and then of values, by K/V head, or null.
struct Scoring {
    float scale, soft_cap;
    const float *sinks, *kv_scales;
};

// What a split leaves for a query head: the largest score, the sum of weights, and the weighted sum of the values.
template <int VECTORS>
struct Partial {
    Floats values[VECTORS];
    float largest, total;
};

template <typename T, typename C, int VECTORS>
void attend_split(const T* q, int64_t q_head_stride, const C* cache, int64_t kv_head, const int32_t* table,
                  int64_t first, int64_t end, const Scoring& scoring, const Shape& shape, Partial<VECTORS>* partials) {
    // Scores are powers of two; those that are capped become so after the cap.
    const float scale = scoring.soft_cap > 0 ? scoring.scale / scoring.soft_cap : scoring.scale * LOG2_E;
    const Layout<C> layout{shape.num_kv_heads, shape.head_dim, shape.block_size};
    const int64_t row = layout.row(), half = layout.half();
    const C* head_cache = cache + kv_head * shape.head_dim;
    const float key_scale = scoring.kv_scales ? scoring.kv_scales[kv_head] : 1.0f;
    const float value_scale = scoring.kv_scales ? scoring.kv_scales[shape.num_kv_heads + kv_head] : 1.0f;
    std::vector<Floats> query(shape.group * VECTORS);
    for (int64_t g = 0; g < shape.group; ++g) {
        for (int v = 0; v < VECTORS; ++v) {
            query[g * VECTORS + v] = load(q + g * q_head_stride + v * LANES) * scale;
            partials[g].values[v] = Floats{};
        }
        partials[g].largest = -__builtin_inff();
        partials[g].total = 0;
    }
    const C* keys[TILE];
    float key_scales[TILE], value_scales[TILE];
    std::vector<float> scores(shape.group * TILE);
    for (int64_t start = first; start < end; start += TILE) {
        const int count = (int)std::min<int64_t>(TILE, end - start);
        int64_t block = start / shape.block_size, slot = start % shape.block_size;
        for (int n = 0; n < count; ++n) {
            keys[n] = head_cache + table[block] * 2 * half + slot * row;
            if constexpr (is_coded<C>) {
                const C* codes = cache + table[block] * 2 * half;
                key_scales[n] = scale_of(codes, layout, slot, kv_head, key_scale);
                value_scales[n] = scale_of(codes + half, layout, slot, kv_head, value_scale);
            }
            if (++slot == shape.block_size) ++block, slot = 0;
            for (int v = 0; v < VECTORS; ++v) __builtin_prefetch(keys[n] + v * LANES, 0, 2);
        }
        for (int n = 0; n < count; ++n) {
            for (int v = 0; v < VECTORS; ++v) __builtin_prefetch(keys[n] + half + v * LANES, 0, 2);
            Floats key[VECTORS];
            for (int v = 0; v < VECTORS; ++v) key[v] = load(keys[n] + v * LANES);
            for (int64_t g = 0; g < shape.group; ++g) {
                Floats product = key[0] * query[g * VECTORS];
                for (int v = 1; v < VECTORS; ++v) product += key[v] * query[g * VECTORS + v];
                scores[g * TILE + n] = is_coded<C> ? sum(product) * key_scales[n] : sum(product);
            }
        }
        for (int64_t g = 0; g < shape.group; ++g) {
            float* weights = &scores[g * TILE];
            Partial<VECTORS>& partial = partials[g];
            if (scoring.soft_cap > 0)
                for (int n = 0; n < count; n += LANES)
                    store(weights + n, tanh(load(weights + n)) * (scoring.soft_cap * LOG2_E));
            float largest = partial.largest;
            for (int n = 0; n < count; ++n) largest = weights[n] < largest ? largest : weights[n];
            for (int n = count; n < TILE; ++n) weights[n] = largest;
            const float shrink = exp2(Floats{} + (partial.largest - largest))[0];
            for (int n = 0; n < count; n += LANES) store(weights + n, exp2(load(weights + n) - largest));
            Floats values[VECTORS];
            for (int v = 0; v < VECTORS; ++v) values[v] = partial.values[v] * shrink;
            float total = partial.total * shrink;
            for (int n = 0; n < count; ++n) {
                total += weights[n];
                const float weight = is_coded<C> ? weights[n] * value_scales[n] : weights[n];
                for (int v = 0; v < VECTORS; ++v) values[v] += weight * load(keys[n] + half + v * LANES);
            }
            for (int v = 0; v < VECTORS; ++v) partial.values[v] = values[v];
            partial.largest = largest;
            partial.total = total;
        }
    }
}

struct Item {
    int64_t request, kv_head, first, end, partial;
};

template <typename T, typename C, int VECTORS>
void decode_heads(const T* q, const C* cache, T* out, const int32_t* seq_lens, const int32_t* block_table,
                  int64_t table_stride, int64_t q_token_stride, int64_t q_head_stride, int64_t out_token_stride,
                  int64_t out_head_stride, int64_t num_requests, const Shape& shape, const Scoring& scoring,
                  int64_t window, int threads) {
    std::vector<Item> items;
    std::vector<int64_t> results;  // of each request and K/V head, the first item
    for (int64_t request = 0; request < num_requests; ++request) {
        const int64_t length = seq_lens[request];
        const int64_t first = window > 0 ? std::max<int64_t>(length - window, 0) : 0;
        for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
            results.push_back((int64_t)items.size());
            for (int64_t start = first; start < length; start += SPLIT)
                items.push_back({request, kv_head, start, std::min(start + SPLIT, length), 0});
        }
    }
    results.push_back((int64_t)items.size());
    std::vector<Partial<VECTORS>> partials(items.size() * shape.group);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < (int64_t)items.size(); ++i) {
        const Item& item = items[i];
        attend_split<T, C, VECTORS>(
            q + item.request * q_token_stride + item.kv_head * shape.group * q_head_stride, q_head_stride,
            cache, item.kv_head, block_table + item.request * table_stride, item.first, item.end,
            scoring, shape, &partials[i * shape.group]);
    }
    for (int64_t result = 0; result + 1 < (int64_t)results.size(); ++result) {
        const int64_t request = result / shape.num_kv_heads, kv_head = result % shape.num_kv_heads;
        for (int64_t g = 0; g < shape.group; ++g) {
            float largest = -__builtin_inff();
            for (int64_t i = results[result]; i < results[result + 1]; ++i)
                largest = std::max(largest, partials[i * shape.group + g].largest);
            Floats values[VECTORS] = {};
            float total = 0;
            for (int64_t i = results[result]; i < results[result + 1]; ++i) {
                const Partial<VECTORS>& partial = partials[i * shape.group + g];
                const float weight = exp2(Floats{} + (partial.largest - largest))[0];
                total += partial.total * weight;
                for (int v = 0; v < VECTORS; ++v) values[v] += partial.values[v] * weight;
            }
            const int64_t head = kv_head * shape.group + g;
            if (scoring.sinks && total > 0) {
                const float sink = scoring.sinks[head] * LOG2_E, higher = std::max(largest, sink);
                const float shrink = exp2(Floats{} + (largest - higher))[0];
                total = total * shrink + exp2(Floats{} + (sink - higher))[0];
                for (int v = 0; v < VECTORS; ++v) values[v] *= shrink;
            }
            T* row = out + request * out_token_stride + head * out_head_stride;
            // A padding row (length 0) saw no key: zeros.
            const float scale_out = results[result] == results[result + 1] ? 0.0f : 1.0f / total;
            for (int v = 0; v < VECTORS; ++v) store(row + v * LANES, values[v] * scale_out);
        }
    }
}

template <typename T, typename C, typename... Arguments>
int decode_any(const Shape& shape, Arguments... arguments) {
    switch (shape.head_dim) {
        case 16: decode_heads<T, C, 1>(arguments...); return 0;
        case 32: decode_heads<T, C, 2>(arguments...); return 0;
        case 64: decode_heads<T, C, 4>(arguments...); return 0;
        case 80: decode_heads<T, C, 5>(arguments...); return 0;
        case 96: decode_heads<T, C, 6>(arguments...); return 0;
        case 128: decode_heads<T, C, 8>(arguments...); return 0;
        case 192: decode_heads<T, C, 12>(arguments...); return 0;
        case 256: decode_heads<T, C, 16>(arguments...); return 0;
        default: return 1;
    }
}

}  // namespace
