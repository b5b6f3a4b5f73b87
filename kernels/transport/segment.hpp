#pragma once

// Memory shared by one sender and one receiver, made by the receiver. kernels/README.md draws its layout. It contains
// no pointers and no locks. Each side checks the other's data before use.

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "descriptor.hpp"
#include "link.hpp"
#include "mapping.hpp"

namespace ds_ext {

inline constexpr std::uint64_t kRingEntries = kMaxInFlight;  // also the limit of slots not released
// Address space only: memory is allocated at the first use.
inline constexpr std::uint64_t kSegmentBytes = std::uint64_t{64} << 30;
inline constexpr std::uint64_t kCountersOffset = 4096, kRingOffset = 8192;
inline constexpr std::uint64_t kReturnsOffset = kRingOffset + kRingEntries * kDescriptorBytes;
inline constexpr std::uint64_t kSlotsOffset = 2 << 20;
inline constexpr std::uint64_t kReturnsEnd = kReturnsOffset + kRingEntries * sizeof(std::uint64_t);
static_assert(kReturnsEnd <= kSlotsOffset);

using Token = std::array<std::uint8_t, 16>;

/// Ranks of a link and the token of their job. Both sides know them from the process group.
struct Address {
    std::uint32_t source = 0;
    std::uint32_t destination = 0;
    Token job{};  // random, new for every transport
};

struct Superblock {
    std::array<char, 8> magic{'D', 'S', 'X', '-', 'S', 'H', 'M', '1'};
    std::uint32_t byte_order = 0x01020304;
    std::uint16_t major = 2, minor = 0;
    std::uint64_t bytes = kSegmentBytes;
    std::uint64_t slots_offset = kSlotsOffset;
    std::uint32_t ring_entries = kRingEntries;
    std::uint32_t source = 0, destination = 0;
    Token job{};
    std::uint32_t checksum = 0;
};
static_assert(sizeof(Superblock) == 64);

/// Cause of a side's failure, for the error of the other side. Written once.
struct Cause {
    std::atomic<std::uint32_t> bytes;
    char text[kCauseBytes];

    void set(const std::string& cause) {
        if (bytes.load(std::memory_order_relaxed) != 0) return;
        const auto count = std::min(cause.size(), kCauseBytes);
        std::memcpy(text, cause.data(), count);
        bytes.store(static_cast<std::uint32_t>(count), std::memory_order_release);
    }
};

/// Counters of both sides. Each cache line is written by one side only.
struct Counters {
    alignas(128) std::atomic<std::uint64_t> published;  // by the sender: total messages put into the ring
    std::atomic<std::uint32_t> sender_closed;
    alignas(128) std::atomic<std::uint64_t> taken;  // by the receiver: total messages read from the ring
    std::atomic<std::uint32_t> receiver_closed;
    alignas(128) std::atomic<std::uint64_t> returned;  // by the receiver: total slots put into the ring of returns
    alignas(128) Cause sender_cause;
    alignas(128) Cause receiver_cause;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(Counters) <= 4096);

/// Return how a side has ended, as the end of a sentence "rank 3 ..."; empty while it has not.
inline std::string end_reason_of(const Cause& cause, const std::atomic<std::uint32_t>& closed) {
    const auto bytes = cause.bytes.load(std::memory_order_acquire);
    if (bytes != 0) return "failed: " + printable(cause.text, bytes);
    return closed.load(std::memory_order_acquire) != 0 ? "has closed its transport" : "";
}

class Segment {
  public:
    /// Create a segment, at the receiver.
    static Segment create(const Address& address) {
        Segment segment(Mapping::create(kSegmentBytes));
        segment.memory_.commit(0, kReturnsEnd);
        Superblock block;
        block.source = address.source;
        block.destination = address.destination;
        block.job = address.job;
        block.checksum = checksum_of(block);
        std::memcpy(segment.memory_.address(), &block, sizeof block);
        return segment;
    }

    /// Attach to a segment, at the sender. Takes ownership of the file descriptor.
    static Segment attach(int descriptor, const Address& address) {
        Segment segment(Mapping::attach(descriptor, kSlotsOffset));
        Superblock block;
        std::memcpy(&block, segment.memory_.address(), sizeof block);
        const auto need = require<LinkError>;
        const Superblock ours;
        need(block.magic == ours.magic, "wrong magic number: not a segment of ds_ext");
        need(block.byte_order == ours.byte_order, "segment of another byte order");
        need(block.major == ours.major, "segment of another version of ds_ext");
        need(block.checksum == checksum_of(block), "wrong checksum of the superblock");
        need(block.bytes == segment.memory_.bytes() && block.slots_offset == kSlotsOffset &&
                 block.ring_entries == kRingEntries,
             "wrong sizes in the superblock");
        need(block.source == address.source && block.destination == address.destination && block.job == address.job,
             "segment of other ranks or another job");
        return segment;
    }

    Counters& counters() const { return *reinterpret_cast<Counters*>(memory_.address() + kCountersOffset); }
    unsigned char* entry(std::uint64_t number) const {
        return memory_.address() + kRingOffset + number % kRingEntries * kDescriptorBytes;
    }
    std::atomic<std::uint64_t>& returned(std::uint64_t number) const {
        auto* ring = reinterpret_cast<std::atomic<std::uint64_t>*>(memory_.address() + kReturnsOffset);
        return ring[number % kRingEntries];
    }
    unsigned char* slots() const { return memory_.address() + kSlotsOffset; }
    std::uint64_t slot_bytes() const { return memory_.bytes() - kSlotsOffset; }
    Mapping& memory() { return memory_; }

  private:
    explicit Segment(Mapping memory) : memory_(std::move(memory)) {}
    Mapping memory_;
};

}  // namespace ds_ext
