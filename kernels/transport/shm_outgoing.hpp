#pragma once

#include "doorbell.hpp"
#include "link.hpp"
#include "segment.hpp"
#include "slot_allocator.hpp"

namespace ds_ext {

/// Sending endpoint of a segment.
class ShmOutgoing final : public Outgoing {
  public:
    ShmOutgoing(int segment, int doorbell, const Address& address, std::uint64_t window)
        : Outgoing(window),
          segment_(Segment::attach(segment, address)),
          doorbell_(Doorbell::attach(doorbell)),
          allocator_(segment_.slot_bytes()) {
        doorbell_.close_descriptor();
    }

    bool has_update() const override {
        const Counters& counters = segment_.counters();
        return counters.returned.load(std::memory_order_acquire) != returned_ ||
               counters.taken.load(std::memory_order_acquire) != taken_;
    }

    std::string end_reason() const override {
        return end_reason_of(segment_.counters().receiver_cause, segment_.counters().receiver_closed);
    }

    void abort(const std::string& cause) override {
        if (!ours()) return;
        segment_.counters().sender_cause.set(cause);
        doorbell_.ring();
    }

    void close() override {
        if (!ours()) return;
        segment_.counters().sender_closed.store(1, std::memory_order_release);
        doorbell_.ring();
    }

  protected:
    std::uint64_t max_bytes() const override { return segment_.slot_bytes(); }
    std::uint64_t unreleased() const override { return allocator_.allocated(); }

    bool allocate(Slot& slot) override {
        if (allocator_.allocated() == kRingEntries) return false;
        const auto place = allocator_.allocate(slot.bytes);
        if (!place) return false;
        slot.place = *place;
        try {
            commit(slot.place + slot.bytes);
        } catch (...) {
            allocator_.release(slot.place);
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
        doorbell_.ring();
    }

    /// Check the receiver's counters and free the slots that it has returned.
    std::uint64_t taken() override {
        Counters& counters = segment_.counters();
        taken_ = counters.taken.load(std::memory_order_acquire);
        const auto returned = counters.returned.load(std::memory_order_acquire);
        if (returned < returned_ || returned - returned_ > allocator_.allocated())
            throw LinkError("wrong slot count of the receiver");
        for (; returned_ != returned; ++returned_)
            allocator_.release(segment_.returned(returned_).load(std::memory_order_relaxed));
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
    Doorbell doorbell_;
    SlotAllocator allocator_;
    std::uint64_t committed_ = 0, returned_ = 0, taken_ = 0;
};

}  // namespace ds_ext
