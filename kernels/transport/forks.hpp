#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace ds_ext {

/// How many forks lie between this process and the one that loaded the module. A forked child (a data loader's worker)
/// shares the segments, and must neither return slots nor send: those belong to its parent.
inline std::atomic<std::uint32_t>& forks() {
    static std::atomic<std::uint32_t> count{0};
    return count;
}

inline void count_forks() {
    pthread_atfork(nullptr, nullptr, [] { forks().fetch_add(1, std::memory_order_relaxed); });
}

/// What belongs to the process that made it.
class Owned {
  public:
    bool ours() const { return made_ == forks().load(std::memory_order_relaxed); }
    void refuse_fork() const {
        if (!ours()) throw std::runtime_error("this process was forked from the one that has the connection");
    }

  private:
    std::uint32_t made_ = forks().load(std::memory_order_relaxed);
};

}  // namespace ds_ext
