#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "link.hpp"
#include "rdma_pair.hpp"
#include "room.hpp"

namespace ds_ext {

/// The sending end of a link over RDMA. It has a mirror of each of the receiver's slabs, of the same size, where a
/// message lies at the same place before and while it travels. So one book of slots serves both, and a slot that has
/// come back is free at both.
class RdmaOutgoing final : public Outgoing {
  public:
    RdmaOutgoing(std::shared_ptr<RdmaPair> pair, std::uint64_t window, std::uint64_t slab_bytes)
        : Outgoing(window), pair_(std::move(pair)) {
        mirror_ = make_mirror(slab_bytes);
        pair_->add_end();
    }

    /// The receiver's first slab, from its greeting.
    void connect(const Greeting& other) {
        if (other.slab_bytes != mirror_->bytes())
            throw LinkError("the receiver has a slab of " + std::to_string(other.slab_bytes) +
                            " bytes, this end one of " + std::to_string(mirror_->bytes()));
        add_slab(other.slab, other.slab_key);
    }

    void heard(const Notice& notice) {
        if (notice.kind == NoticeKind::receipt) {
            if (notice.taken < taken_ || notice.taken > published())
                throw LinkError("the receiver's count of messages is wrong");
            taken_ = notice.taken;
            for (std::uint32_t i = 0; i < notice.count; ++i) take_back(notice.places[i]);
            news_ = true;
        } else if (mirror_ && notice.kind == NoticeKind::slab && notice.bytes == mirror_->bytes()) {
            add_slab(notice.address, notice.key);
            news_ = true;
        } else if (mirror_ && notice.kind == NoticeKind::refusal) {
            mirror_.reset();
            refusal_ = "the receiver has no more memory for messages: " + text_of(notice);
            news_ = true;
        } else {
            throw LinkError("a notice that nobody has asked for");
        }
    }

    bool news() const override {
        pair_->look();
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        return news_ || !pair_->damage().empty();
    }

    std::string gone() const override { return pair_->gone(); }
    void abort(const std::string& cause) override { pair_->abort(cause); }
    void close() override {
        if (!std::exchange(closed_, true)) pair_->close();
    }

  protected:
    std::uint64_t most_bytes() const override { return kMostSlabBytes; }
    std::uint64_t lent() const override {
        std::uint64_t count = 0;
        for (const Slab& slab : slabs_) count += slab.room.lent();
        return count;
    }

    bool lend(Slot& slot) override {
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        if (lent() >= kRdmaMessages || pair_->broken()) return false;
        const std::uint32_t requests = pair_->requests(slot.bytes);
        if (!pair_->reserve_requests(requests)) return false;
        for (std::size_t number = 0; number < slabs_.size(); ++number) {
            const auto offset = slabs_[number].room.lend(slot.bytes);
            if (!offset) continue;
            slot.place = std::uint64_t{number} << kSlabShift | *offset;
            slot.address = slabs_[number].mirror->address() + *offset;
            for (Descriptor& d : slot.descriptors) d.place = slot.place;
            return true;
        }
        pair_->release_requests(requests);
        want(slot.bytes);
        return false;
    }

    void put(Slot& slot, const std::vector<Piece>& pieces) override {
        fill(slot, pieces);
        Block block;
        pack(slot.descriptors[0], block.data());
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        const Slab& slab = slabs_[slot.place >> kSlabShift];
        const std::uint64_t offset = slot.place & ((std::uint64_t{1} << kSlabShift) - 1);
        pair_->deliver({reinterpret_cast<std::uint64_t>(slot.address), slab.address + offset, slot.bytes,
                        slab.mirror->local_key(), slab.key},
                       block);
    }

    std::uint64_t taken() override {
        pair_->look();
        const std::lock_guard<std::recursive_mutex> guard(pair_->mutex());
        if (!pair_->damage().empty()) throw LinkError(pair_->damage());
        news_ = false;
        return taken_;
    }

  private:
    struct Slab {
        std::uint64_t address;  // at the receiver
        std::uint32_t key;
        std::unique_ptr<verbs::Region> mirror;
        Room room;
    };

    std::unique_ptr<verbs::Region> make_mirror(std::uint64_t bytes) const {
        return std::make_unique<verbs::Region>(pair_->port(), bytes, verbs::kAccessLocalWrite);
    }

    void add_slab(std::uint64_t address, std::uint32_t key) {
        const std::uint64_t bytes = mirror_->bytes();
        slabs_.push_back({address, key, std::move(mirror_), Room(bytes)});
    }

    void take_back(std::uint64_t place) {
        const std::uint64_t number = place >> kSlabShift;
        if (number >= slabs_.size()) throw LinkError("a slot came back that is in no slab");
        slabs_[number].room.take_back(place & ((std::uint64_t{1} << kSlabShift) - 1));
    }

    /// Ask for another slab, as large as all that are there or as the message that has no room.
    void want(std::uint64_t message_bytes) {
        if (mirror_) return;  // asked already
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
        bytes = std::min(std::max(bytes, (message_bytes + step - 1) / step * step), kMostSlabBytes);
        try {
            mirror_ = make_mirror(bytes);
        } catch (const std::exception& error) {
            refusal_ = error.what();
            return want(message_bytes);
        }
        Notice notice;
        notice.kind = NoticeKind::want;
        notice.bytes = bytes;
        pair_->notify(notice);
    }

    std::shared_ptr<RdmaPair> pair_;
    std::vector<Slab> slabs_;
    std::unique_ptr<verbs::Region> mirror_;  // of the slab that the receiver was asked for
    std::string refusal_;
    std::uint64_t taken_ = 0;
    bool news_ = false, closed_ = false;
};

}  // namespace ds_ext
