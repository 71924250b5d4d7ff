// Gumbel-max sampling on a CPU: noise, scores and the best token of each row in one pass over its logits.
//
// Noise agrees with gumbel.py: hash, conversion and logarithms are the same functions of the same bits.
#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
constexpr int64_t NOT_A_NUMBER = -2, NOTHING_ALLOWED = -3;  // as in sampled_tokens.py
constexpr uint64_t GOLDEN_GAMMA = 0x9E3779B97F4A7C15, MULTIPLIER_1 = 0xBF58476D1CE4E5B9,
                   MULTIPLIER_2 = 0x94D049BB133111EB;
constexpr float SMALLEST_UNIFORM = 1.0f / 9223372036854775808.0f;  // 2**-63
constexpr float LARGEST_UNIFORM = 1.0f - 1.0f / 16777216.0f;       // 1 - 2**-24

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint64_t Longs __attribute__((vector_size(LANES * 8)));
typedef int64_t SignedLongs __attribute__((vector_size(LANES * 8)));

// Output `index` (from 0) of SplitMix64 seeded with `seed`.
template <typename T>
inline T splitmix64(T seed, T index) {
    T bits = (index + 1) * GOLDEN_GAMMA + seed;
    bits ^= bits >> 30;
    bits *= MULTIPLIER_1;
    bits ^= bits >> 27;
    bits *= MULTIPLIER_2;
    return bits ^ (bits >> 31);
}

// Natural logarithm of positive normal numbers: x = 2**e * m, m in [sqrt(1/2), sqrt(2)), and a polynomial in m - 1
// (the coefficients of Cephes' logf, Moshier 1992).
inline Floats log(Floats x) {
    Ints bits = (Ints)x;
    Ints shifted = bits - 0x3f3504f3;  // sqrt(1/2)
    Ints exponent = shifted >> 23;
    Floats m = (Floats)((shifted & 0x007fffff) + 0x3f3504f3) - 1.0f;
    Floats e = __builtin_convertvector(exponent, Floats);
    Floats square = m * m;
    Floats y = m * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * square + e * -2.12194440e-4f - 0.5f * square;
    return m + y + e * 0.693359375f;
}

inline Floats gumbel(Longs bits) {
    Floats u = __builtin_convertvector((SignedLongs)(bits >> 1), Floats) * SMALLEST_UNIFORM;
    u = u < SMALLEST_UNIFORM ? Floats{} + SMALLEST_UNIFORM : u;
    u = u > LARGEST_UNIFORM ? Floats{} + LARGEST_UNIFORM : u;
    // -log(1 - u), exact for small u: the rounding error of 1 - u is added back.
    Floats rest = 1.0f - u;
    u = u - (1.0f - rest) - log(rest);
    return -log(u);
}

struct Best {
    float score;
    int64_t token;
};

// Index of the first largest score, and whether any score was NaN.
struct Search {
    Floats best = Floats{} - __builtin_inff();
    Ints token = Ints{};
    Ints nan = Ints{};

    inline void look(Floats scores, Ints tokens) {
        nan |= scores != scores;
        Ints better = scores > best;
        best = better ? scores : best;
        token = better ? tokens : token;
    }

    Best result() const {
        Best found{-__builtin_inff(), NOTHING_ALLOWED};
        for (int lane = 0; lane < LANES; ++lane) {
            if (nan[lane]) return {__builtin_nanf(""), NOT_A_NUMBER};
            const bool tie = best[lane] == found.score && found.token >= 0 && token[lane] < found.token;
            if (best[lane] > found.score || tie) found = {best[lane], token[lane]};
        }
        return found;
    }
};

template <bool RANDOM, bool FILTERED>
Best choose(const float* logits, int64_t vocab, int64_t first_token, float inverse_temperature, uint64_t key,
            float threshold) {
    Search search;
    Ints tokens;
    for (int lane = 0; lane < LANES; ++lane) tokens[lane] = lane;
    for (int64_t start = 0; start < vocab; start += LANES) {
        Floats scores;
        if (start + LANES <= vocab) {
            std::memcpy(&scores, logits + start, sizeof scores);
        } else {
            for (int lane = 0; lane < LANES; ++lane)
                scores[lane] = start + lane < vocab ? logits[start + lane] : -__builtin_inff();
        }
        if (RANDOM) {
            Ints dropped = scores < threshold;
            const Longs index = __builtin_convertvector(tokens, Longs) + (uint64_t)first_token;
            scores = scores * inverse_temperature + gumbel(splitmix64(Longs{} + key, index));
            if (FILTERED) scores = dropped ? Floats{} - __builtin_inff() : scores;
        }
        search.look(scores, tokens);
        tokens += LANES;
    }
    Best found = search.result();
    if (found.token >= 0) found.token += first_token;
    return found;
}

}  // namespace

// Arguments as in gumbel.py; thresholds and scores may be null. Rows whose index is negative get token 0.
extern "C" void sample(const float* logits, int64_t row_stride, const int32_t* row_index, const int64_t* positions,
                       const float* inverse_temperature, const int64_t* seeds, const float* thresholds, int64_t* tokens,
                       float* scores, int64_t first_token, int64_t rows, int64_t vocab, int64_t threads) {
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const int32_t state = row_index[row];
        if (state < 0) {
            tokens[row] = 0;
            if (scores) scores[row] = -__builtin_inff();
            continue;
        }
        const float* of_row = logits + row * row_stride;
        const float scale = inverse_temperature[state];
        const float threshold = thresholds ? thresholds[row] : -__builtin_inff();
        const uint64_t key = splitmix64((uint64_t)seeds[state], (uint64_t)positions[row]);
        Best found;
        if (!(scale > 0))
            found = choose<false, false>(of_row, vocab, first_token, scale, key, threshold);
        else if (threshold > -__builtin_inff())
            found = choose<true, true>(of_row, vocab, first_token, scale, key, threshold);
        else
            found = choose<true, false>(of_row, vocab, first_token, scale, key, threshold);
        tokens[row] = found.token;
        if (scores) scores[row] = found.score;
    }
}
