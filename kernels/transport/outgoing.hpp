#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bell.hpp"
#include "forks.hpp"
#include "room.hpp"
#include "segment.hpp"

namespace ds_ext {

/// A tensor to be sent: its bytes lie one after the other at `address`.
struct Piece {
    std::uint16_t dtype;
    std::vector<std::int64_t> shape;
    const unsigned char* address;
};

/// A slot that is lent to the sender: to be filled, then published or cancelled.
struct Slot {
    std::uint64_t place = 0, bytes = 0;
    std::vector<Descriptor> descriptors;
};

/// The sending end of a segment. One thread uses it.
class Outgoing : public Owned {
  public:
    /// `window`: unreceived bytes from which on there is no room for another message, unless it is the only one.
    Outgoing(int segment, int bell, const Address& address, std::uint64_t window)
        : segment_(Segment::attach(segment, address)),
          bell_(Bell::attach(bell)),
          room_(segment_.slot_bytes()),
          window_(window) {
        bell_.close_descriptor();
    }

    /// A slot for a message of these shapes; nothing while there is no room.
    std::optional<Slot> reserve(std::uint32_t tag, const std::vector<Piece>& pieces) {
        refuse_fork();
        Slot slot;
        slot.descriptors = describe(tag, pieces);
        const std::uint64_t table = (pieces.size() - 1) * kDescriptorBytes;
        slot.bytes = aligned(std::max<std::uint64_t>(slot.descriptors[0].body_bytes + table, 1));
        if (slot.bytes > segment_.slot_bytes())
            throw DescriptorError("a message of " + std::to_string(slot.bytes) + " bytes; a segment holds " +
                                  std::to_string(segment_.slot_bytes()));
        reclaim();
        const bool full = published_ - taken_ == kRingEntries || room_.lent() == kRingEntries;
        if (full || (untaken_bytes_ > 0 && untaken_bytes_ + slot.bytes > window_)) return std::nullopt;
        const auto place = room_.lend(slot.bytes);
        if (!place) return std::nullopt;
        slot.place = *place;
        try {
            commit(slot.place + slot.bytes);
        } catch (...) {
            room_.take_back(slot.place);
            throw;
        }
        for (Descriptor& d : slot.descriptors) d.place = slot.place;
        return slot;
    }

    unsigned char* address(const Slot& slot) const { return segment_.slots() + slot.place; }

    void fill(const Slot& slot, const std::vector<Piece>& pieces) const {
        for (std::size_t i = 0; i < pieces.size(); ++i)
            if (slot.descriptors[i].nbytes > 0)
                std::memcpy(address(slot) + slot.descriptors[i].offset, pieces[i].address, slot.descriptors[i].nbytes);
    }

    /// Hand the slot to the receiver. Nothing may be written to it from here on.
    void publish(Slot& slot) {
        refuse_fork();
        auto& seq = seqs_[channel(slot.descriptors[0].tag)];
        for (Descriptor& d : slot.descriptors) {
            d.seq = seq;
            d.link_seq = published_;
        }
        unsigned char* table = address(slot) + slot.descriptors[0].body_bytes;
        for (std::size_t i = 1; i < slot.descriptors.size(); ++i)
            pack(slot.descriptors[i], table + (i - 1) * kDescriptorBytes);
        pack(slot.descriptors[0], segment_.entry(published_));
        ++seq;
        untaken_.emplace_back(slot.descriptors[0].tag, slot.bytes);
        untaken_bytes_ += slot.bytes;
        segment_.counters().published.store(++published_, std::memory_order_release);
        bell_.ring();
    }

    void cancel(const Slot& slot) {
        if (ours()) room_.take_back(slot.place);
    }

    struct Untaken {
        std::uint64_t messages;  // that the receiver has not taken
        std::uint32_t tag;       // of the oldest of them
        std::uint64_t slots;     // that have not come back, theirs included
    };
    Untaken untaken() {
        reclaim();
        return {untaken_.size(), untaken_.empty() ? 0 : untaken_.front().first, room_.lent()};
    }

    /// Something has changed on the receiver's side that reclaim() has not seen.
    bool news() const {
        const Counters& counters = segment_.counters();
        return counters.returned.load(std::memory_order_acquire) != returned_ ||
               counters.taken.load(std::memory_order_acquire) != taken_;
    }

    bool peer_closed() const { return segment_.counters().receiver_closed.load(std::memory_order_acquire) != 0; }

    void close() {
        if (!ours()) return;
        segment_.counters().sender_closed.store(1, std::memory_order_release);
        bell_.ring();
    }

  private:
    static std::uint32_t channel(std::uint32_t tag) { return tag >> 16; }
    static std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

    static std::vector<Descriptor> describe(std::uint32_t tag, const std::vector<Piece>& pieces) {
        if (pieces.empty())
            throw DescriptorError("a message needs at least one tensor; send an empty one as a mere signal");
        std::vector<Descriptor> made(pieces.size());
        std::uint64_t end = 0;
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            Descriptor& d = made[i];
            d.dtype = pieces[i].dtype;
            set_shape(d, pieces[i].shape);
            d.tag = tag;
            d.index = static_cast<std::uint32_t>(i);
            d.count = static_cast<std::uint32_t>(pieces.size());
            d.offset = end;
            d.nbytes = tensor_bytes(d);
            end = aligned(end + d.nbytes);
        }
        for (Descriptor& d : made) d.body_bytes = end;
        return made;
    }

    /// Take back what the receiver has returned. Its words are checked: a slot that is not lent is an error.
    void reclaim() {
        Counters& counters = segment_.counters();
        const auto taken = counters.taken.load(std::memory_order_acquire);
        if (taken < taken_ || taken > published_) throw SegmentError("the receiver's count of messages is wrong");
        for (; taken_ != taken; ++taken_) {
            untaken_bytes_ -= untaken_.front().second;
            untaken_.pop_front();
        }
        const auto returned = counters.returned.load(std::memory_order_acquire);
        if (returned < returned_ || returned - returned_ > room_.lent())
            throw SegmentError("the receiver's count of slots is wrong");
        for (; returned_ != returned; ++returned_)
            room_.take_back(segment_.returned(returned_).load(std::memory_order_relaxed));
    }

    void commit(std::uint64_t end) {
        if (end <= committed_) return;
        constexpr std::uint64_t step = 1 << 20;
        const std::uint64_t target = std::min((end + step - 1) / step * step, segment_.slot_bytes());
        segment_.memory().commit(kSlotsOffset + committed_, target - committed_);
        committed_ = target;
    }

    Segment segment_;
    Bell bell_;
    Room room_;
    std::uint64_t window_;
    std::uint64_t committed_ = 0, published_ = 0, taken_ = 0, returned_ = 0, untaken_bytes_ = 0;
    std::deque<std::pair<std::uint32_t, std::uint64_t>> untaken_;  // (tag, bytes), oldest first
    std::unordered_map<std::uint32_t, std::uint64_t> seqs_;
};

}  // namespace ds_ext
