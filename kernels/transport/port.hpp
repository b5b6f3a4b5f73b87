#pragma once

#include <memory>
#include <vector>

#include "bell.hpp"
#include "io.hpp"
#include "link.hpp"

namespace ds_ext {

/// All links of a rank, its one bell, and its thread for the links that need one.
class Port : public Owned {
  public:
    Port() : bell_(std::make_shared<Bell>(Bell::create())), spin_(0) {}

    /// How long to look before every sleep, at most; at first not at all.
    void spin(double most_us) { spin_ = Spin(most_us); }

    int descriptor() const { return bell_->descriptor(); }
    void close_descriptor() { bell_->close_descriptor(); }
    void add(std::shared_ptr<Incoming> link) { links_.push_back(std::move(link)); }

    const std::shared_ptr<Bell>& bell() const { return bell_; }
    const std::shared_ptr<Io>& io() {
        if (!io_) io_ = std::make_shared<Io>();
        return io_;
    }

    /// Everything that has arrived, by link and in the order in which it was sent.
    std::vector<std::unique_ptr<Message>> take() {
        std::vector<std::unique_ptr<Message>> found;
        for (const auto& link : links_)
            while (link->news()) found.push_back(std::make_unique<Message>(link));
        return found;
    }

    /// Until something has arrived, at most `seconds`; returns earlier when a peer rings for another reason.
    bool wait_arrival(double seconds) {
        refuse_fork();
        return bell_->wait([this] { return arrived(); }, nanoseconds(seconds), spin_);
    }

    /// Until the receiver of `link` has taken messages or returned slots, or something has arrived; at most `seconds`.
    bool wait_room(const Outgoing& link, double seconds) {
        refuse_fork();
        return bell_->wait([&] { return link.news() || arrived(); }, nanoseconds(seconds), spin_);
    }

  private:
    bool arrived() const {
        for (const auto& link : links_)
            if (link->news()) return true;
        return false;
    }

    static std::chrono::nanoseconds nanoseconds(double seconds) {
        return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
    }

    std::shared_ptr<Bell> bell_;
    std::shared_ptr<Io> io_;
    Spin spin_;
    std::vector<std::shared_ptr<Incoming>> links_;
};

}  // namespace ds_ext
