#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "descriptor.hpp"
#include "forks.hpp"

namespace ds_ext {

/// Pool of memory for messages, because page faults of fresh memory cost more than the copy into it. Thread-safe.
class Pool : public Owned, public std::enable_shared_from_this<Pool> {
  public:
    /// Return at least `bytes` of uninitialized memory, aligned to 64 bytes. It returns to the pool with the last
    /// pointer.
    std::shared_ptr<unsigned char> take(std::uint64_t bytes) {
        const std::uint64_t size = rounded(bytes);
        unsigned char* memory = reuse(size);
        if (memory == nullptr) {
            // A peer may announce any size, and the system overcommits.
            if (size < bytes || size > host_bytes()) throw std::bad_alloc();
            memory = static_cast<unsigned char*>(std::aligned_alloc(kAlignment, size));
            if (memory == nullptr) throw std::bad_alloc();
        }
        return {memory, [pool = shared_from_this(), size](unsigned char* freed) { pool->recycle(freed, size); }};
    }

    ~Pool() {
        for (auto& [size, spare] : spare_)
            for (unsigned char* memory : spare) std::free(memory);
    }

  private:
    static constexpr std::uint64_t kMinBytes = 4096, kSpareBytes = 256 << 20;

    /// Round up to one of eight sizes per power of two, so that messages of similar sizes share memory.
    static std::uint64_t rounded(std::uint64_t bytes) {
        std::uint64_t step = kMinBytes / 8;
        while (step * 16 < bytes && step < (std::uint64_t{1} << 59)) step *= 2;
        return std::max(kMinBytes, (bytes + step - 1) / step * step);
    }

    static std::uint64_t host_bytes() {
        static const auto bytes =
            static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
        return bytes;
    }

    unsigned char* reuse(std::uint64_t size) {
        const std::lock_guard<std::mutex> guard(mutex_);
        const auto found = spare_.find(size);
        if (found == spare_.end() || found->second.empty()) return nullptr;
        unsigned char* memory = found->second.back();
        found->second.pop_back();
        spare_bytes_ -= size;
        return memory;
    }

    void recycle(unsigned char* memory, std::uint64_t size) {
        if (!ours()) return;  // another thread may have held the lock at the fork
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            if (spare_bytes_ + size <= kSpareBytes) {
                spare_[size].push_back(memory);
                spare_bytes_ += size;
                return;
            }
        }
        std::free(memory);
    }

    std::mutex mutex_;
    std::map<std::uint64_t, std::vector<unsigned char*>> spare_;
    std::uint64_t spare_bytes_ = 0;
};

}  // namespace ds_ext
