// A linear of few tokens on a CPU with its neighbours taken in: RMSNorm before it, and after it an activation of gate
// times up, or a residual. All is float32.
//
// The weight is read in place, each row of [N, K] once. Vectors run along K, and the sums of a tile of tokens and rows
// stay in registers. The order in which an element is summed follows from K alone, so a token's bits depend on neither
// its neighbours nor the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpp_packed.h"
#include "cpp_vectors.h"

namespace {

constexpr int ROWS = 6;  // of the weight in a tile
#ifdef __AVX512F__
constexpr int TOKENS = 4;  // in a tile: the sums take three quarters of the registers
#else
constexpr int TOKENS = 1;
#endif
constexpr int64_t BLOCK = 1024;  // columns that a tile runs over, so that they stay in the first cache
constexpr int64_t SHARE = 16;    // threads get multiples of so many outputs: a cache line

// In each group of 2 * DISTANCE lanes: sums of two lanes of a in the lower half, of b in the upper half.
template <int DISTANCE>
inline Floats fold(Floats a, Floats b) {
    if constexpr (DISTANCE == 8)
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    if constexpr (DISTANCE == 4)
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    if constexpr (DISTANCE == 2)
        return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    if constexpr (DISTANCE == 1)
        return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// Lane i: the sum of vectors[i]. COUNT is a power of two.
template <int COUNT, int DISTANCE = LANES / 2>
inline Floats sums(Floats* vectors) {
    constexpr bool in_pairs = COUNT > DISTANCE;
    constexpr int left = in_pairs ? COUNT / 2 : COUNT;
    for (int i = 0; i < left; ++i) vectors[i] = fold<DISTANCE>(vectors[i], vectors[in_pairs ? i + left : i]);
    if constexpr (DISTANCE > 1) return sums<left, DISTANCE / 2>(vectors);
    return vectors[0];
}

constexpr int power_of_two(int least) { return least <= 1 ? 1 : 2 * power_of_two((least + 1) / 2); }

// to[i]: the sum of vectors[i] for COUNT vectors; both have room for a multiple of LANES.
template <int COUNT>
inline void sums_of(Floats* vectors, float* to) {
    store(to, sums<power_of_two(std::min(COUNT, LANES))>(vectors));
    if constexpr (COUNT > LANES) sums_of<COUNT - LANES>(vectors + LANES, to + LANES);
}

struct Product {
    const float* x;
    int64_t x_stride, num_tokens;
    const float* weight;
    int64_t k;
    const float *bias, *residual;
    int64_t residual_stride;
    float* y;
    int64_t y_stride;
};

// Adds columns [first, first + count) of tokens and rows to y, which the first columns set. `ahead` is read next.
template <int T, int R>
inline void tile(const Product& p, int64_t token, int64_t row, int64_t first, int64_t count, const float* ahead) {
    const float* x = p.x + token * p.x_stride + first;
    const float* weight = p.weight + row * p.k + first;
    constexpr int room = (R * T + LANES - 1) / LANES * LANES;
    Floats products[room] = {};
    for (int64_t i = 0; i < count; i += LANES) {
        Floats rows[R];
        for (int r = 0; r < R; ++r) rows[r] = load(weight + r * p.k + i);
        for (int t = 0; t < T; ++t) {
            const Floats values = load(x + t * p.x_stride + i);
            for (int r = 0; r < R; ++r) products[t * R + r] += values * rows[r];
        }
        __builtin_prefetch(ahead + i);
    }
    float totals[room];
    sums_of<R * T>(products, totals);
    for (int t = 0; t < T; ++t) {
        float* y = p.y + (token + t) * p.y_stride + row;
        float* total = totals + t * R;
        const float* more = first ? y : p.bias ? p.bias + row : nullptr;
        if (more)
            for (int r = 0; r < R; ++r) total[r] += more[r];
        if (!first && p.residual) {
            more = p.residual + (token + t) * p.residual_stride + row;
            for (int r = 0; r < R; ++r) total[r] += more[r];
        }
        std::memcpy(y, total, R * sizeof(float));
    }
}

template <int R>
inline void all_tokens(const Product& p, int64_t row, int64_t first, int64_t count, const float* next) {
    int64_t token = 0;
    for (; token + TOKENS <= p.num_tokens; token += TOKENS)
        tile<TOKENS, R>(p, token, row, first, count, next + std::min<int64_t>(token / TOKENS, R - 1) * p.k);
    switch (p.num_tokens - token) {
        case 1: tile<1, R>(p, token, row, first, count, next); break;
        case 2: tile<2, R>(p, token, row, first, count, next); break;
        case 3: tile<3, R>(p, token, row, first, count, next); break;
    }
}

template <int R>
inline int64_t some_rows(const Product& p, int64_t row, int64_t end) {
    for (; row + R <= end; row += R)
        for (int64_t first = 0; first < p.k; first += BLOCK) {
            const bool last = first + BLOCK >= p.k;
            const float* next = p.weight + (last ? std::min(row + R, end - 1) * p.k : row * p.k + first + BLOCK);
            all_tokens<R>(p, row, first, std::min(BLOCK, p.k - first), next);
        }
    return row;
}

void multiply(const Product& p, int64_t begin, int64_t end) {
    some_rows<1>(p, some_rows<2>(p, some_rows<ROWS>(p, begin, end), end), end);
}

void normalise(const float* x, const float* weight, float eps, float offset, int64_t k, float* to) {
    Floats squares{};
    for (int64_t i = 0; i < k; i += LANES) squares += load(x + i) * load(x + i);
    const float scale = 1.0f / std::sqrt(sum(squares) / (float)k + eps);
    for (int64_t i = 0; i < k; i += LANES) store(to + i, load(x + i) * scale * (load(weight + i) + offset));
}

inline Floats sigmoid(Floats x) {
    const Floats power = exp2((x < 0.0f ? x : -x) * LOG2_E);
    return (x < 0.0f ? power : Floats{} + 1.0f) / (1.0f + power);
}

template <bool GELU>
inline Floats gated(Floats gate, Floats up) {
    // (1 + tanh(z)) / 2 is sigmoid(2 z).
    const Floats z = GELU ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
    return gate * sigmoid(z) * up;
}

template <bool GELU>
void activate(const Product& p, int64_t begin, int64_t end, int64_t width, float* out) {
    for (int64_t token = 0; token < p.num_tokens; ++token)
        for (int64_t i = begin; i < end; i += LANES) {
            const float* gate = p.y + token * p.y_stride + i;
            store(out + token * width + i, gated<GELU>(load(gate), load(gate + width)));
        }
}

// Room for so many floats that a thread keeps for its next call.
float* room_for(std::vector<Floats>& kept, int64_t size) {
    const size_t vectors = (size + LANES - 1) / LANES;
    if (kept.size() < vectors) kept.resize(vectors);
    return (float*)kept.data();
}

}  // namespace

// y = linear(RMSNorm(x) * (norm_weight + offset)) + bias + residual, or activation(gate) * up of its halves; parts whose
// pointer is null are left out. x [T, K] has rows x_stride elements apart, the weight [N, K] and out are contiguous.
// K is a multiple of 16, and N of 32 with an activation: 0 none, 1 silu, 2 gelu by its tanh.
extern "C" void small_batch_linear(const float* x, int64_t x_stride, const float* weight, const float* bias,
                                   const float* norm_weight, float eps, float offset, const float* residual,
                                   int64_t residual_stride, int64_t activation, float* out, int64_t num_tokens,
                                   int64_t n, int64_t k, int64_t threads) {
    static thread_local std::vector<Floats> of_products;
    float* y = activation ? room_for(of_products, num_tokens * n) : out;
    const int64_t outputs = activation ? n / 2 : n;
    const int64_t shares = (outputs + SHARE - 1) / SHARE;
    threads = std::max<int64_t>(1, std::min(threads, shares));
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < threads; ++part) {
        Product p{x, x_stride, num_tokens, weight, k, bias, residual, residual_stride, y, n};
        if (norm_weight) {  // by each thread for itself: a small part of what it does
            static thread_local std::vector<Floats> of_norms;
            float* normed = room_for(of_norms, num_tokens * k);
            for (int64_t token = 0; token < num_tokens; ++token)
                normalise(x + token * x_stride, norm_weight, eps, offset, k, normed + token * k);
            p.x = normed, p.x_stride = k;
        }
        const int64_t begin = shares * part / threads * SHARE;
        const int64_t end = std::min(outputs, shares * (part + 1) / threads * SHARE);
        multiply(p, begin, end);
        if (!activation) continue;
        multiply(p, outputs + begin, outputs + end);
        if (activation == 2) activate<true>(p, begin, end, outputs, out);
        else activate<false>(p, begin, end, outputs, out);
    }
}

PACKED(small_batch_linear)
