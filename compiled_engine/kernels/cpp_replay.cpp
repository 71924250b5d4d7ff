// Replays recorded calls of C++ kernels, one after another.
#include <cstdint>

struct Call {
    void (*function)(const int64_t* arguments);
    const int64_t* arguments;
};

extern "C" void replay(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; ++i) calls[i].function(calls[i].arguments);
}
