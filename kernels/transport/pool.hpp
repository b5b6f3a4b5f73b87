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

/// Memory for messages, used again: fresh memory of the system costs more than the copy into it. Any thread.
class Pool : public Owned, public std::enable_shared_from_this<Pool> {
  public:
    /// At least `bytes`, aligned to 64, contents undefined. Goes back with the last copy of the pointer.
    std::shared_ptr<unsigned char> take(std::uint64_t bytes) {
        const std::uint64_t size = rounded(bytes);
        unsigned char* memory = reuse(size);
        if (memory == nullptr) {
            // A peer may announce anything; the system would promise more than it has.
            if (size < bytes || size > host_bytes()) throw std::bad_alloc();
            memory = static_cast<unsigned char*>(std::aligned_alloc(kAlignment, size));
            if (memory == nullptr) throw std::bad_alloc();
        }
        return {memory, [pool = shared_from_this(), size](unsigned char* back) { pool->recycle(back, size); }};
    }

    ~Pool() {
        for (auto& [size, spare] : spare_)
            for (unsigned char* memory : spare) std::free(memory);
    }

  private:
    static constexpr std::uint64_t kLeast = 4096, kSpareBytes = 256 << 20;

    /// Eight sizes between a power of two and the next, so that messages of about one size share their memory.
    static std::uint64_t rounded(std::uint64_t bytes) {
        std::uint64_t step = kLeast / 8;
        while (step * 16 < bytes && step < (std::uint64_t{1} << 59)) step *= 2;
        return std::max(kLeast, (bytes + step - 1) / step * step);
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
        if (!ours()) return;  // the lock may have been taken when this process was forked
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
