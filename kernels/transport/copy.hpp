#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace ds_ext {

/// From this size on, a message exceeds the caches of a core. Streaming stores avoid reading each line of the target
/// first, and reading four pages at once keeps more cache lines in flight than the prefetcher does. Large messages take
/// two thirds of memcpy's time.
inline constexpr std::uint64_t kStreamedBytes = 4 << 20;

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx"))) inline void copy_streaming(unsigned char* target, const unsigned char* source,
                                                          std::uint64_t bytes) {
    constexpr std::uint64_t page = 4096, pages = 4, line = 64, ahead = 512;
    std::uint64_t done = 0;
    for (; bytes - done >= pages * page; done += pages * page) {
        for (std::uint64_t i = done; i < done + page; i += line) {
            for (std::uint64_t at = i; at < i + pages * page; at += page) __builtin_prefetch(source + at + ahead);
            for (std::uint64_t at = i; at < i + pages * page; at += page) {
                const auto* from = reinterpret_cast<const __m256i*>(source + at);
                auto* to = reinterpret_cast<__m256i*>(target + at);
                const __m256i first = _mm256_loadu_si256(from), second = _mm256_loadu_si256(from + 1);
                _mm256_stream_si256(to, first);
                _mm256_stream_si256(to + 1, second);
            }
        }
    }
    std::memcpy(target + done, source + done, bytes - done);
    _mm_sfence();  // a later release store does not order streaming stores
}
#endif

/// Copy `bytes`, a part of a copy of `whole` bytes, to a target that is aligned to 64 bytes.
inline void copy_bytes(unsigned char* target, const unsigned char* source, std::uint64_t bytes, std::uint64_t whole) {
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool streams = __builtin_cpu_supports("avx");
    if (streams && whole >= kStreamedBytes) return copy_streaming(target, source, bytes);
#endif
    std::memcpy(target, source, bytes);
}

}  // namespace ds_ext
