// Packed entry of a function, whose arguments follow one another in 64 bits each: see cpp_replay.cpp.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace {

template <typename T>
inline T argument(const int64_t* from) {
    static_assert(sizeof(T) <= sizeof(int64_t));
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename Result, typename... Types, size_t... I>
inline void call(Result (*function)(Types...), const int64_t* arguments, std::index_sequence<I...>) {
    function(argument<Types>(arguments + I)...);
}

template <typename Result, typename... Types>
inline void call(Result (*function)(Types...), const int64_t* arguments) {
    call(function, arguments, std::index_sequence_for<Types...>{});
}

}  // namespace

#define PACKED(name) \
    extern "C" void name##_packed(const int64_t* arguments) { call(&name, arguments); }
