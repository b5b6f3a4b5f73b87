#pragma once

// I/O thread of a rank, shared by its tcp and RDMA links. It sleeps in epoll. Shared memory needs no thread.

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "errors.hpp"
#include "forks.hpp"

namespace ds_ext {

/// The thread runs while files are watched. It never calls Python.
class IoThread : public Owned, public std::enable_shared_from_this<IoThread> {
  public:
    using Clock = std::chrono::steady_clock;
    using Time = Clock::time_point;

    /// Callbacks of a link, called in the thread. They must not throw or block.
    class Watcher {
      public:
        virtual ~Watcher() = default;
        /// A file has these EPOLL events.
        virtual void ready(int file, std::uint32_t events) = 0;
        /// Do periodic work. Returns the latest time of the next call. Also called after every batch of events.
        virtual Time due(Time now) = 0;
    };

    IoThread() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (epoll_.number() < 0 || wake_event_.number() < 0) throw_errno("epoll");
        control(EPOLL_CTL_ADD, wake_event_.number(), EPOLLIN);
    }

    /// Call the watcher for the file's events until unwatch(). The first file starts the thread.
    void watch(int file, std::uint32_t events, std::shared_ptr<Watcher> watcher) {
        refuse_fork();
        const std::lock_guard<std::mutex> guard(mutex_);
        watched_[file] = std::move(watcher);
        try {
            control(EPOLL_CTL_ADD, file, events);
            if (!running_) start();
        } catch (...) {
            watched_.erase(file);
            throw;
        }
    }

    /// Change the events of a watched file. Thread-safe.
    void change(int file, std::uint32_t events) {
        epoll_event event{events, {.fd = file}};
        epoll_ctl(epoll_.number(), EPOLL_CTL_MOD, file, &event);
    }

    /// Stop the calls for the file, except one that is running. Call this before closing the file. Thread-safe.
    void unwatch(int file) {
        std::shared_ptr<Watcher> last;  // destroyed after the lock is released
        const std::lock_guard<std::mutex> guard(mutex_);
        const auto found = watched_.find(file);
        if (found == watched_.end()) return;
        last = std::move(found->second);
        watched_.erase(found);
        epoll_ctl(epoll_.number(), EPOLL_CTL_DEL, file, nullptr);
        wake();
    }

    /// Have the thread call due() of every watcher soon. Thread-safe.
    void wake() {
        if (woken_.exchange(true)) return;
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto written = write(wake_event_.number(), &one, sizeof one);
    }

  private:
    void control(int action, int file, std::uint32_t events) {
        epoll_event event{events, {.fd = file}};
        if (epoll_ctl(epoll_.number(), action, file, &event) != 0) throw_errno("epoll_ctl");
    }

    void start() {
        sigset_t all, before;  // Python's threads receive the signals
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            std::thread([self = shared_from_this()] { self->run(); }).detach();
            running_ = true;
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void run() {
        pthread_setname_np(pthread_self(), "ds_ext-io");
        std::array<epoll_event, 64> events{};
        Time next = Clock::now();
        while (true) {
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
            const int limit = static_cast<int>(std::clamp<long long>(left, 0, 1000));
            const int count = epoll_wait(epoll_.number(), events.data(), events.size(), limit);
            for (int i = 0; i < count; ++i) {
                const int file = events[i].data.fd;
                if (file == wake_event_.number()) {
                    std::uint64_t value = 0;
                    [[maybe_unused]] const auto got = read(file, &value, sizeof value);
                    woken_.store(false);
                } else if (const auto watcher = find(file)) {
                    watcher->ready(file, events[i].events);
                }
            }
            next = Clock::now() + std::chrono::seconds(1);
            for (const auto& watcher : all()) next = std::min(next, watcher->due(Clock::now()));
            const std::lock_guard<std::mutex> guard(mutex_);
            if (watched_.empty()) {
                running_ = false;
                return;
            }
        }
    }

    std::shared_ptr<Watcher> find(int file) {
        const std::lock_guard<std::mutex> guard(mutex_);
        const auto found = watched_.find(file);
        return found == watched_.end() ? nullptr : found->second;
    }

    std::set<std::shared_ptr<Watcher>> all() {
        const std::lock_guard<std::mutex> guard(mutex_);
        std::set<std::shared_ptr<Watcher>> found;
        for (const auto& [file, watcher] : watched_) found.insert(watcher);
        return found;
    }

    PrivateFile epoll_, wake_event_;
    std::mutex mutex_;
    std::map<int, std::shared_ptr<Watcher>> watched_;
    std::atomic<bool> woken_{false};
    bool running_ = false;
};

}  // namespace ds_ext
