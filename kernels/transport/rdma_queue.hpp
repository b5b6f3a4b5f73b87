#pragma once

// Queue pair of type RC with its completion queue and a count of its requests.

#include <arpa/inet.h>

#include <array>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "rdma_wire.hpp"
#include "verbs_device.hpp"

namespace ds_ext {

inline constexpr std::uint32_t kSendDepth = 1024;  // maximum number of incomplete send requests
// Retries before a write fails. 7 means unlimited retries on some devices.
inline constexpr std::uint8_t kRetries = 6, kAnswerTimeout = 16;  // 4.096 us * 2^16 = 268 ms each
inline constexpr int kOnlySolicited = 1;                          // events for the peer's writes only
inline constexpr std::uint8_t kWaitForReceiver = 7, kReceiverDelay = 12;

/// Write from registered memory to registered memory of the peer.
struct Transfer {
    std::uint64_t from = 0, to = 0, bytes = 0;
    std::uint32_t local_key = 0, remote_key = 0;
};

/// Not thread-safe. Functions that post a request return the result of libibverbs: 0 or an error number.
class RdmaQueue : public Owned {
  public:
    using Completions = std::array<verbs::Completion, 16>;

    explicit RdmaQueue(std::shared_ptr<verbs::OpenPort> port)
        : port_(std::move(port)), first_packet_(std::random_device{}() & 0xFFFFFF) {
        const verbs::Library& lib = verbs::Library::get();
        done_ = lib.create_cq(port_->context(), kSendDepth + kRdmaBlocks, nullptr, port_->channel(), 0);
        if (done_ == nullptr) verbs::fail(port_->name() + ": completion queue", errno);
        verbs::QueuePairInit wanted{};
        wanted.send_cq = wanted.recv_cq = done_;
        wanted.cap = {kSendDepth, kRdmaBlocks, 1, 1, 0};
        wanted.qp_type = verbs::kQptRc;
        pair_ = lib.create_qp(port_->domain(), &wanted);
        const int code = errno;
        if (pair_ == nullptr) lib.destroy_cq(done_);
        if (pair_ == nullptr) verbs::fail(port_->name() + ": queue pair", code);
        try {
            prepare();
        } catch (...) {
            release();
            throw;
        }
    }
    RdmaQueue(const RdmaQueue&) = delete;
    RdmaQueue& operator=(const RdmaQueue&) = delete;
    ~RdmaQueue() {
        if (ours()) release();
    }

    std::uint32_t number() const { return pair_->qp_num; }
    std::uint32_t first_packet() const { return first_packet_; }

    /// Connect to the peer's queue pair. Both sides may write afterwards.
    void connect(const Greeting& other) {
        verbs::QueuePairAttributes to{};
        to.qp_state = verbs::kQpsRtr;
        to.path_mtu = std::min<std::uint32_t>(port_->mtu(), other.mtu);
        to.dest_qp_num = other.queue_pair;
        to.rq_psn = other.first_packet;
        to.min_rnr_timer = kReceiverDelay;
        to.ah_attr = route(other);
        modify(to, verbs::kQpState | verbs::kQpAv | verbs::kQpPathMtu | verbs::kQpDestQpn | verbs::kQpRqPsn |
                       verbs::kQpMaxDestRdAtomic | verbs::kQpMinRnrTimer);
        verbs::QueuePairAttributes ready{};
        ready.qp_state = verbs::kQpsRts;
        ready.sq_psn = first_packet_;
        ready.timeout = kAnswerTimeout;
        ready.retry_cnt = kRetries;
        ready.rnr_retry = kWaitForReceiver;
        modify(ready, verbs::kQpState | verbs::kQpSqPsn | verbs::kQpTimeout | verbs::kQpRetryCnt | verbs::kQpRnrRetry |
                          verbs::kQpMaxQpRdAtomic);
    }

    /// Post a receive for one block.
    int post_receive() {
        verbs::ReceiveRequest request{};
        verbs::ReceiveRequest* bad = nullptr;
        return pair_->context->ops.post_recv(pair_, &request, &bad);
    }

    /// Post a write. With immediate data `number` it makes a completion on both sides.
    int write(const Transfer& transfer, std::optional<std::uint32_t> number) {
        verbs::ScatterEntry entry{transfer.from, static_cast<std::uint32_t>(transfer.bytes), transfer.local_key};
        verbs::SendRequest request{};
        request.wr_id = ++posted_;
        request.sg_list = &entry;
        request.num_sge = 1;
        request.opcode = number ? verbs::kWrRdmaWriteWithImm : verbs::kWrRdmaWrite;
        request.send_flags = number ? verbs::kSendSignaled | verbs::kSendSolicited : 0;
        request.imm_data = htonl(number.value_or(0));
        request.remote_addr = transfer.to;
        request.rkey = transfer.remote_key;
        verbs::SendRequest* bad = nullptr;
        return pair_->context->ops.post_send(pair_, &request, &bad);
    }

    /// Poll for completions. Returns their number, negative for an error.
    int poll(Completions& found) { return done_->context->ops.poll_cq(done_, found.size(), found.data()); }
    /// Request an event for the next block.
    void arm() { done_->context->ops.req_notify_cq(done_, kOnlySolicited); }

    /// Record a completed request, which completes all earlier ones too.
    void complete(const verbs::Completion& completion) { completed_ = completion.wr_id; }
    std::uint32_t unfinished() const { return static_cast<std::uint32_t>(posted_ - completed_); }

  private:
    void prepare() {
        verbs::QueuePairAttributes first{};
        first.qp_state = verbs::kQpsInit;
        first.port_num = port_->port();
        first.qp_access_flags = verbs::kAccessLocalWrite | verbs::kAccessRemoteWrite;
        modify(first, verbs::kQpState | verbs::kQpPkeyIndex | verbs::kQpPort | verbs::kQpAccessFlags);
        for (std::uint64_t i = 0; i < kRdmaBlocks; ++i)
            if (const int code = post_receive()) verbs::fail(port_->name() + ": receives", code);
    }

    void modify(verbs::QueuePairAttributes& attributes, int mask) {
        const int code = verbs::Library::get().modify_qp(pair_, &attributes, mask);
        if (code != 0)
            verbs::fail(port_->name() + ": queue pair to state " + std::to_string(attributes.qp_state), code);
    }

    /// Return the route to the peer: by LID within an InfiniBand subnet, else by GID.
    verbs::AddressVector route(const Greeting& other) const {
        verbs::AddressVector route{};
        route.port_num = port_->port();
        route.dlid = other.lid;
        const bool same_subnet = std::memcmp(port_->gid().raw, other.gid.raw, 8) == 0;
        if (port_->lid() != 0 && other.lid != 0 && same_subnet) return route;
        route.is_global = 1;
        route.grh.dgid = other.gid;
        route.grh.sgid_index = static_cast<std::uint8_t>(port_->gid_index());
        route.grh.hop_limit = 64;
        return route;
    }

    void release() {
        const verbs::Library& lib = verbs::Library::get();
        lib.destroy_qp(pair_);
        lib.destroy_cq(done_);
    }

    std::shared_ptr<verbs::OpenPort> port_;
    std::uint32_t first_packet_;
    verbs::CompletionQueue* done_ = nullptr;
    verbs::QueuePair* pair_ = nullptr;
    std::uint64_t posted_ = 0, completed_ = 0;
};

}  // namespace ds_ext
