#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <list>
#include <mutex>
#include <thread>

#include "copy.hpp"
#include "forks.hpp"

namespace ds_ext {

/// From this size on, waking a thread takes much less time than the copy.
inline constexpr std::uint64_t kLargeCopy = 4 << 20;

/// Thread that takes a share of large copies on another core, because one core does not saturate the memory bandwidth.
/// One per process.
class Copier : public Owned {
  public:
    /// Copy to a target that is aligned to 64 bytes. The caller copies blocks too and never waits for a block that the
    /// thread has not started, so busy cores cost no extra time.
    static void copy(unsigned char* target, const unsigned char* source, std::uint64_t bytes) {
        if (bytes < kLargeCopy) return copy_bytes(target, source, bytes, bytes);
        Task task{target, source, bytes};
        of_process().share(task);
    }

  private:
    static constexpr std::uint64_t kBlock = 256 << 10;

    /// One copy, on the caller's stack.
    struct Task {
        unsigned char* target;
        const unsigned char* source;
        std::uint64_t bytes;
        std::uint64_t next = 0;         // offset of the next block to copy
        std::uint64_t in_progress = 0;  // blocks being copied
        bool all_taken() const { return next == bytes; }
    };

    /// Return the copier of this process. A forked child inherits the object but not its thread, so it makes a new one.
    static Copier& of_process() {
        static std::atomic<Copier*> current{nullptr};
        Copier* found = current.load(std::memory_order_acquire);
        if (found != nullptr && found->ours()) return *found;
        auto* made = new Copier;  // never deleted, because its thread is never joined
        if (current.compare_exchange_strong(found, made)) return *made;
        delete made;
        return *found;
    }

    void share(Task& task) {
        std::unique_lock lock(mutex_);
        const auto entry = tasks_.insert(tasks_.end(), &task);
        wake();
        while (!task.all_taken()) copy_block(task, lock);
        tasks_.erase(entry);
        while (task.in_progress > 0) {  // the thread's last block
            lock.unlock();
            std::this_thread::yield();
            lock.lock();
        }
    }

    /// Copy the next block of the task, with the lock released during the copy.
    static void copy_block(Task& task, std::unique_lock<std::mutex>& lock) {
        const std::uint64_t at = task.next, count = std::min(kBlock, task.bytes - at);
        task.next += count;
        ++task.in_progress;
        lock.unlock();
        copy_bytes(task.target + at, task.source + at, count, task.bytes);
        lock.lock();
        --task.in_progress;
    }

    /// Wake the thread, if it exists and has a core to run on.
    void wake() {
        if (!started_) start();
        if (running_ && move_to_other_core()) task_added_.notify_one();
    }

    /// Start the thread with all signals blocked, so that Python's threads receive them.
    void start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            std::thread made([this] { run(); });
            thread_ = made.native_handle();
            made.detach();
            running_ = true;
        } catch (const std::exception&) {  // copy without the thread
        }
        started_ = true;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    /// Keep the thread off the caller's core, where the scheduler would otherwise tend to place it. Returns false if
    /// there is no other core.
    bool move_to_other_core() const {
        cpu_set_t cores;
        if (sched_getaffinity(0, sizeof cores, &cores) != 0) return true;  // more cores than cpu_set_t can hold
        CPU_CLR(static_cast<std::size_t>(sched_getcpu()), &cores);
        return CPU_COUNT(&cores) > 0 && pthread_setaffinity_np(thread_, sizeof cores, &cores) == 0;
    }

    [[noreturn]] void run() {
        std::unique_lock lock(mutex_);
        while (true) {
            auto next = tasks_.end();
            task_added_.wait(lock, [&] {
                next = std::find_if(tasks_.begin(), tasks_.end(), [](const Task* task) { return !task->all_taken(); });
                return next != tasks_.end();
            });
            copy_block(**next, lock);
        }
    }

    std::mutex mutex_;
    std::condition_variable task_added_;
    std::list<Task*> tasks_;
    pthread_t thread_{};
    bool started_ = false, running_ = false;
};

}  // namespace ds_ext
