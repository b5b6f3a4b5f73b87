#pragma once

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace ds_ext {

/// Number of forks since the module was loaded. A forked child (a data loader's worker) shares the parent's segments,
/// so it must neither return slots nor send.
inline std::atomic<std::uint32_t>& forks() {
    static std::atomic<std::uint32_t> count{0};
    return count;
}

/// File descriptors plus one that a forked child closes at once, because peers detect the end of this process by them.
inline std::array<std::atomic<int>, 16384>& private_files() {
    static std::array<std::atomic<int>, 16384> entries{};
    return entries;
}

inline void count_forks() {
    private_files();  // constructed before any fork
    pthread_atfork(nullptr, nullptr, [] {
        forks().fetch_add(1, std::memory_order_relaxed);
        for (auto& entry : private_files())
            if (const int file = entry.exchange(0, std::memory_order_relaxed); file > 0) ::close(file - 1);
    });
}

/// Base of objects that only the process that made them may use.
class Owned {
  public:
    bool ours() const { return made_ == forks().load(std::memory_order_relaxed); }
    void refuse_fork() const {
        if (!ours()) throw std::runtime_error("link: cannot be used in a forked child");
    }

  private:
    std::uint32_t made_ = forks().load(std::memory_order_relaxed);
};

/// File descriptor that is closed by the destructor and in forked children.
class PrivateFile : public Owned {
  public:
    explicit PrivateFile(int number) : number_(number) {
        for (auto& entry : private_files()) {
            int free = 0;
            if (number >= 0 && entry.compare_exchange_strong(free, number + 1)) break;
        }
    }
    PrivateFile(const PrivateFile&) = delete;
    PrivateFile& operator=(const PrivateFile&) = delete;
    ~PrivateFile() { close(); }

    int number() const { return number_; }
    void close() {
        const int number = std::exchange(number_, -1);
        if (number < 0 || !ours()) return;  // in a child the number may belong to another file
        for (auto& entry : private_files()) {
            int mine = number + 1;
            if (entry.compare_exchange_strong(mine, 0)) break;
        }
        ::close(number);
    }

  private:
    int number_;
};

}  // namespace ds_ext
