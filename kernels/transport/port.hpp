#pragma once

#include <memory>
#include <vector>

#include "doorbell.hpp"
#include "io_thread.hpp"
#include "link.hpp"

namespace ds_ext {

/// All links of a rank, its one doorbell, and its thread for the links that need one.
class Port : public Owned {
  public:
    Port() : doorbell_(std::make_shared<Doorbell>(Doorbell::create())), spin_(0) {}

    /// Set the longest time to poll before a sleep; 0 at first.
    void spin(double most_us) { spin_ = Spin(most_us); }

    int descriptor() const { return doorbell_->descriptor(); }
    void close_descriptor() { doorbell_->close_descriptor(); }
    void add(std::shared_ptr<Incoming> link) { links_.push_back(std::move(link)); }

    const std::shared_ptr<Doorbell>& doorbell() const { return doorbell_; }
    const std::shared_ptr<IoThread>& io() {
        if (!io_) io_ = std::make_shared<IoThread>();
        return io_;
    }

    /// Everything that has arrived, by link and in the order in which it was sent.
    std::vector<std::unique_ptr<Message>> take() {
        std::vector<std::unique_ptr<Message>> found;
        for (const auto& link : links_)
            while (link->has_message()) found.push_back(std::make_unique<Message>(link));
        return found;
    }

    /// Until something has arrived, at most `seconds`; returns earlier when a peer rings for another reason.
    bool wait_arrival(double seconds) {
        refuse_fork();
        return doorbell_->wait([this] { return arrived(); }, nanoseconds(seconds), spin_);
    }

    /// Until the receiver of `link` has taken messages or returned slots, or something has arrived; at most `seconds`.
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
