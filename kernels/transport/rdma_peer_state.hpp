#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "tcp_connection.hpp"

namespace ds_ext {

/// State of the peer of a pair: alive, failed or closed. It also holds the tcp connection that carries causes of
/// failure, which a broken queue pair cannot. Used under the pair's lock.
class RdmaPeerState {
  public:
    explicit RdmaPeerState(std::uint32_t peer) : peer_(peer) {}

    /// Set the connection that carries causes of failure.
    void control(std::shared_ptr<TcpConnection> connection) { control_ = std::move(connection); }

    /// The peer has sent the cause of its failure.
    void set_cause(std::string cause) {
        if (cause_.empty()) cause_ = std::move(cause);
    }
    /// The peer has closed its endpoints.
    void set_closed() { closed_ = true; }

    /// The queue pair is broken: no more goes through it. False where that is known, or to be expected.
    bool fail(const std::string& what, int code) {
        if (over()) return false;
        failure_ = code == 0 ? what : what + " (" + std::strerror(code) + ")";
        // A peer that only receives sees no error.
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

    /// Why nothing more comes from the peer, as words that follow "rank 3 ..."; empty while it may.
    std::string end_reason() const {
        if (!cause_.empty()) return "failed: " + cause_;
        if (closed_) return "has closed its transport";
        const std::string reason = control_ ? control_->end_reason() : std::string();
        return reason.empty() ? failure_ : reason;
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
