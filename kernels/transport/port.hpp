#pragma once

#include <memory>
#include <vector>

#include "doorbell.hpp"
#include "io_thread.hpp"
#include "link.hpp"

namespace ds_ext {

/// Links of a rank, its doorbell, and its I/O thread.
class Port : public Owned {
  public:
    Port() : doorbell_(std::make_shared<Doorbell>(Doorbell::create())), spin_(0) {}

    /// Set the maximum spin time before a sleep; initially 0.
    void spin(double max_us) { spin_ = Spin(max_us); }

    int descriptor() const { return doorbell_->descriptor(); }
    void close_descriptor() { doorbell_->close_descriptor(); }
    void add(std::shared_ptr<Incoming> link) { links_.push_back(std::move(link)); }

    const std::shared_ptr<Doorbell>& doorbell() const { return doorbell_; }
    const std::shared_ptr<IoThread>& io() {
        if (!io_) io_ = std::make_shared<IoThread>();
        return io_;
    }

    /// Return all messages that have arrived, in the order of each link.
    std::vector<std::unique_ptr<Message>> take() {
        std::vector<std::unique_ptr<Message>> messages;
        for (const auto& link : links_)
            while (link->has_message()) messages.push_back(std::make_unique<Message>(link));
        return messages;
    }

    /// Wait for a message, at most `seconds`; less if a peer rings for another reason. Returns whether one has arrived.
    bool wait_arrival(double seconds) {
        refuse_fork();
        return doorbell_->wait([this] { return arrived(); }, nanoseconds(seconds), spin_);
    }

    /// Wait for link credits of `link` or for a message, at most `seconds`.
    bool wait_credit(const Outgoing& link, double seconds) {
        refuse_fork();
        return doorbell_->wait([&] { return link.has_update() || arrived(); }, nanoseconds(seconds), spin_);
    }

  private:
    bool arrived() const {
        for (const auto& link : links_)
            if (link->has_message()) return true;
        return false;
    }

    static std::chrono::nanoseconds nanoseconds(double seconds) {
        return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
    }

    std::shared_ptr<Doorbell> doorbell_;
    std::shared_ptr<IoThread> io_;
    Spin spin_;
    std::vector<std::shared_ptr<Incoming>> links_;
};

}  // namespace ds_ext
