#pragma once

#include "bell.hpp"
#include "link.hpp"
#include "room.hpp"
#include "segment.hpp"

namespace ds_ext {

/// The sending end of a segment.
class ShmOutgoing final : public Outgoing {
  public:
    ShmOutgoing(int segment, int bell, const Address& address, std::uint64_t window)
        : Outgoing(window),
          segment_(Segment::attach(segment, address)),
          bell_(Bell::attach(bell)),
          room_(segment_.slot_bytes()) {
        bell_.close_descriptor();
    }

    bool news() const override {
        const Counters& counters = segment_.counters();
        return counters.returned.load(std::memory_order_acquire) != returned_ ||
               counters.taken.load(std::memory_order_acquire) != taken_;
    }

    std::string gone() const override {
        return fate(segment_.counters().receiver_cause, segment_.counters().receiver_closed);
    }

    void abort(const std::string& cause) override {
        if (!ours()) return;
        segment_.counters().sender_cause.set(cause);
        bell_.ring();
    }

    void close() override {
        if (!ours()) return;
        segment_.counters().sender_closed.store(1, std::memory_order_release);
        bell_.ring();
    }

  protected:
    std::uint64_t most_bytes() const override { return segment_.slot_bytes(); }
    std::uint64_t lent() const override { return room_.lent(); }

    bool lend(Slot& slot) override {
        if (room_.lent() == kRingEntries) return false;
        const auto place = room_.lend(slot.bytes);
        if (!place) return false;
        slot.place = *place;
        try {
            commit(slot.place + slot.bytes);
        } catch (...) {
            room_.take_back(slot.place);
            throw;
        }
        slot.address = segment_.slots() + slot.place;
        for (Descriptor& d : slot.descriptors) d.place = slot.place;
        return true;
    }

    void put(Slot& slot, const std::vector<Piece>& pieces) override {
        fill(slot, pieces);
        const Descriptor& first = slot.descriptors[0];
        pack(first, segment_.entry(first.link_seq));
        segment_.counters().published.store(first.link_seq + 1, std::memory_order_release);
        bell_.ring();
    }

    /// Takes back what the receiver has returned as well. Its words are checked: a slot that is not lent is an error.
    std::uint64_t taken() override {
        Counters& counters = segment_.counters();
        taken_ = counters.taken.load(std::memory_order_acquire);
        const auto returned = counters.returned.load(std::memory_order_acquire);
        if (returned < returned_ || returned - returned_ > room_.lent())
            throw LinkError("the receiver's count of slots is wrong");
        for (; returned_ != returned; ++returned_)
            room_.take_back(segment_.returned(returned_).load(std::memory_order_relaxed));
        return taken_;
    }

  private:
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
    std::uint64_t committed_ = 0, returned_ = 0, taken_ = 0;
};

}  // namespace ds_ext
