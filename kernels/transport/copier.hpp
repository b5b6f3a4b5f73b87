#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "copy.hpp"
#include "forks.hpp"

namespace ds_ext {

inline constexpr std::uint64_t kCopiedBeside = 1 << 20;  // from here on to wake a thread is the least of a copy's time

/// Copies large messages beside the thread that sends them, which goes on computing. A few threads for all links of a
/// process, started by the first message, share its blocks; messages are handed over in the order of their coming.
class Copier : public Owned {
  public:
    struct Block {
        unsigned char* target;
        const unsigned char* source;
        std::uint64_t bytes;
    };

    /// Of this process: a forked child has its parent's memory, and not its threads.
    static Copier& of_process() {
        static std::atomic<Copier*> current{nullptr};
        Copier* found = current.load(std::memory_order_acquire);
        if (found != nullptr && found->ours()) return *found;
        auto* made = new Copier;  // lives as long as the process: its threads are never joined
        if (current.compare_exchange_strong(found, made)) return *made;
        delete made;
        return *found;
    }

    /// Copy these bytes, then hand the message over, which throws nothing; `pending` counts it until then.
    /// Without a thread it is done at once.
    void add(std::vector<Block> wholes, std::function<void()> hand_over, std::atomic<std::uint64_t>& pending) {
        const std::lock_guard lock(mutex_);
        Message& message = messages_.emplace_back();
        for (const Block& whole : wholes) {
            message.bytes += whole.bytes;
            for (std::uint64_t at = 0; at < whole.bytes; at += kBlock)
                message.blocks.push_back({whole.target + at, whole.source + at, std::min(kBlock, whole.bytes - at)});
        }
        message.hand_over = std::move(hand_over);
        message.pending = &pending;
        pending.fetch_add(1, std::memory_order_relaxed);
        if (threads_ == 0) start();
        if (threads_ == 0)
            for (; message.done < message.blocks.size(); message.taken = ++message.done) copy(message, message.done);
        finish();
        given_.notify_all();
    }

    /// Until all that `pending` counts is done: as long as copies take.
    void settle(const std::atomic<std::uint64_t>& pending) {
        std::unique_lock lock(mutex_);
        done_.wait(lock, [&] { return pending.load(std::memory_order_relaxed) == 0; });
    }

  private:
    static constexpr std::uint64_t kBlock = 1 << 20;
    static constexpr unsigned kMostThreads = 2;  // two fill the memory's bandwidth that a rank may expect

    struct Message {
        std::vector<Block> blocks;
        std::size_t taken = 0, done = 0;
        std::uint64_t bytes = 0;
        std::function<void()> hand_over;
        std::atomic<std::uint64_t>* pending = nullptr;
    };

    static void copy(const Message& message, std::size_t number) {
        const Block& block = message.blocks[number];
        copy_bytes(block.target, block.source, block.bytes, message.bytes);
    }

    /// Signals are for the threads that Python knows.
    void start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            const unsigned most = std::clamp(std::thread::hardware_concurrency(), 1u, kMostThreads);
            for (; threads_ < most; ++threads_) std::thread([this] { run(); }).detach();
        } catch (const std::system_error&) {  // no more threads can be had now
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    [[noreturn]] void run() {
        std::unique_lock lock(mutex_);
        while (true) {
            std::list<Message>::iterator next;
            given_.wait(lock, [&] {
                next = std::find_if(messages_.begin(), messages_.end(),
                                    [](const Message& message) { return message.taken < message.blocks.size(); });
                return next != messages_.end();
            });
            const std::size_t number = next->taken++;
            lock.unlock();
            copy(*next, number);
            lock.lock();
            ++next->done;
            finish();
        }
    }

    /// Under the lock: who waits for a counter may destroy it as soon as it is zero.
    void finish() {
        while (!messages_.empty() && messages_.front().done == messages_.front().blocks.size()) {
            messages_.front().hand_over();
            messages_.front().pending->fetch_sub(1, std::memory_order_release);
            messages_.pop_front();
            done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable given_, done_;
    std::list<Message> messages_;
    unsigned threads_ = 0;
};

}  // namespace ds_ext
