#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "bell.hpp"
#include "forks.hpp"
#include "segment.hpp"

namespace ds_ext {

/// The receiving end of a segment. One thread takes messages; slots may come back from any thread.
class Incoming : public Owned {
  public:
    explicit Incoming(const Address& address) : source_(address.source), segment_(Segment::create(address)) {}

    /// The other process' bell is known only after the segment was passed to it.
    void connect(int bell) {
        bell_ = std::make_unique<Bell>(Bell::attach(bell));
        bell_->close_descriptor();
        segment_.memory().close_descriptor();
    }

    int descriptor() { return segment_.memory().descriptor(); }
    std::uint32_t source() const { return source_; }
    unsigned char* address(std::uint64_t place) const { return segment_.slots() + place; }
    bool news() const { return segment_.counters().published.load(std::memory_order_acquire) != taken_; }
    bool peer_closed() const {
        return segment_.counters().sender_closed.load(std::memory_order_acquire) != 0 && !news();
    }

    /// The descriptors of the next message, which has arrived (news() holds), all of them checked.
    std::vector<Descriptor> take() {
        refuse_fork();
        Counters& counters = segment_.counters();
        if (counters.published.load(std::memory_order_acquire) - taken_ > kRingEntries)
            throw SegmentError("the sender's count of messages is wrong");
        const Descriptor first = unpack(segment_.entry(taken_));
        const auto need = [](bool holds, const char* what) {
            if (!holds) throw DescriptorError(what);
        };
        const std::uint64_t room = segment_.slot_bytes();
        const std::uint64_t table = (std::uint64_t{first.count} - 1) * kDescriptorBytes;
        need(first.link_seq == taken_, "a message is missing or comes twice");
        need(first.place % kAlignment == 0 && first.place < room, "the slot lies outside of the segment");
        need(first.body_bytes <= room && table <= room && first.body_bytes + table <= room - first.place,
             "the message ends behind the segment");
        need(first.seq == seqs_[first.tag >> 16], "a message of the channel is missing or comes twice");
        std::vector<Descriptor> found{first};
        for (std::uint32_t i = 1; i < first.count; ++i) {
            found.push_back(unpack(address(first.place) + first.body_bytes + (i - 1) * kDescriptorBytes));
            const Descriptor& d = found.back();
            need(d.tag == first.tag && d.count == first.count && d.link_seq == first.link_seq && d.seq == first.seq &&
                     d.body_bytes == first.body_bytes && d.place == first.place,
                 "the descriptors are not of the same message");
        }
        for (std::uint32_t i = 0; i < first.count; ++i) need(found[i].index == i, "the descriptors are out of order");
        ++seqs_[first.tag >> 16];
        counters.taken.store(++taken_, std::memory_order_release);
        if (bell_) bell_->ring();
        return found;
    }

    void give_back(std::uint64_t place) {
        const std::lock_guard<std::mutex> guard(returning_);
        segment_.returned(returned_).store(place, std::memory_order_relaxed);
        segment_.counters().returned.store(++returned_, std::memory_order_release);
        if (bell_) bell_->ring();
    }

    /// Slots that tensors of the receiver lie in.
    std::atomic<std::uint32_t>& held() { return held_; }

    void close() {
        if (!ours()) return;
        segment_.counters().receiver_closed.store(1, std::memory_order_release);
        if (bell_) bell_->ring();
    }

  private:
    std::uint32_t source_;
    Segment segment_;
    std::unique_ptr<Bell> bell_;
    std::uint64_t taken_ = 0, returned_ = 0;
    std::unordered_map<std::uint32_t, std::uint64_t> seqs_;
    std::mutex returning_;
    std::atomic<std::uint32_t> held_{0};
};

/// A message that was taken. Its slot goes back when this dies: with the last tensor in its memory.
class Message : public Owned {
  public:
    explicit Message(std::shared_ptr<Incoming> link) : link_(std::move(link)), descriptors_(link_->take()) {}
    Message(const Message&) = delete;
    Message& operator=(const Message&) = delete;
    ~Message() { give_back(); }

    /// Keep the slot for tensors in its memory; false when `most` slots of the link are held already.
    bool hold(std::uint32_t most) {
        if (link_->held() >= most) return false;
        ++link_->held();
        return held_ = true;
    }

    void give_back() {
        if (returned_ || !ours()) return;  // a forked child shares the slot, but it is not the child's to return
        returned_ = true;
        if (held_) --link_->held();
        link_->give_back(descriptors_[0].place);
    }

    const std::vector<Descriptor>& descriptors() const { return descriptors_; }
    std::uint32_t source() const { return link_->source(); }
    unsigned char* address() const { return link_->address(descriptors_[0].place); }
    std::uint64_t bytes() const { return std::max<std::uint64_t>(descriptors_[0].body_bytes, 1); }

  private:
    std::shared_ptr<Incoming> link_;  // keeps the memory mapped
    std::vector<Descriptor> descriptors_;
    bool held_ = false, returned_ = false;
};

}  // namespace ds_ext
