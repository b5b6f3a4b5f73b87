#pragma once

// One doorbell per rank: a peer that has something for the rank rings it. A ring costs no system call while the rank
// is awake.

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <new>

#include "mapping.hpp"

namespace ds_ext {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// How long to look before going to sleep: a wake-up costs 15 to 100 microseconds, and so does looking in vain when
/// others need the core. Two ranks that answer each other are either both awake or both late: then each waits for the
/// other's wake-up too. So a sleep that a longer look would have spared makes the next looks as long, and every 32nd
/// look is a long one, whatever the last ones have taught.
class Spin {
  public:
    /// `most_us`: 0 when the ranks of this host outnumber its cores.
    explicit Spin(double most_us) : most_(most_us), now_(std::min(most_us, kStart)) {}

    std::chrono::nanoseconds next() {
        const double look = ++looks_ % kTrial == 0 ? most_ : now_;
        return std::chrono::nanoseconds(static_cast<std::int64_t>(look * 1000));
    }
    void found() {
        now_ = std::min(most_, std::max(now_ * 2, kStart));
        fruitless_ = 0;
    }
    /// The rank slept, and what it waited for came after all that time.
    void slept(std::chrono::nanoseconds waited) {
        const double us = static_cast<double>(waited.count()) / 1000;
        if (us > most_) return fruitless();
        now_ = std::min(most_, std::max(us * 1.5, kStart));
        fruitless_ = 0;
    }
    void fruitless() {
        if (++fruitless_ % kPatience == 0) now_ = now_ < kLeast ? 0 : now_ / 2;
    }

  private:
    static constexpr double kStart = 50, kLeast = 5;
    static constexpr unsigned kPatience = 8, kTrial = 32;
    double most_, now_;
    unsigned fruitless_ = 0, looks_ = 0;
};

class Doorbell {
  public:
    static Doorbell create() { return Doorbell(Mapping::create(kBytes)); }
    static Doorbell attach(int descriptor) { return Doorbell(Mapping::attach(descriptor, kBytes)); }

    int descriptor() const { return memory_.descriptor(); }
    void close_descriptor() { memory_.close_descriptor(); }

    /// True from before the last poll until the rank is awake again: what is stored meanwhile must ring.
    bool asleep() const { return face_->asleep.load(std::memory_order_acquire) != 0; }

    /// Wake the rank if it sleeps; what it is to see was stored before.
    void ring() {
        // Pairs with the fence in wait(): either the sleeper sees what was stored, or this sees that it sleeps.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (face_->asleep.load(std::memory_order_relaxed) == 0) return;
        face_->rings.fetch_add(1, std::memory_order_release);
        syscall(SYS_futex, &face_->rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    /// Wait until `arrived()` holds, the doorbell rings or `limit` has passed. Returns whether it holds.
    template <typename Arrived>
    bool wait(Arrived arrived, std::chrono::nanoseconds limit, Spin& spin) {
        using Clock = std::chrono::steady_clock;
        if (arrived()) return true;
        const auto look = std::min(spin.next(), limit);
        const auto start = Clock::now();
        while (Clock::now() - start < look) {
            for (int i = 0; i < 16; ++i) {
                if (arrived()) return spin.found(), true;
                relax();
            }
        }
        const std::uint32_t seen = face_->rings.load(std::memory_order_acquire);
        face_->asleep.store(1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (!arrived() && limit > look) {
            const auto left = (limit - look).count();
            const timespec time{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
            syscall(SYS_futex, &face_->rings, FUTEX_WAIT, seen, &time, nullptr, 0);
        }
        face_->asleep.store(0, std::memory_order_relaxed);
        const bool is_here = arrived();
        if (is_here) {
            spin.slept(Clock::now() - start);
        } else {
            spin.fruitless();
        }
        return is_here;
    }

  private:
    static constexpr std::size_t kBytes = 4096;
    struct Face {
        std::atomic<std::uint32_t> rings;
        std::atomic<std::uint32_t> asleep;
    };
    static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(Face) == 8);

    explicit Doorbell(Mapping memory) : memory_(std::move(memory)), face_(reinterpret_cast<Face*>(memory_.address())) {
        memory_.commit(0, kBytes);
    }

    Mapping memory_;
    Face* face_;
};

}  // namespace ds_ext
