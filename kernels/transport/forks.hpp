#pragma once

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace ds_ext {

/// How many forks lie between this process and the one that loaded the module. A forked child (a data loader's worker)
/// shares the segments, and must neither return slots nor send: those belong to its parent.
inline std::atomic<std::uint32_t>& forks() {
    static std::atomic<std::uint32_t> count{0};
    return count;
}

/// Files that a forked child closes at once, each as its number plus one: a peer learns of this process' end by theirs.
inline std::array<std::atomic<int>, 16384>& private_files() {
    static std::array<std::atomic<int>, 16384> entries{};
    return entries;
}

inline void count_forks() {
    private_files();  // made before any fork
    pthread_atfork(nullptr, nullptr, [] {
        forks().fetch_add(1, std::memory_order_relaxed);
        for (auto& entry : private_files())
            if (const int kept = entry.exchange(0, std::memory_order_relaxed); kept > 0) ::close(kept - 1);
    });
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

/// A file that closes itself, and that forked children do not keep.
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
        if (number < 0 || !ours()) return;  // the number may be another file's in a child
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
