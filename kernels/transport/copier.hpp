#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "forks.hpp"

namespace ds_ext {

/// From here on to wake a thread takes much less time than the copy.
inline constexpr std::uint64_t kLargeCopy = 4 << 20;

/// A thread of the process for large copies, on another core than their sender's: one core alone does not fill the
/// memory's bandwidth, and a sender whose tensors stay as they are need not wait. Messages are handed over in the order
/// of their coming.
class Copier : public Owned {
  public:
    struct Block {
        unsigned char* target;  // aligned to 64 bytes
        const unsigned char* source;
        std::uint64_t bytes;
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

    /// Copy now. The caller works too, and waits for no block that the thread has not begun: on busy cores this takes
    /// as long as alone.
    static void copy(const Block& whole) {
        if (whole.bytes < kLargeCopy) return copy_bytes(whole.target, whole.source, whole.bytes, whole.bytes);
        of_process().share(whole);
    }

    /// Copy beside the caller, then call `hand_over`, which throws nothing; `pending` counts the message until then.
    /// Where there is no thread, or no core for it, all is done at once.
    void add(const std::vector<Block>& wholes, std::function<void()> hand_over, std::atomic<std::uint64_t>& pending) {
        std::unique_lock lock(mutex_);
        const auto made = queue(wholes);
        made->hand_over = std::move(hand_over);
        made->pending = &pending;
        pending.fetch_add(1, std::memory_order_relaxed);
        if (!wake())
            while (made->taken < made->blocks.size()) work(*made, lock);
        finish();  // also one of no bytes, which no thread will work on
    }

    /// Until all that `pending` counts is done: as long as copies take.
    void settle(const std::atomic<std::uint64_t>& pending) {
        std::unique_lock lock(mutex_);
        done_.wait(lock, [&] { return pending.load(std::memory_order_relaxed) == 0; });
    }

  private:
    static constexpr std::uint64_t kBlock = 256 << 10;

    struct Message {
        std::vector<Block> blocks;
        std::size_t taken = 0, done = 0;
        std::uint64_t bytes = 0;
        std::function<void()> hand_over;
        std::atomic<std::uint64_t>* pending = nullptr;  // of who does not wait
        bool copied() const { return done == blocks.size(); }
    };
    using Messages = std::list<Message>;

    Messages::iterator queue(const std::vector<Block>& wholes) {
        Message message;
        for (const Block& whole : wholes) {
            message.bytes += whole.bytes;
            for (std::uint64_t at = 0; at < whole.bytes; at += kBlock)
                message.blocks.push_back({whole.target + at, whole.source + at, std::min(kBlock, whole.bytes - at)});
        }
        return messages_.insert(messages_.end(), std::move(message));
    }

    /// Copy a block of the message, without the lock meanwhile.
    void work(Message& message, std::unique_lock<std::mutex>& lock) {
        const Block block = message.blocks[message.taken++];
        lock.unlock();
        copy_bytes(block.target, block.source, block.bytes, message.bytes);
        lock.lock();
        ++message.done;
    }

    void share(const Block& whole) {
        std::unique_lock lock(mutex_);
        const auto made = queue({whole});
        wake();
        while (made->taken < made->blocks.size()) work(*made, lock);
        while (!made->copied()) {  // the thread's last block
            lock.unlock();
            std::this_thread::yield();
            lock.lock();
        }
        messages_.erase(made);
        finish();
    }

    /// Whether the thread will take what was queued.
    bool wake() {
        if (!started_) start();
        if (!running_ || !stay_off_this_core()) return false;
        given_.notify_one();
        return true;
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
            Messages::iterator next;
            given_.wait(lock, [&] {
                next = std::find_if(messages_.begin(), messages_.end(),
                                    [](const Message& message) { return message.taken < message.blocks.size(); });
                return next != messages_.end();
            });
            work(*next, lock);
            finish();
        }
    }

    /// Under the lock: who waits for a counter may destroy it as soon as it is zero.
    void finish() {
        while (!messages_.empty() && messages_.front().copied() && messages_.front().pending != nullptr) {
            messages_.front().hand_over();
            messages_.front().pending->fetch_sub(1, std::memory_order_release);
            messages_.pop_front();
            done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable given_, done_;
    Messages messages_;
    pthread_t thread_{};
    bool started_ = false, running_ = false;
};

}  // namespace ds_ext
