#pragma once

// Tcp connection of two ranks. The I/O thread receives, and sends control frames. The rank's main thread takes and
// writes messages.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "doorbell.hpp"
#include "frames.hpp"
#include "io_thread.hpp"
#include "tcp_outbox.hpp"

namespace ds_ext {

class TcpConnection final : public IoThread::Watcher,
                            public FrameReader::Sink,
                            public Owned,
                            public std::enable_shared_from_this<TcpConnection> {
  public:
    /// `socket`: connected, after the handshake; this takes ownership. `window`: limit of unreceived bytes.
    TcpConnection(int socket, std::shared_ptr<Doorbell> doorbell, std::shared_ptr<IoThread> io, std::uint64_t window,
                  bool receives)
        : socket_(socket),
          doorbell_(std::move(doorbell)),
          io_(std::move(io)),
          window_(window),
          receives_(receives),
          pool_(std::make_shared<Pool>()),
          reader_(pool_),
          outbox_(socket, io_, pool_) {
        const int on = 1;
        if (setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) throw_errno("TCP_NODELAY");
    }
    ~TcpConnection() override = default;

    /// Start the I/O. The constructor cannot, because the thread shares ownership.
    void start() {
        last_sent_ = last_check_ = IoThread::Clock::now();
        io_->watch(socket_.number(), TcpOutbox::kReading, shared_from_this());
    }

    // --- receiving, called by the main thread ---

    bool has_message() const {
        return arrived_.load(std::memory_order_acquire) != taken_.load(std::memory_order_relaxed) ||
               damaged_.load(std::memory_order_acquire);
    }

    Arrival take() {
        refuse_fork();
        Arrival arrival;
        {
            const std::lock_guard<std::mutex> guard(arriving_);
            if (queue_.empty()) throw LinkError(damage_);
            arrival = std::move(queue_.front());
            queue_.pop_front();
        }
        unreported_bytes_ += arrival.descriptors[0].body_bytes;
        taken_.fetch_add(1, std::memory_order_release);
        if (unreported_bytes_ >= window_ / 4) {  // the sender may wait for link credits
            unreported_bytes_ = 0;
            io_->wake();
        }
        return arrival;
    }

    // --- sending, called by the main thread ---

    std::uint64_t taken() const { return peer_taken_.load(std::memory_order_acquire); }
    std::uint64_t window() const { return window_; }

    TcpOutbox& outbox() { return outbox_; }

    // --- both ---

    std::string end_reason() const {
        if (!ours()) return {};  // another thread may have held the lock at the fork
        const std::lock_guard<std::mutex> guard(arriving_);
        if (!cause_.empty()) return "failed: " + cause_;
        return queue_.empty() ? end_reason_ : std::string{};
    }

    void abort(const std::string& cause) {
        if (ours()) send_control(ControlKind::cause, cause);
    }

    /// Send `bye` after all messages. The I/O thread completes the closing.
    void close() {
        if (!ours() || closed_.exchange(true)) return;
        send_control(ControlKind::bye);
        closing_ = true;  // not earlier: the I/O thread ends the stream as soon as it sees this
        io_->wake();
    }

    // --- called by the I/O thread ---

    void ready(int, std::uint32_t events) override {
        if (events & EPOLLOUT) outbox_.resume();
        if (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) receive();
    }

    IoThread::Time due(IoThread::Time now) override {
        const auto taken_now = taken_.load(std::memory_order_acquire);
        if (taken_now != reported_ || now - last_sent_.load() >= kBeat) send_control(ControlKind::alive);
        if (now - last_check_ >= kBeat) check_silence(now);
        if (closing_.load()) return end_of_closing(now);
        const bool waiting = arrived_.load(std::memory_order_acquire) != taken_now;
        ack_wait_ = waiting ? std::min(ack_wait_ * 2, kMaxAckWait) : kMinAckWait;
        const auto beat = last_sent_.load() + kBeat;
        return waiting ? std::min(now + ack_wait_, beat) : beat;
    }

    void message(Arrival arrival) override {
        if (!receives_) throw LinkError("message on a link that does not exist");
        {
            const std::lock_guard<std::mutex> guard(arriving_);
            const auto acknowledged = arrival.descriptors[0].acknowledged;
            queue_.push_back(std::move(arrival));
            update_peer_taken(acknowledged);
        }
        ack_wait_ = kMinAckWait;
        arrived_.fetch_add(1, std::memory_order_release);
        doorbell_->ring();
    }

    void control(ControlKind kind, std::uint64_t taken, std::string text) override {
        {
            const std::lock_guard<std::mutex> guard(arriving_);
            update_peer_taken(taken);
            if (kind == ControlKind::cause && cause_.empty())
                cause_ = text.empty() ? "unknown" : std::move(text);
            else if (kind == ControlKind::bye)
                end_reason_ = "has closed its transport";
            else if (kind != ControlKind::alive && kind != ControlKind::cause)
                throw LinkError("unknown control frame");
        }
        doorbell_->ring();
    }

    /// Messages taken here, for the descriptors of outgoing messages.
    std::uint64_t taken_here() const { return taken_.load(std::memory_order_relaxed); }

  private:
    static constexpr std::chrono::milliseconds kBeat{500}, kSilence{2000}, kLinger{2000}, kMinAckWait{5},
        kMaxAckWait{80};
    static constexpr std::size_t kTurnBytes = 16 << 20;  // received before other connections get a turn

    /// Send a control frame. Without memory for it, end the connection, so that the peer notices.
    void send_control(ControlKind kind, const std::string& text = {}) noexcept {
        reported_ = taken_.load(std::memory_order_acquire);
        last_sent_ = IoThread::Clock::now();
        try {
            std::string frame = pack_control(kind, reported_, text);
            std::vector<iovec> parts{{frame.data(), frame.size()}};
            outbox_.write(parts);
        } catch (const std::bad_alloc&) {
            outbox_.stop();
        }
    }

    // Requires the lock `arriving_`.
    void update_peer_taken(std::uint64_t taken) {
        if (taken <= peer_taken_.load(std::memory_order_relaxed)) return;
        peer_taken_.store(taken, std::memory_order_release);
    }

    void receive() {
        try {
            for (std::size_t turn = 0; turn < kTurnBytes;) {
                iovec buffers[2];
                msghdr message{};
                message.msg_iov = buffers;
                message.msg_iovlen = static_cast<std::size_t>(reader_.buffers(buffers));
                const ssize_t count = recvmsg(socket_.number(), &message, MSG_DONTWAIT);
                if (count < 0 && errno == EINTR) continue;
                if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
                if (count <= 0) return ended("has ended");
                turn += static_cast<std::size_t>(count);
                reader_.parse(static_cast<std::size_t>(count), *this);
            }
        } catch (const std::bad_alloc&) {
            damage("no memory for a received message");
        } catch (const std::exception& error) {
            damage(error.what());
        }
    }

    /// End the connection if the peer's kernel does not answer. A stopped process is not affected.
    void check_silence(IoThread::Time now) {
        last_check_ = now;
        tcp_info info{};
        socklen_t bytes = sizeof info;
        if (getsockopt(socket_.number(), IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return;
        // A single probe proves nothing: probes of a full window become rare, and one may be lost.
        const bool probed = info.tcpi_unacked > 0 || info.tcpi_probes > 1;
        const auto silent = std::chrono::milliseconds(probed ? info.tcpi_last_ack_recv : 0);
        if (silent_before_ && silent >= kSilence - kBeat) ended("or its host has not answered for 2 s");
        silent_before_ = silent >= kSilence - 2 * kBeat;
    }

    void damage(const std::string& what) {
        {
            const std::lock_guard<std::mutex> guard(arriving_);
            damage_ = what;
        }
        damaged_.store(true, std::memory_order_release);
        send_control(ControlKind::cause, "it received invalid data: " + what);
        ended("has sent invalid data");
    }

    /// Stop reading and writing.
    void ended(const char* reason) {
        {
            const std::lock_guard<std::mutex> guard(arriving_);
            if (end_reason_.empty()) end_reason_ = reason;
        }
        io_->unwatch(socket_.number());
        outbox_.stop();
        doorbell_->ring();
    }

    IoThread::Time end_of_closing(IoThread::Time now) {
        if (closed_at_ == IoThread::Time{}) closed_at_ = now;
        if (!shut_) shut_ = outbox_.finish();
        // Keep reading: unread data would make the kernel reset the connection and drop data in flight to the peer.
        if (now - closed_at_ >= kLinger) ended("was disconnected");
        return shut_ ? closed_at_ + kLinger : now + kMinAckWait;
    }

    PrivateFile socket_;
    std::shared_ptr<Doorbell> doorbell_;
    std::shared_ptr<IoThread> io_;
    const std::uint64_t window_;
    const bool receives_;
    std::shared_ptr<Pool> pool_;
    FrameReader reader_;  // used by the I/O thread only, like the next three lines

    IoThread::Time last_check_{}, closed_at_{};
    std::chrono::milliseconds ack_wait_{kMinAckWait};
    bool silent_before_ = false, shut_ = false;

    mutable std::mutex arriving_;
    std::deque<Arrival> queue_;
    std::string cause_, end_reason_, damage_;
    std::atomic<std::uint64_t> arrived_{0}, taken_{0}, peer_taken_{0};
    std::atomic<bool> damaged_{false}, closed_{false}, closing_{false};
    std::uint64_t unreported_bytes_ = 0;  // used by the main thread only

    TcpOutbox outbox_;
    std::atomic<std::uint64_t> reported_{0};
    std::atomic<IoThread::Time> last_sent_{};
};

}  // namespace ds_ext
