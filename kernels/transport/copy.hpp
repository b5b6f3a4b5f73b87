#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace ds_ext {

/// From here on a message is larger than the caches of a core. To write around them saves that every line of the target
/// is read first: large ones take three quarters of memcpy's time, and their reader on another core waits no longer.
inline constexpr std::uint64_t kStreamedBytes = 4 << 20;

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx"))) inline void copy_streaming(unsigned char* target, const unsigned char* source,
                                                          std::uint64_t bytes) {
    constexpr std::uint64_t step = 128, ahead = 1024;
    std::uint64_t done = 0;
    for (; bytes - done >= step; done += step) {
        __builtin_prefetch(source + done + ahead);
        __builtin_prefetch(source + done + ahead + 64);
        for (std::uint64_t i = done; i < done + step; i += sizeof(__m256i)) {
            const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
            _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i), word);
        }
    }
    std::memcpy(target + done, source + done, bytes - done);
    _mm_sfence();  // such stores are not ordered by the release that publishes the message
}
#endif

/// memcpy of what may be a part of a `whole`; the target is aligned to 64 bytes.
inline void copy_bytes(unsigned char* target, const unsigned char* source, std::uint64_t bytes, std::uint64_t whole) {
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool streams = __builtin_cpu_supports("avx");
    if (streams && whole >= kStreamedBytes) return copy_streaming(target, source, bytes);
#endif
    std::memcpy(target, source, bytes);
}

}  // namespace ds_ext
