#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "doorbell.hpp"
#include "link.hpp"
#include "segment.hpp"

namespace ds_ext {

/// Receiving endpoint of a segment.
class ShmIncoming final : public Incoming {
  public:
    explicit ShmIncoming(const Address& address) : Incoming(address.source), segment_(Segment::create(address)) {}

    /// Attach the sender's doorbell, after the segment was passed to the sender.
    void connect(int doorbell) {
        doorbell_ = std::make_unique<Doorbell>(Doorbell::attach(doorbell));
        doorbell_->close_descriptor();
        segment_.memory().close_descriptor();
    }

    int descriptor() { return segment_.memory().descriptor(); }

    bool has_message() const override {
        return segment_.counters().published.load(std::memory_order_acquire) != taken();
    }

    Arrival take() override {
        refuse_fork();
        Counters& counters = segment_.counters();
        if (counters.published.load(std::memory_order_acquire) - taken() > kRingEntries)
            throw LinkError("wrong message count of the sender");
        const Descriptor first = unpack(segment_.entry(taken()));
        Arrival arrival = arrival_at(first, segment_.slots(), segment_.slot_bytes(), first.place);
        order_.admit(arrival.descriptors);
        counters.taken.store(taken(), std::memory_order_release);
        if (doorbell_) doorbell_->ring();
        return arrival;
    }

    void release(const Arrival& arrival) override {
        const std::lock_guard<std::mutex> guard(release_mutex_);
        segment_.returned(returned_).store(arrival.descriptors[0].place, std::memory_order_relaxed);
        segment_.counters().returned.store(++returned_, std::memory_order_release);
        if (doorbell_) doorbell_->ring();
    }

    std::string end_reason() const override {
        if (has_message()) return {};
        return end_reason_of(segment_.counters().sender_cause, segment_.counters().sender_closed);
    }

    void abort(const std::string& cause) override {
        if (!ours()) return;
        segment_.counters().receiver_cause.set(cause);
        if (doorbell_) doorbell_->ring();
    }

    void close() override {
        if (!ours()) return;
        segment_.counters().receiver_closed.store(1, std::memory_order_release);
        if (doorbell_) doorbell_->ring();
    }

  private:
    std::uint64_t taken() const { return order_.admitted(); }

    Segment segment_;
    std::unique_ptr<Doorbell> doorbell_;
    SequenceCheck order_;
    std::uint64_t returned_ = 0;
    std::mutex release_mutex_;
};

}  // namespace ds_ext
