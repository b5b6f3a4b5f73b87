#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "copy.hpp"
#include "forks.hpp"

namespace ds_ext {

// From here on half of a copy takes much longer than to wake a thread.
inline constexpr std::uint64_t kHelped = 4 << 20;

/// A thread of the process that takes a share of large copies, where there is a core for it: one core alone does not
/// fill the memory's bandwidth. Who copies takes the blocks that the thread does not, and waits for none that it has
/// not begun: on busy cores a copy takes as long as alone.
class CopyHelper : public Owned {
  public:
    /// memcpy; the target is aligned to 64 bytes.
    static void copy(unsigned char* target, const unsigned char* source, std::uint64_t bytes) {
        if (bytes < kHelped) return copy_bytes(target, source, bytes, bytes);
        of_process().share({target, source, bytes});
    }

  private:
    static constexpr std::uint64_t kBlock = 256 << 10;

    struct Job {
        unsigned char* target;
        const unsigned char* source;
        std::uint64_t bytes;
        std::atomic<std::uint64_t> taken{0};

        void work() {
            for (std::uint64_t at; (at = taken.fetch_add(kBlock, std::memory_order_relaxed)) < bytes;)
                copy_bytes(target + at, source + at, std::min(kBlock, bytes - at), bytes);
        }
    };

    /// A forked child has its parent's memory, and not its threads.
    static CopyHelper& of_process() {
        static std::atomic<CopyHelper*> current{nullptr};
        CopyHelper* found = current.load(std::memory_order_acquire);
        if (found != nullptr && found->ours()) return *found;
        auto* made = new CopyHelper;  // lives as long as the process: its thread is never joined
        if (current.compare_exchange_strong(found, made)) return *made;
        delete made;
        return *found;
    }

    void share(Job job) {
        std::unique_lock turn(one_at_a_time_, std::try_to_lock);
        if (!turn) return job.work();
        {
            const std::lock_guard lock(mutex_);
            if (!started_) start();
            if (!thread_ || !stay_off_this_core()) return job.work();
            job_ = &job;
        }
        given_.notify_one();
        job.work();
        {
            const std::lock_guard lock(mutex_);
            job_ = nullptr;  // from here on the thread does not begin
        }
        while (working_.load(std::memory_order_acquire)) std::this_thread::yield();  // its last block
    }

    /// Signals are for the threads that Python knows.
    void start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            std::thread made([this] { run(); });
            thread_ = made.native_handle();
            made.detach();
        } catch (const std::exception&) {  // no thread can be had: it goes without
        }
        started_ = true;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    /// A thread that is woken likes to run where its waker does, and would only take turns with it. False where there is
    /// no other core.
    bool stay_off_this_core() const {
        cpu_set_t cores;
        if (sched_getaffinity(0, sizeof cores, &cores) != 0) return true;  // more cores than the type has room for
        CPU_CLR(static_cast<std::size_t>(sched_getcpu()), &cores);
        return CPU_COUNT(&cores) > 0 && pthread_setaffinity_np(*thread_, sizeof cores, &cores) == 0;
    }

    [[noreturn]] void run() {
        std::unique_lock lock(mutex_);
        while (true) {
            given_.wait(lock, [this] { return job_ != nullptr; });
            Job& job = *std::exchange(job_, nullptr);
            working_.store(true, std::memory_order_relaxed);
            lock.unlock();
            job.work();
            working_.store(false, std::memory_order_release);
            lock.lock();
        }
    }

    std::mutex one_at_a_time_, mutex_;
    std::condition_variable given_;
    Job* job_ = nullptr;
    std::atomic<bool> working_{false};
    bool started_ = false;
    std::optional<pthread_t> thread_;
};

}  // namespace ds_ext
