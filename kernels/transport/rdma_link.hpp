#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "rdma_incoming.hpp"
#include "rdma_outgoing.hpp"

namespace ds_ext {

/// The links of this rank to and from a peer, over one queue pair.
class RdmaLink {
  public:
    /// `sends`, `receives`: whether the link in that direction exists.
    RdmaLink(std::shared_ptr<RdmaPort> port, std::uint32_t rank, std::uint32_t peer, bool sends, bool receives,
             std::uint64_t window, std::uint64_t slab_bytes)
        : pair_(std::make_shared<RdmaPair>(std::move(port), rank, peer)) {
        if (slab_bytes == 0 || slab_bytes % kAlignment != 0)
            throw LinkError("slab: its size must be a positive multiple of 64 bytes");
        if (receives) incoming_ = std::make_shared<RdmaIncoming>(pair_, slab_bytes);
        if (sends) outgoing_ = std::make_shared<RdmaOutgoing>(pair_, window, slab_bytes);
        // Weak, because the endpoints own the pair.
        const std::weak_ptr<RdmaIncoming> in = incoming_;
        const std::weak_ptr<RdmaOutgoing> out = outgoing_;
        pair_->receiver().message = [in](const Block& block) {
            const auto receiver = in.lock();
            if (!receiver) throw LinkError("message on a link that does not exist");
            receiver->arrived(block);
        };
        pair_->receiver().idle = [in] {
            if (const auto receiver = in.lock()) receiver->send_receipts();
        };
        pair_->receiver().notice = [in, out](const Notice& notice) {
            const auto receiver = in.lock();
            const auto sender = out.lock();
            if (notice.kind == NoticeKind::request && receiver)
                receiver->enlarge(notice.bytes);
            else if (notice.kind != NoticeKind::request && sender)
                sender->on_notice(notice);
        };
    }

    std::string greeting(const Token& job) const {
        return pair_->greeting(incoming_ ? &incoming_->first_slab() : nullptr, job);
    }
    void connect(std::string_view greeting, const Token& job) {
        const Greeting other = pair_->connect(greeting, job);
        pair_->enter(pair_);
        if (outgoing_) outgoing_->connect(other);
    }
    void control(std::shared_ptr<TcpConnection> connection) { pair_->control(std::move(connection)); }

    const std::shared_ptr<RdmaIncoming>& incoming() const { return incoming_; }
    const std::shared_ptr<RdmaOutgoing>& outgoing() const { return outgoing_; }

  private:
    std::shared_ptr<RdmaPair> pair_;
    std::shared_ptr<RdmaIncoming> incoming_;
    std::shared_ptr<RdmaOutgoing> outgoing_;
};

}  // namespace ds_ext
