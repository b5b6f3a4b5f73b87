#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "doorbell.hpp"
#include "io_thread.hpp"
#include "verbs_device.hpp"

namespace ds_ext {

/// Open port of a device whose events wake a rank. The I/O thread watches it while a link uses it.
class RdmaPort : public Owned, public std::enable_shared_from_this<RdmaPort> {
  public:
    RdmaPort(std::shared_ptr<Doorbell> doorbell, std::shared_ptr<IoThread> io, const verbs::PortChoice& choice)
        : doorbell_(std::move(doorbell)), io_(std::move(io)), open_(std::make_shared<verbs::OpenPort>(choice)) {}

    const std::shared_ptr<Doorbell>& doorbell() const { return doorbell_; }
    const std::shared_ptr<verbs::OpenPort>& open() const { return open_; }

    /// Link that uses the port.
    class User {
      public:
        virtual ~User() = default;
        /// Called by the I/O thread about once a second.
        virtual void idle() = 0;
    };

    void enter(const User* user, std::weak_ptr<User> self) {
        const std::lock_guard<std::mutex> guard(mutex_);
        if (!watcher_) {
            watcher_ = std::make_shared<Watcher>(open_, doorbell_);
            for (const int file : {open_->events(), open_->device_events()}) io_->watch(file, EPOLLIN, watcher_);
        }
        watcher_->add(user, std::move(self));
    }

    void leave(const User* user) {
        const std::lock_guard<std::mutex> guard(mutex_);
        if (!ours() || !watcher_ || watcher_->remove(user) > 0) return;
        for (const int file : {open_->events(), open_->device_events()}) io_->unwatch(file);
        watcher_.reset();
    }

  private:
    class Watcher final : public IoThread::Watcher {
      public:
        Watcher(std::shared_ptr<verbs::OpenPort> open, std::shared_ptr<Doorbell> doorbell)
            : open_(std::move(open)), doorbell_(std::move(doorbell)) {}

        void ready(int file, std::uint32_t) override {
            if (file == open_->events())
                open_->take_events();
            else
                open_->take_device_events();  // links detect failures by their completions
            doorbell_->ring();
        }
        IoThread::Time due(IoThread::Time now) override {
            if (now < next_) return next_;
            std::vector<std::shared_ptr<User>> present;
            {
                const std::lock_guard<std::mutex> guard(mutex_);
                for (const auto& [user, self] : users_)
                    if (auto found = self.lock()) present.push_back(std::move(found));
            }
            for (const auto& user : present) user->idle();
            return next_ = now + std::chrono::seconds(1);
        }

        void add(const User* user, std::weak_ptr<User> self) {
            const std::lock_guard<std::mutex> guard(mutex_);
            users_[user] = std::move(self);
        }
        std::size_t remove(const User* user) {
            const std::lock_guard<std::mutex> guard(mutex_);
            users_.erase(user);
            return users_.size();
        }

      private:
        IoThread::Time next_{};
        std::mutex mutex_;
        std::map<const User*, std::weak_ptr<User>> users_;
        std::shared_ptr<verbs::OpenPort> open_;
        std::shared_ptr<Doorbell> doorbell_;
    };

    std::shared_ptr<Doorbell> doorbell_;
    std::shared_ptr<IoThread> io_;
    std::shared_ptr<verbs::OpenPort> open_;
    std::mutex mutex_;
    std::shared_ptr<Watcher> watcher_;
};

}  // namespace ds_ext
