#pragma once

// Reliable RDMA connection (queue pair of type RC) of two ranks, for the links in both directions. A sender writes a
// body into its slot, then a block of 256 bytes with immediate data into the peer's inbox. A reliable connection keeps
// the order, so the body has arrived when the block arrives.

#include <arpa/inet.h>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "rdma_peer_state.hpp"
#include "rdma_port.hpp"
#include "rdma_queue.hpp"

namespace ds_ext {

inline constexpr std::uint32_t kNoticeRequests = 64;  // send requests reserved for notices

class RdmaPair : public Owned, public RdmaPort::User {
  public:
    /// Callbacks of the two links, called under the pair's lock.
    struct Receiver {
        std::function<void(const Block&)> message;
        std::function<void(const Notice&)> notice;
        std::function<void()> idle;  // the rank is idle: send the receipts
    };

    RdmaPair(std::shared_ptr<RdmaPort> watched, std::uint32_t rank, std::uint32_t peer)
        : watched_(std::move(watched)),
          port_(watched_->open()),
          doorbell_(watched_->doorbell()),
          rank_(rank),
          peer_(peer),
          outbox_(port_, kRdmaBlocks * kDescriptorBytes, verbs::kAccessLocalWrite),
          inbox_(port_, kRdmaBlocks * kDescriptorBytes, verbs::kAccessLocalWrite | verbs::kAccessRemoteWrite),
          queue_(port_),
          peer_state_(peer) {}
    RdmaPair(const RdmaPair&) = delete;
    RdmaPair& operator=(const RdmaPair&) = delete;
    ~RdmaPair() override { leave(); }

    const std::shared_ptr<verbs::OpenPort>& port() const { return port_; }
    std::uint32_t peer() const { return peer_; }
    std::recursive_mutex& mutex() { return mutex_; }
    Receiver& receiver() { return receiver_; }

    /// Return the greeting for the peer. `slab`: where the peer writes bodies; null if it does not send.
    std::string greeting(const verbs::Region* slab, const Token& job) const {
        Greeting greeting;
        greeting.source = rank_;
        greeting.destination = peer_;
        greeting.job = job;
        greeting.queue_pair = queue_.number();
        greeting.first_packet = queue_.first_packet();
        greeting.gid = port_->gid();
        greeting.lid = port_->lid();
        greeting.mtu = static_cast<std::uint8_t>(port_->mtu());
        greeting.inbox = reinterpret_cast<std::uint64_t>(inbox_.address());
        greeting.inbox_key = inbox_.remote_key();
        if (slab != nullptr) {
            greeting.slab = reinterpret_cast<std::uint64_t>(slab->address());
            greeting.slab_bytes = slab->bytes();
            greeting.slab_key = slab->remote_key();
        }
        return write_greeting(greeting);
    }

    /// Connect to the peer that wrote this greeting. Messages may arrive from now on.
    Greeting connect(std::string_view greeting, const Token& job) {
        const Greeting other = read_greeting(greeting, {peer_, rank_, job});
        queue_.connect(other);
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        other_inbox_ = other.inbox;
        other_inbox_key_ = other.inbox_key;
        connected_ = true;
        return other;
    }

    /// Watch the events of the pair until close().
    void enter(std::weak_ptr<RdmaPort::User> self) {
        watched_->enter(this, std::move(self));
        left_ = false;
    }

    /// Set the tcp connection that reports failures, which a broken queue pair cannot.
    void control(std::shared_ptr<TcpConnection> connection) {
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        peer_state_.control(std::move(connection));
    }

    /// Handle arrived blocks. If the rank is about to sleep, arm the completion queue to wake it.
    void progress() {
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        if (!ours() || !connected_) return;
        poll();
        if (doorbell_->asleep()) receiver_.idle();
        while (doorbell_->asleep() && !armed_) {
            armed_ = true;
            queue_.arm();
            poll();  // completions before arm() make no event
        }
        send_notices();
    }

    /// Send the receipts. Called by the I/O thread, because the rank may compute for a long time.
    void idle() override {
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        if (ours() && connected_ && !peer_state_.broken()) receiver_.idle();
    }

    /// Return the number of send requests of a message of this size.
    std::uint32_t requests(std::uint64_t bytes) const {
        const std::uint64_t limit = port_->max_request_bytes();
        return static_cast<std::uint32_t>((bytes + limit - 1) / limit) + 1;
    }

    /// Reserve the requests of a message, until deliver() or release_requests(). Returns false if too few are free.
    bool reserve_requests(std::uint32_t count) {
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        if (free_requests() < count + kNoticeRequests) return false;
        reserved_ += count;
        return true;
    }
    void release_requests(std::uint32_t count) {
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        reserved_ -= count;
    }

    /// Write a body, then its block. Their requests are reserved.
    void deliver(const Transfer& body, const Block& block) {
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        reserved_ -= requests(body.bytes);
        for (std::uint64_t done = 0; done < body.bytes;) {
            const std::uint64_t part = std::min(body.bytes - done, port_->max_request_bytes());
            write({body.from + done, body.to + done, part, body.local_key, body.remote_key}, std::nullopt);
            done += part;
        }
        send(block);
    }

    /// Send a notice, as soon as a send request is free.
    void notify(const Notice& notice) {
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        notices_.push_back(write_notice(notice));
        send_notices();
    }

    /// Return how the peer has ended, as the end of a sentence "rank 3 ..."; empty while it has not.
    std::string end_reason() {
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        return peer_state_.end_reason();
    }

    /// Record invalid data of the peer. The next call throws LinkError.
    void damaged(const std::string& what) { damage_ = damage_.empty() ? what : damage_; }
    const std::string& damage() const { return damage_; }
    bool broken() const { return peer_state_.over(); }

    void abort(const std::string& cause) {
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        if (!ours() || !peer_state_.abort(cause) || !connected_ || peer_state_.broken()) return;
        Notice notice;
        notice.kind = NoticeKind::abort;
        set_text(notice, cause);
        notify(notice);
    }

    /// Close one endpoint of this rank. The last one waits up to 1 s until the peer has the notice.
    void close() {
        const std::lock_guard<std::recursive_mutex> guard(mutex_);
        if (!ours() || !connected_) return;
        if (--open_endpoints_ > 0) return;
        Notice notice;
        notice.kind = NoticeKind::closed;
        if (!peer_state_.over()) notify(notice);
        const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        while (!peer_state_.over() && (queue_.unfinished() > 0 || !notices_.empty()) &&
               std::chrono::steady_clock::now() < limit) {
            poll();
            send_notices();
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        peer_state_.close();
        leave();
    }
    void add_endpoint() { ++open_endpoints_; }

  private:
    void leave() {
        if (!std::exchange(left_, true)) watched_->leave(this);
    }

    std::uint32_t free_requests() const { return kSendDepth - queue_.unfinished() - reserved_; }

    void write(const Transfer& transfer, std::optional<std::uint32_t> number) {
        if (const int code = queue_.write(transfer, number)) fail("cannot be reached by RDMA", code);
    }

    void send(const Block& block) {
        const std::uint64_t at = sent_ % kRdmaBlocks * kDescriptorBytes;
        std::memcpy(outbox_.address() + at, block.data(), block.size());
        write({reinterpret_cast<std::uint64_t>(outbox_.address()) + at, other_inbox_ + at, block.size(),
               outbox_.local_key(), other_inbox_key_},
              static_cast<std::uint32_t>(sent_));
        ++sent_;
    }

    void send_notices() {
        while (!notices_.empty() && free_requests() > 0 && !peer_state_.broken()) {
            send(notices_.front());
            notices_.pop_front();
        }
    }

    /// Handle all completions in the queue.
    void poll() {
        RdmaQueue::Completions found;
        int count = 0;
        do {
            count = queue_.poll(found);
            if (count < 0) fail("has a completion queue that cannot be polled", EIO);
            for (int i = 0; i < count; ++i) handle(found[i]);
            if (count > 0) armed_ = false;  // the event may have been used
        } while (count == static_cast<int>(found.size()));
    }

    void handle(const verbs::Completion& completion) {
        if (completion.status != verbs::kWcSuccess) {
            // Requests flushed after the first error do not show its cause.
            if (completion.status != verbs::kWcWrFlushErr || !peer_state_.broken()) fail_status(completion.status);
            return;
        }
        if (completion.opcode != verbs::kWcRecvRdmaWithImm) {
            queue_.complete(completion);
            return;
        }
        if (ntohl(completion.imm_data) != static_cast<std::uint32_t>(received_) ||
            completion.byte_len != kDescriptorBytes)
            return damaged("block missing or repeated");
        Block block;
        std::memcpy(block.data(), inbox_.address() + received_ % kRdmaBlocks * kDescriptorBytes, block.size());
        ++received_;
        if (const int code = queue_.post_receive()) fail("has a receive queue that cannot be refilled", code);
        try {
            if (is_notice(block))
                on_notice(read_notice(block));
            else
                receiver_.message(block);
        } catch (const std::exception& error) {
            damaged(error.what());
        }
    }

    void on_notice(const Notice& notice) {
        if (notice.kind == NoticeKind::abort) {
            peer_state_.set_cause(text_of(notice));
        } else if (notice.kind == NoticeKind::closed) {
            peer_state_.set_closed();
        } else {
            receiver_.notice(notice);
        }
    }

    void fail_status(std::uint32_t status) {
        const char* text = verbs::Library::get().wc_status_str(status);
        fail("cannot be reached by RDMA from " + port_->name() + " (" + text + ")", 0);
    }

    void fail(const std::string& what, int code) {
        if (peer_state_.fail(what, code)) doorbell_->ring();
    }

    std::shared_ptr<RdmaPort> watched_;
    std::shared_ptr<verbs::OpenPort> port_;
    std::shared_ptr<Doorbell> doorbell_;
    std::uint32_t rank_, peer_;
    verbs::Region outbox_, inbox_;
    RdmaQueue queue_;
    RdmaPeerState peer_state_;
    std::uint64_t other_inbox_ = 0;
    std::uint32_t other_inbox_key_ = 0;

    std::recursive_mutex mutex_;  // any thread may release slots
    Receiver receiver_;
    std::deque<Block> notices_;  // waiting for a free send request
    std::uint64_t sent_ = 0, received_ = 0;
    std::uint32_t reserved_ = 0, open_endpoints_ = 0;
    bool connected_ = false, armed_ = false, left_ = true;
    std::string damage_;
};

}  // namespace ds_ext
