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

/// From here on to wake a thread takes much less time than the copy.
inline constexpr std::uint64_t kLargeCopy = 4 << 20;

/// A thread of the process that shares large copies with their sender, on another core: one core alone does not fill
/// the memory's bandwidth.
class Copier : public Owned {
  public:
    /// Copy now; the target is aligned to 64 bytes. The caller works too, and waits for no block that the thread has
    /// not begun: on busy cores this takes as long as alone.
    static void copy(unsigned char* target, const unsigned char* source, std::uint64_t bytes) {
        if (bytes < kLargeCopy) return copy_bytes(target, source, bytes, bytes);
        Task task{target, source, bytes};
        of_process().share(task);
    }

  private:
    static constexpr std::uint64_t kBlock = 256 << 10;

    /// One copy, on its caller's stack.
    struct Task {
        unsigned char* target;
        const unsigned char* source;
        std::uint64_t bytes;
        std::uint64_t next = 0;         // offset of the next block that is not being copied
        std::uint64_t in_progress = 0;  // blocks that are being copied
        bool all_taken() const { return next == bytes; }
    };

    /// A forked child has its parent's memory, and not its threads.
    static Copier& of_process() {
        static std::atomic<Copier*> current{nullptr};
        Copier* found = current.load(std::memory_order_acquire);
        if (found != nullptr && found->ours()) return *found;
        auto* made = new Copier;  // lives as long as the process: its thread is never joined
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

    /// Copy the next block of the task, without the lock meanwhile.
    static void copy_block(Task& task, std::unique_lock<std::mutex>& lock) {
        const std::uint64_t at = task.next, count = std::min(kBlock, task.bytes - at);
        task.next += count;
        ++task.in_progress;
        lock.unlock();
        copy_bytes(task.target + at, task.source + at, count, task.bytes);
        lock.lock();
        --task.in_progress;
    }

    /// Have the thread take blocks, where there is one and a core for it.
    void wake() {
        if (!started_) start();
        if (running_ && stay_off_this_core()) given_.notify_one();
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
            running_ = true;
        } catch (const std::exception&) {  // no thread can be had: it goes without
        }
        started_ = true;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    /// A thread that is woken likes to run where its waker does, and would only take turns with it. False where there
    /// is no other core.
    bool stay_off_this_core() const {
        cpu_set_t cores;
        if (sched_getaffinity(0, sizeof cores, &cores) != 0) return true;  // more cores than the type has room for
        CPU_CLR(static_cast<std::size_t>(sched_getcpu()), &cores);
        return CPU_COUNT(&cores) > 0 && pthread_setaffinity_np(thread_, sizeof cores, &cores) == 0;
    }

    [[noreturn]] void run() {
        std::unique_lock lock(mutex_);
        while (true) {
            auto next = tasks_.end();
            given_.wait(lock, [&] {
                next = std::find_if(tasks_.begin(), tasks_.end(), [](const Task* task) { return !task->all_taken(); });
                return next != tasks_.end();
            });
            copy_block(**next, lock);
        }
    }

    std::mutex mutex_;
    std::condition_variable given_;
    std::list<Task*> tasks_;
    pthread_t thread_{};
    bool started_ = false, running_ = false;
};

}  // namespace ds_ext
