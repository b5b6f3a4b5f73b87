#pragma once

// Records that two endpoints of an RDMA link exchange beside descriptors; kernels/README.md draws them. Everything is
// checked before it is used: it was written by another process.

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

inline constexpr std::uint64_t kRdmaMessages = 256;  // of a link and direction whose slots are not released
// Blocks of 256 bytes that an end can have written without the other having looked: its messages, a receipt for the
// taking and one for the return of each of the other's, and a few notices.
inline constexpr std::uint64_t kRdmaBlocks = 4 * kRdmaMessages;
inline constexpr std::uint64_t kMaxSlabBytes = std::uint64_t{64} << 30;
inline constexpr unsigned kSlabShift = 40;  // a place is the number of the slab in the upper bits, then the offset

/// How to reach an end of a link; each end gives it to the other over the control connection.
struct Greeting {
    std::array<char, 8> magic{'D', 'S', 'X', '-', 'R', 'D', 'M', 'A'};
    std::uint32_t byte_order = 0x01020304;
    std::uint16_t major = 1, minor = 0;
    std::uint32_t source = 0, destination = 0;  // who wrote it, and for whom
    Token job{};
    std::uint32_t queue_pair = 0, first_packet = 0;
    verbs::Gid gid{};
    std::uint16_t lid = 0;
    std::uint8_t mtu = 0, link_layer = 0;
    std::uint32_t blocks = kRdmaBlocks;
    std::uint64_t inbox = 0, slab = 0, slab_bytes = 0;  // addresses; slab_bytes 0: the peer sends nothing
    std::uint32_t inbox_key = 0, slab_key = 0;
    std::array<std::uint8_t, 20> reserved{};
    std::uint32_t checksum = 0;
};
inline constexpr std::size_t kGreetingBytes = 128;
static_assert(sizeof(Greeting) == kGreetingBytes && offsetof(Greeting, checksum) == kGreetingBytes - 4);

inline std::string write_greeting(Greeting greeting) {
    std::string bytes(kGreetingBytes, '\0');
    std::memcpy(bytes.data(), &greeting, kGreetingBytes);
    greeting.checksum = checksum(reinterpret_cast<const unsigned char*>(bytes.data()), offsetof(Greeting, checksum));
    std::memcpy(bytes.data() + offsetof(Greeting, checksum), &greeting.checksum, sizeof greeting.checksum);
    return bytes;
}

/// The greeting in these bytes, which `source` wrote for `destination`; LinkError says what is wrong with it.
inline Greeting read_greeting(std::string_view bytes, const Address& expected) {
    const auto need = [](bool holds, const char* what) {
        if (!holds) throw LinkError(what);
    };
    const Greeting ours;
    need(bytes.size() == kGreetingBytes, "an RDMA greeting has 128 bytes");
    Greeting found;
    std::memcpy(&found, bytes.data(), kGreetingBytes);
    need(found.magic == ours.magic, "this is no RDMA greeting of ds_ext");
    need(found.byte_order == ours.byte_order, "the peer has another byte order");
    if (found.major != ours.major)
        throw LinkError("the peer speaks version " + std::to_string(found.major) + " of the RDMA protocol, this one " +
                        std::to_string(ours.major) + ": install the same ds_ext on all hosts");
    const auto* raw = reinterpret_cast<const unsigned char*>(bytes.data());
    need(found.checksum == checksum(raw, offsetof(Greeting, checksum)), "the RDMA greeting is damaged");
    need(found.source == expected.source && found.destination == expected.destination && found.job == expected.job,
         "the RDMA greeting belongs to other ranks or another job");
    need(found.blocks == kRdmaBlocks && found.slab_bytes <= kMaxSlabBytes && found.slab_bytes % kAlignment == 0 &&
             found.mtu >= 1 && found.mtu <= 5 && found.queue_pair < 1u << 24 && found.first_packet < 1u << 24,
         "the RDMA greeting has sizes that cannot be");
    return found;
}

enum class NoticeKind : std::uint16_t { receipt = 1, request = 2, slab = 3, refusal = 4, abort = 5, closed = 6 };

/// A block that is no descriptor.
struct Notice {
    std::uint32_t magic = kNoticeMagic;
    std::uint16_t version = 1;
    NoticeKind kind = NoticeKind::receipt;
    std::uint64_t taken = 0;           // receipt: messages of the peer that were taken, ever
    std::uint64_t address = 0;         // slab
    std::uint64_t bytes = 0;           // slab, and how large a want is
    std::uint32_t key = 0, count = 0;  // slab; of places or letters below
    union {
        std::array<std::uint64_t, 26> places{};  // receipt: slots that come back
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
    return shown(notice.text.data(), notice.count);
}

using Block = std::array<unsigned char, kDescriptorBytes>;

inline Block write_notice(Notice notice) {
    Block block;
    std::memcpy(block.data(), &notice, block.size());
    notice.checksum = checksum(block.data(), kChecksumOffset);
    std::memcpy(block.data() + kChecksumOffset, &notice.checksum, sizeof notice.checksum);
    return block;
}

inline bool is_notice(const Block& block) {
    std::uint32_t magic = 0;
    std::memcpy(&magic, block.data(), sizeof magic);
    return magic == Notice::kNoticeMagic;
}

inline Notice read_notice(const Block& block) {
    const auto need = [](bool holds, const char* what) {
        if (!holds) throw LinkError(what);
    };
    need(sealed(block.data()), "a notice of the peer is damaged");
    Notice found;
    std::memcpy(&found, block.data(), block.size());
    need(found.version == 1 && found.kind >= NoticeKind::receipt && found.kind <= NoticeKind::closed,
         "a notice was made by another version of ds_ext");
    const bool text = found.kind == NoticeKind::refusal || found.kind == NoticeKind::abort;
    need(found.count <= (text ? found.text.size() : found.places.size()), "a notice is longer than it can be");
    const bool sized = found.kind == NoticeKind::request || found.kind == NoticeKind::slab;
    need(!sized || (found.bytes > 0 && found.bytes <= kMaxSlabBytes && found.bytes % kAlignment == 0),
         "a notice is about a slab of a size that cannot be");
    return found;
}

}  // namespace ds_ext
