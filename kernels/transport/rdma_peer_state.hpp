#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "tcp_connection.hpp"

namespace ds_ext {

/// State of the peer of a pair: alive, failed or closed. It owns the tcp connection that reports failures, which a
/// broken queue pair cannot. Requires the pair's lock.
class RdmaPeerState {
  public:
    explicit RdmaPeerState(std::uint32_t peer) : peer_(peer) {}

    /// Set the connection that reports failures.
    void control(std::shared_ptr<TcpConnection> connection) { control_ = std::move(connection); }

    /// Record the cause of the peer's failure.
    void set_cause(std::string cause) {
        if (cause_.empty()) cause_ = std::move(cause);
    }
    /// Record that the peer has closed its endpoints.
    void set_closed() { closed_ = true; }

    /// Record that the queue pair is broken. Returns false if it was broken or closed before.
    bool fail(const std::string& what, int code) {
        if (over()) return false;
        failure_ = code == 0 ? what : what + " (" + std::strerror(code) + ")";
        // A peer that only receives would see no error.
        if (control_ && !aborted_) control_->abort("rank " + std::to_string(peer_) + " " + failure_);
        return true;
    }

    /// Send the cause of this rank's failure. Returns false if one was sent before.
    bool abort(const std::string& cause) {
        if (std::exchange(aborted_, true)) return false;
        if (control_) control_->abort(cause);
        return true;
    }
    void close() {
        if (control_) control_->close();
    }

    /// Return how the peer has ended, as the end of a sentence "rank 3 ..."; empty while it has not.
    std::string end_reason() const {
        if (!cause_.empty()) return "failed: " + cause_;
        if (closed_) return "has closed its transport";
        const std::string reason = control_ ? control_->end_reason() : std::string();
        return reason.empty() ? failure_ : reason;
    }
    bool broken() const { return !failure_.empty(); }
    bool over() const { return broken() || closed_; }

  private:
    const std::uint32_t peer_;
    std::shared_ptr<TcpConnection> control_;
    bool closed_ = false, aborted_ = false;
    std::string failure_, cause_;
};

}  // namespace ds_ext
