#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "tcp_connection.hpp"

namespace ds_ext {

/// What became of the other end of a pair, and the connection over which ends tell each other what a broken queue pair
/// cannot. Used under the pair's lock.
class RdmaFate {
  public:
    explicit RdmaFate(std::uint32_t peer) : peer_(peer) {}

    /// Over it causes and ends are told.
    void control(std::shared_ptr<TcpConnection> connection) { control_ = std::move(connection); }

    /// The other end says why it fails.
    void heard_cause(std::string cause) {
        if (cause_.empty()) cause_ = std::move(cause);
    }
    /// The other end is done.
    void heard_close() { closed_ = true; }

    /// The queue pair is broken: no more goes through it. False where that is known, or to be expected.
    bool fail(const std::string& what, int code) {
        if (over()) return false;
        failure_ = code == 0 ? what : what + " (" + std::strerror(code) + ")";
        // The other end sees nothing of it where it only receives.
        if (control_ && !aborted_) control_->abort("rank " + std::to_string(peer_) + " " + failure_);
        return true;
    }

    /// This rank fails; whether that is new. The queue pair may tell it too.
    bool abort(const std::string& cause) {
        if (std::exchange(aborted_, true)) return false;
        if (control_) control_->abort(cause);
        return true;
    }
    void close() {
        if (control_) control_->close();
    }

    /// Why nothing more comes from the other end, as words that follow "rank 3 ..."; empty while it may.
    std::string words() const {
        if (!cause_.empty()) return "failed: " + cause_;
        if (closed_) return "has closed its transport";
        const std::string told = control_ ? control_->gone() : std::string();
        return told.empty() ? failure_ : told;
    }
    bool broken() const { return !failure_.empty(); }
    bool closed() const { return closed_; }
    bool over() const { return broken() || closed_; }

  private:
    const std::uint32_t peer_;
    std::shared_ptr<TcpConnection> control_;
    bool closed_ = false, aborted_ = false;
    std::string failure_, cause_;
};

}  // namespace ds_ext
