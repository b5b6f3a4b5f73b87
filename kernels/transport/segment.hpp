#pragma once

// The memory that one sender and one receiver share; kernels/README.md draws its layout. The receiver makes it. Nothing
// in it is a pointer or a lock, and neither side believes what the other wrote before it has checked it.

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "descriptor.hpp"
#include "link.hpp"
#include "mapping.hpp"

namespace ds_ext {

inline constexpr std::uint64_t kRingEntries = kMaxInFlight;  // also of slots not released
// Address space only: memory is taken when it is used for the first time.
inline constexpr std::uint64_t kSegmentBytes = std::uint64_t{64} << 30;
inline constexpr std::uint64_t kCountersOffset = 4096, kRingOffset = 8192;
inline constexpr std::uint64_t kReturnsOffset = kRingOffset + kRingEntries * kDescriptorBytes;
inline constexpr std::uint64_t kSlotsOffset = 2 << 20;
inline constexpr std::uint64_t kReturnsEnd = kReturnsOffset + kRingEntries * sizeof(std::uint64_t);
static_assert(kReturnsEnd <= kSlotsOffset);

using Token = std::array<std::uint8_t, 16>;

/// Who meets whom in a segment; both sides know it from elsewhere.
struct Address {
    std::uint32_t source = 0;
    std::uint32_t destination = 0;
    Token job{};  // random, another one for every transport that is made
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

/// Why a side fails, for the other to show. Written once.
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

/// What both sides write, each line by one side only.
struct Counters {
    alignas(128) std::atomic<std::uint64_t> published;  // sender: messages in the ring, ever
    std::atomic<std::uint32_t> sender_closed;
    alignas(128) std::atomic<std::uint64_t> taken;  // receiver: messages read from the ring, ever
    std::atomic<std::uint32_t> receiver_closed;
    alignas(128) std::atomic<std::uint64_t> returned;  // receiver: slots in the ring of returns, ever
    alignas(128) Cause sender_cause;
    alignas(128) Cause receiver_cause;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(Counters) <= 4096);

/// Why a side sends and takes nothing more, as words that follow "rank 3 ..."; empty while it does.
inline std::string reason_of(const Cause& cause, const std::atomic<std::uint32_t>& closed) {
    const auto bytes = cause.bytes.load(std::memory_order_acquire);
    if (bytes != 0) return "failed: " + shown(cause.text, bytes);
    return closed.load(std::memory_order_acquire) != 0 ? "has closed its transport" : "";
}

class Segment {
  public:
    /// The receiver's side: a new segment.
    static Segment create(const Address& address) {
        Segment made(Mapping::create(kSegmentBytes));
        made.memory_.commit(0, kReturnsEnd);
        Superblock block;
        block.source = address.source;
        block.destination = address.destination;
        block.job = address.job;
        block.checksum = checksum(reinterpret_cast<const unsigned char*>(&block), offsetof(Superblock, checksum));
        std::memcpy(made.memory_.address(), &block, sizeof block);
        return made;
    }

    /// The sender's side, from a descriptor that the receiver passed, which this takes over.
    static Segment attach(int descriptor, const Address& address) {
        Segment found(Mapping::attach(descriptor, kSlotsOffset));
        Superblock block;
        std::memcpy(&block, found.memory_.address(), sizeof block);
        const auto need = [](bool holds, const char* what) {
            if (!holds) throw LinkError(what);
        };
        const Superblock ours;
        need(block.magic == ours.magic, "this memory is no segment of ds_ext");
        need(block.byte_order == ours.byte_order, "the segment has another byte order");
        need(block.major == ours.major, "the segment was made by another version of ds_ext");
        const auto* bytes = reinterpret_cast<const unsigned char*>(&block);
        need(block.checksum == checksum(bytes, offsetof(Superblock, checksum)), "the superblock is damaged");
        need(block.bytes == found.memory_.bytes() && block.slots_offset == kSlotsOffset &&
                 block.ring_entries == kRingEntries,
             "the segment has other sizes than its superblock says");
        need(block.source == address.source && block.destination == address.destination && block.job == address.job,
             "the segment belongs to other ranks or another job");
        return found;
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
