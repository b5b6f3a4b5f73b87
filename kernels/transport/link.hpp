#pragma once

// Endpoints of a link between ranks. Each kind of link derives both. This file and message.hpp hold the common part:
// descriptors, sequence numbers, the send window, and messages that keep their memory.

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

inline constexpr std::uint64_t kMaxInFlight = 4096;  // messages of a link that were sent and not taken

/// Message at the receiver: checked descriptors and the body.
struct Arrival {
    std::vector<Descriptor> descriptors;
    unsigned char* address = nullptr;  // of the body, aligned to 64 bytes
    std::shared_ptr<void> memory;      // owner of the body, if it is not the link
};

/// Receiving endpoint. One thread takes messages. Any thread may release their memory.
class Incoming : public Owned {
  public:
    explicit Incoming(std::uint32_t source) : source_(source) {}
    Incoming(const Incoming&) = delete;
    Incoming& operator=(const Incoming&) = delete;
    virtual ~Incoming() = default;

    std::uint32_t source() const { return source_; }

    /// Return whether take() has a message or an error. Polled by a waiting rank: no system call.
    virtual bool has_message() const = 0;
    /// Return the next message, after has_message(). DescriptorError or LinkError: it is invalid, and no message was
    /// taken.
    virtual Arrival take() = 0;
    /// Free the body of a message.
    virtual void release(const Arrival& arrival) = 0;
    /// Return why no more messages will arrive, as the end of a sentence "rank 3 ...". Empty while messages may arrive
    /// or wait to be taken.
    virtual std::string end_reason() const = 0;
    /// Send the cause of this rank's failure to the sender. Never throws or waits.
    virtual void abort(const std::string& cause) = 0;
    /// Notify the sender that this endpoint takes no more messages. Bodies in use stay valid.
    virtual void close() = 0;

    /// Number of bodies in use by tensors of the receiver.
    std::atomic<std::uint32_t>& held() { return held_; }

  protected:
    /// Read the descriptors of a message whose first one is `first`. Its body is at `place` in `room` bytes of memory;
    /// its further descriptors follow the body.
    static Arrival arrival_at(const Descriptor& first, unsigned char* memory, std::uint64_t room, std::uint64_t place) {
        const std::uint64_t table = (std::uint64_t{first.count} - 1) * kDescriptorBytes;
        require<DescriptorError>(place % kAlignment == 0 && place < room, "slot outside of the shared memory");
        require<DescriptorError>(first.body_bytes <= room && table <= room && first.body_bytes + table <= room - place,
                                 "message exceeds the shared memory");
        Arrival arrival;
        arrival.address = memory + place;
        arrival.descriptors.push_back(first);
        for (std::uint32_t i = 1; i < first.count; ++i)
            arrival.descriptors.push_back(unpack(arrival.address + first.body_bytes + (i - 1) * kDescriptorBytes));
        return arrival;
    }

  private:
    std::uint32_t source_;
    std::atomic<std::uint32_t> held_{0};
};

/// Memory of one message to send.
struct Slot {
    std::uint64_t place = 0;  // in a segment or slab
    std::uint64_t bytes = 0;  // of the body and the further descriptors
    unsigned char* address = nullptr;
    std::vector<Descriptor> descriptors;
};

/// Sending endpoint. One thread uses it.
class Outgoing : public Owned {
  public:
    /// `window`: limit of unreceived bytes. A single message may be larger.
    explicit Outgoing(std::uint64_t window) : window_(window) {}
    Outgoing(const Outgoing&) = delete;
    Outgoing& operator=(const Outgoing&) = delete;
    virtual ~Outgoing() = default;

    /// Return a slot for a message of these shapes; nothing without a link credit.
    std::optional<Slot> reserve(std::uint32_t tag, const std::vector<Piece>& pieces) {
        refuse_fork();
        Slot slot;
        slot.descriptors = describe(tag, pieces);
        const std::uint64_t table = (pieces.size() - 1) * kDescriptorBytes;
        slot.bytes = aligned(std::max<std::uint64_t>(slot.descriptors[0].body_bytes + table, 1));
        if (slot.bytes > max_bytes())
            throw DescriptorError("message: at most " + std::to_string(max_bytes()) + " bytes fit (got " +
                                  std::to_string(slot.bytes) + ")");
        update_taken();
        const bool full = in_flight_.size() == kMaxInFlight;
        if (full || (in_flight_bytes_ > 0 && in_flight_bytes_ + slot.bytes > window_) || !allocate(slot))
            return std::nullopt;
        return slot;
    }

    /// Copy the tensors and publish the message. The caller may change the tensors afterwards.
    void transmit(Slot& slot, const std::vector<Piece>& pieces) {
        refuse_fork();
        numbers_.assign(slot.descriptors);
        put(slot, pieces);
        in_flight_.emplace_back(slot.descriptors[0].tag, slot.bytes);
        in_flight_bytes_ += slot.bytes;
    }

    struct InFlight {
        std::uint64_t messages;  // not taken by the receiver
        std::uint32_t tag;       // of the oldest one
        std::uint64_t slots;     // not released by the receiver
    };
    InFlight in_flight() {
        update_taken();
        return {in_flight_.size(), in_flight_.empty() ? 0 : in_flight_.front().first, unreleased()};
    }

    /// Return whether the receiver has taken or released messages since the last reserve() or in_flight(). No system
    /// call.
    virtual bool has_update() const = 0;
    /// Return why the receiver takes no more messages; see Incoming.
    virtual std::string end_reason() const = 0;
    virtual void abort(const std::string& cause) = 0;
    /// Notify the receiver that no more messages follow.
    virtual void close() = 0;

  protected:
    /// Maximum size of a message with its further descriptors.
    virtual std::uint64_t max_bytes() const { return kMaxBodyBytes; }
    /// Allocate the memory of a slot. Returns false if none is free.
    virtual bool allocate(Slot& slot) = 0;
    /// Return the number of slots not released; for links without slots, the number of messages in flight.
    virtual std::uint64_t unreleased() const { return in_flight_.size(); }
    /// Return the total number of messages taken by the receiver. LinkError: its count is invalid.
    virtual std::uint64_t taken() = 0;
    /// Copy the tensors and publish the slot, whose descriptors are complete.
    virtual void put(Slot& slot, const std::vector<Piece>& pieces) = 0;

    /// Write the tensors and the further descriptors to a slot with an address.
    static void fill(const Slot& slot, const std::vector<Piece>& pieces) {
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            const Descriptor& d = slot.descriptors[i];
            if (d.nbytes > 0) Copier::copy(slot.address + d.offset, pieces[i].address, d.nbytes);
        }
        unsigned char* table = slot.address + slot.descriptors[0].body_bytes;
        for (std::size_t i = 1; i < slot.descriptors.size(); ++i)
            pack(slot.descriptors[i], table + (i - 1) * kDescriptorBytes);
    }

    /// Total number of messages sent.
    std::uint64_t published() const { return numbers_.assigned(); }

  private:
    void update_taken() {
        const std::uint64_t taken_now = taken();
        require<LinkError>(taken_now >= taken_ && taken_now <= published(), "wrong message count of the receiver");
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

/// Message that was taken. The destructor releases its memory, after the last tensor in it.
class Message : public Owned {
  public:
    explicit Message(std::shared_ptr<Incoming> link) : link_(std::move(link)), arrival_(link_->take()) {}
    Message(const Message&) = delete;
    Message& operator=(const Message&) = delete;
    ~Message() { release(); }

    /// Keep the memory for the tensors in it. Returns false if `max_held` messages of the link are held already.
    bool hold(std::uint32_t max_held) {
        if (link_->held() >= max_held) return false;
        ++link_->held();
        return held_ = true;
    }

    void release() {
        // A forked child shares the memory and must not return it.
        if (released_ || !ours()) return;
        released_ = true;
        if (held_) --link_->held();
        link_->release(arrival_);
        arrival_.memory.reset();
    }

    const std::vector<Descriptor>& descriptors() const { return arrival_.descriptors; }
    std::uint32_t source() const { return link_->source(); }
    unsigned char* address() const { return arrival_.address; }
    std::uint64_t bytes() const { return std::max<std::uint64_t>(arrival_.descriptors[0].body_bytes, 1); }

  private:
    std::shared_ptr<Incoming> link_;  // keeps the link's memory
    Arrival arrival_;
    bool held_ = false, released_ = false;
};

}  // namespace ds_ext
