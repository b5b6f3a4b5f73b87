#pragma once

// Doorbell of a rank: peers ring it after they have stored something for the rank. While the rank is awake, a ring
// costs no system call.

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

/// Adaptive spin time before a sleep. A wake-up costs 15 to 100 us; spinning in vain costs as much if others need the
/// core. If two ranks answer each other and both sleep, each message pays both wake-ups. The spin time therefore grows
/// to the length of a sleep that a longer spin would have avoided, and every 32nd spin has the maximum length.
class Spin {
  public:
    /// `max_us`: 0 if the ranks of this host outnumber its cores.
    explicit Spin(double max_us) : max_(max_us), current_(std::min(max_us, kStart)) {}

    std::chrono::nanoseconds next() {
        const double spin = ++spins_ % kTrial == 0 ? max_ : current_;
        return std::chrono::nanoseconds(static_cast<std::int64_t>(spin * 1000));
    }
    /// The message arrived during the spin.
    void hit() {
        current_ = std::min(max_, std::max(current_ * 2, kStart));
        misses_ = 0;
    }
    /// The message arrived during the sleep, `waited` after the start of the spin.
    void slept(std::chrono::nanoseconds waited) {
        const double us = static_cast<double>(waited.count()) / 1000;
        if (us > max_) return miss();
        current_ = std::min(max_, std::max(us * 1.5, kStart));
        misses_ = 0;
    }
    /// No message arrived in time for the longest spin.
    void miss() {
        if (++misses_ % kPatience == 0) current_ = current_ < kMin ? 0 : current_ / 2;
    }

  private:
    static constexpr double kStart = 50, kMin = 5;
    static constexpr unsigned kPatience = 8, kTrial = 32;
    double max_, current_;
    unsigned misses_ = 0, spins_ = 0;
};

class Doorbell {
  public:
    static Doorbell create() { return Doorbell(Mapping::create(kBytes)); }
    static Doorbell attach(int descriptor) { return Doorbell(Mapping::attach(descriptor, kBytes)); }

    int descriptor() const { return memory_.descriptor(); }
    void close_descriptor() { memory_.close_descriptor(); }

    /// Return whether the rank sleeps or is about to. The flag is set before the last check for messages.
    bool asleep() const { return page_->asleep.load(std::memory_order_acquire) != 0; }

    /// Wake the rank if it sleeps. Call this after storing what the rank should see.
    void ring() {
        // Pairs with the fence in wait(): either the sleeper sees the store, or this sees the sleeper's flag.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (page_->asleep.load(std::memory_order_relaxed) == 0) return;
        page_->rings.fetch_add(1, std::memory_order_release);
        syscall(SYS_futex, &page_->rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    /// Wait until `arrived()` holds, the doorbell rings or `limit` expires. Returns whether `arrived()` holds.
    template <typename Arrived>
    bool wait(Arrived arrived, std::chrono::nanoseconds limit, Spin& spin) {
        using Clock = std::chrono::steady_clock;
        if (arrived()) return true;
        const auto spin_time = std::min(spin.next(), limit);
        const auto start = Clock::now();
        while (Clock::now() - start < spin_time) {
            for (int i = 0; i < 16; ++i) {
                if (arrived()) return spin.hit(), true;
                relax();
            }
        }
        const std::uint32_t seen = page_->rings.load(std::memory_order_acquire);
        page_->asleep.store(1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (!arrived() && limit > spin_time) {
            const auto left = (limit - spin_time).count();
            const timespec time{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
            syscall(SYS_futex, &page_->rings, FUTEX_WAIT, seen, &time, nullptr, 0);
        }
        page_->asleep.store(0, std::memory_order_relaxed);
        const bool has_arrived = arrived();
        if (has_arrived)
            spin.slept(Clock::now() - start);
        else
            spin.miss();
        return has_arrived;
    }

  private:
    static constexpr std::size_t kBytes = 4096;
    struct Page {
        std::atomic<std::uint32_t> rings;
        std::atomic<std::uint32_t> asleep;
    };
    static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(Page) == 8);

    explicit Doorbell(Mapping memory) : memory_(std::move(memory)), page_(reinterpret_cast<Page*>(memory_.address())) {
        memory_.commit(0, kBytes);
    }

    Mapping memory_;
    Page* page_;
};

}  // namespace ds_ext
