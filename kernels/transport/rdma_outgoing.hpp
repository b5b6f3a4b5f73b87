#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "link.hpp"
#include "rdma_pair.hpp"
#include "slot_allocator.hpp"

namespace ds_ext {

/// Sending endpoint of an RDMA link. It has a mirror of each slab of the receiver, of the same size. A message has the
/// same place in both, so that one allocator serves both.
class RdmaOutgoing final : public Outgoing {
  public:
    RdmaOutgoing(std::shared_ptr<RdmaPair> pair, std::uint64_t window, std::uint64_t slab_bytes)
        : Outgoing(window), pair_(std::move(pair)) {
        mirror_ = make_mirror(slab_bytes);
        pair_->add_endpoint();
    }

    /// Add the receiver's first slab, from its greeting.
    void connect(const Greeting& other) {
        if (other.slab_bytes != mirror_->bytes())
            throw LinkError("slab: its size must be " + std::to_string(mirror_->bytes()) + " bytes (got " +
                            std::to_string(other.slab_bytes) + " from the receiver)");
        add_slab(other.slab, other.slab_key);
    }

    void on_notice(const Notice& notice) {
        if (notice.kind == NoticeKind::receipt) {
            if (notice.taken < taken_ || notice.taken > published())
                throw LinkError("wrong message count of the receiver");
            taken_ = notice.taken;
            for (std::uint32_t i = 0; i < notice.count; ++i) release(notice.places[i]);
            updated_ = true;
        } else if (mirror_ && notice.kind == NoticeKind::slab && notice.bytes == mirror_->bytes()) {
            add_slab(notice.address, notice.key);
            updated_ = true;
        } else if (mirror_ && notice.kind == NoticeKind::refusal) {
            mirror_.reset();
            refusal_ = "slab: the receiver has no memory: " + text_of(notice);
            updated_ = true;
        } else {
            throw LinkError("notice without a request");
        }
    }

    bool has_update() const override {
        pair_->progress();
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        return updated_ || !pair_->damage().empty();
    }

    std::string end_reason() const override { return pair_->end_reason(); }
    void abort(const std::string& cause) override { pair_->abort(cause); }
    void close() override {
        if (!std::exchange(closed_, true)) pair_->close();
    }

  protected:
    std::uint64_t max_bytes() const override { return kMaxSlabBytes; }
    std::uint64_t unreleased() const override {
        std::uint64_t count = 0;
        for (const Slab& slab : slabs_) count += slab.allocator.allocated();
        return count;
    }

    bool allocate(Slot& slot) override {
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        if (unreleased() >= kRdmaMessages || pair_->broken()) return false;
        const std::uint32_t requests = pair_->requests(slot.bytes);
        if (!pair_->reserve_requests(requests)) return false;
        for (std::size_t number = 0; number < slabs_.size(); ++number) {
            const auto offset = slabs_[number].allocator.allocate(slot.bytes);
            if (!offset) continue;
            slot.place = std::uint64_t{number} << kSlabShift | *offset;
            slot.address = slabs_[number].mirror->address() + *offset;
            for (Descriptor& d : slot.descriptors) d.place = slot.place;
            return true;
        }
        pair_->release_requests(requests);
        request_slab(slot.bytes);
        return false;
    }

    void put(Slot& slot, const std::vector<Piece>& pieces) override {
        fill(slot, pieces);
        Block block;
        pack(slot.descriptors[0], block.data());
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        const auto [number, offset] = split_place(slot.place);
        const Slab& slab = slabs_[number];
        pair_->deliver({reinterpret_cast<std::uint64_t>(slot.address), slab.address + offset, slot.bytes,
                        slab.mirror->local_key(), slab.key},
                       block);
    }

    std::uint64_t taken() override {
        pair_->progress();
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        if (!pair_->damage().empty()) throw LinkError(pair_->damage());
        updated_ = false;
        return taken_;
    }

  private:
    struct Slab {
        std::uint64_t address;  // at the receiver
        std::uint32_t key;
        std::unique_ptr<verbs::Region> mirror;
        SlotAllocator allocator;
    };

    std::unique_ptr<verbs::Region> make_mirror(std::uint64_t bytes) const {
        return std::make_unique<verbs::Region>(pair_->port(), bytes, verbs::kAccessLocalWrite);
    }

    void add_slab(std::uint64_t address, std::uint32_t key) {
        const std::uint64_t bytes = mirror_->bytes();
        slabs_.push_back({address, key, std::move(mirror_), SlotAllocator(bytes)});
    }

    void release(std::uint64_t place) {
        const auto [number, offset] = split_place(place);
        require<LinkError>(number < slabs_.size(), "release of a slot in a slab that does not exist");
        slabs_[number].allocator.release(offset);
    }

    /// Request another slab, as large as all previous ones together, or as the message if that is larger.
    void request_slab(std::uint64_t message_bytes) {
        if (mirror_) return;  // already requested
        std::uint64_t bytes = 0, largest = 0;
        for (const Slab& slab : slabs_) {
            bytes += slab.mirror->bytes();
            largest = std::max(largest, slab.mirror->bytes());
        }
        if (!refusal_.empty()) {
            if (message_bytes <= largest) return;  // it fits when slots have come back
            throw std::system_error(ENOMEM, std::generic_category(), refusal_);
        }
        constexpr std::uint64_t step = 1 << 20;
        bytes = std::min(std::max(bytes, (message_bytes + step - 1) / step * step), kMaxSlabBytes);
        try {
            mirror_ = make_mirror(bytes);
        } catch (const std::exception& error) {
            refusal_ = error.what();
            return request_slab(message_bytes);
        }
        Notice notice;
        notice.kind = NoticeKind::request;
        notice.bytes = bytes;
        pair_->notify(notice);
    }

    std::shared_ptr<RdmaPair> pair_;
    std::vector<Slab> slabs_;
    std::unique_ptr<verbs::Region> mirror_;  // of the requested slab
    std::string refusal_;
    std::uint64_t taken_ = 0;
    bool updated_ = false, closed_ = false;
};

}  // namespace ds_ext
