#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "link.hpp"
#include "rdma_pair.hpp"

namespace ds_ext {

/// Receiving endpoint of an RDMA link. It registers the slabs that the sender writes to.
class RdmaIncoming final : public Incoming {
  public:
    RdmaIncoming(std::shared_ptr<RdmaPair> pair, std::uint64_t slab_bytes)
        : Incoming(pair->peer()), pair_(std::move(pair)) {
        add_slab(slab_bytes);
        pair_->add_endpoint();
    }

    const verbs::Region& first_slab() const { return *slabs_.front(); }

    void arrived(const Block& block) {
        if (blocks_.size() >= kRdmaMessages) throw LinkError("message without a link credit");
        blocks_.push_back(block);
    }

    /// Register another slab at the sender's request.
    void enlarge(std::uint64_t bytes) {
        Notice answer;
        try {
            add_slab(bytes);
            answer.kind = NoticeKind::slab;
            answer.address = reinterpret_cast<std::uint64_t>(slabs_.back()->address());
            answer.bytes = bytes;
            answer.key = slabs_.back()->remote_key();
        } catch (const std::exception& error) {
            answer.kind = NoticeKind::refusal;
            set_text(answer, error.what());
        }
        pair_->notify(answer);
    }

    bool has_message() const override {
        pair_->progress();
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        return !blocks_.empty() || !pair_->damage().empty();
    }

    Arrival take() override {
        refuse_fork();
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        if (!pair_->damage().empty()) throw LinkError(pair_->damage());
        const Descriptor first = unpack(blocks_.front().data());
        const auto [number, offset] = split_place(first.place);
        require<DescriptorError>(number < slabs_.size(), "slot in a slab that does not exist");
        const auto& slab = slabs_[number];
        Arrival arrival = arrival_at(first, slab->address(), slab->bytes(), offset);
        arrival.memory = slab;
        order_.admit(arrival.descriptors);
        blocks_.pop_front();
        used_bytes_ += slot_bytes(first);
        unreported_bytes_ += slot_bytes(first);
        if (receipt_due()) send_receipts();
        return arrival;
    }

    void release(const Arrival& arrival) override {
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        returning_.push_back(arrival.descriptors[0].place);
        returning_bytes_ += slot_bytes(arrival.descriptors[0]);
        if (receipt_due()) send_receipts();
    }

    /// Report taken messages and released slots to the sender. Called only if the sender could run out of link credits,
    /// or if this rank is idle.
    void send_receipts() {
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        while ((reported_ != order_.admitted() || !returning_.empty()) && !pair_->broken() && !closed_) {
            Notice receipt;
            receipt.taken = reported_ = order_.admitted();
            const std::size_t count = std::min(returning_.size(), receipt.places.size());
            std::copy_n(returning_.begin(), count, receipt.places.begin());
            returning_.erase(returning_.begin(), returning_.begin() + static_cast<std::ptrdiff_t>(count));
            receipt.count = static_cast<std::uint32_t>(count);
            returned_ += count;
            pair_->notify(receipt);
        }
        used_bytes_ -= returning_bytes_;
        returning_bytes_ = unreported_bytes_ = 0;
    }

    std::string end_reason() const override { return has_message() ? std::string() : pair_->end_reason(); }
    void abort(const std::string& cause) override { pair_->abort(cause); }
    void close() override {
        send_receipts();
        if (!std::exchange(closed_, true)) pair_->close();
    }

  private:
    void add_slab(std::uint64_t bytes) {
        slabs_.push_back(std::make_shared<verbs::Region>(pair_->port(), bytes,
                                                         verbs::kAccessLocalWrite | verbs::kAccessRemoteWrite));
        slab_bytes_ += bytes;
    }

    static std::uint64_t slot_bytes(const Descriptor& first) {
        return first.body_bytes + std::uint64_t{first.count - 1} * kDescriptorBytes;
    }

    /// Return whether the sender could run out of link credits before the next receipt.
    bool receipt_due() const {
        const std::uint64_t room = slab_bytes_;
        return order_.admitted() - reported_ >= kRdmaMessages / 8 || returning_.size() >= kRdmaMessages / 16 ||
               order_.admitted() - returned_ >= kRdmaMessages / 2 || unreported_bytes_ >= room / 8 ||
               used_bytes_ >= room / 2;
    }

    std::shared_ptr<RdmaPair> pair_;
    std::vector<std::shared_ptr<verbs::Region>> slabs_;
    std::deque<Block> blocks_;              // not taken
    std::vector<std::uint64_t> returning_;  // places of released slots, not yet reported
    SequenceCheck order_;
    std::uint64_t slab_bytes_ = 0, reported_ = 0, returned_ = 0, unreported_bytes_ = 0, used_bytes_ = 0,
                  returning_bytes_ = 0;
    bool closed_ = false;
};

}  // namespace ds_ext
