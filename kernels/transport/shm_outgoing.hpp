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

    /// A copy may be under way.
    ~ShmOutgoing() override { settle(); }

    std::uint64_t pending() override {
        while (owners_.size() > pending_.load(std::memory_order_acquire)) {
            const auto owner = std::move(owners_.front());  // whose end may lead to the next message
            owners_.pop_front();
        }
        return owners_.size();
    }

    void cancel(Slot& slot) override {
        if (ours()) room_.take_back(slot.place);
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
        settle();  // what was sent before still counts
        segment_.counters().sender_cause.set(cause);
        bell_.ring();
    }

    void close() override {
        if (!ours()) return;
        settle();
        pending();
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

    void put(Slot& slot, const std::vector<Piece>& pieces, std::shared_ptr<void> owner) override {
        // A small one must not overtake a large one.
        if (owner == nullptr || (slot.bytes < kLargeCopy && pending_.load(std::memory_order_acquire) == 0))
            return Outgoing::put(slot, pieces, nullptr);
        std::vector<Copier::Block> wholes;
        for (std::size_t i = 0; i < pieces.size(); ++i)
            wholes.push_back(
                {slot.address + slot.descriptors[i].offset, pieces[i].address, slot.descriptors[i].nbytes});
        owners_.push_back(std::move(owner));
        try {
            Copier::of_process().add(wholes, [this, slot] { hand_over(slot); }, pending_);
        } catch (...) {  // no memory
            owners_.pop_back();
            throw;
        }
    }

    void deliver(Slot& slot) override {
        settle();
        hand_over(slot);
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
    void settle() {
        if (ours() && pending_.load(std::memory_order_acquire) > 0) Copier::of_process().settle(pending_);
    }

    /// On the copier's thread, or on the sender's while that has nothing to do for this link.
    void hand_over(const Slot& slot) {
        const Descriptor& first = slot.descriptors[0];
        unsigned char* table = slot.address + first.body_bytes;
        for (std::size_t i = 1; i < slot.descriptors.size(); ++i)
            pack(slot.descriptors[i], table + (i - 1) * kDescriptorBytes);
        pack(first, segment_.entry(first.link_seq));
        segment_.counters().published.store(first.link_seq + 1, std::memory_order_release);
        bell_.ring();
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
    std::atomic<std::uint64_t> pending_{0};
    std::deque<std::shared_ptr<void>> owners_;  // of the messages that are copied beside their sender, oldest first
    std::uint64_t committed_ = 0, returned_ = 0, taken_ = 0;
};

}  // namespace ds_ext
