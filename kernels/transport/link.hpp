#pragma once

// The two endpoints of a link between ranks. Each kind of link derives both; what all kinds share (descriptors,
// sequence numbers, the window, messages that hold their memory) is here and in message.hpp.

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "copier.hpp"
#include "forks.hpp"
#include "message.hpp"

namespace ds_ext {

inline constexpr std::uint64_t kMaxInFlight = 4096;  // messages of a link that are sent and not taken

/// A message at the receiver: its descriptors, all of them checked, and its body.
struct Arrival {
    std::vector<Descriptor> descriptors;
    unsigned char* address = nullptr;  // of the body, aligned to 64 bytes
    std::shared_ptr<void> memory;      // what keeps the body, where that is not the link's own to manage
};

/// Receiving endpoint. One thread takes messages; any thread may release their memory.
class Incoming : public Owned {
  public:
    explicit Incoming(std::uint32_t source) : source_(source) {}
    Incoming(const Incoming&) = delete;
    Incoming& operator=(const Incoming&) = delete;
    virtual ~Incoming() = default;

    std::uint32_t source() const { return source_; }

    /// Whether take() has a message or an error. Called in every poll of a waiting rank: no system call.
    virtual bool has_message() const = 0;
    /// The next message; has_message() holds. DescriptorError or LinkError: it is invalid, and nothing is taken.
    virtual Arrival take() = 0;
    /// The body is not used any more.
    virtual void release(const Arrival& arrival) = 0;
    /// Why no more messages will come, as words that follow "rank 3 ..."; empty while they may, or while some are
    /// here.
    virtual std::string end_reason() const = 0;
    /// Tell the sender why this rank fails. Never throws and never waits.
    virtual void abort(const std::string& cause) = 0;
    /// Tell the sender that nothing more is taken. Bodies in use stay.
    virtual void close() = 0;

    /// Bodies that tensors of the receiver lie in.
    std::atomic<std::uint32_t>& held() { return held_; }

  private:
    std::uint32_t source_;
    std::atomic<std::uint32_t> held_{0};
};

/// Memory of one message to be sent.
struct Slot {
    std::uint64_t place = 0;  // where the kind of link needs it
    std::uint64_t bytes = 0;  // of the body and the further descriptors
    unsigned char* address = nullptr;
    std::vector<Descriptor> descriptors;
};

/// Sending endpoint. One thread uses it.
class Outgoing : public Owned {
  public:
    /// `window`: unreceived bytes from which on there is no room for another message, unless it is the only one.
    explicit Outgoing(std::uint64_t window) : window_(window) {}
    Outgoing(const Outgoing&) = delete;
    Outgoing& operator=(const Outgoing&) = delete;
    virtual ~Outgoing() = default;

    /// A slot for a message of these shapes; nothing while there is no room.
    std::optional<Slot> reserve(std::uint32_t tag, const std::vector<Piece>& pieces) {
        refuse_fork();
        Slot slot;
        slot.descriptors = describe(tag, pieces);
        const std::uint64_t table = (pieces.size() - 1) * kDescriptorBytes;
        slot.bytes = aligned(std::max<std::uint64_t>(slot.descriptors[0].body_bytes + table, 1));
        if (slot.bytes > most_bytes())
            throw DescriptorError("a message of " + std::to_string(slot.bytes) + " bytes; the link carries " +
                                  std::to_string(most_bytes()));
        update_taken();
        const bool full = in_flight_.size() == kMaxInFlight;
        if (full || (in_flight_bytes_ > 0 && in_flight_bytes_ + slot.bytes > window_) || !allocate(slot))
            return std::nullopt;
        return slot;
    }

    /// Copy the tensors and hand the message over; the tensors are the caller's again when this returns.
    void transmit(Slot& slot, const std::vector<Piece>& pieces) {
        refuse_fork();
        numbers_.assign(slot.descriptors);
        put(slot, pieces);
        in_flight_.emplace_back(slot.descriptors[0].tag, slot.bytes);
        in_flight_bytes_ += slot.bytes;
    }

    struct InFlight {
        std::uint64_t messages;  // that the receiver has not taken
        std::uint32_t tag;       // of the oldest of them
        std::uint64_t slots;     // that the receiver has not released, theirs included
    };
    InFlight in_flight() {
        update_taken();
        return {in_flight_.size(), in_flight_.empty() ? 0 : in_flight_.front().first, unreleased()};
    }

    /// Whether the receiver has taken or released messages since the last reserve() or in_flight(). No system call.
    virtual bool has_update() const = 0;
    /// As of Incoming: why the receiver takes nothing any more.
    virtual std::string end_reason() const = 0;
    virtual void abort(const std::string& cause) = 0;
    /// Tell the receiver that nothing more comes.
    virtual void close() = 0;

  protected:
    /// The largest message, with its further descriptors.
    virtual std::uint64_t most_bytes() const { return kMaxBodyBytes; }
    /// Allocate the memory of a slot; false while there is none.
    virtual bool allocate(Slot& slot) = 0;
    /// Slots that are not released; for kinds without slots, the messages in flight.
    virtual std::uint64_t unreleased() const { return in_flight_.size(); }
    /// Messages that the receiver has taken, ever. LinkError when its count cannot be right.
    virtual std::uint64_t taken() = 0;
    /// Copy the tensors, then hand the slot over: its descriptors are complete.
    virtual void put(Slot& slot, const std::vector<Piece>& pieces) = 0;

    /// Write the tensors and the further descriptors to a slot that has an address.
    static void fill(const Slot& slot, const std::vector<Piece>& pieces) {
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            const Descriptor& d = slot.descriptors[i];
            if (d.nbytes > 0) Copier::copy(slot.address + d.offset, pieces[i].address, d.nbytes);
        }
        unsigned char* table = slot.address + slot.descriptors[0].body_bytes;
        for (std::size_t i = 1; i < slot.descriptors.size(); ++i)
            pack(slot.descriptors[i], table + (i - 1) * kDescriptorBytes);
    }

    /// Messages sent, ever.
    std::uint64_t published() const { return numbers_.given(); }

  private:
    void update_taken() {
        const std::uint64_t taken_now = taken();
        if (taken_now < taken_ || taken_now > published()) throw LinkError("the receiver's count of messages is wrong");
        for (; taken_ != taken_now; ++taken_) {
            in_flight_bytes_ -= in_flight_.front().second;
            in_flight_.pop_front();
        }
    }

    std::uint64_t window_;
    SequenceNumbers numbers_;
    std::uint64_t taken_ = 0, in_flight_bytes_ = 0;
    std::deque<std::pair<std::uint32_t, std::uint64_t>> in_flight_;  // (tag, bytes), oldest first
};

/// A message that was taken. Its memory goes back when this dies: with the last tensor that lies in it.
class Message : public Owned {
  public:
    explicit Message(std::shared_ptr<Incoming> link) : link_(std::move(link)), arrival_(link_->take()) {}
    Message(const Message&) = delete;
    Message& operator=(const Message&) = delete;
    ~Message() { release(); }

    /// Keep the memory for tensors that lie in it; false when `most` messages of the link are held already.
    bool hold(std::uint32_t most) {
        if (link_->held() >= most) return false;
        ++link_->held();
        return held_ = true;
    }

    void release() {
        // A forked child shares the memory, but it is not the child's to return.
        if (returned_ || !ours()) return;
        returned_ = true;
        if (held_) --link_->held();
        link_->release(arrival_);
        arrival_.memory.reset();
    }

    const std::vector<Descriptor>& descriptors() const { return arrival_.descriptors; }
    std::uint32_t source() const { return link_->source(); }
    unsigned char* address() const { return arrival_.address; }
    std::uint64_t bytes() const { return std::max<std::uint64_t>(arrival_.descriptors[0].body_bytes, 1); }

  private:
    std::shared_ptr<Incoming> link_;  // keeps the memory where that is the link's
    Arrival arrival_;
    bool held_ = false, returned_ = false;
};

}  // namespace ds_ext
