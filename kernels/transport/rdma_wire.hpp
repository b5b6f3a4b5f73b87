#pragma once

// Records that two endpoints of an RDMA link exchange besides descriptors. kernels/README.md draws them. All fields are
// checked before use, because another process wrote them.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "descriptor.hpp"
#include "errors.hpp"
#include "segment.hpp"
#include "verbs.hpp"

namespace ds_ext {

inline constexpr std::uint64_t kRdmaMessages = 256;  // limit of slots of a link that are not released
// Blocks that an endpoint can write before the peer polls: its messages, two receipts for each message of the peer
// (taken, released), and a few notices.
inline constexpr std::uint64_t kRdmaBlocks = 4 * kRdmaMessages;
inline constexpr std::uint64_t kMaxSlabBytes = std::uint64_t{64} << 30;
inline constexpr unsigned kSlabShift = 40;  // a place has the slab's number in the upper bits and the offset below

/// Return (number of the slab, offset in it) of a place.
inline std::pair<std::uint64_t, std::uint64_t> split_place(std::uint64_t place) {
    return {place >> kSlabShift, place & ((std::uint64_t{1} << kSlabShift) - 1)};
}

/// Address of a queue pair and its memory. Two ranks exchange greetings over the control connection.
struct Greeting {
    std::array<char, 8> magic{'D', 'S', 'X', '-', 'R', 'D', 'M', 'A'};
    std::uint32_t byte_order = 0x01020304;
    std::uint16_t major = 1, minor = 0;
    std::uint32_t source = 0, destination = 0;  // ranks
    Token job{};
    std::uint32_t queue_pair = 0, first_packet = 0;
    verbs::Gid gid{};
    std::uint16_t lid = 0;
    std::uint8_t mtu = 0, link_layer = 0;
    std::uint32_t blocks = kRdmaBlocks;
    std::uint64_t inbox = 0, slab = 0, slab_bytes = 0;  // addresses; slab_bytes 0: the peer does not send
    std::uint32_t inbox_key = 0, slab_key = 0;
    std::array<std::uint8_t, 20> reserved{};
    std::uint32_t checksum = 0;
};
inline constexpr std::size_t kGreetingBytes = 128;
static_assert(sizeof(Greeting) == kGreetingBytes && offsetof(Greeting, checksum) == kGreetingBytes - 4);

inline std::string write_greeting(Greeting greeting) {
    greeting.checksum = checksum_of(greeting);
    return std::string(reinterpret_cast<const char*>(&greeting), kGreetingBytes);
}

/// Return the greeting in these bytes, from the source to the destination of `expected`. LinkError: it is invalid.
inline Greeting read_greeting(std::string_view bytes, const Address& expected) {
    const auto need = require<LinkError>;
    const Greeting ours;
    need(bytes.size() == kGreetingBytes, "RDMA greeting: must have 128 bytes");
    Greeting found;
    std::memcpy(&found, bytes.data(), kGreetingBytes);
    need(found.magic == ours.magic, "RDMA greeting: wrong magic number");
    need(found.byte_order == ours.byte_order, "RDMA greeting: the peer has another byte order");
    if (found.major != ours.major)
        throw LinkError("RDMA protocol: this rank has version " + std::to_string(ours.major) + " (got version " +
                        std::to_string(found.major) + " from the peer). Install the same ds_ext on all hosts");
    need(found.checksum == checksum_of(found), "RDMA greeting: wrong checksum");
    need(found.source == expected.source && found.destination == expected.destination && found.job == expected.job,
         "RDMA greeting: of other ranks or another job");
    need(found.blocks == kRdmaBlocks && found.slab_bytes <= kMaxSlabBytes && found.slab_bytes % kAlignment == 0 &&
             found.mtu >= 1 && found.mtu <= 5 && found.queue_pair < 1u << 24 && found.first_packet < 1u << 24,
         "RDMA greeting: invalid sizes");
    return found;
}

enum class NoticeKind : std::uint16_t { receipt = 1, request = 2, slab = 3, refusal = 4, abort = 5, closed = 6 };

/// Block other than a descriptor.
struct Notice {
    std::uint32_t magic = kNoticeMagic;
    std::uint16_t version = 1;
    NoticeKind kind = NoticeKind::receipt;
    std::uint64_t taken = 0;           // receipt: total messages taken
    std::uint64_t address = 0;         // slab
    std::uint64_t bytes = 0;           // request, slab
    std::uint32_t key = 0, count = 0;  // key of the slab; number of places, or of characters of the text
    union {
        std::array<std::uint64_t, 26> places{};  // receipt: released slots
        std::array<char, 208> text;              // refusal, abort
    };
    std::uint32_t reserved = 0;
    std::uint32_t checksum = 0;

    static constexpr std::uint32_t kNoticeMagic = 0x314E5344;  // "DSN1" in memory
};
static_assert(sizeof(Notice) == kDescriptorBytes && offsetof(Notice, checksum) == kChecksumOffset);

inline void set_text(Notice& notice, std::string_view text) {
    notice.count = static_cast<std::uint32_t>(std::min(text.size(), notice.text.size()));
    std::memcpy(notice.text.data(), text.data(), notice.count);
}
inline std::string text_of(const Notice& notice) {
    return printable(notice.text.data(), notice.count);
}

using Block = std::array<unsigned char, kDescriptorBytes>;

inline Block write_notice(Notice notice) {
    Block block;
    notice.checksum = checksum_of(notice);
    std::memcpy(block.data(), &notice, block.size());
    return block;
}

inline bool is_notice(const Block& block) {
    std::uint32_t magic = 0;
    std::memcpy(&magic, block.data(), sizeof magic);
    return magic == Notice::kNoticeMagic;
}

inline Notice read_notice(const Block& block) {
    const auto need = require<LinkError>;
    need(sealed(block.data()), "notice: wrong checksum");
    Notice found;
    std::memcpy(&found, block.data(), block.size());
    need(found.version == 1 && found.kind >= NoticeKind::receipt && found.kind <= NoticeKind::closed,
         "notice of another version of ds_ext");
    const bool text = found.kind == NoticeKind::refusal || found.kind == NoticeKind::abort;
    need(found.count <= (text ? found.text.size() : found.places.size()), "notice too long");
    const bool sized = found.kind == NoticeKind::request || found.kind == NoticeKind::slab;
    need(!sized || (found.bytes > 0 && found.bytes <= kMaxSlabBytes && found.bytes % kAlignment == 0),
         "notice: invalid size of a slab");
    return found;
}

}  // namespace ds_ext
